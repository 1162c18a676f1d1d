"""Estimates with 95 % intervals: Wilson for accuracies, paired cluster bootstraps for the retained share of a baseline.

Everything is seeded and vectorised. Clusters with the same sums are one kind, and a resample draws counts of kinds from a
multinomial: the same distribution as drawing clusters one by one, at a fraction of the cost.

If nothing or everything is lost, all resamples are equal and a bootstrap interval has width 0. So in `retained` and `gain` it is
never narrower than Wilson's interval of the pairs that changed, combined by Zou and Donner's square-and-add rule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

Z95 = 1.959963984540054
DRAWS = 4000
SEED = 20251019


@dataclass(frozen=True)
class Estimate:
    """A value, its 95 % interval and the number of trials."""

    value: float
    low: float
    high: float
    n: int
    why: str = ""  # why there is no value, or no interval

    def text(self, unit: str = "%") -> str:
        """Format as `97 % [92, 99], n = 75`; with unit="" as plain numbers."""
        if self.n == 0:
            return self.why or "no trials"
        if math.isnan(self.value):
            return f"{self.why or 'no value'}, n = {self.n:,}"
        value = percent(self.value) if unit == "%" else number(self.value)
        if self.why:
            return f"{value} ({self.why}), n = {self.n:,}"
        if math.isnan(self.low) and math.isnan(self.high):
            return f"{value}, n = {self.n:,}"
        low, high = (percent(end, "") if unit == "%" else number(end) for end in (self.low, self.high))
        return f"{value} [{low}, {high}], n = {self.n:,}"

    def to_dict(self) -> dict[str, float | int | None]:
        """Return value, low, high and n for JSON, with None for infinity and NaN."""
        numbers = {"value": self.value, "low": self.low, "high": self.high}
        return {**{name: float(x) if math.isfinite(x) else None for name, x in numbers.items()}, "n": self.n}


NOTHING = Estimate(math.nan, math.nan, math.nan, 0)
ONE_PAIR = "one pair: no interval"
ONE_HAYSTACK = "one haystack: no interval over haystacks"


def percent(share: float, unit: str = " %") -> str:
    """Format a share as a percentage with one decimal, or none if it is 0."""
    value = 100 * share
    if not math.isfinite(value):
        return "–" if math.isnan(value) else "-∞" if value < 0 else "∞"
    return f"{value:.1f}".removesuffix(".0").replace("-0", "0" if abs(value) < 0.05 else "-0") + unit


def whole_percent(share: float) -> str:
    """Format a share as a whole percentage, for small spaces; with a decimal where it would round to 0 or 100."""
    value = 100 * share
    edge = (0 < value < 0.5) or (99.5 < value < 100)
    return percent(share, "") if edge or not math.isfinite(value) else f"{value:.0f}"


def number(value: float) -> str:
    """Format a number with three significant digits, or as an integer from 1,000 on."""
    if not math.isfinite(value):
        return "–" if math.isnan(value) else "-∞" if value < 0 else "∞"
    value = value or 0.0  # avoids -0
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def wilson(hits: float, n: int, z: float = Z95) -> Estimate:
    """Return the share hits / n with Wilson's score interval; its bounds are exactly 0 at 0 hits and 1 at n hits."""
    if n <= 0:
        return NOTHING
    share = hits / n
    spread = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    middle, scale = share + z * z / (2 * n), 1 + z * z / n
    low = 0.0 if hits <= 0 else max(0.0, (middle - spread) / scale)
    high = 1.0 if hits >= n else min(1.0, (middle + spread) / scale)
    return Estimate(share, low, high, n)


def accuracy(correct: ArrayLike) -> Estimate:
    """Return the mean of zeros and ones with Wilson's interval; NaN values are left out."""
    values = np.asarray(correct, dtype=np.float64)
    values = values[~np.isnan(values)]
    return wilson(float(values.sum()), len(values))


def difference(a: Estimate, b: Estimate) -> Estimate:
    """Return a - b of two independent shares, with Newcombe's square-and-add interval."""
    value = a.value - b.value
    low = value - math.hypot(a.value - a.low, b.high - b.value)
    return Estimate(value, low, value + math.hypot(a.high - a.value, b.value - b.low), min(a.n, b.n))


def cluster_sums(clusters: ArrayLike, columns: Sequence[ArrayLike]) -> Floats:
    """Return the sums of each column per cluster, and the cluster's size last: [clusters, columns + 1]."""
    _, code = np.unique(np.asarray(clusters), return_inverse=True)
    filled = [np.asarray(column, dtype=np.float64) for column in columns]
    sums = [np.bincount(code, weights=column) for column in [*filled, np.ones(len(code))]]
    return np.stack(sums, axis=1)


def resample(sums: Floats, draws: int = DRAWS, seed: int = SEED) -> Floats:
    """Return the column totals of `draws` bootstrap resamples of clusters [clusters, columns]: [draws, columns]."""
    kinds, counts = np.unique(sums, axis=0, return_counts=True)
    chosen = np.random.default_rng(seed).multinomial(len(sums), counts / len(sums), size=draws)
    return np.asarray(chosen @ kinds, dtype=np.float64)


def bootstrap_mean(values: Floats, clusters: ArrayLike) -> Estimate:
    """Estimate the mean of values [samples] with a cluster bootstrap; the width is 0 where all resamples are equal."""
    totals = resample(cluster_sums(clusters, [values]))
    return Estimate(float(values.mean()), *interval(totals[:, 0] / totals[:, 1]), len(values))


def bootstrap_ratio(above: ArrayLike, below: ArrayLike, clusters: ArrayLike) -> Estimate:
    """Estimate the ratio of two sums over the same samples with a cluster bootstrap; a single cluster gives no interval."""
    sums = cluster_sums(clusters, [above, below])
    total, n = sums.sum(axis=0), len(np.asarray(above))
    value = float(total[0] / total[1])
    if len(sums) == 1:
        return Estimate(value, -math.inf, math.inf, n, ONE_PAIR if n == 1 else ONE_HAYSTACK)
    draws = resample(sums)
    ratios = np.where(draws[:, 1] > 0, draws[:, 0] / np.where(draws[:, 1] > 0, draws[:, 1], 1), np.inf)
    return Estimate(value, *interval(ratios), n)


def retained(after: ArrayLike, before: ArrayLike, clusters: ArrayLike, chance: float = 0.0, seed: int = SEED) -> Estimate:
    """Return the retained share of the baseline, (after - chance) / (before - chance), with a paired cluster bootstrap.

    Args:
        after, before, clusters: [samples], in the same order. Several samples of a single cluster give no interval.
        chance: Accuracy by chance; 0 gives the raw share.
    """
    a, b = np.asarray(after, dtype=np.float64), np.asarray(before, dtype=np.float64)
    n = len(a)
    if n == 0:
        return NOTHING
    if b.mean() <= chance:
        at = f", chance {percent(chance)}" if chance else ""
        return Estimate(math.nan, math.nan, math.nan, n, f"baseline {percent(float(b.mean()))}{at}: nothing to retain")
    value = float((a.mean() - chance) / (b.mean() - chance))

    sums = cluster_sums(clusters, [a, b])
    totals = resample(sums, seed=seed)
    above, below = totals[:, 0] - chance * totals[:, 2], totals[:, 1] - chance * totals[:, 2]
    shares = np.where(below > 0, above / np.where(below > 0, below, 1), np.inf)
    return _paired(a, b, sums, shares, value, n * (float(b.mean()) - chance))


def gain(after: ArrayLike, before: ArrayLike, clusters: ArrayLike, seed: int = SEED) -> Estimate:
    """Return the mean of after - before of the same samples, with a paired cluster bootstrap."""
    a, b = np.asarray(after, dtype=np.float64), np.asarray(before, dtype=np.float64)
    if len(a) == 0:
        return NOTHING
    sums = cluster_sums(clusters, [a, b])
    totals = resample(sums, seed=seed)
    return _paired(a, b, sums, (totals[:, 0] - totals[:, 1]) / totals[:, 2], float(a.mean() - b.mean()), len(a))


def _paired(after: Floats, before: Floats, sums: Floats, draws: Floats, value: float, scale: float) -> Estimate:
    """Return a value with the interval of its draws, never narrower than Wilson's intervals of the pairs that changed.

    Args:
        sums: [clusters, columns]; with a single cluster, the variance between clusters is unknown.
        scale: What a count of right answers is divided by in the value.
    """
    n, right = len(after), int(before.sum())
    if len(sums) == 1 < n:
        return Estimate(value, -math.inf, math.inf, n, ONE_HAYSTACK)
    low, high = interval(draws)
    lost, gained = float(np.sum(before * (1 - after))), float(np.sum(after * (1 - before)))
    down, up = _spread(lost, right, gained, n - right)
    return Estimate(value, min(low, value - down / scale), max(high, value + up / scale), n)


def changed_pairs(lost: float, right: int, gained: float, wrong: int) -> tuple[float, float]:
    """Return bounds of the retained share if `lost` of the `right` baseline answers and `gained` of the `wrong` ones changed."""
    down, up = _spread(lost, right, gained, wrong)
    value = (right - lost + gained) / right if right else math.nan
    return value - down / max(right, 1), value + up / max(right, 1)


def _spread(lost: float, right: int, gained: float, wrong: int) -> tuple[float, float]:
    """Return how far the count of right answers may lie below and above its value.

    Combines Wilson's intervals of lost (of `right`) and gained (of `wrong`) pairs by square-and-add.
    """
    out = wilson(lost, right) if right else Estimate(0.0, 0.0, 0.0, 0)
    back = wilson(gained, wrong) if wrong else Estimate(0.0, 0.0, 0.0, 0)
    down = math.hypot((out.high - out.value) * right, (back.value - back.low) * wrong)
    up = math.hypot((out.value - out.low) * right, (back.high - back.value) * wrong)
    return down, up


def interval(draws: Floats) -> tuple[float, float]:
    """Return the 2.5 % and 97.5 % quantiles of bootstrap draws."""
    low, high = np.quantile(draws, [0.025, 0.975], method="inverted_cdf")
    return float(low), float(high)


@dataclass(frozen=True)
class Side:
    """Scores [samples] of one ability: baseline, attention ablated, and recurrent mixers ablated."""

    base: Floats
    attention_off: Floats
    recurrent_off: Floats
    clusters: NDArray[Any]
    chance: float = 0.0


@dataclass(frozen=True)
class Interaction:
    """The difference between ablating attention and recurrence, for each ability, and their sum (the contrast)."""

    contrast: Estimate
    retrieval_gap: Estimate  # retrieval retained with recurrence ablated minus with attention ablated
    knowledge_gap: Estimate  # knowledge retained with attention ablated minus with recurrence ablated

    @property
    def crossed(self) -> bool:
        """Whether both gaps are above 0 with their intervals: a double dissociation in the strict sense."""
        return self.retrieval_gap.low > 0 and self.knowledge_gap.low > 0


def interaction(retrieval: Side, knowledge: Side, seed: int = SEED) -> Interaction:
    """Estimate the interaction (attention or recurrence ablated) x (retrieval, knowledge) of chance-corrected retained shares.

    Positive: ablating attention costs retrieval more than knowledge, compared with ablating recurrence.
    """
    first, first_draws, first_guard = _gap(retrieval, seed, attention_first=False)
    second, second_draws, second_guard = _gap(knowledge, seed + 1, attention_first=True)
    n = min(len(retrieval.base), len(knowledge.base))
    value, guard = first + second, math.hypot(first_guard, second_guard)
    alone = [len(np.unique(side.clusters)) == 1 < len(side.base) for side in (retrieval, knowledge)]
    return Interaction(
        _widened(value, first_draws + second_draws, guard, n, any(alone)),
        _widened(first, first_draws, first_guard, len(retrieval.base), alone[0]),
        _widened(second, second_draws, second_guard, len(knowledge.base), alone[1]),
    )


def _gap(side: Side, seed: int, attention_first: bool) -> tuple[float, Floats, float]:
    """Return the difference of retained shares between both ablations, its bootstrap draws, and a Wilson half-width."""
    columns = [np.asarray(c, dtype=np.float64) for c in (side.base, side.attention_off, side.recurrent_off)]
    sums = cluster_sums(side.clusters, columns)
    sign = 1.0 if attention_first else -1.0

    def contrast(totals: Any) -> Any:
        room = totals[..., 0] - side.chance * totals[..., 3]
        return sign * (totals[..., 1] - totals[..., 2]) / np.where(room > 0, room, np.nan)

    n, room = len(columns[0]), float(columns[0].mean()) - side.chance
    spreads = [wilson(float(column.sum()), n) for column in columns[1:]]
    guard = math.hypot(*((s.high - s.low) / 2 for s in spreads)) / room if room > 0 else math.nan
    draws = np.nan_to_num(contrast(resample(sums, seed=seed)), nan=0.0)
    return float(contrast(sums.sum(axis=0))), draws, guard


def _widened(value: float, draws: Floats, guard: float, n: int, one_cluster: bool) -> Estimate:
    """Return the bootstrap interval; if all draws are equal, an interval of half-width `guard` (from Wilson) instead."""
    if one_cluster:
        return Estimate(value, -math.inf, math.inf, n, ONE_HAYSTACK)
    low, high = interval(draws)
    if high - low < 1e-9:
        low, high = value - guard, value + guard
    return Estimate(value, low, high, n)


def perplexity(nll: ArrayLike, tokens: ArrayLike, clusters: ArrayLike, seed: int = SEED) -> Estimate:
    """Return exp of the mean negative log-likelihood per token, with a cluster bootstrap.

    Args:
        nll: [samples] sums over each sample's tokens.
        tokens: [samples] number of tokens.
        clusters: [samples] a single cluster gives an interval of width 0.
    """
    total, count = np.asarray(nll, dtype=np.float64), np.asarray(tokens, dtype=np.float64)
    if len(total) == 0 or count.sum() <= 0:
        return NOTHING
    sums = cluster_sums(clusters, [total, count])
    totals = resample(sums, seed=seed) if len(sums) > 1 else sums[:1]
    low, high = interval(np.exp(totals[:, 0] / np.maximum(totals[:, 1], 1)))
    return Estimate(float(np.exp(total.sum() / count.sum())), low, high, len(total))
