"""A tier of a `TieredStore`: a store with a write-behind queue in front of it."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence

from cuvee.integrations.guard import Once
from cuvee.integrations.stores.base import Store, StoreError, TierCounters
from cuvee.integrations.stores.threads import ThreadPool

_log = logging.getLogger(__name__)

WRITERS = 8  # puts in flight per tier, since each may wait for a network
QUEUE_BYTES = 256 << 20  # that wait or are written, per tier; an entry that does not fit is dropped for that tier


class Tier:
    """A store, its write-behind queue, and the threads that empty the queue. They start as entries arrive.

    No two threads write the same key, so the last put of a key wins. `_counts`: events that do not reach the store.
    """

    def __init__(self, store: Store, level: int) -> None:
        self.store = store
        self._label = f"tier {level} ({store.name})"
        self._counts = TierCounters()
        self._once = Once(_log)
        self._threads = ThreadPool(WRITERS, f"cuvee {self._label}", math.inf)
        self._closed = False
        self._changed = threading.Condition()
        self._waiting: dict[str, bytes] = {}
        self._writing: dict[str, bytes] = {}
        self._bytes = 0

    def offer(self, key: str, blob: bytes) -> bool:
        """Queue a put, which replaces a waiting put of the same key; False if it was dropped."""
        with self._changed:
            size = self._bytes + len(blob) - len(self._waiting.get(key, b""))
            full = size > QUEUE_BYTES
            if not self._closed and not full and self._has_thread(key):
                self._waiting[key], self._bytes = blob, size
                return True
            self._counts.dropped += 1
            if full and not self._closed:
                text = "%s: the write-behind queue is full (%s bytes): entries arrive faster than the tier stores them,"
                text += " and are dropped for this tier until it catches up"
                self._once("full", text, self._label, f"{QUEUE_BYTES:,}")
        return False

    def look(self, keys: Sequence[str], count: bool) -> dict[str, bytes]:
        """Return the entries of `keys` in the queue.

        Ask the store for the others afterwards, never before, because an entry leaves the queue only once the store has
        it.
        """
        with self._changed:
            held = {**self._writing, **self._waiting}
            found = {key: held[key] for key in keys if key in held}
            if count:
                self._counts.hits += len(found)
                self._counts.hit_bytes += sum(map(len, found.values()))
        return found

    def withdraw(self, matches: Callable[[str], bool]) -> bool:
        """Remove matching puts, and wait for those that threads are writing; return whether there was any.

        What is put into the store, or deleted from it, afterwards replaces no newer put and is replaced by no older.
        """
        with self._changed:
            gone = [key for key in self._waiting if matches(key)]
            for key in gone:
                self._bytes -= len(self._waiting.pop(key))
            writing = any(map(matches, self._writing))
            self._changed.notify_all()
            self._changed.wait_for(lambda: not any(map(matches, self._writing)))
        return bool(gone) or writing

    def drain(self, timeout: float | None) -> bool:
        """Wait until the queue is empty and its last entry written; False if that takes more than `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._writing, timeout)

    def close(self) -> None:
        """Drop waiting entries, and close the store. Threads that still write end with the process, if they hang."""
        with self._changed:
            lost, size = len(self._waiting), sum(map(len, self._waiting.values()))
            busy = [len(blob) for blob in self._writing.values()]
            self._counts.dropped += lost
            self._bytes -= size
            self._waiting.clear()
            self._closed = True
        if lost or busy:
            text = "%s was closed: %d entries (%d bytes) were not written and are lost; %d bytes are being written"
            _log.warning(text, self._label, lost, size, sum(busy))
        self._threads.dismiss(0 if busy else None, cancel=True)
        self.store.close()

    def counters(self) -> dict[str, TierCounters]:
        """Return the counters of the store, with the events of the queue added."""
        counters = self.store.counters()
        counted = counters.setdefault(self.store.name, TierCounters())
        with self._changed:
            counted.hits += self._counts.hits
            counted.hit_bytes += self._counts.hit_bytes
            counted.errors += self._counts.errors
            counted.dropped += self._counts.dropped
            counted.queued += len(self._waiting) + len(self._writing)
        return counters

    def _has_thread(self, key: str) -> bool:
        """Have a thread write a key, unless one will; False if the system prevents it."""
        if key not in self._waiting and key not in self._writing:
            try:
                self._threads.submit(self._write, key)
            except RuntimeError:
                return False
        return True

    def _write(self, key: str) -> None:
        """Write what waits under a key, until nothing does. A failure is counted: nobody waits for the copy."""
        while True:
            with self._changed:
                if key not in self._waiting or key in self._writing:  # then who writes it goes on with what waits
                    return
                blob = self._writing[key] = self._waiting.pop(key)
            try:
                self.store.put(key, blob)
            except Exception as error:
                if not isinstance(error, StoreError):  # a store counts the StoreErrors that it raises
                    with self._changed:
                        self._counts.errors += 1
                self._once("failed", "%s: a copy was not written: %s", self._label, error)
            with self._changed:
                self._bytes -= len(self._writing.pop(key))
                self._changed.notify_all()
