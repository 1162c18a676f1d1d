"""Observe attention without changing it: statistics of every head, or the attention patterns themselves.

Observers receive probabilities after `limit_context` is applied, and before `expose_tokens` changes them or heads are zeroed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from needlework.anatomy import Head
from needlework.errors import NeedleworkError, did_you_mean
from needlework.interventions.acts import Phase
from needlework.model.attention import Forward, QueryBlock
from needlework.requests import Request

if TYPE_CHECKING:
    import pandas

    from needlework.subject import Subject

NEEDLE = "needle"
Required = Literal["none", "with spans", "all"]


class AttentionObserver:
    """Base class of observers: holds the sample key, the prompt and the spans of each row.

    Args:
        spans: Names of the spans that `in_span` and `copied` need.
    """

    each_sample = True  # no prefill is shared between samples, so that each one is observed

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


class HeadObserver(AttentionObserver):
    """Collects statistics of every head over all requests, and patterns if requested.

    Args:
        span: The span that attention is summed on.
        required: Which requests must have a span of this name: none, those that have spans at all, or all.

    Attributes:
        patterns: The attention patterns that were kept.
    """

    def __init__(self, span: str, required: Required = "none") -> None:
        super().__init__(span)
        self.span, self.required = span, required
        self.each_sample = False
        self.on_block: Callable[[PatternBlock], object] | None = None  # called with every block of patterns
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
        if self.on_block is not None:
            samples = tuple(self.samples[slot] for slot in forward.slots.tolist())
            where = (layer, forward.phase, samples, block.q_positions, block.k_positions)
            self.on_block(PatternBlock(*where, p, block.visible))
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
        from needlework.plots import draw_head_map, head_axes

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
        from needlework.tables import Table

        return Table.from_frame(self.frame(), f"observed attention (span {self.span!r})").to_html()

    def keep(self, block: PatternBlock, heads: Collection[Head], positions: Collection[int] | None) -> None:
        """Add the patterns of these heads at these positions (None: at all) to `patterns`."""
        chosen = [head.index for head in heads if head.layer == block.layer]
        for row, sample in enumerate(block.samples if chosen else ()):
            for q, position in enumerate(block.q_positions[row].tolist()):
                if positions is not None and position not in positions:
                    continue
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
    positions: Collection[int] | None = None,
) -> Iterator[HeadObserver]:
    """Observe everything that the calling thread runs on the subject inside the `with` block. Other threads are not observed.

    Args:
        span: The span that attention is summed on; each request must have one of this name. By default "needle", which a
            request without any spans need not have.
        patterns: True keeps the attention patterns of `heads` at `positions`; a function is called with every `PatternBlock`
            instead, and nothing is kept.
        heads: (layer, index) of the heads whose patterns are kept; by default all.
        positions: Query positions whose patterns are kept; by default all.
    """
    if (heads is not None or positions is not None) and patterns is not True:
        raise NeedleworkError("observe: heads and positions choose which patterns are kept: they go with patterns=True")
    chosen = [Head(*pair) for pair in heads] if heads is not None else subject.anatomy.heads
    if unknown := sorted(set(chosen) - set(subject.anatomy.heads)):
        raise NeedleworkError(
            f"observe: {subject.anatomy.architecture} has no heads {[tuple(head) for head in unknown]}; attention layers are"
            f" {[layer.index for layer in subject.anatomy.attention_layers]}, `needlework inspect` shows their heads"
        )
    if positions is not None and min(positions, default=0) < 0:
        raise NeedleworkError(f"observe: positions={positions!r} must count from 0, the first token of the prompt")
    observer = HeadObserver(NEEDLE, "with spans") if span is None else HeadObserver(span, "all")
    if callable(patterns):
        observer.on_block = patterns
    elif patterns:
        observer.on_block = partial(observer.keep, heads=chosen, positions=positions)
    observer.each_sample = observer.on_block is not None
    with subject.body.observed_by(observer):
        yield observer
