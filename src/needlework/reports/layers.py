"""The figure "which layers": scores with single layers or thirds of them off, and what each adds to the residual stream."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from needlework import stats
from needlework.analysis.conditions import Condition
from needlework.analysis.frame import ALL, ANY_SAMPLE, Frame, Ints, Pick
from needlework.analysis.layers import LayerAblations
from needlework.analysis.model_trials import ModelTrials, by_model_and_boundary
from needlework.reports.browser import Browser
from needlework.reports.panels import Cell, Dot, Dots, HeatMap
from needlework.stats import Estimate

WORDS = {"attention": "attention", "recurrent": "recurrent mixer"}
COLORS = {"attention": 1, "recurrent": 2}
ADDED = {"added": "whole layer", "attention": "attention", "recurrent": "recurrent mixer"}
Measure = Callable[[str], tuple[Estimate, Ints]]  # the text of an intervention -> a share, and its trials


def layers(frame: Frame, browser: Browser) -> list[HeatMap | Dots]:
    """Return heat maps by layer, of retrieval, likelihood and what it adds, and dots of thirds and as many layers at random."""
    panels: list[HeatMap | Dots] = []
    for trials in by_model_and_boundary(frame):
        ablations = LayerAblations(trials)
        if not any(ablations.off(side) for side in WORDS):
            continue
        texts = _perplexity_tasks(trials) if trials.judged else []
        maps = [_by_layer(ablations, browser, "Needles found", _retrieval(trials))]
        maps += [
            _by_layer(ablations, browser, f"Likelihood of a token, {name}", _likelihood(trials, pick)) for name, pick in texts
        ]
        panels += [panel for panel in maps if panel.marks()]
        panels += [dots for dots in [_thirds(ablations, browser)] if dots.dots]
        panels += [_added(trials.model, rows) for rows in [frame.layers.get(trials.model)] if rows]
    return panels


def _added(model: str, rows: Sequence[Mapping[str, Any]]) -> HeatMap:
    """Return a map of what each layer, its attention and its mixer add to the residual stream, in norms of the layer's input."""
    count = rows[0]["tokens"]
    lines = [
        [None if row[name] is None else Cell(Estimate(row[name], math.nan, math.nan, count)) for row in rows] for name in ADDED
    ]
    kept = [(name, line) for name, line in zip(ADDED.values(), lines, strict=True) if any(line)]
    top = max(cell.y.value for _, line in kept for cell in line if cell)
    names, columns = [name for name, _ in kept], [str(row["layer"]) for row in rows]
    title = "Added to the residual stream (norm, share of the input's)"
    return HeatMap(model, title, "", "layer", names, columns, [line for _, line in kept], top=top, numbers=len(columns) <= 12)


def _by_layer(ablations: LayerAblations, browser: Browser, title: str, measure: Measure) -> HeatMap:
    """Return a map with a column for each layer, and rows for what is off there, or everywhere else."""
    trials = ablations.trials
    columns = sorted({*ablations.layers["attention"], *ablations.layers["recurrent"]})
    rows: list[str] = []
    cells: list[list[Cell | None]] = []
    for side, words in WORDS.items():
        off, every = ablations.off(side), ablations.layers[side]
        others = {x: tuple(y for y in every if y != x) for x in every}
        for label, sets in ((f"{words} off", {x: (x,) for x in every}), (f"no other {words}", others)):
            line = [_cell(browser, trials, f"{label}, layer {x}", off.get(sets.get(x, ())), measure) for x in columns]
            if any(line):
                rows.append(label)
                cells.append(line)
    return HeatMap(
        trials.model, trials.titled(title), "", "layer", rows, [str(x) for x in columns], cells, numbers=len(columns) <= 12
    )


def _cell(browser: Browser, trials: ModelTrials, words: str, condition: Condition | None, measure: Measure) -> Cell | None:
    if condition is None:
        return None
    estimate, rows = measure(condition.text)
    return Cell(estimate, browser.add(f"{trials.name} · {words}", rows)) if estimate.n else None


def _retrieval(trials: ModelTrials) -> Measure:
    def measure(text: str) -> tuple[Estimate, Ints]:
        rows = trials.retrieval(text)
        return trials.accuracy(rows), rows

    return measure


def _perplexity_tasks(trials: ModelTrials) -> list[tuple[str, Pick]]:
    """Return (name, selection without an intervention) of each perplexity task."""
    tasks = trials.frame.distinct("kind", "task", "setting", "layout", "form", model=trials.model, mode="perplexity")
    picks = []
    for kind, task, setting, layout, form in tasks:
        where = {"kind": kind, "task": task, "setting": setting, "layout": layout, "form": form}
        pick = Pick(
            model=trials.model,
            ability=ALL,
            mode="perplexity",
            against="",
            text="none",
            boundary="",
            in_window=ALL,
            **where,
            **ANY_SAMPLE,
        )
        picks.append((task, pick))
    return picks


def _likelihood(trials: ModelTrials, pick: Pick) -> Measure:
    """Measure exp(mean log-likelihood of a token minus that of the untouched model), paired: 100 % where nothing is lost."""
    frame = trials.frame

    def nll(text: str) -> tuple[Ints, stats.Floats, stats.Floats]:
        rows = frame.rows(Pick(**{**vars(pick), "text": text}))
        rows = rows[np.argsort(frame.column("sample", rows), kind="stable")]
        return rows, frame.values("nll", rows), frame.values("tokens", rows)

    def measure(text: str) -> tuple[Estimate, Ints]:
        (rows, after, tokens), (base_rows, base, _) = nll(text), nll("none")
        samples, base_samples = frame.column("sample", rows), frame.column("sample", base_rows)
        _, here, there = np.intersect1d(samples, base_samples, return_indices=True)
        lost = (base[there] - after[here]) * tokens[here]
        return stats.perplexity(lost, tokens[here], frame.column("cluster", rows[here])), rows[here]

    return measure


def _thirds(ablations: LayerAblations, browser: Browser) -> Dots:
    """Return dots of retrieval with a third of the layers off, and with as many at random, all draws together."""
    trials, dots = ablations.trials, []
    for side in WORDS:
        off, every = ablations.off(side), ablations.layers[side]
        named = {layers: name for layers in off if (name := ablations.third(side, layers))}
        for layers, name in sorted(named.items()):
            label = f"{side}: {name} third ({_ranges(layers)})"
            dots.append(_dot(browser, trials, label, COLORS[side], [off[layers]]))
        for count in sorted({len(layers) for layers in off} - {1, len(every) - 1} | {len(layers) for layers in named}):
            others = [c for layers, c in off.items() if len(layers) == count and layers not in named]
            label = f"{side}: {count} of {len(every)}, {len(others)} other set{'s' * (len(others) != 1)}"
            dots += [_dot(browser, trials, label, 0, others) for _ in others[:1]]
    return Dots(trials.model, trials.titled("Thirds of the layers off, and as many others"), "needles found, exact", dots)


def _ranges(layers: Sequence[int]) -> str:
    """Write layers as ranges: `1, 4-7`."""
    starts = [x for x in layers if x - 1 not in layers]
    ends = [x for x in layers if x + 1 not in layers]
    return ", ".join(f"{a}-{b}" if a < b else str(a) for a, b in zip(starts, ends, strict=True))


def _dot(browser: Browser, trials: ModelTrials, label: str, color: int, conditions: Sequence[Condition]) -> Dot:
    rows = np.concatenate([trials.retrieval(c.text) for c in conditions])
    return Dot(label, color, trials.accuracy(rows), browser.add(f"{trials.name} · {label}", rows))
