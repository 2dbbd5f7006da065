"""TurboQuant by the code of others: the package `fused-turboquant` from PyPI, which cuvee's extra `peers` installs.

A vector of a head is rotated at random, normalized, and each of its coordinates rounded to one of 2^bits levels, which
are optimal for a random direction (Lloyd-Max). It needs no calibration. Source: Zandieh et al., "TurboQuant: Online
Vector Quantization with Near-optimal Distortion Rate", arXiv:2504.19874, the variant for least squared error.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from cuvee.codec.errors import InputError
from cuvee.eval.baselines.simulated import PerVector

__all__ = ["TURBOQUANT_BITS", "TurboQuant"]

TURBOQUANT_BITS = (2, 3, 4)  # per coordinate: all that the package has


@dataclass(frozen=True)
class TurboQuant(PerVector):
    """Each key and each value vector of a head, rotated and rounded coordinate by coordinate.

    Args:
        bits: per coordinate.

    Raises:
        InputError: another number of bits; the package is not installed.
    """

    bits: int
    counts: str = "levels, and 32 bits per vector for its norm, as the package stores them"

    def __post_init__(self) -> None:
        if type(self.bits) is not int or self.bits not in TURBOQUANT_BITS:
            raise InputError(f"bits: must be one of {', '.join(map(str, TURBOQUANT_BITS))}, got {self.bits!r}")
        _package()

    def _code(self, vectors: torch.Tensor) -> tuple[torch.Tensor, float]:
        size = vectors.shape[-1]
        if size & (size - 1):
            raise InputError(f"turboquant: must get heads of a power of two of values, got {size}")
        coder = _coder(size, self.bits, str(vectors.device))
        stored = coder.encode(vectors)
        bits = 8 * (stored.indices.nbytes + stored.norms.nbytes)
        return coder.decode(stored), float(bits)


@lru_cache(maxsize=8)
def _coder(size: int, bits: int, device: str) -> Any:
    """Return the package's coder. It computes its levels when it is made, which takes half a second."""
    return _package().TurboQuantMSE(head_dim=size, bits=bits, device=device)


def _package() -> Any:
    try:
        import fused_turboquant
    except ImportError as error:
        raise InputError("turboquant: is not installed; pip install 'cuvee[peers]'") from error
    return fused_turboquant
