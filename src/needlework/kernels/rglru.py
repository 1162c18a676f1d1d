"""The recurrence of the Real-Gated Linear Recurrent Unit (Griffin, RecurrentGemma)."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from needlework.kernels import libraries, rglru_cpu
from needlework.kernels.checks import check_reset, check_shape
from needlework.kernels.jit import differentiated
from needlework.kernels.memory import empty_like


def _forward(x: Tensor, decay: Tensor, state: Tensor, reset: Tensor) -> tuple[Tensor, Tensor]:
    out = empty_like(x)
    rglru_cpu.forward(x, decay, reset, state, out)
    return out, (out[:, -1] if x.shape[1] else state).clone()


class _CpuScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, decay: Tensor, state: Tensor, reset: Tensor) -> tuple[Tensor, Tensor]:
        out, final = _forward(x, decay, state, reset)
        ctx.save_for_backward(decay, state, reset, out)
        ctx.set_materialize_grads(False)
        return out, final

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad_out: Tensor | None, grad_final: Tensor | None) -> tuple[Tensor | None, ...]:
        decay, state, reset, out = ctx.saved_tensors
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out.contiguous()
        grad_final = torch.zeros_like(state) if grad_final is None else grad_final.contiguous()
        grad_x, grad_decay, grad_state = empty_like(out), empty_like(out), torch.empty_like(state)
        rglru_cpu.backward(decay, reset, state, out, grad_out, grad_final, grad_x, grad_decay, grad_state)
        return grad_x, grad_decay, grad_state, None


def rglru_scan(x: Tensor, decay: Tensor, state: Tensor | None = None, reset: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """h_t = decay_t * h_{t-1} + x_t, accumulated in fp32; returns (all h in x's dtype, the last h in fp32).

    x, decay: [batch, time, width]. state: [batch, width], the h before the first token (zeros when None).
    reset: bool [batch, time]; where True the state is cut before that token, as if its decay were 0.
    Differentiable in x, decay and state, through both results.
    """
    batch, length, width = x.shape
    check_shape("decay", decay, batch, length, width)
    check_reset(reset, batch, length)
    state = torch.zeros(batch, width, device=x.device) if state is None else state.float()
    check_shape("state", state, batch, width)
    if x.device.type != "cpu":
        return libraries.rglru_scan(x, decay, state, reset)
    mask = torch.zeros(1, 0, dtype=torch.bool) if reset is None else reset
    inputs = (x.float().contiguous(), decay.float().contiguous(), state.contiguous(), mask.contiguous())
    run = _CpuScan.apply if differentiated(*inputs) else _forward
    out, final = run(*inputs)  # type: ignore[no-untyped-call]
    return out.to(x.dtype), final
