"""`ObjectStore` over HTTP, with an honest server and with a hostile one."""

from __future__ import annotations

import gzip
import itertools
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("fsspec", reason="needs fsspec")
pytest.importorskip("aiohttp", reason="needs aiohttp")

from tests.integrations.stores.fake_http import FakeHTTP, answer, fake_http, head
from tests.integrations.stores.loopback import Said

from cuvee.integrations.stores import objects_http
from cuvee.integrations.stores.base import StoreError
from cuvee.integrations.stores.envelope import HEADER_BYTES, seal
from cuvee.integrations.stores.objects import ObjectStore
from cuvee.integrations.vllm.metrics import Recorder

KEY = "ab/0123"
PATH = "/kv/ab/01/0123"
MIB = 1 << 20
# Bytes in the buffers of sockets and of aiohttp beyond those that are read.
BUFFERS = 16 * MIB


@pytest.fixture
def server() -> Iterator[FakeHTTP]:
    with fake_http() as server:
        yield server


@pytest.fixture
def store(server: FakeHTTP) -> Iterator[ObjectStore]:
    store = ObjectStore(server.url, max_entry=MIB)
    yield store
    store.close()


def test_protocol(server: FakeHTTP, store: ObjectStore) -> None:
    assert store.get(KEY) is None and store.contains([KEY]) == [False]
    blob = bytes(range(256)) * (MIB // 512)  # aiohttp warns above 1 MiB
    assert store.put(KEY, blob) and store.put("ab/02", b"small")
    assert store.get_many([KEY, "ab/02", "ab/03"] * 8) == [blob, b"small", None] * 8
    assert store.contains([KEY, "ab/02", "ab/03"]) == [True, True, False]
    assert not store.put(KEY, b"x" * (MIB + 1))
    found = store.counters()["object"]
    assert (found.hits, found.misses, found.puts, found.errors, found.dropped) == (16, 9, 2, 0, 1)


def test_what_http_cannot_do_is_an_error(server: FakeHTTP, store: ObjectStore) -> None:
    store.put(KEY, b"x")
    asked = len(server.requests)
    with pytest.raises(StoreError, match="cannot delete over HTTP"):
        store.delete_tenant("ab")
    assert len(server.requests) == asked, "no page of links was asked for"
    with pytest.raises(StoreError, match="NotImplementedError"):
        store.delete(KEY)
    assert store.get(KEY) == b"x"


def test_too_large_and_empty_objects(server: FakeHTTP, store: ObjectStore) -> None:
    server.objects[PATH] = seal(KEY, b"x" * (MIB + 1), time.time())
    assert store.get(KEY) is None and store.contains([KEY]) == [False]
    found = store.counters()["object"]
    assert (found.misses, found.errors, found.corrupt) == (1, 1, 0)
    server.objects[PATH] = b""
    assert store.get(KEY) is None and store.counters()["object"].corrupt == 1


def endless(first: bytes, part: bytes) -> Callable[[str, str], Iterator[bytes]]:
    return lambda method, path: itertools.chain([first], itertools.repeat(part * (MIB // len(part))))


BODIES: dict[str, tuple[Callable[[str, str], Said | None], str]] = {
    "ignores the range": (endless(b"HTTP/1.1 200 OK\r\n" + head(Content_Length="1500000000"), b"x"), "large"),
    "a long part": (endless(b"HTTP/1.1 206 Partial Content\r\n" + head(Content_Length="99999999999"), b"x"), "large"),
    "without an end": (endless(b"HTTP/1.1 200 OK\r\n" + head(Connection="close"), b"x"), "large"),
    "chunks without an end": (
        endless(b"HTTP/1.1 200 OK\r\n" + head(Transfer_Encoding="chunked"), b"4\r\nabcd\r\n"),
        "large",
    ),
    "a chunk without an end": (
        endless(b"HTTP/1.1 200 OK\r\n" + head(Transfer_Encoding="chunked") + b"ffffffffff\r\n", b"x"),
        "large",
    ),
    "a line without an end": (endless(b"HTTP/1.1 200 ", b"x"), "error"),
    "fields without an end": (endless(b"HTTP/1.1 200 OK\r\n", b"A: b\r\n"), "error"),
    "a field without an end": (endless(b"HTTP/1.1 200 OK\r\nA: ", b"x"), "error"),
    "an error without an end": (endless(b"HTTP/1.1 500 No\r\n" + head(Connection="close"), b"x"), "error"),
    "a bomb": (
        lambda method, path: answer(body=gzip.compress(bytes(1 << 25), 1), Content_Encoding="gzip"),
        "error",
    ),
    "nobody": (lambda method, path: [b""], "error"),
    "not HTTP": (lambda method, path: [b"-ERR unknown command\r\n"], "error"),
    "less than announced": (lambda method, path: [b"HTTP/1.1 200 OK\r\n" + head(Content_Length="99") + b"x"], "error"),
    "a negative length": (lambda method, path: [b"HTTP/1.1 200 OK\r\n" + head(Content_Length="-1")], "error"),
    "two lengths": (lambda method, path: [answer(body=b"x", Transfer_Encoding="chunked")], "error"),
    "a loop": (lambda method, path: answer("302 Found", Location=path), "error"),
    "another scheme": (lambda method, path: answer("302 Found", Location="file:///etc/hostname"), "error"),
    "denied": (lambda method, path: answer("403 Forbidden", b"x" * 100), "error"),
}  # fmt: skip


@pytest.mark.parametrize("what", BODIES)
def test_answers_are_bounded(what: str, server: FakeHTTP, store: ObjectStore) -> None:
    """Count the bytes that the server can send: it blocks when the client stops reading."""
    server.tell, outcome = BODIES[what]
    if outcome == "large":
        assert store.get(KEY) is None
        assert store.counters()["object"].corrupt == 0
    else:
        with pytest.raises(StoreError, match=r"^object store http://127\.0\.0\.1") as caught:
            store.get(KEY)
        assert len(str(caught.value)) < 1200
    assert store.counters()["object"].errors == 1
    assert server.sent < BUFFERS and len(server.requests) < 30
    assert store.contains([KEY]) in ([False], [True])  # only the header fields of HEAD are read
    assert server.sent < 2 * BUFFERS and len(server.requests) < 60
    Recorder().record_store(store.counters())
    server.tell = lambda method, path: None
    assert store.put(KEY, b"x") and store.get(KEY) == b"x", "it goes on"


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT"])
def test_the_rest_of_an_earlier_response_is_not_the_next_one(method: str, server: FakeHTTP, store: ObjectStore) -> None:
    """A server that sends more than it announced: the rest may arrive once the connection is used again."""
    store.put(KEY, b"x")
    rests = [b"x" * 100]
    server.tell = lambda asked, path: rests.pop() if asked == method and rests else None
    if method == "GET":
        assert store.get(KEY) == b"x"
    elif method == "HEAD":
        assert store.contains([KEY]) == [True]
    else:
        assert store.put(KEY, b"x")
    assert not rests and store.counters()["object"].errors == 0


def test_bytes_that_drip_take_no_longer_than_a_request_may(
    server: FakeHTTP, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole response would take 20 s, and bytes keep arriving."""
    monkeypatch.setattr(objects_http, "SECONDS", 0.3)

    def drip(method: str, path: str) -> Iterator[bytes]:
        yield b"HTTP/1.1 200 OK\r\n" + head(Content_Length="1000")
        for _ in range(1000):
            time.sleep(0.02)
            yield b"x"

    server.tell = drip
    with pytest.raises(StoreError, match="TimeoutError"):
        store.get(KEY)
    assert server.sent < 900


def test_a_server_that_never_comes_to_the_point(
    server: FakeHTTP, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects_http, "SECONDS", 0.3)
    server.tell = lambda method, path: itertools.repeat(b"HTTP/1.1 100 Continue\r\n\r\n")
    with pytest.raises(StoreError, match="TimeoutError"):
        store.get(KEY)


def test_cookies_are_not_kept(server: FakeHTTP, store: ObjectStore) -> None:
    server.tell = lambda method, path: answer(body=b"x" * 100, Set_Cookie=f"n{len(server.requests)}=v; Max-Age=9999999")
    for _ in range(5):
        assert store.get(KEY) is None
    fs: Any = store._connected()[0]
    assert len(fs._session.cookie_jar) == 0


def test_unpacked_bytes_only(server: FakeHTTP, store: ObjectStore) -> None:
    entry = seal(KEY, b"blob", time.time())
    server.tell = lambda method, path: answer(body=entry, Content_Encoding="identity")
    assert store.get(KEY) == b"blob" and len(entry) == HEADER_BYTES + 4
    server.tell = lambda method, path: answer(body=gzip.compress(entry), Content_Encoding="gzip")
    with pytest.raises(StoreError, match="Content-Encoding"):
        store.get(KEY)


def test_misses_leave_no_connection_open(
    server: FakeHTTP, store: ObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "asyncio"):
        for _ in range(50):
            assert store.get(KEY) is None
    assert len(server._open) <= 2 and not caplog.records
