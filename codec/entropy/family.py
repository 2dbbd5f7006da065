"""The shared family of entropy tables, indexed by scale, and its quantizer.

The ratio of a component's deviation to the step selects its table, in quarter octaves from 2**-2 to 2**4. Below that
range a component is not coded at all. Above it, low bits are split off (`codec/stages/compiled/symbols.py`) until the
rest fits. Scales and steps are integers in units of 1/64 octave, so the choice is exact on every machine.

`fit_family` learns a family with a profile; `default_family` needs no data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal, localcontext
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from cuvee.codec.entropy.coding_plan import ESCAPE, MAX_SHIFT, CodingPlan, Quantizer
from cuvee.codec.entropy.tables import PROB_BITS, SYMBOLS, TOTAL, EntropyTables, normalize_counts, raw_bit_tables
from cuvee.codec.errors import FormatError, ProfileError
from cuvee.codec.support.arrays import F32, I16, U8, U16
from cuvee.codec.support.steps import OCTAVE, step_value

TABLES_PER_OCTAVE = 4
LOWEST = -2 * OCTAVE  # scale of table 0, relative to the step
TABLES = 25  # up to 2**4 steps of deviation
_TABLE = OCTAVE // TABLES_PER_OCTAVE
DIGITS = 30  # of decimal numbers

# Trade-off of rate-distortion optimized quantization, in squared steps per bit. The tangent of the rate-distortion
# curve at high rate is 2 ln 2 / 12 = 0.116. On books-3m 0.06, 0.10 and 0.14 measured alike, 0.10 best at KL 0.0065.
RD_LAMBDA = 0.10
# The weight, in frequencies, from which a fitted table has an entry for a level. An entry takes a frequency of 1, which
# costs every symbol of the table 0.0004 bits; an escape takes 76 bits where an entry takes 12. Compared with 0.5, blobs
# of SmolLM2-135M at 0.5 to 2.5 bits a value are 1 to 2% smaller on a novel, and 1 to 5% on code, chats and JSON.
LEAST_WEIGHT = 0.03
ROUNDS = 4  # of quantizing and refitting, as tables and thresholds depend on each other


@dataclass(frozen=True, slots=True)
class Family:
    """The tables of the scales 0 … TABLES - 1, then the eight raw-bit tables; and the quantizer of each table."""

    tables: EntropyTables
    quantizer: Quantizer


def scale_index(deviation: npt.NDArray[np.floating]) -> I16:
    """Convert deviations in units of step 1 to scales in 1/64 octave, int16. Zero becomes the smallest scale."""
    with np.errstate(divide="ignore"):
        octaves = np.log2(np.asarray(deviation, dtype=np.float64))
    index: I16 = np.clip(np.rint(octaves * OCTAVE), -(1 << 14), (1 << 14) - 1).astype(np.int16)
    return index


def deviation_of(scale: npt.NDArray[np.integer]) -> npt.NDArray[np.float64]:
    """Invert `scale_index`, up to rounding: scales of any shape to deviations."""
    deviation: npt.NDArray[np.float64] = 2.0 ** (scale.astype(np.float64) / OCTAVE)
    return deviation


def scale_codes(scale: I16, step_index: int) -> npt.NDArray[np.int32]:
    """Return each component's scale code (quarter octaves) at a step: its table; wide past the last; none below 0."""
    codes: npt.NDArray[np.int32] = (scale.astype(np.int32) - step_index - LOWEST + _TABLE // 2) // _TABLE
    return codes


def finest_step_index(scale: I16) -> int:
    """Return the smallest step index at which components of these scales can be coded."""
    widest = TABLES - 1 + TABLES_PER_OCTAVE * MAX_SHIFT
    # scale_codes(scale, step_index) <= widest
    return int(scale.max(initial=-(1 << 14))) - LOWEST + _TABLE // 2 - _TABLE * (widest + 1) + 1


def split_wide(codes: npt.NDArray[np.int32]) -> tuple[U16, U8]:
    """Return the table and the shift of each scale code; codes must be >= 0.

    Raises:
        ProfileError: a component is too many steps wide.
    """
    over = np.maximum(codes - (TABLES - 1), 0)
    shift = -(-over // TABLES_PER_OCTAVE)
    if shift.size and shift.max() > MAX_SHIFT:
        raise too_fine_error()
    return (codes - shift * TABLES_PER_OCTAVE).astype(np.uint16), shift.astype(np.uint8)


def too_fine_error() -> ProfileError:
    """Return the error about a step at which a profile's components would be too many steps wide."""
    return ProfileError(
        "step: must not be finer than the profile can code, got a step that is too small: use a larger step or "
        "quality='lossless'"
    )


def coding_plan(codes: npt.NDArray[np.int32]) -> CodingPlan:
    """Make the plan of components with these scale codes (all >= 0)."""
    table, shift = split_wide(codes)
    low = (TABLES - 1 + shift[shift > 0]).astype(np.uint16)
    return CodingPlan(table, shift, np.append(table, low))


def _with_raw_bits(freq: npt.NDArray[np.generic]) -> EntropyTables:
    return EntropyTables(freq).extended(raw_bit_tables())


def make_family(freq: npt.NDArray[np.generic], quantizer: Quantizer) -> Family:
    """Make a family from `[TABLES, 256]` frequencies.

    Raises:
        FormatError: the frequencies are not tables, or a table cannot code an escape, or leaves out some of the values
            between those that it codes.
    """
    if freq.ndim != 2 or freq.shape[0] != TABLES or len(quantizer.dead_zone) != TABLES:
        raise FormatError(
            f"family: must have {TABLES} tables, and its quantizer as many rows, got {list(freq.shape)} and "
            f"{len(quantizer.dead_zone)}"
        )
    tables = _with_raw_bits(freq)
    if not tables.freq[:TABLES, ESCAPE].all():
        raise FormatError("family: must have a frequency for escapes in every table, got zero")
    if np.any(tables.reach[:TABLES, 0] > tables.reach[:TABLES, 1]):
        raise FormatError("family: must have tables that code a run of values, got one with gaps")
    return Family(tables, quantizer)


@lru_cache(maxsize=1)
def default_family() -> Family:
    """Return a family that needs no data: logistic distributions, between Gaussian and Laplacian ones.

    `decimal` computes it with a correctly rounded exponential, so that every machine gets the same tables.
    """
    dead_zone = Decimal("0.6")
    freq = np.zeros((TABLES, SYMBOLS), np.uint16)
    with localcontext() as context:
        context.prec = DIGITS
        for table in range(TABLES):
            freq[table] = _logistic_frequencies(table, dead_zone)
    half = np.full(TABLES, 0.5, np.float32)
    quantizer = Quantizer(half + np.float32(0.1), half - np.float32(0.1), np.full((TABLES, 2), 0.05, np.float32))
    return make_family(freq, quantizer)


def _logistic_frequencies(table: int, dead_zone: Decimal) -> U16:
    """Return the frequencies of a table of logistic components, in a `decimal` context of enough digits."""
    root3_over_pi = Decimal(3).sqrt() / Decimal("3.14159265358979323846264338328")
    spread = Decimal(2) ** (Decimal(LOWEST + table * _TABLE) / OCTAVE) * root3_over_pi
    edges = [1 / (1 + ((level + dead_zone) / spread).exp()) for level in range(128)]
    weight = [1 - 2 * edges[0]] + [edges[level - 1] - edges[level] for level in range(1, 128)]
    # Not LEAST_WEIGHT: these tables must stay as they are, or unlearned profiles would be others.
    return _frequencies(np.array([float(w) for w in weight]), 0.5)


def _frequencies(weight: npt.NDArray[np.float64], least: float) -> U16:
    """Turn weights of the levels 0 … 127 (of each sign) into a table, symmetric up to rounding; levels beyond the last
    with a weight of `least` frequencies are escaped.
    """
    weight = weight / (weight[0] + 2 * weight[1:].sum())
    reach = int(np.flatnonzero(weight >= least / TOTAL)[-1]) if weight[0] < 1 else 0
    reach = max(reach, 1)
    counts = np.zeros(SYMBOLS)
    counts[: reach + 1] = np.maximum(weight[: reach + 1], 1e-9)
    counts[SYMBOLS - reach :] = counts[reach:0:-1]
    counts[ESCAPE] = 1e-9
    return normalize_counts(counts)


def _thresholds(tables: EntropyTables, shrink: F32) -> tuple[F32, F32]:
    """Return where rate-distortion optimized quantization switches between levels: dead zone, rounding per table.

    For neighboring levels with reconstructions r < r' and code lengths c, c' the tie is at
    (r + r') / 2 + lambda (c' - c) / (2 (r' - r)).
    """
    bits = tables.bits[:TABLES, :128].astype(np.float64)
    bits = np.minimum(bits, PROB_BITS + 4.0)
    one, two = 1 - shrink[:, 0].astype(np.float64), 2 - shrink[:, 1].astype(np.float64)
    dead = one / 2 + RD_LAMBDA * (bits[:, 1] - bits[:, 0]) / (2 * one)
    gap = two - one
    second = (one + two) / 2 + RD_LAMBDA * (bits[:, 2] - bits[:, 1]) / (2 * gap)
    rounding = np.clip(2 - second, 0.25, 0.5)
    return np.clip(dead, 1 - rounding, 0.95).astype(np.float32), rounding.astype(np.float32)


def fit_family(
    samples: Iterable[tuple[F32, I16]],
    step_indices: Iterable[int],
    track: Callable[[Sequence[int]], Iterable[int]] = iter,
) -> Family:
    """Learn the tables and the quantizer from coefficients `[R, T]` float32 and the scales `[R]` of their components.

    The symbols of all steps are pooled: a table serves every component and step with its ratio. Tables and thresholds
    depend on each other, so both are fitted in several rounds, which `track` passes through to show progress.
    """
    pool = [(y, scale) for y, scale in samples]
    family = default_family()
    prior = family.tables.freq[:TABLES, :128].astype(np.float64)
    prior[:, 1:] *= 2
    for _ in track(range(ROUNDS)):
        counts = np.zeros((TABLES, 128))
        shortfall = np.zeros((TABLES, 2))  # excess of level 1, and of all higher levels, over their magnitudes
        number = np.zeros((TABLES, 2))
        for step_index in step_indices:
            for y, scale in pool:
                codes = scale_codes(scale, step_index)
                rows = np.flatnonzero((codes >= 0) & (codes < TABLES))
                table, magnitude = codes[rows], np.abs(y[rows]) / np.float32(step_value(step_index))
                level = np.floor(magnitude + family.quantizer.rounding[table, None])
                level[magnitude < family.quantizer.dead_zone[table, None]] = 0
                flat = table[:, None] * 128 + np.minimum(level, 127).astype(np.int64)
                counts += np.bincount(flat.ravel(), minlength=TABLES * 128).reshape(TABLES, 128)
                for kind, chosen in ((0, level == 1), (1, level >= 2)):
                    number[:, kind] += np.bincount(table, chosen.sum(1), TABLES)
                    excess = np.where(chosen, level - magnitude, 0).sum(1)
                    shortfall[:, kind] += np.bincount(table, excess, TABLES)
        # A little of the parametric family fills gaps in tables with few samples.
        weight = counts + prior * (64.0 / prior.sum(1, keepdims=True))
        weight[:, 1:] /= 2
        freq = np.stack([_frequencies(row, LEAST_WEIGHT) for row in weight])
        shrink = np.clip(shortfall / np.maximum(number, 1), -0.25, 0.25) * (number / (number + 64))
        tables = _with_raw_bits(freq)
        dead_zone, rounding = _thresholds(tables, shrink.astype(np.float32))
        family = Family(tables, Quantizer(dead_zone, rounding, shrink.astype(np.float32)))
    return family
