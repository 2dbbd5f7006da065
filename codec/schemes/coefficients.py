"""Coefficients to the coded part of a section: quantize, pack, and entropy-code.

    y [R, T] float32 --to_planes--> planes --rANS--> streams

All stages before the entropy coder work on tiles of tokens, so that float arrays never exceed a tile.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from cuvee.codec.entropy.family import Family
from cuvee.codec.entropy.token_classes import CLASSES, SectionPlanes
from cuvee.codec.errors import InputError
from cuvee.codec.format.coded_part import CodedPart, write_coded
from cuvee.codec.format.streams import MAX_TOKENS_PER_STREAM, Escapes, Streams
from cuvee.codec.profiles.step_coding import SectionCoding
from cuvee.codec.stages.stages import Stages
from cuvee.codec.support.arrays import F32, F64, I32, I64, U8

Piece = tuple[U8, U8, F32]  # classes of tokens, classes of columns, and coefficients of columns

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


@dataclass(frozen=True, slots=True)
class CoefficientCoder:
    """Codes the coefficients of sections with the tables and the quantizer of a family."""

    stages: Stages
    family: Family

    def encode(self, sections: Iterable[tuple[SectionCoding, Iterable[Piece]]], tokens: int) -> list[bytes]:
        """Encode several sections of `tokens` tokens, given how each is coded, and its pieces.

        Pieces are tiles in order, whole windows except for the last. Each has the classes `[t]` of its tokens, the
        classes of its columns, and the columns' `[R, t]` float32, where R is at least the number of components of the
        tile's finest class.

        Raises:
            InputError: a coefficient is too many steps large.
        """
        packed = [self._to_planes(coding, pieces, tokens) for coding, pieces in sections]
        streams = self.stages.rans_encode([planes for planes, _, _ in packed], self.family.tables)
        return [
            write_coded(CodedPart(own, escapes, planes.tokens_per_stream, classes), int(planes.plan.planes.max()))
            for own, (planes, escapes, classes) in zip(streams, packed, strict=True)
        ]

    def _to_planes(
        self, coding: SectionCoding, pieces: Iterable[Piece], tokens: int
    ) -> tuple[SectionPlanes, Escapes, Streams]:
        """Quantize and pack a section: everything before its entropy coding; and code its classes."""
        plan = coding.classed
        check_escape_numbers(int(plan.rows[plan.finest]), tokens)
        classes, columns = np.empty(tokens, np.uint8), np.empty(tokens, np.uint8)
        coded: list[U8] = []
        escaped: list[Escapes] = []
        start = 0
        for own, by_class, y in pieces:
            at = slice(start, start + len(own))
            classes[at], columns[at] = own, by_class
            planes, escapes = self.stages.to_planes(y, by_class, plan, self.family.quantizer, self.family.tables)
            coded.append(planes)
            escaped.append(_renumber(escapes, len(own), tokens, start))
            start = at.stop
        counts = np.bincount(classes, minlength=CLASSES)
        per_stream = streams_of_classes(counts, plan.planes, plan.entropy(self.family.tables))
        joined = coded[0] if len(coded) == 1 else _side_by_side(coded, tokens)
        class_stream = self.stages.encode_classes(classes, coding.class_table)
        return SectionPlanes(joined, columns, plan, per_stream), _merge(escaped), class_stream
