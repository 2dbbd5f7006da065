"""A tier of a `TieredStore`: a store with a write-behind queue in front of it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cuvee.integrations.stores.base import Store, StoreError, TierCounters
from cuvee.integrations.stores.monitor import WarnOnce

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Write:
    """A put that the tier's thread is writing. `deleted` is set when the entry is deleted meanwhile."""

    key: str
    blob: bytes
    deleted: bool = False


class Tier:
    """A store, its write-behind queue, and the thread that empties the queue. Tier 0 uses neither queue nor thread.

    The thread starts with the first entry. `_counts` counts events that do not reach the store.
    """

    def __init__(self, store: Store, level: int, max_bytes: int) -> None:
        self.store = store
        self._label = f"tier {level} ({store.name})"
        self._max_bytes = max_bytes
        self._counts = TierCounters()
        self._closed = False
        self._close_late = False
        self._warn = WarnOnce(_log, self._label)
        self.reset()

    def reset(self) -> None:
        """Start with an empty queue and no thread: at first, and in a forked child, which has no threads."""
        self._changed = threading.Condition()
        self._waiting: dict[str, bytes] = {}
        self._write: _Write | None = None
        self._bytes = 0
        self._thread: threading.Thread | None = None

    def offer(self, key: str, blob: bytes) -> bool:
        """Queue a put, which replaces a waiting put of the same key; False if it was dropped."""
        with self._changed:
            size = self._bytes + len(blob) - len(self._waiting.get(key, b""))
            full = size > self._max_bytes
            if not self._closed and not full and self._start():
                self._waiting[key], self._bytes = blob, size
                self._changed.notify_all()
                return True
            self._counts.dropped += 1
            closed = self._closed
        if closed:
            return False
        if full:
            self._warn(
                "full",
                "the write-behind queue is full (%s bytes): entries arrive faster than the tier stores them. Entries "
                "are dropped for this tier until it catches up. In Python, TieredStore takes a larger max_queue_bytes.",
                f"{self._max_bytes:,}",
            )
        else:
            self._warn("thread", "no thread can be started to write to it; entries are dropped for this tier")
        return False

    def look(self, keys: Sequence[str], count: bool) -> tuple[dict[str, bytes], list[str]]:
        """Return the entries of `keys` in the queue, and the keys to ask the store for.

        A key that is deleted while its entry is written is in neither. Ask the store afterwards, never before, because
        an entry leaves the queue only once the store has it.
        """
        with self._changed:
            found = {key: self._waiting[key] for key in keys if key in self._waiting}
            write = self._write
            if write is not None and not write.deleted and write.key in keys:
                found.setdefault(write.key, write.blob)
            hidden = write.key if write is not None and write.deleted else None
            if count:
                self._counts.hits += len(found)
                self._counts.hit_bytes += sum(map(len, found.values()))
        return found, [key for key in keys if key not in found and key != hidden]

    def forget(self, matches: Callable[[str], bool]) -> bool:
        """Remove matching puts from the queue; hide and later delete one being written. Return whether any matched."""
        with self._changed:
            gone = [key for key in self._waiting if matches(key)]
            for key in gone:
                self._bytes -= len(self._waiting.pop(key))
            writing = self._write is not None and not self._write.deleted and matches(self._write.key)
            if self._write is not None and writing:
                self._write.deleted = True
            self._changed.notify_all()
        return writing or bool(gone)

    def delete_tenant(self, tenant: str) -> int:
        """Delete a tenant from the store, once no deleted entry is being written; return how many entries it held."""
        with self._changed:
            self._changed.wait_for(lambda: self._write is None or not self._write.deleted)
        return self.store.delete_tenant(tenant)

    def drain(self, timeout: float | None) -> bool:
        """Wait until the queue is empty and its last entry written; False if that takes more than `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and self._write is None, timeout)

    def close(self) -> None:
        """Drop waiting entries, end the thread, and close the store. If the thread is writing, it closes the store."""
        with self._changed:
            lost, size = len(self._waiting), sum(map(len, self._waiting.values()))
            self._counts.dropped += lost
            self._bytes -= size
            self._waiting.clear()
            self._closed = True
            busy, self._close_late = self._write, self._write is not None
            thread = self._thread
            self._changed.notify_all()
        if busy is not None:
            text = "%s was closed while it is writing: %d entries (%d bytes) were not written and are lost"
            text += "; another of %d bytes is lost if the process ends before it is written"
            _log.warning(text, self._label, lost, size, len(busy.blob))
            return
        if lost:
            _log.warning("%s was closed: %d entries (%d bytes) were not written and are lost", self._label, lost, size)
        if thread is not None:
            thread.join()
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
            counted.queued += len(self._waiting) + (self._write is not None)
        return counters

    def failed(self, error: Exception) -> None:
        """Count a failed copy and log the first one. It is not raised to the caller of `put` or `get`."""
        if not isinstance(error, StoreError):  # a store counts the StoreErrors that it raises
            with self._changed:
                self._counts.errors += 1
        self._warn("failed", "a copy was not written: %s", error)

    def _start(self) -> bool:
        """Start the thread if necessary; return whether it runs. The system or a process exit may prevent it."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=f"cuvee {self._label}", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                return False
            self._thread = thread
        return True

    def _run(self) -> None:
        while self._step():
            pass
        if self._close_late:
            try:
                self.store.close()
            except Exception as error:
                self.failed(error)

    def _step(self) -> bool:
        """Write one entry; False once the tier is closed. One call per entry, so that no blob stays referenced."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if not self._waiting:
                return False
            key = next(iter(self._waiting))
            write = self._write = _Write(key, self._waiting.pop(key))
        self._attempt(lambda: self.store.put(write.key, write.blob))
        with self._changed:
            if not write.deleted:
                self._finish(write)
                return True
        self._attempt(lambda: self.store.delete(write.key))
        with self._changed:
            self._finish(write)
        return True

    def _attempt(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:
            self.failed(error)

    def _finish(self, write: _Write) -> None:
        self._write = None
        self._bytes -= len(write.blob)
        self._changed.notify_all()
