"""A store for tests of the code above stores: a dict whose operations can be made to fail, wait or lie."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from cuvee.integrations.stores.base import Store, TierCounters, check_key


class DictStore(Store):
    """Entries in a dict.

    Attributes:
        entries: the entries; tests may change them.
        before: called with the operation's name before every operation; may raise or wait.
        calls: the names of the operations so far.
    """

    name = "memory"
    shared = False

    def __init__(self) -> None:
        self.entries: dict[str, bytes] = {}
        self.before: Callable[[str], None] = lambda operation: None
        self.calls: list[str] = []
        self._lock = threading.Lock()
        self._counters = TierCounters()

    def _begin(self, operation: str) -> None:
        with self._lock:
            self.calls.append(operation)
        self.before(operation)

    def get(self, key: str) -> bytes | None:
        check_key(key)
        self._begin("get")
        blob = self.entries.get(key)
        if blob is None:
            self._counters.misses += 1
        else:
            self._counters.hits += 1
            self._counters.hit_bytes += len(blob)
        return blob

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        return [self.get(key) for key in keys]

    def put(self, key: str, blob: bytes) -> bool:
        check_key(key)
        self._begin("put")
        self.entries[key] = blob
        self._counters.puts += 1
        self._counters.put_bytes += len(blob)
        return True

    def contains(self, keys: Sequence[str]) -> list[bool]:
        self._begin("contains")
        return [check_key(key) is not None and key in self.entries for key in keys]

    def delete(self, key: str) -> bool:
        self._begin("delete")
        return self.entries.pop(key, None) is not None

    def delete_tenant(self, tenant: str) -> int:
        mine = [key for key in self.entries if key.startswith(f"{tenant}/")]
        return sum(self.entries.pop(key, None) is not None for key in mine)

    def counters(self) -> dict[str, TierCounters]:
        return {self.name: self._counters}


def hold(store: DictStore, operation: str) -> threading.Event:
    """Let an operation of a store hang until the event is set."""
    event = threading.Event()

    def wait(called: str) -> None:
        if called == operation:
            event.wait(60)

    store.before = wait
    return event
