"""What is written beside a model's weights: figures.json, the model card and the picture of its training."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from needlework.terminal import Bar
from needlework.toy.needles import RELATION_NAMES
from needlework.training.checkpoints import Progress
from needlework.training.effects import CONDITIONS, DEFAULT_RELATION, PHASES, Effects, measure, phases
from needlework.training.evaluate import Figure, figures_of, samples, suite
from needlework.training.evaluate import figures as measured_figures
from needlework.training.recipes import Recipe, read
from needlework.zoo.shelf import RECORD

Record = dict[str, Any]
NOT_MEASURED = (
    "No card was measured: nothing is known of what this model can do. `python -m needlework.training.card DIR` measures it."
)


def figures(model: Any, longest: int, n: int, shown: bool, relations: Sequence[str] = RELATION_NAMES) -> dict[str, Figure]:
    """The card's figures, one after the other, with a bar: long prompts take most of the time."""
    every = suite(longest, relations)
    lengths = {name: len(next(iter(samples(name, make, 1))).prompt) for name, make in every.items()}
    found: dict[str, Figure] = {}
    with Bar(len(every), "figures", work=sum(lengths.values()), shown=shown) as bar:
        for name, length in lengths.items():
            bar.show(f"card: {name}")
            found |= measured_figures(model, longest, n, [name], relations=relations)
            bar.advance(1, length)
    return found


def record(
    recipe: Recipe,
    progress: Progress,
    measured: dict[str, Figure],
    effects: Effects,
    parameters: int,
    versions: dict[str, str],
    in_phases: Effects,
) -> Record:
    return {
        "name": recipe.name,
        "about": recipe.about,
        "architecture": recipe.architecture,
        "parameters": parameters,
        "recipe_hash": recipe.hash(),
        "seed": recipe.seed,
        "steps": recipe.steps,
        "threads": recipe.threads,
        "optimiser": trained_by(recipe),
        "train_minutes": round(progress.seconds / 60, 1),
        "longest_document_tokens": recipe.longest,
        "versions": versions,
        "measured": bool(measured),
        "figures": as_dict(measured),
        "effects": as_dicts(effects),
        **({"phases": as_dicts(in_phases)} if in_phases else {}),
    }


def relation_of(recipe: Recipe) -> str:
    """The kind of needle that effects are measured on: codes, or the first kind of a model that was not trained on them."""
    relations = recipe.stages[-1].relations
    return DEFAULT_RELATION if DEFAULT_RELATION in relations else relations[0]


def phases_of(folder: Path, recipe: Recipe, samples: int, progress: bool = False) -> Effects:
    """One hop and two, phase by phase, for a model that was trained on links that say their value; of others nothing."""
    if not any(stage.rows.get("hops") for stage in recipe.stages):
        return {}
    return phases(folder, recipe.longest, relation_of(recipe), per_depth=max(1, samples // 5), progress=progress)


def trained_by(recipe: Recipe) -> str:
    """How the weights were moved, in words: what a reader must know before an effect is put down to the architecture."""
    settings = recipe.optimiser
    with_muon = f", linear maps by Muon at {settings.matrix_lr:g}" if settings.matrix_lr else ""
    dropped = [stage.attention_dropout for stage in recipe.stages if stage.attention_dropout]
    dropout = f"; attention dropout of {min(dropped):g} to {max(dropped):g} in the last {len(dropped)} stages" if dropped else ""
    return f"AdamW at {settings.lr:g}{with_muon}, weight decay {settings.weight_decay:g}{dropout}"


def as_dict(figures: dict[str, Figure]) -> dict[str, dict[str, float]]:
    return {name: figure.as_dict() for name, figure in figures.items()}


def as_dicts(effects: Effects) -> dict[str, dict[str, dict[str, float]]]:
    return {text: as_dict(figures) for text, figures in effects.items()}


def _figure_rows(figures: dict[str, dict[str, float]]) -> str:
    return "\n".join(
        f"| {name} | {100 * f['value']:.1f} % | {100 * f['low']:.1f} to {100 * f['high']:.1f} % | {int(f['n'])} |"
        for name, f in figures.items()
    )


def _effect_rows(effects: dict[str, dict[str, dict[str, float]]], names: dict[str, str]) -> str:
    def cell(f: dict[str, float]) -> str:
        return f"{100 * f['value']:.1f} % [{100 * f['low']:.1f}, {100 * f['high']:.1f}] (n = {int(f['n'])})"

    return "\n".join(
        f"| {names[text]} | `{text}` | {' | '.join(cell(figure) for figure in by_task.values())} |"
        for text, by_task in effects.items()
    )


def _phases(content: Record) -> str:
    if not content.get("phases"):
        return ""
    return f"""
## What attention is for while reading

Needles of the kind it was trained on, among three others: found in one hop, and through a link that names another needle (two
hops). The last prompt token counts as answering.

| | intervention | one hop | two hops |
|---|---|---|---|
{_effect_rows(content["phases"], PHASES)}
"""


def _measured(content: Record) -> str:
    if not content["figures"]:
        return f"{NOT_MEASURED}\n"
    return f"""## Held-out figures

Exact match of the greedy answer, with 95 % Wilson intervals. Samples come from the split "eval", which training never
draws from. `niah_L_...` has prompts of about L tokens. An answer must be the likeliest of the whole vocabulary; a model that
knows the form of the answer alone has 25 % of the letters and 50 % of the judgements.

| figure | value | interval | n |
|---|---|---|---|
{_figure_rows(content["figures"])}

## What silencing parts of it does

Needles found among three distractors in prompts of about {content["longest_document_tokens"]} tokens, and closed-book facts
completed (top-1 over the whole vocabulary); the intervention acts in prefill and in decode.

| | intervention | needles found | facts |
|---|---|---|---|
{_effect_rows(content["effects"], CONDITIONS)}
{_phases(content)}"""


def text(content: Record) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    return f"""# {content["name"]}

{content["about"]}

A {content["architecture"]} of {content["parameters"]:,} parameters, trained from nothing on needlework's toy language
(generated text, no outside data). It speaks that language only. Load it with
`AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained`, or by its name with `needlework.load`.

| training | |
|---|---|
| recipe hash | `{content["recipe_hash"]}` (`recipe.yaml` beside this card) |
| seed | {content["seed"]} |
| steps | {content["steps"]} |
| threads | {content["threads"]} |
| optimiser | {content.get("optimiser", "see `recipe.yaml`")} |
| wall time | {content["train_minutes"]} minutes |
| longest document | {content["longest_document_tokens"]} tokens |
| versions | {versions} |

{_measured(content)}
![training curve](curve.png)
"""


def picture(path: Path, recipe: Recipe, progress: Progress) -> None:
    """Loss and the followed accuracies against the step, as a small PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(7, 3), dpi=80, layout="constrained")
    FigureCanvasAgg(canvas)
    loss, accuracy = canvas.subplots(1, 2)
    steps = [point["step"] for point in progress.curve]
    loss.plot(steps, [point["loss"] for point in progress.curve], color="#444")
    loss.set(xlabel="step", ylabel="loss", title=f"{recipe.name}: training loss")
    for name in progress.curve[-1] if progress.curve else ():
        if name not in ("step", "loss"):
            known = [point for point in progress.curve if name in point]
            accuracy.plot([p["step"] for p in known], [p[name] for p in known], label=name)
    accuracy.set(xlabel="step", ylim=(-0.02, 1.02), title="held-out exact match")
    accuracy.legend(fontsize=7)
    canvas.savefig(path)


def write(out: Path, recipe: Recipe, progress: Progress, content: Record) -> None:
    """figures.json comes last and whole: its presence says that the directory is complete."""
    (out / "recipe.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
    picture(out / "curve.png", recipe, progress)
    _write_record(out, content)


def _write_record(out: Path, content: Record) -> None:
    (out / "README.md").write_text(text(content), encoding="utf-8")
    unfinished = out / f"{RECORD}.tmp"
    unfinished.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(out / RECORD)


def renew(folder: Path, samples: int = 1000) -> None:
    """`python -m needlework.training.card DIR`: measure a trained model again, and rewrite its card."""
    content = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    recipe, longest = read(folder / "recipe.yaml"), content["longest_document_tokens"]
    content["measured"] = True
    content["figures"] = as_dict(figures_of(folder, longest, samples))
    content["effects"] = as_dicts(measure(folder, longest, per_depth=max(1, samples // 25), relation=relation_of(recipe)))
    if in_phases := phases_of(folder, recipe, samples):
        content["phases"] = as_dicts(in_phases)
    _write_record(folder, content)


if __name__ == "__main__":
    for place in sys.argv[1:]:
        renew(Path(place))
