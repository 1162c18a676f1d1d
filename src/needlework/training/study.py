"""Run a study (`needlework study`): train a grid of recipes, run one plan on all models, and compare factor levels.

A question such as "what makes retrieval depend on few heads?" needs models that differ in one factor only, with several seeds
each. Models are compared by the smallest k of H heads from which on at least 95 % of retrieval is retained (lower bound of the
paired retained share, as in the verdict on few heads), with the heads of lowest entropy and with random heads. As in a report,
`analysis.model_trials` selects the trials.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import shutil
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from itertools import combinations, product, takewhile
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from scipy.special import stdtrit

from needlework.analysis.conditions import few_heads_rank
from needlework.analysis.evidence import KEPT
from needlework.analysis.frame import Frame
from needlework.analysis.model_trials import by_boundary
from needlework.analysis.reader import load
from needlework.analysis.verdicts import BASELINE, Verdict, Word, verdicts
from needlework.errors import ZooError
from needlework.experiments.result import Result
from needlework.experiments.schema import NAME, NAME_RULE, read
from needlework.stats import NOTHING, Estimate, percent
from needlework.tables import Table
from needlework.terminal import Bar
from needlework.training import recipes
from needlework.training.recipes import Recipe
from needlework.zoo import RECORD, catalog

MODELS, RUN = "models", "run"  # directories of a study
WAYS = ("entropy", "random")
Level = dict[str, Any] | str  # changes to a recipe, or the name of a built-in recipe


def _check_name(name: str) -> str:
    if not NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name; {NAME_RULE}")
    return name


Name = Annotated[str, AfterValidator(_check_name)]  # names directories


class Study(BaseModel):
    """Content of a study file: the common recipe, factors with their levels, seeds, and the experiments run on all models."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Name
    about: str = ""
    recipe: Level = {}
    vary: Annotated[dict[Name, Annotated[dict[Name, Level], Field(min_length=2)]], Field(min_length=1)]  # levels of each factor
    training_seeds: Annotated[list[Annotated[int, Field(ge=0, lt=2**32)]], Field(min_length=1)] = [0, 1, 2]
    seeds: list[int] = [0]  # of the samples
    experiments: Annotated[dict[str, Any], Field(min_length=1)]  # as in a plan, without models


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
    """Return a built-in study by name, or read one from the path of a YAML file; raise if a recipe of it is invalid."""
    path = recipes.find_file("study", name_or_path, recipes.shipped_files("studies"))
    content = read(path).data
    if not isinstance(content, dict):
        raise ZooError(
            f"{path}: a study is a mapping with the keys recipe, vary and experiments; `needlework explain study` shows one"
        )
    try:
        found = Study.model_validate(content)
    except ValidationError as error:
        raise recipes.explain(error, str(path), Study) from None
    list_models(found)
    return found


def _merge(base: Any, change: Any) -> Any:
    """Return `base` updated by `change`, recursively in nested mappings."""
    if not isinstance(base, dict) or not isinstance(change, dict):
        return change
    return {**base, **{key: _merge(base.get(key), value) for key, value in change.items()}}


def list_models(study: Study) -> list[StudyModel]:
    """Return the models of a study: every combination of levels with every training seed."""
    made = []
    for chosen in product(*(levels.items() for levels in study.vary.values())):
        levels = dict(zip(study.vary, (name for name, _ in chosen), strict=True))
        content: Any = {}
        for part in (study.recipe, *(change for _, change in chosen)):
            whole = recipes.find_recipe(part).model_dump(exclude={"name", "seed"}) if isinstance(part, str) else part
            content = _merge(content, whole)
        for seed in study.training_seeds:
            name = "-".join([*levels.values(), f"seed{seed}"])
            recipe = recipes.validate_recipe({**content, "name": name.lower(), "seed": seed}, f"study {study.name}, {name}")
            made.append(StudyModel(levels, seed, recipe))
    return made


def is_finished(cell: StudyModel, folder: Path) -> bool:
    """Return whether the directory holds this model, finished; raise if it holds another.

    A model of the zoo with the same recipe hash is copied instead of trained.
    """
    shipped = (entry.path for entry in catalog().values() if entry.record.get("recipe_hash") == cell.recipe.hash())
    if not (folder / RECORD).exists() and (made := next(shipped, None)):
        shutil.copytree(made, folder, ignore=shutil.ignore_patterns(RECORD), dirs_exist_ok=True)
        shutil.copy(made / RECORD, folder)  # last: the record marks a complete model
    if not (folder / RECORD).exists():
        return False
    if recipes.read_recipe(folder / "recipe.yaml").hash() != cell.recipe.hash():
        raise ZooError(f"{folder} holds a model of another recipe; give another --out, or move it away")
    return True


def train_models(study: Study, out: Path, jobs: int, bar: Bar) -> None:
    """Train all models of a study that are not finished, `jobs` at a time in separate processes.

    Interrupted trainings resume from their checkpoints.
    """
    cells = list_models(study)
    waiting = [cell for cell in cells if not is_finished(cell, out / MODELS / cell.name)]
    bar.found(sum(cell.recipe.steps for cell in cells if cell not in waiting))
    context = multiprocessing.get_context("spawn")  # torch's threads do not work after a fork
    with context.Manager() as manager, ProcessPoolExecutor(jobs, mp_context=context) as pool:
        steps = manager.Queue()
        trainings = {pool.submit(_train, cell, out / MODELS / cell.name, steps) for cell in waiting}
        try:
            while trainings:
                done, trainings = wait(trainings, timeout=0.5, return_when=FIRST_COMPLETED)
                while not steps.empty():
                    name, count, new = steps.get()
                    bar.show(name)
                    (bar.advance if new else bar.found)(count)
                for training in done:
                    training.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()  # training resumes from the checkpoint
            raise


def _train(cell: StudyModel, folder: Path, steps: Any) -> None:
    """Train one model in a worker process; put (name, steps, whether done now) into a queue for the common progress bar."""
    from needlework.training.train import train

    class QueueBar(Bar):
        def found(self, count: int, work: float | None = None, kind: str | None = None) -> None:
            steps.put((cell.name, count, False))

        def advance(self, count: int = 1, work: float | None = None) -> None:
            steps.put((cell.name, count, True))

    train(cell.recipe, folder, progress=QueueBar(cell.recipe.steps, "steps", shown=False), card_samples=0)


def list_trained(study: Study, out: Path) -> list[StudyModel]:
    """Return the finished models of a study, after copying those that are in the zoo; raise if there are none."""
    there = [cell for cell in list_models(study) if is_finished(cell, out / MODELS / cell.name)]
    if not there:
        raise ZooError(f"{out} holds no trained model of the study {study.name!r}; leave out --no-train")
    return there


# --- What a study measures ---


@dataclass(frozen=True)
class MeasuredModel(StudyModel):
    """A model's retrieval without intervention, and the share retained with k heads, by way of selection."""

    heads: int  # of each layer
    untouched: Estimate  # accuracy without intervention
    curves: Mapping[str, Mapping[int, Estimate]]  # way of selection -> heads kept in each layer -> retained share

    @property
    def testable(self) -> bool:
        return self.untouched.n > 0 and self.untouched.low >= BASELINE

    def smallest_k(self, way: str) -> int:
        """Return the smallest measured k from which on every k retains retrieval; all heads if none does."""
        kept = takewhile(lambda k: self.curves[way][k].low >= KEPT, sorted(self.curves[way], reverse=True))
        return min(kept, default=self.heads)

    def at_15_percent(self, way: str) -> tuple[int, Estimate] | None:
        """Return the measured k nearest to 15 % of the heads (as verdict 2 defines it) and its retained share, or None."""
        ranked = [(rank, k) for k in self.curves[way] if (rank := few_heads_rank(k, self.heads))]
        nearest = min(ranked, default=(None, None))[1]
        return None if nearest is None else (nearest, self.curves[way][nearest])

    def few_heads_suffice(self) -> bool:
        near = self.at_15_percent("entropy")
        return self.testable and near is not None and near[1].low >= KEPT


@dataclass(frozen=True)
class StudyResult:
    """Result of a study: the run on all models, and the curves of each model."""

    run: Result
    models: Sequence[MeasuredModel]
    text: str  # study.md: tables and sentences


def study(
    file: str | Path,
    out: str | Path,
    *,
    jobs: int = 1,
    training_seeds: Sequence[int] = (),
    train: bool = True,
    progress: bool = True,
) -> StudyResult:
    """Train the models of a study, run its plan on them and compare factor levels.

    An interrupted study resumes: trainings from their checkpoints, the run from its store.

    Args:
        file: Name of a built-in study, or path of a YAML file.
        out: Directory for models/, run/ with its report, study.md, study.json and study.png.
        jobs: Number of models trained at the same time.
        training_seeds: Training seeds to use instead of those in the file.
        train: If False, only models that are already trained are used.
        progress: Whether to show progress bars.
    """
    from needlework.experiments.run import run

    asked, folder = find_study(file), Path(out)
    if training_seeds:
        asked = asked.model_copy(update={"training_seeds": list(dict.fromkeys(training_seeds))})
    folder.mkdir(parents=True, exist_ok=True)
    every = list_models(asked)
    if train:
        with Bar(sum(cell.recipe.steps for cell in every), "steps", shown=progress) as bar:
            train_models(asked, folder, jobs, bar)
    cells = list_trained(asked, folder)
    plan = {
        "name": asked.name,
        "about": asked.about,
        "models": [{"source": f"{MODELS}/{cell.name}", "name": cell.name} for cell in cells],
        "seeds": asked.seeds,
        "experiments": asked.experiments,
    }
    path = folder / "plan.yaml"
    path.write_text(yaml.safe_dump(plan, sort_keys=False, width=120), encoding="utf-8")
    result = run(path, folder / RUN, progress=progress)
    result.report()
    frame = load([folder / RUN])
    models = read_curves(cells, frame)
    missing = len(every) - len(cells)
    note = f"\n\n{missing} further models of the study are not trained." if missing else ""
    effects = "\n".join(f"- {sentence}" for sentence in sentences(models))
    text = f"# {asked.name}\n\n{asked.about.strip()}{note}\n\n{curves_table(models).to_markdown()}\n\n{effects}\n"
    if (claims := verdict_table(models, verdicts(frame))).rows:
        text += f"\n## Verdicts, seed by seed\n\n{claims.to_markdown()}\n"
    (folder / "study.md").write_text(text, encoding="utf-8")
    numbers = {"name": asked.name, "about": asked.about, **study_numbers(models)}
    (folder / "study.json").write_text(json.dumps(numbers, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    plot_curves(models, folder / "study.png")
    return StudyResult(result, models, text)


def read_curves(cells: Sequence[StudyModel], frame: Frame) -> list[MeasuredModel]:
    """Return the curves of each model from the trials of a study's run."""
    models = []
    for cell in cells:
        trials = by_boundary(frame, cell.name)[0]
        untouched = trials.accuracy(trials.retrieval("none"))
        curves = {way: trials.retained_by_heads(way) for way in WAYS}
        models.append(MeasuredModel(cell.levels, cell.seed, cell.recipe, trials.heads, untouched, curves))
    return models


def compare_levels(models: Sequence[MeasuredModel]) -> dict[tuple[str, str, str, str], Estimate]:
    """Compare the smallest share of heads between each pair of levels, over testable models that differ in that factor only.

    Returns:
        By factor, first level, second level and way of selection: the mean of second - first, with Student's interval.
    """
    usable = {(*model.levels.items(), model.seed): model for model in models if model.testable}
    made = {}
    for factor in models[0].levels:
        names = dict.fromkeys(model.levels[factor] for model in models)
        for less, more in combinations(names, 2):
            for way in WAYS:
                steps = []
                for key, model in usable.items():
                    other = usable.get(tuple((factor, more) if part == (factor, less) else part for part in key))
                    if model.levels[factor] == less and other is not None:
                        steps.append(other.smallest_k(way) / other.heads - model.smallest_k(way) / model.heads)
                made[factor, less, more, way] = student(steps)
    return made


def student(values: Sequence[float]) -> Estimate:
    """Return the mean with Student's 95 % interval, which is infinite for a single value."""
    if not values:
        return replace(NOTHING, why="no pair of models that both retrieve")
    n, mean = len(values), float(np.mean(values))
    spread = float(stdtrit(n - 1, 0.975)) * float(np.std(values, ddof=1)) / math.sqrt(n) if n > 1 else math.inf
    return Estimate(mean, mean - spread, mean + spread, n)


# --- Tables, numbers and the plot ---


def curves_table(models: Sequence[MeasuredModel]) -> Table:
    """Return a table with a row for each model."""

    def share(e: Estimate) -> str:
        return f"{percent(e.value)} [{percent(e.low, '')}, {percent(e.high, '')}]"

    ways = ["about 15 % of heads, by entropy", "at random", "smallest k, by entropy", "at random"]
    table = Table([*models[0].levels, "seed", "untouched", *ways])
    for model in models:
        near = [model.at_15_percent(way) if model.testable else None for way in WAYS]
        cells = [f"{found[0]} of {model.heads} keep {share(found[1])}" if found else "-" for found in near]
        for k in map(model.smallest_k, WAYS):
            cells.append(f"{k} of {model.heads} ({percent(k / model.heads)})" if model.testable else "not testable")
        table.add_row(*model.levels.values(), str(model.seed), share(model.untouched), *cells)
    return table


def sentences(models: Sequence[MeasuredModel]) -> list[str]:
    """Return sentences: how many models keep retrieval with few heads, and the effect of each factor."""
    testable, shown = sum(model.testable for model in models), sum(model.few_heads_suffice() for model in models)
    said = [f"{shown} of {len(models)} models keep their retrieval with about 15 % of the heads ({testable} can be tested)."]
    for (factor, less, more, way), points in compare_levels(models).items():
        between = f"{100 * points.value:+.1f} points [{percent(points.low, '')}, {percent(points.high, '')}"
        said.append(
            f"{factor}, {more} against {less}: the smallest share of heads by {way} differs by "
            f"{between}; {points.n} pairs of models]."
            if points.n
            else f"{factor}, {more} against {less}, by {way}: {points.why}."
        )
    return said


def study_numbers(models: Sequence[MeasuredModel]) -> dict[str, Any]:
    """Return the JSON-compatible content of study.json."""
    return {
        "total": len(models),
        "testable": sum(model.testable for model in models),
        "shown": sum(model.few_heads_suffice() for model in models),
        "models": [
            {
                "name": model.name,
                "levels": dict(model.levels),
                "seed": model.seed,
                "heads": model.heads,
                "untouched": model.untouched.to_dict(),
                "testable": model.testable,
                "smallest": {way: model.smallest_k(way) for way in WAYS},
                "retained": {way: {str(k): e.to_dict() for k, e in sorted(model.curves[way].items())} for way in WAYS},
            }
            for model in models
        ],
        "sentences": sentences(models),
    }


def verdict_table(cells: Sequence[StudyModel], judged: Sequence[Verdict]) -> Table:
    """Count verdicts over seeds: a row for each claim that was judged, a column for each combination of levels."""
    levels = {cell.name: ", ".join(cell.levels.values()) for cell in cells}
    counts: dict[str, dict[str, Counter[Word]]] = defaultdict(lambda: {name: Counter() for name in levels.values()})
    for verdict in judged:
        if verdict.model in levels and verdict.word not in ("not run", "does not apply"):
            counts[f"{verdict.number}. {verdict.title}"][levels[verdict.model]][verdict.word] += 1
    table = Table(["claim", *dict.fromkeys(levels.values())])
    for claim, by_levels in counts.items():
        shown = [[f"{word} {count} of {words.total()}" for word, count in words.most_common()] for words in by_levels.values()]
        table.add_row(claim, *(", ".join(parts) or "-" for parts in shown))
    return table


def plot_curves(models: Sequence[MeasuredModel], path: Path) -> None:
    """Plot retained retrieval against the share of heads kept: a panel per combination of levels, lines per seed and way."""
    from matplotlib.figure import Figure

    panels: dict[str, list[MeasuredModel]] = {}
    for model in models:
        panels.setdefault(", ".join(f"{factor}: {level}" for factor, level in model.levels.items()), []).append(model)
    canvas = Figure(figsize=(3.1 * len(panels), 3.1), dpi=110, layout="constrained")
    axes = canvas.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    colours = {"entropy": "#0b6e4f", "random": "#b5651d"}
    for axis, (title, shown) in zip(axes, panels.items(), strict=True):
        for model in shown:
            for way, curve in model.curves.items():
                points = [*((100 * k / model.heads, 100 * curve[k].value) for k in sorted(curve)), (100, 100)]
                label = f"by {way}" if model is shown[0] else None
                axis.plot(*zip(*points, strict=True), color=colours[way], marker="o", ms=3, lw=1.2, alpha=0.8, label=label)
        axis.axhline(95, color="#888", lw=0.8, ls=":")
        axis.axvline(15, color="#888", lw=0.8, ls=":")
        axis.set(xscale="log", xlim=(2.5, 110), ylim=(-3, 104), title=title, xlabel="heads kept of each layer, %")
        axis.set_xticks([3, 6, 15, 25, 50, 100], ["3", "6", "15", "25", "50", "100"])
        axis.minorticks_off()
    axes[0].set_ylabel("retrieval kept, %")
    axes[0].legend(fontsize=8, frameon=False)
    canvas.savefig(path)
