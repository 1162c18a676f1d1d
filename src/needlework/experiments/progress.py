"""Estimated times of answers, and the progress bar of a run, in which each trial has its estimated time."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from needlework.experiments.models import ModelInfo
from needlework.experiments.trials import RecordedTask, Trial, Work
from needlework.results import Store
from needlework.terminal import Bar, clock

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


@dataclass
class _RunningBatch:
    weight: float
    share: Callable[[], float]
    counted: float = 0.0  # weight that the bar has counted already


class Tracker:
    """The progress bar of a run; each trial is weighted by the estimated time of its answer."""

    def __init__(self, works: Sequence[Work], store: Store, shown: bool) -> None:
        self.weights = {work.model.name: weights(work) for work in works}
        self._underway: dict[Hashable, _RunningBatch] = {}
        done, observed = store.done(), store.observed()
        whole = sum(sum(each.values()) for each in self.weights.values())
        for work in works:
            left = (r for r in work.recordings if (r.experiment, work.model.name, r.task) not in observed)
            whole += sum(self._weight(work.model.name, recording) for recording in left)
        self.bar = Bar(sum(len(work.trials) for work in works), "trials", work=whole, shown=shown)
        for work in works:
            model = work.model.name
            for name, same in work.by_id().items():
                stored = sum((one.experiment, model, one.task.name, name) in done for one in same)
                self.bar.found(stored, self.weights[model][name] if stored == len(same) else 0.0)

    def start(self, model: str, batch: Hashable, names: Sequence[str], share: Callable[[], float]) -> None:
        """Track a batch that starts. `names` are its trial ids, `share` returns its progress; batches may run in parallel."""
        self._follow(model, batch, sum(self.weights[model][name] for name in names), share)

    def count_answer(self, model: str, name: str, trials: int, batch: Hashable) -> None:
        """Count an answer that serves this many trials."""
        weight = self.weights[model][name]
        if batch in self._underway:
            self._underway[batch].counted += weight
        self.bar.advance(trials, weight)

    def stop(self, batch: Hashable) -> None:
        """Stop tracking a batch; trials that it did not finish count as not done."""
        self._underway.pop(batch, None)

    @contextmanager
    def recording(self, model: str, recording: RecordedTask, share: Callable[[], float]) -> Iterator[None]:
        """Track a recording while it runs: it has a weight, but counts as no trial."""
        weight = self._weight(model, recording)
        self._follow(f"{model} (attention)", id(recording), weight, share)
        yield
        self.stop(id(recording))
        self.bar.advance(0, weight)

    def rate(self) -> str:
        """Return the number of trials and the throughput as text; empty if there were none."""
        count, seconds = self.bar.counted_now, self.bar.seconds
        return f"{count} asked in {clock(seconds)}, {count / seconds:.3g} trials per second" if count else ""

    def _follow(self, name: str, batch: Hashable, weight: float, share: Callable[[], float]) -> None:
        self._underway[batch] = _RunningBatch(weight, share)
        self.bar.show(name, lambda: sum(max(0.0, b.weight * b.share() - b.counted) for b in list(self._underway.values())))

    def _weight(self, model: str, recording: RecordedTask) -> float:
        return sum(self.weights[model][trial.id] for trial in recording.trials)
