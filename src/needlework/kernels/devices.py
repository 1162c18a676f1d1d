"""Scans for devices other than the CPU: GPU libraries where they compute the same function, else plain torch.

The torch versions take log2(time) parallel passes. Results are in fp32.
"""

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from needlework.kernels.jit import needs_gradient

_MAX_LENGTH = 65_536  # maximum tokens of accelerated-scan
_PIECE = 64  # tokens per slice of the selective scan; bounds the memory of its [batch, tokens, inner, n] states


@cache
def library_function(module: str, name: str) -> Callable[..., Any] | None:
    """Return a library's function; None if the library is missing or fails on import (some compile code then)."""
    try:
        function: Callable[..., Any] | None = getattr(importlib.import_module(module), name, None)
    except Exception:
        return None
    return function


def rglru_scan(x: Tensor, decay: Tensor, state: Tensor, reset: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Compute h_t = decay_t * h_{t-1} + x_t, with accelerated-scan if it is installed.

    Args:
        x, decay: [batch, time, width] fp32.
        state: [batch, width] fp32, the h before the first token.
        reset: bool [batch, time]; where True the state before that token counts as 0.

    Returns:
        All h [batch, time, width], and the last h [batch, width].
    """
    length = x.shape[1]
    if length == 0:
        return torch.empty_like(x), state
    if reset is not None:
        decay = decay.masked_fill(reset[..., None], 0.0)
    inputs = torch.cat([x[:, :1] + decay[:, :1] * state[:, None], x[:, 1:]], dim=1)
    scan = library_function("accelerated_scan.warp", "scan")
    if scan is None or length > _MAX_LENGTH:
        hidden: Tensor = _LinearScan.apply(decay, inputs)  # type: ignore[no-untyped-call]
    else:  # accelerated-scan needs [batch, width, 2**k tokens]
        padding = (0, 0, 0, max(32, 1 << (length - 1).bit_length()) - length)
        shaped = (functional.pad(tensor, padding).transpose(1, 2).contiguous() for tensor in (decay, inputs))
        hidden = scan(*shaped).transpose(1, 2)[:, :length]
    return hidden, hidden[:, -1]


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
    """Compute `needlework.kernels.selective_scan`, with mamba-ssm if it is installed and supports the arguments.

    mamba-ssm has no initial state and no gradient of the last state.
    """
    dt = dt.float() if dt_bias is None else functional.softplus(dt.float() + dt_bias.float())
    tokens = x.float(), dt, B.float(), C.float()
    scan = library_function("mamba_ssm.ops.selective_scan_interface", "selective_scan_fn")
    if scan is None or state is not None or needs_gradient(x, dt, A, B, C) or x.shape[1] == 0:
        start = torch.zeros(x.shape[0], *A.shape, device=x.device) if state is None else state.float()
        y, final = _scan_in_pieces(*tokens, A.float(), start)
    else:
        u, delta, b, c = (tensor.transpose(1, 2) for tensor in tokens)
        y, final = scan(u, delta, A.float(), b, c, return_last_state=True)
        y, final = y.transpose(1, 2), final.float()
    y = y if skip is None else y + x.float() * skip.float()
    y = y if z is None else y * functional.silu(z.float())
    return y.to(x.dtype), final


def _scan_in_pieces(x: Tensor, dt: Tensor, B: Tensor, C: Tensor, A: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the selective scan in slices of tokens; backward recomputes each slice from its initial state."""

    def scan_piece(x: Tensor, dt: Tensor, B: Tensor, C: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        batch, length, inner = x.shape
        decay = torch.exp(dt[..., None] * A).reshape(batch, length, -1)
        drive = ((dt * x)[..., None] * B[:, :, None]).reshape(batch, length, -1)
        first = drive[:, :1] + decay[:, :1] * state.reshape(batch, 1, -1)
        hidden = _LinearScan.apply(decay, torch.cat([first, drive[:, 1:]], dim=1))  # type: ignore[no-untyped-call]
        hidden = hidden.view(batch, length, inner, -1)
        return (hidden * C[:, :, None]).sum(-1), hidden[:, -1]

    outputs = [torch.empty_like(x[:, :0])]
    for start in range(0, x.shape[1], _PIECE):
        piece = slice(start, start + _PIECE)
        tokens = [tensor[:, piece] for tensor in (x, dt, B, C)]
        y, state = checkpoint(scan_piece, *tokens, state, use_reentrant=False, preserve_rng_state=False)
        outputs.append(y)
    return torch.cat(outputs, dim=1), state


class _LinearScan(torch.autograd.Function):
    """The scan h_t = decay_t * h_{t-1} + x_t along axis 1 from h = 0. Backward is the same scan in reverse."""

    @staticmethod
    def forward(ctx: Any, decay: Tensor, x: Tensor) -> Tensor:
        hidden = _scan_in_log_depth(decay, x)
        ctx.save_for_backward(decay, hidden)
        return hidden

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        decay, hidden = ctx.saved_tensors
        following = torch.cat([decay[:, 1:], torch.zeros_like(decay[:, :1])], dim=1)
        grad_x = _scan_in_log_depth(following.flip(1), grad.flip(1)).flip(1)
        before = torch.cat([torch.zeros_like(hidden[:, :1]), hidden[:, :-1]], dim=1)
        return grad_x * before, grad_x


def _scan_in_log_depth(decay: Tensor, x: Tensor) -> Tensor:
    """Compute the scan in log2(time) passes, each of which doubles the span of tokens that a position covers."""
    span = 1
    while span < x.shape[1]:
        reached = x[:, span:] + decay[:, span:] * x[:, :-span]
        decay = torch.cat([decay[:, :span], decay[:, span:] * decay[:, :-span]], dim=1)
        x = torch.cat([x[:, :span], reached], dim=1)
        span *= 2
    return x
