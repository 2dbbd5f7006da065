"""`RedisStore` with real servers: protocol, budget, expiry, and failures of servers."""

from __future__ import annotations

import importlib
import logging
import os
import random
import signal
import socket
import socketserver
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
from tests.integrations.stores.redis_server import RedisServer, redis_cluster, redis_server, require_redis, wait_until

if os.environ.get("CUVEE_REQUIRE_REDIS") != "1":
    pytest.importorskip("redis", reason="needs redis-py")

from cuvee.codec.errors import InputError
from cuvee.codec.part_keys import part_key, part_number
from cuvee.integrations.stores import open_store
from cuvee.integrations.stores import redis as module
from cuvee.integrations.stores.base import PART_WEIGHTS, StoreError, TierCounters
from cuvee.integrations.stores.envelope import HEADER_BYTES, seal
from cuvee.integrations.stores.redis import RedisStore

Open = Callable[..., RedisStore]


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
    """Return a function that opens a `RedisStore`, which is closed after the test."""
    stores: list[RedisStore] = []

    def make(url: str, *arguments: Any, **named: Any) -> RedisStore:
        stores.append(RedisStore(url, *arguments, **{"timeout": 5.0, **named}))
        return stores[-1]

    yield make
    for store in stores:
        store.close()
        store.close()


def key(index: int, tenant: str = "ab") -> str:
    return f"{tenant}/{index:08x}"


def counted(store: RedisStore) -> TierCounters:
    return store.counters()["redis"]


def entries(server: RedisServer) -> dict[str, int]:
    """Return the bytes of each entry on the server."""
    with server.client() as client:
        return {name.decode(): client.strlen(name) for name in client.scan_iter(match="*/*")}


def assert_books_right(server: RedisServer, bucket: int = 0) -> None:
    prefix = f"cuvee:{{{bucket}}}:"
    held = {name.removeprefix(prefix): size for name, size in entries(server).items() if name.startswith(prefix)}
    with server.client() as client:
        assert {name.decode(): int(size) for name, size in client.hgetall(f"{prefix}size").items()} == held
        assert {name.decode() for name in client.zrange(f"{prefix}lru", 0, -1)} == set(held)
        assert int(client.hget(f"{prefix}sums", "bytes") or 0) == sum(held.values())


def full_at(count: int, size: int) -> int:
    """Return the budget that `count` blobs of `size` bytes fill."""
    return count * (size + HEADER_BYTES)


# The protocol


@pytest.fixture(params=["plain", "budget", "unix", "valkey", "cluster", "cluster-budget"])
def any_store(request: pytest.FixtureRequest, open_redis: Open) -> RedisStore:
    """Return an empty store of each kind."""
    kind: str = request.param
    if kind.startswith("cluster"):
        servers: list[RedisServer] = request.getfixturevalue("cluster")
        for node in servers:
            with node.client() as client:
                client.flushall()
        return open_redis(servers[0].url, 2 * 10**9 if kind == "cluster-budget" else None, cluster=True)
    server: RedisServer = request.getfixturevalue("server")
    url = {"unix": server.unix_url, "valkey": server.url.replace("redis:", "valkey:")}.get(kind, server.url)
    return open_redis(url, None if kind == "plain" else 10**9)


def test_protocol(any_store: RedisStore) -> None:
    store = any_store
    assert store.name == "redis" and store.shared
    assert store.get(key(1)) is None and not store.delete(key(1)) and store.contains([key(1)]) == [False]
    assert store.put(key(1), b"one") and store.put(key(2), b"\0" * 3000)
    assert store.get(key(1)) == b"one"
    assert store.put(key(1), b"another")
    assert store.get_many([key(1), key(3), key(2), key(1)]) == [b"another", None, b"\0" * 3000, b"another"]
    assert store.contains([key(2), key(3), key(1)]) == [True, False, True]
    assert store.contains([]) == [] and store.get_many([]) == []
    assert store.delete(key(1)) and not store.delete(key(1)) and store.get(key(1)) is None
    found = counted(store)
    assert (found.hits, found.misses, found.hit_bytes) == (4, 3, 3 + 7 + 3000 + 7)
    assert (found.puts, found.put_bytes, found.errors, found.corrupt) == (3, 3 + 3000 + 7, 0, 0)


def test_many_keys_and_tenants(any_store: RedisStore) -> None:
    store = any_store
    mine, others = [key(i, "ab") for i in range(150)], [key(i, "ab0") for i in range(40)]
    for name in mine + others:
        assert store.put(name, name.encode())
    assert store.get_many(mine) == [name.encode() for name in mine]
    assert store.delete_tenant("ab") == 150
    assert not any(store.contains(mine)) and all(store.contains(others))
    assert store.delete_tenant("ab") == 0 and store.delete_tenant("cd") == 0
    assert store.put(key(0, "ab"), b"x") and store.clear() == 41
    assert not any(store.contains([key(0, "ab"), *others])) and store.clear() == 0


def test_parts(any_store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store = any_store
    keys = [key(index) for index in range(20)]
    expected = [(b"base", name.encode())[: at % 3] for at, name in enumerate(keys)]
    for name, parts in zip(keys, expected, strict=True):
        assert not parts or store.put_parts(name, parts) == len(parts)
    requests: list[int] = []
    send = RedisStore._send

    def noted(self: RedisStore, commands: Any) -> list[Any]:
        requests.append(len(commands))
        return send(self, commands)

    monkeypatch.setattr(RedisStore, "_send", noted)
    assert store.get_parts(keys) == expected
    assert len(requests) == 2, "40 keys, 32 at a time"
    store.delete(part_key(keys[2], 1))
    assert store.get_parts(keys[2:3]) == [(b"base",)] and store.delete_parts(keys[2])
    assert not any(store.contains([part_key(keys[2], number) for number in range(2)]))
    assert store.delete_tenant("ab") == sum(at % 3 for at in range(20)) - 2


def test_keys_are_checked(server: RedisServer, open_redis: Open) -> None:
    store = open_redis(server.url)
    for bad in ("ab", "ab/", "AB/00", "ab/*", "ab/0/1"):
        for use in (store.get, store.delete, lambda k: store.put(k, b"x"), lambda k: store.contains([k])):
            with pytest.raises(InputError, match="key"):
                use(bad)
    with pytest.raises(InputError, match="tenant"):
        store.delete_tenant("*")


def test_stores_share_a_server(server: RedisServer, open_redis: Open) -> None:
    one, two = open_redis(server.url), open_redis(server.unix_url)
    one.put(key(1), b"blob")
    assert two.get(key(1)) == b"blob"
    two.delete(key(1))
    assert one.contains([key(1)]) == [False]


def test_large_values(server: RedisServer, open_redis: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_redis(server.url, 10**9, timeout=20)
    blob = os.urandom(1 << 20) * 100
    assert store.put(key(1), blob)
    assert store.get(key(1)) == blob
    monkeypatch.setattr(module, "_MAX_VALUE_BYTES", 1000)
    assert not store.put(key(2), bytes(1000 - HEADER_BYTES + 1))
    assert store.put(key(3), bytes(1000 - HEADER_BYTES))
    assert counted(store).dropped == 1 and store.contains([key(2), key(3)]) == [False, True]
    monkeypatch.undo()
    assert module._MAX_VALUE_BYTES == 512 * 2**20
    store.delete_tenant("ab")


def test_threads(server: RedisServer, open_redis: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CONNECTIONS", 3)
    store = open_redis(server.url, full_at(40, 500))
    with ThreadPoolExecutor(16) as threads:

        def work(index: int) -> bool:
            name = key(index % 60)
            store.put(name, index.to_bytes(4, "little") * 125)
            found = store.get(name)
            return found is None or len(found) == 500

        assert all(threads.map(work, range(600)))
    found = counted(store)
    assert found.puts == 600 and found.errors == found.corrupt == 0 and found.entries == 40
    assert_books_right(server)
    with server.client() as client:
        assert client.info("clients")["connected_clients"] <= 3 + 1


# Budget


def test_least_recently_used_goes_first(server: RedisServer, open_redis: Open) -> None:
    store = open_redis(server.url, full_at(4, 100))
    for i in range(4):
        assert store.put(key(i), bytes(100))
    assert store.get(key(0)) is not None
    assert store.get_many([key(7), key(1)]) == [None, bytes(100)]
    assert store.contains([key(2), key(3)]) == [True, True]  # `contains` does not count as a use
    store.put(key(4), bytes(100))
    store.put(key(5), bytes(100))
    assert store.contains([key(i) for i in range(6)]) == [True, True, False, False, True, True]
    store.put(key(6), bytes(full_at(3, 100) - HEADER_BYTES))
    assert store.contains([key(i) for i in range(7)]) == [False, False, False, False, False, True, True]
    found = counted(store)
    assert (found.evictions, found.entries, found.bytes) == (5, 2, full_at(4, 100))
    assert_books_right(server)


def test_replacing_and_deleting_keep_the_books(server: RedisServer, open_redis: Open) -> None:
    store = open_redis(server.url, full_at(10, 100))
    for size in (500, 20, 300, 300):
        store.put(key(1), bytes(size))
        assert (counted(store).bytes, counted(store).entries) == (size + HEADER_BYTES, 1)
        assert_books_right(server)
    store.put(key(2), bytes(50))
    store.delete(key(1))
    assert_books_right(server)
    store.put(key(3, "cd"), bytes(50))
    assert store.delete_tenant("ab") == 1
    assert_books_right(server)
    assert counted(store).evictions == 0


def test_larger_than_the_budget(server: RedisServer, open_redis: Open, caplog: pytest.LogCaptureFixture) -> None:
    store = open_redis(server.url, full_at(1, 100))
    assert store.put(key(1), bytes(100))
    assert not store.put(key(2), bytes(101)) and not store.put(key(3), bytes(101))
    assert counted(store).dropped == 2 and counted(store).puts == 1 and store.get(key(1)) == bytes(100)
    assert caplog.text.count("too large") == 1


def test_entries_lost_behind_our_back(server: RedisServer, open_redis: Open) -> None:
    store = open_redis(server.url, full_at(1000, 100))
    for i in range(400):
        store.put(key(i), bytes(100))
    with server.client() as client:
        client.delete(*(f"cuvee:{{0}}:{key(i)}" for i in range(0, 400, 2)))
        client.set(f"cuvee:{{0}}:{key(1)}", b"other bytes")
    assert store.get_many([key(0), key(1)]) == [None, None]  # the index is corrected at once for requested entries
    with server.client() as client:
        assert not client.hexists("cuvee:{0}:size", key(0)) and not client.hexists("cuvee:{0}:size", key(1))
    for _ in range(40):  # and for the others by the sweep
        store.put(key(1000), bytes(100))
    assert_books_right(server)
    assert counted(store).entries == 200 and counted(store).evictions == 0


@pytest.mark.parametrize("book", ["lru", "size", "sums", "all"])
def test_books_lost_behind_our_back(server: RedisServer, open_redis: Open, book: str) -> None:
    store = open_redis(server.url, full_at(30, 100))
    for i in range(20):
        store.put(key(i), bytes(100))
    with server.client() as client:
        client.delete(*(f"cuvee:{{0}}:{name}" for name in (["lru", "size", "sums"] if book == "all" else [book])))
    assert store.get(key(3)) == bytes(100)
    store.put(key(20), bytes(100))
    assert_books_right(server)
    for i in range(21, 50):
        store.put(key(i), bytes(100))
    assert counted(store).entries == 30 == len(entries(server))
    assert_books_right(server)


def test_a_budget_is_given_to_a_server_in_use(server: RedisServer, open_redis: Open) -> None:
    before = open_redis(server.url)
    for i in range(50):
        before.put(key(i), bytes(100))
    with server.client() as client:
        client.set("somebody/else", b"x")
    store = open_redis(server.url, full_at(10, 100))
    store.put(key(50), bytes(100))
    store.put(key(51), bytes(100))
    assert len(entries(server)) == 10 + 1 and store.contains([key(51)]) == [True]
    with server.client() as client:
        assert client.delete("somebody/else") == 1
    assert_books_right(server)


def test_only_lost_books_cost_a_scan(server: RedisServer, open_redis: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    scans: list[str] = []
    scan = RedisStore._scan

    def noted(self: RedisStore, pattern: str) -> Iterator[list[str]]:
        scans.append(pattern)
        return scan(self, pattern)

    monkeypatch.setattr(RedisStore, "_scan", noted)
    store = open_redis(server.url, full_at(2, 100))
    for i in range(4):
        store.put(key(i), bytes(100))
        store.delete(key(i))
    assert scans == ["*/*"]


def test_the_server_evicts_too(server: RedisServer, open_redis: Open) -> None:
    with server.client() as client:
        used = client.info("memory")["used_memory"]
        client.config_set("maxmemory-policy", "allkeys-random")
        client.config_set("maxmemory", used + 2_000_000)
    try:
        store = open_redis(server.url, 10_000_000)
        for i in range(1200):
            assert store.put(key(i), bytes(3000))
        assert 0 < len(entries(server)) < 1000
    finally:
        with server.client() as client:
            client.config_set("maxmemory", 0)
            client.config_set("maxmemory-policy", "noeviction")
    for _ in range(120):
        store.put(key(5000), bytes(3000))
    assert_books_right(server)
    assert counted(store).errors == 0


def script(code: str, *arguments: str, **named: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    return subprocess.Popen(command, text=True, **named)


def test_several_processes_keep_one_budget(server: RedisServer) -> None:
    code = """
        import random, sys
        from cuvee.integrations.stores.redis import RedisStore
        store = RedisStore(sys.argv[1], int(sys.argv[2]), timeout=20.0)
        choice = random.Random(sys.argv[3])
        for _ in range(300):
            key = f"ab/{choice.randrange(150):08x}"
            action = choice.random()
            if action < 0.6:
                assert store.put(key, key.encode() * choice.randrange(1, 100))
            elif action < 0.9:
                store.get_many([key, "ab/ff"])
            else:
                store.delete(key)
        found = store.counters()["redis"]
        assert found.corrupt == found.errors == 0, found
        """
    budget = 30_000
    workers = [script(code, server.url, str(budget), str(seed)) for seed in range(3)]
    assert [worker.wait() for worker in workers] == [0, 0, 0]
    held = entries(server)
    assert budget / 2 < sum(held.values()) <= budget
    assert_books_right(server)


def test_a_process_is_killed_while_it_puts(server: RedisServer, open_redis: Open) -> None:
    code = """
        import sys
        from cuvee.integrations.stores.redis import RedisStore
        store = RedisStore(sys.argv[1], 400_000_000, timeout=20.0)
        for i in range(10**6):
            store.put(f"ab/{i % 64:08x}", bytes([i % 251]) * 5_000_000)
            if i == 5: print("going", flush=True)
        """
    with script(code, server.url, stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None and worker.stdout.readline() == "going\n"
        worker.send_signal(signal.SIGKILL)
    with server.client() as client:
        wait_until(lambda: client.info("clients")["connected_clients"] == 1, "the connections are gone")
    assert_books_right(server)
    store = open_redis(server.url, 400_000_000)
    for name in entries(server):
        blob = store.get(name.removeprefix("cuvee:{0}:"))
        assert blob is not None and len(blob) == 5_000_000
    store.delete_tenant("ab")


# Time to live


def test_the_server_expires(server: RedisServer, open_redis: Open) -> None:
    store = open_redis(server.url, full_at(100, 100), ttl=0.15)
    for i in range(20):
        store.put(key(i), bytes(100))
    lasting = open_redis(server.url, full_at(100, 100))
    lasting.put(key(100), bytes(100))
    assert store.get(key(19)) == bytes(100)
    wait_until(lambda: not any(store.contains([key(i) for i in range(20)])), "they expire")
    assert store.get(key(3)) is None
    for _ in range(4):
        lasting.put(key(101), bytes(100))
    assert_books_right(server)
    assert counted(lasting).entries == 2 and counted(lasting).evictions == 0
    assert counted(store).corrupt == counted(store).expired == 0  # a plain miss, because the server has deleted it


def test_the_server_expires_refinements_sooner(server: RedisServer, open_redis: Open) -> None:
    store = open_redis(server.url, ttl=3600, refinement_ttl=0.15)
    assert store.put_parts(key(1), [b"x"] * 2) == 2
    wait_until(lambda: store.get_parts([key(1)]) == [(b"x",)], "the refinements expire")
    with server.client() as client:
        client.set(f"cuvee:{{0}}:{part_key(key(1), 1)}", seal(part_key(key(1), 1), b"old", time.time() - 1))
    assert store.get_parts([key(1)]) == [(b"x",)] and counted(store).expired == 1


def test_a_shorter_time_holds_for_old_entries(server: RedisServer, open_redis: Open) -> None:
    with server.client() as client:
        client.set(f"cuvee:{{0}}:{key(1)}", seal(key(1), b"old", 1.7e9))
    store = open_redis(server.url, 10_000, ttl=3600)
    assert store.get(key(1)) is None
    found = counted(store)
    assert (found.expired, found.misses, found.corrupt) == (1, 1, 0) and not entries(server)
    without = open_redis(server.url)
    with server.client() as client:
        client.set(f"cuvee:{{0}}:{key(1)}", seal(key(1), b"old", 1.7e9))
    assert without.get(key(1)) == b"old"


# Parts


def assert_refinements_right(server: RedisServer, bucket: int = 0) -> None:
    """Check that the refinements on the server are in their own orders, with the times of the order of all entries."""
    prefix = f"cuvee:{{{bucket}}}:"
    with server.client() as client:
        orders = [name.decode() for name in client.keys(f"cuvee:[{{]{bucket}}}:lru*")]
        for order in [f"{prefix}lru", *(name for name in orders if name.startswith(f"{prefix}lru:"))]:
            uses = dict(client.zrange(order, 0, -1, withscores=True))
            part = order.replace(f"{prefix}lru", f"{prefix}lru.1")
            expected = {name: use for name, use in uses.items() if part_number(name.decode())}
            assert dict(client.zrange(part, 0, -1, withscores=True)) == expected


@pytest.mark.parametrize("share", [None, 7])
def test_the_largest_age_times_weight_goes_first(server: RedisServer, open_redis: Open, share: int | None) -> None:
    """Compared with a plain list of uses. The ages of tenants count the uses of all."""
    size, held = 200, dict[str, int]()  # key -> its last use
    most = None if share is None else share * size
    store = open_redis(server.url, 20 * size, max_tenant_bytes=most)
    random_, clock, evicted = random.Random(3), 0, [0, 0]

    def evict(beyond: int, tenant: str) -> None:
        while len(mine := [name for name in held if name.startswith(tenant)]) > beyond:
            out = max(mine, key=lambda name: (clock - held[name]) * PART_WEIGHTS[part_number(name)])
            evicted[part_number(out)] += 1
            del held[out]

    for _ in range(400):
        tenant = random_.choice(["aa", "bb", "cc"])
        name = part_key(key(random_.randrange(18), tenant), random_.randrange(2))
        if random_.random() < 0.4:
            found = store.get(name) is not None
            assert found == (name in held)
        else:
            assert store.put(name, bytes(size - HEADER_BYTES))
            found = True
        clock += found
        if found:
            held.pop(name, None)
            held[name] = clock
        if share is not None:
            evict(share, tenant)
        evict(20, "")
    assert {name.partition("}:")[2] for name in entries(server)} == held.keys()
    assert evicted[1] > evicted[0] > 0 and counted(store).evictions == sum(evicted)
    assert_refinements_right(server)
    (assert_books_right if share is None else assert_tenants_right)(server)
    assert sum(map(store.delete_tenant, ("aa", "bb", "cc"))) == len(held)
    with server.client() as client:
        assert not client.keys("*lru*"), "an order without entries is gone"


@pytest.mark.parametrize("lost", ["lru", "lru.1", "lru.1:aa", "sums"])
def test_books_of_refinements_that_were_lost(server: RedisServer, open_redis: Open, lost: str) -> None:
    """A server that evicts on its own may evict any key of the index. Then refinements count as used when they were."""
    store = open_redis(server.url, full_at(40, 100), max_tenant_bytes=full_at(20, 100))

    def fill(chunks: range) -> None:
        for index in chunks:
            for tenant in ("aa", "bb"):
                store.put_parts(key(index, tenant), [bytes(100)] * 2)

    fill(range(9))
    with server.client() as client:
        assert client.delete(f"cuvee:{{0}}:{lost}") == 1
    fill(range(9, 40))
    assert_tenants_right(server)
    assert_refinements_right(server)
    bases = [key(index, tenant) for index in range(25, 40) for tenant in ("aa", "bb")]
    assert all(store.contains(bases))


def test_a_lost_index_leaves_no_orders_behind(server: RedisServer, open_redis: Open) -> None:
    store = open_redis(server.url, full_at(60, 100), max_tenant_bytes=full_at(30, 100))
    for tenant in ("aa", "bb"):
        store.put_parts(key(1, tenant), [bytes(100)] * 2)
    with server.client() as client:
        client.delete("cuvee:{0}:size", *(f"cuvee:{{0}}:{part_key(key(1, 'aa'), number)}" for number in range(2)))
        assert store.get(key(1, "aa")) is None
        assert not client.keys("*lru*")


def test_books_of_a_version_without_parts(server: RedisServer, open_redis: Open) -> None:
    """That version keeps the order of all entries only. What it removed is not found in the others."""
    store = open_redis(server.url, full_at(6, 100))
    for index in range(3):
        store.put_parts(key(index), [bytes(100)] * 2)
    gone = part_key(key(0), 1)
    with server.client() as client:
        client.delete(f"cuvee:{{0}}:{gone}")
        client.zrem("cuvee:{0}:lru", gone)
        client.hdel("cuvee:{0}:size", gone)
        client.hincrby("cuvee:{0}:sums", "bytes", -full_at(1, 100))
    store.put_parts(key(3), [bytes(100)] * 2)
    assert_books_right(server)
    assert store.get_parts([key(index) for index in range(4)], most=1) == [(bytes(100),)] * 4
    assert counted(store).entries == 6
    with server.client() as client:
        assert client.zscore("cuvee:{0}:lru.1", gone) is None, "it was the next to be evicted"


# Budgets of tenants


def assert_tenants_right(server: RedisServer, bucket: int = 0) -> None:
    """Check that the index of each tenant matches the entries on the server."""
    assert_books_right(server, bucket)
    prefix = f"cuvee:{{{bucket}}}:"
    held: dict[str, dict[str, int]] = {}
    for name, size in entries(server).items():
        if name.startswith(prefix):
            entry = name.removeprefix(prefix)
            held.setdefault(entry.partition("/")[0], {})[entry] = size
    with server.client() as client:
        sums = {name.decode(): int(value) for name, value in client.hgetall(f"{prefix}sums").items()}
        assert {name[3:]: size for name, size in sums.items() if name.startswith("of:")} == {
            tenant: sum(own.values()) for tenant, own in held.items()
        }
        orders = {name.decode().rpartition(":")[2] for name in client.keys(f"{prefix.replace('{', '[{]')}lru:*")}
        assert orders == set(held)
        for tenant, own in held.items():
            assert {name.decode() for name in client.zrange(f"{prefix}lru:{tenant}", 0, -1)} == set(own)


def test_a_tenant_with_a_budget_evicts_nobody_else(server: RedisServer, open_redis: Open) -> None:
    store = open_redis(server.url, 100_000, max_tenant_bytes=40_000)
    mine = [key(index, "aa") for index in range(20)]
    for name in mine:
        assert store.put(name, bytes(900))
    for index in range(150):
        assert store.put(key(index, "bb"), bytes(900))
        if index == 20:
            assert store.get(key(0, "bb")) is not None
    there = store.contains([key(index, "bb") for index in range(150)])
    size = 900 + HEADER_BYTES
    assert store.contains(mine) == [True] * 20
    assert there == [False] * (150 - 40_000 // size) + [True] * (40_000 // size), "its newest entries"
    assert counted(store).evictions == 150 - 40_000 // size
    assert_tenants_right(server)
    # The total budget is kept as well.
    for tenant in ("cc", "dd"):
        for index in range(60):
            store.put(key(index, tenant), bytes(900))
    assert sum(entries(server).values()) <= 100_000
    assert store.delete(key(59, "dd")) and store.delete_tenant("cc") > 0
    assert_tenants_right(server)
    assert not store.put(key(0, "bb"), bytes(40_000)), "larger than the share"
    assert counted(store).dropped == 1


def test_what_a_tenant_used_stays(server: RedisServer, open_redis: Open) -> None:
    size = 900 + HEADER_BYTES
    store = open_redis(server.url, 100_000, max_tenant_bytes=10 * size)
    for index in range(10):
        store.put(key(index), bytes(900))
    assert store.get(key(0)) is not None
    store.put(key(10), bytes(900))
    assert store.contains([key(0), key(1), key(2), key(10)]) == [True, False, True, True]
    assert_tenants_right(server)


def test_books_that_do_not_tell_tenants_apart_are_written_anew(server: RedisServer, open_redis: Open) -> None:
    plain = open_redis(server.url, 100_000)
    for index in range(30):
        plain.put(key(index, "aa"), bytes(900))
        plain.put(key(index, "bb"), bytes(900))
    store = open_redis(server.url, 100_000, max_tenant_bytes=20_000)
    store.put(key(99, "aa"), bytes(900))
    assert_tenants_right(server)
    store.put(key(98, "aa"), bytes(900))
    assert sum(size for name, size in entries(server).items() if ":aa/" in name) <= 20_000
    # Stores without budgets of tenants keep this index as well.
    for index in range(30, 60):
        plain.put(key(index, "bb"), bytes(900))
    plain.get(key(59, "bb"))
    plain.delete(key(58, "bb"))
    assert_tenants_right(server)


@pytest.mark.parametrize("lost", ["lru:aa", "sums", "lru", "size"])
def test_books_of_tenants_that_were_lost(server: RedisServer, open_redis: Open, lost: str) -> None:
    """A server that evicts on its own may evict any key of the index."""
    store = open_redis(server.url, 100_000, max_tenant_bytes=20_000)
    for tenant in ("aa", "bb"):
        for index in range(20):
            store.put(key(index, tenant), bytes(900))
    with server.client() as client:
        client.delete(f"cuvee:{{0}}:{lost}")
    for index in range(20, 60):
        store.put(key(index, "aa"), bytes(900))
    assert_tenants_right(server)
    assert sum(size for name, size in entries(server).items() if ":aa/" in name) <= 20_000
    assert store.contains([key(index, "bb") for index in range(20)]) == [True] * 20


def test_a_cluster_keeps_budgets_of_tenants(cluster: list[RedisServer], open_redis: Open) -> None:
    url = cluster[0].url
    store = open_redis(url, 4 * 10**9, cluster=True, max_tenant_bytes=2 * 10**9)
    keys = [key(index, "aa") for index in range(50)]
    for name in keys:
        assert store.put(name, bytes(900))
    assert store.get_many(keys) == [bytes(900)] * 50 and counted(store).evictions == 0
    assert store.delete_tenant("aa") == 50
    with pytest.raises(InputError, match=r"^max_tenant_bytes: must be at least 1024000000"):
        open_redis(url, 4 * 10**9, cluster=True, max_tenant_bytes=10**9)
    with pytest.raises(InputError, match=r"^max_tenant_bytes: must come with max_bytes"):
        open_redis(url, max_tenant_bytes=10**9)


# Bad entries


@pytest.mark.parametrize("budget", [None, 10_000])
@pytest.mark.parametrize("what", ["garbage", "empty", "moved", "flipped", "cut", "list"])
def test_bad_entries_are_counted_misses(
    server: RedisServer, open_redis: Open, what: str, budget: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_redis(server.url, budget)
    store.put(key(1), b"first" * 20)
    store.put(key(2), b"second")
    name = f"cuvee:{{0}}:{key(1)}"
    with server.client() as client:
        good: bytes = client.get(name)
        bad = {
            "garbage": b"garbage",
            "empty": b"",
            "moved": client.get(f"cuvee:{{0}}:{key(2)}"),
            "flipped": good[:-1] + b"?",
            "cut": good[:-1],
        }
        client.delete(name)
        if what == "list":
            client.rpush(name, b"one", b"two")
        else:
            client.set(name, bad[what])
    assert store.get_many([key(2), key(1)]) == [b"second", None]
    found = counted(store)
    assert (found.corrupt, found.misses, found.hits, found.errors) == (1, 1, 1, 0)
    assert [name.partition("}:")[2] for name in entries(server)] == [key(2)]
    assert store.get(key(1)) is None and counted(store).corrupt == 1  # it was deleted
    if budget:
        assert_books_right(server)
    assert "deletes bad entries" in caplog.text
    assert store.put(key(1), b"new") and store.get(key(1)) == b"new"


def test_entries_have_a_largest_size(
    server: RedisServer, open_redis: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    large, store = open_redis(server.url), open_redis(server.url, max_entry=1000)
    large.put(key(1), b"x" * 100_000)
    large.put(key(2), b"y" * 1000)
    replies: list[int] = []
    usual = RedisStore._open

    def note(self: RedisStore, key: str, reply: Any) -> bytes | None:
        replies.append(len(reply))
        return usual(self, key, reply)

    monkeypatch.setattr(RedisStore, "_open", note)
    assert store.get_many([key(1), key(2), key(3)]) == [None, b"y" * 1000, None]
    assert replies == [HEADER_BYTES + 1001, HEADER_BYTES + 1000, 0], "no more of it was sent"
    assert store.contains([key(1), key(2), key(3)]) == [False, True, False]
    found = counted(store)
    assert (found.misses, found.hits, found.errors, found.corrupt) == (2, 1, 1, 0)
    assert caplog.text.count("cannot use an entry") == 1
    assert large.contains([key(1)]) == [True], "it stays"
    assert not store.put(key(1), b"z" * 1001) and counted(store).dropped == 1
    with server.client() as client:
        client.rpush(f"cuvee:{{0}}:{key(4)}", b"one")
    assert store.contains([key(4)]) == [False]
    assert store.put(key(1), b"small") and store.get(key(1)) == b"small"
    with pytest.raises(InputError, match=r"^max_entry: "):
        open_redis(server.url, max_entry=0)


def test_a_list_is_replaced_by_a_put(server: RedisServer, open_redis: Open) -> None:
    store = open_redis(server.url, 10_000)
    with server.client() as client:
        client.rpush(f"cuvee:{{0}}:{key(1)}", b"one")
    assert store.put(key(1), b"blob") and store.get(key(1)) == b"blob"
    assert_books_right(server)


def test_what_was_written_since_is_not_deleted(server: RedisServer, open_redis: Open) -> None:
    store = open_redis(server.url)
    store.put(key(1), b"good")
    store._discard(key(1), b"what was there before")
    store._discard(key(1), RuntimeError("WRONGTYPE"))
    assert store.get(key(1)) == b"good"
    with server.client() as client:
        client.delete(f"cuvee:{{0}}:{key(1)}")
        client.rpush(f"cuvee:{{0}}:{key(1)}", b"one")
    store._discard(key(1), b"what was there before")
    assert store.contains([key(1)]) == [True]


# A server that fails


def test_down_at_start_and_restarted(server: RedisServer, open_redis: Open) -> None:
    server.kill()
    store = open_redis(server.url, 10_000)
    operations: list[Callable[[], Any]] = [
        lambda: store.get(key(1)),
        lambda: store.put(key(1), b"x"),
        lambda: store.contains([key(1)]),
        lambda: store.delete(key(1)),
        lambda: store.delete_tenant("ab"),
    ]
    for operation in operations:
        with pytest.raises(StoreError, match=rf"redis store redis://127.0.0.1:{server.port}.*refused"):
            operation()
    assert counted(store).errors == len(operations)
    server.start()
    assert store.get(key(1)) is None and store.put(key(1), b"x") and store.get(key(1)) == b"x"
    server.restart()  # the connections are closed and the scripts forgotten, without an error
    assert store.get(key(1)) is None and store.put(key(1), b"x")
    server.restart()
    assert store.put(key(1), b"y") and store.get(key(1)) == b"y"
    assert counted(store).errors == len(operations)
    assert_books_right(server)


def test_saved_entries_survive_a_restart(server: RedisServer, open_redis: Open) -> None:
    store = open_redis(server.url, full_at(3, 100))
    for i in range(3):
        store.put(key(i), bytes(100))
    store.get(key(0))
    with server.client() as client:
        client.save()
    server.restart()
    (server.folder / "dump.rdb").unlink()
    store.put(key(3), bytes(100))
    assert store.contains([key(i) for i in range(4)]) == [True, False, True, True]
    assert_books_right(server)


def test_a_hanging_server_is_a_timeout(server: RedisServer, open_redis: Open) -> None:
    store = open_redis(server.url, 10_000_000, timeout=0.3)
    store.put(key(1), b"x")
    server.pause()
    began = time.monotonic()
    try:
        with pytest.raises(StoreError, match=r"Timeout.*timeout=0\.3 s"):
            store.get(key(1))
        with pytest.raises(StoreError, match=r"Timeout"):
            store.put(key(2), bytes(9_000_000))  # more than the socket's buffers hold
    finally:
        server.resume()
    assert time.monotonic() - began < 10  # 0.6 expected; redis-py's defaults would take longer
    assert store.get(key(1)) == b"x"
    assert store.get(key(2)) in (None, bytes(9_000_000))
    assert store.put(key(2), b"y") and store.get_many([key(1), key(2)]) == [b"x", b"y"]
    assert_books_right(server)


def test_a_timeout_is_not_tried_again(open_redis: Open) -> None:
    """redis-py's default is ten retries: eleven times the timeout."""
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(50)
        store = open_redis(f"redis://127.0.0.1:{deaf.getsockname()[1]}", timeout=0.1)
        with pytest.raises(StoreError, match="Timeout"):
            store.get(key(1))
        deaf.settimeout(0.05)
        deaf.accept()[0].close()
        with pytest.raises(TimeoutError):  # no second attempt
            deaf.accept()


def test_killed_while_it_works(server: RedisServer, open_redis: Open) -> None:
    store = open_redis(server.url, 10**9)
    kinds: set[str] = set()
    going = threading.Event()
    blob = os.urandom(1 << 20) * 8

    def work() -> None:
        try:
            for i in range(10**6):
                store.put(key(i % 10), blob)
                if i == 3:
                    going.set()
                assert store.get(key(i % 10)) == blob
        except StoreError as error:
            kinds.add(type(error.__cause__).__name__)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert going.wait(20)
    server.kill()
    for thread in threads:
        thread.join()
    assert kinds == {"ConnectionError"}
    server.start()
    assert store.get(key(1)) is None and store.put(key(1), b"x") and store.get(key(1)) == b"x"
    assert counted(store).corrupt == 0


def test_loading(server: RedisServer, open_redis: Open) -> None:
    store = open_redis(server.url, 10**6)
    with server.client() as client:
        for i in range(400):
            client.set(f"filler:{i}", b"x" * 3000)
        client.save()
    server.restart("--key-load-delay", "5000", "--loading-process-events-interval-bytes", "1024", wait=False)
    with pytest.raises(StoreError, match="loading the dataset"):
        store.get(key(1))
    with pytest.raises(StoreError, match="loading the dataset"):
        store.put(key(1), b"x")
    server.kill()
    (server.folder / "dump.rdb").unlink()
    server.start()
    assert store.put(key(1), b"x")


@pytest.mark.parametrize("budget", [None, 10**9])
def test_out_of_memory(
    server: RedisServer, open_redis: Open, budget: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_redis(server.url, budget)
    store.put(key(1), b"before")
    with server.client() as client:
        client.config_set("maxmemory", 1)
    try:
        for _ in range(2):
            with pytest.raises(StoreError, match=r"OutOfMemoryError.*command not allowed.*max_gb") as caught:
                store.put(key(2), b"SECRET" * 100)
            assert "SECRET" not in str(caught.value)
        errors = counted(store).errors
        assert errors == 2
        assert store.get(key(1)) == b"before" and store.get(key(1)) == b"before"  # reading still works
        assert counted(store).errors == errors + (2 if budget else 0)
        assert caplog.text.count("cannot note the use") == (1 if budget else 0)
        assert store.delete(key(1)) if budget is None else True
    finally:
        with server.client() as client:
            client.config_set("maxmemory", 0)
    assert store.put(key(2), b"after") and store.get(key(2)) == b"after"
    if budget:
        assert_books_right(server)


@pytest.mark.parametrize("budget", [None, 10**9])
def test_read_only_replica(server: RedisServer, open_redis: Open, budget: int | None) -> None:
    store = open_redis(server.url, budget)
    store.put(key(1), b"x")
    with server.client() as client:
        client.set(f"cuvee:{{0}}:{key(2)}", b"garbage")
        client.replicaof("127.0.0.1", "1")
    try:
        assert store.get_many([key(1), key(2)]) == [b"x", None]
        assert counted(store).corrupt == 1  # a failed deletion does not fail the get
        with pytest.raises(StoreError, match=r"(?i)read ?only"):
            store.put(key(1), b"y")
        with pytest.raises(StoreError, match=r"(?i)read ?only"):
            store.delete(key(1))
    finally:
        with server.client() as client:
            client.replicaof("NO", "ONE")
    assert store.put(key(1), b"y") and store.get(key(1)) == b"y" and store.get(key(2)) is None


def test_books_of_a_wrong_type(server: RedisServer, open_redis: Open) -> None:
    store = open_redis(server.url, 10**6)
    with server.client() as client:
        client.set("cuvee:{0}:size", b"not a hash")
    with pytest.raises(StoreError, match="WRONGTYPE"):
        store.put(key(1), b"x")


def test_a_server_that_sends_the_password_back(open_redis: Open, caplog: pytest.LogCaptureFixture) -> None:
    """Proxies and servers without AUTH repeat its arguments. Neither the error nor its causes may show the password."""
    with socketserver.TCPServer(("127.0.0.1", 0), Echo) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        store = open_redis(f"redis://:open%20sesame@127.0.0.1:{server.server_address[1]}/0")
        with pytest.raises(StoreError, match="unknown command") as caught:
            store.get(key(1))
        server.shutdown()
    told = "".join(traceback.format_exception(caught.value))
    assert "sesame" not in told + caplog.text and "***" in told


class Echo(socketserver.StreamRequestHandler):
    """Replies to every command with an error that contains its arguments."""

    def handle(self) -> None:
        while line := self.rfile.readline():
            parts = [self.rfile.readline() and self.rfile.readline().strip() for _ in range(int(line[1:]))]
            self.wfile.write(b"-ERR unknown command, with args beginning with: " + b" ".join(parts) + b"\r\n")


def test_a_password_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUVEE_TEST_PASSWORD", "open-sesame\n")
    with redis_server(password="open-sesame") as server:
        store = open_store(f"redis://127.0.0.1:{server.port}/0?password_env=CUVEE_TEST_PASSWORD")
        assert store.put(key(1), b"x") and store.get(key(1)) == b"x"
        store.close()


def test_passwords(open_redis: Open, caplog: pytest.LogCaptureFixture) -> None:
    with redis_server(password="open-sesame") as server:
        for url in (server.url, server.unix_url):
            store = open_redis(url)
            assert store.put(key(1), b"x") and store.get(key(1)) == b"x"
        wrong = f"redis://:wr0ng-pw@127.0.0.1:{server.port}/0"
        for url in (wrong, f"redis://127.0.0.1:{server.port}/0"):
            with pytest.raises(StoreError, match=r"(?i)auth|password") as caught:
                open_redis(url).get(key(1))
            assert "wr0ng-pw" not in str(caught.value) and "127.0.0.1" in str(caught.value)
        with pytest.raises(StoreError) as caught:
            open_redis(f"redis://us:wr0ng-pw@127.0.0.1:{server.port}/0", cluster=True).get(key(1))
        assert "wr0ng-pw" not in str(caught.value)
    with pytest.raises(StoreError, match="refused") as caught:
        open_redis(server.url).get(key(1))
    assert "sesame" not in str(caught.value) and "sesame" not in caplog.text


def test_a_missing_socket(open_redis: Open) -> None:
    with pytest.raises(StoreError, match=r"unix:///nowhere/redis\.sock"):
        open_redis("unix:///nowhere/redis.sock").get(key(1))


def test_fork(server: RedisServer) -> None:
    """Parent and child of a fork use the same store, each on its own connections."""
    code = """
        import os, sys
        from cuvee.integrations.stores.redis import RedisStore
        store = RedisStore(sys.argv[1], 10**6, timeout=20.0)
        store.put("ab/00", b"before")
        child = os.fork()
        who = b"parent" if child else b"child"
        for i in range(300):
            key = f"{who.hex()}/{i % 9:02x}"
            assert store.put(key, who * 50) and store.get(key) == who * 50
        if child:
            assert os.waitpid(child, 0)[1] == 0
            assert store.get("ab/00") == b"before"
        """
    with script(code, server.url) as parent:
        assert parent.wait() == 0
    assert_books_right(server)


# A cluster

SLOTS_OF_THE_THIRD = (10922, 16383)


@pytest.fixture
def empty_cluster(cluster: list[RedisServer]) -> list[RedisServer]:
    for node in cluster:
        with node.client() as client:
            client.flushall()
    return cluster


def test_cluster_budget_is_divided(
    empty_cluster: list[RedisServer], open_redis: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MIN_BUCKET_BYTES", 1000)
    store = open_redis(empty_cluster[0].url, 64 * full_at(3, 500), cluster=True)
    names = [key(i) for i in range(800)]
    store.put(names[0], bytes(500))
    assert counted(store).entries is None  # not all buckets have reported yet
    for name in names[1:]:
        assert store.put(name, bytes(500))
    held = [entries(node) for node in empty_cluster]
    assert all(held) and sum(map(len, held)) == 64 * 3
    latest: dict[int, list[str]] = {}
    for name in names:
        latest.setdefault(store._bucket(name), []).append(name)
    assert store.contains(names) == [name in latest[store._bucket(name)][-3:] for name in names]
    found = counted(store)
    assert (found.entries, found.bytes, found.evictions) == (192, 64 * full_at(3, 500), 800 - 192)
    for bucket in range(64):
        assert_books_right(holder(empty_cluster, bucket), bucket)


def holder(servers: list[RedisServer], bucket: int) -> RedisServer:
    """Return the server that holds a bucket."""
    for server in servers:
        with server.client() as client:
            if client.keys(f"cuvee:{{{bucket}}}:sums"):
                return server
    raise AssertionError(f"bucket {bucket} is nowhere")


def test_cluster_follows_a_moved_slot(empty_cluster: list[RedisServer], open_redis: Open) -> None:
    store = open_redis(empty_cluster[0].url, 2 * 10**9, cluster=True)
    assert store.put(key(1), b"before")
    bucket = store._bucket(key(1))
    old = holder(empty_cluster, bucket)
    new = next(node for node in empty_cluster if node is not old)
    with old.client() as source, new.client() as target:
        slot = source.execute_command("CLUSTER", "KEYSLOT", f"cuvee:{{{bucket}}}:")
        owner = target.execute_command("CLUSTER", "MYID")
        moving = source.keys(f"cuvee:{{{bucket}}}:*")
        target.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", source.execute_command("CLUSTER", "MYID"))
        source.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", owner)
        source.execute_command("MIGRATE", "127.0.0.1", new.port, "", 0, 5000, "KEYS", *moving)
        # During the move, requests to the old node are errors, which the guard turns into misses.
        with pytest.raises(StoreError, match=r"(?i)ask"):
            store.get(key(1))
        for node in empty_cluster:
            with node.client() as client:
                client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", owner)
    assert store.get(key(1)) == b"before"
    errors = counted(store).errors
    assert store.put(key(1), b"after") and store.get(key(1)) == b"after"
    assert counted(store).errors == errors
    assert_books_right(new, bucket)


def test_cluster_with_a_node_down(open_redis: Open) -> None:
    names = [key(i) for i in range(60)]
    with redis_cluster() as servers, servers[0].client() as first, servers[1].client() as second:
        for server in servers:
            with server.client() as client:
                client.config_set("cluster-require-full-coverage", "no")
        store, idle = (open_redis(servers[0].url, cluster=True, timeout=1.0) for _ in range(2))
        for name in names:
            store.put(name, b"x")
        assert idle.get_many(names) == [b"x"] * 60
        servers[2].pause()
        with pytest.raises(StoreError, match="Timeout"):
            store.get_many(names)
        servers[2].kill()
        found: dict[str, bytes | None] = {}
        for name in names:
            with suppress(StoreError):
                found[name] = store.get(name)
        assert 0 < len(found) < 60 and set(found.values()) == {b"x"}

        # Another node takes over the slots, as a replica would. A store with outdated slots asks again, once.
        for client in (first, second):
            client.execute_command("CLUSTER", "DELSLOTSRANGE", *SLOTS_OF_THE_THIRD)
        first.execute_command("CLUSTER", "ADDSLOTSRANGE", *SLOTS_OF_THE_THIRD)
        first.execute_command("CLUSTER", "BUMPEPOCH")
        wait_until(lambda: len(second.execute_command("CLUSTER", "SLOTS")) == 3, "both know")
        assert idle.get_many(names) == [found.get(name) for name in names]
        assert counted(idle).errors == 0
    with pytest.raises(StoreError, match="redis store"):
        open_redis(servers[0].url, cluster=True, timeout=1.0).get(key(1))


def test_not_a_cluster(server: RedisServer, open_redis: Open) -> None:
    with pytest.raises(StoreError, match=r"(?i)cluster"):
        open_redis(server.url, cluster=True).get(key(1))


# Arguments


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"url": "http://host"}, "^url: "),
        ({"url": "localhost:6379"}, "^url: "),
        ({"url": "redis+cluster://h"}, "^url: "),
        ({"url": "unix:///run/redis.sock", "cluster": True}, "^url: "),
        ({"max_bytes": 0}, "^max_bytes: "),
        ({"max_bytes": 1_000_000_000, "cluster": True}, "^max_bytes: must be at least 1024000000.*64 buckets"),
        ({"ttl": 0}, "^ttl: "),
        ({"ttl": -1.0}, "^ttl: "),
        ({"ttl": 1.0, "refinement_ttl": 2.0}, "^refinement_ttl: must be at most ttl, 1.0 seconds"),
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
    with pytest.raises(ImportError, match=r"pip install cuvee\[redis\]"):
        importlib.import_module(module.__name__)


def test_missing_servers_skip_unless_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    for required, outcome in (("0", pytest.skip.Exception), ("1", pytest.fail.Exception)):
        monkeypatch.setenv("CUVEE_REQUIRE_REDIS", required)
        with pytest.raises(outcome, match="redis-server"):
            require_redis()


def test_nothing_is_logged_when_all_is_well(
    server: RedisServer, open_redis: Open, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "cuvee"):
        store = open_redis(server.url, 10**6)
        store.put(key(1), b"x")
        store.get_many([key(1), key(2)])
        store.delete_tenant("ab")
    assert not caplog.records
