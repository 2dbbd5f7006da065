"""Coefficients to values: the inverse of `SectionBasis.coefficients`, as dense products."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from cuvee.codec.stages.products import Products
from cuvee.codec.stages.reference.sections import padded
from cuvee.codec.support.arrays import F32


def prepare_inverse(
    matrices: Sequence[torch.Tensor], rank: int, products: Products, shares: Sequence[F32]
) -> tuple[torch.Tensor, ...]:
    """Return a section's inverse maps as `synthesize` takes them.

    Args:
        matrices: `SectionBasis.inverse`: for each block, float32 `[n, components]`.
        rank: the most components of a block that are ever used.
        products: how to multiply. Here MIXED is FLOAT32.
        shares: for each block and component the expected share of coefficients that are not zero. Here nothing depends
            on it.

    Returns:
        the transposed maps, padded with zeros to a common number of rows; equal blocks are stacked: `[b, rows, n]`.
    """
    rows = padded(rank)
    runs: list[list[torch.Tensor]] = []
    for matrix in matrices:
        used = min(matrix.shape[1], rows)
        turned = torch.zeros(rows, matrix.shape[0], dtype=products.coefficients)
        turned[:used] = matrix[:, :used].T
        if not runs or runs[-1][0].shape != turned.shape:
            runs.append([])
        runs[-1].append(turned)
    return tuple(torch.stack(run) for run in runs)


def synthesize(
    y: torch.Tensor,
    inverse: Sequence[torch.Tensor],
    runs: Iterable[tuple[slice, Sequence[int]]],
    out: torch.Tensor,
) -> torch.Tensor:
    """Turn coefficients into values. All tensors have one dtype.

    Args:
        y: `[B, pad, t]`, each block's leading components, then zeros.
        inverse: the result of `prepare_inverse`.
        runs: columns of each product, and the rows of each block that it needs. In bfloat16, which only CPUs with
            matrix instructions use, one product serves all columns of equal blocks, because a call costs as much as it
            would save.
        out: `[t N]`, receives the values.

    Returns:
        `[t, N]`, or `[B, t, N / B]` if one product took all blocks: a view of `out`.
    """
    width = y.shape[2]
    if y.dtype == torch.bfloat16 and len(inverse) == 1:
        return torch.bmm(y.mT, inverse[0][:, : y.shape[1]], out=out.view(len(y), width, -1))
    x = out.view(width, -1)
    matrices = [matrix for alike in inverse for matrix in alike]
    for run, rows in runs:
        column = 0
        for own, matrix, depth in zip(y, matrices, rows, strict=True):
            size = matrix.shape[1]
            torch.mm(own[:depth, run].T, matrix[:depth], out=x[run, column : column + size])
            column += size
    return x
