"""Tensor memory, products in it and mbarriers, as PTX ISA 9.0 has them (9.7.16, 9.7.13.15); what goes wrong is named.

One product of 64 x 8 x 8 TF32 factors, all of whose waits, fences and barriers are needed: each fault leaves one out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.ptx.assembly import kernel, run
from tests.ptx.engine import Options, Outcome

pytestmark = pytest.mark.usefixtures("engine")
ROOM = ".extern .shared .align 16 .b8 room[];"
A_BYTES, B_BYTES = 64 * 8 * 4, 8 * 8 * 4
BARRIER, ADDRESS = A_BYTES + B_BYTES, A_BYTES + B_BYTES + 8
SHARED = A_BYTES + B_BYTES + 16
FLOAT32, TF32 = 1 << 4, 2 << 7 | 2 << 10
SHAPE = FLOAT32 | TF32 | 8 // 8 << 17 | 64 // 16 << 24
IN_ORDER = Options()
ORDERS = [IN_ORDER, Options(seed=0, quantum=3), Options(seed=1, quantum=3)]


def descriptor(start: str, leading: int, stride: int, to: str) -> str:
    """Of a matrix without swizzling: 16 bytes at `start`, the next ones `leading` on, the next 8 lines `stride` on."""
    low, high = leading >> 4 << 16, stride >> 4 | 1 << 14
    return f"bfe.u32 %r20, {start}, 4, 14; or.b32 %r20, %r20, {low}; mov.b64 {to}, {{%r20, {high}}};"


# What happens, by name, in order. Warp 0 allocates; one lane of it issues.
PARTS = {
    "places": f"mov.u32 %r9, room; add.s32 %r10, %r9, {A_BYTES}; add.s32 %r11, %r9, {BARRIER}; "
    f"add.s32 %r12, %r9, {ADDRESS}; setp.lt.u32 %p1, %t, 32; setp.eq.u32 %p2, %t, 0; setp.lt.u32 %p3, %t, 16; "
    "mad.lo.s32 %r13, %t, 16, %r9; mad.wide.u32 %rd0, %t, 16, %rd_x; shr.u32 %r1, %t, 5; shl.b32 %r1, %r1, 21;",
    "allocate": "@%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r12], 32;",
    "relinquish": "@%p1 tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;",
    "a": "ld.global.v4.b32 {%r2, %r3, %r4, %r5}, [%rd0]; st.shared.v4.b32 [%r13], {%r2, %r3, %r4, %r5};",
    "b": f"@%p3 ld.global.v4.b32 {{%r2, %r3, %r4, %r5}}, [%rd0+{A_BYTES}]; "
    f"@%p3 st.shared.v4.b32 [%r13+{A_BYTES}], {{%r2, %r3, %r4, %r5}};",
    "fence": "fence.proxy.async.shared::cta;",
    "open": "@%p2 mbarrier.init.shared::cta.b64 [%r11], 1;",
    "meet": "bar.sync 0; ld.shared.b32 %r0, [%r12]; add.s32 %r6, %r0, %r1;",
    "fill": "mov.b32 %r7, 0f3f800000; tcgen05.st.sync.aligned.16x32bx2.x4.b32 [%r6 + 0], 4, {%r7, %r7, %r7, %r7};",
    "filled": "tcgen05.wait::st.sync.aligned;",
    "meet again": "bar.sync 0;",
    "issue": descriptor("%r9", 1024, 128, "%rd1") + descriptor("%r10", 128, 128, "%rd2")
    + f" mov.b32 %r14, {SHAPE}; mov.pred %p4, -1;\n@!%p1 bra $issued;\nelect.sync %r15|%p5, -1;\n"
    "@%p5 tcgen05.mma.cta_group::1.kind::tf32 [ %r0 + 0 ], %rd1, %rd2, %r14, %p4;\n",
    "commit": "@%p5 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r11];",
    "issued": "\n$issued:\nmov.b32 %r16, 0;",
    "wait": "{\n.reg .pred complete;\nwaitLoop:\nmbarrier.try_wait.parity.shared::cta.b64 complete, [%r11], %r16;\n"
    "@!complete bra.uni waitLoop;\n}",
    "load": "tcgen05.ld.sync.aligned.16x32bx2.x4.b32 {%r2, %r3, %r4, %r5}, [%r6 + 0], 4;",
    "loaded": "tcgen05.wait::ld.sync.aligned;",
    "store": "mad.wide.u32 %rd0, %t, 16, %rd_out; st.global.v4.b32 [%rd0], {%r2, %r3, %r4, %r5};",
    "part": "bar.sync 0;",
    "close": "@%p2 mbarrier.inval.shared::cta.b64 [%r11];",
    "give back": "@%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r0, 32;",
}  # fmt: skip


def factors() -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    draw = np.random.default_rng(0)
    a, b = (draw.normal(size=(lines, 8)).astype(np.float32) for lines in (64, 8))
    return (a.view(np.uint32) & 0xFFFFE000).view(np.float32), (b.view(np.uint32) & 0xFFFFE000).view(np.float32)


def laid_out(factor: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Pieces of 4 values, all lines' first ones first."""
    return np.concatenate([factor[:, :4].ravel(), factor[:, 4:].ravel()])


def product(
    changes: dict[str, str] | None = None, options: Options = IN_ORDER, shared: int = SHARED
) -> tuple[Outcome, Any]:
    """Run the parts, some of them changed; what came out, rows by columns."""
    parts = PARTS | (changes or {})
    assert parts.keys() == PARTS.keys()
    a, b = factors()
    out = np.full((4, 2, 16, 4), np.nan, np.float32)  # warps, halves of their lanes, rows, columns
    small = kernel("\n".join(parts.values()), ["x", "out"], 128, ROOM)
    outcome = run(small, {"x": np.concatenate([laid_out(a), laid_out(b)]), "out": out}, shared, options)
    return outcome, out.transpose(0, 2, 1, 3).reshape(64, 8)


@pytest.mark.parametrize("options", ORDERS)
@pytest.mark.parametrize("added", [-1, 0])
def test_a_product_is_added_to_what_was_stored(added: int, options: Options) -> None:
    outcome, out = product(changed("issue", "mov.pred %p4, -1", f"mov.pred %p4, {added}"), options)
    assert not outcome.totals, outcome.faults
    a, b = factors()
    np.testing.assert_allclose(out, a.astype(np.float64) @ b.T.astype(np.float64) - added, rtol=0, atol=1e-6)


def changed(part: str, old: str, new: str) -> dict[str, str]:
    assert old in PARTS[part]
    return {part: PARTS[part].replace(old, new)}


LATE = "tensor memory touched before waited for"
WRONG = "tensor memory allocated, given back or addressed wrongly"
BEYOND = "tensor memory out of bounds"
MBARRIER = "mbarrier used wrongly"


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({"filled": ""}, [LATE]),
        ({"wait": ""}, [LATE]),
        ({"fill": ""}, ["tensor memory read before written"]),
        ({"fence": ""}, ["shared memory read by tensor cores without a fence"]),
        ({"relinquish": PARTS["relinquish"] + PARTS["allocate"]}, [WRONG]),
        ({"give back": ""}, [WRONG]),
        (changed("allocate", "32;", "48;"), [WRONG]),
        (changed("meet", "%r0, %r1;", "%r0, 2097152;"), [BEYOND]),  # rows of warp 1
        (changed("load", "4;", "30;"), [BEYOND]),
        (changed("fill", "tcgen05.st", "add.s32 %r6, %r6, %t; tcgen05.st"), [WRONG]),  # not the same in all lanes
        (changed("issue", "%r0 + 0 ]", "%r0 + 32 ]"), [BEYOND]),
        (changed("issue", str(SHAPE), str(SHAPE | 1 << 2)), [WRONG]),  # sparse
        (changed("issue", "%rd1, %rd2", "%rd1, 0"), [WRONG]),  # no descriptor
        ({"open": "@%p1 st.shared.b32 [%r11], %r9;"}, [MBARRIER]),
        ({"open": PARTS["open"] * 2}, [MBARRIER]),
        ({"close": PARTS["close"] * 2}, [MBARRIER]),
        ({"wait": "", "load": "", "store": "", "give back": ""}, [MBARRIER]),  # closed before it was done
    ],
)  # fmt: skip
def test_what_is_left_out_or_wrong(changes: dict[str, str], kinds: Sequence[str]) -> None:
    outcome, _ = product(changes)
    assert set(kinds) <= set(outcome.totals), outcome.faults
    assert all(f.source == () and f.text for f in outcome.faults)


def test_a_barrier_stands_between_stores_and_the_product() -> None:
    found = {kind for options in ORDERS for kind in product({"meet again": ""}, options)[0].totals}
    assert found >= {"tensor-memory race", "tensor memory read before written"}


def test_factors_may_be_written_to_again_when_the_product_is_done() -> None:
    again = "st.shared.v4.b32 [%r13], {%r9, %r9, %r9, %r9};"
    for options in ORDERS:
        assert not product({"loaded": PARTS["loaded"] + again}, options)[0].totals
    # Not before: another warp's product may yet read them.
    early = {"issued": PARTS["issued"] + f"\nbar.sync 0; {again}"}
    assert "shared-memory race" in product(early)[0].totals
    assert "shared memory out of bounds" in product(shared=A_BYTES)[0].totals


def test_a_wait_for_nothing_is_endless() -> None:
    assert "endless loop" in product({"commit": ""}, Options(limit=100_000))[0].totals
    # The phase before the first is over.
    assert LATE in product(changed("issued", "%r16, 0", "%r16, 1"))[0].totals
    twice = PARTS["wait"] + "\nmov.b32 %r16, 1;\n" + PARTS["wait"].replace("@!complete bra.uni waitLoop;", "")
    assert not product({"wait": twice})[0].totals
