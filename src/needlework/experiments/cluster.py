"""A Ray cluster as the place where models are loaded and asked: which one, how it is parted, and what a worker does."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from needlework import plugins
from needlework.errors import NeedleworkError, shown
from needlework.experiments.crew import Timed, examined, ranked, timed
from needlework.experiments.foreman import Fault
from needlework.experiments.models import DiskModels, LoadedModel, LoadedSubject, ModelInfo, ModelSource, locate, look
from needlework.experiments.plan import Model
from needlework.heads.methods import Seen
from needlework.interventions import Ranking
from needlework.model.files import weights_hash
from needlework.requests import Request
from needlework.tasks.base import Item

if TYPE_CHECKING:
    from needlework.experiments.actors import Hall

LOCAL = "local"  # a cluster of this machine, made for the run and gone with it


@dataclass(frozen=True)
class Cluster:
    """Which cluster, and how it is parted among workers."""

    address: str = LOCAL  # "local", "auto" (the one that runs on this machine) or HOST:PORT
    workers: int | None = None  # none: as many as there is room for, also when room is made later
    gpus_per_worker: int = 1  # of models that are loaded onto GPUs; several share the layers of one model
    threads: int = 1  # of a worker

    def __post_init__(self) -> None:
        if not is_address(self.address):
            raise NeedleworkError(f"{shown(self.address)} is no Ray cluster; give local, auto or HOST:PORT of its head node")
        for name in ("workers", "gpus_per_worker", "threads"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise NeedleworkError(f"{name}={value}: there must be at least one")

    def gpus(self, info: ModelInfo) -> int:
        """Of one worker with this model."""
        return 0 if info.model.loading.device == "cpu" else self.gpus_per_worker

    def models(self, memory_bytes: int | None = None) -> WorkerModels:
        return WorkerModels(memory_bytes, self)

    @contextmanager
    def joined(self) -> Iterator[Hall]:
        """A way to hire crews. Ray is begun when the first one is, and left in the end."""
        from needlework.experiments.actors import Hall

        hall = Hall(ray_package(), self)
        try:
            yield hall
        finally:
            hall.leave()


def is_address(text: str) -> bool:
    """local, auto or HOST:PORT: whatever else stands after --ray is no address, but a plan or an option."""
    host, _, port = text.rpartition(":")
    return text in (LOCAL, "auto") or (bool(host) and port.isdecimal() and "/" not in host and not host.startswith("-"))


def ray_package() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray reports to its makers unless it is told not to
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise NeedleworkError("--ray needs Ray: pip install 'needlework[ray]'") from None


class WorkerModels(DiskModels):
    """Models that workers load, each on its own machine."""

    def __init__(self, memory_bytes: int | None, cluster: Cluster, versions: dict[str, str] | None = None) -> None:
        super().__init__(memory_bytes)
        self.cluster, self.more = cluster, versions or {}
        self.home = ""  # the node of the driver, whose files the hashes were taken of

    def look(self, model: Model) -> ModelInfo:
        return look(model, elsewhere=True)

    def load(self, info: ModelInfo) -> LoadedModel:
        import torch

        from needlework.subject import load

        torch.set_num_threads(self.cluster.threads)
        gpus, loading = self.cluster.gpus(info), info.model.loading.model_dump()
        place = info.directory if os.path.exists(info.directory) else str(locate(info.model))
        if self.home != node() and weights_hash(Path(place)) != info.weights:
            raise NeedleworkError(f"{shown(place)} on another node has other weights; copy the model there again")
        if gpus:
            loading |= {"device": "cuda", "device_map": "auto" if gpus > 1 else None}  # Ray shows a worker its own ones alone
        memory = self.memory_bytes or (None if gpus else _memory_share(self.cluster.threads))
        return _WorkerModel(load(place, memory_bytes=memory, **loading), info.model, self.more)


class _WorkerModel(LoadedSubject):
    def __init__(self, subject: Any, model: Model, more: dict[str, str]) -> None:
        super().__init__(subject, model)
        self.more = more

    def versions(self) -> dict[str, str]:
        return {**super().versions(), **self.more}


def node() -> str:
    return str(ray_package().get_runtime_context().get_node_id())


def _memory_share(threads: int) -> int:
    """Half of what is free, parted among as many workers as the machine has room for."""
    import psutil
    import torch

    from needlework.engine.budget import default_limit

    return max(1, default_limit(torch.device("cpu")) * threads // max(threads, psutil.cpu_count() or 1))


class Actor:
    """A worker: it lives in a process of its own, and what it is asked is over or lost with it."""

    def __init__(self, source: ModelSource, info: ModelInfo, known: Sequence[Any], env: dict[str, str]) -> None:
        self.source, self.info, self.known, self.env = source, info, known, env
        self.model: LoadedModel

    def load(self) -> dict[str, str]:
        os.environ.update(self.env)
        for plugin in self.known:
            plugins.define(*plugin)
        self.model = self.source.load(self.info)
        return self.model.versions()

    def ask(self, requests: Sequence[Request]) -> tuple[list[Timed], Fault | None]:
        """All answers; if something broke, those that were there before, and what it was."""
        answers: list[Timed] = []
        try:
            for one in timed(self.model, requests):
                answers.append(one)
        except Exception as error:
            return answers, (type(error).__name__, str(error))
        return answers, None

    def watch(self, requests: Sequence[Request], span: str) -> Sequence[Seen]:
        return self.model.watch(requests, span)

    def rank(self, by: str, items: Sequence[Item], seed: int) -> Ranking:
        return ranked(self.model, by, items, seed)

    def checkup(self, quick: bool) -> Any:
        return examined(self.model, quick)

    def do(self, piece: Any, samples: Sequence[Any]) -> Any:
        assert isinstance(self.model, LoadedSubject)
        return self.model.do(piece, samples)

    def share(self) -> float:
        return float(getattr(self.model, "share", float)())
