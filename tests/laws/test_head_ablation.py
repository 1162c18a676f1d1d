"""Silencing heads: against independent hooks on the output projection and on whole modules, and at both ends of k."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cases
import needlework as nw

IDS = cases.tokens(2, 14, seed=2)


@cases.each(cases.WITH_HEADS)
def test_keeping_all_heads_is_the_identity(name: str) -> None:
    subject = cases.subject(name)
    for by in ("entropy", "l2", "norm", "random"):
        assert torch.equal(subject.logits(IDS, nw.KeepHeads(k=4, by=by)), subject.logits(IDS))


@cases.each(cases.WITH_HEADS)
def test_keeping_no_head_is_attention_off(name: str) -> None:
    subject = cases.subject(name)
    off = subject.logits(IDS, nw.AblateAttention())
    for by in ("entropy", "norm"):
        assert torch.equal(subject.logits(IDS, nw.KeepHeads(k=0, by=by)), off)
    assert torch.equal(subject.logits(IDS, nw.KeepHeads(fraction=0)), off)
    assert torch.equal(subject.logits(IDS, nw.AblateHeads(heads=subject.anatomy.heads)), off)
    assert cases.apart(off, subject.logits(IDS)) > 0.1


@cases.each(cases.WITH_HEADS)
def test_one_head_is_one_slice_of_theoutput_projection(name: str) -> None:
    """For gated models too: a silenced head's slice of what enters the projection is zero, gate or no gate."""
    subject = cases.subject(name)
    layer = subject.anatomy.attention_layers[-1]
    assert layer.attention is not None
    width = layer.attention.value_dim
    projection = cases.output_projection(subject.model.get_submodule(layer.attention.path), width * layer.attention.query_heads)
    for head in (0, 3):

        def zero(module: nn.Module, args: tuple[Any, ...], head: int = head) -> tuple[Any, ...]:
            x = args[0].clone()
            x[..., head * width : (head + 1) * width] = 0.0
            return (x, *args[1:])

        with cases.hook(projection.register_forward_pre_hook, zero):
            expected = subject.logits(IDS)
        found = subject.logits(IDS, nw.AblateHeads(heads=[(layer.index, head)]))
        assert cases.apart(found, expected) < 1e-5
        assert cases.apart(found, subject.logits(IDS)) > 1e-3


@cases.each(cases.WITH_HEADS)
def test_only_heads_is_the_complement(name: str) -> None:
    subject = cases.subject(name)
    heads = subject.anatomy.heads
    kept, silenced = heads[::3], [head for head in heads if head not in heads[::3]]
    only = subject.logits(IDS, nw.OnlyHeads(heads=kept))
    assert torch.equal(only, subject.logits(IDS, nw.AblateHeads(heads=silenced)))


def _zero_output(module: nn.Module, args: Any, output: Any) -> Any:
    return (torch.zeros_like(output[0]), *output[1:]) if isinstance(output, tuple) else torch.zeros_like(output)


@cases.each(cases.WITH_HEADS)
def test_attention_block_off_is_a_module_that_says_nothing(name: str) -> None:
    subject = cases.subject(name)
    handles = [
        subject.model.get_submodule(part.path).register_forward_hook(_zero_output)
        for _, part in subject.anatomy.attention_parts()
    ]
    try:
        expected = subject.logits(IDS)
    finally:
        for handle in handles:
            handle.remove()
    block = subject.logits(IDS, nw.AblateAttention(site="block"))
    assert cases.apart(block, expected) < 1e-5
    heads = subject.logits(IDS, nw.AblateAttention(site="heads"))
    has_bias = any(part.output_bias for _, part in subject.anatomy.attention_parts())
    assert (cases.apart(block, heads) > 1e-3) == has_bias


def test_some_models_have_an_output_bias_and_some_have_none() -> None:
    """Otherwise the law above would be half empty."""
    assert cases.subject("recurrent_gemma").anatomy.attention_layers[0].attention.output_bias  # type: ignore[union-attr]
    assert not cases.subject("llama").anatomy.attention_layers[0].attention.output_bias  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["llama", "jamba"])
def test_calibrated_means_take_the_place_of_a_head(name: str) -> None:
    subject = cases.subject(name)
    layer = subject.anatomy.attention_layers[0]
    part = layer.attention
    assert part is not None
    mean = cases.tokens(part.query_heads, part.value_dim).float() / 100
    table: dict[tuple[int, str], Tensor] = {(layer.index, phase): mean for phase in ("prefill", "decode")}
    subject.use(SimpleNamespace(hash="abc", tensors=table))
    width = part.value_dim
    projection = cases.output_projection(subject.model.get_submodule(part.path), width * part.query_heads)

    def replace(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x = args[0].clone()
        x[..., width : 2 * width] = mean[1]
        return (x, *args[1:])

    with cases.hook(projection.register_forward_pre_hook, replace):
        expected = subject.logits(IDS)
    said = nw.AblateHeads(heads=[(layer.index, 1)], value="mean", means="abc")
    try:
        assert cases.apart(subject.logits(IDS, said), expected) < 1e-5
        assert cases.apart(subject.logits(IDS, said, prompt_tokens=9), expected) < 1e-4
    finally:
        subject.body.means.clear()
    with pytest.raises(nw.NeedleworkError, match="no calibrated means 'abc' are loaded"):
        subject.logits(IDS, said)


def test_means_replace_only_the_heads_that_their_ablation_names() -> None:
    """Heads that another part of the same intervention zeroes stay zero."""
    subject = cases.subject("llama")
    layer = subject.anatomy.attention_layers[0]
    part = layer.attention
    assert part is not None
    mean = cases.tokens(part.query_heads, part.value_dim).float() / 100
    subject.use(SimpleNamespace(hash="abc", tensors={(layer.index, phase): mean for phase in ("prefill", "decode")}))
    width = part.value_dim
    projection = cases.output_projection(subject.model.get_submodule(part.path), width * part.query_heads)

    def replace(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x = torch.zeros_like(args[0])
        x[..., width : 2 * width] = mean[1]
        return (x, *args[1:])

    with cases.hook(projection.register_forward_pre_hook, replace):
        expected = subject.logits(IDS)
    one = nw.AblateHeads(heads=[(layer.index, 1)], value="mean", means="abc")
    others = nw.KeepHeads(k=0, layers=[layer.index])
    try:
        assert cases.apart(subject.logits(IDS, one + others), expected) < 1e-5
    finally:
        subject.body.means.clear()
