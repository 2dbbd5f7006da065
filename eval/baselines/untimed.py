"""What the baselines share whose speed would say nothing."""

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
    """A method that counts its bits and does not make the bytes: what it stores is the decoded chunk itself."""

    __slots__ = ()

    def decode(self, stored: Any) -> KVChunk:
        """See `Method.decode`."""
        chunk: KVChunk = stored
        return chunk
