"""Prefill of prompts: each distinct prompt is computed once, and so is each prefix that several prompts share.

Shared prefixes are found with a prefix tree, which is pruned by what each branch would cost. Prefills of one prompt whose acts
begin at some layer share the layers below it instead (see shared_layers.py), where that saves more.

Prompts of several lengths share one forward where their cache is not needed afterwards and no count depends on padding. In a
causal model later tokens cannot change earlier ones, so padding is on the right, and each row's logits are taken after its own
last token. This is checked on the model itself first; a model that fails the check is prefilled one length at a time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from needlework.engine.budget import (
    FORWARD_TOKENS,
    Prefill,
    PrefillResult,
    forward_overhead,
    is_observed,
    prefills_of,
    split_rows,
    try_proof,
)
from needlework.engine.shared_layers import SharedLayers
from needlework.interventions import acts
from needlework.interventions.acts import Phase
from needlework.model.edits import keeps_from_sdpa
from needlework.model.hooked_model import HookedModel, Rows
from needlework.model.memory import Memory
from needlework.receipts import Receipt, Tally
from needlework.requests import Prepared

PAD = 0  # any token id: no real token attends to it
# The effect of these acts on a token depends on its position.
_UNEVEN = (
    *(acts.LimitKeys, acts.BlockEdges, acts.ExposeColumns, acts.ChangeOutputs, acts.ClearState),
    *(acts.RecordOutputs, acts.PatchOutputs),
)
_PROOF_LENGTHS = (12, 5, 9)


def compile_items(body: HookedModel, items: Sequence[Prepared], phase: Phase, slots: Tensor | None = None) -> Rows:
    """Compile the acts of these requests for one phase; slots as in `HookedModel.compile`."""
    return body.compile([item.acts[phase] for item in items], [item.sample for item in items], phase, slots)


class KeptPrefills:
    """Keeps the latest prefills, so that later runs on the same prompts need not read them again.

    Args:
        most_bytes: Of all memories that are kept; the oldest are dropped.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._results: OrderedDict[tuple[object, ...], PrefillResult] = OrderedDict()

    def run(self, prefills: Sequence[Prefill], read: Callable[[Sequence[Prefill]], PrefillResult]) -> PrefillResult:
        """Return copies of the results that are kept; those that are not are read, and kept."""
        new = [prefill for prefill in prefills if prefill.key not in self._results]
        if new:
            result = read(new)
            assert result.memory is not None
            if len(new) == len(prefills) and result.memory.nbytes() > self.most_bytes:
                return result  # too large to keep, and to copy
            for i, prefill in enumerate(new):
                memory = result.memory.select(torch.tensor([i], device=result.logits.device))
                self._results[prefill.key] = PrefillResult(memory, result.logits[i : i + 1], result.receipts[i : i + 1])
        for prefill in prefills:
            self._results.move_to_end(prefill.key)
        found = [self._results[prefill.key] for prefill in prefills]
        held = sum(one.memory.nbytes() for one in self._results.values() if one.memory)
        while held > self.most_bytes:
            _, oldest = self._results.popitem(last=False)
            held -= oldest.memory.nbytes() if oldest.memory else 0
        memories = [one.memory.select(torch.zeros(1, dtype=torch.int64, device=one.logits.device)) for one in found if one.memory]
        receipts = [receipt for one in found for receipt in one.receipts]
        return PrefillResult(Memory.join(memories), torch.cat([one.logits for one in found]), receipts)


class Prefiller:
    """Prefills prompts for the engine. The cache of a shared prefix is kept until its last prompt has started from it.

    Args:
        shared_layers: Shares lower layers among prefills of one prompt.
        chunk: Maximum tokens of one forward; 0: no limit.
        kept: Where results are kept for later runs; None: they are not.
    """

    def __init__(
        self,
        body: HookedModel,
        shared_layers: SharedLayers,
        padding: Padding,
        chunk: int,
        kept: KeptPrefills | None = None,
    ) -> None:
        self.body, self.shared_layers, self.padding, self.kept = body, shared_layers, padding, kept
        self.chunk = min(chunk, body.chunk)  # maximum tokens of one forward; 0: no limit
        self.prompts_read = self.tokens_requested = 0
        self.tokens_computed = 0.0  # each weighted by the share of the model that was computed for it
        self._prefixes: dict[tuple[object, ...], SharedPrefix] = {}  # key of a prefill -> shared prefix that it starts from
        self._kept: dict[SharedPrefix, tuple[Memory, Receipt]] = {}  # caches and receipts of shared prefixes

    @property
    def kept_bytes(self) -> int:
        """Bytes of the shared prefixes that are kept."""
        return sum(memory.nbytes() for memory, _ in self._kept.values())

    def prefixes_of(self, item: Prepared) -> list[SharedPrefix]:
        """Return the shared prefix that a request's prompt starts from and the prefixes it continues, longest first."""
        return _chain(self._prefixes.get(prefills_of(item)[None].key))

    def expect(self, prefills: Sequence[Prefill], fits: Callable[[Prefill, Sequence[SharedPrefix]], bool]) -> None:
        """Find the shared prefixes of all prefills of a run, before any of them is prefilled.

        If a prefill does not fit into memory beside the prefixes that it starts from, all with its acts do without.
        """
        if not self.body.continues:
            return
        whole = {prefill.key: prefill for prefill in prefills}
        by_acts: dict[tuple[object, ...], dict[tuple[object, ...], Prefill]] = defaultdict(dict)
        for key, prefill in whole.items():
            if not prefill.item.one_piece:
                by_acts[prefill.item.group[1:]][key] = prefill
        prefixes_of: dict[tuple[object, ...], list[SharedPrefix | None]] = {}
        for own, alike in by_acts.items():
            prefixes = find_shared_prefixes([prefill.tokens for prefill in alike.values()], forward_overhead(self.body))
            starts = [(prefill, prefix) for prefill, prefix in zip(alike.values(), prefixes, strict=True) if prefix]
            if _saved(prefixes) and all(fits(prefill, _chain(prefix)) for prefill, prefix in starts):
                prefixes_of[own] = prefixes
        while prefixes_of:  # the acts whose prefills gain most from shared prefixes over shared layers come first
            deep = self._share_layers(list(whole.values()))
            shares = {key: deep.get(i, 0.0) for i, key in enumerate(whole)}
            gains = {
                own: _saved(prefixes) - sum(len(prefill.tokens) * shares[key] for key, prefill in by_acts[own].items())
                for own, prefixes in prefixes_of.items()
            }
            best = max(gains, key=gains.__getitem__)
            if gains[best] <= 0:
                return
            for key, prefix in zip(by_acts[best], prefixes_of.pop(best), strict=True):
                del whole[key]  # it no longer shares layers with the rest
                if prefix is not None:
                    self._prefixes[key] = prefix

    def _share_layers(self, prefills: Sequence[Prefill]) -> dict[int, float]:
        """Return the share of compute that shared layers save, for each prefill that uses them."""
        repeated = len({prefill.tokens for prefill in prefills}) < len(prefills)
        return self.shared_layers.worthwhile(prefills, self.chunk) if repeated else {}

    def run(self, prefills: Sequence[Prefill], remember: bool = True) -> PrefillResult:
        """Prefill prompts, each under its own acts, and return logits, receipts and cache in the order given.

        Args:
            prefills: Of one length; with `remember=False`, of any lengths.
            remember: Whether to keep the cache, to decode or score from it.
        """
        observer = self.body.observer
        with self.body.observed_by(observer if observer is None or observer.prefill else None):
            if self.kept is None or self.body.observer is not None or not remember:
                return self._read(prefills, remember)
            return self.kept.run(prefills, partial(self._read, remember=True))

    def _read(self, prefills: Sequence[Prefill], remember: bool) -> PrefillResult:
        """Read the prompts of these prefills, as `run` describes it."""
        done: list[tuple[list[int], PrefillResult]] = []
        whole = [i for i, prefill in enumerate(prefills) if prefill.key not in self._prefixes]
        deep = self._share_layers([prefills[i] for i in whole])
        together = {whole[i]: prefills[whole[i]] for i in deep}
        for length in dict.fromkeys(len(prefill.tokens) for prefill in together.values()):
            before = self.shared_layers.tokens_computed
            done += self.shared_layers.run({i: x for i, x in together.items() if len(x.tokens) == length}, remember)
            self.tokens_computed += self.shared_layers.tokens_computed - before
        parts: dict[int, list[int]] = defaultdict(list)  # length of the shared prefix -> indices of prefills
        for i, prefill in enumerate(prefills):
            if i not in together:
                prefix = self._prefixes.get(prefill.key)
                parts[len(prefix.tokens) if prefix else 0].append(i)
        for known, members in parts.items():
            for some in self._split(prefills, members, known):
                rest = [prefills[i] for i in some]
                memory, earlier = self._start([(self._prefixes.get(one.key), one.item) for one in rest])
                logits, receipts = self._feed(rest, memory)
                both = [a + b for a, b in zip(earlier, receipts, strict=True)]
                done.append((some, PrefillResult(memory if remember else None, logits, both)))
        self.prompts_read += len(prefills)
        self.tokens_requested += sum(len(prefill.tokens) for prefill in prefills)
        return _joined(done)

    def _split(self, prefills: Sequence[Prefill], members: list[int], known: int) -> Iterator[list[int]]:
        """Yield the members (indices of prefills with `known` tokens in the cache) of each forward."""
        lengths = {len(prefills[i].tokens) - known for i in members}
        # Rows that need attention probabilities are batched together: they keep all rows of their forward from using SDPA.
        members.sort(key=lambda i: keeps_from_sdpa(prefills[i].item.acts["prefill"]))
        if len(lengths) == 1:
            yield from split_rows(members, lengths.pop(), self.body)
            return
        for _, alike in groupby(members, key=lambda i: keeps_from_sdpa(prefills[i].item.acts["prefill"])):
            some = list(alike)
            for piece in self.padding.split([len(prefills[i].tokens) - known for i in some]):
                yield [some[place] for place in piece]

    def _feed(self, prefills: Sequence[Prefill], memory: Memory) -> tuple[Tensor, list[Receipt]]:
        """Feed the tokens that `memory` does not hold yet; return last logits [prefills, vocabulary] and receipts."""
        body, rest = self.body, [prefill.tokens[memory.length :] for prefill in prefills]
        fed = max(map(len, rest))
        ids = torch.tensor([tokens + (PAD,) * (fed - len(tokens)) for tokens in rest], device=body.device)
        rows = compile_items(body, [prefill.item for prefill in prefills], "prefill")
        if body.observer is not None:
            body.observer.begin([prefill.shown for prefill in prefills], body.device)
        tally = Tally(len(prefills))
        ends = torch.tensor([len(tokens) - 1 for tokens in rest], device=body.device)
        padded = min(map(len, rest)) < fed
        logits = body.feed(ids, memory, "prefill", rows, tally, keep=ends if padded else "last", chunk=self.chunk)[:, 0]
        self.tokens_computed += sum(map(len, rest))
        return logits, [without_padding(tally.receipt(i), len(tokens), fed) for i, tokens in enumerate(rest)]

    def _start(self, starts: Sequence[tuple[SharedPrefix | None, Prepared]]) -> tuple[Memory, list[Receipt]]:
        """Return a writable cache with each row's shared prefix, and the receipts. Prefixes have one length, or all are None."""
        prefixes = {prefix: item for prefix, item in starts if prefix is not None}
        if not prefixes:
            return self.body.new_memory(len(starts)), [Receipt()] * len(starts)
        self._fill_prefixes(prefixes)
        kept = {prefix: self._kept[prefix] for prefix in prefixes}
        for prefix, _ in starts:
            assert prefix is not None
            prefix.waiting -= 1
            if prefix.waiting <= 0:
                self._kept.pop(prefix, None)
        joined = Memory.join([memory for memory, _ in kept.values()])
        receipts = [kept[prefix][1] for prefix, _ in starts if prefix]
        if len(starts) == 1 and not self._kept.keys() & prefixes:  # the last user takes the cache itself, without a copy
            return joined, receipts
        place = {prefix: i for i, prefix in enumerate(kept)}
        return joined.select(torch.tensor([place[prefix] for prefix, _ in starts if prefix], device=self.body.device)), receipts

    def _fill_prefixes(self, prefixes: Mapping[SharedPrefix, Prepared]) -> None:
        """Prefill the shared prefixes that are not cached yet, each under the acts of a request that starts from it."""
        new: dict[tuple[int, int], list[SharedPrefix]] = defaultdict(list)
        for prefix in prefixes:
            if prefix not in self._kept:
                new[len(prefix.tokens), prefix.new_tokens].append(prefix)
        for (_, tokens), alike in new.items():
            for some in split_rows(alike, tokens, self.body):
                memory, before = self._start([(prefix.parent, prefixes[prefix]) for prefix in some])
                _, receipts = self._feed([Prefill(prefixes[prefix], prefix.tokens) for prefix in some], memory)
                for i, prefix in enumerate(some):
                    own = memory if len(some) == 1 else memory.select(torch.tensor([i], device=self.body.device))
                    self._kept[prefix] = own, before[i] + receipts[i]


def _chain(prefix: SharedPrefix | None) -> list[SharedPrefix]:
    """Return a prefix and its ancestors, longest first."""
    return [] if prefix is None else [prefix, *_chain(prefix.parent)]


def _joined(done: Sequence[tuple[list[int], PrefillResult]]) -> PrefillResult:
    """Join the results of several forwards, in the order of the prefills' indices."""
    places = [i for members, _ in done for i in members]
    if len(done) == 1 and places == sorted(places):
        return done[0][1]
    order = torch.tensor(places).argsort().tolist()
    memories = [result.memory for _, result in done if result.memory is not None]
    rows = torch.tensor(order, device=done[0][1].logits.device)
    memory = Memory.join(memories) if memories else None
    memories.clear()
    for _, result in done:
        result.memory = None  # free these before rows are copied into their order
    receipts = [receipt for _, result in done for receipt in result.receipts]
    return PrefillResult(
        memory if memory is None or places == sorted(places) else memory.select(rows),
        torch.cat([result.logits for _, result in done])[rows],
        [receipts[i] for i in order],
    )


@dataclass(eq=False)
class SharedPrefix:
    """A prefix that several prompts share. Its parent is a shorter shared prefix that it continues."""

    tokens: tuple[int, ...]
    parent: SharedPrefix | None = None
    children: list[SharedPrefix] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)
    waiting: int = 0  # prompts and prefixes that have yet to start from it

    @property
    def new_tokens(self) -> int:
        return len(self.tokens) - (len(self.parent.tokens) if self.parent else 0)

    @property
    def users(self) -> int:
        """The number of prompts and prefixes that continue it directly."""
        return len(self.children) + len(self.prompts)


def find_shared_prefixes(prompts: Sequence[tuple[int, ...]], overhead_tokens: float) -> list[SharedPrefix | None]:
    """Return, for each prompt, the longest shared prefix worth prefilling on its own, or None.

    A prefix leaves each of its prompts at least one token to prefill, which gives the logits. It costs forwards of its own
    (each as much as `overhead_tokens`), and prompts that start from prefixes of different lengths cannot share a batch.
    """
    root = SharedPrefix(())
    _grow(root, sorted(range(len(prompts)), key=prompts.__getitem__), prompts, overhead_tokens)
    prefixes: list[SharedPrefix | None] = [None] * len(prompts)
    found = [root]
    for prefix in found:  # which grows meanwhile
        prefix.waiting = prefix.users
        for i in prefix.prompts:
            prefixes[i] = prefix if prefix is not root else None
        for child in prefix.children:
            child.parent = prefix if prefix is not root else None
            found.append(child)
    return prefixes


def _grow(prefix: SharedPrefix, members: Iterable[int], prompts: Sequence[tuple[int, ...]], overhead_tokens: float) -> None:
    """Add prompts (indices `members`, sorted by tokens) to the tree below a prefix, without branches that save too little."""
    known = len(prefix.tokens)
    for _, group in groupby(members, key=lambda i: prompts[i][known] if len(prompts[i]) > known + 1 else None):
        alike = list(group)
        first, last = prompts[alike[0]], prompts[alike[-1]]
        most = min(len(prompts[i]) for i in alike) - 1
        if len(alike) == 1 or most <= known:
            prefix.prompts += alike
            continue
        # Bisection: slices compare in C, token by token would be slow. What the first and the last share, all share.
        shared = known + bisect_left(range(known + 1, most + 1), True, key=lambda n: first[known:n] != last[known:n])
        child = SharedPrefix(first[:shared])
        _grow(child, alike, prompts, overhead_tokens)
        if (child.users - 1) * (shared - known) > overhead_tokens * child.users:
            prefix.children.append(child)
        else:
            prefix.children += child.children
            prefix.prompts += child.prompts


def _saved(prefixes: Sequence[SharedPrefix | None]) -> int:
    """Return the number of prompt tokens that sharing these prefixes saves."""
    read_apart = sum(prefix.new_tokens for prefix in {link for prefix in prefixes for link in _chain(prefix)})
    return sum(len(prefix.tokens) for prefix in prefixes if prefix) - read_apart


class Padding:
    """Decides which requests may be prefilled in padded rows, and how many rows one forward takes."""

    def __init__(self, body: HookedModel) -> None:
        self.body = body
        self._proven: bool | None = None

    def allowed(self, item: Prepared) -> bool:
        """Return whether a request may be padded: it scores single-token options only, and its acts treat all tokens alike.

        Otherwise padding could not be subtracted from receipts. Where one layer has both fixed ablations and top-k selection,
        the number of zeroed heads depends on the token. Needs an open session.
        """
        if not item.request.options or item.request.steps > 1 or item.one_piece:
            return False
        own = item.acts["prefill"]
        kept = {act.layer for act in own if isinstance(act, acts.KeepBest)}
        both = any(isinstance(act, acts.SilenceHeads) and act.layer in kept for act in own)
        uneven = both or any(isinstance(act, _UNEVEN) for act in own)
        return not uneven and not is_observed(self.body) and self.proven()

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
            rows = body.compile([()] * len(ids), [0] * len(ids), "prefill")
            return body.feed(ids, body.new_memory(len(ids)), "prefill", rows, Tally(len(ids)), keep=keep)

        together = read(padded, ends - 1)
        alone = [read(row[None, :end], end[None] - 1) for row, end in zip(tokens, ends, strict=True)]
        return body.agree(torch.cat(alone), together)

    def split(self, lengths: Sequence[int]) -> list[list[int]]:
        """Partition prefills with these numbers of tokens left into forwards, and return the indices of each forward.

        The cost of padding plus forwards is least (dynamic programming).
        """
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        most, each = FORWARD_TOKENS.get(self.body.device.type, 1 << 62), forward_overhead(self.body)
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
