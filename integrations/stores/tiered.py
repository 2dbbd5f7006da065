"""Several stores as one, such as RAM in front of disk in front of Redis.

    put ──▶ tier 0                      at once
       └──▶ queue ──thread──▶ tier 1    write-behind: the caller never waits for a lower tier
       └──▶ queue ──thread──▶ tier 2
    get ──▶ tier 0, queue, tier 1, queue, tier 2: each is asked only for the keys that are still missing
            entries found in a lower tier are queued for the tiers above it (promotion)

Eight threads empty each queue, and no reader waits for a promotion. A deletion removes the puts in the queues, and
waits for those that a thread is writing. An entry that was read before a deletion ended is not promoted.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from cuvee.codec.errors import InputError
from cuvee.codec.support.once import Once
from cuvee.integrations.stores.base import Store, StoreError, TierCounters, check_tenant, numbered
from cuvee.integrations.stores.threads import ThreadPool

_log = logging.getLogger(__name__)

WRITERS = 8  # puts in flight per tier, since each may wait for a network
QUEUE_BYTES = 256 << 20  # that wait or are written, per tier; an entry that does not fit is dropped for that tier
DRAIN_SECONDS = 10.0


class TieredStore(Store):
    """Stores of different speeds as one. The fastest is asked first; the slower ones get copies in the background.

    If a lower tier fails to store a copy, the failure is counted in that tier and not raised. Any other failure of a
    tier is raised, as the contract of `Store` says; wrap tiers that may fail in a `GuardedStore`.

    A process that ends without `close` loses at most the queued entries.

        >>> from cuvee.integrations.stores.memory import MemoryStore
        >>> small, large = MemoryStore(1000), MemoryStore(1_000_000)
        >>> store = TieredStore([small, large])
        >>> store.put("ab/01", bytes(600)), store.put("ab/02", bytes(600)), store.flush()
        (True, True, True)
        >>> store.contains(["ab/01", "ab/02"]), small.contains(["ab/01", "ab/02"])
        ([True, True], [False, True])
        >>> store.close()

    Args:
        stores: at least one store, fastest first, none of them a `TieredStore`. They are closed with this store.

    Raises:
        InputError: `stores` is empty, or holds what is not a store, as a URL.
    """

    name = "tiered"

    def __init__(self, stores: Sequence[Store]) -> None:
        if not stores:
            raise InputError("stores: must hold at least one store, got none")
        given: Sequence[object] = stores
        if other := [type(store).__name__ for store in given if not isinstance(store, Store)]:
            raise InputError(f"stores: must hold stores, got {other[0]}: open_store(URL) makes one")
        self.shared = any(store.shared for store in stores)
        names = numbered(store.name for store in stores)
        self._tiers = [_Tier(store, level, names[level]) for level, store in enumerate(stores)]
        self._closed = False
        self._epoch = 0  # the number of deletions that have ended
        self._deleting = 0
        self._lock = threading.Lock()

    @property
    def tiers(self) -> tuple[Store, ...]:
        """The stores, fastest first."""
        return tuple(tier.store for tier in self._tiers)

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the blob of each key. Each tier is asked once, for the keys that the tiers before it lack."""
        epoch = self._epoch
        found: dict[str, bytes] = {}
        for level, here in self._found(keys, self._tiers, lambda store, some: store.get_many(some), True):
            if level and here:
                self._promote(here, level, epoch)
            found |= here
        return [found.get(key) for key in keys]

    def why_missing(self, key: str) -> str:
        """Return why each tier that has a reason gave no entry."""
        reasons = ((tier.name, tier.store.why_missing(key)) for tier in self._tiers)
        return "; ".join(f"{reason} (tier {name})" for name, reason in reasons if reason)

    def put(self, key: str, blob: bytes) -> bool:
        """Store `blob` in tier 0 and queue a copy for each other tier; False if none of them accepted it."""
        first, *others = self._tiers
        if first.look([key], count=False):  # an older promotion
            first.withdraw(lambda other: other == key)
        kept = first.store.put(key, blob)
        for tier in others:
            kept = tier.offer(key, blob) or kept
        return kept

    def contains(self, keys: Sequence[str]) -> list[bool]:
        """Return whether each key is in any tier or queue."""
        found = dict(self._levels(keys, self._tiers))
        return [key in found for key in keys]

    def missed(self, keys: int) -> None:
        """Count this many keys as misses of every tier."""
        for tier in self._tiers:
            tier.store.missed(keys)

    def takes_puts(self) -> bool:
        """Return whether any tier would attempt a put now."""
        return any(tier.store.takes_puts() for tier in self._tiers)

    def locate(self, keys: Sequence[str]) -> list[str]:
        """Return the name of the first tier that has each key, in its store or queue; the last tier is not asked."""
        found = dict(self._levels(keys, self._tiers[:-1]))
        return [self._tiers[found.get(key, -1)].name for key in keys]

    def delete(self, key: str) -> bool:
        """Delete an entry from all tiers and queues; return whether any had it.

        Raises:
            StoreError: a tier failed; the deletion was attempted in all tiers.
        """
        return any(self._delete(lambda other: other == key, lambda store: store.delete(key)))

    def delete_tenant(self, tenant: str) -> int:
        """Delete every entry of a tenant from all tiers and queues; return how many copies the tiers held.

        Raises:
            StoreError: a tier failed; the deletion was attempted in all tiers.
        """
        prefix = f"{check_tenant(tenant)}/"
        deleted = self._delete(lambda key: key.startswith(prefix), lambda store: store.delete_tenant(tenant))
        return sum(deleted[1:])

    def keys(self, tenant: str) -> Iterator[str]:
        """Yield the keys of a tenant's entries in any tier. Entries that only a queue has are left out."""
        seen: set[str] = set()
        for tier in self._tiers:
            for key in tier.store.keys(tenant):
                if key not in seen:
                    seen.add(key)
                    yield key

    def counters(self) -> dict[str, TierCounters]:
        """Return the counters of each tier, including hits in its queue. A second "redis" is named "redis-2"."""
        return {tier.name: tier.counters() for tier in self._tiers}

    def report_overdue(self, operation: str, seconds: float) -> None:
        """Report the calls to every tier. The tier that hangs recognizes its own calls."""
        for tier in self._tiers:
            tier.store.report_overdue(operation, seconds)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait at most `timeout` seconds until all queues are empty and all tiers flushed; return whether they are."""
        deadline = None if timeout is None else time.monotonic() + timeout

        def left() -> float | None:
            return None if deadline is None else max(0.0, deadline - time.monotonic())

        # A list, so that every tier is flushed even if another one fails.
        done = [tier.drain(left()) and tier.store.flush(left()) for tier in self._tiers]
        return all(done)

    def close(self, timeout: float = DRAIN_SECONDS) -> None:
        """Write queued entries for at most `timeout` seconds, then close the tiers. Lost entries are logged."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        with ExitStack() as stack:  # closes every tier even if another one raises
            for tier in reversed(self._tiers):
                stack.callback(tier.close)
            self.flush(timeout)

    def _found(
        self, keys: Sequence[str], tiers: Sequence[_Tier], ask: Callable[[Store, list[str]], list[Any]], count: bool
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Ask each tier for the keys that those before it lack; yield its number, and what its queue and store have."""
        missing = list(dict.fromkeys(keys))
        for level, tier in enumerate(tiers):
            if not missing:
                break
            here: dict[str, Any] = {**tier.look(missing, count)}
            if rest := [key for key in missing if key not in here]:
                answers = zip(rest, ask(tier.store, rest), strict=True)
                here |= {key: answer for key, answer in answers if answer is not None and answer is not False}
            missing = [key for key in missing if key not in here]
            yield level, here

    def _levels(self, keys: Sequence[str], tiers: Sequence[_Tier]) -> Iterator[tuple[str, int]]:
        """Yield each key that some tier has, and the number of the first of them."""
        for level, here in self._found(keys, tiers, lambda store, some: store.contains(some), False):
            yield from dict.fromkeys(here, level).items()

    def _promote(self, entries: dict[str, bytes], level: int, epoch: int) -> None:
        """Queue entries of tier `level` for the tiers above it, unless a deletion may concern them.

        A deletion that is running, or that ended since `epoch` was read, may have deleted an entry after it was read;
        then nothing is promoted. One that begins later removes what is queued here.
        """
        with self._lock:
            if not self._deleting and self._epoch == epoch:
                for tier in self._tiers[:level]:
                    for key, blob in entries.items():
                        tier.offer(key, blob)

    def _delete(self, matches: Callable[[str], bool], work: Callable[[Store], int]) -> list[int]:
        """Return whether any queue held matching entries, and what `work` returns of each tier.

        A tier that fails keeps nothing from the others; then the first failure is raised.
        """
        with self._lock:
            self._deleting += 1
        failures: list[Exception] = []
        try:
            queued = [tier.withdraw(matches) for tier in self._tiers]
            done = [int(any(queued))]
            for tier in self._tiers:
                try:
                    done.append(work(tier.store))
                except Exception as error:
                    failures.append(error)
        finally:
            with self._lock:
                self._deleting -= 1
                self._epoch += 1
        if failures:
            raise failures[0]
        return done


class _Tier:
    """A store, its write-behind queue, and the threads that empty the queue. They start as entries arrive.

    No two threads write the same key, so the last put of a key wins. `_counts`: events that do not reach the store.
    """

    def __init__(self, store: Store, level: int, name: str) -> None:
        self.store, self.name = store, name
        self._label = f"cuvee tier {level} ({store.name})"
        self._counts = TierCounters()
        self._once = Once(_log)
        self._threads = ThreadPool(WRITERS, self._label, math.inf)
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

    def counters(self) -> TierCounters:
        """Return the counters of the store, with the events of the queue added."""
        counted = self.store.counters().get(self.store.name, TierCounters())
        with self._changed:
            counted.hits += self._counts.hits
            counted.hit_bytes += self._counts.hit_bytes
            counted.errors += self._counts.errors
            counted.dropped += self._counts.dropped
            counted.queued += len(self._waiting) + len(self._writing)
        return counted

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
