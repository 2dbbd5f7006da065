"""Fingerprints of a model's weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SAMPLES = 256  # values of each parameter tensor that enter the fingerprint


def sampled_positions(values: int) -> torch.Tensor:
    """Return the indices, int64, of the values that enter the fingerprint: evenly spread, at most 256."""
    count = min(_SAMPLES, values)
    # Integers, because float32 cannot hold the last index of a large tensor, and CPUs round its steps differently.
    return torch.arange(count) * (values - 1) // max(count - 1, 1)


def fingerprint_samples(parameters: Iterable[tuple[str, tuple[int, ...], torch.Tensor]]) -> str:
    """Return the fingerprint of parameters given as name, shape, and the values at `sampled_positions`, in order."""
    digest = hashlib.blake2b(digest_size=16, person=b"cuvee-model")
    for name, shape, values in parameters:
        digest.update(f"{name} {shape}".encode())
        digest.update(values.float().cpu().numpy().tobytes())
    return digest.hexdigest()


def model_fingerprint(model: PreTrainedModel) -> str:
    """Return the fingerprint of the weights: hexadecimal BLAKE2b over each parameter's name, shape and 256 values.

    It does not hash every byte, since a 70B model has 140 GB. Two fine-tunes differ in almost every value.
    """
    return fingerprint_samples(
        (name, tuple(p.shape), p.detach().reshape(-1)[sampled_positions(p.numel()).to(p.device)])
        for name, p in model.named_parameters()
    )
