"""Memory for large results that the kernels can fill at full speed.

A large tensor comes from the system untouched, and its first write costs more in page faults than a whole scan (30 ms
against 6 ms for 42 MB). So the memory of large results is used again once nobody holds the result any more.
"""

import sys
import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor

LARGE = 4 << 20  # bytes; below this the system's allocator reuses memory by itself
KEPT = 128 << 20  # bytes that may be held for later use

_lock = threading.Lock()
_buffers: list[np.ndarray[Any, Any]] = []  # oldest first; a tensor in use holds its buffer as well


def _holders(buffers: list[np.ndarray[Any, Any]], index: int) -> int:
    return sys.getrefcount(buffers[index])


_UNUSED = _holders([np.empty(0)], 0)  # what is counted when nobody but the list holds a buffer


def empty_like(tensor: Tensor) -> Tensor:
    """A dense fp32 tensor of that shape on the CPU, its contents undefined."""
    size = 4 * tensor.numel()
    if not LARGE <= size <= KEPT:
        return torch.empty(tensor.shape, dtype=torch.float32)
    with _lock:
        for index in range(len(_buffers)):
            if _buffers[index].nbytes == size and _holders(_buffers, index) == _UNUSED:
                return torch.from_numpy(_buffers[index]).view(tensor.shape)
        buffer = np.empty(tensor.numel(), np.float32)  # numpy asks for huge pages, torch does not
        _buffers.append(buffer)
        while sum(held.nbytes for held in _buffers) > KEPT:
            del _buffers[0]
        return torch.from_numpy(buffer).view(tensor.shape)
