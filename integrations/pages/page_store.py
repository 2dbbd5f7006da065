"""`PageStore`: an engine's pages into a store and back, several pages per blob.

    stored   names ──> digests ──> index entries ──> are their runs there?
    save     missing pages ──> runs ──codec──> run entries, then index entries
    load     index entries ──> run entries ──codec──> the engine's memory
    fetch    index entries ──> run entries ──> verified, and kept by who asked
    place    what was fetched ──codec──> the engine's memory, layer by layer

Engines call this beside a prefix cache, so every failure is a page that is not there. It is counted, logged once per
kind, and never raised.
"""

from __future__ import annotations

import copy
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import partial
from threading import Condition, Lock
from typing import Self, TypeVar

import torch

from cuvee.codec.codec import Codec
from cuvee.codec.errors import CorruptError, CuveeError, InputError
from cuvee.codec.layout import KVLayout
from cuvee.codec.open_blob import Expected, OpenBlob
from cuvee.codec.paged import NOWHERE, PagedCache
from cuvee.codec.paged_chunks import PagedChunks
from cuvee.integrations.guard import Recorder
from cuvee.integrations.pages.entries import (
    MAX_RUN_PAGES,
    Place,
    make_index_entry,
    make_run_entry,
    parse_index_entry,
    parse_run_entry,
)
from cuvee.integrations.pages.recognition import Recognized, Recognizer
from cuvee.integrations.stores import Store, StoreError
from cuvee.integrations.stores.threads import ThreadPool
from cuvee.naming.identity import PageNames, store_key, tenant_id

logger = logging.getLogger(__name__)

T = TypeVar("T")

_STORE_THREADS = 4  # that wait for the store
_RUNS = 8  # fetched, or encoded, at a time
_REMEMBERED = 1 << 16  # pages whose places are kept

_NO_POSITION = (
    "start: must be known for a lossy quality, because keys are coded without their rotation, and was not recognized "
    "from the keys: let the engine pass the pages' prefix, give a learned profile of this model, or set quality to "
    "'lossless'"
)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A page to load: its number in the call, its digest, and its position in its run."""

    number: int
    page: bytes
    position: int


@dataclass(frozen=True, slots=True)
class _Run:
    """A run whose entry is open: its digest, the entry's bytes, its blob, and the pages that are wanted of it."""

    digest: bytes
    entry_bytes: int
    blob: OpenBlob
    wanted: tuple[_Wanted, ...]


@dataclass(frozen=True, slots=True)
class Fetched:
    """Pages whose entries are in memory, verified. No store is needed to restore them.

    Attributes:
        pages: how many there are: the first ones of those that were asked for.
        runs: what holds them.
    """

    pages: int
    runs: tuple[_Run, ...] = ()

    def first(self, pages: int) -> Fetched:
        """Return the first `pages` of them."""
        kept = (
            replace(run, wanted=tuple(each for each in run.wanted if each.number < pages)) for run in self.runs
        )  # fmt: skip
        return Fetched(min(pages, self.pages), tuple(run for run in kept if run.wanted))


_Work = Callable[[bytes, bytes, list[_Wanted]], bool]


class _Calls:
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
        """Admit no more calls, and wait at most so many seconds for those that were."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._under_way, timeout)


def _recognizer_of(codec: Codec) -> Recognizer | None:
    """Return what tells the tokens of pages; None without loss, which needs neither ids nor positions."""
    return None if codec.lossless else Recognizer(codec.profile)


class PageStore:
    """Saves and loads an engine's pages. Safe to call from several threads.

    Args:
        codec: codes the pages; on one rank of several, with the profile of that rank.
        store: keeps them. `close` closes it.
        names: gives the digests of the engine's pages.
        layout: of the engine's caches; on one rank of several, of that rank's part. Default: the profile's, which may
            have been learned in another dtype than the engine's.
        shard: tensor-parallel rank.
        run_pages: the most pages that share a blob. With 1, no index entries are written.
        threads: CPU threads that encode and decode.
        lookup_timeout: seconds that a lookup may take.
        load_timeout: seconds that the store may take for anything else; `save` waits no longer for all of its entries.
        counts: told what happens, by the names in `Counts`.

    Attributes:
        layout: as given.

    Raises:
        InputError: `run_pages` is out of range.

    Example:
        >>> import torch
        >>> from cuvee import Codec, KVLayout, LayerLayout, PagedCache
        >>> from cuvee.naming.identity import Identity, Scope
        >>> from cuvee.integrations.pages import Counts
        >>> from cuvee.integrations.stores import open_store
        >>> layout = KVLayout("mine", (LayerLayout(2, 8, 8, None),) * 3, "float32", max_positions=None)
        >>> codec = Codec.without_profile(layout)
        >>> names = PageNames(Identity("m", "", layout.fingerprint, b"", codec.quality_name), Scope(), "mine", 16)
        >>> pages = PageStore(codec, open_store("memory://?max_mb=10"), names, counts=Counts(), run_pages=4)
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
        run_pages: int = 1,
        threads: int = 2,
        lookup_timeout: float = 2.0,
        load_timeout: float = 30.0,
    ) -> None:
        if not 1 <= run_pages <= MAX_RUN_PAGES:
            raise InputError(f"run_pages: must be 1 … {MAX_RUN_PAGES}, got {run_pages}")
        self.layout = layout or codec.profile.layout
        self._codec = codec
        self._recognizer = _recognizer_of(codec)
        self._store = store
        self._names = names
        self._counts = counts
        self._shard = shard
        self._run_pages = run_pages
        self._lookup_timeout, self._load_timeout = lookup_timeout, load_timeout
        self._key_ids = codec.key_ids or (b"",)
        self._waiters = ThreadPool(_STORE_THREADS, "cuvee-pages", load_timeout)
        self._coders = ThreadPool(threads, "cuvee-coder", float("inf"))
        self._calls = _Calls()
        self._lock = Lock()
        self._places: OrderedDict[bytes, Place] = OrderedDict()  # of the pages last seen, by digest
        self._said: set[str] = set()

    def beside(
        self, codec: Codec, names: PageNames, layout: KVLayout, *, shard: int = 0, counts: Recorder | None = None
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
        """
        other = copy.copy(self)
        if codec is not self._codec:
            other._recognizer = _recognizer_of(codec)
        other._codec, other._names, other.layout, other._shard = codec, names, layout, shard
        other._counts = counts or self._counts
        return other

    def stored(self, names: Sequence[bytes]) -> list[bool]:
        """Return whether each page can be loaded, by the engine's names."""
        pages = [self._names.page(name) for name in names]
        with self._calls as admitted:
            return self._stored(pages) if admitted else [False] * len(pages)

    def save(
        self, cache: PagedCache, slots: torch.Tensor, names: Sequence[bytes], start: int | None, *, following: int = 0
    ) -> list[bool]:
        """Store adjacent pages that are not stored yet. Returns when the engine may overwrite them.

        Args:
            cache: the engine's memory, on the CPU.
            slots: int64 `[pages * page_tokens]`: the slots of the pages' tokens, in order.
            names: the engine's name of each page.
            start: position of the first token; None if unknown. A lossless codec needs none, and one with a learned
                profile recognizes it.
            following: number of tokens that are known to follow the last page's, as in `KVChunk`.

        Returns:
            whether each page is stored now.

        Raises:
            InputError: slots of another number than the names call for.
        """
        pages = self._digests(slots, names)
        with self._calls as admitted:
            done = self._save_missing(cache, slots, pages, start, following) if admitted else [False] * len(pages)
        self._counts.count("unsaved_pages", len(done) - sum(done))
        return done

    def load(self, cache: PagedCache, slots: torch.Tensor, names: Sequence[bytes], start: int | None) -> list[bool]:
        """Restore adjacent pages into the engine's memory, up to the first that cannot be loaded.

        Args:
            cache: as in `save`.
            slots: as in `save`.
            names: as in `save`.
            start: position of the first token; None: any.

        Returns:
            whether each page was restored. The contents of slots of other pages are undefined.

        Raises:
            InputError: slots of another number than the names call for.
        """
        pages = self._digests(slots, names)
        with self._calls as admitted:
            work = partial(self._restore, cache, slots, start)
            loaded = self._in_order(pages, work, self._load_timeout) if admitted else 0
        self._counts.count("loaded_pages", loaded)
        self._counts.count("missed_pages", len(pages) - loaded)
        self._counts.count("loaded_raw_bytes", loaded * self._names.page_tokens * cache.layout.bytes_per_token)
        return [number < loaded for number in range(len(pages))]

    def fetch(self, names: Sequence[bytes], start: int | None) -> Fetched:
        """Fetch and verify adjacent pages, up to the first that cannot be loaded, for an engine that admits no failure.

        Waits for the store no longer than `lookup_timeout`; a damaged run, which is deleted, may take as long again.

        Args:
            names: as in `save`.
            start: as in `load`.

        Returns:
            the pages that `place` can restore whatever becomes of the store. With a key, nobody can have made their
            blobs without it. Without one, somebody who writes to the store can have made streams that are damaged in
            spite of right checksums; `place` reports these.
        """
        pages = [self._names.page(name) for name in names]
        runs: list[_Run] = []

        def verify(run: bytes, entry: bytes, wanted: Sequence[_Wanted]) -> bool:
            def work() -> None:
                opened = self._open(run, entry, wanted, start, self.layout.dtype)
                self._codec.verify(opened.blob)
                runs.append(opened)

            return self._try(work, run, wanted)

        until = time.monotonic() + self._lookup_timeout
        with self._calls as admitted:
            found = self._in_order(pages, verify, self._lookup_timeout, until) if admitted else 0
        self._counts.count("missed_pages", len(pages) - found)
        return Fetched(len(pages), tuple(runs)).first(found)

    def serves(self, device: torch.device) -> bool:
        """Return whether `place` can restore pages in the memory of a device."""
        return device.type == "cpu" or self._codec.on_device(device)

    def place(
        self, cache: PagedCache, loads: Sequence[tuple[Fetched, torch.Tensor]], done: Callable[[range], None]
    ) -> bool:
        """Restore fetched pages into the engine's memory, one run of layers after the other.

        Args:
            cache: the engine's memory, on the CPU or on a device that it `serves`, where work is on the current stream
                of the calling thread.
            loads: what was fetched, and int64 `[pages * page_tokens]` on the CPU: the slots of all of its tokens.
            done: called with each run of layers (`Settings.layer_runs`) once all loads have them.

        Returns:
            whether all of it was restored. If not, `done` was not called for all layers, and the contents of the slots
            are undefined.

        Raises:
            InputError: slots of another number than the pages call for, or that the cache does not have.
        """
        size, began = self._names.page_tokens, time.monotonic()
        for fetched, slots in loads:
            if len(slots) != fetched.pages * size:
                raise InputError(f"slots: must be {size} for each of {fetched.pages} pages, got {len(slots)}")
            cache.check_range(slots, range(cache.layout.num_layers), least=0)
        work = [(run, self._slots_of(run, slots).to(cache.device)) for fetched, slots in loads for run in fetched.runs]
        with self._calls as admitted:
            if not admitted:
                return False
            for layers in self._codec.settings.layer_runs:
                if not self._place(cache, work, layers):
                    return False
                done(layers)
        pages = sum(fetched.pages for fetched, _ in loads)
        self._counts.count("decode_seconds", time.monotonic() - began)
        self._counts.count("loaded_pages", pages)
        self._counts.count("loaded_raw_bytes", pages * size * cache.layout.bytes_per_token)
        self._counts.count("loaded_blob_bytes", sum(run.entry_bytes for run, _ in work))
        return True

    def delete(self, names: Sequence[bytes]) -> list[bool]:
        """Delete pages; return whether each is known to be gone.

        A blob that several pages share stays until the store evicts it: only what leads to the page is deleted.
        """
        pages = [self._names.page(name) for name in names]
        with self._calls as admitted:
            return [admitted and self._delete(page) for page in pages]

    def delete_all(self) -> int:
        """Delete all entries of this store's tenant; return how many there were.

        Raises:
            StoreError: the store failed.
        """
        with self._lock:
            self._places.clear()
        return self._store.delete_tenant(tenant_id(self._names.tenant))

    def close(self) -> None:
        """Wait for the calls under way, at most `load_timeout` seconds, then close the store.

        Later calls find no pages. May be called more than once.
        """
        self._calls.close(self._load_timeout)
        self._coders.dismiss()
        self._waiters.dismiss(self._load_timeout)
        self._store.close()

    def _digests(self, slots: torch.Tensor, names: Sequence[bytes]) -> list[bytes]:
        if len(slots) != len(names) * self._names.page_tokens:
            raise InputError(
                f"slots: must be {self._names.page_tokens} for each of {len(names)} pages, got {len(slots)}"
            )
        return [self._names.page(name) for name in names]

    def _position(self, start: int | None, page: int) -> int | None:
        """Return the position of a page's first token in its blob; None if it matters and is unknown.

        Lossless coding uses no positions and always gets 0, so that pages are the same with and without them.
        """
        if self._codec.lossless:
            return 0
        return None if start is None else start + page * self._names.page_tokens

    # Finding --------------------------------------------------------------------------------------------------------

    def _stored(self, pages: Sequence[bytes]) -> list[bool]:
        while True:
            places = self._locate(pages, self._lookup_timeout)
            there = self._there({place.run for place in places if place is not None})
            if there is None:
                return [False] * len(pages)
            held = {page: place for page, place in zip(pages, places, strict=True) if place and place.run in there}
            # A remembered place is out of date if the page was evicted. It may have been stored anew in another run.
            if not self._forget([page for page in pages if page not in held]):
                break
        if self._run_pages > 1:
            self._remember(held)
        return [page in held for page in pages]

    def _there(self, runs: AbstractSet[bytes]) -> set[bytes] | None:
        """Return which of these runs are in the store; None if the store fails."""
        keys = {self._key(run, key_id): run for key_id in self._key_ids for run in runs}
        if not keys:
            return set()
        known = self._ask("contains", "lookup", lambda: self._store.contains(list(keys)), self._lookup_timeout)
        return None if known is None else {run for run, there in zip(keys.values(), known, strict=True) if there}

    def _locate(self, pages: Sequence[bytes], timeout: float) -> list[Place | None]:
        """Return where each page is: as remembered, or as its index entry says."""
        if self._run_pages == 1:
            return [Place(self._names.run([page]), 0) for page in pages]
        with self._lock:
            places = {page: self._places[page] for page in pages if page in self._places}
        unknown = [page for page in pages if page not in places]
        for page, data in zip(unknown, self._get_many(unknown, "lookup", timeout), strict=True):
            if data is None:
                continue
            try:
                places[page] = parse_index_entry(data)
            except CuveeError as error:
                self._fail("lookup", error)
        return [places.get(page) for page in pages]

    def _remember(self, places: dict[bytes, Place]) -> None:
        with self._lock:
            for page, place in places.items():
                self._places[page] = place
                self._places.move_to_end(page)
            while len(self._places) > _REMEMBERED:
                self._places.popitem(last=False)

    def _forget(self, pages: Sequence[bytes]) -> bool:
        """Forget the places of pages; return whether any was remembered."""
        with self._lock:
            return sum(self._places.pop(page, None) is not None for page in pages) > 0

    # Saving ---------------------------------------------------------------------------------------------------------

    def _save_missing(
        self, cache: PagedCache, slots: torch.Tensor, pages: Sequence[bytes], start: int | None, following: int
    ) -> list[bool]:
        """Store the pages that are not stored yet; return whether each is stored now."""
        done = self._stored(pages)
        self._counts.count("kept_pages", sum(done))
        missing = [number for number, there in enumerate(done) if not there]
        if missing:
            self._save(cache, slots.split(self._names.page_tokens), pages, missing, start, following, done)
        return done

    def _save(
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
        patience = self._load_timeout  # for all of them: an engine may wait for a call to end
        for several in _slices(list(_runs(missing, self._run_pages))):
            encoding: list[Future[bytes | None]] = []
            try:
                for run in several:
                    at = torch.cat([slots[number] for number in run])
                    # More may follow, which nobody knows yet.
                    after = (len(slots) - run.stop) * self._names.page_tokens + following
                    position = self._position(start, run.start)
                    job = self._coders.submit(self._encode, cache, at, pages[run.start : run.stop], position, after)
                    encoding.append(job)
            finally:
                wait(encoding)  # in any case, since they read the engine's pages
            writing = []
            for run, encoded in zip(several, encoding, strict=True):
                entry = encoded.result()
                if entry is not None:
                    writing.append((run, self._waiters.submit(self._write, pages[run.start : run.stop], entry)))
            until = time.monotonic() + patience
            for run, written in writing:
                if self._await("put", "store", written, self._load_timeout, until):
                    done[run.start : run.stop] = [True] * len(run)
            patience = until - time.monotonic()
            if patience <= 0:
                break

    def _encode(
        self, cache: PagedCache, slots: torch.Tensor, pages: Sequence[bytes], start: int | None, following: int
    ) -> bytes | None:
        """Return the entry of a run; None if it cannot be coded."""
        began = time.monotonic()
        try:
            tokens = Recognized(start, None)
            if self._recognizer is not None:
                tokens = self._recognizer.recognize(cache, slots, start, self._names.page_tokens)
            if tokens.start is None:
                self._fail("positions", InputError(_NO_POSITION))
                return None
            bound = self._bound_to(self._names.run(pages))
            chunks = PagedChunks(cache, [slots], [tokens.start], tokens=[tokens.token_ids], following=[following])
            (blob,) = self._codec.encode(chunks, associated_data=[bound] if bound else None)
        except CuveeError as error:
            self._fail("encode", error)
            return None
        self._counts.count("encode_seconds", time.monotonic() - began)
        self._counts.count("recognized_pages", 0 if tokens.token_ids is None else len(pages))
        return make_run_entry(pages, blob)

    def _write(self, pages: Sequence[bytes], entry: bytes) -> bool:
        """Store a run, then the index entries that lead to it; return whether all of that was done."""
        run = self._names.run(pages)
        places = {page: Place(run, position) for position, page in enumerate(pages)}
        if not self._store.put(self._key(run), entry):
            self._fail("store", StoreError("the store did not take a run of pages"))
            return False
        if self._run_pages > 1:
            for page, place in places.items():
                if not self._store.put(self._key(page), make_index_entry(place)):
                    self._fail("store", StoreError("the store did not take an index entry"))
                    return False
            self._remember(places)
        raw = len(pages) * self._names.page_tokens * self.layout.bytes_per_token
        for name, value in (("saved_pages", len(pages)), ("raw_bytes", raw), ("blob_bytes", len(entry))):
            self._counts.count(name, value)
        return True

    # Loading --------------------------------------------------------------------------------------------------------

    def _in_order(self, pages: Sequence[bytes], work: _Work, timeout: float, until: float | None = None) -> int:
        """Find pages up to the first that is missing, and do some work on their runs.

        Args:
            pages: digests.
            work: called in threads with a run's digest, its entry, and the pages that are wanted of it; returns whether
                that was possible.
            timeout: seconds that the store may take for anything.
            until: the time at which it must be done with everything; default: any.

        Returns:
            for how many pages from the first on that was done.
        """
        done = [False] * len(pages)
        reached = 0
        while reached < len(done):
            wanted: dict[bytes, list[_Wanted]] = {}
            for number, place in enumerate(self._locate(pages[reached:], _left(timeout, until)), reached):
                if place is None:
                    break
                wanted.setdefault(place.run, []).append(_Wanted(number, pages[number], place.position))
            absent = self._do(work, wanted, done, timeout, until) if wanted else None
            reached = done.index(False) if False in done else len(done)
            # A remembered place is out of date if the page was evicted and stored anew in another run.
            if absent is None or not self._forget([each.page for each in wanted[absent]]):
                break
        return reached

    def _do(
        self,
        work: _Work,
        wanted: dict[bytes, list[_Wanted]],
        done: list[bool],
        timeout: float,
        until: float | None,
    ) -> bytes | None:
        """Fetch some runs, in order, and do the work on each; mark their pages in `done`, up to a run that failed.

        Returns:
            that run, if it is because the store does not have it.
        """
        slices = list(_slices(list(wanted)))
        fetching = self._get_later(slices[0])
        for number, runs in enumerate(slices):
            entries = self._await("get_many", "fetch", fetching, timeout, until) or [None] * len(runs)
            if number + 1 < len(slices):
                fetching = self._get_later(slices[number + 1])  # while work is done on these
            working: list[tuple[bytes, Future[bool]]] = []
            try:
                for run, entry in zip(runs, entries, strict=True):
                    if entry is None:
                        break
                    working.append((run, self._coders.submit(work, run, entry, wanted[run])))
            finally:
                wait([future for _, future in working])  # in any case, since they may write the engine's pages
            for run, future in working:
                if not future.result():
                    return None
                for each in wanted[run]:
                    done[each.number] = True
            if len(working) < len(runs):
                return runs[len(working)]
        return None

    def _get_later(self, runs: Sequence[bytes]) -> Future[list[bytes | None]]:
        return self._waiters.submit(self._get_any, runs)

    def _open(self, digest: bytes, entry: bytes, wanted: Sequence[_Wanted], start: int | None, dtype: str) -> _Run:
        """Open the entry of a run, of which some pages are wanted; `start` is the position of page number 0.

        Raises:
            CuveeError: it is not the entry of this run, or its blob is not what its pages call for.
        """
        pages, blob = parse_run_entry(entry)
        if self._names.run(pages) != digest:
            raise CorruptError("run entry: must list the pages of its own digest, got others")
        if not all(_is_listed(pages, each) for each in wanted):
            raise CorruptError("index entry: must name the place of its page, got that of another")
        start = self._position(start, wanted[0].number - wanted[0].position)
        opened = self._codec.open(
            blob,
            associated_data=self._bound_to(digest),
            expected=Expected(len(pages) * self._names.page_tokens, start, dtype),
        )
        return _Run(digest, len(entry), opened, tuple(wanted))

    def _slots_of(self, run: _Run, slots: torch.Tensor) -> torch.Tensor:
        """Return where the tokens of a run go, given the slots of all pages of the call."""
        size = self._names.page_tokens
        at = torch.full((run.blob.tokens,), NOWHERE)
        for each in run.wanted:
            own = slots[each.number * size : (each.number + 1) * size]
            at[each.position * size : (each.position + 1) * size] = own
        return at

    def _restore(
        self,
        cache: PagedCache,
        slots: torch.Tensor,
        start: int | None,
        run: bytes,
        entry: bytes,
        wanted: Sequence[_Wanted],
    ) -> bool:
        """Decode the wanted pages of a run into their slots; return whether that was possible."""
        began = time.monotonic()

        def work() -> None:
            opened = self._open(run, entry, wanted, start, cache.layout.dtype)
            self._codec.decode_paged([opened.blob], cache, [self._slots_of(opened, slots)]).check()
            self._counts.count("decode_seconds", time.monotonic() - began)
            self._counts.count("loaded_blob_bytes", len(entry))

        return self._try(work, run, wanted)

    def _place(self, cache: PagedCache, work: Sequence[tuple[_Run, torch.Tensor]], layers: range) -> bool:
        """Decode some layers of runs to the slots beside them; return whether that was possible for all of them."""
        if self._codec.on_device(cache.device):  # many chunks in one call
            blobs, slots = [run.blob for run, _ in work], [at for _, at in work]
            try:
                self._codec.decode_paged(blobs, cache, slots, layers=layers).check()
                return True
            except CuveeError:  # decoding them one by one tells which of them is damaged
                return all(self._decode(cache, *each, layers) for each in work)
        decoding: list[Future[bool]] = []
        try:
            for each in work:
                decoding.append(self._coders.submit(self._decode, cache, *each, layers))
        finally:
            wait(decoding)  # in any case, since they write the engine's pages
        return all(future.result() for future in decoding)

    def _decode(self, cache: PagedCache, run: _Run, slots: torch.Tensor, layers: range) -> bool:
        def work() -> None:
            self._codec.decode_paged([run.blob], cache, [slots], layers=layers).check()

        return self._try(work, run.digest, run.wanted)

    def _try(self, work: Callable[[], None], run: bytes, wanted: Sequence[_Wanted]) -> bool:
        """Do some work on a run; return whether it was possible. A run that is to blame is discarded."""
        try:
            work()
        except CuveeError as error:
            self._fail("decode", error)
            if error.blames_blob:
                self._discard(run, [each.page for each in wanted])
            return False
        return True

    def _discard(self, run: bytes, pages: Sequence[bytes]) -> None:
        """Delete a run that never decodes, and what led to it, so that its pages can be stored again."""
        self._forget(pages)
        digests = (run, *(pages if self._run_pages > 1 else ()))

        def delete() -> None:
            for digest in digests:
                for key_id in self._key_ids:
                    try:
                        self._store.delete(self._key(digest, key_id))
                    except Exception as error:
                        self._fail("store", error)

        self._ask("delete", "store", delete, self._lookup_timeout)  # an engine may wait for the lookup that found it

    def _delete(self, page: bytes) -> bool:
        """Delete the entry by which a page is found; return whether the store did so, under every secret."""
        self._forget([page])
        entry = page if self._run_pages > 1 else self._names.run([page])
        keys = [self._key(entry, key_id) for key_id in self._key_ids]
        done = self._ask("delete", "store", lambda: [self._store.delete(key) for key in keys], self._load_timeout)
        return done is not None

    # The store ------------------------------------------------------------------------------------------------------

    def _key(self, digest: bytes, key_id: bytes | None = None) -> str:
        return store_key(self._names.tenant, digest, self._shard, self._key_ids[0] if key_id is None else key_id)

    def _bound_to(self, run: bytes) -> bytes:
        """Return what a blob's tag covers besides the blob: the run's key, and so all of its pages."""
        return store_key(self._names.tenant, run, self._shard).encode() if self._codec.key_ids else b""

    def _get_many(self, digests: Sequence[bytes], label: str, timeout: float) -> list[bytes | None]:
        """Return the entries of these digests in time; None for those that are not there."""
        if not digests:
            return []
        return self._ask("get_many", label, lambda: self._get_any(digests), timeout) or [None] * len(digests)

    def _get_any(self, digests: Sequence[bytes]) -> list[bytes | None]:
        """Return the entries of these digests, as signed with any of the secrets."""
        found: list[bytes | None] = [None] * len(digests)
        for key_id in self._key_ids:
            left = [number for number, entry in enumerate(found) if entry is None]
            if not left:
                break
            for number, entry in zip(
                left, self._store.get_many([self._key(digests[number], key_id) for number in left]), strict=True
            ):
                found[number] = entry
        return found

    def _ask(self, operation: str, label: str, work: Callable[[], T], timeout: float) -> T | None:
        """Return the store's answer; None if it fails or comes late."""
        try:
            answer = self._waiters.submit(work)
        except RuntimeError as error:  # no thread can be started
            self._fail(label, error)
            return None
        return self._await(operation, label, answer, timeout)

    def _await(
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
            return answer.result(_left(timeout, until))
        except TimeoutError:
            answer.cancel()
            self._store.overdue(operation, timeout)
            self._fail(label, StoreError(f"the store did not answer within {timeout:g} s"))
        except Exception as error:
            self._fail(label, error)
        return None

    def _fail(self, label: str, error: Exception) -> None:
        """Count a failure; log the first of its kind at WARNING and the others at DEBUG."""
        self._counts.count("failures", label=label)
        kind = f"{label} {type(error).__name__}"
        level = logging.DEBUG if kind in self._said else logging.WARNING
        self._said.add(kind)
        logger.log(level, "cuvee: pages are computed, or not stored (%s failed): %s (said once per kind)", label, error)


def _left(timeout: float, until: float | None) -> float:
    """Return how many of `timeout` seconds are left `until` a time."""
    return timeout if until is None else max(until - time.monotonic(), 0)


def _is_listed(pages: Sequence[bytes], wanted: _Wanted) -> bool:
    """Return whether a run's list has the wanted page where its index entry says."""
    return wanted.position < len(pages) and pages[wanted.position] == wanted.page


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


def _slices(runs: Sequence[T]) -> Iterator[Sequence[T]]:
    """Divide runs into slices that are fetched, or encoded, together."""
    return (runs[first : first + _RUNS] for first in range(0, len(runs), _RUNS))
