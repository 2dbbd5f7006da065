"""Forward passes of transformers models: fill a cache, and predict after a cache."""

from __future__ import annotations

from inspect import signature
from typing import TYPE_CHECKING, Any, cast

import torch

from cuvee.codec.chunk import KVChunk
from cuvee.codec.errors import InputError
from cuvee.codec.layout import KVLayout
from cuvee.codec.models.latents import append_units, layer_units

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def check_tokens(model: PreTrainedModel, token_ids: torch.Tensor, prefix: int | None) -> int:
    """Validate calibration text and return the length of the prefix.

    Raises:
        InputError: `token_ids` or `prefix` has the wrong shape, dtype or range.
    """
    if token_ids.ndim != 2 or token_ids.dtype not in (torch.int32, torch.int64):
        raise InputError(f"token_ids: must be an integer tensor [N, T], got {token_ids.dtype} {list(token_ids.shape)}")
    length = token_ids.shape[1]
    if token_ids.shape[0] < 1 or length < 8:
        raise InputError(f"token_ids: must hold sequences of at least 8 tokens, got {list(token_ids.shape)}")
    vocabulary = len(cast(torch.nn.Embedding, model.get_input_embeddings()).weight)
    low, high = int(token_ids.min()), int(token_ids.max())
    if low < 0 or high >= vocabulary:
        raise InputError(f"token_ids: must lie in the vocabulary 0 … {vocabulary - 1}, got {low if low < 0 else high}")
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and length > limit:
        raise InputError(
            f"token_ids: must be at most {limit} long, the model's positions, got {length}: cut them shorter"
        )
    prefix = 3 * length // 4 if prefix is None else prefix
    if not 1 <= prefix <= length - 2:
        raise InputError(f"prefix: must lie in 1 … {length - 2}, to leave two tokens to score, got {prefix}")
    return prefix


def empty_cache() -> Any:
    """Return a transformers cache that keeps every token, also in sliding-window layers."""
    from transformers import DynamicCache

    return DynamicCache()


def cache_argument(module: torch.nn.Module, cache: object) -> dict[str, Any]:
    """Return the keyword argument by which a model or a decoder layer takes a cache.

    It is `cache` in transformers releases that deprecate the old name, `past_key_values`.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=8, hidden_size=8, num_attention_heads=1, num_hidden_layers=1)
        >>> model = LlamaForCausalLM(config)
        >>> list(cache_argument(model, None)) in (["cache"], ["past_key_values"])
        True
    """
    return {"cache" if "cache" in signature(module.forward).parameters else "past_key_values": cache}


def prefill(
    model: PreTrainedModel, tokens: torch.Tensor, layout: KVLayout, device: torch.device | str = "cpu"
) -> list[KVChunk]:
    """Return the cache of `tokens [B, T]`, one chunk per sequence, on `device` and in the layout's dtype."""
    cache = empty_cache()
    # The logits of all tokens of a long prompt would take more memory than its cache.
    model(input_ids=tokens, **cache_argument(model, cache), use_cache=True, logits_to_keep=1)
    units = [layer_units(*pair) for pair in zip(cache.layers, layout.layers, strict=True)]
    return [
        KVChunk(
            [keys[row].transpose(0, 1).to(device, layout.torch_dtype) for keys, _ in units],
            [values[row].transpose(0, 1).to(device, layout.torch_dtype) for _, values in units],
            layout,
            token_ids=tokens[row],
        )
        for row in range(len(tokens))
    ]


def score(model: PreTrainedModel, chunks: list[KVChunk], tokens: torch.Tensor) -> torch.Tensor:
    """Return log-probabilities `[B, T - 1, V]` float32 of `tokens [B, T]` after these caches."""
    cache = empty_cache()
    layout = chunks[0].layout
    for index, device in enumerate(cache_devices(model, layout.num_layers)):
        keys = torch.stack([chunk.keys[index] for chunk in chunks]).transpose(1, 2)
        values = torch.stack([chunk.values[index] for chunk in chunks]).transpose(1, 2)
        append_units(cache, keys.to(device, model.dtype), values.to(device, model.dtype), index, layout.layers[index])
    logits: torch.Tensor = model(input_ids=tokens, **cache_argument(model, cache)).logits[:, :-1]
    return logits.float().log_softmax(-1)


def cache_devices(model: PreTrainedModel, layers: int) -> list[torch.device]:
    """Return the device of each layer's keys and values, which `device_map=` may spread."""
    if not getattr(model, "hf_device_map", None):
        return [model.device] * layers
    # The map does not tell where offloaded modules run, so a forward pass does.
    cache = empty_cache()
    with torch.no_grad():
        model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=model.device), **cache_argument(model, cache))
    return [layer.keys.device for layer in cache.layers]
