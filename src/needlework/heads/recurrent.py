"""Measure how retrieval depends on recurrent layers: ablate groups, cut convolution and state, compare top with random groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from needlework.anatomy import Anatomy, Group, GroupKind, heads_of_share
from needlework.errors import NeedleworkError
from needlework.heads.samples import score_answers, with_answers
from needlework.interventions import NONE, AblateRecurrent, AblateRecurrentGroups, Intervention
from needlework.measure import Progress, no_progress
from needlework.stats import Estimate, Floats, bootstrap_mean, gain, retained, wilson
from needlework.subject import Subject
from needlework.tables import to_text
from needlework.tasks.base import Item

if TYPE_CHECKING:
    import pandas

Site = Literal["conv", "state", "memory"]
SITES: tuple[Site, ...] = ("conv", "state", "memory")
SHARES = (0.05, 0.10, 0.25)
DRAWS = 5
RETRIEVAL = "retrieval"
TESTABLE = 0.5  # least accuracy without intervention (lower bound) for a verdict
ENOUGH = 0.95  # retained share of retrieval from which on an ablated part counts as not needed


@dataclass(frozen=True)
class Outcome:
    """Scores of the correct answers of all samples under one condition."""

    log_p: Floats  # [samples] log-likelihood in nats
    right: Floats  # [samples] 1 where greedy decoding gives the answer


@dataclass(frozen=True)
class Ability:
    """Results of one ability under all conditions."""

    name: str
    clusters: tuple[str, ...]  # cluster of each sample
    outcomes: Mapping[str, Outcome]  # by condition: "none", "2.7" (a group), "conv", "conv@2", "top 0.05", "random 0.05 3"

    def accuracy(self, *done: str) -> Estimate:
        """Estimate accuracy; the mean over several conditions has an interval at least as wide as Wilson's for the samples."""
        each = np.mean([self.outcomes[x].right for x in done], 0)
        mean, sure = bootstrap_mean(each, self.clusters), wilson(float(each.sum()), len(each))
        return sure if len(done) == 1 else replace(mean, low=min(mean.low, sure.low), high=max(mean.high, sure.high))

    def retained(self, done: str) -> Estimate:
        """Estimate the share of the baseline accuracy that is retained under a condition."""
        return retained(self.outcomes[done].right, self.outcomes["none"].right, self.clusters)

    def loss(self, *done: str) -> Estimate:
        """Estimate the mean loss of log-likelihood of the correct answers under the conditions, in nats."""
        each = np.mean([self.outcomes["none"].log_p - self.outcomes[x].log_p for x in done], 0)
        return bootstrap_mean(each, self.clusters)

    def gap(self, top: str, random: Sequence[str]) -> Estimate:
        """Estimate accuracy with random groups ablated minus accuracy with the top groups ablated, paired by sample."""
        return gain(np.mean([self.outcomes[x].right for x in random], 0), self.outcomes[top].right, self.clusters)

    def losses(self, groups: Sequence[Group]) -> Floats:
        """Return the loss of log-likelihood of each sample with each group ablated, [samples, groups]."""
        untouched = self.outcomes["none"].log_p
        return np.stack([untouched - self.outcomes[name_of(group)].log_p for group in groups], 1)


@dataclass(frozen=True)
class RecurrentSide:
    """Retrieval and other abilities of a model under ablations of its recurrent side.

    Attributes:
        groups: All groups of the recurrent layers.
        kinds: What a group is: heads, blocks or channels.
        layers: Recurrent layers, by the model's own index.
        abilities: Results of each ability, retrieval first.
        interventions: Condition -> text of the intervention; "top" ones by the samples that rank them.
        sizes: Share of the groups -> number of groups.
        draws: Number of random sets of each size.
        refused: Site -> reason why this model does not support the cut.
        attention_heads: Number of attention heads.
    """

    groups: tuple[Group, ...]
    kinds: tuple[GroupKind, ...]
    layers: tuple[int, ...]
    abilities: tuple[Ability, ...]
    interventions: Mapping[str, str]
    sizes: Mapping[float, int]
    draws: int
    refused: Mapping[str, str]
    attention_heads: int

    @property
    def retrieval(self) -> Ability:
        return self.abilities[0]

    @property
    def sites(self) -> tuple[Site, ...]:
        return tuple(site for site in SITES if site not in self.refused)

    @cached_property
    def ranking(self) -> tuple[Group, ...]:
        """Groups by the log P that retrieval loses without them, largest loss first."""
        return rank_groups(self.groups, self.retrieval.losses(self.groups))

    def group_losses(self) -> list[tuple[Group, Estimate]]:
        """Return groups in the order of the ranking, each with the log P that retrieval loses without it."""
        return [(group, self.retrieval.loss(name_of(group))) for group in self.ranking]

    def frame(self) -> pandas.DataFrame:
        """Return one row per group, in the order of the ranking: the log P that retrieval loses without it, in nats."""
        import pandas

        rows = [(*group, drop.value, drop.low, drop.high) for group, drop in self.group_losses()]
        return pandas.DataFrame(rows, columns=["layer", "group", "loss", "low", "high"])

    def plot(self, ax: Any = None) -> Any:
        """Draw the log P that retrieval loses without each group as a heat map, and return the matplotlib axes."""
        from needlework.heads.output import draw_group_map
        from needlework.plots import new_axes

        ax = new_axes(ax, 6.0, 0.35 * len(self.layers) + 1.2)
        draw_group_map(self, ax)
        return ax

    def _repr_html_(self) -> str:
        from needlework.tables import Table

        word, why = self.segregated
        return Table.from_frame(self.frame(), f"segregated: {word} ({why})", most=10).to_html()

    def random(self, share: float) -> list[str]:
        return [f"random {share} {draw}" for draw in range(self.draws)]

    @property
    def segregated(self) -> tuple[str, str]:
        """Verdict and reason: whether retrieval does not depend on its most important recurrent groups.

        "yes": with the smallest share of top groups ablated, and with each kind of memory cut, the lower bound of the retained
        share is at least 95 %. "no": its upper bound is below 95 % with the top groups ablated, and accuracy is higher with as
        many random groups ablated (lower bound above 0). "open": neither. "not testable": the model retrieves too little.
        "does not apply": the model has no attention heads.
        """
        share, untouched = min(self.sizes), self.retrieval.accuracy("none")
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
        """Return all results, JSON-compatible: estimates of each condition, and each sample's loss without each group."""

        def estimates(ability: Ability, *done: str) -> dict[str, Any]:
            return {"said": ability.accuracy(*done).to_dict(), "drop": ability.loss(*done).to_dict()}

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
                    "conditions": {done: estimates(ability, done) for done in ability.outcomes},
                    "random": {str(share): estimates(ability, *self.random(share)) for share in self.sizes},
                    "gaps": {str(share): ability.gap(f"top {share}", self.random(share)).to_dict() for share in self.sizes},
                    "drops": ability.losses(self.groups).round(5).tolist(),
                }
                for ability in self.abilities
            },
        }

    def text(self) -> str:
        """Return the tables of `needlework.heads.output` as text."""
        from needlework.heads.output import recurrent_table

        return to_text(recurrent_table(self), 160)


def name_of(group: Group) -> str:
    return f"{group.layer}.{group.index}"


def rank_groups(groups: Sequence[Group], drops: Floats) -> tuple[Group, ...]:
    """Return groups by their mean loss over samples, largest first; drops: [samples, groups]."""
    return tuple(groups[i] for i in np.argsort(-drops.mean(0), kind="stable"))


def recurrent_side(
    subject: Subject,
    items: Sequence[Item],
    *,
    beside: Mapping[str, Sequence[Item]] | None = None,
    seed: int = 0,
    draws: int = DRAWS,
    shares: Sequence[float] = SHARES,
    progress: Progress = no_progress,
) -> RecurrentSide:
    """Measure a model with each recurrent group ablated, its memory cut, and its top groups or as many random ones ablated.

    Args:
        items: Samples of a retrieval task.
        beside: Samples of other abilities, measured under the same conditions.
        seed: Seed of random groups and of the split into halves.
        draws: Number of random sets of each size.
        shares: Shares of the groups that are ablated as top and as random sets. Each half of the retrieval samples is measured
            without the top groups that the other half ranks, so that no sample ranks for itself.
    """
    anatomy = subject.anatomy
    if not anatomy.groups:
        reasons = {part.no_groups_reason for _, part in anatomy.recurrent_parts()} | {anatomy.no_mixer_reason}
        why = "; ".join(sorted(reasons - {""})) or "it has no separate recurrent layers"
        raise NeedleworkError(f"{anatomy.architecture} has no recurrent groups to leave out: {why}")
    if len(items) < 2 or draws < 1 or not shares or not all(0 < share < 1 for share in shares):
        raise NeedleworkError("give at least two samples, one random draw and shares of the groups between 0 and 1")
    sizes = {share: heads_of_share(share, len(anatomy.groups)) for share in sorted(shares)}
    clusters = sorted({item.cluster for item in items})
    shuffled = np.random.default_rng([seed, len(clusters)]).permutation(len(clusters))
    second = {clusters[i] for i in shuffled[1::2]}
    if not second:
        raise NeedleworkError("all samples are of one cluster, so no ranking can be tried on other samples; give more")
    halves = [[i for i, item in enumerate(items) if (item.cluster in second) == half] for half in (False, True)]
    conditions, refused = _conditions(anatomy, sizes, seed, draws)
    samples = {name: with_answers(subject, some) for name, some in {RETRIEVAL: items, **(beside or {})}.items()}
    found: dict[str, dict[str, Outcome]] = {name: {} for name in samples}
    count = sum(map(len, samples.values()))
    done, total = 0, count * (len(conditions) + len(sizes))

    def run(trials: Sequence[tuple[str, int, str, Intervention]]) -> None:
        """Run trials (ability, sample, condition, intervention) and keep their outcomes."""
        nonlocal done
        asked = [(samples[name][i], act) for name, i, _, act in trials]
        scores = score_answers(subject, asked, progress=lambda share: progress((done + share * len(trials)) / total))
        done += len(trials)
        for (name, i, condition, _), log_p, right in zip(trials, *scores, strict=True):
            outcome = found[name].setdefault(condition, Outcome(*np.zeros((2, len(samples[name])))))
            outcome.log_p[i], outcome.right[i] = log_p, right

    run([(name, i, word, act) for word, act in conditions.items() for name, some in samples.items() for i in range(len(some))])
    abilities = tuple(Ability(name, tuple(x.item.cluster for x in some), found[name]) for name, some in samples.items())
    drops = abilities[0].losses(anatomy.groups)
    rankers = {"first half": halves[0], "second half": halves[1], "all": [*halves[0], *halves[1]]}
    orders = {who: rank_groups(anatomy.groups, drops[some]) for who, some in rankers.items()}
    trials: list[tuple[str, int, str, Intervention]] = []
    tops: dict[str, str] = {}
    for share, size in sizes.items():
        acts = {who: AblateRecurrentGroups(groups=order[:size]) for who, order in orders.items()}
        tops |= {f"top {share}, ranked by {who}": str(act) for who, act in acts.items()}
        for half, other in zip(halves, ("second half", "first half"), strict=True):
            trials += [(RETRIEVAL, i, f"top {share}", acts[other]) for i in half]
        for name, some in samples.items():
            trials += [(name, i, f"top {share}", acts["all"]) for i in range(len(some)) if name != RETRIEVAL]
    run(trials)
    return RecurrentSide(
        groups=anatomy.groups,
        kinds=tuple(sorted({part.group_kind for _, part in anatomy.recurrent_parts()})),
        layers=tuple(layer for layer, _ in anatomy.recurrent_parts()),
        abilities=abilities,
        interventions={word: str(act) for word, act in conditions.items()} | tops,
        sizes=sizes,
        draws=draws,
        refused=refused,
        attention_heads=len(anatomy.heads),
    )


def _conditions(
    anatomy: Anatomy, sizes: Mapping[float, int], seed: int, draws: int
) -> tuple[dict[str, Intervention], dict[str, str]]:
    """Return all conditions that need no ranking, and the cuts that the model does not support, with reasons."""
    found: dict[str, Intervention] = {"none": NONE}
    found |= {name_of(group): AblateRecurrentGroups(groups=(group,)) for group in anatomy.groups}
    refused: dict[str, str] = {}
    for site in SITES:
        try:
            AblateRecurrent(site=site).check(anatomy)
        except NeedleworkError as error:
            refused[site] = str(error)
            continue
        found[site] = AblateRecurrent(site=site)
        found |= {f"{site}@{layer}": AblateRecurrent(site=site, layers=(layer,)) for layer, _ in anatomy.recurrent_parts()}
    for share, count in sizes.items():
        for draw in range(draws):
            chosen = np.random.default_rng([seed, count, draw]).choice(len(anatomy.groups), count, replace=False)
            found[f"random {share} {draw}"] = AblateRecurrentGroups(groups=tuple(anatomy.groups[i] for i in chosen))
    return found, refused
