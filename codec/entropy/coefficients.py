"""Coefficients to the coded part of a section and back: quantize, pack, and entropy-code.

    y [R, T] float32 --quantize--> levels --pack--> planes --rANS--> streams

All stages work on tiles of tokens, so that float arrays never exceed a tile.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from cuvee.codec.entropy.coding_plan import MAX_LEVEL, CodingPlan, Escapes, too_large_error
from cuvee.codec.entropy.family import Family, step_value
from cuvee.codec.entropy.streams import MAX_TOKENS_PER_STREAM
from cuvee.codec.entropy.tables import EntropyTables
from cuvee.codec.entropy.token_classes import CLASSES, ClassedPlan
from cuvee.codec.errors import InputError
from cuvee.codec.format.coded_part import write_streams
from cuvee.codec.stages.implementations import Stages
from cuvee.codec.stages.reference.rans_by_class import ClassedPlanes
from cuvee.codec.support.arrays import F32, U8

Piece = tuple[U8, U8, F32]  # classes of tokens, classes of columns, and coefficients of columns

STREAM_BITS = 2048  # a stream's state and length take 6 bytes, 2 % of this
STREAM_SYMBOLS = 512


def tokens_per_stream(planes: int, bits_per_token: float) -> int:
    """Return the smallest power of two that makes a stream long enough to hide its overhead."""
    count = 1
    while count < MAX_TOKENS_PER_STREAM and (count * bits_per_token < STREAM_BITS or count * planes < STREAM_SYMBOLS):
        count *= 2
    return count


def _check_escape_numbers(rows: int, tokens: int) -> None:
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


def _peak(y: F32) -> float:
    """Return the largest magnitude, or NaN if there is a NaN."""
    return float(max(y.max(initial=0.0), -y.min(initial=0.0)))


def _side_by_side(parts: list[U8], tokens: int) -> U8:
    """Join the planes of all tiles into one matrix, as deep as the deepest tile."""
    joined = np.zeros((max(map(len, parts)), tokens), np.uint8)
    start = 0
    for part in parts:
        joined[: len(part), start : start + part.shape[1]] = part
        start += part.shape[1]
    return joined


@dataclass(frozen=True, slots=True)
class ClassedSection:
    """A section to encode whose tokens have classes.

    Attributes:
        pieces: tiles in order, whole windows except for the last. Each yields the classes `[t]` of its tokens, the
            classes of its columns, and the columns' `[R, t]` float32, where R is at least the number of components of
            the tile's finest class.
        plan: how the components of each class are coded.
        class_table: the table that codes the classes.
    """

    pieces: Iterable[Piece]
    plan: ClassedPlan
    class_table: EntropyTables


@dataclass(frozen=True, slots=True)
class CoefficientCoder:
    """Codes the coefficients of sections at one step."""

    stages: Stages
    family: Family
    step_index: int

    def encode(self, pieces: Iterable[tuple[slice, F32]], plan: CodingPlan, tokens: int) -> bytes:
        """Encode `[R, T]` coefficients.

        Args:
            pieces: token ranges in order, each but the last a multiple of 128 tokens, with their `[R, t]` float32.
            plan: how the R components are coded.
            tokens: T.

        Raises:
            InputError: a coefficient is too many steps large.
        """
        _check_escape_numbers(len(plan.shift), tokens)
        entropy = self.family.tables.entropy
        per_stream = tokens_per_stream(plan.planes, float(entropy[plan.tables].sum()))
        planes = np.empty((plan.planes, tokens), np.uint8)
        step = step_value(self.step_index)
        escaped: list[Escapes] = []
        for at, y in pieces:
            peak = _peak(y)
            if not peak < MAX_LEVEL * step:
                raise too_large_error(peak / step)
            levels = self.stages.quantize(y, step, plan, self.family.quantizer)
            planes[:, at], escapes = self.stages.pack(levels, plan, self.family.tables)
            escaped.append(_renumber(escapes, at.stop - at.start, tokens, at.start))
        streams = self.stages.rans_encode(planes, plan.tables, self.family.tables, per_stream)
        return write_streams(streams, _merge(escaped), plan.planes, per_stream)

    def encode_classes(self, sections: Iterable[ClassedSection], tokens: int) -> list[bytes]:
        """Encode the coefficients of several sections whose tokens have classes.

        Raises:
            InputError: a coefficient is too many steps large.
        """
        packed: list[ClassedPlanes] = []
        escapes: list[Escapes] = []
        for section in sections:
            planes, listed = self._to_planes(section, tokens)
            packed.append(planes)
            escapes.append(listed)
        return [
            write_streams(streams, listed, int(own.plan.planes.max()), own.tokens_per_stream, classes)
            for own, listed, (streams, classes) in zip(
                packed, escapes, self.stages.encode_classed(packed, self.family.tables), strict=True
            )
        ]

    def _to_planes(self, section: ClassedSection, tokens: int) -> tuple[ClassedPlanes, Escapes]:
        """Quantize and pack a section: everything before its entropy coding."""
        plan = section.plan
        _check_escape_numbers(int(plan.rows[plan.finest]), tokens)
        classes, columns = np.empty(tokens, np.uint8), np.empty(tokens, np.uint8)
        coded: list[U8] = []
        escaped: list[Escapes] = []
        start = 0
        for own, by_class, y in section.pieces:
            at = slice(start, start + len(own))
            classes[at], columns[at] = own, by_class
            planes, escapes = self.stages.to_planes(y, by_class, plan, self.family.quantizer, self.family.tables)
            coded.append(planes)
            escaped.append(_renumber(escapes, len(own), tokens, start))
            start = at.stop
        share = np.bincount(classes, minlength=CLASSES) / tokens
        per_stream = tokens_per_stream(int(share @ plan.planes), float(share @ plan.entropy(self.family.tables)))
        joined = coded[0] if len(coded) == 1 else _side_by_side(coded, tokens)
        return ClassedPlanes(joined, columns, classes, plan, section.class_table, per_stream), _merge(escaped)
