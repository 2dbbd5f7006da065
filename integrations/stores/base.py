"""The contract of a store, which keeps blobs by key, and checks of its arguments.

A key is `tenant/id`, both in lower-case hexadecimal; `cuvee.naming.identity.store_key` makes one. The tenant is part of
the key so that all entries of a tenant can be found and deleted without an index.

A chunk may be stored as **parts**, each an entry of its own, whose key says which part it is
(`cuvee.naming.part_keys`).
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from cuvee.codec.errors import CuveeError, InputError

RECORDS = "1de9717e5"
"""In place of a tenant: the records of identities (`cuvee.integrations.identity.records`). No tenant's id is so short.
Stores neither count nor evict what is under it.
"""

OBJECT_SCHEMES = ("s3", "gs", "az", "abfs", "http", "https")  # of the URLs of object storage
_KEY = re.compile(r"([0-9a-f]{1,64})/([0-9a-f]{1,128})")
_TENANT = re.compile(r"[0-9a-f]{1,64}")


class StoreError(CuveeError):
    """A store could not be reached or refused an operation; the message names the store and the cause."""

    blames_blob = False


def numbered(names: Iterable[str]) -> list[str]:
    """Return what the stores of these names are called as tiers of one: a second "redis" is "redis-2"."""
    found: list[str] = []
    seen: Counter[str] = Counter()
    for name in names:
        seen[name] += 1
        found.append(f"{name}-{seen[name]}" if seen[name] > 1 else name)
    return found


@dataclass(slots=True)
class TierCounters:
    """The events in one tier since it was opened.

    Attributes:
        hits: answers of `get`.
        misses: keys that `get` did not find, or that `missed` was told of. Behind other tiers, `missed` counts in each.
        hit_bytes: bytes of the hits.
        puts, put_bytes: entries stored, and their bytes.
        evictions: entries deleted to stay within the budget.
        expired: entries that were older than their time to live; each was a miss.
        corrupt: entries that failed their checksum; each was deleted and was a miss.
        errors: operations that failed.
        skipped: operations that were not attempted because the store was known to be down.
        dropped: puts that were given up: a queue or the store was full, or the entry exceeded a limit.
        queued: puts that are waiting in a write-behind queue now.
        entries, bytes: what the store holds now; None if unknown.
    """

    hits: int = 0
    misses: int = 0
    hit_bytes: int = 0
    puts: int = 0
    put_bytes: int = 0
    evictions: int = 0
    expired: int = 0
    corrupt: int = 0
    errors: int = 0
    skipped: int = 0
    dropped: int = 0
    queued: int = 0
    entries: int | None = None
    bytes: int | None = None


class Store(ABC):
    """Blobs by key. Safe to call from several threads.

    `get`, `put`, `contains` and `delete` raise `StoreError` when the store itself fails: for example, it cannot be
    reached, or its disk is full. A bad entry is not a failure but a miss, which is counted as `corrupt`, and the entry
    is deleted. Constructors do not connect.

    Attributes:
        name: the kind of tier, as in metrics.
        shared: whether other processes see the entries.
    """

    name: str
    shared: bool

    def get(self, key: str) -> bytes | None:
        """Return the blob of `key`, its checksum verified; None if it is not there."""
        return self.get_many([key])[0]

    @abstractmethod
    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the blob of each key, its checksum verified; None for those that are not there."""

    def why_missing(self, key: str) -> str:
        """Return why `get_many` has just found nothing usable under a key, to be read after the entry's name; empty if
        there was nothing.
        """
        return ""

    @abstractmethod
    def put(self, key: str, blob: bytes) -> bool:
        """Store `blob` under `key`, replacing an earlier entry, all or nothing; False if the put was given up."""

    @abstractmethod
    def contains(self, keys: Sequence[str]) -> list[bool]:
        """Return whether each key is there now. This reads no payload, and counts nothing: whoever wanted the payloads
        tells `missed` of those that are not there.
        """

    def missed(self, keys: int) -> None:  # noqa: B027 - stores that count nothing have nothing to do
        """Count this many keys as misses, which `contains` did not find."""

    @abstractmethod
    def delete(self, key: str) -> bool:
        """Delete an entry; return whether it was there."""

    @abstractmethod
    def delete_tenant(self, tenant: str) -> int:
        """Delete every entry of a tenant (in hexadecimal, as in its keys); return how many there were."""

    def keys(self, tenant: str) -> Iterator[str]:
        """Yield the keys of a tenant's entries (the tenant in hexadecimal, as in its keys), in no particular order.

        Entries that are put or deleted meanwhile may be left out, or be yielded and gone.

        Raises:
            StoreError: the store failed, or this kind of store cannot list its keys.
        """
        raise StoreError(f"{self.name} store: cannot list its keys")

    @abstractmethod
    def counters(self) -> dict[str, TierCounters]:
        """Return a snapshot by tier name. Engines ask in every step, so this opens no file and waits for nothing."""

    def locate(self, keys: Sequence[str]) -> list[str]:
        """Return the tier from which each key would be read, by its name in `counters`, so that callers know how fast.

        This does not say that an entry is there: the last tier is not asked, and stands for all keys that no other has.
        """
        return [self.name] * len(keys)

    def takes_puts(self) -> bool:
        """Return whether a put would be attempted now: False while the store is known to be down, so that nothing is
        encoded in vain. This never blocks.
        """
        return True

    def report_overdue(self, operation: str, seconds: float) -> None:  # noqa: B027 - most stores have nothing to do
        """Report that callers gave up on calls of `operation`, such as "contains", that began `seconds` ago or earlier.

        A guard counts those calls as failures, so that later calls do not hang as well. This never blocks.
        """

    def flush(self, timeout: float | None = None) -> bool:
        """Wait at most `timeout` seconds for queued puts; return whether all are done."""
        return True

    def close(self) -> None:
        """Flush, then release connections and threads. May be called more than once."""
        self.flush()


def check_max_bytes(value: int | None) -> None:
    """Check a limit in bytes; None means no limit.

    Raises:
        InputError: `value` is below 1.
    """
    if value is not None and value < 1:
        raise InputError(f"max_bytes: must be a positive number of bytes, got {value!r}")


def check_key(key: object) -> tuple[str, str]:
    """Return the tenant and the id of a key.

    Raises:
        InputError: `key` is not `tenant/id` in lower-case hexadecimal.
    """
    match = _KEY.fullmatch(key) if isinstance(key, str) else None
    if match is None:
        raise InputError(
            "key: must be 'tenant/id', at most 64 and 128 digits of lower-case hexadecimal (see store_key), "
            f"got {key!r}"
        )
    return match[1], match[2]


def is_key(name: str) -> bool:
    """Return whether `name` is a valid key."""
    return _KEY.fullmatch(name) is not None


def is_record(key: str) -> bool:
    """Return whether a valid key is of a record, and not of an entry."""
    return key.startswith(f"{RECORDS}/")


def is_tenant(name: str) -> bool:
    """Return whether `name` is valid as the tenant of a key."""
    return _TENANT.fullmatch(name) is not None


def check_tenant(tenant: object) -> str:
    """Return `tenant` if it is valid as part of a key.

    Raises:
        InputError: `tenant` is not 1 to 64 lower-case hexadecimal digits.
    """
    if not isinstance(tenant, str) or not is_tenant(tenant):
        raise InputError(f"tenant: must be 1 to 64 lower-case hexadecimal digits (see tenant_id), got {tenant!r}")
    return tenant
