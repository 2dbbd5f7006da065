"""Blobs in this process's RAM, least recently used out first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from cuvee.codec.errors import InputError
from cuvee.integrations.stores.base import Store, TierCounters, check_key, check_tenant


@dataclass(slots=True, eq=False)
class _Cache:
    """Entries, least recently used first, with the handles (`MemoryStore`) that share them."""

    max_bytes: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    entries: OrderedDict[str, bytes] = field(default_factory=OrderedDict)
    used: int = 0
    handles: int = 0

    def pop(self, key: str) -> bool:
        blob = self.entries.pop(key, None)
        if blob is None:
            return False
        self.used -= len(key) + len(blob)
        return True


# What `memory://` URLs of this process share, by budget; guarded by the lock.
_shared: dict[int, _Cache] = {}
_shared_lock = threading.Lock()


class MemoryStore(Store):
    """Blobs by reference (never copied), with a budget for their bytes and those of their keys.

    An entry larger than the whole budget is given up (counted `dropped`). The counters are this object's own, also
    where the entries are shared; an eviction counts where the put was that caused it. A closed store keeps nothing.

    Args:
        max_bytes: the budget.
        shared: share the entries with every other open store of this process that has `shared` and the same budget;
            they go when the last one closes.
    """

    name = "memory"
    shared = False

    def __init__(self, max_bytes: int, *, shared: bool = False) -> None:
        if max_bytes < 1:
            raise InputError(f"max_bytes: must be a positive number of bytes, got {max_bytes!r}")
        self._counters = TierCounters()
        self._closed = False
        with _shared_lock:
            self._cache = _shared.setdefault(max_bytes, _Cache(max_bytes)) if shared else _Cache(max_bytes)
            self._cache.handles += 1

    def get(self, key: str) -> bytes | None:
        """The blob of `key`; None if it is not there."""
        check_key(key)
        with self._cache.lock:
            blob = None if self._closed else self._cache.entries.get(key)
            if blob is not None:
                self._cache.entries.move_to_end(key)
            self._counters.answer(blob)
            return blob

    def put(self, key: str, blob: bytes) -> bool:
        """Keep `blob`, evicting what was not used for longest; False if it is larger than the budget."""
        check_key(key)
        # No copy of bytes; a buffer that the caller may still change is copied.
        blob = bytes(blob)
        size = len(key) + len(blob)
        cache, counters = self._cache, self._counters
        with cache.lock:
            if self._closed or size > cache.max_bytes:
                counters.dropped += 1
                return False
            cache.pop(key)
            while cache.used + size > cache.max_bytes:
                cache.pop(next(iter(cache.entries)))
                counters.evictions += 1
            cache.entries[key] = blob
            cache.used += size
            counters.puts += 1
            counters.put_bytes += len(blob)
            return True

    def contains(self, keys: Sequence[str]) -> list[bool]:
        """Whether each key is there now."""
        for key in keys:
            check_key(key)
        with self._cache.lock:
            return [not self._closed and key in self._cache.entries for key in keys]

    def delete(self, key: str) -> bool:
        """Delete an entry; whether it was there."""
        check_key(key)
        with self._cache.lock:
            return not self._closed and self._cache.pop(key)

    def delete_tenant(self, tenant: str) -> int:
        """Delete every entry of a tenant; how many there were. Looks at every key."""
        prefix = check_tenant(tenant) + "/"
        with self._cache.lock:
            keys = [] if self._closed else [key for key in self._cache.entries if key.startswith(prefix)]
            for key in keys:
                self._cache.pop(key)
            return len(keys)

    def counters(self) -> dict[str, TierCounters]:
        """A snapshot; `entries` and `bytes` (those of keys and blobs) are exact."""
        with self._cache.lock:
            entries, used = (0, 0) if self._closed else (len(self._cache.entries), self._cache.used)
            return {self.name: replace(self._counters, entries=entries, bytes=used)}

    def close(self) -> None:
        """Let go of the entries, unless another open store shares them."""
        cache = self._cache
        with _shared_lock, cache.lock:
            if self._closed:
                return
            self._closed = True
            cache.handles -= 1
            if cache.handles == 0:
                cache.entries.clear()
                cache.used = 0
