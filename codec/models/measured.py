"""The layout of a model's cache, from what was measured of it."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from typing import Any, cast

import torch

from cuvee.codec.dtypes import TORCH_DTYPES
from cuvee.codec.errors import InputError, UnsupportedModelError
from cuvee.codec.models.fingerprint import function_digest
from cuvee.codec.models.kimi import as_deepseek_v3, is_deepseek_v3
from cuvee.codec.models.probe import BOUND, MeasuredLayer, ProbeError, measure
from cuvee.codec.models.stand_in import measure_config

# With the digest of what the model computed then: its frequencies of RoPE, for example, may be edited. Where keys are
# bound, it does not count, because a forward pass may change frequencies.
_of_models: weakref.WeakKeyDictionary[torch.nn.Module, tuple[str, tuple[MeasuredLayer, ...]]] = (
    weakref.WeakKeyDictionary()
)


def measured_layers(model: Any) -> tuple[Any, tuple[MeasuredLayer, ...]]:
    """Return the configuration of a model's text decoder, and what was measured of its cache.

    A transformers model runs a few tokens once; that of a configuration is measured with random weights.

    Raises:
        InputError, UnsupportedModelError, OutOfMemoryError, ImportError: as `KVLayout.from_config`.
    """
    config = _checked(decoder_config(model), states=True)
    if not isinstance(model, torch.nn.Module) or any(parameter.is_meta for parameter in model.parameters()):
        return config, measure_config(config)
    known, computes = _of_models.get(model), cast(Any, model)
    if known is None or (movable(known[1]) and known[0] != function_digest(computes)):
        _of_models[model] = function_digest(computes), _measured(model, config)
    return config, _of_models[model][1]


def decoder_config(model: Any) -> Any:
    """Return the configuration of the text decoder of a transformers model or configuration.

    That of an encoder-decoder is returned whole: what transformers cuts out of it builds no model.
    """
    config = getattr(model, "config", model)
    return config if getattr(config, "is_encoder_decoder", False) else config.get_text_config(decoder=True)


def _measured(model: Any, config: Any) -> tuple[MeasuredLayer, ...]:
    """Measure a model, and what its configuration promises: a layer is bound if it is by either."""
    measured = measure(model, config.model_type)
    try:
        promised = measure_config(config)
    except ProbeError:
        return measured
    if len(promised) != len(measured):
        raise UnsupportedModelError(
            f"{config.model_type}: a model must have the layers of its configuration, got {len(measured)} and "
            f"{len(promised)} of them: correct the model's config.json"
        )
    pairs = zip(measured, promised, strict=True)
    return tuple(other if BOUND == other.positions != layer.positions else layer for layer, other in pairs)


def describe_config(config: Any, dtype: str | torch.dtype | None, states: bool) -> dict[str, Any]:
    """Return the arguments of `KVLayout`, layers as those of `LayerLayout`; errors as `KVLayout.from_config`."""
    config = _checked(config, states)
    name, positions = _dtype_name(config.dtype if dtype is None else dtype), _max_positions(config)
    return _describe(config.model_type, measure_config(config), name, positions, states)


def describe_model(model: Any, states: bool) -> dict[str, Any]:
    """Measure the cache of a transformers model or configuration, as `KVLayout.of` says."""
    _checked(decoder_config(model), states)
    config, layers = measured_layers(model)
    dtype = getattr(model, "dtype", None) or config.dtype or torch.get_default_dtype()
    return _describe(config.model_type, layers, _dtype_name(dtype), _max_positions(config), states)


def movable(layers: tuple[MeasuredLayer, ...]) -> bool:
    """Return whether tokens can be moved to other positions: the rule of every layer is known, and some rotate."""
    return not any(layer.positions == BOUND for layer in layers) and any(layer.rope is not None for layer in layers)


def _describe(
    model_type: str, layers: tuple[MeasuredLayer, ...], dtype: str, max_positions: int | None, states: bool
) -> dict[str, Any]:
    for index, layer in enumerate(layers):
        if (kept := layer.beyond) and not states:
            raise UnsupportedModelError(
                f"{model_type}: must keep keys and values of tokens only, but layer {index} ({layer.kind}) holds "
                f"{kept}: use encode_cache and decode_cache with Codec.without_profile(model), which keep whatever a "
                "transformers cache holds"
            )
    # A cache is moved as a whole. Where a layer cannot be, no layer is rotated, and the layout says so.
    moves = movable(layers)
    attention = [
        (layer.kv_heads, layer.head_dim, layer.value_dim, layer.rope if moves else None, layer.sliding_window)
        for layer in layers
        if layer.kv_heads
    ]
    return {
        "model_type": model_type, "layers": attention, "dtype": dtype, "max_positions": max_positions,
        "states": any(layer.beyond for layer in layers),
    }  # fmt: skip


def _checked(config: Any, states: bool) -> Any:
    """Return a decoder's configuration; refuse others before anything is measured.

    Cross-attention is among what `states` tells.
    """
    try:
        from transformers import PreTrainedConfig
    except ImportError as error:
        raise ImportError("KVLayout.from_config needs transformers 5 or later: pip install transformers") from error
    if not isinstance(config, PreTrainedConfig):
        raise InputError(f"hf_config: must be a transformers PreTrainedConfig, got {type(config).__name__}")
    if is_deepseek_v3({"model_type": config.model_type}):
        config = as_deepseek_v3(config.to_dict())
    crossed = getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False)
    if crossed and not states:
        raise UnsupportedModelError(
            f"{config.model_type}: must have no encoder-decoder or cross-attention cache here; encode_cache and "
            "decode_cache with Codec.without_profile(model) take it"
        )
    if getattr(config, "text_config", None) is not None:
        raise InputError(
            f"hf_config: must be that of a text decoder, got a multimodal wrapper ({config.model_type}); pass "
            "hf_config.get_text_config()"
        )
    return config


def _max_positions(config: Any) -> int | None:
    """Return the number of positions that the model can address; None if its configuration does not say.

    With linear scaling, `max_position_embeddings` counts positions before scaling, in transformers and vLLM. With Llama
    3's scaling, and where layers differ in their scaling (Gemma 3), it counts positions after scaling. With YaRN some
    models count positions before scaling (Qwen's cards), others after (DeepSeek): the frequencies serve `factor` times
    `original_max_position_embeddings` either way.
    """
    positions = getattr(config, "max_position_embeddings", None)
    if type(positions) is not int:
        return None
    parameters = getattr(config, "rope_parameters", None) or {}
    if any(isinstance(value, Mapping) for value in parameters.values()):
        return positions
    kind, factor = parameters.get("rope_type", parameters.get("type")), cast(Any, parameters.get("factor"))
    if kind not in ("linear", "yarn") or (kind == "yarn" and factor is None):  # then transformers derives it
        return positions
    if type(factor) not in (int, float) or not 0 < factor < math.inf:
        raise InputError(
            f"hf_config.rope_parameters: must have a factor for {kind} RoPE, a finite number above 0, got {factor!r}: "
            "correct the model's config.json"
        )
    if kind == "linear":
        return int(positions * factor)
    return int(max(positions, (parameters.get("original_max_position_embeddings") or positions) * factor))


def _dtype_name(dtype: Any) -> str:
    if dtype is None:
        raise InputError("dtype: must be given, since hf_config names none; for example dtype=model.dtype")
    name = str(dtype).removeprefix("torch.")
    if name not in TORCH_DTYPES:
        raise InputError(
            f"dtype: must be one of {', '.join(TORCH_DTYPES)}, got {dtype!r}: dequantize other caches by value first"
        )
    return name
