"""Progress that is true: one bar over all trials, moved by work, timed by measured speed, plain where there is no terminal."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import fakes
import pytest
from rich.console import Console
from test_run import HERE, Stopping, go, table

from needlework import terminal
from needlework.experiments import progress, run, trials
from needlework.experiments.estimate import describe
from needlework.experiments.plan import load
from needlework.experiments.progress import Tracker
from needlework.experiments.trials import Work, expand
from needlework.kernels import jit
from needlework.kernels.jit import COMPILE_SECONDS
from needlework.results import Store
from needlework.terminal import Bar, Throughput, clock

CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock to be set by hand."""
    time = [1000.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: time[0])
    return time


def test_the_time_left_is_that_of_the_work_left_at_the_speed_measured(now: list[float]) -> None:
    with Bar(10, "trials", work=100, shown=False) as bar:
        bar.found(2, 40)  # an earlier run's: no part of this one's speed
        assert bar.left() is None
        assert bar.share == 0.4
        now[0] += 10
        bar.advance(1, 20)
        assert bar.left() == pytest.approx(20)  # 40 more at 2 a second
        bar.show("m", lambda: 10.0)
        assert bar.share == pytest.approx(0.7)
        assert bar.left() == pytest.approx(10)  # 30 more at 3 a second
        assert (bar.count, bar.counted_now) == (3, 1)


def test_a_change_of_speed_counts_gradually() -> None:
    estimate, left, done = Throughput({"work": 10_000.0}), list[float](), 0.0
    estimate.update(0.0, "work", 0.0)
    for second in range(1, 700):
        done += 1 if second <= 200 else 4
        estimate.update(float(second), "work", done)
        left.append(estimate.left() or 0.0)
    assert left[199] == pytest.approx(10_000 - 200)
    assert left[-1] == pytest.approx((10_000 - done) / 4, rel=0.15)
    assert max(before / after for before, after in pairwise(left)) < 1.05


def replay(timeline: dict[str, Any]) -> Iterator[tuple[float, float | None]]:
    """Yield what a recorded bar would have shown: seconds since it began, and the estimate of the remaining time."""
    estimate = Throughput(dict(zip(timeline["kinds"], timeline["work"], strict=True)), timeline["assumed"])
    for seconds, number, done, work in timeline["samples"]:
        kind = timeline["kinds"][number]
        estimate.work[kind] = work
        if done is not None:
            estimate.update(seconds, kind, done)
            yield seconds, estimate.left()


ROUNDING = 5.0  # seconds: an estimate of 2 s after one of 6 s is no jump


@pytest.mark.parametrize("file", sorted((HERE / "timelines").glob("*.json")), ids=lambda file: file.stem)
def test_the_time_left_of_real_runs_jumps_by_no_factor_of_two(file: Path) -> None:
    """Recorded by benchmarks/timeline.py: cold and warm runs, on a machine that was busy with other work."""
    for timeline in json.loads(file.read_text())["timelines"]:
        whole = timeline["samples"][-1][0]
        shown = [(seconds, left) for seconds, left in replay(timeline) if seconds > whole / 10 and left is not None]
        assert len(shown) > 8
        for (before, expected), (now, left) in pairwise(shown):
            ratio = (left + ROUNDING) / (max(0.0, expected - (now - before)) + ROUNDING)
            assert 0.5 < ratio < 2, f"{expected:.0f} s left at {before} s, {left:.0f} s left at {now} s of {whole} s"
        errors = [(left + ROUNDING) / (whole - now + ROUNDING) for now, left in shown]
        assert min(errors) > 1 / 3
        assert max(errors) < 3


def test_each_kind_of_work_has_its_own_speed() -> None:
    estimate = Throughput({"loading": 1.0, "asking": 100.0, "recording": 10.0}, assumed=1.0)
    estimate.update(0.0, "loading", 0.0)
    estimate.update(20.0, "loading", 1.0)  # twenty times as long as expected
    assert 110 < (estimate.left() or 0.0) < 300, "which tells little about answers"
    estimate.update(70.0, "asking", 50.0)
    assert (estimate.left() or 0.0) == pytest.approx(60, rel=0.25)


@pytest.mark.parametrize("width", [80, 120])
def test_the_line_has_the_name_and_fits(width: int, now: list[float]) -> None:
    with Bar(17_400, "trials", shown=False) as bar:
        bar.show("tiny-griffin-small: recording")
        now[0] += 100
        bar.advance(5_000)
        shown = Console(width=width, file=io.StringIO())
        shown.print(bar._line())
    (line,) = shown.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(line) <= width
    for words in ("tiny-griffin-small: recording", "5,000/17,400 trials", "1:40, 4:08 left"):
        assert words in line
    assert clock(3_729) == "1:02:09"


def test_without_a_terminal_there_are_plain_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(terminal, "PLAIN_SECONDS", 0.02)
    with Bar(10, "trials") as bar:
        bar.show("evil\x1b[2Jname")
        bar.advance(3)
        terminal.Event().wait(0.2)
    said = capsys.readouterr()
    assert said.out == ""
    assert r"evil\x1b[2Jname: 3/10 trials, 0:00" in said.err
    assert not CONTROLS.search(said.err)


def work_of(plan: Path) -> Work:
    loaded = load(plan, make_task=fakes.make_task)
    return expand(loaded, fakes.FakeModels().inspect(loaded.models["alpha"]))


def test_a_reading_is_parted_among_those_that_share_it(plan_file: Path) -> None:
    work = work_of(plan_file)
    each = progress.weights(work)
    by = {
        str(t.intervention): each[t.id] for t in work.trials if t.experiment == "sweep" and t.item.id == "fake/0" and t.seed == 0
    }
    steps = progress.answer_seconds(work.model, progress.SMALL, 40) + progress.TRIAL_SECONDS
    reading = progress.SMALL.reading(progress.reading_flops(work.model, 8))
    assert by["keep_heads(k=1)"] == pytest.approx(reading + steps)
    shared = reading / 6  # none, and five numbers of heads in decode alone
    assert by["none"] == by["keep_heads(phase='decode', k=1)"] == pytest.approx(shared + steps)


class Halfway(fakes.FakeActor):
    """Says that half of what it was asked is done before the first answer comes."""

    seen: Any = None

    def share(self) -> float:
        return 0.5

    def answers(self, requests: Any) -> Iterator[Any]:
        assert self.seen is None or self.seen()
        yield from super().answers(requests)


def test_a_long_chunk_moves_the_bar_before_its_first_answer(
    plan_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trackers, shares = [], []
    monkeypatch.setattr(run, "Tracker", lambda *given: trackers.append(Tracker(*given)) or trackers[-1])
    actor = Halfway()
    actor.seen = lambda: shares.append((trackers[0].bar.count, trackers[0].bar.share, trackers[0].bar.name)) or True
    fakes.run_fakes(plan_file, tmp_path / "out", fakes.FakeModels(actor))
    assert [name for _, _, name in shares] == ["alpha: asking", "alpha: asking"]
    (count, share, _), (then, more, _) = shares
    assert (count, then) == (0, 8), "choices come first, and none of the others is there yet"
    assert 0 < share < more < 1
    bar = trackers[0].bar
    assert bar.count == bar.total == 146
    assert bar.advanced == pytest.approx(bar.work), "recordings, too"


def test_what_was_there_is_counted_and_no_part_of_the_speed(
    plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(KeyboardInterrupt):
        go(plan_file, tmp_path / "out", fakes.FakeModels(Stopping()))
    store = Store(tmp_path / "out")
    stored = store.db.execute("SELECT count(*) FROM trials").fetchone()[0]
    tracker = Tracker([work_of(plan_file)], store, False)
    store.close()
    assert (tracker.bar.count, tracker.bar.counted_now) == (stored, 0)
    assert 0 < tracker.bar.share < 1
    capsys.readouterr()
    go(plan_file, tmp_path / "out")
    assert re.search(rf"146 trials in .*; {146 - stored} asked in 0:0\d, [\d.e+]+ trials per second\n", capsys.readouterr().err)
    go(plan_file, tmp_path / "out")
    assert "per second" not in capsys.readouterr().err


def test_finished_answers_stay_as_they_were_written(plan_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After Ctrl-C a resume asks what is missing, in its own chunk's company, and writes nothing a second time."""
    monkeypatch.setattr("needlework.experiments.trials.CHUNK_TRIALS", 16)
    with pytest.raises(KeyboardInterrupt):
        go(plan_file, tmp_path / "out", fakes.FakeModels(Stopping()))
    before = list(Store(tmp_path / "out").rows())
    actor = fakes.FakeActor()
    go(plan_file, tmp_path / "out", fakes.FakeModels(actor))
    after = list(Store(tmp_path / "out").rows())
    assert [row for row in after if row in before] == before, "seconds and all"
    answered = {row.id for row in before if row.mode == "generate"}
    whole = 6 * 2 * 11
    assert whole - len(answered) <= len(actor.asked) < whole - len(answered) + 16, "of what was there, less than one chunk"
    go(plan_file, tmp_path / "whole")
    assert table(tmp_path / "out") == table(tmp_path / "whole")


@pytest.mark.parametrize("device, sizes", [("cpu", [22] * 6), ("cuda", [55, 55, 22])])
def test_on_a_cpu_a_costly_chunk_ends_when_it_is_large_enough(
    device: str, sizes: list[int], plan_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"CHUNK_TRIALS": 64, "ENOUGH_TRIALS": 16, "ENOUGH_FLOPS": 1.0}.items():
        monkeypatch.setattr(trials, name, value)
    calls = []

    class Noting(fakes.FakeActor):
        def answers(self, requests: Any) -> Iterator[Any]:
            calls.append(len(requests))
            return super().answers(requests)

    plan_file.write_text(plan_file.read_text().replace("[alpha]", f"[{{source: alpha, device: {device}}}]"))
    go(plan_file, tmp_path / "out", fakes.FakeModels(Noting()))
    assert calls[1:] == sizes
    assert (trials.CHUNK_TRIALS, trials.CHUNK_FLOPS) == (64, 5e13)


@pytest.mark.slow
def test_a_real_process_says_plain_lines_into_a_pipe(plan_file: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(HERE / "fakes.py"), str(plan_file), str(tmp_path / "out"), "0"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"})
    assert done.returncode == 0
    assert not CONTROLS.search(done.stdout + done.stderr)
    assert "trials per second" in done.stderr


@pytest.mark.slow
def test_a_real_terminal_shows_one_bar_and_ctrl_c_keeps_what_is_there(plan_file: Path, tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    command = [sys.executable, str(HERE / "fakes.py"), str(plan_file), str(tmp_path / "out"), "0.03"]
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        command, stdout=theirs, stderr=theirs, env=env, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    )
    os.close(theirs)
    shown = b""
    while b"trials" not in shown or b"left" not in shown:
        shown += os.read(ours, 4096)
    process.send_signal(signal.SIGINT)
    try:
        while more := os.read(ours, 4096):
            shown += more
    except OSError:  # the terminal is closed when its last process ends
        pass
    assert process.wait() == 130
    os.close(ours)
    words = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    assert re.search(r"alpha: \w+ +\S+ +[\d,]+/146 trials +0:\d\d, \d+:\d\d left", words)
    assert "the same command goes on" in words
    store = Store(tmp_path / "out")
    (kept,) = store.db.execute("SELECT count(*) FROM trials").fetchone()
    store.close()
    counted = [int(count) for count in re.findall(r"(\d+)/146 trials", words)]
    assert kept >= max(counted) > 0, "what the bar counted is in the store"


def test_the_estimate_of_a_plan_has_all_that_a_run_does(plan_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("needlework.kernels.jit.uncompiled", list)  # as on a new machine
    (total,) = describe(load(plan_file, make_task=fakes.make_task), fakes.FakeModels()).totals
    assert list(total.phases) == ["loading", "compiling", "examining", "recording", "asking"]
    assert total.phases["compiling"] == COMPILE_SECONDS["block_attention"]
    assert total.seconds == pytest.approx(sum(total.phases.values()))
    *_, text = describe(load(plan_file, make_task=fakes.make_task), fakes.FakeModels()).output()
    assert re.search(r"about \d+ s \(loading 1 s, compiling 10 s, examining 1 s, recording 1 s, asking \d+ s\)", text)


def test_a_kernel_is_compiled_for_the_first_model_that_uses_it(plan_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("needlework.kernels.jit.uncompiled", list)
    first, second = progress.phase_seconds([work_of(plan_file)] * 2)
    assert first["compiling"] == COMPILE_SECONDS["block_attention"]
    assert second["compiling"] == 0
    monkeypatch.setattr("needlework.kernels.jit.uncompiled", lambda names: [])
    assert progress.phase_seconds([work_of(plan_file)])[0]["compiling"] == 0


def test_a_model_that_is_asked_nothing_has_phases(plan_file: Path) -> None:
    """The first steps of the demo ask some of its models nothing."""
    (phases,) = progress.phase_seconds([replace(work_of(plan_file), trials=[], recordings=[])])
    assert phases["ranking heads"] == phases["recording"] == 0


def test_compilation_is_shown_where_it_happens(now: list[float]) -> None:
    kinds = {"compiling": 4.0, "m: asking": 100.0}
    with Bar(10, "trials", work=kinds, shown=True) as bar:
        bar.show("m: asking", lambda: 1.0, "m: asking")
        now[0] += 10
        with terminal.compiling("conv", 1.0):
            assert bar.name == "m: asking: compiling conv"
            now[0] += 30
        assert bar.name == "m: asking"
        assert bar.advanced == 1.0
        bar.left()
    assert bar.throughput.done == {"compiling": 1.0, "m: asking": 1.0}
    assert bar.throughput.seconds == {"compiling": 30.0, "m: asking": 10.0}


def test_compilation_is_said_once_without_a_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "_said_compiling", terminal.Event())
    for kernel in ("conv", "rglru"):
        with terminal.compiling(kernel, 3.0):
            pass
    assert capsys.readouterr().err.count("compiling kernels for this processor (conv, about 3 s)") == 1


def test_numba_says_when_it_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[str, float]] = []

    @contextmanager
    def compiling(name: str, seconds: float) -> Iterator[None]:
        shown.append((name, seconds))
        yield
        shown.append(("done", 0.0))

    monkeypatch.setattr(jit, "compiling", compiling)

    @jit.compile_helper(nogil=True)
    def double(x: float) -> float:
        return 2 * x

    assert double(2.0) == 4.0
    assert [name for name, _ in shown] == ["test_progress", "done"]
    assert double(3.0) == 6.0
    assert len(shown) == 2, "it is compiled once"
