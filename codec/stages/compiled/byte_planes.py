"""Bit-exact coding of layers, compiled: sections are read once, then decoded and written tile by tile.

`codec/stages/byte_planes.py` explains the parts of a section.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from cuvee.codec.entropy.tables import PROB_BITS, SYMBOLS, TOTAL
from cuvee.codec.format.streams import WINDOW
from cuvee.codec.layout import LayerLayout
from cuvee.codec.stages.byte_planes import BytePlane
from cuvee.codec.stages.compiled import byte_plane_parts as parts
from cuvee.codec.stages.compiled import coded_part as part
from cuvee.codec.stages.compiled import lanes
from cuvee.codec.stages.compiled.byte_plane_steps import join_by_channel_step, join_step, split_step
from cuvee.codec.stages.compiled.coded_part import joined
from cuvee.codec.stages.compiled.compiler import compiled, inner
from cuvee.codec.stages.compiled.memory import array_at
from cuvee.codec.stages.compiled.rans import decode_streams
from cuvee.codec.stages.compiled.simd import WIDTH
from cuvee.codec.stages.rows import Rows, dense_rows
from cuvee.codec.support.arena import Arena

# Layers with fewer streams are decoded together: a step waits for the step before, and other streams fill the time.
# With more, it takes longer: every layer has tables of its own, and two of them fill a first cache of 32 KB.
_STREAMS = 4 * WIDTH
_CHANNELS = 16  # adjacent values of each token that are written in a row
# Bytes whose parts follow each other: rows of tokens are 2 KB apart, so that few lines stay in the first cache, and a
# part written later fetches its line again.
_LINE = 64
_TILE = WINDOW  # tokens whose planes are decoded, then joined from the second cache


@inner
def _are_adjacent(begins, first):  # type: ignore[no-untyped-def]
    """Return whether the rows of 16 tokens begin at adjacent places."""
    there = begins[first] >= 0
    for t in range(1, WIDTH):
        there &= begins[first + t] == begins[first] + t
    return there


@inner
def _read_row(data, tokens, start, plane, scratch, channel, row):  # type: ignore[no-untyped-def]
    """Read a channel's bytes of a plane, stored or decoded."""
    width = len(row)
    if plane[parts.CODED]:  # of slices, since LLVM takes one byte at a time where an index may be below zero
        begin, reference = (plane[parts.ROW] + channel) * width, data[plane[parts.AT] + channel]
        decoded = scratch[begin : begin + width]
        for t in range(width):
            row[t] = decoded[t] + reference
    else:
        begin = plane[parts.AT] + channel * tokens + start
        stored = data[begin : begin + width]
        for t in range(width):
            row[t] = stored[t]


@inner
def _write_joined(  # type: ignore[no-untyped-def]
    data, tokens, start, width, planes, scratch, begins, first_row, heads, size, head_stride, dim_stride, out
):
    """Join the planes of a unit, sixteen channels of sixteen tokens at a time; `size` is a multiple of `_CHANNELS`."""
    wide = _LINE // len(planes)
    apart = wide * width
    bytes_of = np.empty(len(planes) * apart, np.uint8)
    tile, in_tile = np.empty(_CHANNELS * WIDTH, out.dtype), np.arange(0, _CHANNELS * WIDTH, _CHANNELS)
    of_channels = np.arange(_CHANNELS) * dim_stride
    places = np.full(width, -1, np.int64)
    for t in range(max(-first_row, 0), min(width, len(begins) - first_row)):
        places[t] = begins[first_row + t]
    for h in range(heads):
        for line in range(0, size, wide):
            # Rows are read in order, which the CPU foresees, and joined from the first cache.
            for plane in range(len(planes)):
                for i in range(min(wide, size - line)):
                    to = plane * apart + i * width
                    channel = h * size + line + i
                    _read_row(data, tokens, start, planes[plane], scratch, channel, bytes_of[to : to + width])
            for block in range(0, width, WIDTH):
                begin = min(block, width - WIDTH)  # the last tokens may be written twice
                for d in range(line, min(line + wide, size), _CHANNELS):
                    at, later = (d - line) * width + begin, h * head_stride + d * dim_stride
                    if dim_stride == 1:
                        join_step(bytes_of, at, apart, width, places, begin, later, out)
                    elif _are_adjacent(places, begin):
                        join_by_channel_step(
                            bytes_of, at, apart, width, of_channels, 0, places[begin] + later, out
                        )  # fmt: skip
                    else:
                        join_step(bytes_of, at, apart, width, in_tile, 0, 0, tile)
                        for t in range(WIDTH):
                            to = places[begin + t]
                            if to >= 0:
                                for i in range(_CHANNELS):
                                    out[to + later + of_channels[i]] = tile[t * _CHANNELS + i]


@inner
def _write(  # type: ignore[no-untyped-def]
    data, tokens, start, width, planes, scratch, begins, first_row, heads, size, head_stride, dim_stride, out
):
    """Join the planes of a unit, and write its values."""
    count = len(planes)
    if size % _CHANNELS == 0 and width >= WIDTH:  # as nearly always
        _write_joined(
            data, tokens, start, width, planes, scratch, begins, first_row, heads, size, head_stride, dim_stride, out
        )
        return
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
                    _read_row(data, tokens, start, planes[plane], scratch, channel, row)
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
                at = begin + h * head_stride + d * dim_stride
                if adjacent == _CHANNELS and dim_stride == 1:
                    target = out[at : at + _CHANNELS]
                    for i in range(_CHANNELS):
                        target[i] = tile[i, t]
                else:
                    for i in range(adjacent):
                        out[at + i * dim_stride] = tile[i, t]


# Fields of rows as `_decode_and_write` takes them. Arrays are addresses, so that one call serves many layers.
_MEMORY, _ENTRIES, _BEGINS, _TOKENS, _HEADS, _SIZE, _HEAD_STRIDE, _DIM_STRIDE = range(8)
_ROW_FIELDS = 8


@compiled
def _list_runs(parsed, start, stop, run_of):  # type: ignore[no-untyped-def]
    """Number the runs of layers that are decoded together in `run_of`: as few as have `_STREAMS` streams."""
    run = streams = np.int64(0)
    for i in range(len(parsed)):
        if streams >= _STREAMS:
            run += 1
            streams = np.int64(0)
        run_of[i] = run
        if parsed[i, parts.STEPS]:
            streams += part.stream_count(stop, parsed[i, part.LOG2]) - (start >> parsed[i, part.LOG2])


@inner
def _decode_tile(  # type: ignore[no-untyped-def]
    data, words_at, start, stop, channels, tokens, parsed, slots, planes, run_of, scratch, scratch_at, problem,
    first_row, rows, alike
):  # fmt: skip
    """Decode a tile of layers, run by run, and write it; return False for a damaged stream: see `_decode_and_write`."""
    width, bytes_per_value = stop - start, planes.shape[1] // 2
    fields = np.zeros((len(parsed), lanes.SECTION_FIELDS), np.int64)
    depth = np.empty(len(parsed), np.int32)
    one_class = np.zeros(width, np.uint8)  # of the columns of all layers
    places = np.empty(0, np.int64)
    first = np.int64(0)
    while first < len(parsed):
        end, total, coded, step = first, np.int64(0), np.int64(0), np.int64(0)
        while end < len(parsed) and run_of[end] == run_of[first]:
            fields[end, lanes.OUT], fields[end, lanes.PLANES], fields[end, lanes.TABLES] = (
                scratch_at[end], end - first, total
            )  # fmt: skip
            depth[end] = parsed[end, parts.STEPS]
            total += parsed[end, parts.STEPS]
            end += 1
        tables = np.empty(total, np.uint32)
        for i in range(first, end):
            for plane in range(planes.shape[1]):
                if planes[i, plane, parts.CODED]:
                    parts.read_table(
                        data, planes[i, plane, parts.AT] + channels[i, plane], planes[i, plane, parts.END],
                        slots[coded * TOTAL : (coded + 1) * TOTAL],
                    )  # fmt: skip
                    for _ in range(channels[i, plane]):
                        tables[step] = coded << PROB_BITS
                        step += 1
                    coded += 1
        if not decode_streams(
            data, parsed[first:end], words_at, start, stop, fields[first:end], one_class, depth[first:end], tables,
            slots, scratch, problem,
        ):  # fmt: skip
            problem[part.SECTION] += first
            return False
        for i in range(first, end):
            for unit in range(2):
                unit_rows = rows[i, unit]
                if not unit_rows[_HEADS]:
                    continue
                begins = array_at(unit_rows[_BEGINS], unit_rows[_TOKENS], places)
                out = array_at(unit_rows[_MEMORY], unit_rows[_ENTRIES], alike)
                _write(
                    data, tokens, start, width, planes[i, unit * bytes_per_value : (unit + 1) * bytes_per_value],
                    scratch[scratch_at[i] :], begins, first_row, unit_rows[_HEADS], unit_rows[_SIZE],
                    unit_rows[_HEAD_STRIDE], unit_rows[_DIM_STRIDE], out,
                )  # fmt: skip
        first = end
    return True


@compiled
def _decode_and_write(  # type: ignore[no-untyped-def]
    data, words_at, start, stop, channels, tokens, parsed, slots, planes, run_of, scratch, scratch_at, problem,
    first_row, rows, alike
):  # fmt: skip
    """Decode layers, tile by tile, and write them; return False for a damaged stream: see `decode_streams`.

    `rows` int64 `[layers, 2, …]` has the fields named above, of keys and of values, and no heads where nothing is
    written. `alike` has the dtype of their memory.
    """
    for begin in range(start, stop, _TILE):
        if not _decode_tile(
            data, words_at, begin, min(begin + _TILE, stop), channels, tokens, parsed, slots, planes, run_of, scratch,
            scratch_at, problem, first_row + begin - start, rows, alike,
        ):  # fmt: skip
            return False
    return True


_arena = Arena()


@dataclass(frozen=True, slots=True)
class LayersIndex:
    """Sections of layers that were read: the parts that decoding each of their tiles needs.

    Attributes:
        data: bytes that hold all sections.
        itemsize: bytes per value.
        tokens: T, tokens in the chunk.
        channels: `[L, P]`, channels of each byte plane.
        planes, parsed: `[L, P, …]` and `[L, …]`, the fields of the planes and of the streams; see above.
        words_at: the word at which each stream of each layer begins, and where a layer's last one ends.
    """

    data: npt.NDArray[np.uint8]
    itemsize: int
    tokens: int
    channels: npt.NDArray[np.int64]
    planes: npt.NDArray[np.int64]
    parsed: npt.NDArray[np.int64]
    words_at: npt.NDArray[np.uint32]


def index_layers(
    sections: Sequence[memoryview], layers: Sequence[LayerLayout], dtype: torch.dtype, tokens: int
) -> LayersIndex:
    """Read the sections of layers, one of each, once for all of their tiles; values have the dtype `dtype`.

    Raises:
        FormatError, CorruptError: the bytes break a rule.
    """
    itemsize, count = dtype.itemsize, len(layers)
    channels = np.array([[layer.key_values, layer.value_values] for layer in layers], np.int64).repeat(itemsize, 1)
    data, spans = joined(sections)
    planes, parsed = np.zeros((*channels.shape, 4), np.int64), np.zeros((count, parts.STEPS + 1), np.int64)
    problem = np.zeros(part.PROBLEM_FIELDS, np.int64)
    sound, words_at = parts.index(data, spans, channels, tokens, planes, parsed, problem)
    if not sound:
        raise part.problem_error(problem, parsed, tokens)
    return LayersIndex(data, itemsize, tokens, channels, planes, parsed, words_at)


def decode_layers(
    index: LayersIndex,
    which: slice,
    at: slice,
    keys: Sequence[Rows | None],
    values: Sequence[Rows | None],
    first_row: int,
) -> None:
    """Write the exact bits of some tokens of layers.

    Args:
        which: the layers to decode, by their places in the index; at least one.
        at: the tokens, which begin where a window begins.
        keys: for each of these layers, rows of the tokens' keys; None to leave them out.
        first_row: row of the first token. Tokens without a row are left out.
    """
    parsed, tile = index.parsed[which], min(_TILE, at.stop - at.start)
    run_of = np.empty(len(parsed), np.int64)
    _list_runs(parsed, at.start, at.start + tile, run_of)
    before = np.concatenate([[0], np.cumsum(parsed[:, parts.STEPS] * tile)])
    scratch_at = before[:-1] - before[np.searchsorted(run_of, run_of)]
    scratch = _arena.array("planes", int((scratch_at + np.diff(before)).max()) + WIDTH, np.uint8)
    # Tables are made when they are needed, so that they are in the first cache.
    slots = _arena.array("slots", int(np.bincount(run_of).max()) * index.channels.shape[1] * TOTAL, np.uint32)
    problem = np.zeros(part.PROBLEM_FIELDS, np.int64)
    if not _decode_and_write(
        index.data, index.words_at, at.start, at.stop, index.channels[which], index.tokens, parsed, slots,
        index.planes[which], run_of, scratch, scratch_at, problem, first_row, _row_fields(keys, values),
        _ALIKE[index.itemsize],
    ):  # fmt: skip
        raise part.problem_error(problem, parsed, index.tokens)


_ALIKE = {2: np.empty(0, np.uint16), 4: np.empty(0, np.uint32)}


def _row_fields(keys: Sequence[Rows | None], values: Sequence[Rows | None]) -> npt.NDArray[np.int64]:
    """Return rows as the compiled loops take them. The caller holds their arrays."""
    addresses: dict[int, int] = {}  # layers share arrays, and to ask for an address takes a microsecond

    def address(array: npt.NDArray[np.int64]) -> int:
        if id(array) not in addresses:
            addresses[id(array)] = array.ctypes.data
        return addresses[id(array)]

    fields = [
        (0,) * _ROW_FIELDS
        if rows is None
        else (
            rows.memory.data_ptr(), rows.memory.numel(), address(rows.begins), len(rows.begins), rows.heads, rows.size,
            rows.head_stride, rows.dim_stride,
        )
        for units in zip(keys, values, strict=True)
        for rows in units
    ]  # fmt: skip
    return np.array(fields, np.int64).reshape(len(keys), 2, _ROW_FIELDS)


def _bits(x: torch.Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.unsignedinteger]]:
    """Return the bits of a tensor of 16- or 32-bit values."""
    if x.element_size() == 2:
        return x.view(torch.int16).numpy().view(np.uint16)
    return x.view(torch.int32).numpy().view(np.uint32)


@inner
def _split_words(memory, begins, stride, heads, size, planes):  # type: ignore[no-untyped-def]
    """Split a unit's words into byte planes."""
    count, channels, tokens = planes.shape
    if size % _CHANNELS == 0 and tokens >= WIDTH:
        flat, wide = planes.reshape(planes.size), _LINE // count
        for h in range(heads):
            for line in range(0, size, wide):
                for block in range(0, tokens, WIDTH):
                    token = min(block, tokens - WIDTH)  # the last tokens may be split twice
                    for d in range(line, min(line + wide, size), _CHANNELS):
                        at = (h * size + d) * tokens + token
                        split_step(memory, begins, token, h * stride + d, flat, at, channels * tokens, tokens)
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
    eights = np.zeros((tokens + 7) // 8, np.uint64)  # of a channel's differences, which take a load each, one by one
    differences = eights.view(np.uint8)
    for plane in range(count):
        several[:] = 0
        for channel in range(channels):
            row = planes[plane, channel]
            total = np.int64(0)
            for t in range(tokens):
                total += row[t]
            mean = np.uint8(np.rint(total / tokens))
            reference[plane, channel] = mean
            for t in range(tokens):
                differences[t] = row[t] - mean
            for eight in eights:
                for k in range(8):
                    several[k & 3, (eight >> np.uint64(8 * k)) & np.uint64(0xFF)] += 1
        for i in range(SYMBOLS):
            counts[plane, i] = several[0, i] + several[1, i] + several[2, i] + several[3, i]
        counts[plane, 0] -= channels * (8 * len(eights) - tokens)  # zeros beyond the last token


def split_unit(unit: torch.Tensor) -> list[BytePlane]:
    """Split a unit `[T, H, D]` of a 16- or 32-bit dtype into byte planes, least significant first."""
    if unit.stride(2) != 1:
        unit = unit.contiguous()
    rows = dense_rows(unit)
    count, channels = unit.element_size(), rows.heads * rows.size
    planes = np.empty((count, channels, len(unit)), np.uint8)
    reference, counts = np.empty((count, channels), np.uint8), np.empty((count, SYMBOLS), np.int64)
    _split(_bits(rows.memory), rows.begins, rows.head_stride, rows.heads, rows.size, planes, reference, counts)
    return [BytePlane(planes[i], reference[i], counts[i]) for i in range(count)]
