"""The device memory of SGLang's KV cache as a `PagedCache`: views, no copies.

    MHATokenToKVPool    per layer: keys [tokens, heads, dim], values [tokens, heads, dim]
    MLATokenToKVPool    per layer: [tokens, 1, latent + rotated part of keys]

Token t of the pool is slot t of the cache: `device_indices` are slots. How the rotated dimensions of latents are
ordered, `cuvee.integrations.pages.latents` says.
"""

from __future__ import annotations

from typing import Any

import torch

from cuvee.codec.errors import UnsupportedModelError
from cuvee.codec.layout import KVLayout
from cuvee.codec.models.dtypes import TORCH_DTYPES
from cuvee.codec.paged import PagedCache
from cuvee.integrations.pages.latents import latent_cache
from cuvee.integrations.sglang.host_pool import check_shapes, holds_latents

POOLS = ("MHATokenToKVPool", "MLATokenToKVPool")


def check_device_pool(pool: Any) -> None:
    """Refuse by name a pool that holds something else than keys and values, or latents, or keeps them otherwise.

    Raises:
        UnsupportedModelError: another pool, quantized values, or another arrangement.
    """
    kind = type(pool).__name__
    if kind not in POOLS:
        raise UnsupportedModelError(
            f"device pool: must be a {' or '.join(POOLS)}, got {kind}: windows, Mamba, indexers and packed pages "
            "are not supported"
        )
    if pool.dtype not in TORCH_DTYPES.values():
        raise UnsupportedModelError(
            f"device pool: must hold {', '.join(TORCH_DTYPES)}, got {pool.dtype} in {kind}: use --kv-cache-dtype auto"
        )
    scales = ("k_scale_buffer", "native_k_scale_buffer", "kv_scale_buffer")
    if any(getattr(pool, name, None) is not None for name in scales):
        raise UnsupportedModelError(
            f"device pool: must hold values without scales, got {kind} with scales: use --kv-cache-dtype auto"
        )
    order = getattr(pool, "kv_cache_layout", "nhd")
    if order != "nhd":
        raise UnsupportedModelError(
            f"device pool: must be arranged as nhd, got {order}: unset SGLANG_USE_HND_KVCACHE and "
            "SGLANG_AITER_KV_CACHE_LAYOUT"
        )
    for name, feature in (
        ("use_dsa", "sparse attention with an indexer"), ("dcp_replicated", "decode context parallelism"),
        ("layer_shard_enabled", "layers shared out among ranks"),
    ):  # fmt: skip
        if getattr(pool, name, False):
            raise UnsupportedModelError(f"device pool: {feature} is not supported")


def device_cache(pool: Any, layout: KVLayout, *, adjacent_pairs: bool = False) -> PagedCache:
    """Return a pool's memory as a cache.

    Args:
        pool: a pool that passed `check_device_pool`.
        layout: of this rank's part of the model's cache.
        adjacent_pairs: whether the pairs of dimensions that turn together are adjacent in latents' rotated part.

    Raises:
        UnsupportedModelError: other layers or heads than the layout's; latents on a device whose order is not the
            layout's.
    """
    check_shapes(pool, layout, "device pool")
    if not holds_latents(pool):
        keys, values = ([_pages(pool, each) for each in unit] for unit in (pool.k_buffer, pool.v_buffer))
        return PagedCache(layout, keys, values)
    return latent_cache([_pages(pool, each) for each in pool.kv_buffer], layout, pool.kv_lora_rank, adjacent_pairs)


def _pages(pool: Any, buffer: torch.Tensor) -> torch.Tensor:
    """Return one layer's keys, values or latents, `[pages, page tokens, heads, dim]`."""
    pages = len(buffer) // pool.page_size
    return buffer[: pages * pool.page_size].view(pages, pool.page_size, *buffer.shape[1:])
