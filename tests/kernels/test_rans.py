"""The entropy coder's kernels against the codec's coder and the container, on good and bad bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tests.codec.planned import various_tables
from tests.codec.reference import rans

from cuvee.codec.entropy.tables import SYMBOLS, TOTAL, EntropyTables
from cuvee.codec.entropy.token_classes import CLASSES, ColumnPlan, SectionPlanes, one_class
from cuvee.codec.format.coded_part import CodedPart, write_coded
from cuvee.codec.format.streams import NO_ESCAPES, ONE_CLASS, WINDOW, Escapes, Streams, stream_count, windows
from cuvee.codec.support.arrays import U8
from cuvee.kernels.jobs import JobField, PartField, PlanField, Status
from cuvee.kernels.ops import coded_part
from cuvee.kernels.ops.arguments import EncodedStreams, StreamJobs
from cuvee.kernels.ops.rans import coding_table, decoding_table, rans_decode, rans_encode

POISON = 0xAB
GAP = 8  # poisoned elements between what jobs own
BAD = int(Status.STREAMS)


@dataclass(frozen=True)
class Part:
    """A coded part: symbols `[P, T]` that follow their tables, how they are coded, and the reference's bytes."""

    symbols: U8
    columns: U8
    plan: ColumnPlan
    tables: EntropyTables
    per_stream: int
    escapes: Escapes = NO_ESCAPES
    classes: Streams = ONE_CLASS

    @property
    def steps(self) -> int:
        return len(self.symbols)

    @property
    def tokens(self) -> int:
        return len(self.columns)

    @property
    def count(self) -> int:
        return stream_count(self.tokens, self.per_stream)

    @property
    def long(self) -> bool:
        return self.steps * self.per_stream > 65535

    @property
    def kept(self) -> npt.NDArray[np.bool_]:
        """Which symbols are coded."""
        kept: npt.NDArray[np.bool_] = self.plan.planes[self.columns] > np.arange(self.steps)[:, None]
        return kept

    @property
    def streams(self) -> Streams:
        return rans.rans_encode([SectionPlanes(self.symbols, self.columns, self.plan, self.per_stream)], self.tables)[0]

    @property
    def coded(self) -> bytes:
        return self.written(self.streams)

    def written(self, streams: Streams) -> bytes:
        """The bytes with other streams."""
        return write_coded(CodedPart(streams, self.escapes, self.per_stream, self.classes), self.steps)


def make_part(shape: tuple[int, int, int, str], seed: int) -> Part:
    """A part of (steps, tokens, tokens per stream, classes): `one`, `mixed`, or `each`."""
    steps, tokens, per_stream, kind = shape
    rng, tables = np.random.default_rng(seed), various_tables()
    if kind == "one":
        columns, plan = np.zeros(tokens, np.uint8), one_class(rng.integers(0, len(tables), steps).astype(np.uint16))
    else:
        drawn = rng.normal(8, 1.5, tokens).round() if kind == "mixed" else np.arange(tokens) % CLASSES
        columns = (
            np.concatenate([np.sort(drawn[at]) for at in windows(0, tokens)]).clip(0, CLASSES - 1).astype(np.uint8)
        )
        depth = (steps * (CLASSES - 1 - np.arange(CLASSES)) // (CLASSES - 2)).clip(0, steps).astype(np.int32)
        plan = ColumnPlan(depth, rng.integers(0, len(tables), (CLASSES, steps)).astype(np.uint16))
    planes = int(plan.planes[columns].max())
    slot = rng.integers(0, TOTAL, (planes, tokens))
    symbols = (tables.slots[plan.tables[columns, :planes].T, slot] >> 24).astype(np.uint8)
    some = np.flatnonzero(rng.random(planes * tokens) < 0.1 * (seed % 3)).astype(np.uint32)
    words = rng.integers(0, 1 << 16, seed % 4).astype(np.uint16)
    classes = Streams(np.array([1 << 16 | seed], np.uint32), np.array([len(words)], np.uint32), words)
    escapes = Escapes(some, rng.integers(-(1 << 31), 1 << 31, len(some)).astype(np.int32))
    return Part(symbols, columns, plan, tables, per_stream, escapes, classes)


def make_parts(shapes: Sequence[tuple[int, int, int, str]]) -> list[Part]:
    return [make_part(shape, seed) for seed, shape in enumerate(shapes)]


@dataclass
class Launch:
    """The arrays of one launch, what jobs own apart from each other and poisoned."""

    parts: list[Part]
    device: torch.device

    def __post_init__(self) -> None:
        self.jobs = np.full((len(self.parts), len(JobField)), -1, np.int64)
        plans: list[npt.NDArray[np.int64]] = []
        tables, columns, classes = [0] * 3, [np.full(GAP, 99, np.uint8)], [np.zeros(GAP, np.uint16)]
        self.planes = GAP
        for job, part in zip(self.jobs, self.parts, strict=True):
            job[[JobField.STREAMS, JobField.TOKENS, JobField.PER_STREAM]] = part.count, part.tokens, part.per_stream
            job[[JobField.PLAN, JobField.DEEPEST]] = len(plans), len(plans) + int(part.columns.min())
            job[JobField.COLUMNS], job[JobField.PLANES] = sum(map(len, columns)), self.planes
            job[JobField.CLASS_WORDS], job[JobField.CLASS_WORD_COUNT] = sum(map(len, classes)), len(part.classes.words)
            job[JobField.CLASS_STATE], job[JobField.LONG_LENGTHS] = part.classes.states[0], part.long
            for depth, own in zip(part.plan.planes, part.plan.tables, strict=True):
                plan = np.full(len(PlanField), -1)
                plan[[PlanField.PLANES, PlanField.TABLES]] = depth, len(tables)
                plans.append(plan)
                tables += own[:depth].tolist()
            columns.append(part.columns)
            classes.append(part.classes.words)
            self.planes += part.symbols.size + GAP
        self.classes = self.tensor(np.concatenate(columns))
        self.class_words = self.tensor(np.concatenate(classes))
        self._plans = self.tensor(np.array(plans, np.int64)), self.tensor(np.array([*tables, 0], np.int32))

    @property
    def coding(self) -> StreamJobs:
        return StreamJobs(self.tensor(self.jobs), *self._plans, max(part.count for part in self.parts))

    def tensor(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array.copy()).to(self.device)

    def poison(self, count: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return torch.full((count * dtype.itemsize,), POISON, dtype=torch.uint8, device=self.device).view(dtype)

    def own(self, job: int) -> slice:
        """The planes of a job."""
        first = self.jobs[job, JobField.PLANES]
        return slice(first, first + self.parts[job].symbols.size)

    def plane_offsets(self) -> torch.Tensor:
        """What decoding must leave: every part's symbols, poison between them and below a column's last plane."""
        out = self.poison(self.planes)
        for job, part in enumerate(self.parts):
            out[self.own(job)] = self.tensor(np.where(part.kept, part.symbols, POISON).ravel())
        return out

    def place_data(self, coded: Sequence[bytes] | None = None) -> npt.NDArray[np.uint8]:
        """All coded parts in one array, and the jobs' fields that say where."""
        data = np.full(4 * GAP, POISON, np.uint8)
        for job, part, one in zip(self.jobs, self.parts, coded or [p.coded for p in self.parts], strict=True):
            lengths = len(data) + 20 + 4 * part.count
            job[JobField.STATES], job[JobField.LENGTHS] = (len(data) + 20) // 4, lengths // 2
            job[JobField.WORDS] = lengths // 2 + (1 + part.long) * part.count + len(part.classes.words)
            job[JobField.WORD_COUNT] = int.from_bytes(one[:4], "little")
            data = np.concatenate([data, np.frombuffer(one, np.uint8), np.full(4 * GAP, POISON, np.uint8)])
        return data

    def decode(self, data: npt.NDArray[np.uint8], found: Sequence[int] = ()) -> tuple[torch.Tensor, list[int]]:
        """The planes, poisoned before, and the status of each job, which was `found` before."""
        planes = self.poison(self.planes)
        status = torch.tensor([*found] or [0] * len(self.parts), dtype=torch.int32, device=self.device)
        tables = self.parts[0].tables
        rans_decode(self.tensor(data), self.coding, self.tensor(decoding_table(tables)), self.classes, planes, status)
        return planes, status.tolist()

    def encoded(self, planes: torch.Tensor) -> EncodedStreams:
        """Words, states and lengths; sets the fields of the jobs that say where they lie."""
        words = streams = GAP
        for job, part in zip(self.jobs, self.parts, strict=True):
            job[[JobField.WORDS, JobField.STATES, JobField.LENGTHS]] = words, streams, streams + 1
            words += part.count * part.steps * part.per_stream + GAP
            streams += part.count + GAP
        out = EncodedStreams(*(self.poison(n, d) for n, d in ((words, torch.uint16), *[(streams, torch.uint32)] * 2)))
        rans_encode(planes, self.coding, self.tensor(coding_table(self.parts[0].tables)), self.classes, out)
        return out

    def write(self, streams: EncodedStreams) -> list[bytes]:
        """The coded part of each job; checks that nothing else was written."""
        totals = self.poison(len(self.parts), torch.int64)
        coded_part.count_words(self.coding, streams.lengths, totals)
        index, value = [np.full(3, 1, np.uint32)], [np.full(3, 1, np.int32)]
        table, at, ends = np.zeros((len(self.parts), len(PartField)), np.int64), 4 * GAP, [0]
        for row, part, total in zip(table, self.parts, totals.tolist(), strict=True):
            escapes = len(part.escapes.index)
            row[[PartField.WORD_COUNT, PartField.ESCAPE_COUNT]] = total, escapes
            row[[PartField.ESCAPES, PartField.SECTION]] = sum(map(len, index)), at
            index.append(part.escapes.index)
            value.append(part.escapes.value)
            at += coded_part.coded_bytes(part.count, int(part.long), total, escapes, len(part.classes.words))
            ends.append(at)
            at += 4 * GAP
        out = self.poison(at)
        listed = self.tensor(np.concatenate(index)), self.tensor(np.concatenate(value))
        coded_part.write_coded(self.coding, self.tensor(table), streams, *listed, self.class_words, out)
        raw, starts = out.cpu().numpy(), table[:, PartField.SECTION].tolist()
        for low, high in zip(ends, [*starts, at], strict=True):
            assert (raw[low:high] == POISON).all()
        return [raw[low:high].tobytes() for low, high in zip(starts, ends[1:], strict=True)]


SHAPES: dict[str, list[tuple[int, int, int, str]]] = {
    "many": [
        (5, 1, 1, "one"), (9, 15, 2, "one"), (5, 63, 8, "one"), (1, 40, 1, "one"), (2, 257, 128, "one"),
        (7, 70, 2, "each"), (2, 33, 1, "mixed"),
    ],
    "one stream": [(6, 3, 16, "one"), (9, 16, 16, "each"), (3, 16, 16, "one")],
    "odd lanes": [(3, 257, 4, "one"), (4, 129, 1, "mixed"), (14, 300, 4, "each"), (15, 40, 1, "mixed")],
    "nothing": [(0, 5, 2, "one"), (3, 5, 2, "one"), (0, 1, 128, "one")],
    "long lengths": [(512, 1, 128, "one"), (3, 5, 2, "one"), (513, 1, 128, "one")],
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_decodes_what_the_codec_wrote(name: str, device: torch.device) -> None:
    launch = Launch(make_parts(SHAPES[name]), device)
    planes, status = launch.decode(launch.place_data())
    assert torch.equal(planes, launch.plane_offsets())
    assert status == [0] * len(launch.parts)


@pytest.mark.parametrize("name", SHAPES)
def test_encodes_the_bytes_of_the_codec(name: str, device: torch.device) -> None:
    launch = Launch(make_parts(SHAPES[name]), device)
    streams = launch.encoded(launch.plane_offsets())
    touched = [np.zeros(len(a), bool) for a in (streams.words, streams.states, streams.lengths)]
    for job, part in zip(launch.jobs, launch.parts, strict=True):
        regions = touched[0][job[JobField.WORDS] :][: part.count * part.steps * part.per_stream]
        for region, length in zip(regions.reshape(part.count, -1), part.streams.lengths, strict=True):
            region[len(region) - length :] = True
        touched[1][job[JobField.STATES] :][: part.count] = touched[2][job[JobField.LENGTHS] :][: part.count] = True
    for array, own in zip((streams.words, streams.states, streams.lengths), touched, strict=True):
        assert (array.cpu().numpy()[~own].view(np.uint8) == POISON).all()
    assert launch.write(streams) == [part.coded for part in launch.parts]


# --- damage


def _changed(field: str, change: Callable[[npt.NDArray[Any], np.random.Generator], npt.NDArray[Any] | None]) -> Any:
    """Streams with one of their arrays changed."""

    def damage(streams: Streams, rng: np.random.Generator) -> Streams:
        own = getattr(streams, field).copy()
        made = change(own, rng)
        return replace(streams, **{field: own if made is None else made})

    return damage


def _move(lengths: npt.NDArray[Any], rng: np.random.Generator) -> None:
    """One stream takes a word of the next: the lengths still add up."""
    at = int(np.argmax(lengths[1:])) + 1
    lengths[at] -= 1
    lengths[at - 1] += 1


def _noise(s: Streams, rng: np.random.Generator) -> Streams:
    states = rng.integers(0, 1 << 32, len(s.states)).astype(np.uint32)
    lengths = rng.integers(0, 1 << 16, len(s.states)).astype(np.uint32)
    return Streams(states, lengths, rng.integers(0, 1 << 16, len(s.words)).astype(np.uint16))


DAMAGE: dict[str, Callable[[Streams, np.random.Generator], Streams]] = {
    "words": _changed("words", lambda words, rng: ~words),
    "moved": _changed("lengths", _move),
    "empty": _changed("lengths", lambda own, rng: np.zeros_like(own)),
    "long": _changed("lengths", lambda own, rng: own.__setitem__(rng.integers(0, len(own)), 0xFFFF)),
    "longest": _changed("lengths", lambda own, rng: np.full_like(own, 0xFFFF)),
    "last": _changed("lengths", lambda own, rng: own.__setitem__(-1, own[-1] + 1)),  # only the sum tells
    "truncated": _changed("words", lambda words, rng: words[: len(words) // 2]),
    "no words": _changed("words", lambda words, rng: words[:0]),
    "state": _changed("states", lambda own, rng: own.__setitem__(rng.integers(0, len(own)), rng.integers(0, 1 << 16))),
    "noise": _noise,
}


@pytest.mark.parametrize("name", sorted(DAMAGE))
def test_damage_is_found_and_stays_in_its_job(name: str, device: torch.device) -> None:
    parts = make_parts([(5, 40, 2, "one"), (14, 75, 2, "each"), (5, 40, 1, "one")])
    coded = [part.coded for part in parts]
    coded[1] = parts[1].written(DAMAGE[name](parts[1].streams, np.random.default_rng(7)))
    launch = Launch(parts, device)
    planes, status = launch.decode(launch.place_data(coded))
    assert status == [0, BAD, 0]
    good = launch.plane_offsets()
    good[launch.own(1)] = planes[launch.own(1)]
    assert torch.equal(planes, good)


def test_the_high_half_of_a_length_counts(device: torch.device) -> None:
    launch = Launch(make_parts([(512, 1, 128, "one")]), device)
    data = launch.place_data()
    data.view(np.uint16)[launch.jobs[0, JobField.LENGTHS] + 1] += 1
    assert launch.decode(data)[1] == [BAD]


def zeros_part() -> Part:
    """Two bytes 0 of a flat table: the state reaches the very value from which a word must move, and the word is 0."""
    return Part(
        np.zeros((2, 1), np.uint8), np.zeros(1, np.uint8), one_class(np.zeros(2, np.uint16)), various_tables(), 1
    )


def one_symbol() -> tuple[Part, Streams]:
    """A part, and a state below its bound that decodes to it: the word 0 makes it 2**16, in which streams end."""
    part = make_part((1, 1, 1, "one"), 0)
    low = int(part.tables.cumulative[part.plan.tables[0, 0], int(part.symbols[0, 0])])
    return part, Streams(np.array([low + 1], np.uint32), np.ones(1, np.uint32), np.zeros(1, np.uint16))


@pytest.mark.parametrize("what", ["state below its bound", "word too few", "word too many"])
def test_what_is_wrong_is_found_where_all_symbols_fit(what: str, device: torch.device) -> None:
    part, streams = one_symbol() if what == "state below its bound" else (zeros_part(), zeros_part().streams)
    if "word" in what:
        assert streams.words.tolist() == [0]
        words = np.array([0, 5] if "many" in what else [], np.uint16)
        streams = Streams(streams.states, np.full(1, len(words), np.uint32), words)
    launch = Launch([part], device)
    planes, status = launch.decode(launch.place_data([part.written(streams)]))
    assert torch.equal(planes, launch.plane_offsets())
    assert status == [BAD]


@pytest.mark.parametrize("value", [0xFFFFFFFF, 0x80000000, 1 << 16])
def test_sums_of_lengths_of_four_bytes_do_not_wrap(value: int, device: torch.device) -> None:
    # 65 streams of 2**32 - 1 words, or of a length whose sum is 0 in 32 bits: all but the first are clamped to nothing.
    launch = Launch(make_parts([(1, 65, 1, "one"), (2, 3, 1, "one")]), device)
    data = launch.place_data()
    launch.jobs[0, [JobField.LENGTHS, JobField.LONG_LENGTHS]] = len(data) // 2, 1
    planes, status = launch.decode(np.concatenate([data, np.full(65, value, np.uint32).view(np.uint8)]))
    assert status == [BAD, 0]
    assert torch.equal(planes[launch.own(1)], launch.plane_offsets()[launch.own(1)])


def test_status_keeps_what_others_found(device: torch.device) -> None:
    launch = Launch(make_parts([(3, 5, 1, "one"), (3, 5, 1, "one")]), device)
    data = launch.place_data()
    data.view(np.uint32)[launch.jobs[1, JobField.STATES]] ^= 1
    found = [int(Status.ESCAPES), int(Status.SLOT)]
    assert launch.decode(data, found)[1] == [found[0], found[1] | BAD]


# --- encoding at the edges


def test_encodes_a_state_at_its_limit(device: torch.device) -> None:
    launch = Launch([zeros_part()], device)
    assert launch.write(launch.encoded(launch.plane_offsets())) == [zeros_part().coded]


def test_more_escapes_than_a_program_writes_at_once(device: torch.device) -> None:
    rng = np.random.default_rng(0)
    parts = make_parts([(90, 40, 2, "one"), (90, 3, 1, "one")])
    index = np.flatnonzero(rng.random(3600) < 0.9).astype(np.uint32)
    assert len(index) > 3 * 1024
    parts[0] = replace(parts[0], escapes=Escapes(index, rng.integers(-(1 << 31), 1 << 31, len(index)).astype(np.int32)))
    launch = Launch(parts, device)
    assert launch.write(launch.encoded(launch.plane_offsets())) == [part.coded for part in parts]


def test_writes_lengths_that_need_four_bytes(device: torch.device) -> None:
    # Made up, not coded: the writer asks nothing of what streams say.
    rng = np.random.default_rng(0)
    steps, per_stream = 600, 128
    lengths = np.array([1, 70001, 65536], np.uint32)
    region = steps * per_stream
    words = rng.integers(0, 1 << 16, 3 * region).astype(np.uint16)
    states = rng.integers(1 << 16, 1 << 32, 3).astype(np.uint32)
    plan, columns = one_class(np.zeros(steps, np.uint16)), np.zeros(WINDOW + 1, np.uint8)
    part = Part(np.zeros((steps, WINDOW + 1), np.uint8), columns, plan, various_tables(), per_stream)
    launch = Launch([part], device)
    launch.jobs[0, [JobField.WORDS, JobField.STATES, JobField.LENGTHS]] = 0
    coded = launch.write(EncodedStreams(launch.tensor(words), launch.tensor(states), launch.tensor(lengths)))
    tails = [words[(s + 1) * region - n : (s + 1) * region] for s, n in enumerate(lengths.tolist())]
    assert coded == [part.written(Streams(states, lengths, np.concatenate(tails)))]


def test_the_quotient_is_exact() -> None:
    # One table for each frequency f: f for byte 0, the others share the rest.
    f = np.arange(1, TOTAL, dtype=np.uint64)
    freq = np.zeros((len(f), SYMBOLS), np.int64)
    freq[:, 0], freq[:, 1] = f, TOTAL - f
    coding = coding_table(EntropyTables(freq))
    assert np.array_equal(coding[:, 0, 0], f << 16)
    assert np.array_equal(coding[:, 1, 0], (TOTAL - f) << np.uint64(16) | f)
    assert not coding[:, 2:, 1].any()
    reciprocal = coding[:, 0, 1].astype(np.uint64)
    limit = f << np.uint64(20)  # states of the encoder lie below
    multiples = limit // f - np.array([[1], [2], [1000], [1 << 15]], np.uint64)
    for x in (limit - 1, *(multiples * f), *(multiples * f - 1), *(multiples * f + 1)):
        quotient = x * reciprocal >> np.uint64(32)
        assert np.array_equal(quotient + (x - quotient * f >= f), x // f)
