"""`Counts`: what happened to pages, as numbers by name."""

from __future__ import annotations

import threading

from cuvee.integrations.core.guard import Recorder

COUNTED: dict[str, tuple[bool, str]] = {
    "saved_pages": (False, "Chunks that were coded and stored."),
    "kept_pages": (False, "Chunks to store that were stored before."),
    "unsaved_pages": (False, "Chunks that could not be stored."),
    "loaded_pages": (False, "Chunks that were restored into host memory."),
    "missed_pages": (False, "Chunks to load that could not be restored."),
    "recognized_pages": (False, "Stored chunks whose tokens were recognized by their cache."),
    "misfit_pages": (
        False, "Chunks coded without prediction from tokens, or without loss, because their profile would have taken "
        "more bytes.",
    ),
    "opaque_pages": (True, "Chunks stored or restored as bytes, without loss and without a profile, by their kind."),
    "raw_bytes": (False, "Uncompressed bytes of stored chunks."),
    "blob_bytes": (False, "Bytes of stored chunks in the store."),
    "loaded_raw_bytes": (False, "Uncompressed bytes of restored chunks."),
    "loaded_blob_bytes": (False, "Bytes of restored chunks in the store."),
    "encode_seconds": (False, "Seconds that threads coded."),
    "decode_seconds": (False, "Seconds that threads decoded."),
    "failures": (
        True, "Failures, by what failed: lookup, fetch, decode, encode, store, positions, weights or records.",
    ),
    "weights_changed": (False, "How often vLLM's weights may have changed; what was stored before is not found."),
    "contained": (True, "Errors that were kept from the engine, by the call in which they happened."),
    "identity_entries": (
        True, "About how many entries a shared store has of this engine's identity (same), and of others that it keeps "
        "records of (other): cuvee store explain says how they differ.",
    ),
}  # fmt: skip
"""What `Counts` holds by name: whether it has a label, and what it counts. A chunk is a page of the engine."""

GAUGES = frozenset({"identity_entries"})
"""Those of them that are no sums: they go up and down."""


class Counts:
    """Sums and gauges by name and label. Safe to use from several threads.

    The names are those of `COUNTED`, and `refused_pages`: pages of a kind that the adapter does not support. All begin
    at 0.

    Args:
        all: told of every event as well; these are then the sums of a part, such as one call.

    Example:
        >>> counts = Counts()
        >>> counts.count("failures", label="decode")
        >>> counts.snapshot()
        {'failures{decode}': 1}
    """

    def __init__(self, all: Recorder | None = None) -> None:
        self._all = all
        self._lock = threading.Lock()
        self._sums: dict[str, float] = {}
        self._new: dict[tuple[str, str], float] = {}

    def count(self, name: str, value: float = 1, label: str = "") -> None:
        """Add `value` to the sum of this name and label."""
        full = f"{name}{{{label}}}" if label else name
        with self._lock:
            self._sums[full] = self._sums.get(full, 0) + value
            self._new[name, label] = self._new.get((name, label), 0) + value
        if self._all is not None:
            self._all.count(name, value, label)

    def gauge(self, name: str, value: float, label: str = "") -> None:
        """Set the gauge of this name and label."""
        with self._lock:
            self._sums[f"{name}{{{label}}}"] = self._new[name, label] = value

    def take_new(self) -> dict[tuple[str, str], float]:
        """Return what was added since the last call, by name and label, and the gauges that were set."""
        with self._lock:
            new, self._new = self._new, {}
        return {key: value for key, value in new.items() if value or key[0] in GAUGES}

    def snapshot(self) -> dict[str, float]:
        """Return all that is not 0, by `name` or `name{label}`."""
        with self._lock:
            return {name: value for name, value in self._sums.items() if value}
