"""How components are coded at one step: quantizer, tables, and values that tables cannot code."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cuvee.codec.errors import FormatError, InputError
from cuvee.codec.support.arrays import F32, U8, U16

ESCAPE = 0x80  # the byte of -128: never a value, so that values are the int8 range -127 … 127
MAX_SHIFT = 8
MAX_LEVEL = 1 << 24  # float32 holds no larger integers exactly


@dataclass(frozen=True, slots=True)
class Quantizer:
    """A dead-zone quantizer whose thresholds and reconstruction points depend on the component's table.

    A magnitude `a` (in steps) becomes 0 below `dead_zone`, else `floor(a + rounding)`. A level m > 0 is reconstructed
    as `m - shrink[:, min(m, 2) - 1]`. Rate-distortion optimized quantization switches between levels at the thresholds,
    and the shrinkage gives the measured centroid (see `family.fit_family`). All arrays are indexed by table.
    """

    dead_zone: F32
    rounding: F32
    shrink: F32  # [tables, 2]

    def __post_init__(self) -> None:
        tables = len(self.dead_zone) if self.dead_zone.ndim else -1
        # The arrays come from a profile's file, and compiled loops index them without checking their size.
        for name, array, shape, least in (
            ("dead_zone", self.dead_zone, (tables,), 0.0),
            ("rounding", self.rounding, (tables,), 0.0),
            ("shrink", self.shrink, (tables, 2), -2.0),
        ):
            if array.shape != shape or array.dtype != np.float32:
                raise FormatError(
                    f"quantizer.{name}: must be float32 {list(shape)}, got {array.dtype} {list(array.shape)}"
                )
            if not np.all((array >= least) & (array <= 2.0)):  # NaN fails this, too
                raise FormatError(
                    f"quantizer.{name}: must lie within {least:g} … 2, got {array.min():g} … {array.max():g}"
                )


@dataclass(frozen=True, slots=True)
class CodingPlan:
    """How the components of one section are coded at one step: all that the integer stages need.

    Attributes:
        level_table: `[R]` uint16, index into the quantizer's arrays.
        shift: `[R]` uint8, number of low bits in a plane of their own, 0 … 8.
        tables: `[R + W]` uint16, entropy table of each plane.
    """

    level_table: U16
    shift: U8
    tables: U16

    @property
    def wide(self) -> npt.NDArray[np.intp]:
        """Numbers of the rows with a plane of low bits, in plane order."""
        return np.flatnonzero(self.shift)

    @property
    def planes(self) -> int:
        """Number of byte planes: R + W."""
        return len(self.tables)


def too_large_error(steps: float) -> InputError:
    """Return the error about a chunk whose largest coefficient is this many steps large."""
    return InputError(
        f"cache: must hold values below {MAX_LEVEL} quantizer steps, got {steps:.3g} quantizer steps: encode it with "
        "quality='lossless'"
    )
