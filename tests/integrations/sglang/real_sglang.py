"""SGLang's own classes, imported without the packages of pictures and kernels that a host without a GPU lacks.

`need_sglang` skips a module's tests where SGLang is not installed, unless CUVEE_REQUIRE_SGLANG=1. The Makefile installs
it without its dependencies.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import os
import sys
import warnings
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from tests.integrations.vllm_tier.real_tiers import wait_for

need_sglang = pytest.mark.skipif(
    importlib.util.find_spec("sglang") is None and os.environ.get("CUVEE_REQUIRE_SGLANG") != "1",
    reason="SGLang is not installed",
)

# Imported by SGLang at the top of modules whose functions are not called here.
_ABSENT = (
    "torchvision", "torchvision.io", "torchvision.transforms", "torchvision.transforms.v2",
    "torchvision.transforms.functional", "sentencepiece",
)  # fmt: skip


@contextmanager
def _absent_packages() -> Iterator[None]:
    """Let stand-ins of absent packages be imported, and remove them afterwards."""
    importlib.import_module("transformers.utils").is_torchvision_available()  # transformers remembers the truth
    importlib.import_module("transformers").AutoProcessor  # noqa: B018 - imports it before there are stand-ins
    packages = {name.partition(".")[0] for name in _ABSENT}
    absent = {package for package in packages if importlib.util.find_spec(package) is None}
    made = [name for name in _ABSENT if name.partition(".")[0] in absent]
    for name in made:
        module = MagicMock(name=name)
        module.__spec__, module.__path__, module.__name__ = ModuleSpec(name, None), [], name
        sys.modules[name] = module
    try:
        yield
    finally:
        for name in made:
            del sys.modules[name]


def real(name: str) -> ModuleType:
    """Import one of SGLang's modules."""
    with _absent_packages(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about kernels that need a GPU
        return importlib.import_module(name)


def page_hash() -> Callable[[list[int], None, int], list[str]]:
    """Return SGLang's function from token ids and tokens per page to the hashes of pages."""
    found: Callable[[list[int], None, int], list[str]] = real("sglang.srt.mem_cache.utils").get_hash_str
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what compiles its extension, once per process
        found([1, 2], None, 1)
    return found


def host_pool(
    arrangement: str, *, layers: int, heads: int, dim: int, page_tokens: int, pages: int, dtype: torch.dtype
) -> Any:
    """Return SGLang's host pool of a device pool of half its size, filled with random numbers.

    Args:
        arrangement: `--hicache-mem-layout`.
        layers, heads, dim: of the cache.
        page_tokens: tokens per page.
        pages: pages of the device's pool.
        dtype: of the cache.
    """
    info, mha = real("sglang.srt.mem_cache.device_pool_info"), real("sglang.srt.mem_cache.pool_host.mha")
    tokens = pages * page_tokens
    keys, values = ([torch.zeros(tokens, heads, dim, dtype=dtype) for _ in range(layers)] for _ in range(2))
    addresses = [torch.tensor([each.data_ptr() for each in unit], dtype=torch.uint64) for unit in (keys, values)]
    buffers = info.KVBuffers(
        k=tuple(keys), v=tuple(values), k_data_ptrs=addresses[0], v_data_ptrs=addresses[1],
        layout=info.KVBufferLayout.NHD,
    )  # fmt: skip
    device = info.MHABufferInfo(
        buffers=buffers, page_size=page_tokens, head_num=heads, head_dim=dim, v_head_dim=dim, dtype=dtype,
        device=torch.device("cpu"),
    )  # fmt: skip
    pool = mha.MHATokenToKVPoolHost(
        device, 2.0, 0, page_tokens, arrangement, pin_memory=False, device="cpu", device_capacity_tokens=tokens,
        start_layer=0, end_layer=layers,
    )  # fmt: skip
    pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape))
    return pool


def latent_pool(
    arrangement: str, *, layers: int, latent: int, rotated: int, page_tokens: int, pages: int, dtype: torch.dtype
) -> Any:
    """Return SGLang's host pool of a device pool of latents of half its size, filled with random numbers.

    Args:
        arrangement: `--hicache-mem-layout`.
        layers: of the cache.
        latent, rotated: numbers per token.
        page_tokens: tokens per page.
        pages: pages of the device's pool.
        dtype: of the cache.
    """
    info, mla = real("sglang.srt.mem_cache.device_pool_info"), real("sglang.srt.mem_cache.pool_host.mla")
    tokens, width = pages * page_tokens, latent + rotated
    buffers = tuple(torch.zeros(tokens, 1, width, dtype=dtype) for _ in range(layers))
    device = info.MLABufferInfo(
        buffers=buffers, data_ptrs=torch.tensor([each.data_ptr() for each in buffers], dtype=torch.uint64),
        layer_indices=tuple(range(layers)), device_layer_num=layers, page_size=page_tokens, kv_lora_rank=latent,
        qk_rope_head_dim=rotated, kv_cache_dim=width, dtype=dtype, device=torch.device("cpu"),
    )  # fmt: skip
    pool = mla.MLATokenToKVPoolHost(
        device, 2.0, 0, page_tokens, arrangement, pin_memory=False, device="cpu", device_capacity_tokens=tokens,
        start_layer=0, end_layer=layers, target_layer_num=layers,
    )  # fmt: skip
    pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape))
    return pool


def storage_config(pool: Any, extra: dict[str, Any], **changes: Any) -> Any:
    """Return SGLang's `HiCacheStorageConfig`."""
    storage = real("sglang.srt.mem_cache.hicache_storage")
    given = {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1,
        "is_mla_model": False, "enable_storage_metrics": False,
        "is_page_first_layout": pool.layout != "layer_first", "model_name": "served", **changes,
    }  # fmt: skip
    return storage.HiCacheStorageConfig(extra_config=extra, **given)


def device_pool(*, layers: int, heads: int, dim: int, page_tokens: int, pages: int, dtype: torch.dtype) -> Any:
    """Return SGLang's device pool, on the CPU, filled with random numbers; it has one page more than `pages`."""
    pool = real("sglang.srt.mem_cache.memory_pool").MHATokenToKVPool(
        size=pages * page_tokens, page_size=page_tokens, dtype=dtype, head_num=heads, head_dim=dim, layer_num=layers,
        device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.copy_(torch.randn(buffer.shape))
    return pool


def latent_device_pool(
    *, layers: int, latent: int, rotated: int, page_tokens: int, pages: int, dtype: torch.dtype
) -> Any:
    """Return SGLang's device pool of latents, on the CPU, filled with random numbers."""
    pool = real("sglang.srt.mem_cache.memory_pool").MLATokenToKVPool(
        size=pages * page_tokens, page_size=page_tokens, dtype=dtype, kv_lora_rank=latent, qk_rope_head_dim=rotated,
        layer_num=layers, device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    for buffer in pool.kv_buffer:
        buffer.copy_(torch.randn(buffer.shape))
    return pool


class PrefixCache:
    """SGLang's prefix cache over a device pool, with our linker made by its factory, and what its scheduler calls.

    Needs SGLang's arguments to be published (`published_arguments`).

    Attributes:
        pool: of SGLang.
        cache: SGLang's `UnifiedRadixCache`.
        linker: ours.
    """

    def __init__(self, pool: Any, extra: dict[str, Any], components: set[Any] | None = None, **params: Any) -> None:
        names = {name: real(f"sglang.srt.mem_cache.{name}") for name in (
            "memory_pool", "allocator", "unified_radix_cache", "cache_init_params", "base_prefix_cache", "radix_cache",
        )}  # fmt: skip
        factory = real("sglang.srt.mem_cache.unified_cache.linker_factory")
        kinds = real("sglang.srt.mem_cache.unified_cache.component_type").ComponentType
        self._types, self._key = names["base_prefix_cache"], names["radix_cache"].RadixKey
        self.pool, self._requests = pool, itertools.count()
        self.allocator = names["allocator"].PagedTokenToKVPoolAllocator(
            pool.size, pool.page_size, pool.dtype, "cpu", pool, need_sort=False
        )
        arguments = names["cache_init_params"].CacheInitParams(
            disable=False, req_to_token_pool=names["memory_pool"].ReqToTokenPool(
                size=8, max_context_len=pool.size, device="cpu", enable_memory_saver=False
            ),
            token_to_kv_pool_allocator=self.allocator, page_size=pool.page_size, tree_components=(kinds.FULL,),
        )  # fmt: skip
        self.cache = names["unified_radix_cache"].UnifiedRadixCache(arguments)
        for name, value in params.items():
            setattr(arguments, name, value)
        self.linker = factory.create_unified_cache_linker(
            SimpleNamespace(model_path="served", dcp_size=1), arguments, backend="dynamic",
            config={
                "linker": "CuveeLinker", "linker_module_path": "cuvee.integrations.sglang.linker",
                "linker_extra_config": extra,
            },
            components=components or set(self.cache.components),
        )  # fmt: skip
        self.cache.init_cache_linker(self.linker)
        pool.register_layer_transfer_counter(self.linker.layer_done_counter)

    def alloc(self, pages: int) -> torch.Tensor:
        """Slots of free pages, not in order."""
        taken = self.allocator.alloc(pages * self.pool.page_size).view(pages, -1)
        return torch.as_tensor(taken[torch.randperm(pages, generator=torch.Generator().manual_seed(pages))].flatten())

    def values(self, slots: torch.Tensor) -> list[torch.Tensor]:
        """Copies of what the pool holds there."""
        pool = self.pool
        buffers = pool.kv_buffer if hasattr(pool, "kv_buffer") else (*pool.k_buffer, *pool.v_buffer)
        return [buffer[slots].clone() for buffer in buffers]

    def insert(self, tokens: Sequence[int], slots: torch.Tensor) -> None:
        """Insert computed tokens, whose pages SGLang then offloads."""
        self.cache.insert(self._types.InsertParams(key=self._key(array("q", tokens)), value=slots))

    def settle(self) -> None:
        """Wait until all offloads are completed, as SGLang polls for them."""
        wait_for(lambda: (self.cache.check_hicache_events(), not self.cache.linker.pending_offloads)[1])

    def forget(self) -> None:
        """Evict everything from the device."""
        self.cache.reset()
        self.allocator.clear()

    def match(self, tokens: Sequence[int], rid: str | None = None) -> tuple[Any, Any]:
        """Look a request up; return it, and SGLang's result."""
        request = SimpleNamespace(
            rid=rid or f"request {next(self._requests)}", kv=None, swa_branching_seqlen=None, session=None
        )
        key = self._key(array("q", tokens))
        result = self.cache.match_prefix(self._types.MatchPrefixParams(key=key, req=request))
        request.last_node = result.last_device_node
        return request, result

    def queue(self, request: Any, result: Any) -> torch.Tensor | None:
        """Queue the load of what was found; return the slots that it gets, None if there is none."""
        if not result.host_hit_length:
            return None
        params = self._types.InitLoadBackParams(
            best_match_node=result.best_match_node, host_hit_length=result.host_hit_length, req=request
        )
        tokens, _ = self.cache.init_load_back(params)
        return self.cache.linker.private_load_indices[request.rid] if tokens else None

    def run(self, requests: Sequence[Any]) -> list[Any]:
        """Start the queued loads, wait for each layer as a forward does, and return the requests that SGLang aborts."""
        counter = self.linker.layer_done_counter
        counter.set_consumer(self.cache.ready_to_load_host_cache())
        for layer in range(self.pool.layer_num):
            counter.wait_until(layer)
        failed: list[Any] = self.cache.finish_external_linker_loads(requests)
        return failed

    def restore(self, tokens: Sequence[int]) -> torch.Tensor | None:
        """Restore a request's tokens; return their slots, None if there are none or SGLang aborts the request."""
        request, result = self.match(tokens)
        slots = self.queue(request, result)
        return slots if slots is not None and not self.run([request]) else None


@contextmanager
def published_arguments() -> Iterator[None]:
    """Publish SGLang's arguments in this process, as its launcher does."""
    real("sglang.srt.arg_groups.pipeline")  # which publishing imports
    with real("sglang.srt.runtime_context")._CONTEXT.override_server_args():
        yield
