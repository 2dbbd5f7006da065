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

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack

from cuvee.codec.errors import InputError
from cuvee.integrations.stores.base import Store, TierCounters, check_tenant
from cuvee.integrations.stores.write_behind import Tier

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
        stores: at least one store, fastest first. They are closed with this store.

    Raises:
        InputError: `stores` is empty.
    """

    name = "tiered"

    def __init__(self, stores: Sequence[Store]) -> None:
        if not stores:
            raise InputError("stores: must hold at least one store, got none")
        self.shared = any(store.shared for store in stores)
        self._tiers = [Tier(store, level) for level, store in enumerate(stores)]
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
        missing = list(dict.fromkeys(keys))
        for level, tier in enumerate(self._tiers):
            if not missing:
                break
            here = tier.look(missing, count=True)
            if ask := [key for key in missing if key not in here]:
                blobs = tier.store.get_many(ask)
                here |= {key: blob for key, blob in zip(ask, blobs, strict=True) if blob is not None}
            if level and here:
                self._promote(here, level, epoch)
            found |= here
            missing = [key for key in missing if key not in found]
        return [found.get(key) for key in keys]

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
        found = self._find(keys, self._tiers)
        return [key in found for key in keys]

    def locate(self, keys: Sequence[str]) -> list[str]:
        """Return the name of the first tier that has each key, in its store or queue; the last tier is not asked."""
        names: list[str] = []
        for tier in self._tiers:
            names.append(_unique(tier.store.name, names))
        found = self._find(keys, self._tiers[:-1])
        return [names[found.get(key, -1)] for key in keys]

    def _find(self, keys: Sequence[str], tiers: Sequence[Tier]) -> dict[str, int]:
        """Return the number of the first of `tiers` that has each key; keys that none has are left out."""
        found: dict[str, int] = {}
        missing = list(dict.fromkeys(keys))
        for level, tier in enumerate(tiers):
            if not missing:
                break
            here = tier.look(missing, count=False)
            ask = [key for key in missing if key not in here]
            there = tier.store.contains(ask) if ask else []
            found |= dict.fromkeys([*here, *(key for key, is_there in zip(ask, there, strict=True) if is_there)], level)
            missing = [key for key in missing if key not in found]
        return found

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
        counters: dict[str, TierCounters] = {}
        for tier in self._tiers:
            for name, counted in tier.counters().items():
                counters[_unique(name, counters)] = counted
        return counters

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


def _unique(name: str, others: Collection[str]) -> str:
    """Return a name that no other tier has: a second "redis" is "redis-2"."""
    unique, number = name, 1
    while unique in others:
        number += 1
        unique = f"{name}-{number}"
    return unique
