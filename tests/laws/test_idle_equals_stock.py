"""Idle, needlework is the stock model; and its own block-wise attention is stock attention when nothing is hidden."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cases
import needlework as nw
import needlework.model.attention
from needlework.model.probe import attention_switched

IDS = cases.tokens(2, 21)


@torch.no_grad()
def _stock(model: Any, implementation: str | None) -> torch.Tensor:
    """The model's own forward, with a cache of its own as in `generate`."""
    if implementation is None:
        return model(input_ids=IDS, use_cache=True).logits
    with attention_switched(model, implementation):
        return model(input_ids=IDS, use_cache=True).logits


@cases.each(cases.ALL)
def test_idle_is_bitwise_stock_sdpa(name: str) -> None:
    subject = cases.subject(name, "stock")
    stock = _stock(subject.model, "sdpa" if name in cases.WITH_HEADS else None)
    assert torch.equal(subject.logits(IDS), stock)


@cases.each(cases.ALL)
def test_idle_is_close_to_eager_and_to_our_kernels(name: str) -> None:
    subject = cases.subject(name, "stock")
    idle = subject.logits(IDS)
    if name in cases.WITH_HEADS:
        assert cases.apart(idle, _stock(subject.model, "eager")) < 1e-4
    assert cases.apart(idle, cases.subject(name, "fast").logits(IDS)) < 1e-4


@cases.each(cases.WITH_HEADS)
def test_all_keys_in_blocks_of_queries_are_stock(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit that hides nothing makes attention go our own way, first in one block, then in many."""
    subject = cases.subject(name, "stock")
    idle = subject.logits(IDS)
    everything = nw.LimitContext(tokens=1000)
    assert cases.apart(subject.logits(IDS, everything), idle) < 1e-4
    rows, queries = IDS.shape
    heads = max(part.query_heads for _, part in subject.anatomy.attention_parts())
    monkeypatch.setattr(needlework.model.attention, "CPU_BLOCK_BYTES", 4 * rows * heads * queries * 4)  # 4 queries at a time
    monkeypatch.setattr(needlework.model.attention, "FEWEST_QUERIES", 1)
    assert cases.apart(subject.logits(IDS, everything), idle) < 1e-4


@pytest.mark.parametrize("name", ["llama", "recurrent_gemma"])
def test_small_blocks_are_small(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The law above would mean nothing if blocks were not really cut: look at the scores that are computed."""
    subject = cases.subject(name, "stock")
    subject.logits(IDS, nw.LimitContext(tokens=1000))  # the first time, the model is compared with itself too
    widths = []
    stock = needlework.model.attention.OwnKeys.scores

    def scores(self: Any, query: torch.Tensor, first: int, last: int) -> torch.Tensor:
        widths.append((query.shape[2], last - first))
        return stock(self, query, first, last)

    monkeypatch.setattr(needlework.model.attention.OwnKeys, "scores", scores)
    monkeypatch.setattr(needlework.model.attention, "CPU_BLOCK_BYTES", 4 * 2 * 4 * 21 * 4)
    monkeypatch.setattr(needlework.model.attention, "FEWEST_QUERIES", 1)
    subject.logits(IDS, nw.LimitContext(tokens=1000))
    step = 4 if name == "llama" else 9  # a window of 8 leaves room for more queries
    assert max(queries for queries, _ in widths) == step
    assert min(keys for queries, keys in widths if queries == step) == step  # the first block sees no key after its last query
    if name == "recurrent_gemma":  # nine queries see at most sixteen keys
        assert max(keys for queries, keys in widths if queries > 1) == step + 7


@pytest.mark.parametrize("name", ["recurrent_gemma", "gemma3"])
def test_long_masks_cut_into_blocks_are_the_same_attention(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With fast kernels, idle attention over more tokens than the window goes block by block; no key may be lost or won."""
    subject = cases.subject(name)
    ids = torch.arange(3, 3 + 45)[None] % 90
    whole = subject.logits(ids)
    calls = []
    stock = needlework.model.attention.scaled_dot_product_attention

    def counted(query: torch.Tensor, key: torch.Tensor, *rest: Any, **options: Any) -> Any:
        calls.append((query.shape[2], key.shape[2]))
        return stock(query, key, *rest, **options)

    monkeypatch.setattr(needlework.model.attention, "scaled_dot_product_attention", counted)
    monkeypatch.setattr(needlework.model.attention, "SDPA_BLOCK", 4)
    assert cases.apart(subject.logits(ids), whole) < 1e-5
    assert 4 in {queries for queries, _ in calls}  # blocks were really cut, and saw fewer keys
    assert min(keys for _, keys in calls) < 45


@cases.each(cases.ALL)
def test_greedy_answers_are_those_of_generate(name: str) -> None:
    subject = cases.subject(name, "stock")
    prompt = torch.tensor([cases.PROMPT])
    ours = subject.generate([cases.PROMPT], max_new_tokens=6)[0].tokens
    if name in ("recurrent_gemma", "minimax"):
        pytest.skip("its own generate loses its recurrent state when layer 0 is recurrent")
    stock = subject.model.generate(prompt, do_sample=False, max_new_tokens=6)[0, prompt.shape[1] :].tolist()
    assert list(ours) == stock[: len(ours)]
    assert len(ours) == len(stock)


@cases.each(cases.ALL)
def test_decoding_after_prefill_is_the_full_forward(name: str) -> None:
    """Where the model itself allows it; where it drifts by its own doing, that is named and bounded, not hidden."""
    subject = cases.subject(name)
    whole = subject.logits(IDS)
    apart = cases.apart(subject.logits(IDS, prompt_tokens=13), whole)
    if name in ("zamba2", "nemotron_h"):  # prefill clamps the time step at its minimum, single-token decode does not
        assert 1e-5 < apart < cases.between_routes(name)
    else:
        assert apart < cases.between_routes(name)
