"""Read the stores of runs into a Frame in one pass: which rows count, and which stored models are the same.

Every row that counts gets a group (everything but the sample), a sample (to pair it with its baseline) and a cluster (for
the bootstrap).
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from needlework.analysis.frame import KINDS, Frame, HeadObservations, Pick, Sinks, architecture_class
from needlework.errors import NeedleworkError
from needlework.interventions import Ranking
from needlework.results import LM_EVAL, SEMANTICS_VERSION, Row, Store
from needlework.results.rows import NOTHING_HIDDEN
from needlework.tasks.base import SCORES_VERSION, begins, holds
from needlework.terminal import display_name

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
# Task options that are not part of a group's `setting`: they only set the number of samples, or are fields of Pick.
NOT_IN_SETTING = ("samples", "per_subject", "rounds", "lengths", "depths", "layout", "against", "twins")
IDENTITY = ("weights", "tokenizer", "dtype", "window_rule")  # two models that agree in these give the same outputs
_COLUMNS = ("source", "row", "key", "trial", "group", "sample", "cluster")  # of Frame.data, and the key of duplicates
_CHUNK = 50_000  # rows read at once
_COUNTS = (
    "SELECT count(*), total(asked AND finish = 'failed'), total(NOT asked),"
    f" total(asked AND {NOTHING_HIDDEN} AND finish != 'failed') FROM trials"
)
_ROWS = (
    "SELECT rowid AS row, id, experiment, model, task, kind, ability, boundary, prompt_id, sample, cluster, seed, intervention,"
    " mode, facts, scores, scoring, CASE WHEN intervention LIKE '%swap_memory%' THEN output ELSE '' END AS output FROM trials"
    f" WHERE asked AND finish != 'failed' AND NOT {NOTHING_HIDDEN} ORDER BY rowid"
)
Options = dict[tuple[str, str], tuple[str, str]]


def options_of(experiments: Mapping[str, Any]) -> Options:
    """Return (experiment, task) -> (setting: JSON of its options, which options a forced choice is scored against)."""
    options = {}
    for name, experiment in experiments.items():
        for task, about in experiment.get("tasks", {}).items():
            written = about.get("options", {})
            setting = {key: value for key, value in written.items() if key not in NOT_IN_SETTING}
            text = json.dumps(setting, sort_keys=True) if setting else ""
            options[name, task] = (text, str(written.get("against") or "all"))
    return options


class TrialReader:
    """Turns rows into a Frame's columns; groups, samples and clusters are numbered in order of first appearance."""

    def __init__(self) -> None:
        self.chunks: list[pd.DataFrame] = []
        self.groups: dict[tuple[Any, ...], int] = {}
        self.samples: dict[tuple[str, str, int], int] = {}
        self.clusters: dict[tuple[str, str], int] = {}
        self.facts = lru_cache(maxsize=100_000)(lambda text: json.loads(text))
        self.group_of = lru_cache(maxsize=400_000)(self._group)

    def _group(self, model: str, ability: str, kind: str, task: str, of_task: tuple[str, str], mode: str, *rest: str) -> int:
        """Return the number of a trial's group, adding the group if it is new."""
        text, boundary, facts_text = rest
        facts, (setting, against) = self.facts(facts_text), of_task
        numbers = (facts.get("length_tokens", facts.get("context_tokens")), facts.get("depth_percent"))
        context_tokens, depth_percent = (float(x) if isinstance(x, (int, float)) else -1.0 for x in numbers)
        chance = facts.get("chance" if against == "all" else f"chance_{against}") or facts.get("chance") or 0.0
        group = {
            "model": model,
            "ability": ability,
            "kind": kind,
            "task": display_name(task),
            "setting": setting,
            "mode": mode,
            "against": against if mode == "choices" else "",
            "text": text,
            "boundary": boundary,
            "layout": str(facts.get("layout") or "plain"),
            "form": FORMS.get(str(facts.get("form")), "") if ability == "knowledge" else "",
            "in_window": facts.get("in_window") is not False,
            "context_tokens": context_tokens,
            "depth_percent": depth_percent,
            "chance": float(chance) if mode == "choices" else 0.0,  # generated answers have no chance level
        }
        return self.groups.setdefault(tuple(group.values()), len(self.groups))

    def read(self, rows: Iterable[Any], options: Options, label_of: Mapping[str, str], source: int = 0) -> None:
        """Add rows, given as mappings from the names in `_ROWS`."""
        columns, scores = [], []
        for r in rows:
            label, task, values = label_of.get(r["model"]) or display_name(r["model"]), r["task"], json.loads(r["scores"])
            of_task = options.get((r["experiment"], task), ("", "all"))
            about = (of_task, r["mode"], r["intervention"], r["boundary"], r["facts"])
            group = self.group_of(label, r["ability"], r["kind"], task, *about)
            # pairs a trial with its baseline
            pair = ("", r["prompt_id"], 0) if r["prompt_id"] else (task, r["sample"], r["seed"])
            # tasks of one kind share haystacks, so they share clusters
            cluster = (r["kind"].removesuffix("_choice") or task, f"{r['seed']}/{r['cluster']}")
            if r["output"]:  # after swap_memory: is it the twin prompt's answer? ("correct" scores the prompt's own)
                facts = self.facts(r["facts"])
                if twin := str(facts.get("twin_target") or ""):
                    same = begins if facts.get("world") == "toy" else holds
                    values = {"follows_twin": float(same(r["output"], twin)), **values}
            columns.append(
                (
                    source,
                    r["row"],
                    hash((group, r["id"], r["scoring"])),  # repeated keys are dropped
                    hash((label, r["id"], values.get("correct"))),
                    group,
                    self.samples.setdefault(pair, len(self.samples)),
                    self.clusters.setdefault(cluster, len(self.clusters)),
                )
            )
            scores.append(values)
        made = pd.DataFrame(np.array(columns, dtype=np.int64).reshape(-1, len(_COLUMNS)), columns=_COLUMNS)
        self.chunks.append(pd.concat([made, pd.DataFrame(scores, index=made.index, dtype="float32")], axis=1))

    def read_store(self, store: Store, source: int, label_of: Mapping[str, str]) -> None:
        """Add the rows of a store, except failed ones, rows outside the plan and limits that hid nothing."""
        options = options_of(store.meta("experiments") or {})
        cursor = store.db.execute(_ROWS)
        cursor.row_factory = sqlite3.Row
        while rows := cursor.fetchmany(_CHUNK):
            self.read(rows, options, label_of, source)

    def frame(self, models: dict[str, dict[str, Any]]) -> Frame:
        """Return a Frame of the trials read, keeping the first row of each key."""
        data = pd.concat([pd.DataFrame(columns=_COLUMNS, dtype=np.int64), *self.chunks], ignore_index=True)
        groups = pd.DataFrame(list(self.groups), columns=[f.name for f in fields(Pick)])
        return Frame(data.drop_duplicates("key", ignore_index=True).drop(columns="key"), groups, models)


def planned(rows: Iterable[Row], models: dict[str, dict[str, Any]], experiments: Mapping[str, Any]) -> Frame:
    """Return the Frame of a plan's trials as if all were run and correct: tells the n of each number before a run."""
    reader, scores = TrialReader(), json.dumps({"correct": 1.0, "follows_twin": 1.0})
    known = ({**vars(row), "row": 0, "output": "", "scores": scores, "facts": json.dumps(dict(row.facts))} for row in rows)
    reader.read(known, options_of(experiments), {model: model for model in models})
    return reader.frame(models)


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
    reader, counts = TrialReader(), np.zeros(4, dtype=int)
    watched: list[HeadObservations] = []
    added: dict[str, list[dict[str, Any]]] = {}
    sinks: dict[str, list[Sinks]] = {}
    with ExitStack() as stack:
        stores = [opened(directory) for directory in directories]
        for store in stores:
            stack.callback(store.close)
        warnings = _versions(stores)
        seen = [StoredModel(s.directory, name, about) for s in stores for name, about in (s.meta("models") or {}).items()]
        labels, merged = label_models(seen)
        models: dict[str, dict[str, Any]] = {}
        for label, model in zip(labels, seen, strict=True):
            models.setdefault(label, model.about)
        written = [plan if isinstance(plan := store.meta("plan"), dict) else {} for store in stores]
        plans = [(display_name(str(p.get("name") or "")), str(p.get("about") or "")[:LONGEST_ABOUT]) for p in written]
        for source, store in enumerate(stores):
            label_of = {m.name: label for m, label in zip(seen, labels, strict=True) if m.directory == store.directory}
            reader.read_store(store, source, label_of)
            counts += np.array(store.db.execute(_COUNTS).fetchone(), dtype=int)
            watched += _watched(store, label_of)
            for _, name, _, rows in store.meta("layers") or []:
                label = label_of.get(name) or display_name(name)
                if rows and rows[0]["tokens"] > added.get(label, [{"tokens": 0}])[0]["tokens"]:
                    added[label] = rows
            for name, rankings in (store.meta("rankings") or {}).items():
                of_model = sinks.setdefault(label_of.get(name) or display_name(name), [])
                of_model += [_sinks(content, ranking) for content, ranking in rankings.items() if ranking["sinks"]]
    for name, *_ in reader.groups:
        models.setdefault(name, {})
    warnings += [model.failed_laws for model in seen if model.failed_laws]
    related = families(seen, labels)
    frame = reader.frame(in_order(models, related))
    frame.trials, frame.failed, not_asked, nothing_hidden = counts.tolist()
    remarks = {
        "trials failed and are left out.": frame.failed,
        "rows of an earlier version of the plan are left out.": not_asked,
        "trials are left out: a part of their intervention had nothing to hide.": nothing_hidden,
    }
    frame.notes = [f"{count:,} {words}" for words, count in remarks.items() if count] + merged
    frame.directories, frame.observations, frame.sinks = list(directories), watched, sinks
    frame.layers = added
    frame.warnings, frame.plans = list(dict.fromkeys(warnings)), [plan for plan in dict.fromkeys(plans) if any(plan)]
    frame.families = [[label for label in frame.models if label in family] for family in related]
    return frame


def _versions(stores: Sequence[Store]) -> list[str]:
    """Return warnings about old versions and unfinished runs; raise NeedleworkError if semantics versions are mixed."""
    version_of = {str(store.directory): store.meta("semantics_version") for store in stores}
    if len(set(version_of.values())) > 1:
        versions = ", ".join(f"{directory}: {version or 'unknown'}" for directory, version in version_of.items())
        raise NeedleworkError(
            f"these runs are of different semantics versions ({versions}): the same words mean different things in them;"
            " report them one by one, or run the older plan again into a new directory"
        )
    warnings = [
        f"{directory} is of semantics version {version or 'unknown'}, this needlework of version {SEMANTICS_VERSION}:"
        " its answers may mean something else than this page says; run its plan again into a new directory."
        for directory, version in version_of.items()
        if version != SEMANTICS_VERSION
    ]
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


def _watched(store: Store, label_of: Mapping[str, str]) -> list[HeadObservations]:
    """Return the observed attention per model, task and setting; of several experiments, the one with the most samples."""
    experiments = store.meta("experiments") or {}
    most: dict[tuple[str, str, str], HeadObservations] = {}
    by_task: dict[tuple[str, str, str], dict[tuple[int, int], tuple[float, int]]] = {}
    for o in store.observations():
        by_task.setdefault((o.experiment, o.model, o.task), {})[o.layer, o.head] = (o.needle_mass, o.samples)
    for (experiment, model, task), mass in by_task.items():
        options = experiments.get(experiment, {}).get("tasks", {}).get(task, {}).get("options", {})
        setting = json.dumps(options, sort_keys=True)
        watched = HeadObservations(label_of.get(model) or display_name(model), display_name(task), setting, mass)
        place = (watched.model, task, setting)
        if place not in most or most[place].samples < watched.samples:
            most[place] = watched
    return list(most.values())


def _sinks(content: str, ranking: dict[str, Any]) -> Sinks:
    """Parse the attention on the first token that a store recorded with a ranking."""
    order = tuple((head.layer, head.index) for head in Ranking.parse(ranking["order"]).order)
    by_layer = [{int(layer): values for layer, values in ranking[key].items()} for key in ("sinks", "sinks_by_entropy")]
    return Sinks(content, order, *by_layer)


@dataclass(frozen=True)
class StoredModel:
    """A model as recorded in one run's store."""

    directory: Path
    name: str
    about: dict[str, Any]

    @property
    def identity(self) -> tuple[str, ...]:
        """Values of IDENTITY; if the store lacks them, a model equals only itself in the same directory."""
        if not self.about.get("weights"):
            return ("unknown", str(self.directory.resolve()), self.name)
        return tuple(str(self.about.get(key)) for key in IDENTITY)

    @property
    def failed_laws(self) -> str:
        """A warning if the model failed checks of `needlework doctor`, else ""."""
        failed = [check["law"] for check in (self.about.get("checkup") or {}).get("checks", ()) if check["outcome"] == "fail"]
        words = f"{self.name}: the doctor found that laws fail ({', '.join(failed)}): believe no number of this model."
        return words if failed else ""


def label_models(seen: Sequence[StoredModel]) -> tuple[list[str], list[str]]:
    """Return one label per model, equal for equal identities only, and a note for each model that appears under two names."""
    first: dict[tuple[str, ...], StoredModel] = {}
    for model in seen:
        first.setdefault(model.identity, model)
    label: dict[tuple[str, ...], str] = {}
    for name in dict.fromkeys(model.name for model in first.values()):
        same_name = [model for model in first.values() if model.name == name]
        for model, text in zip(same_name, _told_apart(display_name(name), same_name), strict=True):
            while text in label.values():  # the name of another model
                text += "*"
            label[model.identity] = text
    pairs = dict.fromkeys((display_name(model.name), display_name(first[model.identity].name)) for model in seen)
    notes = [
        f"{name} is the same model as {other} (weights, tokenizer, dtype and window rule): shown as one, as {other}."
        for name, other in pairs
        if name != other
    ]
    return [label[model.identity] for model in seen], notes


def _told_apart(name: str, models: Sequence[StoredModel]) -> list[str]:
    """Return labels for models of the same name, distinguished by dtype or window rule, else by run or model path."""
    if len(models) == 1:
        return [name]
    for fact, words in (("dtype", "{}"), ("window_rule", "window: {}")):
        values = [str(model.about.get(fact)) for model in models]
        if len(set(values)) == len(values):
            return [f"{name} ({words.format(value)})" for value in values]
    runs = [model.directory.resolve().parts for model in models]
    sources = [Path(str(model.about.get("source", ""))).parts for model in models]
    for paths in (runs, sources):
        for count in range(1, max(map(len, paths)) + 1):  # the shortest ends that are all different
            ends = ["/".join(path[-count:]) for path in paths]
            if len(set(ends)) == len(ends):
                return [name, *(f"{name} ({end})" for end in ends[1:])]
    return [f"{name} ({i})" for i in range(1, len(models) + 1)]


def families(seen: Sequence[StoredModel], labels: Sequence[str]) -> list[list[str]]:
    """Group the labels of models to compare: those with the same name or the same layers. Single models are left out."""
    groups: list[tuple[set[str], list[str]]] = []
    for model, label in zip(seen, labels, strict=True):
        anatomy = model.about.get("anatomy")
        traits = {f"name {model.name}"} | ({f"made {anatomy.get('architecture')} {anatomy.get('layers')}"} if anatomy else set())
        same = [group for group in groups if group[0] & traits]
        joined = [name for group in same for name in group[1]]
        groups = [group for group in groups if group not in same]
        groups.append((traits.union(*(group[0] for group in same)), list(dict.fromkeys([*joined, label]))))
    return [names for _, names in groups if len(names) > 1]


def in_order(models: dict[str, dict[str, Any]], related: Sequence[Sequence[str]]) -> dict[str, dict[str, Any]]:
    """Sort models: hybrids before controls, checkpoints of one family together, else in order of appearance."""
    at = {label: i for i, label in enumerate(models)}
    first = {label: min(at[other] for other in family) for family in related for label in family}
    rank = {label: KINDS.index(architecture_class(about.get("anatomy") or {})) for label, about in models.items()}
    return dict(sorted(models.items(), key=lambda item: (rank[item[0]], first.get(item[0], at[item[0]]), at[item[0]])))
