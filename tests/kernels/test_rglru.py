"""The RG-LRU recurrence: the reference loop, and the laws of a recurrence."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scans import BATCHES, LENGTHS, SEEDS, WIDTHS, Threads, assert_close, resets, rglru_inputs, run

from needlework.kernels import reference, rglru_scan


@settings(max_examples=40, deadline=None)
@given(SEEDS, BATCHES, LENGTHS, WIDTHS, st.booleans(), st.booleans(), st.sampled_from([(1.0, 1.0), (1.0, 0.0), (0.0, 1.0)]))
def test_equals_the_reference_with_all_gradients(
    seed: int, batch: int, length: int, width: int, with_state: bool, with_reset: bool, weights: tuple[float, float]
) -> None:
    torch.manual_seed(seed)
    tensors = rglru_inputs(batch, length, width, with_state)
    reset = resets(batch, length) if with_reset else None
    assert_close(run(rglru_scan, tensors, reset, weights), run(reference.rglru_scan, tensors, reset, weights))


def test_known_values() -> None:
    x, decay = torch.tensor([[[1.0], [2.0], [4.0]]]), torch.tensor([[[9.0], [0.5], [0.25]]])
    out, final = rglru_scan(x, decay, torch.tensor([[10.0]]))
    assert out.flatten().tolist() == [91.0, 47.5, 15.875]
    assert final.tolist() == [[15.875]]
    cut, _ = rglru_scan(x, decay, torch.tensor([[10.0]]), torch.tensor([[True, False, True]]))
    assert cut.flatten().tolist() == [1.0, 2.5, 4.0]


@pytest.mark.parametrize("split", [1, 7, 32, 69])
def test_continuing_from_the_final_state_is_one_scan(split: int) -> None:
    tensors = rglru_inputs(2, 70, 96)
    whole, last = rglru_scan(**tensors)
    first, state = rglru_scan(tensors["x"][:, :split], tensors["decay"][:, :split], tensors["state"])
    second, final = rglru_scan(tensors["x"][:, split:], tensors["decay"][:, split:], state)
    assert torch.equal(torch.cat([first, second], 1), whole)
    assert torch.equal(final, last)


def test_a_reset_is_a_fresh_start() -> None:
    tensors = rglru_inputs(2, 40, 65)
    reset = torch.zeros(2, 40, dtype=torch.bool)
    reset[1, 13] = True
    out, _ = rglru_scan(**tensors, reset=reset)
    fresh, _ = rglru_scan(tensors["x"][1:, 13:], tensors["decay"][1:, 13:].index_fill(1, torch.tensor([0]), 7.0))
    assert torch.equal(out[1:, 13:], fresh)
    assert torch.equal(out[0], rglru_scan(**tensors)[0][0])


def test_a_row_does_not_depend_on_its_batch_nor_on_threads(threads: Threads) -> None:
    tensors = rglru_inputs(5, 50, 130)
    threads(1)
    alone = [rglru_scan(**{name: tensor[i : i + 1] for name, tensor in tensors.items()}) for i in range(5)]
    for count in (1, 2, 3):
        threads(count)
        out, final = rglru_scan(**tensors)
        assert torch.equal(out, torch.cat([row for row, _ in alone]))
        assert torch.equal(final, torch.cat([state for _, state in alone]))


def test_gradients_do_not_depend_on_threads(threads: Threads) -> None:
    tensors = rglru_inputs(3, 50, 130)
    threads(1)
    one = run(rglru_scan, tensors, None)
    threads(3)
    three = run(rglru_scan, tensors, None)
    assert all(torch.equal(one[name], three[name]) for name in one)


def test_bf16_is_accumulated_in_fp32() -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in rglru_inputs(2, 300, 40, with_state=False).items()}
    tensors["decay"] = 0.9 + 0.1 * tensors["decay"]
    out, final = rglru_scan(**tensors)
    exact, last = reference.rglru_scan(**{name: tensor.float() for name, tensor in tensors.items()})
    assert out.dtype == torch.bfloat16
    assert final.dtype == torch.float32
    assert float((out.float() - exact).abs().max() / exact.abs().max()) < 4e-3  # one rounding to bf16, not 300
    assert float((final - last).abs().max() / last.abs().max()) < 1e-6


def test_bf16_has_gradients() -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in rglru_inputs(2, 20, 40, with_state=False).items()}
    ours, theirs = run(rglru_scan, tensors, None), run(reference.rglru_scan, tensors, None)
    assert ours["grad of x"].dtype == torch.bfloat16
    assert_close(ours, theirs, tolerance=1e-2)


def test_no_tokens_leave_the_state_as_it_is() -> None:
    state = torch.randn(2, 8)
    out, final = rglru_scan(torch.empty(2, 0, 8), torch.empty(2, 0, 8), state)
    assert out.shape == (2, 0, 8)
    assert torch.equal(final, state)


def test_layout_does_not_matter() -> None:
    tensors = rglru_inputs(2, 33, 70)
    swapped = {n: t.transpose(1, 2).contiguous().transpose(1, 2) if t.dim() == 3 else t for n, t in tensors.items()}
    assert torch.equal(rglru_scan(**swapped)[0], rglru_scan(**tensors)[0])


def test_nan_is_not_hidden() -> None:
    tensors = rglru_inputs(1, 10, 70)
    tensors["x"][0, 4, 66] = float("nan")
    out, _ = rglru_scan(**tensors)
    assert out.isnan().nonzero().tolist() == [[0, t, 66] for t in range(4, 10)]


def test_wrong_arguments_are_refused_before_the_kernel() -> None:
    x = torch.zeros(2, 5, 8)
    with pytest.raises(ValueError, match=r"decay has shape \[2, 4, 8\]"):
        rglru_scan(x, torch.zeros(2, 4, 8))
    with pytest.raises(ValueError, match=r"state has shape \[1, 8\]"):
        rglru_scan(x, x, torch.zeros(1, 8))
    with pytest.raises(ValueError, match=r"reset has shape \[1, 5\]"):
        rglru_scan(x, x, reset=torch.zeros(1, 5, dtype=torch.bool))
    with pytest.raises(TypeError, match="reset != 0"):
        rglru_scan(x, x, reset=torch.zeros(2, 5))
