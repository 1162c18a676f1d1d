"""Files that are there whole or not at all: written beside their place, put on the disk, and then renamed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast


@contextmanager
def whole(path: Path) -> Iterator[IO[str]]:
    """A text file. Whatever goes wrong while it is written, the file of before stays and no half of the new one is left."""
    with _beside(path, "w", encoding="utf-8", newline="") as file:
        yield cast(IO[str], file)


@contextmanager
def whole_bytes(path: Path) -> Iterator[IO[bytes]]:
    """The same for pictures and other bytes."""
    with _beside(path, "wb") as file:
        yield cast(IO[bytes], file)


@contextmanager
def _beside(path: Path, mode: str, **how: Any) -> Iterator[IO[Any]]:
    half = path.with_name(f"{path.name}.{os.getpid()}.half")
    try:
        with half.open(mode, **how) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # a full disk is noticed here at the latest, while the old file is still in its place
        half.replace(path)
    finally:
        half.unlink(missing_ok=True)
