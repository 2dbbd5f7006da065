"""What is logged once: also if several threads find it together."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.waiting import PATIENCE

from cuvee.codec.support.once import Once


def test_kinds_of_events_are_logged_once_and_not_without_end(caplog: pytest.LogCaptureFixture) -> None:
    once = Once(logging.getLogger("cuvee.test"), most=2)
    with caplog.at_level(logging.DEBUG, "cuvee.test"):
        firsts = [once(kind, "kind %s", kind) for kind in ("a", "a", "b", "c", "c")]
    assert firsts == [True, False, True, False, False]
    assert [record.levelno for record in caplog.records] == [
        logging.WARNING, logging.DEBUG, logging.WARNING, logging.DEBUG, logging.DEBUG,
    ]  # fmt: skip
    assert caplog.records[0].getMessage() == "kind a (logged once)"


class Met:
    """A kind of event whose comparison lets the other threads look, too, before any of them goes on."""

    def __init__(self, barrier: threading.Barrier) -> None:
        self._barrier = barrier

    def __hash__(self) -> int:
        self._barrier.wait(PATIENCE)
        return 1


def test_threads_that_find_it_together_log_it_once() -> None:
    """Two workers of a store encode their first chunks at the same time."""
    once, threads = Once(logging.getLogger("cuvee.test")), 4
    kind = Met(threading.Barrier(threads))
    with ThreadPoolExecutor(threads) as pool:
        firsts: Iterator[bool] = pool.map(lambda _: once(kind, "found"), range(threads))
        assert sorted(firsts) == [False] * (threads - 1) + [True]
