"""Arithmetic of floats and conversions, against NumPy, torch and fractions."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from tests.ptx.assembly import Array, bits, dtype_of, floats, lanewise, wrapped
from tests.ptx.syntax import BYTES

pytestmark = [pytest.mark.usefixtures("engine"), pytest.mark.filterwarnings("ignore::RuntimeWarning")]


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


@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_floats(kind: str) -> None:
    a, b = floats(kind, 1), floats(kind, 2)
    operands: dict[str, Any] = {"a": (kind, a), "b": (kind, b)}
    for name, want in (("add.rn", a + b), ("sub.rn", a - b), ("mul.rn", a * b), ("div.rn", a / b)):
        same_floats(lanewise(f"{name}.{kind} %d, %a, %b;", kind, **operands), want)
    # Of two numbers that are equal, -0 is the lesser.
    below = np.where(np.isnan(a), b, np.where(np.isnan(b), a, np.where((a == b) & np.signbit(a), a, np.fmin(a, b))))
    above = np.where(np.isnan(a), b, np.where(np.isnan(b), a, np.where((a == b) & ~np.signbit(a), a, np.fmax(a, b))))
    same_floats(lanewise(f"min.{kind} %d, %a, %b;", kind, **operands), below)
    same_floats(lanewise(f"max.{kind} %d, %a, %b;", kind, **operands), above)
    sign = np.uint64(1 << 63) if kind == "f64" else np.uint32(1 << 31)
    raw = a.view(f"u{BYTES[kind]}")
    np.testing.assert_array_equal(lanewise(f"neg.{kind} %d, %a;", kind, a=(kind, a)), raw ^ sign)
    np.testing.assert_array_equal(lanewise(f"abs.{kind} %d, %a;", kind, a=(kind, a)), raw & ~sign)


def test_pairs_of_floats() -> None:
    """Each half of 64 bits as if alone."""
    a, b, c = (floats("f32", seed).reshape(-1, 2) for seed in (1, 2, 3))
    operands: dict[str, Any] = {
        name: ("b64", x.view(np.uint64)[:, 0]) for name, x in zip("abc", (a, b, c), strict=True)
    }
    two = {name: operands[name] for name in "ab"}
    for name, want in (("add", a + b), ("sub", a - b), ("mul.rn", a * b)):
        same_floats(lanewise(f"{name}.f32x2 %d, %a, %b;", "b64", **two).view(np.uint32), want.ravel())
    got = lanewise("fma.rn.f32x2 %d, %a, %b, %c;", "b64", **operands).view(np.uint32)
    alone = {name: ("f32", x.ravel()) for name, x in zip("abc", (a, b, c), strict=True)}
    np.testing.assert_array_equal(got, lanewise("fma.rn.f32 %d, %a, %b, %c;", "f32", **alone))


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


@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_fused_sums_are_rounded_once(kind: str) -> None:
    dtype: Any = {"f32": np.float32, "f64": np.float64}[kind]
    draw = np.random.default_rng(5)
    a, b = (draw.normal(0, 1, 640).astype(dtype) for _ in range(2))
    c = (-(a * b) * (1 + draw.integers(-2, 3, 640) * np.finfo(dtype).eps)).astype(dtype)  # what is lost, is left
    c[::2] = draw.normal(0, 1e-6, 320)
    got = lanewise(f"fma.rn.{kind} %d, %a, %b, %c;", kind, a=(kind, a), b=(kind, b), c=(kind, c))
    sums = [Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)) for x, y, z in zip(a, b, c, strict=True)]
    want = np.array([nearest(value, dtype) for value in sums], dtype)
    same_floats(got, want)
    assert (want != a * b + c).any()


@pytest.mark.parametrize("rounding", ["rzi", "rni", "rmi", "rpi"])
def test_floats_to_integers(rounding: str) -> None:
    function: Any = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}[rounding]
    for source in ("f32", "f64"):
        x = floats(source, 6)
        for to in ("s32", "u32", "s64", "u64"):
            got = lanewise(f"cvt.{rounding}.{to}.{source} %d, %a;", to, a=(source, x))
            info = np.iinfo(dtype_of(to))
            # What is beyond the range is at its end, and no number is zero.
            cut = [0 if np.isnan(v) else info.min if v < info.min else min(v, info.max) for v in function(x)]
            np.testing.assert_array_equal(got, wrapped([min(int(v), info.max) for v in cut], to))
    x = floats("f32", 7)
    same_floats(lanewise(f"cvt.{rounding}.f32.f32 %d, %a;", "f32", a=("f32", x)), function(x))
    ftz = lanewise(f"cvt.{rounding}.ftz.f32.f32 %d, %a;", "f32", a=("f32", x))
    same_floats(ftz, function(flush(x)))


@pytest.mark.parametrize("kind", ["s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64"])
def test_integers_to_floats(kind: str) -> None:
    register = {1: "b16", 2: "b16", 4: "b32", 8: "b64"}[BYTES[kind]]
    raw = bits(BYTES[register], 8)
    values = raw.astype(f"u{BYTES[kind]}").view(dtype_of(kind))  # the rest of a register is not looked at
    for to, dtype in (("f32", np.float32), ("f64", np.float64)):
        got = lanewise(f"cvt.rn.{to}.{kind} %d, %a;", to, a=(register, raw))
        same_floats(got, np.array([nearest(Fraction(int(v)), dtype) for v in values], dtype))


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
    same_floats(lanewise("cvt.f64.f32 %d, %a;", "f64", a=("f32", x)), x.astype(np.float64))


@pytest.mark.parametrize(("kind", "dtype"), [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)])
def test_bytes_of_floats(kind: str, dtype: torch.dtype) -> None:
    x = floats("f32", 12, 4096)
    limit = torch.finfo(dtype).max
    want = torch.from_numpy(x).clamp(-limit, limit).to(dtype).view(torch.uint8).numpy().copy()
    want[np.isnan(x)] = 0x7F
    got = lanewise(f"cvt.rn.satfinite.{kind}x2.f32 %d, %a, %b;", f"{kind}x2", a=("f32", x), b=("f32", np.roll(x, 1)))
    np.testing.assert_array_equal(got >> 8, want)
    np.testing.assert_array_equal(got & 255, np.roll(want, 1))
    pairs = np.arange(65536, dtype=np.uint16)
    back = lanewise(f"cvt.rn.f16x2.{kind}x2 %d, %a;", "f16x2", a=("b16", pairs)).view(np.float16).reshape(-1, 2)
    one = torch.from_numpy(pairs.view(np.uint8)).view(dtype).half().numpy().reshape(-1, 2)
    np.testing.assert_array_equal(back, one)


def test_words_are_packed_and_taken_apart() -> None:
    a, b = bits(4, 1), bits(4, 2)
    got = lanewise("mov.b64 %d, {%a, %b};", "b64", a=("b32", a), b=("b32", b))
    np.testing.assert_array_equal(got, b.astype(np.uint64) << np.uint64(32) | a)
    swap = ".reg .b16 %x, %y; mov.b32 {%x, %y}, %a; mov.b32 %d, {%y, %x};"
    np.testing.assert_array_equal(lanewise(swap, "b32", a=("b32", a)), a << np.uint32(16) | a >> np.uint32(16))
