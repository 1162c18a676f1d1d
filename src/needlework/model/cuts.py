"""A mixer called once more and shown less: each token alone, a convolution without its past, a state that is not carried.

None of it needs to know how a mixer computes. A token that is the only one of its sequence meets an empty memory. A convolution
without its past is one whose taps on earlier tokens are zero. A state that is not carried is each token alone, but with the
window that its convolution would have: what a lone token leaves behind in an empty window is its own input to the convolution,
and a window is such inputs side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from needlework.model.memory import Memory

_CACHES = frozenset({"cache_params", "past_key_values", "past_key_value", "cache"})
_TOKENS_AT_ONCE = 256  # over all rows; a mixer pads each lone token to a whole chunk: this bounds the memory of that


@dataclass(frozen=True)
class Call:
    """A mixer's call with a batch, to be repeated with some rows of it."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rows: int
    tokens: int

    def pieces(self, rows: int) -> Iterator[slice]:
        """All tokens, as many at once as so many rows may have alone."""
        at_once = max(1, _TOKENS_AT_ONCE // rows)
        return (slice(start, min(start + at_once, self.tokens)) for start in range(0, self.tokens, at_once))

    def again(self, chosen: Tensor, part: slice, cache: Any, use_cache: bool, alone: bool) -> Tensor:
        """[chosen rows, tokens of this part, ...]: what the mixer says to these tokens, in a row or each by itself."""

        def of_part(value: Any) -> Any:
            """[rows, tokens, ...] -> the chosen ones; anything that is not per token stays as it is."""
            if isinstance(value, (tuple, list)):
                return type(value)(of_part(item) for item in value)
            per_token = isinstance(value, Tensor) and value.dim() >= 2 and value.shape[1] == self.tokens
            if not per_token or value.shape[0] not in (1, self.rows):
                return value
            picked = value.expand(self.rows, *value.shape[1:])[chosen, part]
            return picked.reshape(picked.shape[0] * picked.shape[1], 1, *picked.shape[2:]) if alone else picked

        given = {**dict.fromkeys(_CACHES, cache), "attention_mask": None, "use_cache": use_cache}
        named = {key: given[key] if key in given else of_part(value) for key, value in self.kwargs.items()}
        plain = [cache if _is_cache(value) else of_part(value) for value in self.args]
        with _chunks_of_one(self.module, chosen.device) if alone else nullcontext():
            out = first(self.module.forward(*plain, **named))
        return out.reshape(len(chosen), part.stop - part.start, *out.shape[2:])


def each_token_alone(call: Call, chosen: Tensor) -> Tensor:
    """Nothing is carried from token to token."""
    return torch.cat([call.again(chosen, part, None, False, alone=True) for part in call.pieces(len(chosen))], 1)


def without_convolution(call: Call, chosen: Tensor, memory: Memory, convolution: nn.Conv1d) -> Tensor:
    """The convolution sees each token alone; the state goes on, in `memory`, which holds the chosen rows as they were before."""
    with memory.mounted(), _last_tap_only(convolution):
        return call.again(chosen, slice(0, call.tokens), memory.cache, True, alone=False)


def without_state(
    call: Call, chosen: Tensor, memory: Memory, layer: int, empty: Callable[[int], Memory], unheard: Callable[[], Any]
) -> Tensor:
    """The state is empty before every token; the convolution's window is what it would be.

    `memory` holds the chosen rows as they were before, `empty` makes memories of this mixer that have seen nothing, and
    `unheard` opens a context for a call whose answer is thrown away.
    """
    said = []
    past = [slot.tensor for slot in memory.states_of(layer, "conv")]  # [rows, channels, window]; none before the first token
    for part in call.pieces(len(chosen)):
        count = part.stop - part.start
        lone = empty(len(chosen) * count)
        with lone.mounted(), unheard():
            call.again(chosen, part, lone.cache, True, alone=True)
        (window,) = lone.states_of(layer, "conv")
        _, channels, length = window.tensor.shape
        inputs = window.tensor[..., -1].reshape(len(chosen), count, channels).transpose(1, 2)
        before = past[0] if past else inputs.new_zeros(len(chosen), channels, length)
        line = torch.cat([before, inputs], -1)
        windows = line.unfold(-1, length, 1)[:, :, :count]  # [rows, channels, tokens, window]: what came before each token
        window.put(windows.transpose(1, 2).reshape(-1, channels, length).contiguous())
        lone.clear([layer], torch.ones(lone.rows, dtype=torch.bool), "state")
        with lone.mounted():
            said.append(call.again(chosen, part, lone.cache, True, alone=True))
        past = [line[..., -length:]]
    return torch.cat(said, 1)


def first(output: Any) -> Tensor:
    """What a module says, where it may say other things beside it."""
    said: Tensor = output[0] if isinstance(output, tuple) else output
    return said


@contextmanager
def _last_tap_only(convolution: nn.Conv1d) -> Iterator[None]:
    """The convolution's weights on all tokens but the present one are zero."""
    weight = convolution._parameters["weight"]
    assert weight is not None
    present = torch.zeros_like(weight)
    present[..., -1] = weight[..., -1]
    convolution._parameters["weight"] = nn.Parameter(present, requires_grad=False)
    try:
        yield
    finally:
        convolution._parameters["weight"] = weight


@contextmanager
def _chunks_of_one(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Mamba-2 mixers pad every sequence to whole chunks: on a CPU, a lone token need not cost as much as a chunk.

    Libraries for other devices have smallest chunks of their own, so there nothing is changed.
    """
    size = getattr(module, "chunk_size", None)
    if not isinstance(size, int) or device.type != "cpu":
        yield
        return
    try:
        module.chunk_size = 1  # type: ignore[assignment]
        yield
    finally:
        module.chunk_size = size  # type: ignore[assignment]


def _is_cache(value: Any) -> bool:
    return hasattr(value, "get_seq_length") or hasattr(value, "update_conv_state")
