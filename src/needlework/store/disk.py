"""A run's directory on the disk: claiming it, naming what keeps it from being written, reading it all the same."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from needlework.errors import NeedleworkError

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


@contextmanager
def claimed(directory: Path | str) -> Iterator[Path]:
    """Own a run's directory: made if missing, refused while another process writes. A killed owner owns nothing."""
    folder = Path(directory)
    try:
        folder.mkdir(parents=True, exist_ok=True)
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
        yield folder


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
