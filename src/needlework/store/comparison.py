"""Are two runs the same? A fingerprint of one, and the rows in which two of them differ, counted and named."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from needlework.store.database import Store

TOLERANCE = 1e-4  # of log-probabilities, in nats, and of what is computed from them
_NEAR_TIE = 1e-3  # a first choice that is no further before the second than this may turn with rounding
_COLUMNS = "experiment, task, id, model, intervention, sample, mode, finish, tokens, scores, logprobs, margins"
_Key = tuple[str, str, str, int]  # experiment, task, trial id; and a number, where two names stand for one model


def fingerprint(directory: Path | str) -> str:
    """A hash over trial id, tokens and scores of every row that the plan asks for, in whatever order they were written.

    Scores that are log-probabilities in another form (of scored trials, those that are no whole numbers) round differently
    from batch to batch: they are left out here, and `compare` looks at them.
    """
    store = Store(directory)
    try:
        rows = store.db.execute("SELECT id, mode, finish = 'failed', tokens, scores FROM trials WHERE asked")
        lines = sorted(f"{name} {failed} {_same(tokens)} {_decided(mode, scores)}" for name, mode, failed, tokens, scores in rows)
    finally:
        store.close()
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _same(text: str) -> str:
    return json.dumps(json.loads(text), separators=(",", ":"))


def _decided(mode: str, scores: str) -> str:
    values = {name: value for name, value in json.loads(scores).items() if value is not None}
    kept = {name: round(value, 6) for name, value in values.items() if mode == "generate" or float(value).is_integer()}
    return json.dumps(kept, sort_keys=True)


@dataclass(frozen=True)
class Difference:
    """One row that is not the same in both runs."""

    experiment: str
    model: str
    task: str
    sample: str
    intervention: str
    id: str
    what: str  # tokens | scores | finish | log-probabilities
    detail: str
    logprobs: float | None  # the largest difference, where both have as many
    near_tie: bool  # the first token that differs was a near tie in one of them: rounding turned it


@dataclass(frozen=True)
class Comparison:
    """Two runs, row by row."""

    directories: tuple[str, str]
    fingerprints: tuple[str, str]
    rows: int  # in both
    only: tuple[int, int]  # in one alone
    differing: tuple[Difference, ...]
    logprobs: float  # the largest difference among rows with the same tokens
    tolerance: float

    @property
    def same(self) -> bool:
        return not self.differing and not any(self.only) and self.rows > 0

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "same": self.same}

    def text(self, most: int = 20) -> str:
        """What a person reads; at most so many rows are named."""
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
    model: str
    intervention: str
    sample: str
    mode: str
    finish: str
    tokens: Sequence[int]
    scores: Mapping[str, float]
    logprobs: Sequence[float]
    margins: Sequence[float]


def compare(a: Path | str, b: Path | str, tolerance: float = TOLERANCE) -> Comparison:
    """The rows of two runs, matched by experiment, task and trial id: only what was really asked alike is compared."""
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
    rows = store.db.execute(f"SELECT {_COLUMNS} FROM trials WHERE asked ORDER BY experiment, task, id, model")
    for experiment, task, name, model, intervention, sample, mode, finish, *written in rows:
        place = (experiment, task, name)
        seen[place] = seen.get(place, -1) + 1
        yield (*place, seen[place]), _Row(model, intervention, sample, mode, finish, *map(json.loads, written))


def _apart(a: Sequence[float], b: Sequence[float]) -> float | None:
    """The largest difference of two lists of log-probabilities; nothing if they cannot be held against each other."""
    return max((abs(x - y) for x, y in zip(a, b, strict=True)), default=0.0) if len(a) == len(b) else None


def _difference(key: _Key, a: _Row, b: _Row, apart: float | None, tolerance: float) -> Difference | None:
    what = detail = ""
    near_tie = False
    if a.tokens != b.tokens:
        at = next(
            (i for i, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=False)) if x != y), min(len(a.tokens), len(b.tokens))
        )
        what, detail = "tokens", f"token {at} is {_at(a.tokens, at)} and {_at(b.tokens, at)}"
        near_tie = any(at < len(row.margins) and row.margins[at] < _NEAR_TIE for row in (a, b))
    elif a.finish != b.finish:
        what, detail = "finish", f"{a.finish} and {b.finish}"
    elif names := [name for name in {**a.scores, **b.scores} if _unlike(a.scores.get(name), b.scores.get(name), tolerance)]:
        what, detail = "scores", f"{names[0]} is {a.scores.get(names[0])} and {b.scores.get(names[0])}"
        near_tie = a.mode == "choices" and any(row.margins and row.margins[0] < _NEAR_TIE for row in (a, b))
    elif apart is None or not apart <= tolerance:
        what, detail = "log-probabilities", "of another number" if apart is None else f"apart by {apart:.1e}"
    if not what:
        return None
    return Difference(key[0], a.model, key[1], a.sample, a.intervention, key[2], what, detail, apart, near_tie)


def _at(tokens: Sequence[int], place: int) -> str:
    return str(tokens[place]) if place < len(tokens) else "not there"


def _unlike(a: float | None, b: float | None, tolerance: float) -> bool:
    return a != b if a is None or b is None else not abs(a - b) <= tolerance
