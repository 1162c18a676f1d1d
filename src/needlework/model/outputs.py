"""Zeroing, recording and patching of outputs: of heads, attention modules, recurrent mixers and whole layers, by batch row.

A recording holds what the sites of a model gave on one prompt; a patch puts it in place of what they give on another one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from needlework.errors import NeedleworkError, TrialError
from needlework.interventions.acts import Act, ChangeOutputs, DropOutputs, PatchOutputs, Place, RecordOutputs, Site

if TYPE_CHECKING:
    from needlework.model.attention import Forward

Where = tuple[Site, int]  # a site of a layer
OutputAct = ChangeOutputs | RecordOutputs | PatchOutputs


class Recording:
    """Outputs on one prompt, by site, layer and position; several at a position if the model calls a layer several times."""

    def __init__(self) -> None:
        self._blocks: dict[Where, list[tuple[int, Tensor]]] = defaultdict(list)  # position of the first token, and [tokens, ...]
        self._sorted: dict[Where, tuple[list[int], Tensor]] = {}  # positions, and outputs [positions, calls, ...]

    def add(self, site: Site, layer: int, first: int, outputs: Tensor) -> None:
        """Add outputs [tokens, ...] of consecutive tokens."""
        self._blocks[site, layer].append((first, outputs.clone()))
        self._sorted.pop((site, layer), None)

    def find(self, site: Site, layer: int, positions: Sequence[int], call: int = 0) -> Tensor:
        """Return the recorded outputs [positions, ...] of the layer's first call, or of a later one."""
        known, outputs = self._table((site, layer))
        places = [bisect_left(known, position) for position in positions]
        missing = [p for p, i in zip(positions, places, strict=True) if i == len(known) or known[i] != p]
        if missing:
            raise TrialError(f"the outputs of {site} in layer {layer} were not recorded at positions {missing[:5]}")
        return outputs[torch.tensor(places, device=outputs.device), call % outputs.shape[1]]

    def _table(self, where: Where) -> tuple[list[int], Tensor]:
        if where not in self._sorted:
            blocks = self._blocks.get(where)
            if not blocks:
                raise TrialError(f"no outputs of {where[0]} in layer {where[1]} were recorded")
            positions = [first + i for first, outputs in blocks for i in range(len(outputs))]
            order = sorted(range(len(positions)), key=positions.__getitem__)  # stable: calls stay in their order
            known = sorted(set(positions))
            outputs = torch.cat([outputs for _, outputs in blocks])
            table = outputs[torch.tensor(order, device=outputs.device)].view(len(known), -1, *outputs.shape[1:])
            self._sorted[where] = known, table
        return self._sorted[where]


class Edits(Protocol):
    """What is done to the outputs of one site of a layer."""

    def apply(self, forward: Forward, layer: int, outputs: Tensor, positions: Tensor) -> Tensor:
        """Return the outputs [rows, tokens, ...] of a call, changed; `positions` [rows, tokens] are those of the tokens."""
        ...


@dataclass
class OutputEdits:
    """What is zeroed, recorded and patched at one site of a layer."""

    acts: tuple[tuple[int, int, OutputAct], ...]  # (row, sample, act)
    dropped: Tensor | None = None  # [rows] whose outputs are zeroed, before they are recorded
    calls: Counter[int] = field(default_factory=Counter)  # calls of the module, by the position of the first row's first token

    def select(self, rows: Tensor) -> OutputEdits | None:
        """Return the edits of the given rows, in this order; None if there are none."""
        of_row: dict[int, list[tuple[int, OutputAct]]] = defaultdict(list)
        for row, sample, act in self.acts:
            of_row[row].append((sample, act))
        kept = tuple((new, *of_sample) for new, row in enumerate(rows.tolist()) for of_sample in of_row.get(row, ()))
        dropped = None if self.dropped is None else self.dropped[rows.to(self.dropped.device)]
        return OutputEdits(kept, dropped) if kept or (dropped is not None and bool(dropped.any())) else None

    def apply(self, forward: Forward, layer: int, outputs: Tensor, positions: Tensor) -> Tensor:
        """Zero, change, record and replace outputs [rows, tokens, ...] at `positions` [rows, tokens], and count all."""
        tokens = positions.shape[1]
        if self.dropped is not None:
            dropped = self.dropped.to(outputs.device)
            forward.tally.add(layer, forward.phase, "blocks_dropped", forward.slots, dropped.long() * tokens)
            outputs = outputs.masked_fill(dropped.view(-1, *[1] * (outputs.dim() - 1)), 0.0)
        if not self.acts:
            return outputs
        starts = positions[:, 0].tolist()
        call = self.calls[starts[0]]
        self.calls[starts[0]] += 1
        if any(not isinstance(act, RecordOutputs) for *_, act in self.acts):
            outputs = outputs.clone()
        for row, sample, act in self.acts:
            slot, start = forward.slots[row : row + 1], starts[row]
            if isinstance(act, ChangeOutputs):
                place = Place(layer, forward.phase, positions[row], sample)
                outputs[row] = require_shape(act.function(outputs[row], place), outputs.shape[1:], "ChangeOutputs")
                forward.tally.add(layer, forward.phase, act.count, slot, tokens)
                continue
            if isinstance(act, RecordOutputs):
                act.into.add(act.site, layer, start, outputs[row])
                forward.tally.add(layer, forward.phase, act.count, slot, tokens)
                continue
            own = act.tokens.own
            some = slice(bisect_left(own, start), bisect_left(own, start + tokens))
            if some.start == some.stop:
                continue
            queries = torch.tensor(own[some], device=outputs.device) - start
            new = act.source.find(act.site, layer, act.tokens.source[some], call).to(outputs.device, outputs.dtype)
            if act.heads is None:
                outputs[row, queries] = new
            else:
                heads = torch.tensor(sorted(act.heads), device=outputs.device)
                outputs[row, queries[:, None], heads] = new[:, heads]
            forward.tally.add(layer, forward.phase, act.count, slot, len(queries) * (len(act.heads) if act.heads else 1))
        return outputs


@dataclass(frozen=True)
class Replacement:
    """Puts given tensors in place of the outputs of one site of a layer."""

    outputs: Tensor  # [rows, tokens, ...]

    def apply(self, forward: Forward, layer: int, outputs: Tensor, positions: Tensor) -> Tensor:
        return self.outputs.to(outputs.device, outputs.dtype)


@dataclass(frozen=True)
class ShownOutputs:
    """Shows the outputs of one site of a layer to the observer, and leaves them as they are."""

    site: Site

    def apply(self, forward: Forward, layer: int, outputs: Tensor, positions: Tensor) -> Tensor:
        assert forward.observer is not None
        forward.observer.see_outputs(forward, self.site, layer, outputs)
        return outputs


def compile_outputs(rows: Sequence[Sequence[Act]], samples: Sequence[int]) -> dict[Where, OutputEdits]:
    """Compile what is done to outputs of all rows, by site and layer; functions of users come first."""
    found: dict[Where, list[tuple[int, int, OutputAct]]] = defaultdict(list)
    dropped: dict[Where, Tensor] = {}
    for row, acts in enumerate(rows):
        for act in acts:
            if isinstance(act, (ChangeOutputs, RecordOutputs, PatchOutputs)):
                found[act.site, act.layer].append((row, samples[row], act))
            elif isinstance(act, DropOutputs):
                dropped.setdefault((act.site, act.layer), torch.zeros(len(rows), dtype=torch.bool))[row] = True
    for some in found.values():
        some.sort(key=lambda entry: not isinstance(entry[2], ChangeOutputs))
    return {where: OutputEdits(tuple(found[where]), dropped.get(where)) for where in {**found, **dropped}}


def require_shape(values: Any, shape: Sequence[int], name: str) -> Tensor:
    """Return the result of a user's function, or raise an error if it is not a tensor of the right shape."""
    if not isinstance(values, Tensor) or values.shape != shape:
        given = list(values.shape) if isinstance(values, Tensor) else repr(values)
        axes = "[queries, heads, dim]" if name == "ChangeOutputs" else "[rows, heads, queries]"
        raise NeedleworkError(f"the function of {name} must return {axes} = {list(shape)}, not {given}")
    return values


@contextmanager
def outputs_hooked(
    edits: Sequence[tuple[Where, Edits]], modules: Callable[[Where], nn.Module], current: Callable[[], Forward | None]
) -> Iterator[None]:
    """Apply edits to what modules return, in this order, by forward hooks; those of heads are applied by attention itself.

    The site of layer -1 is what enters the first layer, which is shown and cannot be edited.
    """

    def hook_of(layer: int, edit: Edits) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            forward = current()
            if forward is None:
                return None
            hidden: Tensor = output[0] if isinstance(output, tuple) else output
            forward = forward.on(hidden.device)
            if hidden.shape[:2] != forward.positions.shape:
                raise TrialError(f"the output of {type(module).__name__} in layer {layer} is not [rows, tokens, ...]")
            changed = edit.apply(forward, layer, hidden, forward.positions)
            return (changed, *output[1:]) if isinstance(output, tuple) else changed

        return hook

    with ExitStack() as stack:
        for (site, layer), edit in edits:
            hook = hook_of(layer, edit)
            if layer < 0:

                def enter(module: nn.Module, args: Any, named: Mapping[str, Any], hook: Callable[..., Any] = hook) -> None:
                    hook(module, args, args[0] if args else named["hidden_states"])

                stack.callback(modules((site, 0)).register_forward_pre_hook(enter, with_kwargs=True).remove)
            elif site != "heads":
                stack.callback(modules((site, layer)).register_forward_hook(hook).remove)
        yield
