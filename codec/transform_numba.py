"""`place` into bfloat16 on the CPU, with mean, rotation and rounding in one pass: same bytes as `transform.place`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from cuvee.codec import transform
from cuvee.codec.compiled import compiled
from cuvee.codec.layout import KVLayout, LayerLayout
from cuvee.codec.transform import I64, Rotation, Section


@compiled
def _place(x, mean, column, cos, sin, out, order):  # type: ignore[no-untyped-def]
    tokens, heads, size = out.shape
    width = heads * size
    half = cos.shape[1]
    means = len(mean)
    bits = np.empty(width, np.uint32)
    value = bits.view(np.float32)
    for row in range(tokens):
        t = order[row] if len(order) else row
        source = x[row, column : column + width]
        center = mean[min(t, means - 1), column : column + width]
        target = out[t].reshape(width)
        if x.itemsize == 2:  # the bits of bfloat16
            for i in range(width):
                bits[i] = np.uint32(source[i]) << np.uint32(16)
        else:
            for i in range(width):
                value[i] = source[i]
        for i in range(width):
            value[i] += center[i]
        for h in range(heads if half else 0):
            first, second = value[h * size : h * size + half], value[h * size + half : h * size + 2 * half]
            for i in range(half):
                a, b = first[i], second[i]
                first[i] = a * cos[t, i] - b * sin[t, i]
                second[i] = b * cos[t, i] + a * sin[t, i]
        for i in range(width):
            # Round to nearest, ties to even. Sums are finite or infinite: there is no NaN whose payload could carry.
            v = bits[i]
            target[i] = np.uint16((v + np.uint32(0x7FFF) + ((v >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


_NO_TABLE = np.empty((1, 0), np.float32)
_IN_ORDER = np.empty(0, np.int64)


def place(
    x: torch.Tensor,
    mean: torch.Tensor,
    section: Section,
    layout: KVLayout,
    rotation: Rotation,
    at: slice,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    order: I64 | None = None,
) -> None:
    """See `cuvee.codec.transform.place`, which this calls for caches that are interleaved or not bfloat16."""
    layers = section.layers(layout)
    if layout.torch_dtype != torch.bfloat16 or any(map(_interleaved, layers)):
        transform.place(x, mean, section, layout, rotation, at, keys, values, order)
        return
    to = _IN_ORDER if order is None else order
    source = _bits(x) if x.dtype == torch.bfloat16 else x.numpy()
    means = mean.numpy()
    column = 0
    for index, layer in enumerate(layers, section.first_layer):
        cos, sin = rotation.tables(layer.rope, at) if layer.rope else (_NO_TABLE, _NO_TABLE)
        _place(source, means, column, cos, sin, _bits(keys[index][at]), to)
        column += layer.key_values
        _place(source, means, column, _NO_TABLE, _NO_TABLE, _bits(values[index][at]), to)
        column += layer.value_values


def _bits(x: torch.Tensor) -> npt.NDArray[np.uint16]:
    """The bits of a bfloat16 tensor, as NumPy has no such type."""
    return x.view(torch.int16).numpy().view(np.uint16)


def _interleaved(layer: LayerLayout) -> bool:
    return layer.rope is not None and layer.rope.interleaved
