"""Run a plan into a directory. Stop it any way you like and start it again: it goes on where it was."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, get_args

from needlework.errors import NeedleworkError
from needlework.experiments import rows
from needlework.experiments.asking import Asking
from needlework.experiments.chunks import chunks
from needlework.experiments.cluster import Cluster
from needlework.experiments.crew import Crew, Hiring, alone
from needlework.experiments.models import DiskModels, ModelSource
from needlework.experiments.plan import Plan
from needlework.experiments.progress import Tracker, summary
from needlework.experiments.provenance import Doctor, examine, mark, sign
from needlework.experiments.rankings import by_seen, record
from needlework.experiments.result import Result
from needlework.experiments.shipped import get
from needlework.experiments.trials import Ranked, Recording, Trial, Work, expand
from needlework.heads.methods import chosen
from needlework.interventions import Ranking
from needlework.interventions.ranking import Recorded
from needlework.requests import Answer, Prepared, prepare
from needlework.rescoring import lasting_scores
from needlework.store import Observation, Row, Store, StoreError, claimed, is_full, writing
from needlework.tasks.scores import SCORES_VERSION
from needlework.terminal import say

# A chunk shares batches, and an interrupted run asks the one that it was in again: it is as small as costs no speed. On a CPU,
# rows beyond some 32 decode hardly faster together, and a chunk of so many that is long enough (a minute) ends there.
CHUNK_TRIALS = 1024
CHUNK_FLOPS = 5e13
ENOUGH_TRIALS = 32
ENOUGH_FLOPS = 3e12
REUSED_ROWS = 500  # written together
RECORDED_SPAN = "needle"


# [walk 3] docs/architecture.md
def run(
    plan: str | Path | Plan,
    out: str | Path,
    *,
    models: Sequence[str] = (),
    fast: bool = False,
    device: str | None = None,
    dtype: Any = None,
    window: str | None = None,
    kernels: str | None = None,
    memory_bytes: int | None = None,
    retry_failed: bool = False,
    progress: bool = True,
    tell: bool = True,
    source: ModelSource | None = None,
    doctor: Doctor = "quick",
    cluster: Cluster | None = None,
) -> Result:
    """Run a plan (its path, a shipped one's name, or a loaded Plan) into a directory, or what an earlier run left of it.

    `models` replaces the plan's models, `fast` takes its reduced grid; `device`, `dtype`, `window` and `kernels` are as in
    `nw.load` and go before what the plan says of its models. `memory_bytes` limits prompts and answers. `progress` shows
    bars, `tell` says at the end what was left out or failed. `source` brings models that do not come from disk or hub.
    `doctor` says how each model is examined for the record when it is first loaded: "quick" (seconds), "full" or "off".
    `cluster` has the models loaded and asked by workers of a Ray cluster (docs/scale.md); the store comes out the same.

    Every model is looked at and every trial known before the first one starts: bad input raises before anything is written.
    Each answer is kept as it comes, so that after Ctrl-C, which is passed on, the same call goes on from there.
    """
    if doctor not in get_args(Doctor):
        raise NeedleworkError(f"doctor={doctor!r} is not known; choose from {', '.join(get_args(Doctor))}")
    asked = get(plan, fast=fast, models=models, device=device, dtype=dtype, window=window, kernels=kernels)
    source = source or (cluster.models(memory_bytes) if cluster else DiskModels(memory_bytes))
    works = [expand(asked, source.look(model)) for model in asked.models.values()]
    for work in works:
        if work.model.costs is not None:
            work.model.costs.within(source.memory_bytes, _largest(work))
    with claimed(out) as folder, cluster.joined() if cluster else nullcontext(alone) as hire:
        store = Store(folder, create=True)
        try:
            return Result(folder, _into(store, asked, works, source, hire, retry_failed, progress, tell, doctor))
        except KeyboardInterrupt:
            if store.done():
                say(f"everything that was finished is in {folder}; the same command goes on from there")
            raise
        finally:
            store.close()


def _into(
    store: Store,
    plan: Plan,
    works: Sequence[Work],
    source: ModelSource,
    hire: Hiring,
    retry_failed: bool,
    progress: bool,
    tell: bool,
    doctor: Doctor,
) -> bool:
    """Ask what a store lacks. True if every trial of the plan was answered, and every condition was one."""
    sign(store, plan, works)
    unasked = mark(store, plan, works)
    if retry_failed:
        store.forget_failed(lm_eval=plan.adds)
    runs = [_ModelRun(store, work, doctor) for work in works]
    if again := sum(one.reuse() for one in runs):
        say(f"{again} rows were scored anew from the answers that are there; nothing was asked again for them")
    if not plan.adds:
        store.set_meta("scores_version", SCORES_VERSION)
    tracker = Tracker(works, store, progress)
    with tracker.bar:
        for one in runs:
            one.go(source, hire, tracker)
    return summary(store, plan, works, unasked, tracker.rate(), tell)


def _largest(work: Work) -> Iterator[Prepared]:
    """The longest request of each kind under each intervention: a memory limit that these do not fit into is refused."""
    longest: dict[tuple[str, str], Trial] = {}
    for trial in sorted(work.trials, key=lambda trial: trial.tokens):
        longest[trial.mode, str(trial.intervention)] = trial
    for trial in longest.values():
        with suppress(NeedleworkError):  # what cannot be asked of this prompt fails its own trial
            yield from [prepare(request, work.model.anatomy) for request in trial.requests(work.any_rankings)]


def chunked(work: Work) -> Iterator[list[Trial]]:
    """What is asked together."""
    short = ENOUGH_FLOPS if work.model.model.loading.device == "cpu" else CHUNK_FLOPS
    return chunks(work, CHUNK_TRIALS, CHUNK_FLOPS, ENOUGH_TRIALS, short)


class _ModelRun:
    """One model's trials."""

    def __init__(self, store: Store, work: Work, doctor: Doctor) -> None:
        self.store, self.work, self.doctor = store, work, doctor
        self.model = work.model.name
        self.trials = work.by_id()
        done = store.done()
        self.done = {key[:1] + key[2:]: scoring for key, scoring in done.items() if key[1] == self.model}  # row -> scoring
        self.versions = ""
        self.rankings: dict[Recorded, Ranking] = {}

    def go(self, source: ModelSource, hire: Hiring, tracker: Tracker) -> None:
        unfinished = {name for name, same in self.trials.items() if any(trial.key not in self.done for trial in same)}
        pending = [chunk for chunk in chunked(self.work) if any(trial.id in unfinished for trial in chunk)]
        recorded = self.store.observed()
        recordings = [r for r in self.work.recordings if (r.experiment, self.model, r.task) not in recorded]
        if not pending and not recordings:
            return
        tracker.loads(self.model)
        with hire(source, self.work.model, max(1, len(pending))) as crew:
            self.versions = self.store.note_versions(crew.versions())
            examine(self.store, self.work.model, crew, self.doctor)
            self._rank(crew)
            finished = self.trials.keys() - unfinished
            Asking(self.work.model, pending, finished, self.rankings, tracker, self._write, self._stop_if_full).of(crew)
            for recording in recordings:
                with tracker.records(self.model, recording, crew.share):
                    self._record(crew, recording)

    def reuse(self) -> int:
        """Write the rows that stored answers suffice for; how many of them replace a row with scores of an older kind.

        Trials with equal ids have equal answers, whichever experiment asked first. Each row has its own scores.
        """
        answered = {name for _, _, name in self.done}
        again = 0
        made: list[Row] = []
        for name, same in self.trials.items():
            lacking = [trial for trial in same if self.done.get(trial.key) != trial.task.scoring]
            if lacking and name in answered:
                known = {(row.experiment, row.task): row for row in self.store.rows("id = ? AND model = ?", (name, self.model))}
                for trial in lacking:
                    own = known.get((trial.experiment, trial.task.name))
                    row = own or min(known.values(), key=lambda row: rows.stored(row).finish == "failed")
                    lasting = lasting_scores(row)
                    made.append(rows.to_row(trial, rows.stored(row), self.model, row.seconds, row.versions, lasting))
                    again += own is not None
            if len(made) >= REUSED_ROWS:
                self.store.add(made)
                made = []
        self.store.add(made)
        self.done |= {trial.key: "" for trial in self.work.trials if trial.id in answered}
        return again

    def _stop_if_full(self, error: Exception) -> None:
        """A disk that takes nothing more is no trial's failure."""
        if isinstance(error, StoreError):
            raise error
        if is_full(error):
            with writing(self.store.directory):
                raise error

    def _write(self, trial: Trial, answer: Answer, seconds: float) -> int:
        same = self.trials[trial.id]
        self.store.add([rows.to_row(one, answer, self.model, seconds, self.versions) for one in same])
        return len(same)

    def _rank(self, crew: Crew) -> None:
        """Record the rankings that trials wait for, each once for a store."""
        kept = self.store.meta("rankings") or {}
        known = kept.setdefault(self.model, {})
        for ranked in self.work.rankings.values():
            if ranked.source.content not in known:
                known[ranked.source.content] = {"name": ranked.source.name, **self._ordered(crew, ranked)}
                self.store.set_meta("rankings", kept)
            self.rankings[ranked.source] = Ranking.parse(known[ranked.source.content]["order"])

    def _ordered(self, crew: Crew, ranked: Ranked) -> dict[str, Any]:
        """What a store keeps of a ranking, which a file holds, what was seen tells, or the model must be asked for."""
        if ranked.ranking is not None:
            return record(f"file {ranked.by}".strip(), ranked.ranking, (), ranked.ranking.samples)
        requests = [request for trial in ranked.trials for request in trial.requests()]
        seen = crew.watch(requests, RECORDED_SPAN)
        (method,) = chosen([ranked.by])
        if method.of_seen is not None:
            order = by_seen(method.of_seen, seen)
        else:
            order = crew.rank(ranked.by, ranked.items, ranked.trials[0].seed)
        return record(ranked.by, order, seen, len(requests))

    def _record(self, crew: Crew, recording: Recording) -> None:
        heads = crew.watch([request for trial in recording.trials for request in trial.requests()], RECORDED_SPAN)
        where = (recording.experiment, self.model, recording.task)
        samples = len(recording.trials)
        self.store.observe([Observation(*where, h.layer, h.head, samples, h.needle_mass, h.entropy, h.copy_score) for h in heads])
        self.store.note_recording(where, recording.content())
