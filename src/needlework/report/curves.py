"""Figures of curves: abilities against the share of heads kept, and retrieval against the context in sight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from needlework import stats
from needlework.report.bench import BY, Bench, every_bench
from needlework.report.browser import Browser
from needlework.report.captions import figure
from needlework.report.conditions import Condition
from needlework.report.frame import ALL, Frame, Ints, Pick, differences
from needlework.report.spec import Cell, Figure, Grid, Lines, Point, Series
from needlework.stats import Estimate

Rows = Callable[[str], Ints]
Measure = Callable[[Ints], Estimate]
KEPT = "heads kept"


def _by_share(bench: Bench, conditions: Sequence[Condition]) -> dict[float, list[list[str]]]:
    """Per share of heads kept, the draws that are pooled (random heads have several seeds), each in all its spellings.

    The untouched model is the end of every curve.
    """
    shares: dict[float, dict[int, list[str]]] = {1.0: {0: ["none"]}}
    for condition in conditions:
        kept = condition.kept(bench.heads)
        if kept is not None and kept < bench.heads:
            seed = condition.seed if kept else 0
            shares.setdefault(kept / bench.heads, {}).setdefault(seed, []).append(condition.text)
    return {share: list(shares[share].values()) for share in sorted(shares)}


def _conditions(bench: Bench, way: str, phase: str) -> list[Condition]:
    own = bench.of_kind("heads", phase=phase)
    chosen = [c for c in own if c.way == way and not c.attention_off]
    if way == "ranking":  # two rankings are two ways: the first one met is drawn
        chosen = [c for c in chosen if c.by == chosen[0].by]
    return chosen + [c for c in own if c.attention_off]


def _series(
    bench: Bench,
    browser: Browser,
    what: str,
    label: str,
    color: int,
    way: str,
    phase: str,
    rows: Rows,
    measure: Measure,
    dashed: bool = False,
) -> Series:
    points, measured = [], False
    for share, draws in _by_share(bench, _conditions(bench, way, phase)).items():
        # of two texts that do the same (k=2, fraction=0.125) the one with more trials stands for both
        drawn = np.concatenate([max((rows(text) for text in spellings), key=len) for spellings in draws])
        estimate = measure(drawn)
        if estimate.n and estimate.value == estimate.value:
            kept = f"{share * bench.heads:.0f} of {bench.heads} heads" if bench.heads else "untouched"
            points.append(Point(share, estimate, browser.add(f"{bench.name} · {what} · {label} · {kept}", drawn)))
            measured |= way != "random" or 0 < share < 1  # no heads and all heads belong to every way of choosing
    return Series(label, color, points if len(points) > 1 and measured else [], dashed)


def _best_way(bench: Bench) -> str:
    ways = {c.way for c in bench.of_kind("heads", phase="both")}
    return next((way for way in BY if way in ways), BY[0])


def _retrieval(bench: Bench, browser: Browser) -> Lines:
    way = _best_way(bench)
    plans = [
        (f"by {way}, every position", 1, way, "both", False),
        (f"by {way}, decode only", 2, way, "decode", True),
        (f"by {way}, prefill only", 3, way, "prefill", True),
        ("random heads, every position", 0, "random", "both", False),
    ]
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

        def measure(trials: Ints, form: str = form) -> Estimate:
            return bench.pairs(trials, bench.knowledge("none", form)).corrected

        series.append(_series(bench, browser, "retained", form, color, way, "both", rows, measure))
    return _lines(bench, "What is left of the baseline", "retained share, chance-corrected", series, (0.95, "95 %"))


def _perplexities(bench: Bench, browser: Browser) -> list[Lines]:
    """One picture for each task: texts of another kind or length have another perplexity."""
    frame = bench.frame
    own = frame.distinct("kind", "task", "setting", model=bench.model, mode="perplexity")
    unlike = differences(setting for _, _, setting in own)
    made = []
    for kind, task, setting in own:
        pick = Pick(
            model=bench.model,
            ability=ALL,
            kind=kind,
            task=task,
            setting=setting,
            mode="perplexity",
            against="",
            text=ALL,
            boundary="",
            layout=ALL,
            form=ALL,
            in_window=ALL,
            context_tokens=ALL,
            depth_percent=ALL,
            chance=ALL,
        )
        words = [task] * (len({name for _, name, _ in own}) > 1) + [unlike[setting]] * bool(unlike[setting])
        made.append(_perplexity(bench, browser, pick, ", ".join(["Perplexity", *words])))
    return made


def _perplexity(bench: Bench, browser: Browser, pick: Pick, title: str) -> Lines:
    way, frame = _best_way(bench), bench.frame

    def rows(text: str) -> Ints:
        return frame.rows(replace(pick, text=text))

    def measure(part: str) -> Measure:
        def of(trials: Ints) -> Estimate:
            every, recall = frame.values("tokens", trials), frame.values("tokens_recall", trials)
            tokens = {"nll": every, "nll_recall": recall, "nll_rest": every - recall}[part]
            nll = frame.values(part, trials) * tokens
            known = ~(np.isnan(nll) | np.isnan(tokens))
            return stats.perplexity(nll[known], tokens[known], frame.cluster[trials][known])

        return of

    plans = [
        ("all tokens", 1, way, "nll"),
        ("recall tokens", 6, way, "nll_recall"),
        ("other tokens", 4, way, "nll_rest"),
        ("all tokens, random heads", 0, "random", "nll"),
    ]
    series = [
        _series(bench, browser, "perplexity", label, color, by, "both", rows, measure(part)) for label, color, by, part in plans
    ]
    return _lines(bench, title, "perplexity (log scale)", series, percent=False)


def _lines(
    bench: Bench,
    title: str,
    y_label: str,
    series: Sequence[Series],
    level: tuple[float, str] | None = None,
    percent: bool = True,
) -> Lines:
    shown = [one for one in series if one.points]
    return Lines(bench.model, bench.titled(title), KEPT, y_label, shown, percent=percent, level=level, mark=(0.15, "15 %"))


def heads(frame: Frame, browser: Browser) -> Figure:
    panels = []
    for bench in every_bench(frame):
        if bench.of_kind("heads"):
            made = [_retrieval(bench, browser)]
            if bench.first:  # scored trials know no boundary: they are drawn once
                made += [_left(bench, browser), _knowledge(bench, browser), *_perplexities(bench, browser)]
            panels += [panel for panel in made if panel.series]
    return figure("heads", panels)


def context(frame: Frame, browser: Browser) -> Figure:
    panels: list[Lines | Grid] = []
    for bench in every_bench(frame):
        for sinks in sorted({c.sinks for c in bench.of_kind("limit")}):  # what sinks show is another axis
            limits = bench.of_kind("limit", sinks=sinks)
            with_sinks = f", with the first {sinks} tokens in sight" if sinks else ""
            panels += _single_limits(bench, browser, limits, with_sinks)
            panels += _crossed_limits(bench, browser, limits, with_sinks)
    return figure("context", panels)


def _single_limits(bench: Bench, browser: Browser, limits: Sequence[Condition], with_sinks: str) -> list[Lines]:
    kinds = [("while reading", 1, "prefill"), ("while answering", 2, "decode"), ("in both", 3, "both")]
    series = [Series(label, color, _limit_points(bench, browser, limits, phase, label)) for label, color, phase in kinds]
    shown = [one for one in series if one.points]
    title, x_label = bench.titled(f"One limit at a time{with_sinks}"), "tokens in sight of attention (log scale)"
    lines = Lines(bench.model, title, x_label, "needles found, exact", shown, share_x=False, level=(0.95, "95 %"))
    return [lines] if shown else []


def _limit_points(bench: Bench, browser: Browser, limits: Sequence[Condition], phase: str, label: str) -> list[Point]:
    def phase_of(c: Condition) -> str:
        return "both" if c.prefill == c.decode else "prefill" if not c.decode else "decode" if not c.prefill else ""

    points = []
    for tokens, text in bench.placed((int(c.prefill or c.decode), c) for c in limits if phase_of(c) == phase).items():
        rows = bench.retrieval(text)
        if len(rows):
            key = browser.add(f"{bench.name} · {tokens} tokens in sight {label}", rows)
            points.append(Point(float(tokens), bench.accuracy(rows), key))
    return sorted(points, key=lambda point: point.x)


def _crossed_limits(bench: Bench, browser: Browser, limits: Sequence[Condition], with_sinks: str) -> list[Grid]:
    """Limits while reading x while answering, where they were crossed."""
    own = bench.placed(((c.prefill, c.decode), c) for c in limits)
    texts = {place: text for place, text in own.items() if len(bench.retrieval(text))}
    if not any(prefill and decode and prefill != decode for prefill, decode in texts):
        return []
    texts["", ""] = "none"
    prefills, decodes = (sorted({pair[i] for pair in texts}, key=lambda n: int(n or 10**9)) for i in (0, 1))
    cells: list[list[Cell | None]] = []
    for decode in decodes:
        line: list[Cell | None] = []
        for prefill in prefills:
            rows = bench.retrieval(texts.get((prefill, decode), "-"))
            title = f"{bench.name} · {prefill or 'all'} tokens while reading, {decode or 'all'} while answering"
            line.append(Cell(bench.accuracy(rows), browser.add(title, rows)) if len(rows) else None)
        cells.append(line)
    title = bench.titled(f"Both limits crossed{with_sinks}")
    rows_, cols = [n or "all" for n in decodes], [n or "all" for n in prefills]
    return [Grid(bench.model, title, "while answering", "tokens in sight while reading", rows_, cols, cells)]
