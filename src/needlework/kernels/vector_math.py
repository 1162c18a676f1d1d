"""exp, sigmoid and softplus in fp32 as plain arithmetic.

Unlike calls of libm, the compiler can vectorise these. They are accurate to about 1e-7 and propagate NaN.
"""

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

ZERO, ONE, TWO = np.float32(0.0), np.float32(1.0), np.float32(2.0)
LOG2E, LN2 = np.float32(1.4426950408889634), np.float32(0.6931471805599453)
_LOWEST, _HIGHEST = np.float32(-126.0), np.float32(127.0)
_SHIFTER = np.float32(12582912.0)  # 1.5 * 2**23: adding it rounds to an integer and leaves that integer in the low bits
# Minimax polynomial of 2**f on [-0.5, 0.5], relative error 2e-9 before rounding.
_C1, _C2, _C3 = np.float32(6.9314720286e-1), np.float32(2.4022647914e-1), np.float32(5.5503324711e-2)
_C4, _C5, _C6 = np.float32(9.6184373578e-3), np.float32(1.3398874422e-3), np.float32(1.5353361890e-4)
# log(1 + e) = 2 * artanh(s) with s = e / (2 + e): the odd series 2 * (s + s**3 / 3 + s**5 / 5 + ...).
_L3, _L5, _L7 = np.float32(1 / 3), np.float32(1 / 5), np.float32(1 / 7)
_L9, _L11, _L13 = np.float32(1 / 9), np.float32(1 / 11), np.float32(1 / 13)

# error_model: a division that may raise ZeroDivisionError prevents vectorisation.
inlined = numba.njit(fastmath={"contract"}, error_model="numpy", inline="always")


@intrinsic  # type: ignore[untyped-decorator]
def _scale_by_power_of_two(typing_context: Any, value: Any, shifted: Any) -> Any:
    """Return value * 2**k by adding k to the exponent bits; the low bits of the float `shifted` hold the integer k."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(32)
        exponent = builder.shl(builder.bitcast(args[1], word), ir.Constant(word, 23))
        return builder.bitcast(builder.add(builder.bitcast(args[0], word), exponent), ir.FloatType())

    return types.float32(types.float32, types.float32), generate


@inlined  # type: ignore[untyped-decorator]
def exp2(z: Any) -> Any:
    """Return 2**z, saturating at 2**-126 and 2**127."""
    z = _LOWEST if z < _LOWEST else z
    z = _HIGHEST if z > _HIGHEST else z
    shifted = z + _SHIFTER
    f = z - (shifted - _SHIFTER)
    p = (((((_C6 * f + _C5) * f + _C4) * f + _C3) * f + _C2) * f + _C1) * f + ONE
    return _scale_by_power_of_two(p, shifted)


@inlined  # type: ignore[untyped-decorator]
def one_minus_exp2(z: Any) -> Any:
    """Return 1 - 2**z for z <= 0, without cancellation near 0."""
    near = -z * (((((_C6 * z + _C5) * z + _C4) * z + _C3) * z + _C2) * z + _C1)
    return near if z > np.float32(-0.5) else ONE - exp2(z)


@inlined  # type: ignore[untyped-decorator]
def sigmoid(v: Any) -> Any:
    return ONE / (ONE + exp2(-v * LOG2E))


@inlined  # type: ignore[untyped-decorator]
def softplus(v: Any) -> Any:
    """Return log(1 + exp(v))."""
    e = exp2(-abs(v) * LOG2E)
    s = e / (TWO + e)
    q = s * s
    series = ONE + q * (_L3 + q * (_L5 + q * (_L7 + q * (_L9 + q * (_L11 + q * _L13)))))
    return (v if v > ZERO else ZERO) + TWO * s * series
