"""The overview as a picture file, drawn with matplotlib: what a paper or a README shows of a run."""

from __future__ import annotations

import textwrap
from typing import Any

from needlework.report.overview import Block, Overview, Strip, free, outcome, zone
from needlework.stats import whole_percent
from needlework.verdicts import Word

INK = {"yes": "#1d6b41", "no": "#9c2b2b", "maybe": "#9a6b10", "plain": "#3d4654"}
WORDS: dict[Word, str] = {
    "supported": INK["yes"],
    "not supported": INK["no"],
    "inconclusive": INK["maybe"],
    "not testable": "#767d88",
    "not run": "#767d88",
    "does not apply": "#9aa0a8",
}
PAPER = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
LABELS, COLUMN = 2.7, 1.55  # inches: of the labels, of one model
LINE, HEAD, GAP = 0.185, 0.3, 0.12  # of one number, of a claim's title, between two claims


def finding(overview: Overview, canvas_type: Any) -> Any:
    """One row of small axes for each claim, one column for each model."""
    models, blocks = list(overview.models), overview.blocks
    heights = [HEAD + LINE * max(1, len(block.strips)) + GAP for block in blocks]
    top, bottom = 0.62, 0.34
    wide, tall = LABELS + COLUMN * len(models), top + sum(heights) + bottom
    canvas = canvas_type(figsize=(wide, tall))
    for c, model in enumerate(models):
        x = (LABELS + COLUMN * c) / wide
        name = textwrap.wrap(model, 24, break_on_hyphens=False) or [model]
        canvas.text(x, 1 - 0.12 / tall, "\n".join(name[:2]), fontsize=8.5, fontweight="bold", va="top")
        canvas.text(x, 1 - (0.28 + 0.14 * (len(name) > 1)) / tall, overview.models[model], fontsize=7, color="#767d88", va="top")
    at = tall - top
    for block, height in zip(blocks, heights, strict=True):
        canvas.text(0.08 / wide, (at - 0.17) / tall, f"{block.rule.number}  {block.rule.title}", fontsize=8.5, fontweight="bold")
        for i, strip in enumerate(block.strips):
            y = (at - HEAD - LINE * (i + 0.5)) / tall
            canvas.text(0.24 / wide, y, strip.label, fontsize=7.5, color="#565d69", va="center")
        for c, model in enumerate(models):
            if overview.outside(model) and block is not blocks[0]:  # said once
                continue
            x, inside = (LABELS + COLUMN * c) / wide, height - HEAD - GAP
            place = (x, (at - HEAD - inside) / tall, (COLUMN - 0.5) / wide, inside / tall)
            _cell(block, model, canvas, place, (x, (at - 0.17) / tall))
        at -= height
    canvas.text(0.08 / wide, 0.1 / tall, KEY, fontsize=6.5, color="#767d88")
    return canvas


KEY = (
    "Shares from 0 to 100 % with 95 % intervals. Shaded: where the claim has them; dashed: the rule's line; dotted: chance."
    " A verdict speaks of one checkpoint."
)


def _cell(block: Block, model: str, canvas: Any, place: tuple[float, ...], corner: tuple[float, float]) -> None:
    verdict = block.verdicts[model]
    style = "italic" if verdict.word in ("not run", "does not apply") else "normal"
    words = canvas.text(*corner, verdict.word, fontsize=7.5, color=WORDS[verdict.word], fontweight="bold", style=style)
    if not verdict.points:
        words.set_fontweight("normal")
        return
    right = place[0] + place[2] * 1.32
    canvas.text(right, corner[1], f"n = {verdict.estimate.n:,}", fontsize=6.5, color="#767d88", ha="right")
    ax = canvas.add_axes(place)
    ax.set_xlim(-6, 106)
    ax.set_ylim(len(block.strips) - 0.5, -0.5)
    ax.set_axis_off()
    faded = 0.4 if verdict.word == "not testable" else 1.0
    for i, strip in enumerate(block.strips):
        if model in strip.points:
            _strip(strip, model, i, ax, faded)


def _strip(strip: Strip, model: str, i: int, ax: Any, alpha: float) -> None:
    point = strip.points[model]
    e, ink = point.estimate, INK[outcome(point)]
    ax.plot([0, 100], [i, i], color="#e2dfd6", linewidth=0.6, zorder=1)
    if span := zone(point):
        low, high = 100 * span[0] - 5 * (span[0] == 0), 100 * span[1] + 5 * (span[1] == 1)
        ax.fill_between([low, high], i - 0.4, i + 0.4, color="#e0f1e5", linewidth=0, zorder=0)
    if point.line is not None:
        style = ":" if point.bound == "chance" else "--"
        ax.plot([100 * point.line] * 2, [i - 0.42, i + 0.42], style, color="#565d69", linewidth=0.8, zorder=2)
    low, high = (100 * min(1.06, max(-0.05, end)) for end in (e.low, e.high))
    ax.plot([low, high], [i, i], color=ink, linewidth=2.0, alpha=0.55 * alpha, solid_capstyle="round", zorder=3)
    ax.plot([100 * min(1.06, max(-0.05, e.value))], [i], "o", color=ink, markersize=3.6, alpha=alpha, zorder=4)
    ax.text(109, i, f"{whole_percent(e.value)} %", fontsize=6.5, color="#3d4654", va="center", clip_on=False)
    if note := strip.note(model):
        middle = 100 * free(point)
        ax.text(middle, i, note, fontsize=5.5, color="#767d88", ha="center", va="center", zorder=5, bbox=PAPER)
