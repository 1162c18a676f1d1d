"""Figures of cells: needles by length and depth, exposure modes, heads by layer."""

from __future__ import annotations

from collections.abc import Sequence

from needlework.report.bench import BY, Bench, every_bench
from needlework.report.browser import Browser
from needlework.report.captions import figure
from needlework.report.conditions import EXPOSURES
from needlework.report.frame import Frame, differences
from needlework.report.spec import Cell, Figure, Grid
from needlework.stats import Estimate

MOST_PANELS = 8


def needles(frame: Frame, browser: Browser) -> Figure:
    """Heat maps of length x depth, one per number of heads kept. Needles among others are not needles alone: maps apart."""
    panels: list[Grid] = []
    for bench in every_bench(frame):
        own = {"model": bench.model, "kind": bench.needle_kinds["generate"], "mode": "generate", "layout": "plain"}
        maps = [(label, frame.matching(bench.needles(text, in_window=(True, False)))) for label, text in _per_k(bench)]
        for setting, words in differences(frame.distinct("setting", **own)).items():
            for label, numbers in maps:
                title = bench.titled(f"{label}, {words}" if words else label)
                panels += _length_by_depth(bench, browser, title, [g for g in numbers if frame.groups[g].setting == setting])
    return figure("needles", panels)


def _per_k(bench: Bench) -> list[tuple[str, str]]:
    """(label, intervention) from none kept to all; at most MOST_PANELS, spread over the range.

    What acts at every position goes before decode-only, and the best known way of choosing heads before the others.
    """
    conditions: dict[int, list[tuple[tuple[int, int, int], str, str]]] = {}
    for c in bench.of_kind("heads"):
        kept, trials = c.kept(bench.heads), len(bench.frame.rows(bench.needles(c.text, in_window=(True, False))))
        if kept is None or kept >= bench.heads or not (c.way in BY or c.attention_off) or c.phase == "prefill" or not trials:
            continue
        label = f"{kept} of {bench.heads} heads" + f", by {c.way}" * (c.way not in ("", "entropy") and kept > 0)
        rank = (c.phase != "both", BY.index(c.way) if kept else 0, -trials)
        conditions.setdefault(kept, []).append((rank, label + ", decode only" * (c.phase == "decode"), c.text))
    order = sorted(conditions)
    if len(order) > MOST_PANELS - 1:
        order = sorted({order[round(i * (len(order) - 1) / (MOST_PANELS - 2))] for i in range(MOST_PANELS - 1)})
    whole = (f"all {bench.heads} heads" if bench.heads else "untouched", "none")
    return [*(min(conditions[kept])[1:] for kept in order), whole]


def _length_by_depth(bench: Bench, browser: Browser, label: str, numbers: Sequence[int]) -> list[Grid]:
    frame = bench.frame
    by_cell: dict[tuple[float, float], list[int]] = {}
    for g in numbers:
        group = frame.groups[g]
        if group.context_tokens >= 0 and group.depth_percent >= 0:
            by_cell.setdefault((group.depth_percent, group.context_tokens), []).append(int(g))
    if not by_cell:
        return []
    depths, lengths = (sorted({cell[i] for cell in by_cell}) for i in (0, 1))
    cells: list[list[Cell | None]] = []
    for depth in depths:
        line: list[Cell | None] = []
        for length in lengths:
            groups = by_cell.get((depth, length), [])
            rows = frame.of_groups(groups)
            inside = sum(frame.groups[g].in_window for g in frame.group[rows])
            key = browser.add(f"{bench.model} · {label} · {length:g} tokens, depth {depth:g} %", rows)
            line.append(Cell(bench.accuracy(rows), key, inside * 2 < len(rows)) if len(rows) else None)
        cells.append(line)
    rows_, cols = [f"{d:g}" for d in depths], [f"{n:g}" for n in lengths]
    return [Grid(bench.model, label, "depth, %", "context, tokens", rows_, cols, cells, numbers=len(cols) <= 6)]


def exposure(frame: Frame, browser: Browser) -> Figure:
    panels = []
    for bench in every_bench(frame):
        own = bench.placed(((c.decode, c.prefill), c) for c in bench.of_kind("expose"))
        texts = {place: text for place, text in own.items() if len(bench.retrieval(text))}
        if not texts:
            continue
        texts.setdefault(("keep", "keep"), "none")
        decodes, prefills = ([m for m in EXPOSURES if any(pair[i] == m for pair in texts)] for i in (0, 1))
        cells = [[_exposed(bench, browser, texts, d, p) for p in prefills] for d in decodes]
        title = bench.titled(bench.model)
        panels.append(Grid(bench.model, title, "while answering", "while reading", decodes, prefills, cells))
    return figure("exposure", panels)


def _exposed(bench: Bench, browser: Browser, texts: dict[tuple[str, str], str], decode: str, prefill: str) -> Cell | None:
    text = texts.get((decode, prefill))
    if text is None:
        return None
    rows = bench.retrieval(text)
    if len(rows) == 0:
        return None
    key = browser.add(f"{bench.name} · needle: {prefill} while reading, {decode} while answering", rows)
    return Cell(bench.accuracy(rows), key)


def head_map(frame: Frame, browser: Browser) -> Figure:
    """Mean attention on the needle per layer and head, one map for each task that was watched."""
    panels = []
    for model in dict.fromkeys(watched.model for watched in frame.observations):
        own = [watched for watched in frame.observations if watched.model == model]
        unlike = differences(watched.setting for watched in own)
        for watched in own:
            layers, heads = (sorted({place[i] for place in watched.mass}) for i in (0, 1))
            cells = [[_mass(watched.mass.get((layer, head))) for head in heads] for layer in layers]
            top = max((cell.y.value for line in cells for cell in line if cell), default=1.0)
            rows, cols = [str(layer) for layer in layers], [str(head) for head in heads]
            words = unlike[watched.setting]
            title = model if len(own) == 1 else f"{watched.task}, {words}" if words else watched.task
            panels.append(Grid(model, title, "layer", "head", rows, cols, cells, top=max(top, 1e-9), numbers=len(cols) <= 12))
    return figure("head-map", panels)


def _mass(measured: tuple[float, int] | None) -> Cell | None:
    if measured is None or measured[1] == 0:
        return None
    return Cell(Estimate(measured[0], float("nan"), float("nan"), measured[1]))
