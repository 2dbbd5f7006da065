"""What keeps the connector's own errors from the engine: `Guard`.

vLLM calls its connector unguarded: an error in any hook ends the engine, and every request with it. A cache is not
worth that. So whatever fails inside a hook stays there: it is counted and logged, and what it was about is computed.
Only start-up may refuse, since nobody waits for an answer yet.

Containing an error is half of it. The other half is to leave nothing behind that the engine would wait for, or take for
valid. Each guarded block therefore names what is to be done where it fails: `then`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

from cuvee.integrations.vllm.metrics import Recorder

logger = logging.getLogger(__name__)

_FATAL = (KeyboardInterrupt, SystemExit)  # somebody wants the process to end


class Guard:
    """Makes contexts that errors do not leave. Safe to use from several threads.

    Args:
        recorder: counts them as `contained`, by entry point.

    Example:
        with guard("arrived", then=lambda: give_up(request)):
            look_up(request)
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._seen: set[tuple[str, type[BaseException]]] = set()

    def __call__(self, entry: str, then: Callable[[], object] | None = None) -> Guarded:
        """A context that ends early, but quietly, where its block raises. KeyboardInterrupt and SystemExit pass.

        Args:
            entry: the hook that runs, one of the values of the metric `contained`.
            then: called after an error, to leave the state whole. What it raises is contained as well.
        """
        return Guarded(self, entry, then)

    def note(self, entry: str, error: BaseException) -> None:
        """Count and log an error. The first of its kind at an entry point is logged with its traceback, the others at
        DEBUG: what clients send must not fill the log. Raises nothing.
        """
        kind = entry, type(error)
        level = logging.DEBUG if kind in self._seen else logging.ERROR
        self._seen.add(kind)
        with suppress(Exception):
            logger.log(
                level, "cuvee: an error in %s is kept from the engine; what it was about is computed, or not stored. "
                "More of its kind are logged at DEBUG", entry, exc_info=error,
            )  # fmt: skip
        with suppress(Exception):
            self._recorder.count("contained", label=entry)


class Guarded:
    """A context of `Guard`; a class, because the scheduler enters one per request and step."""

    __slots__ = ("_entry", "_guard", "_then")

    def __init__(self, guard: Guard, entry: str, then: Callable[[], object] | None) -> None:
        self._guard, self._entry, self._then = guard, entry, then

    def __enter__(self) -> None:
        """Nothing to prepare."""

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
