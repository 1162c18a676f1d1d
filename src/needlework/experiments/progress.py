"""What a run tells while it goes: a bar with the time left for each experiment, and a last word."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from needlework.experiments.asks import Work
from needlework.experiments.plan import Plan
from needlework.store import Store
from needlework.terminal import plain
from needlework.terminal import say as say


class Bars:
    """A progress bar for each experiment."""

    def __init__(self, shown: Any = None) -> None:
        self.shown = shown
        self.ids: dict[str, Any] = {}

    def advance(self, experiments: Sequence[str]) -> None:
        if self.shown is not None:
            for name in experiments:
                self.shown.advance(self.ids[name])


@contextmanager
def bars(plan: Plan, works: Sequence[Work], store: Store, progress: bool) -> Iterator[Bars]:
    if not progress:
        yield Bars()
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    done = store.done()
    total = dict.fromkeys((e.name for e in plan.experiments), 0)
    there = dict(total)
    for work in works:
        for ask in work.asks:
            for experiment, task, trial in ask.wanted():
                total[experiment] += 1
                there[experiment] += (experiment, work.sketch.name, task, trial) in done
    times = (TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), *times) as shown:
        made = Bars(shown)
        for name, count in total.items():
            made.ids[name] = shown.add_task(plain(name), total=count, completed=there[name])
        yield made


def summary(store: Store, works: Sequence[Work], folder: Path) -> None:
    (trials,) = store.db.execute("SELECT count(*) FROM trials").fetchone()
    failures = store.db.execute("SELECT count(*), min(error) FROM trials WHERE finish = 'failed'").fetchone()
    for work in works:
        for note in work.skipped:
            say(note)
        if work.repeated:
            say(f"{work.repeated} samples of {work.sketch.name} were the same question twice and count once")
    if failures[0]:
        say(f"{failures[0]} trials failed, for instance: {failures[1]}")
    say(f"{trials} trials in {folder}")
