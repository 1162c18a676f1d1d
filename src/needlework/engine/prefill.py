"""Prefill: every distinct prompt is read once, and what several prompts begin with is read once for all.

A common beginning is called a stem. Stems are found with a prefix tree, which is pruned by what each branch would cost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

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
    own = {"own": Reading(item, item.request.prompt[:tokens])}
    return own | {half: Reading(item, twin[:tokens]) for half, twin in item.twins.items()}


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
        for alike in by_acts.values():
            stems = find_stems([reading.tokens for reading in alike.values()], overhead)
            for key, stem in zip(alike, stems, strict=True):
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
    """The distinct readings that requests of one length need, and for each request the places among them of those it needs."""
    place_of: dict[tuple[object, ...], int] = {}
    readings: list[Reading] = []
    places: list[Mapping[str, int]] = []
    for item in items:
        place = {}
        for name, reading in readings_of(item).items():
            if reading.key not in place_of:
                place_of[reading.key] = len(readings)
                readings.append(reading)
            place[name] = place_of[reading.key]
        places.append(place)
    return readings, places


@dataclass
class Stem:
    """A beginning that several prompts share. Its parent is a shorter stem that it continues."""

    tokens: tuple[int, ...]
    parent: Stem | None = None
    readers: int = 0  # prompts and stems that continue right here
    children: list[Stem] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)

    @property
    def new_tokens(self) -> int:
        return len(self.tokens) - (len(self.parent.tokens) if self.parent else 0)


def find_stems(prompts: Sequence[tuple[int, ...]], overhead_tokens: float) -> list[Stem | None]:
    """For each prompt the longest stem worth starting from. A stem leaves every reader at least one token to read.

    Reading a stem apart costs forwards of its own, and prompts that start from different stems cannot be read in one
    batch: `overhead_tokens` is what one more forward costs, in tokens.
    """
    if len(prompts) < 2:
        return [None] * len(prompts)
    root = _tree(prompts)
    _prune(root, overhead_tokens)
    stems: list[Stem | None] = [None] * len(prompts)
    _assign(root, stems)
    return stems


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Length of the common beginning, short of the last token of either."""
    low, high = 0, min(len(a), len(b)) - 1
    if high <= 0:
        return 0
    while low < high:  # compare halves at C speed instead of token by token
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _tree(prompts: Sequence[tuple[int, ...]]) -> Stem:
    """Neighbours in sorted order share the most, so one pass with a stack finds every branching point."""
    order = sorted(range(len(prompts)), key=prompts.__getitem__)
    root = Stem(())
    stack = [root]
    for place, i in enumerate(order):
        before = _common(prompts[order[place - 1]], prompts[i]) if place else 0
        after = _common(prompts[i], prompts[order[place + 1]]) if place + 1 < len(order) else 0
        closed = None
        while len(stack[-1].tokens) > before:
            closed = stack.pop()
        if closed is not None and len(stack[-1].tokens) < before:  # a branching point inside the stem just closed
            between = Stem(prompts[i][:before], stack[-1], children=[closed])
            stack[-1].children[-1] = between
            closed.parent = between
            stack.append(between)
        if after > len(stack[-1].tokens):
            stem = Stem(prompts[i][:after], stack[-1])
            stack[-1].children.append(stem)
            stack.append(stem)
        stack[-1].prompts.append(i)
    return root


def _prune(stem: Stem, overhead_tokens: float) -> None:
    """Dissolve stems that save less than they cost, from the leaves up."""
    for child in list(stem.children):
        _prune(child, overhead_tokens)
        readers = len(child.children) + len(child.prompts)
        saved = (readers - 1) * child.new_tokens
        if saved <= overhead_tokens * readers:
            stem.children.remove(child)
            stem.children += child.children
            stem.prompts += child.prompts
            for grandchild in child.children:
                grandchild.parent = stem


def _assign(stem: Stem, stems: list[Stem | None]) -> None:
    stem.readers = len(stem.children) + len(stem.prompts)
    for i in stem.prompts:
        stems[i] = stem if stem.tokens else None
    for child in stem.children:
        if stem.parent is None and not stem.tokens:
            child.parent = None
        _assign(child, stems)
