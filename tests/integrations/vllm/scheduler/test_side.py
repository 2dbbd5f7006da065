"""The scheduler's side: what it finds, what it asks for, what it stores. Requests have the attributes vLLM's have."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from tests.integrations.stores.dict_store import hold
from tests.integrations.vllm.sides import (
    BLOCK,
    CHUNK,
    IDENTITY,
    LORA,
    Bench,
    Desk,
    Served,
    generate,
    image,
    make_request,
    patience,
)  # fmt: skip
from tests.waiting import wait_until

from cuvee.codec.format.keys import make_keys
from cuvee.integrations.identity.lora_files import AdapterFiles
from cuvee.integrations.identity.weights_name import WeightsName
from cuvee.integrations.stores import StoreError
from cuvee.integrations.stores.breaker import GuardedStore
from cuvee.integrations.vllm.decision import Restored
from cuvee.integrations.vllm.messages import Entry, Report, Save, StepPlan
from cuvee.naming.identity import PrefixChain, store_key


def chunks_of(saves: list[Save]) -> list[int]:
    """Numbers of the chunks that are stored."""
    return [save.entry.start // CHUNK for save in saves]


def test_entries_of_every_accepted_secret_are_found_and_no_others(
    desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new, other = (make_keys(letter * 16)[0].id for letter in (b"o", b"n", b"x"))
    monkeypatch.setenv("CUVEE_OLD", "o" * 16)
    monkeypatch.setenv("CUVEE_NEW", "n" * 16)
    d, request = desk(key_env=["CUVEE_NEW", "CUVEE_OLD"], shards=2), make_request()
    d.put(request, 2, key_id=old)
    d.put(request, 3, key_id=new, first=2)
    d.put(request, 6, key_id=other)
    d.put(request, 6)
    del d.store.entries[store_key("", d.digests(request)[1], 1, old)]
    d.put(request, 2, key_id=new, first=1)
    assert d.matched(request) == (3 * CHUNK, True)
    calls = [call for call in d.store.calls if call == "contains"]
    assert len(calls) == 4, "one question for each secret about chunks, and one about tails of the chunk after them"


def test_one_rank_stores_what_all_hold(desk: Callable[..., Desk]) -> None:
    """Of latents (MLA): the others' names are not asked for."""
    d, request = desk(shards=2, setup={"replicated": True}), make_request()
    d.put(request, 3)
    for digest in d.digests(request):
        d.store.entries.pop(store_key("", digest, 1), None)
    assert d.matched(request) == (3 * CHUNK, True)


def test_drafts_that_are_rejected_are_never_stored(desk: Callable[..., Desk]) -> None:
    """A step computes drafts behind the known tokens. A chunk is stored once all of its tokens are accepted."""
    d, request = desk(min_tokens=1), make_request(tokens=CHUNK - 2)
    d.side.arrived(request)
    d.plan((request, 0, CHUNK - 2))
    generate(request, 1)
    assert not d.plan((request, CHUNK - 2, 6), new=False).saves, "the chunk's last token is a draft"
    generate(request, 1)  # in place of the first draft
    (save,) = d.plan((request, CHUNK - 1, 6), new=False).saves
    assert save.entry.digest == d.digests(request)[0]
    request.num_computed_tokens = CHUNK  # again none is accepted
    generate(request, 1)
    d.side.finished(request, [list(range(100, 110))])
    assert not d.plan().last_saves, "five drafts were computed behind the chunk"


def test_drafts_that_are_accepted_are_stored_with_the_next_step(desk: Callable[..., Desk]) -> None:
    d, request = desk(), make_request(tokens=CHUNK - 2)
    d.side.arrived(request)
    d.plan((request, 0, CHUNK - 2))
    generate(request, 1)
    assert not d.plan((request, CHUNK - 2, 6), new=False).saves
    generate(request, 6)
    assert chunks_of(d.plan((request, CHUNK + 4, 6), new=False).saves) == [0]


@pytest.mark.parametrize(("stored", "found"), [(0, 0), (1, 16), (3, 48), (6, 96)])
def test_finds_the_leading_chunks_that_are_there(desk: Callable[..., Desk], stored: int, found: int) -> None:
    d, request = desk(), make_request()
    d.put(request, stored)
    assert d.matched(request) == (found, bool(found))
    result = {0: "miss", 6: "hit"}.get(stored, "partial")
    assert d.lookups() == {result: 1}


def test_a_gap_ends_the_prefix(desk: Callable[..., Desk]) -> None:
    d, request = desk(), make_request()
    d.put(request, 6)
    del d.store.entries[store_key("", d.digests(request)[2])]
    assert d.matched(request) == (32, True)


def test_tenant_of_requests_without_salt(desk: Callable[..., Desk]) -> None:
    d = desk(tenant="alice")
    d.put(make_request(), 6, tenant="alice")
    assert d.matched(make_request("c"))[0] == 96


@pytest.mark.parametrize(
    "changes",
    [{"prompt_token_ids": None}, {"prompt_embeds": "tensor"}, {"resumable": True}, {"skip_reading_prefix_cache": True}],
)
def test_requests_that_are_never_loaded(desk: Callable[..., Desk], changes: dict[str, Any]) -> None:
    d, request = desk(), make_request(**changes)
    d.put(make_request(), 6)
    d.side.arrived(request)
    assert d.matched(request) == (0, False)
    assert d.store.calls == []


@pytest.mark.parametrize(("role", "loads", "stores"), [("producer", False, True), ("consumer", True, False)])
def test_roles(desk: Callable[..., Desk], role: str, loads: bool, stores: bool) -> None:
    d, request = desk(loads=loads, stores=stores), make_request()
    d.put(request, 3)
    assert bool(d.matched(request)[0]) is loads
    assert bool(d.plan((request, 48, 52)).saves) is stores


def test_short_hits_are_left(desk: Callable[..., Desk]) -> None:
    d, request = desk(min_tokens=64), make_request()
    d.put(request, 3)
    assert d.matched(request) == (0, False)
    assert d.lookups() == {"partial": 1}
    asked = d.store.calls.count("contains")
    other = make_request("s", tokens=60)
    assert d.matched(other) == (0, False)
    assert d.store.calls.count("contains") == asked, "56 tokens at most: not worth a question"


def test_many_pending_lookups_share_the_patience_of_a_step(desk: Callable[..., Desk]) -> None:
    d = desk()
    go = hold(d.store)
    requests = [make_request(str(number)) for number in range(50)]
    assert {d.side.matched_tokens(request, 0) for request in requests} == {(None, False)}
    assert d.side._state.patience == 0
    d.plan()
    assert d.side._state.patience > 0
    go.set()
    assert {d.matched(request) for request in requests} == {(0, False)}


def test_a_slow_lookup_is_a_miss(desk: Callable[..., Desk]) -> None:
    d, request = desk(lookup_timeout=5), make_request()
    d.put(request, 6)
    go = hold(d.store)
    assert d.side.matched_tokens(request, 0) == (None, False)
    d.now += 6
    assert d.side.matched_tokens(request, 0) == (0, False)
    go.set()
    d.now += 11
    assert d.matched(request) == (0, False), "once given up, it is computed"
    assert d.lookups() == {"timeout": 1}


def test_one_lookup_that_hangs_costs_the_next_ones_nothing(desk: Callable[..., Desk]) -> None:
    """More of them than the pool has threads; afterwards the store is used again."""
    d = desk(lookup_timeout=0.2, setup={"remote_workers": True})
    d.side._state.clock = time.monotonic
    later = 0.0
    d.side._state.store = guarded = GuardedStore(d.store, lambda: time.monotonic() + later)
    d.side._counted_store = guarded
    guarded.first_backoff = guarded.max_backoff = 60.0
    go = hold(d.store)
    hanging = [make_request(f"hanging {number}") for number in range(6)]
    for request in hanging:
        d.put(request, 6)
        d.side.arrived(request)
    begun = time.monotonic()
    assert [d.matched(request) for request in hanging] == [(0, False)] * 6
    calls = len(d.store.calls)
    assert time.monotonic() - begun < 5
    begun = time.monotonic()
    for number in range(50):
        assert d.matched(make_request(f"next {number}")) == (0, False)
    assert time.monotonic() - begun < 5 and len(d.store.calls) == calls, "50 x 0.2 s otherwise"
    d.side.take(Report())
    totals = d.recorder.totals()
    assert totals["store_operations", "memory:error"] >= 1 and totals["lookups", "timeout"] < 25, "most did not wait"
    go.set()
    later, deadline = 60.0, time.monotonic() + 10
    while d.matched(make_request(f"again {time.monotonic()}")) != (96, True):
        assert time.monotonic() < deadline
    assert d.side._state.lookup_threads.dismiss(10)


def test_close_waits_for_no_lookup(desk: Callable[..., Desk]) -> None:
    d = desk()
    go = hold(d.store)
    for number in range(8):
        d.side.arrived(make_request(str(number)))
    begun = time.monotonic()
    d.side.close()
    assert time.monotonic() - begun < 5
    go.set()
    assert d.side._state.lookup_threads.dismiss(10)


def test_a_failing_lookup_is_a_miss(desk: Callable[..., Desk]) -> None:
    d, request = desk(), make_request()

    def down(operation: str) -> None:
        raise StoreError("down")

    d.store.before = down
    assert d.matched(request) == (0, False)
    assert d.recorder.totals()["failures", "lookup"] == 1


@pytest.mark.parametrize("remote", [False, True])
def test_errors_of_a_store_that_no_worker_has_are_counted(desk: Callable[..., Desk], remote: bool) -> None:
    d = desk(setup={"remote_workers": remote})
    counters = d.store.counters()["memory"]
    for errors, skipped in ((2, 5), (3, 5)):
        counters.errors, counters.skipped = errors, skipped
        d.side.take(Report())
    totals = d.recorder.totals()
    assert totals.get(("store_operations", "memory:error"), 0) == (3 if remote else 0)
    assert totals.get(("store_operations", "memory:skipped"), 0) == (5 if remote else 0)


def test_old_answers_are_asked_for_anew(desk: Callable[..., Desk]) -> None:
    d, request = desk(), make_request()
    d.put(request, 6)
    assert d.matched(request)[0] == 96
    d.store.entries.clear()
    assert d.matched(request)[0] == 96, "a moment later the answer stands"
    d.now += 11
    assert d.matched(request)[0] == 0


def test_the_load_that_is_planned(desk: Callable[..., Desk]) -> None:
    d, request = desk(), make_request()
    d.put(request, 3)
    tokens, _ = d.matched(request, 24)
    d.side.allocated(request, [list(range(50, 63))], tokens)
    plan = d.plan()
    (load,) = plan.loads
    assert (load.request, load.start, load.end) == ("r", 24, 48)
    assert load.prefix == [
        Entry("chunk", d.digests(request)[at], at * CHUNK, CHUNK, ((50 + 2 * at, 51 + 2 * at),)) for at in (1, 2)
    ]
    assert load.blocks == [53, 54, 55], "from the first token on"
    assert d.plan().loads == [], "once"
    d.side.allocated(request, [list(range(50, 63))], 0)
    assert d.plan().loads == [], "the second call of the engine, after the load"


def test_a_step_without_tokens_is_idle(desk: Callable[..., Desk]) -> None:
    d, request = desk(), make_request()
    d.side.arrived(request)
    assert d.plan().idle
    assert not d.plan((request, 0, 16)).idle and not d.plan((request, 16, 1), new=False).idle


def _load(d: Desk, request: SimpleNamespace) -> StepPlan:
    d.side.allocated(request, [list(range(20))], d.matched(request)[0])
    return d.plan()


@pytest.mark.parametrize(
    ("ends", "computed", "found"),
    [
        ("ended", 48, (0, False)),  # the engine has it now
        ("ended", 0, (48, True)),  # or not: then it is loaded
        ("failed", 0, (0, False)),  # and the store has lost it
        ("aborted", 0, (48, True)),
    ],
)
def test_what_another_request_loads_is_waited_for(
    desk: Callable[..., Desk], ends: str, computed: int, found: tuple[int, bool]
) -> None:
    d, first, second, third = desk(), make_request("a"), make_request("b"), make_request("c", tokens=40)
    d.put(first, 3)
    plan = _load(d, first)
    for other in (second, third):
        for _ in range(5):
            assert d.side.matched_tokens(other, 0)[0] is None
            d.plan()
    if ends == "aborted":
        d.side.finished(first, [[]])
    elif ends == "failed":
        d.store.entries.clear()
        d.side.take(Report([plan.step], ["a"], failed={"a"}))
    else:
        d.side.take(Report([plan.step], ["a"], [Restored("load", 48, 0, 0.1)]))
    assert d.matched(second, computed) == found
    assert d.matched(third) == ((32, True) if found[0] or computed else found)


def test_a_request_that_waits_costs_a_step_nothing_that_grows_with_its_prompt(
    desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    d, first = desk(), make_request("a", tokens=3000)
    d.put(first, 187)
    _load(d, first)
    waiting = [make_request(f"w{number}", tokens=3000) for number in range(5)]
    for request in waiting:
        for _ in patience():
            assert d.side.matched_tokens(request, 0)[0] is None
            d.plan()
            lookup = d.record(request.request_id).lookup
            if lookup is not None and lookup.answer.done():
                break
        d.side.matched_tokens(request, 0)
    calls: list[int] = []
    usual = PrefixChain.digests

    def digests(chain: PrefixChain, ids: Sequence[int], chunks: int) -> list[bytes]:
        calls.append(chunks)
        return usual(chain, ids, chunks)

    monkeypatch.setattr(PrefixChain, "digests", digests)
    checked: list[bytes] = []
    for name in ("check", "forget"):
        monkeypatch.setattr(d.side._recent, name, checked.append)
    for request in waiting:
        assert d.side.matched_tokens(request, 0)[0] is None
    assert checked == [] and sum(calls) <= len(waiting)


def test_a_request_is_counted_once_however_often_it_asks(desk: Callable[..., Desk]) -> None:
    d, first, second = desk(), make_request("a"), make_request("b")
    d.put(first, 3)
    _load(d, first)
    counted = []
    for _ in range(3):
        for _ in patience():
            assert d.side.matched_tokens(second, 0)[0] is None
            if d.record("b").lookup is d.record("b").learned:
                break
            d.plan()
        d.now += 11  # the answer is old
    d.side.take(Report(ended=["a"]))
    for _ in range(3):
        assert d.matched(second) == (48, True)
        counted.append(d.lookups())
        d.now += 11
    assert counted == [{"partial": 2}] * 3


def _more_than_ranks_load(d: Desk) -> list[SimpleNamespace]:
    """Requests with nothing in common that are all in the store, as many as are loaded at a time loading."""
    requests = [make_request(f"q{at}", ids=[at + 7 * index % 61 for index in range(100)]) for at in range(20)]
    for request in requests:
        d.put(request, 6)
    for request in requests[:16]:
        _load(d, request)
    return requests[16:]


def test_loads_that_no_rank_begins_soon_hold_no_blocks(desk: Callable[..., Desk]) -> None:
    d = desk()
    late = _more_than_ranks_load(d)
    for _ in range(3):
        for request in late:
            assert d.side.matched_tokens(request, 0) == (None, False)
        d.now += 1
        d.plan()
    d.side.take(Report(ended=["q3"]))
    answers = [d.matched(request) if at == 0 else d.side.matched_tokens(request, 0) for at, request in enumerate(late)]
    assert answers == [(96, True), *[(None, False)] * 3], "the place that is free is promised to one"
    d.side.finished(late[0], [[]])
    assert d.matched(late[1]) == (96, True), "it was aborted"


def test_who_has_waited_as_long_as_computing_takes_is_computed(desk: Callable[..., Desk]) -> None:
    d = desk(decide="measured")
    request, other = _more_than_ranks_load(d)[:2]
    for _ in range(8):
        d.side._pays.prefill.observe(100, 0.0, 4.0)
    for _ in patience():
        assert d.side.matched_tokens(request, 0) == (None, False)
        if d.record(request.request_id).queued is not None:
            break
        d.plan()
    d.now += 1
    assert d.side.matched_tokens(request, 0) == (None, False)
    d.now += 5
    assert d.matched(request) == (0, False) and d.lookups() == {"hit": 16, "declined": 1}
    assert d.side.matched_tokens(other, 0) == (None, False), "its time begins when it finds no place"


@pytest.mark.parametrize("ends", ["named", "late", "aborted"])
def test_a_request_waits_until_a_thread_has_named_its_adapter_and_images(
    desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """A disk may hang, and an image has megabytes: the engine's loop reads neither."""
    d, go, threads = desk(), threading.Event(), set[int]()

    def find(number: int, name: str, path: str, since: float) -> AdapterFiles:
        threads.add(threading.get_ident())
        assert go.wait(30)
        return AdapterFiles(path, name)

    def name(item: Any) -> str:
        threads.add(threading.get_ident())
        return "cat"

    monkeypatch.setattr(d.side._requests._adapters, "find", find)
    monkeypatch.setattr(d.side._requests._media_names, "name", name)
    request = make_request(lora_request=LORA, mm_features=[image()], kv_transfer_params={"cuvee": {"store": False}})
    d.side.arrived(request)
    wait_until(lambda: bool(threads), "a thread has begun")
    for _ in range(3):
        assert d.side.matched_tokens(request, 0) == (None, False)
        d.plan()
    plain = make_request("plain")
    assert d.matched(plain) == (0, False), "others do not wait"
    if ends == "aborted":
        second = make_request("second", lora_request=LORA)
        d.side.arrived(second)
        queued = d.record("second").naming
        for each in (request, second):
            d.side.finished(each, [[]])
        assert queued is not None and queued.names.cancelled(), "there is one thread, which need not name it any more"
    elif ends == "late":
        d.now += 60
        assert d.side.matched_tokens(request, 0) == (0, False)
        assert d.recorder.totals()["uncached", "media"] == 1
    else:
        go.set()
        assert d.matched(request) == (0, False)
        record = d.record()
        assert record.scope.adapter and len(record.scope.media) == 1 and record.unstored == "asked"
    go.set()
    assert threads and threading.get_ident() not in threads


def test_without_prefix_caching_nobody_waits(desk: Callable[..., Desk]) -> None:
    d, first, second = desk(prefix_caching=False), make_request("a"), make_request("b")
    d.put(first, 3)
    _load(d, first)
    assert d.matched(second) == (48, True)


def test_an_id_whose_load_is_under_way_is_not_loaded_for_another_request(desk: Callable[..., Desk]) -> None:
    """The report of the load would be taken for the other's."""
    d, request = desk(), make_request()
    d.put(request, 3)
    _load(d, request)
    assert d.matched(make_request()) == (0, False)
    assert d.recorder.totals()["uncached", "error"] == 1


def test_a_load_may_be_allocated_some_steps_later(desk: Callable[..., Desk]) -> None:
    """As vLLM 0.33 defers loads."""
    d, request = desk(), make_request(tokens=3 * CHUNK + 1)
    d.put(request, 3)
    assert d.matched(request) == (3 * CHUNK, True)
    assert [d.plan().loads for _ in range(2)] == [[], []]
    d.side.allocated(request, [list(range(6))], 3 * CHUNK)
    (planned,) = d.plan().loads
    assert (planned.start, planned.end, planned.blocks) == (0, 3 * CHUNK, list(range(6)))


def test_chunks_are_stored_when_they_are_complete(desk: Callable[..., Desk]) -> None:
    d, request = desk(), make_request()
    d.matched(request)
    assert chunks_of(d.plan((request, 0, 40)).saves) == [0, 1]
    (save,) = d.plan((request, 40, 16), new=False).saves
    assert save.entry == Entry("chunk", d.digests(request)[2], 2 * CHUNK, CHUNK, ((104, 105),))
    assert chunks_of(d.plan((request, 56, 44), new=False).saves) == [3, 4, 5]
    assert d.plan((request, 100, 1), new=False).saves == []


def test_what_was_loaded_is_not_stored_again(desk: Callable[..., Desk]) -> None:
    d, request = desk(), make_request()
    d.put(request, 3)
    d.side.allocated(request, [list(range(13))], d.matched(request)[0])
    d.plan()
    assert chunks_of(d.plan((request, 48, 52)).saves) == [3, 4, 5]


def test_what_the_engine_had_is_stored_unless_it_is_known_to_be(desk: Callable[..., Desk]) -> None:
    d = desk()
    first, second, third = make_request("a"), make_request("b"), make_request("c")
    d.matched(first)
    d.plan((first, 0, 100))
    d.matched(second, 96)
    assert d.plan((second, 96, 4)).saves == [], "stored a moment ago"
    d.now += 61
    d.matched(third, 96)
    assert len(d.plan((third, 96, 4)).saves) == 6, "it may have been evicted since; the worker asks before it encodes"


def test_what_a_lookup_found_is_known(desk: Callable[..., Desk]) -> None:
    d, request = desk(min_tokens=64), make_request()
    d.put(request, 3)
    assert d.matched(request)[0] == 0
    assert chunks_of(d.plan((request, 0, 100)).saves) == [3, 4, 5]


def test_what_is_believed_no_more_is_not_kept(desk: Callable[..., Desk]) -> None:
    d = desk()
    known = d.side._recent
    for second in range(200):
        d.now += 1
        assert not known.check(b"%d" % second)
    assert known.check(b"140") and not known.check(b"139")
    assert len(known._seen) == 61


def test_generated_tokens_may_be_left_out(desk: Callable[..., Desk]) -> None:
    d, request = desk(store_generated=False), make_request(tokens=30)
    d.matched(request)
    d.plan((request, 0, 30))
    generate(request, 3)
    assert d.plan((request, 32, 1), new=False).saves == []


def test_positions_past_the_limit_are_not_stored(desk: Callable[..., Desk], caplog: pytest.LogCaptureFixture) -> None:
    """They are counted, prompt and answer, and the log tells it once."""
    d, request = desk(), make_request(tokens=4096 + 40)
    d.matched(request)
    saves = [*d.plan((request, 0, 4090)).saves, *d.plan((request, 4090, 46), new=False).saves]
    assert len(saves) == 4096 // CHUNK
    assert d.unstored() == {"positions": 40}
    for at in range(4136, 4140):
        generate(request, 1)
        d.plan((request, at, 1), new=False)
    assert d.unstored() == {"positions": 44}
    assert caplog.text.count("are not stored") == 1
    assert "40 tokens are not stored: they are beyond the last position of the model" in caplog.text


@pytest.mark.parametrize(
    ("chunk", "positions", "found"),
    [(16, 64, 64), (16, 60, 56), (16, 49, 48), (32, 64, 64), (32, 44, 40), (32, 33, 32)],
)
def test_positions_past_the_limit_are_not_asked_for(
    desk: Callable[..., Desk], chunk: int, positions: int, found: int
) -> None:
    """Whoever stored them: they would not decode."""
    d, request = desk(chunk_tokens=chunk, min_tokens=16), make_request(tokens=100)
    d.side._state.positions = positions
    d.put(request, 100 // chunk)
    ends = [end for end in range(BLOCK, 100, BLOCK) if end % chunk]
    d.put_tails(request, *ends)
    asked: set[str] = set()
    contains = d.store.contains

    def noted(keys: Sequence[str]) -> list[bool]:
        asked.update(keys)
        return contains(keys)

    d.store.contains = noted  # type: ignore[method-assign]
    assert d.matched(request) == (found, True)
    beyond = d.digests(request)[positions // chunk :] + [d.tail(request, end) for end in ends if end > positions]
    assert asked and not {store_key("", digest) for digest in beyond} & asked


def test_a_failed_load_is_computed_stored_again_and_not_tried_again(desk: Callable[..., Desk]) -> None:
    d, request = desk(), make_request()
    d.put(request, 3)
    d.side.allocated(request, [list(range(13))], d.matched(request)[0])
    plan = d.plan()
    d.side.take(Report([plan.step], ["r"], [], {"r"}, set(d.digests(request)[1:3])))
    assert d.matched(request, 16) == (0, False)
    assert chunks_of(d.plan((request, 16, 84)).saves) == [1, 2, 3, 4, 5]


def test_a_preempted_request_finds_its_own_chunks(desk: Callable[..., Desk]) -> None:
    d, request = desk(), make_request(tokens=60)
    assert d.matched(request)[0] == 0
    d.plan((request, 0, 60))
    generate(request, 10)
    d.put(request, 4)
    assert d.matched(request) == (64, True), "with the tokens it generated"


def test_a_preempted_request_stores_again_what_the_store_has_lost(desk: Callable[..., Desk]) -> None:
    d, request = desk(), make_request()
    d.matched(request)
    assert len(d.plan((request, 0, 100)).saves) == 6
    request.num_computed_tokens = 0
    d.now += 61
    assert d.matched(request) == (0, False)
    assert len(d.plan((request, 0, 100), new=False).saves) == 6


class Ranks:
    """A scheduler's side of two ranks and their workers, whose weights are `weights`."""

    def __init__(self, d: Desk) -> None:
        self.d = d
        self.models = [Served(), Served()]
        self.benches = [Bench(rank, weights=self.models[rank].weights) for rank in range(2)]

    def sleep(self) -> None:
        """As the engine does it: the reset comes first."""
        self.d.side.reset()
        for b in self.benches:
            b.worker.detach()
            b.worker.attach(b.cache)

    def report(self, plan: StepPlan) -> Report:
        """Execute a step that computes nothing."""
        for b in self.benches:
            b.worker.settle(plan.step, plan.names)
        report, other = (b.worker.report(plan.step) for b in self.benches)
        report.add(other)
        return report

    def step(self) -> None:
        self.d.side.take(self.report(self.d.plan()))

    def do(self, *events: str) -> None:
        """Steps, sleeps, resets, and other weights on the second rank."""
        for event in events:
            if event == "reset":
                assert self.d.side.reset()
            elif event.startswith("weights"):
                self.models[1].known = event != "weights unknown"
                self.models[1].set(event.removeprefix("weights ")[0])
            else:
                getattr(self, event)()

    def found(self, request: SimpleNamespace) -> int:
        for _ in patience():
            tokens, _ = self.d.side.matched_tokens(request, 0)
            if tokens is not None:
                return tokens
            self.step()
        raise AssertionError("no answer")


@pytest.fixture
def ranks(desk: Callable[..., Desk]) -> Iterator[Ranks]:
    made = Ranks(desk(shards=2))
    yield made
    for b in made.benches:
        b.worker.close()


@pytest.mark.parametrize(
    ("events", "found"),
    [
        (["sleep"], True),
        (["sleep", "step"], True),
        (["sleep", "sleep"], True),
        (["sleep", "step", "step", "sleep"], True),
        (["reset"], True),
        (["reset", "sleep"], True),
        (["sleep", "step", "reset"], True),
        (["reset", "step", "weights b", "step", "step"], False),
        (["sleep", "weights b"], False),
        (["weights b", "sleep"], False),
        (["weights b", "step", "step"], False),  # updated in place, and nobody said so
        (["weights b", "step", "step", "weights a", "step", "step"], True),
        (["weights b", "sleep", "step", "weights a", "sleep"], True),
        (["reset", "weights unknown"], False),
        (["sleep", "weights b", "weights a"], True),
        (["sleep", "weights unknown"], False),
    ],
)
def test_what_was_stored_is_found_if_all_ranks_have_the_same_weights(
    ranks: Ranks, events: list[str], found: bool
) -> None:
    request = make_request()
    ranks.d.put(request, 6)
    assert ranks.found(request) == 96
    ranks.do(*events)
    assert ranks.found(request) == ranks.found(make_request("new")) == 96 * found


@pytest.mark.parametrize(("weights", "found"), [("b", 96), ("unknown", 0)])
def test_what_other_weights_have_stored_is_found_by_engines_with_the_same_update(
    ranks: Ranks, desk: Callable[..., Desk], weights: str, found: int
) -> None:
    """One engine is told of the update by a reset, the other finds it by itself."""
    ranks.do(f"weights {weights}", "reset", "step")
    ranks.d.identity = ranks.d.side._requests.identity
    ranks.d.put(make_request(), 6)
    ranks.do("sleep")
    assert ranks.found(make_request()) == found
    if found:
        d = desk(shards=2)
        made = Ranks(d)
        d.store.entries.update(ranks.d.store.entries)
        made.do("weights b", "step", "step")
        assert made.found(make_request()) == found
        made.do("weights a", "step", "step")
        assert made.found(make_request()) == 0
        for b in made.benches:
            b.worker.close()


def test_until_the_workers_have_said_which_weights_they_have_nothing_is_looked_up(ranks: Ranks) -> None:
    d, request, saved = ranks.d, make_request(), make_request("saved")
    d.put(request, 6)
    ranks.do("sleep")
    d.side.arrived(request)
    for _ in range(3):  # planned ahead
        assert d.side.matched_tokens(request, 0) == (None, False)
        plan = d.plan()
        assert plan.names is (plan.step == 1)
    saves = d.plan((saved, 0, 100)).saves
    assert not {save.entry.digest for save in saves} & set(d.digests(saved)), "of other weights, for all we know"
    d.side.take(ranks.report(StepPlan(1, names=True)))
    assert ranks.found(request) == 96


def test_a_reset_while_the_workers_answer_stays_one(ranks: Ranks) -> None:
    request = make_request()
    ranks.do("sleep")
    report = ranks.report(ranks.d.plan())
    assert [(seen.step, seen.now == seen.first) for seen in report.seen] == [(1, True)] * 2
    ranks.d.identity = ranks.d.side._requests.identity
    ranks.d.put(request, 6)  # since the sleep
    ranks.do("reset")
    ranks.d.side.take(report)
    assert ranks.d.side.matched_tokens(request, 0) == (None, False), "it says nothing of the second reset"
    assert ranks.found(request) == 0, "stored while the weights had no name"


def test_requests_do_not_wait_for_ever_for_workers_that_say_nothing(ranks: Ranks) -> None:
    ranks.d.put(make_request(), 6)
    ranks.do("sleep")
    assert ranks.d.matched(make_request()) == (0, False)


def test_what_was_computed_before_a_reset_is_not_stored_after_it(desk: Callable[..., Desk]) -> None:
    d, running, waiting = desk(), make_request("a", num_computed_tokens=40), make_request("b", num_computed_tokens=0)
    for request in (running, waiting):
        d.matched(request)
    d.plan((running, 0, 40))
    d.side.reset()
    assert d.plan((running, 40, 60), new=False).saves == []
    assert d.unstored() == {"reset": 60}
    assert len(d.plan((waiting, 0, 100)).saves) == 6


@pytest.mark.parametrize("store", [False, None, 0, "false", "x" * 10**6])
def test_a_request_may_ask_not_to_be_stored(
    desk: Callable[..., Desk], store: Any, caplog: pytest.LogCaptureFixture
) -> None:
    d, request = desk(), make_request(tokens=108, kv_transfer_params={"cuvee": {"store": store}})
    d.put(request, 2)
    d.side.arrived(request)
    assert d.matched(request)[0] == 32, "it loads what others have stored"
    d.side.allocated(request, d.tables, 32)
    assert d.plan((request, 32, 76)).saves == []
    generate(request, 20)
    request.num_computed_tokens = 127
    assert d.plan((request, 108, 19), new=False).saves == []
    d.side.finished(request, d.tables)
    assert d.plan().last_saves == []
    assert d.unstored() == {"asked": 76 + 19}
    # What is not clear is not stored, and the client is told.
    warned = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warned) == (store is not False) and all(len(message) < 1000 for message in warned)
    assert all("store: must be true or false" in message for message in warned)


@pytest.mark.parametrize(
    ("wants", "error"),
    [
        ({"Store": False}, "kv_transfer_params.cuvee: has no field 'Store': did you mean 'store'"),
        ({"stor": False, "deadline_ms": 300}, "kv_transfer_params.cuvee: has no field 'stor'"),
        ({"deadlin_ms": 300}, "kv_transfer_params.cuvee: has no field 'deadlin_ms': did you mean 'deadline_ms'"),
        ("no", "kv_transfer_params.cuvee: must be an object, got str"),
        ([{"store": False}], "kv_transfer_params.cuvee: must be an object, got list"),
        ({"store": "false"}, "kv_transfer_params.cuvee.store: must be true or false"),
        ({"store": False}, ""),
        ({"deadline_ms": 300}, ""),
        (None, ""),
    ],
)
def test_a_misspelt_option_is_refused_in_the_answer_and_its_request_is_not_stored(
    desk: Callable[..., Desk], wants: Any, error: str
) -> None:
    """It may have been `store`. Without a deadline, none is counted."""
    d, request = desk(), make_request(kv_transfer_params={"cuvee": wants})
    d.side.arrived(request)
    assert d.matched(request) == (0, False)
    stored = len(d.plan((request, 0, 100)).saves)
    outcome = d.side.outcome(request)
    assert (outcome or {}).get("error", "").startswith(error) and (outcome is not None) == bool(error)
    assert stored == (0 if error or wants == {"store": False} else 6)
    assert ("deadlines", "refused") not in d.recorder.totals()


def test_a_reset_does_not_make_a_request_stored() -> None:
    for params, stored in (({"cuvee": {"store": False}}, 0), (None, 6)):
        d, request = Desk(), make_request(kv_transfer_params=params)
        d.side.arrived(request)
        d.side.reset()
        assert len(d.plan((request, 0, 100)).saves) == stored
        d.side.close()


def test_what_a_lookup_missed_is_not_known_any_more(desk: Callable[..., Desk]) -> None:
    d, first, second = desk(), make_request("a"), make_request("b")
    d.matched(first)
    assert len(d.plan((first, 0, 100)).saves) == 6
    d.put(first, 2)  # the others were evicted at once
    assert d.matched(second)[0] == 32
    d.side.allocated(second, [list(range(13))], 32)
    assert chunks_of(d.plan((second, 32, 68)).saves) == [2, 3, 4, 5]


def test_loads_that_do_not_pay_are_declined(desk: Callable[..., Desk]) -> None:
    d = desk(decide="measured")
    d.put(make_request(), 6)
    for _ in range(8):  # 16 000 tokens/s of prefill, 100 of loading
        d.matched(make_request("p", tokens=16))
        step = d.plan((make_request("p", tokens=16), 0, 16))
        d.side.take(Report([step.step], step_seconds={step.step: 1e-3}, restored=[Restored("load", 96, 0, 0.96)]))
    request = make_request("q")
    assert d.matched(request) == (0, False)
    assert d.matched(request) == (0, False), "the engine asks again, the answer is the same"
    assert d.lookups()["declined"] == 1 and d.side._pays._slow["load"] == 1
    always = desk()
    always.put(make_request(), 6)
    assert always.matched(make_request("q"))[0] == 96


def test_only_what_is_loaded_has_to_pay(desk: Callable[..., Desk]) -> None:
    """The engine has all but the last of six chunks, and loading all of them would take longer than computing that."""
    d, request = desk(decide="measured"), make_request()
    d.put(request, 6)
    for tokens in (16, 32, 64, 96) * 3:
        d.side._pays.prefill.observe(tokens, 0.0, tokens * 1.5e-4)
        d.side._pays.observe(Restored("load", tokens, 0, tokens * 1e-4))
    assert d.matched(request, 80) == (16, True)


def test_an_error_about_a_request_that_has_ended_leaves_nothing(
    desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch, contained: list[tuple[str, BaseException]]
) -> None:
    d, requests = desk(), [make_request("gone"), make_request("here")]
    for request in requests:
        d.side.arrived(request)
    d.side.finished(requests[0], [[]])
    monkeypatch.setattr(d.side, "_refuse", lambda name: 1 / 0)
    d.side.take(Report(failed={"gone", "here"}))
    assert len(contained) == 1 and not d.record("here").cached
    d.side.finished(requests[1], [[]])
    assert not d.side._records


def test_a_step_is_confirmed_once_all_ranks_have_ended_it_and_all_before(desk: Callable[..., Desk]) -> None:
    d = desk(shards=2)
    confirmed = []
    for steps in ([], [1, 1], [], [2, 2, 3, 3], [4, 5, 5], [6, 6]):  # the report of a rank's fourth step is missing
        d.side.take(Report(steps))
        confirmed.append(d.plan().confirmed)
    assert confirmed == [0, 1, 1, 3, 3, 3]


@pytest.mark.parametrize("ends", ["confirmed", "failed", "alone"])
def test_an_engine_without_requests_goes_on_until_its_ranks_store(desk: Callable[..., Desk], ends: str) -> None:
    """Otherwise what the last request has computed would wait for the next one. A failed step is not waited for."""
    d = desk(shards=2, setup={"alone": ends == "alone"})

    def waits() -> bool:
        return d.side.waits_for_a_step

    assert not waits()
    request = make_request()
    d.side.arrived(request)
    assert d.plan((request, 0, 100)).saves
    assert waits() is (ends != "alone")
    d.side.take(Report([1, 1] if ends == "confirmed" else [1]))
    steps = 0
    while waits():
        steps += 1
        d.plan()
        d.side.take(Report([1 + steps] * 2))
    assert steps == {"confirmed": 1, "failed": 4, "alone": 0}[ends]


def test_what_could_not_be_stored_is_stored_the_next_time(desk: Callable[..., Desk]) -> None:
    d, first, second = desk(), make_request("a"), make_request("b")
    d.matched(first)
    d.plan((first, 0, 100))
    d.side.take(Report([1], unsaved={d.digests(first)[1]}))
    d.matched(second, 96)
    assert chunks_of(d.plan((second, 96, 4)).saves) == [1]


def test_nothing_is_stored_or_loaded_before_the_weights_have_a_name() -> None:
    """Requests are computed. Those that the engine schedules once there is a name are cached like any other."""
    go = threading.Event()

    def make(stop: threading.Event) -> str:
        go.wait(60)
        return IDENTITY.model

    weights = WeightsName(make)
    desk = Desk(weights=weights)
    running, waiting = make_request("running", 100), make_request("waiting", 100)
    desk.put(running, 2)
    for request in (running, waiting):
        desk.side.arrived(request)
    assert desk.side.matched_tokens(running, 0) == (0, False)
    desk.side.allocated(running, desk.tables, 0)
    assert not desk.plan((running, 0, 100)).saves
    go.set()
    assert weights.wait(60)
    assert desk.matched(waiting) == (2 * CHUNK, True), "of an engine with the same weights"
    assert not desk.plan((running, 100, 1), new=False).saves, "it was scheduled without a name"
    for request in (running, waiting):
        desk.side.finished(request, desk.tables)
    assert desk.recorder.totals()["uncached", "unnamed"] == 1
    later = make_request("later", ids=range(100))
    desk.side.arrived(later)
    assert desk.matched(later) == (0, False)
    desk.side.allocated(later, desk.tables, 0)
    digests = [save.entry.digest for save in desk.plan((later, 0, 100)).saves]
    assert digests == desk.digests(later)
    desk.close()
    assert weights.current is None
