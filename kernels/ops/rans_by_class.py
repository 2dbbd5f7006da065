"""The entropy coder on the GPU for tokens that have classes: `codec/stages/reference/rans_by_class.py`.

Each lane codes one stream, as in `rans.py`, but the columns of a program's lanes may belong to several classes, which
differ in their planes and tables. Columns are sorted, so the classes at one time are few. Every lane looks up its own
table, and a row of columns, one per lane, is coded in *segments* that end where the planes of some class end:

    lanes   0 … 9   10 … 25   26 … 31
    planes  70      64        51          0 … 50 in all lanes, 51 … 63 in lanes 0 … 25, 64 … 69 in lanes 0 … 9

Within a segment the same lanes stay active, so its loop costs no more than without classes.

A refinement of a base (`codec/stages/reference/refinements.py`) has streams of the same columns. The table of a symbol
depends on the coarser level, which its lane loads; and the finer level takes the place of the coarser one.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from cuvee.codec.entropy.nested import CONTEXTS, ESCAPED
from cuvee.codec.entropy.token_classes import WINDOW
from cuvee.codec.support.arrays import I32, I64
from cuvee.kernels.jobs import (
    JOB_CLASS_PLAN,
    JOB_COLUMNS,
    JOB_FIELDS,
    JOB_LENGTHS,
    JOB_LEVELS,
    JOB_PER_STREAM,
    JOB_PLAN,
    JOB_PLANES,
    JOB_STATES,
    JOB_STREAMS,
    JOB_STRIDE,
    JOB_TOKENS,
    JOB_WORDS,
    PLAN_FIELDS,
    PLAN_PLANES,
    PLAN_TABLES,
)
from cuvee.kernels.ops.arguments import DecodingTables, EncodedStreams, StreamJobs
from cuvee.kernels.ops.rans import (
    _BOUND,
    _WIDTH,
    LANES,
    PRECEDING,
    REGISTERS,
    UNROLL,
    _advance,
    _decode_run,
    _encode_run,
    _find_entry,
    _flag_streams,
    _open_streams,
    _totals,
)

_WINDOW = tl.constexpr(WINDOW)
_LAST_CONTEXT = tl.constexpr(CONTEXTS - 1)
_ESCAPED = tl.constexpr(ESCAPED)
TABLE_BITS = 10  # of a route
_TABLE_BITS = tl.constexpr(TABLE_BITS)
_TABLE = tl.constexpr((1 << TABLE_BITS) - 1)


def pack_route(rows: I64, tables: I64) -> I32:
    """Return one number for each component of a refinement: its row of levels, below 2**21, and table of context 0."""
    routes: I32 = (rows << TABLE_BITS | tables).astype(np.int32)
    return routes


def unpack_route(routes: I32) -> tuple[I32, I32]:
    """Return the rows and the tables that `pack_route` was given."""
    return routes >> TABLE_BITS, routes & ((1 << TABLE_BITS) - 1)


@triton.jit
def _columns(stream, tokens, per_stream):  # type: ignore[no-untyped-def]
    """Return each stream's first column, the distance to its next column, and the end of its window."""
    in_window = _WINDOW // per_stream
    window = stream // in_window * _WINDOW
    end = tl.minimum(window + _WINDOW, tokens)
    return window + stream % in_window, (end - window + per_stream - 1) // per_stream, end


@triton.jit
def _class_of(plans, class_plan, classes, column, active):  # type: ignore[no-untyped-def]
    """Return the planes of each lane's column and the place of its tables; 0 planes where there is no column."""
    k = tl.load(classes + column, mask=active, other=0).to(tl.int32)
    plan = plans + (class_plan + k) * PLAN_FIELDS
    depth = tl.load(plan + PLAN_PLANES, mask=active, other=0).to(tl.int32)
    return depth, tl.load(plan + PLAN_TABLES, mask=active, other=0).to(tl.int32)


@triton.jit
def _refine_step(x, at, word, escaped, end, words, decoding, route, level, out, active, PROB_BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Decode a symbol per lane and store its finer level. Return the new state, position, its word, and escapes."""
    # What damaged streams left may wrap in abs(): the table must be one of the component's all the same.
    context = tl.minimum(tl.abs(level), _LAST_CONTEXT) & _LAST_CONTEXT
    table = (route & _TABLE) + context
    slot, entry = _find_entry(x, decoding + table * _WIDTH, PROB_BITS)
    symbol = (entry << 12).to(tl.int32, bitcast=True) >> 24
    tl.store(out, 2 * level + tl.where(level < 0, -symbol, symbol), mask=active)
    x, at, word = _advance(x, slot, entry, at, word, end, words, PROB_BITS)
    return x, at, word, escaped + (symbol == _ESCAPED).to(tl.int32)


@triton.jit
def _refine_run(  # type: ignore[no-untyped-def]
    x, at, word, escaped, end, words, decoding, route_of, levels, stride, steps, active, PROB_BITS: tl.constexpr
):
    """Refine `steps` levels per lane, at least one; see `_refine_step`. Lanes that are not active find no escapes."""
    # The level of a step is fetched one step ahead, as no step changes that of another.
    route = tl.load(route_of)
    out = levels + (route >> _TABLE_BITS).to(tl.int64) * stride
    level = tl.load(out, mask=active, other=0)
    for _ in tl.range(1, steps, loop_unroll_factor=UNROLL):
        route_of += 1
        following_route = tl.load(route_of)
        following_out = levels + (following_route >> _TABLE_BITS).to(tl.int64) * stride
        following = tl.load(following_out, mask=active, other=0)
        x, at, word, escaped = _refine_step(
            x, at, word, escaped, end, words, decoding, route, level, out, active, PROB_BITS
        )
        route, out, level = following_route, following_out, following
    return _refine_step(x, at, word, escaped, end, words, decoding, route, level, out, active, PROB_BITS)


@triton.jit(do_not_specialize=["blocks"])
def _decode_classes_kernel(  # type: ignore[no-untyped-def]
    data16, data32, jobs, plans, tables, decoding, classes, out, found, status, blocks,
    PROB_BITS: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0) // blocks
    first = tl.program_id(0) % blocks * LANES
    job = jobs + index * JOB_FIELDS
    streams = tl.load(job + JOB_STREAMS).to(tl.int32)
    class_plan = tl.load(job + JOB_CLASS_PLAN)
    if (first >= streams) | (class_plan <= 0):
        return
    deepest_table = tl.load(plans + tl.load(job + JOB_PLAN) * PLAN_FIELDS + PLAN_TABLES).to(tl.int32)
    tokens = tl.load(job + JOB_TOKENS).to(tl.int32)
    per_stream = tl.load(job + JOB_PER_STREAM).to(tl.int32)
    stream = first + tl.arange(0, LANES)
    exists = stream < streams
    at, end, ends = _open_streams(data16, job, first, stream, exists, BLOCK)
    x = tl.load(data32 + tl.load(job + JOB_STATES) + stream, mask=exists, other=_BOUND)
    bad = x < _BOUND
    words = data16 + tl.load(job + JOB_WORDS)
    classes += tl.load(job + JOB_COLUMNS)
    # Bytes are the symbols of planes; int32 are the levels of a base, which a refinement's symbols change.
    if out.dtype.element_ty == tl.uint8:
        out += tl.load(job + JOB_PLANES)
    else:
        out += tl.load(job + JOB_LEVELS)
    escaped = tl.zeros([LANES], tl.int32)
    column, stride, end_column = _columns(stream, tokens, per_stream)
    for _ in range(tl.minimum(per_stream, tokens)):
        depth, table = _class_of(plans, class_plan, classes, column, exists & (column < end_column))
        deepest = tl.max(depth, 0)
        word = tl.load(words + at, mask=at < end, other=0).to(tl.uint32)
        last_x, last_at = x, at
        done = tl.minimum(deepest, 0)
        while done < deepest:
            active = depth > done
            stop = tl.min(tl.where(active, depth, deepest), 0)
            # Lanes that are done run along, store nothing, and keep the state they ended in. With a state of 0 and no
            # more words they stay at slot 0 of a table that another lane reads, and cost no cache lines.
            x = tl.where(active, x, 0)
            at = tl.where(active, at, end)
            word = tl.where(active, word, 0)
            table_of = tables + (tl.where(active, table, deepest_table) + done)
            if out.dtype.element_ty == tl.uint8:
                row = out + done.to(tl.int64) * tokens + column
                x, at, word = _decode_run(
                    x, at, word, end, words, decoding, table_of, row, tokens, stop - done, active, PROB_BITS
                )
            else:
                pitch = tl.load(job + JOB_STRIDE).to(tl.int32)
                x, at, word, escaped = _refine_run(
                    x, at, word, escaped, end, words, decoding, table_of, out + column, pitch, stop - done, active,
                    PROB_BITS,
                )  # fmt: skip
            last_x = tl.where(active, x, last_x)
            last_at = tl.where(active, at, last_at)
            done = stop
        x, at = last_x, last_at
        column += stride
    bad |= (x != _BOUND) | (at != end)
    _flag_streams(status + index, bad, exists, ends, job, first + LANES >= streams)
    if out.dtype.element_ty == tl.int32:
        total = tl.sum(escaped, 0)
        tl.atomic_add(found + index, total, mask=total > 0, sem="relaxed")


def rans_decode_classes(
    data: torch.Tensor,
    coding: StreamJobs,
    decoding: DecodingTables,
    classes: torch.Tensor,
    planes: torch.Tensor,
    status: torch.Tensor,
) -> None:
    """Decode the streams of all jobs whose tokens have classes; `rans.rans_decode` decodes the others.

    Args:
        data: as for `rans.rans_decode`.
        coding: likewise; CLASS_PLAN and COLUMNS are read too. PLAN is the plan of the finest class that occurs. Of the
            plans, PLANES and FIRST are read; PLANES never rises with the class.
        decoding: as for `rans.rans_decode`.
        classes: uint8 below 16: `TokenOrder.classes`.
        planes: uint8, gets `[P, T]` at `JobField.PLANES`; below a column's last plane nothing is written.
        status: as for `rans.rans_decode`.
    """
    blocks = triton.cdiv(coding.max_streams, LANES)
    _decode_classes_kernel[(blocks * len(coding.jobs),)](
        data.view(torch.uint16), data.view(torch.uint32), coding.jobs, coding.plans, coding.tables,
        decoding.words, classes, planes, None, status, blocks, PROB_BITS=decoding.prob_bits, LANES=LANES,
        BLOCK=PRECEDING, num_warps=1, enable_fp_fusion=True, **REGISTERS,
    )  # fmt: skip


def rans_refine(
    data: torch.Tensor,
    coding: StreamJobs,
    decoding: DecodingTables,
    classes: torch.Tensor,
    levels: torch.Tensor,
    status: torch.Tensor,
    found: torch.Tensor,
) -> None:
    """Decode the streams of a refinement, and refine the levels of what it refines in place.

    Args:
        data: as for `rans.rans_decode`.
        coding: as for `rans_decode_classes`, but LEVELS and STRIDE are read in place of PLANES; `tables` holds the
            `pack_route` of each component, at `PlanField.TABLES`.
        decoding: as for `rans.rans_decode`; the tables of the other contexts of a component follow that of context 0.
        classes: as for `rans_decode_classes`.
        levels: int32, `[rows, STRIDE]` at `JobField.LEVELS`: the coarser levels, 0 where a component has none, and
            afterwards the finer ones, with ESCAPED in the place of those that are listed (`place_levels`).
        status: as for `rans.rans_decode`.
        found: int32 `[J]`, zeros; gets the number of escapes.
    """
    blocks = triton.cdiv(coding.max_streams, LANES)
    _decode_classes_kernel[(blocks * len(coding.jobs),)](
        data.view(torch.uint16), data.view(torch.uint32), coding.jobs, coding.plans, coding.tables,
        decoding.words, classes, levels, found, status, blocks, PROB_BITS=decoding.prob_bits, LANES=LANES,
        BLOCK=PRECEDING, num_warps=1, enable_fp_fusion=True, **REGISTERS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["blocks"])
def _encode_classes_kernel(  # type: ignore[no-untyped-def]
    planes, jobs, plans, tables, coding, classes, words, states, lengths, blocks, LANES: tl.constexpr
):
    index = tl.program_id(0) // blocks
    first = tl.program_id(0) % blocks * LANES
    job = jobs + index * JOB_FIELDS
    streams = tl.load(job + JOB_STREAMS).to(tl.int32)
    class_plan = tl.load(job + JOB_CLASS_PLAN)
    if (first >= streams) | (class_plan <= 0):
        return
    plan = plans + tl.load(job + JOB_PLAN) * PLAN_FIELDS
    deepest_table = tl.load(plan + PLAN_TABLES).to(tl.int32)
    tokens = tl.load(job + JOB_TOKENS).to(tl.int32)
    per_stream = tl.load(job + JOB_PER_STREAM).to(tl.int32)
    total, scale = _totals(coding)
    stream = first + tl.arange(0, LANES)
    exists = stream < streams
    region = tl.load(plan + PLAN_PLANES) * per_stream
    top = words + tl.load(job + JOB_WORDS) + (stream + 1).to(tl.int64) * region
    classes += tl.load(job + JOB_COLUMNS)
    planes += tl.load(job + JOB_PLANES)
    column, stride, end_column = _columns(stream, tokens, per_stream)
    rows = tl.minimum(per_stream, tokens)
    column += (rows - 1) * stride
    x = tl.full([LANES], _BOUND, tl.uint32)
    at = tl.zeros([LANES], tl.int32)
    for _ in range(rows):
        depth, table = _class_of(plans, class_plan, classes, column, exists & (column < end_column))
        left = tl.max(depth, 0)
        while left > 0:
            active = depth >= left
            stop = tl.max(tl.where(active, 0, depth), 0)
            table_of = tables + (tl.where(active, table, deepest_table) + left - 1)
            row = planes + (left - 1).to(tl.int64) * tokens + column
            new_x, new_at = _encode_run(x, at, top, coding, table_of, row, tokens, left - stop, total, scale, active)
            x = tl.where(active, new_x, x)
            at = tl.where(active, new_at, at)
            left = stop
        column -= stride
    tl.store(states + tl.load(job + JOB_STATES) + stream, x, mask=exists)
    tl.store(lengths + tl.load(job + JOB_LENGTHS) + stream, (-at).to(tl.uint32), mask=exists)


def rans_encode_classes(
    planes: torch.Tensor,
    coding: StreamJobs,
    entries: torch.Tensor,
    classes: torch.Tensor,
    streams: EncodedStreams,
) -> None:
    """Code the planes of all jobs whose tokens have classes: the words of the reference's `rans_encode_classes`.

    Args:
        planes: as for `rans.rans_encode`.
        coding: likewise; CLASS_PLAN and COLUMNS are read too. PLAN is the plan of the finest class that occurs.
        entries: as for `rans.rans_encode`.
        classes: as for `rans_decode_classes`.
        streams: as for `rans.rans_encode`.
    """
    blocks = triton.cdiv(coding.max_streams, LANES)
    _encode_classes_kernel[(blocks * len(coding.jobs),)](
        planes, coding.jobs, coding.plans, coding.tables, entries.view(torch.int64), classes, streams.words,
        streams.states, streams.lengths, blocks, LANES=LANES, num_warps=1, enable_fp_fusion=True,
    )  # fmt: skip
