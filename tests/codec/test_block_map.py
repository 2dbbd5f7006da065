"""Maps as a profile keeps them: integers of 16, 8 and 4 bits. `test_profile.py` has arrays that break a rule."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from cuvee.codec.entropy.family import scale_codes
from cuvee.codec.entropy.token_classes import CLASS_UNITS, NEUTRAL, class_step_index
from cuvee.codec.errors import FormatError
from cuvee.codec.profiles.block_map import FAINT_OCTAVES, NARROW_VALUES, BlockMap, read_block_map
from cuvee.codec.profiles.map_rounding import round_columns
from cuvee.codec.profiles.section_basis import eigenbasis
from cuvee.codec.support.nibbles import pack_nibbles, unpack_nibbles
from cuvee.codec.support.steps import OCTAVE
from cuvee.learning.learned_sections import _rounded

N = 96
LEAST = math.log2(N / NARROW_VALUES)  # octaves from which a column is wide


def learned(size: int = N, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A map and falling deviations, of values whose costs differ by a factor of a thousand."""
    draw = torch.Generator().manual_seed(seed)
    mix = torch.randn(size, size, generator=draw, dtype=torch.float64)
    weight = torch.randn(size, size, generator=draw, dtype=torch.float64)
    weight *= torch.logspace(0, -3, size, dtype=torch.float64)
    inverse, _ = eigenbasis(mix @ mix.T, weight @ weight.T)
    return inverse, 2.0 ** torch.linspace(2, LEAST - FAINT_OCTAVES - 6, size, dtype=torch.float64)


def test_columns_have_as_many_bits_as_their_components_need() -> None:
    inverse, deviation = learned()
    scale = np.rint(64 * np.log2(deviation.numpy())).astype(np.int16)
    block = BlockMap.of(inverse, scale)
    wide, narrow = ((scale >= OCTAVE * (LEAST - octaves)).sum() for octaves in (0, FAINT_OCTAVES))
    assert 0 < wide < narrow < N
    assert block.wide.shape == (N, wide) and block.narrow.shape == (N, narrow - wide)
    assert block.faint.shape == (N, N - narrow) and np.abs(block.faint).max() == 7
    error = (block.square() - inverse).square().sum(0) / inverse.square().sum(0)
    assert error[:wide].max() < 1e-6 < error[wide:narrow].max() < 0.01 < error[narrow:].max() < 0.4
    forward = block.forward.double()
    torch.testing.assert_close(forward @ block.square(), torch.eye(N, dtype=torch.float64), rtol=0, atol=1e-3)


def test_components_that_important_tokens_code_have_no_faint_column() -> None:
    """Those of tokens with steps an octave finer, at a KL of 0.0034 on SmolLM2-135M: four bits there cost 2%."""
    widest_faint = np.array([-FAINT_OCTAVES * OCTAVE - 1], np.int16)
    assert scale_codes(widest_faint, class_step_index(-40, NEUTRAL - OCTAVE // CLASS_UNITS)) < 0


def test_scales_count_what_leaks_into_a_component() -> None:
    inverse, deviation = learned()
    block, scale = _rounded(inverse, deviation)
    draw = torch.Generator().manual_seed(1)
    y = deviation[:, None] * torch.randn(N, 20_000, generator=draw, dtype=torch.float64)
    found = (torch.linalg.solve(block.square(), inverse) @ y).square().mean(1).sqrt()
    assert bool((np.diff(scale) <= 0).all())
    coded = 2.0 ** (scale / OCTAVE)
    exact = found[: len(scale)].numpy()
    assert (coded >= 0.97 * exact).all() and np.median(coded / exact) < 1.05
    assert exact[-1] > 1.2 * float(deviation[-1])  # which it would not count otherwise


@pytest.mark.parametrize("size", [5, 128, 150, 300])
def test_rounding_errors_are_made_up_for(size: int) -> None:
    """Errors are a fraction of those of numbers that are rounded one by one, where it costs something."""
    inverse, _ = learned(size)
    exact = inverse.numpy()
    scale = np.abs(exact).max(0) / 7
    limit = np.full(size, 7.0)
    metric = np.linalg.inv(exact @ exact.T)

    def cost(integers: npt.NDArray[np.floating]) -> float:
        error = integers * scale - exact
        return float(np.einsum("ij,ik,kj->", error, metric, error))

    rounded = round_columns(exact, scale, limit)
    assert np.array_equal(rounded, np.rint(rounded)) and np.abs(rounded).max() <= 7
    assert cost(rounded) < (0.3 if size > 100 else 0.9) * cost(np.rint(exact / scale))


@pytest.mark.parametrize("count", [0, 1, 2, 7, 8])
def test_nibbles(count: int) -> None:
    numbers = np.random.default_rng(0).integers(-7, 8, (5, count)).astype(np.int8)
    packed = pack_nibbles(numbers)
    assert packed.shape == (5, (count + 1) // 2) and packed.dtype == np.uint8
    assert np.array_equal(unpack_nibbles("x", packed, count), numbers)


def test_nibbles_that_nobody_packs() -> None:
    with pytest.raises(FormatError, match=r"^x: must be -7 … 7, got -8$"):
        unpack_nibbles("x", np.zeros((1, 1), np.uint8), 2)
    with pytest.raises(FormatError, match=r"^x: must end with a zero if its numbers are odd in number, got 1$"):
        unpack_nibbles("x", np.full((1, 1), 0x98, np.uint8), 1)


def arrays() -> dict[str, npt.NDArray[Any]]:
    block, _ = _rounded(*learned())
    return {f"p.{name}.0": array for name, array in block.arrays().items()}


def test_a_map_that_does_not_fit_float32_is_refused() -> None:
    """Each scale is a number; their product is infinite, which times nothing is no number."""
    stored = arrays()
    stored["p.row_scale.0"] = np.full_like(stored["p.row_scale.0"], 1e38)
    with pytest.raises(FormatError, match=r"^p\.row_scale\.0: must be small enough that the map fits float32"):
        read_block_map("p", 0, N, N, stored)
