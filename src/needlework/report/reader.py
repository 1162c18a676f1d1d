"""Reads the stores of runs into a Frame, in one pass over their rows."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from needlework.report.frame import Frame, Group
from needlework.store import Store
from needlework.tasks.scores import begins, holds

KNOWLEDGE_TASKS = ("cloze", "letter", "judgements", "knowledge", "mmlu", "glue", "mini-", "mini_")
FORMS = {
    "cloze": "cloze", "question": "cloze", "statement": "cloze", "letter": "letter", "lookup": "lookup",
    "acceptability": "judgement", "entailment": "judgement", "paraphrase": "judgement",
}  # fmt: skip
_QUERY = (
    "SELECT rowid, id, experiment, model, task, prompt_id, sample, cluster, seed, intervention, mode, finish, facts, scores,"
    " CASE WHEN intervention LIKE '%swap_memory%' THEN output ELSE '' END FROM trials ORDER BY rowid"
)


def family(task: str, mode: str, facts: dict[str, Any]) -> str:
    """Retrieval asks for what stands in the prompt, knowledge for what does not."""
    if mode == "perplexity":
        return "perplexity"
    known = task.startswith(KNOWLEDGE_TASKS) or ("subject" in facts and facts.get("form") in FORMS)
    return "knowledge" if known else "retrieval"


@dataclass
class Columns:
    """Growing columns; scores that a trial lacks are NaN."""

    source: array[int] = field(default_factory=lambda: array("i"))  # which directory
    row: array[int] = field(default_factory=lambda: array("q"))  # SQLite's rowid there
    key: array[int] = field(default_factory=lambda: array("q"))  # hash of (model, task, trial id)
    group: array[int] = field(default_factory=lambda: array("i"))
    sample: array[int] = field(default_factory=lambda: array("i"))
    cluster: array[int] = field(default_factory=lambda: array("i"))
    scores: dict[str, array[float]] = field(default_factory=dict)

    def score(self, values: dict[str, float]) -> None:
        at = len(self.row) - 1
        for name, value in values.items():
            column = self.scores.setdefault(name, array("f"))
            if len(column) < at:
                column.extend([math.nan] * (at - len(column)))
            column.append(math.nan if value is None else value)


class _Reader:
    def __init__(self) -> None:
        self.columns = Columns()
        self.groups: dict[Group, int] = {}
        self.samples: dict[tuple[str, str, int], int] = {}
        self.clusters: dict[tuple[str, str], int] = {}
        self.failed = 0
        self.trials = 0
        self.facts = lru_cache(maxsize=100_000)(lambda text: json.loads(text))
        self.group_of = lru_cache(maxsize=400_000)(self._group)

    def _group(self, label: str, task: str, mode: str, text: str, facts_text: str, against: str) -> int:
        facts = self.facts(facts_text)
        kind = family(task, mode, facts)
        group = Group(
            label, task, kind, mode, text, str(facts.get("layout") or "plain"),
            _form(task, facts) if kind == "knowledge" else "", facts.get("in_window") is not False,
            _number(facts.get("length_tokens", facts.get("context_tokens"))), _number(facts.get("depth_percent")),
            _chance(facts, against) if mode == "choices" else 0.0,  # nobody guesses a generated answer
        )  # fmt: skip
        return self.groups.setdefault(group, len(self.groups))

    def _whose(self, output: str, facts: dict[str, Any]) -> dict[str, float]:
        """Whether an answer after a swap is the twin's; the own one is "correct"."""
        twin = str(facts.get("twin_target") or "")
        same = begins if facts.get("world") == "toy" else holds
        return {"follows_twin": float(same(output, twin))} if twin else {}

    def read(self, store: Store, source: int, labels: dict[str, str]) -> None:
        c, against = self.columns, _against(store)
        found = store.db.execute(_QUERY)
        for row, id_, where, model, task, prompt, sample, cluster, seed, text, mode, finish, facts, scores, said in found:
            self.trials += 1
            if finish == "failed":
                self.failed += 1
                continue
            label = labels.get(model, model)
            c.source.append(source)
            c.row.append(row)
            c.key.append(hash((label, task, id_)))
            c.group.append(self.group_of(label, task, mode, text, facts, against.get((where, task), "all")))
            same = (task, prompt, 0) if prompt else (task, sample, seed)  # what is paired with its baseline
            c.sample.append(self.samples.setdefault(same, len(self.samples)))
            c.cluster.append(self.clusters.setdefault((task, f"{seed}/{cluster}"), len(self.clusters)))
            own = json.loads(scores)
            c.score(own if not said else {**self._whose(said, self.facts(facts)), **own})


def load(directories: Sequence[Path]) -> Frame:
    """Read the stores of these directories, side by side."""
    reader = _Reader()
    models: dict[str, dict[str, Any]] = {}
    observations: list[tuple[str, Any]] = []
    plans = []
    for source, directory in enumerate(directories):
        store = Store(directory)
        try:
            known = store.meta("models") or {}
            labels = _labels(known, models, directory)
            models.update({labels[name]: about for name, about in known.items()})
            plans.append(_plan_name(store.meta("plan")))
            reader.read(store, source, labels)
            observations += [(labels.get(o.model, o.model), o) for o in store.observations()]
        finally:
            store.close()
    for group in reader.groups:
        models.setdefault(group.model, {})
    return _frame(reader, models, observations, list(directories), plans)


def _labels(found: dict[str, Any], known: dict[str, dict[str, Any]], directory: Path) -> dict[str, str]:
    """A model keeps its name, unless another directory has other weights under the same name."""
    clash = {name for name, about in found.items() if name in known and known[name].get("weights") != about.get("weights")}
    return {name: f"{name} ({directory.name})" if name in clash else name for name in found}


def _frame(
    reader: _Reader, models: dict[str, dict[str, Any]], observations: list[tuple[str, Any]], directories: list[Path],
    plans: list[str],
) -> Frame:  # fmt: skip
    columns = reader.columns
    keys = np.asarray(columns.key, dtype=np.int64)
    _, first = np.unique(keys, return_index=True)
    first.sort()
    scores = {}
    for name, column in columns.scores.items():
        filled = np.full(len(keys), np.nan, dtype=np.float32)
        filled[: len(column)] = np.asarray(column, dtype=np.float32)
        scores[name] = filled[first]
    names = ("group", "sample", "cluster", "source", "row")
    picked = {name: np.asarray(getattr(columns, name), dtype=np.int64)[first] for name in names}
    return Frame(
        groups=list(reader.groups), scores=scores, models=models, observations=observations, directories=directories,
        plans=plans, trials=reader.trials, failed=reader.failed, **picked,
    )  # fmt: skip


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else -1.0


def _plan_name(plan: Any) -> str:
    return str(plan.get("name", "")) if isinstance(plan, dict) else str(plan or "")


def _form(task: str, facts: dict[str, Any]) -> str:
    return FORMS.get(str(facts.get("form")), "judgement" if "glue" in task else "letter")


def _against(store: Store) -> dict[tuple[str, str], str]:
    """Which options count, per experiment and task: a choice among fewer has another chance."""
    experiments = store.meta("experiments") or {}
    return {
        (name, task): str(about.get("options", {}).get("against", "all"))
        for name, experiment in experiments.items()
        for task, about in experiment.get("tasks", {}).items()
    }


def _chance(facts: dict[str, Any], against: str) -> float:
    return float(facts.get("chance" if against == "all" else f"chance_{against}") or facts.get("chance") or 0.0)
