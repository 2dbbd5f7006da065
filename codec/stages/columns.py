"""Columns: the tokens of a tile in the order in which they are coded, and their decoded coefficients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from cuvee.codec.support.arrays import I64, U8

# The rows of a block are a multiple of this: matrix instructions take this many at a time, and products of few shapes
# are prepared once.
ROW_MULTIPLE = 32


@dataclass(frozen=True, slots=True)
class Coefficients:
    """A decoded tile of a section.

    Attributes:
        order: `[t]`, the token of each column, counted from the tile's first token.
        classes: `[t]` uint8, the class of each column.
        y: `[blocks, pad, t]`; zero below a column's last component. Valid until the thread decodes its next tile.
    """

    order: I64
    classes: U8
    y: torch.Tensor


def padded(rank: int) -> int:
    """Return the rows of a block whose deepest column has `rank` components."""
    return -(-rank // ROW_MULTIPLE) * ROW_MULTIPLE


def class_runs(columns: U8) -> Iterator[tuple[slice, int]]:
    """Yield the runs of adjacent columns of one class, each with its class."""
    edges = [0, *(np.flatnonzero(np.diff(columns)) + 1).tolist(), len(columns)]
    for start, stop in pairwise(edges):
        if start < stop:
            yield slice(start, stop), int(columns[start])
