"""vLLM's own classes, which need no GPU: its tiering manager and primary tier, with our tier behind them.

    Engine      vLLM's scheduler side: OffloadingSpecFactory -> TieringOffloadingSpec -> manager, primary tier, our tier
    Worker      vLLM's worker, which copies the pages of a rank to the primary tier and back, by `cpu_copies`

`need_vllm`, as in `tests.integrations.vllm.engines`, skips tests where vLLM is not installed.
"""

from __future__ import annotations

import copy
import importlib
import itertools
import time
import uuid
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from tests.integrations.vllm_tier import cpu_copies
from tests.waiting import wait_until

from cuvee.calibration.bundled import bundled_model_path
from cuvee.codec.chunk import KVChunk
from cuvee.codec.layout import KVLayout

LAYERS, HEADS, DIM = 6, 2, 64  # of the bundled model
BLOCK, BLOCKS = 16, 2  # tokens per block, blocks per chunk
CHUNK = BLOCK * BLOCKS
MODEL = str(bundled_model_path())
TIER = {"type": "CuveeTier", "module_path": "cuvee.integrations.vllm_tier"}


def real(name: str) -> ModuleType:
    """Import one of vLLM's modules, or of ours that import them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about what it imports
        importlib.import_module("vllm.v1.kv_offload.tiering.spec")  # which vLLM imports late, with warnings
        return importlib.import_module(name)


def key_of(number: int, group: int = 0) -> bytes:
    made: bytes = real("vllm.v1.kv_offload.base").make_offload_key(number.to_bytes(32, "big"), group)
    return made


def values(number: int, layout: KVLayout, tokens: int = CHUNK) -> KVChunk:
    """Values of a chunk, which depend on its number: smooth, so that they compress."""
    generator = torch.Generator().manual_seed(number)

    def part(heads: int, dim: int) -> torch.Tensor:
        noise = torch.randn(tokens, heads, dim, generator=generator)
        return (noise + 3 * torch.arange(dim).sin()).to(layout.torch_dtype)

    units = [[part(layer.kv_heads, layer.head_dim) for layer in layout.layers] for _ in range(2)]
    return KVChunk(units[0], units[1], layout, 0)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Values as integers, which also tell NaNs and zeros apart."""
    return tensor.contiguous().view({1: torch.int8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def same(one: KVChunk | torch.Tensor, other: KVChunk | torch.Tensor) -> bool:
    """Whether two chunks hold the same bits."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other)
    pairs = zip((*one.keys, *one.values), (*other.keys, *other.values), strict=True)
    return all(torch.equal(bits(a), bits(b)) for a, b in pairs)


@cache
def engine_config() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return real("vllm.engine.arg_utils").EngineArgs(
            model=MODEL, dtype="bfloat16", block_size=BLOCK, enforce_eager=True, skip_tokenizer_init=True,
            max_model_len=512,
        ).create_engine_config()  # fmt: skip


def offloading_config(tier: dict[str, Any], **changes: Any) -> Any:
    """vLLM's description of an engine to its offloading, by default of one rank of the bundled model.

    Args:
        tier: options of our tier; those that are None are left out.
        changes: tp, layers, heads, dim, dtype, layout (of the cache), chunks, blocks, model; or any field of
            vLLM's dataclasses.
    """
    config = real("vllm.v1.kv_offload.config")
    given = {
        "tp": 1, "layers": LAYERS, "heads": HEADS, "dim": DIM, "dtype": "bfloat16", "layout": "LBNHC", "chunks": 24,
        "blocks": BLOCKS, "model": MODEL, "groups": 1, "pp_size": 1, "dcp_size": 1, "pcp_size": 1,
        "is_parallelism_agnostic": True, "replicated_layout": False, "canonical_layout": True, "extra": {}, **changes,
    }  # fmt: skip
    tp, size = given["tp"], {"bfloat16": 2, "float16": 2, "float32": 4}.get(given["dtype"], 1)
    own = max(1, given["heads"] // tp)
    block_bytes = given.get("block_bytes", given["layers"] * BLOCK * own * 2 * given["dim"] * size)
    row = -(-block_bytes * tp * given["blocks"] // 4096) * 4096
    extra = {
        "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": row * given["chunks"], "canonical_layout": True,
        "secondary_tiers": [{**TIER, **{name: value for name, value in tier.items() if value is not None}}],
        **given["extra"],
    }  # fmt: skip
    names = given.get("names", tuple(f"model.layers.{layer}.self_attn.attn" for layer in range(given["layers"])))
    return config.OffloadingConfig(
        groups=tuple(config.OffloadingGroupConfig(BLOCK, names, group) for group in range(given["groups"])),
        worker_kv_bytes_per_block=block_bytes,
        enable_kv_cache_events=False,
        extra_config=extra,
        engine_id=uuid.uuid4().hex,
        model=config.OffloadingModelConfig(given["model"], given["dtype"]),
        cache=config.OffloadingCacheConfig(BLOCK, given["blocks"]),
        parallel=config.OffloadingParallelConfig(
            rank=0, world_size=tp * given["pp_size"], tp_size=tp, pp_size=given["pp_size"], pcp_size=given["pcp_size"],
            dcp_size=given["dcp_size"], data_parallel_index=0, data_parallel_size=1, data_parallel_rank_local=None,
            is_parallelism_agnostic=given["is_parallelism_agnostic"],
        ),
        replicated_layout=given["replicated_layout"],
        canonical_layout=given["canonical_layout"],
        kv_cache_layout=given["layout"],
    )  # fmt: skip


class Engine:
    """vLLM's scheduler side with our tier, and what its scheduler and workers would do.

    Args:
        tier, changes: as in `offloading_config`; `engine` is vLLM's configuration, by default `engine_config`; `specs`
            are vLLM's, of the groups; `began`: the configuration was made before the checkpoint.

    Attributes:
        engine, config, spec, manager: of vLLM.
        tier: ours, made by its factory.
        layout: of the model; None if rows are bytes.
    """

    def __init__(self, tier: dict[str, Any], **changes: Any) -> None:
        # A tier finds it in the frame that makes it, as in vLLM's connector.
        vllm_config = changes.pop("engine") if "engine" in changes else copy.copy(engine_config())
        if vllm_config is not None and "model" in changes and not changes.pop("began", False):
            vllm_config.instance_id = str(time.time_ns())  # when it was made
        specs = changes.pop("specs", None)
        kv_cache_config = None
        if specs is not None:
            kv_cache_config = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=each) for each in specs])
        self.engine, self.caches = vllm_config, kv_cache_config
        self.config = offloading_config(tier, **changes)
        self.spec = real("vllm.v1.kv_offload.factory").OffloadingSpecFactory.create_spec(self.config)
        self.manager = self.spec.get_manager()
        (self.tier,) = self.manager.secondary_tiers
        self.base, self._requests, self._closed = real("vllm.v1.kv_offload.base"), 0, False
        self.layout: Any = None if self.cache is None else self.cache.layout
        self.view = torch.from_numpy(np.asarray(self.manager.primary_tier.get_kv_memoryview()))

    @property
    def cache(self) -> Any:
        """The tier's rows as keys and values; None if they are bytes. Kept nowhere: vLLM cannot release it then."""
        return getattr(self.tier._rows, "cache", None)

    def request(self) -> Any:
        self._requests += 1
        context = self.base.ReqContext(f"request {self._requests}")
        self.manager.on_new_request(context)
        return context

    def step(self) -> None:
        self.manager.on_schedule_end(self.base.ScheduleEndContext((), ()))

    def settle(self) -> None:
        def settled() -> bool:
            self.step()
            return not self.manager._jobs

        wait_until(settled)

    def key(self, number: int) -> bytes:
        """vLLM's name of a chunk: of each group in turn."""
        return key_of(number, number % len(self.config.groups))

    def chunk(self, row: int) -> Any:
        """What our view sees in a row."""
        if self.cache is None:
            return self.view[row, : self.tier._rows._memory.shape[1]].clone()
        return self.cache.read(self.tier._rows.slots([row]), 0)

    def fill(self, row: int, chunk: Any) -> None:
        """Write a chunk to a row through our view, which `test_views…` compares with vLLM's own copies."""
        if self.cache is None:
            self.view[row, : len(chunk)] = chunk
            return
        self.tier._rows.cache.write(chunk.keys, chunk.values, self.tier._rows.slots([row]))

    def offload(self, numbers: Sequence[int], chunks: Sequence[Any] | None = None) -> Any:
        """Offload chunks of a request, as the scheduler does; return the request."""
        context = self.request()
        prepared = self.manager.prepare_store([self.key(number) for number in numbers], context)
        assert prepared is not None
        if not prepared.keys_to_store:
            return context
        given = dict(zip([self.key(number) for number in numbers], chunks or map(self.values, numbers), strict=True))
        for key, row in zip(prepared.keys_to_store, prepared.store_spec.block_ids, strict=True):
            self.fill(int(row), given[key])
        self.manager.complete_store(prepared.keys_to_store, context, True)
        return context

    def values(self, number: int) -> Any:
        """Values of a chunk of this model; or its bytes."""
        if self.cache is None:
            size, generator = self.tier._rows._memory.shape[1], torch.Generator().manual_seed(number)
            return torch.randn(size // 2, generator=generator).to(torch.bfloat16).view(torch.int8)
        return values(number, self.layout, self.tier._tokens)

    def save(self, numbers: Sequence[int]) -> None:
        """Offload chunks, wait for the tier, and forget the chunks in the primary tier."""
        context = self.offload(numbers)
        self.settle()
        self.manager.on_request_finished(context)
        self.forget()

    def reset(self) -> None:
        """Empty the primary tier as the engine does: vLLM 0.33 promotes nothing before it calls `on_reset_flushed`."""
        self.manager.reset_cache()
        getattr(self.manager, "on_reset_flushed", lambda: None)()

    def forget(self) -> None:
        """Empty the primary tier. What is in it afterwards is not a number."""
        self.reset()
        self.view.fill_(-1)

    def lookup(self, numbers: Sequence[int], context: Any = None) -> int:
        """How many chunks, from the first on, the scheduler can load, once they are in the primary tier."""
        own = context or self.request()
        found = self.base.LookupResult

        def hits() -> int | None:
            count, deferred = 0, False
            for number in numbers:
                result = self.manager.lookup(self.key(number), own)
                if result is found.MISS:
                    break
                deferred |= result is not found.HIT
                count += 1
            self.step()
            return None if deferred else count

        until = time.monotonic() + 60
        while (count := hits()) is None:
            assert time.monotonic() < until, "timed out"
            time.sleep(0.002)
        if context is None:
            self.manager.on_request_finished(own)
        return count

    def load(self, numbers: Sequence[int], expected: Sequence[Any] | None = None) -> int:
        """Load chunks and compare them bit for bit; return how many, from the first on, were there."""
        count = self.lookup(numbers)
        if count:
            context = self.request()
            keys = [self.key(number) for number in numbers[:count]]
            rows = self.manager.prepare_load(keys, context).block_ids
            for number, row in zip(range(count), rows, strict=True):
                wanted = self.values(numbers[number]) if expected is None else expected[number]
                assert same(self.chunk(int(row)), wanted), numbers[number]
            self.manager.complete_load(keys, context)
            self.manager.on_request_finished(context)
        return count

    def jobs(self) -> Any:
        """Return what makes jobs, which the tier can be given without vLLM's manager."""
        base = real("vllm.v1.kv_offload.tiering.base")

        def job(number: int, keys: Sequence[int], rows: Sequence[int], promotion: bool) -> Any:
            names, own = [key_of(key) for key in keys], self.base.ReqContext("own")
            return base.TransferJob(number, names, np.array(rows, dtype=np.int32), promotion, own)

        return job

    @property
    def counters(self) -> dict[str, float]:
        found: dict[str, float] = self.tier.counters()
        return found

    def close(self) -> None:
        """End vLLM's manager, and with it our tier. May be called more than once."""
        if not self._closed:
            self._closed = True
            del self.view
            self.manager.shutdown()


class Worker:
    """A rank of an engine: its pages on the CPU, and vLLM's worker, which copies them to the primary tier and back.

    Attributes:
        pages: per layer `[blocks, heads, tokens, 2 * dim]`, strided as vLLM's cache of the layout is.
    """

    def __init__(self, engine: Engine, rank: int, blocks: int = 64) -> None:
        config, one = engine.config, engine.layout.layers[0]
        ranks = config.parallel.tp_size
        own = max(1, one.kv_heads // ranks)
        order = real("vllm.v1.kv_cache_layout").KVCacheLayout[config.kv_cache_layout].layer_view_order
        shape = blocks, own, BLOCK, 2 * one.head_dim
        inverse = [order.index(dimension) for dimension in range(4)]
        dtype = engine.layout.torch_dtype
        self.pages = [
            torch.zeros([shape[dimension] for dimension in order], dtype=dtype).permute(inverse)
            for _ in engine.layout.layers
        ]
        interface, base = real("vllm.v1.kv_cache_interface"), real("vllm.v1.kv_offload.base")
        spec = interface.FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=own, head_size=one.head_dim, dtype=dtype
        )  # fmt: skip
        (group,) = config.groups
        mapping = real("vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping")
        parallel = SimpleNamespace(
            tensor_parallel_size=ranks, world_size=ranks, rank=rank, prefill_context_parallel_size=1,
            decode_context_parallel_size=1, cp_kv_cache_interleave_size=1,
        )  # fmt: skip
        mappings = mapping.derive_canonical_mappings(
            SimpleNamespace(
                parallel_config=parallel, model_config=SimpleNamespace(get_total_num_kv_heads=lambda: one.kv_heads)
            ),
            SimpleNamespace(
                num_blocks=blocks,
                kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec, layer_names=list(group.layer_names))],
            ),
            dict(zip(group.layer_names, self.pages, strict=True)),
        )
        page = spec.page_size_bytes
        refs = [base.CanonicalKVCacheRef(at, page, mappings[name]) for at, name in enumerate(group.layer_names)]
        flat = [pages.permute(order).reshape(blocks, -1).view(torch.int8) for pages in self.pages]
        assert all(a.data_ptr() == b.data_ptr() for a, b in zip(flat, self.pages, strict=True)), "not copied"
        caches = base.CanonicalKVCaches([base.CanonicalKVCacheTensor(each, page) for each in flat], [refs])
        cpu_copies.install()
        own_config = replace(config, parallel=replace(config.parallel, rank=rank))
        self._spec = real("vllm.v1.kv_offload.factory").OffloadingSpecFactory.create_spec(own_config)
        self._worker = self._spec.get_worker(caches)
        assert self._spec.all_layers_portable
        self._jobs = itertools.count()

    def transfer(self, blocks: Sequence[int], rows: Sequence[int], *, store: bool) -> None:
        """Copy whole chunks of blocks to rows of the primary tier, or back."""
        pages = real("vllm.v1.kv_offload.base").GPULoadStoreSpec(list(blocks), (len(blocks),), (0,))
        chunks = real("vllm.v1.kv_offload.cpu.common").CPULoadStoreSpec(list(rows))
        job = next(self._jobs)
        if store:
            self._worker.submit_store(job, pages, chunks)
        else:
            self._worker.submit_load(job, chunks, pages)
        self._worker.wait({job})

    def close(self) -> None:
        """Leave the primary tier."""
        self._worker.shutdown()
