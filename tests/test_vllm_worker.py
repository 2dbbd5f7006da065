"""The worker's side on real pages, a real codec and a store that can be made to fail."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from dict_store import DictStore

from cuvee.codec.codec import Codec
from cuvee.codec.identity import store_key
from cuvee.codec.layout import KVChunk, KVLayout, LayerLayout, Rope
from cuvee.codec.paged import PagedCache
from cuvee.codec.profile import Profile
from cuvee.integrations.stores import StoreError
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

    def __init__(self, rank: int = 0, **options: Any) -> None:
        self.options = Options.from_dict({"chunk_tokens": CHUNK, "quality": "lossless", **options})
        profile = Profile.generic(LAYOUT)
        self.setup = Setup(self.options, LAYOUT, profile, "lossless", BLOCK, 1, True, True, True)
        self.store = DictStore()
        self.recorder = Recorder()
        self.worker = WorkerSide(self.setup, rank, Codec(profile, "lossless"), self.store, self.recorder)
        self.cache = _pages(LAYOUT)
        self.worker.attach(self.cache)
        noise = torch.randn(2, 3, 8 * CHUNK, 2, 16).bfloat16()
        self.sequence = KVChunk(noise[0], noise[1], LAYOUT)
        self.digests = [bytes([index]) * 32 for index in range(8)]
        self.rank = rank

    def key(self, chunk: int) -> str:
        return store_key(TENANT, self.digests[chunk], self.rank)

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
    b.worker._loaders.shutdown(wait=True)
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
    b.worker._loaders.shutdown(wait=True)
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


def test_attaching_writes_nothing(bench: Callable[..., Bench]) -> None:
    b = bench()
    assert all(tensor.isnan().all() for tensor in b.cache.keys + b.cache.values)
    assert b.store.calls == []


def test_reports_of_ranks_add_up() -> None:
    one = Report([1], {"c"}, [(16, 0.5)], {"a"}, {b"x"}, None)
    one.add(Report([1], {"d"}, [(16, 0.7)], {"b"}, {b"y"}, None))
    assert (one.steps, one.ended, one.loaded) == ([1, 1], {"c", "d"}, [(16, 0.5), (16, 0.7)])
    assert (one.failed, one.unsaved) == ({"a", "b"}, {b"x", b"y"})
