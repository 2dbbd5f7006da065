"""`Entries`: an engine's pages as entries of a store, each a blob of its own: found, read in order, and written.

Pages are read up to the first that fails: an engine has no use for pages behind one that is missing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

import torch

from cuvee.codec.coding.open_blob import Expected
from cuvee.codec.errors import CuveeError, InputError
from cuvee.codec.format.container import read_header
from cuvee.codec.paged import PagedCache
from cuvee.integrations.core.chunk_io import (
    BATCH,
    Chunk,
    ChunkIO,
    Stored,
    fetch_ahead,
    fetched_together,
)
from cuvee.integrations.core.entry_keys import EntryKeys
from cuvee.integrations.core.guard import Once, Recorder
from cuvee.integrations.pages.recognition import Recognized, Recognizer
from cuvee.integrations.stores import Store, StoreError
from cuvee.integrations.stores.threads import ThreadPool
from cuvee.naming.identity import PageNames

T = TypeVar("T")

_BATCH_TOKENS = 256 * BATCH  # that are fetched, or encoded, at a time if pages are small
_NO_POSITION = (
    "start: must be known for a lossy quality, because keys are coded without their rotation, and was not recognized "
    "from the keys: let the engine pass the pages' prefix, give a learned profile of this model, or set quality to "
    "'lossless'"
)


@dataclass(frozen=True, slots=True)
class Found:
    """A page to restore: its number in the call, its digest, and its entry."""

    number: int
    page: bytes
    entry: bytes


class Waiters(NamedTuple):
    """Threads that wait for the store: each kind of call has its own, so that none waits behind another kind."""

    lookup: ThreadPool
    read: ThreadPool
    write: ThreadPool


# Reads entries of a call, in order; returns how many up to the first that failed, and its error.
Read = Callable[[Sequence[Found]], tuple[int, CuveeError | None]]
# Told tenant and digest of an entry.
Note = Callable[[str, bytes], object]
# Encodes a page by its number in a call, bound to these bytes; None: its position is needed, and not known.
Encode = Callable[[int, bytes], bytes | None]


def no_note(tenant: str, page: bytes) -> None:
    """Tell nobody."""


@dataclass(frozen=True, slots=True)
class Entries:
    """The entries of one rank and tenant.

    Attributes:
        io: codes their blobs.
        store: that keeps them.
        waiters: threads that wait for it, by what they ask.
        keys: of its entries.
        names: gives the digests of pages.
        recognizer: tells ids and positions of tokens; None: neither is needed.
        counts: told what happens.
        once: logs failures of the store.
        lookup_timeout: seconds that a lookup may take.
        load_timeout: seconds that anything else may take: writing, for all pages of a call together.
        valid: whether the names still are those of the engine's weights.
        note: told tenant and digest of pages that were stored.
    """

    io: ChunkIO
    store: Store
    waiters: Waiters
    keys: EntryKeys
    names: PageNames
    recognizer: Recognizer | None
    counts: Recorder
    once: Once
    lookup_timeout: float
    load_timeout: float
    valid: Callable[[], bool]
    note: Note

    @property
    def together(self) -> int:
        """The number of pages that are encoded at a time, and the largest of pages that are fetched."""
        return max(_BATCH_TOKENS // self.names.page_tokens, BATCH)

    def stored(self, pages: Sequence[bytes]) -> list[bool]:
        """Return whether each page, by its digest, is there. Those that are not are misses."""
        held = self._held(pages)
        if held is not None:
            self.store.missed(held.count(False))
        return held or [False] * len(pages)

    def _held(self, pages: Sequence[bytes]) -> list[bool] | None:
        """Return whether each page is there, uncounted; None if the store fails."""
        keys = [self.keys.all(self.names.tenant, page) for page in pages]
        every = list(dict.fromkeys(key for each in keys for key in each))
        if not every:
            return []
        held = self._ask("contains", "lookup", partial(self.store.holds, every), self.lookup_timeout)
        if held is None:
            return None
        there = {key for key, is_there in zip(every, held, strict=True) if is_there}
        return [not there.isdisjoint(each) for each in keys]

    # Reading --------------------------------------------------------------------------------------------------------

    def in_order(self, pages: Sequence[bytes], read: Read, timeout: float, nbytes: float) -> int:
        """Fetch and read pages, up to the first that is missing or fails; return how many that are.

        Args:
            pages: digests.
            read: reads entries.
            timeout: seconds that the store may take for anything.
            nbytes: expected of an entry.
        """

        def ask(numbers: Sequence[int]) -> list[bytes | None]:
            digests = [pages[number] for number in numbers]
            found = self.keys.find(self.names.tenant, digests, lambda _, keys: self.store.get_many(keys))
            return [entry for _, entry in found]

        done = 0
        answer = partial(self._wait_for, "get_many", "fetch", timeout=timeout)
        together = fetched_together(max(nbytes, 1), self.together)
        for numbers, entries in fetch_ahead(self.waiters.read, ask, range(len(pages)), answer, together):
            found: list[Found] = []
            for number, entry in zip(numbers, entries or [None] * len(numbers), strict=True):
                if entry is None:
                    break
                found.append(Found(number, pages[number], entry))
            count, problem = read(found)
            done += count
            if problem is not None:
                self.blame(problem, found[count].page)
            if count < len(numbers):
                break
        return done

    def as_stored(self, found: Found, start: int | None, dtype: str) -> Stored:
        """Return what opens the entry of a page of a call, whose first token is at position `start`."""
        expected = Expected(self.names.page_tokens, self._position(start, found.number), dtype)
        return Stored((found.entry,), self.bound_to(found.page), expected, "page")

    def bound_to(self, page: bytes) -> bytes:
        """Return what the tag of a page's entry covers besides its blob."""
        return self.keys.bound_to(self.names.tenant, page)

    def blame(self, problem: CuveeError, page: bytes) -> None:
        """Count a page that was not read. If it never will be, delete it, so that it can be stored again."""
        self._fail("decode", problem)
        if problem.blames_blob:
            self.delete(page, self.lookup_timeout)  # an engine may wait for the lookup

    def delete(self, page: bytes, timeout: float) -> bool:
        """Delete the entries of a page, under every secret; return whether the store did so."""

        def work() -> bool:
            failed = 0
            for key in self.keys.all(self.names.tenant, page):
                try:
                    self.store.delete(key)
                except Exception as error:
                    self._fail("store", error)
                    failed += 1
            return not failed

        return bool(self._ask("delete", "store", work, timeout, self.waiters.write))

    def _position(self, start: int | None, number: int) -> int | None:
        """Return the position of a page's first token in its blob; None if it matters and is unknown.

        Lossless coding uses no positions and always gets 0, so that pages are the same with and without them.
        """
        if self.io.codec.lossless:
            return 0
        return None if start is None else start + number * self.names.page_tokens

    # Writing --------------------------------------------------------------------------------------------------------

    def save(self, pages: Sequence[bytes], encode: Encode, nbytes: int) -> list[bool]:
        """Store the pages that are not stored yet, of this many bytes each; return whether each is stored now."""
        done = self._held(pages) or [False] * len(pages)
        self.counts.count("kept_pages", sum(done))
        missing = [number for number, there in enumerate(done) if not there]
        if missing and not self.store.takes_puts():
            self._fail("store", StoreError("the store is known to be down, so nothing is encoded"))
            return done
        patience = self.load_timeout  # for all of them: an engine may wait for a call to end
        for several in (missing[first : first + self.together] for first in range(0, len(missing), self.together)):
            entries, _ = self.io.in_a_row([partial(self._encode, encode, number, pages[number]) for number in several])
            writing = [
                (number, self.waiters.write.submit(self._write, pages[number], entry, nbytes))
                for number, entry in zip(several, entries, strict=True)
                if entry is not None
            ]
            until = time.monotonic() + patience
            for number, written in writing:
                done[number] = self._wait_for("put", "store", written, self.load_timeout, until) is True
            patience = until - time.monotonic()
            if patience <= 0:
                break
        return done

    def encoder(self, cache: PagedCache, slots: torch.Tensor, start: int | None, following: int) -> Encode:
        """Return what encodes pages of known order, the slots of which are given in a row.

        Args:
            cache: holds the pages.
            slots: int64 `[pages * page_tokens]`.
            start: position of the first token; None if it is not known.
            following: number of tokens that are known to follow the last page.
        """
        size = self.names.page_tokens
        of_page = slots.split(size)

        def encode(number: int, bound: bytes) -> bytes | None:
            tokens = Recognized(self._position(start, number), None)
            if self.recognizer is not None:
                tokens = self.recognizer.recognize(cache, of_page[number], tokens.start, size)
            if tokens.start is None:
                return None
            after = (len(of_page) - number - 1) * size + following  # more may follow, which nobody knows yet
            chunk = Chunk(of_page[number], tokens.start, tokens.token_ids, after, bound)
            (encoded,) = self.io.encode(cache, [chunk])
            if isinstance(encoded, Exception):
                raise encoded
            ids = tokens.token_ids is not None
            self.counts.count("recognized_pages", int(ids))
            self.counts.count("misfit_pages", int(self.io.codec.settings.misfits(read_header(encoded[0]), ids)))
            return encoded[0]

        return encode

    def _encode(self, encode: Encode, number: int, page: bytes) -> bytes | None:
        """Return the entry of a page; None if it cannot be coded."""
        began = time.monotonic()
        try:
            entry = encode(number, self.bound_to(page))
        except CuveeError as error:
            self._fail("encode", error)
            return None
        if entry is None:
            self._fail("positions", InputError(_NO_POSITION))
            return None
        self.counts.count("encode_seconds", time.monotonic() - began)
        return entry

    def _write(self, page: bytes, entry: bytes, nbytes: int) -> bool:
        """Store the entry of a page; return whether the store took it."""
        if not self.valid():
            return False
        if not self.store.put(self.keys.written(self.names.tenant, page), entry):
            self._fail("store", StoreError("the store did not take a page"))
            return False
        for name, value in (("saved_pages", 1), ("raw_bytes", nbytes), ("blob_bytes", len(entry))):
            self.counts.count(name, value)
        self.note(self.names.tenant, page)
        return True

    # The store ------------------------------------------------------------------------------------------------------

    def _ask(
        self, operation: str, label: str, work: Callable[[], T], timeout: float, waiters: ThreadPool | None = None
    ) -> T | None:
        """Return the store's answer, for which the threads of lookups wait unless others are named; None if it fails
        or comes late.
        """
        try:
            answer = (waiters or self.waiters.lookup).submit(work)
        except RuntimeError as error:  # no thread can be started
            self._fail(label, error)
            return None
        return self._wait_for(operation, label, answer, timeout)

    def _wait_for(
        self, operation: str, label: str, answer: Future[T], timeout: float, until: float | None = None
    ) -> T | None:
        """Return an answer; None if it is an error, or is not there in time.

        Args:
            operation: of the store, which is told that it is late.
            label: of the failure.
            answer: to wait for.
            timeout: seconds that the store may take.
            until: the time (`time.monotonic`) at which they end; default: from now on.
        """
        try:
            return answer.result(timeout if until is None else max(until - time.monotonic(), 0))
        except TimeoutError:
            answer.cancel()
            self.store.report_overdue(operation, timeout)
            self._fail(label, StoreError(f"the store did not answer within {timeout:g} s"))
        except Exception as error:
            self._fail(label, error)
        return None

    def _fail(self, label: str, error: Exception) -> None:
        """Count a failure, and log it."""
        self.counts.count("failures", label=label)
        self.once(
            f"{label} {type(error).__name__}", "cuvee: pages are computed, or not stored (%s failed): %s", label, error
        )
