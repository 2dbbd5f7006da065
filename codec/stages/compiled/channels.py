"""Sections of channels that are coded one by one, compiled: a section is read once, then decoded tile by tile.

    x [T, N] --center_channels--> means, deviations; x --over scale, transposed--> y [R, T]

    bytes --index--> side information, streams                                  once
    a tile of them --decode_lanes--> planes                                     for each tile
    16 tokens of a head of the planes --dequantize, transpose--> x --mean, RoPE, rounding--> outputs

The results are those of `reference/channels.py`, which explains the steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from cuvee.codec.entropy.channels import MAX_CODE, MAX_SCALE, NOT_CODED
from cuvee.codec.entropy.coding_plan import ESCAPE, escape_error
from cuvee.codec.entropy.family import TABLES, Family, split_wide, step_value
from cuvee.codec.entropy.streams import MAX_TOKENS_PER_STREAM, stream_count, stream_error
from cuvee.codec.entropy.token_classes import WINDOW
from cuvee.codec.errors import FormatError
from cuvee.codec.layout import KVLayout
from cuvee.codec.profiles.sections import Section
from cuvee.codec.stages.compiled import coded_part as part
from cuvee.codec.stages.compiled.arena import Arena
from cuvee.codec.stages.compiled.channel_steps import dequantize_channels_step, dequantize_wide_step, normalize_step
from cuvee.codec.stages.compiled.coded_part import read_u16, read_u32
from cuvee.codec.stages.compiled.compiler import compiled, compiled_briefly
from cuvee.codec.stages.compiled.plain_streams import decode_planes, stream_words
from cuvee.codec.stages.compiled.simd import WIDTH
from cuvee.codec.stages.compiled.transform import place_head, plain, served, tables_of
from cuvee.codec.stages.reference import channels as reference
from cuvee.codec.stages.reference import transform
from cuvee.codec.stages.rotation import Rotation
from cuvee.codec.stages.rows import Rows, dense_rows
from cuvee.codec.support.arrays import F32, I32, I64, U8, U32

# Fields of the streams: those of `coded_part`, and the number of planes, which is -1 for a malformed section.
_PLANES = part.PART_FIELDS
FOUND_FIELDS = part.PART_FIELDS + 1

_arena = Arena()


@compiled
def _sum(x, sums):  # type: ignore[no-untyped-def]
    """Sum each channel."""
    for t in range(len(x)):
        own = x[t]
        for channel in range(len(sums)):
            sums[channel] += own[channel]


@compiled
def _center(x, mean, squares):  # type: ignore[no-untyped-def]
    """Subtract the means, and sum the squares of what is left."""
    for t in range(len(x)):
        own = x[t]
        for channel in range(len(squares)):
            left = own[channel] - mean[channel]
            own[channel] = left
            squares[channel] += np.float64(left) * np.float64(left)


def center_channels(x: torch.Tensor) -> tuple[F32, npt.NDArray[np.float64]]:
    """See `cuvee.codec.stages.reference.channels.center_channels`."""
    sums, squares = np.zeros((2, x.shape[1]))
    _sum(x.numpy(), sums)
    mean = transform.as_numpy(torch.from_numpy(sums / len(x)).bfloat16().float())
    _center(x.numpy(), mean, squares)
    return mean, np.sqrt(squares) / len(x) ** 0.5


@compiled
def _normalize(x, scale, places, y):  # type: ignore[no-untyped-def]
    """Write the channels that have places, over their scales."""
    tokens, count = x.shape
    x_ = x.reshape(x.size)
    if tokens < WIDTH or count < WIDTH:
        for channel in range(count):
            for t in range(tokens if places[channel] >= 0 else 0):
                y[places[channel] + t] = x[t, channel] / scale[channel]
        return
    for block in range(0, tokens, WIDTH):
        token = min(block, tokens - WIDTH)  # the last tokens may be written twice
        for first in range(0, count, WIDTH):
            channel = min(first, count - WIDTH)
            normalize_step(x_, token * count + channel, count, scale, channel, places, token, y)


def normalized_channels(x: torch.Tensor, scale: F32, live: npt.NDArray[np.intp]) -> F32:
    """See `cuvee.codec.stages.reference.channels.normalized_channels`."""
    tokens = len(x)
    places = np.full(len(scale), -1)
    places[live] = np.arange(len(live)) * tokens
    y = _arena.array("coefficients", len(live) * tokens, np.float32)
    _normalize(x.numpy(), scale, places, y)
    return y.reshape(len(live), tokens)


@compiled
def _read_channels(data, end, sizes, tables_of_code, scales, mean, table, shift, high, low):  # type: ignore[no-untyped-def]
    """Read the side information; return where it ends, or -1 if it breaks a rule, and how many channels are coded."""
    at = np.int64(0)
    channel = coded = 0
    for unit in range(len(sizes)):
        size = sizes[unit]
        if at + 2 + 3 * size > end:
            return np.int64(-1), coded
        scales[unit] = np.int64(np.int16(read_u16(data, at)))
        if abs(scales[unit]) > MAX_SCALE:
            return np.int64(-1), coded
        at += 2
        for i in range(size):
            bits = read_u16(data, at + 2 * i)
            if bits & np.uint32(0x7F80) == np.uint32(0x7F80):
                return np.int64(-1), coded
            mean[channel + i] = np.uint32(bits << np.uint32(16)).view(np.float32)
        at += 2 * size
        for i in range(size):
            code = np.int64(data[at + i])
            table[channel + i], shift[channel + i], high[channel + i], low[channel + i] = 0, 0, -1, -1
            if code == NOT_CODED:
                continue
            if code > MAX_CODE:
                return np.int64(-1), coded
            table[channel + i], shift[channel + i] = tables_of_code[code, 0], tables_of_code[code, 1]
            high[channel + i] = coded
            coded += 1
        at += size
        channel += size
    while at % 4:
        if at >= end or data[at]:
            return np.int64(-1), coded
        at += 1
    return at, coded


@compiled_briefly
def _index(  # type: ignore[no-untyped-def]
    data, end, sizes, tokens, tables_of_code, low_table, bits, shrink, scales, mean, one, more, shift, high, low,
    tables, escapes_of, found,
):  # fmt: skip
    """Read the parts that a section's tiles share; return where each stream's words begin, and the last one's end.

    `high` and `low` receive the number of each channel's planes, or -1; `tables` where the table of each plane begins;
    `escapes_of` how many escapes are listed for each window of tokens.
    """
    found[_PLANES] = -1
    table = np.zeros(len(high), np.int64)
    at, coded = _read_channels(data, end, sizes, tables_of_code, scales, mean, table, shift, high, low)
    planes = coded
    for channel in range(len(high) if at >= 0 else 0):
        one[channel], more[channel] = shrink[table[channel], 0], shrink[table[channel], 1]
        if high[channel] >= 0:
            tables[high[channel]] = table[channel] << bits
            if shift[channel]:
                low[channel] = planes
                tables[planes] = (low_table + shift[channel]) << bits
                planes += 1
    if at < 0 or not part.find_part(data, at, end, tokens, planes, coded, part.NO_CLASSES, np.int64(0), found):
        return np.empty(0, np.uint32)
    for number in range(found[part.LISTED]):
        escapes_of[read_u32(data, found[part.ESCAPES] + 4 * number) % np.uint32(tokens) // WINDOW] += 1
    found[_PLANES] = planes
    return stream_words(data, found, tokens)


@compiled
def _escape(data, found, index):  # type: ignore[no-untyped-def]
    """Return the number of the escape with this index among those listed, or -1."""
    first, end = np.int64(0), np.int64(found[part.LISTED])
    while first < end:
        middle = (first + end) // 2
        own = np.int64(read_u32(data, found[part.ESCAPES] + 4 * middle))
        if own == index:
            return middle
        if own < index:
            first = middle + 1
        else:
            end = middle
    return np.int64(-1)


@compiled
def _replace_escapes(  # type: ignore[no-untyped-def]
    data, found, tokens, start, planes, columns, block, order, high, low, shift, one, more, scale, step, channel, count,
    tile, to, stride,
):  # fmt: skip
    """Write the escapes of `count` channels and 16 columns; return how many there are, or -1 if one is not listed."""
    replaced = 0
    value = np.empty(1, np.int32)
    for i in range(channel, channel + count):
        for column in range(block, min(block + WIDTH, columns) if high[i] >= 0 else block):
            if order[column] < 0 or planes[high[i] * columns + column] != ESCAPE:
                continue
            number = _escape(data, found, high[i] * tokens + start + order[column])
            if number < 0:
                return -1
            replaced += 1
            value[0] = np.int32(read_u32(data, found[part.ESCAPES] + 4 * (found[part.LISTED] + number)))
            if shift[i]:
                half = np.int32(1) << (shift[i] - 1)
                value[0] = np.int32((value[0] << shift[i]) + np.int32(planes[low[i] * columns + column]) - half)
            m = abs(value[0])
            back = np.float32(m) - (one[i] if m == 1 else more[i])
            back = back if m != 0 else np.float32(0)
            back = (-back if value[0] < 0 else back) * step
            tile[to + (column - block) * stride + i - channel] = back * scale[i]
    return replaced


@compiled
def _place_unit(  # type: ignore[no-untyped-def]
    data, found, tokens, start, planes, columns, order, channels, step, unit, first_row, rows, cos, sin
):
    """Dequantize the channels of a unit, and write its values; return how many escapes there were, or -1."""
    high, low, places, low_places, shift, one, more, scale, mean, predicted = channels
    begins, heads, size, head_stride, offsets, kinds, out = rows
    permuted = len(offsets) > 0
    stride = (size + WIDTH - 1) // WIDTH * WIDTH
    tile = np.empty(WIDTH * stride, np.float32)
    spare = np.empty(size if permuted else 0, out.dtype)
    target = spare if permuted else out
    half, angles = cos.shape[1], len(cos) - 1
    cos_, sin_ = cos.reshape(cos.size), sin.reshape(sin.size)
    escapes = 0
    for h in range(heads):
        begin = unit + h * size
        for block in range(0, columns, WIDTH):
            for d in range(0, size, WIDTH):
                channel = begin + d
                wide = False
                for i in range(channel, channel + WIDTH):
                    wide |= shift[i] != 0
                if wide:
                    escaped = dequantize_wide_step(
                        planes, places, low_places, shift, channel, block, one, more, scale, step, tile, d, stride
                    )
                else:
                    escaped = dequantize_channels_step(
                        planes, places, low_places, shift, channel, block, one, more, scale, step, tile, d, stride
                    )
                if escaped:
                    replaced = _replace_escapes(
                        data, found, tokens, start, planes, columns, block, order, high, low, shift, one, more, scale,
                        step, channel, min(WIDTH, size - d), tile, d, stride,
                    )  # fmt: skip
                    if replaced < 0:
                        return -1
                    escapes += replaced
            for column in range(block, min(block + WIDTH, columns)):
                row = first_row + order[column]
                if order[column] < 0 or row < 0 or row >= len(begins) or begins[row] < 0:
                    continue
                place_head(
                    tile, (column - block) * stride, mean, begin, predicted, begin, cos_, sin_,
                    min(row, angles) * half, half, size, target,
                    0 if permuted else begins[row] + h * head_stride,
                )  # fmt: skip
                if permuted:
                    of_token = offsets[kinds[row], h]
                    for i in range(size):
                        out[begins[row] + of_token[i]] = spare[i]
    return escapes


# Problems of a tile.
_SOUND, _STREAM, _ESCAPES = range(3)


@compiled
def _decode(  # type: ignore[no-untyped-def]
    data, words_at, start, stop, tokens, found, tables, slots, bits, listed, channels, step, scratch, problem,
    first_row, keys, values, first_value, cos, sin, none,
):  # fmt: skip
    """Decode a tile of a section, and write it; return what is wrong with it.

    `keys` and `values` are rows: begins, heads, size, stride, offsets, kinds, memory. `listed` is how many escapes the
    tile must have, `first_value` the first channel of the values.
    """
    high, low, shift, one, more, scale, mean, predicted = channels
    order = np.empty(stop - start + MAX_TOKENS_PER_STREAM - 1, np.int64)
    columns = decode_planes(
        data, words_at, start, stop, found, found[_PLANES], tables, slots, bits, order, scratch, problem
    )
    if columns < 0:
        return _STREAM
    zeros = found[_PLANES] * columns
    scratch[zeros : zeros + columns + WIDTH] = 0
    places, low_places = np.full(len(shift), zeros), np.full(len(shift), zeros)
    for channel in range(len(high)):
        if high[channel] >= 0:
            places[channel] = high[channel] * columns
        if low[channel] >= 0:
            low_places[channel] = low[channel] * columns
    own = (high, low, places, low_places, shift, one, more, scale, mean, predicted)
    escapes = _place_unit(
        data, found, tokens, start, scratch, columns, order, own, step, np.int64(0), first_row, keys, cos, sin
    )
    if escapes < 0:
        return _ESCAPES
    more_escapes = _place_unit(
        data, found, tokens, start, scratch, columns, order, own, step, first_value, first_row, values, none, none
    )
    return _SOUND if more_escapes >= 0 and escapes + more_escapes == listed else _ESCAPES


_NO_TABLE = np.empty((1, 0), np.float32)
_TABLES_OF_CODE = np.stack([each.astype(np.int64) for each in split_wide(np.arange(MAX_CODE + 1, dtype=np.int32))], 1)


@dataclass(frozen=True, slots=True)
class ChannelIndex:
    """A section that was read: the parts that decoding each of its tiles needs.

    Attributes:
        data: its bytes.
        tokens: T, tokens in the chunk.
        family: tables and quantizer.
        step: of the quantizer.
        found: the fields of the streams; see above.
        words_at: the word at which each stream begins, and where the last one ends.
        tables: where the table of each plane begins.
        escapes: how many escapes are listed for each window of tokens.
        mean, scale, one, more: float32 `[N + 16]`: of each channel its mean, the scale of its unit, and its shrinkage.
        high, low: int64 `[N + 16]`, numbers of each channel's planes; -1: it has none.
        shift: int32 `[N + 16]`, its number of low bits.
    """

    data: U8
    tokens: int
    family: Family
    step: float
    found: I64
    words_at: U32
    tables: U32
    escapes: I64
    mean: F32
    scale: F32
    one: F32
    more: F32
    high: I64
    low: I64
    shift: I32

    @property
    def planes(self) -> int:
        """Byte planes per token."""
        return int(self.found[_PLANES])


def index_channels(
    data: memoryview, section: Section, number: int, family: Family, step_index: int, tokens: int
) -> ChannelIndex:
    """See `cuvee.codec.stages.reference.channels.index_channels`."""
    count = section.values + WIDTH  # steps read beyond the last channel
    whole = np.frombuffer(data, np.uint8)
    mean, scale, one, more = np.zeros((4, count), np.float32)
    high, low = np.full((2, count), -1)
    shift = np.zeros(count, np.int32)
    tables, found = np.empty(2 * section.values, np.uint32), np.zeros(FOUND_FIELDS, np.int64)
    escapes, scales = np.zeros(-(-tokens // WINDOW), np.int64), np.zeros(len(section.blocks), np.int64)
    words_at = _index(
        whole, len(data), np.array(section.blocks), tokens, _TABLES_OF_CODE, TABLES - 1, family.tables.prob_bits,
        family.quantizer.shrink, scales, mean, one, more, shift, high, low, tables, escapes, found,
    )  # fmt: skip
    if found[_PLANES] < 0:
        reference.index_channels(data, section, number, family, step_index, tokens)  # raises
        raise FormatError(f"section {number}: must be well-formed, got a malformed one")
    at = 0
    for size, index in zip(section.blocks, scales.tolist(), strict=True):
        scale[at : at + size] = step_value(index)
        at += size
    return ChannelIndex(
        whole, tokens, family, step_value(step_index), found, words_at, tables, escapes, mean, scale, one, more, high,
        low, shift,
    )  # fmt: skip


def decode_channels(
    index: ChannelIndex,
    at: slice,
    section: Section,
    layout: KVLayout,
    rotation: Rotation,
    first_row: int,
    keys: Sequence[Rows | None],
    values: Sequence[Rows | None],
) -> None:
    """See `cuvee.codec.stages.reference.channels.decode_channels`."""
    key_rows, value_rows = keys[section.first_layer], values[section.first_layer]
    if key_rows is None or value_rows is None:
        return
    key, value = section.units(layout)
    if served(section, layout):
        angles = tables_of(layout, key, rotation, slice(0, len(key_rows.begins)))
        _decode_to(index, at, first_row, key_rows, value_rows, index.mean, angles, value.first)
        return
    # Means and rotations of other layouts are the reference's.
    x = torch.empty(at.stop - at.start, section.values)
    own = [dense_rows(unit.of(x)) for unit in (key, value)]
    _decode_to(index, at, 0, own[0], own[1], np.zeros_like(index.mean), (_NO_TABLE, _NO_TABLE), value.first)
    mean = index.mean[: section.values]
    reference.place_tile(x, mean, section, layout, rotation, first_row, keys, values)


def _decode_to(
    index: ChannelIndex,
    at: slice,
    first_row: int,
    keys: Rows,
    values: Rows,
    mean: F32,
    angles: tuple[F32, F32],
    first_value: int,
) -> None:
    """Decode a tile to rows of floating-point values, its keys rotated by `angles`."""
    family, found = index.family, index.found
    columns = at.stop - at.start + MAX_TOKENS_PER_STREAM - 1
    scratch = _arena.array("planes", (index.planes + 1) * columns + 2 * WIDTH, np.uint8)
    listed = int(index.escapes[at.start // WINDOW : -(-at.stop // WINDOW)].sum())
    predicted = np.zeros(len(mean), np.uint16)
    channels = index.high, index.low, index.shift, index.one, index.more, index.scale, mean, predicted
    problem = np.zeros(1, np.int64)
    wrong = _decode(
        index.data, index.words_at, at.start, at.stop, index.tokens, found, index.tables,
        family.tables.slots.reshape(-1), family.tables.prob_bits, listed, channels, np.float32(index.step), scratch,
        problem, first_row, _row_arrays(keys), _row_arrays(values), first_value, *angles, _NO_TABLE,
    )  # fmt: skip
    if wrong == _STREAM:
        raise stream_error(int(problem[0]), stream_count(index.tokens, 1 << int(found[part.LOG2])))
    if wrong == _ESCAPES:
        raise escape_error()


def _row_arrays(rows: Rows) -> tuple[I64, int, int, int, I64, I64, npt.NDArray[np.generic]]:
    """Return rows as the compiled loops take them."""
    return rows.begins, rows.heads, rows.size, rows.head_stride, rows.offsets, rows.kinds, plain(rows.memory)
