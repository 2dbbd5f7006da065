"""LMCache's own factory and copies, with our adapter behind them: on the CPU, without an engine."""

from __future__ import annotations

import json
import os
import random
import re
import select
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.integrations.identity.test_checkpoint import cached
from tests.integrations.latent_models import Latents
from tests.integrations.lmcache.real_lmcache import (
    CHUNK,
    DIM,
    HEADS,
    LAYERS,
    MODEL,
    NEED_LMCACHE,
    PARAMS,
    PLUGIN,
    layout_desc,
    make_adapter,
    object_key,
    real,
    values,
)
from tests.integrations.pages.forging import forge
from tests.integrations.stores.dict_store import DictStore, hold
from tests.integrations.vllm_tier.real_tiers import bits
from tests.waiting import PATIENCE, wait_until

from cuvee.codec.chunk import KVChunk
from cuvee.codec.errors import InputError, UnsupportedModelError
from cuvee.codec.layout import KVLayout, LayerLayout
from cuvee.integrations.core.refusals import check_uniform
from cuvee.integrations.identity.records import RecordStore
from cuvee.integrations.stores.base import Store
from cuvee.integrations.stores.disk import DiskStore

pytestmark = NEED_LMCACHE

SPLIT = (2, LAYERS, CHUNK, HEADS * DIM)
FUSED = (1, LAYERS, CHUNK, 2 * HEADS * DIM)


class Memory:
    """LMCache's memory objects, and an adapter made by its factory over a store that tests can break.

    Attributes:
        store: what the adapter writes to.
        adapter: ours.
    """

    def __init__(self, store: Store, params: dict[str, Any], monkeypatch: pytest.MonkeyPatch | None = None) -> None:
        self.store = store
        if monkeypatch is not None:
            monkeypatch.setattr("cuvee.integrations.pages.opening.open_store", lambda urls: store)
        self.adapter = make_adapter(params)

    @staticmethod
    def object(desc: Any, number: int | None = None) -> Any:
        """An object of LMCache's allocator for host memory: of a chunk's values, or of NaNs."""
        memory = real("lmcache.v1.memory_management")
        size = sum(shape.numel() * dtype.itemsize for shape, dtype in zip(desc.shapes, desc.dtypes, strict=True))
        metadata = memory.MemoryObjMetadata(
            shape=desc.shapes[0], dtype=desc.dtypes[0], address=0, phy_size=size, ref_count=1,
            fmt=memory.MemoryFormat.KV_2LTD, shapes=desc.shapes, dtypes=desc.dtypes,
        )  # fmt: skip
        made = memory.TensorMemoryObj(torch.full((size,), 255, dtype=torch.uint8), metadata, None)
        if number is not None:
            made.get_tensor(0).copy_(values(number, desc))
        return made

    def store_later(self, numbers: Sequence[int], desc: Any = None, **key: Any) -> int:
        desc = desc or layout_desc()
        keys = [object_key(number, **key) for number in numbers]
        return int(self.adapter.submit_store_task(keys, [self.object(desc, number) for number in numbers]))

    def stored(self, task: int) -> int:
        results: dict[int, int] = {}

        def done() -> bool:
            results.update(self.adapter.pop_completed_store_tasks())
            return task in results

        wait_until(done)
        return int(results[task])

    def save(self, numbers: Sequence[int], desc: Any = None, **key: Any) -> int:
        """Store chunks; return what LMCache is told of the task: bytes, or -1."""
        return self.stored(self.store_later(numbers, desc, **key))

    def found(self, numbers: Sequence[int], desc: Any = None, **key: Any) -> list[int]:
        """Look chunks up, which locks them; return those that were found."""
        keys = [object_key(number, **key) for number in numbers]
        task = self.adapter.submit_lookup_and_lock_task(keys, {keys[0].object_group_id: desc or layout_desc()})
        bitmap = result_of(lambda: self.adapter.query_lookup_and_lock_result(task))
        assert len(bitmap) == len(keys) and self.adapter.query_lookup_and_lock_result(task) is None
        return [numbers[index] for index in bitmap.get_indices_list()]

    def unlock(self, numbers: Sequence[int], **key: Any) -> None:
        self.adapter.submit_unlock([object_key(number, **key) for number in numbers])

    def load(self, numbers: Sequence[int], desc: Any = None, **key: Any) -> list[int]:
        """Load chunks and compare them bit for bit; return those that were loaded."""
        desc = desc or layout_desc()
        objects = [self.object(desc) for _ in numbers]
        task = self.adapter.submit_load_task([object_key(number, **key) for number in numbers], objects)
        bitmap = result_of(lambda: self.adapter.query_load_result(task))
        assert len(bitmap) == len(numbers) and self.adapter.query_load_result(task) is None
        loaded = [numbers[index] for index in bitmap.get_indices_list()]
        for number, memory in zip(numbers, objects, strict=True):
            if number in loaded:
                assert torch.equal(bits(memory.get_tensor(0)), bits(values(number, desc))), number
        return loaded

    def delete(self, numbers: Sequence[int], **key: Any) -> None:
        self.adapter.delete([object_key(number, **key) for number in numbers])
        wait_until(lambda: not self.adapter._deleting)

    @property
    def counters(self) -> dict[str, float]:
        counters: dict[str, float] = self.adapter.counters()
        return counters


def result_of(ask: Callable[[], Any]) -> Any:
    found: list[Any] = []

    def asked() -> bool:
        result = ask()
        if result is not None:
            found.append(result)
        return bool(found)

    wait_until(asked)
    return found[0]


@pytest.fixture
def store() -> DictStore:
    return DictStore()


@pytest.fixture
def memory(store: DictStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Memory]]:
    def make(params: dict[str, Any] | None = None, over: Store | None = None) -> Memory:
        given = {"load_timeout": PATIENCE, "lookup_timeout": PATIENCE, **(params or {})}
        made = Memory(over or store, given, monkeypatch)
        stack.callback(made.adapter.close)
        return made

    with ExitStack() as stack:
        yield make
        store.before = lambda operation: None


# LMCache's copies from the engine's cache -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["NL_X_TWO_NB_BS_NH_HS", "NL_X_NB_TWO_NH_BS_HS", "NL_X_NB_BS_NH_CS", "NL_X_NB_NH_BS_CS"]
)
def test_views_are_where_lmcache_copies_keys_and_values(name: str) -> None:
    """LMCache's own copy from vLLM's blocks to an object, read through our view, gives vLLM's keys and values."""
    native = real("lmcache.lmcache_native")
    if not hasattr(native.EngineKVFormat, name):
        pytest.skip("a format of newer versions")
    copies, types = real("lmcache.v1.platform.torch_ops.mp_mem_kernels"), real("lmcache.v1.platform.ops_types")
    block, blocks = 8, 10
    keys, vals = (torch.randn(LAYERS, blocks, block, HEADS, DIM).bfloat16() for _ in range(2))
    heads_first = "NH_BS" in name
    k, v = ((each.transpose(2, 3) if heads_first else each) for each in (keys, vals))
    fused = name.endswith("CS")
    both = torch.cat([k, v], dim=-1) if fused else torch.stack([k, v], dim=1 if "TWO_NB" in name else 2)
    desc = types.PageBufferShapeDesc()
    desc.kv_size, desc.nl, desc.nb, desc.bs, desc.nh = 1 if fused else 2, LAYERS, blocks, block, HEADS
    desc.hs, desc.element_size, desc.block_stride_elems = DIM * (2 if fused else 1), 2, 0
    desc.dtype = torch.bfloat16
    memory = Memory.object(layout_desc(FUSED if fused else SPLIT))
    order = [7, 2, 9, 4]
    copies.multi_layer_block_kv_transfer(
        [each.contiguous() for each in both], [memory.get_tensor(0)], order, "cpu",
        types.TransferDirection.D2H if hasattr(types, "TransferDirection") else native.TransferDirection.D2H,
        desc, CHUNK, getattr(native.EngineKVFormat, name), 0,
    )  # fmt: skip
    cache = real("cuvee.integrations.lmcache.memory_objects").object_cache(memory, layout(), CHUNK)
    chunk = cache.read(torch.arange(CHUNK), 0)
    for layer in range(LAYERS):
        assert torch.equal(chunk.keys[layer], keys[layer, order].reshape(CHUNK, HEADS, DIM))
        assert torch.equal(chunk.values[layer], vals[layer, order].reshape(CHUNK, HEADS, DIM))


def layout() -> KVLayout:
    return KVLayout("test", (LayerLayout(HEADS, DIM, DIM, None),) * LAYERS, "bfloat16", None)


# Latents --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("latents", ["deepseek_v3"], indirect=True)
@pytest.mark.serves(model="latents (MLA)", where="classes")
def test_latents_come_back_bit_for_bit(
    latents: Latents, memory: Callable[..., Memory], caplog: pytest.LogCaptureFixture
) -> None:
    """As bytes. LMCache lets one rank store them, and the ranks' keys differ."""
    m, of_rank = memory({**PARAMS, "model": latents.path}), {"rank": 1, "ranks": 2}
    desc = layout_desc((latents.layout.num_layers, CHUNK, latents.latent + latents.rotated))
    assert m.save([1, 2], desc, **of_rank) > 0 and m.load([1, 2, 3], desc, **of_rank) == [1, 2]
    assert m.counters["opaque_pages{bfloat16}"] == 4
    (said,) = [each.getMessage() for each in caplog.records if "stored as bytes" in each.getMessage()]
    assert "model: must keep keys and values of heads, got latents (MLA)" in said


# The interface --------------------------------------------------------------------------------------------------------


def test_closing_closes_the_descriptors(memory: Callable[..., Memory]) -> None:
    m = memory()
    fds = [m.adapter.get_store_event_fd(), m.adapter.get_lookup_and_lock_event_fd(), m.adapter.get_load_event_fd()]
    assert len(set(fds)) == 3
    assert m.adapter.report_status()["is_healthy"] is True
    m.adapter.close()
    m.adapter.close()
    assert m.adapter.report_status()["is_healthy"] is False
    for fd in fds:
        with pytest.raises(OSError):
            os.fstat(fd)


def test_descriptors_announce_results(memory: Callable[..., Memory]) -> None:
    m = memory()
    for get, submit in (
        (m.adapter.get_store_event_fd, lambda: m.store_later([1, 2])),
        (m.adapter.get_lookup_and_lock_event_fd, lambda: m.adapter.submit_lookup_and_lock_task([object_key(1)], {})),
        (m.adapter.get_load_event_fd, lambda: m.adapter.submit_load_task([], [])),
    ):
        poller = select.poll()
        poller.register(get(), select.POLLIN)
        assert not poller.poll(0)
        submit()
        assert poller.poll(60_000)
        real("lmcache.v1.platform").consume_fd(get())
        assert not poller.poll(0)


def test_what_lmcache_is_told_is_what_the_store_holds(memory: Callable[..., Memory], store: DictStore) -> None:
    told: list[tuple[str, Any, Any]] = []
    m = memory({"max_gb": 1e-3})
    m.adapter.register_listener(
        SimpleNamespace(
            on_l2_keys_stored=lambda keys, sizes: told.append(("stored", keys, sizes)),
            on_l2_keys_accessed=lambda keys: told.append(("accessed", keys, None)),
            on_l2_keys_deleted=lambda keys: told.append(("deleted", keys, None)),
        )
    )
    keys = [object_key(number) for number in range(4)]
    size = m.save(range(4))
    ((what, stored, sizes),) = told
    assert (what, stored, sum(sizes)) == ("stored", keys, size)
    assert size == sum(map(len, store.entries.values())) == m.adapter.get_usage().total_bytes_used
    assert sorted(sizes) == sorted(map(len, store.entries.values()))
    assert m.adapter.supports_global_eviction and m.adapter.get_usage().usage_fraction == size / 10**6
    assert m.save(range(4)) == 0 and len(told) == 1, "nothing was transferred"
    assert m.load([1, 9]) == [1] and told[1:] == [("accessed", [keys[1]], None)]
    m.delete([0, 1, 9])
    assert told[2] == ("deleted", [keys[0], keys[1], object_key(9)], None)
    assert m.adapter.get_usage().total_bytes_used == sum(map(len, store.entries.values())) > 0
    assert m.found(range(4)) == [2, 3]
    store.entries.clear()  # the store evicted them
    assert m.save([2]) > 0 and m.adapter.get_usage().total_bytes_used == sizes[2] + sizes[3], "not counted twice"
    assert m.save([4], cache_salt="alice") == m.adapter.get_usage().bytes_by_cache_salt["alice"] > 0


def test_locked_objects_are_not_deleted(memory: Callable[..., Memory]) -> None:
    m = memory()
    m.save(range(3))
    assert m.found([0, 1]) == [*m.found([0]), 1] == [0, 1]
    m.unlock([0])
    m.delete(range(3))
    assert m.found([0, 1, 2]) == [0, 1]
    m.unlock([0, 1])
    m.unlock([0, 1, 2])  # the last of them was never locked
    m.delete(range(3))
    assert m.found(range(3)) == [] and m.adapter.report_status()["locked_key_count"] == 0


def test_what_is_being_deleted_is_not_found(memory: Callable[..., Memory], store: DictStore) -> None:
    m = memory()
    m.save([1])
    held = hold(store, "delete")
    m.adapter.delete([object_key(1)])
    m.adapter.delete([object_key(1)])
    assert m.found([1]) == []
    held.set()
    wait_until(lambda: not m.adapter._deleting)
    assert store.calls.count("delete") == 2 and not store.entries, "once by each of its names: as bytes, and as keys"


def test_every_part_of_a_key_tells_objects_apart(memory: Callable[..., Memory]) -> None:
    m = memory()
    assert m.save([1]) > 0 and m.found([1]) == [1]
    for other in (
        {"chunk_hash": b"x" * 32}, {"cache_salt": "alice"}, {"rank": 1, "ranks": 2}, {"rank": 0, "ranks": 2},
        {"kv_rank": 0x02000200},
    ):  # fmt: skip
        assert m.found([1], **other) == [], other


@pytest.mark.serves(where="classes")
@pytest.mark.serves(parallel="tensor parallelism", where="classes")
def test_ranks_keep_their_own_heads(memory: Callable[..., Memory], store: DictStore) -> None:
    m, desc = memory(), layout_desc(ranks=2)
    for rank in range(2):
        assert m.save([rank], desc, rank=rank, ranks=2, chunk_hash=b"same") > 0
    assert len(store.entries) == 2
    for rank in range(2):
        assert m.load([rank], desc, rank=rank, ranks=2, chunk_hash=b"same") == [rank]


@pytest.mark.parametrize("shape", [None, (1, LAYERS, CHUNK, DIM * 2), (3, 1000)])
def test_ranks_of_several_servers_keep_their_own_heads(
    memory: Callable[..., Memory], shape: tuple[int, ...] | None
) -> None:
    """LMCache numbers the ranks of every server from 0: each of these two has a rank 0 of 1."""
    desc, key = layout_desc(shape, ranks=2), {"chunk_hash": b"same"}
    servers = [memory({"servers": 2, "server_index": index}) for index in range(2)]
    for number, m in enumerate(servers):
        assert m.found([number], desc, **key) == [] and m.save([number], desc, **key) > 0
    for number, m in enumerate(servers):
        assert m.found([number], desc, **key) == [number] == m.load([number], desc, **key)
    assert memory().found([0], desc, **key) == [] == memory({"servers": 3}).found([0], desc, **key)


@pytest.mark.parametrize("shape", [(2, LAYERS, CHUNK, DIM), (1, LAYERS, CHUNK, 2 * DIM), (LAYERS, CHUNK, 2 * DIM)])
def test_objects_with_heads_of_a_server_among_several_are_refused(
    memory: Callable[..., Memory], caplog: pytest.LogCaptureFixture, shape: tuple[int, ...]
) -> None:
    for dtype in (torch.bfloat16, torch.uint8):
        m, desc = memory(), layout_desc(shape, dtype)
        caplog.clear()
        assert m.save([1], desc) == -1 and m.load([1], desc) == []
        assert "must hold 2 heads among 1 ranks, got 1: if an engine's ranks" in caplog.text
        assert m.counters["refused_pages"] == 2 and m.save([1], desc, rank=1, ranks=2) > 0


def test_a_revision_of_a_hub_id_names_its_own_weights(
    memory: Callable[..., Memory], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is what the layout is read from, and what the records of both say."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    config = json.loads((Path(MODEL) / "config.json").read_text())
    for revision, changes in (("main", {}), ("tuned", {"rms_norm_eps": 0.5}), ("wide", {"num_key_value_heads": 4})):
        folder = shutil.copytree(MODEL, tmp_path / revision)
        (folder / "config.json").write_text(json.dumps({**config, **changes}))
        cached(tmp_path, folder, revision)
    disk = DiskStore(tmp_path / "store")
    main, same, tuned, wide = (
        memory({"model": "org/name", "revision": each}, over=disk) for each in (None, "main", "tuned", "wide")
    )
    assert main.save([1]) > 0 and main.found([1]) == [1] == same.found([1]) and tuned.found([1]) == []
    desc = layout_desc((2, LAYERS, CHUNK, 4 * DIM))
    assert wide.save([1], desc) > 0 and not any("opaque" in name for name in wide.counters)
    assert tuned.save([1]) > 0
    wait_until(lambda: len(RecordStore(disk).read()[0]) == 3)
    assert {each.about.get("revision") for each in RecordStore(disk).read()[0]} >= {"tuned", "wide"}


def test_many_tasks_at_once(memory: Callable[..., Memory]) -> None:
    """Threads store, look up, load and delete the same chunks; whatever is loaded is right."""
    m = memory()

    def work(seed: int) -> None:
        generator = random.Random(seed)
        for _ in range(6):
            numbers = generator.sample(range(12), 4)
            salt = generator.choice(["", "alice"])
            if generator.random() < 0.5:
                m.adapter.submit_store_task(
                    [object_key(number, cache_salt=salt) for number in numbers],
                    [m.object(layout_desc(), number) for number in numbers],
                )
            found = m.found(numbers, cache_salt=salt)
            m.load(numbers, cache_salt=salt)
            m.unlock(found, cache_salt=salt)
            m.adapter.delete([object_key(generator.randrange(12), cache_salt=salt)])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    wait_until(lambda: not m.adapter._deleting)
    assert m.adapter.report_status()["locked_key_count"] == 0
    assert not any(name.startswith("contained") for name in m.counters)


# What goes wrong ------------------------------------------------------------------------------------------------------


def test_results_that_come_after_the_end_are_dropped() -> None:
    results = real("cuvee.integrations.lmcache.l2_tasks").Results()
    results.put(1, "in time")
    results.close()
    results.put(2, "late")
    assert results.take_all() == {1: "in time"}


def test_a_listener_that_fails_does_not_lose_the_task(memory: Callable[..., Memory]) -> None:
    m = memory()

    def fail(*_: Any) -> None:
        raise ZeroDivisionError("planted")

    m.adapter.register_listener(
        SimpleNamespace(on_l2_keys_stored=fail, on_l2_keys_accessed=fail, on_l2_keys_deleted=fail)
    )
    assert m.save([1]) > 0 and m.load([1]) == [1]
    m.delete([1])
    assert {"contained{stored}", "contained{loaded}", "contained{deleted}"} <= m.counters.keys()


def test_lists_of_other_lengths_fail_the_task(memory: Callable[..., Memory]) -> None:
    m = memory()
    keys = [object_key(1), object_key(2)]
    assert m.stored(m.adapter.submit_store_task(keys, [m.object(layout_desc(), 1)])) == -1
    task = m.adapter.submit_load_task(keys, [m.object(layout_desc())])
    assert result_of(lambda: m.adapter.query_load_result(task)).popcount() == 0


def test_the_oldest_objects_are_forgotten_if_there_are_too_many(
    memory: Callable[..., Memory], store: DictStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMCache counts them no more. The store, which others may share, keeps them, and they can be loaded."""
    monkeypatch.setattr(real(PLUGIN["module_path"]), "_ACCOUNTED", 3)
    m = memory()
    m.save([1])
    m.save([2, 3])
    gone: list[Any] = []
    m.adapter.register_listener(
        SimpleNamespace(
            on_l2_keys_stored=lambda *_: None,
            on_l2_keys_accessed=lambda *_: None,
            on_l2_keys_deleted=lambda keys, *_: gone.extend(keys),
        )
    )
    m.save([4])
    assert gone == [object_key(1)] and m.adapter.report_status()["stored_object_count"] == 3
    assert not m.adapter._deleting and len(store.entries) == 4
    assert m.load([1]) == [1] and m.found([1, 2, 3, 4]) == [1, 2, 3, 4]


def split_values(chunk: KVChunk) -> torch.Tensor:
    """A chunk as LMCache keeps keys and values apart, `[2, layers, tokens, heads * dim]`."""
    return torch.stack([torch.stack([own.flatten(1) for own in unit]) for unit in (chunk.keys, chunk.values)])


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        ({"model": None}, InputError, "model: must be the folder or hub id"),
        ({"model": "/nowhere"}, InputError, "model: must be a folder or hub id"),
        ({"stores": "x"}, InputError, "adapter_params: has no option 'stores'"),
        ({"dtype": "float8"}, InputError, "dtype: must be one of bfloat16"),
        ({"max_gb": 0}, InputError, "max_gb: must be a number above 0"),
        ({"max_pending_gb": 0}, InputError, "max_pending_gb: must be a number above 0"),
        ({"server_index": 1}, InputError, r"server_index: must be below servers \(1\), got 1: set servers to"),
        ({"model_name": ""}, InputError, "model_name: must be a string that is not empty"),
    ],
)
def test_what_is_not_supported_fails_the_start(params: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make_adapter(params)


def test_models_that_need_several_shapes_are_refused() -> None:
    one = LayerLayout(2, 8, 8, None)
    check_uniform(KVLayout("m", (one, one), "bfloat16", None))
    for other in (LayerLayout(1, 8, 8, None), LayerLayout(2, 16, 16, None), LayerLayout(2, 8, 4, None)):
        with pytest.raises(UnsupportedModelError, match=r"model: must have 2 heads of 8 .* in layer 1"):
            check_uniform(KVLayout("m", (one, other), "bfloat16", None))


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        (
            (2, LAYERS, CHUNK // 2, HEADS * DIM),
            {},
            "must hold 32 tokens, got .*: set chunk_tokens to LMCache's --chunk-size",
        ),
        (
            (2, LAYERS - 1, CHUNK, HEADS * DIM),
            {},
            r"must be \[2, 6, 32, 128\] or .*, as the model's configuration says",
        ),
        ((1, LAYERS, CHUNK, 576), {}, "as the model's configuration says"),  # MLA
        ((LAYERS, CHUNK, 576), {}, "as the model's configuration says"),
        ((7,), {}, "as the model's configuration says"),
        (SPLIT, {"dtype": torch.float16}, "must hold bfloat16, got torch.float16: set the adapter's option 'dtype'"),
        pytest.param(
            SPLIT, {"dtype": torch.float8_e4m3fn}, "must hold bfloat16, got torch.float8_e4m3fn",
            marks=pytest.mark.serves(cache="fp8_e4m3", where="classes"),
        ),
    ],
)  # fmt: skip
def test_objects_in_an_order_that_is_not_known_come_back_bit_for_bit(
    memory: Callable[..., Memory], caplog: pytest.LogCaptureFixture, shape: tuple[int, ...], options: dict[str, Any],
    message: str,
) -> None:  # fmt: skip
    """After a restart, too; and are deleted."""
    m, desc = memory(), layout_desc(shape, **options)
    caplog.clear()
    assert m.save([1, 2], desc) > 0
    (record,) = [each for each in caplog.records if each.levelname == "WARNING" and "cuvee" in each.getMessage()]
    assert re.search(message, record.getMessage()), record.getMessage()
    again = memory()
    assert again.found([1, 2, 3], desc) == [1, 2] == again.load([1, 2, 3], desc)
    again.unlock([1, 2])
    assert sum(again.counters[name] for name in again.counters if name.startswith("opaque_pages")) == 2
    again.delete([1])
    assert again.found([1, 2], desc) == [2] and "contained" not in " ".join(again.counters)


def test_a_forged_object_is_not_loaded(memory: Callable[..., Memory], store: DictStore) -> None:
    """It may have written a part of the object's memory before it was refused."""
    m, desc = memory(), layout_desc(SPLIT, dtype=torch.float16)
    assert m.save([1, 2], desc) > 0 and len(forge(store)) == 2
    assert m.load([1, 2], desc) == [] and m.counters["failures{decode}"] == 2 and "loaded_pages" not in m.counters
    assert m.found([1, 2], desc) == [] and "contained" not in " ".join(m.counters)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        pytest.param(
            {"object_group_id": 1}, "object_group_id: must be 0 of keys and values, got 1",
            marks=[
                pytest.mark.serves(model="sliding windows", where="classes"),
                pytest.mark.serves(model="recurrent layers", where="classes"),
            ],
        ),
        ({"rank": 0, "ranks": 3}, "kv_rank: must be one of tensor parallelism, got 0x3000300: size"),
        ({"kv_rank": 0}, "kv_rank: must be one of tensor parallelism, got 0x0"),
    ],
)  # fmt: skip
def test_keys_that_tell_no_order_are_those_of_bytes(
    memory: Callable[..., Memory], caplog: pytest.LogCaptureFixture, key: dict[str, Any], message: str
) -> None:
    m, desc = memory(), layout_desc((3, 1000), torch.float32)
    assert m.found([1], desc, **key) == [] and m.save([1], desc, **key) > 0 and message in caplog.text
    assert m.found([1], desc, **key) == [1] == m.load([1], desc, **key)
    assert m.found([1], desc) == [] == m.load([1], layout_desc((3, 1001), torch.float32), **key)


def test_objects_of_several_dtypes_come_back_bit_for_bit(memory: Callable[..., Memory]) -> None:
    """As those of quantized caches with their scales."""
    api = real("lmcache.v1.distributed.api")
    shapes, dtypes = [(6, 32, 256), (6, 32, 2), (7,)], [torch.uint8, torch.float32, torch.float8_e4m3fn]
    desc = api.MemoryLayoutDesc([torch.Size(each) for each in shapes], dtypes)
    m, stored, loaded = memory(), Memory.object(desc), Memory.object(desc)
    stored.raw_data.copy_(torch.randint(0, 256, stored.raw_data.shape, dtype=torch.uint8))
    assert m.stored(m.adapter.submit_store_task([object_key(1)], [stored])) > 0
    task = m.adapter.submit_load_task([object_key(1)], [loaded])
    assert result_of(lambda: m.adapter.query_load_result(task)).popcount() == 1
    assert torch.equal(stored.raw_data, loaded.raw_data)


def test_objects_of_several_tensors_or_other_formats_are_no_keys_and_values(memory: Callable[..., Memory]) -> None:
    view = real("cuvee.integrations.lmcache.memory_objects").object_cache
    api, management = real("lmcache.v1.distributed.api"), real("lmcache.v1.memory_management")
    two = api.MemoryLayoutDesc([torch.Size(SPLIT)] * 2, [torch.bfloat16] * 2)
    with pytest.raises(UnsupportedModelError, match="must hold one tensor, got 2"):
        view(Memory.object(two), layout(), CHUNK)
    odd = Memory.object(layout_desc())
    odd.meta.fmt = management.MemoryFormat.KV_MLA_FMT
    with pytest.raises(UnsupportedModelError, match="must have a format of UNDEFINED, KV_2LTD, got KV_MLA_FMT"):
        view(odd, layout(), CHUNK)
    narrow = Memory.object(layout_desc())
    narrow.set_used_size(100)
    with pytest.raises(UnsupportedModelError, match=r"must be all of a tensor in host memory, got .* of 100 bytes"):
        view(narrow, layout(), CHUNK)
    gone = Memory.object(layout_desc())
    gone.invalidate()
    with pytest.raises(UnsupportedModelError, match="must be all of a tensor in host memory"):
        view(gone, layout(), CHUNK)


def test_objects_of_another_model_are_refused_by_name(
    memory: Callable[..., Memory], caplog: pytest.LogCaptureFixture
) -> None:
    m, key = memory(), {"model_name": "another"}
    caplog.clear()
    assert m.found([1], **key) == [] and not caplog.records
    assert m.save([1], **key) == -1
    assert "model_name: must be 'served', got objects of 'another'" in caplog.text
    assert m.load([1], **key) == [] and m.counters == {"refused_pages": 2}


def test_the_engines_name_of_the_model_is_its_path(memory: Callable[..., Memory]) -> None:
    assert memory({**PARAMS, "model_name": None}).save([1], model_name=PARAMS["model"]) > 0
