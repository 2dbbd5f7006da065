"""Threads that give way to the engine's. On Linux a niceness belongs to a thread, and to those that it starts."""

from __future__ import annotations

import logging
import os
import threading

logger = logging.getLogger(__name__)

LOWEST_PRIORITY = 19  # of Linux's `nice`


def give_way(niceness: int, thread: int | None = None) -> None:
    """Run a thread, by its native id or the calling one, only so often when others want its core. It stays like that:
    raising a priority takes a privilege.
    """
    if not niceness:
        return
    try:
        thread = threading.get_native_id() if thread is None else thread
        os.setpriority(os.PRIO_PROCESS, thread, max(niceness, os.getpriority(os.PRIO_PROCESS, thread)))
    except ProcessLookupError:
        pass  # the thread has ended
    except (OSError, AttributeError) as error:
        logger.warning("cuvee: threads that read or store beside the engine keep their priority: %s", error)
