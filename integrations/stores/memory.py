"""Blobs in this process's RAM. The least recently used entry is evicted first, and refinements sooner."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from cuvee.codec.part_keys import part_number
from cuvee.codec.support.forks import tell_after_fork
from cuvee.integrations.stores.base import (
    MAX_ENTRY_BYTES,
    PART_WEIGHTS,
    Store,
    TierCounters,
    check_key,
    check_max_bytes,
    check_max_entry,
    check_max_tenant,
    check_tenant,
)


class _Order:
    """Keys in the order of their last use, and which of them to evict next. The age of a key counts uses of all keys.

    `_refinements` holds the keys of refinements once more, by number. The oldest key of all goes first unless a
    refinement that was used later has a larger age x weight, and for each number only the oldest can.
    """

    def __init__(self) -> None:
        self._uses: OrderedDict[str, int] = OrderedDict()  # key -> the clock at its last use
        self._refinements: dict[int, OrderedDict[str, None]] = {}
        self._clock = 0

    def __iter__(self) -> Iterator[str]:
        return iter(self._uses)

    def __len__(self) -> int:
        return len(self._uses)

    def use(self, key: str) -> None:
        """Add a key, or mark it as most recently used."""
        self._clock = now = self._clock + 1
        uses = self._uses
        uses[key] = now
        uses.move_to_end(key)
        if number := part_number(key):
            refinements = self._refinements.setdefault(number, OrderedDict())
            refinements[key] = None
            refinements.move_to_end(key)

    def remove(self, key: str) -> None:
        """Remove a key that is present."""
        del self._uses[key]
        if number := part_number(key):
            del self._refinements[number][key]
            if not self._refinements[number]:
                del self._refinements[number]

    def next_out(self) -> str:
        """Return the key with the largest age x weight; there must be one."""
        oldest = next(iter(self._uses))
        if not self._refinements:
            return oldest
        return max(oldest, *(next(iter(keys)) for keys in self._refinements.values()), key=self._weighted_age)

    def _weighted_age(self, key: str) -> int:
        return (self._clock - self._uses[key]) * PART_WEIGHTS[part_number(key)]


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Cache:
    """Entries and the order of their use. `handles` counts the open `MemoryStore`s that use them.

    If each tenant has a budget, `tenant_orders` holds the order of each tenant's keys, and `tenant_used` its bytes.
    """

    max_bytes: int
    max_tenant: int | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    entries: dict[str, bytes] = field(default_factory=dict)
    order: _Order = field(default_factory=_Order)
    used: int = 0
    handles: int = 0
    tenant_orders: dict[str, _Order] = field(default_factory=dict)
    tenant_used: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        tell_after_fork(self)

    def after_fork(self) -> None:
        """Keep the entries, and count them again, because another thread may have been changing them."""
        self.lock = threading.Lock()
        entries, self.entries, self.used = self.entries, {}, 0
        order, self.order = self.order, _Order()
        self.tenant_orders, self.tenant_used = {}, {}
        for key in dict.fromkeys([*order, *entries]):
            if key in entries:
                self.add(key, entries[key])

    def add(self, key: str, blob: bytes) -> None:
        """Add an entry whose key is not present."""
        self.entries[key] = blob
        size = len(key) + len(blob)
        self.used += size
        if self.max_tenant is not None:
            tenant = _tenant(key)
            if tenant not in self.tenant_orders:
                self.tenant_orders[tenant] = _Order()
            self.tenant_used[tenant] = self.tenant_used.get(tenant, 0) + size
        self.use(key)

    def use(self, key: str) -> None:
        """Mark an entry as most recently used."""
        self.order.use(key)
        if self.max_tenant is not None:
            self.tenant_orders[_tenant(key)].use(key)

    def pop(self, key: str) -> bool:
        """Remove an entry; return whether it was present."""
        blob = self.entries.pop(key, None)
        if blob is None:
            return False
        self.order.remove(key)
        size = len(key) + len(blob)
        self.used -= size
        if self.max_tenant is not None:
            tenant = _tenant(key)
            self.tenant_orders[tenant].remove(key)
            self.tenant_used[tenant] -= size
            if not len(self.tenant_orders[tenant]):
                del self.tenant_orders[tenant], self.tenant_used[tenant]
        return True

    def make_room(self, key: str, size: int) -> int:
        """Evict until `size` more bytes fit, first from the tenant of `key`; return how many entries were evicted."""
        evicted, tenant = 0, _tenant(key)
        while self.max_tenant is not None and self.tenant_used.get(tenant, 0) + size > self.max_tenant:
            self.pop(self.tenant_orders[tenant].next_out())
            evicted += 1
        while self.used + size > self.max_bytes:
            self.pop(self.order.next_out())
            evicted += 1
        return evicted

    def clear(self) -> None:
        """Remove all entries."""
        self.entries.clear()
        self.order = _Order()
        self.tenant_orders.clear()
        self.tenant_used.clear()
        self.used = 0


def _tenant(key: str) -> str:
    return key.partition("/")[0]


class _ProcessWide:
    """The caches of all `process_wide` stores, by budgets. The lock also guards the `handles` of every cache."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.caches: dict[tuple[int, int | None], _Cache] = {}
        tell_after_fork(self)

    def after_fork(self) -> None:
        self.lock = threading.Lock()


_process_wide = _ProcessWide()


class MemoryStore(Store):
    """Blobs in RAM, kept by reference and never copied. The budget counts the bytes of blobs and keys.

    The least recently used entry is evicted first; refinements are evicted sooner (`base.PART_WEIGHTS`).

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
            budgets. The entries are released when the last of these stores is closed.
        max_entry: largest blob, in bytes.
        max_tenant_bytes: budget of each tenant, kept by evicting the tenant's own entries; None means no limit.

    Raises:
        InputError: an argument is out of range.
    """

    name = "memory"
    shared = False

    def __init__(
        self,
        max_bytes: int,
        *,
        process_wide: bool = False,
        max_entry: int = MAX_ENTRY_BYTES,
        max_tenant_bytes: int | None = None,
    ) -> None:
        check_max_bytes(max_bytes)
        budgets = max_bytes, check_max_tenant(max_tenant_bytes, max_bytes)
        self._max_entry = check_max_entry(max_entry)
        self._counters = TierCounters()
        self._closed = False
        with _process_wide.lock:
            self._cache = _Cache(*budgets)
            if process_wide:
                self._cache = _process_wide.caches.setdefault(budgets, self._cache)
            self._cache.handles += 1

    def get(self, key: str) -> bytes | None:
        """Return the blob of `key`; None if it is not there."""
        check_key(key)
        with self._cache.lock:
            blob = None if self._closed else self._cache.entries.get(key)
            if blob is not None:
                self._cache.use(key)
            self._counters.answer(blob)
            return blob

    def put(self, key: str, blob: bytes) -> bool:
        """Keep `blob`, evicting other entries; False if it exceeds the budget or `max_entry`."""
        check_key(key)
        # This does not copy `bytes`. Any other buffer is copied, because the caller may still change it.
        blob = bytes(blob)
        size = len(key) + len(blob)
        cache, counters = self._cache, self._counters
        with cache.lock:
            largest = cache.max_bytes if cache.max_tenant is None else cache.max_tenant
            if self._closed or size > largest or len(blob) > self._max_entry:
                counters.dropped += 1
                return False
            cache.pop(key)
            counters.evictions += cache.make_room(key, size)
            cache.add(key, blob)
            counters.puts += 1
            counters.put_bytes += len(blob)
            return True

    def contains(self, keys: Sequence[str]) -> list[bool]:
        """Return whether each key is there now."""
        for key in keys:
            check_key(key)
        with self._cache.lock:
            return [not self._closed and key in self._cache.entries for key in keys]

    def delete(self, key: str) -> bool:
        """Delete an entry; return whether it was there."""
        check_key(key)
        with self._cache.lock:
            return not self._closed and self._cache.pop(key)

    def delete_tenant(self, tenant: str) -> int:
        """Delete every entry of a tenant; return how many there were. This scans all keys."""
        prefix = check_tenant(tenant) + "/"
        with self._cache.lock:
            keys = [] if self._closed else [key for key in self._cache.entries if key.startswith(prefix)]
            for key in keys:
                self._cache.pop(key)
            return len(keys)

    def keys(self, tenant: str) -> Iterator[str]:
        """Yield the keys of a tenant's entries, as they are now."""
        prefix = check_tenant(tenant) + "/"
        with self._cache.lock:
            keys = [] if self._closed else [key for key in self._cache.entries if key.startswith(prefix)]
        yield from keys

    def counters(self) -> dict[str, TierCounters]:
        """Return a snapshot. `entries` and `bytes` are exact; `bytes` includes the keys."""
        with self._cache.lock:
            entries, used = (0, 0) if self._closed else (len(self._cache.entries), self._cache.used)
            return {self.name: replace(self._counters, entries=entries, bytes=used)}

    def close(self) -> None:
        """Release the entries unless another open store shares them."""
        cache = self._cache
        with _process_wide.lock, cache.lock:
            if self._closed:
                return
            self._closed = True
            cache.handles -= 1
            if cache.handles == 0:
                cache.clear()
