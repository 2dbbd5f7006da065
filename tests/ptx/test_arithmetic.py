"""What arithmetic does at its edges, where kernels' results would not tell: against Python, NumPy, torch and fractions.

That sums, products and bits are right otherwise, every kernel's test shows.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from tests.ptx.assembly import Array, bits, dtype_of, exact, floats, lanewise, wrapped
from tests.ptx.syntax import BYTES

pytestmark = [pytest.mark.usefixtures("engine"), pytest.mark.filterwarnings("ignore::RuntimeWarning")]
SIGNLESS = {2: ("u16", "s16"), 4: ("u32", "s32"), 8: ("u64", "s64")}


@pytest.mark.parametrize("width", [2, 4, 8])
def test_bits_and_shifts(width: int) -> None:
    unsigned, signed = SIGNLESS[width]
    kind = f"b{8 * width}"
    a, b = bits(width, 1), bits(width, 2)
    n = np.random.default_rng(3).integers(0, 8 * width + 9, len(a), dtype=np.uint32)
    n[:3] = 0, 2**32 - 1, 8 * width
    for name, want in (("and", a & b), ("or", a | b), ("xor", a ^ b)):
        np.testing.assert_array_equal(lanewise(f"{name}.{kind} %d, %a, %b;", kind, a=(kind, a), b=(kind, b)), want)
    np.testing.assert_array_equal(lanewise(f"not.{kind} %d, %a;", kind, a=(kind, a)), ~a)
    shifts = {"a": (kind, a), "b": ("u32", n)}
    # By the width or more: nothing is left but the sign.
    left = [x << min(int(k), 64) for x, k in zip(exact(kind, a), n, strict=True)]
    np.testing.assert_array_equal(lanewise(f"shl.{kind} %d, %a, %b;", kind, **shifts), wrapped(left, kind))
    for own in (unsigned, signed):
        right = [x >> min(int(k), 64) for x, k in zip(exact(own, a), n, strict=True)]
        np.testing.assert_array_equal(lanewise(f"shr.{own} %d, %a, %b;", kind, **shifts), wrapped(right, kind))
    np.testing.assert_array_equal(
        lanewise(f"neg.{signed} %d, %a;", kind, a=(kind, a)), wrapped(-exact(signed, a), kind)
    )
    np.testing.assert_array_equal(
        lanewise(f"abs.{signed} %d, %a;", kind, a=(kind, a)), wrapped(abs(exact(signed, a)), kind)
    )


@pytest.mark.parametrize("kind", ["u32", "s32"])
def test_fields_of_bits(kind: str) -> None:
    a, b = bits(4, 1), bits(4, 2)
    draw = np.random.default_rng(4)
    at, count = (draw.integers(0, 40, len(a), dtype=np.uint32) for _ in range(2))
    got = lanewise(f"bfe.{kind} %d, %a, %b, %c;", kind, a=(kind, a), b=("u32", at), c=("u32", count))
    want = []
    for x, first, n in zip(a.tolist(), at.tolist(), count.tolist(), strict=True):
        # As the PTX manual spells it out.
        last = min(first + n - 1, 31)
        sign = 0 if kind == "u32" or n == 0 else x >> last & 1
        want.append(sum((x >> first + i & 1 if i < n and first + i <= 31 else sign) << i for i in range(32)))
    np.testing.assert_array_equal(got, np.array(want, np.uint32))
    got = lanewise("bfi.b32 %d, %a, %b, %c, %e;", "b32", a=("b32", a), b=("b32", b), c=("u32", at), e=("u32", count))
    want = []
    for x, y, first, n in zip(a.tolist(), b.tolist(), at.tolist(), count.tolist(), strict=True):
        chosen = ((1 << n) - 1) << first & 0xFFFFFFFF
        want.append(y & ~chosen | x << first & chosen)
    np.testing.assert_array_equal(got, np.array(want, np.uint32))


COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32", "u64", "s64", "f32"])
def test_comparisons(kind: str) -> None:
    make = floats if kind[0] == "f" else lambda kind, seed: bits(BYTES[kind], seed)
    a, b = make(kind, 1), make(kind, 2)
    b[::3] = a[::3]
    x, y = a.view(dtype_of(kind)), b.view(dtype_of(kind))
    operands: dict[str, Any] = {"a": (kind, a), "b": (kind, b)}
    unordered = np.isnan(x) | np.isnan(y) if kind[0] == "f" else np.zeros(len(a), bool)
    for name, compare in COMPARISONS.items():
        got = lanewise(f"setp.{name}.{kind} %d, %a, %b;", "pred", **operands)
        np.testing.assert_array_equal(got, compare(x, y) & ~unordered)
        if kind[0] == "f":
            got = lanewise(f"setp.{name}u.{kind} %d, %a, %b;", "pred", **operands)
            np.testing.assert_array_equal(got, compare(x, y) | unordered)
    if kind[0] == "f":
        np.testing.assert_array_equal(lanewise(f"setp.num.{kind} %d, %a, %b;", "pred", **operands), ~unordered)
        np.testing.assert_array_equal(lanewise(f"setp.nan.{kind} %d, %a, %b;", "pred", **operands), unordered)


def same_floats(got: Array, want: Array) -> None:
    """Bit for bit; a NaN of float32 has one pattern."""
    want = np.ascontiguousarray(want)
    patterns = want.view(got.dtype).copy()
    if want.dtype == np.float32:
        patterns[np.isnan(want)] = 0x7FFFFFFF
    else:
        got = np.where(np.isnan(got.view(want.dtype)), 0, got)
        patterns[np.isnan(want)] = 0
    np.testing.assert_array_equal(got, patterns)


def flush(x: Array) -> Array:
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)


def test_floats() -> None:
    kind = "f32"
    a, b = floats(kind, 1), floats(kind, 2)
    operands: dict[str, Any] = {"a": (kind, a), "b": (kind, b)}
    for name, want in (("add.rn", a + b), ("sub.rn", a - b), ("mul.rn", a * b), ("div.rn", a / b)):
        same_floats(lanewise(f"{name}.{kind} %d, %a, %b;", kind, **operands), want)
    # Of two numbers that are equal, -0 is the lesser.
    below = np.where(np.isnan(a), b, np.where(np.isnan(b), a, np.where((a == b) & np.signbit(a), a, np.fmin(a, b))))
    above = np.where(np.isnan(a), b, np.where(np.isnan(b), a, np.where((a == b) & ~np.signbit(a), a, np.fmax(a, b))))
    same_floats(lanewise(f"min.{kind} %d, %a, %b;", kind, **operands), below)
    same_floats(lanewise(f"max.{kind} %d, %a, %b;", kind, **operands), above)
    sign, raw = np.uint32(1 << 31), a.view(np.uint32)
    np.testing.assert_array_equal(lanewise(f"neg.{kind} %d, %a;", kind, a=(kind, a)), raw ^ sign)
    np.testing.assert_array_equal(lanewise(f"abs.{kind} %d, %a;", kind, a=(kind, a)), raw & ~sign)


def test_subnormal_numbers_are_kept_or_flushed() -> None:
    tiny = np.float32(2.0**-130)
    a, b = np.array([tiny, 1.0, 2.0**-100], np.float32), np.array([tiny, tiny, 2.0**-40], np.float32)
    operands: dict[str, Any] = {"a": ("f32", a), "b": ("f32", b)}
    same_floats(lanewise("add.rn.f32 %d, %a, %b;", "f32", **operands), a + b)
    same_floats(lanewise("add.rn.ftz.f32 %d, %a, %b;", "f32", **operands), flush(flush(a) + flush(b)))
    same_floats(lanewise("mul.rn.f32 %d, %a, %b;", "f32", **operands), a * b)
    same_floats(lanewise("mul.rn.ftz.f32 %d, %a, %b;", "f32", **operands), flush(flush(a) * flush(b)))
    same_floats(lanewise("abs.ftz.f32 %d, %a;", "f32", a=("f32", a)), flush(abs(a)))
    assert (a + b)[0] != 0  # NumPy keeps them, too


def nearest(exactly: Fraction, dtype: Any) -> Any:
    """The nearest float, ties to even, without a rounding in between."""
    near = dtype(float(exactly))
    around = [near, np.nextafter(near, dtype(-np.inf)), np.nextafter(near, dtype(np.inf))]
    around = [x for x in around if np.isfinite(x)]
    return min(around, key=lambda x: (abs(Fraction(float(x)) - exactly), int(x.view(f"u{x.itemsize}")) & 1))


def test_fused_sums_are_rounded_once() -> None:
    dtype: Any = np.float32
    draw = np.random.default_rng(5)
    a, b = (draw.normal(0, 1, 640).astype(dtype) for _ in range(2))
    c = (-(a * b) * (1 + draw.integers(-2, 3, 640) * np.finfo(dtype).eps)).astype(dtype)  # what is lost, is left
    c[::2] = draw.normal(0, 1e-6, 320)
    got = lanewise("fma.rn.f32 %d, %a, %b, %c;", "f32", a=("f32", a), b=("f32", b), c=("f32", c))
    sums = [Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)) for x, y, z in zip(a, b, c, strict=True)]
    want = np.array([nearest(value, dtype) for value in sums], dtype)
    same_floats(got, want)
    assert (want != a * b + c).any()


@pytest.mark.parametrize("rounding", ["rzi", "rni", "rmi", "rpi"])
def test_floats_to_integers(rounding: str) -> None:
    function: Any = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}[rounding]
    x = floats("f32", 6)
    for to in ("s32", "u32", "s64", "u64"):
        got = lanewise(f"cvt.{rounding}.{to}.f32 %d, %a;", to, a=("f32", x))
        info = np.iinfo(dtype_of(to))
        # What is beyond the range is at its end, and no number is zero.
        cut = [0 if np.isnan(v) else info.min if v < info.min else min(v, info.max) for v in function(x)]
        np.testing.assert_array_equal(got, wrapped([min(int(v), info.max) for v in cut], to))
    x = floats("f32", 7)
    same_floats(lanewise(f"cvt.{rounding}.f32.f32 %d, %a;", "f32", a=("f32", x)), function(x))
    ftz = lanewise(f"cvt.{rounding}.ftz.f32.f32 %d, %a;", "f32", a=("f32", x))
    same_floats(ftz, function(flush(x)))


def test_integers_to_integers() -> None:
    for of in ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"):
        register = {1: "b16", 2: "b16", 4: "b32", 8: "b64"}[BYTES[of]]
        raw = bits(BYTES[register], 9)
        values = raw.astype(f"u{BYTES[of]}").view(dtype_of(of)).astype(object)
        for to in ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"):
            target = {1: "b16", 2: "b16", 4: "b32", 8: "b64"}[BYTES[to]]
            got = lanewise(f"cvt.{to}.{of} %d, %a;", target, a=(register, raw))
            # A narrow result fills its register with its sign, or with zeros.
            cut = wrapped(values, to).view(dtype_of(to)).astype(object)
            np.testing.assert_array_equal(got, wrapped(cut, target), err_msg=f"{of} to {to}")


def test_halves_and_their_kin() -> None:
    x = floats("f32", 10, 4096)
    halves = np.arange(65536, dtype=np.uint16)
    tensor = torch.from_numpy(x)
    for kind, dtype in (("f16", torch.float16), ("bf16", torch.bfloat16)):
        want = tensor.to(dtype).view(torch.uint16).numpy().copy()
        want[np.isnan(x)] = 0x7FFF
        got = lanewise(f"cvt.rn.{kind}.f32 %d, %a;", kind, a=("f32", x))
        np.testing.assert_array_equal(got, want)
        pair = lanewise(f"cvt.rn.{kind}x2.f32 %d, %a, %b;", f"{kind}x2", a=("f32", x), b=("f32", np.roll(x, 1)))
        np.testing.assert_array_equal(pair >> 16, want)  # the first operand is the upper half
        np.testing.assert_array_equal(pair & 0xFFFF, np.roll(want, 1))
        back = lanewise(f"cvt.f32.{kind} %d, %a;", "f32", a=("b16", halves)).view(np.float32)
        np.testing.assert_array_equal(back, torch.from_numpy(halves).view(dtype).float().numpy())
    got = lanewise("cvt.rna.tf32.f32 %d, %a;", "f32", a=("f32", x)).view(np.float32)
    finite = np.isfinite(x) & (np.abs(x) < 1e38) & (np.abs(x) > 1e-37)
    ulp = 2.0 ** (np.frexp(x[finite].astype(np.float64))[1] - 11)
    want = np.copysign(np.floor(np.abs(x[finite]) / ulp + 0.5) * ulp, x[finite])  # ties go away from zero
    np.testing.assert_array_equal(got[finite], want)
    f64 = floats("f64", 11)
    same_floats(lanewise("cvt.rn.f32.f64 %d, %a;", "f32", a=("f64", f64)), f64.astype(np.float32))
