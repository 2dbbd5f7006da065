"""transformers caches <-> cuvee blobs.

    cache.layers[l].keys [B, H, T, D]  --row b, tokens t0..t1-->  KVChunk [T, H, D] views  --codec-->  blob

On a device that the codec serves, nothing is copied to the CPU, and all chunks of all rows are coded in one call. The
cache is then treated as a `PagedCache` of B blocks: slot b * T + t is column t of row b.

A list of blobs is row-major: all chunks of row 0 in order, then those of row 1, and so on. The first chunk of each row
starts at position 0, which is how `decode_cache` tells the rows apart. The blobs do not record the batch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
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
from cuvee.codec.codec import MAX_DECODED_TOKENS, Codec
from cuvee.codec.errors import InputError, ProfileMismatchError, UnsupportedModelError, allocations
from cuvee.codec.format.container import Kind, read_header
from cuvee.codec.layout import KVLayout
from cuvee.codec.models.dtypes import TORCH_DTYPES
from cuvee.codec.models.latents import append_units, layer_units
from cuvee.codec.models.measured import decoder_config, measured_layers
from cuvee.codec.models.probe import MeasuredLayer
from cuvee.codec.paged import PagedCache
from cuvee.codec.paged_chunks import PagedChunks
from cuvee.codec.states import States
from cuvee.codec.support.arrays import I64
from cuvee.codec.token_ids import NO_TOKEN, as_token_ids
from cuvee.integrations.cache_file import cache_file_dtype, read_cache_file, write_cache_file
from cuvee.integrations.cache_rows import (
    CacheRows,
    bound_blobs,
    bound_rows,
    check_unpadded,
    row_paddings,
    warn_of_padding,
)
from cuvee.integrations.cache_states import (
    attention_layers,
    build_cache,
    check_shapes,
    decoder_cache,
    join_states,
    take_states,
)
from cuvee.integrations.past_windows import decode_past_windows, encode_past_windows, lacks_windows

# Exact types: subclasses keep more state (quantized, indexed, recurrent) than keys and values.
_PLAIN_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer)


def encode_cache(
    codec: Codec,
    cache: Cache,
    input_ids: torch.Tensor | None = None,
    chunk_tokens: int = 256,
    *,
    attention_mask: torch.Tensor | None = None,
    associated_data: Sequence[bytes] | None = None,
) -> list[bytes]:
    """Compress a transformers cache, on its own device if the codec serves it, else from a copy on the CPU.

    What layers hold beside keys and values of tokens, such as recurrent states, index keys or cross-attention, follows
    in one more blob at the end of each row, as it is. Such a cache can only be restored as a whole.

    Where sliding windows have dropped tokens, chunks before them hold the other layers. Such a list of blobs decodes as
    a whole only: a part of it lacks the windows of its last tokens.

    A cache does not show whether the forward pass that filled it has ended. Do not encode one whose forward pass raised
    or was interrupted: some of its layers may lack tokens.

        >>> import cuvee
        >>> from transformers import LlamaConfig
        >>> config = LlamaConfig(num_hidden_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
        >>> codec = cuvee.Codec.without_profile(config)
        >>> cache = DynamicCache()  # what a forward pass of the model fills
        >>> for layer in range(2):
        ...     _ = cache.update(*torch.randn(2, 1, 2, 300, 16).bfloat16(), layer)
        >>> input_ids = torch.zeros(1, 300, dtype=torch.int64)  # the tokens that the model computed the cache of
        >>> blobs = encode_cache(codec, cache, input_ids)
        >>> len(blobs)  # 256 tokens, then 44
        2
        >>> again = decode_cache(codec, blobs, config)
        >>> torch.equal(again.layers[1].keys, cache.layers[1].keys)
        True

    Args:
        codec: a codec whose profile belongs to the model. The dtypes of cache and profile may differ.
        cache: `DynamicCache` or `StaticCache`, keys and values [B, H, T, D] per layer, from position 0 on.
        input_ids: [B, T] integers on any device, or [T] for a cache of one row: the tokens of the cache, with the
            padding of a left-padded batch, and `cuvee.NO_TOKEN` for a token without an id, such as a part of an image.
            The blobs hold the ids, so decoding needs nothing new. A profile with a token table makes smaller blobs with
            them; any other profile, and lossless coding, ignores them.
        chunk_tokens: tokens per blob. The last blob of a row may hold fewer.
        attention_mask: [B, T] of a left-padded batch, which needs one. Padding is not stored. Positions must count from
            the first real token of each row, as `generate` counts them. A plain forward call counts columns instead,
            unless it is given `position_ids`. Without a mask, padding is refused where `generate` computed it: its keys
            are alike. Of other padding, which cannot be told from tokens, a warning tells once, where a row of
            `input_ids` begins with a run of one id.
        associated_data: for a codec with a key, the bytes that the blobs of each row are bound to, such as their name
            in a store (see `Codec.encode`); B entries. `decode_cache` needs the same entries.

    Returns:
        Blobs, row by row, each row in token order.

    Raises:
        InputError: the cache is empty or its shapes differ from the profile's layout; `input_ids` has another shape
            than the cached tokens, or ids outside the vocabulary; the mask is not left padding, or is missing although
            rows begin with padding; `associated_data` does not have one entry per row, or the codec has no key.
        ProfileError: sliding windows of some layers have dropped tokens, and the profile's bases mix these layers with
            others.
        UnsupportedModelError: the cache is static, or a layer holds no plain keys and values.
    """
    layout = codec.profile.layout
    tensors = _plain_tensors(cache, layout, past_windows=True)
    if tensors:
        rows, width = len(tensors[0][0]), _tokens_seen(cache, layout)
        layout = _with_dtype(layout, tensors[0][0].dtype)
    else:
        rows, width = _shape_of_tokens(input_ids, attention_mask)
    paddings = row_paddings(attention_mask, rows, width)
    ids = _row_ids(input_ids, paddings, width)
    if attention_mask is None:
        if layout.layers and layout.layers[0].rope is not None:
            check_unpadded(tensors[0][0])
        if ids is not None:
            warn_of_padding(ids)
    bound = bound_rows(associated_data, rows)
    devices = {tensor.device for pair in tensors for tensor in pair}
    if len(devices) > 1 or not all(codec.on_device(device) for device in devices):
        tensors = [(keys.cpu(), values.cpu()) for keys, values in tensors]
    if not tensors:
        encoded: list[list[bytes]] = [[] for _ in range(rows)]
    elif any(keys.shape[2] < width for keys, _ in tensors):
        spans = [_spans(width - padding, chunk_tokens) for padding in paddings]
        encoded = encode_past_windows(codec, tensors, width, layout, spans, paddings, bound, ids)
    else:
        encoded = _encode_batch(codec, tensors, layout, chunk_tokens, paddings, bound, ids)
    if layout.states:
        for row, beside in enumerate(take_states(cache, layout, rows)):
            states = States(width - paddings[row], beside, layout.dtype)
            encoded[row].append(codec.encode_states(states, associated_data=bound[row]))
    return [blob for row in encoded for blob in row]


def decode_cache(
    codec: Codec,
    blobs: Sequence[bytes],
    model: PreTrainedModel | PreTrainedConfig,
    device: torch.device | str | None = None,
    *,
    attention_mask: torch.Tensor | None = None,
    max_tokens: int | None = MAX_DECODED_TOKENS,
    associated_data: Sequence[bytes] | None = None,
) -> Cache:
    """Rebuild a cache from the blobs of `encode_cache`.

        >>> from cuvee import Codec
        >>> from transformers import LlamaConfig
        >>> config = LlamaConfig(num_hidden_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
        >>> codec, cache = Codec.without_profile(config), DynamicCache()
        >>> for layer in range(2):
        ...     _ = cache.update(*torch.randn(2, 1, 2, 300, 16), layer)
        >>> decode_cache(codec, encode_cache(codec, cache), config).get_seq_length()
        300

    A new row begins with each chunk that starts at position 0. All rows must hold the same number of tokens, or, with
    a mask, as many tokens as their row of the mask has ones. Without a mask, missing rows or missing last blobs of a
    single row give a smaller cache and no error. To detect them, pass a mask, all ones if nothing is padded.

    `model.generate(input_ids, past_key_values=cache)` takes the whole prompt, reads the tokens that the cache lacks (at
    least one), and appends to the cache: copy it (`copy.deepcopy`) to use it again. This holds for greedy search and
    sampling, and for beam search after `cache.batch_repeat_interleave(num_beams)`. Assisted generation, as with
    `prompt_lookup_num_tokens` or an assistant model, reads the whole prompt once more after the cache, and returns
    another text without an error; `cache_implementation=` beside a cache is a ValueError of transformers.

    Args:
        codec: a codec with the profile that the blobs were made with.
        blobs: the list, in the order in which `encode_cache` returned it.
        model: the transformers model, or its configuration. Sliding-window layers keep the tokens that the model itself
            would keep.
        device: the device of the cache; None: the CPU. On a device that the codec serves, all blobs are decoded there
            in one call. For other devices, they are decoded on the CPU and copied.
        attention_mask: [B, T] of a left-padded batch, as given to `encode_cache`. Padded columns are filled with zeros.
        max_tokens: the most tokens to rebuild, B * T with padding, since small blobs may claim a huge cache. For blobs
            of others, give the size that you expect. None means no limit.
        associated_data: the bytes that the blobs of each row were bound to by `encode_cache`; B entries.

    Returns:
        `DynamicCache` in the dtype of the encoded cache; an `EncoderDecoderCache` of one for a model with
        cross-attention.

    Raises:
        InputError: there are no blobs, or some are missing, repeated or out of order (the message names the index);
            the rows have different lengths and there is no mask, or it does not match them; the blobs hold more than
            `max_tokens`; `associated_data` does not have one entry per row, or the codec has no key.
        OutOfMemoryError: the cache cannot be allocated.
        ProfileMismatchError: `model` is not the profile's model, or a blob decodes to another layout.
        FormatError, VersionError, CorruptError: a blob is damaged, or bound to other data.
        KeyMismatchError: a blob has the tag of another key, or only one of blob and codec has a key.
    """
    if isinstance(blobs, bytes | bytearray | memoryview) or not blobs:
        raise InputError("blobs: must be a non-empty list of bytes, as encode_cache returns it")
    config = _config_of(model)
    bound = bound_blobs(associated_data, blobs)
    _check_model(model, codec.profile.layout)
    target = torch.device("cpu" if device is None else device)
    where = target if codec.on_device(target) else torch.device("cpu")
    with allocations("rebuilding a cache"):
        states: list[dict[str, torch.Tensor]] = []
        if codec.profile.layout.states:
            blobs, bound, states = _without_states(codec, blobs, bound, _measured_layers(model))
        if not blobs:
            layers: Iterator[tuple[torch.Tensor, torch.Tensor]] = iter(())
        elif lacks_windows(blobs, codec.profile.layout):
            layers = decode_past_windows(codec, blobs, bound, attention_mask, max_tokens)
        else:
            layers = _decode_batch(codec, blobs, bound, where, attention_mask, max_tokens)
        if states:
            return build_cache(config, codec.profile.layout, layers, join_states(states), target)
        cache = DynamicCache(config=config)
        for layer in range(codec.profile.layout.num_layers):
            keys, values = next(layers)
            append_units(cache, keys.to(target), values.to(target), layer, codec.profile.layout.layers[layer])
    return cache


def save_cache(
    cache: Cache,
    path: str | os.PathLike[str],
    *,
    input_ids: torch.Tensor | None = None,
    row: int | None = None,
    attention_mask: torch.Tensor | None = None,
    model: PreTrainedModel | PreTrainedConfig | None = None,
) -> None:
    """Save one sequence of a cache, uncompressed, to the file format that `cuvee encode` reads.

        >>> from transformers import LlamaConfig
        >>> config = LlamaConfig(num_hidden_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
        >>> cache = DynamicCache()
        >>> for layer in range(2):
        ...     _ = cache.update(*torch.randn(2, 1, 2, 300, 16).bfloat16(), layer)
        >>> save_cache(cache, "cache.safetensors")
        >>> torch.equal(load_cache("cache.safetensors", config).layers[1].keys, cache.layers[1].keys)
        True

    Args:
        cache: as for `encode_cache`.
        path: path of the file, which is replaced atomically.
        input_ids: as for `encode_cache`. The file holds those of the sequence, and `cuvee encode` passes them on.
        row: index of the sequence in a batch; not needed for a cache of one sequence.
        attention_mask: `[B, T]` of a left-padded batch. Padding is not saved.
        model: whose cache it is, or its configuration; needed with multi-head latent attention (DeepSeek), where the
            file holds the rotated part as keys and the latents as values.

    Raises:
        InputError: a batch without `row`, a `row` out of range, an empty cache, `input_ids` of another shape than the
            cached tokens or with negative ids, or a mask that is not left padding.
        UnsupportedModelError: as for `encode_cache`.
        OSError: the file cannot be written; no partial file is left.
    """
    tensors = _plain_tensors(cache, None if model is None else KVLayout.of(model))
    rows, _, width, _ = tensors[0][0].shape
    if row is None and rows != 1:
        raise InputError(f"row: must be given for a cache of {rows} sequences, since a file holds one: save each row")
    at = 0 if row is None else row
    if type(at) is not int or not 0 <= at < rows:
        raise InputError(f"row: must be an int from 0 to {rows - 1}, got {row!r}")
    paddings = row_paddings(attention_mask, rows, width)
    ids, padding = _row_ids(input_ids, paddings, width), paddings[at]
    if attention_mask is None and ids is not None:
        warn_of_padding(ids[at : at + 1])
    write_cache_file(
        path,
        [keys[at, :, padding:].transpose(0, 1) for keys, _ in tensors],
        [values[at, :, padding:].transpose(0, 1) for _, values in tensors],
        token_ids=None if ids is None else ids[at, padding:],
    )


def load_cache(
    path: str | os.PathLike[str],
    model: PreTrainedModel | PreTrainedConfig,
    device: torch.device | str | None = None,
) -> DynamicCache:
    """Load a cache that `save_cache` or `cuvee decode` wrote.

        >>> from transformers import LlamaConfig
        >>> config = LlamaConfig(num_hidden_layers=1, hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
        >>> cache = DynamicCache()
        >>> _ = cache.update(*torch.randn(2, 1, 2, 300, 16), 0)
        >>> save_cache(cache, "cache.safetensors")
        >>> load_cache("cache.safetensors", config).get_seq_length()
        300

    Args:
        path: path of the file.
        model: the transformers model that the cache belongs to, or its configuration.
        device: the device of the cache; None: the CPU.

    Returns:
        A cache of one sequence, in the file's dtype.

    Raises:
        FileNotFoundError: the file does not exist.
        FormatError: the file is not a safetensors file.
        InputError: the file holds no cache of this model, or one that does not begin at position 0.
    """
    config = _config_of(model)
    layout = KVLayout.from_config(config.get_text_config(decoder=True), dtype=cache_file_dtype(path))
    chunk = read_cache_file(path, layout)
    if chunk.start:
        raise InputError(f"{path}: must begin at position 0 for a transformers cache, got {chunk.start}")
    cache, target = DynamicCache(config=config), "cpu" if device is None else device
    for layer, (keys, values) in enumerate(zip(chunk.keys, chunk.values, strict=True)):
        own = [unit.transpose(0, 1)[None].to(target) for unit in (keys, values)]
        append_units(cache, own[0], own[1], layer, layout.layers[layer])
    return cache


def chunks_from_cache(
    cache: Cache,
    layout: KVLayout,
    input_ids: torch.Tensor | None = None,
    chunk_tokens: int = 256,
    row: int = 0,
    padding: int = 0,
) -> list[KVChunk]:
    """Split one row of a cache into chunks of at most `chunk_tokens` tokens, in order (views, no copies).

    Args:
        cache: as for `encode_cache`.
        layout: layout of the model.
        input_ids: as for `encode_cache`, of all rows; the chunks hold those of their tokens.
        chunk_tokens: tokens per chunk. The last may hold fewer.
        row: index into the batch.
        padding: number of leading columns to skip. The next column is position 0.

    Raises:
        InputError, UnsupportedModelError: as for `encode_cache`; also if `row` or `padding` is out of range.
    """
    tensors = _plain_tensors(cache, layout)
    rows, _, width, _ = tensors[0][0].shape
    whole = _whole_row(tensors, layout, row, padding)
    ids = _row_ids(input_ids, [padding] * rows, width)
    if ids is not None:
        whole = KVChunk.unchecked(whole.keys, whole.values, layout, 0, ids[row, padding:])
    return [whole.slice(first, end) for first, end in _spans(whole.tokens, chunk_tokens)]


def _without_states(
    codec: Codec, blobs: Sequence[bytes], bound: Sequence[bytes], layers: Sequence[MeasuredLayer]
) -> tuple[list[bytes], list[bytes], list[dict[str, torch.Tensor]]]:
    """Return the chunks, what they are bound to, and the states of each row, which end it."""
    chunks, chunks_bound, states = [], [], []
    reached = 0
    for index, (blob, data) in enumerate(zip(blobs, bound, strict=True)):
        header = read_header(blob)
        if header.kind is not Kind.STATES:
            if reached and header.start < reached:
                break
            reached = header.start + header.tokens
            chunks.append(blob)
            chunks_bound.append(data)
            continue
        if codec.profile.layout.layers and reached != header.tokens:
            raise InputError(
                f"blobs[{index}]: must follow the chunks of its {header.tokens} tokens, got it after {reached}: give "
                "all blobs in the order of encode_cache, each once"
            )
        states.append(dict(codec.decode_states(blob, associated_data=data).tensors))
        check_shapes(states[-1], header.tokens, layers)
        reached = 0
    else:
        if not reached:
            return chunks, chunks_bound, states
    kind = codec.profile.layout.model_type
    raise InputError(
        f"blobs: must end each row with its states, got none after {reached} tokens: a {kind} cache can only be "
        "restored as a whole, since what some of its layers hold exists at its end alone"
    )


def _encode_batch(
    codec: Codec,
    tensors: list[tuple[torch.Tensor, torch.Tensor]],
    layout: KVLayout,
    chunk_tokens: int,
    paddings: list[int],
    bound: list[bytes],
    ids: I64 | None,
) -> list[list[bytes]]:
    """Encode all chunks of all rows in one call, on their device, and bind the blobs of row b to `bound[b]`."""
    width = tensors[0][0].shape[2]
    all_slots = torch.arange(len(paddings) * width, device=tensors[0][0].device)
    slots, starts, following, associated_data = [], [], [], []
    tokens: list[I64 | None] = []
    for row, padding in enumerate(paddings):
        first = row * width + padding
        length = _whole_row(tensors, layout, row, padding).tokens
        for start, end in _spans(length, chunk_tokens):
            slots.append(all_slots[first + start : first + end])
            starts.append(start)
            following.append(length - end)
            associated_data.append(bound[row])
            tokens.append(None if ids is None else ids[row, padding + start : padding + end])
    cache = PagedCache(layout, [keys.transpose(1, 2) for keys, _ in tensors], [v.transpose(1, 2) for _, v in tensors])
    blobs = codec.encode(
        PagedChunks(cache, slots, starts, tokens=tokens, following=following), associated_data=associated_data
    )
    firsts = [*(index for index, start in enumerate(starts) if start == 0), len(blobs)]
    return [blobs[first:end] for first, end in pairwise(firsts)]


def _decode_batch(
    codec: Codec,
    blobs: Sequence[bytes],
    bound: Sequence[bytes],
    device: torch.device,
    attention_mask: torch.Tensor | None,
    max_tokens: int | None,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Decode all blobs in one call on `device`; yield keys and values `[B, H, T, D]` layer by layer."""
    # Nothing is allocated before all headers agree.
    opened = [codec.open(blob, associated_data=data) for blob, data in zip(blobs, bound, strict=True)]
    headers = [blob.header for blob in opened]
    layout = replace(codec.profile.layout, dtype=headers[-1].dtype)
    rows = CacheRows(layout, headers[-1].start + headers[-1].tokens, attention_mask, max_tokens)
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


def _plain_tensors(
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
            if tensor.shape[0] != tensors[0][0].shape[0] or tokens[index] != tokens[0]:
                raise InputError(
                    f"cache: must hold the same batch and tokens in every layer, got {name} {list(tensor.shape)} in "
                    f"layer {index} and keys {list(tensors[0][0].shape)} in layer 0"
                )
            if tensor.is_meta:
                raise InputError(
                    "cache: must be on a device that holds values, got the meta device; load the model on a real one"
                )
    return tensors


def _tokens_seen(cache: Cache, layout: KVLayout) -> int:
    """Return the columns of a cache, of which sliding windows may have dropped some."""
    layers: Any = decoder_cache(cache).layers
    return int(layers[attention_layers(cache, layout)[0] if layout.states else 0].get_seq_length())


def _shape_of_tokens(*given: torch.Tensor | None) -> tuple[int, int]:
    """Return rows and columns of a cache without keys of tokens, from its ids or its mask."""
    tokens = next((each for each in given if isinstance(each, torch.Tensor)), None)
    if tokens is None or tokens.ndim not in (1, 2):
        raise InputError(
            "input_ids: must be given, or attention_mask, [B, T] of the cached tokens: no layer of this model holds "
            "keys and values that would tell how many there are"
        )
    rows, columns = (tokens[None] if tokens.ndim == 1 else tokens).shape
    return rows, columns


def _row_ids(input_ids: torch.Tensor | None, paddings: Sequence[int], width: int) -> I64 | None:
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
    """Return first and last token (exclusive) of each chunk of a row."""
    if type(chunk_tokens) is not int or chunk_tokens <= 0:
        raise InputError(f"chunk_tokens: must be an int above 0, got {chunk_tokens!r}")
    return [(t, min(t + chunk_tokens, tokens)) for t in range(0, tokens, chunk_tokens)]


def _with_dtype(layout: KVLayout, dtype: torch.dtype) -> KVLayout:
    """Return the layout with this dtype; unchanged for a dtype that `KVChunk` refuses."""
    names = {value: name for name, value in TORCH_DTYPES.items()}
    return replace(layout, dtype=names.get(dtype, layout.dtype))


def _config_of(model: object) -> PreTrainedConfig:
    config = getattr(model, "config", model)
    if not isinstance(config, PreTrainedConfig):
        raise InputError(f"model: must be a transformers model or its configuration, got {type(model).__name__}")
    return config


def _measured_layers(model: PreTrainedModel | PreTrainedConfig) -> tuple[MeasuredLayer, ...]:
    """Return what a model's layers hold; nothing if that cannot be measured, as `_check_model` allows."""
    try:
        return measured_layers(model)[1]
    except UnsupportedModelError:
        return ()


def _check_model(model: PreTrainedModel | PreTrainedConfig, layout: KVLayout) -> None:
    """Refuse a model whose caches differ from the layout, unless nothing is known of its caches."""
    decoder = decoder_config(_config_of(model))
    try:
        expected = KVLayout.from_config(decoder, dtype=layout.dtype, states=True)
    except UnsupportedModelError:
        if not isinstance(model, PreTrainedModel):
            return  # the layout was built by hand, so there is none to compare it with
        expected = replace(KVLayout.of(model, states=True), dtype=layout.dtype)
    if expected.fingerprint == layout.fingerprint:
        return
    raise ProfileMismatchError(
        f"model: must have caches like those of the codec's profile ({layout.model_type}, {layout.num_layers} layers), "
        f"got {decoder.model_type}, {expected.num_layers} layers, with other layers, heads, head sizes, RoPE, sliding "
        "windows or position limit"
    )
