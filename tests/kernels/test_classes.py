"""Token classes on the device: every kernel against its reference and the codec's, and the whole backend both ways."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tests.classed import with_classes
from tests.conftest import decoded_layers
from tests.kernels.naive.rans import rans_decode_reference, rans_encode_reference
from tests.kernels.naive.symbols import dequantize_reference, list_escapes_reference, quantize_reference
from tests.kernels.naive.transform import analyze_reference
from tests.predicting import VOCABULARY, with_sinks
from tests.predicting import predicting as with_token_table

from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.entropy.coding_plan import MAX_LEVEL
from cuvee.codec.entropy.family import default_family
from cuvee.codec.entropy.token_classes import (
    CLASSES,
    NEUTRAL,
    ClassedPlan,
    SectionPlanes,
    class_frequencies,
    class_table,
)
from cuvee.codec.errors import CorruptError, FormatError, ProfileError
from cuvee.codec.format.container import read_header, read_section
from cuvee.codec.format.streams import WINDOW, Escapes, Streams
from cuvee.codec.layout import KVLayout, LayerLayout, Rope
from cuvee.codec.paged import PagedCache, PagedChunks
from cuvee.codec.profiles.block_map import BlockMap
from cuvee.codec.profiles.class_predictor import Predictor, finer_near_end
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.profiles.section_basis import SectionBasis
from cuvee.codec.profiles.section_profile import SectionProfile
from cuvee.codec.profiles.sections import partition
from cuvee.codec.stages.reference import rans, symbols
from cuvee.codec.stages.reference.sections import read_part
from cuvee.codec.stages.reference.token_order import coding_order
from cuvee.codec.support.arrays import F32, U8
from cuvee.kernels.centers import SentArrays, TokenRun
from cuvee.kernels.class_predictor import DevicePredictor
from cuvee.kernels.class_streams import read_classes, sort_columns, write_classes
from cuvee.kernels.jobs import JobField, PlanField, Status, job_table
from cuvee.kernels.ops.analyze import analyze
from cuvee.kernels.ops.arguments import (
    ChunkBatch,
    CodableBytes,
    DecodingTables,
    DevicePlans,
    EncodedStreams,
    StreamJobs,
    TokenOrder,
)
from cuvee.kernels.ops.dequantize import dequantize
from cuvee.kernels.ops.quantize import list_escapes, quantize
from cuvee.kernels.ops.rans import coding_table, decoding_table, rans_decode, rans_encode
from cuvee.kernels.outgoing import stream_fields
from cuvee.kernels.plans import TransformPlan
from cuvee.kernels.workspace import place_coefficients, place_planes, running_offsets

CPU = torch.device("cpu")
FAMILY = default_family()
POISON = 0xAB
GAP = 16
STEP = 0
BOTH = pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "reference"])

LAYOUT = KVLayout("tiny", (LayerLayout(1, 6, 4, Rope((1.0, 0.1))), LayerLayout(2, 5, 3, None)), "float32", 4096)


@cache
def profile_of(group: str = "unit", top: int = 10) -> Profile:
    """A profile whose components fall from some `top` octaves over the step, with the blocks that the group has.

    The finest classes of its first section are not served: components would be too many steps wide.
    """
    rng = np.random.default_rng(0)
    sections = partition(LAYOUT, group)
    learned = []
    for index, section in enumerate(sections):
        scale, maps = [], []
        for block, size in enumerate(section.blocks):
            scale.append(np.sort(64 * (top - index) - rng.integers(0, 64 * 14, size))[::-1] - 32 * block)
            basis = torch.linalg.qr(torch.from_numpy(rng.normal(size=(size, size))))[0]
            maps.append(BlockMap.of(basis.T, scale[-1].astype(np.int16)))
        scales = np.concatenate(scale).astype(np.int16)
        n = section.values
        basis = SectionBasis(torch.zeros(n), torch.ones(2, n), tuple(maps))
        freq = class_frequencies(np.arange(CLASSES)[:: 1 if index else -1] + 1.0)
        widths = np.linspace(3 - index, -40, CLASSES).round().astype(np.int16)
        learned.append(SectionProfile(basis, scales, None, freq, widths))
    return Profile(LAYOUT, group, "fitted", FAMILY, tuple(learned), min_step_index=-10 * 64)


@cache
def plan_of(group: str, device: torch.device) -> TransformPlan:
    return TransformPlan(profile_of(group), STEP, device, torch.float32)


def mix(tokens: int, kind: str, finest: int, seed: int = 0) -> U8:
    """Classes of tokens: all of one class, as different as can be, or as they come."""
    rng = np.random.default_rng(seed)
    if kind == "one":
        return np.full(tokens, max(NEUTRAL, finest), np.uint8)
    if kind == "each":
        return (finest + np.arange(tokens)[::-1] % (CLASSES - finest)).astype(np.uint8)
    return np.clip(np.round(rng.normal(8, 1.5, tokens)), finest, CLASSES - 1).astype(np.uint8)


@dataclass
class World:
    """Jobs whose tokens have classes; what they own lies apart."""

    plan: TransformPlan
    device: torch.device
    sections: list[int]
    jobs: npt.NDArray[np.int64]
    columns: U8
    order: U8
    y: list[F32]  # `[extent, T]` of each job, in coding order
    coded: list[tuple[U8, Escapes]]
    sizes: tuple[int, int]

    def of(self, job: int) -> ClassedPlan:
        return self.plan.coding[0][self.sections[job]].classed

    def own(self, job: int) -> U8:
        """Classes of the columns of a job."""
        first = self.jobs[job, JobField.COLUMNS]
        return self.columns[first : first + self.jobs[job, JobField.TOKENS]]

    def tensor(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array.copy()).to(self.device)

    def poison(self, count: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return torch.full((count * dtype.itemsize,), POISON, dtype=torch.uint8, device=self.device).view(dtype)

    @property
    def max_streams(self) -> int:
        return int(self.jobs[:, JobField.STREAMS].max())

    @property
    def max_tokens(self) -> int:
        return int(self.jobs[:, JobField.TOKENS].max())

    def planes_of(self, job: int) -> slice:
        row = self.jobs[job]
        count = self.plan.arrays.plans[row[JobField.DEEPEST], PlanField.PLANES] * row[JobField.TOKENS]
        return slice(row[JobField.PLANES], row[JobField.PLANES] + count)

    def place_planes(self) -> torch.Tensor:
        """The planes of all jobs; poison between them and below the last plane of a column."""
        out = self.poison(self.sizes[0])
        for job, (coded, _) in enumerate(self.coded):
            planes, own = coded.copy(), self.own(job)
            for k in np.unique(own):
                planes[self.of(job).planes[k] :, own == k] = POISON
            out[self.planes_of(job)] = self.tensor(planes.ravel())
        return out

    def place_y(self) -> torch.Tensor:
        out = torch.full((self.sizes[1],), float("nan"), device=self.device)
        for row, y in zip(self.jobs, self.y, strict=True):
            at, stride = row[[JobField.COEFFICIENTS, JobField.STRIDE]]
            out[at : at + len(y) * stride].view(len(y), stride)[:, : y.shape[1]] = self.tensor(y)
        return out

    def device_plans(self) -> DevicePlans:
        return self.plan.arrays.to(self.device)

    def coding(self) -> StreamJobs:
        plans = self.device_plans()
        return StreamJobs(self.tensor(self.jobs), plans.plans, plans.tables, self.max_streams)


def make_world(
    device: torch.device,
    jobs: Sequence[tuple[int, int, str, int]],
    group: str = "unit",
    seed: int = 0,
) -> World:
    """Jobs of (section, tokens, mix of classes, tokens per stream), coded by the reference."""
    plan = plan_of(group, device)
    rng = np.random.default_rng(seed)
    sections, tokens, per_stream = (np.array([job[i] for job in jobs], np.int64) for i in (0, 1, 3))
    classes = [
        mix(size, kind, int(plan.finest[0, section]), seed + number)
        for number, (section, size, kind, _) in enumerate(jobs)
    ]
    first, _ = running_offsets(tokens)
    columns, order, counts = sort_columns(np.concatenate(classes), first, tokens)
    deepest = plan.rows(sections, (counts > 0).argmax(1))
    plans, gaps = plan.arrays.plans[deepest], GAP * np.arange(1, len(jobs) + 1)
    planes, plane_bytes = place_planes(plans[:, PlanField.PLANES], tokens)
    at, stride, coefficients = place_coefficients(plans[:, PlanField.EXTENT], tokens)
    rows = job_table(
        len(jobs), tokens=tokens, plan=plan.rows(sections), deepest=deepest, columns=first, planes=planes + gaps,
        coefficients=at + gaps, stride=stride,
        **stream_fields(tokens, per_stream, plans[:, PlanField.PLANES], plan.most_planes[0, sections]),
    ).copy()  # fmt: skip
    room = GAP * (len(jobs) + 2)
    world = World(
        plan, device, sections.tolist(), rows, columns, order, [], [], (plane_bytes + room, coefficients + room)
    )
    for job in range(len(jobs)):
        y, coded = _coefficients(world, job, rng)
        world.y.append(y)
        world.coded.append(coded)
    return world


def _coefficients(world: World, job: int, rng: np.random.Generator) -> tuple[F32, tuple[U8, Escapes]]:
    """Coefficients in the rows of their blocks, as large as expected, and what the reference codes of them."""
    own, classed = world.own(job), world.of(job)
    section = world.sections[job]
    finest = int(world.plan.arrays.plans[world.jobs[job, JobField.DEEPEST], PlanField.EXTENT])
    y = rng.normal(0, 1e6, (finest, len(own))).astype(np.float32)  # what no column has may be anything
    dense = np.zeros((int(classed.rows[own].max(initial=0)), len(own)), np.float32)
    for k in np.unique(own):
        at = np.flatnonzero(own == k)
        rows = rows_of(world, section, int(k))
        spread = classed.steps[k] * 2.0 ** (
            classed.level_table[k, : len(rows)] / 4.0 - 2 + classed.shift[k, : len(rows)]
        )
        values = rng.laplace(0, 0.7 * spread[:, None], (len(rows), len(at))).astype(np.float32)
        values[rng.random(values.shape) < 0.05] *= 40  # some escape
        y[np.ix_(rows, at)] = values
        dense[: len(rows), at] = values
    return y, symbols.to_planes(dense, own, classed, FAMILY.quantizer, FAMILY.tables)


def rows_of(world: World, section: int, k: int) -> npt.NDArray[np.int64]:
    """Row of coefficients of each component of a class."""
    coding = world.plan.coding[0][section]
    begin = np.cumsum([0, *coding.class_ranks[coding.classed.finest]])
    parts = [b + np.arange(r) for b, r in zip(begin, coding.class_ranks[k], strict=False)]
    rows: npt.NDArray[np.int64] = np.concatenate(parts).astype(np.int64)
    return rows


# Sections, tokens, classes, tokens per stream; streams of a window fewer and more than lanes, and windows cut short.
WORLDS = {
    "small": [(0, 1, "one", 1), (1, 63, "each", 8), (0, 40, "mixed", 4)],
    "windows": [(1, 257, "each", 16), (0, 130, "mixed", 128), (1, 9, "one", 128)],
    "single": [(1, 40, "mixed", 1)],
}


@pytest.fixture(params=sorted(WORLDS))
def world(request: pytest.FixtureRequest, device: torch.device) -> World:
    return make_world(device, WORLDS[request.param])


def test_the_tables_of_classes(device: torch.device) -> None:
    for group in ("head", "unit", "layer"):
        plan = plan_of(group, device)
        arrays = plan.arrays
        assert plan.finest[0, 0] > 0 and (plan.planes[0, 0, : plan.finest[0, 0]] == 0).all()
        for section, own in enumerate(plan.coding[0]):
            for k in range(CLASSES):
                row = arrays.plans[plan.rows(section, k)]
                expected = own.classed.plans[k]
                count = 0 if expected is None else len(expected.shift)
                assert row[PlanField.ROWS] == count == own.classed.rows[k]
                assert row[PlanField.PLANES] == own.classed.planes[k]
                if expected is not None:
                    table = arrays.tables[row[PlanField.TABLES] :][: row[PlanField.PLANES]]
                    assert np.array_equal(table, own.classed.tables[k, : row[PlanField.PLANES]])
                assert arrays.steps[plan.rows(section, k)] == own.classed.steps[k]
                extent = row[PlanField.EXTENT]
                places = arrays.row_maps[row[PlanField.ROW_MAP] :][: sum(own.class_ranks[own.classed.finest])]
                assert (places[extent:] == -1).all() and sorted(places[places >= 0]) == list(range(count))
                assert extent == 0 or places[extent - 1] == count - 1
                ints = arrays.row_ints[row[PlanField.ROW] :][:count]
                assert np.array_equal(places[ints[:, 2]], np.arange(count))
    assert len(plan_of("head", device).coding[0][0].class_ranks[0]) > 1
    assert (plan_of("head", device).arrays.row_maps < 0).any()


def test_components_must_fall_with_the_class() -> None:
    scale = (-100 + 40 * np.arange(CLASSES)).astype(np.int16)
    rising = [replace(section, class_scale=scale) for section in profile_of("layer", top=6).learned]
    profile = Profile(LAYOUT, "layer", "fitted", FAMILY, tuple(rising), min_step_index=-640)
    with pytest.raises(ProfileError, match="coarser"):
        TransformPlan(profile, STEP, CPU, torch.float32)


# --- classes on the host


@pytest.mark.parametrize("kind", ["one", "each", "mixed"])
def test_class_streams_are_those_of_the_codec(kind: str, device: torch.device) -> None:
    plan = plan_of("unit", device)
    sizes = np.array([1, 63, 256, 257, 700])
    sections = np.arange(len(sizes)) % 2
    finest = plan.finest[0, sections]
    classes = [mix(size, kind, int(least), size) for size, least in zip(sizes.tolist(), finest, strict=True)]
    first, _ = running_offsets(sizes)
    words, fields = write_classes(np.concatenate(classes), first, sizes, plan.freq, sections)
    for job, (section, own) in enumerate(zip(sections, classes, strict=True)):
        want = rans.encode_classes(own, class_table(profile_of("unit").learned[section].class_freq))
        at = fields["class_words"][job]
        assert np.array_equal(words[at : at + fields["class_word_count"][job]], want.words)
        assert fields["class_state"][job] == want.states[0]
    names = [f"job {i}" for i in range(len(sizes))]
    back = read_classes(words.view(np.uint8), fields, first, sizes, plan.slots, sections, finest, names)
    assert np.array_equal(back, np.concatenate(classes))
    columns, order, counts = sort_columns(back, first, sizes)
    for begin, own, count in zip(first, classes, counts, strict=True):
        at = slice(begin, begin + len(own))
        want_order = coding_order(own)
        assert np.array_equal(order[at] + np.arange(len(own)) // WINDOW * WINDOW, want_order)
        assert np.array_equal(columns[at], own[want_order])
        assert np.array_equal(count, np.bincount(own, minlength=CLASSES))


@pytest.mark.parametrize(
    "change",
    [
        lambda fields, words: fields["class_state"].__setitem__(1, fields["class_state"][1] ^ 1),
        lambda fields, words: fields["class_word_count"].__setitem__(1, 0),
        lambda fields, words: fields["class_word_count"].__setitem__(1, fields["class_word_count"][1] + 1),
        lambda fields, words: words.__setitem__(slice(None), 0xFFFF),
    ],
)
def test_class_streams_that_lie(change: Callable[..., None], device: torch.device) -> None:
    plan, sections = plan_of("unit", device), np.zeros(3, np.int64)
    first, tokens, finest = np.array([0, 80, 160]), np.full(3, 80), plan.finest[0, sections]
    classes = np.concatenate([mix(80, "mixed", int(finest[0]), seed) for seed in range(3)])
    words, fields = write_classes(classes, first, tokens, plan.freq, sections)
    words = np.append(words, np.zeros(4, np.uint16))
    change(fields, words)
    names = ["job 0", "job 1", "job 2"]
    with pytest.raises(CorruptError, match="class stream of job"):
        read_classes(words.view(np.uint8), fields, first, tokens, plan.slots, sections, finest, names)


def test_a_class_that_is_not_served(device: torch.device) -> None:
    plan, one = plan_of("unit", device), np.zeros(1, np.int64)
    tokens, finest = np.full(1, 9), plan.finest[0, one]
    words, fields = write_classes(np.full(9, finest[0] - 1, np.uint8), one, tokens, plan.freq, one)
    with pytest.raises(FormatError, match=rf"job 0: must have token classes {finest[0]} … 15"):
        read_classes(words.view(np.uint8), fields, one, tokens, plan.slots, one, finest, ["job 0"])


# --- the entropy coder


def encoded(world: World, kernel: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """words, states and lengths; everything that is not written stays poison."""
    jobs = world.jobs
    plans = world.plan.arrays.plans
    planes = plans[jobs[:, JobField.DEEPEST], PlanField.PLANES]
    words = int((jobs[:, JobField.STREAMS] * jobs[:, JobField.PER_STREAM] * planes).sum())
    streams = int(jobs[:, JobField.STREAMS].sum())
    out = (
        world.poison(words, torch.uint16), world.poison(streams, torch.uint32), world.poison(streams, torch.uint32)
    )  # fmt: skip
    (rans_encode if kernel else rans_encode_reference)(
        world.place_planes(), world.coding(), world.tensor(coding_table(FAMILY.tables)), world.tensor(world.columns),
        EncodedStreams(*out),
    )  # fmt: skip
    return out


def streams_of(world: World, job: int) -> Streams:
    """By the reference."""
    planes, _ = world.coded[job]
    per_stream = int(world.jobs[job, JobField.PER_STREAM])
    return rans.rans_encode([SectionPlanes(planes, world.own(job), world.of(job), per_stream)], FAMILY.tables)[0]


@BOTH
def test_encodes_the_words_of_the_codec(world: World, kernel: bool) -> None:
    words, states, lengths = (tensor.cpu().numpy() for tensor in encoded(world, kernel))
    touched = np.zeros(len(words), bool)
    for job in range(len(world.jobs)):
        row, want = world.jobs[job], streams_of(world, job)
        at = slice(row[JobField.STATES], row[JobField.STATES] + row[JobField.STREAMS])
        assert np.array_equal(states[at], want.states) and np.array_equal(lengths[at], want.lengths)
        region = int(world.plan.arrays.plans[row[JobField.DEEPEST], PlanField.PLANES]) * row[JobField.PER_STREAM]
        ends = np.cumsum(want.lengths, dtype=np.int64)
        for s, (end, length) in enumerate(zip(ends, want.lengths, strict=True)):
            top = row[JobField.WORDS] + (s + 1) * region
            assert np.array_equal(words[top - length : top], want.words[end - length : end])
            touched[top - length : top] = True
    assert (words[~touched].view(np.uint8) == POISON).all()


def data_of(world: World, streams: Sequence[Streams]) -> npt.NDArray[np.uint8]:
    """States, lengths, words and escapes of all jobs with poison between them; sets the jobs' fields."""
    data = np.full(4 * GAP, POISON, np.uint8)
    for job, own in enumerate(streams):
        row, escapes = world.jobs[job], world.coded[job][1]
        row[JobField.LONG_LENGTHS], row[JobField.WORD_COUNT] = 0, len(own.words)
        row[JobField.ESCAPE_COUNT] = len(escapes.index)
        parts = []
        at = len(data)
        for field, part, unit in (
            (JobField.STATES, own.states, 4),
            (JobField.LENGTHS, own.lengths.astype(np.uint16), 2),
            (JobField.WORDS, own.words, 2),
            (JobField.ESCAPES, np.concatenate([escapes.index, escapes.value.view(np.uint32)]), 4),
        ):
            padding = -at % 4
            parts.append(np.full(padding, POISON, np.uint8))
            row[field] = (at + padding) // unit
            parts.append(part.view(np.uint8))
            at += padding + part.nbytes
        data = np.concatenate([data, *parts, np.full(-at % 4 + 4 * GAP, POISON, np.uint8)])
    return data


def decoded(world: World, data: npt.NDArray[np.uint8], kernel: bool) -> tuple[torch.Tensor, list[int]]:
    planes = world.poison(world.sizes[0])
    status = torch.zeros(len(world.jobs), dtype=torch.int32, device=world.device)
    decoding = DecodingTables(world.tensor(decoding_table(FAMILY.tables)), FAMILY.tables.prob_bits)
    (rans_decode if kernel else rans_decode_reference)(
        world.tensor(data), world.coding(), decoding, world.tensor(world.columns), planes, status
    )  # fmt: skip
    return planes, status.tolist()


@BOTH
def test_decodes_what_the_codec_wrote(world: World, kernel: bool) -> None:
    streams = [streams_of(world, job) for job in range(len(world.jobs))]
    planes, status = decoded(world, data_of(world, streams), kernel)
    assert torch.equal(planes, world.place_planes())
    assert status == [0] * len(world.jobs)


def test_damage_is_found_and_stays_in_its_job(device: torch.device) -> None:
    world = make_world(device, [(0, 20, "mixed", 4), (1, 70, "each", 2), (0, 33, "mixed", 8)])
    streams = [streams_of(world, job) for job in range(3)]
    streams[1] = Streams(streams[1].states, streams[1].lengths, ~streams[1].words)
    data = data_of(world, streams)
    planes, status = decoded(world, data, True)
    expected, expected_status = decoded(world, data, False)
    assert status == expected_status == [0, int(Status.STREAMS), 0]
    assert torch.equal(planes, expected)
    good, own = world.place_planes(), world.planes_of(1)
    good[own] = planes[own]
    assert torch.equal(planes, good)


# --- the quantizer


def dequantized(
    world: World, kernel: bool, dtype: torch.dtype, depth: int, data: npt.NDArray[np.uint8] | None = None
) -> tuple[torch.Tensor, list[int]]:
    if data is None:
        data = data_of(world, [streams_of(world, job) for job in range(len(world.jobs))])
    y = torch.full((world.sizes[1],), float("nan"), dtype=dtype, device=world.device)
    status, found = (torch.zeros(len(world.jobs), dtype=torch.int32, device=world.device) for _ in range(2))
    (dequantize if kernel else dequantize_reference)(
        world.tensor(data), world.tensor(world.jobs), world.device_plans(), world.tensor(world.columns),
        world.place_planes(), y, status, found, int(world.plan.arrays.plans[:, PlanField.EXTENT].max()),
        world.max_tokens, depth,
    )  # fmt: skip
    return y, status.tolist()


@pytest.mark.parametrize(
    ("group", "dtype"), [("head", torch.float32), ("unit", torch.bfloat16), ("layer", torch.float32)]
)
def test_dequantize_gives_the_bytes_of_the_reference(device: torch.device, group: str, dtype: torch.dtype) -> None:
    for jobs in (
        [(0, 64, "mixed", 4), (1, 63, "each", 8)],
        [(1, 257, "each", 16), (1, 272, "mixed", 8)],
    ):
        world = make_world(device, jobs, group)
        got, want = dequantized(world, True, dtype, 64), dequantized(world, False, dtype, 64)
        assert sum(len(e.index) for _, e in world.coded) > 0
        assert got[1] == want[1] == [0] * len(jobs)
        assert raw(got[0]) == raw(want[0])
        if dtype == torch.float32:
            for job in range(len(jobs)):
                assert_coefficients(world, job, want[0])


def assert_coefficients(world: World, job: int, y: torch.Tensor) -> None:
    """Every column holds in its rows what the codec says, and zero in the others of the first column of its 64."""
    own, classed, row = world.own(job), world.of(job), world.jobs[job]
    planes, escapes = world.coded[job]
    back = symbols.from_planes(planes, own, escapes, classed, FAMILY.quantizer, int(classed.rows[own].max())).numpy()
    extent = int(world.plan.arrays.plans[row[JobField.DEEPEST], PlanField.EXTENT])
    found = y[row[JobField.COEFFICIENTS] :][: extent * row[JobField.STRIDE]].view(extent, -1).cpu().numpy()
    for column, k in enumerate(own):
        rows = rows_of(world, world.sections[job], int(k))
        assert np.array_equal(found[rows, column], back[: len(rows), column])
        deepest = int(world.plan.arrays.plans[row[JobField.PLAN] + own[column // 64 * 64], PlanField.EXTENT])
        others = np.setdiff1d(np.arange(deepest), rows)
        assert (found[others, column] == 0).all() and np.isnan(found[deepest:, column]).all()


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("depth", [128, 256])
def test_zeros_reach_as_deep_as_the_columns_that_are_taken_together(device: torch.device, depth: int) -> None:
    world = make_world(device, [(1, 200, "mixed", 8)], "head")
    assert raw(dequantized(world, True, torch.float32, depth)[0]) == raw(
        dequantized(world, False, torch.float32, depth)[0]
    )


def test_an_escape_of_a_row_that_its_column_lacks(device: torch.device) -> None:
    world = make_world(device, [(0, 40, "mixed", 4), (1, 33, "mixed", 8)])
    streams = [streams_of(world, job) for job in range(2)]
    planes, escapes = world.coded[0]
    own = world.own(0)
    index, value = escapes.index.copy(), escapes.value
    # In place of the last one, of the coarsest column, which has fewer components than the finest.
    index[-1] = int(world.of(0).rows[own[-1]]) * len(own) + len(own) - 1
    order = np.argsort(index, kind="stable")
    world.coded[0] = (planes, Escapes(index[order], value[order]))
    data = data_of(world, streams)
    got, want = dequantized(world, True, torch.float32, 64, data), dequantized(world, False, torch.float32, 64, data)
    assert got[1] == want[1] == [int(Status.ESCAPES), 0]
    at = int(world.jobs[1, JobField.COEFFICIENTS])
    assert raw(got[0][at:]) == raw(want[0][at:]) and raw(got[0][:GAP]) == raw(want[0][:GAP])


def quantized(
    world: World, kernel: bool, y: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    max_rows = int(world.plan.arrays.plans[:, PlanField.ROWS].max())
    planes = world.poison(world.sizes[0])
    counts = torch.full((len(world.jobs), max_rows), -1, dtype=torch.int32, device=world.device)
    status = torch.zeros(len(world.jobs), dtype=torch.int32, device=world.device)
    (quantize if kernel else quantize_reference)(
        world.place_y() if y is None else y, world.tensor(world.jobs), world.device_plans(),
        CodableBytes(world.tensor(FAMILY.tables.freq), world.tensor(FAMILY.tables.reach)),
        world.tensor(world.columns), planes, counts, status, max_rows,
    )  # fmt: skip
    return planes, counts, status.tolist()


@BOTH
@pytest.mark.parametrize("group", ["head", "layer"])
def test_quantizes_to_the_bytes_of_the_codec(device: torch.device, group: str, kernel: bool) -> None:
    world = make_world(device, [(0, 40, "mixed", 4), (1, 63, "each", 8), (1, 260, "mixed", 8)], group)
    planes, counts, status = quantized(world, kernel)
    assert status == [0] * 3
    assert torch.equal(planes, world.place_planes())
    for job, (_, escapes) in enumerate(world.coded):
        rows = escapes.index // np.uint32(world.jobs[job, JobField.TOKENS])
        assert np.array_equal(counts[job].cpu().numpy(), np.bincount(rows, minlength=counts.shape[1]))
    flat = counts.flatten().to(torch.int64)
    total = int(flat.sum())
    starts = (flat.cumsum(0) - flat).view(counts.shape)
    index, value = world.poison(total + 5, torch.uint32), world.poison(total + 5, torch.int32)
    (list_escapes if kernel else list_escapes_reference)(
        world.place_y(), world.tensor(world.jobs), world.device_plans(), world.tensor(world.columns), planes, starts,
        index[:total], value[:total], counts.shape[1],
    )  # fmt: skip
    assert np.array_equal(index.cpu().numpy()[:total], np.concatenate([e.index for _, e in world.coded]))
    assert np.array_equal(value.cpu().numpy()[:total], np.concatenate([e.value for _, e in world.coded]))
    assert (index.cpu().numpy()[total:].view(np.uint8) == POISON).all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("bad", [1.0, -1.0, float("inf"), float("nan")])
def test_coefficients_too_large_for_their_class(device: torch.device, bad: float) -> None:
    world = make_world(device, [(0, 40, "mixed", 4), (1, 20, "mixed", 4)])
    own = world.own(0)
    column = len(own) - 1
    limit = MAX_LEVEL * float(world.of(0).steps[own[column]])
    y = world.place_y()
    at = int(world.jobs[0, JobField.COEFFICIENTS]) + column
    y[at] = np.nextafter(np.float32(limit), np.float32(0)).item()
    assert quantized(world, True, y)[2] == quantized(world, False, y)[2] == [0, 0]
    y[at] = limit * bad
    want = [int(Status.TOO_LARGE), 0]
    assert quantized(world, True, y)[2] == quantized(world, False, y)[2] == want


# --- the linear maps


@pytest.mark.parametrize("group", ["head", "layers:2"])
def test_analyze_in_the_order_of_columns(device: torch.device, group: str) -> None:
    plan = plan_of(group, device)
    sections = len(plan.learned)
    world = make_world(device, [(s, 70, "each" if s else "mixed", 4) for s in range(sections)], group)
    x = torch.randn(70, plan.geometry.tiles.columns, generator=torch.Generator().manual_seed(0)).to(device)
    chunks = torch.tensor([[70, 0, 0, 0]], device=device)
    order_of = TokenOrder(world.tensor(world.columns), world.tensor(world.order), plan.block_ranks)
    status = torch.zeros(sections, dtype=torch.int32, device=device)
    batch = ChunkBatch(chunks, status, sections, 0, 70)
    maps = plan.maps
    out = []
    for run in (analyze, analyze_reference):
        y = torch.full((world.sizes[1],), float("nan"), device=device)
        run(
            x, world.tensor(world.jobs), maps.device_blocks, maps.forward, batch, y,
            max_rank=int(maps.blocks[:, 2].max()), order=order_of,
        )  # fmt: skip
        out.append(y)
    assert torch.equal(out[0].isnan(), out[1].isnan())
    torch.testing.assert_close(out[0].nan_to_num(), out[1].nan_to_num(), rtol=1e-5, atol=1e-5)
    own = world.own(0)
    at = int(world.jobs[0, JobField.COEFFICIENTS])
    stride = int(world.jobs[0, JobField.STRIDE])
    order = torch.from_numpy(world.order[:70].astype(np.int64)).to(device)
    coefficients = _section_coefficients(plan, x, 0)
    for k in np.unique(own):
        columns_of = torch.from_numpy(np.flatnonzero(own == k)).to(device)
        wanted = plan.coding[0][0].class_ranks[int(k)]
        first = 0
        for row, (rank, block) in enumerate(zip(wanted, coefficients, strict=True)):
            deepest = plan.coding[0][0].class_ranks[plan.coding[0][0].classed.finest][row]
            got = out[0][at + first * stride :][: rank * stride].view(rank, stride)[:, columns_of]
            torch.testing.assert_close(got, block[:rank, order[columns_of]], rtol=1e-4, atol=1e-4)
            first += deepest


def _section_coefficients(plan: TransformPlan, x: torch.Tensor, section: int) -> list[torch.Tensor]:
    """All coefficients of each block, by the profile's own bases."""
    tiles = plan.geometry.tiles
    first, end = tiles.bounds[section], tiles.bounds[section + 1]
    order = torch.from_numpy(tiles.order[first:end]).long().to(x.device)
    basis = plan.profile.learned[section].basis
    values = torch.zeros(len(x), len(basis.mean), device=x.device)
    values[:, order[order >= 0]] = x[:, first:end][:, order >= 0]
    parts, column = [], 0
    for matrix in basis.forward:
        size = matrix.shape[1]
        parts.append(matrix.to(x.device) @ values[:, column : column + size].T)
        column += size
    return parts


# --- all of it


BACK = {"bfloat16": 2**-6, "float16": 2**-9, "float32": 2**-15}


def on(device: torch.device, chunk: KVChunk) -> KVChunk:
    return KVChunk([k.to(device) for k in chunk.keys], [v.to(device) for v in chunk.values], chunk.layout, chunk.start)


def assert_close(got: KVChunk, want: KVChunk, rounding: float) -> None:
    for a, b in zip([*got.keys, *got.values], [*want.keys, *want.values], strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert float((a.cpu().float() - b.float()).abs().max()) <= rounding * float(b.float().abs().max())


def classes_of(blob: bytes, profile: Profile, codec: Codec) -> list[U8]:
    """Of each section the classes of the tokens."""
    header = read_header(blob)
    out = []
    for index, learned in enumerate(profile.learned):
        part = read_part(read_section(blob, header, index), learned.classed_plan(codec.step_index), header.tokens)
        out.append(rans.decode_classes(part.classes, class_table(learned.class_freq), header.tokens))
    return out


CASES = [
    ("bfloat16", "layer"), ("irregular", "unit"), ("mqa", "head"), ("interleaved", "all"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "group"), CASES)
def test_both_backends_read_what_the_other_wrote(
    device: torch.device, layouts: dict[str, KVLayout], make_chunk: Any, fitted: Any, name: str, group: str,
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    if name != "irregular":
        request.getfixturevalue("plain_coder")
    profile = with_classes(fitted(name, group))
    cpu, triton = Codec(profile, step=1.0), Codec(profile, step=1.0, backend="triton")
    chunk = make_chunk(layouts[name], 8, start=2)
    blob, mine = cpu.encode(chunk), triton.encode(on(device, chunk))
    assert all(len(np.unique(own)) > 3 for own in classes_of(blob, profile, cpu))
    for own, expected in zip(classes_of(mine, profile, cpu), classes_of(blob, profile, cpu), strict=True):
        assert np.array_equal(own, expected)
    assert abs(len(mine) - len(blob)) <= 0.01 * len(blob)
    rounding = BACK[layouts[name].dtype]
    assert_close(triton.decode(mine, 500, device=device), cpu.decode(mine, 500), rounding)
    if name != "irregular":
        assert_close(
            triton.decode(blob, tokens=range(3, 7), device=device), cpu.decode(blob, tokens=range(3, 7)), rounding
        )
        return
    want, got = decoded_layers(cpu, blob, range(1, 2)), decoded_layers(triton, blob, range(1, 2), device=device)
    for a, b in zip([*got[0], *got[1]], [*want[0], *want[1]], strict=True):
        assert float((a.cpu().float() - b.float()).abs().max()) <= rounding * float(b.float().abs().max())


@pytest.mark.usefixtures("plain_coder")
def test_more_than_a_window(device: torch.device) -> None:
    profile = with_classes(profile_of("unit"))
    cpu, triton = Codec(profile, step=1.0), Codec(profile, step=1.0, backend="triton")
    noise = torch.Generator().manual_seed(0)
    units = [[40 * torch.randn(300, n.kv_heads, d, generator=noise) for n, d in sizes] for sizes in sizes_of(LAYOUT)]
    chunk = KVChunk(units[0], units[1], LAYOUT, 0)
    blob, mine = cpu.encode(chunk), triton.encode(on(device, chunk))
    assert abs(len(mine) - len(blob)) <= 0.01 * len(blob)
    assert_close(triton.decode(mine, device=device), cpu.decode(mine), BACK["float32"])


def sizes_of(layout: KVLayout) -> list[list[tuple[LayerLayout, int]]]:
    return [[(layer, getattr(layer, name)) for layer in layout.layers] for name in ("head_dim", "value_dim")]


def predicting(profile: Profile, sections: Sequence[int] | None = None) -> Profile:
    """The profile with predictors in some of its sections."""
    rng = np.random.default_rng(0)
    learned = []
    for index, section in enumerate(profile.learned):
        if sections is not None and index not in sections:
            learned.append(section)
            continue
        count = min(7 + index, len(section.scale))
        chosen = np.sort(rng.permutation(len(section.scale))[:count]).astype(np.int32)
        scale = np.exp2(section.scale[chosen] / 64).astype(np.float32)
        weights = rng.normal(0, 0.4, (2, count)).astype(np.float32)
        predictor = Predictor(
            chosen, scale, weights[0], weights[1], 0.05, 0.3, np.array([-1.5, -0.5, 0.1][: 2 + index % 2], np.float32),
            np.zeros(count + 1, np.float32), np.array([2.0, 1.5, 0.5, 0.0][index % 2 :], np.float32),
        )  # fmt: skip
        freq = class_frequencies(np.exp2(-np.abs(np.arange(CLASSES) - 7.0)))
        learned.append(replace(section, predictor=predictor, class_freq=freq))
    return Profile(
        profile.layout,
        profile.group,
        profile.source,
        profile.family,
        tuple(learned),
        min_step_index=profile.min_step_index,
        token_table=profile.token_table,
    )


@pytest.mark.usefixtures("plain_coder")
@pytest.mark.parametrize("group", ["head", "layer"])
def test_the_predictor_of_the_profile(
    device: torch.device, layouts: dict[str, KVLayout], make_chunk: Any, fitted: Any, group: str
) -> None:
    """Sections that predict, and one that does not, in one batch."""
    layout = layouts["gqa"]
    profile = predicting(fitted("gqa", group), (0, 2))
    cpu, triton = Codec(profile, step=1.0), Codec(profile, step=1.0, backend="triton")
    chunks = [make_chunk(layout, tokens, seed, start) for seed, (tokens, start) in enumerate(((5, 1), (8, 0), (4, 7)))]
    device_chunks = [on(device, chunk) for chunk in chunks]
    pages = Pages(layout, device)
    mixed = torch.randperm(64, generator=torch.Generator().manual_seed(0)).to(device)
    slots = [mixed[:5], mixed[20:28], mixed[40:44]]
    for chunk, at in zip(device_chunks, slots, strict=True):
        pages.cache.write(chunk.keys, chunk.values, at)
    blobs = triton.encode(PagedChunks(pages.cache, slots, [1, 0, 7]))
    wanted = [cpu.encode(chunk) for chunk in chunks]
    for mine, theirs in zip(blobs, wanted, strict=True):
        own, expected = classes_of(mine, profile, cpu), classes_of(theirs, profile, cpu)
        assert [len(np.unique(c)) > 1 for c in own] == [True, False, True]
        for a, b in zip(own, expected, strict=True):
            assert np.abs(a.astype(int) - b.astype(int)).sum() <= 1  # an offset between two classes
        assert abs(len(mine) - len(theirs)) <= 0.01 * len(theirs) + 8
        assert_close(cpu.decode(mine), cpu.decode(theirs), 0.1)
    target, expected_pages = Pages(layout, device), Pages(layout, CPU)
    starts = [100, 0, 2000]
    triton.decode_paged(wanted, target.cache, slots, starts).check()
    cpu.decode_paged(wanted, expected_pages.cache, [at.cpu() for at in slots], starts).check()
    for x, y in zip(target.memory, expected_pages.memory, strict=True):
        assert float((x.cpu() - y).abs().max()) <= BACK["float32"] * float(y.abs().max())
        assert bool(((x.cpu() == 7) == (y == 7)).all())


class Pages:
    """A cache of sevens, blocks of 16 tokens."""

    def __init__(self, layout: KVLayout, device: torch.device, dtype: torch.dtype | None = None) -> None:
        layer = layout.layers[0]
        shape = (4, 16, layer.kv_heads, 2 * layer.head_dim)
        self.memory = [torch.full(shape, 7.0).to(dtype or layout.torch_dtype).to(device) for _ in layout.layers]
        scales = [0.5] * layout.num_layers if dtype else None
        halves = [memory.chunk(2, 3) for memory in self.memory]
        self.cache = PagedCache(layout, [k for k, _ in halves], [v for _, v in halves], scales, scales)


def test_offsets_are_those_of_the_predictor(device: torch.device, fitted: Any, layouts: dict[str, KVLayout]) -> None:
    profile = predicting(fitted("gqa", "head"), (0, 2))
    plan = TransformPlan(profile, STEP, device, torch.float32)
    predictor = DevicePredictor(plan.coding[0], plan.geometry.tiles, device)
    x = 3 * torch.randn(12, plan.geometry.tiles.columns, generator=torch.Generator().manual_seed(1)).to(device)
    chunks = np.array([[7, 0, 0, 0], [5, 7, 1, 1]], np.int64)
    jobs, positions, levels = (torch.from_numpy(array.copy()).to(device) for array in predictor.place(chunks, [0, 30]))
    status = torch.zeros(len(jobs), dtype=torch.int32, device=device)
    batch = ChunkBatch(torch.from_numpy(chunks).to(device), status, len(profile.learned), 0, 7)
    found = predictor.offsets(x, jobs, batch, positions, levels)
    for row, section in enumerate(predictor.sections):
        own = profile.learned[section].predictor
        assert own is not None
        y = torch.cat(_section_coefficients(plan, x, int(section)))[torch.from_numpy(own.components).long()].cpu()
        first, second = finer_near_end(own.recency, 0, 7, 0), finer_near_end(own.recency, 1, 5, 30)
        assert float(first[-1]) > float(second[-1]) > 0
        want = torch.cat([own.offsets(y[:, :7], 0, 0, first), own.offsets(y[:, 7:], 1, 0, second)])
        torch.testing.assert_close(found[row].cpu(), want, rtol=1e-4, atol=1e-4)


def test_offsets_are_those_of_values_with_their_predictions(
    device: torch.device, fitted: Any, layouts: dict[str, KVLayout]
) -> None:
    profile = predicting(with_sinks(with_token_table(fitted("gqa", "head"))), (0, 2))
    plan = TransformPlan(profile, STEP, device, torch.float32, True)
    predictor = DevicePredictor(plan.coding[0], plan.geometry.tiles, device)
    x = 3 * torch.randn(12, plan.geometry.tiles.columns, generator=torch.Generator().manual_seed(1)).to(device)
    ids, sections = np.random.default_rng(0).integers(0, VOCABULARY, 12), range(len(profile.learned))
    assert plan.token_centers is not None
    arrays = plan.token_centers.lay_out([TokenRun(ids[:7], 0), TokenRun(ids[7:], 1)])
    sent = SentArrays(*(torch.from_numpy(array).to(device) for array in arrays))
    centers = plan.token_centers.centers(sent, sections)
    chunks = np.array([[7, 0, 0, 0], [5, 7, 1, 1]], np.int64)
    jobs, positions, levels = (torch.from_numpy(array.copy()).to(device) for array in predictor.place(chunks, [0, 0]))
    status = torch.zeros(len(jobs), dtype=torch.int32, device=device)
    batch = ChunkBatch(torch.from_numpy(chunks).to(device), status, len(sections), 0, 7)
    # Not rounded to bfloat16, as on the CPU.
    predicted = torch.zeros(len(arrays.position), plan.geometry.tiles.columns)
    for index, section in enumerate(plan.learned):
        own = slice(int(plan.geometry.tiles.bounds[index]), int(plan.geometry.tiles.bounds[index + 1]))
        token_map = section.token_map
        assert token_map is not None
        embedding = torch.from_numpy(arrays.embedding * arrays.row_scale[:, None])
        exact = embedding @ (token_map.weights * token_map.scale)
        exact[torch.from_numpy(arrays.position) < len(section.basis.sinks)] = 0
        predicted[:, own] = plan.geometry.tiles.pack(exact, index)
    whole = x + predicted.to(device)[centers.rows.long()]
    found = predictor.offsets(x, jobs, batch, positions, levels, centers)
    plain = predictor.offsets(x, jobs, batch, positions, levels)
    torch.testing.assert_close(found, predictor.offsets(whole, jobs, batch, positions, levels), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(found, plain, atol=1e-2)


@pytest.mark.usefixtures("plain_coder")
@pytest.mark.parametrize("predictor", [False, True])
def test_classes_of_tokens_that_are_predicted(
    device: torch.device, layouts: dict[str, KVLayout], make_chunk: Any, fitted: Any, predictor: bool
) -> None:
    profile = with_sinks(with_token_table(fitted("gqa", "layer")))
    profile = predicting(profile) if predictor else with_classes(profile)
    cpu, triton = Codec(profile, step=1.0), Codec(profile, step=1.0, backend="triton")
    chunk, ids = make_chunk(layouts["gqa"], 70, start=1), np.random.default_rng(0).integers(0, VOCABULARY, 70)
    blob = cpu.encode(chunk, tokens=ids)
    mine = triton.encode(on(device, chunk), tokens=ids)
    for own, expected in zip(classes_of(mine, profile, cpu), classes_of(blob, profile, cpu), strict=True):
        assert len(own) == 70 and len(np.unique(own)) > 3
        assert np.abs(own.astype(int) - expected.astype(int)).sum() <= 1  # an offset between two classes
    assert abs(len(mine) - len(blob)) <= 0.01 * len(blob) + 8
    for each in (blob, mine):
        assert_close(triton.decode(each, 500, device=device), cpu.decode(each, 500), BACK["float32"])


@pytest.mark.usefixtures("plain_coder")
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, None])
def test_caches_of_other_dtypes(
    device: torch.device, layouts: dict[str, KVLayout], make_chunk: Any, fitted: Any, dtype: torch.dtype | None
) -> None:
    layout = layouts["bfloat16"]
    profile = with_classes(fitted("bfloat16", "layer"))
    cpu, triton = Codec(profile, step=0.25), Codec(profile, step=0.25, backend="triton")
    blob = cpu.encode(make_chunk(layout, 11))
    got, want = Pages(layout, device, dtype), Pages(layout, CPU, dtype)
    at = torch.randperm(64, generator=torch.Generator().manual_seed(3))[:11]
    triton.decode_paged([blob], got.cache, [at.to(device)]).check()
    cpu.decode_paged([blob], want.cache, [at]).check()
    for a, b in zip(got.memory, want.memory, strict=True):
        limit = (2**-3 if dtype else 2**-6) * float(b.float().abs().max())
        assert float((a.cpu().float() - b.float()).abs().max()) <= limit


@pytest.mark.usefixtures("plain_coder")
def test_a_shard_codes_classes(
    device: torch.device, layouts: dict[str, KVLayout], make_chunk: Any, fitted: Any
) -> None:
    profile = with_classes(fitted("gqa", "head"), every=True).shard(1, 2)
    cpu, triton = Codec(profile, step=0.25), Codec(profile, step=0.25, backend="triton")
    whole = make_chunk(layouts["gqa"], 10)
    chunk = KVChunk([k[:, 1:] for k in whole.keys], [v[:, 1:] for v in whole.values], profile.layout, 0)
    mine = triton.encode(on(device, chunk))
    assert abs(len(mine) - len(cpu.encode(chunk))) <= 8
    assert_close(triton.decode(mine, device=device), cpu.decode(mine), BACK["float32"])


def test_coarsest_and_finest_of_all(device: torch.device) -> None:
    """Weights of zero make a token as coarse as there is, where nothing may be coded of it."""
    plain = profile_of("head", top=3)
    noise = torch.Generator().manual_seed(0)
    units = [[torch.randn(20, n.kv_heads, d, generator=noise) for n, d in sizes] for sizes in sizes_of(LAYOUT)]
    chunk = KVChunk(units[0], units[1], LAYOUT, 5)
    for weights in (torch.tensor([1.0] + [0.0] * 19), torch.tensor([1.0, 1e9] * 10)):
        profile = with_classes(plain, weights, 5)
        cpu, triton = Codec(profile, step=1.0), Codec(profile, step=1.0, backend="triton")
        blob, mine = cpu.encode(chunk), triton.encode(on(device, chunk))
        assert mine == blob
        assert_close(triton.decode(blob, device=device), cpu.decode(blob), BACK["float32"])
