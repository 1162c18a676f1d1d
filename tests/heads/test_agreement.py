"""Agreement of rankings, against definitions written out."""

from __future__ import annotations

import numpy as np
import pytest

import needlework as nw
from needlework.heads.evaluation import compare_rankings, spearman
from needlework.interventions.ranking import Ranking

HEADS = [nw.Head(2, i) for i in range(20)]


def slow_spearman(a: list[float], b: list[float]) -> float:
    """Pearson's correlation of mean ranks, by counting."""

    def ranks(values: list[float]) -> np.ndarray:
        return np.array([sum(other < value for other in values) + (values.count(value) + 1) / 2 for value in values])

    return float(np.corrcoef(ranks(a), ranks(b))[0, 1])


def test_spearman_is_pearsons_of_mean_ranks() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        a, b = rng.integers(0, 6, 12).astype(float).tolist(), rng.normal(size=12).round(1).tolist()
        assert spearman(np.array(a), np.array(b)) == pytest.approx(slow_spearman(a, b), abs=1e-12)
    assert spearman(np.arange(5.0), np.arange(5.0) ** 3) == pytest.approx(1.0)
    assert spearman(np.arange(5.0), -np.arange(5.0)) == pytest.approx(-1.0)
    assert spearman(np.ones(4), np.arange(4.0)) == 0.0


def test_overlap_counts_shared_heads_among_the_best() -> None:
    first = Ranking(order=HEADS)
    second = Ranking(order=[*HEADS[2:6], *HEADS[:2], *HEADS[6:]])
    found = compare_rankings(first, second, k=4)
    assert (found.overlap, found.k, found.by_chance) == (0.5, 4, 0.2)
    assert compare_rankings(first, first).overlap == 1.0
    assert compare_rankings(first, first).k == 3  # 15 % of 20
    assert compare_rankings(first, Ranking(order=HEADS[::-1])).spearman == pytest.approx(-1.0)
    assert compare_rankings(first, second, k=4) == compare_rankings(second, first, k=4)
    with pytest.raises(nw.NeedleworkError, match="the same heads"):
        compare_rankings(first, Ranking(order=HEADS[:3]))


def test_equal_scores_do_not_agree_by_their_place() -> None:
    """Two methods that say nothing of any head must not correlate because ties go to the lower head."""
    nothing = Ranking.by_scores(dict.fromkeys(HEADS, 0.0))
    assert compare_rankings(nothing, nothing).spearman == 0.0
