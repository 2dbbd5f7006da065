"""`Runs`: finds, fetches and opens the runs of an engine's pages in order; encodes and stores those that are missing.

Pages are read up to the first that fails: an engine has no use for pages behind one that is missing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

import torch

from cuvee.codec.errors import CorruptError, CuveeError, InputError
from cuvee.codec.open_blob import Expected
from cuvee.codec.paged import NOWHERE, PagedCache
from cuvee.integrations.chunk_io import BATCH, Chunk, ChunkIO, Opened, Stored, fetch_ahead
from cuvee.integrations.entry_keys import EntryKeys
from cuvee.integrations.guard import Recorder
from cuvee.integrations.pages.entries import (
    Place,
    make_index_entry,
    make_run_entry,
    parse_index_entry,
    parse_run_entry,
)
from cuvee.integrations.pages.recognition import Recognized, Recognizer
from cuvee.integrations.pages.store_calls import StoreCalls, time_left
from cuvee.integrations.stores import StoreError
from cuvee.naming.identity import PageNames

_NO_POSITION = (
    "start: must be known for a lossy quality, because keys are coded without their rotation, and was not recognized "
    "from the keys: let the engine pass the pages' prefix, give a learned profile of this model, or set quality to "
    "'lossless'"
)


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
        kept = (replace(run, wanted=tuple(each for each in run.wanted if each.number < pages)) for run in self.runs)
        return Fetched(min(pages, self.pages), tuple(run for run in kept if run.wanted))


@dataclass(frozen=True, slots=True)
class Runs:
    """The runs of one rank and tenant.

    Attributes:
        io: codes their blobs.
        calls: of the store.
        keys: of its entries.
        names: gives the digests of runs of pages.
        recognizer: tells ids and positions of tokens; None: neither is needed.
        counts: told what happens.
        run_pages: the most pages that share an entry. With 1, a page's place follows from its name.
        lookup_timeout: seconds that a lookup may take.
        load_timeout: seconds that anything else may take: writing, for all runs of a call together.
    """

    io: ChunkIO
    calls: StoreCalls
    keys: EntryKeys
    names: PageNames
    recognizer: Recognizer | None
    counts: Recorder
    run_pages: int
    lookup_timeout: float
    load_timeout: float

    # Finding --------------------------------------------------------------------------------------------------------

    def stored(self, pages: Sequence[bytes]) -> list[bool]:
        """Return whether each page, by its digest, can be loaded."""
        places = self._locate(pages, self.lookup_timeout)
        runs = {place.run for place in places if place is not None}
        keys = {key: run for run in runs for key in self.keys_of(run)}
        contains = partial(self.calls.store.contains, list(keys))
        known = self.calls.ask("contains", "lookup", contains, self.lookup_timeout) if keys else None
        there = {run for run, is_there in zip(keys.values(), known or [False] * len(keys), strict=True) if is_there}
        return [place is not None and place.run in there for place in places]

    def keys_of(self, *digests: bytes) -> list[str]:
        """Return all keys under which entries may be."""
        return [key for digest in digests for key in self.keys.all(self.names.tenant, digest)]

    def _locate(self, pages: Sequence[bytes], timeout: float) -> list[Place | None]:
        """Return where each page is, as its index entry says."""
        if self.run_pages == 1:
            return [Place(self.names.run([page]), 0) for page in pages]
        entries = self.calls.ask("get_many", "lookup", partial(self._entries, pages), timeout)
        places: list[Place | None] = [None] * len(pages)
        for number, entry in enumerate(entries or ()):
            try:
                places[number] = None if entry is None else parse_index_entry(entry)
            except CuveeError as error:
                self.calls.fail("lookup", error)
        return places

    def _entries(self, digests: Sequence[bytes]) -> list[bytes | None]:
        """Return the entries of these digests, as signed with any of the secrets; None for those that are not there."""
        found = self.keys.find(self.names.tenant, digests, lambda _, keys: self.calls.store.get_many(keys))
        return [entry for _, entry in found]

    # Reading --------------------------------------------------------------------------------------------------------

    def in_order(self, pages: Sequence[bytes], read: Read, timeout: float, until: float | None = None) -> int:
        """Find pages up to the first that is missing, and read their runs, up to one that fails.

        Args:
            pages: digests.
            read: reads runs.
            timeout: seconds that the store may take for anything.
            until: the time at which it must be done with everything; default: any.

        Returns:
            for how many pages from the first on that was done.
        """
        done = [False] * len(pages)
        wanted: dict[bytes, list[Wanted]] = {}
        for number, place in enumerate(self._locate(pages, time_left(timeout, until))):
            if place is None:
                break
            wanted.setdefault(place.run, []).append(Wanted(number, pages[number], place.position))

        def answer(fetching: Future[list[bytes | None]]) -> list[bytes | None] | None:
            return self.calls.wait_for("get_many", "fetch", fetching, timeout, until)

        for runs, entries in fetch_ahead(self.calls.waiters, self._entries, list(wanted), answer):
            found: list[tuple[bytes, bytes, list[Wanted]]] = []
            for run, entry in zip(runs, entries or [None] * len(runs), strict=True):
                if entry is None:
                    break
                found.append((run, entry, wanted[run]))
            count, problem = read(found)
            for _, _, those in found[:count]:
                for each in those:
                    done[each.number] = True
            if problem is not None:
                self.blame(problem, found[count][0], found[count][2])
            if problem is not None or len(found) < len(runs):
                break
        return [*done, False].index(False)

    def open(self, digest: bytes, entry: bytes, wanted: Sequence[Wanted], start: int | None, dtype: str) -> Run:
        """Open the entry of a run, of which some pages are wanted; `start` is the position of page number 0.

        Raises:
            CuveeError: it is not the entry of this run, or its blob is not what its pages call for.
        """
        pages, blob = parse_run_entry(entry)
        if self.names.run(pages) != digest:
            raise CorruptError("run entry: must list the pages of its own digest, got others")
        if not all(_is_listed(pages, each) for each in wanted):
            raise CorruptError("index entry: must name the place of its page, got that of another")
        start = self._position(start, wanted[0].number - wanted[0].position)
        expected = Expected(len(pages) * self.names.page_tokens, start, dtype)
        stored = Stored((blob,), self.keys.bound_to(self.names.tenant, digest), expected, "run entry")
        return Run(digest, len(entry), self.io.open(stored), tuple(wanted))

    def slots_of(self, run: Run, slots: torch.Tensor) -> torch.Tensor:
        """Return where the tokens of a run go, given the slots of all pages of the call."""
        size = self.names.page_tokens
        at = torch.full((run.opened.blob.tokens,), NOWHERE)
        for each in run.wanted:
            own = slots[each.number * size : (each.number + 1) * size]
            at[each.position * size : (each.position + 1) * size] = own
        return at

    def blame(self, problem: CuveeError, run: bytes, wanted: Sequence[Wanted]) -> None:
        """Count a run that was not read. If it never will be, delete it and what led to it, so that its pages can be
        stored again.
        """
        self.calls.fail("decode", problem)
        if not problem.blames_blob:
            return
        keys = self.keys_of(run, *(each.page for each in wanted if self.run_pages > 1))

        def delete() -> None:
            for key in keys:
                try:
                    self.calls.store.delete(key)
                except Exception as error:
                    self.calls.fail("store", error)

        self.calls.ask("delete", "store", delete, self.lookup_timeout)  # an engine may wait for the lookup

    def _position(self, start: int | None, page: int) -> int | None:
        """Return the position of a page's first token in its blob; None if it matters and is unknown.

        Lossless coding uses no positions and always gets 0, so that pages are the same with and without them.
        """
        if self.io.codec.lossless:
            return 0
        return None if start is None else start + page * self.names.page_tokens

    # Writing --------------------------------------------------------------------------------------------------------

    def save(
        self, cache: PagedCache, slots: torch.Tensor, pages: Sequence[bytes], start: int | None, following: int
    ) -> list[bool]:
        """Store the pages that are not stored yet; return whether each is stored now."""
        done = self.stored(pages)
        self.counts.count("kept_pages", sum(done))
        runs = list(divided([number for number, there in enumerate(done) if not there], self.run_pages))
        of_page, size = slots.split(self.names.page_tokens), self.names.page_tokens
        patience = self.load_timeout  # for all of them: an engine may wait for a call to end
        for several in (runs[first : first + BATCH] for first in range(0, len(runs), BATCH)):
            encoding = []
            for run in several:
                at = torch.cat(of_page[run.start : run.stop])
                # More may follow, which nobody knows yet.
                after = (len(pages) - run.stop) * size + following
                position = self._position(start, run.start)
                encoding.append(partial(self._encode, cache, at, pages[run.start : run.stop], position, after))
            entries, _ = self.io.in_a_row(encoding)
            writing = [
                (run, self.calls.waiters.submit(self._write, pages[run.start : run.stop], entry, cache))
                for run, entry in zip(several, entries, strict=True)
                if entry is not None
            ]
            until = time.monotonic() + patience
            for run, written in writing:
                if self.calls.wait_for("put", "store", written, self.load_timeout, until):
                    done[run.start : run.stop] = [True] * len(run)
            patience = until - time.monotonic()
            if patience <= 0:
                break
        return done

    def _encode(
        self, cache: PagedCache, slots: torch.Tensor, pages: Sequence[bytes], start: int | None, following: int
    ) -> bytes | None:
        """Return the entry of a run; None if it cannot be coded."""
        began, tokens = time.monotonic(), Recognized(start, None)
        try:
            if self.recognizer is not None:
                tokens = self.recognizer.recognize(cache, slots, start, self.names.page_tokens)
            if tokens.start is None:
                self.calls.fail("positions", InputError(_NO_POSITION))
                return None
            bound = self.keys.bound_to(self.names.tenant, self.names.run(pages))
            (encoded,) = self.io.encode(cache, [Chunk(slots, tokens.start, tokens.token_ids, following, bound)])
            if isinstance(encoded, Exception):
                raise encoded
        except CuveeError as error:
            self.calls.fail("encode", error)
            return None
        self.counts.count("encode_seconds", time.monotonic() - began)
        self.counts.count("recognized_pages", 0 if tokens.token_ids is None else len(pages))
        return make_run_entry(pages, encoded[0])

    def _write(self, pages: Sequence[bytes], entry: bytes, cache: PagedCache) -> bool:
        """Store a run, then the index entries that lead to it; return whether all of that was done."""
        run = self.names.run(pages)
        entries = [(run, entry)]
        if self.run_pages > 1:
            entries += [(page, make_index_entry(Place(run, position))) for position, page in enumerate(pages)]
        for digest, data in entries:
            if not self.calls.store.put(self.keys.written(self.names.tenant, digest), data):
                what = "a run of pages" if digest == run else "an index entry"
                self.calls.fail("store", StoreError(f"the store did not take {what}"))
                return False
        raw = len(pages) * self.names.page_tokens * cache.layout.bytes_per_token
        for name, value in (("saved_pages", len(pages)), ("raw_bytes", raw), ("blob_bytes", len(entry))):
            self.counts.count(name, value)
        return True


def divided(missing: Sequence[int], most: int) -> Iterator[range]:
    """Divide the numbers of missing pages into adjacent runs of at most `most` pages, of nearly equal length."""
    begin = 0
    while begin < len(missing):
        end = begin + 1
        while end < len(missing) and missing[end] == missing[end - 1] + 1:
            end += 1
        count = -(-(end - begin) // most)
        for part in range(count):
            first, stop = (begin + (end - begin) * edge // count for edge in (part, part + 1))
            yield range(missing[first], missing[stop - 1] + 1)
        begin = end


def _is_listed(pages: Sequence[bytes], wanted: Wanted) -> bool:
    """Return whether a run's list has the wanted page where its index entry says."""
    return wanted.position < len(pages) and pages[wanted.position] == wanted.page
