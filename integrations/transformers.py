"""transformers caches <-> cuvee blobs.

    cache.layers[l].keys [B, H, T, D]  --row b, tokens t0..t1-->  KVChunk [T, H, D] views  --codec-->  blob

A list of blobs is row-major: all chunks of row 0 in order, then row 1, and so on. Each row's first chunk
starts at position 0, which is how `decode_cache` finds the rows again; the blobs themselves know nothing of
the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from cuvee.codec.errors import InputError, ProfileMismatch, UnsupportedModel
from cuvee.codec.layout import TORCH_DTYPES, KVChunk, KVLayout

# Exact types: subclasses keep further state (quantised, indexed, recurrent) that keys and values do not hold.
_PLAIN_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer)


class HasLayout(Protocol):
    """What is needed of a profile."""

    @property
    def layout(self) -> KVLayout:
        """Layout of the model the profile was made for."""
        ...


class CacheCodec(Protocol):
    """What is needed of a codec; `cuvee.Codec` is one."""

    @property
    def profile(self) -> HasLayout:
        """The codec's profile."""
        ...

    def encode(self, chunk: KVChunk) -> bytes:
        """Chunk -> blob."""
        ...

    def decode(self, blob: bytes, start: int | None = None) -> KVChunk:
        """Blob -> chunk, where it was or at `start`."""
        ...


def encode_cache(
    codec: CacheCodec,
    cache: Cache,
    chunk_tokens: int = 256,
    *,
    attention_mask: torch.Tensor | None = None,
) -> list[bytes]:
    """Compress a transformers cache. One on a GPU is copied to the CPU, where the codec runs.

    Args:
        codec: codec whose profile belongs to the model; its dtype may be another than the cache's.
        cache: `DynamicCache` or `StaticCache`, keys and values [B, H, T, D] per layer, from position 0 on.
        chunk_tokens: tokens per blob; the last blob of a row may hold fewer.
        attention_mask: [B, T], needed for a left-padded batch. Padding is not stored. Positions must count
            from each row's first real token, as `generate` counts them; a plain forward call counts columns
            unless it is given `position_ids`.

    Returns:
        Blobs, row by row, each row in token order.

    Raises:
        InputError: an empty cache, one of other shapes than the profile's layout, or a mask that is not left
            padding.
        UnsupportedModel: a sliding-window layer has dropped tokens, or a layer does not hold plain keys and
            values.
    """
    tensors = [(keys.cpu(), values.cpu()) for keys, values in _plain_tensors(cache)]
    layout = _with_dtype(codec.profile.layout, tensors[0][0].dtype)
    rows, _, width, _ = tensors[0][0].shape
    blobs = []
    for row, padding in enumerate(_paddings(attention_mask, rows, width)):
        for chunk in _row_chunks(tensors, layout, chunk_tokens, row, padding):
            blobs.append(codec.encode(chunk))
    return blobs


def decode_cache(
    codec: CacheCodec,
    blobs: Sequence[bytes],
    config: Any,
    device: torch.device | str | None = None,
    *,
    attention_mask: torch.Tensor | None = None,
) -> DynamicCache:
    """Rebuild a cache from the blobs of `encode_cache`.

    Rows are told apart by the chunks that start at position 0. All rows must hold the same number of tokens,
    or, with a mask, exactly the unmasked ones. A list that lost whole rows, or a single row that lost its
    last blobs, is a smaller cache and not an error: pass the mask (all ones) where that must be noticed.

    Args:
        codec: codec with the profile the blobs were made with.
        blobs: the list in the order `encode_cache` returned it.
        config: transformers config of the model; sliding-window layers keep what the model itself would keep.
        device: where the cache goes; None leaves it where the codec decodes.
        attention_mask: [B, T] of a left-padded batch; padded columns are filled with zeros.

    Returns:
        `DynamicCache` in the dtype of the cache that was encoded.

    Raises:
        InputError: no blobs, or blobs missing, repeated or out of order (the message names the index).
        ProfileMismatch: `config` is another model than the profile's, or a blob decodes to another layout.
    """
    if isinstance(blobs, bytes | bytearray | memoryview) or not blobs:
        raise InputError("blobs must be a non-empty list of bytes, as encode_cache returns it")
    _check_config(config, codec.profile.layout)
    # The last blob tells the length of a row, so that every row is allocated once at its full size.
    last = codec.decode(blobs[-1])
    layout = replace(codec.profile.layout, dtype=last.layout.dtype)
    if device is None:
        device = last.device
    if attention_mask is None:
        paddings, width = None, last.end
    else:
        width = attention_mask.shape[-1]
        paddings = _paddings(attention_mask, attention_mask.shape[0], width)

    rows: list[_Row] = []
    for index, blob in enumerate(blobs):
        chunk = last if index == len(blobs) - 1 else codec.decode(blob)
        if chunk.layout.fingerprint != layout.fingerprint:
            raise ProfileMismatch(
                f"blobs[{index}] has another layout than the codec's profile, or another dtype than the last blob"
            )
        if chunk.start == 0 and (not rows or rows[-1].missing == 0):
            if paddings is not None and len(rows) == len(paddings):
                raise InputError(f"blobs[{index}] starts row {len(rows)}, but attention_mask has {len(paddings)} rows")
            rows.append(_Row(layout, 0 if paddings is None else paddings[len(rows)], width, device))
        position = rows[-1].position if rows else 0
        if not rows or chunk.start != position or chunk.tokens > rows[-1].missing:
            raise InputError(
                f"blobs[{index}] holds tokens {chunk.start} to {chunk.end} where token {position} of row "
                f"{max(len(rows) - 1, 0)} comes next: blobs are missing, repeated, out of order or of other "
                "lengths"
            )
        rows[-1].write(chunk)
    if rows[-1].missing:
        raise InputError(f"row {len(rows) - 1} lacks its last {rows[-1].missing} tokens: blobs are missing at the end")
    if paddings is not None and len(rows) != len(paddings):
        raise InputError(f"blobs hold {len(rows)} rows, attention_mask has {len(paddings)}")

    cache = DynamicCache(config=config)
    for layer in range(layout.num_layers):
        cache.update(_take_layer([row.keys for row in rows]), _take_layer([row.values for row in rows]), layer)
    return cache


def chunks_from_cache(
    cache: Cache, layout: KVLayout, chunk_tokens: int = 256, row: int = 0, padding: int = 0
) -> list[KVChunk]:
    """One row of a cache as chunks of at most `chunk_tokens` tokens, in order (views, no copies).

    Args:
        cache: as for `encode_cache`.
        layout: layout of the model.
        chunk_tokens: tokens per chunk; the last may hold fewer.
        row: index into the batch.
        padding: leading columns to skip; the column after them is position 0.

    Raises:
        InputError, UnsupportedModel: as for `encode_cache`, and for a row or padding out of range.
    """
    return _row_chunks(_plain_tensors(cache), layout, chunk_tokens, row, padding)


class _Row:
    """One sequence being put together: per layer [H, width, D], the leading padding zero."""

    def __init__(self, layout: KVLayout, padding: int, width: int, device: torch.device | str) -> None:
        self._padding = padding
        self._width = width
        self.position = 0
        self.keys = [self._empty(layout, layer.kv_heads, layer.head_dim, device) for layer in layout.layers]
        self.values = [self._empty(layout, layer.kv_heads, layer.value_dim, device) for layer in layout.layers]

    def _empty(self, layout: KVLayout, heads: int, size: int, device: torch.device | str) -> torch.Tensor:
        tensor = torch.empty(heads, self._width, size, dtype=layout.torch_dtype, device=device)
        tensor[:, : self._padding].zero_()
        return tensor

    @property
    def missing(self) -> int:
        return self._width - self._padding - self.position

    def write(self, chunk: KVChunk) -> None:
        columns = slice(self._padding + chunk.start, self._padding + chunk.end)
        for target, source in zip(self.keys + self.values, chunk.keys + chunk.values, strict=True):
            target[:, columns].copy_(source.transpose(0, 1))
        self.position = chunk.end


def _take_layer(rows: list[list[torch.Tensor]]) -> torch.Tensor:
    """Next layer of every row as [B, H, T, D]; popped, so that a decoded batch is not held twice."""
    layers = [row.pop(0) for row in rows]
    return layers[0][None] if len(layers) == 1 else torch.stack(layers)


def _plain_tensors(cache: Cache) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values [B, H, T, D] of every layer, all from the first token on."""
    if not isinstance(cache, Cache):
        raise InputError(f"cache must be a transformers Cache, got {type(cache).__name__}: build a DynamicCache")
    if isinstance(cache, EncoderDecoderCache):
        raise UnsupportedModel("EncoderDecoderCache: encoder-decoder models are not supported")
    if getattr(cache, "offloading", False):
        raise InputError(f"{type(cache).__name__} offloads its layers: prefill with a DynamicCache that does not")
    tensors = []
    layer: Any
    for index, layer in enumerate(cache.layers):
        if type(layer) not in _PLAIN_LAYERS:
            raise UnsupportedModel(
                f"layer {index} of the cache is a {type(layer).__name__}, which does not hold plain keys and "
                "values: prefill with a DynamicCache"
            )
        seen = int(layer.get_seq_length())
        if seen == 0:
            raise InputError(f"layer {index} of the cache is empty: run a forward pass first")
        held = layer.keys.shape[-2]
        if seen > held:
            raise UnsupportedModel(
                f"layer {index} of the cache is a sliding window that holds {held} of {seen} tokens: prefill "
                "with past_key_values=DynamicCache() (no config), which keeps all of them"
            )
        tensors.append((layer.keys[:, :, :seen], layer.values[:, :, :seen]))
    if not tensors:
        raise InputError("the cache is empty: run a forward pass first")
    for index, (keys, values) in enumerate(tensors):
        for name, tensor in (("keys", keys), ("values", values)):
            if tensor.shape[0] != tensors[0][0].shape[0] or tensor.shape[2] != tensors[0][0].shape[2]:
                raise InputError(
                    f"{name} of layer {index} have shape {list(tensor.shape)}, keys of layer 0 "
                    f"{list(tensors[0][0].shape)}: batch and tokens must agree"
                )
    return tensors


def _row_chunks(
    tensors: list[tuple[torch.Tensor, torch.Tensor]],
    layout: KVLayout,
    chunk_tokens: int,
    row: int,
    padding: int,
) -> list[KVChunk]:
    rows, _, width, _ = tensors[0][0].shape
    if type(chunk_tokens) is not int or chunk_tokens <= 0:
        raise InputError(f"chunk_tokens must be an int above 0, got {chunk_tokens!r}")
    if type(row) is not int or not 0 <= row < rows:
        raise InputError(f"row must be an int from 0 to {rows - 1}, got {row!r}")
    if type(padding) is not int or not 0 <= padding < width:
        raise InputError(f"padding must be an int from 0 to {width - 1}, got {padding!r}")
    whole = KVChunk(
        [keys[row, :, padding:].transpose(0, 1) for keys, _ in tensors],
        [values[row, :, padding:].transpose(0, 1) for _, values in tensors],
        layout,
    )
    return [whole.slice(t, min(t + chunk_tokens, whole.tokens)) for t in range(0, whole.tokens, chunk_tokens)]


def _paddings(attention_mask: torch.Tensor | None, rows: int, width: int) -> list[int]:
    """Number of padded columns at the left of each row."""
    if attention_mask is None:
        return [0] * rows
    if tuple(attention_mask.shape) != (rows, width):
        raise InputError(
            f"attention_mask must have shape [B, T] = [{rows}, {width}] (cached tokens only), "
            f"got {list(attention_mask.shape)}"
        )
    real = attention_mask != 0
    paddings: list[int] = (width - real.sum(dim=1)).tolist()
    for row, padding in enumerate(paddings):
        if padding == width or not bool(real[row, padding:].all()):
            raise InputError(
                f"attention_mask row {row} must be zeros, then at least one 1 (left padding): right padding, "
                "holes and empty rows are not supported"
            )
    return paddings


def _with_dtype(layout: KVLayout, dtype: torch.dtype) -> KVLayout:
    """The layout for a cache of this dtype; as it is where `KVChunk` will refuse the dtype."""
    names = {value: name for name, value in TORCH_DTYPES.items()}
    return replace(layout, dtype=names.get(dtype, layout.dtype))


def _check_config(config: Any, layout: KVLayout) -> None:
    decoder = config.get_text_config(decoder=True)
    if decoder.num_hidden_layers != layout.num_layers:
        raise ProfileMismatch(
            f"config has {decoder.num_hidden_layers} layers, the codec's profile is for {layout.model_type} "
            f"with {layout.num_layers}"
        )
    try:
        expected = KVLayout.from_config(decoder, dtype=layout.dtype)
    except UnsupportedModel:
        return  # A layout built by hand: there is nothing to compare it with.
    if expected.fingerprint != layout.fingerprint:
        raise ProfileMismatch(
            f"config ({decoder.model_type}) and the codec's profile ({layout.model_type}) describe different "
            "caches: heads, head sizes, RoPE, sliding windows or position limit differ"
        )
