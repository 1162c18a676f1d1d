"""Interventions on the recurrent side, and on the two halves of a model's memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from pydantic import Field

from needlework.anatomy import Anatomy
from needlework.errors import NeedleworkError
from needlework.interventions import acts
from needlework.interventions.acts import Act, Half, Scene
from needlework.interventions.base import Part, When, register


@register
class AblateRecurrent(Part):
    """Switch the recurrent side off: its memory (each token is read alone), or its whole contribution."""

    side = "recurrent"
    site: Literal["memory", "block"] = "memory"

    def stands_for(self, scene: Scene) -> Iterable[Act]:
        for index in self.where(scene.anatomy):
            yield acts.CutMemory(index) if self.site == "memory" else acts.DropRecurrent(index)


@register
class ResetState(Part):
    """Empty the recurrent memory once: before the token at a position, or right after the last token of a span."""

    side = "recurrent"
    at: int | str = Field(union_mode="left_to_right")

    def clashes(self, other: Part) -> bool:
        return self == other  # several resets at several places are one experiment

    def stands_for(self, scene: Scene) -> Iterable[Act]:
        if isinstance(self.at, str):
            scene.positions(self.at)  # raises if there is no such span
            cuts = {end for _, end in scene.spans[self.at]}
        else:
            cuts = {self.at}
        if min(cuts) < 1:
            raise NeedleworkError(f"{self}: there is no memory before position 1; choose at >= 1")
        for position in sorted(cuts):
            for index in self.where(scene.anatomy):
                yield acts.ClearState(index, position)


@register
class SwapMemory(Part):
    """After prefill, take one half of the memory from a twin prompt of the same length."""

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

    def stands_for(self, scene: Scene) -> Iterable[Act]:
        yield acts.SwapHalf(-1, self.half, self.from_)
