"""The linear maps of a section: from its values to decorrelated coefficients, and back.

y = forward (x - mean)  per block   ->   y [R, T]  component-major, one row per component
x = inverse y + mean
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from cuvee.codec.profiles.block_map import BlockMap
from cuvee.codec.support.integer_maps import IntegerMaps, integer_maps
from cuvee.codec.support.lazy import lazy
from cuvee.codec.support.onednn import SHAPE_MULTIPLE, pad_rows

Form = TypeVar("Form")

WEIGHT_RANGE = 1e-7  # smallest over largest weight of a metric; maps in float32 cannot hold a wider range


@dataclass(frozen=True)
class SectionBasis:
    """The linear maps of a section.

    Attributes:
        mean: `[N]` float32.
        sinks: `[P, N]` float32, the means of the first P positions of a sequence (attention sinks).
        maps: of the blocks, components in order of falling scale.
    """

    mean: torch.Tensor
    sinks: torch.Tensor
    maps: tuple[BlockMap, ...]

    @property
    def forward(self) -> tuple[torch.Tensor, ...]:
        """Per block `[r, n]` float32."""
        return tuple(block.forward for block in self.maps)

    @lazy
    def forward_integers(self) -> IntegerMaps:
        """`forward` as integers of 16 bits."""
        return integer_maps(self.forward)

    @property
    def inverse(self) -> tuple[torch.Tensor, ...]:
        """Per block `[n, r]` float32."""
        return tuple(block.inverse for block in self.maps)

    @lazy
    def inverse_maps(self) -> InverseMaps:
        """`inverse`, and what stages have made of it."""
        return InverseMaps(self.maps)

    @property
    def block_ranks(self) -> tuple[int, ...]:
        """Number of components stored per block."""
        return tuple(block.rank for block in self.maps)

    @lazy
    def block_sizes(self) -> tuple[int, ...]:
        """Number of values per block."""
        return tuple(block.size for block in self.maps)

    def means(self, start: int, at: slice) -> torch.Tensor:
        """Return means `[t, N]` (`[1, N]` if all are equal) of the tokens `at` of a chunk that begins at `start`."""
        mean = self.leading_means(start, at)
        further = at.stop - at.start - len(mean)
        return torch.cat([mean, mean[-1:].expand(further, -1)]) if len(mean) > 1 and further else mean

    def leading_means(self, start: int, at: slice) -> torch.Tensor:
        """Return `means` without repetition: `[m, N]`. The last row serves all further tokens."""
        first = min(start + at.start, len(self.sinks))
        return self._sinks_and_mean[first : first + at.stop - at.start]

    @lazy
    def _sinks_and_mean(self) -> torch.Tensor:
        return torch.cat([self.sinks, self.mean[None]])

    def analyze(self, x: torch.Tensor, start: int, at: slice, ranks: tuple[int, ...]) -> torch.Tensor:
        """Map the tokens `at` of a chunk, `[t, N]`, to the leading components of each block, `[sum(ranks), t]`."""
        return self.coefficients(x - self.means(start, at), ranks)

    def coefficients(
        self,
        centered: torch.Tensor,
        ranks: tuple[int, ...],
        out: torch.Tensor | None = None,
        computed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> torch.Tensor:
        """Do what `analyze` does for values `[t, N]` minus their means.

        `out` receives y. It already holds the first `computed` components of the first block. The others are products
        of numbers that are rounded to `dtype`, float32 or bfloat16.
        """
        y = centered.new_empty(sum(ranks), len(centered)) if out is None else out
        row = column = 0
        for block, rank in zip(self.maps, ranks, strict=True):
            if computed < rank:
                x, to = centered[:, column : column + block.size], y[row + computed : row + rank]
                if dtype == torch.bfloat16:
                    rows = block.forward_bfloat16[computed : rank + (computed - rank) % SHAPE_MULTIPLE]
                    to.copy_(torch.mm(rows, pad_rows(x.bfloat16()).T)[: rank - computed, : len(x)])
                else:
                    torch.mm(block.forward[computed:rank], x.T, out=to)
            row, column, computed = row + rank, column + block.size, 0
        return y

    def leading(self, wanted: npt.NDArray[np.int32]) -> LeadingComponents:
        """Return the maps to some of the components; `wanted` `[K]` numbers them across all blocks."""
        parts, first, column = [], 0, 0
        for matrix in self.forward:
            rank, size = matrix.shape
            inside = np.flatnonzero((wanted >= first) & (wanted < first + rank))
            if len(inside):
                rows = matrix[torch.from_numpy(wanted[inside] - first).long()].contiguous()
                parts.append((slice(int(inside[0]), int(inside[-1]) + 1), slice(column, column + size), rows))
            first, column = first + rank, column + size
        return LeadingComponents(len(wanted), tuple(parts))


class HasInverse(Protocol):
    """A block's map."""

    @property
    def inverse(self) -> torch.Tensor:
        """float32 `[n, r]`."""


class InverseMaps:
    """The inverse maps of a section, and the forms in which stages multiply by them.

    A step needs the leading rows of a form, so each form is made once for all steps, with and without token ids.

    Args:
        maps: of the blocks.
    """

    def __init__(self, maps: Sequence[HasInverse]) -> None:
        self._maps = maps
        self._forms: dict[object, Any] = {}

    def __getstate__(self) -> dict[str, object]:
        """Leave out what is made anew."""
        return {"_maps": self._maps, "_forms": {}}

    def matrices(self) -> list[torch.Tensor]:
        """Return the maps, float32 `[n, r]` per block, made anew."""
        return [each.inverse for each in self._maps]

    def form(self, name: object, make: Callable[[Sequence[torch.Tensor]], Form]) -> Form:
        """Return the form of this name, made of the maps if there is none yet; two threads may both make it."""
        if name not in self._forms:
            self._forms.setdefault(name, make(self.matrices()))
        form: Form = self._forms[name]
        return form


@dataclass(frozen=True, slots=True)
class LeadingComponents:
    """Maps to K of a basis's components, which a predictor reads.

    For each block with some of them, `parts` has its rows among the K, its values among the N, and the matrix `[rows,
    values]` from values to rows.
    """

    count: int
    parts: tuple[tuple[slice, slice, torch.Tensor], ...]

    def __call__(self, centered: torch.Tensor) -> torch.Tensor:
        """Map values minus their means, `[t, N]` float32, to coefficients `[K, t]`."""
        y = centered.new_empty(self.count, len(centered))
        for rows, values, matrix in self.parts:
            torch.mm(matrix, centered[:, values].T, out=y[rows])
        return y


def eigenbasis(covariance: torch.Tensor, metric: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the transform with decorrelated components whose squared error is the error in the metric.

    Let M be the metric, C the covariance, R = M^1/2, and U the eigenvectors of R C R. Then coefficients are U^T R times
    the values, and inverse = R^-1 U. In these coordinates the squared error of a component is the loss that it costs,
    so one step size for all components is optimal (reverse water-filling; Cover & Thomas, Elements of Information
    Theory, 10.3). All is float64. Returns the inverse `[n, n]` and the deviations `[n]`, which fall.
    """
    weight, vectors = torch.linalg.eigh(metric)
    weight = weight.clamp_min(max(float(weight.max()) * WEIGHT_RANGE, 1e-300))
    root = (vectors * weight.sqrt()) @ vectors.T
    inverse_root = (vectors * weight.rsqrt()) @ vectors.T
    energy, axes = torch.linalg.eigh(root @ covariance @ root)
    axes = axes.flip(1)
    return inverse_root @ axes, energy.flip(0).clamp_min(0).sqrt()
