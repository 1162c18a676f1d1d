"""How few heads retrieval needs in each model of a study, and which of the varied factors that depends on.

A model's figure is the smallest k of H heads from which on at least 95 % of its retrieval is kept (lower bound of the paired
retained share, the rule of "few heads"), once with the heads that have the lowest entropy, once with heads drawn at random.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from needlework.interventions import KeepHeads, parse
from needlework.stats import Estimate, accuracy, percent, retained
from needlework.store import Row
from needlework.training.grid import Cell
from needlework.verdicts.evidence import KEPT
from needlework.verdicts.rules import BASELINE

WAYS = ("entropy", "random")
ABOUT, NEAR = 0.15, 0.06  # the share of heads that the claim speaks of, and how far from it still counts (2 of 10, 1 of 10)
Curve = dict[int, Estimate]  # heads kept of each layer -> retained share


@dataclass(frozen=True)
class Found:
    """One model of a study: what it finds untouched, and what is left of that with k heads, by each way of choosing them."""

    name: str
    levels: Mapping[str, str]
    seed: int
    heads: int
    untouched: Estimate
    curves: Mapping[str, Curve]

    @property
    def testable(self) -> bool:
        return self.untouched.n > 0 and self.untouched.low >= BASELINE

    def smallest(self, way: str) -> int:
        """The smallest k from which on retrieval is whole; all heads always keep it."""
        fewest = self.heads
        for k in sorted(self.curves[way], reverse=True):
            if not self.curves[way][k].low >= KEPT:
                break
            fewest = k
        return fewest

    def at_15_percent(self, way: str) -> tuple[int, Estimate] | None:
        """The number of heads nearest to 15 %, and what it keeps; of two equally near (1 and 2 of 10) the larger, as in rule 2.

        None: nothing near it was tried.
        """
        near = {k: kept for k, kept in self.curves[way].items() if abs(k / self.heads - ABOUT) <= NEAR}
        return min(near.items(), key=lambda pair: (round(abs(pair[0] / self.heads - ABOUT), 9), -pair[0])) if near else None

    def shows(self) -> bool:
        """Few heads suffice: the claim's own rule."""
        near = self.at_15_percent("entropy")
        return self.testable and near is not None and near[1].low >= KEPT


@dataclass(frozen=True)
class Difference:
    """By how much a model's smallest share of heads differs between two levels of a factor, all else being alike."""

    factor: str
    less: str
    more: str
    way: str
    points: Estimate  # mean over matched pairs of models, Student's interval


def found(cells: Sequence[Cell], heads: Mapping[str, int], rows: Iterable[Row]) -> list[Found]:
    """What the store's rows say of each cell; `heads` counts the query heads of an attention layer, by model."""
    answers: dict[str, dict[tuple[str, int], dict[str, list[float]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    clusters: dict[str, str] = {}
    counted: set[tuple[str, str]] = set()  # one answer may stand in several experiments
    for row in rows:
        if (row.model, row.id) in counted:
            continue
        counted.add((row.model, row.id))
        place = _place(row.intervention, heads[row.model])
        retrieval = row.ability == "retrieval" and row.mode == "generate"  # what else a study asks is on its report
        if place is not None and retrieval and row.finish != "failed":
            item = f"{row.task}/{row.seed}/{row.boundary}/{row.sample}"
            answers[row.model][place][item].append(row.scores["correct"])
            clusters[item] = f"{row.task}/{row.seed}/{row.cluster}"
    return [_found(cell, heads[cell.name], answers[cell.name], clusters) for cell in cells]


def _place(text: str, heads: int) -> tuple[str, int] | None:
    """Which way and how many heads an intervention keeps; None: it is on no curve."""
    if text == "none":
        return ("none", heads)
    parts = parse(text).parts
    if len(parts) != 1 or not isinstance(part := parts[0], KeepHeads):
        return None
    if not isinstance(part.by, str) or part.by not in WAYS:
        return None
    plain = KeepHeads(k=part.k, fraction=part.fraction, by=part.by, seed=part.seed, sinks=0)
    return (part.by, part.count(heads)) if part == plain else None


def _found(
    cell: Cell, heads: int, answers: Mapping[tuple[str, int], Mapping[str, list[float]]], clusters: Mapping[str, str]
) -> Found:
    before = answers.get(("none", heads), {})
    curves: dict[str, Curve] = {way: {} for way in WAYS}
    for (way, k), after in answers.items():
        if way == "none":
            continue
        paired = [(item, value) for item, values in after.items() if item in before for value in values]
        curves[way][k] = retained(
            [value for _, value in paired], [before[item][0] for item, _ in paired], [clusters[item] for item, _ in paired]
        )
    untouched = accuracy([values[0] for values in before.values()])
    return Found(cell.name, cell.levels, cell.seed, heads, untouched, curves)


def differences(models: Sequence[Found]) -> list[Difference]:
    """For each factor and each two of its levels: models that differ in nothing else, pair by pair."""
    usable = {(*model.levels.items(), model.seed): model for model in models if model.testable}
    levels: dict[str, list[str]] = defaultdict(list)
    for model in models:
        for factor, level in model.levels.items():
            if level not in levels[factor]:
                levels[factor].append(level)
    made = []
    for factor, names in levels.items():
        for (i, less), (j, more) in product(enumerate(names), repeat=2):
            if i < j:
                made += [Difference(factor, less, more, way, _matched(usable, factor, less, more, way)) for way in WAYS]
    return made


def _matched(usable: Mapping[Any, Found], factor: str, less: str, more: str, way: str) -> Estimate:
    steps = []
    for key, model in usable.items():
        other = usable.get(tuple((factor, more) if part == (factor, less) else part for part in key))
        if model.levels[factor] == less and other is not None:
            steps.append(other.smallest(way) / other.heads - model.smallest(way) / model.heads)
    return student(steps)


def student(values: Sequence[float]) -> Estimate:
    """The mean with Student's 95 % interval; of one value alone nothing is known."""
    n = len(values)
    if n == 0:
        return Estimate(math.nan, math.nan, math.nan, 0, "no pair of models that both retrieve")
    mean = float(np.mean(values))
    if n == 1:
        return Estimate(mean, -math.inf, math.inf, 1)
    spread = _T95[min(n - 1, len(_T95)) - 1] * float(np.std(values, ddof=1)) / math.sqrt(n)
    return Estimate(mean, mean - spread, mean + spread, n)


# The 97.5 % point of Student's t for 1, 2, ... degrees of freedom; from 30 on the last one is within 4 % of the normal's.
_T95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
    *(2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


def table(models: Sequence[Found]) -> str:
    """One row for each model, in Markdown."""
    factors = list(models[0].levels)
    head = [*factors, "seed", "untouched", "about 15 % of heads, by entropy", "at random", "smallest k, by entropy", "at random"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for model in models:
        cells = [*(model.levels[factor] for factor in factors), str(model.seed), _share(model.untouched)]
        cells += [_near(model, way) for way in WAYS]
        cells += [_smallest(model, way) for way in WAYS]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _share(estimate: Estimate) -> str:
    return f"{percent(estimate.value)} [{percent(estimate.low, '')}, {percent(estimate.high, '')}]"


def _near(model: Found, way: str) -> str:
    near = model.at_15_percent(way)
    return f"{near[0]} of {model.heads} keep {_share(near[1])}" if model.testable and near else "-"


def _smallest(model: Found, way: str) -> str:
    k = model.smallest(way)
    return f"{k} of {model.heads} ({percent(k / model.heads)})" if model.testable else "not testable"


def sentences(models: Sequence[Found]) -> list[str]:
    """What the study found, in words: how many models show the claim, and what each factor does."""
    testable = [model for model in models if model.testable]
    shown = sum(model.shows() for model in models)
    said = [f"{shown} of {len(models)} models keep their retrieval with about 15 % of the heads ({len(testable)} can be tested)."]
    for d in differences(models):
        if d.points.n == 0:
            said.append(f"{d.factor}, {d.more} against {d.less}, by {d.way}: {d.points.why}.")
            continue
        low, high = ("-∞", "∞") if d.points.n == 1 else (percent(d.points.low, ""), percent(d.points.high, ""))
        said.append(
            f"{d.factor}, {d.more} against {d.less}: the smallest share of heads by {d.way} differs by "
            f"{100 * d.points.value:+.1f} points [{low}, {high}; {d.points.n} pairs of models]."
        )
    return said


def as_json(models: Sequence[Found]) -> dict[str, Any]:
    def estimate(e: Estimate) -> dict[str, float | int | None]:
        """JSON has no number for what is none."""
        numbers = {"value": e.value, "low": e.low, "high": e.high}
        return {**{key: number if math.isfinite(number) else None for key, number in numbers.items()}, "n": e.n}

    return {
        "total": len(models),
        "testable": sum(model.testable for model in models),
        "shown": sum(model.shows() for model in models),
        "models": [
            {
                "name": model.name,
                "levels": dict(model.levels),
                "seed": model.seed,
                "heads": model.heads,
                "untouched": estimate(model.untouched),
                "testable": model.testable,
                "smallest": {way: model.smallest(way) for way in WAYS},
                "retained": {way: {str(k): estimate(e) for k, e in sorted(model.curves[way].items())} for way in WAYS},
            }
            for model in models
        ],
        "sentences": sentences(models),
    }
