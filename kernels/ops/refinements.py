"""Coefficients to the symbols of refinements, and refined levels to coefficients: `codec/entropy/nested.py`.

    encode   y --quantize_classes--> planes of the base          y --quantize_refinements--> planes of the refinements
    decode   planes of the base --dequantize_classes--> levels --rans_refine--> finer levels … --reconstruct--> y

`codec/stages/reference/refinements.py` is the reference. Columns have classes, and both kernels go by the rows of
coefficients, which a base and its refinements share; every value looks up the parameters of its component in its class,
as in `symbols_by_class.py`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from cuvee.codec.entropy.nested import CONTEXT_BITS, CONTEXTS, KINDS, MOST
from cuvee.kernels.analysis.kernel_spec import Budget, KernelSpec
from cuvee.kernels.jobs import (
    JOB_CLASS_PLAN,
    JOB_COLUMNS,
    JOB_FIELDS,
    JOB_LEVELS,
    JOB_PLANES,
    JOB_STRIDE,
    JOB_TOKENS,
    PLAN_EXTENT,
    PLAN_FIELDS,
    PLAN_ROW,
    PLAN_ROW_MAP,
)
from cuvee.kernels.ops.arguments import DevicePlans
from cuvee.kernels.ops.dequantize import _coefficient
from cuvee.kernels.ops.pages import rounded
from cuvee.kernels.ops.quantize import BEYOND
from cuvee.kernels.ops.symbols import FLOAT_FIELDS
from cuvee.kernels.ops.symbols_by_class import MIN_DEPTH, _of_row, _thresholds

_KINDS = tl.constexpr(KINDS)
_MOST = tl.constexpr(float(MOST))
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
    first = tl.where(size >= zone, tl.minimum(tl.floor(size + (1.0 - zone)), _MOST), 0.0).to(tl.int32)
    first_low, first_high = _cell(first, zone)
    fine = tl.where(known, 2 * level + upper.to(tl.int32), first)
    fine_low = tl.where(known, tl.where(upper, middle, low), first_low * UNIT)
    fine_high = tl.where(known, tl.where(upper, high, middle), first_high * UNIT)
    return fine, fine_low, fine_high


@triton.jit
def _quantize_part(  # type: ignore[no-untyped-def]
    job, plans, row_maps, zones, k, row, column, inside, tokens, value, magnitude, known, level, low, high, planes,
    UNIT: tl.constexpr,
):  # fmt: skip
    """Write the symbols of one refinement. Return which components it codes, their levels and cells."""
    plan = plans + (tl.load(job + JOB_CLASS_PLAN).to(tl.int32) + k) * PLAN_FIELDS
    component = _of_row(row_maps, plan, PLAN_ROW_MAP, row, inside, -1)
    coded = component >= 0
    zone = tl.load(zones + (tl.load(plan + PLAN_ROW).to(tl.int32) + component), mask=coded, other=0.0)
    fine, fine_low, fine_high = _refined(known, level, low, high, magnitude, zone, UNIT)
    signed = tl.where(value < 0, -fine, fine)
    symbol = tl.where(level == 0, signed, fine - 2 * level)
    byte = tl.minimum(level, _LAST_CONTEXT) << _CONTEXT_BITS | (symbol & _SYMBOL)
    out = planes + tl.load(job + JOB_PLANES) + component.to(tl.int64) * tokens + column
    tl.store(out, byte.to(tl.uint8), mask=coded)
    return coded, tl.where(coded, fine, 0), fine_low, fine_high


@triton.jit(do_not_specialize=["count"])
def _quantize_refinements(  # type: ignore[no-untyped-def]
    y, jobs, plans, row_maps, row_floats, zones, inverses, classes, planes, count,
    PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    job = jobs + tl.program_id(0).to(tl.int64) * JOB_FIELDS
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
    # Rows without a component in the last part hold anything; nothing is written of them.
    at = tl.load(job + JOB_LEVELS) + row.to(tl.int64) * tl.load(job + JOB_STRIDE) + column
    value = tl.load(y + at, mask=inside, other=0.0)
    magnitude = tl.minimum(tl.abs(value) * tl.load(inverses + plan_index), BEYOND)
    zone, rounding = _thresholds(row_floats, tl.load(plan + PLAN_ROW).to(tl.int32) + component, known)
    level = tl.where(known & (magnitude >= zone), tl.floor(magnitude + rounding), 0.0).to(tl.int32)
    low, high = _cell(level, zone)
    # Each refinement has as many jobs as the base.
    job += count.to(tl.int64) * JOB_FIELDS
    known, level, low, high = _quantize_part(
        job, plans, row_maps, zones, k, row, column, inside, tokens, value, magnitude, known, level, low, high, planes,
        0.5,
    )  # fmt: skip
    if PARTS == 3:
        job += count.to(tl.int64) * JOB_FIELDS
        _quantize_part(
            job, plans, row_maps, zones, k, row, column, inside, tokens, value, magnitude, known, level, low, high,
            planes, 0.25,
        )  # fmt: skip


def quantize_refinements(
    y: torch.Tensor,
    jobs: torch.Tensor,
    plans: DevicePlans,
    row_maps: torch.Tensor,
    zones: torch.Tensor,
    classes: torch.Tensor,
    planes: torch.Tensor,
    parts: int,
    max_rows: int,
    max_tokens: int,
) -> None:
    """Convert coefficients to the planes of all refinements of a base; the bytes are those of the reference.

    A byte holds a context and a symbol (`nested.RefinementCoder.encoding`). Below a column's last plane nothing is
    written. The planes of a job whose status gets `Status.TOO_LARGE` from `quantize_classes` mean nothing.

    Args:
        y: float32, columns in coding order.
        jobs: int64 `[parts * J, len(JobField)]` with TOKENS, PLANES, LEVELS, STRIDE, CLASS_PLAN and COLUMNS: the J jobs
            of the bases, then those of each refinement, all with classes.
        plans: how each class is coded, in each part; a finer part codes all that a coarser one does.
        row_maps: as for `dequantize_classes`.
        zones: float32, from PlanField.ROW on: `RefinementTables.zone` of each component of a refinement.
        classes: uint8 below 16: `TokenOrder.classes`.
        planes: uint8; gets `[P, T]` of each job of a refinement.
        parts: 2 or 3.
        max_rows: the largest extent of a plan.
        max_tokens: tokens of the longest job, at most 65,535 * 64.
    """
    count = len(jobs) // parts
    grid = (count, triton.cdiv(max_rows, _ROWS), triton.cdiv(max_tokens, MIN_DEPTH))
    if grid[1]:
        _quantize_refinements[grid](
            y, jobs, plans.plans, row_maps, plans.row_floats, zones, plans.inverses, classes, planes, count,
            PARTS=parts, ROWS=_ROWS, COLUMNS=MIN_DEPTH, num_warps=4, enable_fp_fusion=False,
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


# --- compiled ahead of time

_POINTERS = {
    "jobs": "*i64", "plans": "*i64", "row_maps": "*i32", "row_floats": "*fp32", "zones": "*fp32", "inverses": "*fp32",
    "steps": "*fp32", "classes": "*u8", "planes": "*u8", "levels": "*i32", "y": "*fp32",
}  # fmt: skip
_TILE = {"ROWS": _ROWS, "COLUMNS": MIN_DEPTH}


def _spec(name: str, kernel: Any, constants: dict[str, int], registers: int, size: str, **types: str) -> KernelSpec:
    pointers = {n: (_POINTERS | types)[n] for n in kernel.arg_names if n in _POINTERS}
    return KernelSpec(
        name,
        kernel,
        {**pointers, size: "i32"},
        constants,
        options={"enable_fp_fusion": False},
        divisible=tuple(n for n in pointers if n != "classes"),
        budgets={"sm_90": Budget(registers=registers, spilled_bytes=0)},
    )


SPECS: tuple[KernelSpec, ...] = (
    _spec("quantize_refinements", _quantize_refinements, {**_TILE, "PARTS": 3}, 128, "count"),
    _spec("reconstruct", _reconstruct, _TILE, 80, "depth", y="*bf16"),
)
