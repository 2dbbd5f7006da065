"""The scheme without learned data: per-chunk means and scales of every channel, one relative step.

A section is one layer:

    per unit (K un-rotated, then V):
        int16            scale of the unit: its root mean square deviation, 1/64 octaves
        uint16 [C]       mean of each channel, bfloat16
        uint8 [C]        scale code of each channel: quarter octaves above the lowest coded one; 255: not coded
    padding to four bytes, then the coded coefficients of all coded channels (K, then V)

Coefficients are (x - mean) / unit scale; the blob's step is relative to that.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from cuvee.codec.backends import DecodeRequest
from cuvee.codec.chunk import KVChunk
from cuvee.codec.entropy.coding_plan import CodingPlan
from cuvee.codec.entropy.coefficients import CoefficientCoder
from cuvee.codec.entropy.family import OCTAVE, Family, coding_plan, scale_codes, scale_index, step_value
from cuvee.codec.errors import FormatError
from cuvee.codec.format.container import Reader
from cuvee.codec.layout import KVLayout
from cuvee.codec.profiles.sections import Section, partition, tile_tokens, tiles
from cuvee.codec.schemes import overlap
from cuvee.codec.stages.implementations import Stages
from cuvee.codec.stages.reference.transform import gather, require_finite
from cuvee.codec.stages.rotation import Rotation
from cuvee.codec.stages.rows import Rows
from cuvee.codec.support.arrays import F32

_SCALE = struct.Struct("<h")
_DEAD = 255
_MAX_SCALE = 126 * OCTAVE  # within float32
_MAX_CODE = 24 + 4 * 8  # the widest component: see `family.split_wide`


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
        scale = int(np.clip(scale_index(unit)[0], -_MAX_SCALE, _MAX_SCALE))
        code = np.minimum(scale_codes(scale_index(deviation[own] / step_value(scale)), step_index), _MAX_CODE)
        bits = mean[own].view(np.uint32) >> np.uint32(16)
        side += _SCALE.pack(scale) + bits.astype("<u2").tobytes()
        side += np.where(code < 0, _DEAD, code).astype(np.uint8).tobytes()
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
        (scale,) = reader.unpack(_SCALE)
        if abs(scale) > _MAX_SCALE:
            raise FormatError(f"section {index}: must have scales of at most {_MAX_SCALE}, got {scale}")
        bits = reader.array("u2", size).astype(np.uint32)
        means.append((bits << np.uint32(16)).view(np.float32))
        scales.append(np.full(size, step_value(scale), np.float32))
        codes.append(reader.array("u1", size).astype(np.int32))
    reader.skip_padding()
    mean, code = np.concatenate(means), np.concatenate(codes)
    code[code == _DEAD] = -1
    if not np.isfinite(mean).all():
        raise FormatError(f"section {index}: must have finite means, got one that is not")
    if code.max(initial=-1) > _MAX_CODE:
        raise FormatError(f"section {index}: must have scale codes of at most {_MAX_CODE}, got {code.max()}")
    return Channels(mean, np.concatenate(scales), code)


class GenericScheme:
    """Codes sections of any model at one relative step."""

    def __init__(self, layout: KVLayout, family: Family, step_index: int, stages: Stages) -> None:
        self._sections = partition(layout, "unit")
        self._step_index = step_index
        self._coder = CoefficientCoder(stages, family, step_index)
        self._stages = stages

    @property
    def sections(self) -> tuple[Section, ...]:
        """See `SectionScheme.sections`."""
        return self._sections

    def encode(
        self, chunk: KVChunk, numbers: Sequence[int], unrotation: Rotation, offsets: torch.Tensor | None = None
    ) -> list[bytes]:
        """See `SectionScheme.encode`. Tokens have no classes: all have the same step."""
        return [self._encode(chunk, index, unrotation) for index in numbers]

    def _encode(self, chunk: KVChunk, index: int, unrotation: Rotation) -> bytes:
        section = self._sections[index]
        tile = tile_tokens(section, chunk.layout)
        x = torch.cat([gather(chunk, section, unrotation, at) for at in tiles(chunk.tokens, tile)])
        require_finite(x, section)
        mean = x.mean(0, dtype=torch.float64).bfloat16().float()
        x -= mean
        # Sums of squares in float64: those of large values overflow float32.
        deviation = torch.linalg.vector_norm(x, dim=0, dtype=torch.float64) / len(x) ** 0.5
        side, channels = write_channels(section.blocks, mean.numpy(), deviation.numpy(), self._step_index)
        x /= torch.from_numpy(channels.scale)
        live = channels.live

        def coefficients() -> Iterator[tuple[slice, F32]]:
            for at in tiles(chunk.tokens, tile):
                yield at, np.ascontiguousarray(x[at].numpy().T[live])

        return side + self._coder.encode(coefficients(), channels.plan(), chunk.tokens)

    def decode(
        self,
        parts: Sequence[tuple[int, memoryview]],
        request: DecodeRequest,
        keys: Sequence[Rows | None],
        values: Sequence[Rows | None],
        rotation: Rotation,
    ) -> None:
        """See `SectionScheme.decode`."""
        layout, tokens = request.layout, request.header.tokens
        for index, data in parts:
            section = self._sections[index]
            reader = Reader(data)
            channels = read_channels(reader, section.blocks, index)
            live, mean, plan = channels.live, torch.from_numpy(channels.mean)[None], channels.plan()
            coded = self._coder.read(reader, plan, tokens)
            for at, y in self._coder.decode(coded, plan, tokens, request.span, tile_tokens(section, layout)):
                x = self._stages.spread(y, live, channels.scale, section.values)
                inside, rows = overlap(at, request.span)
                self._stages.place(x[inside], mean, section, layout, rotation, rows, keys, values)
