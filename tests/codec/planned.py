"""Sections whose plans are made by hand, for stages that ask a profile for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import cast

import numpy as np
import torch

from cuvee.codec.entropy.coding_plan import CodingPlan, Escapes
from cuvee.codec.entropy.coefficients import CoefficientCoder
from cuvee.codec.entropy.family import Family, coding_plan, default_family, scale_codes, step_value
from cuvee.codec.entropy.streams import Streams
from cuvee.codec.entropy.tables import EntropyTables
from cuvee.codec.entropy.token_classes import (
    CLASSES,
    ClassedPlan,
    class_step_index,
    class_table,
    default_class_frequencies,
)
from cuvee.codec.errors import ProfileError
from cuvee.codec.format.coded_part import write_streams
from cuvee.codec.profiles.flat_plans import CodingPlans, pack_plans
from cuvee.codec.profiles.step_coding import StepCoding
from cuvee.codec.stages.implementations import get_stages
from cuvee.codec.stages.reference.sections import Coefficients
from cuvee.codec.support.arrays import U8

TABLE = class_table(default_class_frequencies())
EMPTY = CodingPlan(np.empty(0, np.uint16), np.empty(0, np.uint8), np.empty(0, np.uint16))


@dataclass(frozen=True)
class Planned:
    """What the decoders read of `SectionCoding`."""

    plan: CodingPlan
    ranks: tuple[int, ...]
    classed: ClassedPlan
    class_ranks: tuple[tuple[int, ...], ...]
    class_table: EntropyTables = TABLE


@dataclass(frozen=True)
class PlannedStep:
    """What the decoders read of `StepCoding`."""

    sections: tuple[Planned, ...]
    step_index: int = 0
    family: Family = field(default_factory=default_family)

    @cached_property
    def plans(self) -> CodingPlans:
        return pack_plans(self.sections, step_value(self.step_index), self.family.tables)


# `cached_property` needs a place for what it keeps, which frozen dataclasses have as long as they have no slots.
def coding_of(sections: Sequence[Planned], step_index: int = 0, family: Family | None = None) -> StepCoding:
    return cast(StepCoding, PlannedStep(tuple(sections), step_index, family or default_family()))


def planned(scales: Sequence[Sequence[int]], step_index: int = 0) -> Planned:
    """A section of blocks whose components have these scales, falling in each."""

    def of(at: int) -> tuple[CodingPlan, tuple[int, ...]]:
        codes = [scale_codes(np.array(block, np.int16), at) for block in scales]
        ranks = tuple(int((own >= 0).sum()) for own in codes)
        joined = np.concatenate([own[own >= 0] for own in codes])
        return coding_plan(joined), ranks

    plan, ranks = of(step_index)
    plans: list[CodingPlan | None] = []
    class_ranks: list[tuple[int, ...]] = []
    for k in range(CLASSES):
        try:
            own, of_class = of(class_step_index(step_index, k))
            plans.append(own)
        except ProfileError:
            of_class = (0,) * len(scales)
            plans.append(None)
        class_ranks.append(of_class)
    return Planned(plan, ranks, ClassedPlan(plans, step_index), tuple(class_ranks))


def one_block(classed: ClassedPlan, table: EntropyTables = TABLE) -> Planned:
    """A section of one block of which only the classes matter."""
    neutral = classed.plans[8]
    plan = EMPTY if neutral is None else neutral
    ranks = tuple((0 if own is None else len(own.shift),) for own in classed.plans)
    return Planned(plan, (len(plan.shift),), classed, ranks, table)


def coded_part(
    streams: Streams, escapes: Escapes, classes: U8, plan: ClassedPlan, tokens_per_stream: int,
    table: EntropyTables = TABLE,
) -> bytes:  # fmt: skip
    """The coded part of a section whose tokens have these classes, with whatever streams and escapes."""
    which = np.zeros(len(classes), np.uint16)
    listed = get_stages("numba").rans_encode(classes[:, None], which, table, 1)
    return write_streams(streams, escapes, int(plan.planes.max()), tokens_per_stream, listed)


def encode_plain(planned: Planned, y: np.ndarray[tuple[int, int], np.dtype[np.float32]], step_index: int = 0) -> bytes:
    """Code `[R, T]` coefficients of tokens without classes."""
    coder = CoefficientCoder(get_stages("numba"), default_family(), step_index)
    return coder.encode([(slice(0, y.shape[1]), y)], planned.plan, y.shape[1])


def decode(
    name: str, coding: StepCoding, parts: Sequence[tuple[int, bytes]], tokens: int, at: slice | None = None,
    dtype: torch.dtype = torch.float32,
) -> list[Coefficients]:  # fmt: skip
    """Decode with the stages called `name`; what comes back is kept when they decode again."""
    views = [(number, memoryview(data)) for number, data in parts]
    stages = get_stages(name)
    decoded = stages.decode_sections(stages.index_sections(coding, views, tokens), at or slice(0, tokens), dtype)
    return [Coefficients(tile.order, tile.classes, tile.y.clone()) for tile in decoded]


def same(left: Sequence[Coefficients], right: Sequence[Coefficients]) -> None:
    """Both decoders gave the same, bit for bit. Columns of no token hold anything."""
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        np.testing.assert_array_equal(one.order, other.order)
        assert (one.classes is None) == (other.classes is None)
        if one.classes is not None and other.classes is not None:
            np.testing.assert_array_equal(one.classes, other.classes)
        assert one.y.shape == other.y.shape and one.y.dtype == other.y.dtype
        there = torch.from_numpy(one.order >= 0)
        bits = torch.int16 if one.y.dtype == torch.bfloat16 else torch.int32
        assert torch.equal(one.y[:, :, there].view(bits), other.y[:, :, there].view(bits))
