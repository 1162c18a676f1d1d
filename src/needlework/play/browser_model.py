"""Weights and vocabulary of a model that the exported page runs in the browser: what static/griffin.js reads.

Weights are stored as float32. Rounded to fp16, they would change logits of tiny-griffin by up to 5e-3, more than the 2e-3 that
the page's forward pass has to keep; a second fp16 number for the remainder would take as many bytes as float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from needlework.measure import require_tokenizer
from needlework.requests import stop_tokens
from needlework.subject import Subject
from needlework.tasks.toy import STOP, is_toy

FAMILY = "recurrent_gemma"
ACTIVATION = "gelu_pytorch_tanh"
MOST_PARAMETERS = 1_300_000  # base64 of their float32 bytes leaves room for the rest of a page of 8 MiB


@dataclass(frozen=True)
class BrowserModel:
    """A model as the page holds it."""

    header: dict[str, Any]  # config, tensors (name, shape, offset in bytes), vocabulary and special token ids
    weights: bytes  # float32, little-endian


def browser_model(subject: Subject) -> BrowserModel | None:
    """Return the model for the page; None if it does not run in the browser, see `refusal`."""
    if refusal(subject):
        return None
    model, tokenizer = subject.model, require_tokenizer(subject)
    tensors, parts, offset = [], [], 0
    for name, parameter in model.model.named_parameters():
        values = parameter.detach().float().cpu().numpy().astype("<f4")
        tensors.append({"name": name, "shape": list(values.shape), "offset": offset})
        parts.append(values.tobytes())
        offset += values.nbytes
    words = tokenizer.convert_ids_to_tokens(range(model.config.vocab_size))
    eos = getattr(model.generation_config, "eos_token_id", None)
    header = {
        "config": _config(model),
        "tensors": tensors,
        "vocabulary": words,
        "special": sorted(tokenizer.all_special_ids),
        "start": list(tokenizer("")["input_ids"]),
        "stop": sorted(stop_tokens(eos, [words.index(STOP)])),
    }
    return BrowserModel(header, b"".join(parts))


def refusal(subject: Subject) -> str:
    """Return why a model does not run in the browser; empty if it does."""
    architecture, config = subject.anatomy.architecture, subject.model.config
    if config.model_type != FAMILY:
        return f"the page has a forward pass of RecurrentGemma in JavaScript, and none of {architecture}"
    if subject.tokenizer is None or not is_toy(subject.tokenizer):
        return "the page can tokenize the toy language only"
    if subject.anatomy.parameters > MOST_PARAMETERS:
        return f"{subject.anatomy.parameters:,} parameters are more than the {MOST_PARAMETERS:,} that fit into the page"
    if config.hidden_activation != ACTIVATION or not config.tie_word_embeddings:
        return f"the page's forward pass has {ACTIVATION} and tied embeddings only"
    sizes = {name: tuple(parameter.shape) for name, parameter in subject.model.named_parameters()}
    if any(name.endswith("q_proj.weight") and shape[0] != _width(config) for name, shape in sizes.items()):
        return "heads were pruned, and the page's forward pass has as many heads in every layer"
    return ""


def _width(config: Any) -> int:
    return int(config.num_attention_heads * config.head_dim)


def _config(model: Any) -> dict[str, Any]:
    config = model.config
    rope = config.rope_parameters
    return {
        "layers": ["attention" if kind == "sliding_attention" else "recurrent" for kind in config.layers_block_type],
        "hidden": config.hidden_size,
        "vocabulary": config.vocab_size,
        "heads": config.num_attention_heads,
        "kvHeads": config.num_key_value_heads,
        "headDim": config.head_dim,
        "rotary": int(config.head_dim * rope.get("partial_rotary_factor", 1.0)),
        "theta": rope["rope_theta"],
        "attentionBias": config.attention_bias,
        "window": config.attention_window_size,
        "width": config.lru_width,
        "blocks": config.num_attention_heads,
        "taps": config.conv1d_width,
        "epsilon": config.rms_norm_eps,
        "softCap": config.logits_soft_cap,
        "embeddingScale": float(model.model.normalizer),
    }
