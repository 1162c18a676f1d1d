"""The engine batches requests within a memory budget and yields answers as they finish.

Requests with the same prompt and the same prefill acts share one prefill. Prompts of one length are prefilled in one batch;
then the cache is forked: each request gets its own row, which reads the shared keys without a copy. Rows of all lengths decode
as one batch, which is refilled as rows finish. Options of one length are scored in one forward; options of a single token need
none, because the prompt's last logits already score them.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from needlework.engine.budget import Budget, group, out_of_memory, prefills_of
from needlework.engine.prefill import KeptPrefills, Padding, Prefiller, compile_items
from needlework.engine.shared_layers import SharedLayers
from needlework.interventions.acts import Half
from needlework.model.hooked_model import HookedModel
from needlework.model.memory import Memory, TokenSource
from needlework.receipts import Receipt, Tally
from needlework.requests import Answer, Finish, Prepared, Request, Swap, prepare

logger = logging.getLogger("needlework")
IndexedRequests = list[tuple[int, Prepared]]
ROWS_AT_ONCE = 512  # smaller batches pay the fixed cost of a step more often; larger ones gain little
_STEP_COST = 2.5  # prompt tokens that are prefilled in the time of one decoded token
_NOT_FINITE = "the logits are not finite"


class Engine:
    """Runs requests on a hooked model within a memory budget."""

    def __init__(self, body: HookedModel, memory_bytes: int | None = None) -> None:
        self.body, self.budget = body, Budget(body, memory_bytes)
        self.padding = Padding(body)
        self.shared_layers = SharedLayers(body)
        self.prefiller = self._new_prefiller()  # of the latest run
        self._active: _Run | None = None

    def _new_prefiller(self, kept: KeptPrefills | None = None) -> Prefiller:
        return Prefiller(self.body, self.shared_layers, self.padding, self.budget.costs.chunk, kept)

    @property
    def share(self) -> float:
        """The share of the current run's tokens that is done, from 0 to 1; 0 if no run is active. Readable from any thread."""
        run = self._active
        return run.share() if run else 0.0

    # [walk 4] docs/architecture.md
    def run(self, requests: Sequence[Request | Prepared], kept: KeptPrefills | None = None) -> Iterator[tuple[int, Answer]]:
        """Run the requests and yield (index of the request, answer) as answers finish.

        All requests are checked before any compute.

        Args:
            kept: Prefills of earlier runs, which are not read again; those of this run are added.

        Raises:
            NeedleworkError: A request is invalid, or one request alone exceeds the given memory limit.
            MemoryError: One request alone runs out of memory.
        """
        apart = self.body.observer is not None and self.body.observer.each_sample
        prepared = [
            replace(one, apart=apart) if isinstance(one, Prepared) else prepare(one, self.body.anatomy, apart) for one in requests
        ]
        for item in prepared:
            self.body.check_length(item.tokens_read)
            self.body.check_rankings(item.request.intervention)
        costs = self.budget.check(prepared)
        with self.body.session():  # opened before this engine's state is set: another thread's run may still be active
            self.budget.costs = costs
            self.prefiller = self._new_prefiller(kept)
            self._active = _Run(self.body, self.budget, self.prefiller, prepared)
            try:
                yield from self._active.answers()
            finally:
                self._active = None


class _Run:
    """One run of an engine: its batches, and how far it is."""

    def __init__(self, body: HookedModel, budget: Budget, prefiller: Prefiller, prepared: Sequence[Prepared]) -> None:
        self.body, self.budget, self.prefiller, self.prepared = body, budget, prefiller, prepared
        self.most = ROWS_AT_ONCE  # fewer once memory has run out
        prefills = [prefill for item in prepared for prefill in prefills_of(item).values() if prefill.tokens]
        self.to_read = sum({prefill.key: len(prefill.tokens) for prefill in prefills}.values())  # tokens
        self.to_answer, self.answered = sum(map(_answer_tokens, prepared)), 0
        prefiller.expect(prefills, budget.fits_beside)

    def share(self) -> float:
        """Return the share of the work that is done."""
        work = self.to_read + _STEP_COST * self.to_answer
        read = min(self.prefiller.tokens_requested, self.to_read)
        return (read + _STEP_COST * min(self.answered, self.to_answer)) / max(1.0, work)

    def answers(self) -> Iterator[tuple[int, Answer]]:
        """Yield (index of the request, answer): first of the requests with options, then of those that generate."""
        for answer, scored in ((self._score, True), (self._decode, False)):
            requests = [pair for pair in enumerate(self.prepared) if bool(pair[1].request.options) == scored]
            yield from answer(deque(self._batches(requests, ROWS_AT_ONCE)))

    def _batches(self, requests: IndexedRequests, most: int) -> Iterator[IndexedRequests]:
        return self.budget.batches(requests, most, self.prefiller.prefixes_of, self.prefiller.padding.allowed)

    def _score(self, pending: deque[IndexedRequests]) -> Iterator[tuple[int, Answer]]:
        while pending:
            batch = pending.popleft()
            try:
                answers = score(self.body, self.prefiller, batch)
            except Exception as error:
                self._halve(batch, pending, error, prefilling=True)
            else:
                self.answered += sum(_answer_tokens(item) for _, item in batch)
                yield from answers

    def _decode(self, pending: deque[IndexedRequests]) -> Iterator[tuple[int, Answer]]:
        """Prefill and decode all pending batches; a batch joins once the decoder is at most half full."""
        decoder: Decoder | None = None
        alone = len(pending) == 1
        while pending or decoder:
            try:
                if pending and (decoder is None or self._fits(pending[0], decoder)):
                    decoder, finished = self._admit(pending.popleft(), decoder, pending, alone)
                else:
                    assert decoder is not None
                    rows = len(decoder)
                    finished = decoder.step()
                    self.answered += rows
            except Exception as error:
                if decoder is None:
                    raise
                self._halve([(t.index, t.prepared) for t in decoder.alive()], pending, error)
                decoder, finished = None, []
            self.answered += sum(one.steps - len(one.tokens) for one in finished)
            for generation in finished:
                yield generation.index, generation.answer(self.body)
            if decoder is not None and not len(decoder):
                decoder = None

    def _fits(self, batch: IndexedRequests, decoder: Decoder) -> bool:
        """Return whether a batch may join those that decode: half of the rows are free, and memory suffices."""
        if not decoder.memory.ragged or 2 * len(decoder) > self.most:
            return False
        keys = 2 * decoder.memory.nbytes("kv")  # twice: copied when transposed for the kernel or when batches are joined
        costs, items = self.budget.costs, [item for _, item in batch]
        held = self.prefiller.kept_bytes + keys + sum(costs.row(generation.prepared) for generation in decoder.alive())
        return held + costs.batch(items) <= self.budget.limit

    def _admit(
        self, batch: IndexedRequests, decoder: Decoder | None, pending: deque[IndexedRequests], alone: bool
    ) -> tuple[Decoder | None, list[Generation]]:
        """Prefill a batch and add it to the decoder; if memory runs out, put smaller batches back into `pending`."""
        try:
            new, finished = self._start(batch, alone)
            if new is not None:
                return decoder.join(new) if decoder else new, finished
        except Exception as error:
            finished = []
            if out_of_memory(error) and decoder is not None and len(batch) == 1:
                self.most = 1  # it may fit alone: nothing joins until the decoder is empty
                pending.appendleft(batch)
            else:
                self._halve(batch, pending, error, prefilling=True)
        if decoder is not None:
            decoder.begin_observation()
        return decoder, finished

    def _halve(self, batch: IndexedRequests, pending: deque[IndexedRequests], error: Exception, prefilling: bool = False) -> None:
        """Put a batch that ran out of memory back into `pending`, in halves, or in shorter chunks if it is one prefill.

        Raise the error if it is another one, and MemoryError if the batch cannot be made smaller.
        """
        if not out_of_memory(error):
            raise error
        if len(batch) > 1:
            fewer = self.most = (len(batch) + 1) // 2  # also for later batches, which would run out again
            logger.warning("out of memory with %d rows: going on with %d", len(batch), fewer)
            pending.extendleft(reversed(list(self._batches(batch, fewer))))
            return
        item, costs = batch[0][1], self.budget.costs.in_smaller_chunks()
        helps = prefilling and costs and not item.one_piece and max(item.prefill_tokens, item.request.steps - 1) > costs.chunk
        if not helps or costs is None:
            raise MemoryError(f"one trial of {len(item.request.prompt)} prompt tokens does not fit into memory") from error
        self.budget.costs, self.prefiller.chunk = costs, costs.chunk  # for the rest of the run
        logger.warning("out of memory with one prompt: going on in chunks of %d tokens", costs.chunk)
        pending.appendleft(batch)

    def _start(self, batch: IndexedRequests, alone: bool) -> tuple[Decoder | None, list[Generation]]:
        """Prefill the batch, fork its cache, and choose the first token where prefill produces its logits."""
        generations = [Generation(i, item) for i, item in batch]
        memory: Memory | None
        tokens, decodes_last = batch[0][1].prefill_tokens, batch[0][1].request.decodes_last
        if tokens == 0:
            memory, logits = self.body.new_memory(len(batch)), None
        else:
            prefills, places = group([item for _, item in batch])
            result = self.prefiller.run(
                prefills, remember=decodes_last or any(generation.steps > 1 for generation in generations)
            )
            memory = self._fork(result.memory, places, alone) if result.memory is not None else None
            for generation, place in zip(generations, places, strict=True):
                generation.receipt = self._with_swaps(result.receipts[place[None]], place, result.memory)
            logits = result.logits[torch.tensor([place[None] for place in places], device=self.body.device)]
        if decodes_last:
            assert memory is not None
            fed = torch.tensor([item.request.prompt[-1] for _, item in batch], device=self.body.device)
            return Decoder(self.body, generations, memory, fed, torch.full_like(fed, tokens)), []
        assert logits is not None
        fed, going = choose(logits, generations)
        done, rows = [t for t in generations if t.finish], going.nonzero()[:, 0]
        if not len(rows):
            return None, done
        assert memory is not None
        memory = memory.select(rows) if done else memory
        alive = [t for t in generations if not t.finish]
        return Decoder(self.body, alive, memory, fed[rows], torch.full_like(rows, tokens)), done

    def _with_swaps(self, receipt: Receipt, place: Mapping[Swap | None, int], memory: Memory | None) -> Receipt:
        """Return a prefill's receipt with the parts of the cache that come from another prefill."""
        swapped = [swap for swap, row in place.items() if swap is not None and row != place[None]]
        of_layers: dict[tuple[int, str], dict[str, int]] = {}
        for swap in swapped:
            if swap.layer >= 0:
                layers = self.body.cache_layers(swap.half, swap.layer)
                if swap.positions and memory is not None:
                    count = sum(len(memory.places(layer, swap.positions)) for layer in layers)
                else:
                    count = len(layers)
                of_layers[swap.layer, "prefill"] = {swap.counted: count}
        return replace(receipt + Receipt(of_layers), swapped=tuple(swap.half for swap in swapped if swap.layer < 0))

    def _fork(self, memory: Memory, places: Sequence[Mapping[Swap | None, int]], alone: bool) -> Memory:
        """Return a cache with one row per request; swapped parts of it come from the twin's prefill.

        Args:
            memory: The cache of the distinct prefills.
            places: For each request, the rows of `memory` that hold its own prompt (None) and the twin of each swapped part.
            alone: Whether no other batch can join, so that the stock cache can be used as it is if nothing is forked.
        """
        memory, rows = self._with_mixed_keys(memory, places)
        own = torch.tensor(rows, device=self.body.device)
        sources: dict[tuple[Half, int], Tensor] = {}
        swaps = [(swap, row, other) for row, place in enumerate(places) for swap, other in place.items() if swap is not None]
        for swap, row, other in sorted(swaps):  # of all layers first
            if swap.positions:
                continue
            for layer in self.body.cache_layers(swap.half, swap.layer) if swap.layer >= 0 else (-1,):
                whole = sources.get((swap.half, -1), own)
                sources.setdefault((swap.half, layer), whole.clone())[row] = other
        if alone and not sources and torch.equal(own, torch.arange(memory.rows, device=own.device)):
            return memory
        return memory.share(own, sources) if self.body.shareable else memory.select(own, sources)

    def _with_mixed_keys(self, memory: Memory, places: Sequence[Mapping[Swap | None, int]]) -> tuple[Memory, list[int]]:
        """Add a row for each prompt that has some tokens' keys from another; return the memory and each request's row."""
        rows, added = [], dict[tuple[int, tuple[TokenSource, ...]], int]()
        for place in places:
            parts = tuple(
                TokenSource(layer, swap.positions, other)
                for swap, other in place.items()
                if swap is not None and swap.positions
                for layer in self.body.cache_layers(swap.half, swap.layer)
            )
            own = place[None]
            rows.append(added.setdefault((own, parts), memory.rows + len(added)) if parts else own)
        return (memory.with_mixed_keys(list(added)) if added else memory), rows


def _answer_tokens(item: Prepared) -> int:
    """Return the maximum number of answer tokens: the decode steps, or all tokens of all options."""
    return sum(map(len, item.request.options)) or item.request.steps


# --- Decoding, and the scores of options ---


@dataclass
class Generation:
    """The state of one request while it decodes."""

    index: int  # of the request
    prepared: Prepared
    receipt: Receipt = field(default_factory=Receipt)  # counts of what was done to it so far
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    finish: Finish | None = None
    steps: int = field(init=False)  # copied from the request, so that it is not computed at every token
    stop: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        request = self.prepared.request
        self.steps, self.stop = request.steps, frozenset() if request.forced else frozenset(request.stop)

    def answer(self, body: HookedModel) -> Answer:
        """Return the answer of a finished request. Needs an open session: what failed is run again."""
        assert self.finish is not None
        receipt = replace(self.receipt, notes=self.prepared.notes(self.receipt))
        error = self.prepared.failure(receipt)
        if self.finish == "failed":
            error = f"{_NOT_FINITE}; the first layer that is not is {_first_bad_layer(body, self.prepared, self.tokens)}"
        finish: Finish = "failed" if error else self.finish
        return Answer(tuple(self.tokens), tuple(self.logprobs), tuple(self.margins), receipt, finish, error)


class Decoder:
    """A batch of rows that decode in lockstep; finished rows leave, and others may join where the cache allows it."""

    def __init__(
        self, body: HookedModel, generations: Sequence[Generation], memory: Memory, tokens: Tensor, positions: Tensor
    ) -> None:
        self.body, self.generations, self.memory = body, list(generations), memory
        self.tokens, self.positions = tokens, positions  # [rows] next input token and its position
        self.rows = compile_items(body, [generation.prepared for generation in generations], "decode")
        self.tally = Tally(len(self.generations))
        self.begin_observation()

    def __len__(self) -> int:
        return len(self.rows.slots)

    def begin_observation(self) -> None:
        """Tell the observer, if there is one, which request each slot belongs to; again after any other batch was prefilled."""
        if self.body.observer is not None:
            self.body.observer.begin([generation.prepared.request for generation in self.generations], self.body.device)

    def alive(self) -> list[Generation]:
        return [self.generations[i] for i in self.rows.slots.tolist()]

    def step(self) -> list[Generation]:
        """Feed one token to every row and return the generations that finished."""
        fed, positions = self.tokens[:, None], self.positions[:, None]
        logits = self.body.feed(fed, self.memory, "decode", self.rows, self.tally, positions)[:, 0]  # [rows, vocabulary]
        self.positions = self.positions + 1
        alive = self.alive()
        self.tokens, going = choose(logits, alive)
        if self.body.observer is not None:
            self.body.observer.chose(self.rows.slots, self.tokens)
        if bool(going.all()):
            return []
        for slot, generation in zip(self.rows.slots.tolist(), alive, strict=True):
            if generation.finish:
                generation.receipt = generation.receipt + self.tally.receipt(slot)
        rows = going.nonzero()[:, 0]
        self.tokens, self.positions, self.rows = self.tokens[rows], self.positions[rows], self.rows.select(rows)
        if len(rows):
            self.memory = self.memory.select(rows)
        return [generation for generation in alive if generation.finish]

    def join(self, other: Decoder) -> Decoder:
        """Return both batches as one; counts so far are moved to the generations' receipts, unless memory runs out before."""
        joined = Decoder(
            self.body,
            self.alive() + other.alive(),
            Memory.join([self.memory, other.memory]),
            torch.cat([self.tokens, other.tokens]),
            torch.cat([self.positions, other.positions]),
        )
        for decoder in (self, other):
            for slot, generation in zip(decoder.rows.slots.tolist(), decoder.alive(), strict=True):
                generation.receipt = generation.receipt + decoder.tally.receipt(slot)
        return joined


def choose(logits: Tensor, generations: Sequence[Generation]) -> tuple[Tensor, Tensor]:
    """Choose the next token of every row (forced, or argmax of logits [rows, vocabulary]) and record it in its generation.

    Returns:
        Token ids [rows], and a boolean mask [rows] of the rows that continue.
    """
    finite = logits.isfinite().all(-1)
    top = logits.topk(2, -1).values if logits.shape[-1] > 1 else logits.expand(-1, 2)
    best = logits.argmax(-1)
    forced = [t.prepared.request.forced for t in generations]
    if any(forced):
        known = [f[len(t.tokens)] if f else -1 for f, t in zip(forced, generations, strict=True)]
        wanted = torch.tensor(known, device=logits.device)
        best = torch.where(wanted >= 0, wanted, best)
    logprob = logits.gather(-1, best[:, None])[:, 0] - logits.logsumexp(-1)
    columns = (best.tolist(), logprob.tolist(), (top[:, 0] - top[:, 1]).tolist(), finite.tolist())
    for generation, token, log, margin, good in zip(generations, *columns, strict=True):
        if not good:
            generation.finish = "failed"
            continue
        generation.tokens.append(token)
        generation.logprobs.append(log)
        generation.margins.append(margin)
        if token in generation.stop:
            generation.finish = "stop"
        elif len(generation.tokens) >= generation.steps:
            generation.finish = "length"
    return best, torch.tensor([not generation.finish for generation in generations], device=logits.device)


def score(body: HookedModel, prefiller: Prefiller, batch: Sequence[tuple[int, Prepared]]) -> list[tuple[int, Answer]]:
    """Return (index, answer) of each request, with the log-likelihoods of its options; options share their prompt's prefill."""
    prefills, places = group([item for _, item in batch])
    result = prefiller.run(prefills, remember=any(item.request.steps > 1 for _, item in batch))
    rows = [(place[None], item, o) for place, (_, item) in zip(places, batch, strict=True) for o in item.request.options]
    if body.observer is not None:
        body.observer.begin([item.request for _, item, _ in rows], body.device)
    tally, first = Tally(len(rows)), result.logits.log_softmax(-1)  # [prefills, vocabulary]: scores each option's first token
    scores: list[tuple[tuple[float, ...], bool]] = [((), True)] * len(rows)  # of each token, and whether all are the argmax
    for length in sorted({len(option) for *_, option in rows}):
        # Options of one length share a forward: without padding, receipts count only the options' own tokens.
        alike = [r for r, (*_, option) in enumerate(rows) if len(option) == length]
        place, tokens = (torch.tensor([rows[r][part] for r in alike], device=body.device) for part in (0, 2))
        logprobs, greedy = first[place, tokens[:, 0]][:, None], first.argmax(-1)[place] == tokens[:, 0]
        if length > 1:
            assert result.memory is not None
            forked = result.memory.share(place) if body.shareable else result.memory.select(place)
            compiled = compile_items(body, [rows[r][1] for r in alike], "prefill", torch.tensor(alike, device=body.device))
            later = body.feed(tokens[:, :-1], forked, "prefill", compiled, tally, keep="all", chunk=prefiller.chunk)
            later = later.log_softmax(-1)
            logprobs = torch.cat([logprobs, later.gather(2, tokens[:, 1:, None])[..., 0]], 1)
            greedy &= (later.argmax(-1) == tokens[:, 1:]).all(1)
        for r, logs, best in zip(alike, logprobs.tolist(), greedy.tolist(), strict=True):
            scores[r] = tuple(logs), best
    numbers = iter(range(len(rows)))
    answers = []
    for own, (i, item) in zip(places, batch, strict=True):
        mine = [next(numbers) for _ in item.request.options]
        receipt = sum((tally.receipt(r) for r in mine), start=result.receipts[own[None]])
        receipt = replace(receipt, notes=item.notes(receipt))
        of_options, greedy_ones = zip(*(scores[r] for r in mine), strict=True)
        finite = all(math.isfinite(value) for logs in of_options for value in logs)
        error = item.failure(receipt) if finite else _NOT_FINITE
        finish: Finish = "failed" if error else "scored"
        answers.append((i, Answer(receipt=receipt, finish=finish, error=error, option_logprobs=of_options, greedy=greedy_ones)))
    return answers


def feed_tokens(body: HookedModel, items: Sequence[Prepared], ids: Tensor, keep: Literal["last", "all"]) -> Tensor:
    """Feed prompts and given answers [rows, tokens] in their phases; return logits of decode, and those of prefill to keep.

    The requests of all rows have prefills of one length.
    """
    memory, tally, split, parts = body.new_memory(len(items)), Tally(len(items)), items[0].prefill_tokens, []
    if split:
        parts.append(body.feed(ids[:, :split], memory, "prefill", compile_items(body, items, "prefill"), tally, keep=keep))
    compiled = compile_items(body, items, "decode")
    parts += [body.feed(ids[:, t : t + 1], memory, "decode", compiled, tally) for t in range(split, ids.shape[1])]
    return torch.cat(parts, 1)


def _first_bad_layer(body: HookedModel, item: Prepared, answer: Sequence[int]) -> str:
    """Run a failed request and its answer so far again; return the path of the first layer whose output is not finite."""
    bad: list[str] = []

    def watch(path: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            if isinstance(hidden, Tensor) and not bool(hidden.isfinite().all()) and not bad:
                bad.append(path)

        return hook

    lists = {path for path, module in body.model.named_modules() if isinstance(module, nn.ModuleList)}
    with ExitStack() as stack:
        for path, module in body.model.named_modules():
            if path.rpartition(".")[0] in lists or isinstance(module, nn.Embedding):
                stack.callback(module.register_forward_hook(watch(path)).remove)
        feed_tokens(body, [item], torch.tensor([[*item.request.prompt, *answer]], device=body.device), "last")
    return bad[0] if bad else "none of them (the output head)"
