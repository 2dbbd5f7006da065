"""Events about chunks in the store: when a router learns that one is there, or is not any more.

    save planned --every rank has stored it--> stored --a lookup misses it, or a reset--> removed

Stores evict by themselves and say nothing, so a chunk that is gone is reported once a lookup misses it. Tails have no
events, because whole chunks supersede them, and neither have segments, which are no prefixes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from cuvee.integrations.vllm.messages import Report, Save

_MOST = 1 << 16  # chunks that are remembered: of older ones it is not reported that they are gone


class EventPair(NamedTuple):
    """The events that report a chunk as stored, and as removed."""

    stored: Any
    removed: Any


class SchedulerEvents:
    """Collects events until the engine takes them.

    Args:
        shards: number of ranks that store.
        make: makes the events of a range of a request's tokens; None: the engine has no names for them. Without it,
            nothing is collected.
    """

    def __init__(self, shards: int, make: Callable[[Any, range], EventPair | None] | None) -> None:
        self._shards = shards
        self._make = make
        # With the number of ranks that have not stored it yet.
        self._planned: OrderedDict[bytes, tuple[EventPair, int]] = OrderedDict()
        # The events that report them as removed; the others hold the tokens.
        self._stored: OrderedDict[bytes, Any] = OrderedDict()
        self._due: list[Any] = []

    def planned(self, request: Any, saves: Sequence[Save]) -> None:
        """Note that a request's entries are to be stored."""
        if self._make is None:
            return
        for save in saves:
            entry = save.entry
            if entry.kind != "chunk" or entry.digest in self._stored:
                continue
            pair = self._make(request, range(entry.start, entry.end))
            if pair is not None:
                self._planned[entry.digest] = pair, self._shards
                _bound(self._planned)

    def take(self, report: Report) -> None:
        """Note what a rank has stored, and what it has not."""
        for digest in report.unsaved:
            self._planned.pop(digest, None)
        for digest in report.stored:
            pair, missing = self._planned.pop(digest, (None, 0))
            if pair is not None and missing > 1:
                self._planned[digest] = pair, missing - 1
            elif pair is not None:
                self._due.append(pair.stored)
                self._stored[digest] = pair.removed
                _bound(self._stored)

    def gone(self, digest: bytes) -> None:
        """Note that a lookup has missed an entry."""
        removed = self._stored.pop(digest, None)
        if removed is not None:
            self._due.append(removed)

    def reset(self) -> None:
        """Note that nothing which was stored will be found."""
        self._planned.clear()
        for digest in list(self._stored):
            self.gone(digest)

    def take_due(self) -> list[Any]:
        """Return and forget the events that are due."""
        due, self._due = self._due, []
        return due


def _bound(entries: OrderedDict[bytes, Any]) -> None:
    if len(entries) > _MOST:
        entries.popitem(last=False)
