"""Files that are there whole or not at all, under names that stay where they belong."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

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


def file_name(text: str) -> str:
    """A name of one file or directory for any text: never a path, never hidden, and never the same for two texts."""
    words = re.sub(r"[^\w.-]+", "_", text).strip("_").lstrip(".")[:_LONGEST]
    if words and words == text:
        return words
    mark = hashlib.sha256(text.encode()).hexdigest()[:8]
    return f"{words}-{mark}" if words else mark
