"""How much fits into memory at once: estimates of cost, and batches cut to a limit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import psutil
import torch

from needlework.engine.reading import Reading, readings_of
from needlework.errors import NeedleworkError
from needlework.model.body import Body
from needlework.model.chunks import LEAST_CHUNK
from needlework.requests import Prepared

if TYPE_CHECKING:
    from needlework.engine.decode import Track
    from needlework.engine.prefill import Stem

_ACTIVATIONS = 24  # values kept per token and hidden unit while a layer runs, seen over the families


@dataclass(frozen=True)
class Costs:
    """Bytes that prompts and answers take of a model, on top of its weights. Estimates, seen over the families."""

    weights: int
    kv_per_token: int
    state: int
    heads: int
    vocabulary: int
    activations_per_token: int  # while a layer runs
    shareable: bool  # rows read the prompt's keys where they lie
    per_token: int = 0  # weights that a token of a prompt is multiplied with: no embedding, and of experts the chosen ones
    head: int = 0  # weights that are multiplied with where a token is to be said
    experts: float = 0.0  # part of all weights
    active: float = 1.0  # part of the experts that a token goes through
    chunk: int = 0  # the most tokens of a prompt that are read at once; 0: all of them

    @staticmethod
    def of(body: Body, value_bytes: int | None = None) -> Costs:
        """`value_bytes` where the model will be loaded in another precision than the one that the body is in."""
        anatomy, own = body.anatomy, int(next(body.model.parameters()).element_size())
        size = value_bytes or own
        config = body.model.config.get_text_config(decoder=True)
        embedding = int(body.model.get_input_embeddings().weight.numel())
        tied = body.model.get_output_embeddings() is None or bool(getattr(config, "tie_word_embeddings", False))
        experts = sum(p.numel() for name, p in body.model.named_parameters() if ".experts." in name)
        chosen, of = (getattr(config, key, None) for key in ("num_experts_per_tok", "num_experts"))
        active = chosen / of if experts and chosen and of else 1.0
        return Costs(
            anatomy.parameters * size,
            anatomy.kv_bytes_per_token * size // own,
            anatomy.state_bytes * size // own,
            sum(part.query_heads for _, part in anatomy.attention_parts()),
            anatomy.vocabulary,
            _ACTIVATIONS * int(config.hidden_size) * size,
            body.shareable,
            anatomy.parameters - embedding * (1 if tied else 2) - round(experts * (1 - active)),
            embedding,
            experts / anatomy.parameters,
            active,
            body.chunk if body.continues else 0,
        )

    def prompt(self, tokens: int, one_piece: bool = False) -> int:
        """Peak while a prompt is read, its memory included."""
        return tokens * 2 * self.kv_per_token + self.reading(tokens, one_piece) + self.state

    def reading(self, tokens: int, one_piece: bool = False) -> int:
        """What a forward takes while a prompt is read: all of it at once, or a chunk at a time."""
        return (tokens if one_piece or not self.chunk else min(tokens, self.chunk)) * self.activations_per_token

    def row(self, item: Prepared) -> int:
        """What one request adds: a row that decodes, or one for each option: their tokens are read at once, all logits kept."""
        steps, options = item.request.steps, len(item.request.options)
        if options and steps == 1:
            return 12 * self.vocabulary  # its reading tells of all options: nothing is forked
        own_keys = steps if self.shareable else steps + item.prefill_tokens
        scores = 4 * self.heads * (item.prefill_tokens + steps)
        kept = steps if options else 1
        read = self.reading(kept - 1) + 12 * kept * self.vocabulary
        return max(1, options) * (2 * (own_keys * self.kv_per_token + self.state) + read + scores)

    def batch(self, items: Sequence[Prepared]) -> int:
        """Rows that are read and go on together: each reading once, and each prompt that several of them are of once more."""
        readings = _Readings()
        return sum(self.row(item) + readings.add(item) * self.prompt(item.prefill_tokens, item.one_piece) for item in items)

    def within(self, limit: int | None, items: Iterable[Prepared]) -> Costs:
        """What it takes with chunks as small as this limit wants them.

        Refuses a limit that not even one request at a time stays within, with the least that does.
        """
        if limit is None:
            return self
        items, costs = list(items), self
        while (most := max(((costs.batch([item]), item.tokens_read) for item in items), default=(0, 0)))[0] > limit:
            smaller = costs.in_smaller_chunks()
            if smaller is None:
                break
            costs = smaller
        needs, tokens = most
        if needs > limit:
            raise NeedleworkError(
                f"memory: {amount(limit)} is too little: one request of {tokens:,} tokens takes about {amount(needs)}, beside"
                f" {amount(self.weights)} of weights and what Python and its libraries take (about 500MiB). Give"
                f" {amount(needs)} or more, or shorter prompts"
            )
        return costs

    def in_smaller_chunks(self) -> Costs | None:
        """With chunks of half the size; None where they are all of a prompt, or as small as they get."""
        return replace(self, chunk=self.chunk // 2) if self.chunk >= 2 * LEAST_CHUNK else None


class _Readings:
    """What is read for requests: their readings, and once more, untouched, every prompt that several readings are of.

    That one pays for its recording, too: readings go piece by piece, and each is charged activations of its own.
    """

    def __init__(self) -> None:
        self._keys: set[tuple[object, ...]] = set()
        self._prompts: dict[object, int] = {}  # -> readings of it

    def add(self, item: Prepared) -> int:
        """How many more are read with this request."""
        more = 0
        for key in {reading.key for reading in readings_of(item).values()} - self._keys:
            self._keys.add(key)
            self._prompts[key[0]] = self._prompts.get(key[0], 0) + 1
            more += 1 + (self._prompts[key[0]] == 2)
        return more


def amount(count: int) -> str:
    """Bytes as the command line takes them, rounded up."""
    unit, size = ("MiB", 2**20) if count >= 2**20 else ("KiB", 2**10)
    return f"{-(-count // size)}{unit}"


class Budget:
    """A number of bytes for prompts and answers, and what fits into it. The engine halves when estimates prove too low."""

    def __init__(self, body: Body, limit: int | None) -> None:
        self.given = limit
        self.limit = limit or default_limit(body.device)
        self.costs = self._usual = Costs.of(body)

    def check(self, items: Iterable[Prepared]) -> Costs:
        """What these requests take, in chunks that fit; refuses them if none do."""
        return self._usual.within(self.given, items)

    def fits(self, batch: Sequence[tuple[int, Prepared]], running: Sequence[Track], kept: int = 0) -> bool:
        """Whether a batch may be read while these trials decode and stems of so many bytes are kept."""
        items = [item for _, item in batch]
        now = sum(self.costs.row(track.prepared) for track in running)
        return now + kept + self.costs.batch(items) <= self.limit

    def fits_beside(self, reading: Reading, stems: Sequence[Stem]) -> bool:
        """Whether there is room for a request beside the stems that it starts from."""
        filled = _Filled(self.costs)
        filled.add(reading.item, stems)
        return filled.bytes <= self.limit

    def batches(
        self,
        requests: Sequence[tuple[int, Prepared]],
        most: int,
        stems_of: Callable[[Prepared], Sequence[Stem]] = lambda item: (),
        padded: Callable[[Prepared], bool] = lambda item: False,
    ) -> Iterator[list[tuple[int, Prepared]]]:
        """Batches that fit, the longest first; requests that share readings stay together where they can.

        A batch is of one length, but for requests that may be `padded`: of these, who start from one stem stand together, so
        that few stems are kept at a time.
        """
        may = {id(item): padded(item) for _, item in requests}
        chains = {id(item): stems_of(item) for _, item in requests}
        begins: dict[object, int] = {}  # beginnings, and beginnings under acts, are numbered as they come

        def order(pair: tuple[int, Prepared]) -> tuple[object, ...]:
            item, shelf = pair[1], list[int]()
            if may[id(item)] and (chain := chains[id(item)]):
                first = chain[-1].tokens
                shelf = [begins.setdefault(key, len(begins)) for key in (first, (first, *item.group[1:]))]
            return (may[id(item)], shelf, -item.prefill_tokens, item.request.boundary, item.request.prompt, pair[0])

        batch, filled = list[tuple[int, Prepared]](), _Filled(self.costs)
        for pair in sorted(requests, key=order):
            item = pair[1]
            filled.add(item, chains[id(item)])
            if batch and (_other(batch[0][1], item, may) or filled.bytes > self.limit or len(batch) >= most):
                yield batch
                batch, filled = [], _Filled(self.costs)
                filled.add(item, chains[id(item)])
            batch.append(pair)
        if batch:
            yield batch


class _Filled:
    """What a batch takes so far: rows, readings as long as its longest, and the stems that they start from."""

    def __init__(self, costs: Costs) -> None:
        self._costs, self._readings, self._stems = costs, _Readings(), dict[int, int]()
        self._rows = self._read = self._longest = 0
        self._one_piece = False

    def add(self, item: Prepared, stems: Sequence[Stem]) -> None:
        self._rows += self._costs.row(item)
        self._read += self._readings.add(item)
        self._longest = max(self._longest, item.prefill_tokens)
        self._one_piece |= item.one_piece
        self._stems |= {id(stem): self._costs.prompt(len(stem.tokens)) for stem in stems}

    @property
    def bytes(self) -> int:
        read = self._read * self._costs.prompt(self._longest, self._one_piece)
        return self._rows + read + sum(self._stems.values())


def _other(one: Prepared, item: Prepared, may: Mapping[int, bool]) -> bool:
    """Whether two requests cannot be read in one batch."""
    alike = one.prefill_tokens == item.prefill_tokens and one.request.decodes_last == item.request.decodes_last
    return may[id(one)] != may[id(item)] or not (alike or may[id(one)])


def out_of_memory(error: Exception) -> bool:
    """Whether an error says that memory ran out; CPU allocation failures are plain RuntimeErrors."""
    text = str(error).lower()
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and ("can't allocate memory" in text or "out of memory" in text)
    )


def default_limit(device: torch.device) -> int:
    """Half of what is free."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) // 2
    return int(psutil.virtual_memory().available) // 2
