"""Run a plan into a directory. Stop it any way you like and start it again: it goes on where it was."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from needlework.errors import NeedleworkError
from needlework.experiments import rows
from needlework.experiments.asks import SEMANTICS_VERSION, Ask, Watched, Work, chunks
from needlework.experiments.live import Actor, LiveModels, Models, check_memory
from needlework.experiments.plan import MakeTask, Plan, load
from needlework.experiments.progress import Bars, bars, say, summary
from needlework.experiments.trials import expand
from needlework.requests import prepare
from needlework.store import LM_EVAL, Observation, Row, Store, StoreError, claimed, is_full, writing
from needlework.tasks.scores import SCORES_VERSION

DONE, FAILED, STOPPED = 0, 1, 130

# A chunk is what an interrupted run may have to compute again, so it is small; it is also what shares a batch.
CHUNK_ASKS = 1024
CHUNK_FLOPS = 5e13
REUSED_ROWS = 500  # written together
WATCHED_SPAN = "needle"


def run_plan(
    path: str | Path,
    out: str | Path,
    *,
    fast: bool = False,
    models: Sequence[str] = (),
    memory_bytes: int | None = None,
    retry_failed: bool = False,
    progress: bool = True,
    source: Models | None = None,
    make_task: MakeTask | None = None,
) -> int:
    """Run a plan file: 0 when all is done, 1 when trials of the plan failed or a condition hid nothing, 130 on Ctrl-C.

    Bad input raises before anything is written; a disk that takes nothing more raises and stops the run.
    """
    try:
        plan = load(path, fast=fast, models=models, make_task=make_task)
        sound = run(plan, out, source or LiveModels(memory_bytes), retry_failed=retry_failed, progress=progress)
    except KeyboardInterrupt:
        say(f"stopped; everything that was finished is in {out}. The same command goes on from there.")
        return STOPPED
    return DONE if sound else FAILED


def run(plan: Plan, out: str | Path, source: Models, *, retry_failed: bool = False, progress: bool = True) -> bool:
    """Run a checked plan: every model is looked at and every trial known before the first one starts. True if none failed."""
    works = [expand(plan, source.look(model)) for model in plan.models.values()]
    check_memory(source, works)
    if Path(out).exists() and not Path(out).is_dir():
        raise NeedleworkError(f"{out} is a file; give a directory")
    with claimed(out) as folder:
        store = Store(folder, create=True)
        try:
            _sign(store, plan, works)
            unasked = _compare(store, works)
            if retry_failed:
                store.forget_failed()
            runs = [_Run(store, work, source) for work in works]
            if again := sum(one.reuse() for one in runs):
                say(f"{again} rows were scored anew from the answers that are there; nothing was asked again for them")
            store.set_meta("scores_version", SCORES_VERSION)
            with bars(plan, works, store, progress) as shown:
                for one in runs:
                    one.go(shown)
            return summary(store, works, folder, unasked)
        finally:
            store.close()


def _compare(store: Store, works: Sequence[Work]) -> int:
    """Note what the plan asks of what is there; how many rows it does not ask for."""
    wanted = {(key[0], work.sketch.name, *key[1:]) for work in works for ask in work.asks for key in ask.wanted()}
    recordings = {(w.experiment.name, work.sketch.name, w.task.name): w.content() for work in works for w in work.watched}
    unasked = store.mark_asked(wanted, "kind != ?", [LM_EVAL])
    store.keep_recordings(recordings)
    store.set_meta("migrated_from", None)
    return unasked


def _sign(store: Store, plan: Plan, works: Sequence[Work]) -> None:
    """Refuse a store whose trials were made by something else; write down what makes these."""
    semantics = store.meta("semantics_version")
    if semantics not in (None, SEMANTICS_VERSION):
        raise NeedleworkError(
            f"{store.directory} was made with semantics version {semantics}, this is version {SEMANTICS_VERSION}:"
            " its answers mean something else; choose another directory"
        )
    here = {work.sketch.name: work.sketch for work in works}
    for name, known in (store.meta("models") or {}).items():
        if name not in here:
            raise NeedleworkError(
                f"{store.directory} holds trials of {name} (weights {known['weights'][:8]}), which this run does not have;"
                " choose another directory: `needlework report DIR1 DIR2` shows runs side by side"
            )
        for what, mine in here[name].identity().items():
            if known.get(what) != mine:
                raise NeedleworkError(
                    f"{store.directory} was made with another {what} of {name} ({str(known.get(what))[:8]}, now {mine[:8]});"
                    " choose another directory"
                )
    store.set_meta("semantics_version", SEMANTICS_VERSION)
    signed = {name: {**s.identity(), "source": s.model.source, "anatomy": s.anatomy.to_dict()} for name, s in here.items()}
    store.set_meta("models", signed)
    store.set_meta("plan", {"name": plan.name, "about": plan.about, "fast": plan.fast, "text": plan.text})
    store.set_meta("experiments", {**(store.meta("experiments") or {}), **_experiments(plan)})
    store.set_meta("skipped", [note for work in works for note in work.skipped])


def _experiments(plan: Plan) -> dict[str, Any]:
    """What a report wants to know of each experiment beside its rows."""
    return {
        e.name: {
            "about": e.about,
            "models": list(e.models),
            "seeds": list(e.seeds),
            "boundary": e.boundary,
            "interventions": [text.text for text in e.grids],
            "tasks": {
                t.name: {
                    "kind": t.task.kind,
                    "mode": t.task.mode,
                    "chance": t.task.chance,
                    "options": t.task.model_dump(mode="json"),
                }
                for t in e.tasks
            },
        }
        for e in plan.experiments
    }


class _Run:
    """One model's work."""

    def __init__(self, store: Store, work: Work, source: Models) -> None:
        self.store, self.work, self.source = store, work, source
        self.model = work.sketch.name
        self.done = {(e, task, trial): what for (e, model, task, trial), what in store.done().items() if model == self.model}
        self.bars = Bars()
        self.versions = ""
        self._last = 0.0

    def go(self, shown: Bars) -> None:
        self.bars = shown
        pending = [
            chunk
            for chunk in chunks(self.work, CHUNK_ASKS, CHUNK_FLOPS)
            if any(key not in self.done for ask in chunk for key in ask.wanted())
        ]
        seen = self.store.observed()
        watched = [w for w in self.work.watched if (w.experiment.name, self.model, w.task.name) not in seen]
        if not pending and not watched:
            return
        actor = self.source.load(self.work.sketch)
        self.versions = self.store.note_versions(actor.versions())
        for chunk in pending:
            self._chunk(actor, chunk, {ask.id for ask in chunk if all(key in self.done for key in ask.wanted())})
        for one in watched:
            self._watch(actor, one)

    def reuse(self) -> int:
        """Rows from answers that are there, for whoever lacks them or scores them otherwise now; how many had other scores.

        Equal ids mean equal answers, whoever asked. Scores are each home's own.
        """
        answered = {trial for _, _, trial in self.done}
        again = 0
        made: list[Row] = []
        for ask in self.work.asks:
            homes = [h for h in ask.homes if self.done.get((h.experiment, h.task.name, ask.id)) != h.task.scoring]
            if homes and ask.id in answered:
                known = {(t.experiment, t.task): t for t in self.store.rows("id = ? AND model = ?", (ask.id, self.model))}
                for home in homes:
                    own = known.get((home.experiment, home.task.name))
                    trial = own or min(known.values(), key=lambda t: rows.stored(t).finish == "failed")
                    made.append(rows.row(ask, home, rows.stored(trial), self.model, trial.seconds, trial.versions))
                    again += own is not None
            if len(made) >= REUSED_ROWS:
                self.store.add(made)
                made = []
        self.store.add(made)
        self.done |= {key: "" for ask in self.work.asks if ask.id in answered for key in ask.wanted()}
        return again

    def _chunk(self, actor: Actor, chunk: Sequence[Ask], there: set[str]) -> None:
        """Ask a whole chunk; what is already there is asked again, for the batch's sake, but not written again."""
        self._last = time.monotonic()
        askable = []
        for ask in chunk:
            try:
                prepare(ask.request(), self.work.sketch.anatomy)
                askable.append(ask)
            except NeedleworkError as error:
                self._write(ask, rows.failed(error), there)
        try:
            self._ask(actor, askable, there)
        except Exception as broken:  # something in it broke the batch: find out which, and let the others through
            self._stop_if_full(broken)
            for ask in askable:
                if ask.id not in there:
                    try:
                        self._ask(actor, [ask], there)
                    except Exception as error:
                        self._stop_if_full(error)
                        self._write(ask, rows.failed(error), there)

    def _stop_if_full(self, error: Exception) -> None:
        """A disk that takes nothing more is no trial's failure."""
        if isinstance(error, StoreError):
            raise error
        if is_full(error):
            with writing(self.store.directory):
                raise error

    def _ask(self, actor: Actor, asks: Sequence[Ask], there: set[str]) -> None:
        if not asks:
            return
        if asks[0].settings.mode == "generate":
            for i, answer in actor.answers([ask.request() for ask in asks]):
                self._write(asks[i], rows.answered(answer), there)
        else:
            for i, scores in actor.scores([(ask.request(), ask.options()) for ask in asks]):
                self._write(asks[i], rows.scored(asks[i], scores), there)

    def _write(self, ask: Ask, result: rows.Result, there: set[str]) -> None:
        now = time.monotonic()
        seconds, self._last = now - self._last, now
        if ask.id not in there:
            self.store.add(rows.rows(ask, result, self.model, seconds, self.versions))
            there.add(ask.id)
            self.bars.advance([home.experiment for home in ask.homes])

    def _watch(self, actor: Actor, watched: Watched) -> None:
        table = actor.watch([ask.request() for ask in watched.asks], WATCHED_SPAN)
        where = (watched.experiment.name, self.model, watched.task.name)
        self.store.observe(
            [
                Observation(*where, row.layer, row.head, len(watched.asks), row.needle_mass, row.entropy, row.copy_score)
                for row in table
            ]
        )
        self.store.note_recording(where, watched.content())
