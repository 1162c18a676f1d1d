"""Rank heads by their Shapley values for the correct answer's log P, and by greedy backward elimination."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from needlework.heads.causal import QuestionTrial, evidence, keep_only, score_answers
from needlework.heads.methods import Scores, method
from needlework.heads.samples import Question, correct_questions
from needlework.interventions.base import Intervention
from needlework.measure import Progress, map_samples
from needlework.tasks.base import Item

if TYPE_CHECKING:
    from needlework.subject import Subject

_BLOCK = 8  # coalitions of each permutation that are valued before truncation is checked
_SHARES = (0.0, 1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2)  # shares of the remaining heads that are dropped in one round

Coalition = tuple[int, frozenset[int]]  # index of a game (a sample), and a set of its players (heads)
Value = Callable[[Sequence[Coalition]], np.ndarray]  # values [coalitions]


@dataclass
class _Permutation:
    """State of one sampled permutation: the marginal gain of each player when it joins in this order."""

    game: int
    order: list[int]
    worth: float  # value of the coalition of the players that have joined
    joined: int = 0
    gains: list[float] = field(default_factory=list)

    def coalitions(self, count: int) -> list[Coalition]:
        ends = range(self.joined + 1, min(self.joined + count, len(self.order)) + 1)
        return [(self.game, frozenset(self.order[:end])) for end in ends]

    def take(self, worths: Sequence[float]) -> None:
        for worth in worths:
            self.gains.append(worth - self.worth)
            self.worth, self.joined = worth, self.joined + 1


def shapley_values(
    value: Value, players: int, games: int, pairs: int, draw: np.random.Generator, tolerance: float, progress: Progress
) -> tuple[np.ndarray, int]:
    """Estimate Shapley values by sampled permutations.

    Args:
        value: Function that returns the values of coalitions.
        players: Number of players in each game.
        games: Number of games.
        pairs: Number of permutations, each of which is used with its reverse (antithetic); permutation i belongs to game
            i modulo `games`.
        draw: Random generator of the permutations.
        tolerance: A permutation stops once its coalition's value is within this distance of the value of all players; the
            remaining players get 0 (truncation of Ghorbani and Zou). With 0 none stops early and the estimate is unbiased.
        progress: Called with the share of the work that is done.

    Returns:
        Values [games, players], NaN for games without a permutation; and the number of coalitions that were valued.
    """
    played = range(min(games, pairs))
    ends = value([(game, members) for game in played for members in (frozenset(), frozenset(range(players)))])
    permutations = []
    for pair in range(pairs):
        order = [int(player) for player in draw.permutation(players)]
        game = pair % games
        permutations += [_Permutation(game, order, ends[2 * game]), _Permutation(game, order[::-1], ends[2 * game])]
    valued, alive = len(ends), permutations
    while alive:
        asked = [permutation.coalitions(_BLOCK) for permutation in alive]
        new = [coalition for coalitions in asked for coalition in coalitions if len(coalition[1]) < players]
        known = dict(zip(new, value(new), strict=True)) if new else {}
        valued += len(new)
        for permutation, coalitions in zip(alive, asked, strict=True):
            whole = ends[2 * permutation.game + 1]
            permutation.take([float(known[c]) if c in known else whole for c in coalitions])
        open_ = tolerance == 0  # without tolerance none stops early, even if its value happens to equal that of all players
        alive = [w for w in alive if w.joined < players and (open_ or abs(ends[2 * w.game + 1] - w.worth) > tolerance)]
        progress(1 - sum(players - permutation.joined for permutation in alive) / (players * len(permutations)))
    sums, counts = np.zeros((games, players)), np.zeros(games)
    for permutation in permutations:
        sums[permutation.game, permutation.order[: len(permutation.gains)]] += permutation.gains
        counts[permutation.game] += 1
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
    """Score heads by their Shapley values for log P of the correct answer; each sample is a game, each head a player.

    `budget` is about the number of forwards (sample times set of heads); a small one covers only the first samples.
    """
    asked, heads = correct_questions(subject, items), subject.anatomy.heads

    def value(coalitions: Sequence[Coalition]) -> np.ndarray:
        return score_answers(
            subject, [QuestionTrial(asked[game], _keep_members(subject, members)) for game, members in coalitions]
        ).log_p

    pairs = max(1, budget // (2 * len(heads)))
    draw = np.random.default_rng(seed)
    each, valued = shapley_values(value, len(heads), len(asked), pairs, draw, tolerance, progress)
    played = [i for i in range(len(asked)) if not np.isnan(each[i, 0])]
    facts = evidence([asked[i] for i in played], items)
    return Scores.of_samples(each[played], **facts, orders=2 * pairs, coalitions=valued, tolerance=tolerance)


def _keep_members(subject: Subject, members: frozenset[int]) -> Intervention:
    return keep_only([subject.anatomy.heads[i] for i in sorted(members)], subject.anatomy)


def _drops(heads: int, share: float) -> list[int]:
    """Return the number of heads to drop in each round until one is left."""
    rounds = []
    while heads > 1:
        rounds.append(min(heads - 1, max(1, int(share * heads))))
        heads -= rounds[-1]
    return rounds


def _affordable(heads: int, samples: int, budget: int) -> list[int]:
    """Return the rounds (see `_drops`) with the smallest share that fits the budget, or the largest share if none fits."""
    for share in _SHARES:
        rounds = _drops(heads, share)
        left = heads - np.cumsum([0, *rounds[:-1]])
        if samples * int(left.sum() + len(rounds)) <= budget:
            break
    return rounds


@method("greedy", "causal", "how long the head survives when the least needed ones are dropped one after the other: the ceiling")
def greedy(subject: Subject, items: Sequence[Item], *, seed: int, progress: Progress, budget: int = 16384) -> Scores:
    """Score heads by backward elimination: the later a head is dropped, the higher its score.

    Each round ablates every remaining head once, on all samples, and drops the heads that cost the least log P: one in each
    round, or more where `budget` forwards do not suffice. Near ties depend on the last bits of log P, so one worker computes
    all rounds in the same batches.
    """
    (scores,) = map_samples(subject, partial(_eliminated, budget=budget), items, progress, whole=True)
    return scores


def _eliminated(subject: Subject, items: Sequence[Item], progress: Progress, budget: int) -> Scores:
    asked, heads = correct_questions(subject, items), subject.anatomy.heads
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
        kept = score_answers(subject, [QuestionTrial(question, _keep_members(subject, frozenset(left))) for question in asked])
        curve.append({"heads": len(left), "log_p": float(kept.log_p.mean()), "right": float(kept.right.mean())})
    progress(1.0)
    values = np.zeros(len(heads))
    values[out + left] = np.arange(len(heads))
    return Scores(values, None, {**evidence(asked, items), "dropped_at_once": max(rounds, default=0), "curve": curve})


def _without_each(
    subject: Subject, asked: Sequence[Question], left: Sequence[int], progress: Progress, share: tuple[float, float]
) -> np.ndarray:
    """Return the mean log-likelihood over all samples with each remaining head ablated, [left]."""
    acts = [_keep_members(subject, frozenset(left) - {i}) for i in left]
    trials = [QuestionTrial(question, act) for question in asked for act in acts]
    worth: np.ndarray = score_answers(subject, trials, progress=progress, span=share).log_p.reshape(len(asked), len(left)).mean(0)
    return worth
