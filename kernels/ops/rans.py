"""The entropy coder on the GPU: decode and encode interleaved rANS.

    decode   data --rans_decode--> planes [P, T]
    encode   planes --rans_encode--> words, states, lengths --coded_part--> out

`codec/FORMAT.md` ("Coded part") specifies the coder and the bytes. Each lane codes one
stream, and the symbols that the lanes of a program store or load lie side by side. The columns of the lanes may belong
to several classes, which differ in their planes and tables. Columns are sorted, so the classes at one time are few.
Every lane looks up its own table, and a row of columns, one per lane, is coded in *segments* that end where the planes
of some class end:

    lanes   0 … 9   10 … 25   26 … 31
    planes  70      64        51          0 … 50 in all lanes, 51 … 63 in lanes 0 … 25, 64 … 69 in lanes 0 … 9

Within a segment the same lanes stay active, so its loop costs no more than if all had one class.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from cuvee.codec.entropy.tables import PROB_BITS, SYMBOLS, TOTAL, EntropyTables
from cuvee.codec.format.streams import LOWER_BOUND, WINDOW
from cuvee.codec.support.arrays import U32
from cuvee.kernels.jobs import JOB, PLAN, STATUS
from cuvee.kernels.ops.arguments import EncodedStreams, StreamJobs

_BOUND = tl.constexpr(LOWER_BOUND)
_SYMBOLS = tl.constexpr(SYMBOLS)
_PROB_BITS = tl.constexpr(PROB_BITS)
_TOTAL = tl.constexpr(TOTAL)
_WINDOW = tl.constexpr(WINDOW)
# A row of a decode table: a word for each SPAN slots, then an entry per symbol. See `decoding_table`.
SPAN = 24
ENTRIES = 256  # where these begin
WIDTH = 512  # words; a power of two
_SPAN = tl.constexpr(SPAN)
_SPAN_RECIPROCAL = tl.constexpr((1 << 16) // SPAN + 1)  # floor(s * this / 2**16) is s div SPAN for s < 2**13
_ENTRIES = tl.constexpr(ENTRIES)
_WIDTH = tl.constexpr(WIDTH)
# Streams of a program: one warp, so that the streams of a single chunk already spread over many multiprocessors.
LANES = 64 if torch.version.hip else 32
# What the inner loops need. Without a limit the compiler takes more for the code around them. AMD has no such option.
REGISTERS: dict[str, Any] = {} if torch.version.hip else {"maxnreg": 40}
UNROLL = tl.constexpr(4)  # symbols of a pass of the decoder's inner loop: they share its branch and its pointers
# Lengths read at a time to find where a stream begins; more would take the inner loop's registers.
PRECEDING = tl.constexpr(64)


@triton.jit
def _length(lengths, stream, long, exists):  # type: ignore[no-untyped-def]
    """Return the words of streams, int64, from a section's bytes: one or (`long` = 1) two uint16 each."""
    at = lengths + stream * (1 + long)
    low = tl.load(at, mask=exists, other=0).to(tl.int64)
    high = tl.load(at + 1, mask=tl.where(exists, long, 0) > 0, other=0).to(tl.int64)
    return low + (high << 16)


@triton.jit
def _ones(word):  # type: ignore[no-untyped-def]
    """Count the set bits of uint32; the compiler recognizes these steps and emits one instruction."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    return (((word + (word >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24


@triton.jit
def _find_entry(x, row):  # type: ignore[no-untyped-def]
    """Return the slots of states, and what the table at `row` has for them; the symbol is in bits 12 … 19."""
    slot = x & (_TOTAL - 1)
    span = (slot * _SPAN_RECIPROCAL) >> 16
    begun = tl.load(row + span)
    later = tl.full(x.shape, 0xFFFFFFFE, tl.uint32) << (slot - span * _SPAN)
    return slot, tl.load(row + _ENTRIES + ((begun >> 24) + _ones(begun & ~later)))


@triton.jit
def _advance(x, slot, entry, at, word, end, words):  # type: ignore[no-untyped-def]
    """Return the states after symbols, the new positions and their words."""
    x = (entry >> 20) * (x >> _PROB_BITS) + (slot - (entry & 0xFFF))
    need = x < _BOUND
    x = tl.where(need, (x << 16) | word, x)
    at += need.to(tl.int32)
    # The next word is fetched as soon as this one is used, so that the chain state -> entry -> state does not wait for
    # it. Lanes that used none load none: each lane reads a cache line of its own. Beyond the end there are zeros.
    following = tl.load(words + at, mask=need & (at < end), other=0).to(tl.uint32)
    return x, at, tl.where(need, following, word)


@triton.jit
def _decode_step(x, at, word, end, words, row, out, active):  # type: ignore[no-untyped-def]
    """Decode and store one symbol per lane with the table at `row`. Return the new state, position and its word."""
    slot, entry = _find_entry(x, row)
    tl.store(out, (entry >> 12).to(tl.uint8), mask=active)
    return _advance(x, slot, entry, at, word, end, words)


@triton.jit
def _decode_run(x, at, word, end, words, decoding, table_of, out, tokens, steps, active):  # type: ignore[no-untyped-def]
    """Decode `steps` symbols per lane, at least one; see `_decode_step`."""
    # The table of a step is fetched one step ahead; the last step stands apart, as none follows it.
    table = tl.load(table_of)
    for _ in tl.range(1, steps, loop_unroll_factor=UNROLL):
        table_of += 1
        following = tl.load(table_of)
        x, at, word = _decode_step(x, at, word, end, words, decoding + table * _WIDTH, out, active)
        table = following
        out += tokens
    return _decode_step(x, at, word, end, words, decoding + table * _WIDTH, out, active)


@triton.jit
def _open_streams(data16, job, first, stream, exists):  # type: ignore[no-untyped-def]
    """Return the place of each stream's words: first word, end, and the end before clamping.

    The sums are exact, then clamped to the existing words. Wrong lengths shift a stream and are detected, but no read
    leaves the words. Positions fit int32: a section has less than 2**32 bytes.
    """
    long = tl.load(job + JOB.LONG_LENGTHS).to(tl.int32)
    lengths = data16 + tl.load(job + JOB.LENGTHS)
    before = tl.zeros([PRECEDING], tl.int64)
    for start in range(0, first, PRECEDING):
        other = start + tl.arange(0, PRECEDING)
        before += _length(lengths, other, long, other < first)
    length = _length(lengths, stream, long, exists)
    ends = tl.sum(before, 0) + tl.cumsum(length, 0)
    word_count = tl.load(job + JOB.WORD_COUNT)
    return tl.minimum(ends - length, word_count).to(tl.int32), tl.minimum(ends, word_count).to(tl.int32), ends


@triton.jit
def _flag_streams(status, bad, exists, ends, job, is_last):  # type: ignore[no-untyped-def]
    """Flag the job if a stream is `bad`, or if the last program's lengths do not add up."""
    wrong = tl.max((bad & exists).to(tl.int32), 0) > 0
    wrong |= is_last & (tl.max(ends, 0) != tl.load(job + JOB.WORD_COUNT))
    tl.atomic_or(status, STATUS.STREAMS, mask=wrong)


@triton.jit
def _columns(stream, tokens, per_stream):  # type: ignore[no-untyped-def]
    """Return each stream's first column, the distance to its next column, and the end of its window."""
    in_window = _WINDOW // per_stream
    window = stream // in_window * _WINDOW
    end = tl.minimum(window + _WINDOW, tokens)
    return window + stream % in_window, (end - window + per_stream - 1) // per_stream, end


@triton.jit
def _class_of(plans, first_plan, classes, column, active):  # type: ignore[no-untyped-def]
    """Return the planes of each lane's column and the place of its tables; 0 planes where there is no column."""
    k = tl.load(classes + column, mask=active, other=0).to(tl.int32)
    plan = plans + (first_plan + k) * PLAN.FIELDS
    depth = tl.load(plan + PLAN.PLANES, mask=active, other=0).to(tl.int32)
    return depth, tl.load(plan + PLAN.TABLES, mask=active, other=0).to(tl.int32)


@triton.jit(do_not_specialize=["blocks"])
def _decode_kernel(  # type: ignore[no-untyped-def]
    data32, jobs, plans, tables, decoding, classes, planes, status, blocks, LANES: tl.constexpr
):
    index = tl.program_id(0) // blocks
    first = tl.program_id(0) % blocks * LANES
    job = jobs + index * JOB.FIELDS
    streams = tl.load(job + JOB.STREAMS).to(tl.int32)
    if first >= streams:
        return
    first_plan = tl.load(job + JOB.PLAN)
    deepest_table = tl.load(plans + tl.load(job + JOB.DEEPEST) * PLAN.FIELDS + PLAN.TABLES).to(tl.int32)
    tokens = tl.load(job + JOB.TOKENS).to(tl.int32)
    per_stream = tl.load(job + JOB.PER_STREAM).to(tl.int32)
    stream = first + tl.arange(0, LANES)
    exists = stream < streams
    data16 = data32.to(tl.pointer_type(tl.uint16))
    at, end, ends = _open_streams(data16, job, first, stream, exists)
    x = tl.load(data32 + tl.load(job + JOB.STATES) + stream, mask=exists, other=_BOUND)
    bad = x < _BOUND
    words = data16 + tl.load(job + JOB.WORDS)
    classes += tl.load(job + JOB.COLUMNS)
    planes += tl.load(job + JOB.PLANES)
    column, stride, end_column = _columns(stream, tokens, per_stream)
    for _ in range(tl.minimum(per_stream, tokens)):
        depth, table = _class_of(plans, first_plan, classes, column, exists & (column < end_column))
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
            x, at, word = _decode_run(x, at, word, end, words, decoding, table_of, row, tokens, stop - done, active)
            last_x = tl.where(active, x, last_x)
            last_at = tl.where(active, at, last_at)
            done = stop
        x, at = last_x, last_at
        column += stride
    bad |= (x != _BOUND) | (at != end)
    _flag_streams(status + index, bad, exists, ends, job, first + LANES >= streams)


def rans_decode(
    data: torch.Tensor,
    coding: StreamJobs,
    decoding: torch.Tensor,
    classes: torch.Tensor,
    planes: torch.Tensor,
    status: torch.Tensor,
) -> None:
    """Decode the streams of all jobs.

    The caller has checked that the states, lengths and words of a job lie within `data`; their values are not trusted.
    Every program reads the lengths of all streams before its own: S**2 / 64 lengths per job, which is little beside its
    symbols for up to some thousand streams.

    Args:
        data: `[bytes]` uint8, a multiple of 4: the coded parts.
        coding: all fields of jobs but those of escapes, coefficients and class streams are read; of the plans, PLANES
            and TABLES. PLANES never rises with the class.
        decoding: uint32 `[K, WIDTH]`, see `decoding_table`.
        classes: uint8 below 16: `TokenOrder.classes`.
        planes: uint8, gets `[P, T]` at `JobField.PLANES`; below a column's last plane nothing is written.
        status: `[J]` int32, gets `Status.STREAMS` where the lengths do not add up to WORD_COUNT, or a stream begins in
            a state below 2**16, does not end in 2**16, or does not end with its words. Its symbols are then anything.
    """
    blocks = triton.cdiv(coding.max_streams, LANES)
    _decode_kernel[(blocks * len(coding.jobs),)](
        data.view(torch.uint32), coding.jobs, coding.plans, coding.tables, decoding, classes, planes, status, blocks,
        LANES=LANES, num_warps=1, enable_fp_fusion=True, **REGISTERS,
    )  # fmt: skip


def decoding_table(tables: EntropyTables) -> U32:
    """Return the decoder's lookup tables: uint32 `[K, WIDTH]`.

    A table of `EntropyTables.slots` has 4096 words, and nearly every lane of a warp looks at a cache line of
    its own. Here it looks at two of a tenth as many lines, and the tables of a family fit the first-level cache. Number
    the symbols that have slots from 0, in the order of these. First comes a word for each SPAN slots: how many symbols
    begin before them, the first symbol aside, << 24 | the bits 1 << i of those that begin at the i-th of them. So the
    number of a slot's symbol is the upper byte and the bits up to the slot, added up. Then, from ENTRIES on, comes an
    entry for each number: frequency << 20 | symbol << 12 | cumulative. What neither fills is zero.
    """
    out = np.zeros((len(tables), WIDTH), np.uint32)
    first = np.arange(0, TOTAL, SPAN)
    for row, freq, cumulative in zip(out, tables.freq, tables.cumulative, strict=True):
        symbols = np.flatnonzero(freq)
        low = cumulative[symbols]
        fields = (freq[symbols], 20), (symbols, 12), (low, 0)
        row[ENTRIES:][: len(symbols)] = sum(part.astype(np.uint32) << np.uint32(shift) for part, shift in fields)
        row[: len(first)] = np.searchsorted(low[1:], first).astype(np.uint32) << np.uint32(24)
        np.bitwise_or.at(row, low[1:] // SPAN, np.uint32(1) << (low[1:] % SPAN).astype(np.uint32))
    return out


def coding_table(tables: EntropyTables) -> U32:
    """Return the encoder's lookup tables: `[K, 256, 2]` uint32 of frequency << 16 | cumulative, and the reciprocal.

    The reciprocal of a frequency f is m = min(floor(2**32 / f), 2**32 - 1), 0 for a byte that cannot be coded. Then
    q = floor(x m / 2**32) is floor(x / f) or one less, for every x < 2**32: m = 2**32 / f - e with 0 <= e <= 1, so
    x m / 2**32 = x / f - e x / 2**32 lies above x / f - 1 and not above x / f. One comparison, of x - q f with f,
    tells which.
    """
    freq = tables.freq.astype(np.uint64)
    reciprocal = np.minimum((1 << 32) // np.maximum(freq, 1), (1 << 32) - 1)
    packed = freq << np.uint64(16) | tables.cumulative
    return np.stack([packed, np.where(freq > 0, reciprocal, 0)], axis=-1).astype(np.uint32)


@triton.jit
def _entry(coding, table_of, symbols, active):  # type: ignore[no-untyped-def]
    """Return, for one symbol per lane, frequency << 16 | cumulative, and the reciprocal."""
    symbol = tl.load(symbols, mask=active, other=0).to(tl.int32)
    entry = tl.load(coding + (tl.load(table_of) * _SYMBOLS + symbol))
    return entry.to(tl.uint32), (entry >> 32).to(tl.uint32)


@triton.jit
def _encode_step(x, at, top, packed, reciprocal, active):  # type: ignore[no-untyped-def]
    """Code one symbol per lane; store a word where the state is full. Return the new state and position below `top`."""
    frequency = packed >> 16
    full = x >= frequency << (32 - _PROB_BITS)
    at -= full.to(tl.int32)
    tl.store(top + at, x.to(tl.uint16), mask=full & active)
    x = tl.where(full, x >> 16, x)
    quotient = tl.umulhi(x, reciprocal)
    # (x div f) * 4096 + x mod f + cumulative, with x mod f = x - (x div f) * f. See `coding_table` for the correction.
    gap = _TOTAL - frequency
    correction = tl.where(x - quotient * frequency >= frequency, gap, 0)
    return x + (packed & 0xFFFF) + quotient * gap + correction, at


@triton.jit
def _encode_run(x, at, top, coding, table_of, row, tokens, steps, active):  # type: ignore[no-untyped-def]
    """Code `steps` symbols per lane, from the plane at `row` and the table at `table_of` upwards."""
    for _ in range(steps % 4):
        packed, reciprocal = _entry(coding, table_of, row, active)
        x, at = _encode_step(x, at, top, packed, reciprocal, active)
        row -= tokens
        table_of -= 1
    # Four at a time: their symbols and entries do not depend on the state, and are fetched together.
    for _ in range(steps // 4):
        packed0, reciprocal0 = _entry(coding, table_of, row, active)
        row -= tokens
        packed1, reciprocal1 = _entry(coding, table_of - 1, row, active)
        row -= tokens
        packed2, reciprocal2 = _entry(coding, table_of - 2, row, active)
        row -= tokens
        packed3, reciprocal3 = _entry(coding, table_of - 3, row, active)
        row -= tokens
        table_of -= 4
        x, at = _encode_step(x, at, top, packed0, reciprocal0, active)
        x, at = _encode_step(x, at, top, packed1, reciprocal1, active)
        x, at = _encode_step(x, at, top, packed2, reciprocal2, active)
        x, at = _encode_step(x, at, top, packed3, reciprocal3, active)
    return x, at


@triton.jit(do_not_specialize=["blocks"])
def _encode_kernel(  # type: ignore[no-untyped-def]
    planes, jobs, plans, tables, coding, classes, words, states, lengths, blocks, LANES: tl.constexpr
):
    index = tl.program_id(0) // blocks
    first = tl.program_id(0) % blocks * LANES
    job = jobs + index * JOB.FIELDS
    streams = tl.load(job + JOB.STREAMS).to(tl.int32)
    if first >= streams:
        return
    first_plan = tl.load(job + JOB.PLAN)
    plan = plans + tl.load(job + JOB.DEEPEST) * PLAN.FIELDS
    deepest_table = tl.load(plan + PLAN.TABLES).to(tl.int32)
    tokens = tl.load(job + JOB.TOKENS).to(tl.int32)
    per_stream = tl.load(job + JOB.PER_STREAM).to(tl.int32)
    stream = first + tl.arange(0, LANES)
    exists = stream < streams
    region = tl.load(plan + PLAN.PLANES) * per_stream
    top = words + tl.load(job + JOB.WORDS) + (stream + 1).to(tl.int64) * region
    classes += tl.load(job + JOB.COLUMNS)
    planes += tl.load(job + JOB.PLANES)
    column, stride, end_column = _columns(stream, tokens, per_stream)
    rows = tl.minimum(per_stream, tokens)
    column += (rows - 1) * stride
    x = tl.full([LANES], _BOUND, tl.uint32)
    at = tl.zeros([LANES], tl.int32)
    for _ in range(rows):
        depth, table = _class_of(plans, first_plan, classes, column, exists & (column < end_column))
        left = tl.max(depth, 0)
        while left > 0:
            active = depth >= left
            stop = tl.max(tl.where(active, 0, depth), 0)
            table_of = tables + (tl.where(active, table, deepest_table) + left - 1)
            row = planes + (left - 1).to(tl.int64) * tokens + column
            new_x, new_at = _encode_run(x, at, top, coding, table_of, row, tokens, left - stop, active)
            x = tl.where(active, new_x, x)
            at = tl.where(active, new_at, at)
            left = stop
        column -= stride
    tl.store(states + tl.load(job + JOB.STATES) + stream, x, mask=exists)
    tl.store(lengths + tl.load(job + JOB.LENGTHS) + stream, (-at).to(tl.uint32), mask=exists)


def rans_encode(
    planes: torch.Tensor,
    coding: StreamJobs,
    entries: torch.Tensor,
    classes: torch.Tensor,
    streams: EncodedStreams,
) -> None:
    """Code the planes of all jobs: the words of the stage `rans_encode`.

    A byte whose frequency is zero corrupts its stream, but no other (escape it instead). STATES, LENGTHS and WORDS of
    the jobs index `streams`; `entries` is uint32 `[K, 256, 2]` of `coding_table`, all else as for `rans_decode`.
    """
    blocks = triton.cdiv(coding.max_streams, LANES)
    _encode_kernel[(blocks * len(coding.jobs),)](
        planes, coding.jobs, coding.plans, coding.tables, entries.view(torch.int64), classes, streams.words,
        streams.states, streams.lengths, blocks, LANES=LANES, num_warps=1, enable_fp_fusion=True,
    )  # fmt: skip
