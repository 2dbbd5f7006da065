"""Shapes for oneDNN, which multiplies bfloat16 and int8 for torch on CPUs.

It compiles a kernel for each shape that it has not seen lately, which takes as long as a third of a product does. So
what has other sizes in every chunk is rounded up, and few shapes are left.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

SHAPE_MULTIPLE = 32


def pad_rows(x: torch.Tensor) -> torch.Tensor:
    """Return a matrix with zeros in further rows, up to a multiple of `SHAPE_MULTIPLE`."""
    return pad(x, (0, 0, 0, -len(x) % SHAPE_MULTIPLE))
