"""The scheduler's side: what it finds, what it asks for, what it stores. Requests have the attributes vLLM's have."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from tests.integrations.stores.dict_store import hold
from tests.integrations.vllm.sides import (
    CHUNK,
    IDENTITY,
    Bench,
    Desk,
    Served,
    generate,
    make_request,
    patience,
)  # fmt: skip
from tests.waiting import wait_until

from cuvee.codec.format.keys import make_keys
from cuvee.integrations.identity.weights_name import WeightsName
from cuvee.integrations.stores import StoreError
from cuvee.integrations.stores.breaker import GuardedStore
from cuvee.integrations.vllm.decision import Restored
from cuvee.integrations.vllm.messages import Report, Save, StepPlan
from cuvee.naming.identity import store_key


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
    assert d.plan().coding == f"lossless {new.hex()} {old.hex()}", "a rank with others stores and loads nothing"


def test_a_gap_ends_the_prefix(desk: Callable[..., Desk]) -> None:
    d, request = desk(), make_request()
    d.put(request, 6)
    del d.store.entries[store_key("", d.digests(request)[2])]
    missed: list[int] = []
    d.store.missed = missed.append  # type: ignore[method-assign, assignment]
    assert [d.matched(request) for _ in range(2)] == [(32, True)] * 2 and d.lookups() == {"partial": 1}, "once"
    assert sum(missed) == 1, "a tail in its place is a guess"


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


def test_one_lookup_that_hangs_costs_the_next_ones_nothing(desk: Callable[..., Desk]) -> None:
    """More of them than the pool has threads; afterwards the store is used again."""
    d = desk(lookup_timeout=1.0, setup={"remote_workers": True})
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
    for number in range(50):
        assert d.matched(make_request(f"next {number}")) == (0, False)
    assert len(d.store.calls) == calls
    d.side.take(Report())
    totals = d.recorder.totals()
    assert totals["store_operations", "memory:error"] >= 1 and totals["lookups", "timeout"] < 25, "most did not wait"
    go.set()
    later = 60.0
    wait_until(lambda: d.matched(make_request(f"again {time.monotonic()}")) == (96, True), "it is used again")
    assert d.side._state.lookup_threads.dismiss(10)


@pytest.mark.parametrize("remote", [False, True])
def test_misses_are_counted_once_wherever_the_workers_are(desk: Callable[..., Desk], remote: bool) -> None:
    """A worker in this process counts what the store of both did. In a process of its own it has another one."""
    d, request = desk(setup={"remote_workers": remote}), make_request()
    assert d.matched(request) == (0, False)
    for _ in range(2):
        d.side.take(Report())
    missed = d.store.counters()["memory"].misses
    assert missed == len(d.digests(request))
    assert d.recorder.totals().get(("store_operations", "memory:miss"), 0) == (missed if remote else 0)


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


def test_old_answers_are_asked_for_anew(desk: Callable[..., Desk]) -> None:
    d, request = desk(), make_request()
    d.put(request, 6)
    assert d.matched(request)[0] == 96
    d.store.entries.clear()
    assert d.matched(request)[0] == 96, "a moment later the answer stands"
    d.now += 11
    assert d.matched(request)[0] == 0


def _load(d: Desk, request: SimpleNamespace) -> StepPlan:
    d.side.allocated(request, [list(range(20))], d.matched(request)[0])
    return d.plan()


@pytest.mark.parametrize(
    ("ends", "computed", "found"),
    [
        ("ended", 56, (0, False)),  # the engine has it now
        ("ended", 0, (56, True)),  # or not: then it is loaded
        ("failed", 0, (0, False)),  # and the store has lost it
        ("aborted", 0, (56, True)),
    ],
)
def test_what_another_request_loads_is_waited_for(
    desk: Callable[..., Desk], ends: str, computed: int, found: tuple[int, bool]
) -> None:
    d, first, second, third = desk(min_tokens=8), *(make_request(*each) for each in (("a",), ("b",), ("c", 40)))
    d.put(first, 3)
    d.put_tails(first, 56)
    plan = _load(d, first)
    for other, has in ((second, 48), (second, 0), (third, 0)):
        for _ in range(5):
            assert d.side.matched_tokens(other, has)[0] is None
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


def _more_than_ranks_load(d: Desk) -> list[SimpleNamespace]:
    """Requests with nothing in common that are all in the store, as many as are loaded at a time loading."""
    requests = [make_request(f"q{at}", ids=[at + 7 * index % 61 for index in range(100)]) for at in range(20)]
    for request in requests:
        d.put(request, 6)
    for request in requests[:16]:
        _load(d, request)
    return requests[16:]


def test_loads_that_no_rank_begins_soon_hold_no_blocks(desk: Callable[..., Desk]) -> None:
    d = desk(lookup_timeout=60.0)
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


def test_what_a_lookup_found_is_known(desk: Callable[..., Desk]) -> None:
    d, request = desk(min_tokens=64), make_request()
    d.put(request, 3)
    assert d.matched(request)[0] == 0
    assert chunks_of(d.plan((request, 0, 100)).saves) == [3, 4, 5]


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
        (["sleep", "step", "step", "sleep"], True),
        (["reset", "sleep"], True),
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


@pytest.mark.parametrize("store", [False, 0, "x" * 10**6])
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
    d.side.reset()
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
        ({"stor": False, "deadline_ms": 300}, "kv_transfer_params.cuvee: has no field 'stor': did you mean 'store'"),
        ([{"store": False}], "kv_transfer_params.cuvee: must be an object, got list"),
        ({"store": "false"}, "kv_transfer_params.cuvee.store: must be true or false"),
        ({"deadline_ms": 300}, ""),
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
    assert stored == (0 if error else 6)
    assert ("deadlines", "refused") not in d.recorder.totals()


@pytest.mark.parametrize("beside", [{"cuvee": {"explain": True}}, {}])
@pytest.mark.parametrize("key", ["cuve", "cuvvee", "Cuvee", "CUVEE", "cuveé", "cuvee ", "cvuee", "cuvee_params"])
def test_a_misspelt_key_is_refused_in_the_answer_and_its_request_is_not_stored(
    desk: Callable[..., Desk], key: str, beside: dict[str, Any]
) -> None:
    d, request = desk(), make_request(kv_transfer_params={**beside, key: {"store": False}})
    d.side.arrived(request)
    assert d.matched(request) == (0, False) and d.plan((request, 0, 100)).saves == []
    outcome = d.side.outcome(request)
    assert outcome == {"error": f"kv_transfer_params: has no field {key!r}: did you mean 'cuvee'?"}


@pytest.mark.parametrize("field", ["deadline_ms", "store", "blend", "segments", "cost", "explain"])
@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize("ours", [{}, {"cuvee": {"store": False}}])
def test_a_field_outside_of_its_object_is_told_in_the_answer(
    desk: Callable[..., Desk], field: str, value: bool, ours: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """It may be another connector's, so the request is stored, unless it may be a wish not to be."""
    d, request = desk(), make_request(kv_transfer_params={field: value, "do_remote_decode": False, **ours})
    d.side.arrived(request)
    assert d.matched(request) == (0, False)
    stored = len(d.plan((request, 0, 100)).saves)
    assert stored == (0 if ours or (field, value) == ("store", False) else 6)
    told = f'kv_transfer_params: cuvee reads no field {field!r} here: if meant, give {{"cuvee": {{"{field}": …}}}}'
    assert d.side.outcome(request) == {"error": told}
    assert (told in caplog.text) == (stored > 0 or (field, value) == ("store", False))


@pytest.mark.parametrize("field", ["cache_salt", "cacheSalt", "tenant", "TENANT_ID"])
@pytest.mark.parametrize("inside", [False, True])
def test_a_misplaced_tenant_never_has_its_request_stored_for_all(
    desk: Callable[..., Desk], field: str, inside: bool
) -> None:
    params = {field: "a"}
    d, request = desk(), make_request(kv_transfer_params={"cuvee": params} if inside else params)
    d.side.arrived(request)
    assert d.matched(request) == (0, False) and d.plan((request, 0, 100)).saves == []
    told = d.side.outcome(request)
    assert told is not None and f"has no field {field!r}" in told["error"]
    assert inside or told["error"].endswith("the request's own field cache_salt")


def test_keys_of_other_connectors_are_theirs(desk: Callable[..., Desk]) -> None:
    keys = "do_remote_decode do_remote_prefill remote_engine_id remote_block_ids remote_host remote_port tp_size "
    keys += "lmcache.tag transfer_id max_offload_tokens max_load_tokens hidden_states_path priorities queue cache cue"
    others: dict[Any, Any] = {**dict.fromkeys(keys.split()), "x" * 10**6: 1, 7: 1}
    d, request = desk(), make_request(kv_transfer_params={"cuvee": {"store": True}, **others})
    d.side.arrived(request)
    assert d.matched(request) == (0, False) and len(d.plan((request, 0, 100)).saves) == 6
    assert d.side.outcome(request) is None


def test_only_what_is_loaded_has_to_pay(desk: Callable[..., Desk]) -> None:
    """The engine has all but the last of six chunks, and loading all of them would take longer than computing that."""
    d, request = desk(decide="measured"), make_request()
    d.put(request, 6)
    for tokens in (16, 32, 64, 96) * 3:
        d.side._pays.prefill.observe(tokens, 0.0, tokens * 1.5e-4)
        d.side._pays.observe(Restored("load", tokens, 0, tokens * 1e-4))
    assert d.matched(request, 80) == (16, True)


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
