"""Records of identities in stores: each kind keeps them, none counts or evicts them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.integrations.stores.redis_server import redis_server

from cuvee.integrations.identity.records import MOST_RECORDS, IdentityRecord, RecordStore
from cuvee.integrations.stores.base import RECORDS, Store, StoreError
from cuvee.integrations.stores.disk import DiskStore
from cuvee.integrations.stores.memory import MemoryStore
from cuvee.integrations.stores.tiered import TieredStore
from cuvee.integrations.stores.urls import open_store
from cuvee.naming.identity import store_key


def record(dtype: str = "bfloat16") -> IdentityRecord:
    return IdentityRecord({"weights": "aa", "dtype": dtype})


def key(number: int) -> str:
    return store_key("somebody", hashlib.sha256(number.to_bytes(8)).digest())


@pytest.fixture(params=["disk", "redis", "object", "tiered"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    folder = f"file://{tmp_path}/kv?max_gb=0.00002"
    if request.param == "redis":
        with redis_server() as server:
            opened = open_store(f"{server.url}?timeout=60")
            yield opened
            opened.close()
        return
    url: Callable[[], str] = {
        "disk": lambda: folder,
        "object": lambda: request.getfixturevalue("s3_url"),
        "tiered": lambda: f"tiered:memory://?max_gb=0.01,{folder}",
    }[request.param]
    opened = open_store(url())
    yield opened
    opened.close()


def test_records_are_read_counted_and_bounded_in_every_store(store: Store) -> None:
    records = RecordStore(store)
    one, two = record(), record("float16")
    for number in range(4):
        store.put(key(number), b"x")
        (one if number else two).sample.add(key(number))
    records.write(one)
    records.write(two)
    store.flush()
    found, problems = records.read()
    assert not problems and {each.id: each.fields for each in found} == {each.id: each.fields for each in (one, two)}
    assert {each.id: records.count(each) for each in found} == {one.id: 3, two.id: 1}
    figures = [tier for name, tier in store.counters().items() if name != "memory"]
    assert all((tier.hits, tier.puts) == (0, 4) for tier in figures)
    store.delete(key(0))
    assert {each.id: records.count(each) for each in records.read()[0]} == {one.id: 3, two.id: 0}
    assert records.prune() == 1 and [each.id for each in records.read()[0]] == [one.id]
    for number in range(MOST_RECORDS + 3):
        records.write(record(f"dtype{number}"), records.read()[0])
    left = {each.id for each in records.read()[0]}
    assert len(left) == MOST_RECORDS and one.id not in left


def test_a_folder_neither_counts_nor_evicts_records(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "kv", max_bytes=20_000)
    RecordStore(store).write(record())
    assert store.count() == (0, 0) and store.counters()["disk"].entries in (0, None)
    for number in range(64):
        store.put(key(number), bytes(1000))
        store.flush()
    assert store.counters()["disk"].evictions > 0
    entries, held = store.count()
    assert held <= 20_000 and (store.counters()["disk"].entries, store.counters()["disk"].bytes) == (entries, held)
    (left,), _ = RecordStore(store).read()
    assert left.id == record().id
    RecordStore(store).delete(left)
    assert (store.counters()["disk"].entries, store.counters()["disk"].bytes) == (entries, held)
    store.close()


def test_hostile_records_cost_no_more_than_a_line_each(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "kv")
    good = record()
    RecordStore(store).write(good)
    for number in range(1000):
        store.put(f"{RECORDS}/{number:032x}", b"{}")
    found, problems = RecordStore(store).read()
    assert len(found) <= 1 and 0 < len(problems) <= 4 * MOST_RECORDS and all("\n" not in line for line in problems)
    store.close()


def test_a_store_of_one_process_has_no_records() -> None:
    memory = MemoryStore(10**6)
    assert not RecordStore(memory).shared
    both = TieredStore([memory, MemoryStore(10**6)])
    RecordStore(both).write(record())
    assert RecordStore(both).read() == ([], []) and not list(memory.keys(RECORDS))
    both.close()


def test_a_tier_that_is_down_leaves_the_records_of_others(tmp_path: Path) -> None:
    down = "redis://127.0.0.1:1/0?timeout=0.2"
    store = open_store([f"file://{tmp_path}/kv", down])
    one, records = record(), RecordStore(store)
    store.put(key(0), b"x")
    one.sample.add(key(0))
    found, problems = records.read()
    assert not found and len(problems) == 1 and problems[0].startswith("redis store redis://127.0.0.1:1/0")
    records.write(one)
    (left,), _ = records.read()
    assert left.id == one.id and records.count(left) == 1
    store.close()
    with pytest.raises(StoreError):
        RecordStore(open_store(down)).read()
