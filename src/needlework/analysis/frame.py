"""All trials of one or more runs as two data frames, so that a million trials take a few hundred megabytes."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from needlework.terminal import display_name

Ints = NDArray[np.int64]
T = TypeVar("T")


class _All(Enum):
    ALL = "all"


ALL: Final = _All.ALL
Want: TypeAlias = T | Collection[T] | _All  # one value, any of several, or ALL (no restriction)
ANY_SAMPLE = {"context_tokens": ALL, "depth_percent": ALL, "chance": ALL}  # fields that vary between samples of one task
KINDS = ("hybrid", "attention only", "recurrent only", "")  # order in reports: subjects of the claims, then controls


@dataclass(frozen=True, kw_only=True)
class Pick:
    """A selection of trials by everything in which two trials can differ except the sample.

    Trials with equal values in all fields are a group. Every field is required, so that nothing is pooled by omission.
    """

    model: Want[str]  # label, unique per (weights, tokenizer, dtype, window rule)
    ability: Want[str]  # retrieval | knowledge | perplexity | "" for a task that declares none
    kind: Want[str]  # kind of task
    task: Want[str]  # name of the task in the plan
    setting: Want[str]  # JSON of the task's options, without those that are fields here
    mode: Want[str]  # generate | choices | perplexity
    against: Want[str]  # options that a forced choice is scored against: all | context | absent; "" in other modes
    text: Want[str]  # the intervention
    boundary: Want[str]  # phase of the last prompt token: decode | prefill; "" where nothing is decoded
    layout: Want[str]  # plain | jrt (prompt repeated) | question_first
    form: Want[str]  # knowledge only: cloze | letter | lookup | judgement; else ""
    in_window: Want[bool]  # the needle is inside the attention window
    context_tokens: Want[float]  # -1 if unknown
    depth_percent: Want[float]  # -1 if unknown
    chance: Want[float]  # of a forced choice; 0 in other modes


@dataclass(frozen=True)
class Sinks:
    """Attention on the first token (attention sink), recorded together with a ranking of heads."""

    content: str  # key of the ranking
    order: tuple[tuple[int, int], ...]  # (layer, head), best first
    of_head: dict[int, list[float]]  # layer -> share of each head
    by_entropy: dict[int, list[float]]  # layer -> share of the 1, 2, ... heads with the lowest entropy

    def share(self, chosen: str, kept: int) -> float:
        """Return the share of the kept heads' attention on the first token, averaged over layers.

        `kept` heads per layer are chosen by "entropy", by "ranking" (this one) or at "random" (the mean over all heads).
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
class HeadObservations:
    """Observed attention of one model's heads in one task."""

    model: str
    task: str
    setting: str  # JSON of all the task's options
    mass: dict[tuple[int, int], tuple[float, int]]  # (layer, head) -> (mean attention on the needle, number of samples)

    @property
    def samples(self) -> int:
        return max(count for _, count in self.mass.values())


@dataclass
class Frame:
    """The trials that figures and verdicts are computed from, duplicates removed, and what is known of their models.

    Attributes:
        data: One row per trial. `group`: row of `groups`. `trial`: hash, equal for one trial with the same score, whatever
            its task or directory. `sample`: equal for trials on the same prompt, to pair them. `cluster`: samples of one
            haystack or fact, resampled together. `source`: index into `directories`. `row`: SQLite rowid in that directory's
            store. All other columns are scores, NaN where missing.
        groups: One row per group of trials; the columns are the fields of Pick.
    """

    data: pd.DataFrame
    groups: pd.DataFrame
    models: dict[str, dict[str, Any]]  # label -> the store's metadata of the model
    trials: int = 0  # rows read, including duplicates and rows left out
    failed: int = 0
    directories: list[Path] = field(default_factory=list)
    observations: list[HeadObservations] = field(default_factory=list)
    layers: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # model -> what its layers add, of most tokens
    warnings: list[str] = field(default_factory=list)  # reasons to distrust the numbers
    notes: list[str] = field(default_factory=list)  # rows left out and models merged
    plans: list[tuple[str, str]] = field(default_factory=list)  # (name, description) of each run's plan
    families: list[list[str]] = field(default_factory=list)  # labels of models to compare; see reader.families
    sinks: dict[str, list[Sinks]] = field(default_factory=dict)  # by model, one for each recorded ranking

    @cached_property
    def _order(self) -> tuple[Ints, Ints]:
        """Trials sorted by group [trials], and where each group starts in that order [groups + 1]."""
        group = self.data["group"].to_numpy()
        order = np.argsort(group, kind="stable")
        return order, np.searchsorted(group[order], np.arange(len(self.groups) + 1))

    @cached_property
    def _codes(self) -> dict[str, tuple[dict[Any, int], Ints]]:
        """Per field of Pick: its values as codes (value -> code), and the code of each group [groups]."""
        coded = {}
        for name, column in self.groups.items():
            codes, known = pd.factorize(column)
            coded[str(name)] = ({value: code for code, value in enumerate(known.tolist())}, codes)
        return coded

    def matching(self, wanted: Pick | Mapping[str, Want[Any]]) -> Ints:
        """Return the rows of `groups` that a pick selects; a mapping need not name every field."""
        mask = np.ones(len(self.groups), dtype=bool)
        for name, value in (vars(wanted) if isinstance(wanted, Pick) else wanted).items():
            if not isinstance(value, _All):
                vocabulary, codes = self._codes[name]
                values = [value] if isinstance(value, (str, int, float)) else value
                mask &= np.isin(codes, [vocabulary[v] for v in values if v in vocabulary])
        return np.flatnonzero(mask)

    def of_groups(self, numbers: Iterable[int]) -> Ints:
        """Return the indices of these groups' trials, each trial once: two tasks may contain the same trial."""
        order, starts = self._order
        rows = np.concatenate([order[:0], *(order[starts[g] : starts[g + 1]] for g in numbers)])
        _, first = np.unique(self.column("trial", rows), return_index=True)
        return rows[np.sort(first)]

    def rows(self, pick: Pick) -> Ints:
        """Return the indices of the trials that a pick selects, each trial once."""
        return self.of_groups(self.matching(pick))

    def column(self, name: str, rows: Ints) -> Ints:
        """Return a column of `data` other than a score for these trials."""
        found: Ints = self.data[name].to_numpy()[rows]
        return found

    def values(self, score: str, rows: Ints) -> NDArray[np.float64]:
        """Return a score of these trials, NaN where it is missing."""
        if score not in self.data:
            return np.full(len(rows), np.nan)
        found: NDArray[np.float64] = self.data[score].to_numpy()[rows].astype(np.float64)
        return found

    def distinct(self, *names: str, **wanted: Want[Any]) -> list[Any]:
        """Return the distinct values of a field of Pick (tuples for several fields) in order of first appearance.

        For browsing only: numbers are computed from `rows`, whose Pick names every field.
        """
        chosen = self.matching(wanted)
        codes = dict.fromkeys(zip(*(self._codes[name][1][chosen].tolist() for name in names), strict=True))
        known = [list(self._codes[name][0]) for name in names]
        values = [tuple(of_field[code] for of_field, code in zip(known, group, strict=True)) for group in codes]
        return values if len(names) > 1 else [value for (value,) in values]

    def chance(self, rows: Ints) -> float:
        """Return the mean chance level of these trials."""
        return float(self.groups["chance"].to_numpy()[self.column("group", rows)].mean()) if len(rows) else 0.0

    def anatomy(self, model: str) -> dict[str, Any]:
        return self.models.get(model, {}).get("anatomy") or {}

    def heads(self, model: str) -> int:
        """Return the number of query heads per attention layer (the maximum over layers); 0 if none or unknown."""
        layers = self.anatomy(model).get("layers", [])
        return max((layer["attention"]["query_heads"] for layer in layers if layer.get("attention")), default=0)


def architecture_class(anatomy: dict[str, Any]) -> str:
    """Return the composition of a model by its layers, one of KINDS; "" if unknown."""
    attention, recurrent = (any(layer.get(part) for layer in anatomy.get("layers", [])) for part in ("attention", "recurrent"))
    return KINDS[0] if attention and recurrent else KINDS[1] if attention else KINDS[2] if recurrent else KINDS[3]


def differences(settings: Iterable[str]) -> dict[str, str]:
    """Return for each setting the options in which it differs from the others (`distractors 3`); "" for a single one."""
    parsed = {setting: json.loads(setting) if setting else {} for setting in dict.fromkeys(settings)}
    names = dict.fromkeys(name for options in parsed.values() for name in options)
    unlike = [n for n in names if len({json.dumps(options.get(n), sort_keys=True) for options in parsed.values()}) > 1]
    return {setting: ", ".join(display_name(f"{n} {options.get(n)}") for n in unlike) for setting, options in parsed.items()}
