"""A clock for tests that pass it to what they test."""

from __future__ import annotations


class Clock:
    """A monotonic clock that tests set by `now`, in seconds."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now
