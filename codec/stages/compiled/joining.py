"""The sections of a blob as one array, for loops that take many sections at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cuvee.codec.support.arrays import I64


def joined(sections: Sequence[memoryview]) -> tuple[npt.NDArray[np.uint8], I64]:
    """Return bytes that hold all sections, and int64 `[S, 2]`, where each begins and ends.

    Nothing is copied if all sections are parts of one object's memory, as those of a blob are.
    """
    sizes = np.array([len(section) for section in sections], np.int64)
    spans = np.empty((len(sections), 2), np.int64)
    owner = memoryview(sections[0].obj)
    if sizes.min() and owner.c_contiguous and all(section.obj is owner.obj for section in sections):
        whole = np.frombuffer(owner, np.uint8)
        spans[:, 0] = [np.frombuffer(section, np.uint8).ctypes.data for section in sections]
        spans[:, 0] -= whole.ctypes.data
        spans[:, 1] = spans[:, 0] + sizes
        return whole, spans
    np.cumsum(sizes, out=spans[:, 1])
    spans[:, 0] = spans[:, 1] - sizes
    return np.frombuffer(b"".join(sections), np.uint8), spans
