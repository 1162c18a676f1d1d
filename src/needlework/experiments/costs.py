"""Estimate how long answers take, for `needlework plan` and as weights of the progress bar."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from needlework.experiments.models import ModelInfo
from needlework.experiments.trials import Trial, Work

TRIAL_SECONDS = 0.002  # to prepare, score and write one trial
ROWS = 32  # assumed to decode together where the number is unknown


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


def weights(work: Work) -> dict[str, float]:
    """Return the estimated seconds of every answer by trial id; a prefill is divided among the trials that share it."""
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
    """Return the share of one row in the time of `steps` decode steps of `rows` rows."""
    return steps * speed.step(step_bytes(info, rows), answer_flops(info, rows)) / rows


def chunk_seconds(info: ModelInfo, speed: Speed, chunk: Sequence[Trial], most_rows: int) -> float:
    """Return the seconds after prefill of a chunk: decoding up to `most_rows` rows together, or scoring its options."""
    steps = sum(trial.tokens - sum(len(item.prompt) for item in (trial.item, *trial.item.also)) for trial in chunk)
    if chunk[0].mode != "generate":
        return speed.reading(answer_flops(info, steps))
    return answer_seconds(info, speed, steps, min(len(chunk), most_rows))


def _form(trial: Trial) -> tuple[str, str, int]:
    return trial.prompt_id, trial.mode, trial.max_new_tokens


def measured_speed(info: ModelInfo) -> Speed:
    """Measure the speed of this machine in the model's dtype by timing two matrix products, in less than a second.

    CPU time is measured, so that other programs do not count, and all threads are assumed to be equally fast.
    """
    import time

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


_WIDE, _HIGH, _MANY = 2560, 7680, 256
BESIDE_PRODUCTS = 0.8  # share of matrix products in the time of a model; norms, scans, attention and memory take the rest
