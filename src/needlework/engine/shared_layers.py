"""Sharing of lower layers: prefills of one prompt under different acts share the layers below their first act.

An unmodified prefill of the prompt is recorded, and every other one enters the model at the layer where its own acts begin: the
layers below return their recorded outputs, and the rest of the model, masks and positions included, runs unchanged. In the
topmost layer that mixes tokens, the next token needs only the keys of all tokens and the output of the last one.

An entry point is used only after a check that it gives the same logits, cache and receipts as a full prefill; a model that is not
a plain stack of layers is always prefilled from its first layer.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from needlework.engine.budget import Prefill, PrefillResult, forward_overhead, is_observed, split_rows, try_proof
from needlework.interventions.acts import RANDOM, Act, ClearState, DropOutputs, KeepBest, SilenceHeads
from needlework.model.attention import get_current
from needlework.model.edits import keeps_from_sdpa
from needlework.model.hooked_model import HookedModel, Rows
from needlework.model.memory import Memory
from needlework.model.probe import first, replace_first
from needlework.receipts import Receipt, Tally
from needlework.requests import Prepared

_PROOF_TOKENS = 12
_PROOF_FORWARDS, _PROOF_COST = 5, 100  # cost of a check: forwards, and the tokens fed to them
_PROOF_ROWS = (1, 0, 1)  # rows of two prompts: reordered, and one of them twice
_HEADS = 0.4  # share of a layer's compute that comes before its head outputs are known


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


class SharedLayers:
    """Prefills prompts that several requests act on, each from the layer where its own acts begin."""

    def __init__(self, body: HookedModel) -> None:
        self.body = body
        self._proven: dict[EntryPoint, bool] = {}
        self.tokens_computed = 0.0  # prefilled tokens, each weighted by the share of the model that was computed for it

    @cached_property
    def _stack(self) -> Stack | None:
        return None if self.body.layers is None else Stack(self.body.layers, self.body)

    def entry_point(self, item: Prepared) -> EntryPoint | None:
        """Return the best entry point that passes its check, or None for a full prefill. Needs an open session."""
        return next((entry for entry in self._entry_points(item) if self.proven(entry)), None)

    def _entry_points(self, item: Prepared) -> list[EntryPoint]:
        """Return the candidate entry points for a request's acts, best first."""
        acts = item.acts["prefill"]
        if self._stack is None or not acts or any(isinstance(act, ClearState) for act in acts):
            return []  # a state is cleared between forwards, so the prompt is not one forward
        layer = min(act.layer for act in acts)
        here = [act for act in acts if act.layer == layer]
        silences = all(isinstance(act, KeepBest) or (isinstance(act, SilenceHeads) and not act.means) for act in here)
        after = [True] * silences + [False] * (layer > 0)
        shortcuts = (True, False) if self._stack.lone_top else (False,)
        scored = next(((act.by, act.sinks) for act in here if isinstance(act, KeepBest)), None)
        return [EntryPoint(layer, heads, last_only, scored if heads else None) for heads in after for last_only in shortcuts]

    def proven(self, entry: EntryPoint) -> bool:
        """Return whether entering there gives the same result as a full prefill. Checked once; needs an open session."""
        if entry not in self._proven and (passed := try_proof(self.body, lambda: self._prove(entry))) is not None:
            self._proven[entry] = passed
        return self._proven.get(entry, False)

    def worthwhile(self, prefills: Sequence[Prefill], chunk: int = 0) -> dict[int, float]:
        """Return the prefills for which sharing layers saves compute: index -> share of the model's compute that it saves.

        Prefills without acts save all of it, since the recording that the others need is their own prefill. Prefills of more
        than `chunk` tokens are not shared (0: no limit).
        """
        prompts: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for i, prefill in enumerate(prefills):
            if not chunk or len(prefill.tokens) <= chunk:  # longer recordings take much memory
                prompts[prefill.tokens].append(i)
        shared = [i for members in prompts.values() if len(members) > 1 for i in members]
        if not shared or self._stack is None or is_observed(self.body):  # an observer must see each layer once per row
            return {}
        hoped = {i: next(iter(self._entry_points(prefills[i].item)), None) for i in shared}
        if not self._gain(prefills, prompts, hoped):  # no gain even if all entry points pass: skip the checks
            return {}
        return self._gain(prefills, prompts, {i: self.entry_point(prefills[i].item) for i in shared})

    def _gain(
        self,
        prefills: Sequence[Prefill],
        prompts: Mapping[tuple[int, ...], Sequence[int]],
        entries: Mapping[int, EntryPoint | None],
    ) -> dict[int, float]:
        """Return the share of compute saved per prefill; empty if the extra forwards and checks would cost more."""
        chosen: dict[int, float] = {}
        saved, used, layers = 0.0, set(), len(self.body.anatomy.layers)
        for tokens, members in prompts.items():
            entering = {i: entry for i in members if (entry := entries.get(i))}
            untouched = [i for i in members if not prefills[i].item.acts["prefill"]]
            recordings = max(1, len({entry.scored for entry in entering.values() if not entry.layer}))
            gain = sum(entry.share(layers) for entry in entering.values()) - (recordings - bool(untouched))
            if gain > 0:
                chosen |= {i: entry.share(layers) for i, entry in entering.items()} | dict.fromkeys(untouched, 1.0)
                used |= set(entering.values())
                saved += gain * len(tokens)
        untried = sum(entry not in self._proven for entry in used)
        costs = forward_overhead(self.body) * (len(used) + _PROOF_FORWARDS * untried) + _PROOF_COST * untried
        return chosen if saved > costs else {}

    def run(self, prefills: Mapping[int, Prefill], remember: bool) -> Iterator[tuple[list[int], PrefillResult]]:
        """Run prefills of one length and yield (their indices, results), some at a time.

        The prefills of a few prompts start from one recording for each kind of head score.
        """
        prompts: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for i, prefill in prefills.items():
            prompts[prefill.tokens].append(i)
        for some in split_rows(list(prompts), len(next(iter(prompts))), self.body):
            place = {i: p for p, tokens in enumerate(some) for i in prompts[tokens]}
            groups = self._by_entry_point({i: prefills[i].item for i in place})
            kinds: list[tuple[str, int] | None] = list({entry.scored for entry in groups if entry and entry.scored}) or [None]
            for kind in kinds:
                served = [
                    entry for entry in groups if (entry.scored if entry else None) in (kind, None if kind == kinds[0] else kind)
                ]
                recording = self._record(torch.tensor(some, device=self.body.device), [entry for entry in served if entry])
                self.tokens_computed += recording.ids.numel()
                for entry in served:
                    members = sorted(groups[entry], key=lambda i: keeps_from_sdpa(prefills[i].item.acts["prefill"]))
                    for part in split_rows(members, recording.ids.shape[1], self.body):
                        rows = torch.tensor([place[i] for i in part], device=self.body.device)
                        yield part, self._read_part(entry, recording, rows, [prefills[i].item for i in part], remember)

    def _read_part(
        self, entry: EntryPoint | None, recording: PrefillRecording, rows: Tensor, items: Sequence[Prepared], remember: bool
    ) -> PrefillResult:
        """Run a few prefills that enter the model at one point; the recording is the prefill of those without acts."""
        if entry is None:
            memory = recording.memory.select(rows) if remember else None
            return PrefillResult(memory, recording.logits[rows], [recording.receipts[row] for row in rows.tolist()])
        self.tokens_computed += len(items) * recording.ids.shape[1] * (1 - entry.share(len(self.body.anatomy.layers)))
        acts, samples = [item.acts["prefill"] for item in items], [item.sample for item in items]
        return self._enter(entry, recording, rows, acts, samples, remember)

    def _by_entry_point(self, items: Mapping[int, Prepared]) -> dict[EntryPoint | None, list[int]]:
        """Group prefills by entry point; None for prefills without acts.

        A recording holds one kind of head score, so prefills by rarer scores enter before the heads where they can.
        """
        entries = {i: self.entry_point(item) for i, item in items.items()}
        common = Counter(entry.scored for entry in entries.values() if entry and entry.scored).most_common(1)
        groups: dict[EntryPoint | None, list[int]] = defaultdict(list)
        for i, entry in entries.items():
            if entry and entry.scored and entry.scored != common[0][0]:
                entry = next((d for d in self._entry_points(items[i]) if not d.scored and self.proven(d)), entry)
            groups[entry].append(i)
        return groups

    def _compile(self, acts: Sequence[Sequence[Act]], samples: Sequence[int]) -> Rows:
        rows = self.body.compile(acts, samples, "prefill")
        if any(edits.needs_probabilities for edits in rows.attention.values()):
            self.body.check_own_maths()  # it runs the model, which must not happen while it records or starts in the middle
        return rows

    def _record(self, ids: Tensor, entries: Sequence[EntryPoint]) -> PrefillRecording:
        """Prefill prompts [rows, tokens] without acts, and record what these entry points need."""
        assert self._stack is not None
        body, count = self.body, len(ids)
        recording, tally = PrefillRecording(ids, body.new_memory(count)), Tally(count)
        notes = {(entry.layer, *entry.scored) for entry in entries if entry.scored and entry.scored[0] != RANDOM}
        all_kept = [
            KeepBest(layer, body.anatomy.attention(layer).query_heads, by, sinks=sinks) for layer, by, sinks in notes
        ]  # keeps every head: only the scores are recorded
        rows = self._compile([all_kept] * count, [0] * count)
        scores: dict[int, list[Mapping[str, Tensor]]] = {}
        below = {entry.layer - 1 for entry in entries if entry.layer}
        with self._stack.recorded(recording, below, {entry.layer for entry in entries if entry.after_heads}):
            recording.logits = body.feed(ids, recording.memory, "prefill", rows, tally, recorded_scores=scores)[:, 0]
        recording.scores = {
            layer: {name: torch.cat([b[name] for b in blocks], 1) for name in blocks[0]} for layer, blocks in scores.items()
        }
        recording.receipts = [tally.receipt(i) for i in range(count)]
        return recording

    def _enter(
        self,
        point: EntryPoint,
        recording: PrefillRecording,
        rows: Tensor,
        acts: Sequence[Sequence[Act]],
        samples: Sequence[int],
        remember: bool = True,
    ) -> PrefillResult:
        """Prefill new rows with these acts and sample keys from an entry point on; they continue the recorded `rows`."""
        assert self._stack is not None
        body, count = self.body, len(rows)
        part = body.anatomy.layers[point.layer].attention
        memory, tally = body.new_memory(count), Tally(count)
        compiled = self._compile(acts, samples)
        ids, fed = recording.ids[rows], self._stack.fed(point)
        positions = torch.arange(ids.shape[1], device=body.device)[fed].expand(count, -1)
        top = self._stack.top if point.last_only else None
        with self._stack.entered(point, recording, rows, part.query_heads if part else 0):
            logits = body.feed(ids[:, fed], memory, "prefill", compiled, tally, positions, last_only=top)[:, 0]
        receipts = []
        for i, row in enumerate(rows.tolist()):
            counts = recording.receipts[row].counts.items()  # of which those of the layers below remain
            below = Receipt({at: dict(count) for at, count in counts if at[0] < point.layer})
            receipts.append(below + tally.receipt(i))
        return PrefillResult(memory.above(recording.memory, rows, point.remembered) if remember else None, logits, receipts)

    def _prove(self, entry: EntryPoint) -> bool:
        """Compare a full prefill with one from this entry point: logits, receipts, and one decoded token from either cache."""
        body = self.body
        prompts = torch.arange(2 * _PROOF_TOKENS, device=body.device).view(2, -1) * 7 % body.anatomy.vocabulary
        rows = torch.tensor(_PROOF_ROWS, device=body.device)
        count = len(rows)
        # Acts that change the layer, whether it has attention, a recurrent mixer or both.
        acts: list[Act] = [SilenceHeads(entry.layer, frozenset({0}))] if body.anatomy.layers[entry.layer].attention else []
        if entry.scored:
            acts = [KeepBest(entry.layer, 1, entry.scored[0], sinks=entry.scored[1])]
        if not entry.after_heads and any(mixer.layer == entry.layer for mixer in body.mixers):
            acts.append(DropOutputs(entry.layer, "mixers"))
        memory, tally = body.new_memory(count), Tally(count)
        compiled = body.compile([acts] * count, [0] * count, "prefill")
        whole = [body.feed(prompts[rows], memory, "prefill", compiled, tally)]
        result = self._enter(entry, self._record(prompts, [entry]), rows, [acts] * count, [0] * count)
        assert result.memory is not None
        entered = [result.logits[:, None]]
        for answers, remembered in ((whole, memory), (entered, result.memory)):
            nothing = body.compile([()] * count, [0] * count, "decode")
            answers.append(body.feed(prompts[rows, :1], remembered, "decode", nothing, Tally(count)))
        same = [tally.receipt(i) for i in range(count)] == result.receipts
        return same and body.agree(torch.cat(whole, 1), torch.cat(entered, 1))


# --- The model's layers: recording their outputs, and replacing those below an entry point ---


class CannotEnter(Exception):
    """Raised if layers are not a plain stack, each called once, or if their outputs cannot be split into rows."""


class Stack:
    """The layers of a model, in order."""

    def __init__(self, layers: Sequence[nn.Module], body: HookedModel) -> None:
        self.layers = layers
        self.attention = {layer: module for module, layer in body.attention.items()}
        mixing = (*body.attention.values(), *(mixer.layer for mixer in body.mixers))
        self.top = max(mixing, default=0)  # the topmost layer that mixes tokens
        # If it has both attention and a mixer, one may read the other's output, so that all of its tokens are needed.
        self.lone_top = mixing.count(self.top) == 1
        self._mixing = {*body.attention, *(mixer.module for mixer in body.mixers)}

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
        """Make the model run from the entry's layer (of `heads` heads) on while open; it continues the recorded `rows`."""
        tokens = self.fed(entry)
        with ExitStack() as stack:
            if entry.last_only:
                for module in self._token_wise(self.layers[self.top]):
                    _replace_forward(stack, module, _of_last_token(module.forward))
            if entry.layer:
                below = _part_of(recording.outputs[entry.layer - 1], rows, tokens, recording.ids.shape)
                for module in self.layers[: entry.layer]:
                    _replace_forward(stack, module, lambda *args, **kwargs: below)
            if entry.after_heads:
                zeroing = _with_heads_zeroed(entry.layer, recording, rows, heads, tokens)
                _replace_forward(stack, self.attention[entry.layer], zeroing)
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


def _replace_forward(stack: ExitStack, module: nn.Module, forward: Callable[..., Any]) -> None:
    """Replace a module's forward until the stack closes; the module must not have an instance-level one already."""
    if "forward" in vars(module):
        raise CannotEnter(f"{type(module).__name__} has a forward of its own already")
    vars(module)["forward"] = forward
    stack.callback(vars(module).pop, "forward")


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
