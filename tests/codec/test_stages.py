"""The stages that turn coefficients into streams: order, planes, rANS. Each implementation against the reference."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.codec.planned import same_escapes, same_streams, various_tables
from tests.codec.reference import get_stages, rans, stage_names, symbols
from tests.codec.reference.token_order import coding_order

from cuvee.codec.entropy.coding_plan import MAX_LEVEL, MAX_SHIFT, CodingPlan, Quantizer
from cuvee.codec.entropy.family import TABLES, coding_plan, default_family
from cuvee.codec.entropy.tables import SYMBOLS, TOTAL, EntropyTables
from cuvee.codec.entropy.token_classes import (
    CLASSES,
    NEUTRAL,
    ClassedPlan,
    ColumnPlan,
    SectionPlanes,
    one_class,
)
from cuvee.codec.format.streams import Escapes, Streams
from cuvee.codec.stages.stages import Stages
from cuvee.codec.support.arrays import I32, U8, U16

FAMILY = default_family()
TOKENS = (1, 15, 63, 255, 256, 257, 700)
WIDEST = TABLES - 1 + 4 * MAX_SHIFT


@pytest.fixture(params=stage_names())
def stages(request: pytest.FixtureRequest) -> Stages:
    return get_stages(request.param)


@pytest.mark.parametrize(
    ("tokens", "rows", "known"), [(0, 5, 3), (63, 0, 3), (256, 5, None), (257, 5, 3), (257, 3, 5), (1000, 5, 5)]
)
def test_tokens_are_arranged_in_that_order(stages: Stages, tokens: int, rows: int, known: int | None) -> None:
    rng = np.random.default_rng(tokens)
    for classes in (rng.integers(0, CLASSES, tokens).astype(np.uint8), np.full(tokens, CLASSES - 1, np.uint8)):
        x = torch.from_numpy(rng.normal(size=(tokens, 7)).astype(np.float32))
        leading = None if known is None else torch.from_numpy(rng.normal(size=(known, tokens)).astype(np.float32))
        order = coding_order(classes)
        columns, ordered, y = stages.arrange(classes, x.clone(), leading, rows)
        assert columns.dtype == np.uint8 and np.array_equal(columns, classes[order])
        assert torch.equal(ordered, x[order]) and y.shape == (rows, tokens)
        for got, want in zip(y, () if leading is None else leading[:, order], strict=False):
            assert torch.equal(got, want)
        y.fill_(7)
        assert torch.equal(ordered, x[order]), "coefficients have room of their own"


@dataclass(frozen=True)
class Case:
    """Symbols that follow their tables, and how they are to be coded."""

    section: SectionPlanes
    tables: EntropyTables

    def encode(self, stages: Stages) -> Streams:
        return stages.rans_encode([self.section], self.tables)[0]

    def check(self, streams: Streams) -> None:
        """The reference decodes these to the planes of the case; what is below a column's last one does not count."""
        own = self.section
        planes = rans.rans_decode(streams, own.columns, own.plan, self.tables, own.tokens_per_stream)
        coded = np.arange(len(planes))[:, None] < own.plan.planes[own.columns]
        assert planes.shape == own.planes.shape and np.array_equal(planes[coded], own.planes[coded])


def make_case(depths: list[int], tokens: int, n: int, seed: int = 0) -> Case:
    """Columns of as many classes as there are depths, which fall from class to class."""
    rng = np.random.default_rng(seed)
    tables = various_tables()
    plan = ColumnPlan(
        np.array(depths, np.int32), rng.integers(0, len(tables), (len(depths), depths[0])).astype(np.uint16)
    )
    classes = rng.integers(0, len(depths), tokens).astype(np.uint8)
    columns = classes[coding_order(classes)]
    slot = rng.integers(0, TOTAL, (depths[0], tokens))
    planes = (tables.slots[plan.tables[columns].T, slot] >> 24).astype(np.uint8)
    return Case(SectionPlanes(planes, columns, plan, n), tables)


@settings(max_examples=40, deadline=None)
@given(
    depths=st.lists(st.integers(0, 6), min_size=1, max_size=16),
    tokens=st.integers(1, 300),
    n=st.sampled_from([1 << log2 for log2 in range(8)]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_columns_come_back(depths: list[int], tokens: int, n: int, seed: int) -> None:
    case = make_case(sorted(depths, reverse=True), tokens, n, seed)
    want = case.encode(get_stages("reference"))
    case.check(want)
    for name in stage_names():
        same_streams(case.encode(get_stages(name)), want)


def test_planes_are_read_wherever_they_lie(stages: Stages) -> None:
    case = make_case([6, 3], 77, 4)
    want, planes = case.encode(stages), case.section.planes
    whole = np.full(planes.size + 40, 0xFF, np.uint8)
    for place in (whole[: planes.size], whole[3 : planes.size + 3]):
        own = place.reshape(planes.shape)
        own[:] = planes
        same_streams(replace(case, section=replace(case.section, planes=own)).encode(stages), want)
    for wide in (np.zeros((planes.shape[0], 99), np.uint8)[:, :77], np.zeros((planes.shape[0] + 9, 77), np.uint8)[9:]):
        wide[:] = planes
        same_streams(replace(case, section=replace(case.section, planes=wide)).encode(stages), want)


def test_fixed_input_gives_these_words(stages: Stages) -> None:
    """They may not change without a new format version."""
    freq = np.zeros((2, SYMBOLS), np.uint16)
    freq[0, [0, 1, 2, 255]] = 2048, 1024, 512, 512
    freq[1, [7, 9]] = 4095, 1
    planes = np.array(
        [
            [7, 7, 7, 9, 9, 9, 7],
            [1, 2, 255, 0, 0, 1, 1],
            [255, 0, 1, 2, 2, 0, 255],
            [255, 255, 2, 1, 0, 0, 2],
        ],
        np.uint8,
    )
    plan = ColumnPlan(np.array([4, 3], np.int32), np.array([[1, 0, 0, 0]] * 2, np.uint16))
    case = Case(SectionPlanes(planes, np.array([0] * 5 + [1] * 2, np.uint8), plan, 4), EntropyTables(freq))
    streams = case.encode(stages)
    assert [hex(x) for x in streams.states] == ["0x41fea2", "0x107ce7b"]
    assert streams.lengths.tolist() == [2, 2]
    assert [hex(x) for x in streams.words] == ["0xd83c", "0x5403", "0x9480", "0xfff"]
    case.check(streams)


def test_a_state_at_the_very_limit_gives_up_a_word(stages: Stages) -> None:
    # Byte 0 of one raw bit doubles the state: 2**16 becomes 2**31 in 15 steps, and that is frequency << 20 exactly.
    for steps, state, words in ((15, 1 << 31, []), (16, 1 << 16, [0]), (31, 1 << 31, [0]), (32, 1 << 16, [0, 0])):
        plan = one_class(np.full(steps, 4, np.uint16))
        case = Case(SectionPlanes(np.zeros((steps, 1), np.uint8), np.zeros(1, np.uint8), plan, 1), various_tables())
        streams = case.encode(stages)
        assert (streams.states.tolist(), streams.words.tolist()) == ([state], words)
        case.check(streams)


def test_a_quotient_that_float32_gives_too_small_is_corrected(stages: Stages) -> None:
    freq = np.zeros((1, SYMBOLS), np.uint16)
    freq[0, :7] = 515, 1790, 895, 447, 7, 3, 439
    planes, columns = np.array([[0, 3, 0, 2, 0, 5, 0, 3]], np.uint8).T, np.zeros(1, np.uint8)
    case = Case(SectionPlanes(planes, columns, one_class(np.zeros(8, np.uint16)), 1), EntropyTables(freq))
    # Symbols are coded from the last to the first, which meets a multiple of its frequency.
    rest = replace(case.section, planes=planes[1:], plan=one_class(np.zeros(7, np.uint16)))
    (state,) = Case(rest, case.tables).encode(get_stages("reference")).states.tolist()
    assert state % 515 == 0 and int(np.float32(state) / np.float32(515)) == state // 515 - 1
    streams = case.encode(stages)
    assert streams.states.tolist() == [state // 515 << 12]
    case.check(streams)


def quantizer(seed: int = 0) -> Quantizer:
    """Different thresholds and reconstructions for every table."""
    rng = np.random.default_rng(seed)
    rounding = rng.uniform(0.25, 0.5, TABLES).astype(np.float32)
    dead = (1 - rounding + rng.uniform(0, 0.2, TABLES)).astype(np.float32)
    return Quantizer(dead, rounding, rng.uniform(-0.25, 0.25, (TABLES, 2)).astype(np.float32))


def same_plan(codes: list[int], tables: U16 | None = None) -> ClassedPlan:
    """A plan in which the neutral class has components of these scale codes, and the only one: its step is 1."""
    own = coding_plan(np.array(codes, np.int32))
    own = own if tables is None else CodingPlan(own.level_table, own.shift, tables)
    return ClassedPlan([None] * NEUTRAL + [own] * (CLASSES - NEUTRAL), 0)


def to_planes(
    stages: Stages, levels: list[list[int]], plan: ClassedPlan, tables: EntropyTables = FAMILY.tables
) -> tuple[U8, Escapes]:
    """Planes and escapes of levels at step 1: of columns of the neutral class."""
    y = np.array(levels, np.float32)
    return stages.to_planes(y, np.full(y.shape[1], NEUTRAL, np.uint8), plan, FAMILY.quantizer, tables)


def test_the_thresholds_themselves_are_quantized_alike(stages: Stages) -> None:
    own, plan = quantizer(1), same_plan(np.linspace(0, WIDEST, 57).round().astype(int).tolist())
    table = plan.of(NEUTRAL).level_table
    edge = np.stack([own.dead_zone, 1 - own.rounding, 2 - own.rounding, 7 - own.rounding], axis=1)[table]
    below, above = np.nextafter(edge, np.float32(0)), np.nextafter(edge, np.float32(9))
    y = np.concatenate([edge, below, above, -edge, -below], axis=1)
    columns = np.full(y.shape[1], NEUTRAL, np.uint8)
    planes, escapes = stages.to_planes(y, columns, plan, own, FAMILY.tables)
    want, listed = symbols.to_planes(y, columns, plan, own, FAMILY.tables)
    np.testing.assert_array_equal(planes, want)
    same_escapes(escapes, listed)
    levels = symbols.unpack(planes, escapes, plan.of(NEUTRAL))
    assert (levels[:, 0] == 1).all() and (levels[:, 4] == 0).all()
    np.testing.assert_array_equal(levels[:, 12:], -levels[:, :8])


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.integers(1 - MAX_LEVEL, MAX_LEVEL - 1) | st.integers(-140, 140), min_size=1, max_size=40),
    code=st.integers(0, WIDEST),
)
def test_any_levels_come_back(values: list[int], code: int) -> None:
    plan = same_plan([code, 0])
    for name in stage_names():
        planes, escapes = to_planes(get_stages(name), [values, values[::-1]], plan)
        got: I32 = symbols.unpack(planes, escapes, plan.of(NEUTRAL))
        assert got.tolist() == [values, values[::-1]]
