"""Watching attention without changing it: mass on a span, entropy and copy score of every head, summed as they stream by."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

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


class Watch:
    """Sums over everything that is generated while it is open. No [heads, queries, keys] tensor outlives its block."""

    def __init__(self, span: str) -> None:
        self.span = span
        self.samples = 0
        self._sums: dict[tuple[int, Phase], Tensor] = {}  # [3, heads]: mass, entropy, copies
        self._queries: dict[tuple[int, Phase], int] = {}
        self._copied = 0
        self._looked: dict[int, Tensor] = {}  # layer -> position that each row's heads look at most, this step
        self._tokens = self._needle = torch.empty(0, 0)

    def begin(self, requests: Sequence[Request], phase: Phase, device: torch.device) -> None:
        """A new batch: slot i of its forwards belongs to request i."""
        longest = max(len(request.prompt) for request in requests)
        self._tokens = torch.full((len(requests), longest), -1, device=device)
        self._needle = torch.zeros(len(requests), longest, dtype=torch.bool, device=device)
        for slot, request in enumerate(requests):
            self._tokens[slot, : len(request.prompt)] = torch.tensor(request.prompt, device=device)
            for start, end in request.spans.get(self.span, ()):
                self._needle[slot, start:end] = True
        self.samples += len(requests) if phase == "decode" else 0

    def see(self, forward: Forward, layer: int, block: Block, probabilities: Tensor) -> None:
        rows, heads, queries, _ = probabilities.shape
        k = block.k_positions.clamp(0, self._needle.shape[1] - 1)
        inside = (block.k_positions >= 0) & (block.k_positions < self._needle.shape[1])
        columns = self._needle[forward.slots].gather(1, k) & inside  # [rows, keys]
        key = (layer, forward.phase)
        if key not in self._sums:
            self._sums[key] = torch.zeros(3, heads, dtype=torch.float64, device=probabilities.device)
            self._queries[key] = 0
        mass = (probabilities * columns[:, None, None]).sum(-1).sum((0, 2))
        entropy = -torch.special.xlogy(probabilities, probabilities).sum(-1).sum((0, 2))
        self._sums[key][0] += mass
        self._sums[key][1] += entropy
        self._queries[key] += rows * queries
        if forward.phase == "decode":
            best = probabilities[:, :, -1].argmax(-1)  # [rows, heads]
            self._looked[layer] = block.k_positions.gather(1, best)

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
            for head, (mass, entropy, copies) in enumerate(sums.T.tolist()):
                share = copies / self._copied if self._copied and when == "decode" else 0.0
                rows.append(HeadRow(layer, head, when, count, mass / count, entropy / count, share, self._copied))
        return rows


@contextmanager
def observe(subject: Subject, span: str = "needle") -> Iterator[Watch]:
    """Watch everything that the subject generates inside the `with` block."""
    watch = Watch(span)
    before, subject.body.observer = subject.body.observer, watch
    try:
        yield watch
    finally:
        subject.body.observer = before
