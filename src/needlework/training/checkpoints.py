"""Checkpoints of a training: written whole or not at all, and never taken over by another recipe."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from needlework.errors import ZooError
from needlework.training.recipes import Recipe
from needlework.zoo.shelf import RECORD

CHECKPOINT = "checkpoint.pt"
LOCK = ".lock"


@dataclass
class Progress:
    """How far a training has come: steps done, seconds spent, and the curve so far."""

    step: int = 0
    seconds: float = 0.0
    curve: list[dict[str, float]] = field(default_factory=list)


def save(out: Path, recipe: Recipe, progress: Progress, model: Any, optimiser: Any) -> None:
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


def load(out: Path, recipe: Recipe, model: Any, optimiser: Any) -> Progress:
    """Take up the training left in `out`, or start a new one if there is none."""
    import torch

    path = out / CHECKPOINT
    if not path.exists():
        return Progress()
    try:
        state = torch.load(path, weights_only=True)
    except Exception as error:  # torch raises many kinds for a damaged file
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
    return Progress(**state["progress"])


@contextmanager
def claimed(out: Path) -> Iterator[None]:
    """Own the output directory while training: made if missing, left as it was if it holds other things or is in use."""
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
