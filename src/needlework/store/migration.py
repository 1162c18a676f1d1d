"""Stores of version 1 are brought to version 2: the new columns are read from what the store says of its plan."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from needlework.store.rows import LM_EVAL, Recording, digest

# The tasks that came with version 1. A task of one's own is judged by no rule until `needlework run` has seen its row again.
_ABILITIES = {
    **dict.fromkeys(("niah", "mqar", "phone_book", "copy", "ruler"), "retrieval"),
    **dict.fromkeys(("niah_choice", "mqar_choice", "phone_book_choice", "copy_choice", "ruler_choice"), "retrieval"),
    **dict.fromkeys(("cloze", "cloze_choice", "letter", "letter_lookup", "judgements"), "knowledge"),
    "perplexity": "perplexity",
}
_LM_EVAL_ABILITIES = {"choices": "knowledge", "perplexity": "perplexity"}
_NEW = ("kind", "ability", "boundary", "scoring", "greedy", "asked")


def migrate(db: sqlite3.Connection, columns: Sequence[str]) -> None:
    """Version 1 to version 2, all of it or nothing. `columns` are the definitions of version 2's columns of `trials`.

    `scoring` stays empty, so that all scores are computed again. Version 1 kept no note of which rows its plan still
    asked for: `migrated_from` says so until `needlework run` has marked them.
    """
    with db:
        db.execute("BEGIN IMMEDIATE")
        if _meta(db, "schema_version") != 1:  # another process was faster
            return
        for column in columns:
            name, kind = column.split()[:2]
            if name in _NEW:
                default = {"greedy": "'[]'", "asked": "1"}.get(name, "''")
                db.execute(f"ALTER TABLE trials ADD COLUMN {name} {kind} NOT NULL DEFAULT {default}")
        experiments = _meta(db, "experiments") or {}
        changed = list(_described(db, experiments))
        db.executemany("UPDATE trials SET kind = ?, ability = ?, boundary = ?, greedy = ?, asked = ? WHERE rowid = ?", changed)
        recorded = [[*recording, content] for recording, content in _recordings(db).items()]
        for key, value in {"schema_version": 2, "scores_version": 1, "migrated_from": 1, "recorded": recorded}.items():
            db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, json.dumps(value)))


def _meta(db: sqlite3.Connection, key: str) -> Any:
    row = db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    return None if row is None else json.loads(row[0])


def _described(db: sqlite3.Connection, experiments: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    names = "rowid, experiment, model, task, seed, mode, facts, scores"
    for row, name, model, task, seed, mode, facts, scores in db.execute(f"SELECT {names} FROM trials"):
        experiment = experiments.get(name, {})
        tasks = experiment.get("tasks", {})
        if any(task_of_plan["kind"] == LM_EVAL for task_of_plan in tasks.values()):
            kind, ability, boundary, asked = LM_EVAL, _LM_EVAL_ABILITIES.get(mode, ""), "decode", True
        else:
            kind, boundary = tasks.get(task, {}).get("kind", ""), experiment.get("boundary", "")
            ability = _ABILITIES.get(kind, "")
            asked = bool(kind) and model in experiment["models"] and seed in experiment["seeds"]
        greedy = _greedy(json.loads(facts), json.loads(scores))
        yield kind, ability, boundary if mode == "generate" else "", json.dumps(greedy), int(asked), row


def _greedy(facts: Mapping[str, Any], scores: Mapping[str, float]) -> list[bool]:
    """Which options the model would have said, as far as version 1 tells: the right one, and then none beside it."""
    if "greedy" in facts:  # lm-eval's rows have them all
        return [bool(said) for said in facts["greedy"]]
    right, texts = facts.get("answer_option"), facts.get("options", [])
    if scores.get("top1") != 1 or right is None or not texts:
        return []
    said = texts[right]
    if any(i != right and (text.startswith(said) or said.startswith(text)) for i, text in enumerate(texts)):
        return []  # who says one of these may have begun the other
    return [i == right for i in range(len(texts))]


def _recordings(db: sqlite3.Connection) -> dict[Recording, str]:
    """Of which samples the recordings are, where that is sure: as many as there are rows of the untouched model.

    Version 1 never took a row away. So if a plan had ever asked this task for other samples, there would be more rows.
    """
    counts = db.execute("SELECT DISTINCT experiment, model, task, samples FROM observations").fetchall()
    recorded = {}
    for *where, samples in counts:
        plain = "SELECT id FROM trials WHERE experiment = ? AND model = ? AND task = ? AND intervention = 'none'"
        ids = [trial for (trial,) in db.execute(plain, where)]
        if len(ids) == samples:
            recorded[where[0], where[1], where[2]] = digest(ids)
    return recorded
