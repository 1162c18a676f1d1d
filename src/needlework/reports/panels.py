"""Data of figures, independent of drawing: panels of curves, heat maps and dots, and their tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from needlework.stats import Estimate
from needlework.tables import Table

LegendItem = tuple[str, int, bool]  # label, colour, dashed
FORM_COLORS = {"cloze": 4, "letter": 5}  # form of knowledge questions -> colour in every figure


@dataclass(frozen=True)
class CurvePoint:
    x: float
    y: Estimate
    key: str = ""  # key of its trials in the trial browser


@dataclass(frozen=True)
class Series:
    label: str
    color: int  # 1..6 of the palette, 0 for controls
    points: Sequence[CurvePoint]
    dashed: bool = False


@dataclass(frozen=True)
class _Panel:
    group: str  # the model
    title: str

    def marks(self) -> Sequence[CurvePoint | Cell | Dot]:
        """Return all elements that show an estimate."""
        raise NotImplementedError

    def keys(self) -> set[str]:
        """Return the trial browser's keys of this panel."""
        return {mark.key for mark in self.marks()} - {""}

    def legend_items(self) -> list[LegendItem]:
        return []


@dataclass(frozen=True)
class Lines(_Panel):
    """Curves with 95 % bands."""

    x_label: str
    y_label: str
    series: Sequence[Series]
    percent: bool = True  # y is a share; else a positive number on a log axis
    share_x: bool = True  # x is a share; else tokens on a log axis
    level: tuple[float, str] | None = None  # y and label of a horizontal reference line
    mark: tuple[float, str] | None = None  # x and label of a vertical reference line
    signed: bool = False  # y is a difference of shares, in points

    def marks(self) -> list[CurvePoint]:
        return [point for series in self.series for point in series.points]

    def legend_items(self) -> list[LegendItem]:
        return [(series.label, series.color, series.dashed) for series in self.series]

    def format(self, y: Estimate) -> str:
        return _in_points(y) if self.signed else y.text("%" if self.percent else "")

    def table(self) -> Table:
        """Return the same numbers as a table, for screen readers and copying."""
        places = sorted({point.x for point in self.marks()})
        curves = [{point.x: self.format(point.y) for point in series.points} for series in self.series]
        rows = [[f"{100 * x:.0f} %" if self.share_x else f"{x:g}", *(curve.get(x, "–") for curve in curves)] for x in places]
        return Table([self.x_label, *(series.label for series in self.series)], rows, f"{self.group}: {self.title}")


@dataclass(frozen=True)
class Cell:
    y: Estimate
    key: str = ""
    outside: bool = False  # the needle is outside the window


@dataclass(frozen=True)
class HeatMap(_Panel):
    """A heat map; cells without measurements are None."""

    row_title: str
    col_title: str
    rows: Sequence[str]
    cols: Sequence[str]
    cells: Sequence[Sequence[Cell | None]]
    top: float = 1.0  # value of the darkest colour
    numbers: bool = True  # write the values into the cells
    signed: bool = False  # differences of shares, in points: colour shows the magnitude, the number its sign

    def marks(self) -> list[Cell]:
        return [cell for line in self.cells for cell in line if cell is not None]

    def format(self, y: Estimate) -> str:
        return _in_points(y) if self.signed else y.text()

    def table(self) -> Table:
        rows = []
        for name, line in zip(self.rows, self.cells, strict=True):
            texts = ["–" if c is None else self.format(c.y) + " (out of window)" * c.outside for c in line]
            rows.append([name, *texts])
        return Table([f"{self.row_title} \\ {self.col_title}", *self.cols], rows, f"{self.group}: {self.title}")


@dataclass(frozen=True)
class Dot:
    label: str
    color: int
    y: Estimate
    key: str = ""
    follows: bool = False  # same quantity as the previous dot, for another checkpoint: drawn close below it


@dataclass(frozen=True)
class Dots(_Panel):
    """A dot plot: one estimate with its interval per row."""

    x_label: str
    dots: Sequence[Dot]
    level: tuple[float, str] | None = None
    signed: bool = False
    legend: Sequence[tuple[str, int]] = ()  # (name, colour) of checkpoints; labels of dots end with these names

    def marks(self) -> Sequence[Dot]:
        return self.dots

    def legend_items(self) -> list[LegendItem]:
        return [(name, color, False) for name, color in self.legend]

    def format(self, y: Estimate) -> str:
        return _in_points(y) if self.signed else y.text()

    def table(self) -> Table:
        rows = [[dot.label, self.format(dot.y)] for dot in self.dots]
        return Table(["", self.x_label], rows, f"{self.group}: {self.title}")

    def short_label(self, dot: Dot) -> str:
        """Return a dot's label without the checkpoint's name, which is in the legend."""
        if dot.follows:
            return ""
        return dot.label.removesuffix(f", {self.legend[0][0]}") if self.legend else dot.label


Panel = Lines | HeatMap | Dots


@dataclass(frozen=True)
class Figure:
    id: str
    title: str
    caption: str
    panels: Sequence[Panel] = field(default_factory=tuple)

    def rows(self) -> list[tuple[str, Sequence[Panel], str]]:
        """Return (heading, panels, kind) per row of panels: one row per model, or one in all if every model has one panel.

        The kind sets the width of panels: "small" for heat maps, "two" for two side by side, "" for the default.
        """
        groups: dict[str, list[Panel]] = {}
        for panel in self.panels:
            groups.setdefault(panel.group, []).append(panel)
        if all(len(panels) == 1 for panels in groups.values()):
            return [("", self.panels, "")]
        return [(name, panels, "small" if isinstance(panels[0], HeatMap) else "two") for name, panels in groups.items()]

    def scale_top(self) -> float:
        """Return the value of the darkest colour over all heat maps, 0 if there are none."""
        return max((panel.top for panel in self.panels if isinstance(panel, HeatMap)), default=0.0)


def _in_points(y: Estimate) -> str:
    """Format a difference of shares with its interval, in points."""
    if not y.n or y.value != y.value:
        return y.text()
    value, low, high = (f"{100 * v:+.1f}".removesuffix(".0") for v in (y.value, y.low, y.high))
    return f"{value} points {f'({y.why})' if y.why else f'[{low}, {high}]'}, n = {y.n:,}"


def signed_limit(panel: Lines | Dots) -> float:
    """Return the limit of a symmetric axis of differences: 0.1, 0.25 or 0.5 if all intervals fit, else 1."""
    most = max([0.0, *(abs(end) for mark in panel.marks() for end in (mark.y.low, mark.y.high) if math.isfinite(end))])
    return next((step for step in (0.1, 0.25, 0.5) if most <= step), 1.0)
