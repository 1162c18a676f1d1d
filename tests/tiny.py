"""Tiny random models of 29 architectures: 23 hybrids and 6 controls. `lfm3` needs transformers 5.23.

Weights are drawn at unit scale, so that every part of every layer visibly moves the logits: a law that holds on these
models holds because the code is right, not because the part in question is small.
"""

# ruff: noqa: C408  (keyword arguments of configurations read best as such)

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from torch import Tensor, nn

_TOKENS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
_PLAIN = dict(vocab_size=128, hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, **_TOKENS)
_SIX = dict(_PLAIN, num_hidden_layers=6)
_FOUR = dict(_PLAIN, num_hidden_layers=4)
_LINEAR = dict(layer_types=["linear_attention", "linear_attention", "full_attention"] * 2)
_CONV = dict(layer_types=["conv", "conv", "full_attention"] * 2)
_LFM3 = ["conv", "conv", "full_attention", "conv", "sliding_attention", "conv"]
_ZAMBA = dict(layers_block_type=["linear_attention", "linear_attention", "hybrid"] * 2, use_mamba_kernels=False)
_MAMBA1 = dict(mamba_d_state=8, mamba_d_conv=4, mamba_expand=2)
_MAMBA2 = dict(mamba_n_heads=4, mamba_d_head=16, mamba_n_groups=1, mamba_d_state=8, mamba_d_conv=4, mamba_chunk_size=8)
_EXPERTS = dict(moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2)
_QWEN = dict(
    _SIX,
    head_dim=16,
    linear_conv_kernel_dim=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    **_LINEAR,
)
_QWEN_MOE = dict(_EXPERTS, shared_expert_intermediate_size=16)
_MROPE = dict(
    rope_parameters=dict(
        rope_type="default", rope_theta=10000.0, mrope_section=[1, 1, 0], mrope_interleaved=True, partial_rotary_factor=0.25
    )
)
_MLA = dict(kv_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8)
_MLA_MOE = dict(n_shared_experts=1, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, num_key_value_heads=4)
_GLM_TEXT = dict(
    _FOUR,
    moe_intermediate_size=16,
    n_shared_experts=1,
    n_routed_experts=4,
    num_experts_per_tok=2,
    kv_lora_rank=16,
    q_lora_rank=16,
    v_head_dim=8,
    qk_nope_head_dim=8,
    index_topk=8,
    index_head_dim=8,
    index_n_heads=16,
    index_kpool=2,
    linear_head_dim=8,
    linear_num_heads=4,
    hc_mult=2,
    layer_types=["linear_attention", "indexed_attention"] * 2,
    mlp_layer_types=["dense", "sparse"] * 2,
    num_key_value_heads=4,
)
_GLM_VISION = dict(
    depth=1, hidden_size=16, num_heads=2, intermediate_size=16, out_hidden_size=32, projection_intermediate_size=16
)
_GLM_IMAGE = dict(
    image_token_id=120,
    video_token_id=121,
    image_start_token_id=122,
    image_end_token_id=123,
    video_start_token_id=124,
    video_end_token_id=125,
)

# name -> (configuration class, model class, what the configuration is given)
ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "recurrent_gemma": (
        "RecurrentGemmaConfig",
        "RecurrentGemmaForCausalLM",
        dict(_SIX, num_key_value_heads=1, lru_width=32, attention_window_size=8, conv1d_width=4),
    ),
    "jamba": (
        "JambaConfig",
        "JambaForCausalLM",
        dict(
            _SIX,
            attn_layer_period=3,
            attn_layer_offset=2,
            num_experts=4,
            num_experts_per_tok=2,
            expert_layer_period=2,
            expert_layer_offset=1,
            use_mamba_kernels=False,
            **_MAMBA1,
        ),
    ),
    "bamba": ("BambaConfig", "BambaForCausalLM", dict(_SIX, attn_layer_indices=[2, 5], mamba_expand=2, **_MAMBA2)),
    "zamba": ("ZambaConfig", "ZambaForCausalLM", dict({**_SIX, **_ZAMBA, **_MAMBA1, "num_key_value_heads": 4}, n_mamba_heads=2)),
    "zamba2": (
        "Zamba2Config",
        "Zamba2ForCausalLM",
        dict(
            {**_SIX, **_ZAMBA, **_MAMBA1, "num_key_value_heads": 4},
            n_mamba_heads=4,
            mamba_ngroups=1,
            chunk_size=8,
            num_mem_blocks=1,
            use_shared_attention_adapter=True,
            adapter_rank=4,
            use_mem_rope=True,
        ),
    ),
    "falcon_h1": ("FalconH1Config", "FalconH1ForCausalLM", dict(_FOUR, head_dim=8, mamba_d_ssm=64, **_MAMBA2)),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        dict(
            _SIX,
            shared_intermediate_size=64,
            num_local_experts=4,
            num_experts_per_tok=2,
            attention_multiplier=0.35,
            position_embedding_type="rope",
            **_LINEAR,
            **_MAMBA2,
        ),
    ),
    "nemotron_h": (
        "NemotronHConfig",
        "NemotronHForCausalLM",
        dict(
            _PLAIN,
            head_dim=8,
            layers_block_type=["linear_attention", "mlp", "full_attention", "moe", "linear_attention", "full_attention"],
            ssm_state_size=8,
            mamba_num_heads=4,
            mamba_head_dim=16,
            n_groups=1,
            conv_kernel=4,
            chunk_size=8,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            moe_shared_expert_intermediate_size=16,
            use_mamba_kernels=False,
        ),
    ),
    "lfm2": ("Lfm2Config", "Lfm2ForCausalLM", dict(_SIX, conv_L_cache=3, block_auto_adjust_ff_dim=False, **_CONV)),
    "lfm2_moe": ("Lfm2MoeConfig", "Lfm2MoeForCausalLM", dict(_SIX, conv_L_cache=3, num_dense_layers=2, **_EXPERTS, **_CONV)),
    "lfm3": ("Lfm3Config", "Lfm3ForCausalLM", dict(_SIX, head_dim=8, sliding_window=8, layer_types=_LFM3)),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", dict(_QWEN, **_QWEN_MOE)),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", dict(_QWEN, **_MROPE)),
    "qwen3_5_moe": (
        "Qwen3_5MoeTextConfig",
        "Qwen3_5MoeForCausalLM",
        dict({key: value for key, value in _QWEN.items() if key != "intermediate_size"}, **_QWEN_MOE, **_MROPE),
    ),
    "minimax": (
        "MiniMaxConfig",
        "MiniMaxForCausalLM",
        dict(_SIX, head_dim=8, num_local_experts=4, num_experts_per_tok=2, block_size=8, **_LINEAR),
    ),
    "olmo_hybrid": (
        "OlmoHybridConfig",
        "OlmoHybridForCausalLM",
        dict(_SIX, linear_num_key_heads=4, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8, **_LINEAR),
    ),
    "kimi_linear": (
        "KimiLinearConfig",
        "KimiLinearForCausalLM",
        dict({**_SIX, **_MLA_MOE}, linear_head_dim=8, linear_num_heads=4, **_LINEAR, **_MLA),
    ),
    "bailing_hybrid": (
        "BailingHybridConfig",
        "BailingHybridForCausalLM",
        dict({**_SIX, **_MLA_MOE}, n_group=1, topk_group=1, head_dim=8, num_mtp_layers=0, **_LINEAR, **_MLA),
    ),
    "zaya": (
        "ZayaConfig",
        "ZayaForCausalLM",
        dict(
            {key: value for key, value in _FOUR.items() if key != "intermediate_size"},
            head_dim=8,
            moe_intermediate_size=16,
            num_experts=4,
            router_hidden_size=16,
            sliding_window=8,
            layer_types=["hybrid", "hybrid_sliding"] * 2,
        ),
    ),
    "inkling": (
        "InklingTextConfig",
        "InklingForCausalLM",
        dict(
            _FOUR,
            head_dim=8,
            swa_num_attention_heads=4,
            swa_num_key_value_heads=1,
            swa_head_dim=8,
            sliding_window_size=8,
            d_rel=4,
            rel_extent=16,
            layer_types=["hybrid_sliding", "hybrid"] * 2,
            mlp_layer_types=["dense", "sparse"] * 2,
            moe_intermediate_size=16,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_shared_experts=1,
            logits_mup_width_multiplier=1.0,
        ),
    ),
    "glm5_next": (
        "Glm5NextConfig",
        "Glm5NextForConditionalGeneration",
        dict(text_config=_GLM_TEXT, vision_config=_GLM_VISION, **_GLM_IMAGE),
    ),
    "qwen4_exp": (
        "Qwen4ExpTextConfig",
        "Qwen4ExpForCausalLM",
        dict(
            {**_QWEN, "layer_types": ["linear_attention", "linear_attention", "indexed_attention"] * 2},
            **_QWEN_MOE,
            **_MROPE,
            hc_count=2,
            hc_lowrank=8,
            indexer_n_heads=8,
            indexer_kv_heads=1,
            indexer_head_dim=8,
            indexer_budget=8,
            indexer_compress_ratio=2,
        ),
    ),
    "hrm_text": (
        "HrmTextConfig",
        "HrmTextForCausalLM",
        dict(
            vocab_size=128,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            head_dim=8,
            H_cycles=2,
            L_cycles=2,
            **_TOKENS,
        ),
    ),
    "mamba": (
        "MambaConfig",
        "MambaForCausalLM",
        dict(vocab_size=128, hidden_size=32, state_size=8, num_hidden_layers=4, **_TOKENS),
    ),
    "mamba2": (
        "Mamba2Config",
        "Mamba2ForCausalLM",
        dict(
            vocab_size=128,
            hidden_size=32,
            state_size=8,
            num_hidden_layers=4,
            num_heads=4,
            head_dim=16,
            n_groups=1,
            chunk_size=8,
            **_TOKENS,
        ),
    ),
    "falcon_mamba": (
        "FalconMambaConfig",
        "FalconMambaForCausalLM",
        dict(vocab_size=128, hidden_size=32, state_size=8, num_hidden_layers=4, **_TOKENS),
    ),
    "llama": ("LlamaConfig", "LlamaForCausalLM", dict(_FOUR)),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", dict(_FOUR, head_dim=8)),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        dict(
            _FOUR, head_dim=8, sliding_window=8, query_pre_attn_scalar=8, layer_types=["sliding_attention", "full_attention"] * 2
        ),
    ),
}

ARCHITECTURES = {name: row for name, row in ARCHITECTURES.items() if hasattr(transformers, row[0])}

NO_HEADS = ("mamba", "mamba2", "falcon_mamba")


def build(name: str, attention: str = "sdpa", seed: int = 0, **changes: Any) -> Any:
    """A tiny model with random weights at unit scale."""
    config_class, model_class, fields = ARCHITECTURES[name]
    config = getattr(transformers, config_class)(**copy.deepcopy({**fields, **changes}))
    make = getattr(transformers, model_class)
    torch.manual_seed(seed)
    model = make(config) if name in NO_HEADS else make._from_config(config, attn_implementation=attention)
    return draw_weights(model, seed).eval()


@torch.no_grad()
def draw_weights(model: Any, seed: int) -> Any:
    """Weights a hundred times larger than transformers' own 0.02, and no parameter left constant."""
    generator = torch.Generator().manual_seed(seed)

    def normal(shape: torch.Size) -> Tensor:
        return torch.randn(shape, generator=generator)

    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.copy_(normal(module.weight.shape) / module.weight.shape[1] ** 0.5)
        elif isinstance(module, nn.Embedding):
            module.weight.copy_(normal(module.weight.shape))  # the padding row too: trained models have it
        elif isinstance(module, nn.Conv1d):
            module.weight.copy_(normal(module.weight.shape) * 0.5)
        if isinstance(module, (nn.Linear, nn.Conv1d)) and module.bias is not None:
            module.bias.copy_(0.1 * normal(module.bias.shape))
    for name, p in model.named_parameters():
        if p.dim() == 3 and not any(word in name for word in ("conv", "recurrent_gate", "input_gate")):
            p.copy_(normal(p.shape) / p.shape[-1] ** 0.5)  # experts
    for name, p in model.named_parameters():
        if p.numel() > 1 and p.float().std() == 0:
            p.add_(0.2 * normal(p.shape))
            if name.endswith("qk_norm.temp"):
                p.add_(1.0)
        elif p.dim() >= 2 and "conv" in name and p.std() < 0.1:
            p.copy_(normal(p.shape) * 0.5)
    model.tie_weights()
    return model
