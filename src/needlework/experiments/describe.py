"""What a plan would run: trials, prefills after sharing, and about how long and how much memory it takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from needlework.engine.budget import default_limit
from needlework.experiments import samples
from needlework.experiments.costs import (
    SMALL_PARAMETERS,
    TRIAL_SECONDS,
    Speed,
    chunk_seconds,
    context_flops,
    measured_speed,
    reading_flops,
    usual_speed,
)
from needlework.experiments.models import ModelSource, PublicModels
from needlework.experiments.plan import Plan
from needlework.experiments.run import chunked
from needlework.experiments.samples import Samples
from needlework.experiments.trials import Trial, Work, expand
from needlework.requests import prepare

_EXACT = 20_000  # questions; of more than that, every n-th prompt is looked at
_ROWS = 256  # decode together
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Part:
    """One experiment on one model."""

    experiment: str
    model: str
    trials: int
    conditions: int
    prefills: int  # readings of a prompt that this experiment needs; experiments share them too
    prompt_tokens: int  # of the longest prompt


@dataclass(frozen=True)
class Total:
    """All that one model is asked, each question once."""

    model: str
    trials: int
    questions: int
    prefills: int
    seconds: float
    memory_bytes: int


@dataclass(frozen=True)
class Description:
    plan: str
    parts: tuple[Part, ...]
    totals: tuple[Total, ...]
    notes: tuple[str, ...] = field(default=())  # conditions left out, samples that repeat
    samples: tuple[Samples, ...] = field(default=())  # what each rule reads of each model

    @property
    def trials(self) -> int:
        return sum(total.trials for total in self.totals)

    @property
    def prefills(self) -> int:
        return sum(total.prefills for total in self.totals)

    @property
    def seconds(self) -> float:
        return sum(total.seconds for total in self.totals)

    @property
    def memory_bytes(self) -> int:
        """Models are loaded one after the other."""
        return max(total.memory_bytes for total in self.totals)

    def text(self) -> str:
        """The table that `needlework plan` prints."""
        rows = [("experiment", "model", "conditions", "trials", "prefills", "longest prompt")]
        rows += [
            (p.experiment, p.model, f"{p.conditions:,}", f"{p.trials:,}", f"{p.prefills:,}", f"{p.prompt_tokens:,}")
            for p in self.parts
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(6)]
        lines = ["  ".join([*map(str.ljust, row[:2], widths), *map(str.rjust, row[2:], widths[2:])]) for row in rows]
        lines += [
            f"{t.model}: {t.questions:,} questions for {t.trials:,} trials, {t.prefills:,} prefills,"
            f" about {_time(t.seconds)}, about {t.memory_bytes / 2**20:,.0f} MiB"
            for t in self.totals
        ]
        whole = f"in all {self.trials:,} trials, {self.prefills:,} prefills, about {_time(self.seconds)}"
        return "\n".join(
            [*lines, *self.notes, *samples.text(self.samples), f"{whole}, about {self.memory_bytes / 2**20:,.0f} MiB"]
        )


def describe(plan: Plan, source: ModelSource | None = None) -> Description:
    """Look at every model and expand every trial; nothing is loaded, run or written."""
    source = source or PublicModels()
    works = [expand(plan, source.look(model)) for model in plan.models.values()]
    notes = [note for work in works for note in work.skipped]
    repeated = [(work.repeated, work.model.name) for work in works if work.repeated]
    notes += [f"{count} samples of {name} are the same question twice and count once" for count, name in repeated]
    parts = [part for work in works for part in _parts(plan, work)]
    read = tuple(samples.samples(plan, works))
    return Description(plan.name, tuple(parts), tuple(_total(work) for work in works), tuple(notes), read)


def _parts(plan: Plan, work: Work) -> Iterable[Part]:
    for experiment in plan.experiments:
        trials = [trial for trial in work.trials if trial.experiment == experiment.name]
        if trials:
            yield Part(
                experiment.name,
                work.model.name,
                len(trials),
                len({(trial.task.name, str(trial.intervention)) for trial in trials}),
                _prefills(work, trials)[0],
                max(len(trial.item.prompt) for trial in trials),
            )


def _prefills(work: Work, trials: Sequence[Trial]) -> tuple[int, int]:
    """How many readings of prompts the trials need after sharing, and their tokens."""
    prompts: dict[str, list[Trial]] = {}
    for trial in trials:
        prompts.setdefault(trial.prompt_id, []).append(trial)
    step = len(trials) // _EXACT + 1
    looked_at = list(prompts.values())[::step]
    readings: dict[tuple[object, ...], int] = {}
    for request in (request for group in looked_at for trial in group for request in trial.requests(work.any_rankings)):
        prepared = prepare(request, work.model.anatomy)
        size = prepared.prefill_tokens
        for prompt in (prepared.request.prompt, *prepared.twins.values()):
            readings[(prompt[:size], *prepared.group[1:])] = size
    scale = len(prompts) / len(looked_at)
    return round(len(readings) * scale), round(sum(readings.values()) * scale)


def speed_here(work: Work) -> Speed:
    """As it is here, where it can be measured and is worth it."""
    large_on_cpu = work.model.model.loading.device == "cpu" and work.model.anatomy.parameters >= SMALL_PARAMETERS
    return measured_speed(work.model) if large_on_cpu else usual_speed(work.model)


def seconds_of(work: Work, speed: Speed) -> float:
    """About how long a model's trials take one worker of this speed."""
    info, asked = work.model, [same[0] for same in work.by_id().values()]
    prefills, prompt_tokens = _prefills(work, asked)
    reading = reading_flops(info, prompt_tokens) + prefills * context_flops(info, prompt_tokens // max(1, prefills))
    answering = sum(chunk_seconds(info, speed, chunk, _ROWS) for chunk in chunked(work))
    return speed.reading(reading) + answering + TRIAL_SECONDS * len(work.trials)


def _total(work: Work) -> Total:
    model, asked = work.model, [same[0] for same in work.by_id().values()]
    prefills, _ = _prefills(work, asked)
    longest = max(trial.tokens for trial in asked)
    rows = min(_ROWS, len(asked))
    memory = rows * (2 * longest * model.anatomy.kv_bytes_per_token + 2 * model.anatomy.state_bytes)
    memory += rows * 12 * model.anatomy.vocabulary  # logits of a step, in fp32, and what is sorted out of them
    memory += model.costs.reading(longest) if model.costs else 0
    if model.model.loading.device == "cpu":
        memory = min(memory, default_limit(torch.device("cpu")))  # the engine takes in no more rows than fit
    weights = model.anatomy.parameters * _BYTES[model.model.loading.dtype]
    return Total(model.name, len(work.trials), len(asked), prefills, seconds_of(work, speed_here(work)), weights + memory)


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
