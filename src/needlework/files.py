"""Atomic writes, reading of user-provided text files, and safe file names."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import yaml

from needlework.errors import NeedleworkError, short_repr

_LONGEST = 60  # characters; file systems take 255 bytes


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` after the block, once it is on disk; on an error `path` is unchanged."""
    half = path.with_name(f".{path.name}.{os.getpid()}.half")
    try:
        yield half
        with half.open("rb") as file:
            os.fsync(file.fileno())  # a full disk raises here at the latest, before the old file is replaced
        half.replace(path)
    finally:
        half.unlink(missing_ok=True)


@contextmanager
def atomic_write(path: Path) -> Iterator[IO[str]]:
    """Open a text file for writing that replaces `path` when the block ends without an error."""
    with atomic_path(path) as half, half.open("w", encoding="utf-8", newline="") as file:
        yield file


@contextmanager
def new_directory(out: Path) -> Iterator[Path]:
    """Yield a hidden sibling of `out` to write into, and rename it to `out` when the block ends without an error.

    Nothing is overwritten. Siblings that a killed process left are removed.

    Raises:
        NeedleworkError: `out` exists and is not an empty directory.
    """
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise NeedleworkError(
            f"{short_repr(str(out))} is there already, and nothing is overwritten: give another --out, or remove it"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    for entry in out.parent.iterdir():
        if entry.name.startswith(f".{out.name}.") and entry.name.endswith(".half"):
            _remove_if_abandoned(entry)
    unfinished = out.with_name(f".{out.name}.{secrets.token_hex(4)}.half")
    unfinished.mkdir()
    lock = os.open(unfinished, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # held until the block or the process ends
        yield unfinished
        unfinished.rename(out)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
        os.close(lock)


def _remove_if_abandoned(unfinished: Path) -> None:
    """Remove an unfinished directory unless the process that writes it is alive and holds its lock."""
    try:
        lock = os.open(unfinished, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(unfinished, ignore_errors=True)
    except OSError:
        pass  # in use
    finally:
        os.close(lock)


_WRITE_FAILURES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)


def write_error(error: BaseException) -> OSError | None:
    """Return the operating system's error behind a failed write, or None if there is none.

    safetensors raises its own error, whose message has the code; torch raises one whose context is the OSError.
    """
    link: BaseException | None = error
    while link is not None:
        code = getattr(link, "errno", None)
        if type(link).__name__ == "SafetensorError" and (named := re.search(r"\(os error (\d+)\)", str(link))):
            code = int(named[1])
        if code in _WRITE_FAILURES:
            return link if isinstance(link, OSError) else OSError(code, os.strerror(code))
        link = link.__cause__ or link.__context__
    return None


def read_text(path: Path | str, hint: str, encoding: str = "utf-8", most: int | None = None) -> str:
    """Read a user-provided text file of at most `most` bytes, with newlines normalised; errors name the file and the fix."""
    try:
        with Path(path).open("rb") as file:
            content = file.read() if most is None else file.read(most + 1)
    except (OSError, ValueError) as error:  # ValueError: a path with a null character
        raise NeedleworkError(
            f"{short_repr(str(path))}: cannot be read ({getattr(error, 'strerror', None) or error}); {hint}"
        ) from None
    if most is not None and len(content) > most:
        raise NeedleworkError(f"{path}: has more than {most:,} bytes; {hint}")
    try:
        return content.decode(encoding).replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise NeedleworkError(f"{path}:{line}: is not UTF-8 text (byte 0x{content[error.start]:02x}); save it as UTF-8") from None


def package_yaml(module: str, name: str) -> Any:
    """Read a YAML file of the package that lies beside a module, which is given by its `__file__`."""
    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where PyYAML was built with libyaml
    return yaml.load((Path(module).parent / name).read_text(encoding="utf-8"), loader)


def file_name(text: str) -> str:
    """Return a file name for any text: no path, not hidden, and (by a hash) different for different texts."""
    words = re.sub(r"[^\w.-]+", "_", text).strip("_").lstrip(".")[:_LONGEST]
    if words and words == text:
        return words
    mark = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{words}-{mark}" if words else mark
