"""The page stores of a process: one store, and no pages in common between ranks, sizes of groups and tenants."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import fitted_profile
from tests.recognizing import learned_profile
from tests.waiting import PATIENCE, let_name

from cuvee.codec.errors import InputError
from cuvee.codec.layout import KVLayout, LayerLayout
from cuvee.codec.paged import PagedCache
from cuvee.codec.profiles.profile import Profile
from cuvee.integrations.identity.weights_name import Make
from cuvee.integrations.options import CodingOptions
from cuvee.integrations.pages import Counts, PageStores
from cuvee.integrations.profiles.collection import ProfileCollection

LAYOUT = KVLayout("test", (LayerLayout(4, 8, 8, None),) * 2, "float32", None)


def opened(
    layout: KVLayout = LAYOUT,
    *,
    positions: bool = True,
    page_tokens: int = 16,
    weights: Make = lambda stop: "weights",
    **options: Any,
) -> PageStores:
    given = CodingOptions.from_dict({"store": "memory://?max_gb=0.011", "lookup_timeout": PATIENCE, **options})
    return PageStores(
        given, layout, weights, checkpoint=("nowhere", None), engine="test", page_tokens=page_tokens,
        counts=Counts(), positions=positions,
    )  # fmt: skip


def one_page() -> PagedCache:
    memory = [torch.randn(1, 16, 4, 8) for _ in range(4)]
    return PagedCache(LAYOUT, memory[:2], memory[2:])


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
    stores.of(0, 1, "", own).save(one_page(), torch.arange(16), [b"name"], None)
    assert own.snapshot()["saved_pages"] == 1
    stores.close()


def test_weights_that_change_before_they_have_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their version is a part of a name that others have, too; the name that was being made is never used."""
    monkeypatch.setattr("cuvee.integrations.identity.weights_name.START_SECONDS", 0.0)
    go, stops = threading.Event(), list[bool]()

    def slow(stop: threading.Event) -> str:
        assert go.wait(60)
        stops.append(stop.is_set())
        return "weights"

    stores, early = (opened(weights=slow, model_id="run") for _ in range(2))
    cache = one_page()
    before = stores.of(0, 1, "")
    assert before.delete([b"name"]) == [False] == before.save(cache, torch.arange(16), [b"name"], None)
    stores.withdraw("of a test")
    assert stores.withdrawn and not early.withdrawn
    stores.rename("2")
    early.withdraw("of a test")
    early.rename()  # nobody else knows these weights, so their files need not be read
    assert early.of(0, 1, "").save(cache, torch.arange(16), [b"name"], None) == [True]
    let_name(go)
    assert sorted(stops) == [False, True, True]
    pages = stores.of(0, 1, "")
    assert pages.stored([b"name"]) == [False] == before.stored([b"name"])
    assert pages.save(cache, torch.arange(16), [b"name"], None) == [True]
    monkeypatch.undo()
    quick = opened(model_id="run")
    quick.rename("2")
    assert quick.of(0, 1, "")._names.page(b"name") == pages._names.page(b"name") != before._names.page(b"name")
    for opened_stores in (stores, early, quick):
        opened_stores.close()


def test_a_version_names_weights_only_within_a_run_that_the_user_names(caplog: pytest.LogCaptureFixture) -> None:
    """Two runs of training from one checkpoint both count from 1."""

    def names(**options: Any) -> list[bytes]:
        found = []
        for _ in range(2):
            stores = opened(**options)
            stores.rename("1")
            found.append(stores.of(0, 1, "")._names.page(b"name"))
            stores.rename("1")
            stores.close()
        return found

    assert len(set(names())) == 2
    assert caplog.text.count("set option 'model_id' to a name of the run") == 2, "once for each engine"
    assert len(set(names(model_id="run"))) == 1


@pytest.mark.parametrize(("version", "verdict"), [(None, "match"), ("2", "mismatch")])
def test_weights_that_change_while_a_profile_is_compared_with_those_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verdict: str, version: str | None
) -> None:
    """They have a name once the profile is known to be of those that the engine was started with."""
    path, go = str(tmp_path / "profile.safetensors"), threading.Event()
    Profile.unlearned(LAYOUT).save(path)

    def slow(stop: threading.Event) -> str:
        assert go.wait(60)
        return verdict

    monkeypatch.setattr("cuvee.integrations.identity.weights_name.START_SECONDS", 0.0)
    monkeypatch.setattr("cuvee.integrations.identity.checkpoint.checking_profile", lambda *_: slow)
    stores = opened(profile=path, quality="lossless")
    stores.withdraw("of a test")
    stores.rename(version)
    cache = one_page()
    assert stores.of(0, 1, "").save(cache, torch.arange(16), [b"name"], 0) == [False]
    let_name(go)
    assert stores.of(0, 1, "").save(cache, torch.arange(16), [b"name"], 0) == [verdict == "match"]
    stores.close()


def test_without_positions_a_lossy_quality_wants_a_profile_that_recognizes_them(tmp_path: Path) -> None:
    def fails(layout: KVLayout, **options: Any) -> None:
        with pytest.raises(InputError, match=r"quality: must be 'lossless', got .*give one in option"):
            opened(layout, positions=False, check_model=False, **options)

    profile, without = learned_profile(), fitted_profile("no-rope", "layer")
    paths = []
    for each in (profile, without):
        ProfileCollection(str(tmp_path)).push(each)
        paths.append(f"{tmp_path}#{each.id.hex()}")
    fails(without.layout, step=1.0, profile=paths[1])
    opened(without.layout, check_model=False, step=1.0, profile=paths[1]).close()
    opened(profile.layout, positions=False, check_model=False, step=1.0, profile=paths[0]).close()
    opened(positions=False).close()


def test_a_store_is_closed_though_no_thread_could_be_started_for_its_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores, start = opened(store=f"file://{tmp_path}/kv"), threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if thread.name == "cuvee-records":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(RuntimeError, match="can't start"):  # which adapters contain
        stores.of(0, 1, "")
    assert stores.of(0, 1, "").stored([b"name"]) == [False]
    stores.close()


def test_small_pages_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    opened(page_tokens=64).close()
    assert not caplog.records
    opened(page_tokens=32).close()
    assert "each page of 32 tokens has an entry of its own; pages of 64 or more" in caplog.text
