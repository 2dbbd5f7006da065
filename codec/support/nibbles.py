"""Numbers of four bits, two per byte."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cuvee.codec.errors import FormatError
from cuvee.codec.support.arrays import U8

LARGEST = 7  # magnitude of a number
_OFFSET = 8


def pack_nibbles(numbers: npt.NDArray[np.int8]) -> U8:
    """Return numbers -7 … 7, `[N, K]`, plus 8, two per byte, the first in the low bits: `[N, ceil(K / 2)]`."""
    shifted = (numbers + _OFFSET).astype(np.uint8)
    padded = np.pad(shifted, ((0, 0), (0, shifted.shape[1] % 2)), constant_values=_OFFSET)
    packed: U8 = (padded[:, ::2] | padded[:, 1::2] << 4).astype(np.uint8)
    return packed


def unpack_nibbles(name: str, packed: U8, count: int) -> npt.NDArray[np.int8]:
    """Return the `[N, count]` numbers of `pack_nibbles`.

    Raises:
        FormatError: `packed`, which the error calls `name`, holds something that `pack_nibbles` does not make.
    """
    wide = np.empty((len(packed), 2 * packed.shape[1]), np.int8)
    wide[:, ::2], wide[:, 1::2] = packed & 15, packed >> 4
    wide -= _OFFSET
    if wide.min(initial=0) < -LARGEST:
        raise FormatError(f"{name}: must be -{LARGEST} … {LARGEST}, got {wide.min()}")
    if wide[:, count:].any():
        raise FormatError(f"{name}: must end with a zero if its numbers are odd in number, got {wide[:, count:].max()}")
    return np.ascontiguousarray(wide[:, :count])
