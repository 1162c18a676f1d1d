"""How far two rankings of the same heads agree: rank correlation, and how many of their best heads they share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from needlework.anatomy import heads_of_share
from needlework.errors import NeedleworkError
from needlework.interventions.ranking import Ranking

SHARE = 0.15  # of the heads that "best" means where nothing else is said: the paper's


@dataclass(frozen=True)
class Agreement:
    """Of two rankings."""

    spearman: float
    overlap: float  # of the k best of one, the share that is among the k best of the other
    k: int
    by_chance: float  # the overlap of two orders that have nothing to do with each other

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def agreement(first: Ranking, second: Ranking, k: int | None = None) -> Agreement:
    """By default, k is 15 % of the heads."""
    heads = sorted(first.order)
    if heads != sorted(second.order):
        raise NeedleworkError("two rankings can be compared only if they rank the same heads")
    k = heads_of_share(SHARE, len(heads)) if k is None else k
    shared = len(set(first.top(k)) & set(second.top(k)))
    return Agreement(spearman(_values(first), _values(second)), shared / k if k else 1.0, k, k / len(heads))


def _values(ranking: Ranking) -> np.ndarray:
    """A number for each head, more is better: its score, or what the order alone says."""
    place = {head: -float(i) for i, head in enumerate(ranking.order)}
    values = ranking.scores or place
    return np.array([values[head] for head in sorted(ranking.order)])


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's rank correlation; equals share the mean of their ranks. 0 where one of them says nothing."""
    first, second = (_ranks(values) for values in (a, b))
    first, second = first - first.mean(), second - second.mean()
    spread = float(np.sqrt((first**2).sum() * (second**2).sum()))
    return float((first * second).sum() / spread) if spread else 0.0


def _ranks(values: np.ndarray) -> np.ndarray:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return np.asarray((ends - (counts - 1) / 2)[place])


def matrix(rankings: Mapping[str, Ranking], k: int | None = None) -> dict[str, dict[str, Agreement]]:
    """Every ranking with every other."""
    return {a: {b: agreement(rankings[a], rankings[b], k) for b in rankings} for a in rankings}
