"""Scratch memory on the device: the place of each job's arrays."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from cuvee.kernels.jobs import I64
from cuvee.kernels.upload import ALIGNMENT


def plane_offsets(planes: I64, tokens: I64) -> tuple[I64, int]:
    """Return where the byte planes of each job begin, and their size in all, given their numbers."""
    return running_offsets(planes * tokens, ALIGNMENT)


def coefficient_offsets(extents: I64, tokens: I64) -> tuple[I64, I64, int]:
    """Return where the coefficients of each job begin, the strides of their rows, and their number in all."""
    stride = -(-tokens // ALIGNMENT) * ALIGNMENT
    at, total = running_offsets(extents * stride, ALIGNMENT)
    return at, stride, total


def running_offsets(sizes: npt.NDArray[np.integer], alignment: int = 1) -> tuple[I64, int]:
    """Return the offsets of consecutive pieces of these sizes, each rounded up to `alignment`, and the total."""
    rounded = -(-sizes.astype(np.int64) // alignment) * alignment
    ends = np.cumsum(rounded)
    return ends - rounded, int(ends[-1]) if len(ends) else 0


def zeros(count: int, size: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return several int32 arrays of zeros, cleared at once, each aligned like a separate allocation."""
    padded = -(-size // ALIGNMENT) * ALIGNMENT
    return torch.zeros(count, padded, dtype=torch.int32, device=device)[:, :size].unbind(0)
