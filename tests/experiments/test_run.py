"""A run keeps what is finished, goes on where it was, and refuses what would mix answers that do not belong together."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fakes
import pytest

from needlework.errors import NeedleworkError
from needlework.requests import Request
from needlework.results import Store, claimed

HERE = Path(__file__).parent


def go(plan: Path, out: Path, source: fakes.FakeModels | None = None, code: int = 0, **options: Any) -> fakes.FakeModels:
    source = source or fakes.FakeModels()
    assert fakes.run_fakes(plan, out, source, **options).sound == (code == 0)
    return source


def table(out: Path) -> list[Any]:
    """Everything but timing."""
    store = Store(out)
    rows = sorted((replace(t, seconds=0.0) for t in store.rows()), key=lambda t: (t.experiment, t.model, t.task, t.id))
    observed = store.observations()
    store.close()
    return [*rows, *observed]


pytestmark = pytest.mark.usefixtures("small_chunks")


def test_every_trial_of_the_plan_has_a_row(plan_file: Path, tmp_path: Path) -> None:
    go(plan_file, tmp_path / "out")
    store = Store(tmp_path / "out")
    count = dict(store.db.execute("SELECT experiment, count(*) FROM trials GROUP BY 1"))
    # 6 samples x 2 seeds x (none, k=0..4 in decode and in both); 4 x 2; 6 x 1
    assert count == {"sweep": 6 * 2 * 11, "choice": 8, "look": 6}
    row = next(store.rows("experiment = 'sweep' AND intervention = 'none' AND seed = 1 AND sample = 'fake/2'"))
    assert row.scores.keys() == {"correct", "options"}
    assert row.spans == {"needle": [[1, 4]]}
    assert row.facts == {"context_tokens": 8, "twin_target": "999", "answer_option": 0}
    assert row.receipt["layers"] == [{"layer": 0, "phase": "decode", "positions": 1}]
    assert row.finish == "stop"
    assert row.prompt_tokens == 8
    assert row.output
    assert row.logprobs
    assert row.margins
    assert store.versions()[row.versions] == {"needlework": "test"}
    choice = next(store.rows("experiment = 'choice'"))
    assert choice.finish == "scored"
    assert len(choice.logprobs) == 2


def test_a_question_that_two_experiments_want_is_asked_once(plan_file: Path, tmp_path: Path) -> None:
    models = go(plan_file, tmp_path / "out")
    # the samples of "look" are those of "sweep" with seed 0 under none
    assert len(models.actor.asked) == 6 * 2 * 11


def test_an_experiment_added_later_takes_answers_that_are_there(plan_file: Path, tmp_path: Path) -> None:
    text = plan_file.read_text()
    plan_file.write_text(text[: text.index("  look:")])
    go(plan_file, tmp_path / "out")
    plan_file.write_text(text.replace("    observe: true\n", ""))
    models = go(plan_file, tmp_path / "out")
    assert models.loaded == []
    whole = fakes.FakeModels()
    go(plan_file, tmp_path / "whole", whole)
    assert table(tmp_path / "out") == table(tmp_path / "whole")


def test_a_finished_run_loads_no_model(plan_file: Path, tmp_path: Path) -> None:
    go(plan_file, tmp_path / "out")
    before = table(tmp_path / "out")
    assert go(plan_file, tmp_path / "out").loaded == []
    assert table(tmp_path / "out") == before


def test_observations_are_written_once(plan_file: Path, tmp_path: Path) -> None:
    go(plan_file, tmp_path / "out")
    observed = Store(tmp_path / "out").observations()
    assert [(o.experiment, o.task, o.layer, o.head, o.samples) for o in observed] == [
        ("look", "fake", 0, head, 6) for head in range(4)
    ]


class Stopping(fakes.FakeActor):
    """Stops after some generated answers, as Ctrl-C does."""

    left = 20

    def answers(self, requests: Any) -> Iterator[Any]:
        for pair in super().answers(requests):
            yield pair
            self.left -= not requests[pair[0]].options
            if self.left == 0:
                raise KeyboardInterrupt


def test_ctrl_c_is_passed_on_and_loses_nothing(plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt):
        go(plan_file, tmp_path / "out", fakes.FakeModels(Stopping()))
    assert "the same command" in capsys.readouterr().err.lower()
    store = Store(tmp_path / "out")
    asked = store.db.execute("SELECT count(DISTINCT id) FROM trials WHERE mode = 'generate'").fetchone()[0]
    assert asked == 20
    store.close()
    go(plan_file, tmp_path / "out")
    go(plan_file, tmp_path / "whole")
    assert table(tmp_path / "out") == table(tmp_path / "whole")


@pytest.mark.serial
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
def test_killed_at_random_moments_and_resumed_gives_the_same_table(plan_file: Path, tmp_path: Path, seed: int) -> None:
    """4 x 5 kills with SIGKILL in a real process; each time the next run goes on."""
    go(plan_file, tmp_path / "whole")
    expected = table(tmp_path / "whole")
    draw = random.Random(seed)
    out = tmp_path / "out"
    counts = [0]
    kills = 0
    while kills < 5:
        process = _start(plan_file, out, pause=0.02)
        if kills != 2:  # once anywhere from the first import on, else while trials come in
            _wait_for_rows(out, process, counts[-1])
        time.sleep(draw.uniform(0, 0.3 if kills != 2 else 2.0))
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, "the plan was finished before five kills; give it more pause"
        kills += 1
        counts.append(_count(out))
        assert counts[-1] >= counts[-2]
    assert 0 < counts[1] < len(expected)
    assert _start(plan_file, out, pause=0).wait() == 0
    assert table(out) == expected


def _start(plan: Path, out: Path, pause: float) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(HERE / "fakes.py"), str(plan), str(out), str(pause)]
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    # A shell that puts tests in the background makes them ignore Ctrl-C, and children inherit that: listen again.
    return subprocess.Popen(command, stderr=subprocess.PIPE, env=env, preexec_fn=_hear_ctrl_c)


def _hear_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _count(out: Path) -> int:
    if not (out / "run.sqlite").exists():
        return 0
    store = Store(out)
    (count,) = store.db.execute("SELECT count(*) FROM trials").fetchone()
    store.close()
    return int(count)


def _wait_for_rows(out: Path, process: subprocess.Popen[bytes], before: int, seconds: float = 30) -> None:
    """Until the run is at work (it takes a while to start), so that the kill hits it and not its imports."""
    deadline = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < deadline and _count(out) <= before:
        time.sleep(0.01)


@pytest.mark.serial
def test_ctrl_c_in_a_real_process(plan_file: Path, tmp_path: Path) -> None:
    process = _start(plan_file, tmp_path / "out", pause=0.02)
    _wait_for_rows(tmp_path / "out", process, 0)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    assert process.returncode == 130, said
    assert b"the same command" in said
    assert b"Traceback" not in said


@pytest.mark.serial
def test_two_runs_into_one_directory_are_refused(plan_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = _start(plan_file, out, pause=0.05)
    _wait_for_rows(out, first, 0)
    try:
        with pytest.raises(NeedleworkError, match=rf"another run \(process {first.pid}\) is writing into"):
            go(plan_file, out)
        assert first.poll() is None, "the first run must not notice"
    finally:
        first.kill()
        first.wait()
    go(plan_file, out)  # a killed owner owns nothing


def test_the_lock_is_free_again_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), claimed(tmp_path):
        raise ZeroDivisionError
    with claimed(tmp_path):
        pass


@pytest.mark.parametrize(
    "other, told",
    [
        (fakes.FakeModels(weights="x" * 32), "another weights of alpha"),
        (fakes.FakeModels(tokenizer_hash="x" * 32), "another tokenizer of alpha"),
    ],
)
def test_a_store_of_another_model_is_refused(plan_file: Path, tmp_path: Path, other: fakes.FakeModels, told: str) -> None:
    go(plan_file, tmp_path / "out")
    before = table(tmp_path / "out")
    with pytest.raises(NeedleworkError, match=told):
        go(plan_file, tmp_path / "out", other)
    assert table(tmp_path / "out") == before


def test_a_store_with_models_that_this_run_lacks_is_refused(plan_file: Path, tmp_path: Path) -> None:
    go(plan_file, tmp_path / "out")
    with pytest.raises(NeedleworkError, match=r"holds trials of alpha .* which this run does not have"):
        go(plan_file, tmp_path / "out", models=["beta"])


def test_a_store_of_other_semantics_or_schema_is_refused(
    plan_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go(plan_file, tmp_path / "out")
    monkeypatch.setattr("needlework.experiments.provenance.SEMANTICS_VERSION", 3)
    with pytest.raises(NeedleworkError, match="semantics version 2, this is version 3"):
        go(plan_file, tmp_path / "out")
    monkeypatch.undo()
    for version in (1, 99):
        db = sqlite3.connect(tmp_path / "out" / "run.sqlite")
        db.execute("UPDATE meta SET value = ? WHERE key = 'schema_version'", (str(version),))
        db.commit()
        db.close()
        with pytest.raises(NeedleworkError, match=f"store version {version}"):
            go(plan_file, tmp_path / "out")


def test_a_file_that_is_no_store_is_refused(plan_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "run.sqlite").write_text("hello, I am not a database, and long enough to be looked at as one " * 20)
    with pytest.raises(NeedleworkError, match="is no needlework store"):
        go(plan_file, out)
    (tmp_path / "file").write_text("")
    with pytest.raises(NeedleworkError, match="is a file; give a directory"):
        go(plan_file, tmp_path / "file")


def test_what_breaks_one_trial_fails_that_trial_alone(plan_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("needlework.experiments.trials.CHUNK_TRIALS", 64)  # several prompts in one call
    clean = go(plan_file, tmp_path / "clean", fakes.FakeModels(fakes.FakeActor(batchwise=False)))
    victim = clean.actor.asked[5]
    poisoned = fakes.FakeModels(fakes.FakeActor(batchwise=False, poison=frozenset({victim})))
    go(plan_file, tmp_path / "out", poisoned, code=1)
    store = Store(tmp_path / "out")
    failed = list(store.rows("finish = 'failed'"))
    assert {t.prompt for t in failed} == {" ".join(map(str, victim))}
    assert {t.error for t in failed} == {"RuntimeError: poisoned"}
    assert all(t.scores == {} for t in failed)
    others = [t for t in table(tmp_path / "clean") if getattr(t, "prompt", "") != failed[0].prompt]
    assert [t for t in table(tmp_path / "out") if getattr(t, "prompt", "") != failed[0].prompt] == others
    assert go(plan_file, tmp_path / "out", code=1).loaded == [], "a failure is a result: it is not tried again by itself"
    go(plan_file, tmp_path / "out", fakes.FakeModels(fakes.FakeActor(batchwise=False)), retry_failed=True)
    assert table(tmp_path / "out") == table(tmp_path / "clean")


def test_a_task_that_cannot_score_keeps_the_answers(plan_file: Path, tmp_path: Path) -> None:
    plan_file.write_text(fakes.PLAN.replace("tasks: [fake_choice]", "tasks: [{kind: fake_choice, scorer: broken}]"))
    go(plan_file, tmp_path / "out", code=1)
    rows = list(Store(tmp_path / "out").rows("experiment = 'choice'"))
    assert {t.finish for t in rows} == {"failed"}
    assert all("ZeroDivisionError: no scores today" in t.error and t.logprobs for t in rows)


def test_meta_says_what_a_report_needs(plan_file: Path, tmp_path: Path) -> None:
    go(plan_file, tmp_path / "out")
    store = Store(tmp_path / "out")
    assert store.meta("models")["alpha"]["anatomy"]["heads"] == 4
    assert store.meta("experiments")["choice"]["tasks"]["fake_choice"]["mode"] == "choices"
    assert store.meta("plan")["text"] == fakes.PLAN
    assert json.dumps(store.meta("experiments"))


def test_chunks_are_asked_whole_after_a_resume(plan_file: Path, tmp_path: Path) -> None:
    """The fake's numbers depend on the batch, as floats do; with chunks cut by what is done they would differ."""
    calls: list[list[Request]] = []

    class Noting(fakes.FakeActor):
        def answers(self, requests: Any) -> Iterator[Any]:
            if not requests[0].options:
                calls.append(list(requests))
            return super().answers(requests)

    with pytest.raises(KeyboardInterrupt):
        go(plan_file, tmp_path / "a", fakes.FakeModels(Stopping()))
    go(plan_file, tmp_path / "a", fakes.FakeModels(Noting()))
    resumed = calls[:]
    calls.clear()
    go(plan_file, tmp_path / "b", fakes.FakeModels(Noting()))
    assert resumed == calls[1:], "the first chunk was finished; every other is asked as it always is"
