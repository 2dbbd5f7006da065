"""What calibration needs of a transformers model: its cache, gradients of its cache, predictions from a cache."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from cuvee.codec.errors import InputError
from cuvee.codec.layout import KVChunk, KVLayout

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SAMPLES = 256  # values a parameter tensor gives to the fingerprint


def sampled_positions(values: int) -> torch.Tensor:
    """Which of a parameter tensor's values enter the fingerprint: evenly spread, at most 256, int64."""
    count = min(_SAMPLES, values)
    # In integers: float32 cannot hold the last index of a large tensor, and CPUs round its steps differently.
    return torch.arange(count) * (values - 1) // max(count - 1, 1)


def fingerprint_samples(parameters: Iterable[tuple[str, tuple[int, ...], torch.Tensor]]) -> str:
    """`model_fingerprint` of parameters given as name, shape and the values at `sampled_positions`, in order."""
    digest = hashlib.blake2b(digest_size=16, person=b"cuvee-model")
    for name, shape, values in parameters:
        digest.update(f"{name} {shape}".encode())
        digest.update(values.float().cpu().numpy().tobytes())
    return digest.hexdigest()


def model_fingerprint(model: PreTrainedModel) -> str:
    """Name the weights: hex BLAKE2b over every parameter's name, shape and 256 of its values.

    Not a hash of every byte (a 70B model has 140 GB); two fine-tunes differ in almost every value.
    """
    return fingerprint_samples(
        (name, tuple(p.shape), p.detach().reshape(-1)[sampled_positions(p.numel()).to(p.device)])
        for name, p in model.named_parameters()
    )


def check_tokens(model: PreTrainedModel, token_ids: torch.Tensor, prefix: int | None) -> int:
    """Validate calibration text; returns the prefix length.

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
    """No gradients for the parameters, eval mode; as before on the way out."""
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


@dataclass(frozen=True, slots=True)
class CacheSample:
    """The cache of a batch of sequences and the gradient on it: per layer `[B, H, prefix, D]`."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    key_gradients: list[torch.Tensor]
    value_gradients: list[torch.Tensor]


def empty_cache() -> Any:
    """A transformers cache whose layers keep every token (those of a model with sliding windows would drop some)."""
    from transformers import DynamicCache

    return DynamicCache()


def sample_gradients(
    model: PreTrainedModel, tokens: torch.Tensor, prefix: int, generator: torch.Generator
) -> CacheSample:
    """Cache of the first `prefix` tokens and the gradient on it of the log-likelihood of what follows.

    The targets are drawn from the model's own distribution, so that E[g g^T] is the Fisher information
    (Amari, Natural gradient works efficiently in learning, 1998), not its empirical imitation.

    Args:
        model: a causal language model whose parameters need no gradients (`frozen`).
        tokens: `[B, T]` int64 on the model's device.
        prefix: how many leading tokens count as cached.
        generator: a CPU generator; draws the targets.
    """
    cache = empty_cache()
    with torch.no_grad():
        model(input_ids=tokens[:, :prefix], past_key_values=cache, use_cache=True)
    # Leaves: a decoded cache stays as it is. In one pass over all tokens a key would also move the states of the
    # prefix itself, and with them all keys of the layers above: another gradient, by factors.
    keys = [layer.keys.detach().requires_grad_() for layer in cache.layers]
    values = [layer.values.detach().requires_grad_() for layer in cache.layers]
    cache = empty_cache()
    for index, (key, value) in enumerate(zip(keys, values, strict=True)):
        cache.update(key, value, index)
    logits = model(input_ids=tokens[:, prefix:], past_key_values=cache).logits[:, :-1].float()
    with torch.no_grad():
        uniform = torch.rand(logits.shape[:-1], generator=generator)[..., None].to(logits.device)
        drawn = torch.searchsorted(logits.softmax(-1).cumsum(-1), uniform).squeeze(-1).clamp_max(logits.shape[-1] - 1)
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), drawn.flatten(), reduction="sum").backward()

    def gradients(leaves: list[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]

    def detached(leaves: list[torch.Tensor]) -> list[torch.Tensor]:
        return [leaf.detach() for leaf in leaves]

    return CacheSample(detached(keys), detached(values), gradients(keys), gradients(values))


def compare(
    exact: torch.Tensor, other: torch.Tensor, targets: torch.Tensor
) -> tuple[list[float], list[float], list[float]]:
    """What another cache does to predictions, one number a sequence.

    Args:
        exact: log-probabilities `[B, T, V]` after the exact cache.
        other: the same after the other one.
        targets: `[B, T]` int64, the tokens that really came next.

    Returns:
        KL(exact || other) in nats a token, nats a token lost on the targets, share of tokens whose most likely
        successor stays the same.
    """
    chosen = targets[..., None].to(exact.device)
    kl = (exact.exp() * (exact - other)).sum(-1).mean(-1)
    loss = (exact.gather(-1, chosen) - other.gather(-1, chosen)).squeeze(-1).mean(-1)
    same = (exact.argmax(-1) == other.argmax(-1)).float().mean(-1)
    return kl.tolist(), loss.tolist(), same.tolist()


def stderr(values: Sequence[float]) -> float | None:
    """Standard error of the mean; None of a single value."""
    return float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None


def prefill(
    model: PreTrainedModel, tokens: torch.Tensor, layout: KVLayout, device: torch.device | str = "cpu"
) -> list[KVChunk]:
    """The cache of `tokens [B, T]`, one chunk a sequence, on `device` and in the layout's dtype."""
    cache = empty_cache()
    model(input_ids=tokens, past_key_values=cache, use_cache=True)
    return [
        KVChunk(
            [layer.keys[row].transpose(0, 1).to(device, layout.torch_dtype) for layer in cache.layers],
            [layer.values[row].transpose(0, 1).to(device, layout.torch_dtype) for layer in cache.layers],
            layout,
        )
        for row in range(len(tokens))
    ]


def score(model: PreTrainedModel, chunks: list[KVChunk], tokens: torch.Tensor) -> torch.Tensor:
    """Log-probabilities `[B, T - 1, V]` float32 of the model reading `tokens [B, T]` after these caches."""
    cache = empty_cache()
    for index, device in enumerate(cache_devices(model, chunks[0].layout.num_layers)):
        keys = torch.stack([chunk.keys[index] for chunk in chunks]).transpose(1, 2)
        values = torch.stack([chunk.values[index] for chunk in chunks]).transpose(1, 2)
        cache.update(keys.to(device, model.dtype), values.to(device, model.dtype), index)
    logits: torch.Tensor = model(input_ids=tokens, past_key_values=cache).logits[:, :-1]
    return logits.float().log_softmax(-1)


def cache_devices(model: PreTrainedModel, layers: int) -> list[torch.device]:
    """Where the model keeps each layer's keys and values: with `device_map=` not all in one place."""
    if not getattr(model, "hf_device_map", None):
        return [model.device] * layers
    # A map names modules, and says nothing of where one that is offloaded runs: the model knows.
    cache = empty_cache()
    with torch.no_grad():
        model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=model.device), past_key_values=cache)
    return [layer.keys.device for layer in cache.layers]
