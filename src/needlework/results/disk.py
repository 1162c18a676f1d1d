"""Files of a run's directory: locking it, converting disk errors into messages, reading it without write access."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from needlework.errors import NeedleworkError, short_repr

LOCK_NAME = "run.lock"


class StoreError(NeedleworkError):
    """The store cannot be written. This is no failure of a trial: the run stops and can be resumed."""


def is_full(error: BaseException) -> bool:
    """Return whether an SQLite or OS error means that the disk or the quota is full."""
    return sqlite_code(error) == sqlite3.SQLITE_FULL or getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)


def sqlite_code(error: BaseException) -> int:
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


def made(directory: Path | str) -> Path:
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
    folder = made(directory)
    try:
        with _locked(folder):
            yield folder
            missing = []
    finally:
        with suppress(OSError):  # another run may have started meanwhile
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
        yield


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Convert database and JSON errors inside the block into the error for a damaged store."""
    try:
        yield
    except NeedleworkError:
        raise
    except (sqlite3.DatabaseError, ValueError, TypeError, RecursionError) as error:  # of json: malformed, no text or too deep
        if is_full(error) or sqlite_code(error) in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_BUSY):
            raise
        raise damaged(path, str(error)) from None


def damaged(path: Path, why: str) -> NeedleworkError:
    return NeedleworkError(
        f"{path} is damaged ({why}). Nothing was changed: put a copy of before in its place, or choose another directory;"
        " `sqlite3 FILE .recover` gets out of it what can be read"
    )


def check_length(path: Path) -> None:
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
            raise damaged(path, f"it has {path.stat().st_size:,} bytes and should have {whole:,}: its end is missing")


def writable(path: Path) -> bool:
    return os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)


def copied(path: Path) -> TemporaryDirectory[str]:
    """Copy a store into a temporary directory: SQLite cannot read a write-ahead log without write access."""
    folder = TemporaryDirectory(prefix="needlework-")
    for name in (path.name, f"{path.name}-wal"):
        if path.with_name(name).exists():
            shutil.copyfile(path.with_name(name), Path(folder.name) / name)
    return folder
