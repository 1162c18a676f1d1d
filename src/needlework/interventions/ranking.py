"""An order of heads, best first, from whatever measured it; or the name of one that a run has yet to record."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from needlework.anatomy import Head
from needlework.errors import NeedleworkError, check_plain, shown


def as_heads(value: Any, what: str = "head") -> list[Head]:
    """Heads (or what else has a layer and a number in it) from pairs of whole numbers."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise NeedleworkError(f"{what}s are a list of [layer, {what}] pairs, e.g. [[2, 0], [5, 11]], not {shown(value)}")
    heads = []
    for pair in value:
        if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2:
            raise NeedleworkError(f"a {what} is a pair [layer, {what}], e.g. [2, 0], not {shown(pair)}")
        if not all(isinstance(number, (int, float)) for number in pair):
            raise NeedleworkError(f"layer and {what} are whole numbers, e.g. [2, 0], not {shown(pair)}")
        heads.append(Head(*pair))
    return heads


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
        heads = tuple(as_heads(value))
        if len(set(heads)) != len(heads):
            raise NeedleworkError("ranking: a head occurs twice")
        return heads

    def __init__(self, **fields: Any) -> None:
        check_plain(fields)
        try:
            super().__init__(**fields)
        except ValidationError as error:
            fault = error.errors()[0]
            message = fault["msg"].removeprefix("Value error, ")
            raise NeedleworkError(f"ranking: {message.removeprefix('ranking: ')} (got {shown(fault['input'])})") from None

    def text(self) -> str:
        return "ranking('" + " ".join(f"{head.layer}.{head.index}" for head in self.order) + "')"

    @classmethod
    def parse(cls, text: str) -> Ranking:
        try:
            order = [Head(*(int(n) for n in word.split("."))) for word in text.split()]
        except (AttributeError, TypeError, ValueError):
            raise NeedleworkError(
                f"ranking: expected words such as '2.0 5.11' (layer.head, best first), got {shown(text)}"
            ) from None
        return cls(order=order)
