"""Keys and values that attention reads: per row, or of a shared prefix that is stored once for many rows."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

if TYPE_CHECKING:
    from needlework.kernels.block_attention import TransposedKeyValues


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
