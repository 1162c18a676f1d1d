"""Shares with their intervals: Wilson for one accuracy, paired cluster bootstraps for what is left of a baseline.

Everything is seeded and vectorised. A resample of clusters is drawn as counts of *kinds* of clusters (those with the same
sums are one kind): the same distribution as drawing clusters one by one, at a small part of the cost.

At the edge (nothing lost, or everything) every resample is alike and a bootstrap would claim certainty. So a bootstrap
interval is never narrower than Wilson's for the pairs that changed, put together by Zou and Donner's square-and-add rule.
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
    """A number, its 95 % interval and how many trials it stands on."""

    value: float
    low: float
    high: float
    n: int
    why: str = ""  # there is no value

    def text(self, unit: str = "%") -> str:
        """`97 % [92, 99], n = 75`; with unit="" plain numbers."""
        if self.n == 0:
            return self.why or "no trials"
        if math.isnan(self.value):
            return f"{self.why or 'no value'}, n = {self.n:,}"
        if unit == "%":
            return f"{percent(self.value)} [{percent(self.low, '')}, {percent(self.high, '')}], n = {self.n:,}"
        return f"{number(self.value)} [{number(self.low)}, {number(self.high)}], n = {self.n:,}"


NOTHING = Estimate(math.nan, math.nan, math.nan, 0)


def percent(share: float, unit: str = " %") -> str:
    """With one digit, as a bound of 5 % needs; whole numbers without."""
    value = 100 * share
    if not math.isfinite(value):
        return "–" if math.isnan(value) else "∞"
    return f"{value:.1f}".removesuffix(".0").replace("-0", "0" if abs(value) < 0.05 else "-0") + unit


def whole_percent(share: float) -> str:
    """For small spaces: whole percents, but never 0 or 100 for what is neither."""
    value = 100 * share
    edge = (0 < value < 0.5) or (99.5 < value < 100)
    return percent(share, "") if edge or not math.isfinite(value) else f"{value:.0f}"


def number(value: float) -> str:
    if not math.isfinite(value):
        return "–" if math.isnan(value) else "∞"
    value = value or 0.0  # no minus before a zero
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def wilson(hits: float, n: int, z: float = Z95) -> Estimate:
    """Wilson's score interval of `hits` of `n`; exactly 0 and 1 at the edges."""
    if n <= 0:
        return NOTHING
    share = hits / n
    spread = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    middle, scale = share + z * z / (2 * n), 1 + z * z / n
    low = 0.0 if hits <= 0 else max(0.0, (middle - spread) / scale)
    high = 1.0 if hits >= n else min(1.0, (middle + spread) / scale)
    return Estimate(share, low, high, n)


def accuracy(correct: ArrayLike) -> Estimate:
    """Wilson's interval of the mean of zeros and ones; missing values are left out."""
    values = np.asarray(correct, dtype=np.float64)
    values = values[~np.isnan(values)]
    return wilson(float(values.sum()), len(values))


def binomial(hits: int, n: int, share: float) -> float:
    """The probability of so many hits of n."""
    if share in (0.0, 1.0):
        return float(hits == n * share)
    ways = math.lgamma(n + 1) - math.lgamma(hits + 1) - math.lgamma(n - hits + 1)
    return math.exp(ways + hits * math.log(share) + (n - hits) * math.log(1 - share))


def difference(a: Estimate, b: Estimate) -> Estimate:
    """a - b of two independent shares, Newcombe's square-and-add interval."""
    value = a.value - b.value
    low = value - math.hypot(a.value - a.low, b.high - b.value)
    return Estimate(value, low, value + math.hypot(a.high - a.value, b.value - b.low), min(a.n, b.n))


def cluster_sums(clusters: ArrayLike, columns: Sequence[ArrayLike]) -> Floats:
    """Sums of each column per cluster, and the cluster's size last: [clusters, columns + 1]."""
    _, code = np.unique(np.asarray(clusters), return_inverse=True)
    filled = [np.asarray(column, dtype=np.float64) for column in columns]
    sums = [np.bincount(code, weights=column) for column in [*filled, np.ones(len(code))]]
    return np.stack(sums, axis=1)


def resample(sums: Floats, draws: int = DRAWS, seed: int = SEED) -> Floats:
    """Totals of `draws` resamples of whole clusters: [draws, columns]."""
    kinds, counts = np.unique(sums, axis=0, return_counts=True)
    chosen = np.random.default_rng(seed).multinomial(len(sums), counts / len(sums), size=draws)
    return np.asarray(chosen @ kinds, dtype=np.float64)


def retained(after: ArrayLike, before: ArrayLike, clusters: ArrayLike, chance: float = 0.0, seed: int = SEED) -> Estimate:
    """The share of the baseline that is left, (after - chance) / (before - chance), with a paired cluster bootstrap.

    `after`, `before` and `clusters` run over the same samples. chance=0 gives the raw share.
    """
    a, b = np.asarray(after, dtype=np.float64), np.asarray(before, dtype=np.float64)
    n = len(a)
    if n == 0:
        return NOTHING
    if b.mean() <= chance:
        at = f", chance {percent(chance)}" if chance else ""
        return Estimate(math.nan, math.nan, math.nan, n, f"baseline {percent(float(b.mean()))}{at}: nothing to retain")
    value = float((a.mean() - chance) / (b.mean() - chance))
    totals = resample(cluster_sums(clusters, [a, b]), seed=seed)
    above, below = totals[:, 0] - chance * totals[:, 2], totals[:, 1] - chance * totals[:, 2]
    shares = np.where(below > 0, above / np.where(below > 0, below, 1), np.inf)
    low, high = interval(shares)
    floor, ceiling = _guard(a, b, value, n * (float(b.mean()) - chance))
    return Estimate(value, min(low, floor), max(high, ceiling), n)


def gain(after: ArrayLike, before: ArrayLike, clusters: ArrayLike, seed: int = SEED) -> Estimate:
    """after - before of the same samples, with a paired cluster bootstrap."""
    a, b = np.asarray(after, dtype=np.float64), np.asarray(before, dtype=np.float64)
    n = len(a)
    if n == 0:
        return NOTHING
    totals = resample(cluster_sums(clusters, [a, b]), seed=seed)
    low, high = interval((totals[:, 0] - totals[:, 1]) / totals[:, 2])
    value = float(a.mean() - b.mean())
    floor, ceiling = _guard(a, b, value, n)
    return Estimate(value, min(low, floor), max(high, ceiling), n)


def _guard(after: Floats, before: Floats, value: float, scale: float) -> tuple[float, float]:
    """Bounds of a value from the pairs that changed."""
    right = int(before.sum())
    lost, gained = float(np.sum(before * (1 - after))), float(np.sum(after * (1 - before)))
    down, up = _spread(lost, right, gained, len(before) - right)
    return value - down / scale, value + up / scale


def changed_pairs(lost: float, right: int, gained: float, wrong: int) -> tuple[float, float]:
    """Bounds of the retained share of `right` answers of which some were lost, while some of the `wrong` ones were gained."""
    down, up = _spread(lost, right, gained, wrong)
    value = (right - lost + gained) / right if right else math.nan
    return value - down / max(right, 1), value + up / max(right, 1)


def _spread(lost: float, right: int, gained: float, wrong: int) -> tuple[float, float]:
    """How far down and up the count of right answers may lie, by Wilson's intervals of the pairs lost (of those that were
    right) and gained (of those that were wrong)."""
    out = wilson(lost, right) if right else Estimate(0.0, 0.0, 0.0, 0)
    back = wilson(gained, wrong) if wrong else Estimate(0.0, 0.0, 0.0, 0)
    down = math.hypot((out.high - out.value) * right, (back.value - back.low) * wrong)
    up = math.hypot((out.value - out.low) * right, (back.high - back.value) * wrong)
    return down, up


def interval(draws: Floats) -> tuple[float, float]:
    """The middle 95 % of bootstrap draws."""
    low, high = np.quantile(draws, [0.025, 0.975], method="inverted_cdf")
    return float(low), float(high)


@dataclass(frozen=True)
class Side:
    """One ability, asked of the same samples with nothing, attention and the recurrent side off."""

    base: Floats
    attention_off: Floats
    recurrent_off: Floats
    clusters: NDArray[Any]
    chance: float = 0.0


@dataclass(frozen=True)
class Interaction:
    """What is left of each ability with each side off, and the contrast between them."""

    contrast: Estimate
    retrieval_gap: Estimate  # retrieval kept with recurrence off minus kept with attention off
    knowledge_gap: Estimate  # knowledge kept with attention off minus kept with recurrence off

    @property
    def crossed(self) -> bool:
        """Both simple effects point their way: a double dissociation in the strict sense."""
        return self.retrieval_gap.low > 0 and self.knowledge_gap.low > 0


def interaction(retrieval: Side, knowledge: Side, seed: int = SEED) -> Interaction:
    """(attention off, recurrent off) x (retrieval, knowledge) on chance-corrected retained shares.

    Positive: silencing attention costs retrieval more than knowledge, compared with silencing the recurrent side.
    """
    first, first_draws, first_guard = _gap(retrieval, seed, attention_first=False)
    second, second_draws, second_guard = _gap(knowledge, seed + 1, attention_first=True)
    n = min(len(retrieval.base), len(knowledge.base))
    value, guard = first + second, math.hypot(first_guard, second_guard)
    return Interaction(
        _widened(value, first_draws + second_draws, guard, n),
        _widened(first, first_draws, first_guard, len(retrieval.base)),
        _widened(second, second_draws, second_guard, len(knowledge.base)),
    )


def _gap(side: Side, seed: int, attention_first: bool) -> tuple[float, Floats, float]:
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


def _widened(value: float, draws: Floats, guard: float, n: int) -> Estimate:
    """The bootstrap interval; where all draws are alike, the Wilson half-widths instead."""
    low, high = interval(draws)
    if high - low < 1e-9:
        low, high = value - guard, value + guard
    return Estimate(value, low, high, n)


def perplexity(nll: ArrayLike, tokens: ArrayLike, clusters: ArrayLike, seed: int = SEED) -> Estimate:
    """exp of the mean negative log-likelihood per token, resampled by cluster; `nll` is summed over a sample's tokens."""
    total, count = np.asarray(nll, dtype=np.float64), np.asarray(tokens, dtype=np.float64)
    if len(total) == 0 or count.sum() <= 0:
        return NOTHING
    sums = cluster_sums(clusters, [total, count])
    totals = resample(sums, seed=seed) if len(sums) > 1 else sums[:1]
    low, high = interval(np.exp(totals[:, 0] / np.maximum(totals[:, 1], 1)))
    return Estimate(float(np.exp(total.sum() / count.sum())), low, high, len(total))
