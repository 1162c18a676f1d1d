"""The recurrences written out token by token: slow, obvious, and what every fast scan is tested against."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def rglru_scan(x: Tensor, decay: Tensor, state: Tensor | None = None, reset: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """h_t = decay_t * h_{t-1} + x_t in fp32. See `needlework.kernels.rglru.rglru_scan` for the contract."""
    hidden = torch.zeros(x.shape[0], x.shape[2], device=x.device) if state is None else state.float()
    rows = []
    for t in range(x.shape[1]):
        kept = decay[:, t].float() * hidden
        if reset is not None:
            kept = torch.where(reset[:, t, None], torch.zeros_like(kept), kept)
        hidden = kept + x[:, t].float()
        rows.append(hidden)
    out = torch.stack(rows, dim=1).to(x.dtype) if rows else torch.empty_like(x)
    return out, hidden


class _BoundedRoot(torch.autograd.Function):
    """sqrt whose derivative is bounded by 1000, as Griffin is trained with."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        root = torch.sqrt(x)
        ctx.save_for_backward(root)
        return root

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (root,) = ctx.saved_tensors
        bounded: Tensor = grad / (2 * root).clamp(min=1e-3)
        return bounded


def rglru_gates(
    x: Tensor, gate_in: Tensor, gate_keep: Tensor, rate: Tensor, reset: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """What the RG-LRU lets in and what it keeps, (x, decay) for `rglru_scan`, in fp32."""
    log_decay = -rate.float() * torch.sigmoid(gate_keep.float())
    scale = _BoundedRoot.apply(-torch.expm1(2 * log_decay))  # type: ignore[no-untyped-call]
    if reset is not None:
        scale = torch.where(reset[..., None], torch.ones_like(scale), scale)
    return x.float() * torch.sigmoid(gate_in.float()) * scale, torch.exp(log_decay)


def gated_rglru(
    x: Tensor,
    gate_in: Tensor,
    gate_keep: Tensor,
    rate: Tensor,
    state: Tensor | None = None,
    reset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `needlework.kernels.gated_rglru` for the contract."""
    out, final = rglru_scan(*rglru_gates(x, gate_in, gate_keep, rate, reset), state, reset)
    return out.to(x.dtype), final


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
    """h = exp(dt * A) * h + dt * x * B; y = (h * C).sum(n). See `needlework.kernels.selective_scan`."""
    dt = dt if dt_bias is None else functional.softplus(dt.float() + dt_bias.float())
    shape = (x.shape[0], x.shape[2], A.shape[1])  # [batch, inner, n]
    hidden = torch.zeros(shape, device=x.device) if state is None else state.float()
    rows = []
    for t in range(x.shape[1]):
        step = dt[:, t, :, None].float()  # [batch, inner, 1]
        kept = torch.exp(step * A.float()) * hidden
        if reset is not None:
            kept = torch.where(reset[:, t, None, None], torch.zeros_like(kept), kept)
        hidden = kept + step * x[:, t, :, None].float() * B[:, t, None, :].float()
        rows.append((hidden * C[:, t, None, :].float()).sum(-1))
    y = torch.stack(rows, dim=1) if rows else torch.empty_like(x)
    y = y if skip is None else y + skip.float() * x.float()
    y = y if z is None else y * functional.silu(z.float())
    return y.to(x.dtype), hidden
