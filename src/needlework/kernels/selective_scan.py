"""The selective scan of Mamba-1 (Jamba, Zamba, Mamba, FalconMamba), fused with time steps, skip and gate.

If gradients are needed on a CPU, the state at the start of every tile is saved. The backward pass goes from the last tile to
the first and recomputes the states of one tile at a time, so that the [batch, time, inner, n] states are never all allocated.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from needlework.kernels import devices, jit
from needlework.kernels.jit import LANES, LOG2E, ONE, TILE, ZERO, exp2, helper, kernel, load_lanes, load_tile, sigmoid, store_tile


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    state: Tensor | None = None,
    *,
    dt_bias: Tensor | None = None,
    skip: Tensor | None = None,
    z: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute h = exp(dt * A) * h + dt * x * B and y = (h * C).sum(n), accumulated in fp32.

    The operations of dt_bias, skip and z are fused with the scan. Differentiable in every floating-point argument, through
    both results.

    Args:
        x, dt: [batch, time, inner], dt positive. x, dt and z may have any strides, without a copy.
        A: [inner, n].
        B, C: [batch, time, n].
        state: [batch, inner, n] before the first token; zeros when None.
        dt_bias: [inner]; dt is first replaced by softplus(dt + dt_bias).
        skip: [inner]; skip * x is added to y.
        z: [batch, time, inner]; y is multiplied by silu(z).

    Returns:
        y [batch, time, inner] in x's dtype, and the last h [batch, inner, n] in fp32.
    """
    batch, length, inner = x.shape
    n_state = A.shape[-1]
    jit.check_shapes(batch, length, inner, dt=dt, z=z)
    jit.check_shapes(inner, n_state, A=A)
    jit.check_shapes(batch, length, n_state, B=B, C=C)
    jit.check_shapes(batch, inner, n_state, state=state)
    jit.check_shapes(inner, dt_bias=dt_bias, skip=skip)
    if x.device.type != "cpu":
        return devices.selective_scan(x, dt, A, B, C, state, dt_bias=dt_bias, skip=skip, z=z)
    state = torch.zeros(batch, inner, n_state) if state is None else state
    none = torch.empty(0)
    vectors = [none if tensor is None else tensor for tensor in (dt_bias, skip)]
    A, B, C, state, bias, skip = (tensor.float().contiguous() for tensor in (A, B, C, state, *vectors))
    gate = none.view(0, 0, 0) if z is None else z.float()
    inputs = (x.float(), dt.float(), A, B, C, bias, skip, gate)
    if jit.needs_gradient(state, *inputs):
        y, final = _CpuScan.apply(state, *inputs)  # type: ignore[no-untyped-call]
    else:
        y, final, _ = _run_forward(False, state, *inputs)
    return y.to(x.dtype), final


def _arguments(x: Tensor, dt: Tensor, *dense_and_z: Tensor) -> tuple[Any, ...]:
    """Return x, dt, A, B, C, bias, skip, z as the kernels' first argument; bias, skip and z may be empty."""
    *dense, z = dense_and_z
    return jit.flatten_tokens(x), jit.flatten_tokens(dt), *jit.arrays(*dense), jit.flatten_tokens(z)


def _run_forward(keep: bool, state: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, the last state, and the state at the start of each tile (empty unless `keep`)."""
    x, n_state = inputs[0], state.shape[2]
    batch, length, inner = x.shape
    saved = x.new_empty(batch if keep else 0, -(-length // TILE), jit.count_blocks(1, inner), n_state, LANES)
    out, final = jit.empty_like(x), torch.empty_like(state)
    results = jit.arrays(state, out.view(-1), final, saved)
    jit.run_blocks(forward_kernel, jit.count_blocks(batch, inner), _arguments(*inputs), *results)
    return out, final, saved


class _CpuScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, state: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        out, final, saved = _run_forward(True, state, *inputs)
        ctx.save_for_backward(saved, *inputs)
        return out, final

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad_out: Tensor, grad_final: Tensor) -> tuple[Tensor | None, ...]:
        saved, *inputs = ctx.saved_tensors
        x, _, A, *_, bias, skip, z = inputs
        batch, length, inner = x.shape
        grad_final = grad_final.contiguous()
        grad_x, grad_dt, grad_z = jit.empty_like(x), jit.empty_like(x), jit.empty_like(z)
        # Gradients of A, bias and skip are per batch row, those of B and C per block of channels; they are summed below, in
        # a fixed order.
        grad_state, grad_A = torch.empty_like(grad_final), torch.empty_like(grad_final)
        grad_B = x.new_empty(batch, jit.count_blocks(1, inner), length, A.shape[1])
        grad_C = torch.empty_like(grad_B)
        grad_bias, grad_skip = x.new_empty(batch, inner), x.new_empty(batch, inner)
        flat = (grad.view(-1) for grad in (grad_x, grad_dt, grad_z))
        jit.run_blocks(
            _backward,
            jit.count_blocks(batch, inner),
            _arguments(*inputs),
            *(jit.flatten_tokens(grad_out), *jit.arrays(saved, grad_final)),
            tuple(jit.arrays(*flat, grad_A, grad_B, grad_C, grad_state, grad_bias, grad_skip)),
        )
        vectors = (grad.sum(0) if used.numel() else None for grad, used in ((grad_bias, bias), (grad_skip, skip)))
        return grad_state, grad_x, grad_dt, grad_A.sum(0), grad_B.sum(1), grad_C.sum(1), *vectors, grad_z


# --- CPU kernels ------------------------------------------------------------------------------------------------------


@helper
def _compute_steps(raw: Any, bias: Any, tokens: int, steps: Any) -> None:
    """Compute steps = softplus(raw + bias)."""
    for t in range(tokens):
        for j in range(LANES):
            steps[t, j] = jit.softplus(raw[t, j] + bias[j])


@helper
def _prepare_inputs(inputs: Any, steps: Any, skip: Any, tokens: int, drive: Any, result: Any) -> None:
    """Compute drive = steps * inputs, which enters the state, and result = skip * inputs, which is part of the output."""
    for t in range(tokens):
        for j in range(LANES):
            drive[t, j] = steps[t, j] * inputs[t, j]
            result[t, j] = skip[j] * inputs[t, j]


@helper
def _scan_token(steps: Any, drive: Any, rate: Any, B: Any, C: Any, row: int, start: int, t: int, h: Any, result: Any) -> None:
    for n in range(rate.shape[0]):
        b, c = B[row, start + t, n], C[row, start + t, n]
        for j in range(LANES):
            new = exp2(steps[t, j] * rate[n, j]) * h[n, j] + drive[t, j] * b
            h[n, j] = new
            result[t, j] += new * c


@kernel
def forward_kernel(first: int, stop: int, arguments: Any, state: Any, out: Any, final: Any, saved: Any) -> None:
    x, dt, A, B, C, bias, skip, z = arguments
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
                _scan_token(steps, drive, rate, B, C, row, start, t, h, result)
            if z[0].size > 0:
                load_tile(z, row, start, low, lanes, tokens, inputs)
                for t in range(tokens):
                    for j in range(LANES):
                        result[t, j] *= inputs[t, j] * sigmoid(inputs[t, j])
            store_tile(result, out, (row * length + start) * inner + low, inner, lanes, tokens)
        for j in range(lanes):
            for n in range(n_state):
                final[row, low + j, n] = h[n, j]


@jit.compile_helper(fastmath={"contract", "reassoc"})
def _dot(left: Any, t: int, right: Any, s: int, n: int) -> Any:
    """Return the sum over lanes of left[t] * right[s, n]."""
    total = ZERO
    for j in range(LANES):
        total += left[t, j] * right[s, n, j]
    return total


@helper
def _recompute_token(tile: Any, B: Any, C: Any, row: int, start: int, t: int, result: Any) -> None:
    """Compute decays[t], states[t + 1] and the output of token t."""
    steps, drive, rate, decays, states = tile
    for n in range(rate.shape[0]):
        b, c = B[row, start + t, n], C[row, start + t, n]
        for j in range(LANES):
            decays[t, n, j] = exp2(steps[t, j] * rate[n, j])
        for j in range(LANES):
            states[t + 1, n, j] = decays[t, n, j] * states[t, n, j] + drive[t, j] * b
            result[t, j] += states[t + 1, n, j] * c


@helper
def _reverse_gate(gates: Any, result: Any, tokens: int, g_y: Any) -> None:
    """Replace `g_y`, the gradient of y * silu(z), by that of y, and `gates` (z) by the gradient of z."""
    for t in range(tokens):
        for j in range(LANES):
            z, grad = gates[t, j], g_y[t, j]
            s = sigmoid(z)
            g_y[t, j] = grad * z * s
            gates[t, j] = grad * result[t, j] * s * (ONE + z * (ONE - s))


@helper
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


@helper
def _reverse_inputs(inputs: Any, steps: Any, skip: Any, tokens: int, g_y: Any, g_drive: Any, g_steps: Any, g_skip: Any) -> None:
    """Replace `g_drive` and `g_steps`, the gradients of drive and steps, by those of x and dt; add to that of skip."""
    for t in range(tokens):
        for j in range(LANES):
            grad = g_drive[t, j]
            g_steps[t, j] = g_steps[t, j] * jit.LN2 + grad * inputs[t, j]
            g_drive[t, j] = grad * steps[t, j] + g_y[t, j] * skip[j]
        for j in range(LANES):
            g_skip[j] += g_y[t, j] * inputs[t, j]


@kernel
def _backward(first: int, stop: int, arguments: Any, grad_out: Any, saved: Any, grad_final: Any, gradients: Any) -> None:
    x, dt, A, B, C, bias, skip, z = arguments
    grad_x, grad_dt, grad_z, grad_A, grad_B, grad_C, grad_state, grad_bias, grad_skip = gradients
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
                _recompute_token(tile_arrays, B, C, row, start, t, result)
            if z[0].size > 0:
                load_tile(z, row, start, low, lanes, tokens, gates)
                _reverse_gate(gates, result, tokens, g_y)
                store_tile(gates, grad_z, dense, inner, lanes, tokens)
            for t in range(tokens - 1, -1, -1):
                _reverse_token(tile_arrays, (B, C, grad_B, grad_C), (row, group, start), t, g_y, g, sums, through)
            _reverse_inputs(inputs, steps, skips, tokens, g_y, g_drive, g_steps, g_skip)
            if bias.size > 0:
                for t in range(tokens):
                    for j in range(LANES):
                        g_steps[t, j] *= sigmoid(raw[t, j] + biases[j])
                        g_bias[j] += g_steps[t, j]
            store_tile(g_drive, grad_x, dense, inner, lanes, tokens)
            store_tile(g_steps, grad_dt, dense, inner, lanes, tokens)
        for j in range(lanes):
            grad_bias[row, low + j], grad_skip[row, low + j] = g_bias[j], g_skip[j]
            for n in range(n_state):
                grad_A[row, low + j, n] = g_rate[n, j]
                grad_state[row, low + j, n] = g[0, n, j]
