"""Ray without processes: the calls that the executor makes, on workers in this process whose calls end in any order."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any


class Killed(Exception):
    """Raised by a model, it ends the worker's process."""


class RayTaskError(Exception):
    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


class RayActorError(Exception):
    pass


@dataclass
class FakeRay:
    """`dies` says of a worker's n-th call whether it is its last; `places` how many workers fit at a tick."""

    dies: Callable[[int, int, str], bool] = lambda worker, n, method: False
    places: Callable[[int], int] = lambda tick: 3
    seed: int = 0
    models: Callable[[int], Any] | None = None  # of each worker, where they are not alike
    threads: int = 1
    workers: dict[int, Any] = field(default_factory=dict)
    running: dict[int, tuple[int, str, tuple[Any, ...]]] = field(default_factory=dict)
    counts: Counter[int] = field(default_factory=Counter)
    handed: list[tuple[int, Any]] = field(default_factory=list)  # worker and requests of each batch that has some
    called: list[tuple[int, str]] = field(default_factory=list)  # worker and method of each other batch
    most: int = 0  # batches that ran at once
    tick: int = -1
    gone: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)
        others = ("ObjectLostError", "WorkerCrashedError", "OutOfMemoryError", "NodeDiedError")
        known = {"RayTaskError": RayTaskError, "RayActorError": RayActorError}
        self.exceptions = SimpleNamespace(**known, **{name: type(name, (Exception,), {}) for name in others})

    def is_initialized(self) -> bool:
        return True

    def put(self, value: Any) -> Any:
        return value

    def nodes(self) -> list[dict[str, Any]]:
        self.tick += 1
        count = self.places(self.tick) if self.tick else 1
        return [{"Alive": True, "Resources": {"CPU": self.threads, "memory": 2**60}}] * count

    def remote(self, **options: Any) -> Any:
        assert options["max_restarts"] == options["max_task_retries"] == 0
        return lambda cls: SimpleNamespace(remote=partial(self._start, cls))

    def _start(self, cls: Any, source: Any, *rest: Any) -> Any:
        number = len(self.workers)
        self.workers[number] = cls(source if self.models is None else self.models(number), *rest)
        handle = SimpleNamespace(number=number)
        for method in ("load", "execute", "share"):
            call = partial(self._call, number, method)
            bound = SimpleNamespace(remote=call)
            bound.options = lambda concurrency_group, bound=bound: bound
            setattr(handle, method, bound)
        return handle

    def _call(self, worker: int, method: str, *args: Any) -> int:
        number = sum(self.counts.values())
        self.counts[worker] += 1
        self.running[number] = worker, method, args
        busy = [who for who, what, _ in self.running.values() if what == "execute"]
        assert len(set(busy)) == len(busy), "a worker has one batch at a time"
        self.most = max(self.most, len(busy))
        if method == "execute":
            batch = args[0]
            self.called.append((worker, batch.method)) if batch.method else self.handed.append((worker, batch.requests))
        return number

    def wait(self, calls: Sequence[int], num_returns: int = 1, timeout: float = 0) -> tuple[list[int], list[int]]:
        return [call for call in calls if self.draw.random() < 0.5], []

    def get(self, call: int) -> Any:
        worker, method, args = self.running.pop(call)
        name = args[0].method or "requests" if method == "execute" else method
        if method != "share" and self.dies(worker, self.counts[worker], name):
            self.gone.add(worker)
        if worker in self.gone:
            raise RayActorError("killed")
        try:
            value = getattr(self.workers[worker], method)(*args)
        except Exception as error:
            raise RayTaskError(error) from None
        if method == "execute" and value[2] and value[2][0] == "Killed":
            self.gone.add(worker)
            raise RayActorError(value[2][1])
        return value

    def kill(self, handle: Any, no_restart: bool) -> None:
        assert no_restart
        self.gone.add(handle.number)
