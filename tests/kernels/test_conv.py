"""The causal convolution: torch's own, and continuing with a context."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scans import BATCHES, SEEDS, WIDTHS, Threads, assert_close
from torch import Tensor
from torch.nn import functional

from needlework.kernels import causal_conv


def torch_conv(x: Tensor, weight: Tensor, bias: Tensor | None, context: Tensor | None, silu: bool) -> Tensor:
    taps = weight.shape[1]
    context = x.new_zeros(x.shape[0], taps - 1, x.shape[2]) if context is None else context
    inputs = torch.cat([context, x], 1).transpose(1, 2)
    out = functional.conv1d(inputs, weight[:, None], bias, groups=x.shape[2]).transpose(1, 2)
    return functional.silu(out) if silu else out


@settings(max_examples=40, deadline=None)
@given(SEEDS, BATCHES, st.sampled_from([1, 2, 3, 4, 40]), WIDTHS, st.integers(1, 5), *[st.booleans()] * 3)
def test_equals_torch_with_all_gradients(
    seed: int, batch: int, length: int, channels: int, taps: int, with_bias: bool, with_context: bool, silu: bool
) -> None:
    torch.manual_seed(seed)
    given = {
        "x": torch.randn(batch, length, channels),
        "weight": torch.randn(channels, taps),
        "bias": torch.randn(channels) if with_bias else None,
        "context": torch.randn(batch, taps - 1, channels) if with_context else None,
    }
    runs = []
    for conv in (causal_conv, torch_conv):
        leaves = {name: None if t is None else t.clone().requires_grad_() for name, t in given.items()}
        out = conv(**leaves, silu=silu)
        (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(5))).sum().backward()
        grads = {f"grad of {name}": t.grad for name, t in leaves.items() if t is not None and t.numel()}
        runs.append({"out": out.detach(), **grads})
    assert_close(runs[0], runs[1], tolerance=3e-6)


@pytest.mark.parametrize("split", [1, 2, 3, 20])
def test_continuing_with_the_last_inputs_as_context_is_one_convolution(split: int) -> None:
    x, weight, bias = torch.randn(2, 30, 70), torch.randn(70, 4), torch.randn(70)
    before = torch.randn(2, 3, 70)
    seen = torch.cat([before, x[:, :split]], 1)[:, -3:]
    pieces = [
        causal_conv(x[:, :split], weight, bias, before, True),
        causal_conv(x[:, split:], weight, bias, seen, True),
    ]
    assert torch.equal(torch.cat(pieces, 1), causal_conv(x, weight, bias, before, True))


def test_a_row_does_not_depend_on_its_batch_nor_on_threads(threads: Threads) -> None:
    x, weight = torch.randn(3, 20, 130), torch.randn(130, 4)
    threads(1)
    alone = torch.cat([causal_conv(row, weight, silu=True) for row in x.split(1)])
    for count in (1, 2, 3):
        threads(count)
        assert torch.equal(causal_conv(x, weight, silu=True), alone)


def test_layout_does_not_matter() -> None:
    x, weight = torch.randn(2, 20, 70), torch.randn(70, 4)
    wide = torch.randn(2, 20, 100)
    wide[..., 11:81] = x
    expected = causal_conv(x, weight)
    assert torch.equal(causal_conv(wide[..., 11:81], weight), expected)
    assert torch.equal(causal_conv(x.transpose(1, 2).contiguous().transpose(1, 2), weight), expected)


def test_bf16_stays_bf16() -> None:
    x, weight = torch.randn(2, 20, 70).bfloat16(), torch.randn(70, 4).bfloat16()
    out = causal_conv(x, weight, silu=True)
    exact = torch_conv(x.float(), weight.float(), None, None, True)
    assert out.dtype == torch.bfloat16
    assert float((out.float() - exact).abs().max() / exact.abs().max()) < 4e-3


def test_wrong_shapes_are_refused_before_the_kernel() -> None:
    x, weight = torch.zeros(2, 5, 8), torch.zeros(8, 4)
    with pytest.raises(ValueError, match="weight has shape"):
        causal_conv(x, torch.zeros(7, 4))
    with pytest.raises(ValueError, match="bias has shape"):
        causal_conv(x, weight, torch.zeros(7))
    with pytest.raises(ValueError, match="context has shape"):
        causal_conv(x, weight, context=torch.zeros(2, 4, 8))
