"""Prefill of prompts: each distinct prompt is computed once, and so is each prefix that several prompts share.

A shared prefix is called a stem. Stems are found with a prefix tree, which is pruned by what each branch would cost. Prefills of
one prompt whose acts begin at some layer share the layers below it instead (see depth.py), where that saves more. Prompts of
several lengths are padded into one forward where their cache is not needed afterwards.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from needlework.engine.depth import Depth
from needlework.engine.reading import PAD, Padding, Read, Reading, by_pieces, forward_tokens, readings_of, without_padding
from needlework.model.edits import keeps_from_sdpa
from needlework.model.hooked_model import HookedModel
from needlework.model.memory import Memory
from needlework.receipts import Receipt, Tally
from needlework.requests import Prepared


class Reader:
    """Prefills prompts for the engine. The cache of a shared prefix is kept until its last prompt has started from it."""

    def __init__(self, body: HookedModel, depth: Depth, padding: Padding | None = None) -> None:
        self.body, self.depth, self.padding = body, depth, padding or Padding(body)
        self.prompts_read = self.tokens_asked = 0
        self.tokens_read = 0.0  # each weighted by the share of the model that was computed for it
        self._stems: dict[tuple[object, ...], Stem] = {}  # key of a reading -> shared prefix that it starts from
        self._kept: dict[int, tuple[Memory, Receipt]] = {}  # id of a stem -> its cache and receipt
        self._waiting: dict[int, int] = {}  # id of a stem -> prompts and stems that have yet to start from it

    @property
    def kept_bytes(self) -> int:
        """Bytes of the shared prefixes that are kept."""
        return sum(memory.nbytes() for memory, _ in self._kept.values())

    def stems_of(self, item: Prepared) -> list[Stem]:
        """Return the shared prefix that a request's prompt starts from and the prefixes it continues, longest first."""
        return _chain(self._stems.get(readings_of(item)["own"].key))

    def expect(self, readings: Sequence[Reading], fits: Callable[[Reading, Sequence[Stem]], bool] | None = None) -> None:
        """Find the shared prefixes of all readings of a run, before any of them is prefilled.

        Args:
            readings: All prefills of the run.
            fits: Whether a reading fits into memory beside the prefixes that it starts from. If one reading does not fit, all
                readings with its acts are prefilled without shared prefixes.
        """
        if not self.body.continues:
            return
        by_acts: dict[tuple[object, ...], dict[tuple[object, ...], Reading]] = defaultdict(dict)
        for reading in (reading for reading in readings if not reading.item.one_piece):
            by_acts[reading.item.group[1:]][reading.key] = reading
        whole = {reading.key: reading for reading in readings}
        stems_of = {
            acts: stems
            for acts, alike in by_acts.items()
            if _saved(stems := find_stems([reading.tokens for reading in alike.values()], forward_tokens(self.body)))
            and (fits is None or _all_fit(list(alike.values()), stems, fits))
        }
        while better := self._better_from_stems(whole, stems_of, by_acts):  # removed ones no longer share layers with the rest
            alike, stems = by_acts[better], stems_of.pop(better)
            self._stems |= {key: stem for key, stem in zip(alike, stems, strict=True) if stem is not None}
            for key in alike:
                del whole[key]
        for stem in {id(stem): stem for stem in self._stems.values()}.values():
            ancestor: Stem | None = stem
            while ancestor is not None and id(ancestor) not in self._waiting:
                self._waiting[id(ancestor)] = ancestor.readers
                ancestor = ancestor.parent

    def _better_from_stems(
        self,
        whole: Mapping[tuple[object, ...], Reading],
        stems_of: Mapping[tuple[object, ...], list[Stem | None]],
        by_acts: Mapping[tuple[object, ...], Mapping[tuple[object, ...], Reading]],
    ) -> tuple[object, ...] | None:
        """Return the acts whose readings gain most from shared prefixes over shared layers; None if no group gains."""
        if not stems_of:
            return None
        deep = self.depth.worthwhile(list(whole.values()))
        shares = {key: deep.get(i, 0.0) for i, key in enumerate(whole)}
        gains = {
            acts: _saved(stems) - sum(len(reading.tokens) * shares[key] for key, reading in by_acts[acts].items())
            for acts, stems in stems_of.items()
        }
        best = max(gains, key=lambda acts: gains[acts])
        return best if gains[best] > 0 else None

    def read(self, readings: Sequence[Reading], remember: bool = True) -> Read:
        """Prefill prompts, each under its own acts, and return logits, receipts and cache in the order given.

        Args:
            readings: Of one length; with `remember=False`, of any lengths.
            remember: Whether to keep the cache, to decode or score from it.
        """
        done: list[tuple[list[int], Read]] = []
        whole = [i for i, reading in enumerate(readings) if reading.key not in self._stems]
        deep = self.depth.worthwhile([readings[i] for i in whole])
        together = {whole[i]: readings[whole[i]] for i in deep}
        for length in dict.fromkeys(len(reading.tokens) for reading in together.values()):
            before = self.depth.whole_passes
            done += self.depth.read({i: x for i, x in together.items() if len(x.tokens) == length}, remember)
            self.tokens_read += self.depth.whole_passes - before
        parts: dict[int, list[int]] = defaultdict(list)  # length of the shared prefix -> indices of readings
        for i, reading in enumerate(readings):
            if i not in together:
                stem = self._stems.get(reading.key)
                parts[len(stem.tokens) if stem else 0].append(i)
        for known, members in parts.items():
            for some in self._pieces(readings, members, known):
                done.append((some, self._continue([readings[i] for i in some], remember)))
        self.prompts_read += len(readings)
        self.tokens_asked += sum(len(reading.tokens) for reading in readings)
        return _joined(done)

    def _pieces(self, readings: Sequence[Reading], members: list[int], known: int) -> Iterator[list[int]]:
        """Yield the members (indices of readings with `known` tokens in the cache) of each forward."""
        lengths = {len(readings[i].tokens) - known for i in members}
        # Rows that need attention probabilities are batched together: they keep all rows of their forward from using SDPA.
        members.sort(key=lambda i: keeps_from_sdpa(readings[i].item.acts["prefill"]))
        if len(lengths) == 1:
            yield from by_pieces(members, lengths.pop(), self.body)
            return
        for _, alike in groupby(members, key=lambda i: keeps_from_sdpa(readings[i].item.acts["prefill"])):
            some = list(alike)
            for piece in self.padding.pieces([len(readings[i].tokens) - known for i in some]):
                yield [some[place] for place in piece]

    def _continue(self, readings: Sequence[Reading], remember: bool) -> Read:
        """Prefill, in one batch, the rest of readings whose shared prefixes have one length."""
        memory, before = self._start([(self._stems.get(reading.key), reading.item) for reading in readings])
        logits, receipts = self._feed(readings, memory)
        return Read(memory if remember else None, logits, [a + b for a, b in zip(before, receipts, strict=True)])

    def _feed(self, readings: Sequence[Reading], memory: Memory) -> tuple[Tensor, list[Receipt]]:
        """Feed the tokens that `memory` does not hold yet; return last logits [readings, vocabulary] and receipts."""
        body, rest = self.body, [reading.tokens[memory.length :] for reading in readings]
        fed = max(map(len, rest))
        ids = torch.tensor([tokens + (PAD,) * (fed - len(tokens)) for tokens in rest], device=body.device)
        slots = torch.arange(len(readings), device=body.device)
        items = [reading.item for reading in readings]
        rows = body.compile([x.acts["prefill"] for x in items], [x.sample for x in items], "prefill", slots)
        if body.observer is not None:
            body.observer.begin([x.request for x in items], body.device)
        tally = Tally(len(readings))
        ends = torch.tensor([len(tokens) - 1 for tokens in rest], device=body.device)
        padded = min(map(len, rest)) < fed
        logits = body.feed(ids, memory, "prefill", rows, tally, keep=ends if padded else "last")[:, 0]
        self.tokens_read += sum(map(len, rest))
        return logits, [without_padding(tally.receipt(i), len(tokens), fed) for i, tokens in enumerate(rest)]

    def _start(self, starts: Sequence[tuple[Stem | None, Prepared]]) -> tuple[Memory, list[Receipt]]:
        """Return a writable cache with each row's shared prefix, and the receipts. Prefixes have one length, or all are None."""
        stems = {id(stem): (stem, item) for stem, item in starts if stem is not None}
        if not stems:
            return self.body.new_memory(len(starts)), [Receipt()] * len(starts)
        self._read_stems(stems)
        kept = {name: self._kept[name] for name in stems}
        for stem, _ in starts:
            self._waiting[id(stem)] -= 1
            if self._waiting[id(stem)] <= 0:
                self._kept.pop(id(stem), None)
        joined = Memory.join([memory for memory, _ in kept.values()])
        receipts = [kept[id(stem)][1] for stem, _ in starts]
        if len(starts) == 1 and self._waiting[id(starts[0][0])] <= 0:  # the last user takes the cache itself, without a copy
            return joined, receipts
        place = {name: i for i, name in enumerate(kept)}
        rows = torch.tensor([place[id(stem)] for stem, _ in starts], device=self.body.device)
        return joined.select(rows), receipts

    def _read_stems(self, stems: Mapping[int, tuple[Stem, Prepared]]) -> None:
        """Prefill the shared prefixes that are not cached yet, each under the acts of a request that starts from it."""
        new: dict[tuple[int, int], list[tuple[Stem, Prepared]]] = defaultdict(list)
        for name, (stem, item) in stems.items():
            if name not in self._kept:
                new[len(stem.tokens), stem.new_tokens].append((stem, item))
        for (_, tokens), alike in new.items():
            for some in by_pieces(alike, tokens, self.body):
                memory, before = self._start([(stem.parent, item) for stem, item in some])
                _, receipts = self._feed([Reading(item, stem.tokens) for stem, item in some], memory)
                for i, (stem, _) in enumerate(some):
                    own = memory if len(some) == 1 else memory.select(torch.tensor([i], device=self.body.device))
                    self._kept[id(stem)] = own, before[i] + receipts[i]


def _all_fit(readings: Sequence[Reading], stems: Sequence[Stem | None], fits: Callable[[Reading, Sequence[Stem]], bool]) -> bool:
    """Return whether each reading fits beside the shared prefixes that it starts from."""
    return all(stem is None or fits(reading, _chain(stem)) for reading, stem in zip(readings, stems, strict=True))


def _chain(stem: Stem | None) -> list[Stem]:
    """Return a stem and its ancestors, longest first."""
    return [] if stem is None else [stem, *_chain(stem.parent)]


def _joined(done: Sequence[tuple[list[int], Read]]) -> Read:
    """Join the results of several forwards, in the order of the readings' indices."""
    places = [i for members, _ in done for i in members]
    if len(done) == 1 and places == sorted(places):
        return done[0][1]
    order = torch.tensor(places).argsort().tolist()
    memories = [read.memory for _, read in done if read.memory is not None]
    rows = torch.tensor(order, device=done[0][1].logits.device)
    memory = Memory.join(memories) if memories else None
    memories.clear()
    for _, read in done:
        read.memory = None  # free these before rows are copied into their order
    receipts = [receipt for _, read in done for receipt in read.receipts]
    return Read(
        memory if memory is None or places == sorted(places) else memory.select(rows),
        torch.cat([read.logits for _, read in done])[rows],
        [receipts[i] for i in order],
    )


@dataclass
class Stem:
    """A prefix that several prompts share. Its parent is a shorter shared prefix that it continues."""

    tokens: tuple[int, ...]
    parent: Stem | None = None
    readers: int = 0  # number of prompts and stems that continue it directly
    children: list[Stem] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)

    @property
    def new_tokens(self) -> int:
        return len(self.tokens) - (len(self.parent.tokens) if self.parent else 0)


def find_stems(prompts: Sequence[tuple[int, ...]], overhead_tokens: float) -> list[Stem | None]:
    """Return, for each prompt, the longest shared prefix worth prefilling on its own, or None.

    A stem leaves each of its prompts at least one token to prefill, which gives the logits.

    Args:
        prompts: Token ids of each prompt.
        overhead_tokens: Cost of one more forward, in tokens. A stem costs forwards of its own, and prompts that start from
            stems of different lengths cannot be prefilled in one batch.
    """
    if len(prompts) < 2:
        return [None] * len(prompts)
    root = _tree(prompts)
    _prune(root, overhead_tokens)
    stems: list[Stem | None] = [None] * len(prompts)
    _assign(root, stems)
    return stems


def _saved(stems: Sequence[Stem | None]) -> int:
    """Return the number of prompt tokens that sharing these prefixes saves."""
    found: dict[int, Stem] = {}
    for stem in stems:
        while stem is not None and id(stem) not in found:
            found[id(stem)] = stem
            stem = stem.parent
    read_apart = sum(stem.new_tokens for stem in found.values())
    return sum(len(stem.tokens) for stem in stems if stem) - read_apart


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Return the length of the common prefix, which excludes the last token of the shorter sequence."""
    low, high = 0, min(len(a), len(b)) - 1
    if high <= 0:
        return 0
    while low < high:  # binary search: slices compare in C, token by token would be slow
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _tree(prompts: Sequence[tuple[int, ...]]) -> Stem:
    """Build the prefix tree: prompts that are neighbours when sorted share the most, so one pass finds all branches."""
    order = sorted(range(len(prompts)), key=prompts.__getitem__)
    root = Stem(())
    stack = [root]
    for place, i in enumerate(order):
        before = _common(prompts[order[place - 1]], prompts[i]) if place else 0
        after = _common(prompts[i], prompts[order[place + 1]]) if place + 1 < len(order) else 0
        closed = None
        while len(stack[-1].tokens) > before:
            closed = stack.pop()
        if closed is not None and len(stack[-1].tokens) < before:  # the prompts branch inside the stem just closed
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
    """Merge stems that save less than they cost into their parents, from the leaves up."""
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
    """Set each prompt's stem in `stems`, and count the prompts and stems that continue each stem."""
    stem.readers = len(stem.children) + len(stem.prompts)
    for i in stem.prompts:
        stems[i] = stem if stem.tokens else None
    for child in stem.children:
        if stem.parent is None and not stem.tokens:
            child.parent = None
        _assign(child, stems)
