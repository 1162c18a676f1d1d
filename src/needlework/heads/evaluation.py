"""Evaluate rankings: agreement between rankings, and retrieval when only their best heads are kept."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from needlework.anatomy import Anatomy, Head, heads_of_share
from needlework.errors import NeedleworkError
from needlework.heads.causal import keep_only
from needlework.heads.samples import measure_correct, sample_clusters
from needlework.interventions.acts import draw
from needlework.interventions.base import NONE
from needlework.interventions.ranking import Ranking
from needlework.measure import Progress, Sample
from needlework.stats import Estimate, accuracy, cluster_sums, difference, interval, resample, retained, wilson

if TYPE_CHECKING:
    from needlework.subject import Subject

SHARE = 0.15  # of the heads: the default size of the top set, as in the paper


@dataclass(frozen=True)
class Agreement:
    """Agreement of two rankings of the same heads."""

    spearman: float
    overlap: float  # share of the k best heads of one that are among the k best of the other
    k: int
    by_chance: float  # expected overlap of two independent orders

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def compare_rankings(first: Ranking, second: Ranking, k: int | None = None) -> Agreement:
    """Return rank correlation of two rankings and overlap of their k best heads (default: 15 % of the heads)."""
    heads = sorted(first.order)
    if heads != sorted(second.order):
        raise NeedleworkError("two rankings can be compared only if they rank the same heads")
    k = heads_of_share(SHARE, len(heads)) if k is None else k
    shared = len(set(first.top(k)) & set(second.top(k)))
    return Agreement(spearman(_values(first), _values(second)), shared / k if k else 1.0, k, k / len(heads))


def _values(ranking: Ranking) -> np.ndarray:
    """Return the score of each head in sorted order, or minus its place where a ranking has no scores; higher is better."""
    place = {head: -float(i) for i, head in enumerate(ranking.order)}
    values = ranking.scores or place
    return np.array([values[head] for head in sorted(ranking.order)])


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Return Spearman's rank correlation of two vectors; ties get their mean rank. 0 if one vector is constant."""
    first, second = (_ranks(values) for values in (a, b))
    first, second = first - first.mean(), second - second.mean()
    spread = float(np.sqrt((first**2).sum() * (second**2).sum()))
    return float((first * second).sum() / spread) if spread else 0.0


def _ranks(values: np.ndarray) -> np.ndarray:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return np.asarray((ends - (counts - 1) / 2)[place])


def compare_all_rankings(rankings: Mapping[str, Ranking], k: int | None = None) -> dict[str, dict[str, Agreement]]:
    """Return the agreement of every pair of rankings, as a nested dict."""
    return {a: {b: compare_rankings(rankings[a], rankings[b], k) for b in rankings} for a in rankings}


RANDOM_ORDERS = 5
RANDOM = "random"


@dataclass(frozen=True)
class Curve:
    """Retrieval with only the k best heads of a ranking kept, all others ablated at every position."""

    name: str
    heads: int  # number of heads of the model
    ks: tuple[int, ...]
    right: np.ndarray  # [ks, samples] 0 or 1; for random orders the mean over orders
    clusters: tuple[str, ...]

    @property
    def area(self) -> Estimate:
        """Area under retrieval as a function of the share of heads kept, between 0 and 1."""
        return cluster_mean(self.weights @ self.right, self.clusters)

    @property
    def weights(self) -> np.ndarray:
        """Weights of the trapezoid rule, [ks]."""
        x = np.array(self.ks) / self.heads
        gaps = np.diff(x)
        return np.concatenate([gaps, [0.0]]) / 2 + np.concatenate([[0.0], gaps]) / 2

    def at(self, k: int) -> Estimate:
        values = self.right[self.ks.index(k)]
        return accuracy(values) if set(np.unique(values)) <= {0.0, 1.0} else cluster_mean(values, self.clusters)

    def above(self, other: Curve) -> Estimate:
        """Estimate this area minus another curve's, paired by sample."""
        mine, others = self.weights @ self.right, other.weights @ other.right
        unpaired = difference(*(wilson(float(areas.sum()), len(areas)) for areas in (mine, others)))
        return cluster_mean(mine - others, self.clusters, unpaired)

    def smallest(self, share: float) -> int:
        """Return the smallest k from which on every k retains this share of the retrieval with all heads."""
        enough = self.right.mean(1) >= share * self.right[-1].mean()
        lacking = np.flatnonzero(~enough)
        return self.ks[int(lacking[-1]) + 1] if len(lacking) else self.ks[0]

    def to_dict(self) -> dict[str, Any]:
        points = [{"k": k, **asdict(self.at(k))} for k in self.ks]
        return {"name": self.name, "heads": self.heads, "area": asdict(self.area), "points": points}


def cluster_mean(values: np.ndarray, of: Sequence[str], at_edge: Estimate | None = None) -> Estimate:
    """Estimate the mean of values [samples] with a cluster bootstrap.

    Where all resamples are equal, the interval is that of `at_edge` instead of one of zero width; by default Wilson's, which
    assumes values in [0, 1].
    """
    totals = resample(cluster_sums(of, [values]))
    low, high = interval(totals[:, 0] / totals[:, 1])
    if math.isclose(low, high, abs_tol=1e-12):
        at_edge = at_edge or wilson(float(values.sum()), len(values))
        low, high = at_edge.low, at_edge.high
    return Estimate(float(values.mean()), low, high, len(values))


def head_counts(heads: int) -> tuple[int, ...]:
    """Return the numbers of heads at which curves are measured: 0, 1, 2, then growing by half, up to all."""
    chosen, k = [0], 1
    while k < heads:
        chosen.append(k)
        k = max(k + 1, round(1.5 * k))
    return (*chosen, heads)


def random_order(anatomy: Anatomy, seed: int) -> Ranking:
    """Return a random order of the heads, the baseline for rankings."""
    return Ranking(order=sorted(anatomy.heads, key=lambda head: draw(seed, *head)), method=RANDOM, seed=seed)


def evaluate_rankings(
    subject: Subject, rankings: Mapping[str, Ranking], samples: Sequence[Sample], progress: Progress, orders: int = RANDOM_ORDERS
) -> dict[str, Curve]:
    """Measure the curve of each ranking, and the mean curve of `orders` random orders, on the same samples.

    Sets of heads that occur in several rankings are measured once.
    """
    anatomy = subject.anatomy
    ks, groups = head_counts(len(anatomy.heads)), sample_clusters(samples)
    every = {**rankings, **{f"{RANDOM} {i}": random_order(anatomy, i) for i in range(orders)}}
    acts = [keep_only(ranking.top(k), anatomy) for ranking in every.values() for k in ks]
    right = measure_correct(subject, samples, acts, progress).reshape(len(every), len(ks), len(samples))
    made = [Curve(name, len(anatomy.heads), ks, right[i], tuple(groups)) for i, name in enumerate(rankings)]
    if orders:
        made.append(Curve(RANDOM, len(anatomy.heads), ks, right[len(rankings) :].mean(0), tuple(groups)))
    return {curve.name: curve for curve in made}


@dataclass(frozen=True)
class SmallestSet:
    """The smallest set of heads that retains a share of retrieval, chosen on some samples and measured on others."""

    heads: tuple[Head, ...]
    of: int  # number of heads of the model
    by: str  # name of the ranking
    keep: float  # share of retrieval that was to be retained
    retained: Estimate  # paired share of the baseline, on held-out samples
    baseline: Estimate  # retrieval without intervention on the held-out samples
    random: Estimate  # retained share with as many random heads

    @property
    def sure(self) -> bool:
        """Whether the lower bound of the retained share reaches `keep`."""
        return self.retained.low >= self.keep

    def text(self) -> str:
        share = f"{len(self.heads)} of {self.of} heads ({100 * len(self.heads) / self.of:.0f} %), by {self.by}"
        chance = f"as many at random keep {self.random.text()}"
        short = "it falls short of" if self.retained.value < self.keep else "its interval reaches below"
        sure = "" if self.sure else f"; {short} {100 * self.keep:g} % on these fresh samples"
        return f"{share}, keep {self.retained.text()} of retrieval{sure}; {chance}"

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "heads": [list(head) for head in self.heads], "k": len(self.heads), "sure": self.sure}


def smallest_set(
    subject: Subject,
    ranking: Ranking,
    curve: Curve,
    choosing: Sequence[Sample],
    judging: Sequence[Sample],
    keep: float,
    progress: Progress,
) -> SmallestSet:
    """Find the smallest k such that a ranking's k best heads retain a share of retrieval, and measure that set.

    Args:
        subject: The model.
        ranking: The ranking whose best heads are kept.
        curve: Its curve on `choosing`; every k between two of its points is then measured.
        choosing: The samples on which k is chosen.
        judging: Held-out samples on which the chosen set is measured.
        keep: The share of retrieval to retain.
        progress: Called with the share of the work that is done.
    """
    anatomy = subject.anatomy
    enough = curve.smallest(keep)
    below = max((k for k in curve.ks if k < enough), default=0)
    between = list(range(below + 1, enough))
    if between:
        acts = [keep_only(ranking.top(k), anatomy) for k in between]
        right = measure_correct(subject, choosing, acts, lambda share: progress(share / 2))
        wanted = keep * curve.right[-1].mean()
        lacking = [k for k, row in zip(between, right, strict=True) if row.mean() < wanted]
        enough = max(lacking, default=below) + 1
    heads = ranking.top(enough)
    orders = [random_order(anatomy, i).top(enough) for i in range(RANDOM_ORDERS)]
    acts = [NONE, keep_only(heads, anatomy), *(keep_only(order, anatomy) for order in orders)]
    right = measure_correct(subject, judging, acts, lambda share: progress(0.5 + share / 2))
    groups = sample_clusters(judging)
    by_chance = retained(right[2:].mean(0), right[0], groups)
    kept = retained(right[1], right[0], groups)
    return SmallestSet(tuple(sorted(heads)), len(anatomy.heads), curve.name, keep, kept, accuracy(right[0]), by_chance)
