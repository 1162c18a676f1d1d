"""The decode loop: each step feeds one token per row; finished rows leave the batch and new ones join."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from needlework.model.hooked_model import HookedModel, Rows
from needlework.model.memory import Memory
from needlework.receipts import Receipt, Tally
from needlework.requests import Answer, Finish, Prepared

NOT_FINITE = "the logits are not finite"


@dataclass
class Track:
    """The state of one request while it decodes."""

    index: int  # of the request
    prepared: Prepared
    receipt: Receipt = field(default_factory=Receipt)  # counts of what was done to it so far
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    finish: Finish | None = None
    error: str = ""
    steps: int = field(init=False)  # copied from the request, so that it is not computed at every token
    stop: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        request = self.prepared.request
        self.steps, self.stop = request.steps, frozenset() if request.forced else frozenset(request.stop)

    def take(self, token: int, logprob: float, margin: float, finite: bool) -> None:
        """Record one step, and finish if it is the last one or not finite."""
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
    """A batch of rows that decode in lockstep; finished rows leave, and others may join where the cache allows it."""

    def __init__(self, body: HookedModel, tracks: Sequence[Track], memory: Memory, tokens: Tensor, positions: Tensor) -> None:
        self.body, self.tracks, self.memory = body, list(tracks), memory
        self.tokens, self.positions = tokens, positions  # [rows] next input token and its position
        slots = torch.arange(len(self.tracks), device=body.device)
        acts = [track.prepared.acts["decode"] for track in self.tracks]
        self.rows: Rows = body.compile(acts, [track.prepared.sample for track in self.tracks], "decode", slots)
        self.tally = Tally(len(self.tracks))
        self.begin_observation()

    def __len__(self) -> int:
        return len(self.rows.slots)

    def begin_observation(self) -> None:
        """Tell the observer, if there is one, which request each slot belongs to; again after any other batch was prefilled."""
        if self.body.observer is not None:
            self.body.observer.begin([track.prepared.request for track in self.tracks], self.body.device)

    def alive(self) -> list[Track]:
        return [self.tracks[i] for i in self.rows.slots.tolist()]

    def step(self) -> list[Track]:
        """Feed one token to every row and return the tracks that finished."""
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
        """Return both batches as one; counts so far are moved to the tracks' receipts, unless memory runs out before."""
        joined = Decoder(
            self.body,
            self.alive() + other.alive(),
            Memory.join([self.memory, other.memory]),
            torch.cat([self.tokens, other.tokens]),
            torch.cat([self.positions, other.positions]),
        )
        for decoder in (self, other):
            for slot, track in zip(decoder.rows.slots.tolist(), decoder.alive(), strict=True):
                track.receipt = track.receipt + decoder.tally.receipt(slot)
        return joined


def choose(logits: Tensor, tracks: Sequence[Track]) -> tuple[Tensor, Tensor]:
    """Choose the next token of every row (forced, or argmax) and record it in its track.

    Args:
        logits: [rows, vocabulary]

    Returns:
        Token ids [rows], and a boolean mask [rows] of the rows that continue.
    """
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


def first_bad_layer(body: HookedModel, track: Track) -> str:
    """Replay a failed request and return the path of the first layer whose output is not finite. Needs an open session."""
    bad: list[str] = []

    def watch(path: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            if isinstance(hidden, Tensor) and not bool(hidden.isfinite().all()) and not bad:
                bad.append(path)

        return hook

    parents = {path.rpartition(".")[0] for path, m in body.model.named_modules() if isinstance(m, nn.Module)}
    lists = [path for path, m in body.model.named_modules() if isinstance(m, nn.ModuleList) and path in parents]
    with ExitStack() as stack:
        for path, module in body.model.named_modules():
            if path.rpartition(".")[0] in lists or isinstance(module, nn.Embedding):
                stack.callback(module.register_forward_hook(watch(path)).remove)
        _replay(body, track)
    return bad[0] if bad else "none of them (the output head)"


def _replay(body: HookedModel, track: Track) -> None:
    """Run a request's prompt and generated tokens again, alone."""
    item = track.prepared
    ids = torch.tensor([[*item.request.prompt, *track.tokens]], device=body.device)
    slot, memory, tally = torch.zeros(1, dtype=torch.int64, device=body.device), body.new_memory(1), Tally(1)
    split = item.prefill_tokens
    if split:
        rows = body.compile([item.acts["prefill"]], [item.sample], "prefill", slot)
        body.feed(ids[:, :split], memory, "prefill", rows, tally)
    rows = body.compile([item.acts["decode"]], [item.sample], "decode", slot)
    for t in range(split, ids.shape[1]):
        body.feed(ids[:, t : t + 1], memory, "decode", rows, tally)
