"""The slow way, restated faithfully: eager attention, one (prompt, k) at a time, a full prefill each, stock transformers.

Nothing of needlework is used here, so that it can serve as the reference for speed and for equal answers. The last prompt
token is fed alone, as DeepMind's sampler does, so that generation owns it.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.masking_utils import eager_mask

NAME = "paper_eager"


class Setting:
    """What is done to attention now; None leaves it alone."""

    k: int | None = None  # heads kept by entropy
    off: dict[int, list[int]] | None = None  # layer -> heads whose outputs are zeroed


def _repeat(x: Tensor, groups: int) -> Tensor:
    return x.repeat_interleave(groups, dim=1) if groups > 1 else x


def paper_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float, **_: Any
) -> tuple[Tensor, Tensor]:
    groups = query.shape[1] // key.shape[1]
    scores = query @ _repeat(key, groups).transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask[..., : scores.shape[-1]]
    p = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
    out = p @ _repeat(value, groups)
    if Setting.k is not None and Setting.k < query.shape[1]:
        certainty = torch.special.xlogy(p, p).sum(-1)  # [rows, heads, queries]
        order = certainty.argsort(dim=1, descending=True, stable=True)
        keep = torch.zeros_like(certainty).scatter_(1, order[:, : Setting.k], 1.0)
        out = out * keep[..., None]
    if Setting.off is not None:
        for head in Setting.off.get(module.layer_idx, ()):
            out[:, head] = 0.0
    return out.transpose(1, 2).contiguous(), p


AttentionInterface.register(NAME, paper_attention)
AttentionMaskInterface.register(NAME, eager_mask)


def _reset(model: Any) -> Any:
    """A fresh cache; RecurrentGemma's state lies on its modules and its cache must be told which layers attend."""
    config = model.config
    if config.model_type == "recurrent_gemma":
        for module in model.modules():
            if type(module).__name__ == "RecurrentGemmaRecurrentBlock":
                module.conv1d_state = None
                module.rg_lru.recurrent_states = None
        if getattr(config, "layer_types", None) is None:  # before transformers 5.23
            config = copy.copy(config)
            kinds = {"recurrent": "linear_attention", "attention": "sliding_attention"}
            config.layer_types = [kinds[kind] for kind in config.layers_block_type]
    return DynamicCache(config=config)


@torch.inference_mode()
def generate(
    model: Any,
    prompt: tuple[int, ...],
    steps: int,
    k: int | None = None,
    off: dict[int, list[int]] | None = None,
    both_phases: bool = False,
) -> list[int]:
    """Greedy tokens after one prompt, with heads thinned out in generation, or in prefill too."""
    model.set_attn_implementation(NAME)
    cache, n = _reset(model), len(prompt)
    ids = torch.tensor([prompt])
    try:
        Setting.k, Setting.off = (k, off) if both_phases else (None, None)
        model(ids[:, : n - 1], past_key_values=cache, use_cache=True, position_ids=torch.arange(n - 1)[None], logits_to_keep=1)
        Setting.k, Setting.off = k, off
        tokens, fed = [], ids[:, -1:]
        for step in range(steps):
            position = torch.tensor([[n - 1 + step]])
            logits = model(fed, past_key_values=cache, use_cache=True, position_ids=position).logits
            fed = logits[:, -1].argmax(-1, keepdim=True)
            tokens.append(int(fed))
        return tokens
    finally:
        Setting.k = Setting.off = None
        _reset(model)
        model.set_attn_implementation("sdpa")
