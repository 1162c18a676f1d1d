"""Removal of attention heads from a model's weights: which rows and columns belong to a head, and what replaces them.

A pruned model computes what the full one computes with the removed heads zeroed: their rows are removed from the query (and gate)
projections, their columns from the output projection, and a kv head is removed with the last query head of its group. If groups
keep unequal numbers of heads, smaller groups are filled with zero heads, which change no output and keep the cache minimal.
A layer without heads keeps its output bias and counts tokens; it stores no keys.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from needlework.anatomy import AttentionPart
from needlework.errors import NeedleworkError, short_repr
from needlework.model.keys import convert_layer
from needlework.model.streaming import ENTRY

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
                layers[index] = convert_layer(layers[index], _keyless_class)
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


@functools.cache
def _keyless_class(layer_class: type) -> Any:
    return type(f"Keyless{layer_class.__name__}", (KeylessLayer, layer_class), {})


# --- cuts in config.json ------------------------------------------------------------------------------------------------


def entry_of(cuts: Iterable[Cut]) -> list[dict[str, Any]]:
    """Return the entry of config.json: the number of heads of each attention module, now and before."""
    return [{"path": x.path, "heads": list(x.counts), "of": list(x.of), "dims": list(x.dims)} for x in cuts]


def cuts_of(config: Any) -> tuple[Cut, ...]:
    """Read and check the cuts in a configuration, which is untrusted. Only numbers of heads are known, not their indices."""
    entry = getattr(config, ENTRY, None)
    rows = entry.get("layers", []) if isinstance(entry, Mapping) else []
    if entry is not None and not isinstance(rows, list):
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
