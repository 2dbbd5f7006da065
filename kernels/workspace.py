"""Scratch on the device: how work is cut into batches that fit, and where in it each job has its arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from cuvee.kernels.jobs import I64, JobField, PlanField
from cuvee.kernels.upload import ALIGNMENT


def batches(weights: Sequence[int], limit: int, most: int) -> Iterator[slice]:
    """Runs of at most `most` items that together weigh at most `limit`, or of one item."""
    start = total = 0
    for index, weight in enumerate(weights):
        if index > start and (total + weight > limit or index - start == most):
            yield slice(start, index)
            start, total = index, 0
        total += weight
    if len(weights) > start:
        yield slice(start, len(weights))


def place_jobs(jobs: I64, plans: I64) -> tuple[int, int]:
    """Give every job its place among the byte planes and the coefficients.

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
    """Where pieces of these sizes begin if they lie in a row, each rounded up to `alignment`; and their total."""
    rounded = -(-sizes.astype(np.int64) // alignment) * alignment
    ends = np.cumsum(rounded)
    return ends - rounded, int(ends[-1]) if len(ends) else 0


def zeros(count: int, size: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Several int32 arrays of zeros, cleared at once, each as well aligned as an allocation of its own."""
    padded = -(-size // ALIGNMENT) * ALIGNMENT
    return torch.zeros(count, padded, dtype=torch.int32, device=device)[:, :size].unbind(0)
