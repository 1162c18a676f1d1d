"""The selective scan of Mamba-1 (Jamba, Zamba, Mamba, FalconMamba)."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from needlework.kernels import libraries
from needlework.kernels import selective_scan_cpu as cpu
from needlework.kernels import selective_scan_grad_cpu as grad_cpu
from needlework.kernels.checks import check_reset, check_shape
from needlework.kernels.jit import differentiated
from needlework.kernels.memory import empty_like
from needlework.kernels.tiles import LANES, TILE, groups


def _forward(keep: bool, reset: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """y, the last state, and the state at the start of each tile (nothing unless they are to be kept)."""
    x, dt, A, B, C, state, bias, skip, z = inputs
    tiles = (x.shape[1] + TILE - 1) // TILE
    saved = x.new_empty(x.shape[0] if keep else 0, tiles, groups(x.shape[2]), A.shape[1], LANES)
    out, final = empty_like(x), torch.empty_like(state)
    cpu.forward(x, dt, A, B, C, reset, state, bias, skip, z, out, final, saved)
    return out, final, saved


class _CpuScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, reset: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        out, final, saved = _forward(True, reset, *inputs)
        x, dt, A, B, C, _, bias, skip, z = inputs
        ctx.save_for_backward(x, dt, A, B, C, reset, saved, bias, skip, z)
        ctx.set_materialize_grads(False)
        return out, final

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad_out: Tensor | None, grad_final: Tensor | None) -> tuple[Tensor | None, ...]:
        x, dt, A, B, C, reset, saved, bias, skip, z = ctx.saved_tensors
        batch, length, inner = x.shape
        grad_out = torch.zeros_like(x) if grad_out is None else grad_out
        grad_final = x.new_zeros(batch, *A.shape) if grad_final is None else grad_final.contiguous()
        grad_x, grad_dt, grad_z = empty_like(x), empty_like(x), empty_like(z)
        grad_state, grad_A = torch.empty_like(grad_final), torch.empty_like(grad_final)
        grad_B = x.new_empty(batch, groups(inner), length, A.shape[1])
        grad_C = torch.empty_like(grad_B)
        grad_bias, grad_skip = x.new_empty(batch, inner), x.new_empty(batch, inner)
        grad_cpu.backward(
            *(x, dt, A, B, C, reset, saved, bias, skip, z, grad_out, grad_final),
            *(grad_x, grad_dt, grad_z, grad_A, grad_B, grad_C, grad_state, grad_bias, grad_skip),
        )
        scan = (grad_x, grad_dt, grad_A.sum(0), grad_B.sum(1), grad_C.sum(1), grad_state)
        vectors = (grad.sum(0) if used.numel() else None for grad, used in ((grad_bias, bias), (grad_skip, skip)))
        return None, *scan, *vectors, grad_z


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    state: Tensor | None = None,
    reset: Tensor | None = None,
    *,
    dt_bias: Tensor | None = None,
    skip: Tensor | None = None,
    z: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """h = exp(dt * A) * h + dt * x * B; y = (h * C).sum(n), in fp32; returns (y in x's dtype, the last h in fp32).

    x, dt: [batch, time, inner], dt positive. A: [inner, n]. B, C: [batch, time, n]. state: [batch, inner, n] before the
    first token (zeros when None). reset: bool [batch, time]; where True the state is cut before that token.
    Three neighbours of the scan can be computed along with it: with dt_bias [inner], dt is first replaced by
    softplus(dt + dt_bias); skip [inner] adds skip * x to y; z [batch, time, inner] multiplies y by silu(z).
    x, dt and z may have any strides, also those of [batch, inner, time] or of a slice; nothing is copied.
    Differentiable in every floating-point argument, through both results.
    """
    _check(x, dt, A, B, C, state, reset, dt_bias, skip, z)
    if x.device.type != "cpu":
        return _on_device(x, dt, A, B, C, state, reset, dt_bias, skip, z)
    state = torch.zeros(x.shape[0], *A.shape) if state is None else state
    mask = torch.zeros(1, 0, dtype=torch.bool) if reset is None else reset.contiguous()
    none = torch.empty(0)
    vectors = [none if tensor is None else tensor for tensor in (dt_bias, skip)]
    gate = none.view(0, 0, 0) if z is None else z
    dense = (tensor.float().contiguous() for tensor in (A, B, C, state, *vectors))
    inputs = (x.float(), dt.float(), *dense, gate.float())
    if differentiated(*inputs):
        y, final = _CpuScan.apply(mask, *inputs)  # type: ignore[no-untyped-call]
    else:
        y, final, _ = _forward(False, mask, *inputs)
    return y.to(x.dtype), final


def _check(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    state: Tensor | None,
    reset: Tensor | None,
    dt_bias: Tensor | None,
    skip: Tensor | None,
    z: Tensor | None,
) -> None:
    batch, length, inner = x.shape
    n_state = A.shape[-1]
    check_shape("dt", dt, batch, length, inner)
    check_shape("A", A, inner, n_state)
    check_shape("B", B, batch, length, n_state)
    check_shape("C", C, batch, length, n_state)
    check_reset(reset, batch, length)
    for name, tensor, shape in (
        ("state", state, (batch, inner, n_state)),
        ("dt_bias", dt_bias, (inner,)),
        ("skip", skip, (inner,)),
        ("z", z, (batch, length, inner)),
    ):
        if tensor is not None:
            check_shape(name, tensor, *shape)


def _on_device(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    state: Tensor | None,
    reset: Tensor | None,
    dt_bias: Tensor | None,
    skip: Tensor | None,
    z: Tensor | None,
) -> tuple[Tensor, Tensor]:
    dt = dt if dt_bias is None else functional.softplus(dt.float() + dt_bias.float())
    y, final = libraries.selective_scan(x.float(), dt, A, B, C, state, reset)
    y = y if skip is None else y + x.float() * skip.float()
    y = y if z is None else y * functional.silu(z.float())
    return y.to(x.dtype), final
