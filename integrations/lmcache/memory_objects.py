"""LMCache's memory objects as a `PagedCache`: views, no copies.

    [2, layers, tokens, heads * dim]        keys, then values
    [1, layers, tokens, heads * 2 * dim]    fused: a head's keys, then its values
    [layers, tokens, heads * 2 * dim]       fused, likewise

An object is one chunk of one rank. Its one block holds all of its tokens: token t is slot t.
"""

from __future__ import annotations

from typing import Any

import torch

from cuvee.codec.errors import UnsupportedModelError
from cuvee.codec.layout import KVLayout
from cuvee.codec.paged import PagedCache

FORMATS = ("UNDEFINED", "KV_2LTD")


def object_cache(memory: Any, layout: KVLayout, tokens: int) -> PagedCache:
    """Return a memory object's values as a cache.

    Args:
        memory: LMCache's `MemoryObj`.
        layout: of this rank's part of the cache, accepted by `check_uniform`.
        tokens: of a chunk.

    Raises:
        UnsupportedModelError: anything else than one of the shapes above, of the layout's dtype, in host memory.
    """
    fmt = memory.get_memory_format().name
    if fmt not in FORMATS:
        raise UnsupportedModelError(f"memory object: must have a format of {', '.join(FORMATS)}, got {fmt}")
    shapes, dtypes = memory.get_shapes(), memory.get_dtypes()
    if len(shapes) != 1:
        raise UnsupportedModelError(
            f"memory object: must hold one tensor, got {len(shapes)}: models with several kinds of caches (sliding "
            "windows of their own, Mamba, indexers) are not supported"
        )
    shape, dtype = tuple(shapes[0]), dtypes[0]
    if dtype != layout.torch_dtype:
        raise UnsupportedModelError(
            f"memory object: must hold {layout.dtype}, got {dtype}: set the adapter's option 'dtype' if the engine's "
            "cache has another dtype than its model, and no serde; quantized caches are not supported"
        )
    split, fused = _shapes(layout, tokens)
    if shape != split and shape not in fused:
        raise UnsupportedModelError(_refusal(shape, layout, tokens))
    values = memory.get_tensor(0)
    if values is None or values.device.type != "cpu" or memory.get_size() != values.nbytes:
        raise UnsupportedModelError(
            f"memory object: must be all of a tensor in host memory, got {type(memory).__name__} of "
            f"{memory.get_size()} bytes"
        )
    return _cache(values, layout, tokens, fused=shape != split)


def _shapes(layout: KVLayout, tokens: int) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Return the shape with keys and values apart, and those in which they are fused."""
    layers, numbers = layout.num_layers, layout.layers[0].key_values
    rest = layers, tokens, 2 * numbers
    return (2, layers, tokens, numbers), ((1, *rest), rest)


def _cache(values: torch.Tensor, layout: KVLayout, tokens: int, *, fused: bool) -> PagedCache:
    heads, dim = layout.layers[0].kv_heads, layout.layers[0].head_dim
    if fused:
        both = values.view(layout.num_layers, 1, tokens, heads, 2 * dim)
        return PagedCache(layout, list(both[..., :dim]), list(both[..., dim:]))
    keys, vals = values.view(2, layout.num_layers, 1, tokens, heads, dim)
    return PagedCache(layout, list(keys), list(vals))


def _refusal(shape: tuple[int, ...], layout: KVLayout, tokens: int) -> str:
    """Say what is wrong with a shape: the chunk's size, if only that differs, or the model."""
    split, fused = _shapes(layout, tokens)
    got = f"got {list(shape)}"
    if len(shape) > 2 and any(
        shape[:-2] == known[:-2] and shape[-1] == known[-1] for known in (split, *fused)
    ):  # fmt: skip
        return f"memory object: must hold {tokens} tokens, {got}: set chunk_tokens to LMCache's --chunk-size"
    known = " or ".join(str(list(each)) for each in (split, *fused))
    return (
        f"memory object: must be {known}, as the model's configuration says, {got}: pipeline parallelism, draft layers "
        "and layers that share a cache are not supported"
    )
