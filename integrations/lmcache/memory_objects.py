"""LMCache's memory objects, without copies: as a `PagedCache` in one of these shapes, in any other as an opaque page.

    [2, layers, tokens, heads * dim]        keys, then values
    [1, layers, tokens, heads * 2 * dim]    fused: a head's keys, then its values
    [layers, tokens, heads * 2 * dim]       fused, likewise

An object is one chunk of one rank. Its one block holds all of its tokens: token t is slot t.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cuvee.codec.errors import UnsupportedModelError
from cuvee.codec.layout import KVLayout
from cuvee.codec.paged import PagedCache
from cuvee.integrations.pages import OpaquePage

_FORMATS = ("UNDEFINED", "KV_2LTD")


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
    if fmt not in _FORMATS:
        raise UnsupportedModelError(f"memory object: must have a format of {', '.join(_FORMATS)}, got {fmt}")
    check_shapes(memory.get_shapes(), memory.get_dtypes(), layout, tokens)
    (values,) = object_page(memory, "").regions
    heads, dim = layout.layers[0].kv_heads, layout.layers[0].head_dim
    if values.shape[-1] == 2 * heads * dim:  # fused
        both = values.view(layout.num_layers, 1, tokens, heads, 2 * dim)
        return PagedCache(layout, list(both[..., :dim]), list(both[..., dim:]))
    keys, vals = values.view(2, layout.num_layers, 1, tokens, heads, dim)
    return PagedCache(layout, list(keys), list(vals))


def object_page(memory: Any, kind: str) -> OpaquePage:
    """Return a memory object as bytes.

    Args:
        memory: LMCache's `MemoryObj`.
        kind: of the page.

    Raises:
        UnsupportedModelError: other memory than tensors on the host.
    """
    regions = [memory.get_tensor(index) for index in range(len(memory.get_shapes()))]
    if any(each is None or each.device.type != "cpu" for each in regions) or (
        memory.get_size() != sum(each.nbytes for each in regions)
    ):
        raise UnsupportedModelError(
            f"memory object: must be all of a tensor in host memory, got {type(memory).__name__} of "
            f"{memory.get_size()} bytes"
        )
    return OpaquePage(kind, regions)


def check_shapes(shapes: Sequence[torch.Size], dtypes: Sequence[torch.dtype], layout: KVLayout, tokens: int) -> None:
    """Check that objects of these shapes and dtypes hold keys and values in a known order.

    Raises:
        UnsupportedModelError: they do not.
    """
    if len(shapes) != 1:
        raise UnsupportedModelError(f"memory object: must hold one tensor, got {len(shapes)}")
    shape, dtype = tuple(shapes[0]), dtypes[0]
    if dtype != layout.torch_dtype:
        raise UnsupportedModelError(
            f"memory object: must hold {layout.dtype}, got {dtype}: set the adapter's option 'dtype' if the engine's "
            "cache has another dtype than its model, and no serde"
        )
    if shape not in _shapes(layout, tokens):
        raise UnsupportedModelError(_refusal(shape, layout, tokens))


def check_heads(shapes: Sequence[torch.Size], layout: KVLayout, ranks: int) -> None:
    """Check that objects hold as many heads as one of the ranks has, if their shape tells heads.

    Otherwise the other heads are on servers that give their ranks the same numbers.

    Args:
        shapes: of an object.
        layout: of the whole model, accepted by `check_uniform`.
        ranks: that the heads are divided among, as far as is known.

    Raises:
        UnsupportedModelError: they hold fewer.
    """
    first, shape = layout.layers[0], tuple(shapes[0])
    if len(shapes) != 1 or len(shape) not in (3, 4):
        return
    apart = len(shape) == 4 and shape[0] == 2
    heads, rest = divmod(shape[-1], first.head_dim if apart else 2 * first.head_dim)
    if rest or not heads or first.kv_heads % heads or heads * ranks >= first.kv_heads:
        return
    raise UnsupportedModelError(
        f"memory object: must hold {first.kv_heads} heads among {ranks} ranks, got {heads}: if an engine's ranks are "
        "divided among several LMCache servers, set the adapter's options 'servers' and 'server_index', or else ranks "
        "of different servers have the same name"
    )


def _shapes(layout: KVLayout, tokens: int) -> tuple[tuple[int, ...], ...]:
    """Return the shapes that an object may have."""
    layers, first = layout.num_layers, layout.layers[0]
    fused = layers, tokens, first.key_values + first.value_values
    return (2, layers, tokens, first.key_values), (1, *fused), fused


def _refusal(shape: tuple[int, ...], layout: KVLayout, tokens: int) -> str:
    """Say what is wrong with a shape: the chunk's size, if only that differs, or the model."""
    shapes, got = _shapes(layout, tokens), f"got {list(shape)}"
    if len(shape) > 2 and any(shape[:-2] == known[:-2] and shape[-1] == known[-1] for known in shapes):
        return f"memory object: must hold {tokens} tokens, {got}: set chunk_tokens to LMCache's --chunk-size"
    known = " or ".join(str(list(each)) for each in shapes)
    return f"memory object: must be {known}, as the model's configuration says, {got}"
