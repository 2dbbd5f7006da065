"""Several stores as one: RAM in front of disk in front of Redis, say.

    put ──▶ tier 0                      at once
       └──▶ queue ──thread──▶ tier 1    write-behind: the caller never waits for a lower tier
       └──▶ queue ──thread──▶ tier 2
    get ──▶ tier 0, queue, tier 1, queue, tier 2: each is asked only for what is still missing
            what a lower tier has is put into those above it (promotion)

A deletion has to win over copies that are on their way. Queued puts are taken back. A put that a thread is writing is
hidden at once, and deleted as soon as it is written. Nothing is promoted that was read before a deletion ended.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from cuvee.codec.errors import InputError
from cuvee.integrations.stores.base import Store, StoreError, TierCounters, WarnOnce, check_tenant
from cuvee.integrations.stores.forks import tell_after_fork

_log = logging.getLogger(__name__)

DEFAULT_QUEUE_BYTES = 256 << 20
DRAIN_SECONDS = 10.0


@dataclass(slots=True)
class _Write:
    """A put under way in the tier's thread. `deleted` says that a deletion asked for it since it began."""

    key: str
    blob: bytes
    deleted: bool = False


class _Tier:
    """A store, its write-behind queue, and the thread that empties the queue. Tier 0 uses neither queue nor thread.

    The thread starts with the first entry. `_counts` counts what happens to entries before the store sees them.
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
        """Begin with an empty queue and no thread, at the start and in a forked child, which has no threads."""
        self._changed = threading.Condition()
        self._waiting: dict[str, bytes] = {}
        self._write: _Write | None = None
        self._bytes = 0
        self._thread: threading.Thread | None = None

    def offer(self, key: str, blob: bytes) -> bool:
        """Queue a put; it replaces an older one of the same key that still waits. False if it was dropped."""
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
                "the write-behind queue is full (%s bytes): the tier is slower than what is stored. Entries are "
                "dropped for this tier until it catches up; a larger max_queue_bytes drops fewer.",
                f"{self._max_bytes:,}",
            )
        else:
            self._warn("thread", "no thread can be started to write to it: entries are dropped for this tier")
        return False

    def look(self, keys: Sequence[str], count: bool) -> tuple[dict[str, bytes], list[str]]:
        """What the queue holds of `keys`, and which keys to ask the store for.

        A key that is deleted while its entry is written is in neither. Ask the store afterwards, never before: an
        entry leaves the queue only once the store has it.
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
        """Take back queued puts; hide and later delete one that is being written. Return whether there was any."""
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
        """`delete_tenant` of the store, as soon as no deleted entry is still being written."""
        with self._changed:
            self._changed.wait_for(lambda: self._write is None or not self._write.deleted)
        return self.store.delete_tenant(tenant)

    def drain(self, timeout: float | None) -> bool:
        """Wait until the queue is empty and its last entry is written; False if that takes over `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and self._write is None, timeout)

    def close(self) -> None:
        """Give up what waits, end the thread, and close the store. If the thread still writes, it closes the store."""
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
            text = "%s was closed while it writes: %d entries (%d bytes) were not written and are lost"
            text += "; one more of %d bytes is lost if the process ends before it is written"
            _log.warning(text, self._label, lost, size, len(busy.blob))
            return
        if lost:
            _log.warning("%s was closed with %d entries (%d bytes) not written: they are lost", self._label, lost, size)
        if thread is not None:
            thread.join()
        self.store.close()

    def counters(self) -> dict[str, TierCounters]:
        """The counters of the store, with what became of queued entries."""
        counters = self.store.counters()
        own = counters.setdefault(self.store.name, TierCounters())
        with self._changed:
            own.hits += self._counts.hits
            own.hit_bytes += self._counts.hit_bytes
            own.errors += self._counts.errors
            own.dropped += self._counts.dropped
            own.queued += len(self._waiting) + (self._write is not None)
        return counters

    def failed(self, error: Exception) -> None:
        """Count a failed copy, and log the first one. The caller of `put` or `get` never sees it."""
        if not isinstance(error, StoreError):  # a store counts those that it raises
            with self._changed:
                self._counts.errors += 1
        self._warn("failed", "a copy was not written: %s", error)

    def _start(self) -> bool:
        """Start the thread if need be; return whether it runs. The system may limit threads, as does process exit."""
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
        """Write one entry; False once the tier is closed. Each entry is a call of its own, so that no blob is kept."""
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


class TieredStore(Store):
    """Stores of different speeds as one. The fastest answers first; the slower ones get copies in the background.

    If a lower tier fails to take a copy, that is counted there and never reaches the caller. Any other failure of a
    tier is raised, as the contract of `Store` says; wrap tiers that may fail in a `GuardedStore`.

    A process that ends without `close` loses at most what is queued. In a forked child the queues are empty, since the
    parent writes what they hold, and the child's own threads start with its first `put`.

        >>> from cuvee.integrations.stores.memory import MemoryStore
        >>> small, large = MemoryStore(1000), MemoryStore(1_000_000)
        >>> store = TieredStore([small, large])
        >>> store.put("ab/01", bytes(600)), store.put("ab/02", bytes(600)), store.flush()
        (True, True, True)
        >>> store.contains(["ab/01", "ab/02"]), small.contains(["ab/01", "ab/02"])
        ([True, True], [False, True])
        >>> store.close()

    Args:
        stores: fastest first, at least one. They belong to this store and are closed with it.
        max_queue_bytes: limit of each lower tier's queue, counting the entry that is being written. An entry that does
            not fit is dropped for that tier.

    Raises:
        InputError: there is no store, or a queue has no room.
    """

    name = "tiered"

    def __init__(self, stores: Sequence[Store], max_queue_bytes: int = DEFAULT_QUEUE_BYTES) -> None:
        if not stores:
            raise InputError("stores: must be at least one")
        if max_queue_bytes < 1:
            raise InputError(f"max_queue_bytes: must be at least 1, got {max_queue_bytes}")
        self.shared = any(store.shared for store in stores)
        self._tiers = [_Tier(store, level, max_queue_bytes) for level, store in enumerate(stores)]
        self._closed = False
        self._epoch = 0  # deletions that ended
        self._reset()
        tell_after_fork(self)

    def after_fork(self) -> None:
        """Begin with empty queues and no threads: the parent writes what is queued."""
        self._reset()
        for tier in self._tiers:
            tier.reset()

    @property
    def tiers(self) -> tuple[Store, ...]:
        """The stores, fastest first."""
        return tuple(tier.store for tier in self._tiers)

    def get(self, key: str) -> bytes | None:
        """The blob of `key` from the first tier or queue that has it."""
        return self.get_many([key])[0]

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """`get` of each key. A tier is asked once, for what the tiers before it do not have."""
        epoch = self._epoch
        found: dict[str, bytes] = {}
        missing = list(dict.fromkeys(keys))
        for level, tier in enumerate(self._tiers):
            if not missing:
                break
            here, ask = tier.look(missing, count=True)
            if ask:
                blobs = tier.store.get_many(ask)
                here |= {key: blob for key, blob in zip(ask, blobs, strict=True) if blob is not None}
            if level and here:
                self._promote(here, level, epoch)
            found |= here
            missing = [key for key in missing if key not in found]
        return [found.get(key) for key in keys]

    def put(self, key: str, blob: bytes) -> bool:
        """Keep `blob` in tier 0 and queue a copy for each other tier; False if none of them took it."""
        first, *others = self._tiers
        kept = first.store.put(key, blob)
        for tier in others:
            kept = tier.offer(key, blob) or kept
        return kept

    def contains(self, keys: Sequence[str]) -> list[bool]:
        """Whether each key is in any tier or queue."""
        there: set[str] = set()
        missing = list(dict.fromkeys(keys))
        for tier in self._tiers:
            if not missing:
                break
            here, ask = tier.look(missing, count=False)
            there.update(here)
            if ask:
                there.update(key for key, is_there in zip(ask, tier.store.contains(ask), strict=True) if is_there)
            missing = [key for key in missing if key not in there]
        return [key in there for key in keys]

    def delete(self, key: str) -> bool:
        """Delete an entry from all tiers and queues; return whether any had it.

        This does not wait for a thread that is writing the entry: that copy is never seen, and is deleted once written.

        Raises:
            StoreError: a tier failed; the others were asked all the same.
        """
        with self._deletion():
            queued = [tier.forget(lambda other: other == key) for tier in self._tiers]
            return any([*self._in_all(lambda tier: tier.store.delete(key)), *queued])

    def delete_tenant(self, tenant: str) -> int:
        """Delete every entry of a tenant from all tiers and queues; return how many copies the tiers held.

        This waits for threads that are writing one of them, so that all are gone when it returns.

        Raises:
            StoreError: a tier failed; the others were asked all the same.
        """
        prefix = f"{check_tenant(tenant)}/"
        with self._deletion():
            for tier in self._tiers:
                tier.forget(lambda key: key.startswith(prefix))
            return sum(self._in_all(lambda tier: tier.delete_tenant(tenant)))

    def counters(self) -> dict[str, TierCounters]:
        """The counters of each tier. A hit in a queue is a hit of its tier; a second "redis" is called "redis-2"."""
        counters: dict[str, TierCounters] = {}
        for tier in self._tiers:
            for name, own in tier.counters().items():
                unique, number = name, 1
                while unique in counters:
                    number += 1
                    unique = f"{name}-{number}"
                counters[unique] = own
        return counters

    def overdue(self, operation: str, seconds: float) -> None:
        """Tell every tier. The one that hangs recognizes its calls."""
        for tier in self._tiers:
            tier.store.overdue(operation, seconds)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait at most `timeout` seconds until all queues are empty and all tiers flushed; return whether they are."""
        deadline = None if timeout is None else time.monotonic() + timeout

        def left() -> float | None:
            return None if deadline is None else max(0.0, deadline - time.monotonic())

        # A list, so that every tier is flushed whatever the others answer.
        done = [tier.drain(left()) and tier.store.flush(left()) for tier in self._tiers]
        return all(done)

    def close(self, timeout: float = DRAIN_SECONDS) -> None:
        """Write what is queued, for at most `timeout` seconds, then close the tiers. What is lost is logged."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
        with ExitStack() as stack:  # closes every tier, whatever another one raises
            for tier in reversed(self._tiers):
                stack.callback(tier.close)
            self.flush(timeout)

    def _promote(self, entries: dict[str, bytes], level: int, epoch: int) -> None:
        """Put what tier `level` had into the tiers above it, unless a deletion may concern it.

        A deletion that begins later waits for this. One that is under way, or that ended since `epoch` was read, may
        have deleted an entry after it was read; then nothing is promoted.
        """
        with self._changed:
            if self._deleting or self._epoch != epoch:
                return
            self._promoting += 1
        first, *between = self._tiers[:level]
        try:
            for key, blob in entries.items():
                try:
                    first.store.put(key, blob)
                except Exception as error:
                    first.failed(error)
                for tier in between:
                    tier.offer(key, blob)
        finally:
            with self._changed:
                self._promoting -= 1
                self._changed.notify_all()

    @contextmanager
    def _deletion(self) -> Iterator[None]:
        with self._changed:
            self._deleting += 1
        try:
            with self._changed:
                self._changed.wait_for(lambda: not self._promoting)
            yield
        finally:
            with self._changed:
                self._deleting -= 1
                self._epoch += 1

    def _in_all(self, work: Callable[[_Tier], int]) -> list[int]:
        """`work` of every tier. If one fails the rest are still done, and then the first failure is raised."""
        done, failures = [], []
        for tier in self._tiers:
            try:
                done.append(work(tier))
            except Exception as error:
                failures.append(error)
        if failures:
            raise failures[0]
        return done

    def _reset(self) -> None:
        self._changed = threading.Condition()
        self._promoting = self._deleting = 0
