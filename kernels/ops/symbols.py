"""Layout of plans on the device, and the parts that `dequantize.py` and `quantize.py` share.

Columns are sorted by class within windows, and each class has components, shifts, tables and a step of its own. Every
value looks up those of its class: the columns of a warp are of one class or two, so that what its lanes read lies side
by side. Passes over the classes of a tile, which would load parameters once per row, take two to three times as many
instructions.

Decoding goes by rows of coefficients: all classes of a block of a basis begin at the same row, so a row may hold a
different component in each class, or none, and is zero there. Encoding goes by components, whose planes, counts and
escapes it writes.
"""

from __future__ import annotations

import numpy as np
import triton
import triton.language as tl

from cuvee.codec.entropy import coding_plan

ESCAPE = tl.constexpr(coding_plan.ESCAPE)

# Columns of `rows`, by component: four float32, three int32 and a zero. Two neighbors are one aligned load.
ROW_FIELDS = tl.constexpr(8)
SHRINK_ONE = tl.constexpr(0)  # of level 1; of the levels above it is the next
DEAD_ZONE = tl.constexpr(2)  # rounding is the next
SHIFT = tl.constexpr(4)  # the plane of the low bits within the job is the next, or -1
Y_ROW = tl.constexpr(6)  # row of coefficients

NO_LOW_BITS = tl.constexpr(-1 << 32)  # a shift of 0 and plane -1, as `_two` reads them


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
def _two(array, at, mask, other):  # type: ignore[no-untyped-def]
    """Two neighbors of four bytes, from an even place on, in one load: their bits, int32. `other` is int64."""
    both = tl.load((array + at).to(tl.pointer_type(tl.int64)), mask=mask, other=other)
    return both.to(tl.int32), (both >> 32).to(tl.int32)


@triton.jit
def _two_floats(rows, component, FIELD: tl.constexpr, mask):  # type: ignore[no-untyped-def]
    """Return two neighboring float32 of components, from SHRINK_ONE or DEAD_ZONE on."""
    one, other = _two(rows, component * ROW_FIELDS + FIELD, mask, 0)
    return one.to(tl.float32, bitcast=True), other.to(tl.float32, bitcast=True)


@triton.jit
def _low_bits(rows, component, mask):  # type: ignore[no-untyped-def]
    """Return how many low bits of components have a separate plane, and the plane; -1: none."""
    return _two(rows, component * ROW_FIELDS + SHIFT, mask, NO_LOW_BITS)


@triton.jit
def _float_of(plan, FIELD: tl.constexpr, SECOND: tl.constexpr = 0, mask=None, other=None):  # type: ignore[no-untyped-def]
    """Return a float32 of plans: the first of a field, or the second."""
    return tl.load((plan + FIELD).to(tl.pointer_type(tl.float32)) + SECOND, mask=mask, other=other)


@triton.jit
def _of_row(arrays, plan, FIELD: tl.constexpr, row, exists, other):  # type: ignore[no-untyped-def]
    """What an array holds of each value's row, from where its class's plan says."""
    # That rows are adjacent there must not turn the tile, as all else lies along the columns.
    at = tl.max_contiguous(tl.load(plan + FIELD).to(tl.int32) + row, (1, 1))
    return tl.load(arrays + at, mask=exists, other=other)


@triton.jit
def _coefficient(level, shrink_one, shrink_more, step):  # type: ignore[no-untyped-def]
    """Return the value of a level, float32."""
    magnitude = tl.abs(level)
    number = magnitude.to(tl.float32)
    # The product is that of level 0 or 1, without a comparison. abs(-2**31) wraps; unsigned it is above 1.
    more = magnitude.to(tl.uint32, bitcast=True) > 1
    back = number - tl.where(more, shrink_more, number * shrink_one)
    # The sign bit, rather than a subtraction from 0, which would lose the sign of a zero.
    sign = level & -0x80000000
    return (back.to(tl.int32, bitcast=True) ^ sign).to(tl.float32, bitcast=True) * step
