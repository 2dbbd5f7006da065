"""Sections of layers parsed in compiled loops: where their byte planes and streams are, and the planes' tables."""

from __future__ import annotations

import numpy as np

from cuvee.codec.entropy.tables import TOTAL
from cuvee.codec.format import rules
from cuvee.codec.stages.compiled import coded_part as part
from cuvee.codec.stages.compiled.coded_part import read_u16
from cuvee.codec.stages.compiled.compiler import compiled_briefly, inner

# Fields of a plane: whether it is coded; where its references (if coded) or its bytes begin; its first row among the
# coded ones; where its table ends.
CODED, AT, ROW, END = range(4)

# Fields of the streams: those of `coded_part`, and the number of coded planes of a token.
STEPS = part.PART_FIELDS


@inner
def _skip_padding(data, begin, at, end, problem):  # type: ignore[no-untyped-def]
    """Return the next multiple of four bytes from `begin`, or -1 if a byte before it is not zero or not there."""
    after = at + -(at - begin) % 4
    if after > end:
        problem[part.RULE], problem[part.FIRST] = rules.SHORT, after - end
        return -1
    for i in range(at, after):
        if data[i]:
            problem[part.RULE] = rules.PADDING
            return -1
    return after


@inner
def _check_table(data, at, end, problem):  # type: ignore[no-untyped-def]
    """Return where a plane's table ends, or -1 if it breaks a rule."""
    if at + 2 > end:
        problem[part.RULE], problem[part.FIRST] = rules.SHORT, at + 2 - end
        return -1
    count = np.int64(read_u16(data, at))
    at += 2
    if at + 3 * count > end:
        problem[part.RULE], problem[part.FIRST] = rules.SHORT, at + 3 * count - end
        return -1
    last = np.int64(-1)
    filled = most = np.int64(0)
    for _ in range(count):
        symbol, frequency = np.int64(data[at]), np.int64(read_u16(data, at + 1))
        at += 3
        if symbol <= last or not frequency:
            problem[part.RULE] = rules.TABLE_ORDER
            return -1
        last = symbol
        filled += frequency
        most = max(most, frequency)
    if filled != TOTAL or most == TOTAL:
        problem[part.RULE] = rules.TABLE_SUM
        return -1
    return at


@inner
def read_table(data, at, end, slots):  # type: ignore[no-untyped-def]
    """Read a checked table into its decode slots."""
    filled = np.int64(0)
    for pair in range(at + 2, end, 3):
        frequency = np.int64(read_u16(data, pair + 1))
        entry = np.uint32(data[pair]) << np.uint32(24) | np.uint32(frequency) << np.uint32(12)
        symbol_slots = slots[filled : min(filled + frequency, TOTAL)]  # whatever another process has written meanwhile
        for i in range(len(symbol_slots)):
            symbol_slots[i] = np.uint32(entry | np.uint32(i))
        filled += frequency


@inner
def _parse(data, begin, end, channels, tokens, planes, problem):  # type: ignore[no-untyped-def]
    """Find the planes of a section, as `read_layer` does; return where its streams begin, or -1 if it breaks a rule."""
    at = begin
    row = 0
    for i in range(len(channels)):
        if at >= end:
            problem[part.RULE], problem[part.FIRST] = rules.SHORT, 1
            return -1
        if data[at] > 1:
            problem[part.RULE], problem[part.FIRST] = rules.PLANE_MODE, data[at]
            return -1
        planes[i, CODED] = data[at]
        at += 1
        if planes[i, CODED]:
            planes[i, AT], planes[i, ROW] = at, row
            row += channels[i]
            if at + channels[i] > end:
                problem[part.RULE], problem[part.FIRST] = rules.SHORT, at + channels[i] - end
                return -1
            planes[i, END] = at = _check_table(data, at + channels[i], end, problem)
            if at < 0:
                return -1
    at = _skip_padding(data, begin, at, end, problem)
    for i in range(len(channels) if at >= 0 else 0):
        if not planes[i, CODED]:
            planes[i, AT] = at
            at += channels[i] * tokens
            if at > end:
                problem[part.RULE], problem[part.FIRST] = rules.SHORT, at - end
                return -1
    return _skip_padding(data, begin, at, end, problem) if at >= 0 else -1


@compiled_briefly
def index(data, spans, channels, tokens, planes, parsed, problem):  # type: ignore[no-untyped-def]
    """Read the parts that the tiles of sections share; `problem` receives what is wrong with the first damaged one.

    Returns:
        whether all sections are sound; and the word at which each stream of each section begins, and where the last one
        of a section ends.
    """
    for i in range(len(spans)):
        section_planes = planes[i]
        problem[part.SECTION] = i
        at = _parse(data, spans[i, 0], spans[i, 1], channels[i], tokens, section_planes, problem)
        if at < 0:
            return False, np.empty(0, np.uint32)
        for plane in range(len(section_planes)):
            if section_planes[plane, CODED]:
                parsed[i, STEPS] += channels[i, plane]
        if parsed[i, STEPS]:
            if not part.find_part(data, at, spans[i, 1], tokens, parsed[i, STEPS], part.ONE_CLASS, parsed[i], problem):
                return False, np.empty(0, np.uint32)
        elif at != spans[i, 1]:
            problem[part.RULE], problem[part.FIRST] = rules.LONG, spans[i, 1] - at
            return False, np.empty(0, np.uint32)
    return True, part.list_all_words(data, tokens, parsed)
