"""The table of ways to rank heads: each says of every head of a model how much retrieval owes to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import numpy as np

from needlework.tasks.base import Item

if TYPE_CHECKING:
    from needlework.subject import Subject

Kind = Literal["attention", "contribution", "causal", "learned"]  # what a method looks at; later ones cost more


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


@dataclass(frozen=True)
class Method:
    name: str
    kind: Kind
    about: str  # a sentence for tables: what it measures, and whose it is
    score: Score


METHODS: dict[str, Method] = {}
S = TypeVar("S", bound=Score)


def method(name: str, kind: Kind, about: str) -> Callable[[S], S]:
    """Make a way to rank heads known by its name."""

    def known(score: S) -> S:
        METHODS[name] = Method(name, kind, about, score)
        return score

    return known
