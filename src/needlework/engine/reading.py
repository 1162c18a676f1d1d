"""What the engine reads: a prompt, or its beginning, under one request's prefill acts; and how many are read in one forward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from needlework.model.body import Body
from needlework.model.memory import Memory
from needlework.receipts import Receipt
from needlework.requests import Prepared

_FORWARD_FLOPS = {"cpu": 6e7, "cuda": 2e11}  # what a device could have computed in the fixed time that a forward takes
PIECE_TOKENS = {"cpu": 4096}  # of one forward: with more, activations leave the caches, and fresh pages cost more than they save
T = TypeVar("T")


@dataclass(frozen=True)
class Reading:
    """A prompt, or its beginning, to be read under one request's prefill acts."""

    item: Prepared
    tokens: tuple[int, ...]

    @property
    def key(self) -> tuple[object, ...]:
        return (self.tokens, *self.item.group[1:])


def readings_of(item: Prepared) -> dict[str, Reading]:
    """What a request needs read: its own prompt, and the twin that a half of its memory comes from."""
    tokens = item.prefill_tokens
    own = {"own": Reading(item, item.request.prompt[:tokens])}
    return own | {half: Reading(item, twin[:tokens]) for half, twin in item.twins.items()}


@dataclass
class Read:
    """Readings of one length that are done: row i of the memory belongs to reading i."""

    memory: Memory | None  # None where nothing will go on from it
    logits: Tensor  # [readings, vocabulary] after the last token
    receipts: list[Receipt]


def group(items: Sequence[Prepared]) -> tuple[list[Reading], list[Mapping[str, int]]]:
    """The distinct readings that requests of one length need, and for each request the places among them of those it needs."""
    place_of: dict[tuple[object, ...], int] = {}
    readings: list[Reading] = []
    places: list[Mapping[str, int]] = []
    for item in items:
        place = {}
        for name, reading in readings_of(item).items():
            if reading.key not in place_of:
                place_of[reading.key] = len(readings)
                readings.append(reading)
            place[name] = place_of[reading.key]
        places.append(place)
    return readings, places


def forward_tokens(body: Body) -> float:
    """What the fixed cost of one more forward is worth, in tokens."""
    return _FORWARD_FLOPS.get(body.device.type, 1e9) / (2 * body.anatomy.parameters)


def watched(body: Body) -> bool:
    """Whether someone sees every row in every layer: an observer, or hooks of others."""
    if body.observer is not None:
        return True
    return any(module._forward_hooks or module._forward_pre_hooks for module in body.model.modules())


def by_pieces(members: Sequence[T], tokens: int, body: Body) -> Iterator[list[T]]:
    """Readings of so many tokens each, as many at a time as one forward takes best. What watches is shown all at once."""
    most = PIECE_TOKENS.get(body.device.type)
    step = len(members) if most is None or body.observer is not None else max(1, most // max(1, tokens))
    for first in range(0, len(members), max(1, step)):
        yield list(members[first : first + step])
