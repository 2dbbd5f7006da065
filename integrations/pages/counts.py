"""`Counts`: what happened to pages, as numbers by name."""

from __future__ import annotations

import threading

from cuvee.integrations.guard import Recorder


class Counts:
    """Sums by name and label. Safe to use from several threads.

    The names, all of which begin at 0:

        saved_pages, kept_pages, unsaved_pages     pages to store: stored now, stored before, and not stored
        loaded_pages, missed_pages                 pages to load: restored, and not
        refused_pages                              pages of a kind that the adapter does not support
        recognized_pages                           stored pages whose tokens were recognized by their cache, so that a
                                                   profile predicts from them
        raw_bytes, blob_bytes                      of what was stored: uncompressed, and in the store
        loaded_raw_bytes, loaded_blob_bytes        of what was restored, likewise
        encode_seconds, decode_seconds             of all threads together
        failures{lookup,fetch,decode,encode,store,positions,weights}    by what failed
        weights_changed                            how often the engine's weights were said to be others
        contained{…}                               errors kept from the engine, by the call in which they happened

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

    def take_new(self) -> dict[tuple[str, str], float]:
        """Return what was added since the last call, by name and label."""
        with self._lock:
            new, self._new = self._new, {}
        return {key: value for key, value in new.items() if value}

    def snapshot(self) -> dict[str, float]:
        """Return all sums that are not 0, by `name` or `name{label}`."""
        with self._lock:
            return {name: value for name, value in self._sums.items() if value}
