"""`find_pages`: an engine's tensors as the codec sees them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from cuvee.codec.errors import UnsupportedModelError
from cuvee.codec.layout import KVLayout
from cuvee.codec.paged import PagedCache
from cuvee.integrations.vllm.pages.probe import PageLayout, Writer, find_page_layout, verify_page_layout

logger = logging.getLogger(__name__)

_WITHIN_CODE = 1 + 1 / 64  # less than half a step of fp8 at any normal code


def find_pages(
    layout: KVLayout,
    layers: Mapping[str, Any],
    kv_caches: Mapping[str, torch.Tensor],
    codes: torch.dtype | None = None,
) -> PagedCache:
    """Return the engine's tensors as the codec sees them, in the order of the layers.

    Args:
        layout: of this rank.
        layers: the engine's attention layers by name.
        kv_caches: the engine's tensors by layer, in the order of the layers.
        codes: dtype of an fp8 cache.

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
    scales: tuple[list[float], list[float]] = [], []
    layouts: dict[tuple[Any, ...], PageLayout] = {}  # by what layers with equal pages share
    for shape, name in zip(layout.layers, names, strict=True):
        tensor, attention = kv_caches[name], layers[name]
        if not hasattr(attention.impl, "do_kv_cache_update"):
            raise UnsupportedModelError(
                f"{name}: {type(attention.impl).__name__} has no writer (do_kv_cache_update), so the layout of its "
                "pages cannot be found: this attention backend is not supported"
            )
        if codes is not None and tensor.dtype == torch.uint8:
            tensor = tensor.view(codes)
        if tensor.dtype != (codes or layout.torch_dtype):
            raise UnsupportedModelError(
                f"{name}: the engine caches {tensor.dtype}, its configuration says {codes or layout.dtype}"
            )
        kv_scales = (1.0, 1.0) if codes is None else (_scale(name, attention, "k"), _scale(name, attention, "v"))
        for unit, scale in zip(scales, kv_scales, strict=True):
            unit.append(scale)
        write = _writer(attention, kv_caches[name], kv_scales, layout.torch_dtype, shape.latent)
        alike = (tensor.shape, tensor.stride(), shape.kv_heads, shape.head_dim, shape.value_dim, type(attention.impl))
        found = layouts.get(alike)
        if found is not None:
            verify_page_layout(tensor, write, found)
        else:
            found = find_page_layout(tensor, write, shape.kv_heads, shape.head_dim, shape.value_dim)
            layouts[alike] = found
            logger.debug("cuvee: pages of %s: %s", name, found)
        k, v = found.views(tensor)
        keys.append(k)
        values.append(v)
    return PagedCache(layout, keys, values, *(scales if codes is not None else ()))


def _scale(name: str, attention: Any, unit: str) -> float:
    """Return the factor of a layer's fp8 keys or values.

    Raises:
        UnsupportedModelError: each head has its own.
    """
    held = getattr(attention, f"_{unit}_scale")
    if held.numel() != 1:
        raise UnsupportedModelError(
            f"{name}: fp8 scales of each head are not supported: serve a checkpoint with one scale per layer, or set "
            "--kv-cache-dtype auto"
        )
    return float(held)


def _writer(
    attention: Any, cache: torch.Tensor, scales: tuple[float, float], dtype: torch.dtype, latent: bool
) -> Writer:
    """Return the engine's writer of a layer, given what its pages are to hold. Of an fp8 code it gets a value a bit
    beyond the code's own, because some writers round towards zero.
    """

    def value(part: torch.Tensor, scale: float) -> torch.Tensor:
        return part if part.dtype == dtype else (part.float() * (scale * _WITHIN_CODE)).to(dtype)

    def write(k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        k, v = value(k, scales[0]), value(v, scales[1])
        if latent:
            scale = getattr(attention, "_k_scale", None)
            attention.impl.do_kv_cache_update(v[:, 0], k, cache, slots, attention.kv_cache_dtype, scale)
        else:
            attention.impl.do_kv_cache_update(attention, k, v, cache, slots)

    return write
