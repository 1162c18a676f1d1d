"""Anatomy: a model's layers, heads, windows and sizes as plain values. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    import pandas

LayerKind = Literal["attention", "recurrent", "hybrid", "other"]
# What a group of a recurrent mixer is: a head, a block of RG-LRU's block-diagonal gates, or adjacent channels.
GroupKind = Literal["heads", "blocks", "channels", ""]


class Head(NamedTuple):
    """A query head.

    Attributes:
        layer: The model's own layer index.
        index: Index of the head in its layer, from 0.
    """

    layer: int
    index: int  # type: ignore[assignment]  # shadows tuple.index, which is not used


class Group(NamedTuple):
    """A group of a recurrent mixer's channels; a head, if the mixer has heads.

    Attributes:
        layer: The model's own layer index.
        index: Index of the group in its layer, from 0.
    """

    layer: int
    index: int  # type: ignore[assignment]


def heads_of_share(share: float, heads: int) -> int:
    """Return the number of heads for a share of them, rounded half up; at least 1 unless the share is 0."""
    return max(1, int(share * heads + 0.5)) if share else 0


@dataclass(frozen=True)
class AttentionPart:
    """The attention side of one layer.

    Attributes:
        path: Name of the module in the model.
        query_heads: Number of query heads.
        kv_heads: Number of heads of keys and values.
        key_dim: Width of a query or key.
        value_dim: Width of a value and of a head's output.
        window: Keys visible to a query, its own included; None: all earlier ones.
        output_gate: Whether the model multiplies head outputs by a gate before its output projection.
        output_bias: Whether the output projection has a bias, which remains when heads are ablated.
        parameters: Number of parameters.
        kv_bytes_per_token: Size of what the cache keeps for each token: keys and values, or what they are computed from.
        state_bytes: Size of states inside attention for one sequence of any length, such as a short convolution of keys.
    """

    path: str
    query_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None
    output_gate: bool
    output_bias: bool
    parameters: int
    kv_bytes_per_token: int
    state_bytes: int = 0


@dataclass(frozen=True)
class RecurrentPart:
    """The recurrent side of one layer.

    Attributes:
        path: Name of the module in the model.
        mixer: Its class name.
        parameters: Number of parameters.
        state_bytes: Size of its memory for one sequence of any length.
        groups: Number of groups, equal slices of the input of its output projection; 0 if unknown.
        group_kind: What a group is: heads, blocks of gates, or adjacent channels.
        group_width: Channels per group.
        no_groups_reason: Why the groups are unknown.
        taps: Width of its short convolution in tokens, the current one included; 0: it has none.
        carries_state: Whether it has a recurrent state besides the convolution's window.
        recurrence: What the recurrence of its state is, if it is known to be linear in its values; empty otherwise.
    """

    path: str
    mixer: str
    parameters: int
    state_bytes: int
    groups: int = 0
    group_kind: GroupKind = ""
    group_width: int = 0
    no_groups_reason: str = ""
    taps: int = 0
    carries_state: bool = False
    recurrence: str = ""

    @property
    def grouped(self) -> str:
        """A description of the groups (`16 heads of 16 channels`); empty if they are unknown."""
        kind = "groups" if self.group_kind == "channels" else self.group_kind
        no_heads = "no heads, " if self.group_kind == "channels" else ""
        return f"{no_heads}{self.groups} {kind} of {self.group_width} channels" if kind else ""

    @property
    def made_of(self) -> str:
        """A description of the groups, the convolution and the state."""
        convolution = [f"convolution over {self.taps} tokens"] * bool(self.taps)
        groups = self.grouped or f"groups not known: {self.no_groups_reason}"
        return "; ".join([groups, *convolution, *["state"] * self.carries_state])


@dataclass(frozen=True)
class Layer:
    """One layer of a model.

    Attributes:
        index: The model's own layer index.
        attention: The attention side, if it has one.
        recurrent: The recurrent mixer, if it has one.
    """

    index: int
    attention: AttentionPart | None
    recurrent: RecurrentPart | None

    @property
    def kind(self) -> LayerKind:
        if self.attention and self.recurrent:
            return "hybrid"
        return "attention" if self.attention else "recurrent" if self.recurrent else "other"

    @property
    def heads(self) -> tuple[Head, ...]:
        return tuple(Head(self.index, i) for i in range(self.attention.query_heads)) if self.attention else ()

    @property
    def groups(self) -> tuple[Group, ...]:
        return tuple(Group(self.index, i) for i in range(self.recurrent.groups)) if self.recurrent else ()


@dataclass(frozen=True)
class Anatomy:
    """The layers and sizes of a model.

    Attributes:
        model_type: transformers' name of the family.
        architecture: transformers' class of the model.
        layers: All layers, each with its attention and its recurrent side.
        parameters: Number of parameters of the whole model.
        vocabulary: Number of token ids.
        max_tokens: The longest sequence that the model's positions allow, if its configuration says so.
        window_rule: How windows are counted: "transformers", or "deepmind" (one key more).
        no_mixer_reason: Why recurrent mixers cannot be addressed although the model may have some.
        left_out: Parts of the checkpoint that are not loaded, such as a vision tower.
    """

    model_type: str
    architecture: str
    layers: tuple[Layer, ...]
    parameters: int
    vocabulary: int
    max_tokens: int | None
    window_rule: str
    no_mixer_reason: str = ""
    left_out: str = ""

    @property
    def attention_layers(self) -> tuple[Layer, ...]:
        return tuple(layer for layer in self.layers if layer.attention)

    @property
    def recurrent_layers(self) -> tuple[Layer, ...]:
        return tuple(layer for layer in self.layers if layer.recurrent)

    @property
    def heads(self) -> tuple[Head, ...]:
        return tuple(head for layer in self.layers for head in layer.heads)

    @property
    def groups(self) -> tuple[Group, ...]:
        return tuple(group for layer in self.layers for group in layer.groups)

    @property
    def window(self) -> int | None:
        """The smallest window of any attention layer; None if no layer has a window."""
        return min((w for _, part in self.attention_parts() if (w := part.window)), default=None)

    @property
    def attention_parameters(self) -> int:
        return sum(part.parameters for _, part in self.attention_parts())

    @property
    def recurrent_parameters(self) -> int:
        return sum(part.parameters for _, part in self.recurrent_parts())

    @property
    def kv_bytes_per_token(self) -> int:
        return sum(part.kv_bytes_per_token for _, part in self.attention_parts())

    @property
    def state_bytes(self) -> int:
        return sum(part.state_bytes for parts in (self.attention_parts(), self.recurrent_parts()) for _, part in parts)

    def attention_parts(self) -> Iterator[tuple[int, AttentionPart]]:
        return ((layer.index, layer.attention) for layer in self.layers if layer.attention)

    def recurrent_parts(self) -> Iterator[tuple[int, RecurrentPart]]:
        return ((layer.index, layer.recurrent) for layer in self.layers if layer.recurrent)

    def attention(self, layer: int) -> AttentionPart:
        part = self.layers[layer].attention
        if part is None:
            raise KeyError(f"layer {layer} has no attention")
        return part

    def flops_per_token(self, side: Literal["attention", "recurrent"], context_tokens: int) -> int:
        """Return the FLOPs of one decode step: of the projections and, for attention, of scores and values over its keys."""
        if side == "recurrent":
            return 2 * self.recurrent_parameters
        scores = 0
        for _, part in self.attention_parts():
            keys = min(context_tokens, part.window or context_tokens)
            scores += 2 * part.query_heads * keys * (part.key_dim + part.value_dim)
        return 2 * self.attention_parameters + scores

    def frame(self) -> pandas.DataFrame:
        """Return one row per layer: its kind, heads, window, groups, memory and parameters."""
        import pandas

        rows = []
        for layer in self.layers:
            a, r = layer.attention, layer.recurrent
            row: dict[str, Any] = {"layer": layer.index, "kind": layer.kind, "query_heads": a.query_heads if a else 0}
            row |= {"kv_heads": a.kv_heads if a else 0, "head_dim": a.key_dim if a else 0, "window": a.window if a else None}
            row |= {"recurrent_groups": r.groups if r else 0, "kv_bytes_per_token": a.kv_bytes_per_token if a else 0}
            row |= {"state_bytes": r.state_bytes if r else 0, "attention_parameters": a.parameters if a else 0}
            rows.append({**row, "recurrent_parameters": r.parameters if r else 0})
        return pandas.DataFrame(rows)

    def plot(self, ax: Any = None) -> Any:
        """Draw the parameters of the attention and recurrent side of each layer as bars, and return the matplotlib axes."""
        from needlework.plots import light_colors, new_axes

        ax, frame = new_axes(ax), self.frame()
        below = 0 * frame["layer"]
        for side, color in (("attention", "c1"), ("recurrent", "c2")):
            sizes = frame[f"{side}_parameters"]
            has = sizes > 0
            if has.any():
                ax.bar(frame["layer"][has], sizes[has], bottom=below[has], color=light_colors()[color], label=side)
            below = below + sizes
        ax.xaxis.get_major_locator().set_params(integer=True)
        ax.set(xlabel="layer", ylabel="parameters", title=f"{self.architecture}: {self.parameters:,} parameters")
        if below.any():
            ax.legend(frameon=False)
        return ax

    def _repr_html_(self) -> str:
        from needlework.tables import Table

        caption = f"{self.architecture}: {len(self.layers)} layers, {self.parameters:,} parameters"
        return Table.from_frame(self.frame(), caption).to_html()

    def to_dict(self) -> dict[str, Any]:
        """Return all fields and totals as JSON values."""
        fields = asdict(self)
        for layer, plain in zip(self.layers, fields["layers"], strict=True):
            plain["kind"] = layer.kind
        totals = ("window", "attention_parameters", "recurrent_parameters", "kv_bytes_per_token", "state_bytes")
        fields |= {name: getattr(self, name) for name in totals}
        at_2048 = {"attention": self.flops_per_token("attention", 2048), "recurrent": self.flops_per_token("recurrent", 2048)}
        return {**fields, "heads": len(self.heads), "groups": len(self.groups), "flops_per_token_at_2048": at_2048}

    def __str__(self) -> str:
        kinds = {"attention": "A", "recurrent": "R", "hybrid": "H", "other": "-"}
        heads = sorted({(part.query_heads, part.kv_heads) for _, part in self.attention_parts()})
        grouped = "".join(sorted({f"{part.grouped}, " for _, part in self.recurrent_parts() if part.groups}))
        lines = [
            f"{self.architecture}: {len(self.layers)} layers {''.join(kinds[x.kind] for x in self.layers)}"
            " (A attention, R recurrent, H both, - neither)",
            f"  attention: {len(self.attention_layers)} layers, "
            + (", ".join(f"{q} query heads over {kv} kv heads" for q, kv in heads) or "no heads")
            + f", window {self.window or 'none'} (rule: {self.window_rule}), {self.attention_parameters:,} parameters,"
            f" {self.kv_bytes_per_token:,} KV bytes per token",
            f"  recurrent: {len(self.recurrent_layers)} layers, {grouped}{self.recurrent_parameters:,} parameters,"
            f" {self.state_bytes:,} state bytes per sequence" + (f" ({self.no_mixer_reason})" if self.no_mixer_reason else ""),
            f"  in all {self.parameters:,} parameters, vocabulary {self.vocabulary:,}",
        ]
        lines += [f"  not loaded: {self.left_out}"] if self.left_out else []
        return "\n".join(lines)
