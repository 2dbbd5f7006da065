"""The codec's threads: started at the first chunk that is large enough, kept, and never more than requested."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch

from cuvee.codec.support.forks import tell_after_fork
from cuvee.codec.support.once import Once
from cuvee.codec.support.torch_threads import computing_alone

_log = logging.getLogger(__name__)

T = TypeVar("T")


class Pool:
    """Runs jobs on the calling thread and on persistent helper threads, at most `threads` together."""

    def __init__(self, threads: int, name: str = "cuvee") -> None:
        self._threads = threads
        self._name = name
        self._once = Once(_log)
        self.after_fork()
        tell_after_fork(self)

    def after_fork(self) -> None:
        """Forget the helpers, which run only in the parent."""
        self._lock = threading.Lock()
        self._helpers: ThreadPoolExecutor | None = None

    def run(self, jobs: Sequence[Callable[[], T]], workers: int) -> list[T]:
        """Run all jobs on at most `workers` threads; the first error stops the other jobs and is raised.

        Each thread takes the next job when it finishes one, so a slow thread delays only its own job. If the system
        starts no more threads, the running ones do all the work. No job is running when this returns or raises,
        because jobs write into the caller's memory, which may then be reused. Torch shares out no operation of a job,
        so a job's bits do not depend on how many jobs there are.
        """
        workers = min(workers, self._threads, len(jobs))
        if workers <= 1:
            with torch.no_grad(), computing_alone():
                return [job() for job in jobs]
        results: dict[int, T] = {}
        waiting, taking = iter(range(len(jobs))), threading.Lock()
        failed = threading.Event()

        def work() -> None:
            with torch.no_grad(), computing_alone():  # settings per thread
                try:
                    while not failed.is_set():
                        with taking:
                            number = next(waiting, None)
                        if number is None:
                            return
                        results[number] = jobs[number]()
                except BaseException:
                    failed.set()  # before the settings are put back, which lets other threads run
                    raise

        helpers: list[Future[None]] = []
        interrupt: BaseException | None = None
        try:
            while len(helpers) < workers - 1:
                # Not the executor's future: an executor that cannot start a thread raises, but keeps the work.
                helpers.append(Future())
                if not self._submit(partial(_help, helpers[-1], work)):
                    break
            work()
        except BaseException:
            failed.set()
            raise
        finally:
            # Wait for helpers that have begun, even through interrupts: they write into the caller's memory. The others
            # would find no job, and may be busy with another caller's jobs.
            while True:
                try:
                    errors = [None if helper.cancel() else helper.exception() for helper in helpers]
                    break
                except BaseException as raised:
                    failed.set()
                    interrupt = raised if interrupt is None else interrupt
            if interrupt is not None:
                raise interrupt
        for error in errors:
            if error is not None:
                raise error
        return [results[number] for number in range(len(jobs))]

    def _submit(self, work: Callable[[], None]) -> bool:
        """Give work to a helper; return False if no further helper can be started."""
        with self._lock:
            if self._helpers is None:
                self._helpers = ThreadPoolExecutor(self._threads - 1, self._name)
            try:
                self._helpers.submit(work)
            except RuntimeError as error:  # the limit of the system or a container, or Python is about to exit
                # The executor has lost count of its threads, which end after their work.
                self._helpers = None
                self._warn_once(str(error))
                return False
        return True

    def _warn_once(self, error: str) -> None:
        """Log the first time that a helper is missing."""
        self._once(
            "threads",
            "cuvee: %s, so fewer than threads=%d work and coding is slower; raise the limit of threads "
            "(ulimit -u, pids.max) or ask for fewer",
            error,
            self._threads,
        )


def _help(future: Future[None], work: Callable[[], None]) -> None:
    """Do a share of the work, unless the caller has cancelled it."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        work()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(None)
