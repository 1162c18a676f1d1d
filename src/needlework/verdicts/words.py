"""What a verdict is, and how an interval is held against a line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from needlework.stats import NOTHING, Estimate, percent

Word = Literal["supported", "not supported", "inconclusive", "not testable", "not run", "does not apply"]
Bound = Literal["at most", "below", "at least", "chance", ""]


@dataclass(frozen=True)
class Point:
    """One number of a verdict's small figure: a share from 0 to 1, and the line that it is held against, if any."""

    label: str
    estimate: Estimate
    line: float | None = None
    bound: Bound = ""  # on which side of the line the claim has it; "chance": the line is what guessing reaches
    judged: bool = True  # the rule reads it; else it stands beside the verdict


@dataclass(frozen=True)
class Verdict:
    """What the evidence of one model says of one claim."""

    claim: str
    title: str
    model: str
    word: Word
    sentence: str
    estimate: Estimate  # the number that decided, with n and interval
    number: int = 0  # of the rule
    why: str = ""  # why it fell as it did: one clause that begins with the rule's number
    points: tuple[Point, ...] = ()  # for a small figure; empty if nothing was judged


@dataclass(frozen=True)
class Clause:
    """One thing that a rule asks, and how it came out."""

    word: Word
    text: str


@dataclass(frozen=True)
class Finding:
    """What a rule makes of the evidence, before it is known whether the untouched model retrieves at all."""

    word: Word
    why: str
    sentence: str
    estimate: Estimate = NOTHING
    points: tuple[Point, ...] = ()


def side(estimate: Estimate, line: float, bound: Bound) -> Word:
    """Where the interval lies: wholly on the claim's side of the line, wholly on the other, or across it."""
    if estimate.n == 0 or estimate.value != estimate.value:
        return "inconclusive"
    low, high = estimate.low, estimate.high
    if bound == "at least":
        return "supported" if low >= line else "not supported" if high < line else "inconclusive"
    if bound == "below":
        return "supported" if high < line else "not supported" if low >= line else "inconclusive"
    return "supported" if high <= line else "not supported" if low > line else "inconclusive"


def held(estimate: Estimate, line: float, bound: Bound, what: str) -> Clause:
    """`no heads find 0 % [0, 1.2; n = 315], at most 5 % allowed`"""
    allowed = "needed" if bound == "at least" else "allowed"
    return Clause(side(estimate, line, bound), f"{what} {share(estimate)}, {bound} {percent(line)} {allowed}")


def share(e: Estimate) -> str:
    """`98.5 % [91.2, 100; n = 68]`"""
    if e.why or e.value != e.value:
        return f"no known share ({e.why or 'not measured'}; n = {e.n:,})"
    return f"{percent(e.value)} [{percent(e.low, '')}, {percent(e.high, '')}; n = {e.n:,}]"


def share_of(e: Estimate, what: str) -> str:
    """`98.5 % of the needles [91.2, 100; n = 68]`"""
    if e.why:
        return f"no known share of {what} ({e.why}; n = {e.n:,})"
    return f"{percent(e.value)} of {what} [{percent(e.low, '')}, {percent(e.high, '')}; n = {e.n:,}]"


def worst(clauses: Sequence[Clause]) -> Word:
    order: tuple[Word, ...] = ("not supported", "inconclusive", "supported")
    return min((clause.word for clause in clauses), key=order.index)


def because(clauses: Sequence[Clause]) -> str:
    """What decided: the clauses that came out as the verdict did."""
    return "; ".join(clause.text for clause in clauses if clause.word == worst(clauses))


def points(*given: Point) -> tuple[Point, ...]:
    """Those that have a number."""
    return tuple(point for point in given if point.estimate.n and point.estimate.value == point.estimate.value)
