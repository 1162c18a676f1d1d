"""Causal depthwise convolution over tokens: every channel sees its own last few inputs."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from needlework.kernels import conv_cpu
from needlework.kernels.checks import check_shape
from needlework.kernels.jit import differentiated
from needlework.kernels.memory import empty_like


def _forward(silu: bool, x: Tensor, context: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    out = empty_like(x)
    conv_cpu.forward(x, context, weight, bias, silu, out)
    return out


class _CpuConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, silu: bool, x: Tensor, context: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        out = _forward(silu, x, context, weight, bias)
        ctx.save_for_backward(x, context, weight, bias)
        ctx.silu = silu
        return out

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        x, context, weight, bias = ctx.saved_tensors
        grad_x, grad_context = empty_like(x), torch.empty_like(context)
        grad_weight, grad_bias = x.new_empty(x.shape[0], *weight.shape), x.new_empty(x.shape[0], *bias.shape)
        conv_cpu.backward(x, context, weight, bias, ctx.silu, grad_out, grad_x, grad_context, grad_weight, grad_bias)
        return None, grad_x, grad_context, grad_weight.sum(0), grad_bias.sum(0)


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, context: Tensor | None = None, silu: bool = False
) -> Tensor:
    """y_t = bias + sum over taps k of weight[:, k] * x_{t - taps + 1 + k}, then silu if asked; y in x's dtype.

    x: [batch, time, channels], best with channels side by side in memory. weight: [channels, taps]. bias: [channels].
    context: [batch, taps - 1, channels], the inputs before x (zeros when None). Differentiable in every tensor.
    """
    batch, _, channels = x.shape
    taps = weight.shape[-1]
    check_shape("weight", weight, channels, taps)
    bias = x.new_zeros(channels) if bias is None else bias
    check_shape("bias", bias, channels)
    context = x.new_zeros(batch, taps - 1, channels) if context is None else context
    check_shape("context", context, batch, taps - 1, channels)
    if x.device.type != "cpu":
        return _on_device(x, weight, bias, context, silu)
    dense = (tensor.float().contiguous() for tensor in (context, weight.t(), bias[None]))
    inputs = (conv_cpu.dense_channels(x.float()), *dense)
    run = _CpuConv.apply if differentiated(*inputs) else _forward
    out: Tensor = run(silu, *inputs)  # type: ignore[no-untyped-call]
    return out.to(x.dtype)


def _on_device(x: Tensor, weight: Tensor, bias: Tensor, context: Tensor, silu: bool) -> Tensor:
    inputs = torch.cat([context.to(x.dtype), x], dim=1).transpose(1, 2)
    out = functional.conv1d(inputs, weight[:, None].to(x.dtype), bias.to(x.dtype), groups=x.shape[2]).transpose(1, 2)
    return functional.silu(out) if silu else out
