"""What coding the sections of a profile at one step takes, whatever the scheme's stages or backend."""

from __future__ import annotations

import numpy as np
import torch

from cuvee.codec.entropy.family import Family, step_value
from cuvee.codec.entropy.tables import EntropyTables
from cuvee.codec.entropy.token_classes import ClassedPlan, class_table
from cuvee.codec.errors import ProfileError
from cuvee.codec.profiles.class_predictor import choose_classes
from cuvee.codec.profiles.flat_plans import CodingPlans, pack_plans
from cuvee.codec.profiles.section_profile import SectionProfile
from cuvee.codec.stages.reference.symbols import U8
from cuvee.codec.stages.reference.transform import LeadingComponents
from cuvee.codec.support.lazy import lazy


class SectionCoding:
    """What coding one section at one step takes, whatever the backend.

    Args:
        learned: of the section.
        step_index: of the blob.

    Attributes:
        learned: as given.
        ranks, plan: of tokens without classes.
    """

    def __init__(self, learned: SectionProfile, step_index: int) -> None:
        self.learned = learned
        self.ranks, self.plan = learned.plan(step_index)
        self._step_index = step_index

    @lazy
    def classed(self) -> ClassedPlan:
        """How tokens of each class are coded: without prediction, which takes them in their own order."""
        return self.learned.classed_plan(self._step_index)

    @lazy
    def class_ranks(self) -> tuple[tuple[int, ...], ...]:
        """`[16]`, of each class the components of each block; those of classes that are not served are none."""
        none = (0,) * len(self.ranks)
        return tuple(
            none if plan is None else self.learned.class_ranks(self._step_index, k)
            for k, plan in enumerate(self.classed.plans)
        )

    @lazy
    def class_table(self) -> EntropyTables:
        """The table that codes the classes."""
        return class_table(self.learned.class_freq)

    @lazy
    def _leading(self) -> LeadingComponents | None:
        predictor = self.learned.predictor
        return None if predictor is None else self.learned.basis.leading(predictor.components)

    def classes(
        self, x: torch.Tensor, start: int, at: slice, offsets: torch.Tensor | None
    ) -> tuple[U8, torch.Tensor | None]:
        """The classes of the tokens `at` of a chunk that begins at position `start`.

        Args:
            x: `[t, N]` float32, less the means.
            start: position of the chunk's first token.
            at: the tokens.
            offsets: octaves `[T]` of all tokens that the caller asks for; None: as the predictor says.

        Returns:
            the classes; and the first components `[K, t]` of the first block, if those are what the predictor read, so
            that they need no second product.
        """
        if offsets is not None:
            return choose_classes(offsets[at], self.classed.finest), None
        predictor = self.learned.predictor
        if predictor is None or self._leading is None:
            raise ProfileError("a section without a predictor cannot tell its tokens' classes")
        y = self._leading(x)
        classes = choose_classes(predictor.offsets(y, start, at.start), self.classed.finest)
        return classes, y if self._reads_first else None

    @lazy
    def _reads_first(self) -> bool:
        """Whether the predictor reads the first components of a single block."""
        predictor = self.learned.predictor
        if predictor is None or len(self.ranks) > 1:
            return False
        return np.array_equal(predictor.components, np.arange(len(predictor.components)))


class StepCoding:
    """How all sections of a profile are coded at one step.

    Args:
        learned: the sections.
        family: of the profile.
        step_index: of the blob.

    Attributes:
        sections: how each section is coded.
        family, step_index: as given.
    """

    def __init__(self, learned: tuple[SectionProfile, ...], family: Family, step_index: int) -> None:
        self.sections = tuple(SectionCoding(section, step_index) for section in learned)
        self.family = family
        self.step_index = step_index

    @lazy
    def plans(self) -> CodingPlans:
        """The plans of all sections, for compiled loops."""
        return pack_plans(self.sections, step_value(self.step_index), self.family.tables)
