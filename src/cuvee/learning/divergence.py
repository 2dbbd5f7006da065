"""How far predictions move, with standard errors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch


def compare(
    exact: torch.Tensor, other: torch.Tensor, targets: torch.Tensor
) -> tuple[list[float], list[float], list[float]]:
    """Compare predictions after two caches, log-probabilities `[B, T, V]`, with one number per sequence.

    `targets`, `[B, T]` int64, are the true next tokens.

    Returns:
        KL(exact || other) in nats per token; the loss of log-likelihood of the targets, in nats per token; the share of
        tokens whose most likely successor stays the same.
    """
    kl, loss, same = [], [], []
    for exact_row, other_row, chosen in zip(exact, other, targets[..., None].to(exact.device), strict=True):
        kl.append(float((exact_row.exp() * (exact_row - other_row)).sum(-1).mean()))
        loss.append(float((exact_row.gather(-1, chosen) - other_row.gather(-1, chosen)).mean()))
        same.append(float((exact_row.argmax(-1) == other_row.argmax(-1)).float().mean()))
    return kl, loss, same


def stderr(values: Sequence[float]) -> float | None:
    """Return the standard error of the mean; None for a single value."""
    return float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None
