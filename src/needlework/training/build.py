"""A recipe's model with fresh weights: any causal language model class of transformers."""

from __future__ import annotations

from typing import Any

from needlework.errors import ZooError, did_you_mean
from needlework.toy import words as w
from needlework.training.recipes import Recipe

_FILLED_IN = ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")


def model_class(architecture: str) -> Any:
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    suffixed = {name for name in dir(transformers) if name.endswith("ForCausalLM")}
    known = sorted(suffixed | {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()})
    if architecture not in known:
        raise ZooError(f"unknown architecture {architecture!r} in transformers: {did_you_mean(architecture, known)}")
    return getattr(transformers, architecture)


def configuration(recipe: Recipe) -> Any:
    """The class's configuration; a misspelt key is an error here, where transformers would keep it silently."""
    kind = model_class(recipe.architecture).config_class
    known = {*kind().to_dict(), *getattr(kind, "attribute_map", {}), "rope_parameters", "head_dim"} - set(_FILLED_IN)
    for key in recipe.config:
        if key in _FILLED_IN:
            raise ZooError(f"recipe {recipe.name}: config.{key} is given by the toy language; leave it out")
        if key not in known:
            raise ZooError(f"recipe {recipe.name}: unknown key config.{key}: {did_you_mean(key, known)}")
    ids = {f"{name}_token_id": w.WORD_ID[word] for name, word in (("pad", w.PAD), ("bos", w.BOS), ("eos", w.EOS))}
    return kind(vocab_size=len(w.VOCABULARY), **ids, **recipe.config)


def model(recipe: Recipe) -> Any:
    """Fresh weights from the recipe's seed, in fp32."""
    import torch

    torch.manual_seed(recipe.seed)
    try:
        built = model_class(recipe.architecture)(configuration(recipe)).float()
    except ZooError:
        raise
    except Exception as error:  # classes check their configuration in many ways, and all of it comes from the recipe
        raise ZooError(f"recipe {recipe.name}: {recipe.architecture} refuses this config: {error}") from None
    with torch.no_grad():
        for part, std in recipe.initial_std.items():
            for weight in _named(built, recipe, "initial_std", part, vectors=False):
                weight.mul_(std / weight.std())
        for part, (first, last) in recipe.initial_range.items():
            for weight in _named(built, recipe, "initial_range", part, vectors=True):
                weight.copy_(torch.linspace(first, last, len(weight)))
    return built


def _named(built: Any, recipe: Recipe, key: str, part: str, *, vectors: bool) -> list[Any]:
    chosen = [p for name, p in built.named_parameters() if part in name and (p.ndim == 1) == vectors]
    if not chosen:
        kind = "vector" if vectors else "matrix"
        raise ZooError(f"recipe {recipe.name}: {key} names {part!r}, and no {kind} of the model is called so")
    return chosen


def parameter_count(built: Any) -> int:
    return sum(parameter.numel() for parameter in built.parameters())
