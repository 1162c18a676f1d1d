"""One SQLite file per run: one row per trial, written once, kept through any crash. docs/store.md describes every column."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from needlework.errors import NeedleworkError

SCHEMA_VERSION = 2
# Rises when an intervention, a phase or a task's prompt changes its meaning: old answers are then no answers. A changed
# score raises tasks.scores.SCORES_VERSION instead: old answers stay, and are scored again.
SEMANTICS_VERSION = 2
FILE_NAME = "run.sqlite"
LOCK_NAME = "run.lock"
_SYNC_SECONDS = 0.5  # how often written rows are forced to the disk; the system has them at once


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
    prompt_id: str = ""  # hash of the prompt's tokens, spans, twins and options
    versions: str = ""  # which row of the table `versions` made it
    kind: str = ""  # of its task, whatever name the plan gave the task
    ability: str = ""  # retrieval | knowledge | perplexity, as the task declares; "" is judged by no rule
    boundary: str = ""  # who owned the last prompt token: decode | prefill; "" where nothing is decoded
    scoring: str = ""  # hash of everything that turns its answer into scores; "" for scores of an older version
    greedy: Sequence[bool] = ()  # of each option: the model would have said it
    asked: int = 1  # 0: the plan that ran last no longer asks for it, so no report counts it


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


Row = tuple[str, str, str, str]  # experiment, model, task, trial id

_JSON = {"spans", "facts", "scores", "logprobs", "margins", "receipt", "greedy"}
_REAL = {"seconds", "needle_mass", "entropy", "copy_score"}
_WHOLE = {"seed", "prompt_tokens", "layer", "head", "samples", "asked"}


def _columns(cls: type) -> str:
    kind = {**dict.fromkeys(_REAL, "REAL"), **dict.fromkeys(_WHOLE, "INTEGER")}
    return ", ".join(f"{f.name} {kind.get(f.name, 'TEXT')} NOT NULL" for f in fields(cls))


@contextmanager
def claimed(directory: Path | str) -> Iterator[Path]:
    """Own a run's directory: made if missing, refused while another process writes. A killed owner owns nothing."""
    folder = Path(directory)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK_NAME).open("a+")
    except OSError as error:
        raise NeedleworkError(f"cannot write into {folder}: {error.strerror}; choose another directory") from None
    with lock:  # closing it gives the lock back; so does the system when the process dies
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            owner = lock.read().strip() or "unknown"
            raise NeedleworkError(
                f"another run (process {owner}) is writing into {folder}; wait for it, or choose another directory"
            ) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield folder


class Store:
    """The trials of one run. Every write is a transaction of its own: what was written is there after any crash."""

    def __init__(self, directory: Path | str, create: bool = False) -> None:
        self.directory = Path(directory)
        path = self.directory / FILE_NAME
        if not create and not path.exists():
            raise NeedleworkError(f"{directory} holds no run; `needlework run PLAN --out {directory}` makes one")
        self._synced = 0.0
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self.db = sqlite3.connect(path, timeout=30, isolation_level=None)
            self.db.execute("PRAGMA journal_mode=WAL")
            self._prepare()
        except (OSError, sqlite3.DatabaseError) as error:
            raise NeedleworkError(f"{path} is no needlework store ({error}); choose another directory") from None

    def _prepare(self) -> None:
        self.db.execute("CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL)")
        found = self.meta("schema_version")
        if found is not None and found != SCHEMA_VERSION:
            raise NeedleworkError(
                f"{self.directory} was written with store version {found}, this is version {SCHEMA_VERSION};"
                " choose another directory"
            )
        self.db.execute(f"CREATE TABLE IF NOT EXISTS trials ({_columns(Trial)}, PRIMARY KEY (experiment, model, task, id))")
        self.db.execute("CREATE INDEX IF NOT EXISTS by_condition ON trials (experiment, model, task, intervention)")
        self.db.execute("CREATE INDEX IF NOT EXISTS by_id ON trials (id)")
        self.db.execute(
            f"CREATE TABLE IF NOT EXISTS observations ({_columns(Observation)},"
            " PRIMARY KEY (experiment, model, task, layer, head))"
        )
        self.db.execute("CREATE TABLE IF NOT EXISTS versions (id TEXT PRIMARY KEY, content TEXT NOT NULL)")
        if found is None:
            self.set_meta("schema_version", SCHEMA_VERSION)

    def meta(self, key: str) -> Any:
        row = self.db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if row is None else json.loads(row[0])

    def set_meta(self, key: str, value: Any) -> None:
        self.db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, json.dumps(value)))

    def note_versions(self, versions: Mapping[str, str]) -> str:
        """The id under which trials name the software and settings that made them; equal content, equal id."""
        text = json.dumps(versions, sort_keys=True)
        name = hashlib.sha256(text.encode()).hexdigest()[:8]
        self.db.execute("INSERT OR IGNORE INTO versions VALUES (?, ?)", (name, text))
        return name

    def versions(self) -> dict[str, dict[str, str]]:
        return {name: json.loads(text) for name, text in self.db.execute("SELECT id, content FROM versions")}

    def add(self, trials: Sequence[Trial]) -> None:
        self._insert("trials", trials)

    def observe(self, observations: Sequence[Observation]) -> None:
        self._insert("observations", observations)

    def _insert(self, table: str, rows: Sequence[Any]) -> None:
        if not rows:
            return
        names = [f.name for f in fields(rows[0])]
        marks = ", ".join("?" for _ in names)
        values = [[json.dumps(getattr(row, k)) if k in _JSON else getattr(row, k) for k in names] for row in rows]
        # A killed process loses nothing it has committed. Only a dead machine can, so the disk is waited for at times.
        due = time.monotonic() - self._synced > _SYNC_SECONDS
        self.db.execute(f"PRAGMA synchronous={'FULL' if due else 'NORMAL'}")
        with self.db:
            self.db.execute("BEGIN")
            self.db.executemany(f"INSERT OR REPLACE INTO {table} ({', '.join(names)}) VALUES ({marks})", values)
        if due:
            self._synced = time.monotonic()

    def done(self) -> set[Row]:
        """Every trial that is there."""
        return set(self.db.execute("SELECT experiment, model, task, id FROM trials"))

    def observed(self) -> set[tuple[str, str, str]]:
        """(experiment, model, task) of every recording that is there."""
        return set(self.db.execute("SELECT DISTINCT experiment, model, task FROM observations"))

    def forget_failed(self) -> int:
        """Remove trials that failed, so that they are tried again; how many there were."""
        return self.db.execute("DELETE FROM trials WHERE finish = 'failed'").rowcount

    def trials(self, where: str = "1", values: Sequence[Any] = ()) -> Iterator[Trial]:
        names = [f.name for f in fields(Trial)]
        for row in self.db.execute(f"SELECT {', '.join(names)} FROM trials WHERE {where}", values):
            yield Trial(**{k: json.loads(v) if k in _JSON else v for k, v in zip(names, row, strict=True)})

    def observations(self) -> list[Observation]:
        names = [f.name for f in fields(Observation)]
        rows = self.db.execute(f"SELECT {', '.join(names)} FROM observations ORDER BY experiment, model, task, layer, head")
        return [Observation(**dict(zip(names, row, strict=True))) for row in rows]

    def score_names(self) -> list[str]:
        return [name for (name,) in self.db.execute("SELECT DISTINCT j.key FROM trials, json_each(scores) j ORDER BY 1")]

    def close(self) -> None:
        self.db.execute("PRAGMA synchronous=FULL")
        self.db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self.db.close()
