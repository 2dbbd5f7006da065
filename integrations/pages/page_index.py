"""`PageIndex`: in which entry of the store each page is."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from threading import Lock

from cuvee.codec.errors import CuveeError
from cuvee.integrations.entry_keys import EntryKeys
from cuvee.integrations.pages.entries import Place, parse_index_entry
from cuvee.integrations.pages.store_calls import StoreCalls
from cuvee.naming.identity import PageNames

_REMEMBERED = 1 << 16  # pages whose places are kept


class Places:
    """The places of the pages last seen, by digest. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._places: OrderedDict[bytes, Place] = OrderedDict()

    def known(self, pages: Sequence[bytes]) -> dict[bytes, Place]:
        """Return the places of those pages that are remembered."""
        with self._lock:
            return {page: self._places[page] for page in pages if page in self._places}

    def remember(self, places: dict[bytes, Place]) -> None:
        """Remember places; the oldest make room."""
        with self._lock:
            for page, place in places.items():
                self._places[page] = place
                self._places.move_to_end(page)
            while len(self._places) > _REMEMBERED:
                self._places.popitem(last=False)

    def forget(self, pages: Sequence[bytes]) -> bool:
        """Forget the places of pages; return whether any was remembered."""
        with self._lock:
            return sum(self._places.pop(page, None) is not None for page in pages) > 0

    def clear(self) -> None:
        """Forget all places."""
        with self._lock:
            self._places.clear()


class PageIndex:
    """Finds the entries of pages.

    Args:
        calls: of the store.
        keys: of its entries.
        names: gives the digests of runs of pages.
        places: remembered.
        run_pages: the most pages that share an entry. With 1, a page's place follows from its name.
    """

    def __init__(self, calls: StoreCalls, keys: EntryKeys, names: PageNames, places: Places, run_pages: int) -> None:
        self._calls, self._keys, self._names, self._places = calls, keys, names, places
        self._run_pages = run_pages

    def stored(self, pages: Sequence[bytes], timeout: float) -> list[bool]:
        """Return whether each page can be loaded."""
        while True:
            places = self.locate(pages, timeout)
            there = self._there({place.run for place in places if place is not None}, timeout)
            if there is None:
                return [False] * len(pages)
            held = {page: place for page, place in zip(pages, places, strict=True) if place and place.run in there}
            # A remembered place is out of date if the page was evicted. It may have been stored anew in another run.
            if not self._places.forget([page for page in pages if page not in held]):
                break
        if self._run_pages > 1:
            self._places.remember(held)
        return [page in held for page in pages]

    def locate(self, pages: Sequence[bytes], timeout: float) -> list[Place | None]:
        """Return where each page is: as remembered, or as its index entry says."""
        if self._run_pages == 1:
            return [Place(self._names.run([page]), 0) for page in pages]
        places = self._places.known(pages)
        unknown = [page for page in pages if page not in places]
        entries = self._calls.ask("get_many", "lookup", lambda: self.entries(unknown), timeout) if unknown else None
        for page, data in zip(unknown, entries or [None] * len(unknown), strict=True):
            if data is None:
                continue
            try:
                places[page] = parse_index_entry(data)
            except CuveeError as error:
                self._calls.fail("lookup", error)
        return [places.get(page) for page in pages]

    def entries(self, digests: Sequence[bytes]) -> list[bytes | None]:
        """Return the entries of these digests, as signed with any of the secrets; None for those that are not there."""
        store = self._calls.store
        found = self._keys.find(self._names.tenant, digests, lambda _, keys: store.get_many(keys))
        return [entry for _, entry in found]

    def _there(self, runs: AbstractSet[bytes], timeout: float) -> set[bytes] | None:
        """Return which of these runs are in the store; None if the store fails."""
        keys = {key: run for run in runs for key in self._keys.all(self._names.tenant, run)}
        if not keys:
            return set()
        known = self._calls.ask("contains", "lookup", lambda: self._calls.store.contains(list(keys)), timeout)
        return None if known is None else {run for run, there in zip(keys.values(), known, strict=True) if there}
