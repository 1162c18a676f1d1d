"""How good a ranking is: what of retrieval is left when only its k best heads speak, on samples that it has not seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from needlework.anatomy import Anatomy, Head
from needlework.heads.causal import keeping
from needlework.heads.samples import Progress, Sample, clusters, correct
from needlework.interventions.acts import draw
from needlework.interventions.base import NONE
from needlework.interventions.ranking import Ranking
from needlework.stats import Estimate, accuracy, cluster_sums, interval, resample, retained, wilson

if TYPE_CHECKING:
    from needlework.subject import Subject

RANDOM_ORDERS = 5
RANDOM = "random"


@dataclass(frozen=True)
class Curve:
    """Retrieval with the k best heads of a ranking, at every position, and nothing of the others."""

    name: str
    heads: int  # of the model
    ks: tuple[int, ...]
    right: np.ndarray  # [ks, samples]; of several random orders the mean
    clusters: tuple[str, ...]

    @property
    def area(self) -> Estimate:
        """The area under retrieval against the share of heads kept: 1 would be all of it with no head."""
        return mean(self.weights @ self.right, self.clusters)

    @property
    def weights(self) -> np.ndarray:
        """Of each k in the area, by the trapezoid rule."""
        x = np.array(self.ks) / self.heads
        gaps = np.diff(x)
        return np.concatenate([gaps, [0.0]]) / 2 + np.concatenate([[0.0], gaps]) / 2

    def at(self, k: int) -> Estimate:
        values = self.right[self.ks.index(k)]
        return accuracy(values) if set(np.unique(values)) <= {0.0, 1.0} else mean(values, self.clusters)

    def above(self, other: Curve) -> Estimate:
        """How much larger its area is than another's, on the same samples."""
        return mean(self.weights @ self.right - other.weights @ other.right, self.clusters)

    def smallest(self, share: float) -> int:
        """The fewest heads that keep this share of what all of them find, and so do all larger numbers that were asked."""
        enough = self.right.mean(1) >= share * self.right[-1].mean()
        lacking = np.flatnonzero(~enough)
        return self.ks[int(lacking[-1]) + 1] if len(lacking) else self.ks[0]

    def to_dict(self) -> dict[str, Any]:
        points = [{"k": k, **asdict(self.at(k))} for k in self.ks]
        return {"name": self.name, "heads": self.heads, "area": asdict(self.area), "points": points}


def mean(values: np.ndarray, of: Sequence[str]) -> Estimate:
    """A mean over samples, whole clusters resampled. Where all samples are alike, Wilson's interval: none of them is certain."""
    totals = resample(cluster_sums(of, [values]))
    low, high = interval(totals[:, 0] / totals[:, 1])
    if low == high:
        at_edge = wilson(float(values.sum()), len(values))
        low, high = at_edge.low, at_edge.high
    return Estimate(float(values.mean()), low, high, len(values))


def numbers(heads: int) -> tuple[int, ...]:
    """How many heads are kept: none, a few, and then in steps of about a half, up to all."""
    chosen, k = [0], 1
    while k < heads:
        chosen.append(k)
        k = max(k + 1, round(1.5 * k))
    return (*chosen, heads)


def random_order(anatomy: Anatomy, seed: int) -> Ranking:
    """An order that knows nothing: the floor of every ranking."""
    return Ranking(order=sorted(anatomy.heads, key=lambda head: draw(seed, *head)), method=RANDOM, seed=seed)


def curves(
    subject: Subject, rankings: Mapping[str, Ranking], samples: Sequence[Sample], progress: Progress, orders: int = RANDOM_ORDERS
) -> dict[str, Curve]:
    """The curve of each ranking, and of random orders, on the same samples. Sets of heads that rankings share are asked once."""
    anatomy = subject.anatomy
    ks, groups = numbers(len(anatomy.heads)), clusters(samples)
    every = {**rankings, **{f"{RANDOM} {i}": random_order(anatomy, i) for i in range(orders)}}
    acts = [keeping(ranking.top(k), anatomy) for ranking in every.values() for k in ks]
    right = correct(subject, samples, acts, progress).reshape(len(every), len(ks), len(samples))
    made = [Curve(name, len(anatomy.heads), ks, right[i], tuple(groups)) for i, name in enumerate(rankings)]
    if orders:
        made.append(Curve(RANDOM, len(anatomy.heads), ks, right[len(rankings) :].mean(0), tuple(groups)))
    return {curve.name: curve for curve in made}


@dataclass(frozen=True)
class SmallestSet:
    """The fewest heads that keep a share of retrieval, found on some samples and measured on others."""

    heads: tuple[Head, ...]
    of: int  # heads of the model
    by: str
    keep: float
    retained: Estimate  # paired share of what the untouched model finds, on samples that nothing was chosen by
    baseline: Estimate  # retrieval of the untouched model on these samples
    random: Estimate  # retained by as many heads at random

    @property
    def sure(self) -> bool:
        """The interval of the retained share lies above what was to be kept."""
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
    """The fewest heads of a ranking: between two numbers of its curve every number is tried on the samples of the curve."""
    anatomy = subject.anatomy
    enough = curve.smallest(keep)
    below = max((k for k in curve.ks if k < enough), default=0)
    between = list(range(below + 1, enough))
    if between:
        acts = [keeping(ranking.top(k), anatomy) for k in between]
        right = correct(subject, choosing, acts, lambda share: progress(share / 2))
        wanted = keep * curve.right[-1].mean()
        lacking = [k for k, row in zip(between, right, strict=True) if row.mean() < wanted]
        enough = max(lacking, default=below) + 1
    heads = ranking.top(enough)
    orders = [random_order(anatomy, i).top(enough) for i in range(RANDOM_ORDERS)]
    acts = [NONE, keeping(heads, anatomy), *(keeping(order, anatomy) for order in orders)]
    right = correct(subject, judging, acts, lambda share: progress(0.5 + share / 2))
    groups = clusters(judging)
    by_chance = retained(right[2:].mean(0), right[0], groups)
    kept = retained(right[1], right[0], groups)
    return SmallestSet(tuple(sorted(heads)), len(anatomy.heads), curve.name, keep, kept, accuracy(right[0]), by_chance)
