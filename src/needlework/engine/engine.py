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

import torch

from needlework.engine.budget import Budget
from needlework.engine.decode import NOT_FINITE, Decoder, Track, choose, first_bad_layer
from needlework.engine.depth import Depth
from needlework.engine.prefill import Reader
from needlework.engine.reading import Padding, group, out_of_memory, readings_of
from needlework.engine.score import score
from needlework.model.hooked_model import HookedModel
from needlework.model.memory import Memory
from needlework.requests import Answer, Prepared, Request, prepare

logger = logging.getLogger("needlework")
Batch = list[tuple[int, Prepared]]
ROWS_AT_ONCE = 512  # smaller batches pay the fixed cost of a step more often; larger ones gain little
_STEP_COST = 2.5  # prompt tokens that are prefilled in the time of one decoded token


class Engine:
    """Runs requests on a hooked model within a memory budget."""

    def __init__(self, body: HookedModel, memory_bytes: int | None = None) -> None:
        self.body = body
        self.budget = Budget(body, memory_bytes)
        self._alone, self._most = False, ROWS_AT_ONCE
        self.depth, self.padding = Depth(body), Padding(body)
        self.reader = Reader(body, self.depth, self.padding)  # of the latest run; its counters show how much was shared
        self._to_read, self._to_answer, self._answered = 0, 0, 0  # tokens of the current run

    @property
    def share(self) -> float:
        """The share of the current run that is done, from 0 to 1; 0 if no run is active. Safe to read from any thread.

        Counts prefilled and decoded tokens; an answer that stopped early counts with all its steps.
        """
        work = self._to_read + _STEP_COST * self._to_answer
        done = min(self.reader.tokens_asked, self._to_read) + _STEP_COST * min(self._answered, self._to_answer)
        return done / work if work else 0.0

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
        with self.body.session(), self.body.chunks_of(costs.chunk):  # opened before this engine's state is set, because
            self.budget.costs = costs  # another thread's run may still be active
            self.reader = Reader(self.body, self.depth, self.padding)
            readings = [reading for item in prepared for reading in readings_of(item).values() if reading.tokens]
            self._to_read = sum({reading.key: len(reading.tokens) for reading in readings}.values())
            self._to_answer, self._answered = sum(map(_answer_tokens, prepared)), 0
            self.reader.expect(readings, self.budget.fits_beside)
            scored = [pair for pair in enumerate(prepared) if pair[1].request.options]
            continued = [pair for pair in enumerate(prepared) if not pair[1].request.options]
            self._most = ROWS_AT_ONCE
            try:
                yield from self._score(deque(self._batches(scored, ROWS_AT_ONCE)))
                pending = deque(self._batches(continued, ROWS_AT_ONCE))
                self._alone = len(pending) == 1
                yield from self._decode(pending)
            finally:
                self._to_read = self._to_answer = 0

    def _batches(self, requests: Batch, most: int) -> Iterator[Batch]:
        return self.budget.batches(requests, most, self.reader.stems_of, self.padding.allowed)

    def _fits(self, batch: Batch, decoder: Decoder) -> bool:
        keys = 2 * decoder.memory.nbytes("kv")  # twice: copied when transposed for the kernel or when batches are joined
        return self.budget.fits(batch, decoder.alive(), self.reader.kept_bytes + keys)

    def _score(self, pending: deque[Batch]) -> Iterator[tuple[int, Answer]]:
        while pending:
            batch = pending.popleft()
            try:
                answers = score(self.body, self.reader, batch)
            except Exception as error:
                if not out_of_memory(error):
                    raise
                self._halve(batch, pending, error, reading=True)
            else:
                self._answered += sum(_answer_tokens(item) for _, item in batch)
                yield from answers

    def _decode(self, pending: deque[Batch]) -> Iterator[tuple[int, Answer]]:
        """Prefill and decode all pending batches; a batch joins once the decoder is at most half full."""
        decoder: Decoder | None = None
        while pending or decoder:
            room = decoder is None or (decoder.memory.ragged and 2 * len(decoder) <= self._most)
            try:
                if pending and room and (decoder is None or self._fits(pending[0], decoder)):
                    decoder, finished = self._admit(pending.popleft(), decoder, pending)
                else:
                    assert decoder is not None
                    rows = len(decoder)
                    finished = decoder.step()
                    self._answered += rows
            except Exception as error:
                if decoder is None or not out_of_memory(error):
                    raise
                self._halve([(t.index, t.prepared) for t in decoder.alive()], pending, error)
                decoder, finished = None, []
            self._answered += sum(track.prepared.request.steps - len(track.tokens) for track in finished)
            for track in finished:
                yield track.index, self._answer(track)
            if decoder is not None and not len(decoder):
                decoder = None

    def _admit(self, batch: Batch, decoder: Decoder | None, pending: deque[Batch]) -> tuple[Decoder | None, list[Track]]:
        """Prefill a batch and add it to the decoder; if memory runs out, put smaller batches back into `pending`."""
        try:
            new, finished = self._start(batch)
            if new is not None:
                return decoder.join(new) if decoder else new, finished
        except Exception as error:
            if not out_of_memory(error):
                raise
            finished = []
            if decoder is not None and len(batch) == 1:  # it may fit alone: nothing joins until the decoder is empty
                self._most = 1
                pending.appendleft(batch)
            else:
                self._halve(batch, pending, error, reading=True)
        if decoder is not None:
            decoder.begin_observation()
        return decoder, finished

    def _halve(self, batch: Batch, pending: deque[Batch], error: Exception, reading: bool = False) -> None:
        """Put a batch that ran out of memory back into `pending`, in halves, or in shorter chunks if it is one prefill."""
        if len(batch) == 1:
            if reading and self._shorter_chunks(batch[0][1]):
                pending.appendleft(batch)
                return
            raise MemoryError(f"one trial of {len(batch[0][1].request.prompt)} prompt tokens does not fit into memory") from error
        fewer = self._most = (len(batch) + 1) // 2  # also for later batches, which would run out again
        logger.warning("out of memory with %d rows: going on with %d", len(batch), fewer)
        pending.extendleft(reversed(list(self._batches(batch, fewer))))

    def _shorter_chunks(self, item: Prepared) -> bool:
        """Halve the prefill chunk for the rest of the run; return False if that would not help this request."""
        costs = self.budget.costs.in_smaller_chunks()
        if costs is None or item.one_piece or max(item.prefill_tokens, item.request.steps - 1) <= costs.chunk:
            return False
        self.budget.costs, self.body.chunk = costs, costs.chunk
        logger.warning("out of memory with one prompt: going on in chunks of %d tokens", costs.chunk)
        return True

    def _start(self, batch: Batch) -> tuple[Decoder | None, list[Track]]:
        """Prefill the batch, fork its cache, and choose the first token where prefill produces its logits."""
        tracks = [Track(i, item) for i, item in batch]
        memory: Memory | None
        tokens, decodes_last = batch[0][1].prefill_tokens, batch[0][1].request.decodes_last
        if tokens == 0:
            memory, logits = self.body.new_memory(len(batch)), None
        else:
            readings, places = group([item for _, item in batch])
            read = self.reader.read(readings, remember=decodes_last or any(item.request.steps > 1 for _, item in batch))
            memory = self._fork(read.memory, places) if read.memory is not None else None
            own = [place["own"] for place in places]
            for track, place in zip(tracks, places, strict=True):
                swapped = tuple(half for half in track.prepared.twins if place[half] != place["own"])
                track.receipt = replace(read.receipts[place["own"]], swapped=swapped)
            logits = read.logits[torch.tensor(own, device=self.body.device)]
        if decodes_last:
            assert memory is not None
            fed = torch.tensor([item.request.prompt[-1] for _, item in batch], device=self.body.device)
            return Decoder(self.body, tracks, memory, fed, torch.full_like(fed, tokens)), []
        assert logits is not None
        fed, going = choose(logits, tracks)
        done, rows = [t for t in tracks if t.finish], going.nonzero()[:, 0]
        if not len(rows):
            return None, done
        assert memory is not None
        memory = memory.select(rows) if done else memory
        alive = [t for t in tracks if not t.finish]
        return Decoder(self.body, alive, memory, fed[rows], torch.full_like(rows, tokens)), done

    def _fork(self, memory: Memory, places: Sequence[Mapping[str, int]]) -> Memory:
        """Return a cache with one row per request; a swapped half (kv or recurrent) comes from the twin's prefill.

        Args:
            memory: The cache of the distinct prefills.
            places: For each request, the rows of `memory` that hold its own prompt ("own") and its twins (by half).
        """
        kv = torch.tensor([place.get("kv", place["own"]) for place in places], device=self.body.device)
        recurrent = torch.tensor([place.get("recurrent", place["own"]) for place in places], device=self.body.device)
        straight = torch.arange(memory.rows, device=self.body.device)
        if self._alone and torch.equal(kv, straight) and torch.equal(recurrent, straight):
            return memory  # nothing is forked and no batch will join: the stock cache can be used as it is
        if self.body.shareable:
            return memory.share(kv, recurrent)
        return memory.select(kv, recurrent)

    def _answer(self, track: Track) -> Answer:
        if track.error == NOT_FINITE:
            track.error = f"{NOT_FINITE}; the first layer that is not is {first_bad_layer(self.body, track)}"
        return track.answer()


def _answer_tokens(item: Prepared) -> int:
    """Return the maximum number of answer tokens: the decode steps, or all tokens of all options."""
    return sum(map(len, item.request.options)) or item.request.steps
