"""Train a zoo model from a recipe, resumable from checkpoints with bit-identical weights."""

from __future__ import annotations

import fcntl
import math
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numba
import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from needlework.errors import NeedleworkError, ZooError, did_you_mean
from needlework.files import atomic_path, write_error
from needlework.model.families import fast_kernels
from needlework.terminal import Bar, say
from needlework.toy import tokenizer
from needlework.toy import words as w
from needlework.toy.sample import TRAIN_SPLIT, Stream
from needlework.training import card, documents, recipes
from needlework.training.recipes import Optimiser, Recipe
from needlework.zoo import RECORD

CHECKPOINT_STEPS = 50
PROBE_STEPS = 200
PROBE_SAMPLES = 64
CARD_SAMPLES = 1000
CHECKPOINT = "checkpoint.pt"
LOCK = ".lock"
MAX_LEAK = 1e-4  # largest change of earlier logits by a later token, relative to the largest logit: 100 times rounding errors

# Coefficients of the quintic Newton-Schulz iteration: five rounds bring the singular values of a matrix of norm 1 near 1.
_QUINTIC = (3.4445, -4.7750, 2.0315)
_LIKE_ADAMW = 0.2  # root mean square of an AdamW step, in units of its learning rate


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
    given = recipe if isinstance(recipe, Recipe) else recipes.find_recipe(recipe)
    chosen = given.changed(steps=steps, seed=seed)
    folder = Path(out)
    model = build_model(chosen)
    optimisers = build_optimisers(chosen.optimiser, model)
    with claim_directory(folder), fixed_threads(chosen.threads):
        if not (folder / CHECKPOINT).exists():
            run_preflight(chosen, model)
        with fast_kernels(model):
            done = load_checkpoint(folder, chosen, model, optimisers)
            model.train()
            with progress if isinstance(progress, Bar) else Bar(chosen.steps, "steps", shown=progress) as bar:
                bar.found(done.step)
                bar.show(chosen.name)
                began, losses = time.monotonic() - done.seconds, list[float]()
                while done.step < chosen.steps:
                    losses.append(train_step(chosen, model, optimisers, done.step))
                    done.step += 1
                    last = done.step == chosen.steps
                    if done.step % PROBE_STEPS == 0 or last:
                        done.curve.append({"step": float(done.step), "loss": sum(losses) / len(losses), **probe(chosen, model)})
                        losses.clear()
                        if bar.shown:
                            note = "  ".join(f"{name} {value:.2f}" for name, value in done.curve[-1].items() if name != "step")
                            say(f"step {done.step}  {time.monotonic() - began:.0f} s  {note}")
                    done.seconds = time.monotonic() - began
                    if done.step % checkpoint_steps == 0 or last:
                        save_checkpoint(folder, chosen, done, model, optimisers)
                    bar.advance()
        model.save_pretrained(folder)
        tokenizer.build().save_pretrained(folder)
        (folder / "recipe.yaml").write_text(chosen.to_yaml(), encoding="utf-8")
        card.plot_training(folder / "curve.png", chosen, done)
        parameters = sum(weight.numel() for weight in model.parameters())
        record = card.make_record(chosen, done, parameters)
        if card_samples:
            record = card.measure_card(folder, record, chosen, card_samples, bar.shown)
        card.write_card(folder, record)
        (folder / CHECKPOINT).unlink(missing_ok=True)
        return record


# --- The model with fresh weights ---


def find_model_class(architecture: str) -> Any:
    """Return the causal language model class of transformers with this name; raise for an unknown name."""
    suffixed = {name for name in dir(transformers) if name.endswith("ForCausalLM")}
    known = sorted(suffixed | {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()})
    if architecture not in known:
        raise ZooError(f"unknown architecture {architecture!r} in transformers: {did_you_mean(architecture, known)}")
    return getattr(transformers, architecture)


def build_configuration(recipe: Recipe) -> Any:
    """Return the configuration of the recipe's model class; raise for unknown keys, which transformers would accept."""
    kind = find_model_class(recipe.architecture).config_class
    ids = {f"{name}_token_id": w.WORD_ID[word] for name, word in (("pad", w.PAD), ("bos", w.BOS), ("eos", w.EOS))}
    filled_in = {"vocab_size": len(w.VOCABULARY), **ids}
    known = {*kind().to_dict(), *getattr(kind, "attribute_map", {}), "rope_parameters", "head_dim"} - set(filled_in)
    for key in recipe.config:
        if key in filled_in:
            raise ZooError(f"recipe {recipe.name}: config.{key} is given by the toy language; leave it out")
        if key not in known:
            raise ZooError(f"recipe {recipe.name}: unknown key config.{key}: {did_you_mean(key, known)}")
    return kind(**filled_in, **recipe.config)


def build_model(recipe: Recipe) -> Any:
    """Return the model in fp32 with weights initialised from the recipe's seed."""
    torch.manual_seed(recipe.seed)
    try:
        built = find_model_class(recipe.architecture)(build_configuration(recipe)).float()
    except ZooError:
        raise
    except Exception as error:  # model classes raise anything for a bad configuration
        raise ZooError(f"recipe {recipe.name}: {recipe.architecture} refuses this config: {error}") from None
    with torch.no_grad():
        for key, kind, parts in (
            ("initial_std", "matrix", recipe.initial_std),
            ("initial_range", "vector", recipe.initial_range),
        ):
            for part, wanted in parts.items():
                chosen = [p for name, p in built.named_parameters() if part in name and (p.ndim == 1) == (kind == "vector")]
                if not chosen:
                    raise ZooError(f"recipe {recipe.name}: {key} names {part!r}, and no {kind} of the model is called so")
                for weight in chosen:
                    if isinstance(wanted, tuple):
                        weight.copy_(torch.linspace(*wanted, len(weight)))
                    else:
                        weight.mul_(wanted / weight.std())
    return built


# --- Optimisers: AdamW, optionally with Muon for linear layers ---


def orthogonalize(matrices: Tensor) -> Tensor:
    """Return matrices [n, rows, columns] with their singular values moved near 1 (Newton-Schulz)."""
    a, b, c = _QUINTIC
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp_min(1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Muon optimiser: orthogonalized Nesterov momentum, scaled so that AdamW's learning rates and weight decays apply.

    Muon (Jordan et al., 2024) orthogonalizes the momentum of a matrix before it is added, so that all directions get a step of
    the same size, including rare ones such as the binding of a name to its value. torch.optim.Muon does the same in bfloat16,
    which is ten times slower than fp32 on a CPU.
    """

    def __init__(self, matrices: Iterable[Tensor], lr: float, weight_decay: float, momentum: float = 0.95) -> None:
        super().__init__(list(matrices), {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            same_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for matrix in group["params"]:
                if matrix.grad is not None:
                    same_shape[matrix.shape].append(matrix)
            for shape, matrices in same_shape.items():
                gradients = [matrix.grad for matrix in matrices if matrix.grad is not None]
                momenta = [self.state[matrix].setdefault("momentum", torch.zeros_like(matrix)) for matrix in matrices]
                torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
                ahead = torch.lerp(torch.stack(gradients), torch.stack(momenta), group["momentum"])
                size = group["lr"] * _LIKE_ADAMW * max(shape) ** 0.5
                for matrix, direction in zip(matrices, orthogonalize(ahead), strict=True):
                    matrix.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-size)


def build_optimisers(settings: Optimiser, model: Any) -> list[torch.optim.Optimizer]:
    """Return the optimisers of a model: AdamW, and with `matrix_lr` Muon for all linear layers except the output head.

    "peak" of their parameter groups is the learning rate before warm-up and decay.
    """
    head, linear = model.get_output_embeddings(), [m for m in model.modules() if isinstance(m, nn.Linear)]
    maps = [m.weight for m in linear if m is not head] if settings.matrix_lr else []
    taken = {id(weight) for weight in maps}
    rest = [parameter for parameter in model.parameters() if id(parameter) not in taken]
    # Weight decay applies to matrices only: norms, biases and decay rates of recurrences should not shrink.
    groups = [
        {"params": [p for p in rest if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
    ]
    made: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, fused=True)]
    made += [Muon(maps, settings.matrix_lr, settings.weight_decay)] if settings.matrix_lr else []
    for group in (group for optimiser in made for group in optimiser.param_groups):
        group["peak"] = group["lr"]
    return made


# --- The loop ---


@contextmanager
def fixed_threads(threads: int) -> Iterator[None]:
    """Fix the thread count of torch and numba in the `with` block: floating-point sums, and thus weights, depend on it."""
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


def train_step(recipe: Recipe, model: Any, optimisers: Sequence[Any], step: int) -> float:
    """Train one step on the documents of (seed, step) and return the weighted mean loss; raise if it is not finite."""
    stage = recipe.stage_at(step)
    length = Stream(TRAIN_SPLIT, recipe.seed, step, "length").pick(stage.lengths)
    rows = max(1, recipe.batch_tokens // length)
    ids_array, weights_array = documents.make_batch(recipe.seed, step, rows, length, recipe.document_mix(stage))
    ids, weights = torch.from_numpy(ids_array), torch.from_numpy(weights_array)[:, 1:]
    dropout = getattr(model.config, "attention_dropout", 0.0) if stage.attention_dropout is None else stage.attention_dropout
    for part in model.modules():
        if hasattr(part, "attention_dropout"):
            part.attention_dropout = dropout
    torch.manual_seed(recipe.seed * 1_000_003 + step)  # makes dropout a function of (seed, step), too
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    loss = (losses * weights.flatten()).sum() / weights.sum()
    if not math.isfinite(float(loss.item())):
        raise ZooError(
            f"the loss is not finite at step {step}: the training has diverged. Lower optimiser.lr or matrix_lr "
            "(another recipe, so give another --out)"
        )
    for optimiser in optimisers:
        if step == recipe.cycle_at(step)[0]:
            optimiser.state.clear()
        optimiser.zero_grad()
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.optimiser.clip)
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(recipe, step, group["peak"])
        optimiser.step()
    return float(loss.item())


def probe(recipe: Recipe, model: Any) -> dict[str, float]:
    """Return a few figures of the card, on few samples, for the training curve."""
    names = (f"niah_{recipe.longest}_8_distractors", "cloze_statement", "letter_choice", "entailment")
    relations = recipe.stages[-1].relations
    figures = card.measure_figures(model, recipe.longest, PROBE_SAMPLES, names, seed=1, relations=relations)
    return {name: figure.value for name, figure in figures.items()}


# --- Checkpoints: written atomically, and resumed by the same recipe only ---


def save_checkpoint(out: Path, recipe: Recipe, progress: TrainingProgress, model: Any, optimisers: Sequence[Any]) -> None:
    state = {
        "recipe_hash": recipe.hash(),
        "recipe_name": recipe.name,
        "progress": asdict(progress),
        "model": model.state_dict(),
        "optimiser": [optimiser.state_dict() for optimiser in optimisers],
    }
    with atomic_path(out / CHECKPOINT) as half:
        torch.save(state, half)


def load_checkpoint(out: Path, recipe: Recipe, model: Any, optimisers: Sequence[Any]) -> TrainingProgress:
    """Load the checkpoint in `out` into model and optimisers and return its progress, or zero progress if there is none."""
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
    for optimiser, saved in zip(optimisers, state["optimiser"], strict=True):
        optimiser.load_state_dict(saved)
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
            for unfinished in out.glob(f".{CHECKPOINT}.*.half"):  # of a killed process
                unfinished.unlink()
            others = sorted(entry.name for entry in out.iterdir() if entry.name != LOCK)
            if others and CHECKPOINT not in others:
                raise ZooError(f"{out} holds other files ({', '.join(others[:3])}); choose an empty directory")
            yield
        finally:
            (out / LOCK).unlink(missing_ok=True)


# --- Before the first step ---


def run_preflight(recipe: Recipe, model: Any) -> None:
    """Check that the untrained model is causal and can be evaluated, saved, loaded and ablated, before training starts."""
    ids, was_training = torch.arange(10, 34).repeat(2, 1), model.training
    ids[1, -1] += 1
    try:
        with fast_kernels(model):
            with torch.inference_mode():
                model.eval()
                a, b = (model(input_ids=row[None], use_cache=False).logits[0, :-1] for row in ids)
            model.train(was_training)
            if (a - b).abs().max() > MAX_LEAK * a.abs().max():  # a later token changes earlier logits
                raise ZooError(
                    f"recipe {recipe.name}: {recipe.architecture} with this config sees words that come later, so its figures "
                    "would mean nothing; make it causal (many classes need `is_decoder: true` in config)"
                )
            card.measure_figures(model, recipe.longest, 1)
        with TemporaryDirectory(prefix="needlework-") as place:
            model.save_pretrained(place)
            tokenizer.build().save_pretrained(place)
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
