"""Facts about model families that a probe cannot discover. Everything else is found by running the model (`probe.py`)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import DynamicCache


@dataclass(frozen=True)
class Family:
    """Facts about one `model_type`."""

    mixer_class: str = ""  # class of a recurrent mixer that does not use the cache, so that the probe cannot find it
    state_names: tuple[str, ...] = ()  # attributes of such a mixer that hold its state
    no_mixer: str = ""  # reason why no recurrent part can be ablated on its own
    dense_masks: bool = False  # the model itself computes with its masks and needs real ones
    make_cache: Callable[[Any], Any] = lambda config: DynamicCache(config=config)
    deepmind_window: bool = False  # trained with a sliding window of one key more than in transformers
    continues: bool = False  # the stock code accepts several tokens after a prefill (tested)
    mended_mixer: str = ""  # mixer class that does so only with the code of `patches.py`
    drift: float = 0.0  # difference between stock decode and stock full forward, in standard deviations of the logits
    drift_reason: str = ""
    refused: str = ""  # reason why models of this family cannot be loaded

    def continues_prefill(self, fast: bool) -> bool:
        """Return whether several tokens in one forward may follow a prefill, with stock code or (`fast`) in `fast_kernels`.

        False for unknown families: feeding token by token is correct for all of them.
        """
        return self.continues or (fast and bool(self.mended_mixer))


def _recurrent_gemma_cache(config: Any) -> Any:
    """Return RecurrentGemma's cache, with layer types that the cache knows.

    Layer 0 is recurrent: a cache without layer types would report length 0 and reset every decode step. From transformers
    5.23 on, the configuration has these types; before, it has names of its own.
    """
    if getattr(config, "layer_types", None) is None:
        config = copy.copy(config)
        kinds = {"recurrent": "linear_attention", "attention": "sliding_attention"}
        config.layer_types = [kinds[kind] for kind in config.layers_block_type]
    return DynamicCache(config=config)


def _minimax_cache(config: Any) -> Any:
    """Return a MiniMax cache that reports lengths of the first attention layer."""
    from transformers.models.minimax.modeling_minimax import MiniMaxCache

    first = list(config.layer_types).index("full_attention") if "full_attention" in config.layer_types else 0

    class Cache(MiniMaxCache):  # type: ignore[misc, unused-ignore]
        """A MiniMaxCache for models whose layer 0, which lengths and mask sizes are read from, is linear attention."""

        def get_seq_length(self, layer_idx: int = 0) -> int:
            return int(super().get_seq_length(layer_idx or first))

        def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
            return super().get_mask_sizes(query_length, layer_idx or first)  # type: ignore[no-any-return]

    return Cache()


_SHORT_CONVOLUTIONS = "its short convolutions sit inside attention and feed-forward layers"
_NOTHING_ELSE = (
    *("bailing_hybrid", "bamba", "falcon_h1", "gemma3", "gemma3_text", "granitemoehybrid", "kimi_linear", "lfm2", "lfm2_moe"),
    *("lfm3", "llama", "mamba2", "olmo_hybrid", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text"),
    "qwen3_next",
)
_ROUNDED_TABLES = "prefill uses the decay tables of the checkpoint, which may be in half precision; decode computes its own"
_OWN_STATE = "its state is kept outside of transformers' cache classes, where rows cannot be forked, swapped or cleared"
_CLAMPED = "prefill clamps the time step at its minimum, single-token decode does not"

FAMILIES: dict[str, Family] = {
    **dict.fromkeys(_NOTHING_ELSE, Family(continues=True)),
    **dict.fromkeys(("glm5_next", "glm5_next_text", "qwen4_exp", "qwen4_exp_text"), Family(continues=True, dense_masks=True)),
    **dict.fromkeys(("inkling", "inkling_text"), Family(continues=True, no_mixer=_SHORT_CONVOLUTIONS)),
    "hrm_text": Family(continues=True, no_mixer="it recurs over depth, not over tokens"),
    "zaya": Family(continues=True, no_mixer="its convolution sits inside the query, key and value projections"),
    **dict.fromkeys(("nemotron_h", "zamba2"), Family(continues=True, drift=0.1, drift_reason=_CLAMPED)),
    "minimax": Family(make_cache=_minimax_cache, drift=0.1, drift_reason=_ROUNDED_TABLES),
    "falcon_mamba": Family(mended_mixer="FalconMambaMixer"),
    "jamba": Family(mended_mixer="JambaMambaMixer"),
    "mamba": Family(mended_mixer="MambaMixer"),
    "zamba": Family(mended_mixer="ZambaMambaMixer"),
    **dict.fromkeys(("rwkv", "xlstm"), Family(refused=_OWN_STATE)),
    "recurrent_gemma": Family(
        mixer_class="RecurrentGemmaRecurrentBlock",
        state_names=("conv1d_state", "rg_lru.recurrent_states"),
        make_cache=_recurrent_gemma_cache,
        deepmind_window=True,
        mended_mixer="RecurrentGemmaRecurrentBlock",
    ),
}


def family(model_type: str) -> Family:
    """Return the facts about a model type; the defaults for an unknown one."""
    return FAMILIES.get(model_type, Family())
