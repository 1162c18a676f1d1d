"""Accuracies and retained shares of lm-eval tasks, and the part of a loss that is due to the letter look-up.

Multiple choice by letter needs the letter to be retrieved from the prompt in addition to the knowledge; a cloze does not.
With R the chance-corrected retained share, (R_cloze - R_letter) / (1 - R_letter) is the part of the loss in letter choice
that is not a loss of knowledge. Does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from needlework import stats
from needlework.analysis.model_trials import Pairs
from needlework.results import Row
from needlework.stats import NOTHING, Estimate

BASELINE = "none"
NO_BASELINE = replace(NOTHING, why="no baseline: ask none, too")


@dataclass(frozen=True)
class Line:
    """Results of one task or group under one intervention."""

    name: str  # of the task or its outermost group
    intervention: str
    accuracy: Estimate
    raw: Estimate  # retained share of the baseline
    corrected: Estimate  # chance-corrected retained share


@dataclass(frozen=True)
class Lookup:
    """The part of the loss in letter choice that is due to the letter look-up."""

    intervention: str
    part: Estimate


def lines(trials: Sequence[Row], home: dict[str, str]) -> list[Line]:
    """Return accuracy and retained shares for every (name, intervention), paired with the baseline by question.

    Args:
        trials: Rows of all tasks and interventions; failed rows are left out.
        home: Task -> name under which it is reported.
    """
    scored: dict[tuple[str, str], dict[str, Row]] = {}
    for trial in trials:
        if trial.finish != "failed" and "correct" in trial.scores:
            scored.setdefault((home[trial.task], trial.intervention), {})[f"{trial.task}/{trial.prompt_id}"] = trial
    made = []
    for (name, text), after in scored.items():
        before = scored.get((name, BASELINE), {})
        both = [key for key in after if key in before]
        right, base = (np.asarray([rows[key].scores["correct"] for key in both]) for rows in (after, before))
        chance = float(np.mean([after[key].facts.get("chance", 0.0) for key in both])) if both else 0.0
        pairs = Pairs(right, base, np.asarray([after[key].cluster for key in both]), chance)
        shares = (pairs.raw, pairs.corrected) if both else (NO_BASELINE, NO_BASELINE)
        made.append(Line(name, text, stats.accuracy([t.scores["correct"] for t in after.values()]), *shares))
    return made


def lookups(trials: Sequence[Row]) -> list[Lookup]:
    """Return the part due to the letter look-up for every intervention with letter and cloze questions on the same facts."""
    forms: dict[str, dict[str, dict[str, Row]]] = {"letter": {}, "cloze": {}}
    for trial in trials:
        form = {"statement": "cloze", "question": "cloze"}.get(str(trial.facts.get("form")), str(trial.facts.get("form")))
        if form in forms and trial.finish != "failed":
            forms[form].setdefault(trial.intervention, {})[trial.cluster] = trial
    letter, cloze = forms["letter"], forms["cloze"]
    if BASELINE not in letter or BASELINE not in cloze:
        return []
    made = []
    for text in letter:
        if text != BASELINE and text in cloze:
            columns = [letter[text], letter[BASELINE], cloze[text], cloze[BASELINE]]
            made.append(Lookup(text, _part(columns)))
    return made


def _part(columns: Sequence[dict[str, Row]]) -> Estimate:
    """Estimate the part with a bootstrap over facts; columns are those of `_share`, each fact -> row."""
    facts = sorted(set.intersection(*(set(column) for column in columns)))
    if not facts:
        return NOTHING
    values = [np.asarray([column[fact].scores["correct"] for fact in facts]) for column in columns]
    chance = [float(np.mean([column[fact].facts.get("chance", 0.0) for fact in facts])) for column in columns]
    above = np.asarray([v.mean() - c for v, c in zip(values, chance, strict=True)])
    totals = stats.resample(stats.cluster_sums(facts, values))
    drawn = totals[:, :4] / totals[:, 4:] - np.asarray(chance)
    value = float(_share(above[None])[0])
    shares = _share(drawn)
    shares = shares[np.isfinite(shares)]
    if not math.isfinite(value) or not len(shares):
        return Estimate(math.nan, math.nan, math.nan, len(facts), "the letter lost nothing, or there was nothing to lose")
    low, high = stats.interval(shares)
    return Estimate(value, low, high, len(facts))


def _share(above: Any) -> Any:
    """Compute (R_cloze - R_letter) / (1 - R_letter) per row of [draws, 4]; NaN where letter choice lost nothing.

    The columns are accuracy minus chance of: letter after, letter before, cloze after, cloze before.
    """
    letter = above[:, 0] / np.where(above[:, 1] > 0, above[:, 1], np.nan)
    cloze = above[:, 2] / np.where(above[:, 3] > 0, above[:, 3], np.nan)
    lost = 1 - letter
    return np.where(lost > 0, (cloze - letter) / np.where(lost > 0, lost, 1), np.nan)
