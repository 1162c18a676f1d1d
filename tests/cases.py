"""The shared matrix: tiny random models of 28 architectures, and the interventions that each of them is put through.

Weights are drawn at unit scale, so that every part of every layer visibly moves the logits: a law that holds on these
models holds because the code is right, not because the part in question is small.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import needlework as nw
from needlework.anatomy import Anatomy

_TOKENS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
_PLAIN = dict(vocab_size=128, hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, **_TOKENS)
_SIX = dict(_PLAIN, num_hidden_layers=6)
_FOUR = dict(_PLAIN, num_hidden_layers=4)
_LINEAR = dict(layer_types=["linear_attention", "linear_attention", "full_attention"] * 2)
_CONV = dict(layer_types=["conv", "conv", "full_attention"] * 2)
_ZAMBA = dict(layers_block_type=["linear_attention", "linear_attention", "hybrid"] * 2, use_mamba_kernels=False)
_MAMBA1 = dict(mamba_d_state=8, mamba_d_conv=4, mamba_expand=2)
_MAMBA2 = dict(mamba_n_heads=4, mamba_d_head=16, mamba_n_groups=1, mamba_d_state=8, mamba_d_conv=4, mamba_chunk_size=8)
_EXPERTS = dict(moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2)
_QWEN = dict(
    _SIX, head_dim=16, linear_conv_kernel_dim=4, linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2,
    linear_num_value_heads=4, **_LINEAR,
)  # fmt: skip
_QWEN_MOE = dict(_EXPERTS, shared_expert_intermediate_size=16)
_MROPE = dict(
    rope_parameters=dict(
        rope_type="default", rope_theta=10000.0, mrope_section=[1, 1, 0], mrope_interleaved=True, partial_rotary_factor=0.25
    )
)
_MLA = dict(kv_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8)
_MLA_MOE = dict(n_shared_experts=1, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, num_key_value_heads=4)
_GLM_TEXT = dict(
    _FOUR, moe_intermediate_size=16, n_shared_experts=1, n_routed_experts=4, num_experts_per_tok=2, kv_lora_rank=16,
    q_lora_rank=16, v_head_dim=8, qk_nope_head_dim=8, index_topk=8, index_head_dim=8, index_n_heads=16, index_kpool=2,
    linear_head_dim=8, linear_num_heads=4, hc_mult=2, layer_types=["linear_attention", "indexed_attention"] * 2,
    mlp_layer_types=["dense", "sparse"] * 2, num_key_value_heads=4,
)  # fmt: skip
_GLM_VISION = dict(
    depth=1, hidden_size=16, num_heads=2, intermediate_size=16, out_hidden_size=32, projection_intermediate_size=16
)
_GLM_IMAGE = dict(
    image_token_id=120, video_token_id=121, image_start_token_id=122, image_end_token_id=123, video_start_token_id=124,
    video_end_token_id=125,
)  # fmt: skip

# name -> (configuration class, model class, what the configuration is given)
ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "recurrent_gemma": ("RecurrentGemmaConfig", "RecurrentGemmaForCausalLM", dict(
        _SIX, num_key_value_heads=1, lru_width=32, attention_window_size=8, conv1d_width=4)),
    "jamba": ("JambaConfig", "JambaForCausalLM", dict(
        _SIX, attn_layer_period=3, attn_layer_offset=2, num_experts=4, num_experts_per_tok=2, expert_layer_period=2,
        expert_layer_offset=1, use_mamba_kernels=False, **_MAMBA1)),
    "bamba": ("BambaConfig", "BambaForCausalLM", dict(_SIX, attn_layer_indices=[2, 5], mamba_expand=2, **_MAMBA2)),
    "zamba": ("ZambaConfig", "ZambaForCausalLM", dict({**_SIX, **_ZAMBA, **_MAMBA1, "num_key_value_heads": 4}, n_mamba_heads=2)),
    "zamba2": ("Zamba2Config", "Zamba2ForCausalLM", dict(
        {**_SIX, **_ZAMBA, **_MAMBA1, "num_key_value_heads": 4}, n_mamba_heads=4, mamba_ngroups=1, chunk_size=8,
        num_mem_blocks=1, use_shared_attention_adapter=True, adapter_rank=4, use_mem_rope=True)),
    "falcon_h1": ("FalconH1Config", "FalconH1ForCausalLM", dict(_FOUR, head_dim=8, mamba_d_ssm=64, **_MAMBA2)),
    "granitemoehybrid": ("GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM", dict(
        _SIX, shared_intermediate_size=64, num_local_experts=4, num_experts_per_tok=2, attention_multiplier=0.35,
        position_embedding_type="rope", **_LINEAR, **_MAMBA2)),
    "nemotron_h": ("NemotronHConfig", "NemotronHForCausalLM", dict(
        _PLAIN, head_dim=8, layers_block_type=["linear_attention", "mlp", "full_attention", "moe", "linear_attention",
        "full_attention"], ssm_state_size=8, mamba_num_heads=4, mamba_head_dim=16, n_groups=1, conv_kernel=4, chunk_size=8,
        n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, moe_shared_expert_intermediate_size=16,
        use_mamba_kernels=False)),
    "lfm2": ("Lfm2Config", "Lfm2ForCausalLM", dict(_SIX, conv_L_cache=3, block_auto_adjust_ff_dim=False, **_CONV)),
    "lfm2_moe": ("Lfm2MoeConfig", "Lfm2MoeForCausalLM", dict(_SIX, conv_L_cache=3, num_dense_layers=2, **_EXPERTS, **_CONV)),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", dict(_QWEN, **_QWEN_MOE)),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", dict(_QWEN, **_MROPE)),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", dict(
        {key: value for key, value in _QWEN.items() if key != "intermediate_size"}, **_QWEN_MOE, **_MROPE)),
    "minimax": ("MiniMaxConfig", "MiniMaxForCausalLM", dict(
        _SIX, head_dim=8, num_local_experts=4, num_experts_per_tok=2, block_size=8, **_LINEAR)),
    "olmo_hybrid": ("OlmoHybridConfig", "OlmoHybridForCausalLM", dict(
        _SIX, linear_num_key_heads=4, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8, **_LINEAR)),
    "kimi_linear": ("KimiLinearConfig", "KimiLinearForCausalLM", dict(
        {**_SIX, **_MLA_MOE}, linear_head_dim=8, linear_num_heads=4, **_LINEAR, **_MLA)),
    "bailing_hybrid": ("BailingHybridConfig", "BailingHybridForCausalLM", dict(
        {**_SIX, **_MLA_MOE}, n_group=1, topk_group=1, head_dim=8, num_mtp_layers=0, **_LINEAR, **_MLA)),
    "zaya": ("ZayaConfig", "ZayaForCausalLM", dict(
        {key: value for key, value in _FOUR.items() if key != "intermediate_size"}, head_dim=8, moe_intermediate_size=16,
        num_experts=4, router_hidden_size=16, sliding_window=8, layer_types=["hybrid", "hybrid_sliding"] * 2)),
    "inkling": ("InklingTextConfig", "InklingForCausalLM", dict(
        _FOUR, head_dim=8, swa_num_attention_heads=4, swa_num_key_value_heads=1, swa_head_dim=8, sliding_window_size=8, d_rel=4,
        rel_extent=16, layer_types=["hybrid_sliding", "hybrid"] * 2, mlp_layer_types=["dense", "sparse"] * 2,
        moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1,
        logits_mup_width_multiplier=1.0)),
    "glm5_next": ("Glm5NextConfig", "Glm5NextForConditionalGeneration", dict(
        text_config=_GLM_TEXT, vision_config=_GLM_VISION, **_GLM_IMAGE)),
    "qwen4_exp": ("Qwen4ExpTextConfig", "Qwen4ExpForCausalLM", dict(
        {**_QWEN, "layer_types": ["linear_attention", "linear_attention", "indexed_attention"] * 2}, **_QWEN_MOE, **_MROPE,
        hc_count=2, hc_lowrank=8, indexer_n_heads=8, indexer_kv_heads=1, indexer_head_dim=8, indexer_budget=8,
        indexer_compress_ratio=2)),
    "hrm_text": ("HrmTextConfig", "HrmTextForCausalLM", dict(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, head_dim=8,
        H_cycles=2, L_cycles=2, **_TOKENS)),
    "mamba": ("MambaConfig", "MambaForCausalLM", dict(
        vocab_size=128, hidden_size=32, state_size=8, num_hidden_layers=4, **_TOKENS)),
    "mamba2": ("Mamba2Config", "Mamba2ForCausalLM", dict(
        vocab_size=128, hidden_size=32, state_size=8, num_hidden_layers=4, num_heads=4, head_dim=16, n_groups=1, chunk_size=8,
        **_TOKENS)),
    "falcon_mamba": ("FalconMambaConfig", "FalconMambaForCausalLM", dict(
        vocab_size=128, hidden_size=32, state_size=8, num_hidden_layers=4, **_TOKENS)),
    "llama": ("LlamaConfig", "LlamaForCausalLM", dict(_FOUR)),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", dict(_FOUR, head_dim=8)),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", dict(
        _FOUR, head_dim=8, sliding_window=8, query_pre_attn_scalar=8, layer_types=["sliding_attention", "full_attention"] * 2)),
}  # fmt: skip

NO_HEADS = ("mamba", "mamba2", "falcon_mamba")
NO_MIXER = {  # why the recurrent side cannot be addressed
    "hrm_text": "it recurs over depth, not over tokens",
    "zaya": "its convolution sits inside the query, key and value projections",
    "inkling": "its short convolutions sit inside attention and feed-forward layers",
    "llama": "no separate recurrent layers",
    "qwen3": "no separate recurrent layers",
    "gemma3": "no separate recurrent layers",
}
CORE = ("llama", "gemma3", "jamba", "recurrent_gemma", "falcon_h1", "qwen3_next", "zamba2", "hrm_text", "mamba")  # not slow
ALL = tuple(ARCHITECTURES)
WITH_HEADS = tuple(name for name in ALL if name not in NO_HEADS)
WITH_MIXER = tuple(name for name in ALL if name not in NO_MIXER)
HYBRIDS = tuple(name for name in WITH_HEADS if name in WITH_MIXER)


def each(names: tuple[str, ...]) -> Any:
    """Parametrise a test over architectures; those outside CORE are slow."""
    params = [pytest.param(name, marks=() if name in CORE else pytest.mark.slow) for name in names]
    return pytest.mark.parametrize("name", params)


def build(name: str, attention: str = "sdpa", seed: int = 0, **changes: Any) -> Any:
    """A tiny model with random weights at unit scale."""
    config_class, model_class, fields = ARCHITECTURES[name]
    config = getattr(transformers, config_class)(**copy.deepcopy({**fields, **changes}))
    make = getattr(transformers, model_class)
    torch.manual_seed(seed)
    model = make(config) if name in NO_HEADS else make._from_config(config, attn_implementation=attention)
    return _draw_weights(model, seed).eval()


@torch.no_grad()
def _draw_weights(model: Any, seed: int) -> Any:
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


@functools.cache
def subject(name: str, kernels: str = "fast") -> nw.Subject:
    """The tiny subject of an architecture, built once a process. Tests must leave it as it was."""
    return nw.wrap(build(name), kernels=kernels)  # type: ignore[arg-type]


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(3, 100, shape, generator=torch.Generator().manual_seed(seed))


def apart(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


def _first(anatomy: Anatomy) -> int:
    return anatomy.attention_layers[0].index if anatomy.attention_layers else 0


def _mixed(anatomy: Anatomy) -> nw.Intervention:
    layers = [layer.index for layer in anatomy.recurrent_layers][:1] or None
    return nw.KeepHeads(k=1, phase="decode") + nw.AblateRecurrent(layers=layers)


Make = Callable[[Anatomy], nw.Intervention]
_MADE: dict[str, Make] = {
    "only some heads": lambda a: nw.OnlyHeads(heads=[(_first(a), 0), (_first(a), 3)]),
    "one head off": lambda a: nw.AblateHeads(heads=[(_first(a), 1)]),
    "keep by ranking": lambda a: nw.KeepHeads(k=1, by=nw.Ranking(order=a.heads[::-1])),
    "both sides": _mixed,
}
_FIXED: dict[str, nw.Intervention] = {
    "none": nw.NONE,
    "keep by entropy": nw.KeepHeads(k=2),
    "keep by l2": nw.KeepHeads(k=1, by="l2"),
    "keep by norm": nw.KeepHeads(k=3, by="norm"),
    "keep at random": nw.KeepHeads(fraction=0.5, by="random", seed=3),
    "keep a random set": nw.KeepHeads(k=3, by="random", draw="trial", scope="model"),
    "keep in decode": nw.KeepHeads(k=1, phase="decode"),
    "attention off": nw.AblateAttention(),
    "attention block off": nw.AblateAttention(site="block"),
    "attention off in prefill": nw.AblateAttention(phase="prefill"),
    "needle omitted": nw.ExposeTokens(mode="omit"),
    "needle only": nw.ExposeTokens(mode="only", renormalize=True),
    "needle null": nw.ExposeTokens(mode="null", phase="decode"),
    "needle balanced": nw.ExposeTokens(mode="balanced"),
    "needle by phase": nw.ExposeTokens(mode="omit", phase="prefill", renormalize=True)
    + nw.ExposeTokens(mode="only", phase="decode"),
    "short context": nw.LimitContext(tokens=4, sinks=1),
    "memory off": nw.AblateRecurrent(),
    "mixers off": nw.AblateRecurrent(site="block"),
    "reset at a token": nw.ResetState(at=9),
    "reset after the needle": nw.ResetState(at="needle"),
    "keys swapped": nw.SwapMemory(half="kv"),
    "state swapped": nw.SwapMemory(half="recurrent"),
}
RECURRENT_SIDE = ("memory off", "mixers off", "reset at a token", "reset after the needle", "state swapped", "both sides")
ATTENTION_SIDE = tuple(x for x in (*_FIXED, *_MADE) if x not in ("none", *RECURRENT_SIDE)) + ("both sides",)
INTERVENTIONS = (*_FIXED, *_MADE)

PROMPT = (17, 45, 9, 71, 30, 22, 8, 64, 51, 90, 13, 37)
TWIN = (17, 45, 9, 80, 55, 41, 8, 64, 51, 90, 13, 37)  # another needle value, the same last token
SPANS = {"needle": ((3, 6),)}
MORE = (28, 66, 5, 19)  # what is decoded after the prompt where the tokens are given


def intervention(which: str, anatomy: Anatomy) -> nw.Intervention:
    return _MADE[which](anatomy) if which in _MADE else _FIXED[which]


def refusal(name: str, which: str) -> str:
    """The reason with which this cell of the matrix is refused; empty where the laws hold."""
    if which == "keys swapped":
        return "no kv memory" if name in NO_HEADS else ""
    if which == "state swapped":
        return "no recurrent memory" if name in NO_MIXER else ""
    if which in ATTENTION_SIDE and name in NO_HEADS:
        return "no separate attention layers"
    return NO_MIXER.get(name, "") if which in RECURRENT_SIDE else ""
