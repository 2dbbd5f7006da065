"""Threads that wait for stores. A call that hangs costs one thread; the process can still work, and still end.

A pool of `concurrent.futures` keeps a thread that hangs: a few of those stop all work, and the interpreter waits for
them when it exits. A `ThreadPool` starts another thread in place of one that is stuck in a job, and leaves stuck threads
behind when it is dismissed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

# How many threads of one pool may be replaced because they hang. More replacements would only hang, too.
MAX_STUCK = 32


class ThreadPool:
    """A thread pool whose `submit` is that of an `Executor`. Safe to call from several threads.

    Its threads are daemons. They start with the first jobs and end once they are dismissed and idle.

    Args:
        threads: how many jobs run at a time, not counting those that are stuck.
        name: name of the threads.
        patience: seconds after which a job counts as stuck, so that another thread may start in its place. If the job
            was merely slow it ends as usual, and the surplus thread ends with it.
        clock: monotonic clock, in seconds.
        begin: called by each thread before its first job.
    """

    def __init__(
        self,
        threads: int,
        name: str,
        patience: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        self.threads = threads
        self._name, self._patience, self._clock, self._begin = name, patience, clock, begin
        self._changed = threading.Condition()
        self._jobs: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._began: dict[int, float] = {}  # when the job of each busy thread began, by the number of the thread
        self._idle = 0
        self._alive = 0
        self._started = 0
        self._reported = False
        self._dismissed = False

    def submit(self, work: Callable[..., _T], *arguments: Any) -> Future[_T]:
        """Run `work(*arguments)` in one of the threads.

        Raises:
            RuntimeError: the pool was dismissed, or not even one thread can be started.
        """
        future: Future[_T] = Future()
        with self._changed:
            if self._dismissed:
                raise RuntimeError(f"{self._name}: no new jobs after dismissal")
            self._jobs.append((future, lambda: work(*arguments)))
            if self._idle >= len(self._jobs):
                self._changed.notify()
            else:
                self._hire()
        return future

    @property
    def waiting(self) -> int:
        """How many jobs no thread has begun, cancelled ones included."""
        with self._changed:
            return len(self._jobs)

    def dismiss(self, timeout: float | None = None, *, cancel: bool = False) -> bool:
        """Take no more jobs, and wait for the present ones.

        Args:
            timeout: seconds to wait; None waits until all are done.
            cancel: cancel the jobs that no thread has begun now, and not only once the time is over.

        Returns:
            Whether every thread has ended. Any that has not is left behind.
        """
        with self._changed:
            self._dismissed = True
            if self._jobs and not cancel:
                self._hire()  # perhaps all threads are stuck
            self._changed.notify_all()
        if cancel:
            self._cancel()
        with self._changed:
            done = self._changed.wait_for(lambda: not self._alive, timeout)
        self._cancel()
        return done

    def _cancel(self) -> None:
        with self._changed:
            jobs, self._jobs = self._jobs, deque()
        # Not under the lock: callbacks of a future may take locks of their own.
        for future, _ in jobs:
            future.cancel()

    def _stuck(self) -> int:
        now = self._clock()
        return sum(now - began > self._patience for began in self._began.values())

    def _hire(self) -> None:
        """Start another thread, if there may be more."""
        stuck = self._stuck()
        if stuck and not self._reported:
            self._reported = True
            _log.warning(
                "%s: a job has not ended within %g s; another thread starts in its place", self._name, self._patience
            )
        if self._alive - min(stuck, MAX_STUCK) >= self.threads:
            return
        self._started += 1
        number = self._started
        thread = threading.Thread(target=self._run, args=(number,), name=f"{self._name}-{number}", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            # The system may limit threads, and a process that is exiting cannot start any.
            if not self._alive and not self._dismissed:
                self._jobs.pop()
                raise
            return
        self._alive += 1

    def _run(self, number: int) -> None:
        self._begin()
        while self._step(number):
            pass

    def _step(self, number: int) -> bool:
        """Do one job; False if this thread should end. Each job is a call of its own, so that none is kept alive."""
        with self._changed:
            self._began.pop(number, None)
            while not self._jobs and not self._dismissed and self._alive - self._stuck() <= self.threads:
                self._idle += 1
                self._changed.wait()
                self._idle -= 1
            if not self._jobs or self._alive - self._stuck() > self.threads:
                self._alive -= 1
                self._changed.notify_all()
                return False
            future, work = self._jobs.popleft()
            self._began[number] = self._clock()
        if not future.set_running_or_notify_cancel():
            return True
        try:
            answer = work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(answer)
        return True
