"""Multi-head latent attention (MLA; DeepSeek-V2, arXiv:2405.04434): what is cached, and where.

Per token and layer, an MLA cache holds one latent vector, from which the keys and values of all heads are computed, and
one rotated vector, which is a part of all heads' keys. In a `KVLayout` the rotated vector is the key and the latent is
the value, of one head each: the codec takes the rotation out of keys, and there is none in the latent.

    KVLayout      keys [T, 1, qk_rope_head_dim]      values [T, 1, kv_lora_rank]
    transformers  layer.values                       layer.keys
"""

from __future__ import annotations

from typing import Any

import torch

from cuvee.codec.layout import LayerLayout


def layer_units(layer: Any, layout: LayerLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values `[B, H, T, D]`, as a layout names them, of a layer of a transformers cache."""
    return (layer.values, layer.keys) if layout.latent else (layer.keys, layer.values)


def append_units(cache: Any, keys: torch.Tensor, values: torch.Tensor, index: int, layout: LayerLayout) -> None:
    """Append keys and values `[B, H, T, D]`, as a layout names them, to a layer of a transformers cache."""
    first, second = (values, keys) if layout.latent else (keys, values)
    cache.update(first, second, index)
