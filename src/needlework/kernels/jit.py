"""Build and run compiled CPU kernels: compilation, threads, arguments, memory for results.

A kernel is a function `kernel(first, stop, *arguments)` that computes the blocks `first..stop-1`. Blocks are independent
of each other, so results do not depend on the number of threads. Kernels release the GIL and run in a thread pool of this
module: numba's parallel loops would load a second OpenMP runtime beside torch's, abort in a forked child and, without
OpenMP, refuse calls from two threads at once.
"""

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

Kernel = Callable[..., None]
Array = np.ndarray[Any, Any]

# Types of kernel arguments.
VECTOR = "float32[::1]"
MATRIX = "float32[:,::1]"
DENSE = "float32[:,:,::1]"
MASK = "boolean[:,::1]"  # [batch, time], or [1, 0] for no reset
TOKENS = "Tuple((float32[::1], UniTuple(int64, 3)))"  # what `flatten_tokens` returns

# --- Compilation and threads ------------------------------------------------------------------------------------------

# error_model: a division that may raise ZeroDivisionError prevents vectorisation.
helper = numba.njit(fastmath={"contract"}, error_model="numpy")


def compile_kernel(*argument_types: str) -> Callable[[Kernel], Kernel]:
    """Return a decorator that compiles a kernel for these argument types on its first call, and caches it on disk."""

    def decorate(function: Kernel) -> Kernel:
        signature = f"void({', '.join(('int64', 'int64', *argument_types))})"

        @cache
        def build() -> Kernel:
            jit = numba.njit(signature, cache=True, nogil=True, fastmath={"contract"}, error_model="numpy")
            kernel: Kernel = jit(function)
            return kernel

        def call(*args: Any) -> None:
            build()(*args)

        return call

    return decorate


@cache
def _thread_pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=os.cpu_count() or 1, thread_name_prefix="needlework-kernel")


# A forked child does not have its parent's threads and needs a new pool.
os.register_at_fork(after_in_child=_thread_pool.cache_clear)


def run_blocks(kernel: Kernel, blocks: int, *arguments: Any) -> None:
    """Run `kernel` over all blocks on as many threads as torch may use, the caller's thread among them."""
    parts = max(1, min(torch.get_num_threads(), blocks))
    bounds = [blocks * part // parts for part in range(parts + 1)]
    others = [_thread_pool().submit(kernel, bounds[part], bounds[part + 1], *arguments) for part in range(1, parts)]
    try:
        kernel(bounds[0], bounds[1], *arguments)
    finally:
        for future in others:
            future.result()


# --- Arguments --------------------------------------------------------------------------------------------------------


def check_shape(name: str, tensor: Tensor | None, *shape: int) -> None:
    """Raise ValueError if a tensor has another shape: compiled kernels do not check bounds. None is accepted."""
    if tensor is not None and tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {list(tensor.shape)}, but {list(shape)} is needed")


def check_reset(reset: Tensor | None, batch: int, length: int) -> None:
    """Raise an error if a reset mask is not boolean [batch, length]."""
    check_shape("reset", reset, batch, length)
    if reset is not None and reset.dtype != torch.bool:
        raise TypeError(f"reset is {reset.dtype}, but a bool mask is needed: pass `reset != 0`")


def reset_mask(reset: Tensor | None) -> Tensor:
    """Return a reset mask as a kernel argument of type MASK."""
    return torch.zeros(1, 0, dtype=torch.bool) if reset is None else reset.contiguous()


def needs_gradient(*tensors: Tensor) -> bool:
    """Return whether autograd is needed; if not, it is skipped, since for one token it costs as much as a kernel."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def arrays(*tensors: Tensor) -> list[Array]:
    """Return tensors as numpy arrays that share their memory."""
    return [tensor.detach().numpy() for tensor in tensors]


def flatten_tokens(tensor: Tensor) -> tuple[Array, tuple[int, ...]]:
    """Return a [batch, time, channels] tensor of any layout as a flat array and its three strides, without a copy.

    With a flat array the compiler knows that channels are adjacent and uses vector loads; with a strided one it does not.
    """
    if tensor.numel() == 0:
        return np.empty(0, np.float32), (0, 0, 0)
    strides = tensor.stride()
    size = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, strides, strict=True))
    return tensor.detach().as_strided((size,), (1,)).numpy(), strides


# --- Memory for results -----------------------------------------------------------------------------------------------

# The first write to a large new tensor costs more in page faults than a whole scan (30 ms against 6 ms for 42 MB). The
# memory of large results is therefore reused once no tensor refers to it.
MIN_POOLED = 4 << 20  # bytes; below this, the system's allocator reuses memory
MAX_POOLED = 128 << 20  # maximum bytes held for reuse

_lock = threading.Lock()
_buffers: list[Array] = []  # oldest first; a tensor in use also refers to its buffer


def _count_references(buffers: list[Array], index: int) -> int:
    return sys.getrefcount(buffers[index])


_UNUSED = _count_references([np.empty(0)], 0)  # the count if only the list refers to a buffer


def empty_like(tensor: Tensor) -> Tensor:
    """Return an uninitialized dense fp32 tensor of the same shape on the CPU."""
    size = 4 * tensor.numel()
    if not MIN_POOLED <= size <= MAX_POOLED:
        return torch.empty(tensor.shape, dtype=torch.float32)
    with _lock:
        for index in range(len(_buffers)):
            if _buffers[index].nbytes == size and _count_references(_buffers, index) == _UNUSED:
                return torch.from_numpy(_buffers[index]).view(tensor.shape)
        buffer = np.empty(tensor.numel(), np.float32)  # numpy requests huge pages, torch does not
        _buffers.append(buffer)
        while sum(held.nbytes for held in _buffers) > MAX_POOLED:
            del _buffers[0]
        return torch.from_numpy(buffer).view(tensor.shape)
