"""The methods that score attention heads by their role in retrieval: their registry, and those that observe attention.

torch is imported only when heads are scored, so that a plan can name methods without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, get_args

import numpy as np

from needlework.errors import NeedleworkError, did_you_mean
from needlework.measure import Progress
from needlework.tasks.base import Item

if TYPE_CHECKING:
    from needlework.observation import HeadRow
    from needlework.subject import Subject

MethodKind = Literal["attention", "contribution", "causal", "learned", "role"]  # what a method uses; later kinds cost more
ROLES = ("gather", "aggregate")  # methods of kind "role", which say what a head does and are no rankings by default
MODULES = ("contribution", "causal")  # further modules of this package that register methods; imported on demand


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


class ScoreFunction(Protocol):
    """Function that scores every head of a model on samples of a retrieval task with known answers."""

    def __call__(self, subject: Subject, items: Sequence[Item], *, seed: int, progress: Progress) -> Scores:
        """Score the heads; `progress` is called with the share that is done, `seed` sets random draws."""


@dataclass(frozen=True)
class Method:
    """A registered method."""

    name: str
    kind: MethodKind
    about: str  # one phrase for tables: what it measures, and its source
    score: ScoreFunction
    of_row: Callable[[HeadRow], float] | None = None  # computes the same score from a row of `nw.observe`, where possible


METHODS: dict[str, Method] = {}
S = TypeVar("S", bound=ScoreFunction)


def method(name: str, kind: MethodKind, about: str, of_row: Callable[[HeadRow], float] | None = None) -> Callable[[S], S]:
    """Return a decorator that registers a scoring function as a method."""

    def register(score: S) -> S:
        METHODS[name] = Method(name, kind, about, score, of_row)
        return score

    return register


def all_methods() -> dict[str, Method]:
    """Return all methods by name, ordered by kind."""
    for name in MODULES:
        import_module(f"{__package__}.{name}")
    kinds = get_args(MethodKind)
    return {m.name: m for m in sorted(METHODS.values(), key=lambda m: kinds.index(m.kind))}


def find_methods(names: Iterable[str]) -> list[Method]:
    """Return the methods with these names, without duplicates; raise for an unknown name."""
    wanted = list(dict.fromkeys(names))
    known = METHODS if set(wanted) <= METHODS.keys() else all_methods()
    for name in wanted:
        if name not in known:
            raise NeedleworkError(f"heads are not ranked by {name!r}; {did_you_mean(name, known)}")
    return [known[name] for name in wanted]


def _ratio(top: str, bottom: str, sign: float = 1.0) -> ScoreFunction:
    """Return a function that scores heads by the ratio of two sums of `AttentionSums`, over all samples and for each one.

    `sign` is -1 where lower values are better.
    """

    def score(subject: Subject, items: Sequence[Item], *, seed: int, progress: Progress) -> Scores:
        from needlework.heads.observers import observe_samples

        sums = observe_samples(subject, items, progress)
        tops, bottoms = sums.all_heads(top), sums.all_heads(bottom)  # [samples, heads]
        values = tops.sum(0) / np.maximum(bottoms.sum(0), 1e-300)
        evidence = {"copied_tokens": int(bottoms[:, 0].sum())} if bottom == "copied" else {}
        return Scores(sign * values, sign * tops / np.maximum(bottoms, 1e-300), evidence)

    return score


_ABOUT_COPIES = "looks most at the very needle token that is being said (Wu et al. 2024)"
_ABOUT_QUESTION = "attention from the question to the needle while reading, less that of an empty question (QRHead)"
_ABOUT_ENTROPY = "looks at few tokens while answering (negative entropy)"
_ABOUT_NO_SINK = "the same of its attention beside the first token, which many heads rest on"

method("needle_mass", "attention", "attention on the needle while answering", lambda row: row.needle_mass)(
    _ratio("needle_mass", "queries")
)
method("copy_score", "attention", _ABOUT_COPIES, lambda row: row.copy_score)(_ratio("copies", "copied"))


@method("question_mass", "attention", _ABOUT_QUESTION)
def question_mass(subject: Subject, items: Sequence[Item], *, seed: int, progress: Progress) -> Scores:
    """Score a head by the mean attention of question tokens on the needle, minus that of a question without content."""
    from needlework.heads.observers import observe_samples

    asked = observe_samples(subject, items, lambda share: progress(share / 2))
    null = observe_samples(subject, items, lambda share: progress(0.5 + share / 2), null=True)
    shares = [sums.all_heads("question_mass") / np.maximum(sums.all_heads("question_tokens"), 1) for sums in (asked, null)]
    return Scores.of_samples(shares[0] - shares[1], with_question=shares[0].mean(0).tolist())


method("entropy", "attention", _ABOUT_ENTROPY, lambda row: -row.entropy)(_ratio("entropy", "queries", sign=-1.0))
method("entropy_no_sink", "attention", _ABOUT_NO_SINK)(_ratio("entropy_no_sink", "queries", sign=-1.0))
method("gather", "role", "attention from the needle's last token to the rest of the needle (Bick et al. 2025)")(
    _ratio("gathered", "ends")
)
method("aggregate", "role", "attention from the prompt's last token to the needle's last token (Bick et al. 2025)")(
    _ratio("aggregated", "lasts")
)
