"""Byte planes to coefficients and back for tokens that have classes: `codec/symbols_classes.py`.

Columns are sorted by class within windows, and each class has components, shifts, tables and a step of its own. A tile
is `[ROWS, GROUPS, RUN]`: rows, groups of columns, adjacent columns of a group; a group belongs to one thread. Nearly
every group holds one class, some hold two. The kernels go through the classes of each group one after the other, all
groups at once, and keep of each pass the columns of its class. So parameters are loaded per group, as without classes.

    group      0          1          2          3
    classes    5 5 5 5    5 5 7 7    7 7 7 7    7 7 7 8
    first      5 5 5 5    5 5        7 7 7 7    7 7 7
    then                      7 7                     8

Decoding goes by rows of coefficients: all classes of a block of a basis begin at the same row, so a row may hold a
different component in each class, or none, and is zero there. Encoding goes by components, whose planes, counts and
escapes it writes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from cuvee.codec.classes import CLASSES, WINDOW
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
)
from cuvee.kernels.ops.arguments import DevicePlans
from cuvee.kernels.ops.pages import rounded
from cuvee.kernels.ops.symbols import (
    ENTRIES,
    ESCAPE,
    INT_FIELDS,
    LOW_PLANE,
    SHIFT,
    Y_ROW,
    _coefficient,
    _half,
    _level,
    _low_bits,
    _shrinkage,
    _signed,
    _thresholds,
    escape_programs,
)
from cuvee.kernels.spec import Budget, KernelSpec

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
        shrink_one, shrink_more = _shrinkage(row_floats, at_row, exists)
        shift, low_plane = _low_bits(row_ints, at_row, exists)
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
        shrink_one, shrink_more = _shrinkage(row_floats, component, valid)
        shift, low_plane = _low_bits(row_ints, component, valid)
        y_row = tl.load(row_ints + component * INT_FIELDS + Y_ROW, mask=valid, other=0).to(tl.int64)
        d = tl.load(entries + count + entry, mask=valid, other=0).to(tl.int32, bitcast=True)
        low = tl.load(planes + low_plane * tokens + column, mask=valid & (low_plane >= 0), other=0)
        d = (d << shift) + (low.to(tl.int32) - _half(shift))
        back = _coefficient(d, shrink_one, shrink_more, tl.load(steps + plan_index, mask=valid, other=0.0))
        tl.store(y + y_row * stride + column, rounded(back, y.dtype.element_ty), mask=valid)


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
    """Byte planes and escapes to coefficients, of all jobs whose tokens have classes; columns in coding order.

    Of each run of `depth` columns, the rows up to the extent of its first column's class are written, zero where a
    column has no component. The coefficients are those of `codec.symbols_classes`, rounded to the dtype of `y`. Those
    of a job whose status gets `Status.ESCAPES` mean nothing.

    Args:
        data: as for `symbols.dequantize`.
        jobs: likewise; CLASS_PLAN and COLUMNS are read too. PLAN is the plan of the finest class that occurs.
        plans: how each class is coded; components, planes and extent never rise with the class.
        row_maps: int32, from PlanField.ROW_MAP on the component of each row of coefficients, or -1.
        classes: uint8 below 16: `TokenOrder.classes`.
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
            jobs, plans.plans, row_maps, plans.row_floats, plans.row_ints, plans.steps, classes, planes, y, found,
            depth, ROWS=_ROWS, GROUPS=_GROUPS, RUN=_RUN, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    _place_escapes_classes[(count, escape_programs(max_rows, max_tokens))](
        data.view(torch.uint32), jobs, plans.plans, plans.row_floats, plans.row_ints, plans.steps, classes, planes, y,
        found, status, ENTRIES=ENTRIES, num_warps=4, enable_fp_fusion=False,
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
            dead_zone, rounding = _thresholds(row_floats, component, exists)
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
    plans: DevicePlans,
    freq: torch.Tensor,
    classes: torch.Tensor,
    planes: torch.Tensor,
    counts: torch.Tensor,
    status: torch.Tensor,
    max_rows: int,
) -> None:
    """Coefficients of all jobs whose tokens have classes to byte planes; byte for byte those of `symbols_classes`.

    Planes and counts of a job whose status gets `Status.TOO_LARGE` mean nothing. Below a column's last plane nothing
    is written.

    Args:
        y: float32, columns in coding order.
        jobs: int64 `[J, len(JobField)]` with TOKENS, PLAN, PLANES, LEVELS, STRIDE, CLASS_PLAN and COLUMNS.
        plans: as for `dequantize_classes`.
        freq: as for `symbols.quantize`.
        classes: as for `dequantize_classes`.
        planes: uint8; gets `[P, T]` of each job.
        counts: as for `symbols.quantize`; the rows of jobs whose tokens have classes are written.
        status: as for `symbols.quantize`.
        max_rows: rows of the largest job.
    """
    _quantize_classes[(len(jobs), triton.cdiv(max_rows, _BLOCK_ROWS))](
        y, jobs, plans.plans, plans.row_floats, plans.row_ints, plans.inverses, plans.limits, plans.tables, freq,
        classes, planes, counts, status, max_rows, ROWS=_BLOCK_ROWS, GROUPS=WINDOW // _RUN, RUN=_RUN, num_warps=4,
        enable_fp_fusion=False,
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
    """The escapes of all jobs whose tokens have classes, each job's in rising order; see `symbols.list_escapes`.

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
            y, jobs, plans.plans, plans.row_floats, plans.row_ints, plans.inverses, classes, planes, starts, index,
            value, total, max_rows, ROWS=_BLOCK_ROWS, COLUMNS=WINDOW, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip


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
