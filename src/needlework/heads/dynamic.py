"""Static or dynamic: are heads that are chosen anew at every token better than a fixed set of as many?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from needlework.anatomy import Anatomy, Head, heads_of_share
from needlework.errors import NeedleworkError
from needlework.heads.causal import keeping
from needlework.heads.judging import mean
from needlework.heads.looking import Spotter, entropy, stacked, watching
from needlework.heads.pieces import in_pieces
from needlework.heads.samples import Progress, Sample, clusters, correct
from needlework.interventions.acts import Phase
from needlework.interventions.attention import KeepHeads
from needlework.interventions.base import NONE
from needlework.interventions.ranking import Ranking
from needlework.model.attention import Block, Forward
from needlework.stats import Estimate, accuracy, retained

if TYPE_CHECKING:
    from needlework.subject import Subject

RANDOM_SEEDS = 5


@dataclass(frozen=True)
class Way:
    """One way to choose heads, and what of retrieval it keeps."""

    name: str
    heads: str  # how many it keeps, in words
    retrieval: Estimate
    retained: Estimate


@dataclass(frozen=True)
class Comparison:
    """Ways to choose the same number of heads of each layer."""

    share: float
    per_layer: tuple[int, ...]
    ways: tuple[Way, ...]
    picked: dict[str, float]  # head -> share of tokens at which entropy picks it
    union: dict[str, float]  # heads picked at least once: while answering, in a single sample (mean), anywhere

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Picks(Spotter):
    """Which heads `keep_heads` by entropy picks, token by token: counts [samples, heads] by layer and phase."""

    def __init__(self, samples: int, kept: dict[int, int]) -> None:
        super().__init__(samples)
        self.kept = kept
        self.counts: dict[tuple[int, Phase], Tensor] = {}

    @classmethod
    def joined(cls, parts: Sequence[Picks]) -> Picks:
        """Picks in some samples and then in others, as those in all of them."""
        if len(parts) == 1:
            return parts[0]
        whole = cls(sum(part.samples for part in parts), parts[0].kept)
        whole.counts = stacked([part.counts for part in parts], [part.samples for part in parts])
        return whole

    def see(self, forward: Forward, layer: int, block: Block, probabilities: Tensor) -> None:
        heads = probabilities.shape[1]
        order = entropy(probabilities).argsort(dim=1, stable=True)[:, : self.kept[layer]]  # [rows, k, queries]; ties as there
        picked = torch.zeros_like(probabilities[..., 0]).scatter_(1, order, 1.0).sum(-1)
        key = (layer, forward.phase)
        if key not in self.counts:
            self.counts[key] = torch.zeros(self.samples, heads, dtype=torch.float64, device=picked.device)
        self.counts[key].index_add_(0, self.number(forward.slots), picked.double())

    def all_heads(self, *phases: Phase) -> np.ndarray:
        """[samples, heads]"""
        layers = sorted({layer for layer, _ in self.counts})
        each = [sum(self.counts[layer, phase] for phase in phases if (layer, phase) in self.counts) for layer in layers]
        return torch.cat([torch.as_tensor(counts) for counts in each], 1).cpu().numpy()


def picks(subject: Subject, samples: Sequence[Sample], progress: Progress, share: float) -> Picks:
    """What dynamic selection picks while it acts, on some samples."""
    kept = {layer: heads_of_share(share, part.query_heads) for layer, part in subject.anatomy.attention_parts()}
    spotter = Picks(len(samples), kept)
    requests = [replace(s.request(_keep(share)), sample=i) for i, s in enumerate(samples)]
    with watching(subject, spotter):
        for done, (i, answer) in enumerate(subject.engine.run(requests)):
            if answer.error:
                raise NeedleworkError(f"{samples[i].item.id}: {answer.error}")
            progress((done + 1) / len(requests))
    return spotter


@dataclass(frozen=True)
class Use:
    """How often dynamic selection picked each head: [samples, heads], anywhere and while answering."""

    heads: tuple[Head, ...]
    anywhere: np.ndarray
    answering: np.ndarray
    per_layer: tuple[int, ...]  # heads picked at each token

    def union(self, counts: np.ndarray) -> tuple[Head, ...]:
        """Heads that were picked at least once."""
        return tuple(head for head, count in zip(self.heads, counts.sum(0), strict=True) if count)

    def ranking(self, counts: np.ndarray) -> Ranking:
        """Heads by how often they were picked."""
        return Ranking.by_scores({head: float(count) for head, count in zip(self.heads, counts.sum(0), strict=True)})

    def shares(self) -> dict[str, float]:
        """Of each head, the share of a sample's tokens at which it was picked."""
        tokens = self.anywhere.sum(1, keepdims=True) / max(1, sum(self.per_layer))
        shares = (self.anywhere / np.maximum(tokens, 1)).mean(0)
        return {f"{head.layer}.{head.index}": float(share) for head, share in zip(self.heads, shares, strict=True)}

    def sizes(self) -> dict[str, float]:
        in_one = float((self.answering > 0).sum(1).mean())
        unions = {"answering": len(self.union(self.answering)), "anywhere": len(self.union(self.anywhere))}
        return {**unions, "answering_one_sample": in_one}


def compare(
    subject: Subject,
    ranking: Ranking,
    recording: Sequence[Sample],
    judging: Sequence[Sample],
    share: float,
    progress: Progress,
) -> Comparison:
    """All ways on the same samples; what dynamic selection uses is recorded on others."""
    anatomy = subject.anatomy
    spotter = Picks.joined(in_pieces(subject, partial(picks, share=share), recording, lambda done: progress(done / 3)))
    per_layer = tuple(spotter.kept[layer.index] for layer in anatomy.attention_layers)
    use = Use(anatomy.heads, spotter.all_heads("prefill", "decode"), spotter.all_heads("decode"), per_layer)
    ways_to_try = [("all heads", f"{len(use.heads)} of {len(use.heads)}", [NONE]), *_ways(ranking, use, share, anatomy)]
    acts = [act for _, _, some in ways_to_try for act in some]
    right = correct(subject, judging, acts, lambda done: progress(1 / 3 + 2 * done / 3))
    groups, ways, start = clusters(judging), [], 0
    for name, kept, some in ways_to_try:
        rows = right[start : start + len(some)]
        start += len(some)
        ways.append(Way(name, kept, _share(rows, groups), retained(rows.mean(0), right[0], groups)))
    return Comparison(share, per_layer, tuple(ways), use.shares(), use.sizes())


def _ways(ranking: Ranking, use: Use, share: float, anatomy: Anatomy) -> list[tuple[str, str, list[Any]]]:
    """Name, heads kept in words, and interventions: of a random way several."""
    total, every, by = sum(use.per_layer), len(use.heads), ranking.method or "the ranking"
    same = f"{total} of {every}, " + "+".join(map(str, use.per_layer))
    ever, answering = use.union(use.anywhere), use.union(use.answering)
    seeds = range(RANDOM_SEEDS)
    return [
        ("dynamic: entropy", same, [_keep(share)]),
        ("dynamic: entropy beside the first token", same, [_keep(share, sinks=1)]),
        (f"static: {by}", same, [_keep(share, by=ranking)]),
        (f"static: {by}, in whichever layers", f"{total} of {every}", [keeping(ranking.top(total), anatomy)]),
        ("static: most picked while answering", same, [_keep(share, by=use.ranking(use.answering))]),
        ("static: most picked anywhere", same, [_keep(share, by=use.ranking(use.anywhere))]),
        ("static: all picked while answering", f"{len(answering)} of {every}", [keeping(answering, anatomy)]),
        ("static: all picked anywhere", f"{len(ever)} of {every}", [keeping(ever, anatomy)]),
        ("static: random", same, [_keep(share, by="random", draw="trial", seed=seed) for seed in seeds]),
        ("dynamic: random", same, [_keep(share, by="random", seed=seed) for seed in seeds]),
    ]


def _keep(share: float, **how: Any) -> KeepHeads:
    return KeepHeads(**{"fraction": share, **how})


def _share(rows: np.ndarray, groups: Sequence[str]) -> Estimate:
    return accuracy(rows[0]) if len(rows) == 1 else mean(rows.mean(0), groups)
