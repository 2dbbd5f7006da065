"""`Guard`: keeps an adapter's errors from its engine.

vLLM calls its connector unguarded: an error in any hook ends the engine, and every request with it. Older releases of
SGLang lose the thread that called a storage backend. A cache is not worth that. So an error inside a hook stays there:
it is counted and logged, and the affected tokens are computed. Only start-up may refuse, because no request waits for
an answer yet.

A contained error must also leave nothing behind that the engine would wait for or take for valid. Each guarded block
therefore names what to do when it fails: `then`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Protocol

from cuvee.codec.support.once import Once

logger = logging.getLogger(__name__)

_FATAL = (KeyboardInterrupt, SystemExit)  # the process has to end


class Recorder(Protocol):
    """Counts events, by name and label."""

    def count(self, name: str, value: float = 1, label: str = "") -> None:
        """Add `value` to a counter."""
        ...


class Guard:
    """Makes contexts that contain errors. Thread-safe.

    Args:
        recorder: counts them as `contained`, by entry point.

    Example:
        with guard("arrived", then=lambda: give_up(request)):
            look_up(request)
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._once = Once(logger, logging.ERROR)

    def __call__(self, entry: str, then: Callable[[], object] | None = None) -> Guarded:
        """Return a context that suppresses its block's errors, KeyboardInterrupt and SystemExit apart.

        Args:
            entry: the hook that runs, one of the values of the metric `contained`.
            then: called after an error, to leave a consistent state. Its own errors are contained as well.
        """
        return Guarded(self, entry, then)

    def note(self, entry: str, error: BaseException) -> None:
        """Count and log an error. The first of its kind at an entry point is logged with its traceback, the others at
        DEBUG, so that clients cannot fill the log. Raises nothing.
        """
        with suppress(Exception):
            self._once(
                (entry, type(error)), "cuvee: an error in %s is kept from the engine; affected tokens are computed, or "
                "not stored", entry, error=error,
            )  # fmt: skip
        with suppress(Exception):
            self._recorder.count("contained", label=entry)


class Guarded:
    """A context of `Guard`; a class, because the scheduler enters one per request and step."""

    __slots__ = ("_entry", "_guard", "_then")

    def __init__(self, guard: Guard, entry: str, then: Callable[[], object] | None) -> None:
        self._guard, self._entry, self._then = guard, entry, then

    def __enter__(self) -> None:
        """Prepare nothing."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if error is None:
            return False
        if isinstance(error, _FATAL):
            return False
        self._guard.note(self._entry, error)
        if self._then is not None:
            with Guarded(self._guard, self._entry, None):
                self._then()
        return True
