"""Parse untrusted JSON of files and metadata: all faults are ValueErrors, and no number overflows."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

MAX_DEPTH = 64  # nested lists and objects; readers may then recurse


def parse_json(text: str | bytes, *, constants: bool = False) -> Any:
    """Parse untrusted JSON; `constants` accepts NaN and infinities, which Python writes although JSON does not have
    them.

    Raises:
        ValueError: the text is not JSON; an int has more digits than Python converts; lists and objects are nested
            deeper than `MAX_DEPTH`; without `constants`, NaN, an infinity, or a number too large for a float.

    Example:
        >>> parse_json("[" * 1000 + "]" * 1000)
        Traceback (most recent call last):
        ValueError: it is nested deeper than 64 lists and objects
    """
    try:
        data = json.loads(text, **({} if constants else _STRICT))
    except RecursionError as error:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} lists and objects") from error
    level = [data]
    for _ in range(MAX_DEPTH):
        level = [child for parent in level for child in _children(parent) if isinstance(child, dict | list)]
        if not level:
            return data
    raise ValueError(f"it is nested deeper than {MAX_DEPTH} lists and objects")


def _children(data: Any) -> Iterable[Any]:
    if isinstance(data, dict):
        return data.values()
    return data if isinstance(data, list) else ()


def _refuse(name: str) -> None:
    raise ValueError(f"it holds {name}")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"it holds {text:.20}, which is no float")
    return value


_STRICT: dict[str, Any] = {"parse_constant": _refuse, "parse_float": _finite}
