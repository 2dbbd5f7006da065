"""Cores for the connector's threads beside an engine that is bound to cores.

vLLM's CPU engine binds each of its OpenMP threads, the main thread among them, to a core, and keeps one or two cores
free. A thread inherits the cores of the thread that starts it. So by default the connector's threads would all run on
the core of the engine's main thread, and slow it down.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

logger = logging.getLogger(__name__)


def free_cores() -> frozenset[int]:
    """Return the cores to which no thread of this process is bound; all cores if none is free.

    The process may use the cores that its parent may use. Empty if the calling thread may use all of them, or if the
    system cannot tell.
    """
    try:
        whole, bound = os.sched_getaffinity(os.getppid()), os.sched_getaffinity(0)
        if not bound < whole:
            return frozenset()
        used = set(bound)
        for task in Path("/proc/self/task").iterdir():
            try:
                cores = os.sched_getaffinity(int(task.name))
            except OSError:  # it has ended
                continue
            if cores < whole:
                used |= cores
    except (OSError, AttributeError):
        return frozenset()
    return frozenset(whole - used or whole)


def move_to(cores: frozenset[int]) -> None:
    """Run the calling thread, and the threads it starts, on these cores; leave it where it is if there are none."""
    if not cores:
        return
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        logger.warning("cuvee: the connector's threads stay on the engine's core: cores %s: %s", sorted(cores), error)
