"""Compare runs: a fingerprint of one run, and the rows in which two runs differ."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from needlework.errors import short_repr
from needlework.receipts import NOTHING_TO_HIDE
from needlework.results.store import Store

TOLERANCE = 1e-4  # for log-probabilities, in nats, and for scores
_NEAR_TIE = 1e-3  # margin below which rounding may change the argmax
# Columns by which reports group rows, besides the answer and the scores.
_LABELS = ("kind", "ability", "boundary", "mode", "intervention", "sample", "cluster", "seed", "prompt_id", "target")
_OPTIONS = ("against", "hops", "relation")  # options of a task that reports read
_Key = tuple[str, str, str, int]  # experiment, task, trial id, and a count for models that occur under several names


def fingerprint(directory: Path | str) -> str:
    """Hash all that reports read of the rows of the plan, independent of the order in which they were written.

    Covers experiment, task, trial id, labels, tokens and scores. The model's name is not included; the trial id covers its
    weights. Non-integer scores of trials that generate nothing are not included either: they derive from
    log-probabilities, whose rounding depends on the batch. `compare` checks them with a tolerance.
    """
    store = Store(directory)
    try:
        lines = sorted(_line(key, row) for key, row in _rows(store))
    finally:
        store.close()
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _line(key: _Key, row: _Row) -> str:
    answer = [row.finish == "failed", row.tokens, _decided(row)]
    return json.dumps([*key[:3], *row.labels.values(), *answer])


def _decided(row: _Row) -> str:
    """Return the scores that do not depend on rounding, as JSON."""
    values = {name: value for name, value in row.scores.items() if value is not None}
    generated = row.labels["mode"] == "generate"
    kept = {name: round(value, 6) for name, value in values.items() if generated or float(value).is_integer()}
    return json.dumps(kept, sort_keys=True)


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


def compare(a: Path | str, b: Path | str, tolerance: float = TOLERANCE) -> Comparison:
    """Compare the rows of two runs that have the same experiment, task and trial id."""
    first, second = _read(a), _read(b)
    both = [key for key in first if key in second]
    differing: list[Difference] = []
    largest = 0.0
    for key in both:
        apart = _apart(first[key].logprobs, second[key].logprobs)
        if first[key].tokens == second[key].tokens and apart is not None:
            largest = max(largest, apart)
        if found := _difference(key, first[key], second[key], apart, tolerance):
            differing.append(found)
    marks = fingerprint(a), fingerprint(b)
    only = len(first) - len(both), len(second) - len(both)
    return Comparison((str(a), str(b)), marks, len(both), only, tuple(differing), largest, tolerance)


def _read(directory: Path | str) -> dict[_Key, _Row]:
    store = Store(directory)
    try:
        return dict(_rows(store))
    finally:
        store.close()


def _rows(store: Store) -> Iterator[tuple[_Key, _Row]]:
    seen: dict[tuple[str, str, str], int] = {}
    experiments = store.meta("experiments") or {}
    idle = f"instr(receipt, '\"{NOTHING_TO_HIDE}') > 0"
    columns = f"experiment, task, id, model, finish, tokens, scores, logprobs, margins, facts, {idle}, {', '.join(_LABELS)}"
    rows = store.db.execute(f"SELECT {columns} FROM trials WHERE asked ORDER BY experiment, task, id, model")
    for experiment, task, name, model, finish, tokens, scores, logprobs, margins, facts, hid_nothing, *texts in rows:
        place = (experiment, task, name)
        seen[place] = seen.get(place, -1) + 1
        options = experiments.get(experiment, {}).get("tasks", {}).get(task, {}).get("options", {})
        labels = dict(zip(_LABELS, map(str, texts), strict=True))
        labels["facts"] = json.dumps(json.loads(facts), sort_keys=True)
        labels["options"] = json.dumps({option: options.get(option) for option in _OPTIONS})
        labels["hid nothing"] = str(bool(hid_nothing))
        yield (*place, seen[place]), _Row(model, labels, finish, *map(json.loads, (tokens, scores, logprobs, margins)))


def _apart(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Return the largest absolute difference of two lists; None if their lengths differ."""
    return max(map(_distance, a, b), default=0.0) if len(a) == len(b) else None


def _distance(a: float, b: float) -> float:
    """Return the absolute difference, never NaN: 0 for two equal infinities or two NaN, infinity for one NaN."""
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    return math.inf if math.isnan(a) or math.isnan(b) else abs(a - b)


def _difference(key: _Key, a: _Row, b: _Row, apart: float | None, tolerance: float) -> Difference | None:
    """Return the first difference of two rows (labels, tokens, finish, scores, log-probabilities); None if equal."""
    what = detail = ""
    near_tie = False
    if unlike := [name for name in a.labels if a.labels[name] != b.labels[name]]:
        what = unlike[0]
        detail = " and ".join(short_repr(str(row.labels[what])) for row in (a, b))
    elif a.tokens != b.tokens:
        at = next(
            (i for i, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=False)) if x != y), min(len(a.tokens), len(b.tokens))
        )
        what, detail = "tokens", f"token {at} is {_at(a.tokens, at)} and {_at(b.tokens, at)}"
        near_tie = any(at < len(row.margins) and row.margins[at] < _NEAR_TIE for row in (a, b))
    elif a.finish != b.finish:
        what, detail = "finish", f"{a.finish} and {b.finish}"
    elif names := [name for name in {**a.scores, **b.scores} if _unlike(a.scores.get(name), b.scores.get(name), tolerance)]:
        what, detail = "scores", f"{names[0]} is {a.scores.get(names[0])} and {b.scores.get(names[0])}"
        near_tie = a.labels["mode"] == "choices" and any(row.margins and row.margins[0] < _NEAR_TIE for row in (a, b))
    elif apart is None or apart > tolerance:
        what, detail = "log-probabilities", "of another number" if apart is None else f"apart by {apart:.1e}"
    if not what:
        return None
    about = (a.labels["sample"], a.labels["intervention"])
    return Difference(key[0], a.model, key[1], *about, key[2], what, detail, apart, near_tie)


def _at(tokens: Sequence[int], place: int) -> str:
    return str(tokens[place]) if place < len(tokens) else "not there"


def _unlike(a: float | None, b: float | None, tolerance: float) -> bool:
    return a != b if a is None or b is None else _distance(a, b) > tolerance
