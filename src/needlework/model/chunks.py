"""Long prompts are read in chunks: where they are cut, and stock attention of a chunk over all keys before it.

All chunks of a prompt are one prefill. What a forward allocates grows with its chunk alone, and neither a mask of all queries and
keys nor keys repeated for every query head are ever made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import create_position_bias_mask, sdpa_attention_forward

CHUNK_TOKENS = 4096  # as many as forwards of short prompts have at most on a CPU; a prompt of so many is one chunk
LEAST_CHUNK = 512  # where memory is scarce: with fewer, the fixed cost of forwards shows
WHOLE_MASK = CHUNK_TOKENS**2  # pairs of query and key; a larger mask is made for some queries at a time
_MOST_QUERIES = 128  # of a block, on a CPU
_BLOCK_PAIRS = {"cpu": 1 << 21}  # pairs in the mask of a block, which becomes fp32 on its way
_OTHER_PAIRS = 1 << 26


def cuts(tokens: int, most: int) -> set[int]:
    """Where so many tokens are cut into chunks of at most `most`: as equal as can be, so that none is a token alone.

    (A mixer may take a token alone for a step of decoding.)
    """
    count = -(-tokens // most)
    return {tokens * i // count for i in range(1, count)}


def too_large(queries: int, keys: int) -> bool:
    """Whether a mask is rather made in blocks: of a chunk that goes on, with many keys before it."""
    return 1 < queries < keys and queries * keys > WHOLE_MASK


def _blocks(queries: int, keys: int, device: torch.device) -> Iterator[slice]:
    """Queries of a chunk, so many at a time that their mask is small."""
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
    """Stock SDPA [rows, queries, heads, dim]; `visible` gives the mask of some queries, over the range of keys that any sees."""
    rows, heads, queries, _ = query.shape
    out = query.new_empty(rows, queries, heads, value.shape[3])
    bias = kwargs.get("position_bias")
    stored = heads if key.shape[3] != value.shape[3] else 1  # there the kernel writes down the scores of every head
    for part in _blocks(queries, key.shape[2] * stored, query.device):
        mask, first, last = visible(part)
        near = (query[:, :, part], key[:, :, first:last], value[:, :, first:last])
        own = {**kwargs, "position_bias": None if bias is None else bias[:, :, part, first:last]}
        out[:, part] = _on_cpu(*near, mask, own) if query.device.type == "cpu" else _stock(module, *near, mask, own)
    return out


def _on_cpu(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """What `sdpa_attention_forward` computes, bit for bit; a CPU's kernel reads keys of several query heads where they lie."""
    if kwargs["position_bias"] is not None:
        mask = create_position_bias_mask(kwargs["position_bias"], mask, False, query, key)
    out = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=kwargs.get("scaling"), enable_gqa=True)
    return out.transpose(1, 2)


def _stock(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, kwargs: dict[str, Any]) -> Tensor:
    out: Tensor = sdpa_attention_forward(module, query, key, value, mask, **kwargs)[0]
    return out
