"""How fast does the playground answer a change? Every model of the zoo, and smollm2-135m where it is installed.

    python benchmarks/play.py [MODEL ...]

A change is one request of the page: the greedy answer and four options of the forced choice, under one intervention, with nothing
kept from earlier requests. Answers are first compared with `subject.generate`. Goals on two cores: a median of 150 ms on a zoo
model, a second on smollm2-135m. On a busy machine processor time is the fairer number, so both are printed; the goal is
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
    clock: list[float] = []
    cpu: list[float] = []
    for _ in range(ROUNDS):
        for request in requests:
            start, spent = time.perf_counter(), time.process_time()
            playground.forget()
            playground.generate(request)
            clock.append(1000 * (time.perf_counter() - start))
            cpu.append(1000 * (time.process_time() - spent))
    tokens = len(playground.encode(prompt).ids)
    worst = max(clock)
    print(
        f"{name:20} {tokens:4} tokens, {len(clock):3} changes: median {median(clock):6.0f} ms (processor {median(cpu):6.0f} ms),"
        f" slowest {worst:6.0f} ms",
        flush=True,
    )
    goal = SMOLLM2_GOAL if name == zoo.SMOLLM2 else ZOO_GOAL
    return f"{name} {median(clock):.0f} ms of {goal:.0f} ms" if median(clock) > goal else ""


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
    print(f"{torch.get_num_threads()} threads")
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
