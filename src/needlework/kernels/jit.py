"""How compiled CPU kernels are built, fed and spread over threads.

A kernel is a function `kernel(first, stop, *arguments)` that works through the blocks `first..stop-1`; blocks are
independent of each other, so the result does not depend on how many threads share them. The threads are our own and
the kernels give up the GIL: numba's parallel loops would bring a second OpenMP runtime beside torch's, abort in a
forked child and, without OpenMP, refuse calls from two threads at once.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

Kernel = Callable[..., None]


def differentiated(*tensors: Tensor) -> bool:
    """Whether a gradient may be asked for. If not, autograd is left out: for one token it costs as much as a kernel."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def arrays(*tensors: Tensor) -> list[np.ndarray[Any, Any]]:
    return [tensor.detach().numpy() for tensor in tensors]


# What `tokens_of` makes of a [batch, time, channels] tensor: a flat array, and how far apart rows, tokens and channels
# are in it.
TOKENS = "Tuple((float32[::1], UniTuple(int64, 3)))"


def tokens_of(tensor: Tensor) -> tuple[np.ndarray[Any, Any], tuple[int, ...]]:
    """A [batch, time, channels] tensor of any layout as TOKENS, without a copy.

    A flat array lets the compiler see a dense vector where channels lie side by side; a strided one would not.
    """
    if tensor.numel() == 0:
        return np.empty(0, np.float32), (0, 0, 0)
    strides = tensor.stride()
    size = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, strides, strict=True))
    return tensor.detach().as_strided((size,), (1,)).numpy(), strides


GROUP = 64  # channels per block where blocks of a row are walked together: whole vectors, whole cache lines


def column_blocks(rows: Tensor) -> int:
    """How many blocks a [batch, time, channels] tensor has for `columns`."""
    return int(rows.shape[0] * ((rows.shape[2] + GROUP - 1) // GROUP))


@numba.njit  # type: ignore[untyped-decorator]
def columns(at: int, stop: int, width: int) -> Any:
    """The row of block `at`, its channels joined with those of the following blocks of that row, and the next block.

    Long contiguous runs keep the prefetcher busy.
    """
    groups = (width + GROUP - 1) // GROUP
    row = at // groups
    end = min(stop, (row + 1) * groups)
    low = (at - row * groups) * GROUP
    return row, low, min(width, low + (end - at) * GROUP), end


def compiled(*argument_types: str) -> Callable[[Kernel], Kernel]:
    """Compile for exactly these argument types, on the first call, and keep the machine code on disk."""

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
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=os.cpu_count() or 1, thread_name_prefix="needlework-kernel")


# The threads of the parent do not exist in a forked child: let the child make its own.
os.register_at_fork(after_in_child=_pool.cache_clear)


def run_blocks(kernel: Kernel, blocks: int, *arguments: Any) -> None:
    """Run `kernel` over all blocks on as many threads as torch is allowed to use, the caller's thread among them."""
    parts = max(1, min(torch.get_num_threads(), blocks))
    bounds = [blocks * part // parts for part in range(parts + 1)]
    others = [_pool().submit(kernel, bounds[part], bounds[part + 1], *arguments) for part in range(1, parts)]
    try:
        kernel(bounds[0], bounds[1], *arguments)
    finally:
        for future in others:
            future.result()
