"""Child processes that are forked while another thread of the parent holds a lock."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager

from tests.waiting import PATIENCE

SECONDS = PATIENCE  # work in a child takes less than this unless it hangs


def works_in_child(work: Callable[[], bool]) -> bool:
    """Return whether `work` returns True in a child that is forked now. A child that hangs is killed: False."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python's warning about forks of processes with threads
        child = os.fork()
    if not child:
        status = 1
        with contextlib.suppress(BaseException):
            status = 0 if work() is True else 1
        os._exit(status)
    deadline = time.monotonic() + SECONDS
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    if ended == (0, 0):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return ended == (child, 0)


def works_in_child_while_held(lock: AbstractContextManager[object], work: Callable[[], bool]) -> bool:
    """Call `works_in_child` while another thread of the parent holds `lock`, until the child has ended."""
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            over.wait()

    holder = threading.Thread(target=hold, daemon=True)
    holder.start()
    try:
        assert held.wait(SECONDS)
        return works_in_child(work)
    finally:
        over.set()
        holder.join(SECONDS)
