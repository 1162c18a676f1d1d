"""Progress of a run: one bar over all trials with the time left, and the summary at the end."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from needlework.experiments.costs import weights
from needlework.experiments.plan import Plan
from needlework.experiments.trials import Recording, Work
from needlework.receipts import NOTHING_TO_HIDE
from needlework.results import LM_EVAL, Store
from needlework.terminal import Bar, clock, say


@dataclass
class _Underway:
    """A running batch: its weight, its progress, and the weight that the bar has counted already."""

    weight: float
    share: Callable[[], float]
    counted: float = 0.0

    def uncounted(self) -> float:
        return max(0.0, self.weight * self.share() - self.counted)


class Tracker:
    """The progress bar of a run; each trial is weighted by the estimated time of its answer."""

    def __init__(self, works: Sequence[Work], store: Store, shown: bool) -> None:
        self.weights = {work.model.name: weights(work) for work in works}
        self._underway: dict[Hashable, _Underway] = {}
        done, observed = store.done(), store.observed()
        whole = sum(sum(each.values()) for each in self.weights.values())
        for work in works:
            left = (r for r in work.recordings if (r.experiment, work.model.name, r.task) not in observed)
            whole += sum(self._weight(work.model.name, recording) for recording in left)
        self.bar = Bar(sum(len(work.trials) for work in works), "trials", work=whole, shown=shown)
        for work in works:
            model = work.model.name
            for name, same in work.by_id().items():
                stored = sum((one.experiment, model, one.task.name, name) in done for one in same)
                self.bar.found(stored, self.weights[model][name] if stored == len(same) else 0.0)

    def loads(self, model: str) -> None:
        self.bar.show(f"{model} (loading)")

    def asks(self, model: str, unit: Hashable, names: Sequence[str], share: Callable[[], float]) -> None:
        """Track a batch that starts. `names` are its trial ids, `share` returns its progress; batches may run in parallel."""
        self._follow(model, unit, sum(self.weights[model][name] for name in names), share)

    def answered(self, model: str, name: str, trials: int, unit: Hashable) -> None:
        """Count an answer that serves this many trials."""
        weight = self.weights[model][name]
        if unit in self._underway:
            self._underway[unit].counted += weight
        self.bar.advance(trials, weight)

    def over(self, unit: Hashable) -> None:
        """Stop tracking a batch; trials that it did not finish count as not done."""
        self._underway.pop(unit, None)

    @contextmanager
    def records(self, model: str, recording: Recording, share: Callable[[], float]) -> Iterator[None]:
        """Track a recording while it runs: it has a weight, but counts as no trial."""
        weight = self._weight(model, recording)
        self._follow(f"{model} (attention)", id(recording), weight, share)
        yield
        self.over(id(recording))
        self.bar.advance(0, weight)

    def rate(self) -> str:
        """Return the number of trials and the throughput as text; empty if there were none."""
        count, seconds = self.bar.counted_now, self.bar.seconds
        return f"{count} asked in {clock(seconds)}, {count / seconds:.3g} trials per second" if count else ""

    def _follow(self, name: str, key: Hashable, weight: float, share: Callable[[], float]) -> None:
        self._underway[key] = _Underway(weight, share)
        self.bar.show(name, lambda: sum(one.uncounted() for one in list(self._underway.values())))

    def _weight(self, model: str, recording: Recording) -> float:
        return sum(self.weights[model][trial.id] for trial in recording.trials)


def summary(store: Store, plan: Plan, works: Sequence[Work], unasked: int, rate: str, tell: bool = True) -> bool:
    """Print the summary if `tell`; return whether no trial failed and every `limit_context` hid keys."""
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
    say(f"{trials} trials in {folder}" + (f"; {rate}" if rate else ""))
    return not failed and not idle


def _asked_by(plan: Plan, works: Sequence[Work]) -> str:
    """Return the SQL condition for the rows of this run; of an lm-eval run, without those of the store it adds to."""
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
    """Return notes on conditions whose `limit_context` hid no key in any trial, so that the limit was not tested."""
    note = f'"{NOTHING_TO_HIDE}'  # start of the note in the JSON of a receipt
    conditions = store.db.execute(
        f"SELECT experiment, model, intervention, count(*) FROM trials WHERE {where} AND finish != 'failed'"
        " GROUP BY 1, 2, 3 HAVING min(instr(receipt, ?)) > 0 ORDER BY 1, 2, 3",
        (note,),
    )
    return [
        f"{act} hid nothing in any of its {trials} trials of {experiment} ({model}); choose fewer tokens"
        for experiment, model, act, trials in conditions
    ]
