"""`driver.py PLAN OUT ADDRESS PAUSE MARKER`: a run of fake models on a Ray cluster, in a process of its own, to be killed."""

from __future__ import annotations

import sys

import fakes

from needlework.experiments import run, trials
from needlework.experiments.plan import load
from needlework.experiments.ray_executor import Cluster

if __name__ == "__main__":
    plan, out, address, pause, marker = sys.argv[1:]
    trials.CHUNK_TRIALS = 16
    source = fakes.FakeModels(fakes.Hungry(float(pause), marker=marker) if marker else fakes.FakeActor(float(pause)))
    loaded = load(plan, make_task=fakes.make_task)
    sys.exit(not run.run(loaded, out, source=source, progress=False, cluster=Cluster(address)).sound)
