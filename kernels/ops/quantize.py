"""Coefficients to byte planes: quantize, pack, and list the values that escape.

`tests/codec/reference/symbols.py` is the reference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cuvee.codec.format.streams import WINDOW
from cuvee.kernels.jobs import JOB, PLAN, STATUS
from cuvee.kernels.ops.arguments import PlaneJobs
from cuvee.kernels.ops.symbols import (
    DEAD_ZONE,
    ESCAPE,
    ROW_FIELDS,
    SHIFT,
    SHRINK_ONE,
    Y_ROW,
    _coefficient,
    _float_of,
    _half,
    _low_bits,
    _of_row,
    _two_floats,
)

BEYOND = tl.constexpr(float(1 << 30))  # steps; what is larger, or NaN, has no int32 level
_BLOCK_ROWS = 4  # of `quantize`, which goes along the windows
ROWS = tl.constexpr(_BLOCK_ROWS)
COLUMNS = tl.constexpr(WINDOW)


@triton.jit
def _level(y, inverse, dead_zone, rounding):  # type: ignore[no-untyped-def]
    """Return the level of a coefficient, int32; arbitrary for NaN and beyond BEYOND."""
    magnitude = tl.minimum(tl.abs(y) * inverse, BEYOND)
    level = tl.where(magnitude >= dead_zone, tl.floor(magnitude + rounding), 0.0)
    # The sign bit, rather than a comparison and a choice.
    sign = y.to(tl.int32, bitcast=True) & -0x80000000
    return (level.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True).to(tl.int32)


@triton.jit(do_not_specialize=["max_rows"])
def _quantize(  # type: ignore[no-untyped-def]
    y, left, jobs, plans, rows, tables, reach, classes, planes, counts, status, max_rows
):
    index = tl.program_id(0).to(tl.int64)
    job = jobs + index * JOB.FIELDS
    first_plan = tl.load(job + JOB.PLAN).to(tl.int32)
    tokens = tl.load(job + JOB.TOKENS).to(tl.int32)
    stride = tl.load(job + JOB.STRIDE).to(tl.int32)
    classes += tl.load(job + JOB.COLUMNS)
    planes += tl.load(job + JOB.PLANES)
    y += tl.load(job + JOB.COEFFICIENTS)
    if left is not None:
        left += tl.load(job + JOB.COEFFICIENTS)
    first_row = tl.program_id(1) * ROWS
    row = first_row + tl.arange(0, ROWS)[:, None]
    count = tl.zeros((ROWS, COLUMNS), tl.int32)
    large = tl.zeros((ROWS, COLUMNS), tl.int32)
    for start in range(0, tokens, COLUMNS):
        finest = tl.load(classes + start).to(tl.int64)  # of a window
        if first_row < tl.load(plans + (first_plan + finest) * PLAN.FIELDS + PLAN.ROWS):
            column = start + tl.arange(0, COLUMNS)[None, :]
            inside = column < tokens
            plan_index = first_plan + tl.load(classes + column, mask=inside, other=0).to(tl.int32)
            plan = plans + plan_index * PLAN.FIELDS
            present = inside & (row < tl.load(plan + PLAN.ROWS).to(tl.int32))
            component = tl.load(plan + PLAN.ROW).to(tl.int32) + row
            dead_zone, rounding = _two_floats(rows, component, DEAD_ZONE, present)
            shift, low_plane = _low_bits(rows, component, present)
            y_row = tl.load(rows + component * ROW_FIELDS + Y_ROW, mask=present, other=0)
            table = _of_row(tables, plan, PLAN.TABLES, row, present, 0)
            at = y_row.to(tl.int64) * stride + column
            value = tl.load(y + at, mask=present, other=0.0)
            level = _level(value, _float_of(plan, PLAN.STEP, 1), dead_zone, rounding)
            if left is not None:
                shrink_one, shrink_more = _two_floats(rows, component, SHRINK_ONE, present)
                coded = _coefficient(level, shrink_one, shrink_more, _float_of(plan, PLAN.STEP))
                tl.store(left + at, value - coded, mask=present)
            d = level + _half(shift)
            # Not `>=`: NaN is too large as well.
            large |= ((tl.abs(value) < _float_of(plan, PLAN.LIMIT)) == 0).to(tl.int32)
            high = d >> shift
            least, greatest = tl.load(reach + 2 * table), tl.load(reach + 2 * table + 1)
            escaped = present & (((high >= least) & (high <= greatest)) == 0)
            count += escaped.to(tl.int32)
            high_row = planes + row.to(tl.int64) * tokens
            tl.store(high_row + column, tl.where(escaped, ESCAPE, high).to(tl.uint8), mask=present)
            low_row = planes + low_plane.to(tl.int64) * tokens
            tl.store(low_row + column, (d & ((1 << shift) - 1)).to(tl.uint8), mask=present & (low_plane >= 0))
    slot = first_row + tl.arange(0, ROWS)
    tl.store(counts + index * max_rows + slot, tl.sum(count, 1), mask=slot < max_rows)
    tl.atomic_or(status + index, STATUS.TOO_LARGE, mask=tl.max(tl.max(large, 1), 0) > 0, sem="relaxed")


def quantize(
    y: torch.Tensor,
    coded: PlaneJobs,
    reach: torch.Tensor,
    counts: torch.Tensor,
    status: torch.Tensor,
    max_rows: int,
    left: torch.Tensor | None = None,
) -> None:
    """Convert coefficients to byte planes and count the escapes of each row; the bytes are those of the reference.

    Planes and counts of a job whose status gets `Status.TOO_LARGE` mean nothing. Below a column's last plane nothing
    is written.

    Args:
        y: float32, columns in coding order.
        reach: int32 `[K, 2]`, the least and the greatest value that each table codes: `EntropyTables.reach`.
        coded: its planes are written.
        counts: int32 `[J, max_rows]`, written; zero where a job has no row.
        status: int32 `[J]`; gets `Status.TOO_LARGE` where a coefficient is `MAX_LEVEL` steps or more, or NaN.
        max_rows: rows of the largest job.
        left: float32; gets, at the offsets of the coefficients, what their planes leave over. or None.
    """
    plans = coded.plans
    _quantize[(len(coded.jobs), triton.cdiv(max_rows, _BLOCK_ROWS))](
        y, left, coded.jobs, plans.plans, plans.rows, plans.tables, reach, coded.classes, coded.planes, counts, status,
        max_rows, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def _has_escapes(starts, job, first_row, max_rows, total):  # type: ignore[no-untyped-def]
    """Return whether ROWS rows of a job have escapes: most have none, and their program can end early."""
    first = job * max_rows + first_row
    after = job * max_rows + tl.minimum(first_row + ROWS, max_rows)
    last = after == tl.num_programs(0).to(tl.int64) * max_rows
    end = tl.where(last, total, tl.load(starts + after, mask=last == 0, other=0))
    return end > tl.load(starts + first)


@triton.jit(do_not_specialize=["total", "max_rows"])
def _list_escapes(  # type: ignore[no-untyped-def]
    y, jobs, plans, rows, classes, planes, starts, index, value, total, max_rows
):
    number = tl.program_id(0).to(tl.int64)
    job = jobs + number * JOB.FIELDS
    first_plan = tl.load(job + JOB.PLAN)
    if not _has_escapes(starts, number, tl.program_id(1) * ROWS, max_rows, total):
        return
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    exists = row < tl.load(plans + tl.load(job + JOB.DEEPEST) * PLAN.FIELDS + PLAN.ROWS)
    slot = number * max_rows + row
    position = tl.load(starts + slot, mask=exists, other=0)
    last = slot + 1 == tl.num_programs(0).to(tl.int64) * max_rows
    end = tl.where(last, total, tl.load(starts + slot + 1, mask=exists & (last == 0), other=0))
    has = exists & (end > position)
    tokens = tl.load(job + JOB.TOKENS).to(tl.int32)
    stride = tl.load(job + JOB.STRIDE)
    classes += tl.load(job + JOB.COLUMNS)
    planes += tl.load(job + JOB.PLANES)
    y += tl.load(job + JOB.COEFFICIENTS)
    first_cell = row.to(tl.int64)[:, None] * tokens
    for start in range(0, tokens, COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, :]
        inside = column < tokens
        plan_index = first_plan + tl.load(classes + column, mask=inside, other=0).to(tl.int64)
        plan = plans + plan_index * PLAN.FIELDS
        present = has[:, None] & inside & (row[:, None] < tl.load(plan + PLAN.ROWS))
        escaped = tl.load(planes + first_cell + column, mask=present, other=0) == ESCAPE
        marks = escaped.to(tl.int32)
        if tl.max(tl.max(marks, 1), 0) > 0:
            # So few that each looks up its own component.
            component = tl.load(plan + PLAN.ROW) + row[:, None]
            dead_zone, rounding = _two_floats(rows, component, DEAD_ZONE, escaped)
            ints = rows + component * ROW_FIELDS
            shift = tl.load(ints + SHIFT, mask=escaped, other=0)
            y_row = tl.load(ints + Y_ROW, mask=escaped, other=0)
            coefficient = tl.load(y + y_row * stride + column, mask=escaped, other=0.0)
            d = _level(coefficient, _float_of(plan, PLAN.STEP, 1), dead_zone, rounding) + _half(shift)
            at = position[:, None] + tl.cumsum(marks, 1) - 1
            escaped &= at < total
            tl.store(index + at, (first_cell + column).to(tl.uint32), mask=escaped)
            tl.store(value + at, d >> shift, mask=escaped)
            position += tl.sum(marks, 1)


def list_escapes(
    y: torch.Tensor,
    coded: PlaneJobs,
    starts: torch.Tensor,
    index: torch.Tensor,
    value: torch.Tensor,
    max_rows: int,
) -> None:
    """List the escapes of all jobs, job by job, each in rising order, given what `quantize` had and wrote.

    `starts`, int64 `[J, max_rows]`, says where a row's escapes begin: the sum of all counts before it. `index`, uint32
    `[E]`, gets row * T + column, and `value`, int32 `[E]`, the number in place of the ESCAPE byte.
    """
    total, plans = len(index), coded.plans
    if total:
        _list_escapes[(len(coded.jobs), triton.cdiv(max_rows, _BLOCK_ROWS))](
            y, coded.jobs, plans.plans, plans.rows, coded.classes, coded.planes, starts, index, value, total, max_rows,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
