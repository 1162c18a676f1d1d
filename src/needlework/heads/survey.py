"""Everything about a model's heads in one go: rankings, how far to trust them, the smallest set, static against dynamic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from needlework.anatomy import Anatomy
from needlework.errors import NeedleworkError
from needlework.heads.agreement import Agreement, agreement, matrix
from needlework.heads.dynamic import Comparison, compare
from needlework.heads.judging import RANDOM, RANDOM_ORDERS, Curve, SmallestSet, curves, smallest_set
from needlework.heads.methods import Method
from needlework.heads.rank import Ranked, Steps, origin, rank_by
from needlework.heads.samples import Sample, check_count, check_heads, draw, untouched
from needlework.interventions.ranking import Origin, Ranking, jsonable
from needlework.stats import Estimate, accuracy
from needlework.tasks.base import Task

if TYPE_CHECKING:
    from needlework.subject import Subject

# What is measured on which samples: no number is judged on what it was chosen by.
RANKED, AGAIN, CHOSEN, JUDGED = 0, 1, 2, 3  # added to the seed
CHEAP = ("attention", "contribution")  # kinds of methods that are tried again on other samples: a look at each is enough


@dataclass(frozen=True)
class Settings:
    """How much is measured."""

    samples: int = 60  # that heads are ranked on
    held_out: int = 120  # that rankings are judged on, and as many again for what is chosen by that
    seed: int = 0
    keep: float = 0.99  # of retrieval, by the smallest set
    share: float = 0.15  # of the heads of each layer, static against dynamic
    judge: bool = True
    dynamic: bool = True
    retest: bool = True
    random_orders: int = RANDOM_ORDERS  # the floor that curves are held against

    def __post_init__(self) -> None:
        for count in (self.samples, self.held_out):
            check_count(count)
        if not 0 < self.keep <= 1:
            raise NeedleworkError(f"keep={self.keep} is the share of retrieval that is left; it lies above 0 and is at most 1")
        if not 0 < self.share <= 1:
            raise NeedleworkError(f"share={self.share} of the heads must lie above 0 and be at most 1")


@dataclass(frozen=True)
class Retest:
    """A ranking against itself: of two halves of its samples, and of other samples."""

    halves: Agreement | None
    other_seed: Agreement | None


@dataclass
class Survey:
    """What was found out about a model's heads."""

    model: Origin
    anatomy: Anatomy
    settings: Settings
    tasks: list[str]
    baseline: Estimate
    rankings: dict[str, Ranking] = field(default_factory=dict)
    retests: dict[str, Retest] = field(default_factory=dict)
    curves: dict[str, Curve] = field(default_factory=dict)
    smallest: SmallestSet | None = None
    dynamic: Comparison | None = None

    @property
    def agreements(self) -> dict[str, dict[str, Agreement]]:
        return matrix(self.rankings)

    @property
    def best(self) -> str:
        """The ranking with the largest area on held-out samples; the first one if nothing was judged."""
        return max(self.rankings, key=lambda name: self.curves[name].area.value if name in self.curves else 0.0)

    def to_dict(self) -> dict[str, Any]:
        floor = self.curves.get(RANDOM)
        found = {
            "format": "needlework heads",
            "version": 1,
            "model": self.model.model_dump(),
            "heads": len(self.anatomy.heads),
            "attention_layers": [layer.index for layer in self.anatomy.attention_layers],
            "settings": asdict(self.settings),
            "tasks": self.tasks,
            "untouched": asdict(self.baseline),
            "rankings": {name: ranking.to_dict() for name, ranking in self.rankings.items()},
            "retest": {name: asdict(found) for name, found in self.retests.items()},
            "agreement": {a: {b: found.to_dict() for b, found in row.items()} for a, row in self.agreements.items()},
            "curves": {name: curve.to_dict() for name, curve in self.curves.items()},
            "above_random": {name: asdict(c.above(floor)) for name, c in self.curves.items() if floor and name != RANDOM},
            "best": self.best if self.curves else None,
            "smallest_set": self.smallest.to_dict() if self.smallest else None,
            "static_or_dynamic": self.dynamic.to_dict() if self.dynamic else None,
        }
        plain: dict[str, Any] = jsonable(found)
        return plain


def survey(
    subject: Subject,
    tasks: Sequence[Task],
    methods: Sequence[Method],
    settings: Settings,
    *,
    given: Mapping[str, Ranking] = {},
    name: str = "",
    shown: bool = True,
) -> Survey:
    """Rank the heads by each method, put the rankings that are `given` beside them, and judge all of them."""
    if not methods and not given:
        raise NeedleworkError("give at least one method to rank heads by, or a ranking to be judged")
    ranked = _Samples(subject, tasks, settings)
    check_heads(subject)
    for label, ranking in given.items():
        ranking.check(subject.anatomy, subject.body.weights)
        if ranking.seed in (settings.seed + CHOSEN, settings.seed + JUDGED):
            raise NeedleworkError(
                f"{label}: this ranking is of samples of seed {ranking.seed}, which it would be judged on; give another --seed"
            )
    again = [method for method in methods if settings.retest and method.kind in CHEAP]
    with Steps(1 + len(methods) + len(again) + 2 * settings.judge + settings.dynamic, shown) as steps:
        with steps.step("asking the untouched model") as progress:
            samples = ranked.at(RANKED)
            right = untouched(subject, samples, progress)
        of = origin(subject, name)
        found = Survey(of, subject.anatomy, settings, [task.kind for task in tasks], accuracy(right))
        for method in methods:
            with steps.step(f"ranking by {method.name}") as progress:
                one = rank_by(subject, method, samples, settings.seed, progress, of)
            found.rankings[method.name] = one.ranking
            found.retests[method.name] = Retest(_halves(one), None)
        found.rankings |= given
        for method in again:
            with steps.step(f"again by {method.name}") as progress:
                second = rank_by(subject, method, ranked.at(AGAIN), settings.seed + AGAIN, progress, of)
            both = agreement(found.rankings[method.name], second.ranking)
            found.retests[method.name] = Retest(found.retests[method.name].halves, both)
        if settings.judge:
            with steps.step("judging rankings") as progress:
                found.curves = curves(subject, found.rankings, ranked.at(CHOSEN), progress, settings.random_orders)
            found.smallest = _smallest(subject, found, ranked, settings.keep, steps)
        if settings.dynamic:
            with steps.step("static or dynamic") as progress:
                best = found.rankings[found.best]
                where = (samples, ranked.at(JUDGED), settings.share)
                found.dynamic = compare(subject, best, *where, progress)
    return found


class _Samples:
    """The samples of each purpose, drawn when they are first asked for."""

    def __init__(self, subject: Subject, tasks: Sequence[Task], settings: Settings) -> None:
        self.subject, self.tasks, self.settings = subject, tasks, settings
        self._drawn: dict[int, list[Sample]] = {}

    def at(self, purpose: int) -> list[Sample]:
        if purpose not in self._drawn:
            count = self.settings.samples if purpose in (RANKED, AGAIN) else self.settings.held_out
            taken = {sample.item.prompt for drawn in self._drawn.values() for sample in drawn}  # some tasks know no seeds
            self._drawn[purpose] = draw(self.subject, self.tasks, count, self.settings.seed + purpose, taken)
        return self._drawn[purpose]


def _halves(ranked: Ranked) -> Agreement | None:
    first, second = ranked.half(odd=False), ranked.half(odd=True)
    return agreement(first, second) if first and second else None


def _smallest(subject: Subject, found: Survey, ranked: _Samples, keep: float, steps: Steps) -> SmallestSet:
    with steps.step("looking for the smallest set") as progress:
        judged = [found.curves[name] for name in found.rankings]
        best = min(judged, key=lambda curve: (curve.smallest(keep), -curve.area.value)).name
        return smallest_set(
            subject, found.rankings[best], found.curves[best], ranked.at(CHOSEN), ranked.at(JUDGED), keep, progress
        )
