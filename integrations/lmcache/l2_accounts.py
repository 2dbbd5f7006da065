"""`Accounts`: what LMCache is told of the entries in the store: their bytes, and which of them were used last."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from threading import Lock

from lmcache.v1.distributed.api import ObjectKey

Tell = Callable[[list[ObjectKey], list[int]], object]


class Accounts:
    """The bytes of entries by LMCache's keys. Thread-safe; LMCache is told of changes in their order.

    Args:
        stored: told of new entries and their bytes.
        deleted: told of entries that are gone, or out of the account.
        accessed: told of entries that were used.
        most: entries that are accounted for.
    """

    def __init__(self, stored: Tell, deleted: Tell, accessed: Callable[[list[ObjectKey]], object], most: int) -> None:
        self._stored, self._deleted, self._accessed, self._most = stored, deleted, accessed, most
        self._lock = Lock()
        self._sizes: OrderedDict[ObjectKey, int] = OrderedDict()  # the last used one last

    def __len__(self) -> int:
        return len(self._sizes)

    def add(self, entries: Iterable[tuple[ObjectKey, int]]) -> None:
        """Tell LMCache of entries that it does not know, or knows with another size, and that those are gone which no
        longer fit in the account. The store keeps them.
        """
        with self._lock:
            new = [(key, size) for key, size in entries if self._sizes.get(key) != size]
            former = [(key, self._sizes.pop(key)) for key, _ in new if key in self._sizes]
            self._sizes.update(new)
            surplus = [self._sizes.popitem(last=False) for _ in range(len(self._sizes) - self._most)]
            for tell, told in ((self._deleted, former), (self._stored, new), (self._deleted, surplus)):
                if told:
                    tell([key for key, _ in told], [size for _, size in told])

    def touch(self, keys: list[ObjectKey]) -> None:
        """Tell LMCache that entries were used."""
        if not keys:
            return
        with self._lock:
            for key in keys:
                if key in self._sizes:  # and was not deleted meanwhile
                    self._sizes.move_to_end(key)
        self._accessed(keys)

    def remove(self, keys: list[ObjectKey]) -> None:
        """Tell LMCache that entries were deleted."""
        if keys:
            with self._lock:
                self._deleted(keys, [self._sizes.pop(key, 0) for key in keys])
