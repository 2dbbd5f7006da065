"""`ObjectStore` on a real S3 server, and with an HTTP server that is not trusted."""

from __future__ import annotations

import gzip
import importlib
import itertools
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest
from tests.integrations.stores.fake_http import FakeHTTP, answer, head
from tests.integrations.stores.loopback import Said
from tests.integrations.stores.s3_server import SECRET

if os.environ.get("CUVEE_REQUIRE_S3") != "1":
    pytest.importorskip("obstore", reason="needs obstore")

import obstore

from cuvee.codec.errors import InputError
from cuvee.integrations.stores import objects as module
from cuvee.integrations.stores import open_store
from cuvee.integrations.stores.base import StoreError, TierCounters
from cuvee.integrations.stores.breaker import GuardedStore
from cuvee.integrations.stores.envelope import seal
from cuvee.integrations.stores.objects import ObjectStore

KEY, OTHER = "ab/0123", "ab/4567"
PATH = "ab/01/0123"
MIB = 1 << 20
BOMB = answer(body=gzip.compress(bytes(1 << 25), 1), Content_Encoding="gzip")  # which takes too long for an answer
# The most that a client's sockets take in after it has stopped reading.
BUFFERS = 16 * MIB

Open = Callable[..., ObjectStore]


@pytest.fixture
def open_objects() -> Iterator[Open]:
    """Return a function that opens an `ObjectStore`, which is closed twice after the test."""

    def make(url: str, **named: Any) -> ObjectStore:
        store = ObjectStore(url, **named)
        for _ in range(2):
            stack.callback(store.close)
        return store

    with ExitStack() as stack:
        yield make


def counted(store: ObjectStore) -> TierCounters:
    return store.counters()["object"]


# A real server


def test_an_endpoint_without_tls_has_to_be_allowed(
    s3_url: str, open_objects: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    with pytest.raises(StoreError, match=r"^object store s3://"):
        open_objects(s3_url).put(KEY, b"x")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    assert open_objects(s3_url).contains([KEY]) == [False]


def test_signed_requests(s3_url: str, monkeypatch: pytest.MonkeyPatch, open_objects: Open) -> None:
    """The server refuses requests without a signature, or with a wrong one. No message shows the key."""
    store = open_store(f"{s3_url}?ttl=1d", guarded=False)
    assert store.put(KEY, b"x") and store.get(KEY) == b"x" and store.delete_tenant("ab") == 1
    store.close()
    wrong = SECRET[:-1] + "x"
    for name, text in (("AWS_SECRET_ACCESS_KEY", wrong), ("AWS_SKIP_SIGNATURE", "true")):
        with monkeypatch.context() as patch:
            patch.setenv(name, text)
            refused = open_objects(s3_url)
            with pytest.raises(StoreError, match="403") as caught:
                refused.put(KEY, b"y")
            assert wrong not in str(caught.value)
            with pytest.raises(StoreError, match="403"):
                refused.get(KEY)


def test_what_a_server_lists_is_checked(s3_url: str, open_objects: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what has the name of an entry of this tenant is deleted."""
    store = open_objects(s3_url)
    deleted: list[str] = []
    names = ["ab/01/0123", "cd/01/0123", "ab/01/0223", "../ab/01/0123", "ab/01/0123/x", "ab/01/01\n", "ab"]
    monkeypatch.setattr(obstore, "list", lambda *_, **__: iter([[{"path": name} for name in names], []]))
    monkeypatch.setattr(obstore, "delete", lambda _, paths: deleted.append(paths))
    assert store.delete_tenant("ab") == 1 and deleted == ["ab/01/0123"]


def test_a_forked_process_gets_an_error_rather_than_hanging(s3_url: str) -> None:
    """The threads of obstore do not survive a fork, and a call would wait for them for ever."""
    code = """
        import os, sys
        from cuvee.integrations.stores.base import StoreError
        from cuvee.integrations.stores.objects import ObjectStore
        store = ObjectStore(sys.argv[1])
        assert store.put("ab/01", b"x")
        child = os.fork()
        if not child:
            try:
                ObjectStore(sys.argv[1]).get("ab/01")
            except StoreError as error:
                os._exit(7 if "spawn" in str(error) else 1)
            os._exit(2)
        assert os.waitpid(child, 0)[1] == 7 << 8 and store.get("ab/01") == b"x"
        """
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code), s3_url]
    assert subprocess.run(command, timeout=60, check=False).returncode == 0


# A server that is not trusted


@pytest.fixture
def server() -> Iterator[FakeHTTP]:
    with closing(FakeHTTP()) as server:
        yield server


@pytest.fixture
def store(server: FakeHTTP, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    monkeypatch.setattr(module, "_TIMEOUTS", {"connect_timeout": "2s", "timeout": "2s"})
    monkeypatch.setattr(module, "_RETRY", {"max_retries": 0})
    store = ObjectStore(server.url)
    store.max_entry = MIB
    yield store
    store.close()


def test_http(server: FakeHTTP, store: ObjectStore) -> None:
    blob = bytes(range(256)) * (MIB // 256)
    assert store.get(KEY) is None and store.put(KEY, blob) and store.put(OTHER, b"small")
    assert store.get_many([KEY, OTHER, "ab/03"] * 8) == [blob, b"small", None] * 8
    assert store.contains([KEY, OTHER, "ab/03"]) == [True, True, False]
    server.objects[f"/kv/{PATH}"] = seal(KEY, b"x" * (MIB + 1), time.time())
    sent = server.sent
    assert store.get(KEY) is None and store.contains([KEY]) == [False]
    assert counted(store).errors == 1 and server.sent - sent < BUFFERS
    server.tell = lambda method, path: answer("404 Not Found")
    with pytest.raises(StoreError, match="there is no such bucket"):
        store.put(KEY, b"x")


def endless(first: bytes, part: bytes) -> Callable[[str, str], Iterator[bytes]]:
    return lambda method, path: itertools.chain([first], itertools.repeat(part * (MIB // len(part))))


BODIES: dict[str, tuple[Callable[[str, str], Said | None], str]] = {
    "a long body": (endless(b"HTTP/1.1 200 OK\r\n" + head(Content_Length="1500000000"), b"x"), "large"),
    "a long part": (endless(b"HTTP/1.1 206 Partial Content\r\n" + head(Content_Length="99999999999"), b"x"), "large"),
    "without an end": (endless(b"HTTP/1.1 200 OK\r\n" + head(Connection="close"), b"x"), "error"),
    "chunks without an end": (
        endless(b"HTTP/1.1 200 OK\r\n" + head(Transfer_Encoding="chunked"), b"4\r\nabcd\r\n"),
        "error",
    ),
    "a chunk without an end": (
        endless(b"HTTP/1.1 200 OK\r\n" + head(Transfer_Encoding="chunked") + b"ffffffffff\r\n", b"x"),
        "error",
    ),
    "a line without an end": (endless(b"HTTP/1.1 200 ", b"x"), "error"),
    "fields without an end": (endless(b"HTTP/1.1 200 OK\r\n", b"A: b\r\n"), "error"),
    "a field without an end": (endless(b"HTTP/1.1 200 OK\r\nA: ", b"x"), "error"),
    "a bomb": (lambda method, path: BOMB, "bad"),
    "nobody": (lambda method, path: [b""], "error"),
    "continued for ever": (lambda method, path: itertools.repeat(b"HTTP/1.1 100 Continue\r\n\r\n", 10_000), "error"),
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
    if outcome == "error":
        with pytest.raises(StoreError, match=r"^object store http://127\.0\.0\.1") as caught:
            store.get(KEY)
        assert len(str(caught.value)) < 1200 and "Debug source" not in str(caught.value)
    else:
        assert store.get(KEY) is None
        assert counted(store).corrupt == (outcome == "bad"), "nothing is unpacked"
    assert server.sent < BUFFERS and len(server.requests) < 30
    server.tell = lambda method, path: None
    assert store.put(KEY, b"x") and store.get(KEY) == b"x", "it goes on"


@pytest.mark.parametrize("first", [b"HTTP/1.1 200 OK\r\n" + head(Content_Length="1000"), b"HTTP/1.1 200 OK\r\nA: "])
def test_bytes_that_drip_take_no_longer_than_a_request_may(first: bytes, server: FakeHTTP, store: ObjectStore) -> None:
    """The whole response would take 20 s, and bytes keep arriving."""

    def drip(method: str, path: str) -> Iterator[bytes]:
        yield first
        for _ in range(1000):
            time.sleep(0.02)
            yield b"x"

    server.tell = drip
    with pytest.raises(StoreError):
        store.get(KEY)
    assert server.sent < 900


# Arguments


@pytest.mark.parametrize(
    ("url", "named", "message"),
    [
        ("ftp://host/x", {}, r"url: must begin with one of s3, gs"),
        ("file:///srv/kv", {}, r"url: must begin with"),
        ("memory://x", {}, r"url: must begin with"),
        ("az://container/kv", {}, r"url: obstore does not accept az://container/kv: .*Account must be specified$"),
        ("s3://bucket/kv", {"ttl": 0}, r"ttl: must be above 0"),
    ],
)
def test_arguments_are_checked(url: str, named: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(InputError, match=f"^{message}"):
        ObjectStore(url, **named)


@pytest.mark.parametrize(("status", "body"), [("500 No", b"open-sesame"), ("403 open-sesame", b"")])
def test_no_message_shows_a_password(status: str, body: bytes, open_objects: Open, server: FakeHTTP) -> None:
    server.tell = lambda method, path: answer(status, body)
    store = open_objects(f"http://user:open-sesame@127.0.0.1:{server.port}/kv")
    with pytest.raises(StoreError) as caught:
        store.get(KEY)
    assert "sesame" not in f"{caught.value} {caught.value.args} {caught.value.__cause__}"


@pytest.mark.parametrize(
    ("status", "body", "full"),
    [
        ("507 Insufficient Storage", b"", True),
        ("403 Forbidden", b"<Error><Code>QuotaExceeded</Code></Error>", True),
        ("403 Forbidden", b"<Error><Code>AccessDenied</Code></Error>", False),
    ],
)
def test_storage_that_is_full_says_so_and_what_it_holds_is_read(
    status: str, body: bytes, full: bool, open_objects: Open, server: FakeHTTP
) -> None:
    store = GuardedStore(open_objects(f"http://127.0.0.1:{server.port}/kv"), lambda: 0.0)  # an outage lasts
    assert store.put(KEY, b"x")
    server.tell = lambda method, path: answer(status, body) if method == "PUT" else None
    with pytest.raises(StoreError) as caught:
        store._store.put("ab/99", b"x")
    assert ("raise its quota" in str(caught.value)) == full
    assert not store.put("ab/99", b"x") and not store.takes_puts() and store.get(KEY) == b"x"


def test_without_obstore(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.delitem(sys.modules, module.__name__)
    with pytest.raises(ImportError, match=r"pip install 'cuvee\[objects\]'"):
        importlib.import_module(module.__name__)
