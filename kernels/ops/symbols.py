"""Byte planes to coefficients and back: unpack, unpredict, dequantize; quantize, predict, pack.

`codec/stages/reference/symbols.py` is the reference. `dequantize` runs two kernels. The first treats every ESCAPE
byte as the number -128 and counts such bytes. The second has one lane per entry of the escape list: it checks the
list and redoes what an escaped value changes, which is one token or, under prediction, the rest of its stream. The
tables cut off tails that are cheaper to escape, so most tiles hold an escape; searching the list in every tile would
cost more than everything else.

The count completes the check. If the list has as many entries as there are ESCAPE bytes, each entry points at one of
them, and indices rise, then the list names them all.

A tile of `dequantize` is `[ROWS, GROUPS, RUN]`: rows, groups of tokens, adjacent tokens of a group. Without prediction
the groups are adjacent too: 8 rows of 256 tokens, of which each thread of 4 warps has 8 tokens of two rows. Where T and
the offsets are multiples of 8, these take one load of 8 bytes and one store of 16 (bfloat16); elsewhere the same code
moves single values, those of a warp side by side. Under prediction a group is a stream, or RUN tokens of short streams,
and the program walks along the groups, RUN tokens at a time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from cuvee.codec.stages.reference import symbols
from cuvee.codec.stages.reference.symbols import RHO_BITS, Prediction
from cuvee.kernels.analysis.kernel_spec import Budget, KernelSpec
from cuvee.kernels.jobs import (
    JOB_CLASS_PLAN,
    JOB_ESCAPE_COUNT,
    JOB_ESCAPES,
    JOB_FIELDS,
    JOB_LEVELS,
    JOB_PER_STREAM,
    JOB_PLAN,
    JOB_PLANES,
    JOB_STRIDE,
    JOB_TOKENS,
    PLAN_FIELDS,
    PLAN_FIRST,
    PLAN_PREDICTION,
    PLAN_REST,
    PLAN_ROW,
    PLAN_ROWS,
    STATUS_ESCAPES,
    STATUS_TOO_LARGE,
)
from cuvee.kernels.ops.arguments import CodableBytes, DevicePlans
from cuvee.kernels.ops.pages import rounded

ESCAPE = tl.constexpr(symbols.ESCAPE)
NONE = tl.constexpr(int(Prediction.NONE))
LAG1 = tl.constexpr(int(Prediction.LAG1))
GAIN_BITS = tl.constexpr(RHO_BITS)
GAIN_HALF = tl.constexpr(1 << (RHO_BITS - 1))
BEYOND = tl.constexpr(float(1 << 30))  # steps; what is larger, or NaN, has no int32 level

# Columns of `row_floats`: float32 by component.
FLOAT_FIELDS = tl.constexpr(4)
SHRINK_ONE = tl.constexpr(0)  # of level 1
SHRINK_MORE = tl.constexpr(1)  # of the levels above
DEAD_ZONE = tl.constexpr(2)
ROUNDING = tl.constexpr(3)

# Columns of `row_ints`: int32 by component.
INT_FIELDS = tl.constexpr(4)
SHIFT = tl.constexpr(0)
LOW_PLANE = tl.constexpr(1)  # plane of the low bits within the job, or -1
GAIN = tl.constexpr(2)  # of the prediction, 1/256
Y_ROW = tl.constexpr(3)  # row of coefficients; the component's number where tokens have no classes

_ROWS, _GROUPS, _RUN = 8, 32, 8  # tile of `dequantize`
RUN = tl.constexpr(_RUN)
_TOKENS = _GROUPS * _RUN
_BLOCK_ROWS = 4  # rows of `quantize`: its many numbers per row take registers
ENTRIES = 128  # of an escape list at a time
CELLS = 1 << 16  # values per program that lists escapes, one in 512; a program repeats where there are more
MAX_GRID = 65535  # programs along the second and third axis


def level_limit(step: float) -> float:
    """The smallest float32 that is `MAX_LEVEL` steps or more: coefficients of a plan must lie below."""
    limit = symbols.MAX_LEVEL * step
    nearest = np.float32(limit)
    return float(nearest if float(nearest) >= limit else np.nextafter(nearest, np.float32(np.inf)))


@triton.jit
def _half(shift):  # type: ignore[no-untyped-def]
    """Half the range of a component's low bits."""
    return (1 << shift) >> 1


@triton.jit
def _shrinkage(row_floats, component, mask):  # type: ignore[no-untyped-def]
    """Of components: shrinkage of level 1, and of the levels above."""
    at = row_floats + component * FLOAT_FIELDS
    return tl.load(at + SHRINK_ONE, mask=mask, other=0.0), tl.load(at + SHRINK_MORE, mask=mask, other=0.0)


@triton.jit
def _thresholds(row_floats, component, mask):  # type: ignore[no-untyped-def]
    """Of components: dead zone and rounding."""
    at = row_floats + component * FLOAT_FIELDS
    return tl.load(at + DEAD_ZONE, mask=mask, other=0.0), tl.load(at + ROUNDING, mask=mask, other=0.0)


@triton.jit
def _low_bits(row_ints, component, mask):  # type: ignore[no-untyped-def]
    """Of components: how many low bits have a plane of their own, and which plane; -1: none."""
    at = row_ints + component * INT_FIELDS
    return tl.load(at + SHIFT, mask=mask, other=0), tl.load(at + LOW_PLANE, mask=mask, other=-1)


@triton.jit
def _signed(byte):  # type: ignore[no-untyped-def]
    return byte.to(tl.int8, bitcast=True).to(tl.int32)


@triton.jit
def _predicted(level, gain):  # type: ignore[no-untyped-def]
    """What a level predicts; 0 for a level or a gain of 0."""
    return ((level.to(tl.int64) * gain.to(tl.int64) + GAIN_HALF) >> GAIN_BITS).to(tl.int32)


@triton.jit
def _coefficient(level, shrink_one, shrink_more, step):  # type: ignore[no-untyped-def]
    """What a level stands for, float32."""
    magnitude = tl.abs(level)
    number = magnitude.to(tl.float32)
    # The product is that of level 0 or 1, without a comparison. abs(-2**31) wraps; unsigned it is above 1.
    more = magnitude.to(tl.uint32, bitcast=True) > 1
    back = number - tl.where(more, shrink_more, number * shrink_one)
    # The sign bit, rather than a subtraction from 0, which would lose the sign of a zero.
    sign = level & -0x80000000
    return (back.to(tl.int32, bitcast=True) ^ sign).to(tl.float32, bitcast=True) * step


@triton.jit
def _unpredict(d, source, gain, first, per_stream, lag, ROWS: tl.constexpr, GROUPS: tl.constexpr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Levels of N adjacent tokens of each group from their differences d, `[ROWS, GROUPS, N]` int32.

    The first of them is predicted from `source`, `[ROWS, GROUPS, 1]` int32, with `gain`, `[ROWS, 1, 1]` int32, unless
    a stream begins with it; it is token number `first` of a group, and groups begin with a stream. `lag` tells LAG1
    from ANCHOR. Halves the tokens until one is left: that splits registers and moves nothing.

    Returns levels and the source of the next token.
    """
    if N == 1:
        starts = (first & (per_stream - 1)) == 0
        level = d + _predicted(source, tl.where(starts, 0, gain))
        return level, tl.where(starts | lag, level, source)
    else:  # noqa: RET505 - only one of the two is compiled
        early, late = tl.split(tl.permute(tl.reshape(d, (ROWS, GROUPS, 2, N // 2)), (0, 1, 3, 2)))
        early, source = _unpredict(early, source, gain, first, per_stream, lag, ROWS, GROUPS, N // 2)
        late, source = _unpredict(late, source, gain, first + N // 2, per_stream, lag, ROWS, GROUPS, N // 2)
        return tl.reshape(tl.permute(tl.join(early, late), (0, 1, 3, 2)), (ROWS, GROUPS, N)), source


@triton.jit
def _dequantize_tile(  # type: ignore[no-untyped-def]
    job, plan, row_floats, row_ints, step, planes, y, found, tile_row, tile,
    PREDICTED: tl.constexpr, ALIGNED: tl.constexpr,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, RUN: tl.constexpr,
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
    span = RUN  # tokens of a group
    if PREDICTED:
        kind = tl.load(plan + PLAN_PREDICTION)
        per_stream = tl.load(job + JOB_PER_STREAM).to(tl.int32)
        span = tl.where(kind == NONE, 1, tl.maximum(per_stream // RUN, 1)) * RUN
    start = tile * GROUPS * span
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
        group = start + tl.arange(0, GROUPS)[None, :, None] * span
        run = tl.arange(0, RUN)[None, None, :]
        escapes = tl.zeros((ROWS, GROUPS), tl.int32)
        if PREDICTED:
            gain = tl.load(row_ints + component * INT_FIELDS + GAIN, mask=exists, other=0)
            source = tl.zeros((ROWS, GROUPS, 1), tl.int32)
        for first in range(0, span, RUN):
            token = group + first + run
            inside = exists & (token < tokens)
            d = _signed(tl.load(high_row + token, mask=inside, other=0))
            # 1 for -128, 0 for every other signed byte: cheaper than a comparison.
            escapes += tl.sum(d * d >> 14, 2)
            # Beyond the tokens `half` makes d zero.
            low = tl.load(low_row + token, mask=inside & (low_plane >= 0), other=half.to(tl.uint8))
            d = (d << shift) + (low.to(tl.int32) - half)
            if PREDICTED:  # noqa: SIM102 - a constant and a value of the device
                if kind != NONE:
                    d, source = _unpredict(d, source, gain, first, per_stream, kind == LAG1, ROWS, GROUPS, RUN)
                    d = tl.where(inside, d, 0)
            value = _coefficient(d, shrink_one, shrink_more, step)
            tl.store(y_row + token, rounded(value, y.dtype.element_ty), mask=exists & (token < stride))
        count = tl.sum(escapes, 1)
        tl.atomic_add(found + tl.zeros((ROWS,), tl.int32), count, mask=count > 0, sem="relaxed")


@triton.jit
def _dequantize(  # type: ignore[no-untyped-def]
    jobs, plans, row_floats, row_ints, steps, planes, y, found,
    PREDICTED: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, RUN: tl.constexpr,
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
                PREDICTED, True, ROWS, GROUPS, RUN,
            )  # fmt: skip
        else:
            _dequantize_tile(
                job, plan, row_floats, row_ints, step, planes, y, found + index, tile_row, tile,
                PREDICTED, False, ROWS, GROUPS, RUN,
            )  # fmt: skip


@triton.jit
def _place_escapes(  # type: ignore[no-untyped-def]
    data, jobs, plans, row_floats, row_ints, steps, planes, y, found, status,
    PREDICTED: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Check a job's escape list and redo the values it changes; a *cell* is a place of the `[R, T]` matrix."""
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
    span = 1
    if PREDICTED:
        kind = tl.load(plan + PLAN_PREDICTION)
        span = tl.where(kind == NONE, 1, tl.load(job + JOB_PER_STREAM).to(tl.int32))
    for block in range(tl.program_id(1).to(tl.int64) * ENTRIES, count, tl.num_programs(1) * ENTRIES):
        entry = block + tl.arange(0, ENTRIES)
        listed = entry < count
        cell = tl.load(entries + entry, mask=listed, other=0).to(tl.int64)
        before = tl.load(entries + entry - 1, mask=listed & (entry > 0), other=0).to(tl.int64)
        rises = (entry == 0) | (cell > before)
        valid = listed & rises & (cell < cells)
        valid &= tl.load(planes + cell, mask=valid, other=0) == ESCAPE
        wrong = tl.max((listed & (valid == 0)).to(tl.int32), 0)
        tl.atomic_or(status + index, STATUS_ESCAPES, mask=wrong > 0, sem="relaxed")
        # Of the escapes in one stream the first redoes it, from the stream's first token, and meets the others.
        row = cell // tokens
        token = cell - row * tokens
        stream = cell - (token & (span - 1))
        leads = valid & ((entry == 0) | (before < stream))
        component = first_component + row
        shrink_one, shrink_more = _shrinkage(row_floats, component, leads)
        shift, low_plane = _low_bits(row_ints, component, leads)
        gain = tl.load(row_ints + component * INT_FIELDS + GAIN, mask=leads, other=0)
        half = _half(shift)
        # From a cell to where its low bits and its coefficient are.
        to_low = (low_plane - row) * tokens
        to_y = row * (stride - tokens)
        source = tl.zeros((ENTRIES,), tl.int32)
        for place in range(span):
            at = stream + place
            inside = leads & (at < (row + 1) * tokens)
            d = _signed(tl.load(planes + at, mask=inside, other=0))
            escaped = inside & (d == -128) & (entry < count)
            value = tl.load(entries + count + entry, mask=escaped, other=0).to(tl.int32, bitcast=True)
            d = tl.where(escaped, value, d)
            entry += escaped.to(tl.int64)
            low = tl.load(planes + at + to_low, mask=inside & (low_plane >= 0), other=0)
            d = (d << shift) + (low.to(tl.int32) - half)
            if PREDICTED:
                if place > 0:
                    d += _predicted(source, gain)
                source = tl.where((place == 0) | (kind == LAG1), d, source)
            back = _coefficient(d, shrink_one, shrink_more, step)
            tl.store(y + at + to_y, rounded(back, y.dtype.element_ty), mask=inside & (at >= cell))


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
    predicted: bool,
) -> None:
    """Byte planes and escapes to coefficients, of all jobs whose tokens have no classes.

    Writes `[R, STRIDE]` of each job, zeros from column T on. The coefficients are those of `codec.symbols`, rounded to
    the dtype of `y`. Those of a job whose status gets `Status.ESCAPES` mean nothing.

    Args:
        data: uint8, a multiple of four bytes.
        jobs: int64 `[J, len(JobField)]` with ESCAPES, ESCAPE_COUNT, TOKENS, PER_STREAM, PLAN, PLANES, LEVELS and
            STRIDE. The lists lie within `data`; STRIDE is at most T rounded up to a multiple of 256.
        plans: how each job is coded.
        planes: uint8, `[P, T]` of each job.
        y: bfloat16 or float32, written.
        status: int32 `[J]`; gets `Status.ESCAPES` where the list does not name all ESCAPE bytes in order.
        found: int32 `[J]`, zeros; gets the number of ESCAPE bytes.
        max_rows: rows of the largest job.
        max_tokens: tokens of the longest job, at most 65,535 * 256.
        predicted: whether any plan predicts.
    """
    count = len(jobs)
    tiles = triton.cdiv(max_tokens, _TOKENS)
    _dequantize[(count, triton.cdiv(max_rows, _ROWS), tiles)](
        jobs, plans.plans, plans.row_floats, plans.row_ints, plans.steps, planes, y, found,
        PREDICTED=predicted, ROWS=_ROWS, GROUPS=_GROUPS, RUN=_RUN, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    _place_escapes[(count, escape_programs(max_rows, max_tokens))](
        data.view(torch.uint32), jobs, plans.plans, plans.row_floats, plans.row_ints, plans.steps, planes, y, found,
        status, PREDICTED=predicted, ENTRIES=ENTRIES, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def escape_programs(max_rows: int, max_tokens: int) -> int:
    """Programs for the escape list of a job: at least one, as the list of a job without a single row is checked too."""
    return int(min(triton.cdiv(max(max_rows, 1) * max_tokens, CELLS), MAX_GRID))


@triton.jit
def _level(y, inverse, dead_zone, rounding):  # type: ignore[no-untyped-def]
    """Steps of a coefficient, int32; of one beyond BEYOND, or NaN, anything."""
    magnitude = tl.minimum(tl.abs(y) * inverse, BEYOND)
    level = tl.where(magnitude >= dead_zone, tl.floor(magnitude + rounding), 0.0)
    # The sign bit, rather than a comparison and a choice.
    sign = y.to(tl.int32, bitcast=True) & -0x80000000
    return (level.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True).to(tl.int32)


@triton.jit
def _within(high, table, freq, reach, inside):  # type: ignore[no-untyped-def]
    """Whether tables code numbers as int8, -128 aside. `reach` None: they may have gaps, and the frequencies tell."""
    if reach is None:
        coded = tl.load(freq + table * 256 + (high & 0xFF), mask=inside, other=1) != 0
        return coded & (high <= 127) & (high >= -127)
    else:  # noqa: RET505 - only one of the two is compiled
        least, greatest = tl.load(reach + 2 * table), tl.load(reach + 2 * table + 1)
        return (high >= least) & (high <= greatest)


@triton.jit
def _shifted_difference(  # type: ignore[no-untyped-def]
    y, token, inside, kind, per_stream, inverse, dead_zone, rounding, gain, half, PREDICTED: tl.constexpr
):
    """The difference of each token from its prediction plus half the range of the low bits, int32; the coefficient.

    `y` is the address of each row, `[ROWS, 1]`, as are the components' dead_zone, rounding, gain and half; `token` is
    `[1, TOKENS]`, and `inside`, `[ROWS, TOKENS]`, tells what exists.
    """
    value = tl.load(y + token, mask=inside, other=0.0)
    d = _level(value, inverse, dead_zone, rounding)
    if PREDICTED:  # noqa: SIM102 - a constant and a value of the device
        if kind != NONE:
            place = token & (per_stream - 1)
            source = token - tl.where(kind == LAG1, 1, place)
            before = tl.load(y + source, mask=inside & (place > 0), other=0.0)
            d -= _predicted(_level(before, inverse, dead_zone, rounding), gain)
    return d + half, value


@triton.jit
def _quantize_rows(  # type: ignore[no-untyped-def]
    job, plan, row, component, exists, row_floats, row_ints, inverse, limit, tables, freq, reach, y, planes,
    PREDICTED: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Quantize all tokens of ROWS rows, `[ROWS, 1]`: their escapes, and whether a value is too large."""
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
    per_stream = tl.load(job + JOB_PER_STREAM).to(tl.int32)
    kind = tl.load(plan + PLAN_PREDICTION)
    dead_zone, rounding = _thresholds(row_floats, component, exists)
    shift, low_plane = _low_bits(row_ints, component, exists)
    gain = tl.load(row_ints + component * INT_FIELDS + GAIN, mask=exists, other=0)
    table = tl.load(tables + tl.load(plan + PLAN_FIRST) + row, mask=exists, other=0)
    rest = tl.load(tables + tl.load(plan + PLAN_REST) + row, mask=exists, other=0)
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
        d, value = _shifted_difference(
            y_row, token, inside, kind, per_stream, inverse, dead_zone, rounding, gain, half, PREDICTED
        )
        largest = tl.maximum(largest, value.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
        high = d >> shift
        coded = _within(high, table, freq, reach, inside)
        if PREDICTED:
            later = (token & (per_stream - 1)) > 0
            coded = (coded & (later == 0)) | (_within(high, rest, freq, reach, inside) & later)
        escaped = inside & (coded == 0)
        count += escaped.to(tl.int32)
        tl.store(high_row + token, tl.where(escaped, ESCAPE, high).to(tl.uint8), mask=inside)
        low = d & ((1 << shift) - 1)
        tl.store(low_row + token, low.to(tl.uint8), mask=inside & (low_plane >= 0))
    bits = tl.max(tl.max(largest, 1), 0)
    # Not `>=`: NaN is too large as well.
    return tl.sum(count, 1), (bits.to(tl.float32, bitcast=True) < limit) == 0


@triton.jit(do_not_specialize=["max_rows"])
def _quantize(  # type: ignore[no-untyped-def]
    y, jobs, plans, row_floats, row_ints, inverses, limits, tables, freq, reach, planes, counts, status, max_rows,
    PREDICTED: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
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
        # There is nothing to read, but the counts are owed.
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
            y, planes, PREDICTED, True, ROWS, TOKENS,
        )  # fmt: skip
    else:
        count, large = _quantize_rows(
            job, plan, row, component, row < rows, row_floats, row_ints, inverse, limit, tables, freq, reach,
            y, planes, PREDICTED, False, ROWS, TOKENS,
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
    predicted: bool,
) -> None:
    """Coefficients to byte planes and the number of escapes of each row; byte for byte those of `codec.symbols`.

    Planes and counts of a job whose status gets `Status.TOO_LARGE` mean nothing.

    Args:
        y: float32.
        jobs: int64 `[J, len(JobField)]` with TOKENS, PER_STREAM, PLAN, PLANES, LEVELS and STRIDE.
        plans: how each job is coded.
        codable: what each table codes.
        planes: uint8; gets `[P, T]` of each job.
        counts: int32 `[J, max_rows]`; rows of jobs whose tokens have no classes are written fully, with zeros where a
            job has no row.
        status: int32 `[J]`; gets `Status.TOO_LARGE` where a coefficient is `MAX_LEVEL` steps or more, or NaN.
        max_rows: rows of the largest job.
        predicted: whether any plan predicts.
    """
    _quantize[(len(jobs), triton.cdiv(max_rows, _BLOCK_ROWS))](
        y, jobs, plans.plans, plans.row_floats, plans.row_ints, plans.inverses, plans.limits, plans.tables,
        codable.freq, codable.reach, planes, counts, status, max_rows, PREDICTED=predicted, ROWS=_BLOCK_ROWS,
        TOKENS=_TOKENS, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def _has_escapes(starts, job, first_row, max_rows, total, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Whether ROWS rows of a job have any: most have none, and a program that knows it early is short."""
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
    ints = row_ints + component * INT_FIELDS
    shift = tl.load(ints + SHIFT, mask=has, other=0)[:, None]
    gain = tl.load(ints + GAIN, mask=has, other=0)[:, None]
    inverse = tl.load(inverses + plan_index)
    tokens = tl.load(job + JOB_TOKENS).to(tl.int32)
    per_stream = tl.load(job + JOB_PER_STREAM).to(tl.int32)
    kind = tl.load(plan + PLAN_PREDICTION)
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
            d, _ = _shifted_difference(
                y_row, token, escaped, kind, per_stream, inverse, dead_zone, rounding, gain, half, True
            )
            at = position[:, None] + tl.cumsum(marks, 1) - 1
            escaped &= at < total
            tl.store(index + at, (first_cell + token).to(tl.uint32), mask=escaped)
            tl.store(value + at, d >> shift, mask=escaped)
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
    """The escapes of all jobs whose tokens have no classes, one job after another, each in rising order.

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


# --- compiled ahead of time

_TABLES = {"jobs": "*i64", "plans": "*i64", "row_floats": "*fp32", "row_ints": "*i32"}
_DECODE = {**_TABLES, "steps": "*fp32", "planes": "*u8", "y": "*bf16", "found": "*i32"}
_PLACE = {"data": "*u32", **_DECODE, "status": "*i32"}
_SOURCE = {"y": "*fp32", **_TABLES, "inverses": "*fp32"}
_CODED = {
    "limits": "*fp32",
    "tables": "*i32",
    "freq": "*u16",
    "reach": "*i32",
    "planes": "*u8",
    "counts": "*i32",
    "status": "*i32",
}
_QUANTIZE = {**_SOURCE, **_CODED}
_LIST = {**_SOURCE, "planes": "*u8", "starts": "*i64", "index": "*u32", "value": "*i32"}
_SIZES = {"max_rows": "i32"}


def _spec(
    name: str,
    kernel: Any,
    pointers: dict[str, str],
    constants: dict[str, Any],
    registers: int,
    sizes: dict[str, str] | None = None,
) -> KernelSpec:
    return KernelSpec(
        name,
        kernel,
        {**pointers, **(sizes or {})},
        constants,
        options={"enable_fp_fusion": False},
        divisible=tuple(pointers),
        budgets={"sm_90": Budget(registers=registers, spilled_bytes=0)},
    )


_TILE = {"ROWS": _ROWS, "GROUPS": _GROUPS, "RUN": _RUN}
_BLOCK = {"ROWS": _BLOCK_ROWS, "TOKENS": _TOKENS}

SPECS: tuple[KernelSpec, ...] = (
    _spec("dequantize", _dequantize, _DECODE, {"PREDICTED": False, **_TILE}, 80),
    _spec("dequantize predicted", _dequantize, _DECODE, {"PREDICTED": True, **_TILE}, 128),
    _spec("place_escapes", _place_escapes, _PLACE, {"PREDICTED": False, "ENTRIES": ENTRIES}, 48),
    _spec("escapes predicted", _place_escapes, _PLACE, {"PREDICTED": True, "ENTRIES": ENTRIES}, 48),
    _spec("quantize", _quantize, _QUANTIZE, {"PREDICTED": False, **_BLOCK}, 128, _SIZES),
    _spec("quantize predicted", _quantize, _QUANTIZE, {"PREDICTED": True, **_BLOCK}, 128, _SIZES),
    _spec("list_escapes", _list_escapes, _LIST, _BLOCK, 128, {"total": "i32", **_SIZES}),
)
