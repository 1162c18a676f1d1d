"""What a recurrent mixer is made of: its output projection, the groups of channels that this reads, its short convolution."""

from __future__ import annotations

from torch import nn

from needlework.anatomy import GroupKind

# Where mixers say how many heads they have and how wide one is. A pair counts only if it accounts for every channel that the
# output projection reads, so a name that means something else in another family is not taken for its heads.
_HEADS = (
    ("num_v_heads", "head_v_dim"),
    ("num_heads", "head_dim"),
    ("n_mamba_heads", "mamba_head_dim"),
    ("num_attention_heads", "head_dim"),
)
_BLOCKS = (("num_attention_heads", "block_width"),)  # of RG-LRU: gates are computed block by block
MOST_CHANNEL_GROUPS = 16
NO_GROUPS = "what the mixer says is not the output of one linear map over its channels, so none can be silenced before it"


def groups_of(mixer: nn.Module, width: int) -> tuple[GroupKind, int]:
    """What the channels that the output projection reads fall into, and how many of these there are."""
    for kind, names in (("heads", _HEADS), ("blocks", _BLOCKS)):
        for module in mixer.modules() if kind == "blocks" else (mixer,):
            for count, size in names:
                heads, dim = (getattr(module, name, None) for name in (count, size))
                if isinstance(heads, int) and isinstance(dim, int) and heads > 1 and heads * dim == width:
                    return kind, heads  # type: ignore[return-value]
    return "channels", max(n for n in range(1, MOST_CHANNEL_GROUPS + 1) if width % n == 0)


def short_convolution(mixer: nn.Module) -> nn.Conv1d | None:
    """The mixer's one depthwise convolution over tokens; None if it has none, or several."""
    found = [m for m in mixer.modules() if isinstance(m, nn.Conv1d) and m.groups == m.in_channels == m.out_channels]
    return found[0] if len(found) == 1 else None
