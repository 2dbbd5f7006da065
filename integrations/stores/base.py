"""The contract of a store: bytes in, bytes out, by key. Everything else is up to each implementation.

A key is `tenant/id`, both in lower-case hexadecimal; `cuvee.codec.identity.store_key` makes one. The tenant is part of
the key so that all of a tenant's entries can be found and deleted without an index.
"""

from __future__ import annotations

import builtins
import errno
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from cuvee.codec.errors import CuveeError, InputError
from cuvee.integrations.stores.envelope import ExpiredError

_KEY = re.compile(r"([0-9a-f]{1,64})/([0-9a-f]{1,128})")
_TENANT = re.compile(r"[0-9a-f]{1,64}")

# Largest blob, in bytes, that a store keeps and reads by default: the limit of Redis, and far above a usual chunk.
MAX_ENTRY_BYTES = 512 << 20

# Errors that are the fault of one file and not of its disk: a folder or a FIFO in its place, or its own permissions.
ODD_ENTRY = frozenset(
    {errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ENOTEMPTY, errno.EEXIST, errno.ELOOP, errno.ENXIO}
    | {errno.ENODEV, errno.ESTALE, errno.EFBIG}
)
# Errors of a file whose sectors went bad. Several such files in a row mean that the disk is failing.
BAD_SECTORS = frozenset({errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.EILSEQ})


class StoreError(CuveeError):
    """A store could not be reached or refused the work; the message names the store and the cause."""

    blames_blob = False


@dataclass(slots=True)
class TierCounters:
    """What one tier has done since it was opened.

    Attributes:
        hits, misses: answers of `get`.
        hit_bytes: bytes of the hits.
        puts, put_bytes: entries kept, and their bytes.
        evictions: entries deleted to stay within the budget.
        expired: entries older than their time to live; each was answered as a miss.
        corrupt: entries that failed their checksum; each was deleted and answered as a miss.
        errors: operations that failed.
        skipped: operations that were not tried because the store is known to be down.
        dropped: puts that were given up: a queue was full, or an entry exceeded the budget or `max_entry`.
        queued: puts that wait in a write-behind queue now.
        entries, bytes: what the store holds now; None where it does not know.
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

    def answer(self, blob: builtins.bytes | None, problem: Exception | None = None) -> None:
        """Count the answer of a `get`: a hit, or a miss whose cause may be `problem`, a bad or expired entry."""
        if blob is None:
            self.misses += 1
        else:
            self.hits += 1
            self.hit_bytes += len(blob)
        if isinstance(problem, ExpiredError):
            self.expired += 1
        elif problem is not None:
            self.corrupt += 1


class Store(ABC):
    """Blobs by key. Safe to call from several threads.

    `get`, `put`, `contains` and `delete` raise `StoreError` when the store itself fails: it cannot be reached, or its
    disk is full. A bad entry is not a failure. It is a miss, counted as `corrupt`, and deleted. If one entry cannot be
    read or replaced while others can, that is a miss or a put given up, counted in `errors`. Constructors do not
    connect.

    Attributes:
        name: the kind of tier, as metrics name it.
        shared: whether other processes see what is put here.
    """

    name: str
    shared: bool

    @abstractmethod
    def get(self, key: str) -> bytes | None:
        """The blob of `key`, its checksum verified; None if it is not there."""

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """`get` of each key. Stores that can do so ask once for all of them."""
        return [self.get(key) for key in keys]

    @abstractmethod
    def put(self, key: str, blob: bytes) -> bool:
        """Keep `blob` under `key`, replacing what was there, all or nothing; False if the put was given up."""

    @abstractmethod
    def contains(self, keys: Sequence[str]) -> list[bool]:
        """Whether each key is there now. This reads no payload and counts neither hits nor misses."""

    @abstractmethod
    def delete(self, key: str) -> bool:
        """Delete an entry; return whether it was there."""

    @abstractmethod
    def delete_tenant(self, tenant: str) -> int:
        """Delete every entry of a tenant (in hexadecimal, as in its keys); return how many there were."""

    @abstractmethod
    def counters(self) -> dict[str, TierCounters]:
        """A snapshot by tier name."""

    def overdue(self, operation: str, seconds: float) -> None:  # noqa: B027 - most stores have nothing to do
        """Tell the store that callers gave up on calls of `operation` ("contains", say) begun `seconds` ago or earlier.

        A guard counts those calls as failures, so that later ones do not wait for the same thing. This never waits.
        """

    def flush(self, timeout: float | None = None) -> bool:
        """Wait at most `timeout` seconds for queued puts; return whether all are done."""
        return True

    def close(self) -> None:
        """Flush, then release connections and threads. May be called again."""
        self.flush()


class WarnOnce:
    """Logs each kind of trouble the first time it happens. Safe to call from several threads, and after a fork.

    Args:
        log: the logger of the store's module.
        who: what every message names first, such as "disk store /var/cache/kv".
    """

    def __init__(self, log: logging.Logger, who: str) -> None:
        self._log, self._who = log, who
        self._said: dict[str, object] = {}

    def __call__(self, kind: str, message: str, *details: object) -> None:
        """Log `message % details` as a warning, unless one of this `kind` was logged before."""
        # No lock, which a forked child might inherit in a locked state: `setdefault` is atomic.
        mine = object()
        if self._said.setdefault(kind, mine) is mine:
            self._log.warning("%s: " + message, self._who, *details)


def check_max_bytes(value: int | None) -> int | None:
    """`value`, if it is a valid budget of a store in bytes; None means no limit.

    Raises:
        InputError: it is below 1.
    """
    return _check_bytes("max_bytes", value)


def check_max_entry(value: int) -> int:
    """`value`, if it is a valid limit for the bytes of one blob.

    Raises:
        InputError: it is below 1.
    """
    _check_bytes("max_entry", value)
    return value


def check_max_tenant(value: int | None, budget: int | None) -> int | None:
    """`value`, if it is a valid limit for the bytes of one tenant in a store with a `budget`; None means no limit.

    Raises:
        InputError: it is below 1, or more than the whole budget.
    """
    _check_bytes("max_tenant_bytes", value)
    if value is not None and budget is not None and value > budget:
        raise InputError(f"max_tenant_bytes: must be at most the budget of all, {budget}, got {value}")
    return value


def check_ttl(value: float | None) -> float | None:
    """`value`, if it is a valid time to live in seconds; None means forever.

    Raises:
        InputError: it is not above 0.
    """
    if value is not None and not value > 0:
        raise InputError(f"ttl: must be above 0 seconds, got {value!r}")
    return value


def _check_bytes(name: str, value: int | None) -> int | None:
    if value is not None and value < 1:
        raise InputError(f"{name}: must be a positive number of bytes, got {value!r}")
    return value


def check_key(key: object) -> tuple[str, str]:
    """The tenant and the id of a key.

    Raises:
        InputError: `key` is not `tenant/id` in lower-case hexadecimal.
    """
    match = _KEY.fullmatch(key) if isinstance(key, str) else None
    if match is None:
        raise InputError(f"key: must be 'tenant/id', both in lower-case hexadecimal (see store_key), got {key!r}")
    return match[1], match[2]


def check_tenant(tenant: object) -> str:
    """`tenant`, if it is valid as part of a key.

    Raises:
        InputError: it is not 1 to 64 lower-case hexadecimal digits.
    """
    if not isinstance(tenant, str) or _TENANT.fullmatch(tenant) is None:
        raise InputError(f"tenant: must be 1 to 64 lower-case hexadecimal digits (see tenant_id), got {tenant!r}")
    return tenant
