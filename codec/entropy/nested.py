"""Nested quantizers: a refinement halves the quantizer's steps of the part of a cache that it refines.

A *base* is a blob like any other, but its quantizer's levels m > 0 stand for cells that are all one step wide. The
first refinement cuts each of these cells in half, and the cell around zero in three; a second one does so again:

    base              ───────── 0 ─────────┃──── 1 ────┃──── 2 ────┃     one step wide each
    refinement 1      ───── 0 ─────┃── 1 ──┃  2  ┃  3  ┃  4  ┃  5  ┃     half a step
    refinement 2      ── 0 ──┃  1  ┃ 2 ┃ 3 ┃4 ┃5 ┃6 ┃7 ┃8 ┃9 ┃10┃11┃     a quarter

So a level 2 m or 2 m + 1 refines the level m, and the sign is kept. A *symbol* says which: 0 or 1, or -1, 0 or 1 for
m = 0. It is coded with a table that depends on the component's scale code and on min(m, 3), its *context*. A component
that the coarser part did not code has a scale code 0 … 3, and its symbol is its whole level, -7 … 7, or an escape.

Where zero is cut is up to the encoder. Zero cells as wide as those of `family.Family`, which trade bits for error best,
and somewhat wider in coarser parts, cost .4 to 1.1 % more bits than blobs of one quality, at the same error (SmolLM2,
ideal entropy, three parts). Cells of one width everywhere, as in JPEG 2000, would cost 5 to 6 %.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, localcontext
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from cuvee.codec.entropy.coding_plan import Quantizer
from cuvee.codec.entropy.family import (
    DIGITS,
    OCTAVE,
    PROB_BITS,
    TABLES,
    TABLES_PER_OCTAVE,
    Family,
    default_family,
    frequencies,
    logistic_frequencies,
    logistic_tail,
    make_family,
    scale_codes,
    step_value,
)
from cuvee.codec.entropy.tables import SYMBOLS, CoderTables, EntropyTables, normalize_counts
from cuvee.codec.errors import FormatError
from cuvee.codec.support.arrays import F32, I16, I32, U16, U32
from cuvee.codec.support.lazy import lazy

MAX_REFINEMENTS = 2
CONTEXTS = 4  # levels 0, 1, 2, and larger ones
CONTEXT_BITS = 4  # of a symbol, beside its context in one byte
MOST = 7  # the largest magnitude of a symbol
ESCAPED = -8  # the symbol of a larger level, which follows in the list of escapes
SYMBOLS_OF_PART = MOST - ESCAPED + 1
KINDS = 4  # levels 1, 2, 3, and larger ones have reconstruction points of their own

# What is added to the dead zones of the family, by part, in steps. Compared on SmolLM2 at three steps each: constants
# .8, .7, .65 for all scales cost 2.3 to 3.4 %, the family's own zones up to 1.8 %, these .4 to 1.1 %.
WIDER = (0.1, 0.05, 0.0)
_WIDEST = 1.0

_PRIOR = 64.0  # weight of the parametric distribution in a learned table, in symbols


@lru_cache(maxsize=1)
def possible_symbols() -> npt.NDArray[np.bool_]:
    """Return which symbols can occur, `[25, 4, 16]`. A level keeps its sign, so only a level 0 has symbols below 0."""
    possible = np.zeros((TABLES, CONTEXTS, SYMBOLS_OF_PART), bool)
    possible[:TABLES_PER_OCTAVE, 0] = True
    possible[TABLES_PER_OCTAVE:, 0, -1 - ESCAPED : 2 - ESCAPED] = True
    possible[:, 1:, -ESCAPED : 2 - ESCAPED] = True
    return possible


@dataclass(frozen=True, slots=True)
class RefinementTables:
    """The tables of one refinement.

    Attributes:
        freq: `[25, 4, 16]` uint16: for each scale code (24 stands for all larger ones) and context the frequencies of
            the symbols -8 … 7. Each table adds up to 4096.
        zone: `[25]` float32: where the cell around zero is cut, in steps of this refinement. Only encoders read it.
        shrink: `[25, 4]` float32: a level m > 0 is reconstructed as `m - shrink[:, min(m, 4) - 1]`.

    Raises:
        FormatError: the arrays break a rule.
    """

    freq: U16
    zone: F32
    shrink: F32

    def __post_init__(self) -> None:
        for name, array, shape, dtype in (
            ("freq", self.freq, (TABLES, CONTEXTS, SYMBOLS_OF_PART), np.uint16),
            ("zone", self.zone, (TABLES,), np.float32),
            ("shrink", self.shrink, (TABLES, KINDS), np.float32),
        ):
            if array.shape != shape or array.dtype != dtype:
                raise FormatError(
                    f"nested.{name}: must be {np.dtype(dtype)} {list(shape)}, got {array.dtype} {list(array.shape)}"
                )
        for name, array, least in (("zone", self.zone, 0.0), ("shrink", self.shrink, -2.0)):
            if not np.all((array >= least) & (array <= 2.0)):  # NaN fails this, too
                raise FormatError(f"nested.{name}: must lie within {least:g} … 2, got {array.min()} … {array.max()}")
        if self.freq[~possible_symbols()].any() or not self.freq[possible_symbols()].all():
            raise FormatError("nested.freq: must be above zero for the symbols that can occur, and zero for all others")


class RefinementCoder:
    """The entropy tables of one refinement, for encoders and decoders.

    Attributes:
        decoding: the table of scale code c and context x is number 4 c + x.
        encoding: table number 4 c codes bytes that hold a context and a symbol `context << 4 | symbol & 15`.
        cuts: `[100]` uint32, for each table of `decoding` where the intervals of the symbols 1 and -1 begin,
            `begin(-1) << 16 | begin(1)`. These two say it all from scale code 4 on, where no other symbols but 0 occur.
    """

    def __init__(self, tables: RefinementTables) -> None:
        wide = np.zeros((TABLES * CONTEXTS, SYMBOLS), np.uint16)
        symbols = np.arange(ESCAPED, MOST + 1)
        wide[:, symbols & 0xFF] = tables.freq.reshape(TABLES * CONTEXTS, -1)
        self.decoding = EntropyTables(wide, PROB_BITS)
        one, minus_one = (self.decoding.cumulative[:, symbol].astype(np.uint32) for symbol in (1, -1 & 0xFF))
        self.cuts: U32 = minus_one << np.uint32(16) | one
        joined = np.zeros((2, TABLES * CONTEXTS, SYMBOLS), np.uint16)
        for context in range(CONTEXTS):
            to = context << CONTEXT_BITS | symbols & ((1 << CONTEXT_BITS) - 1)
            for array, source in zip(joined, (self.decoding.freq, self.decoding.cumulative), strict=True):
                array[::CONTEXTS, to] = source[context::CONTEXTS, symbols & 0xFF]
        self.encoding = CoderTables(joined[0], joined[1], PROB_BITS)


class NestedFamily:
    """The tables and quantizers of a base and its refinements.

    Args:
        base: the family of bases. The cells of its quantizer are one step wide: `rounding` is 1 - `dead_zone`.
        refinements: of the first and of the second refinement.
        offsets: `[3]` int16: a base alone, one with one refinement, and one with two have the error of a blob of one
            quality whose step index is larger by this, in 1/64 octaves.

    Raises:
        FormatError: the parts do not fit together.
    """

    def __init__(self, base: Family, refinements: Sequence[RefinementTables], offsets: I16) -> None:
        if len(refinements) != MAX_REFINEMENTS:
            raise FormatError(f"nested: must have {MAX_REFINEMENTS} refinements, got {len(refinements)}")
        if offsets.shape != (MAX_REFINEMENTS + 1,) or offsets.dtype != np.int16 or np.abs(offsets).max() > OCTAVE:
            raise FormatError(
                f"nested.offsets: must be {MAX_REFINEMENTS + 1} int16 numbers of at most ±{OCTAVE}, got {offsets}"
            )
        if not np.array_equal(base.quantizer.rounding, np.float32(1) - base.quantizer.dead_zone):
            raise FormatError("nested.dead_zone: must be 1 - rounding, so that all cells are one step wide")
        self.base = base
        self.refinements = tuple(refinements)
        self.offsets = offsets

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays of a profile's file, by name."""
        quantizer = self.base.quantizer
        return {
            "nested.freq": self.base.tables.freq[:TABLES],
            "nested.dead_zone": quantizer.dead_zone,
            "nested.shrink": quantizer.shrink,
            "nested.offsets": self.offsets,
            "nested.refinement_freq": np.stack([own.freq for own in self.refinements]),
            "nested.refinement_zone": np.stack([own.zone for own in self.refinements]),
            "nested.refinement_shrink": np.stack([own.shrink for own in self.refinements]),
        }

    @lazy
    def coders(self) -> tuple[RefinementCoder, ...]:
        """The entropy tables of each refinement."""
        return tuple(RefinementCoder(tables) for tables in self.refinements)


def read_nested(arrays: Mapping[str, npt.NDArray[Any]]) -> NestedFamily:
    """Return the family of `NestedFamily.arrays`, from untrusted arrays.

    Raises:
        FormatError, KeyError, ValueError: the arrays do not make a family.
    """
    freq, dead_zone = arrays["nested.freq"], arrays["nested.dead_zone"]
    if freq.dtype != np.uint16 or dead_zone.dtype != np.float32:
        raise FormatError("nested.freq, nested.dead_zone: have the wrong dtype")
    base = make_family(freq, Quantizer(dead_zone, np.float32(1) - dead_zone, arrays["nested.shrink"]))
    parts = zip(
        arrays["nested.refinement_freq"], arrays["nested.refinement_zone"], arrays["nested.refinement_shrink"],
        strict=True,
    )  # fmt: skip
    return NestedFamily(base, [RefinementTables(*part) for part in parts], arrays["nested.offsets"])


def refine(level: I32, magnitude: F32, cell: tuple[F32, F32], zone: F32 | float) -> tuple[I32, tuple[F32, F32]]:
    """Cut the cells of magnitudes in two; this is how encoders choose levels.

    Args:
        level: magnitudes of the coarser levels, int32 of any shape.
        magnitude: magnitudes of the coefficients, in steps of the base, float32 of the same shape.
        cell: where each one's cell begins and ends, in the same unit.
        zone: where cells around zero are cut, in the same unit.

    Returns:
        the magnitudes of the finer levels, and their cells.
    """
    low, high = cell
    middle = np.where(level == 0, zone, (low + high) * np.float32(0.5)).astype(np.float32)
    upper = magnitude >= middle
    return (2 * level + upper).astype(np.int32), (np.where(upper, middle, low), np.where(upper, high, middle))


def base_cell(level: I32, dead_zone: F32) -> tuple[F32, F32]:
    """Return where the cells of a base's levels begin and end, in steps."""
    zero = level == 0
    low = level.astype(np.float32) + (dead_zone - np.float32(1))
    return np.where(zero, np.float32(0), low), np.where(zero, dead_zone, low + np.float32(1))


def _table(codes: I32) -> I32:
    table: I32 = np.minimum(codes, TABLES - 1)
    return table


def wider_zones(dead_zone: F32, part: int) -> F32:
    """Return the dead zones of a part, given those of the family."""
    zones: F32 = np.minimum(dead_zone + np.float32(WIDER[part]), np.float32(_WIDEST)).astype(np.float32)
    return zones


def _symbol_tables(counts: npt.NDArray[np.float64]) -> U16:
    """Turn counts of symbols, `[25, 4, 16]`, into frequencies that do not depend on the sign."""
    counts = counts.copy()
    signed = counts[:, 0, 1:]  # without escapes
    counts[:, 0, 1:] = (signed + signed[:, ::-1]) / 2
    wide = np.zeros((TABLES * CONTEXTS, SYMBOLS))
    wide[:, :SYMBOLS_OF_PART] = np.where(possible_symbols(), np.maximum(counts, 1e-9), 0.0).reshape(len(wide), -1)
    return normalize_counts(wide, PROB_BITS)[:, :SYMBOLS_OF_PART].reshape(counts.shape).copy()


@lru_cache(maxsize=1)
def default_nested_family() -> NestedFamily:
    """Return a nested family that needs no data, of the same distributions as `family.default_family`."""
    dead_zone = default_family().quantizer.dead_zone
    zones = [wider_zones(dead_zone, part) for part in range(MAX_REFINEMENTS + 1)]
    with localcontext() as context:
        context.prec = DIGITS
        freq = np.zeros((TABLES, SYMBOLS), np.uint16)
        for table in range(TABLES):
            freq[table] = logistic_frequencies(table, Decimal(float(zones[0][table])))
        refinements = []
        for part in range(1, MAX_REFINEMENTS + 1):
            counts = np.zeros((TABLES, CONTEXTS, SYMBOLS_OF_PART))
            for table in range(TABLES):
                counts[table] = _default_counts(table, zones, part)
            refinements.append(RefinementTables(_symbol_tables(counts), zones[part], _middles(zones, part, KINDS)))
    base = make_family(freq, Quantizer(zones[0], np.float32(1) - zones[0], _middles(zones, 0, 2)))
    return NestedFamily(base, refinements, np.array([8, 3, -2], np.int16))


def _cell(zones: Sequence[F32], part: int, table: int, level: int) -> tuple[float, float]:
    """Return the cell of a level above 0, in steps of its part."""
    zone = float(zones[part][table])
    if part == 0 or table < TABLES_PER_OCTAVE:
        return zone + level - 1, zone + level
    coarser = table - TABLES_PER_OCTAVE
    if level == 1:
        return zone, 2 * float(zones[part - 1][coarser])
    low, high = _cell(zones, part - 1, coarser, level >> 1)
    return (low + high, 2 * high) if level & 1 else (2 * low, low + high)


def _middles(zones: Sequence[F32], part: int, kinds: int) -> F32:
    """Return reconstruction points in the middles of cells, `[25, kinds]`."""
    return np.array(
        [
            [level - sum(_cell(zones, part, table, level)) / 2 for level in range(1, kinds + 1)]
            for table in range(TABLES)
        ],
        np.float32,
    )


def _default_counts(table: int, zones: Sequence[F32], part: int) -> npt.NDArray[np.float64]:
    """Return the probabilities of symbols by context, `[4, 16]`, of components of scale code `table`."""
    beyond = logistic_tail(table)
    counts, zero = np.zeros((CONTEXTS, SYMBOLS_OF_PART)), -ESCAPED
    zone = Decimal(float(zones[part][table]))
    if table < TABLES_PER_OCTAVE:
        tails = [beyond(zone + level) for level in range(MOST + 1)]
        for m in range(1, MOST + 1):
            counts[0, zero + m] = counts[0, zero - m] = float(tails[m - 1] - tails[m])
        counts[0, zero], counts[0, 0] = float(1 - 2 * tails[0]), float(2 * tails[MOST])
        return counts
    outer = 2 * Decimal(float(zones[part - 1][table - TABLES_PER_OCTAVE]))  # in steps of this part
    outside = float(beyond(zone) - beyond(outer))
    counts[0, zero - 1 : zero + 2] = outside, float(1 - 2 * beyond(zone)), outside
    for context in range(1, CONTEXTS):
        low = outer + 2 * (context - 1)
        tails = [beyond(low + i) for i in range(3)]
        counts[context, zero], counts[context, zero + 1] = (float(tails[i] - tails[i + 1]) for i in range(2))
    return counts


def fit_nested(
    samples: Iterable[tuple[F32, I16]],
    step_indices: Iterable[int],
    family: Family,
    track: Callable[[Sequence[int]], Iterable[int]] = iter,
) -> NestedFamily:
    """Learn the tables of bases and refinements, and what they lose.

    Args:
        samples: pairs of coefficients `[R, T]` float32 and the scales `[R]` of their components.
        step_indices: indices of the finest steps whose symbols are pooled.
        family: of blobs of one quality, learned from the same samples.
        track: passes the steps through, one by one as they are done, to show progress.
    """
    pool, steps = list(samples), sorted(step_indices)
    prior = default_nested_family()
    zones = [wider_zones(family.quantizer.dead_zone, part) for part in range(MAX_REFINEMENTS + 1)]
    sums = _Sums()
    for step in track(steps):
        for y, scale in pool:
            _add_sample(sums, y, scale, step, zones)
    tables = prior.base.tables.freq[:TABLES, :128].astype(np.float64)
    tables[:, 1:] *= 2
    weight = sums.levels + tables * (_PRIOR / tables.sum(1, keepdims=True))
    weight[:, 1:] /= 2
    freq = np.stack([frequencies(row) for row in weight])
    shrink = sums.shrink(0, _middles(zones, 0, 2))
    base = make_family(freq, Quantizer(zones[0], np.float32(1) - zones[0], shrink))
    refinements = []
    for part in range(1, MAX_REFINEMENTS + 1):
        known = prior.refinements[part - 1].freq.astype(np.float64)
        counts = sums.symbols[part - 1] + known * (_PRIOR / known.sum(2, keepdims=True))
        refinements.append(
            RefinementTables(
                _symbol_tables(counts),
                zones[part],
                sums.shrink(part, _middles(zones, part, KINDS)),
            )
        )
    nested = NestedFamily(base, refinements, np.zeros(MAX_REFINEMENTS + 1, np.int16))
    return NestedFamily(base, refinements, _offsets(pool, steps, family, nested, track))


class _Sums:
    """Sums over samples: what the tables of all parts are learned from."""

    def __init__(self) -> None:
        self.levels = np.zeros((TABLES, 128))
        self.symbols = np.zeros((MAX_REFINEMENTS, TABLES, CONTEXTS, SYMBOLS_OF_PART))
        self._excess = np.zeros((MAX_REFINEMENTS + 1, TABLES, KINDS))  # of levels over their magnitudes
        self._number = np.zeros((MAX_REFINEMENTS + 1, TABLES, KINDS))

    def add(self, part: int, table: I32, level: I32, magnitude: F32) -> None:
        """Add the levels of a part, whose components have these tables, and the magnitudes in its steps."""
        kinds = KINDS if part else 2
        kind = np.minimum(level, kinds) - 1
        there = level > 0
        flat = (np.broadcast_to(table[:, None], level.shape)[there] * KINDS + kind[there]).astype(np.int64)
        size = TABLES * KINDS
        self._number[part] += np.bincount(flat, minlength=size).reshape(TABLES, KINDS)
        excess = (level - magnitude)[there]
        self._excess[part] += np.bincount(flat, excess, size).reshape(TABLES, KINDS)

    def add_symbols(self, part: int, table: I32, coarse: I32, symbol: I32) -> None:
        """Add the symbols of a refinement, given the coarser levels."""
        context = np.minimum(np.abs(coarse), CONTEXTS - 1)
        flat = (table[:, None] * CONTEXTS + context) * SYMBOLS_OF_PART + symbol - ESCAPED
        size = TABLES * CONTEXTS * SYMBOLS_OF_PART
        self.symbols[part - 1] += np.bincount(flat.ravel(), minlength=size).reshape(self.symbols[part - 1].shape)

    def shrink(self, part: int, middles: F32) -> F32:
        """Return the reconstruction points of a part, `[25, kinds]`; a little of the middles fills gaps."""
        kinds = middles.shape[1]
        number = self._number[part, :, :kinds] + _PRIOR
        points = (self._excess[part, :, :kinds] + middles * _PRIOR) / number
        return np.clip(points, -2, 2).astype(np.float32)


def first_level(magnitude: F32, zone: F32) -> I32:
    """Return the magnitudes of levels, one step wide, where no coarser part has any."""
    level = np.floor(magnitude + (np.float32(1) - zone))
    level[magnitude < zone] = 0
    return level.astype(np.int32)


def _levels_of_parts(
    y: F32, scale: I16, step_index: int, zones: Sequence[F32]
) -> list[tuple[npt.NDArray[np.intp], I32, I32, F32]]:
    """Return for each part its components, their tables, the magnitudes of their levels, and those of the
    coefficients in steps of the part. `step_index` is that of the finest part.
    """
    base_index = step_index + OCTAVE * MAX_REFINEMENTS
    magnitude = np.abs(y) * np.float32(1.0 / step_value(base_index))
    codes = scale_codes(scale, base_index)
    level = np.zeros(y.shape, np.int32)
    low, high = np.zeros(y.shape, np.float32), np.zeros(y.shape, np.float32)
    out = []
    for part in range(MAX_REFINEMENTS + 1):
        own = codes + TABLES_PER_OCTAVE * part
        table, unit = _table(own), np.float32(2.0**-part)
        zone = zones[part][np.maximum(table, 0), None]
        new = (own >= 0) if part == 0 else (own >= 0) & (own < TABLES_PER_OCTAVE)
        old = (own >= TABLES_PER_OCTAVE) if part else np.zeros(len(own), bool)
        level[new] = first_level(magnitude[new] / unit, zone[new])
        for array, edge in zip((low, high), base_cell(level[new], zone[new]), strict=True):
            array[new] = edge * unit
        level[old], cell = refine(level[old], magnitude[old], (low[old], high[old]), zone[old] * unit)
        low[old], high[old] = cell
        rows = np.flatnonzero(own >= 0)
        out.append((rows, table[rows], level[rows].copy(), magnitude[rows] / unit))
    return out


def _add_sample(sums: _Sums, y: F32, scale: I16, step_index: int, zones: Sequence[F32]) -> None:
    before: I32 = np.zeros(y.shape, np.int32)
    base_index = step_index + OCTAVE * MAX_REFINEMENTS
    for part, (rows, table, level, magnitude) in enumerate(_levels_of_parts(y, scale, step_index, zones)):
        if part:
            coarse = before[rows]
            symbol = np.where(coarse == 0, np.where(y[rows] < 0, -level, level), level - 2 * coarse)
            symbol[np.abs(symbol) > MOST] = ESCAPED
            sums.add_symbols(part, table, coarse, symbol.astype(np.int32))
        else:
            tabled = scale_codes(scale[rows], base_index) < TABLES
            flat = table[tabled, None] * 128 + np.minimum(level[tabled], 127)
            sums.levels += np.bincount(flat.ravel(), minlength=TABLES * 128).reshape(TABLES, 128)
        sums.add(part, table, level, magnitude)
        before[rows] = level


def _offsets(
    pool: Sequence[tuple[F32, I16]],
    steps: Sequence[int],
    family: Family,
    nested: NestedFamily,
    track: Callable[[Sequence[int]], Iterable[int]],
) -> I16:
    """Return `NestedFamily.offsets`: by how much coarser a blob of one quality may be for the error of each part."""
    zones = [nested.base.quantizer.dead_zone, *(tables.zone for tables in nested.refinements)]
    shrinks = [nested.base.quantizer.shrink, *(tables.shrink for tables in nested.refinements)]
    span = range(steps[0], steps[-1] + OCTAVE * MAX_REFINEMENTS + 1, OCTAVE // 4)
    single = np.array([_single_error(pool, step, family) for step in track(span)])
    found: list[list[float]] = [[] for _ in shrinks]
    for step in steps:
        errors = np.zeros(len(shrinks))
        for y, scale in pool:
            uncoded = np.square(y).sum()
            for part, (rows, table, level, magnitude) in enumerate(_levels_of_parts(y, scale, step, zones)):
                own = shrinks[part][table]
                kind = np.clip(level, 1, own.shape[1]) - 1
                back = np.where(level > 0, level - np.take_along_axis(own, kind, 1), 0)
                unit = step_value(step + OCTAVE * (MAX_REFINEMENTS - part)) ** 2
                errors[part] += uncoded - np.square(y[rows]).sum() + unit * np.square(back - magnitude).sum()
        for part, error in enumerate(errors):
            at = step + OCTAVE * (MAX_REFINEMENTS - part)
            if single[0] < error < single[-1] and (np.diff(single) > 0).all():
                found[part].append(float(np.interp(np.log(error), np.log(single), span)) - at)
    known = default_nested_family().offsets
    means = [np.mean(own) if own else known[part] for part, own in enumerate(found)]
    return np.clip(np.rint(means), -OCTAVE, OCTAVE).astype(np.int16)


def _single_error(pool: Sequence[tuple[F32, I16]], step_index: int, family: Family) -> float:
    """Return the squared error of blobs of one quality."""
    error, quantizer = 0.0, family.quantizer
    for y, scale in pool:
        codes = scale_codes(scale, step_index)
        rows = codes >= 0
        table = _table(codes[rows])
        magnitude = np.abs(y[rows]) * np.float32(1.0 / step_value(step_index))
        level = np.floor(magnitude + quantizer.rounding[table, None])
        level[magnitude < quantizer.dead_zone[table, None]] = 0
        shrink = np.where(level == 1, quantizer.shrink[table, :1], quantizer.shrink[table, 1:])
        back = np.where(level > 0, level - shrink, 0)
        error += float(np.square(y[~rows]).sum()) + step_value(step_index) ** 2 * float(
            np.square(back - magnitude).sum()
        )
    return error
