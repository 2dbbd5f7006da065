"""`scatter`, `move_keys` and `gather_centered`, compiled: the same bytes as `stages/transform.py`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from cuvee.codec.chunk import KVChunk
from cuvee.codec.layout import KVLayout, LayerLayout
from cuvee.codec.profiles.sections import Section, UnitColumns
from cuvee.codec.stages import transform
from cuvee.codec.stages.compiled.bfloat16 import rounded, saturated, to_float
from cuvee.codec.stages.compiled.compiler import compiled, inlined, inner
from cuvee.codec.stages.compiled.linear_steps import (
    add_and_rotate_step,
    add_step,
    rotate_and_subtract_step,
    subtract_step,
)
from cuvee.codec.stages.compiled.memory import array_at
from cuvee.codec.stages.compiled.simd import WIDTH
from cuvee.codec.stages.rotation import Rotation
from cuvee.codec.stages.rows import Rows
from cuvee.codec.stages.transform import Centers
from cuvee.codec.support.arena import FIRST, tile_arena
from cuvee.codec.support.arrays import F32, I64, U16


@inlined
def write_head(  # type: ignore[no-untyped-def]
    x, at, mean, center, predicted, guess, cos, sin, angle, half, size, out, to
):
    """Add mean and prediction to the values of a head of one token, rotate its pairs, round all, and write them.

    After each array comes the entry at which it begins. `half` is the number of pairs, `size` that of values.
    """
    i = 0
    while i + WIDTH <= half:
        add_and_rotate_step(
            x, at + i, mean, center + i, predicted, guess + i, half, cos, sin, angle + i, out, to + i
        )  # fmt: skip
        i += WIDTH
    while i < half:
        j = i + half
        a = to_float(x[at + i]) + (mean[center + i] + to_float(predicted[guess + i]))
        b = to_float(x[at + j]) + (mean[center + j] + to_float(predicted[guess + j]))
        c, s = cos[angle + i], sin[angle + i]
        out[to + i], out[to + j] = saturated(a * c - b * s, out), saturated(b * c + a * s, out)
        i += 1
    i = 2 * half
    while i + WIDTH <= size:
        add_step(x, at + i, mean, center + i, predicted, guess + i, out, to + i)
        i += WIDTH
    while i < size:
        value = to_float(x[at + i]) + (mean[center + i] + to_float(predicted[guess + i]))
        out[to + i] = saturated(value, out)
        i += 1


@compiled
def _scatter(  # type: ignore[no-untyped-def]
    x, block, mean, predicted, row_of, column, stride, cos, sin, order, memory, begins, head_stride, heads, size,
    dim_stride,
):  # fmt: skip
    columns = len(order)
    half, width = cos.shape[1], mean.shape[1]
    means = len(mean)
    strided = dim_stride != 1
    spare = np.empty(size if strided else 0, memory.dtype)
    target = spare if strided else memory
    mean_, cos_, sin_ = mean.reshape(mean.size), cos.reshape(cos.size), sin.reshape(sin.size)
    predicted_ = predicted.reshape(predicted.size) if len(predicted) else np.zeros(width, predicted.dtype)
    for row in range(columns):
        t = order[row]
        if t < 0 or t >= len(begins) or begins[t] < 0:
            continue
        of_mean = min(t, means - 1) * width + column
        of_token = (row_of[t] * width if len(predicted) else 0) + column
        angle = min(t, len(cos) - 1) * half
        for h in range(heads):
            first = column + h * stride
            at = (first // block * columns + row) * block + first % block
            center, guess = of_mean + h * stride, of_token + h * stride
            begin = begins[t] + h * head_stride
            write_head(
                x, at, mean_, center, predicted_, guess, cos_, sin_, angle, half, size, target, 0 if strided else begin
            )  # fmt: skip
            for i in range(len(spare)):
                memory[begin + i * dim_stride] = spare[i]


_NO_TABLE = np.empty((1, 0), np.float32)
_NO_PREDICTIONS = np.empty((0, 0), np.uint16), np.empty(0, np.int64)
_MAGNITUDE, _INFINITE = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000)  # bits of float32
_HALFWAY = np.uint32(0x7F7F8000)  # between bfloat16's largest number and infinity


def scatter(
    x: torch.Tensor,
    centers: Centers,
    section: Section,
    layout: KVLayout,
    rotation: Rotation,
    at: slice,
    keys: Sequence[Rows | None],
    values: Sequence[Rows | None],
    order: I64 | None = None,
) -> None:
    """See `stages.transform.scatter`, which also serves interleaved caches and float16."""
    if not served(section, layout):
        transform.scatter(x, centers, section, layout, rotation, at, keys, values, order)
        return
    block, tokens = x.shape[-1], x.shape[-2]
    source = plain(x.flatten())
    arrays = _arrays(centers)
    to = np.arange(tokens) if order is None else order
    for unit in section.units(layout):
        rows = (values if unit.is_value else keys)[unit.layer]
        if rows is None:
            continue
        cos, sin = tables_of(layout, unit, rotation, at)
        _scatter(
            source, block, *arrays, unit.first, unit.stride, cos, sin, to, plain(rows.memory), rows.begins[at],
            rows.head_stride, rows.heads, rows.size, rows.dim_stride,
        )  # fmt: skip


@compiled
def _move(  # type: ignore[no-untyped-def]
    stored, cos, sin, new_cos, new_sin, memory, begins, head_stride, heads, size, dim_stride
):
    """Write the keys of one layer; return whether all are within the dtype's range. Others are not written right."""
    half = cos.shape[1]
    tables = len(cos) - 1
    strided = dim_stride != 1
    spare = np.empty(size if strided else 0, memory.dtype)
    worst = np.uint32(0)
    for t in range(len(stored)):
        if begins[t] < 0:
            continue
        c, s, new_c, new_s = cos[min(t, tables)], sin[min(t, tables)], new_cos[min(t, tables)], new_sin[min(t, tables)]
        for h in range(heads):
            source, begin = stored[t, h], begins[t] + h * head_stride
            target = spare if strided else memory[begin : begin + size]
            low, high, tail = source[:half], source[half : 2 * half], source[2 * half :]
            low_target, high_target, tail_target = target[:half], target[half : 2 * half], target[2 * half :]
            for i in range(half):
                a = to_float(low[i]) * c[i] - to_float(high[i]) * s[i]
                b = to_float(high[i]) * c[i] + to_float(low[i]) * s[i]
                new_a, new_b = a * new_c[i] - b * new_s[i], b * new_c[i] + a * new_s[i]
                worst = max(worst, np.float32(new_a).view(np.uint32) & _MAGNITUDE)
                worst = max(worst, np.float32(new_b).view(np.uint32) & _MAGNITUDE)
                low_target[i], high_target[i] = rounded(new_a, low_target), rounded(new_b, high_target)
            for i in range(len(tail)):
                worst = max(worst, np.float32(to_float(tail[i])).view(np.uint32) & _MAGNITUDE)
                tail_target[i] = tail[i]
            for i in range(len(spare)):
                memory[begin + i * dim_stride] = spare[i]
    return worst < (_INFINITE if memory.itemsize == 4 else _HALFWAY)


def move_keys(
    stored: torch.Tensor, layer: LayerLayout, unrotation: Rotation, rotation: Rotation, at: slice, rows: Rows
) -> None:
    """See `stages.transform.move_keys`, which also serves interleaved caches, float16 and keys beyond the range."""
    if stored.dtype != torch.float16 and not _interleaved(layer):
        tables = [_NO_TABLE] * 4
        if layer.rope is not None:
            tables = [*unrotation.tables(layer.rope, at), *rotation.tables(layer.rope, at)]
        if _move(
            plain(stored), *tables, plain(rows.memory), rows.begins[at], rows.head_stride, rows.heads, rows.size,
            rows.dim_stride,
        ):  # fmt: skip
            return
    transform.move_keys(stored, layer, unrotation, rotation, at, rows)


def served(section: Section, layout: KVLayout) -> bool:
    """Return whether the loops serve a section's layout: neither interleaved nor float16."""
    return layout.torch_dtype != torch.float16 and not any(map(_interleaved, section.layers(layout)))


def tables_of(layout: KVLayout, unit: UnitColumns, rotation: Rotation, at: slice) -> tuple[F32, F32]:
    """Return the rotation tables of a unit for the tokens `at`; without columns if it is not rotated."""
    rope = layout.layers[unit.layer].rope
    return (_NO_TABLE, _NO_TABLE) if unit.is_value or rope is None else rotation.tables(rope, at)


def _arrays(centers: Centers) -> tuple[F32, U16, I64]:
    """Return centers as the compiled loops take them: means, the bits of predictions, and the row of each token."""
    means, predictions = centers
    if predictions is None:
        return means.numpy(), *_NO_PREDICTIONS
    return means.numpy(), predictions.rows.view(torch.int16).numpy().view(np.uint16), predictions.index


# Fields of a unit that is gathered.
_MEMORY = 0  # address of its values
_TOKEN_STRIDE = 1
_HEAD_STRIDE = 2
_HEADS = 3
_SIZE = 4  # values of a head
_COLUMN = 5  # see `UnitColumns.first`
_STRIDE = 6
_COS = 7  # addresses of its rotation tables
_SIN = 8
_HALF = 9  # columns of these; 0 if it is not rotated
_ALIKE: dict[torch.dtype, npt.NDArray[np.generic]] = {
    torch.bfloat16: np.empty(0, np.uint16),
    torch.float32: np.empty(0, np.float32),
}


@inner
def _gather(  # type: ignore[no-untyped-def]
    memory, token_stride, head_stride, heads, size, cos, sin, half, mean, predicted, row_of, width, column, stride, out
):  # fmt: skip
    """Write the values of one unit to its columns of `out`; return whether all values are finite.

    Arrays are one-dimensional. `mean`, `predicted` and `out` have rows of `width` values.
    """
    means, tokens = len(mean) // width, len(out) // width
    there = len(row_of) > 0
    bits = out.view(np.uint32)  # as integers, magnitudes keep their order, and NaN is above infinity
    worst = np.uint32(0)
    for t in range(tokens):
        of_mean = min(t, means - 1) * width + column
        of_token = (row_of[t] * width if there else 0) + column
        angle = t * half
        for h in range(heads):
            at = t * token_stride + h * head_stride
            center, guess, to = of_mean + h * stride, of_token + h * stride, t * width + column + h * stride
            i = 0
            while i + WIDTH <= half:
                rotate_and_subtract_step(
                    memory, at + i, mean, center + i, predicted, guess + i, half, cos, sin, angle + i, out, to + i
                )  # fmt: skip
                i += WIDTH
            while i < half:
                j = i + half
                a, b = to_float(memory[at + i]), to_float(memory[at + j])
                c, s = cos[angle + i], sin[angle + i]
                out[to + i] = a * c - b * s - (mean[center + i] + to_float(predicted[guess + i]))
                out[to + j] = b * c + a * s - (mean[center + j] + to_float(predicted[guess + j]))
                i += 1
            i = 2 * half
            while i + WIDTH <= size:
                subtract_step(memory, at + i, mean, center + i, predicted, guess + i, out, to + i)
                i += WIDTH
            while i < size:
                out[to + i] = to_float(memory[at + i]) - (mean[center + i] + to_float(predicted[guess + i]))
                i += 1
            for k in range(np.uint64(to), np.uint64(to + size)):
                worst = max(worst, bits[k] & _MAGNITUDE)
    return worst < _INFINITE


@compiled
def _gather_units(units, alike, mean, predicted, row_of, out):  # type: ignore[no-untyped-def]
    """Write the values of all units of a section to `out`, `[t, N]`; return whether all values are finite."""
    tokens, width = out.shape
    mean_, out_ = mean.reshape(mean.size), out.reshape(out.size)
    predicted_ = predicted.reshape(predicted.size) if len(row_of) else np.zeros(width, predicted.dtype)
    finite = True
    for u in range(len(units)):
        token_stride, head_stride, heads, size, column, stride = units[u, _TOKEN_STRIDE : _STRIDE + 1]
        half = units[u, _HALF]
        memory = array_at(units[u, _MEMORY], tokens * token_stride + heads * head_stride + size, alike)
        cos, sin = array_at(units[u, _COS], tokens * half, mean), array_at(units[u, _SIN], tokens * half, mean)
        finite &= _gather(
            memory, token_stride, head_stride, heads, size, cos, sin, half, mean_, predicted_, row_of, width, column,
            stride, out_,
        )  # fmt: skip
    return finite


def gather_centered(
    chunk: KVChunk,
    section: Section,
    rotation: Rotation,
    at: slice,
    centers: Centers,
) -> torch.Tensor:
    """See `stages.transform.gather_centered`, which also serves all other layouts."""
    units, interleaved = _units.of(section, chunk.layout)
    alike = _ALIKE.get(chunk.keys[0].dtype)
    if alike is None or interleaved:
        return transform.gather_centered(chunk, section, rotation, at, centers)
    tokens = at.stop - at.start
    fields = []
    tables = []  # held until the loop, which gets their addresses, has ended
    for unit in units:
        cached = (chunk.values if unit.is_value else chunk.keys)[unit.layer]
        token_stride, head_stride, one = cached.stride()
        if one != 1:
            return transform.gather_centered(chunk, section, rotation, at, centers)
        cos, sin = tables_of(chunk.layout, unit, rotation, at)
        tables.append((cos, sin))
        fields.append(
            (
                cached.data_ptr() + at.start * token_stride * alike.itemsize, token_stride, head_stride, unit.heads,
                unit.size, unit.first, unit.stride, _address(cos), _address(sin), cos.shape[1],
            )
        )  # fmt: skip
    x = tile_arena.array(FIRST, tokens * section.values, np.float32).reshape(tokens, section.values)
    if not _gather_units(np.array(fields, np.int64), alike, *_arrays(centers), x):
        raise transform.not_finite_error(section)
    return torch.from_numpy(x)


class _Units:
    """The units of the sections of the layout that was last asked for: to list them takes as long as a short tile."""

    def __init__(self) -> None:
        self._cached: tuple[KVLayout | None, dict[Section, tuple[tuple[UnitColumns, ...], bool]]] = (None, {})

    def of(self, section: Section, layout: KVLayout) -> tuple[tuple[UnitColumns, ...], bool]:
        """Return a section's units, and whether the keys of any of its layers are interleaved."""
        units_layout, units = self._cached
        if units_layout is not layout:
            units = {}
            self._cached = layout, units
        if section not in units:
            units[section] = tuple(section.units(layout)), any(map(_interleaved, section.layers(layout)))
        return units[section]


_units = _Units()


def _address(array: F32) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def plain(x: torch.Tensor) -> npt.NDArray[np.generic]:
    """Return a tensor as an array: for bfloat16 its bits, because NumPy lacks the type."""
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16).numpy().view(np.uint16)
    return x.numpy()


def _interleaved(layer: LayerLayout) -> bool:
    return layer.rope is not None and layer.rope.interleaved
