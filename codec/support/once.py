"""`Once`: logs the first event of each kind, whichever thread it comes from."""

from __future__ import annotations

import logging

_KINDS = 1000  # of events that are counted apart


class Once:
    """Logs the first event of each kind, and the others at DEBUG, so that clients and failures cannot fill the log.

    Thread-safe, without a lock that a forked child could find taken.

    Args:
        logger: that logs.
        level: of the first event of a kind, unless it has another.
        most: kinds that are counted apart: clients choose some of them.

    Example:
        >>> once = Once(logging.getLogger("mine"))
        >>> once("full", "%d chunks are not stored", 3), once("full", "%d chunks are not stored", 5)
        (True, False)
    """

    def __init__(self, logger: logging.Logger, level: int = logging.WARNING, most: int = _KINDS) -> None:
        self._logger, self._level, self._most = logger, level, most
        self._seen: dict[object, object] = {}

    def __call__(
        self,
        kind: object,
        message: str,
        *arguments: object,
        level: int | None = None,
        error: BaseException | None = None,
    ) -> bool:
        """Log an event; return whether it is the first of its kind. Beyond `most` kinds none is the first.

        Args:
            kind: of the event, hashable.
            message: as `Logger.log` takes it.
            arguments: of the message.
            level: of the first event.
            error: whose traceback is logged.
        """
        first = self._is_first(kind)
        if first:
            message += " (logged once)"
        level = (self._level if level is None else level) if first else logging.DEBUG
        self._logger.log(level, message, *arguments, exc_info=error)
        return first

    def _is_first(self, kind: object) -> bool:
        if kind in self._seen or len(self._seen) >= self._most:
            return False
        mine = object()
        return self._seen.setdefault(kind, mine) is mine  # one step, where a look and then a change would let two in
