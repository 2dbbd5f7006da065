"""Token classes: each token gets a quantizer step of its own; and the order in which tokens are coded.

Tokens differ by orders of magnitude in what an error on them costs. The encoder gives each token of a section a
*class* k, and quantizes it with the step index `step + 32 (k - 8)`. That is half an octave per class, from four octaves
finer than the blob's step to three and a half coarser. The decoder only reads the classes. How the encoder chose them
(by `importance.py`, attention, or a caller's own weights) does not concern it.

    tokens [T] --sort by class within windows of 256--> columns [T] --deal out in rows--> streams

**Order.** Tokens are sorted by class, finest first, within windows of 256 tokens. So within a window the number of
coded components falls from left to right. A window of t columns has S = ceil(t / n) streams, and stream s holds columns
s, s + S, s + 2 S, …. So at any moment all lanes of a decoder work on tokens of nearly one class, and all streams of a
window cost nearly the same. A run of tokens lies in the streams of its windows.

The classes themselves are coded in the order of the tokens, as one rANS stream with one table per section.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from cuvee.codec.entropy.coding_plan import CodingPlan
from cuvee.codec.entropy.family import step_value
from cuvee.codec.entropy.tables import SYMBOLS, EntropyTables, normalize_counts
from cuvee.codec.errors import ProfileError
from cuvee.codec.support.arrays import F32, I32, U8, U16

CLASSES = 16
NEUTRAL = 8  # the class that uses the blob's own step
CLASS_UNITS = 32  # step units (1/64 octave) between neighboring classes
WINDOW = 256  # tokens sorted together; a multiple of every number of tokens per stream
CLASS_BITS = 12  # probability bits of a class table

# For profiles that learned no frequencies: the neutral class is likely and the extremes are not, but all can be coded.
_DEFAULT_WEIGHT = 2.0 ** -np.abs(np.arange(CLASSES) - NEUTRAL)


def class_step_index(step_index: int, token_class: int) -> int:
    """The step index of a class in a blob of step index `step`."""
    return step_index + CLASS_UNITS * (token_class - NEUTRAL)


def class_frequencies(counts: npt.NDArray[np.generic]) -> U16:
    """Counts `[16]` -> frequencies `[16]` uint16 that add up to 4096, none of them zero."""
    wide = np.zeros(SYMBOLS)
    wide[:CLASSES] = np.maximum(np.asarray(counts, np.float64), 1e-3 * max(float(np.sum(counts)), 1e-9))
    return normalize_counts(wide, CLASS_BITS)[:CLASSES].copy()


def default_class_frequencies() -> U16:
    """Frequencies for a section that has learned none."""
    return class_frequencies(_DEFAULT_WEIGHT)


def class_table(frequencies: U16) -> EntropyTables:
    """The one table that codes classes.

    Raises:
        FormatError: the frequencies do not make a table.
    """
    wide = np.zeros((1, SYMBOLS), np.uint16)
    wide[0, :CLASSES] = frequencies
    return EntropyTables(wide, CLASS_BITS)


def windows(first: int, end: int) -> Iterator[slice]:
    """The windows of the tokens `first … end - 1`; `first` is a multiple of WINDOW."""
    for start in range(first, end, WINDOW):
        yield slice(start, min(start + WINDOW, end))


class ClassedPlan:
    """How the components of one section are coded, class by class, at one step of a blob.

    Args:
        plans: the plan of each class, without prediction. None stands for a class whose step is too fine for the
            profile; those come first. Coarser classes have no more components and no more planes than finer ones.
        step_index: of the blob.

    Attributes:
        plans: as given.
        finest: the finest class that can be used.
        steps: `[16]` float32, quantizer steps.
        rows: `[16]` int32, components; 0 for classes that cannot be used, here and below.
        planes: `[16]` int32, byte planes.
        tables: `[16, P]` uint16, the entropy table of each plane.
        level_table: `[16, R]` uint16, index into the quantizer's arrays.
        shift: `[16, R]` uint8, how many low bits are coded apart.
        low_plane: `[16, R]` int32, the plane of those low bits; 0 if there are none.

    Raises:
        ProfileError: the step is too fine for all classes.
    """

    def __init__(self, plans: Sequence[CodingPlan | None], step_index: int) -> None:
        served = [k for k, plan in enumerate(plans) if plan is not None]
        if not served:
            raise ProfileError(
                "the quantizer step is too small for this profile: use a larger step or quality='lossless'"
            )
        self.plans = tuple(plans)
        self.step_index = step_index
        self._entropy: tuple[EntropyTables, npt.NDArray[np.float64]] | None = None
        self.finest = served[0]
        self.steps: F32 = np.array([step_value(class_step_index(step_index, k)) for k in range(CLASSES)], np.float32)
        self.rows: I32 = np.array([0 if plan is None else len(plan.shift) for plan in plans], np.int32)
        self.planes: I32 = np.array([0 if plan is None else plan.planes for plan in plans], np.int32)
        rows, planes = max(int(self.rows.max()), 1), max(int(self.planes.max()), 1)
        self.tables: U16 = np.zeros((CLASSES, planes), np.uint16)
        self.level_table: U16 = np.zeros((CLASSES, rows), np.uint16)
        self.shift: U8 = np.zeros((CLASSES, rows), np.uint8)
        self.low_plane: I32 = np.zeros((CLASSES, rows), np.int32)
        for k, plan in enumerate(plans):
            if plan is None:
                continue
            count = len(plan.shift)
            self.tables[k, : plan.planes] = plan.first
            self.level_table[k, :count] = plan.level_table
            self.shift[k, :count] = plan.shift
            self.low_plane[k, plan.wide] = count + np.arange(len(plan.wide))

    def of(self, token_class: int) -> CodingPlan:
        """The plan of a class, which must not be finer than `finest`."""
        plan = self.plans[token_class]
        if plan is None:
            raise ProfileError(f"class {token_class} is finer than the profile can code at this step")
        return plan

    def entropy(self, tables: EntropyTables) -> npt.NDArray[np.float64]:
        """How many bits a token of each class is expected to take, `[16]`."""
        known = self._entropy
        if known is None or known[0] is not tables:
            planes = (tables.entropy[self.tables[k, : self.planes[k]]] for k in range(CLASSES))
            known = self._entropy = tables, np.array([float(own.sum()) for own in planes])
        return known[1]
