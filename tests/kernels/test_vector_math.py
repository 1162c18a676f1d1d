"""exp2, sigmoid and softplus in fp32 against fp64, over everything that fp32 can hold."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import pytest

from needlework.kernels import jit

Array = np.ndarray[Any, Any]


def apply(name: str, values: Array) -> Array:
    function = getattr(jit, name)

    @numba.njit(fastmath={"contract"}, error_model="numpy")  # type: ignore[untyped-decorator]
    def loop(x: Array, out: Array) -> None:
        for i in range(x.size):
            out[i] = function(x[i])

    out = np.empty_like(values)
    loop(values, out)
    return out


def softplus(v: Array) -> Array:
    return np.logaddexp(0.0, v)


def sigmoid(v: Array) -> Array:
    return np.exp(-np.logaddexp(0.0, -v))


@pytest.mark.parametrize(
    ("name", "exact", "low", "high"),
    [
        ("exp2", np.exp2, -126.0, 127.0),
        ("one_minus_exp2", lambda z: -np.expm1(z * np.log(2.0)), -60.0, -1e-6),
        ("sigmoid", sigmoid, -20.0, 40.0),
        ("softplus", softplus, -20.0, 80.0),
    ],
)
def test_accurate_in_fp32(name: str, exact: Any, low: float, high: float) -> None:
    dense = np.linspace(low, high, 400_001).astype(np.float32)
    near_zero = np.concatenate([np.geomspace(1e-6, 1.0, 2_001), -np.geomspace(1e-6, 1.0, 2_001)]).astype(np.float32)
    values = np.concatenate([dense, near_zero[(near_zero >= low) & (near_zero <= high)]])
    expected = exact(values.astype(np.float64))
    # exp(v) of an fp32 v carries the rounding of v * log2(e): |v| * 6e-8 beside the function's own error.
    inherited = 6e-8 * np.abs(values) if name in ("sigmoid", "softplus") else 0.0
    error = np.abs(apply(name, values) / expected - 1.0)
    assert float((error - inherited).max()) < 2.5e-7


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        ("exp2", -1e30, 2.0**-126),
        ("exp2", 1e30, 2.0**127),
        ("sigmoid", -1e30, 0.0),
        ("sigmoid", 1e30, 1.0),
        ("softplus", -1e30, 0.0),
        ("softplus", 1e30, 1e30),
        ("one_minus_exp2", -1e30, 1.0),
        ("one_minus_exp2", 0.0, 0.0),
        ("exp2", 0.0, 1.0),
    ],
)
def test_limits(name: str, value: float, limit: float) -> None:
    found = float(apply(name, np.array([value], np.float32))[0])
    assert found == pytest.approx(float(np.float32(limit)), abs=1e-37)


@pytest.mark.parametrize("name", ["exp2", "sigmoid", "softplus", "one_minus_exp2"])
def test_nan_goes_through(name: str) -> None:
    values = np.array([np.nan] * 16, np.float32)  # enough for vector code as well
    assert np.isnan(apply(name, values)).all()
