"""Predictors of token classes on the device: they compute the offsets of all sections and chunks of a batch at once.

`codec/profiles/class_predictor.py` defines the result. The leading components of a section form one block over all
of its columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from cuvee.codec.profiles.class_predictor import CLAMP, ENERGY_FLOOR, SQUARE_FLOOR, finer_near_end
from cuvee.codec.profiles.section_profile import SectionProfile
from cuvee.codec.profiles.step_coding import SectionCoding
from cuvee.codec.support.arrays import F32
from cuvee.codec.support.lazy import lazy
from cuvee.kernels.centers import Centers
from cuvee.kernels.jobs import I64, BlockField, ChunkField, job_table
from cuvee.kernels.ops.analyze import analyze
from cuvee.kernels.ops.arguments import ChunkBatch, JobCoefficients
from cuvee.kernels.tiles import TileLayout

ARRAYS = 5  # arrays as large as the components that computing offsets takes


class DevicePredictor:
    """The predictors of the S sections that have one, at least one; components are padded to the K of the largest.

    Attributes:
        sections: int64 `[S]`, numbers of the sections that have a predictor.
        components: K.
    """

    def __init__(self, codings: Sequence[SectionCoding], layout: TileLayout, device: torch.device) -> None:
        learned = [coding.learned for coding in codings]
        items = [(i, section, section.predictor) for i, section in enumerate(learned) if section.predictor is not None]
        self.sections = np.array([i for i, _, _ in items], np.int64)
        self.components = max(len(predictor.components) for _, _, predictor in items)
        self._of_all, self._device = len(learned), device
        sinks = max(len(predictor.sinks) for _, _, predictor in items)
        shape = (len(items), self.components)
        scale, linear, square = np.ones(shape, np.float32), np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        # Beyond the sinks there is no limit.
        limits = np.full((len(items), sinks + 1), np.inf, np.float32)
        self._blocks = np.zeros((len(items), len(BlockField)), np.int64)
        packed, at = [], 0
        for row, (index, section, predictor) in enumerate(items):
            count = len(predictor.components)
            scale[row, :count], linear[row, :count] = predictor.scale, predictor.linear
            square[row, :count] = predictor.square
            limits[row, : len(predictor.sinks)] = predictor.sinks
            basis = layout.pack(_rows(section, predictor.components), index)
            first, end = layout.bounds[index], layout.bounds[index + 1]
            self._blocks[row] = (index, 0, count, at, first, end - first)
            packed.append(basis.flatten())
            at += basis.numel()
        self._basis = torch.cat(packed).to(device)
        self._device_blocks = torch.from_numpy(self._blocks).to(device)
        self._scale, self._linear, self._square = (
            torch.from_numpy(array).to(device) for array in (scale[:, :, None], linear[:, None], square[:, None])
        )
        self._limits = torch.from_numpy(limits).to(device)
        # The number of positions in each section that are not predicted.
        counts = [len(section.basis.sinks) for _, section, _ in items]
        self._sinks = torch.tensor(counts, dtype=torch.int64).to(device)[:, None, None]
        self._codings = [codings[index] for index, _, _ in items]
        self._predictors = [predictor for _, _, predictor in items]
        self._energy = torch.tensor([[each.energy] for each in self._predictors], dtype=torch.float32).to(device)

    @lazy
    def _of_embedding(self) -> torch.Tensor:
        """The maps from embeddings to the components, float32 `[S, K, features]`; made when first needed."""
        maps = [coding.learned.coefficient_map() for coding in self._codings]
        present = [each for each in maps if each is not None]
        out = torch.zeros(len(maps), self.components, len(present[0].digits), dtype=torch.float32)
        for row, each in enumerate(present):
            out[row, : each.size] = each.matrix
        return out.to(self._device)

    def inputs(self, chunks: I64, following: Sequence[int]) -> tuple[I64, npt.NDArray[np.int64], F32]:
        """Return what `offsets` needs on the device: jobs, the index of each token's limit, and its level.

        A level is the bias of a section, minus what a token's position in the cache takes off. `following` is, of each
        chunk, the number of tokens after it.
        """
        tokens = int(chunks[:, ChunkField.TOKENS].sum())
        at = np.zeros((len(chunks), self._of_all), np.int64)
        at[:, self.sections] = np.arange(len(self.sections)) * self.components * tokens
        at += chunks[:, ChunkField.FIRST, None]
        jobs = job_table(at.size, coefficients=at.ravel(), stride=tokens)
        last = self._limits.shape[1] - 1
        positions = [
            np.minimum(source + np.arange(count), last)
            for source, count in chunks[:, [ChunkField.SOURCE, ChunkField.TOKENS]].tolist()
        ]
        counted = (chunks[:, field].tolist() for field in (ChunkField.SOURCE, ChunkField.TOKENS))
        places = list(zip(*counted, following, strict=True))
        levels = [
            predictor.bias - torch.cat([finer_near_end(predictor.recency, *at) for at in places])
            for predictor in self._predictors
        ]
        return jobs, np.concatenate(positions), torch.stack(levels).numpy()

    def offsets(
        self,
        x: torch.Tensor,
        jobs: torch.Tensor,
        batch: ChunkBatch,
        positions: torch.Tensor,
        levels: torch.Tensor,
        centers: Centers | None = None,
    ) -> torch.Tensor:
        """Return the octaves by which the step of each token may be coarser, float32 `[S, tokens]`.

        `x`, float32 `[tokens, M]`, is from `gather`; `jobs`, `positions` and `levels` are from `inputs`. `centers` are
        the batch's if x lacks predictions, which are added as the CPU adds them (`CoefficientMap`): not rounded to
        bfloat16.
        """
        y = torch.zeros(len(self.sections), self.components, len(x), dtype=torch.float32, device=self._device)
        coefficients = JobCoefficients(y.flatten(), jobs)
        analyze(x, self._device_blocks, self._basis, batch, coefficients, max_rank=self.components)
        if centers is not None:
            token_table = centers.embeddings
            predicted = self._of_embedding @ (token_table.embedding * token_table.row_scale[:, None]).T
            predicted *= centers.position >= self._sinks
            y += predicted[:, :, centers.rows.long()]
        u = y / self._scale
        out = torch.matmul(self._linear, u.clamp(-CLAMP, CLAMP))[:, 0]
        out += torch.matmul(self._square, (u.square() + SQUARE_FLOOR).log())[:, 0]
        out += self._energy * (y.square().sum(1) + ENERGY_FLOOR).log() + levels
        return torch.minimum(out, self._limits[:, positions])


def _rows(section: SectionProfile, components: npt.NDArray[np.int32]) -> torch.Tensor:
    """Return rows of the forward bases, `[K, N]`, extended to all N values of a section."""
    out = torch.zeros(len(components), len(section.basis.mean), dtype=torch.float32)
    for rows, values, matrix in section.basis.leading(components).parts:
        out[rows, values] = matrix
    return out
