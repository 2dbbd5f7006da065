"""Static probability tables over bytes: the model of the entropy coder.

A table gives every byte value a frequency, and the frequencies of a table add up to 4096. A table cannot code a
byte of frequency zero, so the caller escapes it. Tables come from a profile (a family indexed by scale) or from the
blob (lossless).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cuvee.codec.errors import FormatError
from cuvee.codec.support.arrays import U16, U32
from cuvee.codec.support.lazy import lazy

PROB_BITS = 12  # a decode slot packs symbol (8) | frequency (12) | slot - cumulative (12) into 32 bits
TOTAL = 1 << PROB_BITS
SYMBOLS = 256


class EntropyTables:
    """A family of frequency tables.

    Args:
        freq: `[tables, 256]` uint16. Every row adds up to 4096, and no entry equals that sum: a frequency must fit
            the 12-bit field of a decode slot, and a certain symbol needs no coder.

    Raises:
        FormatError: a row breaks one of those rules.
    """

    def __init__(self, freq: npt.NDArray[np.generic]) -> None:
        if freq.ndim != 2 or freq.shape[1] != SYMBOLS:
            raise FormatError(f"freq: must have shape [tables, {SYMBOLS}], got {list(freq.shape)}")
        wide = freq.astype(np.int64)
        bad = np.flatnonzero((wide.sum(1) != TOTAL) | (wide.min(1) < 0) | (wide.max(1) >= TOTAL))
        if bad.size:
            raise FormatError(
                f"frequency table {bad[0]}: must add up to {TOTAL} with two or more symbols, got other counts"
            )
        before = np.cumsum(wide, axis=1) - wide  # the sum of the frequencies of all smaller bytes
        self.freq: U16 = np.ascontiguousarray(wide, np.uint16)
        self.cumulative: U16 = np.ascontiguousarray(before, np.uint16)

    def __len__(self) -> int:
        return len(self.freq)

    @lazy
    def coders(self) -> U32:
        """`[tables, 256]` uint32, each byte's numbers for an encoder: `cumulative << 16 | frequency`."""
        return self.cumulative.astype(np.uint32) << np.uint32(16) | self.freq

    @lazy
    def slots(self) -> U32:
        """`[tables, 4096]` uint32 decode table: `symbol << 24 | frequency << 12 | slot - cumulative`."""
        out = np.empty((len(self), TOTAL), dtype=np.uint32)
        slot = np.arange(TOTAL, dtype=np.uint32)
        for row, freq, cumulative in zip(out, self.freq, self.cumulative, strict=True):
            symbol = np.repeat(np.arange(SYMBOLS, dtype=np.uint32), freq)
            offset = slot - cumulative.astype(np.uint32)[symbol]
            row[:] = symbol << 24 | freq.astype(np.uint32)[symbol] << 12 | offset
        return out

    @lazy
    def reach(self) -> npt.NDArray[np.int32]:
        """`[tables, 2]` int32: the least and the greatest int8 value that each table codes, except -128.

        The greatest is below the least if the table does not code all values between them.
        """
        signed = np.roll(self.freq, 128, axis=1)[:, 1:] > 0  # -127 … 127
        least, greatest = signed.argmax(1) - 127, 127 - signed[:, ::-1].argmax(1)
        whole = signed.sum(1) == greatest - least + 1
        return np.stack([np.where(whole, least, 0), np.where(whole, greatest, -1)], 1).astype(np.int32)

    @lazy
    def bits(self) -> npt.NDArray[np.float32]:
        """`[tables, 256]` float32: ideal code lengths in bits, infinite for bytes that cannot be coded."""
        with np.errstate(divide="ignore"):
            return (PROB_BITS - np.log2(self.freq.astype(np.float64))).astype(np.float32)

    @lazy
    def entropy(self) -> npt.NDArray[np.float64]:
        """`[tables]`: expected bits per symbol if the data follow the table."""
        p = self.freq / float(TOTAL)
        expected: npt.NDArray[np.float64] = (p * np.where(p > 0, self.bits, 0.0)).sum(1)
        return expected

    def extended(self, other: EntropyTables) -> EntropyTables:
        """Return these tables followed by those of `other`."""
        return EntropyTables(np.concatenate([self.freq, other.freq]))


def raw_bit_tables() -> EntropyTables:
    """Return eight tables for k = 1 … 8 raw bits: the bytes below `2**k`, equally likely."""
    freq = np.zeros((8, SYMBOLS), dtype=np.uint16)
    for k in range(1, 9):
        freq[k - 1, : 1 << k] = TOTAL >> k
    return EntropyTables(freq)


def normalize_counts(counts: npt.NDArray[np.generic]) -> U16:
    """Turn counts into frequencies that add up to 4096.

    Args:
        counts: `[256]` or `[P, 256]`, non-negative numbers. Every byte with a count above zero stays codable.

    Returns:
        uint16 of the same shape. If one byte has all the counts, a neighbor gets frequency 1 (see `EntropyTables`).
        The result depends only on the counts, on every machine.
    """
    weight = counts.astype(np.float64).reshape(-1, SYMBOLS)
    used = weight > 0
    nothing = ~used.any(1)
    used[nothing, 0], weight[nothing, 0] = True, 1.0
    alone = np.flatnonzero(used.sum(1) == 1)
    used[alone, (used[alone].argmax(1) + 1) % SYMBOLS] = True
    exact = weight * (TOTAL / weight.sum(1, keepdims=True))
    freq = np.where(used, np.maximum(np.floor(exact + 0.5), 1), 0).astype(np.int64)
    excess = freq.sum(1) - TOTAL
    # Add or remove one count at a time, where it changes the code length least. This uses basic arithmetic and no
    # logarithm, because the result must not depend on a math library.
    rows = np.flatnonzero(excess > 0)
    cost = np.where(freq[rows] > 1, exact[rows] / (freq[rows] - 0.5), np.inf)
    while len(rows):
        at = cost.argmin(1)
        freq[rows, at] -= 1
        left = freq[rows, at]
        cost[np.arange(len(rows)), at] = np.where(left > 1, exact[rows, at] / (left - 0.5), np.inf)
        excess[rows] -= 1
        going = excess[rows] > 0
        rows, cost = rows[going], cost[going]
    rows = np.flatnonzero(excess < 0)
    gain = np.where(used[rows] & (freq[rows] < TOTAL - 1), exact[rows] / (freq[rows] + 0.5), -1.0)
    while len(rows):
        at = gain.argmax(1)
        freq[rows, at] += 1
        now = freq[rows, at]
        gain[np.arange(len(rows)), at] = np.where(now < TOTAL - 1, exact[rows, at] / (now + 0.5), -1.0)
        excess[rows] += 1
        going = excess[rows] < 0
        rows, gain = rows[going], gain[going]
    return freq.astype(np.uint16).reshape(counts.shape)
