"""Batches on workers that die, come late and differ: the table is that of one process, and no row is written twice."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fakes
import pytest
from fake_ray import FakeRay, Killed
from test_run import Stopping, go, table

from needlework.errors import NeedleworkError
from needlework.experiments import ray_executor, run
from needlework.experiments.models import Batch, BatchResult, LocalExecutor, ModelInfo, ModelSource
from needlework.experiments.progress import Tracker
from needlework.experiments.ray_executor import Cluster, RayExecutor
from needlework.results import Row, Store


@pytest.fixture(autouse=True)
def _no_wait(small_chunks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_executor, "TICK", 0.0)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, ...]]:
    """How often each row was written."""
    counts: Counter[tuple[str, ...]] = Counter()
    add = Store.add

    def noting(self: Store, rows: Any) -> None:
        trials = [row for row in rows if isinstance(row, Row)]
        counts.update((str(self.directory), row.experiment, row.model, row.task, row.id) for row in trials)
        add(self, rows)

    monkeypatch.setattr(Store, "add", noting)
    return counts


@pytest.fixture
def expected(plan_file: Path, tmp_path: Path) -> list[Any]:
    go(plan_file, tmp_path / "alone")
    return table(tmp_path / "alone")


def pooled(plan: Path, out: Path, source: fakes.FakeModels | None = None, code: int = 0, **options: Any) -> FakeRay:
    ray = FakeRay(**options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_executor, "import_ray", lambda: ray)
        go(plan, out, source, code, cluster=Cluster())
    return ray


class Backwards(LocalExecutor):
    """An executor of a user: takes all batches at once and answers the last one first."""

    def run(self, batches: Iterable[Batch]) -> Generator[BatchResult, None, None]:
        yield from super().run(reversed(list(batches)))


def test_an_executor_of_ones_own_gives_the_same_table(plan_file: Path, tmp_path: Path, expected: list[Any]) -> None:
    opened: list[str] = []

    def open_backwards(source: ModelSource, info: ModelInfo, most: int) -> AbstractContextManager[Backwards]:
        opened.append(info.name)
        return nullcontext(Backwards(source.load(info)))

    go(plan_file, tmp_path / "out", open_executor=open_backwards)
    assert opened
    assert table(tmp_path / "out") == expected


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_whatever_dies_and_whoever_comes_late_the_table_is_that_of_one_process(
    seed: int, plan_file: Path, tmp_path: Path, expected: list[Any], written: Counter[Any]
) -> None:
    draw = random.Random(seed)
    fates: dict[tuple[int, int], bool] = {}
    pool = pooled(
        plan_file,
        tmp_path / "out",
        seed=seed,
        dies=lambda worker, n, method: fates.setdefault((worker, n), draw.random() < 0.1),  # of a batch, never three workers
        places=lambda tick: draw.randint(0, 4),  # nodes come and go
    )
    assert table(tmp_path / "out") == expected
    assert set(written.values()) == {1}, "no row is written twice"
    assert len(pool.gone) == len(pool.workers), "in the end all of them are stopped"


def test_a_batch_is_executed_again_whole_and_only_if_it_was_lost(
    plan_file: Path, tmp_path: Path, expected: list[Any], written: Counter[Any]
) -> None:
    pool = pooled(plan_file, tmp_path / "out", dies=lambda worker, n, method: worker == 1 and method == "requests")
    times = Counter(repr([request.prompt for request in requests]) + str(len(requests)) for _, requests in pool.handed)
    assert sorted(times.values())[-1] == 2
    assert list(times.values()).count(2) == 1, "one batch was lost, and one is executed again"
    assert table(tmp_path / "out") == expected
    assert set(written.values()) == {1}


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_no_more_batches_run_than_there_are_workers(workers: int, plan_file: Path, tmp_path: Path) -> None:
    pool = pooled(plan_file, tmp_path / "out", places=lambda tick: workers)
    assert pool.most == workers == len(pool.workers)


def test_workers_that_come_late_get_their_part(plan_file: Path, tmp_path: Path, expected: list[Any]) -> None:
    pool = pooled(plan_file, tmp_path / "out", places=lambda tick: 1 if tick < 8 else 3)
    assert table(tmp_path / "out") == expected
    assert len({worker for worker, _ in pool.handed}) == 3


class Deadly(fakes.FakeActor):
    """One prompt ends whoever is asked it."""

    prompt: tuple[int, ...] = ()

    def answers(self, requests: Any) -> Iterator[Any]:
        if any(request.prompt == self.prompt for request in requests):
            raise Killed("the machine ran out of memory")
        yield from super().answers(requests)


def test_a_question_that_ends_its_workers_fails_alone(plan_file: Path, tmp_path: Path) -> None:
    prompt = tuple((0 * 31 + 2 * 7 + j) % 1000 for j in range(8))  # sample 2 of seed 0
    deadly = fakes.FakeModels(Deadly(batchwise=False))
    deadly.actor.prompt = prompt  # type: ignore[attr-defined]
    pool = pooled(plan_file, tmp_path / "out", deadly, code=1)
    go(plan_file, tmp_path / "alone", fakes.FakeModels(fakes.FakeActor(batchwise=False)))
    rows = {(row.experiment, row.id): row for row in table(tmp_path / "out") if hasattr(row, "finish")}
    whole = {(row.experiment, row.id): row for row in table(tmp_path / "alone") if hasattr(row, "finish")}
    failed = {key for key, row in rows.items() if row.finish == "failed"}
    assert failed
    assert failed == {key for key, row in whole.items() if row.prompt == " ".join(map(str, prompt))}
    assert all("WorkerLost: it ended 3 workers" in rows[key].error for key in failed)
    assert all(rows[key] == whole[key] for key in rows.keys() - failed)
    times = Counter(tuple(map(id, requests)) for _, requests in pool.handed if any(r.prompt == prompt for r in requests))
    assert set(times.values()) == {3}, "a batch, and then each of its trials alone, is given to three workers and no more"


def test_what_breaks_a_chunk_is_found_as_in_one_process(plan_file: Path, tmp_path: Path) -> None:
    poison = frozenset({tuple((2 * 7 + j) % 1000 for j in range(8))})
    sources = [fakes.FakeModels(fakes.FakeActor(poison=poison)) for _ in range(2)]
    go(plan_file, tmp_path / "alone", sources[0], code=1)
    pooled(plan_file, tmp_path / "out", sources[1], code=1)
    rows = table(tmp_path / "out")
    assert rows == table(tmp_path / "alone")
    assert {row.error for row in rows if getattr(row, "finish", "") == "failed"} == {"RuntimeError: poisoned"}


class Other(fakes.FakeActor):
    def versions(self) -> dict[str, str]:
        return {"needlework": "another"}


def test_a_worker_with_other_software_is_left_out(
    plan_file: Path, tmp_path: Path, expected: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    pool = pooled(
        plan_file,
        tmp_path / "out",
        places=lambda tick: 1 if tick < 3 else 3,
        models=lambda worker: fakes.FakeModels(Other() if worker == 1 else fakes.FakeActor()),
    )
    assert {worker for worker, _ in pool.handed} == {0, 2}
    assert table(tmp_path / "out") == expected
    assert "a worker is left out: it differs from the first one: needlework another" in capsys.readouterr().err


def test_one_that_was_refused_does_not_keep_others_away(plan_file: Path, tmp_path: Path, expected: list[Any]) -> None:
    """The first node's worker is refused; then the others are lost, and the one place that is left is taken again."""
    pool = pooled(
        plan_file,
        tmp_path / "out",
        places=lambda tick: 2 if tick < 6 else 1,
        models=lambda worker: fakes.FakeModels(Other() if worker == 1 else fakes.FakeActor()),
        dies=lambda worker, n, method: worker == 0 and n > 4,
    )
    assert table(tmp_path / "out") == expected
    assert max(worker for worker, _ in pool.handed) > 1


@dataclass
class Missing(fakes.FakeModels):
    def load(self, info: ModelInfo) -> fakes.FakeActor:
        raise NeedleworkError("there is no such model on this node")


def test_if_nobody_can_load_the_model_that_is_the_error(plan_file: Path, tmp_path: Path) -> None:
    with pytest.raises(NeedleworkError, match="no such model on this node"):
        pooled(plan_file, tmp_path / "out", Missing())
    with pytest.raises(NeedleworkError, match="3 workers one after the other died while they loaded the model"):
        pooled(plan_file, tmp_path / "lost", dies=lambda worker, n, method: method == "load", places=lambda tick: 1)


def test_after_a_stop_of_the_driver_the_rest_is_asked(
    plan_file: Path, tmp_path: Path, expected: list[Any], written: Counter[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    step, left, ray = RayExecutor._step, [12], FakeRay()

    def stopping(self: RayExecutor) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(RayExecutor, "_step", stopping)
    monkeypatch.setattr(ray_executor, "import_ray", lambda: ray)
    with pytest.raises(KeyboardInterrupt):
        go(plan_file, tmp_path / "out", cluster=Cluster())
    assert ray.gone == set(ray.workers)
    assert 0 < len(written) < len(expected)
    pooled(plan_file, tmp_path / "out")
    assert table(tmp_path / "out") == expected
    assert set(written.values()) == {1}


def test_workers_finish_what_one_process_left(
    plan_file: Path, tmp_path: Path, expected: list[Any], written: Counter[Any]
) -> None:
    """A chunk that was stopped in its middle is asked as a whole, and of it only what is missing is written."""
    with pytest.raises(KeyboardInterrupt):
        go(plan_file, tmp_path / "out", fakes.FakeModels(Stopping()))
    assert 20 <= len(written) < len(expected)
    pooled(plan_file, tmp_path / "out")
    assert table(tmp_path / "out") == expected
    assert set(written.values()) == {1}


class Halfway(fakes.FakeActor):
    def share(self) -> float:
        return 0.5


def test_the_bar_moves_with_every_running_batch(plan_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trackers: list[Tracker] = []
    monkeypatch.setattr(run, "Tracker", lambda *given: trackers.append(Tracker(*given)) or trackers[-1])
    seen: list[tuple[int, float]] = []
    poll = RayExecutor._poll_shares

    def noting(self: RayExecutor) -> None:
        poll(self)
        bar = trackers[0].bar
        under_way = sum(one.weight for one in trackers[0]._underway.values() if one.share())
        assert bar._underway() <= 0.5 * under_way + 1e-9
        seen.append((len(self._running), bar._underway()))

    monkeypatch.setattr(RayExecutor, "_poll_shares", noting)
    pooled(plan_file, tmp_path / "out", fakes.FakeModels(Halfway()))
    assert max(work for busy, work in seen if busy) > 0
    bar = trackers[0].bar
    assert bar.count == bar.total
    assert bar.advanced == pytest.approx(bar.work)
    assert not trackers[0]._underway
