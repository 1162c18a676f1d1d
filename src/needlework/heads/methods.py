"""The table of ways to rank heads: each says of every head of a model how much retrieval owes to it."""

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

Kind = Literal["attention", "contribution", "causal", "learned"]  # what a method looks at; later ones cost more
MODULES = (  # of this package that register methods; imported when the table is asked for
    "attention",
    "contribution",
    "causal",
    "coalitions",
    "gates",
)


@dataclass(frozen=True)
class Scores:
    """What a method says of each head, in the order of `subject.anatomy.heads`; more is better.

    A method that looks at one sample at a time says what it saw in each: their mean is the score, and two halves of them are
    two rankings to compare. One that can only look at all samples at once has none of each.
    """

    values: np.ndarray  # [heads]
    each: np.ndarray | None = None  # [samples, heads]
    evidence: Mapping[str, Any] = field(default_factory=dict)  # what else it counted, ready for JSON

    @classmethod
    def of_samples(cls, each: np.ndarray, **evidence: Any) -> Scores:
        return cls(each.mean(0), each, evidence)


class Score(Protocol):
    """Scores every head of a subject on samples of a retrieval task whose answers are known."""

    def __call__(self, subject: Subject, items: Sequence[Item], *, seed: int, progress: Callable[[float], None]) -> Scores:
        """`progress` is told the share that is done, from 0 to 1; `seed` decides whatever is drawn."""


class Seen(Protocol):
    """What one head looked at while the model answered, summed over all that was asked."""

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
    name: str
    kind: Kind
    about: str  # a sentence for tables: what it measures, and whose it is
    score: Score
    of_seen: Callable[[Seen], float] | None = None  # the same from what `nw.observe` sums up, if that is enough to know it


METHODS: dict[str, Method] = {}
S = TypeVar("S", bound=Score)


def method(name: str, kind: Kind, about: str, of_seen: Callable[[Seen], float] | None = None) -> Callable[[S], S]:
    """Make a way to rank heads known by its name."""

    def known(score: S) -> S:
        METHODS[name] = Method(name, kind, about, score, of_seen)
        return score

    return known


def table() -> dict[str, Method]:
    """All methods by name, in the order of their kinds."""
    for name in MODULES:
        import_module(f"{__package__}.{name}")
    kinds = ("attention", "contribution", "causal", "learned")
    return {m.name: m for m in sorted(METHODS.values(), key=lambda m: kinds.index(m.kind))}


def chosen(names: Iterable[str]) -> list[Method]:
    """The methods of these names, each once; what is no method is an error with the nearest one."""
    wanted = list(dict.fromkeys(names))
    for module in MODULES:
        if not set(wanted) <= METHODS.keys():  # those that look at attention come first, and bring no torch
            import_module(f"{__package__}.{module}")
    for name in wanted:
        if name not in METHODS:
            raise NeedleworkError(f"heads are not ranked by {name!r}; {did_you_mean(name, METHODS)}")
    return [METHODS[name] for name in wanted]
