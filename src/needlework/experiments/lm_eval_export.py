"""The result files of lm-evaluation-harness: one directory per model and intervention, as `lm_eval --log_samples` leaves."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from needlework.files import file_name, whole
from needlework.store import Row, Store

Group = tuple[str, str]  # model, intervention


def write(store: Store, folder: Path) -> list[Path]:
    """results.json and samples_TASK.jsonl of every model under every intervention; a trial counts once."""
    written = []
    labels = _labels(store)
    groups = store.db.execute("SELECT DISTINCT model, intervention FROM trials WHERE asked ORDER BY 1, 2").fetchall()
    for number, (model, intervention) in enumerate(groups):
        place = folder / "lm-eval" / file_name(model) / f"{number:04d}-{file_name(intervention)}"
        place.mkdir(parents=True, exist_ok=True)
        written += _group(store, place, (model, intervention), labels)
    return written


def _group(store: Store, place: Path, group: Group, labels: Mapping[tuple[str, str], str]) -> list[Path]:
    tasks: dict[str, dict[str, Row]] = {}
    where = "model = ? AND intervention = ? AND asked ORDER BY task, sample, seed, experiment"
    for trial in store.rows(where, group):
        tasks.setdefault(labels[trial.experiment, trial.task], {}).setdefault(trial.id, trial)
    trials = {task: list(by_id.values()) for task, by_id in tasks.items()}
    paths = []
    for task, samples in trials.items():
        path = place / f"samples_{file_name(task)}.jsonl"
        with whole(path) as file:
            file.writelines(json.dumps(_sample(i, t)) + "\n" for i, t in enumerate(samples))
        paths.append(path)
    results = place / "results.json"
    with whole(results) as file:
        file.write(json.dumps(_results(store, group, trials), indent=1))
    return [results, *paths]


def _labels(store: Store) -> dict[tuple[str, str], str]:
    """What a task is called: by its name, unless experiments mean different things by it."""
    meanings: dict[str, set[tuple[str, str]]] = {}
    homes = set()
    for experiment, task, *meaning in store.db.execute(
        "SELECT DISTINCT experiment, task, boundary, scoring FROM trials WHERE asked"
    ):
        meanings.setdefault(task, set()).add((meaning[0], meaning[1]))
        homes.add((experiment, task))
    return {(e, task): task if len(meanings[task]) == 1 else f"{e}.{task}" for e, task in homes}


def _results(store: Store, group: Group, tasks: dict[str, list[Row]]) -> dict[str, Any]:
    model, intervention = group
    identity = (store.meta("models") or {}).get(model, {})
    figures = {task: {"alias": task, **_figures(trials)} for task, trials in tasks.items()}
    return {
        "results": figures,
        "group_subtasks": {task: [] for task in tasks},
        "configs": {task: {"task": task, "metadata": {"intervention": intervention}} for task in tasks},
        "versions": {task: store.meta("semantics_version") for task in tasks},
        "n-shot": dict.fromkeys(tasks, 0),
        "higher_is_better": {task: {_metric(n): not n.startswith("nll") for n in _names(t)} for task, t in tasks.items()},
        "n-samples": {task: {"original": len(t), "effective": len(_sound(t))} for task, t in tasks.items()},
        "config": {
            "model": "needlework",
            "model_args": {"pretrained": model, "intervention": intervention},
            **{f"{key}_sha": identity.get(key) for key in ("weights", "tokenizer")},
        },
        "failed": {task: len(t) - len(_sound(t)) for task, t in tasks.items()},
    }


def _figures(trials: list[Row]) -> dict[str, float]:
    """Means and standard errors, under lm-eval's names."""
    figures: dict[str, float] = {}
    for name in _names(trials):
        values = [t.scores[name] for t in _sound(trials) if name in t.scores]
        mean = sum(values) / len(values)
        variance = math.fsum((v - mean) ** 2 for v in values) / max(1, len(values) - 1)
        figures[f"{_metric(name)},none"] = mean
        figures[f"{_metric(name)}_stderr,none"] = math.sqrt(variance / len(values))
    return figures


def _sound(trials: list[Row]) -> list[Row]:
    return [t for t in trials if t.finish != "failed"]


def _names(trials: list[Row]) -> list[str]:
    return sorted({name for t in _sound(trials) for name in t.scores})


def _metric(name: str) -> str:
    return "acc" if name == "correct" else name


def _sample(number: int, trial: Row) -> dict[str, Any]:
    answer: Any = trial.output if trial.mode == "generate" else list(trial.logprobs)
    return {
        "doc_id": number,
        "doc": {"id": trial.sample, "cluster": trial.cluster, "seed": trial.seed, **trial.facts},
        "target": trial.target,
        "arguments": [[trial.prompt]],
        "resps": [[answer]],
        "filtered_resps": [answer],
        "doc_hash": trial.prompt_id,
        "trial_id": trial.id,
        "error": trial.error,
        **{_metric(name): value for name, value in trial.scores.items()},
    }
