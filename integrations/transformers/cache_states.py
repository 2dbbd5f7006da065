"""Whatever a transformers cache holds beside keys and values of tokens: taken out by name, and put back.

    layer 0  LinearAttentionLayer   conv_states.0, recurrent_states.0, …    --> blob of states
    layer 1  DynamicLayer           keys, values                            --> chunks
    layer 2  DynamicIndexedLayer    keys, values | indexer_keys, …          --> chunks | blob of states
    cross-attention, layer 0 …      keys, values, …                         --> blob of states

A name is a path of attributes and indices, with a suffix where the attribute is no tensor: `0.conv_states.0`,
`0.has_previous_state.0:number`, `2.indexer_dtype:dtype`. Nothing here knows a type of model or layer: a value goes back
to where a fresh cache of the model has a place for it, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig, cache_utils
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    QuantizedLayer,
    StaticLayer,
)

from cuvee.codec.codec import Codec
from cuvee.codec.errors import InputError, ProfileMismatchError, UnsupportedModelError
from cuvee.codec.format.container import Kind, read_header
from cuvee.codec.layout import KVLayout
from cuvee.codec.models.forward import append_units, unit_layers
from cuvee.codec.models.probe import MEASURED_TOKENS, MeasuredLayer

ATTENTION = "attention"  # tensor of the indices of the layers whose keys and values are in chunks
_CROSS = "cross"
_PLAIN = (DynamicLayer, DynamicSlidingWindowLayer)  # hold nothing else, and fill themselves
_NUMBERS = (bool, int, float)
# Of linear attention; transformers before 5.5 has none.
_LINEAR: type = getattr(cache_utils, "LinearAttentionCacheLayerMixin", CacheLayerMixin)
_Units = tuple[torch.Tensor, torch.Tensor]


def decoder_cache(cache: Cache) -> Cache:
    """Return the cache of a decoder's own tokens."""
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def attention_layers(cache: Cache, layout: KVLayout) -> list[int]:
    """Return the indices of a cache's layers whose keys and values the layout names.

    Raises:
        InputError: another number of layers holds keys and values.
        UnsupportedModelError: a layer is quantized, or has room for tokens to come.
    """
    own = decoder_cache(cache)
    for index, layer in enumerate(own.layers):
        if isinstance(layer, QuantizedLayer | StaticLayer):
            raise UnsupportedModelError(
                f"cache: must grow with its tokens and hold them as they are, but layer {index} is a "
                f"{type(layer).__name__}; prefill with the cache that the model makes itself"
            )
    found = unit_layers(own, layout)
    if len(found) != layout.num_layers:
        raise InputError(
            f"cache: must hold keys and values in {layout.num_layers} layers, as {layout.model_type} does, got "
            f"{len(found)}; run a forward pass of the model first"
        )
    return found


def take_states(cache: Cache, layout: KVLayout, rows: int) -> list[dict[str, torch.Tensor]]:
    """Return what is beside the keys and values of chunks, by name, for each row.

    Raises:
        UnsupportedModelError: with several rows, a tensor whose first dimension is not the rows.
    """
    attention = attention_layers(cache, layout)
    each: list[dict[str, torch.Tensor]] = [{ATTENTION: torch.tensor(attention, dtype=torch.int64)} for _ in range(rows)]
    for name, tensor in _other_tensors(cache, attention):
        whole = rows == 1 or _of_all_rows(name, tensor)
        if not whole and tensor.shape[0] != rows:
            raise UnsupportedModelError(
                f"cache: must hold one sequence, since {name} {list(tensor.shape)} does not show which part belongs to "
                f"which of {rows}: encode the sequences one by one"
            )
        for row in range(rows):
            each[row][name] = tensor if whole else tensor[row : row + 1]
    return each


def _of_all_rows(name: str, tensor: torch.Tensor) -> bool:
    """Return whether a state is the same for all rows of a batch."""
    return name == ATTENTION or ":" in name or not tensor.ndim


def _other_tensors(cache: Cache, attention: Sequence[int]) -> Iterator[tuple[str, torch.Tensor]]:
    for index, layer in enumerate(decoder_cache(cache).layers):
        held = dict(vars(layer))
        if index in attention:
            if type(layer) in _PLAIN:
                continue
            del held["keys"], held["values"]
        found = list(_named(str(index), held))
        if index in attention or any(":" not in name for name, _ in found):  # a layer without tensors holds nothing
            yield from found
    if isinstance(cache, EncoderDecoderCache):
        layers = cache.cross_attention_cache.layers
        yield f"{_CROSS}:number", torch.tensor(len(layers))
        for index, layer in enumerate(layers):
            yield from _named(f"{_CROSS}.{index}", vars(layer))


def _named(path: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors, and numbers, dtypes and devices as tensors, also in lists and dicts."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, _NUMBERS):
        yield f"{path}:number", torch.tensor(value)
    elif isinstance(value, torch.dtype):
        yield f"{path}:dtype", torch.empty(0, dtype=value)
    elif isinstance(value, torch.device):
        yield f"{path}:device", torch.empty(0, dtype=torch.float32)
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _named(f"{path}.{key}", each)
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            yield from _named(f"{path}.{number}", each)


def check_shapes(states: Mapping[str, torch.Tensor], tokens: int, layers: Sequence[MeasuredLayer]) -> None:
    """Refuse states of other shapes than layers of the model hold, as far as a measurement of few tokens shows.

    A dimension that is larger than the tokens measured is fixed, or grows by one a token, or in blocks.

    Raises:
        ProfileMismatchError: a state has another shape.
    """
    for index, layer in enumerate(layers):
        for found, measured in layer.others:
            name = f"{index}.{found.replace('[', '.').replace(']', '')}"
            own = states.get(name)
            if own is None:
                continue
            sizes = list(zip(own.shape[1:], measured[1:], strict=False))
            fits = (was <= MEASURED_TOKENS or size - was in (0, tokens - MEASURED_TOKENS) or size % was == 0 < size
                    for size, was in sizes)  # fmt: skip
            if own.ndim != len(measured) or not all(fits):
                raise ProfileMismatchError(
                    f"blobs: must hold {name} of a shape like {list(measured)}, as {layer.kind} does after "
                    f"{MEASURED_TOKENS} tokens, got {list(own.shape)} after {tokens}"
                )


def join_states(rows: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the states of a batch from those of its rows.

    Raises:
        InputError: the rows do not belong together.
    """
    first = rows[0]
    if len(rows) == 1:
        return dict(first)
    joined = {}
    for name, tensor in first.items():
        whole = _of_all_rows(name, tensor)
        each = [row.get(name) for row in rows]
        alike = [own for own in each if own is not None and (own.shape, own.dtype) == (tensor.shape, tensor.dtype)]
        if len(alike) < len(rows) or any(len(row) != len(first) for row in rows):
            raise InputError(f"blobs: must hold states of one shape in every row, got others of {name}")
        if len(tensor) != 1 if not whole else any(not torch.equal(own, tensor) for own in alike):
            raise InputError(
                f"blobs: must hold rows that fit in one batch, but {name} does not: decode them one by one"
            )
        joined[name] = tensor if whole else torch.cat(alike)
    return joined


def build_cache(
    config: PreTrainedConfig,
    layout: KVLayout,
    units: Iterator[_Units],
    states: Mapping[str, torch.Tensor],
    device: torch.device,
) -> Cache:
    """Make a cache of keys and values, as the layout names them, and of the states of all rows.

    Raises:
        ProfileMismatchError: a state has no place in a cache of the model.
    """
    crossed = states.get(f"{_CROSS}:number")
    if crossed is not None and crossed.ndim:
        raise ProfileMismatchError(f"blobs: hold {_CROSS}:number, which must be a number")
    cache: Any = _fresh(config, layout, crossed is not None)
    cross: Any = _fresh(config, layout, True) if crossed else DynamicCache()
    attention = _attention(states, layout, len(cache.layers))
    for index, own in zip(attention, layout.layers, strict=True):
        keys, values = (unit.to(device) for unit in next(units))
        if type(cache.layers[index]) in _PLAIN:
            append_units(cache, keys, values, index, own)
            continue
        window = getattr(cache.layers[index], "sliding_window", None)
        held = keys.shape[2] if window is None else min(keys.shape[2], int(window) - 1)
        first, second = (values, keys) if own.latent else (keys, values)
        cache.layers[index].keys = first[:, :, first.shape[2] - held :]
        cache.layers[index].values = second[:, :, second.shape[2] - held :]
    for name, tensor in states.items():
        path, _, what = name.partition(":")
        if name in (ATTENTION, f"{_CROSS}:number"):
            continue
        steps = path.split(".")
        if steps[0] == _CROSS and crossed:
            _put(cross.layers, steps[1:], tensor, what, device, name)
        else:
            _put(cache.layers, steps, tensor, what, device, name)
    made: Cache = cache if crossed is None else EncoderDecoderCache(cache, cross)
    return made


def _fresh(config: PreTrainedConfig, layout: KVLayout, crossed: bool) -> DynamicCache:
    """Return an empty cache of a model, whose configuration may count the layers of its encoder instead."""
    cache = DynamicCache(config=config)
    if crossed and len(cache.layers) != layout.num_layers:
        cache.layers = [DynamicLayer() for _ in layout.layers]
    return cache


def _attention(states: Mapping[str, torch.Tensor], layout: KVLayout, layers: int) -> list[int]:
    """Return the indices of the layers whose keys and values are in chunks, checked."""
    indices = states.get(ATTENTION)
    if indices is None or indices.dtype != torch.int64 or indices.ndim != 1 or len(indices) != layout.num_layers:
        raise ProfileMismatchError(f"blobs: must hold states that name {layout.num_layers} layers of attention")
    found: list[int] = indices.tolist()
    if sorted(set(found)) != found or (found and not 0 <= found[0] <= found[-1] < layers):
        raise ProfileMismatchError(f"blobs: must hold states of {layers} layers, got attention in layers {found}")
    return found


def _put(layers: Any, steps: Sequence[str], tensor: torch.Tensor, what: str, device: torch.device, name: str) -> None:
    """Set what a path names, if a fresh cache has a place of its kind there."""
    node: Any = layers
    for step in steps[:-1]:
        key = _key(node, step)
        node = None if key is None else _inside(node)[key]
    key = _key(node, steps[-1]) if steps else None
    if key is None and steps and what in ("dtype", "device") and _is_new(node, steps[-1]):
        key = steps[-1]
    new: Any = tensor.to(device)
    if what:
        new = {"number": lambda: _number(tensor), "dtype": lambda: tensor.dtype, "device": lambda: device}
        new = new.get(what, lambda: None)()
    old = None if key is None or _key(node, steps[-1]) is None else _inside(node)[key]
    if key is None or new is None or not (old is None or type(old) is type(new)):
        raise ProfileMismatchError(f"blobs: hold {name}, which has no place in a cache of this model")
    _inside(node)[key] = new


def _is_new(node: Any, step: str) -> bool:
    """Return whether a layer may get an attribute: some set their dtype and device with their first tokens only."""
    return isinstance(node, CacheLayerMixin) and step.isidentifier() and not hasattr(node, step)


def _number(tensor: torch.Tensor) -> bool | int | float | None:
    return tensor.item() if tensor.ndim == 0 else None


def _inside(node: Any) -> Any:
    """Return what holds the parts of a layer, a dict or a list, by key; nothing of anything else."""
    if isinstance(node, (CacheLayerMixin, _LINEAR)):
        return vars(node)
    return node if isinstance(node, dict | list) else {}


def _key(node: Any, step: str) -> Any:
    """Return the key or index that a step names; None if there is none."""
    inside = _inside(node)
    if isinstance(inside, list):
        return int(step) if step.isdecimal() and int(step) < len(inside) else None
    return next((key for key in inside if str(key) == step), None)


def split_states(
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
