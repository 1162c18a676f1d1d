"""Rank the heads of a model by several methods, and evaluate the rankings on held-out samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from needlework.anatomy import Anatomy
from needlework.errors import NeedleworkError
from needlework.heads.evaluation import (
    RANDOM,
    RANDOM_ORDERS,
    Agreement,
    RetrievalCurve,
    SelectionComparison,
    SmallestSet,
    compare_rankings,
    compare_selections,
    evaluate_rankings,
    smallest_set,
)
from needlework.heads.methods import ROLES, Method, find_methods
from needlework.heads.samples import check_count, draw_samples, measure_baseline, sample_clusters
from needlework.interventions.ranking import Origin, Ranking, jsonable
from needlework.measure import Progress, Sample, no_progress
from needlework.stats import Estimate, cluster_sums, resample
from needlework.subject import Subject
from needlework.tasks.base import Task
from needlework.terminal import Bar

DRAWS = 2000


class ProgressSteps(Bar):
    """Progress bar over steps of unequal length, each of which reports its own share."""

    def __init__(self, count: int, shown: bool) -> None:
        super().__init__(count, "steps", shown=shown)

    @contextmanager
    def step(self, name: str) -> Iterator[Progress]:
        done = 0.0

        def progress(share: float) -> None:
            nonlocal done
            done = min(1.0, share)

        self.show(name, lambda: done)
        yield progress
        done = 0.0
        self.advance()


def origin(subject: Subject, name: str = "") -> Origin:
    """Return the description of the model that ranking files record."""
    source = subject.body.source
    named = name or (Path(source).name if source else "")
    return Origin(name=named, architecture=subject.anatomy.architecture, weights=subject.body.weights)


def rank_by(
    subject: Subject, method: Method, samples: Sequence[Sample], seed: int, progress: Progress, of: Origin
) -> tuple[Ranking, Agreement | None]:
    """Rank the model's heads by a method; raise if it does not return one finite score for each head.

    Returns:
        The ranking; and the agreement of the rankings by either half of the samples, None without per-sample scores.
    """
    heads = subject.anatomy.heads
    scores = method.score(subject, [sample.item for sample in samples], seed=seed, progress=progress)
    if scores.values.shape != (len(heads),) or not np.isfinite(scores.values).all():
        raise NeedleworkError(
            f"the method {method.name!r} gave scores of shape {scores.values.shape}, or none that are numbers; it must give one"
            f" finite number for each of the {len(heads)} heads"
        )
    halves, intervals = None, {}
    if scores.each is not None and len(scores.each) > 1:
        first, second = (Ranking.by_scores(dict(zip(heads, scores.each[i::2].mean(0).tolist(), strict=True))) for i in (0, 1))
        halves = compare_rankings(first, second)
        clusters = sample_clusters([samples[i] for i in scores.evidence.get("used", range(len(samples)))])
        if len(clusters) != len(scores.each):  # per-sample scores that do not match the samples: no clusters are known
            clusters = [str(i) for i in range(len(scores.each))]
        totals = resample(cluster_sums(clusters, list(scores.each.T)), draws=DRAWS)
        low, high = np.quantile(totals[:, :-1] / totals[:, -1:], [0.025, 0.975], axis=0)  # of the mean per-sample scores
        intervals = {f"{h.layer}.{h.index}": [float(low[i]), float(high[i])] for i, h in enumerate(heads)}
    ranking = Ranking.by_scores(
        dict(zip(heads, scores.values.tolist(), strict=True)),
        method=method.name,
        model=of,
        task=" + ".join(dict.fromkeys(sample.task.kind for sample in samples)),
        samples=len(samples),
        seed=seed,
        evidence={**scores.evidence, "intervals": intervals},
    )
    return ranking, halves


# Offsets to the seed: each purpose has its own samples, so that nothing is evaluated on the samples it was chosen by.
RANKED, AGAIN, CHOSEN, JUDGED = 0, 1, 2, 3
CHEAP = ("attention", "contribution")  # kinds of methods that are run a second time, on other samples


@dataclass(frozen=True)
class SurveySettings:
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
    settings: SurveySettings
    tasks: list[str]
    baseline: Estimate
    rankings: dict[str, Ranking] = field(default_factory=dict)
    retests: dict[str, Retest] = field(default_factory=dict)
    curves: dict[str, RetrievalCurve] = field(default_factory=dict)
    smallest: SmallestSet | None = None
    dynamic: SelectionComparison | None = None
    roles: dict[str, Ranking] = field(default_factory=dict)  # by attention: gather and aggregate

    @property
    def agreements(self) -> dict[str, dict[str, Agreement]]:
        """Agreement of every pair of rankings."""
        return {a: {b: compare_rankings(one, other) for b, other in self.rankings.items()} for a, one in self.rankings.items()}

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
            "roles": {name: ranking.to_dict() for name, ranking in self.roles.items()},
            "retest": {name: asdict(found) for name, found in self.retests.items()},
            "agreement": {a: {b: asdict(found) for b, found in row.items()} for a, row in self.agreements.items()},
            "curves": {name: curve.to_dict() for name, curve in self.curves.items()},
            "above_random": {name: asdict(c.above(floor)) for name, c in self.curves.items() if floor and name != RANDOM},
            "best": self.best if self.curves else None,
            "smallest_set": self.smallest.to_dict() if self.smallest else None,
            "static_or_dynamic": asdict(self.dynamic) if self.dynamic else None,
        }
        plain: dict[str, Any] = jsonable(found)
        return plain


def survey(
    subject: Subject,
    tasks: Sequence[Task],
    methods: Sequence[Method],
    settings: SurveySettings,
    *,
    given: Mapping[str, Ranking] = {},
    name: str = "",
    shown: bool = True,
) -> Survey:
    """Rank the heads by each method, and evaluate these rankings and the given ones.

    Cheap methods are run again on other samples if `settings.retest`. The seed of given rankings must differ from those of the
    held-out samples. `name` is the model's name in results, by default that of its directory.
    """
    if not methods and not given:
        raise NeedleworkError("give at least one method to rank heads by, or a ranking to be judged")
    if not subject.anatomy.heads:
        raise NeedleworkError(f"{subject.anatomy.architecture} has no attention heads, so there is nothing to rank")
    for label, ranking in given.items():
        ranking.check(subject.anatomy, subject.body.weights)
        if ranking.seed in (settings.seed + CHOSEN, settings.seed + JUDGED):
            raise NeedleworkError(
                f"{label}: this ranking is of samples of seed {ranking.seed}, which it would be judged on; give another --seed"
            )
    drawn: dict[int, list[Sample]] = {}

    def samples_for(purpose: int) -> list[Sample]:
        if purpose not in drawn:
            count = settings.samples if purpose in (RANKED, AGAIN) else settings.held_out
            taken = {sample.item.prompt for some in drawn.values() for sample in some}  # some tasks ignore the seed
            drawn[purpose] = draw_samples(subject, tasks, count, settings.seed + purpose, taken)
        return drawn[purpose]

    again = [method for method in methods if settings.retest and method.kind in CHEAP]
    with ProgressSteps(1 + len(methods) + len(again) + 2 * settings.judge + settings.dynamic, shown) as steps:
        with steps.step("asking the untouched model") as progress:
            baseline = measure_baseline(subject, samples_for(RANKED), progress)
        of = origin(subject, name)
        found = Survey(of, subject.anatomy, settings, [task.kind for task in tasks], baseline)
        for method in methods:
            with steps.step(f"ranking by {method.name}") as progress:
                ranking, halves = rank_by(subject, method, samples_for(RANKED), settings.seed, progress, of)
            found.rankings[method.name], found.retests[method.name] = ranking, Retest(halves, None)
        if any(method.kind == "attention" for method in methods):  # whose pass over the samples is read again
            of_samples = (samples_for(RANKED), settings.seed, no_progress, of)
            found.roles = {method.name: rank_by(subject, method, *of_samples)[0] for method in find_methods(ROLES)}
        found.rankings |= given
        for method in again:
            with steps.step(f"again by {method.name}") as progress:
                second, _ = rank_by(subject, method, samples_for(AGAIN), settings.seed + AGAIN, progress, of)
            both = compare_rankings(found.rankings[method.name], second)
            found.retests[method.name] = Retest(found.retests[method.name].halves, both)
        if settings.judge:
            with steps.step("judging rankings") as progress:
                judged = evaluate_rankings(subject, found.rankings, samples_for(CHOSEN), progress, settings.random_orders)
            found.curves = judged
            with steps.step("looking for the smallest set") as progress:
                best = min(found.rankings, key=lambda name: (judged[name].smallest(settings.keep), -judged[name].area.value))
                both_samples = (samples_for(CHOSEN), samples_for(JUDGED))
                found.smallest = smallest_set(subject, found.rankings[best], judged[best], *both_samples, settings.keep, progress)
        if settings.dynamic:
            with steps.step("static or dynamic") as progress:
                where = (samples_for(RANKED), samples_for(JUDGED), settings.share)
                found.dynamic = compare_selections(subject, found.rankings[found.best], *where, progress)
    return found
