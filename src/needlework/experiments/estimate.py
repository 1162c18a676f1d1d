"""Estimate a plan before it runs: trials, prefills, samples for each rule, time, memory, and hardware that fits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from needlework.analysis.power import CHANCE, POWER
from needlework.analysis.reader import planned
from needlework.analysis.verdicts import RULES, verdicts
from needlework.engine.budget import default_limit
from needlework.experiments import progress
from needlework.experiments.models import ModelSource, PublicModels
from needlework.experiments.plan import Plan
from needlework.experiments.provenance import describe_experiments
from needlework.experiments.ray_executor import Cluster
from needlework.experiments.trials import Trial, Work, chunked, expand_all, to_row
from needlework.model.load import torch_dtype
from needlework.requests import Answer, prepare
from needlework.stats import ONE_HAYSTACK
from needlework.tables import Table

_EXACT = 20_000  # trials; above that, prefills are counted on every n-th prompt
_ROWS = 256  # that decode together at most
LAPTOP_CORES, LAPTOP_BYTES = 8, 32e9
_SPARE = 1.15  # times the weights: room for caches and activations


@dataclass(frozen=True)
class Samples:
    """Sample size that one verdict rule gets for one model in a plan, and the size that it needs."""

    rule: int  # its number
    claim: str
    title: str
    model: str
    word: str  # not run | does not apply | "" if the rule is evaluated
    needed: int  # for the target power; 0: not computed
    given: int  # samples of the smallest condition
    one_haystack: bool = False  # all samples share one haystack (cluster), so there is no interval


def count_samples(plan: Plan, works: Sequence[Work]) -> list[Samples]:
    """Return sample sizes for each rule and model, with the same selection of trials as the verdicts use."""
    planned_rows = (
        replace(to_row(trial, Answer(finish="failed"), work.model.name, 0.0, ""), finish="stop")
        for work in works
        for trial in work.trials
    )
    models = {work.model.name: {"anatomy": work.model.anatomy.to_dict()} for work in works}
    frame = planned(planned_rows, models, describe_experiments(plan))
    judged = {(verdict.claim, verdict.model): verdict for verdict in verdicts(frame)}
    found = []
    for rule, verdict in [(rule, judged[rule.claim, model]) for rule in RULES for model in frame.models]:
        word = verdict.word if verdict.word in ("not run", "does not apply") else ""
        read = [point.estimate for point in verdict.points if point.judged]
        given = min((estimate.n for estimate in read), default=0)
        alone = any(estimate.why == ONE_HAYSTACK for estimate in (*read, verdict.estimate))
        chance = next((point.line for point in verdict.points if point.bound == "chance" and point.line), CHANCE)
        found.append(Samples(rule.number, rule.claim, rule.title, verdict.model, word, rule.needs(chance), given, alone))
    return found


def samples_text(found: Sequence[Samples]) -> list[str]:
    """Return one line per rule, then warnings about too few samples or haystacks."""
    lines, warnings = [], []
    for rule in RULES:
        of_rule = [one for one in found if one.rule == rule.number]
        if judged := [one for one in of_rule if not one.word]:
            most = max(one.needed for one in judged)
            needs = f"needs {most:,} samples" if most else "needs a number of samples that is not computed"
            given = ", ".join(f"{one.model} {one.word or f'{one.given:,}'}" for one in of_rule)
            lines.append(f"rule {rule.number}, {rule.title}: {needs}; {given}")
    for one in found:
        warning = f"warning: rule {one.rule} ({one.title})"
        if not one.word and one.given < one.needed:
            warnings.append(
                f"{warning} reads {one.given:,} samples of {one.model} and needs {one.needed:,} to decide in {POWER:.0%} of all"
                " cases in which its claim is true; raise samples or limit"
            )
        if one.one_haystack:
            warnings.append(f"{warning} reads samples of {one.model} in {ONE_HAYSTACK}; raise samples, each of which has its own")
    return lines + warnings


@dataclass(frozen=True)
class ExperimentSize:
    """Counts of one experiment on one model."""

    experiment: str
    model: str
    trials: int
    conditions: int
    prefills: int  # that this experiment needs; some may be shared with other experiments
    prompt_tokens: int  # of the longest prompt


@dataclass(frozen=True)
class Total:
    """Counts and estimates of one model over all experiments; `questions` are trials with different ids."""

    model: str
    trials: int
    questions: int
    prefills: int
    seconds: float
    memory_bytes: int
    phases: dict[str, float]  # the seconds by what happens: loading, compiling, examining, asking, ranking heads, recording


@dataclass(frozen=True)
class Description:
    """The counts and estimates of a plan that `needlework plan` shows."""

    plan: str
    parts: tuple[ExperimentSize, ...]
    totals: tuple[Total, ...]
    notes: tuple[str, ...] = ()  # skipped conditions, duplicate samples
    samples: tuple[Samples, ...] = ()  # for each rule and model

    @property
    def seconds(self) -> float:
        return sum(total.seconds for total in self.totals)

    @property
    def memory_bytes(self) -> int:
        """Peak over the models, which are loaded one at a time."""
        return max(total.memory_bytes for total in self.totals)

    def output(self) -> list[Table | str]:
        """Return the table and the lines that `needlework plan` prints."""
        columns = ("experiment", "model", "conditions", "trials", "prefills", "longest prompt")
        table = Table(columns, left=columns[:2])
        for p in self.parts:
            counts = (p.conditions, p.trials, p.prefills, p.prompt_tokens)
            table.add_row(p.experiment, p.model, *(f"{count:,}" for count in counts))
        lines = [
            f"{t.model}: {t.questions:,} questions for {t.trials:,} trials, {t.prefills:,} prefills,"
            f" about {_time(t.seconds)} ({_phases_text(t.phases)}), about {t.memory_bytes / 2**20:,.0f} MiB"
            for t in self.totals
        ]
        trials, prefills = (sum(getattr(total, name) for total in self.totals) for name in ("trials", "prefills"))
        whole = f"in all {trials:,} trials, {prefills:,} prefills, about {_time(self.seconds)}"
        memory = f"about {self.memory_bytes / 2**20:,.0f} MiB"
        return [table, "\n".join([*lines, *self.notes, *samples_text(self.samples), f"{whole}, {memory}"])]


def describe(plan: Plan, source: ModelSource | None = None) -> Description:
    """Inspect every model, expand every trial and estimate the costs; no weights are loaded and nothing is written."""
    source = source or PublicModels()
    works = expand_all(plan, source)
    notes = [note for work in works for note in work.skipped]
    repeated = [(work.repeated, work.model.name) for work in works if work.repeated]
    notes += [f"{count} samples of {name} are the same question twice and count once" for count, name in repeated]
    parts = []
    for work in works:
        for name in (experiment.name for experiment in plan.experiments):
            if trials := [trial for trial in work.trials if trial.experiment == name]:
                conditions = len({(trial.task.name, str(trial.intervention)) for trial in trials})
                longest = max(len(trial.item.prompt) for trial in trials)
                prefills, _ = _count_prefills(work, trials)
                parts.append(ExperimentSize(name, work.model.name, len(trials), conditions, prefills, longest))
    totals = []
    for work, phases in zip(works, progress.phase_seconds(works), strict=True):
        model, asked = work.model, [same[0] for same in work.by_id().values()]
        longest, rows = max(trial.tokens for trial in asked), min(_ROWS, len(asked))
        memory = rows * (2 * longest * model.anatomy.kv_bytes_per_token + 2 * model.anatomy.state_bytes)
        memory += rows * 12 * model.anatomy.vocabulary  # logits of a step in fp32, and their sorting
        memory += model.costs.activations(longest) if model.costs else 0
        if model.model.loading.device == "cpu":
            memory = min(memory, default_limit(torch.device("cpu")))  # the engine admits no more rows than fit
        memory += model.anatomy.parameters * torch_dtype(model.model.loading.dtype).itemsize
        prefills, _ = _count_prefills(work, asked)
        phases["asking"] = estimate_seconds(work, speed_here(work))
        needed = {phase: seconds for phase, seconds in phases.items() if seconds}
        totals.append(Total(model.name, len(work.trials), len(asked), prefills, sum(needed.values()), memory, needed))
    return Description(plan.name, tuple(parts), tuple(totals), tuple(notes), tuple(count_samples(plan, works)))


def _count_prefills(work: Work, trials: Sequence[Trial]) -> tuple[int, int]:
    """Return how many prefills the trials need after sharing, and the number of their tokens."""
    prompts: dict[str, list[Trial]] = {}
    for trial in trials:
        prompts.setdefault(trial.prompt_id, []).append(trial)
    looked_at = list(prompts.values())[:: len(trials) // _EXACT + 1]
    readings: dict[tuple[object, ...], int] = {}
    for request in (request for group in looked_at for trial in group for request in trial.requests(work.any_rankings)):
        prepared = prepare(request, work.model.anatomy)
        size = prepared.prefill_tokens
        for prompt in (prepared.request.prompt, *prepared.twins.values()):
            readings[(prompt[:size], *prepared.group[1:])] = size
    scale = len(prompts) / len(looked_at)
    return round(len(readings) * scale), round(sum(readings.values()) * scale)


def speed_here(work: Work) -> progress.Speed:
    """Return the speed of this machine: measured for a large model on the CPU, else a typical value."""
    large_on_cpu = work.model.model.loading.device == "cpu" and work.model.anatomy.parameters >= progress.SMALL_PARAMETERS
    return progress.measured_speed(work.model) if large_on_cpu else progress.usual_speed(work.model)


def estimate_seconds(work: Work, speed: progress.Speed) -> float:
    """Estimate the seconds that one worker of this speed takes for a model's trials."""
    info, asked = work.model, [same[0] for same in work.by_id().values()]
    prefills, prompt_tokens = _count_prefills(work, asked)
    reading = progress.reading_flops(info, prompt_tokens) + prefills * progress.context_flops(
        info, prompt_tokens // max(1, prefills)
    )
    answering = sum(progress.chunk_seconds(info, speed, chunk, _ROWS) for chunk in chunked(work))
    return speed.reading(reading) + answering + progress.TRIAL_SECONDS * len(work.trials)


def _phases_text(phases: Mapping[str, float]) -> str:
    return ", ".join(f"{phase} {_time(max(1.0, seconds))}" for phase, seconds in phases.items())


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


@dataclass(frozen=True)
class ModelPlacement:
    """Sizes and times of one model of a plan. Hours are None where it does not fit."""

    model: str
    questions: int
    units: int  # batches, which workers can execute in parallel
    weights_bytes: int
    gpus_per_worker: int  # that hold its weights, of 80 GB each
    workers: int  # here
    here_hours: float | None
    laptop_hours: float | None
    gpu_hours: float
    gpus8_hours: float


@dataclass(frozen=True)
class Placement:
    """Estimates for all models of a plan: here, on a laptop and on GPUs."""

    plan: str
    here: str
    places: tuple[ModelPlacement, ...]

    def output(self) -> list[Table | str]:
        """Return the tables and the notes that `needlework run --dry-run` prints."""
        notes = (
            f"here: {self.here}",
            f"laptop: {LAPTOP_CORES} cores and {LAPTOP_BYTES / 1e9:.0f} GB. GPUs: A100s of 80 GB; times of one worker and of"
            " eight GPUs come from published peaks (`needlework explain hours`) and are not measured",
        )
        sizes = Table(("model", "questions", "units", "weights", "workers", "GPUs each"), left=("model",))
        times = Table(("time", "here", "laptop", "one GPU worker", "8 GPUs"), left=("time",))
        for p in self.places:
            weights = f"{p.weights_bytes / 1e9:,.1f} GB"
            sizes.add_row(p.model, f"{p.questions:,}", f"{p.units:,}", weights, f"{p.workers:,}", str(p.gpus_per_worker))
            times.add_row(p.model, *map(_hours, (p.here_hours, p.laptop_hours, p.gpu_hours, p.gpus8_hours)))
        return [sizes, "", times, "\n" + "\n".join(notes)]


def _hours(hours: float | None) -> str:
    if hours is None:
        return "no room"
    seconds = 3600 * hours
    if seconds < 1:
        return "below 1 s"
    return f"{seconds:.0f} s" if seconds < 60 else f"{hours:,.1f} h" if hours >= 1 else f"{60 * hours:.1f} min"


def place(plan: Plan, cluster: Cluster | None) -> Placement:
    """Estimate where each model fits and how long it takes there; no weights are loaded and nothing is written."""
    source = PublicModels(loaded_remotely=True)
    works = expand_all(plan, source)
    here = "this process" if cluster is None else f"Ray cluster {cluster.address}, {cluster.threads} threads a worker"
    counts = [1] * len(works) if cluster is None else cluster.room([work.model for work in works])
    return Placement(plan.name, here, tuple(map(_place, works, counts)))


def _place(work: Work, workers: int) -> ModelPlacement:
    info, units = work.model, len(list(chunked(work)))
    weights = info.costs.weights if info.costs else 4 * info.anatomy.parameters
    gpus = math.ceil(weights * _SPARE / progress.GPU_BYTES)
    loadings = (info.model.loading.replace(device=device) for device in ("cuda", "cpu"))
    on_gpu, on_cpu = (replace(work, model=replace(info, model=replace(info.model, loading=one))) for one in loadings)
    busy = min(workers, units)
    gpu_hours = estimate_seconds(on_gpu, progress.GPU) / 3600
    laptop = progress.usual_speed(on_cpu.model).times(LAPTOP_CORES / 2)
    fits = weights * _SPARE <= LAPTOP_BYTES
    return ModelPlacement(
        info.name,
        len(work.by_id()),
        units,
        weights,
        gpus,
        workers,
        estimate_seconds(work, speed_here(work)) / 3600 / busy if busy else None,
        estimate_seconds(on_cpu, laptop) / 3600 if fits else None,
        gpu_hours,
        gpu_hours / min(max(1, 8 // gpus), len(list(chunked(on_gpu)))),
    )
