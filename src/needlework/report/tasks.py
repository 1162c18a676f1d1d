"""Tasks as plans named them, told apart by all but their samples: a map of all, a table of those of no known ability."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from needlework.report.bench import Bench, benches
from needlework.report.browser import Browser
from needlework.report.captions import figure
from needlework.report.frame import ALL, Frame, Pick, differences
from needlework.report.spec import Cell, Figure, Grid

APART = ("task", "mode", "kind", "ability", "setting", "against", "boundary", "layout", "form")
TOLD = ("mode", "kind", "ability", "against", "boundary", "layout", "form")  # said where tasks of one name differ in it


def tasks(frame: Frame, browser: Browser) -> Figure:
    """Every task that generates or chooses, under the conditions that matter most."""
    panels = []
    for model in frame.models:
        bench = benches(frame, model)[0]
        columns = _main_conditions(bench)
        lines = []
        for label, pick in task_picks(frame, model):
            line = [_task_cell(bench, browser, pick, f"{label} · {name}", texts) for name, texts in columns]
            if sum(cell is not None for cell in line) > 1:
                lines.append((label, line))
        if lines:
            names = [name for name, _ in columns]
            panels.append(Grid(model, model, "task", "", [label for label, _ in lines], names, [line for _, line in lines]))
    return figure("tasks", panels)


def task_picks(frame: Frame, model: str, **wanted: Any) -> list[tuple[str, Pick]]:
    """Every task of a model that has right answers, told apart by all but its samples; in and out of the window together."""
    own = [dict(zip(APART, values, strict=True)) for values in frame.distinct(*APART, model=model, **wanted)]
    own = [one for one in own if one["mode"] != "perplexity"]
    unlike = {name: differences(one["setting"] for one in own if one["task"] == name) for name in {o["task"] for o in own}}
    picks = []
    for one in sorted(own, key=lambda one: tuple(one.values())):
        same_name = [other for other in own if other["task"] == one["task"]]
        told = [one["task"], unlike[one["task"]][one["setting"]]]
        told += [f"{name}: {one[name]}" for name in TOLD if len({other[name] for other in same_name}) > 1 and one[name]]
        told += ["boundary: prefill"] * (one["boundary"] == "prefill" and "boundary: prefill" not in told)
        picks.append(
            (
                ", ".join(part for part in told if part),
                Pick(
                    model=model,
                    **one,
                    text=ALL,
                    in_window=ALL,
                    context_tokens=ALL,
                    depth_percent=ALL,
                    chance=ALL,
                ),
            )
        )
    return picks


def _main_conditions(bench: Bench) -> list[tuple[str, list[str]]]:
    few, off, recurrent = bench.few(), bench.silent(), bench.recurrent_off()
    columns = [("untouched", ["none"])]
    if few is not None:
        kept = few.kept(bench.heads)
        random = [c.text for c in bench.of_kind("heads", phase="both", by="random", draw="token") if c.kept(bench.heads) == kept]
        columns += [(f"{kept} of {bench.heads} heads", [few.text]), (f"{kept} of {bench.heads}, random", random)]
    columns += [("no heads", [off.text])] if off else []
    columns += [("no recurrence", [recurrent.text])] if recurrent else []
    return [(label, texts) for label, texts in columns if texts]


def _task_cell(bench: Bench, browser: Browser, pick: Pick, title: str, texts: list[str]) -> Cell | None:
    rows = bench.frame.rows(replace(pick, text=texts))
    rows = rows[~np.isnan(bench.frame.values("correct", rows))]
    if len(rows) == 0:
        return None
    return Cell(bench.accuracy(rows), browser.add(f"{bench.model} · {title}", rows))


def others(frame: Frame) -> tuple[list[str], list[list[str]]]:
    """Tasks that declare no ability: their scores under every intervention, judged by no rule."""
    header = ["model", "task", "intervention", "right"]
    rows = []
    for model in frame.models:
        bench = benches(frame, model)[0]
        for label, pick in task_picks(frame, model, ability=""):
            for text in frame.distinct("text", **{**vars(pick), "text": ALL}):
                share = bench.accuracy(frame.rows(replace(pick, text=text)))
                rows.append([model, label, text, share.text()])
    return header, rows
