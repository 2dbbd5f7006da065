"""Incoming blobs, with their refinements: verify them, pack them for the device, find their parts.

The host checks what it can without touching every byte twice: checksums, and that the parts of each coded section
fill it exactly (`FORMAT.md`). What only the streams themselves can tell, the kernels flag in `Status`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from cuvee.codec.backends import DecodeRequest
from cuvee.codec.errors import CuveeError
from cuvee.codec.format import rules
from cuvee.codec.format.container import read_sections
from cuvee.codec.format.rules import rule_error
from cuvee.codec.format.streams import LOWER_BOUND, MAX_TOKENS_PER_STREAM_LOG2
from cuvee.codec.paged import PagedCache
from cuvee.kernels.chunks import CacheMemory, chunk_table, join
from cuvee.kernels.jobs import I64, ChunkField, JobField
from cuvee.kernels.ops.arguments import CacheView, ChunkBatch
from cuvee.kernels.ops.coded_part import HEADER_BYTES, long_lengths
from cuvee.kernels.upload import Packed, Upload, for_each


class Incoming:
    """Verified blobs of a batch, packed for the device.

    A job is one section of a blob: first those of all blobs or bases, chunk-major, then those of their refinements.

    Args:
        chunks: the blobs.
        sections: numbers of the wanted sections.
        cache: the cache that they are decoded into.

    Attributes:
        upload: the arrays to send; add to it before `upload.pack`.
        count: jobs of each part, chunks * sections.
        parts: blobs of each chunk: 1, or 2 with a refinement.
        tokens: `[count]`, of each job of a part.
        chunks: int64 `[chunks, len(ChunkField)]`.
        slots: int64, slots of all chunks in a row.
        max_tokens: tokens of the longest chunk.
        views: bytes of each job's section.
        names: of the jobs, for messages.

    Raises:
        CorruptError: a checksum does not match.
    """

    def __init__(self, chunks: Sequence[DecodeRequest], sections: range, cache: PagedCache) -> None:
        headers = [chunk.header for chunk in chunks]
        self.chunks = chunk_table(
            [h.tokens for h in headers], [h.start for h in headers], [chunk.blob_start for chunk in chunks]
        )
        self.count, self.parts = len(chunks) * len(sections), 1 + len(chunks[0].refinements)
        self.tokens = np.repeat(self.chunks[:, ChunkField.TOKENS], len(sections))
        self.slots = join([chunk.every_slot for chunk in chunks])
        self.max_tokens = int(self.chunks[:, ChunkField.TOKENS].max())
        self._sections = sections
        self.upload = Upload()
        self._blank = np.zeros((self.parts * self.count, len(JobField)), np.int64)
        self._at_jobs = self.upload.add(self._blank)
        self._at_chunks = self.upload.add(self.chunks)
        self._memory = CacheMemory.of(cache)
        self._at_memory = {name: self.upload.add(array) for name, array in self._memory.named().items()}
        self.views: list[memoryview] = []
        self.names: list[str] = []
        self._begin: list[int] = []
        blobs = [[(chunk.blob, chunk.header), *chunk.refinements] for chunk in chunks]
        flat = [(part, *own[part]) for part in range(self.parts) for own in blobs]
        verified = for_each(
            lambda each: read_sections(each[1], each[2], sections), flat, sum(len(blob) for _, blob, _ in flat)
        )
        for number, ((part, blob, header), views) in enumerate(zip(flat, verified, strict=True)):
            size = sum(map(len, views))
            offset = header.section_offset(sections.start)
            at = self.upload.add(memoryview(blob)[offset : offset + size])
            name = f"{'refinement of ' if part else ''}blob {chunks[number % len(chunks)].number}"
            for index, view in zip(sections, views, strict=True):
                self.views.append(view)
                self._begin.append(at)
                self.names.append(f"section {index} of {name}")
                at += len(view)

    def offset(self, job: int) -> int:
        """Return the offset of a job's section in the upload."""
        return self._begin[job]

    def read(
        self,
        packed: Packed,
        planes: I64,
        coded: Sequence[int] | None = None,
        which: I64 | None = None,
        one_class: bool = False,
    ) -> dict[str, I64]:
        """Find the parts of the coded sections: fields of jobs, by their names in lower case, all 0 for other jobs.

        Args:
            packed: the upload on the host.
            planes: of each job, the most that a token may have.
            coded: where in the section of each job its coded part begins; default: at once.
            which: the jobs that have a coded part; default: all.
            one_class: whether all tokens have one class.

        Raises:
            FormatError: parts that do not fill their section.
        """
        which = np.arange(len(self.views)) if which is None else which
        begin = np.array(self._begin, np.int64)
        end = begin + np.array([len(view) for view in self.views], np.int64)
        if coded is not None:
            begin += np.array(coded, np.int64)
        tokens = np.tile(self.tokens, self.parts)[which]
        names = [self.names[job] for job in which]
        found = read_coded(packed.bytes.numpy(), begin[which], end[which], tokens, planes[which], names, one_class)
        out = {name: np.zeros(len(self.views), np.int64) for name in found}
        for name, values in found.items():
            out[name][which] = values
        return out

    def fill_in(self, packed: Packed, jobs: I64) -> None:
        """Copy the table of jobs into the upload on the host."""
        packed.host(self._at_jobs, self._blank)[:] = jobs

    def device_jobs(self, sent: Packed) -> torch.Tensor:
        """Return the jobs on the device, given the upload there."""
        return sent.view(self._at_jobs, self._blank)

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


def job_error(rule: int, name: str, *numbers: int) -> CuveeError:
    """Return `rule_error` about a section that has a name."""
    error = rule_error(rule, *numbers)
    text = str(error)
    return type(error)(text.replace("a section" if "a section" in text else "section", name, 1))


def read_coded(
    data: npt.NDArray[np.uint8],
    begin: I64,
    end: I64,
    tokens: I64,
    planes: I64,
    names: Sequence[str],
    one_class: bool = False,
) -> dict[str, I64]:
    """Find the parts of coded sections: fields of jobs `[J]`, by their names in lower case.

    Args:
        data: bytes that hold the coded parts.
        begin: `[J]` where each coded part begins, a multiple of four.
        end: `[J]` where it must end.
        tokens: `[J]` tokens of each job.
        planes: `[J]` the most byte planes that a token of each job may have.
        names: of each job, for messages.
        one_class: whether all tokens have one class, and no escapes.

    Raises:
        FormatError: parts that do not fill their section.
    """

    def require(good: npt.NDArray[np.bool_], rule: int, missing: I64 | None = None) -> None:
        if not good.all():
            job = int(np.argmin(good))
            raise job_error(rule, names[job], *([] if missing is None else [int(missing[job])]))

    states = begin + HEADER_BYTES
    require(end >= states, rules.SHORT, states - end)
    words32, words16 = data.view(np.uint32), data.view(np.uint16)
    words, escapes, log2, class_words, class_state = (words32[begin // 4 + i].astype(np.int64) for i in range(5))
    require(log2 <= MAX_TOKENS_PER_STREAM_LOG2, rules.HEADER)
    require(class_state >= LOWER_BOUND, rules.CLASS_STATE)
    if one_class:
        require((class_words == 0) & (escapes == 0) & (class_state == LOWER_BOUND), rules.ONE_CLASS)
    per_stream = np.left_shift(np.int64(1), log2)
    streams = -(-tokens // per_stream)
    long = long_lengths(planes, per_stream)
    lengths = states + 4 * streams
    first_class = lengths + streams * (2 + 2 * long)
    first_word = first_class + 2 * class_words
    last_word = first_word + 2 * words
    listed = last_word + (begin - last_word) % 4
    ends = listed + 8 * escapes
    require(ends <= end, rules.SHORT, ends - end)
    require(ends == end, rules.LONG, end - ends)
    padded = listed != last_word
    require((words16[np.where(padded, last_word // 2, 0)] == 0) | ~padded, rules.PADDING)
    return {
        "states": states // 4,
        "lengths": lengths // 2,
        "words": first_word // 2,
        "escapes": listed // 4,
        "word_count": words,
        "escape_count": escapes,
        "streams": streams,
        "per_stream": per_stream,
        "long_lengths": long,
        "class_words": first_class // 2,
        "class_word_count": class_words,
        "class_state": class_state,
    }
