"""What a figure shows, before it is drawn: the page, the picture files and the tables behind them all read these values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from needlework.stats import Estimate

HeaderAndRows = tuple[list[str], list[list[str]]]
FORM_COLORS = {"cloze": 4, "letter": 5}  # how knowledge is asked for -> its colour in every figure


@dataclass(frozen=True)
class Point:
    x: float
    y: Estimate
    key: str = ""  # of the trials behind it, for the trial browser


@dataclass(frozen=True)
class Series:
    label: str
    color: int  # 1..6 of the palette, 0 for controls
    points: Sequence[Point]
    dashed: bool = False


@dataclass(frozen=True)
class Lines:
    """Curves with bands of uncertainty."""

    group: str  # the model
    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    percent: bool = True  # y is a share; else a positive number on a log axis
    share_x: bool = True  # x is a share; else tokens on a log axis
    level: tuple[float, str] | None = None  # a horizontal line with its name
    mark: tuple[float, str] | None = None  # a vertical one
    signed: bool = False  # y is a difference of shares, in points


@dataclass(frozen=True)
class Cell:
    y: Estimate
    key: str = ""
    outside: bool = False  # the needle is outside the window


@dataclass(frozen=True)
class Grid:
    """A heat map. Cells that were not measured are None."""

    group: str
    title: str
    row_title: str
    col_title: str
    rows: Sequence[str]
    cols: Sequence[str]
    cells: Sequence[Sequence[Cell | None]]
    top: float = 1.0  # the value of the darkest colour
    numbers: bool = True  # write the values into the cells
    signed: bool = False  # differences of shares, in points: the colour says how large, the number says which way


@dataclass(frozen=True)
class Dot:
    label: str
    color: int
    y: Estimate
    key: str = ""
    follows: bool = False  # the same as the dot before, of another checkpoint: drawn close below it


@dataclass(frozen=True)
class Dots:
    """Estimates one below the other, each with its interval."""

    group: str
    title: str
    x_label: str
    dots: Sequence[Dot]
    level: tuple[float, str] | None = None
    signed: bool = False
    legend: Sequence[tuple[str, int]] = ()  # names and colours of checkpoints; labels end with these names

    def drawn(self, dot: Dot) -> str:
        """What is written beside a dot: its label, less what the legend says."""
        if dot.follows:
            return ""
        return dot.label.removesuffix(f", {self.legend[0][0]}") if self.legend else dot.label


Panel = Lines | Grid | Dots


@dataclass(frozen=True)
class Figure:
    id: str
    title: str
    caption: str
    panels: Sequence[Panel] = field(default_factory=tuple)

    def by_group(self) -> list[list[Panel]]:
        """The panels of each model."""
        groups: dict[str, list[Panel]] = {}
        for panel in self.panels:
            groups.setdefault(panel.group, []).append(panel)
        return list(groups.values())


def keys(panel: Panel) -> set[str]:
    """Of all trials that can be opened from this panel."""
    if isinstance(panel, Grid):
        marks = {cell.key for line in panel.cells for cell in line if cell is not None}
    elif isinstance(panel, Dots):
        marks = {dot.key for dot in panel.dots}
    else:
        marks = {point.key for series in panel.series for point in series.points}
    return marks - {""}


def said(panel: Panel, y: Estimate) -> str:
    """A number of a panel with its interval, in the panel's unit."""
    if panel.signed and y.n and y.value == y.value:
        value, low, high = (f"{100 * v:+.1f}".removesuffix(".0") for v in (y.value, y.low, y.high))
        return f"{value} points [{low}, {high}], n = {y.n:,}"
    return y.text("" if isinstance(panel, Lines) and not panel.percent else "%")


def table(panel: Panel) -> HeaderAndRows:
    """The same numbers as header and rows, for readers who do not see the figure."""
    if isinstance(panel, Grid):
        body = [[name, *(_cell_text(panel, cell) for cell in line)] for name, line in zip(panel.rows, panel.cells, strict=True)]
        return [f"{panel.row_title} \\ {panel.col_title}", *panel.cols], body
    if isinstance(panel, Dots):
        return ["", panel.x_label], [[dot.label, said(panel, dot.y)] for dot in panel.dots]
    places = sorted({point.x for series in panel.series for point in series.points})
    curves = [{point.x: said(panel, point.y) for point in series.points} for series in panel.series]
    body = [[f"{100 * x:.0f} %" if panel.share_x else f"{x:g}", *(curve.get(x, "–") for curve in curves)] for x in places]
    return [panel.x_label, *(series.label for series in panel.series)], body


def _cell_text(panel: Grid, cell: Cell | None) -> str:
    return "–" if cell is None else said(panel, cell.y) + " (out of window)" * cell.outside


def span(panel: Lines | Dots) -> float:
    """How far the axis of a panel of differences reaches to both sides: room for every interval, up to 100 points."""
    marks = (
        [point.y for series in panel.series for point in series.points] if isinstance(panel, Lines) else [d.y for d in panel.dots]
    )
    most = max([0.0, *(abs(end) for y in marks for end in (y.low, y.high) if math.isfinite(end))])
    return next((step for step in (0.1, 0.25, 0.5) if most <= step), 1.0)
