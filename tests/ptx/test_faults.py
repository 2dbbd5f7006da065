"""Every forbidden action of a kernel is a fault with its line, and no allowed action is."""

from __future__ import annotations

import numpy as np
import pytest
from tests.ptx.assembly import kernel, run
from tests.ptx.engine import Kernel, Memory, Options
from tests.ptx.syntax import PtxError

pytestmark = pytest.mark.usefixtures("engine")
ROOM = ".extern .shared .align 16 .b8 room[];"
BOTH = pytest.mark.parametrize("options", [Options(), Options(seed=3, quantum=2)], ids=["in order", "at random"])


def faults(
    body: str, threads: int = 64, shared: int = 1024, options: Options | None = None, size: int = 256
) -> list[str]:
    small = kernel(f"mad.wide.u32 %rd9, %t, 4, %rd_x;\nmov.u32 %r9, room;\nmad.lo.s32 %r10, %t, 4, %r9;\n{body}", ["x"],
                   threads, ROOM)  # fmt: skip
    return sorted(run(small, {"x": np.zeros(size, np.uint8)}, shared, options).totals)


def test_bounds_of_the_view() -> None:
    assert faults("ld.global.b32 %r0, [%rd9];") == []
    for beyond in ("[%rd9+4]", "[%rd9+-4]", "[%rd9+1048576]"):
        assert faults(f"ld.global.b32 %r0, {beyond};") == ["out of bounds"]
        assert faults(f"st.global.b32 {beyond}, %t;") == ["out of bounds"]
        assert faults(f"red.global.add.u32 {beyond}, %t;") == ["out of bounds"]
    assert faults("ld.global.v2.b32 {%r0, %r1}, [%rd9];") == ["misaligned", "out of bounds"]
    # Lanes that a mask leaves out may point anywhere.
    assert faults("setp.lt.u32 %p0, %t, 63; @%p0 ld.global.b32 %r0, [%rd9+4];") == []


def test_an_address_stays_with_its_parameter() -> None:
    """Not even memory of the same launch may be reached from another parameter."""
    whole = np.zeros(64, np.uint32)
    small = kernel("mad.wide.u32 %rd0, %t, 4, %rd_a; st.global.b32 [%rd0+%OFF], %t;".replace("%OFF", "128"), ["a", "b"])
    outcome = run(small, {"a": whole[:32], "b": whole[32:]})
    assert set(outcome.totals) == {"out of bounds"} and not whole.any()
    assert "4 bytes at 128 of a, which has 128" in str(outcome.faults[0]) or "of b" in str(outcome.faults[0])
    # The way through shared memory does not hide where it comes from; what was loaded belongs to tables alone.
    through = """st.shared.b64 [room], %rd_a; bar.warp.sync -1; ld.shared.b64 %rd1, [room];
mad.wide.u32 %rd0, %t, 4, %rd1; st.global.b32 [%rd0+128], %t;"""
    outcome = run(kernel(through, ["a", "b"], before=ROOM), {"a": whole[:32], "b": whole[32:]}, 16)
    assert set(outcome.totals) == {"out of bounds"}
    table = np.array([whole.ctypes.data], np.uint64)
    loaded = kernel(
        "ld.global.b64 %rd1, [%rd_table]; mad.wide.u32 %rd0, %t, 4, %rd1; st.global.b32 [%rd0], %t;", ["table", "b"]
    )
    assert set(run(loaded, {"table": table, "b": whole}).totals) == {"out of bounds"}
    places = [Memory(int(table.ctypes.data), int(table.ctypes.data) + 8, 0, "table"),
              Memory(int(whole.ctypes.data), int(whole.ctypes.data) + 128, None, "place")]  # fmt: skip
    assert not loaded.launch((1, 1, 1), [places[0].low, 0], places).totals
    np.testing.assert_array_equal(whole[:32], np.arange(32))


def test_alignment() -> None:
    assert faults("ld.global.b32 %r0, [%rd_x+2];") == ["misaligned"]
    assert faults("ld.global.v4.b32 {%r0, %r1, %r2, %r3}, [%rd_x+8];") == ["misaligned"]
    assert faults("st.shared.v2.b32 [%r9+4], {%t, %t};") == ["misaligned"]


def test_bounds_of_shared_and_local_memory() -> None:
    assert faults("st.shared.b32 [%r10], %t;", shared=256) == []
    assert faults("st.shared.b32 [%r10+4], %t;", shared=256) == ["shared memory out of bounds"]
    assert faults("mov.u32 %r1, 0; st.shared.b32 [%r1], %t;") == ["shared memory out of bounds"]
    local = (
        ".local .align 8 .b8 depot[16]; mov.u64 %rd1, depot; st.local.b32 [%rd1+{0}], %t; ld.local.b32 %r1, [%rd1+{0}];"
    )
    assert faults(local.format(12)) == []
    assert faults(local.format(16)) == ["local memory out of bounds"]


@BOTH
def test_races(options: Options) -> None:
    """64 threads are two warps; lanes of a warp go together."""
    read_other = "xor.b32 %r0, %t, 32; mad.lo.s32 %r0, %r0, 4, %r9;"
    meet = f"st.shared.b32 [%r10], %t; bar.sync 0; {read_other} ld.shared.b32 %r1, [%r0];"
    assert faults(meet, options=options) == []
    missed = faults(meet.replace("bar.sync 0;", ""), options=options)
    assert missed and set(missed) <= {"shared-memory race", "shared memory read before written"}
    # Read, then overwritten by the other warp.
    again = f"{meet} st.shared.b32 [%r10], %r1;"
    assert faults(again, options=options) == ["shared-memory race"]
    assert (
        faults(again.replace("st.shared.b32 [%r10], %r1", "bar.sync 0; st.shared.b32 [%r10], %r1"), options=options)
        == []
    )
    # Two warps write one word: a race, unless they write the same, or add to it.
    assert faults("st.shared.b32 [room], %t;", options=options) == ["shared-memory race"]
    assert faults("mov.u32 %r1, 5; st.shared.b32 [room], %r1;", options=options) == []
    zero = "mov.u32 %r1, 0; st.shared.b32 [room], %r1; bar.sync 0;"
    assert faults(f"{zero} red.shared.add.u32 [room], %t;", options=options) == []
    assert faults(f"{zero} ld.shared.b32 %r2, [room]; st.shared.b32 [room], %t;", options=options) == [
        "shared-memory race"
    ]
    # Bytes of one word are apart.
    bytes_of = "cvt.u16.u32 %rs0, %t; add.s32 %r1, %r9, %t; st.shared.b8 [%r1], %rs0;"
    assert faults(bytes_of, options=options) == []


def test_what_nothing_was_written_to() -> None:
    assert faults("ld.shared.b32 %r0, [%r10];") == ["shared memory read before written"]
    # A program does not see what the one before left.
    first = "mov.u32 %r0, %ctaid.x; setp.eq.u32 %p0, %r0, 0; @%p0 st.shared.b32 [room], %t;"
    small = kernel(f"{first} ld.shared.b32 %r1, [room];", before=ROOM)
    assert small.launch((1, 1, 1), [], (), 4).totals == {}
    assert set(small.launch((2, 1, 1), [], (), 4).totals) == {"shared memory read before written"}


def test_asynchronous_copies() -> None:
    copy = "mad.lo.s32 %r10, %t, 4, %r9; cp.async.ca.shared.global [%r10+0], [%rd9+0], 4; cp.async.commit_group;"
    read = "ld.shared.b32 %r0, [%r10]; st.global.b32 [%rd9], %r0;"
    assert faults(f"{copy} cp.async.wait_group 0; {read}") == []
    assert faults(f"{copy} {read}") == ["asynchronous copy read before waited for"]
    # Of two groups, waiting for all but one says nothing of the second.
    second = copy.replace("%r10+0", "%r10+256")
    both = f"{copy} {second} cp.async.wait_group 1;"
    assert faults(f"{both} {read}") == []
    assert faults(f"{both} {read.replace('[%r10]', '[%r10+256]')}") == ["asynchronous copy read before waited for"]
    assert faults(copy.replace("%rd9+0", "%rd9+4")) == ["out of bounds"]
    # What is copied for another warp takes a barrier, too.
    other = "xor.b32 %r1, %t, 32; mad.lo.s32 %r1, %r1, 4, %r9; ld.shared.b32 %r0, [%r1];"
    assert faults(f"{copy} cp.async.wait_group 0; bar.sync 0; {other}") == []
    assert "shared-memory race" in faults(
        f"{copy} cp.async.wait_group 0; {other}", options=Options(seed=1, quantum=1)
    ) or ("asynchronous copy read before waited for" in faults(f"{copy} cp.async.wait_group 0; {other}"))


def test_lanes_that_are_missing() -> None:
    half = "and.b32 %r0, %t, 1; setp.eq.u32 %p0, %r0, 0;"
    assert faults(f"{half} @%p0 bar.sync 0;", threads=32) == ["lanes missing"]
    assert faults(f"{half} @%p0 shfl.sync.bfly.b32 %r1, %t, 1, 31, -1;", threads=32) == ["lanes missing"]
    assert faults(f"{half} @%p0 shfl.sync.bfly.b32 %r1, %t, 2, 31, 0x55555555;", threads=32) == []
    assert faults(f"{half} @%p0 redux.sync.add.s32 %r1, %t, -1;", threads=32) == ["lanes missing"]
    assert faults(f"{half} @%p0 bar.warp.sync -1;", threads=32) == ["lanes missing"]
    # One warp ends, the other waits for it for good.
    assert faults("setp.lt.u32 %p0, %t, 32; @%p0 ret; bar.sync 0;") == ["lanes missing"]
    branch = f"{half} @%p0 bra $over; bar.sync 0;\n$over:"
    assert faults(branch, threads=32) == ["lanes missing"]


def test_endless_loops_end() -> None:
    assert faults("$again:\nbra.uni $again;", options=Options(limit=1000)) == ["endless loop"]
    waits = "$again:\nld.global.b32 %r0, [%rd_x]; setp.eq.u32 %p0, %r0, 0; @%p0 bra $again;"
    assert faults(waits, options=Options(limit=1000)) == ["endless loop"]


@pytest.mark.parametrize(
    "line",
    [
        "ex2.approx.f32 %r0, %r1;",  # approximations are the machine's
        "add.rz.f32 %r0, %r1, %r2;",
        "add.s64 %r0, %r1, %r2;",
        "ld.global.b32 %rs0, [%rd0];",
        "ld.global.foo.b32 %r0, [%rd0];",
        "atom.global.cas.b32 %r0, [%rd0], %r1, %r2;",
        "bar.sync 1, 64;",
        "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%r0}, {%r1}, {%r2}, {%r3};",
        "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r0}, [%r1];",
        "mbarrier.arrive.shared::cta.b64 %rd0, [%r0];",
        "cp.async.bulk.wait_group 0;",
        "mov.u32 %r0, %clock;",
        "bra $nowhere;",
    ],
)
def test_what_is_not_known_is_said_when_it_is_loaded(line: str) -> None:
    with pytest.raises(PtxError, match=r"^line \d+: cannot run") as raised:
        kernel(line)
    assert line.rstrip(";") in str(raised.value)


def test_faults_name_the_python_they_come_from() -> None:
    text = """.visible .entry located(.param .u64 .ptr .global .align 1 x)
.reqntid 32
{
.reg .b64 %rd0; .reg .b32 %r0;
.loc 1 7 3
ld.param.b64 %rd0, [x];
.loc 2 41 5, function_name $name, inlined_at 1 9 2
ld.global.b32 %r0, [%rd0];
ret;
}
.file 1 "/somewhere/outer.py"
.file 2 "/somewhere" "inner.py"
"""
    data = np.zeros(1, np.uint8)
    outcome = Kernel(text).launch((1, 1, 1), [int(data.ctypes.data)], [])
    assert outcome.totals == {"out of bounds": 32}
    assert outcome.faults[0].source == ("inner.py:41", "outer.py:9") and outcome.faults[0].line == 8
    assert str(outcome.faults[0]).startswith("out of bounds: inner.py:41 < outer.py:9: `ld.global.b32 %r0, [%rd0]`")


def test_a_seed_draws_the_order_of_programs_and_of_warps() -> None:
    body = "mov.u32 %r0, %ctaid.x; mad.lo.s32 %r1, %r0, 64, %t; st.global.b32 [%rd_x], %r1;"
    last = []
    for seed in (None, 0, 1, 1, 2, 3):
        x = np.zeros(1, np.uint32)
        small = kernel(body, ["x"], 64)
        run(small, {"x": x}, options=Options(seed=seed, quantum=2), programs=16)
        last.append(int(x[0]))
    assert last[0] == 16 * 64 - 1 and last[2] == last[3] and len(set(last)) > 3
