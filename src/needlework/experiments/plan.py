"""Read a plan (models x tasks x interventions x seeds) from YAML, or find a shipped one; errors name the line. Free of torch."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from glob import iglob
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from needlework.errors import NeedleworkError, did_you_mean, short_repr
from needlework.experiments import schema
from needlework.experiments.schema import Loading, Place, PlanError
from needlework.heads.methods import find_methods
from needlework.interventions import Ranking
from needlework.interventions.acts import Phase
from needlework.interventions.base import check_ranges
from needlework.results.rows import scoring
from needlework.tasks.base import Task

FAST_LIMIT = 75  # samples per condition with --fast if the plan sets no limit: 0 of 75 bounds a rate below 5 %

MakeTask = Callable[[Mapping[str, Any]], Task]


@dataclass(frozen=True)
class Located:
    """Base of plan entries: the place in the file, for error messages."""

    place: str  # file:line

    def error(self, message: str) -> PlanError:
        return PlanError(f"{self.place}: {message}")


@dataclass(frozen=True)
class Model(Located):
    """A model of the plan, not inspected yet."""

    name: str  # shown in tables: the plan's name for it, else the last part of its path
    source: str
    loading: Loading = field(default_factory=Loading)
    revision: str | None = None


@dataclass(frozen=True)
class NamedTask(Located):
    """A task with its name in the plan."""

    name: str
    task: Task
    optional: bool = False  # skipped with a note for models that it does not work with

    @cached_property
    def scoring(self) -> str:
        """Hash of everything that turns its answers into scores."""
        return scoring(self.task)


@dataclass(frozen=True)
class InterventionText(Located):
    """Text of an intervention that may contain ranges, which expand to several interventions."""

    text: str


@dataclass(frozen=True)
class Experiment(Located):
    """An experiment with all settings resolved."""

    name: str
    about: str
    models: tuple[str, ...]
    tasks: tuple[NamedTask, ...]
    grids: tuple[InterventionText, ...]
    seeds: tuple[int, ...]
    boundary: Phase
    max_new_tokens: int | None
    limit: int | None
    observe: bool


@dataclass(frozen=True)
class RankingSource(Located):
    """A head ranking of the plan: computed on its own samples, or read from a file (`ranking`)."""

    name: str
    by: str
    tasks: tuple[NamedTask, ...]
    seeds: tuple[int, ...]
    limit: int | None
    ranking: Ranking | None = None


@dataclass(frozen=True)
class Plan:
    """A checked plan. Its text is stored with the results."""

    path: Path
    name: str
    about: str
    text: str
    models: Mapping[str, Model]
    experiments: tuple[Experiment, ...]
    fast: bool = False
    rankings: Mapping[str, RankingSource] = field(default_factory=dict)
    adds: bool = False  # keep counting other rows of the store (lm-eval); False: reports count only rows of this plan

    def loading(self, **given: Any) -> Plan:
        """Return the plan with these loading options for all models (device, dtype, window, kernels; None: unchanged)."""
        models = {name: replace(model, loading=model.loading.replace(**given)) for name, model in self.models.items()}
        return replace(self, models=models)


def load(path: str | Path, *, fast: bool = False, models: Sequence[str] = (), make_task: MakeTask | None = None) -> Plan:
    """Read and check a plan file.

    Args:
        fast: Use the plan's reduced grid.
        models: Models as on the command line (SOURCE or NAME=SOURCE), instead of the plan's.
        make_task: Creates a task from its options; by default from the registry of tasks.
    """
    file = schema.read(path)
    if not isinstance(file.data, dict):
        raise file.error((), "a plan is a mapping with the keys models and experiments")
    try:
        content = schema.PlanFile.model_validate(file.data)
    except ValidationError as error:  # one line per fault, in the order of the file
        faults = set()
        for fault in error.errors():
            place = tuple(part for part in fault["loc"] if not str(part).startswith("function-"))
            if fault["type"] == "extra_forbidden":
                message = f"unknown key {short_repr(place[-1])}: {did_you_mean(str(place[-1]), schema.keys_at(place[:-1]))}"
            elif fault["type"] == "missing":
                parent = f" in {'.'.join(map(str, place[:-1]))}" if place[1:] else ""
                message = f"the key {place[-1]!r} is missing{parent}"
            else:
                reason = fault["msg"].removeprefix("Value error, ")
                message = f"{'.'.join(map(str, place))}: {reason} (got {short_repr(fault['input'])})"
            faults.add((file.line(place), message))
        raise PlanError("\n".join(f"{file.path}:{line}: {message}" for line, message in sorted(faults))) from None
    if make_task is None:
        from needlework.tasks import make_task as known_tasks

        make_task = known_tasks
    return _Builder(file, content, fast, models, make_task).plan()


@dataclass
class _Builder:
    """Builder of a Plan from validated YAML: inherits settings, creates tasks, checks intervention texts."""

    file: schema.YamlFile
    content: schema.PlanFile
    fast: bool
    override: Sequence[str]
    make_task: MakeTask
    models: dict[str, Model] = field(default_factory=dict)

    def plan(self) -> Plan:
        experiments = []
        for name, spec in self.content.experiments.items():
            if not schema.NAME.fullmatch(name):
                raise self.file.error(("experiments", name), f"{short_repr(name)} is no name; {schema.NAME_RULE}")
            if not (self.fast and spec.fast and spec.fast.skip):
                experiments.append(self._experiment(name, spec))
        if not experiments:
            raise self.file.error(("experiments",), "--fast skips every experiment of this plan")
        name = self.content.name or self.file.path.stem
        rankings = {name: self._ranking(name, spec) for name, spec in (self.content.rankings or {}).items()}
        about, text = self.content.about, self.file.text
        return Plan(self.file.path, name, about, text, self.models, tuple(experiments), self.fast, rankings)

    def _ranking(self, name: str, spec: schema.RankingFile) -> RankingSource:
        """Return a ranking that the run computes, or one from a file, relative to the plan or to the working directory."""
        place: Place = ("rankings", name)
        if not schema.NAME.fullmatch(name):
            raise self.file.error(place, f"{name!r} is no name; {schema.NAME_RULE}")
        if spec.file is not None:
            if more := sorted(spec.model_fields_set - {"about", "file"}):
                raise self.file.error((*place, more[0]), f"rankings.{name} comes from a file, so leave {more[0]!r} out")
            beside = self.file.path.parent / spec.file
            try:
                ranking = Ranking.load(beside if os.path.exists(beside) else spec.file)
            except NeedleworkError as error:
                raise self.file.error((*place, "file"), str(error)) from None
            seeds = () if ranking.seed is None else (ranking.seed,)
            return RankingSource(self._at(place), name, ranking.method, (), seeds, None, ranking)
        if spec.tasks is None or spec.seeds is None:
            lacking = "tasks" if spec.tasks is None else "seeds"
            raise self.file.error(place, f"the key {lacking!r} is missing in rankings.{name}")
        try:
            find_methods([spec.by])
        except NeedleworkError as error:
            raise self.file.error((*place, "by"), str(error)) from None
        tasks = self._tasks((*place, "tasks"), spec.tasks)
        if wrong := [task for task in tasks if task.task.mode != "generate"]:
            raise wrong[0].error(f"task {wrong[0].name!r} generates nothing, so there are no answers to watch")
        return RankingSource(self._at(place), name, spec.by, tasks, tuple(dict.fromkeys(spec.seeds)), spec.limit)

    def _experiment(self, name: str, spec: schema.ExperimentFile) -> Experiment:
        """Resolve the settings of an experiment: its own, else the plan's, each reduced with --fast."""
        place: Place = ("experiments", name)
        levels: list[tuple[Place, schema.PlanSettings]] = [(place, spec), ((), self.content)]
        if self.fast:  # precedence: the reduced grid before the full one, in each the experiment before the plan
            fast: list[tuple[Place, schema.PlanSettings | None]] = [((*place, "fast"), spec.fast), (("fast",), self.content.fast)]
            levels = [(at, level) for at, level in fast if level is not None] + levels

        def setting(key: str) -> Any:
            return next((value for _, level in levels if (value := getattr(level, key)) is not None), None)

        own: dict[str, tuple[Place, list[Any]]] = {}  # tasks and interventions, with their places in the file
        for key in ("tasks", "interventions"):
            reduced = getattr(spec.fast, key) if self.fast and spec.fast else None
            own[key] = ((*place, key), getattr(spec, key)) if reduced is None else ((*place, "fast", key), reduced)
        chosen, tasks = self._models(levels, place), self._tasks(*own["tasks"])  # their mistakes are told first
        where, texts = own["interventions"]
        grids = tuple(InterventionText(self._at((*where, i)), text) for i, text in enumerate(texts))
        for one in grids:
            try:
                check_ranges(one.text)
            except NeedleworkError as error:
                raise one.error(str(error)) from None
        limit = setting("limit")
        if self.fast and limit is None and spec.fast is None and self.content.fast is None:
            limit = FAST_LIMIT
        return Experiment(
            place=self._at(place),
            name=name,
            about=spec.about,
            models=chosen,
            tasks=tasks,
            grids=grids,
            seeds=tuple(dict.fromkeys(setting("seeds") or [0])),
            boundary=setting("boundary") or "decode",
            max_new_tokens=setting("max_new_tokens"),
            limit=limit,
            observe=spec.observe,
        )

    def _at(self, place: Place) -> str:
        return f"{self.file.path}:{self.file.line(place)}"

    def _models(self, levels: list[tuple[Place, schema.PlanSettings]], place: Place) -> tuple[str, ...]:
        if self.override:
            return tuple(dict.fromkeys(self._model(schema.model_option(text), "--model") for text in self.override))
        for at, level in levels:
            if level.models is not None:
                each = enumerate(level.models)
                return tuple(dict.fromkeys(self._model(spec, self._at((*at, "models", i))) for i, spec in each))
        raise self.file.error(place, "no models: give models here, for the whole plan, or with --model")

    def _model(self, spec: schema.ModelFile, at: str) -> str:
        """Register a model and return its name; raise if another model has this name."""
        source = spec.source
        beside = self.file.path.parent / source
        if at != "--model" and not Path(source).is_absolute() and os.path.exists(beside):
            source = str(beside)  # paths in a plan are relative to the plan file
        name = spec.name or Path(source.rstrip("/")).name or source
        model = Model(at, name, source, spec.loading, spec.revision)
        known = self.models.setdefault(name, model)
        if replace(known, place=at) != model:
            hint = "--model NAME=PATH" if at == "--model" else "name: ..."
            raise model.error(f"two models are called {name!r} (the other at {known.place}); give one another name: {hint}")
        return name

    def _tasks(self, place: Place, specs: list[Any]) -> tuple[NamedTask, ...]:
        made: dict[str, NamedTask] = {}
        for i, spec in enumerate(specs):
            at = (*place, i) if (*place, i) in self.file.lines else place
            one = self._task(at, spec)
            if one.name in made:
                raise one.error(f"two tasks are called {one.name!r}; give one another name: ...")
            made[one.name] = one
        return tuple(made.values())

    def _task(self, place: Place, spec: Any) -> NamedTask:
        """Create and check a task; its errors get the line of the option that they name."""
        options = {"kind": spec} if isinstance(spec, str) else spec
        if not isinstance(options, dict) or not isinstance(options.get("kind"), str):
            raise self.file.error(place, "a task is its name, or a mapping with kind: NAME and the task's options")
        name = options.get("name", options["kind"])
        if not isinstance(name, str) or not schema.NAME.fullmatch(name):
            raise self.file.error((*place, "name"), f"{short_repr(name)} is no name; {schema.NAME_RULE}")
        optional = options.get("optional", False)
        if not isinstance(optional, bool):
            raise self.file.error((*place, "optional"), f"optional is true or false (got {short_repr(optional)})")
        options = {key: value for key, value in options.items() if key not in ("name", "optional")}
        try:
            task = self.make_task(options)
            beside = {key: self.file.path.parent / value for key in task.files if (value := getattr(task, key))}
            found = {k: str(p) for k, p in beside.items() if os.path.exists(p) or any(iglob(str(p), recursive=True))}
            task = task.model_copy(update=found) if found else task  # paths in a plan are relative to the plan file
            task.check()
            return NamedTask(self._at(place), name, task, optional)
        except ValidationError as error:
            fault = error.errors()[0]
            where = ".".join(map(str, fault["loc"]))
            message = f"task {options['kind']!r}: {where}: {fault['msg']} (got {short_repr(fault['input'])})"
            raise self.file.error((*place, *fault["loc"]), message) from None
        except NeedleworkError as error:
            message = str(error).removeprefix(f"task {options['kind']!r}: ")
            named = [key for key in options if re.search(rf"\b{re.escape(key)}\b", str(error))]
            raise self.file.error((*place, *named[-1:]), f"task {options['kind']!r}: {message}") from None


# Shipped plans: `02-head-sparsification`, `02` and `head-sparsification` are the same plan.


def plan_files() -> list[Path]:
    """Return the files of shipped plans in order. The package must be installed as plain files, not as an archive."""
    return sorted((Path(str(resources.files("needlework"))) / "plans").glob("*.yaml"))


def catalog() -> dict[str, Plan]:
    """Load all shipped plans, by full name."""
    return {path.stem: load(path) for path in plan_files()}


def plan_names() -> dict[str, Path]:
    """Return all names of shipped plans: the full name and, where it starts with a number, the number and the rest."""
    known = {path.stem: path for path in plan_files()}
    for path in list(known.values()):
        number, _, rest = path.stem.partition("-")
        if number.isdigit() and rest:
            known |= {number: path, rest: path}
    return known


def find(plan: str | Path) -> Path:
    """Return the file of a plan; a file has precedence over a shipped plan of the same name."""
    path, known = Path(plan), plan_names()
    if not os.path.isfile(path) and str(plan) in known:
        return known[str(plan)]
    if os.path.exists(path):  # reading a directory raises the right error
        return path
    beside = [str(file) for pattern in ("*.yaml", "*.yml") for file in path.parent.glob(pattern)]
    hint = did_you_mean(str(plan), [*known, *beside])
    raise PlanError(f"no file and no shipped plan is called {short_repr(str(plan))}; {hint}")


def get(plan: str | Path | Plan, *, fast: bool = False, models: Sequence[str] = (), **loading: Any) -> Plan:
    """Load a plan by file or shipped name, or take a loaded one; `loading` overrides the settings of its models."""
    if not isinstance(plan, Plan):
        plan = load(find(plan), fast=fast, models=[models] if isinstance(models, str) else models)
    elif fast or models:
        raise NeedleworkError("this plan is loaded already: give fast and models to the function that loads it, or give its path")
    return plan.loading(**loading)
