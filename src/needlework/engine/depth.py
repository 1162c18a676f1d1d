"""Depth: readings of one prompt share the layers below the first that acts on them.

An untouched reading of the prompt is recorded, and every other one enters the model where its own acts begin. A layer is
entered once that was seen to give what reading from the first layer on gives, memory and receipts included; a model that
is no plain stack of layers is read as a whole.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from needlework.engine.budget import out_of_memory
from needlework.engine.reading import Read, Reading, by_pieces, forward_tokens, watched
from needlework.interventions.acts import Act, ClearState, DropRecurrent, KeepBest, SilenceHeads
from needlework.interventions.scores import RANDOM
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
    scored: tuple[str, int] | None = None  # by which score, without how many first tokens, the heads of this layer are kept

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
        here = [act for act in acts if act.layer == layer]
        silences = all(isinstance(act, KeepBest) or (isinstance(act, SilenceHeads) and not act.means) for act in here)
        after = [True] * silences + [False] * (layer > 0)
        shortcuts = (True, False) if self._stack.lone_top else (False,)
        scored = next(((act.by, act.sinks) for act in here if isinstance(act, KeepBest)), None)
        return [Door(layer, heads, last_only, scored if heads else None) for heads in after for last_only in shortcuts]

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
                if out_of_memory(error):  # another time it may be otherwise
                    return False
                self._proven[door] = False
            finally:
                self.body.observer = observer
        return self._proven[door]

    def worthwhile(self, readings: Sequence[Reading]) -> dict[int, float]:
        """The places of the readings that are better read this way, together, and how much of the model each is spared.

        Untouched readings among them are recorded: since that must be done for the others anyway, they are spared everything.
        """
        prompts: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for i, reading in enumerate(readings):
            if len(reading.tokens) <= self.body.chunk or not self.body.continues:  # of long ones, what is recorded would be large
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
            recordings = max(1, len({door.scored for door in entering.values() if not door.layer}))
            gain = sum(door.share(layers) for door in entering.values()) - (recordings - bool(untouched))
            if gain > 0:
                chosen |= {i: door.share(layers) for i, door in entering.items()} | dict.fromkeys(untouched, 1.0)
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
        groups = self._by_door(items)
        kinds: list[tuple[str, int] | None] = list({door.scored for door in groups if door and door.scored}) or [None]
        for kind in kinds:
            served = [door for door in groups if (door.scored if door else None) in (kind, None if kind == kinds[0] else kind)]
            recording = self._record(torch.tensor(prompts, device=self.body.device), [door for door in served if door])
            self.whole_passes += recording.ids.numel()
            yield from self._go_on({door: groups[door] for door in served}, recording, items, place, remember)

    def _by_door(self, items: Mapping[int, Prepared]) -> dict[Door | None, list[int]]:
        """Readings by where they enter; None: they are untouched. One recording notes one score: rarer ones are taken where heads
        need not have spoken."""
        doors = {i: self.door(item) for i, item in items.items()}
        common = Counter(door.scored for door in doors.values() if door and door.scored).most_common(1)
        groups: dict[Door | None, list[int]] = defaultdict(list)
        for i, door in doors.items():
            if door and door.scored and door.scored != common[0][0]:
                door = next((d for d in self._doors(items[i]) if not d.scored and self.proven(d)), door)
            groups[door].append(i)
        return groups

    def _go_on(
        self,
        groups: Mapping[Door | None, list[int]],
        recording: Recording,
        items: Mapping[int, Prepared],
        place: Mapping[int, int],
        remember: bool,
    ) -> Iterator[tuple[list[int], Read]]:
        """Readings that one recording serves."""
        tokens = recording.ids.shape[1]
        for door, members in groups.items():
            members.sort(key=lambda i: keeps_from_sdpa(items[i].acts["prefill"]))
            for some in by_pieces(members, tokens, self.body):
                rows = torch.tensor([place[i] for i in some], device=self.body.device)
                if door is None:
                    memory = recording.memory.select(rows) if remember else None
                    yield some, Read(memory, recording.logits[rows], [recording.receipts[place[i]] for i in some])
                    continue
                acts, samples = [items[i].acts["prefill"] for i in some], [items[i].sample for i in some]
                self.whole_passes += len(some) * tokens * (1 - door.share(len(self.body.anatomy.layers)))
                yield some, self._enter(door, recording, rows, acts, samples, remember)

    def _record(self, ids: Tensor, doors: Sequence[Door]) -> Recording:
        """Prompts read untouched, once for everyone who enters at one of these doors."""
        assert self._stack is not None
        body, count = self.body, len(ids)
        recording, tally = Recording(ids, body.new_memory(count)), Tally(count)
        notes = {(door.layer, *door.scored) for door in doors if door.scored and door.scored[0] != RANDOM}
        all_kept = [
            KeepBest(layer, body.anatomy.attention(layer).query_heads, by, sinks=sinks) for layer, by, sinks in notes
        ]  # nothing is acted on
        rows = body.compile([all_kept] * count, [0] * count, "prefill", torch.arange(count, device=body.device))
        if any(edits.needs_probabilities for edits in rows.attention.values()):
            body.check_own_maths()  # now: it runs the model, which must not be recorded meanwhile
        heard: dict[int, list[Mapping[str, Tensor]]] = {}
        below = {door.layer - 1 for door in doors if door.layer}
        with self._stack.recorded(recording, below, {door.layer for door in doors if door.after_heads}):
            body.heard = heard
            try:
                recording.logits = body.feed(ids, recording.memory, "prefill", rows, tally)[:, 0]
            finally:
                body.heard = None
        recording.scores = {
            layer: {name: torch.cat([b[name] for b in blocks], 1) for name in blocks[0]} for layer, blocks in heard.items()
        }
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
        part = body.anatomy.layers[door.layer].attention
        entry = Entry(recording, rows, door.layer, door.after_heads, door.last_only, part.query_heads if part else 0)
        memory, tally = body.new_memory(count), Tally(count)
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
        if door.scored:
            acts = [KeepBest(door.layer, 1, door.scored[0], sinks=door.scored[1])]
        mixed = any(mixer.layer == door.layer for mixer in self.body.mixers)
        return acts + [DropRecurrent(door.layer)] * (mixed and not door.after_heads)


def _below(door: Door, receipt: Receipt) -> Receipt:
    """What an untouched reading counted in the layers that were not entered."""
    return Receipt({at: dict(count) for at, count in receipt.counts.items() if at[0] < door.layer})
