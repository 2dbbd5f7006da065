"""How the sections of a blob are coded: one file per scheme, one protocol for all.

| scheme | needs | loses |
|---|---|---|
| `transform` | a learned profile | quantization |
| `generic` | nothing: statistics travel in the blob | quantization |
| `lossless` | nothing | nothing |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from cuvee.codec.chunk import KVChunk
from cuvee.codec.layout import KVLayout
from cuvee.codec.profiles.sections import Section
from cuvee.codec.stages.rotation import Rotation
from cuvee.codec.stages.rows import Rows


@dataclass(frozen=True, slots=True)
class Target:
    """Where decoded tokens go.

    Attributes:
        layout: of the chunk, with the blob's dtype.
        keys, values: per layer the rows of the wanted tokens; None for a layer that is not asked for.
        wanted: the tokens of the blob to decode; token `wanted.start` goes to row 0 of the outputs.
        tokens: tokens in the blob.
        source_start: the position at which the blob's first token was encoded.
        start: the position of row 0 of the outputs.
    """

    layout: KVLayout
    keys: Sequence[Rows | None]
    values: Sequence[Rows | None]
    wanted: slice
    tokens: int
    source_start: int
    start: int


def overlap(at: slice, wanted: slice) -> tuple[slice, slice]:
    """The tokens of a tile `at` that are wanted: as rows of the tile, and as rows of the outputs."""
    first, end = max(at.start, wanted.start), min(at.stop, wanted.stop)
    return slice(first - at.start, end - at.start), slice(first - wanted.start, end - wanted.start)


class SectionScheme(Protocol):
    """One way to code sections. Called for different sections from several threads at once."""

    @property
    def sections(self) -> tuple[Section, ...]:
        """What is coded alone, in order of layers."""
        ...

    def encode(
        self, chunk: KVChunk, numbers: Sequence[int], unrotation: Rotation, offsets: torch.Tensor | None = None
    ) -> list[bytes]:
        """The bytes of the sections `numbers`; `unrotation` frees the chunk's keys of their positions.

        `offsets` are the octaves `[T]` by which the tokens' steps shall be coarser, None where the profile is to say.
        """
        ...

    def decode(self, parts: Sequence[tuple[int, memoryview]], target: Target, rotation: Rotation) -> None:
        """Decode sections, given their numbers and bytes, into `target`.

        `rotation` turns position-free keys to the target's positions.
        """
        ...
