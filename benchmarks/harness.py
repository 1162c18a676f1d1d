"""What benchmarks share: outputs are checked for equality before anything is timed, then the ways take turns."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

Way = Callable[[], tuple[Any, float]]  # does the work once and returns its output and the seconds that it took


def timed(action: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> tuple[Any, float]:
    """Return an action's result and its seconds. `time.process_time` leaves out what other processes do meanwhile."""
    start = clock()
    result = action()
    return result, clock() - start


def timed_ways(actions: Mapping[str, Callable[[], Any]], clock: Callable[[], float] = time.process_time) -> dict[str, Way]:
    """Return the actions as ways that are timed by this clock."""
    return {name: partial(timed, action, clock) for name, action in actions.items()}


@dataclass(frozen=True)
class Timings:
    """Seconds of each way in each round."""

    seconds: dict[str, list[float]]

    def median(self, way: str) -> float:
        return median(self.seconds[way])

    def best(self, way: str) -> float:
        """Return the shortest time: other work on the machine only adds to it."""
        return min(self.seconds[way])

    def ratio(self, way: str, base: str) -> float:
        """Return how many times as long as `base` a way takes: the median of the rounds' ratios."""
        return median(one / other for one, other in zip(self.seconds[way], self.seconds[base], strict=True))


def compare(
    ways: Mapping[str, Way],
    rounds: int,
    what: str,
    same: Callable[[Any, Any], bool] = operator.eq,
    warm_up: Mapping[str, Way] | None = None,
) -> Timings:
    """Check that all ways give the same output, then time them in rounds of alternating order.

    Args:
        ways: What is compared.
        rounds: How often each way is timed.
        what: What is compared, for the message if outputs differ.
        same: Whether two outputs are equal.
        warm_up: A smaller piece of the same work for the first check, which is not timed. By default the work itself.

    Raises:
        SystemExit: The outputs differ, so that there is nothing to compare.
    """
    _check_equal({name: way()[0] for name, way in (warm_up or ways).items()}, what, same)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds):
        outputs = {}
        for name in sorted(ways, reverse=turn % 2 == 1):
            outputs[name], spent = ways[name]()
            seconds[name].append(spent)
        _check_equal(outputs, what, same)
    return Timings(seconds)


def _check_equal(outputs: Mapping[str, Any], what: str, same: Callable[[Any, Any], bool]) -> None:
    first, *others = outputs
    if different := [name for name in others if not same(outputs[first], outputs[name])]:
        raise SystemExit(f"{what}: {', '.join(different)} and {first} give different outputs; there is nothing to compare")


def report_goals(missed: Sequence[str]) -> int:
    """Print which goals were missed and return the exit code."""
    print("missed: " + "; ".join(missed) if missed else "all goals reached", flush=True)
    return int(bool(missed))
