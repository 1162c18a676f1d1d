"""Data of figures, independent of drawing: panels of curves, heat maps and dots, and their tables.

The panels of checkpoints of one model are merged: their results in one panel, and differences from the first checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import TypeVar

import numpy as np

from needlework import stats
from needlework.analysis.frame import Frame, Ints
from needlework.analysis.model_trials import ModelTrials, by_model_and_boundary
from needlework.reports.browser import Browser
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
    signed: bool = field(default=False, kw_only=True)  # values are differences of shares, in points

    @property
    def full_title(self) -> str:
        """The title, with the model that the panel is about."""
        return self.title if self.group in self.title else f"{self.group}: {self.title}"

    def marks(self) -> Sequence[Mark]:
        """Return all elements that show an estimate."""
        raise NotImplementedError

    def keys(self) -> set[str]:
        """Return the trial browser's keys of this panel."""
        return {mark.key for mark in self.marks()} - {""}

    def legend_items(self) -> list[LegendItem]:
        return []

    def format(self, y: Estimate) -> str:
        """Format a value with its interval; a difference in points."""
        if not self.signed or not y.n or y.value != y.value:
            return y.text()
        value, low, high = (f"{100 * v:+.1f}".removesuffix(".0") for v in (y.value, y.low, y.high))
        return f"{value} points {f'({y.why})' if y.why else f'[{low}, {high}]'}, n = {y.n:,}"


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

    def marks(self) -> list[CurvePoint]:
        return [point for series in self.series for point in series.points]

    def legend_items(self) -> list[LegendItem]:
        return [(series.label, series.color, series.dashed) for series in self.series]

    def format(self, y: Estimate) -> str:
        return super().format(y) if self.percent else y.text("")

    def table(self) -> Table:
        """Return the same numbers as a table, for screen readers and copying."""
        places = sorted({point.x for point in self.marks()})
        curves = [{point.x: self.format(point.y) for point in series.points} for series in self.series]
        rows = [[f"{100 * x:.0f} %" if self.share_x else f"{x:g}", *(curve.get(x, "–") for curve in curves)] for x in places]
        return Table([self.x_label, *(series.label for series in self.series)], rows, self.full_title)


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

    def marks(self) -> list[Cell]:
        return [cell for line in self.cells for cell in line if cell is not None]

    def table(self) -> Table:
        rows = []
        for name, line in zip(self.rows, self.cells, strict=True):
            texts = ["–" if c is None else self.format(c.y) + " (out of window)" * c.outside for c in line]
            rows.append([name, *texts])
        return Table([f"{self.row_title} \\ {self.col_title}", *self.cols], rows, self.full_title)


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
    legend: Sequence[tuple[str, int]] = ()  # (name, colour) of checkpoints; labels of dots end with these names

    def marks(self) -> Sequence[Dot]:
        return self.dots

    def legend_items(self) -> list[LegendItem]:
        return [(name, color, False) for name, color in self.legend]

    def table(self) -> Table:
        rows = [[dot.label, self.format(dot.y)] for dot in self.dots]
        return Table(["", self.x_label], rows, self.full_title)

    def short_label(self, dot: Dot) -> str:
        """Return a dot's label without the checkpoint's name, which is in the legend."""
        if dot.follows:
            return ""
        return dot.label.removesuffix(f", {self.legend[0][0]}") if self.legend else dot.label


Panel = Lines | HeatMap | Dots
Mark = CurvePoint | Cell | Dot


P = TypeVar("P", bound=Panel)


def per_model(make: Callable[[ModelTrials, Browser], Iterable[P]]) -> Callable[[Frame, Browser], list[P]]:
    """Return a function that makes the panels of all models of a frame, from one that makes those of one model."""

    def make_all(frame: Frame, browser: Browser) -> list[P]:
        return [panel for trials in by_model_and_boundary(frame) for panel in make(trials, browser)]

    return make_all


@dataclass(frozen=True)
class Figure:
    id: str
    title: str
    caption: str
    panels: Sequence[Panel] = ()

    def rows(self) -> list[tuple[Sequence[Panel], str]]:
        """Return (panels, kind) per row of panels: one row per model, or one in all if every model has one panel.

        The kind sets the width of panels: "small" for heat maps, "two" for two side by side, "" for the default and where a
        model has heat maps and others.
        """
        groups: dict[str, list[Panel]] = {}
        for panel in self.panels:
            groups.setdefault(panel.group, []).append(panel)
        if all(len(panels) == 1 for panels in groups.values()):
            return [(self.panels, "")]
        kinds = {frozenset({True}): "small", frozenset({False}): "two"}
        return [(some, kinds.get(frozenset(isinstance(panel, HeatMap) for panel in some), "")) for some in groups.values()]

    def scale_top(self) -> float:
        """Return the value of the darkest colour over all heat maps, 0 if there are none."""
        return max((panel.top for panel in self.panels if isinstance(panel, HeatMap)), default=0.0)


def signed_limit(panel: Lines | Dots) -> float:
    """Return the limit of a symmetric axis of differences: 0.1, 0.25 or 0.5 if all intervals fit, else 1."""
    most = max([0.0, *(abs(end) for mark in panel.marks() for end in (mark.y.low, mark.y.high) if math.isfinite(end))])
    return next((step for step in (0.1, 0.25, 0.5) if most <= step), 1.0)


CAPTION = " Checkpoints of one model share panels; a difference is paired where both were asked the same samples."
COLORS = (1, 2, 3, 4, 5, 6)  # of checkpoints that share a panel


def merge_checkpoints(frame: Frame, browser: Browser, figure: Figure) -> Figure:
    """Replace the panels of each family of checkpoints by merged panels, at the position of the family's first panel."""
    panels, done = [], set()
    family_of = {label: family for family in frame.families for label in family}
    for panel in figure.panels:
        family = family_of.get(panel.group)
        if family is None:
            panels.append(panel)
        elif family[0] not in done:
            done.add(family[0])
            panels += _Family(frame, browser, family).panels([p for p in figure.panels if p.group in family])
    return replace(figure, panels=panels, caption=figure.caption + CAPTION * bool(done))


class _Family:
    """Merges the panels of two or more checkpoints; differences are relative to the first one."""

    def __init__(self, frame: Frame, browser: Browser, models: Sequence[str]) -> None:
        self.frame, self.browser, self.models = frame, browser, models
        self.name = " and ".join(models) if len(models) == 2 else f"{models[0]} and {len(models) - 1} more checkpoints"

    def panels(self, panels: Sequence[Panel]) -> list[Panel]:
        """Merge panels that have the same title."""
        titled: dict[str, dict[str, Panel]] = {}
        for panel in panels:
            title = "" if panel.title == panel.group else panel.title.removeprefix(f"{panel.group}, ")
            titled.setdefault(title, {})[panel.group] = panel
        made: list[Panel] = []
        for title, of_model in titled.items():
            lines = {model: panel for model, panel in of_model.items() if isinstance(panel, Lines)}
            dots = {model: panel for model, panel in of_model.items() if isinstance(panel, Dots)}
            grids = {model: panel for model, panel in of_model.items() if isinstance(panel, HeatMap)}
            made += self._lines(title, lines) + self._dots(title, dots) + self._grids(title, grids)
        return made

    def _less(self, model: str) -> str:
        """Return the label of a difference from the first checkpoint."""
        return f"{model} less {self.models[0]}"

    def _lines(self, title: str, of_model: dict[str, Lines]) -> list[Panel]:
        """Return, for each curve of any checkpoint, a panel with one line per checkpoint and a panel of differences."""
        made: list[Panel] = []
        for label in dict.fromkeys(series.label for panel in of_model.values() for series in panel.series):
            curves = {m: next((s for s in panel.series if s.label == label), None) for m, panel in of_model.items()}
            points = {model: curve.points for model, curve in curves.items() if curve is not None}
            panel = next(iter(of_model.values()))
            series = [Series(m, self._color(m), points[m]) for m in points]
            name = f"{title}: {label}" if title else label
            made.append(replace(panel, group=self.name, title=name, series=series))
            first = {point.x: point for point in points.get(self.models[0], ())}
            apart = []
            for m in list(points)[1:]:  # differences at the x values that both checkpoints have
                pairs = [(first[b.x], b) for b in points[m] if b.x in first]
                differences = [CurvePoint(b.x, self._difference(a, b)) for a, b in pairs]
                apart += [Series(self._less(m), self._color(m), differences)] * bool(differences)
            if apart and panel.percent:
                less = replace(panel, y_label="difference, points", level=(0.0, ""), signed=True)
                made.append(replace(less, group=self.name, title=f"{name}: difference", series=apart))
        return made

    def _color(self, model: str) -> int:
        return COLORS[self.models.index(model) % len(COLORS)]

    def _dots(self, title: str, of_model: dict[str, Dots]) -> list[Panel]:
        """Return a panel with the dots of all checkpoints, label by label, and a panel of differences."""
        if not of_model:
            return []
        panel = next(iter(of_model.values()))
        labels = list(dict.fromkeys(dot.label for one in of_model.values() for dot in one.dots))
        at = {(model, dot.label): dot for model, one in of_model.items() for dot in one.dots}
        together = []
        for label in labels:
            asked = [m for m in of_model if (m, label) in at]
            dots = [replace(at[m, label], label=f"{label}, {m}", color=self._color(m)) for m in asked]
            together += [replace(dot, follows=asked[0] == self.models[0] and i > 0) for i, dot in enumerate(dots)]
        legend = [(m, self._color(m)) for m in of_model]
        legend = legend if legend[0][0] == self.models[0] else []
        made: list[Panel] = [replace(panel, group=self.name, title=title or "Side by side", dots=together, legend=legend)]
        apart = []
        for model in [m for m in of_model if m != self.models[0]]:
            for label in labels:
                a, b = at.get((self.models[0], label)), at.get((model, label))
                if a and b:
                    name = label if len(of_model) == 2 else f"{label}, {model}"
                    apart.append(Dot(name, self._color(model), self._difference(a, b)))
        if apart:
            less = self._less(next(m for m in of_model if m != self.models[0])) if len(of_model) == 2 else "against the first"
            made.append(
                Dots(self.name, f"{title}: {less}" if title else less, "difference, points", apart, (0.0, ""), signed=True)
            )
        return made

    def _grids(self, title: str, of_model: dict[str, HeatMap]) -> list[Panel]:
        """Return the heat maps of all checkpoints, and maps of differences where the axes are the same."""
        made: list[Panel] = [
            replace(panel, group=self.name, title=f"{model}: {title}" if title else model) for model, panel in of_model.items()
        ]
        first = of_model.get(self.models[0])
        for model, panel in of_model.items():
            if first is None or panel is first or (panel.rows, panel.cols) != (first.rows, first.cols):
                continue
            cells = [
                [Cell(self._difference(a, b), outside=b.outside) if a and b and a.key and b.key else None for a, b in pairs]
                for pairs in map(zip_longest, first.cells, panel.cells)
            ]
            if any(cell for line in cells for cell in line):
                name = f"{self._less(model)}: {title}" if title else self._less(model)
                made.append(replace(panel, group=self.name, title=name, cells=cells, top=1.0, signed=True))
        return made

    def _difference(self, a: Mark, b: Mark) -> Estimate:
        """Estimate b - a: paired if both are accuracies on the same samples, else as a difference of independent shares."""
        if a.key and b.key:
            before, after = (self._by_sample(self.browser.cells[mark.key][1]) for mark in (a, b))
            same = before[0].shape == after[0].shape and bool((before[0] == after[0]).all()) and len(before[0]) > 0
            if same and np.isclose(before[1].mean(), a.y.value) and np.isclose(after[1].mean(), b.y.value):
                return stats.gain(after[1], before[1], before[2])
        return stats.difference(b.y, a.y)

    def _by_sample(self, rows: Ints) -> tuple[Ints, stats.Floats, Ints]:
        """Return samples, accuracy per sample (several trials if heads were drawn at random) and clusters, all [samples]."""
        right = self.frame.values("correct", rows)
        rows, right = rows[~np.isnan(right)], right[~np.isnan(right)]
        samples, first, index = np.unique(self.frame.column("sample", rows), return_index=True, return_inverse=True)
        counts = np.bincount(index, minlength=len(samples))
        return (
            samples,
            np.bincount(index, weights=right, minlength=len(samples)) / counts,
            self.frame.column("cluster", rows)[first],
        )
