"""`RunReader`: finds, fetches and opens the runs of an engine's pages, in order, up to the first that fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import torch

from cuvee.codec.errors import CorruptError, CuveeError
from cuvee.codec.open_blob import Expected
from cuvee.codec.paged import NOWHERE
from cuvee.integrations.chunk_io import ChunkIO, Opened, Stored, fetch_ahead
from cuvee.integrations.entry_keys import EntryKeys
from cuvee.integrations.pages.entries import parse_run_entry
from cuvee.integrations.pages.page_index import PageIndex, Places
from cuvee.integrations.pages.store_calls import StoreCalls, time_left
from cuvee.naming.identity import PageNames


@dataclass(frozen=True, slots=True)
class Wanted:
    """A page to load: its number in the call, its digest, and its position in its run."""

    number: int
    page: bytes
    position: int


@dataclass(frozen=True, slots=True)
class Run:
    """A run whose entry is open: its digest, the entry's bytes, its blob, and the pages that are wanted of it."""

    digest: bytes
    entry_bytes: int
    opened: Opened
    wanted: tuple[Wanted, ...]


# Reads found runs, as digest, entry and wanted pages; returns how many up to the first that failed, and its error.
Read = Callable[[Sequence[tuple[bytes, bytes, list[Wanted]]]], tuple[int, CuveeError | None]]


@dataclass(frozen=True, slots=True)
class Fetched:
    """Pages whose entries are in memory, verified. No store is needed to restore them.

    Attributes:
        pages: how many there are: the first ones of those that were asked for.
        runs: what holds them.
    """

    pages: int
    runs: tuple[Run, ...] = ()

    def first(self, pages: int) -> Fetched:
        """Return the first `pages` of them."""
        kept = (
            replace(run, wanted=tuple(each for each in run.wanted if each.number < pages)) for run in self.runs
        )  # fmt: skip
        return Fetched(min(pages, self.pages), tuple(run for run in kept if run.wanted))


class RunReader:
    """Reads the runs of one rank and tenant.

    Args:
        io: opens and decodes their blobs.
        calls: of the store.
        keys: of its entries.
        names: gives the digests of runs of pages.
        places: remembered.
        run_pages: the most pages that share an entry.
        patience: seconds that deleting a damaged run may take.
    """

    def __init__(
        self,
        io: ChunkIO,
        calls: StoreCalls,
        keys: EntryKeys,
        names: PageNames,
        places: Places,
        run_pages: int,
        patience: float,
    ) -> None:
        self._io, self._calls, self._keys, self._names = io, calls, keys, names
        self.places, self._run_pages, self._patience = places, run_pages, patience
        self.index = PageIndex(calls, keys, names, places, run_pages)

    def in_order(self, pages: Sequence[bytes], read: Read, timeout: float, until: float | None = None) -> int:
        """Find pages up to the first that is missing, and read their runs.

        Args:
            pages: digests.
            read: reads runs.
            timeout: seconds that the store may take for anything.
            until: the time at which it must be done with everything; default: any.

        Returns:
            for how many pages from the first on that was done.
        """
        done = [False] * len(pages)
        reached = 0
        while reached < len(done):
            wanted: dict[bytes, list[Wanted]] = {}
            for number, place in enumerate(self.index.locate(pages[reached:], time_left(timeout, until)), reached):
                if place is None:
                    break
                wanted.setdefault(place.run, []).append(Wanted(number, pages[number], place.position))
            absent = self._fetch_and_read(read, wanted, done, timeout, until) if wanted else None
            reached = done.index(False) if False in done else len(done)
            # A remembered place is out of date if the page was evicted and stored anew in another run.
            if absent is None or not self.places.forget([each.page for each in wanted[absent]]):
                break
        return reached

    def _fetch_and_read(
        self,
        read: Read,
        wanted: dict[bytes, list[Wanted]],
        done: list[bool],
        timeout: float,
        until: float | None,
    ) -> bytes | None:
        """Fetch some runs, in order, and read them; mark their pages in `done`, up to a run that failed.

        Returns:
            that run, if it is because the store does not have it.
        """

        def answer(fetching: Future[list[bytes | None]]) -> list[bytes | None] | None:
            return self._calls.wait_for("get_many", "fetch", fetching, timeout, until)

        for runs, entries in fetch_ahead(self._calls.waiters, self.index.entries, list(wanted), answer):
            found: list[tuple[bytes, bytes, list[Wanted]]] = []
            for run, entry in zip(runs, entries or [None] * len(runs), strict=True):
                if entry is None:
                    break
                found.append((run, entry, wanted[run]))
            count, problem = read(found)
            for _, _, pages in found[:count]:
                for each in pages:
                    done[each.number] = True
            if problem is not None:
                self.blame(problem, found[count][0], found[count][2])
                return None
            if len(found) < len(runs):
                return runs[len(found)]
        return None

    def open(self, digest: bytes, entry: bytes, wanted: Sequence[Wanted], start: int | None, dtype: str) -> Run:
        """Open the entry of a run, of which some pages are wanted; `start` is the position of page number 0.

        Raises:
            CuveeError: it is not the entry of this run, or its blob is not what its pages call for.
        """
        pages, blob = parse_run_entry(entry)
        if self._names.run(pages) != digest:
            raise CorruptError("run entry: must list the pages of its own digest, got others")
        if not all(_is_listed(pages, each) for each in wanted):
            raise CorruptError("index entry: must name the place of its page, got that of another")
        start = self.position(start, wanted[0].number - wanted[0].position)
        expected = Expected(len(pages) * self._names.page_tokens, start, dtype)
        stored = Stored((blob,), self._keys.bound_to(self._names.tenant, digest), expected, "run entry")
        return Run(digest, len(entry), self._io.open(stored), tuple(wanted))

    def slots_of(self, run: Run, slots: torch.Tensor) -> torch.Tensor:
        """Return where the tokens of a run go, given the slots of all pages of the call."""
        size = self._names.page_tokens
        at = torch.full((run.opened.blob.tokens,), NOWHERE)
        for each in run.wanted:
            own = slots[each.number * size : (each.number + 1) * size]
            at[each.position * size : (each.position + 1) * size] = own
        return at

    def blame(self, problem: CuveeError, run: bytes, wanted: Sequence[Wanted]) -> None:
        """Count a run that was not read. If it never will be, delete it and what led to it, so that its pages can be
        stored again.
        """
        self._calls.fail("decode", problem)
        if not problem.blames_blob:
            return
        pages = [each.page for each in wanted]
        self.places.forget(pages)
        keys = self.keys_of(run, *(pages if self._run_pages > 1 else ()))

        def delete() -> None:
            for key in keys:
                try:
                    self._calls.store.delete(key)
                except Exception as error:
                    self._calls.fail("store", error)

        self._calls.ask("delete", "store", delete, self._patience)  # an engine may wait for the lookup

    def keys_of(self, *digests: bytes) -> list[str]:
        """Return all keys under which entries may be."""
        return [key for digest in digests for key in self._keys.all(self._names.tenant, digest)]

    def position(self, start: int | None, page: int) -> int | None:
        """Return the position of a page's first token in its blob; None if it matters and is unknown.

        Lossless coding uses no positions and always gets 0, so that pages are the same with and without them.
        """
        if self._io.codec.lossless:
            return 0
        return None if start is None else start + page * self._names.page_tokens


def _is_listed(pages: Sequence[bytes], wanted: Wanted) -> bool:
    """Return whether a run's list has the wanted page where its index entry says."""
    return wanted.position < len(pages) and pages[wanted.position] == wanted.page
