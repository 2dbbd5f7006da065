"""How the sections of a profile are coded at one step, for all schemes and backends."""

from __future__ import annotations

import numpy as np
import torch

from cuvee.codec.entropy.family import Family, finest_step_index, too_fine_error
from cuvee.codec.entropy.tables import TOTAL, EntropyTables
from cuvee.codec.entropy.token_classes import ClassedPlan, class_table
from cuvee.codec.profiles.class_predictor import PredictClasses, choose_classes, finer_near_end
from cuvee.codec.profiles.flat_plans import CodingPlans, pack_plans
from cuvee.codec.profiles.section_basis import LeadingComponents
from cuvee.codec.profiles.section_profile import SectionProfile
from cuvee.codec.profiles.token_prediction import Predictions
from cuvee.codec.support.arrays import F32, U8
from cuvee.codec.support.lazy import lazy


class SectionCoding:
    """How one section is coded at one step, for all backends; `residual`: in a refinement.

    Raises:
        ProfileError: the step is too fine for the neutral class.
    """

    def __init__(self, learned: SectionProfile, step_index: int, residual: bool = False) -> None:
        if not residual and finest_step_index(learned.scale) > step_index:
            raise too_fine_error()
        self.learned = learned
        self._step_index, self._residual = step_index, residual

    @lazy
    def classed(self) -> ClassedPlan:
        """The coding plan of each class."""
        return self.learned.classed_plan(self._step_index, self._residual)

    @lazy
    def class_ranks(self) -> tuple[tuple[int, ...], ...]:
        """`[16]`, the number of components per block for each class; zeros for classes that are not served."""
        zeros = (0,) * len(self.learned.basis.block_ranks)
        return tuple(
            zeros if plan is None else self.learned.class_ranks(self._step_index, k)
            for k, plan in enumerate(self.classed.plans)
        )

    @lazy
    def class_table(self) -> EntropyTables:
        """The table that codes the classes."""
        return class_table(self.learned.class_freq)

    def expected_shares(self, tables: EntropyTables) -> tuple[F32, ...]:
        """Return for each component of each block the share of tokens whose coefficient is expected not to be zero."""
        there = (1 - tables.freq[:, 0] / TOTAL).astype(np.float32)
        weights = self.learned.class_freq / max(int(self.learned.class_freq[self.classed.finest :].sum()), 1)
        of_class = [
            (float(weights[k]), plan, self.class_ranks[k])
            for k, plan in enumerate(self.classed.plans)
            if plan is not None
        ]
        shares = [np.zeros(rank, np.float32) for rank in np.max([ranks for _, _, ranks in of_class], axis=0)]
        for weight, plan, ranks in of_class:
            by_block = np.split(there[plan.tables[: len(plan.shift)]], np.cumsum(ranks)[:-1])
            for share, rows in zip(shares, by_block, strict=True):
                share[: len(rows)] += weight * rows
        return tuple(shares)

    @lazy
    def _leading(self) -> LeadingComponents | None:
        predictor = self.learned.predictor
        return None if predictor is None else self.learned.basis.leading(predictor.components)

    def finer(self, start: int, tokens: int, following: int) -> torch.Tensor | None:
        """Return what a chunk's place in the cache takes off, `[T]`, see `finer_near_end`; None without a predictor."""
        predictor = self.learned.predictor
        return None if predictor is None else finer_near_end(predictor.recency, start, tokens, following)

    def classes(
        self,
        x: torch.Tensor,
        start: int,
        at: slice,
        finer: torch.Tensor | None,
        predict: PredictClasses,
        predicted: Predictions | None = None,
    ) -> tuple[U8, torch.Tensor | None]:
        """Return the classes of the tokens `at` of a chunk that begins at position `start`: neutral without predictor.

        Args:
            x: `[t, N]` float32, minus the means and the predictions.
            start: position of the chunk's first token.
            predict: the stage that applies the predictor. It reads values with their predictions, so that the classes
                of a chunk do not depend on whether its tokens are known.
            predicted: of the coefficients that the predictor reads, for the tokens `at`; None: nothing is.

        Returns:
            The classes. Also the first components `[K, t]` of the first block, if the predictor read them, so that they
            need no second product.
        """
        predictor = self.learned.predictor
        if predictor is None or self._leading is None or finer is None:
            return choose_classes(torch.zeros(len(x), dtype=torch.float32), self.classed.finest), None
        y = self._leading(x)
        classes = predict(predictor, y, predicted, start, at.start, finer[at], self.classed.finest)
        return classes, y if self._reads_first else None

    @lazy
    def _reads_first(self) -> bool:
        """Whether the predictor reads the first components of a single block."""
        predictor = self.learned.predictor
        if predictor is None or len(self.learned.basis.block_ranks) > 1:
            return False
        return np.array_equal(predictor.components, np.arange(len(predictor.components)))


class StepCoding:
    """How all sections of a profile are coded at one step of a blob, or of a refinement (`residual`)."""

    def __init__(
        self, learned: tuple[SectionProfile, ...], family: Family, step_index: int, residual: bool = False
    ) -> None:
        self.sections = tuple(SectionCoding(section, step_index, residual) for section in learned)
        self.family = family

    @lazy
    def plans(self) -> CodingPlans:
        """The coding plans of all sections, for compiled loops."""
        return pack_plans(self.sections, self.family.tables)
