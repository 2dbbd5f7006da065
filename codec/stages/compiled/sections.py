"""Coded sections to coefficients, compiled: all sections of a chunk in one call that releases the GIL.

bytes --index--> classes, streams, escapes                                  once
a tile of them --decode_streams--> planes --levels, dequantize--> y           for each tile
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from cuvee.codec.entropy.coding_plan import ESCAPE
from cuvee.codec.entropy.token_classes import CLASSES
from cuvee.codec.format import rules
from cuvee.codec.format.streams import WINDOW
from cuvee.codec.profiles import flat_plans as plans
from cuvee.codec.profiles.step_coding import StepCoding
from cuvee.codec.stages.columns import ROW_MULTIPLE, Coefficients, padded
from cuvee.codec.stages.compiled import coded_part as part
from cuvee.codec.stages.compiled import lanes
from cuvee.codec.stages.compiled.bfloat16 import rounded
from cuvee.codec.stages.compiled.coded_part import joined, read_u32
from cuvee.codec.stages.compiled.coder_steps import dequantize_low_step, dequantize_step
from cuvee.codec.stages.compiled.compiler import compiled, inner
from cuvee.codec.stages.compiled.rans import decode_class_stream, decode_streams
from cuvee.codec.stages.compiled.simd import WIDTH
from cuvee.codec.stages.compiled.symbols import count_escapes
from cuvee.codec.stages.compiled.token_order import sort_columns
from cuvee.codec.stages.compiled.transform import plain
from cuvee.codec.support.arena import Arena

_NEVER = 1 << 62  # the row of the escape after the last one


@inner
def _next_escape(cursor, data, parsed, by_window, tokens, start):  # type: ignore[no-untyped-def]
    """Move `cursor` (index in `by_window`, its end, row, column, number) to the next escape of its window."""
    cursor[0] += 1
    if cursor[0] == cursor[1]:
        cursor[2] = _NEVER
        return
    cursor[4] = np.int64(by_window[cursor[0]])
    cell = np.int64(read_u32(data, parsed[part.ESCAPES] + 4 * cursor[4]))
    cursor[2], cursor[3] = cell // tokens, cell % tokens - start


@inner
def _dequantized(level, one, more, step):  # type: ignore[no-untyped-def]
    """Return the coefficient of a level, as `dequantize_step` does."""
    m = abs(level)
    back = np.float32(m) - (one if m == 1 else more)
    back = back if m != 0 else np.float32(0)
    return (-back if level < 0 else back) * step


@inner
def _clear(out, begin, end):  # type: ignore[no-untyped-def]
    for i in range(begin, end):
        out[i] = 0


@inner
def _dequantize(  # type: ignore[no-untyped-def]
    data, parsed, by_window, windows_at, packed, section, tokens, start, pad, columns, shrink, source, out
):
    """Turn one section's planes into coefficients; return False if the escapes do not match.

    `out` receives `[blocks, pad, columns]`, as float32 or as bits of bfloat16.
    """
    rows, level_table, shift = packed.rows, packed.level_table, packed.shift
    entry, first_class, width = packed.entries[section], CLASSES * section, len(columns)
    windows = (width + WINDOW - 1) // WINDOW
    bounds = np.empty(width + 1, np.int64)  # of the runs of columns of one class
    rows_of, level_of = np.empty(width, np.int64), np.empty(width, np.int64)  # of the runs
    window_runs = np.empty(windows + 1, np.int64)  # the first run of each window
    steps = np.empty(width, np.float32)  # of the runs
    row = np.empty(width + WIDTH, out.dtype)
    runs = most = np.int64(0)
    alike = True
    for t in range(width):
        k = np.int64(columns[t])
        alike &= k == columns[0]
        if t % WINDOW == 0:
            window_runs[t // WINDOW] = runs
        if t % WINDOW == 0 or columns[t] != columns[t - 1]:
            bounds[runs] = t
            rows_of[runs], steps[runs] = rows[first_class + k], packed.steps[first_class + k]
            level_of[runs] = entry[plans.LEVELS] + k * entry[plans.ROWS]
            most = max(most, rows_of[runs])
            runs += 1
    bounds[runs] = width
    window_runs[windows] = runs
    # With one block or one class, the columns of a row go to one row of y, and every coefficient is written once.
    # Otherwise classes number their components differently, and zeros come first.
    blocks = entry[plans.BLOCKS]
    direct = alike or blocks == 1
    filled = np.zeros(blocks, np.int64)  # rows of each block
    if not direct:
        _clear(out, np.int64(0), blocks * pad * width)
    cursors = np.zeros((windows, 5), np.int64)
    for w in range(windows):
        cursors[w, 0], cursors[w, 1] = windows_at[start // WINDOW + w] - 1, windows_at[start // WINDOW + w + 1]
        _next_escape(cursors[w], data, parsed, by_window, tokens, start)
    for c in range(most):
        plane_at = row_at = c * width
        if alike:
            level = level_of[0] + c
            block, block_row = np.int64(packed.block[level]), np.int64(packed.block_row[level])
            row_at, filled[block] = (block * pad + block_row) * width, block_row + 1
        to, at = (out, row_at) if direct else (row, np.int64(0))
        for w in range(windows):
            begin, end = w * WINDOW, min((w + 1) * WINDOW, width)
            first = window_runs[w]
            r, reached, escaped = first, begin, False
            # Within a window classes rise and their rows fall, so the runs with this row come first. First as if there
            # were no escapes, which few columns have. What is written beyond a run is written again later.
            while r < window_runs[w + 1] and c < rows_of[r]:
                level, u, reached = level_of[r] + c, bounds[r], bounds[r + 1]
                table, bits = np.int64(level_table[level]), np.int64(shift[level])
                one, more, step = shrink[table, 0], shrink[table, 1], steps[r]
                low_at = np.int64(packed.low_plane[level]) * width
                if bits:
                    for i in range(u, reached, WIDTH):
                        escaped |= dequantize_low_step(
                            source, plane_at + i, low_at + i, bits, one, more, step, to, at + i
                        )  # fmt: skip
                else:
                    for i in range(u, reached, WIDTH):
                        escaped |= dequantize_step(source, plane_at + i, 0, 0, one, more, step, to, at + i)
                r += 1
            escapes = count_escapes(source[plane_at + begin : plane_at + reached]) if escaped else 0
            cursor = cursors[w]
            while cursor[2] == c:
                column = cursor[3]
                if not begin <= column < reached or source[plane_at + column] != ESCAPE:
                    return False
                q = first
                while bounds[q + 1] <= column:
                    q += 1
                level = level_of[q] + c
                table, bits = np.int64(level_table[level]), np.int64(shift[level])
                value = np.int32(read_u32(data, parsed[part.ESCAPES] + 4 * (parsed[part.LISTED] + cursor[4])))
                if bits:
                    low = np.int32(source[np.int64(packed.low_plane[level]) * width + column])
                    value = np.int32((value << bits) + low - (1 << (bits - 1)))
                to[at + column] = rounded(_dequantized(value, shrink[table, 0], shrink[table, 1], steps[q]), to)
                escapes -= 1
                _next_escape(cursor, data, parsed, by_window, tokens, start)
            if escapes:
                return False
            if direct:
                _clear(out, row_at + reached, row_at + end)
        for q in range(0 if direct else runs):
            if c < rows_of[q]:
                level = level_of[q] + c
                out_at = (np.int64(packed.block[level]) * pad + packed.block_row[level]) * width
                for t in range(bounds[q], bounds[q + 1]):
                    out[out_at + t] = row[t]
    if not alike:
        filled[0] = most
    for b in range(blocks if direct else np.int64(0)):
        _clear(out, (b * pad + filled[b]) * width, (b + 1) * pad * width)
    left = 0
    for w in range(windows):
        left += cursors[w, 2] != _NEVER
    return left == 0


@inner
def sort_escapes(data, parsed, tokens, windows, by_window, next_entry, listed):  # type: ignore[no-untyped-def]
    """Sort the numbers of a section's escapes by window: a part lists them row by row, and a row covers all tokens.

    `by_window` receives them from entry `listed` on, `windows` where each window begins there, and where the last one
    ends. `next_entry` is scratch of the same length. Returns where the next section's begin.
    """
    windows[:] = 0
    for number in range(parsed[part.LISTED]):
        windows[read_u32(data, parsed[part.ESCAPES] + 4 * number) % np.uint32(tokens) // WINDOW + 1] += 1
    windows[0] = listed
    for w in range(1, len(windows)):
        windows[w] += windows[w - 1]
    for w in range(len(windows)):
        next_entry[w] = windows[w]
    for number in range(parsed[part.LISTED]):
        w = read_u32(data, parsed[part.ESCAPES] + 4 * number) % np.uint32(tokens) // WINDOW
        by_window[next_entry[w]] = number
        next_entry[w] += 1
    return listed + parsed[part.LISTED]


@compiled
def _index(data, spans, sections, tokens, packed, classes, windows_at, parsed, problem):  # type: ignore[no-untyped-def]
    """Read the parts of sections that their tiles share; `problem` receives what is wrong with the first damaged one.

    Returns:
        for each section, the word at which each of its streams begins and where the last ends; and the numbers of its
        escapes, sorted by window. `windows_at` `[sections, windows + 1]` receives where each window begins among these
        numbers.
    """
    count = len(sections)
    escapes = np.int64(0)
    for i in range(count):
        finest = CLASSES * sections[i] + packed.entries[sections[i], plans.FINEST]
        problem[part.SECTION] = i
        if not part.find_part(
            data, spans[i, 0], spans[i, 1], tokens, np.int64(packed.planes[finest]), np.int64(packed.rows[finest]),
            parsed[i], problem,
        ):  # fmt: skip
            return np.empty(0, np.uint32), np.empty(0, np.uint32)
        escapes += parsed[i, part.LISTED]
    words_at, by_window = part.list_all_words(data, tokens, parsed), np.empty(escapes, np.uint32)
    next_entry = np.empty(windows_at.shape[1], np.int64)
    listed = np.int64(0)
    for i in range(count):
        coded, finest = parsed[i], packed.entries[sections[i], plans.FINEST]
        problem[part.SECTION] = i
        if not decode_class_stream(
            data, coded[part.CLASSES], coded[part.CLASS_WORDS], coded[part.CLASS_STATE],
            packed.class_slots[sections[i]], classes[i],
        ):  # fmt: skip
            problem[part.RULE] = rules.CLASS_STREAM
            return words_at, by_window
        for t in range(tokens):
            if not finest <= classes[i, t] < CLASSES:
                problem[part.RULE], problem[part.FIRST] = rules.CLASS_RANGE, finest
                return words_at, by_window
        listed = sort_escapes(data, coded, tokens, windows_at[i], by_window, next_entry, listed)
    return words_at, by_window


@compiled
def _decode(  # type: ignore[no-untyped-def]
    data, words_at, by_window, windows_at, sections, tokens, start, stop, packed, slots, shrink, scratch,
    scratch_at, y_at, y, order, columns, pads, classes, parsed, problem
):  # fmt: skip
    """Decode the tokens `start … stop - 1` of sections; return False if one is damaged, see `_index`.

    `pads` receives the rows of a block of each section.
    """
    count, width = len(sections), stop - start
    fields = np.empty((count, lanes.SECTION_FIELDS), np.int64)
    for i in range(count):
        section = sections[i]
        sort_columns(classes[i, start:stop], order[i], columns[i])
        finest = np.int64(CLASSES)
        for t in range(0, width, WINDOW):
            finest = min(finest, np.int64(columns[i, t]))
        pads[i] = (packed.depth[CLASSES * section + finest] + ROW_MULTIPLE - 1) // ROW_MULTIPLE * ROW_MULTIPLE
        fields[i, lanes.CLASSES], fields[i, lanes.OUT], fields[i, lanes.PLANES] = (
            i * width, scratch_at[i], CLASSES * section
        )  # fmt: skip
        fields[i, lanes.TABLES] = packed.entries[section, plans.TABLES]
        fields[i, lanes.STRIDE] = packed.entries[section, plans.PLANES]
    if not decode_streams(
        data, parsed, words_at, start, stop, fields, columns.reshape(columns.size), packed.planes, packed.tables, slots,
        scratch, problem,
    ):  # fmt: skip
        return False
    for i in range(count):
        if not _dequantize(
            data, parsed[i], by_window, windows_at[i], packed, sections[i], tokens, start, pads[i], columns[i], shrink,
            scratch[scratch_at[i] :], y[y_at[i] :],
        ):  # fmt: skip
            problem[part.SECTION], problem[part.RULE] = i, rules.ESCAPE_LIST
            return False
    return True


_arena = Arena()


@dataclass(frozen=True, slots=True)
class SectionIndex:
    """Sections that were read: the parts that decoding each of their tiles needs.

    Attributes:
        numbers: int64 `[S]`, numbers of the sections.
        data: the bytes of all sections, one after the other.
        parsed: `[S, PART_FIELDS]`, the fields of `coded_part`.
        words_at, by_window, windows_at: where streams and escapes are; see `_index`.
        classes: uint8 `[S, T]`, of all tokens of the sections.
    """

    coding: StepCoding
    numbers: npt.NDArray[np.int64]
    tokens: int
    data: npt.NDArray[np.uint8]
    parsed: npt.NDArray[np.int64]
    words_at: npt.NDArray[np.uint32]
    by_window: npt.NDArray[np.uint32]
    windows_at: npt.NDArray[np.int64]
    classes: npt.NDArray[np.uint8]


def index_sections(coding: StepCoding, parts: Sequence[tuple[int, memoryview]], tokens: int) -> SectionIndex:
    """Read sections, once for all of their tiles; `parts` are the number and the bytes of each.

    Raises:
        FormatError, CorruptError: the bytes break a rule.
    """
    index, problem = read_index(coding, parts, tokens)
    if problem[part.RULE]:
        raise part.problem_error(problem, index.parsed, tokens)
    return index


def read_index(
    coding: StepCoding, parts: Sequence[tuple[int, memoryview]], tokens: int
) -> tuple[SectionIndex, npt.NDArray[np.int64]]:
    """Index sections as `index_sections` does, but return what is wrong with the first damaged one: a `problem`, which
    has a rule or none.
    """
    count = len(parts)
    numbers = np.array([number for number, _ in parts])
    data, spans = joined([section for _, section in parts])
    parsed, problem = np.zeros((count, part.PART_FIELDS), np.int64), np.zeros(part.PROBLEM_FIELDS, np.int64)
    classes = np.empty((count, tokens), np.uint8)
    windows_at = np.empty((count, -(-tokens // WINDOW) + 1), np.int64)
    words_at, by_window = _index(data, spans, numbers, tokens, coding.plans, classes, windows_at, parsed, problem)
    return SectionIndex(coding, numbers, tokens, data, parsed, words_at, by_window, windows_at, classes), problem


def decode_sections(index: SectionIndex, at: slice, dtype: torch.dtype) -> list[Coefficients]:
    """Return a tile of sections, which begins where a window begins, in float32 or bfloat16."""
    coding, numbers = index.coding, index.numbers
    packed, tables = coding.plans, coding.family.tables
    count, width = len(numbers), at.stop - at.start
    planes_at = offsets_of(packed.entries[numbers, plans.PLANES] * width)
    rows = packed.entries[numbers, plans.BLOCKS] * [
        padded(int(depth)) for depth in packed.depth.reshape(-1, CLASSES)[numbers].max(1)
    ]
    y_at = offsets_of(rows * width)
    scratch = _arena.array("planes", int(planes_at[-1]) + WIDTH, np.uint8)
    y = _arena.tensor("y", int(y_at[-1]) + WIDTH, dtype)
    order, columns = np.empty((count, width), np.int64), np.empty((count, width), np.uint8)
    pads, problem = np.empty(count, np.int64), np.zeros(part.PROBLEM_FIELDS, np.int64)
    if not _decode(
        index.data, index.words_at, index.by_window, index.windows_at, numbers, index.tokens, at.start, at.stop,
        packed, tables.slots.reshape(-1), coding.family.quantizer.shrink, scratch, planes_at, y_at,
        plain(y), order, columns, pads, index.classes, index.parsed, problem,
    ):  # fmt: skip
        raise part.problem_error(problem, index.parsed, index.tokens)
    out = []
    for i, number in enumerate(numbers.tolist()):
        shape = (len(coding.sections[number].class_ranks[0]), int(pads[i]), width)
        coefficients = y[y_at[i] : y_at[i] + math.prod(shape)].view(shape)
        out.append(Coefficients(order[i], columns[i], coefficients))
    return out


def offsets_of(sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return where arrays of these sizes begin, aligned to cache lines, and where the last ends."""
    return np.concatenate([[0], np.cumsum(-(-sizes // 64) * 64)])
