"""The scans in plain torch with log2(time) parallel passes: for devices without a kernel of their own."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

PIECE = 64  # tokens of the selective scan whose [batch, tokens, inner, n] states exist at once


def _scan(decay: Tensor, x: Tensor) -> Tensor:
    """h_t = decay_t * h_{t-1} + x_t along axis 1 from h = 0: each pass doubles the span that a position sums up."""
    span = 1
    while span < x.shape[1]:
        reached = x[:, span:] + decay[:, span:] * x[:, :-span]
        decay = torch.cat([decay[:, :span], decay[:, span:] * decay[:, :-span]], dim=1)
        x = torch.cat([x[:, :span], reached], dim=1)
        span *= 2
    return x


class _LinearScan(torch.autograd.Function):
    """`_scan` whose backward is the same scan run from the end, so that no pass has to be kept."""

    @staticmethod
    def forward(ctx: Any, decay: Tensor, x: Tensor) -> Tensor:
        hidden = _scan(decay, x)
        ctx.save_for_backward(decay, hidden)
        return hidden

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        decay, hidden = ctx.saved_tensors
        following = torch.cat([decay[:, 1:], torch.zeros_like(decay[:, :1])], dim=1)
        grad_x = _scan(following.flip(1), grad.flip(1)).flip(1)
        before = torch.cat([torch.zeros_like(hidden[:, :1]), hidden[:, :-1]], dim=1)
        return grad_x * before, grad_x


def linear_scan(decay: Tensor, x: Tensor, state: Tensor, reset: Tensor | None) -> Tensor:
    """All h of h_t = decay_t * h_{t-1} + x_t, [batch, time, width], from `state`; `reset` cuts before a token."""
    if reset is not None:
        decay = decay.masked_fill(reset[..., None], 0.0)
    first = x[:, :1] + decay[:, :1] * state[:, None]
    inputs = torch.cat([first, x[:, 1:]], dim=1)
    hidden: Tensor = _LinearScan.apply(decay, inputs)  # type: ignore[no-untyped-call]
    return hidden


def rglru_scan(x: Tensor, decay: Tensor, state: Tensor, reset: Tensor | None) -> tuple[Tensor, Tensor]:
    """See `needlework.kernels.rglru.rglru_scan`."""
    if x.shape[1] == 0:
        return torch.empty_like(x), state
    hidden = linear_scan(decay.float(), x.float(), state, reset)
    return hidden.to(x.dtype), hidden[:, -1]


def _piece(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor, reset: Tensor | None) -> tuple[Tensor, Tensor]:
    batch, length, inner = x.shape
    decay = torch.exp(dt[..., None] * A).reshape(batch, length, -1)
    drive = ((dt * x)[..., None] * B[:, :, None]).reshape(batch, length, -1)
    hidden = linear_scan(decay, drive, state.reshape(batch, -1), reset).view(batch, length, inner, -1)
    return (hidden * C[:, :, None]).sum(-1), hidden[:, -1]


def selective_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor, reset: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See `needlework.kernels.selective_scan.selective_scan`. Backward recomputes each piece from its first state."""
    rows = [torch.empty_like(x[:, :0], dtype=torch.float32)]
    for start in range(0, x.shape[1], PIECE):
        part = slice(start, start + PIECE)
        tokens = [tensor[:, part].float() for tensor in (x, dt, B, C)]
        cut = None if reset is None else reset[:, part]
        y, state = checkpoint(
            _piece, *tokens[:2], A.float(), *tokens[2:], state, cut, use_reentrant=False, preserve_rng_state=False
        )
        rows.append(y)
    return torch.cat(rows, dim=1).to(x.dtype), state
