"""Pages of sparse attention (DeepSeek V3.2, GLM-5), stored byte for byte: no tensor of theirs has values of one dtype.

    latents           [N, C] bytes of a block: fp8 numbers, their scales and 16-bit rotated keys of each token
    indexer's keys    the codes of a block's N tokens, then their scales, in an order that the kernels choose

All are layers of one layout, of 16-bit words, and so of one entry: without its indexer's keys, or with damaged ones, an
entry is missing or damaged. A page is whole: entries and loads begin and end with blocks. A page means something to the
same kernels alone, so the layout's name tells vLLM's version, the device and how its pages are made.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from cuvee.codec.errors import UnsupportedModelError
from cuvee.codec.layout import KVLayout, LayerLayout
from cuvee.codec.paged import PagedCache
from cuvee.integrations.vllm.connector_config import Options
from cuvee.integrations.vllm.layer_groups import CachedLayers, is_indexer, is_latent
from cuvee.integrations.vllm.refusals import refuse

_SAME = {"fp8_e4m3": "fp8", "fp8_ds_mla": "fp8"}  # vLLM renames what is asked for in the worker's process alone


def check_sparse(vllm_config: Any, cached: CachedLayers, options: Options) -> None:
    """Refuse layers beside an indexer's whose pages are not known to be whole, and options that need their values."""
    refused = {
        "layers other than latents (MLA) beside them": not all(map(is_latent, cached.specs)),
        "several tokens in one latent": any(getattr(spec, "tokens_per_state", 1) != 1 for spec in cached.specs),
        "blocks of several sizes": any(group.block is not None for group in cached.groups),
        "recurrent layers": bool(cached.recurrent),
        "option 'profile': remove it to store losslessly": options.profile is not None,
        "option 'blend': remove it": options.blend is not None,
    }
    refuse(refused, "CuveeConnector does not support sparse indexers with {}")
    own = sum(not is_indexer(name) for name in cached.names)
    most = vllm_config.model_config.hf_text_config.num_hidden_layers
    if own != most:
        raise UnsupportedModelError(
            f"the engine caches latents of {own} layers, the model has {most}: serve this model without CuveeConnector"
        )


def exact_layout(vllm_config: Any, kv_cache_config: Any, cached: CachedLayers) -> KVLayout:
    """Return the layout of 16-bit words of the pages of a process, given vLLM's `VllmConfig` and `KVCacheConfig`.

    Raises:
        UnsupportedModelError: pages of an odd number of bytes per token.
    """
    from vllm import __version__
    from vllm.platforms import current_platform

    # The scheduler is told the first layer's description for all layers, but the place of each layer's pages.
    pages = {
        name: min(at.layer_stride, at.block_stride) for at in kv_cache_config.kv_cache_tensors for name in at.layers
    }
    layers = []
    for name in cached.names:
        words, rest = divmod(pages[name], 2 * cached.block)
        if rest or words < 2:
            raise UnsupportedModelError(
                f"{name}: pages of {pages[name]} bytes for {cached.block} tokens are not supported: serve this model "
                "without CuveeConnector"
            )
        codes = 1 << (words - 1).bit_length() - 1  # of keys and latents these are codes, and the rest is something else
        layers.append(LayerLayout(1, codes, words - codes, None))
    dtype = str(vllm_config.cache_config.cache_dtype)
    backend = getattr(getattr(vllm_config, "attention_config", None), "backend", None)
    device = current_platform.device_type, current_platform.get_device_capability()
    made = (_SAME.get(dtype, dtype), backend, *device, cached.block, __version__)
    return KVLayout(f"pages, {', '.join(map(str, made))}", tuple(layers), "float16", None)


def find_exact_pages(layout: KVLayout, kv_caches: Mapping[str, torch.Tensor], block_tokens: int) -> PagedCache:
    """Return the engine's tensors as 16-bit words, in the order of the layers. Nothing is written to them.

    Args:
        layout: of this rank, by `exact_layout`.
        kv_caches: the engine's tensors by layer, blocks first: the scheduler's, or such as these consist of.
        block_tokens: tokens per block of the scheduler.

    Raises:
        UnsupportedModelError: a block's bytes do not lie together, or are more or fewer than they should be.
    """
    keys, values = [], []
    for shape, (name, tensor) in zip(layout.layers, kv_caches.items(), strict=True):
        codes, rest = shape.key_values, shape.value_values
        size = 2 * (codes + rest) * block_tokens
        own, apart = tensor[0].nbytes, tensor.stride(0) * tensor.itemsize
        parts = size // max(own, 1)
        whole = own * parts == size and len(tensor) % parts == 0 and (parts == 1 or own == apart)
        if not whole or not tensor[0].is_contiguous() or (tensor.storage_offset() * tensor.itemsize | apart) % 2:
            raise UnsupportedModelError(
                f"{name}: the engine's blocks are {list(tensor.shape)} of {tensor.dtype} with strides "
                f"{tensor.stride()}, not {size} bytes each that lie together: this attention backend is not supported"
            )
        held = tensor.view(torch.uint8)
        flat = held.as_strided((len(tensor) // parts, size), (apart * parts, 1)).view(layout.torch_dtype)
        if is_indexer(name):
            first, last = flat[:, : block_tokens * codes], flat[:, block_tokens * codes :]
            keys.append(first.unflatten(1, (block_tokens, 1, codes)))
            values.append(last.unflatten(1, (block_tokens, 1, rest)))
        else:
            rows = flat.unflatten(1, (block_tokens, 1, codes + rest))
            keys.append(rows[..., :codes])
            values.append(rows[..., codes:])
    return PagedCache(layout, keys, values)
