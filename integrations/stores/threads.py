"""A thread pool for calls that may hang. A hanging call costs one thread; the process can still work and still exit.

A pool of `concurrent.futures` never replaces a hanging thread: a few of them stop all work, and the interpreter waits
for them at exit. A `ThreadPool` starts a new thread in place of one that is stuck in a job, and abandons stuck threads
when it is dismissed.
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

# The most threads of one pool that are replaced because they hang. Further replacements would probably hang as well.
MAX_STUCK = 32


class ThreadPool:
    """A thread pool with the `submit` of an `Executor`. Safe to call from several threads.

    Its threads are daemons. They start with the first jobs, and end when the pool is dismissed and they are idle.

    Args:
        threads: how many jobs run at a time, not counting stuck jobs.
        name: the name of the threads.
        patience: seconds after which a job counts as stuck, so that another thread may start in its place. If the job
            was only slow, it ends as usual and its surplus thread ends with it.
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
        self._started = 0
        self._reported = False
        self._dismissed = False
        self._changed = threading.Condition()
        self._jobs: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._began: dict[int, float] = {}  # the time when each busy thread began its job, by thread number
        self._alive = 0

    def submit(self, work: Callable[..., _T], *arguments: Any) -> Future[_T]:
        """Run `work(*arguments)` in one of the threads.

        Raises:
            RuntimeError: the pool was dismissed, or no thread can be started.
        """
        future: Future[_T] = Future()
        with self._changed:
            if self._dismissed:
                raise RuntimeError(f"{self._name}: no new jobs after dismissal")
            self._jobs.append((future, lambda: work(*arguments)))
            if self._alive - len(self._began) >= len(self._jobs):  # enough threads have nothing to do
                self._changed.notify()
            else:
                self._hire()
        return future

    @property
    def waiting(self) -> int:
        """How many jobs no thread has begun, including cancelled jobs."""
        with self._changed:
            return len(self._jobs)

    def dismiss(self, timeout: float | None = None, *, cancel: bool = False) -> bool:
        """Accept no more jobs, and wait for the present ones. Jobs that have not begun by then are cancelled.

        Args:
            timeout: seconds to wait; None waits until all jobs are done.
            cancel: cancel the jobs that have not begun at once, rather than after `timeout`.

        Returns:
            Whether every thread has ended. Threads that have not are abandoned.
        """
        with self._changed:
            self._dismissed = True
            if self._jobs and not cancel:
                self._hire()  # all threads may be stuck
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
        # Without the lock, because callbacks of a future may take other locks.
        for future, _ in jobs:
            future.cancel()

    def _stuck(self) -> int:
        now = self._clock()
        return sum(now - began > self._patience for began in self._began.values())

    def _is_surplus(self) -> bool:
        return self._alive - self._stuck() > self.threads

    def _hire(self) -> None:
        """Start another thread if the limit allows it."""
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
            # The system may limit threads, and a process that is exiting cannot start threads.
            if not self._alive and not self._dismissed:
                self._jobs.pop()
                raise
            return
        self._alive += 1

    def _run(self, number: int) -> None:
        try:
            self._begin()
        except BaseException:
            _log.exception("%s: a thread could not be prepared; it works all the same", self._name)
        while self._step(number):
            pass

    def _step(self, number: int) -> bool:
        """Do one job; False if this thread should end. One call per job, so that no finished job stays referenced."""
        with self._changed:
            self._began.pop(number, None)
            self._changed.wait_for(lambda: self._jobs or self._dismissed or self._is_surplus())
            if not self._jobs or self._is_surplus():
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
