"""What requests cost: the prefills that they need, estimates of their bytes and time, and batches that fit."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import psutil
import torch
from torch import Tensor

from needlework.errors import NeedleworkError
from needlework.model.hooked_model import LEAST_CHUNK, HookedModel
from needlework.model.memory import Memory
from needlework.receipts import Receipt
from needlework.requests import Prepared, Request, Swap

if TYPE_CHECKING:
    from needlework.engine.prefill import SharedPrefix

T = TypeVar("T")
logger = logging.getLogger("needlework")
_ACTIVATIONS = 24  # values held per token and hidden unit while a layer runs; measured over the model families
_FORWARD_FLOPS = {"cpu": 6e7, "cuda": 2e11}  # FLOPs a device could do in the fixed overhead of a forward
FORWARD_TOKENS = {"cpu": 4096}  # of one forward: with more, activations leave the CPU caches, and page faults outweigh the gain


@dataclass(frozen=True)
class Prefill:
    """One prefill: a prompt, or a prefix of it, under one request's prefill acts."""

    item: Prepared
    tokens: tuple[int, ...]

    @property
    def key(self) -> tuple[object, ...]:
        return (self.tokens, *self.item.group[1:])

    @property
    def shown(self) -> Request:
        """The request that an observer is told: for the prompt of a twin, one of that prompt."""
        request = self.item.request
        if self.tokens == request.prompt[: len(self.tokens)]:
            return request
        whole = next(twin for twin in self.item.twins.values() if self.tokens == twin[: len(self.tokens)])
        return replace(request, prompt=whole, sample=None)


def prefills_of(item: Prepared) -> dict[Swap | None, Prefill]:
    """Return the prefills that a request needs: of its own prompt (None), and of the twin of each part of the cache."""
    tokens = item.prefill_tokens
    prefills: dict[Swap | None, Prefill] = {None: Prefill(item, item.request.prompt[:tokens])}
    return prefills | {part: Prefill(item, twin[:tokens]) for part, twin in item.twins.items()}


@dataclass
class PrefillResult:
    """The results of prefills: row i of the cache belongs to prefill i."""

    memory: Memory | None  # None if it is not needed afterwards
    logits: Tensor  # [prefills, vocabulary] after the last token
    receipts: list[Receipt]


def group(items: Sequence[Prepared]) -> tuple[list[Prefill], list[dict[Swap | None, int]]]:
    """Return the distinct prefills that requests need, and for each request the indices of its own among them, by part."""
    distinct: dict[tuple[object, ...], tuple[int, Prefill]] = {}
    places = [
        {name: distinct.setdefault(prefill.key, (len(distinct), prefill))[0] for name, prefill in prefills_of(item).items()}
        for item in items
    ]
    return [prefill for _, prefill in distinct.values()], places


def forward_overhead(body: HookedModel) -> float:
    """Return the fixed cost of one more forward, in tokens."""
    return _FORWARD_FLOPS.get(body.device.type, 1e9) / (2 * body.anatomy.parameters)


def is_observed(body: HookedModel) -> bool:
    """Return whether an observer or a foreign forward hook must see every row in every layer."""
    hooks = (module._forward_hooks or module._forward_pre_hooks for module in body.model.modules())
    return body.observer is not None or any(hooks)


def split_rows(members: Sequence[T], tokens: int, body: HookedModel) -> Iterator[list[T]]:
    """Yield slices of members (of `tokens` tokens each) as large as one forward takes best; all if an observer is set."""
    most = FORWARD_TOKENS.get(body.device.type)
    step = len(members) if most is None or body.observer is not None else max(1, most // max(1, tokens))
    for first in range(0, len(members), max(1, step)):
        yield list(members[first : first + step])


def out_of_memory(error: Exception) -> bool:
    """Return whether an error means out of memory; CPU allocation failures are plain RuntimeErrors."""
    text = str(error).lower()
    on_cpu = isinstance(error, RuntimeError) and ("can't allocate memory" in text or "out of memory" in text)
    return on_cpu or isinstance(error, (torch.OutOfMemoryError, MemoryError))


def try_proof(body: HookedModel, prove: Callable[[], bool]) -> bool | None:
    """Return whether a check of the model passes; None if memory ran out, so that it may pass another time. Unobserved."""
    try:
        with body.observed_by(None):
            return prove()
    except Exception as error:  # whatever it is, it would have been an error of a real prefill
        logger.debug("a shortcut cannot be used: %s", error)
        return None if out_of_memory(error) else False


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
            body.chunk,
        )

    def prompt(self, tokens: int, one_piece: bool = False) -> int:
        """Return the peak bytes of a prompt's prefill, its cache included."""
        return tokens * 2 * self.kv_per_token + self.activations(tokens, one_piece) + self.state

    def activations(self, tokens: int, one_piece: bool = False) -> int:
        """Return the bytes of activations during prefill: of the whole prompt (`one_piece`), or of one chunk."""
        return (tokens if one_piece or not self.chunk else min(tokens, self.chunk)) * self.activations_per_token

    def row(self, item: Prepared) -> int:
        """Return the bytes of one request's rows: one that decodes, or one per option, with the logits of all its tokens."""
        steps, options = item.request.steps, len(item.request.options)
        if options and steps == 1:
            return 12 * self.vocabulary  # the prompt's last logits score all options: nothing is forked
        mixed = any(swap.positions for swap in item.twins)  # its prompt has keys of two prompts, which no other row has
        own_keys = steps + item.prefill_tokens * (mixed or not self.shareable)
        scores = 4 * self.heads * (item.prefill_tokens + steps)
        kept = steps if options else 1
        fed = self.activations(kept - 1) + 12 * kept * self.vocabulary
        return max(1, options) * (2 * (own_keys * self.kv_per_token + self.state) + fed + scores)

    def batch(self, items: Iterable[Prepared]) -> int:
        """Return the bytes of a batch: its rows, its distinct prefills, and one recording per prompt with several prefills."""
        batch = _BatchBytes(self)
        return max((batch.add(item) for item in items), default=0)

    def within(self, limit: int | None, items: Iterable[Prepared]) -> Costs:
        """Return costs whose chunks are small enough for each single request to stay within a limit, or raise if none are."""
        if limit is None:
            return self
        items, costs = list(items), self
        while True:
            needs, tokens = max(((costs.batch([item]), item.tokens_read) for item in items), default=(0, 0))
            if needs <= limit:
                return costs
            smaller = costs.in_smaller_chunks()
            if smaller is None:
                raise NeedleworkError(
                    f"memory: {amount(limit)} is too little: one request of {tokens:,} tokens takes about {amount(needs)}, beside"
                    f" {amount(self.weights)} of weights and what Python and its libraries take (about 500MiB). Give"
                    f" {amount(needs)} or more, or shorter prompts"
                )
            costs = smaller

    def in_smaller_chunks(self) -> Costs | None:
        """Return costs with chunks of half the size; None if prompts are not chunked, or chunks are already minimal."""
        return replace(self, chunk=self.chunk // 2) if self.chunk >= 2 * LEAST_CHUNK else None


class _BatchBytes:
    """The bytes of a batch, request by request: its rows, its prefills (each counted as the longest) and their shared prefixes.

    A prompt with several prefills counts one more, the recording of shared layers. This overestimates: prefills run slice by
    slice, but each is charged activations of its own, which also covers the recording.
    """

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.rows = self.prefills = self.longest = 0
        self.one_piece = False
        self.keys: set[tuple[object, ...]] = set()
        self.prefills_of_prompt: Counter[object] = Counter()
        self.prefixes: set[SharedPrefix] = set()

    def add(self, item: Prepared, prefixes: Sequence[SharedPrefix] = ()) -> int:
        """Add a request and return the bytes of all so far."""
        for key in {prefill.key for prefill in prefills_of(item).values()} - self.keys:
            self.keys.add(key)
            self.prefills_of_prompt[key[0]] += 1
            self.prefills += 1 + (self.prefills_of_prompt[key[0]] == 2)
        self.rows += self.costs.row(item)
        self.longest = max(self.longest, item.prefill_tokens)
        self.one_piece |= item.one_piece
        self.prefixes.update(prefixes)
        shared = sum(self.costs.prompt(len(prefix.tokens)) for prefix in self.prefixes)
        return self.rows + self.prefills * self.costs.prompt(self.longest, self.one_piece) + shared


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

    def fits_beside(self, prefill: Prefill, prefixes: Sequence[SharedPrefix]) -> bool:
        """Return whether a request fits beside the shared prefixes that it starts from."""
        return _BatchBytes(self.costs).add(prefill.item, prefixes) <= self.limit

    def batches(
        self,
        requests: Sequence[tuple[int, Prepared]],
        most: int,
        prefixes_of: Callable[[Prepared], Sequence[SharedPrefix]] = lambda item: (),
        padded: Callable[[Prepared], bool] = lambda item: False,
    ) -> Iterator[list[tuple[int, Prepared]]]:
        """Yield batches that fit into the limit, longest prompts first; requests with the same prompt are neighbours.

        Args:
            requests: (index, request) pairs.
            most: Maximum number of requests in a batch.
            prefixes_of: The shared prefixes that a request starts from; those that may be padded are ordered by them, so that
                few are kept at a time.
            padded: Whether a request may be padded; others share a batch with requests of the same prefill length only.
        """
        begins: dict[object, int] = {}  # prefixes, and prefixes with acts, numbered in order of appearance
        ordered = []
        for i, item in requests:
            may, chain, shelf = padded(item), prefixes_of(item), list[int]()
            if may and chain:
                first = chain[-1].tokens
                shelf = [begins.setdefault(key, len(begins)) for key in (first, (first, *item.group[1:]))]
            order = (may, shelf, -item.prefill_tokens, item.request.boundary, item.request.prompt, i)
            common = None if may else (item.prefill_tokens, item.request.decodes_last)  # must be equal within a batch
            ordered.append((order, common, chain, (i, item)))
        batch, alike, filled = list[tuple[int, Prepared]](), None, _BatchBytes(self.costs)
        for _, common, chain, pair in sorted(ordered, key=lambda entry: entry[0]):
            if batch and (filled.add(pair[1], chain) > self.limit or len(batch) >= most or common != alike):
                yield batch
                batch = []
            if not batch:
                alike, filled = common, _BatchBytes(self.costs)
                filled.add(pair[1], chain)
            batch.append(pair)
        if batch:
            yield batch


def default_limit(device: torch.device) -> int:
    """Return half of the free memory, in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) // 2
    return int(psutil.virtual_memory().available) // 2
