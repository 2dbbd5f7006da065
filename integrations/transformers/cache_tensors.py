"""What a transformers cache holds, as the codec takes it: keys and values of the tokens, and their ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from cuvee.codec.dtypes import TORCH_DTYPES
from cuvee.codec.errors import InputError, UnsupportedModelError
from cuvee.codec.layout import KVLayout
from cuvee.codec.models.forward import layer_units
from cuvee.codec.support.arrays import I64
from cuvee.codec.token_ids import NO_TOKEN, as_token_ids
from cuvee.integrations.transformers.cache_states import attention_layers, decoder_cache

# Exact types: subclasses keep more state (quantized, indexed, recurrent) than keys and values.
_PLAIN_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer)


def plain_tensors(
    cache: Cache, layout: KVLayout | None, past_windows: bool = False
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return keys and values [B, H, T, D] of every layer, as the layout names them, from the first token on.

    With `past_windows`, sliding windows may have dropped tokens: these layers hold the last ones.
    """
    if not isinstance(cache, Cache):
        raise InputError(f"cache: must be a transformers Cache, got {type(cache).__name__}; build a DynamicCache")
    keeps_all = layout is not None and layout.states
    if isinstance(cache, EncoderDecoderCache) and not keeps_all:
        raise UnsupportedModelError(
            "cache: must be that of a decoder-only model, got an EncoderDecoderCache; encode_cache takes it with the "
            "codec of Codec.without_profile(model)"
        )
    if getattr(cache, "offloading", False):
        raise InputError(
            f"cache: must not offload its layers, as this {type(cache).__name__} does; prefill with a DynamicCache "
            "that does not"
        )
    known = () if layout is None else layout.layers
    tensors, tokens = [], []
    layer: Any
    layers: Any = decoder_cache(cache).layers
    chosen = attention_layers(cache, layout) if layout is not None and layout.states else range(len(layers))
    for place, index in enumerate(chosen):
        layer = layers[index]
        if type(layer) not in _PLAIN_LAYERS and not keeps_all:
            raise UnsupportedModelError(
                f"cache: must hold plain keys and values, but layer {index} is a {type(layer).__name__}; prefill with "
                "a DynamicCache"
            )
        seen = int(layer.get_seq_length())
        if seen == 0:
            raise InputError(f"cache: must hold tokens, but layer {index} is empty; run a forward pass first")
        held = layer.keys.shape[-2]
        drops = past_windows and isinstance(layer, DynamicSlidingWindowLayer)
        if seen > held and not drops:
            raise UnsupportedModelError(
                f"cache: must hold all tokens, but layer {index} is a sliding window that holds {held} of {seen}; "
                "prefill with past_key_values=DynamicCache() (no config), which keeps all"
            )
        keys, values = layer_units(layer, known[place]) if place < len(known) else (layer.keys, layer.values)
        tensors.append((keys[:, :, :seen], values[:, :, :seen]))
        tokens.append(seen)
    if not tensors and not keeps_all:
        raise InputError("cache: must hold tokens, got an empty one; run a forward pass first")
    for index, (keys, values) in enumerate(tensors):
        for name, tensor in (("keys", keys), ("values", values)):
            alike = tensor.shape[0] == tensors[0][0].shape[0] and tensor.shape[2] == keys.shape[2]
            if not alike or tokens[index] != tokens[0]:
                raise InputError(
                    f"cache: must hold the same batch and tokens in every layer, got {name} {list(tensor.shape)} in "
                    f"layer {index} and keys {list(tensors[0][0].shape)} in layer 0"
                )
            if tensor.is_meta:
                raise InputError(
                    "cache: must be on a device that holds values, got the meta device; load the model on a real one"
                )
    return tensors


def tokens_seen(cache: Cache, layout: KVLayout) -> int:
    """Return the columns of a cache, of which sliding windows may have dropped some."""
    layers: Any = decoder_cache(cache).layers
    return int(layers[attention_layers(cache, layout)[0] if layout.states else 0].get_seq_length())


def shape_of_tokens(*given: torch.Tensor | None) -> tuple[int, int]:
    """Return rows and columns of a cache without keys of tokens, from its ids or its mask."""
    tokens = next((each for each in given if isinstance(each, torch.Tensor)), None)
    if tokens is None or tokens.ndim not in (1, 2):
        raise InputError(
            "input_ids: must be given, or attention_mask, [B, T] of the cached tokens: no layer of this model holds "
            "keys and values that would tell how many there are"
        )
    rows, columns = (tokens[None] if tokens.ndim == 1 else tokens).shape
    return rows, columns


def row_ids(input_ids: torch.Tensor | None, paddings: Sequence[int], width: int) -> I64 | None:
    """Return the ids of a cache's tokens as int64 `[B, width]` on the CPU; NO_TOKEN for the padding of each row."""
    if input_ids is None:
        return None
    if not isinstance(input_ids, torch.Tensor):
        raise InputError(f"input_ids: must be a tensor [B, T], got {type(input_ids).__name__}")
    rows = input_ids[None] if input_ids.ndim == 1 else input_ids
    if tuple(rows.shape) != (len(paddings), width):
        # What generate returns has one token more than the cache: the last one was not run through the model.
        raise InputError(
            f"input_ids: must have the shape [B, T] = [{len(paddings)}, {width}] of the cached tokens, got "
            f"{list(input_ids.shape)}: of what generate returns, pass sequences[:, : cache.get_seq_length()]"
        )
    padded = torch.arange(width) < torch.tensor(paddings)[:, None]
    ids = rows.detach().cpu().masked_fill(padded, NO_TOKEN)
    return as_token_ids(ids.flatten(), ids.numel(), "input_ids").reshape(ids.shape)


def chunk_spans(tokens: int, chunk_tokens: int) -> list[tuple[int, int]]:
    """Return first and last token (exclusive) of each chunk of a row."""
    if type(chunk_tokens) is not int or chunk_tokens <= 0:
        raise InputError(f"chunk_tokens: must be an int above 0, got {chunk_tokens!r}")
    return [(t, min(t + chunk_tokens, tokens)) for t in range(0, tokens, chunk_tokens)]


def with_dtype(layout: KVLayout, dtype: torch.dtype) -> KVLayout:
    """Return the layout with this dtype; unchanged for a dtype that `KVChunk` refuses."""
    names = {value: name for name, value in TORCH_DTYPES.items()}
    return replace(layout, dtype=names.get(dtype, layout.dtype))
