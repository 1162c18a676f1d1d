"""Prefill once, fork the memory, decode every intervention in one batch.

Requests that agree on their prompt and on what is done to it in prefill share one prefill. Prompts of one length are
prefilled together; then each request gets a row of its own that reads the shared keys, and all rows decode as one batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from needlework.budget import Budget
from needlework.decoding import Decoder, Track, choose
from needlework.receipts import Receipt, Tally
from needlework.requests import Answer, Prepared, Request, prepare
from needlework.subjects.body import Body
from needlework.subjects.state import Memory


@dataclass
class Prefilled:
    """A batch of prompts that has been read."""

    memory: Memory
    logits: Tensor | None  # [groups, vocabulary] of the last token that was read
    receipts: list[Receipt]


class Engine:
    def __init__(self, body: Body, memory_bytes: int | None = None) -> None:
        self.body = body
        self.budget = Budget(body, memory_bytes)

    def run(self, requests: Sequence[Request]) -> Iterator[tuple[int, Answer]]:
        """Answers as they finish, with the index of their request."""
        prepared = [prepare(request, self.body.anatomy) for request in requests]
        for item in prepared:
            self.body.check_length(len(item.request.prompt) + item.steps)
        buckets: dict[tuple[int, str], list[int]] = defaultdict(list)
        for i, item in enumerate(prepared):
            buckets[item.prefill_tokens, item.request.boundary].append(i)
        with self.body.session():
            for _, members in sorted(buckets.items(), reverse=True):
                for batch in self.budget.batches(members, prepared):
                    yield from self._run_batch([(i, prepared[i]) for i in batch])

    def _run_batch(self, batch: Sequence[tuple[int, Prepared]]) -> Iterator[tuple[int, Answer]]:
        decoder, finished = self._start(batch)
        yield from finished
        while decoder is not None and len(decoder):
            yield from decoder.step()

    def _start(self, batch: Sequence[tuple[int, Prepared]]) -> tuple[Decoder | None, list[tuple[int, Answer]]]:
        """Prefill what the batch shares, fork it, and take the first token where prefill produces it."""
        groups: dict[tuple[object, ...], tuple[Prepared, tuple[int, ...]]] = {}
        homes: list[tuple[int, int]] = []  # row -> group of its keys, group of its recurrent state
        for _, item in batch:
            own = _enter(groups, item, item.request.prompt)
            twin = {half: _enter(groups, item, prompt) for half, prompt in item.twins.items()}
            homes.append((twin.get("kv", own), twin.get("recurrent", own)))
        tokens = batch[0][1].prefill_tokens
        tracks = [Track(i, item, Receipt()) for i, item in batch]
        if tokens == 0:
            memory, logits = self.body.new_memory(len(batch)), None
        else:
            prefilled = self.prefill([(item, prompt[:tokens]) for item, prompt in groups.values()])
            memory = self._fork(prefilled.memory, homes)
            own_group = [_enter(groups, item, item.request.prompt) for _, item in batch]
            for track, group in zip(tracks, own_group, strict=True):
                track.prefill = prefilled.receipts[group]
            logits = None if prefilled.logits is None else prefilled.logits[torch.tensor(own_group)]
        if batch[0][1].request.boundary == "decode":
            fed = torch.tensor([item.request.prompt[-1] for _, item in batch], device=self.body.device)
            return self._decoder(tracks, memory, fed, tokens), []
        assert logits is not None
        fed, going = choose(logits, tracks)
        done = [(t.index, t.answer(Receipt())) for t in tracks if t.finish]
        rows = going.nonzero()[:, 0]
        if not len(rows):
            return None, done
        memory = memory if bool(going.all()) else memory.select(rows)
        return self._decoder([t for t in tracks if not t.finish], memory, fed[rows], tokens), done

    def _decoder(self, tracks: list[Track], memory: Memory, fed: Tensor, position: int) -> Decoder:
        return Decoder(self.body, tracks, memory, fed, torch.full_like(fed, position))

    def _fork(self, memory: Memory, homes: list[tuple[int, int]]) -> Memory:
        kv = torch.tensor([a for a, _ in homes], device=self.body.device)
        recurrent = torch.tensor([b for _, b in homes], device=self.body.device)
        straight = torch.arange(memory.rows, device=self.body.device)
        if torch.equal(kv, straight) and torch.equal(recurrent, straight):
            return memory
        fork = memory.share if self.body.shareable and len(homes) > memory.rows else memory.select
        return fork(kv, recurrent)

    def prefill(self, groups: Sequence[tuple[Prepared, tuple[int, ...]]]) -> Prefilled:
        """Read prompts of one length, each under its own prefill acts."""
        ids = torch.tensor([prompt for _, prompt in groups], device=self.body.device)
        tally = Tally(len(groups))
        slots = torch.arange(len(groups), device=self.body.device)
        acts = [item.acts["prefill"] for item, _ in groups]
        rows = self.body.compile(acts, [item.sample for item, _ in groups], "prefill", slots)
        memory = self.body.new_memory(len(groups))
        logits = self.body.feed(ids, memory, "prefill", rows, tally)[:, 0]
        return Prefilled(memory, logits, [tally.receipt(i) for i in range(len(groups))])


def _enter(groups: dict[tuple[object, ...], tuple[Prepared, tuple[int, ...]]], item: Prepared, prompt: tuple[int, ...]) -> int:
    """The number of the group that reads this prompt as this request does; a new one if there is none yet."""
    key = (prompt[: item.prefill_tokens], *item.group[1:])
    if key not in groups:
        groups[key] = (item, prompt)
    return list(groups).index(key)
