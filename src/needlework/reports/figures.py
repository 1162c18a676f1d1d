"""The figures of a report (`FIGURES`), and the panels of heat maps and dots: needles, exposure, head maps, tasks, abilities.

Panels of curves are in `curves.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from needlework.analysis.conditions import EXPOSURES, ways
from needlework.analysis.frame import ALL, ANY_SAMPLE, Frame, Ints, Pick, differences
from needlework.analysis.model_trials import ModelTrials
from needlework.files import package_yaml
from needlework.interventions.acts import RANDOM
from needlework.reports import curves
from needlework.reports.browser import Browser
from needlework.reports.curves import retrieval_cell
from needlework.reports.layers import layers
from needlework.reports.panels import FORM_COLORS, Cell, Dot, Dots, Figure, HeatMap, Panel, per_model
from needlework.stats import Estimate

MOST_PANELS = 8
ABLATIONS = (  # label, kind of condition and site, besides attention alone
    ("recurrent memory off", "recurrent", "memory"),
    ("recurrent block off", "recurrent", "block"),
    ("attention and memory off", "both_off", "memory"),
    ("attention and block off", "both_off", "block"),
)
LAYOUTS = {"plain": "plain", "jrt": "read twice", "question_first": "question first"}
APART = ("task", "mode", "kind", "ability", "setting", "against", "boundary", "layout", "form")  # fields that are never pooled
SAID = ("mode", "kind", "ability", "against", "boundary", "layout", "form")  # added to labels of tasks with the same name


@per_model
def needles(trials: ModelTrials, browser: Browser) -> Iterator[HeatMap]:
    """Yield heat maps of retrieval by length and depth, one per number of heads kept and setting (e.g. distractors)."""
    needles = {"model": trials.model, "kind": trials.needle_kinds["generate"], "mode": "generate", "layout": "plain"}
    frame = trials.frame
    maps = [(label, frame.matching(trials.needle_pick(text, in_window=(True, False)))) for label, text in _per_k(trials)]
    for setting, words in differences(frame.distinct("setting", **needles)).items():
        for label, numbers in maps:
            title = trials.titled(f"{label}, {words}" if words else label)
            yield from _length_by_depth(trials, browser, title, numbers[frame.groups["setting"].iloc[numbers] == setting])


def _per_k(trials: ModelTrials) -> list[tuple[str, str]]:
    """Return (label, intervention) by number of heads kept, from none to all; at most MOST_PANELS, evenly spaced.

    For each number, interventions in both phases are preferred to decode only, then the way to select heads that claims
    prefer, then the one with more trials.
    """
    conditions: dict[int, list[tuple[tuple[int, int, int], str, str]]] = {}
    preferred = ways()
    for c in trials.conditions_of("heads"):
        kept, count = c.kept(trials.heads), len(trials.frame.rows(trials.needle_pick(c.text, in_window=(True, False))))
        on_purpose = c.way in preferred or c.attention_off
        if kept is None or kept >= trials.heads or not on_purpose or c.phase == "prefill" or not count:
            continue
        label = f"{kept} of {trials.heads} heads" + f", by {c.way}" * (c.way not in ("", preferred[0]) and kept > 0)
        rank = (c.phase != "both", preferred.index(c.way) if kept else 0, -count)
        conditions.setdefault(kept, []).append((rank, label + ", decode only" * (c.phase == "decode"), c.text))
    order = sorted(conditions)
    if len(order) > MOST_PANELS - 1:
        order = sorted({order[round(i * (len(order) - 1) / (MOST_PANELS - 2))] for i in range(MOST_PANELS - 1)})
    untouched = (f"all {trials.heads} heads" if trials.heads else "untouched", "none")
    return [*(min(conditions[kept])[1:] for kept in order), untouched]


def _length_by_depth(trials: ModelTrials, browser: Browser, label: str, numbers: Ints) -> list[HeatMap]:
    frame = trials.frame
    groups = frame.groups.iloc[numbers]
    known = groups[(groups["context_tokens"] >= 0) & (groups["depth_percent"] >= 0)]
    by_cell = {place: of_cell.index.tolist() for place, of_cell in known.groupby(["depth_percent", "context_tokens"])}
    if not by_cell:
        return []
    depths, lengths = (sorted({cell[i] for cell in by_cell}) for i in (0, 1))
    cells: list[list[Cell | None]] = []
    for depth in depths:
        line: list[Cell | None] = []
        for length in lengths:
            groups = by_cell.get((depth, length), [])
            rows = frame.of_groups(groups)
            inside = int(frame.groups["in_window"].to_numpy()[frame.column("group", rows)].sum())
            key = browser.add(f"{trials.model} · {label} · {length:g} tokens, depth {depth:g} %", rows)
            line.append(Cell(trials.accuracy(rows), key, inside * 2 < len(rows)) if len(rows) else None)
        cells.append(line)
    rows_, cols = [f"{d:g}" for d in depths], [f"{n:g}" for n in lengths]
    return [HeatMap(trials.model, label, "depth, %", "context, tokens", rows_, cols, cells, numbers=len(cols) <= 6)]


@per_model
def exposure(trials: ModelTrials, browser: Browser) -> Iterator[HeatMap]:
    """Yield heat maps of retrieval by exposure mode in prefill and decode."""
    exposures = [c for c in trials.conditions_of("expose") if len(trials.retrieval(c.text))]
    texts = trials.text_by_place(((c.decode, c.prefill), c) for c in exposures)
    if not texts:
        return
    texts.setdefault(("keep", "keep"), "none")
    decodes, prefills = ([m for m in EXPOSURES if any(pair[i] == m for pair in texts)] for i in (0, 1))
    words = "needle: {} while reading, {} while answering"
    cells = [[retrieval_cell(trials, browser, texts.get((d, p)), words.format(p, d)) for p in prefills] for d in decodes]
    title = trials.titled(trials.model)
    yield HeatMap(trials.model, title, "while answering", "while reading", decodes, prefills, cells)


def head_map(frame: Frame, browser: Browser) -> list[HeatMap]:
    """Return heat maps of mean attention on the needle by layer and head, one per observed task."""
    panels: list[HeatMap] = []
    for model in dict.fromkeys(watched.model for watched in frame.observations):
        of_model = [watched for watched in frame.observations if watched.model == model]
        unlike = differences(watched.setting for watched in of_model)
        for watched in of_model:
            layers, heads = (sorted({place[i] for place in watched.mass}) for i in (0, 1))
            cells: list[list[Cell | None]] = []
            for layer in layers:
                measured = [watched.mass.get((layer, head), (0.0, 0)) for head in heads]
                cells.append([Cell(Estimate(mass, math.nan, math.nan, n)) if n else None for mass, n in measured])
            top = max((cell.y.value for line in cells for cell in line if cell), default=1.0)
            rows, cols = [str(layer) for layer in layers], [str(head) for head in heads]
            words = unlike[watched.setting]
            title = model if len(of_model) == 1 else f"{watched.task}, {words}" if words else watched.task
            panels.append(HeatMap(model, title, "layer", "head", rows, cols, cells, top=max(top, 1e-9), numbers=len(cols) <= 12))
    return panels


@per_model
def tasks(trials: ModelTrials, browser: Browser) -> Iterator[HeatMap]:
    """Yield a heat map of accuracy by task (all but perplexity) and main condition."""
    frame, model, columns = trials.frame, trials.model, _main_conditions(trials)
    lines: dict[str, list[Cell | None]] = {}
    for label, pick in task_picks(frame, model) if trials.judged else ():
        line: list[Cell | None] = []
        for name, texts in columns:
            rows = frame.rows(replace(pick, text=texts))
            rows = rows[~np.isnan(frame.values("correct", rows))]
            key = browser.add(f"{model} · {label} · {name}", rows)
            line.append(Cell(trials.accuracy(rows), key) if len(rows) else None)
        if sum(cell is not None for cell in line) > (1 if pick.ability else 0):
            lines[label] = line
    if lines:
        yield HeatMap(model, model, "task", "", list(lines), [name for name, _ in columns], list(lines.values()))


def task_picks(frame: Frame, model: str, **wanted: Any) -> list[tuple[str, Pick]]:
    """Return (label, selection of trials) of every task of a model except perplexity, inside and outside the window."""
    tasks = [dict(zip(APART, values, strict=True)) for values in sorted(frame.distinct(*APART, model=model, **wanted))]
    tasks = [task for task in tasks if task["mode"] != "perplexity"]
    picks = []
    for task in tasks:
        same_name = [other for other in tasks if other["task"] == task["task"]]
        label = [task["task"], differences(other["setting"] for other in same_name)[task["setting"]]]
        label += [f"{field}: {task[field]}" for field in SAID if len({t[field] for t in same_name}) > 1 and task[field]]
        label += ["boundary: prefill"] * (task["boundary"] == "prefill" and "boundary: prefill" not in label)
        pick = Pick(model=model, **task, text=ALL, in_window=ALL, **ANY_SAMPLE)
        picks.append((", ".join(part for part in label if part), pick))
    return picks


def _main_conditions(trials: ModelTrials) -> list[tuple[str, list[str]]]:
    """Return (label, interventions): none, few heads, as many random heads, no heads, no recurrence, if they were run."""
    few, off, recurrent = trials.few_heads(), trials.heads_off(), trials.recurrent_off()
    columns = [("untouched", ["none"])]
    if few is not None:
        kept, of_heads = few.kept(trials.heads), f"{few.kept(trials.heads)} of {trials.heads}"
        random = trials.conditions_of("heads", phase="both", by=RANDOM, draw="token")
        as_many = [c.text for c in random if c.kept(trials.heads) == kept]
        columns += [(f"{of_heads} heads", [few.text]), (f"{of_heads}, random", as_many)]
    columns += [("no heads", [off.text])] if off else []
    columns += [("no recurrence", [recurrent.text])] if recurrent else []
    columns += [(label, [text]) for label, text in trials.unplaced]
    return [(label, texts) for label, texts in columns if texts]


@per_model
def dissociation(trials: ModelTrials, browser: Browser) -> Iterator[Dots]:
    """Yield dots of the retained share of each ability with attention, the recurrent side or both ablated."""
    off = {"attention off": trials.heads_off()}
    for label, kind, site in ABLATIONS:  # of equivalent interventions, the one with more trials
        conditions = trials.conditions_of(kind, phase="both", site=site)
        off[label] = max(conditions, key=lambda c: len(trials.retrieval(c.text)), default=None)
    dots = []
    ablated = [(label, condition.text) for label, condition in off.items() if condition]
    for label, text in [*ablated, *trials.unplaced]:
        rows = trials.retrieval(text)
        key = browser.add(f"{trials.name} · {label} · retrieval", rows)
        dots += [Dot(f"{label}: retrieval", 1, trials.retained(text).raw, key)] * bool(len(rows))
        for form, color in FORM_COLORS.items() if trials.judged else ():
            rows = trials.knowledge(text, form)
            key = browser.add(f"{trials.name} · {label} · knowledge, {form}", rows)
            dots += [Dot(f"{label}: {form}", color, trials.retained_knowledge(text, form).corrected, key)] * bool(len(rows))
    dots = [dot for dot in dots if dot.y.value == dot.y.value]
    if (trials.unplaced or any("recurrent" in dot.label for dot in dots)) and len(trials.retrieval("none")):
        title = trials.titled(trials.model)
        yield Dots(trials.model, title, "share of the baseline that is left", dots, (1.0, "baseline"))


@per_model
def swap(trials: ModelTrials, browser: Browser) -> Iterator[Dots]:
    """Yield dots of how often answers are the prompt's own or the twin's after a swap of the KV cache or recurrent state."""
    names = {"kv": "KV cache from the twin", "recurrent": "recurrent state from the twin", "both": "both from the twin"}
    for in_window in (True, False):
        dots = []
        for half, label in names.items():
            rows = trials.swapped(half, in_window)
            if len(rows):
                key = browser.add(f"{trials.name} · {label}" + " · out of the window" * (not in_window), rows)
                own, twin = (trials.accuracy(rows, score) for score in ("correct", "follows_twin"))
                dots += [Dot(f"{label}: own answer", 4, own, key), Dot(f"{label}: twin's answer", 6, twin, key)]
        if dots:
            title = trials.titled("needle in the window" if in_window else "needle out of the window")
            yield Dots(trials.model, title, "share of answers", [dot for dot in dots if dot.y.n])


def _accuracies(trials: ModelTrials, browser: Browser, asked: Iterable[tuple[str, str, int, Ints]]) -> list[Dot]:
    """Return a dot of accuracy for each (first part of its label, second part, colour, trials) that has trials."""
    return [
        Dot(f"{first}: {second}", color, trials.accuracy(rows), browser.add(f"{trials.name} · {first} · {second}", rows))
        for first, second, color, rows in asked
        if len(rows)
    ]


@per_model
def layouts(trials: ModelTrials, browser: Browser) -> Iterator[Dots]:
    """Yield dots of retrieval by prompt layout, with and without heads."""
    off = trials.heads_off()
    conditions = [("untouched", "none", 1), *([("no heads", off.text, 6)] if off else [])]
    asked = [(name, *c, layout) for layout, name in LAYOUTS.items() for c in conditions]
    dots = _accuracies(
        trials, browser, ((name, label, color, trials.retrieval(text, layout=at)) for name, label, text, color, at in asked)
    )
    if any("plain" not in dot.label for dot in dots):
        yield Dots(trials.model, trials.titled(trials.model), "needles found, exact", dots)


@per_model
def hops(trials: ModelTrials, browser: Browser) -> Iterator[Dots]:
    """Yield dots of retrieval by the form of needles, such as hops, under the main conditions."""
    asked = [
        (label, color, form, text) for label, text in main_conditions(trials) for color, form in enumerate(trials.needle_forms, 1)
    ]
    dots = _accuracies(trials, browser, ((label, form, color, trials.of_form(form, text)) for label, color, form, text in asked))
    if dots:
        yield Dots(trials.model, trials.titled(trials.model), "values found, exact", dots)


def main_conditions(trials: ModelTrials) -> list[tuple[str, str]]:
    """Return (label, intervention) untouched, of heads zeroed in a phase, of few heads and of the hidden needle, if run."""
    off = [("no heads while reading", "prefill"), ("no heads while answering", "decode"), ("no heads", "both")]
    named = [(label, trials.heads_off(phase)) for label, phase in off]
    named += [(trials.kept_share(few), few)] if (few := trials.few_heads()) else []
    hidden = {(c.prefill, c.decode): c for c in trials.conditions_of("expose")}
    named += [("needle hidden while reading", hidden.get(("omit", "keep")))]
    named += [("needle hidden while answering", hidden.get(("keep", "omit")))]
    return [("untouched", "none"), *((label, c.text) for label, c in named if c)]


@dataclass(frozen=True)
class FigureKind:
    """Texts of a figure and the function that builds its panels."""

    link: str  # name in the page's table of contents
    title: str
    caption: str
    make_panels: Callable[[Frame, Browser], Sequence[Panel]]


def make_figure(name: str, frame: Frame, browser: Browser) -> Figure:
    """Build one figure of FIGURES; it has no panels if none of its trials were run."""
    kind = FIGURES[name]
    return Figure(name, kind.title, kind.caption, kind.make_panels(frame, browser))


_PANELS: dict[str, Callable[[Frame, Browser], Sequence[Panel]]] = {
    "heads": curves.heads,
    "needles": needles,
    "exposure": exposure,
    "dissociation": dissociation,
    "memory": swap,
    "layers": layers,
    "head-map": head_map,
    "context": curves.context,
    "hops": hops,
    "layouts": layouts,
    "tasks": tasks,
}
_TEXTS = package_yaml(__file__, "templates/figures.yaml")
FIGURES = {name: FigureKind(**texts, make_panels=_PANELS[name]) for name, texts in _TEXTS.items()}
