"""Coded parts of sections leave the device: rANS, then sizes to the host, then all bytes in one copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from cuvee.codec.coefficients import tokens_per_stream
from cuvee.codec.errors import InputError
from cuvee.codec.family import Family
from cuvee.codec.symbols import CodingPlan
from cuvee.codec.transform import Section
from cuvee.kernels.batch import raise_status, running_offsets, stage
from cuvee.kernels.jobs import Job, Plan
from cuvee.kernels.rans import class_bytes, coded_bytes, count_words, long_lengths, rans_encode, write_coded
from cuvee.kernels.rans_classes import rans_encode_classes
from cuvee.kernels.staging import Upload

I64 = npt.NDArray[np.int64]

# (starts int64 [J, max_rows], index uint32 [E], value int32 [E]) -> None: lists the escapes
ListEscapes = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


def streams_of(plans: Sequence[CodingPlan], family: Family) -> list[int]:
    """Tokens a stream of each plan."""
    entropy = family.tables.entropy
    return [tokens_per_stream(plan.planes, float(entropy[plan.rest].sum()), plan.prediction) for plan in plans]


def check_size(jobs: I64, plans: I64) -> None:
    """Raise InputError where a job has more coefficients than an escape can number."""
    rows = plans[jobs[:, Job.PLAN], Plan.ROWS]
    if np.any(rows * jobs[:, Job.TOKENS] >= 1 << 32):
        tokens = jobs[:, Job.TOKENS].max()
        raise InputError(f"{rows.max()} components cannot hold {tokens} tokens per chunk: encode fewer at a time")


def place_streams(jobs: I64, plans: I64, class_planes: I64 | None = None) -> None:
    """Give every job its place among the streams and their words, before they are coded.

    Args:
        jobs: with PLAN, TOKENS, PER_STREAM and CLASS_PLAN; STREAMS, STATES, LENGTHS, WORDS and LONG_LENGTHS are
            written.
        plans: `[Q, len(Plan)]`.
        class_planes: of the finest class that each job's section serves; None: no tokens have classes.
    """
    planes = plans[jobs[:, Job.PLAN], Plan.PLANES]
    if class_planes is not None:
        planes = np.where(jobs[:, Job.CLASS_PLAN] > 0, class_planes, planes)
    jobs[:, Job.LONG_LENGTHS] = long_lengths(planes, jobs[:, Job.PER_STREAM])
    jobs[:, Job.STREAMS] = -(-jobs[:, Job.TOKENS] // jobs[:, Job.PER_STREAM])
    jobs[:, Job.STATES], _ = running_offsets(jobs[:, Job.STREAMS])
    jobs[:, Job.LENGTHS] = jobs[:, Job.STATES]
    jobs[:, Job.WORDS], _ = running_offsets(_word_bound(jobs, plans))


def _word_bound(jobs: I64, plans: I64) -> I64:
    """Words that the streams of each job may need: one per symbol."""
    words: I64 = jobs[:, Job.STREAMS] * jobs[:, Job.PER_STREAM] * plans[jobs[:, Job.PLAN], Plan.PLANES]
    return words


def encode_planes(
    jobs: I64,
    device_jobs: torch.Tensor,
    plans: I64,
    device_plans: torch.Tensor,
    tables: torch.Tensor,
    coding: torch.Tensor,
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
        jobs: int64 `[J, len(Job)]` on the host, with `place_jobs` and `place_streams` done.
        device_jobs: the same on the device.
        plans: int64 `[Q, len(Plan)]` on the host.
        device_plans: the same on the device.
        tables: int32 tables of the planes.
        coding: uint32 `[K, 256, 2]`, see `rans.coding_table`.
        planes: uint8, all byte planes.
        status: int32 `[J]`.
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
    streams, words = int(jobs[:, Job.STREAMS].sum()), int(_word_bound(jobs, plans).sum())
    max_streams = int(jobs[:, Job.STREAMS].max())
    classed = jobs[:, Job.CLASS_PLAN] > 0
    scratch = torch.empty(words, dtype=torch.uint16, device=device)
    states = torch.empty(streams, dtype=torch.uint32, device=device)
    lengths = torch.empty(streams, dtype=torch.uint32, device=device)
    totals = torch.empty(len(jobs), dtype=torch.int64, device=device)
    with stage("rans"):
        if not classed.all():
            rans_encode(planes, device_jobs, device_plans, tables, coding, scratch, states, lengths, max_streams)
        if classes is not None:
            rans_encode_classes(
                planes, device_jobs, device_plans, tables, coding, classes, scratch, states, lengths, max_streams
            )
        count_words(device_jobs, lengths, totals, max_streams)
    escaped = torch.zeros_like(totals) if counts is None else counts.sum(1, dtype=torch.int64)
    sizes = torch.stack([totals, escaped, status.long()]).cpu().numpy()
    numbers = range(first_chunk, first_chunk + len(jobs) // len(sections))
    raise_status(sizes[2].astype(np.int32), sections, numbers)

    jobs = jobs.copy()
    jobs[:, Job.WORD_COUNT], jobs[:, Job.ESCAPE_COUNT] = sizes[0], sizes[1]
    jobs[:, Job.ESCAPES], listed = running_offsets(sizes[1])
    of_classes = np.where(classed, class_bytes(jobs[:, Job.CLASS_WORD_COUNT]), 0)
    section_bytes = coded_bytes(jobs[:, Job.STREAMS], jobs[:, Job.LONG_LENGTHS], sizes[0], sizes[1], of_classes)
    jobs[:, Job.SECTION], total = running_offsets(section_bytes, 4)
    upload = Upload()
    at = upload.add(jobs)
    device_jobs = upload.pack(device).send(device).view(at, jobs)
    index = torch.empty(listed, dtype=torch.uint32, device=device)
    value = torch.empty(listed, dtype=torch.int32, device=device)
    if counts is not None and list_escapes is not None and listed:
        flat = counts.flatten().to(torch.int64)
        with stage("escapes"):
            list_escapes((flat.cumsum(0) - flat).view(counts.shape), index, value)
    out = torch.empty(total, dtype=torch.uint8, device=device)
    with stage("write"):
        write_coded(device_jobs, device_plans, scratch, states, lengths, index, value, out, max_streams, class_words)
    with stage("download"):
        kept = torch.empty(total, dtype=torch.uint8, pin_memory=device.type != "cpu")
        kept.copy_(out, non_blocking=True)
    wait_for(device)
    raw = kept.numpy()
    return [raw[at : at + size].tobytes() for at, size in zip(jobs[:, Job.SECTION], section_bytes, strict=True)]


def wait_for(device: torch.device) -> None:
    """Wait for all that the current stream of the device has been given."""
    if device.type != "cpu":
        torch.cuda.current_stream(device).synchronize()
