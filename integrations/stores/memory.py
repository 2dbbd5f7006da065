"""Blobs in this process's RAM. The least recently used entry is evicted first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from cuvee.integrations.stores.base import MAX_ENTRY_BYTES, Store, TierCounters, check_bytes, check_key, check_tenant


class MemoryStore(Store):
    """Blobs in RAM, kept by reference and never copied. The budget counts the bytes of blobs and keys.

    An entry larger than the whole budget or than `max_entry` is not kept, and is counted as `dropped`. A closed store
    holds no entries.

        >>> store = MemoryStore(max_bytes=1000)
        >>> store.put("ab/01", b"blob")
        True
        >>> store.get("ab/01"), store.get("ab/02")
        (b'blob', None)
        >>> store.counters()["memory"].hits
        1

    Args:
        max_bytes: the budget.
        max_entry: largest blob, in bytes.

    Raises:
        InputError: an argument is out of range.
    """

    name = "memory"
    shared = False

    def __init__(self, max_bytes: int, *, max_entry: int = MAX_ENTRY_BYTES) -> None:
        check_bytes("max_bytes", max_bytes)
        check_bytes("max_entry", max_entry)
        self.max_bytes, self.max_entry = max_bytes, max_entry
        self._counters = TierCounters()
        self._entries: OrderedDict[str, bytes] = OrderedDict()  # in the order of their last use
        self._used = 0
        self._lock = threading.Lock()

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the blob of each key; None for those that are not there."""
        for key in keys:
            check_key(key)
        with self._lock:
            blobs = [self._entries.get(key) for key in keys]
            for key, blob in zip(keys, blobs, strict=True):
                if blob is None:
                    self._counters.misses += 1
                else:
                    self._entries.move_to_end(key)
                    self._counters.hits += 1
                    self._counters.hit_bytes += len(blob)
            return blobs

    def put(self, key: str, blob: bytes) -> bool:
        """Keep `blob`, evicting other entries; False if it exceeds the budget or `max_entry`."""
        check_key(key)
        # This does not copy `bytes`. Any other buffer is copied, because the caller may still change it.
        blob = bytes(blob)
        size, counters = len(key) + len(blob), self._counters
        with self._lock:
            if size > self.max_bytes or len(blob) > self.max_entry:
                counters.dropped += 1
                return False
            self._pop(key)
            while self._used + size > self.max_bytes:
                self._pop(next(iter(self._entries)))
                counters.evictions += 1
            self._entries[key] = blob
            self._used += size
            counters.puts += 1
            counters.put_bytes += len(blob)
            return True

    def contains(self, keys: Sequence[str]) -> list[bool]:
        """Return whether each key is there now."""
        for key in keys:
            check_key(key)
        with self._lock:
            return [key in self._entries for key in keys]

    def delete(self, key: str) -> bool:
        """Delete an entry; return whether it was there."""
        check_key(key)
        with self._lock:
            return self._pop(key)

    def delete_tenant(self, tenant: str) -> int:
        """Delete every entry of a tenant; return how many there were. This scans all keys."""
        return sum(map(self.delete, self.keys(tenant)))

    def keys(self, tenant: str) -> Iterator[str]:
        """Yield the keys of a tenant's entries, as they are now."""
        prefix = check_tenant(tenant) + "/"
        with self._lock:
            keys = [key for key in self._entries if key.startswith(prefix)]
        yield from keys

    def counters(self) -> dict[str, TierCounters]:
        """Return a snapshot. `entries` and `bytes` are exact; `bytes` includes the keys."""
        with self._lock:
            return {self.name: replace(self._counters, entries=len(self._entries), bytes=self._used)}

    def close(self) -> None:
        """Release the entries."""
        with self._lock:
            self._entries.clear()
            self._used = self.max_bytes = 0  # nothing fits any more

    def _pop(self, key: str) -> bool:
        """Remove an entry; return whether it was there."""
        blob = self._entries.pop(key, None)
        self._used -= 0 if blob is None else len(key) + len(blob)
        return blob is not None
