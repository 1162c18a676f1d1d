"""Export a store to csv, parquet, json or result files of lm-evaluation-harness. Free of torch."""

from __future__ import annotations

import csv
import json
import math
import re
import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from needlework.errors import NeedleworkError, did_you_mean
from needlework.files import atomic_path, atomic_write, file_name
from needlework.results.rows import JSON_COLUMNS, SCHEMA_VERSION, WHOLE_COLUMNS, Observation, Row
from needlework.results.store import Store

_BATCH = 10_000


def export(directory: Path | str, to: str, out: Path | str | None = None) -> list[Path]:
    """Write all tables of a run into `out` (default: DIR/export); return the paths of the files."""
    writers: dict[str, Callable[[Store, Path], list[Path]]] = {
        "csv": _csv,
        "parquet": _parquet,
        "json": _json,
        "lm-eval": _lm_eval,
    }
    if to not in writers:
        raise NeedleworkError(f"cannot export to {to!r}: {did_you_mean(to, writers)}")
    store = Store(directory)
    try:
        folder = Path(out) if out is not None else Path(directory) / "export"
        folder.mkdir(parents=True, exist_ok=True)
        return writers[to](store, folder)
    except (OSError, sqlite3.OperationalError) as error:  # SQLite may need temporary files to sort
        raise NeedleworkError(f"cannot write the export: {error}") from None
    finally:
        store.close()


def score_column(name: str) -> str:
    return "score_" + re.sub(r"\W", "_", name)


def values(row: Row, scores: list[str]) -> dict[str, Any]:
    """Return the columns of a trial, with one more column per score."""
    own = {f.name: getattr(row, f.name) for f in fields(Row)}
    return own | {score_column(name): row.scores.get(name) for name in scores}


def flat(row: Row, scores: list[str]) -> dict[str, Any]:
    """Return the columns of a trial for a file: lists and mappings as JSON text."""
    return {name: json.dumps(value) if name in JSON_COLUMNS else value for name, value in values(row, scores).items()}


def trial_columns(store: Store) -> tuple[list[str], list[str]]:
    """Return all column names (score columns last), and the names of the scores."""
    scores = store.score_names()
    return [f.name for f in fields(Row)] + [score_column(name) for name in scores], scores


def _csv(store: Store, folder: Path) -> list[Path]:
    columns, scores = trial_columns(store)
    trials, seen = folder / "trials.csv", folder / "observations.csv"
    with atomic_write(trials) as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(_harmless(flat(trial, scores)) for trial in store.rows("1 ORDER BY experiment, model, task, id"))
    with atomic_write(seen) as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Observation)])
        writer.writeheader()
        writer.writerows(_harmless(asdict(one)) for one in store.observations())
    return [trials, seen]


def _harmless(row: dict[str, Any]) -> dict[str, Any]:
    """Put an apostrophe before text that a spreadsheet would evaluate as a formula."""
    formula = ("=", "+", "-", "@", "\t", "\r")
    return {name: f"'{value}" if isinstance(value, str) and value.startswith(formula) else value for name, value in row.items()}


def _json(store: Store, folder: Path) -> list[Path]:
    path = folder / "run.json"
    meta = {key: store.meta(key) for (key,) in store.db.execute("SELECT key FROM meta ORDER BY key").fetchall()}
    done, planned = store.progress() or (None, None)
    progress = {"done": done, "planned": planned, "finished": None if planned is None else done == planned}
    with atomic_write(path) as file:
        file.write(f'{{"schema_version": {SCHEMA_VERSION}, "progress": {json.dumps(progress)}, "meta": {json.dumps(meta)},\n')
        file.write(f'"versions": {json.dumps(store.versions())},\n"observations": ')
        file.write(json.dumps([asdict(one) for one in store.observations()]) + ',\n"trials": [')
        for i, trial in enumerate(store.rows("1 ORDER BY experiment, model, task, id")):
            file.write((",\n" if i else "\n") + json.dumps(asdict(trial)))
        file.write("\n]}\n")
    return [path]


def _parquet(store: Store, folder: Path) -> list[Path]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise NeedleworkError("parquet needs pyarrow: pip install 'needlework[parquet]', or export to csv") from None
    columns, scores = trial_columns(store)
    kinds = {name: pa.int64() if name in WHOLE_COLUMNS else pa.string() for name in columns}
    kinds |= {name: pa.float64() for name in ("seconds", *map(score_column, scores))}
    schema = pa.schema(list(kinds.items()), metadata={"needlework_schema_version": str(SCHEMA_VERSION)})
    trials, seen = folder / "trials.parquet", folder / "observations.parquet"
    with atomic_path(trials) as half, pq.ParquetWriter(half, schema) as writer:
        batch: list[dict[str, Any]] = []
        for trial in store.rows("1 ORDER BY experiment, model, task, id"):
            batch.append(flat(trial, scores))
            if len(batch) >= _BATCH:
                writer.write_table(pa.Table.from_pylist(batch, schema))
                batch = []
        writer.write_table(pa.Table.from_pylist(batch, schema))
    observed = {f.name: [getattr(one, f.name) for one in store.observations()] for f in fields(Observation)}
    with atomic_path(seen) as half:
        pq.write_table(pa.table(observed), half)
    return [trials, seen]


# The result files of lm-evaluation-harness: one directory per model and intervention, as `lm_eval --log_samples` writes.

Group = tuple[str, str]  # model, intervention


def _lm_eval(store: Store, folder: Path) -> list[Path]:
    """Write results.json and samples_TASK.jsonl for each model and intervention; trials with equal ids count once per task."""
    written = []
    labels = _labels(store)
    groups = store.db.execute("SELECT DISTINCT model, intervention FROM trials WHERE asked ORDER BY 1, 2").fetchall()
    for number, (model, intervention) in enumerate(groups):
        place = folder / "lm-eval" / file_name(model) / f"{number:04d}-{file_name(intervention)}"
        written += _group(store, place, (model, intervention), labels)
    return written


def _group(store: Store, place: Path, group: Group, labels: Mapping[tuple[str, str], str]) -> list[Path]:
    """Write the files of one model under one intervention."""
    tasks: dict[str, dict[str, Row]] = {}
    where = "model = ? AND intervention = ? AND asked ORDER BY task, sample, seed, experiment"
    for trial in store.rows(where, group):
        tasks.setdefault(labels[trial.experiment, trial.task], {}).setdefault(trial.id, trial)
    trials = {task: list(by_id.values()) for task, by_id in tasks.items()}
    samples = {task: [_sample(i, trial) for i, trial in enumerate(rows)] for task, rows in trials.items()}
    return write_files(place, _results(store, group, trials), samples)


def write_files(
    folder: Path, results: Mapping[str, Any], samples: Mapping[str, list[Any]], default: Callable[[Any], Any] | None = None
) -> list[Path]:
    """Write results.json and samples_TASK.jsonl and return their paths.

    Args:
        default: Converts values that JSON has no type for, as in `json.dumps`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "results.json", *(folder / f"samples_{file_name(task)}.jsonl" for task in samples)]
    for path, rows in zip(paths[1:], samples.values(), strict=True):
        with atomic_write(path) as file:
            file.writelines(json.dumps(row, default=default) + "\n" for row in rows)
    with atomic_write(paths[0]) as file:
        file.write(json.dumps(results, indent=1, default=default))
    return paths


def _labels(store: Store) -> dict[tuple[str, str], str]:
    """Return the label of each (experiment, task): the task's name, with the experiment if boundary or scoring differ."""
    meanings: dict[str, set[tuple[str, str]]] = {}
    homes = set()
    for experiment, task, *meaning in store.db.execute(
        "SELECT DISTINCT experiment, task, boundary, scoring FROM trials WHERE asked"
    ):
        meanings.setdefault(task, set()).add((meaning[0], meaning[1]))
        homes.add((experiment, task))
    return {(e, task): task if len(meanings[task]) == 1 else f"{e}.{task}" for e, task in homes}


def _results(store: Store, group: Group, tasks: dict[str, list[Row]]) -> dict[str, Any]:
    """Return the content of results.json."""
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
    """Return means and standard errors under lm-eval's metric names."""
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
