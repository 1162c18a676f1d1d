"""Compare runs: a fingerprint of one run, and the rows in which two runs differ."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from needlework.errors import short_repr
from needlework.results.rows import NOTHING_HIDDEN
from needlework.results.store import Store

TOLERANCE = 1e-4  # for log-probabilities, in nats, and for scores
_NEAR_TIE = 1e-3  # margin below which rounding may change the argmax
# Columns by which reports group rows, besides the answer and the scores.
_LABELS = ("kind", "ability", "boundary", "mode", "intervention", "sample", "cluster", "seed", "prompt_id", "target")
_OPTIONS = ("against", "hops", "relation", "ask", "parts")  # options of a task that reports read
_Key = tuple[str, str, str, int]  # experiment, task, trial id, and a count for models that occur under several names


@dataclass(frozen=True)
class _Row:
    """The columns of a stored row that are compared."""

    model: str
    labels: Mapping[str, str]
    finish: str
    tokens: Sequence[int]
    scores: Mapping[str, float]
    logprobs: Sequence[float]
    margins: Sequence[float]


def _read(directory: Path | str) -> Iterator[tuple[_Key, _Row]]:
    """Yield the compared columns of all rows of a run's plan."""
    seen, label_columns = Counter[tuple[str, str, str]](), ", ".join(_LABELS)
    columns = f"experiment, task, id, model, finish, tokens, scores, logprobs, margins, facts, {NOTHING_HIDDEN}, {label_columns}"
    with closing(Store(directory)) as store:
        experiments = store.meta("experiments") or {}
        found = store.db.execute(f"SELECT {columns} FROM trials WHERE asked ORDER BY experiment, task, id, model")
        for experiment, task, name, model, finish, tokens, scores, logprobs, margins, facts, hid_nothing, *texts in found:
            options = experiments.get(experiment, {}).get("tasks", {}).get(task, {}).get("options", {})
            labels = dict(zip(_LABELS, map(str, texts), strict=True))
            labels["facts"] = json.dumps(json.loads(facts), sort_keys=True)
            labels["options"] = json.dumps({option: options.get(option) for option in _OPTIONS})
            labels["hid nothing"] = str(bool(hid_nothing))
            key = (experiment, task, name)
            yield (*key, seen[key]), _Row(model, labels, finish, *map(json.loads, (tokens, scores, logprobs, margins)))
            seen[key] += 1


def fingerprint(directory: Path | str) -> str:
    """Hash all that reports read of the rows of the plan, independent of the order in which they were written.

    Covers experiment, task, trial id, labels, tokens and scores. The model's name is not included; the trial id covers its
    weights. Non-integer scores of trials that generate nothing are not included either: they derive from
    log-probabilities, whose rounding depends on the batch. `compare` checks them with a tolerance.
    """
    return _hash(_read(directory))


def _hash(rows: Iterable[tuple[_Key, _Row]]) -> str:
    lines = []
    for key, row in rows:
        generated = row.labels["mode"] == "generate"
        scores = {name: value for name, value in row.scores.items() if value is not None}
        kept = {name: round(value, 6) for name, value in scores.items() if generated or float(value).is_integer()}
        answer = [row.finish == "failed", row.tokens, json.dumps(kept, sort_keys=True)]
        lines.append(json.dumps([*key[:3], *row.labels.values(), *answer]))
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Difference:
    """A row that differs between two runs."""

    experiment: str
    model: str
    task: str
    sample: str
    intervention: str
    id: str
    what: str  # the name of a label such as kind or boundary | tokens | scores | finish | log-probabilities
    detail: str
    logprobs: float | None  # largest difference; None if the lists have different lengths
    near_tie: bool  # the first difference is at a near tie in one of the runs, so rounding explains it


@dataclass(frozen=True)
class Comparison:
    """Result of comparing two runs row by row."""

    directories: tuple[str, str]
    fingerprints: tuple[str, str]
    rows: int  # in both
    only: tuple[int, int]  # rows in one run only
    differing: tuple[Difference, ...]
    logprobs: float  # largest difference among rows with equal tokens
    tolerance: float

    @property
    def same(self) -> bool:
        return not self.differing and not any(self.only) and self.rows > 0

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "same": self.same}

    def text(self, most: int = 20) -> str:
        """Return the comparison as text that lists at most `most` rows."""
        a, b = self.directories
        lines = [f"{name}: fingerprint {mark}" for name, mark in zip(self.directories, self.fingerprints, strict=True)]
        for name, count in zip(self.directories, self.only, strict=True):
            if count:
                lines.append(f"{count} rows are in {name} alone: another plan, another model, or a run that is not finished")
        if not self.rows:
            return "\n".join([*lines, f"{a} and {b} have no row in common"])
        kinds = {what: sum(d.what == what for d in self.differing) for what in dict.fromkeys(d.what for d in self.differing)}
        words = ", ".join(f"{count} in {what}" for what, count in kinds.items())
        lines.append(f"{len(self.differing)} of {self.rows} rows in both differ" + (f": {words}" if words else ""))
        lines.append(f"largest difference of a log-probability where tokens are the same: {self.logprobs:.1e}")
        for d in self.differing[:most]:
            tie = ", a near tie" if d.near_tie else ""
            lines.append(
                f"  {d.experiment} | {d.model} | {d.task} | {d.sample} | {d.intervention} | {d.id}: {d.what}, {d.detail}{tie}"
            )
        if len(self.differing) > most:
            lines.append(f"  and {len(self.differing) - most} more (--json has all)")
        return "\n".join([*lines, "the same" if self.same else "not the same"])


def compare(a: Path | str, b: Path | str, tolerance: float = TOLERANCE) -> Comparison:
    """Compare the rows of two runs that have the same experiment, task and trial id."""
    first, second = dict(_read(a)), dict(_read(b))
    both = [key for key in first if key in second]
    differing: list[Difference] = []
    largest = 0.0
    for key in both:
        one, other = first[key], second[key]
        apart = None
        if len(one.logprobs) == len(other.logprobs):
            apart = max(map(_distance, one.logprobs, other.logprobs), default=0.0)
        if one.tokens == other.tokens and apart is not None:
            largest = max(largest, apart)
        what, detail, near_tie = _first_difference(one, other, apart, tolerance)
        if what:
            about = (one.labels["sample"], one.labels["intervention"])
            differing.append(Difference(key[0], one.model, key[1], *about, key[2], what, detail, apart, near_tie))
    marks = _hash(first.items()), _hash(second.items())
    only = len(first) - len(both), len(second) - len(both)
    return Comparison((str(a), str(b)), marks, len(both), only, tuple(differing), largest, tolerance)


def _distance(a: float, b: float) -> float:
    """Return the absolute difference, never NaN: 0 for two equal infinities or two NaN, infinity for one NaN."""
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    return math.inf if math.isnan(a) or math.isnan(b) else abs(a - b)


def _first_difference(a: _Row, b: _Row, apart: float | None, tolerance: float) -> tuple[str, str, bool]:
    """Return what differs first (a label, tokens, finish, scores, log-probabilities; "" if nothing), how, and whether that
    is at a near tie.
    """
    if unlike := [name for name in a.labels if a.labels[name] != b.labels[name]]:
        return unlike[0], " and ".join(short_repr(row.labels[unlike[0]]) for row in (a, b)), False
    if a.tokens != b.tokens:
        at = next(i for i, (x, y) in enumerate(zip_longest(a.tokens, b.tokens)) if x != y)
        one, other = (str(row.tokens[at]) if at < len(row.tokens) else "not there" for row in (a, b))
        near = any(at < len(row.margins) and row.margins[at] < _NEAR_TIE for row in (a, b))
        return "tokens", f"token {at} is {one} and {other}", near
    if a.finish != b.finish:
        return "finish", f"{a.finish} and {b.finish}", False
    for name in {**a.scores, **b.scores}:
        x, y = a.scores.get(name), b.scores.get(name)
        if x != y if x is None or y is None else _distance(x, y) > tolerance:
            near = a.labels["mode"] == "choices" and any(row.margins and row.margins[0] < _NEAR_TIE for row in (a, b))
            return "scores", f"{name} is {x} and {y}", near
    if apart is None or apart > tolerance:
        return "log-probabilities", "of another number" if apart is None else f"apart by {apart:.1e}", False
    return "", "", False
