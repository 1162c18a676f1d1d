"""What a run tells while it goes: a bar with the time left for each experiment, and a last word."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from needlework.experiments.plan import Plan
from needlework.experiments.trials import Work
from needlework.receipts import NOTHING_TO_HIDE
from needlework.store import LM_EVAL, Store
from needlework.terminal import plain, say


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
    finished = dict(total)
    for work in works:
        for trial in work.trials:
            total[trial.experiment] += 1
            finished[trial.experiment] += (trial.experiment, work.model.name, trial.task.name, trial.id) in done
    times = (TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), *times) as shown:
        made = Bars(shown)
        for name, count in total.items():
            made.ids[name] = shown.add_task(plain(name), total=count, completed=finished[name])
        yield made


def summary(store: Store, plan: Plan, works: Sequence[Work], unasked: int, tell: bool = True) -> bool:
    """True if every trial of the plan was answered, and every condition was one; the last word, if it is to be said."""
    plans, folder = _asked_by(plan, works), store.directory
    (trials,) = store.db.execute(f"SELECT count(*) FROM trials WHERE {plans}").fetchone()
    failed, error = store.db.execute(f"SELECT count(*), min(error) FROM trials WHERE {plans} AND finish = 'failed'").fetchone()
    idle = hid_nothing(store, plans)
    if not tell:
        return not failed and not idle
    for work in works:
        for note in work.skipped:
            say(note)
        if work.repeated:
            say(f"{work.repeated} samples of {work.model.name} were the same question twice and count once")
    if unasked:
        say(f"{unasked} rows in {folder} are none that this plan asks for: they are kept, and no report counts them")
    for note in idle:
        say(note)
    if failed:
        say(f"{failed} of {trials} trials failed, for instance: {error}; --retry-failed tries them again")
    say(f"{trials} trials in {folder}")
    return not failed and not idle


def _asked_by(plan: Plan, works: Sequence[Work]) -> str:
    """The rows of this run, as SQL: what an evaluation adds to is not its own."""
    if not plan.adds:
        return f"asked AND kind != '{LM_EVAL}'"

    def among(column: str, names: Iterable[str]) -> str:
        quoted = ", ".join("'" + name.replace("'", "''") + "'" for name in sorted(set(names)))
        return f"{column} IN ({quoted})"

    trials = [trial for work in works for trial in work.trials]
    own = [
        among("model", (work.model.name for work in works)),
        among("task", (trial.task.name for trial in trials)),
        among("intervention", (str(trial.intervention) for trial in trials)),
    ]
    return f"asked AND kind = '{LM_EVAL}' AND {' AND '.join(own)}"


def hid_nothing(store: Store, where: str) -> list[str]:
    """Conditions that hide something in no trial at all: they are the model itself under another name."""
    note = f'"{NOTHING_TO_HIDE}'  # how such a note begins in a receipt's JSON
    conditions = store.db.execute(
        f"SELECT experiment, model, intervention, count(*) FROM trials WHERE {where} AND finish != 'failed'"
        " GROUP BY 1, 2, 3 HAVING min(instr(receipt, ?)) > 0 ORDER BY 1, 2, 3",
        (note,),
    )
    return [
        f"{act} hid nothing in any of its {trials} trials of {experiment} ({model}); choose fewer tokens"
        for experiment, model, act, trials in conditions
    ]
