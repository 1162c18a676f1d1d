"""Tables of head rankings and recurrent groups for the terminal, the HTML page, and the output files of a survey."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup
from rich.console import Group
from rich.text import Text

from needlework.errors import NeedleworkError, did_you_mean
from needlework.files import atomic_write, file_name, new_directory
from needlework.heads import foreign, plots
from needlework.heads.evaluation import RANDOM, Agreement
from needlework.heads.methods import all_methods
from needlework.heads.plots import CUTS
from needlework.heads.recurrent import RecurrentSide
from needlework.heads.survey import Survey
from needlework.reports.page import render_template
from needlework.stats import Estimate, number, percent
from needlework.tables import Table

BEST_HEADS = 10
MOST_GROUPS = 8  # groups listed in a table


def tables(survey: Survey) -> list[Table]:
    """Return the tables of a survey: rankings with their evaluation, best heads, agreement, static against dynamic."""
    found = [_rankings(survey), _best_heads(survey)]
    if len(survey.rankings) > 1:
        found.append(_agreement(survey))
    if survey.dynamic:
        found.append(_dynamic(survey))
    return found


def legend(survey: Survey) -> str:
    """Return a text that explains the columns and the samples behind them."""
    made = survey.settings
    judged = f", judged on {made.held_out} others of each of two more seeds" if survey.curves else ""
    return (
        f"Ranked on {made.samples} samples of {', '.join(survey.tasks)}, seed {made.seed}{judged}. Area: under retrieval against"
        " heads kept. Halves, other seed: rank correlation, and overlap of the best heads, of two rankings by one method."
        " Heads of equal score stand in the order of the model."
    )


def _rankings(survey: Survey) -> Table:
    floor = survey.curves.get(RANDOM)
    rows = []
    for name in sorted(survey.rankings, key=lambda name: -survey.curves[name].area.value if survey.curves else 0.0):
        curve, retest = survey.curves.get(name), survey.retests.get(name)
        area = _bounds(curve.area.value, curve.area.low, curve.area.high) if curve else "–"
        fewest = str(curve.smallest(survey.settings.keep)) if curve else "–"
        agreed = (retest.halves, retest.other_seed) if retest else (None, None)
        rows.append((name, area, fewest, *map(_agreed, agreed)))
    if floor:
        fewest = str(floor.smallest(survey.settings.keep))
        rows.append((RANDOM, _bounds(floor.area.value, floor.area.low, floor.area.high), fewest, "–", "–"))
    keep = f"k for {100 * survey.settings.keep:g} %"
    title = f"{survey.model.name}: {len(survey.anatomy.heads)} heads; untouched retrieval {survey.baseline.text()}"
    return Table(("method", "area % [95 %]", keep, "halves", "other seed"), rows, title, ("method",))


def _bounds(value: float, low: float, high: float) -> str:
    return f"{percent(value, '')} [{percent(low, '')},\u00a0{percent(high, '')}]".replace(" ", "\u00a0")


def _agreed(found: Agreement | None) -> str:
    return f"{found.spearman:.2f},\u00a0{100 * found.overlap:.0f}%" if found else "–"


def _best_heads(survey: Survey) -> Table:
    ranking = survey.rankings[survey.best]
    intervals = ranking.evidence.get("intervals", {})
    rows = []
    for place, head in enumerate(ranking.order[:BEST_HEADS], 1):
        name = f"{head.layer}.{head.index}"
        score = number(ranking.scores[head]) if ranking.scores else "–"
        spread = f"[{number(intervals[name][0])}, {number(intervals[name][1])}]" if name in intervals else "–"
        rows.append((str(place), name, score, spread))
    return Table(("place", "layer.head", "score", "95 %"), rows, f"best heads by {survey.best}", ())


def _agreement(survey: Survey) -> Table:
    """Return the agreement of all pairs of rankings: rank correlation above the diagonal, top overlap below."""
    names, found = list(survey.rankings), survey.agreements
    rows = []
    for i, a in enumerate(names):
        above, below = ([found[a][b] for b in some] for some in (names[i + 1 :], names[:i]))
        shares = [f"{100 * one.overlap:.0f}%" for one in below]
        rows.append((f"{i + 1} {a}", *shares, "·", *(f"{one.spearman:.2f}" for one in above)))
    first = found[names[0]][names[1]]
    title = f"agreement: rank correlation above,\noverlap of the best {first.k} below (by chance {100 * first.by_chance:.0f}%)"
    return Table(("method", *(str(i + 1) for i in range(len(names)))), rows, title, ("method",))


def _dynamic(survey: Survey) -> Table:
    assert survey.dynamic is not None
    rows = []
    for way in survey.dynamic.ways:
        e = way.retrieval
        rows.append((way.name, way.heads, _bounds(e.value, e.low, e.high), percent(way.retained.value)))
    title = f"{100 * survey.dynamic.share:g} % of the heads of each layer (n = {survey.dynamic.ways[0].retrieval.n})"
    return Table(("heads chosen", "kept", "retrieval % [95 %]", "retained"), rows, title, ("heads chosen", "kept"))


def methods() -> Table:
    """Return the table of all registered methods."""
    rows = [(m.name, m.kind, m.about) for m in all_methods().values()]
    return Table(("method", "looks at", "measures"), rows, "ways to rank heads")


def check_out(out: Path | None, exports: Sequence[str] = ()) -> None:
    """Raise for an unknown export format or a non-empty output directory, before anything is measured."""
    if exports and out is None:
        raise NeedleworkError(f"--export {exports[0]} writes files: give --out DIR")
    for kind in exports:
        if kind not in foreign.FILES:
            raise NeedleworkError(f"there is no format {kind!r} to export to; {did_you_mean(kind, foreign.FILES)}")
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise NeedleworkError(f"{out} exists and is not empty; nothing in it was touched: choose another --out, or remove it")


def save(survey: Survey, out: Path, exports: Sequence[str] = ()) -> list[Path]:
    """Write rankings, exports, JSON, plots and the HTML page into a new or empty directory, all files or none."""
    with new_directory(out) as folder:
        for name, ranking in survey.rankings.items():
            ranking.save(folder / f"ranking-{file_name(name)}.json")
            for kind in exports:
                foreign.write(ranking, folder / foreign.FILES[kind].format(name=file_name(name)), kind, survey.anatomy)
        with atomic_write(folder / "heads.json") as file:
            json.dump(survey.to_dict(), file, indent=1, allow_nan=False)
        drawn = [(folder / name).read_text(encoding="utf-8") for name in plots.save_plots(survey, folder)]
        with atomic_write(folder / "heads.html") as file:
            file.write(_page(survey, drawn))
    return sorted(out.iterdir())


def _page(survey: Survey, svgs: Sequence[str]) -> str:
    """Return the HTML page with all tables and plots embedded."""
    return render_template(
        "heads.html",
        model=survey.model.name,
        smallest=survey.smallest.text() if survey.smallest else "",
        legend=legend(survey),
        tables=tables(survey),
        plots=[Markup(svg[svg.index("<svg") :]) for svg in svgs],
    )


def recurrent_table(side: RecurrentSide) -> Group:
    """Return accuracy and lost log P of each ability under each condition, and the groups that matter most to retrieval."""
    columns = ["what is done", *(f"{ability.name}: right" for ability in side.abilities)]
    columns += [f"{ability.name}: nats lost" for ability in side.abilities]
    rows = Table(columns, left=("what is done",))

    def add(label: str, *done: str) -> None:
        said = [_share(ability.said(*done)) for ability in side.abilities]
        rows.add_row(label, *said, *(_nats(ability.drop(*done)) for ability in side.abilities))

    add("nothing", "none")
    for site in side.sites:
        add(f"{CUTS[site]}, all layers", site)
    for site in side.sites:
        for layer in side.layers:
            add(f"{CUTS[site]}, layer {layer}", f"{site}@{layer}")
    for share, count in side.sizes.items():
        add(f"top {count} groups ({percent(share)})", f"top {share}")
        add(f"{count} groups at random, {side.draws} draws", *side.random(share))
    kinds = "/".join(side.kinds)
    missed = [(f"layer {group.layer}, {group.index}", _nats(drop)) for group, drop in side.group_losses()[:MOST_GROUPS]]
    title = f"\ngroups ({kinds}) that retrieval misses most"
    best = Table(("group", "nats that retrieval loses without it"), missed, title, left=("group",))
    word, why = side.segregated
    samples = ", ".join(f"{ability.name} {len(ability.clusters)}" for ability in side.abilities)
    notes = (
        f"\nsamples: {samples}; 95 % intervals over samples; top groups are ranked by other samples\nsegregated: {word} ({why})"
    )
    return Group(rows, best, Text(notes))


def save_recurrent(side: RecurrentSide, out: Path, title: str = "") -> list[Path]:
    """Write results as JSON and plots into a new or empty directory."""
    with new_directory(out) as folder:
        with atomic_write(folder / "recurrent.json") as file:
            json.dump(side.to_dict(), file, indent=1, allow_nan=False)
        for kind in ("png", "svg"):
            plots.save_recurrent_plot(side, folder / f"recurrent.{kind}", title)
    return sorted(out.iterdir())


def _share(estimate: Estimate) -> str:
    return f"{percent(estimate.value)} [{percent(estimate.low, '')}, {percent(estimate.high, '')}]"


def _nats(estimate: Estimate) -> str:
    return f"{number(estimate.value)} [{number(estimate.low)}, {number(estimate.high)}]"
