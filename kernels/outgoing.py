"""Outgoing coded parts: run rANS, copy their sizes to the host, then all bytes in one copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from cuvee.codec.entropy.coding_plan import CodingPlan
from cuvee.codec.entropy.family import Family
from cuvee.codec.errors import InputError
from cuvee.codec.profiles.sections import Section
from cuvee.codec.schemes.coefficients import tokens_per_stream
from cuvee.kernels.chunks import raise_status
from cuvee.kernels.devices import Download
from cuvee.kernels.jobs import I64, JobField, PlanField
from cuvee.kernels.ops.arguments import EncodedStreams, StreamJobs
from cuvee.kernels.ops.coded_part import class_bytes, coded_bytes, count_words, long_lengths, write_coded
from cuvee.kernels.ops.rans import rans_encode
from cuvee.kernels.ops.rans_by_class import rans_encode_classes
from cuvee.kernels.tracing import stage
from cuvee.kernels.upload import send_arrays
from cuvee.kernels.workspace import running_offsets

# (starts int64 [J, max_rows], index uint32 [E], value int32 [E]) -> None: lists the escapes
ListEscapes = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


def tokens_per_stream_of(plans: Sequence[CodingPlan], family: Family) -> list[int]:
    """Return the tokens per stream of each plan."""
    entropy = family.tables.entropy
    return [tokens_per_stream(plan.planes, float(entropy[plan.tables].sum())) for plan in plans]


def check_size(jobs: I64, plans: I64) -> None:
    """Raise InputError if a job has more coefficients than an escape's 32-bit index can address."""
    rows = plans[jobs[:, JobField.PLAN], PlanField.ROWS]
    if np.any(rows * jobs[:, JobField.TOKENS] >= 1 << 32):
        tokens = jobs[:, JobField.TOKENS].max()
        raise InputError(
            f"chunk: must have below 2**32 coefficients, got {rows.max()} x {tokens}; encode shorter chunks"
        )


def place_streams(jobs: I64, plans: I64, class_planes: I64 | None = None) -> None:
    """Assign every job a place among the streams and their words, before encoding.

    Args:
        jobs: with PLAN, TOKENS, PER_STREAM and CLASS_PLAN; STREAMS, STATES, LENGTHS, WORDS and LONG_LENGTHS are
            written.
        plans: `[Q, len(PlanField)]`.
        class_planes: of the finest class that each job's section serves; None: no tokens have classes.
    """
    planes = plans[jobs[:, JobField.PLAN], PlanField.PLANES]
    if class_planes is not None:
        planes = np.where(jobs[:, JobField.CLASS_PLAN] > 0, class_planes, planes)
    jobs[:, JobField.LONG_LENGTHS] = long_lengths(planes, jobs[:, JobField.PER_STREAM])
    jobs[:, JobField.STREAMS] = -(-jobs[:, JobField.TOKENS] // jobs[:, JobField.PER_STREAM])
    jobs[:, JobField.STATES], _ = running_offsets(jobs[:, JobField.STREAMS])
    jobs[:, JobField.LENGTHS] = jobs[:, JobField.STATES]
    jobs[:, JobField.WORDS], _ = running_offsets(_word_bound(jobs, plans))


def _word_bound(jobs: I64, plans: I64) -> I64:
    """Return the most words that the streams of each job may need: one per symbol."""
    words: I64 = (
        jobs[:, JobField.STREAMS] * jobs[:, JobField.PER_STREAM] * plans[jobs[:, JobField.PLAN], PlanField.PLANES]
    )
    return words


def stream_jobs(jobs: I64, device_jobs: torch.Tensor, plans: torch.Tensor, tables: torch.Tensor) -> StreamJobs:
    """Return jobs (on the host and on the device) with their plans and tables, in the form that the coder takes."""
    return StreamJobs(device_jobs, plans, tables, int(jobs[:, JobField.STREAMS].max()))


def encode_planes(
    jobs: I64,
    plans: I64,
    coding: StreamJobs,
    entries: torch.Tensor,
    planes: torch.Tensor,
    status: torch.Tensor,
    sections: Sequence[Section],
    first_chunk: int,
    counts: torch.Tensor | None = None,
    list_escapes: ListEscapes | None = None,
    classes: torch.Tensor | None = None,
    class_words: torch.Tensor | None = None,
) -> list[bytes]:
    """Entropy-code the byte planes of all jobs.

    Waits for the device twice: for the sizes of the output and what the kernels found wrong, and for the bytes.

    Args:
        jobs: int64 `[J, len(JobField)]` on the host, with `place_jobs` and `place_streams` done. The columns of a job
            whose CLASS_PLAN is above 0 have classes.
        plans: int64 `[Q, len(PlanField)]` on the host.
        coding: the same on the device; see `stream_jobs`.
        entries: uint32 `[K, 256, 2]`, see `rans.coding_table`.
        planes: uint8, all byte planes.
        status: int32, of the jobs.
        sections: of each chunk, for messages.
        first_chunk: number of the first chunk, for messages.
        counts: int32 `[J, max_rows]` escapes of each row; None: there are none.
        list_escapes: writes them out.
        classes: uint8, of the columns of the jobs whose tokens have classes; None: there are none.
        class_words: uint16, of the streams of these classes.

    Returns:
        the coded part of each job.

    Raises:
        InputError: what the kernels found in the cache.
    """
    device = planes.device
    count, words = int(jobs[:, JobField.STREAMS].sum()), int(_word_bound(jobs, plans).sum())
    classed = jobs[:, JobField.CLASS_PLAN] > 0
    streams = EncodedStreams(
        torch.empty(words, dtype=torch.uint16, device=device),
        torch.empty(count, dtype=torch.uint32, device=device),
        torch.empty(count, dtype=torch.uint32, device=device),
    )
    totals = torch.empty(len(jobs), dtype=torch.int64, device=device)
    with stage("rans"):
        if not classed.all():
            rans_encode(planes, coding, entries, streams)
        if classes is not None:
            rans_encode_classes(planes, coding, entries, classes, streams)
        count_words(coding, streams.lengths, totals)
    escaped = torch.zeros_like(totals) if counts is None else counts.sum(1, dtype=torch.int64)
    sizes = Download(torch.stack([totals, escaped, status.long()])).wait()
    numbers = range(first_chunk, first_chunk + len(jobs) // len(sections))
    raise_status(sizes[2].astype(np.int32), sections, numbers)

    jobs = jobs.copy()
    jobs[:, JobField.WORD_COUNT], jobs[:, JobField.ESCAPE_COUNT] = sizes[0], sizes[1]
    jobs[:, JobField.ESCAPES], listed = running_offsets(sizes[1])
    of_classes = np.where(classed, class_bytes(jobs[:, JobField.CLASS_WORD_COUNT]), 0)
    section_bytes = coded_bytes(
        jobs[:, JobField.STREAMS], jobs[:, JobField.LONG_LENGTHS], sizes[0], sizes[1], of_classes
    )
    jobs[:, JobField.SECTION], total = running_offsets(section_bytes, 4)
    coding = replace(coding, jobs=send_arrays({"jobs": jobs}, device)["jobs"])
    index = torch.empty(listed, dtype=torch.uint32, device=device)
    value = torch.empty(listed, dtype=torch.int32, device=device)
    if counts is not None and list_escapes is not None and listed:
        flat = counts.flatten().to(torch.int64)
        with stage("escapes"):
            list_escapes((flat.cumsum(0) - flat).view(counts.shape), index, value)
    out = torch.empty(total, dtype=torch.uint8, device=device)
    with stage("write"):
        write_coded(coding, streams, index, value, out, class_words)
    with stage("download"):
        kept = Download(out)
    raw = kept.wait()
    return [raw[at : at + size].tobytes() for at, size in zip(jobs[:, JobField.SECTION], section_bytes, strict=True)]
