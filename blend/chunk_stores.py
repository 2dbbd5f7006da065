"""What a store must have that `ChunkCache` keeps blobs in, and what `ChunkCache` counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class ChunkStore(Protocol):
    """A store for `ChunkCache`, used from several threads; all of `cuvee.integrations.stores` fit.

    A chunk consists of parts: a base, and a refinement if the codec makes one.
    """

    def get_parts(self, keys: Sequence[str], most: int) -> list[tuple[bytes, ...]]:
        """Return at most `most` parts of each chunk, up to the first that is missing; none without a base."""
        ...

    def put_parts(self, key: str, parts: Sequence[bytes]) -> int:
        """Keep the parts of a chunk, base first, in place of older ones; return how many were kept."""
        ...

    def delete_parts(self, key: str, first: int) -> bool:
        """Delete the parts of a chunk from number `first` on; return whether any existed."""
        ...


@dataclass(frozen=True, slots=True)
class ChunkCounters:
    """Counts of a `ChunkCache` since it was made.

    Attributes:
        hits: chunks from the store, or from another thread that was computing them.
        misses: chunks that were computed.
        stored: computed chunks that the store kept.
        rejected: entries that were damaged or did not match their key, and refinements that did not match their base.
            They were deleted, and chunks without a base recomputed.
        errors: failed operations of the store.
    """

    hits: int = 0
    misses: int = 0
    stored: int = 0
    rejected: int = 0
    errors: int = 0
