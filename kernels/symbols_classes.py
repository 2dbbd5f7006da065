"""Byte planes to coefficients and back for tokens that have classes: `codec/symbols_classes.py`.

Columns are sorted by class within windows, and each class has components, shifts, tables and a step of its own. A tile
is `[ROWS, GROUPS, RUN]`: rows, groups of columns, adjacent columns of a group, a thread's. Of a group nearly always one
class is there, at times two: the kernels go through the classes of each group one after the other, all groups at the
same time, and take of each what is its columns'. So the parameters are those of a group, as without classes.

    group      0          1          2          3
    classes    5 5 5 5    5 5 7 7    7 7 7 7    7 7 7 8
    first      5 5 5 5    5 5        7 7 7 7    7 7 7
    then                      7 7                     8

Decoding goes by the rows of coefficients, which hold the components of all classes of a block of a basis from one row
on: some are another component in every class, or none, and are zero there. Encoding goes by components, whose planes,
counts and escapes it writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from cuvee.codec import symbols as codec
from cuvee.codec.classes import CLASSES, WINDOW
from cuvee.codec.errors import CorruptError
from cuvee.codec.symbols import Escapes
from cuvee.codec.symbols_classes import class_runs
from cuvee.codec.tables import EntropyTables
from cuvee.kernels import symbols
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
    PLAN_FIRST,
    PLAN_ROW,
    PLAN_ROW_MAP,
    PLAN_ROWS,
    STATUS_ESCAPES,
    STATUS_TOO_LARGE,
    Job,
    Plan,
    Status,
)
from cuvee.kernels.pages import rounded
from cuvee.kernels.spec import Budget, KernelSpec
from cuvee.kernels.symbols import (
    CELLS,
    DEAD_ZONE,
    ENTRIES,
    ESCAPE,
    FLOAT_FIELDS,
    INT_FIELDS,
    LOW_PLANE,
    MAX_GRID,
    ROUNDING,
    SHIFT,
    SHRINK_MORE,
    SHRINK_ONE,
    Y_ROW,
    _coefficient,
    _half,
    _host,
    _level,
    _signed,
)

NO_CLASS = tl.constexpr(CLASSES)  # after the last

_ROWS, _GROUPS, _RUN = 16, 8, 8  # tile of `dequantize_classes`
MIN_DEPTH = _GROUPS * _RUN  # columns
_BLOCK_ROWS = 4  # of `quantize_classes`, which goes along the windows


@triton.jit
def _next_class(k, after):  # type: ignore[no-untyped-def]
    """The least class of each group `[1, GROUPS, RUN]` above `after` `[1, GROUPS, 1]`, or NO_CLASS."""
    return tl.min(tl.where(k > after, k, NO_CLASS), 2, keep_dims=True)


@triton.jit
def _any_left(k):  # type: ignore[no-untyped-def]
    """Whether a group has a class."""
    return tl.min(tl.min(tl.min(k, 2), 1), 0) < NO_CLASS


@triton.jit
def _dequantize_tile(  # type: ignore[no-untyped-def]
    job, class_plan, plans, row_maps, row_floats, row_ints, steps, classes, planes, y, found, start, row, extent,
    ALIGNED: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    tokens = tl.load(job + JOB_TOKENS).to(tl.int32)
    stride = tl.load(job + JOB_STRIDE).to(tl.int32)
    planes_at = tl.load(job + JOB_PLANES)
    y_at = tl.load(job + JOB_LEVELS)
    if ALIGNED:
        # They are multiples of RUN: so the compiler knows it too.
        tokens = tokens // RUN * RUN
        stride = stride // RUN * RUN
        planes_at = planes_at // RUN * RUN
        y_at = y_at // RUN * RUN
    column = start + tl.arange(0, GROUPS)[None, :, None] * RUN + tl.arange(0, RUN)[None, None, :]
    inside = column < tokens
    k_of = tl.load(classes + tl.load(job + JOB_COLUMNS) + column, mask=inside, other=NO_CLASS).to(tl.int32)
    values = tl.zeros((ROWS, GROUPS, RUN), tl.float32)
    escapes = tl.zeros((ROWS, GROUPS), tl.int32)
    k = _next_class(k_of, -1)
    while _any_left(k):
        served = k < NO_CLASS
        plan_index = class_plan + tl.where(served, k, 0)
        plan = plans + plan_index * PLAN_FIELDS
        component = tl.load(row_maps + tl.load(plan + PLAN_ROW_MAP) + row, mask=served & (row < extent), other=-1)
        exists = component >= 0
        at_row = tl.load(plan + PLAN_ROW) + component
        floats = row_floats + at_row * FLOAT_FIELDS
        shrink_one = tl.load(floats + SHRINK_ONE, mask=exists, other=0.0)
        shrink_more = tl.load(floats + SHRINK_MORE, mask=exists, other=0.0)
        ints = row_ints + at_row * INT_FIELDS
        shift = tl.load(ints + SHIFT, mask=exists, other=0)
        low_plane = tl.load(ints + LOW_PLANE, mask=exists, other=-1)
        half = _half(shift)
        # What another class has in this plane is read too, so that a group's bytes are one load.
        high_row = planes + (planes_at + component.to(tl.int64) * tokens)
        d = _signed(tl.load(high_row + column, mask=inside & exists, other=0))
        low_row = planes + (planes_at + low_plane.to(tl.int64) * tokens)
        low = tl.load(low_row + column, mask=inside & (low_plane >= 0), other=half.to(tl.uint8))
        own = k_of == k
        # 1 for -128, 0 for every other signed byte: cheaper than a comparison.
        escapes += tl.sum(tl.where(own, d * d >> 14, 0), 2)
        d = (d << shift) + (low.to(tl.int32) - half)
        step = tl.load(steps + plan_index)
        values = tl.where(own, _coefficient(d, shrink_one, shrink_more, step), values)
        k = _next_class(k_of, k)
    out = y + (y_at + row.to(tl.int64) * stride) + column
    tl.store(out, rounded(values, y.dtype.element_ty), mask=(row < extent) & (column < stride))
    count = tl.sum(escapes, 1)
    tl.atomic_add(found + tl.zeros((ROWS,), tl.int32), count, mask=count > 0, sem="relaxed")


@triton.jit(do_not_specialize=["depth"])
def _dequantize_classes(  # type: ignore[no-untyped-def]
    jobs, plans, row_maps, row_floats, row_ints, steps, classes, planes, y, found, depth,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    job = jobs + index * JOB_FIELDS
    class_plan = tl.load(job + JOB_CLASS_PLAN)
    start = tl.program_id(2) * GROUPS * RUN
    if (class_plan <= 0) | (start >= tl.load(job + JOB_TOKENS)):
        return
    finest = tl.load(classes + tl.load(job + JOB_COLUMNS) + start // depth * depth).to(tl.int32)
    extent = tl.load(plans + (class_plan + finest) * PLAN_FIELDS + PLAN_EXTENT).to(tl.int32)
    first_row = tl.program_id(1) * ROWS
    if first_row < extent:
        row = first_row + tl.arange(0, ROWS)[:, None, None]
        sizes = tl.load(job + JOB_TOKENS) | tl.load(job + JOB_STRIDE)
        offsets = tl.load(job + JOB_PLANES) | tl.load(job + JOB_LEVELS)
        if (sizes | offsets) % RUN == 0:
            _dequantize_tile(
                job, class_plan, plans, row_maps, row_floats, row_ints, steps, classes, planes, y, found + index,
                start, row, extent, True, ROWS, GROUPS, RUN,
            )  # fmt: skip
        else:
            _dequantize_tile(
                job, class_plan, plans, row_maps, row_floats, row_ints, steps, classes, planes, y, found + index,
                start, row, extent, False, ROWS, GROUPS, RUN,
            )  # fmt: skip


@triton.jit
def _place_escapes_classes(  # type: ignore[no-untyped-def]
    data, jobs, plans, row_floats, row_ints, steps, classes, planes, y, found, status, ENTRIES: tl.constexpr
):
    """Check a job's escape list and redo the values it changes; a *cell* is a place of the `[R, T]` matrix."""
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
        floats = row_floats + component * FLOAT_FIELDS
        shrink_one = tl.load(floats + SHRINK_ONE, mask=valid, other=0.0)
        shrink_more = tl.load(floats + SHRINK_MORE, mask=valid, other=0.0)
        ints = row_ints + component * INT_FIELDS
        shift = tl.load(ints + SHIFT, mask=valid, other=0)
        low_plane = tl.load(ints + LOW_PLANE, mask=valid, other=-1).to(tl.int64)
        y_row = tl.load(ints + Y_ROW, mask=valid, other=0).to(tl.int64)
        d = tl.load(entries + count + entry, mask=valid, other=0).to(tl.int32, bitcast=True)
        low = tl.load(planes + low_plane * tokens + column, mask=valid & (low_plane >= 0), other=0)
        d = (d << shift) + (low.to(tl.int32) - _half(shift))
        back = _coefficient(d, shrink_one, shrink_more, tl.load(steps + plan_index, mask=valid, other=0.0))
        tl.store(y + y_row * stride + column, rounded(back, y.dtype.element_ty), mask=valid)


def dequantize_classes(
    data: torch.Tensor,
    jobs: torch.Tensor,
    plans: torch.Tensor,
    row_maps: torch.Tensor,
    row_floats: torch.Tensor,
    row_ints: torch.Tensor,
    steps: torch.Tensor,
    classes: torch.Tensor,
    planes: torch.Tensor,
    y: torch.Tensor,
    status: torch.Tensor,
    found: torch.Tensor,
    max_rows: int,
    max_tokens: int,
    depth: int,
) -> None:
    """Byte planes and escapes to coefficients, of the jobs whose tokens have classes, columns in coding order.

    Of each run of `depth` columns the rows up to the extent of its first column's class are written, zero where a
    column has no component. The coefficients are those of `codec.symbols_classes`, rounded to the dtype of `y`. Those
    of a job whose status gets `Status.ESCAPES` mean nothing.

    Args:
        data: as for `symbols.dequantize`.
        jobs: likewise; read are also CLASS_PLAN and COLUMNS. PLAN is the plan of the finest class that occurs.
        plans: int64 `[Q, len(Plan)]`; components, planes and extent do not rise with the class.
        row_maps: int32, from Plan.ROW_MAP on the component of each row of coefficients, or -1.
        row_floats: as for `symbols.dequantize`.
        row_ints: int32 `[components, 4]`: shift, plane of the low bits or -1, nothing, row of coefficients.
        steps: as for `symbols.dequantize`.
        classes: uint8 below 16, at `Job.COLUMNS` of each job those of its T columns, not falling within a window.
        planes: as for `symbols.dequantize`.
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
            jobs, plans, row_maps, row_floats, row_ints, steps, classes, planes, y, found, depth,
            ROWS=_ROWS, GROUPS=_GROUPS, RUN=_RUN, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    blocks = min(triton.cdiv(max(max_rows, 1) * max_tokens, CELLS), MAX_GRID)
    _place_escapes_classes[(count, blocks)](
        data.view(torch.uint32), jobs, plans, row_floats, row_ints, steps, classes, planes, y, found, status,
        ENTRIES=ENTRIES, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["max_rows"])
def _quantize_classes(  # type: ignore[no-untyped-def]
    y, jobs, plans, row_floats, row_ints, inverses, limits, tables, freq, classes, planes, counts, status, max_rows,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    job = jobs + index * JOB_FIELDS
    class_plan = tl.load(job + JOB_CLASS_PLAN)
    if class_plan <= 0:
        return
    tokens = tl.load(job + JOB_TOKENS).to(tl.int32)
    stride = tl.load(job + JOB_STRIDE)
    classes += tl.load(job + JOB_COLUMNS)
    planes += tl.load(job + JOB_PLANES)
    y += tl.load(job + JOB_LEVELS)
    first_row = tl.program_id(1) * ROWS
    row = first_row + tl.arange(0, ROWS)[:, None, None]
    count = tl.zeros((ROWS,), tl.int32)
    large = tl.zeros((ROWS,), tl.int32)
    for start in range(0, tokens, GROUPS * RUN):
        column = start + tl.arange(0, GROUPS)[None, :, None] * RUN + tl.arange(0, RUN)[None, None, :]
        k_of = tl.load(classes + column, mask=column < tokens, other=NO_CLASS).to(tl.int32)
        finest = tl.load(classes + start).to(tl.int64)  # of a window
        # Rows that no column of this window has.
        if first_row >= tl.load(plans + (class_plan + finest) * PLAN_FIELDS + PLAN_ROWS):
            k_of = tl.full((1, GROUPS, RUN), NO_CLASS, tl.int32)
        k = _next_class(k_of, -1)
        while _any_left(k):
            served = k < NO_CLASS
            plan_index = class_plan + tl.where(served, k, 0)
            plan = plans + plan_index * PLAN_FIELDS
            exists = served & (row < tl.load(plan + PLAN_ROWS))
            component = tl.load(plan + PLAN_ROW) + row
            floats = row_floats + component * FLOAT_FIELDS
            dead_zone = tl.load(floats + DEAD_ZONE, mask=exists, other=0.0)
            rounding = tl.load(floats + ROUNDING, mask=exists, other=0.0)
            ints = row_ints + component * INT_FIELDS
            shift = tl.load(ints + SHIFT, mask=exists, other=0)
            low_plane = tl.load(ints + LOW_PLANE, mask=exists, other=-1)
            y_row = y + tl.load(ints + Y_ROW, mask=exists, other=0) * stride
            table = tl.load(tables + tl.load(plan + PLAN_FIRST) + row, mask=exists, other=0)
            inverse, limit = tl.load(inverses + plan_index), tl.load(limits + plan_index)
            own = exists & (k_of == k)
            value = tl.load(y_row + column, mask=own, other=0.0)
            d = _level(value, inverse, dead_zone, rounding) + _half(shift)
            # Not `>=`: NaN is too large as well.
            beyond = own & ((tl.abs(value) < limit) == 0)
            large = tl.maximum(large, tl.max(tl.max(beyond.to(tl.int32), 2), 1))
            high = d >> shift
            byte = high & 0xFF
            codable = tl.load(freq + table * 256 + byte, mask=own, other=1) != 0
            escaped = own & ((high > 127) | (high < -127) | (codable == 0))
            count += tl.sum(tl.sum(escaped.to(tl.int32), 2), 1)
            high_row = planes + row.to(tl.int64) * tokens
            tl.store(high_row + column, tl.where(escaped, ESCAPE, byte).to(tl.uint8), mask=own)
            low_row = planes + low_plane.to(tl.int64) * tokens
            tl.store(low_row + column, (d & ((1 << shift) - 1)).to(tl.uint8), mask=own & (low_plane >= 0))
            k = _next_class(k_of, k)
    slot = first_row + tl.arange(0, ROWS)
    tl.store(counts + index * max_rows + slot, count, mask=slot < max_rows)
    tl.atomic_or(status + index, STATUS_TOO_LARGE, mask=tl.max(large, 0) > 0, sem="relaxed")


def quantize_classes(
    y: torch.Tensor,
    jobs: torch.Tensor,
    plans: torch.Tensor,
    row_floats: torch.Tensor,
    row_ints: torch.Tensor,
    inverses: torch.Tensor,
    limits: torch.Tensor,
    tables: torch.Tensor,
    freq: torch.Tensor,
    classes: torch.Tensor,
    planes: torch.Tensor,
    counts: torch.Tensor,
    status: torch.Tensor,
    max_rows: int,
) -> None:
    """Coefficients of the jobs whose tokens have classes to byte planes; byte for byte those of `symbols_classes`.

    Planes and counts of a job whose status gets `Status.TOO_LARGE` mean nothing. Below a column's last plane nothing
    is written.

    Args:
        y: float32, columns in coding order.
        jobs: int64 `[J, len(Job)]` with TOKENS, PLAN, PLANES, LEVELS, STRIDE, CLASS_PLAN and COLUMNS.
        plans: as for `dequantize_classes`.
        row_floats: as for `symbols.quantize`.
        row_ints: as for `dequantize_classes`.
        inverses: as for `symbols.quantize`.
        limits: likewise.
        tables: likewise.
        freq: likewise.
        classes: as for `dequantize_classes`.
        planes: uint8; gets `[P, T]` of each job.
        counts: as for `symbols.quantize`; the rows of jobs whose tokens have classes are written.
        status: as for `symbols.quantize`.
        max_rows: rows of the largest job.
    """
    _quantize_classes[(len(jobs), triton.cdiv(max_rows, _BLOCK_ROWS))](
        y, jobs, plans, row_floats, row_ints, inverses, limits, tables, freq, classes, planes, counts, status, max_rows,
        ROWS=_BLOCK_ROWS, GROUPS=WINDOW // _RUN, RUN=_RUN, num_warps=4, enable_fp_fusion=False,
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
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    exists = row < tl.load(plans + tl.load(job + JOB_PLAN) * PLAN_FIELDS + PLAN_ROWS)
    slot = number * max_rows + row
    position = tl.load(starts + slot, mask=exists, other=0)
    last = slot + 1 == tl.num_programs(0).to(tl.int64) * max_rows
    end = tl.where(last, total, tl.load(starts + slot + 1, mask=exists & (last == 0), other=0))
    has = exists & (end > position)
    if tl.max(has.to(tl.int32), 0) > 0:
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
            escaped = tl.load(planes + first_cell + column, mask=own, other=0) == ESCAPE
            marks = escaped.to(tl.int32)
            if tl.max(tl.max(marks, 1), 0) > 0:
                # So few that each looks up its own component.
                component = tl.load(plan + PLAN_ROW) + row[:, None]
                floats = row_floats + component * FLOAT_FIELDS
                dead_zone = tl.load(floats + DEAD_ZONE, mask=escaped, other=0.0)
                rounding = tl.load(floats + ROUNDING, mask=escaped, other=0.0)
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
    plans: torch.Tensor,
    row_floats: torch.Tensor,
    row_ints: torch.Tensor,
    inverses: torch.Tensor,
    classes: torch.Tensor,
    planes: torch.Tensor,
    starts: torch.Tensor,
    index: torch.Tensor,
    value: torch.Tensor,
    max_rows: int,
) -> None:
    """The escapes of the jobs whose tokens have classes, each job's in rising order; see `symbols.list_escapes`.

    Args:
        y: as for `quantize_classes`.
        jobs: likewise.
        plans: likewise.
        row_floats: likewise.
        row_ints: likewise.
        inverses: likewise.
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
            y, jobs, plans, row_floats, row_ints, inverses, classes, planes, starts, index, value, total, max_rows,
            ROWS=_BLOCK_ROWS, COLUMNS=WINDOW, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip


# --- plain references


class _Part:
    """One job: its columns, and its class `k` in the terms of `codec.symbols`."""

    def __init__(
        self, jobs: torch.Tensor, plans: torch.Tensor, row_floats: torch.Tensor, row_ints: torch.Tensor,
        classes: torch.Tensor, index: int,
    ) -> None:  # fmt: skip
        self.job = jobs[index].tolist()
        self.tokens = self.job[Job.TOKENS]
        self.columns: npt.NDArray[np.uint8] = _host(classes[self.job[Job.COLUMNS] :][: self.tokens])
        self._jobs, self._index = jobs, index
        self._arrays = (plans, row_floats, row_ints)

    def of(self, k: int) -> symbols._Part:
        """The job as if all tokens had class `k`."""
        own = self._jobs[self._index : self._index + 1].clone()
        own[0, Job.PLAN] = own[0, Job.CLASS_PLAN] + k
        return symbols._Part(own, *self._arrays, 0)

    def planes(self, planes: torch.Tensor) -> torch.Tensor:
        """The job's `[P, T]`, a view."""
        count = int(self._arrays[0][self.job[Job.PLAN], Plan.PLANES])
        return planes[self.job[Job.PLANES] :][: count * self.tokens].view(count, self.tokens)

    def coefficients(self, y: torch.Tensor) -> torch.Tensor:
        """The job's `[rows, STRIDE]`, a view."""
        count, stride = int(self._arrays[0][self.job[Job.PLAN], Plan.EXTENT]), self.job[Job.STRIDE]
        return y[self.job[Job.LEVELS] :][: count * stride].view(count, stride)


def _parts(
    jobs: torch.Tensor, plans: torch.Tensor, row_floats: torch.Tensor, row_ints: torch.Tensor, classes: torch.Tensor
) -> Iterator[tuple[int, _Part]]:
    for index, job in enumerate(jobs.tolist()):
        if job[Job.CLASS_PLAN] > 0:
            yield index, _Part(jobs, plans, row_floats, row_ints, classes, index)


def dequantize_classes_reference(
    data: torch.Tensor,
    jobs: torch.Tensor,
    plans: torch.Tensor,
    row_maps: torch.Tensor,
    row_floats: torch.Tensor,
    row_ints: torch.Tensor,
    steps: torch.Tensor,
    classes: torch.Tensor,
    planes: torch.Tensor,
    y: torch.Tensor,
    status: torch.Tensor,
    found: torch.Tensor,
    max_rows: int,
    max_tokens: int,
    depth: int,
) -> None:
    """See `dequantize_classes`; the coefficients of a job with a status are zero."""
    words = _host(data).view(np.uint32)
    for index, part in _parts(jobs, plans, row_floats, row_ints, classes):
        count, listed = part.job[Job.ESCAPE_COUNT], words[part.job[Job.ESCAPES] :]
        row, column = np.divmod(listed[:count], np.uint32(part.tokens))
        value = listed[count : 2 * count].view(np.int32)
        coded, target = _host(part.planes(planes)), part.coefficients(y)
        for start in range(0, part.tokens, depth):
            extent = int(plans[part.job[Job.CLASS_PLAN] + int(part.columns[start]), Plan.EXTENT])
            target[:extent, start : start + depth] = 0
        escaped, matching = 0, not np.any(np.diff(listed[:count].astype(np.int64)) <= 0)
        for at, k in class_runs(part.columns):
            own, width = part.of(k), at.stop - at.start
            plan, high = own.plan(), coded[own.order][:, at]
            escaped += int((high[: own.rows] == codec.ESCAPE).sum())
            inside = (column >= at.start) & (column < at.stop)
            local = Escapes(row[inside] * np.uint32(width) + column[inside] - np.uint32(at.start), value[inside])
            try:
                levels = codec.unpack(high, local, plan)
            except CorruptError:
                matching = False
                continue
            back = codec.dequantize(levels, float(steps[own.plan_index]), plan, own.quantizer)
            target[own.y_rows, at] = torch.from_numpy(back).to(y)
        found[index] = escaped
        if not matching or escaped != count:
            status[index] |= int(Status.ESCAPES)


def quantize_classes_reference(
    y: torch.Tensor,
    jobs: torch.Tensor,
    plans: torch.Tensor,
    row_floats: torch.Tensor,
    row_ints: torch.Tensor,
    inverses: torch.Tensor,
    limits: torch.Tensor,
    tables: torch.Tensor,
    freq: torch.Tensor,
    classes: torch.Tensor,
    planes: torch.Tensor,
    counts: torch.Tensor,
    status: torch.Tensor,
    max_rows: int,
) -> None:
    """See `quantize_classes`."""
    frequencies = _host(freq)
    entropy = EntropyTables(frequencies, int(frequencies[0].sum()).bit_length() - 1)
    for index, part in _parts(jobs, plans, row_floats, row_ints, classes):
        counts[index] = 0
        target = part.planes(planes)
        for at, k in class_runs(part.columns):
            own = part.of(k)
            source = _host(part.coefficients(y)[own.y_rows, at])
            if not np.abs(source).max(initial=0) < float(limits[own.plan_index]):
                status[index] |= int(Status.TOO_LARGE)
                continue
            plan = own.plan(tables)
            levels = codec.quantize(source, 1.0 / float(inverses[own.plan_index]), plan, own.quantizer)
            coded, escapes = codec.pack(levels, plan, entropy, 1)
            target[torch.from_numpy(own.order).to(planes.device), at] = torch.from_numpy(coded).to(planes.device)
            by_row = np.bincount(escapes.index // np.uint32(at.stop - at.start), minlength=own.rows)
            counts[index, : own.rows] += torch.from_numpy(by_row).to(counts)


def list_escapes_classes_reference(
    y: torch.Tensor,
    jobs: torch.Tensor,
    plans: torch.Tensor,
    row_floats: torch.Tensor,
    row_ints: torch.Tensor,
    inverses: torch.Tensor,
    classes: torch.Tensor,
    planes: torch.Tensor,
    starts: torch.Tensor,
    index: torch.Tensor,
    value: torch.Tensor,
    max_rows: int,
) -> None:
    """See `list_escapes_classes`."""
    for number, part in _parts(jobs, plans, row_floats, row_ints, classes):
        cells, values = [np.empty(0, np.int64)], [np.empty(0, np.int32)]
        coded = _host(part.planes(planes))
        for at, k in class_runs(part.columns):
            own = part.of(k)
            plan = own.plan()
            source = _host(part.coefficients(y)[own.y_rows, at])
            levels = codec.quantize(source, 1.0 / float(inverses[own.plan_index]), plan, own.quantizer)
            shift = plan.shift.astype(np.int32)[:, None]
            high = (levels + ((1 << shift) >> 1)) >> shift
            row, column = np.nonzero(coded[: own.rows, at] == codec.ESCAPE)
            cells.append(row * part.tokens + column + at.start)
            values.append(high[row, column])
        joined = np.concatenate(cells)
        order = np.argsort(joined)
        first = int(starts[number, 0])
        found = slice(first, first + len(order))
        index[found] = torch.from_numpy(joined[order].astype(np.uint32)).to(index.device)
        value[found] = torch.from_numpy(np.concatenate(values)[order].astype(np.int32)).to(value.device)


# --- compiled ahead of time

_POINTERS = {
    "data": "*u32", "jobs": "*i64", "plans": "*i64", "row_maps": "*i32", "row_floats": "*fp32", "row_ints": "*i32",
    "steps": "*fp32", "inverses": "*fp32", "limits": "*fp32", "tables": "*i32", "freq": "*u16", "classes": "*u8",
    "planes": "*u8", "y": "*fp32", "counts": "*i32", "status": "*i32", "found": "*i32", "starts": "*i64",
    "index": "*u32", "value": "*i32",
}  # fmt: skip
_SIZES = ("depth", "total", "max_rows")


def _spec(name: str, kernel: Any, constants: dict[str, int], registers: int, **types: str) -> KernelSpec:
    pointers = {n: (_POINTERS | types)[n] for n in kernel.arg_names if n in _POINTERS}
    sizes = {n: "i32" for n in kernel.arg_names if n in _SIZES}
    return KernelSpec(
        name,
        kernel,
        {**pointers, **sizes},
        constants,
        options={"enable_fp_fusion": False},
        divisible=tuple(n for n in pointers if n != "classes"),
        budgets={"sm_90": Budget(registers=registers, spilled_bytes=0)},
    )


_BLOCK = {"ROWS": _BLOCK_ROWS, "GROUPS": WINDOW // _RUN, "RUN": _RUN}

SPECS: tuple[KernelSpec, ...] = (
    _spec("dequantize_classes", _dequantize_classes, {"ROWS": _ROWS, "GROUPS": _GROUPS, "RUN": _RUN}, 80, y="*bf16"),
    _spec("place_escapes_classes", _place_escapes_classes, {"ENTRIES": ENTRIES}, 48, y="*bf16"),
    _spec("quantize_classes", _quantize_classes, _BLOCK, 128),
    _spec("list_escapes_classes", _list_escapes_classes, {"ROWS": _BLOCK_ROWS, "COLUMNS": WINDOW}, 128),
)
