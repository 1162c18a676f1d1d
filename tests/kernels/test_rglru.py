"""The RG-LRU with its gates: the reference, and the laws of a recurrence."""

from __future__ import annotations

import loops
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scans import BATCHES, LENGTHS, SEEDS, WIDTHS, Threads, assert_close, resets, rglru_inputs, run

from needlework.kernels import gated_rglru

TIMED = ("x", "gate_in", "gate_keep")


@settings(max_examples=40, deadline=None)
@given(SEEDS, BATCHES, LENGTHS, WIDTHS, *[st.booleans()] * 2)
def test_equals_the_reference_with_all_gradients(
    seed: int, batch: int, length: int, width: int, with_state: bool, with_reset: bool
) -> None:
    torch.manual_seed(seed)
    tensors = rglru_inputs(batch, length, width, with_state)
    reset = resets(batch, length) if with_reset else None
    assert_close(run(gated_rglru, tensors, reset), run(loops.gated_rglru, tensors, reset), tolerance=1e-5)


@pytest.mark.parametrize("weights", [(1.0, 0.0), (0.0, 1.0)])
def test_either_result_alone_has_its_gradients(weights: tuple[float, float]) -> None:
    tensors = rglru_inputs(2, 40, 70)
    assert_close(run(gated_rglru, tensors, None, weights), run(loops.gated_rglru, tensors, None, weights), 1e-5)


def test_almost_nothing_forgotten_keeps_a_bounded_gradient() -> None:
    """Where the decay is almost 1, the root has an almost infinite slope; it counts as 1000 at most."""
    tensors = rglru_inputs(1, 8, 64)
    tensors["gate_keep"] = torch.linspace(-25, -8, 64).expand(1, 8, 64).clone()
    ours, theirs = run(gated_rglru, tensors, None), run(loops.gated_rglru, tensors, None)
    assert_close(ours, theirs, tolerance=1e-5)
    assert ours["grad of gate_keep"].isfinite().all()
    out, _ = gated_rglru(**tensors)
    exact, _ = loops.gated_rglru(**{name: tensor.double() for name, tensor in tensors.items()})
    assert torch.allclose(out.double(), exact.double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("split", [1, 31, 32, 50])
def test_continuing_from_the_final_state_is_one_scan(split: int) -> None:
    tensors = rglru_inputs(2, 70, 96)
    whole, last = gated_rglru(**tensors)
    first, state = gated_rglru(**{n: t[:, :split] if n in TIMED else t for n, t in tensors.items()})
    rest = {n: t[:, split:] if n in TIMED else t for n, t in tensors.items()}
    second, final = gated_rglru(**rest | {"state": state})
    assert torch.equal(torch.cat([first, second], 1), whole)
    assert torch.equal(final, last)


def test_a_reset_lets_the_token_in_whole() -> None:
    tensors = rglru_inputs(1, 3, 4)
    out, _ = gated_rglru(**tensors, reset=torch.tensor([[False, True, False]]))
    assert torch.allclose(out[:, 1], tensors["x"][:, 1] * torch.sigmoid(tensors["gate_in"][:, 1]), atol=1e-6)


def test_a_row_does_not_depend_on_its_batch_nor_on_threads(threads: Threads) -> None:
    tensors = rglru_inputs(4, 40, 130)
    threads(1)
    rows = [{n: t if n == "rate" else t[i : i + 1] for n, t in tensors.items()} for i in range(4)]
    alone = torch.cat([gated_rglru(**row)[0] for row in rows])
    for count in (1, 2, 3):
        threads(count)
        assert torch.equal(gated_rglru(**tensors)[0], alone)


def test_gradients_do_not_depend_on_threads(threads: Threads) -> None:
    tensors = rglru_inputs(3, 50, 130)
    threads(1)
    one = run(gated_rglru, tensors, None)
    threads(3)
    three = run(gated_rglru, tensors, None)
    assert all(torch.equal(one[name], three[name]) for name in one)


def test_a_reset_is_a_fresh_start() -> None:
    tensors = rglru_inputs(2, 40, 65)
    reset = torch.zeros(2, 40, dtype=torch.bool)
    reset[1, 13] = True
    out, _ = gated_rglru(**tensors, reset=reset)
    rest = {n: t[1:, 13:] if n in TIMED else t for n, t in tensors.items() if n != "state"}
    fresh, _ = gated_rglru(**rest, reset=reset[1:, 13:])
    assert torch.equal(out[1:, 13:], fresh)
    assert torch.equal(out[0], gated_rglru(**tensors)[0][0])


def test_nan_is_not_hidden() -> None:
    tensors = rglru_inputs(1, 10, 70)
    tensors["x"][0, 4, 66] = float("nan")
    out, _ = gated_rglru(**tensors)
    assert out.isnan().nonzero().tolist() == [[0, t, 66] for t in range(4, 10)]


def test_layout_does_not_matter() -> None:
    tensors = rglru_inputs(2, 33, 70)
    swapped = {name: tensors[name].transpose(1, 2).contiguous().transpose(1, 2) for name in ("x", "gate_keep")}
    one, other = run(gated_rglru, tensors, None), run(gated_rglru, tensors | swapped, None)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_bf16_in_bf16_out_and_an_fp32_state() -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in rglru_inputs(2, 100, 40, with_state=False).items()}
    out, final = gated_rglru(**tensors)
    exact, last = loops.gated_rglru(**{name: tensor.float() for name, tensor in tensors.items()})
    assert (out.dtype, final.dtype) == (torch.bfloat16, torch.float32)
    assert float((out.float() - exact).abs().max() / exact.abs().max()) < 4e-3
    assert float((final - last).abs().max() / last.abs().max()) < 2e-6


def test_no_tokens_leave_the_state_as_it_is() -> None:
    tensors = rglru_inputs(2, 0, 8)
    out, final = gated_rglru(**tensors)
    assert out.shape == (2, 0, 8)
    assert torch.equal(final, tensors["state"])


@pytest.mark.parametrize("name", ["gate_in", "gate_keep", "rate", "state"])
def test_wrong_shapes_are_refused_before_the_kernel(name: str) -> None:
    tensors = rglru_inputs(2, 5, 8)
    tensors[name] = tensors[name][..., :-1]
    with pytest.raises(ValueError, match=f"{name} has shape"):
        gated_rglru(**tensors)


def test_a_wrong_reset_is_refused_before_the_kernel() -> None:
    tensors = rglru_inputs(2, 5, 8)
    with pytest.raises(ValueError, match=r"reset has shape \[1, 5\]"):
        gated_rglru(**tensors, reset=torch.zeros(1, 5, dtype=torch.bool))
    with pytest.raises(TypeError, match="reset != 0"):
        gated_rglru(**tensors, reset=torch.zeros(2, 5))
