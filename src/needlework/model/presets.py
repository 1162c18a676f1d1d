"""Public configurations of the paper's models: they can be inspected without a download."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _recurrent_gemma(layers: int, width: int, heads: int) -> Any:
    from transformers import RecurrentGemmaConfig

    return RecurrentGemmaConfig(
        num_hidden_layers=layers,
        vocab_size=256_000,
        hidden_size=width,
        intermediate_size=6 * width,
        num_attention_heads=heads,
        num_key_value_heads=1,
        lru_width=width,
        attention_window_size=2048,
        conv1d_width=4,
        block_types=("recurrent", "recurrent", "attention"),
    )


def _jamba_mini() -> Any:
    from transformers import JambaConfig

    return JambaConfig(
        vocab_size=65_536,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        attn_layer_period=8,
        attn_layer_offset=4,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=16,
        num_experts_per_tok=2,
        mamba_d_state=16,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_dt_rank=256,
        max_position_embeddings=262_144,
    )


PRESETS: dict[str, Callable[[], Any]] = {
    "recurrentgemma-2b": lambda: _recurrent_gemma(layers=26, width=2560, heads=10),
    "recurrentgemma-9b": lambda: _recurrent_gemma(layers=38, width=4096, heads=16),
    "jamba-mini-1.6": _jamba_mini,
}
