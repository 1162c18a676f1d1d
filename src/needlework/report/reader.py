"""Reads the stores of runs into a Frame, in one pass over their rows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from needlework.errors import NeedleworkError
from needlework.interventions import Ranking
from needlework.report.columns import Trials, frame_of, options_of
from needlework.report.frame import Frame, Sinks, Watched
from needlework.report.models import Seen, ailing, families, in_order, labels, renamed
from needlework.report.names import shown
from needlework.store import LM_EVAL, SEMANTICS_VERSION, Row, Store
from needlework.tasks.scores import SCORES_VERSION

LONGEST_ABOUT = 600


def opened(directory: Path) -> Store:
    """A run's store, of which broken text is read as far as it can be: one bad byte must not hide a whole run."""
    store = Store(directory)
    store.db.text_factory = lambda data: data.decode("utf-8", "replace")
    return store


def load(directories: Sequence[Path]) -> Frame:
    """Read the stores of these directories, side by side."""
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
        plans = [(shown(str(p.get("name") or "")), str(p.get("about") or "")[:LONGEST_ABOUT]) for p in map(_plan, stores)]
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
                watched_for = {content: ranking for content, ranking in rankings.items() if ranking["sinks"]}  # a file's are not
                of_model = sinks.setdefault(label_of.get(name) or shown(name), [])
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
    """What a report would read if every one of these trials were answered, and right: which number would stand on how many."""
    reader, options = Trials(), options_of(experiments)
    for row in rows:
        reader.read_planned(row, options[row.experiment, row.task])
    return frame_of(reader, models, [], [], [], [], {})


def _versions(stores: Sequence[Store]) -> list[str]:
    """Refuse stores that mean different things by the same words; warn of what is not of this version."""
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
    """One for each task and setting; of several experiments that recorded the same one, that with the most samples."""
    experiments = store.meta("experiments") or {}
    most: dict[tuple[str, str, str], Watched] = {}
    by_task: dict[tuple[str, str, str], dict[tuple[int, int], tuple[float, int]]] = {}
    for o in store.observations():
        by_task.setdefault((o.experiment, o.model, o.task), {})[o.layer, o.head] = (o.needle_mass, o.samples)
    for (experiment, model, task), mass in by_task.items():
        options = experiments.get(experiment, {}).get("tasks", {}).get(task, {}).get("options", {})
        watched = Watched(label_of.get(model) or shown(model), shown(task), json.dumps(options, sort_keys=True), mass)
        place = (watched.model, task, watched.setting)
        if place not in most or most[place].samples < watched.samples:
            most[place] = watched
    return list(most.values())


def _sinks(content: str, ranking: dict[str, Any]) -> Sinks:
    order = tuple((head.layer, head.index) for head in Ranking.parse(ranking["order"]).order)
    by_layer = [{int(layer): values for layer, values in ranking[key].items()} for key in ("sinks", "sinks_by_entropy")]
    return Sinks(content, order, *by_layer)
