"""Products of 16-bit integers, for CPUs that multiply them faster than floats, and have no fast bfloat16.

    y, a column of coefficients ~ unit * integers of 16 bits,   a value's map ~ scale * integers of 16 bits
    value = unit * scale * sum of products, which is exact: it fits 32 bits

The norm of a column's integers is about 2**15, that of a value's map up to 2**16. So a value's error is some 1e-4 of
its column's norm: a tenth of what bfloat16 costs. It depends on no other column, nor on the order of the sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from cuvee.codec.stages.compiled.compiler import compiled
from cuvee.codec.stages.compiled.integer_steps import LONGEST, TOKENS, multiply_step, pair_rows
from cuvee.codec.stages.compiled.simd import WIDTH
from cuvee.codec.support.arena import Arena
from cuvee.codec.support.arrays import F32, I32, I64

_LONGEST_MAP = 65000.0  # norm of a map's integers: with that of a column's and all rounding, below 2**31
_ROWS, _VALUES, _MAP, _SCALE, _COLUMN = range(5)  # fields of a block

_arena = Arena()


@dataclass(frozen=True, slots=True)
class IntegerMaps:
    """The maps of the leading components of a section's blocks.

    Attributes:
        fields: int64 `[B, 5]`, of each block: its leading components, an even number; its values; where its map and its
            scales begin; and the column of its first value.
        matrix: int32, block after block `[values / 16, components / 2, 16]`, pairs of integers.
        scale: float32, what 1 stands for in the map of each value.
    """

    fields: I64
    matrix: I32
    scale: F32


def integer_maps(matrices: Sequence[torch.Tensor], leading: Sequence[int]) -> IntegerMaps:
    """Return maps `[n, components]` of float32, of which the `leading` components of each block are multiplied."""
    fields, maps, scales = [], [], []
    at = first = column = 0
    for matrix, wanted in zip(matrices, leading, strict=True):
        values, there = matrix.shape
        used = min(wanted, there)
        own = torch.zeros(-(-values // WIDTH) * WIDTH, used + used % 2)
        own[:values, :used] = matrix[:, :used]
        scale = torch.maximum(own.norm(dim=1) / _LONGEST_MAP, own.abs().amax(1) / LONGEST) if used else own.sum(1)
        rounded = (own / scale.clamp_min(torch.finfo(torch.float32).tiny)[:, None]).round().to(torch.int16)
        tiles = rounded.view(-1, WIDTH, own.shape[1] // 2, 2).transpose(1, 2).contiguous()
        fields.append((own.shape[1], values, at, first, column))
        maps.append(tiles.numpy().reshape(-1).view(np.int32))
        scales.append(scale.numpy())
        at, first, column = at + maps[-1].size, first + len(own), column + values
    return IntegerMaps(np.array(fields, np.int64), np.concatenate(maps), np.concatenate(scales))


@compiled
def _multiply(y, fields, matrix, scale, pairs, units, edge, x):  # type: ignore[no-untyped-def]
    blocks, depth, width = y.shape
    y_, x_, stride = y.reshape(y.size), x.reshape(x.size), x.shape[1]
    spare = np.empty(TOKENS * WIDTH, np.float32)
    for block in range(blocks):
        own = fields[block]
        half = min(own[_ROWS], depth) // 2
        for t in range(0, width, WIDTH):
            if t + WIDTH <= width:
                pair_rows(y_, block * depth * width + t, width, 2 * half, pairs, t * half, units, t)
                continue
            for row in range(2 * half):
                for i in range(width - t):
                    edge[row * WIDTH + i] = y[block, row, t + i]
            pair_rows(edge, 0, WIDTH, 2 * half, pairs, t * half, units, t)
        for value in range(0, own[_VALUES], WIDTH):
            tile, size = own[_MAP] + value * (own[_ROWS] // 2), min(WIDTH, own[_VALUES] - value)
            for t in range(0, width, TOKENS):
                at, to, count = (t - t % WIDTH) * half + t % WIDTH, t * stride + own[_COLUMN] + value, width - t
                if size == WIDTH and count >= TOKENS:
                    multiply_step(
                        pairs, at, matrix, tile, half, units, t, scale, own[_SCALE] + value, x_, to, stride
                    )  # fmt: skip
                    continue
                multiply_step(
                    pairs, at, matrix, tile, half, units, t, scale, own[_SCALE] + value, spare, 0, WIDTH
                )  # fmt: skip
                for i in range(min(TOKENS, count)):
                    for k in range(size):
                        x_[to + i * stride + k] = spare[i * WIDTH + k]


def multiply_leading(y: F32, maps: IntegerMaps, x: F32) -> None:
    """Write the products of the leading rows of coefficients `[B, pad, t]` to `x`, `[t, N]`."""
    rows, width = y.shape[1], -(-y.shape[2] // WIDTH) * WIDTH
    _multiply(
        y, maps.fields, maps.matrix, maps.scale, _arena.array("pairs", rows // 2 * width, np.int32),
        _arena.array("units", width, np.float32), _arena.array("edge", rows * WIDTH, np.float32), x,
    )  # fmt: skip
