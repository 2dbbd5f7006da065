"""What others do to a cache: their bits counted by hand, their errors bounded by their own step."""

from __future__ import annotations

import math

import pytest
import torch

from cuvee.codec.chunk import KVChunk
from cuvee.codec.errors import InputError
from cuvee.codec.layout import KVLayout, LayerLayout
from cuvee.eval.baselines.quantizers import CacheGen, Destroyed, Float8, Int8, Kivi, Uncompressed
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


def test_identity_costs_the_dtype_and_destroyed_keeps_nothing() -> None:
    chunk = make(5, dtype="bfloat16")
    back, bits = round_trip(Uncompressed(), chunk)
    assert bits == 16 * 5 * 2 * (40 + 24)
    assert all(torch.equal(a, b) for a, b in zip(chunk.keys + chunk.values, back.keys + back.values, strict=True))
    back, bits = round_trip(Destroyed(), make(5))
    assert bits == 0 and not any(bool(tensor.any()) for tensor in back.keys + back.values)


def test_float8_costs_eight_bits_and_rounds_to_its_mantissa() -> None:
    chunk = make(40)
    back, bits = round_trip(Float8(), chunk)
    assert bits == 8 * 40 * 2 * (40 + 24)
    exact = torch.cat([tensor.flatten() for tensor in chunk.keys + chunk.values])
    other = torch.cat([tensor.flatten() for tensor in back.keys + back.values])
    error = (exact - other).abs()
    bound = exact.abs() * 2.0**-4 + 2.0**-10
    assert bool((error <= bound).all()) and bool((error > 0.6 * bound).any())


def test_float8_saturates_where_the_cast_would_make_nan() -> None:
    chunk = make(1, layers=1)
    chunk.keys[0][0, 0, 0], chunk.keys[0][0, 0, 1] = -1e9, 448.0 * 1.2
    back, _ = round_trip(Float8(), chunk)
    assert back.keys[0][0, 0, :2].tolist() == [-448.0, 448.0]


@pytest.mark.parametrize(("scale", "scales"), [("unit", 1), ("head", 2)])
def test_float8_moves_the_largest_value_of_a_scale_to_the_end_of_its_range(scale: str, scales: int) -> None:
    layout = KVLayout("synthetic", (LayerLayout(2, 1, 1, None),), "float32", None)
    keys = torch.tensor([[[896.0], [3.5]], [[2.0**-8], [-(2.0**-16)]]])  # two tokens, two heads
    back, bits = round_trip(Float8(scale=scale), KVChunk([keys], [torch.ones(2, 2, 1)], layout))
    assert bits == 8 * 8 + 16 * 2 * scales
    assert back.keys[0][0].tolist() == [[896.0], [3.5]]  # 448 would be the most without a scale
    # With a scale of 2, the format's smallest number is 2^-8; the second head's own scale is 2^-7.
    assert back.keys[0][1].flatten().tolist() == [2.0**-8, 0.0 if scale == "unit" else -(2.0**-16)]


def test_int8_has_one_scale_a_unit() -> None:
    layout = KVLayout("synthetic", (LayerLayout(1, 2, 2, None),) * 2, "float32", None)
    keys = [torch.tensor([[127.0, 1.4], [-3.6, 0.0]]), torch.tensor([[0.5, -254.0], [3.1, 2.0]])]
    values = [torch.tensor([[1.0, 0.0], [0.0, -1.0]]), torch.zeros(2, 2)]
    back, bits = round_trip(Int8(), KVChunk([k[:, None] for k in keys], [v[:, None] for v in values], layout))
    assert bits == 8 * 16 + 16 * 4
    assert back.keys[0][:, 0].tolist() == [[127, 1], [-4, 0]]  # a scale of 1
    assert back.keys[1][:, 0].tolist() == [[0, -254], [4, 2]]  # a scale of 2
    assert not back.values[1].any()


@pytest.mark.parametrize(
    "method",
    [Uncompressed(), Destroyed(), Float8(), Float8(scale="head"), Int8(), Kivi(4), CacheGen()],
    ids=repr,
)
def test_methods_stay_on_the_device_of_the_chunk_and_survive_zeros(method: Method) -> None:
    chunk = make(5)
    chunk.keys[0][0], chunk.values[0][:] = 0, 2.5
    with torch.device("meta"):  # what is created without a device would end up there, apart from the chunk
        back, bits = method.encode(chunk)
    assert math.isfinite(bits) and method.decode(back).device == chunk.device
    keys, values = method.decode(back).keys[0], method.decode(back).values[0]
    assert bool(torch.isfinite(keys).all()) and bool(torch.isfinite(values).all())
    assert isinstance(method, Kivi) or not keys[0].any(), "whose groups are of several tokens"


@pytest.mark.parametrize("bits", [2, 8])
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


def test_what_no_method_is() -> None:
    for bits, group in ((0, 32), (9, 32), (4, 0)):
        with pytest.raises(InputError, match=r"^bits"):
            Kivi(bits, group)
    with pytest.raises(InputError, match=r"^scale: must be one of none, unit, head, got 'token'"):
        Float8(scale="token")


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
