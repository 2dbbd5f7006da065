"""Bit-exact coding of a layer: byte planes, each entropy-coded where that pays and stored where it does not.

Every 16- or 32-bit value is rotated left by one bit, so that its most significant byte is the exponent (bfloat16,
float32) or exponent and leading mantissa bits (float16); the sign goes to the other end. Exponents of one channel
lie close together, mantissas are noise: about 8 + 2.7 bits for a bfloat16.

A section is one layer:

    per unit (K as stored, then V), per byte of a value from the least significant:
        uint8            mode: 0 stored, 1 coded
        if coded:        uint8 [C] reference byte of each channel
                         uint16 m, then m pairs (uint8 symbol, uint16 frequency): the plane's table
    padding to four bytes
    all stored planes, in order: uint8 [C, T]
    padding to four bytes
    the coded planes, one step per channel: symbol = (byte - reference) mod 256; all tokens have one class
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cuvee.codec.entropy.tables import PROB_BITS, normalize_counts
from cuvee.codec.support.arrays import U8

PAIRS = np.dtype([("symbol", "u1"), ("frequency", "<u2")])
COUNT = struct.Struct("<H")


@dataclass(frozen=True, slots=True)
class BytePlane:
    """One byte of all values of a unit.

    Attributes:
        data: `[C, T]`.
        reference: `[C]`, the central byte of each channel.
        counts: `[256]`, how often each difference between a byte and its channel's reference occurs.
    """

    data: U8
    reference: U8
    counts: npt.NDArray[np.int64]


def choose_tables(
    counts: npt.NDArray[np.integer], channels: npt.NDArray[np.integer]
) -> list[npt.NDArray[np.uint16] | None]:
    """Return the tables that code planes.

    Args:
        counts: `[P, 256]`, how often each symbol occurs in each plane.
        channels: `[P]`, channels of each plane.

    Returns:
        For each plane its table, or None if coding saves less than a hundredth, table and references included: the
        plane is stored.
    """
    total = counts.sum(1)
    most = 0.99 * total
    safe = np.where(counts > 0, counts, 1)
    # No table takes fewer bits than the entropy: mantissas need no table.
    entropy = (counts * np.log2(total[:, None] / safe)).sum(1) / 8
    wanted = np.flatnonzero(entropy + channels < most)
    freq = normalize_counts(counts[wanted])
    size = (counts[wanted] * (PROB_BITS - np.log2(np.where(freq > 0, freq, 1)))).sum(1) / 8
    saves = size + channels[wanted] + 3 * (freq > 0).sum(1) < most[wanted]
    tables: list[npt.NDArray[np.uint16] | None] = [None] * len(counts)
    for plane, table, better in zip(wanted.tolist(), freq, saves.tolist(), strict=True):
        tables[plane] = table if better else None
    return tables


def write_model(reference: U8, freq: npt.NDArray[np.uint16]) -> bytes:
    """Write references and table of a coded plane."""
    used = np.flatnonzero(freq)
    pairs = np.empty(len(used), PAIRS)
    pairs["symbol"], pairs["frequency"] = used, freq[used]
    return reference.tobytes() + COUNT.pack(len(used)) + pairs.tobytes()
