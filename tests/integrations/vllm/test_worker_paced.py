"""Storing with `store_share`: entries that wait for their time, overtake each other, are dropped, and are not lost."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from tests.integrations.stores.redis_server import wait_until
from tests.integrations.vllm.injection import PACED, POINTS, Injector
from tests.integrations.vllm.sides import BLOCK, CHUNK, LAYOUT, TENANT, Bench, Desk, generate, make_request
from tests.integrations.vllm.small_engine import SmallEngine

from cuvee.codec.identity import store_key
from cuvee.codec.paged import PagedCache
from cuvee.integrations.guard import Guard
from cuvee.integrations.stores import StoreError
from cuvee.integrations.vllm.messages import Entry, Kind, Save
from cuvee.integrations.vllm.metrics import Recorder
from cuvee.integrations.vllm.save_queue import CopiedSave
from cuvee.integrations.vllm.store_pace import MOST_PATIENCE, WINDOW_SECONDS, StorePace
from cuvee.integrations.vllm.worker_paced import PacedSaves

Contained = list[tuple[str, BaseException]]
NOTHING: Any = None
COST = 0.075


def entry(kind: Kind, name: str, start: int = 0) -> CopiedSave:
    return CopiedSave(Save(TENANT, Entry(kind, name.encode(), start, CHUNK)), NOTHING, NOTHING)


class Pool:
    """Runs jobs when it is told to."""

    def __init__(self, threads: int = 1) -> None:
        self.threads = threads
        self.jobs: list[Callable[[], object]] = []
        self.refuses = False

    def submit(self, work: Callable[..., object], *arguments: Any) -> None:
        if self.refuses:
            raise RuntimeError("can't start new thread")
        self.jobs.append(lambda: work(*arguments))


class Day:
    """`PacedSaves` without threads, and an engine that steps every 20 ms while it is busy; all on one fake clock.

    Attributes:
        done: entries by name, with the time at which each was done.
    """

    def __init__(self, share: float, threads: int = 1, at_once: bool = True) -> None:
        self.now, self.cpu = 1000.0, 0.0
        self.busy = True
        self.done: list[tuple[str, float]] = []
        self.released: list[str] = []
        self.recorder = Recorder()
        self.pace = StorePace(share, lambda: self.now)
        self.encoders, self.pacer = Pool(threads), Pool()
        self.at_once = at_once  # jobs are done as soon as they are handed over
        self.waits: list[float | None] = []
        self.end = self.now  # of `run`
        state: Any = SimpleNamespace(lock=threading.Lock(), recorder=self.recorder, timeout=30.0)
        pools: Any = SimpleNamespace(encoders=self.encoders, pacer=self.pacer)
        self.paced = PacedSaves(
            state, pools, Guard(self.recorder), self.pace, self.encode,
            lambda copied: self.released.append(copied.save.entry.digest.decode()), lambda: self.now, lambda: self.cpu,
        )  # fmt: skip
        self.paced._wait = self.wait  # type: ignore[method-assign]
        self.cost = COST
        self.fails = False

    def encode(self, copied: CopiedSave) -> None:
        self.cpu += self.cost
        self.compute(self.cost)
        if self.fails:
            raise RuntimeError("a bug")
        self.done.append((copied.save.entry.digest.decode(), self.now))

    def compute(self, seconds: float) -> None:
        """Time passes; a busy engine steps."""
        while seconds > 1e-12:
            self.now += min(seconds, 0.02)
            seconds -= 0.02
            if self.busy:
                self.pace.begin_step()
                self.pace.end_step()

    def wait(self, seconds: float | None) -> None:
        assert seconds is None or seconds > 0
        self.waits.append(seconds)
        if seconds is not None:
            self.compute(max(min(seconds, self.end - self.now), 1e-6))

    def run(self, seconds: float) -> None:
        """Do what the thread that watches the queue does."""
        self.end = self.now + seconds
        while self.now < self.end:
            before = len(self.waits)
            assert self.paced._step()
            if self.at_once:
                while self.encoders.jobs:
                    self.encoders.jobs.pop(0)()
            if self.waits[before:] == [None]:
                self.compute(self.end - self.now)
                self.now = max(self.now, self.end)

    def add(self, *entries: CopiedSave) -> None:
        for each in entries:
            self.paced.add(each)

    def count(self, name: str) -> float:
        return self.recorder.totals().get((name, ""), 0)


def chunks(count: int) -> list[CopiedSave]:
    return [entry("chunk", str(at), at * CHUNK) for at in range(count)]


@pytest.mark.parametrize("share", [0.02, 0.1, 0.5])
def test_a_busy_engine_loses_its_share_and_no_more(share: float) -> None:
    day = Day(share)
    day.compute(1.0)
    day.add(*chunks(400))
    day.run(30.0)
    allowed = 30 * share + share * WINDOW_SECONDS + COST
    assert 0.9 * 30 * share <= day.cpu <= allowed + 1e-6
    assert [name for name, _ in day.done] == [str(at) for at in range(len(day.done))]


def test_an_idle_engine_has_everything_stored_at_once() -> None:
    day = Day(0.02)
    day.busy = False
    day.add(*chunks(40))
    day.run(40 * COST)
    assert len(day.done) == 40 and set(day.waits) <= {None} and not day.count("deferred_seconds")


def test_what_waits_is_stored_when_the_engine_becomes_idle() -> None:
    day = Day(0.02)
    day.compute(1.0)
    day.add(*chunks(40))
    day.run(10.0)
    assert len(day.done) < 5
    day.busy = False
    day.run(MOST_PATIENCE + 40 * COST)
    assert len(day.done) == 40


def test_the_last_step_is_noticed_in_time() -> None:
    """Nobody tells that no further step comes, so what was asked in the middle of one is asked again soon."""
    day = Day(1e-6)
    day.compute(1.0)
    day.busy = False
    day.pace.begin_step()
    day.add(*chunks(3))
    day.run(0.1)
    assert len(day.done) == 1
    day.end += 100
    assert day.paced._step()
    assert (day.waits[-1] or math.inf) <= MOST_PATIENCE
    day.pace.end_step()
    day.run(MOST_PATIENCE + 3 * COST)
    assert len(day.done) == 3


def test_the_seconds_that_entries_waited_are_counted() -> None:
    day = Day(0.02)
    day.compute(1.0)
    day.add(*chunks(3))
    begun = day.now
    day.run(20.0)
    waited = sum(at - COST - begun for _, at in day.done) - (COST + 2 * COST)  # less what others took meanwhile
    assert len(day.done) == 3
    assert day.count("deferred_seconds") == pytest.approx(waited, abs=0.1)
    assert day.count("deferred_seconds") > 9, "of two, then of one"


def test_what_matters_more_overtakes() -> None:
    day = Day(0.02)
    day.compute(1.0)
    day.add(entry("tail", "tail"), entry("segment", "segment"), entry("chunk", "second", CHUNK))
    day.run(2.0)
    assert [name for name, _ in day.done] == ["second"]
    day.add(entry("chunk", "third", 2 * CHUNK), entry("chunk", "first", 0))
    day.run(30.0)
    assert [name for name, _ in day.done] == ["second", "first", "third", "segment", "tail"]


def test_an_entry_that_fails_is_charged_and_the_next_one_begins() -> None:
    day = Day(0.1)
    day.compute(1.0)
    day.fails = True
    day.add(*chunks(2))
    with pytest.raises(RuntimeError, match="a bug"):
        day.run(1.0)  # the future takes it
    day.fails = False
    assert day.pace.wait(0) == 0, "one is within the burst"
    day.run(2.0)
    assert day.cpu == 2 * COST and len(day.done) == 1 and not day.paced._running


def test_a_busy_engine_has_one_entry_encoded_at_a_time_and_an_idle_one_as_many_as_there_are_threads() -> None:
    day = Day(0.5, threads=3, at_once=False)
    day.compute(1.0)
    day.add(*chunks(10))
    day.run(0.2)
    assert len(day.encoders.jobs) == 1 and day.count("deferred_seconds") > 0
    day.busy = False
    day.run(MOST_PATIENCE)
    assert len(day.encoders.jobs) == 3
    deferred = day.count("deferred_seconds")
    day.run(1.0)
    assert len(day.encoders.jobs) == 3, "the rest waits in the queue, where it can be overtaken and dropped"
    assert day.count("deferred_seconds") == deferred, "not for its share"
    day.encoders.jobs.pop(0)()
    day.run(0.01)
    assert len(day.encoders.jobs) == 3


def test_entries_that_hang_hold_up_no_other() -> None:
    """As in the pool, which starts other threads in their places."""
    day = Day(0.5, at_once=False)
    day.compute(1.0)
    day.add(*chunks(3))
    day.run(29.0)
    assert len(day.encoders.jobs) == 1
    day.run(3.0)
    assert len(day.encoders.jobs) == 2
    day.run(28.0)
    assert len(day.encoders.jobs) == 2
    day.run(3.0)
    assert len(day.encoders.jobs) == 3


def test_without_a_thread_an_entry_is_released(contained: Contained) -> None:
    day = Day(0.1)
    day.encoders.refuses = True
    day.add(*chunks(1))
    day.run(0.1)
    assert day.released == ["0"] and not day.paced._running
    assert [where for where, _ in contained] == ["store"]
    other = Day(0.1)
    other.pacer.refuses = True
    with pytest.raises(RuntimeError, match="can't start new thread"):
        other.add(*chunks(1))
    assert len(other.paced.queue) == 0
    other.pacer.refuses = False
    other.add(*chunks(1))
    assert len(other.pacer.jobs) == 1, "it tries again"
    other.add(*chunks(1))
    assert len(other.pacer.jobs) == 1


def test_at_the_end_all_goes_to_the_threads_in_order() -> None:
    day = Day(0.001, threads=2, at_once=False)
    day.compute(1.0)
    day.add(entry("tail", "tail"), *reversed(chunks(5)))
    day.run(0.5)
    assert len(day.encoders.jobs) == 1
    day.paced.finish()
    assert not day.paced._step(), "the thread that watches ends"
    assert len(day.encoders.jobs) == 6
    day.add(entry("chunk", "late"))
    for job in day.encoders.jobs:
        job()
    assert [name for name, _ in day.done] == ["0", "1", "2", "3", "4", "tail", "late"]


# On the worker ---------------------------------------------------------------------------------------------------


class Paced(Bench):
    """A bench with `store_share` whose clock and whose CPU time stand still until a test turns them."""

    def __init__(self, share: float = 0.1, **options: Any) -> None:
        super().__init__(store_share=share, **options)
        self.now = 1000.0
        pace, paced = self.worker._pace, self.worker._saves._paced
        assert pace is not None and paced is not None
        self.pace, self.paced = pace, paced
        pace._clock = lambda: self.now
        paced._cpu_clock = lambda: 0.0

    def owe(self) -> None:
        """The engine is in a step, and storing has spent its share for an hour."""
        self.pace.begin_step()
        self.pace.charge(3600.0)

    def idle(self) -> None:
        """The engine's steps are over, and time passes."""
        self.pace.end_step()
        self.now += MOST_PATIENCE + 1
        with self.paced._changed:
            self.paced._changed.notify_all()

    @property
    def waiting(self) -> int:
        with self.worker._state.lock:
            return len(self.paced.queue)


@pytest.fixture
def paced() -> Iterator[Callable[..., Paced]]:
    made: list[Paced] = []

    def make(**options: Any) -> Paced:
        made.append(Paced(**options))
        return made[-1]

    yield make
    for each in made:
        each.store.before = lambda operation: None
        each.worker.close()


def request_tail(b: Bench, end: int, request: str = "r") -> Save:
    return replace(b.save_tail(list(range(16)), end), request=request)


def request_chunk(b: Bench, at: int, request: str = "r") -> Save:
    return replace(b.saves(list(range(16)), range(at, at + 1))[0], request=request)


def _wait(event: threading.Event) -> None:
    assert event.wait(30)


def tail_key(b: Bench, save: Save) -> str:
    return store_key(TENANT, save.entry.digest, b.rank)


def test_without_the_option_nothing_is_paced() -> None:
    b = Bench()
    try:
        b.store_all()
        assert b.worker._pace is None and b.worker._saves._paced is None
        assert not b.worker._pools.pacer._started
    finally:
        b.worker.close()


def test_entries_wait_while_the_engine_is_busy_and_come_back_right(paced: Callable[..., Paced]) -> None:
    b = paced()
    b.fill(list(range(16)), 8 * CHUNK)
    b.owe()
    b.worker.save([*b.saves(list(range(16)), range(3)), request_tail(b, 3 * CHUNK + BLOCK)])
    for tensor in b.cache.keys + b.cache.values:
        tensor.zero_()
    assert b.waiting == 4 and not b.store.entries
    report = b.worker.report(1)
    assert (report.metrics or {})["queue_depth||0"] == 4 and not report.unsaved
    b.idle()
    b.drain()
    b.worker.start_loads([b.load_tail(list(range(10, 17)), 0, 3 * CHUNK + BLOCK)], synchronous=True)
    assert b.held(list(range(10, 17)), 0, 3 * CHUNK + BLOCK)
    assert b.counts()["stored_chunks"] == 3 and b.counts()["stored_tails"] == 1
    assert b.worker._saves._pending == 0


def test_each_entry_is_copied_and_encoded_alone(paced: Callable[..., Paced], monkeypatch: pytest.MonkeyPatch) -> None:
    b = paced(threads=2)
    sizes: list[int] = []
    encode = b.codec.encode_paged

    def counted(cache: PagedCache, slots: Any, *more: Any, **named: Any) -> list[bytes]:
        sizes.append(cache.keys[0].shape[1])
        assert len(slots) == 1
        return encode(cache, slots, *more, **named)

    monkeypatch.setattr(b.codec, "encode_paged", counted)
    b.fill(list(range(16)), 8 * CHUNK)
    b.worker.save(b.saves(list(range(16)), range(8)))
    b.idle()
    b.drain()
    assert sizes == [CHUNK] * 8 and len(b.store.entries) == 8


def test_an_entry_is_charged_what_its_thread_took(paced: Callable[..., Paced]) -> None:
    b = paced(share=0.5)
    charged: list[float] = []
    charge = b.pace.charge

    def noted(seconds: float) -> None:
        charged.append(seconds)
        charge(seconds)

    b.pace.charge = noted  # type: ignore[method-assign]
    ticks = iter([100.0, 100.25])
    b.paced._cpu_clock = lambda: next(ticks)
    b.fill([0, 1], CHUNK)
    b.worker.save(b.saves([0, 1], range(1)))
    b.drain()
    wait_until(lambda: len(charged) == 2, "both are charged")
    assert sorted(charged)[1] == 0.25, "encoding"
    assert 0 <= sorted(charged)[0] < 0.25, "writing"


def test_a_step_is_seen_from_its_first_call_to_its_report(paced: Callable[..., Paced]) -> None:
    b = paced()
    assert b.pace._steps.seconds_until_idle(b.now) == 0
    firsts: list[Callable[[], None]] = [
        lambda: b.worker.save([]),
        lambda: b.worker.start_loads([], synchronous=False),
    ]
    for first in firsts:
        b.now += 0.1
        first()
        assert b.pace._steps.seconds_until_idle(b.now + 10) > 0
        b.worker.report(1)
        assert b.pace._steps.seconds_until_idle(b.now) > 0 == b.pace._steps.seconds_until_idle(b.now + 10)
    assert b.pace._steps.interval == pytest.approx(0.1)


def test_tails_make_room_for_chunks(paced: Callable[..., Paced], caplog: pytest.LogCaptureFixture) -> None:
    size = CHUNK * LAYOUT.bytes_per_token
    b = paced(max_pending_mb=2 * size / 1e6)
    b.fill(list(range(16)), 8 * CHUNK)
    b.owe()
    tails = [request_tail(b, 5 * CHUNK + BLOCK, "a"), request_tail(b, 6 * CHUNK + BLOCK, "b")]
    b.worker.save([*tails, request_chunk(b, 0)])
    assert b.waiting == 3 and b.worker._saves._pending == 2 * size
    assert "said once" not in caplog.text
    b.worker.save([request_chunk(b, 1)])
    assert b.waiting == 2 and b.worker._saves._pending == 2 * size
    assert b.worker.report(1).unsaved == {save.entry.digest for save in tails}
    assert b.counts()["tails_dropped"] == 2 and "stores_skipped" not in b.counts()
    assert caplog.text.count("said once") == 1 and "max_pending_mb" in caplog.text
    b.worker.save([request_chunk(b, 2), request_tail(b, 7 * CHUNK + BLOCK, "c")])
    assert b.counts()["stores_skipped"] == 2, "a chunk makes room for nothing"
    assert caplog.text.count("said once") == 1
    b.idle()
    b.drain()
    assert set(b.store.entries) == {b.key(0), b.key(1)}


def test_no_more_tails_are_dropped_than_needed_and_none_in_vain(paced: Callable[..., Paced]) -> None:
    size = CHUNK * LAYOUT.bytes_per_token
    b = paced(max_pending_mb=2.5 * size / 1e6)
    b.fill(list(range(16)), 8 * CHUNK)
    b.owe()
    old, new = request_tail(b, 5 * CHUNK + BLOCK, "a"), request_tail(b, 6 * CHUNK + BLOCK, "b")
    b.worker.save([old, new, request_chunk(b, 0)])
    b.worker.save([b.save_segment(list(range(16)), 5, CHUNK)])
    assert b.worker.report(1).unsaved == {new.entry.digest}, "the last one to be encoded"
    big = b.save_segment(list(range(16)), 5, 3 * CHUNK)
    b.worker.save([big])
    assert b.worker.report(2).unsaved == {big.entry.digest}, "it does not fit whatever is dropped"
    assert (b.counts()["tails_dropped"], b.counts()["stores_skipped"]) == (1, 1)
    b.idle()
    b.drain()
    assert len(b.store.entries) == 3 and tail_key(b, old) in b.store.entries


def test_a_step_admits_its_chunks_before_its_tails(paced: Callable[..., Paced]) -> None:
    size = CHUNK * LAYOUT.bytes_per_token
    b = paced(max_pending_mb=1.2 * size / 1e6)
    b.fill(list(range(16)), 8 * CHUNK)
    b.owe()
    tail = request_tail(b, 5 * CHUNK + BLOCK)
    b.worker.save([tail, request_chunk(b, 0)])
    assert b.worker.report(1).unsaved == {tail.entry.digest}
    b.idle()
    b.drain()
    assert set(b.store.entries) == {b.key(0)}


def test_a_whole_chunk_takes_the_place_of_its_requests_tail(
    paced: Callable[..., Paced], caplog: pytest.LogCaptureFixture
) -> None:
    b = paced()
    b.fill(list(range(16)), 8 * CHUNK)
    b.owe()
    own, others = request_tail(b, 3 * CHUNK + BLOCK), request_tail(b, 2 * CHUNK + BLOCK, "s")
    b.worker.save([own, others])
    b.worker.save([request_chunk(b, 3), request_chunk(b, 2)])
    assert b.worker.report(1).unsaved == {own.entry.digest}, "so that the scheduler does not take it for stored"
    assert b.counts()["tails_superseded"] == 1 and "tails_dropped" not in b.counts()
    assert "said once" not in caplog.text, "nothing is lost"
    b.idle()
    b.drain()
    assert set(b.store.entries) == {b.key(2), b.key(3), tail_key(b, others)}
    assert b.worker._saves._pending == 0


def test_a_superseded_tail_leaves_its_room_to_the_chunk(paced: Callable[..., Paced]) -> None:
    size = CHUNK * LAYOUT.bytes_per_token
    b = paced(max_pending_mb=1.2 * size / 1e6)
    b.fill(list(range(16)), 8 * CHUNK)
    b.owe()
    b.worker.save([request_tail(b, 3 * CHUNK + BLOCK)])
    b.worker.save([request_chunk(b, 3)])
    assert b.waiting == 1 and b.counts() == {**b.counts(), "tails_superseded": 1}
    assert "stores_skipped" not in b.counts()


def test_a_chunk_that_is_refused_supersedes_nothing(paced: Callable[..., Paced]) -> None:
    size = CHUNK * LAYOUT.bytes_per_token
    b = paced(max_pending_mb=1.8 * size / 1e6)
    b.fill(list(range(16)), 8 * CHUNK)
    b.owe()
    tail = request_tail(b, 3 * CHUNK + BLOCK)
    b.worker.save([request_chunk(b, 0), tail])
    chunk = request_chunk(b, 3)
    b.worker._saves._budget -= size  # none of it fits any more
    b.worker.save([chunk])
    assert b.worker.report(1).unsaved == {chunk.entry.digest} and b.waiting == 2


def test_a_tail_that_is_being_encoded_is_not_superseded(paced: Callable[..., Paced]) -> None:
    b = paced()
    go = threading.Event()
    b.store.before = lambda operation: _wait(go)
    b.fill(list(range(16)), 8 * CHUNK)
    tail = request_tail(b, 3 * CHUNK + BLOCK)
    b.worker.save([tail])
    wait_until(lambda: not b.waiting, "it is being encoded")
    b.worker.save([request_chunk(b, 3)])
    go.set()
    b.idle()
    b.drain()
    assert set(b.store.entries) == {b.key(3), tail_key(b, tail)} and "tails_superseded" not in b.counts()


@pytest.mark.parametrize("broken", ["contains", "put", "encode"])
def test_entries_that_fail_later_give_their_room_back(
    broken: str, paced: Callable[..., Paced], monkeypatch: pytest.MonkeyPatch
) -> None:
    b = paced()
    b.fill(list(range(16)), 8 * CHUNK)
    b.owe()
    b.worker.save(b.saves(list(range(16)), range(3)))
    assert b.worker._saves._pending == 3 * CHUNK * LAYOUT.bytes_per_token

    def fail(operation: str) -> None:
        if operation == broken:
            raise StoreError("no room")

    def bug(*_: object, **__: object) -> list[bytes]:
        raise RuntimeError("a bug")

    b.store.before = fail
    if broken == "encode":
        monkeypatch.setattr(b.codec, "encode_paged", bug)
    b.idle()
    b.drain()
    assert b.worker._saves._pending == 0 and b.worker.report(1).unsaved == set(b.digests[:3])
    wait_until(lambda: not b.paced._running, "no entry is under way")


def test_close_encodes_what_waits_at_once(paced: Callable[..., Paced], caplog: pytest.LogCaptureFixture) -> None:
    b = paced()
    b.fill(list(range(16)), 8 * CHUNK)
    b.owe()
    b.worker.save(b.saves(list(range(16)), range(8)))
    assert b.waiting == 8
    b.worker.close()
    assert len(b.store.entries) == 8 and not b.waiting
    assert "lost{encode}" not in b.counts() and "are lost" not in caplog.text
    assert not b.worker._pools.pacer._alive
    b.worker.save(b.saves(list(range(16)), range(1)))
    assert b.counts()["stores_skipped"] == 1


def test_close_is_bounded_and_counts_what_is_lost(paced: Callable[..., Paced]) -> None:
    b = paced(close_timeout=0.3, threads=1)
    b.fill(list(range(16)), 8 * CHUNK)
    b.owe()
    b.worker.save(b.saves(list(range(16)), range(4)))
    go, hangs = threading.Event(), threading.Event()

    def hang(operation: str) -> None:
        hangs.set()
        _wait(go)

    b.store.before = hang
    closing = threading.Thread(target=b.worker.close, daemon=True)
    closing.start()
    closing.join(10)
    assert not closing.is_alive() and hangs.is_set()
    assert b.counts()["lost{encode}"] == 4
    go.set()


def test_loads_wait_for_no_budget(paced: Callable[..., Paced]) -> None:
    b = paced()
    b.store_all()
    b.fill(list(range(16)), 8 * CHUNK)
    b.owe()
    b.worker.save([request_tail(b, 3 * CHUNK + BLOCK)])
    b.worker.start_loads([b.load([20, 3, 17, 4], 0, 2 * CHUNK)], synchronous=True)
    assert b.held([20, 3, 17, 4], 0, 2 * CHUNK) and b.waiting == 1
    b.worker.start_loads([b.load([9, 8], 0, CHUNK, "s")], synchronous=False)
    b.wait("s")
    assert b.held([9, 8], 0, CHUNK) and b.waiting == 1


# Over both sides ---------------------------------------------------------------------------------------------------


def test_the_scheduler_names_the_request_while_it_runs(paced: Callable[..., Paced]) -> None:
    d, request = Desk(), make_request("a request", tokens=2 * CHUNK + BLOCK)
    d.matched(request)
    saves = d.plan((request, 0, request.num_tokens)).saves
    assert [(save.entry.kind, save.request) for save in saves] == [
        ("chunk", "a request"), ("chunk", "a request"), ("tail", "a request"),
    ]  # fmt: skip
    generate(request, BLOCK)
    (chunk,) = d.plan((request, 2 * CHUNK + BLOCK, BLOCK), new=False).saves
    b = paced()
    b.fill(list(range(16)), 8 * CHUNK)
    b.owe()

    def placed(save: Save) -> Save:
        return replace(save, entry=save.entry.within(list(range(16)), BLOCK))

    b.worker.save([placed(save) for save in saves])
    assert b.waiting == 3
    b.worker.save([placed(chunk)])
    assert b.waiting == 3 and b.counts()["tails_superseded"] == 1
    d.side.take(b.worker.report(1))
    assert not d.side._known.check(saves[2].entry.digest), "the tail is stored when it comes again"
    assert d.side._known.check(chunk.entry.digest)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("point", [f"p.{name}" for name in PACED] + [name for name in POINTS if "w._saves" in name])
def test_a_fault_anywhere_costs_no_request(point: str, when: str, contained: Contained) -> None:
    e = SmallEngine(store_share=2.0)
    calls = 0

    def decide(at: str) -> str | None:
        nonlocal calls
        calls += at == point
        return when if at == point and calls in (1, 4) else None

    injector = Injector(e.side, e.worker, decide)
    for name in ("a", "b", "c"):
        e.submit(name, [(7 * at + ord(name)) % 61 for at in range(70)], wanted=12)
    e.run()
    for name in ("a", "b", "c"):
        e.submit(f"{name} again", [(7 * at + ord(name)) % 61 for at in range(76)])
    e.run()
    injector.undo()
    assert len(e.done) == 6
    assert injector.fired or point == "w._saves._fail"
    e.close()
