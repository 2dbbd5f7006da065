"""Blobs in object storage: S3, Google Cloud Storage, Azure, and whatever else fsspec speaks. Each entry is one object.

    <prefix>/<tenant>/<first two digits of the id>/<id>

**There is no byte budget.** Object storage knows neither when an object was last read nor how much a prefix holds. A
budget would cost a write for every read, to note the use, and regular listings of the whole prefix. What the storage
does for free is to delete by age: give the bucket a lifecycle rule that deletes objects of this prefix some days after
they were written. `ttl` does not replace that rule: an expired entry is only deleted when somebody asks for it.

An object store shows an object once all of it has arrived. On file systems (SFTP, SMB) a reader may meet half an entry,
which its checksum turns into a counted miss. **Folders of this machine are refused**, because fsspec follows links in
them, out of the store; `file://` is their store. Timeouts and retries are those of the protocol's client: s3fs takes
some 10 s to report that nobody answers.

An object is read up to the largest size that may be an entry. Over HTTP we stop reading there, whatever the server
sends. The clients of other protocols ask for that many bytes, but take what they are sent.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from cuvee.codec.errors import CorruptError, InputError
from cuvee.integrations.stores.base import (
    MAX_ENTRY_BYTES,
    Store,
    StoreError,
    TierCounters,
    WarnOnce,
    check_key,
    check_max_entry,
    check_tenant,
    check_ttl,
)
from cuvee.integrations.stores.envelope import HEADER_BYTES, ExpiredError, seal, unseal
from cuvee.integrations.stores.forks import tell_after_fork
from cuvee.integrations.stores.redaction import redacted, scrubbed, secrets_of
from cuvee.integrations.stores.threads import ThreadPool

try:
    from fsspec import get_filesystem_class
    from fsspec.core import split_protocol, url_to_fs
    from fsspec.implementations.local import LocalFileSystem
except ImportError as missing:
    raise ImportError("object stores need fsspec: pip install cuvee[objects]") from missing

_log = logging.getLogger(__name__)

_THREADS = 16  # requests under way at once; each mostly waits for the network
_CLOSE_SECONDS = 10.0
_LONGEST_MESSAGE = 1000

_T = TypeVar("_T")


class ObjectStore(Store):
    """Sealed entries as objects. The store connects when it is first used.

        >>> store = ObjectStore("memory://bucket/kv")  # fsspec's own object storage in RAM
        >>> store.put("ab/01", b"blob"), store.get("ab/01")
        (True, b'blob')
        >>> store.delete_tenant("ab")
        1

    Args:
        url: as fsspec takes it: `s3://bucket/prefix`, `gs://…`, `az://…`, `memory://…`. Credentials come from the
            environment, as the protocol's package documents.
        ttl: seconds an entry lives after it was written; None means forever. An expired entry is deleted when it is
            asked for; a lifecycle rule of the bucket deletes the others.
        max_entry: largest blob, in bytes. Larger ones are neither kept nor read.

    Raises:
        InputError: `ttl` is out of range, fsspec does not know the protocol, or it is one of local files.
        ImportError: the package of the protocol is missing.
    """

    name = "object"
    shared = True

    def __init__(self, url: str, ttl: float | None = None, *, max_entry: int = MAX_ENTRY_BYTES) -> None:
        self._ttl = check_ttl(ttl)
        self._url, self._where = url, redacted(url)
        self._secrets = secrets_of(url)
        if "::" in url:
            # fsspec would open several protocols, one behind the other, with folders of this machine among them.
            raise InputError(f"url: must name one protocol and hold no '::', got {self._where}")
        try:
            protocol = split_protocol(url)[0]
            kind = get_filesystem_class(protocol)
        except ValueError as error:
            raise InputError(f"url: fsspec cannot read {self._where}: {scrubbed(error, self._secrets)}") from error
        except ImportError as error:
            raise ImportError(f"object store {self._where}: {error}") from error
        if issubclass(kind, LocalFileSystem):
            raise InputError(
                f"url: fsspec follows links in folders of this machine; open them as file:///path, got {self._where}"
            )
        self._http = protocol in ("http", "https")
        self._max_data = HEADER_BYTES + check_max_entry(max_entry)
        self.after_fork()
        tell_after_fork(self)
        self._counters = TierCounters()
        self._warn = WarnOnce(_log, f"object store {self._where}")

    def after_fork(self) -> None:
        """Make new locks, threads and connections: the present ones belong to the parent."""
        self._lock = threading.Lock()
        self._connecting = threading.Lock()
        self._threads: ThreadPool | None = None
        self._place: tuple[Any, str] | None = None

    def get(self, key: str) -> bytes | None:
        """The blob of `key`, its checksum verified; None if it is not there."""
        path = _path(key)
        data = self._call(self._read, path)
        blob: bytes | None = None
        problem: Exception | None = None
        if data is not None and len(data) > self._max_data:
            # It stays: others may be allowed to read it.
            self._odd(path, f"more than the {self._max_data - HEADER_BYTES} bytes that max_entry_mb allows")
        elif data is not None:
            try:
                blob = unseal(key, data, self._ttl)
            except (CorruptError, ExpiredError) as error:
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
            text = "drops entries that are too large; the first has %d bytes, max_entry_mb allows %d"
            self._warn("large", text, len(blob), self._max_data - HEADER_BYTES)
            return False
        try:
            fs, root = self._connected()
            fs.pipe_file(f"{root}/{path}", seal(key, blob, time.time()))
        except Exception as error:  # FileNotFoundError too: the bucket does not exist
            if _is_odd(error):
                self._odd(path, error)
                return False
            raise self._failure(error) from error
        with self._lock:
            self._counters.puts += 1
            self._counters.put_bytes += len(blob)
        return True

    def contains(self, keys: Sequence[str]) -> list[bool]:
        """Whether each key is there now, 16 requests at once. An expired entry counts until somebody asks for it."""
        # `fs.exists` would take every failure for an absent object.
        return self._map(self._there, [_path(key) for key in keys])

    def delete(self, key: str) -> bool:
        """Delete an entry; return whether it was there. To an object store, deleting what is absent is no error."""
        path = _path(key)
        there = self._there(path)
        if there:
            self._call(_remove, path)
        return there

    def delete_tenant(self, tenant: str) -> int:
        """Delete every object of a tenant, half-written ones included; return how many there were."""
        check_tenant(tenant)
        fs, root = self._connect()
        if self._http:
            # It would gather links from pages, without end if the server so wishes, and then fail to delete the first.
            raise self._failure(NotImplementedError("fsspec cannot delete over HTTP"))
        paths = self._call(lambda fs, path: fs.find(path), tenant) or []
        folder = f"{root}/{tenant}/".lstrip("/")
        if strange := [path for path in paths if not path.lstrip("/").startswith(folder)]:
            raise self._failure(ValueError(f"of the objects below {tenant} it lists {strange[0]:.200}"))

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
        """Stop the threads, waiting at most 10 s for requests that hang. May be called again."""
        with self._lock:
            threads, self._threads = self._threads, None
        if threads is not None and not threads.dismiss(_CLOSE_SECONDS):
            _log.warning("object store %s was closed while requests hang", self._where)

    def _connected(self) -> tuple[Any, str]:
        """The file system, and the path of our folder in it. Some protocols connect at this moment."""
        with self._connecting:
            if self._place is None:
                # Directory listings in fsspec's cache would hide what other processes write and delete.
                options: dict[str, Any] = {"use_listings_cache": False}
                if self._http:
                    from cuvee.integrations.stores.objects_http import get_client

                    options["get_client"] = get_client
                fs, root = url_to_fs(self._url, **options)
                self._place = fs, root.rstrip("/")
            return self._place

    def _connect(self) -> tuple[Any, str]:
        """As `_connected`.

        Raises:
            StoreError: nobody answers, or access is denied.
        """
        try:
            return self._connected()
        except Exception as error:
            raise self._failure(error) from error

    def _read(self, fs: Any, path: str) -> Any:
        """An object; of one that is too large, one byte more than the limit."""
        try:
            if self._http:
                from cuvee.integrations.stores.objects_http import read

                return read(fs, path, self._max_data + 1)
            return fs.cat_file(path, start=0, end=self._max_data + 1)
        except FileNotFoundError:
            raise
        except Exception as error:
            # An empty object has no first byte, so some servers refuse to send a range of it.
            if "range" in str(error).lower() and fs.info(path)["size"] == 0:
                return b""
            raise

    def _there(self, path: str) -> bool:
        info = self._call(lambda fs, path: fs.info(path), path)
        if info is None or info.get("type", "file") != "file":
            return False
        # An object that is too large to be read counts as absent, so that a smaller one may take its place.
        return (info.get("size") or 0) <= self._max_data

    def _discard(self, path: str, problem: Exception) -> None:
        """Delete a bad or expired entry. If that fails it is counted, and the miss remains a miss."""
        if not isinstance(problem, ExpiredError):
            self._warn("corrupt", "deletes bad entries and counts them as misses; the first: %s", problem)
        try:
            self._call(_remove, path)
        except StoreError as error:
            self._warn("discard", "cannot delete a bad entry; it stays a miss: %s", error)

    def _call(self, function: Callable[[Any, str], _T], path: str) -> _T | None:
        """What `function(file system, path)` returns, with `path` below our folder; None if there is no such object.

        Raises:
            StoreError: any other failure. fsspec passes on the exceptions of its clients, which may be of any class.
        """
        fs, root = self._connect()
        try:
            return function(fs, f"{root}/{path}")
        except FileNotFoundError:
            return None
        except Exception as error:
            if not _is_odd(error):
                raise self._failure(error) from error
            self._odd(path, error)
            return None

    def _odd(self, path: str, why: object) -> None:
        """Count an entry that cannot be used while the rest of the store can."""
        with self._lock:
            self._counters.errors += 1
        self._warn("odd", "cannot use an entry; it is a miss, as others like it will be: %s: %s", path, why)

    def _map(self, function: Callable[[str], _T], items: Sequence[str]) -> list[_T]:
        """`function` of each item, in order; in threads if there are several."""
        if len(items) < 2:
            return [function(item) for item in items]
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPool(_THREADS, "cuvee-object-store")
            futures = [self._threads.submit(function, item) for item in items]
        return [future.result() for future in futures]

    def _failure(self, error: Exception) -> StoreError:
        """Count a failure, and describe it."""
        with self._lock:
            self._counters.errors += 1
        return StoreError(
            f"object store {self._where}: {type(error).__name__}: {scrubbed(error, self._secrets)[:_LONGEST_MESSAGE]}"
        )


def _path(key: str) -> str:
    """The path of an entry below our folder."""
    tenant, entry = check_key(key)
    return f"{tenant}/{entry[:2]}/{entry}"


def _remove(fs: Any, path: str) -> None:
    fs.rm_file(path)


def _is_odd(error: Exception) -> bool:
    """Whether this is the fault of one entry, and not of the store."""
    return isinstance(error, (IsADirectoryError, NotADirectoryError))
