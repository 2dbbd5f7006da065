"""The scheme that knows nothing: per-chunk means and scales of every channel, one relative step.

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
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from cuvee.codec.backends import Backend
from cuvee.codec.coefficients import CoefficientCoder
from cuvee.codec.container import Reader
from cuvee.codec.errors import FormatError
from cuvee.codec.family import OCTAVE, Family, coding_plan, scale_codes, scale_index, step_value
from cuvee.codec.layout import KVChunk, KVLayout
from cuvee.codec.schemes import Target, overlap
from cuvee.codec.symbols import F32
from cuvee.codec.transform import Rotation, Section, gather, partition, require_finite, tile_tokens, tiles

_SCALE = struct.Struct("<h")
_DEAD = 255
_MAX_SCALE = 126 * OCTAVE  # within float32
_MAX_CODE = 24 + 4 * 8  # the widest component: see `family.split_wide`


class GenericScheme:
    """Codes sections of any model at one relative step."""

    def __init__(self, layout: KVLayout, family: Family, step: int, backend: Backend) -> None:
        self._sections = partition(layout, "unit")
        self._step = step
        self._coder = CoefficientCoder(backend, family, step)
        self._backend = backend

    @property
    def sections(self) -> tuple[Section, ...]:
        """See `SectionScheme.sections`."""
        return self._sections

    def encode(self, chunk: KVChunk, index: int, unrotation: Rotation) -> bytes:
        """See `SectionScheme.encode`."""
        section = self._sections[index]
        tile = tile_tokens(section, chunk.layout)
        x = torch.cat([gather(chunk, section, unrotation, at) for at in tiles(chunk.tokens, tile)])
        require_finite(x, section)
        side = bytearray()
        codes = np.full(section.values, _DEAD, np.int32)
        column = 0
        for size in section.blocks:
            part = x[:, column : column + size]
            mean = part.mean(0, dtype=torch.float64).bfloat16()
            part -= mean.float()
            # Sums of squares in float64: those of large values overflow float32.
            deviation = torch.linalg.vector_norm(part, dim=0, dtype=torch.float64) / len(part) ** 0.5
            unit = torch.linalg.vector_norm(deviation).numpy() / size**0.5
            scale = int(np.clip(scale_index(unit), -_MAX_SCALE, _MAX_SCALE))
            part /= step_value(scale)
            code = scale_codes(scale_index(deviation.numpy() / step_value(scale)), self._step)
            code = np.where(code < 0, _DEAD, np.minimum(code, _MAX_CODE))
            side += _SCALE.pack(scale)
            side += mean.view(torch.int16).numpy().astype("<i2").tobytes() + code.astype(np.uint8).tobytes()
            codes[column : column + size] = code
            column += size
        live = np.flatnonzero(codes != _DEAD)
        side += bytes(-len(side) % 4)

        def coefficients() -> Iterator[tuple[slice, F32]]:
            for at in tiles(chunk.tokens, tile):
                yield at, np.ascontiguousarray(x[at].numpy().T[live])

        return bytes(side) + self._coder.encode(coefficients(), coding_plan(codes[live]), chunk.tokens)

    def decode(self, data: memoryview, index: int, target: Target, rotation: Rotation) -> None:
        """See `SectionScheme.decode`."""
        section = self._sections[index]
        reader = Reader(data)
        means: list[torch.Tensor] = []
        scales: list[npt.NDArray[np.float32]] = []
        codes: list[npt.NDArray[np.int32]] = []
        for size in section.blocks:
            (scale,) = reader.unpack(_SCALE)
            if abs(scale) > _MAX_SCALE:
                raise FormatError(f"section {index} names a scale beyond {_MAX_SCALE}")
            means.append(torch.from_numpy(reader.array("i2", size).view(np.int16)).view(torch.bfloat16).float())
            scales.append(np.full(size, step_value(scale), np.float32))
            codes.append(reader.array("u1", size).astype(np.int32))
        reader.skip_padding()
        if not all(bool(torch.isfinite(mean).all()) for mean in means):
            raise FormatError(f"section {index} has a mean that is not finite")
        code = np.concatenate(codes)
        live = np.flatnonzero(code != _DEAD)
        if live.size and code[live].max() > _MAX_CODE:
            raise FormatError(f"section {index} names a scale code beyond {_MAX_CODE}")
        mean, scale_of = torch.cat(means), torch.from_numpy(np.concatenate(scales)[live])
        where = torch.from_numpy(live)
        tile = tile_tokens(section, target.layout)
        for at, y in self._coder.decode(reader, coding_plan(code[live]), target.tokens, target.wanted, tile):
            x = torch.zeros(at.stop - at.start, section.values)
            x[:, where] = torch.from_numpy(y).T * scale_of
            inside, rows = overlap(at, target.wanted)
            self._backend.place(
                x[inside], mean[None], section, target.layout, rotation, rows, target.keys, target.values
            )
