"""RG-LRU recurrence on the CPU, forward and backward: one streaming pass over the tensors each."""

from typing import Any

import numba
import numpy as np
from torch import Tensor

from needlework.kernels.jit import arrays, column_blocks, columns, compiled, run_blocks

_ROWS = "float32[:,:,::1]"  # [batch, time, width]
_MASK = "boolean[:,::1]"  # [batch, time], or [1, 0] for no reset
_STATE = "float32[:,::1]"  # [batch, width]


# The loops run over slices from 0 on: an index that may be negative, as numba allows, would keep them from vector code.


@numba.njit(fastmath={"contract"})  # type: ignore[untyped-decorator]
def _step(decay: Any, before: Any, x: Any, after: Any) -> None:
    for c in range(after.size):
        after[c] = decay[c] * before[c] + x[c]


@numba.njit  # type: ignore[untyped-decorator]
def _add(left: Any, right: Any, out: Any) -> None:
    for c in range(out.size):
        out[c] = left[c] + right[c]


@numba.njit  # type: ignore[untyped-decorator]
def _multiply(left: Any, right: Any, out: Any) -> None:
    for c in range(out.size):
        out[c] = left[c] * right[c]


@compiled(_ROWS, _ROWS, _MASK, _STATE, _ROWS)
def _forward(first: int, stop: int, x: Any, decay: Any, reset: Any, state: Any, out: Any) -> None:
    at = first
    while at < stop:
        row, low, high, at = columns(at, stop, x.shape[2])
        previous = state[row, low:high]
        for t in range(x.shape[1]):
            here = out[row, t, low:high]
            if reset.shape[1] > 0 and reset[row, t]:
                here[:] = x[row, t, low:high]
            else:
                _step(decay[row, t, low:high], previous, x[row, t, low:high], here)
            previous = here


@compiled(_ROWS, _MASK, _STATE, _ROWS, _ROWS, _STATE, _ROWS, _ROWS, _STATE)
def _backward(
    first: int,
    stop: int,
    decay: Any,
    reset: Any,
    state: Any,
    out: Any,
    grad_out: Any,
    grad_final: Any,
    grad_x: Any,
    grad_decay: Any,
    grad_state: Any,
) -> None:
    at = first
    while at < stop:
        row, low, high, at = columns(at, stop, out.shape[2])
        carried = grad_state[row, low:high]  # gradient of the state that leaves the current token
        carried[:] = grad_final[row, low:high]
        for t in range(out.shape[1] - 1, -1, -1):
            here = grad_x[row, t, low:high]
            _add(grad_out[row, t, low:high], carried, here)
            if reset.shape[1] > 0 and reset[row, t]:
                grad_decay[row, t, low:high] = np.float32(0.0)
                carried[:] = np.float32(0.0)
            else:
                before = out[row, t - 1, low:high] if t > 0 else state[row, low:high]
                _multiply(here, before, grad_decay[row, t, low:high])
                _multiply(here, decay[row, t, low:high], carried)


def forward(x: Tensor, decay: Tensor, reset: Tensor, state: Tensor, out: Tensor) -> None:
    """Fill `out`. All fp32 and contiguous; `reset` is [batch, time] bool or [1, 0]."""
    run_blocks(_forward, column_blocks(x), *arrays(x, decay, reset, state, out))


def backward(*tensors: Tensor) -> None:
    """Fill the gradients: decay, reset, state, out, grad_out, grad_final -> grad_x, grad_decay, grad_state."""
    run_blocks(_backward, column_blocks(tensors[3]), *arrays(*tensors))
