"""From a plan to its Trials: each sample under each intervention, for each experiment that wants it. Free of torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from types import MappingProxyType
from typing import Any

from needlework.errors import NeedleworkError, did_you_mean
from needlework.experiments.extent import MOST_SAMPLES, Extent
from needlework.experiments.models import ModelInfo
from needlework.experiments.plan import Experiment, Grid, NamedTask, Plan, RankingSource
from needlework.interventions import NONE, Intervention, Ranking, SwapMemory
from needlework.interventions.acts import Phase
from needlework.interventions.attention import recorded, with_rankings
from needlework.interventions.ranking import Recorded
from needlework.interventions.text import expand as expand_text
from needlework.requests import Request, prepare, sample_key
from needlework.store import SEMANTICS_VERSION, digest
from needlework.tasks.base import Item, Mode

NO_RANKINGS: Mapping[Recorded, Ranking] = MappingProxyType({})
RowKey = tuple[str, str, str]  # experiment, task, trial id: a row of one model


@dataclass(frozen=True)
class Trial:
    """What is asked: one sample under one intervention, for one row. Trials with equal ids have one answer."""

    id: str
    prompt_id: str
    experiment: str
    task: NamedTask
    item: Item
    seed: int
    intervention: Intervention
    boundary: Phase
    max_new_tokens: int
    stop: frozenset[int]

    @property
    def mode(self) -> Mode:
        return self.task.task.mode

    @property
    def key(self) -> RowKey:
        return self.experiment, self.task.name, self.id

    @property
    def tokens(self) -> int:
        """How many tokens are read, at most."""
        return sum(len(r.prompt) + (sum(map(len, r.options)) or r.max_new_tokens) for r in self.requests())

    def requests(self, rankings: Mapping[Recorded, Ranking] = NO_RANKINGS) -> list[Request]:
        """One, unless the sample has several prompts. `rankings`: the orders of heads that its intervention waits for."""
        act = with_rankings(self.intervention, rankings)
        return [self._request(item, act) for item in (self.item, *self.item.also)]

    def _request(self, item: Item, act: Intervention) -> Request:
        prompt, options = item.prompt, () if self.mode == "generate" else item.options
        whole_text = self.mode == "perplexity" and not options  # scored from its second token on
        return Request(
            prompt=prompt[:1] if whole_text else prompt,
            intervention=act,
            max_new_tokens=self.max_new_tokens,
            stop=self.stop,
            spans={} if whole_text else item.spans,
            twins=item.twins,
            boundary=self.boundary,
            sample=sample_key(prompt),
            options=(prompt[1:],) if whole_text else options,
        )


@dataclass(frozen=True)
class Recording:
    """A task whose attention is recorded: all its samples, with nothing done to the model."""

    experiment: str
    task: str
    trials: tuple[Trial, ...]

    def content(self) -> str:
        """A hash of what is recorded, and how it is answered."""
        return digest(trial.id for trial in self.trials)


@dataclass(frozen=True)
class Ranked:
    """A ranking that some of a model's trials wait for: the samples whose answers are watched for it."""

    source: Recorded
    by: str
    trials: tuple[Trial, ...]
    ranking: Ranking | None = None  # it was read from a file

    @property
    def items(self) -> list[Item]:
        """The samples, each of which says how its answer ends."""
        return [replace(trial.item, ending=(trial.max_new_tokens, trial.stop)) for trial in self.trials]


@dataclass
class Work:
    """Everything that a plan asks of one model."""

    model: ModelInfo
    trials: list[Trial] = field(default_factory=list)
    recordings: list[Recording] = field(default_factory=list)
    rankings: dict[str, Ranked] = field(default_factory=dict)  # by their names in the plan
    skipped: list[str] = field(default_factory=list)  # what this model has no parts for, in words
    repeated: int = 0  # the same question twice in one task: asked and counted once

    @property
    def any_rankings(self) -> dict[Recorded, Ranking]:
        """An order of heads for each ranking that is to be recorded: whichever it will be, it costs the same."""
        heads = Ranking(order=tuple(self.model.anatomy.heads))
        return {ranked.source: heads for ranked in self.rankings.values()}

    def by_id(self) -> dict[str, list[Trial]]:
        """Trials that one answer serves."""
        groups: dict[str, list[Trial]] = {}
        for trial in self.trials:
            groups.setdefault(trial.id, []).append(trial)
        return groups


def item_digest(item: Item) -> str:
    """A hash of the tokens of a sample and of everything an intervention reads from it."""
    content: list[Any] = [
        list(item.prompt),
        {name: [list(part) for part in span] for name, span in item.spans.items()},
        {name: list(twin) for name, twin in item.twins.items()},
        [list(option) for option in item.options],
    ]
    return _hash(json.dumps(content, sort_keys=True, separators=(",", ":")))


def decoding(mode: Mode, max_new_tokens: int, boundary: Phase, stop: frozenset[int]) -> str:
    """How an answer is decoded, in words that are part of a trial's id. Scoring decodes nothing."""
    return f"generate {max_new_tokens} {boundary} {sorted(stop)}" if mode == "generate" else mode


def trial_id(model: ModelInfo, prompt_id: str, intervention: Intervention, decoded: str) -> str:
    """Equal ids mean equal answers: only what can change an answer goes in. Pinned by a golden test."""
    identity = model.identity()
    parts = [str(SEMANTICS_VERSION), *(identity[key] for key in sorted(identity)), prompt_id, str(intervention), decoded]
    if revision := sum(part.revision for part in intervention.parts):
        parts.append(f"revision {revision}")
    return _hash("\0".join(parts))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]


# [walk 2] docs/architecture.md
def expand(plan: Plan, model: ModelInfo) -> Work:
    """All trials of one model, in the order of the plan. Raises a PlanError for whatever cannot be asked."""
    expander = _Expander(Work(model), plan.rankings)
    for experiment in plan.experiments:
        if model.name in experiment.models:
            expander.add(experiment)
    return expander.work


class _Expander:
    def __init__(self, work: Work, sources: Mapping[str, RankingSource]) -> None:
        self.work, self.model, self.sources = work, work.model, sources
        self._extent = Extent()
        self._samples_of: dict[tuple[str, str, int], list[tuple[Item, str]]] = {}

    def add(self, experiment: Experiment) -> None:
        chosen = self._interventions(experiment)
        self._extent.add(experiment, self.model.name, len(chosen))
        for named in experiment.tasks:
            try:
                new_tokens, stop = self._ending(named, experiment.max_new_tokens)
                samples = [(seed, self._samples(named, seed)) for seed in experiment.seeds]
            except NeedleworkError as error:
                if not named.optional:
                    raise
                self.work.skipped.append(f"{experiment.name}: left out: {error}")
                continue
            trials: dict[str, Trial] = {}
            for seed, every in samples:
                items = _spread(every, experiment.limit)
                if not items:
                    raise named.error(f"task {named.name!r} has no samples for {self.model.name} with seed {seed}")
                for number, (item, prompt_id) in enumerate(items):
                    for text, act in chosen:
                        most, ends = item.ending or (new_tokens, stop)
                        decoded = decoding(named.task.mode, most, experiment.boundary, frozenset() if item.ending else stop)
                        name = trial_id(self.model, prompt_id, act, decoded)
                        where = (experiment.name, named, item, seed, act, experiment.boundary)
                        trial = Trial(name, prompt_id, *where, most, ends)
                        if number == 0:
                            self._check(text, trial)
                        self.work.repeated += name in trials
                        trials.setdefault(name, trial)
            self.work.trials += trials.values()
            if experiment.observe:
                self._record(experiment, named, list(trials.values()))

    def _record(self, experiment: Experiment, named: NamedTask, trials: Sequence[Trial]) -> None:
        untouched = tuple(trial for trial in trials if not trial.intervention.parts)
        if named.task.mode != "generate" or not untouched:
            raise experiment.error("observe: true needs tasks that generate, and none among the interventions")
        if self.model.anatomy.attention_layers:
            self.work.recordings.append(Recording(experiment.name, named.name, untouched))

    def _interventions(self, experiment: Experiment) -> list[tuple[Grid, Intervention]]:
        """What the experiment does, without what this model has no parts for."""
        chosen: dict[str, tuple[Grid, Intervention]] = {}
        for text in experiment.grids:
            try:
                for act in expand_text(text.text, self.model.sizes):
                    if missing := self._missing(act):
                        note = f"{experiment.name}: {self.model.name} has no {missing}, so {act} is left out"
                        if note not in self.work.skipped:
                            self.work.skipped.append(note)
                    else:
                        act = self._ranked(act, experiment)
                        chosen.setdefault(str(act), (text, act))
            except NeedleworkError as error:
                raise text.error(f"for {self.model.name}: {error}") from None
        if not chosen:
            raise experiment.error(
                f"{self.model.name} has no parts that any intervention of {experiment.name!r} acts on; leave this model out"
            )
        return list(chosen.values())

    def _ranked(self, act: Intervention, experiment: Experiment) -> Intervention:
        """The intervention with the content of the rankings that it names: what they come from is known, their order not yet."""
        named: dict[Recorded, Ranking | Recorded] = {}
        for by in recorded(act):
            source = self.sources.get(by.name)
            if source is None:
                raise NeedleworkError(
                    f"there is no ranking {by.name!r} in this plan; {did_you_mean(by.name, list(self.sources))}"
                )
            if shared := sorted(set(source.seeds) & set(experiment.seeds)):
                raise NeedleworkError(
                    f"the ranking {by.name!r} is recorded on seed {shared[0]}, which is judged here; take others"
                )
            if by.name not in self.work.rankings:
                self.work.rankings[by.name] = self._watched(source)
            named[by] = self.work.rankings[by.name].source
        return with_rankings(act, named)

    def _watched(self, source: RankingSource) -> Ranked:
        """All samples of a ranking. Its content is that of their prompts, how they are answered, and what heads are ranked by."""
        if source.ranking is not None:
            source.ranking.check(self.model.anatomy, self.model.weights)
            content = digest([f"order {source.ranking.text()}"])[:12]
            return Ranked(Recorded(name=source.name, content=content), source.by, (), source.ranking)
        trials: dict[str, Trial] = {}
        for named in source.tasks:
            most, stop = self._ending(named)
            for seed in source.seeds:
                for item, prompt_id in _spread(self._samples(named, seed), source.limit):
                    new_tokens, ends = item.ending or (most, stop)
                    decoded = decoding(named.task.mode, new_tokens, "decode", ends)
                    watched = Trial(prompt_id, prompt_id, source.name, named, item, seed, NONE, "decode", new_tokens, ends)
                    trials.setdefault(f"{prompt_id} {decoded}", watched)
        if not trials:
            raise source.error(f"the ranking {source.name!r} has no samples for {self.model.name}")
        content = digest([f"by {source.by}", *trials])[:12]
        return Ranked(Recorded(name=source.name, content=content), source.by, tuple(trials.values()))

    def _missing(self, act: Intervention) -> str:
        anatomy = self.model.anatomy
        for part in act.parts:
            side = {"kv": "attention"}.get(part.half, part.half) if isinstance(part, SwapMemory) else part.side
            if side == "attention" and not anatomy.attention_layers:
                return "attention layers"
            if side == "recurrent" and not anatomy.recurrent_layers:
                return "recurrent layers"
        return ""

    def _ending(self, named: NamedTask, most: int | None = None) -> tuple[int, frozenset[int]]:
        try:
            new_tokens, stop = named.task.ending(self.model.tokenizer)
            return most or new_tokens, self.model.stops(stop)
        except NeedleworkError as error:
            raise named.error(f"task {named.name!r} for {self.model.name}: {error}") from None

    def _samples(self, named: NamedTask, seed: int) -> list[tuple[Item, str]]:
        key = (named.task.kind, named.task.model_dump_json(), seed)
        if key not in self._samples_of:
            anatomy = self.model.anatomy
            try:
                made = named.task.items(self.model.tokenizer, seed, anatomy.window, anatomy.max_tokens)
                items = list(islice(made, MOST_SAMPLES + 1))
                if len(items) > MOST_SAMPLES:
                    raise NeedleworkError(f"it makes more than {MOST_SAMPLES:,} samples of a seed; take fewer")
            except NeedleworkError as error:
                raise named.error(f"task {named.name!r} for {self.model.name}: {error}") from None
            self._samples_of[key] = [(item, item.digest or item_digest(item)) for item in items]
        return self._samples_of[key]

    def _check(self, text: Grid, trial: Trial) -> None:
        """An intervention against the first sample: what cannot be done to that cannot be done to the others of its kind."""
        try:
            for request in trial.requests(self.work.any_rankings):
                prepare(request, self.model.anatomy)
        except NeedleworkError as error:
            raise text.error(f"for {self.model.name}, sample {trial.item.id}: {error}") from None


def _spread(items: list[Any], limit: int | None) -> list[Any]:
    """At most `limit` of them, evenly over all: the first ones of a grid would be its shortest contexts."""
    if limit is None or len(items) <= limit:
        return items
    return [items[i * len(items) // limit] for i in range(limit)]
