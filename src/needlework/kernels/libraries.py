"""Scans from libraries made for GPUs, put behind our signatures. Each is used only where it computes exactly ours."""

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from needlework.kernels import log_depth

_LONGEST = 65_536  # tokens that accelerated-scan takes


@cache
def library_function(module: str, name: str) -> Callable[..., Any] | None:
    """The function, or None where the library is missing or cannot be set up (some compile themselves on import)."""
    try:
        function: Callable[..., Any] | None = getattr(importlib.import_module(module), name, None)
    except Exception:
        return None
    return function


def rglru_scan(x: Tensor, decay: Tensor, state: Tensor, reset: Tensor | None) -> tuple[Tensor, Tensor]:
    """accelerated-scan's h_t = gate_t * h_{t-1} + token_t where installed; it wants [batch, width, 2**k tokens]."""
    scan = library_function("accelerated_scan.warp", "scan")
    length = x.shape[1]
    if scan is None or not 0 < length <= _LONGEST:
        return log_depth.rglru_scan(x, decay, state, reset)
    padded = max(32, 1 << (length - 1).bit_length())
    gates, tokens = decay.float(), x.float()
    if reset is not None:
        gates = gates.masked_fill(reset[..., None], 0.0)
    tokens = torch.cat([tokens[:, :1] + gates[:, :1] * state[:, None], tokens[:, 1:]], dim=1)
    padding = (0, 0, 0, padded - length)
    shaped = (torch.nn.functional.pad(tensor, padding).transpose(1, 2).contiguous() for tensor in (gates, tokens))
    hidden = scan(*shaped).transpose(1, 2)[:, :length]
    return hidden.to(x.dtype), hidden[:, -1]


def selective_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor | None, reset: Tensor | None
) -> tuple[Tensor, Tensor]:
    """mamba-ssm's scan where it is installed and enough: it starts from zero, never resets, and has no gradient of the
    last state."""
    scan = library_function("mamba_ssm.ops.selective_scan_interface", "selective_scan_fn")
    differentiated = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, dt, A, B, C))
    if scan is None or state is not None or reset is not None or differentiated or x.shape[1] == 0:
        start = torch.zeros(x.shape[0], *A.shape, device=x.device) if state is None else state.float()
        return log_depth.selective_scan(x, dt, A, B, C, start, reset)
    channels_first = [tensor.float().transpose(1, 2) for tensor in (x, dt, B, C)]
    y, last = scan(channels_first[0], channels_first[1], A.float(), *channels_first[2:], return_last_state=True)
    return y.transpose(1, 2).to(x.dtype), last.float()
