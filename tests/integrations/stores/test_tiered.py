"""`TieredStore`: lookup, promotion, write-behind, and deletions that last."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from tests.integrations.stores.dict_store import FakeStore, Held
from tests.waiting import PATIENCE, wait_until

from cuvee.codec.errors import InputError
from cuvee.integrations.stores import tiered
from cuvee.integrations.stores.base import StoreError
from cuvee.integrations.stores.breaker import GuardedStore
from cuvee.integrations.stores.memory import MemoryStore
from cuvee.integrations.stores.tiered import TieredStore

A, B, C = "aa/01", "aa/02", "bb/03"


class Three:
    """Three fake tiers; the test can block `low` and `deep` by gates."""

    def __init__(self) -> None:
        self.top, self.low, self.deep = FakeStore("top"), FakeStore("low"), FakeStore("deep", shared=True)
        self.store = TieredStore([self.top, self.low, self.deep])

    def block(self, store: FakeStore, call: str = "put") -> Held:
        gate = store.before_call[call] = Held()
        return gate

    def idle(self) -> None:
        assert self.store.flush(PATIENCE)

    def deep_is_idle(self) -> bool:
        return self.store.counters()["deep"].queued == 0


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> Iterator[Three]:
    """One put in flight per tier, so that those behind it wait."""
    with monkeypatch.context() as patch:
        patch.setattr(tiered, "WRITERS", 1)
        tiers = Three()
    yield tiers
    for fake in (tiers.top, tiers.low, tiers.deep):
        for hook in (*fake.before_call.values(), *fake.after_call.values()):
            if isinstance(hook, Held):
                hook.set()
    tiers.store.close()


def within(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def join(thread: threading.Thread) -> None:
    thread.join(PATIENCE)
    assert not thread.is_alive()


# --- lookup and promotion ---


def test_keys_are_located_without_asking_the_last_tier(three: Three) -> None:
    three.top.entries[A] = three.low.entries[B] = three.low.entries[A] = b"x"
    assert three.store.locate([A, B, C, A]) == ["top", "low", "deep", "top"]
    assert three.deep.calls == [] and three.low.asked("contains") == [(B, C)]
    gate = three.block(three.low)
    three.top.refuse = True
    three.store.put(C, b"c")
    gate.reached()
    assert three.store.locate([C]) == ["low"], "it is read from that tier's queue"
    counters = three.store.counters()
    assert not any(counters[name].misses or counters[name].hits for name in ("top", "low", "deep"))


def test_a_key_is_a_miss_where_no_tier_has_it() -> None:
    """A lookup counts it once in every tier. What some tier has is read: then the tiers before it miss it."""
    small, large = MemoryStore(1000), MemoryStore(1000)
    store = TieredStore([small, large])
    large.put(B, b"b")
    assert store.contains([A, B, C]) == [False, True, False]
    store.missed(2)
    assert [tier.misses for tier in store.counters().values()] == [2, 2]
    assert store.get_many([A, B]) == [None, b"b"] and store.flush(PATIENCE)
    assert [(tier.misses, tier.hits) for tier in store.counters().values()] == [(4, 0), (3, 1)]
    store.close()


def test_a_hit_below_is_promoted_and_no_reader_waits_for_that(three: Three) -> None:
    three.low.entries[A], three.deep.entries[B] = b"a", b"b"
    gates = [three.block(three.top), three.block(three.low)]
    assert three.store.get_many([A, B]) == [b"a", b"b"]
    gates[0].reached()
    assert three.store.get_many([A, B]) == [b"a", b"b"] and len(three.low.asked("get_many")) == 1, "from the queue"
    for gate in gates:
        gate.set()
    three.idle()
    assert three.top.entries == three.low.entries == {A: b"a", B: b"b"}
    assert three.low.asked("put") == [(B,)] and three.deep.asked("put") == []
    assert three.store.get_many([A, B]) == [b"a", b"b"] and len(three.deep.asked("get_many")) == 1


def raising(error: Exception) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


def test_a_tier_that_fails_shows_through(three: Three) -> None:
    three.low.before_call["get_many"] = three.low.before_call["contains"] = raising(StoreError("down"))
    three.top.entries[A] = b"a"
    assert three.store.get(A) == b"a" and three.store.contains([A]) == [True]
    with pytest.raises(StoreError):
        three.store.get(B)
    with pytest.raises(StoreError):
        three.store.contains([B])
    guarded = TieredStore([MemoryStore(100), GuardedStore(three.low), three.deep])
    three.deep.entries[B] = b"b"
    assert guarded.get(B) == b"b"
    guarded.close()


# --- write-behind ---


def test_a_put_does_not_wait_for_lower_tiers(three: Three) -> None:
    gates = [three.block(three.low), three.block(three.deep)]
    assert three.store.put(A, b"a") and three.store.put(B, b"b")
    assert three.top.entries == {A: b"a", B: b"b"} and not three.low.entries and not three.deep.entries
    for gate in gates:
        gate.reached()
    counters = three.store.counters()
    assert [counters[name].queued for name in ("top", "low", "deep")] == [0, 2, 2]
    gates[1].set()
    assert not three.store.flush(0)
    gates[0].set()
    three.idle()
    assert three.low.entries == three.deep.entries == three.top.entries
    assert three.low.asked("put") == [(A,), (B,)]
    assert three.store.counters()["low"].queued == 0


def test_every_tier_is_flushed_though_the_first_is_not_in_time(three: Three) -> None:
    """Also those behind it: each may have put off writes of its own."""
    assert three.store.put(A, b"x") and three.store.flush(PATIENCE), "what is queued has been written"
    assert all(A in tier.entries for tier in (three.top, three.low, three.deep))
    three.top.flushed = False
    assert not three.store.flush(PATIENCE)
    assert [len(tier.asked("flush")) for tier in (three.top, three.low, three.deep)] == [2] * 3


def test_what_is_queued_is_found(three: Three) -> None:
    gate = three.block(three.low)
    three.store.put(A, b"a")
    gate.reached()
    three.store.put(B, b"bb")
    three.top.entries.clear()  # evicted; A is being written, B waits
    assert three.store.contains([A, B, C]) == [True, True, False]
    assert three.low.asked("contains") == [(C,)]
    assert three.store.get_many([A, C, B]) == [b"a", None, b"bb"]
    assert three.low.asked("get_many") == [(C,)]
    wait_until(lambda: three.top.entries == {A: b"a", B: b"bb"}, "the promotion")
    counters = three.store.counters()
    assert (counters["low"].hits, counters["low"].hit_bytes) == (2, 3)
    assert three.store.contains([A, B]) == [True, True] and three.store.counters()["low"].hits == 2


def test_a_newer_put_replaces_the_one_that_waits(three: Three, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiered, "QUEUE_BYTES", 10)
    gate = three.block(three.low)
    three.store.put(C, b"c" * 3)
    gate.reached()
    for byte in b"xyz":
        three.store.put(A, bytes([byte]) * 7)  # each would be too large beside another
    three.store.put(C, b"")
    three.top.entries.clear()
    assert three.store.get_many([A, C]) == [b"z" * 7, b""]
    gate.set()
    three.store.close()
    assert sorted(three.low.asked("put")) == [(A,), (C,), (C,)] and three.low.entries == {A: b"z" * 7, C: b""}
    assert three.store.counters()["low"].dropped == 0


def test_a_full_queue_drops_for_its_tier_only(
    three: Three, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiered, "QUEUE_BYTES", 10)
    gate = three.block(three.low)
    assert three.store.put(A, b"a" * 6)
    gate.reached()
    wait_until(three.deep_is_idle, "the copies")
    for _ in range(3):
        assert three.store.put(B, b"b" * 5)  # one byte too many beside the entry that is being written
        wait_until(three.deep_is_idle, "the copies")
    assert three.store.put(C, b"c" * 4)
    wait_until(three.deep_is_idle, "the copies")
    three.top.refuse = True
    assert not three.store.put("cc/05", b"e" * 11)  # too large for any queue
    gate.set()
    three.idle()
    assert three.store.put(B, b"b" * 10)  # tier 0 refuses, but there is room in the queues again
    three.store.close()
    assert three.low.entries == {A: b"a" * 6, C: b"c" * 4, B: b"b" * 10}
    assert set(three.deep.entries) == {A, B, C}
    counters = three.store.counters()
    assert [counters[name].dropped for name in ("top", "low", "deep")] == [0, 4, 1]
    low, deep = (message for message in caplog.messages if "is full" in message)  # once a tier
    assert "tier 1 (low): the write-behind queue is full (10 bytes)" in low
    assert "tier 2 (deep)" in deep


@pytest.mark.parametrize("error", [StoreError("down"), RuntimeError("down")], ids=lambda error: type(error).__name__)
def test_a_failing_write_stops_nothing(three: Three, caplog: pytest.LogCaptureFixture, error: Exception) -> None:
    three.low.before_call["put"] = raising(error)
    assert three.store.put(A, b"a") and three.store.put(B, b"b")
    three.idle()
    # A store itself counts the StoreErrors that it raises.
    assert three.store.counters()["low"].errors == (2 if isinstance(error, RuntimeError) else 0)
    assert caplog.messages == ["cuvee tier 1 (low): a copy was not written: down (logged once)"]
    del three.low.before_call["put"]
    three.low.refuse = True
    assert three.store.put(C, b"c")
    three.idle()
    three.low.refuse = False
    assert three.store.put(C, b"c")
    three.idle()
    assert three.low.entries == {C: b"c"} and set(three.deep.entries) == {A, B, C}


def test_without_a_thread_nothing_is_queued(three: Three, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda thread: raising(RuntimeError("can't start new thread"))())
        assert three.store.put(A, b"a") and three.store.put(B, b"b")
    counters = three.store.counters()
    assert (counters["low"].dropped, counters["low"].queued) == (2, 0) and three.store.flush(0)
    assert three.store.put(C, b"c")
    three.idle()
    assert three.low.entries == {C: b"c"}


# --- deleting ---


def test_a_flush_ends_with_the_deletion_of_what_it_waits_for(three: Three) -> None:
    busy = Held()
    three.store._tiers[1]._threads.submit(busy)
    busy.reached()
    three.store.put(A, b"a")
    flusher = within(three.store.flush)
    flusher.join(0.1)
    assert flusher.is_alive() and three.store.delete(A)
    join(flusher)
    busy.set()


@pytest.mark.parametrize("tenant", [False, True])
def test_a_deletion_waits_for_what_is_being_written(three: Three, tenant: bool) -> None:
    """All copies are gone when it returns; a later put stays."""
    gate = three.block(three.low)
    three.store.put(A, b"a")
    gate.reached()
    three.store.put(B, b"b")
    three.store.put(C, b"c")
    counts: list[int] = []
    thread = within(lambda: counts.append(three.store.delete_tenant("aa") if tenant else three.store.delete(A)))
    thread.join(0.1)
    assert A in three.top.entries and not counts and not three.low.asked("delete_tenant" if tenant else "delete")
    gate.set()
    join(thread)
    three.idle()
    kept = {C: b"c"} if tenant else {B: b"b", C: b"c"}
    assert three.top.entries == three.low.entries == kept and kept.items() <= three.deep.entries.items()
    assert A not in three.deep.entries and counts[0] >= 1
    three.store.put(A, b"new")
    three.idle()
    assert three.top.entries[A] == three.low.entries[A] == three.deep.entries[A] == b"new"


def test_a_deletion_that_fails_in_one_tier_goes_on_in_the_others(three: Three) -> None:
    three.store.put(A, b"a")
    three.idle()
    three.top.before_call["delete"] = raising(StoreError("first"))
    three.low.before_call["delete"] = raising(StoreError("second"))
    with pytest.raises(StoreError, match="first"):
        three.store.delete(A)
    assert three.deep.entries == {}
    # Later gets may promote again.
    three.deep.entries[B] = b"b"
    assert three.store.get(B) == b"b"
    three.idle()
    assert B in three.top.entries


@pytest.mark.parametrize(("tenant", "ended"), [(False, False), (True, True)])
def test_nothing_is_promoted_that_was_read_before_a_deletion_ended(three: Three, ended: bool, tenant: bool) -> None:
    three.deep.entries[A] = b"a"
    reading = three.deep.after_call["get_many"] = Held()
    got: list[bytes | None] = []
    getter = within(lambda: got.append(three.store.get(A)))
    reading.reached()  # it has read the entry, but not promoted it yet

    def delete() -> None:
        _ = three.store.delete_tenant("aa") if tenant else three.store.delete(A)

    if ended:
        delete()
    else:
        # The get ends when the deletion has finished the upper tiers and is about to begin with the lowest.
        deleting = three.block(three.deep, "delete_tenant" if tenant else "delete")
        deleter = within(delete)
        deleting.reached()
    reading.set()
    join(getter)
    if not ended:
        deleting.set()
        join(deleter)
    three.idle()
    assert got == [b"a"]  # the entry existed when it was requested
    assert three.top.entries == three.low.entries == three.deep.entries == {}
    assert three.store.get(A) is None


def test_a_put_is_not_replaced_by_an_older_promotion(three: Three) -> None:
    three.low.entries.update({A: b"old", B: b"old"})
    gate = three.block(three.top)
    assert three.store.get_many([A, B]) == [b"old", b"old"]
    gate.reached()
    three.top.before_call.clear()
    putter = within(lambda: [three.store.put(key, b"new") for key in (B, A)])
    putter.join(0.2)
    assert putter.is_alive(), "the first promotion has to be written before"
    gate.set()
    join(putter)
    three.idle()
    assert three.top.entries == three.low.entries == {A: b"new", B: b"new"}


def test_several_puts_of_a_tier_are_in_flight_but_one_of_a_key() -> None:
    """Eight, each of which may wait for a network; the rest waits. A key that is put again is written once more."""
    tiers = Three()
    gate = tiers.block(tiers.low)
    keys = [f"ab/{number:02x}" for number in range(11)]
    for key in keys:
        assert tiers.store.put(key, b"first")
    wait_until(lambda: len(tiers.low.asked("put")) == 8, "all threads write")
    assert tiers.store.put(keys[0], b"second")
    assert tiers.store.get(keys[0]) == b"second" and tiers.store.counters()["low"].queued == len(keys) + 1
    gate.set()
    tiers.idle()
    assert tiers.low.entries == {**dict.fromkeys(keys, b"first"), keys[0]: b"second"}
    assert sorted(tiers.low.asked("put")) == sorted([*((key,) for key in keys), (keys[0],)])
    tiers.store.close()


def test_a_key_that_was_withdrawn_and_put_again_has_one_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two jobs wait for a thread then; the second leaves the key to the thread that is writing it."""
    monkeypatch.setattr(tiered, "WRITERS", 2)
    tiers = Three()
    busy = []
    for key in (B, C):
        busy.append(tiers.block(tiers.low))
        tiers.store.put(key, b"x")
        busy[-1].reached()
    tiers.store.put(A, b"first")
    tiers.store.delete(A)
    tiers.store.put(A, b"second")
    writing = tiers.block(tiers.low)
    busy[0].set()
    writing.reached()
    tiers.store.put(A, b"third")
    tiers.low.before_call.clear()
    busy[1].set()
    wait_until(lambda: C in tiers.low.entries, "the other thread is free")
    time.sleep(0.1)
    assert tiers.low.asked("put").count((A,)) == 1
    writing.set()
    tiers.idle()
    assert tiers.low.entries[A] == b"third"
    tiers.store.close()


def test_every_tier_hears_what_is_overdue() -> None:
    heard: list[tuple[str, float]] = []
    fakes = [FakeStore("a"), FakeStore("b")]
    for fake in fakes:
        fake.report_overdue = lambda operation, seconds: heard.append((operation, seconds))  # type: ignore[method-assign]
    store = TieredStore(fakes)
    store.report_overdue("contains", 2.0)
    assert heard == [("contains", 2.0)] * 2
    store.close()


def test_close_drains(three: Three, caplog: pytest.LogCaptureFixture) -> None:
    gate = three.block(three.low)
    three.store.put(A, b"a")
    three.store.put(B, b"b")
    gate.reached()
    closer = within(three.store.close)
    assert three.low.asked("close") == []
    gate.set()
    join(closer)
    assert set(three.low.entries) == {A, B} and three.low.asked("close") and caplog.messages == []
    three.store.put(C, b"c")
    assert C not in three.low.entries and three.store.counters()["low"].dropped == 1 and caplog.messages == []


def test_close_gives_up_in_time_and_says_what_is_lost(three: Three, caplog: pytest.LogCaptureFixture) -> None:
    """The tiers behind the one that hangs get their entries all the same."""
    gate = three.block(three.low)
    three.store.put(A, b"a")
    gate.reached()
    three.store.put(B, b"bbb")
    three.store.put(C, b"cc")
    wait_until(three.deep_is_idle, "the copies")
    three.store.close(timeout=0.1)
    assert all(fake.asked("close") for fake in (three.top, three.low, three.deep))
    assert set(three.deep.entries) == {A, B, C}
    (message,) = caplog.messages
    assert "tier 1 (low)" in message and "2 entries (5 bytes)" in message and "1 bytes are being written" in message
    counters = three.store.counters()["low"]
    assert (counters.dropped, counters.queued) == (2, 1)
    gate.set()
    assert three.store.flush(PATIENCE), "the thread ends with its entry"
    assert three.low.entries == {A: b"a"} and three.store.counters()["low"].queued == 0


def test_every_tier_is_closed_if_one_fails(three: Three) -> None:
    three.top.before_call["close"] = raising(OSError("top"))
    three.low.before_call["flush"] = raising(OSError("low"))
    with pytest.raises(OSError):
        three.store.close()
    assert three.low.asked("close") and three.deep.asked("close")
    three.top.before_call.clear()


# --- names, counters, arguments ---


def test_tiers_of_one_name_are_told_apart() -> None:
    fakes = [FakeStore("redis"), FakeStore("redis"), FakeStore("disk"), FakeStore("redis", shared=True)]
    for number, fake in enumerate(fakes):
        fake.tier.puts = number
    store = TieredStore(fakes)
    assert {name: own.puts for name, own in store.counters().items()} == {
        "redis": 0, "redis-2": 1, "disk": 2, "redis-3": 3,
    }  # fmt: skip
    assert store.name == "tiered" and store.shared
    assert not TieredStore(fakes[:3]).shared
    store.close()


def test_arguments_are_checked() -> None:
    with pytest.raises(InputError, match=r"^stores: must hold at least one"):
        TieredStore([])
    with pytest.raises(InputError, match=r"^stores: must hold stores, got str: open_store\(URL\) makes one$"):
        TieredStore(["redis://:secret@host/0"])  # type: ignore[list-item]


def test_a_blob_is_let_go_once_written(three: Three) -> None:
    for fake in (three.top, three.low, three.deep):
        fake.refuse = True
    blob = bytes(1000)
    before = sys.getrefcount(blob)
    three.store.put(A, blob)
    three.idle()
    wait_until(lambda: sys.getrefcount(blob) == before, "no thread refers to it")
