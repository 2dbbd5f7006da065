"""Code that Triton 3.9.0 miscompiles, and the workaround.

`tl.histogram(tl.reshape(x, flat), 256, mask=tl.reshape(m, flat))` pairs values with the wrong lanes of the
mask. The pass `triton-combine` sets `allow_reorder` on both reshapes, because only a histogram reads them, and
assumes that it does not depend on the order; a masked one does, unless both operands share it. The coalesced
loads of `x` have another layout than `m`, so that element i of one is not element i of the other. The
workaround reshapes once, and marks elements that must not be counted by their value. Triton's interpreter,
which runs no passes, counts correctly.
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

pytestmark = pytest.mark.usefixtures("emulator")


@triton.jit
def _count(x, out, rows, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ONCE: tl.constexpr):  # type: ignore[no-untyped-def]
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    value = tl.load(x + row[:, None] * COLUMNS + column[None, :])
    mask = (row < rows)[:, None] & (column < COLUMNS)[None, :]
    flat: tl.constexpr = [ROWS * COLUMNS]
    if ONCE:
        values = tl.reshape(tl.where(mask, value, 256), flat)
        counts = tl.histogram(values, 256, mask=values < 256)
    else:
        counts = tl.histogram(tl.reshape(value, flat), 256, mask=tl.reshape(mask, flat))
    tl.store(out + tl.arange(0, 256), counts)


FOUND = pytest.mark.xfail(reason="Triton 3.9 reorders values and mask; once it does not, the workaround goes")


@pytest.mark.parametrize("once", [True, pytest.param(False, marks=FOUND)])
def test_a_histogram_counts_what_its_mask_says(once: bool) -> None:
    x = (torch.arange(64)[:, None] * 4 % 256 + torch.arange(32)[None] % 4).to(torch.int32)
    for rows in (64, 37):
        out = torch.zeros(256, dtype=torch.int32)
        _count[(1,)](x, out, rows, ROWS=64, COLUMNS=32, ONCE=once, num_warps=8, enable_fp_fusion=True)
        assert torch.equal(out, torch.bincount(x[:rows].flatten(), minlength=256).int())
