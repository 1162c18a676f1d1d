"""Rank the heads of a model by several methods, and evaluate the rankings on held-out samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from needlework.anatomy import Anatomy, Head
from needlework.errors import NeedleworkError
from needlework.heads.dynamic import Comparison, compare_selections
from needlework.heads.evaluation import (
    RANDOM,
    RANDOM_ORDERS,
    Agreement,
    Curve,
    SmallestSet,
    compare_all_rankings,
    compare_rankings,
    evaluate_rankings,
    smallest_set,
)
from needlework.heads.methods import Method, Scores
from needlework.heads.samples import check_count, check_heads, draw_samples, measure_baseline, sample_clusters
from needlework.interventions.ranking import Origin, Ranking, jsonable
from needlework.measure import Progress, Sample
from needlework.stats import Estimate, accuracy, cluster_sums, resample
from needlework.tasks.base import Task
from needlework.terminal import Bar

if TYPE_CHECKING:
    from needlework.subject import Subject

DRAWS = 2000


@dataclass(frozen=True)
class Ranked:
    """A ranking with the scores that it is computed from."""

    ranking: Ranking
    scores: Scores
    heads: tuple[Head, ...]  # head of each score

    def half(self, odd: bool) -> Ranking | None:
        """Return the ranking by every second sample; None for methods without per-sample scores."""
        each = self.scores.each
        if each is None or len(each) < 2:
            return None
        return Ranking.by_scores(_by_head(self.heads, each[int(odd) :: 2].mean(0)))


class ProgressSteps:
    """Progress bar over steps of unequal length, each of which reports its own share."""

    def __init__(self, count: int, shown: bool) -> None:
        self.bar = Bar(count, "steps", shown=shown)
        self._share = 0.0

    def __enter__(self) -> ProgressSteps:
        self.bar.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.__exit__(*error)

    @contextmanager
    def step(self, name: str) -> Iterator[Progress]:
        self._share = 0.0
        self.bar.show(name, lambda: self._share)

        def progress(share: float) -> None:
            self._share = min(1.0, share)

        yield progress
        self._share = 0.0
        self.bar.advance()


def origin(subject: Subject, name: str = "") -> Origin:
    """Return the description of the model that ranking files record."""
    source = subject.body.source
    named = name or (Path(source).name if source else "")
    return Origin(name=named, architecture=subject.anatomy.architecture, weights=subject.body.weights)


def rank_by(subject: Subject, method: Method, samples: Sequence[Sample], seed: int, progress: Progress, of: Origin) -> Ranked:
    """Rank the model's heads by a method; raise if it does not return one finite score for each head."""
    items, heads = [sample.item for sample in samples], subject.anatomy.heads
    scores = method.score(subject, items, seed=seed, progress=progress)
    if scores.values.shape != (len(heads),) or not np.isfinite(scores.values).all():
        raise NeedleworkError(
            f"the method {method.name!r} gave scores of shape {scores.values.shape}, or none that are numbers; it must give one"
            f" finite number for each of the {len(heads)} heads"
        )
    ranking = Ranking.by_scores(
        _by_head(heads, scores.values),
        method=method.name,
        model=of,
        task=" + ".join(dict.fromkeys(sample.task.kind for sample in samples)),
        samples=len(samples),
        seed=seed,
        evidence={**scores.evidence, "intervals": _intervals(scores, samples, heads)},
    )
    return Ranked(ranking, scores, heads)


def _by_head(heads: Sequence[Head], values: np.ndarray) -> dict[Head, float]:
    return {head: float(value) for head, value in zip(heads, values, strict=True)}


def _intervals(scores: Scores, samples: Sequence[Sample], heads: Sequence[Head]) -> dict[str, list[float]]:
    """Return 95 % intervals of each head's mean per-sample score, by a cluster bootstrap; empty without per-sample scores."""
    if scores.each is None or len(scores.each) < 2:
        return {}
    used = scores.evidence.get("used", range(len(samples)))
    names = sample_clusters([samples[i] for i in used])
    if len(names) != len(scores.each):  # per-sample scores that do not match the samples: no clusters are known
        names = [str(i) for i in range(len(scores.each))]
    totals = resample(cluster_sums(names, list(scores.each.T)), draws=DRAWS)
    low, high = np.quantile(totals[:, :-1] / totals[:, -1:], [0.025, 0.975], axis=0)
    return {f"{h.layer}.{h.index}": [float(low[i]), float(high[i])] for i, h in enumerate(heads)}


# Offsets to the seed: each purpose has its own samples, so that nothing is evaluated on the samples it was chosen by.
RANKED, AGAIN, CHOSEN, JUDGED = 0, 1, 2, 3
CHEAP = ("attention", "contribution")  # kinds of methods that are run a second time, on other samples


@dataclass(frozen=True)
class Settings:
    """Settings of a survey: numbers of samples, and what is measured."""

    samples: int = 60  # to rank heads on
    held_out: int = 120  # to evaluate rankings on, and as many again to measure what is chosen by that
    seed: int = 0
    keep: float = 0.99  # share of retrieval that the smallest set must retain
    share: float = 0.15  # of the heads of each layer, in the comparison of static and dynamic selection
    judge: bool = True
    dynamic: bool = True
    retest: bool = True
    random_orders: int = RANDOM_ORDERS  # for the baseline curve

    def __post_init__(self) -> None:
        for count in (self.samples, self.held_out):
            check_count(count)
        if not 0 < self.keep <= 1:
            raise NeedleworkError(f"keep={self.keep} is the share of retrieval that is left; it lies above 0 and is at most 1")
        if not 0 < self.share <= 1:
            raise NeedleworkError(f"share={self.share} of the heads must lie above 0 and be at most 1")


@dataclass(frozen=True)
class Retest:
    """Agreement of a method with itself: on two halves of its samples, and on other samples."""

    halves: Agreement | None
    other_seed: Agreement | None


@dataclass
class Survey:
    """Rankings of a model's heads, and their evaluation."""

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
        return compare_all_rankings(self.rankings)

    @property
    def best(self) -> str:
        """Name of the ranking with the largest area on held-out samples; the first one if nothing was evaluated."""
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
    """Rank the heads by each method, and evaluate these rankings and the given ones.

    Args:
        subject: The model.
        tasks: Retrieval tasks that samples are drawn from.
        methods: Methods to rank by; cheap ones are run again on other samples if `settings.retest`.
        settings: Numbers of samples, and what is measured.
        given: Rankings by name that are evaluated, too. Their seed must differ from those of the held-out samples.
        name: Name of the model in results; by default that of its directory.
        shown: Whether to show a progress bar.
    """
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
    with ProgressSteps(1 + len(methods) + len(again) + 2 * settings.judge + settings.dynamic, shown) as steps:
        with steps.step("asking the untouched model") as progress:
            samples = ranked.at(RANKED)
            right = measure_baseline(subject, samples, progress)
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
            both = compare_rankings(found.rankings[method.name], second.ranking)
            found.retests[method.name] = Retest(found.retests[method.name].halves, both)
        if settings.judge:
            with steps.step("judging rankings") as progress:
                found.curves = evaluate_rankings(subject, found.rankings, ranked.at(CHOSEN), progress, settings.random_orders)
            found.smallest = _smallest(subject, found, ranked, settings.keep, steps)
        if settings.dynamic:
            with steps.step("static or dynamic") as progress:
                best = found.rankings[found.best]
                where = (samples, ranked.at(JUDGED), settings.share)
                found.dynamic = compare_selections(subject, best, *where, progress)
    return found


class _Samples:
    """Samples of each purpose, drawn on first use; no prompt is drawn for two purposes."""

    def __init__(self, subject: Subject, tasks: Sequence[Task], settings: Settings) -> None:
        self.subject, self.tasks, self.settings = subject, tasks, settings
        self._drawn: dict[int, list[Sample]] = {}

    def at(self, purpose: int) -> list[Sample]:
        if purpose not in self._drawn:
            count = self.settings.samples if purpose in (RANKED, AGAIN) else self.settings.held_out
            taken = {sample.item.prompt for drawn in self._drawn.values() for sample in drawn}  # some tasks ignore the seed
            self._drawn[purpose] = draw_samples(self.subject, self.tasks, count, self.settings.seed + purpose, taken)
        return self._drawn[purpose]


def _halves(ranked: Ranked) -> Agreement | None:
    first, second = ranked.half(odd=False), ranked.half(odd=True)
    return compare_rankings(first, second) if first and second else None


def _smallest(subject: Subject, found: Survey, ranked: _Samples, keep: float, steps: ProgressSteps) -> SmallestSet:
    with steps.step("looking for the smallest set") as progress:
        judged = [found.curves[name] for name in found.rankings]
        best = min(judged, key=lambda curve: (curve.smallest(keep), -curve.area.value)).name
        return smallest_set(
            subject, found.rankings[best], found.curves[best], ranked.at(CHOSEN), ranked.at(JUDGED), keep, progress
        )
