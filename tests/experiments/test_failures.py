"""What fails is said, counted and tried again when asked to; a full disk is no trial's failure."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fakes
import pytest
from test_run import go, table
from typer.testing import CliRunner

from needlework.cli import app
from needlework.experiments import run
from needlework.receipts import Receipt
from needlework.results import Store, StoreError, claimed, is_full

PLAN_ARGUMENTS = ["run", "plan.yaml", "--out", "out"]


pytestmark = pytest.mark.usefixtures("small_chunks")


class Failing(fakes.FakeActor):
    def answers(self, requests: Any) -> Iterator[Any]:
        raise RuntimeError("out of order")
        yield

    def scores(self, asked: Any) -> Iterator[Any]:
        raise RuntimeError("out of order")
        yield


@pytest.fixture
def command(plan_file: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`needlework run` with a fake model."""
    actor: dict[str, fakes.FakeActor] = {}
    monkeypatch.chdir(plan_file.parent)
    monkeypatch.setattr(run, "DiskModels", lambda memory: fakes.FakeModels(actor["now"]))
    monkeypatch.setattr("needlework.tasks.make_task", fakes.make_task)

    def invoke(now: fakes.FakeActor, *more: str) -> Any:
        actor["now"] = now
        return CliRunner().invoke(app, [*PLAN_ARGUMENTS, *more])

    return invoke


def test_failed_trials_are_counted_told_and_tried_again(command: Any, plan_file: Path) -> None:
    shown = command(Failing())
    assert shown.exit_code == 1
    assert "146 of 146 trials failed, for instance: RuntimeError: out of order" in shown.stderr
    actor = fakes.FakeActor()
    assert command(actor).exit_code == 1, "a failure is a result"
    assert actor.calls == 0
    shown = command(actor, "--retry-failed")
    assert shown.exit_code == 0
    assert actor.calls
    assert "failed" not in shown.stderr
    go(plan_file, Path("whole"))
    assert table(Path("out")) == table(Path("whole"))


def test_failures_that_the_plan_no_longer_asks_for_do_not_count(command: Any, plan_file: Path) -> None:
    assert command(Failing()).exit_code == 1
    longer = fakes.PLAN.replace("{kind: fake, samples: 6}", "{kind: fake, length: 20}")
    plan_file.write_text(longer.replace("fake_choice", "{kind: fake_choice, length: 20}"))
    assert command(fakes.FakeActor()).exit_code == 0


def test_the_help_says_what_the_codes_mean() -> None:
    for name in ("run", "eval"):
        said = " ".join(CliRunner().invoke(app, [name, "--help"]).output.split())
        assert "Exit codes: 0 all is done; 1 " in said


def full_after(monkeypatch: pytest.MonkeyPatch, pages: int) -> None:
    """A disk with room for so many pages more: SQLite itself then says that it is full."""

    class Small(Store):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            (count,) = self.db.execute("PRAGMA page_count").fetchone()
            self.db.execute(f"PRAGMA max_page_count={count + pages}")

    monkeypatch.setattr(run, "Store", Small)


@pytest.mark.slow
@pytest.mark.parametrize("pages", [0, 3, 12, 20])
def test_a_full_disk_stops_the_run_and_blames_no_trial(
    command: Any, plan_file: Path, monkeypatch: pytest.MonkeyPatch, pages: int
) -> None:
    """The fake's numbers depend on the batch, as floats do: what was lost is asked in the same company."""
    actor = fakes.FakeActor()
    with monkeypatch.context() as small:
        full_after(small, pages)
        shown = command(actor)
    assert shown.exit_code == 2
    assert "database or disk is full" in shown.stderr
    assert "make room there, and the same command goes on" in " ".join(shown.stderr.split())
    store = Store(Path("out"))
    rows = list(store.rows())
    assert not [row for row in rows if row.finish == "failed"]
    assert len(actor.asked) - len(rows) <= 16, "the run stopped at once"
    store.close()
    assert command(fakes.FakeActor()).exit_code == 0
    go(plan_file, Path("whole"))
    assert table(Path("out")) == table(Path("whole"))


def test_a_disk_that_is_full_for_the_model_stops_the_run_too(command: Any) -> None:
    calls = []

    class Writing(fakes.FakeActor):
        def answers(self, requests: Any) -> Iterator[Any]:
            calls.append(requests)
            raise OSError(errno.ENOSPC, "No space left on device")
            yield

    shown = command(Writing())
    assert shown.exit_code == 2
    assert "No space left on device" in shown.stderr
    assert len(calls) == 1, "one by one it would be full as well"
    assert not Path("out").exists(), "nothing was finished, and nothing stays"


def test_a_lock_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "run.lock").symlink_to("/dev/full")
    with pytest.raises(StoreError, match="cannot write into"), claimed(tmp_path):
        pass


def test_what_is_a_full_disk() -> None:
    assert is_full(OSError(errno.ENOSPC, "x"))
    assert is_full(OSError(errno.EDQUOT, "x"))
    assert not is_full(OSError(errno.EACCES, "x"))
    assert not is_full(RuntimeError("disk is full"))


def test_a_condition_that_hides_nothing_in_any_trial_is_told(command: Any, plan_file: Path) -> None:
    class Idle(fakes.FakeActor):
        """Hides something in long prompts only."""

        def answers(self, requests: Any) -> Iterator[Any]:
            for i, answer in super().answers(requests):
                tokens = max((part.tokens for part in requests[i].intervention.parts), default=0)
                idle = len(requests[i].prompt) <= tokens
                yield i, replace(answer, receipt=Receipt(notes=("nothing to hide: the prompt is shorter",) if idle else ("no",)))

    plan_file.write_text(
        "models: [alpha]\nexperiments:\n  sweep:\n    tasks: [{kind: fake, samples: 6}]\n"
        "    interventions: [none, limit_context(4), limit_context(8), limit_context(400)]\n"
    )
    shown = command(Idle())
    assert shown.exit_code == 1
    lines = [line for line in shown.stderr.splitlines() if "hid nothing" in line]
    assert lines == ["limit_context(tokens=400) hid nothing in any of its 6 trials of sweep (alpha); choose fewer tokens"]
    assert not [row for row in Store(Path("out")).rows() if row.finish == "failed"]
    plan_file.write_text(plan_file.read_text().replace(", limit_context(400)", ""))
    assert command(Idle()).exit_code == 0, "some of its trials acted, and that one is no longer asked for"


@pytest.mark.parametrize("failed, idle, code", [(0, [], 0), (2, [], 1), (0, ["limit_context(tokens=9) hid nothing"], 1)])
def test_eval_ends_with_1_when_questions_failed(monkeypatch: pytest.MonkeyPatch, failed: int, idle: list[str], code: int) -> None:
    from needlework.lmeval import evaluate

    monkeypatch.setattr(evaluate, "evaluate", lambda *args, **options: evaluate.Summary([], {}, [], failed, idle))
    shown = CliRunner().invoke(app, ["eval", "x", "--tasks", "mini-mmlu", "--intervene", "none", "--out", "x"])
    assert shown.exit_code == code  # what failed or hid nothing is said by the run itself
