"""`nw.budget`: bytes as the caches of real runs have them, the heads that fit, and the forms for other programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import needlework as nw
from cases import ALL, HYBRIDS, each, subject
from needlework.anatomy import Head
from needlework.cli import app
from needlework.heads import foreign
from needlework.interventions.ranking import Origin, Ranking
from needlework.receipts import Tally
from tiny import build

TOKENS = 24


def bytes_of_run(of: nw.Subject, tokens: int) -> tuple[int, int]:
    """The bytes of the KV cache and of the recurrent states after a prompt was read."""
    body = of.body
    ids = (torch.arange(tokens, device=body.device) * 7 % body.anatomy.vocabulary)[None]
    with body.session():
        rows, memory = body.compile([[]], [0], "prefill", torch.zeros(1, dtype=torch.int64)), body.new_memory(1)
        body.feed(ids, memory, "prefill", rows, Tally(1))
        return memory.nbytes("kv"), memory.nbytes("recurrent")


@each(ALL)
def test_bytes_are_those_of_a_run(name: str) -> None:
    whole = subject(name)
    found = nw.budget(whole, context=TOKENS, batch=3)
    kv, state = bytes_of_run(whole, TOKENS)
    windows = [part for _, part in whole.anatomy.attention_parts() if part.window is not None and part.window < TOKENS]
    spared = sum(part.kv_bytes_per_token for part in windows)  # some caches drop the key that leaves the window next
    assert found.kv_bytes - spared <= kv <= found.kv_bytes
    assert found.state_bytes == state
    weights = sum(x.numel() * x.element_size() for x in whole.model.parameters())
    assert (found.weight_bytes, found.total) == (weights, weights + 3 * (found.kv_bytes + found.state_bytes))


def held_bytes(value: Any) -> int:
    """The bytes of all tensors in one of transformers' own caches."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, (list, tuple, dict)):
        return sum(map(held_bytes, value.values() if isinstance(value, dict) else value))
    return held_bytes(vars(value)) if type(value).__module__.startswith("transformers") else 0


@each([name for name in ALL if name != "recurrent_gemma"])  # it keeps states in its modules, not in a cache
def test_bytes_are_those_of_the_cache_of_stock_transformers(name: str) -> None:
    found, stock = nw.budget(subject(name), context=TOKENS), build(name)
    with torch.no_grad():
        output = stock(torch.arange(TOKENS)[None] % subject(name).anatomy.vocabulary, use_cache=True)
    cache = output.past_key_values if "past_key_values" in output else output.cache_params
    windows = [part for _, part in subject(name).anatomy.attention_parts() if part.window and part.window < TOKENS]
    spared = sum(part.kv_bytes_per_token for part in windows)
    total = found.kv_bytes + found.state_bytes
    assert total - spared <= held_bytes(cache) <= total


@pytest.mark.parametrize("name", ["llama", "jamba"])
def test_streaming_bytes_are_those_of_a_streaming_checkpoint(name: str, tmp_path: Path) -> None:
    whole = subject(name)
    ranking = Ranking(order=whole.anatomy.heads)
    all_heads = nw.budget(whole, context=TOKENS)
    found = nw.budget(whole, context=TOKENS, memory=all_heads.total - 1, ranking=ranking, window=5, sinks=2)
    full = [(layer.index, kv) for layer in found.layers for kv in layer.full]
    size = {i: part.query_heads // part.kv_heads for i, part in whole.anatomy.attention_parts()}
    kept = [(layer, kv * size[layer]) for layer, kv in full]
    pruned = nw.prune(whole, kept, tmp_path / "small", others="window=5,sinks=2", samples=0)
    assert 0 < len(full) < len(whole.anatomy.heads)
    held = bytes_of_run(pruned.subject, TOKENS)[0]
    streaming = [layer for layer in found.layers if layer.streaming]
    parts = [whole.anatomy.attention(layer.index) for layer in streaming]
    newest = sum(p.kv_bytes_per_token // p.kv_heads * len(s.streaming) for p, s in zip(parts, streaming, strict=True))
    positions = 8 * (5 + 2) * len(streaming)  # of the keys that are held, for each streaming layer
    assert found.kv_bytes == held - positions + newest < all_heads.kv_bytes  # a window counts the key of the query itself


@settings(max_examples=60, deadline=None)
@given(data=st.data(), name=st.sampled_from(HYBRIDS[:4]), batch=st.integers(1, 5), context=st.integers(1, 200))
def test_as_many_heads_as_fit_stay_in_the_order_of_the_ranking(data: st.DataObject, name: str, batch: int, context: int) -> None:
    whole = subject(name)
    anatomy = whole.anatomy
    order = data.draw(st.permutations(list(anatomy.heads)))
    fixed: dict[str, Any] = {"context": context, "batch": batch, "window": 8, "sinks": 1, "ranking": Ranking(order=order)}
    most = nw.budget(whole, **fixed)
    parts = dict(anatomy.attention_parts())
    kv_order = list(dict.fromkeys(Head(h.layer, h.index * parts[h.layer].kv_heads // parts[h.layer].query_heads) for h in order))

    def total(kept: list[Head]) -> int:  # the sum of the definition, head by head
        kv = 0
        for layer, part in parts.items():
            keys = min(context, part.window or context)
            for head in range(part.kv_heads):
                kv += part.kv_bytes_per_token // part.kv_heads * (keys if (layer, head) in kept else min(keys, 9))
        return most.weight_bytes + batch * (kv + anatomy.state_bytes)

    memory = data.draw(st.integers(total([]), most.total + 5))
    found = nw.budget(whole, **fixed, memory=memory)
    kept = [Head(layer.index, kv) for layer in found.layers for kv in layer.full]
    assert found.total == total(kept) <= memory
    assert set(kept) == set(kv_order[: len(kept)])
    if len(kept) < len(kv_order):
        assert total(kv_order[: len(kept) + 1]) > memory


def test_what_does_not_fit_says_what_would() -> None:
    whole = subject("jamba")
    least = nw.budget(whole, context=1000, batch=4, window=10, sinks=0)
    with pytest.raises(nw.NeedleworkError, match=r"is too little for .*: weights take .* 4 x 1,000 tokens .* would do for all"):
        nw.budget(whole, context=1000, batch=4, memory=least.weight_bytes, window=10, sinks=0)
    for wrong in ({"context": 0}, {"context": 5, "batch": 0}, {"context": 5, "sinks": -1}):
        with pytest.raises(nw.NeedleworkError, match="at least"):
            nw.budget(whole, **wrong)
    with pytest.raises(nw.NeedleworkError, match="no heads"):
        nw.budget(whole, context=5, ranking=Ranking(order=[(0, 99)]))


def test_a_ranking_of_other_weights_is_refused(tmp_path: Path) -> None:
    whole = subject("jamba")
    fits = nw.budget(whole, context=100, ranking=Ranking(order=whole.anatomy.heads, model=Origin(weights=whole.body.weights)))
    assert fits.ranked_by == "the given order"
    whole.model.save_pretrained(tmp_path / "model")
    Ranking(order=whole.anatomy.heads, model=Origin(weights="0" * 32)).save(tmp_path / "other.json")
    with pytest.raises(nw.NeedleworkError, match="other weights"):
        nw.budget(tmp_path / "model", context=100, ranking=tmp_path / "other.json")


def test_compressed_caches_cannot_stream_head_by_head() -> None:
    whole = subject("kimi_linear")
    all_heads = nw.budget(whole, context=1000, batch=2)
    order = Ranking(order=whole.anatomy.heads)
    with pytest.raises(nw.NeedleworkError, match=r"no head can stream.*; 1 request at a time would fit"):
        nw.budget(whole, context=1000, batch=2, memory=all_heads.total - 1, ranking=order, window=8)


def test_forms_for_other_programs(tmp_path: Path) -> None:
    whole = subject("jamba")
    ranking = Ranking(order=whole.anatomy.heads)
    most = nw.budget(whole, context=100)
    found = nw.budget(whole, context=100, memory=most.total - 1, ranking=ranking, window=10, sinks=3)
    files = found.save(tmp_path / "out", ["duo", "kvpress", "locos", "vllm"])
    names = ["config.json", "full_attention_heads.tsv", "locos.json", "press.py", "vllm.json"]
    assert sorted(file.name for file in files) == names
    scores = foreign.read(tmp_path / "out/locos.json", whole.anatomy).scores
    group = {i: part.query_heads // part.kv_heads for i, part in whole.anatomy.attention_parts()}
    full = {(layer.index, kv) for layer in found.layers for kv in layer.full}
    assert {head for head, score in scores.items() if score >= 0.4} == {
        head for head in whole.anatomy.heads if (head.layer, head.index // group[head.layer]) in full
    }
    pattern = [
        [int(x) for x in line.split("\t")] for line in (tmp_path / "out/full_attention_heads.tsv").read_text().splitlines()
    ]
    streaming = {(layer.index, head) for layer in found.layers for head in layer.streaming}
    assert {(i, kv) for i, row in enumerate(pattern) for kv, full in enumerate(row) if not full} == streaming
    assert json.loads((tmp_path / "out/config.json").read_text()) == {"sink_size": 3, "recent_size": 10}
    layers = json.loads((tmp_path / "out/vllm.json").read_text())["kv_cache_dtype_skip_layers"]
    assert layers == [str(layer.index) for layer in found.layers if layer.full]
    assert f"FULL = {pattern}" in (tmp_path / "out/press.py").read_text()
    with pytest.raises(nw.NeedleworkError, match="no form 'tgi'"):
        found.save(tmp_path / "other", ["tgi"])


@pytest.mark.slow
def test_retrieval_is_measured_with_the_heads_that_stream() -> None:
    griffin = nw.load("tiny-griffin")
    order = Ranking(order=griffin.anatomy.heads)
    most = nw.budget(griffin, context=2048)
    memory = most.weight_bytes + most.state_bytes + most.kv_bytes // 4
    fixed: dict[str, Any] = {"context": 2048, "ranking": order, "window": 16, "sinks": 1, "memory": memory}
    found = nw.budget(griffin, **fixed, samples=20)
    assert found.untouched is not None
    assert found.streaming is not None
    assert found.kept is not None
    assert found.untouched.value > 0.9 > found.streaming.value
    assert found.untouched.n == found.kept.n == 20
    assert "of retrieval is left (niah, prompts of up to 2" in found.text()
    with pytest.raises(nw.NeedleworkError, match="hides nothing of"):
        nw.budget(griffin, **{**fixed, "window": 300, "memory": most.total - 1}, samples=20)


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    def run(*words: object) -> tuple[int, str]:
        done = CliRunner().invoke(app, ["budget", *map(str, words)])
        return done.exit_code, " ".join(done.output.split())

    code, text = run("jamba-v0.1", "--context", 131072, "--batch", 8, "--memory", "120GiB")
    assert code == 0
    assert "KV cache 2 GiB 16 GiB" in text  # 4 GB at 256K tokens in the authors' report (arXiv 2403.19887, table 1)
    assert "fits into 120 GiB with 32 of 32 kv heads" in text
    code, text = run("jamba-v0.1", "--context", 4096, "--memory", "10GiB")
    assert code == 2
    assert "weights take 96.1 GiB" in text
    code, text = run("jamba-v0.1", "--context", 4096, "--json")
    assert json.loads(text)["kv_bytes"] == 4096 * 16384
    assert run("jamba-v0.1", "--context", 4096, "--export", "vllm")[0] == 2
    assert run("jamba-v0.1", "--context", 10**6)[0] == 2
