"""Layout of plans on the device, and the parts that `dequantize.py` and `quantize.py` share."""

from __future__ import annotations

import numpy as np
import triton
import triton.language as tl

from cuvee.codec.entropy import coding_plan

ESCAPE = tl.constexpr(coding_plan.ESCAPE)

# Columns of `row_floats`: float32 by component.
FLOAT_FIELDS = tl.constexpr(4)
SHRINK_ONE = tl.constexpr(0)  # of level 1
SHRINK_MORE = tl.constexpr(1)  # of the levels above
DEAD_ZONE = tl.constexpr(2)
ROUNDING = tl.constexpr(3)

# Columns of `row_ints`: int32 by component. The last is zero: with it, the first two lie within one aligned load.
INT_FIELDS = tl.constexpr(4)
SHIFT = tl.constexpr(0)
LOW_PLANE = tl.constexpr(1)  # plane of the low bits within the job, or -1
Y_ROW = tl.constexpr(2)  # row of coefficients; the component's number where tokens have no classes

_RUN = 8  # adjacent tokens that a lane handles
RUN = tl.constexpr(_RUN)
_TOKENS = 256  # of a program's tile


def level_limit(step: float) -> float:
    """Return the smallest float32 of `MAX_LEVEL` steps or more; coefficients of a plan must lie below it."""
    limit = coding_plan.MAX_LEVEL * step
    nearest = np.float32(limit)
    return float(nearest if float(nearest) >= limit else np.nextafter(nearest, np.float32(np.inf)))


@triton.jit
def _half(shift):  # type: ignore[no-untyped-def]
    """Return half the range of a component's low bits."""
    return (1 << shift) >> 1


@triton.jit
def _low_bits(row_ints, component, mask):  # type: ignore[no-untyped-def]
    """Return how many low bits of components have a separate plane, and the plane; -1: none."""
    at = row_ints + component * INT_FIELDS
    return tl.load(at + SHIFT, mask=mask, other=0), tl.load(at + LOW_PLANE, mask=mask, other=-1)
