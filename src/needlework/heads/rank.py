"""Rankings of a model's heads: a method's scores on some samples, as an order with what it was measured with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from needlework.anatomy import Head
from needlework.errors import NeedleworkError
from needlework.heads.methods import Method, Scores
from needlework.heads.samples import Progress, Sample, clusters
from needlework.interventions.ranking import Origin, Ranking
from needlework.stats import cluster_sums, resample
from needlework.terminal import Bar

if TYPE_CHECKING:
    from needlework.subject import Subject

DRAWS = 2000


@dataclass(frozen=True)
class Ranked:
    """A ranking, and the scores that it comes from."""

    ranking: Ranking
    scores: Scores
    heads: tuple[Head, ...]  # in the order of the scores

    def half(self, odd: bool) -> Ranking | None:
        """The ranking by every second sample; nothing where the method looks at all of them at once."""
        each = self.scores.each
        if each is None or len(each) < 2:
            return None
        return Ranking.by_scores(_by_head(self.heads, each[int(odd) :: 2].mean(0)))


class Steps:
    """How far some pieces of work of unlike length are, each of which says of itself how far it is."""

    def __init__(self, count: int, shown: bool) -> None:
        self.bar = Bar(count, "steps", shown=shown)
        self._share = 0.0

    def __enter__(self) -> Steps:
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
    """Which model this is, for its rankings."""
    source = subject.body.source
    named = name or (Path(source).name if source else "")
    return Origin(name=named, architecture=subject.anatomy.architecture, weights=subject.body.weights)


def rank_by(subject: Subject, method: Method, samples: Sequence[Sample], seed: int, progress: Progress, of: Origin) -> Ranked:
    """The model's heads in the order of a method's scores."""
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
    """95 % of each head's mean score over samples, whole haystacks resampled; nothing where there is no score of each sample."""
    if scores.each is None or len(scores.each) < 2:
        return {}
    used = scores.evidence.get("used", range(len(samples)))
    names = clusters([samples[i] for i in used])
    if len(names) != len(scores.each):  # a method that pairs samples in a way of its own
        names = [str(i) for i in range(len(scores.each))]
    totals = resample(cluster_sums(names, list(scores.each.T)), draws=DRAWS)
    low, high = np.quantile(totals[:, :-1] / totals[:, -1:], [0.025, 0.975], axis=0)
    return {f"{h.layer}.{h.index}": [float(low[i]), float(high[i])] for i, h in enumerate(heads)}
