"""Coefficients to the symbols of refinements, and refined levels to coefficients: `codec/entropy/nested.py`.

    encode   y --quantize_classes--> planes of the base          y --quantize_refinements--> planes of the refinements
    decode   planes of the base --dequantize_classes--> levels
             levels --rans_refine, place_levels, for each refinement--> finer levels --reconstruct--> y

`codec/stages/reference/refinements.py` is the reference. Columns have classes, and the kernels go by the rows of
coefficients, which a base and its refinements share; every value looks up the parameters of its component in its class,
as in `symbols_by_class.py`. Only components that the coarser part does not code have levels that no symbol stands for.
These escapes are counted here, and listed by `list_escapes_classes`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cuvee.codec.entropy.coding_plan import MAX_LEVEL
from cuvee.codec.entropy.nested import CONTEXT_BITS, CONTEXTS, ESCAPED, KINDS, MOST
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
    STATUS_ESCAPES,
    STATUS_TOO_LARGE,
)
from cuvee.kernels.ops.arguments import DevicePlans
from cuvee.kernels.ops.dequantize import ENTRIES, _coefficient, escape_programs
from cuvee.kernels.ops.pages import rounded
from cuvee.kernels.ops.quantize import BEYOND
from cuvee.kernels.ops.symbols import FLOAT_FIELDS, INT_FIELDS, Y_ROW
from cuvee.kernels.ops.symbols_by_class import MIN_DEPTH, _of_row, _thresholds

_KINDS = tl.constexpr(KINDS)
_MOST = tl.constexpr(MOST)
_ESCAPED = tl.constexpr(ESCAPED)
_MAX_LEVEL = tl.constexpr(float(MAX_LEVEL))
_LAST_CONTEXT = tl.constexpr(CONTEXTS - 1)
_CONTEXT_BITS = tl.constexpr(CONTEXT_BITS)
_SYMBOL = tl.constexpr((1 << CONTEXT_BITS) - 1)

_ROWS = 16  # of a program's tile


@triton.jit
def _cell(level, zone):  # type: ignore[no-untyped-def]
    """Return where the cells of levels that are one step wide begin and end, in steps: `nested.base_cell`."""
    low = level.to(tl.float32) + (zone - 1.0)
    return tl.where(level == 0, 0.0, low), tl.where(level == 0, zone, low + 1.0)


@triton.jit
def _refined(known, level, low, high, magnitude, zone, UNIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the magnitudes of the finer levels and their cells, in steps of the base.

    The cells of `known` components are cut, as by `nested.refine`; other components get a first level.
    """
    middle = tl.where(level == 0, zone * UNIT, (low + high) * 0.5)
    upper = magnitude >= middle
    size = magnitude * (1.0 / UNIT)
    first = tl.where(size >= zone, tl.floor(size + (1.0 - zone)), 0.0).to(tl.int32)
    first_low, first_high = _cell(first, zone)
    fine = tl.where(known, 2 * level + upper.to(tl.int32), first)
    fine_low = tl.where(known, tl.where(upper, middle, low), first_low * UNIT)
    fine_high = tl.where(known, tl.where(upper, high, middle), first_high * UNIT)
    return fine, fine_low, fine_high


@triton.jit
def _quantize_part(  # type: ignore[no-untyped-def]
    job, plans, row_maps, zones, k, row, column, inside, tokens, value, magnitude, known, level, low, high, planes,
    counts, UNIT: tl.constexpr,
):  # fmt: skip
    """Write the symbols of one refinement and count its escapes. Return what it codes: components, levels, cells."""
    plan = plans + (tl.load(job + JOB_CLASS_PLAN).to(tl.int32) + k) * PLAN_FIELDS
    component = _of_row(row_maps, plan, PLAN_ROW_MAP, row, inside, -1)
    coded = component >= 0
    zone = tl.load(zones + (tl.load(plan + PLAN_ROW).to(tl.int32) + component), mask=coded, other=0.0)
    fine, fine_low, fine_high = _refined(known, level, low, high, magnitude, zone, UNIT)
    signed = tl.where(value < 0, -fine, fine)
    symbol = tl.where(level == 0, signed, fine - 2 * level)
    escaped = coded & (tl.abs(symbol) > _MOST)
    tl.atomic_add(counts + component, 1, mask=escaped, sem="relaxed")
    symbol = tl.where(escaped, _ESCAPED, symbol)
    byte = tl.minimum(level, _LAST_CONTEXT) << _CONTEXT_BITS | (symbol & _SYMBOL)
    out = planes + tl.load(job + JOB_PLANES) + component.to(tl.int64) * tokens + column
    tl.store(out, byte.to(tl.uint8), mask=coded)
    return coded, tl.where(coded, fine, 0), fine_low, fine_high


@triton.jit(do_not_specialize=["count", "max_rows"])
def _quantize_refinements(  # type: ignore[no-untyped-def]
    y, jobs, plans, row_maps, row_floats, zones, inverses, classes, planes, counts, status, count, max_rows,
    PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    job = jobs + index * JOB_FIELDS
    # Each refinement has as many jobs as the base, and as many rows of counts.
    step = count.to(tl.int64) * JOB_FIELDS
    counts += (index + count) * max_rows
    class_plan = tl.load(job + JOB_CLASS_PLAN).to(tl.int32)
    start = tl.program_id(2) * COLUMNS
    tokens = tl.load(job + JOB_TOKENS).to(tl.int32)
    if start >= tokens:
        return
    classes += tl.load(job + JOB_COLUMNS)
    finest = tl.load(classes + start).to(tl.int32)  # of the tile, which lies within a window
    extent = tl.load(plans + (class_plan + finest) * PLAN_FIELDS + PLAN_EXTENT).to(tl.int32)
    if tl.program_id(1) * ROWS >= extent:
        return
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    column = start + tl.arange(0, COLUMNS)[None, :]
    k = tl.load(classes + column, mask=column < tokens, other=0).to(tl.int32)
    plan_index = class_plan + k
    plan = plans + plan_index * PLAN_FIELDS
    inside = (column < tokens) & (row < extent)
    component = _of_row(row_maps, plan, PLAN_ROW_MAP, row, inside, -1)
    known = component >= 0
    # Rows that the last part does not code hold anything.
    last = plans + (tl.load(job + (PARTS - 1) * step + JOB_CLASS_PLAN).to(tl.int32) + k) * PLAN_FIELDS
    inside &= _of_row(row_maps, last, PLAN_ROW_MAP, row, inside, -1) >= 0
    at = tl.load(job + JOB_LEVELS) + row.to(tl.int64) * tl.load(job + JOB_STRIDE) + column
    value = tl.load(y + at, mask=inside, other=0.0)
    magnitude = tl.abs(value) * tl.load(inverses + plan_index)
    # Not `>=`: NaN is too large as well.
    large = ((magnitude < _MAX_LEVEL) == 0).to(tl.int32)
    tl.atomic_or(status + index, STATUS_TOO_LARGE, mask=tl.max(tl.max(large, 1), 0) > 0, sem="relaxed")
    magnitude = tl.minimum(magnitude, BEYOND)
    zone, rounding = _thresholds(row_floats, tl.load(plan + PLAN_ROW).to(tl.int32) + component, known)
    level = tl.where(known & (magnitude >= zone), tl.floor(magnitude + rounding), 0.0).to(tl.int32)
    low, high = _cell(level, zone)
    known, level, low, high = _quantize_part(
        job + step, plans, row_maps, zones, k, row, column, inside, tokens, value, magnitude, known, level, low, high,
        planes, counts, 0.5,
    )  # fmt: skip
    if PARTS == 3:
        _quantize_part(
            job + 2 * step, plans, row_maps, zones, k, row, column, inside, tokens, value, magnitude, known, level, low,
            high, planes, counts + count.to(tl.int64) * max_rows, 0.25,
        )  # fmt: skip


def quantize_refinements(
    y: torch.Tensor,
    jobs: torch.Tensor,
    plans: DevicePlans,
    row_maps: torch.Tensor,
    zones: torch.Tensor,
    classes: torch.Tensor,
    planes: torch.Tensor,
    counts: torch.Tensor,
    status: torch.Tensor,
    parts: int,
    max_extent: int,
    max_tokens: int,
) -> None:
    """Convert coefficients to the planes of all refinements of a base; the bytes are those of the reference.

    A byte holds a context and a symbol (`nested.RefinementCoder.encoding`). Below a column's last plane nothing is
    written. Planes and counts of a job whose status gets `Status.TOO_LARGE` mean nothing.

    Args:
        y: float32, columns in coding order.
        jobs: int64 `[parts * J, len(JobField)]` with TOKENS, PLANES, LEVELS, STRIDE, CLASS_PLAN and COLUMNS: the J jobs
            of the bases, then those of each refinement, all with classes.
        plans: how each class is coded, in each part; a finer part codes all that a coarser one does.
        row_maps: as for `dequantize_classes`.
        zones: float32, from PlanField.ROW on: `RefinementTables.zone` of each component of a refinement.
        classes: uint8 below 16: `TokenOrder.classes`.
        planes: uint8; gets `[P, T]` of each job of a refinement.
        counts: int32 `[parts * J, max_rows]`; the escapes of each row are added to the zeros of refinements.
        status: int32 `[J]`; gets `Status.TOO_LARGE` where a coefficient is `MAX_LEVEL` steps of the base or more, or
            NaN.
        parts: 2 or 3.
        max_extent: the largest extent of a plan.
        max_tokens: tokens of the longest job, at most 65,535 * 64.
    """
    count = len(jobs) // parts
    grid = (count, triton.cdiv(max_extent, _ROWS), triton.cdiv(max_tokens, MIN_DEPTH))
    if grid[1]:
        _quantize_refinements[grid](
            y, jobs, plans.plans, row_maps, plans.row_floats, zones, plans.inverses, classes, planes, counts, status,
            count, counts.shape[1], PARTS=parts, ROWS=_ROWS, COLUMNS=MIN_DEPTH, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip


@triton.jit(do_not_specialize=["apart", "limit"])
def _place_levels(  # type: ignore[no-untyped-def]
    data, jobs, plans, row_maps, row_ints, classes, levels, found, status, apart, limit, ENTRIES: tl.constexpr
):
    """Check a job's escape list and write its levels, as `_place_escapes_classes` does for a base."""
    index = tl.program_id(0).to(tl.int64)
    job = jobs + index * JOB_FIELDS
    class_plan = tl.load(job + JOB_CLASS_PLAN)
    count = tl.load(job + JOB_ESCAPE_COUNT)
    if tl.program_id(1) == 0:
        tl.atomic_or(status + index, STATUS_ESCAPES, mask=tl.load(found + index) != count, sem="relaxed")
    tokens = tl.load(job + JOB_TOKENS)
    stride = tl.load(job + JOB_STRIDE)
    cells = tl.load(plans + tl.load(job + JOB_PLAN) * PLAN_FIELDS + PLAN_ROWS) * tokens
    entries = data + tl.load(job + JOB_ESCAPES)
    classes += tl.load(job + JOB_COLUMNS)
    levels += tl.load(job + JOB_LEVELS)
    for block in range(tl.program_id(1).to(tl.int64) * ENTRIES, count, tl.num_programs(1) * ENTRIES):
        entry = block + tl.arange(0, ENTRIES)
        listed = entry < count
        cell = tl.load(entries + entry, mask=listed, other=0).to(tl.int64)
        before = tl.load(entries + entry - 1, mask=listed & (entry > 0), other=0).to(tl.int64)
        valid = listed & ((entry == 0) | (cell > before)) & (cell < cells)
        row = cell // tokens
        column = cell - row * tokens
        plan = plans + (class_plan + tl.load(classes + column, mask=valid, other=0).to(tl.int64)) * PLAN_FIELDS
        valid &= row < tl.load(plan + PLAN_ROWS, mask=valid, other=0)
        component = tl.load(plan + PLAN_ROW, mask=valid, other=0) + row
        y_row = tl.load(row_ints + component * INT_FIELDS + Y_ROW, mask=valid, other=0).to(tl.int64)
        # A component of the coarser part may have this level, too: twice one of its own.
        coarser = row_maps + tl.load(plan - apart * PLAN_FIELDS + PLAN_ROW_MAP, mask=valid, other=0)
        valid &= tl.load(coarser + y_row, mask=valid, other=0) < 0
        place = levels + y_row * stride + column
        valid &= tl.load(place, mask=valid, other=0) == _ESCAPED
        value = tl.load(entries + count + entry, mask=valid, other=0).to(tl.int32, bitcast=True)
        # abs(-2**31) wraps; unsigned it is above any limit.
        valid &= tl.abs(value).to(tl.uint32, bitcast=True) <= limit.to(tl.uint32)
        wrong = tl.max((listed & (valid == 0)).to(tl.int32), 0)
        tl.atomic_or(status + index, STATUS_ESCAPES, mask=wrong > 0, sem="relaxed")
        tl.store(place, value, mask=valid)


def place_levels(
    data: torch.Tensor,
    jobs: torch.Tensor,
    plans: DevicePlans,
    row_maps: torch.Tensor,
    classes: torch.Tensor,
    levels: torch.Tensor,
    status: torch.Tensor,
    found: torch.Tensor,
    apart: int,
    part: int,
    max_rows: int,
    max_tokens: int,
) -> None:
    """Put the listed levels of a refinement in the place of its escapes.

    Args:
        data: uint8, a multiple of four bytes.
        jobs: int64 `[J, len(JobField)]` of the refinement, with ESCAPES, ESCAPE_COUNT, TOKENS, PLAN, LEVELS, STRIDE,
            CLASS_PLAN and COLUMNS. The lists lie within `data`.
        plans: how each class is coded, in each part.
        row_maps: as for `dequantize_classes`.
        classes: likewise.
        levels: int32, as `rans_refine` left them.
        status: int32 `[J]`; gets `Status.ESCAPES` where the list does not name all escapes in order, or holds a level
            beyond `MAX_LEVEL` steps of the base.
        found: int32 `[J]`, the number of escapes, from `rans_refine`.
        apart: how many plans lie between those of a class in this part and in the part before it.
        part: number of the refinement.
        max_rows: the largest extent of a plan.
        max_tokens: tokens of the longest job.
    """
    _place_levels[(len(jobs), escape_programs(max_rows, max_tokens))](
        data.view(torch.uint32), jobs, plans.plans, row_maps, plans.row_ints, classes, levels, found, status, apart,
        MAX_LEVEL << part, ENTRIES=ENTRIES, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["depth"])
def _reconstruct(  # type: ignore[no-untyped-def]
    jobs, plans, row_maps, row_floats, steps, classes, levels, y, depth, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    job = jobs + tl.program_id(0).to(tl.int64) * JOB_FIELDS
    class_plan = tl.load(job + JOB_CLASS_PLAN).to(tl.int32)
    start = tl.program_id(2) * COLUMNS
    tokens = tl.load(job + JOB_TOKENS).to(tl.int32)
    if start >= tokens:
        return
    classes += tl.load(job + JOB_COLUMNS)
    finest = tl.load(classes + start // depth * depth).to(tl.int32)
    extent = tl.load(plans + (class_plan + finest) * PLAN_FIELDS + PLAN_EXTENT).to(tl.int32)
    if tl.program_id(1) * ROWS >= extent:
        return
    stride = tl.load(job + JOB_STRIDE).to(tl.int32)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    column = start + tl.arange(0, COLUMNS)[None, :]
    inside = column < tokens
    plan_index = class_plan + tl.load(classes + column, mask=inside, other=0).to(tl.int32)
    plan = plans + plan_index * PLAN_FIELDS
    component = _of_row(row_maps, plan, PLAN_ROW_MAP, row, inside & (row < extent), -1)
    coded = component >= 0
    at = tl.load(job + JOB_LEVELS) + row.to(tl.int64) * stride + column
    level = tl.load(levels + at, mask=coded, other=0)
    kind = tl.minimum(tl.maximum(tl.abs(level), 1), _KINDS) - 1
    shrink_at = (tl.load(plan + PLAN_ROW).to(tl.int32) + component) * FLOAT_FIELDS + kind
    shrink = tl.load(row_floats + shrink_at, mask=coded, other=0.0)
    value = _coefficient(level, shrink, shrink, tl.load(steps + plan_index))
    tl.store(y + at, rounded(value, y.dtype.element_ty), mask=(row < extent) & (column < stride))


def reconstruct(
    levels: torch.Tensor,
    jobs: torch.Tensor,
    plans: DevicePlans,
    row_maps: torch.Tensor,
    classes: torch.Tensor,
    y: torch.Tensor,
    max_rows: int,
    max_tokens: int,
    depth: int,
) -> None:
    """Convert the levels of a refinement to coefficients, those of the reference, rounded to the dtype of `y`.

    Of each run of `depth` columns, the rows up to the extent of its first column's class are written, zero where a
    column has no component.

    Args:
        levels: int32 `[rows, STRIDE]` of each job at `JobField.LEVELS`.
        jobs: int64 `[J, len(JobField)]` of the last refinement, with TOKENS, LEVELS, STRIDE, CLASS_PLAN and COLUMNS.
        plans: how each class is coded; `row_floats` holds `RefinementTables.shrink`.
        row_maps: as for `dequantize_classes`.
        classes: likewise.
        y: bfloat16 or float32, laid out like `levels`; written.
        max_rows: the largest extent of a plan.
        max_tokens: tokens of the longest job, at most 65,535 * 64.
        depth: MIN_DEPTH, 128 or 256.
    """
    grid = (len(jobs), triton.cdiv(max_rows, _ROWS), triton.cdiv(max_tokens, MIN_DEPTH))
    if grid[1]:
        _reconstruct[grid](
            jobs, plans.plans, row_maps, plans.row_floats, plans.steps, classes, levels, y, depth,
            ROWS=_ROWS, COLUMNS=MIN_DEPTH, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
