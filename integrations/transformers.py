"""transformers caches <-> cuvee blobs.

    cache.layers[l].keys [B, H, T, D]  --row b, tokens t0..t1-->  KVChunk [T, H, D] views  --codec-->  blob

On a device that the codec serves, nothing is copied to the CPU, and all chunks of all rows are coded in one go. There
the cache is treated as a `PagedCache` of B blocks: slot b * T + t is column t of row b.

A list of blobs is row-major: all chunks of row 0 in order, then those of row 1, and so on. The first chunk of each row
starts at position 0, which is how `decode_cache` tells the rows apart. The blobs themselves know nothing of the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
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
from cuvee.codec.container import read_header
from cuvee.codec.dtypes import TORCH_DTYPES
from cuvee.codec.errors import InputError, ProfileMismatchError, UnsupportedModelError, allocations
from cuvee.codec.layout import KVLayout
from cuvee.codec.paged import PagedCache

# Compared as exact types: subclasses keep further state (quantized, indexed, recurrent) beside keys and values.
_PLAIN_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer)


class HasLayout(Protocol):
    """What these functions need of a profile."""

    @property
    def layout(self) -> KVLayout:
        """Layout of the model that the profile was made for."""
        ...


class CacheCodec(Protocol):
    """What these functions need of a codec. Only `cuvee.Codec` also codes caches on a device, and binds blobs."""

    @property
    def profile(self) -> HasLayout:
        """The codec's profile."""
        ...

    def encode(self, chunk: KVChunk) -> bytes:
        """Compress a chunk into a blob."""
        ...

    def decode(self, blob: bytes, start: int | None = None) -> KVChunk:
        """Restore a chunk at its own positions, or from position `start` on."""
        ...


def encode_cache(
    codec: CacheCodec,
    cache: Cache,
    chunk_tokens: int = 256,
    *,
    attention_mask: torch.Tensor | None = None,
    associated: Sequence[bytes] | None = None,
) -> list[bytes]:
    """Compress a transformers cache: on its own device if the codec serves that one, else a copy of it on the CPU.

        >>> import cuvee
        >>> from transformers import LlamaConfig
        >>> config = LlamaConfig(num_hidden_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
        >>> layout = cuvee.KVLayout.from_config(config, "bfloat16")
        >>> codec = cuvee.Codec(cuvee.Profile.generic(layout), quality="lossless")
        >>> cache = DynamicCache()  # what a forward pass of the model fills
        >>> for layer in range(2):
        ...     _ = cache.update(*torch.randn(2, 1, 2, 300, 16).bfloat16(), layer)
        >>> blobs = encode_cache(codec, cache)
        >>> len(blobs)  # 256 tokens, and the other 44
        2
        >>> again = decode_cache(codec, blobs, config)
        >>> torch.equal(again.layers[1].keys, cache.layers[1].keys)
        True

    Args:
        codec: a codec whose profile belongs to the model. The cache may have another dtype than the profile.
        cache: `DynamicCache` or `StaticCache`, keys and values [B, H, T, D] per layer, from position 0 on.
        chunk_tokens: tokens per blob. The last blob of a row may hold fewer.
        attention_mask: [B, T], needed for a left-padded batch. Padding is not stored. Positions must count from the
            first real token of each row, as `generate` counts them. A plain forward call counts columns instead,
            unless it is given `position_ids`.
        associated: for a codec with a key, what the blobs of each row are bound to, such as the name under which they
            are stored (see `Codec.encode`); B entries. `decode_cache` has to be given the same.

    Returns:
        Blobs, row by row, each row in token order.

    Raises:
        InputError: the cache is empty or its shapes are not those of the profile's layout; the mask is not left
            padding; `associated` has another number of entries than the cache has rows, or the codec has no key.
        UnsupportedModelError: a sliding-window layer has dropped tokens, or a layer holds no plain keys and values.
    """
    tensors = _plain_tensors(cache)
    layout = _with_dtype(codec.profile.layout, tensors[0][0].dtype)
    rows, _, width, _ = tensors[0][0].shape
    paddings = _paddings(attention_mask, rows, width)
    bound = _bound_rows(codec, associated, rows)
    devices = {tensor.device for pair in tensors for tensor in pair}
    if isinstance(codec, Codec) and len(devices) == 1 and codec.on_device(*devices):
        return _encode_batch(codec, tensors, layout, chunk_tokens, paddings, bound)
    tensors = [(keys.cpu(), values.cpu()) for keys, values in tensors]
    blobs = []
    for row, padding in enumerate(paddings):
        for chunk in _row_chunks(tensors, layout, chunk_tokens, row, padding):
            one = codec.encode(chunk, associated=bound[row]) if isinstance(codec, Codec) else codec.encode(chunk)
            blobs.append(one)
    return blobs


def decode_cache(
    codec: CacheCodec,
    blobs: Sequence[bytes],
    config: Any,
    device: torch.device | str | None = None,
    *,
    attention_mask: torch.Tensor | None = None,
    max_tokens: int | None = MAX_DECODED_TOKENS,
    associated: Sequence[bytes] | None = None,
) -> DynamicCache:
    """Rebuild a cache from the blobs of `encode_cache`, which has an example.

    A new row begins with each chunk that starts at position 0. All rows must hold the same number of tokens, or, with
    a mask, exactly the unmasked ones. If whole rows are missing, or the last blobs of a single row, the result is a
    smaller cache and not an error. Pass the mask (all ones) if that has to be noticed.

    Args:
        codec: a codec with the profile that the blobs were made with.
        blobs: the list, in the order in which `encode_cache` returned it.
        config: transformers config of the model. Sliding-window layers keep what the model itself would keep.
        device: where the cache goes. None leaves it where the codec decodes, which for `cuvee.Codec` is the CPU. On a
            device that the codec serves, all blobs are decoded there in one go.
        attention_mask: [B, T] of a left-padded batch. Padded columns are filled with zeros.
        max_tokens: refuse to rebuild more than B * T tokens, padding included, since small blobs may claim a huge
            cache. If blobs come from others, give what you expect. None means no limit.
        associated: what the blobs of each row were bound to when they were encoded; B entries.

    Returns:
        `DynamicCache` in the dtype of the cache that was encoded.

    Raises:
        InputError: there are no blobs, or some are missing, repeated or out of order (the message names the index);
            they hold more than `max_tokens`; `associated` has another number of entries than they hold rows, or the
            codec has no key.
        OutOfMemoryError: the cache cannot be allocated.
        ProfileMismatchError: `config` is another model than the profile's, or a blob decodes to another layout.
        FormatError, VersionError, CorruptError: a blob is damaged, or bound to something else.
        KeyMismatchError: a blob has the tag of another key, or only one of blob and codec has a key.
    """
    if isinstance(blobs, bytes | bytearray | memoryview) or not blobs:
        raise InputError("blobs: must be a non-empty list of bytes, as encode_cache returns it")
    bound = _bound_blobs(codec, associated, blobs)
    _check_config(config, codec.profile.layout)
    with allocations("rebuilding a cache"):
        if isinstance(codec, Codec) and codec.on_device("cpu" if device is None else device):
            layers = _decode_batch(codec, blobs, bound, "cpu" if device is None else device, attention_mask, max_tokens)
        else:
            layers = _decode_each(codec, blobs, bound, device, attention_mask, max_tokens)
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
        chunk_tokens: tokens per chunk. The last may hold fewer.
        row: index into the batch.
        padding: how many leading columns to skip. The column after them is position 0.

    Raises:
        InputError, UnsupportedModelError: as for `encode_cache`; also a row or padding that is out of range.
    """
    return _row_chunks(_plain_tensors(cache), layout, chunk_tokens, row, padding)


def _encode_batch(
    codec: Codec,
    tensors: list[tuple[torch.Tensor, torch.Tensor]],
    layout: KVLayout,
    chunk_tokens: int,
    paddings: list[int],
    bound: list[bytes],
) -> list[bytes]:
    """Encode all chunks of all rows in one go, on their device; the blobs of each row are `bound` to its bytes."""
    width = tensors[0][0].shape[2]
    all_slots = torch.arange(len(paddings) * width, device=tensors[0][0].device)
    slots, starts, associated = [], [], []
    for row, padding in enumerate(paddings):
        first = row * width + padding
        for start, end in _spans(_whole_row(tensors, layout, row, padding).tokens, chunk_tokens):
            slots.append(all_slots[first + start : first + end])
            starts.append(start)
            associated.append(bound[row])
    cache = PagedCache(layout, [keys.transpose(1, 2) for keys, _ in tensors], [v.transpose(1, 2) for _, v in tensors])
    return codec.encode_paged(cache, slots, starts, associated=associated)


def _decode_batch(
    codec: Codec,
    blobs: Sequence[bytes],
    bound: Sequence[bytes],
    device: torch.device | str,
    attention_mask: torch.Tensor | None,
    max_tokens: int | None,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values `[B, H, T, D]` of each layer in turn, decoded in one go on `device`."""
    # Nothing is allocated before all headers agree.
    opened = [codec.open(blob, associated=to) for blob, to in zip(blobs, bound, strict=True)]
    headers = [one.header for one in opened]
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
    codec.decode_paged(opened, cache, slots).check()
    return ((keys.pop(0), values.pop(0)) for _ in layout.layers)


def _decode_each(
    codec: CacheCodec,
    blobs: Sequence[bytes],
    bound: Sequence[bytes],
    device: torch.device | str | None,
    attention_mask: torch.Tensor | None,
    max_tokens: int | None,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values `[B, H, T, D]` of each layer in turn, decoded blob by blob and moved to `device`."""

    def decode(index: int) -> KVChunk:
        if isinstance(codec, Codec):
            return codec.decode(blobs[index], max_tokens=max_tokens, associated=bound[index])
        return codec.decode(blobs[index])

    # The last blob tells how long a row is, so that every row is allocated once at its full size.
    last = decode(len(blobs) - 1)
    layout = replace(codec.profile.layout, dtype=last.layout.dtype)
    rows = _Rows(layout, last.end, attention_mask, max_tokens)
    filled: list[_Row] = []
    for index in range(len(blobs)):
        chunk = last if index == len(blobs) - 1 else decode(index)
        row, column = rows.take(index, chunk.layout.fingerprint, chunk.start, chunk.tokens)
        if row == len(filled):
            filled.append(_Row(layout, column, rows.width, last.device if device is None else device))
        filled[row].write(chunk, column)
    rows.finish()
    keys, values = [row.keys for row in filled], [row.values for row in filled]
    return ((_take_layer(keys), _take_layer(values)) for _ in layout.layers)


def _bound_rows(codec: CacheCodec, associated: Sequence[bytes] | None, rows: int) -> list[bytes]:
    """What the blobs of each row are bound to."""
    if associated is None:
        return [b""] * rows
    if not isinstance(codec, Codec):
        raise InputError(f"associated: only a cuvee.Codec binds blobs, not {type(codec).__name__}")
    given: object = associated
    if isinstance(given, bytes) or len(associated) != rows:
        got = "bytes" if isinstance(given, bytes) else f"{len(associated)} entries"
        raise InputError(f"associated: must be a list with one entry per row, {rows} in all, got {got}")
    return list(associated)


def _bound_blobs(codec: CacheCodec, associated: Sequence[bytes] | None, blobs: Sequence[bytes]) -> list[bytes]:
    """What each blob is bound to: the entry of its row."""
    if associated is None:
        return [b""] * len(blobs)
    # Starts may be forged. Then the tag, which covers them, does not verify.
    begun = list(accumulate(int(read_header(blob).start == 0) for blob in blobs))
    rows = _bound_rows(codec, associated, begun[-1])
    return [rows[max(count, 1) - 1] if rows else b"" for count in begun]


class _Rows:
    """Finds the place of each blob of a list, in order, and refuses a list that does not make whole rows.

    Args:
        layout: the layout that every blob must have.
        width: columns per row, if there is no mask.
        attention_mask: `[B, T]` of a left-padded batch, or None.
        max_tokens: limit of the columns of all rows together.

    Attributes:
        width: columns per row.
        paddings: padded columns of each row begun so far.
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
        self._position = 0  # how many tokens of the last row have come
        self._missing = 0  # and how many have not

    @property
    def count(self) -> int:
        """How many rows have begun so far."""
        return len(self.paddings)

    def take(self, index: int, fingerprint: bytes, start: int, tokens: int) -> tuple[int, int]:
        """Row and first column of the next blob, number `index`. `fingerprint` is that of its layout."""
        if fingerprint != self._fingerprint:
            raise ProfileMismatchError(
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
        """Refuse a list that ends too early: rows are missing, or the last tokens of one."""
        if self._missing:
            raise InputError(
                f"row {self.count - 1} lacks its last {self._missing} tokens: blobs are missing at the end"
            )
        if self._masked is not None and self.count != len(self._masked):
            raise InputError(f"blobs hold {self.count} rows, attention_mask has {len(self._masked)}")


class _Row:
    """One sequence being put together: [H, width, D] per layer, with zeros as leading padding."""

    def __init__(self, layout: KVLayout, padding: int, width: int, device: torch.device | str) -> None:
        def empty(heads: int, size: int) -> torch.Tensor:
            tensor = torch.empty(heads, width, size, dtype=layout.torch_dtype, device=device)
            tensor[:, :padding].zero_()
            return tensor

        self.keys = [empty(layer.kv_heads, layer.head_dim) for layer in layout.layers]
        self.values = [empty(layer.kv_heads, layer.value_dim) for layer in layout.layers]

    def write(self, chunk: KVChunk, column: int) -> None:
        """Put a chunk in its place, its first token in `column`."""
        columns = slice(column, column + chunk.tokens)
        for target, source in zip(self.keys + self.values, chunk.keys + chunk.values, strict=True):
            target[:, columns].copy_(source.transpose(0, 1))


def _take_layer(rows: list[list[torch.Tensor]]) -> torch.Tensor:
    """The next layer of every row as [B, H, T, D]. It is popped, so that a decoded batch is not held twice."""
    layers = [row.pop(0) for row in rows]
    return layers[0][None] if len(layers) == 1 else torch.stack(layers)


def _plain_tensors(cache: Cache) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values [B, H, T, D] of every layer, from the first token on."""
    if not isinstance(cache, Cache):
        raise InputError(f"cache: must be a transformers Cache, got {type(cache).__name__}; build a DynamicCache")
    if isinstance(cache, EncoderDecoderCache):
        raise UnsupportedModelError("cache: is an EncoderDecoderCache; encoder-decoder models are not supported")
    if getattr(cache, "offloading", False):
        raise InputError(
            f"cache: {type(cache).__name__} offloads its layers; prefill with a DynamicCache that does not"
        )
    tensors = []
    layer: Any
    for index, layer in enumerate(cache.layers):
        if type(layer) not in _PLAIN_LAYERS:
            raise UnsupportedModelError(
                f"cache: layer {index} is a {type(layer).__name__}, which does not hold plain keys and values; "
                "prefill with a DynamicCache"
            )
        seen = int(layer.get_seq_length())
        if seen == 0:
            raise InputError(f"cache: layer {index} is empty; run a forward pass first")
        held = layer.keys.shape[-2]
        if seen > held:
            raise UnsupportedModelError(
                f"cache: layer {index} is a sliding window that holds {held} of {seen} tokens; prefill with "
                "past_key_values=DynamicCache() (no config), which keeps all of them"
            )
        tensors.append((layer.keys[:, :, :seen], layer.values[:, :, :seen]))
    if not tensors:
        raise InputError("cache: is empty; run a forward pass first")
    for index, (keys, values) in enumerate(tensors):
        for name, tensor in (("keys", keys), ("values", values)):
            if tensor.shape[0] != tensors[0][0].shape[0] or tensor.shape[2] != tensors[0][0].shape[2]:
                raise InputError(
                    f"cache: {name} of layer {index} have shape {list(tensor.shape)}, keys of layer 0 "
                    f"{list(tensors[0][0].shape)}; batch and tokens must agree"
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
        raise InputError(f"row: must be an int from 0 to {rows - 1}, got {row!r}")
    if type(padding) is not int or not 0 <= padding < width:
        raise InputError(f"padding: must be an int from 0 to {width - 1}, got {padding!r}")
    return KVChunk(
        [keys[row, :, padding:].transpose(0, 1) for keys, _ in tensors],
        [values[row, :, padding:].transpose(0, 1) for _, values in tensors],
        layout,
    )


def _spans(tokens: int, chunk_tokens: int) -> list[tuple[int, int]]:
    """The first token of each chunk of a row, and the one after its last."""
    if type(chunk_tokens) is not int or chunk_tokens <= 0:
        raise InputError(f"chunk_tokens: must be an int above 0, got {chunk_tokens!r}")
    return [(t, min(t + chunk_tokens, tokens)) for t in range(0, tokens, chunk_tokens)]


def _paddings(attention_mask: torch.Tensor | None, rows: int, width: int) -> list[int]:
    """How many columns at the left of each row are padding."""
    if attention_mask is None:
        return [0] * rows
    if tuple(attention_mask.shape) != (rows, width):
        raise InputError(
            f"attention_mask: must have shape [B, T] = [{rows}, {width}] (cached tokens only), "
            f"got {list(attention_mask.shape)}"
        )
    real = attention_mask != 0
    paddings: list[int] = (width - real.sum(dim=1)).tolist()
    for row, padding in enumerate(paddings):
        if padding == width or not bool(real[row, padding:].all()):
            raise InputError(
                f"attention_mask: row {row} must be zeros, then at least one 1 (left padding); right padding, "
                "holes and empty rows are not supported"
            )
    return paddings


def _with_dtype(layout: KVLayout, dtype: torch.dtype) -> KVLayout:
    """The layout for a cache of this dtype. It is left unchanged if `KVChunk` is going to refuse the dtype."""
    names = {value: name for name, value in TORCH_DTYPES.items()}
    return replace(layout, dtype=names.get(dtype, layout.dtype))


def _check_config(config: Any, layout: KVLayout) -> None:
    decoder = config.get_text_config(decoder=True)
    if decoder.num_hidden_layers != layout.num_layers:
        raise ProfileMismatchError(
            f"config: has {decoder.num_hidden_layers} layers, the codec's profile is for {layout.model_type} "
            f"with {layout.num_layers}"
        )
    try:
        expected = KVLayout.from_config(decoder, dtype=layout.dtype)
    except UnsupportedModelError:
        return  # the layout was built by hand, so there is nothing to compare it with
    if expected.fingerprint != layout.fingerprint:
        raise ProfileMismatchError(
            f"config: describes other caches ({decoder.model_type}) than the codec's profile ({layout.model_type}); "
            "heads, head sizes, RoPE, sliding windows or position limit differ"
        )
