"""The recurrent side of "which heads retrieve": each group left out, convolution and state cut, and as many groups at random."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from needlework.anatomy import Anatomy, Group, heads_of_share
from needlework.errors import NeedleworkError
from needlework.heads.answers import answer_tokens
from needlework.heads.recurrent_values import RETRIEVAL, SHARES, SITES, Ability, Outcome, RecurrentSide, name_of, ranked
from needlework.interventions import NONE, AblateRecurrent, AblateRecurrentGroups, Intervention
from needlework.requests import Request
from needlework.stats import Floats
from needlework.tasks.base import Item

if TYPE_CHECKING:
    from needlework.subject import Subject

DRAWS = 5


def recurrent_side(
    subject: Subject,
    items: Sequence[Item],
    *,
    beside: Mapping[str, Sequence[Item]] | None = None,
    seed: int = 0,
    draws: int = DRAWS,
    shares: Sequence[float] = SHARES,
    progress: Callable[[float], None] = lambda share: None,
) -> RecurrentSide:
    """Leave out each recurrent group, cut convolution, state and both, silence the top groups and as many at random.

    `items` are samples of a retrieval task, `beside` samples of other abilities, which are put through the same. Top groups of
    one half of the samples are those that the other half ranks highest. `progress` is told the share that is done.
    """
    anatomy = subject.anatomy
    _check(anatomy, items, draws, shares)
    sizes = {share: heads_of_share(share, len(anatomy.groups)) for share in sorted(shares)}
    halves = _halves(items, seed)
    conditions, refused = _conditions(anatomy, sizes, seed, draws)
    samples = {RETRIEVAL: list(items), **{name: list(some) for name, some in (beside or {}).items()}}
    trials = [(name, i, done) for done in conditions for name, some in samples.items() for i in range(len(some))]
    rest = sum(len(some) for some in samples.values()) * len(sizes)
    asking = _Asking(subject, samples, len(trials) + rest, progress)
    found = asking.ask(trials, conditions)
    tops, tested = _top_conditions(anatomy.groups, sizes, found[RETRIEVAL], halves, samples)
    found_tops = asking.ask(tested, tops)
    abilities = []
    for name, some in samples.items():
        outcomes = dict(found[name])
        for share in sizes:
            outcomes[f"top {share}"] = _joined(found_tops[name], share, len(some))
        abilities.append(Ability(name, tuple(item.cluster for item in some), _as_outcomes(outcomes)))
    return RecurrentSide(
        groups=anatomy.groups,
        kinds=tuple(sorted({part.group_kind for _, part in anatomy.recurrent_parts()})),
        layers=tuple(layer for layer, _ in anatomy.recurrent_parts()),
        abilities=tuple(abilities),
        interventions={done: str(act) for done, act in {**conditions, **tops}.items()},
        sizes=sizes,
        draws=draws,
        refused=refused,
        attention_heads=len(anatomy.heads),
    )


Answers = dict[int, tuple[float, float]]  # sample -> log-likelihood of its right answer, and whether it was said


class _Asking:
    """Samples asked under conditions, all in the engine's batches."""

    def __init__(
        self, subject: Subject, samples: Mapping[str, Sequence[Item]], total: int, progress: Callable[[float], None]
    ) -> None:
        self.subject, self.samples, self.total, self.progress, self.done = subject, samples, total, progress, 0
        self.right = {name: [answer_tokens(subject, item) for item in some] for name, some in samples.items()}

    def ask(
        self, trials: Sequence[tuple[str, int, str]], conditions: Mapping[str, Intervention]
    ) -> dict[str, dict[str, Answers]]:
        requests = [
            Request(self.samples[name][i].prompt, conditions[done], options=(self.right[name][i],)) for name, i, done in trials
        ]
        found: dict[str, dict[str, Answers]] = {name: {} for name in self.samples}
        for at, answer in self.subject.engine.run(requests):
            name, i, done = trials[at]
            if answer.error:
                raise NeedleworkError(f"{self.samples[name][i].id} under {conditions[done]}: {answer.error}")
            found[name].setdefault(done, {})[i] = (answer.totals[0], float(answer.greedy[0]))
            self.done += 1
            self.progress(self.done / self.total)
        return found


def _check(anatomy: Anatomy, items: Sequence[Item], draws: int, shares: Sequence[float]) -> None:
    if not anatomy.groups:
        reasons = sorted({part.no_groups_reason for _, part in anatomy.recurrent_parts()} | {anatomy.no_mixer_reason} - {""})
        why = "; ".join(reason for reason in reasons if reason) or "it has no separate recurrent layers"
        raise NeedleworkError(f"{anatomy.architecture} has no recurrent groups to leave out: {why}")
    if len(items) < 2 or draws < 1 or not shares or not all(0 < share < 1 for share in shares):
        raise NeedleworkError("give at least two samples, one random draw and shares of the groups between 0 and 1")


def _conditions(
    anatomy: Anatomy, sizes: Mapping[float, int], seed: int, draws: int
) -> tuple[dict[str, Intervention], dict[str, str]]:
    """All that is done to the model before any ranking is known, and the cuts that it refuses, with reasons."""
    done: dict[str, Intervention] = {"none": NONE}
    done |= {name_of(group): AblateRecurrentGroups(groups=(group,)) for group in anatomy.groups}
    refused: dict[str, str] = {}
    for site in SITES:
        try:
            AblateRecurrent(site=site).check(anatomy)
        except NeedleworkError as error:
            refused[site] = str(error)
            continue
        done[site] = AblateRecurrent(site=site)
        done |= {f"{site}@{layer}": AblateRecurrent(site=site, layers=(layer,)) for layer, _ in anatomy.recurrent_parts()}
    for share, count in sizes.items():
        for draw in range(draws):
            chosen = np.random.default_rng([seed, count, draw]).choice(len(anatomy.groups), count, replace=False)
            done[f"random {share} {draw}"] = AblateRecurrentGroups(groups=tuple(anatomy.groups[i] for i in chosen))
    return done, refused


def _halves(items: Sequence[Item], seed: int) -> tuple[list[int], list[int]]:
    """Samples in two halves that share no cluster."""
    clusters = sorted({item.cluster for item in items})
    order = np.random.default_rng([seed, len(clusters)]).permutation(len(clusters))
    second = {clusters[i] for i in order[1::2]}
    if not second:
        raise NeedleworkError("all samples are of one cluster, so no ranking can be tried on other samples; give more")
    return (
        [i for i, item in enumerate(items) if item.cluster not in second],
        [i for i, item in enumerate(items) if item.cluster in second],
    )


def _top_conditions(
    groups: Sequence[Group],
    sizes: Mapping[float, int],
    found: Mapping[str, Answers],
    halves: tuple[list[int], list[int]],
    samples: Mapping[str, Sequence[Item]],
) -> tuple[dict[str, Intervention], list[tuple[str, int, str]]]:
    """Top groups as each half of the retrieval samples ranks them, and as all do; and who is asked under which."""

    def order_of(some: Sequence[int]) -> tuple[Group, ...]:
        drops = [[found["none"][i][0] - found[name_of(group)][i][0] for group in groups] for i in some]
        return ranked(groups, np.array(drops))

    orders = {"first half": order_of(halves[0]), "second half": order_of(halves[1]), "all": order_of([*halves[0], *halves[1]])}
    tops: dict[str, Intervention] = {}
    trials = []
    for share, count in sizes.items():
        for who, order in orders.items():
            tops[f"top {share}, ranked by {who}"] = AblateRecurrentGroups(groups=order[:count])
        for half, other in zip(halves, ("second half", "first half"), strict=True):
            trials += [(RETRIEVAL, i, f"top {share}, ranked by {other}") for i in half]
        for name, some in samples.items():
            trials += [(name, i, f"top {share}, ranked by all") for i in range(len(some)) if name != RETRIEVAL]
    return tops, trials


def _joined(found: Mapping[str, Answers], share: float, count: int) -> Answers:
    """Every sample under the top groups that other samples ranked highest."""
    joined: Answers = {}
    for done, answers in found.items():
        if done.startswith(f"top {share},"):
            joined |= answers
    if len(joined) != count:
        raise RuntimeError(f"{len(joined)} of {count} samples were asked under the top groups")
    return joined


def _as_outcomes(found: Mapping[str, Answers]) -> dict[str, Outcome]:
    def column(answers: Answers, which: int) -> Floats:
        return np.array([answers[i][which] for i in range(len(answers))], dtype=np.float64)

    return {done: Outcome(column(answers, 0), column(answers, 1)) for done, answers in found.items()}
