"""Stores for tests of the code above stores: dicts whose operations can be made to fail, wait or lie."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from cuvee.integrations.stores.base import Store, StoreError, TierCounters, check_key


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

    def missed(self, keys: int) -> None:
        self._counters.misses += keys

    def delete(self, key: str) -> bool:
        self._begin("delete")
        return self.entries.pop(key, None) is not None

    def delete_tenant(self, tenant: str) -> int:
        mine = [key for key in self.entries if key.startswith(f"{tenant}/")]
        return sum(self.entries.pop(key, None) is not None for key in mine)

    def counters(self) -> dict[str, TierCounters]:
        return {self.name: self._counters}


class FakeStore(DictStore):
    """A `DictStore` with one call per `get_many`, as a guard or a tier sees one. It records what it is asked for.

    Attributes:
        before_call, after_call: by operation, what is called; may raise or wait.
        read_fault, write_fault: raised by operations that read, and that write; a StoreError is counted, as stores do.
        refuse: whether puts are given up.
        flushed: the answer of `flush`.
        tier: the counters.
    """

    def __init__(self, name: str = "fake", shared: bool = False) -> None:
        super().__init__()
        self.name, self.shared, self.tier = name, shared, self._counters
        self.before_call: dict[str, Callable[[], object]] = {}
        self.after_call: dict[str, Callable[[], object]] = {}
        self.read_fault: BaseException | None = None
        self.write_fault: BaseException | None = None
        self.refuse, self.flushed = False, True
        self._asked: list[tuple[str, ...]] = []

    def asked(self, operation: str) -> list[tuple[str, ...]]:
        """Return the keys or the tenant of each call of an operation so far."""
        return [tuple(keys) for name, *keys in self._asked if name == operation]

    def _call(self, operation: str, *keys: str) -> None:
        with self._lock:
            self._asked.append((operation, *keys))
        self._begin(operation)
        self.before_call.get(operation, lambda: None)()
        reads, ends = operation in ("get_many", "contains"), operation in ("flush", "close")
        fault = None if ends else self.read_fault if reads else self.write_fault
        if isinstance(fault, StoreError):
            self.tier.errors += 1
        if fault is not None:
            raise fault

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        for key in keys:
            check_key(key)
        self._call("get_many", *keys)
        found = [self.entries.get(key) for key in keys]
        self.after_call.get("get_many", lambda: None)()
        return found

    def put(self, key: str, blob: bytes) -> bool:
        check_key(key)
        self._call("put", key)
        if not self.refuse:
            self.entries[key] = blob
        return not self.refuse

    def contains(self, keys: Sequence[str]) -> list[bool]:
        self._call("contains", *keys)
        return [key in self.entries for key in keys]

    def delete(self, key: str) -> bool:
        self._call("delete", key)
        return self.entries.pop(key, None) is not None

    def delete_tenant(self, tenant: str) -> int:
        self._call("delete_tenant", tenant)
        return super().delete_tenant(tenant)

    def counters(self) -> dict[str, TierCounters]:
        return {self.name: replace(self.tier)}

    def flush(self, timeout: float | None = None) -> bool:
        self._call("flush")
        return self.flushed

    def close(self) -> None:
        self._call("close")


class Held(threading.Event):
    """A call that waits until it is set; `begun` once one waits."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Event()

    def __call__(self) -> str:
        self.begun.set()
        assert self.wait(60)
        return "late"

    def reached(self) -> None:
        assert self.begun.wait(60)


def hold(store: DictStore, *operations: str, once: bool = False) -> Held:
    """Let operations of a store hang until the event is set; all of them if none is named. `once`: only the first."""
    held, first = Held(), threading.Lock()

    def wait(called: str) -> None:
        if (called in operations or not operations) and (not once or first.acquire(blocking=False)):
            held()

    store.before = wait
    return held
