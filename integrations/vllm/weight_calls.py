"""Calls of users to an engine's workers: some change weights, and vLLM tells neither connectors nor tiers of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any

# In the names of methods that may change weights: reload_weights, update_weights, finish_weight_update, load_model, …
_SUSPECT = ("weight", "load", "model", "param", "update", "sync")

_HARMLESS = ("compute_weight_checksums", "update_max_model_len")

_watching: list[weakref.WeakMethod[Callable[[], object]]] = []


def watch_calls(engine_core: Any, callback: Callable[[], object]) -> None:
    """Call `callback` after every call of a user that may have changed weights, also if it failed.

    Args:
        engine_core: vLLM's class `EngineCore`, by which users call workers, and say which version the weights have.
        callback: a bound method; forgotten with its object.
    """
    _watching[:] = [each for each in _watching if each() is not None]
    _watching.append(weakref.WeakMethod(callback))
    for name in ("collective_rpc", "set_weight_version"):
        call = getattr(engine_core, name)
        if not hasattr(call, "__wrapped__"):
            setattr(engine_core, name, _watched(call))


def _watched(call: Callable[..., Any]) -> Callable[..., Any]:
    rpc = call.__name__ == "collective_rpc"

    @wraps(call)
    def watched(self: Any, method: Any, *args: Any, **named: Any) -> Any:
        try:
            return call(self, method, *args, **named)
        finally:
            if not rpc or _may_change_weights(method):
                for each in _watching:
                    if (listener := each()) is not None:
                        listener()

    return watched


def _may_change_weights(method: Any) -> bool:
    """Return whether a method of the workers may change weights, by its name; a function's says nothing."""
    harmless = isinstance(method, str) and (method in _HARMLESS or not any(part in method for part in _SUSPECT))
    return not harmless
