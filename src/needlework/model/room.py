"""Room for the keys of a long prompt, taken once: each chunk's keys are written into it, and nothing before them is copied.

A transformers cache grows by concatenation: for a moment, all keys of a layer are there twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicLayer


class RoomyLayer(DynamicLayer):  # type: ignore[misc, unused-ignore]
    """A cache layer that knows how many tokens it will hold."""

    keys: Tensor
    values: Tensor
    tokens: int
    room: dict[str, Tensor]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = self._with("keys", self.keys, key_states)
        self.values = self._with("values", self.values, value_states)
        return self.keys, self.values

    def _with(self, name: str, old: Tensor, new: Tensor) -> Tensor:
        known = old.shape[-2] if old.numel() else 0
        if name not in self.room:
            self.room[name] = new.new_empty(*new.shape[:-2], self.tokens, new.shape[-1])
            if known:
                self.room[name][..., :known, :] = old
        last = known + new.shape[-2]
        self.room[name][..., known:last, :] = new
        return self.room[name][..., :last, :]


@contextmanager
def room_for(cache: Any, tokens: int) -> Iterator[None]:
    """While open, plain layers of this cache fill up to so many tokens; other layers keep few, or have ways of their own."""
    layers = [layer for layer in getattr(cache, "layers", ()) if type(layer) is DynamicLayer]
    for layer in layers:
        layer.__class__, layer.tokens, layer.room = RoomyLayer, tokens, {}
    try:
        yield
    finally:
        for layer in layers:
            layer.__class__ = DynamicLayer
            del layer.tokens, layer.room
