"""Pages in and out of a store: exact in any arrangement, and never wrong, whatever the store does."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from tests.conftest import fitted_to
from tests.integrations.stores.dict_store import DictStore, hold
from tests.recognizing import cached, ids_of, learned_profile, small_model

from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.errors import CorruptError, InputError
from cuvee.codec.layout import KVLayout, LayerLayout, Rope
from cuvee.codec.paged import PagedCache
from cuvee.codec.paged_chunks import PagedChunks
from cuvee.codec.profiles.profile import Profile
from cuvee.integrations.entry_keys import EntryKeys
from cuvee.integrations.pages import Counts, PageStore
from cuvee.integrations.pages.entries import (
    MAX_RUN_PAGES,
    Place,
    make_index_entry,
    make_run_entry,
    parse_index_entry,
    parse_run_entry,
)
from cuvee.integrations.pages.runs import divided
from cuvee.integrations.stores import StoreError
from cuvee.integrations.stores.threads import ThreadPool
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

    def __init__(self, store: DictStore, quality: str = "lossless", secrets: Sequence[bytes] = (), **options: Any):
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
        options = {"run_pages": 4, "lookup_timeout": 10.0, **options}
        self.pages = PageStore(self.codec, store, self.names, counts=self.counts, **options)

    def at(self, pages: range) -> torch.Tensor:
        """Slots of some pages of the permutation."""
        return self.slots[pages.start * PAGE : pages.stop * PAGE]

    def tokens(self, pages: range) -> list[torch.Tensor]:
        """A copy of what these pages of the memory hold."""
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

    def key(self, digest: bytes, key_id: bytes | None = None) -> str:
        return store_key("tenant", digest, 0, (self.codec.key_ids or (b"",))[0] if key_id is None else key_id)

    def index_key(self, page: int) -> str:
        return self.key(self.names.page(b"page %d" % page))

    def run_key(self, pages: range) -> str:
        return self.key(self.names.run([self.names.page(name) for name in named(pages)]))


def named(pages: range) -> list[bytes]:
    return [b"page %d" % number for number in pages]


@pytest.fixture
def store() -> DictStore:
    return DictStore()


@pytest.fixture
def desk(store: DictStore) -> Iterator[Callable[..., Desk]]:
    made: list[Desk] = []

    def make(*arguments: Any, **options: Any) -> Desk:
        made.append(Desk(store, *arguments, **options))
        return made[-1]

    yield make
    store.before = lambda operation: None
    for each in made:
        each.pages.close()


def equal(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    return all(map(torch.equal, left, right))


# There and back -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run_pages", [1, 3, 4, 100])
@pytest.mark.parametrize("secrets", [(), SECRETS[:1]])
def test_pages_come_back_exactly_and_nothing_else_is_written(
    desk: Callable[..., Desk], run_pages: int, secrets: Sequence[bytes]
) -> None:
    writer = desk(secrets=secrets, run_pages=run_pages)
    wanted = writer.tokens(range(11))
    assert writer.save(range(11)) == [True] * 11
    for reader in (writer, desk(secrets=secrets, run_pages=run_pages)):
        for tensor in reader.keys + reader.values:
            tensor.fill_(torch.nan)
        assert reader.pages.stored(named(range(12))) == [True] * 11 + [False]
        assert reader.load(range(11), range(20, 31)) == [True] * 11
        assert equal(reader.tokens(range(20, 31)), wanted)
        others = reader.tokens(range(20)) + reader.tokens(range(31, PAGES))
        assert all(bool(tensor.isnan().all()) for tensor in others)
        counts = reader.counts.snapshot()
        assert counts["loaded_pages"] == 11 and "missed_pages" not in counts
        assert counts["loaded_raw_bytes"] == 11 * PAGE * LAYOUT.bytes_per_token
    sizes = [len(entry) for entry in writer.store.entries.values()]
    assert len(sizes) == (11 if run_pages == 1 else -(-11 // run_pages) + 11)


@pytest.mark.parametrize("part", [range(1), range(2, 3), range(3, 9), range(5, 11), range(10, 11)])
def test_a_part_of_a_run_can_be_loaded(desk: Callable[..., Desk], part: range) -> None:
    d = desk()
    wanted = d.tokens(part)
    d.save(range(11))
    into = range(20, 20 + len(part))
    assert d.load(part, into) == [True] * len(part)
    assert equal(d.tokens(into), wanted)


def test_pages_at_another_position_are_not_those_that_were_stored(
    desk: Callable[..., Desk], caplog: pytest.LogCaptureFixture
) -> None:
    d = desk("balanced")
    assert d.save(range(4), start=160) == [True] * 4
    assert d.load(range(4), range(20, 24), start=168) == [False] * 4
    assert d.counts.snapshot()["failures{decode}"] == 1 and "tokens from 160" in caplog.text


def test_positions_must_be_known_unless_nothing_is_lost(
    desk: Callable[..., Desk], caplog: pytest.LogCaptureFixture
) -> None:
    lossy, lossless = desk("balanced"), desk()
    assert lossy.save(range(4), start=None) == [False] * 4
    counts = lossy.counts.snapshot()
    assert counts == {"failures{positions}": 1, "unsaved_pages": 4} and "start: must be known" in caplog.text
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
        self.pages = PageStore(self.codec, DictStore(), names, counts=self.counts, run_pages=4)

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


def test_a_learned_profile_recognizes_what_the_engine_does_not_tell() -> None:
    part = cached(small_model()).slice(8 * PAGE, 12 * PAGE)
    told = Told(part)
    assert told.save(start=None) == [True] * 4
    counts = told.counts.snapshot()
    assert counts["recognized_pages"] == counts["saved_pages"] == 4 and "failures{positions}" not in counts
    codec = told.codec
    blob = codec.encode(KVChunk(part.keys, part.values, part.layout, 8 * PAGE, ids_of(range(8 * PAGE, 12 * PAGE))))
    back = codec.decode(blob)
    for start in (None, 8 * PAGE):
        loaded = told.load(start)
        assert loaded is not None and equal(loaded, [*back.keys, *back.values])
    assert told.load(7 * PAGE) is None
    told.pages.close()


def test_pages_whose_ids_are_not_recognized_are_stored_without() -> None:
    part = cached(small_model()).slice(8 * PAGE, 12 * PAGE)
    part.values[0][5] += 3
    told = Told(part)
    assert told.save(start=8 * PAGE) == [True] * 4
    assert "recognized_pages" not in told.counts.snapshot()
    plain = told.codec.encode(KVChunk(part.keys, part.values, part.layout, 8 * PAGE))
    back, loaded = told.codec.decode(plain), told.load(None)
    assert loaded is not None and equal(loaded, [*back.keys, *back.values])
    told.pages.close()


def test_pages_begin_at_multiples_of_their_size() -> None:
    told = Told(cached(small_model()).slice(8 * PAGE + PAGE // 2, 12 * PAGE + PAGE // 2))
    assert told.save(start=None) == [False] * 4
    assert told.counts.snapshot()["failures{positions}"] == 1
    told.pages.close()


def test_pages_whose_position_is_not_recognized_are_not_stored(caplog: pytest.LogCaptureFixture) -> None:
    part = cached(small_model(1)).slice(8 * PAGE, 12 * PAGE)  # of another model
    told = Told(part)
    assert told.save(start=None) == [False] * 4
    assert told.counts.snapshot() == {"failures{positions}": 1, "unsaved_pages": 4}
    assert "was not recognized from the keys" in caplog.text
    told.pages.close()


def test_what_is_encoded_knows_what_follows(desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch) -> None:
    d = desk()
    following: list[int] = []
    encode = Codec.encode_parts

    def noting(self: Codec, chunks: PagedChunks, **options: Any) -> Any:
        following.extend(chunks.following or [])
        return encode(self, chunks, **options)

    monkeypatch.setattr(Codec, "encode_parts", noting)
    d.save(range(10))
    assert sorted(following) == [0, 4 * PAGE, 7 * PAGE]


def test_missing_pages_are_divided_evenly() -> None:
    assert list(divided([0, 1, 2, 3, 4], 4)) == [range(2), range(2, 5)]
    assert list(divided([1, 2, 4, 9, 10, 11], 2)) == [range(1, 3), range(4, 5), range(9, 10), range(10, 12)]
    for seed in range(50):
        generator = random.Random(seed)
        missing, most = sorted(generator.sample(range(60), generator.randrange(1, 60))), generator.randrange(1, 12)
        runs = list(divided(missing, most))
        assert [number for run in runs for number in run] == missing
        assert max(map(len, runs)) <= most


# Fetched first, placed later ------------------------------------------------------------------------------------------


@pytest.fixture(params=["run by run", "in one call"])
def placing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How runs are decoded: in threads, or many in one call, as on a device."""
    if request.param == "in one call":
        monkeypatch.setattr(Codec, "on_device", lambda self, device: True)


@pytest.mark.usefixtures("placing")
def test_what_was_fetched_is_placed_layer_by_layer_without_the_store(
    desk: Callable[..., Desk], store: DictStore
) -> None:
    d = desk(secrets=SECRETS[:1])
    d.save(range(11))
    wanted = d.tokens(range(11))
    whole, part = d.pages.fetch(named(range(13)), 0), d.pages.fetch(named(range(2, 7)), None)
    assert (whole.pages, part.pages) == (11, 5) and d.counts.snapshot()["missed_pages"] == 2
    store.entries.clear()
    begun: list[range] = []

    def done(layers: range) -> None:
        begun.append(layers)
        now = d.tokens(range(20, 31))
        for layer in range(3):
            there = layer < layers.stop
            assert torch.equal(now[layer], wanted[layer]) == torch.equal(now[3 + layer], wanted[3 + layer]) == there

    assert d.pages.place(d.cache, [(whole, d.at(range(20, 31))), (part.first(3), d.at(range(31, 34)))], done)
    assert begun == [range(1), range(1, 2), range(2, 3)]
    assert equal(d.tokens(range(31, 34)), [each[2 * PAGE : 5 * PAGE] for each in wanted])
    assert d.counts.snapshot()["loaded_pages"] == 14
    with pytest.raises(InputError, match="slots: must be 8 for each of 5 pages, got 24"):
        d.pages.place(d.cache, [(part, d.at(range(3)))], done)
    with pytest.raises(InputError, match="slots: must be 0"):
        d.pages.place(d.cache, [(part.first(1), torch.full((PAGE,), PAGES * PAGE))], done)
    d.pages.close()
    assert not d.pages.place(d.cache, [(part.first(1), d.at(range(1)))], done)
    assert d.pages.fetch(named(range(2)), 0).pages == 0


def test_layers_that_were_coded_together_are_placed_together() -> None:
    part = cached(small_model()).slice(0, 4 * PAGE)
    told = Told(part)
    assert told.save(start=0) == [True] * 4
    cache = PagedCache.empty(part.layout, 4 * PAGE, range(3), torch.device("cpu"))
    runs: list[range] = []
    assert told.pages.place(cache, [(told.pages.fetch(named(range(4)), None), torch.arange(4 * PAGE))], runs.append)
    assert runs == [range(2), range(2, 3)], "the profile's group is heads:2"
    placed, loaded = cache.chunk(None, 0), told.load(None)
    assert loaded is not None and equal([*placed.keys, *placed.values], loaded)
    told.pages.close()


def test_damage_is_found_when_it_is_fetched(desk: Callable[..., Desk], store: DictStore) -> None:
    """In any section, because a load may not fail halfway. The run can be stored again."""
    d = desk()
    d.save(range(8))
    key = d.run_key(range(4, 8))
    whole = store.entries[key]
    for at in range(len(whole) - 1, 200, -(len(whole) // 9)):
        data = bytearray(whole)
        data[at] ^= 4
        store.entries[key] = bytes(data)
        assert d.pages.fetch(named(range(8)), 0).pages == 4
        assert key not in store.entries and d.save(range(8)) == [True] * 8


def test_damage_that_cannot_be_deleted_does_not_hold_a_lookup(desk: Callable[..., Desk], store: DictStore) -> None:
    d = desk(lookup_timeout=0.3)
    d.save(range(4))
    key = d.run_key(range(4))
    store.entries[key] = store.entries[key][:-1]
    go = hold(store, "delete")
    try:
        assert d.pages.fetch(named(range(4)), 0).pages == 0
    finally:
        go.set()
    counts = d.counts.snapshot()
    assert counts["failures{decode}"] == counts["failures{store}"] == 1


@pytest.mark.usefixtures("placing")
def test_damage_behind_right_checksums_is_found_when_it_is_placed(
    desk: Callable[..., Desk], store: DictStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    d = desk()
    d.save(range(12))
    key = d.run_key(range(4, 8))
    data = bytearray(store.entries[key])
    data[-9] ^= 4
    store.entries[key] = bytes(data)
    monkeypatch.setattr(Codec, "verify", lambda self, opened: None)
    fetched = d.pages.fetch(named(range(12)), 0)
    done: list[range] = []
    assert fetched.pages == 12 and not d.pages.place(d.cache, [(fetched, d.at(range(20, 32)))], done.append)
    assert done == [range(1), range(1, 2)], "the last layer is damaged"
    assert key not in store.entries and d.run_key(range(8, 12)) in store.entries, "only that run is discarded"
    assert d.counts.snapshot()["failures{decode}"] == 1 and "loaded_pages" not in d.counts.snapshot()


def test_fetching_takes_no_longer_than_a_lookup(
    desk: Callable[..., Desk], store: DictStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it together: the index entries, and every slice of runs."""
    d = desk(run_pages=2, lookup_timeout=0.5)
    d.save(range(40))
    waited: list[float] = []
    result = Future.result

    def noting(self: Future[Any], timeout: float | None = None) -> Any:
        waited.extend([] if timeout is None else [timeout])
        return result(self, timeout)

    monkeypatch.setattr(Future, "result", noting)
    asked = iter(range(1000))

    def slowly(operation: str) -> None:
        if operation == "get" and next(asked) > 48:  # behind the index entries and some runs
            go.wait(30)

    go = threading.Event()
    store.before = slowly
    try:
        assert d.pages.fetch(named(range(40)), 0).pages < 40
    finally:
        go.set()
    assert len(waited) >= 2 and waited == sorted(waited, reverse=True) and waited[0] <= 0.5


# Stores that forget ---------------------------------------------------------------------------------------------------


def test_pages_behind_a_missing_one_are_not_loaded(desk: Callable[..., Desk], store: DictStore) -> None:
    d = desk()
    d.save(range(8))
    del store.entries[d.run_key(range(4))]
    assert d.load(range(8), range(20, 28)) == [False] * 8
    d = desk()
    d.save(range(8))
    del store.entries[d.index_key(2)]
    assert desk().load(range(8), range(20, 28)) == [True] * 2 + [False] * 6


def test_a_page_is_found_in_the_run_that_replaced_its_first(desk: Callable[..., Desk], store: DictStore) -> None:
    reader, writer = desk(), desk()
    writer.save(range(4))
    del store.entries[reader.run_key(range(4))]
    desk().save(range(2))
    desk().save(range(2, 6))
    wanted = reader.tokens(range(6))
    assert reader.pages.stored(named(range(6))) == [True] * 6 == reader.load(range(6), range(20, 26))
    assert equal(reader.tokens(range(20, 26)), wanted)


@pytest.mark.parametrize("run_pages", [1, 4])
@pytest.mark.parametrize("secrets", [(), SECRETS])
def test_single_pages_are_deleted(
    desk: Callable[..., Desk], store: DictStore, run_pages: int, secrets: Sequence[bytes]
) -> None:
    d = desk(run_pages=run_pages, secrets=secrets)
    d.save(range(4))
    before = len(store.entries)
    assert d.pages.delete(named(range(1, 3))) == [True, True]
    assert len(store.entries) == before - 2
    assert d.pages.stored(named(range(4))) == [True, False, False, True]
    assert d.pages.delete([b"never stored"]) == [True]
    (desk(run_pages=run_pages, secrets=secrets[1:]) if secrets else d).save(range(4, 6))
    assert d.pages.stored(named(range(4, 6))) == [True, True]
    d.pages.delete(named(range(4, 6)))
    assert d.pages.stored(named(range(4, 6))) == [False, False], "also if signed with an earlier secret"
    d.save(range(1, 3))
    assert d.pages.stored(named(range(4))) == [True] * 4


def test_pages_that_may_still_be_there_are_not_deleted(desk: Callable[..., Desk], store: DictStore) -> None:
    d = desk(run_pages=1)
    d.save(range(2))

    def fail(operation: str) -> None:
        raise StoreError("gone")

    store.before = fail
    assert d.pages.delete(named(range(2))) == [False, False] and d.counts.snapshot()["failures{store}"] == 2
    store.before = lambda operation: None
    d.pages.close()
    assert d.pages.delete(named(range(2))) == [False, False] and len(store.entries) == 2


# Stores that fail -----------------------------------------------------------------------------------------------------


def test_a_store_that_hangs_is_given_up_and_told_so(desk: Callable[..., Desk], store: DictStore) -> None:
    desk().save(range(8))
    d, go, late = desk(lookup_timeout=0.5, load_timeout=0.5), threading.Event(), []
    store.report_overdue = lambda operation, seconds: late.append(operation)  # type: ignore[method-assign]

    def hang(hanging: str) -> Callable[[str], None]:
        def before(operation: str) -> None:
            if operation == hanging:
                go.wait(30)

        return before

    try:
        store.before = hang("contains")
        assert d.pages.stored(named(range(4))) == [False] * 4 and late == ["contains"]
        store.before = hang("get")
        assert d.load(range(4), range(20, 24)) == [False] * 4 and late[-1] == "get_many"
        store.before = hang("put")
        assert d.save(range(20, 24)) == [False] * 4 and late[-1] == "put"
    finally:
        go.set()
    assert d.counts.snapshot()["failures{store}"] == 1


def test_a_save_waits_once_for_a_store_that_hangs(
    desk: Callable[..., Desk], store: DictStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not once per entry: its engine may wait for it."""
    waited: list[float] = []
    d, result = desk(run_pages=1, load_timeout=0.2), Future.result

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
    assert 0 < sum(waited) <= 0.2, "each of them was waited for in vain"
    assert len(waited) == 8, "and the pages after the first eight were not even coded"
    assert d.counts.snapshot()["unsaved_pages"] == 20


@pytest.mark.parametrize("kept", [0, 1, 3])
def test_a_store_that_takes_no_more_leaves_no_page_that_is_not_there(
    desk: Callable[..., Desk], store: DictStore, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    d, put, left = desk(threads=1), DictStore.put, [kept]

    def full(self: DictStore, key: str, blob: bytes) -> bool:
        left[0] -= 1
        return left[0] >= 0 and put(self, key, blob)

    monkeypatch.setattr(DictStore, "put", full)
    assert d.save(range(4)) == [False] * 4 and d.counts.snapshot()["failures{store}"] == 1
    monkeypatch.setattr(DictStore, "put", put)
    there = desk().pages.stored(named(range(4)))
    assert there == [True] * max(kept - 1, 0) + [False] * (5 - max(kept, 1))
    assert d.save(range(4)) == [True] * 4 == desk().load(range(4), range(20, 24))


def test_a_page_that_cannot_be_coded_costs_its_run(desk: Callable[..., Desk]) -> None:
    d = desk("balanced")
    d.keys[1].view(-1, 2, 16)[d.at(range(5, 6))[3]] = torch.nan
    assert d.save(range(12)) == [True] * 4 + [False] * 4 + [True] * 4
    failures = {name: count for name, count in d.counts.snapshot().items() if name.startswith("failures")}
    assert failures == {"failures{encode}": 1}


@pytest.mark.parametrize("direction", ["save", "load"])
def test_the_memory_is_left_alone_once_a_call_has_ended(
    desk: Callable[..., Desk], direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even one that ends in an error, because the engine gives its pages to somebody else then."""
    d, begun, busy = desk(), threading.Event(), []
    d.save(range(8))
    method = "encode_parts" if direction == "save" else "decode_paged"
    code, submit = getattr(Codec, method), ThreadPool.submit

    def slowly(self: Codec, *arguments: Any, **options: Any) -> Any:
        busy.append(1)
        begun.set()
        time.sleep(0.3)
        result = code(self, *arguments, **options)
        busy.pop()
        return result

    def refuse(self: ThreadPool, work: Callable[..., Any], *arguments: Any) -> Any:
        touches_pages = getattr(getattr(work, "func", None), "__name__", "") in ("_encode", "_place")
        if touches_pages and begun.is_set():
            raise RuntimeError("no thread can be started")
        future = submit(self, work, *arguments)
        if touches_pages:
            assert begun.wait(30)
        return future

    monkeypatch.setattr(Codec, method, slowly)
    monkeypatch.setattr(ThreadPool, "submit", refuse)
    with pytest.raises(RuntimeError, match="no thread"):
        d.save(range(8, 16)) if direction == "save" else d.load(range(8), range(20, 28))
    assert begun.is_set() and not busy
    monkeypatch.setattr(ThreadPool, "submit", submit)


def test_slots_of_another_number_are_refused(desk: Callable[..., Desk]) -> None:
    d = desk()
    for method in (d.pages.save, d.pages.load):
        with pytest.raises(InputError, match="slots: must be 8 for each of 2 pages, got 24"):
            method(d.cache, d.at(range(3)), named(range(2)), 0)
    with pytest.raises(InputError, match="name: must be"):
        d.pages.stored([b""])
    with pytest.raises(InputError, match="run_pages: must be 1"):
        desk(run_pages=0)
    with pytest.raises(InputError, match="run_pages: must be 1"):
        desk(run_pages=MAX_RUN_PAGES + 1)


# Stores that lie ------------------------------------------------------------------------------------------------------


def test_entries_are_parsed_as_they_were_made() -> None:
    place, pages = Place(bytes(range(32)), 4095), [bytes([number]) * 32 for number in range(3)]
    assert parse_index_entry(make_index_entry(place)) == place
    back, blob = parse_run_entry(make_run_entry(pages, b"blob"))
    assert back == pages and bytes(blob) == b"blob"
    for many in ([], [bytes(32)] * (MAX_RUN_PAGES + 1)):
        with pytest.raises(InputError, match="pages: must be"):
            make_run_entry(many, b"blob")


@pytest.mark.parametrize(
    "data",
    [
        b"", b"cuvI", make_index_entry(Place(bytes(32), 1))[:-1], make_index_entry(Place(bytes(32), 1)) + b"x",
        b"cuvR" + make_index_entry(Place(bytes(32), 1))[4:], b"cuvI\x02" + make_index_entry(Place(bytes(32), 1))[5:],
        b"cuvI\x01\x01" + make_index_entry(Place(bytes(32), 1))[6:], make_index_entry(Place(bytes(32), MAX_RUN_PAGES)),
    ],
)  # fmt: skip
def test_a_damaged_index_entry_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptError, match="index entry: must"):
        parse_index_entry(data)


@pytest.mark.parametrize(
    "data",
    [
        b"", b"cuvR\x01\x00", b"cuvR\x01\x00\x00\x00blob", b"cuvR\x01\x00\x01\x00" + bytes(32),
        b"cuvR\x01\x00\x02\x00" + bytes(63), b"cuvI\x01\x00\x01\x00" + bytes(40), b"cuvR\x02\x00\x01\x00" + bytes(40),
        b"cuvR\x01\x00\xff\xff" + bytes(32 * 65535 + 1),
    ],
)  # fmt: skip
def test_a_damaged_run_entry_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptError, match="run entry: must"):
        parse_run_entry(data)


def test_an_index_entry_cannot_lead_to_another_page(desk: Callable[..., Desk], store: DictStore) -> None:
    """Checked without a key, where only digests stand between a page and another."""
    d = desk()
    d.save(range(8))
    page_2 = d.index_key(2)
    for lie in (store.entries[d.index_key(1)], store.entries[d.index_key(6)]):
        store.entries[page_2] = lie
        assert desk().load(range(2, 4), range(20, 22)) == [False] * 2
        d.save(range(8))
        desk().save(range(8))  # whatever was deleted as false


def test_a_run_entry_must_list_its_own_pages(desk: Callable[..., Desk], store: DictStore) -> None:
    d = desk()
    d.save(range(8))
    first, second = d.run_key(range(4)), d.run_key(range(4, 8))
    pages, _ = parse_run_entry(store.entries[first])
    _, blob = parse_run_entry(store.entries[second])
    swapped = [*pages[:2], pages[3], pages[2]]
    store.entries[first] = make_run_entry(swapped, bytes(parse_run_entry(store.entries[first])[1]))
    assert desk().load(range(2), range(20, 22)) == [False] * 2, "of a run of another order"
    d.save(range(4))
    store.entries[first] = store.entries[second]
    assert desk().load(range(4), range(20, 24)) == [False] * 4
    assert first not in store.entries and d.index_key(0) not in store.entries, "what never decodes is deleted"
    assert d.save(range(4)) == [True] * 4
    assert d.load(range(4), range(20, 24)) == [True] * 4
    store.entries[first] = make_run_entry(pages, bytes(blob))  # needs a key to be noticed
    assert desk().load(range(4), range(20, 24)) == [True] * 4


def test_with_a_key_a_run_cannot_get_the_blob_of_another(desk: Callable[..., Desk], store: DictStore) -> None:
    d = desk(secrets=SECRETS[:1])
    d.save(range(8))
    first, second = d.run_key(range(4)), d.run_key(range(4, 8))
    pages, blob = parse_run_entry(store.entries[first])
    _, other = parse_run_entry(store.entries[second])
    store.entries[first] = make_run_entry(pages, bytes(other))
    assert desk(secrets=SECRETS[:1]).load(range(4), range(20, 24)) == [False] * 4
    # Nor can a run of other pages carry it, whatever its index entries say.
    forged = d.names.run([pages[1], pages[0]])
    store.entries[d.key(forged)] = make_run_entry([pages[1], pages[0]], bytes(blob))
    for position, number in enumerate((1, 0)):
        store.entries[d.index_key(number)] = make_index_entry(Place(forged, position))
    assert desk(secrets=SECRETS[:1]).load(range(2), range(20, 22)) == [False] * 2


def test_tags_are_bound_to_tenant_digest_and_rank() -> None:
    keys, digest = EntryKeys([bytes(8)]), bytes(32)
    bound = keys.bound_to("tenant", digest)
    others = [keys.bound_to("other", digest), keys.bound_to("tenant", bytes([1] * 32))]
    assert bound and bound not in [*others, EntryKeys([bytes(8)], 1).bound_to("tenant", digest)]
    assert EntryKeys([bytes([1] * 8), bytes(8)]).bound_to("tenant", digest) == bound, "under any secret"
    assert EntryKeys([]).bound_to("tenant", digest) == b""
