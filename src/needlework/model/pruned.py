"""Pruned models: heads that are removed from the weights, and heads that stream, which keep the first and the newest tokens only.

A pruned model computes what the full one computes with the removed heads zeroed: their rows are removed from the query (and gate)
projections, their columns from the output projection, and a kv head is removed with the last query head of its group. If groups
keep unequal numbers of heads, smaller groups are filled with zero heads, which change no output and keep the cache minimal.
A layer without heads keeps its output bias and counts tokens; it stores no keys.

A cache layer with streaming heads splits new keys by head: full heads use the plain cache, streaming heads a buffer of fixed
size, [sinks | window - 1 newest], with the position of each key. Positions are those of the text, as in `limit_context`.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from needlework.anatomy import AttentionPart
from needlework.errors import NeedleworkError, short_repr
from needlework.model.memory import BUFFER, OwnKeys, SharedPrefix, convert_layer

ENTRY = "needlework"  # key of config.json with the pruned and streaming heads of a model

# --- Streaming heads -------------------------------------------------------------------------------------------------

HIDDEN = -1  # position of an empty buffer entry


@dataclass(frozen=True)
class Streams:
    """The streaming kv heads of a model, and the tokens that they keep."""

    window: int  # newest keys that a query sees, its own included
    sinks: int  # first tokens that it always sees
    kv_heads: Mapping[int, tuple[int, ...]]  # by layer

    def to_dict(self) -> dict[str, Any]:
        layers = {str(layer): list(heads) for layer, heads in self.kv_heads.items()}
        return {"window": self.window, "sinks": self.sinks, "kv_heads": layers}

    def install(self, cache: Any) -> Any:
        """Replace layers of a new cache by ones with buffers for streaming heads; return the cache."""
        if hasattr(cache, "linear_cache"):  # MiniMax adds layers to its cache as it runs, and counts them
            raise NeedleworkError(f"heads cannot stream in this model: its {type(cache).__mro__[1].__name__} is one of its own")
        for index, heads in self.kv_heads.items():
            while len(cache.layers) <= index and cache.layer_class_to_replicate is not None:
                cache.layers.append(cache.layer_class_to_replicate())
            layer = convert_layer(cache.layers[index], StreamingKV)
            layer.window, layer.sinks, layer.stream_heads, layer.seen = self.window, self.sinks, heads, 0
            cache.layers[index] = layer
        return cache


class StreamingKV:
    """A mixin of transformers cache layers: the layer stores keys of full heads, the buffer those of streaming heads."""

    outermost = True  # splits heads before any other mixin sees the keys

    def update(self: Any, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store new keys and values; return them with all stored ones attached as `split_heads` (cache layer interface)."""
        streaming = torch.tensor(self.stream_heads, device=key_states.device)
        rest = [head for head in range(key_states.shape[1]) if head not in self.stream_heads]
        full = None
        if rest:
            index = torch.tensor(rest, device=key_states.device)
            full = super().update(key_states.index_select(1, index), value_states.index_select(1, index), *args, **kwargs)  # type: ignore[misc]
        elif hasattr(self, "cumulative_length"):
            self.cumulative_length += key_states.shape[2]
        self.seen += key_states.shape[2]
        key, value, positions = self._remember(key_states.index_select(1, streaming), value_states.index_select(1, streaming))
        carrier: Any = key_states.view_as(key_states)
        carrier.split_heads = Split(tuple(rest), self.stream_heads, full, key, value, positions, self.window, self.sinks)
        return carrier, value_states

    def _remember(self: Any, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Add new tokens of streaming heads to the buffer.

        Returns:
            Keys, values [rows, heads, buffer + tokens, dim] and positions [rows, buffer + tokens] before old ones are dropped.
        """
        rows, heads, tokens, _ = key.shape
        behind = self.window - 1
        if not isinstance(vars(self).get("recent_keys"), Tensor):
            size = self.sinks + behind
            self.recent_keys, self.recent_values = (x.new_zeros(rows, heads, size, x.shape[3]) for x in (key, value))
            self.recent_positions = torch.full((rows, size), HIDDEN, device=key.device)
            self.next_position = torch.zeros(rows, 1, dtype=torch.int64, device=key.device)
        start = self.next_position
        positions = torch.cat([self.recent_positions, start + torch.arange(tokens, device=key.device)], 1)
        keys, values = torch.cat([self.recent_keys, key], 2), torch.cat([self.recent_values, value], 2)
        sinks = self._sinks(key, value, start) if self.sinks else (keys[:, :, :0], values[:, :, :0], positions[:, :0])
        last = keys.shape[2] - behind
        newest = positions[:, last:].masked_fill(positions[:, last:] < self.sinks, HIDDEN)  # sinks are not kept twice
        self.recent_keys = torch.cat([sinks[0], keys[:, :, last:]], 2)
        self.recent_values = torch.cat([sinks[1], values[:, :, last:]], 2)
        self.recent_positions = torch.cat([sinks[2], newest], 1)
        self.next_position = start + tokens
        return keys, values, positions

    def _sinks(self: Any, key: Tensor, value: Tensor, start: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return keys, values and positions of the sinks, from the buffer or from the new tokens."""
        kept = slice(0, self.sinks)
        old = (self.recent_keys[:, :, kept], self.recent_values[:, :, kept], self.recent_positions[:, kept])
        if not bool((start < self.sinks).any()):
            return old
        numbers = torch.arange(self.sinks, device=key.device)
        place = numbers - start  # [rows, sinks] among the new tokens
        new = (place >= 0) & (place < key.shape[2])
        chosen = place.clamp(0, key.shape[2] - 1)[:, None, :, None]
        keys, values = (
            torch.where(new[:, None, :, None], x.gather(2, chosen.expand(-1, x.shape[1], -1, x.shape[3])), before)
            for x, before in ((key, old[0]), (value, old[1]))
        )
        return keys, values, torch.where(new, numbers, old[2])

    def get_seq_length(self: Any) -> int:
        has_full = isinstance(vars(self).get("keys"), Tensor)
        return int(super().get_seq_length() if has_full else self.seen)  # type: ignore[misc]

    def reset(self: Any) -> None:
        self.seen = 0
        for name in BUFFER:
            vars(self).pop(name, None)
        super().reset()  # type: ignore[misc]


@dataclass
class Split:
    """Keys and values of one layer in one forward, split by head. Passed to attention as an attribute of the key tensor."""

    full_heads: tuple[int, ...]  # kv heads
    stream_heads: tuple[int, ...]
    full: tuple[Tensor, Tensor] | None  # keys and values of full heads, as the cache returned them
    key: Tensor  # [rows, streaming kv heads, buffer + new tokens, dim]
    value: Tensor
    positions: Tensor  # [rows, buffer + new tokens]
    window: int
    sinks: int

    def query_heads(self, heads: int) -> tuple[Tensor, Tensor]:
        """Return the indices of full and of streaming query heads."""
        group = heads // (len(self.full_heads) + len(self.stream_heads))
        return tuple(  # type: ignore[return-value]
            torch.tensor([kv * group + i for kv in kvs for i in range(group)], dtype=torch.int64, device=self.key.device)
            for kvs in (self.full_heads, self.stream_heads)
        )

    def near(self, q: Tensor, k: Tensor) -> Tensor:
        """Return whether a streaming head's query at position q sees the key at position k."""
        return (k > q - self.window) | (k < self.sinks)

    def block(self, queries: slice, new: int) -> Tensor:
        """Return the indices of all keys that some of these queries may see: sinks, in buffer or new tokens, and the window."""
        size = self.positions.shape[1] - new  # of the buffer
        first, last = max(0, size + queries.start - self.window + 1), size + queries.stop
        sinks = [*range(self.sinks), *range(size, size + min(self.sinks, new))]
        return torch.tensor(sorted({*sinks, *range(first, last)} & set(range(last))), device=self.key.device)

    def visible(self, q_positions: Tensor, index: Tensor, window: int | None) -> Tensor:
        """Return visible pairs [rows, 1, queries, keys]; `window`: the layer's own sliding window."""
        q, k = q_positions[:, None, :, None], self.positions[:, index][:, None, None, :]
        seen = (k >= 0) & (k <= q) & self.near(q, k)
        return seen if window is None else seen & (k > q - window)


class SplitKeys:
    """Keys of full and streaming heads in common columns, one per position; streaming heads use the columns that they hold."""

    sliceable = False

    def __init__(self, split: Split, full: OwnKeys | SharedPrefix | None, heads: int, q_positions: Tensor) -> None:
        self.split, self.full, self.stream = split, full, OwnKeys(split.key, split.value)
        self.full_heads, self.stream_heads = split.query_heads(heads)
        self.count, self.value_dim = full.count if full else self.stream.count, split.value.shape[3]
        self._positions = full.positions(q_positions) if full else split.positions
        rows, held = split.positions.shape
        # [rows, streaming keys] column of each key; `count` for empty buffer entries
        self.columns = torch.arange(held, device=split.key.device).expand(rows, -1)
        if full is not None:
            places = torch.full((rows, int(self._positions.max()) + 3), self.count, device=split.key.device)
            places.scatter_(1, self._positions + 1, torch.arange(self.count, device=places.device).expand(rows, -1))
            places[:, 0] = self.count
            self.columns = places.gather(1, split.positions + 1)

    def positions(self, q_positions: Tensor) -> Tensor:
        return self._positions

    def limited(self, visible: Tensor, q_positions: Tensor, k_positions: Tensor, heads: int) -> Tensor:
        """Restrict the visible pairs of full heads to what each head sees: [rows, heads, queries, keys]."""
        near = self.split.near(q_positions[:, None, :, None], k_positions[:, None, None, :])
        streams = torch.zeros(heads, dtype=torch.bool, device=visible.device)
        streams[self.stream_heads] = True
        return visible & (near | ~streams[None, :, None, None])

    def scores(self, query: Tensor, first: int, last: int) -> Tensor:
        rows, heads, queries, _ = query.shape
        out = query.new_zeros(rows, heads, queries, self.count)
        if self.full is not None:
            out[:, self.full_heads] = self.full.scores(query[:, self.full_heads], 0, self.count)
        own = self.stream.scores(query[:, self.stream_heads], 0, self.stream.count)
        spread = own.new_zeros(*own.shape[:3], self.count + 1)
        out[:, self.stream_heads] = spread.scatter_(3, self._index(own), own)[..., :-1]
        return out

    def mix(self, weights: Tensor, first: int, last: int) -> Tensor:
        out = weights.new_empty(*weights.shape[:3], self.value_dim)
        if self.full is not None:
            out[:, self.full_heads] = self.full.mix(weights[:, self.full_heads], 0, self.count)
        streaming = torch.nn.functional.pad(weights[:, self.stream_heads], (0, 1))
        held = streaming.gather(3, self._index(streaming[..., :1].expand(-1, -1, -1, self.stream.count)))
        out[:, self.stream_heads] = self.stream.mix(held, 0, self.stream.count)
        return out

    def _index(self, like: Tensor) -> Tensor:
        return self.columns[:, None, None].expand(like.shape)


def streams_of(config: Any) -> Streams | None:
    """Read and check the streaming heads in a configuration, which is untrusted; None if it has none."""
    entry = getattr(config, ENTRY)
    said = entry.get("streaming") if isinstance(entry, Mapping) else None
    if said is None:
        return None
    try:
        window, sinks = operator.index(said["window"]), operator.index(said["sinks"])
        layers = {int(layer): tuple(map(operator.index, heads)) for layer, heads in said["kv_heads"].items()}
        if window < 1 or sinks < 0 or any(min(heads) < 0 or len(set(heads)) < len(heads) for heads in layers.values()):
            raise ValueError
    except (TypeError, ValueError, KeyError, AttributeError):
        raise NeedleworkError(f"config.json: streaming heads {short_repr(said)} are none; prune the model again") from None
    return Streams(window, sinks, layers)


def whole_groups(kept: Sequence[int], query_heads: int, kv_heads: int) -> tuple[int, ...]:
    """Return the kv heads of whose query heads none is in `kept`."""
    group = query_heads // kv_heads
    return tuple(kv for kv in range(kv_heads) if not any(head // group == kv for head in kept))


# --- Removed heads ---------------------------------------------------------------------------------------------------

ZERO = -1  # in place of a head index: a head of zeros that fills its group
_QUERY_ROWS = ("q_proj", "q_b_proj", "kv_b_proj", "gate_proj", "g_proj", "r_proj")  # one block of rows per query head
_KV_ROWS = ("k_proj", "v_proj", "k_sconv.conv1d", "v_sconv.conv1d")  # one block of rows per kv head
_OUTPUT = ("o_proj", "out_proj")  # one block of columns per query head
_NORMS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm")  # over one head, or over all heads together
_NO_HEADS = ("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm", "rel_logits_proj", "indexer", "rotary_emb")
_COUNTS = {"num_heads": 0, "num_attention_heads": 0, "num_key_value_heads": 1}  # attribute -> index in (query, kv)


@dataclass(frozen=True)
class Cut:
    """The heads that one attention module keeps."""

    path: str
    query: tuple[int, ...]  # old index of each kept query head, or ZERO
    kv: tuple[int, ...]  # old index of each kept kv head
    of: tuple[int, int]  # number of query and kv heads before
    dims: tuple[int, int]  # of a key and of a value

    @property
    def counts(self) -> tuple[int, int]:
        return len(self.query), len(self.kv)

    @classmethod
    def keeping(cls, kept: Collection[int], part: AttentionPart) -> Cut:
        """Return the cut that keeps these query heads of a layer, with groups filled up to equal size."""
        group = part.query_heads // part.kv_heads
        groups = {kv: sorted(head for head in kept if head // group == kv) for kv in sorted({head // group for head in kept})}
        widest = max(map(len, groups.values()), default=0)
        query = [head for heads in groups.values() for head in (*heads, *[ZERO] * (widest - len(heads)))]
        of, dims = (part.query_heads, part.kv_heads), (part.key_dim, part.value_dim)
        return cls(part.path, tuple(query), tuple(groups), of, dims)


def cut_model(model: nn.Module, cuts: Iterable[Cut]) -> None:
    """Remove heads from a model, in place."""
    for cut in cuts:
        parent_path, _, name = cut.path.rpartition(".")
        parent = model.get_submodule(parent_path)
        module = getattr(parent, name)
        own = set(module.parameters())
        others = (x for x in model.modules() if x is not module and type(x) is type(module))
        if any(not own.isdisjoint(other.parameters()) for other in others):
            raise NeedleworkError(
                f"{cut.path}: several layers of {type(model).__name__} share the weights of one attention module, so that no"
                " layer can lose heads of its own; only_heads(...) silences them without a cut"
            )
        pieces = _pieces(module, cut)
        if not cut.query:
            setattr(parent, name, NoHeads(module, next(piece for piece in _OUTPUT if hasattr(module, piece))))
            continue
        for kind, piece in pieces:
            if kind == "output":
                _select(piece, 1, cut.query, cut.of[0])
            else:
                _select(piece, 0, *((cut.query, cut.of[0]) if kind == "query" else (cut.kv, cut.of[1])))
        for attribute, side in _COUNTS.items():
            if hasattr(module, attribute):
                setattr(module, attribute, cut.counts[side])
        module.num_key_value_groups = len(cut.query) // len(cut.kv)


def _pieces(module: nn.Module, cut: Cut) -> list[tuple[str, nn.Module]]:
    """Return the (kind, module) of all maps with a block per head; kind is "query", "kv" or "output".

    Raises:
        NeedleworkError: If the module has a parameter whose relation to heads is unknown, or weights that are not plain floats.
    """
    if cut.query == tuple(range(cut.of[0])):
        return []
    found: dict[str, tuple[str, nn.Module]] = {}
    for name, parameter in module.named_parameters():
        path = name.rpartition(".")[0]
        piece = module.get_submodule(path)
        if path in (*_QUERY_ROWS, *_KV_ROWS):
            kind = "query" if path in _QUERY_ROWS else "kv"
            heads, length = cut.of[kind == "kv"], parameter.shape[0]
        elif path in _OUTPUT:
            kind, heads, length = "output", cut.of[0], next(piece.parameters()).shape[-1]
        elif (path in _NORMS and parameter.numel() in cut.dims) or path.split(".")[0] in _NO_HEADS or not cut.query:
            continue
        else:
            why = "is over all heads together" if path in _NORMS else "is none that needlework knows the heads of"
            raise NeedleworkError(f"{cut.path}: heads cannot be taken out of {type(module).__name__}: {name} {why}")
        if not isinstance(piece, (nn.Linear, nn.Conv1d)) or not parameter.is_floating_point() or length % heads:
            raise NeedleworkError(
                f"{cut.path}.{name} is {parameter.dtype} {list(parameter.shape)}: no plain weights of {heads} heads."
                " Prune the model before it is quantised"
            )
        found[path] = (kind, piece)
    if not any(kind == "output" for kind, _ in found.values()):
        raise NeedleworkError(
            f"{cut.path}: {type(module).__name__} has no output map that needlework knows ({', '.join(_OUTPUT)})"
        )
    return list(found.values())


@torch.no_grad()
def _select(piece: Any, dim: int, heads: Sequence[int], of: int) -> None:
    """Keep the blocks of these heads, of `of`, in one dimension of a map, in place; a bias is cut with the rows (dim 0)."""
    for name in ("weight", "bias") if dim == 0 else ("weight",):
        old = getattr(piece, name)
        if old is not None:
            blocks = torch.unflatten(old.detach(), dim, (of, old.shape[dim] // of)).movedim(dim, 0)
            with_zeros = torch.cat([blocks, torch.zeros_like(blocks[:1])])
            index = torch.tensor([of if head == ZERO else head for head in heads], device=old.device)
            kept = with_zeros.index_select(0, index).movedim(0, dim).flatten(dim, dim + 1).contiguous()
            setattr(piece, name, nn.Parameter(kept, requires_grad=old.requires_grad))
    if isinstance(piece, nn.Conv1d):
        piece.in_channels = piece.out_channels = piece.groups = piece.weight.shape[0]
    elif isinstance(piece, nn.Linear):
        piece.out_features, piece.in_features = piece.weight.shape


_QUERY_KEY = ("q_proj", "k_proj", "k_sconv.conv1d")  # maps that queries and keys come from
_OTHER_MAPS = ("v_proj", "v_sconv.conv1d", "gate_proj", "g_proj", "r_proj", "rotary_emb", *_OUTPUT)


@torch.no_grad()
def copy_query_key_maps(target: nn.Module, source: nn.Module, part: AttentionPart, kv_heads: Collection[int]) -> None:
    """Copy the maps to keys of these kv heads, and to queries of their groups, into another attention module of equal shape.

    Norms of queries and keys, which all heads share, are copied whole. A gate that a query map computes, too, is not copied.

    Raises:
        NeedleworkError: Queries or keys do not come from maps of their own, as in fused and latent attention.
    """
    paths = {name.rpartition(".")[0] for name, _ in source.named_parameters()}
    unknown = sorted(paths - {*_QUERY_KEY, *_NORMS, *_OTHER_MAPS})
    if unknown or not {"q_proj", "k_proj"} <= paths:
        why = f"has {unknown[0] or 'parameters of its own'}" if unknown else "has no q_proj and k_proj"
        raise NeedleworkError(f"queries and keys of {type(source).__name__} cannot be exchanged alone: it {why}")
    for name, theirs in source.named_parameters():
        path, own = name.rpartition(".")[0], target.get_parameter(name)
        if path in _NORMS:
            own.copy_(theirs)
        elif path in _QUERY_KEY:
            heads = part.query_heads if path == "q_proj" else part.kv_heads
            rows = [head for head in range(heads) if head * part.kv_heads // heads in kv_heads]
            old, new = (torch.unflatten(x.detach(), 0, (heads, -1)) for x in (own, theirs))
            old[rows, : part.key_dim] = new[rows, : part.key_dim].to(old)


class NoHeads(nn.Module):
    """A replacement of an attention module without heads: returns its output bias, if it has one, and stores no keys."""

    def __init__(self, module: Any, output: str) -> None:
        super().__init__()
        projection = getattr(module, output)
        self.layer_idx = module.layer_idx
        self.width = projection.out_features
        self.bias = projection.bias
        self._values = 3 if "prev_topk_indices" in inspect.signature(module.forward).parameters else 2

    def forward(self, hidden_states: Tensor, *_: Any, past_key_values: Any = None, cycle_offset: int = 0, **__: Any) -> Any:
        if past_key_values is not None:
            layers, index = past_key_values.layers, self.layer_idx + cycle_offset
            while len(layers) <= index:
                layers.append(past_key_values.layer_class_to_replicate())
            if not isinstance(layers[index], KeylessLayer):
                layers[index] = convert_layer(layers[index], KeylessLayer)
            layers[index].tokens += hidden_states.shape[1]
            if hasattr(layers[index], "cumulative_length"):
                layers[index].cumulative_length += hidden_states.shape[1]
        out = hidden_states.new_zeros(*hidden_states.shape[:-1], self.width)
        return (out if self.bias is None else out + self.bias, *[None] * (self._values - 1))


class KeylessLayer:
    """A mixin of transformers cache layers that counts tokens, for masks and positions, and stores no keys."""

    tokens = 0

    def get_seq_length(self) -> int:
        return self.tokens

    def reset(self) -> None:
        self.tokens = 0
        super().reset()  # type: ignore[misc]


# --- cuts in config.json ------------------------------------------------------------------------------------------------


def entry_of(cuts: Iterable[Cut]) -> list[dict[str, Any]]:
    """Return the entry of config.json: the number of heads of each attention module, now and before."""
    return [{"path": x.path, "heads": list(x.counts), "of": list(x.of), "dims": list(x.dims)} for x in cuts]


def cuts_of(config: Any) -> tuple[Cut, ...]:
    """Read and check the cuts in a configuration, which is untrusted. Only numbers of heads are known, not their indices."""
    entry = getattr(config, ENTRY)
    rows = entry.get("layers", []) if isinstance(entry, Mapping) else []
    if not isinstance(rows, list):
        raise NeedleworkError(f"config.json: {ENTRY} has no list of layers; copy or prune the model again")
    cuts = []
    for row in rows:
        try:
            pairs = [tuple(operator.index(n) for n in row[key]) for key in ("heads", "of", "dims")]
            (query, kv), (old_query, old_kv), (key_dim, value_dim) = pairs
            whole = isinstance(row["path"], str) and query % max(kv, 1) == old_query % old_kv == 0 and bool(query) == bool(kv)
            if not whole or not (0 <= kv <= old_kv and 0 <= query <= old_query and min(key_dim, value_dim) > 0):
                raise ValueError
        except (TypeError, ValueError, KeyError, ZeroDivisionError):
            raise NeedleworkError(
                f"config.json: {ENTRY} says {short_repr(row)} of a layer; copy or prune the model again"
            ) from None
        cuts.append(Cut(row["path"], tuple(range(query)), tuple(range(kv)), (old_query, old_kv), (key_dim, value_dim)))
    return tuple(cuts)


def cut_class(model_class: Any, cuts: Sequence[Cut]) -> Any:
    """Return a subclass of a model class whose constructor removes heads, so that pruned weights can be loaded."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        model_class.__init__(self, *args, **kwargs)
        try:
            cut_model(self, cuts)
        except AttributeError as error:
            raise NeedleworkError(f"config.json: {ENTRY} names a layer that is not there ({error})") from None

    return type(model_class.__name__, (model_class,), {"__init__": __init__, "__module__": model_class.__module__})
