"""Run a plan into a directory. Stop it any way you like and start it again: it goes on where it was."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
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
from needlework.store import Observation, Store, claimed

DONE, STOPPED = 0, 130

# A chunk is what an interrupted run may have to compute again, so it is small; it is also what shares a batch.
CHUNK_ASKS = 1024
CHUNK_FLOPS = 5e13
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
    """Run a plan file; 0 when all is done, 130 when stopped by Ctrl-C. Bad input raises before anything is written."""
    try:
        plan = load(path, fast=fast, models=models, make_task=make_task)
        run(plan, out, source or LiveModels(memory_bytes), retry_failed=retry_failed, progress=progress)
    except KeyboardInterrupt:
        say(f"stopped; everything that was finished is in {out}. The same command goes on from there.")
        return STOPPED
    return DONE


def run(plan: Plan, out: str | Path, source: Models, *, retry_failed: bool = False, progress: bool = True) -> None:
    """Run a checked plan: every model is looked at and every trial known before the first one starts."""
    works = [expand(plan, source.look(model)) for model in plan.models.values()]
    check_memory(source, works)
    if Path(out).exists() and not Path(out).is_dir():
        raise NeedleworkError(f"{out} is a file; give a directory")
    with claimed(out) as folder:
        store = Store(folder, create=True)
        try:
            _sign(store, plan, works)
            if retry_failed:
                store.forget_failed()
            with bars(plan, works, store, progress) as shown:
                for work in works:
                    _Run(store, work, source, shown).go()
            summary(store, works, folder)
        finally:
            store.close()


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

    def __init__(self, store: Store, work: Work, source: Models, bars: Bars) -> None:
        self.store, self.work, self.source, self.bars = store, work, source, bars
        self.model = work.sketch.name
        self.versions = ""
        self._last = 0.0

    def go(self) -> None:
        done = {(e, task, trial) for e, model, task, trial in self.store.done() if model == self.model}
        self._copy(done)
        pending = [
            chunk
            for chunk in chunks(self.work, CHUNK_ASKS, CHUNK_FLOPS)
            if any(key not in done for ask in chunk for key in ask.wanted())
        ]
        seen = self.store.observed()
        watched = [w for w in self.work.watched if (w.experiment.name, self.model, w.task.name) not in seen]
        if not pending and not watched:
            return
        actor = self.source.load(self.work.sketch)
        self.versions = self.store.note_versions(actor.versions())
        for chunk in pending:
            self._chunk(actor, chunk, {ask.id for ask in chunk if all(key in done for key in ask.wanted())})
        for one in watched:
            self._watch(actor, one)

    def _copy(self, done: set[tuple[str, str, str]]) -> None:
        """An answer that another experiment of this store already has is not asked for again."""
        ids = {trial for _, _, trial in done}
        for ask in self.work.asks:
            missing = [home for home in ask.homes if (home.experiment, home.task.name, ask.id) not in done]
            if not missing or ask.id not in ids:
                continue
            for home in missing:
                where = "id = ? AND model = ? AND task = ? AND sample = ? AND seed = ?"
                values = (ask.id, self.model, home.task.name, home.item.id, home.seed)
                if found := next(self.store.trials(where, values), None):
                    self.store.add([replace(found, experiment=home.experiment)])
                    done.add((home.experiment, home.task.name, ask.id))
                    self.bars.advance([home.experiment])

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
        except Exception:  # something in it broke the batch: find out which, and let the others through
            for ask in askable:
                if ask.id not in there:
                    try:
                        self._ask(actor, [ask], there)
                    except Exception as error:
                        self._write(ask, rows.failed(error), there)

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
