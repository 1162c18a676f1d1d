"""All trials of one or more runs as plain columns, read in one pass: a million of them take a few hundred megabytes."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from needlework.store import Store

Ints = NDArray[np.int64]
KNOWLEDGE_TASKS = ("knowledge", "mmlu", "mini-mmlu", "mini_mmlu", "glue", "mini-glue", "mini_glue")
FORMS = {"cloze": "cloze", "question": "cloze", "statement": "cloze", "letter": "letter", "lookup": "lookup"}


@dataclass(frozen=True)
class Group:
    """Trials that differ in their sample only."""

    model: str
    task: str
    family: str  # retrieval | knowledge | perplexity
    mode: str  # generate | choices | perplexity
    text: str  # the intervention
    layout: str
    form: str  # of knowledge: cloze | letter | lookup; else ""
    in_window: bool
    context_tokens: float
    depth_percent: float
    chance: float


def family(task: str, mode: str, facts: dict[str, Any]) -> str:
    if mode == "perplexity":
        return "perplexity"
    return "knowledge" if facts.get("form") in FORMS or task.startswith(KNOWLEDGE_TASKS) else "retrieval"


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


@dataclass
class Frame:
    """What the figures and verdicts are computed from. Each trial counts once, however many experiments it served."""

    groups: list[Group]
    group: Ints  # per trial
    sample: Ints
    cluster: Ints
    source: Ints
    row: Ints
    scores: dict[str, NDArray[np.float32]]
    models: dict[str, dict[str, Any]]  # label -> what the store says about the model
    observations: list[tuple[str, Any]]  # label, Observation
    directories: list[Path]
    plans: list[str]
    trials: int  # rows read, repeated ones included
    failed: int

    @cached_property
    def _order(self) -> tuple[Ints, Ints]:
        order = np.argsort(self.group, kind="stable")
        return order, np.searchsorted(self.group[order], np.arange(len(self.groups) + 1))

    @cached_property
    def _codes(self) -> dict[str, tuple[dict[Any, int], Ints]]:
        coded = {}
        for name in (f.name for f in fields(Group)):
            vocabulary: dict[Any, int] = {}
            codes = [vocabulary.setdefault(getattr(g, name), len(vocabulary)) for g in self.groups]
            coded[name] = (vocabulary, np.asarray(codes, dtype=np.int64))
        return coded

    def matching(self, **wanted: Any) -> Ints:
        """Numbers of the groups whose fields have the wanted values (one, or any of a list)."""
        mask = np.ones(len(self.groups), dtype=bool)
        for name, value in wanted.items():
            vocabulary, codes = self._codes[name]
            values = value if isinstance(value, (list, tuple, set, frozenset)) else [value]
            mask &= np.isin(codes, [vocabulary[v] for v in values if v in vocabulary])
        return np.flatnonzero(mask)

    def of_groups(self, numbers: Iterable[int]) -> Ints:
        order, starts = self._order
        parts = [order[starts[g] : starts[g + 1]] for g in numbers]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)

    def rows(self, **wanted: Any) -> Ints:
        return self.of_groups(self.matching(**wanted))

    def values(self, name: str, rows: Ints) -> NDArray[np.float64]:
        column = self.scores.get(name)
        return np.full(len(rows), np.nan) if column is None else column[rows].astype(np.float64)

    def texts(self, **wanted: Any) -> list[str]:
        """The interventions found among matching trials, in the order in which they were first met."""
        return list(dict.fromkeys(self.groups[g].text for g in self.matching(**wanted)))

    def distinct(self, name: str, **wanted: Any) -> list[Any]:
        return list(dict.fromkeys(getattr(self.groups[g], name) for g in self.matching(**wanted)))

    def chance(self, rows: Ints) -> float:
        if len(rows) == 0:
            return 0.0
        per_group = np.asarray([g.chance for g in self.groups])
        return float(per_group[self.group[rows]].mean())

    def anatomy(self, model: str) -> dict[str, Any]:
        return self.models.get(model, {}).get("anatomy") or {}

    def heads(self, model: str) -> int:
        """Query heads per attention layer (the most of any layer); 0 if the model has none or the store does not say."""
        layers = self.anatomy(model).get("layers", [])
        return max((layer["attention"]["query_heads"] for layer in layers if layer.get("attention")), default=0)

    def window(self, model: str) -> int | None:
        return self.anatomy(model).get("window")


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

    def _group(self, label: str, task: str, mode: str, text: str, facts_text: str) -> int:
        facts = self.facts(facts_text)
        kind = family(task, mode, facts)
        group = Group(
            label, task, kind, mode, text, str(facts.get("layout") or "plain"),
            FORMS.get(str(facts.get("form")), "letter") if kind == "knowledge" else "", facts.get("in_window") is not False,
            _number(facts.get("length_tokens", facts.get("context_tokens"))), _number(facts.get("depth_percent")),
            float(facts.get("chance") or 0.0) if mode == "choices" else 0.0,  # nobody guesses a generated answer
        )  # fmt: skip
        return self.groups.setdefault(group, len(self.groups))

    def read(self, store: Store, source: int, labels: dict[str, str]) -> None:
        query = (
            "SELECT rowid, id, model, task, sample, cluster, seed, intervention, mode, finish, facts, scores FROM trials"
            " ORDER BY rowid"
        )
        c = self.columns
        for row, id_, model, task, sample, cluster, seed, text, mode, finish, facts, scores in store.db.execute(query):
            self.trials += 1
            if finish == "failed":
                self.failed += 1
                continue
            label = labels.get(model, model)
            c.source.append(source)
            c.row.append(row)
            c.key.append(hash((label, task, id_)))
            c.group.append(self.group_of(label, task, mode, text, facts))
            c.sample.append(self.samples.setdefault((task, sample, seed), len(self.samples)))
            c.cluster.append(self.clusters.setdefault((task, f"{seed}/{cluster}"), len(self.clusters)))
            c.score(json.loads(scores))


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
            plans.append(str(store.meta("plan") or ""))
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
