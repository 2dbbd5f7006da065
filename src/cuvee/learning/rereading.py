"""Text whose end repeats a part of its beginning, and what two texts share."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from cuvee.codec.errors import InputError

SEED = 7
_SHARED = 32  # tokens in a row that two texts share if one was cut from the other


def reread(tokens: Tensor, prefix: int = 384, seed: int = SEED) -> Tensor:
    """Make the end of rows 0, 2, 4 … repeat a random span of their first `prefix` tokens.

    The span starts at s, uniform in [0, prefix - tail - 1) with tail = T - prefix, so it ends at least two tokens
    before the tail begins: to copy it, the model always has to look back farther than the last token.

    Args:
        tokens: integer [N, T]; left unchanged.
        prefix: cached tokens per row, at least T - prefix + 2 and less than T.
        seed: seed of the draws of s, one per even row in order; the same on every device.

    Returns:
        int64 [N, T].

    Raises:
        InputError: `tokens` is not an integer matrix, or `prefix` leaves no tail or no room to draw s.
    """
    if tokens.ndim != 2 or tokens.dtype.is_floating_point or tokens.dtype.is_complex or tokens.dtype == torch.bool:
        raise InputError(f"tokens: must be a matrix of integers, got {tokens.dtype} of shape {tuple(tokens.shape)}")
    length = tokens.shape[1]
    tail = length - prefix
    starts = prefix - tail - 1
    if tail < 1 or starts < 1:
        allowed = f"[{(length + 3) // 2}, {length - 1}]"
        raise InputError(f"prefix: must lie in {allowed} for rows of {length} tokens, got {prefix}")
    result = tokens.to(torch.long, copy=True)
    generator = torch.Generator().manual_seed(seed)
    for row in result[::2]:
        start = int(torch.randint(starts, (), generator=generator))
        row[prefix:] = row[start : start + tail]
    return result


def without_shared(rows: Tensor, others: Collection[Tensor]) -> Tensor:
    """Leave out the rows `[N, T]` that share a run of 32 tokens, or all of a shorter row, with a row of the others.

    Runs of a row are looked up 32 tokens apart, among those of the others at every place: a common run of 63 tokens is
    always found, wherever rows were cut.
    """
    size = min([_SHARED, rows.shape[1], *(other.shape[1] for other in others)])
    other_runs = {
        run.numpy().tobytes() for other in others for run in other.cpu().long().unfold(1, size, 1).reshape(-1, size)
    }
    runs = rows.cpu().long().unfold(1, size, size)
    kept = [all(run.numpy().tobytes() not in other_runs for run in row) for row in runs]
    return rows[torch.tensor(kept, dtype=torch.bool)]
