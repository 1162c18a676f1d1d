"""Registry of the methods that score attention heads by their role in retrieval."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import numpy as np

from needlework.errors import NeedleworkError, did_you_mean
from needlework.tasks.base import Item

if TYPE_CHECKING:
    from needlework.subject import Subject

Kind = Literal["attention", "contribution", "causal", "learned"]  # what a method uses; later kinds cost more
MODULES = (  # modules of this package that register methods; imported on demand
    "attention",
    "contribution",
    "causal",
    "coalitions",
)


@dataclass(frozen=True)
class Scores:
    """Scores of all heads by one method, in the order of `subject.anatomy.heads`; higher is better.

    Methods that score samples separately also give per-sample scores, which intervals and split-half agreement are computed
    from. `values` is their mean, or for ratios the ratio of sums over all samples.
    """

    values: np.ndarray  # [heads]
    each: np.ndarray | None = None  # [samples, heads]
    evidence: Mapping[str, Any] = field(default_factory=dict)  # further results for the ranking file, JSON-compatible

    @classmethod
    def of_samples(cls, each: np.ndarray, **evidence: Any) -> Scores:
        return cls(each.mean(0), each, evidence)


class Score(Protocol):
    """Function that scores every head of a model on samples of a retrieval task with known answers."""

    def __call__(self, subject: Subject, items: Sequence[Item], *, seed: int, progress: Callable[[float], None]) -> Scores:
        """Score the heads; `progress` is called with the share that is done, `seed` sets random draws."""


class Seen(Protocol):
    """Row of `nw.observe`'s table: attention statistics of one head over all requests."""

    @property
    def layer(self) -> int: ...
    @property
    def head(self) -> int: ...
    @property
    def needle_mass(self) -> float: ...
    @property
    def entropy(self) -> float: ...
    @property
    def copy_score(self) -> float: ...
    @property
    def sink_mass(self) -> float: ...
    @property
    def sink_mass_of_best(self) -> float: ...


@dataclass(frozen=True)
class Method:
    """A registered method."""

    name: str
    kind: Kind
    about: str  # one phrase for tables: what it measures, and its source
    score: Score
    of_seen: Callable[[Seen], float] | None = None  # computes the same score from a row of `nw.observe`, where possible


METHODS: dict[str, Method] = {}
S = TypeVar("S", bound=Score)


def method(name: str, kind: Kind, about: str, of_seen: Callable[[Seen], float] | None = None) -> Callable[[S], S]:
    """Return a decorator that registers a scoring function as a method."""

    def known(score: S) -> S:
        METHODS[name] = Method(name, kind, about, score, of_seen)
        return score

    return known


def table() -> dict[str, Method]:
    """Return all methods by name, ordered by kind."""
    for name in MODULES:
        import_module(f"{__package__}.{name}")
    kinds = ("attention", "contribution", "causal", "learned")
    return {m.name: m for m in sorted(METHODS.values(), key=lambda m: kinds.index(m.kind))}


def chosen(names: Iterable[str]) -> list[Method]:
    """Return the methods with these names, without duplicates; raise for an unknown name."""
    wanted = list(dict.fromkeys(names))
    for module in MODULES:
        if not set(wanted) <= METHODS.keys():  # attention methods come first and do not import torch
            import_module(f"{__package__}.{module}")
    for name in wanted:
        if name not in METHODS:
            raise NeedleworkError(f"heads are not ranked by {name!r}; {did_you_mean(name, METHODS)}")
    return [METHODS[name] for name in wanted]
