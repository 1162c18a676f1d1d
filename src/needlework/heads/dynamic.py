"""Compare dynamic selection of heads (per token) with static sets of as many heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from needlework.anatomy import Anatomy, Head, heads_of_share
from needlework.heads.causal import keep_only
from needlework.heads.evaluation import cluster_mean
from needlework.heads.observers import SampleObserver, join_observers
from needlework.heads.samples import measure_correct, sample_clusters
from needlework.interventions.attention import KeepHeads
from needlework.interventions.base import NONE
from needlework.interventions.ranking import Ranking
from needlework.measure import Progress, Sample, map_samples, run_requests
from needlework.model.attention import Block, Forward
from needlework.observation import entropy, observing
from needlework.stats import Estimate, accuracy, retained

if TYPE_CHECKING:
    from needlework.subject import Subject

RANDOM_SEEDS = 5


@dataclass(frozen=True)
class Selection:
    """One way to select heads, and the retrieval that it keeps."""

    name: str
    heads: str  # number of heads kept, as text
    retrieval: Estimate
    retained: Estimate


@dataclass(frozen=True)
class Comparison:
    """Retrieval under several ways to select heads at one share of the heads of each layer."""

    share: float
    per_layer: tuple[int, ...]  # heads kept in each attention layer
    ways: tuple[Selection, ...]
    picked: dict[str, float]  # "layer.head" -> share of tokens at which selection by entropy keeps it
    union: dict[str, float]  # number of heads selected at least once: while answering, anywhere, and per sample (mean)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class SelectionCounts(SampleObserver):
    """Observer that counts the tokens at which `keep_heads` by entropy selects each head, by sample and phase.

    Args:
        samples: Number of samples.
        kept: Layer -> number of heads kept at each token.
    """

    def __init__(self, samples: int, kept: dict[int, int]) -> None:
        super().__init__(samples)
        self.kept = kept

    def see(self, forward: Forward, layer: int, block: Block, probabilities: Tensor) -> None:
        # As in keep_heads, the lower head index wins a tie.
        order = entropy(probabilities).argsort(dim=1, stable=True)[:, : self.kept[layer]]  # [rows, k, queries]
        selected = torch.zeros_like(probabilities[..., 0]).scatter_(1, order, 1.0).sum(-1)
        self.add(layer, forward.phase, forward.slots, selected)
        self.add(layer, "anywhere", forward.slots, selected)


def count_selections(subject: Subject, samples: Sequence[Sample], progress: Progress, share: float) -> SelectionCounts:
    """Count which heads dynamic selection keeps, observed under that intervention."""
    kept = {layer: heads_of_share(share, part.query_heads) for layer, part in subject.anatomy.attention_parts()}
    observer = SelectionCounts(len(samples), kept)
    requests = [replace(s.requests(_keep(share))[0], sample=i) for i, s in enumerate(samples)]
    with observing(subject, observer):
        run_requests(subject, requests, [sample.item.id for sample in samples], progress)
    return observer


@dataclass(frozen=True)
class SelectionStats:
    """Number of tokens at which dynamic selection kept each head, [samples, heads]: at any token, and while answering."""

    heads: tuple[Head, ...]
    anywhere: np.ndarray
    answering: np.ndarray
    per_layer: tuple[int, ...]  # heads selected at each token, of each attention layer

    def union(self, counts: np.ndarray) -> tuple[Head, ...]:
        """Return the heads that were selected at least once."""
        return tuple(head for head, count in zip(self.heads, counts.sum(0), strict=True) if count)

    def ranking(self, counts: np.ndarray) -> Ranking:
        """Rank heads by the number of tokens at which they were selected."""
        return Ranking.by_scores({head: float(count) for head, count in zip(self.heads, counts.sum(0), strict=True)})

    def shares(self) -> dict[str, float]:
        """Return the mean share of a sample's tokens at which each head was selected."""
        tokens = self.anywhere.sum(1, keepdims=True) / max(1, sum(self.per_layer))
        shares = (self.anywhere / np.maximum(tokens, 1)).mean(0)
        return {f"{head.layer}.{head.index}": float(share) for head, share in zip(self.heads, shares, strict=True)}

    def sizes(self) -> dict[str, float]:
        in_one = float((self.answering > 0).sum(1).mean())
        unions = {"answering": len(self.union(self.answering)), "anywhere": len(self.union(self.anywhere))}
        return {**unions, "answering_one_sample": in_one}


def compare_selections(
    subject: Subject,
    ranking: Ranking,
    recording: Sequence[Sample],
    judging: Sequence[Sample],
    share: float,
    progress: Progress,
) -> Comparison:
    """Measure retrieval under all ways to select heads, on the same samples.

    Args:
        subject: The model.
        ranking: The ranking that static sets are taken from.
        recording: Samples on which the selections of dynamic selection are counted.
        judging: Held-out samples on which all ways are measured.
        share: Share of the heads of each layer to keep.
        progress: Called with the share of the work that is done.
    """
    anatomy = subject.anatomy
    count = partial(count_selections, share=share)
    counts = join_observers(map_samples(subject, count, recording, lambda done: progress(done / 3)))
    per_layer = tuple(counts.kept[layer.index] for layer in anatomy.attention_layers)
    use = SelectionStats(anatomy.heads, counts.all_heads("anywhere"), counts.all_heads("decode"), per_layer)
    ways_to_try = [("all heads", f"{len(use.heads)} of {len(use.heads)}", [NONE]), *_ways(ranking, use, share, anatomy)]
    acts = [act for _, _, some in ways_to_try for act in some]
    right = measure_correct(subject, judging, acts, lambda done: progress(1 / 3 + 2 * done / 3))
    groups, ways, start = sample_clusters(judging), [], 0
    for name, kept, some in ways_to_try:
        rows = right[start : start + len(some)]
        start += len(some)
        ways.append(Selection(name, kept, _share(rows, groups), retained(rows.mean(0), right[0], groups)))
    return Comparison(share, per_layer, tuple(ways), use.shares(), use.sizes())


def _ways(ranking: Ranking, use: SelectionStats, share: float, anatomy: Anatomy) -> list[tuple[str, str, list[Any]]]:
    """Return name, heads kept (as text) and interventions of each way; random ways have one intervention for each seed."""
    total, every, by = sum(use.per_layer), len(use.heads), ranking.method or "the ranking"
    same = f"{total} of {every}, " + "+".join(map(str, use.per_layer))
    ever, answering = use.union(use.anywhere), use.union(use.answering)
    seeds = range(RANDOM_SEEDS)
    return [
        ("dynamic: entropy", same, [_keep(share)]),
        ("dynamic: entropy beside the first token", same, [_keep(share, sinks=1)]),
        (f"static: {by}", same, [_keep(share, by=ranking)]),
        (f"static: {by}, in whichever layers", f"{total} of {every}", [keep_only(ranking.top(total), anatomy)]),
        ("static: most picked while answering", same, [_keep(share, by=use.ranking(use.answering))]),
        ("static: most picked anywhere", same, [_keep(share, by=use.ranking(use.anywhere))]),
        ("static: all picked while answering", f"{len(answering)} of {every}", [keep_only(answering, anatomy)]),
        ("static: all picked anywhere", f"{len(ever)} of {every}", [keep_only(ever, anatomy)]),
        ("static: random", same, [_keep(share, by="random", draw="trial", seed=seed) for seed in seeds]),
        ("dynamic: random", same, [_keep(share, by="random", seed=seed) for seed in seeds]),
    ]


def _keep(share: float, **how: Any) -> KeepHeads:
    return KeepHeads(**{"fraction": share, **how})


def _share(rows: np.ndarray, groups: Sequence[str]) -> Estimate:
    return accuracy(rows[0]) if len(rows) == 1 else cluster_mean(rows.mean(0), groups)
