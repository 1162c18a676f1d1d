"""The selective scan of Mamba-1 (Jamba, Zamba, Mamba, FalconMamba)."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from needlework.kernels import selective_scan_cpu as cpu


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor, reset: Tensor, keep: bool
    ) -> tuple[Tensor, Tensor]:
        batch, inner, length = x.shape
        tiles = (length + cpu.TILE - 1) // cpu.TILE
        shape = (batch if keep else 0, tiles, cpu.groups(inner), A.shape[1], cpu.LANES)
        y, final, saved = torch.empty_like(x), torch.empty_like(state), x.new_empty(shape)
        cpu.forward(x, dt, A, B, C, reset, state, y, final, saved)
        ctx.save_for_backward(x, dt, A, B, C, reset, saved)
        ctx.set_materialize_grads(False)
        return y, final

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad_y: Tensor | None, grad_final: Tensor | None) -> tuple[Tensor | None, ...]:
        x, dt, A, B, C, reset, saved = ctx.saved_tensors
        batch, inner, length = x.shape
        grad_y = torch.zeros_like(x) if grad_y is None else grad_y
        grad_final = x.new_zeros(batch, *A.shape) if grad_final is None else grad_final.contiguous()
        grad_x, grad_dt, grad_state = torch.empty_like(x), torch.empty_like(dt), torch.empty_like(grad_final)
        grad_A = torch.empty_like(grad_state)
        grad_B = x.new_empty(batch, cpu.groups(inner), length, A.shape[1])
        grad_C = torch.empty_like(grad_B)
        cpu.backward(
            *(x, dt, A, B, C, reset, saved, grad_y, grad_final), *(grad_x, grad_dt, grad_A, grad_B, grad_C, grad_state)
        )
        return grad_x, grad_dt, grad_A.sum(0), grad_B.sum(1), grad_C.sum(1), grad_state, None, None


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    state: Tensor | None = None,
    reset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """h = exp(dt * A) * h + dt * x * B; y = (h * C).sum(n), in fp32; returns (y in x's dtype, the last h in fp32).

    x, dt: [batch, time, inner], dt already positive (after softplus); any strides, so a transposed view of
    [batch, inner, time] costs no copy. A: [inner, n]. B, C: [batch, time, n]. state: [batch, inner, n] before the first
    token (zeros when None). reset: bool [batch, time]; where True the state is cut before that token.
    Differentiable in x, dt, A, B, C and state, through both results.
    """
    if state is None:
        state = torch.zeros(x.shape[0], x.shape[2], A.shape[1], device=x.device)
    if reset is None:
        reset = torch.zeros(1, 0, dtype=torch.bool, device=x.device)
    keep = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, dt, A, B, C, state))
    dense = [tensor.float().contiguous() for tensor in (A, B, C, state)]
    y, final = _Scan.apply(
        x.float().transpose(1, 2), dt.float().transpose(1, 2), *dense, reset.contiguous(), keep
    )
    return y.transpose(1, 2).to(x.dtype), final
