"""KakeyaLattice by its own code: the package of that name from PyPI, which cuvee's extra `peers` installs.

A vector of a head is normalized, rotated by a Hadamard matrix, scaled by its largest component, and rounded to a point
of a lattice. It needs no calibration, and its points are stored with a fixed number of bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from cuvee.codec.errors import InputError
from cuvee.eval.baselines.simulated import PerVector

__all__ = ["KAKEYA_RANGES", "KakeyaLattice"]

KAKEYA_RANGES = (4, 10, 19, 38)  # the range of the coordinates: the dial, from coarse to fine
_LATTICES = {"d4": ("V14KakeyaZamirLatticeGPU", 4), "e8": ("V15KakeyaZamirE8GPU", 8)}  # class of the package, dimension


@dataclass(frozen=True)
class KakeyaLattice(PerVector):
    """Each key and each value vector of a head, rounded to the points of a lattice.

    Args:
        lattice: `"d4"` or `"e8"`.
        q_range: coordinates lie in -q_range … q_range.

    Raises:
        InputError: another lattice, or a range below 1; the package is not installed.
    """

    lattice: str
    q_range: int
    counts: str = "points, and 2 x 16 bits per vector for norm and scale, as the package counts"

    def __post_init__(self) -> None:
        if self.lattice not in _LATTICES or type(self.q_range) is not int or self.q_range < 1:
            raise InputError(
                f"lattice: must be one of {', '.join(_LATTICES)} with a q_range of at least 1, got {self.lattice!r} "
                f"and {self.q_range!r}"
            )
        _package()

    def _code(self, vectors: torch.Tensor) -> tuple[torch.Tensor, float]:
        tokens, heads, size = vectors.shape
        coder = self._coder(size, vectors.device)
        return coder.roundtrip(vectors), float(tokens * heads * coder.bits_per_token_per_head)

    def _coder(self, size: int, device: torch.device) -> Any:
        name, dimension = _LATTICES[self.lattice]
        if size < dimension or size & (size - 1):
            raise InputError(
                f"kakeyalattice: must get heads of a power of two of at least {dimension} values, got {size}"
            )
        return getattr(_package(), name)(D=size, q_range=self.q_range, device=str(device))


def _package() -> Any:
    try:
        import kakeyalattice
    except ImportError as error:
        raise InputError("kakeyalattice: is not installed; pip install 'cuvee[peers]'") from error
    return kakeyalattice
