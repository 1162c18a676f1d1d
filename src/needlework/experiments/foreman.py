"""A crew of many workers elsewhere: they may come late, die and be replaced, and every unit is answered all the same."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from needlework.errors import NeedleworkError
from needlework.experiments.crew import Reply, Take, Unit
from needlework.heads.methods import Seen
from needlework.interventions import Ranking
from needlework.requests import Request
from needlework.tasks.base import Item
from needlework.terminal import say

MOST_DEATHS = 3  # of workers over one job, or one after the other while they load: after that, chance is not to blame
TICK = 1.0  # seconds between two looks around: for room for more workers, and for how far the running jobs are
LONG = 60  # ticks without any worker, until that is said
Worker = Hashable
Call = Hashable


class Lost(Exception):
    """A worker is gone, and what it was doing with it."""


class WorkerLost(RuntimeError):
    """What was asked ended its worker each time that it was asked."""


Fault = tuple[str, str]  # an error's class and words: the class itself may be known nowhere else


def _named(fault: Fault) -> Exception:
    return type(fault[0], (RuntimeError,), {})(fault[1])  # type: ignore[no-any-return]


def _short(lost: Lost) -> str:
    text = str(lost)
    return text if len(text) <= 160 else f"{text[:150]} ..."


class Pool(Protocol):
    """Where workers live. A call is begun at once and waited for later; the first call of a worker loads its model."""

    def room(self) -> int: ...
    def start(self) -> tuple[Worker, Call]: ...
    def call(self, worker: Worker, method: str, *args: Any) -> Call: ...
    def wait(self, calls: Sequence[Call], seconds: float) -> Iterable[Call]: ...
    def result(self, call: Call) -> Any: ...
    def stop(self, worker: Worker) -> None: ...


@dataclass(eq=False)
class _Job:
    method: str
    args: tuple[Any, ...]
    unit: Unit | None = None
    deaths: int = 0
    share: float = 0.0
    looking: Call | None = None  # a call that asks for its share
    dropped: bool = False  # nobody waits for what comes of it any more


class Foreman:
    """Hands out jobs, one at a time to a worker, and takes the next one before the last one's answers are looked at."""

    def __init__(self, pool: Pool, most: int) -> None:
        """`most`: more workers than that would have nothing to do."""
        self.pool, self.most = pool, most
        self._loading: dict[Call, Worker] = {}
        self._idle: list[Worker] = []
        self._busy: dict[Call, tuple[Worker, _Job]] = {}
        self._waiting: deque[_Job] = deque()
        self._versions: dict[str, str] | None = None
        self._refused, self._lost_loading, self._waited = 0, 0, 0
        self._told: set[str] = set()

    def versions(self) -> dict[str, str]:
        """Of the worker that was there first; others must be like it."""
        while self._versions is None:
            self._look_around()
        return self._versions

    def checkup(self, quick: bool) -> Any:
        return self._alone(_Job("checkup", (quick,)))

    def watch(self, requests: Sequence[Request], span: str) -> Sequence[Seen]:
        heads: Sequence[Seen] = self._alone(_Job("watch", (requests, span)))
        return heads

    def rank(self, by: str, items: Sequence[Item], seed: int) -> Ranking:
        ranking: Ranking = self._alone(_Job("rank", (by, items, seed)))
        return ranking

    def ask(self, take: Take) -> Generator[Reply, None, None]:
        def job() -> _Job | None:
            unit = take()
            return None if unit is None else _Job("ask", (unit.requests,), unit)

        for done, outcome in self._through(job):
            assert done.unit is not None
            if isinstance(outcome, Exception):
                yield Reply(done.unit, over=True, error=outcome)
            else:
                answers, fault = outcome
                yield Reply(done.unit, answers, over=True, error=_named(fault) if fault else None)

    def do(self, piece: Any, slices: Sequence[Any], told: Callable[[float], None]) -> list[Any]:
        """What came of a piece on each slice; `told` hears every second or so how much of it all is done."""
        jobs = [_Job("do", (piece, some)) for some in slices]
        left = iter(jobs)
        found: dict[_Job, Any] = {}

        def tick() -> None:
            told((len(found) + sum(job.share for _, job in self._busy.values() if not job.dropped)) / len(jobs))

        for job, outcome in self._through(lambda: next(left, None), tick):
            if isinstance(outcome, Exception):
                raise outcome
            found[job] = outcome
        told(1.0)
        return [found[job] for job in jobs]

    def share(self, unit: Unit | None = None) -> float:
        return next((job.share for _, job in list(self._busy.values()) if job.unit is unit), 0.0)

    def close(self) -> None:
        for worker in [*self._idle, *self._loading.values(), *(worker for worker, _ in self._busy.values())]:
            self.pool.stop(worker)

    def _alone(self, job: _Job) -> Any:
        jobs = iter([job])
        ((_, outcome),) = self._through(lambda: next(jobs, None))
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _through(
        self, take: Callable[[], _Job | None], tick: Callable[[], None] = lambda: None
    ) -> Generator[tuple[_Job, Any], None, None]:
        """Every job and what came of it, as they end. At most one job a worker is under way, and one waits."""
        try:
            while True:
                self._hand_out(take)
                if not self._waiting and all(job.dropped for _, job in self._busy.values()):
                    return
                ended = self._look_around()
                self._hand_out(take)  # who is idle works on while the answers are written
                yield from ended
                tick()
        finally:  # also if whoever asked has stopped listening
            self._waiting.clear()
            for _, job in self._busy.values():
                job.dropped = True

    def _hand_out(self, take: Callable[[], _Job | None]) -> None:
        while True:
            if not self._waiting:
                job = take()
                if job is None:
                    return
                self._waiting.append(job)
            if not self._idle:
                return
            worker, job = self._idle.pop(), self._waiting.popleft()
            job.share, job.looking = 0.0, None
            self._busy[self.pool.call(worker, job.method, *job.args)] = worker, job

    def _look_around(self) -> list[tuple[_Job, Any]]:
        """Wait a little: who arrives is idle, what ends is given back, what was lost with its worker waits again."""
        self._staff()
        self._waited = 0 if self._idle or self._busy else self._waited + 1
        if self._waited == LONG:
            say("no worker has its model yet: waiting until the cluster has room and they have loaded it")
        ended: list[tuple[_Job, Any]] = []
        for call in self.pool.wait([*self._busy, *self._loading], TICK):
            if call in self._loading:
                self._arrived(call)
                continue
            worker, job = self._busy.pop(call)
            try:
                ended.append((job, self.pool.result(call)))
                self._idle.append(worker)
            except Lost as lost:
                self.pool.stop(worker)
                job.deaths += 1
                if job.dropped:
                    continue
                if job.deaths < MOST_DEATHS:
                    say(f"a worker was lost ({_short(lost)}); what it was asked is asked again", style="yellow")
                    self._waiting.appendleft(job)
                else:
                    ended.append((job, WorkerLost(f"it ended {job.deaths} workers, each that it was given to: {_short(lost)}")))
            except Exception as error:
                ended.append((job, error))
                self._idle.append(worker)
        self._look_at_shares()
        return [(job, outcome) for job, outcome in ended if not job.dropped]

    def _staff(self) -> None:
        present = len(self._idle) + len(self._busy) + len(self._loading)
        if present and not self._waiting:
            return
        room = min(self.most, self.pool.room())
        for _ in range(max(room - self._refused - present, min(room, 1) - present)):  # somebody, whoever was refused before
            worker, call = self.pool.start()
            self._loading[call] = worker

    def _arrived(self, call: Call) -> None:
        worker = self._loading.pop(call)
        try:
            versions = self.pool.result(call)
        except Lost as lost:
            self._lost_loading += 1
            if self._lost_loading >= MOST_DEATHS:
                self._refuse(
                    worker,
                    NeedleworkError(
                        f"{MOST_DEATHS} workers one after the other died while they loaded the model ({_short(lost)}); if memory"
                        " ran out, take fewer workers or larger nodes"
                    ),
                )
        except Exception as error:
            self._refuse(worker, error)
        else:
            self._versions = self._versions or versions
            if versions != self._versions:
                other = ", ".join(f"{key} {value}" for key, value in versions.items() if self._versions.get(key) != value)
                self._refuse(worker, NeedleworkError(f"it differs from the first one: {other}; install the same everywhere"))
                return
            self._lost_loading = 0
            self._idle.append(worker)

    def _refuse(self, worker: Worker, error: Exception) -> None:
        """Go on without it; if there is nobody else, there is no going on."""
        self.pool.stop(worker)
        if not (self._idle or self._busy or self._loading):
            raise error
        self._refused += 1
        self._lost_loading = 0
        if str(error) not in self._told:
            self._told.add(str(error))
            say(f"a worker is left out: {error}", style="yellow")

    def _look_at_shares(self) -> None:
        for worker, job in self._busy.values():
            if job.looking is None:
                job.looking = self.pool.call(worker, "share")
            elif self.pool.wait([job.looking], 0):
                try:
                    job.share = self.pool.result(job.looking)
                except Lost:
                    continue  # its own call will say so
                job.looking = None
