"""Studies: train a grid of recipes, one model for each combination of factor levels and seed, and write the plan for them.

A question such as "what makes retrieval depend on few heads?" needs models that differ in one factor only, with several seeds
each.
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
from needlework.experiments.schema import NAME, NAME_RULE, read
from needlework.terminal import Bar
from needlework.training import recipes
from needlework.training.recipes import Recipe
from needlework.zoo import RECORD, catalog

RECIPE, MODELS, RUN = "recipe.yaml", "models", "run"
Level = dict[str, Any] | str  # changes to a recipe, or the name of a built-in recipe


class Study(BaseModel):
    """Content of a study file: the common recipe, factors with their levels, seeds, and the experiments run on all models."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(pattern=rf"^{NAME.pattern}$")]
    about: str = ""
    recipe: Level = {}
    vary: Annotated[dict[str, dict[str, Level]], Field(min_length=1)]
    training_seeds: Annotated[list[Annotated[int, Field(ge=0, lt=2**32)]], Field(min_length=1)] = [0, 1, 2]
    seeds: list[int] = [0]  # of the samples
    experiments: Annotated[dict[str, Any], Field(min_length=1)]  # as in a plan, without models

    @field_validator("vary", mode="before")
    @classmethod
    def _named(cls, vary: Any) -> Any:
        """Check factors and levels, and convert their names to text, because YAML reads a level such as 12 as a number."""
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
class StudyModel:
    """One model of a study: a level of every factor, and a seed."""

    levels: Mapping[str, str]
    seed: int
    recipe: Recipe

    @property
    def name(self) -> str:
        return "-".join([*self.levels.values(), f"seed{self.seed}"])


def find_study(name_or_path: str | Path) -> Study:
    """Return a built-in study by name, or read one from the path of a YAML file."""
    folder = resources.files("needlework") / "studies"
    shipped = sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))
    text = str(name_or_path)
    if text in shipped:
        with resources.as_file(folder / f"{text}.yaml") as path:
            return _read_study(path)
    if text.endswith((".yaml", ".yml")) or "/" in text:
        return _read_study(Path(text))
    raise ZooError(f"unknown study {text!r}: {did_you_mean(text, shipped)} (or give the path of a study file ending in .yaml)")


def _read_study(path: Path) -> Study:
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
    list_models(study)  # raises for invalid recipes before anything is trained
    return study


def _merge(base: Any, change: Any) -> Any:
    """Return `base` updated by `change`, recursively in nested mappings."""
    if not isinstance(base, dict) or not isinstance(change, dict):
        return change
    return {**base, **{key: _merge(base.get(key), value) for key, value in change.items()}}


def _recipe_content(level: Level) -> dict[str, Any]:
    return recipes.find_recipe(level).model_dump(exclude={"name", "seed"}) if isinstance(level, str) else level


def list_models(study: Study) -> list[StudyModel]:
    """Return the models of a study: every combination of levels with every training seed."""
    made = []
    for chosen in product(*(levels.items() for levels in study.vary.values())):
        levels = dict(zip(study.vary, (name for name, _ in chosen), strict=True))
        content: Any = _recipe_content(study.recipe)
        for _, change in chosen:
            content = _merge(content, _recipe_content(change))
        for seed in study.training_seeds:
            name = "-".join([*levels.values(), f"seed{seed}"])
            recipe = recipes.validate_recipe({**content, "name": name.lower(), "seed": seed}, f"study {study.name}, {name}")
            made.append(StudyModel(levels, seed, recipe))
    return made


def train_models(study: Study, out: Path, jobs: int, bar: Bar) -> None:
    """Train all models of a study that are not finished, `jobs` at a time in separate processes.

    Interrupted trainings resume from their checkpoints. A model of the zoo with the same recipe hash is copied instead of
    trained.
    """
    waiting = []
    for cell in list_models(study):
        _copy_shipped(cell.recipe, out / MODELS / cell.name)
        if is_finished(out / MODELS / cell.name, cell.recipe):
            bar.found(cell.recipe.steps)
        else:
            waiting.append(cell)
    context = multiprocessing.get_context("spawn")  # torch's threads do not work after a fork
    with context.Manager() as manager:
        steps = manager.Queue()
        with ProcessPoolExecutor(jobs, mp_context=context) as pool:
            trainings = {pool.submit(_train, cell.recipe, out / MODELS / cell.name, cell.name, steps) for cell in waiting}
            try:
                while trainings:
                    done, trainings = wait(trainings, timeout=0.5, return_when=FIRST_COMPLETED)
                    for name, count, new in _drain(steps):
                        bar.show(name)
                        (bar.advance if new else bar.found)(count)
                    for training in done:
                        training.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for process in multiprocessing.active_children():
                    process.terminate()  # training resumes from the checkpoint
                raise


def list_trained(study: Study, out: Path) -> list[StudyModel]:
    """Return the finished models of a study, after copying those that are in the zoo; raise if there are none."""
    for cell in list_models(study):
        _copy_shipped(cell.recipe, out / MODELS / cell.name)
    there = [cell for cell in list_models(study) if is_finished(out / MODELS / cell.name, cell.recipe)]
    if not there:
        raise ZooError(f"{out} holds no trained model of the study {study.name!r}; leave out --no-train")
    return there


def is_finished(folder: Path, recipe: Recipe) -> bool:
    """Return whether the directory holds a finished model of this recipe; raise if it is of another recipe."""
    if not (folder / RECORD).exists():
        return False
    if recipes.read_recipe(folder / RECIPE).hash() != recipe.hash():
        raise ZooError(f"{folder} holds a model of another recipe; give another --out, or move it away")
    return True


def _copy_shipped(recipe: Recipe, folder: Path) -> None:
    made = next((entry.path for entry in catalog().values() if entry.record.get("recipe_hash") == recipe.hash()), None)
    if made is None or (folder / RECORD).exists():
        return
    shutil.copytree(made, folder, ignore=shutil.ignore_patterns(RECORD), dirs_exist_ok=True)
    shutil.copy(made / RECORD, folder)  # last: the record marks a complete model


def _drain(queue: Any) -> Iterator[tuple[str, int, bool]]:
    while not queue.empty():
        yield queue.get()


def _train(recipe: Recipe, folder: Path, name: str, steps: Any) -> None:
    """Train one model in a worker process; put (name, steps, whether done now) into a queue for the common progress bar."""
    from needlework.training.train import train

    class Told(Bar):
        def found(self, count: int, work: float | None = None) -> None:
            steps.put((name, count, False))

        def advance(self, count: int = 1, work: float | None = None) -> None:
            steps.put((name, count, True))

    train(recipe, folder, progress=Told(recipe.steps, "steps", shown=False), card_samples=0)


def make_plan(study: Study, trained: list[StudyModel]) -> str:
    """Return the plan that runs the study's experiments on all trained models, as YAML."""
    models = [{"source": f"{MODELS}/{cell.name}", "name": cell.name} for cell in trained]
    plan = {
        "name": study.name,
        "about": study.about,
        "models": models,
        "seeds": study.seeds,
        "experiments": study.experiments,
    }
    return yaml.safe_dump(plan, sort_keys=False, width=120)
