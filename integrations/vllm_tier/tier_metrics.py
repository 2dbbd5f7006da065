"""The metrics of the tier: the names in `cuvee.integrations.pages.Counts`, as vLLM's metrics."""

from __future__ import annotations

PREFIX = "vllm:cuvee_tier_"

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
    "failures": (True, "Failures, by what failed: lookup, fetch, decode, encode, store, positions or weights."),
    "weights_changed": (False, "How often vLLM's weights may have changed; what was stored before is not found."),
    "contained": (True, "Errors that were kept from the engine, by the call in which they happened."),
}
