"""Incoming blobs, with their refinements: verify them, find their parts, pack them for the device.

The host checks checksums, and parses sections with the loops of the CPU's decoder. What only the streams themselves can
tell, the kernels flag in `Status`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from cuvee.codec.backends import DecodeRequest
from cuvee.codec.entropy.tables import SYMBOLS
from cuvee.codec.format.container import read_sections
from cuvee.codec.paged import PagedCache
from cuvee.codec.profiles.step_coding import StepCoding
from cuvee.codec.stages.compiled import byte_plane_parts, coded_part
from cuvee.codec.stages.compiled.coded_part import joined
from cuvee.codec.stages.compiled.compiler import compiled
from cuvee.codec.stages.compiled.sections import read_index
from cuvee.codec.support.arrays import U8, U16
from cuvee.kernels.chunks import CacheMemory, chunk_table, join
from cuvee.kernels.jobs import I64, ChunkField
from cuvee.kernels.ops.arguments import CacheView, ChunkBatch
from cuvee.kernels.upload import Upload, for_each


class Incoming:
    """Verified blobs of a batch, packed for the device.

    A job is one section of a blob: first those of all blobs or bases, chunk-major, then those of their refinements.

    Args:
        sections: numbers of the wanted sections.

    Attributes:
        upload: what to send, with the array `chunks` and those of the cache; add the rest to it.
        count: jobs of each part, chunks * sections.
        parts: blobs of each chunk: 1, or 2 with a refinement.
        tokens: `[count]`, of each job of a part.
        chunks: int64 `[chunks, len(ChunkField)]`.
        slots: int64, slots of all chunks in a row.
        begin: `[parts * count]`, where each of them begins in the upload.

    Raises:
        CorruptError: a checksum does not match.
    """

    def __init__(self, chunks: Sequence[DecodeRequest], sections: range, cache: PagedCache) -> None:
        opened = [chunk.opened for chunk in chunks]
        self.chunks = chunk_table(
            [one.tokens for one in opened], [one.start for one in opened], [chunk.blob_start for chunk in chunks]
        )
        self.count, self.parts = len(chunks) * len(sections), len(opened[0].parts)
        self.tokens = np.repeat(self.chunks[:, ChunkField.TOKENS], len(sections))
        self.slots = join([chunk.every_slot for chunk in chunks])
        self.max_tokens = int(self.chunks[:, ChunkField.TOKENS].max())
        self._sections = sections
        self._memory = CacheMemory.of(cache)
        self.upload = Upload(cache.device)
        self.upload.add_arrays({"chunks": self.chunks, **self._memory.arrays()})
        self.views: list[memoryview] = []
        self.names: list[str] = []
        begin: list[int] = []
        flat = [(number, *one.parts[number]) for number in range(self.parts) for one in opened]
        verified = for_each(
            lambda each: read_sections(each[1], each[2], sections), flat, sum(len(blob) for _, blob, _ in flat)
        )
        for number, ((finer, blob, header), views) in enumerate(zip(flat, verified, strict=True)):
            size = sum(map(len, views))
            offset = header.section_offset(sections.start)
            at = self.upload.add(memoryview(blob)[offset : offset + size])
            name = f"{'refinement of ' if finer else ''}blob {chunks[number % len(chunks)].number}"
            for index, view in zip(sections, views, strict=True):
                self.views.append(view)
                begin.append(at)
                self.names.append(f"section {index} of {name}")
                at += len(view)
        self.begin = np.array(begin, np.int64)

    def read(self, codings: Sequence[StepCoding]) -> tuple[dict[str, I64], U8]:
        """Find what the sections consist of, coded as the coding of their part says, and decode their classes.

        Returns fields of jobs, by their names in lower case, and the classes of all jobs' tokens.
        """
        parsed, classes = [], []
        for number in range(self.parts * len(self.chunks)):
            jobs = slice(number * len(self._sections), (number + 1) * len(self._sections))
            tokens = int(self.tokens[jobs.start % self.count])
            numbered = list(zip(self._sections, self.views[jobs], strict=True))
            index, problem = read_index(codings[number // len(self.chunks)], numbered, tokens)
            self._check(problem, index.parsed, jobs)
            parsed.append(index.parsed)
            classes.append(index.classes.ravel())
        all_parsed = np.concatenate(parsed)
        begin = all_parsed[:, coded_part.STATES] - coded_part.HEADER_BYTES
        return part_fields(all_parsed, np.tile(self.tokens, self.parts), self.begin - begin), np.concatenate(classes)

    def read_layers(self, channels: I64) -> tuple[I64, I64, dict[str, I64], U16]:
        """Find the byte planes of all layers, and their streams.

        `channels` are `[sections, P]`, of each plane. Returns the planes' fields of `byte_plane_parts`, with offsets
        into the upload; the number of coded planes of each job; fields of jobs; and uint16 `[K, 256]`, the
        frequencies of each coded plane.
        """
        layers = len(channels)
        planes = np.zeros((self.count, channels.shape[1], 4), np.int64)
        parsed, moved = np.zeros((self.count, byte_plane_parts.STEPS + 1), np.int64), np.zeros(self.count, np.int64)
        freq = []
        for first in range(0, self.count, layers):
            jobs, problem = slice(first, first + layers), np.zeros(coded_part.PROBLEM_FIELDS, np.int64)
            data, spans = joined(self.views[jobs])
            byte_plane_parts.index(data, spans, channels, self.tokens[first], planes[jobs], parsed[jobs], problem)
            self._check(problem, parsed[jobs], jobs)
            freq.append(np.zeros((np.count_nonzero(planes[jobs, :, byte_plane_parts.CODED]), SYMBOLS), np.uint16))
            _read_frequencies(data, planes[jobs], channels, freq[-1])
            moved[jobs] = self.begin[jobs] - spans[:, 0]
        planes[:, :, byte_plane_parts.AT] += moved[:, None]
        return planes, parsed[:, byte_plane_parts.STEPS], part_fields(parsed, self.tokens, moved), np.concatenate(freq)

    def _check(self, problem: I64, parsed: I64, jobs: slice) -> None:
        """Raise the error about the first damaged one of some jobs, all of one chunk, if there is one."""
        if problem[coded_part.RULE]:
            error = coded_part.problem_error(problem, parsed, int(self.tokens[jobs.start % self.count]))
            text, name = str(error), self.names[jobs][problem[coded_part.SECTION]]
            raise type(error)(text.replace("a section" if "a section" in text else "section", name, 1))

    def chunk_batch(self, sent: Mapping[str, torch.Tensor], status: torch.Tensor) -> ChunkBatch:
        """Return the chunks as launches take them, given the arrays on the device and int32 `[chunks * sections]`."""
        return ChunkBatch(sent["chunks"], status, len(self._sections), self.max_tokens)

    def cache_view(self, sent: Mapping[str, torch.Tensor], tiles: I64) -> CacheView:
        """Return the cache as a launch over `tiles` (rows of `TileField`, on the host) takes it."""
        return self._memory.view(sent, self.slots, tiles)


def part_fields(parsed: I64, tokens: I64, moved: I64) -> dict[str, I64]:
    """Return what the fields of `coded_part` are as fields of jobs of this many tokens, by their names in lower case.

    `moved` is the distance from where the bytes were parsed to where they are in the upload.
    """
    per_stream, there = np.left_shift(1, parsed[:, coded_part.LOG2]), parsed[:, coded_part.STATES] > 0
    offsets = (coded_part.STATES, coded_part.LENGTHS, coded_part.WORDS, coded_part.CLASSES, coded_part.ESCAPES)
    states, lengths, words, classes, escapes = (np.where(there, parsed[:, field] + moved, 0) for field in offsets)
    return {
        "states": states // 4, "lengths": lengths // 2, "words": words // 2, "word_count": parsed[:, coded_part.COUNT],
        "escapes": escapes // 4, "escape_count": parsed[:, coded_part.LISTED],
        "streams": np.where(there, -(-tokens // per_stream), 0), "per_stream": per_stream,
        "long_lengths": parsed[:, coded_part.WIDE] // 4, "class_words": classes // 2,
        "class_word_count": parsed[:, coded_part.CLASS_WORDS], "class_state": parsed[:, coded_part.CLASS_STATE],
    }  # fmt: skip


@compiled
def _read_frequencies(data, planes, channels, freq):  # type: ignore[no-untyped-def]
    """Read the tables of the coded planes of layers, which `byte_plane_parts.index` has checked."""
    table = 0
    for layer in range(len(planes)):
        for plane in range(len(channels[layer])):
            row = planes[layer, plane]
            if row[byte_plane_parts.CODED]:
                for pair in range(row[byte_plane_parts.AT] + channels[layer, plane] + 2, row[byte_plane_parts.END], 3):
                    freq[table, data[pair]] = coded_part.read_u16(data, pair + 1)
                table += 1
