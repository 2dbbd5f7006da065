"""`EngineCalls`: calls of the engine, which end before the store is closed."""

from __future__ import annotations

from threading import Condition


class EngineCalls:
    """A context for the calls of the engine. It counts them, and admits none once it is closed."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._under_way = 0
        self._closed = False

    def __enter__(self) -> bool:
        """Return whether the call is admitted."""
        with self._changed:
            self._under_way += 1
            return not self._closed

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._under_way -= 1
            self._changed.notify_all()

    def close(self, timeout: float) -> None:
        """Admit no more calls, and wait at most this many seconds for those under way."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._under_way, timeout)
