"""Sample sizes for the rules: the smallest n from which on a true claim is supported with a power of 90 %.

Power is a saw-tooth function of n because hits are integers, so an n counts only if every larger one suffices, too. It is
computed with exact binomial probabilities from the same intervals that the rules use. If a rule has several conditions,
the error of 10 % is divided among them (Bonferroni), so that the result holds whatever their dependence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile

from scipy.special import bdtr

from needlework.stats import changed_pairs, percent, wilson

POWER = 0.9
CHANCE = 0.25  # forced choice among the values of four needles
TRULY_KEPT = 0.99  # assumed true retained share
TRUE_BASELINE = 0.99  # assumed true baseline; correct answers with and without intervention are taken as independent
TRULY_MOST = 0.9  # assumed true share in `most`
MOST = 5000  # largest first n that is searched


@dataclass(frozen=True)
class Needs:
    """Number of samples that a rule needs per condition (0: not computed), with the assumed true values."""

    assumed: str
    of_chance: Callable[[float], int]  # chance level of the forced choice -> n

    def __call__(self, chance: float = CHANCE) -> int:
        return self.of_chance(chance)

    def text(self) -> str:
        n = self()
        return f"{n} ({self.assumed})" if n else self.assumed


def needed(power: Callable[[int], float], least: float = POWER) -> int:
    """Return the smallest n from which on the power is at least `least`; 0 if there is none up to 5,000.

    The saw-tooth flattens and rises with n, so it is searched only up to twice the first n that suffices, plus 100.
    """
    first = next((n for n in range(1, MOST + 1) if power(n) >= least), 0)
    too_few = (n for n in range(2 * first + 100, first, -1) if power(n) < least)
    return next(too_few, first - 1) + 1 if first else 0


def _at_most(hits: int, n: int, share: float) -> float:
    """Return the binomial probability of at most `hits` hits of n."""
    return float(bdtr(hits, n, share)) if hits >= 0 else 0.0


def _each(times: int) -> float:
    """Return the power that each of several conditions needs so that all hold with POWER."""
    return 1 - (1 - POWER) / times


def at_chance(margin: float, times: int = 1) -> Needs:
    """Return the n needed to bound forced choice by chance + `margin` if its true accuracy is chance."""

    @lru_cache
    def n(chance: float) -> int:
        def power(n: int) -> float:
            enough = takewhile(lambda hits: wilson(hits, n).high <= chance + margin, range(n + 1))
            return _at_most(sum(1 for _ in enough) - 1, n, chance)

        return needed(power, _each(times)) if chance + margin < 1 else 0

    twice = f", {times} times" if times > 1 else ""
    return Needs(f"truth is chance, {percent(CHANCE)}{twice}", n)


def whole(line: float, times: int = 1) -> Needs:
    """Return the n needed for a lower bound of a paired retained share of at least `line` if 99 % are retained."""

    def power(n: int) -> float:
        right = round(TRUE_BASELINE * n)
        wrong, still_right = n - right, TRULY_KEPT * TRUE_BASELINE
        total = 0.0
        for gained in range(wrong + 1):
            sure = (changed_pairs(lost, right, gained, wrong)[0] >= line for lost in range(right + 1))
            most_lost = sum(1 for _ in takewhile(bool, sure)) - 1
            of_gained = _at_most(gained, wrong, still_right) - _at_most(gained - 1, wrong, still_right)
            total += of_gained * _at_most(most_lost, right, 1 - still_right)
        return total

    @lru_cache
    def n(_: float) -> int:
        return needed(power, _each(times))

    twice = f", {times} times" if times > 1 else ""
    return Needs(f"truth is {percent(TRULY_KEPT)} retained of {percent(TRUE_BASELINE)}{twice}", n)


@lru_cache
def none_of(line: float) -> int:
    """Return the smallest n from which on 0 hits of n have an upper bound of at most `line`."""
    return needed(lambda n: float(wilson(0, n).high <= line))


def most(line: float) -> Needs:
    """Return the n needed for a lower bound of a share of at least `line` if the true share is 90 %."""

    def power(n: int) -> float:
        least = next((hits for hits in range(n + 1) if wilson(hits, n).low >= line), n + 1)
        return 1 - _at_most(least - 1, n, TRULY_MOST)

    return Needs(f"truth is {percent(TRULY_MOST)}", lambda _: needed(power))
