"""Updates of SGLang's weights while it serves, of which it tells its storage backends nothing.

They are watched in attributes that SGLang looks up on every call: where a backend is attached while it serves, its
scheduler already holds the methods that update weights.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Protocol


class Updatable(Protocol):
    """Who is told of updates."""

    def updating(self) -> None:
        """The weights are about to change."""
        ...

    def updated(self, flushed: bool, version: str | None) -> None:
        """They have changed, or an update has failed; or the cache of before was flushed since."""
        ...


class _Watch:
    """What was seen of updates in this process, which SGLang's scheduler makes between two batches."""

    def __init__(self) -> None:
        self.listeners: weakref.WeakSet[Any] = weakref.WeakSet()
        self.seen = False  # whether there was an update
        self._nested = 0  # updates within a session of updates
        self._stale = False  # whether SGLang may hold pages of weights before
        self._version: str | None = None

    def add(self, listener: Updatable) -> None:
        self.listeners.add(listener)
        if self.seen:
            listener.updating()
            if self._nested == 0:
                listener.updated(not self._stale, None)

    def begin(self) -> None:
        self.seen = True
        if self._nested == 0:
            for each in list(self.listeners):
                each.updating()
        self._nested += 1
        self.wrote()

    def wrote(self) -> None:
        self._stale, self._version = True, None

    def succeeded(self, version: str | None) -> None:
        self._version = version

    def flushed(self) -> None:
        was, self._stale = self._stale, False
        if was and self._nested == 0:
            self._tell()

    def end(self) -> None:
        self._nested -= 1
        if self._nested == 0:
            self._tell()

    def _tell(self) -> None:
        for each in list(self.listeners):
            each.updated(not self._stale, self._version)


_watch = _Watch()


def watch_updates(listener: Updatable) -> None:
    """Tell a listener of every update in this process, and of those that were seen before."""
    from sglang.srt.managers.cache_controller import HiCacheController
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager as Manager

    _watch.add(listener)
    if isinstance(vars(Manager)["_session"], _Session):
        return
    Manager._observe_weight_load = _update(Manager._observe_weight_load)
    Manager.record_weight_version_after_update = _then(Manager.record_weight_version_after_update, _watch.succeeded)
    Manager._session = _Session(vars(Manager)["_session"])
    HiCacheController.reset = _then(HiCacheController.reset, _watch.flushed)


def _update(observe: Callable[..., Any]) -> Callable[..., Any]:
    """Return the context in which SGLang makes each update, with the watch told."""

    @wraps(observe)
    @contextmanager
    def told(self: Any, source: str) -> Iterator[None]:
        _watch.begin()
        try:
            with observe(self, source):
                yield
        finally:
            _watch.end()

    return told


def _then(method: Callable[..., Any], tell: Callable[..., None]) -> Callable[..., Any]:
    @wraps(method)
    def told(self: Any, *given: Any, **named: Any) -> Any:
        result = method(self, *given, **named)
        tell(*given, **named)
        return result

    return told


class _Session:
    """The attribute that holds SGLang's session of updates, between `begin_weight_update` and `end_weight_update`."""

    def __init__(self, slot: Any) -> None:
        self._slot = slot

    def __get__(self, manager: Any, kind: Any = None) -> Any:
        return self if manager is None else self._slot.__get__(manager, kind)

    def __set__(self, manager: Any, session: Any) -> None:
        try:
            before = self._slot.__get__(manager)
        except AttributeError:  # a new manager's
            before = None
        self._slot.__set__(manager, session)
        if before is None and session is not None:
            _watch.begin()
        elif before is not None and session is None:
            if not before.loaded_weights:  # others wrote to the weights' memory, until now
                _watch.wrote()
            _watch.end()
