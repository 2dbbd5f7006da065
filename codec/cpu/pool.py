"""The codec's threads: started once, at the first chunk that is worth it, and never more than were asked for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch

from cuvee.codec.support.forks import tell_after_fork

_log = logging.getLogger(__name__)

T = TypeVar("T")


class Pool:
    """Runs jobs on the calling thread and on helpers that are kept.

    Args:
        threads: how many work at the same time, the caller among them.
        name: that the helpers' names begin with.
    """

    def __init__(self, threads: int, name: str = "cuvee") -> None:
        self._threads = threads
        self._name = name
        self._told = False
        self.after_fork()
        tell_after_fork(self)

    def after_fork(self) -> None:
        """Forget the helpers, which run in the parent alone."""
        self._lock = threading.Lock()
        self._helpers: ThreadPoolExecutor | None = None

    def run(self, jobs: Sequence[Callable[[], T]], workers: int) -> list[T]:
        """Run all jobs on at most this many threads. The first error ends the others and is raised.

        Each thread takes the next job when it has done one, so a slow thread delays its own job alone. Where the system
        starts no more threads, those that run do all the work. No job runs any more when this returns or raises,
        whatever it raises: jobs write into memory of the caller, who may then give it to others.
        """
        workers = min(workers, self._threads, len(jobs))
        if workers <= 1:
            with torch.no_grad():
                return [job() for job in jobs]
        results: dict[int, T] = {}
        waiting = iter(range(len(jobs)))  # an iterator of C code: two threads never get one number
        failed = threading.Event()

        def work() -> None:
            try:
                # One thread for each product: torch would start as many more from every worker.
                torch.set_num_threads(1)
                with torch.no_grad():  # a thread's own setting
                    for number in waiting:
                        if failed.is_set():
                            return
                        results[number] = jobs[number]()
            except BaseException:
                failed.set()
                raise

        before = torch.get_num_threads()
        helpers: list[Future[None]] = []
        interrupt: BaseException | None = None
        try:
            while len(helpers) < workers - 1:
                # Not the executor's own future: where it cannot start a thread it raises, but keeps what it was given.
                helpers.append(Future())
                if not self._submit(partial(_help, helpers[-1], work)):
                    break
            work()
        except BaseException:
            failed.set()
            raise
        finally:
            # Waits for those that have begun, through interrupts, too: they write into the caller's memory. The others
            # would find no job; they may be busy with another caller's.
            while True:
                try:
                    errors = [None if helper.cancel() else helper.exception() for helper in helpers]
                    break
                except BaseException as raised:
                    failed.set()
                    interrupt = raised if interrupt is None else interrupt
            # After them: threads yet to be started take over what any thread has set last.
            torch.set_num_threads(before)
            if interrupt is not None:
                raise interrupt
        for error in errors:
            if error is not None:
                raise error
        return [results[number] for number in range(len(jobs))]

    def _submit(self, work: Callable[[], None]) -> bool:
        """Give work to a helper; False if there is none to be had beyond those that run."""
        with self._lock:
            if self._helpers is None:
                self._helpers = ThreadPoolExecutor(self._threads - 1, self._name)
            try:
                self._helpers.submit(work)
            except RuntimeError as error:  # the limit of the system or a container, or Python is about to exit
                # It has lost count of its threads, which end when they have done what they were given.
                self._helpers = None
                self._tell(str(error))
                return False
        return True

    def _tell(self, error: str) -> None:
        """Log the first time that a helper is missing."""
        if self._told:
            return
        self._told = True
        _log.warning(
            "cuvee: %s, so fewer than threads=%d work and coding is slower (said once); raise the limit of threads "
            "(ulimit -u, pids.max) or ask for fewer",
            error,
            self._threads,
        )


def _help(told: Future[None], work: Callable[[], None]) -> None:
    """Do a share of the work, unless its caller needs none any more."""
    if not told.set_running_or_notify_cancel():
        return
    try:
        work()
    except BaseException as error:
        told.set_exception(error)
    else:
        told.set_result(None)
