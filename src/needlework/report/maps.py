"""Figures of cells: needles by length and depth, exposure modes, heads by layer, tasks by condition."""

from __future__ import annotations

import numpy as np

from needlework import stats
from needlework.report.browser import Browser
from needlework.report.captions import figure
from needlework.report.conditions import EXPOSURES
from needlework.report.evidence import BY, Bench
from needlework.report.frame import Frame
from needlework.report.spec import Cell, Figure, Grid
from needlework.stats import Estimate

MOST_PANELS = 8


def needles(frame: Frame, browser: Browser) -> Figure:
    """Heat maps of length x depth, one per number of heads kept."""
    panels: list[Grid] = []
    for model in frame.models:
        bench = Bench(frame, model)
        for label, texts in _per_k(bench):
            grid = _length_by_depth(bench, browser, label, texts)
            if grid:
                panels.append(grid)
    return figure("needles", panels)


def _per_k(bench: Bench) -> list[tuple[str, str]]:
    """(label, intervention) from none kept to all; at most MOST_PANELS, spread over the range."""
    found: dict[int, tuple[str, str]] = {}
    for phase in ("decode", "both"):  # what acts at every position goes before decode-only
        for c in bench.of_kind("heads", phase=phase):
            kept = c.kept(bench.heads)
            if kept is not None and kept < bench.heads and (c.by in BY or c.attention_off) and len(bench.retrieval(c.text)):
                where = "" if phase == "both" else ", decode only"
                found[kept] = (f"{kept} of {bench.heads} heads{where}", c.text)
    whole = (f"all {bench.heads} heads" if bench.heads else "untouched", "none")
    order = sorted(found)
    if len(order) > MOST_PANELS - 1:
        order = sorted({order[round(i * (len(order) - 1) / (MOST_PANELS - 2))] for i in range(MOST_PANELS - 1)})
    return [*(found[k] for k in order), whole]


def _length_by_depth(bench: Bench, browser: Browser, label: str, text: str) -> Grid | None:
    frame = bench.frame
    numbers = frame.matching(
        model=bench.model, family="retrieval", mode="generate", task=bench.tasks("generate"), text=text, layout="plain"
    )
    by_cell: dict[tuple[float, float], list[int]] = {}
    for g in numbers:
        group = frame.groups[g]
        if group.context_tokens >= 0 and group.depth_percent >= 0:
            by_cell.setdefault((group.depth_percent, group.context_tokens), []).append(int(g))
    if not by_cell:
        return None
    depths, lengths = (sorted({cell[i] for cell in by_cell}) for i in (0, 1))
    cells: list[list[Cell | None]] = []
    for depth in depths:
        line: list[Cell | None] = []
        for length in lengths:
            groups = by_cell.get((depth, length), [])
            rows = frame.of_groups(groups)
            inside = sum(len(frame.of_groups([g])) for g in groups if frame.groups[g].in_window)
            title = f"{bench.model} · {label} · {length:g} tokens, depth {depth:g} %"
            key = browser.add(title, rows)
            line.append(Cell(bench.accuracy(rows), key, inside * 2 < len(rows)) if len(rows) else None)
        cells.append(line)
    rows_, cols = [f"{d:g}" for d in depths], [f"{n:g}" for n in lengths]
    return Grid(bench.model, label, "depth, %", "context, tokens", rows_, cols, cells, numbers=len(cols) <= 6)


def exposure(frame: Frame, browser: Browser) -> Figure:
    panels = []
    for model in frame.models:
        bench = Bench(frame, model)
        texts = {(c.decode, c.prefill): c.text for c in bench.of_kind("expose")}
        if not texts:
            continue
        texts.setdefault(("keep", "keep"), "none")
        decodes, prefills = ([m for m in EXPOSURES if any(pair[i] == m for pair in texts)] for i in (0, 1))
        cells = [[_exposed(bench, browser, texts, d, p) for p in prefills] for d in decodes]
        panels.append(Grid(model, model, "while answering", "while reading", decodes, prefills, cells))
    return figure("exposure", panels)


def _exposed(bench: Bench, browser: Browser, texts: dict[tuple[str, str], str], decode: str, prefill: str) -> Cell | None:
    text = texts.get((decode, prefill))
    if text is None:
        return None
    rows = bench.retrieval(text)
    if len(rows) == 0:
        return None
    key = browser.add(f"{bench.model} · needle: {prefill} while reading, {decode} while answering", rows)
    return Cell(bench.accuracy(rows), key)


def head_map(frame: Frame, browser: Browser) -> Figure:
    """Mean attention on the needle per layer and head."""
    panels = []
    for model in dict.fromkeys(label for label, _ in frame.observations):
        own = [o for label, o in frame.observations if label == model]
        total: dict[tuple[int, int], tuple[float, int]] = {}
        for o in own:
            mass, n = total.get((o.layer, o.head), (0.0, 0))
            total[o.layer, o.head] = (mass + o.needle_mass * o.samples, n + o.samples)
        layers, heads = (sorted({place[i] for place in total}) for i in (0, 1))
        cells = [[_mass(total.get((layer, head))) for head in heads] for layer in layers]
        top = max((cell.y.value for line in cells for cell in line if cell), default=1.0)
        rows, cols = [str(layer) for layer in layers], [str(head) for head in heads]
        panels.append(Grid(model, model, "layer", "head", rows, cols, cells, top=max(top, 1e-9), numbers=len(cols) <= 12))
    return figure("head-map", panels)


def _mass(found: tuple[float, int] | None) -> Cell | None:
    if found is None or found[1] == 0:
        return None
    value = found[0] / found[1]
    return Cell(Estimate(value, float("nan"), float("nan"), found[1]))


def tasks(frame: Frame, browser: Browser) -> Figure:
    """Every task that generates or chooses, under the conditions that matter most."""
    panels = []
    for model in frame.models:
        bench = Bench(frame, model)
        columns = _main_conditions(bench)
        names = sorted({(frame.groups[g].task, frame.groups[g].mode) for g in frame.matching(model=model)})
        names = [pair for pair in names if pair[1] != "perplexity"]
        cells = [[_task_cell(bench, browser, name, mode, label, texts) for label, texts in columns] for name, mode in names]
        kept = [(name, line) for (name, _), line in zip(names, cells, strict=True) if sum(c is not None for c in line) > 1]
        if kept:
            labels = [label for label, _ in columns]
            panels.append(Grid(model, model, "task", "", [n for n, _ in kept], labels, [line for _, line in kept]))
    return figure("tasks", panels)


def _main_conditions(bench: Bench) -> list[tuple[str, list[str]]]:
    few, off, recurrent = bench.few(), bench.silent(), bench.recurrent_off()
    columns = [("untouched", ["none"])]
    if few is not None:
        kept = few.kept(bench.heads)
        random = [c.text for c in bench.of_kind("heads", phase="both", by="random") if c.kept(bench.heads) == kept]
        columns += [("15 % heads", [few.text]), ("15 % random", random)]
    columns += [("no heads", [off.text])] if off else []
    columns += [("no recurrence", [recurrent.text])] if recurrent else []
    return [(label, texts) for label, texts in columns if texts]


def _task_cell(bench: Bench, browser: Browser, task: str, mode: str, label: str, texts: list[str]) -> Cell | None:
    rows = bench.frame.rows(model=bench.model, task=task, mode=mode, text=texts)
    rows = rows[~np.isnan(bench.frame.values("correct", rows))]
    if len(rows) == 0:
        return None
    return Cell(stats.accuracy(bench.frame.values("correct", rows)), browser.add(f"{bench.model} · {task} · {label}", rows))
