"""Train a zoo recipe: `train(recipe, out)` gives the same weights whether or not it was killed on the way."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from needlework.errors import ZooError
from needlework.terminal import Bar, say
from needlework.toy import tokenizer
from needlework.toy.sample import TRAIN_SPLIT, Stream
from needlework.training import build, card, checkpoints, documents, effects, evaluate, recipes, rehearsal
from needlework.training.checkpoints import Progress
from needlework.training.recipes import Recipe

CHECKPOINT_STEPS = 50
PROBE_STEPS = 200
PROBE_SAMPLES = 64
CARD_SAMPLES = 1000


@contextmanager
def one_pace(threads: int) -> Iterator[None]:
    """A fixed thread count for torch and numba: float sums depend on it, so the weights do."""
    import numba
    import torch

    before = torch.get_num_threads(), numba.get_num_threads()
    torch.set_num_threads(threads)
    numba.set_num_threads(min(threads, before[1]))
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        numba.set_num_threads(before[1])


def learning_rate(recipe: Recipe, step: int, peak: float) -> float:
    """A pure function of the step: nothing to save in a checkpoint."""
    o = recipe.optimiser
    start, end, share = recipe.cycle_at(step)
    warm = share * min(1.0, (step - start + 1) / o.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * (step - start) / (end - start)))
    return peak * warm * (o.final_lr_share + (1 - o.final_lr_share) * cosine)


def _drop_attention(model: Any, share: float | None) -> None:
    """Attention dropout from now on; None: what the model's configuration says."""
    share = getattr(model.config, "attention_dropout", 0.0) if share is None else share
    for part in model.modules():
        if hasattr(part, "attention_dropout"):
            part.attention_dropout = share


def train_step(recipe: Recipe, model: Any, optimiser: Any, step: int) -> float:
    """One step on the documents of (seed, step); returns the weighted mean loss."""
    import torch

    stage = recipe.stage_at(step)
    length = Stream(TRAIN_SPLIT, recipe.seed, step, "length").pick(stage.lengths)
    rows = max(1, recipe.batch_tokens // length)
    ids_array, weights_array = documents.batch(recipe.seed, step, rows, length, recipe.diet(stage))
    ids, weights = torch.from_numpy(ids_array), torch.from_numpy(weights_array)[:, 1:]
    _drop_attention(model, stage.attention_dropout)
    torch.manual_seed(recipe.seed * 1_000_003 + step)  # dropout, where a model has it, is a function of (seed, step) too
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    loss = (losses * weights.flatten()).sum() / weights.sum()
    if not math.isfinite(float(loss.item())):
        raise ZooError(
            f"the loss is not finite at step {step}: the training has diverged. Lower optimiser.lr or matrix_lr "
            "(another recipe, so give another --out)"
        )
    if step == recipe.cycle_at(step)[0]:
        optimiser.forget()
    optimiser.zero_grad()
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.optimiser.clip)
    optimiser.step(lambda peak: learning_rate(recipe, step, peak))
    return float(loss.item())


def _probe(recipe: Recipe, model: Any) -> dict[str, float]:
    names = evaluate.probe_names(recipe.longest)
    relations = recipe.stages[-1].relations
    measured = evaluate.figures(model, recipe.longest, PROBE_SAMPLES, names, seed=1, relations=relations)
    return {name: figure.value for name, figure in measured.items()}


def _loop(recipe: Recipe, out: Path, model: Any, optimiser: Any, done: Progress, bar: Bar, checkpoint_steps: int) -> None:
    bar.found(done.step)
    bar.show(recipe.name)
    began = time.monotonic() - done.seconds
    recent: list[float] = []
    while done.step < recipe.steps:
        recent.append(train_step(recipe, model, optimiser, done.step))
        done.step += 1
        last = done.step == recipe.steps
        if done.step % PROBE_STEPS == 0 or last:
            point = {"step": float(done.step), "loss": sum(recent) / len(recent), **_probe(recipe, model)}
            done.curve.append(point)
            recent.clear()
            if bar.shown:
                note = "  ".join(f"{name} {value:.2f}" for name, value in point.items() if name != "step")
                say(f"step {done.step}  {time.monotonic() - began:.0f} s  {note}")
        done.seconds = time.monotonic() - began
        if done.step % checkpoint_steps == 0 or last:
            checkpoints.save(out, recipe, done, model, optimiser)
        bar.advance()


def versions() -> dict[str, str]:
    import torch
    import transformers

    return {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}


def _finish(
    recipe: Recipe, out: Path, model: Any, done: Progress, measured: dict[str, evaluate.Figure], samples: int, progress: bool
) -> card.Record:
    """Weights, tokenizer and what was measured. Without samples nothing was, and the record says so."""
    model.save_pretrained(out)
    tokenizer.save(out)
    silenced, in_phases = {}, {}
    if samples:
        relation, per_depth = card.relation_of(recipe), max(1, samples // 25)
        silenced = effects.measure(out, recipe.longest, per_depth, progress=progress, relation=relation)
        in_phases = card.phases_of(out, recipe, samples, progress)
    record = card.record(recipe, done, measured, silenced, build.parameter_count(model), versions(), in_phases)
    card.write(out, recipe, done, record)
    (out / checkpoints.CHECKPOINT).unlink(missing_ok=True)
    return record


def train(
    recipe: str | Path | Recipe,
    out: str | Path,
    *,
    steps: int | None = None,
    seed: int | None = None,
    progress: bool | Bar = True,
    checkpoint_steps: int = CHECKPOINT_STEPS,
    card_samples: int = CARD_SAMPLES,
) -> card.Record:
    """Train a recipe (a name, a YAML file or a Recipe) into the directory `out` and return its record.

    `progress` may be a bar of yours.

    Its card is measured on `card_samples` samples; with 0 nothing is measured, and the record says so (`card.renew` can later).

    A training that was stopped is taken up again by the same call. Data are a function of (seed, step), so the final
    weights equal those of an uninterrupted run, bit for bit, on the same machine with the same thread count.
    """
    from needlework.model.patches import fast_kernels
    from needlework.training import optimisers

    given = recipe if isinstance(recipe, Recipe) else recipes.find(recipe)
    chosen = given.changed(steps=steps, seed=seed)
    folder = Path(out)
    model = build.model(chosen)
    optimiser = optimisers.for_model(chosen.optimiser, model)
    with checkpoints.claimed(folder), one_pace(chosen.threads):
        if not (folder / checkpoints.CHECKPOINT).exists():
            rehearsal.rehearse(chosen, model)
        with fast_kernels(model):
            done = checkpoints.load(folder, chosen, model, optimiser)
            model.train()
            own = progress if isinstance(progress, Bar) else Bar(chosen.steps, "steps", shown=progress)
            with own as bar:
                _loop(chosen, folder, model, optimiser, done, bar, checkpoint_steps)
            relations = chosen.stages[-1].relations
            measured = card.figures(model, chosen.longest, card_samples, own.shown, relations) if card_samples else {}
        return _finish(chosen, folder, model, done, measured, card_samples, own.shown)
