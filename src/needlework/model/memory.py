"""A model's memory (KV cache and recurrent states) and how it is copied, forked, shared, cleared and swapped.

Memory has two halves, keys and values ("kv") and recurrent state ("recurrent"). Most models keep both in a transformers
cache. RecurrentGemma keeps recurrent states on its modules, so they are set there before each forward and removed after it.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.cache_utils import DynamicLayer

from needlework.errors import NeedleworkError
from needlework.interventions.acts import Half

if TYPE_CHECKING:
    from needlework.kernels.block_attention import TransposedKeyValues

BUFFER = ("recent_keys", "recent_values", "recent_positions", "next_position")  # of streaming heads, per row
_KV = {"keys": 0, "values": 0, "indexer_keys": 0, "indexer_position_ids": 1}  # attribute -> batch dimension
_KV |= dict.fromkeys(BUFFER, 0)
_BY_TOKEN = ("keys", "values", "indexer_keys")  # [rows, ..., tokens, dim]
_RECURRENT = ("conv_states", "recurrent_states")
RecurrentKind = Literal["conv", "state"]
RowSources = Mapping[tuple[Half, int], Tensor]  # (half, cache layer; -1: all others) -> rows that it is taken from


@dataclass(frozen=True)
class Slot:
    """A reference to one tensor of the memory, in the cache or on a module."""

    half: Half
    layer: int  # index in the cache
    name: str  # unique within the layer
    holder: Any  # dict or list that holds the tensor at `key`
    key: Any
    batch_dim: int = 0

    @property
    def tensor(self) -> Tensor:
        return self.holder[self.key]  # type: ignore[no-any-return]

    @property
    def kind(self) -> RecurrentKind | None:
        """Whether a recurrent tensor is the window of a short convolution or a state; None for keys and values."""
        if self.half != "recurrent":
            return None
        return "conv" if any(word.startswith("conv") for word in self.name.split(".")[-2:]) else "state"

    @property
    def shared(self) -> bool:
        """Whether rows that share a prefix read this tensor without a copy; buffers of streaming heads are per row."""
        return self.half == "kv" and self.name not in BUFFER

    def select(self, rows: Tensor) -> Tensor:
        """Return a copy of these rows of the tensor."""
        return self.tensor.index_select(self.batch_dim, rows.to(self.tensor.device))

    def put(self, tensor: Tensor) -> None:
        self.holder[self.key] = tensor


@dataclass(frozen=True)
class Mixer:
    """A recurrent mixer of the model, its parts, and where its state is kept."""

    layer: int
    module: nn.Module
    cache_layer: int
    state_names: tuple[str, ...] = ()  # attributes that hold its state, if it is not in the cache
    groups: int = 0  # groups of channels that can be zeroed; 0 if there is no single output projection
    output: nn.Module | None = None  # the output projection
    convolution: nn.Conv1d | None = None  # its short convolution

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device


class TokenSource(NamedTuple):
    """Tokens of a cache layer, and the row that their keys and values are taken from."""

    layer: int
    positions: tuple[int, ...]
    row: int


def states_on_modules(mixers: Sequence[Mixer]) -> dict[str, tuple[int, nn.Module, str]]:
    """Return the states that mixers keep on modules instead of in the cache: path -> (cache layer, module, attribute)."""
    return {
        f"{mixer.layer}.{name}": (mixer.cache_layer, *holder(mixer.module, name))
        for mixer in mixers
        for name in mixer.state_names
    }


def holder(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Split the path of a state into the submodule that holds it and the attribute there."""
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path), leaf


class Memory:
    """KV cache and recurrent states of `rows` sequences after `length` tokens."""

    def __init__(self, cache: Any, on_modules: dict[str, tuple[int, nn.Module, str]], rows: int) -> None:
        self.cache = cache
        self.length = 0
        self.rows = rows
        self._on_modules = on_modules  # path -> (cache layer, module, attribute) of states that are not in the cache
        self._held: dict[str, Tensor | None] = dict.fromkeys(on_modules)  # their values while not mounted
        self._on = False  # whether these states are set on the modules now

    @contextmanager
    def mounted(self) -> Iterator[None]:
        """Set module-held states on their modules while the context is open; restore the old values, also after an exception."""
        # Writes into the module's __dict__: nn.Module.__setattr__ would dominate the cost of a decode step.
        before = [vars(module).get(name) for _, module, name in self._on_modules.values()]
        for path, (_, module, name) in self._on_modules.items():
            vars(module)[name] = self._held[path]
        self._on = True
        try:
            yield
            for path, (_, module, name) in self._on_modules.items():
                self._held[path] = vars(module)[name]
        finally:
            self._on = False
            for value, (_, module, name) in zip(before, self._on_modules.values(), strict=True):
                vars(module)[name] = value

    def slots(self, half: Half | None = None) -> list[Slot]:
        """Return a slot for every tensor in use, of one half or of both."""
        slots = []
        for index, layer in enumerate(self._layers):
            fields = vars(layer)
            for name, batch_dim in _KV.items():
                if isinstance(fields.get(name), Tensor) and fields[name].dim() > 1:
                    slots.append(Slot("kv", index, name, fields, name, batch_dim))
            for name in _RECURRENT:
                states = fields.get(name)
                if isinstance(states, dict):
                    slots += [Slot("recurrent", index, f"{name}.{i}", states, i) for i, x in states.items() if x is not None]
        linear = getattr(self.cache, "linear_cache", [])  # MiniMax
        slots += [Slot("recurrent", i, "linear_cache", linear, i) for i, x in enumerate(linear) if isinstance(x, Tensor)]
        for path, (layer, module, name) in self._on_modules.items():
            holder, key = (vars(module), name) if self._on else (self._held, path)
            if holder[key] is not None:
                slots.append(Slot("recurrent", layer, path, holder, key))
        return [slot for slot in slots if half in (None, slot.half)]

    @property
    def _layers(self) -> Sequence[Any]:
        return getattr(self.cache, "layers", ())

    def _rebuilt(self, rows: int, tensor: Callable[[Slot], Tensor]) -> Memory:
        """Return a memory of the same structure, with `tensor(slot)` in place of each tensor."""
        new = Memory(_shell(self.cache), self._on_modules, rows)
        new.length, new._held = self.length, dict(self._held)
        for slot in new.slots():
            slot.put(tensor(slot))
        return new

    def select(self, rows: Tensor, sources: RowSources | None = None) -> Memory:
        """Return a copy of the given rows, in this order; rows may repeat. Shared keys stay shared.

        Parts of the memory with rows in `sources` are taken from these instead, which swaps memory between rows.
        """
        source = _row_source(rows, sources)
        new = self._rebuilt(len(rows), lambda slot: slot.select(source(slot.half, slot.layer)))
        for index, layer in enumerate(new._layers):
            if isinstance(layer, SharedKV):
                layer.select(source("kv", index))
        return new

    def share(self, rows: Tensor, sources: RowSources | None = None) -> Memory:
        """Fork rows as `select` does, but without copying keys and values: all rows read those of this memory."""
        source = _row_source(rows, sources)
        new = self._rebuilt(len(rows), lambda slot: slot.tensor if slot.shared else slot.select(source(slot.half, slot.layer)))
        new.cache.layers = [
            SharedKV.adopt(layer, source("kv", index), self.length) if isinstance(vars(layer).get("keys"), Tensor) else layer
            for index, layer in enumerate(new.cache.layers)
        ]
        return new

    def places(self, layer: int, positions: Sequence[int]) -> dict[int, int]:
        """Return where a cache layer holds the keys of these tokens; those that have left its window are not held."""
        keys = vars(self._layers[layer]).get("keys")
        left = self.length - (keys.shape[2] if isinstance(keys, Tensor) else 0)
        return {position: position - left for position in positions if left <= position < self.length}

    def with_mixed_keys(self, rows: Sequence[tuple[int, Sequence[TokenSource]]]) -> Memory:
        """Return a copy with more rows: copies of its own in which some tokens' keys and values are those of other rows."""
        order = torch.tensor([*range(self.rows), *(row for row, _ in rows)])
        new = self.select(order)
        for slot in new.slots("kv"):
            if slot.name in BUFFER and any(part.layer == slot.layer for _, parts in rows for part in parts):
                raise NeedleworkError("streaming heads hold no single tokens that could be swapped: leave `at` out")
            if slot.name not in _BY_TOKEN:
                continue
            for number, (_, parts) in enumerate(rows, self.rows):
                for layer, positions, other in parts:
                    places = list(self.places(layer, positions).values())
                    if layer == slot.layer:
                        slot.tensor[number][..., places, :] = slot.tensor[other][..., places, :]
        return new

    def above(self, below: Memory, rows: Tensor, remembered: Callable[[Half, int], bool]) -> Memory:
        """Combine this memory with the rows of a recorded one, `below`: the parts (half, cache layer) that are `remembered`."""
        own = {(slot.layer, slot.name): slot for slot in self.slots()}

        def part(slot: Slot) -> Tensor:
            if remembered(slot.half, slot.layer):
                return slot.select(rows)
            return own[slot.layer, slot.name].tensor

        return below._rebuilt(self.rows, part)

    @property
    def shared(self) -> bool:
        return any(isinstance(layer, SharedKV) for layer in self._layers)

    @property
    def ragged(self) -> bool:
        """Whether rows of different lengths can be joined: no layer has keys, or all layers with keys share them."""
        return all(isinstance(x, SharedKV) for x in self._layers if isinstance(vars(x).get("keys"), Tensor))

    @staticmethod
    def join(memories: Sequence[Memory]) -> Memory:
        """Concatenate memories into one batch. Their lengths may differ only if all of them are `ragged`."""
        first = memories[0]
        if len(memories) == 1:
            return first
        tables = [{(slot.layer, slot.name): slot for slot in memory.slots()} for memory in memories]
        skip = {i for i, layer in enumerate(first._layers) if isinstance(layer, SharedKV)}

        def joined(slot: Slot) -> Tensor:
            if slot.shared and slot.layer in skip:
                return slot.tensor
            return torch.cat([table[slot.layer, slot.name].tensor for table in tables], slot.batch_dim)

        new = first._rebuilt(sum(memory.rows for memory in memories), joined)
        new.length = max(memory.length for memory in memories)
        for index in skip:
            new.cache.layers[index].join([memory.cache.layers[index] for memory in memories])
        return new

    def clear(self, layers: Sequence[int], rows: Tensor, kind: RecurrentKind | None = None) -> None:
        """Zero the recurrent tensors of these cache layers, of one kind or of both, for rows where `rows` [rows] is True."""
        for slot in self.slots("recurrent"):
            if slot.layer in layers and kind in (None, slot.kind):
                keep = (~rows).to(slot.tensor.device, slot.tensor.dtype)
                slot.put(slot.tensor * keep.view(-1, *[1] * (slot.tensor.dim() - 1)))

    def states_of(self, layer: int, kind: RecurrentKind) -> list[Slot]:
        """Return the recurrent slots of one cache layer and kind."""
        return [slot for slot in self.slots("recurrent") if slot.layer == layer and slot.kind == kind]

    def of_layer(self, layer: int, rows: Tensor) -> Memory:
        """Return a memory for one mixer, with copies of its current states of the given rows."""
        places = {path: place for path, place in self._on_modules.items() if place[0] == layer}
        new = Memory(copy.copy(self.cache), places, len(rows))
        if places:
            new._held = {path: vars(module)[name] if self._on else self._held[path] for path, (_, module, name) in places.items()}
        else:
            new.cache.layers = list(self.cache.layers)
            new.cache.layers[layer] = _shell_layer(self.cache.layers[layer])
        for slot in new.slots("recurrent"):
            if slot.layer == layer:
                slot.put(slot.select(rows))
        return new

    def nbytes(self, half: Half | None = None) -> int:
        """Return the bytes in use; shared keys and values count once."""
        tensors = [slot.tensor for slot in self.slots(half)]
        for layer in self._layers:
            if isinstance(layer, SharedKV) and half in (None, "kv"):
                tensors += [layer.prefix.key, layer.prefix.value]  # type: ignore[attr-defined]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _row_source(rows: Tensor, sources: RowSources | None) -> Callable[[Half, int], Tensor]:
    """Return a function that gives the rows to take a half of a cache layer from."""
    others = sources or {}
    return lambda half, layer: others.get((half, layer), others.get((half, -1), rows))


def _shell(cache: Any) -> Any:
    """Copy the cache's structure; the copy's layers refer to the same tensors."""
    new = copy.copy(cache)
    for name, value in vars(cache).items():
        if isinstance(value, list):
            setattr(new, name, [_shell_layer(layer) for layer in value] if name == "layers" else list(value))
    return new


def _shell_layer(layer: Any) -> Any:
    new = copy.copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, (dict, Prefix)):
            setattr(new, name, copy.copy(value))
    return new


class PreallocatedLayer(DynamicLayer):  # type: ignore[misc, unused-ignore]
    """A cache layer that allocates keys and values once, for all tokens of a long prompt.

    A DynamicLayer grows by concatenation, which holds all keys of a layer twice for a moment.
    """

    keys: Tensor
    values: Tensor
    tokens: int
    buffers: dict[str, Tensor]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = self._with("keys", self.keys, key_states)
        self.values = self._with("values", self.values, value_states)
        return self.keys, self.values

    def _with(self, name: str, old: Tensor, new: Tensor) -> Tensor:
        """Append new entries [..., tokens, dim] to a buffer and return its filled part."""
        known = old.shape[-2] if old.numel() else 0
        if name not in self.buffers:
            self.buffers[name] = new.new_empty(*new.shape[:-2], self.tokens, new.shape[-1])
            if known:
                self.buffers[name][..., :known, :] = old
        last = known + new.shape[-2]
        self.buffers[name][..., known:last, :] = new
        return self.buffers[name][..., :last, :]


@contextmanager
def preallocated_cache(cache: Any, tokens: int) -> Iterator[None]:
    """Preallocate the plain DynamicLayers of a cache for `tokens` tokens while the context is open.

    Layers of other classes (sliding windows, shared prefixes) hold few tokens or grow in their own way.
    """
    layers = [layer for layer in getattr(cache, "layers", ()) if type(layer) is DynamicLayer]
    for layer in layers:
        layer.__class__, layer.tokens, layer.buffers = PreallocatedLayer, tokens, {}
    try:
        yield
    finally:
        for layer in layers:
            layer.__class__ = DynamicLayer
            del layer.tokens, layer.buffers


# --- Keys and values as attention reads them: stored per row, or of a prefix that is stored once for many rows ---


def _grouped(x: Tensor, kv_heads: int) -> Tensor:
    """Reshape [rows, heads, queries, n] to [rows, kv_heads, group * queries, n], so that kv heads need not be repeated."""
    rows, heads, queries, n = x.shape
    return x.reshape(rows, kv_heads, heads // kv_heads * queries, n)


class OwnKeys:
    """Keys and values stored per row."""

    sliceable = True  # whether `scores` and `mix` honour `first` and `last`; if not, they use all keys

    def __init__(self, key: Tensor, value: Tensor) -> None:
        self.key, self.value = key, value  # [rows, kv_heads, keys, dim]
        self.count, self.value_dim = key.shape[2], value.shape[3]

    def positions(self, q_positions: Tensor) -> Tensor:
        """Return the absolute position of every key in every row, -1 for padding. [rows, keys]"""
        # Caches keep the newest keys, so the last key belongs to the last token of this forward.
        return q_positions[:, -1:] + torch.arange(1 - self.count, 1, device=q_positions.device)

    @functools.cached_property
    def lines(self) -> TransposedKeyValues:
        from needlework.kernels.block_attention import TransposedKeyValues, transpose_keys_values

        rows = self.key.shape[0]
        nothing = (x.new_empty(*x.shape[:2], x.shape[3], 0) for x in (self.key, self.value))
        return TransposedKeyValues(*transpose_keys_values(self.key, self.value), torch.arange(rows), *nothing)

    def scores(self, query: Tensor, first: int, last: int) -> Tensor:
        """Return dot products [rows, heads, queries, last - first] of queries with keys."""
        rows, heads, queries, _ = query.shape
        key = self.key[:, :, first:last]
        return (_grouped(query, key.shape[1]) @ key.transpose(2, 3)).view(rows, heads, queries, last - first)

    def mix(self, weights: Tensor, first: int, last: int) -> Tensor:
        """Return weighted sums of values [rows, heads, queries, value_dim]."""
        rows, heads, queries, _ = weights.shape
        value = self.value[:, :, first:last]
        return (_grouped(weights, value.shape[1]) @ value).view(rows, heads, queries, self.value_dim)


@dataclass
class Prefix:
    """Keys and values of several prompts, and the prompt that each row reads."""

    key: Tensor  # [prompts, kv_heads, keys, dim]
    value: Tensor
    positions: Tensor  # [prompts, keys] absolute position of each key; -1 where a shorter prompt is padded
    prompt: Tensor  # [rows] the prompt that each row reads
    start: Tensor  # [rows] position of the row's first key after the prefix
    complete: bool = True  # there is no padding, neither here nor in the rows' own keys

    @functools.cached_property
    def lines(self) -> tuple[Tensor, Tensor]:
        """Transposed keys and values for the kernel, kept because every decode step reads them."""
        from needlework.kernels.block_attention import transpose_keys_values

        return transpose_keys_values(self.key, self.value)

    @functools.cached_property
    def readers(self) -> tuple[Tensor, Tensor, bool]:
        """The rows that read each prompt [prompts, readers], each row's flat index there, and whether rows are in this order.

        Prompts with fewer readers are padded with row 0.
        """
        readers: list[list[int]] = [[] for _ in range(self.key.shape[0])]
        where = []
        for row, p in enumerate(self.prompt.tolist()):
            where.append((p, len(readers[p])))
            readers[p].append(row)
        most = max(map(len, readers))
        order = torch.tensor([rows + [0] * (most - len(rows)) for rows in readers], device=self.key.device)
        places = [p * most + i for p, i in where]
        return order, torch.tensor(places, device=self.key.device), places == list(range(order.numel()))

    def select(self, rows: Tensor) -> Prefix:
        """Return the prefix for the given rows; unread prompts are freed once they are at least half of all."""
        rows = rows.to(self.prompt.device)
        prompt, start = self.prompt[rows], self.start[rows]
        used: Tensor = torch.unique(prompt)
        if 2 * len(used) > self.key.shape[0]:
            new = Prefix(self.key, self.value, self.positions, prompt, start, self.complete)
            vars(new).update({name: kept for name, kept in vars(self).items() if name == "lines"})  # the keys are the same
            return new
        tables = (self.key[used], self.value[used], self.positions[used])
        return Prefix(*tables, torch.searchsorted(used, prompt), start, self.complete)

    @staticmethod
    def join(prefixes: Sequence[Prefix], same_own: bool) -> Prefix:
        """Concatenate prompts and rows; shorter prompts are padded on the left. `same_own`: own keys need no padding."""
        length = max(p.key.shape[2] for p in prefixes)
        lacks = [length - p.key.shape[2] for p in prefixes]
        offsets = [sum(p.key.shape[0] for p in prefixes[:i]) for i in range(len(prefixes))]
        return Prefix(
            join_padded([p.key for p in prefixes]),
            join_padded([p.value for p in prefixes]),
            torch.cat([pad(p.positions, (n, 0), value=-1) for p, n in zip(prefixes, lacks, strict=True)]),
            torch.cat([p.prompt + n for p, n in zip(prefixes, offsets, strict=True)]),
            torch.cat([p.start for p in prefixes]),
            same_own and not any(lacks) and all(p.complete for p in prefixes),
        )


def join_padded(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate rows of keys or values [rows, heads, tokens, dim]; shorter ones are padded on the left."""
    length = max(x.shape[2] for x in tensors)
    return torch.cat([pad(x, (0, 0, length - x.shape[2], 0)) for x in tensors])


class SharedPrefix:
    """Keys of rows that share prompts: one matrix product per prompt, without a copy per row, plus each row's own keys."""

    sliceable = False

    def __init__(self, prefix: Prefix, key: Tensor, value: Tensor) -> None:
        self.prefix, self.own = prefix, OwnKeys(key, value)
        self.length = prefix.key.shape[2]
        self.count, self.value_dim = self.length + self.own.count, value.shape[3]

    @functools.cached_property
    def lines(self) -> TransposedKeyValues:
        from needlework.kernels.block_attention import TransposedKeyValues, transpose_keys_values

        return TransposedKeyValues(*self.prefix.lines, self.prefix.prompt, *transpose_keys_values(self.own.key, self.own.value))

    def _gather(self, x: Tensor) -> Tensor:
        """Group rows by prompt: [rows, heads, queries, n] -> [prompts, kv_heads, readers * group * queries, n]."""
        order, _, straight = self.prefix.readers
        rows = _grouped(x, self.prefix.key.shape[1])
        if not straight:
            rows = rows[order.flatten()]
        return rows.view(*order.shape, *rows.shape[1:]).transpose(1, 2).flatten(2, 3)

    def _scatter(self, x: Tensor, like: torch.Size) -> Tensor:
        """Invert `_gather`; `like` begins with rows, heads and queries."""
        order, places, straight = self.prefix.readers
        x = x.view(len(order), x.shape[1], order.shape[1], -1, x.shape[-1]).transpose(1, 2).flatten(0, 1)
        return (x if straight else x[places]).reshape(*like[:3], x.shape[-1])

    def positions(self, q_positions: Tensor) -> Tensor:
        own = self.own.positions(q_positions)
        own = own.masked_fill(own < self.prefix.start[:, None], -1)
        return torch.cat([self.prefix.positions[self.prefix.prompt], own], 1)

    def scores(self, query: Tensor, first: int, last: int) -> Tensor:
        prompt = self._scatter(self._gather(query) @ self.prefix.key.transpose(2, 3), query.shape)
        return torch.cat([prompt, self.own.scores(query, 0, self.own.count)], -1)

    def mix(self, weights: Tensor, first: int, last: int) -> Tensor:
        prompt = self._scatter(self._gather(weights[..., : self.length]) @ self.prefix.value, weights.shape)
        return prompt + self.own.mix(weights[..., self.length :], 0, self.own.count)


class SharedKV:
    """A mixin of transformers cache layers: the prompt's keys are in `prefix`, those of later tokens in `keys`."""

    @staticmethod
    def adopt(filled: Any, rows: Tensor, length: int) -> Any:
        """Return a filled layer of several prompts as a shared one; `rows` [rows] is the prompt of each row."""
        layer = convert_layer(filled, SharedKV)
        key, value = layer.keys, layer.values
        positions = torch.arange(length - key.shape[2], length, device=key.device).expand(key.shape[0], -1)
        start = torch.full((len(rows),), length, device=key.device)
        layer.prefix = Prefix(key, value, positions, rows.to(key.device), start)
        empty = key.new_empty(len(rows), key.shape[1], 0, key.shape[3])
        layer.keys, layer.values = empty, value.new_empty(len(rows), value.shape[1], 0, value.shape[3])
        layer.tokens = length
        return layer

    def update(self: Any, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.keys = torch.cat([self.keys, key_states], dim=2)
        self.values = torch.cat([self.values, value_states], dim=2)
        if hasattr(self, "cumulative_length"):
            self.cumulative_length += key_states.shape[2]
        self.keys.shared_prefix = self.prefix  # read by the attention function
        return self.keys, self.values

    def get_seq_length(self: Any) -> int:
        return int(self.tokens) + int(self.keys.shape[2])

    def get_mask_sizes(self: Any, query_length: int) -> tuple[int, int]:
        return self.prefix.key.shape[2] + self.keys.shape[2] + query_length, 0

    def select(self: Any, rows: Tensor) -> None:
        self.prefix = self.prefix.select(rows)

    def join(self: Any, layers: Sequence[Any]) -> None:
        """Replace this layer's rows by those of all `layers`; shorter ones are padded on the left."""
        same_own = len({layer.keys.shape[2] for layer in layers}) == 1
        self.prefix = Prefix.join([layer.prefix for layer in layers], same_own)
        self.keys, self.values = (join_padded([getattr(layer, name) for layer in layers]) for name in ("keys", "values"))
        self.tokens = max(layer.tokens for layer in layers)


@functools.cache
def _with_mixin(layer_class: type, mixin: type) -> Any:
    first, *others = layer_class.__bases__
    streams = hasattr(first, "outermost")  # streaming heads are split off before the mixin sees the keys
    bases = (first, mixin, *others) if streams else (mixin, layer_class)
    return type(f"{mixin.__name__}{layer_class.__name__}", bases, {})


def convert_layer(layer: Any, mixin: type) -> Any:
    """Return a cache layer with the attributes of this one, of a class that is derived from its class with this mixin."""
    new: Any = object.__new__(_with_mixin(type(layer), mixin))  # type: ignore[arg-type]
    vars(new).update(vars(layer))
    return new
