"""JSON from others: files and metadata. Whatever is wrong with it is a ValueError, and nothing in it overflows."""

from __future__ import annotations

import json
import math
from typing import Any

MAX_DEPTH = 64  # lists and objects within each other; what reads them may then call itself


def parse_json(text: str | bytes, *, constants: bool = False) -> Any:
    """Parse untrusted JSON.

    Args:
        text: the document; bytes are UTF-8, UTF-16 or UTF-32.
        constants: whether NaN and infinities are accepted, which Python writes, though JSON does not have them.

    Raises:
        ValueError: no JSON; an int of more digits than Python converts; lists and objects nested deeper than
            `MAX_DEPTH`; NaN or an infinity, be it a number too large for a float, unless `constants`.

    Example:
        >>> parse_json('{"layers": [1, 2]}')
        {'layers': [1, 2]}
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
        level = [part for whole in level for part in _parts(whole) if isinstance(part, dict | list)]
        if not level:
            return data
    raise ValueError(f"it is nested deeper than {MAX_DEPTH} lists and objects")


def _parts(data: Any) -> Any:
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
