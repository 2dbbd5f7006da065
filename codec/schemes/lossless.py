"""Bit-exact coding: byte planes, each entropy-coded where that pays and stored where it does not.

Every 16- or 32-bit value is rotated left by one bit, so that its most significant byte is the exponent (bfloat16,
float32) or exponent and leading mantissa bits (float16); the sign goes to the other end. Exponents of one channel
lie close together, mantissas are noise: about 8 + 2.7 bits for a bfloat16.

A section is one layer:

    per unit (K as stored, then V), per byte of a value from the least significant:
        uint8            mode: 0 stored, 1 coded
        if coded:        uint8 [C] reference byte of each channel
                         uint16 m, then m pairs (uint8 symbol, uint16 frequency): the plane's table
    padding to four bytes
    all stored planes, in order: uint8 [C, T]
    padding to four bytes
    the coded planes, one step per channel: symbol = (byte - reference) mod 256
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cuvee.codec.chunk import KVChunk
from cuvee.codec.coefficients import select_streams, tokens_per_stream
from cuvee.codec.container import Reader, read_streams, write_streams
from cuvee.codec.errors import FormatError
from cuvee.codec.layout import KVLayout
from cuvee.codec.rope import unrotate
from cuvee.codec.schemes import Target, overlap
from cuvee.codec.stages import Stages
from cuvee.codec.symbols import Escapes
from cuvee.codec.tables import SYMBOLS, EntropyTables, normalize_counts
from cuvee.codec.transform import Rotation, Section, partition, tile_tokens

PROB_BITS = 12
_PAIR = struct.Struct("<BH")
_COUNT = struct.Struct("<H")
_NO_ESCAPES = Escapes(np.empty(0, np.uint32), np.empty(0, np.int32))

U8 = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class _Plane:
    """One byte of all values of a unit: `[C, T]`, and how it is coded (`freq` None: stored)."""

    data: U8
    reference: U8 | None
    freq: npt.NDArray[np.uint16] | None


def byte_planes(x: torch.Tensor) -> list[U8]:
    """`[T, C]` of a 16- or 32-bit dtype -> byte planes `[C, T]`, least significant first."""
    bits = 8 * x.element_size()
    raw = x.contiguous().view(torch.int16 if bits == 16 else torch.int32).numpy()
    word: npt.NDArray[Any] = raw.view(np.uint16 if bits == 16 else np.uint32).T
    turned: npt.NDArray[Any] = (word << 1) | (word >> (bits - 1))
    return [np.ascontiguousarray((turned >> shift).astype(np.uint8)) for shift in range(0, bits, 8)]


def from_byte_planes(planes: list[U8], dtype: torch.dtype) -> torch.Tensor:
    """The inverse of `byte_planes`."""
    wide = np.uint16 if dtype.itemsize == 2 else np.uint32
    turned: npt.NDArray[Any] = np.zeros(planes[0].shape, wide)
    for index, plane in enumerate(planes):
        part: npt.NDArray[Any] = plane.astype(wide)
        turned |= part << (8 * index)
    word = (turned >> 1) | (turned << (8 * dtype.itemsize - 1))
    signed = np.ascontiguousarray(word.T).view(np.int16 if dtype.itemsize == 2 else np.int32)
    return torch.from_numpy(signed).view(dtype)


def choose_table(counts: npt.NDArray[np.integer], channels: int) -> npt.NDArray[np.uint16] | None:
    """The table that codes a plane of `channels` whose symbols (bytes less references) come up so often.

    None where coding, table and references included, saves less than a hundredth: the plane is stored.
    """
    freq = normalize_counts(counts, PROB_BITS)
    used = counts > 0
    size = (counts[used] * (PROB_BITS - np.log2(freq[used]))).sum() / 8
    return None if size + channels + 3 * int((freq > 0).sum()) >= 0.99 * counts.sum() else freq


def write_model(reference: U8, freq: npt.NDArray[np.uint16]) -> bytes:
    """References and table of a coded plane."""
    used = np.flatnonzero(freq)
    pairs = b"".join(_PAIR.pack(symbol, freq[symbol]) for symbol in used)
    return reference.tobytes() + _COUNT.pack(len(used)) + pairs


def _model(data: U8) -> _Plane:
    """Choose between storing and coding a plane, and the references and the table if coded."""
    # Exponents of a channel gather around their mean (for a Gaussian: half of them within one of it).
    reference = np.rint(data.mean(1)).astype(np.uint8)
    symbols = (data - reference[:, None]).astype(np.uint8)
    freq = choose_table(np.bincount(symbols.ravel(), minlength=SYMBOLS), len(data))
    return _Plane(data, None, None) if freq is None else _Plane(symbols, reference, freq)


class LosslessScheme:
    """Codes sections of any model bit for bit."""

    def __init__(self, layout: KVLayout, stages: Stages) -> None:
        self._sections = partition(layout, "unit")
        self._stages = stages

    @property
    def sections(self) -> tuple[Section, ...]:
        """See `SectionScheme.sections`."""
        return self._sections

    def encode(self, chunk: KVChunk, index: int, unrotation: Rotation, offsets: torch.Tensor | None = None) -> bytes:
        """See `SectionScheme.encode`. Keys are coded as stored: un-rotation is not exactly invertible."""
        layer = self._sections[index].first_layer
        units = (chunk.keys[layer].flatten(1), chunk.values[layer].flatten(1))
        planes = [_model(data) for unit in units for data in byte_planes(unit)]
        coded = [plane for plane in planes if plane.freq is not None]
        head, stored = bytearray(), bytearray()
        for plane in planes:
            head.append(plane.freq is not None)
            if plane.freq is None or plane.reference is None:
                stored += plane.data.tobytes()
                continue
            head += write_model(plane.reference, plane.freq)
        head += bytes(-len(head) % 4)
        stored += bytes(-len(stored) % 4)
        if not coded:
            return bytes(head + stored)
        tables = EntropyTables(np.stack([plane.freq for plane in coded if plane.freq is not None]), PROB_BITS)
        which = np.repeat(np.arange(len(coded), dtype=np.uint16), [len(plane.data) for plane in coded])
        symbols = np.concatenate([plane.data for plane in coded])
        per_stream = tokens_per_stream(len(which), float(tables.entropy[which].sum()))
        streams = self._stages.rans_encode(symbols, which, which, tables, per_stream)
        return bytes(head + stored) + write_streams(streams, _NO_ESCAPES, len(which), per_stream)

    def decode(self, data: memoryview, index: int, target: Target, rotation: Rotation) -> None:
        """See `SectionScheme.decode`. Keys are turned only if the tokens move."""
        section = self._sections[index]
        itemsize = target.layout.torch_dtype.itemsize
        reader = Reader(data)
        channels = [size for size in section.blocks for _ in range(itemsize)]
        models = [read_model(reader, size) for size in channels]
        reader.skip_padding()
        stored = [
            reader.array("u1", size * target.tokens).view(np.uint8).reshape(size, target.tokens)
            if model is None
            else None
            for size, model in zip(channels, models, strict=True)
        ]
        reader.skip_padding()
        coded = [(size, model) for size, model in zip(channels, models, strict=True) if model is not None]
        tile = _coded_planes(reader, self._stages, coded, target.tokens) if coded else None
        reader.finish()
        dtype = target.layout.torch_dtype
        layer = section.layers(target.layout)[0]
        out_keys, out_values = target.keys[section.first_layer], target.values[section.first_layer]
        moved = target.start != target.source_start + target.wanted.start
        size_of_tile = tile_tokens(section, target.layout)
        first_tile = target.wanted.start - target.wanted.start % size_of_tile
        for start in range(first_tile, target.wanted.stop, size_of_tile):
            at = slice(start, min(start + size_of_tile, target.tokens))
            columns, rows = overlap(at, target.wanted)
            inside = slice(at.start + columns.start, at.start + columns.stop)
            symbols = tile(at) if tile is not None else np.empty((0, at.stop - at.start), np.uint8)
            planes, row = [], 0
            for size, model, kept in zip(channels, models, stored, strict=True):
                if model is not None:
                    planes.append(symbols[row : row + size, columns] + model[0][:, None])
                    row += size
                elif kept is not None:
                    planes.append(kept[:, inside])
            keys = from_byte_planes(planes[:itemsize], dtype).unflatten(1, (layer.kv_heads, layer.head_dim))
            if moved:
                positions = torch.arange(inside.start, inside.stop) + target.source_start
                keys = rotation.apply(unrotate(keys, layer.rope, positions), layer.rope, rows).to(dtype)
            out_keys[rows] = keys
            out_values[rows] = from_byte_planes(planes[itemsize:], dtype).unflatten(
                1, (layer.kv_heads, layer.value_dim)
            )


def read_model(reader: Reader, channels: int) -> tuple[U8, npt.NDArray[np.uint16]] | None:
    """References and table of a coded plane, None of a stored one."""
    mode = reader.take(1)[0]
    if mode > 1:
        raise FormatError(f"unknown mode {mode} of a byte plane")
    if mode == 0:
        return None
    reference = reader.array("u1", channels).view(np.uint8)
    (count,) = reader.unpack(_COUNT)
    freq = np.zeros(SYMBOLS, np.uint16)
    last = -1
    for _ in range(count):
        symbol, frequency = reader.unpack(_PAIR)
        if symbol <= last or not frequency:
            raise FormatError("the symbols of a table are out of order or have no frequency")
        freq[symbol], last = frequency, symbol
    return reference, freq


def _coded_planes(
    reader: Reader, stages: Stages, coded: list[tuple[int, tuple[U8, npt.NDArray[np.uint16]]]], tokens: int
) -> Callable[[slice], U8]:
    """Read the streams; returns a function that decodes a tile of tokens (its start a multiple of all streams')."""
    tables = EntropyTables(np.stack([model[1] for _, model in coded]), PROB_BITS)
    which = np.repeat(np.arange(len(coded), dtype=np.uint16), [size for size, _ in coded])
    streams, escapes, per_stream = read_streams(reader, len(which), len(which), tokens)
    if len(escapes.index):
        raise FormatError("a lossless section has escapes")

    def tile(at: slice) -> U8:
        chosen = select_streams(streams, at.start // per_stream, -(-at.stop // per_stream))
        return stages.rans_decode(chosen, which, which, tables, per_stream, at.stop - at.start)

    return tile
