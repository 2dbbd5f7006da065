"""Counters, log messages and errors of a store: every store counts and words the same events in the same way."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from cuvee.codec.errors import CorruptError
from cuvee.integrations.guard import Once
from cuvee.integrations.stores.base import StoreError, TierCounters
from cuvee.integrations.stores.envelope import HEADER_BYTES, ExpiredError, verify
from cuvee.integrations.stores.redaction import scrubbed

_LONGEST_MESSAGE = 1000  # characters of an error's message that are shown


class StoreMonitor:
    """Counts the events of one store and logs each kind of trouble once. Safe to call from several threads.

    Args:
        log: the logger of the store's module.
        label: the beginning of every message, such as "disk store /var/cache/kv".
        secrets: strings that no message may show.
    """

    def __init__(self, log: logging.Logger, label: str, secrets: Sequence[str] = ()) -> None:
        self._label, self._secrets = label, secrets
        self._once = Once(log)
        self._counters = TierCounters()
        self._lock = threading.Lock()

    def count(self, **amounts: int) -> None:
        """Add each amount to the counter of that name in `TierCounters`."""
        with self._lock:
            for name, amount in amounts.items():
                setattr(self._counters, name, getattr(self._counters, name) + amount)

    def answered(self, blobs: Sequence[bytes | None]) -> None:
        """Count the answers of a `get_many`: hits, and misses, which are None."""
        hits = [len(blob) for blob in blobs if blob is not None]
        self.count(hits=len(hits), hit_bytes=sum(hits), misses=len(blobs) - len(hits))

    def verified(
        self, key: str, header: bytes, blob: bytes, ttl: float | None, delete: Callable[[], object]
    ) -> bytes | None:
        """Return the blob of an entry. A bad or expired entry is counted and deleted, and is a miss.

        Args:
            key: the requested key.
            header: the first `HEADER_BYTES` of the entry, as the store returned it.
            blob: the others.
            ttl: seconds an entry lives after it was written; None means forever.
            delete: deletes the entry; may raise a StoreError or an OSError.
        """
        try:
            verify(key, header, blob, ttl)
            return blob
        except ExpiredError:
            self.count(expired=1)
        except CorruptError as problem:
            self.bad(key, problem)
        try:
            delete()
        except (StoreError, OSError) as error:
            self.warn("not deleted", "cannot delete a bad entry; it stays a miss: %s", error)
        return None

    def opened(self, key: str, entry: bytes, ttl: float | None, delete: Callable[[], object]) -> bytes | None:
        """Return the blob in an entry, as `verified` does."""
        return self.verified(key, entry[:HEADER_BYTES], entry[HEADER_BYTES:], ttl, delete)

    def bad(self, key: str, problem: Exception) -> None:
        """Count and report an entry that is deleted because it is bad."""
        self.count(corrupt=1)
        self.warn("bad", "deletes bad entries and counts them as misses; the first: %s: %s", key, problem)

    def stored(self, blob: bytes) -> None:
        """Count a put."""
        self.count(puts=1, put_bytes=len(blob))

    def too_large(self, size: int, limit: int) -> None:
        """Count and report a put that was given up because its `size` exceeds `limit`, both in bytes."""
        self.count(dropped=1)
        text = "drops entries that are too large; the first has %d bytes, the limit (max_entry_mb, max_gb) is %d"
        self.warn("large", text, size, limit)

    def beyond(self, key: str, limit: int) -> None:
        """Count and report an entry of more bytes than are read. It stays, since other stores may allow larger ones."""
        self.count(errors=1)
        text = "does not read entries that are too large: %s has more than the %d bytes that max_entry_mb allows"
        self.warn("beyond", text, key, limit)

    def warn(self, kind: str, message: str, *details: object) -> None:
        """Log the first event of a kind as a warning. Errors among `details` are shown without secrets."""
        shown = [self._shown(part) if isinstance(part, Exception) else part for part in details]
        self._once(kind, "%s: " + message, self._label, *shown)

    def failure(self, error: Exception, hint: str = "", *, with_type: bool = True) -> StoreError:
        """Count an operation that failed; return the error to raise.

        Servers and proxies that do not know AUTH send its arguments back, and with them the password, so the message
        holds no secrets. If there are any, raise the error without its cause.
        """
        self.count(errors=1)
        kind = f"{type(error).__name__}: " if with_type else ""
        return StoreError(f"{self._label}: {kind}{self._shown(error)}{hint}")

    def snapshot(self, entries: int | None = None, held: int | None = None) -> TierCounters:
        """Return the counters now, with the entries and bytes that the store holds, if they are known."""
        with self._lock:
            return replace(self._counters, entries=entries, bytes=held)

    def _shown(self, error: Exception) -> str:
        return scrubbed(error, self._secrets)[:_LONGEST_MESSAGE]
