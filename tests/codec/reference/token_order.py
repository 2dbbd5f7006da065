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
    """See `cuvee.codec.stages.compiled.token_order.arrange`."""
    by_class = coding_order(classes)
    order = torch.from_numpy(by_class)
    y = torch.empty(rows, len(classes), dtype=torch.float32)
    if leading is not None:
        known = min(len(leading), rows)
        y[:known] = leading[:known, order]
    return classes[by_class], x[order], y
