"""An hour of work of every kind in one process: memory stays flat, and no hook, file, thread or process is left behind.

    python benchmarks/soak.py [MINUTES]      default: 60

A round runs plans on models of three makes, one of them stopped in the middle and taken up again, one with trials that fail
and are tried again; ranks heads, by another method in each round, also of a model that stays loaded; asks lm-eval's tasks;
examines, prunes and saves a model; builds reports and is refused bad plans, broken models and texts that say nothing. After a
quarter of the time, and a round for each method, nothing may grow any more: resident memory stays within 5 % of the
largest that it was until then; hooks on modules, open files, threads and processes are as many as after the second round; and
whatever is done again gives what it gave before.
"""

from __future__ import annotations

import gc
import hashlib
import json
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console

import needlework as nw
from needlework import zoo
from needlework.experiments import heads
from needlework.experiments.models import DiskModels, LoadedModel, LoadedSubject, ModelInfo
from needlework.heads import output
from needlework.heads.methods import all_methods, find_methods
from needlework.heads.survey import SurveySettings
from needlework.lmeval.evaluate import evaluate
from needlework.requests import Answer, Request

console = Console()
MODELS = ("tiny-griffin-small", "tiny-jamba", "tiny-mamba")
SMALL = MODELS[0]
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
OTHER_PLAN = """
models: [MODEL]
rankings:
  mass: {tasks: [{kind: niah, lengths: [48], depths: [0, 100]}], seeds: [1002]}
experiments:
  recall:
    tasks: [{kind: mqar, sizes: [4], samples: 4}, {kind: perplexity, samples: 2, tokens: 32}]
    interventions: [none, "keep_heads(2, by=recorded('mass'))", "keep_heads(k=2, phase='both')", "limit_context(tokens=16)"]
"""
REFUSED = (
    "models: [MODEL",
    "models: [no-such-model]",
    PLAN.replace("cloze_choice", "close_choice"),
    PLAN.replace("k={0", "q={0"),
)
HOOKED = ("copy_score", "locos", "gradient")  # methods that put something on the model
MOST_GROWTH = 1.05
FIRST_ROUNDS = 2  # until everything was imported and compiled


def digest(found: Any) -> str:
    return hashlib.sha256(json.dumps(found, sort_keys=True, default=str).encode()).hexdigest()[:16]


class Disturbed(DiskModels):
    """Models that are stopped, or break, at what they answer seventh."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def load(self, info: ModelInfo) -> LoadedModel:
        model, error = super().load(info), self.error
        assert isinstance(model, LoadedSubject)

        class Breaking(LoadedSubject):
            given = 0
            bad: Request | None = None

            def answers(self, requests: Sequence[Request]) -> Iterator[tuple[int, Answer]]:
                for i, answer in super().answers(requests):
                    self.given += 1
                    if self.given == 7:
                        self.bad = requests[i]
                    if requests[i] == self.bad:
                        raise error
                    yield i, answer

        return Breaking(model.subject, info.model)


def run(folder: Path, model: str, text: str = PLAN, **how: Any) -> str:
    plan = folder / "plan.yaml"
    plan.write_text(text.replace("MODEL", model))
    how = {"doctor": "off", **how}
    return nw.run(plan, folder / "run", progress=False, tell=False, **how).fingerprint


def stopped(folder: Path, model: str) -> str:
    """Ctrl-C in the middle, and the same again: the fingerprint is that of a run in one go."""
    try:
        run(folder, model, source=Disturbed(KeyboardInterrupt()))
    except KeyboardInterrupt:
        return run(folder, model)
    raise AssertionError("it was not stopped")


def failing(folder: Path, model: str) -> str:
    """Trials fail and are asked again."""
    first = run(folder, model, source=Disturbed(RuntimeError("broken on purpose")))
    again = run(folder, model, retry_failed=True)
    assert first != again, "nothing failed"
    return again


def refused(folder: Path) -> str:
    """Bad plans, a broken model, a text that says nothing: each an error of ours."""
    said = []
    broken = folder / "broken"
    shutil.copytree(zoo.path(SMALL), broken)
    weights = next(broken.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1000])
    tries: list[Callable[[], object]] = [lambda text=text: run(folder, SMALL, text) for text in REFUSED]  # type: ignore[misc]
    tries += [lambda: nw.load(broken), lambda: nw.parse("keep_heads(" * 50), lambda: run(folder, str(broken), doctor="quick")]
    for attempt in tries:
        try:
            attempt()
        except nw.NeedleworkError as error:
            said.append(str(error).replace(str(folder), ""))
        else:
            raise AssertionError("it was not refused")
    return digest(said)


def ranked(folder: Path, model: str, method: str) -> str:
    settings = SurveySettings(samples=6, held_out=6, random_orders=2, dynamic=method == "copy_score")
    found = heads.heads_of(nw.load(model), method, "niah", settings)
    output.save_survey(found, folder / "heads")
    return digest(found.to_dict())


def stayed(subject: nw.Subject, method: str, seed: int) -> str:
    """On a model that stays loaded, a ranking is stopped in its middle and made again: what is left of it would stay there."""
    items = [sample.item for sample in heads.draw_samples(subject, heads.tasks_of("niah", subject), 6, seed)]
    (way,) = find_methods([method])

    def stop(share: float) -> None:
        raise KeyboardInterrupt

    try:
        way.score(subject, items, seed=seed, progress=stop)
    except KeyboardInterrupt:
        values = way.score(subject, items, seed=seed, progress=lambda share: None).values
        return digest([float(value) for value in values])
    raise AssertionError("it was not stopped")


def evaluated(folder: Path) -> str:
    acts = ["none", "keep_heads(k=2)", "ablate_attention(phase='both')"]
    found = evaluate(SMALL, ["mini-mmlu"], acts, folder / "eval", limit=2, progress=False)
    return digest([repr(line) for line in found.lines])


def examined(model: str) -> str:
    return digest([(check.law, check.outcome) for check in nw.doctor(nw.load(model), quick=True).checks])


def pruned(folder: Path, model: str) -> str:
    nw.prune(model, "0.5", folder / "pruned", samples=0, progress=False)
    return run(folder, str(folder / "pruned"), PLAN.replace("k={0, 2}", "k={0, 1}"))


def reported(folder: Path, model: str) -> str:
    fingerprint = run(folder, model)
    page = nw.report(folder / "run")
    assert page.stat().st_size > 10_000
    return fingerprint


def works(number: int, subject: nw.Subject) -> list[tuple[str, Callable[[Path], str]]]:
    """What a round does: a name, equal for what must give the same, and the work itself in a new directory."""
    model = MODELS[number % len(MODELS)]
    attentive = MODELS[number % 2]
    methods = [name for name in all_methods() if name != "learned"][::-1]  # gates take too long; those that take most come first
    method = methods[number % len(methods)]
    larger = ["tiny-jamba"] if number % 3 == 0 else []
    plain = [(f"plan {one}", lambda folder, one=one: run(folder, one)) for one in MODELS]
    return [
        *plain,
        (f"plan {model}", lambda folder: stopped(folder, model)),
        (f"plan {model}", lambda folder: failing(folder, model)),
        (f"plan {model}", lambda folder: reported(folder, model)),
        (f"other plan {attentive}", lambda folder: run(folder, attentive, OTHER_PLAN)),
        (f"heads {SMALL} {method}", lambda folder: ranked(folder, SMALL, method)),
        *((f"heads {one} copy_score", lambda folder, one=one: ranked(folder, one, "copy_score")) for one in larger),
        *((f"stays {one} {number % 2}", lambda _, one=one: stayed(subject, one, number % 2)) for one in HOOKED),
        ("eval", evaluated),
        (f"doctor {model}", lambda folder: examined(model)),
        ("pruned", lambda folder: pruned(folder, SMALL)),
        ("refused", refused),
    ]


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
        "files": process.num_fds(),
        "threads": process.num_threads(),
        "processes": len(process.children(recursive=True)),
    }


def said(number: int, now: dict[str, Any], seconds: float) -> None:
    counts = ", ".join(f"{now[what]} {what}" for what in ("hooks", "files", "threads", "processes"))
    line = f"round {number}, {seconds / 60:.1f} min: {now['memory'] / 2**20:.0f} MiB, {counts}"
    console.print(line, highlight=False, soft_wrap=True)


def main() -> int:
    minutes = float(sys.argv[1]) if sys.argv[1:] else 60.0
    results: dict[str, set[str]] = {}
    faults: list[str] = []
    early: list[dict[str, Any]] = []  # states of the first quarter
    late: list[dict[str, Any]] = []
    began, done, subject = time.monotonic(), 0, nw.load(SMALL)
    while not late or time.monotonic() - began < 60 * minutes:
        number = len(early) + len(late)
        for name, work in works(number, subject):
            with tempfile.TemporaryDirectory(prefix="needlework-soak-") as temporary:
                results.setdefault(name, set()).add(work(Path(temporary)))
            done += 1
        seconds, now = time.monotonic() - began, state()
        settling = number < len(all_methods()) or seconds < 15 * minutes
        (early if settling else late).append(now)
        said(number + 1, now, seconds)
        if not settling:
            before = early[FIRST_ROUNDS - 1]
            grown = [what for what in ("hooks", "files", "threads", "processes") if now[what] > before[what]]
            faults += [f"round {number + 1}: {now[what]} {what}, {before[what]} at first" for what in grown]
    settled, largest = (max(one["memory"] for one in some) for some in (early, late))
    growth = largest / settled
    faults += [f"{name}: {len(found)} different results" for name, found in results.items() if len(found) > 1]
    if growth > MOST_GROWTH:
        faults.append(f"memory grew by a factor of {growth:.3f}")
    console.print(
        f"{done} works in {len(early) + len(late)} rounds and {(time.monotonic() - began) / 60:.1f} min: memory"
        f" {early[0]['memory'] / 2**20:.0f} MiB after the first round, at most {settled / 2**20:.0f} in the first quarter and"
        f" {largest / 2**20:.0f} after it, a factor of {growth:.3f} (goal: {MOST_GROWTH}), {late[-1]['memory'] / 2**20:.0f} at"
        f" the end; {sum(map(len, results.values()))} results of {len(results)} kinds of work",
        highlight=False,
        soft_wrap=True,
    )
    for fault in faults[:10]:
        console.print(fault)
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
