"""transformers caches <-> cuvee blobs.

    cache.layers[l].keys [B, H, T, D]  --row b, tokens t0..t1-->  KVChunk [T, H, D] views  --codec-->  blob

On a device that the codec serves, nothing is copied to the CPU, and all chunks of all rows are coded in one go: there
the cache is a `PagedCache` of B blocks, whose slot b * T + t is column t of row b.

A list of blobs is row-major: all chunks of row 0 in order, then row 1, and so on. Each row's first chunk
starts at position 0, which is how `decode_cache` finds the rows again; the blobs themselves know nothing of
the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
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

from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import MAX_DECODED_TOKENS, Codec, check_tokens
from cuvee.codec.dtypes import TORCH_DTYPES
from cuvee.codec.errors import InputError, ProfileMismatch, UnsupportedModel, allocations
from cuvee.codec.layout import KVLayout
from cuvee.codec.paged import PagedCache

# Exact types: subclasses keep further state (quantized, indexed, recurrent) that keys and values do not hold.
_PLAIN_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer)


class HasLayout(Protocol):
    """What is needed of a profile."""

    @property
    def layout(self) -> KVLayout:
        """Layout of the model the profile was made for."""
        ...


class CacheCodec(Protocol):
    """What is needed of a codec; `cuvee.Codec` is one, and alone has a way of its own for caches on a device."""

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
    """Compress a transformers cache where it lies, if the codec serves that device; else a copy on the CPU.

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
    tensors = _plain_tensors(cache)
    layout = _with_dtype(codec.profile.layout, tensors[0][0].dtype)
    rows, _, width, _ = tensors[0][0].shape
    paddings = _paddings(attention_mask, rows, width)
    devices = {tensor.device for pair in tensors for tensor in pair}
    if isinstance(codec, Codec) and len(devices) == 1 and codec.on_device(*devices):
        return _encode_batch(codec, tensors, layout, chunk_tokens, paddings)
    tensors = [(keys.cpu(), values.cpu()) for keys, values in tensors]
    blobs = []
    for row, padding in enumerate(paddings):
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
    max_tokens: int | None = MAX_DECODED_TOKENS,
) -> DynamicCache:
    """Rebuild a cache from the blobs of `encode_cache`.

    Rows are told apart by the chunks that start at position 0. All rows must hold the same number of tokens,
    or, with a mask, exactly the unmasked ones. A list that lost whole rows, or a single row that lost its
    last blobs, is a smaller cache and not an error: pass the mask (all ones) where that must be noticed.

    Args:
        codec: codec with the profile the blobs were made with.
        blobs: the list in the order `encode_cache` returned it.
        config: transformers config of the model; sliding-window layers keep what the model itself would keep.
        device: where the cache goes; None leaves it where the codec decodes, which for `cuvee.Codec` is the CPU.
            On a device that the codec serves, all blobs are decoded there in one go.
        attention_mask: [B, T] of a left-padded batch; padded columns are filled with zeros.
        max_tokens: refuse to rebuild more than B * T tokens, padding included: small blobs may claim a huge cache.
            Give what you expect where blobs come from others. None: whatever they say.

    Returns:
        `DynamicCache` in the dtype of the cache that was encoded.

    Raises:
        InputError: no blobs, or blobs missing, repeated or out of order (the message names the index); more than
            `max_tokens`.
        OutOfMemory: the cache cannot be allocated.
        ProfileMismatch: `config` is another model than the profile's, or a blob decodes to another layout.
        FormatError, VersionError, CorruptError: a blob is damaged.
    """
    if isinstance(blobs, bytes | bytearray | memoryview) or not blobs:
        raise InputError("blobs must be a non-empty list of bytes, as encode_cache returns it")
    _check_config(config, codec.profile.layout)
    with allocations("rebuilding a cache"):
        if isinstance(codec, Codec) and codec.on_device("cpu" if device is None else device):
            layers = _decode_batch(codec, blobs, "cpu" if device is None else device, attention_mask, max_tokens)
        else:
            layers = _decode_each(codec, blobs, device, attention_mask, max_tokens)
        cache = DynamicCache(config=config)
        for layer in range(codec.profile.layout.num_layers):
            cache.update(*next(layers), layer)
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


def _encode_batch(
    codec: Codec,
    tensors: list[tuple[torch.Tensor, torch.Tensor]],
    layout: KVLayout,
    chunk_tokens: int,
    paddings: list[int],
) -> list[bytes]:
    """All chunks of all rows in one go, on their device."""
    width = tensors[0][0].shape[2]
    all_slots = torch.arange(len(paddings) * width, device=tensors[0][0].device)
    slots, starts = [], []
    for row, padding in enumerate(paddings):
        first = row * width + padding
        for start, end in _spans(_whole_row(tensors, layout, row, padding).tokens, chunk_tokens):
            slots.append(all_slots[first + start : first + end])
            starts.append(start)
    cache = PagedCache(layout, [keys.transpose(1, 2) for keys, _ in tensors], [v.transpose(1, 2) for _, v in tensors])
    return codec.encode_paged(cache, slots, starts)


def _decode_batch(
    codec: Codec,
    blobs: Sequence[bytes],
    device: torch.device | str,
    attention_mask: torch.Tensor | None,
    max_tokens: int | None,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values `[B, H, T, D]` of each layer in turn, decoded in one go on `device`."""
    # Nothing is allocated before all headers agree.
    headers = [codec.check(blob) for blob in blobs]
    layout = replace(codec.profile.layout, dtype=headers[-1].dtype)
    rows = _Rows(layout, headers[-1].start + headers[-1].tokens, attention_mask, max_tokens)
    places = [rows.take(index, h.layout, h.start, h.tokens) for index, h in enumerate(headers)]
    rows.finish()
    allocate = torch.zeros if any(rows.paddings) else torch.empty

    def empty(heads: int, size: int) -> torch.Tensor:
        return allocate(rows.count, heads, rows.width, size, dtype=layout.torch_dtype, device=device)

    keys = [empty(layer.kv_heads, layer.head_dim) for layer in layout.layers]
    values = [empty(layer.kv_heads, layer.value_dim) for layer in layout.layers]
    cache = PagedCache(layout, [k.transpose(1, 2) for k in keys], [v.transpose(1, 2) for v in values])
    all_slots = torch.arange(rows.count * rows.width, device=device)
    slots = []
    for (row, column), header in zip(places, headers, strict=True):
        first = row * rows.width + column
        slots.append(all_slots[first : first + header.tokens])
    codec.decode_paged(blobs, cache, slots).check()
    return ((keys.pop(0), values.pop(0)) for _ in layout.layers)


def _decode_each(
    codec: CacheCodec,
    blobs: Sequence[bytes],
    device: torch.device | str | None,
    attention_mask: torch.Tensor | None,
    max_tokens: int | None,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values `[B, H, T, D]` of each layer in turn, decoded blob by blob and moved to `device`."""
    decode = partial(codec.decode, max_tokens=max_tokens) if isinstance(codec, Codec) else codec.decode
    # The last blob tells the length of a row, so that every row is allocated once at its full size.
    last = decode(blobs[-1])
    layout = replace(codec.profile.layout, dtype=last.layout.dtype)
    rows = _Rows(layout, last.end, attention_mask, max_tokens)
    filled: list[_Row] = []
    for index, blob in enumerate(blobs):
        chunk = last if index == len(blobs) - 1 else decode(blob)
        row, column = rows.take(index, chunk.layout.fingerprint, chunk.start, chunk.tokens)
        if row == len(filled):
            filled.append(_Row(layout, column, rows.width, last.device if device is None else device))
        filled[row].write(chunk, column)
    rows.finish()
    keys, values = [row.keys for row in filled], [row.values for row in filled]
    return ((_take_layer(keys), _take_layer(values)) for _ in layout.layers)


class _Rows:
    """Finds where the blobs of a list go, in order, and refuses a list that is not whole rows.

    Args:
        layout: what every blob must hold.
        width: columns of a row where there is no mask.
        attention_mask: `[B, T]` of a left-padded batch, or None.
        max_tokens: columns of all rows, as a limit.

    Attributes:
        width: columns of every row.
        paddings: of the rows begun so far.
    """

    def __init__(
        self, layout: KVLayout, width: int, attention_mask: torch.Tensor | None, max_tokens: int | None
    ) -> None:
        self._fingerprint = layout.fingerprint
        self._max_tokens = max_tokens
        self._masked: list[int] | None = None
        self.width = width
        if attention_mask is not None:
            self.width = attention_mask.shape[-1]
            self._masked = _paddings(attention_mask, attention_mask.shape[0], self.width)
        self.paddings: list[int] = []
        self._position = 0  # tokens of the last row that are there
        self._missing = 0  # and that are not

    @property
    def count(self) -> int:
        """Rows begun so far."""
        return len(self.paddings)

    def take(self, index: int, fingerprint: bytes, start: int, tokens: int) -> tuple[int, int]:
        """Row and first column of the next blob, `index`; `fingerprint` is that of its layout."""
        if fingerprint != self._fingerprint:
            raise ProfileMismatch(
                f"blobs[{index}] has another layout than the codec's profile, or another dtype than the last blob"
            )
        if start == 0 and not self._missing:
            if self._masked is not None and self.count == len(self._masked):
                raise InputError(f"blobs[{index}] starts row {self.count}, but attention_mask has {self.count} rows")
            check_tokens((self.count + 1) * self.width, self._max_tokens)
            self.paddings.append(0 if self._masked is None else self._masked[self.count])
            self._position, self._missing = 0, self.width - self.paddings[-1]
        if not self.count or start != self._position or tokens > self._missing:
            raise InputError(
                f"blobs[{index}] holds tokens {start} to {start + tokens} where token {self._position} of row "
                f"{max(self.count - 1, 0)} comes next: blobs are missing, repeated, out of order or of other "
                "lengths"
            )
        self._position += tokens
        self._missing -= tokens
        return self.count - 1, self.paddings[-1] + start

    def finish(self) -> None:
        """Refuse rows that are missing, or missing tokens, at the end of the list."""
        if self._missing:
            raise InputError(
                f"row {self.count - 1} lacks its last {self._missing} tokens: blobs are missing at the end"
            )
        if self._masked is not None and self.count != len(self._masked):
            raise InputError(f"blobs hold {self.count} rows, attention_mask has {len(self._masked)}")


class _Row:
    """One sequence being put together: per layer [H, width, D], the leading padding zero."""

    def __init__(self, layout: KVLayout, padding: int, width: int, device: torch.device | str) -> None:
        def empty(heads: int, size: int) -> torch.Tensor:
            tensor = torch.empty(heads, width, size, dtype=layout.torch_dtype, device=device)
            tensor[:, :padding].zero_()
            return tensor

        self.keys = [empty(layer.kv_heads, layer.head_dim) for layer in layout.layers]
        self.values = [empty(layer.kv_heads, layer.value_dim) for layer in layout.layers]

    def write(self, chunk: KVChunk, column: int) -> None:
        """Put a chunk where it belongs, its first token in `column`."""
        columns = slice(column, column + chunk.tokens)
        for target, source in zip(self.keys + self.values, chunk.keys + chunk.values, strict=True):
            target[:, columns].copy_(source.transpose(0, 1))


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
    whole = _whole_row(tensors, layout, row, padding)
    return [whole.slice(first, end) for first, end in _spans(whole.tokens, chunk_tokens)]


def _whole_row(tensors: list[tuple[torch.Tensor, torch.Tensor]], layout: KVLayout, row: int, padding: int) -> KVChunk:
    rows, _, width, _ = tensors[0][0].shape
    if type(row) is not int or not 0 <= row < rows:
        raise InputError(f"row must be an int from 0 to {rows - 1}, got {row!r}")
    if type(padding) is not int or not 0 <= padding < width:
        raise InputError(f"padding must be an int from 0 to {width - 1}, got {padding!r}")
    return KVChunk(
        [keys[row, :, padding:].transpose(0, 1) for keys, _ in tensors],
        [values[row, :, padding:].transpose(0, 1) for _, values in tensors],
        layout,
    )


def _spans(tokens: int, chunk_tokens: int) -> list[tuple[int, int]]:
    """First and end token of each chunk of a row."""
    if type(chunk_tokens) is not int or chunk_tokens <= 0:
        raise InputError(f"chunk_tokens must be an int above 0, got {chunk_tokens!r}")
    return [(t, min(t + chunk_tokens, tokens)) for t in range(0, tokens, chunk_tokens)]


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
