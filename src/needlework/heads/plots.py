"""Plots of heads and recurrent groups: scores by layer, retrieval against heads kept, static against dynamic selection."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from needlework.anatomy import Head, heads_of_share
from needlework.errors import NeedleworkError
from needlework.heads.evaluation import RANDOM, SHARE, RetrievalCurve
from needlework.heads.recurrent import RecurrentSide
from needlework.heads.survey import Survey
from needlework.reports.picture_files import STYLE, light_colors, save_plot
from needlework.stats import Estimate, percent

COLORS = [light_colors()[f"c{i}"] for i in range(7)]
HEAT = [light_colors()[f"heat-{name}"] for name in ("lo", "mid", "hi")]
EDGE = light_colors()["focus"]
_BESIDE = 1.8  # horizontal offset between curves, in points
CUTS = {"conv": "convolution cut", "state": "state cut", "memory": "both cut"}
Condition = tuple[str, tuple[str, ...]]  # label, and keys of `Ability.outcomes`
LINEAR_NATS = 0.003  # the colour scale is linear below this and logarithmic above


def save_plots(survey: Survey, folder: Path) -> list[str]:
    """Write PNG and SVG files of the plots that the survey has results for; return the names of the SVG files."""
    import matplotlib

    draws = {"heads": draw_score_maps}
    draws |= {"curves": draw_curves} if survey.curves else {}
    draws |= {"static-or-dynamic": draw_dynamic} if survey.dynamic else {}
    with matplotlib.rc_context(STYLE):
        for name, draw in draws.items():
            save_plot(draw(survey), folder / name)
    return [f"{name}.svg" for name in draws]


def _plot(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def draw_score_maps(survey: Survey) -> Any:
    """Draw a heat map of layers by heads for each ranking, with its best heads marked."""
    from matplotlib.colors import LinearSegmentedColormap

    layers, names = survey.anatomy.attention_layers, list(survey.rankings)
    across = max(len(layer.heads) for layer in layers)
    columns = min(len(names), 3 if across <= 16 else 2)
    rows = -(-len(names) // columns)
    plot = _plot(max(3.0, 0.16 * across + 0.9) * columns, (max(1.1, 0.13 * len(layers) + 0.75)) * rows)
    axes = plot.subplots(rows, columns, squeeze=False)
    heat = LinearSegmentedColormap.from_list("heat", HEAT)
    for ax, name in zip(axes.flat, names, strict=False):
        ranking = survey.rankings[name]
        values = ranking.scores or {head: float(-i) for i, head in enumerate(ranking.order)}
        grid = np.array([[values.get(Head(layer.index, i), np.nan) for i in range(across)] for layer in layers])
        image = ax.imshow(grid, cmap=heat, aspect="auto", interpolation="nearest")
        _add_color_bar(plot, ax, image, grid, "" if ranking.scores else "place")
        place = {layer.index: row for row, layer in enumerate(layers)}
        for head in ranking.top(heads_of_share(SHARE, len(ranking.order))):
            ax.plot(head.index, place[head.layer], "o", markersize=2.6, color=EDGE, markeredgecolor="white", markeredgewidth=0.3)
        ax.set_title(name)
        step = max(1, len(layers) // 10)
        ax.set_yticks(range(0, len(layers), step), [str(layer.index) for layer in layers][::step])
        ax.xaxis.get_major_locator().set_params(integer=True)  # heads have integer indices
        ax.set_xlabel("head")
        ax.set_ylabel("layer")
    for ax in axes.flat[len(names) :]:
        ax.set_axis_off()
    plot.suptitle(f"{survey.model.name}: scores of heads (dots: the best {SHARE:.0%})", fontsize=9)
    return plot


def _add_color_bar(plot: Any, ax: Any, image: Any, grid: np.ndarray, label: str) -> None:
    """Add a colour bar with the lowest and the highest score of a map; every map has its own scale."""
    ends = sorted({float(np.nanmin(grid)), float(np.nanmax(grid))})
    bar = plot.colorbar(image, ax=ax, ticks=ends, fraction=0.08, pad=0.03, aspect=12)
    bar.ax.set_yticklabels([f"{1 - end:.0f}" if label else f"{end:.2g}" for end in ends])
    bar.ax.tick_params(labelsize=5.5, length=1.5)
    bar.set_label(label, fontsize=5.5)


def draw_curves(survey: Survey) -> Any:
    """Draw retrieval against heads kept, with the area of each curve in the legend; curves are offset so that none is hidden."""
    plot = _plot(5.2, 3.2)
    ax = plot.subplots()
    ordered = sorted(survey.curves.values(), key=lambda curve: -curve.area.value)
    colored = [curve for curve in ordered if curve.name != RANDOM]
    for i, curve in enumerate(colored):
        aside = _BESIDE * (i - (len(ordered) - 1) / 2)
        _draw_curve(ax, curve, COLORS[1 + i % (len(COLORS) - 1)], "-" if i < len(COLORS) - 1 else "--", aside)
    if RANDOM in survey.curves:
        _draw_curve(ax, survey.curves[RANDOM], COLORS[0], ":", _BESIDE * (len(ordered) - 1) / 2)
    heads = ordered[0].heads
    if survey.smallest:
        ax.axvline(len(survey.smallest.heads), color=EDGE, linewidth=0.8, linestyle="--")
        note = f" {len(survey.smallest.heads)} keep {100 * survey.smallest.keep:g} %"
        ax.annotate(note, (len(survey.smallest.heads), 0.03), fontsize=6.5, color=EDGE)
    ax.set_xscale("symlog", linthresh=1)
    ticks = [k for k in ordered[0].ks if k in (0, 1, 2, 4, 9, 21, 48, 108) or k == heads]
    ax.set_xticks(ticks, [str(k) for k in ticks])
    ax.minorticks_off()
    ax.set_xlim(-0.15, 1.2 * heads)
    ax.set_ylim(-0.03, 1.05)
    ax.set_yticks([0, 0.5, 1], ["0", "50", "100"])
    ax.set_xlabel(f"heads kept of {heads}, all others silent at every position")
    ax.set_ylabel("retrieval, exact match [%]")
    ax.set_title(f"{survey.model.name}: rankings on held-out samples (n = {ordered[0].area.n})")
    ax.legend(title="area under the curve", title_fontsize=6.5, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return plot


def _draw_curve(ax: Any, curve: RetrievalCurve, color: str, style: str, aside: float) -> None:
    """Draw a curve with error bars, shifted by `aside` points; a shift in data units would vary on the logarithmic axis."""
    from matplotlib.transforms import ScaledTranslation

    points = [curve.at(k) for k in curve.ks]
    label = f"{curve.name} {percent(curve.area.value)}"
    moved = ax.transData + ScaledTranslation(aside / 72, 0, ax.figure.dpi_scale_trans)
    spread = np.maximum([[p.value - p.low for p in points], [p.high - p.value for p in points]], 0)
    looks = {"linewidth": 1.1, "marker": "o", "markersize": 2.2, "elinewidth": 0.6, "capsize": 1.0, "capthick": 0.6}
    ax.errorbar(curve.ks, [p.value for p in points], yerr=spread, fmt=style, color=color, label=label, transform=moved, **looks)


def draw_dynamic(survey: Survey) -> Any:
    """Draw retrieval with its interval under each way to select heads."""
    assert survey.dynamic is not None
    ways = survey.dynamic.ways
    plot = _plot(6.8, 0.26 * len(ways) + 0.9)
    ax = plot.subplots()
    for row, way in enumerate(ways):
        kind = way.name.partition(":")[0]
        color = {"dynamic": COLORS[2], "static": COLORS[1]}.get(kind, COLORS[0])
        estimate: Estimate = way.retrieval
        spread = [[estimate.value - estimate.low], [estimate.high - estimate.value]]
        ax.errorbar(estimate.value, row, xerr=np.maximum(spread, 0), fmt="o", color=color, markersize=4, capsize=2, linewidth=1)
    ax.set_yticks(range(len(ways)), [f"{way.name} ({way.heads})" for way in ways])
    ax.invert_yaxis()
    ax.set_xlim(-0.03, 1.03)
    ax.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25", "50", "75", "100"])
    ax.grid(axis="x", linewidth=0.3, color="#d0d0d0")
    ax.set_xlabel(f"retrieval [%], 95 % intervals, n = {ways[0].retrieval.n}")
    plot.suptitle(f"{survey.model.name}: {survey.dynamic.share:.0%} of the heads of each layer, static or dynamic", fontsize=9)
    return plot


def save_recurrent_plot(side: RecurrentSide, path: Path, title: str = "") -> None:
    """Plot the log P that retrieval loses without each group, accuracy under the cuts, and top groups against random ones."""
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise NeedleworkError(f"{path}: a picture is a .png, .svg or .pdf file")
    plot = _plot(11, 3.4)
    left, middle, right = plot.subplots(1, 3, width_ratios=(1.5, 1, 1.1))
    _draw_group_map(side, left, plot)
    _draw_bars(
        middle,
        [("untouched", ("none",)), *((CUTS[site], (site,)) for site in side.sites)],
        side,
        "memory cut in all layers",
    )
    conditions: list[Condition] = [("untouched", ("none",))]
    for share, count in side.sizes.items():
        conditions += [(f"top {count}", (f"top {share}",)), (f"random {count}", tuple(side.random(share)))]
    _draw_bars(right, conditions, side, f"groups silenced, of {len(side.groups)}")
    if len(side.abilities) > 1:
        plot.legend(
            *middle.get_legend_handles_labels(), loc="outside upper right", ncols=len(side.abilities), fontsize=8, frameon=False
        )
    plot.suptitle(f"{title} recurrent side".strip(), fontsize=10)
    plot.savefig(path, dpi=150)


def _draw_group_map(side: RecurrentSide, ax: Any, plot: Any) -> None:
    from matplotlib.colors import SymLogNorm

    widest = 1 + max(group.index for group in side.groups)
    cells = np.full((len(side.layers), widest), np.nan)
    for group, drop in side.group_losses():
        cells[side.layers.index(group.layer), group.index] = drop.value
    most = max(10 * LINEAR_NATS, float(np.nanmax(np.abs(cells))))
    scale = SymLogNorm(LINEAR_NATS, vmin=-most, vmax=most)  # losses of groups differ by factors of 100
    image = ax.imshow(cells, cmap="RdBu_r", norm=scale, aspect="auto")
    ax.set_yticks(range(len(side.layers)), [f"layer {layer}" for layer in side.layers], fontsize=8)
    ax.set_xlabel(f"group ({'/'.join(side.kinds)})", fontsize=8)
    ax.tick_params(axis="x", labelsize=8)
    ax.set_title("nats that retrieval loses without a group", fontsize=8)
    plot.colorbar(image, ax=ax, shrink=0.85).ax.tick_params(labelsize=7)


def _draw_bars(ax: Any, conditions: Sequence[Condition], side: RecurrentSide, title: str) -> None:
    height = 0.8 / len(side.abilities)
    for a, ability in enumerate(side.abilities):
        for i, (_, done) in enumerate(conditions):
            estimate = ability.said(*done)
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
