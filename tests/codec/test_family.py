"""Which component is coded with which table, and the families of tables themselves."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tests.codec.reference import symbols

from cuvee.codec.entropy.coding_plan import ESCAPE, MAX_SHIFT
from cuvee.codec.entropy.family import (
    TABLES,
    Family,
    coding_plan,
    default_family,
    finest_step_index,
    fit_family,
    make_family,
    scale_codes,
    scale_index,
    split_wide,
)
from cuvee.codec.entropy.token_classes import NEUTRAL
from cuvee.codec.errors import FormatError, ProfileError
from cuvee.codec.profiles.block_map import BlockMap
from cuvee.codec.profiles.section_basis import SectionBasis
from cuvee.codec.profiles.section_profile import SectionProfile
from cuvee.codec.support.arrays import F32, I16
from cuvee.codec.support.steps import OCTAVE, step_value

WIDEST = TABLES - 1 + 4 * MAX_SHIFT


# --- scales and codes


@pytest.mark.parametrize("step", [-512, -129, -1, 0, 1, 63, 512])
def test_a_component_is_coded_iff_it_reaches_the_lowest_table(step: int) -> None:
    scale = np.arange(step - 200, step + 1300).astype(np.int16)
    codes = scale_codes(scale, step)
    relative = scale.astype(int) - step
    # Table 0 stands for 2**-2 steps, -128 units; a table serves 8 units to either side, the lower edge included.
    np.testing.assert_array_equal(codes >= 0, relative >= -136)
    np.testing.assert_array_equal(codes, np.floor((relative + 136) / 16))


@pytest.mark.parametrize("widest", [-700, 0, 1, 15, 16, 333, 900])
def test_the_finest_step_is_the_last_that_can_be_coded(widest: int) -> None:
    scale = np.array([widest, widest - 40, -5000], np.int16)
    finest = finest_step_index(scale)
    codes = scale_codes(scale, finest)
    assert coding_plan(codes[codes >= 0]).shift[0] == MAX_SHIFT
    with pytest.raises(ProfileError, match="too small"):
        coding_plan(scale_codes(scale[:2], finest - 1))
    assert finest_step_index(np.empty(0, np.int16)) < -(1 << 13), "a section without components is served at any step"


def test_codes_of_extreme_scales_do_not_wrap() -> None:
    codes = scale_codes(np.array([-(2**15), 2**15 - 1], np.int16), 0)
    assert codes.dtype == np.int32 and codes[0] < 0 < codes[1]
    assert scale_codes(np.array([2**15 - 1], np.int16), -512)[0] > codes[1]


def test_scale_index_of_nothing_is_the_smallest_scale() -> None:
    index = scale_index(np.array([0.0, 1e-30, 1e30]))
    assert index[0] == -(1 << 14) and index[0] < index[1] < 0 < index[2]
    assert (scale_codes(index[:1], -8 * OCTAVE) < 0).all()


def test_step_value_inverts_scale_index() -> None:
    steps = np.arange(-600, 600, 7)
    values = np.array([step_value(int(s)) for s in steps])
    np.testing.assert_array_equal(scale_index(values), steps)
    assert step_value(0) == 1.0 and step_value(-128) == 0.25


def test_too_wide_a_component_is_refused() -> None:
    split_wide(np.array([0, WIDEST], np.int32))
    with pytest.raises(ProfileError, match="too small"):
        split_wide(np.array([0, WIDEST + 1], np.int32))
    with pytest.raises(ProfileError, match="too small"):
        coding_plan(np.array([WIDEST + 400], np.int32))


def test_a_plan_appends_a_raw_plane_for_each_wide_component() -> None:
    plan = coding_plan(np.array([WIDEST, 3, TABLES], np.int32))
    assert plan.level_table.tolist() == [TABLES - 1, 3, TABLES - 4] and plan.shift.tolist() == [MAX_SHIFT, 0, 1]
    assert plan.tables.tolist() == [TABLES - 1, 3, TABLES - 4, TABLES + MAX_SHIFT - 1, TABLES]
    assert plan.wide.tolist() == [0, 2] and plan.planes == 5
    tables = default_family().tables
    assert tables.entropy[plan.tables[3]] == MAX_SHIFT and tables.entropy[plan.tables[4]] == 1


def test_coded_components_are_a_prefix_of_each_block() -> None:
    scale = np.array([300, 10, 10, -140, -200, 50, -135, -136, -137, -500, -900], np.int16)
    sizes = (5, 5, 1)
    basis = SectionBasis(
        torch.zeros(11),
        torch.zeros(0, 11),
        tuple(BlockMap.of(torch.eye(n), np.zeros(n, np.int16)) for n in sizes),
    )
    section = SectionProfile(basis, scale)
    expected = {-900: (5, 5, 1), -764: (5, 5, 1), -763: (5, 5, 0), 0: (3, 3, 0), 1: (3, 2, 0), 186: (1, 1, 0)}
    for step, ranks in {**expected, 187: (1, 0, 0), 436: (1, 0, 0), 437: (0, 0, 0)}.items():
        assert section.class_ranks(step, NEUTRAL) == ranks, step
        chosen = [at + i for at, rank in zip((0, 5, 10), ranks, strict=True) for i in range(rank)]
        assert np.flatnonzero(scale_codes(scale, step) >= 0).tolist() == chosen


# --- the default family


def test_the_default_family_is_this_one_on_every_machine() -> None:
    family = default_family()
    freq = hashlib.blake2b(family.tables.freq.astype("<u2").tobytes(), digest_size=16)
    assert freq.hexdigest() == "be81150273384fdb2c8b6f2a5956ce7f"
    quantizer = hashlib.blake2b(digest_size=16)
    for array in (family.quantizer.dead_zone, family.quantizer.rounding, family.quantizer.shrink):
        quantizer.update(array.astype("<f4").tobytes())
    assert quantizer.hexdigest() == "e4ab150d8d345cb415a0fc1ca8d12ecf"


def check_tables(family: Family) -> None:
    freq = family.tables.freq[:TABLES].astype(int)
    assert (freq[:, ESCAPE] > 0).all(), "every table must be able to escape"
    positive, negative = freq[:, 1:128], freq[:, :128:-1]
    assert (np.abs(positive - negative) <= 1).all(), "symmetric but for rounding"
    assert (freq[:, [1, 255]] > 0).all()
    own = family.quantizer
    assert (own.dead_zone >= 1 - own.rounding - 1e-6).all(), "else a magnitude would count and round to zero"
    assert (own.dead_zone < 1).all() and (own.rounding > 0).all() and (own.rounding <= 0.5).all()
    assert (np.abs(own.shrink) <= 0.25).all()


def test_default_tables_escape_and_are_symmetric() -> None:
    check_tables(default_family())
    assert (default_family().tables.freq[:TABLES].argmax(1) == 0).all()


def test_make_family_refuses_what_are_not_tables() -> None:
    family = default_family()
    freq = family.tables.freq[:TABLES].copy()
    freq[3, 0] += 1
    with pytest.raises(FormatError, match="table 3"):
        make_family(freq, family.quantizer)
    gapped = family.tables.freq[:TABLES].copy()
    gapped[20, 0] += gapped[20, 2]
    gapped[20, 2] = 0
    with pytest.raises(FormatError, match="one with gaps"):
        make_family(gapped, family.quantizer)


# --- fitted families


def logistic(rng: np.random.Generator, size: tuple[int, int]) -> npt.NDArray[np.float64]:
    return rng.logistic(0, np.sqrt(3) / np.pi, size)


def gaussian(rng: np.random.Generator, size: tuple[int, int]) -> npt.NDArray[np.float64]:
    return rng.normal(0, 1, size)


def laplace(rng: np.random.Generator, size: tuple[int, int]) -> npt.NDArray[np.float64]:
    return rng.laplace(0, np.sqrt(0.5), size)


SHAPES: dict[str, Callable[[np.random.Generator, tuple[int, int]], npt.NDArray[np.float64]]] = {
    "logistic": logistic,
    "gaussian": gaussian,
    "laplace": laplace,
}
STEPS = (-3 * OCTAVE, -2 * OCTAVE, -OCTAVE, 0)


def samples(kind: str, seed: int, tokens: int = 1500) -> tuple[F32, I16]:
    rng = np.random.default_rng(seed)
    scale = np.linspace(40, -260, 60).round().astype(np.int16)
    deviation = 2.0 ** (scale / OCTAVE)
    return (SHAPES[kind](rng, (60, tokens)) * deviation[:, None]).astype(np.float32), scale


def cost(family: Family, y: F32, scale: I16) -> tuple[float, float]:
    """Ideal bits (64 an escape) and squared error in squared steps, over all steps."""
    bits = error = 0.0
    for step in STEPS:
        codes = scale_codes(scale, step)
        rows = codes >= 0
        plan = coding_plan(codes[rows])
        value = step_value(step)
        q = symbols.quantize(y[rows], value, plan, family.quantizer)
        planes, escapes = symbols.pack(q, plan, family.tables)
        bits += float(family.tables.bits[plan.tables[:, None], planes].sum(dtype=np.float64)) + 64 * len(escapes.index)
        back = symbols.dequantize(q, value, plan, family.quantizer)
        error += float(np.square((back - y[rows]) / value, dtype=np.float64).sum())
    return bits, error


@pytest.fixture(scope="module", params=SHAPES)
def fitted(request: pytest.FixtureRequest) -> tuple[str, Family]:
    return request.param, fit_family([samples(request.param, seed=1)], STEPS)


def test_a_level_is_escaped_only_where_an_entry_of_its_table_costs_more() -> None:
    y = np.random.default_rng(1).standard_normal((1, 100_000)).astype(np.float32)
    y[0, :8] = 20.0  # a weight of 0.16 frequencies per sign: an escape, of 76 bits, would cost more than an entry
    family = fit_family([(y, np.zeros(1, np.int16))], [0])
    (table,) = scale_codes(np.zeros(1, np.int16), 0)
    freq = family.tables.freq[table]
    assert freq[20] and not freq[40]


def test_a_fitted_family_codes_its_kind_smaller(fitted: tuple[str, Family]) -> None:
    kind, family = fitted
    y, scale = samples(kind, seed=2)
    # Same quantizer for both, so that only the tables differ.
    default = Family(default_family().tables, family.quantizer)
    bits, _ = cost(family, y, scale)
    default_bits, _ = cost(default, y, scale)
    # The default family knows logistic distributions exactly: there, learning from few samples can only come close.
    assert bits < default_bits * (1.001 if kind == "logistic" else 1)


def test_fitting_is_deterministic_and_needs_few_samples() -> None:
    y, scale = samples("laplace", seed=4, tokens=3)
    one, two = (fit_family([(y, scale)], STEPS) for _ in range(2))
    np.testing.assert_array_equal(one.tables.freq, two.tables.freq)
    np.testing.assert_array_equal(one.quantizer.shrink, two.quantizer.shrink)
    check_tables(one)
