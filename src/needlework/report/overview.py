"""The finding as a picture: claims below each other, models side by side, each verdict with the numbers that decided it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from needlework.report.captions import PLAN_OF_CLAIM
from needlework.report.frame import Frame
from needlework.verdicts import RULES, Point, Rule, Verdict, Word
from needlework.verdicts.words import side

JUDGED: tuple[Word, ...] = ("supported", "not supported", "inconclusive")
UNJUDGED: tuple[Word, ...] = ("not run", "does not apply")  # nothing was measured, so there is nothing to draw or to explain
_COUNT = re.compile(r"\b\d+ of \d+ heads\b")


@dataclass(frozen=True)
class Strip:
    """One line of a small figure. Models that keep other numbers of heads share a line, and each says its own number."""

    label: str
    points: dict[str, Point]  # by model

    def note(self, model: str) -> str:
        """What this model's own label says more than the line's: `2 of 16`."""
        found = _COUNT.search(self.points[model].label) if model in self.points else None
        return found[0].removesuffix(" heads") if found else ""


@dataclass(frozen=True)
class Block:
    """One claim: a verdict for each model, and the lines that their small figures share."""

    rule: Rule
    verdicts: dict[str, Verdict]  # by model
    strips: Sequence[Strip]


@dataclass(frozen=True)
class Overview:
    models: dict[str, str]  # label -> what it is: hybrid, attention only, recurrent only
    blocks: Sequence[Block]
    not_run: Sequence[Rule]  # claims that no model here was asked about

    def outside(self, model: str) -> bool:
        """No claim is about such a model: it is a control of the others."""
        return bool(self.blocks) and all(block.verdicts[model].word == "does not apply" for block in self.blocks)


def overview(frame: Frame, verdicts: Sequence[Verdict]) -> Overview:
    blocks, not_run = [], []
    for rule in RULES:
        judged = {v.model: v for v in verdicts if v.claim == rule.claim}
        if any(v.word not in UNJUDGED for v in judged.values()):
            blocks.append(Block(rule, judged, _strips(judged)))
        elif any(v.word == "not run" for v in judged.values()):
            not_run.append(rule)
    return Overview({model: frame.made_of(model) for model in frame.models}, blocks, not_run)


def _strips(judged: dict[str, Verdict]) -> list[Strip]:
    """The lines of all models in one order; those of one label, numbers of heads aside, are one line."""
    by_label: dict[str, dict[str, Point]] = {}
    for model, verdict in judged.items():
        for point in verdict.points:
            by_label.setdefault(_COUNT.sub("few heads", point.label), {})[model] = point
    return [Strip(label, points) for label, points in by_label.items()]


def zone(point: Point) -> tuple[float, float] | None:
    """Where the claim has the interval: from one share to another."""
    if point.line is None or point.bound in ("", "chance"):
        return None
    return (point.line, 1.0) if point.bound == "at least" else (0.0, point.line)


def outcome(point: Point) -> str:
    """`yes`, `no` or `maybe` of a number that is held against a line, as its interval lies; else `plain`."""
    if point.line is None or point.bound in ("", "chance"):
        return "plain"
    words = {"supported": "yes", "not supported": "no"}
    return words.get(side(point.estimate, point.line, point.bound), "maybe")


def free(point: Point) -> float:
    """Where on the strip of a number there is room for a word: between its interval and the farther end."""
    e = point.estimate
    return (e.high + 0.95) / 2 if e.high + e.low < 1 else e.low / 2


def command(rule: Rule) -> str:
    """What to run for the trials of a claim."""
    return f"needlework run {PLAN_OF_CLAIM[rule.claim]} --model MODEL --out DIR"
