"""The trials of stores as columns: each row once, with its group, its sample, its cluster and its scores."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from needlework.receipts import NOTHING_TO_HIDE
from needlework.report.frame import Frame, Group, Sinks, Watched
from needlework.report.names import shown
from needlework.store import Row, Store
from needlework.tasks.scores import begins, holds

FORMS = {
    "cloze": "cloze",
    "question": "cloze",
    "statement": "cloze",
    "letter": "letter",
    "lookup": "lookup",
    "acceptability": "judgement",
    "entailment": "judgement",
    "paraphrase": "judgement",
}
# Options of a task that only say how many samples there are, or that are a field of their group.
COUNTED = ("samples", "per_subject", "rounds", "lengths", "depths", "layout", "against", "twins")
_QUERY = (
    "SELECT rowid, id, experiment, model, task, kind, ability, boundary, prompt_id, sample, cluster, seed, intervention, mode,"
    f" finish, facts, scores, scoring, asked, instr(receipt, '\"{NOTHING_TO_HIDE}') > 0,"
    " CASE WHEN intervention LIKE '%swap_memory%' THEN output ELSE '' END FROM trials ORDER BY rowid"
)


@dataclass(frozen=True)
class Options:
    """What a plan set for a task, as far as two tasks can differ in it."""

    setting: str = ""
    against: str = "all"


def options_of(experiments: Mapping[str, Any]) -> dict[tuple[str, str], Options]:
    """Per experiment and task."""
    options = {}
    for name, experiment in experiments.items():
        for task, about in experiment.get("tasks", {}).items():
            written = about.get("options", {})
            setting = {key: value for key, value in written.items() if key not in COUNTED}
            text = json.dumps(setting, sort_keys=True) if setting else ""
            options[name, task] = Options(text, str(written.get("against") or "all"))
    return options


@dataclass
class Columns:
    """Growing columns; scores that a trial lacks are NaN."""

    source: array[int] = field(default_factory=lambda: array("i"))  # which directory
    row: array[int] = field(default_factory=lambda: array("q"))  # SQLite's rowid there
    key: array[int] = field(default_factory=lambda: array("q"))  # hash of group, trial id and scoring
    trial: array[int] = field(default_factory=lambda: array("q"))  # hash of model, trial id and whether it is right
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
class Counts:
    """Rows that were read, and those that no number stands on."""

    rows: int = 0
    failed: int = 0
    not_asked: int = 0  # of an earlier version of the plan
    nothing_hidden: int = 0  # a limit that was wider than the prompt

    def notes(self) -> list[str]:
        remarks = [
            (self.failed, "trials failed and are left out."),
            (self.not_asked, "rows of an earlier version of the plan are left out."),
            (self.nothing_hidden, "trials are left out: their limit on context was wider than what there was to hide."),
        ]
        return [f"{count:,} {words}" for count, words in remarks if count]


class Trials:
    """What was read so far; groups, samples and clusters are numbered as they come."""

    def __init__(self) -> None:
        self.columns = Columns()
        self.groups: dict[Group, int] = {}
        self.samples: dict[tuple[str, str, int], int] = {}
        self.clusters: dict[tuple[str, str], int] = {}
        self.counts = Counts()
        self.facts = lru_cache(maxsize=100_000)(lambda text: json.loads(text))
        self.group_of = lru_cache(maxsize=400_000)(self._group)

    def _group(
        self,
        label: str,
        ability: str,
        kind: str,
        task: str,
        options: Options,
        mode: str,
        text: str,
        boundary: str,
        facts_text: str,
    ) -> int:
        facts = self.facts(facts_text)
        group = Group(
            model=label,
            ability=ability,
            kind=kind,
            task=shown(task),
            setting=options.setting,
            mode=mode,
            against=options.against if mode == "choices" else "",
            text=text,
            boundary=boundary,
            layout=str(facts.get("layout") or "plain"),
            form=FORMS.get(str(facts.get("form")), "") if ability == "knowledge" else "",
            in_window=facts.get("in_window") is not False,
            context_tokens=_number(facts.get("length_tokens", facts.get("context_tokens"))),
            depth_percent=_number(facts.get("depth_percent")),
            chance=_chance(facts, options.against) if mode == "choices" else 0.0,  # nobody guesses a generated answer
        )
        return self.groups.setdefault(group, len(self.groups))

    def _whose(self, output: str, facts: dict[str, Any]) -> dict[str, float]:
        """Whether an answer after a swap is the twin's; the own one is "correct"."""
        twin = str(facts.get("twin_target") or "")
        same = begins if facts.get("world") == "toy" else holds
        return {"follows_twin": float(same(output, twin))} if twin else {}

    def read(self, store: Store, source: int, label_of: dict[str, str]) -> None:
        counts, options, plain = self.counts, options_of(store.meta("experiments") or {}), Options()
        for (
            row,
            id_,
            experiment,
            model,
            task,
            kind,
            ability,
            boundary,
            prompt,
            sample,
            cluster,
            seed,
            text,
            mode,
            finish,
            facts,
            scores,
            scoring,
            asked,
            idle,
            output,
        ) in store.db.execute(_QUERY):
            counts.rows += 1
            counts.not_asked += not asked
            counts.failed += bool(asked) and finish == "failed"
            counts.nothing_hidden += bool(asked and idle) and finish != "failed"
            if not asked or idle or finish == "failed":
                continue
            label, values = label_of.get(model) or shown(model), json.loads(scores)
            group = self.group_of(label, ability, kind, task, options.get((experiment, task), plain), mode, text, boundary, facts)
            pair = ("", prompt, 0) if prompt else (task, sample, seed)  # what is paired with its baseline
            family = kind.removesuffix("_choice") or task  # tasks of one kind draw one cell's haystack alike
            if output:
                values = {**self._whose(output, self.facts(facts)), **values}
            self._add(source, row, group, (label, id_), scoring, pair, (family, f"{seed}/{cluster}"), values)

    def _add(
        self,
        source: int,
        row: int,
        group: int,
        trial: tuple[str, str],
        scoring: str,
        pair: tuple[str, str, int],
        cluster: tuple[str, str],
        values: dict[str, float],
    ) -> None:
        c = self.columns
        c.source.append(source)
        c.row.append(row)
        c.key.append(hash((group, trial[1], scoring)))
        c.trial.append(hash((*trial, values.get("correct"))))
        c.group.append(group)
        c.sample.append(self.samples.setdefault(pair, len(self.samples)))
        c.cluster.append(self.clusters.setdefault(cluster, len(self.clusters)))
        c.score(values)

    def read_planned(self, row: Row, options: Options) -> None:
        """A trial that was not asked yet, as if it had been answered right."""
        about = (row.kind, row.task, options, row.mode, row.intervention, row.boundary, json.dumps(dict(row.facts)))
        group = self.group_of(row.model, row.ability, *about)
        cluster = (row.kind.removesuffix("_choice") or row.task, f"{row.seed}/{row.cluster}")
        values = {"correct": 1.0, "follows_twin": 1.0}
        self._add(0, 0, group, (row.model, row.id), row.scoring, ("", row.prompt_id, 0), cluster, values)


def frame_of(
    read: Trials,
    models: dict[str, dict[str, Any]],
    watched: list[Watched],
    directories: list[Path],
    warnings: list[str],
    notes: list[str],
    sinks: dict[str, list[Sinks]],
) -> Frame:
    columns = read.columns
    keys = np.asarray(columns.key, dtype=np.int64)
    _, first = np.unique(keys, return_index=True)
    first.sort()
    scores = {}
    for name, column in columns.scores.items():
        filled = np.full(len(keys), np.nan, dtype=np.float32)
        filled[: len(column)] = np.asarray(column, dtype=np.float32)
        scores[name] = filled[first]
    names = ("group", "trial", "sample", "cluster", "source", "row")
    picked = {name: np.asarray(getattr(columns, name), dtype=np.int64)[first] for name in names}
    return Frame(
        groups=list(read.groups),
        scores=scores,
        models=models,
        observations=watched,
        directories=directories,
        trials=read.counts.rows,
        failed=read.counts.failed,
        warnings=warnings,
        notes=notes,
        plans=[],
        families=[],
        sinks=sinks,
        **picked,
    )


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else -1.0


def _chance(facts: dict[str, Any], against: str) -> float:
    """A choice among fewer options has another chance."""
    return float(facts.get("chance" if against == "all" else f"chance_{against}") or facts.get("chance") or 0.0)
