"""A model's memory: the one place that knows how it is copied, forked, shared, cut and swapped.

Memory has two halves, keys and values ("kv") and recurrent state ("recurrent"). Most models keep both in a transformers
cache; RecurrentGemma keeps its recurrent half on the modules, so it is mounted there for each call and taken off again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from needlework.interventions.acts import Half
from needlework.model.keys import Prefix, SharedKV
from needlework.model.streaming import BUFFER

_KV = {"keys": 0, "values": 0, "indexer_keys": 0, "indexer_position_ids": 1}  # attribute -> dimension of the batch
_KV |= dict.fromkeys(BUFFER, 0)
_RECURRENT = ("conv_states", "recurrent_states")
RecurrentKind = Literal["conv", "state"]


@dataclass(frozen=True)
class Slot:
    """One tensor of the memory, wherever it is kept."""

    half: Half
    layer: int  # index in the cache
    name: str  # unique within the layer
    holder: Any  # dict or list
    key: Any
    batch_dim: int = 0

    @property
    def tensor(self) -> Tensor:
        return self.holder[self.key]  # type: ignore[no-any-return]

    @property
    def kind(self) -> RecurrentKind | None:
        """Of the recurrent half: the window of a short convolution, or a state."""
        if self.half != "recurrent":
            return None
        return "conv" if any(word.startswith("conv") for word in self.name.split(".")[-2:]) else "state"

    @property
    def shared(self) -> bool:
        """Whether rows that share keys read it where it lies; a buffer of few tokens is each row's own."""
        return self.half == "kv" and self.name not in BUFFER

    def put(self, tensor: Tensor) -> None:
        self.holder[self.key] = tensor


class Memory:
    """What the model remembers of `length` tokens in each of `rows` sequences."""

    def __init__(self, cache: Any, on_modules: dict[str, tuple[int, nn.Module, str]], rows: int) -> None:
        self.cache = cache
        self.length = 0
        self.rows = rows
        self._on_modules = on_modules  # path -> (layer, module, attribute)
        self._held: dict[str, Tensor | None] = dict.fromkeys(on_modules)
        self._on = False  # module-held state is where the model looks for it

    @contextmanager
    def mounted(self) -> Iterator[None]:
        """Put module-held state where the model looks for it; put back what was there, also after an exception."""
        # Straight into the module's dict: at every token, torch's own setattr costs more than the rest of this.
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
        """Every tensor in use, of one half or of both."""
        return [slot for slot in self._slots() if half in (None, slot.half)]

    def _slots(self) -> Iterator[Slot]:
        for index, layer in enumerate(getattr(self.cache, "layers", ())):
            fields = vars(layer)
            for name, batch_dim in _KV.items():
                if isinstance(fields.get(name), Tensor) and fields[name].dim() > 1:
                    yield Slot("kv", index, name, fields, name, batch_dim)
            for name in _RECURRENT:
                states = fields.get(name)
                if isinstance(states, dict):
                    used = [i for i, x in states.items() if x is not None]
                    yield from (Slot("recurrent", index, f"{name}.{i}", states, i) for i in used)
        linear = getattr(self.cache, "linear_cache", [])  # MiniMax
        yield from (Slot("recurrent", i, "linear_cache", linear, i) for i, x in enumerate(linear) if isinstance(x, Tensor))
        for path, (layer, module, name) in self._on_modules.items():
            holder, key = (vars(module), name) if self._on else (self._held, path)
            if holder[key] is not None:
                yield Slot("recurrent", layer, path, holder, key)

    def _rebuilt(self, rows: int, tensor: Callable[[Slot], Tensor]) -> Memory:
        """A memory of the same structure whose tensors are computed from this one's."""
        new = Memory(_shell(self.cache), self._on_modules, rows)
        new.length, new._held = self.length, dict(self._held)
        for slot in new.slots():
            slot.put(tensor(slot))
        return new

    def select(self, rows: Tensor, recurrent_rows: Tensor | None = None) -> Memory:
        """A copy of these rows, in this order; a row may be taken several times. Shared keys stay shared.

        With `recurrent_rows` the two halves come from different rows: that is how memory is swapped.
        """
        source = {"kv": rows, "recurrent": rows if recurrent_rows is None else recurrent_rows}
        new = self._rebuilt(
            len(rows), lambda slot: slot.tensor.index_select(slot.batch_dim, source[slot.half].to(slot.tensor.device))
        )
        for layer in getattr(new.cache, "layers", ()):
            if isinstance(layer, SharedKV):
                layer.select(rows)
        return new

    def share(self, rows: Tensor, recurrent_rows: Tensor | None = None) -> Memory:
        """As `select`, but all rows read this memory's keys where they lie instead of copying them."""
        source = {"kv": rows, "recurrent": rows if recurrent_rows is None else recurrent_rows}

        def forked(slot: Slot) -> Tensor:
            return slot.tensor if slot.shared else slot.tensor.index_select(0, source[slot.half].to(slot.tensor.device))

        new = self._rebuilt(len(rows), forked)
        new.cache.layers = [
            SharedKV.adopt(layer, rows, self.length) if isinstance(vars(layer).get("keys"), Tensor) else layer
            for layer in new.cache.layers
        ]
        return new

    def above(self, below: Memory, rows: Tensor, remembered: Callable[[Half, int], bool]) -> Memory:
        """Whole rows: what is `remembered` (half, layer) is taken from these rows of another memory, the rest is this one's."""
        own = {(slot.layer, slot.name): slot for slot in self.slots()}

        def part(slot: Slot) -> Tensor:
            if remembered(slot.half, slot.layer):
                return slot.tensor.index_select(slot.batch_dim, rows.to(slot.tensor.device))
            return own[slot.layer, slot.name].tensor

        return below._rebuilt(self.rows, part)

    @property
    def shared(self) -> bool:
        return any(isinstance(layer, SharedKV) for layer in getattr(self.cache, "layers", ()))

    @property
    def ragged(self) -> bool:
        """Whether rows of different lengths may stand side by side: no keys at all, or shared ones."""
        layers = getattr(self.cache, "layers", ())
        return all(isinstance(x, SharedKV) for x in layers if isinstance(vars(x).get("keys"), Tensor))

    @staticmethod
    def join(memories: Sequence[Memory]) -> Memory:
        """Several memories as one batch. Lengths may differ only where all of them share keys."""
        first = memories[0]
        if len(memories) == 1:
            return first
        tables = [{(slot.layer, slot.name): slot for slot in memory.slots()} for memory in memories]
        skip = {i for i, layer in enumerate(getattr(first.cache, "layers", ())) if isinstance(layer, SharedKV)}

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
        """Empty the recurrent half of these cache layers, or one kind of it, for the rows marked True."""
        for slot in self.slots("recurrent"):
            if slot.layer in layers and kind in (None, slot.kind):
                keep = (~rows).to(slot.tensor.device, slot.tensor.dtype)
                slot.put(slot.tensor * keep.view(-1, *[1] * (slot.tensor.dim() - 1)))

    def states_of(self, layer: int, kind: RecurrentKind) -> list[Slot]:
        """What one layer has of one kind."""
        return [slot for slot in self.slots("recurrent") if slot.layer == layer and slot.kind == kind]

    def of_layer(self, layer: int, rows: Tensor) -> Memory:
        """The memory of one mixer by itself: copies of its states of these rows, as they are now."""
        places = {path: place for path, place in self._on_modules.items() if place[0] == layer}
        new = Memory(copy.copy(self.cache), places, len(rows))
        if places:
            new._held = {path: vars(module)[name] if self._on else self._held[path] for path, (_, module, name) in places.items()}
        else:
            new.cache.layers = list(self.cache.layers)
            new.cache.layers[layer] = _shell_layer(self.cache.layers[layer])
        for slot in new.slots("recurrent"):
            if slot.layer == layer:
                slot.put(slot.tensor.index_select(0, rows.to(slot.tensor.device)))
        return new

    def take_states(self, layer: int, rows: Tensor, other: Memory) -> None:
        """These rows of one layer's recurrent state are those of another memory, which has them and no more."""
        new = {slot.name: slot.tensor for slot in other.states_of(layer, "state")}
        for slot in self.states_of(layer, "state"):
            slot.put(slot.tensor.index_copy(0, rows.to(slot.tensor.device), new[slot.name].to(slot.tensor.dtype)))

    def nbytes(self, half: Half | None = None) -> int:
        """Bytes held; keys that several rows share count once."""
        own = sum(slot.tensor.numel() * slot.tensor.element_size() for slot in self.slots(half))
        layers = [x for x in getattr(self.cache, "layers", ()) if isinstance(x, SharedKV)]
        return own + (sum(x.prefix_bytes for x in layers) if half in (None, "kv") else 0)


def _shell(cache: Any) -> Any:
    """A cache of its own whose layers still point to the old tensors."""
    new = copy.copy(cache)
    for name, value in vars(cache).items():
        if name == "layers":
            new.layers = [_shell_layer(layer) for layer in value]
        elif isinstance(value, list):
            setattr(new, name, list(value))
    return new


def _shell_layer(layer: Any) -> Any:
    new = copy.copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, dict):
            setattr(new, name, dict(value))
        elif isinstance(value, Prefix):
            setattr(new, name, copy.copy(value))
    return new
