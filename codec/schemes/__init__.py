"""How the sections of a blob are coded: one file per scheme, one protocol for all.

| scheme | needs | loses |
|---|---|---|
| `transform` | a learned profile | quantization |
| `lossless` | nothing | nothing |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from cuvee.codec.backends import DecodeRequest
from cuvee.codec.chunk import KVChunk
from cuvee.codec.profiles.sections import Section
from cuvee.codec.stages.rotation import Rotation
from cuvee.codec.stages.rows import Rows


def overlap(at: slice, span: range) -> tuple[slice, slice]:
    """Return the tokens of a tile `at` that lie in `span`: as rows of the tile, and as rows of the outputs."""
    first, end = max(at.start, span.start), min(at.stop, span.stop)
    return slice(first - at.start, end - at.start), slice(first - span.start, end - span.start)


class SectionScheme(Protocol):
    """One way to code sections. Several threads call it at once, for different sections."""

    @property
    def sections(self) -> tuple[Section, ...]:
        """The sections, which are coded independently, in order of layers."""
        ...

    def encode(self, chunk: KVChunk, numbers: Sequence[int], unrotation: Rotation) -> list[tuple[bytes, ...]]:
        """Return for each of the sections `numbers` its bytes: one part, or a base and its refinement.

        Args:
            chunk: the tokens, with their ids if the profile predicts from them.
            numbers: of the sections.
            unrotation: frees the chunk's keys of their positions.
        """
        ...

    def decode(
        self,
        parts: Sequence[tuple[int, tuple[memoryview, ...]]],
        request: DecodeRequest,
        keys: Sequence[Rows | None],
        values: Sequence[Rows | None],
        rotation: Rotation,
    ) -> None:
        """Decode sections into rows.

        Args:
            parts: number of each section, and its bytes: one part, or a base and its refinement.
            request: the tokens to decode.
            keys: per layer the rows of the request's tokens; None for layers that are not decoded.
            values: the same for values.
            rotation: turns position-free keys to the request's positions.
        """
        ...
