"""Tiles of tokens and channels that kernels hold in cache.

A block is LANES channels of one batch row; the lanes are the vector dimension. Time is walked in tiles of TILE tokens that
are copied into scratch arrays of fixed size.
"""

from typing import Any

import numpy as np

from needlework.kernels.jit import helper
from needlework.kernels.vector_math import ZERO

LANES = 64
TILE = 32


def count_blocks(rows: int, channels: int) -> int:
    """Return the number of blocks of LANES channels in this many batch rows."""
    return rows * -(-channels // LANES)


@helper  # type: ignore[untyped-decorator]
def load_tile(tensor: Any, row: int, start: int, low: int, lanes: int, tokens: int, tile: Any) -> None:
    """Set tile[t, j] to the value of TOKENS `tensor` in this batch row, for token `start + t` and channel `low + j`.

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


@helper  # type: ignore[untyped-decorator]
def store_tile(tile: Any, target: Any, at: int, pitch: int, lanes: int, tokens: int) -> None:
    """Set target[at + t * pitch + j] = tile[t, j]."""
    for t in range(tokens):
        base = np.uint64(at + t * pitch)
        for j in range(np.uint64(lanes)):
            target[base + j] = tile[t, j]


@helper  # type: ignore[untyped-decorator]
def load_lanes(vector: Any, low: int, lanes: int, out: Any) -> None:
    """Copy the block's part of a per-channel vector to `out`; zeros if the vector is empty or lanes have no channel."""
    out[:] = ZERO
    if vector.size > 0:
        for j in range(lanes):
            out[j] = vector[low + j]
