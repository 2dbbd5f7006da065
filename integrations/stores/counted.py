"""The base of the stores that hold entries themselves: arguments are checked, events counted, errors worded alike."""

from __future__ import annotations

import logging
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, TypeVar

from cuvee.codec.errors import CorruptError, InputError
from cuvee.codec.support.once import Once
from cuvee.integrations.stores.base import Store, StoreError, TierCounters, check_key, check_tenant, is_record
from cuvee.integrations.stores.envelope import HEADER_BYTES, ExpiredError, verify
from cuvee.integrations.stores.redaction import scrubbed

_LONGEST_MESSAGE = 1000  # characters of an error's message that are shown
_REASONS = 256  # entries of which it is kept why they were not usable

_T = TypeVar("_T")


class CountedStore(Store):
    """A store whose subclass only moves bytes. Safe to call from several threads if the subclass's methods are.

    Subclasses implement `_read`, `_write`, `_there`, `_remove` and `_pages`, whose arguments have been checked. The
    failures that these raise are counted, and become StoreErrors.

    Attributes:
        failures: the exceptions by which they fail; any other is a bug, and is raised as it is.
        ttl: seconds an entry lives after it was written; None means forever.
        max_entry: bytes of the largest blob; larger ones are neither kept nor read. With its envelope, the default has
            512 MiB: the limit of Redis, and far above the usual size of a chunk.

    Args:
        label: the beginning of every message, such as "disk store /var/cache/kv".
        ttl: see above.
        secrets: strings that no message may show.

    Raises:
        InputError: `ttl` is not above 0.
    """

    failures: type[Exception] = Exception
    max_entry = (512 << 20) - HEADER_BYTES

    def __init__(self, label: str, ttl: float | None = None, secrets: Sequence[str] = ()) -> None:
        if ttl is not None and not ttl > 0:
            raise InputError(f"ttl: must be above 0 seconds, got {ttl!r}")
        self.ttl = ttl
        self._label, self._secrets = label, secrets
        self._once = Once(logging.getLogger(type(self).__module__))
        self._counters = TierCounters()
        self._counting = threading.Lock()
        self._useless: dict[str, tuple[str, bool]] = {}  # by key, the oldest first: why; and whether it is still there

    @abstractmethod
    def _read(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the blob of each key, as `get_many`."""

    @abstractmethod
    def _write(self, key: str, blob: bytes) -> bool:
        """Store a blob of at most `max_entry` bytes, all or nothing; False if it was given up and counted."""

    @abstractmethod
    def _there(self, keys: Sequence[str]) -> list[bool]:
        """Return whether each key is there. An entry that is too large to be read counts as absent, so that a smaller
        one can replace it.
        """

    @abstractmethod
    def _remove(self, keys: Sequence[str]) -> int:
        """Delete entries; return how many were there."""

    @abstractmethod
    def _pages(self, tenant: str) -> Iterator[list[str]]:
        """Yield the keys of a tenant's entries, in pages."""

    def _held(self) -> tuple[int | None, int | None]:
        """Return the number and the bytes of all entries; None if unknown."""
        return None, None

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the blob of each key, verified. A bad or expired entry is deleted, counted, and a miss."""
        blobs = self.attempt(self._read, _checked(keys))
        self._are_good(key for key, blob in zip(keys, blobs, strict=True) if blob is not None)
        counted = [blob for key, blob in zip(keys, blobs, strict=True) if not is_record(key)]
        hits = [len(blob) for blob in counted if blob is not None]
        self._count(hits=len(hits), hit_bytes=sum(hits), misses=len(counted) - len(hits))
        return blobs

    def why_missing(self, key: str) -> str:
        """Return what was wrong with an entry that was read a moment ago."""
        with self._counting:
            return self._useless.get(key, ("",))[0]

    def put(self, key: str, blob: bytes) -> bool:
        """Store `blob` under `key`, replacing an earlier entry; False if it exceeds a limit, or finds no room."""
        check_key(key)
        if len(blob) > self.max_entry:
            return self._too_large(len(blob), self.max_entry)
        if not self.attempt(self._write, key, blob):
            return False
        self._are_good([key])
        if not is_record(key):
            self._count(puts=1, put_bytes=len(blob))
        return True

    def contains(self, keys: Sequence[str]) -> list[bool]:
        """Return whether each key is there now. An expired entry is there until it is read or deleted. One that was of
        no use when it was read, and could not be deleted, is not, so that another can replace it.
        """
        there = self.attempt(self._there, _checked(keys))
        useless = self._useless
        return [is_there and not useless.get(key, ("", False))[1] for key, is_there in zip(keys, there, strict=True)]

    def missed(self, keys: int) -> None:
        """Count this many keys as misses."""
        self._count(misses=keys)

    def delete(self, key: str) -> bool:
        """Delete an entry; return whether it was there."""
        return self.attempt(self._remove, _checked([key])) > 0

    def delete_tenant(self, tenant: str) -> int:
        """Delete every entry of a tenant; return how many there were. Entries that are put meanwhile may stay."""
        return sum(self.attempt(self._remove, page) for page in self._listed(tenant))

    def keys(self, tenant: str) -> Iterator[str]:
        """Yield the keys of a tenant's entries."""
        yield from chain.from_iterable(self._listed(tenant))

    def _listed(self, tenant: str) -> Iterator[list[str]]:
        pages = self._pages(check_tenant(tenant))
        while (page := self.attempt(next, pages, None)) is not None:
            yield page

    def counters(self) -> dict[str, TierCounters]:
        """Return a snapshot."""
        entries, held = self._held()
        with self._counting:
            return {self.name: replace(self._counters, entries=entries, bytes=held)}

    def _count(self, **amounts: int) -> None:
        """Add each amount to the counter of that name in `TierCounters`."""
        with self._counting:
            for name, amount in amounts.items():
                setattr(self._counters, name, getattr(self._counters, name) + amount)

    def _opened(self, key: str, entry: bytes) -> bytes | None:
        """Return the blob in the entry of a key. A bad or expired entry is counted and deleted, and is a miss."""
        return self._verified(key, entry[:HEADER_BYTES], entry[HEADER_BYTES:], partial(self._remove, [key]))

    def _verified(self, key: str, header: bytes, blob: bytes, delete: Callable[[], object]) -> bytes | None:
        """Return the blob of an entry in two parts, as `_opened`."""
        try:
            verify(key, header, blob, self.ttl)
            return blob
        except ExpiredError as expired:
            self._count(expired=1)
            self._discard(key, "has expired", expired, delete)
        except CorruptError as problem:
            self._bad(key, problem, delete)
        return None

    def _bad(self, key: str, problem: Exception, delete: Callable[[], object]) -> None:
        """Count, report and delete an entry that is bad."""
        self._count(corrupt=1)
        self._warn("bad", "deletes bad entries and counts them as misses; the first: %s: %s", key, problem)
        self._discard(key, "was bad", problem, delete)

    def _discard(self, key: str, what: str, problem: Exception, delete: Callable[[], object]) -> None:
        """Delete an entry that is of no use. One that cannot be deleted counts as absent from here on."""
        gone = True
        try:
            delete()
        except self.failures as error:
            gone = False
            self._warn("not deleted", "cannot delete a bad entry; it stays a miss: %s", error)
        self._explain(key, f"{what}, and {'is' if gone else 'cannot be'} deleted: {self._shown(problem)}", not gone)

    def _are_good(self, keys: Iterable[str]) -> None:
        """Note that the entries of these keys are of use."""
        if self._useless:
            with self._counting:
                for key in keys:
                    self._useless.pop(key, None)

    def _too_large(self, size: int, limit: int) -> bool:
        """Count and report a put that is given up because its `size` exceeds `limit`, both in bytes; return False."""
        self._count(dropped=1)
        text = "drops entries that are too large; the first has %d bytes, and the limit is %d"
        self._warn("large", text, size, limit)
        return False

    def _beyond(self, key: str, limit: int) -> None:
        """Count and report an entry of more bytes than are read. It stays."""
        self._count(errors=1)
        self._explain(key, f"has more than the {limit} bytes that are read")
        text = "does not read entries that are too large: %s has more than the %d bytes that one may have"
        self._warn("beyond", text, key, limit)

    def _explain(self, key: str, reason: str, still_there: bool = False) -> None:
        """Keep why an entry was not usable, for `why_missing`, and whether it counts as absent although it is there."""
        with self._counting:
            self._useless.pop(key, None)
            self._useless[key] = reason, still_there
            if len(self._useless) > _REASONS:
                del self._useless[next(iter(self._useless))]

    def _warn(self, kind: str, message: str, *details: object) -> None:
        """Log the first event of a kind as a warning. Errors among `details` are shown without secrets."""
        shown = [self._shown(part) if isinstance(part, Exception) else part for part in details]
        self._once(kind, "cuvee: %s: " + message, self._label, *shown)

    def attempt(self, work: Callable[..., _T], *arguments: Any) -> _T:
        """Return `work(*arguments)`; count an operation that fails.

        Servers and proxies that do not know AUTH send its arguments back, and with them the password, so neither the
        message nor a cause of the error holds secrets.

        Raises:
            StoreError: it failed.
        """
        try:
            return work(*arguments)
        except StoreError:
            raise
        except self.failures as error:
            self._count(errors=1)
            failure = StoreError(f"{self._label}: {type(error).__name__}: {self._shown(error)}{self._hint(error)}")
            cause = None if self._secrets else error
        raise failure from cause

    def _hint(self, error: Exception) -> str:
        """Return what to add to the message of an error."""
        return ""

    def _shown(self, error: Exception) -> str:
        return scrubbed(error, self._secrets)[:_LONGEST_MESSAGE]


def _checked(keys: Sequence[str]) -> Sequence[str]:
    for key in keys:
        check_key(key)
    return keys
