"""The figures as picture files, drawn with matplotlib from the same values as the page."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from needlework.files import beside
from needlework.report.overview import Overview
from needlework.report.overview_chart import finding
from needlework.report.spec import Dots, Figure, Grid, Lines, Panel, span
from needlework.report.svg import in_points, log_ticks
from needlework.stats import whole_percent

COLORS = ("#8b8f97", "#1f5f8b", "#c8702a", "#6a8f3c", "#7a4f9a", "#b8336a", "#0f8b8d")
HEAT = ("#f4efe3", "#6fb3b0", "#143d66")
EDGE = "#b3541e"
STYLE = {
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "legend.fontsize": 6.5,
    "legend.framealpha": 0.75,
    "legend.edgecolor": "none",
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "svg.fonttype": "none",
    "text.parse_math": False,  # a dollar in a model's name is a dollar
    "svg.hashsalt": "needlework",
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
}


def save(figures: Sequence[Figure], folder: Path, overview: Overview) -> None:
    """PNG and SVG of the finding and of each figure; one row of panels per model."""
    import matplotlib
    from matplotlib.figure import Figure as Canvas

    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # of a name in another script: a box stands for it
        if overview.blocks:
            write(finding(overview, Canvas), folder / "finding")
        for figure in figures:
            write(_draw(figure, Canvas), folder / figure.id)


def write(canvas: Any, path: Path) -> None:
    canvas.draw_without_rendering()
    canvas.set_layout_engine("none")  # laid out once, not again for each file
    for ending, options in (("png", {"dpi": 150}), ("svg", {"metadata": {"Date": None}})):
        with beside(path.with_suffix(f".{ending}")) as half:
            canvas.savefig(half, format=ending, **options)


def _draw(figure: Figure, canvas_type: Any) -> Any:
    groups = figure.by_group()
    lines = [list(figure.panels)] if all(len(panels) == 1 for panels in groups) else groups
    wide = min(4, max(len(line) for line in lines))
    lines = [line[i : i + wide] for line in lines for i in range(0, len(line), wide)]
    heights = [max(_height(panel) for panel in line) for line in lines]
    panel_width = 4.3 if any(isinstance(panel, Dots) for panel in figure.panels) else 3.3  # inches; names need their room
    canvas = canvas_type(figsize=(panel_width * wide, sum(heights)), layout="constrained")
    axes = canvas.subplots(len(lines), wide, squeeze=False, gridspec_kw={"height_ratios": heights})
    for line, row in zip(lines, axes, strict=True):
        for i, ax in enumerate(row):
            if i >= len(line):
                ax.set_axis_off()
                continue
            _panel(line[i], ax)
            name = line[i].group
            ax.set_title(line[i].title if line[i].title == name else f"{name}: {line[i].title}")
    return canvas


def _height(panel: Panel) -> float:
    if isinstance(panel, Dots):
        return 0.8 + 0.24 * len(panel.dots)
    return 1.1 + 0.26 * min(10, len(panel.rows)) if isinstance(panel, Grid) else 2.7


def _panel(panel: Panel, ax: Any) -> None:
    if isinstance(panel, Lines):
        _lines(panel, ax)
    elif isinstance(panel, Grid):
        _grid(panel, ax)
    else:
        _dots(panel, ax)


def _lines(panel: Lines, ax: Any) -> None:
    scale = 100 if panel.percent else 1
    for series in panel.series:
        x = [point.x * (100 if panel.share_x else 1) for point in series.points]
        color, style = COLORS[series.color], "--" if series.dashed else "-"
        ax.fill_between(
            x,
            *([getattr(p.y, end) * scale for p in series.points] for end in ("low", "high")),
            color=color,
            alpha=0.14,
            linewidth=0,
        )
        y = [point.y.value * scale for point in series.points]
        ax.plot(
            x,
            y,
            style,
            color=color,
            linewidth=1.3,
            marker="o",
            markersize=3,
            label=series.label,
            markerfacecolor="white" if series.dashed else color,
        )
    if panel.signed:
        ax.set_ylim(-100 * span(panel), 100 * span(panel))
    elif panel.percent:
        ax.set_ylim(-3, max(104.0, min(130.0, ax.get_ylim()[1])))
    else:
        ax.set_yscale("log")
        ticks = log_ticks(*ax.get_ylim())
        ax.set_yticks([value for value, _ in ticks], [label for _, label in ticks])
        ax.minorticks_off()
    if not panel.share_x:
        ax.set_xscale("log")
        places = sorted({point.x for series in panel.series for point in series.points})
        ax.set_xticks(places, [f"{place:g}" for place in places])
        ax.minorticks_off()
    for mark, line in ((panel.level, ax.axhline), (panel.mark, ax.axvline)):
        if mark:
            of_share = panel.percent if line == ax.axhline else panel.share_x
            line(mark[0] * (100 if of_share else 1), color="#767d88", linewidth=0.6, linestyle=":")
    ax.set_xlabel(panel.x_label + (", %" if panel.share_x else ""))
    ax.set_ylabel(panel.y_label + (", %" if panel.percent and not panel.signed else ""))
    ax.grid(axis="y", color="#ebe8e0", linewidth=0.5)
    ax.legend(loc="lower right" if panel.percent else "upper right")


def _grid(panel: Grid, ax: Any) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    values = [[math.nan if cell is None else abs(cell.y.value) / panel.top for cell in line] for line in panel.cells]
    ax.imshow(values, cmap=LinearSegmentedColormap.from_list("needlework", HEAT), vmin=0, vmax=1, aspect="auto")
    for r, line in enumerate(panel.cells):
        for c, cell in enumerate(line):
            if cell is not None and panel.numbers:
                ink = "white" if abs(cell.y.value) / panel.top > 0.62 else "#23303d"
                words = in_points(cell.y.value) if panel.signed else whole_percent(cell.y.value)
                text = ax.text(c, r, words, ha="center", va="center", fontsize=6.5, color=ink)
                text.set_in_layout(False)
            _edge(panel, r, c, ax)
    turned = max(map(len, panel.cols)) > 5
    ax.set_xticks(range(len(panel.cols)), panel.cols, rotation=35 if turned else 0, ha="right" if turned else "center")
    ax.set_yticks(range(len(panel.rows)), panel.rows)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.set_xlabel(panel.col_title)
    ax.set_ylabel(panel.row_title)


def _edge(panel: Grid, r: int, c: int, ax: Any) -> None:
    """The window's edge, where this cell and the next one lie on its two sides."""
    cell = panel.cells[r][c]
    right = panel.cells[r][c + 1] if c + 1 < len(panel.cols) else None
    below = panel.cells[r + 1][c] if r + 1 < len(panel.rows) else None
    if cell and right and cell.outside != right.outside:
        ax.plot([c + 0.5] * 2, [r - 0.5, r + 0.5], color=EDGE, linewidth=1.6)
    if cell and below and cell.outside != below.outside:
        ax.plot([c - 0.5, c + 0.5], [r + 0.5] * 2, color=EDGE, linewidth=1.6)


def _dots(panel: Dots, ax: Any) -> None:
    for i, dot in enumerate(panel.dots):
        ax.plot([dot.y.low * 100, dot.y.high * 100], [i, i], color=COLORS[dot.color], linewidth=1.6, alpha=0.55)
        ax.plot([dot.y.value * 100], [i], "o", color=COLORS[dot.color], markersize=4)
    ax.set_yticks(range(len(panel.dots)), [panel.drawn(dot) for dot in panel.dots])
    ax.set_ylim(len(panel.dots) - 0.5, -0.5)
    for name, color in panel.legend:
        ax.plot([], [], "o", color=COLORS[color], markersize=4, label=name)
    if panel.legend:
        ax.legend(loc="lower right")
    if panel.signed:
        ax.set_xlim(-100 * span(panel), 100 * span(panel))
    else:
        ax.set_xlim(min(-3.0, max(-50.0, ax.get_xlim()[0])), max(103.0, min(150.0, ax.get_xlim()[1])))
    if panel.level:
        ax.axvline(panel.level[0] * 100, color="#767d88", linewidth=0.6, linestyle=":")
    ax.grid(axis="x", color="#ebe8e0", linewidth=0.5)
    ax.set_xlabel(panel.x_label + ("" if panel.signed else ", %"))
