"""Threads of the connector stay off the cores that an engine is bound to, and start no others."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from tests.integrations.vllm.sides import Bench

from cuvee.integrations.core.niceness import give_way
from cuvee.integrations.vllm import cores
from cuvee.integrations.vllm.cores import free_cores, move_to
from cuvee.integrations.vllm.worker import state as worker_state
from cuvee.integrations.vllm.worker.state import WorkerPools

needs_two_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")

SCRIPT = """
import os, sys, threading
from cuvee.integrations.vllm.cores import free_cores
whole = sorted(os.sched_getaffinity(0))
for bound in sys.argv[1].split(","):
    bind = lambda: os.sched_setaffinity(0, {whole[int(bound)]})
    if bound == sys.argv[1].split(",")[0]:
        bind()
    else:
        bound_too, over = threading.Event(), threading.Event()
        def hold():
            bind()
            bound_too.set()
            over.wait()
        threading.Thread(target=hold, daemon=True).start()
        bound_too.wait()
print(*sorted(whole.index(core) for core in free_cores()))
"""


def found(bound: str) -> list[int]:
    """What a process whose threads are bound to these cores finds free; all are numbered from zero."""
    sources = str(Path(__file__).parents[3] / "src")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, bound],
        env=os.environ | {"PYTHONPATH": sources},
        capture_output=True,
        text=True,
        check=True,
    )
    return [int(core) for core in done.stdout.split()]


@needs_two_cores
def test_cores_are_free_that_no_thread_is_bound_to() -> None:
    count = len(os.sched_getaffinity(0))
    assert found("0") == list(range(1, count))
    assert found("1") == [0, *range(2, count)]
    assert found("0,1") == (list(range(2, count)) or [0, 1])  # none is left: all may be used


def test_an_engine_that_is_not_bound_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getppid", os.getpid)  # whoever runs the tests may have more cores
    assert free_cores() == frozenset()
    before = os.sched_getaffinity(0)
    move_to(frozenset())
    assert os.sched_getaffinity(0) == before

    def refuse(process: int) -> set[int]:
        raise ProcessLookupError(process)

    monkeypatch.setattr(os, "sched_getaffinity", refuse)  # a parent that is gone
    assert free_cores() == frozenset()
    monkeypatch.delattr(os, "sched_getaffinity")  # as on other systems
    assert free_cores() == frozenset()


def test_a_core_that_there_is_not_is_logged_and_the_thread_stays(caplog: pytest.LogCaptureFixture) -> None:
    before = os.sched_getaffinity(0)
    with caplog.at_level(logging.WARNING, cores.logger.name):
        move_to(frozenset({100_000}))
    assert os.sched_getaffinity(0) == before and "stay on the engine's core: cores [100000]" in caplog.text


def niceness() -> int:
    """Of the calling thread."""
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_only_threads_that_store_give_way() -> None:
    pools = WorkerPools(1, 5.0, store_niceness=7)
    before = niceness()
    for pool in (pools.encoders, pools.writers):
        assert pool.submit(niceness).result() == max(7, before)
    for pool in (pools.loaders, pools.fetchers, pools.coders, WorkerPools(1, 5.0).encoders):
        assert pool.submit(niceness).result() == before
    assert niceness() == before
    assert Bench(store_niceness=5).worker._pools.encoders.submit(niceness).result() == max(5, before)


def test_a_priority_that_cannot_be_changed_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(which: int, who: int, priority: int) -> None:
        raise PermissionError("not here")

    monkeypatch.setattr(os, "setpriority", refuse)
    with caplog.at_level(logging.WARNING, "cuvee.integrations.core.niceness"):
        give_way(0)
        assert not caplog.text
        give_way(5)
    assert "threads that read or store beside the engine keep their priority: not here" in caplog.text


@needs_two_cores
def test_all_threads_of_a_worker_are_on_free_cores_and_start_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    free = frozenset({max(os.sched_getaffinity(0))})
    monkeypatch.setattr(worker_state, "free_cores", lambda: free)
    others, threads = set(threading.enumerate()), torch.get_num_threads()  # of other tests
    torch.set_num_threads(3)
    bench = Bench()
    side = bench.worker
    try:
        pools = side._pools
        for pool in (pools.loaders, pools.encoders, pools.writers, pools.fetchers, pools.coders):
            assert pool.submit(os.sched_getaffinity, 0).result() == free
            assert pool.submit(torch.get_num_threads).result() == 1 and torch.get_num_threads() == 3
        bench.store_all()
        bench.load_now([bench.load([1, 2], 0, 8)])
        own = [thread for thread in set(threading.enumerate()) - others if thread.name.startswith("cuvee")]
        assert own and all(os.sched_getaffinity(thread.native_id or 0) == free for thread in own)
        assert os.sched_getaffinity(0) != free, "the engine's thread stays where it is"
    finally:
        side.close()
        torch.set_num_threads(threads)
