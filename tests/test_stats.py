"""Intervals against published values, brute force and simulated coverage."""

from __future__ import annotations

import math

import numpy as np
import pytest

from needlework import stats

# Newcombe 1998, table I (method 3, Wilson without correction): hits, n, lower, upper.
NEWCOMBE = [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)]


@pytest.mark.parametrize("hits,n,low,high", NEWCOMBE)
def test_wilson_gives_newcombes_published_values(hits: int, n: int, low: float, high: float) -> None:
    found = stats.wilson(hits, n)
    assert (found.low, found.high) == pytest.approx((low, high), abs=5e-5)


def test_none_of_n_needs_73_for_an_upper_bound_of_five_percent() -> None:
    assert stats.wilson(0, 72).high > 0.05
    assert stats.wilson(0, 73).high <= 0.05


def test_wilson_mirrors_and_stays_inside() -> None:
    for n in (1, 7, 75):
        for hits in range(n + 1):
            a, b = stats.wilson(hits, n), stats.wilson(n - hits, n)
            assert (a.low, a.high) == pytest.approx((1 - b.high, 1 - b.low), abs=1e-12)
            assert 0 <= a.low <= a.value <= a.high <= 1


def test_accuracy_leaves_missing_values_out() -> None:
    assert stats.accuracy([1, 0, math.nan, 1]) == stats.wilson(2, 3)
    assert stats.accuracy([]).n == 0


def test_resampling_kinds_equals_resampling_clusters_one_by_one() -> None:
    rng = np.random.default_rng(0)
    clusters = np.repeat(np.arange(30), 3)
    after, before = rng.integers(0, 2, 90), rng.integers(0, 2, 90)
    sums = stats.cluster_sums(clusters, [after, before])
    fast = stats.resample(sums, draws=40_000, seed=1)
    slow = sums[rng.integers(0, 30, (40_000, 30))].sum(axis=1)
    assert np.allclose(fast.mean(axis=0), slow.mean(axis=0), atol=0.1)
    assert np.allclose(np.cov(fast[:, :2].T), np.cov(slow[:, :2].T), rtol=0.06, atol=0.3)
    assert (fast[:, 2] == 90).all()


def brute_retained(after: np.ndarray, before: np.ndarray, clusters: np.ndarray, chance: float) -> tuple[float, float]:
    rng = np.random.default_rng(5)
    members = [np.flatnonzero(clusters == c) for c in np.unique(clusters)]
    shares = []
    for _ in range(4000):
        rows = np.concatenate([members[i] for i in rng.integers(0, len(members), len(members))])
        shares.append((after[rows].mean() - chance) / (before[rows].mean() - chance))
    low, high = np.quantile(shares, [0.025, 0.975])
    return float(low), float(high)


@pytest.mark.parametrize("chance", [0.0, 0.25])
def test_retained_share_against_brute_force(chance: float) -> None:
    rng = np.random.default_rng(3)
    clusters = np.repeat(np.arange(60), 5)
    hard = rng.random(60)[clusters]
    before = (rng.random(300) < 0.95 - 0.2 * hard).astype(float)
    after = before * (rng.random(300) < 0.9 - 0.7 * hard)
    found = stats.retained(after, before, clusters, chance)
    low, high = brute_retained(after, before, clusters, chance)
    assert found.value == pytest.approx((after.mean() - chance) / (before.mean() - chance))
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.02)


def test_clusters_widen_the_interval() -> None:
    rng = np.random.default_rng(4)
    clusters = np.repeat(np.arange(20), 20)
    after = (rng.random(20) < 0.5).astype(float)[clusters]  # a whole haystack is right or wrong
    before = np.ones(400)
    together = stats.retained(after, before, clusters)
    apart = stats.retained(after, before, np.arange(400))
    assert together.high - together.low > 3 * (apart.high - apart.low)


def test_a_perfect_score_is_not_certainty_and_never_worse_than_one_miss() -> None:
    lows = []
    for misses in range(4):
        after = np.ones(75)
        after[:misses] = 0
        lows.append(stats.retained(after, np.ones(75), np.arange(75)).low)
    assert lows[0] == pytest.approx(stats.wilson(75, 75).low, abs=1e-9)
    assert lows == sorted(lows, reverse=True)
    assert lows[1] < 0.95 <= lows[0]


def test_pairing_helps() -> None:
    before = (np.arange(300) % 3 > 0).astype(float)
    found = stats.retained(before, before, np.arange(300))
    assert found.value == 1
    assert found.low > 0.97


def test_a_baseline_at_chance_has_no_retained_share() -> None:
    assert math.isnan(stats.retained([1, 0], [0, 0], [0, 1]).value)
    assert stats.retained([1, 0], [0, 0], [0, 1]).text() == "baseline 0 %: nothing to retain, n = 2"
    assert stats.NOTHING.text() == "no trials"
    assert math.isnan(stats.retained([1, 0, 0, 0], [1, 0, 0, 0], range(4), chance=0.25).value)


@pytest.mark.slow
@pytest.mark.parametrize("keep,size", [(0.6, 1), (0.6, 4), (0.97, 1)])
def test_retained_interval_covers_the_truth(keep: float, size: int) -> None:
    rng = np.random.default_rng(8)
    hits = 0
    for run in range(250):
        clusters = np.repeat(np.arange(60), size)
        lean = rng.normal(0, 0.15 if size > 1 else 0, 60)[clusters]
        before = (rng.random(60 * size) < 0.9).astype(float)
        after = before * (rng.random(60 * size) < np.clip(keep + lean, 0, 1))
        found = stats.retained(after, before, clusters, seed=run)
        hits += found.low <= keep <= found.high
    assert 0.91 <= hits / 250 <= 1.0


def sides(retrieval: tuple[float, float], knowledge: tuple[float, float], seed: int, n: int = 120) -> stats.Interaction:
    rng = np.random.default_rng(seed)

    def side(shares: tuple[float, float], chance: float) -> stats.Side:
        def answers(share: float) -> np.ndarray:
            return (rng.random(n) < chance + share * (1 - chance)).astype(float)

        return stats.Side(np.ones(n), answers(shares[0]), answers(shares[1]), np.arange(n), chance)

    return stats.interaction(side(retrieval, 0.0), side(knowledge, 0.25), seed)


def test_interaction_has_the_sign_of_the_claim_and_knows_when_effects_cross() -> None:
    both = sides((0.0, 0.8), (0.9, 0.2), 1)
    assert both.contrast.value == pytest.approx(0.8 + 0.7, abs=0.2)
    assert both.contrast.low > 0
    assert both.crossed
    one_sided = sides((0.0, 0.0), (0.9, 0.2), 2)
    assert one_sided.contrast.low > 0
    assert not one_sided.crossed
    assert sides((0.8, 0.0), (0.2, 0.9), 3).contrast.high < 0


@pytest.mark.slow
def test_interaction_interval_covers_the_truth() -> None:
    found = [sides((0.3, 0.5), (0.6, 0.4), run, n=80).contrast for run in range(300)]
    covered = sum(e.low <= 0.4 <= e.high for e in found) / 300
    assert 0.91 <= covered <= 0.99


def test_interaction_at_the_edge_is_no_certainty() -> None:
    n = 80
    perfect = stats.Side(np.ones(n), np.zeros(n), np.ones(n), np.arange(n))
    other = stats.Side(np.ones(n), np.ones(n), np.zeros(n), np.arange(n))
    found = stats.interaction(perfect, other).contrast
    assert found.value == 2
    assert found.low < 2 < found.high


def test_perplexity_weighs_by_tokens() -> None:
    found = stats.perplexity([2.0, 9.0], [1, 3], [0, 1])
    assert found.value == pytest.approx(math.exp(11 / 4))
    assert found.low == pytest.approx(math.exp(2))
    assert found.high == pytest.approx(math.exp(3))


def test_the_same_seed_gives_the_same_numbers() -> None:
    rng = np.random.default_rng(1)
    a, b, c = rng.integers(0, 2, 50), rng.integers(0, 2, 50), np.arange(50)
    assert stats.retained(a, b, c) == stats.retained(a, b, c)
    assert stats.retained(a, b, c) != stats.retained(a, b, c, seed=2)


SHARES = [(0.0, "0 %"), (0.0487, "4.9 %"), (0.97, "97 %"), (0.951, "95.1 %"), (-0.0001, "0 %"), (-0.02, "-2 %")]


@pytest.mark.parametrize("share,text", SHARES)
def test_percents_keep_the_digit_that_a_bound_needs(share: float, text: str) -> None:
    assert stats.percent(share) == text


def test_a_paired_gain_is_surer_than_that_of_two_samples() -> None:
    rng = np.random.default_rng(1)
    before = (rng.random(200) < 0.5).astype(float)
    after = np.maximum(before, rng.random(200) < 0.3)
    found = stats.gain(after, before, np.arange(200))
    assert found.value == pytest.approx(float(after.mean() - before.mean()))
    apart = stats.difference(stats.accuracy(after), stats.accuracy(before))
    assert apart.low < found.low < found.value < found.high < apart.high
    assert found.n == 200


def test_a_gain_of_nothing_or_of_everything_is_never_certain() -> None:
    same = stats.gain(np.ones(50), np.ones(50), np.arange(50))
    assert (same.value, same.low < -0.05, same.high) == (0, True, 0)
    every = stats.gain(np.ones(50), np.zeros(50), np.arange(50))
    assert (every.value, 0.9 < every.low < 0.95) == (1, True)
    assert stats.gain([], [], []) == stats.NOTHING


def test_samples_of_one_cluster_have_a_value_and_no_interval() -> None:
    """Pairs that share their only haystack say nothing of other haystacks: no narrow interval may stand for them."""
    after, before = [1.0] * 90 + [0.0] * 10, [1.0] * 100
    for found in (stats.retained(after, before, ["one"] * 100), stats.gain(after, before, ["one"] * 100)):
        assert (found.low, found.high, found.why) == (-math.inf, math.inf, stats.ONE_HAYSTACK)
    assert stats.retained(after, before, ["one"] * 100).text() == "90 % (one haystack: no interval over haystacks), n = 100"
    assert math.isfinite(stats.retained(after, before, ["one"] * 50 + ["two"] * 50).low)
    assert math.isfinite(stats.retained([1.0], [1.0], ["one"]).low), "one pair is as wide as Wilson makes it"
    half = np.asarray([0.0, 1.0] * 50)
    sides = [stats.Side(np.ones(100), half, 1 - half, clusters) for clusters in (np.zeros(100), np.arange(100))]
    found = stats.interaction(*sides)
    assert found.contrast.why == found.retrieval_gap.why == stats.ONE_HAYSTACK
    assert math.isfinite(found.knowledge_gap.low)
    assert not found.crossed
