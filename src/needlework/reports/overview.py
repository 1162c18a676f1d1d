"""The overview of a report: a table of claims by models, each verdict with a small figure of its numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from needlework.analysis.frame import Frame, made_of
from needlework.analysis.verdicts import RULES, Rule, Verdict, VerdictPoint, Word, side

JUDGED: tuple[Word, ...] = ("supported", "not supported", "inconclusive")
UNJUDGED: tuple[Word, ...] = ("not run", "does not apply")  # nothing was measured, so nothing is drawn
PLAN_OF_CLAIM = {  # the shipped plan that runs the trials of each claim
    "segregation": "01",
    "few_heads": "02",
    "no_rescue": "03",
    "exposure": "04",
    "context": "09",
    "double_dissociation": "07",
    "memory": "11",
}
_COUNT = re.compile(r"\b\d+ of \d+ heads\b")


@dataclass(frozen=True)
class Strip:
    """One row of the small figures, shared by all models; numbers of heads may differ and are noted per model."""

    label: str
    points: dict[str, VerdictPoint]  # by model

    def note(self, model: str) -> str:
        """Return the number of heads in this model's label: `2 of 16`."""
        found = _COUNT.search(self.points[model].label) if model in self.points else None
        return found[0].removesuffix(" heads") if found else ""


@dataclass(frozen=True)
class Block:
    """One claim: the verdict on each model, and the rows of their small figures."""

    rule: Rule
    verdicts: dict[str, Verdict]  # by model
    strips: Sequence[Strip]


@dataclass(frozen=True)
class Overview:
    """All claims by all models."""

    models: dict[str, str]  # label -> composition: hybrid, attention only, recurrent only
    blocks: Sequence[Block]
    not_run: Sequence[Rule]  # claims without trials

    def is_outside_all_claims(self, model: str) -> bool:
        """Return whether no claim applies to this model: it is a control."""
        return bool(self.blocks) and all(block.verdicts[model].word == "does not apply" for block in self.blocks)


def overview(frame: Frame, verdicts: Sequence[Verdict]) -> Overview:
    """Arrange verdicts by claim and model."""
    blocks, not_run = [], []
    for rule in RULES:
        judged = {v.model: v for v in verdicts if v.claim == rule.claim}
        if any(v.word not in UNJUDGED for v in judged.values()):
            blocks.append(Block(rule, judged, _strips(judged)))
        elif any(v.word == "not run" for v in judged.values()):
            not_run.append(rule)
    return Overview({model: made_of(frame.anatomy(model)) for model in frame.models}, blocks, not_run)


def _strips(judged: dict[str, Verdict]) -> list[Strip]:
    """Return the rows of all models; labels that differ only in the number of heads share a row."""
    by_label: dict[str, dict[str, VerdictPoint]] = {}
    for model, verdict in judged.items():
        for point in verdict.points:
            by_label.setdefault(_COUNT.sub("few heads", point.label), {})[model] = point
    return [Strip(label, points) for label, points in by_label.items()]


def zone(point: VerdictPoint) -> tuple[float, float] | None:
    """Return the range of shares in which the claim expects the interval; None without a threshold."""
    if point.line is None or point.bound in ("", "chance"):
        return None
    return (point.line, 1.0) if point.bound == "at least" else (0.0, point.line)


def outcome(point: VerdictPoint) -> str:
    """Compare an interval to its threshold: `yes`, `no` or `maybe`; `plain` without a threshold."""
    if point.line is None or point.bound in ("", "chance"):
        return "plain"
    words = {"supported": "yes", "not supported": "no"}
    return words.get(side(point.estimate, point.line, point.bound), "maybe")


def label_position(point: VerdictPoint) -> float:
    """Return the x position of a label that does not cover the interval: halfway to the farther end of the axis."""
    low, high = max(0.0, point.estimate.low), min(1.0, point.estimate.high)
    return (high + 0.95) / 2 if high + low < 1 else low / 2


def run_command(rule: Rule) -> str:
    """Return the command that runs the trials of a claim."""
    return f"needlework run {PLAN_OF_CLAIM[rule.claim]} --model MODEL --out DIR"
