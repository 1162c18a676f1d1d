"""Train a zoo model from a recipe, resumable from checkpoints with bit-identical weights."""

from __future__ import annotations

import fcntl
import math
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from needlework.errors import NeedleworkError, ZooError
from needlework.files import write_error
from needlework.terminal import Bar, say
from needlework.toy import tokenizer
from needlework.toy.sample import TRAIN_SPLIT, Stream
from needlework.training import card, documents, evaluate, recipes
from needlework.training.recipes import Recipe
from needlework.zoo import RECORD

CHECKPOINT_STEPS = 50
PROBE_STEPS = 200
PROBE_SAMPLES = 64
CARD_SAMPLES = 1000
CHECKPOINT = "checkpoint.pt"
LOCK = ".lock"
MAX_LEAK = 1e-4  # largest change of earlier logits by a later token, relative to the largest logit: 100 times rounding errors


@dataclass
class TrainingProgress:
    """State of a training: steps done, seconds spent, and the training curve so far."""

    step: int = 0
    seconds: float = 0.0
    curve: list[dict[str, float]] = field(default_factory=list)


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
    """Train a recipe into a directory and return the record of its card.

    The same call resumes an interrupted training. Data are a function of (seed, step), so the final weights equal those of an
    uninterrupted run, bit for bit, on the same machine with the same thread count.

    Args:
        recipe: Name of a built-in recipe, path of a YAML file, or a Recipe.
        out: Directory that is new, empty, or holds a checkpoint of the same recipe.
        steps: Number of steps instead of the recipe's.
        seed: Seed instead of the recipe's.
        progress: Whether to show a progress bar, or a bar to use.
        checkpoint_steps: Steps between checkpoints.
        card_samples: Samples for each figure of the card; 0 measures nothing, and the record says so.
    """
    from needlework.model.patches import fast_kernels
    from needlework.training.build import build_model, build_optimiser

    given = recipe if isinstance(recipe, Recipe) else recipes.find_recipe(recipe)
    chosen = given.changed(steps=steps, seed=seed)
    folder = Path(out)
    model = build_model(chosen)
    optimiser = build_optimiser(chosen.optimiser, model)
    with claim_directory(folder), fixed_threads(chosen.threads):
        if not (folder / CHECKPOINT).exists():
            run_preflight(chosen, model)
        with fast_kernels(model):
            done = load_checkpoint(folder, chosen, model, optimiser)
            model.train()
            own = progress if isinstance(progress, Bar) else Bar(chosen.steps, "steps", shown=progress)
            with own as bar:
                _run_steps(chosen, folder, model, optimiser, done, bar, checkpoint_steps)
            relations = chosen.stages[-1].relations
            measured = card.measure_figures(model, chosen.longest, card_samples, own.shown, relations) if card_samples else {}
        return _write_model(chosen, folder, model, done, measured, card_samples, own.shown)


# --- The loop ---


@contextmanager
def fixed_threads(threads: int) -> Iterator[None]:
    """Fix the thread count of torch and numba in the `with` block: floating-point sums, and thus weights, depend on it."""
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
    """Return the learning rate of a step, a pure function, so that checkpoints hold no scheduler state."""
    o = recipe.optimiser
    start, end, share = recipe.cycle_at(step)
    warm = share * min(1.0, (step - start + 1) / o.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * (step - start) / (end - start)))
    return peak * warm * (o.final_lr_share + (1 - o.final_lr_share) * cosine)


def _set_attention_dropout(model: Any, share: float | None) -> None:
    """Set attention dropout in all modules; None sets the value of the model's configuration."""
    share = getattr(model.config, "attention_dropout", 0.0) if share is None else share
    for part in model.modules():
        if hasattr(part, "attention_dropout"):
            part.attention_dropout = share


def train_step(recipe: Recipe, model: Any, optimiser: Any, step: int) -> float:
    """Train one step on the documents of (seed, step) and return the weighted mean loss; raise if it is not finite."""
    import torch

    stage = recipe.stage_at(step)
    length = Stream(TRAIN_SPLIT, recipe.seed, step, "length").pick(stage.lengths)
    rows = max(1, recipe.batch_tokens // length)
    ids_array, weights_array = documents.make_batch(recipe.seed, step, rows, length, recipe.document_mix(stage))
    ids, weights = torch.from_numpy(ids_array), torch.from_numpy(weights_array)[:, 1:]
    _set_attention_dropout(model, stage.attention_dropout)
    torch.manual_seed(recipe.seed * 1_000_003 + step)  # makes dropout a function of (seed, step), too
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


def _evaluate_probes(recipe: Recipe, model: Any) -> dict[str, float]:
    names = evaluate.probe_names(recipe.longest)
    relations = recipe.stages[-1].relations
    measured = evaluate.figures(model, recipe.longest, PROBE_SAMPLES, names, seed=1, relations=relations)
    return {name: figure.value for name, figure in measured.items()}


def _run_steps(
    recipe: Recipe, out: Path, model: Any, optimiser: Any, done: TrainingProgress, bar: Bar, checkpoint_steps: int
) -> None:
    bar.found(done.step)
    bar.show(recipe.name)
    began = time.monotonic() - done.seconds
    recent: list[float] = []
    while done.step < recipe.steps:
        recent.append(train_step(recipe, model, optimiser, done.step))
        done.step += 1
        last = done.step == recipe.steps
        if done.step % PROBE_STEPS == 0 or last:
            point = {"step": float(done.step), "loss": sum(recent) / len(recent), **_evaluate_probes(recipe, model)}
            done.curve.append(point)
            recent.clear()
            if bar.shown:
                note = "  ".join(f"{name} {value:.2f}" for name, value in point.items() if name != "step")
                say(f"step {done.step}  {time.monotonic() - began:.0f} s  {note}")
        done.seconds = time.monotonic() - began
        if done.step % checkpoint_steps == 0 or last:
            save_checkpoint(out, recipe, done, model, optimiser)
        bar.advance()


def versions() -> dict[str, str]:
    import torch
    import transformers

    return {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}


def _write_model(
    recipe: Recipe,
    out: Path,
    model: Any,
    done: TrainingProgress,
    measured: dict[str, evaluate.CardFigure],
    samples: int,
    progress: bool,
) -> card.Record:
    """Write weights, tokenizer and card, remove the checkpoint, and return the record; 0 samples measure nothing."""
    model.save_pretrained(out)
    tokenizer.save(out)
    silenced, in_phases = {}, {}
    if samples:
        relation, per_depth = card.relation_of(recipe), max(1, samples // 25)
        silenced = card.measure_effects(out, recipe.longest, per_depth, progress=progress, relation=relation)
        in_phases = card.phases_of(out, recipe, samples, progress)
    parameters = sum(weight.numel() for weight in model.parameters())
    record = card.make_record(recipe, done, measured, silenced, parameters, versions(), in_phases)
    card.write_card(out, recipe, done, record)
    (out / CHECKPOINT).unlink(missing_ok=True)
    return record


# --- Checkpoints: written atomically, and resumed by the same recipe only ---


def save_checkpoint(out: Path, recipe: Recipe, progress: TrainingProgress, model: Any, optimiser: Any) -> None:
    """Write the checkpoint atomically: to a temporary file that then replaces the old one."""
    import torch

    state = {
        "recipe_hash": recipe.hash(),
        "recipe_name": recipe.name,
        "progress": asdict(progress),
        "model": model.state_dict(),
        "optimiser": optimiser.state_dict(),
    }
    unfinished = out / f"{CHECKPOINT}.tmp"
    with unfinished.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(out / CHECKPOINT)


def load_checkpoint(out: Path, recipe: Recipe, model: Any, optimiser: Any) -> TrainingProgress:
    """Load the checkpoint in `out` into model and optimiser and return its progress, or zero progress if there is none."""
    import torch

    path = out / CHECKPOINT
    if not path.exists():
        return TrainingProgress()
    try:
        state = torch.load(path, weights_only=True)
    except Exception as error:  # torch raises many types for a damaged file
        raise ZooError(f"{path} is not a readable checkpoint ({error}); remove it to start again") from None
    if not isinstance(state, dict):
        raise ZooError(f"{path} is not a checkpoint of a training; remove it to start again")
    if state.get("recipe_hash") != recipe.hash():
        raise ZooError(
            f"{path} belongs to another training (recipe {state.get('recipe_name')!r}, "
            f"hash {state.get('recipe_hash')}; this one is {recipe.name!r}, hash {recipe.hash()}): "
            "give another --out, or the recipe, seed and steps it was started with"
        )
    model.load_state_dict(state["model"])
    optimiser.load_state_dict(state["optimiser"])
    return TrainingProgress(**state["progress"])


@contextmanager
def claim_directory(out: Path) -> Iterator[None]:
    """Create the output directory and lock it while training; raise if it is in use or holds other files."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = (out / LOCK).open("a")
    except OSError as error:
        raise ZooError(f"cannot write into {out}: {error.strerror}; choose another directory with --out") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ZooError(f"another training is writing into {out}; wait for it or choose another --out") from None
        try:
            if (out / RECORD).exists():
                raise ZooError(f"{out} holds a finished model; choose another --out, or remove it first")
            strangers = sorted(entry.name for entry in out.iterdir() if entry.name not in (f"{CHECKPOINT}.tmp", LOCK))
            if strangers and CHECKPOINT not in strangers:
                raise ZooError(f"{out} holds other files ({', '.join(strangers[:3])}); choose an empty directory")
            yield
        finally:
            (out / LOCK).unlink(missing_ok=True)


# --- Before the first step ---


def run_preflight(recipe: Recipe, model: Any) -> None:
    """Check that the untrained model is causal and can be evaluated, saved, loaded and ablated, before training starts."""
    from needlework.model.patches import fast_kernels

    try:
        with fast_kernels(model):
            _check_causal(recipe, model)
            evaluate.figures(model, recipe.longest, 1)
        with TemporaryDirectory(prefix="needlework-") as place:
            model.save_pretrained(place)
            tokenizer.save(Path(place))
            card.measure_effects(Path(place), recipe.longest, per_depth=1, per_subject=1)
    except NeedleworkError:
        raise
    except Exception as error:  # model classes of transformers raise anything
        if write_error(error) is not None:
            raise
        raise ZooError(
            f"recipe {recipe.name}: {recipe.architecture} with this config could be trained, but not measured afterwards "
            f"on prompts of up to {2 * recipe.longest} tokens ({type(error).__name__}: {error}); "
            "let it hold twice its longest document, or choose another class"
        ) from error


def _check_causal(recipe: Recipe, model: Any) -> None:
    """Raise if a later token changes earlier logits: such a model sees the tokens that it has to predict."""
    import torch

    was_training = model.training
    ids = torch.arange(10, 34)[None]
    other = ids.clone()
    other[0, -1] += 1
    with torch.inference_mode():
        model.eval()
        a, b = (model(input_ids=tokens, use_cache=False).logits[0, :-1] for tokens in (ids, other))
    model.train(was_training)
    if (a - b).abs().max() > MAX_LEAK * a.abs().max():
        raise ZooError(
            f"recipe {recipe.name}: {recipe.architecture} with this config sees words that come later, so its figures would "
            "mean nothing; make it causal (many classes need `is_decoder: true` in config)"
        )
