"""A drafter's layers: stored beside entries, restored with them, and never in the way of an entry."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from tests.integrations.vllm.sides import BLOCK, BLOCKS, CHUNK, TENANT, Bench, make_pages

from cuvee.codec.codec import Codec
from cuvee.codec.layout import KVLayout, LayerLayout
from cuvee.codec.paged import PagedCache
from cuvee.codec.profiles.profile import Profile
from cuvee.integrations.identity.weights_name import WeightsName
from cuvee.integrations.vllm.pages.draft_layers import DraftPages, Drafts
from cuvee.integrations.vllm.pages.layer_groups import CachedLayers, LayerGroup
from cuvee.naming.identity import store_key

HEAD = KVLayout("drafter", (LayerLayout(1, 8, 8, None),), "bfloat16", None)
TABLE, ELSEWHERE = [5, 3, 9, 1], [20, 13, 17, 14]
TOKENS = len(TABLE) * BLOCK


def drafts(name: bytes = b"head") -> Drafts:
    layers = CachedLayers(("model.layers.3.attn",), (), (LayerGroup((0,)),), (), BLOCK)
    weights = WeightsName(lambda stop: name.hex())
    weights.wait(20)
    return Drafts(layers, HEAD, None, Codec(Profile.unlearned(HEAD), quality="lossless"), weights)


class Drafted(Bench):
    """A worker with pages of a drafter's layer, which hold noise in `TABLE`'s blocks."""

    def __init__(self, name: bytes = b"head", **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.head: PagedCache = make_pages(HEAD, torch.device("cpu"), False)
        self.worker.attach(self.cache, (drafts(name), self.head))
        self.noise = torch.randn(TOKENS, 1, 8).bfloat16()
        self.head.write([self.noise], [-self.noise], self._slots(TABLE))
        self.fill(TABLE, TOKENS)

    def _slots(self, table: list[int]) -> torch.Tensor:
        offsets = torch.arange(TOKENS)
        return torch.tensor(table)[offsets // BLOCK] * BLOCK + offsets % BLOCK

    def save_all(self) -> None:
        self.worker.saves.save(self.saves(TABLE, range(TOKENS // CHUNK)))
        self.drain()

    def draft_key(self, chunk: int) -> str:
        pages = self.worker._state.drafts
        assert isinstance(pages, DraftPages)
        return store_key(TENANT, pages.digest(self.digests[chunk]), self.rank)

    def load_all(self) -> None:
        self.load_now([self.load(ELSEWHERE, 0, TOKENS)])
        assert self.worker.loads.take_arrived() == {"r"} and not self.worker.loads.take_invalid_blocks()
        assert self.held(ELSEWHERE, 0, TOKENS)

    def drafted(self) -> list[bool]:
        """Which tokens' pages of the drafter hold in `ELSEWHERE` what those in `TABLE` do."""
        found = self.head.read(self._slots(ELSEWHERE), 0)
        same = (found.keys[0] == self.noise) & (found.values[0] == -self.noise)
        return [bool(each) for each in same.flatten(1).all(1)]


@pytest.fixture
def made() -> Iterator[Callable[..., Drafted]]:
    benches: list[Drafted] = []

    def make(**options: object) -> Drafted:
        benches.append(Drafted(**options))  # type: ignore[arg-type]
        return benches[-1]

    yield make
    for bench in benches:
        bench.worker.close()


def test_what_a_drafter_has_computed_is_restored_bit_for_bit(made: Callable[..., Drafted]) -> None:
    bench = made()
    bench.save_all()
    counts = bench.counts()
    assert (counts["stored{chunk}"], counts["stored{drafts}"]) == (2, 2)
    assert counts["raw_bytes"] == TOKENS * (bench.cache.layout.bytes_per_token + HEAD.bytes_per_token)
    assert counts["stored_bytes"] == sum(map(len, bench.store.entries.values()))
    bench.load_all()
    assert all(bench.drafted())
    others = sorted({*range(BLOCKS)} - {*TABLE, *ELSEWHERE})
    assert bench.head.keys[0][others].isnan().all(), "left alone"
    assert bench.counts()["loaded{drafts}"] == 2


@pytest.mark.parametrize("damage", ["gone", "damaged", "another's"])
def test_an_entry_is_loaded_without_what_is_missing(made: Callable[..., Drafted], damage: str) -> None:
    """And what is damaged is deleted, but nothing of another model. The chunk behind it has its own."""
    bench = made()
    bench.save_all()
    first, second = bench.draft_key(0), bench.draft_key(1)
    entries = bench.store.entries
    if damage == "gone":
        del entries[first]
    elif damage == "damaged":
        entries[first] = entries[first][:-1] + bytes([entries[first][-1] ^ 1])
    else:
        entries[first] = entries[bench.key(0)]
    bench.load_all()
    assert bench.drafted() == [False] * CHUNK + [True] * CHUNK
    counts = bench.counts()
    assert counts.get("failures{drafts}", 0) == (damage != "gone") and counts["loaded{drafts}"] == 1
    assert (first in entries) == (damage == "another's")
    assert {second, bench.key(0), bench.key(1)} == entries.keys() - {first}


def test_a_drafter_that_cannot_be_coded_costs_no_entry(
    made: Callable[..., Drafted], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = made()
    pages = bench.worker._state.drafts
    assert pages is not None
    monkeypatch.setattr(pages.io, "encode", lambda copy, chunks: [OSError("full")] * len(chunks))
    bench.save_all()
    counts = bench.counts()
    assert (counts["stored{chunk}"], counts["failures{drafts}"]) == (2, 2) and "stored{drafts}" not in counts
    bench.load_all()
    assert not any(bench.drafted())


def test_pages_of_a_drafter_that_are_not_understood_are_none(caplog: pytest.LogCaptureFixture) -> None:
    name = "model.layers.3.attn"
    pages = torch.zeros(BLOCKS, 1, BLOCK, 16, dtype=torch.bfloat16)
    assert drafts().found({name: SimpleNamespace(impl=object())}, {name: pages}) is None
    assert "a drafter's layers are not stored" in caplog.text and f"{name}: object has no writer" in caplog.text


def test_drafters_share_entries_and_not_their_layers(made: Callable[..., Drafted]) -> None:
    bench = made()
    bench.save_all()
    other = made(name=b"another", store=bench.store, sequence=bench.sequence)
    other.load_all()
    assert not any(other.drafted())
    other.save_all()
    assert len(bench.store.entries) == 6, "two chunks, and two entries of each drafter"


def test_pages_of_a_drafter_sleep_with_those_of_the_model(made: Callable[..., Drafted]) -> None:
    bench = made()
    bench.save_all()
    bench.worker.detach()
    assert bench.worker._state.drafts is None
    bench.worker.attach(bench.cache, (drafts(), bench.head))
    bench.load_all()
    assert all(bench.drafted())


def test_a_drafter_without_a_name_is_neither_stored_nor_loaded(made: Callable[..., Drafted]) -> None:
    bench = made()
    pages = bench.worker._state._drafts
    assert isinstance(pages, DraftPages)
    name = pages._name
    name.withdraw("of a test")
    bench.save_all()
    assert len(bench.store.entries) == TOKENS // CHUNK, "the model's own entries"
    bench.load_all()
    name.use(b"head".hex())
    bench.save_all()
    assert bench.draft_key(0) in bench.store.entries
