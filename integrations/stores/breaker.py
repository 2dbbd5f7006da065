"""Circuit breakers between a store that may fail and code that must not: failures become misses, outages cost little.

               failure                     backoff over
    closed ───────────────▶ open: misses ────────────────▶ one probe ── success ──▶ closed
                             ▲                                │
                             └─── failure: backoff doubles ───┘

Reading and writing have separate breakers (M. Nygard, *Release It!*, ch. 5), so that a full disk or read-only
credentials do not cost the hits.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from cuvee.codec.errors import InputError
from cuvee.integrations.stores.base import Store, StoreError, TierCounters
from cuvee.integrations.stores.safe_files import UnusableFolderError

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclass(slots=True)
class _Breaker:
    """The state of one direction, `what`. It is closed while `retry_at`, when the next probe may start, is None."""

    what: str
    meanwhile: str  # what the log says of an outage
    retry_at: float | None = None
    backoff: float = 0.0  # seconds from the last failure to the next probe
    probing: bool = False
    error: str = ""  # by which it was opened last
    closed_at: float = -math.inf  # what began before and fails now belongs to an outage that is over

    def is_open(self, now: float) -> bool:
        """Whether operations are skipped now."""
        return self.retry_at is not None and (self.probing or now < self.retry_at)


@dataclass(slots=True, eq=False)
class _Call:
    """An operation that runs, and has not been counted as a failure."""

    operation: str
    breaker: _Breaker
    began: float
    probe: bool


class GuardedStore(Store):
    """Delegates to `store`, and turns its failures into misses or refused puts, counted as `errors` of its tier.

    A store counts each `StoreError` that it raises; the guard counts all other exceptions. After a failure, operations
    return at once and are counted as `skipped` until the backoff is over. Then one operation, in its caller's thread,
    probes whether the store works again. An outage is logged when it begins and when it ends. An `InputError` is the
    caller's fault and is raised. No lock is held while the store works.

    **The guard does not end an operation that hangs.** Timeouts are the store's task. A file system that hangs (NFS)
    hangs its callers until a waiting thread reports them by `report_overdue`, which counts as a failure. After that, at
    most one probe in each direction hangs.

    Attributes:
        first_backoff, max_backoff: seconds. The backoff doubles with each probe that fails.

    Args:
        store: the store to guard.
        clock: monotonic clock, in seconds.
    """

    first_backoff = 0.5
    max_backoff = 30.0

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self.name, self.shared = store.name, store.shared
        self._store, self._clock = store, clock
        self._reads = _Breaker("reading from", "it counts as empty")
        self._writes = _Breaker("writing to", "nothing is written to it")
        self._errors = self._skipped = 0
        self._calls: set[_Call] = set()
        self._lock = threading.Lock()

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the blob of each key; all None if the store fails."""
        # An empty list needs no store, and would prove nothing as a probe.
        none: list[bytes | None] = [None] * len(keys)
        return self._run("get_many", self._reads, lambda: self._store.get_many(keys), none) if keys else []

    def why_missing(self, key: str) -> str:
        """Return why the store gave no entry: it may be down."""
        with self._lock:
            if self._reads.retry_at is not None:
                return f"was not read, because the {self.name} store failed: {self._reads.error}"
        return self._store.why_missing(key)

    def put(self, key: str, blob: bytes) -> bool:
        """Store `blob` under `key`; False if the put was given up or the store fails."""
        return self._run("put", self._writes, lambda: self._store.put(key, blob), False)

    def contains(self, keys: Sequence[str]) -> list[bool]:
        """Return whether each key is there; all False if the store fails."""
        none = [False] * len(keys)
        return self._run("contains", self._reads, lambda: self._store.contains(keys), none) if keys else []

    def missed(self, keys: int) -> None:
        """Count this many keys as misses of the store."""
        self._store.missed(keys)

    def takes_puts(self) -> bool:
        """Return whether a put would be attempted now, as one is that probes whether an outage is over."""
        with self._lock:
            return not self._writes.is_open(self._clock()) and self._store.takes_puts()

    def delete(self, key: str) -> bool:
        """Delete an entry; False if it was not there or the store fails."""
        return self._run("delete", self._writes, lambda: self._store.delete(key), False)

    def delete_tenant(self, tenant: str) -> int:
        """Delete every entry of a tenant. Even during an outage this is attempted, and failures are raised.

        Raises:
            StoreError: the store failed; some entries may remain.
        """
        try:
            return self._store.delete_tenant(tenant)
        except Exception as error:
            self._count(error)
            raise

    def keys(self, tenant: str) -> Iterator[str]:
        """Yield the keys of a tenant's entries. Even during an outage this is attempted, and failures are raised."""
        return self._store.keys(tenant)

    def counters(self) -> dict[str, TierCounters]:
        """Return the counters of the store, with `errors` and `skipped` of this guard added to its tier."""
        counters = self._store.counters()
        tier = counters.setdefault(self.name, TierCounters())
        with self._lock:
            tier.errors += self._errors
            tier.skipped += self._skipped
        return counters

    def report_overdue(self, operation: str, seconds: float) -> None:
        """Count the calls of `operation` that began `seconds` ago or earlier and still run as failed, once each."""
        with self._lock:
            begun = self._clock() - seconds
            late = [call for call in self._calls if call.operation == operation and call.began <= begun]
        for call in late:
            self._fail(call, TimeoutError(f"{operation} has not ended within {seconds:.3g} s"))

    def flush(self, timeout: float | None = None) -> bool:
        """Flush the store; False if that fails."""
        return self._finish("flushed", lambda: self._store.flush(timeout))

    def close(self) -> None:
        """Close the store. A failure is counted and logged but not raised, because the caller could not handle it."""
        self._finish("closed", self._store.close)

    def _finish(self, done: str, work: Callable[[], object]) -> bool:
        try:
            return work() is not False
        except Exception as error:
            self._count(error)
            _log.warning("cuvee: the %s store could not be %s: %s", self.name, done, _describe(error))
            return False

    def _run(self, operation: str, breaker: _Breaker, work: Callable[[], _T], otherwise: _T) -> _T:
        """Return `work()`, or `otherwise` if it fails or is skipped."""
        with self._lock:
            now, probe = self._clock(), breaker.retry_at is not None
            if breaker.is_open(now):
                self._skipped += 1
                return otherwise
            breaker.probing = probe
            call = _Call(operation, breaker, now, probe)
            self._calls.add(call)
        try:
            answer = work()
            # A put that is given up proves nothing: it may exceed a limit, of which its server was not asked.
            if probe and (operation != "put" or answer):
                self._recover(breaker)
            return answer
        except InputError:
            raise
        except Exception as error:
            self._fail(call, error)
            return otherwise
        finally:
            # InputError and KeyboardInterrupt say nothing about the store, so the next operation probes again.
            with self._lock:
                self._calls.discard(call)
                if probe:
                    breaker.probing = False

    def _fail(self, call: _Call, error: Exception) -> None:
        """Count a call that failed or is given up, once, and open its breaker."""
        breaker = call.breaker
        with self._lock:
            if call not in self._calls:
                return  # it was given up before
            self._calls.discard(call)
            # If many operations run at once, the first failure opens the breaker. The other failures change nothing,
            # and neither does a failure that ends after the outage to which it belongs.
            report = breaker.retry_at is None and call.began >= breaker.closed_at
            if report or call.probe:
                breaker.backoff = min(2 * breaker.backoff or self.first_backoff, self.max_backoff)
                breaker.retry_at, breaker.error = self._clock() + breaker.backoff, _describe(error)
        self._count(error)
        if report:
            told = isinstance(error.__cause__, UnusableFolderError)
            remedy = "" if told else " Check that it is running, reachable and has room."
            _log.warning(
                "cuvee: %s the %s store failed: %s.%s Until that works again, %s. It is tried every %.3g to %.3g s.",
                breaker.what, self.name, _describe(error), remedy, breaker.meanwhile, self.first_backoff,
                self.max_backoff, exc_info=None if isinstance(error, (StoreError, OSError)) else error,
            )  # fmt: skip

    def _recover(self, breaker: _Breaker) -> None:
        with self._lock:
            breaker.retry_at, breaker.backoff, breaker.closed_at = None, 0.0, self._clock()
        _log.info("cuvee: %s the %s store works again", breaker.what, self.name)

    def _count(self, error: Exception) -> None:
        if not isinstance(error, (StoreError, InputError)):
            with self._lock:
                self._errors += 1


def _describe(error: Exception) -> str:
    """Return the message of a `StoreError`, which names the store; for any other error, its type and message."""
    text = " ".join(str(error).split()).removesuffix(".")
    return text if isinstance(error, StoreError) else f"{type(error).__name__}: {text}"
