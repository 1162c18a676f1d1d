"""CPU kernels of the Mamba-1 selective scan, fused with time steps, skip and gate.

If gradients are needed, the state at the start of every tile is saved. The backward pass goes from the last tile to the
first and recomputes the states of one tile at a time, so that the [batch, time, inner, n] states are never all allocated.
"""

from typing import Any

import numba
import numpy as np

from needlework.kernels.jit import DENSE, MASK, MATRIX, TOKENS, VECTOR, compile_kernel, helper
from needlework.kernels.tiles import LANES, TILE, load_lanes, load_tile, store_tile
from needlework.kernels.vector_math import LN2, LOG2E, ONE, ZERO, exp2, sigmoid, softplus

_SAVED = "float32[:,:,:,:,::1]"  # [batch, tiles, blocks, n, lanes], or empty
_PARTIAL = "float32[:,:,:,::1]"  # [batch, blocks, time, n]


@helper  # type: ignore[untyped-decorator]
def _compute_steps(raw: Any, bias: Any, tokens: int, steps: Any) -> None:
    """Compute steps = softplus(raw + bias)."""
    for t in range(tokens):
        for j in range(LANES):
            steps[t, j] = softplus(raw[t, j] + bias[j])


@helper  # type: ignore[untyped-decorator]
def _prepare_inputs(inputs: Any, steps: Any, skip: Any, tokens: int, drive: Any, result: Any) -> None:
    """Compute drive = steps * inputs, which enters the state, and result = skip * inputs, which is part of the output."""
    for t in range(tokens):
        for j in range(LANES):
            drive[t, j] = steps[t, j] * inputs[t, j]
            result[t, j] = skip[j] * inputs[t, j]


@helper  # type: ignore[untyped-decorator]
def _scan_token(steps: Any, drive: Any, rate: Any, B: Any, C: Any, row: int, start: int, t: int, h: Any, result: Any) -> None:
    for n in range(rate.shape[0]):
        b, c = B[row, start + t, n], C[row, start + t, n]
        for j in range(LANES):
            new = exp2(steps[t, j] * rate[n, j]) * h[n, j] + drive[t, j] * b
            h[n, j] = new
            result[t, j] += new * c


@helper  # type: ignore[untyped-decorator]
def _apply_gate(gates: Any, tokens: int, result: Any) -> None:
    for t in range(tokens):
        for j in range(LANES):
            result[t, j] *= gates[t, j] * sigmoid(gates[t, j])


@compile_kernel(TOKENS, TOKENS, MATRIX, DENSE, DENSE, MASK, DENSE, VECTOR, VECTOR, TOKENS, VECTOR, DENSE, _SAVED)
def forward(
    first: int,
    stop: int,
    x: Any,
    dt: Any,
    A: Any,
    B: Any,
    C: Any,
    reset: Any,
    state: Any,
    bias: Any,
    skip: Any,
    z: Any,
    out: Any,
    final: Any,
    saved: Any,
) -> None:
    inner, n_state, length = A.shape[0], A.shape[1], B.shape[1]
    blocks = (inner + LANES - 1) // LANES
    rate, h = np.zeros((n_state, LANES), np.float32), np.zeros((n_state, LANES), np.float32)
    biases, skips = np.zeros(LANES, np.float32), np.zeros(LANES, np.float32)
    inputs, steps = np.zeros((TILE, LANES), np.float32), np.zeros((TILE, LANES), np.float32)
    drive, result = np.zeros((TILE, LANES), np.float32), np.zeros((TILE, LANES), np.float32)
    for block in range(first, stop):
        row, low = block // blocks, (block % blocks) * LANES
        lanes = min(LANES, inner - low)
        if lanes < LANES:  # clear the values of an earlier block in lanes without a channel
            rate[:], h[:], inputs[:], steps[:], drive[:] = ZERO, ZERO, ZERO, ZERO, ZERO
        load_lanes(bias, low, lanes, biases)
        load_lanes(skip, low, lanes, skips)
        for j in range(lanes):
            for n in range(n_state):
                rate[n, j] = A[low + j, n] * LOG2E
                h[n, j] = state[row, low + j, n]
        for start in range(0, length, TILE):
            tokens = min(TILE, length - start)
            if saved.shape[0] > 0:
                saved[row, start // TILE, block % blocks] = h
            load_tile(x, row, start, low, lanes, tokens, inputs)
            load_tile(dt, row, start, low, lanes, tokens, drive if bias.size > 0 else steps)
            if bias.size > 0:  # reads from another array than it writes, or the loop would not be vectorised
                _compute_steps(drive, biases, tokens, steps)
            _prepare_inputs(inputs, steps, skips, tokens, drive, result)
            for t in range(tokens):
                if reset.shape[1] > 0 and reset[row, start + t]:
                    h[:] = ZERO
                _scan_token(steps, drive, rate, B, C, row, start, t, h, result)
            if z[0].size > 0:
                load_tile(z, row, start, low, lanes, tokens, inputs)
                _apply_gate(inputs, tokens, result)
            store_tile(result, out, (row * length + start) * inner + low, inner, lanes, tokens)
        for j in range(lanes):
            for n in range(n_state):
                final[row, low + j, n] = h[n, j]


@numba.njit(fastmath={"contract", "reassoc"})  # type: ignore[untyped-decorator]
def _dot(left: Any, t: int, right: Any, s: int, n: int) -> Any:
    """Return the sum over lanes of left[t] * right[s, n]."""
    total = ZERO
    for j in range(LANES):
        total += left[t, j] * right[s, n, j]
    return total


@helper  # type: ignore[untyped-decorator]
def _recompute_token(tile: Any, B: Any, C: Any, row: int, start: int, t: int, cut: bool, result: Any) -> None:
    """Compute decays[t], states[t + 1] and the output of token t; `cut`: the state is reset before it."""
    steps, drive, rate, decays, states = tile
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
def _reverse_gate(gates: Any, result: Any, tokens: int, g_y: Any) -> None:
    """Replace `g_y`, the gradient of y * silu(z), by that of y, and `gates` (z) by the gradient of z."""
    for t in range(tokens):
        for j in range(LANES):
            z, grad = gates[t, j], g_y[t, j]
            s = sigmoid(z)
            g_y[t, j] = grad * z * s
            gates[t, j] = grad * result[t, j] * s * (ONE + z * (ONE - s))


@helper  # type: ignore[untyped-decorator]
def _reverse_token(tile: Any, projections: Any, at: Any, t: int, g_y: Any, g: Any, sums: Any, through: Any) -> None:
    """Propagate `g`, the gradient of the state after token t, to the state before it; accumulate all other gradients."""
    steps, drive, rate, decays, states = tile
    B, C, grad_B, grad_C = projections
    row, group, start = at
    g_rate, g_drive, g_steps = sums
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
def _reverse_inputs(inputs: Any, steps: Any, skip: Any, tokens: int, g_y: Any, g_drive: Any, g_steps: Any, g_skip: Any) -> None:
    """Replace `g_drive` and `g_steps`, the gradients of drive and steps, by those of x and dt; add to that of skip."""
    for t in range(tokens):
        for j in range(LANES):
            grad = g_drive[t, j]
            g_steps[t, j] = g_steps[t, j] * LN2 + grad * inputs[t, j]
            g_drive[t, j] = grad * steps[t, j] + g_y[t, j] * skip[j]
        for j in range(LANES):
            g_skip[j] += g_y[t, j] * inputs[t, j]


@helper  # type: ignore[untyped-decorator]
def _reverse_steps(raw: Any, bias: Any, tokens: int, g_steps: Any, g_bias: Any) -> None:
    for t in range(tokens):
        for j in range(LANES):
            g_steps[t, j] *= sigmoid(raw[t, j] + bias[j])
            g_bias[j] += g_steps[t, j]


@compile_kernel(
    *(TOKENS, TOKENS, MATRIX, DENSE, DENSE, MASK, _SAVED, VECTOR, VECTOR, TOKENS, TOKENS, DENSE),
    *(VECTOR, VECTOR, VECTOR, DENSE, _PARTIAL, _PARTIAL, DENSE, MATRIX, MATRIX),
)
def backward(
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
    tile_arrays, sums = (steps, drive, rate, decays, states), (g_rate, g_drive, g_steps)
    for block in range(first, stop):
        row, group = block // blocks, block % blocks
        low = group * LANES
        lanes = min(LANES, inner - low)
        if lanes < LANES:  # clear the values of an earlier block in lanes without a channel, which would enter the sums
            rate[:], inputs[:], raw[:], g_y[:], g[:] = ZERO, ZERO, ZERO, ZERO, ZERO
        g_rate[:], g_bias[:], g_skip[:] = ZERO, ZERO, ZERO
        load_lanes(bias, low, lanes, biases)
        load_lanes(skip, low, lanes, skips)
        for j in range(lanes):
            for n in range(n_state):
                rate[n, j] = A[low + j, n] * LOG2E
                g[0, n, j] = grad_final[row, low + j, n]
        for tile in range((length + TILE - 1) // TILE - 1, -1, -1):
            start = tile * TILE
            tokens = min(TILE, length - start)
            dense = (row * length + start) * inner + low
            load_tile(x, row, start, low, lanes, tokens, inputs)
            load_tile(dt, row, start, low, lanes, tokens, raw)
            load_tile(grad_out, row, start, low, lanes, tokens, g_y)
            if bias.size > 0:
                _compute_steps(raw, biases, tokens, steps)
            else:
                steps[:] = raw
            _prepare_inputs(inputs, steps, skips, tokens, drive, result)
            states[0] = saved[row, tile, group]
            for t in range(tokens):
                cut = reset.shape[1] > 0 and reset[row, start + t]
                _recompute_token(tile_arrays, B, C, row, start, t, cut, result)
            if z[0].size > 0:
                load_tile(z, row, start, low, lanes, tokens, gates)
                _reverse_gate(gates, result, tokens, g_y)
                store_tile(gates, grad_z, dense, inner, lanes, tokens)
            for t in range(tokens - 1, -1, -1):
                _reverse_token(tile_arrays, (B, C, grad_B, grad_C), (row, group, start), t, g_y, g, sums, through)
            _reverse_inputs(inputs, steps, skips, tokens, g_y, g_drive, g_steps, g_skip)
            if bias.size > 0:
                _reverse_steps(raw, biases, tokens, g_steps, g_bias)
            store_tile(g_drive, grad_x, dense, inner, lanes, tokens)
            store_tile(g_steps, grad_dt, dense, inner, lanes, tokens)
        for j in range(lanes):
            grad_bias[row, low + j], grad_skip[row, low + j] = g_bias[j], g_skip[j]
            for n in range(n_state):
                grad_A[row, low + j, n] = g_rate[n, j]
                grad_state[row, low + j, n] = g[0, n, j]
