"""Export a store to csv, parquet, json or result files of lm-evaluation-harness. Free of torch."""

from __future__ import annotations

import csv
import json
import math
import re
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, fields
from itertools import islice
from pathlib import Path
from typing import Any

from needlework.errors import NeedleworkError, did_you_mean
from needlework.files import atomic_path, atomic_write, file_name
from needlework.results.rows import JSON_COLUMNS, SCHEMA_VERSION, Observation, Row, column_types
from needlework.results.store import Store

_BATCH = 10_000  # rows of a parquet file that are written together
_ALL = "1 ORDER BY experiment, model, task, id"


def export(directory: Path | str, to: str, out: Path | str | None = None) -> list[Path]:
    """Write all tables of a run into `out` (default: DIR/export); return the paths of the files."""
    writers = {"csv": _csv, "parquet": _parquet, "json": _json, "lm-eval": _lm_eval}
    if to not in writers:
        raise NeedleworkError(f"cannot export to {to!r}: {did_you_mean(to, writers)}")
    folder = Path(out) if out is not None else Path(directory) / "export"
    with closing(Store(directory)) as store:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return writers[to](store, folder)
        except (OSError, sqlite3.OperationalError) as error:  # SQLite may need temporary files to sort
            raise NeedleworkError(f"cannot write the export: {error}") from None


def read_trials(store: Store, where: str = _ALL, json_text: bool = True) -> tuple[list[str], Iterator[dict[str, Any]]]:
    """Return the column names of the table of trials (those of the store, and one per score), and its rows by column.

    `where` is an SQL condition with an order. Lists and mappings are JSON text by default.
    """
    names = [f.name for f in fields(Row)]
    found = store.db.execute("SELECT DISTINCT j.key FROM trials, json_each(scores) j ORDER BY 1")
    scores = {name: "score_" + re.sub(r"\W", "_", name) for (name,) in found}

    def read() -> Iterator[dict[str, Any]]:
        for row in store.rows(where):
            values = {name: getattr(row, name) for name in names}
            if json_text:
                values |= {name: json.dumps(values[name]) for name in JSON_COLUMNS}
            yield values | {column: row.scores.get(name) for name, column in scores.items()}

    return [*names, *scores.values()], read()


def _csv(store: Store, folder: Path) -> list[Path]:
    tables = {"trials": read_trials(store)}
    tables["observations"] = [f.name for f in fields(Observation)], map(asdict, store.observations())
    for name, (columns, rows) in tables.items():
        with atomic_write(folder / f"{name}.csv") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            for row in rows:
                writer.writerow({column: _escape_formula(value) for column, value in row.items()})
    return [folder / f"{name}.csv" for name in tables]


def _escape_formula(value: Any) -> Any:
    """Put an apostrophe before text that a spreadsheet would evaluate as a formula."""
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value


def _json(store: Store, folder: Path) -> list[Path]:
    path = folder / "run.json"
    meta = {key: store.meta(key) for (key,) in store.db.execute("SELECT key FROM meta ORDER BY key").fetchall()}
    done, planned = store.progress() or (None, None)
    progress = {"done": done, "planned": planned, "finished": None if planned is None else done == planned}
    with atomic_write(path) as file:
        file.write(f'{{"schema_version": {SCHEMA_VERSION}, "progress": {json.dumps(progress)}, "meta": {json.dumps(meta)},\n')
        file.write(f'"versions": {json.dumps(store.versions())},\n"observations": ')
        file.write(json.dumps([asdict(one) for one in store.observations()]) + ',\n"trials": [')
        for i, trial in enumerate(store.rows(_ALL)):
            file.write((",\n" if i else "\n") + json.dumps(asdict(trial)))
        file.write("\n]}\n")
    return [path]


def _parquet(store: Store, folder: Path) -> list[Path]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise NeedleworkError("parquet needs pyarrow: pip install 'needlework[parquet]', or export to csv") from None
    columns, rows = read_trials(store)
    types = {"INTEGER": pa.int64(), "REAL": pa.float64(), "TEXT": pa.string()}
    declared = column_types(Row)
    kinds = {name: types[declared.get(name, "REAL")] for name in columns}  # scores follow the columns of Row
    schema = pa.schema(list(kinds.items()), metadata={"needlework_schema_version": str(SCHEMA_VERSION)})
    trials, seen = folder / "trials.parquet", folder / "observations.parquet"
    with atomic_path(trials) as half, pq.ParquetWriter(half, schema) as writer:
        while batch := list(islice(rows, _BATCH)):
            writer.write_table(pa.Table.from_pylist(batch, schema))
    observed = {f.name: [getattr(one, f.name) for one in store.observations()] for f in fields(Observation)}
    with atomic_path(seen) as half:
        pq.write_table(pa.table(observed), half)
    return [trials, seen]


def _lm_eval(store: Store, folder: Path) -> list[Path]:
    """Write results.json and samples_TASK.jsonl for each model and intervention, as `lm_eval --log_samples` does.

    Trials with equal ids count once per task. A task is labelled by its name, with the experiment where boundary or scoring
    differ between experiments.
    """
    meanings: dict[str, set[tuple[str, str]]] = {}
    for task, *meaning in store.db.execute("SELECT DISTINCT task, boundary, scoring FROM trials WHERE asked"):
        meanings.setdefault(task, set()).add((meaning[0], meaning[1]))
    written = []
    groups = store.db.execute("SELECT DISTINCT model, intervention FROM trials WHERE asked ORDER BY 1, 2").fetchall()
    for number, (model, intervention) in enumerate(groups):
        tasks: dict[str, dict[str, Row]] = {}
        where = "model = ? AND intervention = ? AND asked ORDER BY task, sample, seed, experiment"
        for trial in store.rows(where, (model, intervention)):
            label = trial.task if len(meanings[trial.task]) == 1 else f"{trial.experiment}.{trial.task}"
            tasks.setdefault(label, {}).setdefault(trial.id, trial)
        trials = {task: list(by_id.values()) for task, by_id in tasks.items()}
        samples: dict[str, list[Any]] = {}
        for task, rows in trials.items():
            for i, trial in enumerate(rows):
                answer: Any = trial.output if trial.mode == "generate" else list(trial.logprobs)
                sample = {
                    "doc_id": i,
                    "doc": {"id": trial.sample, "cluster": trial.cluster, "seed": trial.seed, **trial.facts},
                    "target": trial.target,
                    "arguments": [[trial.prompt]],
                    "resps": [[answer]],
                    "filtered_resps": [answer],
                    "doc_hash": trial.prompt_id,
                    "trial_id": trial.id,
                    "error": trial.error,
                }
                samples.setdefault(task, []).append(sample | {_metric(name): value for name, value in trial.scores.items()})
        place = folder / "lm-eval" / file_name(model) / f"{number:04d}-{file_name(intervention)}"
        written += write_files(place, _results(store, model, intervention, trials), samples)
    return written


def write_files(
    folder: Path, results: Mapping[str, Any], samples: Mapping[str, list[Any]], default: Callable[[Any], Any] | None = None
) -> list[Path]:
    """Write results.json and samples_TASK.jsonl and return their paths; `default` converts values as in `json.dumps`."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "results.json", *(folder / f"samples_{file_name(task)}.jsonl" for task in samples)]
    for path, rows in zip(paths[1:], samples.values(), strict=True):
        with atomic_write(path) as file:
            file.writelines(json.dumps(row, default=default) + "\n" for row in rows)
    with atomic_write(paths[0]) as file:
        file.write(json.dumps(results, indent=1, default=default))
    return paths


def _results(store: Store, model: str, intervention: str, tasks: dict[str, list[Row]]) -> dict[str, Any]:
    """Return the content of results.json: means and standard errors under lm-eval's metric names."""
    identity = (store.meta("models") or {}).get(model, {})
    sound = {task: [trial for trial in trials if trial.finish != "failed"] for task, trials in tasks.items()}
    names = {task: sorted({name for trial in trials for name in trial.scores}) for task, trials in sound.items()}
    figures: dict[str, dict[str, Any]] = {task: {"alias": task} for task in tasks}
    for task, trials in sound.items():
        for name in names[task]:
            values = [trial.scores[name] for trial in trials if name in trial.scores]
            mean = sum(values) / len(values)
            variance = math.fsum((value - mean) ** 2 for value in values) / max(1, len(values) - 1)
            figures[task][f"{_metric(name)},none"] = mean
            figures[task][f"{_metric(name)}_stderr,none"] = math.sqrt(variance / len(values))
    return {
        "results": figures,
        "group_subtasks": {task: [] for task in tasks},
        "configs": {task: {"task": task, "metadata": {"intervention": intervention}} for task in tasks},
        "versions": {task: store.meta("semantics_version") for task in tasks},
        "n-shot": dict.fromkeys(tasks, 0),
        "higher_is_better": {task: {_metric(n): not n.startswith("nll") for n in names[task]} for task in tasks},
        "n-samples": {task: {"original": len(tasks[task]), "effective": len(sound[task])} for task in tasks},
        "config": {
            "model": "needlework",
            "model_args": {"pretrained": model, "intervention": intervention},
            **{f"{key}_sha": identity.get(key) for key in ("weights", "tokenizer")},
        },
        "failed": {task: len(tasks[task]) - len(sound[task]) for task in tasks},
    }


def _metric(name: str) -> str:
    return "acc" if name == "correct" else name
