"""Causal depthwise convolution over tokens on the CPU, with an optional SiLU, forward and backward.

A block is a group of channels of one batch row; neighbouring groups are walked together, token after token.
"""

from typing import Any

import numpy as np
from torch import Tensor

from needlework.kernels.jit import TOKENS, arrays, column_blocks, columns, compiled, run_blocks, tokens_of
from needlework.kernels.tiles import DENSE, MATRIX, helper
from needlework.kernels.vector_math import ONE, ZERO, sigmoid


@helper  # type: ignore[untyped-decorator]
def _add_product(left: Any, right: Any, total: Any) -> None:
    for c in range(total.size):
        total[c] += left[c] * right[c]


@helper  # type: ignore[untyped-decorator]
def _token(x: Any, context: Any, row: int, t: int, low: int, high: int) -> Any:
    """The channels of token t; tokens before the first come from the context, [batch, taps - 1, channels]."""
    if t < 0:
        return context[row, t + context.shape[1], low:high]
    values, strides = x
    start = row * strides[0] + t * strides[1]
    return values[start + low : start + high]


@helper  # type: ignore[untyped-decorator]
def _convolve(x: Any, context: Any, weight: Any, bias: Any, row: int, t: int, low: int, high: int, out: Any) -> None:
    taps = weight.shape[0]
    out[:] = bias[0, low:high]
    for tap in range(taps):
        _add_product(weight[tap, low:high], _token(x, context, row, t - taps + 1 + tap, low, high), out)


@helper  # type: ignore[untyped-decorator]
def _silu(values: Any) -> None:
    for c in range(values.size):
        values[c] *= sigmoid(values[c])


@compiled(TOKENS, DENSE, MATRIX, MATRIX, "boolean", DENSE)
def _forward(first: int, stop: int, x: Any, context: Any, weight: Any, bias: Any, silu: bool, out: Any) -> None:
    at = first
    while at < stop:
        row, low, high, at = columns(at, stop, out.shape[2])
        for t in range(out.shape[1]):
            here = out[row, t, low:high]
            _convolve(x, context, weight, bias, row, t, low, high, here)
            if silu:
                _silu(here)


@helper  # type: ignore[untyped-decorator]
def _silu_grad(before: Any, grad: Any) -> None:
    """From the gradient of silu(before) to that of `before`, in place of `before`."""
    for c in range(grad.size):
        s = sigmoid(before[c])
        before[c] = grad[c] * s * (ONE + before[c] * (ONE - s))


@compiled(TOKENS, DENSE, MATRIX, MATRIX, "boolean", TOKENS, DENSE, DENSE, DENSE, DENSE)
def _backward(
    first: int,
    stop: int,
    x: Any,
    context: Any,
    weight: Any,
    bias: Any,
    silu: bool,
    grad_out: Any,
    grad_x: Any,
    grad_context: Any,
    grad_weight: Any,
    grad_bias: Any,
) -> None:
    taps = weight.shape[0]
    at = first
    while at < stop:
        row, low, high, at = columns(at, stop, grad_x.shape[2])
        grad = np.empty(high - low, np.float32)  # of the convolution's result at one token
        grad_context[row, :, low:high], grad_weight[row, :, low:high], grad_bias[row, 0, low:high] = ZERO, ZERO, ZERO
        for t in range(grad_x.shape[1]):
            coming = _token(grad_out, context, row, t, low, high)
            if silu:
                _convolve(x, context, weight, bias, row, t, low, high, grad)
                _silu_grad(grad, coming)
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


def dense_channels(tensor: Tensor) -> Tensor:
    """The tensor with its last axis side by side in memory: itself, also as a slice of a wider one, or else a copy."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def forward(x: Tensor, context: Tensor, weight: Tensor, bias: Tensor, silu: bool, out: Tensor) -> None:
    """Fill out. context is [batch, taps - 1, channels], weight [taps, channels], bias [1, channels]."""
    dense = arrays(context, weight, bias)
    run_blocks(_forward, column_blocks(out), tokens_of(dense_channels(x)), *dense, silu, out.numpy())


def backward(x: Tensor, context: Tensor, weight: Tensor, bias: Tensor, silu: bool, grad_out: Tensor, *grads: Tensor) -> None:
    """Fill the gradients of x, context, weight and bias; the last two come per batch row."""
    dense = arrays(context, weight, bias)
    run_blocks(
        _backward,
        column_blocks(grads[0]),
        tokens_of(dense_channels(x)),
        *dense,
        silu,
        tokens_of(dense_channels(grad_out)),
        *arrays(*grads),
    )
