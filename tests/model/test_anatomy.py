"""What the probe finds in each architecture, against what its configuration says."""

from __future__ import annotations

import json

import pytest

import cases
from needlework.anatomy import Head, heads_of_share
from needlework.interventions import KeepHeads

# A attention, R recurrent, H both, - neither; from the configurations, not from the probe.
LAYOUTS = {
    **dict.fromkeys(("zamba", "zamba2"), "RRHRRH"),
    **dict.fromkeys(("zaya", "inkling", "hrm_text", "llama", "qwen3", "gemma3"), "AAAA"),
    **dict.fromkeys(cases.NO_HEADS, "RRRR"),
    "falcon_h1": "HHHH",
    "nemotron_h": "R-A-RA",
    "glm5_next": "RARA",
    "lfm3": "RRARAR",
}
KV_HEADS = {
    **{name: {4} for name in ("zamba", "zamba2", "kimi_linear", "bailing_hybrid", "glm5_next", "hrm_text")},
    "recurrent_gemma": {1},
    "inkling": {1, 2},
}
WINDOWS = {"recurrent_gemma": {8}, "zaya": {None, 8}, "inkling": {None, 8}, "gemma3": {None, 8}, "lfm3": {None, 8}}
GATED = {"qwen3_next", "qwen3_5", "qwen3_5_moe", "bailing_hybrid", "qwen4_exp", "hrm_text", "lfm3"}
MIXERS = {
    "recurrent_gemma": "RecurrentGemmaRecurrentBlock",
    "jamba": "JambaMambaMixer",
    "falcon_h1": "FalconH1Mixer",
    "qwen3_next": "Qwen3NextGatedDeltaNet",
    "kimi_linear": "KimiLinearDeltaAttention",
    "minimax": "MiniMaxLightningAttention",
    "mamba": "MambaMixer",
}
LETTERS = {"attention": "A", "recurrent": "R", "hybrid": "H", "other": "-"}


@cases.each(cases.ALL)
def test_parts_of_every_architecture(name: str) -> None:
    anatomy = cases.subject(name).anatomy
    parts = [part for _, part in anatomy.attention_parts()]
    assert "".join(LETTERS[layer.kind] for layer in anatomy.layers) == LAYOUTS.get(name, "RRARRA")
    assert {part.query_heads for part in parts} == (set() if name in cases.NO_HEADS else {4})
    assert {part.kv_heads for part in parts} == (set() if name in cases.NO_HEADS else KV_HEADS.get(name, {2}))
    assert {part.window for part in parts} == (set() if name in cases.NO_HEADS else WINDOWS.get(name, {None}))
    assert {part.output_gate for part in parts} == (set() if name in cases.NO_HEADS else {name in GATED})
    assert anatomy.parameters == sum(p.numel() for p in cases.subject(name).model.parameters())
    assert anatomy.vocabulary == 128
    if name in MIXERS:
        assert {part.mixer for _, part in anatomy.recurrent_parts()} == {MIXERS[name]}
    for _, part in (*anatomy.attention_parts(), *anatomy.recurrent_parts()):
        module = cases.subject(name).model.get_submodule(part.path)
        assert part.parameters == sum(p.numel() for p in module.parameters())


def test_totals_and_text() -> None:
    anatomy = cases.subject("jamba").anatomy
    assert anatomy.heads[:2] == (Head(2, 0), Head(2, 1))
    assert anatomy.layers[2].heads == anatomy.heads[:4]
    assert anatomy.kv_bytes_per_token == 2 * 2 * (8 + 8) * 4
    assert anatomy.state_bytes == 4 * 64 * (4 + 8) * 4  # layers x inner width x (convolution + state) x fp32
    text = str(anatomy)
    assert "6 layers RRARRA" in text
    assert "4 query heads over 2 kv heads" in text
    everything = json.loads(json.dumps(anatomy.to_dict()))
    assert everything["heads"] == 8
    assert [layer["kind"] for layer in everything["layers"]] == ["recurrent", "recurrent", "attention"] * 2


def test_flops_count_keys_up_to_the_window() -> None:
    anatomy = cases.subject("recurrent_gemma").anatomy
    short, window, far = (anatomy.flops_per_token("attention", n) for n in (4, 8, 1000))
    assert short < window == far
    assert window - short == 2 * 2 * 4 * 4 * (8 + 8)  # layers x 2 x heads x keys more x (key and value width)
    assert anatomy.flops_per_token("recurrent", 4) == 2 * anatomy.recurrent_parameters


@pytest.mark.parametrize(
    "share, heads, kept",
    [
        (0.0, 16, 0),
        (0.0, 0, 0),
        (0.001, 16, 1),
        (0.03, 16, 1),
        (0.5, 5, 3),
        (0.5, 3, 2),
        (0.15, 10, 2),
        (0.16, 10, 2),
        (1.0, 7, 7),
    ],
)
def test_a_share_of_heads_is_rounded_half_up_and_none_only_if_it_is_0(share: float, heads: int, kept: int) -> None:
    assert heads_of_share(share, heads) == kept == KeepHeads(fraction=share).count(heads)


def test_no_attention_at_that_layer() -> None:
    with pytest.raises(KeyError, match="layer 0 has no attention"):
        cases.subject("jamba").anatomy.attention(0)
