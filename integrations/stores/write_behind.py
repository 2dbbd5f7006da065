"""A tier of a `TieredStore`: a store with a write-behind queue in front of it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cuvee.integrations.stores.base import Store, StoreError, TierCounters
from cuvee.integrations.stores.monitor import WarnOnce

_log = logging.getLogger(__name__)

WRITERS = 8  # puts in flight per tier, since each may wait for a network


@dataclass(slots=True)
class _Write:
    """A put that a thread is writing. `deleted` is set when the entry is deleted meanwhile."""

    key: str
    blob: bytes
    deleted: bool = False


class Tier:
    """A store, its write-behind queue, and the threads that empty the queue. They start as entries arrive.

    No two threads write the same key, so the last put of a key wins. `_counts`: events that do not reach the store.
    """

    def __init__(self, store: Store, level: int, max_bytes: int) -> None:
        self.store = store
        self._label = f"tier {level} ({store.name})"
        self._max_bytes = max_bytes
        self._counts = TierCounters()
        self._closed = False
        self._warn = WarnOnce(_log, self._label)
        self.reset()

    def reset(self) -> None:
        """Start with an empty queue and no threads: at first, and in a forked child, which has no threads."""
        self._changed = threading.Condition()
        self._waiting: dict[str, bytes] = {}
        self._writing: dict[str, _Write] = {}
        self._bytes = 0
        self._threads = self._idle = 0

    def offer(self, key: str, blob: bytes) -> bool:
        """Queue a put, which replaces a waiting put of the same key; False if it was dropped."""
        with self._changed:
            size = self._bytes + len(blob) - len(self._waiting.get(key, b""))
            full = size > self._max_bytes
            if not self._closed and not full and self._hire():
                self._waiting[key], self._bytes = blob, size
                self._changed.notify_all()
                return True
            self._counts.dropped += 1
            if full and not self._closed:
                text = "the write-behind queue is full (%s bytes): entries arrive faster than the tier stores them, "
                self._warn("full", text + "and are dropped for this tier until it catches up", f"{self._max_bytes:,}")
        return False

    def look(self, keys: Sequence[str], count: bool) -> tuple[dict[str, bytes], list[str]]:
        """Return the entries of `keys` in the queue, and the keys to ask the store for.

        A key that is deleted while its entry is written is in neither. Ask the store afterwards, never before, because
        an entry leaves the queue only once the store has it.
        """
        with self._changed:
            writing = {key: self._writing[key] for key in keys if key in self._writing}
            found = {key: write.blob for key, write in writing.items() if not write.deleted}
            found |= {key: self._waiting[key] for key in keys if key in self._waiting}
            if count:
                self._counts.hits += len(found)
                self._counts.hit_bytes += sum(map(len, found.values()))
        return found, [key for key in keys if key not in found and key not in writing]

    def forget(self, matches: Callable[[str], bool]) -> bool:
        """Remove matching puts, and hide and later delete those being written; return whether any matched."""
        with self._changed:
            gone = [key for key in self._waiting if matches(key)]
            for key in gone:
                self._bytes -= len(self._waiting.pop(key))
            writing = [write for key, write in self._writing.items() if matches(key) and not write.deleted]
            for write in writing:
                write.deleted = True
            self._changed.notify_all()
        return bool(gone or writing)

    def put(self, key: str, blob: bytes) -> bool:
        """Put into the store itself, after any earlier put of the key, so that no older copy replaces the new one."""
        with self._changed:
            if key in self._waiting:
                self._bytes -= len(self._waiting.pop(key))
            self._changed.wait_for(lambda: key not in self._writing)
        return self.store.put(key, blob)

    def delete_tenant(self, tenant: str) -> int:
        """Delete a tenant from the store, once no deleted entry is being written; return how many entries it held."""
        with self._changed:
            self._changed.wait_for(lambda: not any(write.deleted for write in self._writing.values()))
        return self.store.delete_tenant(tenant)

    def drain(self, timeout: float | None) -> bool:
        """Wait until the queue is empty and its last entry written; False if that takes more than `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._writing, timeout)

    def close(self) -> None:
        """Drop waiting entries, and close the store. Threads that still write end with the process, if they hang."""
        with self._changed:
            lost, size = len(self._waiting), sum(map(len, self._waiting.values()))
            busy = sum(len(write.blob) for write in self._writing.values())
            self._counts.dropped += lost
            self._bytes -= size
            self._waiting.clear()
            self._closed = True
            self._changed.notify_all()
            if not busy:
                self._changed.wait_for(lambda: not self._threads)
        if lost or busy:
            text = "%s was closed: %d entries (%d bytes) were not written and are lost; %d bytes are being written"
            _log.warning(text, self._label, lost, size, busy)
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

    def _hire(self) -> bool:
        """Start another thread if all are busy, unless the system prevents it; return whether one runs."""
        if self._idle <= len(self._waiting) and self._threads < WRITERS:
            thread = threading.Thread(target=self._run, name=f"cuvee {self._label}", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                return self._threads > 0
            self._threads += 1
        return True

    def _run(self) -> None:
        while self._step():
            pass
        with self._changed:
            self._threads -= 1
            self._changed.notify_all()

    def _step(self) -> bool:
        """Write one entry; False once the tier is closed. One call per entry, so that no blob stays referenced."""
        with self._changed:
            self._idle += 1
            self._changed.wait_for(lambda: self._closed or self._next() is not None)
            self._idle -= 1
            if (key := self._next()) is None:
                return False
            write = self._writing[key] = _Write(key, self._waiting.pop(key))
        self._attempt(lambda: self.store.put(write.key, write.blob))
        with self._changed:
            if not write.deleted:
                self._finish(write)
                return True
        self._attempt(lambda: self.store.delete(write.key))
        with self._changed:
            self._finish(write)
        return True

    def _next(self) -> str | None:
        """Return the key that has waited longest and that no thread is writing."""
        return next((key for key in self._waiting if key not in self._writing), None)

    def _attempt(self, work: Callable[[], object]) -> None:
        """Call the store. A failure is counted, and the first is logged: nobody waits for the copy."""
        try:
            work()
        except Exception as error:
            if not isinstance(error, StoreError):  # a store counts the StoreErrors that it raises
                with self._changed:
                    self._counts.errors += 1
            self._warn("failed", "a copy was not written: %s", error)

    def _finish(self, write: _Write) -> None:
        del self._writing[write.key]
        self._bytes -= len(write.blob)
        self._changed.notify_all()
