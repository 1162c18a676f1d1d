"""The models that come with the package: where they are and what was measured when they were trained."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from needlework.errors import ZooError, did_you_mean, shown
from needlework.model.presets import PRESETS
from needlework.zoo import smollm2

RECORD = "figures.json"  # what a finished training leaves beside its weights


@dataclass(frozen=True)
class Entry:
    """A shipped model: its directory and the record written by its training (figures, recipe hash, seed, steps)."""

    name: str
    path: Path
    record: dict[str, Any]

    @property
    def figures(self) -> dict[str, dict[str, float]]:
        figures: dict[str, dict[str, float]] = self.record["figures"]
        return figures


def weights_directory() -> Path:
    """Where shipped weights live. The package is always installed as plain files, never run from an archive."""
    return Path(str(resources.files("needlework.zoo"))) / "weights"


def catalog() -> dict[str, Entry]:
    """All shipped models by name."""
    entries = {}
    for path in sorted(weights_directory().glob(f"*/{RECORD}")):
        folder = path.parent
        entries[folder.name] = Entry(folder.name, folder, json.loads(path.read_text(encoding="utf-8")))
    return entries


def names() -> list[str]:
    """All names that `path` knows: the shipped models, and the real one that comes as an extra."""
    return [*catalog(), smollm2.NAME]


def path(name: str) -> Path:
    """The directory of a model by its name, fit for `from_pretrained`."""
    if name == smollm2.NAME:
        return smollm2.path()
    folder = weights_directory() / name
    if name and os.path.isfile(folder / RECORD) and folder.parent == weights_directory():
        return folder
    raise ZooError(f"no zoo model is called {shown(name)}: {did_you_mean(name, names())}")


def resolve(source: str | Path) -> str | Path:
    """The directory of a zoo model by its name; anything else as it is. What is nearly a name is an error."""
    text = str(source)
    if not text:
        raise ZooError("the model's name is empty; give a directory, a .gguf file, a hub id or a name from `needlework zoo`")
    if os.path.exists(source) or text in PRESETS or "/" in text:
        return source
    if text in names():
        return path(text)
    hint = did_you_mean(text, [*PRESETS, *names()], cutoff=0.7)
    if hint.startswith("did"):
        raise ZooError(f"there is no model {shown(text)}; {hint}")
    return source
