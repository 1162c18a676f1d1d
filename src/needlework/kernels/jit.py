"""What compiled CPU kernels share: compilation, threads, arguments, memory for results, vector arithmetic, tiles.

A kernel is a function `kernel(first, stop, *arguments)` that computes the blocks `first..stop-1`. Blocks are independent
of each other, so results do not depend on the number of threads. Kernels release the GIL and run in a thread pool of this
module: numba's parallel loops would load a second OpenMP runtime beside torch's, abort in a forked child and, without
OpenMP, refuse calls from two threads at once.
"""

import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, TypeVar

import numba
import numba.core.event
import numpy as np
import torch
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic
from torch import Tensor

from needlework.terminal import compiling

Function = TypeVar("Function", bound=Callable[..., Any])
Kernel = Callable[..., None]
Array = np.ndarray[Any, Any]

# --- Compilation and threads ------------------------------------------------------------------------------------------


def compile_helper(**options: Any) -> Callable[[Function], Function]:
    """Return a decorator for kernels and for functions that kernels call."""
    # error_model: a division that may raise ZeroDivisionError prevents vectorisation.
    decorator: Callable[[Function], Function] = numba.njit(error_model="numpy", **options)
    return decorator


helper = compile_helper(fastmath={"contract"})
inlined = compile_helper(fastmath={"contract"}, inline="always")
reassociated = compile_helper(fastmath={"contract", "reassoc", "nsz"})  # allows vectorised sums
kernel = compile_helper(fastmath={"contract"}, cache=True, nogil=True)  # compiled on its first call, and cached on disk


# Seconds that the compilation of each module's forward kernel takes.
COMPILE_SECONDS = {"conv": 1.0, "rglru": 2.5, "selective_scan": 4.0, "block_attention": 10.0}


def name_of(dispatcher: Any) -> str:
    """Return the name of a kernel's module, such as "conv"."""
    return str(dispatcher.py_func.__module__).rpartition(".")[2]


def uncompiled(names: Iterable[str]) -> list[str]:
    """Return those of COMPILE_SECONDS' kernels that are compiled neither in this process nor in numba's cache on disk."""
    missing = []
    for name in names:
        forward = importlib.import_module(f"needlework.kernels.{name}").forward_kernel
        file = getattr(forward._cache, "_cache_file", None)  # None: numba finds no directory for a cache
        if not forward.signatures and not (file and file._load_index()):
            missing.append(name)
    return missing


class _CompilationListener(numba.core.event.Listener):  # type: ignore[misc]
    """Shows which kernel is compiled. Helpers are compiled inside of a kernel and are not shown."""

    def __init__(self) -> None:
        self._shown: dict[int, AbstractContextManager[None]] = {}

    def on_start(self, event: Any) -> None:
        kernel = event.data["dispatcher"]
        if kernel.targetoptions.get("nogil") and not self._shown:
            name = name_of(kernel)
            self._shown[id(kernel)] = compiling(name, COMPILE_SECONDS.get(name, 5.0))
            self._shown[id(kernel)].__enter__()

    def on_end(self, event: Any) -> None:
        if shown := self._shown.pop(id(event.data["dispatcher"]), None):
            shown.__exit__(None, None, None)


numba.core.event.register("numba:compile", _CompilationListener())


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


def check_shapes(*shape: int, **tensors: Tensor | None) -> None:
    """Raise ValueError if a tensor has another shape: compiled kernels do not check bounds. None is accepted."""
    for name, tensor in tensors.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has shape {list(tensor.shape)}, but {list(shape)} is needed")


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


def count_blocks(rows: int, channels: int) -> int:
    """Return the number of blocks of LANES channels in this many batch rows."""
    return rows * -(-channels // LANES)


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


# --- Vector arithmetic ------------------------------------------------------------------------------------------------

# exp, sigmoid and softplus in fp32 as plain arithmetic, which the compiler can vectorise, unlike calls of libm. They are
# accurate to about 1e-7 and propagate NaN.
ZERO, ONE, TWO = np.float32(0.0), np.float32(1.0), np.float32(2.0)
LOG2E, LN2 = np.float32(1.4426950408889634), np.float32(0.6931471805599453)
_LOWEST, _HIGHEST = np.float32(-126.0), np.float32(127.0)
_SHIFTER = np.float32(12582912.0)  # 1.5 * 2**23: adding it rounds to an integer and leaves that integer in the low bits
# Minimax polynomial of 2**f on [-0.5, 0.5], relative error 2e-9 before rounding.
_C1, _C2, _C3 = np.float32(6.9314720286e-1), np.float32(2.4022647914e-1), np.float32(5.5503324711e-2)
_C4, _C5, _C6 = np.float32(9.6184373578e-3), np.float32(1.3398874422e-3), np.float32(1.5353361890e-4)
# log(1 + e) = 2 * artanh(s) with s = e / (2 + e): the odd series 2 * (s + s**3 / 3 + s**5 / 5 + ...).
_L3, _L5, _L7 = np.float32(1 / 3), np.float32(1 / 5), np.float32(1 / 7)
_L9, _L11, _L13 = np.float32(1 / 9), np.float32(1 / 11), np.float32(1 / 13)


@intrinsic  # type: ignore[untyped-decorator]
def _scale_by_power_of_two(typing_context: Any, value: Any, shifted: Any) -> Any:
    """Return value * 2**k by adding k to the exponent bits; the low bits of the float `shifted` hold the integer k."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(32)
        exponent = builder.shl(builder.bitcast(args[1], word), ir.Constant(word, 23))
        return builder.bitcast(builder.add(builder.bitcast(args[0], word), exponent), ir.FloatType())

    return types.float32(types.float32, types.float32), generate


@inlined
def exp2(z: Any) -> Any:
    """Return 2**z, saturating at 2**-126 and 2**127."""
    z = _LOWEST if z < _LOWEST else z
    z = _HIGHEST if z > _HIGHEST else z
    shifted = z + _SHIFTER
    f = z - (shifted - _SHIFTER)
    p = (((((_C6 * f + _C5) * f + _C4) * f + _C3) * f + _C2) * f + _C1) * f + ONE
    return _scale_by_power_of_two(p, shifted)


@inlined
def one_minus_exp2(z: Any) -> Any:
    """Return 1 - 2**z for z <= 0, without cancellation near 0."""
    near = -z * (((((_C6 * z + _C5) * z + _C4) * z + _C3) * z + _C2) * z + _C1)
    return near if z > np.float32(-0.5) else ONE - exp2(z)


@inlined
def sigmoid(v: Any) -> Any:
    return ONE / (ONE + exp2(-v * LOG2E))


@inlined
def softplus(v: Any) -> Any:
    """Return log(1 + exp(v))."""
    e = exp2(-abs(v) * LOG2E)
    s = e / (TWO + e)
    q = s * s
    series = ONE + q * (_L3 + q * (_L5 + q * (_L7 + q * (_L9 + q * (_L11 + q * _L13)))))
    return (v if v > ZERO else ZERO) + TWO * s * series


# --- Tiles ------------------------------------------------------------------------------------------------------------

# A block is LANES channels of one batch row; the lanes are the vector dimension. Time is walked in tiles of TILE tokens that
# are copied into scratch arrays of fixed size.
LANES, TILE = 64, 32


@helper
def load_tile(tensor: Any, row: int, start: int, low: int, lanes: int, tokens: int, tile: Any) -> None:
    """Set tile[t, j] to the value of `tensor`, flattened, in this batch row, for token `start + t` and channel `low + j`.

    Indices are unsigned: numba supports negative ones, and the check for them prevents vectorisation.
    """
    source, strides = tensor
    at = np.uint64(row * strides[0] + start * strides[1] + low * strides[2])
    token, channel = np.uint64(strides[1]), np.uint64(strides[2])
    if channel == np.uint64(1):
        for t in range(np.uint64(tokens)):
            for j in range(np.uint64(lanes)):
                tile[t, j] = source[at + t * token + j]
    else:  # time is the inner dimension in memory
        for j in range(np.uint64(lanes)):
            for t in range(np.uint64(tokens)):
                tile[t, j] = source[at + t * token + j * channel]


@helper
def store_tile(tile: Any, target: Any, at: int, pitch: int, lanes: int, tokens: int) -> None:
    """Set target[at + t * pitch + j] = tile[t, j]."""
    for t in range(tokens):
        base = np.uint64(at + t * pitch)
        for j in range(np.uint64(lanes)):
            target[base + j] = tile[t, j]


@helper
def load_lanes(vector: Any, low: int, lanes: int, out: Any) -> None:
    """Copy the block's part of a per-channel vector to `out`; zeros if the vector is empty or lanes have no channel."""
    out[:] = ZERO
    if vector.size > 0:
        for j in range(lanes):
            out[j] = vector[low + j]
