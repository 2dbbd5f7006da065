"""Suggest the nearest known names in an error about an unknown one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["suggestion"]

_MOST_LISTED = 40


def suggestion(name: object, candidates: Iterable[str], most: int = 1, form: str = "{!r}") -> str:
    """Return the end of an error message: the known names closest to `name`, or all names if none is close.

    Args:
        most: the largest number of names to suggest.
        form: format string for each name.

    Example:
        >>> suggestion("kiwi4", ["kivi4", "kivi2", "int8"])
        "did you mean 'kivi4'?"
        >>> suggestion("kivi", ["kivi4", "kivi2", "int8"], most=2)
        "did you mean 'kivi4' or 'kivi2'?"
        >>> suggestion("zstd", ["kivi4", "int8"])
        'there are kivi4, int8'
    """
    names = list(candidates)
    if near := difflib.get_close_matches(str(name), names, most):
        return f"did you mean {' or '.join(form.format(other) for other in near)}?"
    more = len(names) - _MOST_LISTED
    return f"there are {', '.join(names[:_MOST_LISTED])}" + (f" and {more} more" if more > 0 else "")
