"""All trials of one or more runs as plain columns: a million of them take a few hundred megabytes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]



@dataclass(frozen=True)
class Group:
    """Trials that differ in their sample only."""

    model: str
    task: str
    family: str  # retrieval | knowledge | perplexity
    mode: str  # generate | choices | perplexity
    text: str  # the intervention
    layout: str
    form: str  # of knowledge: cloze | letter | lookup | judgement; else ""
    in_window: bool
    context_tokens: float
    depth_percent: float
    chance: float


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
