"""The entropy coder on the GPU for tokens that have classes: `codec/stages/reference/rans_by_class.py`.

Each lane codes one stream, as in `rans.py`, but the columns of a program's lanes may belong to several classes, which
differ in their planes and tables. Columns are sorted, so the classes at one time are few. Every lane looks up its own
table, and a row of columns, one per lane, is coded in *segments* that end where the planes of some class end:

    lanes   0 … 9   10 … 25   26 … 31
    planes  70      64        51          0 … 50 in all lanes, 51 … 63 in lanes 0 … 25, 64 … 69 in lanes 0 … 9

Within a segment the same lanes stay active, so its loop costs no more than without classes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cuvee.codec.format.streams import WINDOW
from cuvee.kernels.jobs import (
    JOB_CLASS_PLAN,
    JOB_COLUMNS,
    JOB_FIELDS,
    JOB_LENGTHS,
    JOB_PER_STREAM,
    JOB_PLAN,
    JOB_PLANES,
    JOB_STATES,
    JOB_STREAMS,
    JOB_TOKENS,
    JOB_WORDS,
    PLAN_FIELDS,
    PLAN_PLANES,
    PLAN_TABLES,
)
from cuvee.kernels.ops.arguments import DecodingTables, EncodedStreams, StreamJobs
from cuvee.kernels.ops.rans import (
    _BOUND,
    LANES,
    PRECEDING,
    REGISTERS,
    _decode_run,
    _encode_run,
    _flag_streams,
    _open_streams,
    _totals,
)

_WINDOW = tl.constexpr(WINDOW)


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


@triton.jit(do_not_specialize=["blocks"])
def _decode_classes_kernel(  # type: ignore[no-untyped-def]
    data16, data32, jobs, plans, tables, decoding, classes, planes, status, blocks,
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
    planes += tl.load(job + JOB_PLANES)
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
            row = planes + done.to(tl.int64) * tokens + column
            x, at, word = _decode_run(
                x, at, word, end, words, decoding, table_of, row, tokens, stop - done, active, PROB_BITS
            )
            last_x = tl.where(active, x, last_x)
            last_at = tl.where(active, at, last_at)
            done = stop
        x, at = last_x, last_at
        column += stride
    bad |= (x != _BOUND) | (at != end)
    _flag_streams(status + index, bad, exists, ends, job, first + LANES >= streams)


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
        decoding.words, classes, planes, status, blocks, PROB_BITS=decoding.prob_bits, LANES=LANES,
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
