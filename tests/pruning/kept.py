"""Which heads the tests keep of the tiny models, and what no head can be taken out of."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from cases import output_projection, subject
from needlework.anatomy import Anatomy, Head
from needlework.pruning.prune import Pruned, parse_others, prune_subject
from tiny import ARCHITECTURES, NO_HEADS

REFUSED = {  # why heads cannot be taken out
    "zamba": "share the weights of one attention module",
    "zamba2": "share the weights of one attention module",
    "olmo_hybrid": "q_norm.weight is over all heads together",
    "zaya": "qkv_proj.q_proj.weight is none that needlework knows",
}
PRUNED = tuple(name for name in ARCHITECTURES if name not in NO_HEADS and name not in REFUSED)
NO_STREAMS = {  # why heads cannot stream
    "minimax": "MiniMaxCache is one of its own",
    "hrm_text": "does something with heads",  # it calls each attention module several times, with a cache for each call
    **dict.fromkeys(("kimi_linear", "bailing_hybrid", "inkling", "glm5_next", "qwen4_exp"), "as they lie in the cache"),
}
STREAMING = tuple(name for name in ARCHITECTURES if name not in NO_HEADS and name not in NO_STREAMS)


def some_heads(anatomy: Anatomy, which: str) -> tuple[Head, ...]:
    """Of each layer: unequal groups and counts, none of the first layer, or the same numbers everywhere."""
    layers = [layer.index for layer in anatomy.attention_layers]
    kept = {
        "uneven": {layer: (0, 1, 3) if i % 2 == 0 else (2,) for i, layer in enumerate(layers)},
        "first layer empty": dict.fromkeys(layers[1:], (1,)),
        "equal": dict.fromkeys(layers, (1, 3)),
    }[which]
    return tuple(Head(layer, index) for layer, indices in kept.items() for index in indices)


def pruned(whole, which: str, others: str = "none") -> tuple[Pruned, tuple[Head, ...]]:  # type: ignore[no-untyped-def]
    heads = some_heads(whole.anatomy, which)
    return prune_subject(whole, heads, parse_others(others)), heads


@torch.no_grad()
def stock_without(name: str, heads: tuple[Head, ...]) -> torch.nn.Module:
    """The stock model with the columns of all other heads zeroed in its output maps: nothing of it is ours."""
    whole = subject(name)
    model = copy.deepcopy(whole.model)
    for layer, part in whole.anatomy.attention_parts():
        width = part.query_heads * part.value_dim
        weight = output_projection(model.get_submodule(part.path), width).weight
        for index in range(part.query_heads):
            if (layer, index) not in heads:
                weight[:, index * part.value_dim : (index + 1) * part.value_dim] = 0
    return model


def stock_logits(model: torch.nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits
