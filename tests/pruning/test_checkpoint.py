"""Pruned models as directories: read back they are what was in memory, with stock transformers where it has the words."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kept import PRUNED, REFUSED, pruned, stock_logits, stock_without
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import needlework as nw
from cases import WITH_HEADS, apart, each, subject, tokens
from needlework.anatomy import Head
from needlework.pruning.prune import Pruned, read_back, save

NOT_STOCK = REFUSED | {  # why stock transformers cannot load fewer heads, even in equal numbers
    "recurrent_gemma": "would also change model.layers.0.temporal_block.rg_lru.input_gate_bias",
    "minimax": "would also change model.layers.0.self_attn.diagonal_decay",
    "glm5_next": "transformers has no causal language model for 'glm5_next'",
}


def written(name: str, which: str, folder: Path, others: str = "none") -> Pruned:
    smaller, _ = pruned(subject(name), which, others)
    save(smaller, folder, torch.float32)
    return smaller


@pytest.mark.slow
@each(PRUNED)
def test_a_directory_is_the_model_that_was_in_memory(name: str, tmp_path: Path) -> None:
    """Every second one with unequal groups and layers, the others with a layer that has no heads."""
    smaller = written(name, "uneven" if PRUNED.index(name) % 2 else "first layer empty", tmp_path)
    read = read_back(smaller, tmp_path)
    ids = tokens(2, 14)
    assert apart(read.logits(ids, prompt_tokens=9), smaller.subject.logits(ids, prompt_tokens=9)) <= 1e-5
    assert read.anatomy == smaller.subject.anatomy
    whole, small, stored = (
        sum(x.numel() for x in tensors.values())
        for tensors in (subject(name).model.state_dict(), read.model.state_dict(), load_file(tmp_path / "model.safetensors"))
    )
    assert stored <= small < whole


@pytest.mark.slow
@each(WITH_HEADS)
def test_uniform_is_loaded_by_stock_transformers_or_refused_with_a_reason(name: str, tmp_path: Path) -> None:
    """The numbers of the whole stock model with the other heads' output columns zeroed, by transformers alone."""
    whole = subject(name)
    order = nw.Ranking(order=whole.anatomy.heads[::-1])
    if name in NOT_STOCK:
        with pytest.raises(nw.NeedleworkError, match=NOT_STOCK[name]):
            nw.prune(whole, f"{saved(order, tmp_path)}:{len(order.order) // 2}", tmp_path / "half", uniform=True, samples=0)
        return
    done = nw.prune(whole, f"{saved(order, tmp_path)}:{len(order.order) // 2}", tmp_path / "half", uniform=True, samples=0)
    assert done.record["loads_with"] == "AutoModelForCausalLM"
    assert "needlework" not in json.loads((tmp_path / "half" / "config.json").read_text())
    kept = tuple(Head(int(layer), i) for layer, row in done.record["layers"].items() for i in row["kept"])
    assert len({tuple(row["after"]) for row in done.record["layers"].values()}) == 1
    assert done.record["heads"]["zero"] == 0
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "half").eval()
    ids = tokens(2, 14)
    assert apart(stock_logits(stock, ids), stock_logits(stock_without(name, kept), ids)) <= 1e-4


def saved(ranking: nw.Ranking, folder: Path) -> Path:
    ranking.save(folder / "order.json")
    return folder / "order.json"


@pytest.mark.slow
def test_stock_transformers_alone_gives_the_same_logits(tmp_path: Path) -> None:
    smaller = written("llama", "equal", tmp_path)
    ids = tokens(1, 12)
    script = (
        "import sys, json, torch; from transformers import AutoModelForCausalLM\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})\n"
        f"logits = model(input_ids=torch.tensor({ids.tolist()})).logits\n"
        "assert not any(name.startswith('needlework') for name in sys.modules)\n"
        "print(json.dumps(logits.tolist()))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert apart(torch.tensor(json.loads(done.stdout.splitlines()[-1])), smaller.subject.logits(ids)) <= 1e-5


def test_stock_transformers_refuses_what_it_cannot_say(tmp_path: Path) -> None:
    written("llama", "uneven", tmp_path)
    with pytest.raises(Exception, match=r"size mismatch|ignore_mismatched_sizes|shape"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_streaming_heads_are_read_back(tmp_path: Path) -> None:
    smaller = written("llama", "first layer empty", tmp_path, "window=4,sinks=2")
    read = read_back(smaller, tmp_path)
    assert read.body.streams == smaller.streams is not None
    ids = tokens(1, 20)
    assert apart(read.logits(ids), subject("llama").logits(ids, smaller.equals)) <= 1e-4


def test_half_precision_stays_half_on_disk(tmp_path: Path) -> None:
    smaller, _ = pruned(subject("jamba"), "uneven")
    save(smaller, tmp_path, torch.bfloat16)
    assert {x.dtype for x in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}
    assert nw.load(tmp_path, dtype="auto").model.dtype == torch.bfloat16


def test_deepmind_s_window_is_counted_once(tmp_path: Path) -> None:
    subject("recurrent_gemma").model.save_pretrained(tmp_path / "whole")
    whole = nw.load(tmp_path / "whole", window="deepmind")
    smaller, _ = pruned(whole, "uneven")
    save(smaller, tmp_path / "small", torch.float32)
    windows = {nw.load(tmp_path / "small", window=rule).anatomy.window for rule in ("transformers", "deepmind")}  # type: ignore[arg-type]
    assert windows == {8, 9}


@pytest.mark.parametrize(
    "entry",
    [
        {"layers": "all"},
        {"layers": [{"path": "model.layers.0.self_attn", "heads": [8, 2], "of": [4, 2], "dims": [8, 8]}]},
        {"layers": [{"path": "model.layers.0.self_attn", "heads": [1, 1], "of": [4, 0], "dims": [8, 8]}]},
        {"layers": [{"path": "model.layers.77.self_attn", "heads": [1, 1], "of": [4, 2], "dims": [8, 8]}]},
        {"layers": [{"path": "__class__", "heads": [1, 1], "of": [4, 2], "dims": [8, 8]}]},
        {"streaming": {"window": 0, "sinks": 0, "kv_heads": {"0": [0]}}},
        {"streaming": {"window": 4, "sinks": 0, "kv_heads": {"0": [7]}}},
        {"streaming": {"window": 4, "sinks": 0, "kv_heads": {"99": [0]}}},
        {"streaming": [4, 2]},
    ],
)
def test_a_configuration_may_say_anything(entry: object, tmp_path: Path) -> None:
    subject("llama").model.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"needlework": entry}))
    with pytest.raises(nw.NeedleworkError):
        nw.load(tmp_path)
