"""An order of heads, best first, from whatever measured it; or the name of one that a run has yet to record."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, field_validator

from needlework.anatomy import Head
from needlework.errors import NeedleworkError


class Recorded(BaseModel):
    """A ranking that a plan names and its run records before it is needed.

    `content` is a hash of what it is recorded from: with the model it decides the order, so that a trial has its id before
    the order is known. A plan's text leaves it out: `keep_heads(k=2, by=recorded('needle_mass'))`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str
    content: str = ""

    def text(self) -> str:
        return f"recorded({', '.join(repr(part) for part in (self.name, self.content) if part)})"


class Ranking(BaseModel):
    """Heads from best to worst. A value: it compares by order and has a text form that `parse` reads."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    order: tuple[Head, ...]

    @field_validator("order", mode="before")
    @classmethod
    def _heads(cls, value: Any) -> tuple[Head, ...]:
        heads = tuple(Head(*pair) for pair in value)
        if len(set(heads)) != len(heads):
            raise NeedleworkError("ranking: a head occurs twice")
        return heads

    def text(self) -> str:
        return "ranking('" + " ".join(f"{head.layer}.{head.index}" for head in self.order) + "')"

    @classmethod
    def parse(cls, text: str) -> Ranking:
        try:
            return cls(order=tuple(Head(*(int(n) for n in word.split("."))) for word in text.split()))
        except (TypeError, ValueError) as error:
            raise NeedleworkError(f"ranking: expected words such as '2.0 5.11' (layer.head, best first), got {text!r}") from error
