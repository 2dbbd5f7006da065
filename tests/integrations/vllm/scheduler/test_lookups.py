"""Lookups: bounded calls, and what is known when time runs out. No client can take the store away."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tests.integrations.vllm.sides import CHUNK, Desk, make_request
from tests.waiting import wait_until

from cuvee.integrations.stores.breaker import GuardedStore
from cuvee.integrations.vllm.scheduler import lookups
from cuvee.integrations.vllm.scheduler.lookups import CALL_KEYS
from cuvee.integrations.vllm.scheduler.request_record import RequestRecord
from cuvee.naming.identity import store_key

SEGMENTS = {"segment_tokens": 12}


# In the scheduler's side ---------------------------------------------------------------------------------------------


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


def test_a_big_prompt_is_no_outage(desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch) -> None:
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
    request, ask = many(d, 800), d.side._planner.ask

    def ask_after_prefix(record: RequestRecord) -> None:
        lookup = record.lookup
        assert lookup is not None
        wait_until(lookup.answer.done, "it is known that nothing of the prefix is there")
        ask(record)

    monkeypatch.setattr(d.side._planner, "ask", ask_after_prefix)
    d.side.arrived(request)
    assert held.wait(30), "a call is under way, and the lookup's time is over"
    asked = sum(counted[:-1])
    tokens, _ = d.matched(request)
    told = d.side.outcome(request)
    assert told is not None and told["reused_tokens"] > 0 and tokens > 0, "what was found in time is used"
    assert asked // 2 < told["reused_tokens"] / 4 <= asked
    calls, d.now = len(counted), 1000.0  # the store is as quick as at first
    assert d.matched(victim) == (96, True)
    victims = len(counted)
    go.set()
    assert victims > calls and store.counters()["memory"].skipped == 0 == store.counters()["memory"].errors
    d.side.close()
    assert d.side._state.lookup_threads.dismiss(20) and len(counted) == victims, "and no more is asked for"


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
    d.side.close()
    assert d.side._state.lookup_threads.dismiss(20) and len(counted) == 3


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
        d.side.finished(request, [[]])
    elif ends == "reset":
        d.side.reset()
    else:
        segmented = d.record().segmented
        assert segmented is not None
        d.side._planner.refuse(segmented, "failed")
    go.set()
    assert d.side._state.lookup_threads.dismiss(20)
    assert 1 <= counted.count(CALL_KEYS) <= 2, "of the prefix, of the segments: seven more of these were left"
