"""The entropy coder on the GPU: decode and encode interleaved rANS.

    decode   data --rans_decode--> planes [P, T]
    encode   planes --rans_encode--> words, states, lengths --coded_part--> out

`codec/stages/reference/rans.py` specifies the coder, `codec/FORMAT.md` ("Coded part") the bytes. Each lane codes one
stream: at every step all lanes of a program use the same table, and the symbols that they store or load lie side by
side.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from cuvee.codec.entropy.tables import SYMBOLS, EntropyTables
from cuvee.codec.format.streams import LOWER_BOUND
from cuvee.codec.support.arrays import U32
from cuvee.kernels.jobs import (
    JOB_CLASS_PLAN,
    JOB_FIELDS,
    JOB_LENGTHS,
    JOB_LONG_LENGTHS,
    JOB_PER_STREAM,
    JOB_PLAN,
    JOB_PLANES,
    JOB_STATES,
    JOB_STREAMS,
    JOB_TOKENS,
    JOB_WORD_COUNT,
    JOB_WORDS,
    PLAN_FIELDS,
    PLAN_PLANES,
    PLAN_TABLES,
    STATUS_STREAMS,
)
from cuvee.kernels.ops.arguments import DecodingTables, EncodedStreams, StreamJobs

_BOUND = tl.constexpr(LOWER_BOUND)
_SYMBOLS = tl.constexpr(SYMBOLS)
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
PRECEDING = 64  # lengths read at a time to find where a stream begins; more would take the inner loop's registers


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
def _find_entry(x, row, PROB_BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the slots of states, and what the table at `row` has for them; the symbol is in bits 12 … 19."""
    slot = x & ((1 << PROB_BITS) - 1)
    span = (slot * _SPAN_RECIPROCAL) >> 16
    begun = tl.load(row + span)
    later = tl.full(x.shape, 0xFFFFFFFE, tl.uint32) << (slot - span * _SPAN)
    return slot, tl.load(row + _ENTRIES + ((begun >> 24) + _ones(begun & ~later)))


@triton.jit
def _advance(x, slot, entry, at, word, end, words, PROB_BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the states after symbols, the new positions and their words."""
    x = (entry >> 20) * (x >> PROB_BITS) + (slot - (entry & 0xFFF))
    need = x < _BOUND
    x = tl.where(need, (x << 16) | word, x)
    at += need.to(tl.int32)
    # The next word is fetched as soon as this one is used, so that the chain state -> entry -> state does not wait for
    # it. Lanes that used none load none: each lane reads a cache line of its own. Beyond the end there are zeros.
    following = tl.load(words + at, mask=need & (at < end), other=0).to(tl.uint32)
    return x, at, tl.where(need, following, word)


@triton.jit
def _decode_step(x, at, word, end, words, row, out, active, PROB_BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Decode and store one symbol per lane with the table at `row`. Return the new state, position and its word."""
    slot, entry = _find_entry(x, row, PROB_BITS)
    tl.store(out, (entry >> 12).to(tl.uint8), mask=active)
    return _advance(x, slot, entry, at, word, end, words, PROB_BITS)


@triton.jit
def _decode_run(x, at, word, end, words, decoding, table_of, out, tokens, steps, active, PROB_BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Decode `steps` symbols per lane, at least one; see `_decode_step`."""
    # The table of a step is fetched one step ahead; the last step stands apart, as none follows it.
    table = tl.load(table_of)
    for _ in tl.range(1, steps, loop_unroll_factor=UNROLL):
        table_of += 1
        following = tl.load(table_of)
        x, at, word = _decode_step(x, at, word, end, words, decoding + table * _WIDTH, out, active, PROB_BITS)
        table = following
        out += tokens
    return _decode_step(x, at, word, end, words, decoding + table * _WIDTH, out, active, PROB_BITS)


@triton.jit
def _open_streams(data16, job, first, stream, exists, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the place of each stream's words: first word, end, and the end before clamping.

    The sums are exact, then clamped to the existing words. Wrong lengths shift a stream and are detected, but no read
    leaves the words. Positions fit int32: a section has less than 2**32 bytes.
    """
    long = tl.load(job + JOB_LONG_LENGTHS).to(tl.int32)
    lengths = data16 + tl.load(job + JOB_LENGTHS)
    before = tl.zeros([BLOCK], tl.int64)
    for start in range(0, first, BLOCK):
        other = start + tl.arange(0, BLOCK)
        before += _length(lengths, other, long, other < first)
    length = _length(lengths, stream, long, exists)
    ends = tl.sum(before, 0) + tl.cumsum(length, 0)
    word_count = tl.load(job + JOB_WORD_COUNT)
    return tl.minimum(ends - length, word_count).to(tl.int32), tl.minimum(ends, word_count).to(tl.int32), ends


@triton.jit
def _flag_streams(status, bad, exists, ends, job, is_last):  # type: ignore[no-untyped-def]
    """Flag the job if a stream is `bad`, or if the last program's lengths do not add up."""
    wrong = tl.max((bad & exists).to(tl.int32), 0) > 0
    wrong |= is_last & (tl.max(ends, 0) != tl.load(job + JOB_WORD_COUNT))
    tl.atomic_or(status, STATUS_STREAMS, mask=wrong)


@triton.jit(do_not_specialize=["blocks"])
def _decode_kernel(  # type: ignore[no-untyped-def]
    data16, data32, jobs, plans, tables, decoding, planes, status, blocks,
    PROB_BITS: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0) // blocks
    first = tl.program_id(0) % blocks * LANES
    job = jobs + index * JOB_FIELDS
    streams = tl.load(job + JOB_STREAMS).to(tl.int32)
    if (first >= streams) | (tl.load(job + JOB_CLASS_PLAN) > 0):
        return
    plan = plans + tl.load(job + JOB_PLAN) * PLAN_FIELDS
    steps = tl.load(plan + PLAN_PLANES).to(tl.int32)
    tokens = tl.load(job + JOB_TOKENS).to(tl.int32)
    per_stream = tl.load(job + JOB_PER_STREAM).to(tl.int32)
    stream = first + tl.arange(0, LANES)
    exists = stream < streams
    at, end, ends = _open_streams(data16, job, first, stream, exists, BLOCK)
    x = tl.load(data32 + tl.load(job + JOB_STATES) + stream, mask=exists, other=_BOUND)
    bad = x < _BOUND
    words = data16 + tl.load(job + JOB_WORDS)
    word = tl.load(words + at, mask=at < end, other=0).to(tl.uint32)
    last_x, last_at = x, at
    token = stream * per_stream
    column = planes + tl.load(job + JOB_PLANES) + token
    # Without planes there is nothing to decode, and a run has at least one step.
    turns = tl.where(steps > 0, tl.minimum(per_stream, tokens - first * per_stream), 0)
    table_of = tables + tl.load(plan + PLAN_TABLES)
    for j in range(turns):
        # Lanes without a token run along, store nothing, and keep the state they ended in.
        active = exists & (token + j < tokens)
        x, at, word = _decode_run(x, at, word, end, words, decoding, table_of, column, tokens, steps, active, PROB_BITS)
        last_x = tl.where(active, x, last_x)
        last_at = tl.where(active, at, last_at)
        column += 1
    bad |= (last_x != _BOUND) | (last_at != end)
    _flag_streams(status + index, bad, exists, ends, job, first + LANES >= streams)


def rans_decode(
    data: torch.Tensor,
    coding: StreamJobs,
    decoding: DecodingTables,
    planes: torch.Tensor,
    status: torch.Tensor,
) -> None:
    """Decode the streams of all jobs whose tokens have no classes.

    The caller has checked that the states, lengths and words of a job lie within `data`; their values are not trusted.
    Every program reads the lengths of all streams before its own: S**2 / 64 lengths per job, which is little beside its
    symbols for up to some thousand streams.

    Args:
        data: `[bytes]` uint8, a multiple of 4: the coded parts.
        coding: of the jobs, STATES, LENGTHS, WORDS, WORD_COUNT, STREAMS, TOKENS, PER_STREAM, LONG_LENGTHS, PLAN and
            PLANES are read.
        decoding: of `decoding_table`.
        planes: uint8, gets `[P, T]` at `JobField.PLANES`.
        status: `[J]` int32, gets `Status.STREAMS` where the lengths do not add up to WORD_COUNT, or a stream begins in
            a state below 2**16, does not end in 2**16, or does not end with its words. Its symbols are then anything.
    """
    blocks = triton.cdiv(coding.max_streams, LANES)
    _decode_kernel[(blocks * len(coding.jobs),)](
        data.view(torch.uint16), data.view(torch.uint32), coding.jobs, coding.plans, coding.tables,
        decoding.words, planes, status, blocks, PROB_BITS=decoding.prob_bits, LANES=LANES, BLOCK=PRECEDING,
        num_warps=1, enable_fp_fusion=True, **REGISTERS,
    )  # fmt: skip


def decoding_table(tables: EntropyTables) -> U32:
    """Return the decoder's lookup tables: uint32 `[K, WIDTH]`, for `DecodingTables`.

    A table of `EntropyTables.slots` has 2**prob_bits words, and nearly every lane of a warp looks at a cache line of
    its own. Here it looks at two of a tenth as many lines, and the tables of a family fit the first-level cache. Number
    the symbols that have slots from 0, in the order of these. First comes a word for each SPAN slots: how many symbols
    begin before them, the first symbol aside, << 24 | the bits 1 << i of those that begin at the i-th of them. So the
    number of a slot's symbol is the upper byte and the bits up to the slot, added up. Then, from ENTRIES on, comes an
    entry for each number: frequency << 20 | symbol << 12 | cumulative. What neither fills is zero.
    """
    out = np.zeros((len(tables), WIDTH), np.uint32)
    first = np.arange(0, 1 << tables.prob_bits, SPAN)
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
def _encode_step(x, at, top, packed, reciprocal, total, scale, active):  # type: ignore[no-untyped-def]
    """Code one symbol per lane; store a word where the state is full. Return the new state and position below `top`."""
    frequency = packed >> 16
    full = x >= frequency * scale
    at -= full.to(tl.int32)
    tl.store(top + at, x.to(tl.uint16), mask=full & active)
    x = tl.where(full, x >> 16, x)
    quotient = tl.umulhi(x, reciprocal)
    # (x div f) * total + x mod f + cumulative, with x mod f = x - (x div f) * f. See `coding_table` for the correction.
    gap = total - frequency
    correction = tl.where(x - quotient * frequency >= frequency, gap, 0)
    return x + (packed & 0xFFFF) + quotient * gap + correction, at


@triton.jit
def _encode_run(x, at, top, coding, table_of, row, tokens, steps, total, scale, active):  # type: ignore[no-untyped-def]
    """Code `steps` symbols per lane, from the plane at `row` and the table at `table_of` upwards."""
    for _ in range(steps % 4):
        packed, reciprocal = _entry(coding, table_of, row, active)
        x, at = _encode_step(x, at, top, packed, reciprocal, total, scale, active)
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
        x, at = _encode_step(x, at, top, packed0, reciprocal0, total, scale, active)
        x, at = _encode_step(x, at, top, packed1, reciprocal1, total, scale, active)
        x, at = _encode_step(x, at, top, packed2, reciprocal2, total, scale, active)
        x, at = _encode_step(x, at, top, packed3, reciprocal3, total, scale, active)
    return x, at


@triton.jit
def _totals(coding):  # type: ignore[no-untyped-def]
    """Return 2**prob_bits and 2**(32 - prob_bits) of the tables."""
    # The frequencies of a table add up to 2**prob_bits: those of all bytes before the last, and its own.
    last = tl.load(coding + (_SYMBOLS - 1)).to(tl.uint32)
    total = (last >> 16) + (last & 0xFFFF)
    return total, 0xFFFFFFFF // total + 1


@triton.jit(do_not_specialize=["blocks"])
def _encode_kernel(planes, jobs, plans, tables, coding, words, states, lengths, blocks, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    index = tl.program_id(0) // blocks
    first = tl.program_id(0) % blocks * LANES
    job = jobs + index * JOB_FIELDS
    streams = tl.load(job + JOB_STREAMS).to(tl.int32)
    if (first >= streams) | (tl.load(job + JOB_CLASS_PLAN) > 0):
        return
    plan = plans + tl.load(job + JOB_PLAN) * PLAN_FIELDS
    steps = tl.load(plan + PLAN_PLANES).to(tl.int32)
    tokens = tl.load(job + JOB_TOKENS).to(tl.int32)
    per_stream = tl.load(job + JOB_PER_STREAM).to(tl.int32)
    total, scale = _totals(coding)
    stream = first + tl.arange(0, LANES)
    exists = stream < streams
    token = stream * per_stream
    top = words + tl.load(job + JOB_WORDS) + (stream + 1).to(tl.int64) * (steps * per_stream)
    last_row = planes + tl.load(job + JOB_PLANES) + (steps - 1).to(tl.int64) * tokens + token
    x = tl.full([LANES], _BOUND, tl.uint32)
    at = tl.zeros([LANES], tl.int32)
    longest = tl.minimum(per_stream, tokens - first * per_stream)
    last_table = tables + tl.load(plan + PLAN_TABLES) + (steps - 1)
    for back in range(longest):
        j = longest - 1 - back
        active = exists & (token + j < tokens)
        x, at = _encode_run(x, at, top, coding, last_table, last_row + j, tokens, steps, total, scale, active)
        # Lanes without a token run along, store nothing, and begin where the others do.
        x = tl.where(active, x, _BOUND)
        at = tl.where(active, at, 0)
    tl.store(states + tl.load(job + JOB_STATES) + stream, x, mask=exists)
    tl.store(lengths + tl.load(job + JOB_LENGTHS) + stream, (-at).to(tl.uint32), mask=exists)


def rans_encode(planes: torch.Tensor, coding: StreamJobs, entries: torch.Tensor, streams: EncodedStreams) -> None:
    """Code the planes of all jobs whose tokens have no classes: the words of the reference's `rans_encode`.

    A byte whose frequency is zero corrupts its stream, but no other (escape it instead).

    Args:
        planes: uint8, `[P, T]` of each job at `JobField.PLANES`.
        coding: of the jobs, STATES, LENGTHS and WORDS, which index `streams`, STREAMS, TOKENS, PER_STREAM, PLAN and
            PLANES are read.
        entries: `[K, 256, 2]` uint32 of `coding_table`.
        streams: written.
    """
    blocks = triton.cdiv(coding.max_streams, LANES)
    _encode_kernel[(blocks * len(coding.jobs),)](
        planes, coding.jobs, coding.plans, coding.tables, entries.view(torch.int64), streams.words, streams.states,
        streams.lengths, blocks, LANES=LANES, num_warps=1, enable_fp_fusion=True,
    )  # fmt: skip
