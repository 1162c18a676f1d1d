"""Write tiny checkpoints in the layouts in which the families of `tiny.py` are published.

`tiny.build` makes models in memory from text configurations. Public checkpoints differ from that: composite configurations
with a vision tower, prefixes of tensor names, tensors of parts that a causal model does not have, several files with an
index, tied and untied heads, entries under older names, a chat template, and code of their own beside an in-library class.
"""

# ruff: noqa: C408  (keyword arguments of configurations read best as such)

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from safetensors.torch import load_file, save_file

from tiny import ARCHITECTURES, build, draw_weights

Layout = Literal["published", "older", "other head"]
LAYOUTS: tuple[Layout, ...] = ("published", "older", "other head")
Entries = dict[str, Any]


@dataclass(frozen=True)
class Published:
    """What distinguishes a family's public checkpoints from a model that is saved from memory.

    `names` are tensor names that the public files have: the writer of these tests must produce them.
    """

    names: tuple[str, ...]
    text: str = ""  # the architecture of its text part, where that has another name
    config_class: str = ""  # of a composite configuration; empty: the text configuration is the whole
    model_class: str = ""
    parts: Entries = field(default_factory=dict)  # entries of a composite configuration beside `text_config`
    extra: tuple[str, ...] = ()  # tensors that no causal model has: multi-token prediction
    own_code: bool = False  # config.json has an auto_map, and the directory the code that it names
    older: Callable[[Entries], Entries] = lambda text: {}  # entries under the names of earlier public checkpoints


_VISION = dict(
    depth=1,
    hidden_size=16,
    num_heads=2,
    intermediate_size=16,
    out_hidden_size=32,
    patch_size=4,
    num_position_embeddings=16,
    deepstack_visual_indexes=[],
)
_TOWER = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, patch_size=4)
_IMAGES = dict(image_token_id=120, video_token_id=121)
_MTP = ("mtp.fc.weight", "mtp.layers.0.input_layernorm.weight", "mtp.norm.weight")
_QWEN_NAMES = ("model.language_model.layers.0.linear_attn.in_proj_qkv.weight", "model.visual.blocks.0.attn.qkv.weight")
_EXPERT = "model.language_model.layers.0.mlp.experts.0.gate_proj.weight"


def _renamed(key: str, **kinds: str) -> Callable[[Entries], Entries]:
    """Layer types in the words of earlier configurations."""
    return lambda text: {key: [kinds.get(kind, kind) for kind in text[key]]}


def _nemotron(text: Entries) -> Entries:
    letters = {"linear_attention": "M", "mlp": "-", "full_attention": "*", "moe": "E"}
    kinds = text["layers_block_type"]
    pattern = "".join(letters[kind] for kind in kinds)
    return dict(layers_block_type=None, hybrid_override_pattern=pattern, num_hidden_layers=len(kinds))


def _lfm2(text: Entries) -> Entries:
    places = [i for i, kind in enumerate(text["layer_types"]) if kind == "full_attention"]
    return dict(layer_types=None, full_attn_idxs=places, block_ff_dim=text["intermediate_size"], conv_dim=text["hidden_size"])


def _kimi(text: Entries) -> Entries:
    def numbers(wanted: str) -> list[int]:  # counted from 1
        return [i for i, kind in enumerate(text["layer_types"], 1) if kind == wanted]

    linear = dict(
        full_attn_layers=numbers("full_attention"),
        kda_layers=numbers("linear_attention"),
        head_dim=text["linear_head_dim"],
        num_heads=text["linear_num_heads"],
        short_conv_kernel_size=text["linear_conv_kernel_dim"],
    )
    return dict(layer_types=None, linear_attn_config=linear)


def _interval(text: Entries) -> Entries:
    return dict(layer_types=None, full_attention_interval=1 + text["layer_types"].index("full_attention"))


# Families that are refused: configuration class, fields, and the reason that is given.
_SHORT = dict(vocab_size=128, hidden_size=32, num_hidden_layers=4)
_HEADS = dict(_SHORT, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, sliding_window=8)
_EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2)
_INKLING2 = dict(
    {key: value for key, value in _HEADS.items() if key not in ("intermediate_size", "sliding_window")},
    unpadded_vocab_size=128,
    head_dim=8,
    swa_num_attention_heads=4,
    swa_num_key_value_heads=2,
    swa_head_dim=8,
    sliding_window_size=8,
    moe_intermediate_size=16,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_layers_per_attn_res_block=2,
)
_SINKS = "its attention is more than scaled dot products"
_STATE = "its state is kept outside of transformers' cache classes"
REFUSED: dict[str, tuple[str, Entries, str]] = {
    "granite_swa": ("GraniteSWAConfig", _HEADS, _SINKS),
    "granitemoe_swa": ("GraniteMoeSWAConfig", dict(_HEADS, **_EXPERTS), _SINKS),
    "gpt_oss": ("GptOssConfig", dict(_HEADS, head_dim=8, **_EXPERTS), _SINKS),
    "gemma2": ("Gemma2Config", dict(_HEADS, head_dim=8), _SINKS),
    "inkling2": ("Inkling2TextConfig", _INKLING2, _SINKS),
    "rwkv": ("RwkvConfig", dict(_SHORT, context_length=64), _STATE),
    "xlstm": ("xLSTMConfig", dict(_SHORT, num_heads=4, chunk_size=8), _STATE),
}
REFUSED = {name: row for name, row in REFUSED.items() if hasattr(transformers, row[0])}


def _known(name: str, published: Published) -> bool:
    """Whether the installed version of transformers has this family."""
    return hasattr(transformers, published.config_class or ARCHITECTURES.get(name, ("?",))[0])


PUBLISHED: dict[str, Published] = {
    "recurrent_gemma": Published(("model.layers.0.temporal_block.rg_lru.recurrent_param", "model.final_norm.weight")),
    "jamba": Published(
        ("model.layers.1.feed_forward.experts.0.gate_proj.weight", "model.layers.0.mamba.x_proj.weight"), own_code=True
    ),
    "bamba": Published(("model.layers.0.mamba.in_proj.weight", "model.final_layernorm.weight")),
    "zamba": Published(
        ("model.layers.2.shared_transf.self_attn.q_proj.weight", "model.layers.2.mamba_decoder.mamba.in_proj.weight"),
        older=_renamed("layers_block_type", linear_attention="mamba"),
    ),
    "zamba2": Published(
        ("model.layers.2.shared_transformer.self_attn.q_proj.weight", "model.layers.2.linear.weight"),
        older=_renamed("layers_block_type", linear_attention="mamba"),
    ),
    "falcon_h1": Published(("model.layers.0.mamba.in_proj.weight", "model.layers.0.feed_forward.gate_proj.weight")),
    "granitemoehybrid": Published(
        ("model.layers.0.block_sparse_moe.input_linear.weight", "model.layers.0.shared_mlp.input_linear.weight"),
        older=_renamed("layer_types", linear_attention="mamba", full_attention="attention"),
    ),
    "nemotron_h": Published(
        ("backbone.embeddings.weight", "backbone.layers.0.mixer.in_proj.weight", "backbone.norm_f.weight"),
        own_code=True,
        older=_nemotron,
    ),
    "lfm2": Published(("model.layers.0.conv.conv.weight", "model.embedding_norm.weight"), older=_lfm2),
    "lfm2_moe": Published(("model.layers.2.feed_forward.experts.0.w1.weight", "model.embedding_norm.weight")),
    "qwen3_next": Published(
        ("model.layers.0.linear_attn.in_proj_qkvz.weight", "model.layers.0.mlp.experts.0.gate_proj.weight"),
        extra=_MTP,
        older=_interval,
    ),
    "qwen3_5": Published(
        _QWEN_NAMES,
        config_class="Qwen3_5Config",
        model_class="Qwen3_5ForConditionalGeneration",
        parts=dict(_IMAGES, vision_config=_VISION),
        extra=_MTP,
    ),
    "qwen3_5_moe": Published(
        (*_QWEN_NAMES, _EXPERT),
        config_class="Qwen3_5MoeConfig",
        model_class="Qwen3_5MoeForConditionalGeneration",
        parts=dict(_IMAGES, vision_config=_VISION),
        extra=_MTP,
    ),
    "minimax": Published(("model.layers.0.block_sparse_moe.experts.0.w1.weight", "model.layers.0.self_attn.qkv_proj.weight")),
    "olmo_hybrid": Published(("model.layers.0.linear_attn.q_conv1d.weight", "model.layers.0.linear_attn.a_proj.weight")),
    "kimi_linear": Published(
        ("model.layers.0.self_attn.q_conv1d.weight", "model.layers.1.block_sparse_moe.experts.0.w1.weight"),
        own_code=True,
        older=_kimi,
    ),
    "bailing_hybrid": Published(("model.word_embeddings.weight", "model.layers.0.attention.A_log"), own_code=True),
    "zaya": Published(("model.layers.0.self_attn.qkv_proj.conv_qk_depthwise.weight",)),
    "inkling": Published(
        ("model.llm.layers.0.attn.wq_du.weight",),
        config_class="InklingConfig",
        model_class="InklingForConditionalGeneration",
        parts=dict(
            vision_config=dict(patch_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2),
            audio_config=dict(n_mel_bins=8, mel_vocab_size=16),
            image_token_id=120,
            audio_token_id=121,
        ),
    ),
    "glm5_next": Published(("model.language_model.layers.0.self_attn.q_conv1d.weight", "model.visual.blocks.0.attn.qkv.weight")),
    "qwen4_exp": Published(
        (*_QWEN_NAMES, _EXPERT),
        config_class="Qwen4ExpConfig",
        model_class="Qwen4ExpForConditionalGeneration",
        parts=dict(_IMAGES, vision_config=_VISION),
        extra=_MTP,
    ),
    "lfm3": Published(("model.layers.0.conv.conv.weight", "model.embedding_norm.weight")),
    "lfm2_vl": Published(
        ("model.language_model.layers.0.conv.conv.weight", "model.multi_modal_projector.linear_1.weight"),
        text="lfm2",
        config_class="Lfm2VlConfig",
        model_class="Lfm2VlForConditionalGeneration",
        parts=dict(
            vision_config=dict(_TOWER, model_type="siglip2_vision_model", num_patches=16),
            image_token_id=120,
            projector_hidden_size=16,
        ),
    ),
    "lfm3_vl": Published(
        ("model.language_model.layers.0.conv.conv.weight", "model.multi_modal_projector.linear_1.weight"),
        text="lfm3",
        config_class="Lfm3VlConfig",
        model_class="Lfm3VlForConditionalGeneration",
        parts=dict(_IMAGES, vision_config=dict(_TOWER, num_key_value_heads=2), projector_hidden_size=16),
    ),
    "nemotron_h_omni": Published(
        ("language_model.backbone.layers.0.mixer.in_proj.weight", "mlp1.1.weight"),
        text="nemotron_h",
        config_class="NemotronH_Omni_Reasoning_V3_Config",
        model_class="NemotronH_Omni_Reasoning_V3",
        parts=dict(
            _IMAGES,
            vision_config=dict(_TOWER, image_size=16, video_temporal_patch_size=2),
            projector_hidden_size=16,
            vision_hidden_size=16,
        ),
    ),
    "minicpmv4_6": Published(
        ("model.language_model.layers.0.linear_attn.in_proj_qkv.weight", "model.merger.mlp.0.linear_1.weight"),
        text="qwen3_5",
        config_class="MiniCPMV4_6Config",
        model_class="MiniCPMV4_6ForConditionalGeneration",
        parts=dict(_IMAGES, vision_config=dict(_TOWER, image_size=16), insert_layer_id=0, image_size=16),
    ),
    "hrm_text": Published(("model.H_module.layers.0.attn.gqkv_proj.weight", "model.z_L_init")),
}

PUBLISHED = {name: row for name, row in PUBLISHED.items() if row.text in ("", *ARCHITECTURES) and _known(name, row)}


def write(name: str, layout: Layout, folder: Path) -> Any:
    """Write a family's checkpoint in one layout and return the model that it was written from."""
    published = PUBLISHED[name]
    model = _composite(name, published, layout) if published.config_class else _text_only(name, layout)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.copy_(tensor.bfloat16())
    stored = copy.deepcopy(model).to(torch.bfloat16)
    stored.save_pretrained(folder, max_shard_size="60KB" if layout == "published" else "1GB")
    if layout == "published":
        add_tensors(folder, published.extra)
        (folder / "chat_template.jinja").write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    else:
        _edit_config(folder, published, layout)
    return model


def _tied(name: str, layout: Layout) -> Entries:
    """The usual head of a family, or the other one of tied and untied."""
    config = getattr(transformers, ARCHITECTURES[PUBLISHED[name].text or name][0])()
    usual = bool(getattr(config.get_text_config(decoder=True), "tie_word_embeddings", False))
    return dict(tie_word_embeddings=usual != (layout == "other head"))


def _text_only(name: str, layout: Layout) -> Any:
    return build(name, **_tied(name, layout))


def _composite(name: str, published: Published, layout: Layout) -> Any:
    tied = _tied(name, layout)
    text = {**copy.deepcopy(ARCHITECTURES[published.text or name][2]), **tied}
    config = getattr(transformers, published.config_class)(text_config=text, **copy.deepcopy(published.parts), **tied)
    torch.manual_seed(0)
    return draw_weights(getattr(transformers, published.model_class)(config), 0).eval()


def write_refused(name: str, folder: Path) -> str:
    """Write a checkpoint of a family that is refused and return the reason."""
    config_class, fields, reason = REFUSED[name]
    config = getattr(transformers, config_class)(**fields)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return reason


def add_tensors(folder: Path, names: tuple[str, ...]) -> None:
    """Append tensors to the last file and to the index."""
    if not names:
        return
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    file = sorted(set(index["weight_map"].values()))[-1]
    tensors = load_file(folder / file) | {name: torch.ones(4, dtype=torch.bfloat16) for name in names}
    save_file(tensors, folder / file, metadata={"format": "pt"})
    index["weight_map"] |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _edit_config(folder: Path, published: Published, layout: Layout) -> None:
    """Give config.json the entries of earlier checkpoints, and code of its own where the family has it."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if layout == "older":
        text = config.get("text_config", config)
        for entries in {id(x): x for x in (config, text)}.values():
            if "dtype" in entries:
                entries["torch_dtype"] = entries.pop("dtype")
        text |= published.older(text)
        for key in [key for key, value in text.items() if value is None]:
            del text[key]
    if published.own_code:
        code = {"AutoConfig": "own_code.OwnConfig", "AutoModelForCausalLM": "own_code.OwnModel"}
        config["auto_map"] = code
        (folder / "own_code.py").write_text("raise SystemExit('the code of a checkpoint was executed')\n")
    path.write_text(json.dumps(config))
