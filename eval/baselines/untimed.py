"""The base of baselines whose speed is meaningless."""

from __future__ import annotations

from typing import Any

from cuvee.codec.chunk import KVChunk

__all__ = ["Simulated", "Untimed"]


class Untimed:
    """A method whose speed is not measured, and whose layers are not stored apart."""

    __slots__ = ()

    timed = False

    def layer_bits(self, stored: Any) -> list[float] | None:
        """See `Method.layer_bits`: not counted apart."""
        return None


class Simulated(Untimed):
    """A method that counts its bits without writing bytes: it stores the decoded chunk itself."""

    __slots__ = ()

    def decode(self, stored: Any) -> KVChunk:
        """See `Method.decode`."""
        chunk: KVChunk = stored
        return chunk
