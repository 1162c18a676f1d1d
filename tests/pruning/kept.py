"""Which heads the tests keep of the tiny models, and what no head can be taken out of."""

from __future__ import annotations

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


def pruned(subject, which: str, others: str = "none") -> tuple[Pruned, tuple[Head, ...]]:  # type: ignore[no-untyped-def]
    heads = some_heads(subject.anatomy, which)
    return prune_subject(subject, heads, parse_others(others)), heads
