"""What `needlework heads` shows and writes: tables, plots, the HTML page and files of rankings and of the recurrent side."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from rich.console import Group
from rich.text import Text

from needlework.anatomy import Head, heads_of_share
from needlework.errors import NeedleworkError, did_you_mean
from needlework.files import atomic_write, file_name, new_directory
from needlework.heads import foreign
from needlework.heads.compare import HeadComparison
from needlework.heads.evaluation import RANDOM, SHARE
from needlework.heads.methods import all_methods
from needlework.heads.recurrent import RecurrentSide
from needlework.heads.survey import Survey
from needlework.interventions.ranking import Ranking
from needlework.plots import light_colors
from needlework.reports.page import render_template
from needlework.reports.picture_files import STYLE, save_plot
from needlework.stats import Estimate, number, percent
from needlework.tables import Table

BEST_HEADS = 10
ROLE_HEADS = 5
MOST_GROUPS = 8  # groups listed in a table
CUTS = {"conv": "convolution cut", "state": "state cut", "memory": "both cut"}


def method_table() -> Table:
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


def save_survey(survey: Survey, out: Path, exports: Sequence[str] = ()) -> list[Path]:
    """Write rankings, exports, JSON, plots and the HTML page into a new or empty directory, all files or none."""
    plots: dict[str, Callable[[Survey], Any]] = {"heads": draw_score_maps}
    plots |= {"curves": draw_curves} if survey.curves else {}
    plots |= {"static-or-dynamic": draw_selections} if survey.dynamic else {}
    plots |= {"roles": partial(draw_score_maps, roles=True)} if survey.roles else {}
    about = {"model": survey.model.name, "legend": legend(survey), "tables": survey_tables(survey)}
    smallest = survey.smallest.text() if survey.smallest else ""
    with new_directory(out) as folder:
        for name, ranking in survey.rankings.items():
            ranking.save(folder / f"ranking-{file_name(name)}.json")
            for kind in exports:
                foreign.write(ranking, folder / foreign.FILES[kind].format(name=file_name(name)), kind, survey.anatomy)
        drawn = {name: partial(draw, survey) for name, draw in plots.items()}
        _write_page(folder / "heads", survey.to_dict(), drawn, smallest=smallest, **about)
    return sorted(out.iterdir())


def save_comparison(found: HeadComparison, out: Path) -> list[Path]:
    """Write a comparison of two checkpoints as JSON, plot and page into a new or empty directory, all files or none."""
    models = " and ".join(model.name for model in found.models)
    about = {"model": models, "legend": comparison_legend(found), "tables": found.tables()}
    with new_directory(out) as folder:
        _write_page(folder / "comparison", found.to_dict(), {"scores": lambda: found.plot().figure}, smallest="", **about)
    return sorted(out.iterdir())


def _write_page(path: Path, content: Mapping[str, Any], plots: Mapping[str, Callable[[], Any]], **about: Any) -> None:
    """Write results as `path`.json, their plots beside it, and both as a page, `path`.html."""
    import matplotlib

    with atomic_write(path.with_suffix(".json")) as file:
        json.dump(content, file, indent=1, allow_nan=False)
    with matplotlib.rc_context(STYLE):
        for name, draw in plots.items():
            save_plot(draw(), path.with_name(name))
    drawn = [path.with_name(f"{name}.svg").read_text(encoding="utf-8") for name in plots]
    page = render_template("heads.html", plots=[Markup(svg[svg.index("<svg") :]) for svg in drawn], **about)
    with atomic_write(path.with_suffix(".html")) as file:
        file.write(page)


def comparison_legend(found: HeadComparison) -> str:
    """Return a text that explains the columns of a comparison."""
    return (
        f"Heads scored on {found.samples} samples of {found.task}, the same for both models; intervals over resampled samples"
        f" (95 %). Rank correlation of all heads {found.agreement.text('')}. (?): the interval of a rank reaches across the line"
        f" of the best {found.best}."
    )


def legend(survey: Survey) -> str:
    """Return a text that explains the columns and the samples behind them."""
    made = survey.settings
    judged = f", judged on {made.held_out} others of each of two more seeds" if survey.curves else ""
    return (
        f"Ranked on {made.samples} samples of {', '.join(survey.tasks)}, seed {made.seed}{judged}. Area: under retrieval against"
        " heads kept. Halves, other seed: rank correlation, and overlap of the best heads, of two rankings by one method."
        " Heads of equal score stand in the order of the model."
        + " Gather: attention from the needle's last token to the rest of the needle; aggregate: from the prompt's last token to"
        " the needle's last token." * bool(survey.roles)
    )


def survey_tables(survey: Survey) -> list[Table]:
    """Return the tables of a survey: rankings with their evaluation, best heads, agreement, static against dynamic."""
    settings, curves, found = survey.settings, survey.curves, survey.agreements
    names, rows = list(survey.rankings), list[Sequence[str]]()
    for name in [*sorted(names, key=lambda name: -curves[name].area.value if curves else 0.0), *({RANDOM} & curves.keys())]:
        curve, retest = curves.get(name), survey.retests.get(name)
        measured = (_bounds(curve.area), str(curve.smallest(settings.keep))) if curve else ("–", "–")
        agreed = (retest.halves, retest.other_seed) if retest else (None, None)
        rows.append((name, *measured, *(f"{x.spearman:.2f},\u00a0{100 * x.overlap:.0f}%" if x else "–" for x in agreed)))
    title = f"{survey.model.name}: {len(survey.anatomy.heads)} heads; untouched retrieval {survey.baseline.text()}"
    columns = ("method", "area % [95 %]", f"k for {100 * settings.keep:g} %", "halves", "other seed")
    tables = [Table(columns, rows, title, ("method",))]

    ranking, rows = survey.rankings[survey.best], []
    for place, head in enumerate(ranking.order[:BEST_HEADS], 1):
        rows.append((str(place), f"{head.layer}.{head.index}", *_score_and_spread(ranking, head)))
    tables.append(Table(("place", "layer.head", "score", "95 %"), rows, f"best heads by {survey.best}", ()))
    if survey.roles:
        best = {
            head: None
            for pair in zip(*(ranking.order[:ROLE_HEADS] for ranking in survey.roles.values()), strict=True)
            for head in pair
        }
        rows = [
            [f"{x.layer}.{x.index}", *(" ".join(_score_and_spread(of, x)) for of in survey.roles.values())] for x in sorted(best)
        ]
        title = f"roles: the {ROLE_HEADS} heads that gather most and the {ROLE_HEADS} that aggregate most"
        tables.append(Table(("layer.head", *(f"{role} [95 %]" for role in survey.roles)), rows, title, ()))

    if len(names) > 1:  # rank correlation above the diagonal, overlap below
        rows = []
        for i, a in enumerate(names):
            below = [f"{100 * found[a][b].overlap:.0f}%" for b in names[:i]]
            rows.append((f"{i + 1} {a}", *below, "·", *(f"{found[a][b].spearman:.2f}" for b in names[i + 1 :])))
        pair = found[names[0]][names[1]]
        title = f"agreement: rank correlation above,\noverlap of the best {pair.k} below (by chance {100 * pair.by_chance:.0f}%)"
        tables.append(Table(("method", *(str(i + 1) for i in range(len(names)))), rows, title, ("method",)))

    if survey.dynamic:
        ways = survey.dynamic.ways
        rows = [(way.name, way.heads, _bounds(way.retrieval), percent(way.retained.value)) for way in ways]
        title = f"{100 * survey.dynamic.share:g} % of the heads of each layer (n = {ways[0].retrieval.n})"
        tables.append(Table(("heads chosen", "kept", "retrieval % [95 %]", "retained"), rows, title, ("heads chosen", "kept")))
    return tables


def _score_and_spread(ranking: Ranking, head: Head) -> tuple[str, str]:
    """Return a head's score and its interval; a dash for what is not known."""
    bounds = ranking.evidence.get("intervals", {}).get(f"{head.layer}.{head.index}")
    spread = f"[{number(bounds[0])}, {number(bounds[1])}]" if bounds else "–"
    return number(ranking.scores[head]) if ranking.scores else "–", spread


def _bounds(x: Estimate) -> str:
    return f"{percent(x.value, '')}\u00a0[{percent(x.low, '')},\u00a0{percent(x.high, '')}]"


COLORS = [light_colors()[f"c{i}"] for i in range(7)]
EDGE = light_colors()["focus"]
_BESIDE = 1.8  # horizontal offset between curves, in points


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _error_bars(estimates: Sequence[Estimate]) -> np.ndarray:
    """Return how far the intervals reach below and above their values, [2, estimates]."""
    return np.maximum([[x.value - x.low for x in estimates], [x.high - x.value for x in estimates]], 0)


def draw_score_maps(survey: Survey, roles: bool = False) -> Any:
    """Draw a heat map of layers by heads for each ranking, or role, with its best heads marked and a scale of its own."""
    rankings, what = (survey.roles, "roles of heads") if roles else (survey.rankings, "scores of heads")
    layers, names = survey.anatomy.attention_layers, list(rankings)
    across = max(len(layer.heads) for layer in layers)
    columns = min(len(names), 3 if across <= 16 else 2)
    rows = -(-len(names) // columns)
    plot = _figure(max(3.0, 0.16 * across + 0.9) * columns, (max(1.1, 0.13 * len(layers) + 0.75)) * rows)
    axes = plot.subplots(rows, columns, squeeze=False)
    for ax, name in zip(axes.flat, names, strict=False):
        ranking = rankings[name]
        ranking.plot(ax, best=heads_of_share(SHARE, len(ranking.order)))
        ax.set_title(name)
    for ax in axes.flat[len(names) :]:
        ax.set_axis_off()
    plot.suptitle(f"{survey.model.name}: {what} (dots: the best {SHARE:.0%})", fontsize=9)
    return plot


def draw_curves(survey: Survey) -> Any:
    """Draw retrieval against heads kept, with the area of each curve in the legend; curves are offset so that none is hidden."""
    from matplotlib.transforms import ScaledTranslation

    plot = _figure(5.2, 3.2)
    ax = plot.subplots()
    ordered = sorted(survey.curves.values(), key=lambda curve: (curve.name == RANDOM, -curve.area.value))
    for i, curve in enumerate(ordered):
        color, style = COLORS[1 + i % (len(COLORS) - 1)], "-" if i < len(COLORS) - 1 else "--"
        if curve.name == RANDOM:
            color, style = COLORS[0], ":"
        # In points: an offset in data units would vary on the logarithmic axis.
        aside = ScaledTranslation(_BESIDE * (i - (len(ordered) - 1) / 2) / 72, 0, plot.dpi_scale_trans)
        points = [curve.at(k) for k in curve.ks]
        ax.errorbar(
            curve.ks,
            [point.value for point in points],
            yerr=_error_bars(points),
            fmt=style,
            color=color,
            label=f"{curve.name} {percent(curve.area.value)}",
            transform=ax.transData + aside,
            linewidth=1.1,
            marker="o",
            markersize=2.2,
            elinewidth=0.6,
            capsize=1.0,
            capthick=0.6,
        )
    heads, ks = ordered[0].heads, ordered[0].ks
    if survey.smallest:
        fewest = len(survey.smallest.heads)
        ax.axvline(fewest, color=EDGE, linewidth=0.8, linestyle="--")
        ax.annotate(f" {fewest} keep {100 * survey.smallest.keep:g} %", (fewest, 0.03), fontsize=6.5, color=EDGE)
    ax.set_xscale("symlog", linthresh=1)
    ticks = [k for k in ks if k in (0, 1, 2, 4, 9, 21, 48, 108) or k == heads]
    ax.set_xticks(ticks, [str(k) for k in ticks])
    ax.set_yticks([0, 0.5, 1], ["0", "50", "100"])
    ax.minorticks_off()
    ax.set(
        xlim=(-0.15, 1.2 * heads),
        ylim=(-0.03, 1.05),
        xlabel=f"heads kept of {heads}, all others silent at every position",
        ylabel="retrieval, exact match [%]",
        title=f"{survey.model.name}: rankings on held-out samples (n = {ordered[0].area.n})",
    )
    ax.legend(title="area under the curve", title_fontsize=6.5, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return plot


def draw_selections(survey: Survey) -> Any:
    """Draw retrieval with its interval under each way to select heads."""
    assert survey.dynamic is not None
    ways = survey.dynamic.ways
    plot = _figure(6.8, 0.26 * len(ways) + 0.9)
    ax = plot.subplots()
    for row, way in enumerate(ways):
        color = {"dynamic": COLORS[2], "static": COLORS[1]}.get(way.name.partition(":")[0], COLORS[0])
        spread = _error_bars([way.retrieval])
        ax.errorbar(way.retrieval.value, row, xerr=spread, fmt="o", color=color, markersize=4, capsize=2, linewidth=1)
    ax.set_yticks(range(len(ways)), [f"{way.name} ({way.heads})" for way in ways])
    ax.invert_yaxis()
    ax.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25", "50", "75", "100"])
    ax.grid(axis="x", linewidth=0.3, color="#d0d0d0")
    ax.set(xlim=(-0.03, 1.03), xlabel=f"retrieval [%], 95 % intervals, n = {ways[0].retrieval.n}")
    plot.suptitle(f"{survey.model.name}: {survey.dynamic.share:.0%} of the heads of each layer, static or dynamic", fontsize=9)
    return plot


def save_recurrent(side: RecurrentSide, out: Path, title: str = "") -> list[Path]:
    """Write results as JSON and plots into a new or empty directory."""
    with new_directory(out) as folder:
        with atomic_write(folder / "recurrent.json") as file:
            json.dump(side.to_dict(), file, indent=1, allow_nan=False)
        save_plot(draw_recurrent(side, title), folder / "recurrent")
    return sorted(out.iterdir())


def recurrent_table(side: RecurrentSide) -> Group:
    """Return accuracy and lost log P of each ability under each condition, and the groups that matter most to retrieval."""
    conditions = [("nothing", ["none"])]
    conditions += [(f"{CUTS[site]}, all layers", [site]) for site in side.sites]
    conditions += [(f"{CUTS[site]}, layer {layer}", [f"{site}@{layer}"]) for site in side.sites for layer in side.layers]
    for share, count in side.sizes.items():
        conditions.append((f"top {count} groups ({percent(share)})", [f"top {share}"]))
        conditions.append((f"{count} groups at random, {side.draws} draws", side.random(share)))
    abilities = side.abilities
    columns = ["what is done", *(f"{x.name}: right" for x in abilities), *(f"{x.name}: nats lost" for x in abilities)]
    table = Table(columns, left=columns[:1])
    for label, done in conditions:
        texts = [*(x.accuracy(*done).text() for x in abilities), *(x.loss(*done).text("") for x in abilities)]
        table.add_row(label, *(text.partition(", n =")[0] for text in texts))
    losses = [(f"layer {group.layer}, {group.index}", drop.text("")) for group, drop in side.group_losses()[:MOST_GROUPS]]
    missed = [(name, text.partition(", n =")[0]) for name, text in losses]
    title = f"\ngroups ({'/'.join(side.kinds)}) that retrieval misses most"
    best = Table(("group", "nats that retrieval loses without it"), missed, title, left=("group",))
    samples = ", ".join(f"{ability.name} {len(ability.clusters)}" for ability in abilities)
    notes = f"\nsamples: {samples}; 95 % intervals over samples; top groups are ranked by other samples"
    word, why = side.segregated
    return Group(table, best, Text(f"{notes}\nsegregated: {word} ({why})"))


LINEAR_NATS = 0.003  # the colour scale is linear below this and logarithmic above


def draw_recurrent(side: RecurrentSide, title: str = "") -> Any:
    """Draw the log P that retrieval loses without each group, accuracy under the cuts, and top groups against random ones."""
    plot = _figure(11, 3.4)
    left, middle, right = plot.subplots(1, 3, width_ratios=(1.5, 1, 1.1))
    draw_group_map(side, left)
    untouched = ("untouched", ["none"])
    _draw_bars(middle, side, [untouched, *((CUTS[site], [site]) for site in side.sites)], "memory cut in all layers")
    sets = [untouched]
    for share, count in side.sizes.items():
        sets += [(f"top {count}", [f"top {share}"]), (f"random {count}", side.random(share))]
    _draw_bars(right, side, sets, f"groups ablated, of {len(side.groups)}")
    if len(side.abilities) > 1:
        handles = middle.get_legend_handles_labels()
        plot.legend(*handles, loc="outside upper right", ncols=len(side.abilities), fontsize=8, frameon=False)
    plot.suptitle(f"{title} recurrent side".strip(), fontsize=10)
    return plot


def draw_group_map(side: RecurrentSide, ax: Any) -> None:
    """Draw the log P that retrieval loses without each group."""
    from matplotlib.colors import SymLogNorm

    cells = np.full((len(side.layers), 1 + max(group.index for group in side.groups)), np.nan)
    for group, drop in side.group_losses():
        cells[side.layers.index(group.layer), group.index] = drop.value
    most = max(10 * LINEAR_NATS, float(np.nanmax(np.abs(cells))))
    scale = SymLogNorm(LINEAR_NATS, vmin=-most, vmax=most)  # losses of groups differ by factors of 100
    image = ax.imshow(cells, cmap="RdBu_r", norm=scale, aspect="auto")
    ax.set_yticks(range(len(side.layers)), [f"layer {layer}" for layer in side.layers], fontsize=8)
    ax.set_xlabel(f"group ({'/'.join(side.kinds)})", fontsize=8)
    ax.tick_params(axis="x", labelsize=8)
    ax.set_title("nats that retrieval loses without a group", fontsize=8)
    ax.figure.colorbar(image, ax=ax, shrink=0.85).ax.tick_params(labelsize=7)


def _draw_bars(ax: Any, side: RecurrentSide, conditions: Sequence[tuple[str, Sequence[str]]], title: str) -> None:
    """Draw the accuracy of each ability under conditions (label, keys of `Ability.outcomes` whose mean is drawn)."""
    height = 0.8 / len(side.abilities)
    for a, ability in enumerate(side.abilities):
        for i, (_, done) in enumerate(conditions):
            estimate = ability.accuracy(*done)
            spread = [[100 * (estimate.value - estimate.low)], [100 * (estimate.high - estimate.value)]]
            label = ability.name if i == 0 else None
            at = i + (a - (len(side.abilities) - 1) / 2) * height
            ax.barh(at, 100 * estimate.value, height, color=f"C{a}", xerr=spread, error_kw={"linewidth": 0.8}, label=label)
    ax.set_yticks(range(len(conditions)), [label for label, _ in conditions], fontsize=8)
    ax.invert_yaxis()
    ax.set_xlim(0, 105)
    ax.tick_params(axis="x", labelsize=8)
    ax.set_xlabel("right answers, %", fontsize=8)
    ax.set_title(title, fontsize=8)
