"""Record the models and the plan of a store; refuse other models, and mark rows that are not in the plan."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from needlework.errors import NeedleworkError
from needlework.experiments.executors import Batch, Executor, NotSupported, run_call
from needlework.experiments.models import ModelInfo
from needlework.experiments.plan import Plan
from needlework.experiments.trials import Work
from needlework.results import LM_EVAL, SEMANTICS_VERSION, Store
from needlework.terminal import say


def record_provenance(store: Store, plan: Plan, works: Sequence[Work]) -> None:
    """Write models, plan and experiments of this run into the store.

    Raises:
        NeedleworkError: The store has rows of other models, of other versions of these models, or of another semantics version.
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
    known_before, added = store.meta("experiments") or {}, experiments(plan)
    if plan.adds:  # merge with an experiment of the same name, keeping its other tasks
        for name, content in added.items():
            known = known_before.get(name, {})
            lists = {key: list(dict.fromkeys([*known.get(key, ()), *content[key]])) for key in ("models", "interventions")}
            added[name] = {**content, **known, **lists, "tasks": {**known.get("tasks", {}), **content["tasks"]}}
    else:
        store.set_meta("skipped", [note for work in works for note in work.skipped])
    store.set_meta("experiments", {**known_before, **added})


Doctor = Literal["quick", "full", "off"]
_EXAMINED: dict[str, dict[str, Any]] = {}  # results in this process, reused by its next run of the same model


def examine(store: Store, info: ModelInfo, executor: Executor, how: Doctor) -> None:
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
            try:
                checkup = run_call(executor, Batch(method="checkup", args=(how == "quick",)))
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


def experiments(plan: Plan) -> dict[str, Any]:
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


def flag_stale_rows(store: Store, plan: Plan, works: Sequence[Work]) -> int:
    """Mark which rows of a store are in the plan and store the planned counts; return how many rows are not in it."""
    unasked = 0
    asked = Counter((trial.experiment, work.model.name, trial.task.name) for work in works for trial in work.trials)
    planned = {tuple(group): count for *group, count in store.meta("planned") or ()} if plan.adds else {}
    store.set_meta("planned", [[*group, count] for group, count in {**planned, **asked}.items()])
    if plan.adds:  # excludes only rows of the same tasks that have other prompts
        for work in works:
            prompts: dict[str, set[str]] = {}
            for trial in work.trials:
                prompts.setdefault(trial.task.name, set()).add(trial.prompt_id)
            for task, current in prompts.items():
                where, values = "kind = ? AND model = ? AND task = ?", (LM_EVAL, work.model.name, task)
                rows = store.db.execute(f"SELECT experiment, model, task, id, prompt_id FROM trials WHERE {where}", values)
                unasked += store.mark_asked({row[:4] for row in rows if row[4] in current}, where, values)
        return unasked
    wanted = {(trial.experiment, work.model.name, trial.task.name, trial.id) for work in works for trial in work.trials}
    unasked = store.mark_asked(wanted, "kind != ?", [LM_EVAL])
    store.keep_recordings({(r.experiment, work.model.name, r.task): r.content() for work in works for r in work.recordings})
    return unasked
