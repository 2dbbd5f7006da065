"""`PageStore`: an engine's pages into a store and back, each a blob of its own.

    stored   names ──> digests ──> are their entries there?
    save     missing pages ──codec──> entries
    load     entries ──codec──> the engine's memory, up to the first that fails

Engines call this beside a prefix cache, so every failure is a page that is not there. It is counted, logged once per
kind, and never raised.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from threading import Condition, Lock
from typing import Self

import torch

from cuvee.codec.codec import Codec
from cuvee.codec.errors import CuveeError, InputError
from cuvee.codec.layout import KVLayout
from cuvee.codec.paged import PagedCache
from cuvee.integrations.core.chunk_io import ChunkIO, expected_sizes
from cuvee.integrations.core.entry_keys import EntryKeys
from cuvee.integrations.core.guard import Once, Recorder
from cuvee.integrations.pages.entries import Encode, Entries, Found, Note, Read, Waiters, no_note
from cuvee.integrations.pages.opaque import OpaquePage, decode_opaque, encode_opaque
from cuvee.integrations.pages.recognition import Recognizer
from cuvee.integrations.stores import Store
from cuvee.integrations.stores.threads import ThreadPool
from cuvee.naming.identity import PageNames, tenant_id

logger = logging.getLogger(__name__)

_STORE_THREADS = 4  # that wait for the store, of each kind


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
        self._valid = valid
        self.layout, self._names, self._counts = layout, names, counts
        self._entries = Entries(
            ChunkIO(codec, self._coders), self._store, self._waiters, EntryKeys(codec.key_ids, shard), names,
            self._recognizer(codec), counts, self._once, self._lookup_timeout, self._load_timeout,
            valid, note,
        )  # fmt: skip

    def _recognizer(self, codec: Codec) -> Recognizer | None:
        """Return what tells the tokens of pages; None without loss, which needs neither ids nor positions."""
        with self._lock:
            if codec not in self._recognizers:
                self._recognizers[codec] = None if codec.lossless else Recognizer(codec.profile)
            return self._recognizers[codec]

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

    def stored(self, names: Sequence[bytes]) -> list[bool]:
        """Return whether each page can be loaded, by the engine's names."""
        pages = [self._names.page(name) for name in names]
        with self._engine_calls as admitted:
            return self._entries.stored(pages) if admitted and self._valid() else [False] * len(pages)

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
        pages = self._digests(slots, names)
        return self._save(pages, self._entries.encoder(cache, slots, start, following), self._page_bytes(cache))

    def save_opaque(self, memory: Sequence[OpaquePage], names: Sequence[bytes]) -> list[bool]:
        """Store pages as `save` does, losslessly, whatever they hold. They have one size, if there are several.

        Args:
            memory: of each page.
            names: as in `save`.
        """
        pages = [self._names.page(name) for name in names]

        def encode(number: int, bound: bytes) -> bytes:
            return encode_opaque(self._entries.io.codec, memory[number], self._names.page_tokens, bound)

        done = self._save(pages, encode, memory[0].nbytes if memory else 0)
        self._count_opaque(memory, done)
        return done

    def _save(self, pages: Sequence[bytes], encode: Encode, nbytes: int) -> list[bool]:
        with self._engine_calls as admitted:
            done = [False] * len(pages)
            if admitted and self._valid():
                done = self._entries.save(pages, encode, nbytes)
        self._counts.count("unsaved_pages", len(done) - sum(done))
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
        pages = self._digests(slots, names)
        of_page = slots.split(self._names.page_tokens)

        def restore(found: Sequence[Found]) -> tuple[int, CuveeError | None]:
            began, dtype = time.monotonic(), cache.layout.dtype
            entries = [self._entries.as_stored(each, start, dtype) for each in found]
            blobs, problem = self._entries.io.restore(cache, entries, [[of_page[each.number]] for each in found])
            self._count_decoded(found[: len(blobs)], began)
            return len(blobs), problem

        expected = sum(expected_sizes(self._entries.io.codec)) * self._names.page_tokens
        return self._load(pages, restore, expected, self._page_bytes(cache))

    def load_opaque(self, memory: Sequence[OpaquePage], names: Sequence[bytes]) -> list[bool]:
        """Restore pages of `save_opaque` as `load` does, bit for bit.

        Args:
            memory: of each page; it must have the dtypes and shapes that the stored page had.
            names: as in `save`.
        """
        codec, tokens = self._entries.io.codec, self._names.page_tokens

        def decode(found: Found) -> None:
            decode_opaque(codec, found.entry, memory[found.number], tokens, self._entries.bound_to(found.page))

        def restore(found: Sequence[Found]) -> tuple[int, CuveeError | None]:
            began = time.monotonic()
            done, problem = self._entries.io.in_a_row([partial(decode, each) for each in found])
            self._count_decoded(found[: len(done)], began)
            return len(done), problem

        nbytes = memory[0].nbytes if memory else 0
        loaded = self._load([self._names.page(name) for name in names], restore, nbytes, nbytes)
        self._count_opaque(memory, loaded)
        return loaded

    def _load(self, pages: Sequence[bytes], restore: Read, expected: float, nbytes: int) -> list[bool]:
        """Restore pages of `nbytes` each, the entries of which have about `expected` bytes."""
        with self._engine_calls as admitted:
            loaded = 0
            if admitted and self._valid():
                loaded = self._entries.in_order(pages, restore, self._load_timeout, expected)
        loaded *= self._valid()  # what was restored meanwhile may be of other weights
        self._counts.count("loaded_pages", loaded)
        self._counts.count("missed_pages", len(pages) - loaded)
        self._counts.count("loaded_raw_bytes", loaded * nbytes)
        return [number < loaded for number in range(len(pages))]

    def _page_bytes(self, cache: PagedCache) -> int:
        return self._names.page_tokens * cache.layout.bytes_per_token

    def _count_decoded(self, found: Sequence[Found], began: float) -> None:
        self._counts.count("decode_seconds", time.monotonic() - began)
        self._counts.count("loaded_blob_bytes", sum(len(each.entry) for each in found))

    def _count_opaque(self, memory: Sequence[OpaquePage], done: Sequence[bool]) -> None:
        for page, there in zip(memory, done, strict=True):
            self._counts.count("opaque_pages", int(there), page.kind)

    def count(self, name: str) -> None:
        """Count something that happened to all pages."""
        self._counts.count(name)

    def delete(self, names: Sequence[bytes]) -> list[bool]:
        """Delete pages; return whether each is known to be gone."""
        pages = [self._names.page(name) for name in names]
        with self._engine_calls as admitted:
            usable = admitted and self._valid()
            return [usable and self._entries.delete(page, self._load_timeout) for page in pages]

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

    def _digests(self, slots: torch.Tensor, names: Sequence[bytes]) -> list[bytes]:
        if len(slots) != len(names) * self._names.page_tokens:
            raise InputError(
                f"slots: must be {self._names.page_tokens} for each of {len(names)} pages, got {len(slots)}"
            )
        return [self._names.page(name) for name in names]


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
