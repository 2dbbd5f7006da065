"""Attributes that are made when they are first read."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cached_property
from typing import Any, TypeVar

T = TypeVar("T")


class lazy(cached_property[T]):
    """`functools.cached_property` as it is from Python 3.12 on: without a lock.

    Python 3.11 holds one lock per attribute, for all instances, while the value is made. Threads would wait for each
    other's instances, and a child forked meanwhile would wait for ever. Without it two threads may both make the value,
    and either is kept, so making it must have no other effect.
    """

    def __init__(self, func: Callable[[Any], T]) -> None:
        super().__init__(func)
        self.lock = nullcontext()
