"""Interventions on attention: ablate or select heads, limit the context, and change attention to a span."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from needlework.anatomy import Anatomy, Head, heads_of_share
from needlework.errors import NeedleworkError, did_you_mean
from needlework.interventions import acts
from needlework.interventions.acts import Act, LoweringContext
from needlework.interventions.base import Intervention, Part, combine, register
from needlework.interventions.ranking import Ranking, Recorded, as_heads
from needlework.interventions.scores import RANDOM, known_scores, scores_attention


def _sorted_heads(value: Any) -> Any:
    return tuple(sorted(set(as_heads(value))))


def _known_score(by: str | Ranking | Recorded) -> str | Ranking | Recorded:
    if isinstance(by, str) and by not in known_scores():
        raise ValueError(f"there is no head score {by!r}; {did_you_mean(by, known_scores())}")
    return by


Heads = Annotated[tuple[Head, ...], BeforeValidator(_sorted_heads)]


@register
class KeepHeads(Part):
    """In every attention layer and for every token, keep the k highest-scoring heads and zero the outputs of the others."""

    side = "attention"
    k: int | None = Field(None, ge=0)
    fraction: float | None = Field(None, ge=0, le=1)
    by: Annotated[str | Ranking | Recorded, AfterValidator(_known_score)] = "entropy"
    scope: Literal["layer", "model"] = "layer"
    seed: int = 0
    draw: Literal["token", "trial"] = "token"  # for by="random": draw heads per token, or once per trial
    sinks: int = Field(0, ge=0)  # number of first tokens left out when heads are scored by their attention

    def model_post_init(self, _: Any) -> None:
        if (self.k is None) == (self.fraction is None):
            raise NeedleworkError("keep_heads: give either k or fraction, e.g. keep_heads(k=2) or keep_heads(fraction=0.15)")
        if self.scope == "model" and not self._static:
            raise NeedleworkError(
                "keep_heads: scope='model' needs a Ranking, or by='random' with draw='trial': dynamic scores of later layers"
                " are unknown when earlier layers must be cut"
            )
        if self.sinks and not (isinstance(self.by, str) and scores_attention(self.by)):
            raise NeedleworkError(
                f"keep_heads: sinks={self.sinks} leaves first tokens out of a score of attention, and by={self.by!r} is none;"
                " drop sinks, or choose by='entropy'"
            )

    @property
    def _static(self) -> bool:
        """Whether the kept heads are known before the model runs."""
        return isinstance(self.by, (Ranking, Recorded)) or (self.by == RANDOM and self.draw == "trial")

    def count(self, heads: int) -> int:
        """Return how many of `heads` are kept."""
        return self.k if self.k is not None else heads_of_share(self.fraction or 0.0, heads)

    def check(self, anatomy: Anatomy) -> None:
        super().check(anatomy)
        sizes = {index: anatomy.attention(index).query_heads for index in self.where(anatomy)}
        most = sum(sizes.values()) if self.scope == "model" else min(sizes.values())
        if self.k is not None and self.k > most:
            raise NeedleworkError(f"{self}: k={self.k} is more than the {most} heads there are; choose k from 0 to {most}")
        if isinstance(self.by, Ranking):
            missing = {h for i in sizes for h in anatomy.layers[i].heads} - set(self.by.order)
            if missing:
                raise NeedleworkError(f"{self.name}: the ranking does not cover heads {sorted(missing)[:5]} of this model")
            if unknown := sorted(set(self.by.order) - set(anatomy.heads)):
                raise NeedleworkError(
                    f"{self.name}: the ranking has heads {[tuple(head) for head in unknown[:5]]}, which {anatomy.architecture}"
                    " has not; `needlework inspect` shows its heads"
                )

    def lower(self, context: LoweringContext) -> Iterable[Act]:
        sizes = {index: context.anatomy.attention(index).query_heads for index in self.where(context.anatomy)}
        if isinstance(self.by, str) and not self._static:
            for index, heads in sizes.items():
                if self.count(heads) < heads:
                    yield acts.KeepBest(index, self.count(heads), self.by, self.seed, self.sinks)
            return
        order = self._static_order(context, sizes)
        groups = [list(sizes)] if self.scope == "model" else [[index] for index in sizes]
        for group in groups:
            members = [head for head in order if head.layer in group]
            kept = set(members[: self.count(len(members))])
            for index in group:
                silenced = frozenset(h.index for h in context.anatomy.layers[index].heads if h not in kept)
                if silenced:
                    yield acts.SilenceHeads(index, silenced)

    def _static_order(self, context: LoweringContext, sizes: dict[int, int]) -> list[Head]:
        """Return the heads of these layers, best first: by the ranking, or by a hash of seed and sample."""
        if isinstance(self.by, Recorded):
            raise NeedleworkError(
                f"{self}: the ranking {self.by.name!r} is not recorded yet; `needlework run` records those that a plan lists"
                " under rankings, elsewhere give the heads: by=ranking('2.0 5.11')"
            )
        heads = [Head(index, i) for index, count in sizes.items() for i in range(count)]
        if isinstance(self.by, Ranking):
            rank = {head: i for i, head in enumerate(self.by.order)}
            return sorted(heads, key=rank.__getitem__)
        return sorted(heads, key=lambda h: acts.draw(self.seed, context.sample, h.layer, h.index))


def rankings(intervention: Intervention) -> list[Ranking]:
    """Return the rankings that an intervention uses."""
    return [part.by for part in intervention.parts if isinstance(part, KeepHeads) and isinstance(part.by, Ranking)]


def recorded(intervention: Intervention) -> list[Recorded]:
    """Return the rankings that an intervention uses and that have yet to be recorded."""
    return [part.by for part in intervention.parts if isinstance(part, KeepHeads) and isinstance(part.by, Recorded)]


def with_rankings(intervention: Intervention, known: Mapping[Recorded, Ranking | Recorded]) -> Intervention:
    """Return the intervention with the names of recorded rankings replaced by the known rankings."""
    if not any(by in known for by in recorded(intervention)):
        return intervention
    parts = intervention.parts
    return combine(
        [
            part.model_copy(update={"by": known.get(part.by, part.by)})
            if isinstance(part, KeepHeads) and isinstance(part.by, Recorded)
            else part
            for part in parts
        ]
    )


def _check_heads(part: Part, heads: tuple[Head, ...], anatomy: Anatomy) -> None:
    """Raise if there are no heads, or heads that the model or `layers` does not have."""
    wrong = sorted(set(heads) - set(anatomy.heads))
    if wrong or not heads:
        raise NeedleworkError(
            f"{part.name}: no such heads {[tuple(h) for h in wrong]} in {anatomy.architecture}; attention layers are "
            f"{[x.index for x in anatomy.attention_layers]}, `needlework inspect` shows their heads"
        )
    left_out = sorted(set(part.where(anatomy)) - set(part.layers or part.where(anatomy)))
    if left_out:
        raise NeedleworkError(f"{part}: names heads of layers {left_out}, which `layers` leaves out: drop layers")


@register
class AblateHeads(Part):
    """Ablate single heads: replace their outputs by zero, or by the mean that `nw.calibrate` measured."""

    side = "attention"
    heads: Heads
    value: Literal["zero", "mean"] = "zero"
    means: str = ""  # hash of the calibrated means

    def model_post_init(self, _: Any) -> None:
        if (self.value == "mean") != bool(self.means):
            raise NeedleworkError(f"{self.name}: value='mean' goes with means=HASH; nw.calibrate(subject, texts).hash gives it")

    def where(self, anatomy: Anatomy) -> tuple[int, ...]:
        return tuple(sorted({head.layer for head in self.heads}))

    def check(self, anatomy: Anatomy) -> None:
        super().check(anatomy)
        _check_heads(self, self.heads, anatomy)

    def _silenced(self, anatomy: Anatomy) -> Iterator[tuple[int, frozenset[int]]]:
        for index in self.where(anatomy):
            yield index, frozenset(h.index for h in self.heads if h.layer == index)

    def lower(self, context: LoweringContext) -> Iterable[Act]:
        for index, heads in self._silenced(context.anatomy):
            if heads:
                yield acts.SilenceHeads(index, heads, self.means)


@register
class OnlyHeads(AblateHeads):
    """Ablate all heads but the given ones, in all attention layers or in `layers`; the complement of AblateHeads."""

    def where(self, anatomy: Anatomy) -> tuple[int, ...]:
        return Part.where(self, anatomy)

    def _silenced(self, anatomy: Anatomy) -> Iterator[tuple[int, frozenset[int]]]:
        for index in self.where(anatomy):
            yield index, frozenset(h.index for h in anatomy.layers[index].heads if h not in self.heads)


@register
class AblateAttention(Part):
    """Ablate all heads. `site="heads"` keeps the bias of the output projection; `site="block"` removes it too."""

    side = "attention"
    site: Literal["heads", "block"] = "heads"

    def lower(self, context: LoweringContext) -> Iterable[Act]:
        for index in self.where(context.anatomy):
            everything = frozenset(range(context.anatomy.attention(index).query_heads))
            yield acts.DropAttention(index) if self.site == "block" else acts.SilenceHeads(index, everything)


@register
class ExposeTokens(Part):
    """Change attention probabilities on or off a span of keys; combine one for prefill and one for decode with `+`."""

    side = "attention"
    mode: Literal["keep", "omit", "only", "null", "balanced"]
    span: str | tuple[int, ...] = "needle"
    renormalize: bool = False
    compat: Literal["right", "paper"] = "right"

    @property
    def revision(self) -> int:
        """1 where compat="paper" now also changes prefill queries that see no column of the span, as the authors' code does."""
        return int(self.compat == "paper" and self.phase != "decode" and self.mode in ("only", "null", "balanced"))

    def lower(self, context: LoweringContext) -> Iterable[Act]:
        positions = context.positions(self.span)
        if self.compat == "paper":  # the authors' code ignores BOS and uses the first occurrence of the needle only
            first = context.spans[self.span][0] if isinstance(self.span, str) else (min(positions), max(positions) + 1)
            positions = tuple(p - 1 for p in range(*first) if p > 0)
            if not positions:
                raise NeedleworkError(f"{self}: the authors' columns are one token early, and before position 0 there is none")
        if self.mode != "keep":
            for index in self.where(context.anatomy):
                yield acts.ExposeColumns(index, self.mode, positions, self.renormalize, self.compat == "paper")


@register
class LimitContext(Part):
    """Mask all keys but the last `tokens` (the query's own included) and the first `sinks`, in all heads or in some."""

    side = "attention"
    tokens: int = Field(ge=1)
    sinks: int = Field(0, ge=0)
    heads: Heads | None = None

    def where(self, anatomy: Anatomy) -> tuple[int, ...]:
        return super().where(anatomy) if self.heads is None else tuple(sorted({head.layer for head in self.heads}))

    def check(self, anatomy: Anatomy) -> None:
        super().check(anatomy)
        if self.heads is not None:
            _check_heads(self, self.heads, anatomy)

    def lower(self, context: LoweringContext) -> Iterable[Act]:
        for index in self.where(context.anatomy):
            heads = None if self.heads is None else frozenset(h.index for h in self.heads if h.layer == index)
            yield acts.LimitKeys(index, self.tokens, self.sinks, heads)
