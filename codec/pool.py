"""The codec's threads: started once, at the first chunk that is worth it, and never more than were asked for."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


class Pool:
    """Runs jobs on the calling thread and on helpers that are kept.

    Args:
        threads: how many work at the same time, the caller among them.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._lock = threading.Lock()
        self._helpers: tuple[int, ThreadPoolExecutor] | None = None

    def run(self, jobs: Sequence[Callable[[], T]], workers: int) -> list[T]:
        """Run all jobs on up to so many threads. The first error ends the rest, and is raised.

        Each thread takes the next job when it has done one, so a slow thread delays its own job alone.
        """
        workers = min(workers, self._threads, len(jobs))
        if workers <= 1:
            with torch.no_grad():
                return [job() for job in jobs]
        results: dict[int, T] = {}
        waiting = iter(range(len(jobs)))  # an iterator of C code: two threads never get one number
        failed = threading.Event()

        def work() -> None:
            # One thread for each product: torch would start as many more from every worker.
            torch.set_num_threads(1)
            with torch.no_grad():  # a thread's own setting
                for number in waiting:
                    if failed.is_set():
                        return
                    try:
                        results[number] = jobs[number]()
                    except BaseException:
                        failed.set()
                        raise

        before = torch.get_num_threads()
        helpers = [self._executor().submit(work) for _ in range(workers - 1)]
        try:
            work()
        finally:
            # Waits for those that have begun. The others would find no job; they may be busy with another caller's.
            errors = [None if helper.cancel() else helper.exception() for helper in helpers]
            # After them: threads yet to be started take over what any thread has set last.
            torch.set_num_threads(before)
        for error in errors:
            if error is not None:
                raise error
        return [results[number] for number in range(len(jobs))]

    def _executor(self) -> ThreadPoolExecutor:
        """The helpers; made anew in a process that was forked, where those of its parent do not run."""
        with self._lock:
            if self._helpers is None or self._helpers[0] != os.getpid():
                self._helpers = os.getpid(), ThreadPoolExecutor(self._threads - 1, "cuvee")
            return self._helpers[1]
