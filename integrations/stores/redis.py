"""Blobs in Redis or Valkey, on one server or a cluster, shared by all processes that use the same URL.

    cuvee:tenant/id   one sealed entry: written by SET, read by GETRANGE, expired by the server

**The server evicts.** Give it `maxmemory` and `maxmemory-policy allkeys-lru` (or allkeys-lfu); a store has no budget of
its own. Routing, redirections of a cluster whose slots move, and retries are those of redis-py.

A reply is bounded by asking: reads request at most one byte more than the largest entry, and lookups only lengths. A
server that answers with more than it was asked for can fill its client's memory, so whoever runs the server is trusted
that far, but not with what a model reads: envelopes are verified, and blobs may carry a tag (`Codec(key=)`).
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, TypeVar

from cuvee.codec.errors import InputError
from cuvee.integrations.stores.base import (
    MAX_ENTRY_BYTES,
    Store,
    StoreError,
    TierCounters,
    check_bytes,
    check_key,
    check_tenant,
    check_ttl,
)
from cuvee.integrations.stores.envelope import HEADER_BYTES, seal
from cuvee.integrations.stores.monitor import StoreMonitor
from cuvee.integrations.stores.redaction import redacted, secrets_of

try:
    import redis
    from redis.backoff import ExponentialBackoff
    from redis.cluster import RedisCluster
    from redis.exceptions import InvalidResponse, OutOfMemoryError
    from redis.retry import Retry
except ImportError as missing:
    raise ImportError("redis stores need redis-py: pip install cuvee[redis]") from missing

_log = logging.getLogger(__name__)

_MAX_VALUE_BYTES = 512 << 20  # proto-max-bulk-len: the server's default limit for one value
_CONNECTIONS = 64
_READ_BYTES = 1 << 20  # redis-py reads 32 or 64 KiB at a time by default, which is half as fast from 1 MB up
_GET_BATCH = 32  # payloads in one round trip; the server holds its replies in memory until they are read
_SCAN_PAGE = 1000
_SCAN_SECONDS = 3600.0  # twice the time for 10^9 keys; bounds a scan that the server never ends
_PREFIX = "cuvee:"
_ENTRY = re.compile(rb"cuvee:([0-9a-f]{1,64}/[0-9a-f]{1,128})")

_T = TypeVar("_T")


class RedisStore(Store):
    """Sealed entries in a Redis or Valkey server (5 or newer) or cluster. It connects when it is first used.

    An operation fails if the server does not reply for `timeout`, and is not tried again then. Connections that break
    are made once more; a cluster's commands are tried three times, while slots or nodes change.

        >>> store = RedisStore("redis://localhost:6379/0", ttl=3600)
        >>> try:
        ...     blob = store.get("ab/01")  # None: a miss
        ... except StoreError:
        ...     blob = None  # no server answers; a GuardedStore does this for you
        >>> store.close()

    Args:
        url: `redis://[user:password@]host[:port][/db]`, `rediss://` (TLS) or `unix://path`, with redis-py's query
            parameters.
        ttl: seconds an entry lives after it was written; None means forever.
        timeout: seconds to wait for a connection, and for the next bytes of a reply.
        cluster: whether the URL names a node of a Redis Cluster.
        max_entry: largest blob, in bytes. Larger ones are neither kept nor read.

    Raises:
        InputError: an argument is out of range, or redis-py cannot parse the URL.
    """

    name = "redis"
    shared = True

    def __init__(
        self,
        url: str,
        ttl: float | None = None,
        timeout: float = 1.0,
        cluster: bool = False,
        *,
        max_entry: int = MAX_ENTRY_BYTES,
    ) -> None:
        check_ttl(ttl)
        check_bytes("max_entry", max_entry)
        if not timeout > 0:
            raise InputError(f"timeout: must be above 0 seconds, got {timeout}")
        try:
            parse: Any = redis.connection.parse_url
            parse(url)
        except ValueError:
            # The message of the ValueError may quote a part of the password.
            raise InputError(
                f"url: must be a URL of redis-py, got {redacted(url)}; percent-encode a password's special characters"
            ) from None
        self._url, self._ttl, self._timeout, self._cluster = url, ttl, timeout, cluster
        self._most = min(HEADER_BYTES + max_entry, _MAX_VALUE_BYTES)
        self._monitor = StoreMonitor(_log, f"redis store {redacted(url)}", secrets_of(url))
        self._lock = threading.Lock()
        self._client: Any = None

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the blob of each key, with 32 keys per round trip to each node."""
        for key in keys:
            check_key(key)
        blobs: list[bytes | None] = []
        for start in range(0, len(keys), _GET_BATCH):
            batch = keys[start : start + _GET_BATCH]
            replies = self._pipelined([("GETRANGE", _PREFIX + key, 0, self._most) for key in batch], bytes)
            blobs += [self._open(key, reply) for key, reply in zip(batch, replies, strict=True)]
        self._monitor.answered(blobs)
        return blobs

    def put(self, key: str, blob: bytes) -> bool:
        """Store `blob` under `key`; False if it exceeds `max_entry` or Redis's 512 MiB."""
        check_key(key)
        data = seal(key, blob, time.time())
        if len(data) > self._most:
            self._monitor.too_large(len(blob), self._most - HEADER_BYTES)
            return False
        expiry = () if self._ttl is None else ("PX", max(1, round(1000 * self._ttl)))
        (reply,) = self._pipelined([("SET", _PREFIX + key, data, *expiry)], bool | bytes)
        if reply not in (True, b"OK"):
            raise self._failure(InvalidResponse("SET: must be answered by OK"))
        self._monitor.stored(blob)
        return True

    def contains(self, keys: Sequence[str]) -> list[bool]:
        """Return whether each key is there now, with one round trip to each node."""
        for key in keys:
            check_key(key)
        replies = self._pipelined([("STRLEN", _PREFIX + key) for key in keys], int)
        # An entry that is too large to be read counts as absent, so that a smaller one can replace it.
        return [0 < reply <= self._most for reply in replies]

    def delete(self, key: str) -> bool:
        """Delete an entry; return whether it was there."""
        check_key(key)
        return self._delete([key]) == 1

    def delete_tenant(self, tenant: str) -> int:
        """Delete every entry of a tenant, found by SCAN; return how many there were."""
        return sum(map(self._delete, self._scan(f"{check_tenant(tenant)}/*")))

    def keys(self, tenant: str) -> Iterator[str]:
        """Yield the keys of a tenant's entries, found by SCAN, which may find one twice."""
        pages = list(self._scan(f"{check_tenant(tenant)}/*"))  # now, because a scan has to end in time
        yield from chain.from_iterable(pages)

    def counters(self) -> dict[str, TierCounters]:
        """Return a snapshot."""
        return {self.name: self._monitor.snapshot()}

    def close(self) -> None:
        """Close the connections. May be called again; a later operation opens new ones."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _open(self, key: str, reply: bytes) -> bytes | None:
        """Return the blob in a reply to GETRANGE. A bad or expired entry is deleted and counted, and is a miss."""
        if len(reply) > self._most:
            self._monitor.beyond(key, self._most - HEADER_BYTES)
        elif reply:  # of a missing key it is empty
            return self._monitor.opened(key, reply, self._ttl, lambda: self._delete([key]))
        return None

    def _delete(self, keys: Sequence[str]) -> int:
        return sum(self._pipelined([("UNLINK", _PREFIX + key) for key in keys], int))

    def _scan(self, pattern: str) -> Iterator[list[str]]:
        """Yield the keys of matching entries of all nodes, one page at a time."""
        end = time.monotonic() + _SCAN_SECONDS
        for server in self._tried(self._servers):
            cursor = 0
            while True:
                cursor, names = self._tried(
                    lambda _, cursor=cursor, server=server: _page(server.scan(cursor, _PREFIX + pattern, _SCAN_PAGE))  # type: ignore[misc]
                )
                yield names
                if not cursor:
                    break
                if time.monotonic() > end:
                    raise self._failure(InvalidResponse(f"SCAN: must end within {_SCAN_SECONDS:g} s"))

    def _servers(self, client: Any) -> list[Any]:
        return [client.get_redis_connection(node) for node in client.get_primaries()] if self._cluster else [client]

    def _pipelined(self, commands: Sequence[tuple[Any, ...]], kind: Any) -> list[Any]:
        """Run commands with one round trip to each node; return the replies, which must be of `kind`."""

        def run(client: Any) -> list[Any]:
            with client.pipeline(transaction=False) as pipeline:
                for command in commands:
                    pipeline.execute_command(*command)
                replies: list[Any] = pipeline.execute(raise_on_error=False)
            for reply in replies:
                if isinstance(reply, Exception):
                    raise reply
                if not isinstance(reply, kind):
                    raise InvalidResponse(f"unexpected reply: {type(reply).__name__}")
            return replies

        return self._tried(run) if commands else []

    def _tried(self, work: Callable[[Any], _T]) -> _T:
        """Return `work(client)`.

        Raises:
            StoreError: it failed. redis-py passes on exceptions of other libraries, and of any class if a server
                misbehaves.
        """
        try:
            with self._lock:
                if self._client is None:
                    self._client = self._connected()
                client = self._client
            return work(client)
        except Exception as error:
            failure = self._failure(error)
        raise failure  # outside, because the cause may hold a password that the server sent back

    def _connected(self) -> Any:
        """Return a client. One of a cluster asks a node for the slots now."""
        options: dict[str, Any] = {
            "socket_timeout": self._timeout, "socket_connect_timeout": self._timeout, "protocol": 2,
            "socket_read_size": _READ_BYTES, "max_connections": _CONNECTIONS,
        }  # fmt: skip
        backoff = ExponentialBackoff(cap=0.1, base=0.01)
        if self._cluster:
            return RedisCluster.from_url(self._url, retry=Retry(backoff, 2), **options)
        # By default redis-py also tries again after timeouts.
        retry = Retry(backoff, 1, supported_errors=(redis.ConnectionError,))
        pool = redis.BlockingConnectionPool.from_url(self._url, timeout=self._timeout, retry=retry, **options)
        return redis.Redis.from_pool(pool)

    def _failure(self, error: Exception) -> StoreError:
        """Count a failed operation; return the error to raise."""
        if isinstance(error, StoreError):
            return error
        hint = ""
        if isinstance(error, redis.TimeoutError):
            hint = f" (no answer within timeout={self._timeout:g} s)"
        elif isinstance(error, OutOfMemoryError):
            hint = " (the server is full and may not evict: raise its maxmemory or set allkeys-lru)"
        return self._monitor.failure(error, hint)


def _page(reply: Any) -> tuple[int, list[str]]:
    """Return the cursor and the keys of entries in a reply to SCAN."""
    cursor, names = reply
    found = [_ENTRY.fullmatch(name) for name in names]
    return int(cursor), [match[1].decode() for match in found if match is not None]
