"""The decode loop: many trials take one token each per step; finished rows leave, others join."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from needlework.model.body import Body, Rows
from needlework.model.memory import Memory
from needlework.receipts import Receipt, Tally
from needlework.requests import Answer, Finish, Prepared

NOT_FINITE = "the logits are not finite"


@dataclass
class Track:
    """One trial while it decodes."""

    index: int  # of the request
    prepared: Prepared
    receipt: Receipt = field(default_factory=Receipt)  # what has been done to it so far
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    finish: Finish | None = None
    error: str = ""
    steps: int = field(init=False)  # asked of its request once, not at every token
    stop: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        request = self.prepared.request
        self.steps, self.stop = request.steps, frozenset() if request.forced else frozenset(request.stop)

    def take(self, token: int, logprob: float, margin: float, finite: bool) -> None:
        """Write one step down."""
        if not finite:
            self.finish, self.error = "failed", NOT_FINITE
            return
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.margins.append(margin)
        if token in self.stop:
            self.finish = "stop"
        elif len(self.tokens) >= self.steps:
            self.finish = "length"

    def answer(self) -> Answer:
        assert self.finish is not None
        receipt = replace(self.receipt, notes=self.prepared.notes(self.receipt))
        error = self.error or self.prepared.failure(receipt)
        finish: Finish = "failed" if error else self.finish
        return Answer(
            tuple(self.tokens),
            tuple(self.logprobs),
            tuple(self.margins),
            receipt,
            finish,  # type: ignore[arg-type]
            error,
        )


class Decoder:
    """A batch of rows that move together; finished rows leave it, others may join where keys are shared."""

    def __init__(self, body: Body, tracks: Sequence[Track], memory: Memory, tokens: Tensor, positions: Tensor) -> None:
        self.body, self.tracks, self.memory = body, list(tracks), memory
        self.tokens, self.positions = tokens, positions  # [rows] what is fed next, and where it stands
        slots = torch.arange(len(self.tracks), device=body.device)
        acts = [track.prepared.acts["decode"] for track in self.tracks]
        self.rows: Rows = body.compile(acts, [track.prepared.sample for track in self.tracks], "decode", slots)
        self.tally = Tally(len(self.tracks))
        if body.observer is not None:
            body.observer.begin([track.prepared.request for track in self.tracks], body.device)

    def __len__(self) -> int:
        return len(self.rows.slots)

    def alive(self) -> list[Track]:
        return [self.tracks[i] for i in self.rows.slots.tolist()]

    def step(self) -> list[Track]:
        """Feed one token to every row; the trials that are finished now."""
        logits = self.body.feed(self.tokens[:, None], self.memory, "decode", self.rows, self.tally, self.positions[:, None])[
            :, 0
        ]  # [rows, vocabulary]
        self.positions = self.positions + 1
        alive = self.alive()
        self.tokens, going = choose(logits, alive)
        if self.body.observer is not None:
            self.body.observer.chose(self.rows.slots, self.tokens)
        if bool(going.all()):
            return []
        for slot, track in zip(self.rows.slots.tolist(), alive, strict=True):
            if track.finish:
                track.receipt = track.receipt + self.tally.receipt(slot)
        self._keep(going.nonzero()[:, 0])
        return [track for track in alive if track.finish]

    def _keep(self, rows: Tensor) -> None:
        self.tokens, self.positions, self.rows = self.tokens[rows], self.positions[rows], self.rows.select(rows)
        if len(rows):
            self.memory = self.memory.select(rows)

    def join(self, other: Decoder) -> Decoder:
        """Both batches as one. What was counted so far is written to the tracks."""
        for decoder in (self, other):
            for slot, track in zip(decoder.rows.slots.tolist(), decoder.alive(), strict=True):
                track.receipt = track.receipt + decoder.tally.receipt(slot)
        return Decoder(
            self.body,
            self.alive() + other.alive(),
            Memory.join([self.memory, other.memory]),
            torch.cat([self.tokens, other.tokens]),
            torch.cat([self.positions, other.positions]),
        )


def choose(logits: Tensor, tracks: Sequence[Track]) -> tuple[Tensor, Tensor]:
    """The next token of every row, [rows], and whether the row goes on, [rows]."""
    finite = logits.isfinite().all(-1)
    top = logits.topk(2, -1).values if logits.shape[-1] > 1 else logits.expand(-1, 2)
    best = logits.argmax(-1)
    forced = [t.prepared.request.forced for t in tracks]
    if any(forced):
        known = [f[len(t.tokens)] if f else -1 for f, t in zip(forced, tracks, strict=True)]
        wanted = torch.tensor(known, device=logits.device)
        best = torch.where(wanted >= 0, wanted, best)
    logprob = logits.gather(-1, best[:, None])[:, 0] - logits.logsumexp(-1)
    columns = (best.tolist(), logprob.tolist(), (top[:, 0] - top[:, 1]).tolist(), finite.tolist())
    for track, token, log, margin, good in zip(tracks, *columns, strict=True):
        track.take(token, log, margin, good)
    return best, torch.tensor([not track.finish for track in tracks], device=logits.device)
