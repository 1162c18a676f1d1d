"""Panels of heat maps and dots: needles by length and depth, exposure, head maps, tasks, and retained abilities."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from needlework import stats
from needlework.analysis.conditions import EXPOSURES, Condition, ways
from needlework.analysis.frame import ALL, ANY_SAMPLE, Frame, Ints, Pick, differences
from needlework.analysis.model_trials import ModelTrials, by_boundary, by_model_and_boundary
from needlework.interventions.scores import RANDOM
from needlework.reports.browser import Browser
from needlework.reports.panels import FORM_COLORS, Cell, Dot, Dots, Grid
from needlework.stats import Estimate

MOST_PANELS = 8
LAYOUTS = {"plain": "plain", "jrt": "read twice", "question_first": "question first"}
APART = ("task", "mode", "kind", "ability", "setting", "against", "boundary", "layout", "form")  # fields that are never pooled
SAID = ("mode", "kind", "ability", "against", "boundary", "layout", "form")  # added to labels of tasks with the same name


def needles(frame: Frame, browser: Browser) -> list[Grid]:
    """Return heat maps of retrieval by length and depth, one per number of heads kept and setting (e.g. distractors)."""
    panels: list[Grid] = []
    for trials in by_model_and_boundary(frame):
        needles = {"model": trials.model, "kind": trials.needle_kinds["generate"], "mode": "generate", "layout": "plain"}
        maps = [(label, frame.matching(trials.needle_pick(text, in_window=(True, False)))) for label, text in _per_k(trials)]
        for setting, words in differences(frame.distinct("setting", **needles)).items():
            for label, numbers in maps:
                title = trials.titled(f"{label}, {words}" if words else label)
                panels += _length_by_depth(trials, browser, title, numbers[frame.groups["setting"].iloc[numbers] == setting])
    return panels


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


def _length_by_depth(trials: ModelTrials, browser: Browser, label: str, numbers: Ints) -> list[Grid]:
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
    return [Grid(trials.model, label, "depth, %", "context, tokens", rows_, cols, cells, numbers=len(cols) <= 6)]


def exposure(frame: Frame, browser: Browser) -> list[Grid]:
    """Return heat maps of retrieval by exposure mode in prefill and decode."""
    panels: list[Grid] = []
    for trials in by_model_and_boundary(frame):
        exposures = [c for c in trials.conditions_of("expose") if len(trials.retrieval(c.text))]
        texts = trials.text_by_place(((c.decode, c.prefill), c) for c in exposures)
        if not texts:
            continue
        texts.setdefault(("keep", "keep"), "none")
        decodes, prefills = ([m for m in EXPOSURES if any(pair[i] == m for pair in texts)] for i in (0, 1))
        words = "needle: {} while reading, {} while answering"
        cells = [[retrieval_cell(trials, browser, texts.get((d, p)), words.format(p, d)) for p in prefills] for d in decodes]
        title = trials.titled(trials.model)
        panels.append(Grid(trials.model, title, "while answering", "while reading", decodes, prefills, cells))
    return panels


def retrieval_cell(trials: ModelTrials, browser: Browser, text: str | None, words: str) -> Cell | None:
    """Return retrieval accuracy under an intervention; None if it was not run."""
    rows = trials.retrieval(text or "-")  # "-" is no intervention's text: selects nothing
    return Cell(trials.accuracy(rows), browser.add(f"{trials.name} · {words}", rows)) if len(rows) else None


def head_map(frame: Frame, browser: Browser) -> list[Grid]:
    """Return heat maps of mean attention on the needle by layer and head, one per observed task."""
    panels: list[Grid] = []
    for model in dict.fromkeys(watched.model for watched in frame.observations):
        of_model = [watched for watched in frame.observations if watched.model == model]
        unlike = differences(watched.setting for watched in of_model)
        for watched in of_model:
            layers, heads = (sorted({place[i] for place in watched.mass}) for i in (0, 1))
            cells = [[_mass(watched.mass.get((layer, head))) for head in heads] for layer in layers]
            top = max((cell.y.value for line in cells for cell in line if cell), default=1.0)
            rows, cols = [str(layer) for layer in layers], [str(head) for head in heads]
            words = unlike[watched.setting]
            title = model if len(of_model) == 1 else f"{watched.task}, {words}" if words else watched.task
            panels.append(Grid(model, title, "layer", "head", rows, cols, cells, top=max(top, 1e-9), numbers=len(cols) <= 12))
    return panels


def _mass(measured: tuple[float, int] | None) -> Cell | None:
    if measured is None or measured[1] == 0:
        return None
    return Cell(Estimate(measured[0], float("nan"), float("nan"), measured[1]))


def tasks(frame: Frame, browser: Browser) -> list[Grid]:
    """Return heat maps of accuracy by task (all but perplexity) and main condition."""
    panels = []
    for model in frame.models:
        trials = by_boundary(frame, model)[0]
        columns = _main_conditions(trials)
        lines = []
        for label, pick in task_picks(frame, model):
            line = [_task_cell(trials, browser, pick, f"{label} · {name}", texts) for name, texts in columns]
            if sum(cell is not None for cell in line) > 1:
                lines.append((label, line))
        if lines:
            names = [name for name, _ in columns]
            panels.append(Grid(model, model, "task", "", [label for label, _ in lines], names, [line for _, line in lines]))
    return panels


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
    return [(label, texts) for label, texts in columns if texts]


def _task_cell(trials: ModelTrials, browser: Browser, pick: Pick, title: str, texts: list[str]) -> Cell | None:
    rows = trials.frame.rows(replace(pick, text=texts))
    rows = rows[~np.isnan(trials.frame.values("correct", rows))]
    if len(rows) == 0:
        return None
    return Cell(trials.accuracy(rows), browser.add(f"{trials.model} · {title}", rows))


def dissociation(frame: Frame, browser: Browser) -> list[Dots]:
    """Return dots of the retained share of each ability with attention, the recurrent side or both ablated."""
    panels = []
    for trials in by_model_and_boundary(frame):
        off = [("attention off", trials.heads_off()), ("recurrent memory off", _site(trials, "recurrent", "memory"))]
        off += [("recurrent block off", _site(trials, "recurrent", "block"))]
        off += [(f"attention and {name} off", _site(trials, "both_off", name)) for name in ("memory", "block")]
        dots = []
        for label, condition in off:
            if condition is not None:
                dots += _abilities(trials, browser, label, condition.text)
        if any("recurrent" in dot.label for dot in dots) and len(trials.retrieval("none")):
            title = trials.titled(trials.model)
            panels.append(Dots(trials.model, title, "share of the baseline that is left", dots, (1.0, "baseline")))
    return panels


def _site(trials: ModelTrials, kind: str, site: str) -> Condition | None:
    """Return the ablation at this site; of equivalent ones, the one with more trials."""
    conditions = trials.conditions_of(kind, phase="both", site=site)
    return max(conditions, key=lambda c: len(trials.retrieval(c.text)), default=None)


def _abilities(trials: ModelTrials, browser: Browser, label: str, text: str) -> list[Dot]:
    dots = []
    rows = trials.retrieval(text)
    if len(rows):
        key = browser.add(f"{trials.name} · {label} · retrieval", rows)
        dots.append(Dot(f"{label}: retrieval", 1, trials.retained(text).raw, key))
    for form, color in FORM_COLORS.items() if trials.judged else ():
        rows = trials.knowledge(text, form)
        if len(rows):
            key = browser.add(f"{trials.name} · {label} · knowledge, {form}", rows)
            dots.append(Dot(f"{label}: {form}", color, trials.retained_knowledge(text, form).corrected, key))
    return [dot for dot in dots if dot.y.value == dot.y.value]


def swap(frame: Frame, browser: Browser) -> list[Dots]:
    """Return dots of how often answers are the prompt's own or the twin's after a swap of the KV cache or recurrent state."""
    panels = []
    names = {"kv": "KV cache from the twin", "recurrent": "recurrent state from the twin", "both": "both from the twin"}
    for trials in by_model_and_boundary(frame):
        for in_window in (True, False):
            dots = []
            for half, label in names.items():
                rows = trials.swapped(half, in_window)
                if len(rows):
                    key = browser.add(f"{trials.name} · {label}" + " · out of the window" * (not in_window), rows)
                    own, twin = (stats.accuracy(frame.values(name, rows)) for name in ("correct", "follows_twin"))
                    dots += [Dot(f"{label}: own answer", 4, own, key), Dot(f"{label}: twin's answer", 6, twin, key)]
            if dots:
                title = trials.titled("needle in the window" if in_window else "needle out of the window")
                panels.append(Dots(trials.model, title, "share of answers", [dot for dot in dots if dot.y.n]))
    return panels


def layouts(frame: Frame, browser: Browser) -> list[Dots]:
    """Return dots of retrieval by prompt layout, with and without heads."""
    panels = []
    for trials in by_model_and_boundary(frame):
        off = trials.heads_off()
        dots = []
        for layout, name in LAYOUTS.items():
            for label, text, color in [("untouched", "none", 1), *([("no heads", off.text, 6)] if off else [])]:
                rows = trials.retrieval(text, layout=layout)
                if len(rows):
                    key = browser.add(f"{trials.name} · {name} · {label}", rows)
                    dots.append(Dot(f"{name}: {label}", color, trials.accuracy(rows), key))
        if sum("plain" not in dot.label for dot in dots):
            panels.append(Dots(trials.model, trials.titled(trials.model), "needles found, exact", dots))
    return panels


def hops(frame: Frame, browser: Browser) -> list[Dots]:
    """Return dots of retrieval by number of hops, with all heads zeroed in prefill, decode or both."""
    panels = []
    for trials in by_model_and_boundary(frame):
        dots = []
        for label, text in phases(trials):
            for hop in trials.hops:
                rows = trials.in_hops(hop, text)
                if len(rows):
                    key = browser.add(f"{trials.name} · {label} · {hops_in_words(hop)}", rows)
                    dots.append(Dot(f"{label}: {hops_in_words(hop)}", hop, trials.accuracy(rows), key))
        if dots:
            panels.append(Dots(trials.model, trials.titled(trials.model), "values found, exact", dots))
    return panels


def phases(trials: ModelTrials) -> list[tuple[str, str]]:
    """Return (label, intervention) of the unmodified model and of all heads zeroed in prefill, decode or both, if run."""
    off = [("no heads while reading", "prefill"), ("no heads while answering", "decode"), ("no heads", "both")]
    return [("untouched", "none"), *((label, c.text) for label, phase in off if (c := trials.heads_off(phase)))]


def hops_in_words(hops: int) -> str:
    return {1: "one hop", 2: "two hops", 3: "three hops"}.get(hops, f"{hops} hops")
