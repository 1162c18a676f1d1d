"""Expand a plan into trials (each sample under each intervention), group them into chunks, and make rows of their answers."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os.path import commonprefix
from types import MappingProxyType
from typing import Any

from needlework.anatomy import Anatomy
from needlework.errors import NeedleworkError, did_you_mean
from needlework.experiments.models import CachedModels, DiskModels, ModelInfo, ModelSource, model_sizes, side_layers
from needlework.experiments.plan import Experiment, InterventionText, NamedTask, Plan, RankingSource
from needlework.interventions import NONE, Intervention, Ranking, SwapMemory
from needlework.interventions.acts import Phase
from needlework.interventions.base import expand as expand_text
from needlework.interventions.builtin import recorded, with_rankings
from needlework.interventions.ranking import Recorded
from needlework.requests import Answer, Request, prepare
from needlework.results import ANSWER_FINISH, SEMANTICS_VERSION, Row, digest
from needlework.results.rows import stored_facts
from needlework.tasks.base import Item, Mode

NO_RANKINGS: Mapping[Recorded, Ranking] = MappingProxyType({})
PlanRowKey = tuple[str, str, str]  # experiment, task, trial id: identifies a row of one model
SampleKey = tuple[str, int | None, int | None, str, str, int]  # tokenizer, window, most tokens, kind and fields of the task, seed
MadeSample = tuple[Item, str, str]  # with its hash, and the hash of what generation reads of it


@dataclass(frozen=True)
class Trial:
    """One sample under one intervention, which gives one row. Trials with equal ids share one answer."""

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
    def key(self) -> PlanRowKey:
        return self.experiment, self.task.name, self.id

    @property
    def tokens(self) -> int:
        """Upper bound of the tokens that all requests process: prompts, and options or new tokens."""
        return sum(len(r.prompt) + (sum(map(len, r.options)) or r.max_new_tokens) for r in self.requests())

    @property
    def prompt_tokens(self) -> int:
        return sum(len(item.prompt) for item in (self.item, *self.item.also))

    def requests(self, rankings: Mapping[Recorded, Ranking] = NO_RANKINGS) -> list[Request]:
        """Return the requests: one, unless the sample has several prompts. `rankings` fill in the intervention's rankings."""
        act = with_rankings(self.intervention, rankings)
        return self.item.requests(self.mode, act, (self.max_new_tokens, self.stop), self.boundary)


@dataclass(frozen=True)
class RecordedTask:
    """A task whose attention statistics are recorded over all its samples, without an intervention."""

    experiment: str
    task: str
    trials: tuple[Trial, ...]

    def content(self) -> str:
        """Return a hash of the recorded trials."""
        return digest(trial.id for trial in self.trials)


@dataclass(frozen=True)
class RankingSamples:
    """A head ranking that trials of a model depend on, and the samples that it is computed on."""

    source: Recorded
    by: str
    trials: tuple[Trial, ...]
    ranking: Ranking | None = None  # set if it comes from a file

    @property
    def items(self) -> list[Item]:
        """The samples, with the limit of new tokens and the stop tokens set on each."""
        return [replace(trial.item, ending=(trial.max_new_tokens, trial.stop)) for trial in self.trials]


@dataclass
class Work:
    """All trials, recordings and rankings of one model in a plan."""

    model: ModelInfo
    trials: list[Trial] = field(default_factory=list)
    recordings: list[RecordedTask] = field(default_factory=list)
    rankings: dict[str, RankingSamples] = field(default_factory=dict)  # by their names in the plan
    skipped: list[str] = field(default_factory=list)  # messages about skipped interventions and optional tasks
    repeated: int = 0  # duplicate trials within a task: run and counted once

    @property
    def any_rankings(self) -> dict[Recorded, Ranking]:
        """A placeholder order for each ranking: checks and cost estimates do not depend on the order."""
        heads = Ranking(order=tuple(self.model.anatomy.heads))
        return {ranked.source: heads for ranked in self.rankings.values()}

    def by_id(self) -> dict[str, list[Trial]]:
        """Group trials by id: the trials of a group share one answer."""
        groups: dict[str, list[Trial]] = {}
        for trial in self.trials:
            groups.setdefault(trial.id, []).append(trial)
        return groups


def item_digest(item: Item, with_options: bool = True) -> str:
    """Hash the tokens of a sample and all that interventions read from it: spans, twins and, by default, options."""
    content: list[Any] = [
        list(item.prompt),
        {name: [list(part) for part in span] for name, span in item.spans.items()},
        {name: list(twin) for name, twin in item.twins.items()},
        [list(option) for option in item.options] if with_options else [],
    ]
    return _hash(json.dumps(content, sort_keys=True, separators=(",", ":")))


def decoding(mode: Mode, max_new_tokens: int, boundary: Phase, stop: frozenset[int]) -> str:
    """Return the decoding settings as text for the trial id. For modes that only score, this is the mode."""
    return f"generate {max_new_tokens} {boundary} {sorted(stop)}" if mode == "generate" else mode


def trial_id(model: ModelInfo, prompt_id: str, intervention: Intervention, decoded: str) -> str:
    """Hash all that can change an answer, and nothing else: equal ids mean equal answers. Pinned by a golden test."""
    identity = model.identity()
    parts = [str(SEMANTICS_VERSION), *(identity[key] for key in sorted(identity)), prompt_id, str(intervention), decoded]
    if revision := sum(part.revision for part in intervention.parts):
        parts.append(f"revision {revision}")
    return _hash("\0".join(parts))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def expand_all(plan: Plan, source: ModelSource) -> list[Work]:
    """Return the trials of each model of a plan. Nothing is loaded or written.

    Interventions that a model cannot have are refused from the configurations of all models, before the weights of any are
    downloaded or hashed. Models with the same tokenizer share samples, and so do the calls of one CachedModels.
    """
    made = source.samples if isinstance(source, CachedModels) else {}
    for model in plan.models.values():
        if isinstance(source, DiskModels) and (anatomy := source.anatomy(model)):
            for experiment in plan.experiments:
                if model.name in experiment.models:
                    applicable(experiment, model.name, anatomy)
    return [expand(plan, source.inspect(model), made) for model in plan.models.values()]


# [walk 2] docs/architecture.md
def expand(plan: Plan, model: ModelInfo, made: dict[SampleKey, list[MadeSample]] | None = None) -> Work:
    """Return all trials of one model, in the order of the plan; raise PlanError for requests that are invalid.

    Args:
        made: Samples that were made before; those that are made are added.
    """
    expander = _Expander(Work(model), plan.rankings, {} if made is None else made)
    for experiment in plan.experiments:
        if model.name in experiment.models:
            expander.add(experiment)
    return expander.work


_SIDES = {"kv": "attention"}  # the side of a half of memory, where their names differ


def applicable(
    experiment: Experiment, model: str, anatomy: Anatomy
) -> tuple[list[tuple[InterventionText, Intervention]], list[str]]:
    """Return an experiment's interventions that act on this model, and a note for each that is left out.

    An intervention on a side that the model lacks is left out. One on heads, groups or layers that it lacks raises PlanError,
    and so does an experiment of which nothing remains.
    """
    chosen: dict[str, tuple[InterventionText, Intervention]] = {}
    notes: dict[str, None] = {}
    layers = {"attention": anatomy.attention_layers, "recurrent": anatomy.recurrent_layers}
    lacking = {side for side, indices in layers.items() if not indices}
    for text in experiment.grids:
        try:
            for act in expand_text(text.text, model_sizes(anatomy), side_layers(anatomy)):
                halves = (part.half if isinstance(part, SwapMemory) else part.side for part in act.parts)
                if missing := next((side for half in halves if (side := _SIDES.get(half, half)) in lacking), None):
                    notes[f"{experiment.name}: {model} has no {missing} layers, so {act} is left out"] = None
                else:
                    act.check(anatomy)
                    chosen.setdefault(str(act), (text, act))
        except NeedleworkError as error:
            hint = f"or leave {model} out of this experiment (models: ...)"
            raise text.error(f"experiment {experiment.name!r}, model {model!r}: {error}; {hint}") from None
    if not chosen:
        raise experiment.error(
            f"experiment {experiment.name!r}: {model} has no {' and no '.join(sorted(lacking))} layers, and each of the"
            f" interventions acts on such ({', '.join(grid.text for grid in experiment.grids)}); leave this model out"
        )
    return list(chosen.values()), list(notes)


class _Expander:
    """Expansion of a plan's experiments for one model; samples are generated once per task and seed."""

    def __init__(self, work: Work, sources: Mapping[str, RankingSource], made: dict[SampleKey, list[MadeSample]]) -> None:
        self.work, self.model, self.sources, self.made = work, work.model, sources, made
        self._counts = Counter[str]()
        self._samples_of: dict[tuple[str, str, int], list[tuple[Item, str]]] = {}
        self._prompt_ids: dict[str, str] = {}  # generate: digest without options -> id of the first such sample

    def add(self, experiment: Experiment) -> None:
        """Add the trials of an experiment: every sample under every intervention."""
        possible, skipped = applicable(experiment, self.model.name, self.model.anatomy)
        self.work.skipped += [note for note in skipped if note not in self.work.skipped]
        chosen = [(text, self._ranked(act, text, experiment)) for text, act in possible]
        self._check_limits(experiment, len(chosen))
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

    def _check_limits(self, experiment: Experiment, conditions: int) -> None:
        """Count samples, trials and prompt tokens of one more experiment; raise PlanError if a limit is exceeded."""
        for named in experiment.tasks:
            each = named.task.extent()
            if each is None:  # unknown in advance: `_samples` checks its limit while it generates them
                continue
            samples = each.samples * len(experiment.seeds)
            self._counts.update({"samples": samples, "trials": samples * conditions, "tokens of prompts": samples * each.tokens})
            for what, most in {"samples": MOST_SAMPLES, "trials": MOST_TRIALS, "tokens of prompts": MOST_PROMPT_TOKENS}.items():
                if (count := self._counts[what]) > most:
                    raise named.error(f"for {self.model.name}, the plan makes {count:,} {what}; the most is {most:,}: {_HINT}")

    def _record(self, experiment: Experiment, named: NamedTask, trials: Sequence[Trial]) -> None:
        """Add the recording of a task with `observe: true`, on its trials without intervention."""
        untouched = tuple(trial for trial in trials if not trial.intervention.parts)
        if named.task.mode != "generate" or not untouched:
            raise experiment.error("observe: true needs tasks that generate, and none among the interventions")
        if self.model.anatomy.attention_layers:
            self.work.recordings.append(RecordedTask(experiment.name, named.name, untouched))

    def _ranked(self, act: Intervention, text: InterventionText, experiment: Experiment) -> Intervention:
        """Return the intervention with the content hash of each ranking that it names; the orders are computed later."""
        named: dict[Recorded, Ranking | Recorded] = {}
        for by in recorded(act):
            source = self.sources.get(by.name)
            if source is None:
                raise text.error(f"there is no ranking {by.name!r} in this plan; {did_you_mean(by.name, list(self.sources))}")
            if shared := sorted(set(source.seeds) & set(experiment.seeds)):
                raise text.error(f"the ranking {by.name!r} is recorded on seed {shared[0]}, which is judged here; take others")
            if by.name not in self.work.rankings:
                try:
                    self.work.rankings[by.name] = self._watched(source)
                except NeedleworkError as error:
                    raise text.error(f"for {self.model.name}: {error}") from None
            named[by] = self.work.rankings[by.name].source
        return with_rankings(act, named)

    def _watched(self, source: RankingSource) -> RankingSamples:
        """Return a ranking with its samples. Its content hash covers prompts, decoding settings and the ranking method."""
        if source.ranking is not None:
            source.ranking.check(self.model.anatomy, self.model.weights)
            content = digest([f"order {source.ranking.text()}"])[:12]
            return RankingSamples(Recorded(name=source.name, content=content), source.by, (), source.ranking)
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
        return RankingSamples(Recorded(name=source.name, content=content), source.by, tuple(trials.values()))

    def _ending(self, named: NamedTask, most: int | None = None) -> tuple[int, frozenset[int]]:
        """Return the limit of new tokens and the stop tokens of a task."""
        try:
            new_tokens, stop = named.task.ending(self.model.tokenizer)
            return most or new_tokens, self.model.stops(stop)
        except NeedleworkError as error:
            raise named.error(f"task {named.name!r} for {self.model.name}: {error}") from None

    def _samples(self, named: NamedTask, seed: int) -> list[tuple[Item, str]]:
        """Return the samples of a task and seed with their prompt ids; equal tasks share them.

        A prompt id covers the options, which generation does not read. Generated samples that differ only in their options
        therefore get the id of the first one, so that they are run and counted once.
        """
        key = (named.task.kind, named.task.model_dump_json(), seed)
        if key not in self._samples_of:
            samples = []
            for item, prompt_id, read in self._make(named, seed):
                samples.append((item, self._prompt_ids.setdefault(read, prompt_id) if read else prompt_id))
            self._samples_of[key] = samples
        return self._samples_of[key]

    def _make(self, named: NamedTask, seed: int) -> list[MadeSample]:
        """Return the samples of a task and seed, each with its hash, and that without options if generation reads none."""
        anatomy, task, samples = self.model.anatomy, named.task, list[MadeSample]()
        key = (self.model.tokenizer_hash, anatomy.window, anatomy.max_tokens, task.kind, task.model_dump_json(), seed)
        if key in self.made:
            return self.made[key]
        try:
            for item in task.items(self.model.tokenizer, seed, anatomy.window, anatomy.max_tokens):
                read = "" if task.mode != "generate" or item.digest else item_digest(item, with_options=False)
                samples.append((item, item.digest or item_digest(item), read))
                if len(samples) > MOST_SAMPLES:
                    raise NeedleworkError(f"it makes more than {MOST_SAMPLES:,} samples of a seed; take fewer")
        except NeedleworkError as error:
            raise named.error(f"task {named.name!r} for {self.model.name}: {error}") from None
        self.made[key] = samples
        return samples

    def _check(self, text: InterventionText, trial: Trial) -> None:
        """Check an intervention on the first sample of a task and seed, so that it fails before the run and not in it."""
        try:
            for request in trial.requests(self.work.any_rankings):
                prepare(request, self.model.anatomy)
        except NeedleworkError as error:
            raise text.error(f"for {self.model.name}, sample {trial.item.id}: {error}") from None


def _spread(items: list[Any], limit: int | None) -> list[Any]:
    """Return at most `limit` items, evenly spaced: the first ones of a grid would be its shortest contexts."""
    if limit is None or len(items) <= limit:
        return items
    return [items[i * len(items) // limit] for i in range(limit)]


# Limits per model: all samples are generated before the first trial and stay in memory, at about 36 bytes per token.
MOST_SAMPLES, MOST_TRIALS, MOST_PROMPT_TOKENS = 250_000, 5_000_000, 1_000_000_000
_HINT = "take fewer seeds, samples, lengths or interventions, or part it into several plans with directories of their own"


# Limits of a chunk: trials that are sent to a worker as one batch. A resumed run executes an unfinished chunk again, so chunks
# are as small as throughput allows. On a CPU, more than about 32 rows hardly decode faster together: there, a chunk of that
# many trials ends once it takes about a minute.
CHUNK_TRIALS, CHUNK_FLOPS = 1024, 5e13
ENOUGH_TRIALS, ENOUGH_FLOPS = 32, 3e12
_STEM_PART = 8  # a shared prefix costs at most 1/8 of its chunk, unless the chunk would exceed a limit


def chunked(work: Work) -> Iterator[list[Trial]]:
    """Yield chunks of trials to execute as one batch, one trial per id.

    All interventions of a prompt are in one chunk, and prompts are sorted by shared prefix and length. A chunk ends before it
    exceeds CHUNK_TRIALS or CHUNK_FLOPS, unless one prompt alone does. A chunk with ENOUGH_TRIALS ends before it exceeds
    `enough_flops` (on a CPU ENOUGH_FLOPS), unless the prefill of its current shared prefix, which every chunk repeats, is more
    than 1/8 of its cost.

    Chunks depend on the plan alone, not on what is done already: a resumed run executes an unfinished chunk as a whole, so
    that batches, and with them all numbers, are those of an uninterrupted run.
    """
    enough_flops = ENOUGH_FLOPS if work.model.model.loading.device == "cpu" else CHUNK_FLOPS
    prompts: dict[tuple[str, str], list[Trial]] = {}
    for same in work.by_id().values():
        trial = same[0]
        how = decoding(trial.mode, trial.max_new_tokens, trial.boundary, trial.stop)
        prompts.setdefault((how, trial.prompt_id), []).append(trial)
    order = sorted(prompts.values(), key=lambda group: (group[0].mode, group[0].item.stem, len(group[0].item.prompt)))
    by_stem: dict[str, list[tuple[int, ...]]] = {}
    for group in order:
        by_stem.setdefault(group[0].item.stem, []).append(group[0].item.prompt)
    # the number of tokens that all prompts of a stem share; commonprefix takes any sequences
    begins = {stem: len(commonprefix(some)) if stem else 0 for stem, some in by_stem.items()}  # noqa: RUF071
    batch: list[Trial] = []
    flops = of_stem = 0.0  # of the batch; and of the shared prefix of its last samples
    for group in order:
        stem, each = group[0].item.stem, len(group) * 2.0 * work.model.anatomy.parameters
        again = bool(batch) and batch[-1].item.stem == stem
        cost = each * (group[0].tokens - (begins[stem] if again else 0))
        other = bool(batch) and batch[0].mode != group[0].mode  # generating and scoring are two passes
        large = len(batch) + len(group) > CHUNK_TRIALS or flops + cost > CHUNK_FLOPS
        enough = len(batch) >= ENOUGH_TRIALS and flops + cost > enough_flops
        if batch and (other or large or (enough and not (again and of_stem * _STEM_PART > flops))):
            yield batch
            batch, flops, again = [], 0.0, False
            cost = each * group[0].tokens
        batch += group
        flops += cost
        of_stem = of_stem if again else each * begins[stem]
    if batch:
        yield batch


# [walk 6] docs/architecture.md
def to_row(trial: Trial, answer: Answer, model: str, seconds: float, versions: str) -> Row:
    """Score an answer and return the row of its trial; an error of the task's scoring makes the row a failed one."""
    item, task = trial.item, trial.task.task
    facts = stored_facts(item, trial.mode)
    scores: dict[str, float] = {}
    finish, error, output = answer.finish, answer.error, answer.text
    if finish != "failed":
        try:
            output = task.said(item, answer)
            scores = dict(task.score(item, replace(answer, text=output)))
        except Exception as fault:  # a user's task may raise anything; the answer is kept
            facts[ANSWER_FINISH] = finish
            finish, error = "failed", f"the task could not score this: {type(fault).__name__}: {fault}"
    logprobs, margins = list(answer.logprobs), list(answer.margins)  # of each token, and of the logits at each decode step
    if trial.mode == "perplexity":
        logprobs = [value for option in answer.option_logprobs for value in option]
    elif trial.mode == "choices":
        logprobs = list(answer.totals)  # of each option; the margin is that of the best two
        best = sorted(logprobs, reverse=True)
        margins = [best[0] - best[1]] if len(best) > 1 else margins
    return Row(
        id=trial.id,
        experiment=trial.experiment,
        model=model,
        task=trial.task.name,
        sample=item.id,
        cluster=item.cluster,
        seed=trial.seed,
        intervention=str(trial.intervention),
        mode=trial.mode,
        prompt=item.prompt_text,
        prompt_tokens=max(len(part.prompt) for part in (item, *item.also)),
        target=item.target,
        output=output,
        finish=finish,
        error=error,
        seconds=seconds,
        spans={name: [list(part) for part in span] for name, span in item.spans.items()},
        facts=facts,
        scores=scores,
        logprobs=logprobs,
        margins=margins,
        receipt=answer.receipt.to_dict(),
        prompt_id=trial.prompt_id,
        versions=versions,
        kind=task.kind,
        ability=task.ability,
        boundary=trial.boundary if trial.mode == "generate" else "",
        scoring=trial.task.scoring,
        greedy=list(answer.greedy),
        tokens=list(answer.tokens),
    )
