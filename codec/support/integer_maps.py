"""Linear maps as integers of 16 bits, for products of integers.

    v, a column of numbers ~ unit * integers of 16 bits,   a row of a map ~ scale * integers of 16 bits
    product = unit * scale * sum of products, which is exact: it fits 32 bits

The norm of a column's integers is about 2**15, that of a row's up to 2**16. So a product's error is some 1e-4 of its
column's norm: a tenth of what bfloat16 costs. It depends on no other column, nor on the order of the sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from cuvee.codec.support.arrays import F32, I32, I64

LONGEST = 32600.0  # norm of a column's integers, each of which fits 16 bits
_LONGEST_ROW = 65000.0  # norm of a row's integers: with that of a column's and all rounding, below 2**31
_TILE = 16  # rows

TERMS, ROWS, MAP, SCALE, BEFORE, USED = range(6)  # fields of a block


@dataclass(frozen=True, slots=True)
class IntegerMaps:
    """The maps of a section's blocks.

    Attributes:
        fields: int64 `[B, 6]`, of each block: the terms of a row, an even number; the rows of its map; where its map
            and its scales begin; its first row among those of all blocks; and how many terms are multiplied, even, too.
        matrix: int32, block after block `[rows / 16, terms / 2, 16]`, pairs of integers.
        scale: float32, what 1 stands for in each row of a map.
    """

    fields: I64
    matrix: I32
    scale: F32

    def leading(self, terms: Sequence[int]) -> IntegerMaps:
        """Return the same maps, of which the first terms of each block are multiplied: an even number, or all."""
        fields = self.fields.copy()
        fields[:, USED] = [count + count % 2 for count in terms]
        return replace(self, fields=fields)


def integer_maps(matrices: Sequence[torch.Tensor]) -> IntegerMaps:
    """Return maps `[rows, terms]` of float32 as integers."""
    fields, maps, scales = [], [], []
    at = first = before = 0
    for matrix in matrices:
        rows, terms = matrix.shape
        tiled = torch.zeros(-(-rows // _TILE) * _TILE, terms + terms % 2, dtype=torch.float32)
        tiled[:rows, :terms] = matrix
        largest = tiled.abs().amax(1) if terms else tiled.sum(1)
        scale = torch.maximum(tiled.norm(dim=1) / _LONGEST_ROW, largest / LONGEST)
        rounded = (tiled / scale.clamp_min(torch.finfo(torch.float32).tiny)[:, None]).round().to(torch.int16)
        tiles = rounded.view(len(tiled) // _TILE, _TILE, tiled.shape[1] // 2, 2).transpose(1, 2).contiguous()
        fields.append((tiled.shape[1], rows, at, first, before, tiled.shape[1]))
        maps.append(tiles.numpy().reshape(-1).view(np.int32))
        scales.append(scale.numpy())
        at, first, before = at + maps[-1].size, first + len(tiled), before + rows
    return IntegerMaps(np.array(fields, np.int64), np.concatenate(maps), np.concatenate(scales))
