"""Layout of a section's coded part on the GPU: count the words that the encoder left, then write headers and streams.

    words, states, lengths --count_words--> totals --(host: coded_bytes, places)--write_coded--> out

`codec/FORMAT.md` ("Coded part") specifies the bytes.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from cuvee.kernels.jobs import JOB, PART, PLAN
from cuvee.kernels.ops.arguments import EncodedStreams, StreamJobs

HEADER_BYTES = 20  # W, E, log2 n, zeros, C, the class state
_HEADER = tl.constexpr(HEADER_BYTES // 4)
_SHORT_LENGTH = 0xFFFF  # the most symbols of a stream for which two bytes hold its words
_WRITE_STREAMS = 16
# Of a program of `write_coded`: streams; and how many preceding lengths, words and escapes it takes at a time.
STREAMS, PRECEDING, WORDS, ESCAPES = (tl.constexpr(number) for number in (_WRITE_STREAMS, 256, 128, 1024))
Count = TypeVar("Count", int, npt.NDArray[np.int64])


def long_lengths(planes: Count, per_stream: Count) -> Count:
    """Return 1 where lengths of streams take four bytes, for this many planes and tokens per stream; else 0."""
    long: Count = 1 * (planes * per_stream > _SHORT_LENGTH)
    return long


@triton.jit
def _count_kernel(jobs, lengths, totals, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    job = jobs + tl.program_id(0) * JOB.FIELDS
    streams = tl.load(job + JOB.STREAMS).to(tl.int32)
    first = lengths + tl.load(job + JOB.LENGTHS)
    total = tl.zeros([BLOCK], tl.int64)
    for start in range(0, streams, BLOCK):
        stream = start + tl.arange(0, BLOCK)
        total += tl.load(first + stream, mask=stream < streams, other=0).to(tl.int64)
    tl.store(totals + tl.program_id(0), tl.sum(total, 0))


def count_words(coding: StreamJobs, lengths: torch.Tensor, totals: torch.Tensor) -> None:
    """Add up the words of each job in `totals`, int64 `[J]`, by which the host places the coded parts."""
    block = min(2048, max(256, triton.next_power_of_2(coding.max_streams)))
    _count_kernel[(len(coding.jobs),)](coding.jobs, lengths, totals, BLOCK=block, enable_fp_fusion=True)


def coded_bytes(streams: Count, long: Count, words: Count, escapes: Count, class_words: Count) -> Count:
    """Return the size of coded parts in bytes: of one (ints) or of many (int64 arrays); `long` as in `long_lengths`."""
    coded = HEADER_BYTES + (6 + 2 * long) * streams + 2 * (words + class_words)
    size: Count = coded + -coded % 4 + 8 * escapes
    return size


@triton.jit(do_not_specialize=["blocks"])
def _write_kernel(  # type: ignore[no-untyped-def]
    jobs, parts, plans, words, states, lengths, escape_index, escape_value, class_words, out32, blocks
):
    block = tl.program_id(0) % blocks
    first = block * STREAMS
    job = jobs + tl.program_id(0) // blocks * JOB.FIELDS
    part = parts + tl.program_id(0) // blocks * PART.FIELDS
    streams = tl.load(job + JOB.STREAMS).to(tl.int32)
    if first >= streams:
        return
    steps = tl.load(plans + tl.load(job + JOB.DEEPEST) * PLAN.FIELDS + PLAN.PLANES)
    region = steps * tl.load(job + JOB.PER_STREAM)
    long = tl.load(job + JOB.LONG_LENGTHS).to(tl.int32)
    word_count = tl.load(part + PART.WORD_COUNT)
    escape_count = tl.load(part + PART.ESCAPE_COUNT)
    class_count = tl.load(job + JOB.CLASS_WORD_COUNT)
    section = out32 + tl.load(part + PART.SECTION) // 4
    coded_lengths = out32.to(tl.pointer_type(tl.uint16)) + tl.load(part + PART.SECTION) // 2 + 2 * (_HEADER + streams)
    coded_words = coded_lengths + streams * (1 + long) + class_count
    coded = 2 * (_HEADER + streams) + streams * (1 + long) + class_count + word_count  # in uint16, padding apart
    if block == 0:
        per_stream = tl.load(job + JOB.PER_STREAM).to(tl.int32)
        log2 = tl.sum((per_stream >> tl.arange(0, 8) > 0).to(tl.int32), 0) - 1
        tl.store(section, word_count.to(tl.uint32))
        tl.store(section + 1, escape_count.to(tl.uint32))
        tl.store(section + 2, log2.to(tl.uint32))
        tl.store(section + 3, class_count.to(tl.uint32))
        tl.store(section + 4, tl.load(job + JOB.CLASS_STATE).to(tl.uint32))
        listed = class_words + tl.load(job + JOB.CLASS_WORDS)
        for start in range(0, class_count, WORDS):
            at = start + tl.arange(0, WORDS)
            word = tl.load(listed + at, mask=at < class_count, other=0)
            tl.store(coded_words - class_count + at, word, mask=at < class_count)
        tl.store(coded_words + word_count, 0, mask=coded % 2 > 0)

    lengths += tl.load(job + JOB.LENGTHS)
    before = tl.zeros([PRECEDING], tl.int64)
    for start in range(0, first, PRECEDING):
        other = start + tl.arange(0, PRECEDING)
        before += tl.load(lengths + other, mask=other < first, other=0).to(tl.int64)
    stream = first + tl.arange(0, STREAMS)
    exists = stream < streams
    length = tl.load(lengths + stream, mask=exists, other=0)
    written = coded_lengths + stream * (1 + long)
    tl.store(written, length.to(tl.uint16), mask=exists)
    tl.store(written + 1, (length >> 16).to(tl.uint16), mask=tl.where(exists, long, 0) > 0)
    state = tl.load(states + tl.load(job + JOB.STATES) + stream, mask=exists, other=0)
    tl.store(section + _HEADER + stream, state, mask=exists)

    size = length.to(tl.int64)
    source = words + tl.load(job + JOB.WORDS) + (stream + 1) * region - size
    target = coded_words + tl.sum(before, 0) + tl.cumsum(size, 0) - size
    for start in range(0, tl.max(length, 0).to(tl.int32), WORDS):
        at = start + tl.arange(0, WORDS)
        inside = at[None, :] < length.to(tl.int32)[:, None]
        word = tl.load(source[:, None] + at[None, :], mask=inside, other=0)
        tl.store(target[:, None] + at[None, :], word, mask=inside)

    # The programs of a job share its escapes.
    index = section + (coded + 1) // 2
    escapes = tl.load(part + PART.ESCAPES)
    for start in range(block * ESCAPES, escape_count, tl.cdiv(streams, STREAMS) * ESCAPES):
        escape = start + tl.arange(0, ESCAPES)
        inside = escape < escape_count
        tl.store(index + escape, tl.load(escape_index + escapes + escape, mask=inside, other=0), mask=inside)
        value = tl.load(escape_value + escapes + escape, mask=inside, other=0)
        tl.store(index + escape_count + escape, value.to(tl.uint32, bitcast=True), mask=inside)


def write_coded(
    coding: StreamJobs,
    parts: torch.Tensor,
    streams: EncodedStreams,
    escape_index: torch.Tensor,
    escape_value: torch.Tensor,
    class_words: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Write the coded part of each job as FORMAT.md describes it, `coded_bytes` long, to `PartField.SECTION` of `out`.

    `coding` and `streams` are those of `rans_encode`; the fields of lengths and class streams are read too. Escapes are
    uint32, row * T + column, rising within a job, and int32. `class_words` are uint16, `out` is uint8, a multiple of 4.
    """
    blocks = triton.cdiv(coding.max_streams, _WRITE_STREAMS)
    _write_kernel[(blocks * len(coding.jobs),)](
        coding.jobs, parts, coding.plans, streams.words, streams.states, streams.lengths, escape_index, escape_value,
        class_words, out.view(torch.uint32), blocks, enable_fp_fusion=True,
    )  # fmt: skip
