"""What others do to a cache: their bits counted by hand, their errors bounded by their own step."""

from __future__ import annotations

import math

import pytest
import torch

from cuvee.codec.errors import InputError
from cuvee.codec.layout import KVChunk, KVLayout, LayerLayout
from cuvee.eval.baselines import CacheGen, Float8, Identity, Kivi
from cuvee.eval.quality import Method

LAYER = LayerLayout(2, 20, 12, None)  # 40 key and 24 value channels: no multiple of 32


def make(tokens: int, layers: int = 2, dtype: str = "float32", seed: int = 0) -> KVChunk:
    generator = torch.Generator().manual_seed(seed)
    layout = KVLayout("synthetic", (LAYER,) * layers, dtype, None)
    keys = [torch.randn(tokens, 2, 20, generator=generator).to(layout.torch_dtype) for _ in range(layers)]
    values = [torch.randn(tokens, 2, 12, generator=generator).to(layout.torch_dtype) for _ in range(layers)]
    return KVChunk(keys, values, layout, start=3)


def round_trip(method: Method, chunk: KVChunk) -> tuple[KVChunk, float]:
    stored, bits = method.encode(chunk)
    back = method.decode(stored)
    assert (back.start, back.tokens, back.layout) == (chunk.start, chunk.tokens, chunk.layout)
    assert method.counts
    return back, bits


@pytest.mark.parametrize(("dtype", "width"), [("bfloat16", 16), ("float32", 32)])
def test_identity_costs_the_dtype_and_changes_nothing(dtype: str, width: int) -> None:
    chunk = make(5, dtype=dtype)
    back, bits = round_trip(Identity(), chunk)
    assert bits == width * 5 * 2 * (40 + 24)
    assert all(torch.equal(a, b) for a, b in zip(chunk.keys + chunk.values, back.keys + back.values, strict=True))


def test_float8_costs_eight_bits_and_rounds_to_three_mantissa_bits() -> None:
    chunk = make(7)
    back, bits = round_trip(Float8(), chunk)
    assert bits == 8 * 7 * 2 * (40 + 24)
    for exact, other in zip(chunk.keys + chunk.values, back.keys + back.values, strict=True):
        assert bool(((exact - other).abs() <= exact.abs() / 16 + 2**-10).all())


def test_float8_saturates_where_the_cast_would_make_nan() -> None:
    chunk = make(1, layers=1)
    chunk.keys[0][0, 0, 0] = -1000.0
    back, _ = round_trip(Float8(), chunk)
    assert back.keys[0][0, 0, 0] == -448.0


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_kivi_counts_levels_and_groups(bits: int) -> None:
    tokens = 40  # a group of 32 and one of 8
    chunk = make(tokens)
    back, size = round_trip(Kivi(bits), chunk)
    keys = bits * tokens * 40 + 32 * 40 * 2  # two groups of tokens in each of 40 channels
    values = bits * tokens * 24 + 32 * tokens  # one group of 24 channels in each token
    assert size == 2 * (keys + values)
    for name, axis in (("keys", 0), ("values", 1)):
        for exact, other in zip(getattr(chunk, name), getattr(back, name), strict=True):
            for part, coded in zip(exact.flatten(1).split(32, axis), other.flatten(1).split(32, axis), strict=True):
                step = (part.amax(axis, keepdim=True) - part.amin(axis, keepdim=True)) / (2**bits - 1)
                assert bool(((part - coded).abs() <= 0.5 * step + 1e-5).all())


def test_kivi_overhead_is_one_bit_where_groups_are_full() -> None:
    layout = KVLayout("synthetic", (LayerLayout(2, 32, 32, None),), "float32", None)
    chunk = KVChunk([torch.randn(64, 2, 32)], [torch.randn(64, 2, 32)], layout)
    assert Kivi(4).encode(chunk)[1] == 5.0 * 64 * 128


def test_kivi_keeps_a_constant() -> None:
    layout = KVLayout("synthetic", (LayerLayout(1, 4, 4, None),), "float32", None)
    chunk = KVChunk([torch.full((3, 1, 4), 2.5)], [torch.full((3, 1, 4), -1.0)], layout)
    back, _ = round_trip(Kivi(2), chunk)
    assert bool((back.keys[0] == 2.5).all()) and bool((back.values[0] == -1).all())


@pytest.mark.parametrize(("bits", "group"), [(0, 32), (9, 32), (4, 0)])
def test_kivi_refuses_what_it_is_not(bits: int, group: int) -> None:
    with pytest.raises(InputError, match=r"^bits"):
        Kivi(bits, group)


def test_cachegen_counts_entropy_tables_and_scales_by_hand() -> None:
    layout = KVLayout("synthetic", (LayerLayout(1, 2, 2, None),), "float32", None)
    keys = torch.tensor([[15.0, 0], [15, 15], [-15, 15], [15, 0]])  # 31 levels: they are the values themselves
    values = torch.tensor([[15.0, 15.0]]).repeat(4, 1)
    chunk = KVChunk([keys[:, None]], [values[:, None]], layout)
    back, bits = round_trip(CacheGen(), chunk)
    assert torch.allclose(back.keys[0][:, 0], keys) and torch.allclose(back.values[0][:, 0], values)
    entropy = -(3 * math.log2(3 / 4) + math.log2(1 / 4)) + 4  # a channel 3:1, a channel 2:2, two constant ones
    assert bits == pytest.approx(entropy + 4 * (33 * 16 + 32) + 2 * 4 * 16)
    assert round_trip(CacheGen(count_tables=False), chunk)[1] == pytest.approx(entropy + 2 * 4 * 16)


def test_cachegen_gives_the_first_layers_more_bins() -> None:
    chunk = make(64, layers=16)
    back, _ = round_trip(CacheGen(), chunk)

    def top(exact: torch.Tensor, other: torch.Tensor) -> int:
        level = other.flatten(1) / exact.flatten(1).abs().amax(1, keepdim=True)
        return 15 if bool(((level * 15 - (level * 15).round()).abs() < 1e-3).all()) else 7

    tops = [[top(a, b) for a, b in zip(getattr(chunk, n), getattr(back, n), strict=True)] for n in ("keys", "values")]
    assert tops == [[15] * 5 + [7] * 11, [15] + [7] * 15]


def test_cachegen_survives_a_token_of_zeros() -> None:
    chunk = make(2, layers=1)
    chunk.keys[0][0] = 0
    back, _ = round_trip(CacheGen(), chunk)
    assert not back.keys[0][0].any() and bool(torch.isfinite(back.keys[0]).all())
