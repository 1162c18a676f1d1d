"""Prefill of prompts: each distinct prompt is computed once, and so is each prefix that several prompts share.

A shared prefix is called a stem. Stems are found with a prefix tree, which is pruned by what each branch would cost. Prefills of
one prompt whose acts begin at some layer share the layers below it instead (see depth.py), where that saves more.

Prompts of several lengths share one forward where their cache is not needed afterwards and no count depends on padding. In a
causal model later tokens cannot change earlier ones, so padding is on the right, and each row's logits are taken after its own
last token. This is checked on the model itself first; a model that fails the check is prefilled one length at a time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from needlework.engine.budget import PIECE_TOKENS, Read, Reading, by_pieces, forward_tokens, readings_of, try_proof, watched
from needlework.engine.depth import Depth
from needlework.interventions.acts import ChangeOutputs, ClearState, ExposeColumns, KeepBest, LimitKeys, Phase, SilenceHeads
from needlework.model.edits import keeps_from_sdpa
from needlework.model.hooked_model import HookedModel, Rows
from needlework.model.memory import Memory
from needlework.receipts import Receipt, Tally
from needlework.requests import Prepared

PAD = 0  # any token id: no real token attends to it
_UNEVEN = (LimitKeys, ExposeColumns, ChangeOutputs, ClearState)  # their effect on a token depends on its position
_PROOF_LENGTHS = (12, 5, 9)


def compile_items(body: HookedModel, items: Sequence[Prepared], phase: Phase, slots: Tensor | None = None) -> Rows:
    """Compile the acts of these requests for one phase; by default, each has a slot of its own."""
    slots = torch.arange(len(items), device=body.device) if slots is None else slots
    return body.compile([item.acts[phase] for item in items], [item.sample for item in items], phase, slots)


class Reader:
    """Prefills prompts for the engine. The cache of a shared prefix is kept until its last prompt has started from it."""

    def __init__(self, body: HookedModel, depth: Depth, padding: Padding | None = None) -> None:
        self.body, self.depth, self.padding = body, depth, padding or Padding(body)
        self.prompts_read = self.tokens_asked = 0
        self.tokens_read = 0.0  # each weighted by the share of the model that was computed for it
        self._stems: dict[tuple[object, ...], Stem] = {}  # key of a reading -> shared prefix that it starts from
        self._kept: dict[Stem, tuple[Memory, Receipt]] = {}  # caches and receipts of shared prefixes

    @property
    def kept_bytes(self) -> int:
        """Bytes of the shared prefixes that are kept."""
        return sum(memory.nbytes() for memory, _ in self._kept.values())

    def stems_of(self, item: Prepared) -> list[Stem]:
        """Return the shared prefix that a request's prompt starts from and the prefixes it continues, longest first."""
        return _chain(self._stems.get(readings_of(item)["own"].key))

    def expect(self, readings: Sequence[Reading], fits: Callable[[Reading, Sequence[Stem]], bool]) -> None:
        """Find the shared prefixes of all readings of a run, before any of them is prefilled.

        Args:
            readings: All prefills of the run.
            fits: Whether a reading fits into memory beside the prefixes that it starts from. If one reading does not fit, all
                readings with its acts are prefilled without shared prefixes.
        """
        if not self.body.continues:
            return
        whole = {reading.key: reading for reading in readings}
        by_acts: dict[tuple[object, ...], dict[tuple[object, ...], Reading]] = defaultdict(dict)
        for key, reading in whole.items():
            if not reading.item.one_piece:
                by_acts[reading.item.group[1:]][key] = reading
        stems_of: dict[tuple[object, ...], list[Stem | None]] = {}
        for acts, alike in by_acts.items():
            stems = find_stems([reading.tokens for reading in alike.values()], forward_tokens(self.body))
            starts = [(reading, stem) for reading, stem in zip(alike.values(), stems, strict=True) if stem]
            if _saved(stems) and all(fits(reading, _chain(stem)) for reading, stem in starts):
                stems_of[acts] = stems
        while better := self._better_from_stems(whole, stems_of, by_acts):  # removed ones no longer share layers with the rest
            for key, stem in zip(by_acts[better], stems_of.pop(better), strict=True):
                del whole[key]
                if stem is not None:
                    self._stems[key] = stem

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
        rows = compile_items(body, [reading.item for reading in readings], "prefill")
        if body.observer is not None:
            body.observer.begin([reading.item.request for reading in readings], body.device)
        tally = Tally(len(readings))
        ends = torch.tensor([len(tokens) - 1 for tokens in rest], device=body.device)
        padded = min(map(len, rest)) < fed
        logits = body.feed(ids, memory, "prefill", rows, tally, keep=ends if padded else "last")[:, 0]
        self.tokens_read += sum(map(len, rest))
        return logits, [without_padding(tally.receipt(i), len(tokens), fed) for i, tokens in enumerate(rest)]

    def _start(self, starts: Sequence[tuple[Stem | None, Prepared]]) -> tuple[Memory, list[Receipt]]:
        """Return a writable cache with each row's shared prefix, and the receipts. Prefixes have one length, or all are None."""
        stems = {stem: item for stem, item in starts if stem is not None}
        if not stems:
            return self.body.new_memory(len(starts)), [Receipt()] * len(starts)
        self._read_stems(stems)
        kept = {stem: self._kept[stem] for stem in stems}
        for stem, _ in starts:
            assert stem is not None
            stem.waiting -= 1
            if stem.waiting <= 0:
                self._kept.pop(stem, None)
        joined = Memory.join([memory for memory, _ in kept.values()])
        receipts = [kept[stem][1] for stem, _ in starts if stem]
        if len(starts) == 1 and not self._kept.keys() & stems:  # the last user takes the cache itself, without a copy
            return joined, receipts
        place = {stem: i for i, stem in enumerate(kept)}
        return joined.select(torch.tensor([place[stem] for stem, _ in starts if stem], device=self.body.device)), receipts

    def _read_stems(self, stems: Mapping[Stem, Prepared]) -> None:
        """Prefill the shared prefixes that are not cached yet, each under the acts of a request that starts from it."""
        new: dict[tuple[int, int], list[Stem]] = defaultdict(list)
        for stem in stems:
            if stem not in self._kept:
                new[len(stem.tokens), stem.new_tokens].append(stem)
        for (_, tokens), alike in new.items():
            for some in by_pieces(alike, tokens, self.body):
                memory, before = self._start([(stem.parent, stems[stem]) for stem in some])
                _, receipts = self._feed([Reading(stems[stem], stem.tokens) for stem in some], memory)
                for i, stem in enumerate(some):
                    own = memory if len(some) == 1 else memory.select(torch.tensor([i], device=self.body.device))
                    self._kept[stem] = own, before[i] + receipts[i]


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


@dataclass(eq=False)
class Stem:
    """A prefix that several prompts share. Its parent is a shorter shared prefix that it continues."""

    tokens: tuple[int, ...]
    parent: Stem | None = None
    children: list[Stem] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)
    waiting: int = 0  # prompts and stems that have yet to start from it

    @property
    def new_tokens(self) -> int:
        return len(self.tokens) - (len(self.parent.tokens) if self.parent else 0)

    @property
    def readers(self) -> int:
        """The number of prompts and stems that continue it directly."""
        return len(self.children) + len(self.prompts)


def find_stems(prompts: Sequence[tuple[int, ...]], overhead_tokens: float) -> list[Stem | None]:
    """Return, for each prompt, the longest shared prefix worth prefilling on its own, or None.

    A stem leaves each of its prompts at least one token to prefill, which gives the logits.

    Args:
        prompts: Token ids of each prompt.
        overhead_tokens: Cost of one more forward, in tokens. A stem costs forwards of its own, and prompts that start from
            stems of different lengths cannot be prefilled in one batch.
    """
    root = Stem(())
    _grow(root, sorted(range(len(prompts)), key=prompts.__getitem__), prompts, overhead_tokens)
    stems: list[Stem | None] = [None] * len(prompts)
    found = [root]
    for stem in found:  # which grows meanwhile
        stem.waiting = stem.readers
        for i in stem.prompts:
            stems[i] = stem if stem is not root else None
        for child in stem.children:
            child.parent = stem if stem is not root else None
            found.append(child)
    return stems


def _grow(stem: Stem, members: Iterable[int], prompts: Sequence[tuple[int, ...]], overhead_tokens: float) -> None:
    """Add prompts to the tree below a stem, without the branches that save less than they cost.

    Args:
        members: Indices of prompts that begin with the stem, sorted by their tokens.
    """
    known = len(stem.tokens)
    for _, group in groupby(members, key=lambda i: prompts[i][known] if len(prompts[i]) > known + 1 else None):
        alike = list(group)
        first, last = prompts[alike[0]], prompts[alike[-1]]
        most = min(len(prompts[i]) for i in alike) - 1
        if len(alike) == 1 or most <= known:
            stem.prompts += alike
            continue
        # Bisection: slices compare in C, token by token would be slow. What the first and the last share, all share.
        shared = known + bisect_left(range(known + 1, most + 1), True, key=lambda n: first[known:n] != last[known:n])
        child = Stem(first[:shared])
        _grow(child, alike, prompts, overhead_tokens)
        if (child.readers - 1) * (shared - known) > overhead_tokens * child.readers:
            stem.children.append(child)
        else:
            stem.children += child.children
            stem.prompts += child.prompts


def _saved(stems: Sequence[Stem | None]) -> int:
    """Return the number of prompt tokens that sharing these prefixes saves."""
    read_apart = sum(stem.new_tokens for stem in {link for stem in stems for link in _chain(stem)})
    return sum(len(stem.tokens) for stem in stems if stem) - read_apart


class Padding:
    """Decides which requests may be prefilled in padded rows, and how many rows one forward takes."""

    def __init__(self, body: HookedModel) -> None:
        self.body = body
        self._proven: bool | None = None

    def allowed(self, item: Prepared) -> bool:
        """Return whether a request may be padded: it scores single-token options only, and its acts treat all tokens alike.

        Needs an open session.
        """
        ends = bool(item.request.options) and item.request.steps == 1
        return ends and not item.one_piece and even(item) and not watched(self.body) and self.proven()

    def proven(self) -> bool:
        """Return whether padded rows give the same logits as unpadded ones. Checked once; needs an open session."""
        if self._proven is None:
            self._proven = try_proof(self.body, self._prove)
        return bool(self._proven)

    def _prove(self) -> bool:
        body, longest = self.body, max(_PROOF_LENGTHS)
        tokens = torch.arange(len(_PROOF_LENGTHS) * longest, device=body.device).view(-1, longest) * 7 % body.anatomy.vocabulary
        ends = torch.tensor(_PROOF_LENGTHS, device=body.device)
        padded = tokens.masked_fill(torch.arange(longest, device=body.device) >= ends[:, None], PAD)

        def read(ids: Tensor, keep: Tensor) -> Tensor:
            rows = body.compile([()] * len(ids), [0] * len(ids), "prefill", torch.arange(len(ids), device=body.device))
            return body.feed(ids, body.new_memory(len(ids)), "prefill", rows, Tally(len(ids)), keep=keep)

        together = read(padded, ends - 1)
        alone = [read(row[None, :end], end[None] - 1) for row, end in zip(tokens, ends, strict=True)]
        return body.agree(torch.cat(alone), together)

    def pieces(self, lengths: Sequence[int]) -> list[list[int]]:
        """Partition readings into forwards so that the cost of padding plus forwards is least (dynamic programming).

        Args:
            lengths: Tokens that each reading has left.

        Returns:
            Indices of the readings of each forward.
        """
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        most, each = PIECE_TOKENS.get(self.body.device.type, 1 << 62), forward_tokens(self.body)
        best = [(0.0, 0)]  # least cost of the first n in that order, and where their last forward begins, negated
        for n in range(1, len(order) + 1):
            sizes = ((first, (n - first) * lengths[order[first]]) for first in range(n))
            best.append(min((best[first][0] + size + each, -first) for first, size in sizes if size <= most or first == n - 1))
        parted, n = [], len(order)
        while n:
            first = -best[n][1]
            parted.append(order[first:n])
            n = first
        return parted[::-1]


def even(item: Prepared) -> bool:
    """Return whether a request's prefill acts count the same for every token, so that padding can be subtracted from receipts.

    Where one layer has both fixed ablations and top-k selection, the number of zeroed heads depends on the token.
    """
    acts = item.acts["prefill"]
    kept = {act.layer for act in acts if isinstance(act, KeepBest)}
    both = any(isinstance(act, SilenceHeads) and act.layer in kept for act in acts)
    return not both and not any(isinstance(act, _UNEVEN) for act in acts)


def without_padding(receipt: Receipt, tokens: int, fed: int) -> Receipt:
    """Return the receipt of the first `tokens` of `fed` tokens, for acts that count the same for each token."""
    if tokens == fed:
        return receipt
    counts = {}
    for at, count in receipt.counts.items():
        if any(number * tokens % fed for number in count.values()):
            raise AssertionError(f"an uneven count in a padded row: {count} in {fed} tokens")
        counts[at] = {what: number * tokens // fed for what, number in count.items()}
    return Receipt(counts, receipt.swapped, receipt.notes)
