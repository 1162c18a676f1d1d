"""Figures of cells: needles by length and depth, exposure modes, heads by layer."""

from __future__ import annotations

from collections.abc import Sequence

from needlework.report.browser import Browser
from needlework.report.captions import figure
from needlework.report.conditions import EXPOSURES, ways
from needlework.report.frame import Frame, differences
from needlework.report.model_trials import ModelTrials, by_model_and_boundary
from needlework.report.spec import Cell, Figure, Grid
from needlework.stats import Estimate

MOST_PANELS = 8


def needles(frame: Frame, browser: Browser) -> Figure:
    """Heat maps of length x depth, one per number of heads kept. Needles among others are not needles alone: maps apart."""
    panels: list[Grid] = []
    for trials in by_model_and_boundary(frame):
        needles = {"model": trials.model, "kind": trials.needle_kinds["generate"], "mode": "generate", "layout": "plain"}
        maps = [(label, frame.matching(trials.needle_pick(text, in_window=(True, False)))) for label, text in _per_k(trials)]
        for setting, words in differences(frame.distinct("setting", **needles)).items():
            for label, numbers in maps:
                title = trials.titled(f"{label}, {words}" if words else label)
                panels += _length_by_depth(trials, browser, title, [g for g in numbers if frame.groups[g].setting == setting])
    return figure("needles", panels)


def _per_k(trials: ModelTrials) -> list[tuple[str, str]]:
    """(label, intervention) from none kept to all; at most MOST_PANELS, spread over the range.

    What acts at every position goes before decode-only, and the way of choosing heads that claims prefer before the others.
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


def _length_by_depth(trials: ModelTrials, browser: Browser, label: str, numbers: Sequence[int]) -> list[Grid]:
    frame = trials.frame
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
            key = browser.add(f"{trials.model} · {label} · {length:g} tokens, depth {depth:g} %", rows)
            line.append(Cell(trials.accuracy(rows), key, inside * 2 < len(rows)) if len(rows) else None)
        cells.append(line)
    rows_, cols = [f"{d:g}" for d in depths], [f"{n:g}" for n in lengths]
    return [Grid(trials.model, label, "depth, %", "context, tokens", rows_, cols, cells, numbers=len(cols) <= 6)]


def exposure(frame: Frame, browser: Browser) -> Figure:
    panels = []
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
    return figure("exposure", panels)


def retrieval_cell(trials: ModelTrials, browser: Browser, text: str | None, words: str) -> Cell | None:
    """Needles found under an intervention, where it was run."""
    rows = trials.retrieval(text or "-")  # no intervention is called so
    return Cell(trials.accuracy(rows), browser.add(f"{trials.name} · {words}", rows)) if len(rows) else None


def head_map(frame: Frame, browser: Browser) -> Figure:
    """Mean attention on the needle per layer and head, one map for each task that was watched."""
    panels = []
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
    return figure("head-map", panels)


def _mass(measured: tuple[float, int] | None) -> Cell | None:
    if measured is None or measured[1] == 0:
        return None
    return Cell(Estimate(measured[0], float("nan"), float("nan"), measured[1]))
