"""The order in which the tokens of a tile are coded, compiled: the columns of its planes."""

from __future__ import annotations

import numpy as np
import torch

from cuvee.codec.entropy.token_classes import CLASSES
from cuvee.codec.format.streams import WINDOW
from cuvee.codec.stages.compiled.compiler import compiled
from cuvee.codec.support.arena import SECOND, tile_arena
from cuvee.codec.support.arrays import U8

_NOTHING = np.empty((0, 0), np.float32)


@compiled
def sort_columns(classes, order, columns):  # type: ignore[no-untyped-def]
    """Write `coding_order`, and the class of each column."""
    first = np.empty(CLASSES, np.int64)
    for begin in range(0, len(classes), WINDOW):
        end = min(begin + WINDOW, len(classes))
        first[:] = 0
        for t in range(begin, end):
            first[classes[t]] += 1
        at = begin
        for k in range(CLASSES):
            size = first[k]
            first[k] = at
            at += size
        for t in range(begin, end):
            k = classes[t]
            order[first[k]] = t
            columns[first[k]] = k
            first[k] += 1


@compiled
def _copy_columns(order, x, leading, ordered, y):  # type: ignore[no-untyped-def]
    """Copy the rows of `x` in this order, and then the columns of `leading`: `y` may be the memory of `x`."""
    for column in range(len(order)):
        source, target = x[order[column]], ordered[column]
        for i in range(len(source)):
            target[i] = source[i]
    for row in range(min(len(leading), len(y))):
        for column in range(len(order)):
            y[row, column] = leading[row, order[column]]


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
    tokens = len(classes)
    order, columns = np.empty(tokens, np.intp), np.empty(tokens, np.uint8)
    sort_columns(classes, order, columns)
    values, first_rows = x.numpy(), _NOTHING if leading is None else leading.numpy()
    if tokens and (columns == columns[0]).all():  # in order already, as without a predictor
        y = tile_arena.array(SECOND, rows * tokens, np.float32).reshape(rows, tokens)
        for row in range(min(len(first_rows), rows)):
            y[row] = first_rows[row]
        return columns, x, torch.from_numpy(y)
    ordered = tile_arena.array(SECOND, x.numel(), np.float32).reshape(values.shape)
    y = values.reshape(-1)[: rows * tokens].reshape(rows, tokens)
    _copy_columns(order, values, first_rows, ordered, y)
    return columns, torch.from_numpy(ordered), torch.from_numpy(y)
