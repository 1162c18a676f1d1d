"""The Real-Gated Linear Recurrent Unit (Griffin, RecurrentGemma), without the projections of its gates.

The CPU kernels make one forward and one backward pass in tiles; the backward pass recomputes the gates.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from needlework.kernels import devices, jit
from needlework.kernels.jit import LANES, LOG2E, ONE, TILE, ZERO, exp2, helper, kernel, load_lanes, load_tile, sigmoid, store_tile

_MIN_ROOT = 1e-3  # the derivative of sqrt is 1 / max(2 * root, _MIN_ROOT), at most 1000, as in Griffin's training


def gated_rglru(
    x: Tensor, gate_in: Tensor, gate_keep: Tensor, rate: Tensor, state: Tensor | None = None, reset: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute h_t = a_t * h_{t-1} + sqrt(1 - a_t**2) * sigmoid(gate_in_t) * x_t with a_t = exp(-rate * sigmoid(gate_keep_t)).

    Accumulated in fp32. Differentiable in all arguments but reset; the derivative of the root is at most 1000.

    Args:
        x, gate_in, gate_keep: [batch, time, width], with any strides; the gates before their sigmoid.
        rate: [width], positive.
        state: [batch, width] before the first token; zeros when None.
        reset: bool [batch, time]; where True the state before that token counts as 0 and the root as 1.

    Returns:
        All h [batch, time, width] in x's dtype, and the last h [batch, width] in fp32.
    """
    batch, length, width = x.shape
    jit.check_shapes(batch, length, width, gate_in=gate_in, gate_keep=gate_keep)
    jit.check_shapes(width, rate=rate)
    jit.check_shapes(batch, width, state=state)
    jit.check_shapes(batch, length, reset=reset)
    if reset is not None and reset.dtype != torch.bool:
        raise TypeError(f"reset is {reset.dtype}, but a bool mask is needed: pass `reset != 0`")
    state = torch.zeros(batch, width, device=x.device) if state is None else state.float()
    if x.device.type != "cpu":
        out, final = devices.rglru_scan(*rglru_gates(x, gate_in, gate_keep, rate, reset), state, reset)
        return out.to(x.dtype), final
    mask = torch.zeros(1, 0, dtype=torch.bool) if reset is None else reset.contiguous()
    inputs = (x.float(), gate_in.float(), gate_keep.float(), rate.float().contiguous(), mask, state.contiguous())
    run = _CpuRglru.apply if jit.needs_gradient(*inputs) else _run_forward
    out, final = run(*inputs)  # type: ignore[no-untyped-call]
    return out.to(x.dtype), final


# --- Other devices ----------------------------------------------------------------------------------------------------


def rglru_gates(
    x: Tensor, gate_in: Tensor, gate_keep: Tensor, rate: Tensor, reset: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the gated input and the decay of each token, both [batch, time, width] in fp32."""
    log_decay = -rate.float() * torch.sigmoid(gate_keep.float())
    scale = _BoundedRoot.apply(-torch.expm1(2 * log_decay))  # type: ignore[no-untyped-call]
    if reset is not None:
        scale = torch.where(reset[..., None], torch.ones_like(scale), scale)
    return x.float() * torch.sigmoid(gate_in.float()) * scale, torch.exp(log_decay)


class _BoundedRoot(torch.autograd.Function):
    """Square root with a bounded derivative, see `_MIN_ROOT`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        root = torch.sqrt(x)
        ctx.save_for_backward(root)
        return root

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (root,) = ctx.saved_tensors
        bounded: Tensor = grad / (2 * root).clamp(min=_MIN_ROOT)
        return bounded


# --- CPU --------------------------------------------------------------------------------------------------------------


def _arguments(x: Tensor, gate_in: Tensor, gate_keep: Tensor, *dense: Tensor) -> tuple[Any, ...]:
    """Return x, gate_in, gate_keep, rate, reset, state as the kernels' first argument."""
    return (*(jit.flatten_tokens(tensor) for tensor in (x, gate_in, gate_keep)), *jit.arrays(*dense))


def _run_forward(*inputs: Tensor) -> tuple[Tensor, Tensor]:
    x, state, out = inputs[0], inputs[-1], jit.empty_like(inputs[0])
    blocks = jit.count_blocks(x.shape[0], x.shape[2])
    jit.run_blocks(forward_kernel, blocks, _arguments(*inputs), out.view(-1).numpy(), x.shape[1])
    return out, (out[:, -1] if x.shape[1] else state).clone()


class _CpuRglru(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        out, final = _run_forward(*inputs)
        ctx.save_for_backward(*inputs, out)
        return out, final

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad_out: Tensor, grad_final: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, state, out = ctx.saved_tensors
        grad_x, grad_in, grad_keep = jit.empty_like(out), jit.empty_like(out), jit.empty_like(out)
        grad_rate, grad_state = torch.empty_like(state), torch.empty_like(state)  # grad_rate is per batch row
        jit.run_blocks(
            _backward,
            jit.count_blocks(out.shape[0], out.shape[2]),
            _arguments(*inputs, state),
            (jit.flatten_tokens(out), jit.flatten_tokens(grad_out), grad_final.contiguous().numpy()),
            tuple(jit.arrays(*(grad.view(-1) for grad in (grad_x, grad_in, grad_keep)), grad_rate, grad_state)),
            out.shape[1],
        )
        return grad_x, grad_in, grad_keep, grad_rate.sum(0), None, grad_state


@helper
def _compute_decays(gates: Any, rate: Any, reset: Any, tokens: int, decay: Any, scale: Any) -> None:
    """Compute decay = exp(-rate * sigmoid(gate)) and scale = sqrt(1 - decay**2); 0 and 1 where `reset` (mask, row, start)."""
    for t in range(tokens):
        for j in range(LANES):
            z = -rate[j] * LOG2E * sigmoid(gates[t, j])
            decay[t, j] = exp2(z)
            scale[t, j] = np.sqrt(jit.one_minus_exp2(jit.TWO * z))
    mask, row, start = reset
    if mask.shape[1] > 0:
        for t in range(tokens):
            if mask[row, start + t]:
                decay[t, :] = ZERO
                scale[t, :] = ONE


@kernel
def forward_kernel(first: int, stop: int, arguments: Any, out: Any, length: int) -> None:
    x, gate_in, gate_keep, rate, reset, state = arguments
    width = rate.size
    blocks = (width + LANES - 1) // LANES
    rates, h = np.zeros(LANES, np.float32), np.zeros(LANES, np.float32)
    inputs, gates = np.zeros((TILE, LANES), np.float32), np.zeros((TILE, LANES), np.float32)
    decay, scale = np.zeros((TILE, LANES), np.float32), np.zeros((TILE, LANES), np.float32)
    for block in range(first, stop):
        row, low = block // blocks, (block % blocks) * LANES
        lanes = min(LANES, width - low)
        load_lanes(rate, low, lanes, rates)
        load_lanes(state[row], low, lanes, h)
        for start in range(0, length, TILE):
            tokens = min(TILE, length - start)
            load_tile(gate_keep, row, start, low, lanes, tokens, gates)
            _compute_decays(gates, rates, (reset, row, start), tokens, decay, scale)
            load_tile(x, row, start, low, lanes, tokens, inputs)
            load_tile(gate_in, row, start, low, lanes, tokens, gates)
            for t in range(tokens):  # the states replace `scale`
                for j in range(LANES):
                    scale[t, j] *= inputs[t, j] * sigmoid(gates[t, j])
                for j in range(LANES):
                    h[j] = decay[t, j] * h[j] + scale[t, j]
                    scale[t, j] = h[j]
            store_tile(scale, out, (row * length + start) * width + low, width, lanes, tokens)


@helper
def _input_grads(x: Any, gates: Any, scale: Any, g: Any, tokens: int, grad_x: Any) -> None:
    """Write the gradient of x to `grad_x`; replace `gates` by the input gate's gradient, and `x` by that of the scale."""
    for t in range(tokens):  # several short loops: with many arrays in one loop, alias checks cost more than they gain
        for j in range(LANES):
            opened = sigmoid(gates[t, j])
            grad_x[t, j] = g[t, j] * opened
            gates[t, j] = ONE - opened
        for j in range(LANES):
            x[t, j] *= grad_x[t, j]
            gates[t, j] *= x[t, j] * scale[t, j]
        for j in range(LANES):
            grad_x[t, j] *= scale[t, j]


@helper
def _keep_grads(gates: Any, rate: Any, decay: Any, scale: Any, g_scale: Any, g_decay: Any, tokens: int, g_rate: Any) -> None:
    """Replace `gates` by the recurrence gate's gradient, and add the rate's to `g_rate`; `g_decay` is the decay's gradient."""
    for t in range(tokens):
        for j in range(LANES):  # g_decay becomes the gradient of log(decay)
            slope = ONE / max(jit.TWO * scale[t, j], np.float32(_MIN_ROOT))
            g_decay[t, j] = (g_decay[t, j] - jit.TWO * decay[t, j] * slope * g_scale[t, j]) * decay[t, j]
        for j in range(LANES):
            opened = sigmoid(gates[t, j])
            back = -g_decay[t, j] * opened
            g_rate[j] += back
            gates[t, j] = back * rate[j] * (ONE - opened)


@kernel
def _backward(first: int, stop: int, arguments: Any, results: Any, gradients: Any, length: int) -> None:
    x, gate_in, gate_keep, rate, reset, state = arguments
    states, grad_out, grad_final = results
    grad_x, grad_in, grad_keep, grad_rate, grad_state = gradients
    width = rate.size
    blocks = (width + LANES - 1) // LANES
    rates, carried, g_rate = np.zeros(LANES, np.float32), np.zeros(LANES, np.float32), np.zeros(LANES, np.float32)
    inputs, gates = np.zeros((TILE, LANES), np.float32), np.zeros((TILE, LANES), np.float32)
    before = np.zeros((TILE, LANES), np.float32)  # the state before each token
    decay, scale = np.zeros((TILE, LANES), np.float32), np.zeros((TILE, LANES), np.float32)
    g, g_x = np.zeros((TILE, LANES), np.float32), np.zeros((TILE, LANES), np.float32)
    for block in range(first, stop):
        row, low = block // blocks, (block % blocks) * LANES
        lanes = min(LANES, width - low)
        load_lanes(rate, low, lanes, rates)
        load_lanes(grad_final[row], low, lanes, carried)
        g_rate[:] = ZERO
        for tile in range((length + TILE - 1) // TILE - 1, -1, -1):
            start = tile * TILE
            tokens = min(TILE, length - start)
            dense = (row * length + start) * width + low
            load_tile(grad_out, row, start, low, lanes, tokens, g)
            load_tile(gate_keep, row, start, low, lanes, tokens, gates)
            _compute_decays(gates, rates, (reset, row, start), tokens, decay, scale)
            for t in range(tokens - 1, -1, -1):  # add the gradient from later tokens to that of each token's state
                for j in range(LANES):
                    g[t, j] += carried[j]
                    carried[j] = decay[t, j] * g[t, j]
            load_tile(x, row, start, low, lanes, tokens, inputs)
            load_tile(gate_in, row, start, low, lanes, tokens, gates)
            _input_grads(inputs, gates, scale, g, tokens, g_x)
            store_tile(g_x, grad_x, dense, width, lanes, tokens)
            store_tile(gates, grad_in, dense, width, lanes, tokens)
            if tile > 0:
                load_tile(states, row, start - 1, low, lanes, tokens, before)
            else:
                load_tile(states, row, 0, low, lanes, tokens - 1, before[1:])
                load_lanes(state[row], low, lanes, before[0])
            g[:tokens] *= before[:tokens]
            load_tile(gate_keep, row, start, low, lanes, tokens, gates)
            _keep_grads(gates, rates, decay, scale, inputs, g, tokens, g_rate)
            store_tile(gates, grad_keep, dense, width, lanes, tokens)
        for j in range(lanes):
            grad_rate[row, low + j], grad_state[row, low + j] = g_rate[j], carried[j]
