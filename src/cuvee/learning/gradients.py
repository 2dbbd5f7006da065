"""Gradients of a model's predictions on its cache."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from cuvee.codec.layout import KVLayout
from cuvee.codec.models.forward import Filled, cache_argument, fill

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SLICE_VALUES = 1 << 24  # logits that are float32 at a time


def sample_gradients(
    model: PreTrainedModel,
    layout: KVLayout,
    tokens: torch.Tensor,
    prefix: int,
    generator: torch.Generator,
) -> tuple[Filled, Filled]:
    """Compute the cache of the first `prefix` tokens, and its gradient of the log-likelihood of the tokens after them.

    The targets are drawn from the model's own distribution, so that E[g g^T] is the true Fisher information and not the
    empirical one (Amari, Natural gradient works efficiently in learning, 1998). `tokens` are `[B, T]` int64 on the
    model's device, whose parameters need no gradients (`frozen`); `generator`, on the CPU, draws the targets.
    """
    with torch.no_grad():
        filled = fill(model, tokens[:, :prefix], layout)
    # The cache consists of leaves, because a decoded cache is fixed. In a single pass over all tokens, a key would also
    # change the states of the prefix and all keys of the layers above; that gradient differs by factors.
    leaves = [(keys.detach().requires_grad_(), values.detach().requires_grad_()) for keys, values in filled.units]
    with torch.enable_grad():  # whatever the caller has switched off
        cache = filled.cache(leaves)
        logits = model(input_ids=tokens[:, prefix:], **cache_argument(model, cache)).logits[:, :-1]
    with torch.no_grad():
        uniform = torch.rand(logits.shape[:-1], generator=generator, dtype=torch.float32).to(logits.device)
        slopes = torch.empty_like(logits)
        runs = [tensor.flatten(0, 1).split(max(SLICE_VALUES // logits.shape[-1], 1)) for tensor in (logits, slopes)]
        for rows, slope, drawn in zip(*runs, uniform.flatten().split(len(runs[0][0])), strict=True):
            slope.copy_(_slope(rows.detach().float(), drawn[:, None]))
    logits.backward(slopes)
    gradients = tuple((_gradient(keys), _gradient(values)) for keys, values in leaves)
    return filled, replace(filled, units=gradients)


def _slope(logits: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Draw targets from predictions, logits `[t, V]`, and return the gradient of their loss on the logits."""
    drawn = torch.searchsorted(logits.softmax(-1).cumsum(-1), uniform).squeeze(-1).clamp_max(logits.shape[-1] - 1)
    with torch.enable_grad():
        torch.nn.functional.cross_entropy(logits.requires_grad_(), drawn, reduction="sum").backward()
    return _gradient(logits)


def _gradient(leaf: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
