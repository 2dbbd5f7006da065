"""The contract of stores, tested on RAM, a folder, Redis, S3 and tiers of them; and `MemoryStore`."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from tests.integrations.stores.redis_server import RedisServer, redis_server

from cuvee.codec.errors import InputError
from cuvee.integrations.core.chunk_io import delete_parts, get_parts, put_parts
from cuvee.integrations.stores.base import Store
from cuvee.integrations.stores.counted import CountedStore
from cuvee.integrations.stores.disk import DiskStore
from cuvee.integrations.stores.envelope import HEADER_BYTES, seal
from cuvee.integrations.stores.memory import MemoryStore
from cuvee.integrations.stores.tiered import TieredStore
from cuvee.naming.part_keys import part_key

# Fixtures that return an empty store with a budget that no test reaches.
STORES = ["memory_store", "disk_store", "redis_store", "object_store", "tiered_store"]


# Opens a store at a place, and writes the bytes of an entry there past all stores.
Place = tuple[Callable[..., CountedStore], Callable[[str, bytes], object]]


@pytest.fixture
def memory_store() -> MemoryStore:
    return MemoryStore(10**9)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with redis_server("--maxmemory", "200mb", "--maxmemory-policy", "allkeys-lru") as server:
        yield server


@pytest.fixture
def on_disk(tmp_path: Path) -> Place:
    def plant(key: str, data: bytes) -> None:
        tenant, _, name = key.partition("/")
        (tmp_path / "store" / tenant / name[:2]).mkdir(parents=True, exist_ok=True)
        (tmp_path / "store" / tenant / name[:2] / name).write_bytes(data)

    return lambda **named: DiskStore(tmp_path / "store", **named), plant


@pytest.fixture
def on_redis(server: RedisServer) -> Iterator[Place]:
    from cuvee.integrations.stores.redis import RedisStore

    with server.client() as client:
        client.flushall()
        plant = lambda key, data: client.set(f"cuvee:{key}", data)  # noqa: E731
        yield lambda **named: RedisStore(server.url, timeout=10.0, **named), plant


@pytest.fixture
def on_s3(s3_url: str) -> Place:
    import obstore

    from cuvee.integrations.stores.objects import ObjectStore, connect

    place = connect(s3_url)

    def plant(key: str, data: bytes) -> None:
        tenant, _, name = key.partition("/")
        obstore.put(place, f"{tenant}/{name[:2]}/{name}", data)

    return lambda **named: ObjectStore(s3_url, **named), plant


@pytest.fixture
def disk_store(on_disk: Place) -> Store:
    return on_disk[0](max_bytes=10**9, ttl=3600.0)


@pytest.fixture
def redis_store(on_redis: Place) -> Store:
    return on_redis[0](ttl=3600.0)


@pytest.fixture
def object_store(on_s3: Place) -> Store:
    return on_s3[0](ttl=3600.0)


@pytest.fixture
def tiered_store(tmp_path: Path) -> TieredStore:
    return TieredStore([MemoryStore(10**9), DiskStore(tmp_path / "tier", max_bytes=10**9)])


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    made: Store = request.getfixturevalue(request.param)
    yield made
    made.close()


@pytest.fixture(params=["on_disk", "on_redis", "on_s3"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """A place that several stores share."""
    make, plant = request.getfixturevalue(request.param)
    with ExitStack() as stack:
        yield lambda **named: stack.enter_context(closing(make(**named))), plant


def first(store: Store) -> str:
    """Return the name of the tier that answers first."""
    return next(iter(store.counters()))


def test_a_blob_comes_back_as_it_was_put_last(store: Store) -> None:
    assert store.get("ab/01") is None
    for size in (4096, 1_000_003, 1, 63):
        blob = random.Random(size).randbytes(size)
        assert store.put("ab/01", blob) is True and store.flush(10)
        got = store.get("ab/01")
        assert type(got) is bytes and got == blob


def test_longest_and_shortest_keys(store: Store) -> None:
    keys = ["0/0", "f" * 64 + "/" + "0" * 128, "0/" + "0" * 128, "0/00", "00/0"]
    for key in keys:
        assert store.put(key, key.encode())
    assert store.get_many(keys) == [key.encode() for key in keys]


def test_get_many_and_contains_answer_in_order(store: Store) -> None:
    for name in "135":
        store.put(f"ab/{name}", name.encode())
    keys = ["ab/5", "ab/2", "ab/1", "ab/5", "cd/1"]
    assert store.get_many(keys) == [b"5", None, b"1", b"5", None]
    assert store.contains(keys) == [True, False, True, True, False]
    assert store.get_many([]) == [] and store.contains([]) == []


def test_counters(store: Store) -> None:
    store.put("ab/1", b"12345")
    store.put("ab/2", b"123")
    assert store.contains(["ab/1", "ab/3"]) == [True, False], "which counts nothing"
    store.missed(1)
    store.get("ab/1")
    store.get("ab/1")
    store.get("ab/3")
    assert store.flush(10)
    counters = store.counters()
    assert isinstance(store, TieredStore) or list(counters) == [store.name]
    now = counters[first(store)]
    assert (now.puts, now.put_bytes, now.hits, now.hit_bytes, now.misses) == (2, 8, 2, 10, 2)
    assert (now.evictions, now.expired, now.corrupt, now.errors, now.dropped) == (0, 0, 0, 0, 0)
    assert now.entries in (2, None)
    now.puts = 99
    assert store.counters()[first(store)].puts == 2, "a snapshot"


def test_delete(store: Store) -> None:
    store.put("ab/1", b"1")
    store.put("ab/2", b"2")
    assert store.delete("ab/1") is True
    assert store.flush(10) and store.delete("ab/1") is False
    assert store.get_many(["ab/1", "ab/2"]) == [None, b"2"]


def test_delete_tenant_takes_all_of_one_and_nothing_of_another(store: Store) -> None:
    kept = ["a/1", "abc/1", "b/ab", "ba/1"]
    gone = [f"ab/{name:02x}{name}" for name in range(20)]
    for key in kept + gone:
        store.put(key, b"x")
    assert store.flush(10)
    assert store.delete_tenant("ab") == len(gone) * (2 if isinstance(store, TieredStore) else 1)
    assert store.delete_tenant("ab") == 0
    assert store.contains(kept) == [True] * len(kept)
    assert store.contains(gone) == [False] * len(gone)
    assert store.put("ab/1", b"again") and store.get("ab/1") == b"again"


def test_the_keys_of_a_tenant_are_listed(store: Store) -> None:
    assert list(store.keys("ab")) == []
    keys = {"ab/01", "ab/0102", "ab/ff", f"ab/{'0' * 128}"}
    for key in keys | {"abc/01", "a/b0", "cd/01"}:
        store.put(key, b"blob")
    assert store.flush(10) and sorted(store.keys("ab")) == sorted(keys)
    with pytest.raises(InputError, match="tenant: must be"):
        list(store.keys("*"))


def test_keys_are_checked(store: Store) -> None:
    actions: list[Callable[[str], object]] = [
        store.get, lambda key: store.put(key, b"x"), lambda key: store.contains(["ab/1", key]), store.delete,
        lambda key: store.delete_tenant(key + "/"),
    ]  # fmt: skip
    for key in ("", "ab", "ab/", "/ab", "AB/1", "ab/1/2", "../ab", "ab/..", "a" * 65 + "/1", "ab/1\n"):
        for action in actions:
            with pytest.raises(InputError, match=r"^(key|tenant): "):
                action(key)


def test_threads_put_get_and_delete_the_same_keys(store: Store) -> None:
    """A get returns one complete blob that was put under that key, or None."""
    keys = [f"{tenant}/{name:02x}" for tenant in ("aa", "bb") for name in range(4)]
    start = threading.Barrier(6)

    def work(seed: int) -> None:
        random_ = random.Random(seed)
        start.wait()
        for _ in range(120):
            key, action = random_.choice(keys), random_.random()
            if action < 0.45:
                assert store.put(key, key.encode() * random_.randint(1, 3000))
            elif action < 0.9:
                blob = store.get(key)
                assert blob is None or blob == key.encode() * (len(blob) // len(key)), f"{key}: {blob[:40]!r}"
            elif action < 0.98:
                store.delete(key)
            else:
                store.delete_tenant(key[:2])

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    assert store.counters()[first(store)].corrupt == 0
    store.put("aa/00", b"at last")
    assert store.get("aa/00") == b"at last"
    assert store.contains(keys) == [blob is not None for blob in store.get_many(keys)]


def test_close_twice(store: Store) -> None:
    store.put("ab/1", b"1")
    assert store.flush() is True
    store.close()
    store.close()
    assert store.counters()[first(store)].puts == 1, "the counts outlive the store"


# --- what lies in a place that others may write to ---

KEY, OTHER = "ab/0123", "ab/4567"


def bad_entries(entry: bytes) -> dict[str, bytes]:
    huge = seal(KEY, b"", 0.0)
    return {
        "garbage": b"garbage",
        "half a header": entry[: HEADER_BYTES // 2],
        "truncated": entry[:-1],
        "too long": entry + b"x",
        "bit flipped": entry[:-1] + bytes([entry[-1] ^ 1]),
        "huge length": huge[:16] + (1 << 60).to_bytes(8, "little") + huge[24:],
        "zeros": bytes(len(entry)),
        "another key's": seal(OTHER, b"payload", time.time()),
    }


@pytest.mark.parametrize("kind", bad_entries(b"payload"))
def test_a_bad_entry_is_a_counted_miss_and_deleted(place: Place, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    make, plant = place
    store = make()
    store.put(OTHER, b"good")
    plant(KEY, bad_entries(seal(KEY, b"payload" * 100, time.time()))[kind])
    assert store.get_many([KEY, OTHER]) == [None, b"good"] and store.contains([KEY]) == [False]
    plant(KEY, b"bad again")
    problem = "entry: belongs to another key" if kind == "another key's" else "entry: "
    assert store.why_missing(KEY).startswith(f"was bad, and is deleted: {problem}") and store.why_missing(OTHER) == ""
    assert store.get(KEY) is None
    now = store.counters()[store.name]
    assert (now.corrupt, now.misses, now.hits, now.expired, now.errors) == (2, 2, 1, 0, 0)
    assert caplog.text.count("deletes bad entries") == 1
    assert store.put(KEY, b"new") and store.get(KEY) == b"new" and store.why_missing(KEY) == ""


def test_few_reasons_are_kept(on_disk: Place) -> None:
    make, plant = on_disk
    with closing(make()) as store:
        keys = [f"ab/{number:04x}" for number in range(300)]
        for key in keys:
            plant(key, b"bad")
        store.get_many(keys)
        assert not store.why_missing(keys[0]) and store.why_missing(keys[-1]) and len(store._useless) == 256


def test_entries_expire_by_the_time_of_writing(place: Place) -> None:
    make, plant = place
    store = make(ttl=60.0)
    for key, written in ((KEY, time.time() - 61), (OTHER, time.time() - 50)):
        plant(key, seal(key, b"x", written))
    assert make().contains([KEY, OTHER]) == [True, True], "without a ttl nothing expires"
    assert store.get_many([KEY, OTHER]) == [None, b"x"] and store.contains([KEY, OTHER]) == [False, True]
    assert store.why_missing(KEY).startswith("has expired, and is deleted: entry: older than")
    now = store.counters()[store.name]
    assert (now.expired, now.corrupt, now.misses) == (1, 0, 1)


def test_entries_have_a_largest_size(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    make, _ = place
    large, store = make(), make()
    store.max_entry = 1000
    assert large.put(KEY, bytes(1001)) and large.put(OTHER, bytes(1000))
    assert store.get_many([KEY, OTHER, KEY]) == [None, bytes(1000), None]
    assert store.why_missing(KEY) == "has more than the 1000 bytes that are read"
    assert store.contains([KEY, OTHER]) == [False, True], "so that a smaller one can replace it"
    assert large.get(KEY) == bytes(1001), "it stays"
    assert not store.put(KEY, bytes(1001))
    now = store.counters()[store.name]
    assert (now.misses, now.errors, now.corrupt, now.dropped) == (2, 2, 0, 1)
    assert caplog.text.count("more than the 1000 bytes") == 1
    assert "drops entries that are too large; the first has 1001 bytes" in caplog.text
    assert store.put(KEY, b"small") and store.get(KEY) == b"small"


# --- parts ---

PARTS = [b"base", b"refinement"]


def test_parts_are_entries_of_their_own(store: Store) -> None:
    assert put_parts(store, "ab/01", PARTS) == 2 and put_parts(store, "ab/02", PARTS[:1]) == 1
    assert store.get("ab/01") == b"base" and store.contains(["ab/01", "ab/02"]) == [True, True]
    keys = ["ab/02", "ab/01", "ab/03", "ab/01"]
    assert get_parts(store, keys, 2) == [(b"base",), tuple(PARTS), (), tuple(PARTS)]
    assert get_parts(store, ["ab/01"], 1) == [(b"base",)] and get_parts(store, [], 2) == []
    assert delete_parts(store, "ab/01", 1) and get_parts(store, ["ab/01"], 2) == [(b"base",)]
    assert delete_parts(store, "ab/01", 0) and not delete_parts(store, "ab/01", 0)
    assert store.contains([part_key("ab/01", number) for number in range(2)]) == [False] * 2
    assert put_parts(store, "ab/04", PARTS) == 2 and store.flush(10)
    assert store.delete_tenant("ab") == 3 * (2 if isinstance(store, TieredStore) else 1)


@pytest.mark.parametrize(("lost", "left"), [(0, 0), (1, 1)])
def test_a_missing_part_ends_the_usable_ones(store: Store, lost: int, left: int) -> None:
    put_parts(store, "ab/01", PARTS)
    assert store.delete(part_key("ab/01", lost))
    assert get_parts(store, ["ab/01"], 2) == [tuple(PARTS[:left])]
    assert delete_parts(store, "ab/01", 0) is True, "what is left of them"


def test_parts_after_one_that_was_given_up_are_not_stored(tmp_path: Path) -> None:
    for store in (MemoryStore(10**6), DiskStore(tmp_path / "small")):
        store.max_entry = 10
        for at, kept in ((0, 0), (1, 1)):
            parts = [b"part"] * 2
            parts[at] = bytes(11)
            assert put_parts(store, f"ab/0{at}", parts) == kept
            assert store.contains([part_key(f"ab/0{at}", number) for number in range(2)]) == [
                number < kept for number in range(2)
            ]


# --- RAM ---


def test_memory_evicts_by_bytes_what_was_not_used_for_longest() -> None:
    store = MemoryStore(3 * (len("ab/1") + 100))
    for name in "123":
        store.put(f"ab/{name}", bytes(100))
    store.get("ab/1")
    store.contains(["ab/2"])
    store.put("ab/4", bytes(100))
    assert store.contains([f"ab/{name}" for name in "1234"]) == [True, False, True, True], "contains is no use"
    store.put("ab/5", bytes(101))
    assert store.contains([f"ab/{name}" for name in "1345"]) == [False, False, True, True], "one byte too many"
    now = store.counters()["memory"]
    assert (now.evictions, now.entries, now.bytes) == (3, 2, 8 + 201)


def test_memory_counts_keys_and_replacements() -> None:
    store = MemoryStore(1000)
    for size in (900, 10, 900, 30):
        store.put("ab/1", bytes(size))
    now = store.counters()["memory"]
    assert (now.bytes, now.entries, now.evictions) == (34, 1, 0)
    store.delete("ab/1")
    store.put("cd/1", b"x")
    store.delete_tenant("cd")
    assert store.counters()["memory"].bytes == 0


def test_memory_drops_what_is_larger_than_the_budget() -> None:
    store = MemoryStore(100)
    assert store.put("ab/1", bytes(96)) is True
    assert store.put("ab/2", bytes(97)) is False
    assert store.put("ab/1", bytes(97)) is False
    assert store.get("ab/1") == bytes(96), "what was there stays"
    now = store.counters()["memory"]
    assert (now.dropped, now.evictions, now.entries) == (2, 0, 1)
    for budget in (0, -1):
        with pytest.raises(InputError, match=r"^max_bytes: must be a positive number"):
            MemoryStore(budget)


def test_memory_keeps_blobs_by_reference_but_not_buffers_that_may_change() -> None:
    store = MemoryStore(1000)
    blob = bytes(range(100))
    store.put("ab/1", blob)
    assert store.get("ab/1") is blob
    buffer = bytearray(b"abc")
    store.put("ab/2", buffer)  # type: ignore[arg-type]
    buffer[0] = 0
    assert store.get("ab/2") == b"abc"


def test_memory_holds_nothing_once_it_is_closed() -> None:
    store = MemoryStore(1000)
    store.put("ab/1", b"x")
    store.close()
    assert store.get("ab/1") is None and not store.put("ab/1", b"y") and store.counters()["memory"].bytes == 0
