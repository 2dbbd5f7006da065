"""`ThreadPool`: hanging jobs block neither later jobs nor the exit of the process."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from typing import Any

import pytest
from tests.integrations.stores.dict_store import Held
from tests.integrations.stores.fake_clock import Clock
from tests.waiting import PATIENCE, wait_until

from cuvee.integrations.stores import threads
from cuvee.integrations.stores.threads import ThreadPool


@pytest.fixture
def pool(clock: Clock) -> Iterator[ThreadPool]:
    made = ThreadPool(2, "pool", patience=5.0, clock=clock)
    yield made
    made.dismiss(0, cancel=True)
    wait_until(lambda: alive() == 0, "the threads end, which the next test counts")


@pytest.fixture
def hang() -> Iterator[Callable[[], Held]]:
    made: list[Held] = []

    def make() -> Held:
        made.append(Held())
        return made[-1]

    yield make
    for each in made:
        each.set()


def alive(name: str = "pool-") -> int:
    return sum(thread.name.startswith(name) for thread in threading.enumerate())


def test_jobs_are_done_and_their_errors_kept(pool: ThreadPool) -> None:
    futures = [pool.submit(lambda x, y: x * y, number, 3) for number in range(50)]
    assert [future.result(PATIENCE) for future in futures] == [3 * number for number in range(50)]

    def fail() -> None:
        raise KeyError("x")

    assert isinstance(pool.submit(fail).exception(PATIENCE), KeyError)
    assert pool.submit(lambda: 1).result(PATIENCE) == 1 and alive() <= 2


def test_a_stuck_thread_is_replaced(
    pool: ThreadPool, clock: Clock, hang: Callable[[], Held], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    stuck = [hang(), hang()]
    late = [pool.submit(job) for job in stuck]
    assert all(job.begun.wait(PATIENCE) for job in stuck)
    waiting = pool.submit(lambda: "queued")
    clock.now += 5.1
    for turn in range(20):
        assert pool.submit(lambda turn=turn: turn).result(PATIENCE) == turn
    assert waiting.result(PATIENCE) == "queued" and alive() <= 4
    assert len(caplog.messages) == 1 and "pool: a job has not ended within 5 s" in caplog.messages[0]
    # The jobs were only slow: their results count, and the surplus threads end.
    for job in stuck:
        job.set()
    assert [future.result(PATIENCE) for future in late] == ["late", "late"]
    wait_until(lambda: alive() <= 2, "the threads end")
    assert pool.submit(lambda: 1).result(PATIENCE) == 1


def test_no_more_than_so_many_are_left_behind(
    pool: ThreadPool, clock: Clock, hang: Callable[[], Held], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "MAX_STUCK", 3)
    for number in range(10):
        job = hang()
        pool.submit(job)
        assert job.begun.wait(PATIENCE if number < 5 else 0.01) is (number < 5)
        clock.now += 6
    assert alive() == 5


def test_what_is_cancelled_is_not_done(pool: ThreadPool, hang: Callable[[], Held]) -> None:
    stuck = [hang(), hang()]
    for job in stuck:
        pool.submit(job)
    done: list[int] = []
    futures = [pool.submit(done.append, number) for number in range(4)]
    assert futures[1].cancel()
    for job in stuck:
        job.set()
    futures[3].result(PATIENCE)
    assert pool.dismiss(PATIENCE) and sorted(done) == [0, 2, 3]


def test_dismissal_waits_for_the_jobs_there_are(pool: ThreadPool, hang: Callable[[], Held]) -> None:
    slow = hang()
    futures: list[Future[Any]] = [pool.submit(slow), *(pool.submit(lambda: 2) for _ in range(10))]
    threading.Timer(0.1, slow.set).start()
    assert pool.dismiss(PATIENCE) and all(future.done() for future in futures)
    wait_until(lambda: alive() == 0, "the threads end")
    with pytest.raises(RuntimeError, match="pool: no new jobs"):
        pool.submit(lambda: 1)
    assert pool.dismiss(PATIENCE)


@pytest.mark.parametrize("cancel", [False, True])
def test_dismissal_is_bounded_in_time(pool: ThreadPool, hang: Callable[[], Held], cancel: bool) -> None:
    stuck = [hang(), hang()]
    futures = [pool.submit(job) for job in stuck]
    assert all(job.begun.wait(PATIENCE) for job in stuck)
    told: list[Future[int]] = []
    waiting = pool.submit(lambda: 1)
    waiting.add_done_callback(told.append)
    begun = time.monotonic()
    assert pool.dismiss(0.1, cancel=cancel) is False
    assert time.monotonic() - begun < 5
    with pytest.raises(CancelledError):
        waiting.result(0)
    assert told == [waiting] and not any(future.done() for future in futures)
    for job in stuck:
        job.set()
    wait_until(lambda: alive() == 0, "the threads end")


def test_dismissal_replaces_stuck_threads_for_what_waits(
    pool: ThreadPool, clock: Clock, hang: Callable[[], Held]
) -> None:
    stuck = [hang(), hang()]
    for job in stuck:
        pool.submit(job)
        assert job.begun.wait(PATIENCE)

    def free() -> None:
        for job in stuck:
            job.set()

    waiting = pool.submit(free)
    clock.now += 6
    assert pool.dismiss(PATIENCE) and waiting.done()


def test_no_thread_can_be_started(pool: ThreadPool, hang: Callable[[], Held], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a first one no job is accepted; without a second one jobs wait."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            pool.submit(lambda: 1)
    job = hang()
    assert pool.waiting == 0
    pool.submit(job)
    assert job.begun.wait(PATIENCE)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        waiting = pool.submit(lambda: 1)
    assert pool.waiting == 1
    job.set()
    assert waiting.result(PATIENCE) == 1


def test_a_process_ends_while_a_job_hangs() -> None:
    script = """
import threading
from cuvee.integrations.stores.threads import ThreadPool
pool = ThreadPool(1, "pool")
begun = threading.Event()
def hang():
    begun.set()
    threading.Event().wait()
pool.submit(hang)
begun.wait()
pool.dismiss(0.1)
print("end")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "end\n"


@pytest.mark.parametrize("error", [PermissionError("no other priority"), SystemExit(1)])
def test_a_thread_that_cannot_be_prepared_works_all_the_same(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    """One that ended without a word would be missing for ever, and `dismiss` would wait for it."""

    def begin() -> None:
        raise error

    pool = ThreadPool(1, "unprepared", begin=begin)
    assert [pool.submit(pow, 2, power).result(PATIENCE) for power in range(3)] == [1, 2, 4]
    assert pool.dismiss(PATIENCE)
    assert caplog.text.count("could not be prepared") == 1
