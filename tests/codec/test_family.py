"""Which component is coded with which table, and the families of tables themselves."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from tests.codec.reference import symbols

from cuvee.codec.entropy.coding_plan import ESCAPE, MAX_SHIFT
from cuvee.codec.entropy.family import (
    TABLES,
    Family,
    coding_plan,
    default_family,
    finest_step_index,
    fit_family,
    scale_codes,
)
from cuvee.codec.errors import ProfileError
from cuvee.codec.support.arrays import F32, I16
from cuvee.codec.support.steps import OCTAVE, step_value

WIDEST = TABLES - 1 + 4 * MAX_SHIFT


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


STEPS = (-3 * OCTAVE, -2 * OCTAVE, -OCTAVE, 0)


def samples(seed: int) -> tuple[F32, I16]:
    rng = np.random.default_rng(seed)
    scale = np.linspace(40, -260, 60).round().astype(np.int16)
    deviation = 2.0 ** (scale / OCTAVE)
    return (rng.laplace(0, np.sqrt(0.5), (60, 1500)) * deviation[:, None]).astype(np.float32), scale


def cost(family: Family, y: F32, scale: I16) -> float:
    """Ideal bits (64 an escape) over all steps."""
    bits = 0.0
    for step in STEPS:
        codes = scale_codes(scale, step)
        rows = codes >= 0
        plan = coding_plan(codes[rows])
        planes, escapes = symbols.pack(
            symbols.quantize(y[rows], step_value(step), plan, family.quantizer), plan, family.tables
        )
        bits += float(family.tables.bits[plan.tables[:, None], planes].sum(dtype=np.float64)) + 64 * len(escapes.index)
    return bits


def test_a_level_is_escaped_only_where_an_entry_of_its_table_costs_more() -> None:
    y = np.random.default_rng(1).standard_normal((1, 100_000)).astype(np.float32)
    y[0, :8] = 20.0  # a weight of 0.16 frequencies per sign: an escape, of 76 bits, would cost more than an entry
    family = fit_family([(y, np.zeros(1, np.int16))], [0])
    (table,) = scale_codes(np.zeros(1, np.int16), 0)
    freq = family.tables.freq[table]
    assert freq[20] and not freq[40]


def test_a_fitted_family_codes_its_kind_smaller() -> None:
    family, (y, scale) = fit_family([samples(1)], STEPS), samples(2)
    check_tables(family)
    # Same quantizer for both, so that only the tables differ.
    assert cost(family, y, scale) < cost(Family(default_family().tables, family.quantizer), y, scale)
