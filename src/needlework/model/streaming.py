"""Streaming heads: kv heads that keep only the first and the newest tokens, in a cache of fixed size.

A cache layer with streaming heads splits new keys by head: full heads use the plain cache, streaming heads a buffer of fixed
size, [sinks | window - 1 newest], with the position of each key. Positions are those of the text, as in `limit_context`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from needlework.errors import NeedleworkError, short_repr
from needlework.model.keys import Keys, OwnKeys, convert_layer

BUFFER = ("recent_keys", "recent_values", "recent_positions", "next_position")  # tensors of a cache layer, per row
HIDDEN = -1  # position of an empty buffer entry
ENTRY = "needlework"  # key of config.json with the pruned and streaming heads of a model


@dataclass(frozen=True)
class Streams:
    """The streaming kv heads of a model, and the tokens that they keep."""

    window: int  # newest keys that a query sees, its own included
    sinks: int  # first tokens that it always sees
    kv_heads: Mapping[int, tuple[int, ...]]  # by layer

    def to_dict(self) -> dict[str, Any]:
        layers = {str(layer): list(heads) for layer, heads in self.kv_heads.items()}
        return {"window": self.window, "sinks": self.sinks, "kv_heads": layers}

    @classmethod
    def read(cls, entry: Any) -> Streams:
        """Read and check the entry of a config.json, which is untrusted."""
        try:
            window, sinks = operator.index(entry["window"]), operator.index(entry["sinks"])
            layers = {int(layer): tuple(map(operator.index, heads)) for layer, heads in entry["kv_heads"].items()}
            if window < 1 or sinks < 0 or any(min(heads) < 0 or len(set(heads)) < len(heads) for heads in layers.values()):
                raise ValueError
        except (TypeError, ValueError, KeyError, AttributeError):
            raise NeedleworkError(f"config.json: streaming heads {short_repr(entry)} are none; prune the model again") from None
        return cls(window, sinks, layers)

    def install(self, cache: Any) -> Any:
        """Replace layers of a new cache by ones with buffers for streaming heads; return the cache."""
        if hasattr(cache, "linear_cache"):  # MiniMax adds layers to its cache as it runs, and counts them
            raise NeedleworkError(f"heads cannot stream in this model: its {type(cache).__mro__[1].__name__} is one of its own")
        for index, heads in self.kv_heads.items():
            while len(cache.layers) <= index and cache.layer_class_to_replicate is not None:
                cache.layers.append(cache.layer_class_to_replicate())
            layer = convert_layer(cache.layers[index], _streaming_class)
            layer.window, layer.sinks, layer.stream_heads, layer.seen = self.window, self.sinks, heads, 0
            cache.layers[index] = layer
        return cache


class StreamingKV:
    """A mixin of transformers cache layers: the layer stores keys of full heads, the buffer those of streaming heads."""

    plain: type

    @classmethod
    def sharing(cls, shared: type) -> Any:
        """Return the layer class whose full heads use a shared prefix."""
        return _streaming_class(cls.plain, shared)

    def update(self: Any, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store new keys and values; return them with all stored ones attached as `split_heads` (cache layer interface)."""
        streaming = torch.tensor(self.stream_heads, device=key_states.device)
        rest = [head for head in range(key_states.shape[1]) if head not in self.stream_heads]
        full = None
        if rest:
            index = torch.tensor(rest, device=key_states.device)
            full = super().update(key_states.index_select(1, index), value_states.index_select(1, index), *args, **kwargs)  # type: ignore[misc]
        elif hasattr(self, "cumulative_length"):
            self.cumulative_length += key_states.shape[2]
        self.seen += key_states.shape[2]
        key, value, positions = self._remember(key_states.index_select(1, streaming), value_states.index_select(1, streaming))
        carrier: Any = key_states.view_as(key_states)
        carrier.split_heads = Split(tuple(rest), self.stream_heads, full, key, value, positions, self.window, self.sinks)
        return carrier, value_states

    def _remember(self: Any, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Add new tokens of streaming heads to the buffer.

        Returns:
            Keys, values [rows, heads, buffer + tokens, dim] and positions [rows, buffer + tokens] before old ones are dropped.
        """
        rows, heads, tokens, _ = key.shape
        behind = self.window - 1
        if not isinstance(vars(self).get("recent_keys"), Tensor):
            size = self.sinks + behind
            self.recent_keys, self.recent_values = (x.new_zeros(rows, heads, size, x.shape[3]) for x in (key, value))
            self.recent_positions = torch.full((rows, size), HIDDEN, device=key.device)
            self.next_position = torch.zeros(rows, 1, dtype=torch.int64, device=key.device)
        start = self.next_position
        positions = torch.cat([self.recent_positions, start + torch.arange(tokens, device=key.device)], 1)
        keys, values = torch.cat([self.recent_keys, key], 2), torch.cat([self.recent_values, value], 2)
        sinks = self._sinks(key, value, start) if self.sinks else (keys[:, :, :0], values[:, :, :0], positions[:, :0])
        last = keys.shape[2] - behind
        newest = positions[:, last:].masked_fill(positions[:, last:] < self.sinks, HIDDEN)  # sinks are not kept twice
        self.recent_keys = torch.cat([sinks[0], keys[:, :, last:]], 2)
        self.recent_values = torch.cat([sinks[1], values[:, :, last:]], 2)
        self.recent_positions = torch.cat([sinks[2], newest], 1)
        self.next_position = start + tokens
        return keys, values, positions

    def _sinks(self: Any, key: Tensor, value: Tensor, start: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return keys, values and positions of the sinks, from the buffer or from the new tokens."""
        kept = slice(0, self.sinks)
        old = (self.recent_keys[:, :, kept], self.recent_values[:, :, kept], self.recent_positions[:, kept])
        if not bool((start < self.sinks).any()):
            return old
        numbers = torch.arange(self.sinks, device=key.device)
        place = numbers - start  # [rows, sinks] among the new tokens
        new = (place >= 0) & (place < key.shape[2])
        chosen = place.clamp(0, key.shape[2] - 1)[:, None, :, None]
        keys, values = (
            torch.where(new[:, None, :, None], x.gather(2, chosen.expand(-1, x.shape[1], -1, x.shape[3])), before)
            for x, before in ((key, old[0]), (value, old[1]))
        )
        return keys, values, torch.where(new, numbers, old[2])

    def get_seq_length(self: Any) -> int:
        has_full = isinstance(vars(self).get("keys"), Tensor)
        return int(super().get_seq_length() if has_full else self.seen)  # type: ignore[misc]

    def reset(self: Any) -> None:
        self.seen = 0
        for name in BUFFER:
            vars(self).pop(name, None)
        super().reset()  # type: ignore[misc]


@functools.cache
def _streaming_class(layer_class: type, shared: type | None = None) -> Any:
    between = (shared,) if shared else ()
    return type(f"Streaming{layer_class.__name__}", (StreamingKV, *between, layer_class), {"plain": layer_class})


@dataclass
class Split:
    """Keys and values of one layer in one forward, split by head. Passed to attention as an attribute of the key tensor."""

    full_heads: tuple[int, ...]  # kv heads
    stream_heads: tuple[int, ...]
    full: tuple[Tensor, Tensor] | None  # keys and values of full heads, as the cache returned them
    key: Tensor  # [rows, streaming kv heads, buffer + new tokens, dim]
    value: Tensor
    positions: Tensor  # [rows, buffer + new tokens]
    window: int
    sinks: int

    def query_heads(self, heads: int) -> tuple[Tensor, Tensor]:
        """Return the indices of full and of streaming query heads."""
        group = heads // (len(self.full_heads) + len(self.stream_heads))
        return tuple(  # type: ignore[return-value]
            torch.tensor([kv * group + i for kv in kvs for i in range(group)], dtype=torch.int64, device=self.key.device)
            for kvs in (self.full_heads, self.stream_heads)
        )

    def near(self, q: Tensor, k: Tensor) -> Tensor:
        """Return whether a streaming head's query at position q sees the key at position k."""
        return (k > q - self.window) | (k < self.sinks)

    def block(self, queries: slice, new: int) -> Tensor:
        """Return the indices of all keys that some of these queries may see: sinks, in buffer or new tokens, and the window."""
        size = self.positions.shape[1] - new  # of the buffer
        first, last = max(0, size + queries.start - self.window + 1), size + queries.stop
        sinks = [*range(self.sinks), *range(size, size + min(self.sinks, new))]
        return torch.tensor(sorted({*sinks, *range(first, last)} & set(range(last))), device=self.key.device)

    def visible(self, q_positions: Tensor, index: Tensor, window: int | None) -> Tensor:
        """Return visible pairs [rows, 1, queries, keys]; `window`: the layer's own sliding window."""
        q, k = q_positions[:, None, :, None], self.positions[:, index][:, None, None, :]
        seen = (k >= 0) & (k <= q) & self.near(q, k)
        return seen if window is None else seen & (k > q - window)


class SplitKeys:
    """Keys of full and streaming heads in common columns, one per position; streaming heads use the columns that they hold."""

    sliceable = False

    def __init__(self, split: Split, full: Keys | None, heads: int, q_positions: Tensor) -> None:
        self.split, self.full, self.stream = split, full, OwnKeys(split.key, split.value)
        self.full_heads, self.stream_heads = split.query_heads(heads)
        self.count, self.value_dim = full.count if full else self.stream.count, split.value.shape[3]
        self._positions = full.positions(q_positions) if full else split.positions
        rows, held = split.positions.shape
        # [rows, streaming keys] column of each key; `count` for empty buffer entries
        self.columns = torch.arange(held, device=split.key.device).expand(rows, -1)
        if full is not None:
            places = torch.full((rows, int(self._positions.max()) + 3), self.count, device=split.key.device)
            places.scatter_(1, self._positions + 1, torch.arange(self.count, device=places.device).expand(rows, -1))
            places[:, 0] = self.count
            self.columns = places.gather(1, split.positions + 1)

    def positions(self, q_positions: Tensor) -> Tensor:
        return self._positions

    def limited(self, visible: Tensor, q_positions: Tensor, k_positions: Tensor, heads: int) -> Tensor:
        """Restrict the visible pairs of full heads to what each head sees: [rows, heads, queries, keys]."""
        near = self.split.near(q_positions[:, None, :, None], k_positions[:, None, None, :])
        streams = torch.zeros(heads, dtype=torch.bool, device=visible.device)
        streams[self.stream_heads] = True
        return visible & (near | ~streams[None, :, None, None])

    def scores(self, query: Tensor, first: int, last: int) -> Tensor:
        rows, heads, queries, _ = query.shape
        out = query.new_zeros(rows, heads, queries, self.count)
        if self.full is not None:
            out[:, self.full_heads] = self.full.scores(query[:, self.full_heads], 0, self.count)
        own = self.stream.scores(query[:, self.stream_heads], 0, self.stream.count)
        spread = own.new_zeros(*own.shape[:3], self.count + 1)
        out[:, self.stream_heads] = spread.scatter_(3, self._index(own), own)[..., :-1]
        return out

    def mix(self, weights: Tensor, first: int, last: int) -> Tensor:
        out = weights.new_empty(*weights.shape[:3], self.value_dim)
        if self.full is not None:
            out[:, self.full_heads] = self.full.mix(weights[:, self.full_heads], 0, self.count)
        streaming = torch.nn.functional.pad(weights[:, self.stream_heads], (0, 1))
        held = streaming.gather(3, self._index(streaming[..., :1].expand(-1, -1, -1, self.stream.count)))
        out[:, self.stream_heads] = self.stream.mix(held, 0, self.stream.count)
        return out

    def _index(self, like: Tensor) -> Tensor:
        return self.columns[:, None, None].expand(like.shape)


def streams_of(config: Any) -> Streams | None:
    """Return the streaming heads of a configuration; None if it has none."""
    entry = getattr(config, ENTRY, None)
    said = entry.get("streaming") if isinstance(entry, Mapping) else None
    return None if said is None else Streams.read(said)


def whole_groups(kept: Sequence[int], query_heads: int, kv_heads: int) -> tuple[int, ...]:
    """Return the kv heads of whose query heads none is in `kept`."""
    group = query_heads // kv_heads
    return tuple(kv for kv in range(kv_heads) if not any(head // group == kv for head in kept))
