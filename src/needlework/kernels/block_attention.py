"""Attention of queries in which each row keeps its most certain heads: the heads that are not kept are never mixed."""

from typing import NamedTuple

import torch
from torch import Tensor

from needlework.kernels import block_attention_cpu
from needlework.kernels.checks import check_shape
from needlework.kernels.jit import differentiated


class Lines(NamedTuple):
    """Keys and values with tokens side by side: of prompts that rows share (`far`), and behind them each row's own (`near`)."""

    far_keys: Tensor  # [prompts, kv_heads, dim, far]
    far_values: Tensor  # [prompts, kv_heads, value_dim, far]
    prompt: Tensor  # [rows] the prompt that each row reads
    near_keys: Tensor  # [rows, kv_heads, dim, near]
    near_values: Tensor


def covers(query: Tensor, value_dim: int) -> bool:
    """Whether queries like these can be given to `attend`."""
    whole = query.shape[-1] % 4 == 0 and value_dim % 4 == 0
    return whole and query.device.type == "cpu" and query.dtype == torch.float32 and not differentiated(query)


def lines_of(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [rows, kv_heads, tokens, dim] with tokens side by side."""
    return key.transpose(2, 3).contiguous(), value.transpose(2, 3).contiguous()


def attend(
    query: Tensor,
    lines: Lines,
    visible: Tensor | None = None,
    keep: Tensor | None = None,
    left_out: Tensor | None = None,
    silenced: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What heads say, [rows, queries, heads, value_dim]; which of them are off, [rows, queries, heads]; and minus their entropy.

    query: [rows, heads, queries, dim], scaled. visible: bool [rows or 1, queries, keys]; None: every key. keep: [rows] how many
    heads stay on, those whose attention has the least entropy, ties to the lower head; None: all. left_out: bool [rows, keys],
    keys that do not count in the entropy. silenced: bool [rows, heads], off whatever their entropy. A query that sees no key
    gets nothing, and a row that keeps no head has its entropies left at 0. All floats are fp32, and dims are multiples of 4.
    """
    rows, heads, queries, _ = query.shape
    keys = lines.far_keys.shape[3] + lines.near_keys.shape[3]
    if visible is not None:
        check_shape("visible", visible, visible.shape[0] if visible.shape[0] == 1 else rows, queries, keys)
    if left_out is not None:
        check_shape("left_out", left_out, rows, keys)
    if keep is not None:
        check_shape("keep", keep, rows)
    if silenced is not None:
        check_shape("silenced", silenced, rows, heads)
    prompts, kv_heads, dim, far = lines.far_keys.shape
    near, value_dim = lines.near_keys.shape[3], lines.far_values.shape[2]
    check_shape("prompt", lines.prompt, rows)
    check_shape("query", query, rows, heads // kv_heads * kv_heads, queries, dim)
    check_shape("near_keys", lines.near_keys, rows, kv_heads, dim, near)
    check_shape("far_values", lines.far_values, prompts, kv_heads, value_dim, far)
    check_shape("near_values", lines.near_values, rows, kv_heads, value_dim, near)
    nothing = torch.zeros(rows, 0, dtype=torch.bool)
    out = torch.empty(rows, queries, heads, value_dim)
    off, certainty = torch.empty(rows, queries, heads, dtype=torch.bool), torch.empty(rows, queries, heads)
    block_attention_cpu.forward(
        query.contiguous(),
        *(x if x.dim() == 1 else x.flatten(0, 1) for x in lines),
        nothing[None] if visible is None else visible.contiguous(),
        nothing if left_out is None else left_out.contiguous(),
        torch.full((rows,), heads) if keep is None else keep,
        torch.zeros(rows, heads, dtype=torch.bool) if silenced is None else silenced.contiguous(),
        out,
        off,
        certainty,
    )
    return out, off, certainty
