"""Calls of engines and of stores that end in time: `StoreCalls` and `EngineCalls`."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from threading import Condition
from typing import TypeVar

from cuvee.integrations.guard import Once, Recorder
from cuvee.integrations.stores import Store, StoreError
from cuvee.integrations.stores.threads import ThreadPool

T = TypeVar("T")


class EngineCalls:
    """A context for the calls of the engine. It counts them, and admits none once it is closed."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._under_way = 0
        self._closed = False

    def __enter__(self) -> bool:
        """Return whether the call is admitted."""
        with self._changed:
            self._under_way += 1
            return not self._closed

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._under_way -= 1
            self._changed.notify_all()

    def close(self, timeout: float) -> None:
        """Admit no more calls, and wait at most this many seconds for those under way."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._under_way, timeout)


class StoreCalls:
    """Calls of a store, whose failures are counted, logged once per kind, and never raised.

    Args:
        store: that is called.
        waiters: threads that wait for it.
        counts: told of `failures`, by label.
        once: logs them.
    """

    def __init__(self, store: Store, waiters: ThreadPool, counts: Recorder, once: Once) -> None:
        self.store, self.waiters = store, waiters
        self._counts, self._once = counts, once

    def ask(self, operation: str, label: str, work: Callable[[], T], timeout: float) -> T | None:
        """Return the store's answer; None if it fails or comes late."""
        try:
            answer = self.waiters.submit(work)
        except RuntimeError as error:  # no thread can be started
            self.fail(label, error)
            return None
        return self.wait_for(operation, label, answer, timeout)

    def wait_for(
        self, operation: str, label: str, answer: Future[T], timeout: float, until: float | None = None
    ) -> T | None:
        """Return an answer; None if it is an error, or is not there in time.

        Args:
            operation: of the store, which is told that it is late.
            label: of the failure.
            answer: to wait for.
            timeout: seconds that the store may take.
            until: the time (`time.monotonic`) at which they end; default: from now on.
        """
        try:
            return answer.result(time_left(timeout, until))
        except TimeoutError:
            answer.cancel()
            self.store.report_overdue(operation, timeout)
            self.fail(label, StoreError(f"the store did not answer within {timeout:g} s"))
        except Exception as error:
            self.fail(label, error)
        return None

    def fail(self, label: str, error: Exception) -> None:
        """Count a failure, and log it."""
        self._counts.count("failures", label=label)
        self._once(
            f"{label} {type(error).__name__}", "cuvee: pages are computed, or not stored (%s failed): %s", label, error
        )


def time_left(timeout: float, until: float | None) -> float:
    """Return how many of `timeout` seconds are left `until` a time."""
    return timeout if until is None else max(until - time.monotonic(), 0)
