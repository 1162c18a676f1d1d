"""A pruned model as a directory: written whole or not at all, read back and held against the model in memory."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from needlework.errors import NeedleworkError, shown
from needlework.interventions.base import NONE
from needlework.model.session import no_bar_for
from needlework.pruning.cutting import Others, Pruned, held_against

if TYPE_CHECKING:
    from needlework.subject import Subject

RECORD = "pruning.json"


@contextmanager
def new_directory(out: Path) -> Iterator[Path]:
    """A place to write into; it becomes `out` when all is there. Nothing is ever overwritten."""
    if out.exists() or out.is_symlink():
        raise NeedleworkError(f"{shown(str(out))} is there already, and nothing is overwritten: give another --out, or remove it")
    half = out.with_name(f".{out.name}.{os.getpid()}.half")
    half.mkdir(parents=True)
    try:
        yield half
        half.rename(out)
    finally:
        shutil.rmtree(half, ignore_errors=True)


def save(pruned: Pruned, folder: Path, dtype: torch.dtype) -> None:
    """Weights in the type of the checkpoint that they come from, configuration and tokenizer."""
    model = pruned.subject.model
    tensors = {name: x.to(dtype) if x.is_floating_point() else x for name, x in model.state_dict().items()}
    with no_bar_for(sum(x.numel() * dtype.itemsize for x in tensors.values())):
        model.save_pretrained(folder, state_dict=tensors)
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config["dtype"] = str(dtype).removeprefix("torch.")
    if pruned.subject.anatomy.window_rule == "deepmind":  # one key more while it is loaded so; a file has transformers' number
        config["attention_window_size"] -= 1
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    if pruned.subject.tokenizer is not None:
        pruned.subject.tokenizer.save_pretrained(folder)


def read_back(pruned: Pruned, folder: Path, others: Others) -> Subject:
    """The model that the directory holds, if it answers as the one in memory does."""
    from needlework.subject import load

    memory = pruned.subject
    how: dict[str, Any] = {"window": memory.anatomy.window_rule, "kernels": memory.body.kernels}
    read = load(folder, device=str(memory.body.device), dtype=memory.model.dtype, **how)
    difference = held_against(read, memory, NONE, others)
    if not difference <= 1e-5:
        raise NeedleworkError(f"what was written to {folder} differs from the model in memory by {difference:.1e} of a logit")
    return read


def bytes_of(folder: Path) -> int:
    """Of the weights."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def write_record(folder: Path, record: dict[str, Any], card: str) -> None:
    (folder / RECORD).write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(card, encoding="utf-8")
