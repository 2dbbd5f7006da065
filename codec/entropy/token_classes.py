"""Token classes: each token gets a quantizer step of its own; and the order in which tokens are coded.

The cost of an error differs by orders of magnitude between tokens. The encoder gives each token of a section a *class*
k, and quantizes it with the step index `step_index + 32 (k - 11)`. That is half an octave per class, from 5.5 octaves
finer than the blob's step to two coarser. The decoder reads the classes. It does not need to know how the encoder chose
them: by a predictor (`codec/profiles/class_predictor.py`), by attention, or by a caller's weights.

    tokens [T] --sort by class within windows of 256--> columns [T] --deal out in rows--> streams

**Order.** Tokens are sorted by class, finest first, within windows of 256 tokens. So the number of coded
components falls from left to right within a window. A window of t columns has S = ceil(t / n) streams, and stream s
holds columns s, s + S, s + 2 S, …. So at any moment all lanes of a decoder work on tokens of nearly one class, and all
streams of a window cost nearly the same. A run of tokens lies in the streams of its windows.

The classes themselves are coded in the order of the tokens, as one rANS stream with one table per section. If all
tokens of a section have one class, as in lossless coding, nothing is sorted and nothing is coded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cuvee.codec.entropy.coding_plan import CodingPlan
from cuvee.codec.entropy.family import too_fine_error
from cuvee.codec.entropy.tables import SYMBOLS, TOTAL, EntropyTables, normalize_counts
from cuvee.codec.errors import ProfileError
from cuvee.codec.support.arrays import F32, I32, U8, U16, U32
from cuvee.codec.support.lazy import lazy
from cuvee.codec.support.steps import step_value

CLASSES = 16
NEUTRAL = 11  # the class that uses the blob's own step: 5.5 octaves for attention sinks, 2 for what no token reads
MORE_BYTES = 16  # behind a section's planes, which spare an encoder a copy: it reads as many symbols at a time
CLASS_UNITS = 32  # step units (1/64 octave) between neighboring classes


def class_step_index(step_index: int, token_class: int) -> int:
    """Return the step index of a class in a blob of step index `step_index`."""
    return step_index + CLASS_UNITS * (token_class - NEUTRAL)


def class_frequencies(counts: npt.NDArray[np.generic]) -> U16:
    """Turn counts `[16]` into frequencies `[16]` uint16 that add up to 4096, all above zero."""
    wide = np.zeros(SYMBOLS)
    wide[:CLASSES] = np.maximum(np.asarray(counts, np.float64), 1e-3 * max(float(np.sum(counts)), 1e-9))
    return normalize_counts(wide)[:CLASSES].copy()


def default_class_frequencies() -> U16:
    """Return frequencies for a section without a predictor: all can be coded, and the neutral class costs nothing."""
    frequencies = np.ones(CLASSES, np.uint16)
    frequencies[NEUTRAL] = TOTAL - CLASSES + 1
    return frequencies


def class_table(frequencies: U16) -> EntropyTables:
    """Make the table that codes classes.

    Raises:
        FormatError: the frequencies do not make a table.
    """
    wide = np.zeros((1, SYMBOLS), np.uint16)
    wide[0, :CLASSES] = frequencies
    return EntropyTables(wide)


class ColumnPlan:
    """Which byte planes a column of each of K classes has: `[K]` int32, falling; and `[K, P]` uint16, each plane's
    table.
    """

    def __init__(self, planes: I32, tables: U16) -> None:
        self.planes = planes
        self.tables = tables

    @lazy
    def coders(self) -> U32:
        """`[K P]` uint32: where in `EntropyTables.coders` the table of each plane of each class begins."""
        return self.tables.ravel().astype(np.uint32) * np.uint32(SYMBOLS)


def one_class(tables: U16) -> ColumnPlan:
    """Return the plan of a section whose tokens all have class 0, given the table of each plane, `[P]` uint16."""
    return ColumnPlan(np.array([len(tables)], np.int32), tables[None])


@dataclass(frozen=True, slots=True)
class SectionPlanes:
    """A section to entropy-code, with a column per token, sorted by class within windows.

    Column t of `planes` `[P, T]` holds `plan.planes[columns[t]]` bytes; bytes below are not read. `columns` `[T]` are
    the columns' classes. `tokens_per_stream` is n, a power of two, at most 128.
    """

    planes: U8
    columns: U8
    plan: ColumnPlan
    tokens_per_stream: int


class ClassedPlan(ColumnPlan):
    """How the components of one section are coded, class by class, at one step of a blob.

    Args:
        plans: the plan of each class; None for a class whose step is too fine for the profile. Such classes come first.
            Coarser classes have no more components and no more planes than finer ones.

    Attributes:
        finest: the finest class with a plan.
        steps: `[16]` float32, quantizer steps.
        rows: `[16]` int32, components; 0 for classes without a plan, here and below.
        planes: `[16]` int32, byte planes.
        tables: `[16, P]` uint16, the entropy table of each plane.
        level_table: `[16, R]` uint16, index into the quantizer's arrays.
        shift: `[16, R]` uint8, number of low bits in a plane of their own.
        low_plane: `[16, R]` int32, the plane of those low bits; 0 without low bits.

    Raises:
        ProfileError: the step is too fine for all classes.
    """

    def __init__(self, plans: Sequence[CodingPlan | None], step_index: int) -> None:
        served = [k for k, plan in enumerate(plans) if plan is not None]
        if not served:
            raise too_fine_error()
        self.plans = tuple(plans)
        self.step_index = step_index
        self._entropy: tuple[EntropyTables, npt.NDArray[np.float64]] | None = None
        self.finest = served[0]
        self.steps: F32 = np.array([step_value(class_step_index(step_index, k)) for k in range(CLASSES)], np.float32)
        self.rows: I32 = np.array([0 if plan is None else len(plan.shift) for plan in plans], np.int32)
        depth: I32 = np.array([0 if plan is None else plan.planes for plan in plans], np.int32)
        rows, planes = max(int(self.rows.max()), 1), max(int(depth.max()), 1)
        super().__init__(depth, np.zeros((CLASSES, planes), np.uint16))
        self.level_table: U16 = np.zeros((CLASSES, rows), np.uint16)
        self.shift: U8 = np.zeros((CLASSES, rows), np.uint8)
        self.low_plane: I32 = np.zeros((CLASSES, rows), np.int32)
        for k, plan in enumerate(plans):
            if plan is None:
                continue
            count = len(plan.shift)
            self.tables[k, : plan.planes] = plan.tables
            self.level_table[k, :count] = plan.level_table
            self.shift[k, :count] = plan.shift
            self.low_plane[k, plan.wide] = count + np.arange(len(plan.wide))

    def of(self, token_class: int) -> CodingPlan:
        """Return the plan of a class, which must not be finer than `finest`."""
        plan = self.plans[token_class]
        if plan is None:
            raise ProfileError(f"token_class: must be at least {self.finest}, got class {token_class}, which is finer")
        return plan

    def entropy(self, tables: EntropyTables) -> npt.NDArray[np.float64]:
        """Return the expected bits of a token of each class, `[16]`."""
        cached = self._entropy
        if cached is None or cached[0] is not tables:
            planes = (tables.entropy[self.tables[k, : self.planes[k]]] for k in range(CLASSES))
            cached = self._entropy = tables, np.array([float(plane.sum()) for plane in planes])
        return cached[1]
