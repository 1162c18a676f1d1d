"""Prefill: reading prompts once, together where they have one length, and from shared stems where that saves work."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from needlework.engine.stems import Stem, find_stems
from needlework.model.body import Body
from needlework.model.memory import Memory
from needlework.receipts import Receipt, Tally
from needlework.requests import Prepared

_FORWARD_FLOPS = {"cpu": 6e7, "cuda": 2e11}  # what a device could have computed in the fixed time that a forward takes


@dataclass(frozen=True)
class Reading:
    """A prompt, or its beginning, to be read under one request's prefill acts."""

    item: Prepared
    tokens: tuple[int, ...]

    @property
    def key(self) -> tuple[object, ...]:
        return (self.tokens, *self.item.group[1:])


def readings_of(item: Prepared) -> dict[str, Reading]:
    """What a request needs read: its own prompt, and the twin that a half of its memory comes from."""
    tokens = item.prefill_tokens
    found = {"own": Reading(item, item.request.prompt[:tokens])}
    return found | {half: Reading(item, twin[:tokens]) for half, twin in item.twins.items()}


@dataclass
class Read:
    """Readings of one length that are done: row i of the memory belongs to reading i."""

    memory: Memory
    logits: Tensor  # [readings, vocabulary] after the last token
    receipts: list[Receipt]


class Reader:
    """Reads prompts for the engine. Stems are kept for as long as somebody will still start from them."""

    def __init__(self, body: Body) -> None:
        self.body = body
        self.prompts_read = self.tokens_read = self.tokens_asked = 0
        self._stems: dict[tuple[object, ...], Stem] = {}  # reading -> stem that it starts from
        self._kept: dict[int, tuple[Memory, Receipt]] = {}  # id of a stem -> what reading it left
        self._waiting: dict[int, int] = {}

    def expect(self, readings: Sequence[Reading]) -> None:
        """Announce all readings to come, so that shared beginnings are found before anything is read."""
        if not self.body.continues:
            return
        overhead = _FORWARD_FLOPS.get(self.body.device.type, 1e9) / (2 * self.body.anatomy.parameters)
        by_acts: dict[tuple[object, ...], dict[tuple[object, ...], Reading]] = defaultdict(dict)
        for reading in (reading for reading in readings if not reading.item.one_piece):
            by_acts[reading.item.group[1:]][reading.key] = reading
        for some in by_acts.values():
            stems = find_stems([reading.tokens for reading in some.values()], overhead)
            for key, stem in zip(some, stems, strict=True):
                if stem is not None:
                    self._stems[key] = stem
        for stem in {id(stem): stem for stem in self._stems.values()}.values():
            ancestor: Stem | None = stem
            while ancestor is not None and id(ancestor) not in self._waiting:
                self._waiting[id(ancestor)] = ancestor.readers
                ancestor = ancestor.parent

    def read(self, readings: Sequence[Reading]) -> Read:
        """Read prompts of one length, each under its own acts."""
        parts: dict[int, list[int]] = defaultdict(list)  # tokens already read -> readings
        for i, reading in enumerate(readings):
            stem = self._stems.get(reading.key)
            parts[len(stem.tokens) if stem else 0].append(i)
        done = [(members, self._continue([readings[i] for i in members])) for members in parts.values()]
        self.prompts_read += len(readings)
        self.tokens_asked += sum(len(reading.tokens) for reading in readings)
        if len(done) == 1:
            return done[0][1]
        order = torch.tensor([i for members, _ in done for i in members], device=self.body.device).argsort()
        receipts = [receipt for _, read in done for receipt in read.receipts]
        return Read(
            Memory.join([read.memory for _, read in done]).select(order),
            torch.cat([read.logits for _, read in done])[order],
            [receipts[i] for i in order.tolist()],
        )

    def _continue(self, readings: Sequence[Reading]) -> Read:
        """Readings that have as many tokens behind them, in one batch."""
        starts = [self._start(self._stems.get(reading.key), reading.item) for reading in readings]
        memories = [memory for memory, _ in starts if memory is not None]
        memory = Memory.join(memories) if memories else self.body.new_memory(len(readings))
        fresh = self._feed(readings, memory)
        return Read(fresh.memory, fresh.logits, [a + b for (_, a), b in zip(starts, fresh.receipts, strict=True)])

    def _feed(self, readings: Sequence[Reading], memory: Memory) -> Read:
        body, rest = self.body, [reading.tokens[memory.length :] for reading in readings]
        ids = torch.tensor(rest, device=body.device)
        slots = torch.arange(len(readings), device=body.device)
        items = [reading.item for reading in readings]
        rows = body.compile([x.acts["prefill"] for x in items], [x.sample for x in items], "prefill", slots)
        if body.observer is not None:
            body.observer.begin([x.request for x in items], body.device)
        tally = Tally(len(readings))
        logits = body.feed(ids, memory, "prefill", rows, tally)[:, 0]
        self.tokens_read += ids.numel()
        return Read(memory, logits, [tally.receipt(i) for i in range(len(readings))])

    def _start(self, stem: Stem | None, item: Prepared) -> tuple[Memory | None, Receipt]:
        """A memory of the stem that may be written to, and what reading it did."""
        if stem is None:
            return None, Receipt()
        if id(stem) not in self._kept:
            before, receipt = self._start(stem.parent, item)
            memory = before if before is not None else self.body.new_memory(1)
            read = self._feed([Reading(item, stem.tokens)], memory)
            self._kept[id(stem)] = (read.memory, receipt + read.receipts[0])
        memory, receipt = self._kept[id(stem)]
        self._waiting[id(stem)] -= 1
        if self._waiting[id(stem)] > 0:
            memory = memory.select(torch.zeros(1, dtype=torch.int64, device=self.body.device))
        else:  # the last reader may have the memory itself
            del self._kept[id(stem)]
        return memory, receipt


def group(items: Sequence[Prepared]) -> tuple[list[Reading], list[Mapping[str, int]]]:
    """The distinct readings that requests of one length need, and for each request the places of its own among them."""
    place: dict[tuple[object, ...], int] = {}
    readings: list[Reading] = []
    homes: list[Mapping[str, int]] = []
    for item in items:
        mine = {}
        for name, reading in readings_of(item).items():
            if reading.key not in place:
                place[reading.key] = len(readings)
                readings.append(reading)
            mine[name] = place[reading.key]
        homes.append(mine)
    return readings, homes
