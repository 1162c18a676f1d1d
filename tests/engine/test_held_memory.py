"""What an engine holds at a time: keys of prompts that decode, masks of blocks, long options, and copies that are made once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import cases
import needlework as nw
from needlework.engine.engine import Decoder, Engine
from needlework.kernels import block_attention
from needlework.model import attention
from needlework.model.hooked_model import HookedModel
from needlework.requests import Request, prepare


def test_prompts_that_decode_count_in_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches join those that decode only while the keys of all, and their copies for the kernel, stay within it."""
    subject = cases.subject("llama")
    requests = [Request(tuple(cases.tokens(200 - i, seed=i).tolist()), nw.KeepHeads(k=1), 12) for i in range(24)]
    limit = int(1.6 * Engine(subject.body).budget.costs.batch([prepare(requests[0], subject.anatomy)]))
    held, stock = [0], Decoder.step

    def step(self: Decoder) -> Any:
        out = stock(self)
        layers = [layer.prefix for layer in self.memory.cache.layers if hasattr(layer, "prefix")]
        turned = sum(x.numel() * x.element_size() for prefix in layers for x in vars(prefix).get("lines", ()))
        held.append(self.memory.nbytes() + turned)
        return out

    monkeypatch.setattr(Decoder, "step", step)
    assert len(list(Engine(subject.body, limit).run(requests))) == 24
    assert 0 < max(held) <= limit


def test_masks_of_fused_blocks_are_bounded_in_windowed_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is shown every key, whatever the window: so a block has fewer queries."""
    monkeypatch.setattr(attention, "CPU_BLOCK_BYTES", 1 << 12)
    seen, stock = [0], attention.fused_block

    def fused(forward: Any, layer: int, block: Any, query: Any) -> Any:
        seen.append(0 if block.visible is None else block.visible.numel())
        return stock(forward, layer, block, query)

    monkeypatch.setattr(attention, "fused_block", fused)
    prompt = cases.tokens(160, seed=1).tolist()
    cases.subject("gemma3").generate([prompt], nw.KeepHeads(k=1), max_new_tokens=1)
    assert 0 < max(seen) <= 1 << 12


def test_a_long_option_is_read_in_chunks_that_the_budget_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = cases.subject("llama")
    monkeypatch.setattr("needlework.model.hooked_model.CHUNK_TOKENS", 64)
    monkeypatch.setattr("needlework.engine.budget.LEAST_CHUNK", 4)
    text = tuple(cases.tokens(200, seed=3).tolist())
    request = Request(text[:1], options=(text[1:],))
    costs = Engine(subject.body).budget.costs
    item = prepare(request, subject.anatomy)
    assert replace(costs, chunk=32).batch([item]) == costs.batch([item]) - 32 * costs.activations_per_token
    whole = subject.answer([request])[0]
    stock = HookedModel._forward

    def forward(self: HookedModel, ids: torch.Tensor, *rest: Any, **more: Any) -> Any:
        if ids.shape[1] > 40:
            raise torch.OutOfMemoryError("out of memory")
        return stock(self, ids, *rest, **more)

    monkeypatch.setattr(HookedModel, "_forward", forward)
    answer = nw.Subject(subject.body).answer([request])[0]  # in chunks of 32, then
    assert answer.error == ""
    assert answer.option_logprobs[0] == pytest.approx(whole.option_logprobs[0], abs=1e-3)


def test_a_prompts_keys_are_turned_around_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many rows that read them leave, one by one."""
    turned, stock = [0], block_attention.transpose_keys_values

    def transpose(key: torch.Tensor, value: torch.Tensor) -> Any:
        turned[0] += key.shape[2] >= 60
        return stock(key, value)

    monkeypatch.setattr(block_attention, "transpose_keys_values", transpose)
    subject, prompt = cases.subject("llama"), tuple(cases.tokens(70, seed=1).tolist())
    subject.answer([Request(prompt, nw.KeepHeads(k=1 + i % 3, phase="decode"), 3 + i) for i in range(10)])
    assert turned[0] == len(subject.anatomy.attention_layers)
