"""Blobs in object storage (S3, Google Cloud Storage, Azure, and whatever else fsspec speaks), one object an entry.

    <prefix>/<tenant>/<first two digits of the id>/<id>

There is no byte budget: lifecycle rules of the bucket delete what is old. An object store shows an object when all of
it has arrived; a local file system does not, so there an entry is written under another name and renamed. On file
systems that are neither (SFTP, SMB) a reader may meet half an entry, which its checksum turns into a counted miss.
Timeouts and retries are those of the protocol's client: s3fs takes some 10 s to say that nobody answers.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from cuvee.codec.errors import CorruptError, InputError
from cuvee.integrations.stores.base import Store, StoreError, TierCounters, check_key, check_tenant
from cuvee.integrations.stores.envelope import Expired, seal, unseal
from cuvee.integrations.stores.urls import redacted

try:
    from fsspec.core import url_to_fs
except ImportError as missing:
    raise ImportError("object stores need fsspec: pip install cuvee[objects]") from missing

_log = logging.getLogger(__name__)

_THREADS = 16  # requests under way at once: each mostly waits for the network
_LOCAL = {"file", "local"}

T = TypeVar("T")


class ObjectStore(Store):
    """Sealed entries as objects.

    Args:
        url: as fsspec takes it: `s3://bucket/prefix`, `gs://…`, `az://…`, `memory://…`, `file:///…`. Credentials come
            from the environment, as the protocol's package documents.
        ttl: seconds an entry lives after it was written; None for ever. An old one is deleted when it is asked for.

    Raises:
        InputError: `ttl` is out of range, or fsspec does not know the protocol.
        ImportError: the package of the protocol is missing.
    """

    name = "object"
    shared = True

    def __init__(self, url: str, ttl: float | None = None) -> None:
        if ttl is not None and not ttl > 0:
            raise InputError(f"ttl: must be above 0 seconds, got {ttl}")
        self._where = redacted(url)
        try:
            # Directory listings that fsspec remembers would hide what other processes write and delete.
            self._fs, root = url_to_fs(url, use_listings_cache=False)
        except ValueError as error:
            raise InputError(f"url: fsspec cannot read {self._where}: {error}") from error
        except ImportError as error:
            raise ImportError(f"object store {self._where}: {error}") from error
        self._root = root.rstrip("/")
        protocol = self._fs.protocol
        self._local = not _LOCAL.isdisjoint((protocol,) if isinstance(protocol, str) else protocol)
        self._ttl = ttl
        self._lock = threading.Lock()
        self._counters = TierCounters()
        self._warned: set[str] = set()
        self._threads: ThreadPoolExecutor | None = None

    def get(self, key: str) -> bytes | None:
        """The blob of `key`, checked; None if it is not there."""
        path = self._path(key)
        data = self._call(self._fs.cat_file, path)
        blob: bytes | None = None
        problem: Exception | None = None
        if data is not None:
            try:
                blob = unseal(key, data, self._ttl)
            except (CorruptError, Expired) as error:
                problem = error
        with self._lock:
            self._counters.answer(blob, problem)
        if problem is not None:
            self._discard(path, problem)
        return blob

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """`get` of each key, 16 at once."""
        return self._map(self.get, keys)

    def put(self, key: str, blob: bytes) -> bool:
        """Keep `blob` under `key`, replacing what was there."""
        path = self._path(key)
        try:
            self._write(path, seal(key, blob, time.time()))
        except Exception as error:  # FileNotFoundError too: the bucket does not exist
            raise self._failure(error) from error
        with self._lock:
            self._counters.puts += 1
            self._counters.put_bytes += len(blob)
        return True

    def contains(self, keys: Sequence[str]) -> list[bool]:
        """Whether each key is there now, 16 requests at once. An entry past its time counts until it is asked for."""
        # Not fs.exists, which takes every failure for an absent object.
        return [info is not None for info in self._map(self._info, [self._path(key) for key in keys])]

    def delete(self, key: str) -> bool:
        """Delete an entry; whether it was there (deleting what is not there is no error of an object store)."""
        path = self._path(key)
        there = self._info(path) is not None
        if there:
            self._call(self._fs.rm_file, path)
        return there

    def delete_tenant(self, tenant: str) -> int:
        """Delete every object of a tenant, half-written ones included; how many there were."""
        paths = self._call(self._fs.find, f"{self._root}/{check_tenant(tenant)}") or []
        self._map(lambda path: self._call(self._fs.rm_file, path), paths)
        return len(paths)

    def counters(self) -> dict[str, TierCounters]:
        """A snapshot."""
        with self._lock:
            return {self.name: replace(self._counters)}

    def close(self) -> None:
        """Stop the threads. May be called again."""
        with self._lock:
            threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown()

    def _path(self, key: str) -> str:
        tenant, entry = check_key(key)
        return f"{self._root}/{tenant}/{entry[:2]}/{entry}"

    def _write(self, path: str, data: bytes) -> None:
        if not self._local:
            self._fs.pipe_file(path, data)
            return
        self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        partial = f"{path}.{secrets.token_hex(8)}"
        try:
            self._fs.pipe_file(partial, data)
            self._fs.mv(partial, path)
        except BaseException:
            if self._fs.exists(partial):
                self._fs.rm_file(partial)
            raise

    def _info(self, path: str) -> Any:
        return self._call(self._fs.info, path)

    def _discard(self, path: str, problem: Exception) -> None:
        """Delete a bad or expired entry. That this fails is counted, and does not turn the miss into an error."""
        if not isinstance(problem, Expired):
            self._warn("bad entries are deleted and missed", problem)
        try:
            self._call(self._fs.rm_file, path)
        except StoreError as error:
            self._warn("bad entries could not be deleted", error)

    def _call(self, function: Callable[..., T], *arguments: Any) -> T | None:
        """What a method of the file system returns; None if there is no such object.

        Raises:
            StoreError: any other failure. fsspec's file systems pass on the exceptions of their clients, of any class.
        """
        try:
            return function(*arguments)
        except FileNotFoundError:
            return None
        except Exception as error:
            raise self._failure(error) from error

    def _map(self, function: Callable[[str], T], items: Sequence[str]) -> list[T]:
        """The function of each item, in order, in threads if there are several."""
        if len(items) < 2:
            return [function(item) for item in items]
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(_THREADS, "cuvee-object-store")
            threads = self._threads
        return list(threads.map(function, items))

    def _failure(self, error: Exception) -> StoreError:
        """Count a failure and say what it was."""
        with self._lock:
            self._counters.errors += 1
        return StoreError(f"object store {self._where}: {type(error).__name__}: {error}")

    def _warn(self, what: str, why: object) -> None:
        """Log the first time that something happens."""
        with self._lock:
            first = what not in self._warned
            self._warned.add(what)
        if first:
            _log.warning("object store %s: %s (said once): %s", self._where, what, why)
