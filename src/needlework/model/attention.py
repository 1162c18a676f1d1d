"""The attention function and mask function that all models use while needlework runs them.

Both are registered with transformers under one name. Without a current `Forward`, they call stock SDPA. With one, attention
that needs edits is computed for one block of queries at a time from explicit positions, so that neither [heads, L, L] scores
nor an L x L mask are allocated, and each batch row can have its own edits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import and_masks, causal_mask_function, padding_mask_function, sdpa_mask

from needlework.errors import TrialError
from needlework.interventions.acts import Phase
from needlework.kernels.block_attention import attend, supports
from needlework.model.chunks import sdpa_in_blocks, too_large
from needlework.model.edits import LayerEdits
from needlework.model.keys import Keys, OwnKeys, SharedPrefix
from needlework.model.streaming import Split, SplitKeys
from needlework.receipts import Tally
from needlework.requests import Request

NAME = "needlework"
SDPA_BLOCK = 128  # queries
FEWEST_QUERIES = 16  # minimum of a block with up to MANY_KEYS keys; fewer with more keys, so that block memory stays bounded
MANY_KEYS = 8192
_ENTROPY = "entropy"
_FEWEST_READERS = 16  # minimum queries per key for the kernel: it needs transposed keys, a copy that few queries do not repay
CPU_BLOCK_BYTES, GPU_BLOCK_BYTES = 4 << 20, 128 << 20  # fp32 scores of one block of queries; small blocks fit the CPU cache


class Observer(Protocol):
    """The interface of objects that receive attention probabilities, one block of queries at a time."""

    each_sample: bool  # needs every prompt in full, so shared prefixes are computed for each prompt

    def begin(self, requests: Sequence[Request], device: torch.device) -> None: ...
    def see(self, forward: Forward, layer: int, block: Block, probabilities: Tensor) -> None: ...
    def chose(self, slots: Tensor, tokens: Tensor) -> None: ...


@dataclass
class Forward:
    """The state of one forward of the model that attention and hooks read: positions, edits, observer, counts."""

    phase: Phase
    positions: Tensor  # [rows, queries] absolute positions of the tokens of this forward
    slots: Tensor  # [rows] trial of each row, for the tally
    tally: Tally
    layer_of: dict[nn.Module, int]
    edits: dict[int, LayerEdits] = field(default_factory=dict)  # by layer
    mixers: dict[int, Any] = field(default_factory=dict)  # layer -> mixers.MixerEdits
    observer: Observer | None = None
    shared: bool = False  # rows share the keys and values of a prefix
    windows: dict[int, int | None] = field(default_factory=dict)  # sliding window by layer; needed where keys are shared
    fast: bool = False  # needlework's kernels and blockwise SDPA may be used
    dense_masks: bool = False  # the model itself computes with its masks and needs real ones
    last_only: int | None = None  # the layer of which only the last query's output is used
    recorded_scores: dict[int, list[Any]] | None = None  # by layer; if given, head scores are appended to it, block by block
    masks: dict[int, tuple[MaskSpec, Tensor]] = field(default_factory=dict)  # by storage address of the placeholder mask
    moved: dict[torch.device, Forward] = field(default_factory=dict)  # copies for layers on other devices

    own_maths: bool = field(init=False)  # some layer's probabilities or masks are needed, so stock SDPA cannot be used

    def __post_init__(self) -> None:
        # Computed once, because every layer reads it in every forward.
        touched = any(edits.needs_probabilities for edits in self.edits.values())
        self.own_maths = self.shared or self.observer is not None or touched

    def on(self, device: torch.device) -> Forward:
        """Return this forward with its tensors on a layer's device, for models that are spread over several devices."""
        if self.positions.device == device:
            return self
        if device not in self.moved:
            self.moved[device] = replace(self, positions=self.positions.to(device), slots=self.slots.to(device))
        return self.moved[device]


_CURRENT: ContextVar[Forward | None] = ContextVar("needlework_forward", default=None)


@contextmanager
def current(forward: Forward | None) -> Iterator[None]:
    """Set the forward that the attention function and the hooks of `model/mixers.py` read, while the context is open."""
    token = _CURRENT.set(forward)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def get_current() -> Forward | None:
    return _CURRENT.get()


@dataclass
class MaskSpec:
    """A mask as a function of positions, evaluated for one block of queries at a time."""

    function: Callable[..., Tensor]
    q_offset: int
    kv_offset: int
    all_visible: bool

    def block(self, rows: int, queries: slice, keys: int, device: torch.device) -> Tensor | None:
        """Return the visible pairs [rows or 1, 1, queries, keys]; None if all are visible."""
        if self.all_visible:
            return None
        q = torch.arange(queries.start, queries.stop, device=device) + self.q_offset
        k = torch.arange(keys, device=device) + self.kv_offset
        b = torch.arange(rows, device=device)
        seen = self.function(b[:, None, None, None], b[:1, None, None, None], q[None, None, :, None], k[None, None, None])
        return seen.expand(-1, 1, q.numel(), keys)


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """Return stock SDPA's mask, or a placeholder that refers to a `MaskSpec` where attention is computed in blocks.

    The placeholder is an expanded tensor of one element, so it takes no memory; `_visible` finds its spec by its storage.
    """
    forward = _CURRENT.get()
    args = (batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask)
    if forward is None or not (forward.own_maths or (too_large(q_length, kv_length) and not forward.dense_masks)):
        stock: Tensor | None = sdpa_mask(*args, **kwargs)
        return stock
    if forward.dense_masks or kwargs.get("use_vmap"):
        dense: Tensor | None = sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False})
        return dense
    function = mask_function
    if attention_mask is not None:
        missing = kv_length + kv_offset - attention_mask.shape[-1]
        padding = nn.functional.pad(attention_mask, (0, missing)) if missing > 0 else attention_mask
        function = and_masks(mask_function, padding_mask_function(padding))
    window = kwargs.get("local_size")
    whole = q_length == 1 and attention_mask is None and (window is None or kv_length <= window)
    stand_in = torch.zeros(1, dtype=torch.bool, device=kwargs.get("device", "cpu"))
    forward.masks[stand_in.untyped_storage().data_ptr()] = MaskSpec(function, q_offset, kv_offset, whole), stand_in
    mask = stand_in.expand(batch_size, 1, q_length, kv_length)
    # The placeholder is identified by its storage, so a model with layers on several devices must not copy it.
    setattr(mask, "to", lambda *args, **kwargs: mask)  # noqa: B010
    return mask


@dataclass
class Block:
    """A block of queries and the range of keys that any of them may attend to."""

    queries: slice
    keys: slice
    visible: Tensor | None  # [rows or 1, 1, queries, keys]
    q_positions: Tensor  # [rows, queries]
    k_positions: Tensor  # [rows, keys] index of the key's token in its sequence
    source: Keys  # all keys and values of the layer; `keys` is a slice of them

    def mix(self, weights: Tensor) -> Tensor:
        """Return head outputs [rows, queries, heads, dim] for weights [rows, heads, queries, keys]."""
        return self.source.mix(weights, self.keys.start, self.keys.stop).transpose(1, 2)


# [walk 5] docs/architecture.md
def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Compute attention with the current forward's edits; the signature is that of transformers' attention interface."""
    forward = _CURRENT.get()
    if forward is None:
        idle: tuple[Tensor, Tensor | None] = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        return idle
    layer = forward.layer_of.get(module)
    if layer is None:
        raise TrialError(f"attention module {type(module).__name__} was not seen when the model was probed")
    forward, edits = forward.on(query.device), forward.edits.get(layer)
    forward.tally.add(layer, forward.phase, "positions", forward.slots, query.shape[2])
    if not forward.own_maths:
        split = getattr(key, "split_heads", None)
        if split is not None:
            out = _sdpa_split(forward, layer, module, query, split, attention_mask, kwargs)
        elif layer == forward.last_only and (edits is None or edits.silences_only):
            return _last_query(forward, layer, module, query, key, value, attention_mask, kwargs), None
        else:
            out = _sdpa(forward, module, query, key, value, attention_mask, kwargs)
        return (out if edits is None else edits.edit_outputs(forward, layer, out, slice(0, out.shape[1]))), None
    return _blockwise(forward, layer, query, key, value, attention_mask, kwargs), None


def _sdpa(
    forward: Forward, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, kwargs: dict[str, Any]
) -> Tensor:
    """Run stock SDPA; in blocks of queries where the mask is a placeholder, or is long and on a CPU with fast kernels.

    SDPA on a CPU computes the scores of masked keys, too; blocks leave out the keys that none of their queries sees.
    """
    queries = query.shape[2]
    if mask is not None and mask.untyped_storage().data_ptr() in forward.masks:
        return sdpa_in_blocks(module, query, key, value, _block_mask(forward, mask, OwnKeys(key, value), len(query)), kwargs)
    if not forward.fast or mask is None or mask.dtype != torch.bool or queries < 2 * SDPA_BLOCK or query.device.type != "cpu":
        whole: Tensor = sdpa_attention_forward(module, query, key, value, mask, **kwargs)[0]
        return whole
    keys, parts = OwnKeys(key, value), []
    for start in range(0, queries, SDPA_BLOCK):
        part = slice(start, min(start + SDPA_BLOCK, queries))
        first, last = _key_range(mask[:, :, part], keys)
        visible_to_it = (key[:, :, first:last], value[:, :, first:last], mask[:, :, part, first:last])
        parts.append(sdpa_attention_forward(module, query[:, :, part], *visible_to_it, **kwargs)[0])
    return torch.cat(parts, 1)


def _block_mask(forward: Forward, mask: Tensor, keys: Keys, rows: int) -> Callable[[slice], tuple[Tensor, int, int]]:
    """Return a function from a slice of queries to their mask and the range of keys (first, last) that it covers."""

    def of(queries: slice) -> tuple[Tensor, int, int]:
        visible = _visible(forward, mask, rows, queries, keys.count, forward.positions.device)
        assert visible is not None  # None only for single queries, whose mask is never too large
        first, last = _key_range(visible, keys)
        return visible[..., first:last], first, last

    return of


def _last_query(
    forward: Forward,
    layer: int,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    kwargs: dict[str, Any],
) -> Tensor:
    """Run stock SDPA for the last query only; outputs of the other queries, which are not used later, are zero."""
    seen = None if mask is None else mask[:, :, -1:]
    if mask is not None and mask.untyped_storage().data_ptr() in forward.masks:
        queries = query.shape[2]
        seen = _visible(forward, mask, len(query), slice(queries - 1, queries), key.shape[2], query.device)
    last = sdpa_attention_forward(module, query[:, :, -1:], key, value, seen, **kwargs)[0]
    out = last.new_zeros(last.shape[0], query.shape[2], *last.shape[2:])
    out[:, -1:] = last
    edits = forward.edits.get(layer)
    return out if edits is None else edits.edit_outputs(forward, layer, out, slice(0, out.shape[1]))


def _sdpa_split(
    forward: Forward, layer: int, module: nn.Module, query: Tensor, split: Split, mask: Tensor | None, kwargs: dict[str, Any]
) -> Tensor:
    """Run stock SDPA for full heads over all keys, and for streaming heads over the keys that they hold."""
    rows, heads, queries, _ = query.shape
    full, streaming = split.query_heads(heads)
    out = query.new_empty(rows, queries, heads, split.value.shape[3])
    if split.full is not None:
        out[:, :, full] = _sdpa(forward, module, query[:, full], *split.full, mask, kwargs)
    window, query = forward.windows.get(layer), query[:, streaming]
    for start in range(0, queries, SDPA_BLOCK):
        part = slice(start, min(start + SDPA_BLOCK, queries))
        index = split.block(part, queries)
        near = (split.key[:, :, index], split.value[:, :, index], split.visible(forward.positions[:, part], index, window))
        out[:, part, streaming] = sdpa_attention_forward(module, query[:, :, part], *near, **kwargs)[0]
    return out


def _blockwise(
    forward: Forward, layer: int, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, kwargs: dict[str, Any]
) -> Tensor:
    """Compute attention outputs [rows, queries, heads, dim] with edits, one block of queries at a time."""
    unknown = [name for name in ("softcap", "s_aux") if kwargs.get(name) is not None]
    if unknown:
        raise TrialError(f"this model's attention uses {unknown[0]}, which needlework's own maths does not have")
    rows, heads, queries, _ = query.shape
    edits, keys = forward.edits.get(layer), _keys(forward, key, value, heads)
    positions = keys.positions(forward.positions)
    out = query.new_empty(rows, queries, heads, keys.value_dim)
    # The kernel reads a transposed copy of the keys; with many keys, the copy would take too much memory.
    fused = keys.count <= MANY_KEYS and fuses(forward, layer, query, keys, kwargs)
    step = _block_queries(forward, layer, query, keys, 1 if fused else 4 * heads, keys.sliceable and not fused)
    if edits is not None and edits.needs_all_queries:
        step = queries
    for start in range(_first_query(forward, layer, out), queries, step):
        part = slice(start, min(start + step, queries))
        if isinstance(keys, SplitKeys):
            visible = _visible_by_position(forward, layer, positions, part)
            visible = keys.limited(visible, forward.positions[:, part], positions, heads)
        elif isinstance(keys, SharedPrefix) and _sees_all(forward, layer, keys):
            visible = None
        elif isinstance(keys, SharedPrefix):
            visible = _visible_by_position(forward, layer, positions, part)
        else:
            visible = _visible(forward, mask, rows, part, keys.count, query.device)
        first, last = (0, keys.count) if fused else _key_range(visible, keys)
        seen = None if visible is None else visible[..., first:last]
        block = Block(part, slice(first, last), seen, forward.positions[:, part], positions[:, first:last], keys)
        out[:, part] = _one_block(forward, layer, block, query[:, :, part], kwargs, fused)
    return out


def _first_query(forward: Forward, layer: int, out: Tensor) -> int:
    """Return the first query to compute: 0, or the last one if only its output is used and the others' counts are known.

    In the second case, `out` is zeroed and the zeroed heads of the skipped queries are counted.
    """
    queries, heads = out.shape[1:3]
    edits = forward.edits.get(layer)
    off = 0 if edits is None else edits.always_off(heads)
    if layer != forward.last_only or queries == 1 or off is None:
        return 0
    out.zero_()
    if edits is not None:
        forward.tally.add(layer, forward.phase, "heads_zeroed", forward.slots, off * (queries - 1))
    return queries - 1


def _block_queries(forward: Forward, layer: int, query: Tensor, keys: Keys, pair_bytes: int, cut: bool) -> int:
    """Return the number of queries per block: as many as fit into the budget, but not so few that overhead dominates."""
    rows, _, queries, _ = query.shape
    window = forward.windows.get(layer) or keys.count
    seen = min(keys.count, window + FEWEST_QUERIES) if cut else keys.count
    budget = CPU_BLOCK_BYTES if query.device.type == "cpu" else GPU_BLOCK_BYTES
    fewest = max(1, min(FEWEST_QUERIES, FEWEST_QUERIES * MANY_KEYS // seen))
    return min(queries, max(fewest, budget // (pair_bytes * rows * seen)))


def _one_block(forward: Forward, layer: int, block: Block, query: Tensor, kwargs: dict[str, Any], fused: bool) -> Tensor:
    """Compute one block's outputs [rows, queries, heads, dim] from its queries [rows, heads, queries, dim]."""
    edits, keys, scaling = forward.edits.get(layer), block.source, kwargs.get("scaling")
    if edits is not None and edits.limit is not None:
        block.visible = edits.limit_keys(forward, layer, block)
    scaled = query * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if fused:
        return fused_block(forward, layer, block, scaled)
    scores = keys.scores(scaled, block.keys.start, block.keys.stop).float()  # [rows, heads, queries, keys]
    if (bias := kwargs.get("position_bias")) is not None:
        if bias.shape[-1] != keys.count:
            raise TrialError(f"the position bias is for {bias.shape[-1]} keys, attention has {keys.count}")
        scores = scores + bias[:, :, block.queries, block.keys].float()
    if block.visible is not None:
        for columns in _partly_hidden(block.visible):
            scores[..., columns].masked_fill_(~block.visible[..., columns], -1e30)
    log_p = scores.log_softmax(-1)
    p = log_p.exp()  # exactly 0 where masked
    if block.visible is not None and not bool((seeing := block.visible.any(-1, keepdim=True)).all()):
        p = p.masked_fill_(~seeing, 0.0)  # a query without visible keys gets zeros, not uniform attention
    if forward.observer is not None:
        forward.observer.see(forward, layer, block, p)
    head_scores = edits.scores_of_probabilities(block, p, log_p) if edits is not None else {}

    def mix(weights: Tensor) -> Tensor:
        return block.mix(weights.to(query.dtype))

    if edits is not None and edits.expose is not None:
        if edits.keep is not None and edits.keep.scores("outputs"):  # heads are scored before columns are edited
            head_scores |= edits.scores_of_outputs(mix(p))
        p = edits.expose_columns(forward, layer, block, p)
    mixed = mix(p)
    return mixed if edits is None else edits.edit_outputs(forward, layer, mixed, block.queries, head_scores)


def fuses(forward: Forward, layer: int, query: Tensor, keys: Keys, kwargs: dict[str, Any]) -> bool:
    """Return whether the compiled kernel supports all edits of this layer; if not, tensor operations are used."""
    if not forward.fast or forward.observer is not None or kwargs.get("position_bias") is not None:
        return False
    if not isinstance(keys, (OwnKeys, SharedPrefix)) or not supports(query, keys.value_dim):
        return False
    if isinstance(keys, OwnKeys) and query.shape[1] // keys.key.shape[1] * query.shape[2] < _FEWEST_READERS:
        return False
    edits = forward.edits.get(layer)
    if edits is None:
        return True
    if type(edits) is not LayerEdits:  # a subclass that edits outputs in its own way
        return False
    by_head = edits.limit is not None and edits.limit[0].dim() == 2  # one mask per head
    other_scores = edits.keep is not None and edits.keep.names != (_ENTROPY,)
    return not (by_head or other_scores or edits.expose is not None or edits.functions)


def fused_block(forward: Forward, layer: int, block: Block, query: Tensor) -> Tensor:
    """Compute a block with the compiled kernel, with this layer's edits.

    Args:
        query: [rows, heads, queries, dim], already scaled.

    Returns:
        Head outputs [rows, queries, heads, dim].
    """
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
    if keep is not None and forward.recorded_scores is not None:
        forward.recorded_scores.setdefault(layer, []).append({_ENTROPY: certainty})
    if edits is None or (keep is None and edits.silenced is None):
        return out
    forward.tally.add(layer, forward.phase, "heads_zeroed", forward.slots, off.sum((1, 2)))
    return out if edits.means is None else out.where(~off[..., None], edits.means[:, None])


def _keys(forward: Forward, key: Tensor, value: Tensor, heads: int) -> Keys:
    """Wrap keys and values by how the cache stores them: per row, with a shared prefix, or split by streaming heads."""
    split: Split | None = getattr(key, "split_heads", None)
    if split is not None:
        full = None if split.full is None else _keys(forward, *split.full, heads)
        return SplitKeys(split, full, heads, forward.positions)
    prefix = getattr(key, "shared_prefix", None)
    if forward.shared and prefix is None:
        raise TrialError("the model changed its keys after the cache returned them; shared keys cannot serve it")
    return OwnKeys(key, value) if prefix is None else SharedPrefix(prefix, key, value)


def _visible(forward: Forward, mask: Tensor | None, rows: int, queries: slice, keys: int, device: torch.device) -> Tensor | None:
    """Return the visible pairs [rows or 1, 1, queries, keys] of a mask from the model; None if all are visible."""
    if mask is None:
        raise TrialError("the model passed no mask to attention: it would not be causal")
    known = forward.masks.get(mask.untyped_storage().data_ptr())
    if known is not None:
        return known[0].block(rows, queries, keys, device)
    dense = mask[:, :1, queries, :keys]  # built by the model itself: boolean or additive
    return dense if dense.dtype == torch.bool else dense > torch.finfo(dense.dtype).min / 2


def _key_range(visible: Tensor | None, keys: Keys) -> tuple[int, int]:
    """Return the range of keys (first, last) that any query of a block sees, so that masked keys are not computed."""
    if visible is None or not keys.sliceable or visible.shape[2] == 1:
        return 0, keys.count
    columns = visible.any(0).any(1)[0].nonzero()
    return (int(columns[0]), int(columns[-1]) + 1) if columns.numel() else (0, 1)


def _partly_hidden(visible: Tensor) -> list[slice]:
    """Return at most two ranges of keys that cover all keys masked for some query.

    In a causal block these are the last keys, with a sliding window the first ones, too. Other keys need no masking.
    """
    columns = visible.all(0).all(0).all(0).logical_not().nonzero()[:, 0]
    if not columns.numel():
        return []
    gaps = (columns.diff() > 1).nonzero()[:, 0].tolist()
    ends = [0, gaps[0] + 1, columns.numel()] if len(gaps) == 1 else [0, columns.numel()]
    return [slice(int(columns[a]), int(columns[b - 1]) + 1) for a, b in pairwise(ends)]


def _sees_all(forward: Forward, layer: int, keys: SharedPrefix) -> bool:
    """Return whether the single query of each row sees every key, so that no mask is needed."""
    window = forward.windows[layer]
    return forward.positions.shape[1] == 1 and keys.prefix.complete and (window is None or keys.count <= window)


def _visible_by_position(forward: Forward, layer: int, positions: Tensor, queries: slice) -> Tensor:
    """Return the visible pairs [rows, 1, queries, keys] from positions: causality and the layer's sliding window.

    Used where the model's own mask does not apply, because rows that share a prefix may have different lengths.

    Args:
        positions: [rows, keys] positions of the keys; negative for padding.
    """
    window = forward.windows[layer]
    q = forward.positions[:, None, queries, None]
    k = positions[:, None, None, :]
    visible = (k >= 0) & (k <= q)
    return visible if window is None else visible & (k > q - window)


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)
