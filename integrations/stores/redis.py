"""Blobs in Redis or Valkey, one server or a cluster, for all processes that are given the same URL.

    cuvee:{b}:tenant/id   one sealed entry: written by SET, read by GET, expired by the server

With a budget the server also keeps books:

    cuvee:{b}:lru         sorted set: entry -> when it was last used, by a clock that counts uses
    cuvee:{b}:size        hash: entry -> its bytes
    cuvee:{b}:sums        hash: the bytes of all entries, the clock of lru, the cursor of the sweep, "counted"
    cuvee:{b}:lru:tenant  like lru, for one tenant; only if each tenant has a budget. Its bytes are in sums, too

`{b}` is the bucket. As a hash tag it keeps all of this in one slot of a cluster, which a script needs. A single server
has bucket 0. A cluster has 64 buckets, chosen by a hash of the key, and each gets 1/64 of the budget. A full bucket
evicts even if another has room, so with n entries per bucket about 1/sqrt(n) of the budget stays unused. Within a
bucket the least recently used entry goes first, over all processes.

Payloads do not pass through Lua, which copies them several times (a put of 1 MB took six times as long). They travel by
SET and GET, and one script (`redis_scripts`) brings the books up to date in the same round trip. It looks at what the
server has now and can be repeated without harm. An entry that the server expired, evicted or lost is therefore put
right when it is next asked for, and otherwise by a sweep: every put looks at the next 16 entries of the books. If the
books themselves were lost, or never kept, they are rewritten from a SCAN.
"""

from __future__ import annotations

import hashlib
import logging
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import xxhash

from cuvee.codec.errors import CorruptError, InputError
from cuvee.integrations.stores.base import (
    MAX_ENTRY_BYTES,
    Store,
    StoreError,
    TierCounters,
    WarnOnce,
    check_key,
    check_max_entry,
    check_max_tenant,
    check_tenant,
    check_ttl,
)
from cuvee.integrations.stores.envelope import HEADER_BYTES, ExpiredError, seal, unseal
from cuvee.integrations.stores.forks import tell_after_fork
from cuvee.integrations.stores.redaction import redacted, scrubbed, secrets_of
from cuvee.integrations.stores.redis_scripts import ACCOUNT, DISCARD

try:
    import redis
    from redis.exceptions import InvalidResponse, MovedError, OutOfMemoryError
except ImportError as missing:
    raise ImportError("redis stores need redis-py: pip install cuvee[redis]") from missing
from cuvee.integrations.stores.redis_nodes import Cluster, Command, OneServer, Server
from cuvee.integrations.stores.redis_replies import MOST_BYTES, Account, account, array, expect, page, whole_number

_log = logging.getLogger(__name__)

_CLUSTER_BUCKETS = 64
_MIN_BUCKET_BYTES = 16_000_000
_MAX_VALUE_BYTES = 512 * 1024 * 1024  # proto-max-bulk-len, the server's default limit of one value
_CONNECTIONS = 64
_GET_BATCH = 32  # payloads in one round trip; the server holds its replies in memory until they are read
_SCAN_PAGE = 1000
_SCAN_SECONDS = 3600.0  # twice what 10^9 keys take; one that never says "done" must not hold us forever
_LONGEST_MESSAGE = 1000
_SCHEMES = {"redis": "redis", "rediss": "rediss", "valkey": "redis", "valkeys": "rediss", "unix": "unix"}
_ENTRY = re.compile(rb"cuvee:\{(\d{1,4})\}:([0-9a-f]+/[0-9a-f]+)")

_T = TypeVar("_T")


class RedisStore(Store):
    """Sealed entries in a Redis or Valkey server (5 or newer) or cluster.

    Without `max_bytes`, the server evicts by its own `maxmemory` and `maxmemory-policy`. With it, the store evicts, and
    the server's `maxmemory` should be some 10 % larger, for what Redis needs beside the payloads. Give all stores on
    one server the same budget: the smallest one decides.

    An operation fails after about `timeout`, and nothing that timed out is tried again. Sending a blob has to take less
    than that. When one is read, each MiB of it has to arrive within `timeout`.

        >>> store = RedisStore("redis://localhost:6379/0", max_bytes=8_000_000_000, ttl=3600)  # does not connect yet
        >>> try:
        ...     blob = store.get("ab/01")  # None: a miss
        ... except StoreError:
        ...     blob = None  # nobody answers; a GuardedStore does this for you
        >>> store.close()

    Args:
        url: `redis://[user:password@]host[:port][/db]`, `rediss://` (TLS), `valkey://`, `valkeys://` or `unix://path`,
            with redis-py's query parameters.
        max_bytes: budget for entries, their 64-byte envelopes included. A cluster takes no less than 1.024 GB.
        ttl: seconds an entry lives after it was written; None means forever.
        timeout: seconds to wait for a connection and for an answer.
        cluster: whether the URL names a node of a Redis Cluster.
        max_entry: largest blob, in bytes. Larger ones are neither kept nor read.
        max_tenant_bytes: budget of each tenant, kept by evicting its own entries. It needs `max_bytes`, and has the
            same minimum in a cluster. None means no limit.

    Raises:
        InputError: an argument is out of range, or redis-py cannot read the URL.
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
    ) -> None:
        scheme, separator, rest = url.partition("://")
        if not separator or scheme not in _SCHEMES:
            raise InputError(f"url: the scheme must be one of {', '.join(_SCHEMES)}")
        self._clustered = cluster
        self._buckets = _CLUSTER_BUCKETS if cluster else 1
        if cluster and scheme == "unix":
            raise InputError("url: a cluster is reached by host and port, not by a socket")
        self._ttl = check_ttl(ttl)
        if not timeout > 0:
            raise InputError(f"timeout: must be above 0 seconds, got {timeout}")
        least = self._buckets * _MIN_BUCKET_BYTES if cluster else 1
        if max_bytes is not None and max_bytes < least:
            why = f": it is divided among {self._buckets} buckets" if cluster else ""
            raise InputError(f"max_bytes: must be at least {least}, got {max_bytes}{why}")
        check_max_tenant(max_tenant_bytes, max_bytes)
        if max_tenant_bytes is not None and (max_bytes is None or max_tenant_bytes < least):
            raise InputError(f"max_tenant_bytes: must be at least {least}, and takes max_bytes, got {max_tenant_bytes}")
        self._tenant_budget = None if max_tenant_bytes is None else max_tenant_bytes // self._buckets
        self._budget = None if max_bytes is None else max_bytes // self._buckets
        self._max_data = HEADER_BYTES + check_max_entry(max_entry)
        self._timeout = timeout
        self._where = redacted(url)
        self._secrets = secrets_of(url)
        self._counters = TierCounters()
        self._held: dict[int, tuple[int, int]] = {}
        self._warn_once = WarnOnce(_log, f"redis store {self._where}")
        most = min(self._max_data + 1, _MAX_VALUE_BYTES)
        try:
            self._nodes: OneServer | Cluster = (Cluster if cluster else OneServer)(
                f"{_SCHEMES[scheme]}://{rest}", timeout, _CONNECTIONS, most
            )
        except ValueError:
            # The message of the ValueError may quote a part of the password.
            raise InputError("url: redis-py cannot read it; percent-encode what is special in a password") from None
        self.after_fork()
        tell_after_fork(self)

    def after_fork(self) -> None:
        """Make new locks. redis-py itself notices that its connections belong to the parent."""
        self._lock = threading.Lock()
        self._recounting = threading.Lock()
        self._nodes.after_fork()

    def get(self, key: str) -> bytes | None:
        """The blob of `key`, its checksum verified; None if it is not there."""
        return self.get_many([key])[0]

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """`get` of each key, 32 in one round trip to each node."""
        for key in keys:
            check_key(key)
        blobs: list[bytes | None] = []
        for start in range(0, len(keys), _GET_BATCH):
            batch = keys[start : start + _GET_BATCH]
            replies = self._send([(self._bucket(key), self._get(key)) for key in batch] + self._touch(batch))
            for key, data in zip(batch, replies, strict=False):
                blobs.append(self._open(key, data))
            for reply in replies[len(batch) :]:
                # The blobs are here. They must not be lost because a full server or a read-only replica takes no notes.
                if isinstance(reply, Exception):
                    text = "cannot note the use of entries; they will be evicted as if unused"
                    self._warn("touch", text, self._failure(reply))
        return blobs

    def put(self, key: str, blob: bytes) -> bool:
        """Keep `blob` under `key`; False if it exceeds the budget of its bucket, `max_entry` or Redis's 512 MiB."""
        check_key(key)
        bucket = self._bucket(key)
        data = seal(key, blob, time.time())
        budgets = [limit for limit in (self._budget, self._tenant_budget) if limit is not None]
        limit = min(_MAX_VALUE_BYTES, self._max_data, *budgets)
        if len(data) > limit:
            with self._lock:
                self._counters.dropped += 1
            text = "drops entries that are too large; the first has %d bytes with its envelope, the limit is %d"
            self._warn_once("large", text, len(data), limit)
            return False
        expiry = () if self._ttl is None else ("PX", max(1, round(1000 * self._ttl)))
        commands: list[Command] = [("SET", self._name(key), data, *expiry)]
        if self._budget is not None:
            # Plain commands, because redis-py's own transactions put the blob into the text of their errors.
            account = self._account(bucket, [key], self._budget, self._tenant_budget)
            commands = [("MULTI",), *commands, account, ("EXEC",)]
        replies = self._checked(self._send([(bucket, command) for command in commands]))
        done = self._tried(lambda: _read_put(replies))
        with self._lock:
            self._counters.puts += 1
            self._counters.put_bytes += len(blob)
            if done is not None:
                self._counters.evictions += done.evicted
                self._held[bucket] = (done.bytes, done.entries)
        if done is not None and not done.complete and self._recounting.acquire(blocking=False):
            try:
                self._recount()
            finally:
                self._recounting.release()
        return True

    def contains(self, keys: Sequence[str]) -> list[bool]:
        """Whether each key is there now, in one round trip to each node."""
        for key in keys:
            check_key(key)
        # An entry that is too large to be read counts as absent, so that a smaller one may take its place.
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

    def counters(self) -> dict[str, TierCounters]:
        """A snapshot. `bytes` and `entries` are what the server said at the last put to each bucket."""
        with self._lock:
            snapshot = replace(self._counters)
            if len(self._held) == self._buckets:
                snapshot.bytes = sum(total for total, _ in self._held.values())
                snapshot.entries = sum(entries for _, entries in self._held.values())
        return {self.name: snapshot}

    def close(self) -> None:
        """Close the connections. May be called again; a later operation opens new ones."""
        self._nodes.close()

    def _get(self, key: str) -> Command:
        """The command that reads an entry; of one that is too large, one byte more than the limit."""
        if self._max_data >= _MAX_VALUE_BYTES:
            return ("GET", self._name(key))  # the server has no larger ones
        return ("GETRANGE", self._name(key), 0, self._max_data)

    def _open(self, key: str, reply: Any) -> bytes | None:
        """The blob in a reply to GET. A bad or expired one is counted, deleted, and a miss."""
        if isinstance(reply, Exception) and not _is_no_string(reply):
            raise self._failure(reply) from reply
        if reply is not None and not isinstance(reply, (bytes, Exception)):
            raise self._failure(InvalidResponse(f"GET: must be a string, got one of the type {type(reply).__name__}"))
        blob: bytes | None = None
        problem: Exception | None = None
        if isinstance(reply, bytes) and len(reply) > self._max_data:
            # It stays: others may be allowed to read it.
            with self._lock:
                self._counters.answer(None)
                self._counters.errors += 1
            text = "cannot read entries that are too large; the first has more than %d bytes"
            self._warn_once("large read", text, self._max_data - HEADER_BYTES)
            return None
        if isinstance(reply, Exception):
            problem = reply
        elif reply is not None and (reply or self._max_data >= _MAX_VALUE_BYTES):  # GETRANGE of no entry is empty
            try:
                blob = unseal(key, reply, self._ttl)
            except (CorruptError, ExpiredError) as error:
                problem = error
        with self._lock:
            self._counters.answer(blob, problem)
        if reply is not None and problem is not None:
            if not isinstance(problem, ExpiredError):
                self._warn("corrupt", "deletes bad entries and counts them as misses; the first", problem)
            self._discard(key, reply)
        return blob

    def _discard(self, key: str, reply: bytes | Exception) -> None:
        """Delete an entry if it still is what was read. A failure is counted, and the miss remains a miss."""
        digest = hashlib.sha1(reply, usedforsecurity=False).hexdigest() if isinstance(reply, bytes) else ""
        command = (self._bucket(key), ("EVAL", DISCARD, 1, self._name(key), digest))
        try:
            self._checked(self._send([command, *self._touch([key])]))
        except StoreError as error:
            self._warn("discard", "cannot delete a bad entry; it stays a miss", error)

    def _delete(self, keys: Sequence[str]) -> int:
        """Delete entries and take them off the books; return how many there were."""
        commands = [(self._bucket(key), ("UNLINK", self._name(key))) for key in keys]
        replies = self._checked(self._send(commands + self._touch(keys)))
        return sum(self._numbers(replies[: len(keys)], "UNLINK", 1))

    def _recount(self) -> None:
        """Rewrite the books of all buckets, in the order in which SCAN finds the entries."""
        for keys in self._scan("*/*"):
            self._checked(self._send(self._touch(keys)))
        done = [(b, ("HSET", f"{self._prefix(b)}sums", "counted", 1)) for b in range(self._buckets)]
        self._checked(self._send(done))

    def _scan(self, pattern: str) -> Iterator[list[str]]:
        """The keys of entries that match, a page at a time, from every primary."""
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
        """The command that brings the books up to date about `keys`, and evicts if budgets are given (in bytes)."""
        # The script in full, not by its digest: after MULTI it is too late to learn that a server has forgotten it.
        prefix = self._prefix(bucket)
        books = [prefix + book for book in ("lru", "size", "sums")]
        return ("EVAL", ACCOUNT, len(books), *books, prefix, budget, -1 if tenant is None else tenant, *keys)

    def _touch(self, keys: Sequence[str]) -> list[tuple[int, Command]]:
        """Commands that bring the books up to date about some entries, if books are kept."""
        if self._budget is None:
            return []
        by_bucket: dict[int, list[str]] = defaultdict(list)
        for key in keys:
            by_bucket[self._bucket(key)].append(key)
        return [(bucket, self._account(bucket, members)) for bucket, members in by_bucket.items()]

    def _send(self, commands: Sequence[tuple[int, Command]]) -> list[Any]:
        """Run commands, each on the node of its bucket, in one round trip to each node.

        In a cluster each node is addressed as a server of its own, since redis-py's cluster pipeline refuses scripts.
        If slots have moved or a node is gone, everything is sent once more, to where the slots are then. That is safe:
        each of our commands may be repeated.

        Returns:
            The replies in order, error replies as exceptions.

        Raises:
            StoreError: a server did not answer.
        """
        return self._tried(lambda: self._send_twice(commands) if self._clustered else self._send_once(commands))

    def _send_twice(self, commands: Sequence[tuple[int, Command]]) -> list[Any]:
        try:
            replies = self._send_once(commands)
        except redis.TimeoutError:
            raise
        except Exception:
            replies = None
        if replies is None or any(isinstance(reply, MovedError) for reply in replies):
            self._nodes.stale = True
            return self._send_once(commands)
        return replies

    def _send_once(self, commands: Sequence[tuple[int, Command]]) -> list[Any]:
        by_server: dict[Server, list[int]] = defaultdict(list)
        servers = {bucket: self._nodes.holder(self._prefix(bucket)) for bucket in {bucket for bucket, _ in commands}}
        for index, (bucket, _) in enumerate(commands):
            by_server[servers[bucket]].append(index)
        replies: list[Any] = [None] * len(commands)
        for server, indices in by_server.items():
            for index, reply in zip(indices, server.exchange([commands[i][1] for i in indices]), strict=True):
                replies[index] = reply
        return replies

    def _tried(self, work: Callable[[], _T]) -> _T:
        """`work()`, which talks to servers or reads what they said.

        Raises:
            StoreError: it failed. redis-py lets out exceptions of other libraries, and of any class if a server is odd.
        """
        try:
            return work()
        except Exception as error:
            self._nodes.stale = True
            raise self._failure(error) from error

    def _numbers(self, replies: Sequence[object], name: str, most: int) -> list[int]:
        return self._tried(lambda: [whole_number(reply, name, most) for reply in replies])

    def _checked(self, replies: list[Any]) -> list[Any]:
        """The replies, if none of them is an error, and neither is any reply inside a transaction.

        Raises:
            StoreError: the first error among them.
        """
        for reply in replies:
            for part in reply if isinstance(reply, list) else (reply,):
                if isinstance(part, Exception):
                    raise self._failure(part) from part
        return replies

    def _failure(self, error: Exception) -> StoreError:
        """Count a failure, and describe it."""
        with self._lock:
            self._counters.errors += 1
        # Servers and proxies that do not know AUTH send its arguments back, and with them the password.
        cause = f"{type(error).__name__}: {scrubbed(error, self._secrets)[:_LONGEST_MESSAGE]}"
        if isinstance(error, redis.TimeoutError):
            cause += f" (no answer within timeout={self._timeout:g} s)"
        elif isinstance(error, OutOfMemoryError):
            cause += " (the server is full and may not evict: raise its maxmemory, lower max_gb or set allkeys-lru)"
        return StoreError(f"redis store {self._where}: {cause}")

    def _warn(self, kind: str, text: str, error: Exception) -> None:
        """Log `text` and the error, without secrets, the first time that something of this kind happens."""
        self._warn_once(kind, "%s: %s", text, scrubbed(error, self._secrets)[:_LONGEST_MESSAGE])


def _is_no_string(reply: Any) -> bool:
    """Whether a reply says that the key of an entry holds something else than a string, such as a list."""
    return isinstance(reply, Exception) and "wrong kind of value" in str(reply)


def _read_put(replies: Sequence[object]) -> Account | None:
    """What the replies to a put say of its bucket; None if it keeps no books."""
    if len(replies) == 1:
        expect(replies[0], "SET", b"OK")
        return None
    expect(replies[0], "MULTI", b"OK")
    stored, accounts = array(replies[-1], "EXEC", 2)
    expect(stored, "SET", b"OK")
    return account(accounts)
