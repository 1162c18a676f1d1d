"""Pictures of heads: their scores by layer, retrieval against heads kept, and static against dynamic choice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from needlework.anatomy import Head, heads_of_share
from needlework.heads.agreement import SHARE
from needlework.heads.judging import RANDOM, Curve
from needlework.heads.survey import Survey
from needlework.report.charts import COLORS, EDGE, HEAT, STYLE, write
from needlework.stats import Estimate, percent

_BESIDE = 1.8  # between curves, in points
NAMES = ("heads", "curves", "static-or-dynamic")


def save(survey: Survey, folder: Path) -> list[Path]:
    """PNG and SVG of each picture there is something for."""
    import matplotlib

    written = []
    with matplotlib.rc_context(STYLE):
        for name, draw in _pictures(survey):
            write(draw(survey), folder / name)
            written += [folder / f"{name}.png", folder / f"{name}.svg"]
    return written


def _pictures(survey: Survey) -> Iterator[tuple[str, Callable[[Survey], Any]]]:
    yield NAMES[0], _maps
    if survey.curves:
        yield NAMES[1], _curves
    if survey.dynamic:
        yield NAMES[2], _dynamic


def _canvas(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _maps(survey: Survey) -> Any:
    """Layer x head: one map a ranking, from its lowest score to its highest, its best heads marked."""
    from matplotlib.colors import LinearSegmentedColormap

    layers, names = survey.anatomy.attention_layers, list(survey.rankings)
    across = max(len(layer.heads) for layer in layers)
    columns = min(len(names), 3 if across <= 16 else 2)
    rows = -(-len(names) // columns)
    canvas = _canvas(max(3.0, 0.16 * across + 0.9) * columns, (max(1.1, 0.13 * len(layers) + 0.75)) * rows)
    axes = canvas.subplots(rows, columns, squeeze=False)
    heat = LinearSegmentedColormap.from_list("heat", HEAT)
    for ax, name in zip(axes.flat, names, strict=False):
        ranking = survey.rankings[name]
        values = ranking.scores or {head: float(-i) for i, head in enumerate(ranking.order)}
        grid = np.array([[values.get(Head(layer.index, i), np.nan) for i in range(across)] for layer in layers])
        image = ax.imshow(grid, cmap=heat, aspect="auto", interpolation="nearest")
        _scale(canvas, ax, image, grid, "" if ranking.scores else "place")
        place = {layer.index: row for row, layer in enumerate(layers)}
        for head in ranking.top(heads_of_share(SHARE, len(ranking.order))):
            ax.plot(head.index, place[head.layer], "o", markersize=2.6, color=EDGE, markeredgecolor="white", markeredgewidth=0.3)
        ax.set_title(name)
        step = max(1, len(layers) // 10)
        ax.set_yticks(range(0, len(layers), step), [str(layer.index) for layer in layers][::step])
        ax.xaxis.get_major_locator().set_params(integer=True)  # there is no head 2.5
        ax.set_xlabel("head")
        ax.set_ylabel("layer")
    for ax in axes.flat[len(names) :]:
        ax.set_axis_off()
    canvas.suptitle(f"{survey.model.name}: scores of heads (dots: the best {SHARE:.0%})", fontsize=9)
    return canvas


def _scale(canvas: Any, ax: Any, image: Any, grid: np.ndarray, label: str) -> None:
    """A colour bar with the lowest and the highest score of a map: each has a scale of its own."""
    ends = sorted({float(np.nanmin(grid)), float(np.nanmax(grid))})
    bar = canvas.colorbar(image, ax=ax, ticks=ends, fraction=0.08, pad=0.03, aspect=12)
    bar.ax.set_yticklabels([f"{1 - end:.0f}" if label else f"{end:.2g}" for end in ends])
    bar.ax.tick_params(labelsize=5.5, length=1.5)
    bar.set_label(label, fontsize=5.5)


def _curves(survey: Survey) -> Any:
    """Retrieval against heads kept, with the area under each curve. Points of several curves stand side by side."""
    canvas = _canvas(5.2, 3.2)
    ax = canvas.subplots()
    ordered = sorted(survey.curves.values(), key=lambda curve: -curve.area.value)
    colored = [curve for curve in ordered if curve.name != RANDOM]
    for i, curve in enumerate(colored):
        aside = _BESIDE * (i - (len(ordered) - 1) / 2)
        _line(ax, curve, COLORS[1 + i % (len(COLORS) - 1)], "-" if i < len(COLORS) - 1 else "--", aside)
    if RANDOM in survey.curves:
        _line(ax, survey.curves[RANDOM], COLORS[0], ":", _BESIDE * (len(ordered) - 1) / 2)
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
    return canvas


def _line(ax: Any, curve: Curve, color: str, style: str, aside: float) -> None:
    """Points with bars for their intervals, moved aside by so many points of the paper: the axis is no plain scale."""
    from matplotlib.transforms import ScaledTranslation

    points = [curve.at(k) for k in curve.ks]
    label = f"{curve.name} {percent(curve.area.value)}"
    moved = ax.transData + ScaledTranslation(aside / 72, 0, ax.figure.dpi_scale_trans)
    spread = np.maximum([[p.value - p.low for p in points], [p.high - p.value for p in points]], 0)
    looks = {"linewidth": 1.1, "marker": "o", "markersize": 2.2, "elinewidth": 0.6, "capsize": 1.0, "capthick": 0.6}
    ax.errorbar(curve.ks, [p.value for p in points], yerr=spread, fmt=style, color=color, label=label, transform=moved, **looks)


def _dynamic(survey: Survey) -> Any:
    """What each way to choose heads keeps, with its interval."""
    assert survey.dynamic is not None
    ways = survey.dynamic.ways
    canvas = _canvas(6.8, 0.26 * len(ways) + 0.9)
    ax = canvas.subplots()
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
    canvas.suptitle(f"{survey.model.name}: {survey.dynamic.share:.0%} of the heads of each layer, static or dynamic", fontsize=9)
    return canvas
