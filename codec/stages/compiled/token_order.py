"""The order of the columns for the CPU, compiled: the results of `reference/token_order.py`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cuvee.codec.entropy.token_classes import CLASSES, WINDOW
from cuvee.codec.stages.compiled.compiler import compiled
from cuvee.codec.support.arrays import U8


@compiled
def sort_columns(classes, order, columns):  # type: ignore[no-untyped-def]
    """`classes.coding_order`, and the class of each column."""
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
