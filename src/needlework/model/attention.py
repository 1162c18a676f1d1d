"""The attention function and mask function that all models use while needlework runs them.

Both are registered with transformers under one name. Without a current `Forward`, they call stock SDPA. With one, attention
that needs edits is computed for one block of queries at a time from explicit positions, so that neither [heads, L, L] scores
nor an L x L mask are allocated, and each batch row can have its own edits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import create_position_bias_mask, sdpa_attention_forward
from transformers.masking_utils import and_masks, causal_mask_function, padding_mask_function, sdpa_mask

from needlework.errors import TrialError
from needlework.interventions.acts import Phase, Site
from needlework.model.edits import LayerEdits
from needlework.model.memory import OwnKeys, SharedPrefix
from needlework.model.outputs import Edits, Where
from needlework.model.pruned import Split, SplitKeys
from needlework.receipts import Tally
from needlework.requests import Request

NAME = "needlework"
WHOLE_MASK = 4096**2  # query-key pairs; larger masks are built for one block of queries at a time
SDPA_BLOCK = 128  # queries, on a CPU
CPU_MASK_PAIRS, GPU_MASK_PAIRS = 1 << 21, 1 << 26  # query-key pairs in the mask of a block, which SDPA converts to fp32
FEWEST_QUERIES = 16  # minimum of a block with up to MANY_KEYS keys; fewer with more keys, so that block memory stays bounded
MANY_KEYS = 8192
_ENTROPY = "entropy"
Keys = OwnKeys | SharedPrefix | SplitKeys  # of one layer, by how the cache stores them
_FEWEST_READERS = 16  # minimum queries per key for the kernel: it needs transposed keys, a copy that few queries do not repay
CPU_BLOCK_BYTES, GPU_BLOCK_BYTES = 4 << 20, 128 << 20  # fp32 scores of one block of queries; small blocks fit the CPU cache


class Observer(Protocol):
    """The interface of objects that receive attention probabilities, one block of queries at a time, and outputs of sites."""

    each_sample: bool  # needs every prompt in full, so shared prefixes are computed for each prompt
    prefill: bool  # receives what prefills compute; if not, they run as if there were no observer
    attention: bool  # receives probabilities, so attention is not computed by stock SDPA
    sites: Collection[Site]  # the sites whose outputs it receives

    def begin(self, requests: Sequence[Request], device: torch.device) -> None: ...
    def see(self, forward: Forward, layer: int, block: QueryBlock, probabilities: Tensor) -> None: ...
    def see_outputs(self, forward: Forward, site: Site, layer: int, outputs: Tensor) -> None: ...
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
    masks: dict[int, tuple[MaskFunction, Tensor]] = field(default_factory=dict)  # by storage address of the placeholder mask
    outputs: dict[Where, Edits] = field(default_factory=dict)  # recordings and patches of modules' outputs
    moved: dict[torch.device, Forward] = field(default_factory=dict)  # copies for layers on other devices

    @cached_property
    def own_maths(self) -> bool:
        """Whether some layer's probabilities or masks are needed, so that stock SDPA cannot be used."""
        return self.shared or self.attention_observer is not None or any(x.needs_probabilities for x in self.edits.values())

    @property
    def attention_observer(self) -> Observer | None:
        """The observer, if it receives attention probabilities."""
        return self.observer if self.observer is not None and self.observer.attention else None

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


# Returns the visible pairs [rows or 1, 1, queries, keys] of a slice of queries, given the number of rows and keys and the device;
# None if all are visible.
MaskFunction = Callable[[int, slice, int, torch.device], Tensor | None]


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
    """Return stock SDPA's mask, or a placeholder that refers to a `MaskFunction` where attention is computed in blocks.

    The placeholder is an expanded tensor of one element, so it takes no memory; its function is found by its storage.
    """
    forward = _CURRENT.get()
    too_large = 1 < q_length < kv_length and q_length * kv_length > WHOLE_MASK  # a later chunk with many earlier keys
    if forward is None or forward.dense_masks or kwargs.get("use_vmap") or not (forward.own_maths or too_large):
        if forward is not None and (forward.own_maths or (too_large and not forward.dense_masks)):
            kwargs["allow_is_causal_skip"] = False  # a real mask is needed
        mask: Tensor | None = sdpa_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, **kwargs
        )
        return mask
    function = mask_function
    if attention_mask is not None:
        missing = kv_length + kv_offset - attention_mask.shape[-1]
        padding = nn.functional.pad(attention_mask, (0, missing)) if missing > 0 else attention_mask
        function = and_masks(mask_function, padding_mask_function(padding))
    window = kwargs.get("local_size")
    all_visible = q_length == 1 and attention_mask is None and (window is None or kv_length <= window)

    def visible(rows: int, queries: slice, keys: int, device: torch.device) -> Tensor | None:
        if all_visible:
            return None
        q = torch.arange(queries.start, queries.stop, device=device) + q_offset
        k = torch.arange(keys, device=device) + kv_offset
        b = torch.arange(rows, device=device)
        seen: Tensor = function(b[:, None, None, None], b[:1, None, None, None], q[None, None, :, None], k[None, None, None])
        return seen.expand(-1, 1, q.numel(), keys)

    stand_in = torch.zeros(1, dtype=torch.bool, device=kwargs.get("device", "cpu"))
    forward.masks[stand_in.untyped_storage().data_ptr()] = visible, stand_in
    placeholder = stand_in.expand(batch_size, 1, q_length, kv_length)
    # The placeholder is identified by its storage, so a model with layers on several devices must not copy it.
    setattr(placeholder, "to", lambda *args, **kwargs: placeholder)  # noqa: B010
    return placeholder


@dataclass
class QueryBlock:
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
            last = slice(query.shape[2] - 1, query.shape[2])  # outputs of the other queries, which are not used later, are zero
            seen = _visible_of(forward, attention_mask, last, OwnKeys(key, value), len(query))
            one = sdpa_attention_forward(module, query[:, :, last], key, value, seen, **kwargs)[0]
            out = one.new_zeros(one.shape[0], query.shape[2], *one.shape[2:])
            out[:, last] = one
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
    rows, heads, queries, _ = query.shape
    on_cpu, step, keys = query.device.type == "cpu", SDPA_BLOCK, OwnKeys(key, value)
    if mask is not None and mask.untyped_storage().data_ptr() in forward.masks:
        # With unequal dims, SDPA materialises the scores of every head.
        pairs = keys.count * (heads if key.shape[3] != value.shape[3] else 1)
        step = max(1, min(CPU_MASK_PAIRS // pairs, SDPA_BLOCK) if on_cpu else GPU_MASK_PAIRS // pairs)
    elif not forward.fast or mask is None or mask.dtype != torch.bool or queries < 2 * SDPA_BLOCK or not on_cpu:
        whole: Tensor = sdpa_attention_forward(module, query, key, value, mask, **kwargs)[0]
        return whole
    out, bias = query.new_empty(rows, queries, heads, value.shape[3]), kwargs.get("position_bias")
    for start in range(0, queries, step):
        part = slice(start, min(start + step, queries))
        visible = _visible_of(forward, mask, part, keys, rows)
        first, last = _key_range(visible, keys)
        near = (query[:, :, part], key[:, :, first:last], value[:, :, first:last])
        seen = None if visible is None else visible[..., first:last]
        own_bias = None if bias is None else bias[:, :, part, first:last]
        if not on_cpu:
            out[:, part] = sdpa_attention_forward(module, *near, seen, **{**kwargs, "position_bias": own_bias})[0]
            continue
        # Equal to `sdpa_attention_forward` bit for bit, without repeating keys for grouped query heads.
        if own_bias is not None:
            seen = create_position_bias_mask(own_bias, seen, False, near[0], near[1])
        mixed = scaled_dot_product_attention(*near, attn_mask=seen, scale=kwargs.get("scaling"), enable_gqa=True)
        out[:, part] = mixed.transpose(1, 2)
    return out


def _visible_of(forward: Forward, mask: Tensor | None, queries: slice, keys: Keys, rows: int) -> Tensor | None:
    """Return the part of a mask, which may be a placeholder, for these queries and all keys; None if all are visible."""
    if mask is None:
        return None
    known = forward.masks.get(mask.untyped_storage().data_ptr())
    return mask[:, :, queries] if known is None else known[0](rows, queries, keys.count, forward.positions.device)


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
    # A block has as many queries as fit into the budget, but not so few that overhead dominates.
    seen_keys = keys.count
    if keys.sliceable and not fused:
        seen_keys = min(seen_keys, (forward.windows.get(layer) or seen_keys) + FEWEST_QUERIES)
    budget = CPU_BLOCK_BYTES if query.device.type == "cpu" else GPU_BLOCK_BYTES
    fewest = max(1, min(FEWEST_QUERIES, FEWEST_QUERIES * MANY_KEYS // seen_keys))
    step = min(queries, max(fewest, budget // ((1 if fused else 4 * heads) * rows * seen_keys)))
    if edits is not None and edits.needs_all_queries:
        step = queries
    start, off = 0, 0 if edits is None else edits.always_off(heads)
    if layer == forward.last_only and queries > 1 and off is not None:  # only the last output is used, all counts are known
        start = queries - 1
        out.zero_()
        if edits is not None:
            forward.tally.add(layer, forward.phase, "heads_zeroed", forward.slots, off * start)
    for first_query in range(start, queries, step):
        part = slice(first_query, min(first_query + step, queries))
        visible = _visible(forward, layer, mask, part, keys, positions, heads)
        first, last = (0, keys.count) if fused else _key_range(visible, keys)
        seen = None if visible is None else visible[..., first:last]
        block = QueryBlock(part, slice(first, last), seen, forward.positions[:, part], positions[:, first:last], keys)
        out[:, part] = _one_block(forward, layer, block, query[:, :, part], kwargs, fused)
    return out


def _visible(
    forward: Forward, layer: int, mask: Tensor | None, queries: slice, keys: Keys, positions: Tensor, heads: int
) -> Tensor | None:
    """Return the visible pairs [rows or 1, 1 or heads, queries, keys] of a block of queries; None if all are visible.

    Rows that share a prefix may have different lengths, so that the model's own mask does not apply to them: causality and the
    layer's sliding window are computed from the keys' positions [rows, keys], which are negative for padding.
    """
    if isinstance(keys, OwnKeys):
        if mask is None:
            raise TrialError("the model passed no mask to attention: it would not be causal")
        seen = _visible_of(forward, mask, queries, keys, len(positions))
        if seen is None or mask.untyped_storage().data_ptr() in forward.masks:
            return seen
        dense = seen[:, :1, :, : keys.count]  # built by the model itself: boolean or additive
        return dense if dense.dtype == torch.bool else dense > torch.finfo(dense.dtype).min / 2
    window = forward.windows[layer]
    in_window = window is None or keys.count <= window
    if isinstance(keys, SharedPrefix) and forward.positions.shape[1] == 1 and keys.prefix.complete and in_window:
        return None
    q, k = forward.positions[:, None, queries, None], positions[:, None, None, :]
    visible = (k >= 0) & (k <= q)
    if window is not None:
        visible = visible & (k > q - window)
    return keys.limited(visible, forward.positions[:, queries], positions, heads) if isinstance(keys, SplitKeys) else visible


def _one_block(forward: Forward, layer: int, block: QueryBlock, query: Tensor, kwargs: dict[str, Any], fused: bool) -> Tensor:
    """Compute one block's outputs [rows, queries, heads, dim] from its queries [rows, heads, queries, dim]."""
    edits, keys, scaling = forward.edits.get(layer), block.source, kwargs.get("scaling")
    if edits is not None:
        block.visible = edits.mask_keys(forward, layer, block)
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
    if (observer := forward.attention_observer) is not None:
        observer.see(forward, layer, block, p)
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
    if not forward.fast or forward.attention_observer is not None or kwargs.get("position_bias") is not None:
        return False
    from needlework.kernels.block_attention import supports  # numba comes with it, which kernels="stock" does not need

    if not isinstance(keys, (OwnKeys, SharedPrefix)) or not supports(query, keys.value_dim):
        return False
    if isinstance(keys, OwnKeys) and query.shape[1] // keys.key.shape[1] * query.shape[2] < _FEWEST_READERS:
        return False
    edits = forward.edits.get(layer)
    if edits is None:
        return True
    heads_differ = edits.limit is not None and edits.limit[0].dim() == 2
    heads_differ |= any(blocked.heads is not None for blocked in edits.blocked)
    other_scores = edits.keep is not None and edits.keep.names != (_ENTROPY,)
    read = edits.outputs is not None or edits.gates is not None
    return not (heads_differ or other_scores or edits.expose is not None or read)


def fused_block(forward: Forward, layer: int, block: QueryBlock, query: Tensor) -> Tensor:
    """Compute head outputs [rows, queries, heads, dim] of a block with the compiled kernel; `query` is scaled already."""
    from needlework.kernels.block_attention import attend

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

    def whole(key: Tensor, value: Tensor) -> OwnKeys | SharedPrefix:
        prefix = getattr(key, "shared_prefix", None)
        if forward.shared and prefix is None:
            raise TrialError("the model changed its keys after the cache returned them; shared keys cannot serve it")
        return OwnKeys(key, value) if prefix is None else SharedPrefix(prefix, key, value)

    split: Split | None = getattr(key, "split_heads", None)
    if split is None:
        return whole(key, value)
    return SplitKeys(split, whole(*split.full) if split.full else None, heads, forward.positions)


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


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)
