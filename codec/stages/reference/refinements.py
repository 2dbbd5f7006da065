"""Refinements, the reference: levels of parts to symbols and back, section by section, in plain NumPy.

    y [R, T] --quantize--> levels of the base --cut cells--> levels of each refinement --> symbols, one plane per row

    bytes --rANS--> planes of the base --unpack--> levels --contexts, rANS--> symbols --> finer levels … --> y

`codec/entropy/nested.py` explains levels, symbols and contexts. A symbol is decoded with a table that its context
selects, so the levels of a part are decoded before the next part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from cuvee.codec.entropy.coding_plan import MAX_LEVEL, Escapes, escape_error, too_large_error
from cuvee.codec.entropy.family import TABLES_PER_OCTAVE
from cuvee.codec.entropy.nested import (
    CONTEXT_BITS,
    CONTEXTS,
    ESCAPED,
    KINDS,
    MOST,
    NestedFamily,
    base_cell,
    first_level,
    refine,
)
from cuvee.codec.errors import CorruptError, FormatError
from cuvee.codec.format.coded_part import Reader, read_coded
from cuvee.codec.format.part_index import IndexedPart
from cuvee.codec.profiles.nested_coding import NestedCoding, NestedSection, PartPlan
from cuvee.codec.stages.reference import symbols
from cuvee.codec.stages.reference.rans_by_class import rans_decode_classes
from cuvee.codec.stages.reference.sections import Coefficients, SectionIndex, index_sections, padded
from cuvee.codec.stages.reference.symbols_by_class import class_runs
from cuvee.codec.stages.reference.token_order import coding_order
from cuvee.codec.support.arrays import F32, I32, I64, U8

SectionParts = tuple[int, Sequence[memoryview]]  # the number of a section, and the bytes of its base and refinements


def to_refinements(y: F32, columns: U8, section: NestedSection, family: NestedFamily) -> list[tuple[U8, Escapes]]:
    """Return the planes and the escapes of the refinements of a tile.

    Args:
        y: `[R, T]` float32, columns sorted by class within windows; the rows of a column are those of its class in the
            last part.
        columns: `[T]` uint8, the class of each column.
        section: how the section is coded.
        family: the profile's nested family.

    Returns:
        for each refinement `[R', T]` uint8, a context and a symbol per byte (`RefinementCoder.encoding`), where R' is
        the number of rows of the finest class in `columns`; zero below a column's last row. And the levels that no
        symbol stands for, numbered row * T + column.

    Raises:
        InputError: a coefficient is too many steps large.
    """
    parts, quantizer = section.parts, family.base.quantizer
    planes = [np.zeros((int(part.classed.rows[columns].max(initial=0)), len(columns)), np.uint8) for part in parts[1:]]
    listed: list[list[Escapes]] = [[] for _ in planes]
    for at, k in class_runs(columns):
        last = parts[-1].components[k]
        place = np.full(section.count, -1)  # of each component among the rows of y
        place[last] = np.arange(len(last))
        of_class = y[: len(last), at]
        step = float(parts[0].classed.steps[k])
        magnitude = np.abs(of_class) * np.float32(1.0 / step)
        if not magnitude.max(initial=0) < MAX_LEVEL:
            raise too_large_error(float(magnitude.max()))
        rows = place[parts[0].components[k]]
        own = parts[0].classed.of(k)
        level = np.zeros(of_class.shape, np.int32)
        low, high = np.zeros(of_class.shape, np.float32), np.zeros(of_class.shape, np.float32)
        level[rows] = np.abs(symbols.quantize(of_class[rows], step, own, quantizer))
        zone = quantizer.dead_zone[own.level_table, None]
        low[rows], high[rows] = base_cell(level[rows], zone)
        for number, (tables, part) in enumerate(zip(family.refinements, parts[1:], strict=False), 1):
            unit = np.float32(2.0**-number)
            rows = place[part.components[k]]
            code = part.classed.of(k).level_table
            zone = tables.zone[code, None] * unit
            coarse, sizes = level[rows], magnitude[rows]
            fine, (own_low, own_high) = refine(coarse, sizes, (low[rows], high[rows]), zone)
            new = code < TABLES_PER_OCTAVE
            fine[new] = first_level(sizes[new] / unit, zone[new] / unit)
            own_low[new], own_high[new] = (edge * unit for edge in base_cell(fine[new], zone[new] / unit))
            signed = np.where(of_class[rows] < 0, -fine, fine)
            symbol = np.where(coarse == 0, signed, fine - 2 * coarse)
            row, column = np.nonzero(np.abs(symbol) > MOST)
            index = row * len(columns) + column + at.start
            listed[number - 1].append(Escapes(index.astype(np.uint32), symbol[row, column].astype(np.int32)))
            symbol[row, column] = ESCAPED
            context = np.minimum(coarse, CONTEXTS - 1)
            planes[number - 1][: len(rows), at] = context << CONTEXT_BITS | symbol & ((1 << CONTEXT_BITS) - 1)
            level[rows], low[rows], high[rows] = fine, own_low, own_high
    return [(own, _sorted(escapes)) for own, escapes in zip(planes, listed, strict=True)]


def _sorted(parts: Sequence[Escapes]) -> Escapes:
    """Join escapes in rising order."""
    index = np.concatenate([part.index for part in parts])
    order = np.argsort(index, kind="stable")
    return Escapes(index[order], np.concatenate([part.value for part in parts])[order])


@dataclass(frozen=True, slots=True)
class RefinedIndex:
    """Bases and refinements that were read: the parts that decoding each of their tiles needs.

    Attributes:
        coding: how the sections are coded.
        base: the bases.
        refinements: per section its refinements.
    """

    coding: NestedCoding
    base: SectionIndex
    refinements: tuple[tuple[IndexedPart, ...], ...]


def read_refinement(data: memoryview, part: PartPlan, tokens: int, tokens_per_stream: int) -> IndexedPart:
    """Read a section of a refinement: all of `data`.

    Raises:
        FormatError: the bytes break a rule.
    """
    reader = Reader(data)
    rows = int(part.classed.rows.max())
    coded = read_coded(reader, rows, rows, tokens)
    reader.finish()
    if coded.tokens_per_stream != tokens_per_stream:
        raise FormatError(
            f"section: must have {tokens_per_stream} tokens per stream, as what it refines, got "
            f"{coded.tokens_per_stream}"
        )
    return IndexedPart(coded, tokens)


def check_escapes(value: I32, limit: I64 | int) -> None:
    """Raise CorruptError if an escape is beyond a limit: levels double with each refinement, and must not overflow."""
    if np.any(np.abs(value.astype(np.int64)) > limit):
        raise escape_range_error()


def escape_range_error() -> CorruptError:
    """Return the error about an escape that no encoder writes."""
    return CorruptError(f"section: has a level beyond {MAX_LEVEL} steps: the bytes are damaged")


def unclassed_error() -> FormatError:
    """Return the error about a base whose tokens have no classes."""
    return FormatError("section: must have token classes in a base that is refined")


def index_refined(coding: NestedCoding, parts: Sequence[SectionParts], tokens: int) -> RefinedIndex:
    """Read sections of a base and its refinements, once for all of their tiles.

    Args:
        coding: how the sections are coded.
        parts: number and parts of each section.
        tokens: tokens in the chunk.

    Raises:
        FormatError, CorruptError: the bytes break a rule.
    """
    base = index_sections(coding.base, [(number, data[0]) for number, data in parts], tokens)
    refinements = []
    for (number, data), indexed, classes in zip(parts, base.parts, base.classes, strict=True):
        if classes is None:
            raise unclassed_error()
        plans = coding.sections[number].parts
        n = indexed.part.tokens_per_stream
        refinements.append(
            tuple(read_refinement(own, plan, tokens, n) for own, plan in zip(data[1:], plans[1:], strict=True))
        )
    return RefinedIndex(coding, base, tuple(refinements))


def decode_refined(index: RefinedIndex, at: slice, dtype: torch.dtype) -> list[Coefficients]:
    """Decode a tile of sections; see `sections.decode_sections`.

    Raises:
        CorruptError: the bytes break a rule.
    """
    coding, base = index.coding, index.base
    family = coding.family
    out = []
    for section_number, indexed, every, refinements in zip(
        base.numbers, base.parts, base.classes, index.refinements, strict=True
    ):
        if every is None:
            raise unclassed_error()
        section = coding.sections[section_number]
        order = coding_order(every[at])
        classes = every[at][order]
        n = indexed.part.tokens_per_stream
        streams, escapes = indexed.select(at)
        first = section.parts[0]
        planes = rans_decode_classes(streams, classes, first.classed, family.base.tables, n)
        levels = np.zeros((section.count, len(classes)), np.int32)
        found = 0
        for run, k in class_runs(classes):
            plan = first.classed.of(k)
            row, column = np.divmod(escapes.index, np.uint32(len(classes)))
            inside = (column >= run.start) & (column < run.stop)
            width = np.uint32(run.stop - run.start)
            local = Escapes(row[inside] * width + column[inside] - np.uint32(run.start), escapes.value[inside])
            found += len(local.index)
            check_escapes(local.value, MAX_LEVEL >> plan.shift[local.index // width].astype(np.int64))
            levels[first.components[k], run] = symbols.unpack(
                np.ascontiguousarray(planes[: plan.planes, run]), local, plan
            )
        if found != len(escapes.index):
            raise escape_error()
        for number, (part, coder, refinement) in enumerate(
            zip(section.parts[1:], family.coders, refinements, strict=False), 1
        ):
            contexts = np.zeros((part.classed.tables.shape[1], len(classes)), np.uint8)
            for run, k in class_runs(classes):
                rows = part.components[k]
                contexts[: len(rows), run] = np.minimum(np.abs(levels[rows, run]), CONTEXTS - 1)
            own, larger = refinement.select(at)
            coded = rans_decode_classes(own, classes, part.classed, coder.decoding, n, contexts)
            symbol = coded.view(np.int8).astype(np.int32)
            escaped = np.flatnonzero(symbol == ESCAPED)
            if not np.array_equal(escaped, larger.index):
                raise escape_error()
            check_escapes(larger.value, MAX_LEVEL << number)
            symbol.ravel()[escaped] = larger.value
            for run, k in class_runs(classes):
                rows = part.components[k]
                levels[rows, run] = refined(levels[rows, run], symbol[: len(rows), run])
        last, shrink = section.parts[-1], family.refinements[coding.refinements - 1].shrink
        deepest = last.class_ranks[int(classes.min())]
        blocks = torch.zeros(len(deepest), padded(max(deepest)), len(order), dtype=dtype)
        for run, k in class_runs(classes):
            rows, table = last.components[k], last.classed.of(k).level_table
            y = torch.from_numpy(reconstruct(levels[rows, run], shrink[table], float(last.classed.steps[k])))
            first_row = 0
            for block, rank in enumerate(last.class_ranks[k]):
                blocks[block, :rank, run] = y[first_row : first_row + rank].to(dtype)
                first_row += rank
        out.append(Coefficients(order, classes, blocks))
    return out


def refined(levels: I32, symbol: I32) -> I32:
    """Return the finer levels of signed levels and their symbols."""
    finer: I32 = 2 * levels + np.where(levels < 0, -symbol, symbol)
    return finer


def reconstruct(levels: I32, shrink: F32, step: float) -> F32:
    """Reconstruct `[R, T]` float32 from levels of a refinement, given the `shrink` `[R, 4]` of each row."""
    magnitude = np.abs(levels)
    back = magnitude.astype(np.float32) - np.take_along_axis(shrink, np.clip(magnitude, 1, KINDS) - 1, 1)
    back[magnitude == 0] = 0
    return np.where(levels < 0, -back, back) * np.float32(step)
