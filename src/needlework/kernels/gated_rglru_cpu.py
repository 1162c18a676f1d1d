"""The whole RG-LRU after its gates' projections on the CPU, in one pass forward and one backward.

Blocks and tiles are those of `tiles`. The backward pass computes the gates anew instead of keeping them.
"""

from typing import Any

import numpy as np
from torch import Tensor

from needlework.kernels.jit import TOKENS, arrays, compiled, run_blocks, tokens_of
from needlework.kernels.tiles import LANES, MASK, MATRIX, TILE, VECTOR, groups, helper, lanes_of, load, store
from needlework.kernels.vector_math import LOG2E, ONE, TWO, ZERO, exp2, one_minus_exp2, sigmoid

_STEEPEST = np.float32(1e-3)  # the root's derivative is bounded by 1000, as in the reference implementation


@helper  # type: ignore[untyped-decorator]
def _decays(gates: Any, rate: Any, tokens: int, decay: Any, scale: Any) -> None:
    """decay = exp(-rate * sigmoid(gate)) and scale = sqrt(1 - decay**2)."""
    for t in range(tokens):
        for j in range(LANES):
            z = -rate[j] * LOG2E * sigmoid(gates[t, j])
            decay[t, j] = exp2(z)
            scale[t, j] = np.sqrt(one_minus_exp2(TWO * z))


@helper  # type: ignore[untyped-decorator]
def _cut(reset: Any, row: int, start: int, tokens: int, decay: Any, scale: Any) -> None:
    """A token that starts a sequence keeps nothing and is let in whole."""
    if reset.shape[1] > 0:
        for t in range(tokens):
            if reset[row, start + t]:
                decay[t, :] = ZERO
                scale[t, :] = ONE


@helper  # type: ignore[untyped-decorator]
def _scan(x: Any, gates: Any, decay: Any, scale: Any, tokens: int, h: Any) -> None:
    """The states of a tile, in place of its scales."""
    for t in range(tokens):
        for j in range(LANES):
            scale[t, j] *= x[t, j] * sigmoid(gates[t, j])
        for j in range(LANES):
            h[j] = decay[t, j] * h[j] + scale[t, j]
            scale[t, j] = h[j]


@compiled(TOKENS, TOKENS, TOKENS, VECTOR, MASK, MATRIX, VECTOR, "int64")
def _forward(
    first: int,
    stop: int,
    x: Any,
    gate_in: Any,
    gate_keep: Any,
    rate: Any,
    reset: Any,
    state: Any,
    out: Any,
    length: int,
) -> None:
    width = rate.size
    blocks = (width + LANES - 1) // LANES
    rates, h = np.zeros(LANES, np.float32), np.zeros(LANES, np.float32)
    inputs, gates = np.zeros((TILE, LANES), np.float32), np.zeros((TILE, LANES), np.float32)
    decay, scale = np.zeros((TILE, LANES), np.float32), np.zeros((TILE, LANES), np.float32)
    for block in range(first, stop):
        row, low = block // blocks, (block % blocks) * LANES
        lanes = min(LANES, width - low)
        lanes_of(rate, low, lanes, rates)
        lanes_of(state[row], low, lanes, h)
        for start in range(0, length, TILE):
            tokens = min(TILE, length - start)
            load(gate_keep, row, start, low, lanes, tokens, gates)
            _decays(gates, rates, tokens, decay, scale)
            _cut(reset, row, start, tokens, decay, scale)
            load(x, row, start, low, lanes, tokens, inputs)
            load(gate_in, row, start, low, lanes, tokens, gates)
            _scan(inputs, gates, decay, scale, tokens, h)
            store(scale, out, (row * length + start) * width + low, width, lanes, tokens)


@helper  # type: ignore[untyped-decorator]
def _carry(decay: Any, tokens: int, carried: Any, g: Any) -> None:
    """Add to the gradient of each token's state what comes back from the tokens after it."""
    for t in range(tokens - 1, -1, -1):
        for j in range(LANES):
            g[t, j] += carried[j]
            carried[j] = decay[t, j] * g[t, j]


@helper  # type: ignore[untyped-decorator]
def _input_grads(x: Any, gates: Any, scale: Any, g: Any, tokens: int, grad_x: Any) -> None:
    """Gradient of x in grad_x; of the input gate in place of it; of the scale in place of x."""
    for t in range(tokens):  # short loops: with many arrays at once, proving them apart costs more than it gains
        for j in range(LANES):
            opened = sigmoid(gates[t, j])
            grad_x[t, j] = g[t, j] * opened
            gates[t, j] = ONE - opened
        for j in range(LANES):
            x[t, j] *= grad_x[t, j]
            gates[t, j] *= x[t, j] * scale[t, j]
        for j in range(LANES):
            grad_x[t, j] *= scale[t, j]


@helper  # type: ignore[untyped-decorator]
def _keep_grads(gates: Any, rate: Any, decay: Any, scale: Any, g_scale: Any, g_decay: Any, tokens: int, g_rate: Any) -> None:
    """Gradient of the recurrence gate in place of it, and of the rate; g_decay is that of the decay."""
    for t in range(tokens):
        for j in range(LANES):  # g_decay becomes the gradient of log(decay)
            slope = ONE / max(TWO * scale[t, j], _STEEPEST)
            g_decay[t, j] = (g_decay[t, j] - TWO * decay[t, j] * slope * g_scale[t, j]) * decay[t, j]
        for j in range(LANES):
            opened = sigmoid(gates[t, j])
            back = -g_decay[t, j] * opened
            g_rate[j] += back
            gates[t, j] = back * rate[j] * (ONE - opened)


@helper  # type: ignore[untyped-decorator]
def _times(factor: Any, tokens: int, values: Any) -> None:
    for t in range(tokens):
        for j in range(LANES):
            values[t, j] *= factor[t, j]


@compiled(
    *(TOKENS, TOKENS, TOKENS, VECTOR, MASK, MATRIX, TOKENS, TOKENS, MATRIX, "int64"),
    *(VECTOR, VECTOR, VECTOR, MATRIX, MATRIX),
)
def _backward(
    first: int,
    stop: int,
    x: Any,
    gate_in: Any,
    gate_keep: Any,
    rate: Any,
    reset: Any,
    state: Any,
    states: Any,
    grad_out: Any,
    grad_final: Any,
    length: int,
    grad_x: Any,
    grad_in: Any,
    grad_keep: Any,
    grad_rate: Any,
    grad_state: Any,
) -> None:
    width = rate.size
    blocks = (width + LANES - 1) // LANES
    rates, carried, g_rate = np.zeros(LANES, np.float32), np.zeros(LANES, np.float32), np.zeros(LANES, np.float32)
    inputs, gates = np.zeros((TILE, LANES), np.float32), np.zeros((TILE, LANES), np.float32)
    before = np.zeros((TILE, LANES), np.float32)  # the state that each token found
    decay, scale = np.zeros((TILE, LANES), np.float32), np.zeros((TILE, LANES), np.float32)
    g, g_x = np.zeros((TILE, LANES), np.float32), np.zeros((TILE, LANES), np.float32)
    for block in range(first, stop):
        row, low = block // blocks, (block % blocks) * LANES
        lanes = min(LANES, width - low)
        lanes_of(rate, low, lanes, rates)
        lanes_of(grad_final[row], low, lanes, carried)
        g_rate[:] = ZERO
        for tile in range((length + TILE - 1) // TILE - 1, -1, -1):
            start = tile * TILE
            tokens = min(TILE, length - start)
            dense = (row * length + start) * width + low
            load(grad_out, row, start, low, lanes, tokens, g)
            load(gate_keep, row, start, low, lanes, tokens, gates)
            _decays(gates, rates, tokens, decay, scale)
            _cut(reset, row, start, tokens, decay, scale)
            _carry(decay, tokens, carried, g)
            load(x, row, start, low, lanes, tokens, inputs)
            load(gate_in, row, start, low, lanes, tokens, gates)
            _input_grads(inputs, gates, scale, g, tokens, g_x)
            store(g_x, grad_x, dense, width, lanes, tokens)
            store(gates, grad_in, dense, width, lanes, tokens)
            if tile > 0:
                load(states, row, start - 1, low, lanes, tokens, before)
            else:
                load(states, row, 0, low, lanes, tokens - 1, before[1:])
                lanes_of(state[row], low, lanes, before[0])
            _times(before, tokens, g)
            load(gate_keep, row, start, low, lanes, tokens, gates)
            _keep_grads(gates, rates, decay, scale, inputs, g, tokens, g_rate)
            store(gates, grad_keep, dense, width, lanes, tokens)
        for j in range(lanes):
            grad_rate[row, low + j], grad_state[row, low + j] = g_rate[j], carried[j]


def forward(x: Tensor, gate_in: Tensor, gate_keep: Tensor, rate: Tensor, reset: Tensor, state: Tensor, out: Tensor) -> None:
    """Fill out [batch, time, width]."""
    run_blocks(
        _forward,
        x.shape[0] * groups(x.shape[2]),
        *(tokens_of(x), tokens_of(gate_in), tokens_of(gate_keep)),
        *arrays(rate, reset, state, out.view(-1)),
        x.shape[1],
    )


def backward(
    x: Tensor,
    gate_in: Tensor,
    gate_keep: Tensor,
    rate: Tensor,
    reset: Tensor,
    state: Tensor,
    out: Tensor,
    grad_out: Tensor,
    grad_final: Tensor,
    *grads: Tensor,
) -> None:
    """Fill the gradients of x, gate_in, gate_keep, rate (per batch row) and state."""
    run_blocks(
        _backward,
        x.shape[0] * groups(x.shape[2]),
        *(tokens_of(x), tokens_of(gate_in), tokens_of(gate_keep)),
        *(*arrays(rate, reset, state), tokens_of(out), tokens_of(grad_out), *arrays(grad_final), x.shape[1]),
        *arrays(*(tensor.view(-1) for tensor in grads[:3]), *grads[3:]),
    )
