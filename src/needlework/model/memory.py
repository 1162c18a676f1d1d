"""A model's memory (KV cache and recurrent states) and how it is copied, forked, shared, cleared and swapped.

Memory has two halves, keys and values ("kv") and recurrent state ("recurrent"). Most models keep both in a transformers
cache. RecurrentGemma keeps recurrent states on its modules, so they are set there before each forward and removed after it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer

from needlework.interventions.acts import Half
from needlework.model.keys import Prefix, SharedKV
from needlework.model.pruned import BUFFER

_KV = {"keys": 0, "values": 0, "indexer_keys": 0, "indexer_position_ids": 1}  # attribute -> batch dimension
_KV |= dict.fromkeys(BUFFER, 0)
_RECURRENT = ("conv_states", "recurrent_states")
RecurrentKind = Literal["conv", "state"]


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

    def select(self, rows: Tensor, recurrent_rows: Tensor | None = None) -> Memory:
        """Return a copy of the given rows, in this order; rows may repeat. Shared keys stay shared.

        Args:
            rows: [new rows] indices.
            recurrent_rows: [new rows] rows to take the recurrent half from, if others: this swaps memory between rows.
        """
        source = {"kv": rows, "recurrent": rows if recurrent_rows is None else recurrent_rows}
        new = self._rebuilt(len(rows), lambda slot: slot.select(source[slot.half]))
        for layer in new._layers:
            if isinstance(layer, SharedKV):
                layer.select(rows)
        return new

    def share(self, rows: Tensor, recurrent_rows: Tensor | None = None) -> Memory:
        """Fork rows as `select` does, but without copying keys and values: all rows read those of this memory."""
        source = {"kv": rows, "recurrent": rows if recurrent_rows is None else recurrent_rows}
        new = self._rebuilt(len(rows), lambda slot: slot.tensor if slot.shared else slot.select(source[slot.half]))
        new.cache.layers = [
            SharedKV.adopt(layer, rows, self.length) if isinstance(vars(layer).get("keys"), Tensor) else layer
            for layer in new.cache.layers
        ]
        return new

    def above(self, below: Memory, rows: Tensor, remembered: Callable[[Half, int], bool]) -> Memory:
        """Combine this memory with a recorded one, row by row.

        Args:
            below: the recorded memory.
            rows: [rows] row of `below` for each row of this memory.
            remembered: whether (half, cache layer) is taken from `below`; the rest is taken from this memory.
        """
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
