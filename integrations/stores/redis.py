"""Blobs in Redis or Valkey, on one server or a cluster, shared by all processes that use the same URL.

    cuvee:tenant/id   one sealed entry: written by SET, read by GETRANGE, expired by the server

**The server evicts.** Give it `maxmemory` and `maxmemory-policy allkeys-lru` (or allkeys-lfu); a store has no budget of
its own. Routing, redirections of a cluster whose slots move, and retries are those of redis-py.

A reply is bounded by asking: reads request at most one byte more than the largest entry, and lookups only lengths. A
server that answers with more than it was asked for can fill its client's memory, so whoever runs the server is trusted
that far, but not with what a model reads: envelopes are verified, and blobs may carry a tag (`Codec(key=)`).
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from cuvee.codec.errors import InputError
from cuvee.integrations.stores.counted import CountedStore
from cuvee.integrations.stores.envelope import HEADER_BYTES, seal
from cuvee.integrations.stores.redaction import redacted, secrets_of

try:
    import redis
    from redis.backoff import ExponentialBackoff
    from redis.cluster import RedisCluster
    from redis.exceptions import InvalidResponse, OutOfMemoryError, ResponseError
    from redis.retry import Retry
except ImportError as missing:
    raise ImportError("redis stores need redis-py: pip install 'cuvee[redis]'") from missing

_CONNECTIONS = 64
_READ_BYTES = 1 << 20  # redis-py reads 32 or 64 KiB at a time by default, which is half as fast from 1 MB up
_GET_BATCH = 32  # payloads in one round trip; the server holds its replies in memory until they are read
_SCAN_PAGE = 1000
_SCAN_SECONDS = 3600.0  # twice the time for 10^9 keys; bounds a scan that the server never ends
_PREFIX = "cuvee:"
_ENTRY = re.compile(rb"cuvee:([0-9a-f]{1,64}/[0-9a-f]{1,128})")


class RedisStore(CountedStore):
    """Sealed entries in a Redis or Valkey server (5 or newer) or cluster. It connects when it is first used.

    An operation fails if the server does not reply for `timeout`, and is not tried again then. Connections that break
    are made once more; a cluster's commands are tried three times, while slots or nodes change.

        >>> from cuvee.integrations.stores.base import StoreError
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

    Raises:
        InputError: an argument is out of range, or redis-py cannot parse the URL.
    """

    name = "redis"
    shared = True

    def __init__(self, url: str, ttl: float | None = None, timeout: float = 1.0, cluster: bool = False) -> None:
        super().__init__(f"redis store {redacted(url)}", ttl, secrets_of(url))
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
        self._url, self._timeout, self._cluster = url, timeout, cluster
        self._lock = threading.Lock()
        self._client: Any = None

    def close(self) -> None:
        """Close the connections. May be called again; a later operation opens new ones."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _read(self, keys: Sequence[str]) -> list[bytes | None]:
        blobs: list[bytes | None] = []
        for start in range(0, len(keys), _GET_BATCH):
            batch = keys[start : start + _GET_BATCH]
            last = HEADER_BYTES + self.max_entry
            commands = [("GETRANGE", _PREFIX + key, 0, last) for key in batch]
            replies = self._pipelined(commands, bytes, b"no string")  # which is a bad entry
            blobs += [self._blob(key, reply) for key, reply in zip(batch, replies, strict=True)]
        return blobs

    def _blob(self, key: str, reply: bytes) -> bytes | None:
        """Return the blob in a reply to GETRANGE, which is empty if there is none."""
        if len(reply) > HEADER_BYTES + self.max_entry:
            self._beyond(key, self.max_entry)
            return None
        return self._opened(key, reply) if reply else None

    def _write(self, key: str, blob: bytes) -> bool:
        expiry = () if self.ttl is None else ("PX", max(1, round(1000 * self.ttl)))
        (reply,) = self._pipelined([("SET", _PREFIX + key, seal(key, blob, time.time()), *expiry)], bool | bytes)
        if reply not in (True, b"OK"):
            raise InvalidResponse("SET: must be answered by OK")
        return True

    def _there(self, keys: Sequence[str]) -> list[bool]:
        replies = self._pipelined([("STRLEN", _PREFIX + key) for key in keys], int, 0)
        return [0 < reply <= HEADER_BYTES + self.max_entry for reply in replies]

    def _remove(self, keys: Sequence[str]) -> int:
        return sum(self._pipelined([("UNLINK", _PREFIX + key) for key in keys], int))

    def _pages(self, tenant: str) -> Iterator[list[str]]:
        """Yield the keys of a tenant's entries in all nodes, found by SCAN, which may find one twice."""
        pattern, spent = f"{_PREFIX}{tenant}/*", 0.0
        client = self._connected()
        nodes = [client.get_redis_connection(node) for node in client.get_primaries()] if self._cluster else [client]
        for server in nodes:
            cursor = None
            while cursor != 0:
                begun = time.monotonic()
                cursor, names = server.scan(cursor or 0, pattern, _SCAN_PAGE)
                found = [_ENTRY.fullmatch(name) for name in names]
                spent += time.monotonic() - begun
                yield [match[1].decode() for match in found if match is not None]
                if cursor and spent > _SCAN_SECONDS:
                    raise InvalidResponse(f"SCAN: must end within {_SCAN_SECONDS:g} s")

    def _pipelined(self, commands: Sequence[tuple[Any, ...]], kind: Any, no_string: Any = None) -> list[Any]:
        """Run commands with one round trip to each node; return the replies, which must be of `kind`, and `no_string`
        for a key whose value is a list, say.
        """
        with self._connected().pipeline(transaction=False) as pipeline:
            for command in commands:
                pipeline.execute_command(*command)
            replies: list[Any] = pipeline.execute(raise_on_error=False)
        if no_string is not None:
            replies = [no_string if _is_no_string(reply) else reply for reply in replies]
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
            if not isinstance(reply, kind):
                raise InvalidResponse(f"unexpected reply: {type(reply).__name__}")
        return replies

    def _connected(self) -> Any:
        """Return the client, made by the first call."""
        with self._lock:
            if self._client is None:
                self._client = self._new_client()
            return self._client

    def _new_client(self) -> Any:
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

    def _hint(self, error: Exception) -> str:
        if isinstance(error, redis.TimeoutError):
            return f" (no answer within timeout={self._timeout:g} s)"
        if isinstance(error, OutOfMemoryError):
            return " (the server is full and may not evict: raise its maxmemory or set allkeys-lru)"
        return ""


def _is_no_string(reply: object) -> bool:
    return isinstance(reply, ResponseError) and str(reply).startswith("WRONGTYPE")
