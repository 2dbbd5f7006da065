"""Loads, stores, atomics, and what the lanes of a warp do together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.ptx.assembly import bits, dtype_of, exact, kernel, lanewise, run, wrapped
from tests.ptx.syntax import BYTES

pytestmark = [pytest.mark.usefixtures("engine"), pytest.mark.filterwarnings("ignore::RuntimeWarning")]


@pytest.mark.parametrize("space", ["global", "shared"])
@pytest.mark.parametrize(("width", "count"), [(1, 1), (1, 4), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (8, 1), (8, 2)])
def test_vectors_and_masks(space: str, width: int, count: int) -> None:
    size = width * count
    data = np.random.default_rng(0).integers(0, 256, 32 * size, dtype=np.uint8)
    out = np.full(32 * size, 0xAB, np.uint8)
    register = {1: "%rs", 2: "%rs", 4: "%r4", 8: "%rd2"}[width]
    names = ", ".join(f"{register}{k}" for k in range(count))
    suffix = f"{f'v{count}.' if count > 1 else ''}b{8 * width}"
    through = ""
    if space == "shared":
        through = f"""mov.u32 %r1, room; mad.lo.s32 %r1, %t, {size}, %r1;
st.shared.{suffix} [%r1], {{{names}}};
bar.sync 0;
xor.b32 %r2, %t, 31; mov.u32 %r1, room; mad.lo.s32 %r1, %r2, {size}, %r1;
ld.shared.{suffix} {{{names}}}, [%r1+0];"""
    small = kernel(
        f"""mad.wide.u32 %rd0, %t, {size}, %rd_a;
mad.wide.u32 %rd1, %t, {size}, %rd_out;
ld.global.{suffix} {{{names}}}, [%rd0];
{through}
and.b32 %r0, %t, 1;
setp.eq.s32 %p0, %r0, 1;
@%p0 st.global.{suffix} [%rd1+0], {{{names}}};""",
        ["a", "out"],
        before=".extern .shared .align 16 .b8 room[];",
    )
    outcome = run(small, {"a": data, "out": out}, 32 * size)
    assert not outcome.totals
    want = np.full((32, size), 0xAB, np.uint8)
    rows = data.reshape(32, size)
    want[1::2] = rows[1::2] if space == "global" else rows[::-1][1::2]
    np.testing.assert_array_equal(out.reshape(32, size), want)


@pytest.mark.parametrize("kind", ["s8", "s16", "s32"])
def test_narrow_loads_fill_the_register(kind: str) -> None:
    data = np.array([0, 1, 127, 128, 255] * 8, np.uint8)[:32].astype(f"u{BYTES[kind]}")
    data |= np.uint64(1 << 8 * BYTES[kind] - 1).astype(data.dtype) * (np.arange(32) % 3 == 0).astype(data.dtype)
    out = np.zeros(32, np.int64)
    small = kernel(
        f"""mad.wide.u32 %rd0, %t, {BYTES[kind]}, %rd_a;
mad.wide.u32 %rd1, %t, 8, %rd_out;
ld.global.{kind} %rd2, [%rd0];
st.global.b64 [%rd1], %rd2;""",
        ["a", "out"],
    )
    run(small, {"a": data, "out": out})
    np.testing.assert_array_equal(out, data.view(dtype_of(kind)))


@pytest.mark.parametrize("space", ["global", "shared"])
@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
@pytest.mark.parametrize("name", ["add", "or", "and", "xor", "max", "min", "exch"])
def test_atomics(name: str, kind: str, space: str) -> None:
    width = BYTES[kind]
    values = bits(width, 13)[:256].copy()
    cells = bits(width, 14)[:8].copy()
    there, old = cells.copy(), np.zeros(256, f"u{width}")
    own = f"b{8 * width}" if name in ("or", "and", "xor", "exch") else "u64" if (name, kind) == ("add", "s64") else kind
    register = "%rd7" if width == 8 else "%r7"
    result = "%rd8" if width == 8 else "%r8"
    place = "%rd2" if space == "global" else "%r3"
    copies = ""
    if space == "shared":
        move = f"""setp.lt.u32 %p0, %t, 8;
mad.lo.s32 %r4, %t, {width}, %r9; mad.wide.u32 %rd3, %t, {width}, %rd_cells;
"""
        copies = f"mov.u32 %r9, room;\n{move}"
    load = f"@%p0 ld.global.b{8 * width} {register}, [%rd3]; @%p0 st.shared.b{8 * width} [%r4], {register}; bar.sync 0;"
    store = (
        f"bar.sync 0; @%p0 ld.shared.b{8 * width} {register}, [%r4]; @%p0 st.global.b{8 * width} [%rd3], {register};"
    )
    small = kernel(
        f"""{copies}
{load if space == "shared" else ""}
and.b32 %r0, %t, 7;
mad.wide.u32 %rd2, %r0, {width}, %rd_cells;
mad.lo.s32 %r3, %r0, {width}, %r9;
mad.wide.u32 %rd0, %t, {width}, %rd_values;
mad.wide.u32 %rd1, %t, {width}, %rd_old;
ld.global.b{8 * width} {register}, [%rd0];
atom.{space}.{name}.{own} {result}, [{place}], {register};
st.global.b{8 * width} [%rd1], {result};
{store if space == "shared" else ""}""",
        ["cells", "values", "old"],
        threads=256,
        before=".extern .shared .align 16 .b8 room[];",
    )
    outcome = run(small, {"cells": there, "values": values, "old": old}, 64)
    assert not outcome.totals, outcome.faults
    function: Any = {
        "add": lambda a, b: a + b, "or": lambda a, b: a | b, "and": lambda a, b: a & b, "xor": lambda a, b: a ^ b,
        "max": max, "min": min, "exch": lambda a, b: b,
    }[name]  # fmt: skip
    for k in range(8):
        now = exact(kind, cells)[k]
        for value, before in zip(exact(kind, values)[k::8], exact(kind, old)[k::8], strict=True):
            assert before == now
            now = exact(kind, wrapped([function(now, value)], kind))[0]
        assert exact(kind, there)[k] == now


def shuffled(how: str, lane: int, by: int, clamp: int, segment: int) -> tuple[int, bool]:
    """The source of a lane, and whether it is in range: the PTX manual's pseudocode."""
    most, least = (lane & segment) | (clamp & ~segment), lane & segment
    j = {"up": lane - by, "down": lane + by, "bfly": lane ^ by, "idx": least | (by & ~segment)}[how]
    inside = j >= most if how == "up" else j <= most
    return (j if inside else lane), inside


@pytest.mark.parametrize("how", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize(
    ("by", "width"), [(0, 32), (1, 32), (5, 32), (16, 32), (31, 32), (1, 8), (3, 8), (2, 16), (9, 16)]
)
def test_shuffles(how: str, by: int, width: int) -> None:
    segment, clamp = 32 - width & 31, 0 if how == "up" else 31
    c = segment << 8 | clamp
    x = bits(4, 15)[:32]
    got = lanewise(f"shfl.sync.{how}.b32 %d, %a, {by}, {c}, -1;", "b32", a=("b32", x))
    inside = lanewise(f".reg .b32 %x; shfl.sync.{how}.b32 %x|%d, %a, {by}, {c}, -1;", "pred", a=("b32", x))
    want = [shuffled(how, lane, by, clamp, segment) for lane in range(32)]
    np.testing.assert_array_equal(got, x[[source for source, _ in want]])
    np.testing.assert_array_equal(inside, [flag for _, flag in want])


def test_reductions() -> None:
    x = bits(4, 16)[:32]
    signed = x.view(np.int32)
    for name, want in (
        ("add.s32", x.sum(dtype=np.uint32)), ("max.s32", signed.max()), ("min.s32", signed.min()), ("max.u32", x.max()),
        ("min.u32", x.min()), ("and.b32", np.bitwise_and.reduce(x)), ("or.b32", np.bitwise_or.reduce(x)),
        ("xor.b32", np.bitwise_xor.reduce(x)),
    ):  # fmt: skip
        got = lanewise(f"redux.sync.{name} %d, %a, -1;", "b32", a=("b32", x))
        np.testing.assert_array_equal(got, np.full(32, want).astype(np.int64).astype(np.uint32))


def test_lanes_part_and_meet() -> None:
    """Every lane takes a loop as often as it wants, with a branch inside; after it all are together again."""
    x = bits(4, 17)[:32] % 40
    text = """.reg .b32 %n, %odd; .reg .pred %q;
mov.u32 %n, %a; mov.u32 %d, 0;
$again:
setp.eq.u32 %q, %n, 0;
@%q bra $done;
and.b32 %odd, %n, 1;
setp.eq.u32 %q, %odd, 1;
@%q bra $odd;
add.s32 %d, %d, 100;
bra.uni $next;
$odd:
add.s32 %d, %d, 1;
$next:
sub.s32 %n, %n, 1;
bra $again;
$done:
shfl.sync.idx.b32 %n, %d, 0, 31, -1;"""
    odd = (x + 1) // 2
    np.testing.assert_array_equal(lanewise(text, "b32", a=("b32", x)), odd + 100 * (x - odd))
