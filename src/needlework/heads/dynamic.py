"""Static or dynamic: are heads that are chosen anew at every token better than a fixed set of as many?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from needlework.anatomy import heads_of_share
from needlework.errors import NeedleworkError
from needlework.heads.causal import keeping
from needlework.heads.judging import mean
from needlework.heads.looking import Spotter, entropy, watching
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


def picks(subject: Subject, samples: Sequence[Sample], share: float, progress: Progress) -> Picks:
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


def compare(
    subject: Subject,
    ranking: Ranking,
    recording: Sequence[Sample],
    judging: Sequence[Sample],
    share: float,
    progress: Progress,
) -> Comparison:
    """All ways on the same samples; what dynamic selection uses is recorded on others."""
    if not 0 < share <= 1:
        raise NeedleworkError(f"share={share} of the heads must lie above 0 and be at most 1")
    heads, anatomy = subject.anatomy.heads, subject.anatomy
    spotter = picks(subject, recording, share, lambda done: progress(done / 3))
    in_all, in_decode = spotter.all_heads("prefill", "decode"), spotter.all_heads("decode")
    union = tuple(head for head, count in zip(heads, in_decode.sum(0), strict=True) if count)
    anywhere = tuple(head for head, count in zip(heads, in_all.sum(0), strict=True) if count)
    use = Ranking.by_scores({head: float(n) for head, n in zip(heads, in_all.sum(0), strict=True)}, method="use")
    each_layer = tuple(spotter.kept[layer.index] for layer in anatomy.attention_layers)
    same = f"{sum(each_layer)} of {len(heads)}, " + "+".join(map(str, each_layer))
    plan: list[tuple[str, str, list[Any]]] = [
        ("dynamic: entropy", same, [_keep(share)]),
        ("dynamic: entropy beside the first token", same, [_keep(share, sinks=1)]),
        (f"static: {ranking.method}", same, [_keep(share, by=ranking)]),
        (
            f"static: {ranking.method}, in whichever layers",
            f"{sum(each_layer)} of {len(heads)}",
            [keeping(ranking.top(sum(each_layer)), anatomy)],
        ),
        ("static: most picked by entropy", same, [_keep(share, by=use)]),
        ("static: all picked while answering", f"{len(union)} of {len(heads)}", [keeping(union, anatomy)]),
        ("static: all picked anywhere", f"{len(anywhere)} of {len(heads)}", [keeping(anywhere, anatomy)]),
        (
            "static: random",
            same,
            [_keep(share, by="random", draw="trial", seed=seed) for seed in range(RANDOM_SEEDS)],
        ),
        ("dynamic: random", same, [_keep(share, by="random", seed=seed) for seed in range(RANDOM_SEEDS)]),
    ]
    acts = [NONE, *(act for _, _, some in plan for act in some)]
    right = correct(subject, judging, acts, lambda done: progress(1 / 3 + 2 * done / 3))
    groups, start = clusters(judging), 1
    ways = [Way("all heads", f"{len(heads)} of {len(heads)}", accuracy(right[0]), retained(right[0], right[0], groups))]
    for name, kept, some in plan:
        rows = right[start : start + len(some)]
        start += len(some)
        ways.append(Way(name, kept, _share(rows, groups), retained(rows.mean(0), right[0], groups)))
    total = in_all.sum(1, keepdims=True) / max(1, sum(each_layer))  # tokens of each sample
    shares = (in_all / np.maximum(total, 1)).mean(0)
    picked = {f"{h.layer}.{h.index}": float(s) for h, s in zip(heads, shares, strict=True)}
    sizes = {
        "answering": len(union),
        "answering_one_sample": float((in_decode > 0).sum(1).mean()),
        "anywhere": len(anywhere),
    }
    return Comparison(share, each_layer, tuple(ways), picked, sizes)


def _keep(share: float, **how: Any) -> KeepHeads:
    return KeepHeads(**{"fraction": share, **how})


def _share(rows: np.ndarray, groups: Sequence[str]) -> Estimate:
    return accuracy(rows[0]) if len(rows) == 1 else mean(rows.mean(0), groups)
