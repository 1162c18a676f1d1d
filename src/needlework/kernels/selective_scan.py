"""The selective scan of Mamba-1 (Jamba, Zamba, Mamba, FalconMamba)."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from needlework.kernels import devices, jit
from needlework.kernels import selective_scan_cpu as cpu
from needlework.kernels.tiles import LANES, TILE, count_blocks


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
    """Compute h = exp(dt * A) * h + dt * x * B and y = (h * C).sum(n), accumulated in fp32.

    The operations of dt_bias, skip and z are fused with the scan. Differentiable in every floating-point argument, through
    both results.

    Args:
        x, dt: [batch, time, inner], dt positive. x, dt and z may have any strides, without a copy.
        A: [inner, n].
        B, C: [batch, time, n].
        state: [batch, inner, n] before the first token; zeros when None.
        reset: bool [batch, time]; where True the state before that token counts as 0.
        dt_bias: [inner]; dt is first replaced by softplus(dt + dt_bias).
        skip: [inner]; skip * x is added to y.
        z: [batch, time, inner]; y is multiplied by silu(z).

    Returns:
        y [batch, time, inner] in x's dtype, and the last h [batch, inner, n] in fp32.
    """
    batch, length, inner = x.shape
    n_state = A.shape[-1]
    jit.check_shape("dt", dt, batch, length, inner)
    jit.check_shape("A", A, inner, n_state)
    jit.check_shape("B", B, batch, length, n_state)
    jit.check_shape("C", C, batch, length, n_state)
    jit.check_reset(reset, batch, length)
    jit.check_shape("state", state, batch, inner, n_state)
    jit.check_shape("dt_bias", dt_bias, inner)
    jit.check_shape("skip", skip, inner)
    jit.check_shape("z", z, batch, length, inner)
    if x.device.type != "cpu":
        return devices.selective_scan(x, dt, A, B, C, state, reset, dt_bias=dt_bias, skip=skip, z=z)
    state = torch.zeros(batch, inner, n_state) if state is None else state
    none = torch.empty(0)
    vectors = [none if tensor is None else tensor for tensor in (dt_bias, skip)]
    gate = none.view(0, 0, 0) if z is None else z
    dense = (tensor.float().contiguous() for tensor in (A, B, C, state, *vectors))
    inputs = (x.float(), dt.float(), *dense, gate.float())
    if jit.needs_gradient(*inputs):
        y, final = _CpuScan.apply(jit.reset_mask(reset), *inputs)  # type: ignore[no-untyped-call]
    else:
        y, final, _ = _run_forward(False, jit.reset_mask(reset), *inputs)
    return y.to(x.dtype), final


def _run_forward(keep: bool, reset: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, the last state, and the state at the start of each tile (empty unless `keep`)."""
    x, dt, A, B, C, state, bias, skip, z = inputs
    batch, length, inner = x.shape
    saved = x.new_empty(batch if keep else 0, -(-length // TILE), count_blocks(1, inner), A.shape[1], LANES)
    out, final = jit.empty_like(x), torch.empty_like(state)
    jit.run_blocks(
        cpu.forward,
        count_blocks(batch, inner),
        *(jit.flatten_tokens(x), jit.flatten_tokens(dt), *jit.arrays(A, B, C, reset, state, bias, skip)),
        *(jit.flatten_tokens(z), *jit.arrays(out.view(-1), final, saved)),
    )
    return out, final, saved


class _CpuScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, reset: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        out, final, saved = _run_forward(True, reset, *inputs)
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
        grad_x, grad_dt, grad_z = jit.empty_like(x), jit.empty_like(x), jit.empty_like(z)
        # Gradients of A, bias and skip are per batch row, those of B and C per block of channels; they are summed below, in
        # a fixed order.
        grad_state, grad_A = torch.empty_like(grad_final), torch.empty_like(grad_final)
        grad_B = x.new_empty(batch, count_blocks(1, inner), length, A.shape[1])
        grad_C = torch.empty_like(grad_B)
        grad_bias, grad_skip = x.new_empty(batch, inner), x.new_empty(batch, inner)
        jit.run_blocks(
            cpu.backward,
            count_blocks(batch, inner),
            *(jit.flatten_tokens(x), jit.flatten_tokens(dt), *jit.arrays(A, B, C, reset, saved, bias, skip)),
            *(jit.flatten_tokens(z), jit.flatten_tokens(grad_out), *jit.arrays(grad_final)),
            *jit.arrays(*(grad.view(-1) for grad in (grad_x, grad_dt, grad_z))),
            *jit.arrays(grad_A, grad_B, grad_C, grad_state, grad_bias, grad_skip),
        )
        scan = (grad_x, grad_dt, grad_A.sum(0), grad_B.sum(1), grad_C.sum(1), grad_state)
        vectors = (grad.sum(0) if used.numel() else None for grad, used in ((grad_bias, bias), (grad_skip, skip)))
        return None, *scan, *vectors, grad_z
