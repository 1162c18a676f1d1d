"""A store as files that other tools read: csv, parquet, json, or result files of lm-evaluation-harness. Free of torch."""

from __future__ import annotations

import csv
import json
import re
import sqlite3
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from needlework.errors import NeedleworkError, did_you_mean
from needlework.experiments import lm_eval_export
from needlework.files import beside, whole
from needlework.store import JSON_COLUMNS, SCHEMA_VERSION, WHOLE_COLUMNS, Observation, Row, Store

_BATCH = 10_000


def export(directory: Path | str, to: str, out: Path | str | None = None) -> list[Path]:
    """Write all tables of a run into `out` (by default DIR/export); the files that were written."""
    writers: dict[str, Callable[[Store, Path], list[Path]]] = {
        "csv": _csv,
        "parquet": _parquet,
        "json": _json,
        "lm-eval": lm_eval_export.write,
    }
    if to not in writers:
        raise NeedleworkError(f"cannot export to {to!r}: {did_you_mean(to, writers)}")
    store = Store(directory)
    try:
        folder = Path(out) if out is not None else Path(directory) / "export"
        folder.mkdir(parents=True, exist_ok=True)
        return writers[to](store, folder)
    except (OSError, sqlite3.OperationalError) as error:  # SQLite sorts in files of its own
        raise NeedleworkError(f"cannot write the export: {error}") from None
    finally:
        store.close()


def score_column(name: str) -> str:
    return "score_" + re.sub(r"\W", "_", name)


def values(row: Row, scores: list[str]) -> dict[str, Any]:
    """One trial by column, each score in a column of its own."""
    own = {f.name: getattr(row, f.name) for f in fields(Row)}
    return own | {score_column(name): row.scores.get(name) for name in scores}


def flat(row: Row, scores: list[str]) -> dict[str, Any]:
    """The same for a file: what has parts of its own as JSON text."""
    return {name: json.dumps(value) if name in JSON_COLUMNS else value for name, value in values(row, scores).items()}


def trial_columns(store: Store) -> tuple[list[str], list[str]]:
    """All columns of a trial, and the names of the scores that stand at their end."""
    scores = store.score_names()
    return [f.name for f in fields(Row)] + [score_column(name) for name in scores], scores


def _csv(store: Store, folder: Path) -> list[Path]:
    columns, scores = trial_columns(store)
    trials, seen = folder / "trials.csv", folder / "observations.csv"
    with whole(trials) as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(flat(trial, scores) for trial in store.rows("1 ORDER BY experiment, model, task, id"))
    with whole(seen) as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Observation)])
        writer.writeheader()
        writer.writerows(asdict(one) for one in store.observations())
    return [trials, seen]


def _json(store: Store, folder: Path) -> list[Path]:
    path = folder / "run.json"
    meta = {key: json.loads(value) for key, value in store.db.execute("SELECT key, value FROM meta ORDER BY key")}
    with whole(path) as file:
        file.write(f'{{"schema_version": {SCHEMA_VERSION}, "meta": {json.dumps(meta)},\n')
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
    with beside(trials) as half, pq.ParquetWriter(half, schema) as writer:
        batch: list[dict[str, Any]] = []
        for trial in store.rows("1 ORDER BY experiment, model, task, id"):
            batch.append(flat(trial, scores))
            if len(batch) >= _BATCH:
                writer.write_table(pa.Table.from_pylist(batch, schema))
                batch = []
        writer.write_table(pa.Table.from_pylist(batch, schema))
    observed = {f.name: [getattr(one, f.name) for one in store.observations()] for f in fields(Observation)}
    with beside(seen) as half:
        pq.write_table(pa.table(observed), half)
    return [trials, seen]
