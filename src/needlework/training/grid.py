"""A study: a plan whose models are recipes. Every combination of what is varied is trained, then the plan runs on all of them.

What a recipe becomes is decided by more than its name says, so a question such as "what makes retrieval sit in few heads?" needs
models that differ in one thing and are alike in all others, each of them several times.
"""

from __future__ import annotations

import multiprocessing
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass
from importlib import resources
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from needlework.errors import ZooError, did_you_mean
from needlework.experiments.lines import read
from needlework.experiments.schema import NAME, NAME_RULE
from needlework.terminal import Bar
from needlework.training import recipes
from needlework.training.recipes import Recipe
from needlework.zoo.shelf import RECORD, catalog

RECIPE, MODELS, RUN = "recipe.yaml", "models", "run"
Level = dict[str, Any] | str  # what a recipe says otherwise; or all of it: a built-in recipe by its name


class Study(BaseModel):
    """What all recipes share, what varies, with which seeds, and the experiments that all models go through."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(pattern=rf"^{NAME.pattern}$")]
    about: str = ""
    recipe: Level = {}
    vary: Annotated[dict[str, dict[str, Level]], Field(min_length=1)]
    training_seeds: Annotated[list[Annotated[int, Field(ge=0, lt=2**32)]], Field(min_length=1)] = [0, 1, 2]
    seeds: list[int] = [0]  # of the samples that all models are asked
    experiments: Annotated[dict[str, Any], Field(min_length=1)]  # as in a plan, without models

    @field_validator("vary", mode="before")
    @classmethod
    def _named(cls, vary: Any) -> Any:
        """Levels such as 12 and 32 are names, too."""
        if not isinstance(vary, dict) or not all(isinstance(levels, dict) for levels in vary.values()):
            raise ValueError("each factor is a mapping of its levels to what their recipes say otherwise")
        named = {str(factor): {str(level): change for level, change in levels.items()} for factor, levels in vary.items()}
        for factor, levels in named.items():
            if wrong := [name for name in (factor, *levels) if not NAME.fullmatch(name)]:
                raise ValueError(f"{wrong[0]!r} is no name; {NAME_RULE}")
            if len(levels) < 2:
                raise ValueError(f"factor {factor!r} has one level; give two or more")
        return named


@dataclass(frozen=True)
class Cell:
    """One model of a study: a level of every factor, and a seed."""

    levels: Mapping[str, str]
    seed: int
    recipe: Recipe

    @property
    def name(self) -> str:
        return "-".join([*self.levels.values(), f"seed{self.seed}"])


def find(name_or_path: str | Path) -> Study:
    """A study that comes with needlework, by name, or your own by the path of its YAML file."""
    folder = resources.files("needlework") / "studies"
    shipped = sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))
    text = str(name_or_path)
    if text in shipped:
        with resources.as_file(folder / f"{text}.yaml") as path:
            return _checked(path)
    if text.endswith((".yaml", ".yml")) or "/" in text:
        return _checked(Path(text))
    raise ZooError(f"unknown study {text!r}: {did_you_mean(text, shipped)} (or give the path of a study file ending in .yaml)")


def _checked(path: Path) -> Study:
    content = read(path).data
    if not isinstance(content, dict):
        raise ZooError(f"{path}: a study is a mapping with the keys recipe, vary and experiments; see docs/zoo.md")
    try:
        study = Study.model_validate(content)
    except ValidationError as error:
        lines = []
        for fault in error.errors():
            where = ".".join(map(str, fault["loc"]))
            unknown = fault["type"] == "extra_forbidden"
            near = did_you_mean(where, Study.model_fields)
            lines.append(f"unknown key {where!r}: {near}" if unknown else f"{where}: {fault['msg']}")
        raise ZooError(f"{path}: " + "; ".join(lines)) from None
    cells(study)  # a level that makes no recipe is told before anything is trained
    return study


def _merged(base: Any, change: Any) -> Any:
    """`change` laid over `base`, key by key."""
    if not isinstance(base, dict) or not isinstance(change, dict):
        return change
    return {**base, **{key: _merged(base.get(key), value) for key, value in change.items()}}


def _content(level: Level) -> dict[str, Any]:
    return recipes.find(level).model_dump(exclude={"name", "seed"}) if isinstance(level, str) else level


def cells(study: Study) -> list[Cell]:
    """Every combination of levels with every seed."""
    made = []
    for chosen in product(*(levels.items() for levels in study.vary.values())):
        levels = dict(zip(study.vary, (name for name, _ in chosen), strict=True))
        content: Any = _content(study.recipe)
        for _, change in chosen:
            content = _merged(content, _content(change))
        for seed in study.training_seeds:
            name = "-".join([*levels.values(), f"seed{seed}"])
            recipe = recipes.checked({**content, "name": name.lower(), "seed": seed}, f"study {study.name}, {name}")
            made.append(Cell(levels, seed, recipe))
    return made


def train_all(study: Study, out: Path, jobs: int, bar: Bar) -> None:
    """Train what is not trained yet, `jobs` models at a time, one core each. A study that was stopped goes on where it was.

    A model of the zoo that one of the recipes made is taken as it is: training it again would give the same weights.
    """
    waiting = []
    for cell in cells(study):
        _take_shipped(cell.recipe, out / MODELS / cell.name)
        if finished(out / MODELS / cell.name, cell.recipe):
            bar.found(cell.recipe.steps)
        else:
            waiting.append(cell)
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    with context.Manager() as manager:
        steps = manager.Queue()
        with ProcessPoolExecutor(jobs, mp_context=context) as pool:
            trainings = {pool.submit(_train, cell.recipe, out / MODELS / cell.name, cell.name, steps) for cell in waiting}
            try:
                while trainings:
                    done, trainings = wait(trainings, timeout=0.5, return_when=FIRST_COMPLETED)
                    for name, count, new in _taken(steps):
                        bar.show(name)
                        (bar.advance if new else bar.found)(count)
                    for training in done:
                        training.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for process in multiprocessing.active_children():
                    process.terminate()  # each has its checkpoint
                raise


def trained(study: Study, out: Path) -> list[Cell]:
    """The models of a study that are there, those of the zoo among them."""
    for cell in cells(study):
        _take_shipped(cell.recipe, out / MODELS / cell.name)
    there = [cell for cell in cells(study) if finished(out / MODELS / cell.name, cell.recipe)]
    if not there:
        raise ZooError(f"{out} holds no trained model of the study {study.name!r}; leave out --no-train")
    return there


def finished(folder: Path, recipe: Recipe) -> bool:
    """The directory holds a whole model that this very recipe made; a model of another recipe is an error."""
    if not (folder / RECORD).exists():
        return False
    if recipes.read(folder / RECIPE).hash() != recipe.hash():
        raise ZooError(f"{folder} holds a model of another recipe; give another --out, or move it away")
    return True


def _take_shipped(recipe: Recipe, folder: Path) -> None:
    made = next((entry.path for entry in catalog().values() if entry.record.get("recipe_hash") == recipe.hash()), None)
    if made is None or (folder / RECORD).exists():
        return
    shutil.copytree(made, folder, ignore=shutil.ignore_patterns(RECORD), dirs_exist_ok=True)
    shutil.copy(made / RECORD, folder)  # last: what has a record is whole


def _taken(queue: Any) -> Iterator[tuple[str, int, bool]]:
    while not queue.empty():
        yield queue.get()


def _train(recipe: Recipe, folder: Path, name: str, steps: Any) -> None:
    """In a process of its own; the steps that it does, and those that it finds done, are told to the bar of all."""
    from needlework.training.train import train

    class Told(Bar):
        def found(self, count: int, work: float | None = None) -> None:
            steps.put((name, count, False))

        def advance(self, count: int = 1, work: float | None = None) -> None:
            steps.put((name, count, True))

    train(recipe, folder, progress=Told(recipe.steps, "steps", shown=False), card_samples=0)


def plan_of(study: Study, trained: list[Cell]) -> str:
    """The plan that all models of a study go through, as YAML beside them."""
    models = [{"source": f"{MODELS}/{cell.name}", "name": cell.name} for cell in trained]
    plan = {
        "name": study.name,
        "about": study.about,
        "models": models,
        "seeds": study.seeds,
        "experiments": study.experiments,
    }
    return yaml.safe_dump(plan, sort_keys=False, width=120)
