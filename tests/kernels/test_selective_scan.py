"""The selective scan: the reference loop, the laws of a recurrence, and what it keeps for its backward pass."""

from __future__ import annotations

import importlib

import loops
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scans import BATCHES, LENGTHS, SEEDS, WIDTHS, Threads, assert_close, run, selective_inputs
from torch import Tensor

from needlework.kernels import selective_scan

TIMED = ("x", "dt", "B", "C", "z")


def cut(tensors: dict[str, Tensor], at: slice) -> dict[str, Tensor]:
    return {name: tensor[:, at] if name in TIMED else tensor for name, tensor in tensors.items()}


@settings(max_examples=40, deadline=None)
@given(SEEDS, BATCHES, LENGTHS, WIDTHS, st.sampled_from([1, 5, 16]), *[st.booleans()] * 2)
def test_equals_the_reference_with_all_gradients(
    seed: int, batch: int, length: int, inner: int, n: int, fused: bool, with_state: bool
) -> None:
    torch.manual_seed(seed)
    tensors = selective_inputs(batch, length, inner, n, fused, with_state)
    assert_close(run(selective_scan, tensors), run(loops.selective_scan, tensors), tolerance=2e-5)


@pytest.mark.parametrize("weights", [(1.0, 0.0), (0.0, 1.0)])
def test_either_result_alone_has_its_gradients(weights: tuple[float, float]) -> None:
    tensors = selective_inputs(2, 40, 70, fused=True)
    assert_close(
        run(selective_scan, tensors, None, weights),
        run(loops.selective_scan, tensors, None, weights),
        tolerance=2e-5,
    )


@pytest.mark.parametrize("alone", ["dt_bias", "skip", "z"])
def test_each_neighbour_can_come_alone(alone: str) -> None:
    every = selective_inputs(2, 35, 70, fused=True)
    tensors = {name: tensor for name, tensor in every.items() if name not in {"dt_bias", "skip", "z"} - {alone}}
    if alone != "dt_bias":
        tensors["dt"] = tensors["dt"].abs()
    assert_close(run(selective_scan, tensors, None), run(loops.selective_scan, tensors, None), tolerance=2e-5)


@pytest.mark.parametrize("split", [1, 31, 32, 50])
def test_continuing_from_the_final_state_is_one_scan(split: int) -> None:
    tensors = selective_inputs(2, 70, 96, fused=True)
    whole, last = selective_scan(**tensors)
    first, state = selective_scan(**cut(tensors, slice(0, split)))
    second, final = selective_scan(**cut(tensors, slice(split, None)) | {"state": state})
    assert torch.equal(torch.cat([first, second], 1), whole)
    assert torch.equal(final, last)


def test_a_row_does_not_depend_on_its_batch_nor_on_threads(threads: Threads) -> None:
    tensors = selective_inputs(4, 40, 130, fused=True)
    shared = {"A", "dt_bias", "skip"}
    threads(1)
    rows = [{n: t if n in shared else t[i : i + 1] for n, t in tensors.items()} for i in range(4)]
    alone = torch.cat([selective_scan(**row)[0] for row in rows])
    for count in (1, 2, 3):
        threads(count)
        assert torch.equal(selective_scan(**tensors)[0], alone)


def test_gradients_do_not_depend_on_threads(threads: Threads) -> None:
    tensors = selective_inputs(3, 40, 130, fused=True)
    threads(1)
    one = run(selective_scan, tensors, None)
    threads(3)
    three = run(selective_scan, tensors, None)
    assert all(torch.equal(one[name], three[name]) for name in one)


def test_layout_does_not_matter() -> None:
    tensors = selective_inputs(2, 33, 70, fused=True)
    expected = run(selective_scan, tensors, None)
    wide = torch.randn(2, 33, 150)
    wide[..., 75:145] = tensors["z"]
    swapped = {name: tensors[name].transpose(1, 2).contiguous().transpose(1, 2) for name in ("x", "dt", "B")}
    found, _ = selective_scan(**tensors | swapped | {"z": wide[..., 75:145]})
    assert torch.equal(found, expected["out"])


@pytest.mark.parametrize("layout", ["slice", "channels first"])
def test_no_layout_is_copied(layout: str) -> None:
    tensors = selective_inputs(1, 8, 64)
    x = torch.randn(1, 8, 200)[..., 10:74] if layout == "slice" else torch.randn(1, 64, 8).transpose(1, 2)
    with torch.profiler.profile() as profile:
        selective_scan(**tensors | {"x": x})
    assert not [event.name for event in profile.events() if "copy" in event.name or "clone" in event.name]


def test_the_backward_pass_keeps_a_small_part_of_the_states() -> None:
    tensors = {name: tensor.requires_grad_() for name, tensor in selective_inputs(1, 512, 64, n=16, state=False).items()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        selective_scan(**tensors)
    given = sum(tensor.numel() for tensor in tensors.values())
    assert sum(kept.values()) - given <= 512 * 64 * 16 / 32


def test_without_gradients_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[int] = []
    module = importlib.import_module("needlework.kernels.selective_scan")
    forward = module.forward_kernel
    monkeypatch.setattr(module, "forward_kernel", lambda *args: kept.append(args[-1].size) or forward(*args))
    tensors = {name: tensor.requires_grad_() for name, tensor in selective_inputs(1, 64, 64).items()}
    with torch.no_grad():
        selective_scan(**tensors)
    selective_scan(**tensors)
    assert kept == [0, 2 * 64 * 5]


def test_bf16_is_accumulated_in_fp32() -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in selective_inputs(2, 200, 40, state=False).items()}
    out, final = selective_scan(**tensors)
    exact, last = loops.selective_scan(**{name: tensor.float() for name, tensor in tensors.items()})
    assert out.dtype == torch.bfloat16
    assert final.dtype == torch.float32
    assert float((out.float() - exact).abs().max() / exact.abs().max()) < 4e-3
    assert float((final - last).abs().max() / last.abs().max()) < 1e-6


def test_steps_and_rates_beyond_all_reason_stay_finite() -> None:
    """Decays that underflow forget everything; a softplus far out is its argument."""
    tensors = selective_inputs(1, 6, 64, fused=True)
    tensors["dt"] = torch.tensor([-200.0, -90.0, -1.0, 50.0, 120.0, 1e4])[None, :, None].expand(1, 6, 64)
    ours, _ = selective_scan(**tensors)
    theirs, _ = loops.selective_scan(**tensors)
    assert ours.isfinite().all()
    assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["x", "dt", "z"])
def test_nan_is_not_hidden(name: str) -> None:
    tensors = selective_inputs(1, 10, 70, fused=True)
    tensors[name][0, 4, 66] = float("nan")
    bad = selective_scan(**tensors)[0].isnan().nonzero().tolist()
    assert bad == [[0, t, 66] for t in range(4, 5 if name == "z" else 10)]


def test_a_broken_row_leaves_the_gradients_of_others_alone() -> None:
    """70 channels leave most lanes of the second block empty, where the block before has been."""
    tensors = selective_inputs(3, 40, 70, fused=True)
    expected = run(selective_scan, tensors, None)
    tensors["x"] = tensors["x"].clone()
    tensors["x"][1] = float("nan")
    found = run(selective_scan, tensors, None)
    for name in ("x", "dt", "B", "C", "z", "state"):
        assert torch.equal(found[f"grad of {name}"][[0, 2]], expected[f"grad of {name}"][[0, 2]]), name


def test_no_tokens_leave_the_state_as_it_is() -> None:
    tensors = selective_inputs(2, 0, 8)
    out, final = selective_scan(**tensors)
    assert out.shape == (2, 0, 8)
    assert torch.equal(final, tensors["state"])


@pytest.mark.parametrize("name", ["dt", "A", "B", "C", "state", "dt_bias", "skip", "z"])
def test_wrong_shapes_are_refused_before_the_kernel(name: str) -> None:
    tensors = selective_inputs(2, 5, 8, fused=True)
    tensors[name] = tensors[name][..., :-1] if name != "A" else tensors[name][:-1]
    with pytest.raises(ValueError, match=f"{name} has shape"):
        selective_scan(**tensors)
