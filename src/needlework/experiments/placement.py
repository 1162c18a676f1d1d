"""`--dry-run`: where the models of a plan would lie, and about how many hours it takes. Nothing is loaded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from textwrap import fill
from typing import Any

from needlework.experiments.actors import room
from needlework.experiments.cluster import Cluster
from needlework.experiments.costs import GPU, GPU_BYTES, LARGE_ON_CPU, SMALL, SMALL_PARAMETERS
from needlework.experiments.describe import seconds_of, speed_here
from needlework.experiments.models import PublicModels
from needlework.experiments.plan import Plan
from needlework.experiments.run import chunked
from needlework.experiments.trials import Work, expand

WIDTH = 80  # of a terminal
LAPTOP_CORES, LAPTOP_BYTES = 8, 32e9
_SPARE = 1.15  # of the weights: prompts and answers want room, too


@dataclass(frozen=True)
class Place:
    """One model of a plan. Hours are none where it does not fit."""

    model: str
    questions: int
    units: int  # pieces of work that can be asked at the same time
    weights_bytes: int
    gpus_per_worker: int  # that its weights need, 80 GB each
    workers: int  # here
    here_hours: float | None
    laptop_hours: float | None
    gpu_hours: float
    gpus8_hours: float


@dataclass(frozen=True)
class Placement:
    plan: str
    here: str
    places: tuple[Place, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def text(self) -> str:
        notes = (
            f"here: {self.here}",
            f"laptop: {LAPTOP_CORES} cores and {LAPTOP_BYTES / 1e9:.0f} GB. GPUs: A100s of 80 GB; times of one worker and of"
            " eight GPUs come from published peaks (docs/scale.md) and are not measured",
        )
        sizes = ("model", "questions", "units", "weights", "workers", "GPUs each")
        times = ("time", "here", "laptop", "one GPU worker", "8 GPUs")
        return "\n".join(
            [
                *_columns([sizes, *map(_sizes, self.places)]),
                "",
                *_columns([times, *map(_times, self.places)]),
                "",
                *(fill(note, WIDTH) for note in notes),
            ]
        )


def place(plan: Plan, cluster: Cluster | None) -> Placement:
    """Look at every model and expand every trial; nothing is loaded, run or written."""
    source = PublicModels(elsewhere=True)
    works = [expand(plan, source.look(model)) for model in plan.models.values()]
    here = "this process" if cluster is None else f"Ray cluster {cluster.address}, {cluster.threads} threads a worker"
    counts = [1] * len(works) if cluster is None else room(cluster, [work.model for work in works])
    return Placement(plan.name, here, tuple(_place(work, count) for work, count in zip(works, counts, strict=True)))


def _place(work: Work, workers: int) -> Place:
    info, units = work.model, len(list(chunked(work)))
    weights = info.costs.weights if info.costs else 4 * info.anatomy.parameters
    gpus = math.ceil(weights * _SPARE / GPU_BYTES)
    on_gpu, on_cpu = (_on(work, device) for device in ("cuda", "cpu"))
    busy = min(workers, units)
    gpu_hours = seconds_of(on_gpu, GPU) / 3600
    laptop = (SMALL if info.anatomy.parameters < SMALL_PARAMETERS else LARGE_ON_CPU).times(LAPTOP_CORES / 2)
    fits = weights * _SPARE <= LAPTOP_BYTES
    gpu_units = len(list(chunked(on_gpu)))
    return Place(
        info.name,
        len(work.by_id()),
        units,
        weights,
        gpus,
        workers,
        seconds_of(work, speed_here(work)) / 3600 / busy if busy else None,
        seconds_of(on_cpu, laptop) / 3600 if fits else None,
        gpu_hours,
        gpu_hours / min(max(1, 8 // gpus), gpu_units),
    )


def _on(work: Work, device: str) -> Work:
    model = work.model.model
    return replace(work, model=replace(work.model, model=replace(model, loading=model.loading.but(device=device))))


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]


def _sizes(place: Place) -> Sequence[str]:
    return (
        place.model,
        f"{place.questions:,}",
        f"{place.units:,}",
        f"{place.weights_bytes / 1e9:,.1f} GB",
        f"{place.workers:,}",
        str(place.gpus_per_worker),
    )


def _times(place: Place) -> Sequence[str]:
    return (place.model, *map(_time, (place.here_hours, place.laptop_hours, place.gpu_hours, place.gpus8_hours)))


def _time(hours: float | None) -> str:
    if hours is None:
        return "no room"
    seconds = 3600 * hours
    if seconds < 1:
        return "below 1 s"
    return f"{seconds:.0f} s" if seconds < 60 else f"{hours:,.1f} h" if hours >= 1 else f"{60 * hours:.1f} min"
