"""Watching attention without changing it: sums over every head, or the attention patterns themselves.

What is seen is what the model computed: after `limit_context`, before columns are rewritten and heads are silenced.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from needlework.anatomy import Head
from needlework.errors import NeedleworkError
from needlework.interventions.acts import Phase
from needlework.model.attention import Block, Forward
from needlework.requests import Request

if TYPE_CHECKING:
    from needlework.subject import Subject


@dataclass(frozen=True)
class HeadRow:
    """What one head did in one phase, averaged over the queries that were seen."""

    layer: int
    head: int
    phase: Phase
    queries: int
    needle_mass: float  # attention on the span
    entropy: float  # nats
    copy_score: float  # share of copied span tokens for which the head looked exactly at the token being generated
    copied: int  # how many generated tokens occur in the span
    sink_mass: float  # attention on the first token
    sink_mass_of_best: float  # of its layer's heads of least entropy, as many as its index + 1, chosen query by query


@dataclass(frozen=True)
class PatternBlock:
    """Attention of some queries of some rows in one layer, as it streams by: to be read, not to be written to."""

    layer: int
    phase: Phase
    samples: tuple[int, ...]  # of each row: `nw.sample_key(prompt)`, or what the request names
    q_positions: Tensor  # [rows, queries]
    k_positions: Tensor  # [rows, keys]; -1 where a row has no such key
    weights: Tensor  # [rows, heads, queries, keys], exactly 0 where a key is hidden
    visible: Tensor | None  # [rows or 1, 1 or heads, queries, keys]; None: every key is


@dataclass(frozen=True)
class Pattern:
    """Where one head looked from one token."""

    layer: int
    head: int
    phase: Phase
    sample: int
    position: int
    keys: Tensor  # [keys] positions of the keys that the query could see
    weights: Tensor  # [keys] they sum to 1


class Watch:
    """Sums over all that is asked while it is open. No [heads, queries, keys] tensor outlives its block."""

    def __init__(self, span: str, hand_over: Callable[[PatternBlock], object] | None = None) -> None:
        self.span = span
        self.patterns: list[Pattern] = []
        self._hand_over = hand_over
        self.each_sample = hand_over is not None
        self._samples: list[int] = []  # by slot
        self._sums: dict[tuple[int, Phase], Tensor] = {}  # [5, heads]: mass, entropy, copies, sinks, sinks of the best
        self._queries: dict[tuple[int, Phase], int] = {}
        self._copied = 0
        self._looked: dict[int, Tensor] = {}  # layer -> position that each row's heads look at most, this step
        self._tokens = self._needle = torch.empty(0, 0)

    def begin(self, requests: Sequence[Request], device: torch.device) -> None:
        """A new batch: slot i of its forwards belongs to request i."""
        self._samples = [request.key for request in requests]
        longest = max(len(request.prompt) for request in requests)
        self._tokens = torch.full((len(requests), longest), -1, device=device)
        self._needle = torch.zeros(len(requests), longest, dtype=torch.bool, device=device)
        for slot, request in enumerate(requests):
            self._tokens[slot, : len(request.prompt)] = torch.tensor(request.prompt, device=device)
            for start, end in request.spans.get(self.span, ()):
                self._needle[slot, start:end] = True

    def see(self, forward: Forward, layer: int, block: Block, probabilities: Tensor) -> None:
        if self._hand_over is not None:
            samples = tuple(self._samples[slot] for slot in forward.slots.tolist())
            positions = (block.q_positions, block.k_positions)
            self._hand_over(PatternBlock(layer, forward.phase, samples, *positions, probabilities, block.visible))
        rows, heads, queries, _ = probabilities.shape
        k = block.k_positions.clamp(0, self._needle.shape[1] - 1)
        inside = (block.k_positions >= 0) & (block.k_positions < self._needle.shape[1])
        columns = self._needle[forward.slots].gather(1, k) & inside  # [rows, keys]
        key = (layer, forward.phase)
        if key not in self._sums:
            self._sums[key] = torch.zeros(5, heads, dtype=torch.float64, device=probabilities.device)
            self._queries[key] = 0
        mass = (probabilities * columns[:, None, None]).sum(-1).sum((0, 2))
        entropy = -torch.special.xlogy(probabilities, probabilities).sum(-1)  # [rows, heads, queries]
        sink = (probabilities * (block.k_positions == 0)[:, None, None]).sum(-1)
        best = sink.gather(1, entropy.argsort(dim=1, stable=True)).cumsum(1)
        self._sums[key][0] += mass
        self._sums[key][1] += entropy.sum((0, 2))
        self._sums[key][3] += sink.sum((0, 2))
        self._sums[key][4] += best.sum((0, 2)) / torch.arange(1, heads + 1, device=best.device)
        self._queries[key] += rows * queries
        if forward.phase == "decode":
            most = probabilities[:, :, -1].argmax(-1)  # [rows, heads]
            self._looked[layer] = block.k_positions.gather(1, most)

    def chose(self, slots: Tensor, tokens: Tensor) -> None:
        """The tokens that this decode step produced, one a row: did a head look at the needle token being copied?"""
        known, needle = self._tokens[slots], self._needle[slots]
        copied = ((known == tokens[:, None]) & needle).any(1)  # [rows]
        self._copied += int(copied.sum())
        for layer, looked in self._looked.items():
            at = looked.clamp(0, known.shape[1] - 1)
            hit = (known.gather(1, at) == tokens[:, None]) & needle.gather(1, at) & (looked == at) & copied[:, None]
            self._sums[layer, "decode"][2] += hit.sum(0)
        self._looked.clear()

    def table(self, phase: Phase = "decode") -> list[HeadRow]:
        """One row for each head, in order."""
        rows = []
        for (layer, when), sums in sorted(self._sums.items()):
            if when != phase:
                continue
            count = self._queries[layer, when]
            for head, (mass, entropy, copies, sink, best) in enumerate(sums.T.tolist()):
                share = copies / self._copied if self._copied and when == "decode" else 0.0
                means = (mass / count, entropy / count, share, self._copied, sink / count, best / count)
                rows.append(HeadRow(layer, head, when, count, *means))
        return rows

    def keep(self, block: PatternBlock, heads: Collection[Head], positions: Collection[int] | None) -> None:
        """Add the patterns of these heads at these positions (None: at all)."""
        chosen = [head.index for head in heads if head.layer == block.layer]
        for row, sample in enumerate(block.samples if chosen else ()):
            for q, position in enumerate(block.q_positions[row].tolist()):
                if positions is not None and position not in positions:
                    continue
                keys, weights = block.k_positions[row], block.weights[row, chosen, q]
                if block.visible is not None:
                    seen = block.visible[row % block.visible.shape[0], :, q].any(0)  # by any head
                    keys, weights = keys[seen], weights[:, seen]
                for head, of_head in zip(chosen, weights.cpu(), strict=True):
                    self.patterns.append(Pattern(block.layer, head, block.phase, sample, position, keys.cpu(), of_head))


@contextmanager
def observe(
    subject: Subject,
    span: str = "needle",
    *,
    patterns: bool | Callable[[PatternBlock], object] = False,
    heads: Collection[tuple[int, int]] | None = None,
    positions: Collection[int] | None = None,
) -> Iterator[Watch]:
    """Watch everything that the subject is asked inside the `with` block.

    `patterns=True` keeps the attention patterns of `heads` (layer, index) at the query positions `positions`, by default of all
    at all. `patterns=function` calls it with every `PatternBlock` and keeps nothing.
    """
    if (heads is not None or positions is not None) and patterns is not True:
        raise NeedleworkError("observe: heads and positions choose which patterns are kept: they go with patterns=True")
    chosen = [Head(*pair) for pair in heads] if heads is not None else subject.anatomy.heads
    if unknown := sorted(set(chosen) - set(subject.anatomy.heads)):
        raise NeedleworkError(
            f"observe: {subject.anatomy.architecture} has no heads {[tuple(head) for head in unknown]}; attention layers are"
            f" {[layer.index for layer in subject.anatomy.attention_layers]}, `needlework inspect` shows their heads"
        )
    if positions is not None and min(positions, default=0) < 0:
        raise NeedleworkError(f"observe: positions={positions!r} must count from 0, the first token of the prompt")
    if callable(patterns):
        watch = Watch(span, patterns)
    else:
        watch = Watch(span, (lambda block: watch.keep(block, chosen, positions)) if patterns else None)
    before, subject.body.observer = subject.body.observer, watch
    try:
        yield watch
    finally:
        subject.body.observer = before
