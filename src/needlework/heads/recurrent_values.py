"""What a model's abilities owe to its recurrent side, as values: answers under everything that was done, and what follows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from needlework.anatomy import Group, GroupKind
from needlework.stats import Estimate, Floats, cluster_sums, gain, interval, resample, retained, wilson

Site = Literal["conv", "state", "memory"]
SITES: tuple[Site, ...] = ("conv", "state", "memory")
SHARES = (0.05, 0.10, 0.25)
RETRIEVAL = "retrieval"
TESTABLE = 0.5  # of the samples must the untouched model answer right, for certain
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
        return np.stack([untouched - self.outcomes[name_of(group)].log_p for group in groups], 1)

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
    attention_heads: int

    @property
    def retrieval(self) -> Ability:
        return self.abilities[0]

    @property
    def sites(self) -> tuple[Site, ...]:
        return tuple(site for site in SITES if site not in self.refused)

    @cached_property
    def ranking(self) -> tuple[Group, ...]:
        """Groups from the one that retrieval loses most without to the one that it loses least without."""
        return ranked(self.groups, self.retrieval.drops(self.groups))

    def random(self, share: float) -> list[str]:
        return [f"random {share} {draw}" for draw in range(self.draws)]

    @property
    def segregated(self) -> tuple[str, str]:
        """(a word, why): whether retrieval does without the few recurrent groups that matter most to it.

        yes: with the smallest share of top groups silenced, at least 95 % of retrieval is left for certain, and so it is with
        every kind of memory cut. no: less than that is left for certain, and more is left without as many random groups.
        open: neither. Of a model that finds hardly a needle, or that has no attention, nothing can be said.
        """
        share, untouched = min(self.sizes), self.retrieval.said("none")
        if not self.attention_heads:
            return "does not apply", "the model has no attention that retrieval could live in"
        if untouched.low < TESTABLE:
            return "not testable", f"untouched, the model answers {untouched.text()} of the samples right"
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
                    "random": {str(share): _figures(ability, *self.random(share)) for share in self.sizes},
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


def name_of(group: Group) -> str:
    return f"{group.layer}.{group.index}"


def ranked(groups: Sequence[Group], drops: Floats) -> tuple[Group, ...]:
    order = np.argsort(-drops.mean(0), kind="stable")
    return tuple(groups[i] for i in order)


def _plain(estimate: Estimate) -> dict[str, float]:
    return {"value": estimate.value, "low": estimate.low, "high": estimate.high, "n": estimate.n}


def _figures(ability: Ability, *done: str) -> dict[str, Any]:
    return {"said": _plain(ability.said(*done)), "drop": _plain(ability.drop(*done))}


def each_group(side: RecurrentSide) -> Iterator[tuple[Group, Estimate]]:
    """Groups with what retrieval loses without them, in the order of the ranking."""
    return ((group, side.retrieval.drop(name_of(group))) for group in side.ranking)
