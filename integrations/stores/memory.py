"""Blobs in this process's RAM. The least recently used entry is evicted first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from weakref import WeakValueDictionary

from cuvee.codec.support.forks import tell_after_fork
from cuvee.integrations.stores.base import MAX_ENTRY_BYTES, Store, TierCounters, check_bytes, check_key, check_tenant


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Cache:
    """Entries in the order of their last use. It lives as long as a store uses it."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    entries: OrderedDict[str, bytes] = field(default_factory=OrderedDict)
    used: int = 0

    def __post_init__(self) -> None:
        tell_after_fork(self)

    def after_fork(self) -> None:
        """Keep the entries, and count them again, because another thread may have been changing them."""
        self.lock = threading.Lock()
        self.used = sum(len(key) + len(blob) for key, blob in self.entries.items())

    def pop(self, key: str) -> bool:
        """Remove an entry; return whether it was there."""
        blob = self.entries.pop(key, None)
        self.used -= 0 if blob is None else len(key) + len(blob)
        return blob is not None


# The caches of all stores of this process that share them, by budget, and a cache whose lock guards them.
_process_wide: WeakValueDictionary[int, _Cache] = WeakValueDictionary()
_opening = _Cache()


class MemoryStore(Store):
    """Blobs in RAM, kept by reference and never copied. The budget counts the bytes of blobs and keys.

    An entry larger than the whole budget or than `max_entry` is not kept, and is counted as `dropped`. Each store has
    its own counters, even if it shares its entries with other stores; an eviction is counted in the store whose put
    caused it. A closed store holds no entries.

        >>> store = MemoryStore(max_bytes=1000)
        >>> store.put("ab/01", b"blob")
        True
        >>> store.get("ab/01"), store.get("ab/02")
        (b'blob', None)
        >>> store.counters()["memory"].hits
        1

    Args:
        max_bytes: the budget.
        process_wide: share entries with all open stores of this process that are `process_wide` and have the same
            budget. The entries are released when the last of these stores is closed.
        max_entry: largest blob, in bytes.

    Raises:
        InputError: an argument is out of range.
    """

    name = "memory"
    shared = False

    def __init__(self, max_bytes: int, *, process_wide: bool = False, max_entry: int = MAX_ENTRY_BYTES) -> None:
        check_bytes("max_bytes", max_bytes)
        check_bytes("max_entry", max_entry)
        self._max_bytes, self._max_entry = max_bytes, max_entry
        self._counters = TierCounters()
        self._cache = _Cache()
        if process_wide:
            with _opening.lock:
                self._cache = _process_wide.setdefault(max_bytes, self._cache)

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the blob of each key; None for those that are not there."""
        for key in keys:
            check_key(key)
        counters, entries = self._counters, self._cache.entries
        with self._cache.lock:
            blobs = [entries.get(key) for key in keys]
            for key, blob in zip(keys, blobs, strict=True):
                if blob is None:
                    counters.misses += 1
                else:
                    entries.move_to_end(key)
                    counters.hits += 1
                    counters.hit_bytes += len(blob)
            return blobs

    def put(self, key: str, blob: bytes) -> bool:
        """Keep `blob`, evicting other entries; False if it exceeds the budget or `max_entry`."""
        check_key(key)
        # This does not copy `bytes`. Any other buffer is copied, because the caller may still change it.
        blob = bytes(blob)
        size = len(key) + len(blob)
        limit, cache, counters = self._max_bytes, self._cache, self._counters
        with cache.lock:
            if size > limit or len(blob) > self._max_entry:
                counters.dropped += 1
                return False
            cache.pop(key)
            while cache.used + size > limit:
                cache.pop(next(iter(cache.entries)))
                counters.evictions += 1
            cache.entries[key] = blob
            cache.used += size
            counters.puts += 1
            counters.put_bytes += len(blob)
            return True

    def contains(self, keys: Sequence[str]) -> list[bool]:
        """Return whether each key is there now."""
        for key in keys:
            check_key(key)
        with self._cache.lock:
            return [key in self._cache.entries for key in keys]

    def delete(self, key: str) -> bool:
        """Delete an entry; return whether it was there."""
        check_key(key)
        with self._cache.lock:
            return self._cache.pop(key)

    def delete_tenant(self, tenant: str) -> int:
        """Delete every entry of a tenant; return how many there were. This scans all keys."""
        prefix = check_tenant(tenant) + "/"
        with self._cache.lock:
            keys = [key for key in self._cache.entries if key.startswith(prefix)]
            return sum(map(self._cache.pop, keys))

    def keys(self, tenant: str) -> Iterator[str]:
        """Yield the keys of a tenant's entries, as they are now."""
        prefix = check_tenant(tenant) + "/"
        with self._cache.lock:
            keys = [key for key in self._cache.entries if key.startswith(prefix)]
        yield from keys

    def counters(self) -> dict[str, TierCounters]:
        """Return a snapshot. `entries` and `bytes` are exact; `bytes` includes the keys."""
        with self._cache.lock:
            held = len(self._cache.entries), self._cache.used
            return {self.name: replace(self._counters, entries=held[0], bytes=held[1])}

    def close(self) -> None:
        """Release the entries, which other open stores may share."""
        self._cache, self._max_bytes = _Cache(), 0  # nothing fits any more
