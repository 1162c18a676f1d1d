"""`needlework study`: train a grid of recipes, run one plan on all of them, and say what retrieval in few heads depends on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from needlework.experiments.result import Result
from needlework.store import Store
from needlework.terminal import Bar
from needlework.training import concentration, grid, seeds
from needlework.training.concentration import Found
from needlework.training.grid import Cell
from needlework.verdicts import Verdict

PICTURE, TABLE, NUMBERS = "study.png", "study.md", "study.json"


@dataclass(frozen=True)
class StudyResult:
    """The run of all models, and what was found of each of them."""

    run: Result
    models: Sequence[Found]
    text: str  # table and sentences, in Markdown


def study(
    file: str | Path,
    out: str | Path,
    *,
    jobs: int = 1,
    training_seeds: Sequence[int] = (),
    train: bool = True,
    progress: bool = True,
) -> StudyResult:
    """Train, run and compare; `out` then holds models/, run/ with its report, study.md, study.json and study.png.

    `training_seeds` instead of the study's own: more models of the same kinds, or fewer. A study that was stopped goes on
    where it was: trainings from their checkpoints, the run from its store. With `train` False the models that are there are
    asked and no other is trained.
    """
    asked, folder = grid.find(file), Path(out)
    if training_seeds:
        asked = asked.model_copy(update={"training_seeds": list(dict.fromkeys(training_seeds))})
    folder.mkdir(parents=True, exist_ok=True)
    if train:
        with Bar(sum(cell.recipe.steps for cell in grid.cells(asked)), "steps", shown=progress) as bar:
            grid.train_all(asked, folder, jobs, bar)
    cells = grid.trained(asked, folder)
    from needlework.experiments.run import run

    path = folder / "plan.yaml"
    path.write_text(grid.plan_of(asked, cells), encoding="utf-8")
    result = run(path, folder / grid.RUN, progress=progress)
    result.report()
    models = compare(cells, folder)
    return StudyResult(result, models, _write(asked, cells, models, result.verdicts(), folder))


def compare(cells: Sequence[Cell], folder: Path) -> list[Found]:
    """What the run of a study says of each of its models."""
    store = Store(folder / grid.RUN)
    try:
        heads = {cell.name: _heads(folder / grid.MODELS / cell.name) for cell in cells}
        return concentration.found(cells, heads, store.rows("asked"))
    finally:
        store.close()


def _heads(folder: Path) -> int:
    """Query heads of an attention layer."""
    from needlework.inspection import anatomy_of

    anatomy = anatomy_of(str(folder))
    return anatomy.attention(anatomy.attention_layers[0].index).query_heads


def _write(asked: grid.Study, cells: Sequence[Cell], models: Sequence[Found], judged: Sequence[Verdict], folder: Path) -> str:
    untrained = len(grid.cells(asked)) - len(cells)
    missing = f"\n\n{untrained} further models of the study are not trained." if untrained else ""
    said = "\n".join(f"- {sentence}" for sentence in concentration.sentences(models))
    text = f"# {asked.name}\n\n{asked.about.strip()}{missing}\n\n{concentration.table(models)}\n\n{said}\n"
    if claims := seeds.table(cells, judged):
        text += f"\n## Verdicts, seed by seed\n\n{claims}\n"
    (folder / TABLE).write_text(text, encoding="utf-8")
    numbers = {"name": asked.name, "about": asked.about, **concentration.as_json(models)}
    (folder / NUMBERS).write_text(json.dumps(numbers, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    picture(models, folder / PICTURE)
    return text


def picture(models: Sequence[Found], path: Path) -> None:
    """Retained retrieval against the share of heads kept: a panel for each combination, a line for each seed and way."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    panels: dict[str, list[Found]] = {}
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
