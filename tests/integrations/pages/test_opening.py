"""The page stores of a process: one store, and no pages in common between ranks, sizes of groups and tenants."""

from __future__ import annotations

import itertools

import pytest
import torch

from cuvee.codec.errors import InputError
from cuvee.codec.layout import KVLayout, LayerLayout
from cuvee.codec.paged import PagedCache
from cuvee.codec.profiles.profile import Profile
from cuvee.integrations.options import CodingOptions
from cuvee.integrations.pages import Counts, PageStores

LAYOUT = KVLayout("test", (LayerLayout(4, 8, 8, None),) * 2, "float32", None)


def opened(layout: KVLayout = LAYOUT, *, positions: bool = True, **options: object) -> PageStores:
    given = CodingOptions.from_dict({"store": "memory://?max_mb=11", "chunk_tokens": 16, **options})
    return PageStores(
        given, layout, lambda: "weights", checkpoint=("nowhere", None), engine="test", page_tokens=16, counts=Counts(),
        positions=positions,
    )  # fmt: skip


def test_ranks_groups_and_tenants_have_pages_of_their_own() -> None:
    stores = opened()
    views = list(itertools.product([(0, 1), (0, 2), (1, 2), (0, 4)], ["", "alice"]))
    for (rank, ranks), tenant in views:
        pages = stores.of(rank, ranks, tenant)
        assert pages.layout == LAYOUT.shard(rank, ranks)
        assert pages.stored([b"name"]) == [False], (rank, ranks, tenant)
        memory = [torch.randn(1, 16, 4 // ranks, 8) for _ in range(4)]
        cache = PagedCache(pages.layout, memory[:2], memory[2:])
        assert pages.save(cache, torch.arange(16), [b"name"], None) == [True]
    assert all(stores.of(*rank, tenant).stored([b"name"]) == [True] for rank, tenant in views)
    stores.close()
    assert stores.of(0, 1, "").stored([b"name"]) == [False]


def test_each_rank_codes_with_its_own_part_of_the_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    cut: list[tuple[int, int]] = []
    shard = Profile.shard

    def noting(self: Profile, rank: int, size: int) -> Profile:
        cut.append((rank, size))
        return shard(self, rank, size)

    monkeypatch.setattr(Profile, "shard", noting)
    stores = opened()
    for rank in (1, 0, 1):
        stores.of(rank, 2, "")
    assert cut == [(0, 1), (1, 2), (0, 2)]
    stores.close()


def test_ranks_that_do_not_divide_the_heads_are_refused() -> None:
    stores = opened()
    with pytest.raises(InputError, match="size: must divide the 4 KV heads"):
        stores.of(0, 3, "")
    stores.close()


def test_an_events_recorder_of_ones_own_is_told() -> None:
    stores, own = opened(), Counts()
    memory = [torch.randn(1, 16, 4, 8) for _ in range(4)]
    stores.of(0, 1, "", own).save(PagedCache(LAYOUT, memory[:2], memory[2:]), torch.arange(16), [b"name"], None)
    assert own.snapshot()["saved_pages"] == 1
    stores.close()
