"""`ObjectStore` on fsspec's memory file system, and on one that fails."""

from __future__ import annotations

import importlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fsspec", reason="needs fsspec")

import fsspec
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractFileSystem

from cuvee.codec.errors import InputError
from cuvee.codec.part_keys import part_key
from cuvee.integrations.stores import objects as module
from cuvee.integrations.stores import open_store
from cuvee.integrations.stores.base import StoreError, TierCounters
from cuvee.integrations.stores.envelope import HEADER_BYTES, seal
from cuvee.integrations.stores.objects import ObjectStore

KEY, OTHER = "ab/0123", "ab/4567"

Open = Callable[..., ObjectStore]


class Bucket(MemoryFileSystem):  # type: ignore[misc]
    """A memory file system that caches listings, as those of object stores do, and fails on demand."""

    protocol = "testbucket"
    broken: frozenset[str] = frozenset()
    directories: frozenset[str] = frozenset()  # methods that find a directory in place of the object
    find = AbstractFileSystem.find  # by listing

    def _fail(self, method: str) -> None:
        if method in self.broken:
            raise PermissionError(f"403 on {method}")
        if method in self.directories:
            raise IsADirectoryError(f"directory on {method}")

    def cat_file(self, path: str, *arguments: Any, **named: Any) -> Any:
        self._fail("cat_file")
        return super().cat_file(path, *arguments, **named)

    def pipe_file(self, path: str, value: bytes, **named: Any) -> None:
        self._fail("pipe_file")
        if "missing" in path:
            raise FileNotFoundError("no such bucket")
        super().pipe_file(path, value, **named)

    def rm_file(self, path: str) -> None:
        self._fail("rm_file")
        super().rm_file(path)

    def info(self, path: str, **named: Any) -> Any:
        self._fail("info")
        path = self._strip_protocol(path)
        parent = self._parent(path)
        if parent in self.dircache:
            found = [entry for entry in self.dircache[parent] if entry["name"] == path]
            if not found:
                raise FileNotFoundError(path)
            return found[0]
        return super().info(path, **named)

    def ls(self, path: str, detail: bool = True, **named: Any) -> Any:
        self._fail("ls")
        path = self._strip_protocol(path)
        if path not in self.dircache:
            self.dircache[path] = super().ls(path, detail=True)
        # With `use_listings_cache=False` the cache stays empty.
        listing = self.dircache[path] if path in self.dircache else super().ls(path, detail=True)
        return listing if detail else [entry["name"] for entry in listing]


@pytest.fixture(params=["memory", "testbucket"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """Return the URL of an empty prefix."""
    fsspec.register_implementation("testbucket", Bucket, clobber=True)
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    yield f"{request.param}://bucket/pre fix"
    Bucket.broken = Bucket.directories = frozenset()


@pytest.fixture
def open_objects() -> Iterator[Open]:
    """Return a function that opens an `ObjectStore`, which is closed after the test."""
    stores: list[ObjectStore] = []

    def make(url: str, **named: Any) -> ObjectStore:
        stores.append(ObjectStore(url, **named))
        return stores[-1]

    yield make
    for store in stores:
        store.close()
        store.close()


def counted(store: ObjectStore) -> TierCounters:
    return store.counters()["object"]


def write(url: str, key: str, data: bytes) -> None:
    """Replace the object of a key without the store."""
    tenant, entry = key.split("/")
    fs, root = fsspec.core.url_to_fs(url)
    folder = f"{root}/{tenant}/{entry[:2]}"
    fs.makedirs(folder, exist_ok=True)
    fs.pipe_file(f"{folder}/{entry}", data)


def test_protocol(url: str, open_objects: Open) -> None:
    store = open_objects(url)
    assert store.name == "object" and store.shared
    assert store.get(KEY) is None and not store.delete(KEY) and store.contains([KEY]) == [False]
    assert store.delete_tenant("ab") == 0
    assert store.put(KEY, b"one") and store.put(OTHER, b"\0" * 3000)
    assert store.get(KEY) == b"one"
    assert store.put(KEY, b"another")
    assert store.get_many([KEY, "ab/ff", OTHER, KEY]) == [b"another", None, b"\0" * 3000, b"another"]
    assert store.contains([OTHER, "ab/ff", KEY]) == [True, False, True]
    assert store.contains([]) == [] and store.get_many([]) == []
    assert store.delete(KEY) and not store.delete(KEY) and store.get(KEY) is None
    found = counted(store)
    assert (found.hits, found.misses, found.hit_bytes) == (4, 3, 3 + 7 + 3000 + 7)
    assert (found.puts, found.put_bytes, found.errors, found.corrupt) == (3, 3 + 3000 + 7, 0, 0)
    store.close()
    assert store.contains([OTHER, KEY]) == [True, False]  # the threads are started again if necessary


def test_many_keys_and_tenants(url: str, open_objects: Open) -> None:
    store = open_objects(url)
    mine, others = [f"ab/{i:03x}" for i in range(100)], [f"ab0/{i:03x}" for i in range(10)]
    for key in mine + others:
        store.put(key, key.encode())
    assert store.get_many(mine) == [key.encode() for key in mine]
    assert store.delete_tenant("ab") == 100
    assert not any(store.contains(mine)) and all(store.contains(others))
    assert store.delete_tenant("ab") == 0
    store.put("ab/000", b"x")
    fs, root = store._connected()
    foreign = [f"{root}/notes.txt", f"{root}/ab/00/notes.txt"]
    for path in foreign:
        fs.pipe_file(path, b"not of the store")
    assert store.clear() == 11
    assert not any(store.contains(["ab/000", *others])) and all(map(fs.exists, foreign)) and store.clear() == 0
    for path in foreign:
        fs.rm_file(path)
    for bad in ("ab", "../ab", "AB/00", "ab/*"):
        with pytest.raises(InputError, match="key"):
            store.get(bad)
    with pytest.raises(InputError, match="tenant"):
        store.delete_tenant("*")


def test_what_others_write_and_delete_is_seen(url: str, open_objects: Open) -> None:
    one, two = open_objects(url), open_objects(url)
    one.put(KEY, b"x")
    assert two.contains([KEY, OTHER]) == [True, False] and two.delete_tenant("cd") == 0
    one.put("ab/0199", b"beside it")
    assert two.delete_tenant("ab") == 2  # every directory was listed
    one.put("ab/01aa", b"y")
    assert two.contains(["ab/01aa", KEY]) == [True, False] and two.get("ab/01aa") == b"y"
    one.delete("ab/01aa")
    assert two.contains(["ab/01aa"]) == [False] and two.delete_tenant("ab") == 0


@pytest.mark.parametrize("what", ["garbage", "empty", "moved", "flipped", "cut"])
def test_bad_entries_are_counted_misses(
    url: str, open_objects: Open, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_objects(url)
    good = seal(KEY, b"blob", 0.0)
    bad = {
        "garbage": b"garbage",
        "empty": b"",
        "moved": seal(OTHER, b"blob", 0.0),
        "flipped": good[:-1] + b"?",
        "cut": good[:-1],
    }
    store.put(KEY, b"first")
    write(url, KEY, bad[what])
    assert store.get_many([KEY, OTHER]) == [None, None]
    assert (counted(store).corrupt, counted(store).misses, counted(store).errors) == (1, 2, 0)
    assert store.contains([KEY]) == [False] and caplog.text.count("deletes bad entries") == 1
    assert store.put(KEY, b"new") and store.get(KEY) == b"new"


def test_time_to_live(url: str, open_objects: Open) -> None:
    store = open_objects(url, ttl=3600)
    store.put(OTHER, b"young")
    write(url, KEY, seal(KEY, b"old", 1.7e9))
    assert open_objects(url).get(KEY) == b"old"
    assert store.get_many([KEY, OTHER]) == [None, b"young"]
    found = counted(store)
    assert (found.expired, found.corrupt, found.misses, found.hits) == (1, 0, 1, 1)
    assert store.contains([KEY, OTHER]) == [False, True]
    parts = [part_key(KEY, number) for number in range(2)]
    for key in parts:
        write(url, key, seal(key, b"x", time.time() - 61))
    assert open_objects(url, ttl=3600).get_parts([KEY]) == [(b"x",) * 2]
    assert open_objects(url, ttl=3600, refinement_ttl=60).get_parts([KEY]) == [(b"x",)]


@pytest.mark.parametrize("url", ["testbucket"], indirect=True)
def test_failures_name_the_store(url: str, open_objects: Open) -> None:
    store = open_objects(url)
    store.put(KEY, b"x")
    cases: list[tuple[str, Callable[[], Any]]] = [
        ("cat_file", lambda: store.get(KEY)),
        ("cat_file", lambda: store.get_many([KEY, OTHER])),
        ("pipe_file", lambda: store.put(KEY, b"y")),
        ("info", lambda: store.contains([KEY, OTHER])),
        ("info", lambda: store.delete(KEY)),
        ("rm_file", lambda: store.delete(KEY)),
        ("rm_file", lambda: store.delete_tenant("ab")),
    ]
    for method, operation in cases:
        before = counted(store).errors
        Bucket.broken = frozenset({method})
        with pytest.raises(StoreError, match=f"^object store {url}: PermissionError: 403 on {method}"):
            operation()
        assert counted(store).errors > before
    Bucket.broken = frozenset()
    assert store.get(KEY) == b"x"


@pytest.mark.parametrize("url", ["testbucket"], indirect=True)
def test_close_is_bounded_in_time(url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(module, "_CLOSE_SECONDS", 0.1)
    store = ObjectStore(url)
    begun, release = threading.Event(), threading.Event()

    def hang(self: Bucket, path: str, **named: Any) -> Any:
        begun.set()
        assert release.wait(10)

    monkeypatch.setattr(Bucket, "info", hang)
    asking = threading.Thread(target=lambda: store.contains([KEY, OTHER]), daemon=True)
    asking.start()
    assert begun.wait(10)
    closing = threading.Thread(target=store.close, daemon=True)
    closing.start()
    closing.join(5)
    assert not closing.is_alive() and "closed while requests hang" in caplog.text
    release.set()
    asking.join(10)


@pytest.mark.parametrize("url", ["testbucket"], indirect=True)
def test_a_bad_entry_that_cannot_be_deleted_is_a_miss(
    url: str, open_objects: Open, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_objects(url)
    write(url, KEY, b"garbage")
    Bucket.broken = frozenset({"rm_file"})
    assert store.get(KEY) is None and store.get(KEY) is None
    assert (counted(store).corrupt, counted(store).errors) == (2, 2)
    assert caplog.text.count("cannot delete a bad entry") == 1


@pytest.mark.parametrize("url", ["testbucket"], indirect=True)
def test_a_bucket_that_does_not_exist(url: str, open_objects: Open) -> None:
    store = open_objects("testbucket://missing")
    assert store.get(KEY) is None
    with pytest.raises(StoreError, match="no such bucket"):
        store.put(KEY, b"x")
    assert counted(store).puts == 0 and counted(store).errors == 1


@pytest.mark.parametrize("url", ["testbucket"], indirect=True)
def test_only_what_lies_below_a_tenant_is_deleted(
    url: str, open_objects: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_objects(url)
    store.put(KEY, b"x")
    store.put("cd/01", b"another tenant's")
    monkeypatch.setattr(Bucket, "find", lambda self, path: [f"{path}/01/0123", "/bucket/pre fix/cd/01/01"])
    with pytest.raises(StoreError, match="ab: must list only its own objects, got /bucket/pre fix/cd/01/01"):
        store.delete_tenant("ab")
    assert store.contains([KEY, "cd/01"]) == [True, True]


@pytest.mark.parametrize(
    "url",
    [
        "file://{}", "local://{}", "{}", "dir://x::file://{}", "simplecache::file://{}", "filecache::memory://{}",
        "blockcache::local://{}", "reference::file://{}/refs.json", "memory://x::file://{}", "http://[::1]/x",
    ],
)  # fmt: skip
def test_local_folders_are_refused(url: str, tmp_path: Path) -> None:
    """fsspec follows links there, so deleting a tenant would delete the targets of links."""
    with pytest.raises(InputError, match=r"^url: must (not be a folder .*file:///path|name one protocol)"):
        ObjectStore(url.format(tmp_path))
    if "://" in url:
        with pytest.raises(InputError, match=r"^url: "):
            open_store(f"fsspec+{url.format(tmp_path)}")


def test_entries_have_a_largest_size(
    url: str, open_objects: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    large, store = open_objects(url), open_objects(url, max_entry=1000)
    large.put(KEY, b"x" * 100_000)
    large.put(OTHER, b"y" * 1000)
    read: list[int] = []
    usual = ObjectStore._read

    def note(self: ObjectStore, fs: Any, path: str) -> Any:
        data = usual(self, fs, path)
        read.append(len(data))
        return data

    monkeypatch.setattr(ObjectStore, "_read", note)
    assert store.get(KEY) is None and store.get(OTHER) == b"y" * 1000
    assert read == [HEADER_BYTES + 1001, HEADER_BYTES + 1000]
    assert store.contains([KEY, OTHER]) == [False, True] and large.contains([KEY]) == [True]
    assert not store.put(KEY, b"z" * 1001)
    found = counted(store)
    assert (found.misses, found.hits, found.errors, found.corrupt, found.dropped) == (1, 1, 1, 0, 1)
    assert caplog.text.count("that max_entry_mb allows") == 1
    assert caplog.text.count("drops entries that are too large") == 1
    assert store.put(KEY, b"small") and store.get(KEY) == b"small"
    with pytest.raises(InputError, match=r"^max_entry: "):
        ObjectStore(url, max_entry=0)


@pytest.mark.parametrize("url", ["testbucket"], indirect=True)
def test_an_empty_object_of_a_server_that_sends_no_range_of_it(
    url: str, open_objects: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_objects(url)
    write(url, KEY, b"")

    def refuse(self: Bucket, path: str, start: int, end: int) -> bytes:
        raise OSError("416: the requested range is not satisfiable")

    monkeypatch.setattr(Bucket, "cat_file", refuse)
    assert store.get(KEY) is None
    assert (counted(store).corrupt, counted(store).errors) == (1, 0)
    write(url, OTHER, b"x")
    with pytest.raises(StoreError, match="416"):
        store.get(OTHER)


def test_connects_when_it_is_first_used(open_objects: Open) -> None:
    class Server(MemoryFileSystem):  # type: ignore[misc]
        protocol = "testserver"
        up = False
        tried = 0

        def __init__(self, *arguments: Any, **named: Any) -> None:
            type(self).tried += 1
            if not self.up:
                raise ConnectionRefusedError("nobody answers at testserver")
            super().__init__(*arguments, **named)

    fsspec.register_implementation("testserver", Server, clobber=True)
    store = open_objects("testserver://u:s3cr@host/x")
    assert Server.tried == 0
    actions: list[Callable[[], object]] = [
        lambda: store.get(KEY),
        lambda: store.put(KEY, b"x"),
        lambda: store.contains([KEY]),
        lambda: store.delete(KEY),
        lambda: store.delete_tenant("ab"),
    ]
    for action in actions:
        with pytest.raises(StoreError, match=r"^object store testserver://u:\*\*\*@host/x: ConnectionRefusedError"):
            action()
    assert counted(store).errors == Server.tried == 5
    Server.up = True
    assert store.put(KEY, b"x") and store.get(KEY) == b"x" and Server.tried == 6


def test_arguments_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    for ttl in (0, -1.0):
        with pytest.raises(InputError, match=r"^ttl: "):
            ObjectStore("memory://x", ttl=ttl)
        with pytest.raises(InputError, match=r"^refinement_ttl: "):
            ObjectStore("memory://x", refinement_ttl=ttl)
    with pytest.raises(InputError, match=r"^url: .*nosuchprotocol"):
        ObjectStore("nosuchprotocol://bucket")
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ImportError, match=r"object store s3://bucket/x: .*s3fs"):
        ObjectStore("s3://bucket/x")


def test_without_fsspec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    monkeypatch.delitem(sys.modules, module.__name__)
    with pytest.raises(ImportError, match=r"pip install cuvee\[objects\]"):
        importlib.import_module(module.__name__)


@pytest.mark.parametrize("url", ["testbucket"], indirect=True)
def test_a_directory_in_place_of_an_object(url: str, open_objects: Open, caplog: pytest.LogCaptureFixture) -> None:
    store = open_objects(url)
    assert store.put(KEY, b"x")
    Bucket.directories = frozenset({"pipe_file", "cat_file"})
    assert not store.put(KEY, b"y") and store.get(KEY) is None
    assert counted(store).errors == 2 and caplog.text.count("cannot use an entry") == 1
    Bucket.directories = frozenset()
    assert store.get(KEY) == b"x"


@pytest.mark.parametrize("url", ["testbucket"], indirect=True)
def test_an_object_that_is_deleted_meanwhile(url: str, open_objects: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_objects(url)
    assert store.put(KEY, b"x")

    def gone(self: Bucket, path: str) -> None:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Bucket, "rm_file", gone)
    assert store.delete_tenant("ab") == 1 and counted(store).errors == 0
