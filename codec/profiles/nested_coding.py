"""How the sections of a profile are coded as a base and its refinements, for all backends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cuvee.codec.entropy.coding_plan import CodingPlan
from cuvee.codec.entropy.family import OCTAVE
from cuvee.codec.entropy.nested import NestedFamily
from cuvee.codec.entropy.tables import EntropyTables
from cuvee.codec.entropy.token_classes import CLASSES, ClassedPlan
from cuvee.codec.profiles.flat_plans import CodingPlans, pack_plans
from cuvee.codec.profiles.section_profile import SectionProfile
from cuvee.codec.profiles.step_coding import SectionCoding, StepCoding
from cuvee.codec.profiles.token_prediction import PredictionCache
from cuvee.codec.support.arrays import F32, I32, I64, U8, U16
from cuvee.codec.support.lazy import lazy

_NO_ROWS = CodingPlan(np.empty(0, np.uint16), np.empty(0, np.uint8), np.empty(0, np.uint16))


@dataclass(frozen=True, slots=True)
class PartPlan:
    """How one part of a section, its base or a refinement, is coded.

    Attributes:
        classed: the plan of each class.
        class_ranks: `[16]`, the number of components per block for each class; zeros for classes that are not served.
        components: `[16]`, for each class the component of each row. Components are numbered block by block, with room
            in each block for those of the deepest part, so that a number means the same in all parts and classes.
    """

    classed: ClassedPlan
    class_ranks: tuple[tuple[int, ...], ...]
    components: tuple[I64, ...]


class NestedSection:
    """How one section is coded as a base and its refinements.

    Args:
        coding: how the base is coded.
        step_index: the base's.
        refinements: how many there are.
    """

    def __init__(self, coding: SectionCoding, step_index: int, refinements: int) -> None:
        self.coding = coding
        self._step_index = step_index
        self._refinements = refinements

    @lazy
    def parts(self) -> tuple[PartPlan, ...]:
        """The plans of the base and of its refinements, in order."""
        learned = self.coding.learned
        plans, ranks = [self.coding.classed], [self.coding.class_ranks]
        for refinement in range(1, self._refinements + 1):
            plan = learned.refinement_plan(self._step_index, refinement)
            plans.append(plan)
            at = self._step_index - OCTAVE * refinement
            zeros = (0,) * len(self.coding.ranks)
            ranks.append(
                tuple(zeros if own is None else learned.class_ranks(at, k) for k, own in enumerate(plan.plans))
            )
        # Ranks rise from part to part, and fall from class to class.
        deepest = ranks[-1][plans[-1].finest]
        begins = np.concatenate([[0], np.cumsum(deepest)[:-1]])
        return tuple(
            PartPlan(
                plan,
                of_part,
                tuple(
                    np.concatenate([begin + np.arange(rank) for begin, rank in zip(begins, own, strict=True)])
                    for own in of_part
                ),
            )
            for plan, of_part in zip(plans, ranks, strict=True)
        )

    @lazy
    def codes(self) -> U16:
        """`[refinements, 16, R]`: the scale code of each row of each class, at most 24; 0 if there is no row."""
        rows = max(int(part.classed.rows.max()) for part in self.parts)
        out = np.zeros((self._refinements, CLASSES, rows), np.uint16)
        for own, part in zip(out, self.parts[1:], strict=True):
            table = part.classed.level_table
            own[:, : table.shape[1]] = table
        return out

    @lazy
    def places(self) -> I32:
        """`[1 + refinements, 16, R]`: for each row of the last part the row in each part, or -1."""
        last = self.parts[-1]
        out = np.full((len(self.parts), CLASSES, max(int(last.classed.rows.max()), 1)), -1, np.int32)
        for own, part in zip(out, self.parts, strict=True):
            for k, components in enumerate(part.components):
                own[k, np.searchsorted(last.components[k], components)] = np.arange(len(components))
        return out

    def of_base(self, y: F32, columns: U8) -> F32:
        """Return the base's rows of a tile: `[R, T]`, given those of the last part and the classes of its columns."""
        first, last = self.parts[0], self.parts[-1]
        if len(first.class_ranks[0]) == 1:  # the leading ones
            return y
        out = np.zeros((int(first.classed.rows[columns].max(initial=0)), len(columns)), np.float32)
        for k in np.unique(columns):
            own = columns == k
            rows = np.searchsorted(last.components[k], first.components[k])
            out[: len(rows), own] = y[rows][:, own]
        return out

    @property
    def count(self) -> int:
        """The number of components of all blocks: one more than the largest in `PartPlan.components`."""
        last = self.parts[-1]
        return sum(last.class_ranks[last.classed.finest])


@dataclass(frozen=True, slots=True)
class _ClassedOnly:
    """A refinement of a section as `pack_plans` reads it: all tokens have classes."""

    part: PartPlan
    coding: SectionCoding

    @property
    def plan(self) -> CodingPlan:
        return _NO_ROWS

    @property
    def ranks(self) -> tuple[int, ...]:
        return (0,) * len(self.part.class_ranks[0])

    @property
    def classed(self) -> ClassedPlan:
        return self.part.classed

    @property
    def class_ranks(self) -> tuple[tuple[int, ...], ...]:
        return self.part.class_ranks

    @property
    def class_table(self) -> EntropyTables:
        return self.coding.class_table


class NestedCoding:
    """How all sections of a profile are coded as a base and its refinements.

    Args:
        learned: the learned data of the sections.
        family: the profile's nested family.
        step_index: the base's.
        refinements: how many there are, 0 … 2.
        coefficients: see `StepCoding`.

    Attributes:
        base: how bases are coded.
        sections: how each section is coded.
        family, refinements: as given.
    """

    def __init__(
        self,
        learned: tuple[SectionProfile, ...],
        family: NestedFamily,
        step_index: int,
        refinements: int,
        coefficients: Callable[[int], PredictionCache | None] | None = None,
    ) -> None:
        self.base = StepCoding(learned, family.base, step_index, coefficients)
        self.sections = tuple(NestedSection(section, step_index, refinements) for section in self.base.sections)
        self.family = family
        self.refinements = refinements

    @lazy
    def refinement_plans(self) -> tuple[CodingPlans, ...]:
        """The coding plans of all sections in each refinement, for compiled loops."""
        return tuple(
            pack_plans(
                [_ClassedOnly(section.parts[number], section.coding) for section in self.sections], 0.0, coder.decoding
            )
            for number, coder in zip(range(1, self.refinements + 1), self.family.coders, strict=False)
        )

    @lazy
    def begins(self) -> I64:
        """`[sections, blocks]`: the number of the first component of each block, as in `PartPlan.components`."""
        deepest = [own.parts[-1].class_ranks[own.parts[-1].classed.finest] for own in self.sections]
        out = np.zeros((len(deepest), max(map(len, deepest))), np.int64)
        for begins, ranks in zip(out, deepest, strict=True):
            begins[1 : len(ranks)] = np.cumsum(ranks)[:-1]
        return out

    def ranks(self, section: int) -> tuple[tuple[int, ...], ...]:
        """Return the number of components per block for each class in the last part of a section."""
        return self.sections[section].parts[-1].class_ranks
