"""Attributes that are computed when they are first read."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cached_property
from typing import Any, TypeVar

T = TypeVar("T")


class lazy(cached_property[T]):
    """`functools.cached_property` without a lock, as in Python 3.12 and later.

    Python 3.11 holds one lock per attribute, for all instances, while it computes the value. Threads would wait for
    each other's instances, and a child forked meanwhile would wait forever. Without the lock, two threads may both
    compute the value and either result is kept, so the computation must have no side effects.
    """

    def __init__(self, func: Callable[[Any], T]) -> None:
        super().__init__(func)
        self.lock = nullcontext()
