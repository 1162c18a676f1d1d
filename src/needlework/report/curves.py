"""Figures of curves: abilities against the share of heads kept, and retrieval against the context in sight."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from needlework import stats
from needlework.report.browser import Browser
from needlework.report.captions import figure
from needlework.report.conditions import Condition
from needlework.report.evidence import Bench
from needlework.report.frame import Frame, Ints
from needlework.report.spec import Cell, Figure, Grid, Lines, Point, Series
from needlework.stats import Estimate

Rows = Callable[[str], Ints]
Measure = Callable[[Ints], Estimate]
KEPT = "heads kept"


def _by_share(bench: Bench, conditions: Sequence[Condition]) -> dict[float, list[str]]:
    """Intervention texts per share of heads kept; the untouched model is the end of every curve."""
    found: dict[float, list[str]] = {1.0: ["none"]}
    for condition in conditions:
        kept = condition.kept(bench.heads)
        if kept is not None and kept < bench.heads:
            found.setdefault(kept / bench.heads, []).append(condition.text)
    return dict(sorted(found.items()))


def _conditions(bench: Bench, by: str, phase: str) -> list[Condition]:
    own = bench.of_kind("heads", phase=phase)
    silent = [c for c in own if c.attention_off and c.site != "block"]
    return [c for c in own if c.by == by and not c.attention_off] + silent


def _series(
    bench: Bench, browser: Browser, what: str, label: str, color: int, by: str, phase: str, rows: Rows, measure: Measure,
    dashed: bool = False,
) -> Series:  # fmt: skip
    points, measured = [], False
    for share, texts in _by_share(bench, _conditions(bench, by, phase)).items():
        found = [rows(text) for text in texts]
        if share == 0:  # two texts silence all heads: the one with more trials stands for both
            found = [max(found, key=len)]
        some = np.concatenate(found)
        estimate = measure(some)
        if estimate.n:
            title = f"{bench.model} · {what} · {label} · {stats.percent(share)} of the heads"
            points.append(Point(share, estimate, browser.add(title, some)))
            measured |= by != "random" or 0 < share < 1  # no heads and all heads belong to every way of choosing
    return Series(label, color, points if len(points) > 1 and measured else [], dashed)


def _best_way(bench: Bench) -> str:
    ways = {c.by for c in bench.of_kind("heads", phase="both")}
    return next((way for way in ("entropy", "l2", "norm", "ranking") if way in ways), "entropy")


def _retrieval(bench: Bench, browser: Browser) -> Lines:
    way = _best_way(bench)
    plans = [
        (f"by {way}, every position", 1, way, "both", False), (f"by {way}, decode only", 2, way, "decode", True),
        (f"by {way}, prefill only", 3, way, "prefill", True), ("random heads, every position", 0, "random", "both", False),
    ]  # fmt: skip
    series = [
        _series(bench, browser, "retrieval", label, color, by, phase, bench.retrieval, bench.accuracy, dashed)
        for label, color, by, phase, dashed in plans
    ]
    return _lines(bench, "Retrieval", "needles found, exact", series)


def _knowledge(bench: Bench, browser: Browser) -> Lines:
    way = _best_way(bench)
    series = []
    for form, color in (("cloze", 4), ("letter", 5)):
        def rows(text: str, form: str = form) -> Ints:
            return bench.knowledge(text, form)

        series.append(_series(bench, browser, form, form, color, way, "both", rows, bench.accuracy))
        label, dashed = f"{form}, random heads", form == "letter"
        series.append(_series(bench, browser, form, label, 0, "random", "both", rows, bench.accuracy, dashed))
    asked = np.concatenate([bench.knowledge("none", form) for form in ("cloze", "letter")])
    chance = bench.frame.chance(asked) if len(asked) else 0.0
    return _lines(bench, "Knowledge", "questions right", series, (chance, "chance") if chance else None)


def _left(bench: Bench, browser: Browser) -> Lines:
    """What is left of the baseline, corrected for chance: retrieval and knowledge on one scale."""
    way = _best_way(bench)

    def retrieval(rows: Ints) -> Estimate:
        return bench.pairs(rows, bench.retrieval("none")).raw

    series = [_series(bench, browser, "retained", "retrieval", 1, way, "both", bench.retrieval, retrieval)]
    for form, color in (("cloze", 4), ("letter", 5)):
        base = bench.knowledge("none", form)
        if len(base) and bench.accuracy(base).low <= bench.frame.chance(base):
            continue  # never known, so nothing can be left of it: shares of almost nothing would fill the picture

        def rows(text: str, form: str = form) -> Ints:
            return bench.knowledge(text, form)

        def measure(found: Ints, form: str = form) -> Estimate:
            return bench.pairs(found, bench.knowledge("none", form)).corrected

        series.append(_series(bench, browser, "retained", form, color, way, "both", rows, measure))
    return _lines(bench, "What is left of the baseline", "retained share, chance-corrected", series, (0.95, "95 %"))


def _perplexity(bench: Bench, browser: Browser) -> Lines:
    way, frame = _best_way(bench), bench.frame

    def rows(text: str) -> Ints:
        return frame.rows(model=bench.model, family="perplexity", text=text)

    def measure(part: str) -> Measure:
        def of(found: Ints) -> Estimate:
            every, recall = frame.values("tokens", found), frame.values("tokens_recall", found)
            tokens = {"nll": every, "nll_recall": recall, "nll_rest": every - recall}[part]
            nll = frame.values(part, found) * tokens
            known = ~(np.isnan(nll) | np.isnan(tokens))
            return stats.perplexity(nll[known], tokens[known], frame.cluster[found][known])
        return of

    plans = [("all tokens", 1, way, "nll"), ("recall tokens", 6, way, "nll_recall"), ("other tokens", 4, way, "nll_rest"),
             ("all tokens, random heads", 0, "random", "nll")]  # fmt: skip
    series = [
        _series(bench, browser, "perplexity", label, color, by, "both", rows, measure(part))
        for label, color, by, part in plans
    ]
    return _lines(bench, "Perplexity", "perplexity (log scale)", series, percent=False)


def _lines(
    bench: Bench, title: str, y_label: str, series: Sequence[Series], level: tuple[float, str] | None = None,
    percent: bool = True,
) -> Lines:  # fmt: skip
    shown = [one for one in series if one.points]
    return Lines(bench.model, title, KEPT, y_label, shown, percent=percent, level=level, mark=(0.15, "15 %"))


def heads(frame: Frame, browser: Browser) -> Figure:
    panels = []
    for model in frame.models:
        bench = Bench(frame, model)
        if bench.of_kind("heads"):
            made = [draw(bench, browser) for draw in (_retrieval, _left, _knowledge, _perplexity)]
            panels += [panel for panel in made if panel.series]
    return figure("heads", panels)


def context(frame: Frame, browser: Browser) -> Figure:
    panels: list[Lines | Grid] = []
    for model in frame.models:
        bench = Bench(frame, model)
        kinds = [("while reading", 1, "prefill"), ("while answering", 2, "decode"), ("in both", 3, "both")]
        series = [Series(label, color, _limit_points(bench, browser, phase)) for label, color, phase in kinds]
        if any(one.points for one in series):
            panels.append(Lines(
                model, "One limit at a time", "tokens in sight of attention (log scale)", "needles found, exact",
                [one for one in series if one.points], share_x=False, level=(0.95, "95 %"),
            ))  # fmt: skip
            panels += _crossed_limits(bench, browser)
    return figure("context", panels)


def _crossed_limits(bench: Bench, browser: Browser) -> list[Grid]:
    """Limits while reading x while answering, where they were crossed."""
    texts = {(c.prefill, c.decode): c.text for c in bench.of_kind("limit")}
    if sum(bool(prefill and decode and prefill != decode) for prefill, decode in texts) == 0:
        return []
    texts["", ""] = "none"
    prefills, decodes = (sorted({pair[i] for pair in texts}, key=lambda n: int(n or 10**9)) for i in (0, 1))
    cells: list[list[Cell | None]] = []
    for decode in decodes:
        line: list[Cell | None] = []
        for prefill in prefills:
            rows = bench.retrieval(texts.get((prefill, decode), "-"))
            title = f"{bench.model} · {prefill or 'all'} tokens while reading, {decode or 'all'} while answering"
            line.append(Cell(bench.accuracy(rows), browser.add(title, rows)) if len(rows) else None)
        cells.append(line)
    rows_, cols = [n or "all" for n in decodes], [n or "all" for n in prefills]
    return [Grid(bench.model, "Both limits crossed", "while answering", "tokens in sight while reading", rows_, cols, cells)]


def _limit_points(bench: Bench, browser: Browser, phase: str) -> list[Point]:
    points = []
    for c in bench.of_kind("limit"):
        where = "both" if c.prefill == c.decode else "prefill" if not c.decode else "decode" if not c.prefill else ""
        rows = bench.retrieval(c.text)
        if where == phase and len(rows):
            key = browser.add(f"{bench.model} · {c.prefill or c.decode} tokens in sight ({phase})", rows)
            points.append(Point(float(c.prefill or c.decode), bench.accuracy(rows), key))
    return sorted(points, key=lambda point: point.x)
