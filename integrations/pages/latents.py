"""Latents of multi-head latent attention (MLA) as engines keep them: a latent per token, then the rotated part of keys.

vLLM and SGLang keep the dimensions of the rotated part in the order of the weights, where pairs that turn together are
adjacent (SGLang: unless the model says `"rope_interleave": false`). transformers, and so the layout, may sort them
first: then the cache lists places (`PermutedPages`).
"""

from __future__ import annotations

import torch

from cuvee.codec.layout import KVLayout
from cuvee.codec.paged import PagedCache
from cuvee.codec.pages import PageOrder, Pages, PermutedPages


def latent_cache(pages: list[torch.Tensor], layout: KVLayout, latent: int, adjacent_pairs: bool) -> PagedCache:
    """Return latents, and the rotated part of keys behind them, as a cache.

    Args:
        pages: per layer `[pages, page tokens, 1, latent + rotated part]`, in host memory.
        layout: of the model.
        latent: numbers of a latent.
        adjacent_pairs: whether pairs of dimensions that turn together are adjacent in the rotated part.
    """
    keys = [each[..., latent:] for each in pages]
    rope = layout.layers[0].rope
    sorts = adjacent_pairs and rope is not None and not rope.interleaved
    return PagedCache(layout, _sorted_pairs(keys) if sorts else keys, [each[..., :latent] for each in pages])


def _sorted_pairs(keys: list[torch.Tensor]) -> list[Pages]:
    """Return pages `[pages, page tokens, 1, dim]` per layer with the even of the given dimensions before the odd."""
    blocks, tokens, _, dim = keys[0].shape
    block_stride, token_stride, _, _ = keys[0].stride()
    dims = torch.cat([torch.arange(0, dim, 2), torch.arange(1, dim, 2)])
    order = PageOrder((torch.arange(tokens) * token_stride)[:, None, None] + dims, blocks, block_stride)
    return [PermutedPages(own.as_strided((order.span,), (1,)), order) for own in keys]
