"""Many trials decoding together: the only decode loop there is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from needlework.receipts import Receipt, Tally
from needlework.requests import Answer, Prepared
from needlework.subjects.body import Body, Rows
from needlework.subjects.state import Memory


@dataclass
class Track:
    """One trial while it decodes."""

    index: int  # of the request
    prepared: Prepared
    prefill: Receipt
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    finish: str = ""
    error: str = ""

    def take(self, best: int, logprob: float, margin: float, finite: bool) -> int:
        """Write one step down; the token that is fed next."""
        step = len(self.tokens)
        request = self.prepared.request
        if not finite:
            self.finish, self.error = "failed", f"the logits of step {step} are not finite"
            return best
        self.tokens.append(best)
        self.logprobs.append(logprob)
        self.margins.append(margin)
        if not request.forced and best in request.stop:
            self.finish = "stop"
        elif step + 1 >= self.prepared.steps:
            self.finish = "length"
        return best

    def answer(self, receipt: Receipt) -> Answer:
        counts = {**self.prefill.counts, **receipt.counts}
        merged = Receipt(counts, tuple(swap.half for swap in self.prepared.swaps))
        merged = Receipt(counts, merged.swapped, self.prepared.notes(merged))
        error = self.error or self.prepared.failure(merged)
        finish = "failed" if error else self.finish
        return Answer(
            tuple(self.tokens), tuple(self.logprobs), tuple(self.margins), merged, finish, error  # type: ignore[arg-type]
        )


class Decoder:
    """A batch of rows that move together; finished rows leave it, new ones may join where keys are shared."""

    def __init__(self, body: Body, tracks: list[Track], memory: Memory, tokens: Tensor, positions: Tensor) -> None:
        self.body, self.tracks, self.memory = body, tracks, memory
        self.tokens, self.positions = tokens, positions  # [rows] what is fed next, and where it stands
        self._compile()

    def _compile(self) -> None:
        self.tally = Tally(len(self.tracks))
        slots = torch.arange(len(self.tracks), device=self.body.device)
        acts = [track.prepared.acts["decode"] for track in self.tracks]
        samples = [track.prepared.sample for track in self.tracks]
        self.rows: Rows = self.body.compile(acts, samples, "decode", slots)
        self.alive = slots
        self.logits: Tensor | None = None

    def __len__(self) -> int:
        return len(self.alive)

    def step(self) -> list[tuple[int, Answer]]:
        """Feed one token to every row; the trials that are finished now."""
        feed = self.body.feed
        logits = feed(
            self.tokens[:, None], self.memory, "decode", self.rows, self.tally, self.positions[:, None]
        )[:, 0]  # [rows, vocabulary]
        self.logits = logits
        self.positions = self.positions + 1
        self.tokens, going = choose(logits, [self.tracks[i] for i in self.alive.tolist()])
        return self._retire(going)

    def _retire(self, going: Tensor) -> list[tuple[int, Answer]]:
        if bool(going.all()):
            return []
        done = self.alive[~going].tolist()
        rows = going.nonzero()[:, 0]
        self.alive, self.tokens, self.positions = self.alive[rows], self.tokens[rows], self.positions[rows]
        if len(rows):
            self.memory, self.rows = self.memory.select(rows), self.rows.select(rows)
        return [(self.tracks[i].index, self.tracks[i].answer(self.tally.receipt(i))) for i in done]


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
    for track, *step in zip(tracks, *columns, strict=True):
        track.take(*step)
    return best, torch.tensor([not track.finish for track in tracks], device=logits.device)
