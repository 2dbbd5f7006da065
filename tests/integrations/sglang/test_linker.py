"""SGLang's own prefix cache, device pools and linker factory, with our linker behind them: on the CPU, no engine."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.integrations.latent_models import Latents
from tests.integrations.sglang.real_sglang import (
    PrefixCache,
    device_pool,
    latent_device_pool,
    need_sglang,
    published_arguments,
    real,
)
from tests.integrations.stores.dict_store import DictStore, hold
from tests.integrations.vllm_tier.real_tiers import wait_for

from cuvee.calibration.bundled import bundled_model_path
from cuvee.codec.codec import Codec
from cuvee.codec.errors import InputError, UnsupportedModelError
from cuvee.integrations.pages import PageStore
from cuvee.integrations.stores import StoreError
from cuvee.integrations.stores.threads import ThreadPool

pytestmark = need_sglang

LAYERS, HEADS, DIM, PAGE = 6, 2, 64, 16  # of the bundled model, and tokens per page
SHAPE: dict[str, Any] = {
    "layers": LAYERS,
    "heads": HEADS,
    "dim": DIM,
    "page_tokens": PAGE,
    "pages": 24,
    "dtype": torch.bfloat16,
}
TOKENS = random.Random(0).choices(range(4096), k=16 * PAGE)
MODEL = str(bundled_model_path())


@pytest.fixture
def store() -> DictStore:
    return DictStore()


@pytest.fixture
def prefix_cache(store: DictStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., PrefixCache]]:
    monkeypatch.setattr("cuvee.integrations.pages.opening.open_store", lambda urls: store)
    made: list[PrefixCache] = []

    def make(extra: dict[str, Any] | None = None, pool: Any = None, **params: Any) -> PrefixCache:
        given = {"model": MODEL, "lookup_timeout": 30.0, **(extra or {})}
        made.append(PrefixCache(pool or device_pool(**SHAPE), given, **params))
        return made[-1]

    with published_arguments():
        yield make
        store.before = lambda operation: None
        for each in made:
            each.linker.close()


def offloaded(cache: PrefixCache, tokens: Sequence[int]) -> list[torch.Tensor]:
    """Insert tokens and wait until they are stored; return their values."""
    slots = cache.alloc(len(tokens) // PAGE)
    values = cache.values(slots)
    cache.insert(tokens, slots)
    cache.settle()
    return values


def equal(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


# There and back -------------------------------------------------------------------------------------------------------


def test_what_follows_a_cached_prefix_is_loaded_behind_it(prefix_cache: Callable[..., PrefixCache]) -> None:
    """Its hashes continue those of the prefix, and several requests load in one batch."""
    cache = prefix_cache()
    one, other = TOKENS[: 6 * PAGE], [*TOKENS[: 2 * PAGE], *TOKENS[8 * PAGE : 12 * PAGE]]
    values = offloaded(cache, one), offloaded(cache, other)
    cache.forget()
    cache.insert(one[: 2 * PAGE], cache.alloc(2))
    requests, slots = [], []
    for tokens in (one, other):
        request, result = cache.match(tokens)
        assert result.device_prefix_len == 2 * PAGE and result.host_hit_length == 4 * PAGE
        requests.append(request)
        slots.append(cache.queue(request, result))
    assert cache.run(requests) == []
    for at, wanted in zip(slots, values, strict=True):
        assert at is not None and equal(cache.values(at), [each[2 * PAGE :] for each in wanted])


@pytest.mark.serves(where="classes")
@pytest.mark.serves(parallel="tensor parallelism", where="classes")
def test_ranks_share_a_store_and_not_pages(
    prefix_cache: Callable[..., PrefixCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = []
    for rank in range(2):
        monkeypatch.setattr("cuvee.integrations.sglang.linker._rank", lambda params, rank=rank: (rank, 2))
        ranks.append(prefix_cache(pool=device_pool(**{**SHAPE, "heads": 1})))
    values = [offloaded(each, TOKENS[: 4 * PAGE]) for each in ranks]
    for each, wanted in zip(ranks, values, strict=True):
        each.forget()
        slots = each.restore(TOKENS[: 4 * PAGE])
        assert slots is not None and equal(each.values(slots), wanted)


def latent_cache_pool(latents: Latents, **changes: Any) -> Any:
    shape = {
        "layers": latents.layout.num_layers, "latent": latents.latent, "rotated": latents.rotated, "page_tokens": PAGE,
        "pages": 24, "dtype": torch.bfloat16,
    }  # fmt: skip
    return latent_device_pool(**{**shape, **changes})


@pytest.mark.serves(model="latents (MLA)", where="classes")
def test_latents_are_stored_by_one_rank_and_loaded_by_all(
    latents: Latents, prefix_cache: Callable[..., PrefixCache], store: DictStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = []
    for rank in range(2):
        monkeypatch.setattr("cuvee.integrations.sglang.linker._rank", lambda params, rank=rank: (rank, 2))
        ranks.append(prefix_cache({"model": latents.path}, latent_cache_pool(latents)))
    slots = ranks[1].alloc(4)
    ranks[1].insert(TOKENS[: 4 * PAGE], slots)
    ranks[1].settle()
    assert not store.entries
    chunk, slots = latents.chunk(), ranks[0].alloc(4)
    for layer in range(latents.layout.num_layers):
        ranks[0].pool.kv_buffer[layer][slots] = latents.as_engines_keep_it(chunk, layer)
    values = ranks[0].values(slots)
    ranks[0].insert(TOKENS[: 4 * PAGE], slots)
    ranks[0].settle()
    for each in ranks:
        each.forget()
        into = each.restore(TOKENS[: 4 * PAGE])
        assert into is not None and equal(each.values(into), values)


# What SGLang relies on ------------------------------------------------------------------------------------------------


def test_a_lookup_stands_while_it_is_held(prefix_cache: Callable[..., PrefixCache], store: DictStore) -> None:
    """A request that waits is looked up in every step; what was found is loaded although the store loses it."""
    cache = prefix_cache()
    values = offloaded(cache, TOKENS[: 5 * PAGE])
    cache.forget()
    cache.match(TOKENS[: 5 * PAGE], "waits")
    store.entries.clear()
    store.calls.clear()
    request, result = cache.match(TOKENS[: 5 * PAGE], "waits")
    assert result.host_hit_length == 5 * PAGE and not store.calls
    assert cache.match([*TOKENS[: 5 * PAGE], *TOKENS[:PAGE]], "another")[1].host_hit_length == 0
    slots = cache.queue(request, result)
    assert slots is not None and cache.run([request]) == [] and equal(cache.values(slots), values)
    assert not cache.linker._held.get("waits")


def test_a_slow_store_holds_the_scheduler_up_briefly_and_once(
    prefix_cache: Callable[..., PrefixCache], store: DictStore
) -> None:
    """What arrives later is found when SGLang asks again."""
    cache = prefix_cache({"lookup_timeout": 0.05})
    values = offloaded(cache, TOKENS[: 2 * PAGE])
    cache.forget()
    store.calls.clear()
    held = hold(store, "get")
    assert [cache.match(TOKENS[: 2 * PAGE], "waits")[1].host_hit_length for _ in range(5)] == [0] * 5
    assert held.begun.wait(30) and store.calls.count("get") == 1, "it is not asked anew"
    held.set()
    wait_for(lambda: cache.match(TOKENS[: 2 * PAGE], "waits")[1].host_hit_length == 2 * PAGE)
    request, result = cache.match(TOKENS[: 2 * PAGE], "waits")
    slots = cache.queue(request, result)
    assert slots is not None and cache.run([request]) == [] and equal(cache.values(slots), values)
    assert "failures{fetch}" not in cache.linker.counters()


def test_all_ranks_let_go_of_the_same_lookups(prefix_cache: Callable[..., PrefixCache], store: DictStore) -> None:
    """Whatever each of them found, because only then all of them load, or none."""
    page_bytes = 2 * LAYERS * HEADS * DIM * 2 * PAGE
    ranks = [prefix_cache({"held_gb": 7.5 * page_bytes / 1e9}) for _ in range(2)]
    offloaded(ranks[0], TOKENS[: 8 * PAGE])
    transfers = []
    kinds = real("sglang.srt.mem_cache.hicache_storage")
    names = real("sglang.srt.mem_cache.utils").get_hash_str(TOKENS[: 8 * PAGE], None, PAGE)
    for count in (3, 2, 2, 1, 8):
        transfers.append([kinds.PoolTransfer(name=kinds.PoolName.KV, keys=names[:count])])
    found: list[list[list[int]]] = [[], []]
    for number, rank in enumerate(ranks):
        draw = random.Random(number)

        def fail(operation: str, draw: random.Random = draw, fails: bool = bool(number)) -> None:
            if fails and operation == "get" and draw.random() < 0.5:
                raise StoreError("planted")

        store.before = fail
        for rid, each in enumerate(transfers[:4]):
            found[number].append(rank.linker.lookup(str(rid), each))
    store.before = lambda operation: None
    assert found[0] == [[1, 2, 3], [1, 2], [1, 2], [1]] != found[1]
    assert [list(rank.linker._held) for rank in ranks] == [["1", "2", "3"]] * 2, "three pages made room"
    assert ranks[0].linker.lookup("4", transfers[4]) == list(range(1, 8)), "no more than can be held"
    slots = torch.arange(PAGE)
    for gone in (0, 3):
        with_slots = [replace(transfers[gone][0], device_indices=slots)]
        assert not ranks[0].linker.load(str(gone), with_slots), "it was let go of"
    with_slots = [replace(transfers[4][0], keys=names[1:2], device_indices=slots)]
    assert not ranks[0].linker.load("4", with_slots), "other pages than were looked up"


def test_fewer_pages_than_were_found_can_be_loaded(prefix_cache: Callable[..., PrefixCache]) -> None:
    """All ranks load as many as the one that found the fewest."""
    cache, kinds = prefix_cache(), real("sglang.srt.mem_cache.hicache_storage")
    values = offloaded(cache, TOKENS[: 4 * PAGE])
    cache.forget()
    names = real("sglang.srt.mem_cache.utils").get_hash_str(TOKENS[: 4 * PAGE], None, PAGE)
    transfer = kinds.PoolTransfer(name=kinds.PoolName.KV, keys=names)
    assert cache.linker.lookup("r", [transfer]) == [1, 2, 3, 4]
    slots = cache.alloc(2)
    assert cache.linker.load("r", [replace(transfer, keys=names[:2], device_indices=slots)])
    assert cache.linker.finish_layer_wise_loading(cache.linker.start_layer_wise_loading())
    assert equal(cache.values(slots), [each[: 2 * PAGE] for each in values])


def test_a_queued_load_can_be_cancelled(prefix_cache: Callable[..., PrefixCache]) -> None:
    cache = prefix_cache()
    offloaded(cache, TOKENS[: 4 * PAGE])
    cache.forget()
    request, result = cache.match(TOKENS[: 4 * PAGE])
    slots = cache.queue(request, result)
    assert slots is not None
    before = cache.values(slots)
    cache.cache.linker.release_request(request.rid)
    assert cache.cache.ready_to_load_host_cache() == -1 and cache.run([request]) == []
    assert equal(cache.values(slots), before) and not cache.linker.cancel_queued_load(request.rid)


def test_offloads_are_told_of_in_their_order(
    prefix_cache: Callable[..., PrefixCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang takes each result for that of its oldest offload."""
    cache, store_pages = prefix_cache(), PageStore.save
    begun: list[int] = []

    def save(self: PageStore, copied: Any, slots: torch.Tensor, names: Sequence[bytes], *rest: Any, **more: Any) -> Any:
        begun.append(len(names))
        if len(names) == 2:
            wait_for(lambda: 3 in begun)
            time.sleep(0.05)
            return [False] * 2
        return store_pages(self, copied, slots, names, *rest, **more)

    monkeypatch.setattr(PageStore, "save", save)
    cache.insert(TOKENS[: 2 * PAGE], cache.alloc(2))
    cache.insert(TOKENS[5 * PAGE : 8 * PAGE], cache.alloc(3))
    wait_for(cache.linker._offloads[1].done)
    wait_for(lambda: cache.linker.num_completed_offloads() == 2)
    assert [cache.linker.pop_completed_offload() for _ in range(2)] == [False, True]


@pytest.mark.parametrize("end", ["reset", "close"])
def test_work_in_flight_has_ended_before_the_pool_is_given_away(
    prefix_cache: Callable[..., PrefixCache], store: DictStore, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, reading = prefix_cache({"load_timeout": 0.3}), []
    offloaded(cache, TOKENS[: 2 * PAGE])
    cache.forget()
    request, result = cache.match(TOKENS[: 2 * PAGE])
    cache.queue(request, result)
    place = PageStore.place

    def slowly(self: PageStore, *arguments: Any) -> Any:
        reading.append(1)
        time.sleep(1.0)  # longer than the offloads, which are given up
        placed = place(self, *arguments)
        reading.clear()
        return placed

    monkeypatch.setattr(PageStore, "place", slowly)
    held = hold(store, "put")
    try:
        cache.cache.ready_to_load_host_cache()
        for first in range(3, 9):
            cache.insert(TOKENS[first * PAGE : (first + 1) * PAGE], cache.alloc(1))
        wait_for(lambda: "put" in store.calls and reading)
        getattr(cache.cache.linker, end)()
        assert not reading and cache.linker.num_completed_offloads() == 0
        assert not cache.cache.linker.pending_offloads
    finally:
        held.set()
    store.before = lambda operation: None
    if end == "close":
        cache.linker.close()
        assert cache.match(TOKENS[: 2 * PAGE])[1].host_hit_length == 0
        cache.insert(TOKENS[10 * PAGE : 11 * PAGE], cache.alloc(1))
        cache.settle()
        assert cache.linker.counters()["missed_pages"] == 2
    else:
        cache.allocator.clear()
        values = offloaded(cache, TOKENS[12 * PAGE : 14 * PAGE])
        cache.forget()
        slots = cache.restore(TOKENS[12 * PAGE : 14 * PAGE])
        assert slots is not None and equal(cache.values(slots), values)


# What goes wrong ------------------------------------------------------------------------------------------------------


def test_damage_behind_right_checksums_aborts_one_batch_and_is_discarded(
    prefix_cache: Callable[..., PrefixCache], store: DictStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only who writes to the store can cause it; here, checksums are not verified."""
    cache = prefix_cache()
    offloaded(cache, TOKENS[: 4 * PAGE])
    cache.forget()
    for key, entry in store.entries.items():
        data = bytearray(entry)
        data[len(data) // 2] ^= 1
        store.entries[key] = bytes(data)
    monkeypatch.setattr(Codec, "verify", lambda self, opened: None)
    request, result = cache.match(TOKENS[: 4 * PAGE])
    assert cache.queue(request, result) is not None and cache.run([request]) == [request]
    assert request.discard_output_reason and cache.linker.counters()["failures{decode}"] >= 1
    assert cache.match(TOKENS[: 4 * PAGE])[1].host_hit_length == 0 and len(store.entries) == 3


@pytest.mark.parametrize("where", ["place", "start"])
def test_an_error_of_ours_during_a_load_aborts_its_batch(
    prefix_cache: Callable[..., PrefixCache], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if no thread can be started. An offload is then not made."""
    cache = prefix_cache()
    offloaded(cache, TOKENS[: 2 * PAGE])
    cache.forget()

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("planted")

    request, result = cache.match(TOKENS[: 2 * PAGE])
    cache.queue(request, result)
    monkeypatch.setattr(PageStore if where == "place" else ThreadPool, "place" if where == "place" else "submit", fail)
    assert cache.run([request]) == [request], "SGLang drops its output"
    if where == "place":
        assert cache.linker.counters()["contained{load}"] == 1
        return
    cache.insert(TOKENS[4 * PAGE : 5 * PAGE], cache.alloc(1))
    cache.settle()
    counts = cache.linker.counters()
    assert counts["contained{start_layer_wise_loading}"] == counts["contained{offload}"] == 1


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "params", "error", "message"),
    [
        ({"stores": "x"}, {}, InputError, "linker_extra_config: has no option 'stores'"),
        ({"held_gb": 0}, {}, InputError, "held_gb: must be a number above 0"),
        ({"held_gb": 1e-6}, {}, InputError, "held_gb: must hold at least a page of 49152 bytes"),
        ({}, {"pp_size": 2}, UnsupportedModelError, "pipeline parallelism"),
        ({}, {"attn_cp_size": 2}, UnsupportedModelError, "context parallelism"),
        ({}, {"mtp_draft_device_pools": (1,)}, UnsupportedModelError, "speculative decoding"),
        ({}, {"sidecar_draft_device_pools": (1,)}, UnsupportedModelError, "speculative decoding"),
    ],
)
@pytest.mark.serves(parallel="pipeline parallelism", where="refused")
@pytest.mark.serves(parallel="context parallelism", where="refused")
@pytest.mark.serves(drafts="mtp", where="refused")
def test_what_is_not_supported_is_refused_at_the_start(
    prefix_cache: Callable[..., PrefixCache], extra: dict[str, Any], params: dict[str, Any], error: type[Exception],
    message: str,
) -> None:  # fmt: skip
    with pytest.raises(error, match=message):
        prefix_cache(extra, **params)


@pytest.mark.parametrize("name", ["SWA", "MAMBA"])
@pytest.mark.serves(model="sliding windows", where="refused")
@pytest.mark.serves(model="recurrent layers", where="refused")
def test_models_with_other_caches_are_refused(prefix_cache: Callable[..., PrefixCache], name: str) -> None:
    kinds = real("sglang.srt.mem_cache.unified_cache.component_type").ComponentType
    with pytest.raises(UnsupportedModelError, match=f"other caches than keys and values, got {name}"):
        prefix_cache(components={kinds.FULL, kinds[name]})


@pytest.mark.parametrize(
    ("shape", "changes", "message"),
    [
        ({"layers": 5}, {}, "must hold the model's 6 layers, got 5"),
        ({"heads": 3}, {}, "must hold 2 heads of 64 and 64 numbers"),
        ({}, {"dtype": torch.float8_e4m3fn}, "must hold bfloat16.* use --kv-cache-dtype auto"),
        ({}, {"k_scale_buffer": 1}, "must hold values without scales"),
        ({}, {"kv_cache_layout": "hnd"}, "must be arranged as nhd, got hnd: unset SGLANG_USE_HND_KVCACHE"),
        ({}, {"layer_shard_enabled": True}, "layers shared out among ranks is not supported"),
    ],
)
@pytest.mark.serves(cache="fp8_e4m3", where="refused")
def test_other_pools_are_refused(
    prefix_cache: Callable[..., PrefixCache], shape: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    pool = device_pool(**{**SHAPE, **shape})
    for name, value in changes.items():
        setattr(pool, name, value)
    with pytest.raises(UnsupportedModelError, match=f"device pool: (.*)?{message}"):
        prefix_cache(pool=pool)


def test_other_kinds_of_pools_are_refused() -> None:
    check = real("cuvee.integrations.sglang.device_pool").check_device_pool
    with pytest.raises(UnsupportedModelError, match="must be a MHATokenToKVPool or MLATokenToKVPool, got SimpleNames"):
        check(SimpleNamespace(dtype=torch.bfloat16))


def test_latents_in_another_order_than_the_layouts_need_host_memory(latents: Latents) -> None:
    pool = latent_cache_pool(latents)
    pool.kv_buffer = [buffer.to("meta") for buffer in pool.kv_buffer]
    view = partial(real("cuvee.integrations.sglang.device_pool").device_cache, pool, latents.layout)
    if latents.adjacent and not latents.rope.interleaved:
        with pytest.raises(UnsupportedModelError, match=r"latents: must be in host memory if rotated .* got meta"):
            view(adjacent_pairs=True)
    else:
        assert view(adjacent_pairs=latents.adjacent).device.type == "meta"


def test_memory_without_kernels_is_refused(
    prefix_cache: Callable[..., PrefixCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PageStore, "serves", lambda self, device: False)
    with pytest.raises(UnsupportedModelError, match="memory for which the codec has kernels, got cpu: install triton"):
        prefix_cache()


def test_a_store_that_hangs_costs_one_lookup_and_one_offload_at_a_time(
    prefix_cache: Callable[..., PrefixCache], store: DictStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = prefix_cache({"load_timeout": 0.3})
    wait_for(lambda: (offloaded(cache, TOKENS[:PAGE]), store.entries)[1])  # the first encoding compiles
    cache.forget()
    held = hold(store, "get")
    try:
        assert cache.match(TOKENS[:PAGE])[1].host_hit_length == 0
    finally:
        held.set()
    held = hold(store, "put")
    store.calls.clear()
    # No save begins before all are submitted: however busy the machine, the others have waited as long as one hangs.
    submitted, save = threading.Event(), cache.linker._pages.save

    def save_later(*arguments: Any, **options: Any) -> Any:
        submitted.wait()
        return save(*arguments, **options)

    monkeypatch.setattr(cache.linker._pages, "save", save_later)
    try:
        for first in range(2, 8):
            cache.insert(TOKENS[first * PAGE : (first + 1) * PAGE], cache.alloc(1))
        submitted.set()
        cache.settle()
    finally:
        submitted.set()
        held.set()
    counts = cache.linker.counters()
    assert counts["failures{fetch}"] == 1
    assert counts["unsaved_pages"] == 6, "none keeps its slots"
    assert store.calls.count("put") == 2, "those that waited behind two were given up"
