"""Evaluate rankings: agreement, retrieval with only the best heads kept, and static sets against selection per token."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from needlework.anatomy import Anatomy, Head, heads_of_share
from needlework.errors import NeedleworkError
from needlework.heads.causal import keep_only
from needlework.heads.observers import SampleObserver, join_observers
from needlework.heads.samples import sample_clusters
from needlework.interventions.acts import draw
from needlework.interventions.base import NONE, Intervention
from needlework.interventions.builtin import KeepHeads
from needlework.interventions.ranking import Ranking
from needlework.measure import Progress, Sample, map_samples, measure, run_requests
from needlework.model.attention import Forward, QueryBlock
from needlework.observation import entropy
from needlework.stats import Estimate, accuracy, bootstrap_mean, difference, retained, wilson
from needlework.subject import Subject

SHARE = 0.15  # of the heads: the default size of the top set, as in the paper
RANDOM = "random"
RANDOM_ORDERS = 5


@dataclass(frozen=True)
class Agreement:
    """Agreement of two rankings of the same heads."""

    spearman: float
    overlap: float  # share of the k best heads of one that are among the k best of the other
    k: int
    by_chance: float  # expected overlap of two independent orders


def compare_rankings(first: Ranking, second: Ranking, k: int | None = None) -> Agreement:
    """Return rank correlation of two rankings and overlap of their k best heads (default: 15 % of the heads).

    Heads of equal score have equal ranks; a ranking without scores is compared by its order.
    """
    heads = sorted(first.order)
    if heads != sorted(second.order):
        raise NeedleworkError("two rankings can be compared only if they rank the same heads")
    k = heads_of_share(SHARE, len(heads)) if k is None else k
    shared = len(set(first.top(k)) & set(second.top(k)))
    scores = [one.scores or {head: -float(i) for i, head in enumerate(one.order)} for one in (first, second)]
    correlation = spearman(*(np.array([of_head[head] for head in heads]) for of_head in scores))
    return Agreement(correlation, shared / k if k else 1.0, k, k / len(heads))


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Return Spearman's rank correlation of two vectors; ties get their mean rank. 0 if one vector is constant."""
    from scipy.stats import rankdata

    first, second = (ranks - ranks.mean() for ranks in (rankdata(a), rankdata(b)))
    spread = float(np.sqrt((first**2).sum() * (second**2).sum()))
    return float((first * second).sum() / spread) if spread else 0.0


@dataclass(frozen=True)
class RetrievalCurve:
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
        gaps = np.diff(np.array(self.ks) / self.heads)
        return np.concatenate([gaps, [0.0]]) / 2 + np.concatenate([[0.0], gaps]) / 2

    def at(self, k: int) -> Estimate:
        values = self.right[self.ks.index(k)]
        return accuracy(values) if set(np.unique(values)) <= {0.0, 1.0} else cluster_mean(values, self.clusters)

    def above(self, other: RetrievalCurve) -> Estimate:
        """Estimate this area minus another curve's, paired by sample."""
        mine, others = self.weights @ self.right, other.weights @ other.right
        unpaired = difference(*(wilson(float(areas.sum()), len(areas)) for areas in (mine, others)))
        return cluster_mean(mine - others, self.clusters, unpaired)

    def smallest(self, share: float) -> int:
        """Return the smallest k from which on every k retains this share of the retrieval with all heads."""
        lacking = np.flatnonzero(self.right.mean(1) < share * self.right[-1].mean())
        return self.ks[int(lacking[-1]) + 1] if len(lacking) else self.ks[0]

    def to_dict(self) -> dict[str, Any]:
        points = [{"k": k, **asdict(self.at(k))} for k in self.ks]
        return {"name": self.name, "heads": self.heads, "area": asdict(self.area), "points": points}


def cluster_mean(values: np.ndarray, clusters: Sequence[str], at_edge: Estimate | None = None) -> Estimate:
    """Estimate the mean of values [samples] with a cluster bootstrap.

    Where all resamples are equal, the interval is that of `at_edge` instead of one of zero width; by default Wilson's, which
    assumes values in [0, 1].
    """
    found = bootstrap_mean(values, clusters)
    if not math.isclose(found.low, found.high, abs_tol=1e-12):
        return found
    at_edge = at_edge or wilson(float(values.sum()), len(values))
    return replace(found, low=at_edge.low, high=at_edge.high)


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
) -> dict[str, RetrievalCurve]:
    """Measure the curve of each ranking, and the mean curve of `orders` random orders, on the same samples.

    Sets of heads that occur in several rankings are measured once.
    """
    anatomy = subject.anatomy
    ks, clusters = head_counts(len(anatomy.heads)), tuple(sample_clusters(samples))
    every = [*rankings.values(), *(random_order(anatomy, i) for i in range(orders))]
    acts = [keep_only(ranking.top(k), anatomy) for ranking in every for k in ks]
    right = measure(subject, samples, acts, progress=progress).values().reshape(len(every), len(ks), len(samples))
    of_curves = dict(zip(rankings, right, strict=False))
    if orders:
        of_curves[RANDOM] = right[len(rankings) :].mean(0)
    return {name: RetrievalCurve(name, len(anatomy.heads), ks, values, clusters) for name, values in of_curves.items()}


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
        short = "it falls short of" if self.retained.value < self.keep else "its interval reaches below"
        sure = "" if self.sure else f"; {short} {100 * self.keep:g} % on these fresh samples"
        return f"{share}, keep {self.retained.text()} of retrieval{sure}; as many at random keep {self.random.text()}"

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "heads": [list(head) for head in self.heads], "k": len(self.heads), "sure": self.sure}


def smallest_set(
    subject: Subject,
    ranking: Ranking,
    curve: RetrievalCurve,
    choosing: Sequence[Sample],
    judging: Sequence[Sample],
    keep: float,
    progress: Progress,
) -> SmallestSet:
    """Find the smallest k such that a ranking's k best heads retain the share `keep` of retrieval, and measure that set.

    k is chosen on `choosing`: by the ranking's curve on these samples, then by every k between two of its points. The set is
    measured on `judging`.
    """
    anatomy = subject.anatomy
    enough = curve.smallest(keep)
    below = max((k for k in curve.ks if k < enough), default=0)
    if between := list(range(below + 1, enough)):
        acts = [keep_only(ranking.top(k), anatomy) for k in between]
        right = measure(subject, choosing, acts, progress=lambda share: progress(share / 2)).values()
        wanted = keep * curve.right[-1].mean()
        lacking = [k for k, row in zip(between, right, strict=True) if row.mean() < wanted]
        enough = max(lacking, default=below) + 1
    heads = ranking.top(enough)
    sets = [heads, *(random_order(anatomy, i).top(enough) for i in range(RANDOM_ORDERS))]
    acts = [NONE, *(keep_only(some, anatomy) for some in sets)]
    right = measure(subject, judging, acts, progress=lambda share: progress(0.5 + share / 2)).values()
    kept, by_chance = (retained(row, right[0], sample_clusters(judging)) for row in (right[1], right[2:].mean(0)))
    return SmallestSet(tuple(sorted(heads)), len(anatomy.heads), curve.name, keep, kept, accuracy(right[0]), by_chance)


@dataclass(frozen=True)
class Selection:
    """One way to select heads, and the retrieval that it keeps."""

    name: str
    heads: str  # number of heads kept, as text
    retrieval: Estimate
    retained: Estimate


@dataclass(frozen=True)
class SelectionComparison:
    """Retrieval under several ways to select heads at one share of the heads of each layer."""

    share: float
    per_layer: tuple[int, ...]  # heads kept in each attention layer
    ways: tuple[Selection, ...]
    picked: dict[str, float]  # "layer.head" -> share of tokens at which selection by entropy keeps it
    union: dict[str, float]  # number of heads selected at least once: while answering, anywhere, and per sample (mean)


class SelectionCounts(SampleObserver):
    """Observer that counts the tokens at which `keep_heads` by entropy selects each head, by sample and phase."""

    def __init__(self, samples: int, kept: dict[int, int]) -> None:
        super().__init__(samples)
        self.kept = kept  # layer -> number of heads kept at each token

    def see(self, forward: Forward, layer: int, block: QueryBlock, probabilities: Tensor) -> None:
        # As in keep_heads, the lower head index wins a tie.
        order = entropy(probabilities).argsort(dim=1, stable=True)[:, : self.kept[layer]]  # [rows, k, queries]
        selected = torch.zeros_like(probabilities[..., 0]).scatter_(1, order, 1.0).sum(-1)
        self.add(layer, forward.phase, forward.slots, selected)
        self.add(layer, "anywhere", forward.slots, selected)


def count_selections(subject: Subject, samples: Sequence[Sample], progress: Progress, share: float) -> SelectionCounts:
    """Count which heads dynamic selection keeps, observed under that intervention."""
    kept = {layer: heads_of_share(share, part.query_heads) for layer, part in subject.anatomy.attention_parts()}
    observer = SelectionCounts(len(samples), kept)
    by_entropy: dict[str, Any] = {"fraction": share}
    requests = [replace(s.requests(KeepHeads(**by_entropy))[0], sample=i) for i, s in enumerate(samples)]
    with subject.body.observed_by(observer):
        run_requests(subject, requests, [sample.item.id for sample in samples], progress)
    return observer


def compare_selections(
    subject: Subject,
    ranking: Ranking,
    recording: Sequence[Sample],
    judging: Sequence[Sample],
    share: float,
    progress: Progress,
) -> SelectionComparison:
    """Measure retrieval with a share of each layer's heads kept, by all ways to select them, on the samples `judging`.

    Static sets are the best heads of the ranking, and those that dynamic selection picks most on the samples `recording`.
    """
    anatomy = subject.anatomy
    count = partial(count_selections, share=share)
    counts = join_observers(map_samples(subject, count, recording, lambda done: progress(done / 3)))
    anywhere, answering = (counts.all_heads(name) for name in ("anywhere", "decode"))  # [samples, heads] tokens
    per_layer = tuple(counts.kept[layer.index] for layer in anatomy.attention_layers)
    fraction: dict[str, Any] = {"fraction": share}
    total, heads, keep = sum(per_layer), len(anatomy.heads), partial(KeepHeads, **fraction)
    same, by = f"{total} of {heads}, " + "+".join(map(str, per_layer)), ranking.method or "the ranking"
    most_picked, all_picked = [], []
    for when, picks in (("while answering", answering.sum(0)), ("anywhere", anywhere.sum(0))):
        order = Ranking.by_scores(dict(zip(anatomy.heads, picks.tolist(), strict=True)))
        most_picked.append((f"static: most picked {when}", same, [keep(by=order)]))
        some = [head for head, tokens in zip(anatomy.heads, picks, strict=True) if tokens]
        all_picked.append((f"static: all picked {when}", f"{len(some)} of {heads}", [keep_only(some, anatomy)]))
    ways: list[tuple[str, str, Sequence[Intervention]]] = [  # name, heads kept, interventions (of random ones for each seed)
        ("all heads", f"{heads} of {heads}", [NONE]),
        ("dynamic: entropy", same, [keep()]),
        ("dynamic: entropy beside the first token", same, [keep(sinks=1)]),
        (f"static: {by}", same, [keep(by=ranking)]),
        (f"static: {by}, in whichever layers", f"{total} of {heads}", [keep_only(ranking.top(total), anatomy)]),
        *most_picked,
        *all_picked,
        ("static: random", same, [keep(by="random", draw="trial", seed=seed) for seed in range(RANDOM_ORDERS)]),
        ("dynamic: random", same, [keep(by="random", seed=seed) for seed in range(RANDOM_ORDERS)]),
    ]
    acts = [act for _, _, each in ways for act in each]
    right = measure(subject, judging, acts, progress=lambda done: progress(1 / 3 + 2 * done / 3)).values()
    clusters, found, start = sample_clusters(judging), [], 0
    for name, kept, each in ways:
        rows = right[start : start + len(each)]
        start += len(each)
        retrieval = accuracy(rows[0]) if len(each) == 1 else cluster_mean(rows.mean(0), clusters)
        found.append(Selection(name, kept, retrieval, retained(rows.mean(0), right[0], clusters)))
    tokens = np.maximum(anywhere.sum(1, keepdims=True) / max(1, sum(per_layer)), 1)  # of each sample
    picked = {f"{h.layer}.{h.index}": float(x) for h, x in zip(anatomy.heads, (anywhere / tokens).mean(0), strict=True)}
    union: dict[str, float] = {
        "answering": int((answering.sum(0) > 0).sum()),
        "anywhere": int((anywhere.sum(0) > 0).sum()),
        "answering_one_sample": float((answering > 0).sum(1).mean()),
    }
    return SelectionComparison(share, per_layer, tuple(found), picked, union)
