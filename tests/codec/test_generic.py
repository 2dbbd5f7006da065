"""The scheme that knows nothing: any layout, any scale, no data."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.format.container import inspect
from cuvee.codec.layout import KVLayout, LayerLayout
from cuvee.codec.profiles.profile import Profile

STEP = 0.25


def plain(dtype: str, layers: int = 1) -> KVLayout:
    """No RoPE, so that K and V are just numbers: two units `[T, 4, 16]` per layer."""
    return KVLayout("synthetic", (LayerLayout(4, 16, 16, None),) * layers, dtype, None)


def gaussian(tokens: int = 200, seed: int = 0) -> torch.Tensor:
    return torch.randn(tokens, 4, 16, generator=torch.Generator().manual_seed(seed))


def round_trip(keys: torch.Tensor, values: torch.Tensor, dtype: str, step: float = STEP) -> tuple[KVChunk, KVChunk]:
    layout = plain(dtype)
    chunk = KVChunk([keys.to(layout.torch_dtype)], [values.to(layout.torch_dtype)], layout)
    codec = Codec(Profile.generic(layout), step=step)
    return chunk, codec.decode(codec.encode(chunk))


def unit_deviation(x: torch.Tensor) -> float:
    """Root mean square deviation from each channel's mean, over a whole unit."""
    x = x.double()
    return float((x - x.mean(0)).square().mean().sqrt())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("step", [2**-6, 2**-3, 0.5, 2.0])
def test_error_is_bounded_by_the_step(dtype: str, step: float) -> None:
    keys = 3 * gaussian() + 20 * gaussian(1, 1)
    chunk, back = round_trip(keys, 0.1 * gaussian(seed=2), dtype, step)
    for exact, coded in ((chunk.keys[0], back.keys[0]), (chunk.values[0], back.values[0])):
        deviation = unit_deviation(exact)
        # Below the dead zone of 0.6 steps nothing is off by more, else 0.6 of a step (and the shrinkage), and
        # what is not coded at all stays within five deviations of less than a quarter step each.
        rounding = torch.finfo(chunk.layout.torch_dtype).eps * float(exact.float().abs().max())
        assert float((exact.double() - coded.double()).abs().max()) <= 1.3 * step * deviation + rounding
        if step < 0.5:
            assert float((exact.double() - coded.double()).abs().max()) <= 0.66 * step * deviation + rounding
        assert unit_deviation(exact.double() - coded.double()) <= 0.33 * step * deviation + rounding


@pytest.mark.parametrize("name", ["gqa", "mha", "mqa", "narrow-values", "no-rope", "partial", "yarn", "irregular"])
def test_any_layout_without_data(name: str, layouts: dict[str, KVLayout], make_chunk: Callable[..., KVChunk]) -> None:
    codec = Codec(Profile.generic(layouts[name]), "high")
    chunk = make_chunk(layouts[name], 100, start=9)
    back = codec.decode(codec.encode(chunk))
    for exact, coded in zip((*chunk.keys, *chunk.values), (*back.keys, *back.values), strict=True):
        assert float((exact - coded).square().mean() / (exact - exact.mean(0)).square().mean()) < 5e-3


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("quality", ["high", "balanced", "small"])
def test_one_token_has_no_variance(dtype: str, quality: str) -> None:
    layout = plain(dtype)
    chunk = KVChunk([gaussian(1).to(layout.torch_dtype)], [gaussian(1, 1).to(layout.torch_dtype)], layout)
    codec = Codec(Profile.generic(layout), quality)
    back = codec.decode(codec.encode(chunk))
    # Coded by its mean, a bfloat16.
    torch.testing.assert_close(back.keys[0], chunk.keys[0], rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(back.values[0], chunk.values[0], rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("value", [0.0, 1.0, -3.14159, 1e-4, 3e4])
def test_constants(dtype: str, value: float) -> None:
    constant = torch.full((130, 4, 16), value)
    chunk, back = round_trip(constant, gaussian(130), dtype)
    torch.testing.assert_close(back.keys[0], chunk.keys[0], rtol=2**-8, atol=0)
    chunk, back = round_trip(gaussian(130), constant, dtype)
    torch.testing.assert_close(back.values[0], chunk.values[0], rtol=2**-8, atol=0)
    chunk, back = round_trip(constant, constant, dtype)
    torch.testing.assert_close(back.keys[0], chunk.keys[0], rtol=2**-8, atol=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_dead_and_constant_channels_cost_nothing_and_come_back(dtype: str) -> None:
    keys = gaussian()
    keys[:, 1, 3], keys[:, 2] = 0, 5.0
    chunk, back = round_trip(keys, gaussian(seed=1), dtype)
    assert torch.equal(back.keys[0][:, 1, 3], chunk.keys[0][:, 1, 3])
    assert torch.equal(back.keys[0][:, 2], chunk.keys[0][:, 2])
    live = torch.ones(4, 16, dtype=torch.bool)
    live[1, 3], live[2] = False, False
    error = (back.keys[0] - chunk.keys[0])[:, live].double().abs().max()
    assert float(error) <= 0.7 * STEP
    codec = Codec(Profile.generic(chunk.layout), step=STEP)
    full = KVChunk([gaussian().to(chunk.layout.torch_dtype)], chunk.values, chunk.layout)
    assert len(codec.encode(chunk)) < 0.93 * len(codec.encode(full))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e-15, 1e15, 1e20, 1e30])
def test_scale_does_not_matter(dtype: str, scale: float) -> None:
    for where in range(2):
        units = [gaussian(), gaussian(seed=1)]
        units[where] = (units[where].double() * scale).float()
        chunk, back = round_trip(units[0], units[1], dtype)
        for exact, coded in ((chunk.keys[0], back.keys[0]), (chunk.values[0], back.values[0])):
            deviation = unit_deviation(exact)
            assert float((exact.double() - coded.double()).abs().max()) <= 0.7 * STEP * deviation + deviation / 50


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_offset_channel_does_not_ruin_the_others(dtype: str) -> None:
    keys = gaussian()
    keys[:, 1, 3] += 300  # Qwen2 has such keys
    chunk, back = round_trip(keys, gaussian(seed=1), dtype)
    error = (back.keys[0] - chunk.keys[0]).double().abs()
    if dtype == "bfloat16":
        error[:, 1, 3] = 0
    assert float(error.max()) <= 0.7 * STEP * unit_deviation(chunk.keys[0]) + 0.02


@pytest.mark.parametrize("factor", [10, 300])
def test_a_wide_channel_counts_by_its_share_of_the_unit(factor: float) -> None:
    """The step is relative to the unit's deviation, so wide channels coarsen it, by exactly that."""
    keys = gaussian()
    keys[:, 1, 3] *= factor
    step = STEP / unit_deviation(keys)
    chunk, back = round_trip(keys, gaussian(seed=1), "float32", step)
    error = (back.keys[0] - chunk.keys[0]).abs()
    assert float(error.max()) <= 0.7 * STEP
    assert float(error.mean()) > 0.1 * STEP  # the step is not finer than asked either


def test_a_channel_wider_than_the_widest_table() -> None:
    layout = KVLayout("synthetic", (LayerLayout(8, 256, 1, None),), "float32", None)
    keys = torch.randn(20, 8, 256, generator=torch.Generator().manual_seed(0))
    keys[:, 3, 3] *= 1e6
    codec = Codec(Profile.generic(layout), step=2**-8)
    back = codec.decode(codec.encode(KVChunk([keys], [torch.zeros(20, 8, 1)], layout)))
    assert float((back.keys[0] - keys).abs().max()) <= 0.7 * 2**-8 * unit_deviation(keys)


def test_an_outlying_token_is_escaped() -> None:
    keys = gaussian()
    keys[77] += 500
    chunk, back = round_trip(keys, gaussian(seed=1), "float32")
    assert float((back.keys[0] - chunk.keys[0]).abs().max()) <= 0.7 * STEP * unit_deviation(keys)


def test_side_information_is_three_bytes_a_channel() -> None:
    layout = plain("float32")
    chunk = KVChunk([gaussian(1)], [gaussian(1)], layout)
    codec = Codec(Profile.generic(layout), step=2.0**8)
    assert 3 * 128 <= inspect(codec.encode(chunk)).section_bytes[0] <= 3 * 128 + 48


def test_the_generic_profile_is_the_same_everywhere() -> None:
    layout = plain("float32")
    assert Profile.generic(layout).id == Profile.generic(layout).id
    assert Profile.generic(layout).id != Profile.generic(plain("float32", 2)).id
