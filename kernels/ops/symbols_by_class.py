"""Byte planes to coefficients and back for tokens that have classes: `codec/stages/reference/symbols_by_class.py`.

Columns are sorted by class within windows, and each class has components, shifts, tables and a step of its own. Every
value looks up those of its class: the columns of a warp are of one class or two, so that what its lanes read lies side
by side. Passes over the classes of a tile, which would load parameters once per row, take two to three times as many
instructions.

Decoding goes by rows of coefficients: all classes of a block of a basis begin at the same row, so a row may hold a
different component in each class, or none, and is zero there. Encoding goes by components, whose planes, counts and
escapes it writes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cuvee.codec.format.streams import WINDOW
from cuvee.kernels.jobs import (
    JOB_CLASS_PLAN,
    JOB_COLUMNS,
    JOB_ESCAPE_COUNT,
    JOB_ESCAPES,
    JOB_FIELDS,
    JOB_LEVELS,
    JOB_PLAN,
    JOB_PLANES,
    JOB_STRIDE,
    JOB_TOKENS,
    PLAN_EXTENT,
    PLAN_FIELDS,
    PLAN_ROW,
    PLAN_ROW_MAP,
    PLAN_ROWS,
    PLAN_TABLES,
    STATUS_ESCAPES,
    STATUS_TOO_LARGE,
)
from cuvee.kernels.ops.arguments import CodableBytes, DevicePlans
from cuvee.kernels.ops.dequantize import ENTRIES, _coefficient, _signed, escape_programs
from cuvee.kernels.ops.pages import rounded
from cuvee.kernels.ops.quantize import _has_escapes, _level, _within
from cuvee.kernels.ops.symbols import DEAD_ZONE, ESCAPE, FLOAT_FIELDS, INT_FIELDS, SHIFT, SHRINK_ONE, Y_ROW, _half

NO_LOW_BITS = tl.constexpr(-1 << 32)  # a shift of 0 and plane -1, as `_two` reads them

_ROWS = 16  # tile of `dequantize_classes`
MIN_DEPTH = 64  # columns
_BLOCK_ROWS = 4  # of `quantize_classes`, which goes along the windows


@triton.jit
def _two(array, at, mask, other):  # type: ignore[no-untyped-def]
    """Two neighbors of four bytes, from an even place on, in one load: their bits, int32. `other` is int64."""
    both = tl.load((array + at).to(tl.pointer_type(tl.int64)), mask=mask, other=other)
    return both.to(tl.int32), (both >> 32).to(tl.int32)


@triton.jit
def _shrinkage(row_floats, component, mask):  # type: ignore[no-untyped-def]
    """Return `dequantize._shrinkage` for parameters that every value looks up."""
    one, more = _two(row_floats, component * FLOAT_FIELDS + SHRINK_ONE, mask, 0)
    return one.to(tl.float32, bitcast=True), more.to(tl.float32, bitcast=True)


@triton.jit
def _thresholds(row_floats, component, mask):  # type: ignore[no-untyped-def]
    """Return `quantize._thresholds` for parameters that every value looks up."""
    dead_zone, rounding = _two(row_floats, component * FLOAT_FIELDS + DEAD_ZONE, mask, 0)
    return dead_zone.to(tl.float32, bitcast=True), rounding.to(tl.float32, bitcast=True)


@triton.jit
def _low_bits(row_ints, component, mask):  # type: ignore[no-untyped-def]
    """Return `symbols._low_bits` for parameters that every value looks up."""
    return _two(row_ints, component * INT_FIELDS + SHIFT, mask, NO_LOW_BITS)


@triton.jit
def _of_row(arrays, plan, FIELD: tl.constexpr, row, exists, other):  # type: ignore[no-untyped-def]
    """What an array holds of each value's row, from where its class's plan says."""
    # That rows are adjacent there must not turn the tile, as all else lies along the columns.
    at = tl.max_contiguous(tl.load(plan + FIELD).to(tl.int32) + row, (1, 1))
    return tl.load(arrays + at, mask=exists, other=other)


@triton.jit(do_not_specialize=["depth"])
def _dequantize_classes(  # type: ignore[no-untyped-def]
    jobs, plans, row_maps, row_floats, row_ints, steps, classes, planes, y, found, depth,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    job = jobs + index * JOB_FIELDS
    class_plan = tl.load(job + JOB_CLASS_PLAN).to(tl.int32)
    start = tl.program_id(2) * COLUMNS
    tokens = tl.load(job + JOB_TOKENS).to(tl.int32)
    if (class_plan <= 0) | (start >= tokens):
        return
    classes += tl.load(job + JOB_COLUMNS)
    finest = tl.load(classes + start // depth * depth).to(tl.int32)
    extent = tl.load(plans + (class_plan + finest) * PLAN_FIELDS + PLAN_EXTENT).to(tl.int32)
    if tl.program_id(1) * ROWS >= extent:
        return
    stride = tl.load(job + JOB_STRIDE).to(tl.int32)
    planes += tl.load(job + JOB_PLANES)
    y += tl.load(job + JOB_LEVELS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    column = start + tl.arange(0, COLUMNS)[None, :]
    inside = column < tokens
    plan_index = class_plan + tl.load(classes + column, mask=inside, other=0).to(tl.int32)
    plan = plans + plan_index * PLAN_FIELDS
    component = _of_row(row_maps, plan, PLAN_ROW_MAP, row, inside & (row < extent), -1)
    exists = component >= 0
    at_row = tl.load(plan + PLAN_ROW).to(tl.int32) + component
    shrink_one, shrink_more = _shrinkage(row_floats, at_row, exists)
    shift, low_plane = _low_bits(row_ints, at_row, exists)
    half = _half(shift)
    d = _signed(tl.load(planes + component.to(tl.int64) * tokens + column, mask=exists, other=0))
    # 1 for -128, 0 for every other signed byte: cheaper than a comparison.
    escapes = tl.sum(d * d >> 14)
    low_row = planes + low_plane.to(tl.int64) * tokens
    low = tl.load(low_row + column, mask=exists & (low_plane >= 0), other=half.to(tl.uint8))
    d = (d << shift) + (low.to(tl.int32) - half)
    out = y + row.to(tl.int64) * stride + column
    written = (row < extent) & (column < stride)
    value = _coefficient(d, shrink_one, shrink_more, tl.load(steps + plan_index))
    tl.store(out, rounded(value, y.dtype.element_ty), mask=written)
    tl.atomic_add(found + index, escapes, mask=escapes > 0, sem="relaxed")


@triton.jit
def _place_escapes_classes(  # type: ignore[no-untyped-def]
    data, jobs, plans, row_floats, row_ints, steps, classes, planes, y, found, status, ENTRIES: tl.constexpr
):
    """Check a job's escape list and recompute the values it changes; a *cell* is a place of the `[R, T]` matrix."""
    index = tl.program_id(0).to(tl.int64)
    job = jobs + index * JOB_FIELDS
    class_plan = tl.load(job + JOB_CLASS_PLAN)
    if class_plan <= 0:
        return
    count = tl.load(job + JOB_ESCAPE_COUNT)
    if tl.program_id(1) == 0:
        tl.atomic_or(status + index, STATUS_ESCAPES, mask=tl.load(found + index) != count, sem="relaxed")
    tokens = tl.load(job + JOB_TOKENS)
    stride = tl.load(job + JOB_STRIDE)
    cells = tl.load(plans + tl.load(job + JOB_PLAN) * PLAN_FIELDS + PLAN_ROWS) * tokens
    entries = data + tl.load(job + JOB_ESCAPES)
    classes += tl.load(job + JOB_COLUMNS)
    planes += tl.load(job + JOB_PLANES)
    y += tl.load(job + JOB_LEVELS)
    for block in range(tl.program_id(1).to(tl.int64) * ENTRIES, count, tl.num_programs(1) * ENTRIES):
        entry = block + tl.arange(0, ENTRIES)
        listed = entry < count
        cell = tl.load(entries + entry, mask=listed, other=0).to(tl.int64)
        before = tl.load(entries + entry - 1, mask=listed & (entry > 0), other=0).to(tl.int64)
        valid = listed & ((entry == 0) | (cell > before)) & (cell < cells)
        row = cell // tokens
        column = cell - row * tokens
        # A component that the column does not have is none that may have escaped.
        plan_index = class_plan + tl.load(classes + column, mask=valid, other=0).to(tl.int64)
        plan = plans + plan_index * PLAN_FIELDS
        valid &= row < tl.load(plan + PLAN_ROWS, mask=valid, other=0)
        valid &= tl.load(planes + cell, mask=valid, other=0) == ESCAPE
        wrong = tl.max((listed & (valid == 0)).to(tl.int32), 0)
        tl.atomic_or(status + index, STATUS_ESCAPES, mask=wrong > 0, sem="relaxed")
        component = tl.load(plan + PLAN_ROW, mask=valid, other=0) + row
        shift, low_plane = _low_bits(row_ints, component, valid)
        y_row = tl.load(row_ints + component * INT_FIELDS + Y_ROW, mask=valid, other=0).to(tl.int64)
        d = tl.load(entries + count + entry, mask=valid, other=0).to(tl.int32, bitcast=True)
        low = tl.load(planes + low_plane * tokens + column, mask=valid & (low_plane >= 0), other=0)
        d = (d << shift) + (low.to(tl.int32) - _half(shift))
        out = y + y_row * stride + column
        shrink_one, shrink_more = _shrinkage(row_floats, component, valid)
        back = _coefficient(d, shrink_one, shrink_more, tl.load(steps + plan_index, mask=valid, other=0.0))
        tl.store(out, rounded(back, y.dtype.element_ty), mask=valid)


def dequantize_classes(
    data: torch.Tensor,
    jobs: torch.Tensor,
    plans: DevicePlans,
    row_maps: torch.Tensor,
    classes: torch.Tensor,
    planes: torch.Tensor,
    y: torch.Tensor,
    status: torch.Tensor,
    found: torch.Tensor,
    max_rows: int,
    max_tokens: int,
    depth: int,
) -> None:
    """Convert byte planes and escapes to coefficients, for jobs whose tokens have classes; columns in coding order.

    Of each run of `depth` columns, the rows up to the extent of its first column's class are written, zero where a
    column has no component. The coefficients are those of `codec/stages/reference/symbols_by_class.py`, rounded to the
    dtype of `y`. Those of a job whose status gets `Status.ESCAPES` are arbitrary.

    Args:
        data: as for `dequantize.dequantize`.
        jobs: likewise; CLASS_PLAN and COLUMNS are read too. PLAN is the plan of the finest class that occurs.
        plans: how each class is coded; components, planes and extent never rise with the class.
        row_maps: int32, from PlanField.ROW_MAP on the component of each row of coefficients, or -1.
        classes: uint8 below 16: `TokenOrder.classes`.
        planes: as for `dequantize.dequantize`.
        y: likewise.
        status: likewise.
        found: likewise.
        max_rows: the largest extent of a plan.
        max_tokens: tokens of the longest job, at most 65,535 * 64.
        depth: MIN_DEPTH, 128 or 256.
    """
    count = len(jobs)
    grid = (count, triton.cdiv(max_rows, _ROWS), triton.cdiv(max_tokens, MIN_DEPTH))
    if grid[1]:
        _dequantize_classes[grid](
            jobs, plans.plans, row_maps, plans.row_floats, plans.row_ints, plans.steps, classes, planes, y, found,
            depth, ROWS=_ROWS, COLUMNS=MIN_DEPTH, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    _place_escapes_classes[(count, escape_programs(max_rows, max_tokens))](
        data.view(torch.uint32), jobs, plans.plans, plans.row_floats, plans.row_ints, plans.steps, classes, planes, y,
        found, status, ENTRIES=ENTRIES, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["max_rows"])
def _quantize_classes(  # type: ignore[no-untyped-def]
    y, jobs, plans, row_floats, row_ints, inverses, limits, tables, freq, reach, classes, planes, counts, status,
    max_rows, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    job = jobs + index * JOB_FIELDS
    class_plan = tl.load(job + JOB_CLASS_PLAN).to(tl.int32)
    if class_plan <= 0:
        return
    tokens = tl.load(job + JOB_TOKENS).to(tl.int32)
    stride = tl.load(job + JOB_STRIDE).to(tl.int32)
    classes += tl.load(job + JOB_COLUMNS)
    planes += tl.load(job + JOB_PLANES)
    y += tl.load(job + JOB_LEVELS)
    first_row = tl.program_id(1) * ROWS
    row = first_row + tl.arange(0, ROWS)[:, None]
    count = tl.zeros((ROWS, COLUMNS), tl.int32)
    large = tl.zeros((ROWS, COLUMNS), tl.int32)
    for start in range(0, tokens, COLUMNS):
        finest = tl.load(classes + start).to(tl.int64)  # of a window
        if first_row < tl.load(plans + (class_plan + finest) * PLAN_FIELDS + PLAN_ROWS):
            column = start + tl.arange(0, COLUMNS)[None, :]
            inside = column < tokens
            plan_index = class_plan + tl.load(classes + column, mask=inside, other=0).to(tl.int32)
            plan = plans + plan_index * PLAN_FIELDS
            own = inside & (row < tl.load(plan + PLAN_ROWS).to(tl.int32))
            component = tl.load(plan + PLAN_ROW).to(tl.int32) + row
            dead_zone, rounding = _thresholds(row_floats, component, own)
            shift, low_plane = _low_bits(row_ints, component, own)
            y_row = tl.load(row_ints + component * INT_FIELDS + Y_ROW, mask=own, other=0)
            table = _of_row(tables, plan, PLAN_TABLES, row, own, 0)
            value = tl.load(y + y_row.to(tl.int64) * stride + column, mask=own, other=0.0)
            d = _level(value, tl.load(inverses + plan_index), dead_zone, rounding) + _half(shift)
            # Not `>=`: NaN is too large as well.
            large |= ((tl.abs(value) < tl.load(limits + plan_index)) == 0).to(tl.int32)
            high = d >> shift
            escaped = own & (_within(high, table, freq, reach, own) == 0)
            count += escaped.to(tl.int32)
            high_row = planes + row.to(tl.int64) * tokens
            tl.store(high_row + column, tl.where(escaped, ESCAPE, high).to(tl.uint8), mask=own)
            low_row = planes + low_plane.to(tl.int64) * tokens
            tl.store(low_row + column, (d & ((1 << shift) - 1)).to(tl.uint8), mask=own & (low_plane >= 0))
    slot = first_row + tl.arange(0, ROWS)
    tl.store(counts + index * max_rows + slot, tl.sum(count, 1), mask=slot < max_rows)
    tl.atomic_or(status + index, STATUS_TOO_LARGE, mask=tl.max(tl.max(large, 1), 0) > 0, sem="relaxed")


def quantize_classes(
    y: torch.Tensor,
    jobs: torch.Tensor,
    plans: DevicePlans,
    codable: CodableBytes,
    classes: torch.Tensor,
    planes: torch.Tensor,
    counts: torch.Tensor,
    status: torch.Tensor,
    max_rows: int,
) -> None:
    """Convert coefficients of jobs whose tokens have classes to byte planes; the bytes are those of the reference.

    Planes and counts of a job whose status gets `Status.TOO_LARGE` mean nothing. Below a column's last plane nothing
    is written.

    Args:
        y: float32, columns in coding order.
        jobs: int64 `[J, len(JobField)]` with TOKENS, PLAN, PLANES, LEVELS, STRIDE, CLASS_PLAN and COLUMNS.
        plans: as for `dequantize_classes`.
        codable: as for `quantize.quantize`.
        classes: as for `dequantize_classes`.
        planes: uint8; gets `[P, T]` of each job.
        counts: as for `quantize.quantize`; the rows of jobs whose tokens have classes are written.
        status: as for `quantize.quantize`.
        max_rows: rows of the largest job.
    """
    _quantize_classes[(len(jobs), triton.cdiv(max_rows, _BLOCK_ROWS))](
        y, jobs, plans.plans, plans.row_floats, plans.row_ints, plans.inverses, plans.limits, plans.tables,
        codable.freq, codable.reach, classes, planes, counts, status, max_rows, ROWS=_BLOCK_ROWS, COLUMNS=WINDOW,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["total", "max_rows"])
def _list_escapes_classes(  # type: ignore[no-untyped-def]
    y, jobs, plans, row_floats, row_ints, inverses, classes, planes, starts, index, value, total, max_rows,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0).to(tl.int64)
    job = jobs + number * JOB_FIELDS
    class_plan = tl.load(job + JOB_CLASS_PLAN)
    if class_plan <= 0:
        return
    if not _has_escapes(starts, number, tl.program_id(1) * ROWS, max_rows, total, ROWS):
        return
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    exists = row < tl.load(plans + tl.load(job + JOB_PLAN) * PLAN_FIELDS + PLAN_ROWS)
    slot = number * max_rows + row
    position = tl.load(starts + slot, mask=exists, other=0)
    last = slot + 1 == tl.num_programs(0).to(tl.int64) * max_rows
    end = tl.where(last, total, tl.load(starts + slot + 1, mask=exists & (last == 0), other=0))
    has = exists & (end > position)
    tokens = tl.load(job + JOB_TOKENS).to(tl.int32)
    stride = tl.load(job + JOB_STRIDE)
    classes += tl.load(job + JOB_COLUMNS)
    planes += tl.load(job + JOB_PLANES)
    y += tl.load(job + JOB_LEVELS)
    first_cell = row.to(tl.int64)[:, None] * tokens
    for start in range(0, tokens, COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, :]
        inside = column < tokens
        plan_index = class_plan + tl.load(classes + column, mask=inside, other=0).to(tl.int64)
        plan = plans + plan_index * PLAN_FIELDS
        own = has[:, None] & inside & (row[:, None] < tl.load(plan + PLAN_ROWS))
        byte = tl.load(planes + first_cell + column, mask=own, other=0)
        escaped = byte == ESCAPE
        marks = escaped.to(tl.int32)
        if tl.max(tl.max(marks, 1), 0) > 0:
            # So few that each looks up its own component.
            component = tl.load(plan + PLAN_ROW) + row[:, None]
            dead_zone, rounding = _thresholds(row_floats, component, escaped)
            ints = row_ints + component * INT_FIELDS
            shift = tl.load(ints + SHIFT, mask=escaped, other=0)
            y_row = tl.load(ints + Y_ROW, mask=escaped, other=0)
            found = tl.load(y + y_row * stride + column, mask=escaped, other=0.0)
            d = _level(found, tl.load(inverses + plan_index), dead_zone, rounding) + _half(shift)
            at = position[:, None] + tl.cumsum(marks, 1) - 1
            escaped &= at < total
            tl.store(index + at, (first_cell + column).to(tl.uint32), mask=escaped)
            tl.store(value + at, d >> shift, mask=escaped)
            position += tl.sum(marks, 1)


def list_escapes_classes(
    y: torch.Tensor,
    jobs: torch.Tensor,
    plans: DevicePlans,
    classes: torch.Tensor,
    planes: torch.Tensor,
    starts: torch.Tensor,
    index: torch.Tensor,
    value: torch.Tensor,
    max_rows: int,
) -> None:
    """List the escapes of jobs whose tokens have classes, each job's in rising order; see `quantize.list_escapes`.

    Args:
        y: as for `quantize_classes`.
        jobs: likewise.
        plans: likewise.
        classes: likewise.
        planes: as `quantize_classes` wrote them.
        starts: int64 `[J, max_rows]`: where a row's escapes begin, the sum of all counts before it.
        index: uint32 `[E]`; gets row * T + column.
        value: int32 `[E]`; gets the number in place of the ESCAPE byte.
        max_rows: rows of the largest job.
    """
    total = len(index)
    if total:
        _list_escapes_classes[(len(jobs), triton.cdiv(max_rows, _BLOCK_ROWS))](
            y, jobs, plans.plans, plans.row_floats, plans.row_ints, plans.inverses, classes, planes, starts,
            index, value, total, max_rows, ROWS=_BLOCK_ROWS, COLUMNS=WINDOW, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
