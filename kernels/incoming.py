"""Incoming blobs, with their refinements: verify them, pack them for the device, find their parts.

The host checks what it can without touching every byte twice: checksums, and that the parts of each coded section
fill it exactly (`FORMAT.md`). What only the streams themselves can tell, the kernels flag in `Status`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
from cuvee.kernels.upload import Upload, for_each


class Incoming:
    """Verified blobs of a batch, packed for the device.

    A job is one section of a blob: first those of all blobs or bases, chunk-major, then those of their refinements.

    Args:
        chunks: the blobs.
        sections: numbers of the wanted sections.
        cache: the cache that they are decoded into.

    Attributes:
        upload: what to send, with the arrays `jobs` (blank) and `chunks` and those of the cache; add to it and pack it.
        count: jobs of each part, chunks * sections.
        parts: blobs of each chunk: 1, or 2 with a refinement.
        tokens: `[count]`, of each job of a part.
        chunks: int64 `[chunks, len(ChunkField)]`.
        slots: int64, slots of all chunks in a row.
        max_tokens: tokens of the longest chunk.
        views: bytes of each job's section.
        begin: `[parts * count]`, where each of them begins in the upload.
        names: of the jobs, for messages.

    Raises:
        CorruptError: a checksum does not match.
    """

    def __init__(self, chunks: Sequence[DecodeRequest], sections: range, cache: PagedCache) -> None:
        opened = [chunk.opened for chunk in chunks]
        self.chunks = chunk_table(
            [own.tokens for own in opened], [own.start for own in opened], [chunk.blob_start for chunk in chunks]
        )
        self.count, self.parts = len(chunks) * len(sections), len(opened[0].parts)
        self.tokens = np.repeat(self.chunks[:, ChunkField.TOKENS], len(sections))
        self.slots = join([chunk.every_slot for chunk in chunks])
        self.max_tokens = int(self.chunks[:, ChunkField.TOKENS].max())
        self._sections = sections
        self._memory = CacheMemory.of(cache)
        self.upload = Upload(cache.device)
        blank = np.zeros((self.parts * self.count, len(JobField)), np.int64)
        self.upload.add_named({"jobs": blank, "chunks": self.chunks, **self._memory.named()})
        self.views: list[memoryview] = []
        self.names: list[str] = []
        begin: list[int] = []
        flat = [(part, *own.parts[part]) for part in range(self.parts) for own in opened]
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
                begin.append(at)
                self.names.append(f"section {index} of {name}")
                at += len(view)
        self.begin = np.array(begin, np.int64)

    def read(
        self, planes: I64, coded: I64 | None = None, which: I64 | None = None, one_class: bool = False
    ) -> dict[str, I64]:
        """Find the parts of the coded sections in the packed upload: `read_coded`, with 0 for other jobs.

        Args:
            planes: of each job, the most that a token may have.
            coded: where in the section of each job its coded part begins; default: at once.
            which: the jobs that have a coded part; default: all.
            one_class: whether all tokens have one class.
        """
        which = np.arange(len(self.views)) if which is None else which
        end = self.begin + np.array([len(view) for view in self.views], np.int64)
        begin = self.begin if coded is None else self.begin + coded
        tokens = np.tile(self.tokens, self.parts)[which]
        names = [self.names[job] for job in which]
        found = read_coded(self.upload.bytes, begin[which], end[which], tokens, planes[which], names, one_class)
        out = {name: np.zeros(len(self.views), np.int64) for name in found}
        for name, values in found.items():
            out[name][which] = values
        return out

    def chunk_batch(self, sent: Mapping[str, torch.Tensor], status: torch.Tensor) -> ChunkBatch:
        """Return the chunks as launches take them, given the arrays on the device and int32 `[chunks * sections]`."""
        return ChunkBatch(sent["chunks"], status, len(self._sections), self._sections.start, self.max_tokens)

    def cache_view(self, sent: Mapping[str, torch.Tensor], tiles: I64) -> CacheView:
        """Return the cache as a launch over `tiles` (rows of `TileField`, on the host) takes it."""
        return self._memory.view(sent, self.slots, tiles)


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
