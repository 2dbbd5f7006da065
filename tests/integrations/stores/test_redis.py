"""`RedisStore` with real servers, alone and as a cluster that is resharded, and with a peer that replies oddly."""

from __future__ import annotations

import importlib
import itertools
import os
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from typing import Any

import pytest
from tests.integrations.stores.fake_redis import FakeRedis, bulk
from tests.integrations.stores.redis_server import RedisServer, redis_cluster, redis_server
from tests.waiting import wait_until

if os.environ.get("CUVEE_REQUIRE_REDIS") != "1":
    pytest.importorskip("redis", reason="needs redis-py")

from cuvee.codec.errors import InputError
from cuvee.integrations.stores import redis as module
from cuvee.integrations.stores.base import StoreError, TierCounters
from cuvee.integrations.stores.envelope import HEADER_BYTES
from cuvee.integrations.stores.redis import RedisStore

Open = Callable[..., RedisStore]
KEYS = [f"ab/{index:08x}" for index in range(150)]
KEY = KEYS[0]


@pytest.fixture(scope="module")
def shared_server() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture
def server(shared_server: RedisServer) -> RedisServer:
    """Return a running, empty server with its default configuration. A test that stops it starts it again."""
    with shared_server.client() as client:
        client.flushall()
    return shared_server


@pytest.fixture(scope="module")
def cluster() -> Iterator[list[RedisServer]]:
    with redis_cluster() as servers:
        yield servers


@pytest.fixture
def open_redis() -> Iterator[Open]:
    """Return a function that opens a `RedisStore`, which is closed twice after the test."""

    def make(url: str, *arguments: Any, **named: Any) -> RedisStore:
        store = RedisStore(url, *arguments, **{"timeout": 5.0, **named})
        for _ in range(2):
            stack.callback(store.close)
        return store

    with ExitStack() as stack:
        yield make


def counted(store: RedisStore) -> TierCounters:
    return store.counters()["redis"]


# Kinds of servers


def test_every_node_of_a_cluster_has_entries_and_other_keys_stay(cluster: list[RedisServer], open_redis: Open) -> None:
    for node in cluster:
        with node.client() as client:
            client.flushall()
    store = open_redis(cluster[0].url, cluster=True)
    for name in KEYS:
        assert store.put(name, name.encode())
    held = [_names(node) for node in cluster]
    assert all(held) and sum(map(len, held)) == len(KEYS) and sorted(store.keys("ab")) == sorted(KEYS)
    assert store.get_many(KEYS) == [name.encode() for name in KEYS]
    assert store.delete_tenant("ab") == len(KEYS) and store.delete_tenant("ab") == 0


def _names(server: RedisServer) -> set[str]:
    with server.client() as client:
        return {name.decode() for name in client.scan_iter()}


def test_entries_are_expired_by_the_server(server: RedisServer, open_redis: Open) -> None:
    open_redis(server.url, 0.2).put(KEY, b"short")
    open_redis(server.url).put(KEYS[1], b"long")
    wait_until(lambda: _names(server) == {f"cuvee:{KEYS[1]}"}, "the server expires one")


# Bad entries


def test_a_huge_value_is_not_fetched(server: RedisServer, open_redis: Open) -> None:
    open_redis(server.url).put(KEY, b"x" * 100_000)
    with server.client() as client:
        client.config_resetstat()
        store = open_redis(server.url)
        store.max_entry = 1000
        assert store.get(KEY) is None
        sent = client.info("stats")["total_net_output_bytes"]
    assert HEADER_BYTES + 1001 <= sent < 3000, "no more of it was sent"


# A server that fails


def test_what_is_no_string_is_a_bad_entry(
    server: RedisServer, open_redis: Open, caplog: pytest.LogCaptureFixture
) -> None:
    """The others are read, and the key is free again."""
    store = open_redis(server.url)
    for key in KEYS[:3]:
        assert store.put(key, b"blob")
    with server.client() as client:
        client.delete(f"cuvee:{KEYS[1]}")
        client.rpush(f"cuvee:{KEYS[1]}", "planted")
        assert store.contains(KEYS[:3]) == [True, False, True]
        assert store.get_many(KEYS[:3]) == [b"blob", None, b"blob"] and not client.exists(f"cuvee:{KEYS[1]}")
        client.rpush(f"cuvee:{KEYS[1]}", "planted")
    now = store.counters()["redis"]
    assert (now.corrupt, now.errors, now.hits) == (1, 0, 2) and caplog.text.count("deletes bad entries") == 1
    assert store.put(KEYS[1], b"new") and store.get(KEYS[1]) == b"new"


def test_down_at_start_and_restarted(server: RedisServer, open_redis: Open) -> None:
    server.kill()
    store = open_redis(server.url)
    operations: list[Callable[[], Any]] = [
        lambda: store.get(KEY),
        lambda: store.put(KEY, b"x"),
        lambda: store.contains([KEY]),
        lambda: store.delete(KEY),
        lambda: store.delete_tenant("ab"),
    ]
    for operation in operations:
        with pytest.raises(StoreError, match=rf"redis store redis://127.0.0.1:{server.port}.*refused"):
            operation()
    assert counted(store).errors == len(operations)
    server.start()
    assert store.get(KEY) is None and store.put(KEY, b"x") and store.get(KEY) == b"x"
    server.restart()  # the connections are closed, without an error
    assert store.get(KEY) is None and store.put(KEY, b"x")
    server.restart()
    assert store.put(KEY, b"y") and store.get(KEY) == b"y"
    assert counted(store).errors == len(operations)


def test_a_hanging_server_is_a_timeout(server: RedisServer, open_redis: Open) -> None:
    store = open_redis(server.url, timeout=1.5)
    store.put(KEY, b"x")
    server.pause()
    try:
        with pytest.raises(StoreError, match=r"Timeout.*timeout=1\.5 s"):
            store.get(KEY)
        with pytest.raises(StoreError, match=r"Timeout"):
            store.put(KEYS[1], bytes(9_000_000))  # more than the socket's buffers hold
    finally:
        server.resume()
    assert store.get(KEY) == b"x" and store.get(KEYS[1]) in (None, bytes(9_000_000))
    assert store.put(KEYS[1], b"y") and store.get_many(KEYS[:2]) == [b"x", b"y"]


def test_a_timeout_is_not_tried_again(open_redis: Open) -> None:
    """redis-py's default is ten retries: eleven times the timeout."""
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(50)
        store = open_redis(f"redis://127.0.0.1:{deaf.getsockname()[1]}", timeout=0.1)
        with pytest.raises(StoreError, match="Timeout"):
            store.get(KEY)
        deaf.settimeout(0.05)
        deaf.accept()[0].close()
        with pytest.raises(TimeoutError):  # no second attempt
            deaf.accept()


# Passwords


def test_a_server_that_sends_the_password_back(
    peer: FakeRedis, open_redis: Open, caplog: pytest.LogCaptureFixture
) -> None:
    """Proxies and servers without AUTH repeat its arguments. Neither the error nor its causes may show the password."""
    for name in ("HELLO", "AUTH", "GETRANGE"):
        peer.replies[name] = lambda command: b"-ERR unknown command, with args: " + b" ".join(command) + b"\r\n"
    store = open_redis(f"redis://:open%20sesame@127.0.0.1:{peer.port}/0")
    with pytest.raises(StoreError, match="unknown command") as caught:
        store.get(KEY)
    told = "".join(traceback.format_exception(caught.value))
    assert "sesame" not in told + caplog.text and "***" in told


def test_passwords(open_redis: Open, caplog: pytest.LogCaptureFixture) -> None:
    with redis_server(password="open-sesame") as server:
        for url in (server.url, server.unix_url):
            store = open_redis(url)
            assert store.put(KEY, b"x") and store.get(KEY) == b"x"
        for cluster in (False, True):
            with pytest.raises(StoreError, match=r"(?i)auth|password") as caught:
                open_redis(f"redis://us:wr0ng-pw@127.0.0.1:{server.port}/0", cluster=cluster).get(KEY)
            assert "wr0ng-pw" not in str(caught.value) and "127.0.0.1" in str(caught.value)
    assert "sesame" not in caplog.text


# A cluster


def test_a_cluster_is_resharded_while_it_is_read_and_written(cluster: list[RedisServer], open_redis: Open) -> None:
    """`redis-cli` moves thousands of slots. No operation fails, and no entry is lost."""
    store = open_redis(cluster[0].url, cluster=True)
    stored = {name: name.encode() * 50 for name in KEYS}
    for name, blob in stored.items():
        assert store.put(name, blob)
    over = threading.Event()
    failures: list[object] = []
    rounds = [0, 0]

    def read() -> None:
        while not over.is_set():
            if store.get_many(KEYS[:75]) != [stored[name] for name in KEYS[:75]] or not all(store.contains(KEYS)):
                failures.append("an entry was missing")
            rounds[0] += 1

    def write() -> None:
        for turn in itertools.count():
            for name in KEYS[75:]:
                if over.is_set():
                    return
                if not store.put(name, b"%d" % turn) or store.get(name) != b"%d" % turn:
                    failures.append("what was written is not there")
            rounds[1] += 1

    before = [len(_names(node)) for node in cluster]
    pool = ThreadPoolExecutor(2)
    working = [pool.submit(read), pool.submit(write)]
    with cluster[0].client() as source, cluster[1].client() as target:
        ids = [client.execute_command("CLUSTER", "MYID").decode() for client in (source, target)]
    command = ["redis-cli", "--cluster", "reshard", f"127.0.0.1:{cluster[0].port}", "--cluster-yes"]
    command += ["--cluster-from", ids[0], "--cluster-to", ids[1], "--cluster-slots", "2000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    over.set()
    for each in working:
        each.result(60)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr
    after = [len(_names(node)) for node in cluster]
    assert after[0] < before[0] and after[1] > before[1], "entries have moved"
    assert failures == [] and min(rounds) > 0 and counted(store).errors == 0
    assert open_redis(cluster[2].url, cluster=True).get_many(KEYS[:75]) == [stored[name] for name in KEYS[:75]]


# Peers that reply oddly


@pytest.fixture
def peer() -> Iterator[FakeRedis]:
    with closing(FakeRedis()) as server:
        yield server


ODD: dict[str, Any] = {
    "error": b"-ERR " + b"no " * 20_000 + b"\r\n", "array": b"*2\r\n:1\r\n:1\r\n", "no array": b"*-1\r\n",
    "deep": b"*1\r\n" * 3000 + b":1\r\n", "garbage": b"HTTP/1.1 400 Bad Request\r\n\r\n", "type": b"?1\r\n",
    "length": b"$x\r\n", "minus": b":-5\r\n", "cut": b"$1000\r\nx", "closed": b"", "status": b"+QUEUED\r\n",
    "text": bulk(b"x" * 100), "huge": b":" + b"9" * 5000 + b"\r\n", "large": b"$3000000000\r\nx",
    "moved": b"-MOVED x\r\n",
}  # fmt: skip
OPERATIONS: dict[str, tuple[str, Callable[[RedisStore], object]]] = {
    "get": ("GETRANGE", lambda store: store.get(KEY)),
    "put": ("SET", lambda store: store.put(KEY, b"x")),
    "contains": ("STRLEN", lambda store: store.contains([KEY])),
    "delete": ("UNLINK", lambda store: store.delete(KEY)),
    "delete_tenant": ("SCAN", lambda store: store.delete_tenant("ab")),
}
# Odd replies that have a meaning: the entry is bad or missing.
SOUND = {("get", "text"): None, ("get", "status"): None, ("contains", "minus"): [False], ("delete", "minus"): False}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_odd_replies_are_errors(operation: str, odd: str, peer: FakeRedis, open_redis: Open) -> None:
    store = open_redis(peer.url, timeout=0.2 if odd in ("cut", "closed", "large") else 5.0)
    name, work = OPERATIONS[operation]
    peer.replies[name] = ODD[odd]
    if (operation, odd) in SOUND:
        assert work(store) == SOUND[operation, odd] and counted(store).errors == 0
    else:
        with pytest.raises(StoreError, match=r"^redis store redis://") as caught:
            work(store)
        assert len(str(caught.value)) < 1200 and counted(store).errors == 1
    peer.replies.clear()
    assert work(store) in (None, True, [False], False, 0), "it goes on"


def test_a_request_whose_connection_breaks_is_sent_once_more(peer: FakeRedis, open_redis: Open) -> None:
    asked: list[list[bytes]] = []

    def breaks(command: list[bytes]) -> bytes:
        asked.append(command)
        if len(asked) != 2:
            raise ConnectionResetError
        return b":0\r\n"

    peer.replies["STRLEN"] = breaks
    store = open_redis(peer.url)
    assert store.contains([KEY]) == [False] and len(asked) == 2
    with pytest.raises(StoreError, match="ConnectionError"):
        store.contains([KEY])
    assert len(asked) == 4


def test_names_of_other_programs_are_not_touched(peer: FakeRedis, open_redis: Open) -> None:
    names = [b"cuvee:ab/01", b"cuvee:ab/\xff", b"other", b"cuvee:ab/../01", b"cuvee:" + b"a" * 70_000]
    page = b"*2\r\n$1\r\n0\r\n*%d\r\n" % len(names) + b"".join(map(bulk, names))
    peer.replies.update(SCAN=page, UNLINK=b":1\r\n")
    assert open_redis(peer.url).delete_tenant("ab") == 1
    assert [command[1] for command in peer.commands if command[0] == b"UNLINK"] == names[:1]


def test_a_scan_that_never_ends(peer: FakeRedis, open_redis: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SCAN_SECONDS", 0.1)
    cursors = itertools.count(1)
    peer.replies["SCAN"] = lambda command: b"*2\r\n" + bulk(b"%d" % next(cursors)) + b"*0\r\n"
    with pytest.raises(StoreError, match=r"SCAN: must end within 0\.1 s"):
        open_redis(peer.url).delete_tenant("ab")


# Arguments


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"url": "http://host"}, "^url: "),
        ({"url": "localhost:6379"}, "^url: "),
        ({"ttl": 0}, "^ttl: "),
        ({"ttl": -1.0}, "^ttl: "),
        ({"timeout": 0}, "^timeout: "),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        RedisStore(**{"url": "redis://127.0.0.1:1", **arguments})


@pytest.mark.parametrize("cluster", [False, True])
def test_an_unreadable_url_keeps_its_password(cluster: bool) -> None:
    with pytest.raises(InputError, match="percent-encode") as caught:
        RedisStore("redis://:se/cret@127.0.0.1:1/0", cluster=cluster)
    assert "se/cret" not in str(caught.value) and "'se'" not in str(caught.value)
    assert caught.value.__cause__ is None and caught.value.__suppress_context__


def test_without_redis_py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    monkeypatch.delitem(sys.modules, module.__name__)
    with pytest.raises(ImportError, match=r"pip install 'cuvee\[redis\]'"):
        importlib.import_module(module.__name__)


def test_out_of_memory(server: RedisServer, open_redis: Open) -> None:
    store = open_redis(server.url)
    store.put(KEY, b"before")
    with server.client() as client:
        client.config_set("maxmemory", 1)
    try:
        with pytest.raises(StoreError, match=r"OutOfMemoryError.*command not allowed.*allkeys-lru") as caught:
            store.put(KEYS[1], b"SECRET" * 100)
        assert "SECRET" not in str(caught.value)
        assert store.get(KEY) == b"before" and store.delete(KEY), "reading and deleting still work"
    finally:
        with server.client() as client:
            client.config_set("maxmemory", 0)
    assert store.put(KEYS[1], b"after") and store.get(KEYS[1]) == b"after"


def test_cluster_with_a_node_down(open_redis: Open) -> None:
    with redis_cluster() as servers:
        for server in servers:
            with server.client() as client:
                client.config_set("cluster-require-full-coverage", "no")
        store = open_redis(servers[0].url, cluster=True)
        for name in KEYS:
            store.put(name, b"x")
        servers[2].pause()
        with pytest.raises(StoreError, match="Timeout"):  # after thirty times as long: the client tries again
            open_redis(servers[0].url, cluster=True, timeout=0.1).get_many(KEYS)
        servers[2].kill()
        found: dict[str, bytes | None] = {}
        for name in KEYS[:12]:
            with suppress(StoreError):
                found[name] = store.get(name)
        assert 0 < len(found) < 12 and set(found.values()) == {b"x"}
    with pytest.raises(StoreError, match="redis store"):
        open_redis(servers[0].url, cluster=True, timeout=1.0).get(KEY)


def test_read_only_replica(server: RedisServer, open_redis: Open) -> None:
    store = open_redis(server.url)
    store.put(KEY, b"x")
    with server.client() as client:
        client.set(f"cuvee:{KEYS[1]}", b"garbage")
        client.replicaof("127.0.0.1", "1")
    try:
        assert store.get_many(KEYS[:2]) == [b"x", None]
        assert counted(store).corrupt == 1  # a failed deletion does not fail the get
        with pytest.raises(StoreError, match=r"(?i)read ?only"):
            store.put(KEY, b"y")
        with pytest.raises(StoreError, match=r"(?i)read ?only"):
            store.delete(KEY)
    finally:
        with server.client() as client:
            client.replicaof("NO", "ONE")
    assert store.put(KEY, b"y") and store.get(KEY) == b"y" and store.get(KEYS[1]) is None
