"""Tasks as LMCache's L2 adapters have them: done on threads, announced by a file descriptor, asked for once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from threading import Lock
from typing import Generic, TypeVar

from lmcache.v1.platform import create_event_notifier

from cuvee.integrations.stores.threads import ThreadPool

T = TypeVar("T")


class Results(Generic[T]):
    """Results of one kind of task by the task's number, and the descriptor that announces them. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._results: dict[int, T] = {}
        self._notifier = create_event_notifier()
        self._closed = False

    def fileno(self) -> int:
        """Return the descriptor, which can be read when there are new results."""
        return int(self._notifier.fileno())

    def put(self, task: int, result: T) -> None:
        """Keep a task's result and say so. After `close` nothing is kept: nobody asks any more."""
        with self._lock:
            if not self._closed:
                self._results[task] = result
                self._notifier.notify()

    def take(self, task: int) -> T | None:
        """Return a task's result once; None before and after."""
        with self._lock:
            return self._results.pop(task, None)

    def take_all(self) -> dict[int, T]:
        """Return the results that were not taken yet, by task."""
        with self._lock:
            results, self._results = self._results, {}
        return results

    def close(self) -> None:
        """Close the descriptor. May be called more than once."""
        with self._lock:
            self._closed = True
            self._notifier.close()


def run_parts(pool: ThreadPool, parts: Sequence[Callable[[], T]], finish: Callable[[list[T | None]], object]) -> None:
    """Run the parts of a task, then call `finish` with what each returned: None if it failed or did not run.

    `finish` is called once, on the thread that ends last, and must raise nothing.
    """
    if not parts:
        finish([])
        return
    futures = [_submitted(pool, part) for part in parts]
    lock, left = Lock(), len(futures)

    def ended(_: Future[T]) -> None:
        nonlocal left
        with lock:
            left -= 1
            last = not left
        if last:
            finish([None if each.cancelled() or each.exception() else each.result() for each in futures])

    for future in futures:
        future.add_done_callback(ended)


def _submitted(pool: ThreadPool, part: Callable[[], T]) -> Future[T]:
    try:
        return pool.submit(part)
    except RuntimeError as error:  # the pool was dismissed, or no thread can be started
        failed: Future[T] = Future()
        failed.set_exception(error)
        return failed
