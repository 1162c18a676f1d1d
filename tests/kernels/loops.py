"""The recurrences token by token, in plain torch: what every fast scan is compared with."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from needlework.kernels.rglru import rglru_gates


def rglru_scan(x: Tensor, decay: Tensor, state: Tensor | None = None, reset: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """h_t = decay_t * h_{t-1} + x_t in fp32."""
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


def gated_rglru(
    x: Tensor,
    gate_in: Tensor,
    gate_keep: Tensor,
    rate: Tensor,
    state: Tensor | None = None,
    reset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `needlework.kernels.gated_rglru`."""
    out, final = rglru_scan(*rglru_gates(x, gate_in, gate_keep, rate, reset), state, reset)
    return out.to(x.dtype), final


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
    """h = exp(dt * A) * h + dt * x * B; y = (h * C).sum(n). See `needlework.kernels.selective_scan`."""
    dt = dt if dt_bias is None else functional.softplus(dt.float() + dt_bias.float())
    shape = (x.shape[0], x.shape[2], A.shape[1])  # [batch, inner, n]
    hidden = torch.zeros(shape, device=x.device) if state is None else state.float()
    rows = []
    for t in range(x.shape[1]):
        step = dt[:, t, :, None].float()  # [batch, inner, 1]
        kept = torch.exp(step * A.float()) * hidden
        hidden = kept + step * x[:, t, :, None].float() * B[:, t, None, :].float()
        rows.append((hidden * C[:, t, None, :].float()).sum(-1))
    y = torch.stack(rows, dim=1) if rows else torch.empty_like(x)
    y = y if skip is None else y + skip.float() * x.float()
    y = y if z is None else y * functional.silu(z.float())
    return y.to(x.dtype), hidden
