"""Arrays of a profile's file, which is not trusted.

What reads them raises FormatError for an array that breaks a rule, and KeyError for one that is missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from cuvee.codec.errors import FormatError

Arrays = Mapping[str, npt.NDArray[Any]]


def read_array(arrays: Arrays, name: str, dtype: type[np.generic], *shape: int | None) -> npt.NDArray[Any]:
    """Return an array of a dtype and shape, None for a dimension of any size; numbers are finite."""
    array = arrays[name]
    fits = array.dtype == dtype and array.ndim == len(shape)
    if not fits or any(want not in (None, have) for have, want in zip(array.shape, shape, strict=True)):
        raise FormatError(f"{name}: has the wrong shape or dtype")
    if issubclass(dtype, np.floating) and not np.isfinite(array).all():
        raise FormatError(f"{name}: is not finite")
    return array
