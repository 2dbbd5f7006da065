"""Coded sections to coefficients, the reference: one section after the other, in plain NumPy.

    bytes --read_coded--> streams --rANS--> planes --unpack, dequantize--> y [blocks, pad, t]

The columns of y are the tokens in coding order (`token_order.py`). Its rows are padded, so that all blocks have one
shape and one product serves them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from cuvee.codec.entropy.coding_plan import CodingPlan
from cuvee.codec.entropy.family import step_value
from cuvee.codec.entropy.token_classes import CLASSES, ClassedPlan
from cuvee.codec.errors import FormatError
from cuvee.codec.format.coded_part import CodedPart, Reader, read_coded
from cuvee.codec.format.part_index import IndexedPart
from cuvee.codec.profiles.step_coding import StepCoding
from cuvee.codec.stages.reference.rans import rans_decode
from cuvee.codec.stages.reference.rans_by_class import rans_decode_classes, read_classes
from cuvee.codec.stages.reference.symbols import dequantize, unpack
from cuvee.codec.stages.reference.symbols_by_class import class_runs, from_planes
from cuvee.codec.stages.reference.token_order import coding_order, dealt_order
from cuvee.codec.support.arrays import I64, U8

# The rows of a block are a multiple of this: matrix instructions take this many at a time, and products of few shapes
# are prepared once.
ROW_MULTIPLE = 32


@dataclass(frozen=True, slots=True)
class Coefficients:
    """A decoded tile of a section.

    Attributes:
        order: `[t]`, the token of each column, counted from the tile's first token; -1 for no token.
        classes: `[t]` uint8, the class of each column; None if the tokens have no classes.
        y: `[blocks, pad, t]`; zero below a column's last component, undefined in a column without a token. Valid until
            the thread decodes its next tile.
    """

    order: I64
    classes: U8 | None
    y: torch.Tensor


def padded(rank: int) -> int:
    """Return the rows of a block whose deepest column has `rank` components."""
    return -(-rank // ROW_MULTIPLE) * ROW_MULTIPLE


def read_part(data: memoryview, plan: CodingPlan, classed: ClassedPlan | None, tokens: int) -> CodedPart:
    """Read the coded part of a section: all of `data`.

    Raises:
        FormatError: the bytes break a rule.
    """
    reader = Reader(data)
    shape = None if classed is None else (int(classed.planes.max()), int(classed.rows.max()))
    part = read_coded(reader, plan.planes, len(plan.shift), tokens, shape)
    reader.finish()
    return part


def check_classes(classes: U8, plan: ClassedPlan) -> None:
    """Raise FormatError if a token has a class that the plan does not serve."""
    if classes.min(initial=CLASSES) < plan.finest or classes.max(initial=0) >= CLASSES:
        raise class_range_error(plan.finest)


def class_range_error(finest: int) -> FormatError:
    """Return the error about a section with token classes that its profile does not serve."""
    return FormatError(
        f"section: must have token classes {finest} … {CLASSES - 1}, got token classes outside {finest} … {CLASSES - 1}"
    )


@dataclass(frozen=True, slots=True)
class SectionIndex:
    """Sections that were read: the parts that decoding each of their tiles needs.

    Attributes:
        coding: how the sections are coded.
        numbers: numbers of the sections.
        parts: their coded parts.
        classes: per section the class of every token, uint8 `[T]`; None without classes.
    """

    coding: StepCoding
    numbers: tuple[int, ...]
    parts: tuple[IndexedPart, ...]
    classes: tuple[U8 | None, ...]


def index_sections(coding: StepCoding, parts: Sequence[tuple[int, memoryview]], tokens: int) -> SectionIndex:
    """Read sections, once for all of their tiles.

    Args:
        coding: how the sections are coded.
        parts: number and bytes of each section.
        tokens: tokens in the chunk.

    Raises:
        FormatError, CorruptError: the bytes break a rule.
    """
    indexed: list[IndexedPart] = []
    classes: list[U8 | None] = []
    for number, data in parts:
        section = coding.sections[number]
        part = read_part(data, section.plan, section.classed, tokens)
        every = None
        if part.classes is not None:
            every = read_classes(part.classes, section.class_table, tokens)
            check_classes(every, section.classed)
        indexed.append(IndexedPart(part, tokens))
        classes.append(every)
    return SectionIndex(coding, tuple(number for number, _ in parts), tuple(indexed), tuple(classes))


def decode_sections(index: SectionIndex, at: slice, dtype: torch.dtype) -> list[Coefficients]:
    """Decode a tile of sections.

    Args:
        index: the result of `index_sections`.
        at: the tokens of the tile, which begins where a stream and a window begin.
        dtype: dtype of the coefficients: float32 or bfloat16.

    Raises:
        CorruptError: the bytes break a rule.
    """
    coding = index.coding
    tables, quantizer = coding.family.tables, coding.family.quantizer
    out = []
    for number, indexed, every in zip(index.numbers, index.parts, index.classes, strict=True):
        section = coding.sections[number]
        plan, classed = section.plan, section.classed
        n = indexed.part.tokens_per_stream
        streams, escapes = indexed.select(at)
        width = at.stop - at.start
        if every is None:
            planes = rans_decode(streams, plan.tables, tables, n, width)
            levels = unpack(planes, escapes, plan)
            order, classes = dealt_order(width, n), None
            in_order = dequantize(levels, step_value(coding.step_index), plan, quantizer)
            y = torch.from_numpy(np.where(order < 0, np.float32(0), in_order[:, order]))
            runs = [(slice(0, len(order)), 0)]
            ranks: tuple[tuple[int, ...], ...] = (section.ranks,)
        else:
            order = coding_order(every[at])
            classes = every[at][order]
            planes = rans_decode_classes(streams, classes, classed, tables, n)
            y = from_planes(planes, classes, escapes, classed, quantizer, int(classed.rows[classes.min()]))
            runs, ranks = list(class_runs(classes)), section.class_ranks
        pad = padded(max(max(ranks[k], default=0) for _, k in runs))
        blocks = torch.zeros(len(section.ranks), pad, len(order), dtype=dtype)
        for run, k in runs:
            row = 0
            for block, rank in enumerate(ranks[k]):
                blocks[block, :rank, run] = y[row : row + rank, run].to(dtype)
                row += rank
        out.append(Coefficients(order, classes, blocks))
    return out
