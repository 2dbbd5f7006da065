"""What arithmetic does at its edges, where kernels' results would not tell: against Python, NumPy, torch and fractions.

That sums, products and bits are right otherwise, every kernel's test shows.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from tests.ptx.assembly import Array, bits, dtype_of, exact, floats, lanewise, wrapped
from tests.ptx.syntax import BYTES

pytestmark = [pytest.mark.usefixtures("engine"), pytest.mark.filterwarnings("ignore::RuntimeWarning")]
A, B = floats(1), floats(2)
B[::3] = A[::3]
UNORDERED = np.isnan(A) | np.isnan(B)


@pytest.mark.parametrize("kind", ["b16", "b32", "b64", "u16", "u32", "s32", "u64", "s64"])
def test_shifts_by_the_width_or_more_leave_nothing_but_the_sign(kind: str) -> None:
    a = bits(BYTES[kind], 1)
    n = np.random.default_rng(3).integers(0, 8 * BYTES[kind] + 9, len(a), dtype=np.uint32)
    n[:2] = 2**32 - 1, 8 * BYTES[kind]
    by = np.minimum(n, 64).astype(object)
    name, moved = ("shl", exact(kind, a) << by) if kind[0] == "b" else ("shr", exact(kind, a) >> by)
    got = lanewise(f"{name}.{kind} %d, %a, %b;", kind, a=(kind, a), b=("u32", n))
    np.testing.assert_array_equal(got, wrapped(moved, kind))


@pytest.mark.parametrize("kind", ["u32", "s32"])
def test_fields_of_bits(kind: str) -> None:
    a, draw = bits(4, 1), np.random.default_rng(4)
    at, count = (draw.integers(0, 40, len(a), dtype=np.uint32) for _ in range(2))
    got = lanewise(f"bfe.{kind} %d, %a, %b, %c;", kind, a=(kind, a), b=("u32", at), c=("u32", count))
    want = []
    for x, first, n in zip(a.tolist(), at.tolist(), count.tolist(), strict=True):
        # As the PTX manual spells it out.
        sign = 0 if kind == "u32" or n == 0 else x >> min(first + n - 1, 31) & 1
        want.append(sum((x >> first + i & 1 if i < n and first + i <= 31 else sign) << i for i in range(32)))
    np.testing.assert_array_equal(got, np.array(want, np.uint32))


@pytest.mark.parametrize(("to", "of"), [("s32", "s8"), ("s64", "s32"), ("u32", "u16"), ("u64", "u16"), ("u16", "u32")])
def test_integers_to_integers(to: str, of: str) -> None:
    """A narrow result fills its register with its sign, or with zeros."""
    raw = bits(max(BYTES[of], 2), 9)
    values = raw.astype(f"u{BYTES[of]}").view(dtype_of(of)).astype(object)
    got = lanewise(f"cvt.{to}.{of} %d, %a;", to, a=(f"b{8 * raw.itemsize}", raw))
    np.testing.assert_array_equal(got, wrapped(values, to))


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("eq", (A == B)), ("lt", A < B), ("gt", A > B), ("ge", A >= B), ("ne", (A != B) & ~UNORDERED), ("neu", A != B),
        ("equ", (A == B) | UNORDERED), ("ltu", (A < B) | UNORDERED), ("geu", (A >= B) | UNORDERED), ("num", ~UNORDERED),
    ],
)  # fmt: skip
def test_comparisons_of_what_is_no_number(name: str, want: Array) -> None:
    np.testing.assert_array_equal(lanewise(f"setp.{name}.f32 %d, %a, %b;", "pred", a=("f32", A), b=("f32", B)), want)


def same_floats(got: Array, want: Array) -> None:
    """Bit for bit; a NaN has one pattern."""
    np.testing.assert_array_equal(got, np.where(np.isnan(want), 0x7FFFFFFF, want.astype(np.float32).view(np.uint32)))


def flush(x: Array) -> Array:
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)


def least(a: Array, b: Array) -> Array:
    """The lesser; of two numbers that are equal, -0 is."""
    return np.where(np.isnan(a), b, np.where(np.isnan(b) | (a == b) & np.signbit(a), a, np.fmin(a, b)))


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("add.rn", np.add), ("sub.rn", np.subtract), ("mul.rn", np.multiply), ("div.rn", np.divide), ("min", least),
        ("mul.rn.ftz", lambda a, b: flush(flush(a) * flush(b))),
    ],
)  # fmt: skip
def test_floats_of_every_size(name: str, function: Any) -> None:
    same_floats(lanewise(f"{name}.f32 %d, %a, %b;", "f32", a=("f32", A), b=("f32", B)), function(A, B))


def test_fused_sums_are_rounded_once() -> None:
    draw = np.random.default_rng(5)
    a, b = (draw.normal(0, 1, 640).astype(np.float32) for _ in range(2))
    # What a product loses is left.
    c = (-(a * b) * (1 + draw.integers(-2, 3, 640) * np.finfo(np.float32).eps)).astype(np.float32)
    got = lanewise("fma.rn.f32 %d, %a, %b, %c;", "f32", a=("f32", a), b=("f32", b), c=("f32", c))
    sums = [Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)) for x, y, z in zip(a, b, c, strict=True)]
    want = np.array([float(value) for value in sums], np.float32)  # none is a tie once it is a float64
    same_floats(got, want)
    assert (want != a * b + c).any()


def test_floats_to_integers() -> None:
    """What is beyond the range is at its end, and no number is zero."""
    for rounding, whole in (("rzi", np.trunc(A)), ("rni.ftz", np.rint(flush(A)))):
        got = lanewise(f"cvt.{rounding}.s32.f32 %d, %a;", "s32", a=("f32", A)).view(np.int32)
        cut = np.where(np.isnan(whole), 0, whole).astype(np.float64).clip(-(2**31), 2**31 - 1)
        np.testing.assert_array_equal(got, cut)
    same_floats(lanewise("cvt.rmi.ftz.f32.f32 %d, %a;", "f32", a=("f32", A)), np.floor(flush(A)))


def test_halves_and_their_kin() -> None:
    x, halves = floats(10, 4096), np.arange(65536, dtype=np.uint16)
    kinds: dict[str, Any] = {"f16": torch.float16, "bf16": torch.bfloat16}
    for kind, dtype in kinds.items():
        want = torch.from_numpy(x).to(dtype).view(torch.uint16).numpy().copy()
        want[np.isnan(x)] = 0x7FFF
        pair = lanewise(f"cvt.rn.{kind}x2.f32 %d, %a, %b;", f"{kind}x2", a=("f32", x), b=("f32", np.roll(x, 1)))
        np.testing.assert_array_equal(pair >> 16, want)  # the first operand is the upper half
        np.testing.assert_array_equal(pair & 0xFFFF, np.roll(want, 1))
        wide = lanewise(f"cvt.f32.{kind} %d, %a;", "f32", a=("b16", halves)).view(np.float32)
        np.testing.assert_array_equal(wide, torch.from_numpy(halves).view(dtype).float().numpy())
    got = lanewise("cvt.rna.tf32.f32 %d, %a;", "f32", a=("f32", x)).view(np.float32)
    finite = np.isfinite(x) & (np.abs(x) < 1e38) & (np.abs(x) > 1e-37)
    ulp = 2.0 ** (np.frexp(x[finite].astype(np.float64))[1] - 11)
    want = np.copysign(np.floor(np.abs(x[finite]) / ulp + 0.5) * ulp, x[finite])  # ties go away from zero
    np.testing.assert_array_equal(got[finite], want)
