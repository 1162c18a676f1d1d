"""One silenced head against nnsight, which reaches into the model by other means: it edits the output projection's input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from transformers import JambaConfig, JambaForCausalLM, LlamaConfig, LlamaForCausalLM

import needlework as nw

HEADS, HEAD_DIM, TOKENS, PROMPT = 4, 8, 17, 12
SIZES = {
    "vocab_size": 101,
    "hidden_size": HEADS * HEAD_DIM,
    "intermediate_size": 48,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ATTENTION = {"llama": [0, 1, 2], "jamba": [1, 3]}  # layers that have heads


def _model(name: str) -> Any:
    torch.manual_seed(3)
    if name == "llama":
        return LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=3)).eval()
    config = JambaConfig(
        **SIZES,
        num_hidden_layers=4,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=2,
        mamba_d_state=4,
        mamba_dt_rank=4,
        use_mamba_kernels=False,
    )
    return JambaForCausalLM(config).eval()


class Witness:
    """The stock model with nnsight around it: one forward in which a slice of one layer's `o_proj` input is zero."""

    def __init__(self, model: Any) -> None:
        from nnsight import NNsight

        self.model, self.traced = model, NNsight(model)

    @torch.inference_mode()
    def forward(self, layer: int, head: int, ids: Tensor, **memory: Any) -> Tensor:
        part = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
        traced = self.traced
        with traced.trace(input_ids=ids, **memory):
            edited = traced.model.layers[layer].self_attn.o_proj.input.clone()
            edited[..., part] = 0
            traced.model.layers[layer].self_attn.o_proj.input = edited
            logits = traced.lm_head.output.save()
        assert isinstance(logits, Tensor)
        return logits

    @torch.inference_mode()
    def decode(self, layer: int, head: int, ids: Tensor) -> Tensor:
        """The head is missing from the last prompt token on; the tokens before it are read untouched."""
        first = PROMPT - 1
        out = self.model(ids[:, :first], use_cache=True)
        parts = [out.logits]
        for t in range(first, ids.shape[1]):
            memory = {"past_key_values": out.past_key_values, "use_cache": True}  # filled in place, step by step
            parts.append(self.forward(layer, head, ids[:, t : t + 1], **memory))
        return torch.cat(parts, 1)


@pytest.fixture(scope="module", params=["llama", "jamba"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def pair(witness: Callable[[str], None], name: str) -> tuple[Witness, nw.Subject]:
    """Two copies of one model: what nnsight leaves on its own cannot help ours."""
    witness("nnsight")
    return Witness(_model(name)), nw.wrap(_model(name), kernels="stock")


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(3, 101, (2, TOKENS), generator=torch.Generator().manual_seed(5))


def _heads(name: str) -> list[tuple[int, int]]:
    return [(layer, head) for layer in ATTENTION[name] for head in range(HEADS)]


def test_the_witness_sees_the_same_heads(pair: tuple[Witness, nw.Subject], name: str) -> None:
    assert [(head.layer, head.index) for head in pair[1].anatomy.heads] == _heads(name)


@pytest.mark.parametrize("phase", ["prefill", "both"])
def test_each_single_head(pair: tuple[Witness, nw.Subject], ids: Tensor, name: str, phase: Literal["prefill", "both"]) -> None:
    theirs, ours = pair
    plain = ours.logits(ids)
    for layer, head in _heads(name):
        expected = theirs.forward(layer, head, ids)
        found = ours.logits(ids, nw.AblateHeads(heads=[(layer, head)], phase=phase))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
        assert (expected - plain).abs().max() > 1e-2


def test_each_single_head_while_decoding(pair: tuple[Witness, nw.Subject], ids: Tensor, name: str) -> None:
    theirs, ours = pair
    plain = ours.logits(ids)
    for layer, head in _heads(name)[::3]:  # every layer, and every head of some layer
        expected = theirs.decode(layer, head, ids)
        found = ours.logits(ids, nw.AblateHeads(heads=[(layer, head)], phase="decode"), prompt_tokens=PROMPT)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
        assert (expected - plain)[:, : PROMPT - 1].abs().max() < 1e-4
        assert (expected - plain)[:, PROMPT - 1 :].abs().max() > 1e-2
