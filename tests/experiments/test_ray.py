"""The same plan on a real Ray cluster of several nodes: killed workers, lost nodes and a dead driver change no row."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from fake_ray import FakeRay
from test_determinism import small_model
from test_run import HERE, _count, _hear_ctrl_c, go, table
from typer.testing import CliRunner

import needlework as nw
from needlework.cli import app
from needlework.errors import NeedleworkError
from needlework.experiments import ray_executor
from needlework.experiments.plan import Model
from needlework.experiments.ray_executor import Cluster, RayConnection, WorkerModels
from needlework.results import Store, compare

pytestmark = pytest.mark.usefixtures("small_chunks")


# --- without Ray -------------------------------------------------------------------------------------------------------


def test_without_ray_the_error_says_what_to_install(plan_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(NeedleworkError, match=r"pip install 'needlework\[ray\]'"):
        go(plan_file, tmp_path / "out", cluster=Cluster())
    assert not (tmp_path / "out").exists(), "nothing was begun"


@pytest.mark.parametrize("address", ["ray://head:10001", "plan.yaml", "", "head", "--out", "head:"])
def test_what_is_no_address_is_refused(address: str) -> None:
    assert not ray_executor.is_address(address)
    with pytest.raises(NeedleworkError, match="is no Ray cluster; give local, auto or HOST:PORT"):
        Cluster(address)


@pytest.mark.parametrize(
    "words, address",
    [(["--ray"], "local"), (["--ray", "auto"], "auto"), (["--ray", "10.0.0.1:6379"], "10.0.0.1:6379"), (["--ray=auto"], "auto")],
)
@pytest.mark.parametrize("last", [False, True])
def test_the_option_may_stand_without_an_address(
    words: list[str], address: str, last: bool, plan_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    def noting(*given: Any, **options: Any) -> None:
        seen.update(options)
        raise NeedleworkError("seen")

    monkeypatch.setattr(nw, "run", noting)
    others = [str(plan_file), "--out", str(tmp_path / "out"), "--workers", "3", "--threads", "2"]
    CliRunner().invoke(app, ["run", *(others + words if last else words + others)])
    assert seen["cluster"] == Cluster(address, workers=3, threads=2)
    CliRunner().invoke(app, ["run", *others[:3]])
    assert seen["cluster"] is None
    refused = CliRunner().invoke(app, ["run", *others])
    assert refused.exit_code == 2
    assert "give --ray, too" in refused.output


@pytest.mark.parametrize(
    "words", [["run", "demo", "--ray", "nonsense"], ["run", "--ray", "head", "demo"], ["heads", "x", "--ray", "y"]]
)
def test_a_word_that_is_no_address_is_named_with_what_would_be_one(words: list[str]) -> None:
    refused = CliRunner().invoke(app, words)
    said = " ".join(refused.output.replace("│", " ").split())
    assert refused.exit_code == 2, said
    assert f"--ray '{words[words.index('--ray') + 1]}' is no address of a Ray cluster" in said, said
    assert "--ray HOST:PORT of its head node" in said
    other = CliRunner().invoke(app, ["run", "demo", "more", "--ray", "--workers", "2"])
    assert other.exit_code == 2
    assert "no address" not in other.output, "what follows is an option: the word too many is another one"


def test_a_node_with_other_weights_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    source = WorkerModels(None, Cluster(threads=torch.get_num_threads()))
    info = source.inspect(Model("here", "griffin", "tiny-griffin-small"))
    monkeypatch.setattr(ray_executor, "node_id", lambda: "another node")
    assert source.load(info).versions()["dtype"] == "float32"
    with pytest.raises(NeedleworkError, match="on another node has other weights"):
        source.load(replace(info, weights="0" * len(info.weights)))
    source.home = "another node"  # the driver's own: its files were hashed a moment ago
    source.load(replace(info, weights="0" * len(info.weights)))


class Unwilling:
    """A Ray that does not begin, the first time or ever."""

    def __init__(self, failures: int) -> None:
        self.failures, self.begun, self.left = failures, 0, 0
        self._raylet = SimpleNamespace(GcsClient=lambda address: None)
        self._private = SimpleNamespace(worker=SimpleNamespace(), ray_constants=SimpleNamespace(ENABLE_RAY_CLUSTER=True))

    def is_initialized(self) -> bool:
        return False

    def init(self, **_: Any) -> None:
        self.begun += 1
        if self.begun <= self.failures:
            raise Exception("The current node timed out during startup.\nmore")

    def shutdown(self) -> None:
        self.left += 1


def test_a_ray_that_does_not_begin_is_tried_again_and_then_told() -> None:
    for failures in (1, 9):
        ray = Unwilling(failures)
        connection = RayConnection(ray, Cluster())
        if failures == 1:
            connection.connect()
        else:
            with pytest.raises(
                NeedleworkError, match=r"Ray cannot be started here \(The current node timed out during startup.\)"
            ):
                connection.connect()
        connection.close()
        assert (ray.begun, ray.left) == (2, 2 if failures == 1 else 3), "each try is left, and in the end so is Ray"
    with pytest.raises(NeedleworkError, match="no Ray cluster answers at head:6379"):
        RayConnection(Unwilling(9), Cluster("head:6379")).connect()


@pytest.mark.parametrize("reply", [b"SSH-2.0-OpenSSH_9.2\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", None])
def test_an_address_where_something_else_answers_is_refused_at_once(reply: bytes | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """None: it accepts and is silent. Ray itself would try for minutes."""
    monkeypatch.setattr(ray_executor, "CONNECT_SECONDS", 0.5)
    open_ones = []

    def serve(server: socket.socket) -> None:
        connection, _ = server.accept()
        open_ones.append(connection)
        if reply is not None:
            connection.sendall(reply)
            connection.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, args=(server,), daemon=True).start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        ray, began = Unwilling(0), time.monotonic()
        with pytest.raises(NeedleworkError, match=f"no Ray cluster answers at {address}"):
            RayConnection(ray, Cluster(address)).connect()
    assert time.monotonic() - began < 5
    assert ray.begun == 0, "Ray was not asked"


def test_a_refused_token_is_called_that(monkeypatch: pytest.MonkeyPatch) -> None:
    class AuthenticationError(Exception):
        pass

    def refuse(address: str) -> None:
        raise AuthenticationError("RPC error: InvalidAuthToken: Authentication token is missing or incorrect.")

    ray = Unwilling(0)
    ray._raylet = SimpleNamespace(GcsClient=refuse)
    monkeypatch.setattr(ray_executor, "_check_answers", lambda address: None)
    with pytest.raises(NeedleworkError, match=r"cluster at head:6379 refuses this token; set RAY_AUTH_MODE=token") as error:
        RayConnection(ray, Cluster("head:6379")).connect()
    assert "no Ray cluster answers" not in str(error.value)


def test_directories_of_killed_processes_are_removed_and_others_are_not(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for name in (f"nw-{ended.pid}-x", f"nw-{os.getpid()}-y", "nw-mine-z", "nw-7"):
        (tmp_path / name / "session").mkdir(parents=True)
    ray_executor._remove_stale_folders(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([f"nw-{os.getpid()}-y", "nw-mine-z", "nw-7"])


@pytest.mark.slow
def test_an_evaluation_goes_through_the_same_runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from needlework.lmeval.evaluate import evaluate

    threads = torch.get_num_threads()
    monkeypatch.setattr(ray_executor, "node_id", lambda: "")
    monkeypatch.setattr(ray_executor, "import_ray", lambda: FakeRay(threads=threads))
    monkeypatch.setattr(ray_executor, "TICK", 0.0)
    acts = ["none", "keep_heads(k=2, phase='both')"]
    found = []
    for out, workers in (("alone", None), ("pooled", Cluster(threads=threads))):
        options: dict[str, Any] = {"limit": 4, "progress": False, "cluster": workers}
        found.append(evaluate("tiny-griffin-small", ["mini-mmlu"], acts, tmp_path / out, **options))
    assert found[0].lines == found[1].lines
    assert table(tmp_path / "alone") == table(tmp_path / "pooled")
    assert Store(tmp_path / "alone").versions() == Store(tmp_path / "pooled").versions()


# --- a real cluster ----------------------------------------------------------------------------------------------------


@dataclass
class Nodes:
    """A cluster of several nodes in one machine: one for the head, the others for a worker each."""

    ray_cluster: Any
    address: str

    def add(self) -> Any:
        return self.ray_cluster.add_node(num_cpus=1, object_store_memory=2**27, node_ip_address="127.0.0.1")

    def workers(self) -> list[int]:
        """The processes of our actors, by the raylets that they belong to."""
        ours = []
        for node in [*self.ray_cluster.worker_nodes]:
            for kinds in node.all_processes.values():
                for one in kinds:
                    if psutil.pid_exists(one.process.pid):
                        family = psutil.Process(one.process.pid).children(recursive=True)
                        ours += [child.pid for child in family if " ".join(child.cmdline()).startswith("ray::Worker.execute")]
        return sorted(set(ours))


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    from ray.cluster_utils import Cluster as RayCluster

    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": 2**27, "node_ip_address": "127.0.0.1"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), *sys.path]))  # workers know the fakes
        made = RayCluster(initialize_head=True, head_node_args=head)
        both = Nodes(made, made.address)
        try:
            both.add()
            both.add()
            yield both
        finally:
            made.shutdown()


PLAN = """
models: [griffin]
rankings:
  mass:
    tasks: [{kind: niah, lengths: [48], depths: [0, 100]}]
    seeds: [1002]
experiments:
  sweep:
    tasks: [{kind: niah, lengths: [40, 56], depths: [0, 100], samples: 2}]
    interventions: [none, "keep_heads(k={0, 2})", "swap_memory(half='kv')", "keep_heads(2, by=recorded('mass'))", twice(0.5)]
  look:
    tasks: [{kind: niah, lengths: [40], depths: [0, 100], samples: 2}]
    interventions: none
    observe: true
  ability:
    tasks: [{kind: cloze_choice, per_subject: 1}, {kind: perplexity, samples: 2, tokens: 32}]
    interventions: [none, ablate_attention()]
"""
SHORT = """
models: [griffin]
experiments:
  one:
    tasks: [{kind: niah, lengths: [40], depths: [50]}]
    interventions: none
"""
PLUGIN = """
import needlework as nw

@nw.register
class Twice(nw.Part):
    side = "attention"
    factor: float

    def lower(self, context):
        for layer in self.where(context.anatomy):
            yield nw.ChangeOutputs(layer, lambda outputs, place: outputs * self.factor)
"""


@pytest.mark.slow
def test_a_real_model_on_two_nodes_gives_the_store_of_one_process(nodes: Nodes, tmp_path: Path) -> None:
    """A plug-in, a recorded ranking, a recording and the doctor, too; weights on other nodes are held against the hash."""
    small_model(tmp_path, "griffin", 0)
    (tmp_path / "plan.yaml").write_text(PLAN)
    (tmp_path / "twice.py").write_text(PLUGIN)
    nw.plugins.load(tmp_path / "twice.py")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        alone = nw.run(tmp_path / "plan.yaml", tmp_path / "alone", progress=False)
    finally:
        torch.set_num_threads(before)
    spread = nw.run(tmp_path / "plan.yaml", tmp_path / "spread", progress=False, cluster=Cluster(nodes.address))
    assert alone.fingerprint == spread.fingerprint
    found = compare(alone.directory, spread.directory)
    assert found.same, found.text()
    assert found.logprobs == 0.0, "bit for bit, with as many threads"
    assert table(alone.directory) == table(spread.directory)
    stores = [Store(alone.directory), Store(spread.directory)]
    assert stores[0].meta("rankings") == stores[1].meta("rankings")
    assert stores[0].versions() == stores[1].versions()
    assert len(stores[1].observations()) > 0
    for store in stores:
        store.close()
    assert [c.sound for c in alone.checkups().values()] == [c.sound for c in spread.checkups().values()]


def drive(plan: Path, out: Path, nodes: Nodes, pause: float, marker: str = "") -> subprocess.Popen[bytes]:
    command = [sys.executable, str(HERE / "driver.py"), str(plan), str(out), nodes.address, str(pause), marker]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=_hear_ctrl_c)


def until(process: subprocess.Popen[bytes], happens: Callable[[], object]) -> Any:
    """Wait for it; a run that ends before has gone too fast or wrong."""
    while not (found := happens()):
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    return found


@pytest.mark.slow
def test_a_killed_worker_a_lost_node_and_one_out_of_memory_change_no_row(nodes: Nodes, plan_file: Path, tmp_path: Path) -> None:
    go(plan_file, tmp_path / "alone")
    out = tmp_path / "out"
    process = drive(plan_file, out, nodes, pause=0.1, marker=str(tmp_path / "ate"))
    until(process, (tmp_path / "ate").exists)
    until(process, lambda: _count(out) >= 1)
    os.kill(until(process, nodes.workers)[0], signal.SIGKILL)
    until(process, lambda: _count(out) >= 40)
    nodes.ray_cluster.remove_node(sorted(nodes.ray_cluster.worker_nodes, key=id)[0])
    nodes.add()
    printed, said = process.communicate(timeout=240)
    assert process.returncode == 0, said
    assert said.count(b"a worker was lost") >= 3, said
    assert printed == b"", "Ray says nothing"
    assert table(out) == table(tmp_path / "alone")


@pytest.mark.slow
def test_a_killed_driver_is_resumed_and_ctrl_c_keeps_what_is_finished(nodes: Nodes, plan_file: Path, tmp_path: Path) -> None:
    go(plan_file, tmp_path / "alone")
    out = tmp_path / "out"
    for stop in (signal.SIGKILL, signal.SIGINT):
        before = _count(out)
        process = drive(plan_file, out, nodes, pause=0.1)
        until(process, lambda before=before: _count(out) > before)
        process.send_signal(stop)
        _, said = process.communicate(timeout=120)
        assert before < _count(out) < 146, said
        assert stop == signal.SIGKILL or b"the same command goes on from there" in said
    process = drive(plan_file, out, nodes, pause=0.0)
    _, said = process.communicate(timeout=240)
    assert process.returncode == 0, said
    assert table(out) == table(tmp_path / "alone")


@pytest.mark.slow
@pytest.mark.serial
def test_the_command_makes_a_cluster_of_its_own_and_leaves_nothing_behind(tmp_path: Path) -> None:
    small_model(tmp_path, "griffin", 0)
    (tmp_path / "plan.yaml").write_text(SHORT)
    words = [
        "run",
        str(tmp_path / "plan.yaml"),
        "--out",
        str(tmp_path / "out"),
        "--doctor",
        "off",
        "--json",
        "--ray",
        "--workers",
        "1",
    ]
    command = [sys.executable, "-m", "needlework", *words]
    with TemporaryDirectory(prefix="t-", dir="/tmp") as short:  # Ray's sockets have short names
        env = {**os.environ, "TMPDIR": short}
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240, env=env)
        assert done.returncode == 0, done.stderr
        said = [line for line in done.stderr.splitlines() if not line.startswith("no worker has its model yet")]  # a busy machine
        assert len(said) == 1, "Ray says nothing"
        assert said[0].startswith("1 trials in ")
        assert json.loads(done.stdout)["sound"]
        assert not [path for path in Path(short).iterdir() if path.name.startswith("nw-")]
        of_ray = [one.info["cmdline"] for one in psutil.process_iter(["cmdline", "name"]) if one.info["name"] == "raylet"]
        assert not [words for words in of_ray if any(short in word for word in words or ())]


@pytest.mark.slow
@pytest.mark.serial
@pytest.mark.parametrize("victim", ["ray::RuntimeEnvAgent", "raylet"])
def test_when_rays_agent_is_killed_the_command_says_so(victim: str, plan_file: Path, tmp_path: Path) -> None:
    """And leaves no directory; what was finished is kept. Its cluster is bound to 127.0.0.1 alone."""
    out = tmp_path / "out"
    with TemporaryDirectory(prefix="t-", dir="/tmp") as short:
        env = {**os.environ, "TMPDIR": short, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
        command = [sys.executable, str(HERE / "driver.py"), str(plan_file), str(out), "local", "0.3", ""]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)
        until(process, lambda: time.sleep(1) or _count(out) >= 1)  # seldom: a store is locked while it is made
        family = psutil.Process(process.pid).children(recursive=True)
        (raylet,) = (one for one in family if one.name() == "raylet")
        assert "--node_ip_address=127.0.0.1" in raylet.cmdline()
        listening = [c.laddr.ip for one in family for c in one.net_connections() if c.status == "LISTEN"]
        assert {ip.removeprefix("::ffff:") for ip in listening} <= {"127.0.0.1", "::1"}
        next(one for one in family if " ".join(one.cmdline()).startswith(victim) or one.name() == victim).kill()
        _, said = process.communicate(timeout=120)
        assert process.returncode == 2, said
        assert b"error: Ray has ended on this machine" in said, said
        deadline = time.monotonic() + 30
        while list(Path(short).glob("nw-*")) and time.monotonic() < deadline:
            time.sleep(0.5)
        assert not list(Path(short).glob("nw-*"))
    assert _count(out) >= 1


TOKEN_HEAD = """
import sys, time
from ray.cluster_utils import Cluster
args = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 2**27, "node_ip_address": "127.0.0.1"}
print(Cluster(initialize_head=True, head_node_args=args).address, flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_a_cluster_that_wants_another_token(plan_file: Path, tmp_path: Path) -> None:
    env = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a" * 32}
    head = subprocess.Popen([sys.executable, "-c", TOKEN_HEAD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True)
    try:
        assert head.stdout is not None
        address = head.stdout.readline().strip()
        words = ["run", "demo", "--out", str(tmp_path / "out"), "--ray", address]
        command = [sys.executable, "-m", "needlework", *words]
        other = {**env, "RAY_AUTH_TOKEN": "b" * 32}
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=other)
    finally:
        head.communicate("", timeout=60)
    assert done.returncode == 2, done.stderr
    assert "refuses this token" in done.stderr, done.stderr
