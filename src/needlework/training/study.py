"""Run a study (`needlework study`): train a grid of recipes, run one plan on all models, and compare factor levels.

Models are compared by the smallest k of H heads from which on at least 95 % of retrieval is retained (lower bound of the paired
retained share, as in the verdict on few heads), with the heads of lowest entropy and with random heads. As in a report,
`analysis.model_trials` selects the trials.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import stdtrit

from needlework.analysis.conditions import few_heads_rank
from needlework.analysis.findings import KEPT, Verdict, Word
from needlework.analysis.frame import Frame
from needlework.analysis.model_trials import by_boundary
from needlework.analysis.verdicts import BASELINE
from needlework.experiments.result import Result
from needlework.stats import Estimate, percent
from needlework.tables import Table
from needlework.terminal import Bar
from needlework.training import grid
from needlework.training.grid import StudyModel

PICTURE, TABLE, NUMBERS = "study.png", "study.md", "study.json"
WAYS = ("entropy", "random")
UNJUDGED: tuple[Word, ...] = ("not run", "does not apply")


@dataclass(frozen=True)
class HeadCurves:
    """Retrieval of one model of a study without intervention, and the share retained with k heads, by way of selection."""

    name: str
    levels: Mapping[str, str]
    seed: int
    heads: int  # of each layer
    untouched: Estimate  # accuracy without intervention
    curves: Mapping[str, Mapping[int, Estimate]]  # way of selection -> heads kept in each layer -> retained share

    @property
    def testable(self) -> bool:
        return self.untouched.n > 0 and self.untouched.low >= BASELINE

    def smallest_k(self, way: str) -> int:
        """Return the smallest measured k from which on every k retains retrieval; all heads if none does."""
        fewest = self.heads
        for k in sorted(self.curves[way], reverse=True):
            if not self.curves[way][k].low >= KEPT:
                break
            fewest = k
        return fewest

    def at_15_percent(self, way: str) -> tuple[int, Estimate] | None:
        """Return the measured k nearest to 15 % of the heads (as verdict 2 defines it) and its retained share, or None."""
        ranked = [(rank, k) for k in self.curves[way] if (rank := few_heads_rank(k, self.heads))]
        if not ranked:
            return None
        _, nearest = min(ranked)
        return nearest, self.curves[way][nearest]

    def few_heads_suffice(self) -> bool:
        near = self.at_15_percent("entropy")
        return self.testable and near is not None and near[1].low >= KEPT


@dataclass(frozen=True)
class FactorDifference:
    """Difference of the smallest share of heads between two levels of a factor, over models matched in all else."""

    factor: str
    less: str
    more: str
    way: str
    points: Estimate  # mean of (more - less) over matched pairs of models, with Student's interval


@dataclass(frozen=True)
class StudyResult:
    """Result of a study: the run on all models, and the curves of each model."""

    run: Result
    models: Sequence[HeadCurves]
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
    from needlework.analysis.reader import load
    from needlework.experiments.run import run

    asked, folder = grid.find_study(file), Path(out)
    if training_seeds:
        asked = asked.model_copy(update={"training_seeds": list(dict.fromkeys(training_seeds))})
    folder.mkdir(parents=True, exist_ok=True)
    if train:
        with Bar(sum(cell.recipe.steps for cell in grid.list_models(asked)), "steps", shown=progress) as bar:
            grid.train_models(asked, folder, jobs, bar)
    cells = grid.list_trained(asked, folder)
    path = folder / "plan.yaml"
    path.write_text(grid.make_plan(asked, cells), encoding="utf-8")
    result = run(path, folder / grid.RUN, progress=progress)
    result.report()
    models = read_curves(cells, load([folder / grid.RUN]))
    return StudyResult(result, models, _write(asked, cells, models, result.verdicts(), folder))


def read_curves(cells: Sequence[StudyModel], frame: Frame) -> list[HeadCurves]:
    """Return the curves of each model from the trials of a study's run."""
    models = []
    for cell in cells:
        trials = by_boundary(frame, cell.name)[0]
        untouched = trials.accuracy(trials.retrieval("none"))
        curves = {way: trials.retained_by_heads(way) for way in WAYS}
        models.append(HeadCurves(cell.name, cell.levels, cell.seed, trials.heads, untouched, curves))
    return models


def compare_levels(models: Sequence[HeadCurves]) -> list[FactorDifference]:
    """Compare each pair of levels of each factor, over pairs of testable models that differ in that factor only."""
    usable = {(*model.levels.items(), model.seed): model for model in models if model.testable}
    made = []
    for factor in models[0].levels:
        names = dict.fromkeys(model.levels[factor] for model in models)
        for less, more in combinations(names, 2):
            for way in WAYS:
                steps = []
                for key, model in usable.items():
                    other = usable.get(tuple((factor, more) if part == (factor, less) else part for part in key))
                    if model.levels[factor] == less and other is not None:
                        steps.append(other.smallest_k(way) / other.heads - model.smallest_k(way) / model.heads)
                made.append(FactorDifference(factor, less, more, way, student(steps)))
    return made


def student(values: Sequence[float]) -> Estimate:
    """Return the mean with Student's 95 % interval, which is infinite for a single value."""
    n = len(values)
    if n == 0:
        return Estimate(math.nan, math.nan, math.nan, 0, "no pair of models that both retrieve")
    mean = float(np.mean(values))
    if n == 1:
        return Estimate(mean, -math.inf, math.inf, 1)
    spread = float(stdtrit(n - 1, 0.975)) * float(np.std(values, ddof=1)) / math.sqrt(n)
    return Estimate(mean, mean - spread, mean + spread, n)


# --- Tables, numbers and the plot ---


def curves_table(models: Sequence[HeadCurves]) -> Table:
    """Return a table with a row for each model."""

    def share(e: Estimate) -> str:
        return f"{percent(e.value)} [{percent(e.low, '')}, {percent(e.high, '')}]"

    def near(model: HeadCurves, way: str) -> str:
        found = model.at_15_percent(way)
        return f"{found[0]} of {model.heads} keep {share(found[1])}" if model.testable and found else "-"

    def smallest(model: HeadCurves, way: str) -> str:
        k = model.smallest_k(way)
        return f"{k} of {model.heads} ({percent(k / model.heads)})" if model.testable else "not testable"

    ways = ["about 15 % of heads, by entropy", "at random", "smallest k, by entropy", "at random"]
    table = Table([*models[0].levels, "seed", "untouched", *ways])
    for model in models:
        cells = [*(near(model, way) for way in WAYS), *(smallest(model, way) for way in WAYS)]
        table.add_row(*model.levels.values(), str(model.seed), share(model.untouched), *cells)
    return table


def sentences(models: Sequence[HeadCurves]) -> list[str]:
    """Return sentences: how many models keep retrieval with few heads, and the effect of each factor."""
    testable, shown = sum(model.testable for model in models), sum(model.few_heads_suffice() for model in models)
    said = [f"{shown} of {len(models)} models keep their retrieval with about 15 % of the heads ({testable} can be tested)."]
    for d in compare_levels(models):
        if d.points.n == 0:
            said.append(f"{d.factor}, {d.more} against {d.less}, by {d.way}: {d.points.why}.")
            continue
        low, high = ("-∞", "∞") if d.points.n == 1 else (percent(d.points.low, ""), percent(d.points.high, ""))
        said.append(
            f"{d.factor}, {d.more} against {d.less}: the smallest share of heads by {d.way} differs by "
            f"{100 * d.points.value:+.1f} points [{low}, {high}; {d.points.n} pairs of models]."
        )
    return said


def study_numbers(models: Sequence[HeadCurves]) -> dict[str, Any]:
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


def verdict_table(cells: Sequence[StudyModel], verdicts: Sequence[Verdict]) -> Table:
    """Count verdicts over seeds: a row for each claim that was judged, a column for each combination of levels."""
    levels = {cell.name: ", ".join(cell.levels.values()) for cell in cells}
    counts: dict[str, dict[str, Counter[Word]]] = defaultdict(lambda: defaultdict(Counter))
    for verdict in verdicts:
        if verdict.model in levels and verdict.word not in UNJUDGED:
            counts[f"{verdict.number}. {verdict.title}"][levels[verdict.model]][verdict.word] += 1

    def show(words: Counter[Word]) -> str:
        return ", ".join(f"{word} {count} of {words.total()}" for word, count in words.most_common()) or "-"

    columns = list(dict.fromkeys(levels.values()))
    rows = [[claim, *(show(by_levels[name]) for name in columns)] for claim, by_levels in counts.items()]
    return Table(["claim", *columns], rows)


def _write(
    asked: grid.Study, cells: Sequence[StudyModel], models: Sequence[HeadCurves], verdicts: Sequence[Verdict], folder: Path
) -> str:
    untrained = len(grid.list_models(asked)) - len(cells)
    missing = f"\n\n{untrained} further models of the study are not trained." if untrained else ""
    said = "\n".join(f"- {sentence}" for sentence in sentences(models))
    text = f"# {asked.name}\n\n{asked.about.strip()}{missing}\n\n{curves_table(models).to_markdown()}\n\n{said}\n"
    claims = verdict_table(cells, verdicts)
    if claims.rows:
        text += f"\n## Verdicts, seed by seed\n\n{claims.to_markdown()}\n"
    (folder / TABLE).write_text(text, encoding="utf-8")
    numbers = {"name": asked.name, "about": asked.about, **study_numbers(models)}
    (folder / NUMBERS).write_text(json.dumps(numbers, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    plot_curves(models, folder / PICTURE)
    return text


def plot_curves(models: Sequence[HeadCurves], path: Path) -> None:
    """Plot retained retrieval against the share of heads kept: a panel per combination of levels, lines per seed and way."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    panels: dict[str, list[HeadCurves]] = {}
    for model in models:
        panels.setdefault(", ".join(f"{factor}: {level}" for factor, level in model.levels.items()), []).append(model)
    canvas = Canvas(figsize=(3.1 * len(panels), 3.1), dpi=110, layout="constrained")
    FigureCanvasAgg(canvas)
    axes = canvas.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    colours = {"entropy": "#0b6e4f", "random": "#b5651d"}
    for axis, (title, shown) in zip(axes, panels.items(), strict=True):
        for model in shown:
            for way, curve in model.curves.items():
                points = [*sorted(curve.items()), (model.heads, None)]
                shares = [100 * k / model.heads for k, _ in points]
                kept = [100 * e.value if e else 100.0 for _, e in points]
                label = f"by {way}" if model is shown[0] else None
                axis.plot(shares, kept, color=colours[way], marker="o", ms=3, lw=1.2, alpha=0.8, label=label)
        axis.axhline(95, color="#888", lw=0.8, ls=":")
        axis.axvline(15, color="#888", lw=0.8, ls=":")
        axis.set(xscale="log", xlim=(2.5, 110), ylim=(-3, 104), title=title, xlabel="heads kept of each layer, %")
        axis.set_xticks([3, 6, 15, 25, 50, 100], ["3", "6", "15", "25", "50", "100"])
        axis.minorticks_off()
    axes[0].set_ylabel("retrieval kept, %")
    axes[0].legend(fontsize=8, frameon=False)
    canvas.savefig(path)
