"""Which cores the connector's threads use beside an engine that is bound to some.

vLLM's CPU engine binds each of its OpenMP threads to a core, the main thread among them, and keeps a core or two free
for others. A thread inherits the cores of the one that starts it. So without this, everything that the connector does
would run on the one core of the engine's main thread, and hold it up.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

logger = logging.getLogger(__name__)


def free_cores() -> frozenset[int]:
    """The cores of this machine that no thread of this process is bound to; all, if each has one.

    Which cores the process may use at all is what its parent may use. Empty if the calling thread may use all of them,
    and where the system cannot tell.
    """
    try:
        whole, own = os.sched_getaffinity(os.getppid()), os.sched_getaffinity(0)
        if not own < whole:
            return frozenset()
        taken = set(own)
        for task in Path("/proc/self/task").iterdir():
            try:
                cores = os.sched_getaffinity(int(task.name))
            except OSError:  # it has ended
                continue
            if cores < whole:
                taken |= cores
    except (OSError, AttributeError):
        return frozenset()
    return frozenset(whole - taken or whole)


def move_to(cores: frozenset[int]) -> None:
    """Run the calling thread, and those that it starts, on these cores; where it is, if there are none."""
    if not cores:
        return
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        logger.warning("cuvee: its threads stay on the engine's core: cores %s: %s", sorted(cores), error)
