"""The engine: takes requests, batches them within a memory budget, and hands back answers as they finish.

Requests that agree on their prompt and on what is done to it in prefill share one reading of it. Prompts of one length
are read together; then their memory is forked: each request gets a row of its own that reads the shared keys where they
lie. Rows of all lengths decode as one batch, which is refilled as rows finish; options are scored in one forward, and where
all are single tokens no forward is needed: what the prompt's reading says of the next token has all of them.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from needlework.engine.budget import Budget, out_of_memory
from needlework.engine.decode import NOT_FINITE, Decoder, Track, choose
from needlework.engine.depth import Depth
from needlework.engine.diagnosis import first_bad_layer
from needlework.engine.padding import Padding
from needlework.engine.prefill import Reader
from needlework.engine.reading import group, readings_of
from needlework.engine.score import score
from needlework.model.body import Body
from needlework.model.memory import Memory
from needlework.requests import Answer, Prepared, Request, prepare

logger = logging.getLogger("needlework")
Batch = list[tuple[int, Prepared]]
ROWS_AT_ONCE = 512  # fewer pay the fixed cost of a step more often; with more, little is left to gain
_STEP_COST = 2.5  # prompt tokens that are read in the time of one decoded token


class Engine:
    """Runs requests on a body within a memory budget."""

    def __init__(self, body: Body, memory_bytes: int | None = None) -> None:
        self.body = body
        self.budget = Budget(body, memory_bytes)
        self._alone, self._most = False, ROWS_AT_ONCE
        self.depth, self.padding = Depth(body), Padding(body)
        self.reader = Reader(body, self.depth, self.padding)  # of the newest run; its counts say how much was shared
        self._to_read, self._to_answer, self._answered = 0, 0, 0  # tokens, of the run that goes on

    @property
    def share(self) -> float:
        """How much of the work of the run that goes on is done, from 0 to 1; 0 if none does. Any thread may look.

        Counted in tokens that were read and answered; an answer that ended early was all of its work.
        """
        work = self._to_read + _STEP_COST * self._to_answer
        done = min(self.reader.tokens_asked, self._to_read) + _STEP_COST * min(self._answered, self._to_answer)
        return done / work if work else 0.0

    # [walk 4] docs/architecture.md
    def run(self, requests: Sequence[Request]) -> Iterator[tuple[int, Answer]]:
        """Answers as they finish, with the index of their request. All requests are checked before any compute."""
        apart = self.body.observer is not None and self.body.observer.each_sample
        prepared = [prepare(request, self.body.anatomy, apart) for request in requests]
        for item in prepared:
            self.body.check_length(item.tokens_read)
            self.body.check_rankings(item.request.intervention)
        costs = self.budget.check(prepared)
        with self.body.session(), self.body.chunks_of(costs.chunk):  # before anything of this engine is set: another
            self.budget.costs = costs  # thread's run may not be over
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
        keys = 2 * decoder.memory.nbytes("kv")  # once more turned around for the kernel, or while batches are joined
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
        """Read a batch and let it decode along; if it does not fit, put its halves back."""
        try:
            new, finished = self._start(batch)
            if new is None or decoder is None:
                return new or decoder, finished
            return decoder.join(new), finished
        except Exception as error:
            if not out_of_memory(error):
                raise
            self._halve(batch, pending, error, reading=True)
            return decoder, []

    def _halve(self, batch: Batch, pending: deque[Batch], error: Exception, reading: bool = False) -> None:
        if len(batch) == 1:
            if reading and self._shorter_chunks(batch[0][1]):
                pending.appendleft(batch)
                return
            raise MemoryError(f"one trial of {len(batch[0][1].request.prompt)} prompt tokens does not fit into memory") from error
        fewer = self._most = (len(batch) + 1) // 2  # also for what joins later: it would run out again
        logger.warning("out of memory with %d rows: going on with %d", len(batch), fewer)
        pending.extendleft(reversed(list(self._batches(batch, fewer))))

    def _shorter_chunks(self, item: Prepared) -> bool:
        """From now on, chunks are half as long; False if that would not help this request."""
        costs = self.budget.costs.in_smaller_chunks()
        if costs is None or item.one_piece or max(item.prefill_tokens, item.request.steps - 1) <= costs.chunk:
            return False
        self.budget.costs, self.body.chunk = costs, costs.chunk
        logger.warning("out of memory with one prompt: going on in chunks of %d tokens", costs.chunk)
        return True

    def _start(self, batch: Batch) -> tuple[Decoder | None, list[Track]]:
        """Read what the batch shares, fork it, and take the first token where prefill produces it."""
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
        """A row for each request: its keys from one reading, its recurrent state from the same one or from a twin's.

        `places` says for each request in which row of the memory its own reading and its twins' are.
        """
        kv = torch.tensor([place.get("kv", place["own"]) for place in places], device=self.body.device)
        recurrent = torch.tensor([place.get("recurrent", place["own"]) for place in places], device=self.body.device)
        straight = torch.arange(memory.rows, device=self.body.device)
        if self._alone and torch.equal(kv, straight) and torch.equal(recurrent, straight):
            return memory  # nothing is forked and nothing will join: the stock path serves as it is
        if self.body.shareable:
            return memory.share(kv, recurrent)
        return memory.select(kv, recurrent)

    def _answer(self, track: Track) -> Answer:
        if track.error == NOT_FINITE:
            track.error = f"{NOT_FINITE}; the first layer that is not is {first_bad_layer(self.body, track)}"
        return track.answer()


def _answer_tokens(item: Prepared) -> int:
    """The most tokens that answering takes: the steps of an answer, or all tokens of all options."""
    return sum(map(len, item.request.options)) or item.request.steps
