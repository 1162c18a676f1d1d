"""Mamba-1 selective scan on the CPU, forward and backward, with what surrounds it in a mixer.

A block is LANES channels of one batch row: its state stays in cache, and the lanes are the vector dimension. The forward
pass keeps the state at every TILE-th token; the backward pass recomputes the states of one tile at a time from there, so
the [batch, time, inner, n] states never exist at once.

Loops run over local arrays from 0 on: an index that might be negative, as numba allows, would keep them from vector code.
"""

from typing import Any

import numba
import numpy as np
from torch import Tensor

from needlework.kernels.jit import TOKENS, compiled, run_blocks, token_rows
from needlework.kernels.vector_math import LN2, LOG2E, ONE, ZERO, exp2, sigmoid, softplus

LANES = 64
TILE = 32

_VECTOR = "float32[::1]"  # [inner], or empty
_MATRIX = "float32[:,::1]"
_DENSE = "float32[:,:,::1]"
_PARTIAL = "float32[:,:,:,::1]"
_SAVED = "float32[:,:,:,:,::1]"
_MASK = "boolean[:,::1]"  # [batch, time], or [1, 0] for no reset

_helper = numba.njit(fastmath={"contract"})


@_helper  # type: ignore[untyped-decorator]
def _enter(x: Any, dt: Any, bias: Any, steps: Any, drive: Any) -> None:
    """The time step of one token, and what it lets in."""
    if bias.size > 0:
        for j in range(x.size):
            steps[j] = softplus(dt[j] + bias[j])
    else:
        for j in range(x.size):
            steps[j] = dt[j]
    for j in range(x.size):
        drive[j] = steps[j] * x[j]


@_helper  # type: ignore[untyped-decorator]
def _skip(x: Any, skip: Any, result: Any) -> None:
    if skip.size > 0:
        for j in range(x.size):
            result[j] = skip[j] * x[j]
    else:
        result[:] = ZERO


@compiled(
    *TOKENS, *TOKENS, _MATRIX, _DENSE, _DENSE, _MASK, _DENSE, _VECTOR, _VECTOR, *TOKENS, *TOKENS, _DENSE, _SAVED
)
def _forward(
    first: int,
    stop: int,
    x: Any,
    x_row: int,
    x_token: int,
    dt: Any,
    dt_row: int,
    dt_token: int,
    A: Any,
    B: Any,
    C: Any,
    reset: Any,
    state: Any,
    bias: Any,
    skip: Any,
    z: Any,
    z_row: int,
    z_token: int,
    out: Any,
    out_row: int,
    out_token: int,
    final: Any,
    saved: Any,
) -> None:
    inner, n_state, length = A.shape[0], A.shape[1], B.shape[1]
    groups = (inner + LANES - 1) // LANES
    rate, h = np.zeros((n_state, LANES), np.float32), np.zeros((n_state, LANES), np.float32)
    steps, drive, result = np.zeros(LANES, np.float32), np.zeros(LANES, np.float32), np.zeros(LANES, np.float32)
    for block in range(first, stop):
        row, low = block // groups, (block % groups) * LANES
        high = min(inner, low + LANES)
        steps[:], drive[:], result[:] = ZERO, ZERO, ZERO  # lanes without a channel stay at zero
        h[:] = ZERO
        for j in range(high - low):
            for n in range(n_state):
                rate[n, j] = A[low + j, n] * LOG2E
                h[n, j] = state[row, low + j, n]
        for t in range(length):
            if saved.shape[0] > 0 and t % TILE == 0:
                saved[row, t // TILE, block % groups] = h
            if reset.shape[1] > 0 and reset[row, t]:
                h[:] = ZERO
            at = row * x_row + t * x_token
            here = x[at + low : at + high]
            at = row * dt_row + t * dt_token
            _enter(here, dt[at + low : at + high], bias[low:high], steps, drive)
            _skip(here, skip[low:high], result)
            for n in range(n_state):
                b_n, c_n = B[row, t, n], C[row, t, n]
                for j in range(LANES):
                    new = exp2(steps[j] * rate[n, j]) * h[n, j] + drive[j] * b_n
                    h[n, j] = new
                    result[j] += new * c_n
            at = row * out_row + t * out_token
            there = out[at + low : at + high]
            if z.size > 0:
                at = row * z_row + t * z_token
                gate = z[at + low : at + high]
                for j in range(there.size):
                    there[j] = result[j] * gate[j] * sigmoid(gate[j])
            else:
                for j in range(there.size):
                    there[j] = result[j]
        for j in range(high - low):
            for n in range(n_state):
                final[row, low + j, n] = h[n, j]


def groups(inner: int) -> int:
    """How many blocks of channels one batch row has."""
    return (inner + LANES - 1) // LANES


def forward(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    reset: Tensor,
    state: Tensor,
    bias: Tensor,
    skip: Tensor,
    z: Tensor,
    out: Tensor,
    final: Tensor,
    saved: Tensor,
) -> None:
    """Fill out, final and saved. Empty bias, skip, z: dt is ready, no skip, no gate. Empty saved: keep nothing."""
    dense = [tensor.numpy() for tensor in (A, B, C, reset, state, bias, skip)]
    run_blocks(
        _forward,
        x.shape[0] * groups(A.shape[0]),
        *(*token_rows(x), *token_rows(dt), *dense, *token_rows(z), *token_rows(out), final.numpy(), saved.numpy()),
    )
