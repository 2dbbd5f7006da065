"""A child process, forked while another thread of this one is in the middle of something."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager

SECONDS = 20.0  # nothing done in a child takes so long unless it hangs


def works_in_child(work: Callable[[], bool]) -> bool:
    """Whether `work` returned True in a child forked now. One that hangs is ended, and has not worked."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python's own, about forks of threaded processes
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
    """`works_in_child`, with `lock` held by another thread of the parent until the child has ended."""
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
