"""From a plan to the questions that are asked: each distinct one once, with every experiment that wants its answer."""

from __future__ import annotations

from typing import Any

from needlework.errors import NeedleworkError
from needlework.experiments.asks import Ask, Home, Key, Settings, Watched, Work, item_digest, trial_id
from needlework.experiments.models import Sketch
from needlework.experiments.plan import Experiment, Grid, NamedTask, Plan
from needlework.interventions import Intervention, SwapMemory, grid
from needlework.requests import prepare
from needlework.tasks.base import Item


def expand(plan: Plan, sketch: Sketch) -> Work:
    """All questions for one model, in the order of the plan. Raises a PlanError for whatever cannot be asked."""
    work = Work(sketch)
    expander = _Expander(work)
    for experiment in plan.experiments:
        if sketch.name in experiment.models:
            expander.add(experiment)
    work.asks = list(expander.asks.values())
    return work


class _Expander:
    def __init__(self, work: Work) -> None:
        self.work, self.sketch = work, work.sketch
        self.asks: dict[str, Ask] = {}
        self._items: dict[tuple[str, str, int], list[tuple[Item, str]]] = {}

    def add(self, experiment: Experiment) -> None:
        chosen = self._interventions(experiment)
        taken: set[Key] = set()
        for named in experiment.tasks:
            try:
                settings = self._settings(experiment, named)
                samples = [(seed, self._samples(named, seed)) for seed in experiment.seeds]
            except NeedleworkError as error:
                if not named.optional:
                    raise
                self.work.skipped.append(f"{experiment.name}: left out: {error}")
                continue
            plain: list[Ask] = []
            for seed, every in samples:
                items = _spread(every, experiment.limit)
                if not items:
                    raise named.error(f"task {named.name!r} has no samples for {self.sketch.name} with seed {seed}")
                self._check(chosen, items[0][0], settings)
                for item, digest in items:
                    asks = [self._ask(act, item, digest, settings) for _, act in chosen]
                    for ask in asks:
                        self._house(ask, Home(experiment.name, named, item, seed), taken)
                    plain += [ask for ask in asks if not ask.intervention.parts]
            if experiment.observe:
                self._watch(experiment, named, settings, plain)

    def _ask(self, act: Intervention, item: Item, digest: str, settings: Settings) -> Ask:
        trial = trial_id(self.sketch, digest, str(act), settings)
        if trial not in self.asks:
            self.asks[trial] = Ask(trial, digest, item, act, settings)
        return self.asks[trial]

    def _house(self, ask: Ask, home: Home, taken: set[Key]) -> None:
        key = (home.experiment, home.task.name, ask.id)
        if key in taken:
            self.work.repeated += 1
        else:
            taken.add(key)
            ask.homes.append(home)

    def _watch(self, experiment: Experiment, named: NamedTask, settings: Settings, plain: list[Ask]) -> None:
        if settings.mode != "generate" or not plain:
            raise experiment.error("observe: true needs tasks that generate, and none among the interventions")
        if self.sketch.anatomy.attention_layers:
            self.work.watched.append(Watched(experiment, named, tuple({ask.id: ask for ask in plain}.values())))

    def _interventions(self, experiment: Experiment) -> list[tuple[Grid, Intervention]]:
        """What the experiment does, without what this model has no parts for."""
        chosen: dict[str, tuple[Grid, Intervention]] = {}
        for text in experiment.grids:
            try:
                for act in grid.expand(text.text, self.sketch.sizes):
                    if missing := self._missing(act):
                        note = f"{experiment.name}: {self.sketch.name} has no {missing}, so {act} is left out"
                        if note not in self.work.skipped:
                            self.work.skipped.append(note)
                    else:
                        chosen.setdefault(str(act), (text, act))
            except NeedleworkError as error:
                raise text.error(f"for {self.sketch.name}: {error}") from None
        if not chosen:
            raise experiment.error(
                f"{self.sketch.name} has no parts that any intervention of {experiment.name!r} acts on; leave this model out"
            )
        return list(chosen.values())

    def _missing(self, act: Intervention) -> str:
        anatomy = self.sketch.anatomy
        for part in act.parts:
            side = {"kv": "attention"}.get(part.half, part.half) if isinstance(part, SwapMemory) else part.side
            if side == "attention" and not anatomy.attention_layers:
                return "attention layers"
            if side == "recurrent" and not anatomy.recurrent_layers:
                return "recurrent layers"
        return ""

    def _settings(self, experiment: Experiment, named: NamedTask) -> Settings:
        try:
            new_tokens, stop = named.task.ending(self.sketch.tokenizer)
            stops = self.sketch.stops(stop)
        except NeedleworkError as error:
            raise named.error(f"task {named.name!r}: {error}") from None
        return Settings(named.task.mode, experiment.boundary, experiment.max_new_tokens or new_tokens, stops)

    def _samples(self, named: NamedTask, seed: int) -> list[tuple[Item, str]]:
        key = (named.task.kind, named.task.model_dump_json(), seed)
        if key not in self._items:
            anatomy = self.sketch.anatomy
            try:
                items = list(named.task.items(self.sketch.tokenizer, seed, anatomy.window, anatomy.max_tokens))
            except NeedleworkError as error:
                raise named.error(f"task {named.name!r} for {self.sketch.name}: {error}") from None
            self._items[key] = [(item, item_digest(item)) for item in items]
        return self._items[key]

    def _check(self, chosen: list[tuple[Grid, Intervention]], item: Item, settings: Settings) -> None:
        """Every intervention against one sample: what cannot be asked of it cannot be asked of its brothers."""
        for text, act in chosen:
            try:
                prepare(Ask("", "", item, act, settings).request(), self.sketch.anatomy)
            except NeedleworkError as error:
                raise text.error(f"for {self.sketch.name}, sample {item.id}: {error}") from None


def _spread(items: list[Any], limit: int | None) -> list[Any]:
    """At most `limit` of them, evenly over all: the first ones of a grid would be its shortest contexts."""
    if limit is None or len(items) <= limit:
        return items
    return [items[i * len(items) // limit] for i in range(limit)]
