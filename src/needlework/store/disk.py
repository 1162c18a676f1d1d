"""A run's directory on the disk: claiming it, naming what keeps it from being written, reading it all the same."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from needlework.errors import NeedleworkError, shown

LOCK_NAME = "run.lock"


class StoreError(NeedleworkError):
    """The disk does not take what is written. No trial is to blame: the run stops and can be taken up again."""


def is_full(error: BaseException) -> bool:
    """Whether an error, of SQLite or of the system, says that the disk is full."""
    return sqlite_code(error) == sqlite3.SQLITE_FULL or getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)


def sqlite_code(error: BaseException) -> int:
    """SQLite's primary result code; 0 for other errors."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Errors of SQLite and of the system inside this block become a StoreError that says what to do."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        cure = "make room there" if is_full(error) else "mend that"
        raise StoreError(
            f"cannot write into {folder}: {error}. Everything that was finished is kept; {cure}, and the same command goes on"
        ) from None


def made(directory: Path | str) -> Path:
    """A directory to write into, made if it is missing."""
    folder = Path(directory)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise NeedleworkError(f"{folder} is a file; give a directory") from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise NeedleworkError(f"cannot write into {shown(str(folder))}: {why}; choose another directory") from None
    return folder


@contextmanager
def claimed(directory: Path | str) -> Iterator[Path]:
    """Own a run's directory: made if missing, refused while another process writes. A killed owner owns nothing.

    What was made here goes again if nothing was put into it: a try that fails at once leaves no trace.
    """
    missing = [folder for folder in (Path(directory), *Path(directory).parents) if not os.path.exists(folder)]
    folder = made(directory)
    try:
        with _locked(folder):
            yield folder
            missing = []
    finally:
        with suppress(OSError):  # another run may have come in between
            if missing and [file.name for file in folder.iterdir()] == [LOCK_NAME]:
                (folder / LOCK_NAME).unlink()
                for empty in missing:
                    empty.rmdir()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    try:
        lock = (folder / LOCK_NAME).open("a+b", buffering=0)
    except OSError as error:
        raise NeedleworkError(f"cannot write into {folder}: {error.strerror}; choose another directory") from None
    with lock:  # closing it gives the lock back; so does the system when the process dies
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
        yield


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """What cannot be read inside this block is told as what it is: a damaged store."""
    try:
        yield
    except (sqlite3.DatabaseError, json.JSONDecodeError) as error:
        if is_full(error) or sqlite_code(error) in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_BUSY):
            raise
        raise damaged(path, str(error)) from None


def damaged(path: Path, why: str) -> NeedleworkError:
    return NeedleworkError(
        f"{path} is damaged ({why}). Nothing was changed: put a copy of before in its place, or choose another directory;"
        " `sqlite3 FILE .recover` gets out of it what can be read"
    )


def check_length(path: Path) -> None:
    """Refuse a database that is shorter than its own first page says: it was not copied whole."""
    log = path.with_name(f"{path.name}-wal")
    if os.path.exists(log) and log.stat().st_size:
        return  # a stop while the log was written back: SQLite does that again
    with path.open("rb") as file:
        head = file.read(100)
    if len(head) == 100 and head.startswith(b"SQLite format 3"):
        page = int.from_bytes(head[16:18], "big")
        whole = (65536 if page == 1 else page) * int.from_bytes(head[28:32], "big")
        counted = head[24:28] == head[92:96]  # else an older SQLite wrote it last, and did not count
        if counted and path.stat().st_size < whole:
            raise damaged(path, f"it has {path.stat().st_size:,} bytes and should have {whole:,}: its end is missing")


def writable(path: Path) -> bool:
    return os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)


def copied(path: Path) -> TemporaryDirectory[str]:
    """A store in a place where it may be written, for reading it.

    SQLite cannot read a log of writes that it may not write to, nor can an older store be brought up to date there.
    """
    folder = TemporaryDirectory(prefix="needlework-")
    for name in (path.name, f"{path.name}-wal"):
        if path.with_name(name).exists():
            shutil.copyfile(path.with_name(name), Path(folder.name) / name)
    return folder
