"""Blocks of attention that one compiled kernel computes from products to outputs, in place of a pass for each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from needlework.kernels.block_attention import attend, covers
from needlework.model.edits import LayerEdits
from needlework.model.keys import Keys, OwnKeys, SharedPrefix

if TYPE_CHECKING:
    from needlework.model.attention import Block, Forward

_ENTROPY = "entropy"
_FEWEST_READERS = 16  # queries of a key that is turned around for the kernel alone; with fewer, turning costs more than it saves


def fuses(forward: Forward, layer: int, query: Tensor, keys: Keys, kwargs: dict[str, Any]) -> bool:
    """Whether the kernel has everything that is asked of this layer; if not, `model/attention.py` computes it step by step."""
    if not forward.fast or forward.observer is not None or kwargs.get("position_bias") is not None:
        return False
    if not isinstance(keys, (OwnKeys, SharedPrefix)) or not covers(query, keys.value_dim):
        return False
    if isinstance(keys, OwnKeys) and query.shape[1] // keys.key.shape[1] * query.shape[2] < _FEWEST_READERS:
        return False
    edits = forward.edits.get(layer)
    if edits is None:
        return True
    if type(edits) is not LayerEdits:  # one that changes outputs in its own way
        return False
    by_head = edits.limit is not None and edits.limit[0].dim() == 2  # a mask for each head
    other_scores = edits.keep is not None and edits.keep.names != (_ENTROPY,)
    return not (by_head or other_scores or edits.expose is not None or edits.functions)


def fused_block(forward: Forward, layer: int, block: Block, query: Tensor) -> Tensor:
    """What heads say to scaled queries [rows, heads, queries, dim] under this layer's edits, [rows, queries, heads, dim]."""
    edits, keys = forward.edits.get(layer), block.source
    assert isinstance(keys, (OwnKeys, SharedPrefix))
    keep = edits.keep if edits is not None else None
    left_out = None if keep is None or keep.sinks is None else block.k_positions < keep.sinks[:, None]
    out, off, certainty = attend(
        query,
        keys.lines,
        None if block.visible is None else block.visible[:, 0],
        None if keep is None else keep.k,
        left_out,
        None if edits is None else edits.silenced,
    )
    if keep is not None and forward.heard is not None:
        forward.heard.setdefault(layer, []).append({_ENTROPY: certainty})
    if edits is None or (keep is None and edits.silenced is None):
        return out
    forward.tally.add(layer, forward.phase, "heads_zeroed", forward.slots, off.sum((1, 2)))
    return out if edits.means is None else out.where(~off[..., None], edits.means[:, None])
