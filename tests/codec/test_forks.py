"""Forks while another thread is in the middle of something: the child works, whatever locks its parent held.

`test_pool.py` has those of the pool, and the tests of stores, kernels and chunk caches their own.
"""

from __future__ import annotations

import os
import threading
import time

import numba as nb
import pytest
from numba.core.compiler_lock import global_compiler_lock
from tests.forked import SECONDS, works_in_child

from cuvee.codec.support import forks
from cuvee.codec.support.lazy import lazy

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the system does not fork")


def test_owners_are_told_in_the_child_and_not_kept_alive() -> None:
    class Owner:
        told = 0

        def after_fork(self) -> None:
            self.told += 1

    one, other = Owner(), Owner()
    forks.tell_after_fork(one)
    forks.tell_after_fork(other)
    count = len(forks._OWNERS)
    del other
    assert len(forks._OWNERS) == count - 1
    assert works_in_child(lambda: one.told == 1)
    assert one.told == 0


def test_a_fork_waits_for_the_compiler() -> None:
    """Else the child would wait for a lock that nobody holds there."""

    def loop(x):  # type: ignore[no-untyped-def]
        return x + 1

    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with global_compiler_lock:
            held.set()
            time.sleep(0.3)
            over.set()

    holder = threading.Thread(target=hold, daemon=True)
    holder.start()
    assert held.wait(SECONDS)
    made = nb.njit(loop)  # not cached, so that the child has to compile it
    assert works_in_child(lambda: over.is_set() and made(1) == 2)
    holder.join(SECONDS)
    assert made(2) == 3, "and so does the parent"


class Slow:
    """A value that takes a thread until it is told to go on, and others no time."""

    def __init__(self) -> None:
        self.made = 0
        self.begun, self.over = threading.Event(), threading.Event()
        self.first = threading.get_ident()

    @lazy
    def value(self) -> int:
        """Made once per reader."""
        self.made += 1
        if threading.get_ident() != self.first:
            self.begun.set()
            self.over.wait(SECONDS)
        return 7


def test_a_child_makes_a_lazy_value_that_a_thread_of_its_parent_is_making() -> None:
    slow = Slow()
    maker = threading.Thread(target=lambda: slow.value, daemon=True)
    maker.start()
    try:
        assert slow.begun.wait(SECONDS)
        assert works_in_child(lambda: slow.value == 7)
        assert Slow().value == 7, "nor does another instance wait"
    finally:
        slow.over.set()
        maker.join(SECONDS)
