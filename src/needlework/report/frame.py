"""All trials of one or more runs as plain columns: a million of them take a few hundred megabytes."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from needlework.report.models import made_of
from needlework.report.names import shown

Ints = NDArray[np.int64]
T = TypeVar("T")


@dataclass(frozen=True)
class Group:
    """Trials that differ in their sample only: one field for everything that makes two trials unlike."""

    model: str  # its label: one for each (weights, tokenizer, dtype, window rule)
    ability: str  # retrieval | knowledge | perplexity | "" for a task that declares none
    kind: str  # of the task
    task: str  # the name that a plan gave it
    setting: str  # the task's options, as JSON, less those that are fields here
    mode: str  # generate | choices | perplexity
    against: str  # which options count in a choice: all | context | absent; else ""
    text: str  # the intervention
    boundary: str  # who owned the last prompt token: decode | prefill; "" where nothing is decoded
    layout: str
    form: str  # of knowledge: cloze | letter | lookup | judgement; else ""
    in_window: bool
    context_tokens: float
    depth_percent: float
    chance: float


class _All(Enum):
    ALL = "all"


ALL: Final = _All.ALL
Want: TypeAlias = T | Collection[T] | _All  # one value, any of several, or whatever there is
ANY_SAMPLE = {"context_tokens": ALL, "depth_percent": ALL, "chance": ALL}  # fields in which samples of one task differ


@dataclass(frozen=True, kw_only=True)
class Pick:
    """Which trials a number stands on. Every field of a Group has to be said: nothing is pooled because it was forgotten."""

    model: Want[str]
    ability: Want[str]
    kind: Want[str]
    task: Want[str]
    setting: Want[str]
    mode: Want[str]
    against: Want[str]
    text: Want[str]
    boundary: Want[str]
    layout: Want[str]
    form: Want[str]
    in_window: Want[bool]
    context_tokens: Want[float]
    depth_percent: Want[float]
    chance: Want[float]


@dataclass
class Frame:
    """What the figures and verdicts are computed from. Each trial counts once, however many experiments it served."""

    groups: list[Group]
    group: Ints  # per trial
    trial: Ints  # equal for the same answer judged alike, in whatever task or directory it stands
    sample: Ints
    cluster: Ints
    source: Ints
    row: Ints
    scores: dict[str, NDArray[np.float32]]
    models: dict[str, dict[str, Any]]  # label -> what the store says about the model
    observations: list[Watched]
    directories: list[Path]
    trials: int  # rows read, repeated ones included
    failed: int
    warnings: list[str] = field(default_factory=list)  # what a reader must know before believing anything
    notes: list[str] = field(default_factory=list)  # what was left out, and how much of it
    plans: list[tuple[str, str]] = field(default_factory=list)  # name and what it is about, of each run
    families: list[list[str]] = field(default_factory=list)  # checkpoints of one name or one anatomy, two and more
    sinks: dict[str, list[Sinks]] = field(default_factory=dict)  # by model, one for each recorded ranking

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

    def matching(self, pick: Pick) -> Ints:
        """Numbers of the groups that a pick takes."""
        return self._where(vars(pick))

    def _where(self, wanted: Mapping[str, Want[Any]]) -> Ints:
        mask = np.ones(len(self.groups), dtype=bool)
        for name, value in wanted.items():
            if not isinstance(value, _All):
                vocabulary, codes = self._codes[name]
                values = [value] if isinstance(value, (str, int, float)) else value
                mask &= np.isin(codes, [vocabulary[v] for v in values if v in vocabulary])
        return np.flatnonzero(mask)

    def of_groups(self, numbers: Iterable[int]) -> Ints:
        """The trials of these groups, each once: two tasks may have asked the same thing."""
        order, starts = self._order
        parts = [order[starts[g] : starts[g + 1]] for g in numbers]
        if not parts:
            return np.zeros(0, dtype=np.int64)
        rows = np.concatenate(parts)
        _, first = np.unique(self.trial[rows], return_index=True)
        return rows[np.sort(first)]

    def rows(self, pick: Pick) -> Ints:
        return self.of_groups(self.matching(pick))

    def values(self, name: str, rows: Ints) -> NDArray[np.float64]:
        column = self.scores.get(name)
        return np.full(len(rows), np.nan) if column is None else column[rows].astype(np.float64)

    def distinct(self, *names: str, **wanted: Want[Any]) -> list[Any]:
        """What there is to pick from: values of a field (tuples, of several fields), in the order in which they were met.

        Only to look through the trials: a number is made from `rows`, where every field has to be said.
        """
        groups = [self.groups[g] for g in self._where(wanted)]
        if len(names) == 1:
            return list(dict.fromkeys(getattr(group, names[0]) for group in groups))
        return list(dict.fromkeys(tuple(getattr(group, name) for name in names) for group in groups))

    def count(self, model: str) -> int:
        """How many trials of a model there are."""
        return int(np.isin(self.group, self._where({"model": model})).sum())

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

    def made_of(self, model: str) -> str:
        """Which kinds of layers a model has, in words; nothing where the store does not say."""
        return made_of(self.anatomy(model))

    def window(self, model: str) -> int | None:
        return self.anatomy(model).get("window")


@dataclass(frozen=True)
class Sinks:
    """How much of their attention heads gave the first token, seen while a ranking was recorded."""

    content: str  # of the ranking
    order: tuple[tuple[int, int], ...]  # (layer, head), best first
    of_head: dict[int, list[float]]  # by layer
    by_entropy: dict[int, list[float]]  # by layer: of the 1, 2, ... heads of least entropy

    def share(self, chosen: str, kept: int) -> float:
        """Mean over layers; `chosen`: "entropy", "ranking" (this one) or "random", which no other number is known for."""
        shares = []
        for layer, sinks in self.of_head.items():
            if chosen == "entropy":
                shares.append(self.by_entropy[layer][min(kept, len(sinks)) - 1])
            elif chosen == "ranking":
                best = [head for at, head in self.order if at == layer][:kept]
                shares.append(sum(sinks[head] for head in best) / len(best))
            else:
                shares.append(sum(sinks) / len(sinks))
        return sum(shares) / len(shares)


@dataclass(frozen=True)
class Watched:
    """What the heads of one model looked at in one task."""

    model: str
    task: str
    setting: str  # all of the task's options, as JSON
    mass: dict[tuple[int, int], tuple[float, int]]  # (layer, head) -> mean attention on the needle, samples

    @property
    def samples(self) -> int:
        return max(count for _, count in self.mass.values())


def differences(settings: Iterable[str]) -> dict[str, str]:
    """What tells these settings from each other, in words: `distractors 3`. Empty for a single one."""
    parsed = {setting: json.loads(setting) if setting else {} for setting in dict.fromkeys(settings)}
    names = dict.fromkeys(name for options in parsed.values() for name in options)
    unlike = [n for n in names if len({json.dumps(options.get(n), sort_keys=True) for options in parsed.values()}) > 1]
    return {setting: ", ".join(shown(f"{n} {options.get(n)}") for n in unlike) for setting, options in parsed.items()}
