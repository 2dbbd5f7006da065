"""Updates of SGLang's weights while it serves, of which it tells its storage backends nothing."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any, Protocol

_UPDATES = ("disk", "distributed", "tensor", "ipc")


class Updatable(Protocol):
    """Who is told of updates."""

    def updating(self) -> None:
        """The weights are about to change."""
        ...

    def updated(self, flushed: bool, version: str | None) -> None:
        """They have changed; or not, if the update failed, and then the cache is not flushed either."""
        ...


_watching: weakref.WeakSet[Any] = weakref.WeakSet()


def watch_updates(listener: Updatable) -> None:
    """Tell a listener of every update in this process, which SGLang's scheduler makes between two batches."""
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager as Manager

    _watching.add(listener)
    for source in _UPDATES:
        name = f"update_weights_from_{source}"
        if not hasattr(getattr(Manager, name), "__wrapped__"):
            setattr(Manager, name, _told(getattr(Manager, name)))


def _told(update: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(update)
    def told(self: Any, request: Any) -> Any:
        listeners = list(_watching)
        for each in listeners:
            each.updating()
        flushed = False
        try:
            output = update(self, request)
            flushed = bool(output.success and request.flush_cache)
            return output
        finally:
            for each in listeners:
                each.updated(flushed, request.weight_version)

    return told
