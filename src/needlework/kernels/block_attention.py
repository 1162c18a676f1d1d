"""Attention on CPUs that can keep only each row's heads of lowest entropy; outputs of the other heads are not computed.

For each block of queries, the kernel computes scores, softmax, entropy, the choice of heads, and outputs, all in cache.
Keys and values are transposed, with tokens adjacent in memory: both products loop over tokens, for four queries and four
channels at a time. A block is as many queries of one batch row as make four query vectors per kv head, at least one query.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from needlework.kernels import jit
from needlework.kernels.jit import LOG2E, ONE, ZERO, exp2, helper, kernel, reassociated

_TILE = 4  # queries, and channels, that are multiplied at once

_ONE, _TWO, _THREE = np.uint64(1), np.uint64(2), np.uint64(3)


class TransposedKeyValues(NamedTuple):
    """Keys and values with tokens adjacent: those of a prefix that rows share (`far`), followed by each row's own (`near`)."""

    far_keys: Tensor  # [prompts, kv_heads, dim, far]
    far_values: Tensor  # [prompts, kv_heads, value_dim, far]
    prompt: Tensor  # [rows] the prompt of each row
    near_keys: Tensor  # [rows, kv_heads, dim, near]
    near_values: Tensor  # [rows, kv_heads, value_dim, near]


def transpose_keys_values(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values [rows, kv_heads, tokens, dim] as [rows, kv_heads, dim, tokens]."""
    return key.transpose(2, 3).contiguous(), value.transpose(2, 3).contiguous()


def supports(query: Tensor, value_dim: int) -> bool:
    """Return whether `attend` supports these queries: fp32 on a CPU without gradients, dims that are multiples of 4."""
    multiples = query.shape[-1] % _TILE == 0 and value_dim % _TILE == 0
    return multiples and query.device.type == "cpu" and query.dtype == torch.float32 and not jit.needs_gradient(query)


def attend(
    query: Tensor,
    lines: TransposedKeyValues,
    visible: Tensor | None = None,
    keep: Tensor | None = None,
    left_out: Tensor | None = None,
    zeroed_heads: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute attention and zero the heads that a row does not keep.

    Args:
        query: [rows, heads, queries, dim], scaled. All floats are fp32, and dims are multiples of 4.
        visible: bool [rows or 1, queries, keys]; None: every key. A query that sees no key gets zeros.
        keep: [rows] number of heads to keep, those of lowest entropy; ties go to the lower head index. None: all.
        left_out: bool [rows, keys], keys that the entropy ignores.
        zeroed_heads: bool [rows, heads], heads that are zeroed whatever their entropy.

    Returns:
        Outputs [rows, queries, heads, value_dim]; mask of zeroed heads [rows, queries, heads]; negative entropies of all
        heads [rows, queries, heads], 0 in a row that keeps no head.
    """
    rows, heads, queries, _ = query.shape
    prompts, kv_heads, dim, far = lines.far_keys.shape
    near, value_dim = lines.near_keys.shape[3], lines.far_values.shape[2]
    keys, mask_rows = far + near, 1 if visible is not None and visible.shape[0] == 1 else rows
    jit.check_shapes(mask_rows, queries, keys, visible=visible)
    jit.check_shapes(rows, keys, left_out=left_out)
    jit.check_shapes(rows, keep=keep, prompt=lines.prompt)
    jit.check_shapes(rows, heads, zeroed_heads=zeroed_heads)
    jit.check_shapes(rows, heads // kv_heads * kv_heads, queries, dim, query=query)
    jit.check_shapes(rows, kv_heads, dim, near, near_keys=lines.near_keys)
    jit.check_shapes(prompts, kv_heads, value_dim, far, far_values=lines.far_values)
    jit.check_shapes(rows, kv_heads, value_dim, near, near_values=lines.near_values)
    nothing = torch.zeros(rows, 0, dtype=torch.bool)
    out = torch.empty(rows, queries, heads, value_dim)
    off, negative_entropy = torch.empty(rows, queries, heads, dtype=torch.bool), torch.empty(rows, queries, heads)
    width = max(1, _TILE // (heads // kv_heads))  # queries per block
    merged = jit.arrays(*(x if x.dim() == 1 else x.flatten(0, 1) for x in lines))
    edits = jit.arrays(
        nothing[None] if visible is None else visible.contiguous(),
        nothing if left_out is None else left_out.contiguous(),
        torch.full((rows,), heads) if keep is None else keep,
        torch.zeros(rows, heads, dtype=torch.bool) if zeroed_heads is None else zeroed_heads.contiguous(),
    )
    results = jit.arrays(out, off, negative_entropy)
    blocks = rows * -(-queries // width)
    jit.run_blocks(forward_kernel, blocks, *jit.arrays(query.contiguous()), tuple(merged), tuple(edits), tuple(results))
    return out, off, negative_entropy


# --- Kernel. Offsets are unsigned: numba supports negative indices, and the check for them prevents vectorisation.


@helper
def _add_products(a: Any, at: Any, b: Any, first: Any, pitch: Any, c: Any, to: Any, n: Any) -> None:
    """Compute c[to[i] + j] += sum over 4 channels d of a[at[i] + d] * b[first + d * pitch + j], for 4 queries i, n tokens j."""
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


@reassociated
def _add_sums(a: Any, at: Any, b: Any, first: Any, pitch: Any, c: Any, to: Any, n: Any) -> None:
    """Compute c[to[i] + d] += sum over n tokens j of a[at[i] + j] * b[first + d * pitch + j], for 4 queries i, 4 channels d."""
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
    _add_four(c, to[0], p0, p1, p2, p3)
    _add_four(c, to[1], q0, q1, q2, q3)
    _add_four(c, to[2], r0, r1, r2, r3)
    _add_four(c, to[3], s0, s1, s2, s3)


@helper
def _add_four(c: Any, at: Any, v0: Any, v1: Any, v2: Any, v3: Any) -> None:
    c[at] += v0
    c[at + _ONE] += v1
    c[at + _TWO] += v2
    c[at + _THREE] += v3


@helper
def _exponentials(s: Any, at: Any, n: Any, top: Any, weighted: Any) -> None:
    """Replace s by exp(x) and write x * exp(x) to `weighted`, where x = s - top.

    Separate from the loop of the sums: reassociation would break the rounding in `exp2`.
    """
    for j in range(n):
        x = s[at + j] - top
        e = exp2(x * LOG2E)
        s[at + j] = e
        weighted[j] = e * x


@reassociated
def _sum(s: Any, at: Any, n: Any) -> Any:
    total = ZERO
    for j in range(n):
        total += s[at + j]
    return total


@helper
def _choose_heads(negative_entropy: Any, k: int, zeroed_heads: Any, off: Any) -> None:
    """Mark all but the k heads of lowest entropy in `off`; ties go to the lower head, and NaN ranks above every number."""
    for h in range(negative_entropy.size):
        own, before = negative_entropy[h], 0
        for other in range(negative_entropy.size):
            value = negative_entropy[other]
            above = value > own or (value != value and own == own)
            tied = value == own or (value != value and own != own)
            before += above or (tied and other < h)
        off[h] = before >= k or zeroed_heads[h]


@helper
def _visible_range(seen: Any) -> Any:
    """Return the first key that a query sees, the index after the last one, and their number."""
    first, last, count = seen.size, 0, 0
    for j in range(seen.size):
        if seen[j]:
            count += 1
            first = min(first, j)
            last = j + 1
    return (first, last, count) if count else (0, 0, 0)


@helper
def _exponentiate(scores: Any, at: int, low: int, high: int, own: Any, seen: Any, weighted: Any) -> Any:
    """Replace the scores of keys low..high by exponentials, 0 where masked. Return their sum and the negative entropy."""
    first, last, count = own
    scores[at + low : at + first] = ZERO
    scores[at + last : at + high] = ZERO
    if count == 0:
        return ZERO, ZERO
    begin, n, whole = np.uint64(at + first), np.uint64(last - first), count == last - first
    top = np.float32(-np.inf)
    if whole:
        for j in range(n):
            top = scores[begin + j] if scores[begin + j] > top else top
    else:
        for j in range(last - first):
            if seen[first + j] and scores[at + first + j] > top:
                top = scores[at + first + j]
    _exponentials(scores, begin, n, top, weighted)
    if not whole:
        for j in range(last - first):
            if not seen[first + j]:
                scores[at + first + j] = weighted[j] = ZERO
    total = _sum(scores, begin, n)
    # The sum of p * log p is the negative entropy. Both terms are <= 0, so there is no cancellation.
    return total, np.float32(np.float64(_sum(weighted, np.uint64(0), n)) / np.float64(total) - math.log(np.float64(total)))


@helper
def _shift(at: Any, step: int) -> Any:
    more = np.uint64(step)
    return at[0] + more, at[1] + more, at[2] + more, at[3] + more


@helper
def _multiply_queries(
    a: Any, c: Any, places: Any, count: int, spare: int, segments: Any, groups: Any, ranges: Any, mixing: bool
) -> None:
    """Multiply `count` queries of one kv head with both segments: scores from keys, or outputs from values (`mixing`).

    Four queries and four channels are multiplied at a time; unused places of the last four write to a spare target. A segment
    is [groups, channels, keys]; its range: its first key, the index after the last, and its offset among all keys.
    """
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
        for part in range(2):
            begin, end, offset = ranges[part]
            channels, pitch = segments[part].shape[1], segments[part].shape[2]
            lines, n = segments[part].reshape(segments[part].size), np.uint64(end - begin)
            for channel in range(0, channels if end > begin else 0, _TILE):
                first = np.uint64((groups[part] * channels + channel) * pitch + begin)
                if mixing:
                    _add_sums(a, _shift(at, offset + begin), lines, first, np.uint64(pitch), c, _shift(to, channel), n)
                else:
                    _add_products(a, _shift(at, channel), lines, first, np.uint64(pitch), c, _shift(to, offset + begin), n)


@helper
def _weigh_heads(
    block: Any, span: Any, scores: Any, seen: Any, own: Any, left_out: Any, total: Any, negative_entropy: Any
) -> None:
    """Compute weights, their sums and negative entropies of all heads of one query; `left_out` affects the entropy only."""
    first_head, keys, copy, weighted, counted = block
    low, high = span
    rest = own
    if left_out.size:
        for j in range(keys):
            counted[j] = not left_out[j] and (seen.size == 0 or seen[j])
        rest = _visible_range(counted)
    for h in range(negative_entropy.size):
        at = (first_head + h) * keys
        if left_out.size:
            copy[low:high] = scores[at + low : at + high]
            negative_entropy[h] = _exponentiate(copy, 0, low, high, rest, counted, weighted)[1]
            total[h] = _exponentiate(scores, at, low, high, own, seen, weighted)[0]
        else:
            total[h], negative_entropy[h] = _exponentiate(scores, at, low, high, own, seen, weighted)


@kernel
def forward_kernel(first: int, stop: int, query: Any, lines: Any, edits: Any, results: Any) -> None:
    """Compute blocks first..stop-1 of `attend`; rows and kv heads are one dimension of `lines`."""
    far_keys, far_values, prompt, near_keys, near_values = lines
    visible, left_out, keep, zeroed_heads = edits
    out, off, negative_entropy = results
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
            negative_entropy[row, begin : begin + count] = ZERO
            continue
        low, high = keys, 0
        for t in range(count):
            seen = _visible_range(visible[mask_row, begin + t]) if visible.shape[2] else (0, keys, keys)
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
            _multiply_queries(flat, scores, places, n, spare * keys, (far_keys, near_keys), groups, ranges, False)
        for t in range(count):
            mask = visible[mask_row, begin + t] if visible.shape[2] else nothing
            block, here = (t * heads, keys, copy, weighted, counted), (own[t, 0], own[t, 1], own[t, 2])
            _weigh_heads(block, (low, high), scores, mask, here, left_out[row], total[t], negative_entropy[row, begin + t])
            _choose_heads(negative_entropy[row, begin + t], keep[row], zeroed_heads[row], off[row, begin + t])
        mixed[:] = ZERO
        for g in range(kv_heads):
            n = 0
            for t in range(count):
                for h in range(g * group, (g + 1) * group):
                    if not off[row, begin + t, h]:  # outputs of zeroed heads are not computed
                        places[0, n], places[1, n] = (t * heads + h) * keys, (t * heads + h) * channels
                        n += 1
            groups = prompt[row] * kv_heads + g, row * kv_heads + g
            _multiply_queries(scores, mixed, places, n, spare * channels, (far_values, near_values), groups, ranges, True)
        for t in range(count):
            for h in range(heads):
                at, scale = (t * heads + h) * channels, ZERO if total[t, h] == ZERO else ONE / total[t, h]
                for d in range(channels):
                    out[row, begin + t, h, d] = mixed[at + d] * scale
