"""Checks of the fields of plain data: each names the field, the rule and what it found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cuvee.codec.errors import InputError
from cuvee.codec.support.suggest import suggestion


def check_type(name: str, value: Any, kind: type) -> None:
    """Refuse a value that is not of a type."""
    if not isinstance(value, kind):
        raise InputError(f"{name}: must be a {kind.__name__}, got {value!r}")


def check_tuple(name: str, value: Any, of: str) -> None:
    """Refuse a value that is no tuple, or an empty one."""
    if not isinstance(value, tuple) or not value:
        raise InputError(f"{name}: must be a tuple with at least one {of}, got {value!r}")


def check_positive(name: str, value: Any) -> None:
    """Refuse a value that is not an int above 0."""
    if type(value) is not int or value <= 0:
        raise InputError(f"{name}: must be an int above 0, got {value!r}")


def checked_list(name: str, value: Any) -> list[Any]:
    """Return a list of parsed JSON; refuse anything else."""
    if not isinstance(value, list):
        raise InputError(f"{name}: must be a list, got {value!r}")
    return value


def check_keys(owner: str, data: Any, required: tuple[str, ...], optional: tuple[str, ...] = ()) -> None:
    """Refuse an object whose entries are unknown or missing."""
    if not isinstance(data, Mapping):
        raise InputError(f"{owner}: must be an object with named entries, got {type(data).__name__}")
    for key in data:
        if key not in required and key not in optional:
            raise InputError(f"{owner}: must have known entries, got {key!r}: {suggestion(key, required + optional)}")
    for key in required:
        if key not in data:
            raise InputError(f"{owner}: must have the entry {key!r}, got none")
