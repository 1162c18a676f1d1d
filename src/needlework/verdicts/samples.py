"""How many samples a rule needs to decide: the smallest n at which a claim that is true comes out as supported nine times in ten.

Computed from the very intervals that the rules read, with exact binomial probabilities. Where a rule asks several things, each
gets its share of what may go wrong, so that the number holds however they depend on each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile

from needlework.stats import binomial, changed_pairs, percent, wilson

POWER = 0.9
CHANCE = 0.25  # of a choice among the values of four needles
TRULY_KEPT = 0.99  # a share of retrieval that is whole
TRUE_BASELINE = 0.99  # of a model that is worth testing; right answers fall on samples independently with and without heads
TRULY_MOST = 0.9
MOST = 5000  # samples: beyond that no number is given


@dataclass(frozen=True)
class Needs:
    """The samples that a rule needs of each of its conditions, and what is assumed to be true. 0: not computed."""

    assumed: str
    of_chance: Callable[[float], int]  # chance of the forced choice -> n

    def __call__(self, chance: float = CHANCE) -> int:
        return self.of_chance(chance)

    def text(self) -> str:
        n = self()
        return f"{n} ({self.assumed})" if n else self.assumed


def needed(power: Callable[[int], float], least: float = POWER) -> int:
    """The smallest n whose power is at least `least`; 0 if there is none up to 5,000."""
    return next((n for n in range(1, MOST + 1) if power(n) >= least), 0)


def _each(times: int) -> float:
    """The power that each of several questions needs for all of them together."""
    return 1 - (1 - POWER) / times


def at_chance(margin: float, times: int = 1) -> Needs:
    """Forced choice is surely not above chance by more than `margin`, while truth is chance."""

    @lru_cache
    def n(chance: float) -> int:
        def power(n: int) -> float:
            enough = takewhile(lambda hits: wilson(hits, n).high <= chance + margin, range(n + 1))
            return sum(binomial(hits, n, chance) for hits in enough)

        return needed(power, _each(times)) if chance + margin < 1 else 0

    twice = f", {times} times" if times > 1 else ""
    return Needs(f"truth is chance, {percent(CHANCE)}{twice}", n)


def whole(line: float, times: int = 1) -> Needs:
    """A paired retained share is surely at least `line`, while 99 % are retained."""

    def power(n: int) -> float:
        right = round(TRUE_BASELINE * n)
        wrong, still_right = n - right, TRULY_KEPT * TRUE_BASELINE
        total = 0.0
        for gained in range(wrong + 1):
            sure = (changed_pairs(lost, right, gained, wrong)[0] >= line for lost in range(right + 1))
            enough = (lost for lost, _ in enumerate(takewhile(bool, sure)))
            total += binomial(gained, wrong, still_right) * sum(binomial(lost, right, 1 - still_right) for lost in enough)
        return total

    @lru_cache
    def n(_: float) -> int:
        return needed(power, _each(times))

    twice = f", {times} times" if times > 1 else ""
    return Needs(f"truth is {percent(TRULY_KEPT)} retained of {percent(TRUE_BASELINE)}{twice}", n)


@lru_cache
def none_of(line: float) -> int:
    """From which n on 0 of n has an upper bound of at most `line`."""
    return needed(lambda n: float(wilson(0, n).high <= line))


def nothing_left(line: float) -> Needs:
    return Needs("truth is 0 %", lambda _: none_of(line))


def most(line: float) -> Needs:
    """A share is surely at least `line`, while truth is 90 %."""

    def power(n: int) -> float:
        return sum(binomial(hits, n, TRULY_MOST) for hits in range(n + 1) if wilson(hits, n).low >= line)

    return Needs(f"truth is {percent(TRULY_MOST)}", lambda _: needed(power))


def not_computed() -> Needs:
    return Needs("not computed: it depends on four shares", lambda _: 0)
