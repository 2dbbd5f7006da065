"""The codec's threads: order, errors, how many there are, and what becomes of them in a process that was forked."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial

import pytest
from tests.forked import works_in_child_while_held
from tests.waiting import wait_until

from cuvee.codec.cpu import pool as module
from cuvee.codec.cpu.pool import Pool
from cuvee.codec.support import torch_threads

SECONDS = 30.0  # nothing here takes so long unless it hangs


def numbered(number: int) -> Callable[[], int]:
    return lambda: number


def all_meet(pool: Pool, threads: int) -> None:
    """Run a job on every thread: whatever a helper was still doing, it has done then."""
    together = threading.Barrier(threads)
    assert sorted(pool.run([partial(together.wait, SECONDS)] * threads, threads)) == list(range(threads))


def wait_until_waiting(caller: int) -> None:
    """Wait until the thread `caller` waits for a helper."""

    def waits() -> bool:
        stack = traceback.walk_stack(sys._current_frames()[caller])
        return any(frame.f_code is Future.exception.__code__ for frame, _ in stack)

    wait_until(waits, "the caller waits for a helper")


@pytest.mark.parametrize(("threads", "jobs"), [(1, 2), (2, 0), (2, 1), (5, 40)])
def test_results_come_in_order(threads: int, jobs: int) -> None:
    """The first job ends after the last, where another thread can run that."""
    last = threading.Event()

    def job(number: int) -> int:
        if number == jobs - 1:
            last.set()
        elif number == 0 and threads > 1:
            assert last.wait(SECONDS)
        return number

    assert Pool(threads).run([partial(job, i) for i in range(jobs)], threads) == list(range(jobs))


@pytest.mark.parametrize(("threads", "workers", "most"), [(3, 3, 3), (3, 99, 3), (5, 2, 2), (2, 1, 1), (1, 8, 1)])
def test_no_more_threads_work_than_were_asked_for(threads: int, workers: int, most: int) -> None:
    lock, here, largest, together = threading.Lock(), 0, 0, threading.Barrier(most)

    def job() -> int:
        nonlocal here, largest
        with lock:
            here += 1
            largest = max(largest, here)
        together.wait(SECONDS)
        with lock:
            here -= 1
        return threading.get_ident()

    seen = Pool(threads).run([job] * 24, workers)
    assert largest == most == len(set(seen))
    assert threading.get_ident() in seen, "the caller works, too"


@pytest.mark.parametrize(("bad", "threads"), [(0, 3), (3, 1), (19, 3)])
def test_the_first_error_ends_the_rest(bad: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def slowly(_: int) -> int:
        time.sleep(0.01)  # other threads run while a thread's settings are put back
        return 1

    monkeypatch.setattr(torch_threads, "_setters", lambda: (slowly, slowly))
    done: list[int] = []
    raising = threading.Event()

    def job(number: int) -> None:
        if number == bad:
            raising.set()
            raise ValueError(f"job {number}")
        assert number < bad or raising.wait(SECONDS)
        done.append(number)

    pool, before = Pool(threads), sys.getswitchinterval()
    sys.setswitchinterval(SECONDS)  # no other thread runs between `raising` and the error that follows it
    try:
        with pytest.raises(ValueError, match=f"job {bad}"):
            pool.run([partial(job, number) for number in range(20)], threads)
        count = len(done)
    finally:
        sys.setswitchinterval(before)
    assert count <= bad + threads - 1
    all_meet(pool, threads)
    assert len(done) == count, "nothing goes on after the error was raised"


def test_a_call_does_not_wait_for_another_callers_jobs() -> None:
    """Helpers that are busy elsewhere do not come; their call has long been done."""
    pool, started, release = Pool(2), threading.Event(), threading.Event()
    caller: list[int] = []

    def long() -> None:
        if threading.get_ident() not in caller:
            started.set()
        release.wait(SECONDS)

    def slow() -> None:
        caller.append(threading.get_ident())
        pool.run([long] * 2, 2)

    other = threading.Thread(target=slow, daemon=True)
    other.start()
    try:
        assert started.wait(SECONDS), "a helper works for the other call"
        begun = time.monotonic()
        assert pool.run([numbered(i) for i in range(6)], 2) == list(range(6))
        assert time.monotonic() - begun < SECONDS / 2 and other.is_alive()
    finally:
        release.set()
        other.join(SECONDS)
    assert not other.is_alive()


def test_a_job_may_call_the_pool() -> None:
    pool, found = Pool(2), []

    def outer(number: int) -> int:
        return sum(pool.run([numbered(number + i) for i in range(3)], 2))

    def call() -> None:
        found.extend(pool.run([partial(outer, number) for number in range(6)], 2))

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert found == [3 * number + 3 for number in range(6)]


@pytest.mark.parametrize("times", [1, 3])
def test_an_interrupt_waits_for_helpers(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the caller waits for a helper, which writes into the caller's memory: as often as it comes."""
    caller, begun, over, ended = threading.get_ident(), threading.Event(), threading.Event(), []

    class Interrupted(Future[None]):
        """Interrupts the caller while it waits; a signal from another thread could come a moment before it does."""

        left = times

        def exception(self, timeout: float | None = None) -> BaseException | None:
            if Interrupted.left:
                Interrupted.left -= 1
                signal.raise_signal(signal.SIGINT)
            over.set()
            return super().exception(timeout)

    def job() -> None:
        if threading.get_ident() == caller:
            assert begun.wait(SECONDS)
            return
        begun.set()
        assert over.wait(SECONDS)
        ended.append(1)

    monkeypatch.setattr(module, "Future", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        Pool(2).run([job] * 2, 2)
    assert ended == [1]


def test_an_interrupt_of_the_caller_ends_the_rest() -> None:
    caller, begun, done, pool = threading.get_ident(), threading.Event(), [], Pool(2)

    def job() -> None:
        if threading.get_ident() == caller:
            assert begun.wait(SECONDS)
            signal.raise_signal(signal.SIGINT)
        begun.set()
        wait_until_waiting(caller)
        done.append(1)

    with pytest.raises(KeyboardInterrupt):
        pool.run([job] * 9, 2)
    all_meet(pool, 2)
    assert done == [1], "the job that was running, and no other"


@pytest.fixture
def most_threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many more helpers the system starts: set its one entry."""
    left, start = [0], threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if thread.name.startswith("cuvee"):
            if left[0] < 1:
                raise RuntimeError("can't start new thread")  # what Python says at the limit
            left[0] -= 1
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    return left


@pytest.mark.parametrize("allowed", [0, 1])
def test_fewer_threads_do_all_the_work(allowed: int, most_threads: list[int], caplog: pytest.LogCaptureFixture) -> None:
    most_threads[0] = allowed
    pool = Pool(4)
    with caplog.at_level(logging.WARNING):
        for first in (0, 100):
            assert pool.run([numbered(first + i) for i in range(20)], 4) == list(range(first, first + 20))
    (told,) = caplog.messages
    assert "can't start new thread" in told and "threads=4" in told
    most_threads[0] = 9
    all_meet(pool, 4)  # when they may start


@pytest.mark.parametrize("allowed", [0, 1])
def test_nothing_runs_after_a_call_that_got_fewer_threads(allowed: int, most_threads: list[int]) -> None:
    """The executor keeps what it was given when it could not start a thread, and hands it to the next that is free."""
    most_threads[0] = allowed
    caller, begun, done, pool = threading.get_ident(), threading.Event(), [], Pool(4)

    def job() -> None:
        if threading.get_ident() != caller:
            begun.set()
            wait_until_waiting(caller)
        elif allowed:
            assert begun.wait(SECONDS)
            raise ValueError("of the caller")
        done.append(1)

    with pytest.raises(ValueError, match="of the caller") if allowed else nullcontext():
        pool.run([job] * 20, 4)
    count = len(done)
    assert count == (1 if allowed else 20)
    most_threads[0] = 9
    all_meet(pool, 4)  # helpers that find the old work, too
    assert len(done) == count


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system does not fork")
def test_a_child_does_not_wait_for_a_thread_of_its_parent() -> None:
    pool = Pool(2)
    assert works_in_child_while_held(pool._lock, lambda: pool.run([numbered(i) for i in range(9)], 2) == list(range(9)))


FORKED = """
import os, sys, threading
import torch
import cuvee.codec.cpu.backend
from cuvee import Codec, KVChunk, KVLayout, fit
from cuvee.codec.layout import LayerLayout
cuvee.codec.cpu.backend.PARALLEL_VALUES = 1
layout = KVLayout("tiny", (LayerLayout(2, 16, 16, None),) * 4, "float32", None)
chunk = KVChunk([torch.randn(300, 2, 16) for _ in range(4)], [torch.randn(300, 2, 16) for _ in range(4)], layout)
for quality in ("lossless", "balanced"):
    codec = Codec(fit(layout, [chunk]), quality, threads=2)
    blob = codec.encode(chunk)
    want = codec.decode(blob)
    assert sum(thread.name.startswith("cuvee") for thread in threading.enumerate()) >= 1
    child = os.fork()
    if child == 0:
        status = 1
        try:
            assert threading.active_count() == 1
            got = codec.decode(blob)
            assert all(torch.equal(a, b) for a, b in zip((*got.keys, *got.values), (*want.keys, *want.values)))
            assert codec.encode(chunk) == blob
            assert any(thread.name.startswith("cuvee") for thread in threading.enumerate()), "its own helpers"
            print("child", quality, flush=True)
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert codec.encode(chunk) == blob
    print("parent", quality, flush=True)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system does not fork")
def test_a_forked_process_codes_with_helpers_of_its_own() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKED], capture_output=True, text=True, check=False, env=environment,
        timeout=20 * SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n") == ["child lossless", "parent lossless", "child balanced", "parent balanced", ""]
