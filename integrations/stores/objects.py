"""Blobs in object storage: S3, Google Cloud Storage, Azure and WebDAV over HTTP, by obstore. One object per entry.

    <prefix>/<tenant>/<first two digits of the id>/<id>

**There is no byte budget.** Object storage records neither when an object was last read nor how much a prefix holds. It
does delete by age at no cost: give the bucket a lifecycle rule that deletes objects of this prefix some days after they
were written. `ttl` does not replace that rule, because an expired entry is deleted only when it is requested.

A server has to announce the size of an object, and obstore reads no more than that. An object that is too large is not
read. Listings are read page by page. Retries and timeouts are obstore's; on S3 it does not repeat a deletion.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

from cuvee.codec.errors import InputError
from cuvee.integrations.stores.base import OBJECT_SCHEMES
from cuvee.integrations.stores.counted import CountedStore
from cuvee.integrations.stores.envelope import HEADER_BYTES, seal
from cuvee.integrations.stores.redaction import redacted, scrubbed, secrets_of
from cuvee.integrations.stores.threads import ThreadPool

try:
    import obstore
    from obstore.store import from_url
except ImportError as missing:
    raise ImportError("object stores need obstore: pip install 'cuvee[objects]'") from missing

_THREADS = 16  # simultaneous requests of a kind; each mostly waits for the network
_CLOSE_SECONDS = 10.0
# Of one request, with its response. What obstore takes for a passing failure is tried twice more within 10 s.
_TIMEOUTS = {"connect_timeout": "5s", "timeout": "60s"}
_RETRY: dict[str, Any] = {"max_retries": 2, "retry_timeout": timedelta(seconds=10)}
_DEBUG = "\n\nDebug source"  # begins what obstore's errors add for its developers
_ALLOW_HTTP = ("AWS_ALLOW_HTTP", "AZURE_ALLOW_HTTP", "GOOGLE_ALLOW_HTTP")

_PATH = re.compile(r"([0-9a-f]{1,64})/([0-9a-f]{1,2})/(\2[0-9a-f]*)")  # of an entry, below our prefix

_FULL = re.compile("507|insufficient ?storage|quota", re.IGNORECASE)  # what servers say, as obstore tells it

_T = TypeVar("_T")


class _Runtime:
    """The process that uses obstore."""

    process: int | None = None


class ObjectStore(CountedStore):
    """Sealed entries as objects. The store connects when it is first used.

        >>> from cuvee.integrations.stores.base import StoreError
        >>> store = ObjectStore("s3://bucket/kv", ttl=7 * 86400)
        >>> try:
        ...     blob = store.get("ab/01")  # None: a miss
        ... except StoreError:
        ...     blob = None  # no server answers; a GuardedStore does this for you
        >>> store.close()

    Args:
        url: `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix`, `http://host/prefix` or `https://…`.
            Credentials, regions and endpoints come from the environment, as obstore documents: AWS_ACCESS_KEY_ID,
            AWS_ENDPOINT_URL, GOOGLE_SERVICE_ACCOUNT, AZURE_STORAGE_ACCOUNT_NAME, … An endpoint without TLS needs
            AWS_ALLOW_HTTP=true.
        ttl: seconds an entry lives after it was written; None means forever. An expired entry is deleted when it is
            requested; a lifecycle rule of the bucket deletes the others.

    Raises:
        InputError: an argument is out of range, or obstore does not accept the URL.
    """

    name = "object"
    shared = True

    def __init__(self, url: str, ttl: float | None = None) -> None:
        super().__init__(f"object store {redacted(url)}", ttl, secrets_of(url))
        self._bucket = connect(url)
        self._lock = threading.Lock()
        self._threads: dict[str, ThreadPool] = {}  # lookups and reads, so that neither waits for the other

    def delete(self, key: str) -> bool:
        """Delete an entry; return whether it was there."""
        # The deletion alone would not tell: object storage deletes missing objects without an error.
        return self.contains([key])[0] and super().delete(key)

    def close(self) -> None:
        """Stop the threads, waiting at most 10 s for requests that hang. May be called again."""
        with self._lock:
            threads, self._threads = self._threads, {}
        until = time.monotonic() + _CLOSE_SECONDS
        ended = [pool.dismiss(max(until - time.monotonic(), 0)) for pool in threads.values()]  # each is told
        if not all(ended):
            self._warn("hang", "closed while requests hang")

    def read_object(self, path: str, fits: Callable[[int], bool]) -> bytes | None:
        """Return an object below the prefix; None if there is none, or if the bytes that the server announces, and
        cannot exceed, do not fit.
        """
        found = _call(lambda: obstore.get(self._bucket, path))
        return bytes(found.bytes()) if found is not None and fits(found.meta["size"]) else None

    def write_object(self, path: str, data: bytes) -> None:
        """Write an object below the prefix, all or nothing."""
        if _call(lambda: obstore.put(self._bucket, path, data, use_multipart=False)) is None:
            raise FileNotFoundError("there is no such bucket")

    def list_objects(self, folder: str) -> list[tuple[str, int, float]]:
        """Return the objects below the prefix and a folder: path, bytes, and the time of the last write."""
        pages: Any = _call(lambda: obstore.list(self._bucket, folder, chunk_size=1000))
        found = []
        while page := _call(lambda: next(pages, None)):
            found += [(each["path"], each["size"], each["last_modified"].timestamp()) for each in page]
        return found

    def _read(self, keys: Sequence[str]) -> list[bytes | None]:
        return self._map("read", self._blob, keys)

    def _blob(self, key: str) -> bytes | None:
        def fits(size: int) -> bool:
            if size > HEADER_BYTES + self.max_entry:
                self._beyond(key, self.max_entry)
            return size <= HEADER_BYTES + self.max_entry

        entry = self.read_object(_path(key), fits)
        return None if entry is None else self._opened(key, entry)

    def _write(self, key: str, blob: bytes) -> bool:
        self.write_object(_path(key), seal(key, blob, time.time()))
        return True

    def _there(self, keys: Sequence[str]) -> list[bool]:
        infos = self._map("lookup", lambda key: _call(lambda: obstore.head(self._bucket, _path(key))), keys)
        return [info is not None and info["size"] <= HEADER_BYTES + self.max_entry for info in infos]

    def _remove(self, keys: Sequence[str]) -> int:
        paths = list(map(_path, keys))
        _call(lambda: obstore.delete(self._bucket, paths if len(paths) > 1 else paths[0]))
        return len(keys)

    def _pages(self, tenant: str) -> Iterator[list[str]]:
        pages: Any = _call(lambda: obstore.list(self._bucket, tenant, chunk_size=1000))
        while page := _call(lambda: next(pages, None)):
            # A server may list anything, so what has not the name of an entry of this tenant is passed over.
            names = [_PATH.fullmatch(each["path"]) for each in page]
            if keys := [f"{tenant}/{name[3]}" for name in names if name is not None and name[1] == tenant]:
                yield keys

    def _hint(self, error: Exception) -> str:
        full = _FULL.search(str(error)) is not None
        return " (it is full: raise its quota, or have a lifecycle rule delete old objects sooner)" if full else ""

    def _shown(self, error: Exception) -> str:
        return super()._shown(error).partition(_DEBUG)[0]

    def _map(self, kind: str, function: Callable[[str], _T], items: Sequence[str]) -> list[_T]:
        """Apply `function` to each item, in threads of this kind if there are several; return the results in order."""
        if len(items) < 2:
            return [function(item) for item in items]
        with self._lock:
            if kind not in self._threads:
                self._threads[kind] = ThreadPool(_THREADS, f"cuvee-object-{kind}")
            futures = [self._threads[kind].submit(function, item) for item in items]
        return [future.result() for future in futures]


def _call(request: Callable[[], _T]) -> _T | None:
    """Return `request()`; None if there is no such object."""
    if _Runtime.process not in (None, os.getpid()):  # there, obstore would never return
        raise RuntimeError("a forked process cannot use obstore: start it by spawn")
    _Runtime.process = os.getpid()
    with suppress(FileNotFoundError):
        return request()
    return None


def _path(key: str) -> str:
    """Return the path of an entry below our prefix."""
    tenant, _, entry = key.partition("/")
    return f"{tenant}/{entry[:2]}/{entry}"


def connect(url: str) -> Any:
    """Return obstore's object for a prefix, without connecting.

    Raises:
        InputError: it is none of `OBJECT_SCHEMES`, or obstore does not accept it.
    """
    where, scheme = redacted(url), url.partition("://")[0]
    if scheme not in OBJECT_SCHEMES:
        raise InputError(f"url: must begin with one of {', '.join(OBJECT_SCHEMES)} and '://', got {where}")
    plain = scheme == "http" or any(os.environ.get(name, "").lower() == "true" for name in _ALLOW_HTTP)
    options: dict[str, Any] = {"client_options": {**_TIMEOUTS, "allow_http": plain}, "retry_config": _RETRY}
    try:
        return from_url(url, **options)
    except Exception as error:
        why = scrubbed(error, secrets_of(url)).partition(_DEBUG)[0]
    raise InputError(f"url: obstore does not accept {where}: {why}")
