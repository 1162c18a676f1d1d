"""Measure and write the model card of a zoo model: figures.json, README.md and the plot of its training."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from needlework.interventions import parse
from needlework.measure import make_samples, measure
from needlework.tables import Table
from needlework.tasks import make_task
from needlework.terminal import Bar
from needlework.toy.needles import RELATION_NAMES
from needlework.training.evaluate import CardFigure, figures_of, samples, suite
from needlework.training.evaluate import figures as measured_figures
from needlework.training.recipes import Recipe, read_recipe
from needlework.zoo import RECORD

if TYPE_CHECKING:
    from needlework.training.train import TrainingProgress

Record = dict[str, Any]
Effects = dict[str, dict[str, CardFigure]]  # intervention -> task -> figure
CONDITIONS = {
    "none": "untouched",
    "ablate_attention()": "no attention heads",
    "keep_heads(fraction=0.15)": "15 % of the heads, by entropy",
    "keep_heads(fraction=0.15, by='random')": "15 % of the heads, at random",
    "ablate_recurrent()": "no recurrent memory",
}
PHASES = {
    "none": "untouched",
    "ablate_attention(phase='prefill')": "no attention heads while reading",
    "ablate_attention(phase='decode')": "no attention heads while answering",
}
DEFAULT_RELATION = "code"
ROOM = 40  # most words that question and answer add to the context
NOT_MEASURED = (
    "No card was measured: nothing is known of what this model can do. `python -m needlework.training.card DIR` measures it."
)


def measure_figures(
    model: Any, longest: int, n: int, shown: bool, relations: Sequence[str] = RELATION_NAMES
) -> dict[str, CardFigure]:
    """Measure the card's figures on `n` samples each, with a progress bar weighted by prompt length."""
    every = suite(longest, relations)
    lengths = {name: len(next(iter(samples(name, make, 1))).prompt) for name, make in every.items()}
    found: dict[str, CardFigure] = {}
    with Bar(len(every), "figures", work=sum(lengths.values()), shown=shown) as bar:
        for name, length in lengths.items():
            bar.show(f"card: {name}")
            found |= measured_figures(model, longest, n, [name], relations=relations)
            bar.advance(1, length)
    return found


def measure_effects(
    folder: Path,
    longest: int,
    per_depth: int = 40,
    per_subject: int | None = None,
    seed: int = 0,
    progress: bool = False,
    relation: str = DEFAULT_RELATION,
) -> Effects:
    """Measure needle retrieval with three distractors and closed-book facts under all CONDITIONS that apply to the model."""
    niah = {"kind": "niah", "relation": relation, **_needle_options(longest, per_depth)}
    return _measure(folder, {"niah": niah, "cloze": {"kind": "cloze", "per_subject": per_subject}}, CONDITIONS, seed, progress)


def measure_phases(
    folder: Path, longest: int, relation: str, per_depth: int = 200, seed: int = 0, progress: bool = False
) -> Effects:
    """Measure one-hop and two-hop needles with three distractors, with attention ablated in prefill or in decode."""
    options = {"relation": relation, **_needle_options(longest, per_depth)}
    tasks = {"one_hop": {"kind": "niah", **options}, "two_hops": {"kind": "linked", **options}}
    return _measure(folder, tasks, PHASES, seed, progress)


def _needle_options(longest: int, per_depth: int) -> dict[str, Any]:
    return {"lengths": [longest - ROOM], "depths": [0, 25, 50, 75, 100], "samples": per_depth, "distractors": 3}


def _measure(folder: Path, tasks: dict[str, Record], conditions: dict[str, str], seed: int, progress: bool) -> Effects:
    from needlework.subject import load

    subject = load(folder)
    sides = {"attention": subject.anatomy.attention_layers, "recurrent": subject.anatomy.recurrent_layers}
    acts = {text: parse(text) for text in conditions}
    acts = {text: act for text, act in acts.items() if all(sides[part.side] for part in act.parts)}
    by_task = {name: make_samples(subject, make_task(options), seed) for name, options in tasks.items()}
    asked = [sample for of_task in by_task.values() for sample in of_task]
    with Bar(len(acts) * len(asked), "trials", shown=progress) as bar:
        bar.show("card")

        def advance(share: float) -> None:
            bar.advance(round(share * bar.total) - bar.count)

        found = measure(subject, asked, list(acts.values()), progress=advance)
    effects: Effects = {text: {} for text in acts}
    start = 0
    for name, of_task in by_task.items():
        for text, values in zip(acts, found.values("correct")[:, start : start + len(of_task)], strict=True):
            effects[text][name] = CardFigure(int(values.sum()), len(of_task))
        start += len(of_task)
    return effects


def make_record(
    recipe: Recipe,
    progress: TrainingProgress,
    measured: dict[str, CardFigure],
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
    """Return the kind of needle that effects are measured on: "code", or the first kind that the last stage trains on."""
    relations = recipe.stages[-1].relations
    return DEFAULT_RELATION if DEFAULT_RELATION in relations else relations[0]


def phases_of(folder: Path, recipe: Recipe, samples: int, progress: bool = False) -> Effects:
    """Measure one and two hops by phase (`measure_phases`) if the recipe trains on "hops" rows; otherwise return nothing."""
    if not any(stage.rows.get("hops") for stage in recipe.stages):
        return {}
    return measure_phases(folder, recipe.longest, relation_of(recipe), max(1, samples // 5), progress=progress)


def trained_by(recipe: Recipe) -> str:
    """Return the optimiser and dropout as text, because they may explain an effect as well as the architecture does."""
    settings = recipe.optimiser
    with_muon = f", linear maps by Muon at {settings.matrix_lr:g}" if settings.matrix_lr else ""
    dropped = [stage.attention_dropout for stage in recipe.stages if stage.attention_dropout]
    dropout = f"; attention dropout of {min(dropped):g} to {max(dropped):g} in the last {len(dropped)} stages" if dropped else ""
    return f"AdamW at {settings.lr:g}{with_muon}, weight decay {settings.weight_decay:g}{dropout}"


def as_dict(figures: dict[str, CardFigure]) -> dict[str, dict[str, float]]:
    return {name: figure.as_dict() for name, figure in figures.items()}


def as_dicts(effects: Effects) -> dict[str, dict[str, dict[str, float]]]:
    return {text: as_dict(figures) for text, figures in effects.items()}


def _figures_table(figures: dict[str, dict[str, float]]) -> str:
    table = Table(["figure", "value", "interval", "n"])
    for name, f in figures.items():
        table.add_row(name, f"{100 * f['value']:.1f} %", f"{100 * f['low']:.1f} to {100 * f['high']:.1f} %", str(int(f["n"])))
    return table.to_markdown()


def _effects_table(effects: dict[str, dict[str, dict[str, float]]], names: dict[str, str], columns: Sequence[str]) -> str:
    def cell(f: dict[str, float]) -> str:
        return f"{100 * f['value']:.1f} % [{100 * f['low']:.1f}, {100 * f['high']:.1f}] (n = {int(f['n'])})"

    rows = [[names[text], f"`{text}`", *map(cell, by_task.values())] for text, by_task in effects.items()]
    return Table(["", "intervention", *columns], rows).to_markdown()


def _phases(content: Record) -> str:
    if not content.get("phases"):
        return ""
    return f"""
## What attention is for while reading

Needles of the kind it was trained on, among three others: found in one hop, and through a link that names another needle (two
hops). The last prompt token counts as answering.

{_effects_table(content["phases"], PHASES, ["one hop", "two hops"])}
"""


def _measured(content: Record) -> str:
    if not content["figures"]:
        return f"{NOT_MEASURED}\n"
    return f"""## Held-out figures

Exact match of the greedy answer, with 95 % Wilson intervals. Samples come from the split "eval", which training never
draws from. `niah_L_...` has prompts of about L tokens. An answer must be the likeliest of the whole vocabulary; a model that
knows the form of the answer alone has 25 % of the letters and 50 % of the judgements.

{_figures_table(content["figures"])}

## What silencing parts of it does

Needles found among three distractors in prompts of about {content["longest_document_tokens"]} tokens, and closed-book facts
completed (top-1 over the whole vocabulary); the intervention acts in prefill and in decode.

{_effects_table(content["effects"], CONDITIONS, ["needles found", "facts"])}
{_phases(content)}"""


def card_text(content: Record) -> str:
    """Return the model card as Markdown."""
    versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    training = [
        ["recipe hash", f"`{content['recipe_hash']}` (`recipe.yaml` beside this card)"],
        ["seed", str(content["seed"])],
        ["steps", str(content["steps"])],
        ["threads", str(content["threads"])],
        ["optimiser", content.get("optimiser", "see `recipe.yaml`")],
        ["wall time", f"{content['train_minutes']} minutes"],
        ["longest document", f"{content['longest_document_tokens']} tokens"],
        ["versions", versions],
    ]
    return f"""# {content["name"]}

{content["about"]}

A {content["architecture"]} of {content["parameters"]:,} parameters, trained from nothing on needlework's toy language
(generated text, no outside data). It speaks that language only. Load it with
`AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained`, or by its name with `needlework.load`.

{Table(["training", ""], training).to_markdown()}

{_measured(content)}
![training curve](curve.png)
"""


def plot_training(path: Path, recipe: Recipe, progress: TrainingProgress) -> None:
    """Write a PNG of training loss and held-out accuracies against the step."""
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


def write_card(out: Path, recipe: Recipe, progress: TrainingProgress, content: Record) -> None:
    """Write recipe, plot, card and figures.json; the latter atomically and last, since it marks a complete directory."""
    (out / "recipe.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
    plot_training(out / "curve.png", recipe, progress)
    _write_record(out, content)


def _write_record(out: Path, content: Record) -> None:
    (out / "README.md").write_text(card_text(content), encoding="utf-8")
    unfinished = out / f"{RECORD}.tmp"
    unfinished.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(out / RECORD)


def renew_card(folder: Path, samples: int = 1000) -> None:
    """Measure a trained model again and rewrite its card (`python -m needlework.training.card DIR`)."""
    content = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    recipe, longest = read_recipe(folder / "recipe.yaml"), content["longest_document_tokens"]
    content["measured"] = True
    content["figures"] = as_dict(figures_of(folder, longest, samples))
    content["effects"] = as_dicts(measure_effects(folder, longest, max(1, samples // 25), relation=relation_of(recipe)))
    if in_phases := phases_of(folder, recipe, samples):
        content["phases"] = as_dicts(in_phases)
    _write_record(folder, content)


if __name__ == "__main__":
    for place in sys.argv[1:]:
        renew_card(Path(place))
