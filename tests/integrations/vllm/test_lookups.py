"""Lookups: bounded calls, tenants in turn, and what is known when time runs out. No client can take the store away."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from typing import Any

import pytest
from tests.integrations.stores.redis_server import wait_until
from tests.integrations.vllm.sides import CHUNK, Desk, make_request

from cuvee.integrations.stores.breaker import GuardedStore
from cuvee.integrations.stores.threads import ThreadPool
from cuvee.integrations.vllm import lookups
from cuvee.integrations.vllm.lookups import CALL_KEYS, THREADS, THREADS_PER_TENANT, Asking, Lookup, Lookups, Question
from cuvee.naming.identity import store_key

SEGMENTS = {"segment_tokens": 12}


class Counter:
    """Stands in for a store: says which calls are under way, and lets them go one by one."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, int]] = []  # tenant and digests of each call
        self.blocked: set[str] = set()
        self._go = threading.Semaphore(0)
        self._lock = threading.Lock()

    def __call__(self, tenant: str, digests: Sequence[bytes]) -> list[bool]:
        with self._lock:
            self.begun.append((tenant, len(digests)))
            blocked = tenant in self.blocked
        if blocked:
            assert self._go.acquire(timeout=30)
        return [digest[0] % 2 == 0 for digest in digests]

    def release(self, calls: int) -> None:
        self._go.release(calls)

    def tenants(self) -> list[str]:
        return [tenant for tenant, _ in self.begun]


def digests(count: int) -> list[bytes]:
    return [bytes([at % 256]) for at in range(count)]


def asking(*questions: int) -> Asking[list[int]]:
    """Questions of so many digests each; the answer is how many were there of each."""
    known: list[int] = []
    for count in questions:
        known = [*known, sum((yield Question(digests(count), known)))]
    return known


@pytest.fixture
def made() -> Iterator[Callable[..., tuple[Lookups, Counter]]]:
    every: list[tuple[ThreadPool, Counter]] = []

    def make(threads: int = THREADS, shards: int = 1, **options: Any) -> tuple[Lookups, Counter]:
        pool, store = ThreadPool(threads, "test", 60.0), Counter()
        every.append((pool, store))
        return Lookups(pool, store, shards, options.pop("patience", 60.0), **options), store

    yield make
    for pool, store in every:
        store.release(10_000)
        assert pool.dismiss(20)


def test_questions_are_asked_one_after_the_other(made: Callable[..., tuple[Lookups, Counter]]) -> None:
    looking, store = made()
    assert looking.begin("a", asking(3, 1, 0, 4), []).answer.result(20) == [2, 1, 0, 2]
    assert [count for _, count in store.begun] == [3, 1, 4], "what asks for nothing needs no store"
    assert (
        looking.begin("a", asking(0), []).answer.result(20) == [0]
        and looking.begin("a", asking(), []).answer.result(20) == []
    )


@pytest.mark.parametrize("shards", [1, 4, 100])
def test_a_question_of_any_length_is_asked_in_bounded_calls(
    made: Callable[..., tuple[Lookups, Counter]], shards: int
) -> None:
    looking, store = made(shards=shards)
    assert looking.begin("a", asking(130, 2), []).answer.result(20) == [65, 1]
    most = max(CALL_KEYS // shards, 1)
    assert looking.batch == most and all(count <= most for _, count in store.begun)
    assert len(store.begun) == -(-130 // most) + -(-2 // most)


def test_a_tenant_leaves_threads_to_the_others(made: Callable[..., tuple[Lookups, Counter]]) -> None:
    looking, store = made()
    store.blocked = {"big"}
    for _ in range(20):
        looking.begin("big", asking(6400), [])
    wait_until(lambda: len(store.begun) >= THREADS_PER_TENANT, "as many as it may")
    assert looking.begin("other", asking(1), []).answer.result(20) == [1], "while all of those are under way"
    assert store.tenants() == ["big"] * THREADS_PER_TENANT + ["other"]


def test_calls_of_tenants_take_turns(
    made: Callable[..., tuple[Lookups, Counter]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where many share all the threads, nobody waits for another's lookup to end, but for one call of it."""
    monkeypatch.setattr(lookups, "THREADS_PER_TENANT", THREADS)
    looking, store = made()
    store.blocked = {"big", "small", "last"}
    for _ in range(20):
        looking.begin("big", asking(6400), [])
    wait_until(lambda: len(store.begun) == THREADS, "it has all threads")
    looking.begin("small", asking(65), [])
    looking.begin("last", asking(1), [])
    for calls in range(THREADS + 1, THREADS + 4):
        store.release(1)
        wait_until(lambda: len(store.begun) == calls, "the next call")  # noqa: B023
    assert sorted(store.tenants()[THREADS:]) == ["big", "last", "small"], "in the first round"


def test_lookups_of_one_tenant_take_turns(made: Callable[..., tuple[Lookups, Counter]]) -> None:
    """So a long prompt holds up nobody's short one, where requests carry no salt."""
    looking, store = made(threads=1)
    store.blocked = {""}
    long = looking.begin("", asking(6400), [])
    wait_until(lambda: len(store.begun) == 1, "its first call")
    short = looking.begin("", asking(1), [])
    store.release(2)
    assert short.answer.result(20) == [1] and not long.answer.done()


def test_calls_that_hang_count_no_more_as_their_tenant_s(made: Callable[..., tuple[Lookups, Counter]]) -> None:
    now = [0.0]
    looking, store = made(patience=1.0, clock=lambda: now[0])
    store.blocked = {"a"}
    for _ in range(THREADS_PER_TENANT):
        looking.begin("a", asking(1), [])
    wait_until(lambda: len(store.begun) == THREADS_PER_TENANT, "all under way")
    store.blocked = set()
    waits = looking.begin("a", asking(1), [])
    looking.begin("b", asking(1), []).answer.result(20)
    assert not waits.answer.done()
    now[0] = 2.0
    assert looking.begin("a", asking(3), []).answer.result(20) in ([1], [2]) and waits.answer.result(20) == [1]


def test_what_waited_for_its_tenant_s_calls_is_asked_when_they_end(
    made: Callable[..., tuple[Lookups, Counter]],
) -> None:
    looking, store = made()
    store.blocked = {"a"}
    every = [looking.begin("a", asking(65, 1), []) for _ in range(3 * THREADS)]
    wait_until(lambda: len(store.begun) == THREADS_PER_TENANT, "all under way")
    store.release(1000)
    assert [lookup.answer.result(20) for lookup in every] == [[33, 1]] * (3 * THREADS)
    assert looking._calls == {} and not looking._waiting


def test_nobody_is_asked_for_what_is_not_wanted_any_more(made: Callable[..., tuple[Lookups, Counter]]) -> None:
    looking, store = made()
    store.blocked = {"a"}
    cancelled, settled = (looking.begin("a", asking(1, 6400), []) for _ in range(2))
    wait_until(lambda: len(store.begun) == 2, "both first calls")
    calls = 2

    def next_began() -> bool:
        return len(store.begun) == calls

    while [] in (cancelled._known, settled._known):  # a call may overtake the other lookup's
        store.release(1)
        calls += 1
        wait_until(next_began, "the call behind the one that ended")
    assert cancelled.answer.cancel() and settled.settle() == [1], "of the first question"
    with pytest.raises(CancelledError):
        cancelled.settle()
    store.release(1000)
    assert looking.begin("b", asking(1), []).answer.result(20) == [1]
    wait_until(lambda: not looking._calls, "the calls end")
    assert len(store.begun) == calls + 1 and settled.answer.result() == [1]


def test_what_is_cancelled_before_its_turn_is_not_asked_at_all(made: Callable[..., tuple[Lookups, Counter]]) -> None:
    looking, store = made(threads=1)
    store.blocked = {"a"}
    looking.begin("a", asking(1), [])
    wait_until(lambda: len(store.begun) == 1, "a call under way")
    assert looking.begin("a", asking(2), []).answer.cancel()
    store.release(1)
    assert looking.begin("b", asking(3), []).answer.result(20) == [2]
    assert store.begun == [("a", 1), ("b", 3)]


def test_where_no_thread_can_be_started_what_is_known_is_the_answer(
    made: Callable[..., tuple[Lookups, Counter]], monkeypatch: pytest.MonkeyPatch
) -> None:
    them, _ = made()
    start, calls = them._pool.submit, 0

    def submit(work: Callable[[], None]) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:  # of the first lookup, whose first question is answered
            raise RuntimeError("can't start new thread")
        return start(work)

    monkeypatch.setattr(them._pool, "submit", submit)
    cut = them.begin("a", asking(4, 6), [])
    assert cut.answer.result(30) == [2], "the second question was not asked"
    whole = them.begin("a", asking(4, 6), [])
    assert whole.answer.result(30) == [2, 3]


def test_a_lookup_that_cannot_begin_takes_nobody_s_turn(
    made: Callable[..., tuple[Lookups, Counter]], monkeypatch: pytest.MonkeyPatch
) -> None:
    them, store = made()
    with monkeypatch.context() as patch:
        patch.setattr(them._pool, "submit", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            them.begin("a", asking(5), [])
    assert them.begin("a", asking(3), []).answer.result(30) == [2]
    assert store.begun == [("a", 3)]


def refuse(work: Callable[[], None]) -> None:
    raise RuntimeError("can't start new thread")


def test_errors_go_to_whoever_asks_and_then_to_whoever_waits() -> None:
    def broken(tenant: str, digests: Sequence[bytes]) -> list[bool]:
        raise OSError("down")

    def caught() -> Asking[str]:
        try:
            yield Question(digests(1), "nothing")
        except OSError as error:
            return f"it is {error}"
        return "up"

    handled = Lookup("", caught(), "nothing")
    handled.step(broken, 1)
    assert handled.answer.result(0) == "it is down"
    lookup = Lookup("", asking(1), [])
    lookup.step(broken, 1)
    with pytest.raises(OSError, match="down"):
        lookup.answer.result(0)


# In the scheduler's side ---------------------------------------------------------------------------------------------


@pytest.fixture
def desk() -> Iterator[Callable[..., Desk]]:
    every: list[Desk] = []

    def make(**options: Any) -> Desk:
        every.append(Desk(**options))
        return every[-1]

    yield make
    for each in every:
        each.store.before = lambda operation: None
        each.side.close()


def sizes(d: Desk, act: Callable[[int], None] = lambda keys: None) -> list[int]:
    """Keys of each call of the store from now on; `act` is told of each before it is answered."""
    counted: list[int] = []
    contains = d.store.contains

    def noted(keys: Sequence[str]) -> list[bool]:
        counted.append(len(keys))
        act(len(keys))
        return contains(keys)

    d.store.contains = noted  # type: ignore[method-assign]
    return counted


def many(d: Desk, count: int, name: str = "r", salt: str = "big") -> Any:
    """A request of so many segments of 4 tokens, each in the store."""
    ids = list(range(5 * count + 1))
    spans = [[5 * at, 5 * at + 4] for at in range(count)]
    d.put_segments(*(ids[first:end] for first, end in spans), tenant=salt)
    return make_request(name, ids=ids, cache_salt=salt, kv_transfer_params={"cuvee": {"segments": spans}})


@pytest.mark.parametrize(("shards", "secrets"), [(1, 1), (3, 1), (2, 2)])
def test_no_call_grows_with_the_prompt(
    desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch, shards: int, secrets: int
) -> None:
    names = [f"CUVEE_TEST_KEY_{number}" for number in range(secrets)]
    for name in names:
        monkeypatch.setenv(name, name * 2)
    d = desk(blend=SEGMENTS, shards=shards, **({"key_env": names} if secrets > 1 else {}))
    counted = sizes(d)
    request = many(d, 400)
    d.side.arrived(request)
    d.matched(request)
    assert max(counted) <= CALL_KEYS and sum(counted) >= 400 * shards


def test_a_big_prompt_is_no_outage(desk: Callable[..., Desk]) -> None:
    """The store takes its time for each key. The lookup runs out of its own, the store stays in use."""
    d = desk(blend=SEGMENTS, lookup_timeout=5)
    store = GuardedStore(d.store, clock=lambda: d.now)
    d.side._state.store = store
    victim = make_request("v", cache_salt="victim")
    d.put(victim, 6, tenant="victim")
    held, go = threading.Event(), threading.Event()

    def slow(keys: int) -> None:
        if d.now > 1006:
            held.set()
            assert go.wait(30)
        d.now += 0.01 * keys

    counted = sizes(d, slow)
    request = many(d, 800)
    d.side.arrived(request)
    assert held.wait(30), "a call is under way, and the lookup's time is over"
    asked = sum(counted[:-1])
    tokens, _ = d.matched(request)
    told = d.side.told(request)
    assert told is not None and told["reused_tokens"] > 0 and tokens > 0, "what was found in time is used"
    assert asked // 2 < told["reused_tokens"] / 4 <= asked
    calls, d.now = len(counted), 1000.0  # the store is as quick as at first
    assert d.matched(victim) == (96, True)
    victims = len(counted)
    go.set()
    assert victims > calls and store.counters()["memory"].skipped == 0 == store.counters()["memory"].errors
    wait_until(lambda: not d.side._lookups._calls, "the last call ends")
    assert len(counted) == victims, "and no more is asked for"


def test_a_prefix_that_is_known_in_part_is_loaded_in_part(
    desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookups, "CALL_KEYS", 2)
    d, request = desk(lookup_timeout=5), make_request()
    d.put(request, 6)
    held, go = threading.Event(), threading.Event()

    def hang(keys: int) -> None:
        if len(counted) == 3:
            held.set()
            assert go.wait(30)

    counted = sizes(d, hang)
    d.side.arrived(request)
    assert held.wait(30)
    d.now += 6
    assert d.matched(request) == (4 * CHUNK, True) and d.lookups() == {"partial": 1}
    go.set()
    assert d.matched(request) == (4 * CHUNK, True)
    wait_until(lambda: not d.side._lookups._calls, "the call ends")
    assert len(counted) == 3


def test_the_longest_segments_are_asked_for_first_and_each_once(
    desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookups, "CALL_KEYS", 1)
    d = desk(blend=SEGMENTS)
    ids = [*range(5), *range(20, 40), *range(9), *range(5), *range(50, 60)]
    spans = [[0, 5], [5, 25], [25, 34], [34, 39]]
    asked: list[str] = []
    contains = d.store.contains

    def noted(keys: Sequence[str]) -> list[bool]:
        asked.extend(keys)
        return contains(keys)

    d.store.contains = noted  # type: ignore[method-assign]
    request = make_request("r", ids=ids, kv_transfer_params={"cuvee": {"segments": spans}})
    d.side.arrived(request)
    d.matched(request)
    wanted = [store_key("", d.segment(ids[first:end])) for first, end in (spans[1], spans[2], spans[0])]
    assert [key for key in asked if key in wanted] == wanted


@pytest.mark.parametrize("ends", ["finished", "reset", "refused"])
def test_the_rest_is_not_asked_for_once_the_request_has_ended(desk: Callable[..., Desk], ends: str) -> None:
    d = desk(blend=SEGMENTS)
    begun, go = threading.Event(), threading.Event()

    def hold(keys: int) -> None:
        if keys == CALL_KEYS:
            begun.set()
            assert go.wait(30)

    counted = sizes(d, hold)
    request = many(d, 500)
    d.side.arrived(request)
    assert begun.wait(30)
    if ends == "finished":
        d.side.finished(request, [])
    elif ends == "reset":
        d.side.reset()
    else:
        tracked = d.side._requests.tracked["r"]
        d.side._planner.refuse(tracked.segmented, "failed")  # type: ignore[union-attr, arg-type]
    go.set()
    wait_until(lambda: not d.side._lookups._calls and not d.side._lookups._waiting, "all is quiet")
    assert 1 <= counted.count(CALL_KEYS) <= 2, "of the prefix, of the segments: seven more of these were left"
