"""What a store keeps of a run besides its rows: models, plan, which rows are in it; and the summary at the end."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from needlework.errors import NeedleworkError
from needlework.experiments.models import Batch, Executor, ModelInfo, NotSupported, run_call
from needlework.experiments.plan import Plan
from needlework.experiments.progress import Tracker
from needlework.experiments.trials import Work
from needlework.results import LM_EVAL, SEMANTICS_VERSION, Store
from needlework.results.rows import NOTHING_HIDDEN
from needlework.terminal import say


@dataclass(frozen=True)
class Scope:
    """The rows of a store that a run writes: those of its plan, or of its evaluation by lm-eval."""

    where: str  # SQL condition
    unasked: int  # rows of the same kind that are in the store and not in the plan


def record_provenance(store: Store, plan: Plan, works: Sequence[Work], retry_failed: bool) -> Scope:
    """Write models, plan and experiments of this run into the store, and mark which rows are in the plan.

    A plan replaces the plan before. An evaluation by lm-eval (`plan.adds`) adds its tasks to what is in the store. With
    `retry_failed`, failed rows are removed, so that they are run again. Raises if the store has rows of other models, of other
    versions of these models, or of another semantics version.
    """
    semantics = store.meta("semantics_version")
    if semantics not in (None, SEMANTICS_VERSION):
        raise NeedleworkError(
            f"{store.directory} was made with semantics version {semantics}, this is version {SEMANTICS_VERSION}:"
            " its answers mean something else; choose another directory"
        )
    models = {work.model.name: work.model for work in works}
    with_rows = {model for (model,) in store.db.execute("SELECT DISTINCT model FROM trials")}
    signed_before = {name: known for name, known in (store.meta("models") or {}).items() if name in with_rows}
    for name, identity in signed_before.items():
        if name not in models and not plan.adds:
            raise NeedleworkError(
                f"{store.directory} holds trials of {name} (weights {identity['weights'][:8]}), which this run does not have;"
                " choose another directory: `needlework report DIR1 DIR2` shows runs side by side"
            )
        for what, value in models[name].identity().items() if name in models else ():
            if identity.get(what) != value:
                raise NeedleworkError(
                    f"{store.directory} was made with another {what} of {name} ({str(identity.get(what))[:8]}, now {value[:8]});"
                    " choose another directory"
                )
    store.set_meta("semantics_version", SEMANTICS_VERSION)
    signed = {name: {**m.identity(), "source": m.model.source, "anatomy": m.anatomy.to_dict()} for name, m in models.items()}
    for name in signed.keys() & signed_before.keys():
        signed[name] = {**signed_before[name], **signed[name]}  # keeps the doctor's results
    store.set_meta("models", {**signed_before, **signed})
    if not plan.adds or store.meta("plan") is None:
        store.set_meta("plan", {"name": plan.name, "about": plan.about, "fast": plan.fast, "text": plan.text})
    experiments, new = store.meta("experiments") or {}, describe_experiments(plan)
    groups = ((trial.experiment, work.model.name, trial.task.name) for work in works for trial in work.trials)
    planned: dict[tuple[str, ...], int] = dict(Counter(groups))
    if plan.adds:  # to the tasks of the experiment of this name, and to the planned trials
        for name, content in new.items():
            known = experiments.get(name, {})
            lists = {key: list(dict.fromkeys([*known.get(key, ()), *content[key]])) for key in ("models", "interventions")}
            new[name] = {**content, **known, **lists, "tasks": {**known.get("tasks", {}), **content["tasks"]}}
        planned = {tuple(group): count for *group, count in store.meta("planned") or ()} | planned
    store.set_meta("experiments", {**experiments, **new})
    store.set_meta("planned", [[*group, count] for group, count in planned.items()])
    scope = _mark_evaluation(store, works) if plan.adds else _mark_plan(store, works)
    if retry_failed:
        store.forget_failed(lm_eval=plan.adds)
    return scope


def _mark_plan(store: Store, works: Sequence[Work]) -> Scope:
    """Mark the rows of this plan as asked and all others as not; remove recordings of other samples."""
    store.set_meta("skipped", [note for work in works for note in work.skipped])
    wanted = {(trial.experiment, work.model.name, trial.task.name, trial.id) for work in works for trial in work.trials}
    unasked = store.mark_asked(wanted, "kind != ?", [LM_EVAL])
    store.keep_recordings({(r.experiment, work.model.name, r.task): r.content() for work in works for r in work.recordings})
    return Scope(f"asked AND kind != '{LM_EVAL}'", unasked)


def _mark_evaluation(store: Store, works: Sequence[Work]) -> Scope:
    """Mark the rows of evaluations as asked, except rows of the same tasks with other prompts."""
    unasked = 0
    prompts: dict[tuple[str, str], set[str]] = {}
    for work in works:
        for trial in work.trials:
            prompts.setdefault((work.model.name, trial.task.name), set()).add(trial.prompt_id)
    for group, current in prompts.items():
        where, values = "kind = ? AND model = ? AND task = ?", (LM_EVAL, *group)
        rows = store.db.execute(f"SELECT experiment, model, task, id, prompt_id FROM trials WHERE {where}", values)
        unasked += store.mark_asked({row[:4] for row in rows if row[4] in current}, where, values)
    own = {
        "model": {work.model.name for work in works},
        "task": {task for _, task in prompts},
        "intervention": {str(trial.intervention) for work in works for trial in work.trials},
    }
    quoted = {column: ", ".join("'" + name.replace("'", "''") + "'" for name in sorted(names)) for column, names in own.items()}
    conditions = [f"asked AND kind = '{LM_EVAL}'", *(f"{column} IN ({names})" for column, names in quoted.items())]
    return Scope(" AND ".join(conditions), unasked)


Doctor = Literal["quick", "full", "off"]
_EXAMINED: dict[str, dict[str, Any]] = {}  # results in this process, reused by its next run of the same model


def examine(store: Store, info: ModelInfo, executor: Executor, how: Doctor, tracker: Tracker) -> None:
    """Check a model with the doctor, once per model and software versions, and store the results; warn if a law fails.

    The run continues after a failure: the report shows the failed laws next to the numbers.
    """
    if how == "off":
        return
    known = store.meta("models")
    state = {**info.identity(), **executor.versions()}
    found = known[info.name].get("checkup")
    if found is None or found["identity"] != state or (how == "full" and found["quick"]):
        key = json.dumps([state, how], sort_keys=True)
        if key not in _EXAMINED:
            batch = Batch(method="checkup", args=(how == "quick",))
            try:
                with tracker.phase(info.name, "examining", partial(executor.share, batch)):
                    checkup = run_call(executor, batch)
            except NotSupported:
                return
            _EXAMINED[key] = {**checkup.to_dict(), "identity": state}
        found = _EXAMINED[key]
        known[info.name]["checkup"] = found
        store.set_meta("models", known)
    failed = [check for check in found["checks"] if check["outcome"] == "fail"]
    if failed:
        laws = "; ".join(f"{check['law']}: {check['why']}" for check in failed)
        say(
            f"{info.name}: {len(failed)} laws fail, so believe no number of it (needlework doctor shows more): {laws}",
            style="red",
        )


def describe_experiments(plan: Plan) -> dict[str, Any]:
    """Return the metadata of each experiment that reports need besides the rows."""
    return {
        experiment.name: {
            "about": experiment.about,
            "models": list(experiment.models),
            "seeds": list(experiment.seeds),
            "boundary": experiment.boundary,
            "interventions": [text.text for text in experiment.grids],
            "tasks": {
                named.name: {
                    "kind": named.task.kind,
                    "mode": named.task.mode,
                    "chance": named.task.chance,
                    "options": named.task.model_dump(mode="json"),
                }
                for named in experiment.tasks
            },
        }
        for experiment in plan.experiments
    }


def summarize(store: Store, scope: Scope, works: Sequence[Work], rate: str, tell: bool = True) -> bool:
    """Print the summary if `tell`; return whether no trial failed and every condition had something to hide."""
    counts = "count(*), sum(finish = 'failed'), min(CASE finish WHEN 'failed' THEN error END)"
    trials, failed, error = store.db.execute(f"SELECT {counts} FROM trials WHERE {scope.where}").fetchone()
    idle = store.db.execute(  # conditions that had nothing to hide in any trial, so that they were not tested
        f"SELECT experiment, model, intervention, count(*) FROM trials WHERE {scope.where} AND finish != 'failed'"
        f" GROUP BY 1, 2, 3 HAVING min({NOTHING_HIDDEN}) ORDER BY 1, 2, 3"
    ).fetchall()
    if tell:
        for work in works:
            for note in work.skipped:
                say(note)
            if work.repeated:
                say(f"{work.repeated} samples of {work.model.name} were the same question twice and count once")
        if scope.unasked:
            say(f"{scope.unasked} rows in {store.directory} are not in this plan (kept, not reported)")
        for experiment, model, act, count in idle:
            say(f"{act} hid nothing in any of its {count} trials of {experiment} ({model}); choose fewer tokens")
        if failed:
            say(f"{failed} of {trials} trials failed, for instance: {error}; --retry-failed tries them again")
        say(f"{trials} trials in {store.directory}" + (f"; {rate}" if rate else ""))
    return not failed and not idle
