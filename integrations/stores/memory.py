"""Blobs in this process's RAM, least recently used out first."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from cuvee.codec.errors import InputError
from cuvee.integrations.stores.base import (
    MAX_ENTRY_BYTES,
    Store,
    TierCounters,
    check_key,
    check_max_entry,
    check_max_tenant,
    check_tenant,
)
from cuvee.integrations.stores.forks import tell_after_fork


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Cache:
    """Entries, least recently used first, with the handles (`MemoryStore`) that share them.

    With a budget for each tenant, `own` has the keys of each in the same order, and `own_used` its bytes.
    """

    max_bytes: int
    max_tenant: int | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    entries: OrderedDict[str, bytes] = field(default_factory=OrderedDict)
    used: int = 0
    handles: int = 0
    own: dict[str, OrderedDict[str, None]] = field(default_factory=dict)
    own_used: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        tell_after_fork(self)

    def after_fork(self) -> None:
        """The entries stay; another thread may have been at them, so they are counted anew."""
        self.lock = threading.Lock()
        entries, self.entries, self.used = self.entries, OrderedDict(), 0
        self.own, self.own_used = {}, {}
        for key, blob in entries.items():
            self.add(key, blob)

    def add(self, key: str, blob: bytes) -> None:
        """Keep an entry that is not there."""
        self.entries[key] = blob
        size = len(key) + len(blob)
        self.used += size
        if self.max_tenant is not None:
            tenant = _tenant(key)
            self.own.setdefault(tenant, OrderedDict())[key] = None
            self.own_used[tenant] = self.own_used.get(tenant, 0) + size

    def use(self, key: str) -> None:
        """Note that an entry was used."""
        self.entries.move_to_end(key)
        if self.max_tenant is not None:
            self.own[_tenant(key)].move_to_end(key)

    def pop(self, key: str) -> bool:
        blob = self.entries.pop(key, None)
        if blob is None:
            return False
        size = len(key) + len(blob)
        self.used -= size
        if self.max_tenant is not None:
            tenant = _tenant(key)
            del self.own[tenant][key]
            self.own_used[tenant] -= size
            if not self.own[tenant]:
                del self.own[tenant], self.own_used[tenant]
        return True

    def make_room(self, key: str, size: int) -> int:
        """Evict what `size` bytes more under `key` take, of their tenant first; how many entries that were."""
        evicted, tenant = 0, _tenant(key)
        while self.max_tenant is not None and self.own_used.get(tenant, 0) + size > self.max_tenant:
            self.pop(next(iter(self.own[tenant])))
            evicted += 1
        while self.used + size > self.max_bytes:
            self.pop(next(iter(self.entries)))
            evicted += 1
        return evicted

    def clear(self) -> None:
        self.entries.clear()
        self.own.clear()
        self.own_used.clear()
        self.used = 0


def _tenant(key: str) -> str:
    return key.partition("/")[0]


# What `memory://` URLs of this process share, by budgets; guarded by the lock.
_shared: dict[tuple[int, int | None], _Cache] = {}
_shared_lock = threading.Lock()


def _renew_shared_lock() -> None:
    global _shared_lock  # noqa: PLW0603 - of a child that was forked while another thread held it
    _shared_lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_shared_lock)


class MemoryStore(Store):
    """Blobs by reference (never copied), with a budget for their bytes and those of their keys.

    An entry larger than the whole budget, or than `max_entry`, is given up (counted `dropped`). The counters are this
    object's own, also where the entries are shared; an eviction counts where the put was that caused it. A closed store
    keeps nothing.

    Args:
        max_bytes: the budget.
        shared: share the entries with every other open store of this process that has `shared` and the same budgets;
            they go when the last one closes.
        max_entry: bytes of a blob.
        max_tenant_bytes: budget of each tenant, kept at the expense of its own entries; None for none.

    Raises:
        InputError: an argument is out of range.
    """

    name = "memory"
    shared = False

    def __init__(
        self,
        max_bytes: int,
        *,
        shared: bool = False,
        max_entry: int = MAX_ENTRY_BYTES,
        max_tenant_bytes: int | None = None,
    ) -> None:
        if max_bytes < 1:
            raise InputError(f"max_bytes: must be a positive number of bytes, got {max_bytes!r}")
        self._max_entry = check_max_entry(max_entry)
        self._counters = TierCounters()
        self._closed = False
        with _shared_lock:
            budgets = max_bytes, check_max_tenant(max_tenant_bytes, max_bytes)
            self._cache = _shared.setdefault(budgets, _Cache(*budgets)) if shared else _Cache(*budgets)
            self._cache.handles += 1

    def get(self, key: str) -> bytes | None:
        """The blob of `key`; None if it is not there."""
        check_key(key)
        with self._cache.lock:
            blob = None if self._closed else self._cache.entries.get(key)
            if blob is not None:
                self._cache.use(key)
            self._counters.answer(blob)
            return blob

    def put(self, key: str, blob: bytes) -> bool:
        """Keep `blob`, evicting what was not used for longest; False if it is larger than the budget."""
        check_key(key)
        # No copy of bytes; a buffer that the caller may still change is copied.
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
        """Whether each key is there now."""
        for key in keys:
            check_key(key)
        with self._cache.lock:
            return [not self._closed and key in self._cache.entries for key in keys]

    def delete(self, key: str) -> bool:
        """Delete an entry; whether it was there."""
        check_key(key)
        with self._cache.lock:
            return not self._closed and self._cache.pop(key)

    def delete_tenant(self, tenant: str) -> int:
        """Delete every entry of a tenant; how many there were. Looks at every key."""
        prefix = check_tenant(tenant) + "/"
        with self._cache.lock:
            keys = [] if self._closed else [key for key in self._cache.entries if key.startswith(prefix)]
            for key in keys:
                self._cache.pop(key)
            return len(keys)

    def counters(self) -> dict[str, TierCounters]:
        """A snapshot; `entries` and `bytes` (those of keys and blobs) are exact."""
        with self._cache.lock:
            entries, used = (0, 0) if self._closed else (len(self._cache.entries), self._cache.used)
            return {self.name: replace(self._counters, entries=entries, bytes=used)}

    def close(self) -> None:
        """Let go of the entries, unless another open store shares them."""
        cache = self._cache
        with _shared_lock, cache.lock:
            if self._closed:
                return
            self._closed = True
            cache.handles -= 1
            if cache.handles == 0:
                cache.clear()
