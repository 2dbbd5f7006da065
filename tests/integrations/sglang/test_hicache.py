"""SGLang's own factory, host pools and controller, with our backend behind them: what its engine on a CPU
(`test_engine`) never meets. What any adapter of pages keeps to is in `tests/integrations/pages/test_contract.py`.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from threading import Event
from types import MethodType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tests.conftest import fitted_to
from tests.integrations.latent_models import Latents
from tests.integrations.pages.forging import forge
from tests.integrations.sglang.real_sglang import (
    host_pool,
    latent_pool,
    need_sglang,
    page_hash,
    pool_modules,
    real,
    storage_config,
)
from tests.integrations.stores.dict_store import DictStore
from tests.waiting import PATIENCE, wait_until

from cuvee.calibration.bundled import bundled_model_path
from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.errors import InputError, UnsupportedModelError
from cuvee.codec.layout import KVLayout
from cuvee.codec.rope import rotate
from cuvee.integrations.identity.records import RecordStore
from cuvee.integrations.stores.disk import DiskStore
from cuvee.learning.calibrate import calibrate

pytestmark = need_sglang

HALVES = "deepseek_v3, halves"
LAYERS, HEADS, DIM = 6, 2, 64  # of the bundled model
JSON = {
    "backend_name": "cuvee", "module_path": "cuvee.integrations.sglang.hicache", "class_name": "CuveeHiCache",
    "interface_v1": 1, "model": str(bundled_model_path()),
}  # fmt: skip


def published() -> AbstractContextManager[Any]:
    """SGLang's arguments as its scheduler's process has them, unless a test has others."""
    module = real("cuvee.integrations.sglang.served_model")
    if module.get_server_args is not real("sglang.srt.runtime_context").get_server_args:
        return nullcontext()
    args = real("sglang.srt.server_args").ServerArgs(model_path=str(bundled_model_path()))
    return patch.object(module, "get_server_args", lambda: args)


class Rank:
    """One rank of an engine: SGLang's host pool, our backend made by SGLang's factory, and its controller's methods.

    Attributes:
        pool: of SGLang, filled with random numbers.
        backend: what the factory made, which may be SGLang's proxy of ours.
    """

    def __init__(
        self,
        extra: dict[str, Any],
        arrangement: str = "page_first",
        *,
        page_tokens: int = 16,
        pages: int = 40,
        heads: int = HEADS,
        layers: int = LAYERS,
        dtype: torch.dtype = torch.bfloat16,
        pool: Any = None,
        started: Callable[[], int] = time.time_ns,
        seen: bool = False,
        **config: Any,
    ) -> None:
        self.pool = pool or host_pool(
            arrangement, layers=layers, heads=heads, dim=DIM, page_tokens=page_tokens, pages=pages, dtype=dtype
        )
        factory = real("sglang.srt.mem_cache.storage.backend_factory").StorageBackendFactory
        given = {**JSON, **extra}
        given = {name: value for name, value in given.items() if value is not None}
        self.backend = factory.create_backend("dynamic", storage_config(self.pool, given, **config), self.pool)
        self.backend.register_mem_pool_host(self.pool)
        hicache = real("cuvee.integrations.sglang.hicache")
        watch = real("cuvee.integrations.sglang.weight_updates")._watch  # of all engines of these tests
        with published(), patch.object(hicache, "_started", started), patch.object(watch, "seen", seen):
            self.backend.on_host_pools_registered()
        self._hashes = page_hash()
        # The controller's own loops over batches of 128 pages, on a stand-in without its threads and devices.
        module = real("sglang.srt.managers.cache_controller")
        self.controller = SimpleNamespace(
            storage_backend=self.backend, page_size=self.pool.page_size, storage_host_pool=self.pool,
            prefetch_sync_queue=SimpleNamespace(put=lambda ack: None),
        )  # fmt: skip
        for name in (
            "_page_set_zero_copy", "_page_get_zero_copy", "_page_backup", "_page_transfer", "_page_transfer_kv_batch",
            "_storage_hit_query",
        ):  # fmt: skip
            setattr(self.controller, name, MethodType(getattr(module.HiCacheController, name), self.controller))
        self.controller.page_set_func = self.controller._page_set_zero_copy
        self.controller.page_get_func = self.controller._page_get_zero_copy

    def hashes(self, tokens: Sequence[int]) -> list[str]:
        return self._hashes(list(tokens), None, self.pool.page_size)

    def back_up(self, tokens: Sequence[int], indices: torch.Tensor, prefix: list[str] | None) -> int:
        """Store pages as the controller does; return the tokens that it counts as stored."""
        skipped = len(prefix or ()) * self.pool.page_size
        operation = SimpleNamespace(
            hash_value=self.hashes(tokens)[len(prefix or ()) :], host_indices=indices[skipped:], prefix_keys=prefix,
            completed_tokens=0,
        )  # fmt: skip
        self.controller._page_backup(operation)
        return int(operation.completed_tokens)

    def prefetch(self, tokens: Sequence[int], indices: torch.Tensor, *, passes_prefix: bool = True) -> int:
        """Restore pages as the controller does: ask, then load; return the tokens that it counts as restored."""
        prefix_keys: list[str] | None = [] if passes_prefix else None
        operation = SimpleNamespace(
            last_hash=None, token_ids=list(tokens), prefix_keys=prefix_keys, request_id="r", host_indices=indices,
            is_terminated=lambda: False,
        )  # fmt: skip
        operation.hash_value, found = self.controller._storage_hit_query(operation)
        assert found == len(operation.hash_value) * self.pool.page_size
        return int(self.controller._page_transfer(operation)) * int(self.pool.page_size)

    def page_bytes(self, indices: torch.Tensor) -> list[torch.Tensor]:
        return [self.pool.get_data_page(int(index)).clone() for index in indices[:: self.pool.page_size]]

    def alloc(self, pages: int) -> torch.Tensor:
        """Pages of the pool, not in order."""
        taken = self.pool.alloc(pages * self.pool.page_size).view(pages, -1)
        return torch.as_tensor(taken[torch.randperm(pages, generator=torch.Generator().manual_seed(pages))].flatten())


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Callable[..., Rank]]:
    def make(extra: dict[str, Any] | None = None, *arguments: Any, **options: Any) -> Rank:
        given = {"store": f"file://{tmp_path}/store", "lookup_timeout": PATIENCE, "load_timeout": PATIENCE}
        made = Rank({**given, **(extra or {})}, *arguments, **options)
        stack.callback(made.backend.close)
        return made

    with ExitStack() as stack:
        yield make


TOKENS = random.Random(0).choices(range(4096), k=16 * 200)


# There and back -------------------------------------------------------------------------------------------------------


def in_order(pool: Any, indices: torch.Tensor) -> torch.Tensor:
    """The tokens of a pool, `[2, tokens, layers, heads, dim]`, by the shapes that SGLang's source gives."""
    if pool.layout == "layer_first":
        return torch.as_tensor(pool.kv_buffer[:, :, indices].transpose(1, 2))
    return torch.as_tensor(pool.kv_buffer[:, indices])  # page_first


def test_pages_are_found_in_the_arrangements_that_the_engines_of_tests_do_not_have(rank: Callable[..., Rank]) -> None:
    """After a restart, and nothing else is written."""
    pages, page_tokens = 12, 64
    tokens = TOKENS[: pages * page_tokens]
    first = rank(None, "page_first", page_tokens=page_tokens)
    at = first.alloc(pages)
    wanted = in_order(first.pool, at).clone()
    assert first.back_up(tokens, at, []) == len(tokens)
    first.backend.close()
    for other in ("page_first", "layer_first"):
        again = rank(None, other, page_tokens=page_tokens)
        into = again.alloc(pages)
        rest = torch.tensor(sorted(set(range(again.pool.size)) - set(into.tolist())))
        before = in_order(again.pool, rest).clone()
        assert again.prefetch([*tokens, *TOKENS[-page_tokens:]], into) == len(tokens)
        assert torch.equal(in_order(again.pool, into), wanted)
        assert torch.equal(in_order(again.pool, rest), before)


def test_what_the_controller_sends_in_batches_is_one_sequence(rank: Callable[..., Rank], tmp_path: Path) -> None:
    """More than 128 pages, stored node by node of the tree, and loaded from the middle."""
    first = rank({"quality": "balanced", "profile": fitted_path(tmp_path)}, page_tokens=2, pages=200)
    at, tokens = first.alloc(200), TOKENS[:400]
    hashes = first.hashes(tokens)
    keys, values = in_order(first.pool, at).transpose(1, 2)
    chunk = KVChunk(keys, values, layout())
    for begin, end in ((0, 3), (3, 150), (150, 200)):
        assert first.back_up(tokens[: end * 2], at[: end * 2], hashes[:begin]) == (end - begin) * 2
    into = first.alloc(197)
    keys = hashes[3:]
    extra = real("sglang.srt.mem_cache.hicache_storage").HiCacheStorageExtraInfo(prefix_keys=hashes[:3])
    assert first.backend.batch_exists([*keys, "none"], extra) == 197
    assert first.backend.batch_exists([keys[0], "none", keys[1]], extra) == 1
    assert first.backend.batch_get_v1(keys, into, extra) == [True] * 197
    codec = Codec(fitted_to(layout()), "balanced")
    for page in (3, 130, 199):
        back = codec.decode(codec.encode(chunk.slice(page * 2, page * 2 + 2)))
        held = in_order(first.pool, into[(page - 3) * 2 :][:2])
        assert torch.equal(held[0].transpose(0, 1), torch.stack(back.keys)), page
    assert first.backend.counters()["saved_pages"] == 200
    whole, again = rank(None, page_tokens=2), first.alloc(1)
    assert whole.backend.batch_exists(hashes) == 0, "lossless never reads lossy pages"
    assert first.backend.batch_get_v1(hashes[:1], again) == [True], "its position need not be known to load it"


def fitted_path(folder: Path) -> str:
    """A profile of the model's layout, which names no weights."""
    fitted_to(layout()).save(folder / "fitted")
    return str(folder / "fitted")


def layout() -> KVLayout:
    from transformers import AutoConfig

    return KVLayout.from_config(AutoConfig.from_pretrained(bundled_model_path()), "bfloat16")


def test_the_figures_are_those_of_sglang(rank: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody asks for does not pile up: SGLang asks only if its metrics are on."""
    monkeypatch.setattr(real("cuvee.integrations.sglang.hicache"), "_MOST_MOVED", 3)
    r = rank()
    tokens, at = TOKENS[:64], r.alloc(4)
    r.back_up(tokens, at, [])
    r.prefetch(tokens, at)
    stats = r.backend.get_stats()
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([4], [4])
    assert min(stats.backup_bandwidth + stats.prefetch_bandwidth) > 0
    assert not vars(r.backend.get_stats())["prefetch_pgs"], "told once"
    counters = r.backend.counters()
    assert counters["saved_pages"] == counters["loaded_pages"] == 4
    assert counters["raw_bytes"] == r.pool.get_size_per_token() * 64 > counters["blob_bytes"]
    for _ in range(5):
        r.back_up(tokens, at, [])
    assert len(r.backend.get_stats().backup_pgs) == 3


def test_clearing_deletes_what_was_stored(rank: Callable[..., Rank]) -> None:
    r, other = rank(), rank({"tenant": "another"})
    tokens = TOKENS[:64]
    for each in (r, other):
        each.back_up(tokens, each.alloc(4), [])
    r.backend.clear()
    assert r.backend.batch_exists(r.hashes(tokens)) == 0 and not r.backend.exists(r.hashes(tokens)[0])
    assert other.backend.batch_exists(other.hashes(tokens)) == 4 and other.backend.exists(r.hashes(tokens)[0])


# Latents --------------------------------------------------------------------------------------------------------------


def latent_rank(latents: Latents, rank: Callable[..., Rank], extra: dict[str, Any], **config: Any) -> Rank:
    pool = latent_pool(
        "page_first", layers=latents.layout.num_layers, latent=latents.latent, rotated=latents.rotated, page_tokens=16,
        pages=8, dtype=torch.bfloat16,
    )  # fmt: skip
    return rank({"model": latents.path, **extra}, pool=pool, is_mla_model=True, **config)


@pytest.mark.parametrize(("latents", "passes_prefix"), [("deepseek_v2", True), (HALVES, False)], indirect=["latents"])
def test_lossy_latents_are_those_of_the_codec(
    latents: Latents, rank: Callable[..., Rank], tmp_path: Path, passes_prefix: bool
) -> None:
    def text(sequences: int, seed: int) -> torch.Tensor:
        return torch.randint(61, (sequences, 48), generator=torch.Generator().manual_seed(seed))

    profile = calibrate(latents.model, text(24, 1), "layer", more_text=text(48, 2), progress=False)
    profile.save(tmp_path / "profile.safetensors")
    options = {"profile": str(tmp_path / "profile.safetensors"), "step": 0.25}
    r = latent_rank(latents, rank, options)
    chunk, at = latents.chunk(), r.alloc(4)
    for layer in range(latents.layout.num_layers):
        r.pool.kv_buffer[at, layer] = latents.as_engines_keep_it(chunk, layer)
    assert r.back_up(TOKENS[:64], at, [] if passes_prefix else None) == 64
    counts = r.backend.counters()
    assert counts["recognized_pages"] == 4 and "failures{positions}" not in counts
    to = r.alloc(4)
    assert r.prefetch(TOKENS[:64], to, passes_prefix=passes_prefix) == 64
    codec = Codec(profile, step=0.25)
    back = KVChunk.concat([codec.decode(codec.encode(chunk.slice(at, at + 16))) for at in range(0, 64, 16)])
    for layer in range(latents.layout.num_layers):
        assert torch.equal(r.pool.kv_buffer[to, layer], latents.as_engines_keep_it(back, layer))


@pytest.mark.parametrize("latents", ["deepseek_v2"], indirect=True)
def test_other_latents_than_the_models_are_bytes(latents: Latents, rank: Callable[..., Rank]) -> None:
    sizes = {"layers": latents.layout.num_layers, "latent": latents.latent, "rotated": latents.rotated}
    for change in ({"layers": 3}, {"latent": 8}, {"rotated": 4}, {"latent": 64, "rotated": 64}):
        pool = latent_pool("page_first", **{**sizes, **change}, page_tokens=16, pages=4, dtype=torch.bfloat16)
        r = rank({"model": latents.path}, pool=pool, is_mla_model=True)
        assert r.back_up(TOKENS[:32], r.alloc(2), []) == 32
        assert r.backend.counters()["opaque_pages{kv}"] == 2
    pool = latent_pool("page_first", **sizes, page_tokens=16, pages=4, dtype=torch.bfloat16)
    pool.dsa_kv_cache_store_fp8 = True
    assert rank({"model": latents.path}, pool=pool, is_mla_model=True).backend._attached[1] is None


def test_keys_lie_as_sglang_rotates_them(latents: Latents) -> None:
    raw, positions = torch.randn(9, 1, latents.rotated), torch.arange(40, 49)
    rotary = real("sglang.srt.layers.rotary_embedding").RotaryEmbedding(
        latents.rotated, latents.rotated, 4096, 10000, not latents.adjacent, torch.float32
    )
    _, wanted = rotary.forward_native(positions, raw.clone(), raw.clone())
    sorts = latents.adjacent and not latents.rope.interleaved
    ours = rotate(torch.cat([raw[..., 0::2], raw[..., 1::2]], -1) if sorts else raw, latents.rope, positions)
    layers = latents.layout.num_layers
    layout = replace(latents.layout, dtype="float32")
    chunk = KVChunk([ours] * layers, [torch.zeros(9, 1, latents.latent)] * layers, layout)
    assert torch.allclose(latents.as_engines_keep_it(chunk, 0)[..., latents.latent :], wanted.view_as(ours), atol=1e-5)


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "options", "error", "message"),
    [
        ({"interface_v1": 0}, {}, InputError, "interface_v1: must be 1"),
        ({"stores": "x"}, {}, InputError, "hicache-storage-backend-extra-config: has no option 'stores'"),
        ({"model": 5}, {}, InputError, "model: must be a string"),
        ({"model": "/nowhere"}, {}, InputError, "model: must be a folder or hub id"),
        ({}, {"should_split_heads": True}, UnsupportedModelError, "tp_lcm_size"),
        ({}, {"arrangement": "page_unified"}, UnsupportedModelError, "use --hicache-mem-layout page_first_direct"),
    ],
)
def test_what_is_not_supported_fails_the_attach(
    rank: Callable[..., Rank], extra: dict[str, Any], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        rank(extra, **options)


# Bytes ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"pp_size": 2}, "pipeline parallelism"),
        ({"attn_cp_size": 2, "arrangement": "page_head"}, "context parallelism"),
        pytest.param(
            {"dtype": torch.float8_e5m2}, "got torch.float8_e5m2 in MHATokenToKVPoolHost",
            marks=pytest.mark.serves(cache="fp8_e5m2", where="classes"),
        ),
        ({"dtype": torch.uint8}, "got torch.uint8"),
        ({"layers": 5}, "must hold the model's 6 layers, got 5"),
        ({"heads": 3, "arrangement": "page_head"}, "must hold 2 heads of 64"),
        ({"heads": 2, "tp_size": 2}, "must hold 1 heads of 64"),
    ],
)  # fmt: skip
def test_pages_in_an_order_that_is_not_known_come_back_bit_for_bit(
    rank: Callable[..., Rank], caplog: pytest.LogCaptureFixture, options: dict[str, Any], reason: str
) -> None:
    """After a restart, counted by kind; and an engine that has them in another order does not find them."""
    options = {"arrangement": "layer_first", **options}
    r, tokens = rank(None, **options), TOKENS[: 5 * 16]
    assert "pages are stored as bytes, without loss" in caplog.text and reason in caplog.text
    at = r.alloc(5)
    wanted = [page.view(torch.uint8) for page in r.page_bytes(at)]
    assert r.back_up(tokens, at, []) == 5 * 16
    again = rank(None, **options)
    to = again.alloc(8)
    assert again.prefetch(TOKENS[: 8 * 16], to) == 5 * 16
    assert all(map(torch.equal, [page.view(torch.uint8) for page in again.page_bytes(to[: 5 * 16])], wanted))
    assert again.backend.counters()["opaque_pages{kv}"] == 5
    assert rank(None, **{**options, "arrangement": "page_first"}).backend.batch_exists(r.hashes(tokens)) == 0
    assert "contained" not in " ".join([*r.backend.counters(), *again.backend.counters()])


def test_a_forged_page_is_not_loaded(rank: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is decoded beside the pool, of which nothing changes."""
    store = DictStore()
    monkeypatch.setattr("cuvee.integrations.pages.opening.open_store", lambda urls: store)
    r = rank(None, arrangement="layer_first", dtype=torch.uint8)
    assert r.back_up(TOKENS[:32], r.alloc(2), []) == 32 and len(forge(store)) == 2
    to = r.alloc(2)
    before = [page.clone() for page in r.page_bytes(to)]
    assert r.prefetch(TOKENS[:32], to) == 0 and all(map(torch.equal, r.page_bytes(to), before))
    counters = r.backend.counters()
    assert counters["failures{decode}"] == 1 and not counters.get("loaded_pages")
    assert "contained" not in " ".join(counters)


def state_pool(slots: int = 8) -> Any:
    """SGLang's host pool of recurrent states: float32 states and bfloat16 convolutions."""
    info, mamba = pool_modules("mamba")
    device = info.MambaStateBufferInfo(
        temporal=torch.zeros(3, slots, 4, 16, 32), conv=(torch.zeros(3, slots, 96, 3, dtype=torch.bfloat16),)
    )
    pool = mamba.MambaPoolHost(device, 2.0, 0, device_capacity=slots, pin_memory=False, layout="page_first")
    for buffer in pool.kv_buffer:
        buffer.copy_(torch.randn(buffer.shape))
    return pool


def test_further_pools_bound_what_is_found(rank: Callable[..., Rank]) -> None:
    """By SGLang's rules: of windows and states the last pages must be there, of others all. States in float32, which no
    engine of tests has, come back bit for bit.
    """
    storage = real("sglang.srt.mem_cache.hicache_storage")
    names, rules, states = storage.PoolName, storage.PoolHitPolicy, state_pool()
    r, tokens = rank(), TOKENS[: 6 * 16]
    r.backend.register_mem_host_pool_v2(states, names.MAMBA)
    hashes, slots = r.hashes(tokens), torch.tensor([5, 2])
    assert r.back_up(tokens, r.alloc(6), []) == 6 * 16

    def transfer(pages: Sequence[int], indices: torch.Tensor | None, rule: Any = rules.TRAILING_PAGES) -> Any:
        return storage.PoolTransfer(names.MAMBA, indices, keys=[hashes[page] for page in pages], hit_policy=rule)

    def found(pages: Sequence[int], rule: Any = rules.TRAILING_PAGES) -> list[int]:
        result = r.backend.batch_exists_v2(hashes, [transfer(pages, None, rule)])
        assert result.kv_hit_pages == max(result.restorable_prefix_pages, default=0)
        return list(result.restorable_prefix_pages)

    assert found([0]) == []
    assert r.backend.batch_set_v2([transfer([2, 4], slots)]) == {names.MAMBA: [True] * 2}
    assert found([0]) == [3, 5] and found([0, 0]) == []
    assert r.backend.batch_set_v2([transfer([0, 1], slots)]) == {names.MAMBA: [True] * 2}
    assert found([0]) == [1, 2, 3, 5] and found([0, 0]) == [1, 2, 3]
    assert found([0], rules.ALL_PAGES) == [1, 2, 3] and found([0], rules.BLOCK_GROUPS) == []
    wanted = [states.get_data_page(int(slot)).clone() for slot in slots]
    for buffer in states.kv_buffer:
        buffer.zero_()
    assert r.backend.batch_get_v2([transfer([2, 4], slots)]) == {names.MAMBA: [True] * 2}
    assert all(map(torch.equal, [states.get_data_page(int(slot)) for slot in slots], wanted))
    assert r.backend.batch_get_v2([transfer([2], slots)]) == {names.MAMBA: [False]}, "indices of another number"
    assert "contained" not in " ".join(r.backend.counters())


@pytest.mark.parametrize("latents", ["deepseek_v2"], indirect=True)
def test_states_of_ranks_are_apart_where_latents_are_shared(latents: Latents, rank: Callable[..., Rank]) -> None:
    storage = real("sglang.srt.mem_cache.hicache_storage")
    ranks = [latent_rank(latents, rank, {}, tp_rank=number, tp_size=2) for number in range(2)]
    hashes, at = ranks[0].hashes(TOKENS[:64]), [each.alloc(4) for each in ranks]
    assert ranks[0].back_up(TOKENS[:64], at[0], []) == 64 == ranks[1].prefetch(TOKENS[:64], at[1])
    assert all(map(torch.equal, ranks[1].page_bytes(at[1]), ranks[0].page_bytes(at[0])))
    for each in ranks:
        each.backend.register_mem_host_pool_v2(state_pool(), storage.PoolName.MAMBA)
        each.backend.register_mem_host_pool_v2(state_pool(), storage.PoolName.INDEXER)
    for name in (storage.PoolName.MAMBA, storage.PoolName.INDEXER):
        ranks[0].backend.batch_set_v2([storage.PoolTransfer(name, torch.tensor([1]), keys=hashes[:1])])
        found = ranks[1].backend.batch_get_v2([storage.PoolTransfer(name, torch.tensor([1]), keys=hashes[:1])])
        assert found == {name: [name == storage.PoolName.INDEXER]}


def test_pages_that_lie_elsewhere_are_bytes(
    rank: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pool = host_pool("page_first", layers=LAYERS, heads=HEADS, dim=DIM, page_tokens=16, pages=4, dtype=torch.bfloat16)
    meta = pool.get_page_buffer_meta
    addresses, sizes = meta(torch.arange(16))
    for wrong in (None, [*addresses, *addresses, 1], [addresses[0] + 2, addresses[1]]):
        caplog.clear()
        told = (lambda at: meta(at - at[0])) if wrong is None else lambda at, wrong=wrong: (wrong, sizes)
        monkeypatch.setattr(pool, "get_page_buffer_meta", told)
        assert rank(None, pool=pool).backend._attached[1] is None
        assert re.search(r"bytes, .* host pool: must (hold page|give 2 regions)", caplog.text)


def test_the_model_is_what_the_engine_serves(rank: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights, and all that SGLang changes about them, are in the names of pages."""
    from msgspec.structs import force_setattr

    args = real("sglang.srt.server_args").ServerArgs(model_path=str(bundled_model_path()))
    monkeypatch.setattr("cuvee.integrations.sglang.served_model.get_server_args", lambda: args)
    by_option, tokens = rank(), TOKENS[:64]
    by_option.back_up(tokens, by_option.alloc(4), [])
    served = {"model": None}
    assert rank(served).backend.batch_exists(by_option.hashes(tokens)) == 4
    assert rank({**served, "model_id": "mine"}).backend.batch_exists(by_option.hashes(tokens)) == 0
    for name, value, found in (
        ("quantization", "fp8", 0), ("json_model_override_args", json.dumps({"rms_norm_eps": 0.5}), 0),
        ("kv_cache_dtype", "fp8_e5m2", 0), ("kv_cache_dtype", "bfloat16", 4), ("port", 7, 4),
    ):  # fmt: skip
        before = getattr(args, name)
        force_setattr(args, name, value)
        assert rank(served).backend.batch_exists(by_option.hashes(tokens)) == found, name
        force_setattr(args, name, before)
    force_setattr(args, "json_model_override_args", json.dumps({"num_key_value_heads": 4}))
    assert rank(served).backend._attached[1] is None, "its heads are not the pool's"

    def none() -> Any:
        raise ValueError("as SGLang says that it has published none")

    monkeypatch.setattr("cuvee.integrations.sglang.served_model.get_server_args", none)
    with pytest.raises(ValueError, match="it has published none"):
        rank({"model_id": "mine"})


def test_a_drafters_weights_are_in_the_names(
    rank: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """SGLang keeps the drafter's pages under the same names."""
    drafter = Path(shutil.copytree(bundled_model_path(), tmp_path / "drafter"))
    args = real("sglang.srt.server_args").ServerArgs(
        model_path=str(bundled_model_path()), speculative_draft_model_path=str(drafter)
    )
    monkeypatch.setattr("cuvee.integrations.sglang.served_model.get_server_args", lambda: args)
    made, tokens = rank({"model": None}), TOKENS[:64]
    made.back_up(tokens, made.alloc(4), [])
    assert rank({"model": None}).backend.batch_exists(made.hashes(tokens)) == 4
    weights = bytearray((drafter / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (drafter / "model.safetensors").write_bytes(weights)
    assert rank({"model": None}).backend.batch_exists(made.hashes(tokens)) == 0


# Weights that change ------------------------------------------------------------------------------------------------


class Weights:
    """SGLang's own class that updates weights, of a worker whose answers are given."""

    def __init__(self) -> None:
        name = "sglang.srt.managers.scheduler_components.weight_updater"
        self.manager = object.__new__(real(name).SchedulerWeightUpdaterManager)
        self.answer = True, "as told"
        worker = SimpleNamespace(
            update_weights_from_disk=lambda *given, **named: self.answer,
            update_weights_from_ipc=lambda *given: self.answer,
            update_weights_from_tensor=lambda **named: self.answer,
            begin_weight_update=lambda: None, end_weight_update=lambda run_post_load: None,
        )  # fmt: skip
        tp_worker = SimpleNamespace(
            weight_update_runners=lambda: [("target", SimpleNamespace(weight_updater=worker))],
            deserialize_own_rank=lambda tensors: [],
        )
        for field, value in {
            "tp_worker": tp_worker, "draft_worker": None, "metrics_collector": None,
            "flush_cache": lambda **named: self.flush(), "tp_cpu_group": None,
            "scheduler": SimpleNamespace(record_weight_version_change=lambda new_version: None), "_session": None,
        }.items():  # fmt: skip
            setattr(self.manager, field, value)
        # As the scheduler keeps them, before a backend is attached.
        self._held = {name: getattr(self.manager, name) for name in dir(self.manager) if "update" in name}

    def flush(self) -> bool:
        """As the scheduler does, by SGLang's controller, here without threads and pools."""
        controller = SimpleNamespace(
            write_queue=[], load_queue=[], ack_write_queue=[], ack_load_queue=[], enable_storage=False,
            storage_stop_event=Event(), _stop_storage_threads=lambda: None,
        )  # fmt: skip
        real("sglang.srt.managers.cache_controller").HiCacheController.reset(controller)
        return True

    def call(self, name: str, succeeds: bool = True, flushes: bool = True, version: str | None = None) -> None:
        self.answer = succeeds, "as told"
        request = SimpleNamespace(
            model_path="x", load_format=None, recapture_cuda_graph=False, weight_version=version, flush_cache=flushes,
            torch_empty_cache=False, selector="all", serialized_named_tensors=[],
        )  # fmt: skip
        with patch.object(torch.distributed, "barrier", lambda group: None):
            assert self._held[name](request).success is succeeds


def update(source: str, succeeds: bool = True, flushes: bool = True, version: str | None = None) -> None:
    Weights().call(f"update_weights_from_{source}", succeeds, flushes, version)


@pytest.mark.parametrize("how", [{"succeeds": False}, {"flushes": False}])
def test_nothing_is_stored_while_pages_may_be_of_other_weights(
    rank: Callable[..., Rank], how: dict[str, bool], caplog: pytest.LogCaptureFixture
) -> None:
    r = rank()
    at, tokens = r.alloc(4), TOKENS[:64]
    assert r.back_up(tokens, at, []) == 64
    update("disk", version="step 7", **how)
    assert r.backend.batch_exists(r.hashes(tokens)) == 0 == r.back_up(TOKENS[64:128], at, [])
    assert "flush its cache (POST /flush_cache), or restart" in caplog.text
    assert rank().backend.batch_exists(r.hashes(tokens)) == 4
    update("disk", version="step 8")
    assert r.back_up(TOKENS[64:128], at, []) == 64


def test_nothing_is_stored_while_a_session_of_updates_is_open(rank: Callable[..., Rank], tmp_path: Path) -> None:
    """Also where others write to the weights' memory, so that only a flush after the session counts. Other weights have
    a record of their own.
    """
    weights, records = Weights(), RecordStore(DiskStore(tmp_path / "store"))
    r = rank({"model_id": "run"})
    at, tokens = r.alloc(4), TOKENS[:64]
    names = r.hashes(tokens)
    assert r.back_up(tokens, at, []) == 64
    weights.call("begin_weight_update")
    assert r.backend.batch_exists(names) == 0 == r.back_up(tokens, at, [])
    weights.call("update_weights_from_tensor", version="step 7")
    assert r.backend.batch_exists(names) == 0 == r.back_up(tokens, at, []), "more may come"
    weights.call("end_weight_update")
    assert r.backend.batch_exists(names) == 0 and r.back_up(tokens[:32], at, []) == 32
    wait_until(lambda: len(records.read()[0]) == 2)
    other = rank({"model_id": "run"})
    update("disk", version="step 7")  # of both
    assert other.backend.batch_exists(names) == 2 == r.backend.batch_exists(names)
    weights.call("begin_weight_update")
    weights.flush()
    weights.call("end_weight_update")
    assert r.backend.batch_exists(names) == 0 == r.back_up(tokens, at, [])
    weights.flush()
    assert r.backend.batch_exists(names) == 0 and r.back_up(tokens, at, []) == 64
    assert other.backend.batch_exists(names) == 0, "nobody knows these weights"
    assert r.backend.counters()["weights_changed"] == 3


def test_weights_that_were_updated_before_a_backend_is_attached_are_not_the_files(
    rank: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, context = rank(), real("sglang.srt.runtime_context").get_context()
    made.back_up(TOKENS[:64], made.alloc(4), [])
    monkeypatch.setattr(context, "_overrides_log", [("scheduler.weight_version", {"weight_version": "step 7"})])
    assert rank().backend.batch_exists(made.hashes(TOKENS[:64])) == 0
    names = [rank({"model_id": "run"}).backend._pages("kv")._names.page(b"name") for _ in range(2)]
    assert names[0] != names[1], "there may have been an update without a version since"
    monkeypatch.undo()
    assert rank().backend.batch_exists(made.hashes(TOKENS[:64])) == 4
    weights = Weights()
    weights.call("begin_weight_update")
    weights.flush()
    attached = [rank({"model_id": "run"}, seen=True)]
    weights.call("end_weight_update")
    attached.append(rank({"model_id": "run"}, seen=True))
    at = attached[0].alloc(4)
    assert [each.back_up(TOKENS[:64], at, []) for each in attached] == [0, 0]
    weights.flush()
    attached.append(rank({"model_id": "run"}, seen=True))
    assert [each.back_up(TOKENS[:64], at, []) for each in attached] == [64, 64, 64]
    assert len({each.backend._pages("kv")._names.page(b"name") for each in attached}) == 3


def test_nothing_is_stored_if_files_changed_after_sglang_had_started(
    rank: Callable[..., Rank], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module, tokens = real("cuvee.integrations.sglang.hicache"), TOKENS[:64]
    assert 0 < time.time_ns() - module._started() < 3600e9, "seconds, and of this process"
    folder = str(shutil.copytree(bundled_model_path(), tmp_path / "copy"))
    made = rank({"model": folder}, started=lambda: time.time_ns() - 3600 * 10**9)
    assert made.back_up(tokens, made.alloc(4), []) == 0
    assert re.search(r"config.json changed after SGLang's start, .*: restart", caplog.text)
    for options in ({"model": folder}, {"model": folder, "model_id": "mine"}):
        made = rank(options)
        assert made.back_up(tokens, made.alloc(4), []) == 64


@pytest.mark.parametrize("field", ["download_dir", "SGLANG_USE_MODELSCOPE"])
def test_hub_ids_that_sglang_reads_from_elsewhere_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, field: str
) -> None:
    args = real("sglang.srt.server_args").ServerArgs(
        model_path="org/name", download_dir=str(tmp_path) if field == "download_dir" else None
    )
    monkeypatch.setenv("SGLANG_USE_MODELSCOPE", str(field != "download_dir"))
    served = real("cuvee.integrations.sglang.served_model").ServedModel
    with pytest.raises(InputError, match=f"^{field}: must not be set .* hub id org/name .* set option 'model_id'"):
        served("org/name", server_args=args).naming(None, torch.bfloat16)
    served("org/name", server_args=args).naming("mine", torch.bfloat16)
    served(str(bundled_model_path()), server_args=args).naming(None, torch.bfloat16)


def test_bytes_of_other_dtypes_have_other_descriptions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also codes of fp8, which ROCm's devices write in two ways under one name."""
    found, pool, other = set(), state_pool(), state_pool()
    other.conv_dtype = torch.float16
    for hip, dtype in ((None, "float8_e4m3fn"), ("7", "float8_e4m3fn"), ("7", "float8_e4m3fnuz")):
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(real("sglang.kernels.ops.quantization.fp8_kernel"), "fp8_dtype", getattr(torch, dtype))
        for each in (pool, other):
            made = real("cuvee.integrations.sglang.host_pool").OpaquePool("mamba", each, storage_config(pool, {}))
            found.add(made.description)
    assert len(found) == 6
