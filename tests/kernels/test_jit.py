"""Blocks over threads: each once, on no more threads than torch may use, from any thread or process."""

from __future__ import annotations

import os
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from scans import Threads, rglru_inputs

from needlework.kernels import gated_rglru
from needlework.kernels.conv import _join_blocks
from needlework.kernels.jit import flatten_tokens, run_blocks


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("blocks", [0, 1, 2, 7])
def test_every_block_once_on_at_most_as_many_threads_as_torch(threads: Threads, count: int, blocks: int) -> None:
    threads(count)
    seen: Counter[int] = Counter()
    workers: set[int] = set()

    def kernel(first: int, stop: int) -> None:
        workers.add(threading.get_ident())
        seen.update(range(first, stop))

    run_blocks(kernel, blocks)
    assert seen == Counter(range(blocks))
    assert len(workers) <= max(1, min(count, blocks))


def test_a_failing_part_is_not_swallowed_and_the_others_are_waited_for(threads: Threads) -> None:
    threads(2)
    done = threading.Event()

    def kernel(first: int, stop: int) -> None:
        if first > 0:
            done.set()
            raise RuntimeError("second half")

    with pytest.raises(RuntimeError, match="second half"):
        run_blocks(kernel, 4)
    assert done.is_set()


def test_many_callers_at_once(threads: Threads) -> None:
    threads(2)
    tensors = rglru_inputs(8, 200, 130)
    expected = gated_rglru(**tensors)[0]
    with ThreadPoolExecutor(6) as callers:
        found = list(callers.map(lambda _: gated_rglru(**tensors)[0], range(30)))
    assert all(torch.equal(out, expected) for out in found)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:This process")
def test_a_forked_child_has_threads_of_its_own(threads: Threads) -> None:
    threads(2)
    tensors = rglru_inputs(4, 50, 130)
    expected = gated_rglru(**tensors)[0]  # the parent's threads are running now
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(gated_rglru(**tensors)[0], expected) else 1)
    for _ in range(300):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        threading.Event().wait(0.1)
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
        pytest.fail("the child hangs")
    assert os.waitstatus_to_exitcode(status) == 0


def test_neighbouring_blocks_of_a_row_are_joined() -> None:
    assert _join_blocks(0, 6, 130) == (0, 0, 130, 3)
    assert _join_blocks(4, 6, 130) == (1, 64, 130, 6)
    assert _join_blocks(1, 2, 130) == (0, 64, 128, 2)


@pytest.mark.parametrize("view", ["slice", "channels first", "expanded"])
def test_tokens_point_into_the_tensor_whatever_its_layout(view: str) -> None:
    wide = torch.arange(2 * 3 * 10, dtype=torch.float32).view(2, 3, 10)
    tensor = {
        "slice": wide[..., 4:7],
        "channels first": wide.transpose(1, 2),
        "expanded": wide[:, :1].expand(2, 5, 10),
    }[view]
    flat, strides = flatten_tokens(tensor)
    for place in torch.cartesian_prod(*(torch.arange(n) for n in tensor.shape)).tolist():
        assert flat[sum(i * stride for i, stride in zip(place, strides, strict=True))] == tensor[tuple(place)]
    wide[0, 0, 4] = -1.0
    assert -1.0 in flat
