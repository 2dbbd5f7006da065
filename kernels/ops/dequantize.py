"""Byte planes to coefficients: unpack, dequantize.

`codec/stages/reference/symbols.py` is the reference. `dequantize` runs two kernels. The first treats every ESCAPE byte
as the number -128 and counts such bytes. The second has one lane per entry of the escape list: it checks the list and
computes the escaped values again. The tables cut off tails that are cheaper to escape, so most tiles hold an escape;
searching the list in every tile would cost more than everything else.

The count completes the check. If the list has as many entries as there are ESCAPE bytes, each entry points at one of
them, and indices rise, then the list names them all.

A tile is `[ROWS, GROUPS, RUN]`: rows, groups of tokens, adjacent tokens of a group. The groups are adjacent too: 8 rows
of 256 tokens, of which each thread of 4 warps has 8 tokens of two rows. Where T and the offsets are multiples of 8,
these take one load of 8 bytes and one store of 16 (bfloat16); elsewhere the same code moves single values, those of a
warp side by side.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cuvee.kernels.jobs import (
    JOB_CLASS_PLAN,
    JOB_ESCAPE_COUNT,
    JOB_ESCAPES,
    JOB_FIELDS,
    JOB_LEVELS,
    JOB_PLAN,
    JOB_PLANES,
    JOB_STRIDE,
    JOB_TOKENS,
    PLAN_FIELDS,
    PLAN_ROW,
    PLAN_ROWS,
    STATUS_ESCAPES,
)
from cuvee.kernels.ops.arguments import DevicePlans
from cuvee.kernels.ops.pages import rounded
from cuvee.kernels.ops.symbols import (
    _RUN,
    _TOKENS,
    ESCAPE,
    FLOAT_FIELDS,
    SHRINK_MORE,
    SHRINK_ONE,
    _half,
    _low_bits,
)

_ROWS, _GROUPS = 8, _TOKENS // _RUN  # of a tile
ENTRIES = 128  # of an escape list at a time
CELLS = 1 << 16  # values per program that lists escapes, one in 512; a program repeats where there are more
MAX_GRID = 65535  # programs along the second and third axis


@triton.jit
def _shrinkage(row_floats, component, mask):  # type: ignore[no-untyped-def]
    """Return the shrinkage of level 1 and of higher levels, by component."""
    at = row_floats + component * FLOAT_FIELDS
    return tl.load(at + SHRINK_ONE, mask=mask, other=0.0), tl.load(at + SHRINK_MORE, mask=mask, other=0.0)


@triton.jit
def _signed(byte):  # type: ignore[no-untyped-def]
    return byte.to(tl.int8, bitcast=True).to(tl.int32)


@triton.jit
def _coefficient(level, shrink_one, shrink_more, step):  # type: ignore[no-untyped-def]
    """Return the value of a level, float32."""
    magnitude = tl.abs(level)
    number = magnitude.to(tl.float32)
    # The product is that of level 0 or 1, without a comparison. abs(-2**31) wraps; unsigned it is above 1.
    more = magnitude.to(tl.uint32, bitcast=True) > 1
    back = number - tl.where(more, shrink_more, number * shrink_one)
    # The sign bit, rather than a subtraction from 0, which would lose the sign of a zero.
    sign = level & -0x80000000
    return (back.to(tl.int32, bitcast=True) ^ sign).to(tl.float32, bitcast=True) * step


@triton.jit
def _dequantize_tile(  # type: ignore[no-untyped-def]
    job, plan, row_floats, row_ints, step, planes, y, found, tile_row, tile,
    ALIGNED: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    tokens = tl.load(job + JOB_TOKENS).to(tl.int32)
    stride = tl.load(job + JOB_STRIDE).to(tl.int32)
    planes_at = tl.load(job + JOB_PLANES)
    y_at = tl.load(job + JOB_LEVELS)
    if ALIGNED:
        # They are multiples of RUN; the division tells the compiler.
        tokens = tokens // RUN * RUN
        stride = stride // RUN * RUN
        planes_at = planes_at // RUN * RUN
        y_at = y_at // RUN * RUN
    start = tile * GROUPS * RUN
    if start < stride:
        row = tile_row * ROWS + tl.arange(0, ROWS)[:, None, None]
        exists = row < tl.load(plan + PLAN_ROWS)
        component = tl.load(plan + PLAN_ROW) + row
        shrink_one, shrink_more = _shrinkage(row_floats, component, exists)
        shift, low_plane = _low_bits(row_ints, component, exists)
        half = _half(shift)
        high_row = planes + planes_at + row.to(tl.int64) * tokens
        low_row = planes + planes_at + low_plane.to(tl.int64) * tokens
        y_row = y + y_at + row.to(tl.int64) * stride
        group = start + tl.arange(0, GROUPS)[None, :, None] * RUN
        token = group + tl.arange(0, RUN)[None, None, :]
        inside = exists & (token < tokens)
        d = _signed(tl.load(high_row + token, mask=inside, other=0))
        # 1 for -128, 0 for every other signed byte: cheaper than a comparison.
        escapes = tl.sum(d * d >> 14, 2)
        # Beyond the tokens `half` makes d zero.
        low = tl.load(low_row + token, mask=inside & (low_plane >= 0), other=half.to(tl.uint8))
        d = (d << shift) + (low.to(tl.int32) - half)
        value = _coefficient(d, shrink_one, shrink_more, step)
        tl.store(y_row + token, rounded(value, y.dtype.element_ty), mask=exists & (token < stride))
        count = tl.sum(escapes, 1)
        tl.atomic_add(found + tl.zeros((ROWS,), tl.int32), count, mask=count > 0, sem="relaxed")


@triton.jit
def _dequantize(  # type: ignore[no-untyped-def]
    jobs, plans, row_floats, row_ints, steps, planes, y, found,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    tile_row = tl.program_id(1)
    tile = tl.program_id(2)
    job = jobs + index * JOB_FIELDS
    plan_index = tl.load(job + JOB_PLAN)
    plan = plans + plan_index * PLAN_FIELDS
    has_classes = tl.load(job + JOB_CLASS_PLAN) > 0
    if (tile_row * ROWS < tl.load(plan + PLAN_ROWS)) & (has_classes == 0):
        step = tl.load(steps + plan_index)
        sizes = tl.load(job + JOB_TOKENS) | tl.load(job + JOB_STRIDE)
        offsets = tl.load(job + JOB_PLANES) | tl.load(job + JOB_LEVELS)
        if (sizes | offsets) % RUN == 0:
            _dequantize_tile(
                job, plan, row_floats, row_ints, step, planes, y, found + index, tile_row, tile,
                True, ROWS, GROUPS, RUN,
            )  # fmt: skip
        else:
            _dequantize_tile(
                job, plan, row_floats, row_ints, step, planes, y, found + index, tile_row, tile,
                False, ROWS, GROUPS, RUN,
            )  # fmt: skip


@triton.jit
def _place_escapes(  # type: ignore[no-untyped-def]
    data, jobs, plans, row_floats, row_ints, steps, planes, y, found, status, ENTRIES: tl.constexpr
):
    """Check a job's escape list and recompute the values it changes; a *cell* is a place of the `[R, T]` matrix."""
    index = tl.program_id(0).to(tl.int64)
    job = jobs + index * JOB_FIELDS
    if tl.load(job + JOB_CLASS_PLAN) > 0:
        return
    plan_index = tl.load(job + JOB_PLAN)
    plan = plans + plan_index * PLAN_FIELDS
    count = tl.load(job + JOB_ESCAPE_COUNT)
    if tl.program_id(1) == 0:
        tl.atomic_or(status + index, STATUS_ESCAPES, mask=tl.load(found + index) != count, sem="relaxed")
    tokens = tl.load(job + JOB_TOKENS)
    stride = tl.load(job + JOB_STRIDE)
    cells = tl.load(plan + PLAN_ROWS) * tokens
    entries = data + tl.load(job + JOB_ESCAPES)
    planes += tl.load(job + JOB_PLANES)
    y += tl.load(job + JOB_LEVELS)
    first_component = tl.load(plan + PLAN_ROW)
    step = tl.load(steps + plan_index)
    for block in range(tl.program_id(1).to(tl.int64) * ENTRIES, count, tl.num_programs(1) * ENTRIES):
        entry = block + tl.arange(0, ENTRIES)
        listed = entry < count
        cell = tl.load(entries + entry, mask=listed, other=0).to(tl.int64)
        before = tl.load(entries + entry - 1, mask=listed & (entry > 0), other=0).to(tl.int64)
        valid = listed & ((entry == 0) | (cell > before)) & (cell < cells)
        valid &= tl.load(planes + cell, mask=valid, other=0) == ESCAPE
        wrong = tl.max((listed & (valid == 0)).to(tl.int32), 0)
        tl.atomic_or(status + index, STATUS_ESCAPES, mask=wrong > 0, sem="relaxed")
        row = cell // tokens
        component = first_component + row
        shrink_one, shrink_more = _shrinkage(row_floats, component, valid)
        shift, low_plane = _low_bits(row_ints, component, valid)
        d = tl.load(entries + count + entry, mask=valid, other=0).to(tl.int32, bitcast=True)
        low = tl.load(planes + cell + (low_plane - row) * tokens, mask=valid & (low_plane >= 0), other=0)
        d = (d << shift) + (low.to(tl.int32) - _half(shift))
        back = _coefficient(d, shrink_one, shrink_more, step)
        tl.store(y + cell + row * (stride - tokens), rounded(back, y.dtype.element_ty), mask=valid)


def dequantize(
    data: torch.Tensor,
    jobs: torch.Tensor,
    plans: DevicePlans,
    planes: torch.Tensor,
    y: torch.Tensor,
    status: torch.Tensor,
    found: torch.Tensor,
    max_rows: int,
    max_tokens: int,
) -> None:
    """Byte planes and escapes to coefficients, of all jobs whose tokens have no classes.

    Writes `[R, STRIDE]` of each job, zeros from column T on. The coefficients are those of the reference, rounded to
    the dtype of `y`. Those of a job whose status gets `Status.ESCAPES` mean nothing.

    Args:
        data: uint8, a multiple of four bytes.
        jobs: int64 `[J, len(JobField)]` with ESCAPES, ESCAPE_COUNT, TOKENS, PLAN, PLANES, LEVELS and STRIDE.
            The lists lie within `data`; STRIDE is at most T rounded up to a multiple of 256.
        plans: how each job is coded.
        planes: uint8, `[P, T]` of each job.
        y: bfloat16 or float32, written.
        status: int32 `[J]`; gets `Status.ESCAPES` where the list does not name all ESCAPE bytes in order.
        found: int32 `[J]`, zeros; gets the number of ESCAPE bytes.
        max_rows: rows of the largest job.
        max_tokens: tokens of the longest job, at most 65,535 * 256.
    """
    count = len(jobs)
    tiles = triton.cdiv(max_tokens, _TOKENS)
    _dequantize[(count, triton.cdiv(max_rows, _ROWS), tiles)](
        jobs, plans.plans, plans.row_floats, plans.row_ints, plans.steps, planes, y, found,
        ROWS=_ROWS, GROUPS=_GROUPS, RUN=_RUN, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    _place_escapes[(count, escape_programs(max_rows, max_tokens))](
        data.view(torch.uint32), jobs, plans.plans, plans.row_floats, plans.row_ints, plans.steps, planes, y, found,
        status, ENTRIES=ENTRIES, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def escape_programs(max_rows: int, max_tokens: int) -> int:
    """Return the programs for a job's escape list: at least one, as the list of a job without rows is checked too."""
    return int(min(triton.cdiv(max(max_rows, 1) * max_tokens, CELLS), MAX_GRID))
