"""Blocks and tiles of the kernels that keep their state in cache.

A block is LANES channels of one batch row; the lanes are the vector dimension. Time is walked in tiles of TILE tokens
that are copied into scratch arrays of fixed size.
"""

from typing import Any

import numba
import numpy as np

from needlework.kernels.vector_math import ZERO

LANES = 64
TILE = 32

VECTOR = "float32[::1]"  # [inner], or empty
MATRIX = "float32[:,::1]"
DENSE = "float32[:,:,::1]"
MASK = "boolean[:,::1]"  # [batch, time], or [1, 0] for no reset

helper = numba.njit(fastmath={"contract"}, error_model="numpy")


@helper  # type: ignore[untyped-decorator]
def load(tensor: Any, row: int, start: int, low: int, lanes: int, tokens: int, tile: Any) -> None:
    """tile[t, j] = the value of TOKENS `tensor` in this batch row, for token `start + t` and channel `low + j`.

    In unsigned numbers: an index that may be negative, as numba allows, would keep the loop from vector code.
    """
    source, strides = tensor
    at = np.uint64(row * strides[0] + start * strides[1] + low * strides[2])
    token, channel = np.uint64(strides[1]), np.uint64(strides[2])
    if channel == np.uint64(1):
        for t in range(np.uint64(tokens)):
            for j in range(np.uint64(lanes)):
                tile[t, j] = source[at + t * token + j]
    else:  # channels before time: read along time
        for j in range(np.uint64(lanes)):
            for t in range(np.uint64(tokens)):
                tile[t, j] = source[at + t * token + j * channel]


@helper  # type: ignore[untyped-decorator]
def store(tile: Any, target: Any, at: int, pitch: int, lanes: int, tokens: int) -> None:
    """target[at + t * pitch + j] = tile[t, j]."""
    for t in range(tokens):
        base = np.uint64(at + t * pitch)
        for j in range(np.uint64(lanes)):
            target[base + j] = tile[t, j]


@helper  # type: ignore[untyped-decorator]
def lanes_of(vector: Any, low: int, lanes: int, out: Any) -> None:
    """The block's part of a per-channel vector; zeros where the vector is empty or the block has no channel."""
    out[:] = ZERO
    if vector.size > 0:
        for j in range(lanes):
            out[j] = vector[low + j]


def groups(inner: int) -> int:
    """How many blocks of channels one batch row has."""
    return (inner + LANES - 1) // LANES
