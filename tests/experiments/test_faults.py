"""What can happen to a run from outside: damaged stores, read-only media, models that vanish, no memory, a clock set back."""

from __future__ import annotations

import ctypes
import io
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fakes
import pytest
from rich.console import Console
from test_run import go, table
from typer.testing import CliRunner

from needlework import zoo
from needlework.cli import app
from needlework.errors import NeedleworkError
from needlework.experiments import run
from needlework.reports import summary
from needlework.results import Store, claimed
from needlework.results.export import export
from needlework.results.store import FILE_NAME

SRC = Path(run.__file__).parents[2]


pytestmark = pytest.mark.usefixtures("small_chunks")


@pytest.fixture
def finished(plan_file: Path, tmp_path: Path) -> Path:
    """The directory of a run that is done."""
    go(plan_file, tmp_path / "out")
    return tmp_path / "out"


def _change(folder: Path, statement: str) -> None:
    db = sqlite3.connect(folder / FILE_NAME)
    db.execute(statement)
    db.commit()
    db.close()


def _cut(folder: Path) -> None:
    whole = (folder / FILE_NAME).read_bytes()
    (folder / FILE_NAME).write_bytes(whole[:-100])


def _page(folder: Path) -> None:
    whole = bytearray((folder / FILE_NAME).read_bytes())
    for page in range(2, len(whole) // 4096):
        whole[4096 * page : 4096 * page + 300] = b"\xaa" * 300
    (folder / FILE_NAME).write_bytes(bytes(whole))


DAMAGES: dict[str, tuple[Any, str]] = {
    "cut by 100 bytes": (_cut, "its end is missing"),
    "corrupt pages": (_page, "is damaged"),
    "broken JSON": ("UPDATE trials SET scores = '{x'", "is damaged"),
    "facts that are a list": ("UPDATE trials SET facts = '[]'", "a value of facts is no dict"),
    "broken JSON about models": ("UPDATE meta SET value = '{x' WHERE key = 'models'", "is damaged"),
    "models that are a list": (
        "UPDATE meta SET value = '[1]' WHERE key = 'models'",
        "its entry 'models': Input should be an object",
    ),
    "experiments that are a number": (
        "UPDATE meta SET value = '5' WHERE key = 'experiments'",
        "its entry 'experiments': Input should be an object",
    ),
    **{
        f"meta.{key} = {value[:60]}": (f"INSERT OR REPLACE INTO meta VALUES ('{key}', '{value}')", f"its entry '{key}'")
        for key, value in [
            ("models", "null"),
            ("models", '{"alpha": 5}'),
            ("models", '{"alpha": {"anatomy": []}}'),
            ("models", '{"alpha": {"anatomy": {"layers": 3}}}'),
            ("models", '{"alpha": {"anatomy": {"layers": [{"attention": {}}]}}}'),
            ("models", '{"alpha": {"anatomy": {"parameters": "many"}}}'),
            ("models", '{"alpha": {"checkup": {"checks": [{}]}}}'),
            ("models", '{"alpha": {"checkup": {"checks": [], "quick": true, "at": 5, "versions": {}}}}'),
            ("experiments", '{"one": []}'),
            ("experiments", '{"one": {"tasks": []}}'),
            ("experiments", '{"one": {"tasks": {"fake": 1}}}'),
            ("experiments", '{"one": {"tasks": {"fake": {"kind": "fake", "options": []}}}}'),
            ("rankings", '{"alpha": []}'),
            ("rankings", '{"alpha": {"c": {}}}'),
            ("rankings", '{"alpha": {"c": {"order": "x", "sinks": {"0": [0.5]}, "sinks_by_entropy": {"0": [0.5]}}}}'),
            ("rankings", '{"alpha": {"c": {"order": "ranking(0.0)", "sinks": {"1": [0.5]}, "sinks_by_entropy": {}}}}'),
            ("semantics_version", "[2]"),
            ("scores_version", '"x"'),
            ("recorded", "[[1]]"),
            ("plan", "7"),
            ("planned", '[["a", "b", "c", "many"]]'),
        ]
    },
    "a plan that is nested too deep": (f"UPDATE meta SET value = '{'[' * 100_000}' WHERE key = 'plan'", "is damaged"),
    "a newer version": ("UPDATE meta SET value = '99' WHERE key = 'schema_version'", "was written with store version 99"),
    "a version that is none": (
        "UPDATE meta SET value = '\"x\"' WHERE key = 'schema_version'",
        "was written with store version x",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_store_is_told_and_left_alone(damage: str, finished: Path, plan_file: Path, tmp_path: Path) -> None:
    how, says = DAMAGES[damage]
    how(finished) if callable(how) else _change(finished, how)
    before = (finished / FILE_NAME).read_bytes()
    with pytest.raises(NeedleworkError) as error:
        go(plan_file, finished)
    assert says in str(error.value)
    out = ["--out", str(tmp_path / "elsewhere")]
    for words in (["report", str(finished), *out], ["export", str(finished), "--to", "csv", *out], ["rescore", str(finished)]):
        said = CliRunner().invoke(app, words)
        assert said.exit_code == 2, (words[0], said.output)
        assert says in " ".join(said.output.split())
    assert (finished / FILE_NAME).read_bytes() == before, "nothing was changed"


@pytest.mark.parametrize("name", [FILE_NAME, f"{FILE_NAME}-wal"])
def test_a_pipe_in_the_place_of_a_store_is_refused(name: str, plan_file: Path, tmp_path: Path) -> None:
    """Opening it would wait for ever for somebody who writes."""
    go(plan_file, tmp_path / "out")
    (tmp_path / "out" / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / "out" / name)
    for words in (["report"], ["rescore"], ["export", "--to", "csv"], ["compare", str(tmp_path / "out")]):
        said = CliRunner().invoke(app, [words[0], str(tmp_path / "out"), *words[1:]])
        assert said.exit_code == 2, (words, said.output)
        assert "is no regular file" in " ".join(said.output.split())
    with pytest.raises(NeedleworkError, match="is no regular file"):
        go(plan_file, tmp_path / "out")


@pytest.mark.slow
def test_an_unfinished_run_says_so_on_the_page_in_the_terminal_and_in_json(
    finished: Path, plan_file: Path, tmp_path: Path
) -> None:
    assert Store(finished).progress() == (146, 146)
    assert "not finished" not in CliRunner().invoke(app, ["report", str(finished)]).output
    _change(finished, "DELETE FROM trials WHERE rowid > 60")
    words = f"{finished} is not finished: 60 of 146 trials are done"
    said = CliRunner().invoke(app, ["report", str(finished)])
    assert words in said.output.replace("\n", " ")
    assert words in (finished / "report.html").read_text()
    assert words in _shown(summary([finished]))
    (path,) = export(finished, "json")
    assert json.loads(path.read_text())["progress"] == {"done": 60, "planned": 146, "finished": False}
    go(plan_file, finished)
    assert "not finished" not in CliRunner().invoke(app, ["report", str(finished)]).output


def _shown(table: Any) -> str:
    console = Console(width=400, record=True, file=io.StringIO())
    console.print(table)
    return console.export_text()


def test_a_large_store_tells_what_is_damaged_when_it_is_read(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not read through when it is opened, and closing it does not hide what was found."""
    monkeypatch.setattr("needlework.results.store._CHECKED_BYTES", 0)
    _change(finished, "UPDATE trials SET scores = '{x'")
    store = Store(finished)
    with pytest.raises(NeedleworkError, match="is damaged"):
        list(store.rows())
    store.close()


def test_closing_never_hides_the_cause(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("needlework.results.store._CHECKED_BYTES", 0)
    _page(finished)

    def read() -> None:
        store = Store(finished)
        try:
            for _ in store.rows():
                raise RuntimeError("the cause")  # while a reading is under way
        finally:
            store.close()

    with pytest.raises((RuntimeError, NeedleworkError), match=r"the cause|is damaged"):
        read()


def test_a_store_that_was_stopped_in_the_middle_of_its_log_is_whole(finished: Path, plan_file: Path) -> None:
    """A log beside the database: the file itself may then be shorter than it says."""
    shutil.copytree(finished, finished.with_name("copy"))
    store = Store(finished, create=True)
    store.set_meta("x", ["y"] * 5000)
    for name in (FILE_NAME, f"{FILE_NAME}-wal"):
        shutil.copy(finished / name, finished.with_name("copy") / name)
    store.close()
    again = Store(finished.with_name("copy"))
    assert again.meta("x") == ["y"] * 5000
    again.close()


# --- read-only media --------------------------------------------------------------------------------------------------


def _held_back() -> None:
    """Root is not held back by permissions; without this capability it is, once the next program begins."""
    drop_from_bounding_set, dac_override = 24, 1
    ctypes.CDLL(None).prctl(drop_from_bounding_set, dac_override, 0, 0, 0)


def _command(words: list[str]) -> subprocess.CompletedProcess[str]:
    """The command line in a process that permissions hold back."""
    code = "import sys; from needlework.cli import app; app(sys.argv[1:])"
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    call = [sys.executable, "-c", code, *words]
    return subprocess.run(call, capture_output=True, text=True, check=False, env=env, preexec_fn=_held_back)


@pytest.mark.slow
def test_a_run_on_read_only_media_can_be_reported_elsewhere(finished: Path, plan_file: Path) -> None:
    folder, elsewhere = finished, finished.with_name("elsewhere")
    for file in folder.iterdir():
        file.chmod(0o444)
    folder.chmod(0o555)
    try:
        said = _command(["report", str(folder), "--out", str(elsewhere)])
        assert said.returncode == 0, said.stdout + said.stderr
        assert (elsewhere / "report.html").stat().st_size > 1000
        said = _command(["export", str(folder), "--to", "csv", "--out", str(elsewhere)])
        assert said.returncode == 0, said.stdout + said.stderr
        for words in (
            ["report", str(folder)],
            ["rescore", str(folder)],
            ["run", "02", "--fast", "--model", "tiny-griffin-small"],
        ):
            said = _command([*words, "--out", str(folder)] if words[0] == "run" else words)
            assert said.returncode == 2, said.stdout + said.stderr
            assert "Permission denied" in said.stderr
            assert "Traceback" not in said.stderr
    finally:
        folder.chmod(0o755)


# --- a try that fails at once -------------------------------------------------------------------------------------------


class Unloadable(fakes.FakeModels):
    def load(self, info: Any) -> Any:
        raise NeedleworkError("the weights cannot be loaded")


def test_a_first_try_that_fails_leaves_nothing_and_the_mended_model_is_taken(plan_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    with pytest.raises(NeedleworkError, match="cannot be loaded"):
        fakes.run_fakes(plan_file, out, Unloadable(weights="b" * 32))
    assert not (tmp_path / "deep").exists()
    out.mkdir(parents=True)
    (out / "notes.txt").write_text("mine")
    with pytest.raises(NeedleworkError, match="cannot be loaded"):
        fakes.run_fakes(plan_file, out, Unloadable(weights="b" * 32))
    assert sorted(file.name for file in out.iterdir()) == ["notes.txt", "run.lock"], "a directory of the user's stays"
    assert fakes.run_fakes(plan_file, out).sound


def test_a_killed_first_try_does_not_bind_the_weights(plan_file: Path, tmp_path: Path) -> None:
    """A store that was signed but holds no row of a model takes that model as it is now."""
    out = tmp_path / "out"
    with claimed(out) as folder:
        store = Store(folder, create=True)
        store.set_meta("models", {"alpha": {"weights": "b" * 32, "tokenizer": "x", "dtype": "y", "window_rule": "z"}})
        store.db.close()  # killed: nothing is tidied up
    assert (out / FILE_NAME).exists()
    assert fakes.run_fakes(plan_file, out).sound
    with pytest.raises(NeedleworkError, match="made with another weights"):
        fakes.run_fakes(plan_file, out, fakes.FakeModels(weights="c" * 32))


def test_what_was_finished_before_a_failure_stays(plan_file: Path, tmp_path: Path) -> None:
    class Stopped(fakes.FakeActor):
        def answers(self, requests: Any) -> Iterator[Any]:
            if self.calls:
                raise KeyboardInterrupt
            yield from super().answers(requests)

    with pytest.raises(KeyboardInterrupt):
        fakes.run_fakes(plan_file, tmp_path / "out", fakes.FakeModels(Stopped()))
    store = Store(tmp_path / "out")
    assert len(store.done()) > 0
    store.close()
    go(plan_file, tmp_path / "out")
    go(plan_file, tmp_path / "whole")
    assert table(tmp_path / "out") == table(tmp_path / "whole")


# --- the world around it ------------------------------------------------------------------------------------------------

LIVE = """
models: [{source: %s, name: m}]
experiments:
  a: {tasks: [{kind: niah, lengths: [64], depths: [0, 50], samples: 2}], interventions: [none, "keep_heads(k=0..1)"]}
"""


@pytest.mark.slow
def test_a_model_directory_that_vanishes_in_the_middle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two commands, and after it was looked at: said in words, rows intact, and put back it goes on."""
    model = Path(shutil.copytree(zoo.path("tiny-griffin-small"), tmp_path / "model"))
    (tmp_path / "plan.yaml").write_text(LIVE % model)
    words = ["run", str(tmp_path / "plan.yaml"), "--out", str(tmp_path / "out")]
    from needlework.experiments.models import DiskModels

    look = DiskModels.inspect

    def look_and_lose(self: DiskModels, asked: Any) -> Any:
        info = look(self, asked)
        model.rename(tmp_path / "gone")
        return info

    with monkeypatch.context() as lost:
        lost.setattr(DiskModels, "inspect", look_and_lose)
        said = CliRunner().invoke(app, words)
    assert said.exit_code == 2, said.output
    assert "there is no directory" in " ".join(said.output.split())
    assert not (tmp_path / "out").exists()
    said = CliRunner().invoke(app, words)
    assert (said.exit_code, "there is no" in said.output) == (2, True), said.output
    (tmp_path / "gone").rename(model)
    assert CliRunner().invoke(app, words).exit_code == 0
    before = table(tmp_path / "out")
    model.rename(tmp_path / "gone")
    assert CliRunner().invoke(app, words).exit_code == 2
    assert table(tmp_path / "out") == before


def test_out_of_memory_fails_its_trial_and_no_other(plan_file: Path, tmp_path: Path) -> None:
    class Starved(fakes.FakeActor):
        def answers(self, requests: Any) -> Iterator[Any]:
            if any(request.prompt[0] == 7 for request in requests):
                raise MemoryError("one trial does not fit into memory")
            yield from super().answers(requests)

    assert not fakes.run_fakes(plan_file, tmp_path / "out", fakes.FakeModels(Starved())).sound
    store = Store(tmp_path / "out")
    failed = [row for row in store.rows() if row.finish == "failed"]
    every = list(store.rows())
    store.close()
    assert 0 < len(failed) < len(every)
    assert all(row.error == "MemoryError: one trial does not fit into memory" for row in failed)
    assert fakes.run_fakes(plan_file, tmp_path / "out", retry_failed=True).sound


def test_no_memory_for_a_command_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def starved(*_: Any, **__: Any) -> None:
        raise MemoryError

    monkeypatch.setattr("needlework.inspection.anatomy_of", starved)
    said = CliRunner().invoke(app, ["inspect", "tiny-griffin"])
    assert (said.exit_code, "error: out of memory; choose a smaller model" in " ".join(said.output.split())) == (2, True)


def test_a_clock_that_is_set_back(plan_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, their order and their seconds do not hang on what time it is."""
    go(plan_file, tmp_path / "whole")
    now = iter(range(2_000_000_000, 0, -86_400))
    monkeypatch.setattr(time, "time", lambda: float(next(now)))
    monkeypatch.setattr(time, "time_ns", lambda: next(now) * 10**9)

    class Stopped(fakes.FakeActor):
        def answers(self, requests: Any) -> Iterator[Any]:
            if self.calls == 2:
                raise KeyboardInterrupt
            yield from super().answers(requests)

    with pytest.raises(KeyboardInterrupt):
        fakes.run_fakes(plan_file, tmp_path / "out", fakes.FakeModels(Stopped()))
    os.utime(tmp_path / "out" / FILE_NAME, (0, 0))  # a store from before time began
    go(plan_file, tmp_path / "out")
    assert table(tmp_path / "out") == table(tmp_path / "whole")
    store = Store(tmp_path / "out")
    assert all(0 <= row.seconds < 60 for row in store.rows())
    store.close()


def test_a_store_is_created_while_another_process_opens_it(tmp_path: Path) -> None:
    other = sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")  # SQLite refuses the switch to WAL at once under this lock, whatever its timeout
    release = threading.Timer(0.5, other.close)
    release.start()
    store = Store(tmp_path, create=True)
    release.join()
    assert store.db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    store.close()
