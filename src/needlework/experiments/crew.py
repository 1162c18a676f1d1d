"""Who answers a run's questions: a crew is handed units of work and gives replies. The smallest is a model in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from needlework.errors import NeedleworkError
from needlework.experiments.models import LoadedModel, ModelInfo, ModelSource
from needlework.heads.methods import Seen
from needlework.interventions import Ranking
from needlework.requests import Answer, Request
from needlework.tasks.base import Item

if TYPE_CHECKING:
    from needlework.checkup.findings import Checkup

Timed = tuple[int, Answer, float]  # which request, its answer, and the seconds since the answer before it


@dataclass(eq=False)
class Unit:
    """Questions that one model answers together: they share readings and batches, so that they never part."""

    requests: Sequence[Request]


@dataclass(frozen=True)
class Reply:
    """Answers of a unit, some or all of them. With the last one the unit is over; an error says what broke it."""

    unit: Unit
    answers: Sequence[Timed] = field(default=())
    over: bool = False
    error: Exception | None = None


Take = Callable[[], Unit | None]  # the next unit; none if there is none now: there may be one after the next reply


class Crew(Protocol):
    """One model, loaded once or many times.

    `share` says how much of a unit is done, from 0 to 1; without a unit, of what is watched.
    """

    def ask(self, take: Take) -> Generator[Reply, None, None]: ...
    def share(self, unit: Unit | None = None) -> float: ...
    def watch(self, requests: Sequence[Request], span: str) -> Sequence[Seen]: ...
    def rank(self, by: str, items: Sequence[Item], seed: int) -> Ranking: ...
    def checkup(self, quick: bool) -> Checkup | None: ...
    def versions(self) -> dict[str, str]: ...


class Hiring(Protocol):
    """How a run comes by its crews: one for each model, for at most so many units at a time."""

    def __call__(self, source: ModelSource, info: ModelInfo, units: int) -> AbstractContextManager[Crew]: ...


def timed(model: LoadedModel, requests: Sequence[Request]) -> Iterator[Timed]:
    last = time.monotonic()
    for i, answer in model.answers(requests) if requests else ():
        now = time.monotonic()
        yield i, answer, now - last
        last = now


def examined(model: LoadedModel, quick: bool) -> Checkup | None:
    """What the doctor finds; nothing where a source of one's own knows no doctor."""
    return model.checkup(quick) if hasattr(model, "checkup") else None


def ranked(model: LoadedModel, by: str, items: Sequence[Item], seed: int) -> Ranking:
    """Heads by a method that asks the model itself."""
    if not hasattr(model, "rank"):
        raise NeedleworkError(f"heads cannot be ranked by {by!r} here: the source of this model does not rank heads")
    ranking: Ranking = model.rank(by, items, seed)
    return ranking


class Alone:
    """One loaded model in this process: a unit after the other, and each answer as it comes."""

    def __init__(self, model: LoadedModel) -> None:
        self.model = model
        self.watch, self.versions = model.watch, model.versions
        self._share: Callable[[], float] = getattr(model, "share", float)  # without one, it is at 0 until an answer comes

    def ask(self, take: Take) -> Generator[Reply, None, None]:
        for unit in iter(take, None):
            try:
                for one in timed(self.model, unit.requests):
                    yield Reply(unit, [one])
            except Exception as error:
                yield Reply(unit, over=True, error=error)
            else:
                yield Reply(unit, over=True)

    def share(self, unit: Unit | None = None) -> float:
        return self._share()

    def rank(self, by: str, items: Sequence[Item], seed: int) -> Ranking:
        return ranked(self.model, by, items, seed)

    def checkup(self, quick: bool) -> Checkup | None:
        return examined(self.model, quick)


def alone(source: ModelSource, info: ModelInfo, units: int) -> AbstractContextManager[Crew]:
    """The model is loaded in this process."""
    return nullcontext(Alone(source.load(info)))
