"""The host memory of SGLang's hierarchical cache: keys and values as a `PagedCache`, views without copies; whatever
else it holds, and what lies elsewhere, as opaque pages.

    layer_first         kv [2, layers, tokens, heads, dim]
    page_first          kv [2, tokens, layers, heads, dim]
    page_first_direct   kv [2, pages, layers, page tokens, heads, dim]
    page_head           kv [2, pages, heads, page tokens, layers, dim]

With multi-head latent attention (MLA) there is no leading 2 and no `page_head`. A token has one head: its latent, then
the rotated part of keys (`cuvee.integrations.pages.latents`).

Token t of the pool is slot t of the cache: `host_indices` are slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cuvee.codec.dtypes import TORCH_DTYPES
from cuvee.codec.errors import UnsupportedModelError
from cuvee.codec.layout import KVLayout
from cuvee.codec.paged import PagedCache
from cuvee.integrations.core.refusals import refuse
from cuvee.integrations.pages import OpaquePage
from cuvee.integrations.pages.latents import latent_cache

ARRANGEMENTS = ("layer_first", "page_first", "page_first_direct", "page_head")
_NOT_OF_LATENTS = "page_head"
_GEOMETRY = (
    "layout", "storage_format_tag", "start_layer", "end_layer", "layer_num", "head_num", "head_dim", "v_head_dim",
    "kv_lora_rank", "qk_rope_head_dim", "temporal_state_shape", "temporal_dtype", "conv_state_shapes", "conv_dtype",
)  # fmt: skip
_OF_SIZE = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


def check_pool(pool: Any, config: Any) -> None:
    """Check that a pool holds keys and values, or latents, in an order that is known.

    Args:
        pool: of SGLang; that of a `MHATokenToKVPoolHost` or a `MLATokenToKVPoolHost` is known.
        config: SGLang's `HiCacheStorageConfig`.

    Raises:
        UnsupportedModelError: it is not known.
    """
    kind = type(pool).__name__
    latents = holds_latents(pool)
    heads = hasattr(pool, "v_head_dim") and hasattr(pool, "v_buffer")
    packed = getattr(pool, "dsa_kv_cache_store_fp8", False) or getattr(pool, "storage_format_tag", None) is not None
    known = [name for name in ARRANGEMENTS if name != _NOT_OF_LATENTS or not latents]
    features = {
        f"pipeline parallelism (pp_size={config.pp_size})": config.pp_size > 1,
        "context parallelism": max(config.attn_cp_size, config.dcp_size) > 1,
        f"neither attention heads nor latents, in {kind}": not latents and not heads,
        f"{getattr(pool, 'dtype', None)} in {kind}": packed
        or getattr(pool, "dtype", None) not in TORCH_DTYPES.values(),
        f"pages arranged as {pool.layout}": pool.layout not in known,
    }
    refuse(features, "host pool: must hold keys and values in a known order, got {}")


def holds_latents(pool: Any) -> bool:
    """Return whether a pool of SGLang is one of multi-head latent attention."""
    return hasattr(pool, "kv_lora_rank")


def _fp8_of_rocm() -> list[str]:
    """Return which of two codes fp8 has on this device, where pools hold either as bytes under one name; [] on CUDA."""
    if not torch.version.hip:
        return []
    from sglang.kernels.ops.quantization.fp8_kernel import fp8_dtype

    return [str(fp8_dtype)]


class OpaquePool:
    """A host pool of SGLang as opaque pages, by its own copies of a page.

    Args:
        name: SGLang's, of the pool.
        pool: of any kind.
        config: SGLang's `HiCacheStorageConfig`.

    Attributes:
        description: all that determines the bytes of a page besides weights and tokens.
        rank: whose pages they are; ranks that hold the same share those of the first.
        page_tokens: host indices per page.

    Raises:
        UnsupportedModelError: SGLang cannot copy its pages.
    """

    def __init__(self, name: str, pool: Any, config: Any) -> None:
        self._name, self._pool = name, pool
        self.page_tokens = int(getattr(pool, "page_size", 1) or 1)
        try:
            blank = pool.get_data_page(0, flat=True)
        except (NotImplementedError, ValueError) as error:
            raise UnsupportedModelError(
                f"host pool {name}: must be one that SGLang copies page by page, got {pool.layout} ({error}): use "
                "--hicache-mem-layout page_first_direct"
            ) from error
        self._dtype, self._size = blank.dtype, blank.numel()
        self.rank = 0 if config.is_mla_model and name != "mamba" else config.tp_rank
        self.description = repr(
            (
                name, type(pool).__name__, str(self._dtype), self._size, self.page_tokens,
                [(each, str(getattr(pool, each, None))) for each in _GEOMETRY],
                config.tp_size, config.pp_rank, config.pp_size, config.attn_cp_rank, config.attn_cp_size,
                config.dcp_rank, config.dcp_size,
                *_fp8_of_rocm(),
            )
        )  # fmt: skip

    def read(self, indices: torch.Tensor) -> list[OpaquePage]:
        """Return pages, the host indices of which are given in a row."""
        return [self._page(self._pool.get_data_page(at, flat=True)) for at in self._first(indices)]

    def blank(self, count: int) -> list[OpaquePage]:
        """Return memory of pages, for `write`; SGLang's own would be pinned, each page for one copy."""
        return [self._page(torch.empty(self._size, dtype=self._dtype)) for _ in range(count)]

    def write(self, pages: Sequence[OpaquePage], indices: torch.Tensor) -> None:
        """Write pages to the pool."""
        for page, at in zip(pages, self._first(indices), strict=False):
            self._pool.set_from_flat_data_page(at, page.regions[0].view(self._dtype))

    def _first(self, indices: torch.Tensor) -> list[int]:
        return [int(at) for at in indices[:: self.page_tokens]]

    def _page(self, flat: torch.Tensor) -> OpaquePage:
        size = getattr(self._pool, "temporal_dtype", flat.dtype).itemsize  # of states, which SGLang tells as bytes
        flat = flat.contiguous().view(torch.uint8).flatten()
        return OpaquePage(self._name, [flat.view(_OF_SIZE[size]) if len(flat) % size == 0 else flat])


def _check_shapes(pool: Any, layout: KVLayout) -> None:
    """Refuse a pool that does not hold the layout's layers, or holds more."""
    if pool.layer_num != layout.num_layers:
        raise UnsupportedModelError(
            f"host pool: must hold the model's {layout.num_layers} layers, got {pool.layer_num}: layers in "
            "further pools (windows, drafts) and layers that share a cache are not supported"
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
