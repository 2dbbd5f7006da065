"""Byte planes to coefficients: unpack, dequantize. `tests/codec/reference/symbols.py` is the reference.

`dequantize` runs two kernels. The first treats every ESCAPE byte as the number -128 and counts such bytes. The second
has one lane per entry of the escape list: it checks the list and computes the escaped values again. The tables cut off
tails that are cheaper to escape, so most tiles hold an escape; searching the list in every tile would cost more than
everything else.

The count completes the check. If the list has as many entries as there are ESCAPE bytes, each entry points at one of
them, and indices rise, then the list names them all.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cuvee.kernels.jobs import JOB, PLAN, STATUS
from cuvee.kernels.ops.arguments import PlaneJobs
from cuvee.kernels.ops.symbols import (
    ESCAPE,
    ROW_FIELDS,
    SHRINK_ONE,
    Y_ROW,
    _coefficient,
    _float_of,
    _half,
    _low_bits,
    _of_row,
    _two_floats,
)

_ROWS = 16  # of a tile
MIN_DEPTH = 64  # its columns
_ENTRIES = 128  # of an escape list at a time
ROWS, COLUMNS, ENTRIES = (tl.constexpr(number) for number in (_ROWS, MIN_DEPTH, _ENTRIES))
CELLS = 1 << 16  # values per program that lists escapes, one in 512; a program repeats where there are more
MAX_GRID = 65535  # programs along the second and third axis


@triton.jit
def _signed(byte):  # type: ignore[no-untyped-def]
    return byte.to(tl.int8, bitcast=True).to(tl.int32)


@triton.jit(do_not_specialize=["depth"])
def _dequantize(  # type: ignore[no-untyped-def]
    jobs, plans, row_maps, rows, classes, planes, base, y, escape_counts, depth
):
    index = tl.program_id(0).to(tl.int64)
    job = jobs + index * JOB.FIELDS
    first_plan = tl.load(job + JOB.PLAN).to(tl.int32)
    start = tl.program_id(2) * COLUMNS
    tokens = tl.load(job + JOB.TOKENS).to(tl.int32)
    if start >= tokens:
        return
    classes += tl.load(job + JOB.COLUMNS)
    finest = tl.load(classes + start // depth * depth).to(tl.int32)
    extent = tl.load(plans + (first_plan + finest) * PLAN.FIELDS + PLAN.EXTENT).to(tl.int32)
    if tl.program_id(1) * ROWS >= extent:
        return
    stride = tl.load(job + JOB.STRIDE).to(tl.int32)
    planes += tl.load(job + JOB.PLANES)
    y += tl.load(job + JOB.COEFFICIENTS)
    if base is not None:
        base += tl.load(job + JOB.COEFFICIENTS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    column = start + tl.arange(0, COLUMNS)[None, :]
    inside = column < tokens
    plan_index = first_plan + tl.load(classes + column, mask=inside, other=0).to(tl.int32)
    plan = plans + plan_index * PLAN.FIELDS
    component = _of_row(row_maps, plan, PLAN.ROW_MAP, row, inside & (row < extent), -1)
    exists = component >= 0
    at_row = tl.load(plan + PLAN.ROW).to(tl.int32) + component
    shrink_one, shrink_more = _two_floats(rows, at_row, SHRINK_ONE, exists)
    shift, low_plane = _low_bits(rows, at_row, exists)
    half = _half(shift)
    d = _signed(tl.load(planes + component.to(tl.int64) * tokens + column, mask=exists, other=0))
    # 1 for -128, 0 for every other signed byte: cheaper than a comparison.
    escapes = tl.sum(d * d >> 14)
    low_row = planes + low_plane.to(tl.int64) * tokens
    low = tl.load(low_row + column, mask=exists & (low_plane >= 0), other=half.to(tl.uint8))
    d = (d << shift) + (low.to(tl.int32) - half)
    value = _coefficient(d, shrink_one, shrink_more, _float_of(plan, PLAN.STEP))
    at = row.to(tl.int64) * stride + column
    written = (row < extent) & (column < stride)
    if base is not None:
        value += tl.load(base + at, mask=written, other=0.0)
    tl.store(y + at, value.to(y.dtype.element_ty), mask=written)
    tl.atomic_add(escape_counts + index, escapes, mask=escapes > 0, sem="relaxed")


@triton.jit
def _write_escapes(  # type: ignore[no-untyped-def]
    data, jobs, plans, rows, classes, planes, base, y, escape_counts, status
):
    """Check a job's escape list and recompute the values it changes; a *cell* is an entry of the `[R, T]` matrix."""
    index = tl.program_id(0).to(tl.int64)
    job = jobs + index * JOB.FIELDS
    first_plan = tl.load(job + JOB.PLAN)
    count = tl.load(job + JOB.ESCAPE_COUNT)
    if tl.program_id(1) == 0:
        tl.atomic_or(status + index, STATUS.ESCAPES, mask=tl.load(escape_counts + index) != count, sem="relaxed")
    tokens = tl.load(job + JOB.TOKENS)
    stride = tl.load(job + JOB.STRIDE)
    cells = tl.load(plans + tl.load(job + JOB.DEEPEST) * PLAN.FIELDS + PLAN.ROWS) * tokens
    entries = data + tl.load(job + JOB.ESCAPES)
    classes += tl.load(job + JOB.COLUMNS)
    planes += tl.load(job + JOB.PLANES)
    y += tl.load(job + JOB.COEFFICIENTS)
    if base is not None:
        base += tl.load(job + JOB.COEFFICIENTS)
    for block in range(tl.program_id(1).to(tl.int64) * ENTRIES, count, tl.num_programs(1) * ENTRIES):
        entry = block + tl.arange(0, ENTRIES)
        listed = entry < count
        cell = tl.load(entries + entry, mask=listed, other=0).to(tl.int64)
        before = tl.load(entries + entry - 1, mask=listed & (entry > 0), other=0).to(tl.int64)
        valid = listed & ((entry == 0) | (cell > before)) & (cell < cells)
        row = cell // tokens
        column = cell - row * tokens
        # A component that the column does not have is none that may have escaped.
        plan_index = first_plan + tl.load(classes + column, mask=valid, other=0).to(tl.int64)
        plan = plans + plan_index * PLAN.FIELDS
        valid &= row < tl.load(plan + PLAN.ROWS, mask=valid, other=0)
        valid &= tl.load(planes + cell, mask=valid, other=0) == ESCAPE
        wrong = tl.max((listed & (valid == 0)).to(tl.int32), 0)
        tl.atomic_or(status + index, STATUS.ESCAPES, mask=wrong > 0, sem="relaxed")
        component = tl.load(plan + PLAN.ROW, mask=valid, other=0) + row
        shift, low_plane = _low_bits(rows, component, valid)
        y_row = tl.load(rows + component * ROW_FIELDS + Y_ROW, mask=valid, other=0).to(tl.int64)
        d = tl.load(entries + count + entry, mask=valid, other=0).to(tl.int32, bitcast=True)
        low = tl.load(planes + low_plane * tokens + column, mask=valid & (low_plane >= 0), other=0)
        d = (d << shift) + (low.to(tl.int32) - _half(shift))
        shrink_one, shrink_more = _two_floats(rows, component, SHRINK_ONE, valid)
        back = _coefficient(d, shrink_one, shrink_more, _float_of(plan, PLAN.STEP, 0, valid, 0.0))
        at = y_row * stride + column
        if base is not None:
            back += tl.load(base + at, mask=valid, other=0.0)
        tl.store(y + at, back.to(y.dtype.element_ty), mask=valid)


def dequantize(
    data: torch.Tensor,
    coded: PlaneJobs,
    y: torch.Tensor,
    status: torch.Tensor,
    escape_counts: torch.Tensor,
    max_rows: int,
    max_tokens: int,
    depth: int,
    base: torch.Tensor | None = None,
) -> None:
    """Convert byte planes and escapes to coefficients, columns in coding order.

    Of each run of `depth` columns, the rows up to the extent of its first column's class are written, zero where a
    column has no component. The coefficients are those of the reference, rounded to the dtype of `y`. Those of a job
    whose status gets `Status.ESCAPES` are arbitrary.

    Args:
        data: uint8, a multiple of four bytes, which holds the jobs' lists of escapes.
        y: bfloat16 or float32, written.
        status: int32 `[J]`; gets `Status.ESCAPES` where the list does not name all ESCAPE bytes in order.
        escape_counts: int32 `[J]`, zeros; gets the number of ESCAPE bytes.
        max_rows: the largest extent of a plan.
        max_tokens: tokens of the longest job, at most 65,535 * 64.
        depth: MIN_DEPTH, 128 or 256.
        base: float32, coefficients at the same offsets, which are added before rounding; None: nothing is.
    """
    jobs, plans, classes, planes = coded.jobs, coded.plans, coded.classes, coded.planes
    count = len(jobs)
    grid = (count, triton.cdiv(max_rows, _ROWS), triton.cdiv(max_tokens, MIN_DEPTH))
    if grid[1]:
        _dequantize[grid](
            jobs, plans.plans, plans.row_maps, plans.rows, classes, planes, base, y, escape_counts, depth, num_warps=4,
            enable_fp_fusion=False,
        )  # fmt: skip
    _write_escapes[(count, escape_programs(max_rows, max_tokens))](
        data.view(torch.uint32), jobs, plans.plans, plans.rows, classes, planes, base, y, escape_counts, status,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def escape_programs(max_rows: int, max_tokens: int) -> int:
    """Return the programs for a job's escape list: at least one, as the list of a job without rows is checked too."""
    return int(min(triton.cdiv(max(max_rows, 1) * max_tokens, CELLS), MAX_GRID))
