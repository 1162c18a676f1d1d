"""Ray itself: joining a cluster, the room in it, and its actors as the pool of a foreman."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

from needlework import plugins
from needlework.errors import NeedleworkError
from needlework.experiments import cluster as place
from needlework.experiments.crew import Crew
from needlework.experiments.foreman import Call, Foreman, Lost, Worker
from needlework.experiments.models import ModelInfo, ModelSource

_PROGRAM_BYTES = 2**30  # what a worker takes beside weights, prompts and answers
_STORE_BYTES = 2**28  # Ray's own shared memory: answers are small
_ENVIRONMENT = ("HF_HUB_OFFLINE", "HF_HOME", "TRANSFORMERS_VERBOSITY", "HF_HUB_DISABLE_PROGRESS_BARS")


class Hall:
    """A connection to Ray, in which crews are hired."""

    def __init__(self, ray: Any, cluster: place.Cluster) -> None:
        self.ray, self.cluster = ray, cluster
        self._folder: str | None = None
        self._joined = False

    @contextmanager
    def __call__(self, source: ModelSource, info: ModelInfo, units: int) -> Generator[Crew, None, None]:
        self.join()
        if isinstance(source, place.WorkerModels):
            source.home = place.node()
        pool = Actors(self.ray, self.cluster, source, info)
        pool.check()
        foreman = Foreman(pool, min(units, self.cluster.workers or units))
        try:
            yield foreman
        finally:
            foreman.close()

    def join(self) -> None:
        if self.ray.is_initialized():
            return
        # Ray prints what it thinks of lost workers into our output, whatever its options say; the foreman tells it shorter.
        self.ray._private.worker.print_to_stdstream = lambda *_, **__: None
        self._joined = True  # from here on there is something to leave
        for again in (True, False):
            try:
                self._init()
                return
            except Exception as error:  # Ray raises whatever it likes: on a busy machine, that its own half minute was over
                self.ray.shutdown()
                first = str(error).splitlines()[0] if str(error) else type(error).__name__
                if self.cluster.address != place.LOCAL:
                    raise NeedleworkError(
                        f"no Ray cluster answers at {self.cluster.address} ({first}); `ray start --head` begins one, and --ray"
                        " local needs none"
                    ) from None
                if not again:
                    raise NeedleworkError(f"Ray cannot be started here ({first}); try again, or run without --ray") from None

    def _init(self) -> None:
        quiet = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": True, "namespace": "needlework"}
        if self.cluster.address != place.LOCAL:
            _knock(self.cluster.address)
            self.ray.init(address=self.cluster.address, **quiet)
            return
        import psutil

        short = tempfile.gettempdir() if len(tempfile.gettempdir()) < 30 else "/tmp"  # Ray's sockets have short names
        self._folder = self._folder or tempfile.mkdtemp(prefix="nw-", dir=short)
        cores = max(psutil.cpu_count() or 1, (self.cluster.workers or 1) * self.cluster.threads)
        room = {"num_cpus": cores, "object_store_memory": _STORE_BYTES}
        self.ray.init(address="local", include_dashboard=False, _temp_dir=self._folder, **room, **quiet)

    def leave(self) -> None:
        if self._joined:
            self.ray.shutdown()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)


def _knock(address: str) -> None:
    """Whether anybody listens there: Ray itself would try for half a minute, and tell of every try."""
    host, colon, port = address.rpartition(":")
    if colon:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()


def _needs(cluster: place.Cluster, info: ModelInfo) -> dict[str, float]:
    """What one worker takes of a node."""
    gpus, weights = cluster.gpus(info), 0 if info.costs is None else info.costs.weights
    return {"GPU": gpus} if gpus else {"CPU": cluster.threads, "memory": weights * 6 // 5 + _PROGRAM_BYTES}


def _alive(ray: Any) -> list[dict[str, float]]:
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _places(nodes: Sequence[dict[str, float]], needs: dict[str, float]) -> int:
    """How many workers these nodes have room for."""
    return sum(min(int(node.get(key, 0) // needed) for key, needed in needs.items()) for node in nodes)


def room(cluster: place.Cluster, models: Sequence[ModelInfo]) -> list[int]:
    """How many workers would hold each model: asked of the cluster, or, if it would be made here, of this machine."""
    if cluster.address == place.LOCAL:
        import psutil
        import torch

        cores = max(psutil.cpu_count() or 1, (cluster.workers or 1) * cluster.threads)
        nodes = [{"CPU": cores, "GPU": torch.cuda.device_count(), "memory": 0.7 * psutil.virtual_memory().available}]
    else:
        hall = Hall(place.ray_package(), cluster)
        try:
            hall.join()
            nodes = _alive(hall.ray)
        finally:
            hall.leave()
    found = [_places(nodes, _needs(cluster, info)) for info in models]
    return [min(count, cluster.workers or count) for count in found]


class Actors:
    """The pool of a Foreman: Ray's actors, begun once each. Who takes the place of a dead one is the foreman's to say."""

    def __init__(self, ray: Any, cluster: place.Cluster, source: ModelSource, info: ModelInfo) -> None:
        self.ray, self.cluster = ray, cluster
        self.needs = _needs(cluster, info)
        resources = {f"num_{key.lower()}s" if key != "memory" else key: value for key, value in self.needs.items()}
        options = {"num_cpus": cluster.threads, **resources, "max_restarts": 0, "max_task_retries": 0}
        actor = ray.remote(concurrency_groups={"aside": 1}, **options)(place.Actor)  # aside: told how far it is while it works
        env = {key: os.environ[key] for key in _ENVIRONMENT if key in os.environ}
        sent = [ray.put(value) for value in (source, info, list(plugins.DEFINED.values()), env)]  # once for all workers
        self._begin: Callable[[], Any] = lambda: actor.remote(*sent)

    def room(self) -> int:
        return self.cluster.workers or self._places()

    def _places(self) -> int:
        return _places(_alive(self.ray), self.needs)

    def check(self) -> None:
        """Refuse a cluster in which no worker fits; one that was given a number of workers may still grow."""
        if self.cluster.workers is None and not self._places():
            needs = ", ".join(
                f"{value / 2**30:.1f} GiB of memory" if key == "memory" else f"{value} {key}s"
                for key, value in self.needs.items()
            )
            raise NeedleworkError(
                f"no node of the cluster has room for a worker ({needs}); add nodes, or give --workers to wait for them"
            )

    def start(self) -> tuple[Worker, Call]:
        worker = self._begin()
        return worker, worker.load.remote()

    def call(self, worker: Any, method: str, *args: Any) -> Call:
        bound = getattr(worker, method)
        return bound.options(concurrency_group="aside").remote() if method == "share" else bound.remote(*args)  # type: ignore[no-any-return]

    def wait(self, calls: Sequence[Any], seconds: float) -> Sequence[Call]:
        if not calls:
            time.sleep(seconds)
            return ()
        self.ray.wait(list(calls), num_returns=1, timeout=seconds)
        ready, _ = self.ray.wait(list(calls), num_returns=len(calls), timeout=0)
        return ready  # type: ignore[no-any-return]

    def result(self, call: Any) -> Any:
        gone: Any = self.ray.exceptions
        try:
            return self.ray.get(call)
        except gone.RayTaskError as error:
            cause = error.cause if isinstance(error.cause, Exception) else NeedleworkError(str(error))
            raise cause from None
        except (
            gone.RayActorError,
            gone.ObjectLostError,
            gone.WorkerCrashedError,
            gone.OutOfMemoryError,
            gone.NodeDiedError,
        ) as error:
            said = [line.strip() for line in str(error).splitlines() if line.strip()]
            raise Lost(said[-1] if "creation task" in said[0] else said[0]) from None  # an error of ours is named last

    def stop(self, worker: Any) -> None:
        self.ray.kill(worker, no_restart=True)
