"""Memory budget: estimates of the bytes that requests take, and batches that fit into a limit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import psutil
import torch

from needlework.engine.reading import Reading, readings_of
from needlework.errors import NeedleworkError
from needlework.model.chunks import LEAST_CHUNK
from needlework.model.hooked_model import HookedModel
from needlework.requests import Prepared

if TYPE_CHECKING:
    from needlework.engine.decode import Track
    from needlework.engine.prefill import Stem

_ACTIVATIONS = 24  # values held per token and hidden unit while a layer runs; measured over the model families


@dataclass(frozen=True)
class Costs:
    """Estimates of the bytes that prompts and answers take, on top of the weights; measured over the model families."""

    weights: int
    kv_per_token: int
    state: int
    heads: int
    vocabulary: int
    activations_per_token: int  # while a layer runs
    shareable: bool  # rows of one prompt read its keys without a copy
    per_token: int = 0  # weights used per prompt token: without embeddings, and only active experts
    head: int = 0  # weights of the output head, used where logits are computed
    experts: float = 0.0  # share of all weights that are in experts
    active: float = 1.0  # share of the experts that one token uses
    chunk: int = 0  # most prompt tokens of one forward; 0: no limit

    @staticmethod
    def of(body: HookedModel, value_bytes: int | None = None) -> Costs:
        """Estimate the costs of a model; `value_bytes` if it will be loaded in another precision than this instance's."""
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
        """Return the peak bytes of a prompt's prefill, its cache included."""
        return tokens * 2 * self.kv_per_token + self.reading(tokens, one_piece) + self.state

    def reading(self, tokens: int, one_piece: bool = False) -> int:
        """Return the bytes of activations during prefill: of the whole prompt (`one_piece`), or of one chunk."""
        return (tokens if one_piece or not self.chunk else min(tokens, self.chunk)) * self.activations_per_token

    def row(self, item: Prepared) -> int:
        """Return the bytes of one request's rows: one that decodes, or one per option, with the logits of all its tokens."""
        steps, options = item.request.steps, len(item.request.options)
        if options and steps == 1:
            return 12 * self.vocabulary  # the prompt's last logits score all options: nothing is forked
        own_keys = steps if self.shareable else steps + item.prefill_tokens
        scores = 4 * self.heads * (item.prefill_tokens + steps)
        kept = steps if options else 1
        read = self.reading(kept - 1) + 12 * kept * self.vocabulary
        return max(1, options) * (2 * (own_keys * self.kv_per_token + self.state) + read + scores)

    def batch(self, items: Sequence[Prepared]) -> int:
        """Return the bytes of a batch: its rows, its distinct prefills, and one recording per prompt with several prefills."""
        readings = _Readings()
        return sum(self.row(item) + readings.add(item) * self.prompt(item.prefill_tokens, item.one_piece) for item in items)

    def within(self, limit: int | None, items: Iterable[Prepared]) -> Costs:
        """Return costs whose chunks are small enough for each single request to stay within a limit.

        Raises:
            NeedleworkError: One request alone exceeds the limit even in the smallest chunks; names the least limit.
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
        """Return costs with chunks of half the size; None if prompts are not chunked, or chunks are already minimal."""
        return replace(self, chunk=self.chunk // 2) if self.chunk >= 2 * LEAST_CHUNK else None


class _Readings:
    """Counts the prefills of a batch: distinct readings, plus one recording for each prompt with several readings.

    This overestimates: prefills run slice by slice, but each is charged activations of its own, which also covers the recording.
    """

    def __init__(self) -> None:
        self._keys: set[tuple[object, ...]] = set()
        self._prompts: dict[object, int] = {}  # tokens -> number of readings

    def add(self, item: Prepared) -> int:
        """Add a request and return the number of additional prefills."""
        more = 0
        for key in {reading.key for reading in readings_of(item).values()} - self._keys:
            self._keys.add(key)
            self._prompts[key[0]] = self._prompts.get(key[0], 0) + 1
            more += 1 + (self._prompts[key[0]] == 2)
        return more


def amount(count: int) -> str:
    """Format bytes as the command line accepts them ("12MiB"), rounded up."""
    unit, size = ("MiB", 2**20) if count >= 2**20 else ("KiB", 2**10)
    return f"{-(-count // size)}{unit}"


class Budget:
    """A limit in bytes for prompts and answers. Estimates may be too low: the engine then halves the batch."""

    def __init__(self, body: HookedModel, limit: int | None) -> None:
        self.given = limit
        self.limit = limit or default_limit(body.device)
        self.costs = self._usual = Costs.of(body)

    def check(self, items: Iterable[Prepared]) -> Costs:
        """Return the costs with chunks that fit the given limit, or raise NeedleworkError; see `Costs.within`."""
        return self._usual.within(self.given, items)

    def fits(self, batch: Sequence[tuple[int, Prepared]], running: Sequence[Track], kept: int = 0) -> bool:
        """Return whether a batch can be prefilled while `running` decodes and `kept` bytes are held otherwise."""
        items = [item for _, item in batch]
        now = sum(self.costs.row(track.prepared) for track in running)
        return now + kept + self.costs.batch(items) <= self.limit

    def fits_beside(self, reading: Reading, stems: Sequence[Stem]) -> bool:
        """Return whether a request fits beside the shared prefixes that it starts from."""
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
        """Yield batches that fit into the limit, longest prompts first; requests with the same prompt are neighbours.

        Args:
            requests: (index, request) pairs.
            most: Maximum number of requests in a batch.
            stems_of: The shared prefixes that a request starts from.
            padded: Whether a request may be padded. Others only share a batch with requests of the same prefill length. Padded
                ones are ordered by their shared prefix, so that few prefixes are kept at a time.
        """
        may = {id(item): padded(item) for _, item in requests}
        chains = {id(item): stems_of(item) for _, item in requests}
        begins: dict[object, int] = {}  # prefixes, and prefixes with acts, numbered in order of appearance

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
    """Bytes of a batch so far: its rows, its prefills (each counted as the longest) and their shared prefixes."""

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
    """Return whether two requests cannot be prefilled in one batch."""
    alike = one.prefill_tokens == item.prefill_tokens and one.request.decodes_last == item.request.decodes_last
    return may[id(one)] != may[id(item)] or not (alike or may[id(one)])


def default_limit(device: torch.device) -> int:
    """Return half of the free memory, in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) // 2
    return int(psutil.virtual_memory().available) // 2
