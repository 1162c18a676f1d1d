"""The Ray executor: workers of a cluster load the model and execute batches. Batches of a lost worker run again."""

from __future__ import annotations

import importlib
import os
import select
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from needlework import plugins
from needlework.errors import NeedleworkError, short_repr
from needlework.experiments.models import (
    Batch,
    BatchResult,
    DiskModels,
    LoadedModel,
    LoadedSubject,
    LocalExecutor,
    ModelInfo,
    ModelSource,
    NotSupported,
    TimedAnswer,
    locate,
)
from needlework.model.files import weights_hash
from needlework.terminal import say

LOCAL = "local"  # a cluster on this machine, started for the run and stopped with it
MAX_DEATHS = 3  # workers lost to one batch, or in a row while loading, before that is an error
TICK = 1.0  # seconds between polls of the cluster's nodes and of the progress of running batches
WAITING_TICKS = 60  # without any worker before a message is printed
CONNECT_SECONDS = 5.0
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_PROGRAM_BYTES = 2**30  # memory of a worker besides weights, caches and activations
_STORE_BYTES = 2**28  # size of Ray's object store: answers are small
_ENVIRONMENT = ("HF_HUB_OFFLINE", "HF_HOME", "TRANSFORMERS_VERBOSITY", "HF_HUB_DISABLE_PROGRESS_BARS")
_QUIET = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": True, "namespace": "needlework"}
_LOST = ("RayActorError", "ObjectLostError", "WorkerCrashedError", "OutOfMemoryError", "NodeDiedError")
_MEMORY_HINT = "if memory ran out, take fewer workers or larger nodes"
_HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # preface and an empty SETTINGS frame


class WorkerLost(NeedleworkError):
    """The error of a batch after MAX_DEATHS workers died while they executed it."""


@dataclass(frozen=True)
class Cluster:
    """Address of a Ray cluster, and the resources of a worker."""

    address: str = LOCAL  # "local", "auto" (the cluster that this machine is part of) or HOST:PORT
    workers: int | None = None  # at most; None: as many as fit, also when nodes join
    gpus_per_worker: int = 1  # for models on GPUs; the layers of one model are spread over several
    threads: int = 1  # per worker

    def __post_init__(self) -> None:
        if not is_address(self.address):
            raise NeedleworkError(f"{short_repr(self.address)} is no Ray cluster; give local, auto or HOST:PORT of its head node")
        for name in ("workers", "gpus_per_worker", "threads"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise NeedleworkError(f"{name}={value}: there must be at least one")

    def gpus(self, info: ModelInfo) -> int:
        """Return the number of GPUs that one worker with this model uses."""
        return 0 if info.model.loading.device == "cpu" else self.gpus_per_worker

    def needs(self, info: ModelInfo) -> dict[str, float]:
        """Return the resources that one worker with this model requests, by Ray's names."""
        gpus, weights = self.gpus(info), 0 if info.costs is None else info.costs.weights
        return {"GPU": gpus} if gpus else {"CPU": self.threads, "memory": weights * 6 // 5 + _PROGRAM_BYTES}

    def cores(self) -> int:
        """Return the number of CPUs of a local cluster: those of the machine, or more if `workers` needs more."""
        return max(os.cpu_count() or 1, (self.workers or 1) * self.threads)

    @contextmanager
    def connected(self) -> Iterator[RayConnection]:
        """Yield a connection, which opens executors; it connects when the first one is opened."""
        connection = RayConnection(import_ray(), self)
        try:
            yield connection
        except NeedleworkError:
            raise
        except Exception:  # if Ray's processes are ending, the watching thread says so and ends this one
            time.sleep(3)
            raise
        finally:
            connection.close()

    def room(self, models: Sequence[ModelInfo]) -> list[int]:
        """Return for each model how many workers fit into the cluster, or into this machine for a local one."""
        if self.address == LOCAL:
            import psutil
            import torch

            memory = 0.7 * psutil.virtual_memory().available
            nodes = [{"CPU": float(self.cores()), "GPU": float(torch.cuda.device_count()), "memory": memory}]
        else:
            with self.connected() as connection:
                connection.connect()
                nodes = connection.nodes()
        return [min(count, self.workers or count) for count in (_count_places(nodes, self.needs(info)) for info in models)]


def is_address(text: str) -> bool:
    """Return whether a text is local, auto or HOST:PORT."""
    host, _, port = text.rpartition(":")
    return text in (LOCAL, "auto") or (bool(host) and port.isdecimal() and "/" not in host and not host.startswith("-"))


def _count_places(nodes: Sequence[dict[str, float]], needs: dict[str, float]) -> int:
    return sum(min(int(node.get(key, 0) // needed) for key, needed in needs.items()) for node in nodes)


def import_ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray sends usage statistics by default
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise NeedleworkError("--ray needs Ray: pip install 'needlework[ray]'") from None


def node_id() -> str:
    return str(import_ray().get_runtime_context().get_node_id())


class RayConnection:
    """A connection to a cluster; calling it opens an executor (an `OpenExecutor`)."""

    def __init__(self, ray: Any, cluster: Cluster) -> None:
        self.ray, self.cluster = ray, cluster
        self._folder: Path | None = None
        self._connected = False
        self._ended = False  # Ray died

    def __call__(self, source: ModelSource, info: ModelInfo, most: int) -> AbstractContextManager[RayExecutor]:
        """Open an executor for one model, with at most `most` workers."""
        self.connect()
        if isinstance(source, WorkerModels):
            source.home = node_id()
        needs, workers = self.cluster.needs(info), self.cluster.workers
        if workers is None and not _count_places(self.nodes(), needs):
            text = ", ".join(f"{n / 2**30:.1f} GiB of memory" if key == "memory" else f"{n} {key}s" for key, n in needs.items())
            raise NeedleworkError(
                f"no node of the cluster has room for a worker ({text}); add nodes, or give --workers to wait for them"
            )
        return closing(RayExecutor(self, source, info, min(most, workers or most)))

    def nodes(self) -> list[dict[str, float]]:
        """Return the resources of every node that is alive."""
        return [node["Resources"] for node in self.ray.nodes() if node["Alive"]]

    def connect(self) -> None:
        """Connect to the cluster, or start a local one; do nothing if Ray is connected."""
        if self.ray.is_initialized():
            return
        # Ray prints errors of lost workers whatever its options are; the executor reports them in one line.
        self.ray._private.worker.print_to_stdstream = lambda *_, **__: None
        self._connected = True  # close() has work to do from here on
        constants, address = self.ray._private.ray_constants, self.cluster.address
        clustered = constants.ENABLE_RAY_CLUSTER
        if address == LOCAL or address.rpartition(":")[0] in _LOOPBACK:
            constants.ENABLE_RAY_CLUSTER = False  # else Ray replaces 127.0.0.1 by an external address
        try:
            if address == LOCAL:
                self._start_local()
            else:
                if address != "auto":
                    _check_answers(address)
                    self.ray._raylet.GcsClient(address=address)  # raises at once where ray.init() would retry for long
                self.ray.init(address=address, **_QUIET)
        except Exception as error:  # Ray raises many types
            self.ray.shutdown()
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            problem = f"no Ray cluster answers at {address} ({reason}); `ray start --head` begins one, and --ray local needs none"
            if address == LOCAL:
                problem = f"Ray cannot be started here ({reason}); try again, or run without --ray"
            elif "AuthenticationError" in (type(error).__name__, *str(error).split()) or "InvalidAuthToken" in str(error):
                token = "set RAY_AUTH_MODE=token and its RAY_AUTH_TOKEN (or RAY_AUTH_TOKEN_PATH)"
                problem = f"the Ray cluster at {address} refuses this token; {token}"
            raise NeedleworkError(problem) from None
        finally:
            constants.ENABLE_RAY_CLUSTER = clustered
        threading.Thread(target=self._watch_ray, daemon=True).start()

    def _start_local(self) -> None:
        """Start a cluster on this machine in a temporary folder."""
        short = tempfile.gettempdir() if len(tempfile.gettempdir()) < 30 else "/tmp"  # Ray's sockets need short paths
        _remove_stale_folders(Path(short))
        self._folder = Path(tempfile.mkdtemp(prefix=f"nw-{os.getpid()}-", dir=short))
        room = {"num_cpus": self.cluster.cores(), "object_store_memory": _STORE_BYTES, "_node_ip_address": "127.0.0.1"}
        start = partial(self.ray.init, address=LOCAL, include_dashboard=False, _temp_dir=str(self._folder), **room, **_QUIET)
        try:
            start()
        except Exception:  # on a busy machine Ray's startup may time out
            self.ray.shutdown()
            start()

    def close(self) -> None:
        if self._ended:
            time.sleep(60)  # wait for the watching thread to end the process: its message is the useful one
        if self._connected:
            self._connected = False
            self.ray.shutdown()
        for _ in range(50):  # Ray processes that are shutting down may still write
            if self._folder is None or not self._folder.exists():
                return
            shutil.rmtree(self._folder, ignore_errors=True)
            time.sleep(0.1)

    def _watch_ray(self) -> None:
        """Exit with a message when Ray's processes on this machine die; Ray itself would exit without one.

        Watches the raylet, its agents (the raylet exits when one of them is killed) and the GCS server, if it runs here.
        """
        with suppress(Exception):  # not Linux, or another version of Ray: no message then
            import psutil

            node, poll = self.ray._private.worker._global_node, select.poll()
            options = {  # arguments that identify the raylet of this node and the GCS server of this cluster
                "raylet": f"--raylet_socket_name={node.raylet_socket_name}",
                "gcs_server": f"--log_dir={node.get_logs_dir_path()}",
            }
            every = psutil.process_iter(["name", "cmdline"])
            found = {one for one in every if options.get(one.info["name"]) in (one.info["cmdline"] or ())}
            for one in found:
                poll.register(os.pidfd_open(one.pid), select.POLLIN)
            (raylet,) = (one for one in found if one.name() == "raylet")
            while not poll.poll(1000):  # agents may start late
                for one in set(raylet.children()) - found:
                    with suppress(psutil.Error, OSError):  # it has ended
                        if "agent" in (text := " ".join(one.cmdline()).lower()) and "worker" not in text:
                            poll.register(os.pidfd_open(one.pid), select.POLLIN)
                            found.add(one)
            if self._connected:
                self._ended = True
                ended = "error: Ray has ended on this machine (one of its processes was killed), and this command with it"
                say(f"{ended}; what was finished is kept: start Ray anew and give the same command", style="red")
                if self._folder is not None:  # removed by a separate process: Ray is about to end this one
                    remove = ["sh", "-c", 'sleep 2; rm -rf "$0"', str(self._folder)]
                    subprocess.Popen(remove, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                os._exit(2)


def _check_answers(address: str) -> None:
    """Raise unless an HTTP/2 (gRPC) server replies at this address; Ray itself would retry for minutes."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS) as connection:
        connection.sendall(_HTTP2_HELLO)
        reply = connection.recv(9)
    if reply[3:4] != b"\x04":  # the type of a SETTINGS frame
        raise ConnectionError("what answers there is no Ray cluster")


def _remove_stale_folders(parent: Path) -> None:
    """Remove temporary folders of local clusters whose process is dead."""
    import psutil

    for folder in parent.glob("nw-*-*"):
        owner = folder.name.split("-")[1]
        if owner.isdecimal() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(folder, ignore_errors=True)


class WorkerModels(DiskModels):
    """Models from disk or hub that each worker loads on its own node."""

    def __init__(self, memory_bytes: int | None, cluster: Cluster, versions: dict[str, str] | None = None) -> None:
        super().__init__(memory_bytes, True, versions or {})
        self.cluster = cluster
        self.home = ""  # node id of the driver, on which the hashes were computed

    def load(self, info: ModelInfo) -> LoadedModel:
        import torch

        from needlework.engine.budget import default_limit
        from needlework.subject import load

        torch.set_num_threads(self.cluster.threads)
        gpus, loading = self.cluster.gpus(info), info.model.loading.model_dump()
        place = info.directory if os.path.exists(info.directory) else str(locate(info.model))
        if self.home != node_id() and weights_hash(Path(place)) != info.weights:
            raise NeedleworkError(f"{short_repr(place)} on another node has other weights; copy the model there again")
        if gpus:
            loading |= {"device": "cuda", "device_map": "auto" if gpus > 1 else None}  # a worker sees only its own GPUs
        memory, threads = self.memory_bytes, self.cluster.threads
        if not memory and not gpus:  # its share of the default limit, as if workers occupied all cores of the machine
            memory = max(1, default_limit(torch.device("cpu")) * threads // max(threads, os.cpu_count() or 1))
        return LoadedSubject(load(place, memory_bytes=memory, **loading), info.model, self.more_versions)


Outcome = tuple[list[TimedAnswer], Any, tuple[str, str] | None]  # answers, value of a call, type and text of an error


class Worker:
    """A Ray actor that holds a loaded model."""

    def __init__(self, source: ModelSource, info: ModelInfo, registered: Sequence[Any], env: dict[str, str]) -> None:
        self.source, self.info, self.registered, self.env = source, info, registered, env
        self.model: LoadedModel

    def load(self) -> dict[str, str]:
        os.environ.update(self.env)
        for plugin in self.registered:
            plugins.define(*plugin)
        self.model = self.source.load(self.info)
        return self.model.versions()

    def execute(self, batch: Batch) -> Outcome:
        """Return the answers of a batch; if it raises, the answers until then and the error."""
        answers: list[TimedAnswer] = []
        for result in LocalExecutor(self.model).run([batch]):
            answers += result.answers
        error = result.error  # sent by name: the driver may not have its class
        return answers, result.value, None if error is None else (type(error).__name__, str(error))

    def share(self) -> float:
        return float(getattr(self.model, "share", float)())


@dataclass(eq=False)
class _Job:
    """A batch on its way through the executor."""

    batch: Batch
    deaths: int = 0
    share: float = 0.0
    share_call: Any = None  # pending call for its progress
    dropped: bool = False  # its result is not needed any more


class RayExecutor:
    """An executor that gives one batch at a time to each worker, and repeats the batch of a lost worker.

    Ray places, starts and monitors workers. Batches are assigned here, because Ray's own retries stay with one actor, which
    may wait for resources that never become free while other actors are idle.
    """

    def __init__(self, connection: RayConnection, source: ModelSource, info: ModelInfo, most: int) -> None:
        self.connection, self.ray, self.most = connection, connection.ray, most
        self._needs = connection.cluster.needs(info)
        resources = {key if key == "memory" else f"num_{key.lower()}s": value for key, value in self._needs.items()}
        options = {"num_cpus": connection.cluster.threads, **resources, "max_restarts": 0, "max_task_retries": 0}
        self._actor = self.ray.remote(concurrency_groups={"progress": 1}, **options)(Worker)  # callable during execute
        env = {key: os.environ[key] for key in _ENVIRONMENT if key in os.environ}
        self._sent = [self.ray.put(value) for value in (source, info, list(plugins.DEFINED.values()), env)]
        self._loading: dict[Any, Any] = {}  # call -> worker
        self._idle: list[Any] = []
        self._running: dict[Any, tuple[Any, _Job]] = {}  # call -> worker, job
        self._waiting: deque[_Job] = deque()
        self._versions: dict[str, str] | None = None
        self._refused, self._lost_loading, self._ticks_without = 0, 0, 0
        self._reported: set[str] = set()

    def versions(self) -> dict[str, str]:
        """Return the versions of the first worker; workers with other versions are refused."""
        while self._versions is None:
            self._step()
        return self._versions

    def run(self, batches: Iterable[Batch]) -> Generator[BatchResult, None, None]:
        jobs = (_Job(batch) for batch in batches)
        try:
            while True:
                self._hand_out(jobs)
                if not self._waiting and not self._live():
                    return
                results = self._step()
                self._hand_out(jobs)  # workers stay busy while the caller writes results
                yield from results or [BatchResult(job.batch, done=False) for job in self._live()]  # progress
        finally:
            self._waiting.clear()
            for job in self._live():
                job.dropped = True

    def _live(self) -> list[_Job]:
        return [job for _, job in self._running.values() if not job.dropped]

    def share(self, batch: Batch) -> float:
        return next((job.share for _, job in list(self._running.values()) if job.batch is batch), 0.0)

    def close(self) -> None:
        for worker in [*self._idle, *self._loading.values(), *(worker for worker, _ in self._running.values())]:
            self.ray.kill(worker, no_restart=True)

    def _hand_out(self, jobs: Iterator[_Job]) -> None:
        """Give jobs to idle workers. One job is fetched in advance: more workers are started only if a job waits."""
        while True:
            if not self._waiting:
                self._waiting.extend(islice(jobs, 1))
            if not self._waiting or not self._idle:
                return
            worker, job = self._idle.pop(), self._waiting.popleft()
            job.share, job.share_call = 0.0, None
            self._running[worker.execute.remote(job.batch)] = worker, job

    def _step(self) -> list[BatchResult]:
        """Start workers, wait up to one tick for calls to finish, and return the results of finished batches."""
        self._start_workers()
        results = []
        ready: list[Any] = []
        if calls := [*self._running, *self._loading]:
            self.ray.wait(calls, num_returns=1, timeout=TICK)
            ready = self.ray.wait(calls, num_returns=len(calls), timeout=0)[0]
        else:
            time.sleep(TICK)
        for call in ready:
            if call in self._loading:
                self._admit(call)
                continue
            worker, job = self._running.pop(call)
            result = self._finish(call, worker, job)
            if result and not job.dropped:
                results.append(result)
        self._poll_shares()
        return results

    def _start_workers(self) -> None:
        """Start as many workers as fit, minus the number that was refused, but at least one."""
        present = len(self._idle) + len(self._running) + len(self._loading)
        self._ticks_without = 0 if self._idle or self._running else self._ticks_without + 1
        if self._ticks_without == WAITING_TICKS:
            say("no worker has its model yet: waiting until the cluster has room and they have loaded it")
        if present and not self._waiting:
            return
        room = min(self.most, self.connection.cluster.workers or _count_places(self.connection.nodes(), self._needs))
        for _ in range(max(room - self._refused - present, min(room, 1) - present)):
            worker = self._actor.remote(*self._sent)
            self._loading[worker.load.remote()] = worker

    def _admit(self, call: Any) -> None:
        """Add a worker that has loaded its model, or refuse it if loading failed or its versions differ."""
        worker = self._loading.pop(call)
        try:
            versions: dict[str, str] = self._get(call)
            self._versions = self._versions or versions
            if versions != self._versions:
                other = ", ".join(f"{key} {value}" for key, value in versions.items() if self._versions.get(key) != value)
                raise NeedleworkError(f"it differs from the first one: {other}; install the same everywhere")
        except _Lost as lost:
            self._lost_loading += 1
            if self._lost_loading >= MAX_DEATHS:
                died = f"{MAX_DEATHS} workers one after the other died while they loaded the model ({lost}); {_MEMORY_HINT}"
                self._refuse(worker, NeedleworkError(died))
        except Exception as error:
            self._refuse(worker, error)
        else:
            self._lost_loading = 0
            self._idle.append(worker)

    def _refuse(self, worker: Any, error: Exception) -> None:
        """Stop a worker and continue without it; raise the error if there is no other worker."""
        self.ray.kill(worker, no_restart=True)
        if not (self._idle or self._running or self._loading):
            raise error
        self._refused += 1
        self._lost_loading = 0
        if str(error) not in self._reported:
            self._reported.add(str(error))
            say(f"a worker is left out: {error}", style="yellow")

    def _finish(self, call: Any, worker: Any, job: _Job) -> BatchResult | None:
        """Return the result of a batch; None if its worker was lost and the batch was queued again (or dropped)."""
        try:
            answers, value, error = self._get(call)
        except _Lost as lost:
            self.ray.kill(worker, no_restart=True)
            job.deaths += 1
            if job.deaths < MAX_DEATHS:
                if not job.dropped:
                    say(f"a worker was lost ({lost}); its batch runs again", style="yellow")
                    self._waiting.appendleft(job)
                return None
            text = f"it ended {job.deaths} workers, each that it was given to: {lost}; {_MEMORY_HINT}"
            return BatchResult(job.batch, error=WorkerLost(text))
        except Exception as other:
            self._idle.append(worker)
            return BatchResult(job.batch, error=other)
        self._idle.append(worker)
        if error:  # an exception with the type name and text that the worker reported
            known = {cls.__name__: cls for cls in (NeedleworkError, NotSupported)}
            error = known.get(error[0], type(error[0], (RuntimeError,), {}))(error[1])
        return BatchResult(job.batch, answers, value, error=error)

    def _get(self, call: Any) -> Any:
        """Return the result of a call; raise _Lost if its worker died."""
        types = self.ray.exceptions
        try:
            return self.ray.get(call)
        except types.RayTaskError as error:
            raise error.cause if isinstance(error.cause, Exception) else NeedleworkError(str(error)) from None
        except tuple(getattr(types, name) for name in _LOST) as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            text = lines[-1] if "creation task" in lines[0] else lines[0]  # the cause is in the last line
            raise _Lost(text if len(text) <= 160 else f"{text[:150]} ...") from None

    def _poll_shares(self) -> None:
        """Update the progress of running batches without waiting for workers."""
        for worker, job in self._running.values():
            if job.share_call is None:
                job.share_call = worker.share.options(concurrency_group="progress").remote()
            elif self.ray.wait([job.share_call], timeout=0)[0]:
                with suppress(_Lost):  # the call of the batch reports it
                    job.share, job.share_call = self._get(job.share_call), None


class _Lost(Exception):
    """A worker died; its running call has no result."""
