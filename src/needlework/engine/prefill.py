"""Prefill: every distinct prompt is read once, and what several prompts begin with is read once for all.

A common beginning is called a stem. Stems are found with a prefix tree, which is pruned by what each branch would cost.
Readings of one prompt that begin to differ at some layer share the layers below it instead, where that saves more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from needlework.engine.depth import Depth
from needlework.engine.reading import Read, Reading, by_pieces, forward_tokens
from needlework.model.body import Body
from needlework.model.edits import keeps_from_sdpa
from needlework.model.memory import Memory
from needlework.receipts import Receipt, Tally
from needlework.requests import Prepared


class Reader:
    """Reads prompts for the engine. Stems are kept for as long as somebody will still start from them."""

    def __init__(self, body: Body, depth: Depth) -> None:
        self.body, self.depth = body, depth
        self.prompts_read = self.tokens_asked = 0
        self.tokens_read = 0.0  # each counted by the share of the model that it went through
        self._stems: dict[tuple[object, ...], Stem] = {}  # reading -> stem that it starts from
        self._kept: dict[int, tuple[Memory, Receipt]] = {}  # id of a stem -> what reading it left
        self._waiting: dict[int, int] = {}

    def expect(self, readings: Sequence[Reading]) -> None:
        """Announce all readings to come, so that shared beginnings are found before anything is read."""
        if not self.body.continues:
            return
        distinct = list({reading.key: reading for reading in readings}.values())
        deep = {distinct[i].key: share for i, share in self.depth.worthwhile(distinct).items()}
        by_acts: dict[tuple[object, ...], dict[tuple[object, ...], Reading]] = defaultdict(dict)
        for reading in (reading for reading in distinct if not reading.item.one_piece):
            by_acts[reading.item.group[1:]][reading.key] = reading
        for alike in by_acts.values():
            stems = find_stems([reading.tokens for reading in alike.values()], forward_tokens(self.body))
            saved_by_depth = sum(len(reading.tokens) * deep.get(key, 0.0) for key, reading in alike.items())
            if saved_by_depth < _saved(stems):
                self._stems |= {key: stem for key, stem in zip(alike, stems, strict=True) if stem is not None}
        for stem in {id(stem): stem for stem in self._stems.values()}.values():
            ancestor: Stem | None = stem
            while ancestor is not None and id(ancestor) not in self._waiting:
                self._waiting[id(ancestor)] = ancestor.readers
                ancestor = ancestor.parent

    def read(self, readings: Sequence[Reading], remember: bool = True) -> Read:
        """Read prompts of one length, each under its own acts. What nothing will go on from needs no memory."""
        done: list[tuple[list[int], Read]] = []
        whole = [i for i, reading in enumerate(readings) if reading.key not in self._stems]
        deep = self.depth.worthwhile([readings[i] for i in whole])
        together = {whole[i]: readings[whole[i]] for i in deep}
        if together:
            before = self.depth.whole_passes
            done += self.depth.read(together, remember)
            self.tokens_read += self.depth.whole_passes - before
        parts: dict[int, list[int]] = defaultdict(list)  # tokens already read -> readings
        for i, reading in enumerate(readings):
            if i not in together:
                stem = self._stems.get(reading.key)
                parts[len(stem.tokens) if stem else 0].append(i)
        for known, members in parts.items():
            # Rows that need attention probabilities stand together: they keep the others of their forward from SDPA.
            members.sort(key=lambda i: keeps_from_sdpa(readings[i].item.acts["prefill"]))
            for some in by_pieces(members, len(readings[0].tokens) - known, self.body):
                done.append((some, self._continue([readings[i] for i in some], remember)))
        self.prompts_read += len(readings)
        self.tokens_asked += sum(len(reading.tokens) for reading in readings)
        return _joined(done)

    def _continue(self, readings: Sequence[Reading], remember: bool) -> Read:
        """Readings that have as many tokens behind them, in one batch."""
        starts = [self._start(self._stems.get(reading.key), reading.item) for reading in readings]
        memories = [memory for memory, _ in starts if memory is not None]
        memory = Memory.join(memories) if memories else self.body.new_memory(len(readings))
        logits, receipts = self._feed(readings, memory)
        return Read(memory if remember else None, logits, [a + b for (_, a), b in zip(starts, receipts, strict=True)])

    def _feed(self, readings: Sequence[Reading], memory: Memory) -> tuple[Tensor, list[Receipt]]:
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
        return logits, [tally.receipt(i) for i in range(len(readings))]

    def _start(self, stem: Stem | None, item: Prepared) -> tuple[Memory | None, Receipt]:
        """A memory of the stem that may be written to, and what reading it did."""
        if stem is None:
            return None, Receipt()
        if id(stem) not in self._kept:
            before, receipt = self._start(stem.parent, item)
            memory = before if before is not None else self.body.new_memory(1)
            _, receipts = self._feed([Reading(item, stem.tokens)], memory)
            self._kept[id(stem)] = (memory, receipt + receipts[0])
        memory, receipt = self._kept[id(stem)]
        self._waiting[id(stem)] -= 1
        if self._waiting[id(stem)] > 0:
            memory = memory.select(torch.zeros(1, dtype=torch.int64, device=self.body.device))
        else:  # the last reader may have the memory itself
            del self._kept[id(stem)]
        return memory, receipt


def _joined(done: Sequence[tuple[list[int], Read]]) -> Read:
    """Readings that were done some at a time, in the order of their places."""
    places = [i for members, _ in done for i in members]
    if len(done) == 1 and places == sorted(places):
        return done[0][1]
    order = torch.tensor(places).argsort().tolist()
    memories = [read.memory for _, read in done if read.memory is not None]
    rows = torch.tensor(order, device=done[0][1].logits.device)
    memory = Memory.join(memories) if memories else None
    memories.clear()
    for _, read in done:
        read.memory = None  # let go before rows are copied into their order
    receipts = [receipt for _, read in done for receipt in read.receipts]
    return Read(
        memory if memory is None or places == sorted(places) else memory.select(rows),
        torch.cat([read.logits for _, read in done])[rows],
        [receipts[i] for i in order],
    )


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


def _saved(stems: Sequence[Stem | None]) -> int:
    """Tokens that need not be read because others have read them."""
    found: dict[int, Stem] = {}
    for stem in stems:
        while stem is not None and id(stem) not in found:
            found[id(stem)] = stem
            stem = stem.parent
    read_apart = sum(stem.new_tokens for stem in found.values())
    return sum(len(stem.tokens) for stem in stems if stem) - read_apart


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
