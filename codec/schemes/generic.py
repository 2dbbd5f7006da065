"""The scheme without learned data: per-chunk means and scales of every channel, one relative step.

A section is one layer: its side information (`entropy/channels.py`), then the coded coefficients of all coded channels
(K, then V).

Coefficients are (x - mean) / unit scale; the blob's step is relative to that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from cuvee.codec.backends import DecodeRequest
from cuvee.codec.chunk import KVChunk
from cuvee.codec.entropy.channels import write_channels
from cuvee.codec.entropy.coefficients import CoefficientCoder
from cuvee.codec.entropy.family import Family
from cuvee.codec.layout import KVLayout
from cuvee.codec.profiles.sections import Section, partition, tile_tokens, tiles, tiles_around
from cuvee.codec.stages.implementations import Stages
from cuvee.codec.stages.rotation import Rotation
from cuvee.codec.stages.rows import Rows
from cuvee.codec.support.arrays import F32


class GenericScheme:
    """Codes sections of any model at one relative step."""

    def __init__(self, layout: KVLayout, family: Family, step_index: int, stages: Stages) -> None:
        self._sections = partition(layout, "unit")
        self._family, self._step_index = family, step_index
        self._coder = CoefficientCoder(stages, family, step_index)
        self._stages = stages

    @property
    def sections(self) -> tuple[Section, ...]:
        """See `SectionScheme.sections`."""
        return self._sections

    def encode(self, chunk: KVChunk, numbers: Sequence[int], unrotation: Rotation) -> list[tuple[bytes, ...]]:
        """See `SectionScheme.encode`. Tokens have no classes: all have the same step."""
        return [(self._encode(chunk, index, unrotation),) for index in numbers]

    def _encode(self, chunk: KVChunk, index: int, unrotation: Rotation) -> bytes:
        section = self._sections[index]
        tile = tile_tokens(section, chunk.layout)
        x, none = torch.empty(chunk.tokens, section.values), torch.zeros(1, section.values)
        for at in tiles(chunk.tokens, tile):
            x[at] = self._stages.gather_centered(chunk, section, unrotation, at, none, None)
        mean, deviation = self._stages.center_channels(x)
        side, channels = write_channels(section.blocks, mean, deviation, self._step_index)
        live = channels.live

        def coefficients() -> Iterator[tuple[slice, F32]]:
            for at in tiles(chunk.tokens, tile):
                yield at, self._stages.normalized_channels(x[at], channels.scale, live)

        return side + self._coder.encode(coefficients(), channels.plan(), chunk.tokens)

    def decode(
        self,
        parts: Sequence[tuple[int, tuple[memoryview, ...]]],
        request: DecodeRequest,
        keys: Sequence[Rows | None],
        values: Sequence[Rows | None],
        rotation: Rotation,
    ) -> None:
        """See `SectionScheme.decode`."""
        layout, tokens, span = request.layout, request.header.tokens, request.span
        for index, (data,) in parts:
            section = self._sections[index]
            indexed = self._stages.index_channels(data, section, index, self._family, self._step_index, tokens)
            for at in tiles_around(span, tile_tokens(section, layout), tokens):
                self._stages.decode_channels(
                    indexed, at, section, layout, rotation, at.start - span.start, keys, values
                )
