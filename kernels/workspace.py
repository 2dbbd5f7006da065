"""Scratch memory on the device: batches that fit into it, and the place of each job's arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from cuvee.kernels.jobs import I64, JobField, PlanField
from cuvee.kernels.upload import ALIGNMENT


def batches(weights: Sequence[int], limit: int, most: int) -> Iterator[slice]:
    """Yield runs of at most `most` items whose weights add up to at most `limit`, or of one item."""
    start = total = 0
    for index, weight in enumerate(weights):
        if index > start and (total + weight > limit or index - start == most):
            yield slice(start, index)
            start, total = index, 0
        total += weight
    if len(weights) > start:
        yield slice(start, len(weights))


def place_jobs(jobs: I64, plans: I64) -> tuple[int, int]:
    """Assign every job a place among the byte planes and the coefficients.

    Args:
        jobs: `[J, len(JobField)]` with PLAN and TOKENS; PLANES, LEVELS and STRIDE are written.
        plans: `[Q, len(PlanField)]`.

    Returns:
        the sizes of the planes (bytes) and of the coefficients (elements).
    """
    plan = plans[jobs[:, JobField.PLAN]]
    tokens = jobs[:, JobField.TOKENS]
    stride = -(-tokens // ALIGNMENT) * ALIGNMENT
    jobs[:, JobField.STRIDE] = stride
    jobs[:, JobField.PLANES], planes = running_offsets(plan[:, PlanField.PLANES] * tokens, ALIGNMENT)
    jobs[:, JobField.LEVELS], coefficients = running_offsets(plan[:, PlanField.EXTENT] * stride, ALIGNMENT)
    return planes, coefficients


def running_offsets(sizes: npt.NDArray[np.integer], alignment: int = 1) -> tuple[I64, int]:
    """Return the offsets of consecutive pieces of these sizes, each rounded up to `alignment`, and the total."""
    rounded = -(-sizes.astype(np.int64) // alignment) * alignment
    ends = np.cumsum(rounded)
    return ends - rounded, int(ends[-1]) if len(ends) else 0


def zeros(count: int, size: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return several int32 arrays of zeros, cleared at once, each aligned like a separate allocation."""
    padded = -(-size // ALIGNMENT) * ALIGNMENT
    return torch.zeros(count, padded, dtype=torch.int32, device=device)[:, :size].unbind(0)
