"""Incoming blobs: verify them, pack them for the device, find their parts.

The host checks what it can without touching every byte twice: checksums, and that the parts of each coded section
fill it exactly (`FORMAT.md`). What only the streams themselves can tell, the kernels flag in `Status`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from cuvee.codec.backends import DecodeRequest
from cuvee.codec.errors import FormatError
from cuvee.codec.format.container import read_sections
from cuvee.codec.format.streams import MAX_TOKENS_PER_STREAM_LOG2
from cuvee.codec.paged import PagedCache
from cuvee.kernels.chunks import CacheMemory, chunk_table, join
from cuvee.kernels.jobs import I64, ChunkField, JobField, PlanField
from cuvee.kernels.ops.arguments import CacheView, ChunkBatch
from cuvee.kernels.ops.coded_part import CLASS_HEADER_BYTES, HEADER_BYTES, long_lengths
from cuvee.kernels.upload import Packed, Upload, for_each
from cuvee.kernels.workspace import place_jobs


class Incoming:
    """Verified blobs of a batch, packed for the device, with the table of their jobs.

    Args:
        chunks: the blobs.
        sections: numbers of the wanted sections.
        cache: the cache that they are decoded into.

    Attributes:
        upload: the arrays to send; add to it before `pack`.
        jobs: int64 `[chunks * sections, len(JobField)]`, chunk-major.
        chunks: int64 `[chunks, len(ChunkField)]`.
        slots: int64, slots of all chunks in a row.
        max_tokens: tokens of the longest chunk.
        views: bytes of each job's section.

    Raises:
        CorruptError: a checksum does not match.
    """

    def __init__(self, chunks: Sequence[DecodeRequest], sections: range, cache: PagedCache) -> None:
        headers = [chunk.header for chunk in chunks]
        self.chunks = chunk_table(
            [h.tokens for h in headers], [h.start for h in headers], [chunk.blob_start for chunk in chunks]
        )
        self.jobs = np.zeros((len(chunks) * len(sections), len(JobField)), np.int64)
        self.jobs[:, JobField.CHUNK] = np.repeat(np.arange(len(chunks)), len(sections))
        self.jobs[:, JobField.TOKENS] = np.repeat(self.chunks[:, ChunkField.TOKENS], len(sections))
        self.slots = join([chunk.every_slot for chunk in chunks])
        self.max_tokens = int(self.chunks[:, ChunkField.TOKENS].max())
        self._sections = sections
        self.upload = Upload()
        self._at_jobs = self.upload.add(self.jobs)
        self._at_chunks = self.upload.add(self.chunks)
        self._memory = CacheMemory.of(cache)
        self._at_memory = {name: self.upload.add(array) for name, array in self._memory.named().items()}
        self.views: list[memoryview] = []
        self._begin: list[int] = []
        self._names: list[str] = []
        verified = for_each(
            lambda chunk: read_sections(chunk.blob, chunk.header, sections), chunks, sum(len(c.blob) for c in chunks)
        )
        for chunk, views in zip(chunks, verified, strict=True):
            size = sum(map(len, views))
            offset = chunk.header.section_offset(sections.start)
            at = self.upload.add(memoryview(chunk.blob)[offset : offset + size])
            for index, view in zip(sections, views, strict=True):
                self.views.append(view)
                self._begin.append(at)
                self._names.append(f"section {index} of blob {chunk.number}")
                at += len(view)

    def device_jobs(self, sent: Packed) -> torch.Tensor:
        """Return the jobs on the device, given the upload there."""
        return sent.view(self._at_jobs, self.jobs)

    def chunk_batch(self, sent: Packed, status: torch.Tensor) -> ChunkBatch:
        """Return the chunks in the form that launches take.

        Args:
            sent: the upload, on the device.
            status: int32 `[chunks * sections]`.
        """
        chunks = sent.view(self._at_chunks, self.chunks)
        return ChunkBatch(chunks, status, len(self._sections), self._sections.start, self.max_tokens)

    def cache_view(self, sent: Packed, tiles: I64) -> CacheView:
        """Return the cache in the form that a launch over `tiles` (on the host) takes.

        Args:
            sent: the upload, on the device.
            tiles: rows of `TileField`.
        """
        memory = {name: sent.view(self._at_memory[name], array) for name, array in self._memory.named().items()}
        return self._memory.view(memory, self.slots, tiles)

    def offset(self, job: int) -> int:
        """Return the offset of a job's section in the upload."""
        return self._begin[job]

    def name(self, job: int) -> str:
        """Return the name of a job's section, for messages."""
        return self._names[job]

    def pack(
        self, device: torch.device, plans: I64, coded: Sequence[int] | None = None, which: I64 | None = None
    ) -> tuple[Packed, int, int]:
        """Describe the jobs and pack everything into one buffer, for tokens without classes.

        Args:
            device: where it will go.
            plans: `[Q, len(PlanField)]`, which the jobs' PLAN names already.
            coded: where in the section of each job its coded part begins; default: at once.
            which: the jobs that have a coded part; default: all.

        Returns:
            the buffer, and the sizes of the byte planes (bytes) and of the coefficients (elements).

        Raises:
            FormatError: parts that do not fill their section.
        """
        packed, _ = self.read(device, plans[self.jobs[:, JobField.PLAN], PlanField.PLANES], coded, which)
        return packed, *self.place(packed, plans)

    def read(
        self,
        device: torch.device,
        planes: I64,
        coded: Sequence[int] | None = None,
        which: I64 | None = None,
        class_planes: I64 | None = None,
    ) -> tuple[Packed, npt.NDArray[np.bool_]]:
        """Pack everything into one buffer and fill in the fields that the coded parts give; call `place` next.

        Args:
            device: as for `pack`, as are `coded` and `which`.
            planes: of each job, if its tokens have no classes.
            coded: see there.
            which: see there.
            class_planes: of the finest class of each job; -1: its tokens may have none; None: no job's may.

        Returns:
            the buffer, and a mask over `which` of the jobs whose tokens have classes.
        """
        packed = self.upload.pack(device)
        which = np.arange(len(self.jobs)) if which is None else which
        begin = np.array(self._begin, np.int64)
        end = begin + np.array([len(view) for view in self.views], np.int64)
        if coded is not None:
            begin += np.array(coded, np.int64)
        jobs = self.jobs[which]
        classed = read_coded(
            packed.bytes.numpy(), begin[which], end[which], jobs[:, JobField.TOKENS], planes[which], jobs,
            [self._names[job] for job in which], None if class_planes is None else class_planes[which],
        )  # fmt: skip
        self.jobs[which] = jobs
        return packed, classed

    def place(self, packed: Packed, plans: I64) -> tuple[int, int]:
        """Assign places to the jobs, see `place_jobs`, and copy the jobs into the buffer."""
        sizes = place_jobs(self.jobs, plans)
        packed.host(self._at_jobs, self.jobs)[:] = self.jobs
        return sizes


def read_coded(
    data: npt.NDArray[np.uint8],
    begin: I64,
    end: I64,
    tokens: I64,
    planes: I64,
    jobs: I64,
    names: list[str],
    class_planes: I64 | None = None,
) -> npt.NDArray[np.bool_]:
    """Find the parts of coded sections and fill them into `jobs` `[J, len(JobField)]`.

    Args:
        data: bytes that hold the coded parts.
        begin: `[J]` where each coded part begins, a multiple of four.
        end: `[J]` where it must end.
        tokens: `[J]` tokens of each job.
        planes: `[J]` byte planes of each job, if its tokens have no classes.
        jobs: the table; the columns STATES … PER_STREAM, LONG_LENGTHS and CLASS_WORDS … CLASS_STATE are written.
        names: of each job, for messages.
        class_planes: `[J]` byte planes of the finest class; -1: a job's tokens may have no classes; None: no job's may.

    Returns:
        `[J]` whose tokens have classes.

    Raises:
        FormatError: parts that do not fill their section.
    """

    def require(good: npt.NDArray[np.bool_], what: str) -> None:
        if not good.all():
            raise FormatError(f"{names[int(np.argmin(good))]}: {what}")

    require(end - begin >= HEADER_BYTES, "ends before its stream header does")
    words32, words16 = data.view(np.uint32), data.view(np.uint16)
    at = begin // 4
    words, escapes = words32[at].astype(np.int64), words32[at + 1].astype(np.int64)
    packed = words32[at + 2].astype(np.int64)
    classed: npt.NDArray[np.bool_] = packed >> 8 == 1
    require((packed & 0xFF <= MAX_TOKENS_PER_STREAM_LOG2) & (packed >> 9 == 0), "has a stream header out of range")
    allowed = np.zeros(len(jobs), np.bool_) if class_planes is None else class_planes >= 0
    require(~classed | allowed, "has token classes, which its scheme does not")
    states = begin + HEADER_BYTES + np.where(classed, CLASS_HEADER_BYTES, 0)
    require(end >= states, "ends before its stream header does")
    class_words, class_state = (
        np.where(classed, words32[np.where(classed, at + place, 0)], 0).astype(np.int64) for place in (3, 4)
    )
    per_stream = np.left_shift(np.int64(1), packed & 0xFF)
    streams = -(-tokens // per_stream)
    long = long_lengths(np.where(classed, planes if class_planes is None else class_planes, planes), per_stream)
    lengths = states + 4 * streams
    first_class = lengths + streams * (2 + 2 * long)
    first_word = first_class + 2 * class_words
    last_word = first_word + 2 * words
    listed = last_word + (begin - last_word) % 4
    require(listed + 8 * escapes == end, "is not filled exactly by its streams and escapes")
    padded = listed != last_word
    zero = words16[np.where(padded, last_word // 2, 0)] == 0
    require(zero | ~padded, "has padding that is not zero")
    for field, value in (
        (JobField.STATES, states // 4),
        (JobField.LENGTHS, lengths // 2),
        (JobField.WORDS, first_word // 2),
        (JobField.ESCAPES, listed // 4),
        (JobField.WORD_COUNT, words),
        (JobField.ESCAPE_COUNT, escapes),
        (JobField.STREAMS, streams),
        (JobField.TOKENS, tokens),
        (JobField.PER_STREAM, per_stream),
        (JobField.LONG_LENGTHS, long),
        (JobField.CLASS_WORDS, first_class // 2),
        (JobField.CLASS_WORD_COUNT, class_words),
        (JobField.CLASS_STATE, class_state),
    ):
        jobs[:, field] = value
    return classed
