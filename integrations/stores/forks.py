"""Forked processes: a child has a copy of every lock, and none of the threads that would give them back."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forked(Protocol):
    """What has to know that it lives in a child now."""

    def after_fork(self) -> None:
        """Make new locks, and whatever else belongs to threads; called in the child, where there is one thread."""


_OWNERS: weakref.WeakSet[Forked] = weakref.WeakSet()


def tell_after_fork(owner: Forked) -> None:
    """Have `owner.after_fork` called in every child that is forked while `owner` lives."""
    _OWNERS.add(owner)


def _after_fork_in_child() -> None:
    for owner in tuple(_OWNERS):
        owner.after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
