"""Gradients of a model's predictions on its cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from cuvee.codec.layout import KVLayout
from cuvee.codec.models.forward import cache_argument, fill

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class CacheSample:
    """The cache of a batch of sequences and its gradient; per layer `[B, H, prefix, D]`."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    key_gradients: list[torch.Tensor]
    value_gradients: list[torch.Tensor]


def sample_gradients(
    model: PreTrainedModel,
    layout: KVLayout,
    tokens: torch.Tensor,
    prefix: int,
    generator: torch.Generator,
) -> CacheSample:
    """Compute the cache of the first `prefix` tokens, and its gradient of the log-likelihood of the tokens after them.

    The targets are drawn from the model's own distribution, so that E[g g^T] is the true Fisher information and not the
    empirical one (Amari, Natural gradient works efficiently in learning, 1998). `tokens` are `[B, T]` int64 on the
    model's device, whose parameters need no gradients (`frozen`); `generator`, on the CPU, draws the targets.
    """
    with torch.no_grad():
        filled = fill(model, tokens[:, :prefix], layout)
    # The cache consists of leaves, because a decoded cache is fixed. In a single pass over all tokens, a key would also
    # change the states of the prefix and all keys of the layers above; that gradient differs by factors.
    keys = [own.detach().requires_grad_() for own, _ in filled.units]
    values = [own.detach().requires_grad_() for _, own in filled.units]
    cache = filled.cache(list(zip(keys, values, strict=True)))
    logits = model(input_ids=tokens[:, prefix:], **cache_argument(model, cache)).logits[:, :-1].float()
    with torch.no_grad():
        uniform = torch.rand(logits.shape[:-1], generator=generator)[..., None].to(logits.device)
        drawn = torch.searchsorted(logits.softmax(-1).cumsum(-1), uniform).squeeze(-1).clamp_max(logits.shape[-1] - 1)
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), drawn.flatten(), reduction="sum").backward()

    def gradients(leaves: list[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]

    def detached(leaves: list[torch.Tensor]) -> list[torch.Tensor]:
        return [leaf.detach() for leaf in leaves]

    return CacheSample(detached(keys), detached(values), gradients(keys), gradients(values))
