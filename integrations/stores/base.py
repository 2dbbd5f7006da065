"""What a store is: bytes in, bytes out, by key; everything else is the concern of one implementation.

A key is `tenant/id`, both lower-case hexadecimal: `cuvee.codec.identity.store_key` makes it. The tenant is part of the
key so that all of a tenant's entries can be found and deleted without an index.
"""

from __future__ import annotations

import builtins
import errno
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from cuvee.codec.errors import CuveeError, InputError
from cuvee.integrations.stores.envelope import Expired

_KEY = re.compile(r"([0-9a-f]{1,64})/([0-9a-f]{1,128})")
_TENANT = re.compile(r"[0-9a-f]{1,64}")

# Bytes of a blob that a store takes and reads by default: what Redis takes, and many times a usual chunk.
MAX_ENTRY_BYTES = 512 << 20

# What one file may be to blame for, and not its disk: a folder or a FIFO in its place, permissions of its own ...
ODD_ENTRY = frozenset(
    {errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ENOTEMPTY, errno.EEXIST, errno.ELOOP, errno.ENXIO}
    | {errno.ENODEV, errno.ESTALE, errno.EFBIG}
)
# ... or sectors or blocks that it alone has; several such files are a disk that fails.
BAD_SECTORS = frozenset({errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.EILSEQ})


class StoreError(CuveeError):
    """A store could not be reached or refused the work; the message names the store and the cause."""


@dataclass(slots=True)
class TierCounters:
    """What one tier did since it was opened.

    Attributes:
        hits, misses: answers of `get`.
        hit_bytes: bytes of the hits.
        puts, put_bytes: entries kept, and their bytes.
        evictions: entries deleted to stay within the budget.
        expired: entries older than their time to live, answered as misses.
        corrupt: entries that failed their checksum: deleted, answered as misses.
        errors: operations that failed.
        skipped: operations not tried because the store is known to be down.
        dropped: puts given up: a full queue, or an entry larger than the budget or than `max_entry`.
        queued: puts that wait in a write-behind queue now.
        entries, bytes: held now, where the store knows it.
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
        """Count what a `get` gave: a hit, or a miss, which a bad or expired entry may be the reason of."""
        if blob is None:
            self.misses += 1
        else:
            self.hits += 1
            self.hit_bytes += len(blob)
        if isinstance(problem, Expired):
            self.expired += 1
        elif problem is not None:
            self.corrupt += 1


class Store(ABC):
    """Blobs by key. Safe to call from several threads.

    `get`, `put`, `contains` and `delete` raise `StoreError` when the store itself fails (unreachable, disk full). A bad
    entry is no failure but a miss, counted as `corrupt` and deleted; one that cannot be read or replaced, where others
    can, is a miss or a put given up, counted as an error. Constructors do not connect.

    Attributes:
        name: the kind of tier, as metrics name it.
        shared: whether other processes see what is put here.
    """

    name: str
    shared: bool

    @abstractmethod
    def get(self, key: str) -> bytes | None:
        """The blob of `key`, checked; None if it is not there."""

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """`get` of each key; stores that can, ask once."""
        return [self.get(key) for key in keys]

    @abstractmethod
    def put(self, key: str, blob: bytes) -> bool:
        """Keep `blob` under `key`, replacing what was there, all or nothing; False if it was given up (`dropped`)."""

    @abstractmethod
    def contains(self, keys: Sequence[str]) -> list[bool]:
        """Whether each key is there now. Reads no payload, counts neither hits nor misses."""

    @abstractmethod
    def delete(self, key: str) -> bool:
        """Delete an entry; whether it was there."""

    @abstractmethod
    def delete_tenant(self, tenant: str) -> int:
        """Delete every entry of a tenant (hex, as in its keys); how many there were."""

    @abstractmethod
    def counters(self) -> dict[str, TierCounters]:
        """A snapshot by tier name."""

    def overdue(self, operation: str, seconds: float) -> None:  # noqa: B027 - most stores have nothing to do
        """Whoever asked has given up on calls of `operation` ("contains", say) that began `seconds` ago or earlier.

        A guard counts them as failures, so that the next ones do not wait for the same. Never waits itself.
        """

    def flush(self, timeout: float | None = None) -> bool:
        """Wait at most `timeout` seconds for queued puts; whether all are done."""
        return True

    def close(self) -> None:
        """Flush and let go of connections and threads. May be called again."""
        self.flush()


def check_max_entry(value: int) -> int:
    """`value`, if it can be the most bytes of a blob.

    Raises:
        InputError: it is below 1.
    """
    if value < 1:
        raise InputError(f"max_entry: must be a positive number of bytes, got {value!r}")
    return value


def check_max_tenant(value: int | None, budget: int | None) -> int | None:
    """`value`, if it can be the most bytes of a tenant in a store with a `budget`; None is no limit.

    Raises:
        InputError: it is below 1, or more than the whole budget.
    """
    if value is not None and value < 1:
        raise InputError(f"max_tenant_bytes: must be a positive number of bytes, got {value!r}")
    if value is not None and budget is not None and value > budget:
        raise InputError(f"max_tenant_bytes: must be at most the budget of all, {budget}, got {value}")
    return value


def check_key(key: object) -> tuple[str, str]:
    """Tenant and id of a key.

    Raises:
        InputError: `key` is not `tenant/id` in lower-case hexadecimal.
    """
    match = _KEY.fullmatch(key) if isinstance(key, str) else None
    if match is None:
        raise InputError(f"key={key!r} must be 'tenant/id', both lower-case hexadecimal")
    return match[1], match[2]


def check_tenant(tenant: object) -> str:
    """`tenant`, if it can be part of a key.

    Raises:
        InputError: it is not 1 to 64 lower-case hexadecimal digits.
    """
    if not isinstance(tenant, str) or _TENANT.fullmatch(tenant) is None:
        raise InputError(f"tenant={tenant!r} must be 1 to 64 lower-case hexadecimal digits (see tenant_id)")
    return tenant
