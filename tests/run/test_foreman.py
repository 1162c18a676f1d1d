"""Units handed out to workers that die, come late and differ: the table is that of one process, and no row is written twice."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fakes
import pytest
from test_run import Stopping, go, table

from needlework.errors import NeedleworkError
from needlework.experiments import foreman, run
from needlework.experiments.cluster import Actor
from needlework.experiments.foreman import Foreman, Lost
from needlework.experiments.models import ModelInfo
from needlework.experiments.progress import Tracker
from needlework.store import Store


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "CHUNK_TRIALS", 16)


@dataclass
class FakePool:
    """Workers in this process, whose calls end in any order; `dies` says of a worker's n-th call whether it is its last."""

    source: fakes.FakeModels
    info: ModelInfo
    dies: Callable[[int, int, str], bool] = lambda worker, n, method: False
    places: Callable[[int], int] = lambda tick: 3
    seed: int = 0
    models: Callable[[int], Any] | None = None  # of each worker, where they are not alike
    workers: dict[int, Any] = field(default_factory=dict)
    under_way: dict[int, tuple[int, str, tuple[Any, ...]]] = field(default_factory=dict)
    counts: Counter[int] = field(default_factory=Counter)
    handed: list[tuple[int, Any]] = field(default_factory=list)
    most: int = 0  # asks under way at once
    tick: int = 0
    gone: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)

    def room(self) -> int:
        self.tick += 1
        return self.places(self.tick)

    def start(self) -> tuple[int, int]:
        worker = len(self.workers)
        source = self.source if self.models is None else self.models(worker)
        self.workers[worker] = Actor(source, self.info, [], {})
        return worker, self.call(worker, "load")

    def call(self, worker: int, method: str, *args: Any) -> int:
        number = sum(self.counts.values())
        self.counts[worker] += 1
        self.under_way[number] = worker, method, args
        asks = [who for who, what, _ in self.under_way.values() if what == "ask"]
        assert len(set(asks)) == len(asks), "a worker has one unit at a time"
        self.most = max(self.most, len(asks))
        if method == "ask":
            self.handed.append((worker, args[0]))
        return number

    def wait(self, calls: Sequence[int], seconds: float) -> list[int]:
        return [call for call in calls if self.draw.random() < 0.5]

    def result(self, call: int) -> Any:
        worker, method, args = self.under_way.pop(call)
        if method != "share" and self.dies(worker, self.counts[worker], method):
            self.gone.add(worker)
        if worker in self.gone:
            raise Lost("killed")
        return getattr(self.workers[worker], method)(*args)

    def stop(self, worker: int) -> None:
        self.gone.add(worker)


@dataclass
class FakeCluster:
    """What `run` wants of a cluster, with pools in place of Ray."""

    options: dict[str, Any] = field(default_factory=dict)
    pools: list[FakePool] = field(default_factory=list)

    @contextmanager
    def joined(self) -> Iterator[Any]:
        @contextmanager
        def hire(source: fakes.FakeModels, info: ModelInfo, units: int) -> Iterator[Foreman]:
            self.pools.append(FakePool(source, info, **self.options))
            crew = Foreman(self.pools[-1], units)
            try:
                yield crew
            finally:
                crew.close()

        yield hire


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, ...]]:
    """How often each row was written."""
    counts: Counter[tuple[str, ...]] = Counter()
    add = Store.add

    def noting(self: Store, rows: Any) -> None:
        counts.update((str(self.directory), row.experiment, row.model, row.task, row.id) for row in rows)
        add(self, rows)

    monkeypatch.setattr(Store, "add", noting)
    return counts


@pytest.fixture
def expected(plan_file: Path, tmp_path: Path) -> list[Any]:
    go(plan_file, tmp_path / "alone")
    return table(tmp_path / "alone")


def pooled(plan: Path, out: Path, source: fakes.FakeModels | None = None, code: int = 0, **options: Any) -> FakePool:
    cluster = FakeCluster(options)
    go(plan, out, source, code, cluster=cluster)
    return cluster.pools[-1]


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
        dies=lambda worker, n, method: fates.setdefault((worker, n), draw.random() < 0.15),
        places=lambda tick: draw.randint(0, 4),  # nodes come and go
    )
    assert table(tmp_path / "out") == expected
    assert set(written.values()) == {1}, "no row is written twice"
    assert len(pool.gone) == len(pool.workers), "in the end all of them are stopped"


def test_a_unit_is_handed_out_again_whole_and_only_if_it_was_lost(
    plan_file: Path, tmp_path: Path, expected: list[Any], written: Counter[Any]
) -> None:
    pool = pooled(plan_file, tmp_path / "out", dies=lambda worker, n, method: worker == 1 and method == "ask")
    times = Counter(repr([request.prompt for request in requests]) + str(len(requests)) for _, requests in pool.handed)
    assert sorted(times.values())[-1] == 2
    assert list(times.values()).count(2) == 1, "one unit was lost, and one is asked again"
    assert table(tmp_path / "out") == expected
    assert set(written.values()) == {1}


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_no_more_units_are_under_way_than_there_are_workers(workers: int, plan_file: Path, tmp_path: Path) -> None:
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
            raise Lost("the machine ran out of memory")
        yield from super().answers(requests)


def test_a_question_that_ends_its_workers_fails_alone(plan_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = tuple((0 * 31 + 2 * 7 + j) % 1000 for j in range(8))  # sample 2 of seed 0
    deadly = fakes.FakeModels(Deadly(batchwise=False))
    deadly.actor.prompt = prompt  # type: ignore[attr-defined]
    ask = Actor.ask

    def asks(self: Any, requests: Any) -> Any:
        answers, fault = ask(self, requests)
        if fault and fault[0] == "Lost":
            raise Lost(fault[1])
        return answers, fault

    monkeypatch.setattr(Actor, "ask", asks)
    pooled(plan_file, tmp_path / "out", deadly, code=1)
    go(plan_file, tmp_path / "alone", fakes.FakeModels(fakes.FakeActor(batchwise=False)))
    rows = {(row.experiment, row.id): row for row in table(tmp_path / "out") if hasattr(row, "finish")}
    whole = {(row.experiment, row.id): row for row in table(tmp_path / "alone") if hasattr(row, "finish")}
    failed = {key for key, row in rows.items() if row.finish == "failed"}
    assert failed
    assert failed == {key for key, row in whole.items() if row.prompt == " ".join(map(str, prompt))}
    assert all("WorkerLost: it ended 3 workers" in rows[key].error for key in failed)
    assert all(rows[key] == whole[key] for key in rows.keys() - failed)


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
    look, left = Foreman._look_around, [12]

    def stopping(self: Foreman) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return look(self)

    monkeypatch.setattr(Foreman, "_look_around", stopping)
    cluster = FakeCluster()
    with pytest.raises(KeyboardInterrupt):
        go(plan_file, tmp_path / "out", cluster=cluster)
    assert cluster.pools[0].gone == set(cluster.pools[0].workers)
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


def test_the_bar_moves_with_every_running_unit(plan_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trackers: list[Tracker] = []
    monkeypatch.setattr(run, "Tracker", lambda *given: trackers.append(Tracker(*given)) or trackers[-1])
    seen: list[tuple[int, float]] = []
    look = foreman.Foreman._look_at_shares

    def noting(self: Foreman) -> None:
        look(self)
        bar = trackers[0].bar
        under_way = sum(one.weight for one in trackers[0]._underway.values() if one.share())
        assert bar._underway() <= 0.5 * under_way + 1e-9
        seen.append((len(self._busy), bar._underway()))

    monkeypatch.setattr(foreman.Foreman, "_look_at_shares", noting)
    pooled(plan_file, tmp_path / "out", fakes.FakeModels(Halfway()))
    assert max(work for busy, work in seen if busy) > 0
    bar = trackers[0].bar
    assert bar.count == bar.total
    assert bar.advanced == pytest.approx(bar.work)
    assert not trackers[0]._underway
