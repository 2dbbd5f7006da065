"""Products of 16-bit integers, for CPUs that multiply them faster than floats, and have no fast bfloat16.

`support/integer_maps.py` explains them. A decoder's columns are coefficients, an encoder's are the values of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from cuvee.codec.profiles.section_basis import SectionBasis
from cuvee.codec.stages.compiled.compiler import compiled
from cuvee.codec.stages.compiled.integer_steps import TOKENS, multiply_step, pair_rows, transpose_step
from cuvee.codec.stages.compiled.simd import WIDTH
from cuvee.codec.stages.products import Products
from cuvee.codec.support.arena import Arena
from cuvee.codec.support.arrays import F32
from cuvee.codec.support.integer_maps import BEFORE, MAP, ROWS, SCALE, TERMS, USED, IntegerMaps

_arena = Arena()


@compiled
def _multiply(y, fields, matrix, scale, pairs, units, edge, x):  # type: ignore[no-untyped-def]
    blocks, depth, width = y.shape
    y_, x_, stride = y.reshape(y.size), x.reshape(x.size), x.shape[1]
    spare = np.empty(TOKENS * WIDTH, np.float32)
    for block in range(blocks):
        record = fields[block]
        half = min(record[USED], depth) // 2
        for t in range(0, width, WIDTH):
            if t + WIDTH <= width:
                pair_rows(y_, block * depth * width + t, width, 2 * half, pairs, t * half, units, t)
                continue
            for row in range(2 * half):
                for i in range(width - t):
                    edge[row * WIDTH + i] = y[block, row, t + i]
            pair_rows(edge, 0, WIDTH, 2 * half, pairs, t * half, units, t)
        for value in range(0, record[ROWS], WIDTH):
            tile, size = record[MAP] + value * (record[TERMS] // 2), min(WIDTH, record[ROWS] - value)
            for t in range(0, width, TOKENS):
                at, to, count = (t - t % WIDTH) * half + t % WIDTH, t * stride + record[BEFORE] + value, width - t
                if size == WIDTH and count >= TOKENS:
                    multiply_step(
                        pairs, at, matrix, tile, half, units, t, scale, record[SCALE] + value, x_, to, stride
                    )  # fmt: skip
                    continue
                multiply_step(
                    pairs, at, matrix, tile, half, units, t, scale, record[SCALE] + value, spare, 0, WIDTH
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


@compiled
def _analyze(x, sizes, fields, matrix, scale, ranks, computed, pairs, units, edge, y, first):  # type: ignore[no-untyped-def]
    tokens, stride = len(x), y.shape[1]
    x_, y_, spare = x.reshape(x.size), y.reshape(y.size), np.empty(TOKENS * WIDTH, np.float32)
    before, column, begin = np.int64(0), np.int64(0), np.int64(computed)
    for block in range(len(fields)):
        record, rank, size = fields[block], ranks[block], sizes[block]
        half = record[TERMS] // 2
        for t in range(0, tokens if begin < rank else 0, WIDTH):
            count = min(WIDTH, tokens - t)
            whole = size // WIDTH * WIDTH if count == WIDTH else np.int64(0)
            for term in range(0, whole, WIDTH):
                transpose_step(x_, t * x.shape[1] + column + term, x.shape[1], edge, term * WIDTH)
            for term in range(whole, 2 * half):
                for i in range(WIDTH):
                    edge[term * WIDTH + i] = x[t + i, column + term] if i < count and term < size else np.float32(0)
            pair_rows(edge, 0, WIDTH, 2 * half, pairs, 0, units, 0)
            for row in range(begin - begin % TOKENS, rank, TOKENS):
                of_row, at = row % WIDTH, (before + row) * stride + first + t
                tile = record[MAP] + (row - of_row) * half + of_row
                if begin <= row and row + TOKENS <= rank and count == WIDTH:
                    multiply_step(matrix, tile, pairs, 0, half, scale, record[SCALE] + row, units, 0, y_, at, stride)
                    continue
                multiply_step(matrix, tile, pairs, 0, half, scale, record[SCALE] + row, units, 0, spare, 0, WIDTH)
                for i in range(TOKENS):
                    for k in range(count if begin <= row + i < rank else 0):
                        y_[at + i * stride + k] = spare[i * WIDTH + k]
        before, column, begin = before + rank, column + size, np.int64(0)


def analyze(
    x: torch.Tensor,
    basis: SectionBasis,
    run: slice,
    ranks: Sequence[int],
    products: Products,
    computed: int,
    y: torch.Tensor,
) -> None:
    """Write the coefficients of some columns: `y[: sum(ranks), run]`.

    Args:
        x: `[T, N]` float32, the values of all columns minus their means.
        basis: the section's.
        run: the columns.
        ranks: the number of leading components of each block.
        products: how to multiply.
        computed: this many components of the first block are there, as products of float32: they are the largest. In
            bfloat16 they cost a tenth of the KL at fine steps, because attention sinks are large, and finest of all
            tokens. If none are there, bfloat16 serves no other component either.
        y: `[R, T]` float32.
    """
    if products is not Products.INT16:
        dtype = products.dense if computed else torch.float32
        basis.coefficients(x[run], tuple(ranks), y[: sum(ranks), run], computed, dtype)
        return
    maps = basis.forward_integers
    terms = int(maps.fields[:, TERMS].max())
    _analyze(
        x[run].numpy(), np.array(basis.block_sizes), maps.fields, maps.matrix, maps.scale, np.array(ranks), computed,
        _arena.array("pairs", terms // 2 * WIDTH, np.int32), _arena.array("units", WIDTH, np.float32),
        _arena.array("edge", terms * WIDTH, np.float32), y.numpy(), run.start,
    )  # fmt: skip
