"""The store of a run: a locked directory with one SQLite file, one row per trial; committed rows survive a crash."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pydantic import ValidationError

from needlework.errors import NeedleworkError, short_repr
from needlework.results.rows import (
    ANSWER_FINISH,
    JSON_COLUMNS,
    LM_EVAL,
    META,
    SCHEMA_VERSION,
    Observation,
    Recording,
    Row,
    RowKey,
    column_types,
    columns,
    default_of,
)

FILE_NAME, LOCK_NAME = "run.sqlite", "run.lock"
_CHECKED_BYTES = 32 * 2**20
_RESULTS = ("trials", "observations")
_SYNC_SECONDS = 0.5  # between forced syncs to the disk; the operating system has rows at once


class StoreError(NeedleworkError):
    """The store cannot be written. This is no failure of a trial: the run stops and can be resumed."""


def is_full(error: BaseException) -> bool:
    """Return whether an SQLite or OS error means that the disk or the quota is full."""
    return _sqlite_code(error) == sqlite3.SQLITE_FULL or getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)


def _sqlite_code(error: BaseException) -> int:
    """Return the primary result code of an SQLite error; 0 for other errors."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Convert SQLite and OS errors inside the block into a StoreError that says what to do."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        hint = "make room there" if is_full(error) else "mend that"
        raise StoreError(
            f"cannot write into {folder}: {error}. Everything that was finished is kept; {hint}, and the same command goes on"
        ) from None


def _make_directory(directory: Path | str) -> Path:
    """Create a directory if it is missing and return its path."""
    folder = Path(directory)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise NeedleworkError(f"{folder} is a file; give a directory") from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise NeedleworkError(f"cannot write into {short_repr(str(folder))}: {why}; choose another directory") from None
    return folder


@contextmanager
def claimed(directory: Path | str) -> Iterator[Path]:
    """Lock a run's directory, created if missing; raise while another process holds the lock.

    The operating system releases the lock of a killed process. If the block raises and has written nothing, directories that
    were created here are removed again.
    """
    missing = [folder for folder in (Path(directory), *Path(directory).parents) if not os.path.exists(folder)]
    folder = _make_directory(directory)
    try:
        try:
            lock = (folder / LOCK_NAME).open("a+b", buffering=0)
        except OSError as error:
            raise NeedleworkError(f"cannot write into {folder}: {error.strerror}; choose another directory") from None
        with lock:  # closing the file releases the lock; so does the end of the process
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                lock.seek(0)
                owner = lock.read().decode().strip() or "unknown"
                raise NeedleworkError(
                    f"another run (process {owner}) is writing into {folder}; wait for it, or choose another directory"
                ) from None
            with writing(folder):
                lock.truncate(0)
                lock.write(str(os.getpid()).encode())
            yield folder
            missing = []
    finally:
        with suppress(OSError):  # another run may have started meanwhile
            if missing and [file.name for file in folder.iterdir()] == [LOCK_NAME]:
                (folder / LOCK_NAME).unlink()
                for empty in missing:
                    empty.rmdir()


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Convert database and JSON errors inside the block into the error for a damaged store."""
    try:
        yield
    except NeedleworkError:
        raise
    except (sqlite3.DatabaseError, ValueError, TypeError, RecursionError) as error:  # of json: malformed, no text or too deep
        if is_full(error) or _sqlite_code(error) in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_BUSY):
            raise
        raise _damaged(path, str(error)) from None


def _damaged(path: Path, why: str) -> NeedleworkError:
    return NeedleworkError(
        f"{path} is damaged ({why}). Nothing was changed: put a copy of before in its place, or choose another directory;"
        " `sqlite3 FILE .recover` gets out of it what can be read"
    )


def _check_length(path: Path) -> None:
    """Raise if a database is shorter than its header says, as after an incomplete copy."""
    log = path.with_name(f"{path.name}-wal")
    if os.path.exists(log) and log.stat().st_size:
        return  # a checkpoint may have been interrupted: SQLite repeats it
    with path.open("rb") as file:
        head = file.read(100)
    if len(head) == 100 and head.startswith(b"SQLite format 3"):
        page = int.from_bytes(head[16:18], "big")
        whole = (65536 if page == 1 else page) * int.from_bytes(head[28:32], "big")
        counted = head[24:28] == head[92:96]  # else an old SQLite wrote it last, and the page count is not valid
        if counted and path.stat().st_size < whole:
            raise _damaged(path, f"it has {path.stat().st_size:,} bytes and should have {whole:,}: its end is missing")


class Store:
    """The SQLite store of one run. Every write is one transaction, so that it survives a crash of the process.

    Attributes:
        directory: Directory of the run.
        db: Connection to the database; `needlework explain trials` describes its main table.
    """

    def __init__(self, directory: Path | str, create: bool = False) -> None:
        self.directory = Path(directory)
        path = self.directory / FILE_NAME
        if not create and not os.path.exists(path):
            raise NeedleworkError(f"{short_repr(str(directory))} holds no run; `needlework run PLAN --out {directory}` makes one")
        for file in (path, path.with_name(f"{FILE_NAME}-wal"), path.with_name(f"{FILE_NAME}-shm")):
            if os.path.exists(file) and not os.path.isfile(file):  # opening a pipe would block forever
                raise NeedleworkError(f"{short_repr(str(file))} is no regular file; choose another directory")
        self._synced = 0.0
        self._fresh = not os.path.exists(path)
        self._copy: TemporaryDirectory[str] | None = None
        if not create and not (os.access(path, os.W_OK) and os.access(self.directory, os.W_OK)):
            # SQLite cannot read a write-ahead log without write access
            self._copy = TemporaryDirectory(prefix="needlework-")
            for file in (path, path.with_name(f"{FILE_NAME}-wal")):
                if file.exists():
                    shutil.copyfile(file, Path(self._copy.name) / file.name)
        try:
            _make_directory(self.directory)
            if not self._fresh:
                _check_length(path)
            self.db = sqlite3.connect(self._copy.name + f"/{FILE_NAME}" if self._copy else path, timeout=30, isolation_level=None)
            for waited in range(300):  # for another process that opens the store: SQLite refuses this switch without waiting
                try:
                    self.db.execute("PRAGMA journal_mode=WAL")
                    break
                except sqlite3.OperationalError as error:
                    if _sqlite_code(error) != sqlite3.SQLITE_BUSY or waited == 299:
                        raise
                    time.sleep(0.1)
            self._check()
            self._prepare()
        except (OSError, sqlite3.DatabaseError) as error:
            if is_full(error) or _sqlite_code(error) == sqlite3.SQLITE_IOERR:
                with writing(self.directory):
                    raise
            if _sqlite_code(error) == sqlite3.SQLITE_CORRUPT:
                raise _damaged(path, str(error)) from None
            raise NeedleworkError(f"{path} is no needlework store ({error}); choose another directory") from None

    def _check(self) -> None:
        """Raise if the store is damaged. Stores above 32 MiB are not checked here, but when they are read."""
        file = self.directory / FILE_NAME
        if self._fresh or file.stat().st_size > _CHECKED_BYTES:
            return
        (found,) = self.db.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise _damaged(file, found)
        tables = {name for (name,) in self.db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        for key in META if "meta" in tables else ():
            self.meta(key)
        known = {row[1] for row in self.db.execute("PRAGMA table_info(trials)")}
        for name, kind in JSON_COLUMNS.items():
            if name not in known:
                continue
            with _reading(file):
                for (text,) in self.db.execute(f"SELECT DISTINCT {name} FROM trials"):
                    if not isinstance(json.loads(text), kind):
                        raise _damaged(file, f"a value of {name} is no {kind.__name__}")

    def _prepare(self) -> None:
        self.db.execute("CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL)")
        version = self.meta("schema_version")
        if version not in (None, SCHEMA_VERSION):
            raise NeedleworkError(
                f"{self.directory} was written with store version {version}, this is version {SCHEMA_VERSION};"
                " choose another directory"
            )
        self.db.execute(f"CREATE TABLE IF NOT EXISTS trials ({columns(Row)}, PRIMARY KEY (experiment, model, task, id))")
        present = {name for _, name, *_ in self.db.execute("PRAGMA table_info(trials)")}
        for name, kind in column_types(Row).items():
            if name not in present:  # an older store
                with suppress(sqlite3.OperationalError):  # another process has added it
                    self.db.execute(f"ALTER TABLE trials ADD COLUMN {name} {kind} NOT NULL DEFAULT {default_of(name)}")
        self.db.execute("CREATE INDEX IF NOT EXISTS by_condition ON trials (experiment, model, task, intervention)")
        self.db.execute("CREATE INDEX IF NOT EXISTS by_id ON trials (id)")
        self.db.execute(
            f"CREATE TABLE IF NOT EXISTS observations ({columns(Observation)},"
            " PRIMARY KEY (experiment, model, task, layer, head))"
        )
        self.db.execute("CREATE TABLE IF NOT EXISTS versions (id TEXT PRIMARY KEY, content TEXT NOT NULL)")
        if version is None:
            self.set_meta("schema_version", SCHEMA_VERSION)

    def meta(self, key: str) -> Any:
        """Return an entry of the table `meta`, None if missing; raise if it does not match its type in META."""
        file = self.directory / FILE_NAME
        with _reading(file):
            row = self.db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
            value = None if row is None else json.loads(row[0])
        if row is not None and key in META:
            try:  # names may contain lone surrogates, which pydantic's JSON refuses
                META[key].validate_json(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"), strict=True)
            except ValidationError as error:
                first = error.errors()[0]
                where = ".".join(short_repr(part) if isinstance(part, str) else str(part) for part in first["loc"])
                fault = f"{where}: {first['msg']}" if where else first["msg"]
                raise _damaged(file, f"its entry {short_repr(key)}: {fault}") from None
        return value

    def progress(self) -> tuple[int, int] | None:
        """Return (done, planned) numbers of trials; None if the store has no planned counts."""
        planned = self.meta("planned")
        if planned is None:
            return None
        groups = "SELECT experiment, model, task, count(*) FROM trials WHERE asked GROUP BY experiment, model, task"
        done = {tuple(group): count for *group, count in self.db.execute(groups)}
        shares = [(min(done.get((*group,), 0), count), count) for *group, count in planned]
        return sum(have for have, _ in shares), sum(count for _, count in shares)

    def set_meta(self, key: str, value: Any) -> None:
        self._write("INSERT OR REPLACE INTO meta VALUES (?, ?)", [(key, json.dumps(value))])

    def note_versions(self, versions: Mapping[str, str]) -> str:
        """Store software versions and settings and return their id for rows; equal content has an equal id."""
        text = json.dumps(versions, sort_keys=True)
        name = hashlib.sha256(text.encode()).hexdigest()[:8]
        self._write("INSERT OR IGNORE INTO versions VALUES (?, ?)", [(name, text)])
        return name

    def versions(self) -> dict[str, dict[str, str]]:
        with _reading(self.directory / FILE_NAME):
            return {name: json.loads(text) for name, text in self.db.execute("SELECT id, content FROM versions")}

    def add(self, rows: Sequence[Row] | Sequence[Observation]) -> None:
        """Insert rows, all of one kind, or replace those with the same key."""
        if not rows:
            return
        table = "trials" if isinstance(rows[0], Row) else "observations"
        names = [f.name for f in fields(rows[0])]
        marks, changes = ", ".join("?" for _ in names), ", ".join(f"{name} = excluded.{name}" for name in names)
        values = [[json.dumps(getattr(row, k)) if k in JSON_COLUMNS else getattr(row, k) for k in names] for row in rows]
        # Committed rows survive a killed process. They survive a power failure only after a sync, which is done at intervals.
        due = time.monotonic() - self._synced > _SYNC_SECONDS
        self.db.execute(f"PRAGMA synchronous={'FULL' if due else 'NORMAL'}")
        self._write(f"INSERT INTO {table} ({', '.join(names)}) VALUES ({marks}) ON CONFLICT DO UPDATE SET {changes}", values)
        if due:
            self._synced = time.monotonic()

    def _write(self, statement: str, values: Sequence[Sequence[Any]]) -> None:
        """Execute a statement for all values in one transaction."""
        with writing(self.directory), self.db:
            self.db.execute("BEGIN")
            self.db.executemany(statement, values)

    def done(self) -> dict[RowKey, str]:
        """Return the key of every stored trial with its scoring hash."""
        return {row[:4]: row[4] for row in self.db.execute("SELECT experiment, model, task, id, scoring FROM trials")}

    def mark_asked(self, wanted: AbstractSet[RowKey], where: str, values: Sequence[Any]) -> int:
        """Set the column `asked` of the rows that `where` selects: 1 for wanted rows, else 0; return the number of 0s."""
        rows = self.db.execute(f"SELECT experiment, model, task, id, asked FROM trials WHERE {where}", values).fetchall()
        changed = [(1 - asked, *row) for *row, asked in rows if (tuple(row) in wanted) != bool(asked)]
        self._write("UPDATE trials SET asked = ? WHERE experiment = ? AND model = ? AND task = ? AND id = ?", changed)
        return sum(tuple(row) not in wanted for *row, _ in rows)

    def observed(self) -> set[Recording]:
        """Return the keys of all stored recordings."""
        return set(self.db.execute("SELECT DISTINCT experiment, model, task FROM observations"))

    def note_recording(self, recording: Recording, content: str, layers: Sequence[Mapping[str, Any]] = ()) -> None:
        """Store the content hash of a recording, and its rows of layers, after all of its observations are written."""
        others = [one for one in self.meta("layers") or [] if tuple(one[:3]) != recording]
        self.set_meta("layers", [*others, [*recording, list(layers)]])
        known = self.meta("recorded") or []
        self.set_meta("recorded", [*(one for one in known if tuple(one[:3]) != recording), [*recording, content]])

    def keep_recordings(self, wanted: Mapping[Recording, str]) -> None:
        """Delete recordings whose samples differ from the wanted ones: statistics cannot be split by sample."""
        known = {tuple(recording): content for *recording, content in self.meta("recorded") or []}
        stale = [r for r in self.observed() if r not in wanted or known.get(r) != wanted[r]]
        self._write("DELETE FROM observations WHERE experiment = ? AND model = ? AND task = ?", stale)
        if stale:
            self.set_meta("layers", [one for one in self.meta("layers") or [] if tuple(one[:3]) not in stale])

    def forget_failed(self, lm_eval: bool = False) -> None:
        """Let the next run repeat failed trials (of plans or of lm-eval): rescored if the answer is stored, else run again."""
        failed = f"finish = 'failed' AND kind {'=' if lm_eval else '!='} '{LM_EVAL}'"
        has_answer = f"json_extract(facts, '$.{ANSWER_FINISH}') IS NOT NULL"
        self._write(f"DELETE FROM trials WHERE {failed} AND NOT {has_answer}", [()])
        self._write(f"UPDATE trials SET scoring = '' WHERE {failed} AND {has_answer}", [()])

    def rows(self, where: str = "1", values: Sequence[Any] = ()) -> Iterator[Row]:
        names = [f.name for f in fields(Row)]
        with _reading(self.directory / FILE_NAME):
            for row in self.db.execute(f"SELECT {', '.join(names)} FROM trials WHERE {where}", values):
                yield Row(**{k: json.loads(v) if k in JSON_COLUMNS else v for k, v in zip(names, row, strict=True)})

    def observations(self) -> list[Observation]:
        names = [f.name for f in fields(Observation)]
        rows = self.db.execute(f"SELECT {', '.join(names)} FROM observations ORDER BY experiment, model, task, layer, head")
        return [Observation(**dict(zip(names, row, strict=True))) for row in rows]

    def close(self) -> None:
        empty = False
        with suppress(sqlite3.Error):  # on a full disk, rows stay in the WAL; errors were reported before
            empty = self._fresh and not any(self.db.execute(f"SELECT 1 FROM {t} LIMIT 1").fetchone() for t in _RESULTS)
            self.db.execute("PRAGMA synchronous=FULL")
            self.db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self.db.close()
        if empty:  # created by this process and without results: nothing to resume
            for name in (FILE_NAME, f"{FILE_NAME}-wal", f"{FILE_NAME}-shm"):
                (self.directory / name).unlink(missing_ok=True)
        if self._copy is not None:
            self._copy.cleanup()
