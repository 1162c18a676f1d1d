"""All trials of one or more runs as NumPy columns, so that a million trials take a few hundred megabytes."""

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

from needlework.analysis.models import display_name, made_of

Ints = NDArray[np.int64]
T = TypeVar("T")


@dataclass(frozen=True)
class Group:
    """Everything in which two trials can differ except the sample; trials with equal fields are one group."""

    model: str  # label, unique per (weights, tokenizer, dtype, window rule)
    ability: str  # retrieval | knowledge | perplexity | "" for a task that declares none
    kind: str  # kind of task
    task: str  # name of the task in the plan
    setting: str  # JSON of the task's options, without those that are fields here
    mode: str  # generate | choices | perplexity
    against: str  # options that a forced choice is scored against: all | context | absent; "" in other modes
    text: str  # the intervention
    boundary: str  # phase of the last prompt token: decode | prefill; "" where nothing is decoded
    layout: str  # plain | jrt (prompt repeated) | question_first
    form: str  # knowledge only: cloze | letter | lookup | judgement; else ""
    in_window: bool  # the needle is inside the attention window
    context_tokens: float  # -1 if unknown
    depth_percent: float  # -1 if unknown
    chance: float  # of a forced choice; 0 in other modes


class _All(Enum):
    ALL = "all"


ALL: Final = _All.ALL
Want: TypeAlias = T | Collection[T] | _All  # one value, any of several, or ALL (no restriction)
ANY_SAMPLE = {"context_tokens": ALL, "depth_percent": ALL, "chance": ALL}  # fields that vary between samples of one task


@dataclass(frozen=True, kw_only=True)
class Pick:
    """A selection of groups. Every field of Group is required, so that nothing is pooled by omission."""

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
    """The trials that figures and verdicts are computed from: columns with one entry per trial, duplicates removed."""

    groups: list[Group]
    group: Ints  # [trials] index into groups
    trial: Ints  # [trials] hash; equal for one trial with the same score, whatever its task or directory
    sample: Ints  # [trials] equal for trials on the same prompt, to pair them
    cluster: Ints  # [trials] samples of one haystack or fact, resampled together
    source: Ints  # [trials] index into directories
    row: Ints  # [trials] SQLite rowid in that directory's store
    scores: dict[str, NDArray[np.float32]]  # name -> [trials], NaN where missing
    models: dict[str, dict[str, Any]]  # label -> the store's metadata of the model
    observations: list[Watched]
    directories: list[Path]
    trials: int  # rows read, including duplicates and rows left out
    failed: int
    warnings: list[str] = field(default_factory=list)  # reasons to distrust the numbers
    notes: list[str] = field(default_factory=list)  # rows left out and models merged
    plans: list[tuple[str, str]] = field(default_factory=list)  # (name, description) of each run's plan
    families: list[list[str]] = field(default_factory=list)  # labels of models to compare; see models.families
    sinks: dict[str, list[Sinks]] = field(default_factory=dict)  # by model, one for each recorded ranking

    @cached_property
    def _order(self) -> tuple[Ints, Ints]:
        """Trials sorted by group [trials], and where each group starts in that order [groups + 1]."""
        order = np.argsort(self.group, kind="stable")
        return order, np.searchsorted(self.group[order], np.arange(len(self.groups) + 1))

    @cached_property
    def _codes(self) -> dict[str, tuple[dict[Any, int], Ints]]:
        """Per field of Group: its values as codes (value -> code), and the code of each group [groups]."""
        coded = {}
        for name in (f.name for f in fields(Group)):
            vocabulary: dict[Any, int] = {}
            codes = [vocabulary.setdefault(getattr(g, name), len(vocabulary)) for g in self.groups]
            coded[name] = (vocabulary, np.asarray(codes, dtype=np.int64))
        return coded

    def matching(self, pick: Pick) -> Ints:
        """Return the indices of the groups that a pick selects."""
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
        """Return the indices of these groups' trials, each trial once: two tasks may contain the same trial."""
        order, starts = self._order
        parts = [order[starts[g] : starts[g + 1]] for g in numbers]
        if not parts:
            return np.zeros(0, dtype=np.int64)
        rows = np.concatenate(parts)
        _, first = np.unique(self.trial[rows], return_index=True)
        return rows[np.sort(first)]

    def rows(self, pick: Pick) -> Ints:
        """Return the indices of the trials that a pick selects, each trial once."""
        return self.of_groups(self.matching(pick))

    def values(self, name: str, rows: Ints) -> NDArray[np.float64]:
        """Return a score of these trials, NaN where it is missing."""
        column = self.scores.get(name)
        return np.full(len(rows), np.nan) if column is None else column[rows].astype(np.float64)

    def distinct(self, *names: str, **wanted: Want[Any]) -> list[Any]:
        """Return the distinct values of a field of Group (tuples for several fields) in order of first appearance.

        For browsing only: numbers are computed from `rows`, whose Pick names every field.
        """
        groups = [self.groups[g] for g in self._where(wanted)]
        if len(names) == 1:
            return list(dict.fromkeys(getattr(group, names[0]) for group in groups))
        return list(dict.fromkeys(tuple(getattr(group, name) for name in names) for group in groups))

    def count(self, model: str) -> int:
        """Return the number of trials of a model."""
        return int(np.isin(self.group, self._where({"model": model})).sum())

    def chance(self, rows: Ints) -> float:
        """Return the mean chance level of these trials."""
        if len(rows) == 0:
            return 0.0
        per_group = np.asarray([g.chance for g in self.groups])
        return float(per_group[self.group[rows]].mean())

    def anatomy(self, model: str) -> dict[str, Any]:
        return self.models.get(model, {}).get("anatomy") or {}

    def heads(self, model: str) -> int:
        """Return the number of query heads per attention layer (the maximum over layers); 0 if none or unknown."""
        layers = self.anatomy(model).get("layers", [])
        return max((layer["attention"]["query_heads"] for layer in layers if layer.get("attention")), default=0)

    def made_of(self, model: str) -> str:
        """Return the model's composition: hybrid, attention only, recurrent only, or "" if unknown."""
        return made_of(self.anatomy(model))

    def window(self, model: str) -> int | None:
        return self.anatomy(model).get("window")


@dataclass(frozen=True)
class Sinks:
    """Attention on the first token (attention sink), recorded together with a ranking of heads."""

    content: str  # key of the ranking
    order: tuple[tuple[int, int], ...]  # (layer, head), best first
    of_head: dict[int, list[float]]  # layer -> share of each head
    by_entropy: dict[int, list[float]]  # layer -> share of the 1, 2, ... heads with the lowest entropy

    def share(self, chosen: str, kept: int) -> float:
        """Return the share of the kept heads' attention on the first token, averaged over layers.

        Args:
            chosen: How heads are selected: "entropy", "ranking" (this one) or "random" (the mean over all heads).
            kept: Number of heads kept per layer.
        """
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
    """Observed attention of one model's heads in one task."""

    model: str
    task: str
    setting: str  # JSON of all the task's options
    mass: dict[tuple[int, int], tuple[float, int]]  # (layer, head) -> (mean attention on the needle, number of samples)

    @property
    def samples(self) -> int:
        return max(count for _, count in self.mass.values())


def differences(settings: Iterable[str]) -> dict[str, str]:
    """Return for each setting the options in which it differs from the others (`distractors 3`); "" for a single one."""
    parsed = {setting: json.loads(setting) if setting else {} for setting in dict.fromkeys(settings)}
    names = dict.fromkeys(name for options in parsed.values() for name in options)
    unlike = [n for n in names if len({json.dumps(options.get(n), sort_keys=True) for options in parsed.values()}) > 1]
    return {setting: ", ".join(display_name(f"{n} {options.get(n)}") for n in unlike) for setting, options in parsed.items()}
