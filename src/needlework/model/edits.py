"""Acts on one attention layer, compiled for a batch: tensors with one entry per row, and the functions that apply them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from needlework.errors import NeedleworkError
from needlework.interventions import acts
from needlework.interventions.acts import HEAD_SCORES, RANDOM, Act, HeadScore, Needs, scores_attention
from needlework.model.outputs import Edits, OutputEdits, require_shape

if TYPE_CHECKING:
    from needlework.model.attention import Forward, QueryBlock

A = TypeVar("A", bound=Act)
T = TypeVar("T")
EVERYTHING = 1 << 40  # more keys than any context has


def select_rows(edits: T, rows: Tensor) -> T:
    """Return the entries of the given rows, in this order, of a tensor or of all tensors in a tuple or dataclass."""
    selected: Any = edits
    if isinstance(edits, OutputEdits):
        selected = edits.select(rows)
    elif isinstance(edits, Tensor):
        selected = edits[rows.to(edits.device)]
    elif isinstance(edits, tuple):
        selected = tuple(select_rows(part, rows) for part in edits)
    elif is_dataclass(edits) and not isinstance(edits, type):
        selected = replace(edits, **{name: select_rows(part, rows) for name, part in vars(edits).items()})
    return selected  # type: ignore[no-any-return]


@dataclass
class Keep:
    """KeepBest acts of all rows: how many heads each row keeps, and by which score."""

    k: Tensor  # [rows] number of heads to keep
    by: Tensor  # [rows] score, as an index into `names`
    seed: Tensor  # [rows] seed of the random score
    sample: Tensor  # [rows] sample index, also part of the random score's hash
    names: tuple[str, ...]  # all scores that any row needs
    sinks: Tensor | None = None  # [rows] number of first tokens that the score ignores; None: 0 in all rows

    def without_sinks(self, block: QueryBlock, p: Tensor, log_p: Tensor) -> tuple[Tensor, Tensor]:
        """Remove the sinks from probabilities [rows, heads, queries, keys] and renormalize; rows without sinks stay unchanged.

        A query that sees only sinks gets all-zero probabilities, so that its heads are tied.
        """
        if self.sinks is None:
            return p, log_p
        first = (block.k_positions < self.sinks[:, None])[:, None, None]  # [rows, 1, 1, keys]
        seen = ~first if block.visible is None else block.visible & ~first
        rest = log_p.masked_fill(first, -1e30).log_softmax(-1)
        affected = (self.sinks > 0)[:, None, None, None]
        left = rest.exp().masked_fill(~seen.any(-1, keepdim=True), 0.0)
        return torch.where(affected, left, p), torch.where(affected, rest, log_p)

    def scores(self, needs: Needs) -> list[HeadScore]:
        """Return the registered scores among `names` that are computed from `needs` (probabilities or outputs)."""
        return [score for name in self.names if (score := HEAD_SCORES.get(name)) and score.needs == needs]


@dataclass
class Expose:
    """ExposeColumns acts of all rows: factors on attention probabilities by key position."""

    columns: Tensor  # exposed key positions, of `mark_positions`
    inside: Tensor  # [rows] factor on exposed columns
    outside: Tensor  # [rows] factor on all other columns
    balanced: Tensor  # [rows] mode "balanced", see `LayerEdits._balanced`
    renormalize: Tensor  # [rows] divide by the remaining mass
    paper: Tensor  # [rows] follow the paper's published code
    active: Tensor  # [rows] the row has such an act


@dataclass
class Blocked:
    """One BlockEdges act of each row: which keys are masked for which queries."""

    queries: Tensor  # of `mark_positions`
    keys: Tensor  # of `mark_positions`
    heads: Tensor | None = None  # [rows, heads]; None: all heads in all rows


@dataclass
class LayerEdits:
    """Edits of one attention layer in one phase; a field is None if no row needs it."""

    silenced: Tensor | None = None  # [rows, heads] heads to zero, or to replace by `means`
    means: Tensor | None = None  # [rows, heads, dim] outputs that replace those of ablated heads
    keep: Keep | None = None
    limit: tuple[Tensor, Tensor] | None = None  # visible last tokens and sinks: [rows], or [rows, heads] if heads differ
    blocked: tuple[Blocked, ...] = ()  # what they mask adds up
    expose: Expose | None = None
    outputs: Edits | None = None  # recordings, patches and functions of head outputs
    gates: Tensor | None = None  # [rows or 1, heads] differentiable factors on head outputs, in place of all other edits

    @property
    def idle(self) -> bool:
        return all(value is None or value == () for value in vars(self).values())

    @property
    def needs_probabilities(self) -> bool:
        scored = self.keep is not None and bool(self.keep.scores("probabilities"))
        return scored or self.limit is not None or bool(self.blocked) or self.expose is not None

    @property
    def silences_only(self) -> bool:
        """Whether all edits are fixed in advance: heads are ablated, and no head output is read."""
        reads = self.gates is not None or self.outputs is not None
        return self.keep is None and not reads and not self.needs_probabilities

    @property
    def needs_all_queries(self) -> bool:
        """Whether queries cannot be split into blocks: the paper's `balanced` sums over all queries of a prefill."""
        return self.expose is not None and bool((self.expose.balanced & self.expose.paper).any())

    def mask_keys(self, forward: Forward, layer: int, block: QueryBlock) -> Tensor | None:
        """Return a block's visible pairs [rows, 1 or heads, queries, keys] without those that acts mask; count these."""
        if self.limit is None and not self.blocked:
            return block.visible
        q, k = block.q_positions[:, None, :, None], block.k_positions[:, None, None, :]
        visible = k <= q if block.visible is None else block.visible
        if self.limit is not None:
            tokens, sinks = (x[..., None, None] if x.dim() == 2 else x[:, None, None, None] for x in self.limit)
            near = (k > q - tokens) | (k < sinks)
            forward.tally.add(layer, forward.phase, "keys_hidden", forward.slots, _pairs(visible & ~near))
            visible = visible & near
        if self.blocked:
            hidden = torch.zeros((), dtype=torch.bool, device=q.device)
            for blocked in self.blocked:
                queries, keys = are_marked(blocked.queries, block.q_positions), are_marked(blocked.keys, block.k_positions)
                pairs = queries[:, None, :, None] & keys[:, None, None, :]
                hidden = hidden | (pairs if blocked.heads is None else pairs & blocked.heads[..., None, None])
            hidden = visible & hidden & (k != q)  # a query's own key stays visible
            forward.tally.add(layer, forward.phase, "edges_blocked", forward.slots, _pairs(hidden))
            visible = visible & ~hidden
        return visible

    def scores_of_probabilities(self, block: QueryBlock, p: Tensor, log_p: Tensor) -> dict[str, Tensor]:
        """Compute the head scores [rows, queries, heads] that are based on probabilities [rows, heads, queries, keys], by name.

        The probabilities are those before columns are edited; `log_p` may be overwritten.
        """
        if self.keep is None:
            return {}
        scores = self.keep.scores("probabilities")
        if scores:
            p, log_p = self.keep.without_sinks(block, p, log_p)
        takers, values = sum(score.takes_log_p for score in scores), {}
        for score in scores:
            takers -= score.takes_log_p  # a score may overwrite its log_p: all but the last one get a copy
            own = [log_p.clone() if takers else log_p] if score.takes_log_p else []
            values[score.name] = _head_scores(score, p, *own).transpose(1, 2)
        return values

    def scores_of_outputs(self, out: Tensor) -> dict[str, Tensor]:
        """Compute the head scores [rows, queries, heads] that are based on outputs [rows, queries, heads, dim]."""
        scores = self.keep.scores("outputs") if self.keep is not None else []
        by_head = out.transpose(1, 2)
        return {score.name: _head_scores(score, by_head).transpose(1, 2) for score in scores}

    def expose_columns(self, forward: Forward, layer: int, block: QueryBlock, p: Tensor) -> Tensor:
        """Return probabilities [rows, heads, queries, keys] with exposed columns edited; count the edited columns."""
        assert self.expose is not None
        e, rows = self.expose, p.shape[0]
        k = block.k_positions
        columns = are_marked(e.columns, k)  # [rows, keys]
        causal = k[:, None, None] <= block.q_positions[:, None, :, None]
        visible = (causal if block.visible is None else block.visible & causal).expand(rows, -1, p.shape[2], -1)
        exposed = visible & columns[:, None, None]  # [rows, 1, queries, keys]
        act = e.active[:, None, None, None].expand_as(exposed)
        if forward.phase == "decode" and e.paper.any():  # the authors' code does not edit queries that see no needle column
            act = act & (exposed.any(-1, keepdim=True) | ~e.paper[:, None, None, None])
        factor = torch.where(columns, e.inside[:, None], e.outside[:, None])  # [rows, keys]
        new = p * factor[:, None, None]
        if e.balanced.any():
            new = torch.where(e.balanced[:, None, None, None], self._balanced(p, exposed), new)
        if e.renormalize.any():
            left = new.sum(-1, keepdim=True)
            scaled = torch.where(left > 0, new / left.clamp_min(1e-30), 0.0)
            new = torch.where(e.renormalize[:, None, None, None], scaled, new)
        count = forward.tally.add
        touched = torch.where(e.balanced[:, None], True, factor != 1)[:, None, None] & visible & act
        count(layer, forward.phase, "columns_touched", forward.slots, _pairs(touched))
        count(layer, forward.phase, "columns_exposed", forward.slots, _pairs(exposed & act))
        return torch.where(act, new, p)

    def _balanced(self, p: Tensor, exposed: Tensor) -> Tensor:
        """Return probabilities where every head has the mean mass over heads on exposed columns, spread evenly over them.

        All other columns are 0. Queries are handled independently, except in rows that follow the paper.
        """
        assert self.expose is not None
        mass = (p * exposed).sum(-1, keepdim=True).mean(1, keepdim=True)  # [rows, 1, queries, 1]
        right = exposed * (mass / exposed.sum(-1, keepdim=True).clamp_min(1))
        if not self.expose.paper.any():
            return right.expand_as(p)
        # The authors' code also sums over the queries, and writes into every query, including those before the needle.
        columns = exposed.any(2, keepdim=True)
        paper = columns * (mass.sum(2, keepdim=True) / columns.sum(-1, keepdim=True).clamp_min(1))
        return torch.where(self.expose.paper[:, None, None, None], paper.expand_as(right), right).expand_as(p)

    def edit_outputs(
        self, forward: Forward, layer: int, out: Tensor, queries: slice, scores: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """Apply functions and patches to head outputs [rows, queries, heads, dim], then ablate heads; count all.

        Args:
            queries: the queries that `out` holds, as a slice of the forward's.
            scores: head scores [rows, queries, heads] by name, where computed already; missing ones are computed from `out`.
        """
        if self.gates is not None:
            forward.tally.add(layer, forward.phase, "heads_changed", forward.slots, out.shape[1])
            return out * self.gates[:, None, :, None].to(out.dtype)
        if self.outputs is not None:
            out = self.outputs.apply(forward, layer, out, forward.positions[:, queries])
        scores = scores or {}
        if self.keep is not None and not all(name in scores or name == RANDOM for name in self.keep.names):
            scores = {**scores, **self.scores_of_outputs(out)}
        if self.keep is not None and forward.recorded_scores is not None:
            forward.recorded_scores.setdefault(layer, []).append(scores)
        off = self.switched_off(layer, forward.positions[:, queries], out.shape[2], scores)
        if off is None:
            return out
        forward.tally.add(layer, forward.phase, "heads_zeroed", forward.slots, off.sum((1, 2)))
        if self.means is None:
            return out.masked_fill(off[..., None], 0.0)
        return torch.where(off[..., None], self.means[:, None].to(out.dtype), out)

    def switched_off(self, layer: int, positions: Tensor, heads: int, scores: Mapping[str, Tensor]) -> Tensor | None:
        """Return the mask [rows, queries, heads] of heads to ablate at positions [rows, queries]; None if no act ablates heads.

        Scores [rows, queries, heads] by name are needed for all of `keep.names` except the random score.
        """
        off: Tensor | None = None
        if self.keep is not None:
            by_name = dict(scores)
            if RANDOM in self.keep.names:
                by_name[RANDOM] = hash_scores(self.keep, layer, positions, heads)
            score = by_name[self.keep.names[0]]
            if len(self.keep.names) > 1:  # each row ranks heads by its own score
                stacked = torch.stack([by_name[name].float() for name in self.keep.names])
                score = stacked.gather(0, self.keep.by[None, :, None, None].expand(1, *positions.shape, heads))[0]
            order = score.argsort(dim=-1, descending=True, stable=True)  # ties go to the lower head index
            places = torch.arange(order.shape[-1], device=order.device).expand_as(order)
            rank = torch.empty_like(order).scatter_(-1, order, places)
            off = rank >= self.keep.k[:, None, None]
        if self.silenced is not None:
            silenced = self.silenced[:, None].expand(*positions.shape, heads)
            off = silenced if off is None else off | silenced
        return off

    def always_off(self, heads: int) -> Tensor | None:
        """Return the number of heads [rows] ablated at every query; None if it depends on computed values."""
        masked = self.limit is not None or bool(self.blocked) or self.expose is not None
        if self.outputs is not None or masked or (self.keep and self.silenced is not None):
            return None
        if self.keep is not None:
            return heads - self.keep.k.clamp(0, heads)
        return None if self.silenced is None else self.silenced.sum(1)


def _head_scores(score: HeadScore, values: Tensor, *log_p: Tensor) -> Tensor:
    """Compute a head score of probabilities or outputs [rows, heads, queries, ...]: [rows, heads, queries].

    Registered functions get a copy, made outside of inference mode because inference tensors do not count writes.

    Raises:
        NeedleworkError: If a registered function returns another shape or NaN, or writes into its argument. NaN is accepted
            for queries without any probability mass, where all heads are tied.
    """
    if score.built_in:
        built_in: Tensor = score.function(values, *log_p)
        return built_in
    with torch.inference_mode(False), torch.no_grad():
        copied = values.clone()
    version = copied._version
    scores = require_shape(score.function(copied, *log_p), values.shape[:3], score.name)
    if copied._version != version:
        raise NeedleworkError(f"the function of {score.name} writes into its argument; clone it before writing")
    if score.needs == "probabilities":
        scores = scores.masked_fill(values.sum(-1) == 0, 0.0)
    if bool(scores.isnan().any()):
        raise NeedleworkError(f"the function of {score.name} returned NaN, which has no order; return a number for every head")
    return scores


def hash_scores(keep: Keep, layer: int, positions: Tensor, heads: int) -> Tensor:
    """Return random scores [rows, queries, heads] that depend only on seed, sample, layer, position and head.

    Results therefore do not depend on the batch or on chunk boundaries.
    """
    state = torch.zeros_like(keep.seed)[:, None, None]
    index = torch.arange(heads, device=positions.device)
    for key in (keep.seed[:, None, None], keep.sample[:, None, None], layer, positions[:, :, None], index):
        state = mix(state ^ key)
    return (state >> 40).float()  # 24 bits: exact in float32, ties go to the lower head


def _signed(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x


def mix(state: Tensor) -> Tensor:
    """Compute `acts.mix` on int64 tensors, whose overflow wraps around like that of unsigned integers."""
    state = state + _signed(acts.GOLDEN)
    for bits, factor in ((30, acts.MIX1), (27, acts.MIX2), (31, 1)):
        shifted = (state >> bits) & ((1 << (64 - bits)) - 1)  # a logical shift
        state = (state ^ shifted) * _signed(factor)
    return state


def compile_layer(
    rows: Sequence[Sequence[Act]], samples: Sequence[int], heads: int, means: Mapping[str, Tensor], device: torch.device
) -> LayerEdits:
    """Compile the acts of all rows on one layer of `heads` query heads; `means` are calibrated ones [heads, dim] by hash."""
    edits = LayerEdits()

    def one_a_row(kind: type[A]) -> list[A | None]:
        return [next((act for act in row if isinstance(act, kind)), None) for row in rows]

    def column(of: Sequence[A | None], value: Callable[[A], int], default: int = 0) -> Tensor:
        return torch.tensor([default if act is None else value(act) for act in of], dtype=torch.int64, device=device)

    silences = [[act for act in row if isinstance(act, acts.SilenceHeads)] for row in rows]
    if any(silences):
        edits.silenced = torch.tensor(
            [[any(h in act.heads for act in row) for h in range(heads)] for row in silences], device=device
        )
        edits.means = _means(silences, means, device)
    keeps = one_a_row(acts.KeepBest)
    if any(keeps):
        names = tuple(sorted({act.by for act in keeps if act}))
        edits.keep = Keep(
            k=column(keeps, lambda act: act.k, heads),
            by=column(keeps, lambda act: names.index(act.by)),
            seed=column(keeps, lambda act: act.seed),
            sample=torch.tensor([_signed(s & (1 << 64) - 1) for s in samples], dtype=torch.int64, device=device),
            names=names,
            sinks=column(keeps, lambda act: act.sinks) if any(act and act.sinks for act in keeps) else None,
        )
    limits = one_a_row(acts.LimitKeys)
    if any(limits):
        edits.limit = column(limits, lambda act: act.tokens, EVERYTHING), column(limits, lambda act: act.sinks)
        if any(act and act.heads is not None for act in limits):  # heads differ
            limited = torch.tensor([[not act or act.heads is None or h in act.heads for h in range(heads)] for act in limits])
            tokens, sinks = (x[:, None].expand(-1, heads) for x in edits.limit)
            free = ~limited.to(device)
            edits.limit = tokens.masked_fill(free, EVERYTHING), sinks.masked_fill(free, 0)
    edits.blocked = _blocked([[act for act in row if isinstance(act, acts.BlockEdges)] for row in rows], heads, device)
    exposures = one_a_row(acts.ExposeColumns)
    if any(exposures):
        edits.expose = _expose(exposures, device)
    return edits


def keeps_from_sdpa(of_row: Sequence[Act]) -> bool:
    """Return whether acts read or change attention probabilities, so that stock SDPA cannot be used."""
    return any(
        isinstance(act, (acts.LimitKeys, acts.BlockEdges, acts.ExposeColumns))
        or (isinstance(act, acts.KeepBest) and scores_attention(act.by))
        for act in of_row
    )


def _pairs(of_heads: Tensor) -> Tensor:
    """Count the pairs of query and key that are marked for any head: [rows, 1 or heads, queries, keys] -> [rows].

    Heads are not counted, because the size of their dimension depends on the other rows of the batch.
    """
    return of_heads.any(1).sum((1, 2))


def mark_positions(rows: Sequence[tuple[Sequence[int], int | None]], device: torch.device) -> Tensor:
    """Return which positions each row names [rows, positions + 1]; the last entry stands for all further positions.

    Args:
        rows: Positions of each row, and the first one from which on all are meant, too (None: no such).
    """
    ends = [max(*positions, first or 0) if positions else first or 0 for positions, first in rows]
    marked = torch.zeros(len(rows), 2 + max(ends, default=0), dtype=torch.bool)
    for row, (positions, first) in zip(marked, rows, strict=True):
        row[list(positions)] = True
        if first is not None:
            row[first:] = True
    return marked.to(device)


def are_marked(marked: Tensor, positions: Tensor) -> Tensor:
    """Return whether each position [rows, n] is named in a result of `mark_positions`; none are before position 0."""
    return marked.gather(1, positions.clamp(0, marked.shape[1] - 1)) & (positions >= 0)


def _blocked(rows: Sequence[Sequence[acts.BlockEdges]], heads: int, device: torch.device) -> tuple[Blocked, ...]:
    """Compile the BlockEdges acts [rows][acts]: the first of each row, the second, and so on."""
    none = acts.BlockEdges(-1, (), None, ())
    compiled = []
    for nth in range(max(map(len, rows), default=0)):
        some = [row[nth] if nth < len(row) else none for row in rows]
        by_head = any(act.heads is not None for act in some)
        named = [[act.heads is None or head in act.heads for head in range(heads)] for act in some]
        compiled.append(
            Blocked(
                queries=mark_positions([(act.queries, act.first) for act in some], device),
                keys=mark_positions([(act.keys, None) for act in some], device),
                heads=torch.tensor(named, device=device) if by_head else None,
            )
        )
    return tuple(compiled)


def _expose(exposures: Sequence[acts.ExposeColumns | None], device: torch.device) -> Expose:

    def flag(test: Callable[[acts.ExposeColumns], bool]) -> Tensor:
        return torch.tensor([act is not None and test(act) for act in exposures], device=device)

    return Expose(
        columns=mark_positions([(act.positions if act else (), None) for act in exposures], device),
        inside=1.0 - flag(lambda act: act.mode in ("omit", "null")).float(),
        outside=1.0 - flag(lambda act: act.mode in ("only", "null")).float(),
        balanced=flag(lambda act: act.mode == "balanced"),
        renormalize=flag(lambda act: act.renormalize),
        paper=flag(lambda act: act.paper),
        active=flag(lambda act: True),
    )


def _means(silences: Sequence[Sequence[acts.SilenceHeads]], means: Mapping[str, Tensor], device: torch.device) -> Tensor | None:
    """Return the outputs [rows, heads, dim] that replace those of ablated heads; None if all rows use zeros.

    Means replace the heads of the act that names them; heads that another act zeroes, too, or that only a score drops, are zero.
    """
    named = {act.means for row in silences for act in row if act.means}
    if not named:
        return None
    if missing := named - means.keys():
        raise NeedleworkError(f"no calibrated means {min(missing)!r} are loaded: subject.use(nw.Means.load(path)) brings them")
    values = torch.stack([torch.zeros_like(means[min(named)])] * len(silences))
    for table, row in zip(values, silences, strict=True):
        for act in sorted(row, key=lambda act: not act.means):  # zeros last
            heads = list(act.heads)
            table[heads] = means[act.means][heads] if act.means else 0.0
    return values.to(device)
