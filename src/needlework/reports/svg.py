"""Draw figures and the overview as inline SVG, coloured by the page's style sheet so that dark mode and print work.

The overview is a table of claims by models, each verdict with a small figure of its numbers.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate

from markupsafe import Markup

from needlework.analysis.frame import Frame, architecture_class
from needlework.analysis.verdicts import RULES, Rule, Verdict, VerdictPoint, Word, side
from needlework.reports.panels import Cell, CurvePoint, Dots, Figure, HeatMap, Lines, Panel, Series, signed_limit
from needlework.stats import percent, whole_percent

WIDTHS = {"": 360, "two": 420, "small": 260}  # of panels by kind (`Figure.rows`), in units in which text is 11 high
STRIP_LEFT, STRIP_RIGHT, STRIP_WIDTH = 6, 106, 152  # row of the overview: x of 0 %, x of 100 %, total with the number
LABELS_WIDTH, COLUMN_WIDTH = 286, 172  # of the overview's file
PANELS_ACROSS, MARGIN = 4, 16  # of a figure's file
OVERVIEW_KEY = (
    "Shares from 0 to 100 % with 95 % intervals. Shaded: where the claim has them; dashed: the rule's line; dotted: chance.",
    "A verdict applies to one checkpoint.",
)
STRIP_HEIGHT = 19  # in SVG units; equals the pixels in the style sheet


def draw_panel(panel: Panel, kind: str = "") -> Markup:
    """Draw a panel with the width of its kind (`Figure.rows`)."""
    return Markup(_draw_panel(panel, kind)[1])


def _draw_panel(panel: Panel, kind: str, place: str = "") -> tuple[float, str]:
    """Return the height of a panel's drawing, and the drawing; `place` has its attributes x and y in a larger one."""
    width = WIDTHS[kind]
    if isinstance(panel, Lines):
        height, body = _draw_lines(panel, width)
    else:
        height, body = _draw_heat_map(panel, width) if isinstance(panel, HeatMap) else _draw_dots(panel, width)
    style = ' class="dots"' if isinstance(panel, Dots) else ""
    label = escape(f"{panel.full_title}. The table below holds the same numbers.")
    about = f'{place}{style} viewBox="0 0 {width} {height:.0f}" role="group" aria-label="{label}"'
    return round(height), f'<svg{about} xmlns="http://www.w3.org/2000/svg">{"".join(body)}</svg>'


def _text(x: float, y: float, text: str, kind: str = "tick", anchor: str = "middle", extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}"{extra}>{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def _draw_mark(key: str, label: str, place: tuple[int, int], shapes: str) -> str:
    """Draw a mark that mouse and keyboard can select; a panel has one tab stop and arrow keys inside."""
    about = 'role="img"'
    if key:
        stop = 0 if place == (0, 0) else -1
        about = f'class="hot" data-k="{key}" data-r="{place[0]}" data-c="{place[1]}" role="button" tabindex="{stop}"'
    return f'<g {about} aria-label="{escape(label)}"><title>{escape(label)}</title>{shapes}</g>'


class Scale:
    """A linear or logarithmic scale from values to coordinates; values beyond its ends are clipped."""

    def __init__(self, low: float, high: float, start: float, end: float, log: bool = False) -> None:
        self.log = log
        self.low, self.high = (math.log(low), math.log(high)) if log else (low, high)
        self.start, self.end = start, end

    def __call__(self, value: float) -> float:
        value = math.log(max(value, 1e-12)) if self.log else value
        share = (value - self.low) / ((self.high - self.low) or 1)
        return self.start + min(1.0, max(0.0, share)) * (self.end - self.start)


def _draw_lines(panel: Lines, width: int) -> tuple[float, list[str]]:
    left, right, top, bottom, height = 44, 14 + 6 * len(panel.level[1]) if panel.level else 12, 22, 42, 262
    x, y, x_ticks, y_ticks = _axes(panel, left, width - right, height - bottom, top)
    body = []
    base = height - bottom
    for value, label in y_ticks:
        body.append(_line(left, y(value), width - right, y(value), "rule"))
        body.append(_text(left - 6, y(value) + 3.5, label, anchor="end"))
    for value, label in x_ticks:
        body += [_line(x(value), base, x(value), base + 4, "axis"), _text(x(value), base + 16, label)]
    body.append(_line(left, base, width - right, base, "axis"))
    if panel.mark:
        body += [
            _line(x(panel.mark[0]), top, x(panel.mark[0]), base, "guide"),
            _text(x(panel.mark[0]), top - 6, panel.mark[1], "note"),
        ]
    if panel.level:
        body += [
            _line(left, y(panel.level[0]), width - right, y(panel.level[0]), "guide"),
            _text(width - right + 4, y(panel.level[0]) + 3.5, panel.level[1], "note", "start"),
        ]
    body.append(_text((left + width - right) / 2, height - 8, panel.x_label, "label"))
    controls_below = sorted(panel.series, key=lambda s: s.color != 0)
    for row, series in enumerate(controls_below):
        marks = "".join(_draw_point(panel, series, p, x, y, (row, i)) for i, p in enumerate(series.points))
        body.append(
            f'<g class="s{series.color}">{"".join(_draw_run(series, run, x, y) for run in runs(panel, series))}{marks}</g>'
        )
    return height, body


def runs(panel: Lines, series: Series) -> list[list[CurvePoint]]:
    """Split a curve where neighbours are further apart than a quarter of the heads, or a factor of 4 in tokens."""
    parts: list[list[CurvePoint]] = []
    for point in series.points:
        near = parts and (point.x - parts[-1][-1].x <= 0.251 if panel.share_x else point.x <= 4 * parts[-1][-1].x)
        if near:
            parts[-1].append(point)
        else:
            parts.append([point])
    return parts


def _draw_run(series: Series, run: Sequence[CurvePoint], x: Scale, y: Scale) -> str:
    """Draw the band and the line through measured points; a point alone has a whisker."""
    if len(run) == 1:
        return (
            _line(x(run[0].x), y(run[0].y.low), x(run[0].x), y(run[0].y.high), "whisker") if run[0].y.low < run[0].y.high else ""
        )
    upper = [f"{x(p.x):.1f},{y(p.y.high):.1f}" for p in run]
    lower = [f"{x(p.x):.1f},{y(p.y.low):.1f}" for p in reversed(run)]
    path = " ".join(f"{x(p.x):.1f},{y(p.y.value):.1f}" for p in run)
    band = f'<polygon class="band" points="{" ".join(upper + lower)}"/>'
    return f'{band}<polyline class="curve{" dashed" * series.dashed}" points="{path}"/>'


Ticks = list[tuple[float, str]]


def _axes(panel: Lines, left: float, right: float, bottom: float, top: float) -> tuple[Scale, Scale, Ticks, Ticks]:
    points = panel.marks()
    if panel.share_x:
        x, x_ticks = Scale(0, 1, left + 6, right - 6), [(v / 100, f"{v} %") for v in (0, 25, 50, 75, 100)]
    else:
        places = sorted({point.x for point in points})
        x = Scale(places[0], max(places[-1], places[0] * 1.01), left + 8, right - 10, log=True)
        x_ticks = []
        for place in places:  # labels need space beside each other
            if not x_ticks or x(place) - x(x_ticks[-1][0]) >= 26:
                x_ticks.append((place, f"{place:g}"))
    if panel.signed:
        end = signed_limit(panel)
        return x, Scale(-end, end, bottom, top), x_ticks, [(v * end, in_points(v * end)) for v in (-1, -0.5, 0, 0.5, 1)]
    if panel.percent:
        most = min(1.3, max([1.0, *(point.y.high for point in points if math.isfinite(point.y.high))]))
        return x, Scale(0, most, bottom, top), x_ticks, [(v / 100, f"{v} %") for v in (0, 25, 50, 75, 100)]
    low, high = min(point.y.low for point in points), max(point.y.high for point in points)
    return x, Scale(low * 0.9, high * 1.1, bottom, top, log=True), x_ticks, log_ticks(low * 0.9, high * 1.1)


def in_points(difference: float) -> str:
    """Format a difference of shares in points with its sign: `+12.5`."""
    return f"{100 * difference:+.1f}".removesuffix(".0") if difference else "0"


def log_ticks(low: float, high: float) -> Ticks:
    """Return ticks at 1, 2, 5 times powers of ten; over more than three decades, at powers of ten only."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    steps = (1, 2, 5) if last - first <= 3 else (1,)
    values = [s * 10.0**e for e in range(first, last + 1) for s in steps if low <= s * 10.0**e <= high]
    return [(v, f"{v:,.0f}" if v >= 1 else f"{v:g}") for v in values]


def _draw_point(panel: Lines, series: Series, p: CurvePoint, x: Scale, y: Scale, place: tuple[int, int]) -> str:
    where = percent(p.x) + " of the heads" if panel.share_x else f"{p.x:g} tokens"
    at = f'cx="{x(p.x):.1f}" cy="{y(p.y.value):.1f}"'
    return _draw_mark(
        p.key,
        f"{series.label}, {where}: {panel.format(p.y)}",
        place,
        f'<circle class="halo" {at} r="9"/><circle class="dot{" hollow" * series.dashed}" {at} r="3.2"/>',
    )


def _draw_heat_map(panel: HeatMap, width: int) -> tuple[float, list[str]]:
    left = 16 + max(22, min(150, 5.8 * max(len(name) for name in panel.rows) + 8))
    longest = max(len(name) for name in panel.cols) * 6
    slanted = longest > (width - left - 8) / len(panel.cols) and not all(name.isdigit() for name in panel.cols)
    top, bottom = 4, (64 if slanted else 20) + (16 if panel.col_title else 0)
    wide = (width - left - 8) / len(panel.cols)
    tall = min(34.0, max(13.0, wide * 0.6))
    height = top + tall * len(panel.rows) + bottom
    body = []
    for r, line in enumerate(panel.cells):
        body.append(_text(left - 6, top + tall * (r + 0.5) + 3.5, panel.rows[r], anchor="end"))
        body += [_cell(panel, cell, r, c, left + wide * c, top + tall * r, wide, tall) for c, cell in enumerate(line)]
    under = top + tall * len(panel.rows)
    step = 1 if slanted else max(1, math.ceil((longest + 6) / wide))
    for c, name in enumerate(panel.cols):
        at = left + wide * (c + 0.5)
        turn = f' transform="rotate(-35 {at:.1f} {under + 14:.1f})"' if slanted else ""
        if c % step == 0:
            body.append(_text(at, under + 14, name, anchor="end" if slanted else "middle", extra=turn))
    body += _window_edge(panel, left, top, wide, tall)
    body.append(_text(left + wide * len(panel.cols) / 2, height - 4, panel.col_title, "label") if panel.col_title else "")
    middle = max(top + tall * len(panel.rows) / 2, 4 + 2.9 * len(panel.row_title))  # for maps lower than their title
    body.append(_text(11, middle, panel.row_title, "label", extra=f' transform="rotate(-90 11 {middle:.1f})"'))
    return height, body


def _cell(panel: HeatMap, cell: Cell | None, r: int, c: int, x: float, y: float, wide: float, tall: float) -> str:
    box = f'x="{x + 0.5:.1f}" y="{y + 0.5:.1f}" width="{wide - 1:.1f}" height="{tall - 1:.1f}" rx="2"'
    if cell is None:
        return f'<rect {box} class="empty"/>'
    share = max(0.0, min(1.0, (abs(cell.y.value) if panel.signed else cell.y.value) / panel.top))
    label = f"{panel.row_title} {panel.rows[r]}, {panel.col_title} {panel.cols[c]}: {panel.format(cell.y)}"
    label += ", out of window" if cell.outside else ""
    half = "hi" if share > 0.5 else "lo"
    mixed = (share - 0.5) * 2 if half == "hi" else share * 2
    shown = ""
    if panel.numbers:
        kind = "on" if share > 0.62 else "off"
        value = in_points(cell.y.value) if panel.signed else whole_percent(cell.y.value)
        shown = _text(x + wide / 2, y + tall / 2 + 3.5, value, f"value {kind}")
    return _draw_mark(cell.key, label, (r, c), f'<rect {box} class="heat {half}" style="--v:{100 * mixed:.0f}%"/>{shown}')


def _window_edge(panel: HeatMap, left: float, top: float, wide: float, tall: float) -> list[str]:
    """Draw the border between cells with the needle inside and outside the attention window."""
    path = []
    cells = panel.cells
    for r, line in enumerate(cells):
        for c, cell in enumerate(line):
            right = line[c + 1] if c + 1 < len(line) else None
            below = cells[r + 1][c] if r + 1 < len(cells) else None
            if cell and right and cell.outside != right.outside:
                path.append(f"M{left + wide * (c + 1):.1f} {top + tall * r:.1f}v{tall:.1f}")
            if cell and below and cell.outside != below.outside:
                path.append(f"M{left + wide * c:.1f} {top + tall * (r + 1):.1f}h{wide:.1f}")
    return [f'<path class="edge" d="{"".join(path)}"><title>edge of the attention window</title></path>'] if path else []


def _draw_dots(panel: Dots, width: int) -> tuple[float, list[str]]:
    left, right, top, bottom = 10, 14, 12, 38
    most = max([1.0, *(dot.y.high for dot in panel.dots if math.isfinite(dot.y.high))])
    least = min([0.0, *(dot.y.low for dot in panel.dots if math.isfinite(dot.y.low))])
    rows = [0.0, *accumulate(15 if next_.follows else 34 for next_ in panel.dots[1:])]
    height = top + rows[-1] + 34 + bottom
    end_of_axis = width - right - 42 * bool(panel.legend)  # leaves space for the numbers at the right
    x, ticks = Scale(max(-0.5, least), min(1.5, most), left, end_of_axis), [(v / 100, f"{v} %") for v in (0, 25, 50, 75, 100)]
    if panel.signed:
        end = signed_limit(panel)
        x, ticks = Scale(-end, end, left + 14, width - right - 14), [(v * end, in_points(v * end)) for v in (-1, -0.5, 0, 0.5, 1)]
    base = height - bottom
    body = []
    for value, name in ticks:
        body += [_line(x(value), top, x(value), base, "rule"), _text(x(value), base + 15, name)]
    if panel.level:
        body.append(_line(x(panel.level[0]), top, x(panel.level[0]), base, "guide"))
    for i, dot in enumerate(panel.dots):
        y = top + rows[i] + 23
        if name := panel.short_label(dot):
            body.append(_text(left, y - 10, name, "name", "start"))
        share = in_points(dot.y.value) if panel.signed else whole_percent(dot.y.value) + " %"
        body.append(_text(width - right, y + 4 if panel.legend else y - 10, share, "name", "end"))
        shapes = (
            f'<g class="s{dot.color}"><rect class="halo" x="{left}" y="{y - 8}" width="{width - left - right}" height="16"/>'
            f"{_line(x(dot.y.low), y, x(dot.y.high), y, 'whisker')}"
            f'<circle class="dot" cx="{x(dot.y.value):.1f}" cy="{y}" r="4.2"/></g>'
        )
        body.append(f"<g>{_draw_mark(dot.key, f'{dot.label}: {panel.format(dot.y)}', (i, 0), shapes)}</g>")
    body.append(_text((left + width - right) / 2, height - 6, panel.x_label, "label"))
    return height, body


def draw_figure(figure: Figure) -> Markup:
    """Draw a whole figure for a file: panels in rows, each with title and legend."""
    rows = []
    for panels, kind in figure.rows():
        rows += [(panels[i : i + PANELS_ACROSS], kind) for i in range(0, len(panels), PANELS_ACROSS)]
    body: list[str] = []
    bottom, right = 0.0, 0.0
    for panels, kind in rows:
        top, x = bottom + MARGIN, float(MARGIN)
        for panel in panels:
            parts, end = _draw_titled(panel, kind, x, top)
            body += parts
            bottom, x = max(bottom, end), x + WIDTHS[kind] + MARGIN
        right = max(right, x)
    return _drawing(right, bottom + MARGIN, body)


def _draw_titled(panel: Panel, kind: str, x: float, top: float) -> tuple[list[str], float]:
    """Draw a panel below its title and legend at (x, top); return its elements and the y of its lower end."""
    lines = textwrap.wrap(panel.full_title, int(WIDTHS[kind] / 7.2), break_on_hyphens=False)
    body = [_text(x, top + 15 * (i + 1), line, "title", "start") for i, line in enumerate(lines)]
    y, at = top + 15 * len(lines), x
    if isinstance(panel, Lines):
        y += 16
        body.append(_text(x, y, panel.y_label, "label", "start"))
    for i, (label, color, dashed) in enumerate(panel.legend_items()):
        width = 32 + 6.2 * len(label)
        if i == 0 or at + width > x + WIDTHS[kind]:
            at, y = x, y + 16
        sample = _line(at, y - 4, at + 16, y - 4, "curve" + " dashed" * dashed)
        body.append(f'<g class="s{color}">{sample}</g>' + _text(at + 21, y, label, anchor="start"))
        at += width
    height, drawn = _draw_panel(panel, kind, f' x="{x:.0f}" y="{y + 6:.0f}"')
    return [*body, drawn], y + 6 + height


UNJUDGED: tuple[Word, ...] = ("not run", "does not apply")  # nothing was measured, so nothing is drawn
_COUNT = re.compile(r"\b\d+ of \d+ heads\b")


@dataclass(frozen=True)
class Strip:
    """One row of the small figures, shared by all models; numbers of heads may differ and are noted per model."""

    label: str
    points: dict[str, VerdictPoint]  # by model

    def note(self, model: str) -> str:
        """Return the number of heads in this model's label: `2 of 16`."""
        found = _COUNT.search(self.points[model].label) if model in self.points else None
        return found[0].removesuffix(" heads") if found else ""


@dataclass(frozen=True)
class ClaimRow:
    """One claim: the verdict on each model, and the rows of their small figures."""

    rule: Rule
    verdicts: dict[str, Verdict]  # by model
    strips: Sequence[Strip]


@dataclass(frozen=True)
class Overview:
    """All claims by all models."""

    models: dict[str, str]  # label -> composition: hybrid, attention only, recurrent only
    blocks: Sequence[ClaimRow]
    not_run: Sequence[Rule]  # claims without trials

    def is_outside_all_claims(self, model: str) -> bool:
        """Return whether no claim applies to this model: it is a control."""
        return bool(self.blocks) and all(block.verdicts[model].word == "does not apply" for block in self.blocks)


def overview(frame: Frame, verdicts: Sequence[Verdict]) -> Overview:
    """Arrange verdicts by claim and model."""
    blocks, not_run = [], []
    for rule in RULES:
        judged = {v.model: v for v in verdicts if v.claim == rule.claim}
        if any(v.word not in UNJUDGED for v in judged.values()):
            by_label: dict[str, dict[str, VerdictPoint]] = {}  # labels that differ only in the number of heads share a row
            for model, verdict in judged.items():
                for point in verdict.points:
                    by_label.setdefault(_COUNT.sub("few heads", point.label), {})[model] = point
            blocks.append(ClaimRow(rule, judged, [Strip(label, points) for label, points in by_label.items()]))
        elif any(v.word == "not run" for v in judged.values()):
            not_run.append(rule)
    return Overview({model: architecture_class(frame.anatomy(model)) for model in frame.models}, blocks, not_run)


def zone(point: VerdictPoint) -> tuple[float, float] | None:
    """Return the range of shares in which the claim expects the interval; None without a threshold."""
    if point.line is None or point.bound in ("", "chance"):
        return None
    return (point.line, 1.0) if point.bound == "at least" else (0.0, point.line)


def outcome(point: VerdictPoint) -> str:
    """Compare an interval to its threshold: `yes`, `no` or `maybe`; `plain` without a threshold."""
    if point.line is None or point.bound in ("", "chance"):
        return "plain"
    words = {"supported": "yes", "not supported": "no"}
    return words.get(side(point.estimate, point.line, point.bound), "maybe")


def label_position(point: VerdictPoint) -> float:
    """Return the x position of a label that does not cover the interval: halfway to the farther end of the axis."""
    low, high = max(0.0, point.estimate.low), min(1.0, point.estimate.high)
    return (high + 0.95) / 2 if high + low < 1 else low / 2


def _strip_x(share: float) -> float:
    return STRIP_LEFT + min(1.06, max(-0.05, share)) * (STRIP_RIGHT - STRIP_LEFT)


def draw_strips(block: ClaimRow, model: str) -> Markup:
    """Draw the numbers of one verdict, one row each from 0 to 100 %, with the range that the rule expects."""
    body = [_draw_strip(strip, model, STRIP_HEIGHT * i) for i, strip in enumerate(block.strips)]
    height = STRIP_HEIGHT * len(block.strips)
    label = f"{model}: {block.rule.title}, {block.verdicts[model].word}"
    return Markup(f'<svg viewBox="0 0 {STRIP_WIDTH} {height}" role="img" aria-label="{escape(label)}">{"".join(body)}</svg>')


def _draw_strip(strip: Strip, model: str, top: int) -> str:
    point = strip.points.get(model)
    if point is None:
        return ""
    e, middle = point.estimate, top + STRIP_HEIGHT / 2
    parts = [f'<line x1="{_strip_x(0):.1f}" x2="{_strip_x(1):.1f}" y1="{middle}" y2="{middle}" class="rule"/>']
    if span := zone(point):
        a, b = _strip_x(span[0] if span[0] else -0.05), _strip_x(span[1] if span[1] < 1 else 1.05)
        parts.append(f'<rect class="zone" x="{a:.1f}" y="{top + 1.5}" width="{b - a:.1f}" height="{STRIP_HEIGHT - 3}" rx="2"/>')
    if point.line is not None:
        kind, at = "chance" if point.bound == "chance" else "limit", _strip_x(point.line)
        parts.append(f'<line class="{kind}" x1="{at:.1f}" x2="{at:.1f}" y1="{top + 1.5}" y2="{top + STRIP_HEIGHT - 1.5}"/>')
    parts.append(
        f'<g class="{outcome(point)}"><title>{escape(f"{point.label}: {e.text()}")}</title>'
        f'<line class="bar" x1="{_strip_x(e.low):.1f}" x2="{_strip_x(e.high):.1f}" y1="{middle}" y2="{middle}"/>'
        f'<circle class="dot" cx="{_strip_x(e.value):.1f}" cy="{middle}" r="3.4"/></g>'
    )
    parts.append(_text(STRIP_WIDTH, middle + 3.6, f"{whole_percent(e.value)} %", "share", "end"))
    if note := strip.note(model):
        parts.append(_text(_strip_x(label_position(point)), middle + 2.8, note, "kept"))
    return "".join(parts)


def draw_overview(overview: Overview) -> Markup:
    """Draw the overview for a file: claims as rows, models as columns."""
    models = list(overview.models)
    body = []
    for c, model in enumerate(models):
        x, lines = LABELS_WIDTH + COLUMN_WIDTH * c, textwrap.wrap(model, 22, break_on_hyphens=False)[:2] or [model]
        body += [_text(x, 18 + 15 * i, line, "title", "start") for i, line in enumerate(lines)]
        body.append(_text(x, 18 + 14 * len(lines), overview.models[model], "note", "start"))
    y = 62.0
    for block in overview.blocks:
        body.append(_text(MARGIN, y, f"{block.rule.number}  {block.rule.title}", "title", "start"))
        for i, strip in enumerate(block.strips):
            body.append(_text(MARGIN + 14, y + 20 + STRIP_HEIGHT * i, strip.label, "tick", "start"))
        for c, model in enumerate(models):
            if not overview.is_outside_all_claims(model) or block is overview.blocks[0]:  # drawn once
                body += _draw_verdict(block, model, LABELS_WIDTH + COLUMN_WIDTH * c, y)
        y += STRIP_HEIGHT * max(1, len(block.strips)) + 34
    body += [_text(MARGIN, y + 13 * i, line, "note", "start") for i, line in enumerate(OVERVIEW_KEY)]
    return _drawing(LABELS_WIDTH + COLUMN_WIDTH * len(models), y + 24, body)


def _draw_verdict(block: ClaimRow, model: str, x: float, y: float) -> list[str]:
    verdict = block.verdicts[model]
    color = {"supported": "yes", "not supported": "no", "inconclusive": "maybe"}.get(verdict.word, "faint")
    body = [_text(x, y, verdict.word, "title" if verdict.points else "note", "start", f' style="fill: var(--{color})"')]
    if verdict.points:
        body.append(_text(x + STRIP_WIDTH, y, f"n = {verdict.estimate.n:,}", "note", "end"))
        faded = ' opacity="0.42"' if verdict.word == "not testable" else ""
        body.append(str(draw_strips(block, model)).replace("<svg", f'<svg x="{x}" y="{y + 7}"{faded}', 1))
    return body


def _drawing(width: float, height: float, body: Sequence[str]) -> Markup:
    return Markup(f'<svg viewBox="0 0 {width:.0f} {height:.0f}">{"".join(body)}</svg>')
