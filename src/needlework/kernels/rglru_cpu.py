"""RG-LRU recurrence on the CPU, forward and backward: one streaming pass over the tensors each."""

from typing import Any

from torch import Tensor

from needlework.kernels.jit import compiled, run_blocks

GROUP = 64  # columns per block: wide enough for vectors and whole cache lines

_ROWS = "float32[:,:,::1]"  # [batch, time, width]
_MASK = "boolean[:,::1]"  # [batch, time], or [1, 0] for no reset
_STATE = "float32[:,::1]"  # [batch, width]


@compiled(_ROWS, _ROWS, _MASK, _STATE, _ROWS)
def _forward(first: int, stop: int, x: Any, decay: Any, reset: Any, state: Any, out: Any) -> None:
    length, width = x.shape[1], x.shape[2]
    groups = (width + GROUP - 1) // GROUP
    resets = reset.shape[1] > 0
    at = first
    while at < stop:
        row = at // groups
        # Neighbouring groups of one row are walked together: long contiguous runs keep the prefetcher busy.
        take = min(stop, (row + 1) * groups) - at
        low = (at % groups) * GROUP
        high = min(width, low + take * GROUP)
        previous = state[row]
        for t in range(length):
            if resets and reset[row, t]:
                for c in range(low, high):
                    out[row, t, c] = x[row, t, c]
            else:
                for c in range(low, high):
                    out[row, t, c] = decay[row, t, c] * previous[c] + x[row, t, c]
            previous = out[row, t]
        at += take


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
    length, width = out.shape[1], out.shape[2]
    groups = (width + GROUP - 1) // GROUP
    resets = reset.shape[1] > 0
    at = first
    while at < stop:
        row = at // groups
        take = min(stop, (row + 1) * groups) - at
        low = (at % groups) * GROUP
        high = min(width, low + take * GROUP)
        carried = grad_state[row]  # gradient of the state that enters the token after the current one
        for c in range(low, high):
            carried[c] = grad_final[row, c]
        for t in range(length - 1, -1, -1):
            for c in range(low, high):
                grad_x[row, t, c] = grad_out[row, t, c] + carried[c]
            if resets and reset[row, t]:
                for c in range(low, high):
                    grad_decay[row, t, c] = 0.0
                    carried[c] = 0.0
            else:
                before = out[row, t - 1] if t > 0 else state[row]
                for c in range(low, high):
                    grad_decay[row, t, c] = grad_x[row, t, c] * before[c]
                for c in range(low, high):
                    carried[c] = decay[row, t, c] * grad_x[row, t, c]
        at += take


def _blocks(rows: Tensor) -> int:
    return int(rows.shape[0] * ((rows.shape[2] + GROUP - 1) // GROUP))


def forward(x: Tensor, decay: Tensor, reset: Tensor, state: Tensor, out: Tensor) -> None:
    """Fill `out`. All fp32 and contiguous; `reset` is [batch, time] bool or [1, 0]."""
    run_blocks(_forward, _blocks(x), *(tensor.numpy() for tensor in (x, decay, reset, state, out)))


def backward(*tensors: Tensor) -> None:
    """Fill the gradients: decay, reset, state, out, grad_out, grad_final -> grad_x, grad_decay, grad_state."""
    run_blocks(_backward, _blocks(tensors[3]), *(tensor.numpy() for tensor in tensors))
