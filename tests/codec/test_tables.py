"""Frequency tables: exact sums, codable symbols, decode slots, determinism."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import numpy.typing as npt
import pytest

from cuvee.codec.entropy.tables import SYMBOLS, TOTAL, EntropyTables, normalize_counts
from cuvee.codec.errors import FormatError
from cuvee.codec.stages.byte_planes import choose_tables


def counts_of(**used: float) -> npt.NDArray[np.float64]:
    counts = np.zeros(SYMBOLS)
    for name, value in used.items():
        counts[int(name[1:])] = value
    return counts


DEGENERATE = {
    "none": np.zeros(SYMBOLS),
    "only the first": counts_of(s0=5),
    "only the last": counts_of(s255=1),
    "two, one of them rare": counts_of(s3=10**9, s200=1),
    "all alike": np.ones(SYMBOLS),
    "all, one of them common": np.ones(SYMBOLS) + counts_of(s7=10**12),
    "all, steep": np.arange(1, SYMBOLS + 1, dtype=np.int64) ** 6,
    "huge": np.full(SYMBOLS, 2**62, np.int64),
    "tiny": np.full(SYMBOLS, 1e-9),
    "uint8": np.full(SYMBOLS, 255, np.uint8),
}


def random_counts(seed: int) -> npt.NDArray[np.int64]:
    # Integers only, so that the digests below do not depend on a mathematics library.
    counts: npt.NDArray[np.int64] = np.random.default_rng(seed).integers(0, 1 << 10, SYMBOLS) ** 6 >> 44
    return counts


@pytest.mark.parametrize("name", DEGENERATE)
def test_degenerate_counts_become_a_valid_table(name: str) -> None:
    counts = DEGENERATE[name]
    freq = normalize_counts(counts)
    assert freq.dtype == np.uint16 and freq.shape == (SYMBOLS,)
    assert int(freq.sum(dtype=np.int64)) == TOTAL
    assert (freq[counts > 0] >= 1).all()
    assert (freq > 0).sum() == max(2, (counts > 0).sum())
    EntropyTables(freq[None])


def test_normalization_is_the_same_everywhere() -> None:
    digest = hashlib.blake2b(digest_size=16)
    for counts in [*DEGENERATE.values(), *map(random_counts, range(8))]:
        digest.update(normalize_counts(counts).astype("<u2").tobytes())
    assert digest.hexdigest() == "379d4af49430cfd09637d2feac6e45a1"


def row(**used: int) -> npt.NDArray[np.int64]:
    return counts_of(**{k: float(v) for k, v in used.items()}).astype(np.int64)[None]


def test_bits_and_entropy() -> None:
    freq = np.zeros((2, SYMBOLS), np.uint16)
    freq[0, [1, 2, 3]] = 2048, 1024, 1024
    freq[1] = 16
    tables = EntropyTables(freq)
    assert tables.bits[0, 1] == 1 and tables.bits[0, 2] == 2 and math.isinf(tables.bits[0, 0])
    assert (tables.bits[1] == 8).all()
    np.testing.assert_allclose(tables.entropy, [1.5, 8.0])


@pytest.mark.parametrize(
    ("freq", "match"),
    [
        (row(s0=4000, s1=95), "table 0"),
        (row(s0=4000, s1=97), "table 0"),
        (row(s0=4096), "two or more symbols"),
        (row(s0=-1, s1=4097), "table 0"),
        (row(s0=65536 + 2048, s1=2048), "table 0"),
        (np.concatenate([row(s0=2048, s1=2048), row(s0=2048)]), "table 1"),
        (np.zeros((1, SYMBOLS), np.int64), "table 0"),
        (np.full((1, 255), 16), "shape"),
        (np.full(SYMBOLS, 16), "shape"),
        (np.ones((1, SYMBOLS), np.int64), "must add up to 4096"),
        (np.full((1, SYMBOLS), 32, np.int64), "must add up to 4096"),
    ],
)
def test_bad_tables_are_refused(freq: npt.NDArray[np.int64], match: str) -> None:
    with pytest.raises(FormatError, match=match):
        EntropyTables(freq)


def one_at_a_time(counts: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """What `normalize_counts` promises, with every cost computed anew for every count that is moved."""
    used = counts > 0
    exact = counts * (TOTAL / counts.sum())
    freq = np.where(used, np.maximum(np.floor(exact + 0.5), 1), 0).astype(np.int64)
    while freq.sum() > TOTAL:
        freq[np.argmin(np.where(freq > 1, exact / (freq - 0.5), np.inf))] -= 1
    while freq.sum() < TOTAL:
        freq[np.argmax(np.where(used & (freq < TOTAL - 1), exact / (freq + 0.5), -1.0))] += 1
    return freq


@pytest.mark.parametrize("kind", ["flat", "sparse", "peaked", "tiny"])
def test_every_count_is_moved_where_it_changes_the_length_least(kind: str) -> None:
    rng = np.random.default_rng(0)
    moved = 0
    for _ in range(150):
        counts = {
            "flat": rng.integers(1, 50, SYMBOLS),
            "sparse": np.append([5, 7], (rng.random(SYMBOLS - 2) < 0.1) * rng.integers(0, 10**9, SYMBOLS - 2)),
            "peaked": np.bincount(rng.normal(128, rng.uniform(0.5, 30), 9000).astype(int) % 256, minlength=SYMBOLS),
            "tiny": rng.random(SYMBOLS) * 1e-3,
        }[kind].astype(np.float64)
        np.testing.assert_array_equal(normalize_counts(counts), one_at_a_time(counts))
        rounded = np.floor(counts * (TOTAL / counts.sum()) + 0.5)
        moved += int(np.where(counts > 0, np.maximum(rounded, 1), 0).sum()) != TOTAL
    assert moved > 50


def test_many_counts_are_normalized_as_each_alone() -> None:
    rng = np.random.default_rng(1)
    counts = [rng.integers(0, 50, SYMBOLS), counts_of(s255=9), np.zeros(SYMBOLS, int), counts_of(s0=1, s9=2**40)]
    counts += [(rng.random(SYMBOLS) < 0.1) * rng.integers(0, 10**9, SYMBOLS) for _ in range(20)]
    together = normalize_counts(np.stack(counts))
    assert together.dtype == np.uint16
    np.testing.assert_array_equal(together, np.stack([normalize_counts(own) for own in counts]))
    assert normalize_counts(np.zeros((0, SYMBOLS))).shape == (0, SYMBOLS)


def test_a_plane_gets_a_table_if_that_saves_a_hundredth() -> None:
    rng = np.random.default_rng(2)
    planes = [rng.integers(0, 256, (4, 500)), rng.integers(0, 2, (4, 500)), rng.integers(100, 109, (40, 64))]
    planes += [np.zeros((3, 70), int), rng.integers(0, 250, (4, 5000)), rng.integers(0, 240, (1, 9))]
    counts = np.stack([np.bincount(plane.ravel(), minlength=SYMBOLS) for plane in planes])
    channels = np.array([len(plane) for plane in planes])
    tables = choose_tables(counts, channels)
    assert [table is not None for table in tables] == [False, True, True, True, False, False]
    for own, count, table in zip(planes, channels, tables, strict=True):
        size = own.size
        if table is not None:
            np.testing.assert_array_equal(table, normalize_counts(np.bincount(own.ravel(), minlength=SYMBOLS)))
            bits = (12 - np.log2(table[own.ravel()])).sum()
            assert bits / 8 + count + 3 * (table > 0).sum() < 0.99 * size
    assert choose_tables(counts[:0], channels[:0]) == []
