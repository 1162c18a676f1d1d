"""Entering a model at one of its layers: rows that are alike below it take what one untouched reading left there.

An untouched reading of some prompts is recorded: what every wanted layer returned, and what the heads of an attention layer
said. A row that is acted on from some layer on then skips the layers below, which return what was recorded; the whole rest of
the model, its masks and positions included, runs as it always does, on all rows of the batch. Of the topmost layer that
lets tokens see each other, the next token needs no more than keys of all tokens and what the last one makes of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from needlework.model.attention import get_current
from needlework.model.memory import Memory
from needlework.receipts import Receipt


class CannotEnter(Exception):
    """The model's layers are not a plain stack, each called once, or return what cannot be taken apart into rows."""


@dataclass
class Said:
    """What the heads of one attention layer said, where its output projection takes it."""

    heads: Tensor  # [rows, tokens, heads * dim], gates included
    projection: nn.Module
    alone: bool  # the module returns the projection's output, and not a tuple that begins with it
    others: tuple[None, ...]


@dataclass
class Recording:
    """What an untouched reading of some prompts left behind."""

    ids: Tensor  # [rows, tokens] the prompts
    memory: Memory
    logits: Tensor = field(init=False)  # [rows, vocabulary] after the last token
    receipts: list[Receipt] = field(init=False)
    outputs: dict[int, Any] = field(default_factory=dict)  # layer -> what it returned
    said: dict[int, Said] = field(default_factory=dict)  # by attention layer
    scores: dict[int, dict[str, Tensor]] = field(default_factory=dict)  # layer -> scores of its heads [rows, tokens, heads]

    def output(self, layer: int, rows: Tensor, tokens: slice) -> Any:
        """What a layer returned, for these rows and tokens."""
        return _part_of(self.outputs[layer], rows, tokens, self.ids.shape)


@dataclass(frozen=True)
class Entry:
    """Where the rows of a batch enter."""

    recording: Recording
    rows: Tensor  # [rows] the recorded row that each of them goes on from
    layer: int  # the first that is computed
    after_heads: bool  # of this layer, all that its heads say is recorded, too: some are silenced, and the rest is projected
    last_only: bool  # in the topmost layer, nothing is computed that the next token does not need
    heads: int  # of its attention

    def remembered(self, half: str, cache_layer: int) -> bool:
        """Whether this part of the memory is the recorded one."""
        return cache_layer < self.layer or (cache_layer == self.layer and self.after_heads and half == "kv")


class Stack:
    """The layers of a model, one above the other."""

    def __init__(self, layers: Sequence[nn.Module], attention: Mapping[int, nn.Module], mixers: Mapping[nn.Module, int]) -> None:
        self.layers, self.attention = layers, attention
        mixing = (*attention, *mixers.values())
        self.top = max(mixing, default=0)  # above it, tokens do not see each other
        # Where it holds attention and a mixer, the one may read all that the other says: then every token of it counts.
        self.lone_top = mixing.count(self.top) == 1
        self._mixing = {*attention.values(), *mixers}

    @staticmethod
    def of(model: nn.Module, attention: Mapping[nn.Module, int], mixers: Mapping[nn.Module, int]) -> Stack | None:
        """The list of modules that holds every attention module and every mixer at the number of its layer."""
        paths = {module: path for path, module in model.named_modules()}
        for path, module in model.named_modules():
            if isinstance(module, nn.ModuleList) and all(
                f"{paths[part]}.".startswith(f"{path}.{layer}.") for part, layer in (*attention.items(), *mixers.items())
            ):
                return Stack(list(module), {layer: part for part, layer in attention.items()}, mixers)
        return None

    @contextmanager
    def recorded(self, recording: Recording, layers: Collection[int], heads: Collection[int]) -> Iterator[None]:
        """While open, one untouched reading is recorded: the outputs of these layers, and what these layers' heads say."""
        with ExitStack() as stack:
            for layer in layers:
                stack.callback(self.layers[layer].register_forward_hook(_keep_output(recording, layer)).remove)
            for layer in heads:
                stack.enter_context(_listening(recording, layer, self.attention[layer]))
            yield

    def fed(self, entry: Entry) -> slice:
        """The tokens that the model must be fed: where it is entered behind the last heads, the last one alone."""
        return slice(-1, None) if entry.last_only and entry.after_heads and entry.layer == self.top else slice(None)

    @contextmanager
    def entered(self, entry: Entry) -> Iterator[None]:
        """While open, the model runs from the entry's layer on."""
        tokens = self.fed(entry)
        with ExitStack() as stack:
            if entry.last_only:
                for module in self._wordwise(self.layers[self.top]):
                    stack.enter_context(_replaced(module, _of_last_token(module.forward)))
            if entry.layer:
                below = entry.recording.output(entry.layer - 1, entry.rows, tokens)
                for module in self.layers[: entry.layer]:
                    stack.enter_context(_replaced(module, lambda *args, **kwargs: below))
            if entry.after_heads:
                stack.enter_context(_replaced(self.attention[entry.layer], _silencing(entry, tokens)))
            yield

    def _wordwise(self, layer: nn.Module) -> Iterator[nn.Module]:
        """The parts of a layer beside its attention and its mixer that hold matrices: feed-forward maps and experts."""
        for part in layer.children():
            inside = set(part.modules())
            if not inside & self._mixing and any(p.dim() > 1 for p in part.parameters()):
                yield part
            elif inside & self._mixing and part not in self._mixing:
                yield from self._wordwise(part)


def _keep_output(recording: Recording, layer: int) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        if layer in recording.outputs:
            raise CannotEnter(f"layer {layer} runs more than once")
        recording.outputs[layer] = output

    return hook


@contextmanager
def _listening(recording: Recording, layer: int, attention: nn.Module) -> Iterator[None]:
    """Note what the last linear map of an attention module is given, if the module returns what that map makes of it."""
    last: list[tuple[nn.Module, Tensor, Tensor]] = []

    def projected(module: nn.Module, args: Any, output: Any) -> None:
        last[:] = [(module, args[0], output)]

    def finished(module: nn.Module, args: Any, output: Any) -> None:
        first, others = (output[0], output[1:]) if isinstance(output, tuple) else (output, ())
        if layer in recording.said:
            raise CannotEnter(f"the attention of layer {layer} runs more than once")
        same = bool(last) and last[0][2].data_ptr() == first.data_ptr() and last[0][2].shape == first.shape
        if same and all(other is None for other in others):
            recording.said[layer] = Said(last[0][1], last[0][0], not isinstance(output, tuple), others)

    with ExitStack() as stack:
        for module in attention.modules():
            if isinstance(module, nn.Linear):
                stack.callback(module.register_forward_hook(projected).remove)
        stack.callback(attention.register_forward_hook(finished).remove)
        yield


def _silencing(entry: Entry, fed: slice) -> Callable[..., Any]:
    """In place of an attention module: its heads' recorded words, some of them silenced, go to its output projection."""
    said, layer, rows = entry.recording.said[entry.layer], entry.layer, entry.rows
    scores = {name: values[rows] for name, values in entry.recording.scores.get(layer, {}).items()}

    def forward(*args: Any, **kwargs: Any) -> Any:
        now = get_current()
        assert now is not None
        edits, tokens = now.edits[layer], said.heads.shape[1]
        positions = torch.arange(tokens, device=rows.device).expand(len(rows), -1)
        off = edits.switched_off(layer, positions, entry.heads, scores)
        assert off is not None
        heads = said.heads[:, fed].index_select(0, rows.to(said.heads.device))
        heads.view(*heads.shape[:2], entry.heads, -1).masked_fill_(off[:, fed, :, None], 0.0)
        # Counted for all tokens: what is not fed was silenced by never being read again.
        now.tally.add(layer, now.phase, "positions", now.slots, tokens)
        now.tally.add(layer, now.phase, "heads_zeroed", now.slots, off.sum((1, 2)))
        out = said.projection(heads)
        return out if said.alone else (out, *said.others)

    return forward


@contextmanager
def _replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Another forward for one module, which has none of its own besides its class's."""
    if "forward" in vars(module):
        raise CannotEnter(f"{type(module).__name__} has a forward of its own already")
    vars(module)["forward"] = forward
    try:
        yield
    finally:
        del vars(module)["forward"]


def _of_last_token(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A map of each token by itself, computed for the last one; of the others, nothing will be read."""

    def last(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        output = forward(hidden[:, -1:], *args, **kwargs)
        first = output[0] if isinstance(output, tuple) else output
        whole = first.new_zeros(*hidden.shape[:2], *first.shape[2:])
        whole[:, -1:] = first
        return (whole, *output[1:]) if isinstance(output, tuple) else whole

    return last


def _part_of(value: Any, rows: Tensor, tokens: slice, shape: torch.Size) -> Any:
    """These rows and tokens of everything that a layer returned for ids of this shape."""
    if isinstance(value, tuple):
        return tuple(_part_of(part, rows, tokens, shape) for part in value)
    if value is None:
        return None
    if not isinstance(value, Tensor) or value.shape[:2] != shape:
        raise CannotEnter("a layer returns something that is not a tensor with one entry for each row and token")
    return value[:, tokens].index_select(0, rows.to(value.device))
