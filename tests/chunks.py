"""Chunks compared."""

from __future__ import annotations

import torch

from cuvee.codec.chunk import KVChunk


def same(left: KVChunk, right: KVChunk) -> bool:
    """Whether both hold the same values, bit for bit, from the same position on."""
    pairs = zip((*left.keys, *left.values), (*right.keys, *right.values), strict=True)
    return left.start == right.start and all(torch.equal(a, b) for a, b in pairs)


def error(left: KVChunk, right: KVChunk) -> float:
    """The sum of the squared differences of their values."""
    pairs = zip((*left.keys, *left.values), (*right.keys, *right.values), strict=True)
    return sum(float((a.float() - b.float()).square().sum()) for a, b in pairs)
