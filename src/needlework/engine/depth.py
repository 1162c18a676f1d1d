"""Depth: readings of one prompt share the layers below the first that acts on them.

An untouched reading of the prompt is recorded, and every other one enters the model where its own acts begin. A layer is
entered once that was seen to give what reading from the first layer on gives, memory and receipts included; a model that
is no plain stack of layers is read as a whole.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from needlework.engine.reading import Read, Reading, by_pieces, forward_tokens, watched
from needlework.interventions.acts import Act, ClearState, DropRecurrent, SilenceHeads
from needlework.model.body import Body
from needlework.model.depth import Entry, Recording, Stack
from needlework.model.edits import keeps_from_sdpa
from needlework.receipts import Receipt, Tally
from needlework.requests import Prepared

logger = logging.getLogger("needlework")
_HEADS = 0.4  # what a layer computes before its heads have spoken, as a share of the layer
_PROOF_TOKENS = 12
_PROOF_FORWARDS, _PROOF_COST = 5, 100  # what a proof takes: forwards, and tokens that go through them
_PROOF_ROWS = (1, 0, 1)  # of two prompts: in another order, and one of them twice


class Door(NamedTuple):
    """Where a reading may enter the model."""

    layer: int
    after_heads: bool  # what the heads of this layer say is known, too
    last_only: bool = True  # the topmost layer computes no more than the next token needs

    def share(self, layers: int) -> float:
        """How much of the model lies below it."""
        return (self.layer + _HEADS * self.after_heads) / layers


class Depth:
    """Reads prompts that several requests act on, each from where its own acts begin."""

    def __init__(self, body: Body) -> None:
        self.body = body
        self._stack = Stack.of(body.model, body.attention, {mixer.module: mixer.layer for mixer in body.mixers})
        self._proven: dict[Door, bool] = {}
        self.whole_passes = 0.0  # tokens that were read, each counted by the share of the model that it went through

    def door(self, item: Prepared) -> Door | None:
        """Where readings under these acts enter; None: they are read as a whole. Needs an open session."""
        return next((door for door in self._doors(item) if self.proven(door)), None)

    def _doors(self, item: Prepared) -> list[Door]:
        """Where readings under these acts might enter, the best first."""
        acts = item.acts["prefill"]
        if self._stack is None or not acts or any(isinstance(act, ClearState) for act in acts):
            return []  # states are cleared between forwards
        layer = min(act.layer for act in acts)
        silences = all(isinstance(act, SilenceHeads) and not act.means for act in acts if act.layer == layer)
        after = [True] * silences + [False] * (layer > 0)
        shortcuts = (True, False) if self._stack.lone_top else (False,)
        return [Door(layer, after_heads, last_only) for after_heads in after for last_only in shortcuts]

    def _possible(self) -> bool:
        """What observers and hooks of others do, skipped layers would not do or do twice."""
        return self._stack is not None and not watched(self.body)

    def proven(self, door: Door) -> bool:
        """Whether entering there gives what the whole model gives. Tried once; needs an open session."""
        if door not in self._proven:
            observer, self.body.observer = self.body.observer, None
            try:
                self._proven[door] = self._prove(door)
            except Exception as error:  # whatever it is, it would have been an error of a real reading
                logger.debug("layer %d cannot be entered: %s", door.layer, error)
                self._proven[door] = False
            finally:
                self.body.observer = observer
        return self._proven[door]

    def worthwhile(self, readings: Sequence[Reading]) -> dict[int, float]:
        """The places of the readings that are better read this way, together, and how much of the model each is spared.

        Untouched readings among them are recorded, and spared nothing.
        """
        prompts: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for i, reading in enumerate(readings):
            prompts[reading.tokens].append(i)
        shared = [i for members in prompts.values() if len(members) > 1 for i in members]
        if not shared or not self._possible():
            return {}
        hoped = {i: next(iter(self._doors(readings[i].item)), None) for i in shared}
        if not self._gain(readings, prompts, hoped):  # not even if every door is open: none needs to be tried
            return {}
        return self._gain(readings, prompts, {i: self.door(readings[i].item) for i in shared})

    def _gain(
        self, readings: Sequence[Reading], prompts: Mapping[tuple[int, ...], Sequence[int]], doors: Mapping[int, Door | None]
    ) -> dict[int, float]:
        """What is spared through these doors, by reading; nothing where more forwards, and proofs, would cost more."""
        chosen: dict[int, float] = {}
        saved, used, layers = 0.0, set(), len(self.body.anatomy.layers)
        for tokens, members in prompts.items():
            entering = {i: door for i in members if (door := doors.get(i))}
            untouched = [i for i in members if not readings[i].item.acts["prefill"]]
            gain = sum(door.share(layers) for door in entering.values()) - (not untouched)
            if gain > 0:
                chosen |= {i: door.share(layers) for i, door in entering.items()} | dict.fromkeys(untouched, 0.0)
                used |= set(entering.values())
                saved += gain * len(tokens)
        untried = sum(door not in self._proven for door in used)
        costs = forward_tokens(self.body) * (len(used) + _PROOF_FORWARDS * untried) + _PROOF_COST * untried
        return chosen if saved > costs else {}

    def read(self, readings: Mapping[int, Reading], remember: bool) -> Iterator[tuple[list[int], Read]]:
        """These readings, of one length, some at a time; with the places of those that are done."""
        prompts: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for i, reading in readings.items():
            prompts[reading.tokens].append(i)
        for some in by_pieces(list(prompts), len(next(iter(prompts))), self.body):
            place = {i: p for p, tokens in enumerate(some) for i in prompts[tokens]}
            yield from self._some_prompts(some, {i: readings[i].item for i in place}, place, remember)

    def _some_prompts(
        self, prompts: Sequence[tuple[int, ...]], items: Mapping[int, Prepared], place: Mapping[int, int], remember: bool
    ) -> Iterator[tuple[list[int], Read]]:
        """Readings of a few prompts, from one recording of them; `place` says which of the prompts each reading is of."""
        groups: dict[Door | None, list[int]] = defaultdict(list)
        for i, item in items.items():
            groups[self.door(item)].append(i)
        recording = self._record(torch.tensor(prompts, device=self.body.device), [door for door in groups if door])
        self.whole_passes += recording.ids.numel()
        for door, members in groups.items():
            members.sort(key=lambda i: keeps_from_sdpa(items[i].acts["prefill"]))
            for some in by_pieces(members, len(prompts[0]), self.body):
                rows = torch.tensor([place[i] for i in some], device=self.body.device)
                if door is None:
                    memory = recording.memory.select(rows) if remember else None
                    yield some, Read(memory, recording.logits[rows], [recording.receipts[place[i]] for i in some])
                    continue
                acts, samples = [items[i].acts["prefill"] for i in some], [items[i].sample for i in some]
                self.whole_passes += len(some) * len(prompts[0]) * (1 - door.share(len(self.body.anatomy.layers)))
                yield some, self._enter(door, recording, rows, acts, samples, remember)

    def _record(self, ids: Tensor, doors: Sequence[Door]) -> Recording:
        """Prompts read untouched, once for everyone who enters at one of these doors."""
        assert self._stack is not None
        body, count = self.body, len(ids)
        recording, tally = Recording(ids, body.new_memory(count)), Tally(count)
        rows = body.compile([()] * count, [0] * count, "prefill", torch.arange(count, device=body.device))
        below = {door.layer - 1 for door in doors if door.layer}
        with self._stack.recorded(recording, below, {door.layer for door in doors if door.after_heads}):
            recording.logits = body.feed(ids, recording.memory, "prefill", rows, tally)[:, 0]
        recording.receipts = [tally.receipt(i) for i in range(count)]
        return recording

    def _enter(
        self,
        door: Door,
        recording: Recording,
        rows: Tensor,
        acts: Sequence[Sequence[Act]],
        samples: Sequence[int],
        remember: bool = True,
    ) -> Read:
        """Rows that go on from recorded ones, each under its own acts."""
        assert self._stack is not None
        body, count = self.body, len(rows)
        memory, tally, entry = body.new_memory(count), Tally(count), Entry(recording, rows, *door)
        compiled = body.compile(acts, samples, "prefill", torch.arange(count, device=body.device))
        if any(edits.needs_probabilities for edits in compiled.attention.values()):
            body.check_own_maths()  # now: it runs the model, which must not be entered meanwhile
        ids, fed = recording.ids[rows], self._stack.fed(entry)
        positions = torch.arange(ids.shape[1], device=body.device)[fed].expand(count, -1)
        body.last_only = self._stack.top if door.last_only else None
        try:
            with self._stack.entered(entry):
                logits = body.feed(ids[:, fed], memory, "prefill", compiled, tally, positions)[:, 0]
        finally:
            body.last_only = None
        receipts = [_below(door, recording.receipts[row]) + tally.receipt(i) for i, row in enumerate(rows.tolist())]
        return Read(memory.above(recording.memory, rows, entry.remembered) if remember else None, logits, receipts)

    def _prove(self, door: Door) -> bool:
        """A short prompt twice, as a whole and from this door on, and one token more from either memory."""
        body = self.body
        prompts = torch.arange(2 * _PROOF_TOKENS, device=body.device).view(2, -1) * 7 % body.anatomy.vocabulary
        rows = torch.tensor(_PROOF_ROWS, device=body.device)
        count, slots, acts = len(rows), torch.arange(len(rows), device=body.device), self._acts_at(door)
        memory, tally = body.new_memory(count), Tally(count)
        compiled = body.compile([acts] * count, [0] * count, "prefill", slots)
        whole = [body.feed(prompts[rows], memory, "prefill", compiled, tally)]
        read = self._enter(door, self._record(prompts, [door]), rows, [acts] * count, [0] * count)
        assert read.memory is not None
        entered = [read.logits[:, None]]
        for answers, remembered in ((whole, memory), (entered, read.memory)):
            nothing = body.compile([()] * count, [0] * count, "decode", slots)
            answers.append(body.feed(prompts[rows, :1], remembered, "decode", nothing, Tally(count)))
        same = [tally.receipt(i) for i in range(count)] == read.receipts
        return same and body.agree(torch.cat(whole, 1), torch.cat(entered, 1))

    def _acts_at(self, door: Door) -> list[Act]:
        """Something that changes the layer, whatever it is made of."""
        acts: list[Act] = [SilenceHeads(door.layer, frozenset({0}))] if self.body.anatomy.layers[door.layer].attention else []
        mixed = any(mixer.layer == door.layer for mixer in self.body.mixers)
        return acts + [DropRecurrent(door.layer)] * (mixed and not door.after_heads)


def _below(door: Door, receipt: Receipt) -> Receipt:
    """What an untouched reading counted in the layers that were not entered."""
    return Receipt({at: dict(count) for at, count in receipt.counts.items() if at[0] < door.layer})
