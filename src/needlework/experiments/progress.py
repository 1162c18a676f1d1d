"""Estimated times of answers, and the progress bar of a run, in which each trial has its estimated time."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType

from needlework.experiments.models import ModelInfo
from needlework.experiments.trials import RecordedTask, Trial, Work
from needlework.interventions import KeepHeads, LimitContext
from needlework.results import Store
from needlework.terminal import COMPILING, Bar, clock

TRIAL_SECONDS = 0.002  # to prepare, score and write one trial
ROWS = 32  # assumed to decode together where the number is unknown
_WIDE, _HIGH, _MANY = 2560, 7680, 256  # of the matrices that are timed
BESIDE_PRODUCTS = 0.8  # share of matrix products in the time of a model; norms, scans, attention and memory take the rest


@dataclass(frozen=True)
class Speed:
    """Speed of a machine: FLOP per second, and bytes of weights per second, which every decode step reads once."""

    flops: float
    bytes: float
    step_seconds: float = 0.0  # constant overhead of a decode step
    step_flops: float = 0.0  # FLOP per second in a decode step; 0: as in prefill

    def reading(self, flops: float) -> float:
        return flops / self.flops

    def step(self, weight_bytes: float, flops: float) -> float:
        """Return the seconds of one decode step; `flops` are those of all rows."""
        return self.step_seconds + weight_bytes / self.bytes + flops / (self.step_flops or self.flops)

    def times(self, factor: float) -> Speed:
        """Return a speed that is `factor` times as high."""
        return Speed(self.flops * factor, self.bytes * factor, self.step_seconds / factor, self.step_flops * factor)


# Measured on two CPU cores. For small models, overhead between matrix products dominates.
SMALL_PARAMETERS = 10**8
SMALL = Speed(4e10, float("inf"), step_flops=1.5e10)
LARGE_ON_CPU = Speed(3.2e11, 1.4e10)
# Published peaks of an A100 80 GB in bf16 (312 TFLOP/s, 2.0 TB/s), times the utilization that large matrix products and long
# reads commonly reach, and 30 ms per decode step for launching some hundred small kernels. Not measured on a GPU.
GPU = Speed(0.4 * 312e12, 0.6 * 2.0e12, 0.03)
GPU_BYTES = 80e9


def usual_speed(info: ModelInfo) -> Speed:
    if info.model.loading.device != "cpu":
        return GPU
    return SMALL if info.anatomy.parameters < SMALL_PARAMETERS else LARGE_ON_CPU


def reading_flops(info: ModelInfo, tokens: float) -> float:
    return 2.0 * (info.costs.per_token if info.costs else info.anatomy.parameters) * tokens


def context_flops(info: ModelInfo, tokens: int) -> float:
    """Return the FLOPs of attention scores and values in the prefill of one prompt of `tokens` tokens."""
    anatomy = info.anatomy
    full = anatomy.flops_per_token("attention", tokens // 2) - 2 * anatomy.attention_parameters
    return float(full * tokens)


def answer_flops(info: ModelInfo, steps: float) -> float:
    """Return the FLOPs of `steps` decoded tokens: all layers and the LM head."""
    return 2.0 * (info.costs.per_token + info.costs.head if info.costs else info.anatomy.parameters) * steps


def step_bytes(info: ModelInfo, rows: float) -> float:
    """Return the bytes of weights that a decode step reads; in a mixture of experts, more rows read more experts."""
    if info.costs is None:
        return 4.0 * info.anatomy.parameters
    read = 1.0 - float((1.0 - info.costs.active) ** rows)
    return info.costs.weights * (1 - info.costs.experts * (1 - read))


def answer_seconds(info: ModelInfo, speed: Speed, steps: float, rows: int = ROWS) -> float:
    """Return the share of one row in the time of `steps` decode steps of `rows` rows."""
    return steps * speed.step(step_bytes(info, rows), answer_flops(info, rows)) / rows


def chunk_seconds(info: ModelInfo, speed: Speed, chunk: Sequence[Trial], most_rows: int) -> float:
    """Return the seconds after prefill of a chunk: decoding up to `most_rows` rows together, or scoring its options."""
    steps = sum(trial.tokens - trial.prompt_tokens for trial in chunk)
    if chunk[0].mode != "generate":
        return speed.reading(answer_flops(info, steps))
    return answer_seconds(info, speed, steps, min(len(chunk), most_rows))


def measured_speed(info: ModelInfo) -> Speed:
    """Measure the speed of this machine in the model's dtype by timing two matrix products, in less than a second.

    CPU time is measured, so that other programs do not count, and all threads are assumed to be equally fast.
    """
    import torch

    from needlework.model.load import torch_dtype

    threads, dtype = torch.get_num_threads(), torch_dtype(info.model.loading.dtype)
    several = [torch.randn(_HIGH, _WIDE).to(dtype) for _ in range(4)]  # larger than the CPU cache

    def seconds(rows: int) -> float:
        x, best = torch.randn(rows, _WIDE).to(dtype), float("inf")
        for _ in range(3):
            began = time.process_time()
            for weight in several:
                torch.nn.functional.linear(x, weight)
            best = min(best, (time.process_time() - began) / len(several))
        return max(best, 1e-9)

    one, many = seconds(1), seconds(_MANY)
    flops = 2.0 * _HIGH * _WIDE * _MANY / many
    return Speed(flops, several[0].nbytes / one).times(threads * BESIDE_PRODUCTS)


def weights(work: Work) -> dict[str, float]:
    """Return the estimated seconds of every answer by trial id; a prefill is divided among the trials that share it."""
    info, speed = work.model, usual_speed(work.model)
    sizes: dict[tuple[str, ...], tuple[int, int]] = {}  # tokens of the prompts and of the answer
    prefills: dict[str, tuple[str, ...]] = {}
    for name, (trial, *_) in work.by_id().items():
        form = (trial.prompt_id, trial.mode, str(trial.max_new_tokens))
        if form not in sizes:
            sizes[form] = trial.prompt_tokens, max(0, trial.tokens - trial.prompt_tokens)
        prefills[name] = (*form, *(str(part) for part in trial.intervention.parts if part.phase != "decode"))
    sharing = Counter(prefills.values())
    made = {}
    for name, prefill in prefills.items():
        prompt, steps = sizes[prefill[:3]]
        reading = speed.reading(reading_flops(info, prompt)) / sharing[prefill]
        made[name] = reading + answer_seconds(info, speed, steps) + TRIAL_SECONDS
    return made


LOADING = Speed(float("inf"), 1e9, 0.5)  # reading weights; building and probing the model
EXAMINING_PASSES, EXAMINING_TOKENS = 100, 20  # of the doctor's quick examination, about
EXAMINING_SECONDS = 0.5  # of a tiny model
RECORDING_FACTOR = 2.0  # of an answer's time, because attention probabilities are computed for all layers and tokens
_MIXER_KERNELS = {"RecurrentGemmaRecurrentBlock": ("conv", "rglru")} | dict.fromkeys(
    ("FalconMambaMixer", "JambaMambaMixer", "MambaMixer", "ZambaMambaMixer"), ("conv", "selective_scan")
)


def kernels_of(work: Work, examined: bool) -> list[str]:
    """Return the compiled kernels that a model's trials and its examination use."""
    loading, anatomy = work.model.model.loading, work.model.anatomy
    if loading.device != "cpu" or loading.kernels != "fast":
        return []
    mixers = {part.mixer for _, part in anatomy.recurrent_parts()}
    names = [name for mixer in sorted(mixers) for name in _MIXER_KERNELS.get(mixer, ())]
    masked = any(isinstance(part, KeepHeads | LimitContext) for trial in work.trials for part in trial.intervention.parts)
    return names + ["block_attention"] * ((masked or examined) and bool(anatomy.attention_layers))


def phase_seconds(works: Sequence[Work], examined: bool = True) -> list[dict[str, float]]:
    """Return the estimated seconds of what each model needs besides answers, by phase.

    Args:
        examined: Whether the doctor examines the models.
    """
    from needlework.kernels.jit import COMPILE_SECONDS, uncompiled

    known: set[str] = set()  # a kernel is compiled for the first model that uses it
    phases = []
    for work in works:
        info, speed, each = work.model, usual_speed(work.model), weights(work)
        kernels = [name for name in kernels_of(work, examined) if name not in known]
        known.update(kernels)
        passes = EXAMINING_PASSES * speed.step(step_bytes(info, 1), reading_flops(info, EXAMINING_TOKENS))
        ranked = sum(len(source.trials) for source in work.rankings.values() if source.ranking is None)
        recorded = sum(each[trial.id] for recording in work.recordings for trial in recording.trials)
        per_trial = sum(each.values()) / max(1, len(each))  # a part of a plan may ask a model nothing
        phases.append(
            {
                "loading": LOADING.step(step_bytes(info, ROWS), 0),
                COMPILING: sum(COMPILE_SECONDS[name] for name in uncompiled(kernels)),
                "examining": EXAMINING_SECONDS + passes if examined else 0.0,
                "ranking heads": RECORDING_FACTOR * ranked * per_trial,
                "recording": RECORDING_FACTOR * recorded,
            }
        )
    return phases


@dataclass
class _RunningBatch:
    weight: float
    share: Callable[[], float]
    counted: float = 0.0  # weight that the bar has counted already


class Tracker:
    """The progress bar of a run. Each phase of each model has its estimated seconds, and so has each answer in `asking`."""

    def __init__(
        self,
        works: Sequence[Work],
        store: Store,
        shown: bool,
        examined: bool = True,
        more: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Start a bar; `more` is the expected seconds of what else happens while it is open, such as drawing a report."""
        self.weights = {work.model.name: weights(work) for work in works}
        self._trials = Counter((work.model.name, trial.id) for work in works for trial in work.trials)
        self._underway: dict[Hashable, _RunningBatch] = {}
        done, observed = store.done(), store.observed()
        self._phases = {work.model.name: phases for work, phases in zip(works, phase_seconds(works, examined), strict=True)}
        self._compiling = {name: phases.pop(COMPILING) for name, phases in self._phases.items()}
        kinds = {COMPILING: sum(self._compiling.values())}
        self._phases[""] = dict(more)
        kinds |= more
        for work in works:
            name, phases = work.model.name, self._phases[work.model.name]
            left = [r for r in work.recordings if (r.experiment, name, r.task) not in observed]
            phases["asking"] = sum(self.weights[name].values())
            phases["recording"] = sum(self._recording_seconds(name, recording) for recording in left)
            kinds |= {f"{name}: {phase}": seconds for phase, seconds in phases.items()}
        self.bar = Bar(sum(len(work.trials) for work in works), "trials", work=kinds, shown=shown)
        for work in works:
            model = work.model.name
            for name, same in work.by_id().items():
                stored = sum((one.experiment, model, one.task.name, name) in done for one in same)
                seconds = self.weights[model][name] if stored == len(same) else 0.0
                self.bar.found(stored, seconds, f"{model}: asking")

    @contextmanager
    def phase(self, model: str, phase: str, share: Callable[[], float] = float, of: int = 1) -> Iterator[None]:
        """Show what happens with a model, or with none (""): one of so many parts of a phase. `share` returns its progress."""
        kind = f"{model}: {phase}" if model else phase
        work = self.bar.rest(kind, self._phases[model][phase] / of)
        self.bar.show(kind, lambda: work * share(), kind)
        yield
        self.bar.advance(0, work)

    def finish(self, model: str) -> None:
        """Expect nothing more of a model: all of it is done, or is not needed."""
        for phase in self._phases[model]:
            self.bar.expect(f"{model}: {phase}", 0.0)
        self._compiling[model] = 0.0
        self.bar.expect(COMPILING, sum(self._compiling.values()))

    def start(self, model: str, batch: Hashable, names: Sequence[str], share: Callable[[], float]) -> None:
        """Track a batch that starts. `names` are its trial ids, `share` returns its progress; batches may run in parallel."""
        self._underway[batch] = _RunningBatch(sum(self.weights[model][name] for name in names), share)
        kind = f"{model}: asking"
        self.bar.show(kind, lambda: sum(max(0.0, b.weight * b.share() - b.counted) for b in list(self._underway.values())), kind)

    def count_answer(self, model: str, name: str, batch: Hashable) -> None:
        """Count an answer, which serves all trials of this id."""
        weight, trials = self.weights[model][name], self._trials[model, name]
        if batch in self._underway:
            self._underway[batch].counted += weight
        self.bar.advance(trials, weight)

    def stop(self, batch: Hashable) -> None:
        """Stop tracking a batch; trials that it did not finish count as not done."""
        self._underway.pop(batch, None)

    @contextmanager
    def recording(self, model: str, recording: RecordedTask, share: Callable[[], float]) -> Iterator[None]:
        """Track a recording while it runs: it has a weight, but counts as no trial."""
        work, kind = self._recording_seconds(model, recording), f"{model}: recording"
        self.bar.show(kind, lambda: work * share(), kind)
        yield
        self.bar.advance(0, work)

    def rate(self) -> str:
        """Return the number of trials and the throughput as text; empty if there were none."""
        count, seconds = self.bar.counted_now, self.bar.seconds
        return f"{count} asked in {clock(seconds)}, {count / seconds:.3g} trials per second" if count else ""

    def _recording_seconds(self, model: str, recording: RecordedTask) -> float:
        return RECORDING_FACTOR * sum(self.weights[model][trial.id] for trial in recording.trials)
