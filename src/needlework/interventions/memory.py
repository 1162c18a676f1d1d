"""Interventions on recurrent mixers, and on the two halves of a model's cache (KV and recurrent state)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from needlework.anatomy import Anatomy, Group
from needlework.errors import NeedleworkError
from needlework.interventions import acts
from needlework.interventions.acts import Act, Half, LoweringContext
from needlework.interventions.base import Part, When, register
from needlework.interventions.ranking import as_heads


@register
class AblateRecurrent(Part):
    """Ablate recurrent mixers: their memory across tokens ("memory", or only "conv" or "state"), or their output ("block")."""

    side = "recurrent"
    site: Literal["memory", "block", "conv", "state"] = "memory"

    def clashes(self, other: Part) -> bool:
        """Return whether two parts clash; "conv" and "state" do not: together they cut the whole memory."""
        apart = isinstance(other, AblateRecurrent) and {self.site, other.site} == {"conv", "state"}
        return not apart and super().clashes(other)

    def check(self, anatomy: Anatomy) -> None:
        super().check(anatomy)
        parts = [(index, part) for index, part in anatomy.recurrent_parts() if index in self.where(anatomy)]
        lacking = {"conv": [i for i, part in parts if not part.taps], "state": [i for i, part in parts if not part.carries_state]}
        if without := lacking.get(self.site, []):
            mixers = sorted({part.mixer for index, part in parts if index in without})
            what = "short convolution" if self.site == "conv" else "recurrent state"
            raise NeedleworkError(
                f"{self}: the mixers of layers {without} ({', '.join(mixers)}) have no {what} of their own to cut; cut their"
                " memory, or choose other layers"
            )

    def lower(self, context: LoweringContext) -> Iterable[Act]:
        kinds: dict[str, type[Act]] = {
            "memory": acts.CutMemory,
            "block": acts.DropRecurrent,
            "conv": acts.CutConvolution,
            "state": acts.CutState,
        }
        for index in self.where(context.anatomy):
            yield kinds[self.site](index)


def _sorted_groups(value: Any) -> Any:
    return tuple(sorted({Group(*pair) for pair in as_heads(value, "group")}))


@register
class AblateRecurrentGroups(Part):
    """Ablate groups of a recurrent mixer (its heads, if it has heads): zero their channels before the output projection."""

    side = "recurrent"
    groups: Annotated[tuple[Group, ...], BeforeValidator(_sorted_groups)]

    def where(self, anatomy: Anatomy) -> tuple[int, ...]:
        return tuple(sorted({group.layer for group in self.groups}))

    def check(self, anatomy: Anatomy) -> None:
        super().check(anatomy)
        for index, part in anatomy.recurrent_parts():
            if index in self.where(anatomy) and not part.groups:
                raise NeedleworkError(f"{self}: the groups of layer {index} are not known: {part.no_groups_reason}")
        wrong = sorted(set(self.groups) - set(anatomy.groups))
        if wrong or not self.groups:
            raise NeedleworkError(
                f"{self.name}: no such groups {[tuple(group) for group in wrong]} in {anatomy.architecture};"
                " `needlework inspect` shows how many each layer has"
            )
        left_out = sorted(set(self.where(anatomy)) - set(self.layers or self.where(anatomy)))
        if left_out:
            raise NeedleworkError(f"{self}: names groups of layers {left_out}, which `layers` leaves out: drop layers")

    def lower(self, context: LoweringContext) -> Iterable[Act]:
        for index in self.where(context.anatomy):
            yield acts.SilenceGroups(index, frozenset(group.index for group in self.groups if group.layer == index))


@register
class ResetState(Part):
    """Clear the recurrent state once: before the token at a position, or right after the last token of a span."""

    side = "recurrent"
    at: int | str = Field(union_mode="left_to_right")

    def clashes(self, other: Part) -> bool:
        return self == other  # resets at different positions may be combined

    def lower(self, context: LoweringContext) -> Iterable[Act]:
        if isinstance(self.at, str):
            context.positions(self.at)  # raises if there is no such span
            cuts = {end for _, end in context.spans[self.at]}
        else:
            cuts = {self.at}
        if min(cuts) < 1:
            raise NeedleworkError(f"{self}: there is no memory before position 1; choose at >= 1")
        for position in sorted(cuts):
            for index in self.where(context.anatomy):
                yield acts.ClearState(index, position)


@register
class SwapMemory(Part):
    """After prefill, take one half of the cache (kv or recurrent) from a twin prompt of the same length."""

    side = "memory"
    half: Half
    from_: str | tuple[int, ...] = Field("twin", alias="from")
    phase: When = "prefill"

    def clashes(self, other: Part) -> bool:
        return isinstance(other, SwapMemory) and self.half == other.half

    def check(self, anatomy: Anatomy) -> None:
        if self.layers is not None or self.phase != "prefill":
            raise NeedleworkError(f"{self}: it acts once, between prefill and decode, on a whole half: drop layers and phase")
        if not (anatomy.attention_layers if self.half == "kv" else anatomy.recurrent_layers):
            raise NeedleworkError(f"{self}: {anatomy.architecture} has no {self.half} memory to swap")

    def lower(self, context: LoweringContext) -> Iterable[Act]:
        yield acts.SwapHalf(-1, self.half, self.from_)
