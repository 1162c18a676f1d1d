"""Frames, evidence and figures against plain counting over the store's rows."""

from __future__ import annotations

import math
import re
import sqlite3
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import pytest
import synthetic

from needlework import stats
from needlework.analysis.conditions import FEW_HEADS, place
from needlework.analysis.evidence import collect, helped_by_reading_twice
from needlework.analysis.frame import Frame
from needlework.analysis.model_trials import ModelTrials
from needlework.analysis.reader import load
from needlework.interventions import KeepHeads
from needlework.reports import curves, figures, svg
from needlework.reports.browser import Browser, needle_characters, pieces, shortened
from needlework.reports.figures import FIGURES, make_figure
from needlework.reports.panels import CurvePoint, Lines, Series
from needlework.results import Row, Store


@pytest.fixture(scope="session")
def frame(run: Path) -> Frame:
    return load([run])


@pytest.fixture(scope="session")
def trials(run: Path) -> list[Row]:
    store = Store(run)
    stored = list(store.rows())
    store.close()
    return stored


def counted(trials: list[Row], model: str, text: str, **wanted: object) -> stats.Estimate:
    own = [t for t in trials if (t.model, t.intervention) == (model, text)]
    own = [t for t in own if all(t.facts.get(k) == v or getattr(t, k, None) == v for k, v in wanted.items())]
    return stats.wilson(sum(t.scores["correct"] for t in own), len(own))


@pytest.mark.slow
def test_accuracies_equal_plain_counting(frame: Frame, trials: list[Row]) -> None:
    for model in ("tiny-griffin", "tiny-jamba"):
        of_model = ModelTrials(frame, model)
        for text in ("none", "keep_heads(k=1)", "ablate_attention()"):
            wanted = {"task": "niah", "layout": "plain", "in_window": True}
            assert of_model.accuracy(of_model.retrieval(text)) == counted(trials, model, text, **wanted)
            assert of_model.accuracy(of_model.knowledge(text, "letter")) == counted(trials, model, text, form="letter")
    outside = ModelTrials(frame, "tiny-griffin").retrieval("none", in_window=False)
    assert (
        0
        < len(outside)
        == sum(
            (t.model, t.intervention, t.task, t.facts["in_window"]) == ("tiny-griffin", "none", "niah", False)
            for t in trials
            if t.task == "niah"
        )
    )


def test_retained_share_pairs_the_same_samples(frame: Frame, trials: list[Row]) -> None:
    chosen = [t for t in trials if (t.model, t.task) == ("tiny-jamba", "niah") and t.facts["in_window"]]
    base = {t.sample: t.scores["correct"] for t in chosen if t.intervention == "none"}
    after = {t.sample: t.scores["correct"] for t in chosen if t.intervention == "keep_heads(k=1)"}
    expected = sum(after.values()) / sum(base[sample] for sample in after)
    assert ModelTrials(frame, "tiny-jamba").retained("keep_heads(k=1)").raw.value == pytest.approx(expected)


def test_chance_is_for_choices_only(frame: Frame) -> None:
    of_model = ModelTrials(frame, "tiny-jamba")
    assert frame.chance(of_model.retrieval("none")) == 0
    assert frame.chance(of_model.retrieval("none", "choices")) == 0.25


def test_a_trial_counts_once_however_many_experiments_it_served(tmp_path: Path, trials: list[Row]) -> None:
    needles = [t for t in trials if t.intervention == "none" and t.task == "niah"][:20]
    store = Store(tmp_path, create=True)
    store.add([*needles, *(replace(t, experiment="another") for t in needles)])
    store.close()
    frame = load([tmp_path])
    assert (frame.trials, len(frame.data)) == (40, 20)


def test_failed_trials_are_left_out_and_counted(tmp_path: Path, trials: list[Row]) -> None:
    needles = [t for t in trials if t.task == "niah"][:10]
    store = Store(tmp_path, create=True)
    store.add([replace(t, finish="failed", scores={}) if i < 3 else t for i, t in enumerate(needles)])
    store.close()
    frame = load([tmp_path])
    assert (frame.failed, len(frame.data)) == (3, 7)


@pytest.mark.slow
def test_models_of_several_runs_stand_side_by_side(tmp_path: Path, run: Path) -> None:
    other = synthetic.write(tmp_path / "other", ("tiny-griffin",), per_cell=1)
    store = Store(other)
    about = store.meta("models")
    about["tiny-griffin"]["weights"] = "another hash"
    store.set_meta("models", about)
    store.close()
    assert list(load([run, other]).models) == ["tiny-griffin", "tiny-griffin (other)", "tiny-jamba", "tiny-mamba"]
    assert list(load([run, run]).models) == ["tiny-griffin", "tiny-jamba", "tiny-mamba"]
    assert len(load([run, run]).data) == len(load([run]).data)


def test_evidence_finds_every_experiment(frame: Frame) -> None:
    helps = helped_by_reading_twice(frame)
    assert helps.startswith("tiny-mamba")
    evidence = collect(ModelTrials(frame, "tiny-jamba"), helps)
    assert (evidence.few_kept, evidence.heads) == (1, 8)
    assert [curve.label for curve in evidence.curves] == ["by entropy", "at random"]
    assert set(evidence.layouts) == {"jrt", "question_first"}
    assert [k.form for k in evidence.few_knowledge] == ["cloze", "letter"]
    assert [n for n, _ in evidence.context.limits] == [8, 16, 32, 64, 128, 256]
    assert evidence.follows_kv.value > 0.9
    assert evidence.follows_kv.n == 80
    assert evidence.interaction is not None
    assert evidence.interaction.contrast.low > 0
    assert evidence.omit_decode.value == 0
    assert not collect(ModelTrials(frame, "tiny-mamba"), helps).has_attention


@pytest.mark.slow
def test_every_figure_has_its_panels(frame: Frame) -> None:
    browser = Browser(frame)
    for name in FIGURES:
        if name not in ("hops", "layers"):  # of what this run has not (test_report_pools.py, test_report_layers.py)
            assert make_figure(name, frame, browser).panels, name


def test_heat_map_cells_and_window_edge(frame: Frame, trials: list[Row]) -> None:
    panels = figures.needles(frame, Browser(frame))
    grid = next(p for p in panels if p.group == "tiny-griffin" and p.title == "all 4 heads")
    assert isinstance(grid, figures.HeatMap)
    assert (grid.cols, grid.rows) == (["64", "128", "192", "256"], ["0", "25", "50", "75", "100"])
    outside = defaultdict(set)
    for t in trials:
        if (t.model, t.task, t.intervention) == ("tiny-griffin", "niah", "none"):
            outside[f"{t.facts['depth_percent']}", f"{t.facts['length_tokens']}"].add(not t.facts["in_window"])
    for depth, line in zip(grid.rows, grid.cells, strict=True):
        for length, cell in zip(grid.cols, line, strict=True):
            assert cell is not None
            assert {cell.outside} == outside[depth, length]


@pytest.mark.parametrize(
    "text,kind,fields",
    [
        ("none", "none", {}),
        ("keep_heads(k=3, by='random', seed=4)", "heads", {"k": 3, "by": "random", "phase": "both"}),
        ("keep_heads(phase='decode', fraction=0.15)", "heads", {"fraction": 0.15, "phase": "decode"}),
        ("ablate_attention()", "heads", {"k": 0, "attention_off": True}),
        ("ablate_attention(layers=[2])", "layers", {"side": "attention", "layers": (2,), "site": "heads"}),
        ("ablate_recurrent(site='block', layers=[0, 1])", "layers", {"side": "recurrent", "layers": (0, 1), "site": "block"}),
        ("ablate_attention(layers=[2], phase='decode')", "other", {}),
        ("ablate_attention(layers=[2]) + ablate_recurrent(layers=[0])", "other", {}),
        ("ablate_recurrent(site='block')", "recurrent", {"site": "block"}),
        ("ablate_attention() + ablate_recurrent()", "both_off", {"site": "memory"}),
        ("expose_tokens(mode='omit', phase='decode')", "expose", {"decode": "omit", "prefill": "keep"}),
        ("expose_tokens(mode='null')", "expose", {"decode": "null", "prefill": "null"}),
        ("limit_context(tokens=8, phase='prefill')", "limit", {"prefill": "8", "decode": "", "sinks": 0}),
        ("limit_context(tokens=8, sinks=2)", "limit", {"prefill": "8", "decode": "8", "sinks": 2}),
        ("limit_context(tokens=8, sinks=2, phase='prefill') + limit_context(tokens=8, phase='decode')", "other", {}),
        ("ablate_attention(site='block')", "attention_block", {"attention_off": False}),
        ("ablate_attention(site='block') + ablate_recurrent()", "other", {}),
        ("ablate_attention(phase='decode') + ablate_recurrent()", "other", {}),
        ("keep_heads(k=0) + ablate_recurrent(site='block')", "both_off", {"site": "block"}),
        ("keep_heads(k=1, seed=4)", "other", {}),
        ("keep_heads(k=2, by='random', draw='trial')", "heads", {"way": "random, trial"}),
        ("keep_heads(k=1, by=ranking('2.0 5.1'))", "heads", {"way": "ranking", "by": "ranking('2.0 5.1')"}),
        ("expose_tokens(mode='omit', renormalize=True)", "other", {}),
        ("expose_tokens(mode='omit', compat='paper')", "other", {}),
        ("expose_tokens(mode='omit', span='distractor')", "other", {}),
        ("swap_memory(half='kv', from='other')", "other", {}),
        ("swap_memory(half='kv') + ablate_recurrent()", "other", {}),
        ("swap_memory(half='recurrent')", "swap", {"half": "recurrent"}),
        ("something_of_a_plug_in(3)", "other", {}),
    ],
)
def test_interventions_find_their_place(text: str, kind: str, fields: dict[str, object]) -> None:
    condition = place(text)
    assert condition.kind == kind
    assert {name: getattr(condition, name) for name in fields} == fields


def test_fifteen_percent_rounds_as_the_intervention_does() -> None:
    for heads, fraction in product(range(1, 65), (0.0, 0.01, FEW_HEADS, 0.5, 1.0)):
        assert place(f"keep_heads(fraction={fraction})").kept(heads) == KeepHeads(fraction=fraction).count(heads)
    assert [place(f"keep_heads(fraction={FEW_HEADS})").kept(heads) for heads in (32, 16, 10)] == [5, 2, 2]


def test_needles_are_found_by_words_and_else_by_the_answer() -> None:
    assert needle_characters("a needle is here", 5, {"needle": [[2, 4]]}, "here") == [(2, 11)]  # one token of BOS
    assert needle_characters("a needle is here", 9, {"needle": [[2, 4]]}, "here") == [(12, 16)]
    assert pieces("a needle is", [(2, 8)]) == ["a ", "needle", " is"]
    assert "".join(pieces("😀 needle", [(2, 8)])) == "😀 needle"


def test_long_prompts_are_cut_around_their_needle_and_say_so() -> None:
    prompt = "x" * 20_000 + "NEEDLE" + "y" * 20_000
    text, marks = shortened(prompt, [(20_000, 20_006)])
    assert [text[a:b] for a, b in marks] == ["NEEDLE"]
    assert len(text) < 5_000
    assert "characters left out" in text


def test_browser_shows_failures_first_and_at_most_twenty(frame: Frame) -> None:
    browser = Browser(frame)
    rows = frame.rows(ModelTrials(frame, "tiny-jamba").needle_pick("keep_heads(k=1)"))
    key = browser.add("all needles", rows)
    collected = browser.collect()
    cell = collected["cells"][key]
    right = [collected["trials"][i][5]["correct"] for i in cell["trials"]]
    assert (len(right), cell["n"]) == (20, len(rows))
    assert 0 < cell["wrong"] == int((frame.values("correct", rows) == 0).sum()) < 20
    assert right == [0.0] * cell["wrong"] + [1.0] * (20 - cell["wrong"])
    again = Browser(frame)
    again.add("all needles", rows)
    assert again.collect() == collected


def test_browser_keeps_its_budget(frame: Frame) -> None:
    browser = Browser(frame, budget_bytes=20_000)
    for text in frame.distinct("text", model="tiny-jamba"):
        browser.add(text, frame.rows(ModelTrials(frame, "tiny-jamba").needle_pick(text)))
    collected = browser.collect()
    assert browser.cells
    assert sum(len(p[0]) for p in collected["prompts"]) < 22_000
    assert all(not math.isnan(cell["n"]) for cell in collected["cells"].values())


def test_chance_is_that_of_the_options_that_count(tmp_path: Path, trials: list[Row]) -> None:
    choices = [t for t in trials if t.task == "niah_choice"][:10]
    store = Store(tmp_path, create=True)
    store.add([replace(t, facts={**t.facts, "chance": 1 / 7, "chance_context": 0.5}) for t in choices])
    assert load([tmp_path]).groups["chance"][0] == pytest.approx(1 / 7)
    store.set_meta("experiments", {"heads": {"tasks": {"niah_choice": {"options": {"against": "context"}}}}})
    store.close()
    assert load([tmp_path]).groups["chance"][0] == 0.5


def test_equal_names_of_other_prompts_are_not_paired(tmp_path: Path, trials: list[Row]) -> None:
    base = next(t for t in trials if (t.model, t.task, t.intervention) == ("tiny-jamba", "niah", "none"))
    right, wrong = {"correct": 1.0}, {"correct": 0.0}
    rows = [
        replace(base, id="1", prompt_id="a", scores=right),
        replace(base, id="2", prompt_id="b", scores=wrong),
        replace(base, id="3", prompt_id="a", scores=right, intervention="keep_heads(k=1)"),
    ]
    store = Store(tmp_path, create=True)
    store.add(rows)
    store.close()
    of_model = ModelTrials(load([tmp_path]), "tiny-jamba")
    assert list(of_model.retained("keep_heads(k=1)").before) == [1.0]


def test_crossed_limits_are_a_map(frame: Frame) -> None:
    panels = make_figure("context", frame, Browser(frame)).panels
    grid = next(p for p in panels if isinstance(p, figures.HeatMap) and p.group == "tiny-jamba")
    assert (grid.cols[0], grid.cols[-1], len(grid.rows)) == ("8", "all", 7)
    corner = grid.cells[-1][-1]
    of_model = ModelTrials(frame, "tiny-jamba")
    assert corner is not None
    assert corner.y == of_model.accuracy(of_model.retrieval("none"))


def test_a_control_is_drawn_only_where_it_was_measured(tmp_path: Path) -> None:
    """No heads and all heads belong to every way of choosing: two end points alone are no random control."""
    directory = synthetic.write(tmp_path / "run", models=("tiny-jamba",), per_cell=1)
    whole = load([directory])
    drawn = [series.label for panel in curves.heads(whole, Browser(whole)) for series in panel.series]
    assert any("random" in label for label in drawn)
    with sqlite3.connect(next(directory.glob("*.sqlite"))) as database:
        database.execute("DELETE FROM trials WHERE intervention LIKE '%random%'")
    frame = load([directory])
    panels = curves.heads(frame, Browser(frame))
    assert panels
    assert not any("random" in series.label for panel in panels for series in panel.series)


@pytest.mark.slow
def test_what_was_never_known_has_no_share_left(tmp_path: Path) -> None:
    """A baseline at chance, divided by itself, says nothing: its curve is left out, the others stay."""
    directory = synthetic.write(tmp_path / "run", models=("tiny-jamba",), per_cell=1)

    def left() -> set[str]:
        frame = load([directory])
        panels = curves.heads(frame, Browser(frame))
        return {series.label for panel in panels if "left" in panel.title for series in panel.series}

    before = left()
    forms = before & {"cloze", "letter"}
    assert forms
    gone = sorted(forms)[0]
    with sqlite3.connect(next(directory.glob("*.sqlite"))) as database:
        database.execute(
            "UPDATE trials SET scores = json_set(scores, '$.correct', 0.0) WHERE intervention = 'none' AND task LIKE ?",
            (f"%{gone}%",),
        )
    assert left() == before - {gone}


# Own interventions, and ranges without measurements.


def test_no_line_and_no_band_cross_a_range_without_measurements() -> None:
    def series(*places: float) -> Series:
        return Series("s", 1, [CurvePoint(x, stats.wilson(5, 10)) for x in places])

    heads = Lines("m", "m: t", "x", "y", [series(0, 0.25, 0.5, 1)])
    assert [[p.x for p in run] for run in svg.runs(heads, heads.series[0])] == [[0, 0.25, 0.5], [1]]
    assert str(svg.draw_panel(heads)).count('class="whisker"') == 1, "a point alone shows its interval"
    tokens = replace(heads, share_x=False, series=[series(8, 32, 256)])
    assert [[p.x for p in run] for run in svg.runs(tokens, tokens.series[0])] == [[8, 32], [256]]


def test_labels_of_lines_stand_outside_the_plot_and_those_of_columns_have_space() -> None:
    points = [CurvePoint(x / 4, stats.wilson(x, 4)) for x in range(5)]
    level, mark = (0.25, "chance"), (0.15, "15 %")
    drawn = str(svg.draw_panel(Lines("m", "m: t", "x", "y", [Series("s", 1, points)], level=level, mark=mark)))
    right = max(float(x) for x in re.findall(r'<circle class="dot" cx="([\d.]+)"', drawn))
    top = min(float(y) for y in re.findall(r'<circle class="dot" cx="[\d.]+" cy="([\d.]+)"', drawn))
    assert float(re.search(r'<text x="([\d.]+)"[^>]*>chance<', drawn)[1]) > right  # type: ignore[index]
    assert float(re.search(r'<text [^>]*y="([\d.]+)"[^>]*>15 %<', drawn)[1]) < top  # type: ignore[index]
    names = [str(i) for i in range(32)]
    cells = [[figures.Cell(stats.wilson(1, 2)) for _ in names]]
    grid = str(svg.draw_panel(figures.HeatMap("m", "m", "layer", "head", ["3"], names, cells), "small"))
    at = [float(x) for x in re.findall(r'<text x="([\d.]+)"[^>]*class="tick" text-anchor="middle">\d+<', grid)]
    assert all(b - a >= 12 for a, b in pairwise(at))
    assert len(at) >= 8


@pytest.mark.slow
def test_every_panel_names_its_model(frame: Frame) -> None:
    browser = Browser(frame)
    made = [make_figure(name, frame, browser) for name in FIGURES]
    assert all(panel.group in panel.full_title for figure in made for panel in figure.panels)


def test_own_interventions_are_drawn_beside_the_shipped_ones(tmp_path: Path, trials: list[Row]) -> None:
    own = [t for t in trials if (t.model, t.task, t.intervention) == ("tiny-jamba", "niah", "none")]
    shipped = [t for t in trials if (t.model, t.task, t.intervention) == ("tiny-jamba", "niah", "ablate_attention()")]
    store = Store(tmp_path, create=True)
    synthetic.sign(store, {"tiny-jamba": {"anatomy": synthetic.anatomy("tiny-jamba"), "weights": "w"}})
    store.add([*own, *shipped, *(replace(t, id=f"own {t.id}", intervention="mine(k=3)") for t in own)])
    store.close()
    frame = load([tmp_path])
    (dots,) = make_figure("dissociation", frame, Browser(frame)).panels
    assert [mark.label for mark in dots.marks()] == ["attention off: retrieval", "mine(k=3): retrieval"]  # type: ignore[union-attr]
    (grid,) = make_figure("tasks", frame, Browser(frame)).panels
    assert grid.cols == ["untouched", "no heads", "mine(k=3)"]  # type: ignore[union-attr]
