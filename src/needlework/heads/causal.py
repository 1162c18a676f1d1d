"""Rank heads by interventions: ablate one head, ablate all others, patch its outputs into another prompt, or ablate sets.

All methods measure the log-likelihood of the correct answer, on samples that the model answers correctly without intervention.
Heads are ablated at every position (phase "both") or only while the answer is generated (phase "decode").
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
from torch import Tensor

from needlework.anatomy import Anatomy, Head
from needlework.errors import NeedleworkError
from needlework.heads.methods import Scores, method
from needlework.heads.samples import (
    AblationPhase,
    AnsweredItem,
    evidence,
    keep_correct,
    score_answers,
    select_correct,
    with_answers,
)
from needlework.interventions.acts import Act, ChangeOutputs, LoweringContext, Place
from needlework.interventions.base import NONE, Intervention, Part
from needlework.interventions.builtin import AblateAttention, AblateHeads, OnlyHeads
from needlework.measure import Progress, map_samples
from needlework.subject import Subject
from needlework.tasks.base import Item

_ROWS_AT_ONCE = 256  # batch limit of patching: prompts times heads
_LEAST_GAP = 0.1  # nats between prompt and twin; samples with a smaller gap are not used


def keep_only(heads: Collection[Head], anatomy: Anatomy, phase: AblationPhase = "both") -> Intervention:
    """Return the intervention that ablates all heads except these; `heads` may be empty or all heads."""
    if len(heads) == len(anatomy.heads):
        return NONE
    return OnlyHeads(heads=tuple(heads), phase=phase) if heads else AblateAttention(phase=phase)


def _score_interventions(
    subject: Subject, items: Sequence[Item], acts: Sequence[Intervention], phase: AblationPhase, progress: Progress
) -> tuple[list[AnsweredItem], np.ndarray]:
    """Return the samples that are answered correctly, and the log-likelihoods of their answers [samples, acts]."""
    if phase == "both":
        used = select_correct(subject, items)
        log_p, _ = score_answers(subject, [(x, act) for x in used for act in acts], phase, progress)
        return used, log_p.reshape(len(used), len(acts))
    # The prefill is the same with and without these interventions: requested together, it is computed once.
    every = with_answers(subject, items)
    found = score_answers(subject, [(x, act) for x in every for act in (NONE, *acts)], phase, progress)
    log_p, right = (x.reshape(len(every), 1 + len(acts)) for x in found)
    return keep_correct(every, log_p[:, 0], right[:, 0]), log_p[right[:, 0], 1:]


@method("leave_one_out", "causal", "what the right answer loses (log P) when this head alone is ablated everywhere")
def leave_one_out(
    subject: Subject, items: Sequence[Item], *, seed: int, progress: Progress, phase: AblationPhase = "both"
) -> Scores:
    """Score a head by the log P of the correct answer that is lost when only this head is ablated."""
    acts = [AblateHeads(heads=(head,), phase=phase) for head in subject.anatomy.heads]
    used, log_p = _score_interventions(subject, items, acts, phase, progress)
    whole = np.array([x.log_p for x in used])
    return Scores.of_samples(whole[:, None] - log_p, **evidence(used, items), phase=phase)


@method("add_one_in", "causal", "what the right answer gains (log P) when of all heads only this one is kept, over none at all")
def add_one_in(
    subject: Subject, items: Sequence[Item], *, seed: int, progress: Progress, phase: AblationPhase = "both"
) -> Scores:
    """Score a head by the log P of the correct answer with all other heads ablated, minus that with all heads ablated."""
    acts = [keep_only(heads, subject.anatomy, phase) for heads in ((), *((head,) for head in subject.anatomy.heads))]
    used, log_p = _score_interventions(subject, items, acts, phase, progress)
    return Scores.of_samples(log_p[:, 1:] - log_p[:, :1], **evidence(used, items), phase=phase)


for _score in (leave_one_out, add_one_in):
    _about = f"as {_score.__name__}, but heads are ablated only while the answer is given"
    method(f"{_score.__name__}_decode", "causal", _about)(partial(_score, phase="decode"))


class OutputRecorder:
    """Recorder of the outputs of all heads on one text, which replays those of one head on another text of equal length.

    A model that calls a layer several times has several outputs at a position; they are replayed in the same order.
    """

    def __init__(self) -> None:
        self._outputs: dict[tuple[int, int], list[Tensor]] = {}  # (layer, position) -> outputs [heads, dim] of each call

    def record(self, outputs: Tensor, place: Place) -> Tensor:
        for query, position in enumerate(place.positions.tolist()):
            self._outputs.setdefault((place.layer, position), []).append(outputs[query].clone())
        return outputs

    def replay(self, head: Head) -> Callable[[Tensor, Place], Tensor]:
        """Return a function that replaces this head's outputs by the recorded ones."""
        recorded = {position: cycle(calls) for (layer, position), calls in self._outputs.items() if layer == head.layer}

        def replace_outputs(outputs: Tensor, place: Place) -> Tensor:
            for query, position in enumerate(place.positions.tolist()):
                outputs[query, head.index] = next(recorded[position])[head.index]
            return outputs

        return replace_outputs


class _ApplyFunction(Part):
    """Intervention that applies a function to the head outputs of some layers."""

    name = "apply_function"
    side = "attention"
    function: Any

    def lower(self, context: LoweringContext) -> Iterable[Act]:
        return [ChangeOutputs(layer, self.function) for layer in self.where(context.anatomy)]


@method("patching", "causal", "share of the right answer's log P that this head restores in a twin prompt with another needle")
def patching(subject: Subject, items: Sequence[Item], *, seed: int, progress: Progress) -> Scores:
    """Patch the head's outputs on the prompt into the twin prompt, at every position.

    The score is (patched - twin) / (prompt - twin) in log P of the correct answer: 0 restores nothing, 1 restores all of it.
    """
    asked = [x for x in select_correct(subject, items) if x.item.twins]
    if not asked:
        raise NeedleworkError("patching needs samples with a twin, a prompt with another needle: set twins: true in the task")
    in_twin, _ = score_answers(subject, [(_twin(x), NONE) for x in asked])
    gaps = np.array([x.log_p for x in asked]) - in_twin
    kept = [i for i, gap in enumerate(gaps) if gap >= _LEAST_GAP]
    if not kept:
        raise NeedleworkError("patching: the twins' needles do not make the right answer less likely, so nothing can be restored")
    used = [asked[i] for i in kept]
    patched = np.concatenate(map_samples(subject, _patch_heads, used, progress))
    each = (patched - in_twin[kept, None]) / gaps[kept, None]
    return Scores.of_samples(each, **evidence(used, items), gap=float(gaps[kept].mean()))


def _twin(x: AnsweredItem) -> AnsweredItem:
    """Return the sample with its prompt replaced by the twin, which has another needle; the answer stays the same."""
    return replace(x, item=replace(x.item, prompt=next(iter(x.item.twins.values()))))


def _patch_heads(subject: Subject, used: Sequence[AnsweredItem], progress: Progress) -> np.ndarray:
    """Return the answers' log-likelihoods in the twins with each head patched, [samples, heads]."""
    heads, each = subject.anatomy.heads, []
    at_once = max(1, _ROWS_AT_ONCE // len(heads))
    for start in range(0, len(used), at_once):
        pairs = [(x, OutputRecorder()) for x in used[start : start + at_once]]
        score_answers(subject, [(x, _ApplyFunction(function=recorder.record)) for x, recorder in pairs])
        acts = [(_twin(x), head, recorder.replay(head)) for x, recorder in pairs for head in heads]
        trials = [(twin, _ApplyFunction(function=replay, layers=(head.layer,))) for twin, head, replay in acts]
        part = lambda share, start=start, pairs=pairs: progress((start + share * len(pairs)) / len(used))  # noqa: E731
        each.append(score_answers(subject, trials, progress=part)[0].reshape(len(pairs), len(heads)))
    return np.concatenate(each)


def keep_members(subject: Subject, members: Collection[int]) -> Intervention:
    """Return the intervention that ablates all heads except those with these indices in `subject.anatomy.heads`."""
    return keep_only([subject.anatomy.heads[i] for i in sorted(members)], subject.anatomy)


_BLOCK = 8  # coalitions of each permutation that are valued before truncation is checked
Coalition = tuple[int, frozenset[int]]  # index of a game (a sample), and a set of its players (heads)
CoalitionValue = Callable[[Sequence[Coalition]], np.ndarray]  # values [coalitions]


@dataclass
class _Permutation:
    """State of one sampled permutation of the players, who join in this order."""

    game: int
    order: list[int]
    values: list[float]  # of the coalition that has joined: of nobody, of the first player, of the first two, ...


def shapley_values(
    value: CoalitionValue,
    players: int,
    games: int,
    pairs: int,
    draw: np.random.Generator,
    tolerance: float,
    progress: Progress,
) -> tuple[np.ndarray, int]:
    """Estimate Shapley values by sampled permutations.

    Args:
        players: Number of players in each game.
        pairs: Number of permutations, each of which is used with its reverse (antithetic); permutation i belongs to game
            i modulo `games`.
        tolerance: A permutation stops once its coalition's value is within this distance of the value of all players; the
            remaining players get 0 (truncation of Ghorbani and Zou). With 0 none stops early and the estimate is unbiased.

    Returns:
        Values [games, players], NaN for games without a permutation; and the number of coalitions that were valued.
    """
    ends = value([(game, frozenset(range(size))) for game in range(min(games, pairs)) for size in (0, players)])
    permutations = []
    for pair in range(pairs):
        order, game = [int(player) for player in draw.permutation(players)], pair % games
        permutations += [_Permutation(game, way, [ends[2 * game]]) for way in (order, order[::-1])]
    valued, alive = len(ends), permutations
    while alive:
        ends_of = [range(len(x.values), min(len(x.values) + _BLOCK - 1, players) + 1) for x in alive]
        asked = [[(x.game, frozenset(x.order[:end])) for end in some] for x, some in zip(alive, ends_of, strict=True)]
        new = [coalition for coalitions in asked for coalition in coalitions if len(coalition[1]) < players]
        known = dict(zip(new, value(new), strict=True)) if new else {}
        valued += len(new)
        for permutation, coalitions in zip(alive, asked, strict=True):
            permutation.values += [float(known.get(c, ends[2 * permutation.game + 1])) for c in coalitions]
        alive = [
            x
            for x in alive
            # without tolerance none stops early, even if its value happens to equal that of all players
            if len(x.values) <= players and (not tolerance or abs(ends[2 * x.game + 1] - x.values[-1]) > tolerance)
        ]
        progress(1 - sum(players + 1 - len(x.values) for x in alive) / (players * len(permutations)))
    sums, counts = np.zeros((games, players)), np.zeros(games)
    for x in permutations:
        sums[x.game, x.order[: len(x.values) - 1]] += np.diff(x.values)
        counts[x.game] += 1
    return np.where(counts[:, None] > 0, sums / np.maximum(counts, 1)[:, None], np.nan), valued


@method("shapley", "causal", "the head's fair share in the right answer's log P: what it adds, averaged over orders of joining")
def shapley(
    subject: Subject, items: Sequence[Item], *, seed: int, progress: Progress, budget: int = 4096, tolerance: float = 0.02
) -> Scores:
    """Score heads by their Shapley values for log P of the correct answer; each sample is a game, each head a player.

    `budget` is about the number of forwards (sample times set of heads); a small one covers only the first samples.
    """
    used, heads = select_correct(subject, items), subject.anatomy.heads

    def value(coalitions: Sequence[Coalition]) -> np.ndarray:
        return score_answers(subject, [(used[game], keep_members(subject, members)) for game, members in coalitions])[0]

    pairs = max(1, budget // (2 * len(heads)))
    draw = np.random.default_rng(seed)
    each, valued = shapley_values(value, len(heads), len(used), pairs, draw, tolerance, progress)
    played = [i for i in range(len(used)) if not np.isnan(each[i, 0])]
    facts = evidence([used[i] for i in played], items)
    return Scores.of_samples(each[played], **facts, orders=2 * pairs, coalitions=valued, tolerance=tolerance)


_DROPPED_SHARES = (0.0, 1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2)  # of the remaining heads that are dropped in one round


def plan_elimination(heads: int, samples: int, budget: int) -> list[int]:
    """Return how many heads to drop in each round until one is left: as few as the budget of forwards allows."""
    for share in _DROPPED_SHARES:
        rounds, left, cost = [], heads, 0
        while left > 1:
            rounds.append(min(left - 1, max(1, int(share * left))))
            cost += samples * (left + 1)  # each remaining head ablated once, and what is left at the end of the round
            left -= rounds[-1]
        if cost <= budget:
            break
    return rounds


@method("greedy", "causal", "how long the head survives when the least needed ones are dropped one after the other: the ceiling")
def greedy(subject: Subject, items: Sequence[Item], *, seed: int, progress: Progress, budget: int = 16384) -> Scores:
    """Score heads by backward elimination: the later a head is dropped, the higher its score.

    Each round ablates every remaining head once, on all samples, and drops the heads that cost the least log P: one in each
    round, or more where `budget` forwards do not suffice. Near ties depend on the last bits of log P, so one worker computes
    all rounds in the same batches.
    """
    (scores,) = map_samples(subject, partial(_eliminate, budget=budget), items, progress, whole=True)
    return scores


def _eliminate(subject: Subject, items: Sequence[Item], progress: Progress, budget: int) -> Scores:
    used, heads = select_correct(subject, items), subject.anatomy.heads
    rounds = plan_elimination(len(heads), len(used), budget)
    left, dropped, curve = list(range(len(heads))), list[int](), []
    for number, drops in enumerate(rounds):
        acts = [keep_members(subject, set(left) - {i}) for i in left]
        part = lambda share, number=number: progress((number + share) / len(rounds))  # noqa: E731
        log_p, _ = score_answers(subject, [(x, act) for x in used for act in acts], progress=part)
        order = np.argsort(-log_p.reshape(len(used), len(left)).mean(0), kind="stable")
        gone = [left[i] for i in order[:drops]]
        dropped += gone
        left = [i for i in left if i not in gone]
        log_p, right = score_answers(subject, [(x, keep_members(subject, left)) for x in used])
        curve.append({"heads": len(left), "log_p": float(log_p.mean()), "right": float(right.mean())})
    progress(1.0)
    values = np.zeros(len(heads))
    values[dropped + left] = np.arange(len(heads))
    return Scores(values, None, {**evidence(used, items), "dropped_at_once": max(rounds, default=0), "curve": curve})
