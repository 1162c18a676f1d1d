"""One SQLite file per run: one row per trial, written once, kept through any crash. docs/store.md describes every column."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from needlework.errors import NeedleworkError

SCHEMA_VERSION = 1
FILE_NAME = "run.sqlite"


@dataclass(frozen=True)
class Trial:
    """One sample under one intervention, and everything that came of it."""

    id: str  # hash of weights, tokenizer, prompt ids, intervention text, decoding settings and semantics version
    experiment: str
    model: str
    task: str
    sample: str
    cluster: str
    seed: int
    intervention: str  # text form
    mode: str  # generate | choices | perplexity
    prompt: str
    prompt_tokens: int
    target: str
    output: str
    finish: str  # stop | length | failed | scored
    error: str
    seconds: float
    spans: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    scores: Mapping[str, float] = field(default_factory=dict)
    logprobs: Sequence[float] = ()
    margins: Sequence[float] = ()
    receipt: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Observation:
    """What one head looked at, summed over an experiment's samples."""

    experiment: str
    model: str
    task: str
    layer: int
    head: int
    samples: int
    needle_mass: float
    entropy: float
    copy_score: float


_JSON = {"spans", "facts", "scores", "logprobs", "margins", "receipt"}
_REAL = {"seconds", "needle_mass", "entropy", "copy_score"}
_WHOLE = {"seed", "prompt_tokens", "layer", "head", "samples"}


def _columns(cls: type) -> str:
    kind = {**dict.fromkeys(_REAL, "REAL"), **dict.fromkeys(_WHOLE, "INTEGER")}
    return ", ".join(f"{f.name} {kind.get(f.name, 'TEXT')} NOT NULL" for f in fields(cls))


class Store:
    """The trials of one run. Every write is a transaction of its own: what was written is there after any crash."""

    def __init__(self, directory: Path | str, create: bool = False) -> None:
        self.directory = Path(directory)
        path = self.directory / FILE_NAME
        if not create and not path.exists():
            raise NeedleworkError(f"{directory} holds no run; `needlework run PLAN --out {directory}` makes one")
        self.directory.mkdir(parents=True, exist_ok=True)
        self.db = sqlite3.connect(path, timeout=30, isolation_level=None)
        try:
            self.db.execute("PRAGMA journal_mode=WAL")
            self.db.execute("PRAGMA synchronous=FULL")
            self._prepare()
        except sqlite3.DatabaseError as error:
            raise NeedleworkError(f"{path} is no needlework store ({error}); choose another directory") from None

    def _prepare(self) -> None:
        self.db.execute("CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL)")
        found = self.meta("schema_version")
        if found is not None and found != SCHEMA_VERSION:
            raise NeedleworkError(
                f"{self.directory} was written with store version {found}, this is version {SCHEMA_VERSION}; use a new directory"
            )
        self.db.execute(f"CREATE TABLE IF NOT EXISTS trials ({_columns(Trial)}, PRIMARY KEY (experiment, id))")
        self.db.execute("CREATE INDEX IF NOT EXISTS by_condition ON trials (experiment, model, task, intervention)")
        self.db.execute(
            f"CREATE TABLE IF NOT EXISTS observations ({_columns(Observation)},"
            " PRIMARY KEY (experiment, model, task, layer, head))"
        )
        if found is None:
            self.set_meta("schema_version", SCHEMA_VERSION)

    def meta(self, key: str) -> Any:
        row = self.db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if row is None else json.loads(row[0])

    def set_meta(self, key: str, value: Any) -> None:
        self.db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, json.dumps(value)))

    def add(self, trials: Sequence[Trial]) -> None:
        self._insert("trials", trials)

    def observe(self, observations: Sequence[Observation]) -> None:
        self._insert("observations", observations)

    def _insert(self, table: str, rows: Sequence[Any]) -> None:
        if not rows:
            return
        names = [f.name for f in fields(rows[0])]
        marks = ", ".join("?" for _ in names)
        values = [[json.dumps(v) if k in _JSON else v for k, v in asdict(row).items()] for row in rows]
        with self.db:
            self.db.execute("BEGIN")
            self.db.executemany(f"INSERT OR REPLACE INTO {table} ({', '.join(names)}) VALUES ({marks})", values)

    def done(self) -> set[tuple[str, str]]:
        """(experiment, id) of every trial that is there."""
        return set(self.db.execute("SELECT experiment, id FROM trials"))

    def trials(self, where: str = "1", values: Sequence[Any] = ()) -> Iterator[Trial]:
        names = [f.name for f in fields(Trial)]
        for row in self.db.execute(f"SELECT {', '.join(names)} FROM trials WHERE {where}", values):
            yield Trial(**{k: json.loads(v) if k in _JSON else v for k, v in zip(names, row, strict=True)})

    def observations(self) -> list[Observation]:
        names = [f.name for f in fields(Observation)]
        rows = self.db.execute(f"SELECT {', '.join(names)} FROM observations")
        return [Observation(**dict(zip(names, row, strict=True))) for row in rows]

    def close(self) -> None:
        self.db.close()
