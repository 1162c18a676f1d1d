"""The Real-Gated Linear Recurrent Unit from its gates' projections on."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from needlework.kernels import gated_rglru_cpu as cpu
from needlework.kernels.checks import check_reset, check_shape
from needlework.kernels.jit import differentiated
from needlework.kernels.memory import empty_like
from needlework.kernels.reference import rglru_gates
from needlework.kernels.rglru import rglru_scan


def _forward(reset: Tensor, state: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
    x, gate_in, gate_keep, rate = inputs
    out = empty_like(x)
    cpu.forward(x, gate_in, gate_keep, rate, reset, state, out)
    return out, (out[:, -1] if x.shape[1] else state).clone()


class _Cpu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, reset: Tensor, state: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        out, final = _forward(reset, state, *inputs)
        ctx.save_for_backward(*inputs, reset, state, out)
        ctx.set_materialize_grads(False)
        return out, final

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad_out: Tensor | None, grad_final: Tensor | None) -> tuple[Tensor | None, ...]:
        *inputs, reset, state, out = ctx.saved_tensors
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        grad_final = torch.zeros_like(state) if grad_final is None else grad_final.contiguous()
        grad_x, grad_in, grad_keep = empty_like(out), empty_like(out), empty_like(out)
        grad_rate, grad_state = torch.empty_like(state), torch.empty_like(state)
        grads = (grad_x, grad_in, grad_keep, grad_rate, grad_state)
        cpu.backward(*inputs, reset, state, out, grad_out, grad_final, *grads)
        return None, grad_state, grad_x, grad_in, grad_keep, grad_rate.sum(0)


def gated_rglru(
    x: Tensor,
    gate_in: Tensor,
    gate_keep: Tensor,
    rate: Tensor,
    state: Tensor | None = None,
    reset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """h_t = a_t * h_{t-1} + sqrt(1 - a_t**2) * sigmoid(gate_in_t) * x_t with a_t = exp(-rate * sigmoid(gate_keep_t)).

    x, gate_in, gate_keep: [batch, time, width], the gates before their sigmoid. rate: [width], positive. state: [batch,
    width] before the first token (zeros when None). reset: bool [batch, time]; where True the state is cut before that
    token and the root counts as 1. Returns (all h in x's dtype, the last h in fp32); accumulated in fp32.
    Differentiable in all but reset; the derivative of the root is bounded by 1000.
    """
    batch, length, width = x.shape
    check_shape("gate_in", gate_in, batch, length, width)
    check_shape("gate_keep", gate_keep, batch, length, width)
    check_shape("rate", rate, width)
    check_reset(reset, batch, length)
    if x.device.type != "cpu":
        out, final = rglru_scan(*rglru_gates(x, gate_in, gate_keep, rate, reset), state, reset)
        return out.to(x.dtype), final
    state = torch.zeros(batch, width) if state is None else state.float().contiguous()
    check_shape("state", state, batch, width)
    mask = torch.zeros(1, 0, dtype=torch.bool) if reset is None else reset.contiguous()
    inputs = (mask, state, x.float(), gate_in.float(), gate_keep.float(), rate.float().contiguous())
    run = _Cpu.apply if differentiated(*inputs) else _forward
    out, final = run(*inputs)  # type: ignore[no-untyped-call]
    return out.to(x.dtype), final
