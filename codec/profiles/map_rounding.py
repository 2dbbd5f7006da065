"""Round a linear map to integers so that the rounded one decorrelates as well as it can.

An error in a column leaks its component into all others, as much as the metric of the loss weighs the values in which
the error lies. Values that are cheap in one direction are dear in others. So values are rounded one after the other,
and what one rounding got wrong is made up for in the values that are still to be rounded: in a column with the error e,
e^T H e is kept small, where H is the metric. This is GPTQ's rounding (Frantar et al., 2022, https://arxiv.org/abs/2210.17323).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from cuvee.codec.support.arrays import F32

_BLOCK = 128  # values whose corrections are added up before they reach the others
_JITTER = 1e-9  # of the mean diagonal, added to it: keeps the factorization of nearly singular maps possible

Floats = npt.NDArray[np.float64]


def round_columns(exact: Floats, scale: Floats, limit: Floats) -> F32:
    """Return integers `[n, n]` with which `integers * scale` is closest to the map `exact` in the map's own metric.

    The columns of `exact` are components of equal cost; `scale` and `limit`, the largest magnitude, are `[n]`.
    """
    # Components have the identity as their metric, so that the metric of values is the inverse of this. Few matrices
    # are held at a time: that of a block of all layers takes a gigabyte.
    inverse = torch.from_numpy(exact @ exact.T)
    inverse.diagonal().add_(_JITTER * inverse.diagonal().mean())
    # Most sensitive first, as in GPTQ: later values make up for the errors of earlier ones.
    order = inverse.diagonal().argsort()
    inverse = inverse[order[:, None], order]
    root = torch.linalg.cholesky(inverse, upper=True)
    del inverse
    wanted, largest = torch.from_numpy(exact / scale)[order], torch.from_numpy(limit)
    rounded = torch.empty(wanted.shape, dtype=torch.float32)  # float32 holds them exactly
    for first in range(0, len(wanted), _BLOCK):
        end = min(first + _BLOCK, len(wanted))
        errors = torch.empty_like(wanted[first:end])
        for row in range(first, end):
            rounded[row] = torch.clamp(wanted[row].round(), -largest, largest)
            errors[row - first] = (wanted[row] - rounded[row]) / root[row, row]
            wanted[row + 1 : end] -= torch.outer(root[row, row + 1 : end], errors[row - first])
        wanted[end:] -= root[first:end, end:].T @ errors
    out = torch.empty_like(rounded)
    out[order] = rounded
    integers: F32 = out.numpy()
    return integers
