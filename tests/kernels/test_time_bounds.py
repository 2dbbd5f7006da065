"""The kernels' work on a chunk, counted by the emulator, against `counts.json`; the bounds computed from it."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from tests.emulation import KERNELS_RUN_ON, TARGET
from tests.kernels.costs import counting
from tests.kernels.costs.disassembly import Instruction, parse_ptx
from tests.kernels.costs.loops import expansion, innermost_loops
from tests.kernels.costs.time_bounds import LIMITS, MACHINES, Count, Machine, bounds, counts, model

from cuvee.codec.errors import CuveeError

# How far a count may lie from the one in the file. Sectors depend on where arrays begin, and on a CPU some begin within
# a sector.
ROOM = dict.fromkeys(("sectors", "transfers", "through"), 1.15)

# What the design owes, per value of bfloat16 or, of the entropy coder, per symbol.
MOST = {
    ("head", "decode", "rans_decode", "instructions"): 46 / 32,
    ("head", "decode", "rans_decode", "sectors"): 27 / 32,
    ("head", "encode", "rans_encode", "instructions"): 38 / 32,
    ("head, classes", "encode", "quantize", "instructions"): 3.6,
    ("head, classes", "encode", "quantize", "barriers"): 0.03,
    ("head, classes", "decode", "dequantize", "instructions"): 2.8,
    ("head, classes", "decode", "dequantize", "barriers"): 0.02,
}  # fmt: skip


MACHINE = Machine(1000, 1.0, 1.0, 1.0, 1.0)  # of round numbers: a clock of all multiprocessors is a picosecond


def report_of_all() -> dict[str, Any]:
    """Return a report of all counted kernels, each twice as long as its PTX; see `static_costs.report`."""
    names = {k for found in counts().values() for way in ("encode", "decode") for k in found[way]}
    return {"kernels": [{"kernel": k, "target": "sm_90", "expansion": 2.0, "integer_share": 0.5} for k in names]}


@pytest.mark.skipif((KERNELS_RUN_ON, TARGET) != ("ptx", "sm_90"), reason="the emulator of sm_90 runs no kernels here")
@pytest.mark.parametrize("scheme", ["head", "head, classes", "lossless"])
def test_kernels_do_no_more_than_was_counted(scheme: str) -> None:
    now, told = counting.count(scheme), counts()[scheme]
    assert now["values"] == told["values"] and now["bits"] == pytest.approx(told["bits"], rel=0.01)
    for way in ("encode", "decode"):
        assert now[way].keys() == told[way].keys()
        for kernel, own in now[way].items():
            for field in fields(Count):
                had, room = getattr(told[way][kernel], field.name), ROOM.get(field.name, 1.02)
                # Where it has become less, `python -m tests.kernels.costs.counting` writes the file anew.
                found = own[field.name]
                assert had / room - 1e-4 <= found <= had * room + 1e-4, (scheme, way, kernel, field.name, found, had)


def test_counts_keep_to_the_budgets() -> None:
    found = counts()
    assert found.keys() == counting.LAYERS.keys()
    for (scheme, way, kernel, name), most in MOST.items():
        # A decoded symbol is a byte written.
        per = found[scheme]["decode"]["rans_decode"].written if kernel.startswith("rans") else 1.0
        assert 0 < getattr(found[scheme][way][kernel], name) / per <= most, (kernel, name)
    for scheme, own in found.items():
        for way in ("encode", "decode"):
            for kernel, count in own[way].items():
                assert 27 <= count.lanes <= 32, (scheme, kernel)
                # A histogram adds where symbols say.
                free = kernel not in ("count_symbols", "decoding_tables")
                assert count.passes <= count.least_passes * (1 if free else 2), (scheme, kernel)


def test_the_longest_time_is_the_bound() -> None:
    nothing = Count(*[0.0] * len(fields(Count)))
    for changed, limit, ps in (
        ({"instructions": 8.0}, "issue", 8 * 3 / 4),
        ({"transfers": 3.0, "passes": 2.0}, "L1", 5.0),
        ({"through": 2.0}, "L2", 64.0),
        ({"written": 5.0}, "DRAM", 5.0),
        ({"flops": 7.0}, "tensor", 7.0),
    ):
        found = bounds(replace(nothing, **changed), 0.0, 3.0, 0.1, MACHINE)
        assert tuple(found) == LIMITS and max(found, key=lambda name: found[name]) == limit
        assert found[limit] == pytest.approx(ps)
    assert bounds(replace(nothing, instructions=8.0), 0.0, 1.0, 0.75, MACHINE)["integer"] == pytest.approx(3.0)
    assert bounds(nothing, 4.0, 1.0, 0.5, MACHINE)["DRAM"] == pytest.approx(4.0)


def test_kernels_add_up() -> None:
    rows = model(report_of_all(), ("H200",))
    assert {(row["scheme"], row["way"]) for row in rows} == {
        (s, w) for s in counting.LAYERS for w in ("encode", "decode")
    }
    for row in rows:
        assert row["ps"] == pytest.approx(sum(max(own["bounds"].values()) for own in row["kernels"]))
        assert row["gb_per_s"] == pytest.approx(2000 / row["ps"])
    (decode,) = (row for row in rows if (row["scheme"], row["way"]) == ("head", "decode"))
    own = {kernel["kernel"]: kernel["bounds"] for kernel in decode["kernels"]}
    found = counts()["head"]
    # Dequantizing reads what the entropy coder wrote, which read the blob.
    read = found["decode"]["rans_decode"].written
    wrote = found["decode"]["dequantize"].written
    assert own["dequantize"]["DRAM"] == pytest.approx((read + wrote) / MACHINES["H200"].dram)
    assert own["rans_decode"]["DRAM"] == pytest.approx((found["bits"] / 8 + read) / MACHINES["H200"].dram)


def test_what_a_report_lacks_is_said() -> None:
    report = report_of_all()
    report["kernels"] = [entry for entry in report["kernels"] if entry["kernel"] != "dequantize"]
    with pytest.raises(CuveeError, match="the report says nothing of dequantize on sm_90"):
        model(report, ("H200",))


PTX = """
.visible .entry count(.param .u64 .ptr .global .align 1 count_param_0)
.reqntid 32
{
	.reg .pred 	%p<3>;
	.loc	1 5 0
	ld.param.b64 	%rd1, [count_param_0];
	@%p1 bra 	$L__BB0_3;
	bra.uni 	$L__BB0_1;
$L__BB0_1:                              // =>This Inner Loop Header: Depth=1
	add.s32 	%r1, %r1, 1;
	// begin inline asm
	@%p2 ld.global.L1::evict_first.v2.b32 { %r2, %r3 }, [ %rd1 + 0 ];
	// end inline asm
	@%p2 st.global.b8 	[%rd2], %r2;
	setp.lt.s32 	%p1, %r1, 9;
	@%p1 bra 	$L__BB0_1;
$L__BB0_3:
	ret;
}
"""


def test_ptx_is_read_as_far_as_loops_go() -> None:
    code = parse_ptx(PTX)
    assert [i.access for i in code] == ["", "", "", "", "load64", "store8", "", "", ""]
    (loop,) = innermost_loops(code)
    assert [i.at for i in loop] == [3, 4, 5, 6, 7]


def test_expansion_allows_for_unrolling() -> None:
    def loop(length: int, accesses: int) -> list[Instruction]:
        body = [
            Instruction(at, "memory" if at < accesses else "integer", "load8" * (at < accesses)) for at in range(length)
        ]
        return [*body[:-1], replace(body[-1], target=0), Instruction(length, "control", falls=False)]

    assert expansion(loop(10, 2), loop(5, 2)) == 2.0
    assert expansion(loop(20, 4), loop(5, 2)) == 2.0  # unrolled twice
    assert expansion(loop(10, 0), loop(5, 0)) == 2.0
    straight = [Instruction(at, "integer") for at in range(6)]
    assert expansion(straight, straight[:4]) == 1.5
