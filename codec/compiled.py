"""Compiled loops: Numba's compiler, with a cache on disk if there is a place for one.

Compiling all loops takes some twenty seconds. A cache beside the sources, or in the user's cache folder, saves every
later process that time. If both are read-only, as in a container or a service without a home, Numba refuses to define
the function at all. Here it is then compiled anew in each process. That is logged once, with the remedy:
`NUMBA_CACHE_DIR`. The cache is pickled, so nobody else may be able to write to it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import numba as nb

_log = logging.getLogger(__name__)
_lock = threading.Lock()
_told: set[str] = set()


def compiled(function: Callable[..., Any]) -> Any:
    """The function, compiled at its first call. It releases the GIL.

    If the cache cannot be used, that costs time, but the call works.
    """
    made: Any = nb.njit(nogil=True)(function)
    try:
        made.enable_caching()
    except (RuntimeError, OSError) as error:
        # Numba has no class of its own for "no locator available". Any other problem shows up when it compiles.
        _tell("there is no writable folder for compiled code", error)
        return made
    # A disk that is full by then, or read-only, fails at the call that compiles.
    cache = made._cache
    cache.load_overload = _forgiving(cache.load_overload, "compiled code cannot be read from its cache")
    cache.save_overload = _forgiving(cache.save_overload, "compiled code cannot be written to its cache")
    return made


def _forgiving(work: Callable[..., Any], what: str) -> Callable[..., Any]:
    def tried(*arguments: Any) -> Any:
        try:
            return work(*arguments)
        except Exception as error:  # from the file system, or from pickle because the file is damaged
            _tell(what, error)
            return None

    return tried


def _tell(what: str, error: Exception) -> None:
    """Log the first time that something happens."""
    with _lock:
        if what in _told:
            return
        _told.add(what)
    _log.warning(
        "cuvee: %s; it is compiled anew in every process, which takes some seconds (said once). Set NUMBA_CACHE_DIR to "
        "a folder that this user alone can write: %s",
        what,
        error,
    )
