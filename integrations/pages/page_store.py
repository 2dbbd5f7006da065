"""`PageStore`: an engine's pages into a store and back, each a blob of its own.

    stored   names ──> digests ──> are their entries there?
    save     missing pages ──codec──> entries
    load     entries ──codec──> the engine's memory, up to the first that fails: what is behind it is of no use

Engines call this beside a prefix cache, so every failure is a page that is not there. It is counted, logged once per
kind, and never raised.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from threading import Condition, Lock
from typing import NamedTuple, Self, TypeVar

import torch

from cuvee.codec.codec import Codec
from cuvee.codec.coding.open_blob import Expected
from cuvee.codec.errors import CuveeError, InputError
from cuvee.codec.format.container import read_header
from cuvee.codec.layout import KVLayout
from cuvee.codec.paged import PagedCache
from cuvee.codec.support.once import Once
from cuvee.integrations.core.chunk_io import (
    BATCH,
    Chunk,
    ChunkIO,
    Stored,
    expected_sizes,
    fetch_ahead,
    fetched_together,
)
from cuvee.integrations.core.entry_keys import EntryKeys
from cuvee.integrations.core.guard import Recorder
from cuvee.integrations.pages.opaque import OpaquePage, decode_opaque, encode_opaque
from cuvee.integrations.pages.recognition import Recognized, Recognizer
from cuvee.integrations.stores.base import Store, StoreError
from cuvee.integrations.stores.threads import ThreadPool
from cuvee.naming.identity import PageNames, tenant_id

logger = logging.getLogger(__name__)

T = TypeVar("T")

_STORE_THREADS = 4  # that wait for the store, of each kind
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


class PageStore:
    """Saves and loads an engine's pages. Safe to call from several threads.

    Args:
        codec: codes the pages; on one rank of several, with the profile of that rank.
        store: keeps them. `close` closes it.
        names: gives the digests of the engine's pages.
        layout: of the engine's caches; on one rank of several, of that rank's part. Default: the profile's, which may
            have been learned in another dtype than the engine's.
        shard: tensor-parallel rank.
        threads: CPU threads that encode and decode.
        lookup_timeout: seconds that a lookup may take.
        load_timeout: seconds that the store may take for anything else; `save` waits no longer for all of its entries.
        counts: told what happens, by the names in `Counts`.

    Attributes:
        layout: as given.

    Raises:
        InputError: `store` is not one, but its URL for example.

    Example:
        >>> import torch
        >>> from cuvee import Codec, KVLayout, LayerLayout, PagedCache
        >>> from cuvee.naming.identity import Identity, Scope
        >>> from cuvee.integrations.pages import Counts
        >>> from cuvee.integrations.stores import open_store
        >>> layout = KVLayout("mine", (LayerLayout(2, 8, 8, None),) * 3, "float32", max_positions=None)
        >>> codec = Codec.without_profile(layout)
        >>> names = PageNames(Identity("m", "", layout.fingerprint, b"", codec.quality_name), Scope(), "mine", 16)
        >>> pages = PageStore(codec, open_store("memory://?max_gb=0.01"), names, counts=Counts())
        >>> memory = [torch.randn(100, 16, 2, 8) for _ in range(3)]  # 100 pages of 16 tokens
        >>> cache = PagedCache(layout, memory, [keys.clone() for keys in memory])
        >>> slots = torch.arange(32)  # the pages 0 and 1
        >>> pages.save(cache, slots, [b"a", b"b"], start=0), pages.stored([b"a", b"b", b"c"])
        ([True, True], [True, True, False])
        >>> pages.load(cache, slots + 64, [b"a", b"b"], start=0)
        [True, True]
        >>> torch.equal(memory[2][0:2], memory[2][4:6])
        True
        >>> pages.close()
    """

    def __init__(
        self,
        codec: Codec,
        store: Store,
        names: PageNames,
        *,
        counts: Recorder,
        layout: KVLayout | None = None,
        shard: int = 0,
        threads: int = 2,
        lookup_timeout: float = 2.0,
        load_timeout: float = 30.0,
    ) -> None:
        # Otherwise each call would fail as if the store were down, and be counted as that.
        if not isinstance(store, Store):
            raise InputError(f"store: must be a Store, got {type(store).__name__}: open_store(URL) makes one")
        self._store = store
        self._lookup_timeout, self._load_timeout = lookup_timeout, load_timeout
        # Threads of their own, so that a lookup waits for no write, which an engine has no need to wait for.
        self._waiters = Waiters(
            *(ThreadPool(_STORE_THREADS, f"cuvee-{kind}", load_timeout) for kind in Waiters._fields)
        )
        self._coders = ThreadPool(threads, "cuvee-coder", float("inf"))
        self._engine_calls = _EngineCalls()
        self._once = Once(logger)
        self._lock = Lock()
        self._recognizers: dict[Codec, Recognizer | None] = {}  # each takes a while to make
        self._serve(codec, names, layout or codec.profile.layout, shard, counts, lambda: True, no_note)

    def _serve(
        self, codec: Codec, names: PageNames, layout: KVLayout, shard: int, counts: Recorder, valid: Callable[[], bool],
        note: Note,
    ) -> None:  # fmt: skip
        """Serve this rank and tenant."""
        self.layout, self._names, self._counts, self._valid, self._note = layout, names, counts, valid, note
        self._io, self._keys = ChunkIO(codec, self._coders), EntryKeys(codec.key_ids, shard)
        with self._lock:
            if codec not in self._recognizers:  # without loss, neither ids nor positions are needed
                self._recognizers[codec] = None if codec.lossless else Recognizer(codec.profile)
            self._recognizer = self._recognizers[codec]

    def sibling(
        self,
        codec: Codec,
        names: PageNames,
        layout: KVLayout,
        *,
        shard: int = 0,
        counts: Recorder | None = None,
        valid: Callable[[], bool] | None = None,
        note: Note = no_note,
    ) -> Self:
        """Return a page store of another rank or tenant that shares this one's store, threads and end.

        It costs little: an engine whose calls concern many tenants may make one for every call. Closing any of them
        closes all.

        Args:
            codec: of the other rank, with the same secrets.
            names: gives the digests of its pages.
            layout: of its part of the engine's caches.
            shard: its tensor-parallel rank.
            counts: told what happens there; default: as here.
            valid: whether the names are still those of the engine's weights; if not, no page is found, loaded or
                stored. Default: as here.
            note: told tenant and digest of each page that is stored there; default: nobody is.
        """
        other = copy.copy(self)
        other._serve(codec, names, layout, shard, counts or self._counts, valid or self._valid, note)
        return other

    # What engines ask for ------------------------------------------------------------------------------------------

    def stored(self, names: Sequence[bytes]) -> list[bool]:
        """Return whether each page can be loaded, by the engine's names. Those that cannot are misses."""
        held: list[bool] | None = None
        with self._engine_calls as admitted:
            if admitted and self._valid():
                held = self._held(self._pages(names))
                self._store.missed((held or []).count(False))
        return held or [False] * len(names)

    def save(
        self, cache: PagedCache, slots: torch.Tensor, names: Sequence[bytes], start: int | None, *, following: int = 0
    ) -> list[bool]:
        """Store pages that are not stored yet. Returns when the engine may overwrite them.

        Args:
            cache: the engine's memory, on the CPU.
            slots: int64 `[pages * page_tokens]`: the slots of the pages' tokens, in order.
            names: the engine's name of each page.
            start: position of the first token of adjacent pages; None if unknown. A lossless codec needs none, and one
                with a learned profile recognizes that of each page.
            following: number of tokens that are known to follow the last page's, as in `KVChunk`.

        Returns:
            whether each page is stored now.

        Raises:
            InputError: slots of another number than the names call for.
        """
        self._check_slots(slots, names)
        return self._save(names, self._encoder(cache, slots, start, following), self._page_bytes(cache))

    def save_opaque(self, memory: Sequence[OpaquePage], names: Sequence[bytes]) -> list[bool]:
        """Store pages as `save` does, losslessly, whatever they hold. They have one size, if there are several.

        Args:
            memory: of each page.
            names: as in `save`.
        """

        def encode(number: int, bound: bytes) -> bytes:
            return encode_opaque(self._io.codec, memory[number], self._names.page_tokens, bound)

        done = self._save(names, encode, memory[0].nbytes if memory else 0)
        self._count_opaque(memory, done)
        return done

    def load(self, cache: PagedCache, slots: torch.Tensor, names: Sequence[bytes], start: int | None) -> list[bool]:
        """Restore pages into the engine's memory, up to the first that cannot be loaded.

        Args:
            cache: as in `save`.
            slots: as in `save`.
            names: as in `save`.
            start: position of the first token of adjacent pages; None: any.

        Returns:
            whether each page was restored. The contents of slots of other pages are undefined.

        Raises:
            InputError: slots of another number than the names call for.
        """
        self._check_slots(slots, names)
        of_page = slots.split(self._names.page_tokens)

        def restore(found: Sequence[Found]) -> tuple[int, CuveeError | None]:
            entries = [self._as_stored(each, start, cache.layout.dtype) for each in found]
            blobs, problem = self._io.restore(cache, entries, [[of_page[each.number]] for each in found])
            return len(blobs), problem

        expected = sum(expected_sizes(self._io.codec)) * self._names.page_tokens
        return self._load(names, restore, expected, self._page_bytes(cache))

    def load_opaque(self, memory: Sequence[OpaquePage], names: Sequence[bytes]) -> list[bool]:
        """Restore pages of `save_opaque` as `load` does, bit for bit.

        Args:
            memory: of each page; it must have the dtypes and shapes that the stored page had.
            names: as in `save`.
        """
        codec, tokens = self._io.codec, self._names.page_tokens

        def decode(found: Found) -> None:
            decode_opaque(codec, found.entry, memory[found.number], tokens, self._bound_to(found.page))

        def restore(found: Sequence[Found]) -> tuple[int, CuveeError | None]:
            done, problem = self._io.in_a_row([partial(decode, each) for each in found])
            return len(done), problem

        nbytes = memory[0].nbytes if memory else 0
        loaded = self._load(names, restore, nbytes, nbytes)
        self._count_opaque(memory, loaded)
        return loaded

    def count(self, name: str) -> None:
        """Count something that happened to all pages."""
        self._counts.count(name)

    def delete(self, names: Sequence[bytes]) -> list[bool]:
        """Delete pages; return whether each is known to be gone."""
        with self._engine_calls as admitted:
            usable = admitted and self._valid()
            return [usable and self._delete(page, self._load_timeout) for page in self._pages(names)]

    def delete_all(self) -> int:
        """Delete all entries of this store's tenant; return how many there were.

        Raises:
            StoreError: the store failed.
        """
        return self._store.delete_tenant(tenant_id(self._names.tenant))

    def close(self) -> None:
        """Wait for the calls under way, and as long again for their threads, at most `load_timeout` seconds; then close
        the store.

        Later calls find no pages. May be called more than once.
        """
        self._engine_calls.close(self._load_timeout)
        until = time.monotonic() + self._load_timeout
        for pool in (self._coders, *self._waiters):
            pool.dismiss(max(until - time.monotonic(), 0))
        self._store.close()

    def _pages(self, names: Sequence[bytes]) -> list[bytes]:
        """Return the digests of pages."""
        return [self._names.page(name) for name in names]

    def _bound_to(self, page: bytes) -> bytes:
        """Return what the tag of a page's entry covers besides its blob."""
        return self._keys.bound_to(self._names.tenant, page)

    def _check_slots(self, slots: torch.Tensor, names: Sequence[bytes]) -> None:
        if len(slots) != len(names) * self._names.page_tokens:
            raise InputError(
                f"slots: must be {self._names.page_tokens} for each of {len(names)} pages, got {len(slots)}"
            )

    def _page_bytes(self, cache: PagedCache) -> int:
        return self._names.page_tokens * cache.layout.bytes_per_token

    def _count_opaque(self, memory: Sequence[OpaquePage], done: Sequence[bool]) -> None:
        for page, there in zip(memory, done, strict=True):
            self._counts.count("opaque_pages", int(there), page.kind)

    # Reading --------------------------------------------------------------------------------------------------------

    def _held(self, pages: Sequence[bytes]) -> list[bool] | None:
        """Return whether each page is there, uncounted; None if the store fails."""
        keys = [self._keys.all(self._names.tenant, page) for page in pages]
        every = list(dict.fromkeys(key for each in keys for key in each))
        if not every:
            return []
        held = self._ask("contains", "lookup", partial(self._store.contains, every), self._lookup_timeout)
        if held is None:
            return None
        there = {key for key, is_there in zip(every, held, strict=True) if is_there}
        return [not there.isdisjoint(each) for each in keys]

    def _load(self, names: Sequence[bytes], restore: Read, expected: float, nbytes: int) -> list[bool]:
        """Restore pages of `nbytes` each, the entries of which have about `expected` bytes."""
        with self._engine_calls as admitted:
            loaded = 0
            if admitted and self._valid():
                loaded = self._in_order(self._pages(names), restore, expected)
        loaded *= self._valid()  # what was restored meanwhile may be of other weights
        self._counts.count("loaded_pages", loaded)
        self._counts.count("missed_pages", len(names) - loaded)
        self._counts.count("loaded_raw_bytes", loaded * nbytes)
        return [number < loaded for number in range(len(names))]

    def _in_order(self, pages: Sequence[bytes], read: Read, nbytes: float) -> int:
        """Fetch and read pages, up to the first that is missing or fails; return how many that are.

        Args:
            pages: digests.
            read: reads entries.
            nbytes: expected of an entry.
        """

        def ask(numbers: Sequence[int]) -> list[bytes | None]:
            digests = [pages[number] for number in numbers]
            found = self._keys.find(self._names.tenant, digests, self._store.get_many)
            return [entry for _, entry in found]

        done = 0
        answer = partial(self._wait_for, "get_many", "fetch", timeout=self._load_timeout)
        together = fetched_together(max(nbytes, 1), self._together)
        for numbers, entries in fetch_ahead(self._waiters.read, ask, range(len(pages)), answer, together):
            found: list[Found] = []
            for number, entry in zip(numbers, entries or [None] * len(numbers), strict=True):
                if entry is None:
                    break
                found.append(Found(number, pages[number], entry))
            began = time.monotonic()
            count, problem = read(found)
            self._counts.count("decode_seconds", time.monotonic() - began)
            self._counts.count("loaded_blob_bytes", sum(len(each.entry) for each in found[:count]))
            done += count
            if problem is not None:
                self._blame(problem, found[count].page)
            if count < len(numbers):
                break
        return done

    def _as_stored(self, found: Found, start: int | None, dtype: str) -> Stored:
        """Return what opens the entry of a page of a call, whose first token is at position `start`."""
        expected = Expected(self._names.page_tokens, self._position(start, found.number), dtype)
        return Stored((found.entry,), self._bound_to(found.page), expected, "page")

    def _blame(self, problem: CuveeError, page: bytes) -> None:
        """Count a page that was not read. If it never will be, delete it, so that it can be stored again."""
        self._fail("decode", problem)
        if problem.blames_blob:
            self._delete(page, self._lookup_timeout)  # an engine may wait for the lookup

    def _delete(self, page: bytes, timeout: float) -> bool:
        """Delete the entries of a page, under every secret; return whether the store did so."""

        def work() -> bool:
            failed = 0
            for key in self._keys.all(self._names.tenant, page):
                try:
                    self._store.delete(key)
                except Exception as error:
                    self._fail("store", error)
                    failed += 1
            return not failed

        return bool(self._ask("delete", "store", work, timeout, self._waiters.write))

    def _position(self, start: int | None, number: int) -> int | None:
        """Return the position of a page's first token in its blob; None if it matters and is unknown.

        Lossless coding uses no positions and always gets 0, so that pages are the same with and without them.
        """
        if self._io.codec.lossless:
            return 0
        return None if start is None else start + number * self._names.page_tokens

    # Writing --------------------------------------------------------------------------------------------------------

    @property
    def _together(self) -> int:
        """The number of pages that are encoded at a time, and the largest of pages that are fetched."""
        return max(_BATCH_TOKENS // self._names.page_tokens, BATCH)

    def _save(self, names: Sequence[bytes], encode: Encode, nbytes: int) -> list[bool]:
        """Store the pages that are not stored yet, of this many bytes each; return whether each is stored now."""
        done = [False] * len(names)
        with self._engine_calls as admitted:
            if admitted and self._valid():
                done = self._save_missing(self._pages(names), encode, nbytes)
        self._counts.count("unsaved_pages", len(done) - sum(done))
        return done

    def _save_missing(self, pages: Sequence[bytes], encode: Encode, nbytes: int) -> list[bool]:
        done = self._held(pages) or [False] * len(pages)
        self._counts.count("kept_pages", sum(done))
        missing = [number for number, there in enumerate(done) if not there]
        if missing and not self._store.takes_puts():
            self._fail("store", StoreError("the store is known to be down, so nothing is encoded"))
            return done
        patience = self._load_timeout  # for all of them: an engine may wait for a call to end
        for several in (missing[first : first + self._together] for first in range(0, len(missing), self._together)):
            entries, _ = self._io.in_a_row([partial(self._encode, encode, number, pages[number]) for number in several])
            writing = [
                (number, self._waiters.write.submit(self._write, pages[number], entry, nbytes))
                for number, entry in zip(several, entries, strict=True)
                if entry is not None
            ]
            until = time.monotonic() + patience
            for number, written in writing:
                done[number] = self._wait_for("put", "store", written, self._load_timeout, until) is True
            patience = until - time.monotonic()
            if patience <= 0:
                break
        return done

    def _encoder(self, cache: PagedCache, slots: torch.Tensor, start: int | None, following: int) -> Encode:
        """Return what encodes pages of known order, the slots of which are given in a row.

        Args:
            cache: holds the pages.
            slots: int64 `[pages * page_tokens]`.
            start: position of the first token; None if it is not known.
            following: number of tokens that are known to follow the last page.
        """
        size = self._names.page_tokens
        of_page = slots.split(size)

        def encode(number: int, bound: bytes) -> bytes | None:
            tokens = Recognized(self._position(start, number), None)
            if self._recognizer is not None:
                tokens = self._recognizer.recognize(cache, of_page[number], tokens.start, size)
            if tokens.start is None:
                return None
            after = (len(of_page) - number - 1) * size + following  # more may follow, which nobody knows yet
            chunk = Chunk(of_page[number], tokens.start, tokens.token_ids, after, bound)
            (encoded,) = self._io.encode(cache, [chunk])
            if isinstance(encoded, Exception):
                raise encoded
            ids = tokens.token_ids is not None
            self._counts.count("recognized_pages", int(ids))
            self._counts.count("misfit_pages", int(self._io.codec.settings.misfits(read_header(encoded[0]), ids)))
            return encoded[0]

        return encode

    def _encode(self, encode: Encode, number: int, page: bytes) -> bytes | None:
        """Return the entry of a page; None if it cannot be coded."""
        began = time.monotonic()
        try:
            entry = encode(number, self._bound_to(page))
        except CuveeError as error:
            self._fail("encode", error)
            return None
        if entry is None:
            self._fail("positions", InputError(_NO_POSITION))
            return None
        self._counts.count("encode_seconds", time.monotonic() - began)
        return entry

    def _write(self, page: bytes, entry: bytes, nbytes: int) -> bool:
        """Store the entry of a page; return whether the store took it."""
        if not self._valid():
            return False
        if not self._store.put(self._keys.written(self._names.tenant, page), entry):
            self._fail("store", StoreError("the store did not take a page"))
            return False
        for name, value in (("saved_pages", 1), ("raw_bytes", nbytes), ("blob_bytes", len(entry))):
            self._counts.count(name, value)
        self._note(self._names.tenant, page)
        return True

    # The store ------------------------------------------------------------------------------------------------------

    def _ask(
        self, operation: str, label: str, work: Callable[[], T], timeout: float, waiters: ThreadPool | None = None
    ) -> T | None:
        """Return the store's answer, for which the threads of lookups wait unless others are named; None if it fails
        or comes late.
        """
        try:
            answer = (waiters or self._waiters.lookup).submit(work)
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
            self._store.report_overdue(operation, timeout)
            self._fail(label, StoreError(f"the store did not answer within {timeout:g} s"))
        except Exception as error:
            self._fail(label, error)
        return None

    def _fail(self, label: str, error: Exception) -> None:
        """Count a failure, and log it."""
        self._counts.count("failures", label=label)
        self._once(
            f"{label} {type(error).__name__}", "cuvee: pages are computed, or not stored (%s failed): %s", label, error
        )


class _EngineCalls:
    """A context for the calls of the engine. It counts them, and admits none once it is closed."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._under_way = 0
        self._closed = False

    def __enter__(self) -> bool:
        """Return whether the call is admitted."""
        with self._changed:
            self._under_way += 1
            return not self._closed

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._under_way -= 1
            self._changed.notify_all()

    def close(self, timeout: float) -> None:
        """Admit no more calls, and wait at most this many seconds for those under way."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._under_way, timeout)
