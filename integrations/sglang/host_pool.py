"""The host memory of SGLang's hierarchical cache as a `PagedCache`: views, no copies.

    layer_first         kv [2, layers, tokens, heads, dim]
    page_first          kv [2, tokens, layers, heads, dim]
    page_first_direct   kv [2, pages, layers, page tokens, heads, dim]
    page_head           kv [2, pages, heads, page tokens, layers, dim]

With multi-head latent attention (MLA) there is no leading 2 and no `page_head`. A token has one head: its latent, then
the rotated part of keys (`cuvee.integrations.pages.latents`).

Token t of the pool is slot t of the cache: `host_indices` are slots.
"""

from __future__ import annotations

from typing import Any

import torch

from cuvee.codec.dtypes import TORCH_DTYPES
from cuvee.codec.errors import UnsupportedModelError
from cuvee.codec.layout import KVLayout
from cuvee.codec.paged import PagedCache
from cuvee.integrations.pages.latents import latent_cache

ARRANGEMENTS = ("layer_first", "page_first", "page_first_direct", "page_head")
_NOT_OF_LATENTS = "page_head"


def check_pool(pool: Any) -> None:
    """Refuse by name a pool that holds something else than keys and values, or in an arrangement that is not known.

    Args:
        pool: of SGLang; a `MHATokenToKVPoolHost` or a `MLATokenToKVPoolHost` is accepted.

    Raises:
        UnsupportedModelError: something else, quantized values, or another arrangement.
    """
    kind = type(pool).__name__
    if not holds_latents(pool) and not (hasattr(pool, "v_head_dim") and hasattr(pool, "v_buffer")):
        raise UnsupportedModelError(f"host pool: must hold keys and values of attention heads, or latents, got {kind}")
    packed = getattr(pool, "dsa_kv_cache_store_fp8", False) or getattr(pool, "storage_format_tag", None) is not None
    if packed or pool.dtype not in TORCH_DTYPES.values():
        raise UnsupportedModelError(
            f"host pool: must hold {', '.join(TORCH_DTYPES)}, got {pool.dtype} in {kind}: use --kv-cache-dtype auto"
        )
    known = [name for name in ARRANGEMENTS if name != _NOT_OF_LATENTS or not holds_latents(pool)]
    if pool.layout not in known:
        raise UnsupportedModelError(
            f"host pool: must be arranged as {', '.join(known)}, got {pool.layout}: use --hicache-mem-layout "
            "page_first_direct"
        )


def holds_latents(pool: Any) -> bool:
    """Return whether a pool of SGLang is one of multi-head latent attention."""
    return hasattr(pool, "kv_lora_rank")


def _check_shapes(pool: Any, layout: KVLayout) -> None:
    """Refuse a pool that does not hold the layout's layers, or holds more."""
    if pool.layer_num != layout.num_layers:
        raise UnsupportedModelError(
            f"host pool: must hold the model's {layout.num_layers} layers, got {pool.layer_num}: draft layers and "
            "layers that share a cache are not supported"
        )
    if holds_latents(pool):
        held = 1, pool.qk_rope_head_dim, pool.kv_lora_rank
        if pool.kv_cache_dim != pool.qk_rope_head_dim + pool.kv_lora_rank:
            raise UnsupportedModelError(
                f"host pool: must hold {pool.kv_lora_rank} numbers of a latent and {pool.qk_rope_head_dim} of keys per "
                f"token, got {pool.kv_cache_dim}"
            )
    else:
        held = pool.head_num, pool.head_dim, pool.v_head_dim
    for index, layer in enumerate(layout.layers):
        if held != (layer.kv_heads, layer.head_dim, layer.value_dim):
            raise UnsupportedModelError(
                f"host pool: must hold {layer.kv_heads} heads of {layer.head_dim} and {layer.value_dim} numbers, as "
                f"the model's configuration says of layer {index}, got {held[0]} of {held[1]} and {held[2]}"
            )


def pool_cache(pool: Any, layout: KVLayout, *, adjacent_pairs: bool = False) -> PagedCache:
    """Return a pool's memory as a cache, after checking that SGLang's own addresses of two pages agree with it.

    Args:
        pool: a pool that passed `check_pool`.
        layout: of this rank's part of the model's cache.
        adjacent_pairs: whether the pairs of dimensions that turn together are adjacent in latents' rotated part.

    Raises:
        UnsupportedModelError: other layers or heads than the layout's, or SGLang says that a page lies elsewhere.
    """
    _check_shapes(pool, layout)
    buffers = [pool.kv_buffer] if holds_latents(pool) else [pool.k_buffer, pool.v_buffer]
    pages = [[_pages(pool, buffer, index) for index in range(layout.num_layers)] for buffer in buffers]
    for page in {0, pool.page_num - 1}:
        indices = torch.arange(page * pool.page_size, (page + 1) * pool.page_size)
        addresses, _ = pool.get_page_buffer_meta(indices)
        # The regions of a page: each buffer's of all layers, or those of each layer in turn.
        layers = len(addresses) // len(buffers)
        if layers not in (1, layout.num_layers):
            raise UnsupportedModelError(
                f"host pool: must give {len(buffers)} regions per page or per layer, got {len(addresses)}"
            )
        ours = [each[layer][page].data_ptr() for layer in range(layers) for each in pages]
        if addresses != ours:
            raise UnsupportedModelError(
                f"host pool: must hold page {page} where its arrangement {pool.layout} says, got other addresses: this "
                "version of SGLang is not supported"
            )
    if not holds_latents(pool):
        return PagedCache(layout, pages[0], pages[1])
    return latent_cache(pages[0], layout, pool.kv_lora_rank, adjacent_pairs)


def _pages(pool: Any, buffer: torch.Tensor, layer: int) -> torch.Tensor:
    """Return one layer's keys or values, `[pages, page tokens, heads, dim]`."""
    pages = int(pool.page_num), int(pool.page_size)
    if pool.layout == "layer_first":
        return buffer[layer].view(*pages, *buffer.shape[2:])
    if pool.layout == "page_first":
        return buffer.view(*pages, *buffer.shape[1:])[:, :, layer]
    if pool.layout == "page_first_direct":
        return buffer[:, layer]
    return buffer[:, :, :, layer].transpose(1, 2)  # page_head
