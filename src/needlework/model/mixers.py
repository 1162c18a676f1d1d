"""Hooks for what the attention function cannot reach: recurrent mixers, and whole attention modules.

A mixer's memory is cut by showing it each token alone, as the only token of a sequence of its own. That needs no knowledge
of the mixer: convolution, state-space and delta-rule memories are all cut the same way, and the token's own path stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from needlework.interventions import acts
from needlework.interventions.acts import Act
from needlework.model.attention import Forward, get_current

_CACHES = frozenset({"cache_params", "past_key_values", "past_key_value", "cache"})
_TOKENS_AT_ONCE = 256  # over all rows; a mixer pads each lone token to a whole chunk: this bounds the memory of that


@dataclass
class MixerEdits:
    """What happens to one recurrent mixer in this phase, row by row; None where no row asks for it."""

    cut: Tensor | None = None  # [rows]
    dropped: Tensor | None = None  # [rows]

    @property
    def idle(self) -> bool:
        return self.cut is None and self.dropped is None

    def select(self, rows: Tensor) -> MixerEdits:
        marked = [None if x is None else x[rows] for x in (self.cut, self.dropped)]
        return MixerEdits(*(x if x is not None and bool(x.any()) else None for x in marked))


def compile_mixer(rows: Sequence[Sequence[Act]], device: torch.device) -> MixerEdits:
    def rows_with(kind: type[Act]) -> Tensor | None:
        marked = [any(isinstance(act, kind) for act in row) for row in rows]
        return torch.tensor(marked, device=device) if any(marked) else None

    return MixerEdits(rows_with(acts.CutMemory), rows_with(acts.DropRecurrent))


@dataclass(frozen=True)
class Mixer:
    """A recurrent mixer of the model and where its state lies."""

    layer: int
    module: nn.Module
    cache_layer: int
    state_names: tuple[str, ...] = ()  # attributes that hold its state, where it is not in the cache


@contextmanager
def hooked(mixers: Sequence[Mixer], attention: dict[nn.Module, int], clear: Callable[[Mixer, Tensor], None]) -> Iterator[None]:
    """Let the current forward's edits act on mixers and attention blocks; every hook is gone on exit."""
    with ExitStack() as stack:
        for mixer in mixers:
            handle = mixer.module.register_forward_hook(_mixer_hook(mixer, clear), with_kwargs=True)
            stack.callback(handle.remove)
        for module, layer in attention.items():
            stack.callback(module.register_forward_hook(_block_hook(layer)).remove)
        yield


def _mixer_hook(mixer: Mixer, clear: Callable[[Mixer, Tensor], None]) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        forward = get_current()
        edits = forward.mixers.get(mixer.layer) if forward is not None else None
        if forward is None or edits is None:
            return None
        tokens = forward.positions.shape[1]
        if edits.cut is not None:
            output = _with_rows(output, edits.cut, _each_token_alone(mixer, args, kwargs, forward, edits.cut))
            clear(mixer, edits.cut)
            forward.tally.add(mixer.layer, forward.phase, "states_cut", forward.slots, edits.cut.long() * tokens)
        if edits.dropped is not None:
            output = _without_rows(output, edits.dropped)
            forward.tally.add(mixer.layer, forward.phase, "blocks_dropped", forward.slots, edits.dropped.long() * tokens)
        return output

    return hook


def _block_hook(layer: int) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        forward = get_current()
        edits = forward.edits.get(layer) if forward is not None else None
        if forward is None or edits is None or edits.dropped is None:
            return None
        amount = edits.dropped.long() * forward.positions.shape[1]
        forward.tally.add(layer, forward.phase, "blocks_dropped", forward.slots, amount)
        return _without_rows(output, edits.dropped)

    return hook


def _first(output: Any) -> Tensor:
    first: Tensor = output[0] if isinstance(output, tuple) else output
    return first


def _with_rows(output: Any, rows: Tensor, other: Tensor) -> Any:
    """The module's output with the marked rows replaced by `other`, which holds these rows and no more."""
    hidden = _first(output).clone()
    hidden[rows] = other
    return (hidden, *output[1:]) if isinstance(output, tuple) else hidden


def _without_rows(output: Any, rows: Tensor) -> Any:
    """The module's output with the marked rows zeroed."""
    hidden = _first(output)
    new = hidden.masked_fill(rows.view(-1, *[1] * (hidden.dim() - 1)), 0.0)
    return (new, *output[1:]) if isinstance(output, tuple) else new


def _each_token_alone(mixer: Mixer, args: tuple[Any, ...], kwargs: dict[str, Any], forward: Forward, cut: Tensor) -> Tensor:
    """What the mixer says to each token of the marked rows when it is shown that token and nothing else."""
    rows, tokens = forward.positions.shape
    chosen = cut.nonzero()[:, 0]
    kept = [getattr(*holder(mixer.module, name)) for name in mixer.state_names]

    def lone(value: Any, part: slice) -> Any:
        """[rows, tokens, ...] -> [chosen rows * some tokens, 1, ...]; anything that is not per token stays as it is."""
        if isinstance(value, (tuple, list)):
            return type(value)(lone(item, part) for item in value)
        if not isinstance(value, Tensor) or value.dim() < 2 or value.shape[1] != tokens or value.shape[0] not in (1, rows):
            return value
        of_part = value.expand(rows, *value.shape[1:])[chosen, part]
        return of_part.reshape(of_part.shape[0] * of_part.shape[1], 1, *of_part.shape[2:])

    pieces = []
    at_once = max(1, _TOKENS_AT_ONCE // len(chosen))
    for start in range(0, tokens, at_once):
        part = slice(start, min(start + at_once, tokens))
        named = {
            key: None if key in _CACHES or key == "attention_mask" else False if key == "use_cache" else lone(value, part)
            for key, value in kwargs.items()
        }
        plain = [None if _is_cache(value) else lone(value, part) for value in args]
        with _chunks_of_one(mixer.module, cut.device):
            out = _first(mixer.module.forward(*plain, **named))
        pieces.append(out.reshape(len(chosen), part.stop - part.start, *out.shape[2:]))
    for name, value in zip(mixer.state_names, kept, strict=True):
        setattr(*holder(mixer.module, name), value)
    return torch.cat(pieces, 1)


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


def holder(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The submodule that has a state, and the name of the state there."""
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path), leaf
