"""Hooks for what the attention function cannot reach: recurrent mixers, and whole attention modules.

A mixer runs as ever on the whole batch; what it says to rows that ask for less memory is replaced (`model/cuts.py`), and
groups are silenced where its output projection reads them, in that call and in those that replace it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from needlework.interventions import acts
from needlework.interventions.acts import Act
from needlework.model.attention import Forward, get_current
from needlework.model.cuts import Call, each_token_alone, first, without_convolution, without_state
from needlework.model.memory import Memory

_CUTS = {"cut": "states_cut", "convolution": "convolutions_cut", "state": "carries_cut"}  # edit -> count in the receipt


@dataclass
class MixerEdits:
    """What happens to one recurrent mixer in this phase, row by row; None where no row asks for it."""

    cut: Tensor | None = None  # [rows]
    convolution: Tensor | None = None  # [rows]
    state: Tensor | None = None  # [rows]
    dropped: Tensor | None = None  # [rows]
    silenced: Tensor | None = None  # [rows, groups]

    @property
    def idle(self) -> bool:
        return all(getattr(self, field.name) is None for field in fields(self))

    def select(self, rows: Tensor) -> MixerEdits:
        marked = [None if x is None else x[rows] for x in (getattr(self, field.name) for field in fields(self))]
        return MixerEdits(*(x if x is not None and bool(x.any()) else None for x in marked))

    def replaced(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Rows [rows] that see each token alone, that lose their convolution only, and their state only; each row in one."""
        alone, convolution, state = self.cut, self.convolution, self.state
        if convolution is not None and state is not None:  # a row without both has no memory at all
            both = convolution & state
            alone = both if alone is None else alone | both
            convolution, state = convolution & ~both, state & ~both
        return tuple(x if x is not None and bool(x.any()) else None for x in (alone, convolution, state))  # type: ignore[return-value]


def compile_mixer(rows: Sequence[Sequence[Act]], groups: int, device: torch.device) -> MixerEdits:
    def rows_with(kind: type[Act]) -> Tensor | None:
        marked = [any(isinstance(act, kind) for act in row) for row in rows]
        return torch.tensor(marked, device=device) if any(marked) else None

    silenced = torch.zeros(len(rows), groups, dtype=torch.bool)
    for i, row in enumerate(rows):
        for act in row:
            if isinstance(act, acts.SilenceGroups):
                silenced[i, list(act.groups)] = True
    return MixerEdits(
        rows_with(acts.CutMemory),
        rows_with(acts.CutConvolution),
        rows_with(acts.CutState),
        rows_with(acts.DropRecurrent),
        silenced.to(device) if bool(silenced.any()) else None,
    )


@dataclass(frozen=True)
class Mixer:
    """A recurrent mixer of the model and where its state lies."""

    layer: int
    module: nn.Module
    cache_layer: int
    state_names: tuple[str, ...] = ()  # attributes that hold its state, where it is not in the cache
    groups: int = 0
    output: nn.Module | None = None  # the linear map that its groups enter
    convolution: nn.Conv1d | None = None


@contextmanager
def hooked(
    mixers: Sequence[Mixer], attention: dict[nn.Module, int], memory: Memory, empty: Callable[[Mixer, int], Memory]
) -> Iterator[None]:
    """Let the current forward's edits act on mixers and attention blocks; every hook is gone on exit."""
    with ExitStack() as stack:
        for mixer in mixers:
            acting = _Acting(mixer, memory, empty)
            stack.callback(mixer.module.register_forward_pre_hook(acting.enter).remove)
            stack.callback(mixer.module.register_forward_hook(acting.leave, with_kwargs=True).remove)
            if mixer.output is not None:
                stack.callback(mixer.output.register_forward_pre_hook(acting.speak).remove)
        for module, layer in attention.items():
            stack.callback(module.register_forward_hook(_block_hook(layer)).remove)
        yield


class _Acting:
    """The edits of one mixer in one forward of the model."""

    def __init__(self, mixer: Mixer, memory: Memory, empty: Callable[[Mixer, int], Memory]) -> None:
        self.mixer, self.memory, self.empty = mixer, memory, empty
        self.before: dict[str, Memory] = {}  # states of rows as they were before the mixer ran
        self.chosen: Tensor | None = None  # rows of the batch that the running call is about; None: all of them
        self.heard = True  # what the running call says is used

    def _edits(self) -> tuple[Forward | None, MixerEdits | None]:
        forward = get_current()
        return forward, forward.mixers.get(self.mixer.layer) if forward is not None else None

    def enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        _, edits = self._edits()
        if edits is not None:
            _, convolution, state = edits.replaced()
            for name, rows in (("convolution", convolution), ("state", state)):
                if rows is not None and self.mixer.convolution is not None:
                    self.before[name] = self.memory.of_layer(self.mixer.cache_layer, rows.nonzero()[:, 0])

    def leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        forward, edits = self._edits()
        if forward is None or edits is None:
            return None
        rows, tokens = forward.positions.shape
        call = Call(module, args, kwargs, rows, tokens)
        for marked, replace in zip(edits.replaced(), (self._alone, self._no_convolution, self._no_state), strict=True):
            if marked is not None:
                output = _with_rows(output, marked, replace(call, marked))
        for name, count in _CUTS.items():
            if (marked := getattr(edits, name)) is not None:
                forward.tally.add(self.mixer.layer, forward.phase, count, forward.slots, marked.long() * tokens)
        if edits.dropped is not None:
            output = _without_rows(output, edits.dropped)
            amount = edits.dropped.long() * tokens
            forward.tally.add(self.mixer.layer, forward.phase, "blocks_dropped", forward.slots, amount)
        return output

    def speak(self, projection: nn.Module, args: tuple[Any, ...]) -> Any:
        """What the output projection reads, without the silenced groups: [rows of this call, tokens, channels]."""
        forward, edits = self._edits()
        if forward is None or edits is None or edits.silenced is None or not self.heard:
            return None
        said, marked, slots = args[0], edits.silenced, forward.slots
        counted = marked
        if self.chosen is None:
            for replaced in edits.replaced():  # their groups are counted in the call that replaces this one
                counted = counted if replaced is None else counted & ~replaced[:, None]
        else:
            rows = self.chosen.repeat_interleave(said.shape[0] // len(self.chosen))
            marked, slots = marked[rows], slots[rows]
            counted = marked
        forward.tally.add(self.mixer.layer, forward.phase, "groups_zeroed", slots, counted.sum(1) * said.shape[1])
        channels = marked.repeat_interleave(said.shape[-1] // marked.shape[1], 1)
        return (said.masked_fill(channels[:, None], 0.0), *args[1:])

    def _alone(self, call: Call, marked: Tensor) -> Tensor:
        chosen = marked.nonzero()[:, 0]
        with self._about(chosen), self._module_states_kept():
            said = each_token_alone(call, chosen)
        self.memory.clear([self.mixer.cache_layer], marked)
        return said

    def _no_convolution(self, call: Call, marked: Tensor) -> Tensor:
        chosen, before, layer = marked.nonzero()[:, 0], self.before.pop("convolution"), self.mixer.cache_layer
        assert self.mixer.convolution is not None  # the intervention was checked
        with self._about(chosen):
            said = without_convolution(call, chosen, before, self.mixer.convolution)
        self.memory.take_states(layer, chosen, before)
        self.memory.clear([layer], marked, "conv")
        return said

    def _no_state(self, call: Call, marked: Tensor) -> Tensor:
        if self.mixer.convolution is None:
            return self._alone(call, marked)
        chosen, before, layer = marked.nonzero()[:, 0], self.before.pop("state"), self.mixer.cache_layer
        with self._about(chosen):
            said = without_state(call, chosen, before, layer, lambda rows: self.empty(self.mixer, rows), self._unheard)
        self.memory.clear([layer], marked, "state")
        return said

    @contextmanager
    def _about(self, chosen: Tensor) -> Iterator[None]:
        self.chosen = chosen
        try:
            yield
        finally:
            self.chosen = None

    @contextmanager
    def _unheard(self) -> Iterator[None]:
        self.heard = False
        try:
            yield
        finally:
            self.heard = True

    @contextmanager
    def _module_states_kept(self) -> Iterator[None]:
        """A mixer that keeps its state on itself forgets it when it is called without a cache."""
        places = [holder(self.mixer.module, name) for name in self.mixer.state_names]
        kept = [getattr(*place) for place in places]
        yield
        for place, value in zip(places, kept, strict=True):
            setattr(*place, value)


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


def _with_rows(output: Any, rows: Tensor, other: Tensor) -> Any:
    """The module's output with the marked rows replaced by `other`, which holds these rows and no more."""
    hidden = first(output).clone()
    hidden[rows] = other
    return (hidden, *output[1:]) if isinstance(output, tuple) else hidden


def _without_rows(output: Any, rows: Tensor) -> Any:
    """The module's output with the marked rows zeroed."""
    hidden = first(output)
    new = hidden.masked_fill(rows.view(-1, *[1] * (hidden.dim() - 1)), 0.0)
    return (new, *output[1:]) if isinstance(output, tuple) else new


def holder(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The submodule that has a state, and the name of the state there."""
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path), leaf
