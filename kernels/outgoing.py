"""Outgoing coded parts: run rANS, copy their sizes to the host, then all bytes in one copy.

fields of jobs: stream_fields --> code_streams --> measure (waits) --> [escapes are listed] --> write_parts (waits)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from cuvee.codec.profiles.sections import Section
from cuvee.kernels.chunks import raise_status
from cuvee.kernels.devices import Download
from cuvee.kernels.jobs import I64, JobField, PartField
from cuvee.kernels.ops.arguments import EncodedStreams, StreamJobs
from cuvee.kernels.ops.coded_part import coded_bytes, count_words, long_lengths, write_coded
from cuvee.kernels.ops.rans import rans_encode
from cuvee.kernels.upload import send_arrays
from cuvee.kernels.workspace import running_offsets


def stream_fields(tokens: I64, per_stream: I64, planes: I64, most_planes: I64) -> dict[str, I64]:
    """Return the fields of jobs that give each a place among the streams and their words, before encoding.

    All are `[J]`; `planes` is of the finest class that occurs, `most_planes` of the finest that the section serves.
    """
    streams = -(-tokens // per_stream)
    at, _ = running_offsets(streams)
    words, _ = running_offsets(streams * per_stream * planes)  # at most one word per symbol
    return {
        "per_stream": per_stream,
        "streams": streams,
        "states": at,
        "lengths": at,
        "words": words,
        "long_lengths": long_lengths(most_planes, per_stream),
    }


def stream_jobs(jobs: I64, device_jobs: torch.Tensor, plans: torch.Tensor, tables: torch.Tensor) -> StreamJobs:
    """Return jobs (on the host and on the device) with their plans and tables, in the form that the coder takes."""
    return StreamJobs(device_jobs, plans, tables, int(jobs[:, JobField.STREAMS].max()))


def code_streams(
    jobs: I64, coding: StreamJobs, entries: torch.Tensor, planes: torch.Tensor, plane_count: I64, classes: torch.Tensor
) -> tuple[EncodedStreams, torch.Tensor]:
    """Entropy-code the byte planes of all jobs. Return their streams, and the words of each job, int64 `[J]`.

    `jobs` are on the host, `coding` the same on the device. `entries` are uint32 `[K, 256, 2]` of `rans.coding_table`,
    `plane_count` is `[J]`, of the finest class that occurs.
    """
    streams, per_stream = jobs[:, JobField.STREAMS], jobs[:, JobField.PER_STREAM]
    count, words = int(streams.sum()), int((streams * per_stream * plane_count).sum())
    coded = EncodedStreams(
        torch.empty(words, dtype=torch.uint16, device=planes.device),
        torch.empty(count, dtype=torch.uint32, device=planes.device),
        torch.empty(count, dtype=torch.uint32, device=planes.device),
    )
    totals = torch.empty(len(jobs), dtype=torch.int64, device=planes.device)
    rans_encode(planes, coding, entries, classes, coded)
    count_words(coding, coded.lengths, totals)
    return coded, totals


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a batch takes in bytes: each coded part, `[J]`, and all with what aligns them; and its number of escapes."""

    parts: I64
    bytes: I64
    total: int
    escapes: int


def measure(
    jobs: I64,
    totals: torch.Tensor,
    escaped: torch.Tensor,
    status: torch.Tensor,
    sections: Sequence[Section],
    first_chunk: int,
) -> Sizes:
    """Wait for the sizes of coded parts, and for what the kernels found wrong.

    `totals` is of `code_streams`, `escaped` int64 `[J]`. `status`, int32, has the jobs of all chunks' sections.

    Raises:
        InputError: what the kernels found in the cache.
    """
    flags = status.long()
    if len(jobs) > len(status):
        flags = functional.pad(flags, (0, len(jobs) - len(status)))
    words, escapes, flagged = Download(torch.stack([totals, escaped, flags])).wait()
    numbers = range(first_chunk, first_chunk + len(status) // len(sections))
    raise_status(flagged[: len(status)].astype(np.int32), sections, numbers)
    size = coded_bytes(
        jobs[:, JobField.STREAMS], jobs[:, JobField.LONG_LENGTHS], words, escapes, jobs[:, JobField.CLASS_WORD_COUNT]
    )
    parts = np.zeros((len(jobs), len(PartField)), np.int64)
    parts[:, PartField.WORD_COUNT], parts[:, PartField.ESCAPE_COUNT] = words, escapes
    parts[:, PartField.ESCAPES], listed = running_offsets(escapes)
    parts[:, PartField.SECTION], total = running_offsets(size, 4)
    return Sizes(parts, size, total, listed)


def write_parts(
    coding: StreamJobs,
    sizes: Sizes,
    streams: EncodedStreams,
    index: torch.Tensor,
    value: torch.Tensor,
    class_words: torch.Tensor,
) -> list[bytes]:
    """Return the coded part of each job, with escapes `index`, uint32, and `value`, int32. Waits for their bytes."""
    device = index.device
    parts = send_arrays({"parts": sizes.parts}, device)["parts"]
    out = torch.empty(sizes.total, dtype=torch.uint8, device=device)
    write_coded(coding, parts, streams, index, value, class_words, out)
    download = Download(out)
    raw = download.wait()
    begins = sizes.parts[:, PartField.SECTION]
    return [raw[at : at + size].tobytes() for at, size in zip(begins, sizes.bytes, strict=True)]
