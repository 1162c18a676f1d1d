"""Compare the heads of two checkpoints (`nw.compare_heads`): kept, lost and new ones, and Q/K of the first in the second."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from needlework.anatomy import Group, Head
from needlework.errors import NeedleworkError
from needlework.heads.evaluation import spearman
from needlework.heads.methods import Method
from needlework.heads.samples import draw_samples, measure_baseline, sample_clusters
from needlework.heads.survey import CHOSEN, DRAWS, ProgressSteps, origin
from needlework.interventions.ranking import Origin, jsonable
from needlework.measure import Progress, Sample, measure
from needlework.model.pruned import copy_query_key_maps
from needlework.plots import light_colors, new_axes
from needlework.reports.comparison import best_heads, points
from needlework.stats import Estimate, accuracy, cluster_sums, gain, interval, number, resample
from needlework.subject import Subject
from needlework.tables import Table
from needlework.tasks.base import Task

MOST_LABELS = 12  # heads that the picture names


@dataclass(frozen=True)
class HeadChange:
    """One head in both checkpoints."""

    head: Head
    scores: tuple[float, float]  # means over the samples
    ranks: tuple[int, int]  # places by these scores, from 1
    spans: tuple[tuple[int, int], tuple[int, int]]  # 95 % intervals of the places over resampled samples
    gap: Estimate  # paired difference of the scores, second less first
    word: str = ""  # "kept", "kept, moved", "lost" or "new", of the best 15 %; empty if it is among the best of neither
    sure: bool = False  # whether the intervals of both places lie on the same sides of the best 15 % as the places


@dataclass
class HeadComparison:
    """The heads of two checkpoints, by one method on the same samples.

    Attributes:
        models: The first and the second checkpoint.
        method: The ranking method.
        task: Kinds of the tasks.
        samples: Number of samples that heads are scored on.
        heads: All heads, in the order of the model.
        best: Number of heads that count as the best.
        kept: Share of the first checkpoint's best heads that are among the best of the second.
        agreement: Rank correlation of all scores.
        retrieval: Held-out accuracy of the "first" and the "second" checkpoint, and of the second one with queries and keys of
            the first in "all" attention layers, or for the groups of "lost" heads.
        restored: What queries and keys of the first add to the second, paired, by the same names.
    """

    models: tuple[Origin, Origin]
    method: str
    task: str
    samples: int
    heads: Sequence[HeadChange]
    best: int
    kept: Estimate
    agreement: Estimate
    retrieval: dict[str, Estimate] = field(default_factory=dict)
    restored: dict[str, Estimate] = field(default_factory=dict)

    @property
    def changes(self) -> list[HeadChange]:
        """Heads that are among the best of either checkpoint, best first."""
        return sorted((head for head in self.heads if head.word), key=lambda x: (min(x.ranks), x.head))

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        named: dict[str, Any] = jsonable({"format": "needlework head comparison", "version": 1} | asdict(self))
        return named | {"models": [model.model_dump() for model in self.models]}

    def tables(self) -> list[Table]:
        """Return the best heads of both checkpoints side by side, and retrieval with Q/K exchanged."""
        first, second = self._names
        rows = []
        for x in self.changes:
            places = [f"{rank} [{low}, {high}]" for rank, (low, high) in zip(x.ranks, x.spans, strict=True)]
            gap = f"{number(x.gap.value)} [{number(x.gap.low)}, {number(x.gap.high)}]"
            rows.append([f"{x.head.layer}.{x.head.index}", *places, *map(number, x.scores), gap, x.word + " (?)" * (not x.sure)])
        columns = ["head", f"rank in {first}", f"in {second}", "score", "then", "difference", "best 15 %"]
        title = f"Best {self.best} of {len(self.heads)} heads by {self.method}, n = {self.samples}; kept {self.kept.text()}"
        tables = [Table(columns, rows, title, ["head", "best 15 %"])]
        if self.retrieval:
            words = {"first": first, "second": second, "all": f"{second} with all Q/K of {first}"}
            words["lost"] = f"{second} with Q/K of {first} for the groups of lost heads"
            rows = [
                [words[key], share.text(), points(self.restored[key]) if key in self.restored else ""]
                for key, share in self.retrieval.items()
            ]
            tables.append(
                Table(["weights", "retrieval", "restored, points"], rows, "Are queries and keys the cause?", ["weights"])
            )
        return tables

    @property
    def _names(self) -> tuple[str, str]:
        first, second = (model.name or "model" for model in self.models)
        return (first, second) if first != second else ("the first", "the second")

    def plot(self, ax: Any = None) -> Any:
        """Draw every head's score in the second checkpoint against that in the first, and return the matplotlib axes."""
        ax, colors = new_axes(ax, 4.6, 4.2), light_colors()
        for at, (word, label) in enumerate({"kept": "kept", "lost": "lost", "new": "new", "": "others"}.items()):
            some = [x.scores for x in self.heads if x.word.partition(",")[0] == word]
            ax.scatter(
                *zip(*some, strict=True), s=14, color=colors[f"c{at + 1}"], label=f"{label} ({len(some)})"
            ) if some else None
        for x in self.changes[:MOST_LABELS]:
            ax.annotate(f"{x.head.layer}.{x.head.index}", x.scores, (3, 3), textcoords="offset points", fontsize=6)
        ends = [min(min(x.scores) for x in self.heads), max(max(x.scores) for x in self.heads)]
        ax.plot(ends, ends, color="#b0b0b0", linewidth=0.7, zorder=0)
        ax.set(xlabel=f"{self.method} in {self._names[0]}", ylabel=f"{self.method} in {self._names[1]}")
        ax.legend(fontsize=7)
        return ax


@contextmanager
def exchanged_query_key(target: Subject, source: Subject, groups: Collection[Group] | None = None) -> Iterator[None]:
    """Give a model the query and key maps of another one, of all attention layers or some kv heads' groups, while it is open."""
    parts = [(i, part) for i, part in target.anatomy.attention_parts() if groups is None or any(g.layer == i for g in groups)]
    modules = [(i, part, *(x.model.get_submodule(part.path) for x in (target, source))) for i, part in parts]
    saved = [(x, x.detach().clone()) for *_, own, _ in modules for x in own.parameters()]
    try:
        for i, part, own, theirs in modules:
            chosen = [kv for kv in range(part.kv_heads) if groups is None or Group(i, kv) in groups]
            copy_query_key_maps(own, theirs, part, chosen)
        yield
    finally:
        for parameter, values in saved:
            parameter.data.copy_(values)


def compare_subjects(
    first: Subject,
    second: Subject,
    tasks: Sequence[Task],
    method: Method,
    *,
    samples: int = 60,
    held_out: int = 120,
    seed: int = 0,
    names: tuple[str, str] = ("", ""),
    shown: bool = False,
) -> HeadComparison:
    """Score the heads of two checkpoints on the same samples, and put Q/K of the first into the second.

    The method must score every sample. Retrieval is measured on `held_out` other samples. `names` of the checkpoints are by
    default those of their directories. Raises if they have different heads or tokens, or if the first does not retrieve.
    """
    if not first.anatomy.heads or first.anatomy.heads != second.anatomy.heads:
        counts = [len(x.anatomy.heads) for x in (first, second)]
        raise NeedleworkError(
            f"heads are compared one by one, and these models have {counts[0]} and {counts[1]} heads or other layers"
        )
    drawn, others = (
        _common_samples(first, second, tasks, samples, seed),
        _common_samples(first, second, tasks, held_out, seed + CHOSEN),
    )
    with ProgressSteps(5, shown) as steps:
        with steps.step("asking the first model") as progress:
            measure_baseline(first, drawn, progress)
        scored = []
        for subject in (first, second):
            with steps.step(f"heads by {method.name}") as progress:
                scored.append(_score(subject, method, drawn, seed, progress))
        common = sorted(set(scored[0]) & set(scored[1]))
        if len(common) < 2:
            raise NeedleworkError(
                f"{method.name} scores fewer than two samples that are common to both models; give another --by"
            )
        each = [np.stack([by_sample[i] for i in common]) for by_sample in scored]
        clusters = sample_clusters([drawn[i] for i in common])
        of = (origin(first, names[0]), origin(second, names[1]))
        found = _compare(each, clusters, first.anatomy.heads, of, method.name, " + ".join(dict.fromkeys(t.kind for t in tasks)))
        with steps.step("asking both models") as progress:
            shares = {"first": _right(first, others, progress), "second": _right(second, others, progress)}
        with steps.step("exchanging Q/K") as progress:
            _exchange(found, first, second, others, shares, progress)
    return found


def _common_samples(first: Subject, second: Subject, tasks: Sequence[Task], count: int, seed: int) -> list[Sample]:
    drawn, again = (draw_samples(subject, tasks, count, seed) for subject in (first, second))
    if [x.item.prompt for x in drawn] != [x.item.prompt for x in again]:
        raise NeedleworkError("the models read the same samples as different tokens: compare checkpoints of one tokenizer")
    return drawn


def _score(subject: Subject, method: Method, drawn: Sequence[Sample], seed: int, progress: Progress) -> dict[int, np.ndarray]:
    """Return each head's score by number of the sample."""
    scores = method.score(subject, [sample.item for sample in drawn], seed=seed, progress=progress)
    if scores.each is None:
        raise NeedleworkError(f"{method.name} does not score samples one by one, so that no interval is known; give another --by")
    return dict(zip(scores.evidence.get("used", range(len(drawn))), scores.each, strict=True))


def _compare(
    each: Sequence[np.ndarray], clusters: Sequence[str], heads: Sequence[Head], of: tuple[Origin, Origin], by: str, task: str
) -> HeadComparison:
    """Return the comparison of scores [samples, heads] of two models, with intervals over resampled clusters of samples."""
    count = len(heads)
    totals = resample(cluster_sums(clusters, [*each[0].T, *each[1].T]), draws=DRAWS)
    draws = [totals[:, i * count : (i + 1) * count] / totals[:, -1:] for i in (0, 1)]  # [draws, heads]
    means = [x.mean(0) for x in each]
    ranks, drawn_ranks = [_places(x) for x in means], [_places(x) for x in draws]
    spans = [np.quantile(x, [0.025, 0.975], axis=0, method="nearest") for x in drawn_ranks]
    placed: list[dict[tuple[int, int], int]] = [dict(zip(heads, x.tolist(), strict=True)) for x in ranks]
    words = {Head(*head): word for head, _, _, word in best_heads(*placed)}
    best = sum(word != "new" for word in words.values())
    changes = []
    for i, head in enumerate(heads):
        sides = [{bool(x[i] <= best) for x in (rank, span[0], span[1])} for rank, span in zip(ranks, spans, strict=True)]
        low, high = interval(draws[1][:, i] - draws[0][:, i])
        gap = Estimate(float(means[1][i] - means[0][i]), low, high, len(each[0]))
        places = tuple((int(span[0][i]), int(span[1][i])) for span in spans)
        scores, at = tuple(float(x[i]) for x in means), tuple(int(x[i]) for x in ranks)
        changes.append(HeadChange(head, scores, at, places, gap, words.get(head, ""), all(len(x) == 1 for x in sides)))  # type: ignore[arg-type]
    both = ((drawn_ranks[0] <= best) & (drawn_ranks[1] <= best)).sum(1) / best
    value = sum(word.startswith("kept") for word in words.values()) / best
    kept = Estimate(value, *interval(both), len(each[0]))
    like = np.array([spearman(a, b) for a, b in zip(*draws, strict=True)])
    agreement = Estimate(spearman(*means), *interval(like), len(each[0]))
    return HeadComparison(of, by, task, len(each[0]), changes, best, kept, agreement)


def _places(scores: np.ndarray) -> np.ndarray:
    """Return places from 1 along the last axis, highest score first; ties go to the first head."""
    order = np.argsort(-scores, axis=-1, kind="stable")
    return np.asarray(np.argsort(order, axis=-1, kind="stable") + 1)


def _right(subject: Subject, samples: Sequence[Sample], progress: Progress) -> np.ndarray:
    return np.asarray(measure(subject, samples, progress=progress).values()[0])


def _exchange(
    found: HeadComparison,
    first: Subject,
    second: Subject,
    samples: Sequence[Sample],
    shares: dict[str, np.ndarray],
    progress: Progress,
) -> None:
    """Measure retrieval of the second model with Q/K of the first, in all layers and for lost heads' groups."""
    parts = dict(second.anatomy.attention_parts())
    lost = [x.head for x in found.heads if x.word == "lost"]
    groups = {Group(h.layer, h.index * parts[h.layer].kv_heads // parts[h.layer].query_heads) for h in lost}
    for key, some in (("all", None), *([("lost", groups)] if groups else [])):
        with exchanged_query_key(second, first, some):
            shares[key] = _right(second, samples, progress)
        found.restored[key] = gain(shares[key], shares["second"], sample_clusters(samples))
    found.retrieval = {key: accuracy(share) for key, share in shares.items()}
