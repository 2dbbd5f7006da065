"""Integers, bits, predicates and comparisons, instruction by instruction, against Python and NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.ptx.assembly import bits, dtype_of, exact, floats, lanewise, wrapped
from tests.ptx.syntax import BYTES

pytestmark = [pytest.mark.usefixtures("engine"), pytest.mark.filterwarnings("ignore::RuntimeWarning")]
SIGNLESS = {2: ("u16", "s16"), 4: ("u32", "s32"), 8: ("u64", "s64")}


def toward_zero(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


INTEGERS: dict[str, Callable[[int, int], int]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul.lo": lambda a, b: a * b,
    "min": min,
    "max": max,
    "div": lambda a, b: toward_zero(a, b) if b else -1,
    "rem": lambda a, b: a - b * toward_zero(a, b) if b else a,
}


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32", "u64", "s64"])
@pytest.mark.parametrize("name", INTEGERS)
def test_integers(name: str, kind: str) -> None:
    width = BYTES[kind]
    a, b = bits(width, 1), bits(width, 2)
    got = lanewise(f"{name}.{kind} %d, %a, %b;", kind, a=(kind, a), b=(kind, b))
    want = [INTEGERS[name](x, y) for x, y in zip(exact(kind, a), exact(kind, b), strict=True)]
    np.testing.assert_array_equal(got, wrapped(want, kind))


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32"])
def test_wide_products(kind: str) -> None:
    width = BYTES[kind]
    wide = kind[0] + str(16 * width)
    a, b, c = bits(width, 1), bits(width, 2), bits(2 * width, 3)
    product = exact(kind, a) * exact(kind, b)
    got = lanewise(f"mul.wide.{kind} %d, %a, %b;", wide, a=(kind, a), b=(kind, b))
    np.testing.assert_array_equal(got, wrapped(product, wide))
    got = lanewise(f"mad.wide.{kind} %d, %a, %b, %c;", wide, a=(kind, a), b=(kind, b), c=(wide, c))
    np.testing.assert_array_equal(got, wrapped(product + exact(wide, c), wide))


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_high_products_and_sums_of_products(kind: str) -> None:
    width = BYTES[kind]
    a, b, c = (bits(width, seed) for seed in range(3))
    operands = {"a": (kind, a), "b": (kind, b)}
    product = exact(kind, a) * exact(kind, b)
    np.testing.assert_array_equal(
        lanewise(f"mul.hi.{kind} %d, %a, %b;", kind, **operands), wrapped(product >> 8 * width, kind)
    )
    low = lanewise(f"mad.lo.{kind} %d, %a, %b, %c;", kind, **operands, c=(kind, c))
    np.testing.assert_array_equal(low, wrapped(product + exact(kind, c), kind))
    if width == 4:
        high = lanewise(f"mad.hi.{kind} %d, %a, %b, %c;", kind, **operands, c=(kind, c))
        np.testing.assert_array_equal(high, wrapped((product >> 32) + exact(kind, c), kind))


def test_carries_reach_the_high_word() -> None:
    a, b, c = bits(4, 1), bits(4, 2), bits(8, 3)
    text = """.reg .b32 %lo, %hi, %x, %y;
mov.b64 {%lo, %hi}, %c;
mad.lo.cc.u32 %x, %a, %b, %lo;
madc.hi.u32 %y, %a, %b, %hi;
mov.b64 %d, {%x, %y};"""
    want = wrapped(a.astype(object) * b.astype(object) + c.astype(object), "u64")
    np.testing.assert_array_equal(lanewise(text, "u64", a=("u32", a), b=("u32", b), c=("u64", c)), want)


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


def test_bytes_are_permuted() -> None:
    a, b, c = (bits(4, seed) for seed in range(3))
    got = lanewise("prmt.b32 %d, %a, %b, %c;", "b32", a=("b32", a), b=("b32", b), c=("b32", c))
    source = np.stack([a, b], 1).view(np.uint8)
    want = np.zeros((len(a), 4), np.uint8)
    for k in range(4):
        selector = c >> 4 * k & 15
        byte = source[np.arange(len(a)), selector & 7]
        want[:, k] = np.where(selector & 8, np.where(byte & 128, 255, 0), byte)
    np.testing.assert_array_equal(got, want.view(np.uint32)[:, 0])


@pytest.mark.parametrize("table", [0x00, 0x1B, 0x80, 0x96, 0xCA, 0xE8, 0xFF])
def test_tables_of_three_operands(table: int) -> None:
    a, b, c = (bits(4, seed) for seed in range(3))
    got = lanewise(f"lop3.b32 %d, %a, %b, %c, {table};", "b32", a=("b32", a), b=("b32", b), c=("b32", c))
    want = np.zeros_like(a)
    for k in range(32):
        index = (a >> k & 1) * 4 + (b >> k & 1) * 2 + (c >> k & 1)
        want |= (np.uint32(table) >> index & 1).astype(np.uint32) << np.uint32(k)
    np.testing.assert_array_equal(got, want)


def test_funnels_counts_and_reversal() -> None:
    a, b, n = (bits(4, seed) for seed in range(3))
    whole = b.astype(np.uint64) << np.uint64(32) | a
    operands: dict[str, Any] = {"a": ("b32", a), "b": ("b32", b), "c": ("u32", n)}
    left, right = (lanewise(f"shf.{way}.wrap.b32 %d, %a, %b, %c;", "b32", **operands) for way in "lr")
    np.testing.assert_array_equal(left, (whole << (n & 31).astype(np.uint64) >> np.uint64(32)).astype(np.uint32))
    np.testing.assert_array_equal(right, (whole >> (n & 31).astype(np.uint64)).astype(np.uint32))
    texts = [f"{x:032b}" for x in a.tolist()]
    for name, want in (
        ("popc", [text.count("1") for text in texts]),
        ("clz", [32 - len(text.lstrip("0")) for text in texts]),
        ("brev", [int(text[::-1], 2) for text in texts]),
    ):
        np.testing.assert_array_equal(lanewise(f"{name}.b32 %d, %a;", "b32", a=("b32", a)), want)
    got = lanewise("add.s16x2 %d, %a, %b;", "b32", a=("b32", a), b=("b32", b))
    np.testing.assert_array_equal(got, (a.view(np.uint16) + b.view(np.uint16)).view(np.uint32))


COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32", "u64", "s64", "f32", "f64"])
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


def test_predicates_and_choices() -> None:
    a, b = bits(4, 1), bits(4, 2)
    head = ".reg .pred %x, %y; setp.lt.u32 %x, %a, %b; setp.lt.s32 %y, %a, %b;"
    x, y = a < b, a.view(np.int32) < b.view(np.int32)
    operands: dict[str, Any] = {"a": ("u32", a), "b": ("u32", b)}
    for name, want in (("and", x & y), ("or", x | y), ("xor", x ^ y)):
        np.testing.assert_array_equal(lanewise(f"{head} {name}.pred %d, %x, %y;", "pred", **operands), want)
    np.testing.assert_array_equal(lanewise(f"{head} not.pred %d, %x;", "pred", **operands), ~x)
    np.testing.assert_array_equal(lanewise(f"{head} mov.pred %d, -1;", "pred", **operands), np.ones(len(a)))
    for width in (2, 4, 8):
        p, q = bits(width, 3), bits(width, 4)
        kind = f"b{8 * width}"
        got = lanewise(f"{head} selp.{kind} %d, %p, %q, %x;", kind, **operands, p=(kind, p), q=(kind, q))
        np.testing.assert_array_equal(got, np.where(x, p, q))
        got = lanewise(f"{head} mov.{kind} %d, %p; @!%x mov.{kind} %d, %q;", kind, **operands, p=(kind, p), q=(kind, q))
        np.testing.assert_array_equal(got, np.where(x, p, q))
