"""The entropy coder's kernels against their references, the codec's coder and the container, on good and bad bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tests.kernels.naive import rans as naive

from cuvee.codec.entropy.tables import SYMBOLS, EntropyTables, normalize_counts, raw_bit_tables
from cuvee.codec.entropy.token_classes import SectionPlanes, one_class
from cuvee.codec.format.coded_part import CodedPart, Reader, read_coded, write_coded
from cuvee.codec.format.streams import ONE_CLASS, Escapes, Streams, stream_count
from cuvee.codec.stages.reference import rans
from cuvee.codec.support.arrays import U8, U16
from cuvee.kernels.jobs import JobField, PartField, PlanField, Status
from cuvee.kernels.ops import coded_part
from cuvee.kernels.ops.arguments import DecodingTables, EncodedStreams, StreamJobs
from cuvee.kernels.ops.rans import ENTRIES, SPAN, coding_table, decoding_table, rans_decode, rans_encode

POISON = 0xAB
NO_ESCAPES = Escapes(np.zeros(0, np.uint32), np.zeros(0, np.int32))
GAP = 8  # poisoned elements between what jobs own
BOTH = pytest.mark.parametrize("reference", [False, True], ids=["kernel", "reference"])


@cache
def tables_of(prob_bits: int) -> EntropyTables:
    """A flat, a steep, a nearly certain, and a two-symbol table, then raw bits."""
    level = np.abs(np.arange(SYMBOLS, dtype=np.int8).astype(np.float64))
    certain = np.zeros(SYMBOLS)
    certain[[9, 250]] = 10**6, 1
    two = np.zeros(SYMBOLS)
    two[[0, 255]] = 1
    rows = [np.ones(SYMBOLS), np.exp2(-level / 2), certain, two]
    own = EntropyTables(np.stack([normalize_counts(r, prob_bits) for r in rows]), prob_bits)
    return own.extended(raw_bit_tables(prob_bits))


@dataclass(frozen=True)
class Part:
    """A coded part: symbols that follow their tables, escapes, how they are coded, and the bytes of the reference."""

    symbols: U8
    which: U16
    tables: EntropyTables
    per_stream: int
    escapes: Escapes
    plan: int

    @property
    def steps(self) -> int:
        return len(self.which)

    @property
    def tokens(self) -> int:
        tokens: int = self.symbols.shape[1]
        return tokens

    @property
    def count(self) -> int:
        return stream_count(self.tokens, self.per_stream)

    @property
    def long(self) -> bool:
        return self.steps * self.per_stream > 65535

    @property
    def streams(self) -> Streams:
        columns = np.zeros(self.tokens, np.uint8)
        return rans.rans_encode(
            [SectionPlanes(self.symbols, columns, one_class(self.which), self.per_stream)], self.tables
        )[0]

    @property
    def coded(self) -> bytes:
        return self.written(self.streams)

    def written(self, streams: Streams) -> bytes:
        """The bytes with other streams."""
        return write_coded(CodedPart(streams, self.escapes, self.per_stream, ONE_CLASS), self.steps)


def make_parts(shapes: Sequence[tuple[int, int, int]], prob_bits: int, seed: int = 0) -> list[Part]:
    """Parts of (steps, tokens, tokens per stream); those of as many steps share a plan."""
    rng = np.random.default_rng(seed)
    tables = tables_of(prob_bits)
    plans = sorted({steps for steps, _, _ in shapes})
    used = {p: rng.integers(0, len(tables), p).astype(np.uint16) for p in plans}
    parts = []
    for number, (steps, tokens, per_stream) in enumerate(shapes):
        slot = rng.integers(0, 1 << prob_bits, (steps, tokens))
        symbols = (tables.slots[used[steps][:, None], slot] >> 24).astype(np.uint8)
        some = np.flatnonzero(rng.random(steps * tokens) < 0.1 * (number % 3)).astype(np.uint32)
        escapes = Escapes(some, rng.integers(-(1 << 31), 1 << 31, len(some)).astype(np.int32))
        parts.append(Part(symbols, used[steps], tables, per_stream, escapes, plans.index(steps)))
    return parts


@dataclass
class Launch:
    """The arrays of one launch, what jobs own apart from each other and poisoned."""

    parts: list[Part]
    device: torch.device
    jobs: npt.NDArray[np.int64]
    plans: npt.NDArray[np.int64]
    tables: npt.NDArray[np.int32]
    planes: int = GAP

    @classmethod
    def of(cls, parts: list[Part], device: torch.device) -> Launch:
        jobs = np.full((len(parts), len(JobField)), -1, np.int64)
        plans = np.full((max(p.plan for p in parts) + 1, len(PlanField)), -1, np.int64)
        tables: list[int] = [0] * 3
        launch = cls(parts, device, jobs, plans, np.zeros(0, np.int32))
        for job, part in zip(jobs, parts, strict=True):
            if plans[part.plan, PlanField.PLANES] < 0:
                plans[part.plan, [PlanField.PLANES, PlanField.TABLES]] = part.steps, len(tables)
                tables += part.which.tolist()
            job[[JobField.STREAMS, JobField.TOKENS, JobField.PER_STREAM]] = part.count, part.tokens, part.per_stream
            job[[JobField.PLAN, JobField.DEEPEST, JobField.PLANES]] = part.plan, part.plan, launch.planes
            job[[JobField.COLUMNS, JobField.CLASS_WORDS, JobField.CLASS_WORD_COUNT]] = 0
            job[JobField.CLASS_STATE] = 1 << 16
            launch.planes += part.symbols.size + GAP
        launch.tables = np.array(tables, np.int32)
        return launch

    @property
    def max_streams(self) -> int:
        return max(part.count for part in self.parts)

    @property
    def coding(self) -> StreamJobs:
        return StreamJobs(self.tensor(self.jobs), self.tensor(self.plans), self.tensor(self.tables), self.max_streams)

    @property
    def classes(self) -> torch.Tensor:
        """Those of all columns of all jobs: 0."""
        return torch.zeros(max(part.tokens for part in self.parts), dtype=torch.uint8, device=self.device)

    @property
    def decoding(self) -> DecodingTables:
        tables = self.parts[0].tables
        return DecodingTables(self.tensor(decoding_table(tables)), tables.prob_bits)

    def tensor(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array.copy()).to(self.device)

    def poison(self, count: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return torch.full((count * dtype.itemsize,), POISON, dtype=torch.uint8, device=self.device).view(dtype)

    def place_planes(self) -> torch.Tensor:
        """What decoding must leave: every part's symbols, poison between them."""
        out = self.poison(self.planes)
        for job, part in zip(self.jobs, self.parts, strict=True):
            out[job[JobField.PLANES] :][: part.symbols.size] = self.tensor(part.symbols.ravel())
        return out

    def place_data(self, coded: Sequence[bytes]) -> npt.NDArray[np.uint8]:
        """All coded parts in one array, and the jobs' fields that say where."""
        data = np.full(4 * GAP, POISON, np.uint8)
        for job, part, one in zip(self.jobs, self.parts, coded, strict=True):
            header = len(data)
            length_bytes = 4 if part.long else 2
            job[JobField.STATES] = (header + 20) // 4
            job[JobField.LENGTHS] = (header + 20 + 4 * part.count) // 2
            job[JobField.WORDS] = (header + 20 + (4 + length_bytes) * part.count) // 2
            job[JobField.LONG_LENGTHS] = part.long
            job[JobField.WORD_COUNT] = int.from_bytes(one[:4], "little")
            data = np.concatenate([data, np.frombuffer(one, np.uint8), np.full(4 * GAP, POISON, np.uint8)])
        return data

    def decode(self, data: npt.NDArray[np.uint8], reference: bool = False) -> tuple[torch.Tensor, list[int]]:
        """The planes, poisoned before, and the status of each job."""
        planes = self.poison(self.planes)
        status = torch.zeros(len(self.parts), dtype=torch.int32, device=self.device)
        run = naive.rans_decode_reference if reference else rans_decode
        run(self.tensor(data), self.coding, self.decoding, self.classes, planes, status)
        return planes, status.tolist()


@pytest.mark.parametrize("prob_bits", [8, 9, 10, 11, 12])
def test_every_slot_finds_its_symbol(prob_bits: int) -> None:
    tables = tables_of(prob_bits)
    slot = np.arange(1 << prob_bits)
    for row, slots in zip(decoding_table(tables), tables.slots, strict=True):
        word = row[slot // SPAN]
        begun = word & ((2 << slot % SPAN) - 1).astype(np.uint32)
        entry = row[ENTRIES:][(word >> 24) + np.bitwise_count(begun)]
        offset = slot.astype(np.uint32) - (entry & 0xFFF)
        assert np.array_equal((entry >> 12 & 0xFF) << 24 | entry >> 20 << 12 | offset, slots)


SHAPES = {
    "many": [(5, 1, 1), (9, 15, 2), (5, 63, 8), (1, 40, 1), (2, 257, 128), (7, 70, 2), (2, 33, 1)],
    "one-stream": [(6, 3, 16), (6, 1, 16), (3, 16, 16)],
    "odd-lanes": [(3, 257, 4), (4, 129, 1)],
    "nothing": [(0, 5, 2), (3, 5, 2), (0, 1, 128)],
}


@BOTH
@pytest.mark.parametrize("prob_bits", [8, 9, 10, 11, 12])
@pytest.mark.parametrize("name", sorted(SHAPES))
def test_decodes_what_the_codec_wrote(name: str, prob_bits: int, reference: bool, device: torch.device) -> None:
    launch = Launch.of(make_parts(SHAPES[name], prob_bits), device)
    planes, status = launch.decode(launch.place_data([part.coded for part in launch.parts]), reference)
    assert torch.equal(planes, launch.place_planes())
    assert status == [0] * len(launch.parts)


# The first and the last have lengths of four bytes.
LONG = [(512, 1, 128), (3, 5, 2), (513, 1, 128)]


@BOTH
def test_decodes_lengths_of_four_bytes(reference: bool, device: torch.device) -> None:
    launch = Launch.of(make_parts(LONG, 12), device)
    assert [part.long for part in launch.parts] == [True, False, True]
    planes, status = launch.decode(launch.place_data([part.coded for part in launch.parts]), reference)
    assert torch.equal(planes, launch.place_planes())
    assert status == [0] * len(LONG)


def test_the_high_half_of_a_length_counts(device: torch.device) -> None:
    part = make_parts([(512, 1, 128)], 12)[0]
    launch = Launch.of([part], device)
    data = launch.place_data([part.coded])
    data.view(np.uint16)[launch.jobs[0, JobField.LENGTHS] + 1] += 1
    assert launch.decode(data)[1] == [int(Status.STREAMS)]


def _words(part: Part, rng: np.random.Generator) -> Streams:
    s = part.streams
    return Streams(s.states, s.lengths, ~s.words)


def _moved(part: Part, rng: np.random.Generator) -> Streams:
    """One stream takes a word of the next: the lengths still add up."""
    s = part.streams
    lengths = s.lengths.copy()
    at = int(np.argmax(lengths[1:])) + 1
    lengths[at] -= 1
    lengths[at - 1] += 1
    return Streams(s.states, lengths, s.words)


def _lengths(value: int, every: bool) -> Callable[[Part, np.random.Generator], Streams]:
    def damage(part: Part, rng: np.random.Generator) -> Streams:
        s = part.streams
        lengths = s.lengths.copy()
        lengths[slice(None) if every else int(rng.integers(0, len(lengths)))] = value
        return Streams(s.states, lengths, s.words)

    return damage


def _last_length(part: Part, rng: np.random.Generator) -> Streams:
    """The last stream claims more words than there are; it decodes, and only the sum tells."""
    s = part.streams
    lengths = s.lengths.copy()
    lengths[-1] += 1
    return Streams(s.states, lengths, s.words)


def _truncated(part: Part, rng: np.random.Generator) -> Streams:
    s = part.streams
    return Streams(s.states, s.lengths, s.words[: len(s.words) // 2])


def _no_words(part: Part, rng: np.random.Generator) -> Streams:
    s = part.streams
    return Streams(s.states, s.lengths, s.words[:0])


def _state(part: Part, rng: np.random.Generator) -> Streams:
    s = part.streams
    states = s.states.copy()
    states[rng.integers(0, len(states))] = rng.integers(0, 1 << 16)
    return Streams(states, s.lengths, s.words)


def _noise(part: Part, rng: np.random.Generator) -> Streams:
    s = part.streams
    states = rng.integers(0, 1 << 32, len(s.states)).astype(np.uint32)
    lengths = rng.integers(0, 1 << 16, len(s.states)).astype(np.uint32)
    return Streams(states, lengths, rng.integers(0, 1 << 16, len(s.words)).astype(np.uint16))


DAMAGE: dict[str, Callable[[Part, np.random.Generator], Streams]] = {
    "words": _words,
    "moved": _moved,
    "empty": _lengths(0, True),
    "long": _lengths(0xFFFF, False),
    "longest": _lengths(0xFFFF, True),
    "last": _last_length,
    "truncated": _truncated,
    "no-words": _no_words,
    "state": _state,
    "noise": _noise,
}


@pytest.mark.parametrize("name", sorted(DAMAGE))
def test_damage_is_found_and_stays_in_its_job(name: str, device: torch.device) -> None:
    parts = make_parts([(5, 40, 2), (7, 75, 2), (5, 40, 1)], 12, seed=3)
    bad = parts[1]
    streams = DAMAGE[name](bad, np.random.default_rng(7))
    coded = [part.coded for part in parts]
    coded[1] = bad.written(streams)
    launch = Launch.of(parts, device)
    data = launch.place_data(coded)
    planes, status = launch.decode(data)
    assert status == [0, int(Status.STREAMS), 0]
    expected, expected_status = launch.decode(data, reference=True)
    assert status == expected_status
    assert torch.equal(planes, expected)
    good = launch.place_planes()
    own = slice(launch.jobs[1, JobField.PLANES], launch.jobs[1, JobField.PLANES] + bad.symbols.size)
    good[own] = planes[own]
    assert torch.equal(planes, good)


def test_a_state_below_its_bound_is_found_where_all_else_fits(device: torch.device) -> None:
    # The second slot of a symbol, alone, decodes to 1; the word 0 makes it 2**16, the state in which streams end.
    part = make_parts([(1, 1, 1)], 12)[0]
    low = int(part.tables.cumulative[part.which[0], int(part.symbols[0, 0])])
    streams = Streams(np.array([low + 1], np.uint32), np.ones(1, np.uint32), np.zeros(1, np.uint16))
    launch = Launch.of([part], device)
    planes, status = launch.decode(launch.place_data([part.written(streams)]))
    assert torch.equal(planes, launch.place_planes())
    assert status == [int(Status.STREAMS)]


def zeros_part() -> Part:
    """Two bytes 0 of a flat table: the state reaches the very value from which a word must move, and the word is 0."""
    flat = np.zeros(2, np.uint16)
    return Part(np.zeros((2, 1), np.uint8), flat, tables_of(12), 1, NO_ESCAPES, 0)


@pytest.mark.parametrize("words", [[], [0, 5]], ids=["one-too-few", "one-too-many"])
def test_words_missing_or_left_are_found_where_all_else_fits(words: list[int], device: torch.device) -> None:
    part = zeros_part()
    assert part.streams.words.tolist() == [0]
    launch = Launch.of([part], device)
    streams = Streams(part.streams.states, np.full(1, len(words), np.uint32), np.array(words, np.uint16))
    planes, status = launch.decode(launch.place_data([part.written(streams)]))
    assert torch.equal(planes, launch.place_planes())
    assert status == [int(Status.STREAMS)]


def test_encodes_a_state_at_its_limit(device: torch.device) -> None:
    launch = Launch.of([zeros_part()], device)
    assert write(launch, encoded(launch, launch.place_planes(), False), False) == [zeros_part().coded]


@pytest.mark.parametrize("value", [0xFFFFFFFF, 0x80000000, 1 << 16])
def test_sums_of_lengths_of_four_bytes_do_not_wrap(value: int, device: torch.device) -> None:
    # 65 streams of 2**32 - 1 words, or of a length whose sum is 0 in 32 bits: all but the first are clamped to nothing.
    parts = make_parts([(1, 65, 1), (2, 3, 1)], 12)
    launch = Launch.of(parts, device)
    data = launch.place_data([part.coded for part in parts])
    start = len(data)
    claimed = np.full(65, value, np.uint32)
    data = np.concatenate([data, claimed.view(np.uint8)])
    launch.jobs[0, [JobField.LENGTHS, JobField.LONG_LENGTHS]] = start // 2, 1
    planes, status = launch.decode(data)
    expected, expected_status = launch.decode(data, reference=True)
    assert status == expected_status == [int(Status.STREAMS), 0]
    assert torch.equal(planes, expected)


def test_status_keeps_what_others_found(device: torch.device) -> None:
    parts = make_parts([(3, 5, 1), (3, 5, 1)], 10)
    launch = Launch.of(parts, device)
    data = launch.place_data([part.coded for part in parts])
    data.view(np.uint32)[launch.jobs[1, JobField.STATES]] ^= 1
    status = torch.tensor([int(Status.ESCAPES), int(Status.SLOT)], dtype=torch.int32, device=device)
    planes = launch.poison(launch.planes)
    rans_decode(launch.tensor(data), launch.coding, launch.decoding, launch.classes, planes, status)
    assert status.tolist() == [int(Status.ESCAPES), int(Status.SLOT | Status.STREAMS)]


def encoded(launch: Launch, planes: torch.Tensor, reference: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """words, states and lengths; sets the fields of the jobs that say where they lie."""
    words = streams = GAP
    for job, part in zip(launch.jobs, launch.parts, strict=True):
        job[[JobField.WORDS, JobField.STATES, JobField.LENGTHS]] = words, streams, streams + 1
        words += part.count * part.steps * part.per_stream + GAP
        streams += part.count + GAP
    out = (
        launch.poison(words, torch.uint16),
        launch.poison(streams, torch.uint32),
        launch.poison(streams, torch.uint32),
    )
    run = naive.rans_encode_reference if reference else rans_encode
    entries = launch.tensor(coding_table(launch.parts[0].tables))
    run(planes, launch.coding, entries, launch.classes, EncodedStreams(*out))
    return out


def write(launch: Launch, arrays: tuple[torch.Tensor, torch.Tensor, torch.Tensor], reference: bool) -> list[bytes]:
    """The coded part of each job; checks that nothing else was written."""
    words, states, lengths = arrays
    totals = launch.poison(len(launch.parts), torch.int64)
    count = naive.count_words_reference if reference else coded_part.count_words
    count(launch.coding, lengths, totals)
    index, value = np.full(3, 1, np.uint32), np.full(3, 1, np.int32)
    at, sizes = 4 * GAP, []
    table = np.zeros((len(launch.parts), len(PartField)), np.int64)
    for job, row, part, total in zip(launch.jobs, table, launch.parts, totals.tolist(), strict=True):
        escapes = len(part.escapes.index)
        row[PartField.WORD_COUNT], row[PartField.ESCAPE_COUNT] = total, escapes
        row[PartField.ESCAPES], row[PartField.SECTION] = len(index), at
        job[JobField.LONG_LENGTHS] = part.long
        index = np.concatenate([index, part.escapes.index])
        value = np.concatenate([value, part.escapes.value])
        sizes.append(coded_part.coded_bytes(part.count, int(part.long), total, escapes, 0))
        at += sizes[-1] + 4 * GAP
    out = launch.poison(at)
    run = naive.write_coded_reference if reference else coded_part.write_coded
    run(
        launch.coding, launch.tensor(table), EncodedStreams(words, states, lengths), launch.tensor(index),
        launch.tensor(value), words, out,
    )  # fmt: skip
    raw = out.cpu().numpy()
    starts = table[:, PartField.SECTION].tolist()
    ends = [start + size for start, size in zip(starts, sizes, strict=True)]
    for low, high in zip([0, *ends], [*starts, at], strict=True):
        assert (raw[low:high] == POISON).all()
    return [raw[low:high].tobytes() for low, high in zip(starts, ends, strict=True)]


@BOTH
@pytest.mark.parametrize(
    ("name", "prob_bits"),
    [("many", 12), ("one-stream", 10), ("odd-lanes", 11), ("long", 12), ("nothing", 12)],
)
def test_encodes_the_bytes_of_the_codec(name: str, prob_bits: int, reference: bool, device: torch.device) -> None:
    launch = Launch.of(make_parts(LONG if name == "long" else SHAPES[name], prob_bits, seed=1), device)
    arrays = encoded(launch, launch.place_planes(), reference)
    owned = [np.zeros(len(a), bool) for a in arrays]
    for job, part in zip(launch.jobs, launch.parts, strict=True):
        streams = part.streams
        region = part.steps * part.per_stream
        owned[0][job[JobField.WORDS] :][: part.count * region] = True
        owned[1][job[JobField.STATES] :][: part.count] = True
        owned[2][job[JobField.LENGTHS] :][: part.count] = True
        assert np.array_equal(arrays[1].cpu().numpy()[job[JobField.STATES] :][: part.count], streams.states)
        assert np.array_equal(arrays[2].cpu().numpy()[job[JobField.LENGTHS] :][: part.count], streams.lengths)
    for array, own in zip(arrays, owned, strict=True):
        assert (array.cpu().numpy()[~own].view(np.uint8) == POISON).all()
    coded = write(launch, arrays, reference)
    for one, part in zip(coded, launch.parts, strict=True):
        assert one == part.coded
        found = read_coded(Reader(memoryview(one)), part.steps, part.steps, part.tokens)
        assert found.tokens_per_stream == part.per_stream
        assert np.array_equal(found.escapes.value, part.escapes.value)


def test_more_escapes_than_a_program_writes_at_once(device: torch.device) -> None:
    rng = np.random.default_rng(0)
    parts = make_parts([(90, 40, 2), (90, 3, 1)], 12)
    index = np.flatnonzero(rng.random(3600) < 0.9).astype(np.uint32)
    assert len(index) > 3 * 1024
    escapes = Escapes(index, rng.integers(-(1 << 31), 1 << 31, len(index)).astype(np.int32))
    parts[0] = Part(**{**{f: getattr(parts[0], f) for f in Part.__dataclass_fields__}, "escapes": escapes})
    launch = Launch.of(parts, device)
    coded = write(launch, encoded(launch, launch.place_planes(), reference=True), reference=False)
    assert coded == [part.coded for part in parts]


@BOTH
def test_writes_lengths_that_need_four_bytes(reference: bool, device: torch.device) -> None:
    # Made up, not coded: the writer asks nothing of what streams say.
    rng = np.random.default_rng(0)
    steps, per_stream = 600, 128
    lengths = np.array([1, 70001, 65536], np.uint32)
    region = steps * per_stream
    words = rng.integers(0, 1 << 16, 3 * region).astype(np.uint16)
    states = rng.integers(1 << 16, 1 << 32, 3).astype(np.uint32)
    table = np.zeros(steps, np.uint16)
    part = Part(np.zeros((steps, 257), np.uint8), table, tables_of(12), per_stream, NO_ESCAPES, 0)
    launch = Launch.of([part], device)
    launch.jobs[0, [JobField.WORDS, JobField.STATES, JobField.LENGTHS]] = 0
    coded = write(launch, (launch.tensor(words), launch.tensor(states), launch.tensor(lengths)), reference)
    tails = [words[(s + 1) * region - n : (s + 1) * region] for s, n in enumerate(lengths.tolist())]
    assert coded == [part.written(Streams(states, lengths, np.concatenate(tails)))]


def test_a_byte_without_frequency_harms_only_its_stream(device: torch.device) -> None:
    parts = make_parts([(6, 70, 2), (6, 5, 2)], 12)
    launch = Launch.of(parts, device)
    planes = launch.place_planes()
    clean = encoded(launch, planes, reference=True)
    freq = parts[0].tables.freq[parts[0].which[2]]
    token = 35 + 10  # the second of stream 10
    planes[launch.jobs[0, JobField.PLANES] + 2 * 70 + token] = int(np.argmin(freq))
    assert freq.min() == 0
    dirty = encoded(launch, planes, reference=False)
    region = 6 * 2
    for job, part in zip(launch.jobs, parts, strict=True):
        for s in range(part.count):
            if job[JobField.PLANES] == launch.jobs[0, JobField.PLANES] and s == token % 35:
                continue
            length = int(clean[2][job[JobField.LENGTHS] + s])
            top = job[JobField.WORDS] + (s + 1) * region
            assert int(dirty[2][job[JobField.LENGTHS] + s]) == length
            assert int(dirty[1][job[JobField.STATES] + s]) == int(clean[1][job[JobField.STATES] + s])
            assert torch.equal(dirty[0][top - length : top], clean[0][top - length : top])


@pytest.mark.parametrize("prob_bits", [8, 10, 12])
def test_the_quotient_is_exact(prob_bits: int) -> None:
    # One table for each frequency f: f for byte 0, the others share the rest.
    total = 1 << prob_bits
    f = np.arange(1, total, dtype=np.uint64)
    freq = np.zeros((len(f), SYMBOLS), np.int64)
    freq[:, 0], freq[:, 1] = f, total - f
    coding = coding_table(EntropyTables(freq, prob_bits))
    assert np.array_equal(coding[:, 0, 0], f << 16)
    assert np.array_equal(coding[:, 1, 0], (total - f) << np.uint64(16) | f)
    assert not coding[:, 2:, 1].any()
    reciprocal = coding[:, 0, 1].astype(np.uint64)
    limit = f << np.uint64(32 - prob_bits)  # states of the encoder lie below
    multiples = limit // f - np.array([[1], [2], [1000], [1 << 15]], np.uint64)
    for x in (limit - 1, *(multiples * f), *(multiples * f - 1), *(multiples * f + 1)):
        quotient = x * reciprocal >> np.uint64(32)
        assert np.array_equal(quotient + (x - quotient * f >= f), x // f)


def test_size_of_a_coded_part() -> None:
    shapes = [
        (s, p, n, w, e, c)
        for s in (1, 2, 3)
        for p, n in ((1, 1), (511, 128), (512, 128))
        for w in (0, 1)
        for e in (0, 3)
        for c in (0, 3)
    ]
    sizes, counts = [], []
    for count, steps, per_stream, words, escapes, classes in shapes:
        streams = Streams(np.zeros(count, np.uint32), np.zeros(count, np.uint32), np.zeros(words, np.uint16))
        listed = Escapes(np.zeros(escapes, np.uint32), np.zeros(escapes, np.int32))
        own = Streams(np.zeros(1, np.uint32), np.full(1, classes, np.uint32), np.zeros(classes, np.uint16))
        sizes.append(len(write_coded(CodedPart(streams, listed, per_stream, own), steps)))
        counts.append((count, coded_part.long_lengths(steps, per_stream), words, escapes, classes))
    assert [coded_part.coded_bytes(*shape) for shape in counts] == sizes
    assert coded_part.coded_bytes(*np.array(counts, np.int64).T).tolist() == sizes
