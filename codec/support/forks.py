"""Forked processes: a child inherits every lock, but none of the threads that would release them."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forked(Protocol):
    """An object that must react to a fork in the child process."""

    def after_fork(self) -> None:
        """Replace locks and everything else that belongs to threads. Called in the child, which has one thread."""


_OWNERS: weakref.WeakSet[Forked] = weakref.WeakSet()


def tell_after_fork(owner: Forked) -> None:
    """Call `owner.after_fork` in every child that is forked while `owner` lives."""
    _OWNERS.add(owner)


def _after_fork_in_child() -> None:
    for owner in tuple(_OWNERS):
        owner.after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
