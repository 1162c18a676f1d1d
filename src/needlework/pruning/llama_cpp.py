"""Write a model as a GGUF file that llama.cpp loads (`nw.write_gguf`): Llama and Jamba classes, whole or with heads removed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from needlework.anatomy import AttentionPart
from needlework.errors import NeedleworkError, short_repr
from needlework.files import atomic_path
from needlework.model.pruned import ENTRY, NoHeads
from needlework.subject import Subject, load

DTYPES = {"float32": ("F32", "ALL_F32"), "float16": ("F16", "MOSTLY_F16"), "bfloat16": ("BF16", "MOSTLY_BF16")}
_ALWAYS_F32 = ("ssm_a", "ssm_conv1d.weight", "ffn_gate_inp.weight")  # ggml computes with these in float32
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class GGUFFile:
    """A GGUF file that was written.

    Attributes:
        path: The file.
        architecture: llama.cpp's name: "llama", "deci" (a Llama whose layers have unequal numbers of heads) or "jamba".
        tokenizer: llama.cpp's name, with the rule that splits words; "none": token ids are given and returned.
        bytes: Size of the file.
        kv_heads: Key-value heads of each layer, 0 without attention; padded heads count.
    """

    path: Path
    architecture: str
    tokenizer: str
    bytes: int
    kv_heads: tuple[int, ...]


def write_gguf(model: str | Path | Subject, out: str | Path, dtype: str | None = None) -> GGUFFile:
    """Write a model as a GGUF file, with the tensors and metadata that llama.cpp reads for its architecture.

    Args:
        model: A name or path, also of a pruned model, or a loaded one.
        out: The new file.
        dtype: Of matrices: "float32", "float16" or "bfloat16"; None: that of the weights. Vectors are float32.

    Raises:
        NeedleworkError: llama.cpp has no such model, or the file is there already.
    """
    import gguf

    place = Path(out)
    if place.exists():
        raise NeedleworkError(f"{short_repr(str(out))} is there already, and nothing is overwritten: give another --out")
    subject = model if isinstance(model, Subject) else load(model, dtype="auto")
    if reason := not_llama_cpp(subject):
        raise NeedleworkError(f"llama.cpp cannot load this model: {reason}")
    config, name = subject.model.config, dtype or str(subject.model.dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise NeedleworkError(f"dtype {name!r} is not known; choose from {', '.join(DTYPES)}")
    stored, file_type = gguf.GGMLQuantizationType[DTYPES[name][0]], gguf.LlamaFileType[DTYPES[name][1]]
    heads = _head_counts(subject)
    architecture = "jamba" if config.model_type == "jamba" else "llama" if len(set(heads)) == 1 else "deci"
    place.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(place) as half:
        writer = gguf.GGUFWriter(half, architecture)
        writer.add_name(subject.body.source.name if subject.body.source else subject.anatomy.architecture)
        writer.add_file_type(file_type)
        _add_sizes(writer, subject, heads)
        tokenizer = _add_tokenizer(writer, subject.tokenizer, config.vocab_size)
        names = gguf.get_tensor_name_map(next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == architecture), len(heads))
        for theirs, tensor in _tensors(subject, heads):
            own = names.get_name(theirs, try_suffixes=(".weight", ".bias")) or theirs
            kind = gguf.GGMLQuantizationType.F32 if tensor.ndim == 1 or own.endswith(_ALWAYS_F32) else stored
            data = tensor.detach().float().contiguous().cpu().numpy()
            writer.add_tensor(own, gguf.quants.quantize(data, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return GGUFFile(place, architecture, tokenizer, place.stat().st_size, tuple(kv for _, kv in heads))


def not_llama_cpp(subject: Subject) -> str:
    """Return why llama.cpp cannot load a model; empty if it can."""
    model, config = subject.model, subject.model.config
    if config.model_type not in ("llama", "jamba"):
        return (
            f"needlework writes Llama and Jamba classes, and this is {subject.anatomy.architecture}. llama.cpp's own converter"
            " (convert_hf_to_gguf.py) knows more classes, and reads what stock transformers loads"
        )
    if getattr(config, "quantization_config", None) is not None:
        return "its weights are quantised: write the checkpoint that it was made from, and quantise the file"
    if "streaming" in (getattr(config, ENTRY, None) or {}):
        return "it has no streaming heads; remove the other heads (needlework prune --others none)"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}, and llama.cpp has silu there"
    empty = [module for module in model.modules() if isinstance(module, NoHeads)]
    if config.model_type == "jamba":
        return _not_jamba(subject, [module.layer_idx for module in empty])
    if any(module.layer_idx == 0 for module in empty):
        return "its first layer has no heads, and llama.cpp reads their width there; keep a head of layer 0, or prune --uniform"
    if any(module.bias is not None for module in empty):
        return "a layer without heads has an output bias, which llama.cpp leaves out there; prune --uniform"
    kind = config.rope_parameters["rope_type"]
    return "" if kind in ("default", "linear", "llama3") else f"rotary positions of the kind {kind!r} are not written"


def _not_jamba(subject: Subject, empty: list[int]) -> str:
    config, parts = subject.model.config, subject.anatomy.attention_parts()
    if empty:
        return (
            f"layer {empty[0]} has no attention heads (n_head_kv = 0), which means a recurrent layer there; keep a head of each"
            " attention layer: needlework prune --uniform"
        )
    if config.mamba_expand != 2 or config.mamba_proj_bias:
        return "its Mamba layers have another width than twice the hidden size, or biases in their projections"
    for layer, part in parts:
        if config.hidden_size % part.key_dim or _padded(part, config.hidden_size // part.key_dim) is None:
            most = config.hidden_size // part.key_dim
            return (
                f"queries are as wide as the hidden size there, {most} heads of {part.key_dim} in each layer, and layer {layer}"
                f" has {part.query_heads} in {part.kv_heads} groups; keep at most {most}: needlework prune --uniform"
            )
    return ""


def _padded(part: AttentionPart, query_heads: int) -> int | None:
    """Return the smallest number of kv heads whose groups, filled with zeros up to this number of query heads, hold a layer."""
    group = part.query_heads // part.kv_heads
    fit = (kv for kv in range(part.kv_heads, query_heads + 1) if query_heads % kv == 0 and query_heads // kv >= group)
    return next(fit, None)


def _head_counts(subject: Subject) -> list[tuple[int, int]]:
    """Return the numbers of query and kv heads that llama.cpp sees in each layer; (0, 0) without attention."""
    config, parts = subject.model.config, dict(subject.anatomy.attention_parts())
    counts = []
    for layer in range(config.num_hidden_layers):
        part = parts.get(layer)
        if part is not None and config.model_type == "jamba":
            width = config.hidden_size // part.key_dim
            counts.append((width, _padded(part, width) or 0))
        else:
            counts.append((part.query_heads, part.kv_heads) if part else (0, 0))
    return counts


def _add_sizes(writer: Any, subject: Subject, heads: list[tuple[int, int]]) -> None:
    config, (_, part) = subject.model.config, next(iter(subject.anatomy.attention_parts()))
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_key_length(part.key_dim)
    writer.add_value_length(part.value_dim)
    query, kv = ([pair[side] for pair in heads] for side in (0, 1))
    if config.model_type == "jamba":
        writer.add_head_count(max(query))
        writer.add_head_count_kv(kv)
        writer.add_ssm_conv_kernel(config.mamba_d_conv)
        writer.add_ssm_inner_size(config.mamba_expand * config.hidden_size)
        writer.add_ssm_state_size(config.mamba_d_state)
        writer.add_ssm_time_step_rank(config.mamba_dt_rank)
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        return
    same = len(set(heads)) == 1
    writer.add_head_count(query[0] if same else query)
    writer.add_head_count_kv(kv[0] if same else kv)
    writer.add_rope_dimension_count(part.key_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])


def _tensors(subject: Subject, heads: list[tuple[int, int]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in llama.cpp's layout, most of them under the names that they have in transformers."""
    model, parts = subject.model, dict(subject.anatomy.attention_parts())
    for name, tensor in model.state_dict().items():
        layer = int(match[1]) if (match := re.search(r"layers\.(\d+)\.", name)) else -1
        piece = match[1] if (match := re.search(r"self_attn\.([qkvo])_proj", name)) else ""
        tied = name == "lm_head.weight" and model.config.tie_word_embeddings
        if tied or (name.endswith("input_layernorm.weight") and heads[layer] == (0, 0) and model.config.model_type == "llama"):
            continue  # a layer without attention has no norm before it there
        if piece and model.config.model_type == "jamba":
            yield name, _fill_heads(tensor, piece, parts[layer], heads[layer])
        elif piece in ("q", "k"):  # llama.cpp rotates neighbours, transformers the two halves of a head
            count = heads[layer][piece == "k"]
            yield name, torch.unflatten(tensor, 0, (count, 2, -1)).transpose(1, 2).flatten(0, 2)
        elif name.endswith("experts.gate_up_proj"):
            for half, rows in zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True):
                yield name.replace("gate_up_proj", f"{half}_proj.weight"), rows
        elif name.endswith("experts.down_proj"):
            yield f"{name}.weight", tensor
        elif name.endswith("A_log"):
            yield name, -tensor.float().exp()
        else:
            yield name, tensor.squeeze(1) if name.endswith("conv1d.weight") else tensor
    if model.config.model_type == "llama":
        base, slow = model.config.rope_parameters["rope_theta"], model.model.rotary_emb.inv_freq
        steps = torch.arange(0, 2 * len(slow), 2, device=slow.device) / (2 * len(slow))
        factors = 1 / (base**steps * slow)
        if model.config.rope_parameters["rope_type"] != "default":
            yield "rope_freqs.weight", factors


def _fill_heads(tensor: Tensor, piece: str, part: AttentionPart, counts: tuple[int, int]) -> Tensor:
    """Fill the groups of a projection with heads of zeros, which change no number."""
    (query, kv), group = counts, part.query_heads // part.kv_heads
    if piece == "o":
        return _fill_heads(tensor.T, "q", part, counts).T
    if piece == "q":
        blocks, more = torch.unflatten(tensor, 0, (part.kv_heads, group, -1)), query // kv - group
        return pad(blocks, (0, 0, 0, 0, 0, more, 0, kv - part.kv_heads)).flatten(0, 2)
    return pad(torch.unflatten(tensor, 0, (part.kv_heads, -1)), (0, 0, 0, 0, 0, kv - part.kv_heads)).flatten(0, 1)


def _add_tokenizer(writer: Any, tokenizer: Any, vocabulary: int) -> str:
    """Write the tokenizer as one of llama.cpp's, if it has one that splits text in the same way, and return its name."""
    core = getattr(tokenizer, "backend_tokenizer", None)
    state: dict[str, Any] = {"model": {"type": ""}, "pre_tokenizer": None} if core is None else json.loads(core.to_str())
    kind, split = _llama_cpp_tokenizer(state)
    writer.add_tokenizer_model(kind)
    if kind == "none":
        return kind
    from gguf import TokenType

    tokens, types = [f"[PAD{index}]" for index in range(vocabulary)], [TokenType.UNUSED] * vocabulary
    scores, merges = [-1.0] * vocabulary, state["model"].get("merges", [])
    ids = {text: index for text, index in tokenizer.get_vocab().items() if index < vocabulary}
    special = {index: token.special for index, token in tokenizer.added_tokens_decoder.items()}
    for text, index in ids.items():
        byte = kind == "llama" and re.fullmatch(r"<0x[0-9A-F]{2}>", text)
        types[index] = TokenType.BYTE if byte else TokenType.NORMAL
        if index in special:
            types[index] = TokenType.CONTROL if special[index] else TokenType.USER_DEFINED
        tokens[index] = f"▁{text}" if kind == "t5" and index not in special else text
    for rank, merge in reversed(list(enumerate(merges))):
        scores[ids.get("".join(merge), 0)] = -1.0 - rank  # of several merges into one token, the first
    if kind != "gpt2" and tokenizer.unk_token_id is not None:
        types[tokenizer.unk_token_id] = TokenType.UNKNOWN
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if kind == "gpt2":
        writer.add_token_merges([" ".join(merge) for merge in merges])
    else:
        writer.add_token_scores(scores)
        writer.add_add_space_prefix(kind == "t5" or state["pre_tokenizer"]["prepend_scheme"] != "never")
        writer.add_remove_extra_whitespaces(kind == "t5")
    for word in ("bos", "eos", "unk", "pad"):
        if (index := getattr(tokenizer, f"{word}_token_id")) is not None:
            getattr(writer, f"add_{word}_token_id")(index)
    writer.add_add_bos_token(tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id])
    writer.add_add_eos_token(False)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)
    return f"{kind} ({split})"


def _llama_cpp_tokenizer(state: dict[str, Any]) -> tuple[str, str]:
    """Return llama.cpp's names of a tokenizer and of the rule that splits its words; ("none", "") if it has none."""
    model, rule = state["model"], state["pre_tokenizer"] or {"type": ""}
    rules = rule.get("pretokenizers", [rule])
    last = rules[-1]
    if model["type"] == "WordLevel" and rule["type"] == "WhitespaceSplit" and not state["normalizer"]:
        return "t5", "default"  # a word is the only piece that begins with its space, so that the best pieces are the words
    if model["type"] == "BPE" and model["byte_fallback"] and rule["type"] == "Metaspace":
        return "llama", "default"
    if model["type"] != "BPE" or last["type"] != "ByteLevel" or last["add_prefix_space"] or state["normalizer"]:
        return "none", ""
    if len(rules) == 1 and last["use_regex"]:
        return "gpt2", "gpt-2"
    if len(rules) == 2 and rules[0] == {"type": "Digits", "individual_digits": True} and last["use_regex"]:
        return "gpt2", "smollm"
    if len(rules) == 2 and rules[0].get("pattern") == {"Regex": _LLAMA3_WORDS} and not last["use_regex"]:
        return "gpt2", "llama-bpe"
    return "none", ""
