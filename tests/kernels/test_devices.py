"""What other devices run: the log-depth scans against the reference and the CPU, and when a library takes their place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import loops
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scans import BATCHES, LENGTHS, SEEDS, assert_close, linear_inputs, resets, rglru_inputs, run, selective_inputs
from torch import Tensor

from needlework.kernels import causal_conv, devices, gated_rglru, selective_scan
from needlework.kernels.conv import _convolve_on_device
from needlework.kernels.rglru import rglru_gates


@settings(max_examples=25, deadline=None)
@given(SEEDS, BATCHES, LENGTHS, st.sampled_from([1, 8]), st.booleans())
def test_log_depth_rglru_equals_the_reference(seed: int, batch: int, length: int, width: int, with_reset: bool) -> None:
    torch.manual_seed(seed)
    tensors = linear_inputs(batch, length, width)
    reset = resets(batch, length) if with_reset else None
    assert_close(run(devices.rglru_scan, tensors, reset), run(loops.rglru_scan, tensors, reset))


@settings(max_examples=25, deadline=None)
@given(SEEDS, BATCHES, LENGTHS, st.sampled_from([1, 8]))
def test_log_depth_selective_scan_equals_the_reference(seed: int, batch: int, length: int, inner: int) -> None:
    torch.manual_seed(seed)
    tensors = selective_inputs(batch, length, inner)
    assert_close(run(devices.selective_scan, tensors), run(loops.selective_scan, tensors), 2e-5)


def test_log_depth_without_tokens() -> None:
    state = torch.randn(2, 8)
    assert torch.equal(devices.rglru_scan(torch.empty(2, 0, 8), torch.empty(2, 0, 8), state, None)[1], state)
    tensors = selective_inputs(2, 0, 8)
    assert torch.equal(devices.selective_scan(**tensors)[1], tensors["state"])


def test_log_depth_takes_logarithmically_many_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = []
    cat = torch.cat
    monkeypatch.setattr(torch, "cat", lambda *args, **kwargs: passes.append(1) or cat(*args, **kwargs))
    devices._scan_in_log_depth(torch.rand(1, 1024, 2), torch.rand(1, 1024, 2))
    assert len(passes) == 2 * 10


class Library:
    """Stands in for `library_function`: finds the given functions and counts their calls."""

    def __init__(self, **functions: Callable[..., Any]) -> None:
        self.functions, self.calls = functions, 0

    def __call__(self, module: str, name: str) -> Callable[..., Any] | None:
        if name not in self.functions:
            return None

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return self.functions[name](*args, **kwargs)

        return counted


def accelerated_scan(gates: Tensor, tokens: Tensor) -> Tensor:
    """What accelerated-scan asks for and computes."""
    length = gates.shape[2]
    assert gates.is_contiguous()
    assert tokens.is_contiguous()
    assert length >= 32
    assert length & (length - 1) == 0
    return loops.rglru_scan(tokens.transpose(1, 2), gates.transpose(1, 2))[0].transpose(1, 2)


@pytest.mark.parametrize("length", [1, 31, 32, 33, 100])
def test_accelerated_scan_is_given_what_it_asks_for(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    library = Library(scan=accelerated_scan)
    monkeypatch.setattr(devices, "library_function", library)
    tensors, reset = linear_inputs(2, length, 6), resets(2, length, 0.2)
    assert_close(run(devices.rglru_scan, tensors, reset), run(loops.rglru_scan, tensors, reset))
    assert library.calls == 1


def mamba_scan(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, return_last_state: bool) -> tuple[Tensor, Tensor]:
    """What mamba-ssm computes: channels before time, from zero."""
    assert return_last_state
    y, last = loops.selective_scan(*(t.transpose(1, 2) for t in (u, delta)), A, *(t.transpose(1, 2) for t in (B, C)))
    return y.transpose(1, 2), last


@pytest.mark.parametrize("case", ["plain", "state", "gradient"])
def test_mamba_ssm_is_used_only_where_it_computes_the_same(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    library = Library(selective_scan_fn=mamba_scan)
    monkeypatch.setattr(devices, "library_function", library)
    tensors: dict[str, Any] = selective_inputs(2, 20, 6)
    if case != "state":
        tensors["state"] = None
    if case == "gradient":
        tensors["x"].requires_grad_()
    ours = devices.selective_scan(**tensors)
    theirs = loops.selective_scan(**tensors)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(ours, theirs, strict=True))
    assert library.calls == (1 if case == "plain" else 0)


def test_a_missing_library_is_no_error() -> None:
    assert devices.library_function("no_such_library", "scan") is None


def test_another_device_never_reaches_the_cpu_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The meta device computes shapes only: whoever touches memory fails on it."""

    def meta(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.to("meta") for name, tensor in tensors.items()}

    for fused in (False, True):
        out, final = selective_scan(**meta(selective_inputs(2, 70, 6, fused=fused)))
        assert (out.device.type, out.shape, final.shape) == ("meta", (2, 70, 6), (2, 6, 5))
    for with_state in (False, True):
        out, final = gated_rglru(**meta(rglru_inputs(2, 70, 6, with_state)))
        assert (out.device.type, out.shape, final.shape) == ("meta", (2, 70, 6), (2, 6))
    x = torch.empty(2, 70, 6, device="meta")
    assert causal_conv(x, torch.empty(6, 4, device="meta"), silu=True).shape == x.shape


@settings(max_examples=15, deadline=None)
@given(SEEDS, LENGTHS, st.booleans())
def test_fused_selective_scan_on_a_device_equals_the_cpu(seed: int, length: int, with_state: bool) -> None:
    """What another device runs is plain torch, so it can be compared here, gradients included."""
    torch.manual_seed(seed)
    tensors = selective_inputs(2, length, 70, fused=True, state=with_state)
    assert_close(run(devices.selective_scan, tensors), run(selective_scan, tensors), 5e-5)


@settings(max_examples=15, deadline=None)
@given(SEEDS, LENGTHS, st.booleans())
def test_rglru_on_a_device_equals_the_cpu(seed: int, length: int, with_reset: bool) -> None:
    def on_device(state: Tensor, reset: Tensor | None = None, **gates: Tensor) -> tuple[Tensor, Tensor]:
        return devices.rglru_scan(*rglru_gates(**gates, reset=reset), state, reset)

    torch.manual_seed(seed)
    tensors, reset = rglru_inputs(2, length, 70), resets(2, length) if with_reset else None
    assert_close(run(on_device, tensors, reset), run(gated_rglru, tensors, reset), 1e-5)


def test_convolution_on_a_device_equals_the_cpu() -> None:
    x, weight, bias, context = torch.randn(2, 9, 70), torch.randn(70, 4), torch.randn(70), torch.randn(2, 3, 70)
    there = _convolve_on_device(x, weight, bias, context, True)
    assert torch.allclose(causal_conv(x, weight, bias, context, True), there, atol=2e-6)
