"""GGUF files for llama.cpp: every tensor is the model's, transformers reads the Llama ones, and llama.cpp, where it is, all."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from kept import pruned
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from typer.testing import CliRunner

import needlework as nw
from cases import apart, subject, tokens
from needlework.cli import app
from needlework.pruning.llama_cpp import _LLAMA3_WORDS, write_gguf
from needlework.pruning.prune import prune_subject
from tiny import build

LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
TEXT = "The king's badge is 4719, isn't it?\n  Then the queen (who asked twice) wrote: naïve kings keep 27 keys!"


def smaller(name: str, which: str) -> nw.Subject:
    return subject(name) if which == "whole" else pruned(subject(name), which)[0].subject


def tensors(file: Path) -> dict[str, torch.Tensor]:
    read = gguf.GGUFReader(file).tensors
    return {x.name: torch.from_numpy(gguf.quants.dequantize(x.data, x.tensor_type).copy()) for x in read}


def fields(file: Path) -> dict[str, Any]:
    return {key.rpartition(".")[2]: field.contents() for key, field in gguf.GGUFReader(file).fields.items()}


@pytest.mark.parametrize("which", ["whole", "equal", "uneven"])
def test_transformers_reads_a_llama_with_equal_logits(which: str, tmp_path: Path) -> None:
    """Its own reader of GGUF files, which undoes the order of rotary halves; uneven layers are none of its classes' words."""
    model = smaller("llama", which)
    written = write_gguf(model, tmp_path / "m.gguf")
    ids = tokens(2, 14)
    if which == "uneven":
        assert written.architecture == "deci"
        assert (fields(written.path)["head_count"], written.kv_heads) == ([4, 1, 4, 1], (2, 1, 2, 1))
        return
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32).eval()
    with torch.no_grad():
        assert apart(stock(input_ids=ids, use_cache=False).logits, model.logits(ids)) <= 1e-5
    assert written.architecture == "llama"


@pytest.mark.parametrize("which", ["whole", "equal", "uneven"])
def test_every_tensor_of_a_jamba_is_in_the_file(which: str, tmp_path: Path) -> None:
    """Attention is as wide as the hidden size there: heads that are not the model's are zero."""
    model = smaller("jamba", which)
    written = write_gguf(model, tmp_path / "m.gguf")
    found, own = tensors(written.path), dict(model.model.state_dict())
    assert fields(written.path)["head_count"] == 4
    for layer in range(6):
        mine, block = f"model.layers.{layer}", f"blk.{layer}"
        if f"{mine}.mamba.D" in own:
            assert torch.equal(found.pop(f"{block}.ssm_d"), own[f"{mine}.mamba.D"])
            assert torch.allclose(found.pop(f"{block}.ssm_a").neg().log(), own[f"{mine}.mamba.A_log"], atol=1e-5)
            for theirs, name in (
                ("in", "in_proj"),
                ("x", "x_proj"),
                ("dt", "dt_proj"),
                ("out", "out_proj"),
                ("conv1d", "conv1d"),
            ):
                mixer = own[f"{mine}.mamba.{name}.weight"]
                assert torch.equal(found.pop(f"{block}.ssm_{theirs}.weight"), mixer.reshape(mixer.shape[0], mixer.shape[-1]))
                if f"{mine}.mamba.{name}.bias" in own:
                    assert torch.equal(found.pop(f"{block}.ssm_{theirs}.bias"), own[f"{mine}.mamba.{name}.bias"])
            for norm in ("dt", "b", "c"):
                assert torch.equal(found.pop(f"{block}.ssm_{norm}_norm.weight"), own[f"{mine}.mamba.{norm}_layernorm.weight"])
        else:
            part = dict(model.anatomy.attention_parts())[layer]
            kv, group, old = written.kv_heads[layer], 4 // written.kv_heads[layer], part.query_heads // part.kv_heads
            assert kv == {"whole": (2, 2), "equal": (2, 2), "uneven": (2, 1)}[which][layer == 5]
            for theirs, name in (("k", "k_proj"), ("v", "v_proj")):
                assert torch.equal(found.pop(f"{block}.attn_{theirs}.weight"), own[f"{mine}.self_attn.{name}.weight"])
            wide = {"q": found.pop(f"{block}.attn_q.weight"), "o": found.pop(f"{block}.attn_output.weight").T}
            for piece, matrix in wide.items():
                heads = matrix.reshape(kv, group, 8, 32)
                mine_too = own[f"{mine}.self_attn.{piece}_proj.weight"]
                assert torch.equal(heads[:, :old], (mine_too if piece == "q" else mine_too.T).reshape(kv, old, 8, 32))
                assert not heads[:, old:].any()
        for theirs, name in (("attn_norm", "input_layernorm"), ("ffn_norm", "pre_ff_layernorm")):
            assert torch.equal(found.pop(f"{block}.{theirs}.weight"), own[f"{mine}.{name}.weight"])
        if f"{mine}.feed_forward.router.weight" in own:
            assert torch.equal(found.pop(f"{block}.ffn_gate_inp.weight"), own[f"{mine}.feed_forward.router.weight"])
            both = [found.pop(f"{block}.ffn_{theirs}_exps.weight") for theirs in ("gate", "up")]
            assert torch.equal(torch.cat(both, 1), own[f"{mine}.feed_forward.experts.gate_up_proj"])
            assert torch.equal(found.pop(f"{block}.ffn_down_exps.weight"), own[f"{mine}.feed_forward.experts.down_proj"])
        else:
            for piece in ("gate", "up", "down"):
                assert torch.equal(found.pop(f"{block}.ffn_{piece}.weight"), own[f"{mine}.feed_forward.{piece}_proj.weight"])
    for theirs, name in (("token_embd", "model.embed_tokens"), ("output_norm", "model.final_layernorm"), ("output", "lm_head")):
        assert torch.equal(found.pop(f"{theirs}.weight"), own[f"{name}.weight"])
    assert not found


@pytest.mark.parametrize(("dtype", "most"), [("float16", 2**-11), ("bfloat16", 2**-8)])
def test_matrices_are_stored_in_a_smaller_dtype_and_vectors_are_not(dtype: str, most: float, tmp_path: Path) -> None:
    model = subject("jamba")
    whole, half = (tensors(write_gguf(model, tmp_path / f"{x}.gguf", x).path) for x in ("float32", dtype))
    for name, x in whole.items():
        exact = x.ndim == 1 or name.endswith(("ssm_a", "ssm_conv1d.weight", "ffn_gate_inp.weight"))
        assert torch.equal(x, half[name]) if exact else torch.allclose(x, half[name], rtol=most, atol=2**-25), name
        assert exact or not torch.equal(x, half[name])


def refusal(model: nw.Subject, folder: Path) -> str:
    with pytest.raises(nw.NeedleworkError) as error:
        write_gguf(model, folder / "m.gguf")
    assert not list(folder.glob("*gguf*"))
    return str(error.value)


def test_what_llama_cpp_cannot_load_is_refused_with_the_reason(tmp_path: Path) -> None:
    assert "layer 2 has no attention heads (n_head_kv = 0)" in refusal(smaller("jamba", "first layer empty"), tmp_path)
    assert "its first layer has no heads" in refusal(smaller("llama", "first layer empty"), tmp_path)
    assert "4 heads of 32 in each layer, and layer 2 has 32 in 8 groups" in refusal(nw.load("tiny-jamba"), tmp_path)
    assert "this is RecurrentGemmaForCausalLM" in refusal(nw.load("tiny-griffin-small"), tmp_path)
    assert "it has no streaming heads" in refusal(pruned(subject("llama"), "uneven", "window=8")[0].subject, tmp_path)
    biased = nw.wrap(build("llama", attention_bias=True))
    without_layer_2 = tuple(head for head in biased.anatomy.heads if head.layer != 2)
    assert "without heads has an output bias" in refusal(prune_subject(biased, without_layer_2).subject, tmp_path)
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    assert "of the kind 'yarn' are not written" in refusal(nw.wrap(build("llama", rope_parameters=yarn)), tmp_path)
    (tmp_path / "there").write_text("mine")
    with pytest.raises(nw.NeedleworkError, match="is there already"):
        write_gguf(subject("llama"), tmp_path / "there")
    assert (tmp_path / "there").read_text() == "mine"


def tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """A tokenizer of 400 pieces, learned from a few words."""
    core = Tokenizer(models.BPE(byte_fallback=kind == "llama"))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind != "llama-bpe")
    core.pre_tokenizer = {
        "gpt-2": lambda: byte_level,
        "smollm": lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level]),
        "llama-bpe": lambda: pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_LLAMA3_WORDS), "isolated"), byte_level]),
        "llama": lambda: pre_tokenizers.Metaspace(),
    }[kind]()
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)] if kind == "llama" else []
    alphabet = [] if kind == "llama" else pre_tokenizers.ByteLevel.alphabet()
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=[*special, *byte_tokens], initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator([TEXT] * 4, trainer)
    core.decoder = decoders.ByteLevel() if kind != "llama" else decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    state = json.loads(core.to_str())
    state["added_tokens"] = [one for one in state["added_tokens"] if one["content"] in special]  # bytes are pieces, not special
    core = Tokenizer.from_str(json.dumps(state))
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("kind", ["gpt-2", "smollm", "llama-bpe", "llama"])
def test_transformers_reads_the_same_tokenizer(kind: str, tmp_path: Path) -> None:
    """Pieces, their ids and the order of merges; it does not read the rule that splits words."""
    ours = tokenizer(kind)
    write_gguf(nw.wrap(build("llama", vocab_size=410), ours), tmp_path / "m.gguf")
    found = fields(tmp_path / "m.gguf")
    assert (found["model"], found["pre"]) == (("llama", "default") if kind == "llama" else ("gpt2", kind))
    assert found["tokens"] == [*ours.convert_ids_to_tokens(range(n := len(ours))), *(f"[PAD{index}]" for index in range(n, 410))]
    types = {"<unk>": 2 if kind == "llama" else 3, "<s>": 3, "</s>": 3, "<0x0A>": 6}
    assert all(found["token_type"][i] == types.get(text, 1) or text[:2] == "<0" for i, text in enumerate(found["tokens"][:n]))
    assert found["token_type"][n:] == [5] * (410 - n)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    for text in (TEXT, "a king, the kings"):
        assert theirs(text, add_special_tokens=False)["input_ids"] == ours(text, add_special_tokens=False)["input_ids"]


def test_the_toy_tokenizer_is_a_unigram_one_and_unknown_ones_are_none(tmp_path: Path) -> None:
    found = fields(write_gguf(nw.load("tiny-transformer"), tmp_path / "toy.gguf").path)
    assert (found["model"], found["add_bos_token"], found["add_space_prefix"]) == ("t5", True, True)
    assert found["tokens"][:6] == ["<pad>", "<bos>", "<eos>", "<unk>", "▁.", "▁?"]
    assert found["token_type"][:6] == [3, 3, 3, 2, 1, 1]
    odd = tokenizer("gpt-2")
    odd.backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    written = write_gguf(nw.wrap(build("llama", vocab_size=400), odd), tmp_path / "odd.gguf")
    assert written.tokenizer == "none"
    assert "tokens" not in fields(written.path)


def test_the_command_writes_a_file_and_says_what_is_in_it(tmp_path: Path) -> None:
    out = tmp_path / "m.gguf"
    done = CliRunner().invoke(app, ["gguf", "tiny-transformer", "--out", str(out), "--dtype", "float16", "--json"])
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert said == {
        "path": str(out),
        "architecture": "llama",
        "tokenizer": "t5 (default)",
        "bytes": out.stat().st_size,
        "kv_heads": [4, 4, 4, 4],
    }
    again = CliRunner().invoke(app, ["gguf", "tiny-transformer", "--out", str(out)])
    assert (again.exit_code, "is there already" in again.output) == (2, True)


def run_llama_cpp(llama_cpp: Any, file: Path, ids: Sequence[int]) -> tuple[Any, np.ndarray]:
    """The model, and its logits after each token, with a cache in float32."""
    options: dict[str, Any] = {"n_ctx": 128, "logits_all": True, "verbose": False, "n_threads": 1, "n_threads_batch": 1}
    model = llama_cpp.Llama(str(file), type_k=llama_cpp.GGML_TYPE_F32, type_v=llama_cpp.GGML_TYPE_F32, **options)
    model.eval(list(ids))
    return model, np.array(model.scores[: len(ids)])


@pytest.mark.parametrize(
    ("name", "which"),
    [(name, which) for name in ("llama", "jamba") for which in ("whole", "equal", "uneven")]
    + [("llama", "no heads in layer 2"), ("llama", "llama3 positions"), ("jamba", "three groups")],
)
def test_llama_cpp_computes_the_same(name: str, which: str, tmp_path: Path) -> None:
    """Logits of a prompt, and greedy answers token by token."""
    llama_cpp = pytest.importorskip("llama_cpp")
    if which == "no heads in layer 2":
        model = prune_subject(subject(name), tuple(head for head in subject(name).anatomy.heads if head.layer != 2)).subject
    elif which == "llama3 positions":
        model = nw.wrap(build(name, rope_parameters={**LLAMA3, "original_max_position_embeddings": 16}))
    elif which == "three groups":  # which do not divide the four heads that are as wide as the hidden size
        whole = nw.wrap(build(name, num_key_value_heads=4))
        model = prune_subject(whole, tuple(head for head in whole.anatomy.heads if head.index != 1)).subject
    else:
        model = smaller(name, which)
    written = write_gguf(model, tmp_path / "m.gguf")
    assert which != "three groups" or written.kv_heads == (0, 0, 4, 0, 0, 4)
    ids = tokens(1, 40)
    theirs, logits = run_llama_cpp(llama_cpp, written.path, ids[0].tolist())
    ours = model.logits(ids)[0].numpy()
    assert np.abs(ours - logits).max() <= 1e-4 * np.abs(ours).max()
    answer = model.generate([ids[0].tolist()], max_new_tokens=12)[0].tokens
    said = []
    for _ in range(12):
        said.append(int(np.argmax(theirs.scores[theirs.n_tokens - 1])))
        theirs.eval(said[-1:])
    assert said == list(answer)
    theirs.close()


@pytest.mark.parametrize("kind", ["toy", "gpt-2", "smollm", "llama-bpe", "llama"])
def test_llama_cpp_splits_text_in_the_same_way(kind: str, tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    model = nw.load("tiny-transformer") if kind == "toy" else nw.wrap(build("llama", vocab_size=400), tokenizer(kind))
    written = write_gguf(model, tmp_path / "m.gguf")
    theirs = llama_cpp.Llama(str(written.path), vocab_only=True, verbose=False)
    text = "the king sees the queen . my badge is 4 7 ?" if kind == "toy" else TEXT
    assert theirs.tokenize(text.encode(), add_bos=True) == model.tokenizer(text)["input_ids"]
    assert theirs.detokenize(model.tokenizer(text, add_special_tokens=False)["input_ids"]).decode().strip() == text
    theirs.close()
