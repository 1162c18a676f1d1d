"""Chunked prefill of long prompts: chunk boundaries, and stock SDPA of a chunk over all earlier keys.

All chunks of a prompt together are one prefill. The memory of a forward grows with its chunk only: neither a mask of all queries
and keys nor keys repeated for every query head are allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import create_position_bias_mask, sdpa_attention_forward

CHUNK_TOKENS = 4096  # maximum of a chunk; also the most tokens in a batch of short prompts on a CPU
LEAST_CHUNK = 512  # minimum of a chunk when memory is scarce; below it, overhead per forward is noticeable
WHOLE_MASK = CHUNK_TOKENS**2  # query-key pairs; larger masks are built for one block of queries at a time
_MOST_QUERIES = 128  # per block, on a CPU
_BLOCK_PAIRS = {"cpu": 1 << 21}  # query-key pairs in the mask of a block, which SDPA converts to fp32
_OTHER_PAIRS = 1 << 26  # the same on other devices


def cuts(tokens: int, most: int) -> set[int]:
    """Return the boundaries of chunks of at most `most` tokens.

    Chunks are as equal as possible, so that none has a single token, which a mixer could take for a decode step.
    """
    count = -(-tokens // most)
    return {tokens * i // count for i in range(1, count)}


def too_large(queries: int, keys: int) -> bool:
    """Return whether a mask is built in blocks: that of a later chunk with many earlier keys."""
    return 1 < queries < keys and queries * keys > WHOLE_MASK


def _blocks(queries: int, keys: int, device: torch.device) -> Iterator[slice]:
    """Yield slices of queries whose masks stay below the size limit."""
    step = _BLOCK_PAIRS.get(device.type, _OTHER_PAIRS) // keys
    step = max(1, min(step, _MOST_QUERIES) if device.type == "cpu" else step)
    return (slice(start, min(start + step, queries)) for start in range(0, queries, step))


def sdpa_in_blocks(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Callable[[slice], tuple[Tensor, int, int]],
    kwargs: dict[str, Any],
) -> Tensor:
    """Run stock SDPA in blocks of queries. Returns [rows, queries, heads, dim].

    Args:
        visible: returns the mask of a slice of queries and the range of keys (first, last) that it covers.
    """
    rows, heads, queries, _ = query.shape
    out = query.new_empty(rows, queries, heads, value.shape[3])
    bias = kwargs.get("position_bias")
    stored = heads if key.shape[3] != value.shape[3] else 1  # with unequal dims, SDPA materialises the scores of every head
    for part in _blocks(queries, key.shape[2] * stored, query.device):
        mask, first, last = visible(part)
        near = (query[:, :, part], key[:, :, first:last], value[:, :, first:last])
        own = {**kwargs, "position_bias": None if bias is None else bias[:, :, part, first:last]}
        out[:, part] = _on_cpu(*near, mask, own) if query.device.type == "cpu" else _stock(module, *near, mask, own)
    return out


def _on_cpu(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """Compute `sdpa_attention_forward` bit for bit, without repeating keys for grouped query heads."""
    if kwargs["position_bias"] is not None:
        mask = create_position_bias_mask(kwargs["position_bias"], mask, False, query, key)
    out = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=kwargs.get("scaling"), enable_gqa=True)
    return out.transpose(1, 2)


def _stock(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, kwargs: dict[str, Any]) -> Tensor:
    out: Tensor = sdpa_attention_forward(module, query, key, value, mask, **kwargs)[0]
    return out
