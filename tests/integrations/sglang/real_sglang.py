"""SGLang's own classes, imported without the packages of pictures and kernels that a host without a GPU lacks.

`need_sglang` skips a module's tests where SGLang is not installed, unless CUVEE_REQUIRE_SGLANG=1. The Makefile installs
it without its dependencies.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

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


def pool_modules(kind: str) -> tuple[ModuleType, ModuleType]:
    """Import SGLang's modules of device pools and of host pools of a kind."""
    # Pools of a test take megabytes, also where little more is free: SGLang leaves ten gigabytes to others.
    vars(real("sglang.srt.mem_cache.pool_host.base"))["HICACHE_HOST_MEMORY_RESERVE_BYTES"] = 0
    return real("sglang.srt.mem_cache.device_pool_info"), real(f"sglang.srt.mem_cache.pool_host.{kind}")


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
    info, mha = pool_modules("mha")
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
    info, mla = pool_modules("mla")
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
    storage = real("sglang.srt.mem_cache.hicache_storage")
    given = {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1,
        "is_mla_model": False, "enable_storage_metrics": False,
        "is_page_first_layout": pool.layout != "layer_first", "model_name": "served", **changes,
    }  # fmt: skip
    return storage.HiCacheStorageConfig(extra_config=extra, **given)
