"""Ablations of recurrent mixers by forward hooks.

A mixer runs unchanged on the whole batch; for rows with an ablation, its output is then replaced by that of a second call. Groups
of channels are zeroed at the input of the output projection, in both calls. No ablation depends on how a mixer computes:
- Without memory, each token is fed as a sequence of its own, with an empty cache.
- Without the convolution's past, the weights of all taps but the last one are zero.
- Without carried state, each token is fed as a sequence of its own, with the convolution window that it would have had. The
  windows are collected in a first call: a single token leaves its own convolution input in an empty window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import reduce
from itertools import zip_longest
from operator import or_
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from needlework.interventions import acts
from needlework.interventions.acts import Act
from needlework.model.attention import Forward, get_current
from needlework.model.edits import are_marked, mark_positions, select_rows
from needlework.model.memory import Memory, Mixer, holder
from needlework.model.probe import first, replace_first
from needlework.model.scans import ConvolutionCall, ScanCall, intercepted


@dataclass
class Sources:
    """Source tokens that each row blocks, by absolute position."""

    to: Tensor  # the blocked sources, of `mark_positions`
    only: Tensor  # what they are blocked for: [rows, groups], or later tokens, of `mark_positions`

    def taps(self, positions: Tensor, taps: int) -> Tensor:
        """Return which lags are blocked for the tokens at these positions [rows, n]: [rows, n, taps]."""
        lags = torch.arange(taps, device=positions.device)
        sources = (positions[..., None] - lags).flatten(1)
        later = are_marked(self.only, positions)
        marked: Tensor = are_marked(self.to, sources).view(*positions.shape, taps) & later[..., None] & (lags > 0)
        return marked


M = TypeVar("M", bound=Tensor | tuple[Any, ...] | None)


@dataclass
class MixerEdits:
    """Edits of one recurrent mixer in one phase, as boolean masks; None if no row needs it."""

    memory: Tensor | None = None  # [rows] no memory: neither state nor convolution window is carried
    conv: Tensor | None = None  # [rows] the convolution sees no earlier tokens
    state: Tensor | None = None  # [rows] the state is not carried
    silenced: Tensor | None = None  # [rows, groups] groups of channels to zero
    sources: tuple[Sources, ...] | None = None  # contributions through the state to block: what any of them names
    taps: tuple[Sources, ...] | None = None  # contributions through the convolution to block

    @property
    def idle(self) -> bool:
        return all(marked is None for marked in vars(self).values())

    def select(self, rows: Tensor) -> MixerEdits:
        """Return the edits of the given rows, in this order."""
        return MixerEdits(*map(_none_if_empty, vars(select_rows(self, rows)).values()))

    def replaced(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return disjoint masks [rows] of rows without any memory, without convolution only, and without state only."""
        alone, convolution, state = self.memory, self.conv, self.state
        if convolution is not None and state is not None:  # a row that loses both has no memory at all
            both = convolution & state
            alone = both if alone is None else alone | both
            convolution, state = convolution & ~both, state & ~both
        return _none_if_empty(alone), _none_if_empty(convolution), _none_if_empty(state)


def _none_if_empty(marked: M) -> M | None:
    """Return masks as they are, or None if they mark nothing."""
    masks: Any = [each.to for each in marked] if isinstance(marked, tuple) else [marked]
    return marked if any(mask is not None and bool(mask.any()) for mask in masks) else None


def compile_mixer(rows: Sequence[Sequence[Act]], groups: int, device: torch.device) -> MixerEdits:
    """Compile the acts of all rows on one mixer with `groups` groups of channels."""

    def cut(site: str) -> Tensor | None:
        cuts = [any(isinstance(act, acts.CutMemory) and act.site == site for act in row) for row in rows]
        return _none_if_empty(torch.tensor(cuts, device=device))

    silenced = torch.zeros(len(rows), groups, dtype=torch.bool)
    for i, row in enumerate(rows):
        for act in row:
            if isinstance(act, acts.SilenceGroups):
                silenced[i, list(act.groups)] = True
    blocks = [[[act for act in row if isinstance(act, kind)] for row in rows] for kind in (acts.BlockSources, acts.BlockTaps)]
    return MixerEdits(
        cut("memory"),
        cut("conv"),
        cut("state"),
        _none_if_empty(silenced.to(device)),
        _none_if_empty(tuple(_sources(each, groups, device) for each in zip_longest(*blocks[0]))),
        _none_if_empty(tuple(_sources(each, groups, device) for each in zip_longest(*blocks[1]))),
    )


def _sources(rows: Sequence[Any], groups: int, device: torch.device) -> Sources:
    """Compile one BlockSources or BlockTaps of each row, or none."""
    to = mark_positions([(() if act is None else act.sources, None) for act in rows], device)
    if any(isinstance(act, acts.BlockTaps) for act in rows):
        queries = [None if act is None else act.queries for act in rows]  # None: all
        return Sources(to, mark_positions([((), 0) if named is None else (named, None) for named in queries], device))
    of_groups = [set(range(max(groups, 1))) if act is None or act.groups is None else act.groups for act in rows]
    only = [[group in named for group in range(max(groups, 1))] for named in of_groups]
    return Sources(to, torch.tensor(only, device=device))


@contextmanager
def replaced_value(holder: dict[str, Any], name: str, value: Any) -> Iterator[None]:
    """Replace an entry of a dict, such as an object's `vars`, while the context is open."""
    before = holder[name]
    holder[name] = value
    try:
        yield
    finally:
        holder[name] = before


@contextmanager
def hooked(mixers: Sequence[Mixer], memory: Memory, empty: Callable[[Mixer, int], Memory]) -> Iterator[None]:
    """Register hooks that apply the current forward's edits to mixers; remove them on exit.

    `memory` is that of this forward; `empty` returns an empty one for one mixer and a number of rows.
    """
    with ExitStack() as stack:
        found = [edits for mixer in mixers if (edits := _current_edits(mixer)[1])]
        if any(edits.sources is not None or edits.taps is not None for edits in found):
            stack.enter_context(intercepted(mixers, _kept_values, _blocked_taps))
        for mixer in mixers:
            acting = _MixerHooks(mixer, memory, empty)
            stack.callback(mixer.module.register_forward_pre_hook(acting.enter).remove)
            stack.callback(mixer.module.register_forward_hook(acting.leave, with_kwargs=True).remove)
            if mixer.output is not None:
                stack.callback(mixer.output.register_forward_pre_hook(acting.zero_groups_hook).remove)
        yield


def _current_edits(mixer: Mixer) -> tuple[Forward | None, MixerEdits | None]:
    """Return the current forward, on the mixer's device, and what it does to the mixer."""
    forward = get_current()
    return (None, None) if forward is None else (forward.on(mixer.device), forward.mixers.get(mixer.layer))


def _kept_values(mixer: Mixer, call: ScanCall) -> Tensor | None:
    """Return which values of a scan are kept [rows, tokens, channels]; None: all. Count the tokens that lose some."""
    forward, edits = _current_edits(mixer)
    if forward is None or edits is None or edits.sources is None:
        return None
    blocked = [are_marked(each.to, forward.positions) for each in edits.sources]
    here = slice(call.offset, call.offset + call.values.shape[-1])
    width = getattr(mixer.output, "in_features", 0) or here.stop
    lost = call.values.new_zeros(call.values.shape, dtype=torch.bool)
    for each, of_tokens in zip(edits.sources, blocked, strict=True):
        lost |= of_tokens[..., None] & each.only.repeat_interleave(width // each.only.shape[1], 1)[:, None, here]
    if here.start == 0:  # of a mixer that calls its scan once per head, the first call counts
        tokens = reduce(or_, blocked).sum(1)
        forward.tally.add(mixer.layer, forward.phase, "writes_blocked", forward.slots, tokens)
    return ~lost if bool(lost.any()) else None


def _blocked_taps(mixer: Mixer, call: ConvolutionCall) -> Tensor | None:
    """Return which lags of a convolution are left out [rows, tokens, taps]; None: none. Count them."""
    forward, edits = _current_edits(mixer)
    if forward is None or edits is None or edits.taps is None:
        return None
    marked: Tensor = reduce(or_, [each.taps(forward.positions, call.weight.shape[-1]) for each in edits.taps])
    if not bool(marked.any()):
        return None
    forward.tally.add(mixer.layer, forward.phase, "taps_blocked", forward.slots, marked.sum((1, 2)))
    return marked


class _MixerHooks:
    """The hooks that apply one mixer's edits in one forward of the model."""

    def __init__(self, mixer: Mixer, memory: Memory, empty: Callable[[Mixer, int], Memory]) -> None:
        self.mixer, self.memory, self.empty = mixer, memory, empty
        self.before: dict[str, Memory] = {}  # copies of states before the mixer ran, by ablation
        self.chosen: Tensor | None = None  # rows of the batch in the running call; None: all rows
        self.output_used = True  # whether the running call's output is used; if not, nothing is zeroed or counted

    def enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Copy the states that a second call starts from (forward pre-hook of the mixer)."""
        _, edits = _current_edits(self.mixer)
        if edits is not None:
            for name, rows in zip(("convolution", "state"), edits.replaced()[1:], strict=True):
                if rows is not None and self.mixer.convolution is not None:
                    self.before[name] = self.memory.of_layer(self.mixer.cache_layer, rows.nonzero()[:, 0])

    def leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Replace the output of ablated rows, and count them (forward hook of the mixer)."""
        forward, edits = _current_edits(self.mixer)
        if forward is None or edits is None:
            return None
        rows, tokens = forward.positions.shape
        call = Call(module, args, kwargs, rows, tokens)
        for marked, replace in zip(edits.replaced(), (self._alone, self._no_convolution, self._no_state), strict=True):
            if marked is not None:
                hidden = first(output).clone()
                hidden[marked] = replace(call, marked)
                output = replace_first(output, hidden)
        for site, count in acts.CUTS.items():
            if (marked := getattr(edits, site)) is not None:
                forward.tally.add(self.mixer.layer, forward.phase, count, forward.slots, marked.long() * tokens)
        return output

    def zero_groups_hook(self, projection: nn.Module, args: tuple[Any, ...]) -> Any:
        """Zero groups in the output projection's input [rows of this call, tokens, channels], and count them."""
        forward, edits = _current_edits(self.mixer)
        if forward is None or edits is None or edits.silenced is None or not self.output_used:
            return None
        channels, marked, slots = args[0], edits.silenced, forward.slots
        counted = marked
        if self.chosen is None:
            for replaced in edits.replaced():  # groups of these rows are counted in their second call
                counted = counted if replaced is None else counted & ~replaced[:, None]
        else:
            rows = self.chosen.repeat_interleave(channels.shape[0] // len(self.chosen))
            marked, slots = marked[rows], slots[rows]
            counted = marked
        forward.tally.add(self.mixer.layer, forward.phase, "groups_zeroed", slots, counted.sum(1) * channels.shape[1])
        zeroed = marked.repeat_interleave(channels.shape[-1] // marked.shape[1], 1)
        return (channels.masked_fill(zeroed[:, None], 0.0), *args[1:])

    def _alone(self, call: Call, marked: Tensor) -> Tensor:
        """Return the outputs of marked rows without any memory, and clear it for later forwards."""
        # A mixer that keeps its own state discards it when called without a cache.
        places = [holder(self.mixer.module, name) for name in self.mixer.state_names]
        kept = [getattr(*place) for place in places]
        chosen = marked.nonzero()[:, 0]
        with self._running(chosen):
            parts = [call.again(chosen, part, None, False, alone=True) for part in call.pieces(len(chosen))]
        for place, value in zip(places, kept, strict=True):
            setattr(*place, value)
        self.memory.clear([self.mixer.cache_layer], marked)
        return torch.cat(parts, 1)

    def _no_convolution(self, call: Call, marked: Tensor) -> Tensor:
        """Return the outputs of marked rows without the convolution's past; later forwards continue from the new states."""
        chosen, before, layer = marked.nonzero()[:, 0], self.before.pop("convolution"), self.mixer.cache_layer
        assert self.mixer.convolution is not None  # the intervention was checked
        last_tap = torch.zeros_like(self.mixer.convolution.weight)
        last_tap[..., -1] = self.mixer.convolution.weight[..., -1]
        other = replaced_value(self.mixer.convolution._parameters, "weight", nn.Parameter(last_tap, requires_grad=False))
        with self._running(chosen), before.mounted(), other:
            output = call.again(chosen, slice(0, call.tokens), before.cache, True, alone=False)
        new = {slot.name: slot.tensor for slot in before.states_of(layer, "state")}
        for slot in self.memory.states_of(layer, "state"):
            slot.put(slot.tensor.index_copy(0, chosen.to(slot.tensor.device), new[slot.name].to(slot.tensor.dtype)))
        self.memory.clear([layer], marked, "conv")
        return output

    def _no_state(self, call: Call, marked: Tensor) -> Tensor:
        """Return the outputs of marked rows without carried state; later forwards keep the convolution's window."""
        if self.mixer.convolution is None:
            return self._alone(call, marked)
        chosen, before, layer = marked.nonzero()[:, 0], self.before.pop("state"), self.mixer.cache_layer
        outputs = []
        # The convolution's past: [rows, channels, window]; none before the first token.
        past = [slot.tensor for slot in before.states_of(layer, "conv")]
        for part in call.pieces(len(chosen)):
            count = part.stop - part.start
            lone = self.empty(self.mixer, len(chosen) * count)
            with self._running(chosen, output_used=False), lone.mounted():
                call.again(chosen, part, lone.cache, True, alone=True)
            (window,) = lone.states_of(layer, "conv")
            _, channels, length = window.tensor.shape
            inputs = window.tensor[..., -1].reshape(len(chosen), count, channels).transpose(1, 2)
            line = torch.cat([past[0] if past else inputs.new_zeros(len(chosen), channels, length), inputs], -1)
            windows = line.unfold(-1, length, 1)[:, :, :count]  # [rows, channels, tokens, window]: inputs before each token
            window.put(windows.transpose(1, 2).reshape(-1, channels, length).contiguous())
            lone.clear([layer], torch.ones(lone.rows, dtype=torch.bool), "state")
            with self._running(chosen), lone.mounted():
                outputs.append(call.again(chosen, part, lone.cache, True, alone=True))
            past = [line[..., -length:]]
        self.memory.clear([layer], marked, "state")
        return torch.cat(outputs, 1)

    @contextmanager
    def _running(self, chosen: Tensor, output_used: bool = True) -> Iterator[None]:
        """Tell the hook of the output projection about a second call of the mixer while the context is open."""
        self.chosen, self.output_used = chosen, output_used
        try:
            yield
        finally:
            self.chosen, self.output_used = None, True


# --- a second call of a mixer, with less memory ---

_CACHES = frozenset({"cache_params", "past_key_values", "past_key_value", "cache"})
_TOKENS_AT_ONCE = 256  # over all rows; bounds memory, since mixers may pad each single-token sequence to a whole chunk


@dataclass(frozen=True)
class Call:
    """A recorded call of a mixer that can be repeated with some of its rows."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rows: int
    tokens: int

    def pieces(self, rows: int) -> Iterator[slice]:
        """Yield slices of the tokens such that `rows` rows have at most `_TOKENS_AT_ONCE` tokens in a slice."""
        at_once = max(1, _TOKENS_AT_ONCE // rows)
        return (slice(start, min(start + at_once, self.tokens)) for start in range(0, self.tokens, at_once))

    def again(self, chosen: Tensor, part: slice, cache: Any, use_cache: bool, alone: bool) -> Tensor:
        """Call the mixer again with some rows and tokens, and return its output [chosen rows, tokens of this part, ...].

        Args:
            cache: given in place of the original cache.
            alone: feed every token as a sequence of its own.
        """

        def of_part(value: Any) -> Any:
            """Select rows and tokens of [rows, tokens, ...]; return anything that is not per token unchanged."""
            if isinstance(value, (tuple, list)):
                return type(value)(of_part(item) for item in value)
            per_token = isinstance(value, Tensor) and value.dim() >= 2 and value.shape[1] == self.tokens
            if not per_token or value.shape[0] not in (1, self.rows):
                return value
            picked = value.expand(self.rows, *value.shape[1:])[chosen, part]
            return picked.reshape(picked.shape[0] * picked.shape[1], 1, *picked.shape[2:]) if alone else picked

        given = {**dict.fromkeys(_CACHES, cache), "attention_mask": None, "use_cache": use_cache}
        named = {key: given[key] if key in given else of_part(value) for key, value in self.kwargs.items()}
        caches = ("get_seq_length", "update_conv_state")  # methods that only caches have
        plain = [cache if any(hasattr(value, name) for name in caches) else of_part(value) for value in self.args]
        # On a CPU, a Mamba-2 mixer would pad single-token sequences to whole chunks. Libraries for other devices have minimum
        # chunk sizes.
        chunked = isinstance(vars(self.module).get("chunk_size"), int) and chosen.device.type == "cpu"
        with replaced_value(vars(self.module), "chunk_size", 1) if alone and chunked else nullcontext():
            out = first(self.module.forward(*plain, **named))
        return out.reshape(len(chosen), part.stop - part.start, *out.shape[2:])
