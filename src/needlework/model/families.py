"""What no probe can find out about a model family: one row each. Everything else is discovered by running the model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import DynamicCache


@dataclass(frozen=True)
class Family:
    """Facts about one `model_type`."""

    mixer_class: str = ""  # class of the recurrent mixer where it never touches the cache, so that no probe sees it
    state_names: tuple[str, ...] = ()  # where such a mixer keeps its state
    no_mixer: str = ""  # why there is no recurrent side that could be switched off by itself
    dense_masks: bool = False  # the model computes with its masks, so it must be given real ones
    make_cache: Callable[[Any], Any] = lambda config: DynamicCache(config=config)
    deepmind_window: bool = False  # trained with one key more than transformers shows
    continues: bool = False  # its own code takes several tokens at once after a prefill, as the tests show
    mended_mixer: str = ""  # class that does so with the code of `patches.py` only
    drift: float = 0.0  # how far its own decode lies from its own full forward, in standard deviations of the logits
    drift_reason: str = ""

    def continues_prefill(self, fast: bool) -> bool:
        """Whether several tokens at once may follow a prefill, with stock code or (`fast`) inside `fast_kernels`.

        An unknown family does not: feed it token by token, which is right everywhere.
        """
        return self.continues or (fast and bool(self.mended_mixer))


def _recurrent_gemma_cache(config: Any) -> Any:
    """Layer 0 is recurrent: a cache that does not know reports a length of 0 and resets every decode step.

    transformers 5.23 names the layers as its cache wants them; before, the configuration had names of its own.
    """
    if getattr(config, "layer_types", None) is None:
        config = copy.copy(config)
        kinds = {"recurrent": "linear_attention", "attention": "sliding_attention"}
        config.layer_types = [kinds[kind] for kind in config.layers_block_type]
    return DynamicCache(config=config)


def _minimax_cache(config: Any) -> Any:
    from transformers.models.minimax.modeling_minimax import MiniMaxCache

    first = list(config.layer_types).index("full_attention") if "full_attention" in config.layer_types else 0

    class Cache(MiniMaxCache):  # type: ignore[misc, unused-ignore]
        """Lengths and mask sizes are read from layer 0, which may be linear: answer for the first attention layer."""

        def get_seq_length(self, layer_idx: int = 0) -> int:
            return int(super().get_seq_length(layer_idx or first))

        def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
            return super().get_mask_sizes(query_length, layer_idx or first)  # type: ignore[no-any-return]

    return Cache()


_SHORT_CONVOLUTIONS = "its short convolutions sit inside attention and feed-forward layers"
_NOTHING_ELSE = (
    "bailing_hybrid",
    "bamba",
    "falcon_h1",
    "gemma3",
    "gemma3_text",
    "granitemoehybrid",
    "kimi_linear",
    "lfm2",
    "lfm2_moe",
    "llama",
    "mamba2",
    "olmo_hybrid",
    "qwen3",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
)
_CLAMPED = "prefill clamps the time step at its minimum, single-token decode does not"

FAMILIES: dict[str, Family] = {
    **dict.fromkeys(_NOTHING_ELSE, Family(continues=True)),
    **dict.fromkeys(("glm5_next", "glm5_next_text", "qwen4_exp", "qwen4_exp_text"), Family(continues=True, dense_masks=True)),
    **dict.fromkeys(("inkling", "inkling_text"), Family(continues=True, no_mixer=_SHORT_CONVOLUTIONS)),
    "hrm_text": Family(continues=True, no_mixer="it recurs over depth, not over tokens"),
    "zaya": Family(continues=True, no_mixer="its convolution sits inside the query, key and value projections"),
    **dict.fromkeys(("nemotron_h", "zamba2"), Family(continues=True, drift=0.1, drift_reason=_CLAMPED)),
    "minimax": Family(make_cache=_minimax_cache),
    "falcon_mamba": Family(mended_mixer="FalconMambaMixer"),
    "jamba": Family(mended_mixer="JambaMambaMixer"),
    "mamba": Family(mended_mixer="MambaMixer"),
    "zamba": Family(mended_mixer="ZambaMambaMixer"),
    "recurrent_gemma": Family(
        mixer_class="RecurrentGemmaRecurrentBlock",
        state_names=("conv1d_state", "rg_lru.recurrent_states"),
        make_cache=_recurrent_gemma_cache,
        deepmind_window=True,
        mended_mixer="RecurrentGemmaRecurrentBlock",
    ),
}


def family(model_type: str) -> Family:
    return FAMILIES.get(model_type, Family())
