"""Attention of a block of queries on the CPU, in one pass over its keys: products, softmax, entropy, choice of heads, mixing.

Keys and values come transposed, with tokens side by side: then both products are walked along tokens, four by four, and all
that lies between them stays in cache. A block is a few queries of one batch row, at least four of which share their keys.
"""

import math
from typing import Any

import numba
import numpy as np
from torch import Tensor

from needlework.kernels.jit import arrays, compiled, run_blocks
from needlework.kernels.vector_math import LOG2E, ONE, ZERO, exp2

_FOUR = "float32[:,:,:,::1]"
_THREE_AXES = "float32[:,:,::1]"
_MASK = "boolean[:,:,::1]"
_FLAGS = "boolean[:,::1]"
_INDEX = "int64[::1]"
_TILE = 4  # queries that are multiplied at once, and channels

_plain = numba.njit(fastmath={"contract"}, error_model="numpy")
_sums = numba.njit(fastmath={"contract", "reassoc", "nsz"}, error_model="numpy")  # sums may be taken in lanes
_ONE, _TWO, _THREE = np.uint64(1), np.uint64(2), np.uint64(3)

# Offsets are unsigned: an index that may be negative, as numba allows, would keep the loops from vector code.


@_plain  # type: ignore[untyped-decorator]
def _add_products(a: Any, at: Any, b: Any, first: Any, pitch: Any, c: Any, to: Any, n: Any) -> None:
    """c[to[i] + j] += sum over 4 channels d of a[at[i] + d] * b[first + d * pitch + j], for 4 queries i and n tokens j."""
    a0, a1, a2, a3 = at[0], at[1], at[2], at[3]
    p0, p1, p2, p3 = a[a0], a[a0 + _ONE], a[a0 + _TWO], a[a0 + _THREE]
    q0, q1, q2, q3 = a[a1], a[a1 + _ONE], a[a1 + _TWO], a[a1 + _THREE]
    r0, r1, r2, r3 = a[a2], a[a2 + _ONE], a[a2 + _TWO], a[a2 + _THREE]
    s0, s1, s2, s3 = a[a3], a[a3 + _ONE], a[a3 + _TWO], a[a3 + _THREE]
    b0, b1, b2, b3 = first, first + pitch, first + _TWO * pitch, first + _THREE * pitch
    c0, c1, c2, c3 = to[0], to[1], to[2], to[3]
    for j in range(n):
        v0, v1, v2, v3 = b[b0 + j], b[b1 + j], b[b2 + j], b[b3 + j]
        c[c0 + j] = c[c0 + j] + p0 * v0 + p1 * v1 + p2 * v2 + p3 * v3
        c[c1 + j] = c[c1 + j] + q0 * v0 + q1 * v1 + q2 * v2 + q3 * v3
        c[c2 + j] = c[c2 + j] + r0 * v0 + r1 * v1 + r2 * v2 + r3 * v3
        c[c3 + j] = c[c3 + j] + s0 * v0 + s1 * v1 + s2 * v2 + s3 * v3


@_sums  # type: ignore[untyped-decorator]
def _add_sums(a: Any, at: Any, b: Any, first: Any, pitch: Any, c: Any, to: Any, n: Any) -> None:
    """c[to[i] + d] += sum over n tokens j of a[at[i] + j] * b[first + d * pitch + j], for 4 queries i and 4 channels d."""
    a0, a1, a2, a3 = at[0], at[1], at[2], at[3]
    b0, b1, b2, b3 = first, first + pitch, first + _TWO * pitch, first + _THREE * pitch
    p0 = p1 = p2 = p3 = q0 = q1 = q2 = q3 = r0 = r1 = r2 = r3 = s0 = s1 = s2 = s3 = ZERO
    for j in range(n):
        v0, v1, v2, v3 = b[b0 + j], b[b1 + j], b[b2 + j], b[b3 + j]
        w = a[a0 + j]
        p0, p1, p2, p3 = p0 + w * v0, p1 + w * v1, p2 + w * v2, p3 + w * v3
        w = a[a1 + j]
        q0, q1, q2, q3 = q0 + w * v0, q1 + w * v1, q2 + w * v2, q3 + w * v3
        w = a[a2 + j]
        r0, r1, r2, r3 = r0 + w * v0, r1 + w * v1, r2 + w * v2, r3 + w * v3
        w = a[a3 + j]
        s0, s1, s2, s3 = s0 + w * v0, s1 + w * v1, s2 + w * v2, s3 + w * v3
    _put(c, to[0], p0, p1, p2, p3)
    _put(c, to[1], q0, q1, q2, q3)
    _put(c, to[2], r0, r1, r2, r3)
    _put(c, to[3], s0, s1, s2, s3)


@_plain  # type: ignore[untyped-decorator]
def _put(c: Any, at: Any, v0: Any, v1: Any, v2: Any, v3: Any) -> None:
    c[at] += v0
    c[at + _ONE] += v1
    c[at + _TWO] += v2
    c[at + _THREE] += v3


@_plain  # type: ignore[untyped-decorator]
def _highest(s: Any, at: Any, n: Any) -> Any:
    top = np.float32(-np.inf)
    for j in range(n):
        top = s[at + j] if s[at + j] > top else top
    return top


@_plain  # type: ignore[untyped-decorator]
def _exponentials(s: Any, at: Any, n: Any, top: Any, weighted: Any) -> None:
    """x = s - top: s becomes exp(x), and `weighted` x * exp(x). Apart from the sums: in lanes, `exp2` would lose its rounding."""
    for j in range(n):
        x = s[at + j] - top
        e = exp2(x * LOG2E)
        s[at + j] = e
        weighted[j] = e * x


@_plain  # type: ignore[untyped-decorator]
def _hide(s: Any, at: Any, n: Any, seen: Any, weighted: Any) -> None:
    """Where a key is hidden, both are exactly 0."""
    for j in range(n):
        if not seen[j]:
            s[at + j] = weighted[j] = ZERO


@_sums  # type: ignore[untyped-decorator]
def _sum(s: Any, at: Any, n: Any) -> Any:
    total = ZERO
    for j in range(n):
        total += s[at + j]
    return total


@_plain  # type: ignore[untyped-decorator]
def _seen_highest(s: Any, at: Any, n: Any, seen: Any) -> Any:
    top = np.float32(-np.inf)
    for j in range(n):
        if seen[j] and s[at + j] > top:
            top = s[at + j]
    return top


@_plain  # type: ignore[untyped-decorator]
def _certainty(total: Any, weighted: Any) -> Any:
    """The sum of p * log p: minus the entropy. Both terms are negative, so nothing cancels."""
    return np.float32(np.float64(weighted) / np.float64(total) - math.log(np.float64(total)))


@_plain  # type: ignore[untyped-decorator]
def _choose(certainty: Any, k: int, silenced: Any, off: Any) -> None:
    """The k heads with the highest certainty stay on; ties go to the lower head, and NaN is above every number."""
    for h in range(certainty.size):
        own, before = certainty[h], 0
        for other in range(certainty.size):
            value = certainty[other]
            above = value > own or (value != value and own == own)
            tied = value == own or (value != value and own != own)
            before += above or (tied and other < h)
        off[h] = before >= k or silenced[h]


@_plain  # type: ignore[untyped-decorator]
def _range_of(seen: Any) -> Any:
    """The first key that a query sees, the one behind the last, and how many it sees."""
    first, last, count = seen.size, 0, 0
    for j in range(seen.size):
        if seen[j]:
            count += 1
            first = min(first, j)
            last = j + 1
    return (first, last, count) if count else (0, 0, 0)


@_plain  # type: ignore[untyped-decorator]
def _weigh(scores: Any, at: int, low: int, high: int, own: Any, seen: Any, weighted: Any) -> Any:
    """Scores of keys low..high become exponentials, 0 where hidden. Their sum, and the certainty of the head."""
    first, last, count = own
    scores[at + low : at + first] = ZERO
    scores[at + last : at + high] = ZERO
    if count == 0:
        return ZERO, ZERO
    begin, n, whole = np.uint64(at + first), np.uint64(last - first), count == last - first
    top = _highest(scores, begin, n) if whole else _seen_highest(scores, begin, n, seen[first:last])
    _exponentials(scores, begin, n, top, weighted)
    if not whole:
        _hide(scores, begin, n, seen[first:last], weighted)
    total = _sum(scores, begin, n)
    return total, _certainty(total, _sum(weighted, np.uint64(0), n))


@_plain  # type: ignore[untyped-decorator]
def _plus(at: Any, step: int) -> Any:
    more = np.uint64(step)
    return at[0] + more, at[1] + more, at[2] + more, at[3] + more


@_plain  # type: ignore[untyped-decorator]
def _one_segment(a: Any, at: Any, segment: Any, group: int, tokens: Any, c: Any, to: Any, mixing: bool) -> None:
    """Four queries against one segment of keys, four channels at a time: keys times them, or values weighed by them.

    `segment`: [groups, channels, keys]. `tokens`: its first key, the one behind the last, and its place among all keys.
    """
    begin, end, place = tokens
    if end <= begin:
        return
    channels, pitch = segment.shape[1], segment.shape[2]
    lines, n = segment.reshape(segment.size), np.uint64(end - begin)
    for channel in range(0, channels, _TILE):
        first = np.uint64((group * channels + channel) * pitch + begin)
        if mixing:
            _add_sums(a, _plus(at, place + begin), lines, first, np.uint64(pitch), c, _plus(to, channel), n)
        else:
            _add_products(a, _plus(at, channel), lines, first, np.uint64(pitch), c, _plus(to, place + begin), n)


@_plain  # type: ignore[untyped-decorator]
def _by_fours(a: Any, c: Any, places: Any, count: int, spare: int, segments: Any, groups: Any, ranges: Any, mixing: bool) -> None:
    """`count` queries of one kv head against both segments; where the last four are not full, the rest goes to a spare place."""
    for i in range(0, count, _TILE):
        at = (
            np.uint64(places[0, i]),
            np.uint64(places[0, min(i + 1, count - 1)]),
            np.uint64(places[0, min(i + 2, count - 1)]),
            np.uint64(places[0, min(i + 3, count - 1)]),
        )
        to = (
            np.uint64(places[1, i]),
            np.uint64(places[1, i + 1] if i + 1 < count else spare),
            np.uint64(places[1, i + 2] if i + 2 < count else spare),
            np.uint64(places[1, i + 3] if i + 3 < count else spare),
        )
        _one_segment(a, at, segments[0], groups[0], ranges[0], c, to, mixing)
        _one_segment(a, at, segments[1], groups[1], ranges[1], c, to, mixing)


@_plain  # type: ignore[untyped-decorator]
def _weigh_heads(block: Any, span: Any, scores: Any, seen: Any, own: Any, left_out: Any, total: Any, certainty: Any) -> None:
    """All heads of one query: their weights and sums, and the certainty of each, without the keys that are left out of it."""
    first_head, keys, copy, weighted, counted = block
    low, high = span
    rest = own
    if left_out.size:
        for j in range(keys):
            counted[j] = not left_out[j] and (seen.size == 0 or seen[j])
        rest = _range_of(counted)
    for h in range(certainty.size):
        at = (first_head + h) * keys
        if left_out.size:
            copy[low:high] = scores[at + low : at + high]
            certainty[h] = _weigh(copy, 0, low, high, rest, counted, weighted)[1]
            total[h] = _weigh(scores, at, low, high, own, seen, weighted)[0]
        else:
            total[h], certainty[h] = _weigh(scores, at, low, high, own, seen, weighted)


@compiled(_FOUR, *[_THREE_AXES] * 2, _INDEX, *[_THREE_AXES] * 2, _MASK, _FLAGS, _INDEX, _FLAGS, _FOUR, _MASK, _THREE_AXES)
def _attend(
    first: int,
    stop: int,
    query: Any,
    far_keys: Any,
    far_values: Any,
    prompt: Any,
    near_keys: Any,
    near_values: Any,
    visible: Any,
    left_out: Any,
    keep: Any,
    silenced: Any,
    out: Any,
    off: Any,
    certainty: Any,
) -> None:
    rows, heads, queries, dim = query.shape
    kv_heads, far, keys = near_keys.shape[0] // rows, far_keys.shape[2], far_keys.shape[2] + near_keys.shape[2]
    group, channels = heads // kv_heads, out.shape[3]
    width = max(1, _TILE // group)
    per_row, spare = (queries + width - 1) // width, width * heads
    scores, mixed = np.empty((spare + 1) * keys, np.float32), np.empty((spare + 1) * channels, np.float32)
    copy, weighted, counted = np.empty(keys, np.float32), np.empty(keys, np.float32), np.empty(keys, np.bool_)
    total, own, places = np.empty((width, heads), np.float32), np.empty((width, 3), np.int64), np.empty((2, spare), np.int64)
    flat, nothing = query.reshape(query.size), np.empty(0, np.bool_)
    for unit in range(first, stop):
        row, begin = unit // per_row, unit % per_row * width
        count, mask_row = min(width, queries - begin), min(row, visible.shape[0] - 1)
        if keep[row] <= 0:
            out[row, begin : begin + count] = ZERO
            off[row, begin : begin + count] = True
            certainty[row, begin : begin + count] = ZERO
            continue
        low, high = keys, 0
        for t in range(count):
            seen = _range_of(visible[mask_row, begin + t]) if visible.shape[2] else (0, keys, keys)
            own[t, 0], own[t, 1], own[t, 2] = seen
            if seen[2]:
                low, high = min(low, seen[0]), max(high, seen[1])
        low = min(low, high)
        ranges = (low, min(high, far), 0), (max(low - far, 0), high - far, far)
        for g in range(kv_heads):
            n = 0
            for t in range(count):
                for h in range(g * group, (g + 1) * group):
                    at = (t * heads + h) * keys
                    scores[at + low : at + high] = ZERO
                    places[0, n], places[1, n] = ((row * heads + h) * queries + begin + t) * dim, at
                    n += 1
            scores[spare * keys + low : spare * keys + high] = ZERO
            groups = prompt[row] * kv_heads + g, row * kv_heads + g
            _by_fours(flat, scores, places, n, spare * keys, (far_keys, near_keys), groups, ranges, False)
        for t in range(count):
            mask = visible[mask_row, begin + t] if visible.shape[2] else nothing
            block, here = (t * heads, keys, copy, weighted, counted), (own[t, 0], own[t, 1], own[t, 2])
            _weigh_heads(block, (low, high), scores, mask, here, left_out[row], total[t], certainty[row, begin + t])
            _choose(certainty[row, begin + t], keep[row], silenced[row], off[row, begin + t])
        mixed[:] = ZERO
        for g in range(kv_heads):
            n = 0
            for t in range(count):
                for h in range(g * group, (g + 1) * group):
                    if not off[row, begin + t, h]:  # nobody asks what the others would have said
                        places[0, n], places[1, n] = (t * heads + h) * keys, (t * heads + h) * channels
                        n += 1
            groups = prompt[row] * kv_heads + g, row * kv_heads + g
            _by_fours(scores, mixed, places, n, spare * channels, (far_values, near_values), groups, ranges, True)
        for t in range(count):
            for h in range(heads):
                at, scale = (t * heads + h) * channels, ZERO if total[t, h] == ZERO else ONE / total[t, h]
                for d in range(channels):
                    out[row, begin + t, h, d] = mixed[at + d] * scale


def forward(query: Tensor, *tensors: Tensor) -> None:
    """Fill out, off and certainty, the last three; see `block_attention.attend` for the others. Rows or prompts and their kv
    heads are one axis of keys and values."""
    rows, heads, queries, _ = query.shape
    width = max(1, _TILE // (heads // (tensors[3].shape[0] // rows)))
    run_blocks(_attend, rows * -(-queries // width), *arrays(query, *tensors))
