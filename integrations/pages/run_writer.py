"""`RunWriter`: encodes the pages of an engine that are not stored yet, run by run, and stores them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from cuvee.codec.errors import CuveeError, InputError
from cuvee.codec.paged import PagedCache
from cuvee.integrations.chunk_io import BATCH, Chunk, ChunkIO
from cuvee.integrations.entry_keys import EntryKeys
from cuvee.integrations.guard import Recorder
from cuvee.integrations.pages.entries import Place, make_index_entry, make_run_entry
from cuvee.integrations.pages.recognition import Recognized, Recognizer
from cuvee.integrations.pages.run_reader import RunReader
from cuvee.integrations.pages.store_calls import StoreCalls
from cuvee.integrations.stores import StoreError
from cuvee.naming.identity import PageNames

_NO_POSITION = (
    "start: must be known for a lossy quality, because keys are coded without their rotation, and was not recognized "
    "from the keys: let the engine pass the pages' prefix, give a learned profile of this model, or set quality to "
    "'lossless'"
)


class RunWriter:
    """Writes the runs of one rank and tenant.

    Args:
        io: encodes.
        calls: of the store.
        keys: of its entries.
        names: gives the digests of runs of pages.
        reader: knows what is stored.
        recognizer: tells ids and positions of tokens; None: neither is needed.
        counts: told what happens.
        run_pages: the most pages that share an entry.
        lookup_timeout: seconds that a lookup may take.
        load_timeout: seconds that writing may take, for all runs of a call together.
    """

    def __init__(
        self,
        io: ChunkIO,
        calls: StoreCalls,
        keys: EntryKeys,
        names: PageNames,
        reader: RunReader,
        recognizer: Recognizer | None,
        counts: Recorder,
        run_pages: int,
        lookup_timeout: float,
        load_timeout: float,
    ) -> None:
        self._io, self._calls, self._keys, self._names, self._reader = io, calls, keys, names, reader
        self._recognizer, self._counts, self._run_pages = recognizer, counts, run_pages
        self._lookup_timeout, self._load_timeout = lookup_timeout, load_timeout

    def save(
        self, cache: PagedCache, slots: torch.Tensor, pages: Sequence[bytes], start: int | None, following: int
    ) -> list[bool]:
        """Store the pages that are not stored yet; return whether each is stored now."""
        done = self._reader.index.stored(pages, self._lookup_timeout)
        self._counts.count("kept_pages", sum(done))
        missing = [number for number, there in enumerate(done) if not there]
        if missing:
            self._save_runs(cache, slots.split(self._names.page_tokens), pages, missing, start, following, done)
        return done

    def _save_runs(
        self,
        cache: PagedCache,
        slots: Sequence[torch.Tensor],
        pages: Sequence[bytes],
        missing: Sequence[int],
        start: int | None,
        following: int,
        done: list[bool],
    ) -> None:
        """Store the missing pages, given the slots of each page, and mark them in `done`."""
        page_bytes = self._names.page_tokens * cache.layout.bytes_per_token
        patience = self._load_timeout  # for all of them: an engine may wait for a call to end
        for several in _batches(list(_runs(missing, self._run_pages))):
            encoding = []
            for run in several:
                at = torch.cat([slots[number] for number in run])
                # More may follow, which nobody knows yet.
                after = (len(slots) - run.stop) * self._names.page_tokens + following
                position = self._reader.position(start, run.start)
                encoding.append(partial(self._encode, cache, at, pages[run.start : run.stop], position, after))
            entries, _ = self._io.in_a_row(encoding)
            writing = []
            for run, entry in zip(several, entries, strict=True):
                if entry is not None:
                    writing.append(
                        (
                            run,
                            self._calls.waiters.submit(
                                self._write, pages[run.start : run.stop], entry, len(run) * page_bytes
                            ),
                        )
                    )
            until = time.monotonic() + patience
            for run, written in writing:
                if self._calls.wait_for("put", "store", written, self._load_timeout, until):
                    done[run.start : run.stop] = [True] * len(run)
            patience = until - time.monotonic()
            if patience <= 0:
                break

    def _encode(
        self, cache: PagedCache, slots: torch.Tensor, pages: Sequence[bytes], start: int | None, following: int
    ) -> bytes | None:
        """Return the entry of a run; None if it cannot be coded."""
        began, tokens = time.monotonic(), Recognized(start, None)
        try:
            if self._recognizer is not None:
                tokens = self._recognizer.recognize(cache, slots, start, self._names.page_tokens)
            if tokens.start is None:
                self._calls.fail("positions", InputError(_NO_POSITION))
                return None
            bound = self._keys.bound_to(self._names.tenant, self._names.run(pages))
            (encoded,) = self._io.encode(cache, [Chunk(slots, tokens.start, tokens.token_ids, following, bound)])
            if isinstance(encoded, Exception):
                raise encoded
        except CuveeError as error:
            self._calls.fail("encode", error)
            return None
        self._counts.count("encode_seconds", time.monotonic() - began)
        self._counts.count("recognized_pages", 0 if tokens.token_ids is None else len(pages))
        return make_run_entry(pages, encoded[0])

    def _write(self, pages: Sequence[bytes], entry: bytes, raw: int) -> bool:
        """Store a run, then the index entries that lead to it; return whether all of that was done; `raw` are
        the bytes of its pages, uncompressed.
        """
        run = self._names.run(pages)
        places = {page: Place(run, position) for position, page in enumerate(pages)}
        if not self._put(run, entry):
            self._calls.fail("store", StoreError("the store did not take a run of pages"))
            return False
        if self._run_pages > 1:
            for page, place in places.items():
                if not self._put(page, make_index_entry(place)):
                    self._calls.fail("store", StoreError("the store did not take an index entry"))
                    return False
            self._reader.places.remember(places)
        for name, value in (("saved_pages", len(pages)), ("raw_bytes", raw), ("blob_bytes", len(entry))):
            self._counts.count(name, value)
        return True

    def _put(self, digest: bytes, entry: bytes) -> bool:
        return self._calls.store.put(self._keys.written(self._names.tenant, digest), entry)


def _runs(missing: Sequence[int], most: int) -> Iterator[range]:
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


def _batches(runs: Sequence[range]) -> Iterator[Sequence[range]]:
    """Divide runs into batches that are encoded together."""
    return (runs[first : first + BATCH] for first in range(0, len(runs), BATCH))
