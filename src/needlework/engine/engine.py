"""The engine batches requests within a memory budget and yields answers as they finish.

Requests with the same prompt and the same prefill acts share one prefill. Prompts of one length are prefilled in one batch;
then the cache is forked: each request gets its own row, which reads the shared keys without a copy. Rows of all lengths decode
as one batch, which is refilled as rows finish. Options of one length are scored in one forward; options of a single token need
none, because the prompt's last logits already score them.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from needlework.engine.budget import Budget, group, out_of_memory, prefills_of
from needlework.engine.decode import Decoder, Generation, choose, score
from needlework.engine.prefill import Padding, Prefiller
from needlework.engine.shared_layers import SharedLayers
from needlework.interventions.acts import Half
from needlework.model.hooked_model import HookedModel
from needlework.model.memory import Memory
from needlework.receipts import Receipt
from needlework.requests import Answer, Prepared, Request, Swap, prepare

logger = logging.getLogger("needlework")
Batch = list[tuple[int, Prepared]]
ROWS_AT_ONCE = 512  # smaller batches pay the fixed cost of a step more often; larger ones gain little
_STEP_COST = 2.5  # prompt tokens that are prefilled in the time of one decoded token


class Engine:
    """Runs requests on a hooked model within a memory budget."""

    def __init__(self, body: HookedModel, memory_bytes: int | None = None) -> None:
        self.body, self.budget = body, Budget(body, memory_bytes)
        self.padding = Padding(body)
        self.prefiller = self._new_prefiller()  # of the latest run
        self._active: _Run | None = None

    @cached_property
    def shared_layers(self) -> SharedLayers:
        """Shares lower layers; made when a prompt is first read under several acts, and kept with what it proved."""
        return SharedLayers(self.body)

    def _new_prefiller(self) -> Prefiller:
        return Prefiller(self.body, lambda: self.shared_layers, self.padding, self.budget.costs.chunk)

    @property
    def share(self) -> float:
        """The share of the current run that is done, from 0 to 1; 0 if no run is active. Safe to read from any thread.

        Counts prefilled and decoded tokens; an answer that stopped early counts with all its steps.
        """
        run = self._active
        return run.share() if run else 0.0

    # [walk 4] docs/architecture.md
    def run(self, requests: Sequence[Request | Prepared]) -> Iterator[tuple[int, Answer]]:
        """Run the requests and yield (index of the request, answer) as answers finish.

        All requests are checked before any compute.

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
            self.prefiller = self._new_prefiller()
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
        return (min(self.prefiller.tokens_asked, self.to_read) + _STEP_COST * min(self.answered, self.to_answer)) / max(1.0, work)

    def answers(self) -> Iterator[tuple[int, Answer]]:
        """Yield (index of the request, answer): first of the requests with options, then of those that generate."""
        for answer, scored in ((self._score, True), (self._decode, False)):
            requests = [pair for pair in enumerate(self.prepared) if bool(pair[1].request.options) == scored]
            yield from answer(deque(self._batches(requests, ROWS_AT_ONCE)))

    def _batches(self, requests: Batch, most: int) -> Iterator[Batch]:
        return self.budget.batches(requests, most, self.prefiller.prefixes_of, self.prefiller.padding.allowed)

    def _score(self, pending: deque[Batch]) -> Iterator[tuple[int, Answer]]:
        while pending:
            batch = pending.popleft()
            try:
                answers = score(self.body, self.prefiller, batch)
            except Exception as error:
                self._halve(batch, pending, error, prefilling=True)
            else:
                self.answered += sum(_answer_tokens(item) for _, item in batch)
                yield from answers

    def _decode(self, pending: deque[Batch]) -> Iterator[tuple[int, Answer]]:
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

    def _fits(self, batch: Batch, decoder: Decoder) -> bool:
        """Return whether a batch may join those that decode: half of the rows are free, and memory suffices."""
        if not decoder.memory.ragged or 2 * len(decoder) > self.most:
            return False
        keys = 2 * decoder.memory.nbytes("kv")  # twice: copied when transposed for the kernel or when batches are joined
        costs, items = self.budget.costs, [item for _, item in batch]
        held = self.prefiller.kept_bytes + keys + sum(costs.row(generation.prepared) for generation in decoder.alive())
        return held + costs.batch(items) <= self.budget.limit

    def _admit(
        self, batch: Batch, decoder: Decoder | None, pending: deque[Batch], alone: bool
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

    def _halve(self, batch: Batch, pending: deque[Batch], error: Exception, prefilling: bool = False) -> None:
        """Put a batch that ran out of memory back into `pending`, in halves, or in shorter chunks if it is one prefill.

        Raises:
            Exception: The error, if it is another one than that memory ran out.
            MemoryError: The batch cannot be made smaller.
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

    def _start(self, batch: Batch, alone: bool) -> tuple[Decoder | None, list[Generation]]:
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
                generation.receipt = self._with_swaps(result.receipts[place[None]], place)
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

    def _with_swaps(self, receipt: Receipt, place: Mapping[Swap | None, int]) -> Receipt:
        """Return a prefill's receipt with the parts of the cache that come from another prefill."""
        swapped = [swap for swap, row in place.items() if swap is not None and row != place[None]]
        of_layers = {
            (swap.layer, "prefill"): {swap.counted: len(self.body.cache_layers(swap.half, swap.layer))}
            for swap in swapped
            if swap.layer >= 0
        }
        return replace(receipt + Receipt(of_layers), swapped=tuple(swap.half for swap in swapped if swap.layer < 0))

    def _fork(self, memory: Memory, places: Sequence[Mapping[Swap | None, int]], alone: bool) -> Memory:
        """Return a cache with one row per request; swapped parts of it come from the twin's prefill.

        Args:
            memory: The cache of the distinct prefills.
            places: For each request, the rows of `memory` that hold its own prompt (None) and the twin of each swapped part.
            alone: Whether no other batch can join, so that the stock cache can be used as it is if nothing is forked.
        """
        own = torch.tensor([place[None] for place in places], device=self.body.device)
        sources: dict[tuple[Half, int], Tensor] = {}
        swaps = [(swap, row, other) for row, place in enumerate(places) for swap, other in place.items() if swap is not None]
        for swap, row, other in sorted(swaps):  # of all layers first
            for layer in self.body.cache_layers(*swap) if swap.layer >= 0 else (-1,):
                whole = sources.get((swap.half, -1), own)
                sources.setdefault((swap.half, layer), whole.clone())[row] = other
        if alone and not sources and torch.equal(own, torch.arange(memory.rows, device=own.device)):
            return memory
        return memory.share(own, sources) if self.body.shareable else memory.select(own, sources)


def _answer_tokens(item: Prepared) -> int:
    """Return the maximum number of answer tokens: the decode steps, or all tokens of all options."""
    return sum(map(len, item.request.options)) or item.request.steps
