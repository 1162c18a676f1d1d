"""Tasks by the names that plans gave them: a map of all, and a table of those that declare no ability."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from needlework.interventions.scores import RANDOM
from needlework.report.browser import Browser
from needlework.report.captions import figure
from needlework.report.frame import ALL, ANY_SAMPLE, Frame, Pick, differences
from needlework.report.model_trials import ModelTrials, by_boundary
from needlework.report.names import shown
from needlework.report.spec import Cell, Figure, Grid, HeaderAndRows

APART = ("task", "mode", "kind", "ability", "setting", "against", "boundary", "layout", "form")
SAID = ("mode", "kind", "ability", "against", "boundary", "layout", "form")  # said where tasks of one name differ in it


def tasks(frame: Frame, browser: Browser) -> Figure:
    """Every task that generates or chooses, under the conditions that matter most."""
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
    return figure("tasks", panels)


def task_picks(frame: Frame, model: str, **wanted: Any) -> list[tuple[str, Pick]]:
    """Every task of a model that has right answers, told apart by all but its samples; in and out of the window together."""
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


def others(frame: Frame) -> HeaderAndRows:
    """Tasks that declare no ability: their scores under every intervention, judged by no rule."""
    header = ["model", "task", "intervention", "right"]
    rows = []
    for model in frame.models:
        trials = by_boundary(frame, model)[0]
        for label, pick in task_picks(frame, model, ability=""):
            for text in frame.distinct("text", **{**vars(pick), "text": ALL}):
                share = trials.accuracy(frame.rows(replace(pick, text=text)))
                rows.append([model, label, shown(text, 200), share.text()])
    return header, rows
