"""The built-in interventions on attention, on recurrent mixers, and on the two halves of a model's cache."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from needlework.anatomy import Anatomy, Group, Head, heads_of_share
from needlework.errors import NeedleworkError, did_you_mean
from needlework.interventions import acts
from needlework.interventions.acts import RANDOM, Act, Half, LoweringContext, known_scores, scores_attention
from needlework.interventions.base import Intervention, Part, When, combine, register
from needlework.interventions.ranking import Ranking, Recorded, as_heads


def _check_score(by: str | Ranking | Recorded) -> str | Ranking | Recorded:
    if isinstance(by, str) and by not in known_scores():
        raise ValueError(f"there is no head score {by!r}; {did_you_mean(by, known_scores())}")
    return by


Heads = Annotated[tuple[Head, ...], BeforeValidator(lambda value: tuple(sorted(set(as_heads(value)))))]
Groups = Annotated[
    tuple[Group, ...], BeforeValidator(lambda value: tuple(sorted({Group(*pair) for pair in as_heads(value, "group")})))
]


def _in_layer(listed: Sequence[Head | Group], layer: int) -> frozenset[int]:
    return frozenset(one.index for one in listed if one.layer == layer)


class PartOfListed(Part):
    """A part that acts on listed `heads` (or recurrent `groups`) and on their layers; on all of its side if these are None."""

    @property
    def listed(self) -> Sequence[Head | Group] | None:
        listed: Sequence[Head | Group] | None = getattr(self, "heads" if self.side == "attention" else "groups")
        return listed

    def listed_in(self, layer: int) -> frozenset[int] | None:
        """Return the indices of the listed heads or groups of a layer; None: all."""
        return None if self.listed is None else _in_layer(self.listed, layer)

    def where(self, anatomy: Anatomy) -> tuple[int, ...]:
        return super().where(anatomy) if self.listed is None else tuple(sorted({one.layer for one in self.listed}))

    def check(self, anatomy: Anatomy) -> None:
        super().check(anatomy)
        if self.listed is None:
            return
        if self.side == "attention":
            what, known = "heads", set[Head | Group](anatomy.heads)
            layers = [layer.index for layer in anatomy.attention_layers]
            hint = f"attention layers are {layers}, `needlework inspect` shows their heads"
        else:
            what, known = "groups", set[Head | Group](anatomy.groups)
            hint = "`needlework inspect` shows how many each layer has"
            for index, part in anatomy.recurrent_parts():
                if index in self.where(anatomy) and not part.groups:
                    raise NeedleworkError(f"{self}: the groups of layer {index} are not known: {part.no_groups_reason}")
        wrong = [tuple(one) for one in sorted({*self.listed} - known)]
        if wrong or not self.listed:
            raise NeedleworkError(f"{self.name}: no such {what} {wrong} in {anatomy.architecture}; {hint}")
        left_out = sorted(set(self.where(anatomy)) - set(self.layers or self.where(anatomy)))
        if left_out:
            raise NeedleworkError(f"{self}: names {what} of layers {left_out}, which `layers` leaves out: drop layers")


@register
class KeepHeads(Part):
    """In every attention layer and for every token, keep the k highest-scoring heads and zero the outputs of the others.

    Attributes:
        k: Number of heads to keep; give either `k` or `fraction`.
        fraction: Share of the heads to keep.
        by: What heads are ordered by: the name of a score, "random", a `Ranking`, or a ranking that a plan records.
        scope: Whether k is counted in each layer or in the whole model.
        seed: Seed of random choices.
        draw: For by="random": draw heads for each token, or once per trial.
        sinks: Number of first tokens left out when heads are scored by their attention.
        phase: "prefill", "decode" or "both".
        layers: Layers to act on, by the model's own index; None: all attention layers.
    """

    side = "attention"
    k: int | None = Field(None, ge=0)
    fraction: float | None = Field(None, ge=0, le=1)
    by: Annotated[str | Ranking | Recorded, AfterValidator(_check_score)] = "entropy"
    scope: Literal["layer", "model"] = "layer"
    seed: int = 0
    draw: Literal["token", "trial"] = "token"
    sinks: int = Field(0, ge=0)

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

    def _sizes(self, anatomy: Anatomy) -> dict[int, int]:
        """Return the number of heads of each layer that this acts on."""
        return {index: anatomy.attention(index).query_heads for index in self.where(anatomy)}

    def check(self, anatomy: Anatomy) -> None:
        super().check(anatomy)
        sizes = self._sizes(anatomy)
        most = sum(sizes.values()) if self.scope == "model" else min(sizes.values())
        if self.k is not None and self.k > most:
            raise NeedleworkError(f"{self}: k={self.k} is more than the {most} heads there are; choose k from 0 to {most}")
        if isinstance(self.by, Ranking):
            missing = {h for i in sizes for h in anatomy.layers[i].heads} - set(self.by.order)
            if missing:
                raise NeedleworkError(f"{self.name}: the ranking does not cover heads {sorted(missing)[:5]} of this model")
            if unknown := [tuple(head) for head in sorted(set(self.by.order) - set(anatomy.heads))[:5]]:
                wrong = f"{unknown}, which {anatomy.architecture} has not"
                raise NeedleworkError(f"{self.name}: the ranking has heads {wrong}; `needlework inspect` shows its heads")

    def lower(self, context: LoweringContext) -> Iterable[Act]:
        sizes = self._sizes(context.anatomy)
        if isinstance(self.by, str) and not self._static:
            for index, heads in sizes.items():
                if self.count(heads) < heads:
                    yield acts.KeepBest(index, self.count(heads), self.by, self.seed, self.sinks)
            return
        if isinstance(self.by, Recorded):
            raise NeedleworkError(
                f"{self}: the ranking {self.by.name!r} is not recorded yet; `needlework run` records those that a plan lists"
                " under rankings, elsewhere give the heads: by=ranking('2.0 5.11')"
            )
        order = [Head(index, i) for index, count in sizes.items() for i in range(count)]  # best first
        if isinstance(self.by, Ranking):
            rank = {head: i for i, head in enumerate(self.by.order)}
            order.sort(key=rank.__getitem__)
        else:
            order.sort(key=lambda head: acts.draw(self.seed, context.sample, *head))
        for group in [list(sizes)] if self.scope == "model" else [[index] for index in sizes]:
            members = [head for head in order if head.layer in group]
            zeroed = members[self.count(len(members)) :]
            for index in group:
                if heads_of_layer := _in_layer(zeroed, index):
                    yield acts.SilenceHeads(index, heads_of_layer)


def rankings(intervention: Intervention) -> list[Ranking]:
    """Return the rankings that an intervention uses."""
    return [part.by for part in intervention.parts if isinstance(part, KeepHeads) and isinstance(part.by, Ranking)]


def recorded(intervention: Intervention) -> list[Recorded]:
    """Return the rankings that an intervention uses and that have yet to be recorded."""
    return [part.by for part in intervention.parts if isinstance(part, KeepHeads) and isinstance(part.by, Recorded)]


def with_rankings(intervention: Intervention, known: Mapping[Recorded, Ranking | Recorded]) -> Intervention:
    """Return the intervention with the names of recorded rankings replaced by the known rankings."""
    parts = [
        part.model_copy(update={"by": known[part.by]})
        if isinstance(part, KeepHeads) and isinstance(part.by, Recorded) and part.by in known
        else part
        for part in intervention.parts
    ]
    return combine(parts)


@register
class AblateHeads(PartOfListed):
    """Ablate single heads: replace their outputs by zero, or by the mean that `nw.calibrate` measured.

    Attributes:
        heads: Pairs of (layer, head).
        value: What replaces their outputs: "zero" or "mean".
        means: Hash of the calibrated means, for value="mean".
        phase: "prefill", "decode" or "both".
        layers: Layers to act on, by the model's own index; None: all attention layers.
    """

    side = "attention"
    heads: Heads
    value: Literal["zero", "mean"] = "zero"
    means: str = ""

    def model_post_init(self, _: Any) -> None:
        if (self.value == "mean") != bool(self.means):
            raise NeedleworkError(f"{self.name}: value='mean' goes with means=HASH; nw.calibrate(subject, texts).hash gives it")

    def lower(self, context: LoweringContext) -> Iterable[Act]:
        for index in self.where(context.anatomy):
            yield acts.SilenceHeads(index, _in_layer(self.heads, index), self.means)


@register
class OnlyHeads(AblateHeads):
    """Ablate all heads but the given ones, in all attention layers or in `layers`; the complement of AblateHeads.

    Attributes:
        heads: Pairs of (layer, head) that are kept.
        value: What replaces the outputs of the others: "zero" or "mean".
        means: Hash of the calibrated means, for value="mean".
        phase: "prefill", "decode" or "both".
        layers: Layers to act on, by the model's own index; None: all attention layers.
    """

    def where(self, anatomy: Anatomy) -> tuple[int, ...]:
        return Part.where(self, anatomy)

    def lower(self, context: LoweringContext) -> Iterable[Act]:
        for index in self.where(context.anatomy):
            others = set(context.anatomy.layers[index].heads) - set(self.heads)
            if others:
                yield acts.SilenceHeads(index, frozenset(head.index for head in others), self.means)


@register
class AblateAttention(Part):
    """Ablate all heads. `site="heads"` keeps the bias of the output projection; `site="block"` removes it too.

    Attributes:
        site: "heads" or "block".
        phase: "prefill", "decode" or "both".
        layers: Layers to act on, by the model's own index; None: all attention layers.
    """

    side = "attention"
    site: Literal["heads", "block"] = "heads"

    def lower(self, context: LoweringContext) -> Iterable[Act]:
        for index in self.where(context.anatomy):
            everything = frozenset(range(context.anatomy.attention(index).query_heads))
            yield acts.DropOutputs(index, "attention") if self.site == "block" else acts.SilenceHeads(index, everything)


@register
class ExposeTokens(Part):
    """Change attention probabilities on or off a span of keys; combine one for prefill and one for decode with `+`.

    Attributes:
        mode: "keep" (no change), "omit" (no attention on the span), "only" (on nothing else), "null" (none at all), or
            "balanced" (only on the span, spread evenly over it and over heads).
        span: Name of a span of the prompt, or key positions.
        renormalize: Whether the remaining probabilities are divided by their sum.
        compat: "paper" repeats the authors' code with its off-by-one columns.
        phase: "prefill", "decode" or "both".
        layers: Layers to act on, by the model's own index; None: all attention layers.
    """

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
class LimitContext(PartOfListed):
    """Mask all keys but the last `tokens` (the query's own included) and the first `sinks`, in all heads or in some.

    Attributes:
        tokens: Number of last keys that stay visible.
        sinks: Number of first keys that stay visible.
        heads: Pairs of (layer, head) to limit; None: all.
        phase: "prefill", "decode" or "both".
        layers: Layers to act on, by the model's own index; None: all attention layers.
    """

    side = "attention"
    tokens: int = Field(ge=1)
    sinks: int = Field(0, ge=0)
    heads: Heads | None = None

    def lower(self, context: LoweringContext) -> Iterable[Act]:
        for index in self.where(context.anatomy):
            yield acts.LimitKeys(index, self.tokens, self.sinks, self.listed_in(index))


@register
class BlockAttention(PartOfListed):
    """Attention knockout: mask, before softmax, the keys of one span for the queries of another, in all heads or in some.

    A query's own key stays visible, so that no query is left without keys.

    Attributes:
        from_: Span or positions of the queries; `from` in text forms. None: all queries. "answer", if the prompt has no span of
            this name: the last prompt token and all tokens after it, from which the answer is predicted.
        to: Span or positions of the keys.
        heads: Pairs of (layer, head); None: all.
        phase: "prefill", "decode" or "both".
        layers: Layers to act on, by the model's own index; None: all attention layers.
    """

    side = "attention"
    from_: str | tuple[int, ...] | None = Field(None, alias="from")
    to: str | tuple[int, ...] = "needle"
    heads: Heads | None = None

    def clashes(self, other: Part) -> bool:
        return self == other  # what several of them block adds up

    def lower(self, context: LoweringContext) -> Iterable[Act]:
        keys, queries, first = context.positions(self.to), tuple[int, ...](), None
        if self.from_ is None:
            first = 0
        elif self.from_ == "answer" and "answer" not in context.spans:
            first = context.prompt_tokens - 1
        else:
            queries = context.positions(self.from_)
        for index in self.where(context.anatomy):
            yield acts.BlockEdges(index, queries, first, keys, self.listed_in(index))


# --- Recurrent mixers ---


def _check_site(part: Part, site: str, anatomy: Anatomy) -> None:
    """Raise if a mixer that a part acts on has no short convolution (`site="conv"`) or no recurrent state ("state")."""
    mixers = {index: mixer for index, mixer in anatomy.recurrent_parts() if index in part.where(anatomy)}
    lacks = {"conv": [i for i, x in mixers.items() if not x.taps], "state": [i for i, x in mixers.items() if not x.carries_state]}
    if without := lacks.get(site):
        what = "short convolution" if site == "conv" else "recurrent state"
        raise NeedleworkError(
            f"{part}: the mixers of layers {without} ({', '.join(sorted({mixers[i].mixer for i in without}))}) have no {what} of"
            " their own; choose another site, or other layers"
        )


@register
class AblateRecurrent(Part):
    """Ablate recurrent mixers: their memory across tokens ("memory", or only "conv" or "state"), or their output ("block").

    Attributes:
        site: "memory" cuts convolution and state, "conv" or "state" one of them; "block" zeroes the mixer's output.
        phase: "prefill", "decode" or "both".
        layers: Layers to act on, by the model's own index; None: all recurrent layers.
    """

    side = "recurrent"
    site: Literal["memory", "block", "conv", "state"] = "memory"

    def clashes(self, other: Part) -> bool:
        """Return whether two parts clash; "conv" and "state" do not: together they cut the whole memory."""
        apart = isinstance(other, AblateRecurrent) and {self.site, other.site} == {"conv", "state"}
        return not apart and super().clashes(other)

    def check(self, anatomy: Anatomy) -> None:
        super().check(anatomy)
        _check_site(self, self.site, anatomy)

    def lower(self, context: LoweringContext) -> Iterable[Act]:
        for index in self.where(context.anatomy):
            yield acts.DropOutputs(index, "mixers") if self.site == "block" else acts.CutMemory(index, self.site)


@register
class AblateRecurrentGroups(PartOfListed):
    """Ablate groups of a recurrent mixer (its heads, if it has heads): zero their channels before the output projection.

    Attributes:
        groups: Pairs of (layer, group).
        phase: "prefill", "decode" or "both".
        layers: Layers to act on, by the model's own index; None: all recurrent layers.
    """

    side = "recurrent"
    groups: Groups

    def lower(self, context: LoweringContext) -> Iterable[Act]:
        return (acts.SilenceGroups(index, _in_layer(self.groups, index)) for index in self.where(context.anatomy))


@register
class BlockRecurrent(PartOfListed):
    """Block what the tokens of a span give to later tokens through recurrent mixers, gates unchanged; each keeps its own output.

    Attributes:
        from_: With site="conv": span or positions of the later tokens that get nothing; `from` in text forms. None: all.
        to: Span or positions of the tokens whose contributions are blocked.
        site: "state": contributions through the recurrent state. "conv": through the short convolution before it.
        groups: With site="state": pairs of (layer, group) whose contributions are blocked; None: all.
        phase: Always "both": what a token does not write into the state, no later token finds there.
        layers: Layers to act on, by the model's own index; None: all recurrent layers.
    """

    side = "recurrent"
    from_: str | tuple[int, ...] | None = Field(None, alias="from")
    to: str | tuple[int, ...] = "needle"
    site: Literal["state", "conv"] = "state"
    groups: Groups | None = None

    def model_post_init(self, _: Any) -> None:
        if self.site == "state" and self.from_ is not None:
            raise NeedleworkError(f"{self.name}: a state is the same for all later tokens: from goes with site='conv'")
        if self.site == "conv" and self.groups is not None:
            raise NeedleworkError(f"{self.name}: the convolution also computes gates: groups go with site='state'")
        if self.phase != "both":
            raise NeedleworkError(f"{self.name}: it acts on the span and on all later tokens: drop phase")

    def clashes(self, other: Part) -> bool:
        """Return whether two parts clash: in one layer, a memory that is ablated gives nothing that could be blocked."""
        layers_meet = self.layers is None or other.layers is None or bool(set(self.layers) & set(other.layers))
        return self == other or (isinstance(other, AblateRecurrent) and layers_meet)  # what several of these block adds up

    def check(self, anatomy: Anatomy) -> None:
        super().check(anatomy)
        _check_site(self, self.site, anatomy)
        for index, part in anatomy.recurrent_parts():
            if index in self.where(anatomy) and self.site == "state" and not part.recurrence:
                raise NeedleworkError(
                    f"{self}: the state of layer {index} ({part.mixer}) is not known to be linear in what tokens write into it,"
                    " so that single tokens cannot be taken out; cut the memory instead: ablate_recurrent(site='state')"
                )

    def lower(self, context: LoweringContext) -> Iterable[Act]:
        sources = context.positions(self.to)
        queries = None if self.from_ is None else context.positions(self.from_)
        taps = {index: part.taps for index, part in context.anatomy.recurrent_parts()}
        for index in self.where(context.anatomy):
            if self.site == "state":
                yield acts.BlockSources(index, sources, self.listed_in(index))
                continue
            if queries is not None and not any(0 < query - source < taps[index] for query in queries for source in sources):
                raise NeedleworkError(
                    f"{self}: the convolution of layer {index} reaches back {taps[index] - 1} tokens, and no token of"
                    f" {self.from_!r} is that close after one of {self.to!r}"
                )
            yield acts.BlockTaps(index, sources, queries)


@register
class ResetState(Part):
    """Clear the recurrent state once: before the token at a position, or right after the last token of a span.

    Attributes:
        at: A position of the prompt from 1, or the name of a span.
        phase: "prefill", "decode" or "both".
        layers: Layers to act on, by the model's own index; None: all recurrent layers.
    """

    side = "recurrent"
    at: int | str = Field(union_mode="left_to_right")

    def clashes(self, other: Part) -> bool:
        return self == other  # resets at different positions may be combined

    def lower(self, context: LoweringContext) -> Iterable[Act]:
        cuts = {self.at} if isinstance(self.at, int) else set()
        if isinstance(self.at, str):
            context.positions(self.at)  # raises if there is no such span
            cuts = {end for _, end in context.spans[self.at]}
        if min(cuts) < 1:
            raise NeedleworkError(f"{self}: there is no memory before position 1; choose at >= 1")
        return (acts.ClearState(index, position) for position in sorted(cuts) for index in self.where(context.anatomy))


# --- The cache ---


@register
class SwapMemory(Part):
    """After prefill, take one half of the cache (kv or recurrent), or that of some layers, from a twin prompt of the same length.

    Attributes:
        half: "kv" or "recurrent".
        from_: Name of a twin of the request, or its token ids; `from` in text forms.
        at: Span or positions whose keys and values are swapped; None: those of all tokens. Only for half "kv".
        phase: Always "prefill": memory is swapped at its end.
        layers: Layers whose half is swapped, by the model's own index; None: the half of all layers.
    """

    side = "memory"
    half: Half
    from_: str | tuple[int, ...] = Field("twin", alias="from")
    at: str | tuple[int, ...] | None = None
    phase: When = "prefill"

    def clashes(self, other: Part) -> bool:
        """Return whether both swap the same half of a layer; they always act in one phase."""
        return isinstance(other, SwapMemory) and self.half == other.half and super().clashes(other)

    def check(self, anatomy: Anatomy) -> None:
        if self.phase != "prefill":
            raise NeedleworkError(f"{self}: it acts once, between prefill and decode: drop phase")
        if self.half == "recurrent" and self.at is not None:
            raise NeedleworkError(f"{self}: a recurrent state is one for all tokens, and has no part for some of them: drop at")
        own = [x.index for x in (anatomy.attention_layers if self.half == "kv" else anatomy.recurrent_layers)]
        if not own:
            raise NeedleworkError(f"{self}: {anatomy.architecture} has no {self.half} memory to swap")
        if wrong := sorted(set(self.layers or ()) - set(own)):
            raise NeedleworkError(
                f"{self}: layers {wrong} of {anatomy.architecture} have no {self.half} memory; choose from {own}"
            )

    def lower(self, context: LoweringContext) -> Iterable[Act]:
        if self.at is None:
            return (acts.SwapHalf(layer, self.half, self.from_) for layer in self.layers or (-1,))
        layers = self.layers or tuple(layer.index for layer in context.anatomy.attention_layers)
        positions = tuple(sorted(set(context.positions(self.at))))
        return (acts.SwapHalf(layer, self.half, self.from_, positions) for layer in layers)
