"""Backward pass of `selective_scan_cpu`. From the last tile to the first; states are recomputed from each tile's saved one."""

from typing import Any

import numba
import numpy as np
from torch import Tensor

from needlework.kernels.jit import TOKENS, arrays, compiled, run_blocks, tokens_of
from needlework.kernels.selective_scan_cpu import SAVED, activate, enter
from needlework.kernels.tiles import DENSE, LANES, MASK, MATRIX, TILE, VECTOR, groups, helper, lanes_of, load, store
from needlework.kernels.vector_math import LN2, LOG2E, ONE, ZERO, exp2, sigmoid

_PARTIAL = "float32[:,:,:,::1]"  # [batch, blocks, time, n]


@numba.njit(fastmath={"contract", "reassoc"})  # type: ignore[untyped-decorator]
def _dot(left: Any, t: int, right: Any, s: int, n: int) -> Any:
    """Sum over the lanes of left[t] * right[s, n]."""
    total = ZERO
    for j in range(LANES):
        total += left[t, j] * right[s, n, j]
    return total


@helper  # type: ignore[untyped-decorator]
def _recompute(
    steps: Any,
    drive: Any,
    rate: Any,
    B: Any,
    C: Any,
    row: int,
    start: int,
    t: int,
    cut: bool,
    decays: Any,
    states: Any,
    result: Any,
) -> None:
    """decays[t], states[t + 1] and the output of token t."""
    for n in range(rate.shape[0]):
        b, c = B[row, start + t, n], C[row, start + t, n]
        if cut:
            for j in range(LANES):
                decays[t, n, j] = ZERO
        else:
            for j in range(LANES):
                decays[t, n, j] = exp2(steps[t, j] * rate[n, j])
        for j in range(LANES):
            states[t + 1, n, j] = decays[t, n, j] * states[t, n, j] + drive[t, j] * b
            result[t, j] += states[t + 1, n, j] * c


@helper  # type: ignore[untyped-decorator]
def _ungate(gates: Any, result: Any, tokens: int, g_y: Any) -> None:
    """From the gradient of y * silu(z) in g_y to that of y there, and that of z in place of z."""
    for t in range(tokens):
        for j in range(LANES):
            z, grad = gates[t, j], g_y[t, j]
            s = sigmoid(z)
            g_y[t, j] = grad * z * s
            gates[t, j] = grad * result[t, j] * s * (ONE + z * (ONE - s))


@helper  # type: ignore[untyped-decorator]
def _reverse(
    steps: Any,
    drive: Any,
    rate: Any,
    B: Any,
    C: Any,
    row: int,
    start: int,
    t: int,
    decays: Any,
    states: Any,
    g_y: Any,
    g: Any,
    g_rate: Any,
    g_drive: Any,
    g_steps: Any,
    through: Any,
    group: int,
    grad_B: Any,
    grad_C: Any,
) -> None:
    """Carry `g`, the gradient of the state after token t, to the state before it; collect all others on the way."""
    for j in range(LANES):
        g_drive[t, j] = ZERO
        g_steps[t, j] = ZERO
    for n in range(rate.shape[0]):
        b, c = B[row, start + t, n], C[row, start + t, n]
        for j in range(LANES):
            g[0, n, j] += g_y[t, j] * c
            g_drive[t, j] += g[0, n, j] * b
        grad_C[row, group, start + t, n] = _dot(g_y, t, states, t + 1, n)
        grad_B[row, group, start + t, n] = _dot(drive, t, g, 0, n)
        for j in range(LANES):
            g[0, n, j] *= decays[t, n, j]
            through[j] = g[0, n, j] * states[t, n, j]
        for j in range(LANES):
            g_steps[t, j] += through[j] * rate[n, j]
            g_rate[n, j] += through[j] * steps[t, j]


@helper  # type: ignore[untyped-decorator]
def _leave(inputs: Any, steps: Any, skip: Any, tokens: int, g_y: Any, g_drive: Any, g_steps: Any, g_skip: Any) -> None:
    """From the gradients of drive and steps to those of x (in g_drive), dt (in g_steps) and skip."""
    for t in range(tokens):
        for j in range(LANES):
            grad = g_drive[t, j]
            g_steps[t, j] = g_steps[t, j] * LN2 + grad * inputs[t, j]
            g_drive[t, j] = grad * steps[t, j] + g_y[t, j] * skip[j]
        for j in range(LANES):
            g_skip[j] += g_y[t, j] * inputs[t, j]


@helper  # type: ignore[untyped-decorator]
def _deactivate(raw: Any, bias: Any, tokens: int, g_steps: Any, g_bias: Any) -> None:
    for t in range(tokens):
        for j in range(LANES):
            g_steps[t, j] *= sigmoid(raw[t, j] + bias[j])
            g_bias[j] += g_steps[t, j]


@compiled(
    *(TOKENS, TOKENS, MATRIX, DENSE, DENSE, MASK, SAVED, VECTOR, VECTOR, TOKENS, TOKENS, DENSE),
    *(VECTOR, VECTOR, VECTOR, DENSE, _PARTIAL, _PARTIAL, DENSE, MATRIX, MATRIX),
)
def _backward(
    first: int,
    stop: int,
    x: Any,
    dt: Any,
    A: Any,
    B: Any,
    C: Any,
    reset: Any,
    saved: Any,
    bias: Any,
    skip: Any,
    z: Any,
    grad_out: Any,
    grad_final: Any,
    grad_x: Any,
    grad_dt: Any,
    grad_z: Any,
    grad_A: Any,
    grad_B: Any,
    grad_C: Any,
    grad_state: Any,
    grad_bias: Any,
    grad_skip: Any,
) -> None:
    inner, n_state, length = A.shape[0], A.shape[1], B.shape[1]
    blocks = (inner + LANES - 1) // LANES
    rate, g_rate = np.zeros((n_state, LANES), np.float32), np.zeros((n_state, LANES), np.float32)
    g = np.zeros((1, n_state, LANES), np.float32)
    decays, states = np.zeros((TILE, n_state, LANES), np.float32), np.zeros((TILE + 1, n_state, LANES), np.float32)
    biases, skips = np.zeros(LANES, np.float32), np.zeros(LANES, np.float32)
    g_bias, g_skip, through = np.zeros(LANES, np.float32), np.zeros(LANES, np.float32), np.zeros(LANES, np.float32)
    inputs, raw = np.zeros((TILE, LANES), np.float32), np.zeros((TILE, LANES), np.float32)
    steps, drive = np.zeros((TILE, LANES), np.float32), np.zeros((TILE, LANES), np.float32)
    result, gates = np.zeros((TILE, LANES), np.float32), np.zeros((TILE, LANES), np.float32)
    g_y, g_drive = np.zeros((TILE, LANES), np.float32), np.zeros((TILE, LANES), np.float32)
    g_steps = np.zeros((TILE, LANES), np.float32)
    for block in range(first, stop):
        row, group = block // blocks, block % blocks
        low = group * LANES
        lanes = min(LANES, inner - low)
        if lanes < LANES:  # the lanes without a channel must not bring what an earlier block left there into the sums
            rate[:], inputs[:], raw[:], g_y[:], g[:] = ZERO, ZERO, ZERO, ZERO, ZERO
        g_rate[:], g_bias[:], g_skip[:] = ZERO, ZERO, ZERO
        lanes_of(bias, low, lanes, biases)
        lanes_of(skip, low, lanes, skips)
        for j in range(lanes):
            for n in range(n_state):
                rate[n, j] = A[low + j, n] * LOG2E
                g[0, n, j] = grad_final[row, low + j, n]
        for tile in range((length + TILE - 1) // TILE - 1, -1, -1):
            start = tile * TILE
            tokens = min(TILE, length - start)
            dense = (row * length + start) * inner + low
            load(x, row, start, low, lanes, tokens, inputs)
            load(dt, row, start, low, lanes, tokens, raw)
            load(grad_out, row, start, low, lanes, tokens, g_y)
            if bias.size > 0:
                activate(raw, biases, tokens, steps)
            else:
                steps[:] = raw
            enter(inputs, steps, skips, tokens, drive, result)
            states[0] = saved[row, tile, group]
            for t in range(tokens):
                cut = reset.shape[1] > 0 and reset[row, start + t]
                _recompute(steps, drive, rate, B, C, row, start, t, cut, decays, states, result)
            if z[0].size > 0:
                load(z, row, start, low, lanes, tokens, gates)
                _ungate(gates, result, tokens, g_y)
                store(gates, grad_z, dense, inner, lanes, tokens)
            for t in range(tokens - 1, -1, -1):
                _reverse(
                    steps,
                    drive,
                    rate,
                    B,
                    C,
                    row,
                    start,
                    t,
                    decays,
                    states,
                    g_y,
                    g,
                    g_rate,
                    g_drive,
                    g_steps,
                    through,
                    group,
                    grad_B,
                    grad_C,
                )
            _leave(inputs, steps, skips, tokens, g_y, g_drive, g_steps, g_skip)
            if bias.size > 0:
                _deactivate(raw, biases, tokens, g_steps, g_bias)
            store(g_drive, grad_x, dense, inner, lanes, tokens)
            store(g_steps, grad_dt, dense, inner, lanes, tokens)
        for j in range(lanes):
            grad_bias[row, low + j], grad_skip[row, low + j] = g_bias[j], g_skip[j]
            for n in range(n_state):
                grad_A[row, low + j, n] = g_rate[n, j]
                grad_state[row, low + j, n] = g[0, n, j]


def backward(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    reset: Tensor,
    saved: Tensor,
    bias: Tensor,
    skip: Tensor,
    z: Tensor,
    grad_out: Tensor,
    grad_final: Tensor,
    *grads: Tensor,
) -> None:
    """Fill the gradients of x, dt, z, A, B, C, state, bias and skip (the last two also where there is none).

    Those of A, bias and skip come per batch row and those of B and C per block of channels: the caller adds them up,
    always in the same order.
    """
    dense = arrays(A, B, C, reset, saved, bias, skip)
    filled = arrays(*(tensor.view(-1) for tensor in grads[:3]), *grads[3:])
    run_blocks(
        _backward,
        x.shape[0] * groups(A.shape[0]),
        *(tokens_of(x), tokens_of(dt), *dense, tokens_of(z), tokens_of(grad_out), *arrays(grad_final)),
        *filled,
    )
