"""How far predictions move, and the standard error of that figure."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch


def compare(
    exact: torch.Tensor, other: torch.Tensor, targets: torch.Tensor
) -> tuple[list[float], list[float], list[float]]:
    """How another cache changes predictions, as one number per sequence.

    Args:
        exact: log-probabilities `[B, T, V]` after the exact cache.
        other: the same after the other cache.
        targets: `[B, T]` int64, the tokens that really came next.

    Returns:
        KL(exact || other) in nats per token; the log-likelihood that the targets lose, in nats per token; the share
        of tokens whose most likely successor stays the same.
    """
    chosen = targets[..., None].to(exact.device)
    kl = (exact.exp() * (exact - other)).sum(-1).mean(-1)
    loss = (exact.gather(-1, chosen) - other.gather(-1, chosen)).squeeze(-1).mean(-1)
    same = (exact.argmax(-1) == other.argmax(-1)).float().mean(-1)
    return kl.tolist(), loss.tolist(), same.tolist()


def stderr(values: Sequence[float]) -> float | None:
    """Standard error of the mean; None for a single value."""
    return float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None
