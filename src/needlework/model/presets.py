"""Presets: public configurations of real checkpoints, which can be inspected and planned for without their weights.

`presets.json` holds the values that determine sizes and layers, the parameter count that the publisher states, and the public
source of each value. Names are the hub's, in lower case. Does not import torch.
"""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any

from needlework.errors import NeedleworkError


@cache
def presets() -> dict[str, dict[str, Any]]:
    """Return all presets by name; alternative names map to the same entry."""
    text = (resources.files("needlework.model") / "presets.json").read_text(encoding="utf-8")
    named: dict[str, dict[str, Any]] = json.loads(text)
    return named | {other: preset for preset in named.values() for other in preset.get("also", ())}


def preset_config(name: str) -> Any:
    """Build the transformers configuration of a preset."""
    import transformers

    preset = presets()[name]
    options = dict(preset["config"])
    for key in ("layer_types", "layers_block_type"):
        if key in options:
            options[key] = _expand_layers(options[key], options["num_hidden_layers"])
    try:
        return transformers.AutoConfig.for_model(preset["model_type"], **options)
    except ValueError:
        raise NeedleworkError(
            f"{name}: transformers {transformers.__version__} does not know the model type {preset['model_type']!r};"
            " upgrade transformers to inspect it"
        ) from None


def _expand_layers(kinds: dict[str, Any], count: int) -> list[str]:
    """Expand {"most": kind, other: [indices]} to one kind per layer."""
    named = {index: kind for kind, indices in kinds.items() if kind != "most" for index in indices}
    return [named.get(index, kinds["most"]) for index in range(count)]
