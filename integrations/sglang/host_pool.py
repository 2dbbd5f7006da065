"""The host memory of SGLang's hierarchical cache as a `PagedCache`: views, no copies.

    layer_first         kv [2, layers, tokens, heads, dim]
    page_first          kv [2, tokens, layers, heads, dim]
    page_first_direct   kv [2, pages, layers, page tokens, heads, dim]
    page_head           kv [2, pages, heads, page tokens, layers, dim]

With multi-head latent attention (MLA) there is no leading 2 and no `page_head`. A token has one head: its latent, then
the rotated part of keys. SGLang keeps the dimensions of that part in the order of the weights, where pairs that turn
together are adjacent (unless the model says `"rope_interleave": false`). transformers, and so the layout, may sort them
first: then the cache lists places (`PermutedPages`).

Token t of the pool is slot t of the cache: `host_indices` are slots.
"""

from __future__ import annotations

from typing import Any

import torch

from cuvee.codec.errors import UnsupportedModelError
from cuvee.codec.layout import KVLayout
from cuvee.codec.models.dtypes import TORCH_DTYPES
from cuvee.codec.paged import PagedCache, PageOrder, Pages, PermutedPages

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
    """Return whether a pool of SGLang, of the host or of a device, is one of multi-head latent attention."""
    return hasattr(pool, "kv_lora_rank")


def check_shapes(pool: Any, layout: KVLayout, name: str) -> None:
    """Refuse a pool, of the host or of a device, that does not hold the layout's layers, or holds more.

    Raises:
        UnsupportedModelError: begins with `name`.
    """
    if pool.layer_num != layout.num_layers:
        raise UnsupportedModelError(
            f"{name}: must hold the model's {layout.num_layers} layers, got {pool.layer_num}: draft layers and "
            "layers that share a cache are not supported"
        )
    if holds_latents(pool):
        held = 1, pool.qk_rope_head_dim, pool.kv_lora_rank
        if pool.kv_cache_dim != pool.qk_rope_head_dim + pool.kv_lora_rank:
            raise UnsupportedModelError(
                f"{name}: must hold {pool.kv_lora_rank} numbers of a latent and {pool.qk_rope_head_dim} of keys per "
                f"token, got {pool.kv_cache_dim}"
            )
    else:
        held = pool.head_num, pool.head_dim, pool.v_head_dim
    for index, layer in enumerate(layout.layers):
        if held != (layer.kv_heads, layer.head_dim, layer.value_dim):
            raise UnsupportedModelError(
                f"{name}: must hold {layer.kv_heads} heads of {layer.head_dim} and {layer.value_dim} numbers, as "
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
    check_shapes(pool, layout, "host pool")
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


def latent_cache(pages: list[torch.Tensor], layout: KVLayout, latent: int, adjacent_pairs: bool) -> PagedCache:
    """Return latents, and the rotated part of keys behind them, as a cache.

    Args:
        pages: per layer `[pages, page tokens, 1, latent + rotated part]`.
        layout: of the model.
        latent: numbers of a latent.
        adjacent_pairs: whether pairs of dimensions that turn together are adjacent in the rotated part.

    Raises:
        UnsupportedModelError: the layout's order is another one, and the pages are not in host memory.
    """
    keys = [each[..., latent:] for each in pages]
    rope = layout.layers[0].rope
    sorts = adjacent_pairs and rope is not None and not rope.interleaved
    if sorts and keys[0].device.type != "cpu":
        raise UnsupportedModelError(
            "device pool: must be in host memory if rotated dimensions of latents lie in another order than in "
            f"transformers, got {keys[0].device}: use the storage backend of HiCache, which works in host memory"
        )
    return PagedCache(layout, _sorted_pairs(keys) if sorts else keys, [each[..., :latent] for each in pages])


def _sorted_pairs(keys: list[torch.Tensor]) -> list[Pages]:
    """Return pages `[pages, page tokens, 1, dim]` per layer with the even of the given dimensions before the odd."""
    blocks, tokens, _, dim = keys[0].shape
    block_stride, token_stride, _, _ = keys[0].stride()
    dims = torch.cat([torch.arange(0, dim, 2), torch.arange(1, dim, 2)])
    order = PageOrder((torch.arange(tokens) * token_stride)[:, None, None] + dims, blocks, block_stride)
    return [PermutedPages(own.as_strided((order.span,), (1,)), order) for own in keys]


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
