"""Files that are there whole or not at all, under names that stay where they belong."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from needlework.errors import NeedleworkError, shown

_LONGEST = 60  # characters; file systems take 255 bytes


@contextmanager
def beside(path: Path) -> Iterator[Path]:
    """A place to write a file: it becomes `path` when all is on the disk; if that fails, the file of before stays."""
    half = path.with_name(f".{path.name}.{os.getpid()}.half")
    try:
        yield half
        with half.open("rb") as file:
            os.fsync(file.fileno())  # a full disk is noticed here at the latest, while the old file is in its place
        half.replace(path)
    finally:
        half.unlink(missing_ok=True)


@contextmanager
def whole(path: Path) -> Iterator[IO[str]]:
    """A text file that is there whole or not at all."""
    with beside(path) as half, half.open("w", encoding="utf-8", newline="") as file:
        yield file


def read_text(path: Path | str, cure: str, encoding: str = "utf-8", most: int | None = None) -> str:
    """A text file of the user's; what is wrong with it is said with file and line, and how to mend it."""
    try:
        with Path(path).open("rb") as file:
            content = file.read() if most is None else file.read(most + 1)
    except (OSError, ValueError) as error:  # ValueError: a name that holds the character 0
        raise NeedleworkError(
            f"{shown(str(path))}: cannot be read ({getattr(error, 'strerror', None) or error}); {cure}"
        ) from None
    if most is not None and len(content) > most:
        raise NeedleworkError(f"{path}: has more than {most:,} bytes; {cure}")
    try:
        return content.decode(encoding).replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise NeedleworkError(f"{path}:{line}: is not UTF-8 text (byte 0x{content[error.start]:02x}); save it as UTF-8") from None


def file_name(text: str) -> str:
    """A name of one file or directory for any text: never a path, never hidden, and never the same for two texts."""
    words = re.sub(r"[^\w.-]+", "_", text).strip("_").lstrip(".")[:_LONGEST]
    if words and words == text:
        return words
    mark = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{words}-{mark}" if words else mark
