"""Files are there whole or not at all, whatever happens while they are written."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest

from needlework.errors import NeedleworkError
from needlework.files import atomic_path, atomic_write, new_directory, write_error


@contextmanager
def in_bytes(path: Path) -> Iterator[IO[bytes]]:
    with atomic_path(path) as half, half.open("wb") as file:
        yield file


@pytest.mark.parametrize("write,text", [(atomic_write, "new"), (in_bytes, b"new")])
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


KILLED = """
import os, sys
from pathlib import Path
from needlework.files import new_directory
with new_directory(Path(sys.argv[1])) as folder:
    (folder / "half").write_text("x")
    os.kill(os.getpid(), 9)
"""


def test_a_directory_is_new_or_not_there(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    for there in (tmp_path / "full", tmp_path / "full" / "file"):
        with pytest.raises(NeedleworkError, match="is there already"), new_directory(there):
            pass
    with pytest.raises(KeyError), new_directory(tmp_path / "new"):
        raise KeyError
    (tmp_path / "empty").mkdir()
    for name in ("empty", "deep/new"):
        with new_directory(tmp_path / name) as folder:
            (folder / "file").write_text("x")
            assert not (tmp_path / name / "file").exists()
        assert (tmp_path / name / "file").read_text() == "x"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deep", "empty", "full"]


def test_what_a_killed_process_left_of_a_directory_is_removed_and_what_is_being_written_is_not(tmp_path: Path) -> None:
    out = tmp_path / "out"
    killed = subprocess.run([sys.executable, "-c", KILLED, str(out)], check=False)
    assert killed.returncode == -9
    assert [path.name.endswith(".half") for path in tmp_path.iterdir()] == [True]
    with new_directory(out) as first:
        assert list(tmp_path.iterdir()) == [first]
        (first / "file").write_text("first")
        with pytest.raises(KeyError), new_directory(out) as second:
            raise KeyError
        assert (first / "file").exists(), "a second one does not take it for abandoned"
        assert not second.exists()
    assert (out / "file").read_text() == "first"
    assert list(tmp_path.iterdir()) == [out]


def test_the_systems_error_behind_a_failed_write_is_found() -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    assert write_error(full) is full
    wrapped = RuntimeError("unexpected pos")
    wrapped.__context__ = full
    assert write_error(wrapped) is full
    wrapped.__context__ = OSError(errno.ENOENT, "No such file")
    assert write_error(wrapped) is None
    named = type("SafetensorError", (Exception,), {})("Error while serializing: No space left on device (os error 28)")
    found = write_error(named)
    assert found is not None
    assert found.errno == errno.ENOSPC
