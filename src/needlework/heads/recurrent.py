"""The recurrent side of "which heads retrieve": each group left out, convolution and state cut, and as many groups at random."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from needlework.anatomy import Anatomy, Group, GroupKind, heads_of_share
from needlework.errors import NeedleworkError
from needlework.heads.answers import answer_tokens
from needlework.interventions import NONE, AblateRecurrent, AblateRecurrentGroups, Intervention
from needlework.requests import Request
from needlework.stats import Estimate, Floats, cluster_sums, gain, interval, resample, retained, wilson
from needlework.tasks.base import Item

if TYPE_CHECKING:
    from needlework.subject import Subject

Site = Literal["conv", "state", "memory"]
SITES: tuple[Site, ...] = ("conv", "state", "memory")
SHARES = (0.05, 0.10, 0.25)
DRAWS = 5
RETRIEVAL = "retrieval"
ENOUGH = 0.95  # of retrieval must be left for a side to be called not needed


@dataclass(frozen=True)
class Outcome:
    """The right answers of some samples under one intervention."""

    log_p: Floats  # [samples] natural logarithms of their probabilities
    said: Floats  # [samples] 1 where every token of it was the model's first choice


@dataclass(frozen=True)
class Ability:
    """One ability under everything that was done to the model."""

    name: str
    clusters: tuple[str, ...]  # of each sample
    outcomes: Mapping[str, Outcome]  # by what was done: "none", "2.7" (a group), "conv", "conv@2", "top 0.05", "random 0.05 3"

    def said(self, *done: str) -> Estimate:
        """The share of right answers; of several conditions all together, no narrower than Wilson's interval of the samples."""
        columns = [self.outcomes[x].said for x in done]
        mean, sure = self._mean(columns), wilson(float(np.mean(columns, 0).sum()), len(columns[0]))
        return sure if len(done) == 1 else replace(mean, low=min(mean.low, sure.low), high=max(mean.high, sure.high))

    def retained(self, done: str) -> Estimate:
        """The share of the untouched model's right answers that is left."""
        return retained(self.outcomes[done].said, self.outcomes["none"].said, self.clusters)

    def drop(self, *done: str) -> Estimate:
        """Nats of log-likelihood that the right answers lose."""
        return self._mean([self.outcomes["none"].log_p - self.outcomes[x].log_p for x in done])

    def gap(self, top: str, random: Sequence[str]) -> Estimate:
        """How many more right answers are left with random groups silenced than with the top ones, paired by sample."""
        return gain(np.mean([self.outcomes[x].said for x in random], 0), self.outcomes[top].said, self.clusters)

    def drops(self, groups: Sequence[Group]) -> Floats:
        """[samples, groups]: what each sample loses without each group."""
        untouched = self.outcomes["none"].log_p
        return np.stack([untouched - self.outcomes[_name(group)].log_p for group in groups], 1)

    def _mean(self, columns: Sequence[Floats]) -> Estimate:
        """The mean over samples and columns; clusters of samples are resampled whole."""
        each = np.mean(np.stack(columns), 0)
        sums = resample(cluster_sums(self.clusters, [each]))
        low, high = interval(sums[:, 0] / sums[:, 1])
        return Estimate(float(each.mean()), low, high, len(each))


@dataclass(frozen=True)
class RecurrentSide:
    """What a model's retrieval, and other abilities beside it, owe to its recurrent side."""

    groups: tuple[Group, ...]
    kinds: tuple[GroupKind, ...]
    layers: tuple[int, ...]
    abilities: tuple[Ability, ...]  # retrieval first
    interventions: Mapping[str, str]  # what was done -> its text; of "top" conditions, one for each half of the samples
    sizes: Mapping[float, int]  # share of the groups -> how many these are
    draws: int
    refused: Mapping[str, str]  # site -> why it cannot be cut in this model

    @property
    def retrieval(self) -> Ability:
        return self.abilities[0]

    @property
    def sites(self) -> tuple[Site, ...]:
        return tuple(site for site in SITES if site not in self.refused)

    @cached_property
    def ranking(self) -> tuple[Group, ...]:
        """Groups from the one that retrieval loses most without to the one that it loses least without."""
        return _ranked(self.groups, self.retrieval.drops(self.groups))

    def random(self, share: float) -> list[str]:
        return [f"random {share} {draw}" for draw in range(self.draws)]

    @property
    def segregated(self) -> tuple[str, str]:
        """(yes, no or open; why): whether retrieval does without the few recurrent groups that matter most to it.

        yes: with the smallest share of top groups silenced, at least 95 % of retrieval is left for certain, and so it is with
        every kind of memory cut. no: less than that is left for certain, and more is left without as many random groups.
        """
        share = min(self.sizes)
        left, gap = self.retrieval.retained(f"top {share}"), self.retrieval.gap(f"top {share}", self.random(share))
        said = f"without the top {self.sizes[share]} of {len(self.groups)} groups {left.text()} of retrieval is left"
        if left.high < ENOUGH and gap.low > 0:
            return "no", f"{said}; without as many at random {gap.text()} more answers are right"
        needed = [site for site in self.sites if self.retrieval.retained(site).low < ENOUGH]
        if left.low >= ENOUGH and not needed:
            return "yes", f"{said}, and no kind of recurrent memory is needed for it"
        return "open", said + (f"; but it needs the recurrent memory ({', '.join(needed)})" if needed else "")

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON: figures of each condition, and what each group's loss costs each sample."""
        word, why = self.segregated
        return {
            "groups": [list(group) for group in self.groups],
            "kinds": list(self.kinds),
            "ranking": [list(group) for group in self.ranking],
            "sizes": {str(share): count for share, count in self.sizes.items()},
            "refused": dict(self.refused),
            "interventions": dict(self.interventions),
            "segregated": {"word": word, "why": why},
            "abilities": {
                ability.name: {
                    "samples": len(ability.clusters),
                    "conditions": {done: _figures(ability, done) for done in ability.outcomes},
                    "gaps": {str(share): _plain(ability.gap(f"top {share}", self.random(share))) for share in self.sizes},
                    "drops": ability.drops(self.groups).round(5).tolist(),
                }
                for ability in self.abilities
            },
        }

    def text(self) -> str:
        """For people: `needlework.heads.recurrent_views` has it as a table and as a picture, too."""
        from needlework.heads.recurrent_views import text

        return text(self)


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


def _name(group: Group) -> str:
    return f"{group.layer}.{group.index}"


def _conditions(
    anatomy: Anatomy, sizes: Mapping[float, int], seed: int, draws: int
) -> tuple[dict[str, Intervention], dict[str, str]]:
    """All that is done to the model before any ranking is known, and the cuts that it refuses, with reasons."""
    done: dict[str, Intervention] = {"none": NONE}
    done |= {_name(group): AblateRecurrentGroups(groups=(group,)) for group in anatomy.groups}
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


def _ranked(groups: Sequence[Group], drops: Floats) -> tuple[Group, ...]:
    order = np.argsort(-drops.mean(0), kind="stable")
    return tuple(groups[i] for i in order)


def _top_conditions(
    groups: Sequence[Group],
    sizes: Mapping[float, int],
    found: Mapping[str, Answers],
    halves: tuple[list[int], list[int]],
    samples: Mapping[str, Sequence[Item]],
) -> tuple[dict[str, Intervention], list[tuple[str, int, str]]]:
    """Top groups as each half of the retrieval samples ranks them, and as all do; and who is asked under which."""

    def ranked(some: Sequence[int]) -> tuple[Group, ...]:
        drops = [[found["none"][i][0] - found[_name(group)][i][0] for group in groups] for i in some]
        return _ranked(groups, np.array(drops))

    orders = {"first half": ranked(halves[0]), "second half": ranked(halves[1]), "all": ranked([*halves[0], *halves[1]])}
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


def _plain(estimate: Estimate) -> dict[str, float]:
    return {"value": estimate.value, "low": estimate.low, "high": estimate.high, "n": estimate.n}


def _figures(ability: Ability, done: str) -> dict[str, Any]:
    return {"said": _plain(ability.said(done)), "drop": _plain(ability.drop(done))}


def each_group(side: RecurrentSide) -> Iterator[tuple[Group, Estimate]]:
    """Groups with what retrieval loses without them, in the order of the ranking."""
    return ((group, side.retrieval.drop(_name(group))) for group in side.ranking)
