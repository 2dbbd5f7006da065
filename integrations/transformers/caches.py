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

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    Cache,
    DynamicCache,
)

from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import MAX_DECODED_TOKENS, Codec
from cuvee.codec.errors import InputError, ProfileMismatchError, UnsupportedModelError, allocations
from cuvee.codec.format.container import read_header
from cuvee.codec.layout import KVLayout
from cuvee.codec.models.fingerprint import warn_of_others_once
from cuvee.codec.models.forward import append_units
from cuvee.codec.models.measured import decoder_config, measured_layers
from cuvee.codec.models.probe import MeasuredLayer
from cuvee.codec.states import States
from cuvee.codec.support.devices import usable_device
from cuvee.codec.support.torch_modes import without_modes
from cuvee.integrations.transformers.cache_checks import check_inputs
from cuvee.integrations.transformers.cache_chunks import check_units, decode_rows, encode_rows
from cuvee.integrations.transformers.cache_file import cache_file_dtype, read_cache_file, write_cache_file
from cuvee.integrations.transformers.cache_rows import (
    bound_blobs,
    bound_rows,
    check_unpadded,
    row_paddings,
    warn_of_padding,
)
from cuvee.integrations.transformers.cache_states import (
    build_cache,
    join_states,
    split_states,
    take_states,
)
from cuvee.integrations.transformers.cache_tensors import (
    chunk_spans,
    plain_tensors,
    row_ids,
    shape_of_tokens,
    tokens_seen,
    with_dtype,
)


@without_modes
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
        codec: a codec whose profile belongs to the model. The dtypes of cache and profile may differ. Its layout is
            checked, and with ids its first layer; a cache does not name the weights that computed it.
        cache: `DynamicCache` or `StaticCache`, keys and values [B, H, T, D] per layer, from position 0 on.
        input_ids: [B, T] integers on any device, or [T] for a cache of one row: the tokens of the cache, with the
            padding of a left-padded batch, and `cuvee.NO_TOKEN` for a token without an id, such as a part of an image.
            The blobs hold the ids, so decoding needs nothing new. A profile with a token table makes smaller blobs with
            them; any other profile, and lossless coding, ignores them.
        chunk_tokens: tokens per blob. The last blob of a row may hold fewer.
        attention_mask: [B, T] of a left-padded batch, which needs one. Padding is not stored. Positions must count from
            the first real token of each row, as `generate` counts them. A plain forward call counts columns instead,
            unless it is given `position_ids`; a lossy codec refuses its cache, as far as a few tokens show it. Without
            a mask, padding is refused where `generate` computed it: its keys are alike. Of other padding, which cannot
            be told from tokens, a warning tells once, where a row of `input_ids` begins with a run of one id.
        associated_data: for a codec with a key, the bytes that the blobs of each row are bound to, such as their name
            in a store (see `Codec.encode`); B entries. `decode_cache` needs the same entries.

    Returns:
        Blobs, row by row, each row in token order.

    Raises:
        InputError: the cache is empty or its shapes differ from the profile's layout; `input_ids` has another shape
            than the cached tokens, ids outside the vocabulary, or ids of other tokens; keys are not at the positions
            of their tokens; the mask is not left padding, or is missing although rows begin with padding;
            `associated_data` does not have one entry per row, or the codec has no key.
        ProfileError: sliding windows of some layers have dropped tokens, and the profile's bases mix these layers with
            others.
        UnsupportedModelError: the cache is static, or a layer holds no plain keys and values.
    """
    _check_codec(codec)
    layout = codec.profile.layout
    tensors = plain_tensors(cache, layout, past_windows=True)
    if tensors:
        rows, width = len(tensors[0][0]), tokens_seen(cache, layout)
        layout = with_dtype(layout, tensors[0][0].dtype)
    else:
        rows, width = shape_of_tokens(input_ids, attention_mask)
    paddings = row_paddings(attention_mask, rows, width)
    ids = row_ids(input_ids, paddings, width)
    if attention_mask is None:
        if layout.layers and layout.layers[0].rope is not None:
            check_unpadded(tensors[0][0])
        if ids is not None:
            warn_of_padding(ids)
    bound = bound_rows(associated_data, rows)
    devices = {tensor.device for pair in tensors for tensor in pair}
    if len(devices) > 1 or not all(codec.on_device(device) for device in devices):
        tensors = [(keys.cpu(), values.cpu()) for keys, values in tensors]
    if tensors:
        check_units(tensors, width, layout, paddings)
    if tensors and not codec.lossless and (known := codec.profile.known_layers) is not None:
        check_inputs(known, tensors, width, chunk_tokens, paddings, ids)
    if not tensors:
        encoded: list[list[bytes]] = [[] for _ in range(rows)]
    else:
        encoded = encode_rows(codec, tensors, width, layout, chunk_tokens, paddings, bound, ids)
    if layout.states:
        for row, tensors_of_row in enumerate(take_states(cache, layout, rows)):
            states = States(width - paddings[row], tensors_of_row, layout.dtype)
            encoded[row].append(codec.encode_states(states, associated_data=bound[row]))
    return [blob for row in encoded for blob in row]


@without_modes
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
            would keep. The first call with a model and a lossy codec compares its weights with those that the profile
            was learned from, about a second per 1.5 billion values, and logs a warning if they are others; with a
            configuration nothing is compared.
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
            they are bfloat16 and the model float16, or the other way round;
            the rows have different lengths and there is no mask, or it does not match them; the blobs hold more than
            `max_tokens`; `associated_data` does not have one entry per row, or the codec has no key.
        OutOfMemoryError: the cache cannot be allocated.
        ProfileMismatchError: caches of `model` or a blob have another layout than the profile's. That all blobs are of
            one text and of the model's weights is not checked: bind them to the names of these by `associated_data`.
        FormatError, VersionError, CorruptError: a blob is damaged, or bound to other data.
        KeyMismatchError: a blob has the tag of another key, or only one of blob and codec has a key.
    """
    _check_codec(codec)
    if isinstance(blobs, bytes | bytearray | memoryview) or not blobs:
        raise InputError("blobs: must be a non-empty list of bytes, as encode_cache returns it")
    config = _config_of(model)
    bound = bound_blobs(associated_data, blobs)
    _check_model(model, codec.profile.layout)
    if not codec.lossless and isinstance(model, PreTrainedModel):
        warn_of_others_once(codec.profile.model, model)
    target = usable_device("cpu" if device is None else device)
    where = target if codec.on_device(target) else torch.device("cpu")
    with allocations("rebuilding a cache"):
        states: list[dict[str, torch.Tensor]] = []
        if codec.profile.layout.states:
            blobs, bound, states = split_states(codec, blobs, bound, _measured_layers(model))
        if not blobs:
            layers: Iterator[tuple[torch.Tensor, torch.Tensor]] = iter(())
        else:
            _check_dtype("blobs", read_header(blobs[-1]).dtype, model)
            layers = decode_rows(codec, blobs, bound, where, attention_mask, max_tokens)
        if states:
            return build_cache(config, codec.profile.layout, layers, join_states(states), target)
        cache = DynamicCache(config=config)
        for layer in range(codec.profile.layout.num_layers):
            keys, values = next(layers)
            append_units(cache, keys.to(target), values.to(target), layer, codec.profile.layout.layers[layer])
    return cache


@without_modes
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
    tensors = plain_tensors(cache, None if model is None else KVLayout.of(model))
    rows, _, width, _ = tensors[0][0].shape
    if row is None and rows != 1:
        raise InputError(f"row: must be given for a cache of {rows} sequences, since a file holds one: save each row")
    at = 0 if row is None else row
    if type(at) is not int or not 0 <= at < rows:
        raise InputError(f"row: must be an int from 0 to {rows - 1}, got {row!r}")
    paddings = row_paddings(attention_mask, rows, width)
    ids, padding = row_ids(input_ids, paddings, width), paddings[at]
    if attention_mask is None and ids is not None:
        warn_of_padding(ids[at : at + 1])
    write_cache_file(
        path,
        [keys[at, :, padding:].transpose(0, 1) for keys, _ in tensors],
        [values[at, :, padding:].transpose(0, 1) for _, values in tensors],
        token_ids=None if ids is None else ids[at, padding:],
    )


@without_modes
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
        InputError: the file, which names no model, holds no cache of this one's shapes, one that does not begin at
            position 0, or one in bfloat16 for a model in float16, or the other way round.
    """
    config = _config_of(model)
    layout = KVLayout.from_config(config.get_text_config(decoder=True), dtype=cache_file_dtype(path))
    _check_dtype(str(path), layout.dtype, model)
    chunk = read_cache_file(path, layout)
    if chunk.start:
        raise InputError(f"{path}: must begin at position 0 for a transformers cache, got {chunk.start}")
    cache, target = DynamicCache(config=config), usable_device("cpu" if device is None else device)
    for layer, (keys, values) in enumerate(zip(chunk.keys, chunk.values, strict=True)):
        own = [unit.transpose(0, 1)[None].to(target) for unit in (keys, values)]
        append_units(cache, own[0], own[1], layer, layout.layers[layer])
    return cache


@without_modes
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
    tensors = plain_tensors(cache, layout)
    rows, _, width, _ = tensors[0][0].shape
    if type(row) is not int or not 0 <= row < rows:
        raise InputError(f"row: must be an int from 0 to {rows - 1}, got {row!r}")
    if type(padding) is not int or not 0 <= padding < width:
        raise InputError(f"padding: must be an int from 0 to {width - 1}, got {padding!r}")
    keys, values = ([unit[row, :, padding:].transpose(0, 1) for unit in units] for units in zip(*tensors, strict=True))
    whole = KVChunk(keys, values, layout)
    ids = row_ids(input_ids, [padding] * rows, width)
    if ids is not None:
        whole = KVChunk.unchecked(whole.keys, whole.values, layout, 0, ids[row, padding:])
    return [whole.slice(first, end) for first, end in chunk_spans(whole.tokens, chunk_tokens)]


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


def _check_dtype(what: str, dtype: str, model: PreTrainedModel | PreTrainedConfig) -> None:
    """Refuse a cache of one 16-bit dtype for a model of the other: their keys together are float32, its queries not.

    A cache in float32 may be the model's own, of layers that compute in float32.
    """
    halves = {"bfloat16", "float16"}
    own = str(model.dtype).removeprefix("torch.") if isinstance(model, PreTrainedModel) else dtype
    if own != dtype and {own, dtype} == halves:
        raise InputError(
            f"{what}: must hold a cache in {own}, the dtype of the model, got {dtype}: load the model with "
            f"dtype={dtype!r}, or pass model.config and convert the cache"
        )


def _check_codec(codec: object) -> None:
    """Refuse arguments in another order."""
    if not isinstance(codec, Codec):
        raise InputError(f"codec: must be a cuvee.Codec, which is the first argument, got {type(codec).__name__}")


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
