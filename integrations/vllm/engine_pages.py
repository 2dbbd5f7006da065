"""`find_pages`: an engine's tensors as the codec sees them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from cuvee.codec.errors import UnsupportedModelError
from cuvee.codec.layout import KVLayout
from cuvee.codec.paged import PagedCache
from cuvee.integrations.vllm.probe import PageLayout, find_page_layout, verify_page_layout

logger = logging.getLogger(__name__)


def find_pages(layout: KVLayout, layers: Mapping[str, Any], kv_caches: Mapping[str, torch.Tensor]) -> PagedCache:
    """Return the engine's tensors as the codec sees them, in the order of the layers.

    Args:
        layout: of this rank.
        layers: the engine's attention layers by name.
        kv_caches: the engine's tensors by layer, in the order of the layers.

    Raises:
        UnsupportedModelError: the engine caches other layers than the model has, or in a form that is not known.
    """
    names = list(kv_caches)
    if len(names) != layout.num_layers or not set(names) <= set(layers):
        raise UnsupportedModelError(
            f"the engine caches {len(names)} layers ({', '.join(names[:3])} …), the model has {layout.num_layers} "
            "attention layers"
        )
    keys, values = [], []
    layouts: dict[tuple[Any, ...], PageLayout] = {}  # by what layers with equal pages share
    for index, name in enumerate(names):
        tensor, attention = kv_caches[name], layers[name]
        if not hasattr(attention.impl, "do_kv_cache_update"):
            raise UnsupportedModelError(
                f"{name}: {type(attention.impl).__name__} has no writer (do_kv_cache_update), so the layout of its "
                "pages cannot be found: this attention backend is not supported"
            )
        if tensor.dtype != layout.torch_dtype:
            raise UnsupportedModelError(
                f"{name}: the engine caches {tensor.dtype}, its configuration says {layout.dtype}"
            )

        def write(
            k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, attention: Any = attention, cache: Any = tensor
        ) -> None:
            attention.impl.do_kv_cache_update(attention, k, v, cache, slots)

        shape = layout.layers[index]
        alike = (tensor.shape, tensor.stride(), shape.kv_heads, shape.head_dim, type(attention.impl))
        found = layouts.get(alike)
        if found is not None:
            verify_page_layout(tensor, write, found)
        else:
            layouts[alike] = found = find_page_layout(tensor, write, shape.kv_heads, shape.head_dim)
            logger.debug("cuvee: pages of %s: %s", name, found)
        k, v = found.views(tensor)
        keys.append(k)
        values.append(v)
    return PagedCache(layout, keys, values)
