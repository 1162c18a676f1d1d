"""How fast does the playground answer a change? Every model of the zoo, and smollm2-135m where it is installed.

    python benchmarks/play.py [MODEL ...]

A change is one request of the page: the greedy answer, its attention, and four options of the forced choice, under one
intervention. The tour is walked with nothing kept from earlier walks; its first state reads the prompt and is timed apart.
Answers are first compared with `subject.generate`. Goals on two cores: a median of 150 ms on a zoo model, a second on
smollm2-135m. On a busy machine processor time is the fairer number, so both are printed, with the machine's load; the goal is
judged by the clock.
"""

from __future__ import annotations

import os
import sys
import time
from statistics import median

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that wait take no processor time
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

import needlework as nw
from harness import report_goals
from needlework import zoo
from needlework.play.playground import Playground
from needlework.play.state import RequestState, intervention_of

ROUNDS = 5
ZOO_GOAL, SMOLLM2_GOAL = 150.0, 1000.0  # milliseconds


def measure(name: str) -> str:
    """Time every story of a model in turns and print the medians; return what missed its goal, or ""."""
    playground = Playground(nw.load(name), name)
    prompt = playground.sample(**playground.first_draw)
    requests = playground.tour(prompt)
    check_equal(playground, requests)
    clock: dict[bool, list[float]] = {True: [], False: []}  # by whether the prompt is new
    cpu: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(ROUNDS):
        playground.forget()
        for place, request in enumerate(requests):
            start, spent = time.perf_counter(), time.process_time()
            playground.generate(request)
            clock[not place].append(1000 * (time.perf_counter() - start))
            cpu[not place].append(1000 * (time.process_time() - spent))
    tokens, changes, load = len(playground.encode(prompt).ids), clock[False], os.getloadavg()[0]
    print(
        f"{name:20} {tokens:4} tokens, {len(changes):3} changes: median {median(changes):6.0f} ms (processor"
        f" {median(cpu[False]):6.0f} ms), slowest {max(changes):6.0f} ms; new prompt {median(clock[True]):6.0f} ms (processor"
        f" {median(cpu[True]):6.0f} ms); load {load:.1f}",
        flush=True,
    )
    goal = SMOLLM2_GOAL if name == zoo.SMOLLM2 else ZOO_GOAL
    return f"{name} {median(changes):.0f} ms of {goal:.0f} ms" if median(changes) > goal else ""


def check_equal(playground: Playground, requests: list[RequestState]) -> None:
    """Compare all answers with those of `subject.generate`."""
    for request in requests:
        found = playground.generate(request)
        encoded = playground.encode(request.prompt)
        (told,) = playground.subject.generate(
            [encoded.ids],
            intervention_of(request.parts),
            spans=[encoded.spans],
            twins=[encoded.twins],
            stop=playground.describe()["stop"],
            max_new_tokens=request.max_new_tokens,
        )
        if [token["id"] for token in found["tokens"]] != list(told.tokens):
            raise SystemExit(f"{playground.name}: the page and generate differ under {found['intervention']}")


def main() -> int:
    print(f"{torch.get_num_threads()} threads on {os.cpu_count()} cores")
    names = sys.argv[1:] or zoo.names()
    missed = []
    for name in names:
        try:
            missed.append(measure(name))
        except nw.NeedleworkError as error:
            if name != zoo.SMOLLM2 or sys.argv[1:]:
                raise
            print(f"{name}: left out ({error})")
    return report_goals([goal for goal in missed if goal])


if __name__ == "__main__":
    sys.exit(main())
