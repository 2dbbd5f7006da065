"""`SectionProfile`: basis, scales and token classes of one section of a profile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cuvee.codec.entropy.coding_plan import CodingPlan
from cuvee.codec.entropy.family import coding_plan, scale_codes
from cuvee.codec.entropy.residuals import WIDEST
from cuvee.codec.entropy.token_classes import (
    CLASS_UNITS,
    CLASSES,
    ClassedPlan,
    class_step_index,
    class_table,
    default_class_frequencies,
)
from cuvee.codec.errors import FormatError, ProfileError
from cuvee.codec.profiles.block_map import read_block_map
from cuvee.codec.profiles.class_predictor import Predictor, read_predictor
from cuvee.codec.profiles.file_arrays import Arrays, read_array
from cuvee.codec.profiles.section_basis import SectionBasis
from cuvee.codec.profiles.sections import Section
from cuvee.codec.profiles.token_prediction import CoefficientMap, TokenMap, read_token_map
from cuvee.codec.support.arrays import I16, U16


@dataclass(frozen=True, slots=True)
class SectionProfile:
    """The learned data of one section.

    Attributes:
        basis: the maps between values and components.
        scale: `[R]` int16, the scale of each component, block after block.
        predictor: chooses the class of a token; without it, tokens have none.
        class_freq: `[16]` uint16 frequencies that code the classes.
        class_scale: `[16]` int16, in 1/64 octaves: how much wider than `scale` the components of each class are.
        token_map: predicts the section's values from tokens; None in a profile without a token table, like the next.
        plain_scale: `[R]` int16, the scale of each component in blobs without token ids.
    """

    basis: SectionBasis
    scale: I16
    predictor: Predictor | None = None
    class_freq: U16 = field(default_factory=default_class_frequencies)
    class_scale: I16 = field(default_factory=lambda: np.zeros(CLASSES, np.int16))
    token_map: TokenMap | None = None
    plain_scale: I16 | None = None

    @property
    def plain(self) -> SectionProfile:
        """How blobs without token ids code the section: without a token map, and with other scales."""
        if self.plain_scale is None:
            return self
        return replace(self, scale=self.plain_scale, token_map=None, plain_scale=None)

    def coefficient_map(self) -> CoefficientMap | None:
        """Return the map from embeddings to the predictor's coefficients; None without a predictor or a token map."""
        if self.token_map is None or self.predictor is None:
            return None
        leading = self.basis.leading(self.predictor.components)
        return CoefficientMap.rounded(leading(self.token_map.weights * self.token_map.scale))

    def class_ranks(self, step_index: int, token_class: int) -> tuple[int, ...]:
        """Return the number of components per block that tokens of a class code in a blob of this step index."""
        codes = self._class_codes(step_index, token_class)
        ranks, at = [], 0
        for size in self.basis.block_ranks:
            ranks.append(int((codes[at : at + size] >= 0).sum()))
            at += size
        return tuple(ranks)

    def classed_plan(self, step_index: int, residual: bool = False) -> ClassedPlan:
        """Return the coding plan of every class in a blob of this step index; `residual`: in a refinement.

        Raises:
            ProfileError: the step is too fine for all classes.
        """
        plans: list[CodingPlan | None] = []
        for k in range(CLASSES):
            codes = self._class_codes(step_index, k)
            try:
                codes = codes[codes >= 0]
                plans.append(coding_plan(np.minimum(codes, WIDEST) if residual else codes))
            except ProfileError:
                plans.append(None)
        return ClassedPlan(plans, step_index)

    def _class_codes(self, step_index: int, token_class: int) -> npt.NDArray[np.int32]:
        return scale_codes(self.scale, class_step_index(step_index, token_class) - int(self.class_scale[token_class]))

    def take(self, blocks: Sequence[int]) -> SectionProfile:
        """Return the data of some blocks, in this order; each is coded as in the whole section."""
        basis = self.basis
        columns = torch.from_numpy(_members(basis.block_sizes, blocks))
        rows = _members(basis.block_ranks, blocks)
        cut = SectionBasis(
            basis.mean[columns],
            basis.sinks.index_select(1, columns),
            tuple(basis.maps[block] for block in blocks),
        )
        predictor = None if self.predictor is None else self.predictor.take(rows)
        return SectionProfile(
            cut, self.scale[rows], predictor, self.class_freq, self.class_scale,
            None if self.token_map is None else self.token_map.take(columns),
            None if self.plain_scale is None else self.plain_scale[rows],
        )  # fmt: skip

    def arrays(self, prefix: str) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays of a profile's file, by name."""
        basis = self.basis
        arrays: dict[str, npt.NDArray[Any]] = {
            f"{prefix}.mean": basis.mean.numpy(),
            f"{prefix}.sinks": basis.sinks.numpy(),
            f"{prefix}.ranks": np.array(basis.block_ranks, np.int32),
            f"{prefix}.scale": self.scale,
            f"{prefix}.class_freq": self.class_freq,
            f"{prefix}.class_scale": self.class_scale,
        }
        if self.predictor is not None:
            arrays |= {f"{prefix}.predictor.{name}": array for name, array in self.predictor.arrays().items()}
        for b, block in enumerate(basis.maps):
            arrays |= {f"{prefix}.{name}.{b}": array for name, array in block.arrays().items()}
        if self.token_map is not None:
            arrays |= {f"{prefix}.token_{name}": array for name, array in self.token_map.arrays().items()}
        if self.plain_scale is not None:
            arrays[f"{prefix}.plain_scale"] = self.plain_scale
        return arrays


def _members(sizes: Sequence[int], blocks: Sequence[int]) -> npt.NDArray[np.intp]:
    """Return the indices that some of the adjacent blocks of these sizes cover."""
    ends = np.cumsum(sizes)
    return np.concatenate([np.arange(ends[block] - sizes[block], ends[block]) for block in blocks])


def read_section_profile(prefix: str, section: Section, arrays: Arrays, features: int) -> SectionProfile:
    """Return the section of `SectionProfile.arrays`; `features` is K of the profile's token table, or 0 without one."""
    ranks = read_array(arrays, f"{prefix}.ranks", np.int32, len(section.blocks))
    maps = tuple(
        read_block_map(prefix, b, size, int(rank), arrays)
        for b, (size, rank) in enumerate(zip(section.blocks, ranks, strict=True))
    )
    mean = torch.from_numpy(read_array(arrays, f"{prefix}.mean", np.float32, section.values))
    sinks = torch.from_numpy(read_array(arrays, f"{prefix}.sinks", np.float32, None, section.values))
    basis = SectionBasis(mean, sinks, maps)
    scale = _scale_array(f"{prefix}.scale", basis.block_ranks, arrays)
    class_freq = read_array(arrays, f"{prefix}.class_freq", np.uint16, CLASSES)
    class_scale = read_array(arrays, f"{prefix}.class_scale", np.int16, CLASSES)
    class_table(class_freq)
    if class_freq.min() < 1:
        raise FormatError(f"{prefix}.class_freq: must be at least 1 for every class")
    if np.any(np.diff(class_scale.astype(np.int32)) > CLASS_UNITS):
        raise FormatError(f"{prefix}.class_scale: lets a coarser class code more than a finer one")
    predictor = None
    if f"{prefix}.predictor.components" in arrays:
        predictor = read_predictor(f"{prefix}.predictor", arrays, sum(basis.block_ranks))
    token_map = plain_scale = None
    if features:
        token_map = read_token_map(prefix, section.values, features, arrays)
        plain_scale = _scale_array(f"{prefix}.plain_scale", basis.block_ranks, arrays)
    return SectionProfile(basis, scale, predictor, class_freq, class_scale, token_map, plain_scale)


def _scale_array(name: str, block_ranks: Sequence[int], arrays: Arrays) -> I16:
    scale = read_array(arrays, name, np.int16, sum(block_ranks))
    at = 0
    for rank in block_ranks:
        if np.any(np.diff(scale[at : at + rank].astype(np.int32)) > 0):
            raise FormatError(f"{name}: must fall within a block")
        at += rank
    return scale
