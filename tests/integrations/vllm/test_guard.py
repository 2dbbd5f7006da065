"""No request, no store and no error of ours ends the engine: whatever fails inside, every request is computed."""

from __future__ import annotations

import json
import logging
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.integrations.stores.dict_store import DictStore
from tests.integrations.vllm.injection import POINTS, Injector
from tests.integrations.vllm.sides import Bench, Desk, image, make_request
from tests.integrations.vllm.small_engine import SmallEngine

from cuvee.integrations.core.guard import Guard
from cuvee.integrations.stores.base import TierCounters
from cuvee.integrations.vllm.messages import Report, Seen
from cuvee.integrations.vllm.metric_table import METRICS
from cuvee.integrations.vllm.metrics import Recorder
from cuvee.integrations.vllm.scheduler import side as scheduler

Contained = list[tuple[str, BaseException]]
A, B, C = (random.Random(seed).choices(range(60), k=count) for seed, count in ((1, 70), (2, 40), (3, 44)))
SEGMENTS = {"cuvee": {"segments": [[16, 32], [32, 48]]}}
BLENDED = {"cuvee": {"segments": [[20, 36], [36, 52]]}}
# Where a fault leaves no trace at `contained`, because it is one of those that the code expects there.
LOUD = {
    "s._loads.match",
    "s._record_of",
    "s._saves.completed",
    "s._saves.unchanged",
    "s._blends.budget",
    "w.saves._copy",
    "c.digests",
}


def _day(e: SmallEngine, name: str) -> None:
    """All that requests do: prompts that are new, found, found in part, blended, aborted and preempted; a reset."""
    e.submit(f"{name} a", A)
    e.submit(f"{name} b", B, cache_salt="other")
    e.submit(f"{name} segments", [*A[:16], *B[:16], *A[16:32]], kv_transfer_params=SEGMENTS)
    e.run()
    e.submit(f"{name} again", [*A, *B[:9]])
    e.submit(f"{name} other", [*B, *C[:5]], cache_salt="other")
    e.submit(f"{name} preempted", A[:50])
    e.submit(f"{name} aborted", [*A[:60], 3])
    e.submit(f"{name} blended", [*B[:20], *A[16:32], *B[:16], *range(6)], kv_transfer_params=BLENDED)
    e.step()
    e.step()
    e.abort(f"{name} aborted")
    e.preempt(f"{name} preempted")
    e.run()


def _trouble(e: SmallEngine) -> None:
    """Entries that are damaged, a store that takes nothing, a reset in the middle, a client that asks for nonsense."""
    e.submit("stored", C)
    e.run()
    for key in e.store.entries:
        e.store.entries[key] = b"damaged"
    e.submit("damaged", [*C, 1])
    e.run()

    def full(operation: str) -> None:
        if operation == "put":
            raise OSError("no space left")

    e.store.before = full
    e.submit("not stored", [*C[::-1], 1])
    e.submit("segments", [*C, *C], kv_transfer_params=SEGMENTS)
    e.submit("nonsense", C, kv_transfer_params={"cuvee": 5})
    e.step()
    e.side.reset()
    e.run()
    e.store.before = lambda operation: None


@pytest.mark.parametrize("point", POINTS)
def test_a_fault_anywhere_costs_no_request(
    point: str, engine: Callable[..., SmallEngine], contained: Contained
) -> None:
    """Once before the call and once after it, in the middle of the work. Then everything works as before."""
    if _days_with_faults(point, {1: "before", 4: "after"}, engine, contained) < 4:
        _days_with_faults(point, {1: "after"}, engine, contained)


def _days_with_faults(
    point: str, faults: dict[int, str], engine: Callable[..., SmallEngine], contained: Contained
) -> int:
    """Let some of the calls of a point fail; how often it was called."""
    e = engine()
    calls = 0

    def decide(at: str) -> str | None:
        nonlocal calls
        calls += at == point
        return faults.get(calls) if at == point else None

    injector = Injector(e.side, e.worker, decide)
    for day in ("first", "second"):
        _day(e, day)
        assert e.side.reset() or contained
    if not calls:  # it takes trouble to get there
        _trouble(e)
    kinds = ("a", "b", "segments", "again", "other", "preempted", "blended")
    expected = [f"{day} {kind}" for day in ("first", "second") for kind in kinds]
    assert set(expected) <= set(e.done)
    injector.undo()
    assert sum(injector.fired.values()) or point in NEVER, f"{point} was called {calls} times"
    assert point not in LOUD or contained
    if e.side._state.stores:  # nothing was switched off
        loads = _loads(e)
        e.submit("late", B, cache_salt="late")
        e.run()
        e.submit("later", [*B, 1, 2, 3], cache_salt="late")
        e.run()
        assert _loads(e) > loads, "what was stored is loaded"
    else:
        assert point in ("s._forget", "s._state.clock") or "rename" in point
    return calls


def _loads(e: SmallEngine) -> float:
    """Loads that have ended."""
    return sum(value for (name, _), value in e.recorder.totals().items() if name == "load_seconds")


TEXTS = [random.Random(seed).choices(range(60), k=90) for seed in (4, 5)]
EVENTS = st.one_of(
    st.tuples(st.just("submit"), st.integers(0, 5), st.sampled_from([20, 33, 40, 57, 73, 90]), st.integers(0, 3)),
    st.tuples(st.just("step"), st.integers(1, 4)),
    st.tuples(st.sampled_from(["abort", "preempt"]), st.integers(0, 5)),
    st.tuples(st.sampled_from(["damage", "lose"]), st.integers(0, 20)),
    st.tuples(st.sampled_from(["run", "run", "run", "reset"])),
)


@settings(max_examples=60, deadline=None)
@given(chunk=st.sampled_from([16, 32]), events=st.lists(EVENTS, min_size=5, max_size=40))
def test_whatever_happens_no_page_is_wrong_and_nothing_is_left(chunk: int, events: list[tuple[Any, ...]]) -> None:
    """Prompts of two texts and tenants, ids that come again, and entries that are damaged or go; see `SmallEngine`."""
    e, number = SmallEngine(chunk_tokens=chunk), 0
    for kind, *figures in events:
        live = {request.request_id for request in (*e.waiting, *e.loading, *e.running, *e.gone.values())}
        if kind == "submit" and f"{figures[0]}" not in live:
            name, length, how = figures
            ids, number = [*TEXTS[how % 2][:length], number % 60], number + 1
            e.submit(f"{name}", ids, 3 + 9 * (how % 2), cache_salt="other" if how > 2 else None)
        elif kind == "step":
            for _ in range(figures[0]):
                e.step()
        elif kind in ("abort", "preempt"):
            getattr(e, kind)(f"{figures[0]}")
        elif kind in ("damage", "lose") and (keys := sorted(e.store.entries)):
            key = keys[figures[0] % len(keys)]
            blob = e.store.entries.pop(key)
            if kind == "damage":
                e.store.entries[key] = blob[:-9] + bytes([blob[-9] ^ 1]) + blob[-8:]
        elif kind == "run":
            e.run()
        elif kind == "reset":
            assert e.side.reset()
    e.run()
    text = random.Random(6).choices(range(60), k=57)
    for name in ("new", "again"):
        e.submit(name, text)
        e.run()
    assert e.recorder.totals()["loaded_tokens", ""] >= 56
    e.close()


# Calls that these days do not make: there are other tests of them.
NEVER = {
    "s._requests._adapters.find",
    "s._requests._media_names.name",
    "s._state.store.report_overdue",
    "s._pays.judge",
    "s._pays.note",
    "w.loads._restorer._restore_drafts",
}


@pytest.mark.parametrize("point", [name for name in POINTS if name not in {"s._loads.release", "s._blends.drop"}])
def test_what_always_fails_costs_no_request_either(
    point: str, engine: Callable[..., SmallEngine], contained: Contained
) -> None:
    e = engine(load_timeout=0.3, lookup_timeout=0.3)
    injector = Injector(e.side, e.worker, lambda at: "before" if at == point else None)
    _day(e, "all")
    injector.undo()
    assert len(e.done) == 7


def test_the_guard_lets_out_what_ends_the_process_alone(
    contained: Contained, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "cuvee")
    recorder = Recorder()
    guard = Guard(recorder)
    for error in (KeyboardInterrupt, SystemExit):
        with pytest.raises(error), guard("plan"):
            raise error
    assert not contained
    with guard("plan", then=lambda: 1 / 0):  # which may fail, too
        raise KeyError("a")
    monkeypatch.setattr(recorder, "count", None)
    for _ in range(2):
        with guard("plan"):
            raise OSError("nobody can count it")
    assert [type(error) for _, error in contained] == [KeyError, ZeroDivisionError, OSError, OSError]
    assert recorder.totals() == {("contained", "plan"): 2}
    levels = [record.levelname for record in caplog.records]
    assert levels.count("DEBUG") == 1 and all(record.exc_info for record in caplog.records), "once per kind"


# What clients and stores may say -------------------------------------------------------------------------------------


def _item(name: Any = "x", start: Any = 3, tokens: Any = 8) -> SimpleNamespace:
    return image(name, start, tokens)


MEDIA: dict[str, list[SimpleNamespace]] = {
    "no uuid": [_item(None)],
    "huge uuid": [_item("x" * 5000)],
    "no tokens": [_item(tokens=0)],
    "before the prompt": [_item(start=-1)],
    "beyond the prompt": [_item(start=35)],
    "beyond all numbers": [_item(start=1 << 70)],
    "half a token": [_item(start=0.5)],
    "the second is bad": [_item(), _item("")],
}


@pytest.mark.parametrize("media", MEDIA.values(), ids=MEDIA)
def test_media_without_name_or_place_are_computed(
    media: list[SimpleNamespace], engine: Callable[..., SmallEngine]
) -> None:
    """`"uuid": ""` in a chat message used to end the engine."""
    e = engine()
    e.submit("r", B, mm_features=media)
    e.submit("s", B)
    e.run()
    assert sorted(e.done) == ["r", "s"]
    assert e.recorder.totals()["uncached", "media"] == 1
    alone = engine()
    alone.submit("s", B)
    alone.run()
    assert e.store.entries.keys() == alone.store.entries.keys(), "what r computed was stored"


@pytest.mark.parametrize("salt", [7, ["x"], b"x", False, "x" * 5000])
def test_salts_that_are_no_text_are_not_cached(salt: Any, engine: Callable[..., SmallEngine]) -> None:
    """Not even one that is false: it must not get the cache of those without a salt."""
    e = engine()
    e.submit("r", B)
    e.run()
    stored = dict(e.store.entries)
    request = make_request("odd", ids=B, cache_salt=salt)
    e.side.arrived(request)
    assert e.side.matched_tokens(request, 0) == (0, False)
    e.side.finished(request, [[]])
    assert e.recorder.totals()["uncached", "salt"] == 1 and e.store.entries == stored


def _deep(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


DEEP = _deep(100_000)
# `test_blend_options.py` has what may be wrong with a field.
PARAMETERS: list[Any] = ["x", [1], {"cuvee": DEEP}, {"cuvee": {"segments": [DEEP]}}, {"cuvee": {"cost": DEEP}}]
PARAMETERS += [{"cuvee": {name: 1}} for name in ("", "x" * 100_000, "\ud800")]
# Names and places that are odd, and yet all right.
ODD_REQUESTS: list[dict[str, Any]] = [
    *({"cache_salt": salt} for salt in ("", "\ud800", "\0", "../..", "x" * 4096)),
    *({"mm_features": [_item("\ud800\0| \n"), *more]} for more in ([_item("y")], [_item("x"), _item("x", 5, 9)])),
    *({"kv_transfer_params": params} for params in PARAMETERS),
]


@pytest.mark.parametrize("at", range(len(ODD_REQUESTS)))
def test_odd_requests_are_cached(at: int, engine: Callable[..., SmallEngine]) -> None:
    e, odd = engine(), ODD_REQUESTS[at]
    e.submit("r", B, **odd)
    e.run()
    e.submit("again", [*B, 1], **odd)
    e.run()
    assert sorted(e.done) == ["again", "r"] and (_loads(e) == 1 or "kv_transfer_params" in odd)


@pytest.mark.parametrize("adapter", [("", ""), ("\ud800", "x"), (7, "x"), ("x", None), ("x", "\0")])
def test_odd_adapters_are_harmless(
    adapter: tuple[Any, Any], engine: Callable[..., SmallEngine], contained: Contained
) -> None:
    e = engine()
    e.submit("r", A, lora_request=SimpleNamespace(lora_int_id=1, lora_name=adapter[0], lora_path=adapter[1]))
    e.submit("s", A)
    e.run()
    assert sorted(e.done) == ["r", "s"]


def test_ids_may_be_used_again(engine: Callable[..., SmallEngine]) -> None:
    """Of requests that ended, were aborted in any state, or were not cached."""
    e = engine()
    e.submit("r", A, cache_salt="x" * 5000)
    e.run()
    for ids in (A, B, [*A, 1], A[:30]):
        e.submit("r", ids)
        e.run()
    for steps in range(6):
        e.submit("r", [*A, steps])
        for _ in range(steps):
            e.step()
        e.abort("r")
        while e.gone:
            e.step()
    e.submit("r", [*A, *B])
    e.run()
    assert len(e.done) >= 6
    assert e.recorder.totals()["uncached", "salt"] == 1


class _Lying(DictStore):
    """A store whose counters are what a test says."""

    said: Any = None

    def counters(self) -> dict[str, TierCounters]:
        if isinstance(self.said, Exception):
            raise self.said
        return self.said  # type: ignore[no-any-return]


ODD: tuple[Any, ...] = (-5, "text", b"abc", None, [], float("nan"), float("inf"), 10**400, 1 << 64, -(1 << 64), 1 << 62)


@pytest.mark.parametrize(
    "said",
    [
        *(RuntimeError("no counters"), None, 7, {"disk": None}, {"": TierCounters()}, {7: TierCounters()}),
        *({name: TierCounters(hits=3)} for name in ("a|b", "\ud800", "x" * 10_000)),
        *(
            {"disk": replace(TierCounters(), **{field: odd})}
            for field, odds in (("hits", ODD), ("queued", ODD[:3]), ("bytes", ODD[3:6]))
            for odd in odds
        ),
    ],
)
def test_a_store_may_say_anything_of_itself(
    said: Any, engine: Callable[..., SmallEngine], contained: Contained
) -> None:
    """It used to end the engine's step. What is sent on is checked at every step of this engine."""
    store = _Lying()
    store.said = {}
    e = engine(store=store)
    store.said = said
    e.submit("r", A)
    e.run()
    e.submit("again", [*A, 1])
    e.run()
    drained = e.recorder.drain() or {}
    assert "NaN" not in json.dumps(drained)
    assert all(type(value) is float or -(1 << 63) <= value < 1 << 63 for value in drained.values())
    assert _loads(e) == 1
    store.said = {}


# What the engine waits for -------------------------------------------------------------------------------------------


def test_a_load_that_cannot_be_planned_is_over_and_its_blocks_are_invalid(contained: Contained) -> None:
    """Of a request with blocks of its own in front, which others may share: these stay valid."""
    d = Desk()
    request = make_request(tokens=100)
    d.put(request, 6)
    assert d.matched(request, 32) == (64, True)
    d.side._state.is_needed = lambda *given: 1 / 0  # type: ignore[method-assign, assignment]
    d.side.allocated(request, [list(range(12))], 64)
    plan = d.plan()
    (load,) = plan.loads
    assert not load.entries and load.blocks == list(range(4, 12)) and d.plan().loads == [], "once"
    b = Bench()
    b.load_now(plan.loads)
    assert b.worker.loads.take_arrived() == {"r"} and b.worker.loads.take_invalid_blocks() == set(range(4, 12))
    report = b.worker.report(1)
    assert set(report.ended) == report.failed == {"r"}
    d.side.take(report)
    assert d.side.matched_tokens(request, 0) == (0, False)
    d.side.finished(request, [[]])
    b.worker.close()


def test_an_end_that_fails_leaves_no_load_that_others_wait_for(contained: Contained) -> None:
    """The request is aborted while ranks load its prefix."""
    d = Desk()
    request, other = make_request("r"), make_request("s")
    d.put(request, 6)
    d.side.allocated(request, [list(range(12))], d.matched(request)[0])
    assert d.side._records.loading
    d.side._loads.release = lambda record: 1 / 0  # type: ignore[method-assign, assignment]
    d.side.finished(request, [[]])
    assert not d.side._records.loading and not len(d.side._records)
    assert d.matched(other) == (96, True)


def test_a_reset_that_fails_stops_the_cache(contained: Contained) -> None:
    """What is stored may be of other weights."""
    d = Desk()
    d.put(make_request(), 6)
    request = make_request("before")
    d.side.arrived(request)
    d.side._forget = lambda: 1 / 0  # type: ignore[method-assign, assignment]
    assert d.side.reset() is False
    assert d.side.matched_tokens(request, 0) == (0, False)
    assert d.matched(make_request("after")) == (0, False)
    assert d.plan((make_request("after"), 0, 100)).saves == []
    del d.side._forget
    assert d.side.reset() is True
    d.identity = d.side._requests.identity
    d.put(make_request(), 6)
    assert d.matched(make_request("again")) == (96, True)


def test_a_sleep_does_not_undo_a_reset_that_failed(contained: Contained) -> None:
    d = Desk()
    d.put(make_request(), 6)
    d.side._forget = lambda: 1 / 0  # type: ignore[method-assign, assignment]
    assert d.side.reset() is False
    del d.side._forget
    d.side.take(Report([d.plan().step]))
    assert d.side.reset() is True
    slept = d.plan().step
    d.side.take(Report([slept], seen=[Seen(slept, 0, b"w", b"x")]))
    assert d.matched(make_request()) == (0, False)


def test_one_load_that_cannot_begin_does_not_take_the_others_along(contained: Contained) -> None:
    b = Bench()
    b.store_all()
    submit, loads = (
        b.worker._pools.loaders.submit,
        [b.load(list(range(at, at + 4)), 0, 32, str(at)) for at in (0, 4, 8)],
    )

    def failing(work: Any, job: Any, ready: Any) -> Any:
        if job.load.request == "4":
            raise RuntimeError("can't start new thread")
        return submit(work, job, ready)

    b.worker._pools.loaders.submit = failing  # type: ignore[method-assign]
    b.load_now(loads)
    assert b.worker.loads.take_arrived() == {"0", "4", "8"} and b.worker.loads.take_invalid_blocks() == {4, 5, 6, 7}
    assert b.held([0, 1, 2, 3], 0, 32) and b.held([8, 9, 10, 11], 0, 32)
    assert b.worker.report(1).failed == {"4"}
    b.worker.close()


def test_every_hook_has_a_label() -> None:
    folder = Path(scheduler.__file__).parents[1]
    source = "".join(file.read_text() for file in folder.rglob("*.py"))
    assert set(re.findall(r"self\._guard\(\s*\"(\w+)\"", source)) == set(METRICS["contained"].values)
