"""Observe a model without changing it: statistics of every head, attention patterns, and the residual stream of every layer.

Observers receive probabilities after `limit_context` is applied, and before `expose_tokens` changes them or heads are zeroed.
They receive outputs of attention modules, mixers and layers as they are under the intervention.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from needlework.anatomy import Head
from needlework.errors import NeedleworkError, did_you_mean
from needlework.interventions.acts import Phase, Site
from needlework.model.attention import Forward, QueryBlock
from needlework.plots import draw_head_map, head_axes
from needlework.requests import Request
from needlework.tables import Table

if TYPE_CHECKING:
    import pandas

    from needlework.subject import Subject

NEEDLE = "needle"
PLACES = ("last", "prefill", "decode")  # of hidden states and patterns, beside positions and names of spans
Required = Literal["none", "with spans", "all"]


class AttentionObserver:
    """Base class of observers: holds the sample key, the prompt and the spans of each row.

    Args:
        spans: Names of the spans that `in_span` and `copied` need.
    """

    each_sample = True  # no prefill is shared between samples, so that each one is observed
    prefill = True  # receives what prefills compute
    attention = True  # receives attention probabilities
    sites: Collection[Site] = ()  # the sites whose outputs it receives

    def __init__(self, *spans: str) -> None:
        self.samples: list[int] = []  # [slots] the requests' keys
        self.tokens = torch.empty(0, 0)  # [slots, longest prompt]; -1 after the end of a prompt
        self._spans = {name: torch.empty(0, 0, dtype=torch.bool) for name in spans}  # [slots, longest prompt]

    def begin(self, requests: Sequence[Request], device: torch.device) -> None:
        """Start a batch: slot i of its forwards belongs to request i."""
        self.samples = [request.key for request in requests]
        shape = (len(requests), max(len(request.prompt) for request in requests))
        self.tokens = torch.full(shape, -1, device=device)
        self._spans = {name: torch.zeros(shape, dtype=torch.bool, device=device) for name in self._spans}
        for slot, request in enumerate(requests):
            self.tokens[slot, : len(request.prompt)] = torch.tensor(request.prompt, device=device)
            for name, mask in self._spans.items():
                for start, end in request.spans.get(name, ()):
                    mask[slot, start:end] = True

    def see(self, forward: Forward, layer: int, block: QueryBlock, probabilities: Tensor) -> None:
        """Receive attention probabilities [rows, heads, queries, keys] of one block of queries."""
        raise NotImplementedError

    def see_outputs(self, forward: Forward, site: Site, layer: int, outputs: Tensor) -> None:
        """Receive the outputs [rows, tokens, ...] of a site of a layer; of layer -1, what enters the first layer."""

    def chose(self, slots: Tensor, tokens: Tensor) -> None:
        """Receive the tokens [rows] that a decode step produced."""

    def in_span(self, name: str, slots: Tensor, positions: Tensor) -> Tensor:
        """Return whether each position [rows, n] of the rows' prompts lies in the span: [rows, n]."""
        mask = self._spans[name].to(positions.device)[slots]
        width = mask.shape[1]
        return mask.gather(1, positions.clamp(0, width - 1)) & (positions >= 0) & (positions < width)

    def copied(self, span: str, slots: Tensor, tokens: Tensor) -> Tensor:
        """Return whether each row's new token [rows] occurs in its span: [rows]."""
        slots, tokens = slots.to(self.tokens.device), tokens.to(self.tokens.device)
        return ((self.tokens[slots] == tokens[:, None]) & self._spans[span][slots]).any(1)

    def copied_from(self, span: str, slots: Tensor, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return whether each position [rows, heads] lies in the span and holds the row's new token [rows]."""
        slots, tokens, known = (x.to(positions.device) for x in (slots, tokens, self.tokens))
        same = known[slots].gather(1, positions.clamp(0, known.shape[1] - 1)) == tokens[:, None]
        return same & self.in_span(span, slots, positions)


def entropy(p: Tensor, counted: Tensor | None = None) -> Tensor:
    """Compute the entropy of probabilities over their last dimension, in nats.

    Args:
        p: [..., keys]
        counted: Boolean mask that broadcasts to `p`; the entropy is that of the marked keys alone, normalized to sum to 1.
    """
    p = p if counted is None else p * counted
    plain: Tensor = -torch.special.xlogy(p, p).sum(-1)
    if counted is None:
        return plain
    mass = p.sum(-1)
    safe = mass.clamp_min(torch.finfo(p.dtype).tiny)
    return torch.where(mass > 0, plain / safe + safe.log(), 0.0)


@dataclass(frozen=True)
class HeadRow:
    """Statistics of one head in one phase, averaged over all queries.

    Attributes:
        layer: The model's own layer index.
        head: Index of the head in its layer.
        phase: "prefill" or "decode".
        queries: Number of queries.
        needle_mass: Attention on the span.
        entropy: Entropy of the attention, in nats.
        copy_score: Share of the copied tokens for which the head's argmax was that same token in the span.
        copied: Number of generated tokens that occur in the span.
        sink_mass: Attention on the first token.
        sink_mass_of_best: Its mean over the (head + 1) lowest-entropy heads of the layer, chosen per query.
    """

    layer: int
    head: int
    phase: Phase
    queries: int
    needle_mass: float
    entropy: float
    copy_score: float
    copied: int
    sink_mass: float
    sink_mass_of_best: float


@dataclass(frozen=True)
class PatternBlock:
    """Attention of a block of queries in one layer. The tensors are the model's own: do not modify them."""

    layer: int
    phase: Phase
    samples: tuple[int, ...]  # of each row: `nw.sample_key(prompt)`, or the request's own `sample`
    q_positions: Tensor  # [rows, queries]
    k_positions: Tensor  # [rows, keys]; -1 where the row has no key
    weights: Tensor  # [rows, heads, queries, keys], exactly 0 where a key is masked
    visible: Tensor | None  # boolean [rows or 1, 1 or heads, queries, keys]; None: all keys are visible


@dataclass(frozen=True)
class Pattern:
    """Attention of one head at one position.

    Attributes:
        layer: The model's own layer index.
        head: Index of the head in its layer.
        phase: "prefill" or "decode".
        sample: `nw.sample_key(prompt)`, or the request's own `sample`.
        position: Position of the query, from 0.
        keys: [keys] positions of the visible keys.
        weights: [keys] attention on them, which sums to 1.
    """

    layer: int
    head: int
    phase: Phase
    sample: int
    position: int
    keys: Tensor
    weights: Tensor


@dataclass(frozen=True, eq=False)
class HiddenState:
    """The residual stream at one token.

    Attributes:
        phase: "prefill" or "decode".
        sample: `nw.sample_key(prompt)`, or the request's own `sample`.
        position: Position of the token, from 0.
        layers: [layers + 1, ...] what enters the first layer, and what each layer gives to the next.
    """

    phase: Phase
    sample: int
    position: int
    layers: Tensor


@dataclass(frozen=True)
class LayerRow:
    """What one layer adds to the residual stream in one phase, averaged over all tokens.

    Norms are relative to the norm of what enters the layer. Outputs of attention and of the mixer are those of the modules,
    before a norm or multiplier that the layer has for them.

    Attributes:
        layer: The model's own layer index.
        phase: "prefill" or "decode".
        tokens: Number of tokens.
        added: Norm of what the whole layer adds.
        attention: Norm of the attention module's output; None without one.
        recurrent: Norm of the recurrent mixer's output; None without one.
    """

    layer: int
    phase: Phase
    tokens: int
    added: float
    attention: float | None
    recurrent: float | None


class StreamObserver(AttentionObserver):
    """Collects what every layer adds to the residual stream, and hidden states at chosen places.

    Args:
        depth: Number of layers; 0: nothing is collected.
        places: Where hidden states are kept: positions, names of spans, "last" (token of the prompt), "prefill" and "decode";
            None: everywhere.
        spans: Names of other spans that `in_span` is called with.

    Attributes:
        hidden: The hidden states that were kept.
        keeps_hidden: Whether any are kept.
    """

    attention = False

    def __init__(self, depth: int, places: Collection[int | str] | None = None, *spans: str) -> None:
        self.named = {place for place in places or () if isinstance(place, str) and place not in PLACES}
        super().__init__(*{*spans, *self.named})
        self.depth, self.places = depth, places
        self.sites: Collection[Site] = ("layers", "attention", "mixers") if depth else ()
        self.hidden: list[HiddenState] = []
        self.keeps_hidden = True
        self._streams: list[Tensor] = []  # of this forward: what entered the first layer, and what each layer gave
        self._norms: dict[tuple[int, Phase], dict[Site, float]] = {}  # sums over tokens of relative norms
        self._tokens: Counter[Phase] = Counter()
        self._last = torch.empty(0)  # [slots] position of the last prompt token

    def begin(self, requests: Sequence[Request], device: torch.device) -> None:
        for request in requests:
            for place in sorted(self.named - set(request.spans)):
                known = did_you_mean(place, [*PLACES, *request.spans])
                raise NeedleworkError(f"observe: a request has no span {place!r} to keep states of; {known}")
        super().begin(requests, device)
        self._last = torch.tensor([len(request.prompt) - 1 for request in requests], device=device)

    def see_outputs(self, forward: Forward, site: Site, layer: int, outputs: Tensor) -> None:
        """Add the relative norm of what a site gives; after the last layer, keep the hidden states."""
        if layer < 0:
            self._streams = [outputs]
            self._tokens[forward.phase] += forward.positions.numel()
            return
        entered = self._streams[layer].to(outputs.device)
        added = outputs - entered if site == "layers" else outputs
        size = entered.flatten(2).float().norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
        sums = self._norms.setdefault((layer, forward.phase), {})
        sums[site] = sums.get(site, 0.0) + float((added.flatten(2).float().norm(dim=-1) / size).sum())
        if site == "layers":
            self._streams.append(outputs)
            if layer == self.depth - 1 and self.keeps_hidden:
                self._keep_hidden(forward)

    def _keep_hidden(self, forward: Forward) -> None:
        rows, tokens = self.chosen(forward.phase, forward.slots, forward.positions).nonzero(as_tuple=True)
        streams = torch.stack([stream[rows.to(stream.device), tokens.to(stream.device)].cpu() for stream in self._streams], 1)
        samples = [self.samples[slot] for slot in forward.slots[rows].tolist()]
        for sample, at, layers in zip(samples, forward.positions[rows, tokens].tolist(), streams, strict=True):
            self.hidden.append(HiddenState(forward.phase, sample, at, layers))

    def chosen(self, phase: Phase, slots: Tensor, positions: Tensor) -> Tensor:
        """Return whether each position [rows, n] is one of `places`: [rows, n]."""
        if self.places is None or phase in self.places:
            return torch.ones_like(positions, dtype=torch.bool)
        numbers = [place for place in self.places if isinstance(place, int)]
        chosen = torch.isin(positions, torch.tensor(numbers, dtype=positions.dtype, device=positions.device))
        if "last" in self.places:
            chosen = chosen | (positions == self._last.to(positions.device)[slots][:, None])
        for name in self.named:
            chosen = chosen | self.in_span(name, slots, positions)
        return chosen

    def layers(self, phase: Phase = "prefill") -> list[LayerRow]:
        """Return what each layer adds to the residual stream in one phase, in the order of the model."""
        count = self._tokens[phase]
        rows = [(layer, sums) for (layer, when), sums in sorted(self._norms.items()) if when == phase]
        means = [(layer, {site: total / count for site, total in sums.items()}) for layer, sums in rows]
        return [LayerRow(layer, phase, count, of["layers"], of.get("attention"), of.get("mixers")) for layer, of in means]


class HeadObserver(StreamObserver):
    """Collects statistics of every head over all requests, and patterns if requested; with `depth`, those of layers, too.

    Args:
        span: The span that attention is summed on.
        required: Which requests must have a span of this name: none, those that have spans at all, or all.
        depth, places: As in `StreamObserver`.

    Attributes:
        patterns: The attention patterns that were kept.
    """

    attention = True

    def __init__(
        self, span: str, required: Required = "none", depth: int = 0, places: Collection[int | str] | None = None
    ) -> None:
        super().__init__(depth, places, span)
        self.span, self.required = span, required
        self.each_sample = self.keeps_hidden = False
        self.on_block: Callable[[PatternBlock], object] | None = None  # called with every block of patterns
        self.kept_heads: Collection[Head] = ()  # whose patterns are kept
        self.patterns: list[Pattern] = []
        self._sums: dict[tuple[int, Phase], Tensor] = {}  # [5, heads]: mass, entropy, copies, sink mass, and that of the best
        self._queries: dict[tuple[int, Phase], int] = {}
        self._copied = 0
        self._looked: dict[int, Tensor] = {}  # layer -> [rows, heads] position of the highest attention in this step

    def begin(self, requests: Sequence[Request], device: torch.device) -> None:
        for request in requests:
            required = self.required == "all" or (self.required == "with spans" and request.spans)
            if required and self.span not in request.spans:
                known = did_you_mean(self.span, request.spans) if request.spans else "it has no spans: give it spans={...}"
                raise NeedleworkError(f"observe: a request has no span {self.span!r} to observe; {known}")
        super().begin(requests, device)

    def see(self, forward: Forward, layer: int, block: QueryBlock, probabilities: Tensor) -> None:
        p, key = probabilities, (layer, forward.phase)
        rows, heads, queries, _ = p.shape
        if self.on_block is not None or self.kept_heads:
            samples = tuple(self.samples[slot] for slot in forward.slots.tolist())
            where = (layer, forward.phase, samples, block.q_positions, block.k_positions)
            seen = PatternBlock(*where, p, block.visible)
            if self.on_block is not None:
                self.on_block(seen)
            self._keep_patterns(seen, self.chosen(forward.phase, forward.slots, block.q_positions))
        if key not in self._sums:
            self._sums[key] = torch.zeros(5, heads, dtype=torch.float64, device=p.device)
            self._queries[key] = 0
        columns = self.in_span(self.span, forward.slots, block.k_positions)  # [rows, keys]
        of_head = entropy(p)  # [rows, heads, queries]
        sink = (p * (block.k_positions == 0)[:, None, None]).sum(-1)
        best = sink.gather(1, of_head.argsort(dim=1, stable=True)).cumsum(1)
        self._sums[key][0] += (p * columns[:, None, None]).sum(-1).sum((0, 2))
        self._sums[key][1] += of_head.sum((0, 2))
        self._sums[key][3] += sink.sum((0, 2))
        self._sums[key][4] += best.sum((0, 2)) / torch.arange(1, heads + 1, device=best.device)
        self._queries[key] += rows * queries
        if forward.phase == "decode":
            self._looked[layer] = block.k_positions.gather(1, p[:, :, -1].argmax(-1))

    def chose(self, slots: Tensor, tokens: Tensor) -> None:
        self._copied += int(self.copied(self.span, slots, tokens).sum())
        for layer, looked in self._looked.items():
            self._sums[layer, "decode"][2] += self.copied_from(self.span, slots, tokens, looked).sum(0)
        self._looked.clear()

    def table(self, phase: Phase = "decode") -> list[HeadRow]:
        """Return the statistics of each head in one phase, in the order of the model."""
        rows = []
        for (layer, when), sums in sorted(self._sums.items()):
            if when != phase:
                continue
            count = self._queries[layer, when]
            for head, (mass, total, copies, sink, best) in enumerate(sums.T.tolist()):
                share = copies / self._copied if self._copied and when == "decode" else 0.0
                means = (mass / count, total / count, share, self._copied, sink / count, best / count)
                rows.append(HeadRow(layer, head, when, count, *means))
        return rows

    def frame(self) -> pandas.DataFrame:
        """Return one row per phase and head, with the fields of `HeadRow`."""
        import pandas

        rows = [asdict(row) for phase in get_args(Phase) for row in self.table(phase)]
        return pandas.DataFrame(rows, columns=list(HeadRow.__dataclass_fields__))

    def plot(self, ax: Any = None, *, of: str = "needle_mass", phase: Phase = "decode") -> Any:
        """Draw a column of `frame` as a heat map of layers by heads, and return the matplotlib axes."""
        if of not in HeadRow.__dataclass_fields__:
            raise NeedleworkError(f"observations have no {of!r}; {did_you_mean(of, HeadRow.__dataclass_fields__)}")
        values = {Head(row.layer, row.head): float(getattr(row, of)) for row in self.table(phase)}
        if not values:
            raise NeedleworkError(f"nothing was observed in {phase}: run prompts inside the `with` block")
        ax = head_axes(ax, values)
        draw_head_map(ax, values)
        ax.set_title(f"{of.replace('_', ' ')}, {phase}")
        return ax

    def _repr_html_(self) -> str:
        return Table.from_frame(self.frame(), f"observed attention (span {self.span!r})").to_html()

    def _keep_patterns(self, block: PatternBlock, queries: Tensor) -> None:
        """Add the patterns of the kept heads at the chosen queries [rows, queries]."""
        chosen = [head.index for head in self.kept_heads if head.layer == block.layer]
        for row, sample in enumerate(block.samples if chosen else ()):
            for q in queries[row].nonzero()[:, 0].tolist():
                position = int(block.q_positions[row, q])
                keys, weights = block.k_positions[row], block.weights[row, chosen, q]
                if block.visible is not None:
                    seen = block.visible[row % block.visible.shape[0], :, q].any(0)  # visible to any head
                    keys, weights = keys[seen], weights[:, seen]
                for head, of_head in zip(chosen, weights.cpu(), strict=True):
                    self.patterns.append(Pattern(block.layer, head, block.phase, sample, position, keys.cpu(), of_head))


@contextmanager
def observe(
    subject: Subject,
    span: str | None = None,
    *,
    patterns: bool | Callable[[PatternBlock], object] = False,
    heads: Collection[tuple[int, int]] | None = None,
    hidden: bool = False,
    positions: Collection[int | str] | None = None,
) -> Iterator[HeadObserver]:
    """Observe everything that the calling thread runs on the subject inside the `with` block. Other threads are not observed.

    Args:
        span: The span that attention is summed on; each request must have one of this name. By default "needle", which a
            request without any spans need not have.
        patterns: True keeps the attention patterns of `heads` at `positions`; a function is called with every `PatternBlock`
            instead, and nothing is kept.
        heads: (layer, index) of the heads whose patterns are kept; by default all.
        hidden: Whether to keep the residual stream of every layer at `positions` (`HeadObserver.hidden`), and what each layer
            adds to it (`HeadObserver.layers`).
        positions: Where patterns and hidden states are kept: positions of tokens, names of spans, "last" (the last token of the
            prompt), "prefill" and "decode"; by default everywhere.
    """
    if heads is not None and patterns is not True:
        raise NeedleworkError("observe: heads choose which patterns are kept: they go with patterns=True")
    if positions is not None and patterns is not True and not hidden:
        raise NeedleworkError("observe: positions choose what is kept: they go with patterns=True or hidden=True")
    chosen = [Head(*pair) for pair in heads] if heads is not None else subject.anatomy.heads
    if unknown := sorted(set(chosen) - set(subject.anatomy.heads)):
        raise NeedleworkError(
            f"observe: {subject.anatomy.architecture} has no heads {[tuple(head) for head in unknown]}; attention layers are"
            f" {[layer.index for layer in subject.anatomy.attention_layers]}, `needlework inspect` shows their heads"
        )
    check_places(positions)
    depth = stream_depth(subject) if hidden else 0
    observer = HeadObserver(span or NEEDLE, "with spans" if span is None else "all", depth, positions)
    observer.on_block = patterns if callable(patterns) else None
    observer.kept_heads = chosen if patterns is True else ()
    observer.keeps_hidden = hidden
    observer.each_sample = bool(patterns) or hidden
    with subject.body.observed_by(observer):
        yield observer


def check_places(places: Collection[int | str] | None) -> None:
    """Raise for places that no token can have; names of spans are checked when requests are known."""
    if isinstance(places, (str, int)):
        raise NeedleworkError(f"observe: positions={places!r} must be a list: [{places!r}]")
    if places is not None and not len(places):
        raise NeedleworkError(f"observe: positions=[] names no token; choose positions, names of spans, {', '.join(PLACES)}")
    if any(not isinstance(place, str) and place < 0 for place in places or ()):
        raise NeedleworkError(f"observe: positions={places!r} must count from 0, the first token of the prompt")


def stream_depth(subject: Subject) -> int:
    """Return the number of layers; raise if they are no plain stack, so that there is no residual stream after each."""
    subject.body.module_at(("layers", 0))
    return len(subject.anatomy.layers)
