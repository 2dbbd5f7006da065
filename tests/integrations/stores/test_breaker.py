"""`GuardedStore`: failures are misses, with one log line per outage and one probe at a time."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
from tests.integrations.stores.dict_store import FakeStore, hold
from tests.integrations.stores.fake_clock import Clock
from tests.waiting import PATIENCE, wait_until

from cuvee.codec.errors import InputError
from cuvee.integrations.stores.base import Store, StoreError
from cuvee.integrations.stores.breaker import GuardedStore
from cuvee.integrations.stores.tiered import TieredStore

KEY, OTHER = "ab/01", "ab/02"


def down() -> StoreError:
    return StoreError("fake store at nowhere: connection refused.")


@pytest.fixture
def inner() -> FakeStore:
    return FakeStore(shared=True)


@pytest.fixture
def store(inner: FakeStore, clock: Clock) -> GuardedStore:
    guarded = GuardedStore(inner, clock)
    guarded.first_backoff, guarded.max_backoff = 1.0, 5.0
    return guarded


def figures(store: Store) -> tuple[int, int]:
    tier = store.counters()["fake"]
    return tier.errors, tier.skipped


def break_all(inner: FakeStore) -> None:
    inner.read_fault = inner.write_fault = down()


def mend(inner: FakeStore) -> None:
    inner.read_fault = inner.write_fault = None


def test_a_store_that_works_shows_through(inner: FakeStore, store: GuardedStore) -> None:
    assert (store.name, store.shared) == ("fake", True)
    assert store.put(KEY, b"x") and store.get(KEY) == b"x" and store.get_many([OTHER, KEY]) == [None, b"x"]
    assert store.contains([KEY, OTHER]) == [True, False] and store.delete(KEY) and not store.delete(KEY)
    assert store.put(KEY, b"x") and store.delete_tenant("ab") == 1
    assert store.flush()
    inner.flushed = False
    assert not store.flush(0)
    store.close()
    assert inner.calls[-1] == "close" and figures(store) == (0, 0)


OPERATIONS: dict[str, tuple[Callable[[Store], Any], Any]] = {
    "get_many": (lambda store: store.get_many([KEY, OTHER]), [None, None]),
    "contains": (lambda store: store.contains([KEY, OTHER]), [False, False]),
    "put": (lambda store: store.put(KEY, b"y"), False),
    "delete": (lambda store: store.delete(KEY), False),
}


READING = ("get_many", "contains")


@pytest.mark.parametrize("error", [down(), RuntimeError("a bug")], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_failure_is_a_miss(inner: FakeStore, store: GuardedStore, name: str, error: Exception) -> None:
    inner.entries[KEY] = b"x"
    inner.read_fault = inner.write_fault = error
    operation, miss = OPERATIONS[name]
    assert operation(store) == miss and inner.calls == [name] and figures(store) == (1, 0)
    # From now on nothing of this direction reaches the store.
    same = [other for other in OPERATIONS if (other in READING) == (name in READING)]
    for other in same:
        assert OPERATIONS[other][0](store) == OPERATIONS[other][1]
    assert inner.calls == [name] and figures(store) == (1, len(same)) and inner.entries == {KEY: b"x"}


def test_backoff_doubles_up_to_the_limit_and_starts_anew(inner: FakeStore, store: GuardedStore, clock: Clock) -> None:
    def outage() -> list[float]:
        """Return when operations reach the store in an outage of 20 s."""
        inner.read_fault = down()
        began, tries = clock.now, []
        while clock.now < began + 20:
            inner.calls.clear()
            store.get(KEY)
            if inner.calls:
                tries.append(clock.now - began)
            clock.now += 0.5
        mend(inner)
        clock.now += 10
        store.get(KEY)
        return tries

    assert outage() == [0, 1, 3, 7, 12, 17]
    assert outage() == [0, 1, 3, 7, 12, 17]


def test_who_would_encode_in_vain_is_told(inner: FakeStore, store: GuardedStore, clock: Clock) -> None:
    """During an outage of writing, until a probe is due; tiers take puts as long as one of them does."""
    tiers = TieredStore([store, GuardedStore(FakeStore(), clock)])
    assert store.takes_puts() and tiers.takes_puts()
    inner.read_fault = down()
    assert store.get(KEY) is None and store.takes_puts(), "reading alone fails"
    inner.write_fault = down()
    assert not store.put(KEY, b"x") and not store.takes_puts() and tiers.takes_puts()
    assert not TieredStore([store]).takes_puts()
    clock.now += 1.0
    assert store.takes_puts(), "one put probes"
    assert not store.put(KEY, b"x") and not store.takes_puts()
    mend(inner)
    clock.now += 2.0
    assert store.put(KEY, b"x") and store.takes_puts()


def test_an_outage_is_told_from_an_entry_that_is_not_there(
    inner: FakeStore, store: GuardedStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inner, "why_missing", lambda key: "was bad")
    tiers = TieredStore([store, FakeStore("whole")])
    assert store.why_missing(KEY) == "was bad" and tiers.why_missing(KEY) == "was bad (tier fake)"
    inner.read_fault = down()
    assert tiers.get(KEY) is None
    failed = "was not read, because the fake store failed: fake store at nowhere: connection refused"
    assert store.why_missing(KEY) == failed and tiers.why_missing(KEY) == f"{failed} (tier fake)"
    mend(inner)
    clock.now += 1.0
    assert store.get(KEY) is None and store.why_missing(KEY) == "was bad", "it works again"


def test_an_outage_is_logged_twice(
    inner: FakeStore, store: GuardedStore, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for _ in range(2):
        caplog.clear()
        break_all(inner)
        for _ in range(5):
            store.get(KEY)
            store.get(KEY)
            clock.now += 5
        mend(inner)
        store.get(KEY)
        begin, end = caplog.records
        assert (begin.levelno, end.levelno) == (logging.WARNING, logging.INFO)
        assert "reading from the fake store failed: fake store at nowhere: connection refused. Check" in begin.message
        assert "Check that it is running" in begin.message and not begin.exc_info
        assert end.message == "cuvee: reading from the fake store works again"
        assert "counts as empty" in begin.message
    caplog.clear()
    inner.write_fault = StoreError("full")
    assert not store.put(KEY, b"x") and store.get_many([KEY]) == [None]
    assert "nothing is written to it" in caplog.text and "counts as empty" not in caplog.text, "it is still read"


def test_what_never_reached_the_server_proves_nothing(inner: FakeStore, store: GuardedStore, clock: Clock) -> None:
    break_all(inner)
    store.put(KEY, b"x")
    store.get(KEY)
    mend(inner)
    inner.refuse = True
    clock.now += 1
    assert not store.put(KEY, b"x")  # a probe that is refused, for example because it exceeds the budget
    assert store.get_many([]) == [] and store.contains([]) == [] and inner.calls == ["put", "get_many", "put"]
    break_all(inner)
    assert store.get(KEY) is None and not store.put(KEY, b"x")
    assert figures(store) == (4, 0)  # both were probes, because the breaker was still open
    clock.now += 1.5
    mend(inner)
    inner.refuse = False
    assert not store.put(KEY, b"x")  # the backoff of writing has doubled
    clock.now += 0.5
    assert store.put(KEY, b"x")


@pytest.mark.parametrize("error", [InputError("key=1 must be"), KeyboardInterrupt()], ids=lambda e: type(e).__name__)
def test_errors_of_the_caller_are_raised_and_prove_nothing(
    inner: FakeStore, store: GuardedStore, clock: Clock, error: BaseException
) -> None:
    inner.read_fault = error
    with pytest.raises(type(error)):
        store.get(KEY)
    assert figures(store) == (0, 0)
    inner.read_fault = down()
    store.get(KEY)
    clock.now += 1
    inner.read_fault = error
    with pytest.raises(type(error)):
        store.get(KEY)
    inner.read_fault = down()
    assert store.get(KEY) is None and figures(store) == (2, 0)  # another probe was possible, and the circuit still open
    assert store.get(KEY) is None and figures(store) == (2, 1)


def test_what_hangs_is_a_failure_once_somebody_gives_it_up(
    inner: FakeStore, store: GuardedStore, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    inner.entries[KEY] = b"x"
    held = hold(inner, "contains")
    answers: list[object] = []
    threads = [threading.Thread(target=lambda: answers.append(store.contains([KEY]))) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(inner.calls) == 3, "all hang")
    clock.now += 2
    store.report_overdue("get_many", 1.0)
    store.report_overdue("contains", 2.5)
    assert figures(store) == (0, 0) and store.get(KEY) == b"x", "other calls, or not so long"
    for _ in range(2):
        store.report_overdue("contains", 2.0)
    assert figures(store) == (3, 0), "each once"
    assert store.get(KEY) is None and figures(store) == (3, 1)
    assert len(caplog.messages) == 1
    assert "reading from the fake store failed: TimeoutError: contains has not ended within 2 s" in caplog.messages[0]
    # When the calls end at last, they are not counted again and do not close the circuit.
    inner.read_fault = RuntimeError("late")
    held.set()
    for thread in threads:
        thread.join(PATIENCE)
    assert figures(store)[0] == 3 and answers == [[False]] * 3
    mend(inner)
    assert store.get(KEY) is None
    clock.now += 1
    assert store.get(KEY) == b"x"


def test_a_probe_that_hangs_is_given_up_and_the_only_one(inner: FakeStore, store: GuardedStore, clock: Clock) -> None:
    inner.entries[KEY] = b"x"
    inner.read_fault = down()
    store.get(KEY)
    mend(inner)
    clock.now += 1
    held = hold(inner, "get_many")
    probe = threading.Thread(target=store.get, args=(KEY,))
    probe.start()
    held.reached()
    calls = len(inner.calls)
    clock.now += 100
    assert [store.get(KEY) for _ in range(5)] == [None] * 5 and figures(store) == (1, 5), "nobody waits for it"
    store.report_overdue("get_many", 1.0)
    clock.now += 100
    assert [store.get(KEY) for _ in range(5)] == [None] * 5 and len(inner.calls) == calls
    assert figures(store) == (2, 10)
    held.set()
    probe.join(PATIENCE)
    assert store.get(KEY) == b"x", "it came back"


def test_deleting_a_tenant_never_hides_a_failure(inner: FakeStore, store: GuardedStore) -> None:
    inner.entries[KEY] = b"x"
    inner.write_fault = down()
    store.put(KEY, b"x")
    for _ in range(2):  # attempted although the circuit is open
        with pytest.raises(StoreError, match="connection refused"):
            store.delete_tenant("ab")
    inner.write_fault = OSError(5, "I/O error")
    with pytest.raises(OSError, match="I/O"):
        store.delete_tenant("ab")
    assert figures(store) == (4, 0)
    inner.write_fault = InputError("tenant: bad")
    with pytest.raises(InputError):
        store.delete_tenant("ab")
    mend(inner)
    assert store.delete_tenant("ab") == 1 and figures(store) == (4, 0)


def test_the_log_shows_where_a_bug_is(inner: FakeStore, store: GuardedStore, caplog: pytest.LogCaptureFixture) -> None:
    inner.write_fault = RuntimeError("a\nbug")
    store.put(KEY, b"x")
    assert "writing to the fake store failed: RuntimeError: a bug." in caplog.messages[0] and caplog.records[0].exc_info


@pytest.mark.parametrize("fails", [True, False])
def test_what_began_before_an_outage_neither_opens_nor_closes(
    inner: FakeStore, store: GuardedStore, clock: Clock, fails: bool
) -> None:
    """A late failure opens nothing after the outage; a late success closes nothing in it."""
    inner.entries[KEY] = b"x"
    held = hold(inner, "contains")
    slow = threading.Thread(target=store.contains, args=([KEY],))
    slow.start()
    held.reached()
    inner.read_fault = down()
    store.get(KEY)
    mend(inner)
    if fails:
        clock.now += 1
        assert store.get(KEY) == b"x"  # the outage is over before the slow operation ends
        inner.read_fault = down()
    held.set()
    slow.join(PATIENCE)
    mend(inner)
    assert store.get(KEY) == (b"x" if fails else None) and figures(store)[1] == (not fails)


def test_flush_and_close_do_not_raise(
    inner: FakeStore, store: GuardedStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*given: object) -> bool:
        raise OSError(5, "I/O error")

    for name in ("flush", "close"):
        monkeypatch.setattr(inner, name, fails)
    assert not store.flush(1.0)
    store.close()
    assert figures(store) == (2, 0) and "flushed: OSError" in caplog.messages[0] and "closed" in caplog.messages[1]
    # Neither operation shows whether the store reads and writes.
    assert store.put(KEY, b"x")
