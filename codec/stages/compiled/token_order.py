"""The order of the columns, compiled: the results of `reference/token_order.py`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cuvee.codec.entropy.token_classes import CLASSES, WINDOW
from cuvee.codec.stages.compiled.compiler import compiled
from cuvee.codec.support.arrays import U8

ABSENT = 1  # the class of a column without a token, if tokens have no classes


@compiled
def sort_columns(classes, order, columns):  # type: ignore[no-untyped-def]
    """Write `coding_order`, and the class of each column."""
    first = np.empty(CLASSES, np.int64)
    for begin in range(0, len(classes), WINDOW):
        end = min(begin + WINDOW, len(classes))
        first[:] = 0
        for t in range(begin, end):
            first[classes[t]] += 1
        place = begin
        for k in range(CLASSES):
            size = first[k]
            first[k] = place
            place += size
        for t in range(begin, end):
            k = classes[t]
            order[first[k]] = t
            columns[first[k]] = k
            first[k] += 1


def coding_order(classes: U8) -> npt.NDArray[np.intp]:
    """See `cuvee.codec.entropy.token_classes.coding_order`."""
    order = np.empty(len(classes), np.intp)
    sort_columns(classes, order, np.empty(len(classes), np.uint8))
    return order


@compiled
def deal(tokens, per_stream, order, columns):  # type: ignore[no-untyped-def]
    """Write `reference.token_order.dealt_order`, and a class for each column; return how many columns there are.

    The class is 0 for a token, and `ABSENT` for a column without one.
    """
    column = 0
    for j in range(per_stream):
        for begin in range(0, tokens, per_stream):
            there = begin + j < tokens
            order[column] = begin + j if there else -1
            columns[column] = 0 if there else ABSENT
            column += 1
    return column
