"""Hours of runs in one process: memory stays flat, and no hook, file or thread is left behind.

    python benchmarks/soak.py [MINUTES]      default: 60

One plan after the other, into a new directory each, on models of three makes. After a quarter of the time nothing may grow any
more: resident memory stays within 5 % of what it was then; hooks on modules, open files and threads are as many as after the
first round; and all fingerprints of a model are one.
"""

from __future__ import annotations

import gc
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console

import needlework as nw

console = Console()
MODELS = ("tiny-griffin-small", "tiny-jamba", "tiny-mamba")
PLAN = """
models: [MODEL]
experiments:
  sweep:
    tasks: [{kind: niah, lengths: [40, 56], depths: [0, 50, 100]}]
    interventions: [none, "keep_heads(k={0, 2})", ablate_attention(), ablate_recurrent(), "swap_memory(half='kv')"]
  look:
    tasks: [{kind: niah, lengths: [40], depths: [50]}]
    interventions: none
    observe: true
  ability:
    tasks: [{kind: cloze_choice, per_subject: 1}]
    interventions: none
"""
MOST_GROWTH = 1.05


def hooks() -> int:
    """On all modules that are alive, and on all modules at once."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    with warnings.catch_warnings(action="ignore"):  # some objects complain about being looked at
        modules = [one for one in gc.get_objects() if isinstance(one, torch.nn.Module)]
    everywhere = [getattr(torch.nn.modules.module, f"_global{name}", ()) for name in names]
    return sum(len(getattr(module, name)) for module in modules for name in names) + sum(map(len, everywhere))


def state() -> dict[str, Any]:
    gc.collect()
    process = psutil.Process()
    return {
        "memory": process.memory_info().rss,
        "hooks": hooks(),
        "files": len(process.open_files()),
        "threads": process.num_threads(),
    }


def main() -> int:
    minutes = float(sys.argv[1]) if sys.argv[1:] else 60.0
    fingerprints: dict[str, set[str]] = {}
    first: dict[str, Any] = {}
    settled: dict[str, Any] = {}
    faults: list[str] = []
    began, rounds, largest = time.monotonic(), 0, 0
    while not settled or time.monotonic() - began < 60 * minutes:
        with tempfile.TemporaryDirectory(prefix="needlework-soak-") as temporary:
            for model in MODELS:
                plan = Path(temporary) / f"{model}.yaml"
                plan.write_text(PLAN.replace("MODEL", model))
                done = nw.run(plan, Path(temporary) / model, progress=False, tell=False, doctor="off")
                fingerprints.setdefault(model, set()).add(done.fingerprint)
        rounds += 1
        now = state()
        first = first or now
        if not settled and rounds >= 2 and time.monotonic() - began >= 15 * minutes:
            settled = now
        if settled:
            largest = max(largest, now["memory"])
            for what in ("hooks", "files", "threads"):
                if now[what] > first[what]:
                    faults.append(f"round {rounds}: {now[what]} {what}, {first[what]} after the first one")
    growth = largest / settled["memory"]
    faults += [f"{model}: {len(found)} fingerprints" for model, found in fingerprints.items() if len(found) > 1]
    if growth > MOST_GROWTH:
        faults.append(f"memory grew by a factor of {growth:.3f}")
    sizes = ", ".join(f"{one['memory'] / 2**20:.0f} MiB" for one in (first, settled, now))
    console.print(
        f"{rounds} rounds of {len(MODELS)} runs in {(time.monotonic() - began) / 60:.1f} min: memory after the first, settled"
        f" and at the end: {sizes}; the largest then is {growth:.3f} of it, goal {MOST_GROWTH}; {now['hooks']} hooks,"
        f" {now['files']} files, {now['threads']} threads"
    )
    for fault in faults[:10]:
        console.print(fault)
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
