"""Does `needlework plan` say how long a large model takes? RecurrentGemma-2B at its full size, with random weights, in bf16.

    python benchmarks/scale.py [estimate | workers]      default: estimate

estimate: a few cells of the paper's grid are really run, on two threads; what that took against what the plan said (goal:
within a factor of 1.5, either way). Processor time is compared, so that it means something on a busy machine: on an idle one it
is threads x wall time. Needs 12 GB of memory and 6 GB of disk, and some minutes.
workers: a plan on two workers of a local Ray cluster against one, one thread each (goal: 1.7 times as many trials a second). The
same units in all runs; loading and a first question are not counted. Both the clock and processor time are told.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that wait take no processor time
os.environ.setdefault("RAY_worker_niceness", "0")  # by default Ray's workers give way to all other programs

import psutil
import torch
from rich.console import Console

import needlework as nw

console = Console()
THREADS = 2
LARGEST_FACTOR, LEAST_SPEEDUP = 1.5, 1.7
CELLS = """
models: [{source: model, name: recurrentgemma-2b, dtype: bfloat16}]
experiments:
  cells:
    tasks:
      - {kind: niah, lengths: [250, 1105], depths: [44], reserve_tokens: 200, max_new_tokens: 40}
    interventions: [none, "keep_heads(k={1, 2, 4, 7}, phase='decode')"]
"""
SWEEP = """
models: [tiny-griffin]
experiments:
  sweep:
    tasks: [{kind: niah, samples: 4}]
    interventions: [none, "keep_heads(k=0..H, phase={'decode', 'both'})"]
"""
ROUNDS = 2
SMALL_CHUNKS = 64  # a tiny model's plan would be one or two chunks, and nothing to part
WARM_UP = 4  # trials that each worker is asked before it counts


def random_model(folder: Path) -> None:
    """The public configuration with random weights, saved as any checkpoint."""
    from transformers import AutoModelForCausalLM

    from needlework.model.files import preset_config
    from needlework.toy import tokenizer

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(preset_config("recurrentgemma-2b"), dtype=torch.bfloat16)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    tokenizer.build().save_pretrained(folder)


def loaded() -> str:
    return f"load average {os.getloadavg()[0]:.1f} on {psutil.cpu_count()} cores"


def estimate() -> bool:
    from needlework.experiments.estimate import describe
    from needlework.experiments.plan import get

    free = psutil.virtual_memory().available / 1e9
    if free < 12:
        console.print(f"{free:.1f} GB of memory are free, and this needs 12; nothing was run")
        return False
    torch.set_num_threads(THREADS)
    with tempfile.TemporaryDirectory(prefix="needlework-scale-") as temporary:
        folder = Path(temporary)
        random_model(folder / "model")
        (folder / "plan.yaml").write_text(CELLS)
        said = describe(get(folder / "plan.yaml")).seconds
        times: dict[str, Any] = {}
        with asking_timed(times):
            nw.run(folder / "plan.yaml", folder / "out", doctor="off", progress=False, tell=False)
    took = times["processor"] / THREADS
    factor = max(took / said, said / took)
    console.print(
        f"recurrentgemma-2b, bf16, {THREADS} threads, {loaded()}: the plan said {said:.0f} s; {took:.0f} s of processor time a"
        f" thread were taken ({times['wall']:.0f} s by the clock): a factor of {factor:.2f}, goal {LARGEST_FACTOR}"
    )
    return factor <= LARGEST_FACTOR


def workers() -> bool:
    from needlework.experiments import trials
    from needlework.experiments.ray_executor import Cluster

    trials.CHUNK_TRIALS = SMALL_CHUNKS
    seconds: dict[int, list[float]] = {1: [], 2: []}
    processor: dict[int, list[float]] = {1: [], 2: []}  # of the worker that took most
    fingerprints = set()
    with tempfile.TemporaryDirectory(prefix="needlework-scale-") as temporary:
        folder = Path(temporary)
        (folder / "plan.yaml").write_text(SWEEP)
        with Cluster(workers=2).connected() as connection:
            connection.connect()  # one cluster for all of them
            for turn in range(ROUNDS):
                for count in (1, 2) if turn % 2 == 0 else (2, 1):
                    times: dict[str, Any] = {"workers": count}
                    with asking_timed(times):
                        out = folder / f"{turn}-{count}"
                        done = nw.run(
                            folder / "plan.yaml", out, doctor="off", progress=False, tell=False, cluster=Cluster(workers=count)
                        )
                    seconds[count].append(times["wall"])
                    processor[count].append(times["busiest"])
                    fingerprints.add(done.fingerprint)
    speedup = min(seconds[1]) / min(seconds[2])
    parted = min(processor[1]) / min(processor[2])
    each = {count: ", ".join(f"{value:.1f}" for value in taken) for count, taken in seconds.items()}
    console.print(
        f"one worker {each[1]} s, two workers {each[2]} s, one thread each, {loaded()}: {speedup:.2f} times as fast (best),"
        f" goal {LEAST_SPEEDUP}; {len(fingerprints)} fingerprint for all of them. Processor time: the only worker"
        f" {min(processor[1]):.1f} s, the busier of two {min(processor[2]):.1f} s: {parted:.2f} times"
    )
    busy = os.getloadavg()[0] > 2 * (psutil.cpu_count() or 1)  # then the clock says nothing of two workers
    return (parted if busy else speedup) >= LEAST_SPEEDUP and len(fingerprints) == 1


def actors() -> dict[int, float]:
    """Processor time of each worker."""
    named = [one for one in psutil.process_iter(["cmdline"]) if "ray::Worker" in " ".join(one.info["cmdline"] or ())]
    return {one.pid: sum(one.cpu_times()[:2]) for one in named}


class asking_timed:
    """Times what a run asks, without what it loads."""

    def __init__(self, times: dict[str, Any]) -> None:
        self.times = times

    def __enter__(self) -> None:
        from needlework.experiments.models import Batch
        from needlework.experiments.run import _ModelRun

        whole, times = _ModelRun._ask, self.times

        def timed(run: Any, executor: Any, chunks: Any, tracker: Any) -> Any:
            while len(getattr(executor, "_idle", ())) < times.get("workers", 0):  # until all of them have their model
                executor._step()
            few = [request for trial in chunks[0][:WARM_UP] for request in trial.requests(run.rankings)]
            for call in [worker.execute.remote(Batch(few)) for worker in getattr(executor, "_idle", ())]:
                executor.ray.get(call)  # the first question's own cost does not depend on the number of workers
            before, began, clock = actors(), time.process_time(), time.monotonic()
            broken = whole(run, executor, chunks, tracker)
            times["busiest"] = max((used - before.get(pid, 0.0) for pid, used in actors().items()), default=0.0)
            times["processor"], times["wall"] = time.process_time() - began, time.monotonic() - clock
            return broken

        self._put = _ModelRun, whole
        _ModelRun._ask = timed  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        owner, whole = self._put
        owner._ask = whole  # type: ignore[method-assign]


def main() -> int:
    names = sys.argv[1:] or ["estimate"]
    return not all({"estimate": estimate, "workers": workers}[name]() for name in names)


if __name__ == "__main__":
    sys.exit(main())
