"""Backward of `selective_scan_cpu`: tile by tile from the end, each tile's states computed anew from its saved first one."""

from typing import Any

import numba
import numpy as np
from torch import Tensor

from needlework.kernels.jit import TOKENS, compiled, run_blocks, token_rows
from needlework.kernels.selective_scan_cpu import (
    _DENSE,
    _MASK,
    _MATRIX,
    _PARTIAL,
    _SAVED,
    _VECTOR,
    LANES,
    TILE,
    _enter,
    _helper,
    _skip,
    groups,
)
from needlework.kernels.vector_math import LN2, LOG2E, ONE, ZERO, exp2, sigmoid


@numba.njit(fastmath={"contract", "reassoc"})  # type: ignore[untyped-decorator]
def _dot(left: Any, t: int, right: Any, s: int, n: int) -> Any:
    """Sum over the lanes of left[t] * right[s, n]."""
    total = ZERO
    for j in range(LANES):
        total += left[t, j] * right[s, n, j]
    return total


@_helper  # type: ignore[untyped-decorator]
def _recompute(t: int, rate: Any, B: Any, C: Any, cut: bool, steps: Any, drive: Any, decays: Any, states: Any, result: Any) -> None:
    """states[t + 1] and, in `result`, the output of token t before its gate."""
    for n in range(rate.shape[0]):
        if cut:
            decays[t, n] = ZERO
        else:
            for j in range(LANES):
                decays[t, n, j] = exp2(steps[t, j] * rate[n, j])
        for j in range(LANES):
            states[t + 1, n, j] = decays[t, n, j] * states[t, n, j] + drive[t, j] * B[n]
        for j in range(LANES):
            result[j] += states[t + 1, n, j] * C[n]


@_helper  # type: ignore[untyped-decorator]
def _ungate(grad: Any, gate: Any, result: Any, grad_gate: Any, g_y: Any) -> None:
    """Gradients of result * silu(gate)."""
    for j in range(grad.size):
        s = sigmoid(gate[j])
        g_y[j] = grad[j] * gate[j] * s
        grad_gate[j] = grad[j] * result[j] * s * (ONE + gate[j] * (ONE - s))


@_helper  # type: ignore[untyped-decorator]
def _reverse(
    t: int, rate: Any, B: Any, C: Any, steps: Any, drive: Any, decays: Any, states: Any, g_y: Any,
    g: Any, g_rate: Any, g_drive: Any, g_steps: Any, through: Any, grad_B: Any, grad_C: Any,
) -> None:  # fmt: skip
    """Carry `g`, the gradient of the state after token t, to the state before it; collect all others on the way."""
    g_drive[:], g_steps[:] = ZERO, ZERO
    for n in range(rate.shape[0]):
        for j in range(LANES):
            g[0, n, j] += g_y[t, j] * C[n]
            g_drive[j] += g[0, n, j] * B[n]
        grad_C[n] = _dot(g_y, t, states, t + 1, n)
        grad_B[n] = _dot(drive, t, g, 0, n)
        for j in range(LANES):
            g[0, n, j] *= decays[t, n, j]
            through[j] = g[0, n, j] * states[t, n, j]
        for j in range(LANES):
            g_steps[j] += through[j] * rate[n, j]
            g_rate[n, j] += through[j] * steps[t, j]


@compiled(
    *(*TOKENS, *TOKENS, _MATRIX, _DENSE, _DENSE, _MASK, _SAVED, _VECTOR, _VECTOR, *TOKENS, *TOKENS, _DENSE),
    *(_DENSE, _DENSE, _DENSE, _PARTIAL, _PARTIAL, _DENSE, _MATRIX, _MATRIX, _DENSE),
)
def _backward(
    first: int, stop: int, x: Any, x_row: int, x_token: int, dt: Any, dt_row: int, dt_token: int, A: Any, B: Any, C: Any,
    reset: Any, saved: Any, bias: Any, skip: Any, z: Any, z_row: int, z_token: int,
    grad_out: Any, grad_row: int, grad_token: int, grad_final: Any,
    grad_x: Any, grad_dt: Any, grad_A: Any, grad_B: Any, grad_C: Any, grad_state: Any, grad_bias: Any, grad_skip: Any,
    grad_z: Any,
) -> None:  # fmt: skip
    inner, n_state, length = A.shape[0], A.shape[1], B.shape[1]
    blocks = (inner + LANES - 1) // LANES
    rate, g_rate = np.zeros((n_state, LANES), np.float32), np.zeros((n_state, LANES), np.float32)
    g = np.zeros((1, n_state, LANES), np.float32)
    decays = np.zeros((TILE, n_state, LANES), np.float32)
    states = np.zeros((TILE + 1, n_state, LANES), np.float32)
    steps, drive = np.zeros((TILE, LANES), np.float32), np.zeros((TILE, LANES), np.float32)
    g_y = np.zeros((TILE, LANES), np.float32)
    g_drive, g_steps = np.zeros(LANES, np.float32), np.zeros(LANES, np.float32)
    result, through = np.zeros(LANES, np.float32), np.zeros(LANES, np.float32)
    for block in range(first, stop):
        row, group = block // blocks, block % blocks
        low = group * LANES
        high = min(inner, low + LANES)
        steps[:], drive[:], g_y[:], g[:], g_rate[:] = ZERO, ZERO, ZERO, ZERO, ZERO  # lanes without a channel stay at zero
        for j in range(high - low):
            for n in range(n_state):
                rate[n, j] = A[low + j, n] * LOG2E
                g[0, n, j] = grad_final[row, low + j, n]
        for tile in range((length + TILE - 1) // TILE - 1, -1, -1):
            start = tile * TILE
            tokens = min(TILE, length - start)
            states[0] = saved[row, tile, group]
            for t in range(tokens):
                at = row * x_row + (start + t) * x_token
                here = x[at + low : at + high]
                at = row * dt_row + (start + t) * dt_token
                _enter(here, dt[at + low : at + high], bias[low:high], steps[t], drive[t])
                _skip(here, skip[low:high], result)
                cut = reset.shape[1] > 0 and reset[row, start + t]
                _recompute(t, rate, B[row, start + t], C[row, start + t], cut, steps, drive, decays, states, result)
                at = row * grad_row + (start + t) * grad_token
                grad = grad_out[at + low : at + high]
                if z.size > 0:
                    at = row * z_row + (start + t) * z_token
                    _ungate(grad, z[at + low : at + high], result, grad_z[row, start + t, low:high], g_y[t])
                else:
                    g_y[t, : high - low] = grad
            for t in range(tokens - 1, -1, -1):
                _reverse(
                    t, rate, B[row, start + t], C[row, start + t], steps, drive, decays, states, g_y, g, g_rate, g_drive,
                    g_steps, through, grad_B[row, group, start + t], grad_C[row, group, start + t],
                )  # fmt: skip
                at = row * x_row + (start + t) * x_token
                here = x[at + low : at + high]
                at = row * dt_row + (start + t) * dt_token
                _leave(
                    here, dt[at + low : at + high], bias[low:high], skip[low:high], steps[t], g_y[t], g_drive, g_steps,
                    grad_x[row, start + t, low:high], grad_dt[row, start + t, low:high],
                    grad_bias[row, low:high], grad_skip[row, low:high],
                )  # fmt: skip
        for j in range(high - low):
            for n in range(n_state):
                grad_A[row, low + j, n] = g_rate[n, j]
                grad_state[row, low + j, n] = g[0, n, j]


@_helper  # type: ignore[untyped-decorator]
def _leave(
    x: Any, dt: Any, bias: Any, skip: Any, steps: Any, g_y: Any, g_drive: Any, g_steps: Any,
    grad_x: Any, grad_dt: Any, grad_bias: Any, grad_skip: Any,
) -> None:  # fmt: skip
    """From the gradients of step and drive to those of x, dt, bias and skip."""
    for j in range(x.size):
        grad_x[j] = g_drive[j] * steps[j]
    for j in range(x.size):
        grad_dt[j] = g_steps[j] * LN2 + g_drive[j] * x[j]
    if bias.size > 0:
        for j in range(x.size):
            grad_dt[j] *= sigmoid(dt[j] + bias[j])
        for j in range(x.size):
            grad_bias[j] += grad_dt[j]
    if skip.size > 0:
        for j in range(x.size):
            grad_x[j] += g_y[j] * skip[j]
        for j in range(x.size):
            grad_skip[j] += g_y[j] * x[j]


def backward(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, reset: Tensor, saved: Tensor, bias: Tensor, skip: Tensor,
    z: Tensor, grad_out: Tensor, grad_final: Tensor, *grads: Tensor,
) -> None:  # fmt: skip
    """Fill the gradients of x, dt, A, B, C, state, bias, skip, z.

    Those of A, bias and skip come per batch row and those of B and C per block of channels: the caller adds them up, always
    in the same order. Those of bias and skip must be zero on entry.
    """
    dense = [tensor.numpy() for tensor in (A, B, C, reset, saved, bias, skip)]
    run_blocks(
        _backward,
        x.shape[0] * groups(A.shape[0]),
        *(*token_rows(x), *token_rows(dt), *dense, *token_rows(z), *token_rows(grad_out)),
        *(tensor.numpy() for tensor in (grad_final, *grads)),
    )
