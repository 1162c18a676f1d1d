"""Heads as players of a game whose worth is the right answer's log P: fair shares (Shapley), good sets of each size (greedy)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from needlework.heads.answers import Question, questions
from needlework.heads.causal import Progress, Trial, ask, evidence, keeping
from needlework.heads.methods import Scores, method
from needlework.heads.pieces import in_one_piece
from needlework.interventions.base import Intervention
from needlework.tasks.base import Item

if TYPE_CHECKING:
    from needlework.subject import Subject

_BLOCK = 8  # players who join before it is asked whether the rest can change anything
_SHARES = (0.0, 1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2)  # of the heads that are left: dropped at once

Coalition = tuple[int, frozenset[int]]  # a game, and who of its players has joined
Value = Callable[[Sequence[Coalition]], np.ndarray]  # what coalitions are worth


@dataclass
class _Walk:
    """Players join one by one in a random order; what each adds on arrival is its share in this order."""

    game: int
    order: list[int]
    worth: float  # of those who have joined
    joined: int = 0
    gains: list[float] = field(default_factory=list)

    def coalitions(self, count: int) -> list[Coalition]:
        ends = range(self.joined + 1, min(self.joined + count, len(self.order)) + 1)
        return [(self.game, frozenset(self.order[:end])) for end in ends]

    def take(self, worths: Sequence[float]) -> None:
        for worth in worths:
            self.gains.append(worth - self.worth)
            self.worth, self.joined = worth, self.joined + 1


def fair_shares(
    value: Value, players: int, games: int, pairs: int, draw: np.random.Generator, tolerance: float, progress: Progress
) -> tuple[np.ndarray, int]:
    """Shapley values [games, players] by sampled orders, and how many coalitions were valued.

    Orders come in antithetic pairs, each with its reverse; `pairs` go round the games. A walk ends once its coalition is worth
    all but `tolerance` of what all players are worth, and the rest get nothing (Ghorbani and Zou's truncation): with 0 none
    ends early and the estimate is unbiased. Games that no order was drawn for are nan.
    """
    played = range(min(games, pairs))
    ends = value([(game, members) for game in played for members in (frozenset(), frozenset(range(players)))])
    walks = []
    for pair in range(pairs):
        order = [int(player) for player in draw.permutation(players)]
        game = pair % games
        walks += [_Walk(game, order, ends[2 * game]), _Walk(game, order[::-1], ends[2 * game])]
    valued, alive = len(ends), walks
    while alive:
        asked = [walk.coalitions(_BLOCK) for walk in alive]
        new = [coalition for coalitions in asked for coalition in coalitions if len(coalition[1]) < players]
        known = dict(zip(new, value(new), strict=True)) if new else {}
        valued += len(new)
        for walk, coalitions in zip(alive, asked, strict=True):
            whole = ends[2 * walk.game + 1]
            walk.take([float(known[c]) if c in known else whole for c in coalitions])
        open_ = tolerance == 0  # then none ends early, not even one that has by chance come to the worth of all
        alive = [w for w in alive if w.joined < players and (open_ or abs(ends[2 * w.game + 1] - w.worth) > tolerance)]
        progress(1 - sum(players - walk.joined for walk in alive) / (players * len(walks)))
    sums, counts = np.zeros((games, players)), np.zeros(games)
    for walk in walks:
        sums[walk.game, walk.order[: len(walk.gains)]] += walk.gains
        counts[walk.game] += 1
    return np.where(counts[:, None] > 0, sums / np.maximum(counts, 1)[:, None], np.nan), valued


@method(
    "shapley",
    "causal",
    "the head's fair share in the right answer's log P: what it adds, averaged over orders of joining",
)
def shapley(
    subject: Subject,
    items: Sequence[Item],
    *,
    seed: int,
    progress: Progress,
    budget: int = 4096,
    tolerance: float = 0.02,
) -> Scores:
    """Each sample is a game of its own. `budget` is about how many sets of heads are tried over all samples."""
    asked, heads = questions(subject, items), subject.anatomy.heads

    def value(coalitions: Sequence[Coalition]) -> np.ndarray:
        return ask(subject, [Trial(asked[game], _keeping(subject, members)) for game, members in coalitions]).log_p

    pairs = max(1, budget // (2 * len(heads)))
    draw = np.random.default_rng(seed)
    each, valued = fair_shares(value, len(heads), len(asked), pairs, draw, tolerance, progress)
    played = [i for i in range(len(asked)) if not np.isnan(each[i, 0])]
    facts = evidence([asked[i] for i in played], items)
    return Scores.of_samples(each[played], **facts, orders=2 * pairs, coalitions=valued, tolerance=tolerance)


def _keeping(subject: Subject, members: frozenset[int]) -> Intervention:
    return keeping([subject.anatomy.heads[i] for i in sorted(members)], subject.anatomy)


def _drops(heads: int, share: float) -> list[int]:
    """How many heads are dropped in each round until one is left."""
    rounds = []
    while heads > 1:
        rounds.append(min(heads - 1, max(1, int(share * heads))))
        heads -= rounds[-1]
    return rounds


def _affordable(heads: int, samples: int, budget: int) -> list[int]:
    """The slowest way down that the budget allows; the fastest if none does."""
    for share in _SHARES:
        rounds = _drops(heads, share)
        left = heads - np.cumsum([0, *rounds[:-1]])
        if samples * int(left.sum() + len(rounds)) <= budget:
            break
    return rounds


@method("greedy", "causal", "how long the head survives when the least needed ones are dropped one after the other: the ceiling")
def greedy(subject: Subject, items: Sequence[Item], *, seed: int, progress: Progress, budget: int = 16384) -> Scores:
    """Backward elimination. In each round every head that is left is left out once, on all samples, and those go whose absence
    costs the least log P: one a round, or as many as a budget of so many forwards demands. The score is the place in that order.

    Heads that cost alike go by the last bits of what was computed, so that one worker does all of it, in the same batches.
    """
    return in_one_piece(subject, partial(_eliminated, budget=budget), items, progress)


def _eliminated(subject: Subject, items: Sequence[Item], progress: Progress, budget: int) -> Scores:
    asked, heads = questions(subject, items), subject.anatomy.heads
    rounds = _affordable(len(heads), len(asked), budget)
    left = list(range(len(heads)))
    out: list[int] = []
    curve = []
    for number, drops in enumerate(rounds):
        share = (number / len(rounds), (number + 1) / len(rounds))
        worth = _without_each(subject, asked, left, progress, share)
        gone = [left[i] for i in np.argsort(-worth, kind="stable")[:drops]]
        out += gone
        left = [i for i in left if i not in gone]
        kept = ask(subject, [Trial(question, _keeping(subject, frozenset(left))) for question in asked])
        curve.append({"heads": len(left), "log_p": float(kept.log_p.mean()), "right": float(kept.right.mean())})
    progress(1.0)
    values = np.zeros(len(heads))
    values[out + left] = np.arange(len(heads))
    return Scores(values, None, {**evidence(asked, items), "dropped_at_once": max(rounds, default=0), "curve": curve})


def _without_each(
    subject: Subject, asked: Sequence[Question], left: Sequence[int], progress: Progress, share: tuple[float, float]
) -> np.ndarray:
    """Mean log-likelihood over all samples with each of these heads left out, and those that are not among them, too."""
    acts = [_keeping(subject, frozenset(left) - {i}) for i in left]
    trials = [Trial(question, act) for question in asked for act in acts]
    worth: np.ndarray = ask(subject, trials, progress=progress, span=share).log_p.reshape(len(asked), len(left)).mean(0)
    return worth
