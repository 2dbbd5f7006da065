"""The coding plans of all sections of a profile at one step, in flat arrays for the compiled loops.

A *level* is one component of one class: `entries[s, LEVELS] + k * entries[s, ROWS] + row` in section s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from cuvee.codec.entropy.tables import PROB_BITS, EntropyTables
from cuvee.codec.entropy.token_classes import CLASSES
from cuvee.codec.support.arrays import F32, I32, U8, U16, U32

if TYPE_CHECKING:
    from cuvee.codec.profiles.step_coding import SectionCoding

# Fields of an entry.
TABLES = 0  # where its tables begin
PLANES = 1  # from the tables of a class to those of the next
LEVELS = 2  # where its levels begin
ROWS = 3  # from the levels of a class to those of the next
FINEST = 4  # the finest class that can be used
BLOCKS = 5
ENTRY_FIELDS = 6


class CodingPlans(NamedTuple):
    """The plans of S sections. Compiled loops take it as it is.

    Attributes:
        entries: int64 `[S, 6]`, the fields named above.
        planes, rows: int32 `[16 S]`, byte planes and components of each class.
        depth: int32 `[16 S]`, the largest number of components per block in each class.
        steps: float32 `[16 S]`, quantizer steps.
        tables: uint32, start of the decode table of each plane of each class.
        level_table, shift, low_plane: uint16, uint8 and int32 per level, as in `ClassedPlan`.
        block, block_row: int32 per level: the block of the component, and its row in the block.
        class_slots: uint32 `[S, 4096]`, the table that decodes the classes of each section.
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
    block_row: I32
    class_slots: U32


def pack_plans(sections: Sequence[SectionCoding], tables: EntropyTables) -> CodingPlans:
    """Pack the plans of all sections, in order, whose tables are those of `tables`."""
    entries = np.zeros((len(sections), ENTRY_FIELDS), np.int64)
    depth = np.zeros((len(sections), CLASSES), np.int32)
    levels: list[tuple[I32, I32]] = []  # block and row of each
    table = level = 0
    for s, section in enumerate(sections):
        plan = section.classed
        block, block_row = np.zeros(plan.level_table.shape, np.int32), np.zeros(plan.level_table.shape, np.int32)
        for k, ranks in enumerate(section.class_ranks):
            blocks = np.repeat(np.arange(len(ranks), dtype=np.int32), ranks)
            block[k, : len(blocks)] = blocks
            block_row[k, : len(blocks)] = np.concatenate([np.arange(rank, dtype=np.int32) for rank in ranks])
            depth[s, k] = max(ranks, default=0)
        blocks_of = len(section.class_ranks[0])
        entries[s] = table, plan.tables.shape[1], level, plan.level_table.shape[1], plan.finest, blocks_of
        table, level = table + plan.tables.size, level + plan.level_table.size
        levels.append((block, block_row))
    plans = [section.classed for section in sections]
    return CodingPlans(
        entries=entries,
        planes=np.concatenate([plan.planes for plan in plans]),
        rows=np.concatenate([plan.rows for plan in plans]),
        depth=depth.ravel(),
        steps=np.concatenate([plan.steps for plan in plans]),
        tables=np.concatenate([plan.tables.ravel() for plan in plans]).astype(np.uint32) << np.uint32(PROB_BITS),
        level_table=np.concatenate([plan.level_table.ravel() for plan in plans]),
        shift=np.concatenate([plan.shift.ravel() for plan in plans]),
        low_plane=np.concatenate([plan.low_plane.ravel() for plan in plans]),
        block=np.concatenate([block.ravel() for block, _ in levels]),
        block_row=np.concatenate([block_row.ravel() for _, block_row in levels]),
        class_slots=np.concatenate([section.class_table.slots for section in sections]),
    )
