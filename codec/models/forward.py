"""What cuvee does with a model of transformers: fill a cache, and get predictions after one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch

from cuvee.codec.chunk import KVChunk
from cuvee.codec.errors import InputError
from cuvee.codec.layout import KVLayout

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def check_tokens(model: PreTrainedModel, token_ids: torch.Tensor, prefix: int | None) -> int:
    """Validate calibration text; return the length of the prefix.

    Raises:
        InputError: wrong shape, dtype or range.
    """
    if token_ids.ndim != 2 or token_ids.dtype not in (torch.int32, torch.int64):
        raise InputError(f"token_ids must be an integer tensor [N, T], got {token_ids.dtype} {list(token_ids.shape)}")
    length = token_ids.shape[1]
    if token_ids.shape[0] < 1 or length < 8:
        raise InputError(f"token_ids must hold sequences of at least 8 tokens, got {list(token_ids.shape)}")
    vocabulary = len(cast(torch.nn.Embedding, model.get_input_embeddings()).weight)
    low, high = int(token_ids.min()), int(token_ids.max())
    if low < 0 or high >= vocabulary:
        raise InputError(f"token_ids hold {low if low < 0 else high}; the model's vocabulary is 0 … {vocabulary - 1}")
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and length > limit:
        raise InputError(f"token_ids are {length} long, the model has {limit} positions: cut them shorter")
    prefix = 3 * length // 4 if prefix is None else prefix
    if not 1 <= prefix <= length - 2:
        raise InputError(f"prefix={prefix} must leave at least two of the {length} tokens to score")
    return prefix


@contextmanager
def frozen(model: PreTrainedModel) -> Iterator[None]:
    """Put the model in eval mode, with no gradients for its parameters; restore both on the way out."""
    training = [(module, module.training) for module in model.modules()]
    required = [p.requires_grad for p in model.parameters()]
    try:
        model.eval()
        for p in model.parameters():
            p.requires_grad_(False)
        yield
    finally:
        for module, flag in training:
            module.training = flag
        for p, flag in zip(model.parameters(), required, strict=True):
            p.requires_grad_(flag)


def empty_cache() -> Any:
    """A cache of transformers whose layers keep every token, where a model's own sliding windows would drop some."""
    from transformers import DynamicCache

    return DynamicCache()


def prefill(
    model: PreTrainedModel, tokens: torch.Tensor, layout: KVLayout, device: torch.device | str = "cpu"
) -> list[KVChunk]:
    """The cache of `tokens [B, T]` as one chunk per sequence, on `device` and in the layout's dtype."""
    cache = empty_cache()
    # Logits of all tokens of a long prompt would take more memory than its cache.
    model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return [
        KVChunk(
            [layer.keys[row].transpose(0, 1).to(device, layout.torch_dtype) for layer in cache.layers],
            [layer.values[row].transpose(0, 1).to(device, layout.torch_dtype) for layer in cache.layers],
            layout,
        )
        for row in range(len(tokens))
    ]


def score(model: PreTrainedModel, chunks: list[KVChunk], tokens: torch.Tensor) -> torch.Tensor:
    """Log-probabilities `[B, T - 1, V]` float32 of the model as it reads `tokens [B, T]` after these caches."""
    cache = empty_cache()
    for index, device in enumerate(cache_devices(model, chunks[0].layout.num_layers)):
        keys = torch.stack([chunk.keys[index] for chunk in chunks]).transpose(1, 2)
        values = torch.stack([chunk.values[index] for chunk in chunks]).transpose(1, 2)
        cache.update(keys.to(device, model.dtype), values.to(device, model.dtype), index)
    logits: torch.Tensor = model(input_ids=tokens, past_key_values=cache).logits[:, :-1]
    return logits.float().log_softmax(-1)


def cache_devices(model: PreTrainedModel, layers: int) -> list[torch.device]:
    """Where the model keeps the keys and values of each layer. With `device_map=` they are not all in one place."""
    if not getattr(model, "hf_device_map", None):
        return [model.device] * layers
    # The map names modules but does not say where offloaded ones run, so the model itself is asked.
    cache = empty_cache()
    with torch.no_grad():
        model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=model.device), past_key_values=cache)
    return [layer.keys.device for layer in cache.layers]
