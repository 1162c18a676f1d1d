"""Prefill from an intermediate layer: lower layers without interventions reuse the outputs of one recorded prefill.

A prefill of some prompts without interventions is recorded: the outputs of the needed layers, and the head outputs of attention
layers. Rows whose first intervention is at some layer skip the layers below it, which return the recorded outputs; the rest of
the model, including masks and positions, runs unchanged on the whole batch. In the topmost layer that mixes tokens, the
next token needs only the keys of all tokens and the output of the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from needlework.model.attention import get_current
from needlework.model.memory import Memory
from needlework.model.probe import first, replace_first
from needlework.receipts import Receipt

_HEADS = 0.4  # share of a layer's compute that comes before its head outputs are known


class CannotEnter(Exception):
    """Raised if layers are not a plain stack, each called once, or if their outputs cannot be split into rows."""


@dataclass
class RecordedHeads:
    """Recorded head outputs of one attention layer, as its output projection reads them."""

    heads: Tensor  # [rows, tokens, heads * dim], after any output gate
    projection: nn.Module
    returned: tuple[None, ...] | None  # what the module returns, without the projection's output: as a tuple, or by itself


@dataclass
class PrefillRecording:
    """A recorded prefill of some prompts without interventions."""

    ids: Tensor  # [rows, tokens] the prompts
    memory: Memory
    logits: Tensor = field(init=False)  # [rows, vocabulary] after the last token
    receipts: list[Receipt] = field(init=False)
    outputs: dict[int, Any] = field(default_factory=dict)  # layer -> its output
    heads: dict[int, RecordedHeads] = field(default_factory=dict)  # attention layer -> its head outputs
    scores: dict[int, dict[str, Tensor]] = field(default_factory=dict)  # layer -> scores of its heads [rows, tokens, heads]


class EntryPoint(NamedTuple):
    """The layer from which a prefill is computed; a recording replaces everything below."""

    layer: int
    after_heads: bool  # this layer's head outputs are recorded, too: they are only zeroed and projected
    last_only: bool = True  # in the topmost mixing layer, compute only what the next token needs
    scored: tuple[str, int] | None = None  # head score, and sinks left out of it, if heads of this layer are kept by one

    def share(self, layers: int) -> float:
        """Return the share of the model's compute that lies below it."""
        return (self.layer + _HEADS * self.after_heads) / layers

    def remembered(self, half: str, cache_layer: int) -> bool:
        """Return whether this half of a cache layer is taken from the recording."""
        return cache_layer < self.layer or (cache_layer == self.layer and self.after_heads and half == "kv")


class Stack:
    """The layers of a model, in order."""

    def __init__(self, layers: Sequence[nn.Module], attention: Mapping[int, nn.Module], mixers: Mapping[nn.Module, int]) -> None:
        self.layers, self.attention = layers, attention
        mixing = (*attention, *mixers.values())
        self.top = max(mixing, default=0)  # the topmost layer that mixes tokens
        # If it has both attention and a mixer, one may read the other's output, so that all of its tokens are needed.
        self.lone_top = mixing.count(self.top) == 1
        self._mixing = {*attention.values(), *mixers}

    @staticmethod
    def of(model: nn.Module, attention: Mapping[nn.Module, int], mixers: Mapping[nn.Module, int]) -> Stack | None:
        """Find the module list that holds every attention module and mixer at the index of its layer; None if none does."""
        paths = {module: path for path, module in model.named_modules()}
        for path, module in model.named_modules():
            if isinstance(module, nn.ModuleList) and all(
                f"{paths[part]}.".startswith(f"{path}.{layer}.") for part, layer in (*attention.items(), *mixers.items())
            ):
                return Stack(list(module), {layer: part for part, layer in attention.items()}, mixers)
        return None

    @contextmanager
    def recorded(self, recording: PrefillRecording, layers: Collection[int], heads: Collection[int]) -> Iterator[None]:
        """Record a prefill while the context is open: outputs of `layers`, and head outputs of the layers `heads`."""
        with ExitStack() as stack:
            for layer in layers:

                def keep(module: nn.Module, args: Any, output: Any, layer: int = layer) -> None:
                    if layer in recording.outputs:
                        raise CannotEnter(f"layer {layer} runs more than once")
                    recording.outputs[layer] = output

                stack.callback(self.layers[layer].register_forward_hook(keep).remove)
            for layer in heads:
                stack.enter_context(_recorded_heads(recording, layer, self.attention[layer]))
            yield

    def fed(self, entry: EntryPoint) -> slice:
        """Return the tokens to feed: only the last one if the entry is after the heads of the topmost mixing layer."""
        return slice(-1, None) if entry.last_only and entry.after_heads and entry.layer == self.top else slice(None)

    @contextmanager
    def entered(self, entry: EntryPoint, recording: PrefillRecording, rows: Tensor, heads: int) -> Iterator[None]:
        """Make the model run from the entry's layer on while the context is open.

        Args:
            rows: [rows] the recorded row that each row of the batch continues.
            heads: number of query heads of this layer.
        """
        tokens = self.fed(entry)
        with ExitStack() as stack:
            if entry.last_only:
                for module in self._token_wise(self.layers[self.top]):
                    stack.enter_context(_replaced(module, _of_last_token(module.forward)))
            if entry.layer:
                below = _part_of(recording.outputs[entry.layer - 1], rows, tokens, recording.ids.shape)
                for module in self.layers[: entry.layer]:
                    stack.enter_context(_replaced(module, lambda *args, **kwargs: below))
            if entry.after_heads:
                zeroing = _with_heads_zeroed(entry.layer, recording, rows, heads, tokens)
                stack.enter_context(_replaced(self.attention[entry.layer], zeroing))
            yield

    def _token_wise(self, layer: nn.Module) -> Iterator[nn.Module]:
        """Yield the parts of a layer that compute each token by itself and hold matrices: feed-forward maps and experts."""
        for part in layer.children():
            inside = set(part.modules())
            if not inside & self._mixing and any(p.dim() > 1 for p in part.parameters()):
                yield part
            elif inside & self._mixing and part not in self._mixing:
                yield from self._token_wise(part)


@contextmanager
def _recorded_heads(recording: PrefillRecording, layer: int, attention: nn.Module) -> Iterator[None]:
    """Record the input of an attention module's last linear map, if the module returns that map's output."""
    last: list[tuple[nn.Module, Tensor, Tensor]] = []

    def projected(module: nn.Module, args: Any, output: Any) -> None:
        last[:] = [(module, args[0], output)]

    def finished(module: nn.Module, args: Any, output: Any) -> None:
        hidden, others = first(output), output[1:] if isinstance(output, tuple) else ()
        if layer in recording.heads:
            raise CannotEnter(f"the attention of layer {layer} runs more than once")
        same = bool(last) and last[0][2].data_ptr() == hidden.data_ptr() and last[0][2].shape == hidden.shape
        if same and all(other is None for other in others):
            recording.heads[layer] = RecordedHeads(last[0][1], last[0][0], replace_first(output, None))

    with ExitStack() as stack:
        for module in attention.modules():
            if isinstance(module, nn.Linear):
                stack.callback(module.register_forward_hook(projected).remove)
        stack.callback(attention.register_forward_hook(finished).remove)
        yield


def _with_heads_zeroed(layer: int, recording: PrefillRecording, rows: Tensor, heads: int, fed: slice) -> Callable[..., Any]:
    """Return a forward for an attention module that zeroes heads in their recorded outputs and projects the result."""
    recorded, scores = recording.heads[layer], {name: x[rows] for name, x in recording.scores.get(layer, {}).items()}

    def forward(*args: Any, **kwargs: Any) -> Any:
        now = get_current()
        assert now is not None
        edits, tokens = now.edits[layer], recorded.heads.shape[1]
        positions = torch.arange(tokens, device=rows.device).expand(len(rows), -1)
        off = edits.switched_off(layer, positions, heads, scores)
        assert off is not None
        values = recorded.heads[:, fed].index_select(0, rows.to(recorded.heads.device))
        values.view(*values.shape[:2], heads, -1).masked_fill_(off[:, fed, :, None], 0.0)
        # Counted for all tokens: outputs of tokens that are not fed are not used later.
        now.tally.add(layer, now.phase, "positions", now.slots, tokens)
        now.tally.add(layer, now.phase, "heads_zeroed", now.slots, off.sum((1, 2)))
        return replace_first(recorded.returned, recorded.projection(values))

    return forward


@contextmanager
def _replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace a module's forward while the context is open; the module must not have an instance-level one already."""
    if "forward" in vars(module):
        raise CannotEnter(f"{type(module).__name__} has a forward of its own already")
    vars(module)["forward"] = forward
    try:
        yield
    finally:
        del vars(module)["forward"]


def _of_last_token(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the forward of a token-wise module to compute the last token only; other outputs, which are not used, are zero."""

    def last(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        output = forward(hidden[:, -1:], *args, **kwargs)
        computed = first(output)
        whole = computed.new_zeros(*hidden.shape[:2], *computed.shape[2:])
        whole[:, -1:] = computed
        return replace_first(output, whole)

    return last


def _part_of(value: Any, rows: Tensor, tokens: slice, shape: torch.Size) -> Any:
    """Select rows and tokens of a layer's output (tensors or nested tuples) for ids of this shape."""
    if isinstance(value, tuple):
        return tuple(_part_of(part, rows, tokens, shape) for part in value)
    if value is None:
        return None
    if not isinstance(value, Tensor) or value.shape[:2] != shape:
        raise CannotEnter("a layer returns something that is not a tensor with one entry for each row and token")
    return value[:, tokens].index_select(0, rows.to(value.device))
