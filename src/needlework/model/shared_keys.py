"""Cache layers whose prompt keys are kept once and read by many rows; only what each row adds is its own."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from needlework.model.keys import Prefix


class SharedKV:
    """Mixed into a transformers cache layer by `adopt`: the prompt's keys move to `prefix`, new ones go to `keys`."""

    @staticmethod
    def adopt(filled: Any, rows: Tensor, length: int) -> Any:
        """A filled layer of P prompts as a shared one with a row for each entry of `rows`."""
        layer = object.__new__(_shared_class(type(filled)))  # type: ignore[arg-type]
        vars(layer).update(vars(filled))
        key, value = layer.keys, layer.values
        positions = torch.arange(length - key.shape[2], length, device=key.device).expand(key.shape[0], -1)
        start = torch.full((len(rows),), length, device=key.device)
        layer.prefix = Prefix.of(key, value, positions, rows.to(key.device), start)
        empty = key.new_empty(len(rows), key.shape[1], 0, key.shape[3])
        layer.keys, layer.values = empty, value.new_empty(len(rows), value.shape[1], 0, value.shape[3])
        layer.tokens = length
        return layer

    def update(self: Any, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.keys = torch.cat([self.keys, key_states], dim=2)
        self.values = torch.cat([self.values, value_states], dim=2)
        if hasattr(self, "cumulative_length"):
            self.cumulative_length += key_states.shape[2]
        self.keys.shared_prefix = self.prefix  # the attention function finds the prompt's keys through this
        return self.keys, self.values

    def get_seq_length(self: Any) -> int:
        return int(self.tokens) + int(self.keys.shape[2])

    def get_mask_sizes(self: Any, query_length: int) -> tuple[int, int]:
        return self.prefix.key.shape[2] + self.keys.shape[2] + query_length, 0

    def select(self: Any, rows: Tensor) -> None:
        self.prefix = self.prefix.select(rows)

    def join(self: Any, layers: Sequence[Any]) -> None:
        """Become one layer with the rows of all of them; shorter ones are padded on the left."""
        own = max(layer.keys.shape[2] for layer in layers)
        same_own = all(layer.keys.shape[2] == own for layer in layers)
        self.prefix = Prefix.join([layer.prefix for layer in layers], same_own)
        self.keys = torch.cat([pad(layer.keys, (0, 0, own - layer.keys.shape[2], 0)) for layer in layers])
        self.values = torch.cat([pad(layer.values, (0, 0, own - layer.values.shape[2], 0)) for layer in layers])
        self.tokens = max(layer.tokens for layer in layers)

    @property
    def prefix_bytes(self: Any) -> int:
        return sum(x.numel() * x.element_size() for x in (self.prefix.key, self.prefix.value))


@functools.cache
def _shared_class(layer_class: type) -> Any:
    return type(f"Shared{layer_class.__name__}", (SharedKV, layer_class), {})
