"""Dense products of bfloat16, which only CPUs that multiply it fast use; and the transposed maps of all products."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from cuvee.codec.profiles.section_basis import InverseMaps
from cuvee.codec.stages.columns import padded


def stacked_rows(maps: InverseMaps, rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return the leading rows of transposed maps of a dtype; adjacent blocks of a size share a tensor."""
    return tuple(alike[:, :rows] for alike in maps.form(dtype, lambda matrices: _stack_blocks(matrices, dtype)))


def most_rows(matrices: Sequence[torch.Tensor]) -> int:
    """Return how many rows the transposed maps of some blocks have, with zeros behind a block's own."""
    return padded(max((matrix.shape[1] for matrix in matrices), default=0))


def _stack_blocks(matrices: Sequence[torch.Tensor], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    rows = most_rows(matrices)
    runs: list[list[torch.Tensor]] = []
    for matrix in matrices:
        turned = torch.zeros(rows, matrix.shape[0], dtype=dtype)
        turned[: matrix.shape[1]] = matrix.T
        if not runs or runs[-1][0].shape != turned.shape:
            runs.append([])
        runs[-1].append(turned)
    return tuple(torch.stack(run) for run in runs)


def multiply(
    y: torch.Tensor, stacked: Sequence[torch.Tensor], runs: Iterable[tuple[slice, Sequence[int]]], out: torch.Tensor
) -> torch.Tensor:
    """Turn coefficients `[B, pad, t]` into values with `stacked_rows` of bfloat16; else as `synthesize`.

    One product serves all columns of equal blocks, because a call costs as much as it would save.
    """
    _, depth, width = y.shape
    y, out = y.bfloat16(), out.view(torch.bfloat16)[: out.numel()]
    if len(stacked) == 1:
        return torch.bmm(y.mT, stacked[0][:, :depth], out=out.view(len(y), width, -1))
    x = out.view(width, -1)
    matrices = [matrix for alike in stacked for matrix in alike]
    for run, rows in runs:
        column = 0
        for block_y, matrix, used in zip(y, matrices, rows, strict=True):
            size = matrix.shape[1]
            torch.mm(block_y[:used, run].T, matrix[:used], out=x[run, column : column + size])
            column += size
    return x
