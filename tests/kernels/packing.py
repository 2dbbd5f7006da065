"""Launch by names alone: a test keeps all arguments of a launch in one flat mapping and changes what it is about."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from cuvee.kernels.ops import arguments


def launch(function: Callable[..., Any], **flat: Any) -> None:
    """Call a launcher.

    Args:
        function: a parameter of it whose type is in `ops.arguments` is made of the arguments named as its fields, or
            `parameter_field` where the class comes twice.
        flat: every argument by name.
    """
    given: dict[str, Any] = {}
    used: set[str] = set()
    for name, parameter in inspect.signature(function).parameters.items():
        kind = getattr(arguments, str(parameter.annotation), None)
        if kind is None:
            if name in flat:
                given[name] = flat[name]
                used.add(name)
            continue
        own = {}
        for field in fields(kind):
            key = next((key for key in (f"{name}_{field.name}", field.name) if key in flat), None)
            if key is not None:
                own[field.name] = flat[key]
                used.add(key)
        given[name] = kind(**own)
    unknown = sorted(set(flat) - used)
    assert not unknown, f"{function.__name__} takes no {unknown}"
    function(**given)
