"""Files are there whole or not at all, whatever happens while they are written."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest

from needlework.files import beside, whole


@contextmanager
def in_bytes(path: Path) -> Iterator[IO[bytes]]:
    with beside(path) as half, half.open("wb") as file:
        yield file


@pytest.mark.parametrize("write,text", [(whole, "new"), (in_bytes, b"new")])
def test_a_file_that_fails_leaves_the_old_one(tmp_path: Path, write: Any, text: Any) -> None:
    path = tmp_path / "page"
    path.write_text("old")

    def interrupted() -> None:
        with write(path) as file:
            file.write(text)
            raise OSError(errno.ENOSPC, "full")

    with pytest.raises(OSError, match="full"):
        interrupted()
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("page", "old")]
    with write(path) as file:
        file.write(text)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("page", "new")]
