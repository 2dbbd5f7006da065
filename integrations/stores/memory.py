"""Blobs in this process's RAM. The least recently used entry is evicted first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from cuvee.integrations.stores.base import check_max_bytes
from cuvee.integrations.stores.counted import CountedStore


class MemoryStore(CountedStore):
    """Blobs in RAM, kept by reference and never copied. The budget counts the bytes of blobs and keys.

    An entry larger than the whole budget is not kept, and is counted as `dropped`. A closed store holds no entries.

        >>> store = MemoryStore(max_bytes=1000)
        >>> store.put("ab/01", b"blob")
        True
        >>> store.get("ab/01"), store.get("ab/02")
        (b'blob', None)
        >>> store.counters()["memory"].hits
        1

    Args:
        max_bytes: the budget.

    Raises:
        InputError: `max_bytes` is below 1.
    """

    name = "memory"
    shared = False

    def __init__(self, max_bytes: int) -> None:
        super().__init__("memory store")
        check_max_bytes(max_bytes)
        self.max_bytes = max_bytes
        self._entries: OrderedDict[str, bytes] = OrderedDict()  # in the order of their last use
        self._used = 0
        self._lock = threading.Lock()

    def close(self) -> None:
        """Release the entries."""
        with self._lock:
            self._entries.clear()
            self._used = self.max_bytes = 0  # nothing fits any more

    def _read(self, keys: Sequence[str]) -> list[bytes | None]:
        with self._lock:
            for key in keys:
                if key in self._entries:
                    self._entries.move_to_end(key)
            return [self._entries.get(key) for key in keys]

    def _write(self, key: str, blob: bytes) -> bool:
        # This does not copy `bytes`. Any other buffer is copied, because the caller may still change it.
        blob = bytes(blob)
        size = len(key) + len(blob)
        with self._lock:
            if size > self.max_bytes:
                self._count(dropped=1)
                return False
            self._pop(key)
            while self._used + size > self.max_bytes:
                self._pop(next(iter(self._entries)))
                self._count(evictions=1)
            self._entries[key] = blob
            self._used += size
            return True

    def _there(self, keys: Sequence[str]) -> list[bool]:
        with self._lock:
            return [key in self._entries for key in keys]

    def _remove(self, keys: Sequence[str]) -> int:
        with self._lock:
            return sum(map(self._pop, keys))

    def _pages(self, tenant: str) -> Iterator[list[str]]:
        with self._lock:  # this scans all keys
            keys = [key for key in self._entries if key.startswith(f"{tenant}/")]
        yield keys

    def _held(self) -> tuple[int, int]:
        """Return exact figures; the bytes include the keys."""
        with self._lock:
            return len(self._entries), self._used

    def _pop(self, key: str) -> bool:
        """Remove an entry; return whether it was there."""
        blob = self._entries.pop(key, None)
        self._used -= 0 if blob is None else len(key) + len(blob)
        return blob is not None
