"""Memory of large results: used again when free, never while someone looks, and not hoarded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from scans import rglru_inputs
from torch import Tensor

from needlework.kernels import gated_rglru, jit


@pytest.fixture(autouse=True)
def _nothing_held() -> Iterator[None]:
    jit._buffers.clear()
    yield
    jit._buffers.clear()


def large(megabytes: int = 8) -> Tensor:
    return torch.empty(1, 1024, 256 * megabytes, device="meta")


def test_a_freed_result_is_used_again() -> None:
    first = jit.empty_like(large())
    where = first.data_ptr()
    del first
    assert jit.empty_like(large()).data_ptr() == where


@pytest.mark.parametrize("hold", ["tensor", "view", "numpy", "graph"])
def test_memory_in_use_is_never_given_away(hold: str) -> None:
    first = jit.empty_like(large()).fill_(7.0)
    kept: Any = first
    if hold == "view":
        kept = first[0, 3:5]
    elif hold == "numpy":
        kept = first.numpy()
    elif hold == "graph":
        kept = (first * torch.ones(1, requires_grad=True)).grad_fn
    where = first.data_ptr()
    del first
    second = jit.empty_like(large())
    assert second.data_ptr() != where
    second.fill_(0.0)
    if hold != "graph":
        assert float(torch.as_tensor(kept).min()) == 7.0


def test_scans_do_not_write_over_each_other() -> None:
    tensors = rglru_inputs(1, 1200, 1000)
    first, _ = gated_rglru(**tensors)
    copy = first.clone()
    gated_rglru(**tensors | {"x": 2 * tensors["x"]})
    second, _ = gated_rglru(**tensors | {"x": 3 * tensors["x"]})
    assert torch.equal(first, copy)
    assert not torch.equal(first, second)


def test_little_is_held() -> None:
    several = [jit.empty_like(large(40)) for _ in range(6)]
    assert sum(buffer.nbytes for buffer in jit._buffers) <= jit.MAX_POOLED
    assert len({tensor.data_ptr() for tensor in several}) == 6
    jit.empty_like(large(200))
    assert max(buffer.nbytes for buffer in jit._buffers) <= jit.MAX_POOLED


def test_small_results_are_left_to_the_system() -> None:
    jit.empty_like(torch.empty(1, 10, 10))
    assert jit._buffers == []


def test_dense_fp32_whatever_the_template() -> None:
    for template in (torch.empty(2, 30, 40, dtype=torch.bfloat16).transpose(1, 2), large()):
        fresh = jit.empty_like(template)
        assert (fresh.shape, fresh.dtype) == (template.shape, torch.float32)
        assert fresh.is_contiguous()
