"""How compiled CPU kernels are built and spread over threads.

A kernel is a function `kernel(first, stop, *arrays)` that works through the blocks `first..stop-1`; blocks are independent
of each other, so the result does not depend on how many threads share them. The threads are our own and the kernels give
up the GIL: numba's parallel loops would bring a second OpenMP runtime beside torch's, abort in a forked child and, without
OpenMP, refuse calls from two threads at once.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch

Kernel = Callable[..., None]


def compiled(*argument_types: str, fastmath: set[str] | None = None) -> Callable[[Kernel], Kernel]:
    """Compile for exactly these argument types, on the first call, and keep the machine code on disk.

    One signature with strided arrays serves every memory layout, so no layout costs a compilation of its own.
    """

    def decorate(function: Kernel) -> Kernel:
        signature = f"void({', '.join(('int64', 'int64', *argument_types))})"

        @cache
        def build() -> Kernel:
            import numba

            jit = numba.njit(signature, cache=True, nogil=True, fastmath=fastmath or {"contract"})
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


def run_blocks(kernel: Kernel, blocks: int, *arrays: Any) -> None:
    """Run `kernel` over all blocks on as many threads as torch is allowed to use, the caller's thread among them."""
    parts = max(1, min(torch.get_num_threads(), blocks))
    bounds = [blocks * part // parts for part in range(parts + 1)]
    others = [_pool().submit(kernel, bounds[part], bounds[part + 1], *arrays) for part in range(1, parts)]
    try:
        kernel(bounds[0], bounds[1], *arrays)
    finally:
        for future in others:
            future.result()
