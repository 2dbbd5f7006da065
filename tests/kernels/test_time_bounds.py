"""The kernels' work on a chunk, counted by the emulator, against `counts.json`; the bounds computed from it."""

from __future__ import annotations

from dataclasses import fields

import pytest
from tests.emulation import KERNELS_RUN_ON, TARGET
from tests.kernels.costs import counting
from tests.kernels.costs.time_bounds import Count, counts

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
