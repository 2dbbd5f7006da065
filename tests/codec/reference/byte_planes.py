"""Bit-exact coding of a layer, which `codec/stages/byte_planes.py` describes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tests.codec.reference.coded_part import Reader, read_coded
from tests.codec.reference.rans import rans_decode

from cuvee.codec.entropy.tables import SYMBOLS, TOTAL, EntropyTables
from cuvee.codec.entropy.token_classes import one_class
from cuvee.codec.format import rules
from cuvee.codec.format.coded_part import CodedPart
from cuvee.codec.format.rules import rule_error
from cuvee.codec.layout import LayerLayout
from cuvee.codec.stages.byte_planes import COUNT, PAIRS, BytePlane
from cuvee.codec.stages.rows import Rows
from cuvee.codec.support.arrays import U8


def byte_planes(x: torch.Tensor) -> list[U8]:
    """Split `[T, C]` of a 16- or 32-bit dtype into byte planes `[C, T]`, least significant first."""
    bits = 8 * x.element_size()
    raw = x.contiguous().view(torch.int16 if bits == 16 else torch.int32).numpy()
    word: npt.NDArray[Any] = raw.view(np.uint16 if bits == 16 else np.uint32).T
    turned: npt.NDArray[Any] = (word << 1) | (word >> (bits - 1))
    return [np.ascontiguousarray((turned >> shift).astype(np.uint8)) for shift in range(0, bits, 8)]


def from_byte_planes(planes: list[U8], dtype: torch.dtype) -> torch.Tensor:
    """Invert `byte_planes`."""
    wide = np.uint16 if dtype.itemsize == 2 else np.uint32
    turned: npt.NDArray[Any] = np.zeros(planes[0].shape, wide)
    for index, plane in enumerate(planes):
        part: npt.NDArray[Any] = plane.astype(wide)
        turned |= part << (8 * index)
    word = (turned >> 1) | (turned << (8 * dtype.itemsize - 1))
    signed = np.ascontiguousarray(word.T).view(np.int16 if dtype.itemsize == 2 else np.int32)
    return torch.from_numpy(signed).view(dtype)


def split_unit(unit: torch.Tensor) -> list[BytePlane]:
    """See `cuvee.codec.stages.compiled.byte_planes.split_unit`."""
    planes = []
    for data in byte_planes(unit.flatten(1)):
        # A channel's exponents gather around their mean (for a Gaussian, half of them within one of it).
        reference = np.rint(data.mean(1)).astype(np.uint8)
        symbols = (data - reference[:, None]).astype(np.uint8)
        planes.append(BytePlane(data, reference, np.bincount(symbols.ravel(), minlength=SYMBOLS)))
    return planes


def read_model(reader: Reader, channels: int) -> tuple[U8, npt.NDArray[np.uint16]] | None:
    """Read references and table of a coded plane; return None for a stored plane."""
    mode = reader.take(1)[0]
    if mode > 1:
        raise rule_error(rules.PLANE_MODE, mode)
    if mode == 0:
        return None
    reference = reader.array("u1", channels).view(np.uint8)
    (count,) = reader.unpack(COUNT)
    pairs = np.frombuffer(reader.take(count * PAIRS.itemsize), PAIRS)
    symbols, frequencies = pairs["symbol"].astype(np.int64), pairs["frequency"].astype(np.int64)
    if np.any(np.diff(symbols, prepend=-1) <= 0) or not frequencies.all():
        raise rule_error(rules.TABLE_ORDER)
    if frequencies.sum() != TOTAL or frequencies.max() == TOTAL:
        raise rule_error(rules.TABLE_SUM)
    freq = np.zeros(SYMBOLS, np.uint16)
    freq[symbols] = frequencies
    return reference, freq


@dataclass(frozen=True, slots=True)
class CodedLayer:
    """The parts of a layer's section.

    Attributes:
        models: per plane, keys first, references and table; None if it is stored.
        stored: per plane `[C, T]`; None if it is coded.
        part: the streams of the coded planes; None if all planes are stored.
    """

    models: tuple[tuple[U8, npt.NDArray[np.uint16]] | None, ...]
    stored: tuple[U8 | None, ...]
    part: CodedPart | None


def read_layer(data: memoryview, layer: LayerLayout, itemsize: int, tokens: int) -> CodedLayer:
    """Read the parts of a layer's section of `tokens` tokens, whose values have `itemsize` bytes.

    Raises:
        FormatError: the bytes break a rule.
    """
    reader = Reader(data)
    channels = [size for size in (layer.key_values, layer.value_values) for _ in range(itemsize)]
    models = tuple(read_model(reader, size) for size in channels)
    reader.skip_padding()
    stored = tuple(
        reader.array("u1", size * tokens).view(np.uint8).reshape(size, tokens) if model is None else None
        for size, model in zip(channels, models, strict=True)
    )
    reader.skip_padding()
    part = None
    if any(model is not None for model in models):
        planes = sum(size for size, model in zip(channels, models, strict=True) if model is not None)
        part = read_coded(reader, planes, None, tokens)
    reader.finish()
    return CodedLayer(models, stored, part)


@dataclass(frozen=True, slots=True)
class LayerIndex:
    """A layer's section that was decoded.

    Attributes:
        planes: `[C, T]`, keys first, least significant first.
    """

    layer: LayerLayout
    dtype: torch.dtype
    planes: list[U8]


def index_layers(
    sections: Sequence[memoryview], layers: Sequence[LayerLayout], dtype: torch.dtype, tokens: int
) -> list[LayerIndex]:
    """See `cuvee.codec.stages.compiled.byte_planes.index_layers`."""
    return [_index(data, layer, dtype, tokens) for data, layer in zip(sections, layers, strict=True)]


def _index(data: memoryview, layer: LayerLayout, dtype: torch.dtype, tokens: int) -> LayerIndex:
    coded = read_layer(data, layer, dtype.itemsize, tokens)
    symbols = np.empty((0, tokens), np.uint8)
    if coded.part is not None:
        models = [model for model in coded.models if model is not None]
        tables = EntropyTables(np.stack([freq for _, freq in models]))
        plan = one_class(np.repeat(np.arange(len(models), dtype=np.uint16), [len(own) for own, _ in models]))
        columns = np.zeros(tokens, np.uint8)
        symbols = rans_decode(coded.part.streams, columns, plan, tables, coded.part.tokens_per_stream)
    planes, row = [], 0
    for model, stored in zip(coded.models, coded.stored, strict=True):
        if model is not None:
            planes.append(symbols[row : row + len(model[0])] + model[0][:, None])
            row += len(model[0])
        elif stored is not None:
            planes.append(stored)
    return LayerIndex(layer, dtype, planes)


def decode_layers(
    index: Sequence[LayerIndex],
    which: slice,
    at: slice,
    keys: Sequence[Rows | None],
    values: Sequence[Rows | None],
    first_row: int,
) -> None:
    """See `cuvee.codec.stages.compiled.byte_planes.decode_layers`."""
    for own, *of_layer in zip(index[which], keys, values, strict=True):
        sizes = own.layer.head_dim, own.layer.value_dim
        for unit, (rows, size) in enumerate(zip(of_layer, sizes, strict=True)):
            if rows is not None:
                first = max(first_row, 0)
                end = max(min(first_row + at.stop - at.start, len(rows.begins)), first)
                planes = own.planes[unit * own.dtype.itemsize :][: own.dtype.itemsize]
                x = from_byte_planes([plane[:, at] for plane in planes], own.dtype)
                x = x.unflatten(1, (own.layer.kv_heads, size))
                rows.write(x[first - first_row : end - first_row], slice(first, end))
