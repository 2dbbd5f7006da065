"""`Accounts`: the bytes of entries in the store, of which LMCache is told."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from threading import Lock

from lmcache.v1.distributed.api import ObjectKey

Tell = Callable[[list[ObjectKey], list[int]], object]


class Accounts:
    """The bytes of entries by LMCache's keys. Thread-safe; LMCache is told of changes in their order.

    Args:
        stored: told of new entries and their bytes.
        deleted: told of entries that are gone, or out of the account.
        most: entries that are accounted for.
    """

    def __init__(self, stored: Tell, deleted: Tell, most: int) -> None:
        self._stored, self._deleted, self._most = stored, deleted, most
        self._lock = Lock()
        self._sizes: dict[ObjectKey, int] = {}  # the oldest first

    def __len__(self) -> int:
        return len(self._sizes)

    def add(self, entries: Iterable[tuple[ObjectKey, int]]) -> None:
        """Tell LMCache of entries that it does not know, or knows with another size, and that the oldest are gone if
        there are too many. The store keeps them.
        """
        with self._lock:
            new = [(key, size) for key, size in entries if self._sizes.get(key) != size]
            former = [(key, self._sizes.pop(key)) for key, _ in new if key in self._sizes]
            self._sizes.update(new)
            oldest = list(islice(self._sizes, max(len(self._sizes) - self._most, 0)))
            surplus = [(key, self._sizes.pop(key)) for key in oldest]
            for tell, changed in ((self._deleted, former), (self._stored, new), (self._deleted, surplus)):
                if changed:
                    tell([key for key, _ in changed], [size for _, size in changed])

    def remove(self, keys: list[ObjectKey]) -> None:
        """Tell LMCache that entries were deleted."""
        if keys:
            with self._lock:
                self._deleted(keys, [self._sizes.pop(key, 0) for key in keys])
