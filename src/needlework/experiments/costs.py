"""About how long answers take: estimates before a run, and the weights of its progress, which are scaled by what is measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from needlework.experiments.models import ModelInfo
from needlework.experiments.trials import Trial, Work

TRIAL_SECONDS = 0.002  # preparing, scoring and writing
ROWS = 32  # decode together, where it is not known how many


@dataclass(frozen=True)
class Speed:
    """What a machine does in a second: arithmetic, and bytes of weights that a decode step reads whatever its rows."""

    flops: float
    bytes: float
    step_seconds: float = 0.0  # of a decode step, beside both
    step_flops: float = 0.0  # in a decode step, where it is not as in a prompt

    def reading(self, flops: float) -> float:
        return flops / self.flops

    def step(self, weight_bytes: float, flops: float) -> float:
        """One decode step of all rows."""
        return self.step_seconds + weight_bytes / self.bytes + flops / (self.step_flops or self.flops)

    def times(self, factor: float) -> Speed:
        """So many times as fast."""
        return Speed(self.flops * factor, self.bytes * factor, self.step_seconds / factor, self.step_flops * factor)


# Of small models, the time between the sums counts most. Seen on two CPU cores; so is the speed of a large one.
SMALL_PARAMETERS = 10**8
SMALL = Speed(4e10, float("inf"), step_flops=1.5e10)
LARGE_ON_CPU = Speed(3.2e11, 1.4e10)
# Published peaks of an A100 of 80 GB in bf16 (312 TFLOP/s, 2.0 TB/s), and the shares of them that large matrix products and
# long reads commonly reach; a decode step of some hundred small kernels takes 30 ms. Not measured here: there is no GPU.
GPU = Speed(0.4 * 312e12, 0.6 * 2.0e12, 0.03)
GPU_BYTES = 80e9


def usual_speed(info: ModelInfo) -> Speed:
    if info.model.loading.device != "cpu":
        return GPU
    return SMALL if info.anatomy.parameters < SMALL_PARAMETERS else LARGE_ON_CPU


def reading_flops(info: ModelInfo, tokens: float) -> float:
    return 2.0 * (info.costs.per_token if info.costs else info.anatomy.parameters) * tokens


def context_flops(info: ModelInfo, tokens: int) -> float:
    """What attention adds for a prompt of so many tokens: each of them against the keys that it sees."""
    anatomy = info.anatomy
    full = anatomy.flops_per_token("attention", tokens // 2) - 2 * anatomy.attention_parameters
    return float(full * tokens)


def answer_flops(info: ModelInfo, steps: float) -> float:
    """A decoded token goes through the layers, and what it says is looked up in the whole vocabulary."""
    return 2.0 * (info.costs.per_token + info.costs.head if info.costs else info.anatomy.parameters) * steps


def step_bytes(info: ModelInfo, rows: float) -> float:
    """Weights that a decode step reads: of a mixture, more experts with more rows."""
    if info.costs is None:
        return 4.0 * info.anatomy.parameters
    read = 1.0 - float((1.0 - info.costs.active) ** rows)
    return info.costs.weights * (1 - info.costs.experts * (1 - read))


def weights(work: Work) -> dict[str, float]:
    """Estimated seconds of every answer, by trial id. The reading of a prompt is parted among those that share it."""
    info, speed = work.model, usual_speed(work.model)
    asked = {name: same[0] for name, same in work.by_id().items()}
    sizes: dict[tuple[str, str, int], tuple[int, int]] = {}
    for trial in asked.values():
        key = _form(trial)
        if key not in sizes:
            prompt = sum(len(item.prompt) for item in (trial.item, *trial.item.also))
            sizes[key] = prompt, max(0, trial.tokens - prompt)
    readings = {
        name: (*_form(trial), *(str(p) for p in trial.intervention.parts if p.phase != "decode")) for name, trial in asked.items()
    }
    readers = Counter(readings.values())
    made = {}
    for name, trial in asked.items():
        prompt, steps = sizes[_form(trial)]
        reading = speed.reading(reading_flops(info, prompt)) / readers[readings[name]]
        made[name] = reading + answer_seconds(info, speed, steps) + TRIAL_SECONDS
    return made


def answer_seconds(info: ModelInfo, speed: Speed, steps: float, rows: int = ROWS) -> float:
    """A row's part of decode steps that it takes together with others."""
    return steps * speed.step(step_bytes(info, rows), answer_flops(info, rows)) / rows


def chunk_seconds(info: ModelInfo, speed: Speed, chunk: Sequence[Trial], most_rows: int) -> float:
    """Answering a chunk: its rows decode together; options are read as a prompt is."""
    steps = sum(trial.tokens - sum(len(item.prompt) for item in (trial.item, *trial.item.also)) for trial in chunk)
    if chunk[0].mode != "generate":
        return speed.reading(answer_flops(info, steps))
    return answer_seconds(info, speed, steps, min(len(chunk), most_rows))


def _form(trial: Trial) -> tuple[str, str, int]:
    return trial.prompt_id, trial.mode, trial.max_new_tokens


def measured_speed(info: ModelInfo) -> Speed:
    """Of this machine with a large model's own kind of numbers: two matrix products are timed, for less than a second.

    Processor time is measured, so that other programs do not count, and all threads are taken to be of one speed.
    """
    import time

    import torch

    from needlework.model.load import torch_dtype

    threads, dtype = torch.get_num_threads(), torch_dtype(info.model.loading.dtype)
    several = [torch.randn(_HIGH, _WIDE).to(dtype) for _ in range(4)]  # more than a cache holds

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


_WIDE, _HIGH, _MANY = 2560, 7680, 256
BESIDE_PRODUCTS = 0.8  # of the time, matrix products take so much: norms, scans, attention and memory take the rest
