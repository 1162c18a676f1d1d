"""Mamba-1 selective scan on the CPU, forward and backward.

A block is LANES channels of one batch row: the state of a block stays in cache, the lanes are the vector dimension, and the
time axis is walked in tiles of TILE tokens that are copied into a small scratch, whatever the layout of the tensors is.
The forward pass keeps the state at the start of every tile; the backward pass recomputes the states of one tile at a time
from there, so the [batch, inner, time, n] states never exist at once.
"""

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic
from torch import Tensor

from needlework.kernels.jit import compiled, run_blocks

LANES = 64
TILE = 32

_ANY = "float32[:,:,:]"  # [batch, inner, time], any strides
_DENSE2 = "float32[:,::1]"
_DENSE3 = "float32[:,:,::1]"
_DENSE5 = "float32[:,:,:,:,::1]"
_MASK = "boolean[:,::1]"


@intrinsic  # type: ignore[untyped-decorator]
def _scale_by_power_of_two(typing_context: Any, value: Any, shifter: Any) -> Any:
    """value * 2**k, where the low bits of the float `shifter` hold the integer k: an addition to the exponent bits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(32)
        shifted = builder.shl(builder.bitcast(args[1], word), ir.Constant(word, 23))
        return builder.bitcast(builder.add(builder.bitcast(args[0], word), shifted), ir.FloatType())

    return types.float32(types.float32, types.float32), generate


_LOWEST, _HIGHEST = np.float32(-126.0), np.float32(127.0)
_SHIFTER = np.float32(12582912.0)  # 1.5 * 2**23: adding it rounds to an integer and leaves that integer in the low bits
# Minimax polynomial of 2**f on [-0.5, 0.5], relative error 2e-9 before rounding.
_C1, _C2, _C3 = np.float32(6.9314720286e-1), np.float32(2.4022647914e-1), np.float32(5.5503324711e-2)
_C4, _C5, _C6 = np.float32(9.6184373578e-3), np.float32(1.3398874422e-3), np.float32(1.5353361890e-4)
_LOG2E, _LN2 = np.float32(1.4426950408889634), np.float32(0.6931471805599453)
_ONE, _ZERO = np.float32(1.0), np.float32(0.0)


@numba.njit(fastmath={"contract"}, inline="always")  # type: ignore[untyped-decorator]
def exp2(z: Any) -> Any:
    """2**z in fp32 to 1e-7, in plain arithmetic that the compiler turns into vector code (libm's it does not).

    Saturates at 2**-126 and 2**127; NaN goes through.
    """
    z = _LOWEST if z < _LOWEST else z
    z = _HIGHEST if z > _HIGHEST else z
    shifted = z + _SHIFTER
    f = z - (shifted - _SHIFTER)
    p = (((((_C6 * f + _C5) * f + _C4) * f + _C3) * f + _C2) * f + _C1) * f + _ONE
    return _scale_by_power_of_two(p, shifted)


@numba.njit  # type: ignore[untyped-decorator]
def _load(source: Any, tile: Any) -> None:
    """tile[token, lane] = source[lane, token], reading along the dense axis of `source`."""
    lanes, tokens = source.shape
    if source.strides[0] < source.strides[1]:
        for t in range(tokens):
            for j in range(lanes):
                tile[t, j] = source[j, t]
    else:
        for j in range(lanes):
            for t in range(tokens):
                tile[t, j] = source[j, t]


@numba.njit  # type: ignore[untyped-decorator]
def _store(tile: Any, target: Any) -> None:
    """The inverse of `_load`."""
    lanes, tokens = target.shape
    if target.strides[0] < target.strides[1]:
        for t in range(tokens):
            for j in range(lanes):
                target[j, t] = tile[t, j]
    else:
        for j in range(lanes):
            for t in range(tokens):
                target[j, t] = tile[t, j]


@compiled(_ANY, _ANY, _DENSE2, _DENSE3, _DENSE3, _MASK, _DENSE3, _ANY, _DENSE3, _DENSE5)
def _forward(
    first: int,
    stop: int,
    x: Any,
    dt: Any,
    A: Any,
    B: Any,
    C: Any,
    reset: Any,
    state: Any,
    y: Any,
    final: Any,
    saved: Any,
) -> None:
    inner, length, n_state = x.shape[1], x.shape[2], A.shape[1]
    groups = (inner + LANES - 1) // LANES
    rate = np.zeros((n_state, LANES), np.float32)
    h = np.zeros((n_state, LANES), np.float32)
    steps = np.zeros((TILE, LANES), np.float32)
    drive = np.zeros((TILE, LANES), np.float32)
    result = np.zeros((TILE, LANES), np.float32)
    for block in range(first, stop):
        row, channel = block // groups, (block % groups) * LANES
        lanes = min(LANES, inner - channel)
        if lanes < LANES:  # the lanes without a channel must not carry what an earlier block left there
            steps[:], drive[:], h[:] = _ZERO, _ZERO, _ZERO
        for n in range(n_state):
            for j in range(lanes):
                rate[n, j] = A[channel + j, n] * _LOG2E
                h[n, j] = state[row, channel + j, n]
        for start in range(0, length, TILE):
            tokens = min(TILE, length - start)
            if saved.shape[0] > 0:
                saved[row, start // TILE, block % groups] = h
            _load(dt[row, channel : channel + lanes, start : start + tokens], steps)
            _load(x[row, channel : channel + lanes, start : start + tokens], drive)
            for t in range(tokens):
                if reset.shape[1] > 0 and reset[row, start + t]:
                    h[:] = _ZERO
                for j in range(LANES):
                    drive[t, j] *= steps[t, j]
                    result[t, j] = _ZERO
                for n in range(n_state):
                    b_n, c_n = B[row, start + t, n], C[row, start + t, n]
                    for j in range(LANES):
                        new = exp2(steps[t, j] * rate[n, j]) * h[n, j] + drive[t, j] * b_n
                        h[n, j] = new
                        result[t, j] += new * c_n
            _store(result, y[row, channel : channel + lanes, start : start + tokens])
        for n in range(n_state):
            for j in range(lanes):
                final[row, channel + j, n] = h[n, j]


@numba.njit(fastmath={"contract", "reassoc"})  # type: ignore[untyped-decorator]
def _dot(left: Any, right: Any) -> Any:
    total = _ZERO
    for j in range(LANES):
        total += left[j] * right[j]
    return total


@compiled(
    *(_ANY, _ANY, _DENSE2, _DENSE3, _DENSE3, _MASK, _DENSE5, _ANY, _DENSE3),
    *(_ANY, _ANY, _DENSE3, "float32[:,:,:,::1]", "float32[:,:,:,::1]", _DENSE3),
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
    grad_y: Any,
    grad_final: Any,
    grad_x: Any,
    grad_dt: Any,
    grad_A: Any,
    grad_B: Any,
    grad_C: Any,
    grad_state: Any,
) -> None:
    inner, length, n_state = x.shape[1], x.shape[2], A.shape[1]
    groups = (inner + LANES - 1) // LANES
    rate = np.zeros((n_state, LANES), np.float32)
    g = np.zeros((n_state, LANES), np.float32)
    g_rate = np.zeros((n_state, LANES), np.float32)
    decays = np.zeros((TILE, n_state, LANES), np.float32)
    states = np.zeros((TILE + 1, n_state, LANES), np.float32)
    steps = np.zeros((TILE, LANES), np.float32)
    inputs = np.zeros((TILE, LANES), np.float32)
    drive = np.zeros((TILE, LANES), np.float32)
    g_y = np.zeros((TILE, LANES), np.float32)
    g_inputs = np.zeros((TILE, LANES), np.float32)
    g_steps = np.zeros((TILE, LANES), np.float32)
    g_drive = np.zeros(LANES, np.float32)
    through = np.zeros(LANES, np.float32)
    for block in range(first, stop):
        row, group = block // groups, block % groups
        channel = group * LANES
        lanes = min(LANES, inner - channel)
        g_rate[:] = _ZERO
        if lanes < LANES:  # the lanes without a channel must not carry what an earlier block left there
            steps[:], inputs[:], g_y[:], g[:] = _ZERO, _ZERO, _ZERO, _ZERO
        for n in range(n_state):
            for j in range(lanes):
                rate[n, j] = A[channel + j, n] * _LOG2E
                g[n, j] = grad_final[row, channel + j, n]
        for tile in range((length + TILE - 1) // TILE - 1, -1, -1):
            start = tile * TILE
            tokens = min(TILE, length - start)
            _load(dt[row, channel : channel + lanes, start : start + tokens], steps)
            _load(x[row, channel : channel + lanes, start : start + tokens], inputs)
            _load(grad_y[row, channel : channel + lanes, start : start + tokens], g_y)
            states[0] = saved[row, tile, group]
            for t in range(tokens):
                cut = reset.shape[1] > 0 and reset[row, start + t]
                for j in range(LANES):
                    drive[t, j] = steps[t, j] * inputs[t, j]
                for n in range(n_state):
                    b_n = B[row, start + t, n]
                    if cut:
                        decays[t, n] = _ZERO
                    else:
                        for j in range(LANES):
                            decays[t, n, j] = exp2(steps[t, j] * rate[n, j])
                    for j in range(LANES):
                        states[t + 1, n, j] = decays[t, n, j] * states[t, n, j] + drive[t, j] * b_n
            for t in range(tokens - 1, -1, -1):
                g_drive[:] = _ZERO
                g_steps[t] = _ZERO
                for n in range(n_state):
                    b_n, c_n = B[row, start + t, n], C[row, start + t, n]
                    for j in range(LANES):
                        g[n, j] += g_y[t, j] * c_n
                        g_drive[j] += g[n, j] * b_n
                    grad_C[row, group, start + t, n] = _dot(g_y[t], states[t + 1, n])
                    grad_B[row, group, start + t, n] = _dot(g[n], drive[t])
                    for j in range(LANES):
                        g[n, j] *= decays[t, n, j]
                        through[j] = g[n, j] * states[t, n, j]
                    for j in range(LANES):
                        g_steps[t, j] += through[j] * rate[n, j]
                        g_rate[n, j] += through[j] * steps[t, j]
                for j in range(LANES):
                    g_inputs[t, j] = g_drive[j] * steps[t, j]
                    g_steps[t, j] = g_steps[t, j] * _LN2 + g_drive[j] * inputs[t, j]
            _store(g_inputs, grad_x[row, channel : channel + lanes, start : start + tokens])
            _store(g_steps, grad_dt[row, channel : channel + lanes, start : start + tokens])
        for n in range(n_state):
            for j in range(lanes):
                grad_A[row, channel + j, n] = g_rate[n, j]
                grad_state[row, channel + j, n] = g[n, j]


def groups(inner: int) -> int:
    """How many blocks of channels one batch row has."""
    return (inner + LANES - 1) // LANES


def forward(x: Tensor, *rest: Tensor) -> None:
    """x, dt [batch, inner, time], A, B, C, reset, state -> y, final, saved (an empty `saved` keeps nothing)."""
    run_blocks(_forward, x.shape[0] * groups(x.shape[1]), *(tensor.numpy() for tensor in (x, *rest)))


def backward(x: Tensor, *rest: Tensor) -> None:
    """x, dt, A, B, C, reset, saved, grad_y, grad_final -> grad_x, grad_dt, grad_A, grad_B, grad_C, grad_state.

    grad_A comes per batch row and grad_B, grad_C per block of channels: the caller adds them up in a fixed order.
    """
    run_blocks(_backward, x.shape[0] * groups(x.shape[1]), *(tensor.numpy() for tensor in (x, *rest)))
