"""Causal depthwise convolution over tokens, with an optional SiLU."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from needlework.kernels import jit
from needlework.kernels.jit import LANES, ONE, ZERO, helper, kernel, sigmoid


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, context: Tensor | None = None, silu: bool = False
) -> Tensor:
    """Compute y_t = bias + sum over taps k of weight[:, k] * x_{t - taps + 1 + k}, followed by SiLU if `silu`.

    Differentiable in every tensor.

    Args:
        x: [batch, time, channels]; copied unless channels are adjacent in memory.
        weight: [channels, taps].
        bias: [channels].
        context: [batch, taps - 1, channels], the inputs before x; zeros when None.

    Returns:
        y [batch, time, channels] in x's dtype.
    """
    batch, _, channels = x.shape
    taps = weight.shape[-1]
    jit.check_shapes(channels, taps, weight=weight)
    bias = x.new_zeros(channels) if bias is None else bias
    jit.check_shapes(channels, bias=bias)
    context = x.new_zeros(batch, taps - 1, channels) if context is None else context
    jit.check_shapes(batch, taps - 1, channels, context=context)
    if x.device.type != "cpu":
        return _convolve_on_device(x, weight, bias, context, silu)
    dense = (tensor.float().contiguous() for tensor in (context, weight.t(), bias[None]))
    x32 = x.float()
    inputs = (x32 if x32.stride(-1) == 1 else x32.contiguous(), *dense)
    run = _CpuConv.apply if jit.needs_gradient(*inputs) else _run_forward
    out: Tensor = run(silu, *inputs)  # type: ignore[no-untyped-call]
    return out.to(x.dtype)


def _convolve_on_device(x: Tensor, weight: Tensor, bias: Tensor, context: Tensor, silu: bool) -> Tensor:
    inputs = torch.cat([context.to(x.dtype), x], dim=1).transpose(1, 2)
    out = functional.conv1d(inputs, weight[:, None].to(x.dtype), bias.to(x.dtype), groups=x.shape[2]).transpose(1, 2)
    return functional.silu(out) if silu else out


# --- CPU --------------------------------------------------------------------------------------------------------------


def _run_forward(silu: bool, x: Tensor, context: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Run the kernel; context: [batch, taps - 1, channels], weight: [taps, channels], bias: [1, channels]."""
    out = jit.empty_like(x)
    inputs = (jit.flatten_tokens(x), *jit.arrays(context, weight, bias))
    jit.run_blocks(forward_kernel, jit.count_blocks(x.shape[0], x.shape[2]), inputs, silu, out.numpy())
    return out


class _CpuConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, silu: bool, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        ctx.silu = silu
        return _run_forward(silu, *inputs)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        x, context, weight, bias = ctx.saved_tensors
        grad_x, grad_context = jit.empty_like(x), torch.empty_like(context)
        grad_weight, grad_bias = x.new_empty(x.shape[0], *weight.shape), x.new_empty(x.shape[0], *bias.shape)  # per batch row
        inputs = (jit.flatten_tokens(x), *jit.arrays(context, weight, bias))
        grads = tuple(jit.arrays(grad_x, grad_context, grad_weight, grad_bias))
        coming = jit.flatten_tokens(grad_out if grad_out.stride(-1) == 1 else grad_out.contiguous())
        jit.run_blocks(_backward, jit.count_blocks(x.shape[0], x.shape[2]), inputs, ctx.silu, coming, grads)
        return None, grad_x, grad_context, grad_weight.sum(0), grad_bias.sum(0)


@helper
def _join_blocks(at: int, stop: int, width: int) -> Any:
    """Return the row of block `at`, the range of channels of this and the row's following blocks, and the next block.

    Adjacent blocks are computed together, because long contiguous reads are faster.
    """
    groups = (width + LANES - 1) // LANES
    row = at // groups
    end = min(stop, (row + 1) * groups)
    low = (at - row * groups) * LANES
    return row, low, min(width, low + (end - at) * LANES), end


@helper
def _add_product(left: Any, right: Any, total: Any) -> None:
    for c in range(total.size):
        total[c] += left[c] * right[c]


@helper
def _token(x: Any, context: Any, row: int, t: int, low: int, high: int) -> Any:
    """Return the channels of token t; tokens before the first are in the context, [batch, taps - 1, channels]."""
    if t < 0:
        return context[row, t + context.shape[1], low:high]
    values, strides = x
    start = row * strides[0] + t * strides[1]
    return values[start + low : start + high]


@helper
def _convolve(inputs: Any, row: int, t: int, low: int, high: int, out: Any) -> None:
    x, context, weight, bias = inputs
    taps = weight.shape[0]
    for c in range(out.size):  # a slice assignment would compile the message of a mismatch, which takes over a second
        out[c] = bias[0, low + c]
    for tap in range(taps):
        _add_product(weight[tap, low:high], _token(x, context, row, t - taps + 1 + tap, low, high), out)


@kernel
def forward_kernel(first: int, stop: int, inputs: Any, silu: bool, out: Any) -> None:
    at = first
    while at < stop:
        row, low, high, at = _join_blocks(at, stop, out.shape[2])
        for t in range(out.shape[1]):
            here = out[row, t, low:high]
            _convolve(inputs, row, t, low, high, here)
            if silu:
                for c in range(here.size):
                    here[c] *= sigmoid(here[c])


@kernel
def _backward(first: int, stop: int, inputs: Any, silu: bool, grad_out: Any, grads: Any) -> None:
    x, context, weight, _ = inputs
    grad_x, grad_context, grad_weight, grad_bias = grads
    taps = weight.shape[0]
    at = first
    while at < stop:
        row, low, high, at = _join_blocks(at, stop, grad_x.shape[2])
        grad = np.empty(high - low, np.float32)  # gradient of the convolution's output at one token
        grad_context[row, :, low:high], grad_weight[row, :, low:high], grad_bias[row, 0, low:high] = ZERO, ZERO, ZERO
        for t in range(grad_x.shape[1]):
            coming = _token(grad_out, context, row, t, low, high)
            if silu:
                _convolve(inputs, row, t, low, high, grad)
                for c in range(grad.size):  # the gradient of silu
                    s = sigmoid(grad[c])
                    grad[c] = coming[c] * s * (ONE + grad[c] * (ONE - s))
            else:
                grad[:] = coming
            grad_bias[row, 0, low:high] += grad
            grad_x[row, t, low:high] = ZERO
            for tap in range(taps):
                source = t - taps + 1 + tap
                seen = _token(x, context, row, source, low, high)
                _add_product(grad, seen, grad_weight[row, tap, low:high])
                if source < 0:
                    _add_product(grad, weight[tap, low:high], grad_context[row, source + taps - 1, low:high])
                else:
                    _add_product(grad, weight[tap, low:high], grad_x[row, source, low:high])
