"""Pages in and out of a store: exact in any arrangement, and never wrong, whatever the store does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tests.conftest import fitted_to
from tests.integrations.stores.dict_store import DictStore, FakeStore, hold
from tests.recognizing import cached, learned_profile, small_model
from tests.waiting import PATIENCE

from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.errors import InputError
from cuvee.codec.layout import KVLayout, LayerLayout, Rope
from cuvee.codec.paged import PagedCache
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.support.arrays import I64
from cuvee.integrations.identity.weights_name import WeightsName
from cuvee.integrations.pages import Counts, PageStore, page_store
from cuvee.integrations.stores import Store, StoreError, folder
from cuvee.integrations.stores.breaker import GuardedStore
from cuvee.integrations.stores.disk import DiskStore
from cuvee.integrations.stores.tiered import TieredStore
from cuvee.naming.identity import Identity, PageNames, Scope, store_key

PAGE = 8  # tokens
PAGES = 40  # of the engine's memory
LAYOUT = KVLayout(
    "test", (LayerLayout(2, 16, 16, Rope(tuple(10.0 ** -(i / 2) for i in range(8)))),) * 3, "float32", 4096
)
SECRETS = (bytes(range(16)), bytes(range(16, 48)))


class Desk:
    """An engine's memory, and a page store over a dict.

    Attributes:
        keys, values: per layer `[PAGES, PAGE, heads, dim]`.
        slots: of a permutation of the memory's pages, `[PAGES * PAGE]`.
    """

    def __init__(self, store: Store, quality: str = "lossless", secrets: Sequence[bytes] = (), **options: Any):
        generator = torch.Generator().manual_seed(1)
        self.keys, self.values = (
            [torch.randn(PAGES, PAGE, 2, 16, generator=generator) for _ in range(3)] for _ in range(2)
        )
        self.cache = PagedCache(LAYOUT, self.keys, self.values)
        order = torch.randperm(PAGES, generator=generator)
        self.slots = (order[:, None] * PAGE + torch.arange(PAGE)).flatten()
        self.store = store
        self.counts = Counts()
        profile = Profile.unlearned(LAYOUT) if quality == "lossless" else fitted_to(LAYOUT)
        self.codec = Codec(profile, quality, threads=1, key=list(secrets) or None)
        self.names = PageNames(
            Identity("m", "", LAYOUT.fingerprint, b"" if self.codec.lossless else b"profile", self.codec.quality_name),
            Scope("tenant"), "test", PAGE,
        )  # fmt: skip
        options = {"lookup_timeout": 10.0, **options}
        self.pages = PageStore(self.codec, store, self.names, counts=self.counts, **options)

    def at(self, pages: range) -> torch.Tensor:
        return self.slots[pages.start * PAGE : pages.stop * PAGE]

    def tokens(self, pages: range) -> list[torch.Tensor]:
        chunk = self.cache.read(self.at(pages), 0)
        return [*chunk.keys, *chunk.values]

    def save(self, pages: range, start: int | None = 0) -> list[bool]:
        """Save pages named by their numbers, as a sequence that begins with page 0 at position `start`."""
        begin = None if start is None else start + pages.start * PAGE
        return self.pages.save(self.cache, self.at(pages), named(pages), begin)

    def load(self, pages: range, into: range, start: int | None = 0) -> list[bool]:
        """Load pages named by their numbers into other pages of the memory."""
        begin = None if start is None else start + pages.start * PAGE
        return self.pages.load(self.cache, self.at(into), named(pages), begin)

    def key(self, page: int) -> str:
        digest = self.names.page(b"page %d" % page)
        return store_key("tenant", digest, 0, (self.codec.key_ids or (b"",))[0])


def named(pages: range) -> list[bytes]:
    return [b"page %d" % number for number in pages]


@pytest.fixture
def store() -> DictStore:
    return DictStore()


@pytest.fixture
def desk(store: DictStore) -> Iterator[Callable[..., Desk]]:
    def make(*arguments: Any, **options: Any) -> Desk:
        made = Desk(store, *arguments, **options)
        stack.callback(made.pages.close)
        return made

    with ExitStack() as stack:
        yield make
        store.before = lambda operation: None


def equal(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    return all(map(torch.equal, left, right))


# Positions and tokens ------------------------------------------------------------------------------------------------


def test_the_url_of_a_store_is_refused() -> None:
    with pytest.raises(InputError, match=r"^store: must be a Store, got str: open_store\(URL\) makes one$"):
        Desk("redis://:secret@host/0")  # type: ignore[arg-type]


def test_pages_at_another_position_are_not_those_that_were_stored(
    desk: Callable[..., Desk], caplog: pytest.LogCaptureFixture
) -> None:
    d = desk("balanced")
    assert d.save(range(4), start=160) == [True] * 4
    assert d.load(range(4), range(20, 24), start=168) == [False] * 4
    assert d.counts.snapshot()["failures{decode}"] == 1 and "tokens from 160" in caplog.text
    assert d.counts.snapshot()["missed_pages"] == 4


def test_positions_must_be_known_unless_nothing_is_lost(
    desk: Callable[..., Desk], caplog: pytest.LogCaptureFixture
) -> None:
    lossy, lossless = desk("balanced"), desk()
    assert lossy.save(range(4), start=None) == [False] * 4
    counts = lossy.counts.snapshot()
    assert counts == {"failures{positions}": 4, "unsaved_pages": 4} and "start: must be known" in caplog.text
    wanted = lossless.tokens(range(8))
    assert lossless.save(range(4), start=None) == lossless.save(range(4, 8), start=96) == [True] * 4
    for start in (None, 96, 5):
        assert lossless.load(range(8), range(20, 28), start=start) == [True] * 8
        assert equal(lossless.tokens(range(20, 28)), wanted)


class Told:
    """A page store with a learned profile, over the cache of a small model."""

    def __init__(self, chunk: KVChunk) -> None:
        self.codec = Codec(learned_profile(), step=0.25, threads=1)
        self.chunk, self.counts = chunk, Counts()
        identity = Identity("m", "", chunk.layout.fingerprint, self.codec.profile.id, self.codec.quality_name)
        names = PageNames(identity, Scope(), "test", PAGE)
        self.pages = PageStore(self.codec, DictStore(), names, counts=self.counts, lookup_timeout=PATIENCE)

    def save(self, start: int | None) -> list[bool]:
        """Save the first four pages."""
        return self.pages.save(PagedCache.of_chunk(self.chunk), torch.arange(4 * PAGE), named(range(4)), start)

    def load(self, start: int | None) -> list[torch.Tensor] | None:
        """Load them again; return None if one is missing."""
        layout = self.chunk.layout
        cache = PagedCache.empty(layout, 4 * PAGE, range(layout.num_layers), torch.device("cpu"))
        if self.pages.load(cache, torch.arange(4 * PAGE), named(range(4)), start) != [True] * 4:
            return None
        back = cache.chunk(None, 0)
        return [*back.keys, *back.values]

    def coded(self, ids: I64 | None, found: list[torch.Tensor] | None) -> bool:
        """Whether this is what the codec makes of the pages with these ids."""
        parts = []
        for at in range(0, 4 * PAGE, PAGE):
            own, known = self.chunk.slice(at, at + PAGE), None if ids is None else ids[at : at + PAGE]
            told = KVChunk(own.keys, own.values, own.layout, 8 * PAGE + at, known, 3 * PAGE - at)
            parts.append(self.codec.decode(self.codec.encode(told)))
        back = KVChunk.concat(parts)
        return found is not None and equal(found, [*back.keys, *back.values])


def test_pages_whose_ids_are_not_recognized_are_stored_without() -> None:
    part = cached(small_model()).slice(8 * PAGE, 12 * PAGE)
    for page in range(4):
        part.values[0][page * PAGE + 5] += 3
    told = Told(part)
    assert told.save(start=8 * PAGE) == [True] * 4
    assert "recognized_pages" not in told.counts.snapshot() and told.coded(None, told.load(None))
    told.pages.close()


def test_pages_that_are_coded_in_a_safer_way_are_counted() -> None:
    part = cached(small_model()).slice(8 * PAGE, 12 * PAGE)
    noise = torch.Generator().manual_seed(5)
    for unit in (*part.keys, *part.values):
        unit[2 * PAGE :].normal_(0, 1000, generator=noise)
    told = Told(part)
    assert told.save(start=8 * PAGE) == [True] * 4
    assert told.counts.snapshot()["misfit_pages"] == 2
    found = told.load(None)
    assert found is not None and all(
        torch.equal(got[2 * PAGE :], unit[2 * PAGE :])
        for got, unit in zip(found, [*part.keys, *part.values], strict=True)
    )
    told.pages.close()


def test_pages_begin_at_multiples_of_their_size() -> None:
    told = Told(cached(small_model()).slice(8 * PAGE + PAGE // 2, 12 * PAGE + PAGE // 2))
    assert told.save(start=None) == [False] * 4
    assert told.counts.snapshot()["failures{positions}"] == 4
    told.pages.close()


def test_pages_whose_position_is_not_recognized_are_not_stored(caplog: pytest.LogCaptureFixture) -> None:
    part = cached(small_model(1)).slice(8 * PAGE, 12 * PAGE)  # of another model
    told = Told(part)
    assert told.save(start=None) == [False] * 4
    assert told.counts.snapshot() == {"failures{positions}": 4, "unsaved_pages": 4}
    assert "was not recognized from the keys" in caplog.text
    told.pages.close()


def test_nothing_behind_a_missing_page_is_loaded(
    desk: Callable[..., Desk], store: DictStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it is in what is fetched at a time, and though the pages of the next such batch are there."""
    monkeypatch.setattr(page_store, "_BATCH_TOKENS", 8 * PAGE)
    d = desk()
    d.save(range(16))
    for gone in (0, 5, 7, 8, 12):
        kept = store.entries.pop(d.key(gone))
        assert d.load(range(16), range(20, 36)) == [True] * gone + [False] * (16 - gone)
        store.entries[d.key(gone)] = kept


def test_what_was_begun_under_a_name_that_no_longer_holds_does_not_count(
    desk: Callable[..., Desk], store: DictStore
) -> None:
    """The weights change while pages are stored, or loaded."""
    d = desk()
    d.save(range(4))
    weights = WeightsName(lambda stop: "w")
    named = weights.wait(60)
    d.pages = d.pages.sibling(d.pages._io.codec, d.pages._names, d.pages.layout, valid=lambda: weights.holds(named))
    assert d.load(range(4), range(20, 24)) == [True] * 4

    def change(operation: str) -> None:
        if operation in ("get", "contains"):
            weights.withdraw("they change")

    before, store.before = dict(store.entries), change
    assert d.load(range(4), range(20, 24)) == [False] * 4
    weights.use("w")
    named = weights.current
    assert d.save(range(4, 8)) == [False] * 4 and store.entries == before
    store.before = lambda operation: None
    assert d.pages.stored([b"0"]) == [False]


# Deleting ------------------------------------------------------------------------------------------------------------


def test_a_bad_page_under_an_earlier_secret_that_the_store_could_not_delete_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(DiskStore(tmp_path)) as disk:
        before, d = Desk(disk, secrets=SECRETS[1:]), Desk(disk, secrets=SECRETS)
        assert before.save(range(3)) == [True] * 3
        tenant, _, name = before.key(1).partition("/")
        (tmp_path / tenant / name[:2] / name).write_bytes(bytes(100))
        monkeypatch.setattr(folder, "remove_entry", failing := Mock(side_effect=OSError("read-only")))
        assert d.load(range(3), range(10, 13)) == [True, False, False] and failing.called
        assert d.save(range(3)) == [True] * 3 and d.counts.snapshot()["kept_pages"] == 2
        assert d.load(range(3), range(10, 13)) == [True] * 3


def test_pages_in_ram_are_kept_while_the_store_behind_it_cannot_be_read() -> None:
    below = FakeStore()
    d = Desk(TieredStore([DictStore(), GuardedStore(below)]))
    assert d.save(range(2)) == [True] * 2
    below.read_fault = StoreError("down")
    assert d.load(range(3), range(10, 13)) == [True, True, False]
    assert d.save(range(2)) == [True] * 2 and d.counts.snapshot()["saved_pages"] == d.counts.snapshot()["kept_pages"]
    d.pages.close()


@pytest.mark.parametrize("secrets", [(), SECRETS])
def test_single_pages_are_deleted(desk: Callable[..., Desk], store: DictStore, secrets: Sequence[bytes]) -> None:
    d = desk(secrets=secrets)
    d.save(range(4))
    before = len(store.entries)
    assert d.pages.delete(named(range(1, 3))) == [True, True]
    assert len(store.entries) == before - 2
    assert d.pages.stored(named(range(4))) == [True, False, False, True]
    assert d.pages.delete([b"never stored"]) == [True]
    (desk(secrets=secrets[1:]) if secrets else d).save(range(4, 6))
    assert d.pages.stored(named(range(4, 6))) == [True, True]
    d.pages.delete(named(range(4, 6)))
    assert d.pages.stored(named(range(4, 6))) == [False, False], "also if signed with an earlier secret"
    d.save(range(1, 3))
    assert d.pages.stored(named(range(4))) == [True] * 4


def test_pages_that_may_still_be_there_are_not_deleted(desk: Callable[..., Desk], store: DictStore) -> None:
    d = desk()
    d.save(range(2))

    def fail(operation: str) -> None:
        raise StoreError("gone")

    store.before = fail
    assert d.pages.delete(named(range(2))) == [False, False] and d.counts.snapshot()["failures{store}"] == 2
    store.before = lambda operation: None
    d.pages.close()
    assert d.pages.delete(named(range(2))) == [False, False] and len(store.entries) == 2


# Stores that fail -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("busy", ["put", "get", "contains"])
def test_each_kind_of_call_has_threads_of_its_own(desk: Callable[..., Desk], store: DictStore, busy: str) -> None:
    """However many calls of one kind wait for the store, those of the others are answered."""
    d = desk()
    d.save(range(8))
    go, threads = hold(store, busy), []
    for first in range(20, 36):  # more than there are threads
        calls = {
            "put": partial(d.save, range(first, first + 1)),
            "get": partial(d.pages.load, d.cache, d.at(range(first, first + 1)), named(range(1)), 0),
            "contains": partial(d.pages.stored, named(range(1))),
        }
        threads.append(threading.Thread(target=calls[busy], daemon=True))
        threads[-1].start()
    assert go.begun.wait(30)
    try:
        if busy != "contains":
            assert d.pages.stored(named(range(10))) == [True] * 8 + [False] * 2
        if busy != "get":
            assert d.load(range(4), range(10, 14)) == [True] * 4
        if busy == "get":
            assert d.save(range(36, 38)) == [True] * 2
    finally:
        go.set()
    for thread in threads:
        thread.join(30)


def test_nothing_is_encoded_for_a_store_that_is_down(
    desk: Callable[..., Desk], store: DictStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    d = desk()
    monkeypatch.setattr(store, "takes_puts", lambda: False)
    monkeypatch.setattr(d.codec, "encode", None)
    assert d.save(range(2)) == [False, False] and store.calls == ["contains"]
    assert d.counts.snapshot()["failures{store}"] == 1


def test_a_save_waits_once_for_a_store_that_hangs(
    desk: Callable[..., Desk], store: DictStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not once per entry: its engine may wait for it."""
    waited: list[float] = []
    monkeypatch.setattr("cuvee.integrations.pages.page_store._BATCH_TOKENS", 8 * PAGE)
    d, result = desk(load_timeout=1.0), Future.result

    def noting(self: Future[Any], timeout: float | None = None) -> Any:
        if timeout is not None and timeout < 10:  # which is the time of the lookup
            waited.append(timeout)
        return result(self, timeout)

    monkeypatch.setattr(Future, "result", noting)
    go = hold(store, "put")
    try:
        assert d.save(range(20)) == [False] * 20
    finally:
        go.set()
    assert 0 < sum(waited) <= 1.0, "each of them was waited for in vain"
    assert len(waited) == 8, "and the pages after the first eight were not even coded"
    assert d.counts.snapshot()["unsaved_pages"] == 20


def test_a_store_that_takes_no_more_costs_the_pages_that_it_refuses(
    desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    d, put, left = desk(), DictStore.put, [3]

    def full(self: DictStore, key: str, blob: bytes) -> bool:
        left[0] -= 1
        return left[0] >= 0 and put(self, key, blob)

    monkeypatch.setattr(DictStore, "put", full)
    done = d.save(range(4))
    assert sum(done) == 3 and done == desk().pages.stored(named(range(4)))
    assert d.counts.snapshot()["failures{store}"] == 1
    monkeypatch.setattr(DictStore, "put", put)
    assert d.save(range(4)) == [True] * 4 == desk().load(range(4), range(20, 24))


def test_a_page_that_cannot_be_coded_costs_no_other(desk: Callable[..., Desk]) -> None:
    d = desk("balanced")
    d.keys[1].view(-1, 2, 16)[d.at(range(5, 6))[3]] = torch.nan
    assert d.save(range(12)) == [page != 5 for page in range(12)]
    failures = {name: count for name, count in d.counts.snapshot().items() if name.startswith("failures")}
    assert failures == {"failures{encode}": 1}


def test_slots_of_another_number_are_refused(desk: Callable[..., Desk]) -> None:
    d = desk()
    for method in (d.pages.save, d.pages.load):
        with pytest.raises(InputError, match="slots: must be 8 for each of 2 pages, got 24"):
            method(d.cache, d.at(range(3)), named(range(2)), 0)
    with pytest.raises(InputError, match="name: must be"):
        d.pages.stored([b""])
