"""Values to coefficients and back, as dense products."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, cast

import numpy as np
import torch

from cuvee.codec.profiles.section_basis import InverseMaps, SectionBasis
from cuvee.codec.stages.columns import class_runs, padded
from cuvee.codec.stages.dense_product import stacked_rows
from cuvee.codec.stages.products import PRODUCT_COLUMNS, PRODUCT_DEPTH, Products
from cuvee.codec.support.arrays import F32, U8
from cuvee.codec.support.integer_maps import LONGEST


class MixedInverse(NamedTuple):
    """The inverse maps of one block: bfloat16 `[L, n]` of the first components, and float32 of the others."""

    leading: torch.Tensor
    others: torch.Tensor


def product_runs(columns: U8, class_ranks: Sequence[tuple[int, ...]]) -> Iterator[tuple[slice, tuple[int, ...]]]:
    """See `cuvee.codec.stages.compiled.product.product_runs`."""
    if len(class_ranks[0]) > 1:
        for run, k in class_runs(columns):
            yield run, class_ranks[k]
        return
    depths = [class_ranks[k][0] for k in columns.tolist()]
    start = 0
    while start < len(depths):
        stop = start + 1
        while stop < len(depths):
            # Columns are sorted within windows: the next window's begin anew with the finest.
            ends = not PRODUCT_DEPTH * depths[start] <= depths[stop] <= depths[start]
            if ends and (stop - start) % PRODUCT_COLUMNS == 0:
                break
            stop += 1
        yield slice(start, stop), (max(depths[start:stop]),)
        start = stop


def analyze(
    x: torch.Tensor,
    basis: SectionBasis,
    run: slice,
    ranks: Sequence[int],
    products: Products,
    computed: int,
    y: torch.Tensor,
) -> None:
    """See `cuvee.codec.stages.compiled.integer_product.analyze`."""
    if products is not Products.INT16:
        dtype = products.dense if computed else torch.float32
        basis.coefficients(x[run], tuple(ranks), y[: sum(ranks), run], computed, dtype)
        return
    maps, row, column = basis.forward_integers, 0, 0
    for (terms, rows, at, first, *_), size, rank in zip(maps.fields.tolist(), basis.block_sizes, ranks, strict=True):
        own = x[run, column : column + size].numpy().T
        squares = np.zeros(own.shape[1], np.float32)
        for values in own:
            squares += values * values
        norm = np.sqrt(squares)
        sound = (squares > 0) & (squares < np.inf)
        factor = np.divide(np.float32(LONGEST), norm, out=np.zeros_like(norm), where=sound)
        integers = np.rint(own * factor).astype(np.float64)
        tiles = maps.matrix[at:].view(np.int16)[: -(-rows // 16) * 16 * terms].reshape(-1, terms // 2, 16, 2)
        matrix = tiles.transpose(0, 2, 1, 3).reshape(-1, terms)[computed:rank, :size].astype(np.float64)
        scale = maps.scale[first + computed : first + rank, None] * (norm / np.float32(LONGEST))
        y[row + computed : row + rank, run] = torch.from_numpy((matrix @ integers).astype(np.float32) * scale)
        row, column, computed = row + rank, column + size, 0


def prepare_inverse(
    maps: InverseMaps, rank: int, products: Products, shares: Sequence[F32]
) -> tuple[torch.Tensor, ...] | tuple[MixedInverse, ...]:
    """See `cuvee.codec.stages.compiled.product.prepare_inverse`."""
    rows = padded(rank)
    leading = [products.leading_rows(share, rows) if products is Products.MIXED else 0 for share in shares]
    if min(leading) == rows > 0:
        return stacked_rows(maps, rows, torch.bfloat16)
    stacked = stacked_rows(maps, rows, products.coefficients)
    if not any(leading):
        return stacked
    blocks = [matrix for alike in stacked for matrix in alike]
    narrow = [matrix for alike in stacked_rows(maps, rows, torch.bfloat16) for matrix in alike]
    return tuple(
        MixedInverse(low[:first], own[first:]) for low, own, first in zip(narrow, blocks, leading, strict=True)
    )


def synthesize(
    y: torch.Tensor,
    inverse: Sequence[torch.Tensor] | Sequence[MixedInverse],
    runs: Iterable[tuple[slice, Sequence[int]]],
    out: torch.Tensor,
) -> torch.Tensor:
    """See `cuvee.codec.stages.compiled.product.synthesize`."""
    depth, width = y.shape[1:]
    if isinstance(inverse[0], MixedInverse):
        values = []
        for own, block in zip(y, cast("Sequence[MixedInverse]", inverse), strict=True):
            first = min(len(block.leading), depth)
            dense = torch.mm(own[:first].T.bfloat16(), block.leading[:first]).float()
            values.append(dense + own[first:].T @ block.others[: depth - first])
        return torch.cat(values, 1, out=out.view(width, -1))
    stacked = cast("Sequence[torch.Tensor]", inverse)
    y = y.to(stacked[0].dtype)
    out = out.view(y.dtype)[: out.numel()]
    if y.dtype == torch.bfloat16 and len(stacked) == 1:
        return torch.bmm(y.mT, stacked[0][:, :depth], out=out.view(len(y), width, -1))
    x = out.view(width, -1)
    matrices = [matrix for alike in stacked for matrix in alike]
    for run, rows in runs:
        column = 0
        for own, matrix, depth in zip(y, matrices, rows, strict=True):
            size = matrix.shape[1]
            torch.mm(own[:depth, run].T, matrix[:depth], out=x[run, column : column + size])
            column += size
    return x
