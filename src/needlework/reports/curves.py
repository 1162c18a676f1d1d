"""Panels of curves: abilities by share of heads kept, and retrieval by number of context tokens visible to attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from needlework import stats
from needlework.analysis.conditions import FEW_HEADS, RANKING, Condition, ways
from needlework.analysis.frame import ALL, Ints, Pick, differences
from needlework.analysis.model_trials import ModelTrials
from needlework.interventions.acts import RANDOM
from needlework.reports.browser import Browser
from needlework.reports.panels import FORM_COLORS, Cell, CurvePoint, HeatMap, Lines, Series, per_model
from needlework.stats import Estimate

Rows = Callable[[str], Ints]
Measure = Callable[[Ints], Estimate]


def _series(
    trials: ModelTrials,
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
    """Return a curve by share of heads kept; empty with fewer than two points, or if random heads have only end points.

    `what` names the quantity in the trial browser.
    """
    of_phase = trials.conditions_of("heads", phase=phase)
    conditions = [c for c in of_phase if c.way == way and not c.attention_off]
    if way == RANKING:  # rankings are not pooled: only the first one is drawn
        conditions = [c for c in conditions if c.by == conditions[0].by]
    conditions += [c for c in of_phase if c.attention_off]  # no heads and all heads belong to every curve
    by_share = {kept / trials.heads: found for kept, found in trials.by_heads(conditions, rows).items() if kept < trials.heads}
    points, measured = [], False
    for share, drawn in (by_share | {1.0: rows("none")}).items():
        estimate = measure(drawn)
        if estimate.n and estimate.value == estimate.value:
            words = f"{share * trials.heads:.0f} of {trials.heads} heads" if trials.heads else "untouched"
            points.append(CurvePoint(share, estimate, browser.add(f"{trials.name} · {what} · {label} · {words}", drawn)))
            measured |= way != RANDOM or 0 < share < 1  # the end points are shared by all ways to select heads
    return Series(label, color, points if len(points) > 1 and measured else [], dashed)


def _best_way(trials: ModelTrials) -> str:
    """Return the way to select heads that claims prefer among those that were run."""
    run = {c.way for c in trials.conditions_of("heads", phase="both")}
    return next((way for way in ways() if way in run), ways()[0])


def _retrieval(trials: ModelTrials, browser: Browser) -> Lines:
    way = _best_way(trials)
    run = {c.way for c in trials.conditions_of("heads", phase="both")} - {way, "", RANDOM}
    others = [other for other in ways() if other in run] + sorted(run - set(ways()))  # those of plug-ins come last
    curves = [
        (f"by {way}, every position", 1, way, "both", False),
        (f"by {way}, decode only", 2, way, "decode", True),
        (f"by {way}, prefill only", 3, way, "prefill", True),
        *((f"by {other}, every position", 4 + i % 3, other, "both", False) for i, other in enumerate(others)),
        ("random heads, every position", 0, RANDOM, "both", False),
    ]
    series = [
        _series(trials, browser, "retrieval", label, color, by, phase, trials.retrieval, trials.accuracy, dashed)
        for label, color, by, phase, dashed in curves
    ]
    return _lines(trials, "Retrieval", "needles found, exact", series)


def _knowledge(trials: ModelTrials, browser: Browser) -> Lines:
    way = _best_way(trials)
    series = []
    for form, color in FORM_COLORS.items():
        rows = partial(trials.knowledge, form=form)
        series.append(_series(trials, browser, form, form, color, way, "both", rows, trials.accuracy))
        label, dashed = f"{form}, random heads", form == "letter"
        series.append(_series(trials, browser, form, label, 0, RANDOM, "both", rows, trials.accuracy, dashed))
    asked = np.concatenate([trials.knowledge("none", form) for form in FORM_COLORS])
    chance = trials.frame.chance(asked) if len(asked) else 0.0
    return _lines(trials, "Knowledge", "questions right", series, (chance, "chance") if chance else None)


def _left(trials: ModelTrials, browser: Browser) -> Lines:
    """Return retained shares of retrieval (raw) and knowledge (chance-corrected) in one panel."""
    way = _best_way(trials)
    needles = trials.retrieval("none")

    def retained(rows: Ints) -> Estimate:
        return trials.pairs(rows, needles).raw

    series = [_series(trials, browser, "retained", "retrieval", 1, way, "both", trials.retrieval, retained)]
    for form, color in FORM_COLORS.items():
        base = trials.knowledge("none", form)
        if len(base) and trials.accuracy(base).low <= trials.frame.chance(base):
            continue  # the baseline is not above chance, so a retained share would be a ratio of noise

        def corrected(rows: Ints, base: Ints = base) -> Estimate:
            return trials.pairs(rows, base).corrected

        rows = partial(trials.knowledge, form=form)
        series.append(_series(trials, browser, "retained", form, color, way, "both", rows, corrected))
    return _lines(trials, "What is left of the baseline", "retained share, chance-corrected", series, (0.95, "95 %"))


def _perplexities(trials: ModelTrials, browser: Browser) -> list[Lines]:
    """Return one panel per task: perplexities of different texts or lengths are not comparable."""
    frame = trials.frame
    tasks = frame.distinct("kind", "task", "setting", model=trials.model, mode="perplexity")
    unlike = differences(setting for _, _, setting in tasks)
    panels = []
    for kind, task, setting in tasks:
        any_prompt = {"layout": ALL, "form": ALL, "in_window": ALL}
        pick = trials.pick(ALL, kind, "perplexity", ALL, task=task, setting=setting, **any_prompt)
        words = [task] * (len({name for _, name, _ in tasks}) > 1) + [unlike[setting]] * bool(unlike[setting])
        panels.append(_perplexity(trials, browser, pick, ", ".join(["Perplexity", *words])))
    return panels


def _perplexity(trials: ModelTrials, browser: Browser, pick: Pick, title: str) -> Lines:
    way, frame = _best_way(trials), trials.frame

    def rows(text: str) -> Ints:
        return frame.rows(replace(pick, text=text))

    def measure(rows: Ints, score: str) -> Estimate:
        # `nll` is a mean per token: weight it by the number of tokens it averages
        all_tokens, recall = frame.values("tokens", rows), frame.values("tokens_recall", rows)
        tokens = {"nll": all_tokens, "nll_recall": recall, "nll_rest": all_tokens - recall}[score]
        nll = frame.values(score, rows) * tokens
        known = ~(np.isnan(nll) | np.isnan(tokens))
        return stats.perplexity(nll[known], tokens[known], frame.column("cluster", rows)[known])

    curves = [
        ("all tokens", 1, way, "nll"),
        ("recall tokens", 6, way, "nll_recall"),
        ("other tokens", 4, way, "nll_rest"),
        ("all tokens, random heads", 0, RANDOM, "nll"),
    ]
    series = [
        _series(trials, browser, "perplexity", label, color, by, "both", rows, partial(measure, score=score))
        for label, color, by, score in curves
    ]
    return _lines(trials, title, "perplexity (log scale)", series, percent=False)


def _lines(
    trials: ModelTrials,
    title: str,
    y_label: str,
    series: Sequence[Series],
    level: tuple[float, str] | None = None,
    percent: bool = True,
) -> Lines:
    shown, mark = [curve for curve in series if curve.points], (FEW_HEADS, stats.percent(FEW_HEADS))
    return Lines(trials.model, trials.titled(title), "heads kept", y_label, shown, percent=percent, level=level, mark=mark)


@per_model
def heads(trials: ModelTrials, browser: Browser) -> Iterator[Lines]:
    """Yield the panels of the figure "heads kept": retrieval, retained shares, knowledge and perplexity."""
    if trials.conditions_of("heads"):
        panels = [_retrieval(trials, browser)]
        if trials.judged:  # scored trials have no boundary: draw them once
            panels += [_left(trials, browser), _knowledge(trials, browser), *_perplexities(trials, browser)]
        yield from (panel for panel in panels if panel.series)


@per_model
def context(trials: ModelTrials, browser: Browser) -> Iterator[Lines | HeatMap]:
    """Yield the panels of the figure "context": retrieval under `limit_context`, by phase and crossed."""
    for sinks in sorted({c.sinks for c in trials.conditions_of("limit")}):  # not pooled over sinks
        limits = trials.conditions_of("limit", sinks=sinks)
        with_sinks = f", with the first {sinks} tokens in sight" if sinks else ""
        yield from _single_limits(trials, browser, limits, with_sinks)
        yield from _crossed_limits(trials, browser, limits, with_sinks)


def _single_limits(trials: ModelTrials, browser: Browser, limits: Sequence[Condition], with_sinks: str) -> list[Lines]:
    series = []
    for label, color, phase in (("while reading", 1, "prefill"), ("while answering", 2, "decode"), ("in both", 3, "both")):
        limited = {"prefill": (True, False), "decode": (False, True), "both": (True, True)}[phase]
        of_phase = [
            c for c in limits if (bool(c.prefill), bool(c.decode)) == limited and (phase != "both" or c.prefill == c.decode)
        ]
        points = []
        for tokens, text in sorted(trials.text_by_place((int(c.prefill or c.decode), c) for c in of_phase).items()):
            rows = trials.retrieval(text)
            if len(rows):
                key = browser.add(f"{trials.name} · {tokens} tokens in sight {label}", rows)
                points.append(CurvePoint(float(tokens), trials.accuracy(rows), key))
        series += [Series(label, color, points)] * bool(points)
    title, x_label = trials.titled(f"One limit at a time{with_sinks}"), "tokens in sight of attention (log scale)"
    lines = Lines(trials.model, title, x_label, "needles found, exact", series, share_x=False, level=(0.95, "95 %"))
    return [lines] if series else []


def _crossed_limits(trials: ModelTrials, browser: Browser, limits: Sequence[Condition], with_sinks: str) -> list[HeatMap]:
    """Return a heat map of limits in prefill by limits in decode, if both were varied."""
    texts = trials.text_by_place(((c.prefill, c.decode), c) for c in limits if len(trials.retrieval(c.text)))
    if not any(prefill and decode and prefill != decode for prefill, decode in texts):
        return []
    texts["", ""] = "none"
    prefills, decodes = (sorted({pair[i] for pair in texts}, key=lambda n: int(n or 10**9)) for i in (0, 1))
    words = "{} tokens while reading, {} while answering"
    cells = [
        [retrieval_cell(trials, browser, texts.get((p, d)), words.format(p or "all", d or "all")) for p in prefills]
        for d in decodes
    ]
    title = trials.titled(f"Both limits crossed{with_sinks}")
    rows_, cols = [n or "all" for n in decodes], [n or "all" for n in prefills]
    return [HeatMap(trials.model, title, "while answering", "tokens in sight while reading", rows_, cols, cells)]


def retrieval_cell(trials: ModelTrials, browser: Browser, text: str | None, words: str) -> Cell | None:
    """Return retrieval accuracy under an intervention; None if it was not run."""
    rows = trials.retrieval(text or "-")  # "-" is no intervention's text: selects nothing
    return Cell(trials.accuracy(rows), browser.add(f"{trials.name} · {words}", rows)) if len(rows) else None
