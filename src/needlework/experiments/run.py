"""Run a plan and store its results in a directory. A run that was stopped, in any way, resumes where it was."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial, reduce
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from needlework.anatomy import Head
from needlework.errors import NeedleworkError
from needlework.experiments.models import (
    Batch,
    DiskModels,
    Executor,
    ModelSource,
    Observed,
    OpenExecutor,
    TimedAnswer,
    local_executor,
    run_call,
)
from needlework.experiments.plan import Plan, get
from needlework.experiments.progress import Tracker
from needlework.experiments.provenance import Doctor, examine, record_provenance, summarize
from needlework.experiments.ray_executor import Cluster, WorkerModels
from needlework.experiments.result import Result
from needlework.experiments.trials import RankingSamples, RecordedTask, Trial, Work, chunked, expand_all, to_row
from needlework.heads.methods import find_methods
from needlework.interventions import Ranking
from needlework.interventions.ranking import Recorded
from needlework.requests import Answer, Prepared, failed_answer, prepare
from needlework.results import Observation, Row, Store, StoreError, claimed, is_full, writing
from needlework.results.rows import stored_answer
from needlework.tasks.base import SCORES_VERSION
from needlework.terminal import say

if TYPE_CHECKING:
    from needlework.observation import HeadRow

REUSED_ROWS = 500  # per transaction
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
    progress: bool | Tracker = True,
    tell: bool = True,
    source: ModelSource | None = None,
    doctor: Doctor = "quick",
    cluster: Cluster | None = None,
    open_executor: OpenExecutor = local_executor,
    regroup: bool = False,
) -> Result:
    """Run a plan and store its results in a directory, or run the trials that an earlier run did not finish.

    Each answer is written as it arrives. KeyboardInterrupt is raised again after a message, and the same call then resumes.

    Args:
        plan: Path of a plan file, name of a shipped plan, or a loaded Plan.
        out: Directory of the store; created if missing.
        models: Models to use instead of the plan's.
        fast: Use the plan's reduced grid.
        device, dtype, window, kernels: As in `nw.load`; they override the plan's settings of its models.
        memory_bytes: Most memory for KV caches, states and activations, besides the weights.
        retry_failed: Run trials again that failed in an earlier run.
        progress: Show a progress bar. A Tracker whose bar is open counts this run's answers among those of others.
        tell: Print at the end what was skipped or failed.
        source: Provider of models that come neither from disk nor from the hub.
        doctor: Checks of each model when it is loaded, recorded in the store: "quick" (seconds), "full" or "off".
        cluster: Ray cluster whose workers load the models. The stored rows are the same.
        open_executor: Opens what executes the batches of each model if there is no cluster.
        regroup: Make batches of the missing trials alone, for a plan that grows step by step. Otherwise a batch with a missing
            trial is executed as a whole, so that all numbers are those of a run that was never stopped.

    Raises:
        NeedleworkError: Bad input. All models are inspected and all trials expanded before anything is written.
    """
    if doctor not in get_args(Doctor):
        raise NeedleworkError(f"doctor={doctor!r} is not known; choose from {', '.join(get_args(Doctor))}")
    asked = get(plan, fast=fast, models=models, device=device, dtype=dtype, window=window, kernels=kernels)
    source = source or (WorkerModels(memory_bytes, cluster) if cluster else DiskModels(memory_bytes))
    works = expand_all(asked, source)
    for work in works:
        if work.model.costs is not None:
            work.model.costs.within(source.memory_bytes, _largest_requests(work))
    with claimed(out) as folder, cluster.connected() if cluster else nullcontext(open_executor) as open_each:
        store = Store(folder, create=True)
        try:
            scope = record_provenance(store, asked, works, retry_failed)
            runs = [_ModelRun(store, work, doctor, regroup) for work in works]
            if again := sum(one.reuse() for one in runs):
                say(f"{again} rows were scored anew from the answers that are there; nothing was asked again for them")
            if any(trial.task.scoring for work in works for trial in work.trials):  # all but those that lm-eval scores
                store.set_meta("scores_version", SCORES_VERSION)
            with _tracked(progress, works, store, doctor) as tracker:
                for one in runs:
                    one.run(source, open_each, tracker)
                    if tracker is not progress:
                        tracker.finish(one.model)
            return Result(folder, summarize(store, scope, works, tracker.rate(), tell))
        except KeyboardInterrupt:
            if store.done():
                say(f"everything that was finished is in {folder}; the same command goes on from there")
            raise
        finally:
            store.close()


@contextmanager
def _tracked(progress: bool | Tracker, works: Sequence[Work], store: Store, doctor: Doctor) -> Iterator[Tracker]:
    """Yield the tracker that was given, or a new one, whose bar is open meanwhile."""
    if not isinstance(progress, bool):
        yield progress
        return
    tracker = Tracker(works, store, progress, doctor != "off")
    with tracker.bar:
        yield tracker


def _largest_requests(work: Work) -> Iterator[Prepared]:
    """Yield the longest request of each mode and intervention: the memory limit must fit these."""
    longest: dict[tuple[str, str], Trial] = {}
    for trial in sorted(work.trials, key=lambda trial: trial.tokens):
        longest[trial.mode, str(trial.intervention)] = trial
    for trial in longest.values():
        with suppress(NeedleworkError):  # an invalid request fails its own trial later
            yield from [prepare(request, work.model.anatomy) for request in trial.requests(work.any_rankings)]


@dataclass(eq=False)
class _TrialBatch(Batch):
    """A batch that holds all requests of a chunk of trials."""

    trials: Sequence[Trial] = ()
    owners: Sequence[int] = ()  # the index of each request's trial
    _parts: dict[int, dict[int, TimedAnswer]] = field(default_factory=dict)  # of incomplete trials

    def complete(self, one: TimedAnswer) -> tuple[Trial, Answer, float] | None:
        """Add an answer; return (trial, joined answer, seconds) if it was the last one of its trial, else None."""
        trial = self.owners[one[0]]
        parts = self._parts.setdefault(trial, {})
        parts[one[0]] = one
        if len(parts) < self.owners.count(trial):
            return None
        ordered = [part for _, part in sorted(self._parts.pop(trial).items())]
        return self.trials[trial], reduce(add, (answer for _, answer, _ in ordered)), sum(seconds for *_, seconds in ordered)


class _ModelRun:
    """The run of all trials of one model."""

    def __init__(self, store: Store, work: Work, doctor: Doctor, regroup: bool) -> None:
        self.store, self.work, self.doctor, self.regroup = store, work, doctor, regroup
        self.model = work.model.name
        self.trials = work.by_id()
        done = store.done()
        self.done = {key[:1] + key[2:]: scoring for key, scoring in done.items() if key[1] == self.model}  # PlanRowKey -> hash
        self.versions = ""
        self.rankings: dict[Recorded, Ranking] = {}
        self.finished: set[str] = set()  # trial ids whose rows are written

    def run(self, source: ModelSource, open_executor: OpenExecutor, tracker: Tracker) -> None:
        """Load the model if anything is missing; check it, rank heads, run pending chunks and recordings."""
        unfinished = {name for name, same in self.trials.items() if any(trial.key not in self.done for trial in same)}
        missing = [trial for trial in self.work.trials if trial.id in unfinished]
        chunks = chunked(replace(self.work, trials=missing) if self.regroup else self.work)
        pending = [chunk for chunk in chunks if any(trial.id in unfinished for trial in chunk)]
        recorded = self.store.observed()
        recordings = [r for r in self.work.recordings if (r.experiment, self.model, r.task) not in recorded]
        if not pending and not recordings:
            return
        with ExitStack() as stack:
            with tracker.phase(self.model, "loading"):
                executor = stack.enter_context(open_executor(source, self.work.model, max(1, len(pending))))
                self.versions = self.store.note_versions(executor.versions())
            examine(self.store, self.work.model, executor, self.doctor, tracker)
            self._rank(executor, tracker)
            self.finished = self.trials.keys() - unfinished
            while pending:  # trials of a batch that raised are executed again one by one, so that only the faulty ones fail
                broken = self._ask(executor, pending, tracker)
                pending = [[trial] for trial in broken if trial.id not in self.finished]
            for recording in recordings:
                self._record(executor, recording, tracker)

    def _ask(self, executor: Executor, chunks: Sequence[Sequence[Trial]], tracker: Tracker) -> list[Trial]:
        """Execute one batch per chunk, write the rows of each answer as it arrives, and return the trials of broken batches."""
        broken: list[Trial] = []

        def batches() -> Iterator[_TrialBatch]:
            for chunk in chunks:
                asked = [trial.requests(self.rankings) for trial in chunk]
                owners = [i for i, requests in enumerate(asked) for _ in requests]
                batch = _TrialBatch([request for requests in asked for request in requests], trials=chunk, owners=owners)
                unfinished = [trial.id for trial in chunk if trial.id not in self.finished]
                tracker.start(self.model, batch, unfinished, partial(executor.share, batch))
                yield batch

        with closing(executor.run(batches())) as results:
            for result in results:
                batch = result.batch
                assert isinstance(batch, _TrialBatch)
                for one in result.answers:
                    if whole := batch.complete(one):
                        self._write(*whole, tracker, batch)
                if result.done:
                    tracker.stop(batch)
                if result.error is not None:
                    self._stop_if_full(result.error)
                    broken += batch.trials
                    if len(batch.trials) == 1:
                        self._write(batch.trials[0], failed_answer(result.error), 0.0, tracker)
        return broken

    def reuse(self) -> int:
        """Write rows that need no inference because the store has their answer; return how many rows were rescored.

        Trials with equal ids have equal answers in all experiments; the scores belong to each row. A row is rescored if its
        scoring hash differs from the one of the task.
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
                    row = own or min(known.values(), key=lambda row: stored_answer(row).finish == "failed")
                    made.append(to_row(trial, stored_answer(row), self.model, row.seconds, row.versions))
                    again += own is not None
            if len(made) >= REUSED_ROWS:
                self.store.add(made)
                made = []
        self.store.add(made)
        self.done |= {trial.key: "" for trial in self.work.trials if trial.id in answered}
        return again

    def _stop_if_full(self, error: Exception) -> None:
        """Raise if the error is a failed write or a full disk: that is not a failure of the trial."""
        if isinstance(error, StoreError):
            raise error
        if is_full(error):
            with writing(self.store.directory):
                raise error

    def _write(self, trial: Trial, answer: Answer, seconds: float, tracker: Tracker, batch: Batch | None = None) -> None:
        """Write the rows of all trials with this id, once. If that raises, write them as failed."""
        if trial.id in self.finished:
            return
        same = self.trials[trial.id]
        try:
            self.store.add([to_row(one, answer, self.model, seconds, self.versions) for one in same])
        except Exception as error:
            self._stop_if_full(error)
            failed = failed_answer(error)
            self.store.add([to_row(one, failed, self.model, seconds, self.versions) for one in same])
        self.finished.add(trial.id)
        tracker.count_answer(self.model, trial.id, batch)

    def _rank(self, executor: Executor, tracker: Tracker) -> None:
        """Compute the head rankings that interventions refer to, or read them from the store if it has them."""
        kept = self.store.meta("rankings") or {}
        known = kept.setdefault(self.model, {})
        for ranked in self.work.rankings.values():
            if ranked.source.content not in known:
                with tracker.phase(self.model, "ranking heads", of=len(self.work.rankings)):
                    known[ranked.source.content] = {"name": ranked.source.name, **_compute_ranking(executor, ranked)}
                self.store.set_meta("rankings", kept)
            self.rankings[ranked.source] = Ranking.parse(known[ranked.source.content]["order"])

    def _record(self, executor: Executor, recording: RecordedTask, tracker: Tracker) -> None:
        """Record the statistics of heads and layers in a task and store them."""
        requests = [request for trial in recording.trials for request in trial.requests()]
        batch = Batch(method="watch", args=(requests, RECORDED_SPAN))
        with tracker.recording(self.model, recording, partial(executor.share, batch)):
            seen: Observed = run_call(executor, batch)
        where = (recording.experiment, self.model, recording.task)
        samples = len(recording.trials)
        self.store.add(
            [Observation(*where, h.layer, h.head, samples, h.needle_mass, h.entropy, h.copy_score) for h in seen.heads]
        )
        self.store.note_recording(where, recording.content(), [asdict(row) for row in seen.layers])


def _compute_ranking(executor: Executor, ranked: RankingSamples) -> dict[str, Any]:
    """Return what the store keeps of a ranking: the order, and each head's attention mass on the first token, by layer.

    The order comes from a file, from observed attention, or from a method that is run on the model.
    """
    by, order, samples, heads = f"file {ranked.by}".strip(), ranked.ranking, 0, list["HeadRow"]()
    if order is None:
        by, requests = ranked.by, [request for trial in ranked.trials for request in trial.requests()]
        samples = len(requests)
        seen: Observed = run_call(executor, Batch(method="watch", args=(requests, RECORDED_SPAN)))
        heads = sorted(seen.heads, key=lambda h: (h.layer, h.head))
        (method,) = find_methods([by])
        if method.of_row is not None:
            order = Ranking.by_scores({Head(head.layer, head.head): method.of_row(head) for head in heads})
        else:
            order = run_call(executor, Batch(method="rank", args=(by, ranked.items, ranked.trials[0].seed)))
    sinks: dict[str, list[float]] = {}
    by_entropy: dict[str, list[float]] = {}
    for head in heads:
        sinks.setdefault(str(head.layer), []).append(head.sink_mass)
        by_entropy.setdefault(str(head.layer), []).append(head.sink_mass_of_best)
    words = order.text().removeprefix("ranking('").removesuffix("')")
    return {"by": by, "samples": samples or order.samples, "order": words, "sinks": sinks, "sinks_by_entropy": by_entropy}
