"""The chunks of one model as units of a crew: handed out, asked trial by trial where one broke, and their answers passed on."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property, partial, reduce
from operator import add

from needlework.errors import NeedleworkError
from needlework.experiments import rows
from needlework.experiments.crew import Crew, Timed, Unit
from needlework.experiments.models import ModelInfo
from needlework.experiments.progress import Tracker
from needlework.experiments.trials import Trial
from needlework.interventions import Ranking
from needlework.interventions.ranking import Recorded
from needlework.requests import Answer, Request, prepare

Write = Callable[[Trial, Answer, float], int]  # an answer and its seconds into the store; how many rows it made
Check = Callable[[Exception], None]  # raises what is no trial's fault


@dataclass(eq=False)
class _Chunk(Unit):
    trials: Sequence[Trial]
    owners: Sequence[int]  # of each request, the number of its trial
    parts: dict[int, dict[int, Timed]] = field(default_factory=dict)  # of trials with several requests, what is there

    @cached_property
    def _parts_of(self) -> Counter[int]:
        return Counter(self.owners)

    def whole(self, one: Timed) -> tuple[Trial, Answer, float] | None:
        """The trial that this answer was the last one for; a trial with several requests waits for all of its own."""
        i, n = one[0], self.owners[one[0]]
        self.parts.setdefault(n, {})[i] = one
        if len(self.parts[n]) < self._parts_of[n]:
            return None
        ordered = [part for _, part in sorted(self.parts.pop(n).items())]
        return self.trials[n], reduce(add, (answer for _, answer, _ in ordered)), sum(seconds for *_, seconds in ordered)


class Asking:
    """What is asked of one model. Each trial's answer is written once, whichever unit brings it."""

    def __init__(
        self,
        info: ModelInfo,
        chunks: Sequence[Sequence[Trial]],
        finished: set[str],
        rankings: Mapping[Recorded, Ranking],
        tracker: Tracker,
        write: Write,
        check: Check,
    ) -> None:
        """`finished` are the ids whose rows are there: asked again, for their chunk's sake, but not written again."""
        self.info, self.finished, self.rankings = info, finished, rankings
        self.tracker, self._store, self._check = tracker, write, check
        self.pending = deque(chunks)
        self.crew: Crew

    def of(self, crew: Crew) -> None:
        """Ask all of it."""
        self.crew = crew
        with closing(crew.ask(self._take)) as replies:
            for reply in replies:
                assert isinstance(reply.unit, _Chunk)
                for one in reply.answers:
                    if whole := reply.unit.whole(one):
                        self._write(*whole, reply.unit)
                if reply.error is not None:
                    self._broken(reply.unit, reply.error)
                if reply.over:
                    self.tracker.over(reply.unit)

    def _take(self) -> _Chunk | None:
        while self.pending:
            if chunk := self._unit(self.pending.popleft()):
                names = [trial.id for trial in chunk.trials if trial.id not in self.finished]
                self.tracker.asks(self.info.name, chunk, names, partial(self.crew.share, chunk))
                return chunk
        return None

    def _unit(self, chunk: Sequence[Trial]) -> _Chunk | None:
        """What can be asked of a chunk; what cannot has failed."""
        trials: list[Trial] = []
        requests: list[Request] = []
        owners: list[int] = []
        for trial in chunk:
            try:
                asked = trial.requests(self.rankings)
                for request in asked:
                    prepare(request, self.info.anatomy)
            except NeedleworkError as error:
                self._write(trial, rows.failed(error), 0.0)
                continue
            requests += asked
            owners += [len(trials)] * len(asked)
            trials.append(trial)
        return _Chunk(requests, trials, owners) if trials else None

    def _broken(self, unit: _Chunk, error: Exception) -> None:
        """Something in it broke the batch: find out which, and let the others through."""
        self._check(error)
        left = [trial for trial in unit.trials if trial.id not in self.finished]
        if len(unit.trials) > 1:
            self.pending.extendleft([trial] for trial in reversed(left))
        elif left:
            self._write(left[0], rows.failed(error), 0.0)

    def _write(self, trial: Trial, answer: Answer, seconds: float, unit: Unit | None = None) -> None:
        if trial.id in self.finished:
            return
        try:
            made = self._store(trial, answer, seconds)
        except Exception as error:
            self._check(error)
            made = self._store(trial, rows.failed(error), seconds)
        self.finished.add(trial.id)
        self.tracker.answered(self.info.name, trial.id, made, unit)
