"""Side information about channels that are coded one by one: the first part of a section of the generic scheme.

    per unit (K un-rotated, then V):
        int16            scale of the unit: its root mean square deviation, 1/64 octaves
        uint16 [C]       mean of each channel, bfloat16
        uint8 [C]        scale code of each channel: quarter octaves above the lowest coded one; 255: not coded
    padding to four bytes

Numbers are little-endian. The coded part of the section follows.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cuvee.codec.entropy.coding_plan import CodingPlan
from cuvee.codec.entropy.family import OCTAVE, coding_plan, scale_codes, scale_index, step_value
from cuvee.codec.errors import FormatError
from cuvee.codec.format.container import Reader

SCALE = struct.Struct("<h")
NOT_CODED = 255
MAX_SCALE = 126 * OCTAVE  # within float32
MAX_CODE = 24 + 4 * 8  # the widest component: see `family.split_wide`


@dataclass(frozen=True, slots=True)
class Channels:
    """A section's side information about its channels.

    Attributes:
        mean: `[N]` float32, exact in bfloat16.
        scale: `[N]` float32, the scale of the channel's unit: a coefficient is (x - mean) / scale.
        code: `[N]` int32 scale code; -1: not coded.
    """

    mean: npt.NDArray[np.float32]
    scale: npt.NDArray[np.float32]
    code: npt.NDArray[np.int32]

    @property
    def live(self) -> npt.NDArray[np.intp]:
        """Numbers of the coded channels, in order: the rows of the coefficients."""
        return np.flatnonzero(self.code >= 0)

    def plan(self) -> CodingPlan:
        """Return the plan of the coded channels."""
        return coding_plan(self.code[self.live])


def write_channels(
    blocks: Sequence[int], mean: npt.NDArray[np.float32], deviation: npt.NDArray[np.float64], step_index: int
) -> tuple[bytes, Channels]:
    """Choose scales and codes, and write the side information of a section.

    Args:
        blocks: values of each unit.
        mean: `[N]` of each channel, exact in bfloat16.
        deviation: `[N]` from that mean.
        step_index: of the relative step.
    """
    side = bytearray()
    scales, codes = np.empty(len(mean), np.float32), np.empty(len(mean), np.int32)
    column = 0
    for size in blocks:
        own = slice(column, column + size)
        unit = np.array([np.linalg.norm(deviation[own]) / size**0.5])
        scale = int(np.clip(scale_index(unit)[0], -MAX_SCALE, MAX_SCALE))
        code = np.minimum(scale_codes(scale_index(deviation[own] / step_value(scale)), step_index), MAX_CODE)
        bits = mean[own].view(np.uint32) >> np.uint32(16)
        side += SCALE.pack(scale) + bits.astype("<u2").tobytes()
        side += np.where(code < 0, NOT_CODED, code).astype(np.uint8).tobytes()
        scales[own], codes[own] = step_value(scale), np.maximum(code, -1)
        column += size
    return bytes(side) + bytes(-len(side) % 4), Channels(mean, scales, codes)


def read_channels(reader: Reader, blocks: Sequence[int], index: int) -> Channels:
    """Read the side information of section `index`.

    Raises:
        FormatError: it ends too early, or holds values that no encoder writes.
    """
    means: list[npt.NDArray[np.float32]] = []
    scales: list[npt.NDArray[np.float32]] = []
    codes: list[npt.NDArray[np.int32]] = []
    for size in blocks:
        (scale,) = reader.unpack(SCALE)
        if abs(scale) > MAX_SCALE:
            raise FormatError(f"section {index}: must have scales of at most {MAX_SCALE}, got {scale}")
        bits = reader.array("u2", size).astype(np.uint32)
        means.append((bits << np.uint32(16)).view(np.float32))
        scales.append(np.full(size, step_value(scale), np.float32))
        codes.append(reader.array("u1", size).astype(np.int32))
    reader.skip_padding()
    mean, code = np.concatenate(means), np.concatenate(codes)
    code[code == NOT_CODED] = -1
    if not np.isfinite(mean).all():
        raise FormatError(f"section {index}: must have finite means, got one that is not")
    if code.max(initial=-1) > MAX_CODE:
        raise FormatError(f"section {index}: must have scale codes of at most {MAX_CODE}, got {code.max()}")
    return Channels(mean, np.concatenate(scales), code)
