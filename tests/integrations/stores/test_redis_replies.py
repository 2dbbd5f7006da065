"""`RedisStore` with a peer that does not reply as a Redis server does."""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

if os.environ.get("CUVEE_REQUIRE_REDIS") != "1":
    pytest.importorskip("redis", reason="needs redis-py")

from redis.exceptions import ConnectionError as RedisConnectionError
from tests.integrations.stores.fake_redis import ACCOUNTS, FakeRedis, bulk, fake_redis

from cuvee.integrations.stores import open_store, redis_replies
from cuvee.integrations.stores import redis as module
from cuvee.integrations.stores.base import StoreError
from cuvee.integrations.stores.envelope import seal
from cuvee.integrations.stores.redis import RedisStore
from cuvee.integrations.vllm.metrics import Recorder

KEY = "ab/01"
MIB = 1 << 20
# Bytes beyond those that the parser reads: the buffers of sockets, and bytes in flight when it refused the reply.
RECEIVED = MIB // 4
BUFFERS = 8 * MIB


@pytest.fixture
def peer() -> Iterator[FakeRedis]:
    with fake_redis() as server:
        yield server


@pytest.fixture
def open_redis() -> Iterator[Callable[..., RedisStore]]:
    stores: list[RedisStore] = []

    def make(peer: FakeRedis, *arguments: Any, **named: Any) -> RedisStore:
        stores.append(RedisStore(peer.url, *arguments, **{"timeout": 5.0, **named}))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


Open = Callable[..., RedisStore]


def numbers(*values: int) -> bytes:
    return b"*%d\r\n" % len(values) + b"".join(b":%d\r\n" % value for value in values)


@pytest.mark.parametrize(
    ("accounts", "field"),
    [
        (numbers(-5, 1000, 1, 1), "evicted"),
        (numbers(2**32 + 1, 1000, 1, 1), "evicted"),
        (numbers(0, -1, 1, 1), "bytes"),
        (numbers(0, 2**63 - 1, 1, 1), "bytes"),
        (numbers(0, 1000, -1, 1), "entries"),
        (numbers(0, 1000, 1, 2), "complete"),
        (numbers(0, 1000, 1, -1), "complete"),
        (b"*4\r\n:0\r\n$3\r\nabc\r\n:1\r\n:1\r\n", "bytes"),
        (b"*4\r\n:0\r\n:1000\r\n$-1\r\n:1\r\n", "entries"),
        (b"*4\r\n:0\r\n:1000\r\n*0\r\n:1\r\n", "entries"),
        (b"*4\r\n:" + b"9" * 400 + b"\r\n:1000\r\n:1\r\n:1\r\n", "RESP2"),
        (b"*4\r\n:18446744073709551616\r\n:1000\r\n:1\r\n:1\r\n", "RESP2"),
        (b"*4\r\n:\r\n:1000\r\n:1\r\n:1\r\n", "RESP2"),
        (numbers(0, 1000, 1), "accounts: must be an array of 4, got an array of 3"),
        (numbers(0, 1000, 1, 1, 1), "accounts"),
        (b"*-1\r\n", "accounts: must be an array of 4, got nil"),
        (b":7\r\n", "accounts"),
    ],
)
def test_accounts_are_checked(accounts: bytes, field: str, peer: FakeRedis, open_redis: Open) -> None:
    store = open_redis(peer, 10**8)
    peer.replies["EXEC"] = b"*2\r\n+OK\r\n" + accounts
    why = rf"^redis store redis://127\.0\.0\.1:{peer.port}/0: InvalidResponse: .*{field}"
    with pytest.raises(StoreError, match=why):
        store.put(KEY, b"x")
    found = store.counters()["redis"]
    assert (found.errors, found.puts, found.evictions, found.entries, found.bytes) == (1, 0, 0, None, None)
    Recorder().record_store(store.counters())
    peer.replies["EXEC"] = b"*2\r\n+OK\r\n" + numbers(3, 2**56, 2**32, 1)
    assert store.put(KEY, b"x"), "it goes on, on a connection where no old reply is left"
    found = store.counters()["redis"]
    assert (found.evictions, found.bytes, found.entries, found.errors) == (3, 2**56, 2**32, 1)


ODD = {
    "nil": b"$-1\r\n",
    "no array": b"*-1\r\n",
    "array": b"*1\r\n:1\r\n",
    "nothing": b"*0\r\n",
    "text": bulk(b"hello"),
    "status": b"+hello\r\n",
    "negative": b":-7\r\n",
    "large": b":9223372036854775807\r\n",
    "error": b"-ERR no\r\n",
    "moved": b"-MOVED nowhere\r\n",
    "ask": b"-ASK\r\n",
    "loading": b"-LOADING Redis is loading the dataset in memory\r\n",
    "map": b"%1\r\n+a\r\n:1\r\n",
    "blank": b"\r\n",
    "http": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "no number": b":1_0\r\n",
    "below": b"$-2\r\n",
    "longer": b"$3\r\nhello\r\n",
    "cut": b"$100\r\nhello",
    "closed": b"",
}  # fmt: skip
OPERATIONS: dict[str, tuple[tuple[str, ...], Callable[[RedisStore], object]]] = {
    "get": (("GET", "GETRANGE"), lambda store: store.get(KEY)),
    "put": (("SET", "MULTI", "EXEC"), lambda store: store.put(KEY, b"x")),
    "contains": (("EXISTS", "STRLEN"), lambda store: store.contains([KEY])),
    "delete": (("UNLINK",), lambda store: store.delete(KEY)),
    "delete_tenant": (("SCAN",), lambda store: store.delete_tenant("ab")),
}
# Odd replies that have a meaning: the entry is missing, bad or too large.
SOUND = {
    ("get", "nil"), ("get", "no array"), ("get", "text"), ("get", "status"),
}  # fmt: skip


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("bounded", [False, True])
def test_odd_replies_are_errors(operation: str, odd: str, bounded: bool, peer: FakeRedis, open_redis: Open) -> None:
    limits = {"max_bytes": 10**8, "max_entry": 1000} if bounded else {}
    store = open_redis(peer, timeout=0.2 if odd in ("cut", "closed") else 5.0, **limits)
    names, work = OPERATIONS[operation]
    for name in names:
        peer.replies[name] = ODD[odd]
    if (operation, odd) in SOUND:
        assert work(store) is None
        assert store.counters()["redis"].errors == 0
    else:
        with pytest.raises(StoreError, match=r"^redis store redis://"):
            work(store)
        assert store.counters()["redis"].errors == 1
    peer.replies.clear()
    assert work(store) in (None, True, [False], False, 0), "it goes on"


@pytest.mark.parametrize(
    "scan",
    [
        b"*2\r\n:0\r\n*0\r\n",
        b"*2\r\n$1\r\nx\r\n*0\r\n",
        b"*2\r\n$2\r\n-1\r\n*0\r\n",
        b"*2\r\n$1\r\n0\r\n$-1\r\n",
        b"*2\r\n$1\r\n0\r\n*2\r\n:1\r\n*0\r\n",
        b"*3\r\n$1\r\n0\r\n*0\r\n*0\r\n",
        b"*2\r\n" + bulk(b"9" * 5000) + b"*0\r\n",
    ],
)
def test_pages_of_names_are_checked(scan: bytes, peer: FakeRedis, open_redis: Open) -> None:
    peer.replies["SCAN"] = scan
    with pytest.raises(StoreError, match=r"InvalidResponse: (SCAN|cursor|names): must"):
        open_redis(peer).delete_tenant("ab")


def test_names_of_other_programs_are_not_touched(peer: FakeRedis, open_redis: Open) -> None:
    names = [b"cuvee:{0}:ab/01", b"cuvee:{0}:ab/\xff", b"other", b"cuvee:{0}:lru", b"cuvee:{0}:" + b"a" * 70_000]
    page = b"*2\r\n$1\r\n0\r\n*%d\r\n" % len(names[:4]) + b"".join(map(bulk, names[:4]))
    peer.replies.update(SCAN=page, UNLINK=b":1\r\n")
    assert open_redis(peer).delete_tenant("ab") == 1
    assert [command[1] for command in peer.commands if command[0] == b"UNLINK"] == names[:1]


# Bounds


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bound what a client's socket holds unread, which a kernel else lets grow to 32 MiB on some machines."""
    connect = socket.socket.connect

    def bounded(self: socket.socket, address: Any) -> None:
        self.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVED)
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", bounded)


def endless(part: bytes) -> Callable[[list[bytes]], Iterator[bytes]]:
    block = part * (MIB // len(part))
    return lambda command: itertools.repeat(block)


def announced(head: bytes, part: bytes = b"x") -> Callable[[list[bytes]], Iterator[bytes]]:
    return lambda command: itertools.chain([head], endless(part)(command))


@pytest.mark.parametrize(
    "reply",
    [
        announced(b"$3000000000\r\n"),
        announced(b"$1000066\r\n"),
        announced(b"*1000000000\r\n", b":1\r\n"),
        endless(b"x"),
        announced(b"+", b"x"),
        announced(b":", b"9"),
        announced(b"-ERR ", b"x"),
        endless(b"*1\r\n"),
        endless(b"*2\r\n"),
        endless(b":1\r\n"),
        endless(b"+QUEUED\r\n"),
    ],
)
@pytest.mark.usefixtures("small_buffers")
@pytest.mark.parametrize("name", ["get", "contains", "put", "delete_tenant"])
def test_replies_are_bounded(name: str, reply: Any, peer: FakeRedis, open_redis: Open) -> None:
    """Count the bytes that the peer can send: it blocks when the client stops reading, until the connection closes."""
    check_bound(name, reply, 0, peer, open_redis)


@pytest.mark.usefixtures("small_buffers")
@pytest.mark.parametrize("name", ["get", "contains", "put", "delete_tenant"])
def test_elements_are_bounded(name: str, peer: FakeRedis, open_redis: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    if name != "contains":  # one operation parses up to the real bound, which takes long
        monkeypatch.setattr(redis_replies, "_MOST_ELEMENTS", 1 << 14)
    reply = announced(b"*%d\r\n" % (redis_replies._MOST_ELEMENTS - 1000), b"*2\r\n:1\r\n:1\r\n")
    check_bound(name, reply, 8 * MIB, peer, open_redis)


@pytest.mark.usefixtures("small_buffers")
@pytest.mark.parametrize("name", ["get", "contains", "put", "delete_tenant"])
def test_the_bytes_of_a_reply_are_bounded(name: str, peer: FakeRedis, open_redis: Open) -> None:
    check_bound(name, announced(b"*400000\r\n", bulk(b"x" * 10_000)), 17 * MIB, peer, open_redis)


def check_bound(name: str, reply: Any, most: int, peer: FakeRedis, open_redis: Open) -> None:
    store = open_redis(peer, 10**8, max_entry=10**6, timeout=60.0)
    names, work = OPERATIONS[name]
    for command in names:
        peer.replies[command] = reply
    outcome: object
    try:
        outcome = work(store)
    except StoreError as error:
        outcome = str(error)
    # The first of endless lines may be a valid reply, or that of a bad entry; the other lines are never read.
    assert outcome in ([True], True, None) or ("InvalidResponse" in str(outcome) and len(str(outcome)) < 300)
    assert peer.sent <= most + BUFFERS
    opened = peer.connections
    peer.replies.clear()
    assert work(store) in (None, True, [False], 0)
    assert peer.connections == opened + 1 or outcome is None, "the connection was given up"


def test_a_value_of_the_largest_size_is_read(peer: FakeRedis, open_redis: Open) -> None:
    blob = os.urandom(3 * MIB)
    for most in (3 * MIB, 512 * MIB):
        store = open_redis(peer, max_entry=most)
        peer.replies["GETRANGE"] = peer.replies["GET"] = bulk(seal(KEY, blob, time.time()))
        assert store.get(KEY) == blob
        many = store.get_many([KEY] * 40)  # several replies in one buffer of the socket
        assert many == [blob] * 40
        assert store.counters()["redis"].errors == 0


def test_short_replies_in_many_pieces(peer: FakeRedis, open_redis: Open) -> None:
    entry = bulk(seal(KEY, b"blob", time.time()))
    peer.replies["GET"] = lambda command: (bytes([byte]) for byte in entry)
    assert open_redis(peer).get_many([KEY] * 20) == [b"blob"] * 20


@pytest.mark.parametrize("reply", [b"$1000\r\n" + b"x" * 1000, b"+" + b"x" * 1000, b"*500\r\n" + b"*0\r\n" * 500])
def test_a_reply_that_drips_is_a_timeout(reply: bytes, peer: FakeRedis, open_redis: Open) -> None:
    """The whole reply would take 20 s, and each part arrives within the timeout."""

    def drip(command: list[bytes]) -> Iterator[bytes]:
        for byte in reply:
            time.sleep(0.02)
            yield bytes([byte])

    peer.replies["GET"] = drip
    with pytest.raises(StoreError, match=r"Timeout.*no answer within timeout=0\.3 s"):
        open_redis(peer, timeout=0.3).get(KEY)
    assert peer.sent < len(reply)


def test_many_replies_do_not_take_many_timeouts(peer: FakeRedis, open_redis: Open) -> None:
    def late(command: list[bytes]) -> bytes:
        time.sleep(0.02)
        return b":0\r\n"

    peer.replies["EXISTS"] = late
    with pytest.raises(StoreError, match="Timeout"):
        open_redis(peer, timeout=0.3).contains([f"ab/{i:04x}" for i in range(1000)])
    assert len(peer.commands) < 1000


def test_a_scan_that_never_ends(peer: FakeRedis, open_redis: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SCAN_SECONDS", 0.1)
    cursors = itertools.count(1)
    peer.replies["SCAN"] = lambda command: b"*2\r\n" + bulk(b"%d" % next(cursors)) + b"*0\r\n"
    store = open_redis(peer, 10**8)
    with pytest.raises(StoreError, match=r"SCAN: must end within 0\.1 s"):
        store.delete_tenant("ab")
    peer.replies["EXEC"] = b"*2\r\n+OK\r\n" + numbers(0, 0, 0, 0)
    with pytest.raises(StoreError, match=r"SCAN: must end"):
        store.put(KEY, b"x")
    assert store.counters()["redis"].errors == 2


def test_unsolicited_bytes_end_a_connection(peer: FakeRedis, open_redis: Open) -> None:
    store = open_redis(peer)
    peer.replies["GETRANGE"] = peer.replies["GET"] = lambda command: b"$-1\r\n" + bulk(b"unsolicited")
    assert store.get(KEY) is None
    peer.replies.clear()
    opened = peer.connections
    wait = time.monotonic() + 5.0
    while peer.sent < len(b"$-1\r\n" + bulk(b"unsolicited")) and time.monotonic() < wait:
        time.sleep(0.005)
    assert store.get(KEY) is None and peer.connections == opened + 1


def test_a_parser_without_a_connection() -> None:
    parser = redis_replies.ReplyParser(1 << 16, 1 << 20)
    with pytest.raises(RedisConnectionError, match="closed"):
        parser.read_response()


def test_long_messages_are_cut(peer: FakeRedis, open_redis: Open) -> None:
    peer.replies["GET"] = b"-ERR " + b"no " * 20_000 + b"\r\n"
    with pytest.raises(StoreError) as caught:
        open_redis(peer).get(KEY)
    assert "no no no" in str(caught.value) and len(str(caught.value)) < 1200


# Clusters


def slots(*parts: tuple[int | bytes, int | bytes, int | bytes | None, int | bytes]) -> bytes:
    """Make a reply to CLUSTER SLOTS from first and last slot, host, and port."""

    def sent(value: int | bytes | None) -> bytes:
        return b"$-1\r\n" if value is None else bulk(value) if isinstance(value, bytes) else b":%d\r\n" % value

    rows = (b"*3\r\n" + sent(a) + sent(b) + b"*3\r\n" + sent(h) + sent(p) + bulk(b"id") for a, b, h, p in parts)
    return b"*%d\r\n" % len(parts) + b"".join(rows)


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (slots((0, 10**12, b"127.0.0.1", 1)), "last slot: must"),
        (slots((-1, 16383, b"127.0.0.1", 1)), "first slot: must"),
        (slots((b"0", b"16383", b"127.0.0.1", 1)), "first slot: must"),
        (slots(*[(0, 16383, b"127.0.0.1", 1)] * 2), "at most 16384 slots"),
        (slots(*[(i, i, b"127.0.0.1", 1 + i) for i in range(1001)]), "and 1000 nodes"),
        (slots((0, 16383, b"127.0.0.1", 65536)), "port: must"),
        (slots((0, 16383, b"127.0.0.1", b"1")), "port: must"),
        (slots((0, 16383, b"user:pw@evil", 1)), "host: must"),
        (slots((0, 16383, b"evil/0?x=", 1)), "host: must"),
        (slots((0, 16383, b"\xff", 1)), "host: must"),
        (slots((0, 16383, 7, 1)), "host: must"),
        (slots((9, 3, b"127.0.0.1", 1)), "no node of the cluster holds slot"),
        (b"*0\r\n", "no node of the cluster holds slot"),
        (b"*1\r\n:1\r\n", "CLUSTER SLOTS: must hold slots"),
        (b"*1\r\n*3\r\n:0\r\n:1\r\n*1\r\n$1\r\nx\r\n", "CLUSTER SLOTS: must hold slots"),
        (b"*1\r\n*2\r\n:0\r\n:1\r\n", "CLUSTER SLOTS: must hold slots"),
        (b"$-1\r\n", "CLUSTER SLOTS: must be an array"),
        (b"+OK\r\n", "CLUSTER SLOTS: must be an array"),
        (b"-ERR This instance has cluster support disabled\r\n", "must return the slots of a cluster"),
    ],
)
def test_slots_are_checked(reply: bytes, why: str, peer: FakeRedis, open_redis: Open) -> None:
    peer.replies["CLUSTER"] = reply
    store = open_redis(peer, cluster=True)
    with pytest.raises(StoreError, match=why):
        store.get(KEY)
    with pytest.raises(StoreError, match=why):
        store.delete_tenant("ab") if "no node" not in why else store.contains([KEY])
    assert store.counters()["redis"].errors == 2


@pytest.mark.parametrize("host", [None, b"", b"?", b"localhost"])
def test_nodes_may_leave_out_their_host(host: bytes | None, peer: FakeRedis, open_redis: Open) -> None:
    peer.replies["CLUSTER"] = slots((0, 16383, host, peer.port))
    store = open_redis(peer, 2 * 10**9, cluster=True)
    assert store.get(KEY) is None and store.put(KEY, b"x") and store.delete_tenant("ab") == 0
    assert store.counters()["redis"].errors == 0


def test_slots_that_move_for_ever(peer: FakeRedis, open_redis: Open) -> None:
    peer.replies["CLUSTER"] = slots((0, 16383, None, peer.port))
    peer.replies["GET"] = b"-MOVED 1 127.0.0.1:%d\r\n" % peer.port
    store = open_redis(peer, cluster=True)
    for asked in (1, 2):
        with pytest.raises(StoreError, match="MovedError"):
            store.get(KEY)
        names = [command[0] for command in peer.commands]
        assert names.count(b"GET") == 2 * asked and store.counters()["redis"].errors == asked
    peer.replies["GET"] = bulk(seal(KEY, b"blob", time.time()))
    assert store.get(KEY) == b"blob"


def test_the_engine_goes_on_beside_an_odd_peer(peer: FakeRedis) -> None:
    """The connector's store is guarded: a put with an odd reply counts as not kept."""
    peer.replies["EXEC"] = b"*2\r\n+OK\r\n" + ACCOUNTS.replace(b":0", b":-5")
    store = open_store(f"{peer.url}?max_mb=100")
    recorder = Recorder()
    for _ in range(3):
        assert not store.put(KEY, b"x")
        recorder.record_store(store.counters())
    assert recorder.totals()["store_errors", "redis"] == 1 and recorder.totals()["store_skipped", "redis"] == 2
    store.close()
