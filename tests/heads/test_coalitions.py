"""Shapley shares against all coalitions, greedy elimination against the naive loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations, permutations
from math import factorial

import numpy as np
import pytest
from stock_heads import samples, score, stock

import cases
from needlework.heads.causal import keep_members, plan_elimination, shapley_values
from needlework.heads.samples import score_answers, select_correct

Worth = Callable[[frozenset[int]], float]


def _quiet(share: float) -> None:
    pass


def _exact(worth: Worth, players: int) -> np.ndarray:
    """Shapley's formula: every coalition that a player could join, weighted by the orders in which it comes first."""
    shares = np.zeros(players)
    for i in range(players):
        others = [j for j in range(players) if j != i]
        for size in range(players):
            weight = factorial(size) * factorial(players - size - 1) / factorial(players)
            for chosen in map(frozenset, combinations(others, size)):
                shares[i] += weight * (worth(chosen | {i}) - worth(chosen))
    return shares


def _values(worths: Sequence[Worth]) -> Callable[..., np.ndarray]:
    return lambda coalitions: np.array([worths[game](members) for game, members in coalitions])


@pytest.fixture(scope="module")
def of_jamba() -> dict[frozenset[int], float]:
    """What every set of the 8 heads of tiny Jamba is worth to one answer: all 256 of them."""
    subject = cases.subject("jamba")
    (question,) = select_correct(subject, samples("jamba")[:1])
    sets = [frozenset(c) for size in range(9) for c in combinations(range(8), size)]
    log_p, _ = score_answers(subject, [(question, keep_members(subject, members)) for members in sets])
    return dict(zip(sets, log_p.tolist(), strict=True))


class Orders:
    """Stands for a random generator that draws these orders."""

    def __init__(self, orders: Sequence[Sequence[int]]) -> None:
        self.orders = iter(orders)

    def permutation(self, players: int) -> np.ndarray:
        return np.array(next(self.orders))


def test_the_mean_over_all_orders_is_shapley_s_value(of_jamba: dict[frozenset[int], float]) -> None:
    """Unbiased: five heads of a real model (the others silent), every order once. Pairs hold each order twice."""
    worth: Worth = of_jamba.__getitem__
    orders = list(permutations(range(5)))
    found, valued = shapley_values(_values([worth]), 5, 1, len(orders), Orders(orders), 0.0, _quiet)  # type: ignore[arg-type]
    assert found[0] == pytest.approx(_exact(worth, 5), abs=1e-9)
    assert np.abs(found).max() > 0.01
    assert valued == 2 + 2 * len(orders) * 4


def test_sampled_shares_come_near_the_exact_ones(of_jamba: dict[frozenset[int], float]) -> None:
    """All eight heads: within four standard errors, which shrink with the orders drawn; shares add up in every game."""
    worth: Worth = of_jamba.__getitem__
    exact = _exact(worth, 8)
    runs = [shapley_values(_values([worth]), 8, 1, 50, np.random.default_rng(s), 0.0, _quiet)[0][0] for s in range(20)]
    error = np.std(runs, 0, ddof=1) / np.sqrt(len(runs))
    assert np.all(np.abs(np.mean(runs, 0) - exact) < 4 * error + 1e-9)
    whole = worth(frozenset(range(8))) - worth(frozenset())
    assert np.sum(runs, 1) == pytest.approx(whole, abs=1e-6)


def test_reversed_orders_cost_less_than_they_help(of_jamba: dict[frozenset[int], float]) -> None:
    """Antithetic: where players only add up and the last one pairs with the first, a pair is exact and an order is not."""
    worth: Worth = lambda members: float(len(members)) ** 2  # noqa: E731  (what one adds depends on its place alone)
    found, _ = shapley_values(_values([worth]), 8, 1, 1, np.random.default_rng(0), 0.0, _quiet)
    assert found[0] == pytest.approx(np.full(8, 8.0), abs=1e-12)


def test_a_walk_ends_when_nothing_is_left_to_gain() -> None:
    """Truncated: once the worth of all is reached within the tolerance, the rest get nothing and are not asked."""
    worth: Worth = lambda members: min(len(members), 3) / 3  # noqa: E731
    order = [list(range(24))]
    full, all_valued = shapley_values(_values([worth]), 24, 1, 1, Orders(order), 0.0, _quiet)  # type: ignore[arg-type]
    cut, valued = shapley_values(_values([worth]), 24, 1, 1, Orders(order), 0.01, _quiet)  # type: ignore[arg-type]
    assert cut == pytest.approx(full)
    assert (all_valued, valued) == (2 + 2 * 23, 2 + 2 * 8)
    tight: Worth = lambda members: min(len(members), 3) / 3 + 1e-3 * len(members)  # noqa: E731
    cut, valued = shapley_values(_values([tight]), 24, 1, 1, Orders(order), 0.02, _quiet)  # type: ignore[arg-type]
    assert valued == 2 + 2 * 8
    assert cut[0].sum() == pytest.approx(tight(frozenset(range(24))), abs=0.02)


def test_games_are_dealt_orders_in_turn() -> None:
    worths: list[Worth] = [lambda members, g=g: float(g * len(members)) for g in range(3)]  # type: ignore[misc]
    found, _ = shapley_values(_values(worths), 4, 3, 2, np.random.default_rng(0), 0.0, _quiet)
    assert found[:2] == pytest.approx(np.array([[0.0] * 4, [1.0] * 4]))
    assert np.isnan(found[2]).all()


def test_shapley_on_a_model(of_jamba: dict[frozenset[int], float]) -> None:
    """The method itself: shares of each sample add up to what all heads are worth, and one seed gives one result."""
    a, b, c = (score("shapley", "jamba", budget=64, tolerance=0.0, seed=seed) for seed in (3, 3, 4))
    assert np.array_equal(a.each, b.each)
    assert not np.array_equal(a.each, c.each)
    whole = of_jamba[frozenset(range(8))] - of_jamba[frozenset()]
    assert a.each[0].sum() == pytest.approx(whole, abs=1e-4)
    assert a.evidence["orders"] == 8
    assert a.each.shape == (2, 8)


def _naive_elimination(name: str) -> tuple[list[int], list[float]]:
    """One head at a time, one sample at a time, on the stock model: who goes first, and what is left each time."""
    model, items = stock(name), samples(name)
    heads = [tuple(head) for head in model.anatomy.heads]

    def worth(left: list[int]) -> float:
        off = {head: 0.0 for i, head in enumerate(heads) if i not in left}
        with model.scaled(off):  # type: ignore[arg-type]
            return float(np.mean([model.log_p(item.prompt, item.options[0]) for item in items]))

    left, out, curve = list(range(len(heads))), [], []
    while len(left) > 1:
        worths = [worth([j for j in left if j != i]) for i in left]
        out.append(left.pop(int(np.argmax(worths))))
        curve.append(max(worths))
    return out + left, curve


@pytest.mark.slow
def test_greedy_drops_what_the_naive_loop_drops() -> None:
    scores = score("greedy", "jamba")
    order, curve = _naive_elimination("jamba")
    assert np.argsort(scores.values).tolist() == order
    assert [point["log_p"] for point in scores.evidence["curve"]] == pytest.approx(curve, abs=1e-4)
    assert [point["heads"] for point in scores.evidence["curve"]] == list(range(7, 0, -1))


def test_a_budget_is_kept() -> None:
    for heads, samples_, budget in ((64, 32, 16384), (64, 32, 4000), (8, 2, 10**6), (1024, 32, 10**5)):
        rounds = plan_elimination(heads, samples_, budget)
        left = heads - np.cumsum([0, *rounds[:-1]])
        assert sum(rounds) == heads - 1
        assert samples_ * (left.sum() + len(rounds)) <= max(budget, samples_ * 2 * heads + 400)
    assert plan_elimination(8, 2, 10**6) == [1] * 7  # one at a time where that can be paid
    small = score("greedy", "jamba", budget=40)
    assert small.evidence["dropped_at_once"] > 1
    assert sorted(small.values) == list(range(8))
