"""Blobs in object storage (S3, Google Cloud Storage, Azure, and whatever else fsspec speaks), one object an entry.

    <prefix>/<tenant>/<first two digits of the id>/<id>

There is no byte budget: lifecycle rules of the bucket delete what is old. An object store shows an object when all of
it has arrived; a local file system does not, so there an entry is written under another name and renamed. On file
systems that are neither (SFTP, SMB) a reader may meet half an entry, which its checksum turns into a counted miss.
Timeouts and retries are those of the protocol's client: s3fs takes some 10 s to say that nobody answers.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from cuvee.codec.errors import CorruptError, InputError
from cuvee.integrations.stores.base import (
    BAD_SECTORS,
    MAX_ENTRY_BYTES,
    ODD_ENTRY,
    Store,
    StoreError,
    TierCounters,
    check_key,
    check_max_entry,
    check_tenant,
)
from cuvee.integrations.stores.envelope import HEADER_BYTES, Expired, seal, unseal
from cuvee.integrations.stores.forks import tell_after_fork
from cuvee.integrations.stores.threads import Crew
from cuvee.integrations.stores.urls import redacted, scrubbed, secrets_of

try:
    from fsspec import get_filesystem_class
    from fsspec.core import url_to_fs
except ImportError as missing:
    raise ImportError("object stores need fsspec: pip install cuvee[objects]") from missing

_log = logging.getLogger(__name__)

_THREADS = 16  # requests under way at once: each mostly waits for the network
_CLOSE_SECONDS = 10.0
_LOCAL = {"file", "local"}

T = TypeVar("T")


class ObjectStore(Store):
    """Sealed entries as objects. Connects when it is first used.

    On a local file system folders are made 0700 and files 0600: they hold prompts.

    Args:
        url: as fsspec takes it: `s3://bucket/prefix`, `gs://…`, `az://…`, `memory://…`, `file:///…`. Credentials come
            from the environment, as the protocol's package documents.
        ttl: seconds an entry lives after it was written; None for ever. An old one is deleted when it is asked for.
        max_entry: bytes of a blob; larger ones are neither kept nor read.

    Raises:
        InputError: `ttl` is out of range, or fsspec does not know the protocol.
        ImportError: the package of the protocol is missing.
    """

    name = "object"
    shared = True

    def __init__(self, url: str, ttl: float | None = None, *, max_entry: int = MAX_ENTRY_BYTES) -> None:
        if ttl is not None and not ttl > 0:
            raise InputError(f"ttl: must be above 0 seconds, got {ttl}")
        self._url, self._where = url, redacted(url)
        self._secrets = secrets_of(url)
        try:
            kind = get_filesystem_class(url.partition("://")[0].partition("::")[0] if "://" in url else "file")
        except ValueError as error:
            raise InputError(f"url: fsspec cannot read {self._where}: {scrubbed(error, self._secrets)}") from error
        except ImportError as error:
            raise ImportError(f"object store {self._where}: {error}") from error
        self._local = not _LOCAL.isdisjoint((kind.protocol,) if isinstance(kind.protocol, str) else kind.protocol)
        self._max_data = HEADER_BYTES + check_max_entry(max_entry)
        self._ttl = ttl
        self.after_fork()
        tell_after_fork(self)
        self._counters = TierCounters()
        self._warned: set[str] = set()

    def after_fork(self) -> None:
        """New locks, threads and connections: those there were are the parent's."""
        self._lock = threading.Lock()
        self._connecting = threading.Lock()
        self._threads: Crew | None = None
        self._place: tuple[Any, str] | None = None

    def get(self, key: str) -> bytes | None:
        """The blob of `key`, checked; None if it is not there."""
        path = _path(key)
        data = self._call(self._read, path)
        blob: bytes | None = None
        problem: Exception | None = None
        if data is not None and len(data) > self._max_data:
            # Others may be allowed to read it: it stays.
            self._odd(path, f"more than the {self._max_data - HEADER_BYTES} bytes that max_entry_mb allows")
        elif data is not None:
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
        """Keep `blob` under `key`, replacing what was there; False if it is larger than `max_entry`."""
        path = _path(key)
        if HEADER_BYTES + len(blob) > self._max_data:
            with self._lock:
                self._counters.dropped += 1
            limit = f"{len(blob)} bytes, max_entry_mb allows {self._max_data - HEADER_BYTES}"
            self._warn("entries too large are dropped", limit)
            return False
        try:
            fs, root = self._connected()
            self._write(fs, f"{root}/{path}", seal(key, blob, time.time()))
        except Exception as error:  # FileNotFoundError too: the bucket does not exist
            if self._is_odd(error):
                self._odd(path, error)
                return False
            raise self._failure(error) from error
        with self._lock:
            self._counters.puts += 1
            self._counters.put_bytes += len(blob)
        return True

    def contains(self, keys: Sequence[str]) -> list[bool]:
        """Whether each key is there now, 16 requests at once. An entry past its time counts until it is asked for."""
        # Not fs.exists, which takes every failure for an absent object.
        return self._map(self._there, [_path(key) for key in keys])

    def delete(self, key: str) -> bool:
        """Delete an entry; whether it was there (deleting what is not there is no error of an object store)."""
        path = _path(key)
        there = self._there(path)
        if there:
            self._call(_remove, path)
        return there

    def delete_tenant(self, tenant: str) -> int:
        """Delete every object of a tenant, half-written ones included; how many there were."""
        fs, _ = self._connect()
        paths = self._call(lambda fs, path: fs.find(path), check_tenant(tenant)) or []

        def remove(path: str) -> None:
            try:
                fs.rm_file(path)
            except FileNotFoundError:
                pass
            except Exception as error:
                raise self._failure(error) from error

        self._map(remove, paths)
        return len(paths)

    def counters(self) -> dict[str, TierCounters]:
        """A snapshot."""
        with self._lock:
            return {self.name: replace(self._counters)}

    def close(self) -> None:
        """Stop the threads; one whose request hangs is waited for 10 s. May be called again."""
        with self._lock:
            threads, self._threads = self._threads, None
        if threads is not None and not threads.dismiss(_CLOSE_SECONDS):
            _log.warning("object store %s was closed while requests hang", self._where)

    def _connected(self) -> tuple[Any, str]:
        """The file system, and the path of our folder in it; of some protocols this is the moment it connects."""
        with self._connecting:
            if self._place is None:
                # Directory listings that fsspec remembers would hide what other processes write and delete.
                fs, root = url_to_fs(self._url, use_listings_cache=False)
                self._place = fs, root.rstrip("/")
            return self._place

    def _connect(self) -> tuple[Any, str]:
        """As `_connected`.

        Raises:
            StoreError: nobody answers, or lets us in.
        """
        try:
            return self._connected()
        except Exception as error:
            raise self._failure(error) from error

    def _read(self, fs: Any, path: str) -> Any:
        """An object, or one byte too many of it."""
        if self._local:
            info = fs.info(path)
            if info["type"] != "file" or info["islink"]:
                raise IsADirectoryError(f"{path}: no regular file")  # a FIFO, perhaps, that nobody writes to
        try:
            return fs.cat_file(path, start=0, end=self._max_data + 1)
        except FileNotFoundError:
            raise
        except Exception as error:
            # Of nothing there is no first byte: some servers refuse to send a range of it.
            if "range" in str(error).lower() and fs.info(path)["size"] == 0:
                return b""
            raise

    def _write(self, fs: Any, path: str, data: bytes) -> None:
        if not self._local:
            fs.pipe_file(path, data)
            return
        _make_folders(os.path.dirname(path))
        partial = f"{path}.{secrets.token_hex(8)}"
        try:
            os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            fs.pipe_file(partial, data)
            os.replace(partial, path)
        except BaseException:
            with suppress(FileNotFoundError, NotADirectoryError):
                os.unlink(partial)
            raise

    def _there(self, path: str) -> bool:
        info = self._call(lambda fs, path: fs.info(path), path)
        if info is None or info.get("type", "file") != "file" or (self._local and info["islink"]):
            return False
        # Of what is too large to be read we say that it is not there: a smaller one may take its place.
        return (info.get("size") or 0) <= self._max_data

    def _discard(self, path: str, problem: Exception) -> None:
        """Delete a bad or expired entry. That this fails is counted, and does not turn the miss into an error."""
        if not isinstance(problem, Expired):
            self._warn("bad entries are deleted and missed", problem)
        try:
            self._call(_remove, path)
        except StoreError as error:
            self._warn("bad entries could not be deleted", error)

    def _call(self, function: Callable[[Any, str], T], path: str) -> T | None:
        """What `function(file system, path)` returns, `path` being below our folder; None if there is no such object.

        Raises:
            StoreError: any other failure. fsspec's file systems pass on the exceptions of their clients, of any class.
        """
        fs, root = self._connect()
        try:
            return function(fs, f"{root}/{path}")
        except FileNotFoundError:
            return None
        except Exception as error:
            if not self._is_odd(error):
                raise self._failure(error) from error
            self._odd(path, error)
            return None

    def _is_odd(self, error: Exception) -> bool:
        """Whether an entry is to blame, and not the store."""
        if isinstance(error, (IsADirectoryError, NotADirectoryError)):
            return True
        return self._local and isinstance(error, OSError) and error.errno in ODD_ENTRY | BAD_SECTORS

    def _odd(self, path: str, why: object) -> None:
        """Count an entry that cannot be used, where the rest of the store can."""
        with self._lock:
            self._counters.errors += 1
        self._warn("entries that cannot be used are missed", f"{path}: {why}")

    def _map(self, function: Callable[[str], T], items: Sequence[str]) -> list[T]:
        """The function of each item, in order, in threads if there are several."""
        if len(items) < 2:
            return [function(item) for item in items]
        with self._lock:
            if self._threads is None:
                self._threads = Crew(_THREADS, "cuvee-object-store")
            futures = [self._threads.submit(function, item) for item in items]
        return [future.result() for future in futures]

    def _failure(self, error: Exception) -> StoreError:
        """Count a failure and say what it was."""
        with self._lock:
            self._counters.errors += 1
        return StoreError(f"object store {self._where}: {type(error).__name__}: {scrubbed(error, self._secrets)}")

    def _warn(self, what: str, why: object) -> None:
        """Log the first time that something happens."""
        with self._lock:
            first = what not in self._warned
            self._warned.add(what)
        if first:
            _log.warning("object store %s: %s (said once): %s", self._where, what, why)


def _path(key: str) -> str:
    """Where an entry lies below our folder."""
    tenant, entry = check_key(key)
    return f"{tenant}/{entry[:2]}/{entry}"


def _remove(fs: Any, path: str) -> None:
    fs.rm_file(path)


def _make_folders(path: str) -> None:
    """Create a folder of the local file system and those above it, as far as they are missing, for us alone."""
    if path and not os.path.isdir(path):
        _make_folders(os.path.dirname(path))
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
