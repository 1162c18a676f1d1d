"""Read the stores of runs into a Frame in one pass, and decide which rows count.

Every row that counts gets a group (everything but the sample), a sample (to pair it with its baseline) and a cluster (for
the bootstrap).
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from needlework.analysis.frame import Frame, Group, Sinks, Watched
from needlework.analysis.models import Seen, ailing, display_name, families, in_order, labels, renamed
from needlework.errors import NeedleworkError
from needlework.interventions import Ranking
from needlework.receipts import NOTHING_TO_HIDE
from needlework.results import LM_EVAL, SEMANTICS_VERSION, Row, Store
from needlework.tasks.scores import SCORES_VERSION, begins, holds

LONGEST_ABOUT = 600
FORMS = {  # a task's form of question -> the form under which reports pool it
    "cloze": "cloze",
    "question": "cloze",
    "statement": "cloze",
    "letter": "letter",
    "lookup": "lookup",
    "acceptability": "judgement",
    "entailment": "judgement",
    "paraphrase": "judgement",
}
# Task options that are not part of a group's `setting`: they only set the number of samples, or are fields of Group.
COUNTED = ("samples", "per_subject", "rounds", "lengths", "depths", "layout", "against", "twins")
_QUERY = (
    "SELECT rowid, id, experiment, model, task, kind, ability, boundary, prompt_id, sample, cluster, seed, intervention, mode,"
    f" finish, facts, scores, scoring, asked, instr(receipt, '\"{NOTHING_TO_HIDE}') > 0,"
    " CASE WHEN intervention LIKE '%swap_memory%' THEN output ELSE '' END FROM trials ORDER BY rowid"
)


@dataclass(frozen=True)
class Options:
    """Options of a task in the plan that separate groups of trials."""

    setting: str = ""  # JSON of the options that are not in COUNTED
    against: str = "all"  # which options a forced choice is scored against: all | context | absent


def options_of(experiments: Mapping[str, Any]) -> dict[tuple[str, str], Options]:
    """Return the options of each (experiment, task) of a store's metadata."""
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
    """Growing columns with one entry per trial; missing scores are NaN."""

    source: array[int] = field(default_factory=lambda: array("i"))  # index of the run's directory
    row: array[int] = field(default_factory=lambda: array("q"))  # SQLite rowid in that store
    key: array[int] = field(default_factory=lambda: array("q"))  # hash of group, trial id and scoring; repeated keys are dropped
    trial: array[int] = field(default_factory=lambda: array("q"))  # hash of model, trial id and score "correct"
    group: array[int] = field(default_factory=lambda: array("i"))
    sample: array[int] = field(default_factory=lambda: array("i"))
    cluster: array[int] = field(default_factory=lambda: array("i"))
    scores: dict[str, array[float]] = field(default_factory=dict)

    def score(self, values: dict[str, float]) -> None:
        """Set the scores of the last trial; pads columns that earlier trials did not fill."""
        at = len(self.row) - 1
        for name, value in values.items():
            column = self.scores.setdefault(name, array("f"))
            if len(column) < at:
                column.extend([math.nan] * (at - len(column)))
            column.append(math.nan if value is None else value)


@dataclass
class Counts:
    """Number of rows read, and of rows left out by reason."""

    rows: int = 0
    failed: int = 0
    not_asked: int = 0  # not in the current version of the plan
    nothing_hidden: int = 0  # the context limit was wider than the prompt, so the intervention did nothing

    def notes(self) -> list[str]:
        remarks = [
            (self.failed, "trials failed and are left out."),
            (self.not_asked, "rows of an earlier version of the plan are left out."),
            (self.nothing_hidden, "trials are left out: their limit on context was wider than what there was to hide."),
        ]
        return [f"{count:,} {words}" for count, words in remarks if count]


class Trials:
    """Trials read so far; groups, samples and clusters are numbered in order of first appearance."""

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
        """Return the number of a trial's group, adding the group if it is new."""
        facts = self.facts(facts_text)
        group = Group(
            model=label,
            ability=ability,
            kind=kind,
            task=display_name(task),
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
            chance=_chance(facts, options.against) if mode == "choices" else 0.0,  # generated answers have no chance level
        )
        return self.groups.setdefault(group, len(self.groups))

    def _whose(self, output: str, facts: dict[str, Any]) -> dict[str, float]:
        """Score whether an output after `swap_memory` is the twin prompt's answer ("correct" scores the prompt's own)."""
        twin = str(facts.get("twin_target") or "")
        same = begins if facts.get("world") == "toy" else holds
        return {"follows_twin": float(same(output, twin))} if twin else {}

    def read(self, store: Store, source: int, label_of: dict[str, str]) -> None:
        """Add the rows of a store, except failed ones, rows outside the plan and limits that hid nothing."""
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
            label, values = label_of.get(model) or display_name(model), json.loads(scores)
            group = self.group_of(label, ability, kind, task, options.get((experiment, task), plain), mode, text, boundary, facts)
            pair = ("", prompt, 0) if prompt else (task, sample, seed)  # pairs a trial with its baseline
            family = kind.removesuffix("_choice") or task  # tasks of one kind share haystacks, so they share clusters
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
        """Add a trial that was not run yet, as if its answer were correct."""
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
    """Build a Frame of the trials read, keeping the first row of each key."""
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
    """Return a number as float, -1 for anything else."""
    return float(value) if isinstance(value, (int, float)) else -1.0


def _chance(facts: dict[str, Any], against: str) -> float:
    """Return the chance level of a forced choice; it depends on which options are scored against."""
    return float(facts.get("chance" if against == "all" else f"chance_{against}") or facts.get("chance") or 0.0)


def opened(directory: Path) -> Store:
    """Open a run's store; invalid UTF-8 is replaced, so that one bad byte does not make a run unreadable."""
    store = Store(directory)
    store.db.text_factory = lambda data: data.decode("utf-8", "replace")
    return store


def load(directories: Sequence[Path]) -> Frame:
    """Read the stores of one or more runs into one Frame.

    Models with the same weights, tokenizer, dtype and window rule share a label across runs.

    Raises:
        NeedleworkError: The runs have different semantics versions.
    """
    reader = Trials()
    with ExitStack() as stack:
        stores = []
        for directory in directories:
            stores.append(opened(directory))
            stack.callback(stores[-1].close)
        warnings = _versions(stores)
        seen = [[Seen(s.directory, name, about) for name, about in (s.meta("models") or {}).items()] for s in stores]
        all_seen = [model for of_store in seen for model in of_store]
        all_labels = labels(all_seen)
        label_at = dict(zip(((model.directory, model.name) for model in all_seen), all_labels, strict=True))
        plans = [(display_name(str(p.get("name") or "")), str(p.get("about") or "")[:LONGEST_ABOUT]) for p in map(_plan, stores)]
        models: dict[str, dict[str, Any]] = {}
        watched: list[Watched] = []
        sinks: dict[str, list[Sinks]] = {}
        for source, (store, of_store) in enumerate(zip(stores, seen, strict=True)):
            label_of = {model.name: label_at[model.directory, model.name] for model in of_store}
            for model in of_store:
                models.setdefault(label_of[model.name], model.about)
            reader.read(store, source, label_of)
            watched += _watched(store, label_of)
            for name, rankings in (store.meta("rankings") or {}).items():
                watched_for = {content: ranking for content, ranking in rankings.items() if ranking["sinks"]}  # files have none
                of_model = sinks.setdefault(label_of.get(name) or display_name(name), [])
                of_model.extend(map(_sinks, watched_for, watched_for.values()))
    for group in reader.groups:
        models.setdefault(group.model, {})
    warnings += ailing(all_seen)
    related = families(all_seen, all_labels)
    notes = [*reader.counts.notes(), *renamed(all_seen)]
    frame = frame_of(reader, in_order(models, related), watched, list(directories), warnings, notes, sinks)
    frame.plans = [plan for plan in dict.fromkeys(plans) if any(plan)]
    frame.families = [[label for label in frame.models if label in family] for family in related]
    return frame


def _plan(store: Store) -> dict[str, Any]:
    plan = store.meta("plan")
    return plan if isinstance(plan, dict) else {}


def planned(rows: Iterable[Row], models: dict[str, dict[str, Any]], experiments: Mapping[str, Any]) -> Frame:
    """Return the Frame of a plan's trials as if all were run and correct: tells the n of each number before a run."""
    reader, options = Trials(), options_of(experiments)
    for row in rows:
        reader.read_planned(row, options[row.experiment, row.task])
    return frame_of(reader, models, [], [], [], [], {})


def _versions(stores: Sequence[Store]) -> list[str]:
    """Return warnings about old versions and unfinished runs; raise NeedleworkError if semantics versions are mixed."""
    version_of = {str(store.directory): store.meta("semantics_version") for store in stores}
    if len(set(version_of.values())) > 1:
        versions = ", ".join(f"{directory}: {version or 'unknown'}" for directory, version in version_of.items())
        raise NeedleworkError(
            f"these runs are of different semantics versions ({versions}): the same words mean different things in them;"
            " report them one by one, or run the older plan again into a new directory"
        )
    warnings = []
    for directory, version in version_of.items():
        if version != SEMANTICS_VERSION:
            warnings.append(
                f"{directory} is of semantics version {version or 'unknown'}, this needlework of version {SEMANTICS_VERSION}:"
                " its answers may mean something else than this page says; run its plan again into a new directory."
            )
    for store in stores:
        done, planned = store.progress() or (0, 0)
        if done < planned:
            warnings.append(
                f"{store.directory} is not finished: {done:,} of {planned:,} trials are done; `needlework run` goes on with it."
            )
        version = store.meta("scores_version")
        ours = "SELECT 1 FROM trials WHERE kind != ? LIMIT 1"
        if version != SCORES_VERSION and store.db.execute(ours, (LM_EVAL,)).fetchone():
            warnings.append(
                f"scores of a newer version in {store.directory}: use the needlework that made them."
                if isinstance(version, int) and version > SCORES_VERSION
                else f"scores of an older version: needlework rescore {store.directory}"
            )
    return warnings


def _watched(store: Store, label_of: dict[str, str]) -> list[Watched]:
    """Return the observed attention per model, task and setting; of several experiments, the one with the most samples."""
    experiments = store.meta("experiments") or {}
    most: dict[tuple[str, str, str], Watched] = {}
    by_task: dict[tuple[str, str, str], dict[tuple[int, int], tuple[float, int]]] = {}
    for o in store.observations():
        by_task.setdefault((o.experiment, o.model, o.task), {})[o.layer, o.head] = (o.needle_mass, o.samples)
    for (experiment, model, task), mass in by_task.items():
        options = experiments.get(experiment, {}).get("tasks", {}).get(task, {}).get("options", {})
        watched = Watched(
            label_of.get(model) or display_name(model), display_name(task), json.dumps(options, sort_keys=True), mass
        )
        place = (watched.model, task, watched.setting)
        if place not in most or most[place].samples < watched.samples:
            most[place] = watched
    return list(most.values())


def _sinks(content: str, ranking: dict[str, Any]) -> Sinks:
    """Parse the attention on the first token that a store recorded with a ranking."""
    order = tuple((head.layer, head.index) for head in Ranking.parse(ranking["order"]).order)
    by_layer = [{int(layer): values for layer, values in ranking[key].items()} for key in ("sinks", "sinks_by_entropy")]
    return Sinks(content, order, *by_layer)
