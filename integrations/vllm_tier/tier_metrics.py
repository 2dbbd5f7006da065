"""The metrics of the tier: the names in `cuvee.integrations.pages.Counts`, as vLLM's metrics."""

from __future__ import annotations

import re

from cuvee.integrations.pages import Counts

_PREFIX = "vllm:cuvee_tier_"
_NAMED = re.compile(r"(\w+)(?:\{(\w+)\})?")

# By the name of the count: whether it has a label, and what it counts.
DOCUMENTED: dict[str, tuple[bool, str]] = {
    "saved_pages": (False, "Chunks that were coded and stored."),
    "kept_pages": (False, "Chunks to store that were stored before."),
    "unsaved_pages": (False, "Chunks that could not be stored."),
    "loaded_pages": (False, "Chunks that were restored into host memory."),
    "missed_pages": (False, "Chunks to load that could not be restored."),
    "recognized_pages": (False, "Stored chunks whose tokens were recognized by their cache."),
    "raw_bytes": (False, "Uncompressed bytes of stored chunks."),
    "blob_bytes": (False, "Bytes of stored chunks in the store."),
    "loaded_raw_bytes": (False, "Uncompressed bytes of restored chunks."),
    "loaded_blob_bytes": (False, "Bytes of restored chunks in the store."),
    "encode_seconds": (False, "Seconds that threads coded."),
    "decode_seconds": (False, "Seconds that threads decoded."),
    "failures": (True, "Failures, by what failed: lookup, fetch, decode, encode, store or positions."),
    "contained": (True, "Errors that were kept from the engine, by the call in which they happened."),
}


def metric_name(name: str) -> str:
    """Return the name of vLLM's metric of a count."""
    return f"{_PREFIX}{name}"


class NewCounts:
    """What was counted since the last call. For one thread that reads.

    Args:
        counts: the sums.

    Example:
        >>> counts = Counts()
        >>> new = NewCounts(counts)
        >>> counts.count("failures", label="decode")
        >>> new.take(), new.take()
        ([('vllm:cuvee_tier_failures', 'decode', 1)], [])
    """

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._told: dict[str, float] = {}

    def take(self) -> list[tuple[str, str, float]]:
        """Return name of the metric, label ("" if it has none) and increase, of the counts that have increased."""
        sums = self._counts.snapshot()
        increases = []
        for full, value in sums.items():
            match = _NAMED.fullmatch(full)
            increase = value - self._told.get(full, 0)
            if match is not None and match[1] in DOCUMENTED and increase > 0:
                increases.append((metric_name(match[1]), match[2] or "", increase))
        self._told = sums
        return increases
