"""Mamba-1 selective scan on the CPU, with what surrounds it in a mixer.

If a backward pass is to follow, the state at the start of every tile is kept: the backward pass recomputes the states
of one tile at a time from there, so the [batch, time, inner, n] states never exist at once.
"""

from typing import Any

import numpy as np
from torch import Tensor

from needlework.kernels.jit import TOKENS, arrays, compiled, run_blocks, tokens_of
from needlework.kernels.tiles import DENSE, LANES, MASK, MATRIX, TILE, VECTOR, groups, helper, lanes_of, load, store
from needlework.kernels.vector_math import LOG2E, ZERO, exp2, sigmoid, softplus

SAVED = "float32[:,:,:,:,::1]"  # [batch, tiles, blocks, n, lanes], or empty


@helper  # type: ignore[untyped-decorator]
def activate(raw: Any, bias: Any, tokens: int, steps: Any) -> None:
    """Time steps: softplus(raw + bias)."""
    for t in range(tokens):
        for j in range(LANES):
            steps[t, j] = softplus(raw[t, j] + bias[j])


@helper  # type: ignore[untyped-decorator]
def enter(inputs: Any, steps: Any, skip: Any, tokens: int, drive: Any, result: Any) -> None:
    """What a token lets into the state, and what passes it by."""
    for t in range(tokens):
        for j in range(LANES):
            drive[t, j] = steps[t, j] * inputs[t, j]
            result[t, j] = skip[j] * inputs[t, j]


@helper  # type: ignore[untyped-decorator]
def _scan(steps: Any, drive: Any, rate: Any, B: Any, C: Any, row: int, start: int, t: int, h: Any, result: Any) -> None:
    for n in range(rate.shape[0]):
        b, c = B[row, start + t, n], C[row, start + t, n]
        for j in range(LANES):
            new = exp2(steps[t, j] * rate[n, j]) * h[n, j] + drive[t, j] * b
            h[n, j] = new
            result[t, j] += new * c


@helper  # type: ignore[untyped-decorator]
def _gate(gates: Any, tokens: int, result: Any) -> None:
    for t in range(tokens):
        for j in range(LANES):
            result[t, j] *= gates[t, j] * sigmoid(gates[t, j])


@compiled(TOKENS, TOKENS, MATRIX, DENSE, DENSE, MASK, DENSE, VECTOR, VECTOR, TOKENS, VECTOR, DENSE, SAVED)
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
        if lanes < LANES:  # the lanes without a channel must not keep what an earlier block left there
            rate[:], h[:], inputs[:], steps[:], drive[:] = ZERO, ZERO, ZERO, ZERO, ZERO
        lanes_of(bias, low, lanes, biases)
        lanes_of(skip, low, lanes, skips)
        for j in range(lanes):
            for n in range(n_state):
                rate[n, j] = A[low + j, n] * LOG2E
                h[n, j] = state[row, low + j, n]
        for start in range(0, length, TILE):
            tokens = min(TILE, length - start)
            if saved.shape[0] > 0:
                saved[row, start // TILE, block % blocks] = h
            load(x, row, start, low, lanes, tokens, inputs)
            load(dt, row, start, low, lanes, tokens, drive if bias.size > 0 else steps)
            if bias.size > 0:  # from another tile: a loop that writes where it reads is no vector code
                activate(drive, biases, tokens, steps)
            enter(inputs, steps, skips, tokens, drive, result)
            for t in range(tokens):
                if reset.shape[1] > 0 and reset[row, start + t]:
                    h[:] = ZERO
                _scan(steps, drive, rate, B, C, row, start, t, h, result)
            if z[0].size > 0:
                load(z, row, start, low, lanes, tokens, inputs)
                _gate(inputs, tokens, result)
            store(result, out, (row * length + start) * inner + low, inner, lanes, tokens)
        for j in range(lanes):
            for n in range(n_state):
                final[row, low + j, n] = h[n, j]


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
    """Fill out, final and saved. Empty bias: dt is ready. Empty skip, z: neither. Empty saved: keep nothing."""
    dense = arrays(A, B, C, reset, state, bias, skip)
    results = arrays(out.view(-1), final, saved)
    run_blocks(
        _forward,
        x.shape[0] * groups(A.shape[0]),
        *(tokens_of(x), tokens_of(dt), *dense, tokens_of(z), *results),
    )
