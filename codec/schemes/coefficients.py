"""Coefficients to the coded part of a section: quantize, pack, and entropy-code.

    y [R, T] float32 --to_planes--> planes --rANS--> streams

All stages before the entropy coder work on tiles of tokens, so that float arrays never exceed a tile.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cuvee.codec.entropy.family import Family
from cuvee.codec.entropy.token_classes import CLASSES, SectionPlanes
from cuvee.codec.errors import InputError
from cuvee.codec.format.coded_part import CodedPart, write_coded
from cuvee.codec.format.streams import MAX_TOKENS_PER_STREAM, Escapes, Streams
from cuvee.codec.profiles.step_coding import SectionCoding
from cuvee.codec.stages.stages import Stages
from cuvee.codec.support.arrays import F32, F64, I32, I64, U8

STREAM_BITS = 2048  # a stream's state and length take 6 bytes, 2% of this
STREAM_SYMBOLS = 512
_ONE_BIT = 1 << 20  # expected bits are added up in such fractions


def tokens_per_stream(planes: int, bits_per_token: float) -> int:
    """Return the smallest power of two that makes a stream long enough to hide its overhead."""
    count = 1
    while count < MAX_TOKENS_PER_STREAM and (count * bits_per_token < STREAM_BITS or count * planes < STREAM_SYMBOLS):
        count *= 2
    return count


def streams_of_classes(counts: I64, planes: I32, bits: F64) -> int:
    """Return the tokens per stream of a section, the same on every device: sums of floats depend on their order.

    Args:
        counts: tokens of each class, `[16]`, at least one.
        planes: of a token of each class.
        bits: that a token of each class is expected to take.
    """
    tokens = int(counts.sum())
    fixed = np.rint(bits * _ONE_BIT).astype(np.int64)
    return tokens_per_stream(int(counts @ planes) // tokens, int(counts @ fixed) / (tokens * _ONE_BIT))


def check_escape_numbers(rows: int, tokens: int) -> None:
    """Raise InputError if escapes, which are numbered row * T + column in 32 bits, would not have numbers."""
    if rows * tokens >= 1 << 32:
        raise InputError(f"chunk: must have fewer than 2**32 / {rows} tokens, got {tokens}: encode fewer at a time")


def _renumber(escapes: Escapes, columns: int, tokens: int, start: int) -> Escapes:
    """Renumber the escapes of a tile, `columns` tokens from `start` on, within the matrix of all `tokens`."""
    if columns == tokens:
        return escapes
    row, column = np.divmod(escapes.index, np.uint32(columns))
    return Escapes(row * np.uint32(tokens) + column + np.uint32(start), escapes.value)


def _merge(parts: list[Escapes]) -> Escapes:
    """Merge escapes in rising order."""
    if len(parts) == 1:
        return parts[0]
    index = np.concatenate([part.index for part in parts])
    order = np.argsort(index, kind="stable")
    return Escapes(index[order], np.concatenate([part.value for part in parts])[order])


def _side_by_side(parts: list[U8], tokens: int) -> U8:
    """Join the planes of all tiles into one matrix, as deep as the deepest tile."""
    joined = np.zeros((max(map(len, parts)), tokens), np.uint8)
    start = 0
    for part in parts:
        joined[: len(part), start : start + part.shape[1]] = part
        start += part.shape[1]
    return joined


class PackedSection:
    """A section's coefficients as symbols: packed tile by tile, then entropy-coded with other sections.

    Args:
        coding: how the section is coded.
        tokens: T, of the whole section.
    """

    def __init__(self, coding: SectionCoding, family: Family, stages: Stages, tokens: int) -> None:
        self._coding, self._family, self._stages = coding, family, stages
        plan = coding.classed
        check_escape_numbers(int(plan.rows[plan.finest]), tokens)
        self._classes, self._columns = np.empty(tokens, np.uint8), np.empty(tokens, np.uint8)
        self._tiles: list[U8] = []
        self._escapes: list[Escapes] = []
        self._filled = 0

    def add(self, classes: U8, columns: U8, y: F32) -> None:
        """Quantize and pack the next tile: whole windows, unless it is the last.

        Args:
            classes: `[t]`, of its tokens.
            columns: `[t]`, of its columns.
            y: `[R, t]` float32, their coefficients. R is at least the number of components of the finest class.

        Raises:
            InputError: a coefficient is too many steps large.
        """
        family, at = self._family, slice(self._filled, self._filled + len(classes))
        self._classes[at], self._columns[at] = classes, columns
        planes, escapes = self._stages.to_planes(y, columns, self._coding.classed, family.quantizer, family.tables)
        self._tiles.append(planes)
        self._escapes.append(_renumber(escapes, len(classes), len(self._classes), at.start))
        self._filled = at.stop

    def planes(self) -> SectionPlanes:
        """Return the planes of all tiles."""
        plan, tiles = self._coding.classed, self._tiles
        counts = np.bincount(self._classes, minlength=CLASSES)
        per_stream = streams_of_classes(counts, plan.planes, plan.entropy(self._family.tables))
        joined = tiles[0] if len(tiles) == 1 else _side_by_side(tiles, len(self._classes))
        return SectionPlanes(joined, self._columns, plan, per_stream)

    def write(self, planes: SectionPlanes, streams: Streams) -> bytes:
        """Return the section, given the streams of its planes."""
        classes = self._stages.encode_classes(self._classes, self._coding.class_table)
        part = CodedPart(streams, _merge(self._escapes), planes.tokens_per_stream, classes)
        return write_coded(part, int(planes.plan.planes.max()))


def encode_sections(sections: Sequence[PackedSection], family: Family, stages: Stages) -> list[bytes]:
    """Entropy-code sections together, which keeps the CPU busy."""
    planes = [section.planes() for section in sections]
    streams = stages.rans_encode(planes, family.tables)
    return [section.write(*coded) for section, coded in zip(sections, zip(planes, streams, strict=True), strict=True)]
