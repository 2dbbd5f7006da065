"""Quantizer and planes: every backend writes the bytes of the reference, which reads all of it back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuvee.codec.entropy.coding_plan import ESCAPE, MAX_LEVEL, MAX_SHIFT, CodingPlan, Escapes, Quantizer
from cuvee.codec.entropy.family import TABLES, coding_plan, default_family
from cuvee.codec.entropy.tables import EntropyTables
from cuvee.codec.errors import CorruptError
from cuvee.codec.stages.implementations import Stages, get_stages, stage_names
from cuvee.codec.stages.reference import symbols
from cuvee.codec.support.arrays import F32, I32, U8

FAMILY = default_family()
SIZES = [(1, 1), (1, 63), (3, 64), (7, 65), (13, 5), (57, 17)]
WIDEST = TABLES - 1 + 4 * MAX_SHIFT


@pytest.fixture(params=stage_names())
def backend(request: pytest.FixtureRequest) -> Stages:
    return get_stages(request.param)


def test_levels_leave_room_in_32_bits() -> None:
    """A level plus half a range of low bits stays inside int32, which the compiled loops count in."""
    assert MAX_LEVEL < 1 << 30


def plan_of(rows: int, seed: int = 0) -> CodingPlan:
    """Rows from the narrowest table to the widest component, in no order."""
    rng = np.random.default_rng(seed)
    return coding_plan(rng.permutation(np.linspace(0, WIDEST, rows).round().astype(np.int32)))


def quantizer(seed: int = 0) -> Quantizer:
    """Different thresholds and reconstructions for every table."""
    rng = np.random.default_rng(seed)
    rounding = rng.uniform(0.25, 0.5, TABLES).astype(np.float32)
    dead = (1 - rounding + rng.uniform(0, 0.2, TABLES)).astype(np.float32)
    return Quantizer(dead, rounding, rng.uniform(-0.25, 0.25, (TABLES, 2)).astype(np.float32))


def coefficients(rows: int, tokens: int, step: float, seed: int = 0) -> F32:
    """Values on and next to every threshold, both zeros, tiny and huge ones, among ordinary ones."""
    rng = np.random.default_rng(seed)
    y = (rng.laplace(0, 3 * step, (rows, tokens))).astype(np.float32)
    special = np.array([0.0, -0.0, 1e-40, -1e-40, 0.5, -0.5, 0.6, 1.0, -1.0, 1.6, 127.5, -128.5, 3e4, -1e6], np.float32)
    flat = y.ravel()
    where = rng.permutation(flat.size)[: len(special)]
    flat[where] = special[: len(where)] * np.float32(step)
    return y


def levels(rows: int, tokens: int, seed: int = 0) -> I32:
    rng = np.random.default_rng(seed)
    q = np.rint(rng.standard_t(1.5, (rows, tokens)) * 20).clip(-MAX_LEVEL, MAX_LEVEL).astype(np.int32)
    extremes = np.array([MAX_LEVEL, -MAX_LEVEL, 127, 128, -127, -128, -129, 0], np.int32)
    where = rng.permutation(q.size)[: len(extremes)]
    q.ravel()[where] = extremes[: len(where)]
    return q


def same(got: np.ndarray[tuple[int, ...], np.dtype[np.generic]], want: object) -> None:
    assert isinstance(want, np.ndarray)
    assert got.dtype == want.dtype and got.shape == want.shape and got.tobytes() == want.tobytes()


# --- every backend is the reference


@pytest.mark.parametrize("step", [1.0, 0.3, 2.0**-13 / 3, 777.0])
@pytest.mark.parametrize(("rows", "tokens"), SIZES)
def test_quantize_is_the_reference(backend: Stages, rows: int, tokens: int, step: float) -> None:
    plan, y = plan_of(rows), coefficients(rows, tokens, step)
    same(backend.quantize(y, step, plan, quantizer()), symbols.quantize(y, step, plan, quantizer()))


def test_quantize_agrees_on_the_thresholds_themselves(backend: Stages) -> None:
    own = quantizer(1)
    plan = plan_of(57)
    edge = np.stack([own.dead_zone, 1 - own.rounding, 2 - own.rounding, 7 - own.rounding], axis=1)[plan.level_table]
    y = np.concatenate([f(edge, np.float32(np.inf)) for f in (np.nextafter, np.maximum, np.minimum)], axis=1)
    y = np.ascontiguousarray(np.where(np.isfinite(y), y, np.float32(3.5)))
    y = np.concatenate([y, np.nextafter(edge, np.float32(0)), -edge], axis=1)
    got = backend.quantize(y, 1.0, plan, own)
    same(got, symbols.quantize(y, 1.0, plan, own))
    at_dead_zone, below = got[:, 8], got[:, 12]
    assert (at_dead_zone == 1).all() and (below == 0).all()


@pytest.mark.parametrize(("rows", "tokens"), SIZES)
def test_planes_are_the_reference_and_come_back(backend: Stages, rows: int, tokens: int) -> None:
    plan, q = plan_of(rows), levels(rows, tokens)
    kept = q.copy()
    planes, escapes = backend.pack(q, plan, FAMILY.tables)
    want, want_escapes = symbols.pack(q, plan, FAMILY.tables)
    same(planes, want)
    same(escapes.index, want_escapes.index)
    same(escapes.value, want_escapes.value)
    assert planes.shape == (plan.planes, tokens)
    same(symbols.unpack(planes, escapes, plan), kept)
    same(q, kept)


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.integers(-MAX_LEVEL, MAX_LEVEL) | st.integers(-140, 140), min_size=1, max_size=40),
    code=st.integers(0, WIDEST),
)
def test_any_levels_come_back(values: list[int], code: int) -> None:
    q = np.array([values, values[::-1]], np.int32)
    plan = coding_plan(np.array([code, 0], np.int32))
    for name in stage_names():
        planes, escapes = get_stages(name).pack(q, plan, FAMILY.tables)
        same(symbols.unpack(planes, escapes, plan), q)


# --- what the planes hold


@pytest.mark.parametrize("shift", range(1, MAX_SHIFT + 1))
def test_wide_components_split_into_high_and_low(backend: Stages, shift: int) -> None:
    plan = coding_plan(np.array([TABLES - 1 + 4 * shift], np.int32))
    assert plan.shift.tolist() == [shift] and plan.wide.tolist() == [0] and plan.planes == 2
    q = np.array([[0, 1, -1, 50 << shift, -(50 << shift), (1 << shift) // 2, -(1 << shift) // 2 - 1]], np.int32)
    planes, escapes = backend.pack(q, plan, FAMILY.tables)
    assert not len(escapes.index)
    high, low = planes[0].view(np.int8).astype(np.int64), planes[1].astype(np.int64)
    assert (low < 1 << shift).all()
    np.testing.assert_array_equal((high << shift) + low - (1 << shift - 1), q[0])
    np.testing.assert_array_equal(high, [0, int(shift == 1), 0, 50, -50, 1, -1])


@pytest.mark.parametrize("value", [128, -128, -129, 255, 256, MAX_LEVEL, -MAX_LEVEL])
def test_values_beyond_a_byte_escape(backend: Stages, value: int) -> None:
    plan = coding_plan(np.array([20, 20], np.int32))
    q = np.zeros((2, 9), np.int32)
    q[1, 4] = value
    planes, escapes = backend.pack(q, plan, FAMILY.tables)
    assert planes[1, 4] == ESCAPE and (planes == ESCAPE).sum() == 1
    assert escapes.index.tolist() == [13] and escapes.value.tolist() == [value]


def test_what_a_table_cannot_code_escapes(backend: Stages) -> None:
    freq = np.zeros((3, 256), np.uint16)
    freq[:, 0] = 4094
    freq[:, ESCAPE] = 1
    freq[[0, 1], [1, 255]] = 1  # table 0 knows 1, table 1 knows -1, table 2 knows 2
    freq[2, 2] = 1
    plan = CodingPlan(np.zeros(3, np.uint16), np.zeros(3, np.uint8), np.arange(3, dtype=np.uint16))
    q = np.tile(np.array([1, -1, 2, 0], np.int32), (3, 1))
    planes, escapes = backend.pack(q, plan, EntropyTables(freq, 12))
    assert planes.tolist() == [[1, ESCAPE, ESCAPE, 0], [ESCAPE, 255, ESCAPE, 0], [ESCAPE, ESCAPE, 2, 0]]
    assert escapes.index.tolist() == [1, 2, 4, 6, 8, 9] and escapes.value.tolist() == [-1, 2, 1, 2, 1, -1]
    same(symbols.unpack(planes, escapes, plan), q)


def test_every_packed_byte_is_codable(backend: Stages) -> None:
    plan = plan_of(57)
    planes, _ = backend.pack(levels(57, 65), plan, FAMILY.tables)
    assert (FAMILY.tables.freq[plan.tables[:, None], planes] > 0).all()


# --- damaged escapes


def escaped(backend: Stages) -> tuple[CodingPlan, U8, Escapes]:
    plan = coding_plan(np.array([10, 50, 10], np.int32))
    q = np.zeros((3, 6), np.int32)
    q[[0, 1, 2], [1, 5, 0]] = 1000, 1 << 22, -1000
    planes, escapes = backend.pack(q, plan, FAMILY.tables)
    assert escapes.index.tolist() == [1, 11, 12]
    return plan, planes, escapes


@pytest.mark.parametrize(
    "index",
    [[], [1], [1, 11], [11, 12], [1, 11, 12, 13], [0, 1, 11, 12], [2, 11, 12], [1, 10, 12], [1, 11, 0xFFFFFFFF]],
)
def test_escapes_that_do_not_match_are_found_out(backend: Stages, index: list[int]) -> None:
    plan, planes, _ = escaped(backend)
    with pytest.raises(CorruptError, match="escape"):
        symbols.unpack(planes, Escapes(np.array(index, np.uint32), np.zeros(len(index), np.int32)), plan)


# --- how far a value may move


@pytest.mark.parametrize("step", [1.0, 0.3, 2.0**-9])
@pytest.mark.parametrize("seed", range(3))
def test_error_stays_within_the_thresholds(backend: Stages, step: float, seed: int) -> None:
    own = quantizer(seed)
    plan = plan_of(57, seed=seed)
    y = np.random.default_rng(seed).uniform(-40 * step, 40 * step, (57, 200)).astype(np.float32)
    back = symbols.dequantize(backend.quantize(y, step, plan, own), step, plan, own)
    dead, rounding, shrink = (a[plan.level_table] for a in (own.dead_zone, own.rounding, own.shrink))
    # A magnitude in [m - rounding, m + 1 - rounding) comes back as m - shrink; below the dead zone it comes back as 0.
    above = (1 - rounding)[:, None] + shrink
    below = rounding[:, None] - shrink
    bound = np.maximum(dead, np.maximum(above, below).max(1))
    assert (np.abs(y - back) <= step * (bound[:, None] + 1e-4)).all()
    assert (np.abs(back) <= np.abs(y) + step * np.maximum(below, 0).max(1)[:, None] * (1 + 1e-4)).all()
    assert not (back * y < 0).any()


def test_a_negative_value_is_the_mirror_of_a_positive_one(backend: Stages) -> None:
    plan, y = plan_of(57), coefficients(57, 33, 0.3)
    q, mirrored = (backend.quantize(v, 0.3, plan, quantizer()) for v in (y, -y))
    np.testing.assert_array_equal(q, -mirrored)
    back, mirrored_back = (symbols.dequantize(v, 0.3, plan, quantizer()) for v in (q, -q))
    np.testing.assert_array_equal(back, -mirrored_back)
