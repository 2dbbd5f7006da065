"""The coding plans of all sections of a profile at one step, in flat arrays for the compiled loops.

Every section has two entries, because its tokens may have classes or not:

| entry | classes |
|---|---|
| `2 * section` | 0: all tokens |
| `2 * section + 1` | the token classes of `token_classes.py` |

A *level* is one component of one class: `entries[e, LEVELS] + k * entries[e, ROWS] + row`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from cuvee.codec.entropy.coding_plan import CodingPlan
from cuvee.codec.entropy.tables import EntropyTables
from cuvee.codec.entropy.token_classes import CLASSES, ClassedPlan
from cuvee.codec.support.arrays import F32, I32, U8, U16, U32

# Fields of an entry.
TABLES = 0  # start of its tables; those of class k begin `k * PLANES` later
PLANES = 1  # planes of the finest class
LEVELS = 2
ROWS = 3  # components of the finest class
FINEST = 4  # the finest class that can be used
BLOCKS = 5
ENTRY_FIELDS = 6


@dataclass(frozen=True, slots=True)
class CodingPlans:
    """The plans of all sections.

    Attributes:
        entries: int64 `[E, 6]`, the fields named above.
        planes, rows: int32 `[16 E]`, byte planes and components of each class.
        depth: int32 `[16 E]`, the largest number of components per block in each class.
        steps: float32 `[16 E]`, quantizer steps.
        tables: uint32, start of the decode table of each plane of each class.
        level_table, shift, low_plane: uint16, uint8 and int32 per level, as in `ClassedPlan`.
        block, index: int32 per level: the block of the component, and its number in the block.
        class_slots: uint32 `[S, 4096]`, the table that decodes the classes of each section.
        class_bits: the probability bits of that table.
    """

    entries: npt.NDArray[np.int64]
    planes: I32
    rows: I32
    depth: I32
    steps: F32
    tables: U32
    level_table: U16
    shift: U8
    low_plane: I32
    block: I32
    index: I32
    class_slots: U32
    class_bits: int


class PlannedSection(Protocol):
    """A section as `pack_plans` reads it."""

    @property
    def plan(self) -> CodingPlan:
        """The coding plan of tokens without classes."""
        ...

    @property
    def ranks(self) -> tuple[int, ...]:
        """The number of components per block of tokens without classes."""
        ...

    @property
    def classed(self) -> ClassedPlan:
        """The coding plan of each class."""
        ...

    @property
    def class_ranks(self) -> tuple[tuple[int, ...], ...]:
        """The number of components per block, by class."""
        ...

    @property
    def class_table(self) -> EntropyTables:
        """The table that codes the classes."""
        ...


def pack_plans(sections: Sequence[PlannedSection], step: float, tables: EntropyTables) -> CodingPlans:
    """Pack the plans of all sections, for the tables of one family.

    Args:
        sections: the sections, in order.
        step: the quantizer step of tokens without classes.
        tables: the tables that the plans index.
    """
    entries = np.zeros((2 * len(sections), ENTRY_FIELDS), np.int64)
    per_class: dict[str, Any] = {
        name: np.zeros((len(entries), CLASSES), kind)
        for name, kind in (("planes", np.int32), ("rows", np.int32), ("depth", np.int32), ("steps", np.float32))
    }
    flat: dict[str, list[npt.NDArray[np.generic]]] = {
        name: [] for name in ("tables", "level_table", "shift", "low_plane", "block", "index")
    }
    at = {"tables": 0, "level_table": 0}
    for e in range(len(entries)):
        section = sections[e // 2]
        if e % 2:
            classed, ranks = section.classed, section.class_ranks
            steps = classed.steps
            rows, planes, tables_of = classed.rows, classed.planes, classed.tables
            level_table, shift, low_plane = classed.level_table, classed.shift, classed.low_plane
            finest = classed.finest
        else:
            plan, ranks, finest = section.plan, (section.ranks,), 0
            count = len(plan.shift)
            rows, planes = np.array([count], np.int32), np.array([plan.planes], np.int32)
            steps = np.array([step], np.float32)
            tables_of, level_table, shift = plan.tables[None], plan.level_table[None], plan.shift[None]
            low_plane = np.zeros((1, count), np.int32)
            low_plane[0, plan.wide] = count + np.arange(len(plan.wide))
        block = np.zeros(level_table.shape, np.int32)
        index = np.zeros(level_table.shape, np.int32)
        for k, of_class in enumerate(ranks):
            blocks = np.repeat(np.arange(len(of_class), dtype=np.int32), of_class)
            block[k, : len(blocks)] = blocks
            index[k, : len(blocks)] = np.concatenate([np.arange(rank, dtype=np.int32) for rank in of_class])
            per_class["depth"][e, k] = max(of_class, default=0)
        for name, values in (("rows", rows), ("planes", planes), ("steps", steps)):
            per_class[name][e, : len(values)] = values
        entries[e] = (
            at["tables"], tables_of.shape[1], at["level_table"], int(rows.max(initial=0)), finest,
            len(section.ranks),
        )  # fmt: skip
        for name, array in (
            ("tables", tables_of.astype(np.uint32) << np.uint32(tables.prob_bits)),
            ("level_table", level_table),
            ("shift", shift),
            ("low_plane", low_plane),
            ("block", block),
            ("index", index),
        ):
            flat[name].append(array.ravel())
            if name in at:
                at[name] += array.size
    joined: dict[str, Any] = {name: np.concatenate(arrays) for name, arrays in flat.items()}
    return CodingPlans(
        entries=entries,
        **joined,
        **{name: array.ravel() for name, array in per_class.items()},
        class_slots=np.concatenate([section.class_table.slots for section in sections]),
        class_bits=sections[0].class_table.prob_bits,
    )
