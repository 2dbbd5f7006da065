"""Bit-exact coding of a layer, compiled: a section is read once, then decoded and written tile by tile.

The results are those of `reference/byte_planes.py`, which explains the parts of a section.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cuvee.codec.entropy.streams import MAX_TOKENS_PER_STREAM, stream_count, stream_error
from cuvee.codec.entropy.tables import SYMBOLS
from cuvee.codec.errors import FormatError
from cuvee.codec.layout import LayerLayout
from cuvee.codec.stages.compiled import coded_part as part
from cuvee.codec.stages.compiled.arena import Arena
from cuvee.codec.stages.compiled.byte_plane_steps import (
    interleave_2_step,
    interleave_4_step,
    interleave_8_step,
    join_by_channel_step,
    join_step,
    split_step,
)
from cuvee.codec.stages.compiled.coded_part import read_u16
from cuvee.codec.stages.compiled.compiler import compiled, compiled_briefly
from cuvee.codec.stages.compiled.plain_streams import decode_planes, stream_words
from cuvee.codec.stages.compiled.simd import WIDTH
from cuvee.codec.stages.compiled.transform import adjacent
from cuvee.codec.stages.reference.byte_planes import PROB_BITS, BytePlane, read_layer
from cuvee.codec.stages.rows import Rows, dense_rows

_SLOTS = 1 << PROB_BITS
_CHANNELS = 16  # adjacent values of each token that are written in a row

# Fields of a plane: whether it is coded; where its references (if coded) or its bytes begin; its first row among the
# coded ones.
_CODED, _AT, _ROW = range(3)

# Fields of the streams: those of `coded_part`, and the number of steps per token, which is -1 for a malformed section.
_STEPS = part.PART_FIELDS


@compiled
def _skip_padding(data, at, end):  # type: ignore[no-untyped-def]
    """Return the next multiple of four bytes, or -1 if a byte before it is not zero."""
    while at % 4:
        if at >= end or data[at]:
            return -1
        at += 1
    return at


@compiled
def _read_table(data, at, end, slots):  # type: ignore[no-untyped-def]
    """Read a plane's table into its decode slots; return where it ends, or -1 if it breaks a rule."""
    if at + 2 > end:
        return -1
    count = np.int64(read_u16(data, at))
    at += 2
    if at + 3 * count > end:
        return -1
    last = np.int64(-1)
    filled = np.int64(0)
    for _ in range(count):
        symbol, frequency = np.int64(data[at]), np.int64(read_u16(data, at + 1))
        at += 3
        if symbol <= last or not 0 < frequency < _SLOTS or filled + frequency > _SLOTS:
            return -1
        last = symbol
        entry = np.uint32(symbol) << np.uint32(24) | np.uint32(frequency) << np.uint32(12)
        own = slots[filled : filled + frequency]
        for i in range(len(own)):
            own[i] = np.uint32(entry | np.uint32(i))
        filled += frequency
    return at if filled == _SLOTS else -1


@compiled
def _parse(data, end, channels, tokens, planes, slots):  # type: ignore[no-untyped-def]
    """Find the planes of a section, as `read_layer` does; return where its streams begin, or -1 if it breaks a rule."""
    at = np.int64(0)
    row = 0
    coded = 0
    for i in range(len(channels)):
        if at >= end or data[at] > 1:
            return -1
        planes[i, _CODED] = data[at]
        at += 1
        if planes[i, _CODED]:
            planes[i, _AT], planes[i, _ROW] = at, row
            row += channels[i]
            at = _read_table(data, at + channels[i], end, slots[coded * _SLOTS : (coded + 1) * _SLOTS])
            coded += 1
            if at < 0:
                return -1
    at = _skip_padding(data, at, end)
    for i in range(len(channels)):
        if at < 0:
            return -1
        if not planes[i, _CODED]:
            planes[i, _AT] = at
            at += channels[i] * tokens
    return _skip_padding(data, at, end) if 0 <= at <= end else -1


@compiled_briefly
def _index(data, end, channels, tokens, planes, slots, tables, found):  # type: ignore[no-untyped-def]
    """Read the parts that a section's tiles share; return where each stream's words begin, and the last one's end."""
    none = np.empty(0, np.uint32)
    found[_STEPS] = -1
    at = _parse(data, end, channels, tokens, planes, slots)
    if at < 0:
        return none
    steps = np.int64(0)
    coded = 0
    for i in range(len(channels)):
        if planes[i, _CODED]:
            for _ in range(channels[i]):
                tables[steps] = coded << PROB_BITS
                steps += 1
            coded += 1
    if not steps:
        if at == end:
            found[_STEPS] = 0
        return none
    if (
        not part.find_part(data, at, end, tokens, steps, steps, part.NO_CLASSES, np.int64(0), found)
        or found[part.LISTED]
    ):
        return none
    found[_STEPS] = steps
    return stream_words(data, found, tokens)


@compiled
def _rows_of_tokens(source, row, channel, per_stream, streams, out):  # type: ignore[no-untyped-def]
    """Copy the bytes of `_CHANNELS` channels, whose columns are dealt to the streams, to `out`, in order of tokens."""
    count = per_stream * streams
    by_vectors = streams >= WIDTH and per_stream <= 8
    for i in range(_CHANNELS):
        begin, to = (channel + i) * row, i * count
        for block in range(0, streams if by_vectors else 0, WIDTH):
            stream = min(block, streams - WIDTH)  # the last streams may be written twice
            if per_stream == 2:
                interleave_2_step(source, begin + stream, streams, out, to + 2 * stream)
            elif per_stream == 4:
                interleave_4_step(source, begin + stream, streams, out, to + 4 * stream)
            else:
                interleave_8_step(source, begin + stream, streams, out, to + 8 * stream)
        for j in range(0 if by_vectors else per_stream):
            part = source[begin + j * streams : begin + (j + 1) * streams]
            for s in range(streams):
                out[to + s * per_stream + j] = part[s]


@compiled
def _write_joined(  # type: ignore[no-untyped-def]
    low, low_row, high, high_row, per_stream, references, at, width, begins, first_row, heads, size, stride, offsets,
    kinds, out,
):  # fmt: skip
    """Join a unit's stored low bytes and coded high bytes, and write its 16-bit values.

    `size` is a multiple of `_CHANNELS`. Of each plane: its bytes, and how far a channel's are from the next channel's.
    The references of the high bytes begin at `references[at]`.
    """
    streams = high_row // per_stream
    rows = np.empty(_CHANNELS * high_row if per_stream > 1 else 0, np.uint8)
    tile, in_tile = np.empty(_CHANNELS * WIDTH, out.dtype), np.arange(0, _CHANNELS * WIDTH, _CHANNELS)
    places = np.full(width, -1, np.int64)
    for t in range(max(-first_row, 0), min(width, len(begins) - first_row)):
        places[t] = begins[first_row + t]
    for h in range(heads):
        for d in range(0, size, _CHANNELS):
            channel = h * size + d
            from_high, high_begin = high, channel * high_row
            if per_stream > 1:
                _rows_of_tokens(high, high_row, channel, per_stream, streams, rows)
                from_high, high_begin = rows, 0
            for block in range(0, width, WIDTH):
                begin = min(block, width - WIDTH)  # the last tokens may be written twice
                low_begin = channel * low_row + begin
                if not len(offsets):
                    join_step(
                        low, low_begin, low_row, from_high, high_begin + begin, high_row, references, at + channel,
                        places, begin, h * stride + d, out,
                    )  # fmt: skip
                elif adjacent(places, begin, kinds, first_row + begin):
                    join_by_channel_step(
                        low, low_begin, low_row, from_high, high_begin + begin, high_row, references, at + channel,
                        offsets[kinds[first_row + begin], h], d, places[begin], out,
                    )  # fmt: skip
                else:
                    join_step(
                        low, low_begin, low_row, from_high, high_begin + begin, high_row, references, at + channel,
                        in_tile, 0, 0, tile,
                    )  # fmt: skip
                    for t in range(WIDTH):
                        to = places[begin + t]
                        if to >= 0:
                            of_token, source = offsets[kinds[first_row + begin + t], h], tile[t * _CHANNELS :]
                            for i in range(_CHANNELS):
                                out[to + of_token[d + i]] = source[i]


@compiled
def _write(  # type: ignore[no-untyped-def]
    data, tokens, start, width, planes, columns, per_stream, position, scratch, begins, first_row, heads, size, stride,
    offsets, kinds, out,
):  # fmt: skip
    """Join the planes of a unit, and write its values."""
    count = len(planes)
    joined = count == 2 and size % _CHANNELS == 0 and width >= WIDTH
    if joined and planes[1, _CODED] and not planes[0, _CODED]:  # as nearly always
        _write_joined(
            data[planes[0, _AT] + start :], tokens, scratch[planes[1, _ROW] * columns :], columns, per_stream, data,
            planes[1, _AT], width, begins, first_row, heads, size, stride, offsets, kinds, out,
        )  # fmt: skip
        return
    in_order = columns == width and per_stream == 1
    tile = np.empty((_CHANNELS, width), out.dtype)
    word = np.empty(width, np.uint32)
    row = np.empty(width, np.uint8)
    for h in range(heads):
        for d in range(0, size, _CHANNELS):
            adjacent = min(_CHANNELS, size - d)
            for i in range(adjacent):
                channel = h * size + d + i
                word[:] = np.uint32(0)
                for plane in range(count):
                    shift = np.uint32(8 * plane)
                    if planes[plane, _CODED]:
                        begin = (planes[plane, _ROW] + channel) * columns
                        reference = data[planes[plane, _AT] + channel]
                        source = scratch[begin : begin + columns]
                        if in_order:
                            for t in range(width):
                                row[t] = np.uint8(source[t] + reference)
                        else:
                            for t in range(width):
                                row[t] = np.uint8(source[position[t]] + reference)
                    else:
                        begin = planes[plane, _AT] + channel * tokens + start
                        for t in range(width):
                            row[t] = data[begin + t]
                    for t in range(width):
                        word[t] |= np.uint32(row[t]) << shift
                target = tile[i]
                top = np.uint32(8 * count - 1)
                for t in range(width):
                    target[t] = (word[t] >> np.uint32(1)) | (word[t] << top)
            for t in range(max(-first_row, 0), min(width, len(begins) - first_row)):
                begin = begins[first_row + t]
                if begin < 0:
                    continue
                at = begin + h * stride + d
                if len(offsets):
                    places = offsets[kinds[first_row + t], h]
                    for i in range(adjacent):
                        out[begin + places[d + i]] = tile[i, t]
                elif adjacent == _CHANNELS:
                    target = out[at : at + _CHANNELS]
                    for i in range(_CHANNELS):
                        target[i] = tile[i, t]
                else:
                    for i in range(adjacent):
                        out[at + i] = tile[i, t]


@compiled
def _decode_and_write(  # type: ignore[no-untyped-def]
    data, words_at, start, stop, tokens, found, slots, tables, planes, scratch, problem, first_row, keys, values
):
    """Decode a tile of a layer, and write it; return False for a damaged stream.

    `keys` and `values` are rows: begins, heads, size, stride, offsets, kinds, memory.
    """
    width = columns = stop - start
    per_stream = 1
    position = np.arange(width)
    if found[_STEPS]:
        order = np.empty(width + MAX_TOKENS_PER_STREAM - 1, np.int64)
        columns = decode_planes(
            data, words_at, start, stop, found, found[_STEPS], tables, slots, np.int64(PROB_BITS), order, scratch,
            problem,
        )  # fmt: skip
        if columns < 0:
            return False
        per_stream = 1 << found[part.LOG2]
        for column in range(columns):
            if order[column] >= 0:
                position[order[column]] = column
    bytes_per_value = len(planes) // 2
    for own, rows in ((planes[:bytes_per_value], keys), (planes[bytes_per_value:], values)):
        begins, heads, size, stride, offsets, kinds, out = rows
        if heads:
            _write(
                data, tokens, start, width, own, columns, per_stream, position, scratch, begins, first_row, heads, size,
                stride, offsets, kinds, out,
            )  # fmt: skip
    return True


_SLACK = bytes(4)
_arena = Arena()


@dataclass(frozen=True, slots=True)
class LayerIndex:
    """A layer's section that was read: the parts that decoding each of its tiles needs.

    Attributes:
        data: its bytes.
        itemsize: bytes per value.
        tokens: T, tokens in the chunk.
        channels: `[P]`, channels of each byte plane.
        planes, found: the fields of the planes and of the streams; see above.
        slots, tables: decode slots, and each step's place in them. Valid until the thread reads another layer.
        words_at: the word at which each stream begins, and where the last one ends.
    """

    data: npt.NDArray[np.uint8]
    itemsize: int
    tokens: int
    channels: npt.NDArray[np.int64]
    planes: npt.NDArray[np.int64]
    found: npt.NDArray[np.int64]
    slots: npt.NDArray[np.uint32]
    tables: npt.NDArray[np.uint32]
    words_at: npt.NDArray[np.uint32]


def index_layer(data: memoryview, layer: LayerLayout, dtype: torch.dtype, tokens: int) -> LayerIndex:
    """See `cuvee.codec.stages.reference.byte_planes.index_layer`."""
    itemsize = dtype.itemsize
    channels = np.repeat(np.array([layer.key_values, layer.value_values]), itemsize)
    # A copy, since a step reads a few bytes beyond its word.
    padded = np.frombuffer(b"".join((data, _SLACK)), np.uint8)
    planes, found = np.zeros((len(channels), 3), np.int64), np.zeros(_STEPS + 1, np.int64)
    slots = _arena.array("slots", len(channels) * _SLOTS, np.uint32)
    tables = np.empty(int(channels.sum()), np.uint32)
    words_at = _index(padded, len(data), channels, tokens, planes, slots, tables, found)
    if found[_STEPS] < 0:
        read_layer(data, layer, itemsize, tokens)  # raises
        raise FormatError("lossless section: must be well-formed, got a malformed one")
    return LayerIndex(padded, itemsize, tokens, channels, planes, found, slots, tables, words_at)


def decode_layer(index: LayerIndex, at: slice, keys: Rows | None, values: Rows | None, first_row: int) -> None:
    """See `cuvee.codec.stages.reference.byte_planes.decode_layer`."""
    most = at.stop - at.start + MAX_TOKENS_PER_STREAM - 1  # columns
    scratch = _arena.array("planes", int(index.channels.sum()) * most + WIDTH, np.uint8)
    problem = np.zeros(1, np.int64)
    if not _decode_and_write(
        index.data, index.words_at, at.start, at.stop, index.tokens, index.found, index.slots, index.tables,
        index.planes, scratch, problem, first_row, _row_arrays(keys, index.itemsize),
        _row_arrays(values, index.itemsize),
    ):  # fmt: skip
        raise stream_error(int(problem[0]), stream_count(index.tokens, 1 << int(index.found[part.LOG2])))


def _row_arrays(rows: Rows | None, itemsize: int) -> tuple[Any, ...]:
    """Return rows as the compiled loops take them; without heads if there are none."""
    if rows is None:
        return _NO_ROWS[itemsize]
    return rows.begins, rows.heads, rows.size, rows.head_stride, rows.offsets, rows.kinds, _bits(rows.memory)


_NO_ROWS = {
    size: (np.empty(0, np.int64), 0, 0, 0, np.empty((0, 0, 0), np.int64), np.empty(0, np.int64), np.empty(0, kind))
    for size, kind in ((2, np.uint16), (4, np.uint32))
}


def _bits(x: torch.Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.unsignedinteger]]:
    """Return the bits of a tensor of 16- or 32-bit values."""
    if x.element_size() == 2:
        return x.view(torch.int16).numpy().view(np.uint16)
    return x.view(torch.int32).numpy().view(np.uint32)


@compiled
def _split_words(memory, begins, stride, heads, size, planes):  # type: ignore[no-untyped-def]
    """Split a unit's words into byte planes."""
    count, _, tokens = planes.shape
    if count == 2 and size % _CHANNELS == 0 and tokens >= WIDTH:
        low, high = planes[0].reshape(planes[0].size), planes[1].reshape(planes[1].size)
        for h in range(heads):
            for d in range(0, size, _CHANNELS):
                for block in range(0, tokens, WIDTH):
                    token = min(block, tokens - WIDTH)  # the last tokens may be split twice
                    at = (h * size + d) * tokens + token
                    split_step(memory, begins, token, h * stride + d, low, at, high, at, tokens)
        return
    tile = np.empty((_CHANNELS, tokens), np.uint32)
    top = np.uint32(8 * count - 1)
    for h in range(heads):
        for d in range(0, size, _CHANNELS):
            adjacent = min(_CHANNELS, size - d)
            for t in range(tokens):
                begin = begins[t] + h * stride + d
                source = memory[begin : begin + adjacent]
                for i in range(adjacent):
                    tile[i, t] = source[i]
            for i in range(adjacent):
                row = tile[i]
                for t in range(tokens):
                    row[t] = np.uint32((row[t] << np.uint32(1)) | (row[t] >> top))
                for plane in range(count):
                    shift = np.uint32(8 * plane)
                    target = planes[plane, h * size + d + i]
                    for t in range(tokens):
                        target[t] = np.uint8((row[t] >> shift) & np.uint32(0xFF))


@compiled
def _split(memory, begins, stride, heads, size, planes, reference, counts):  # type: ignore[no-untyped-def]
    """Split a unit's words into byte planes; find their references, and count the differences from these."""
    count, channels, tokens = planes.shape
    _split_words(memory, begins, stride, heads, size, planes)
    several = np.zeros((4, SYMBOLS), np.int64)  # four in turn, since an entry is not ready again at once
    for plane in range(count):
        several[:] = 0
        for channel in range(channels):
            row = planes[plane, channel]
            total = np.int64(0)
            for t in range(tokens):
                total += row[t]
            own = np.uint8(np.rint(total / tokens))
            reference[plane, channel] = own
            for t in range(0, tokens - 3, 4):
                several[0, np.uint8(row[t] - own)] += 1
                several[1, np.uint8(row[t + 1] - own)] += 1
                several[2, np.uint8(row[t + 2] - own)] += 1
                several[3, np.uint8(row[t + 3] - own)] += 1
            for t in range(tokens - tokens % 4, tokens):
                several[0, np.uint8(row[t] - own)] += 1
        for i in range(SYMBOLS):
            counts[plane, i] = several[0, i] + several[1, i] + several[2, i] + several[3, i]


def split_unit(unit: torch.Tensor) -> list[BytePlane]:
    """See `cuvee.codec.stages.reference.byte_planes.split_unit`."""
    if unit.stride(2) != 1:
        unit = unit.contiguous()
    rows = dense_rows(unit)
    count, channels = unit.element_size(), rows.heads * rows.size
    planes = np.empty((count, channels, len(unit)), np.uint8)
    reference, counts = np.empty((count, channels), np.uint8), np.empty((count, SYMBOLS), np.int64)
    _split(_bits(rows.memory), rows.begins, rows.head_stride, rows.heads, rows.size, planes, reference, counts)
    return [BytePlane(planes[i], reference[i], counts[i]) for i in range(count)]
