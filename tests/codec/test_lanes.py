"""Sixteen lanes at a time: any number of streams, and nothing read or written beyond what there is."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from tests.codec.inner_loops import decode_lanes, list_groups

from cuvee.codec.entropy.family import default_family
from cuvee.codec.entropy.token_classes import SectionPlanes, one_class
from cuvee.codec.format.streams import Streams
from cuvee.codec.stages.compiled import lanes
from cuvee.codec.stages.reference.rans import rans_encode
from cuvee.codec.support.arrays import U8, U32

TABLES = default_family().tables


def encoded(symbols: U8, table: int) -> Streams:
    """Streams of one column each."""
    plan = one_class(np.full(len(symbols), table, np.uint16))
    return rans_encode([SectionPlanes(symbols, np.zeros(symbols.shape[1], np.uint8), plan, 1)], TABLES)[0]


def decoded(
    streams: int, steps: int, data: U8, at: int, words: int, states: U32, lengths: U32, table: int
) -> tuple[int, U8]:
    """Decode streams of one column each."""
    groups = np.zeros((streams, lanes.GROUP_FIELDS), np.int64)
    listed = int(list_groups(0, 0, streams, 1, groups, 0))
    fields = np.zeros((1, lanes.SECTION_FIELDS), np.int64)
    fields[0, lanes.WORDS], fields[0, lanes.COUNT], fields[0, lanes.COLUMNS] = at, words, streams
    fields[0, lanes.STRIDE] = steps
    ends = np.cumsum(lengths, dtype=np.uint32)
    out = np.full(steps * streams + 8, 0xAB, np.uint8)
    bad = decode_lanes(
        groups[:listed], fields, states, ends - lengths, ends, data, np.zeros(streams, np.uint8),
        np.array([steps], np.int32), np.full(steps, table << TABLES.prob_bits, np.uint32), TABLES.slots.reshape(-1),
        TABLES.prob_bits, out,
    )  # fmt: skip
    assert (out[steps * streams :] == 0xAB).all(), "nothing beyond the planes"
    return int(bad), out[: steps * streams].reshape(steps, streams)


@pytest.mark.parametrize("streams", [1, 15, 16, 17, 31, 33, 128, 129, 300])
@pytest.mark.parametrize("steps", [1, 7, 60])
def test_any_number_of_streams_comes_back(streams: int, steps: int) -> None:
    """More groups than fly together, and groups that are not full."""
    rng = np.random.default_rng(streams)
    for table in (0, 10, 23):
        known = np.flatnonzero(TABLES.freq[table]).astype(np.uint8)
        symbols = rng.choice(known, (steps, streams))
        coded = encoded(symbols, table)
        # An odd address behind four bytes that may be read.
        data = np.frombuffer(b"\xff" * 5 + coded.words.astype("<u2").tobytes(), np.uint8)
        bad, got = decoded(streams, steps, data, 5, len(coded.words), coded.states, coded.lengths, table)
        assert bad == -1
        np.testing.assert_array_equal(got, symbols)
        if len(coded.words) > 2:
            stream = int(np.flatnonzero(coded.lengths)[-1])
            states = coded.states.copy()
            states[stream] ^= 1 << 17
            bad, _ = decoded(streams, steps, data, 5, len(coded.words), states, coded.lengths, table)
            assert bad == stream


GUARDED = """
import ctypes, mmap
import numpy as np
from tests.codec.test_lanes import TABLES, decoded, encoded
page = mmap.PAGESIZE
memory = mmap.mmap(-1, 2 * page)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.mprotect(ctypes.c_void_p(address + page), ctypes.c_size_t(page), 0) == 0
whole = np.frombuffer(memory, np.uint8, page)
rng = np.random.default_rng(0)
table, steps = 20, 40
known = np.flatnonzero(TABLES.freq[table]).astype(np.uint8)
for streams in (1, 16, 33):
    symbols = rng.choice(known, (steps, streams))
    coded = encoded(symbols, table)
    raw = coded.words.astype("<u2").tobytes()
    whole[page - len(raw):] = np.frombuffer(raw, np.uint8)
    at = page - len(raw)
    bad, got = decoded(streams, steps, whole, at, len(coded.words), coded.states, coded.lengths, table)
    assert bad == -1 and np.array_equal(got, symbols)
    # Streams that ask for far more words than there are, and begin beyond the last.
    for trial in range(50):
        states = rng.integers(1 << 16, 1 << 32, streams, dtype=np.uint32)
        lengths = coded.lengths.copy()
        if trial % 2:
            lengths[0] = 0xF0000000
        bad, _ = decoded(streams, 40 * steps, whole, at, len(coded.words), states, lengths, table)
        assert bad >= 0
print("within")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is protected as on Linux")
def test_no_step_reads_beyond_the_last_word() -> None:
    """The page after them may not be read: whoever does dies."""
    done = subprocess.run([sys.executable, "-c", GUARDED], capture_output=True, text=True, check=False,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})  # fmt: skip
    assert done.returncode == 0 and done.stdout == "within\n", (done.returncode, done.stderr[-2000:])
