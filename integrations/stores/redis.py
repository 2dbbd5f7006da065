"""Blobs in Redis or Valkey, on one server or a cluster, shared by all processes that use the same URL.

    cuvee:{b}:tenant/id   one sealed entry: written by SET, read by GET, expired by the server

With a budget, the server also keeps an index:

    cuvee:{b}:lru         sorted set: entry -> time of its last use, on a clock that counts uses
    cuvee:{b}:size        hash: entry -> its bytes
    cuvee:{b}:sums        hash: the bytes of all entries, the clock of lru, the cursor of the sweep, "counted"
    cuvee:{b}:lru:tenant  like lru, for one tenant; only if each tenant has a budget. Its bytes are in sums, too
    cuvee:{b}:lru.1       the refinements in lru once more; likewise lru.1:tenant

`{b}` is the bucket. It is a hash tag, which keeps all of these keys in one slot of a cluster, as scripts require. A
single server has bucket 0. A cluster has 64 buckets, chosen by a hash of the key, and each bucket gets 1/64 of the
budget. A full bucket evicts even if another bucket has room, so with n entries per bucket about 1/sqrt(n) of the budget
stays unused. Within a bucket, the least recently used entry of all processes is evicted first, and refinements sooner
(`base.PART_WEIGHTS`).

Payloads do not pass through Lua, which copies them several times (a put of 1 MB took six times as long). SET and GET
carry them, and one script (`redis_scripts`) updates the index in the same round trip. The script compares the index
with what the server holds, and is idempotent. If the server expired, evicted or lost an entry, the index is corrected
when that entry is next requested, or by a sweep: every put checks the next 16 entries of the index. If the index itself
was lost, or was never kept, it is rebuilt from a SCAN.
"""

from __future__ import annotations

import hashlib
import logging
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import xxhash

from cuvee.codec.errors import CorruptError, InputError
from cuvee.codec.support.forks import tell_after_fork
from cuvee.integrations.stores.base import (
    MAX_ENTRY_BYTES,
    Lifetimes,
    Store,
    StoreError,
    TierCounters,
    check_key,
    check_max_entry,
    check_max_tenant,
    check_tenant,
)
from cuvee.integrations.stores.envelope import HEADER_BYTES, ExpiredError, seal, unseal
from cuvee.integrations.stores.monitor import StoreMonitor
from cuvee.integrations.stores.redaction import redacted, secrets_of
from cuvee.integrations.stores.redis_scripts import ACCOUNT, DISCARD

try:
    import redis
    from redis.exceptions import InvalidResponse, OutOfMemoryError
except ImportError as missing:
    raise ImportError("redis stores need redis-py: pip install cuvee[redis]") from missing
from cuvee.integrations.stores.redis_nodes import Cluster, Command, OneServer
from cuvee.integrations.stores.redis_replies import MOST_BYTES, page, put_account, whole_number

_log = logging.getLogger(__name__)

_CLUSTER_BUCKETS = 64
_MIN_BUCKET_BYTES = 16_000_000
_MAX_VALUE_BYTES = 512 * 1024 * 1024  # proto-max-bulk-len: the server's default limit for one value
_CONNECTIONS = 64
_GET_BATCH = 32  # payloads in one round trip; the server holds its replies in memory until they are read
_SCAN_PAGE = 1000
_SCAN_SECONDS = 3600.0  # twice the time for 10^9 keys; bounds a scan that the server never ends
_SCHEMES = {"redis": "redis", "rediss": "rediss", "valkey": "redis", "valkeys": "rediss", "unix": "unix"}
_ENTRY = re.compile(rb"cuvee:\{(\d{1,4})\}:([0-9a-f]+/[0-9a-f]+)")

_T = TypeVar("_T")


class RedisStore(Store):
    """Sealed entries in a Redis or Valkey server (5 or newer) or cluster.

    Without `max_bytes`, the server evicts by its own `maxmemory` and `maxmemory-policy`. With `max_bytes`, the store
    evicts, and the server's `maxmemory` should be about 10 % larger, because Redis needs memory beside the payloads.
    Give all stores on one server the same budget: the smallest one takes effect.

    An operation fails after about `timeout`, and is not tried again after a timeout. A blob must be sent within
    `timeout`. When a blob is read, each MiB of it must arrive within `timeout`.

        >>> store = RedisStore("redis://localhost:6379/0", max_bytes=8_000_000_000, ttl=3600)  # does not connect yet
        >>> try:
        ...     blob = store.get("ab/01")  # None: a miss
        ... except StoreError:
        ...     blob = None  # no server answers; a GuardedStore does this for you
        >>> store.close()

    Args:
        url: `redis://[user:password@]host[:port][/db]`, `rediss://` (TLS), `valkey://`, `valkeys://` or `unix://path`,
            with redis-py's query parameters.
        max_bytes: budget for entries, including their 64-byte envelopes. A cluster requires at least 1.024 GB.
        ttl: seconds an entry lives after it was written; None means forever.
        timeout: seconds to wait for a connection and for a reply.
        cluster: whether the URL names a node of a Redis Cluster.
        max_entry: largest blob, in bytes. Larger ones are neither kept nor read.
        max_tenant_bytes: budget of each tenant, kept by evicting the tenant's own entries. Requires `max_bytes`, and
            has the same minimum in a cluster. None means no limit.
        refinement_ttl: seconds a refinement lives, at most `ttl`; None means as long as other entries.

    Raises:
        InputError: an argument is out of range, or redis-py cannot parse the URL.
    """

    name = "redis"
    shared = True

    def __init__(
        self,
        url: str,
        max_bytes: int | None = None,
        ttl: float | None = None,
        timeout: float = 1.0,
        cluster: bool = False,
        *,
        max_entry: int = MAX_ENTRY_BYTES,
        max_tenant_bytes: int | None = None,
        refinement_ttl: float | None = None,
    ) -> None:
        scheme, separator, rest = url.partition("://")
        if not separator or scheme not in _SCHEMES:
            raise InputError(f"url: must begin with one of {', '.join(_SCHEMES)} and '://', got {redacted(url)}")
        self._clustered = cluster
        self._buckets = _CLUSTER_BUCKETS if cluster else 1
        if cluster and scheme == "unix":
            raise InputError(f"url: must name host and port of a cluster's node, got a socket: {redacted(url)}")
        self._lifetimes = Lifetimes(ttl, refinement_ttl)
        if not timeout > 0:
            raise InputError(f"timeout: must be above 0 seconds, got {timeout}")
        least = self._buckets * _MIN_BUCKET_BYTES if cluster else 1
        if max_bytes is not None and max_bytes < least:
            why = f" ({_MIN_BUCKET_BYTES} for each of {self._buckets} buckets)" if cluster else ""
            raise InputError(f"max_bytes: must be at least {least}{why}, got {max_bytes}")
        check_max_tenant(max_tenant_bytes, max_bytes)
        if max_tenant_bytes is not None and max_bytes is None:
            raise InputError(f"max_tenant_bytes: must come with max_bytes, got {max_tenant_bytes} without it")
        if max_tenant_bytes is not None and max_tenant_bytes < least:
            raise InputError(f"max_tenant_bytes: must be at least {least}, got {max_tenant_bytes}")
        self._tenant_budget = None if max_tenant_bytes is None else max_tenant_bytes // self._buckets
        self._budget = None if max_bytes is None else max_bytes // self._buckets
        self._max_data = HEADER_BYTES + check_max_entry(max_entry)
        self._timeout = timeout
        self._monitor = StoreMonitor(_log, f"redis store {redacted(url)}", secrets_of(url))
        self._held: dict[int, tuple[int, int]] = {}  # the bytes and entries of each bucket
        most = min(self._max_data + 1, _MAX_VALUE_BYTES)
        try:
            self._nodes: OneServer | Cluster = (Cluster if cluster else OneServer)(
                f"{_SCHEMES[scheme]}://{rest}", timeout, _CONNECTIONS, most
            )
        except ValueError:
            # The message of the ValueError may quote a part of the password.
            raise InputError(
                f"url: must be a URL of redis-py, got {redacted(url)}; percent-encode a password's special characters"
            ) from None
        self.after_fork()
        tell_after_fork(self)

    def after_fork(self) -> None:
        """Make new locks. redis-py itself detects that its connections belong to the parent."""
        self._recounting = threading.Lock()
        self._nodes.after_fork()

    def get(self, key: str) -> bytes | None:
        """Return the blob of `key`, its checksum verified; None if it is not there."""
        return self.get_many([key])[0]

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the blob of each key, with 32 keys per round trip to each node."""
        for key in keys:
            check_key(key)
        blobs: list[bytes | None] = []
        for start in range(0, len(keys), _GET_BATCH):
            batch = keys[start : start + _GET_BATCH]
            replies = self._send([(self._bucket(key), self._get(key)) for key in batch] + self._touch(batch))
            for key, data in zip(batch, replies, strict=False):
                blobs.append(self._open(key, data))
            for reply in replies[len(batch) :]:
                # A full server or a read-only replica cannot update the index. That must not lose the blobs.
                if isinstance(reply, Exception):
                    self._monitor.not_touched(self._failure(reply))
        return blobs

    def put(self, key: str, blob: bytes) -> bool:
        """Store `blob` under `key`; False if it exceeds the budget of its bucket, `max_entry` or Redis's 512 MiB."""
        check_key(key)
        bucket = self._bucket(key)
        data = seal(key, blob, time.time())
        budgets = [limit for limit in (self._budget, self._tenant_budget) if limit is not None]
        limit = min(_MAX_VALUE_BYTES, self._max_data, *budgets)
        if len(data) > limit:
            self._monitor.too_large(len(blob), limit - HEADER_BYTES)
            return False
        ttl = self._lifetimes.of(key)
        expiry = () if ttl is None else ("PX", max(1, round(1000 * ttl)))
        commands: list[Command] = [("SET", self._name(key), data, *expiry)]
        if self._budget is not None:
            # Plain commands, because redis-py's own transactions quote the blob in their error messages.
            account = self._account(bucket, [key], self._budget, self._tenant_budget)
            commands = [("MULTI",), *commands, account, ("EXEC",)]
        replies = self._checked(self._send([(bucket, command) for command in commands]))
        done = self._tried(lambda: put_account(replies))
        self._monitor.stored(blob)
        if done is not None:
            self._monitor.count(evictions=done.evicted)
            self._held[bucket] = (done.bytes, done.entries)
        if done is not None and not done.complete and self._recounting.acquire(blocking=False):
            try:
                self._recount()
            finally:
                self._recounting.release()
        return True

    def contains(self, keys: Sequence[str]) -> list[bool]:
        """Return whether each key is there now, with one round trip to each node."""
        for key in keys:
            check_key(key)
        # An entry that is too large to be read counts as absent, so that a smaller one can replace it.
        bounded = self._max_data < _MAX_VALUE_BYTES
        name, most = ("STRLEN", MOST_BYTES) if bounded else ("EXISTS", 1)
        replies = self._send([(self._bucket(key), (name, self._name(key))) for key in keys])
        replies = self._checked([0 if _is_no_string(reply) else reply for reply in replies])
        return [0 < size <= self._max_data for size in self._numbers(replies, name, most)]

    def delete(self, key: str) -> bool:
        """Delete an entry; return whether it was there."""
        check_key(key)
        return self._delete([key]) == 1

    def delete_tenant(self, tenant: str) -> int:
        """Delete every entry of a tenant, found by SCAN; return how many there were."""
        return sum(self._delete(keys) for keys in self._scan(f"{check_tenant(tenant)}/*"))

    def clear(self) -> int:
        """Delete the entries of all tenants, found by SCAN; return how many there were. Other keys stay."""
        return sum(self._delete(keys) for keys in self._scan("*/*"))

    def keys(self, tenant: str) -> Iterator[str]:
        """Yield the keys of a tenant's entries, found by SCAN, which may find one twice."""
        pages = list(self._scan(f"{check_tenant(tenant)}/*"))  # now, because a scan has to end in time
        yield from chain.from_iterable(pages)

    def counters(self) -> dict[str, TierCounters]:
        """Return a snapshot. `bytes` and `entries` are what the server reported at the last put to each bucket."""
        held = self._held.copy()  # at once, because other threads add to it
        if len(held) < self._buckets:
            return {self.name: self._monitor.snapshot()}
        total, entries = map(sum, zip(*held.values(), strict=True))
        return {self.name: self._monitor.snapshot(entries, total)}

    def close(self) -> None:
        """Close the connections. May be called again; a later operation opens new ones."""
        self._nodes.close()

    def _get(self, key: str) -> Command:
        """Return the command that reads an entry, or one byte more than the limit if the entry is too large."""
        if self._max_data >= _MAX_VALUE_BYTES:
            return ("GET", self._name(key))  # the server holds no larger values
        return ("GETRANGE", self._name(key), 0, self._max_data)

    def _open(self, key: str, reply: Any) -> bytes | None:
        """Return the blob in a reply to GET. A bad or expired entry is deleted and counted, and is a miss."""
        if isinstance(reply, Exception) and not _is_no_string(reply):
            raise self._failure(reply) from reply
        if reply is not None and not isinstance(reply, (bytes, Exception)):
            raise self._failure(InvalidResponse(f"GET: must be a string, got {type(reply).__name__}"))
        blob: bytes | None = None
        problem: Exception | None = None
        if isinstance(reply, bytes) and len(reply) > self._max_data:
            # It stays, because other stores may allow larger entries.
            self._monitor.answered(None)
            self._monitor.unusable(key, f"more than the {self._max_data - HEADER_BYTES} bytes that max_entry_mb allows")
            return None
        if isinstance(reply, Exception):
            problem = reply
        elif reply is not None and (reply or self._max_data >= _MAX_VALUE_BYTES):  # GETRANGE of a missing key is empty
            try:
                blob = unseal(key, reply, self._lifetimes.of(key))
            except (CorruptError, ExpiredError) as error:
                problem = error
        self._monitor.answered(blob, key, problem)
        if reply is not None and problem is not None:
            self._discard(key, reply)
        return blob

    def _discard(self, key: str, reply: bytes | Exception) -> None:
        """Delete an entry if it has not changed since it was read. A failure is counted but not raised."""
        digest = hashlib.sha1(reply, usedforsecurity=False).hexdigest() if isinstance(reply, bytes) else ""
        command = (self._bucket(key), ("EVAL", DISCARD, 1, self._name(key), digest))
        try:
            self._checked(self._send([command, *self._touch([key])]))
        except StoreError as error:
            self._monitor.not_deleted(error)

    def _delete(self, keys: Sequence[str]) -> int:
        """Delete entries and remove them from the index; return how many there were."""
        commands = [(self._bucket(key), ("UNLINK", self._name(key))) for key in keys]
        replies = self._checked(self._send(commands + self._touch(keys)))
        return sum(self._numbers(replies[: len(keys)], "UNLINK", 1))

    def _recount(self) -> None:
        """Rebuild the index of all buckets, in the order in which SCAN finds the entries."""
        for keys in self._scan("*/*"):
            self._checked(self._send(self._touch(keys)))
        done = [(b, ("HSET", f"{self._prefix(b)}sums", "counted", 1)) for b in range(self._buckets)]
        self._checked(self._send(done))

    def _scan(self, pattern: str) -> Iterator[list[str]]:
        """Yield the keys of matching entries from every primary, one page at a time."""
        match = f"cuvee:{{{'*' if self._clustered else '0'}}}:{pattern}"
        end = time.monotonic() + _SCAN_SECONDS
        for server in self._tried(self._nodes.primaries):
            cursor = 0
            while True:
                command = ("SCAN", cursor, "MATCH", match, "COUNT", _SCAN_PAGE)
                reply = self._checked(self._tried(partial(server.exchange, [command])))[0]
                cursor, names = self._tried(partial(page, reply))
                found = [_ENTRY.fullmatch(name) for name in names]
                yield [m[2].decode() for m in found if m is not None]
                if cursor == 0:
                    break
                if time.monotonic() > end:
                    raise self._failure(InvalidResponse(f"SCAN: must end within {_SCAN_SECONDS:g} s"))

    def _bucket(self, key: str) -> int:
        return xxhash.xxh32_intdigest(key.encode()) % self._buckets

    def _prefix(self, bucket: int) -> str:
        return f"cuvee:{{{bucket}}}:"

    def _name(self, key: str) -> str:
        return self._prefix(self._bucket(key)) + key

    def _account(self, bucket: int, keys: Sequence[str], budget: int = -1, tenant: int | None = None) -> Command:
        """Return the command that updates the index for `keys`, and evicts if budgets are given (in bytes)."""
        # The whole script rather than its digest: after MULTI it is too late to learn that a server has forgotten it.
        prefix = self._prefix(bucket)
        index = [prefix + part for part in ("lru", "size", "sums")]
        return ("EVAL", ACCOUNT, len(index), *index, prefix, budget, -1 if tenant is None else tenant, *keys)

    def _touch(self, keys: Sequence[str]) -> list[tuple[int, Command]]:
        """Return the commands that update the index for `keys`, if an index is kept."""
        if self._budget is None:
            return []
        by_bucket: dict[int, list[str]] = defaultdict(list)
        for key in keys:
            by_bucket[self._bucket(key)].append(key)
        return [(bucket, self._account(bucket, members)) for bucket, members in by_bucket.items()]

    def _send(self, commands: Sequence[tuple[int, Command]]) -> list[Any]:
        """Run each command on the node of its bucket, with one round trip to each node.

        Returns:
            The replies in order, with error replies as exceptions.

        Raises:
            StoreError: a server did not reply.
        """
        return self._tried(lambda: self._nodes.send([(self._prefix(bucket), command) for bucket, command in commands]))

    def _tried(self, work: Callable[[], _T]) -> _T:
        """Return `work()`, which talks to servers or parses replies.

        Raises:
            StoreError: it failed. redis-py passes on exceptions of other libraries, and of any class if a server
                misbehaves.
        """
        try:
            return work()
        except Exception as error:
            self._nodes.stale = True
            raise self._failure(error) from error

    def _numbers(self, replies: Sequence[object], name: str, most: int) -> list[int]:
        return self._tried(lambda: [whole_number(reply, name, most) for reply in replies])

    def _checked(self, replies: list[Any]) -> list[Any]:
        """Return the replies if none of them is an error, including the replies inside a transaction.

        Raises:
            StoreError: the first error among them.
        """
        for reply in replies:
            for part in reply if isinstance(reply, list) else (reply,):
                if isinstance(part, Exception):
                    raise self._failure(part) from part
        return replies

    def _failure(self, error: Exception) -> StoreError:
        """Count a failed operation; return the error to raise."""
        hint = ""
        if isinstance(error, redis.TimeoutError):
            hint = f" (no answer within timeout={self._timeout:g} s)"
        elif isinstance(error, OutOfMemoryError):
            hint = " (the server is full and may not evict: raise its maxmemory, lower max_gb or set allkeys-lru)"
        return self._monitor.failure(error, hint)


def _is_no_string(reply: Any) -> bool:
    """Return whether a reply says that the value of a key is not a string but, say, a list."""
    return isinstance(reply, Exception) and "wrong kind of value" in str(reply)
