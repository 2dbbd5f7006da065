"""`BlockMap`: the linear map of a block, as a profile keeps it: in a third of the bytes that two float32 maps take.

Only the map from coefficients to values is stored, as integers; the map back is its inverse, which is computed when it
is first needed, by an encoder. So rounding costs no accuracy: the two maps are inverses of one another, and the stored
one is merely not quite the best basis.

    inverse[i, j]  =  row_scale[i] * column_scale[j] * integer[i, j]

The integers have 16 bits in wide columns, 4 in faint ones, and 8 in the others. A column is wide if its component is
large, and faint if it is small: its error leaks into all other components, in proportion to its size. On SmolLM2-135M
two fifths of the columns are faint, which makes a profile 10% smaller, and blobs 0.1% larger at equal KL. From three
octaves on, half of the columns would be faint: important tokens code some of these, and blobs take 1 to 2% more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from cuvee.codec.errors import FormatError, ProfileError
from cuvee.codec.profiles.file_arrays import Arrays, read_array
from cuvee.codec.profiles.map_rounding import round_columns
from cuvee.codec.support.arrays import F32, I16
from cuvee.codec.support.lazy import lazy
from cuvee.codec.support.nibbles import LARGEST, pack_nibbles, unpack_nibbles
from cuvee.codec.support.steps import OCTAVE

# A component has a wide column if its deviation, in deviations of the average component, is above n over this. So small
# blocks, which take few bytes either way, have more wide columns than they need.
NARROW_VALUES = 1800
_LARGEST_WIDE, _LARGEST_NARROW = 32767, 127
FAINT_OCTAVES = 4  # a component that is so much smaller than those with wide columns has a faint one
_CLIPS = (2.2, 2.5, 2.8, 3.2, 3.8, 4.6)  # largest numbers of a faint column, in its deviations: the best is taken


@dataclass(frozen=True)
class BlockMap:
    """The map of a block of n values from c coefficients, c = n or 0, of which the first are stored as components.

    Attributes:
        wide: int16 `[n, w]`, the leading columns.
        narrow: int8 `[n, m]`, the next ones.
        faint: int8 `[n, c - w - m]`, the others, -7 … 7.
        row_scale: `[n]` float32.
        column_scale: `[c]` float32.
        rank: r, the number of components that are coded at any step; at most c.
    """

    wide: npt.NDArray[np.int16]
    narrow: npt.NDArray[np.int8]
    faint: npt.NDArray[np.int8]
    row_scale: F32
    column_scale: F32
    rank: int

    @classmethod
    def of(cls, inverse: torch.Tensor, scale: I16) -> BlockMap:
        """Round a map `[n, n]` float64, which can be inverted; `scale` `[r]` has the falling scales of the coded
        components.
        """
        if not len(scale):
            nothing = np.zeros((len(inverse), 0))
            return cls(nothing.astype(np.int16), nothing.astype(np.int8), nothing.astype(np.int8),
                       np.ones(len(inverse), np.float32), np.zeros(0, np.float32), 0)  # fmt: skip
        exact = inverse.double().numpy()
        # Values differ in size by orders of magnitude: those that no loss depends on have the largest entries.
        row_scale: F32 = np.sqrt(np.square(exact).mean(1)).clip(np.finfo(np.float32).tiny).astype(np.float32)
        scaled = exact / row_scale[:, None]
        column_scale: F32 = np.abs(scaled).max(0).clip(np.finfo(np.float32).tiny).astype(np.float32)
        least = OCTAVE * math.log2(len(exact) / NARROW_VALUES)
        first, second = (int((scale >= least - OCTAVE * octaves).sum()) for octaves in (0, FAINT_OCTAVES))
        column_scale[:first] /= _LARGEST_WIDE
        column_scale[first:second] /= _LARGEST_NARROW
        column_scale[second:] = _faint_scale(scaled[:, second:])
        sizes = first, second - first, len(exact) - second
        limit = np.repeat(np.array([_LARGEST_WIDE, _LARGEST_NARROW, LARGEST], np.float64), sizes)
        integers = round_columns(scaled, column_scale.astype(np.float64), limit)
        wide, narrow, faint = np.split(integers, [first, second], axis=1)
        return cls(
            wide.astype(np.int16), narrow.astype(np.int8), faint.astype(np.int8), row_scale, column_scale, len(scale)
        )

    @property
    def size(self) -> int:
        """n: values of the block."""
        return len(self.row_scale)

    @property
    def inverse(self) -> torch.Tensor:
        """float32 `[n, r]`: values of a unit of each component. Recomputed on each access."""
        return self.square()[:, : self.rank].float()

    @lazy
    def forward(self) -> torch.Tensor:
        """float32 `[r, n]`: components of a unit of each value.

        Raises:
            ProfileError: the map has no inverse.
        """
        if not self.rank:
            return torch.empty(0, self.size, dtype=torch.float32)
        try:
            exact: torch.Tensor = torch.linalg.inv(self.square())
        except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
            raise ProfileError("profile: must hold bases that can be inverted, got a singular one") from error
        if not bool(torch.isfinite(exact).all()):
            raise ProfileError("profile: must hold bases that can be inverted, got one that overflows")
        return exact[: self.rank].float().contiguous()

    @lazy
    def forward_bfloat16(self) -> torch.Tensor:
        """`forward` in bfloat16."""
        return self.forward.bfloat16()

    def arrays(self) -> dict[str, npt.NDArray[np.generic]]:
        """Return the arrays of a profile's file; `read_block_map` is the inverse."""
        return {
            "wide": self.wide, "narrow": self.narrow, "faint": pack_nibbles(self.faint), "row_scale": self.row_scale,
            "column_scale": self.column_scale,
        }  # fmt: skip

    def square(self) -> torch.Tensor:
        """Return the map from all components, coded or not, float64 `[n, c]`."""
        integers = np.concatenate([self.wide, self.narrow, self.faint], axis=1, dtype=np.float64)
        integers *= self.column_scale
        integers *= self.row_scale[:, None]
        return torch.from_numpy(integers)


def read_block_map(prefix: str, block: int, size: int, rank: int, arrays: Arrays) -> BlockMap:
    """Return the map of `size` values and `rank` components in the arrays `PREFIX.*.BLOCK` of a profile's file."""
    if not 0 <= rank <= size:
        raise FormatError(f"{prefix}.ranks: must be 0 … {size} for block {block}, got {rank}")
    count = size if rank else 0
    wide = read_array(arrays, f"{prefix}.wide.{block}", np.int16, size, None)
    narrow = read_array(arrays, f"{prefix}.narrow.{block}", np.int8, size, None)
    others = count - wide.shape[1] - narrow.shape[1]
    if others < 0:
        raise FormatError(f"{prefix}.wide.{block}: must have at most {count} columns with the narrow ones")
    faint = read_array(arrays, f"{prefix}.faint.{block}", np.uint8, size, (others + 1) // 2)
    row_scale = read_array(arrays, f"{prefix}.row_scale.{block}", np.float32, size)
    column_scale = read_array(arrays, f"{prefix}.column_scale.{block}", np.float32, count)
    for name, scale in (("row_scale", row_scale), ("column_scale", column_scale)):
        if not (scale > 0).all():
            raise FormatError(f"{prefix}.{name}.{block}: must be above zero and finite")
    if count and float(row_scale.max()) * float(column_scale.max()) * _LARGEST_WIDE > float(np.finfo(np.float32).max):
        raise FormatError(f"{prefix}.row_scale.{block}: must be small enough that the map fits float32")
    return BlockMap(
        wide, narrow, unpack_nibbles(f"{prefix}.faint.{block}", faint, others), row_scale, column_scale, rank
    )


def _faint_scale(columns: npt.NDArray[np.float64]) -> F32:
    """Return the scale of each column with which its numbers, as integers -7 … 7, are closest to it."""
    deviation = np.sqrt(np.square(columns).mean(0))
    best, least = np.ones(columns.shape[1], np.float32), np.full(columns.shape[1], np.inf)
    for clip in _CLIPS:
        scale = (deviation * clip / LARGEST).clip(np.finfo(np.float32).tiny).astype(np.float32)
        error = np.square(np.rint(columns / scale).clip(-LARGEST, LARGEST) * scale - columns).sum(0)
        best, least = np.where(error < least, scale, best), np.minimum(error, least)
    return best
