"""Blobs in object storage: S3, Google Cloud Storage, Azure, and all else that fsspec supports. One object per entry.

    <prefix>/<tenant>/<first two digits of the id>/<id>

**There is no byte budget.** Object storage records neither when an object was last read nor how much a prefix holds. A
budget would cost a write for every read, to record the use, and regular listings of the whole prefix. Object storage
does delete by age at no cost: give the bucket a lifecycle rule that deletes objects of this prefix some days after they
were written. `ttl` does not replace that rule, because an expired entry is deleted only when it is requested.

An object store shows an object only after all of it has arrived. On file systems (SFTP, SMB) a reader may see half an
entry; its checksum turns that into a counted miss. **Folders of this machine are refused**, because fsspec follows
links in them, even out of the store; use `file://`. Timeouts and retries are those of the protocol's client: s3fs takes
about 10 s to report that no server answers.

An object is read up to the largest size of an entry. Over HTTP, reading stops there, whatever the server sends. The
clients of other protocols request that many bytes, but accept any number.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

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
    check_tenant,
)
from cuvee.integrations.stores.envelope import HEADER_BYTES, ExpiredError, seal, unseal
from cuvee.integrations.stores.monitor import StoreMonitor
from cuvee.integrations.stores.redaction import redacted, scrubbed, secrets_of
from cuvee.integrations.stores.threads import ThreadPool

try:
    from fsspec import get_filesystem_class
    from fsspec.core import split_protocol, url_to_fs
    from fsspec.implementations.local import LocalFileSystem
except ImportError as missing:
    raise ImportError("object stores need fsspec: pip install cuvee[objects]") from missing

_log = logging.getLogger(__name__)

_THREADS = 16  # simultaneous requests; each mostly waits for the network
_CLOSE_SECONDS = 10.0

_PATH = re.compile(r"[0-9a-f]{1,64}/([0-9a-f]{1,2})/\1[0-9a-f]*")  # of an entry, below our folder

_T = TypeVar("_T")


class ObjectStore(Store):
    """Sealed entries as objects. The store connects when it is first used.

        >>> store = ObjectStore("memory://bucket/kv")  # fsspec's own object storage in RAM
        >>> store.put("ab/01", b"blob"), store.get("ab/01")
        (True, b'blob')
        >>> store.delete_tenant("ab")
        1

    Args:
        url: a URL for fsspec: `s3://bucket/prefix`, `gs://…`, `az://…`, `memory://…`. Credentials come from the
            environment, as the protocol's package documents.
        ttl: seconds an entry lives after it was written; None means forever. An expired entry is deleted when it is
            requested; a lifecycle rule of the bucket deletes the others.
        max_entry: largest blob, in bytes. Larger ones are neither kept nor read.
        refinement_ttl: seconds a refinement lives, at most `ttl`; None means as long as other entries.

    Raises:
        InputError: an argument is out of range, or the protocol is unknown to fsspec or one of local files.
        ImportError: the package of the protocol is missing.
    """

    name = "object"
    shared = True

    def __init__(
        self,
        url: str,
        ttl: float | None = None,
        *,
        max_entry: int = MAX_ENTRY_BYTES,
        refinement_ttl: float | None = None,
    ) -> None:
        self._lifetimes = Lifetimes(ttl, refinement_ttl)
        self._url, where, secrets = url, redacted(url), secrets_of(url)
        self._label = f"object store {where}"
        if "::" in url:
            # fsspec would chain protocols, possibly with folders of this machine.
            raise InputError(f"url: must name one protocol without '::', got {where}")
        try:
            protocol = split_protocol(url)[0]
            kind = get_filesystem_class(protocol)
        except ValueError as error:
            raise InputError(f"url: must be one of fsspec's, got {where}: {scrubbed(error, secrets)}") from error
        except ImportError as error:
            raise ImportError(f"{self._label}: {error}") from error
        if issubclass(kind, LocalFileSystem):
            raise InputError(
                f"url: must not be a folder of this machine, where fsspec follows links, got {where}; write file:///path"
            )
        self._http = protocol in ("http", "https")
        self._max_data = HEADER_BYTES + check_max_entry(max_entry)
        self.after_fork()
        tell_after_fork(self)
        self._monitor = StoreMonitor(_log, self._label, secrets)

    def after_fork(self) -> None:
        """Make new locks, threads and connections, because the present ones belong to the parent."""
        self._lock = threading.Lock()
        self._connecting = threading.Lock()
        self._threads: ThreadPool | None = None
        self._place: tuple[Any, str] | None = None

    def get(self, key: str) -> bytes | None:
        """Return the blob of `key`, its checksum verified; None if it is not there."""
        path = _path(key)
        data = self._call(self._read, path)
        blob: bytes | None = None
        problem: Exception | None = None
        if data is not None and len(data) > self._max_data:
            # It stays, because other stores may allow larger entries.
            self._monitor.unusable(
                path, f"more than the {self._max_data - HEADER_BYTES} bytes that max_entry_mb allows"
            )
        elif data is not None:
            try:
                blob = unseal(key, data, self._lifetimes.of(key))
            except (CorruptError, ExpiredError) as error:
                problem = error
        self._monitor.answered(blob, key, problem)
        if problem is not None:
            self._discard(path)
        return blob

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the blob of each key, with 16 requests at a time."""
        return self._map(self.get, keys)

    def put(self, key: str, blob: bytes) -> bool:
        """Store `blob` under `key`, replacing an earlier entry; False if it exceeds `max_entry`."""
        path = _path(key)
        if HEADER_BYTES + len(blob) > self._max_data:
            self._monitor.too_large(len(blob), self._max_data - HEADER_BYTES)
            return False
        try:
            fs, root = self._connected()
            self._request(lambda: fs.pipe_file(f"{root}/{path}", seal(key, blob, time.time())))
        except Exception as error:  # including FileNotFoundError: the bucket does not exist
            if _concerns_one_entry(error):
                self._monitor.unusable(path, error)
                return False
            raise self._monitor.failure(error) from error
        self._monitor.stored(blob)
        return True

    def contains(self, keys: Sequence[str]) -> list[bool]:
        """Return whether each key is there now, with 16 requests at a time. Expired entries count until read."""
        # `fs.exists` would answer every failure with False.
        return self._map(self._there, [_path(key) for key in keys])

    def delete(self, key: str) -> bool:
        """Delete an entry; return whether it was there."""
        # The deletion alone would not tell: object storage deletes missing objects without an error.
        path = _path(key)
        there = self._there(path)
        if there:
            self._call(_remove, path)
        return there

    def delete_tenant(self, tenant: str) -> int:
        """Delete every object of a tenant, including incomplete ones; return how many there were."""
        return self._delete_below(check_tenant(tenant))

    def clear(self) -> int:
        """Delete the entries of all tenants; return how many there were. Objects with other names stay."""
        return self._delete_below("")

    def _delete_below(self, tenant: str) -> int:
        """Delete every object of a tenant, or, for an empty name, every object that has the name of an entry."""
        fs, root = self._connect()
        if self._http:
            # fsspec would collect links from pages, endlessly if the server wants, and then fail at the first deletion.
            raise self._monitor.failure(NotImplementedError("fsspec cannot delete over HTTP"))
        paths = self._call(lambda fs, path: fs.find(path), tenant) or []
        folder = f"{root}/{tenant}/".strip("/") + "/" if root or tenant else ""
        if strange := [path for path in paths if not path.lstrip("/").startswith(folder)]:
            raise self._monitor.failure(ValueError(f"{tenant}: must list only its own objects, got {strange[0]:.200}"))
        if not tenant:
            paths = [path for path in paths if _PATH.fullmatch(path.lstrip("/").removeprefix(folder))]

        def remove(path: str) -> None:
            try:
                fs.rm_file(path)
            except FileNotFoundError:
                pass
            except Exception as error:
                raise self._monitor.failure(error) from error

        self._map(remove, paths)
        return len(paths)

    def counters(self) -> dict[str, TierCounters]:
        """Return a snapshot."""
        return {self.name: self._monitor.snapshot()}

    def close(self) -> None:
        """Stop the threads, waiting at most 10 s for requests that hang. May be called again."""
        with self._lock:
            threads, self._threads = self._threads, None
        if threads is not None and not threads.dismiss(_CLOSE_SECONDS):
            _log.warning("%s: closed while requests hang", self._label)

    def _connected(self) -> tuple[Any, str]:
        """Return the file system and the path of our folder in it. Some protocols connect now."""
        with self._connecting:
            if self._place is None:
                # Cached listings would hide what other processes write and delete.
                options: dict[str, Any] = {"use_listings_cache": False}
                if self._http:
                    from cuvee.integrations.stores.objects_http import get_client

                    options["get_client"] = get_client
                fs, root = url_to_fs(self._url, **options)
                self._place = fs, root.rstrip("/")
            return self._place

    def _connect(self) -> tuple[Any, str]:
        """Call `_connected`.

        Raises:
            StoreError: no server answers, or access is denied.
        """
        try:
            return self._connected()
        except Exception as error:
            raise self._monitor.failure(error) from error

    def _read(self, fs: Any, path: str) -> Any:
        """Return an object, or one byte more than the limit if the object is too large."""
        try:
            if self._http:
                from cuvee.integrations.stores.objects_http import read

                return read(fs, path, self._max_data + 1)
            return fs.cat_file(path, start=0, end=self._max_data + 1)
        except FileNotFoundError:
            raise
        except Exception as error:
            # Some servers refuse to send a range of an empty object.
            if "range" in str(error).lower() and fs.info(path)["size"] == 0:
                return b""
            raise

    def _there(self, path: str) -> bool:
        info = self._call(lambda fs, path: fs.info(path), path)
        if info is None or info.get("type", "file") != "file":
            return False
        # An object that is too large to be read counts as absent, so that a smaller one can replace it.
        return (info.get("size") or 0) <= self._max_data

    def _discard(self, path: str) -> None:
        """Delete a bad or expired entry. A failure is counted but not raised."""
        try:
            self._call(_remove, path)
        except StoreError as error:
            self._monitor.not_deleted(error)

    def _call(self, function: Callable[[Any, str], _T], path: str) -> _T | None:
        """Return `function(file system, path)`, with `path` below our folder; None if there is no such object.

        Raises:
            StoreError: it failed otherwise. fsspec passes on the exceptions of its clients, which may be of any class.
        """
        fs, root = self._connect()
        try:
            return self._request(lambda: function(fs, f"{root}/{path}"))
        except FileNotFoundError:
            return None
        except Exception as error:
            if not _concerns_one_entry(error):
                raise self._monitor.failure(error) from error
            self._monitor.unusable(path, error)
            return None

    def _request(self, call: Callable[[], _T]) -> _T:
        if not self._http:
            return call()
        from cuvee.integrations.stores.objects_http import on_clean_connection

        return on_clean_connection(call)

    def _map(self, function: Callable[[str], _T], items: Sequence[str]) -> list[_T]:
        """Apply `function` to each item, in threads if there are several; return the results in order."""
        if len(items) < 2:
            return [function(item) for item in items]
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPool(_THREADS, "cuvee-object-store")
            futures = [self._threads.submit(function, item) for item in items]
        return [future.result() for future in futures]


def _path(key: str) -> str:
    """Return the path of an entry below our folder."""
    tenant, entry = check_key(key)
    return f"{tenant}/{entry[:2]}/{entry}"


def _remove(fs: Any, path: str) -> None:
    fs.rm_file(path)


def _concerns_one_entry(error: Exception) -> bool:
    """Return whether the error concerns one entry rather than the store."""
    return isinstance(error, (IsADirectoryError, NotADirectoryError))
