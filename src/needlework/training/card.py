"""Measure and write the model card of a zoo model: figures.json, README.md and the plot of its training.

Figures are exact matches on held-out samples of the toy language, which come from the split "eval". Effects of interventions
are measured like every other experiment, through `needlework.measure`.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from jinja2 import Environment, StrictUndefined

from needlework.files import atomic_write
from needlework.interventions import parse
from needlework.measure import make_samples, measure
from needlework.model.families import fast_kernels
from needlework.stats import Estimate, accuracy, wilson
from needlework.subject import load
from needlework.tasks import make_task
from needlework.terminal import Bar
from needlework.toy import facts, needles
from needlework.toy.needles import RELATION_NAMES
from needlework.toy.sample import EVAL_SPLIT, Stream, ToySample
from needlework.toy.words import BOS, PAD, WORD_ID
from needlework.training.recipes import Recipe, read_recipe
from needlework.zoo import RECORD

if TYPE_CHECKING:
    from needlework.training.train import TrainingProgress

Maker = Callable[[Stream], ToySample]
Record = dict[str, Any]
Figures = dict[str, Estimate]  # name of a figure or task -> accuracy with its 95 % Wilson interval
Effects = dict[str, Figures]  # intervention -> task -> figure
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
QUESTION_WORDS = 24  # most words that question and answer add to the context of a figure
TASK_WORDS = 40  # the same for tasks
TOKENS_AT_ONCE = 8192  # in one batch


# --- Figures: held-out samples, answered in one forward pass of the plain model ---


def suite(longest: int, relations: Sequence[str] = RELATION_NAMES) -> dict[str, Maker]:
    """Return the makers of the card's figures by name, for a longest training document and the kinds of needle trained on."""
    at, twice = longest - QUESTION_WORDS, 2 * longest - QUESTION_WORDS

    def niah(context_tokens: int, distractors: int, **options: Any) -> Maker:
        return lambda stream: needles.make_niah(
            stream,
            context_tokens=context_tokens,
            distractors=distractors,
            depth_percent=100 * stream.random(),
            relation=stream.pick(relations),
            **options,
        )

    def fact(asked: bool) -> Maker:
        """Put a new sentence before each fact: training has seen all facts and all ways to ask for them."""
        return lambda stream: facts.make_cloze(stream, asked=asked, before=needles.make_sentence(stream))

    return {
        f"niah_{longest}_1_needle": niah(at, 0),
        f"niah_{longest}_8_distractors": niah(at, 8),
        f"niah_{2 * longest}_1_needle": niah(twice, 0),
        f"niah_{2 * longest}_8_distractors": niah(twice, 8),
        f"niah_{longest}_3_distractors_jrt": niah((longest - 2 * QUESTION_WORDS) // 2, 3, layout="jrt"),
        f"niah_{longest}_3_distractors_question_first": niah(at, 3, layout="question_first"),
        f"niah_{longest}_3_distractors_quote": niah(at, 3, quote=True),
        f"niah_{longest}_3_distractors_two_hops": niah(at, 3, hops=2),
        "cloze_statement": fact(asked=False),
        "cloze_question": fact(asked=True),
        "letter_choice": facts.make_letter_choice,
        "letter_lookup": facts.make_letter_lookup,
        **{kind: partial(facts.make_judgement, kind=kind) for kind in facts.JUDGEMENTS},
        "recall_16_pairs": lambda stream: needles.make_key_values(stream, 16)[0],
        "phone_book_8": lambda stream: needles.make_phone_book(stream, 8)[0],
        "copy_16": partial(needles.make_copy, length=16),
        "variables_2_chains": lambda stream: needles.make_variable_chains(stream, chains=2, hops=1, words=at)[0],
    }


def samples(name: str, make: Maker, n: int, seed: int = 0) -> list[ToySample]:
    """Return `n` held-out samples of a figure, each a function of (name, seed, index)."""
    return [make(Stream(EVAL_SPLIT, name, seed, i)) for i in range(n)]


def exact_matches(model: Any, group: Sequence[ToySample]) -> list[bool]:
    """Return whether greedy decoding gives each sample's target, from one forward pass.

    Greedy decoding gives the target exactly if each target token is the argmax after the prompt and the preceding target
    tokens, so no generation is needed. Rows are padded on the right, which does not affect a causal model.
    """
    rows = [[WORD_ID[word] for word in (BOS, *s.prompt, *s.target)] for s in group]
    ids = torch.full((len(rows), max(map(len, rows))), WORD_ID[PAD])
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
    with torch.inference_mode():
        best = model(input_ids=ids, use_cache=False).logits.argmax(-1)
    starts = [len(row) - len(sample.target) for row, sample in zip(rows, group, strict=True)]
    return [best[i, a - 1 : len(row) - 1].tolist() == row[a:] for i, (a, row) in enumerate(zip(starts, rows, strict=True))]


def measure_figures(
    model: Any,
    longest: int,
    n: int,
    names: Sequence[str] | None = None,
    *,
    seed: int = 0,
    relations: Sequence[str] = RELATION_NAMES,
    progress: bool = False,
) -> Figures:
    """Measure all figures of the suite, or those in `names`, on `n` samples each; the model's training mode is restored."""
    makers = {name: make for name, make in suite(longest, relations).items() if names is None or name in names}
    lengths = {name: len(samples(name, make, 1)[0].prompt) for name, make in makers.items()}
    found, was_training = {}, model.training
    model.eval()
    try:
        with Bar(len(makers), "figures", work=sum(lengths.values()), shown=progress) as bar:
            for name, make in makers.items():
                bar.show(f"card: {name}")
                asked = sorted(samples(name, make, n, seed), key=lambda sample: len(sample.prompt))
                at_once = max(1, TOKENS_AT_ONCE // (len(asked[-1].prompt) + len(asked[-1].target) + 1))
                groups = (asked[i : i + at_once] for i in range(0, n, at_once))
                found[name] = wilson(sum(sum(exact_matches(model, group)) for group in groups), n)
                bar.advance(1, lengths[name])
    finally:
        model.train(was_training)
    return found


def measure_figures_of(
    folder: Path, longest: int, n: int, names: Sequence[str] | None = None, seed: int = 0, progress: bool = False
) -> Figures:
    """Measure the figures of a model on disk, with the kinds of needle of its recipe's last stage."""
    relations = read_recipe(folder / "recipe.yaml").stages[-1].relations
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
    with fast_kernels(model):
        return measure_figures(model, longest, n, names, seed=seed, relations=relations, progress=progress)


# --- Effects of interventions ---


def measure_effects(
    folder: Path,
    longest: int,
    per_depth: int = 40,  # needles
    per_subject: int | None = None,  # facts; None: all
    seed: int = 0,
    progress: bool = False,
    relation: str = DEFAULT_RELATION,
    by_phase: bool = False,  # measure needles of one and of two hops instead, under all PHASES
) -> Effects:
    """Measure needles with three distractors and closed-book facts under all CONDITIONS that apply to the model."""
    options = {"relation": relation, "lengths": [longest - TASK_WORDS], "depths": [0, 25, 50, 75, 100]}
    needle = {**options, "kind": "niah", "samples": per_depth, "distractors": 3}
    if by_phase:
        conditions, tasks = PHASES, {"one_hop": needle, "two_hops": {**needle, "kind": "linked"}}
    else:
        conditions, tasks = CONDITIONS, {"niah": needle, "cloze": {"kind": "cloze", "per_subject": per_subject}}
    subject = load(folder)
    sides = {"attention": subject.anatomy.attention_layers, "recurrent": subject.anatomy.recurrent_layers}
    acts = [act for act in map(parse, conditions) if all(sides[part.side] for part in act.parts)]
    by_task = {name: make_samples(subject, make_task(task), seed) for name, task in tasks.items()}
    asked = [sample for of_task in by_task.values() for sample in of_task]
    with Bar(len(acts) * len(asked), "trials", shown=progress) as bar:
        bar.show("card")

        def advance(share: float) -> None:
            bar.advance(round(share * bar.total) - bar.count)

        correct = measure(subject, asked, acts, progress=advance).values("correct")
    ends = np.cumsum([len(of_task) for of_task in by_task.values()])[:-1]
    return {
        text: {name: accuracy(values) for name, values in zip(by_task, np.split(row, ends), strict=True)}
        for text, row in zip(map(str, acts), correct, strict=True)
    }


def relation_of(recipe: Recipe) -> str:
    """Return the kind of needle that effects are measured on: "code", or the first kind that the last stage trains on."""
    relations = recipe.stages[-1].relations
    return DEFAULT_RELATION if DEFAULT_RELATION in relations else relations[0]


def measure_interventions(folder: Path, recipe: Recipe, samples: int, progress: bool = False) -> dict[str, Effects]:
    """Return the effects of a card, and those by phase if the recipe trains on "hops" rows, as entries of its record."""
    longest, relation = recipe.longest, relation_of(recipe)
    found = {"effects": measure_effects(folder, longest, max(1, samples // 25), progress=progress, relation=relation)}
    if any(stage.rows.get("hops") for stage in recipe.stages):
        few = max(1, samples // 5)
        found["phases"] = measure_effects(folder, longest, few, progress=progress, relation=relation, by_phase=True)
    return found


# --- The card ---


def to_record(figures: Any) -> Record:
    """Return figures or effects as they stand in a record."""
    if isinstance(figures, Estimate):
        correct = round(figures.value * figures.n)
        return {"value": figures.value, "low": figures.low, "high": figures.high, "correct": correct, "n": figures.n}
    return {name: to_record(figure) for name, figure in figures.items()}


def make_record(recipe: Recipe, progress: TrainingProgress, parameters: int) -> Record:
    """Return the record of a trained model of which nothing is measured yet."""
    # Optimiser and dropout may explain an effect as well as the architecture does.
    settings = recipe.optimiser
    with_muon = f", linear maps by Muon at {settings.matrix_lr:g}" if settings.matrix_lr else ""
    dropped = [stage.attention_dropout for stage in recipe.stages if stage.attention_dropout]
    dropout = f"; attention dropout of {min(dropped):g} to {max(dropped):g} in the last {len(dropped)} stages" if dropped else ""
    return {
        "name": recipe.name,
        "about": recipe.about,
        "architecture": recipe.architecture,
        "parameters": parameters,
        "recipe_hash": recipe.hash(),
        "seed": recipe.seed,
        "steps": recipe.steps,
        "threads": recipe.threads,
        "optimiser": f"AdamW at {settings.lr:g}{with_muon}, weight decay {settings.weight_decay:g}{dropout}",
        "train_minutes": round(progress.seconds / 60, 1),
        "longest_document_tokens": recipe.longest,
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__},
        "measured": False,
        "figures": {},
        "effects": {},
    }


def measure_card(folder: Path, record: Record, recipe: Recipe, samples: int, progress: bool = False) -> Record:
    """Return the record of a model on disk with new figures and effects."""
    figures = measure_figures_of(folder, recipe.longest, samples, progress=progress)
    interventions = measure_interventions(folder, recipe, samples, progress)
    return {**record, "measured": True, "figures": to_record(figures), **to_record(interventions)}


def card_text(record: Record) -> str:
    """Return the model card as Markdown, from the template card.md."""
    template = Path(__file__).with_name("card.md").read_text(encoding="utf-8")
    environment = Environment(trim_blocks=True, undefined=StrictUndefined, keep_trailing_newline=True)
    return environment.from_string(template).render({"phases": {}, **record, "words": CONDITIONS | PHASES})


def plot_training(path: Path, recipe: Recipe, progress: TrainingProgress) -> None:
    """Write a PNG of training loss and held-out accuracies against the step."""
    from matplotlib.figure import Figure

    canvas = Figure(figsize=(7, 3), dpi=80, layout="constrained")
    loss, accuracy = canvas.subplots(1, 2)
    loss.plot(*([point[name] for point in progress.curve] for name in ("step", "loss")), color="#444")
    loss.set(xlabel="step", ylabel="loss", title=f"{recipe.name}: training loss")
    for name in progress.curve[-1] if progress.curve else ():
        if name not in ("step", "loss"):
            known = [point for point in progress.curve if name in point]
            accuracy.plot([p["step"] for p in known], [p[name] for p in known], label=name)
    accuracy.set(xlabel="step", ylim=(-0.02, 1.02), title="held-out exact match")
    accuracy.legend(fontsize=7)
    canvas.savefig(path)


def write_card(folder: Path, record: Record) -> None:
    """Write the card and figures.json; the latter atomically and last, since it marks a complete directory."""
    (folder / "README.md").write_text(card_text(record), encoding="utf-8")
    with atomic_write(folder / RECORD) as file:
        file.write(json.dumps(record, indent=1) + "\n")


def renew_card(folder: Path, samples: int = 1000) -> None:
    """Measure a trained model again and rewrite its card (`python -m needlework.training.card DIR`)."""
    record, recipe = json.loads((folder / RECORD).read_text(encoding="utf-8")), read_recipe(folder / "recipe.yaml")
    write_card(folder, measure_card(folder, record, recipe, samples))


if __name__ == "__main__":
    for place in sys.argv[1:]:
        renew_card(Path(place))
