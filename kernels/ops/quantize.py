"""Coefficients to byte planes: quantize, pack, and list the values that escape.

`codec/stages/reference/symbols.py` is the reference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cuvee.kernels.jobs import (
    JOB_CLASS_PLAN,
    JOB_FIELDS,
    JOB_LEVELS,
    JOB_PLAN,
    JOB_PLANES,
    JOB_STRIDE,
    JOB_TOKENS,
    PLAN_FIELDS,
    PLAN_ROW,
    PLAN_ROWS,
    PLAN_TABLES,
    STATUS_TOO_LARGE,
)
from cuvee.kernels.ops.arguments import CodableBytes, DevicePlans
from cuvee.kernels.ops.symbols import (
    _TOKENS,
    DEAD_ZONE,
    ESCAPE,
    FLOAT_FIELDS,
    INT_FIELDS,
    ROUNDING,
    RUN,
    SHIFT,
    _half,
    _low_bits,
)

BEYOND = tl.constexpr(float(1 << 30))  # steps; what is larger, or NaN, has no int32 level
_BLOCK_ROWS = 4  # rows of `quantize`: its many numbers per row take registers


@triton.jit
def _thresholds(row_floats, component, mask):  # type: ignore[no-untyped-def]
    """Return the dead zone and rounding, by component."""
    at = row_floats + component * FLOAT_FIELDS
    return tl.load(at + DEAD_ZONE, mask=mask, other=0.0), tl.load(at + ROUNDING, mask=mask, other=0.0)


@triton.jit
def _level(y, inverse, dead_zone, rounding):  # type: ignore[no-untyped-def]
    """Return the level of a coefficient, int32; arbitrary for NaN and beyond BEYOND."""
    magnitude = tl.minimum(tl.abs(y) * inverse, BEYOND)
    level = tl.where(magnitude >= dead_zone, tl.floor(magnitude + rounding), 0.0)
    # The sign bit, rather than a comparison and a choice.
    sign = y.to(tl.int32, bitcast=True) & -0x80000000
    return (level.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True).to(tl.int32)


@triton.jit
def _within(high, table, freq, reach, inside):  # type: ignore[no-untyped-def]
    """Return whether tables code numbers as int8, except -128. `reach` None: they may have gaps, so look at `freq`."""
    if reach is None:
        coded = tl.load(freq + table * 256 + (high & 0xFF), mask=inside, other=1) != 0
        return coded & (high <= 127) & (high >= -127)
    else:  # noqa: RET505 - only one of the two is compiled
        least, greatest = tl.load(reach + 2 * table), tl.load(reach + 2 * table + 1)
        return (high >= least) & (high <= greatest)


@triton.jit
def _quantize_rows(  # type: ignore[no-untyped-def]
    job, plan, row, component, exists, row_floats, row_ints, inverse, limit, tables, freq, reach, y, planes,
    ALIGNED: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Quantize all tokens of ROWS rows, `[ROWS, 1]`. Return their escapes, and whether a value is too large."""
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
    dead_zone, rounding = _thresholds(row_floats, component, exists)
    shift, low_plane = _low_bits(row_ints, component, exists)
    table = tl.load(tables + tl.load(plan + PLAN_TABLES) + row, mask=exists, other=0)
    half = _half(shift)
    y_row = y + (y_at + row.to(tl.int64) * stride)
    high_row = planes + (planes_at + row.to(tl.int64) * tokens)
    low_row = planes + (planes_at + low_plane.to(tl.int64) * tokens)
    count = tl.zeros((ROWS, TOKENS), tl.int32)
    # The bits of magnitudes are in their order, and those of NaN above all.
    largest = tl.zeros((ROWS, TOKENS), tl.int32)
    for start in range(0, tokens, TOKENS):
        token = start + tl.arange(0, TOKENS)[None, :]
        inside = exists & (token < tokens)
        value = tl.load(y_row + token, mask=inside, other=0.0)
        shifted = _level(value, inverse, dead_zone, rounding) + half
        largest = tl.maximum(largest, value.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
        high = shifted >> shift
        escaped = inside & (_within(high, table, freq, reach, inside) == 0)
        count += escaped.to(tl.int32)
        tl.store(high_row + token, tl.where(escaped, ESCAPE, high).to(tl.uint8), mask=inside)
        low = shifted & ((1 << shift) - 1)
        tl.store(low_row + token, low.to(tl.uint8), mask=inside & (low_plane >= 0))
    bits = tl.max(tl.max(largest, 1), 0)
    # Not `>=`: NaN is too large as well.
    return tl.sum(count, 1), (bits.to(tl.float32, bitcast=True) < limit) == 0


@triton.jit(do_not_specialize=["max_rows"])
def _quantize(  # type: ignore[no-untyped-def]
    y, jobs, plans, row_floats, row_ints, inverses, limits, tables, freq, reach, planes, counts, status, max_rows,
    ROWS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    job = jobs + index * JOB_FIELDS
    if tl.load(job + JOB_CLASS_PLAN) > 0:
        return
    plan_index = tl.load(job + JOB_PLAN)
    plan = plans + plan_index * PLAN_FIELDS
    first_row = tl.program_id(1) * ROWS
    slot = first_row + tl.arange(0, ROWS)
    at = counts + index * max_rows + slot
    rows = tl.load(plan + PLAN_ROWS)
    if first_row >= rows:
        # There is nothing to read, but the counts must be written.
        tl.store(at, tl.zeros((ROWS,), tl.int32), mask=slot < max_rows)
        return
    row = first_row + tl.arange(0, ROWS)[:, None]
    component = tl.load(plan + PLAN_ROW) + row
    inverse = tl.load(inverses + plan_index)
    limit = tl.load(limits + plan_index)
    sizes = tl.load(job + JOB_TOKENS) | tl.load(job + JOB_STRIDE)
    offsets = tl.load(job + JOB_PLANES) | tl.load(job + JOB_LEVELS)
    if (sizes | offsets) % RUN == 0:
        count, large = _quantize_rows(
            job, plan, row, component, row < rows, row_floats, row_ints, inverse, limit, tables, freq, reach,
            y, planes, True, ROWS, TOKENS,
        )  # fmt: skip
    else:
        count, large = _quantize_rows(
            job, plan, row, component, row < rows, row_floats, row_ints, inverse, limit, tables, freq, reach,
            y, planes, False, ROWS, TOKENS,
        )  # fmt: skip
    tl.store(at, count, mask=slot < max_rows)
    tl.atomic_or(status + index, STATUS_TOO_LARGE, mask=large, sem="relaxed")


def quantize(
    y: torch.Tensor,
    jobs: torch.Tensor,
    plans: DevicePlans,
    codable: CodableBytes,
    planes: torch.Tensor,
    counts: torch.Tensor,
    status: torch.Tensor,
    max_rows: int,
) -> None:
    """Convert coefficients to byte planes and count the escapes of each row; the bytes are those of the reference.

    Planes and counts of a job whose status gets `Status.TOO_LARGE` are arbitrary.

    Args:
        y: float32.
        jobs: int64 `[J, len(JobField)]` with TOKENS, PLAN, PLANES, LEVELS and STRIDE.
        plans: how each job is coded.
        codable: what each table codes.
        planes: uint8; gets `[P, T]` of each job.
        counts: int32 `[J, max_rows]`; rows of jobs whose tokens have no classes are written fully, with zeros where a
            job has no row.
        status: int32 `[J]`; gets `Status.TOO_LARGE` where a coefficient is `MAX_LEVEL` steps or more, or NaN.
        max_rows: rows of the largest job.
    """
    _quantize[(len(jobs), triton.cdiv(max_rows, _BLOCK_ROWS))](
        y, jobs, plans.plans, plans.row_floats, plans.row_ints, plans.inverses, plans.limits, plans.tables,
        codable.freq, codable.reach, planes, counts, status, max_rows, ROWS=_BLOCK_ROWS, TOKENS=_TOKENS,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def _has_escapes(starts, job, first_row, max_rows, total, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return whether ROWS rows of a job have escapes: most have none, and their program can end early."""
    first = job * max_rows + first_row
    after = job * max_rows + tl.minimum(first_row + ROWS, max_rows)
    last = after == tl.num_programs(0).to(tl.int64) * max_rows
    end = tl.where(last, total, tl.load(starts + after, mask=last == 0, other=0))
    return end > tl.load(starts + first)


@triton.jit(do_not_specialize=["total"])
def _list_escapes(  # type: ignore[no-untyped-def]
    y, jobs, plans, row_floats, row_ints, inverses, planes, starts, index, value, total, max_rows,
    ROWS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0).to(tl.int64)
    job = jobs + number * JOB_FIELDS
    if tl.load(job + JOB_CLASS_PLAN) > 0:
        return
    if not _has_escapes(starts, number, tl.program_id(1) * ROWS, max_rows, total, ROWS):
        return
    plan_index = tl.load(job + JOB_PLAN)
    plan = plans + plan_index * PLAN_FIELDS
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    exists = row < tl.load(plan + PLAN_ROWS)
    slot = number * max_rows + row
    position = tl.load(starts + slot, mask=exists, other=0)
    last = slot + 1 == tl.num_programs(0).to(tl.int64) * max_rows
    end = tl.where(last, total, tl.load(starts + slot + 1, mask=exists & (last == 0), other=0))
    has = exists & (end > position)
    component = tl.load(plan + PLAN_ROW) + row
    dead_zone, rounding = _thresholds(row_floats, component, has)
    dead_zone, rounding = dead_zone[:, None], rounding[:, None]
    shift = tl.load(row_ints + component * INT_FIELDS + SHIFT, mask=has, other=0)[:, None]
    inverse = tl.load(inverses + plan_index)
    tokens = tl.load(job + JOB_TOKENS).to(tl.int32)
    y_row = y + tl.load(job + JOB_LEVELS) + row.to(tl.int64)[:, None] * tl.load(job + JOB_STRIDE)
    first_cell = row.to(tl.int64)[:, None] * tokens
    high_row = planes + tl.load(job + JOB_PLANES) + first_cell
    half = _half(shift)
    for start in range(0, tokens, TOKENS):
        token = start + tl.arange(0, TOKENS)[None, :]
        inside = has[:, None] & (token < tokens)
        escaped = tl.load(high_row + token, mask=inside, other=0) == ESCAPE
        marks = escaped.to(tl.int32)
        if tl.max(tl.max(marks, 1), 0) > 0:
            level = _level(tl.load(y_row + token, mask=escaped, other=0.0), inverse, dead_zone, rounding)
            at = position[:, None] + tl.cumsum(marks, 1) - 1
            escaped &= at < total
            tl.store(index + at, (first_cell + token).to(tl.uint32), mask=escaped)
            tl.store(value + at, (level + half) >> shift, mask=escaped)
            position += tl.sum(marks, 1)


def list_escapes(
    y: torch.Tensor,
    jobs: torch.Tensor,
    plans: DevicePlans,
    planes: torch.Tensor,
    starts: torch.Tensor,
    index: torch.Tensor,
    value: torch.Tensor,
    max_rows: int,
) -> None:
    """List the escapes of all jobs whose tokens have no classes, job by job, each in rising order.

    Args:
        y: as for `quantize`.
        jobs: likewise.
        plans: likewise.
        planes: as `quantize` wrote them.
        starts: int64 `[J, max_rows]`: where a row's escapes begin, the sum of all counts before it.
        index: uint32 `[E]`; gets row * T + token.
        value: int32 `[E]`; gets the number in place of the ESCAPE byte.
        max_rows: rows of the largest job.
    """
    total = len(index)
    if total:
        _list_escapes[(len(jobs), triton.cdiv(max_rows, _BLOCK_ROWS))](
            y, jobs, plans.plans, plans.row_floats, plans.row_ints, plans.inverses, planes, starts, index, value,
            total, max_rows, ROWS=_BLOCK_ROWS, TOKENS=_TOKENS, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
