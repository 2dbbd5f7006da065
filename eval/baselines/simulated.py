"""The bases of baselines that count their bits without writing bytes."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch

from cuvee.codec.chunk import KVChunk

__all__ = ["PerVector", "Simulated"]


class Simulated:
    """A method that counts its bits without writing bytes: it stores the decoded chunk itself."""

    __slots__ = ()

    def decode(self, stored: Any) -> KVChunk:
        """See `Method.decode`."""
        chunk: KVChunk = stored
        return chunk


class PerVector(Simulated):
    """A method that codes each key vector and each value vector of a head by itself."""

    __slots__ = ()

    def encode(self, chunk: KVChunk) -> tuple[Any, float]:
        """See `Method.encode`.

        Raises:
            InputError: the method does not support the size of a head.
        """
        bits = 0.0
        out: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
        for decoded, tensors in zip(out, (chunk.keys, chunk.values), strict=True):
            for tensor in tensors:
                vectors, spent = self._code(tensor.float())
                decoded.append(vectors.to(tensor.dtype))
                bits += spent
        return KVChunk(*out, chunk.layout, chunk.start), bits

    @abstractmethod
    def _code(self, vectors: torch.Tensor) -> tuple[torch.Tensor, float]:
        """Return what decoding float32 vectors `(tokens, heads, size)` would give, and how many bits they take."""
