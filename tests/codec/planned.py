"""Sections whose plans are made by hand, for stages that ask a profile for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from tests.codec.reference import get_stages

from cuvee.codec.entropy.coding_plan import CodingPlan
from cuvee.codec.entropy.family import Family, coding_plan, default_family, scale_codes
from cuvee.codec.entropy.tables import SYMBOLS, EntropyTables, normalize_counts, raw_bit_tables
from cuvee.codec.entropy.token_classes import (
    CLASSES,
    NEUTRAL,
    ClassedPlan,
    class_frequencies,
    class_step_index,
    class_table,
)
from cuvee.codec.errors import ProfileError
from cuvee.codec.format.streams import Escapes, Streams
from cuvee.codec.profiles.flat_plans import CodingPlans, pack_plans
from cuvee.codec.profiles.step_coding import StepCoding
from cuvee.codec.stages.columns import Coefficients

TABLE = class_table(class_frequencies(2.0 ** -np.abs(np.arange(CLASSES) - NEUTRAL)))


@dataclass(frozen=True)
class Planned:
    """What the decoders read of `SectionCoding`."""

    classed: ClassedPlan
    class_ranks: tuple[tuple[int, ...], ...]
    class_table: EntropyTables = TABLE


@dataclass(frozen=True)
class PlannedStep:
    """What the decoders read of `StepCoding`."""

    sections: tuple[Planned, ...]
    family: Family = field(default_factory=default_family)

    # It needs a place for what it keeps, which frozen dataclasses have as long as they have no slots.
    @cached_property
    def plans(self) -> CodingPlans:
        return pack_plans(cast(Any, self.sections), self.family.tables)


def coding_of(sections: Sequence[Planned], family: Family | None = None) -> StepCoding:
    return cast(StepCoding, PlannedStep(tuple(sections), family or default_family()))


def planned(scales: Sequence[Sequence[int]], step: int = 0) -> Planned:
    """A section of blocks whose components have these scales, falling in each."""
    plans: list[CodingPlan | None] = []
    class_ranks: list[tuple[int, ...]] = []
    for k in range(CLASSES):
        codes = [scale_codes(np.array(block, np.int16), class_step_index(step, k)) for block in scales]
        try:
            plans.append(coding_plan(np.concatenate([own[own >= 0] for own in codes])))
            class_ranks.append(tuple(int((own >= 0).sum()) for own in codes))
        except ProfileError:
            plans.append(None)
            class_ranks.append((0,) * len(scales))
    return Planned(ClassedPlan(plans, step), tuple(class_ranks))


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
    """Both decoders gave the same, bit for bit."""
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        np.testing.assert_array_equal(one.order, other.order)
        np.testing.assert_array_equal(one.classes, other.classes)
        assert one.y.shape == other.y.shape and one.y.dtype == other.y.dtype
        bits = torch.int16 if one.y.dtype == torch.bfloat16 else torch.int32
        assert torch.equal(one.y.view(bits), other.y.view(bits))


def _same_arrays(got: npt.NDArray[np.generic], want: npt.NDArray[np.generic]) -> None:
    assert got.dtype == want.dtype and got.shape == want.shape and got.tobytes() == want.tobytes()


def same_streams(got: Streams, want: Streams) -> None:
    for name in ("states", "lengths", "words"):
        _same_arrays(getattr(got, name), getattr(want, name))


def same_escapes(got: Escapes, want: Escapes) -> None:
    _same_arrays(got.index, want.index)
    _same_arrays(got.value, want.value)


@cache
def various_tables() -> EntropyTables:
    """A flat, a steep, a nearly certain, and a two-symbol table, then raw bits."""
    level = np.abs(np.arange(SYMBOLS, dtype=np.int8).astype(np.float64))
    certain, two = np.zeros(SYMBOLS), np.zeros(SYMBOLS)
    certain[[9, 250]] = 10**6, 1
    two[[0, 255]] = 1
    rows = [np.ones(SYMBOLS), np.exp2(-level / 2), certain, two]
    own = EntropyTables(np.stack([normalize_counts(r) for r in rows]))
    return own.extended(raw_bit_tables())
