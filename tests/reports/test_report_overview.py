"""The first screen: each claim and model as a small figure with its verdict; models in order; checkpoints side by side."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import synthetic
from matplotlib.colors import to_hex
from matplotlib.patches import Circle, Rectangle

from needlework.analysis.frame import Frame, architecture_class
from needlework.analysis.reader import StoredModel, families, in_order, load
from needlework.analysis.verdicts import VerdictPoint, verdicts
from needlework.reports import picture_files, report, svg
from needlework.reports.browser import Browser
from needlework.reports.figures import make_figure
from needlework.reports.page import _environment
from needlework.reports.panels import Dots, HeatMap, Lines, merge_checkpoints, signed_limit
from needlework.reports.svg import Overview, label_position, outcome, overview, zone
from needlework.results import Store
from needlework.stats import Estimate, gain, wilson


@pytest.fixture(scope="module")
def frame(run: Path) -> Frame:
    return load([run])


@pytest.fixture(scope="module")
def seen(frame: Frame) -> Overview:
    return overview(frame, verdicts(frame))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two checkpoints of one model: the second answers every seventh needle wrong that the first finds."""
    folder = tmp_path_factory.mktemp("pair")
    runs = [synthetic.write(folder / name, ("tiny-griffin",), per_cell=1) for name in ("a", "b")]
    store = Store(runs[1])
    about = store.meta("models")
    about["tiny-griffin"]["weights"] = "retrained"
    store.set_meta("models", about)
    store.set_meta("plan", {"name": "again", "about": "The same <once> more."})
    store.db.execute("UPDATE trials SET scores = json_set(scores, '$.correct', 0.0) WHERE rowid % 7 = 0 AND mode != 'perplexity'")
    store.close()
    return runs[0], runs[1]


# The picture.


def test_every_number_of_a_verdict_is_drawn_with_its_line(seen: Overview, page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    top = text.split('<table class="overview"')[1].split("</table>")[0]
    drawn = [p for block in seen.blocks for verdict in block.verdicts.values() for p in verdict.points]
    assert len(drawn) > 20
    assert top.count('class="bar"') == top.count('class="dot"') == len(drawn)
    assert top.count('class="limit"') == sum(p.line is not None and p.bound != "chance" for p in drawn)
    assert top.count('class="chance"') == sum(p.bound == "chance" for p in drawn)
    for point in drawn:
        assert point.estimate.text() in top, "as text, for those who do not see the figure"
    assert len(re.findall(r"<small>n = [\d,]+</small>", top)) == top.count('class="word"')


def test_the_first_figure_stands_before_any_other_table_or_sentence(page: Path) -> None:
    main = page.read_text(encoding="utf-8").split("<main>")[1]
    assert main.index("<svg") < main.index('class="claim"') < main.index('id="heads"') < main.index('id="models"')
    assert main.index("<table") == main.index('<table class="overview"')


def test_a_verdict_says_why_with_its_rules_number(seen: Overview, page: Path) -> None:
    text = page.read_text(encoding="utf-8").replace("\u00a0", " ")
    for block in seen.blocks:
        for verdict in block.verdicts.values():
            if verdict.points:
                assert verdict.why.startswith(f"rule {block.rule.number}: ")
                assert f'<p class="why">{verdict.why}</p>'.replace("'", "&#39;") in text


def test_three_words_have_three_looks(seen: Overview) -> None:
    block = next(block for block in seen.blocks if block.rule.claim == "memory")
    judged = block.verdicts["tiny-griffin"]
    macros = _environment().get_template("macros.html").module
    looks = {word: str(macros.chip(replace(judged, word=word))) for word in ("not run", "does not apply", "not testable")}
    kinds = {word: re.search(r'class="chip ([\w-]+)"', look)[1] for word, look in looks.items()}  # type: ignore[index]
    assert len(set(kinds.values())) == 3
    css = (Path(picture_files.__file__).parent / "templates" / "page.css").read_text(encoding="utf-8")
    rules = [re.search(rf"\.chip\.{kind} {{(.*?)}}", css) for kind in kinds.values()]
    assert len({rule[1] for rule in rules if rule}) == 3


def test_a_model_that_no_claim_is_about_is_said_once(seen: Overview) -> None:
    assert [model for model in seen.models if seen.is_outside_all_claims(model)] == ["tiny-mamba"]
    made = str(_environment().get_template("overview.html").module.table(seen))
    assert made.count(">does not apply<") == 1
    assert f'rowspan="{len(seen.blocks)}"' in made


def test_numbers_of_heads_are_said_in_their_strip(seen: Overview) -> None:
    block = next(block for block in seen.blocks if block.rule.claim == "few_heads")
    strip = block.strips[0]
    assert strip.label == "few heads by entropy"
    assert [strip.note(model) for model in ("tiny-griffin", "tiny-jamba", "tiny-mamba")] == ["1 of 4", "1 of 8", ""]


@pytest.mark.parametrize(
    "hits,line,bound,where,came",
    [
        (0, 0.05, "at most", (0.0, 0.05), "yes"),
        (50, 0.05, "at most", (0.0, 0.05), "no"),
        (4, 0.05, "at most", (0.0, 0.05), "maybe"),
        (100, 0.95, "at least", (0.95, 1.0), "yes"),
        (10, 0.95, "at least", (0.95, 1.0), "no"),
        (30, 0.25, "chance", None, "plain"),
        (30, None, "", None, "plain"),
    ],
)
def test_colour_and_zone_say_how_an_interval_lies(
    hits: int, line: float | None, bound: str, where: tuple[float, float] | None, came: str
) -> None:
    point = VerdictPoint("p", wilson(hits, 100), line, bound)  # type: ignore[arg-type]
    assert (zone(point), outcome(point)) == (where, came)
    assert not point.estimate.low <= label_position(point) <= point.estimate.high


def test_a_claim_that_nobody_was_asked_about_is_no_block(tmp_path: Path) -> None:
    run = synthetic.write(tmp_path, ("tiny-jamba",), per_cell=1)
    store = Store(run)
    store.db.execute("DELETE FROM trials WHERE intervention LIKE '%swap%'")
    store.close()
    frame = load([run])
    seen = overview(frame, verdicts(frame))
    assert [rule.claim for rule in seen.not_run] == ["memory"]
    assert "memory" not in [block.rule.claim for block in seen.blocks]


def test_the_finding_is_a_picture_file_too(seen: Overview, tmp_path: Path) -> None:
    picture_files.save_figures([], tmp_path, seen)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["finding.png", "finding.svg"]
    drawn = (tmp_path / "finding.svg").read_text(encoding="utf-8")
    assert all(model in drawn for model in seen.models)
    assert all(block.rule.title in drawn for block in seen.blocks)


@pytest.mark.slow
def test_files_show_what_the_page_draws_in_its_light_colours(frame: Frame) -> None:
    """A file is the page's drawing, rendered: every dot, cell and word, in the colours of the style sheet."""
    for name in ("heads", "exposure", "dissociation"):
        figure = make_figure(name, frame, Browser(frame))
        (axes,) = picture_files.render_svg(svg.draw_figure(figure)).axes
        marks = [mark for panel in figure.panels for mark in panel.marks()]
        shapes = Rectangle if name == "exposure" else Circle
        assert sum(isinstance(patch, shapes) for patch in axes.patches) == len(marks)
        texts = {text.get_text() for text in axes.texts}
        assert {label for panel in figure.panels for label, _, _ in panel.legend_items()} <= texts
        assert {f"{panel.group}: {panel.title}" for panel in figure.panels if panel.title != panel.group} <= texts
    colors = {to_hex(patch.get_facecolor()) for patch in axes.patches if isinstance(patch, Circle)}
    assert colors == {picture_files.light_colors()[name] for name in ("c1", "c4", "c5")}


# Order, plan.


def test_hybrids_stand_before_controls_and_families_together() -> None:
    about = {name: {"anatomy": synthetic.anatomy(name)} for name in ("tiny-mamba", "tiny-griffin", "tiny-jamba")}
    models = {**about, "other": {}, "griffin 2": about["tiny-griffin"]}
    assert [architecture_class(synthetic.anatomy(name)) for name in about] == ["recurrent only", "hybrid", "hybrid"]
    ordered = in_order(models, [["tiny-griffin", "griffin 2"]])
    assert list(ordered) == ["tiny-griffin", "griffin 2", "tiny-jamba", "tiny-mamba", "other"]


def test_families_are_of_one_name_or_of_one_anatomy() -> None:
    def one(name: str, made: str, place: str = "a") -> StoredModel:
        return StoredModel(Path(place), name, {"anatomy": synthetic.anatomy(made)})

    models = [one("x", "tiny-griffin"), one("y", "tiny-griffin"), one("z", "tiny-jamba"), one("z", "tiny-mamba", "b")]
    assert families(models, ["x", "y", "z", "z (b)"]) == [["x", "y"], ["z", "z (b)"]]
    assert families(models[1:3], ["y", "z"]) == []
    assert families([*models[:1], *models[:1]], ["x", "x"]) == [], "one model in two runs"


@pytest.mark.slow
def test_the_plans_name_stands_on_top_and_what_it_is_about_is_folded(pair: tuple[Path, Path], tmp_path: Path) -> None:
    text = report(list(pair), tmp_path, pictures=False).read_text(encoding="utf-8")
    head, rest = text.split("<nav")
    assert "needlework report · again" in head
    assert "The same &lt;once&gt; more." not in head
    assert "The same &lt;once&gt; more." in rest.split("<details><summary>About the trials</summary>")[1].split("</details>")[0]


# Checkpoints side by side.


def test_checkpoints_share_panels_with_a_paired_difference(pair: tuple[Path, Path]) -> None:
    frame = load(list(pair))
    assert frame.families == [["tiny-griffin", "tiny-griffin (b)"]]
    browser = Browser(frame)
    figure = merge_checkpoints(frame, browser, make_figure("heads", frame, browser))
    name = "Retrieval: by entropy, every position"
    together = next(p for p in figure.panels if p.title == name)
    apart = next(p for p in figure.panels if p.title == f"{name}: difference")
    assert isinstance(together, Lines)
    assert isinstance(apart, Lines)
    assert [series.label for series in together.series] == ["tiny-griffin", "tiny-griffin (b)"]
    assert [series.label for series in apart.series] == ["tiny-griffin (b) less tiny-griffin"]
    for point in apart.series[0].points:
        a, b = (next(p for p in series.points if p.x == point.x) for series in together.series)
        assert point.y.value == pytest.approx(b.y.value - a.y.value)
        assert point.y.low <= point.y.value <= point.y.high
    whole = next(point for point in apart.series[0].points if point.x == 1.0)
    keys = [next(p.key for p in series.points if p.x == 1.0) for series in together.series]
    rows = [browser.cells[key][1] for key in keys]
    rows = [r[frame.column("sample", r).argsort()] for r in rows]
    before, after = (frame.values("correct", r) for r in rows)
    assert whole.y == gain(after, before, frame.column("cluster", rows[0])), "paired, for the samples are the same"
    assert "points [" in apart.table().rows[-1][1]


def test_other_samples_are_not_paired(pair: tuple[Path, Path], tmp_path: Path) -> None:
    store = Store(pair[1])
    rows = [replace(row, sample=f"new {row.sample}") for row in store.rows()]
    other = Store(tmp_path, create=True)
    for name in ("models", "semantics_version", "scores_version"):
        other.set_meta(name, store.meta(name))
    other.add(rows)
    other.close()
    store.close()
    frame = load([pair[0], tmp_path])
    browser = Browser(frame)
    figure = merge_checkpoints(frame, browser, make_figure("heads", frame, browser))
    together, apart = figure.panels[:2]
    assert isinstance(together, Lines)
    assert isinstance(apart, Lines)
    a, b = (series.points[-1].y for series in together.series)
    point = apart.series[0].points[-1].y
    assert point.high - point.value == pytest.approx(((b.high - b.value) ** 2 + (a.value - a.low) ** 2) ** 0.5), "Newcombe's"


def test_dots_and_maps_of_checkpoints_have_differences_too(pair: tuple[Path, Path]) -> None:
    frame = load(list(pair))
    browser = Browser(frame)
    dots = merge_checkpoints(frame, browser, make_figure("dissociation", frame, browser)).panels
    assert [(type(p), p.signed) for p in dots] == [(Dots, False), (Dots, True)]
    assert isinstance(dots[0], Dots)
    assert [dot.follows for dot in dots[0].dots[:4]] == [False, True, False, True]
    assert [dots[0].short_label(dot) for dot in dots[0].dots[:2]] == ["attention off: retrieval", ""]
    maps = merge_checkpoints(frame, browser, make_figure("exposure", frame, browser)).panels
    assert [(type(p), p.signed) for p in maps] == [(HeatMap, False), (HeatMap, False), (HeatMap, True)]
    a, b, less = (p.cells[0][0].y.value for p in maps)  # type: ignore[union-attr]
    assert less == pytest.approx(b - a)


def test_a_difference_is_said_in_points_on_an_axis_that_holds_it() -> None:
    low = Dots("m", "t", "x", [], signed=True)
    assert low.format(Estimate(-0.125, -0.2, -0.05, 80)) == "-12.5 points [-20, -5], n = 80"
    assert signed_limit(low) == 0.1


def test_models_of_no_family_keep_their_panels(frame: Frame) -> None:
    assert frame.families == []
    figure = make_figure("heads", frame, Browser(frame))
    assert merge_checkpoints(frame, Browser(frame), figure) == replace(figure, panels=list(figure.panels))
