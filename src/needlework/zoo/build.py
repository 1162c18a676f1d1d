"""A recipe's model with fresh weights: any causal language model class of transformers."""

from __future__ import annotations

from typing import Any

from needlework.zoo import words as w
from needlework.zoo.errors import ZooError, did_you_mean
from needlework.zoo.recipes import Recipe

_FILLED_IN = ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")


def model_class(architecture: str) -> Any:
    import transformers

    known = [name for name in dir(transformers) if name.endswith("ForCausalLM")]
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
    try:
        return kind(vocab_size=len(w.VOCABULARY), **ids, **recipe.config)
    except (TypeError, ValueError) as error:
        raise ZooError(f"recipe {recipe.name}: {kind.__name__} refuses this config: {error}") from None


def model(recipe: Recipe) -> Any:
    """Fresh weights from the recipe's seed, in fp32."""
    import torch

    torch.manual_seed(recipe.seed)
    made = model_class(recipe.architecture)(configuration(recipe)).float()
    if recipe.embedding_std is not None:
        weight = made.get_input_embeddings().weight
        if weight is getattr(made.get_output_embeddings(), "weight", None):
            raise ZooError(f"recipe {recipe.name}: embedding_std needs tie_word_embeddings: false, or logits start too large")
        with torch.no_grad():
            weight.mul_(recipe.embedding_std / weight.std())
    return made


def parameter_count(built: Any) -> int:
    return sum(parameter.numel() for parameter in built.parameters())
