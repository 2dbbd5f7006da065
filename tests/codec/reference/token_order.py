"""The order in which the tokens of a tile are coded: the columns of its planes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from cuvee.codec.format.streams import windows
from cuvee.codec.support.arrays import U8


def coding_order(classes: U8) -> npt.NDArray[np.intp]:
    """Return the token of each column, `[T]`, given the classes of T tokens that begin with a window."""
    order = np.empty(len(classes), np.intp)
    for at in windows(0, len(classes)):
        order[at] = at.start + np.argsort(classes[at], kind="stable")
    return order


def arrange(
    classes: U8, x: torch.Tensor, leading: torch.Tensor | None, rows: int
) -> tuple[U8, torch.Tensor, torch.Tensor]:
    """Bring the tokens of a tile into the order in which they are coded.

    Args:
        classes: `[t]` uint8.
        x: `[t, N]` float32, their values. This memory may be used for the results.
        leading: `[K, t]` float32, their first coefficients if these are known; None otherwise.
        rows: R, at most N, the number of coefficients to make room for.

    Returns:
        the classes of the columns; their values `[t, N]`; and room for their coefficients `[R, t]`, whose first
        min(K, R) rows hold the known ones. They are valid until the thread gathers its next tile.
    """
    by_class = coding_order(classes)
    order = torch.from_numpy(by_class)
    y = torch.empty(rows, len(classes), dtype=torch.float32)
    if leading is not None:
        known = min(len(leading), rows)
        y[:known] = leading[:known, order]
    return classes[by_class], x[order], y
