"""The worker's side on real pages, a real codec and a store that can be made to fail."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.integrations.stores.dict_store import DictStore

from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.identity import store_key, tenant_id
from cuvee.codec.layout import KVLayout, LayerLayout, Rope
from cuvee.codec.paged import PagedCache
from cuvee.codec.profile import Profile
from cuvee.integrations.stores import StoreError
from cuvee.integrations.stores.guard import GuardedStore
from cuvee.integrations.stores.tiered import TieredStore
from cuvee.integrations.vllm.config import Options
from cuvee.integrations.vllm.messages import Load, Report, Save
from cuvee.integrations.vllm.metrics import Recorder
from cuvee.integrations.vllm.setup import Setup
from cuvee.integrations.vllm.worker import WorkerSide

BLOCK, CHUNK, BLOCKS = 8, 16, 24
LAYOUT = KVLayout("synthetic", (LayerLayout(2, 16, 16, Rope((1.0,) * 8)),) * 3, "bfloat16", 4096)
TENANT = "somebody"


def _pages(layout: KVLayout) -> PagedCache:
    """Pages of NaN: whatever is not restored shows."""

    def page(heads: int, size: int) -> torch.Tensor:
        return torch.full((BLOCKS, BLOCK, heads, size), torch.nan, dtype=layout.torch_dtype)

    return PagedCache(
        layout,
        [page(layer.kv_heads, layer.head_dim) for layer in layout.layers],
        [page(layer.kv_heads, layer.value_dim) for layer in layout.layers],
    )


class Bench:
    """A worker, its store, its pages, and a sequence of 8 chunks."""

    def __init__(
        self,
        rank: int = 0,
        codec: dict[str, Any] | None = None,
        store: DictStore | None = None,
        sequence: KVChunk | None = None,
        **options: Any,
    ) -> None:
        self.options = Options.from_dict({"chunk_tokens": CHUNK, "quality": "lossless", **options})
        profile = Profile.generic(LAYOUT)
        self.setup = Setup(self.options, LAYOUT, profile, "lossless", BLOCK, 1, True, True, True)
        self.store = store or DictStore()
        self.recorder = Recorder()
        self.codec = Codec(profile, **{"quality": "lossless", **(codec or {})})
        self.worker = WorkerSide(self.setup, rank, self.codec, self.store, self.recorder)
        self.cache = _pages(LAYOUT)
        self.worker.attach(self.cache)
        noise = torch.randn(2, 3, 8 * CHUNK, 2, 16).bfloat16()
        self.sequence = sequence or KVChunk(noise[0], noise[1], LAYOUT)
        self.digests = [bytes([index]) * 32 for index in range(8)]
        self.rank = rank

    def key(self, chunk: int) -> str:
        return store_key(TENANT, self.digests[chunk], self.rank, *self.codec.key_ids[:1])

    def fill(self, blocks: list[int], tokens: int) -> None:
        """The engine computes the sequence's first tokens into `blocks`."""
        self.cache.write(
            [keys[:tokens] for keys in self.sequence.keys],
            [values[:tokens] for values in self.sequence.values],
            _slots(blocks, 0, tokens),
        )

    def saves(self, blocks: list[int], chunks: range) -> list[Save]:
        per_chunk = CHUNK // BLOCK
        return [Save(TENANT, self.digests[c], c, blocks[c * per_chunk : (c + 1) * per_chunk]) for c in chunks]

    def store_all(self, chunks: int = 8) -> None:
        blocks = list(range(2 * chunks))
        self.fill(blocks, chunks * CHUNK)
        self.worker.save(self.saves(blocks, range(chunks)))
        self.drain()
        for tensor in self.cache.keys + self.cache.values:
            tensor.fill_(torch.nan)

    def drain(self) -> None:
        """Wait until nothing is being stored."""
        for future in list(self.worker._saving.values()):
            future.result(30)

    def load(self, blocks: list[int], start: int, end: int, request: str = "r") -> Load:
        first = start // CHUNK
        return Load(request, TENANT, self.digests[first : end // CHUNK], first, start, end, blocks)

    def wait(self, *requests: str) -> None:
        """Poll as the engine does until the loads have arrived."""
        missing = set(requests or ("r",))
        pause = threading.Event()
        for _ in range(3000):
            missing -= self.worker.take_arrived()
            if not missing:
                return
            pause.wait(0.01)
        raise AssertionError(f"{missing} never arrived")

    def held(self, blocks: list[int], start: int, end: int, first: int = 0) -> bool:
        """Whether the pages hold tokens `start … end` of the sequence; `blocks` begin at token `first`."""
        chunk = self.cache.read(_slots(blocks, start - first, end - first), start)
        return _same(chunk, self.sequence, start, end)

    def counts(self) -> dict[str, Any]:
        return _flat(self.recorder)


def _slots(blocks: list[int], start: int, end: int) -> torch.Tensor:
    tokens = torch.arange(start, end)
    return torch.tensor(blocks)[tokens // BLOCK] * BLOCK + tokens % BLOCK


def _same(chunk: KVChunk, sequence: KVChunk, start: int, end: int) -> bool:
    return all(
        torch.equal(mine, theirs[start:end])
        for mine, theirs in zip(chunk.keys + chunk.values, sequence.keys + sequence.values, strict=True)
    )


def _flat(recorder: Recorder) -> dict[str, float]:
    return {name + f"{{{label}}}" * bool(label): value for (name, label), value in recorder.totals().items()}


@pytest.fixture
def bench() -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(**options: Any) -> Bench:
        made.append(Bench(**options))
        return made[-1]

    yield make
    for each in made:
        each.store.before = lambda operation: None
        each.worker.close()


def test_what_is_saved_comes_back_in_other_blocks(bench: Callable[..., Bench]) -> None:
    b = bench()
    b.store_all()
    assert set(b.store.entries) == {b.key(chunk) for chunk in range(8)}
    blocks = [20, 3, 17, 4, 9, 22]
    b.worker.start_loads([b.load(blocks, 0, 3 * CHUNK)], synchronous=False)
    b.wait()
    assert b.held(blocks, 0, 3 * CHUNK)
    assert not b.worker.take_invalid_blocks()
    report = b.worker.report(1)
    assert [tokens for tokens, _ in report.loaded] == [3 * CHUNK] and not report.failed


@pytest.mark.parametrize("asked", [False, True])
def test_what_tenants_store_and_load_is_counted_where_it_is_asked_for(bench: Callable[..., Bench], asked: bool) -> None:
    b = bench(tenant_metrics=True) if asked else bench()
    b.store_all(3)
    b.worker.start_loads([b.load(list(range(10, 16)), 0, 3 * CHUNK)], synchronous=True)
    counts = {name: value for name, value in b.counts().items() if name.startswith("tenant_")}
    name = tenant_id(TENANT)
    assert TENANT not in name
    if asked:
        stored, tokens = b.counts()["stored_bytes"], 3 * CHUNK
        assert counts == {f"tenant_stored_bytes{{{name}}}": stored, f"tenant_loaded_tokens{{{name}}}": tokens}
    else:
        assert counts == {}


def test_a_load_leaves_tokens_before_its_start_alone(bench: Callable[..., Bench]) -> None:
    b = bench()
    b.store_all()
    blocks = [5, 6, 7, 8]
    b.worker.start_loads([b.load(blocks, CHUNK + BLOCK, 3 * CHUNK)], synchronous=True)
    assert b.held(blocks, CHUNK + BLOCK, 3 * CHUNK, first=CHUNK)
    assert b.cache.keys[0][5].isnan().all(), "block 5 belongs to tokens the engine has already"
    touched = {block for block in range(BLOCKS) if not b.cache.keys[0][block].isnan().all()}
    assert touched == {6, 7, 8}


def test_a_synchronous_load_is_done_on_return(bench: Callable[..., Bench]) -> None:
    b = bench()
    b.store_all()
    b.worker.start_loads([b.load([1, 2], 0, CHUNK)], synchronous=True)
    assert b.held([1, 2], 0, CHUNK)
    assert b.worker.take_arrived() == {"r"}


def test_an_idle_engine_is_woken_by_a_load_that_is_over(bench: Callable[..., Bench]) -> None:
    b = bench()
    b.store_all()
    go = threading.Event()
    b.store.before = lambda operation: _wait(go) if operation == "get" else None
    b.worker.start_loads([b.load([1, 2], 0, CHUNK)], synchronous=False)
    assert b.worker.take_arrived() == set(), "without patience it is only a question"
    assert b.worker.take_arrived(0.01) == set(), "patience ends"
    found: list[set[str]] = []
    asking = threading.Thread(target=lambda: found.append(b.worker.take_arrived(3600.0)), daemon=True)
    asking.start()
    asking.join(0.2)
    assert not found
    go.set()
    asking.join(30)
    assert found == [{"r"}]
    # Nothing is under way any more: there is nothing to wait for.
    assert b.worker.take_arrived(3600.0) == set()


def test_a_chunk_that_is_being_stored_is_not_stored_again(bench: Callable[..., Bench]) -> None:
    b = bench()
    go = threading.Event()
    b.store.before = lambda operation: _wait(go)
    b.fill([0, 1], CHUNK)
    for _ in range(3):
        b.worker.save(b.saves([0, 1], range(1)))
    go.set()
    b.drain()
    assert b.store.calls == ["contains", "put"]


def test_a_store_that_hangs_while_it_deletes_keeps_nobody_waiting(bench: Callable[..., Bench]) -> None:
    b = bench(load_timeout=0.2)
    b.store_all()
    b.store.entries[b.key(1)] = b"garbage"
    go = threading.Event()
    b.store.before = lambda operation: _wait(go) if operation == "delete" else None
    b.worker.start_loads([b.load([10, 11, 12, 13], 0, 2 * CHUNK)], synchronous=True)
    assert b.worker.take_invalid_blocks() == {12, 13}
    go.set()


def test_a_store_that_fails_while_it_deletes_ends_the_load(bench: Callable[..., Bench]) -> None:
    b = bench()
    b.store_all()
    b.store.entries[b.key(0)] = b"garbage"

    def broken(operation: str) -> None:
        if operation == "delete":
            raise RuntimeError("a bug")

    b.store.before = broken
    b.worker.start_loads([b.load([10, 11], 0, CHUNK)], synchronous=False)
    b.wait()
    assert b.worker.take_invalid_blocks() == {10, 11}


def test_pages_may_be_overwritten_as_soon_as_save_returns(bench: Callable[..., Bench]) -> None:
    b = bench()
    go = threading.Event()
    b.store.before = lambda operation: None if operation != "contains" else _wait(go)
    b.fill([0, 1], CHUNK)
    b.worker.save(b.saves([0, 1], range(1)))
    for tensor in b.cache.keys + b.cache.values:
        tensor.zero_()
    go.set()
    b.drain()
    b.worker.start_loads([b.load([4, 5], 0, CHUNK)], synchronous=True)
    assert b.held([4, 5], 0, CHUNK)


def _wait(event: threading.Event) -> None:
    assert event.wait(30)


def test_an_entry_that_is_gone_invalidates_the_rest(bench: Callable[..., Bench]) -> None:
    b = bench()
    b.store_all()
    del b.store.entries[b.key(2)]
    blocks = [10, 11, 12, 13, 14, 15, 16, 17]
    b.worker.start_loads([b.load(blocks, 0, 4 * CHUNK)], synchronous=False)
    b.wait()
    assert b.worker.take_invalid_blocks() == {14, 15, 16, 17}
    assert b.held(blocks, 0, 2 * CHUNK)
    report = b.worker.report(1)
    assert report.failed == {"r"} and report.loaded == []
    assert report.unsaved == set(b.digests[2:4]), "they are to be stored again"
    assert b.counts()["recomputed_tokens"] == 2 * CHUNK


@pytest.mark.parametrize("damage", ["header", "section", "short", "empty"])
def test_a_damaged_entry_is_deleted_and_those_before_it_kept(bench: Callable[..., Bench], damage: str) -> None:
    b = bench()
    b.store_all()
    blob = b.store.entries[b.key(1)]
    b.store.entries[b.key(1)] = {
        "header": blob[:9] + bytes([blob[9] ^ 1]) + blob[10:],
        "section": blob[:-9] + bytes([blob[-9] ^ 1]) + blob[-8:],
        "short": blob[: len(blob) // 2],
        "empty": b"",
    }[damage]
    blocks = [10, 11, 12, 13, 14, 15]
    b.worker.start_loads([b.load(blocks, 0, 3 * CHUNK)], synchronous=True)
    assert b.worker.take_invalid_blocks() == {12, 13, 14, 15}
    assert b.held(blocks, 0, CHUNK)
    assert b.key(1) not in b.store.entries, "it would fail for ever"
    assert b.key(0) in b.store.entries and b.key(2) in b.store.entries


def test_an_entry_of_other_tokens_is_not_believed(bench: Callable[..., Bench]) -> None:
    b = bench()
    b.store_all()
    b.store.entries[b.key(1)] = b.store.entries[b.key(2)]
    b.worker.start_loads([b.load([10, 11, 12, 13], 0, 2 * CHUNK)], synchronous=True)
    assert b.worker.take_invalid_blocks() == {12, 13}
    assert b.key(1) not in b.store.entries


OLD, NEW = b"an old secret, 16+", b"a new secret, 16+"


@pytest.mark.parametrize("place", ["tenant", "digest", "rank"])
def test_a_tagged_entry_does_not_decode_in_anothers_place(bench: Callable[..., Bench], place: str) -> None:
    """Who can write to the store and send a prompt has a blob with a good tag: the server signs that of the prompt."""
    b = bench(codec={"key": OLD})
    b.store_all(1)
    attacker, digest, rank = {
        "tenant": ("attacker", b.digests[0], 0),
        "digest": (TENANT, b.digests[5], 0),  # another prefix, model or adapter: they are all in the digest
        "rank": (TENANT, b.digests[0], 1),
    }[place]
    chunk = b.sequence.slice(CHUNK, 2 * CHUNK)
    foreign = b.codec.encode(
        KVChunk(chunk.keys, chunk.values, LAYOUT), associated=store_key(attacker, digest, rank).encode()
    )
    b.store.entries[b.key(0)] = foreign
    b.worker.start_loads([b.load([10, 11], 0, CHUNK)], synchronous=True)
    assert b.worker.take_invalid_blocks() == {10, 11}
    assert b.cache.keys[0][10].isnan().all(), "nothing of it reached the pages"
    assert b.key(0) not in b.store.entries, "it would fail for ever"


@pytest.mark.parametrize("key", [NEW, None])
def test_an_entry_under_our_key_without_our_tag_is_deleted(bench: Callable[..., Bench], key: bytes | None) -> None:
    """Nobody else writes under keys that end in the id of our secret: it is no other replica's work."""
    b = bench(codec={"key": OLD})
    b.store_all(1)
    chunk, place = b.sequence.slice(0, CHUNK), store_key(TENANT, b.digests[0], 0).encode()
    b.store.entries[b.key(0)] = Codec(Profile.generic(LAYOUT), "lossless", key=key).encode(
        chunk, associated=place if key else b""
    )
    b.worker.start_loads([b.load([10, 11], 0, CHUNK)], synchronous=True)
    assert b.worker.take_invalid_blocks() == {10, 11} and b.store.entries == {}


@pytest.mark.parametrize("other", [{"quality": None, "step": 0.1}, {"quality": "high"}])
def test_an_entry_of_another_quality_is_not_believed(bench: Callable[..., Bench], other: dict[str, Any]) -> None:
    b = bench()
    b.store_all(1)
    (lossy,) = [Codec(Profile.generic(LAYOUT), **other).encode(b.sequence.slice(0, CHUNK))]
    b.store.entries[b.key(0)] = lossy
    b.worker.start_loads([b.load([10, 11], 0, CHUNK)], synchronous=True)
    assert b.worker.take_invalid_blocks() == {10, 11}
    assert b.key(0) not in b.store.entries


@pytest.mark.parametrize("key", [NEW, OLD + b"\n", None])
def test_replicas_with_other_secrets_leave_each_others_entries_alone(
    bench: Callable[..., Bench], key: bytes | None
) -> None:
    first = bench(codec={"key": OLD})
    first.store_all(2)
    second = bench(codec={"key": key}, store=first.store, sequence=first.sequence)
    assert not set(map(first.key, range(2))) & set(map(second.key, range(2)))
    second.worker.start_loads([second.load([10, 11, 12, 13], 0, 2 * CHUNK)], synchronous=True)
    assert second.worker.take_invalid_blocks() == {10, 11, 12, 13}, "misses"
    assert set(first.store.entries) == set(map(first.key, range(2))) and "delete" not in first.store.calls
    second.store_all(2)
    assert len(first.store.entries) == 4, "it keeps its own beside them"
    for b in (first, second):
        b.worker.start_loads([b.load([10, 11, 12, 13], 0, 2 * CHUNK)], synchronous=True)
        assert b.held([10, 11, 12, 13], 0, 2 * CHUNK)


def test_while_secrets_are_replaced_entries_of_both_are_found(bench: Callable[..., Bench]) -> None:
    old = bench(codec={"key": OLD})
    old.store_all(3)
    del old.store.entries[old.key(1)]
    both = bench(codec={"key": [NEW, OLD]}, store=old.store, sequence=old.sequence)
    both.fill([0, 1, 2, 3], 2 * CHUNK)
    both.worker.save(both.saves([0, 1, 2, 3], range(1, 2)))
    both.drain()
    assert both.key(1) in both.store.entries and old.key(1) not in both.store.entries, "written with the first"
    blocks = [10, 11, 12, 13, 14, 15]
    both.worker.start_loads([both.load(blocks, 0, 3 * CHUNK)], synchronous=True)
    assert both.held(blocks, 0, 3 * CHUNK)
    new = bench(codec={"key": NEW}, store=old.store, sequence=old.sequence)
    new.worker.start_loads([new.load(blocks, 0, 3 * CHUNK)], synchronous=True)
    assert new.worker.take_invalid_blocks() == set(blocks), "the first chunk is there with the old secret only"
    assert old.key(0) in old.store.entries


def test_a_damaged_entry_of_an_old_secret_is_deleted_under_its_own_key(bench: Callable[..., Bench]) -> None:
    old = bench(codec={"key": OLD})
    old.store_all(1)
    old.store.entries[old.key(0)] = old.store.entries[old.key(0)][:-1] + b"?"
    both = bench(codec={"key": [NEW, OLD]}, store=old.store, sequence=old.sequence)
    both.worker.start_loads([both.load([10, 11], 0, CHUNK)], synchronous=True)
    assert both.worker.take_invalid_blocks() == {10, 11}
    assert old.store.entries == {}


def test_a_lack_of_memory_deletes_no_entry(bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is ours and passes; the entry is sound."""
    b = bench()
    b.store_all(1)

    def none_left(*_: object) -> None:
        raise MemoryError("none left")

    with monkeypatch.context() as patch:
        patch.setattr("cuvee.codec.codec._outputs", none_left)
        b.worker.start_loads([b.load([10, 11], 0, CHUNK)], synchronous=True)
    assert b.worker.take_invalid_blocks() == {10, 11} and b.key(0) in b.store.entries
    b.worker.start_loads([b.load([10, 11], 0, CHUNK)], synchronous=True)
    assert b.held([10, 11], 0, CHUNK)


def test_a_store_that_fails_costs_a_recompute(bench: Callable[..., Bench]) -> None:
    b = bench()
    b.store_all()

    def down(operation: str) -> None:
        if operation == "get":
            raise StoreError("the store is down")

    b.store.before = down
    b.worker.start_loads([b.load([1, 2], 0, CHUNK)], synchronous=False)
    b.wait()
    assert b.worker.take_invalid_blocks() == {1, 2}
    assert b.key(0) in b.store.entries


def test_an_unexpected_error_costs_a_recompute(bench: Callable[..., Bench]) -> None:
    b = bench()
    b.store_all()

    def broken(operation: str) -> None:
        if operation == "get":
            raise RuntimeError("a bug")

    b.store.before = broken
    b.worker.start_loads([b.load([1, 2], 0, CHUNK)], synchronous=True)
    assert b.worker.take_invalid_blocks() == {1, 2}


@pytest.mark.parametrize("wait", [True, False])
def test_a_store_that_hangs_is_given_up_and_never_writes_afterwards(bench: Callable[..., Bench], wait: bool) -> None:
    b = bench(load_timeout=0.2)
    b.store_all()
    go = threading.Event()
    b.store.before = lambda operation: _wait(go) if operation == "get" else None
    b.worker.start_loads([b.load([1, 2], 0, CHUNK)], synchronous=wait)
    b.wait()
    assert b.worker.take_invalid_blocks() == {1, 2}
    assert b.worker.report(1).failed == {"r"}
    go.set()
    assert b.worker._loaders.dismiss(30)
    assert b.cache.keys[0][1].isnan().all(), "the blocks are the engine's again"
    assert b.worker.take_arrived() == set() and b.worker.take_invalid_blocks() == set()
    assert b.counts()["failures{timeout}"] == 1


def test_a_load_that_never_got_a_thread_is_given_up(bench: Callable[..., Bench]) -> None:
    b = bench(load_timeout=0.2, threads=1)
    b.store_all()
    go = threading.Event()
    b.store.before = lambda operation: _wait(go) if operation == "get" else None
    b.worker.start_loads([b.load([1, 2], 0, CHUNK, "a"), b.load([3, 4], 0, CHUNK, "b")], synchronous=False)
    b.wait("a", "b")
    go.set()
    assert b.worker._loaders.dismiss(30)
    assert b.cache.keys[0][3].isnan().all()
    assert b.worker.report(1).failed == {"a", "b"}


def test_a_failed_put_is_counted_and_reported(bench: Callable[..., Bench]) -> None:
    b = bench()

    def full(operation: str) -> None:
        if operation == "put":
            raise StoreError("no space left")

    b.store.before = full
    b.fill([0, 1], CHUNK)
    b.worker.save(b.saves([0, 1], range(1)))
    b.drain()
    assert b.worker.report(1).unsaved == {b.digests[0]}
    assert b.counts()["failures{store}"] == 1


def test_values_that_cannot_be_coded_are_not_stored(bench: Callable[..., Bench]) -> None:
    b = bench(quality="balanced")
    b.worker._codec = Codec(Profile.generic(LAYOUT), "balanced")
    b.worker.save(b.saves([0, 1], range(1)))  # pages of NaN
    b.drain()
    assert b.store.entries == {}
    assert b.worker.report(1).unsaved == {b.digests[0]}
    assert b.counts()["failures{encode}"] == 1


def test_what_is_there_already_is_not_encoded_again(bench: Callable[..., Bench]) -> None:
    b = bench()
    b.store_all(1)
    before = b.store.calls.count("put")
    b.fill([0, 1], CHUNK)
    b.worker.save(b.saves([0, 1], range(1)))
    b.drain()
    assert b.store.calls.count("put") == before
    assert not b.worker.report(1).unsaved


def test_copies_have_a_budget(bench: Callable[..., Bench]) -> None:
    size = CHUNK * LAYOUT.bytes_per_token
    b = bench(max_pending_mb=2.5 * size / 1e6)
    go = threading.Event()
    b.store.before = lambda operation: _wait(go)
    blocks = list(range(8))
    b.fill(blocks, 4 * CHUNK)
    b.worker.save(b.saves(blocks, range(4)))
    go.set()
    b.drain()
    assert set(b.store.entries) == {b.key(0), b.key(1)}
    assert b.worker.report(1).unsaved == {b.digests[2], b.digests[3]}
    assert b.counts()["stores_skipped"] == 2
    b.worker.save(b.saves(blocks, range(2, 4)))
    b.drain()
    assert len(b.store.entries) == 4, "the budget is free again"


def test_ranks_have_keys_of_their_own(bench: Callable[..., Bench]) -> None:
    b = bench(rank=1)
    b.store_all(1)
    assert set(b.store.entries) == {store_key(TENANT, b.digests[0], 1)} != {store_key(TENANT, b.digests[0], 0)}


def test_long_loads_come_in_several_fetches(bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cuvee.integrations.vllm.worker._FETCH_CHUNKS", 3)
    b = bench()
    b.store_all()
    blocks = list(range(23, 7, -1))
    b.worker.start_loads([b.load(blocks, 0, 8 * CHUNK)], synchronous=True)
    assert b.held(blocks, 0, 8 * CHUNK)
    del b.store.entries[b.key(4)]
    b.worker.start_loads([b.load(blocks, 0, 8 * CHUNK)], synchronous=True)
    assert b.worker.take_invalid_blocks() == set(blocks[8:])


def test_close_finishes_what_is_being_stored(bench: Callable[..., Bench]) -> None:
    b = bench()
    blocks = list(range(8))
    b.fill(blocks, 4 * CHUNK)
    b.worker.save(b.saves(blocks, range(4)))
    b.worker.close()
    assert len(b.store.entries) == 4
    b.worker.close()


def _in_time(work: Callable[[], object], seconds: float = 10) -> None:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it hangs"


@pytest.mark.parametrize("hanging", ["contains", "put"])
def test_close_is_bounded_and_says_what_is_lost(
    bench: Callable[..., Bench], hanging: str, caplog: pytest.LogCaptureFixture
) -> None:
    b = bench(close_timeout=0.3, threads=1)
    blocks = list(range(8))
    b.fill(blocks, 4 * CHUNK)
    go, hangs = threading.Event(), threading.Event()

    def hang(operation: str) -> None:
        if operation == hanging:
            hangs.set()
            _wait(go)

    b.store.before = hang
    b.worker.save(b.saves(blocks, range(4)))
    assert hangs.wait(10)
    with caplog.at_level("INFO", logger="cuvee"):
        _in_time(b.worker.close)
    assert b.counts()["lost{encode}"] == 4
    assert "4 chunks waited to be compressed" in caplog.text and "close_timeout=0.3" in caplog.text
    assert "4 chunks lost because the engine stopped" in caplog.text, "in the summary, too"
    go.set()
    _in_time(b.worker.close)


def test_what_a_store_could_not_write_behind_is_lost(
    bench: Callable[..., Bench], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cuvee.integrations.vllm.worker._FLUSH_SECONDS", 0.1)
    b = bench(close_timeout=0.3)
    slow = DictStore()
    go, hangs = threading.Event(), threading.Event()

    def hang(operation: str) -> None:
        if operation == "put":
            hangs.set()
            _wait(go)

    slow.before = hang
    tiers = TieredStore([b.store, slow])
    b.worker._store = tiers
    blocks = list(range(8))
    b.fill(blocks, 4 * CHUNK)
    b.worker.save(b.saves(blocks, range(4)))
    b.drain()
    assert hangs.wait(10)
    _in_time(b.worker.close)
    assert b.counts()["lost{store}"] == 4 and "lost{encode}" not in b.counts()
    assert "4 to be written" in caplog.text
    go.set()
    tiers.close()
    assert len(slow.entries) == 4


def test_close_does_not_wait_for_loads(bench: Callable[..., Bench], caplog: pytest.LogCaptureFixture) -> None:
    b = bench(threads=1)
    b.store_all()
    go, hangs = threading.Event(), threading.Event()

    def hang(operation: str) -> None:
        if operation == "get":
            hangs.set()
            _wait(go)

    b.store.before = hang
    b.worker.start_loads([b.load([1, 2], 0, CHUNK, "a"), b.load([3, 4], 0, CHUNK, "b")], synchronous=False)
    assert hangs.wait(10)
    _in_time(b.worker.close)
    go.set()
    assert b.worker._loaders.dismiss(30) and b.worker._fetchers.dismiss(30)
    assert b.cache.keys[0][1].isnan().all(), "the engine may have freed its pages"
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_saves_and_loads_go_on_after_some_that_hang(bench: Callable[..., Bench]) -> None:
    b = bench(threads=1, load_timeout=0.2)
    b.worker._store = GuardedStore(b.store, first_backoff=1e-3, max_backoff=1e-3)
    blocks = list(range(16))
    b.fill(blocks, 8 * CHUNK)
    go, hangs = threading.Event(), threading.Event()

    def hang(operation: str) -> None:
        if operation == "put" and not hangs.is_set():
            hangs.set()
            _wait(go)

    b.store.before = hang
    b.worker.save(b.saves(blocks, range(1)))
    assert hangs.wait(10)
    threading.Event().wait(0.3)
    b.worker.save(b.saves(blocks, range(1, 3)))
    for digest in b.digests[1:3]:
        if (future := b.worker._saving.get(digest)) is not None:
            future.result(10)
    assert b.worker._store.counters()["memory"].errors == 1, "the one that hangs, once"
    b.worker.save(b.saves(blocks, range(3, 5)))
    for digest in b.digests[3:5]:
        if (future := b.worker._saving.get(digest)) is not None:
            future.result(10)
    # The circuit of writing has opened for it; reading has not.
    assert b.key(0) not in b.store.entries
    go.set()


def test_attaching_writes_nothing(bench: Callable[..., Bench]) -> None:
    b = bench()
    assert all(tensor.isnan().all() for tensor in b.cache.keys + b.cache.values)
    assert b.store.calls == []


def test_reports_of_ranks_add_up() -> None:
    one = Report([1], {"c"}, [(16, 0.5)], {"a"}, {b"x"}, None)
    one.add(Report([1], {"d"}, [(16, 0.7)], {"b"}, {b"y"}, None))
    assert (one.steps, one.ended, one.loaded) == ([1, 1], {"c", "d"}, [(16, 0.5), (16, 0.7)])
    assert (one.failed, one.unsaved) == ({"a", "b"}, {b"x", b"y"})
